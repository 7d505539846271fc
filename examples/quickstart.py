"""Four rollouts of a guessing game; one of them fails once and is run again."""

import anyio

from rollout_anyio import (
    Env,
    RetryOnFailure,
    SlotEnvGroupBuilder,
    StepResult,
    TokensWithLogprobs,
    do_group_rollout,
)


class Guess(Env):
    def __init__(self, secret, flaky):
        self.secret, self.flaky = secret, flaky

    async def initial_observation(self):
        return "a number from 0 to 3", None

    async def step(self, action, *, extra=None):
        if self.flaky:
            raise ConnectionError("sandbox went away")
        return StepResult(float(action == self.secret), True, f"it was {self.secret}", None)


class Guesses(SlotEnvGroupBuilder):
    group_size = 4

    def __init__(self):
        self.made = [0] * self.group_size

    async def make_env(self, slot):
        self.made[slot] += 1
        return Guess(secret=slot, flaky=slot == 2 and self.made[slot] == 1)


async def policy(observation, stop, *, max_tokens=None):
    return TokensWithLogprobs(2)


group = anyio.run(do_group_rollout, Guesses(), policy, RetryOnFailure(max_retries=3))
print("rewards", group.get_total_rewards())
for error in group.errors:
    print(f"slot {error.slot}, attempt {error.attempt}: {error.error_type}: {error.error_message}")

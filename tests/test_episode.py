"""The episode loop: turns, budgets, time, and what the environment says about its end."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import anyio
import attrs
import pytest
from anyio import current_time
from hypothesis import given
from hypothesis import strategies as st
from virtual_time import run_virtual

from rollout_anyio import (
    InitialObservationOverflow,
    RolloutLimits,
    RolloutTimeoutError,
    StepResult,
    StopReason,
    TokensWithLogprobs,
    do_single_rollout,
)

pytestmark = pytest.mark.anyio


@attrs.define
class Countdown:
    """An environment of so many turns; each takes a second and adds to the observation."""

    turns: int = 3
    seconds: float = 1.0
    metrics: dict[str, Any] = attrs.Factory(dict)
    rollout_limits: Any = None
    observation: Any = attrs.Factory(lambda: [0] * 10)
    error: BaseException | None = None
    seen: list[Any] = attrs.Factory(list)

    async def initial_observation(self) -> Any:
        return self.observation, ["stop"]

    async def step(self, action: Any, *, extra: Any = None) -> StepResult:
        self.seen.append((action, extra))
        await anyio.sleep(self.seconds)
        if self.error is not None:
            raise self.error
        self.turns -= 1
        if isinstance(self.observation, list):
            self.observation = self.observation + list(action)
        done = self.turns == 0
        metrics = self.metrics if done else {"turn": 1}
        return StepResult(1.0, done, self.observation, ["stop"], metrics, {"log": "x"})


@attrs.define
class Policy:
    """Samples as many tokens as it may, five at the most."""

    seconds: float = 0.0
    error: Exception | None = None
    budgets: list[Any] = attrs.Factory(list)

    async def __call__(self, observation: Any, stop: Any, **options: Any) -> TokensWithLogprobs:
        self.budgets.append(options.get("max_tokens", "not passed"))
        await anyio.sleep(self.seconds)
        if self.error is not None:
            raise self.error
        count = min(5, options.get("max_tokens", 5))
        return TokensWithLogprobs([7] * count, None, "length" if count < 5 else "stop")


async def run(env: Any, policy: Any = None, **limits: Any) -> Any:
    chosen = RolloutLimits(**limits) if limits else None
    return await do_single_rollout(policy or Policy(), env, limits=chosen)


async def test_an_episode_to_its_end() -> None:
    """Transitions in order, the last one done, tokens and stop reason passed to step."""
    env, policy = Countdown(), Policy()
    trajectory = await do_single_rollout(policy, env)  # type: ignore[arg-type]
    assert [t.episode_done for t in trajectory.transitions] == [False, False, True]
    assert trajectory.transitions[1].ob == [0] * 10 + [7] * 5
    assert trajectory.transitions[0].logs == {"log": "x"}
    assert len(trajectory.final_ob) == 25
    assert trajectory.stop_reason is None
    assert env.seen[0] == ([7] * 5, {"stop_reason": "stop"})
    assert policy.budgets == ["not passed"] * 3


async def test_the_environment_says_why_it_ended() -> None:
    """A stop metric on the last step becomes the trajectory's stop reason."""
    trajectory = await run(Countdown(metrics={"a": 1, "stop/tool_stopped": 1.0}))
    assert trajectory.stop_reason == StopReason.TOOL_STOPPED


async def test_an_initial_observation_that_is_too_long() -> None:
    """One empty transition with the overflow's values; nothing is sampled."""

    class Overflowing:
        async def initial_observation(self) -> Any:
            return InitialObservationOverflow(-1.0, {"stop/max_tokens": 1.0}, {"why": "long"})

    policy = Policy()
    trajectory = await run(Overflowing(), policy)
    (transition,) = trajectory.transitions
    assert (transition.reward, transition.episode_done) == (-1.0, True)
    assert transition.logs == {"why": "long"}
    assert trajectory.stop_reason == "max_tokens"
    assert policy.budgets == []


async def test_max_turns() -> None:
    """The trajectory so far, its last transition done and marked."""
    trajectory = await run(Countdown(9), max_turns=2)
    assert [t.episode_done for t in trajectory.transitions] == [False, True]
    assert trajectory.stop_reason is StopReason.MAX_TURNS
    assert trajectory.transitions[-1].metrics == {"turn": 1, "stop/max_turns": 1.0}
    assert (await run(Countdown(2), max_turns=2)).stop_reason is None


async def test_the_budget_of_a_turn_is_the_smallest_that_is_left() -> None:
    """Passed to the policy as max_tokens."""
    policy = Policy()
    await run(Countdown(3), policy, max_turn_tokens=4, max_sampled_tokens=11)
    assert policy.budgets == [4, 4, 3]
    policy = Policy()
    await run(Countdown(3), policy, max_trajectory_tokens=22)
    assert policy.budgets == [12, 7, 2]


async def test_sampled_tokens_used_up() -> None:
    """A remainder of one token ends the episode before sampling."""
    policy = Policy()
    trajectory = await run(Countdown(9), policy, max_sampled_tokens=11)
    assert policy.budgets == [11, 6]
    assert trajectory.stop_reason is StopReason.MAX_SAMPLED_TOKENS


async def test_trajectory_tokens_win() -> None:
    """With both budgets used up the trajectory's is the reason."""
    trajectory = await run(Countdown(9), max_sampled_tokens=5, max_trajectory_tokens=15)
    assert trajectory.stop_reason is StopReason.MAX_TOKENS
    assert len(trajectory.transitions) == 1


async def test_a_prompt_that_leaves_nothing_to_sample() -> None:
    """No transition at all, and the reason."""
    trajectory = await run(Countdown(), max_trajectory_tokens=10)
    assert trajectory.transitions == ()
    assert trajectory.final_ob == [0] * 10
    assert trajectory.stop_reason is StopReason.MAX_TOKENS


async def test_length_attribute_of_an_observation() -> None:
    """Counts instead of len() where there is one."""
    observation = SimpleNamespace(length=8)
    policy = Policy()
    await run(Countdown(1, observation=observation), policy, max_trajectory_tokens=20)
    assert policy.budgets == [12]


async def test_limits_of_the_environment() -> None:
    """Without limits those of the environment count, None being no limit."""
    foreign = SimpleNamespace(max_turns=1, max_sampled_tokens=None)
    assert len((await run(Countdown(rollout_limits=foreign))).transitions) == 1
    assert len((await run(Countdown(rollout_limits=foreign), max_turns=2)).transitions) == 2


async def test_rollout_timeout_is_graceful() -> None:
    """The trajectory so far is kept; a hanging step is cut off."""
    start = current_time()
    trajectory = await run(Countdown(9, metrics={"stop/completed": 1.0}), rollout_timeout=2.5)
    assert current_time() - start == pytest.approx(2.5)
    assert len(trajectory.transitions) == 2
    assert trajectory.transitions[-1].episode_done
    assert trajectory.stop_reason is StopReason.ROLLOUT_TIMEOUT
    assert (await run(Countdown(2), rollout_timeout=2.5)).stop_reason is None


async def test_an_episode_that_comes_back_late_has_timed_out() -> None:
    """What ends after the limit says so, with one stop metric only."""

    class Late(Countdown):
        async def step(self, action: Any, *, extra: Any = None) -> StepResult:
            with anyio.CancelScope(shield=True):
                return await super().step(action, extra=extra)
            raise AssertionError

    trajectory = await run(Late(1, 9.0, {"stop/completed": 1.0, "a": 2}), rollout_timeout=5)
    assert trajectory.stop_reason is StopReason.ROLLOUT_TIMEOUT
    assert trajectory.transitions[-1].metrics == {"a": 2, "stop/rollout_timeout": 1.0}


async def test_an_own_timeout_error_is_not_the_limit() -> None:
    """The environment's TimeoutError comes out, no truncated trajectory."""
    with pytest.raises(TimeoutError, match="mine"):
        await run(Countdown(error=TimeoutError("mine")), rollout_timeout=5)


async def test_a_graceful_limit_never_eats_an_outer_cancellation() -> None:
    """Cancelled from outside, also at the very deadline, there is no trajectory."""
    for after in (2.0, 5.0):
        with anyio.move_on_after(after) as scope:
            await run(Countdown(seconds=60), rollout_timeout=5)
            if after < 5:
                raise AssertionError
        assert scope.cancelled_caught or after == 5.0


@pytest.mark.parametrize("swallows", [False, True])
@pytest.mark.parametrize("sampling", [5, 10])
async def test_the_graceful_limit_comes_first(sampling: float, swallows: bool) -> None:
    """A call that comes back after both limits is the end by the one that passed first."""

    class Late(Policy):
        async def __call__(self, observation: Any, stop: Any, **options: Any) -> Any:
            with anyio.move_on_after(99, shield=not swallows):
                try:
                    await anyio.sleep(20)
                except anyio.get_cancelled_exc_class():
                    with anyio.CancelScope(shield=True):
                        await anyio.sleep(20)
            return TokensWithLogprobs([7], None)

    trajectory = await run(Countdown(), Late(), rollout_timeout=5, sampling_timeout=sampling)
    assert trajectory.stop_reason is StopReason.ROLLOUT_TIMEOUT
    assert trajectory.transitions == ()
    with pytest.raises(RolloutTimeoutError, match=r"it came back \d+ s late"):
        await run(Countdown(), Late(), rollout_timeout=sampling + 1, sampling_timeout=sampling)


async def test_an_overflow_that_comes_back_late() -> None:
    """Its transition is kept, and says that the time was up."""

    class Overflowing:
        async def initial_observation(self) -> Any:
            with anyio.CancelScope(shield=True):
                await anyio.sleep(9)
            return InitialObservationOverflow(-1.0, {"stop/max_tokens": 1.0, "a": 2})

    trajectory = await run(Overflowing(), rollout_timeout=5)
    (transition,) = trajectory.transitions
    assert (transition.reward, transition.episode_done) == (-1.0, True)
    assert transition.metrics == {"a": 2, "stop/rollout_timeout": 1.0}
    assert trajectory.stop_reason is StopReason.ROLLOUT_TIMEOUT


async def test_sampling_timeout_raises() -> None:
    """A sampling call that hangs raises; its own errors pass as themselves."""
    with pytest.raises(RolloutTimeoutError, match="turn 1: sampling took longer than") as caught:
        await run(Countdown(), Policy(60), sampling_timeout=5)
    assert caught.value.__cause__ is None
    with pytest.raises(TimeoutError, match="mine"):
        await run(Countdown(), Policy(1, TimeoutError("mine")), sampling_timeout=5)
    with pytest.raises(RolloutTimeoutError) as caught:
        await run(Countdown(), Policy(5, OSError("late")), sampling_timeout=5)
    assert len((await run(Countdown(), Policy(1), sampling_timeout=5)).transitions) == 3


async def test_sampling_timeout_with_what_was_raised_meanwhile() -> None:
    """An error raised while being cut off is the cause; an interrupt comes out."""

    class Converting(Policy):
        async def __call__(self, observation: Any, stop: Any, **options: Any) -> Any:
            try:
                await anyio.sleep_forever()
            except anyio.get_cancelled_exc_class():
                raise self.error or KeyboardInterrupt from None

    with pytest.raises(RolloutTimeoutError) as caught:
        await run(Countdown(), Converting(error=OSError("x")), sampling_timeout=5)
    assert isinstance(caught.value.__cause__, OSError)
    with pytest.raises(KeyboardInterrupt):
        await run(Countdown(), Converting(), sampling_timeout=5)
    with pytest.raises(OSError, match="x"):
        await run(Countdown(error=OSError("x")), rollout_timeout=5)


async def test_cancelled_while_sampling_under_a_limit() -> None:
    """An outer cancellation passes."""
    with anyio.move_on_after(2) as scope:
        await run(Countdown(), Policy(60), sampling_timeout=5)
    assert scope.cancelled_caught


async def test_outer_cancellation_at_the_deadline_while_winding_down() -> None:
    """A cancellation that comes while the cut-off episode winds down wins."""

    class Slow(Countdown):
        async def step(self, action: Any, *, extra: Any = None) -> StepResult:
            try:
                return await super().step(action, extra=extra)
            finally:
                with anyio.CancelScope(shield=True):
                    await anyio.sleep(9)

    with anyio.move_on_after(8) as scope:
        await run(Slow(seconds=60), rollout_timeout=5)
        raise AssertionError
    assert scope.cancelled_caught


@given(
    turns=st.integers(1, 30),
    max_turns=st.integers(0, 10),
    max_turn_tokens=st.integers(0, 6),
    max_sampled_tokens=st.integers(0, 40),
    max_trajectory_tokens=st.integers(0, 60),
)
def test_no_limit_is_ever_passed(turns: int, **limits: int) -> None:
    """Whatever the limits, none of them is exceeded, and every end has its reason."""
    policy, env = Policy(), Countdown(turns, seconds=0)

    async def main() -> Any:
        return await run(env, policy, **limits)

    trajectory = run_virtual(main, backend="asyncio")
    sampled = [len(t.ac.tokens) for t in trajectory.transitions]
    assert len(sampled) <= (limits["max_turns"] or turns)
    assert max(sampled, default=0) <= (limits["max_turn_tokens"] or 5)
    assert sum(sampled) <= (limits["max_sampled_tokens"] or 10**9)
    assert len(trajectory.final_ob) <= max(limits["max_trajectory_tokens"] or 10**9, 10)
    assert (trajectory.stop_reason is None) == (len(sampled) == turns)


@pytest.mark.parametrize("name", [field.name for field in attrs.fields(RolloutLimits)])
def test_bad_limits(name: str) -> None:
    """Every limit refuses what it cannot be, and names itself."""
    with pytest.raises(ValueError, match=name):
        RolloutLimits(**{name: -1})
    with pytest.raises(TypeError, match=name):
        RolloutLimits(**{name: True})
    unlimited: dict[str, Any] = {name: None}
    assert RolloutLimits(**unlimited) == RolloutLimits()

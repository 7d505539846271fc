"""do_group_rollout: grading, the order at the end, and what goes wrong there."""

from __future__ import annotations

import logging
import math
from typing import Any

import anyio
import attrs
import pytest
from anyio import current_time
from scripted import ScriptedBuilder, ScriptedSlotBuilder, crash, hang, policy, trajectory

from rollout_anyio import (
    Abort,
    ConfigurationError,
    FailFast,
    Failure,
    GroupRewardError,
    Ledger,
    Retry,
    RetryOnFailure,
    RolloutResult,
    RolloutStrategy,
    RolloutTimeoutError,
    Verdict,
    VerdictStrategy,
    do_group_rollout,
)

pytestmark = pytest.mark.anyio


async def test_grading_in_slot_order_with_open_environments() -> None:
    """The grader sees trajectories and plain environments, open, in slot order."""

    async def grade(trajectories: Any, envs: Any) -> Any:
        assert [env.closed for env in envs] == [0, 0, 0, 0]
        return [(float(env.slot), {"slot": env.slot}) for env in envs]

    builder = ScriptedSlotBuilder(grade=grade)
    group = await do_group_rollout(builder, policy)
    assert group.get_total_rewards() == [1.0, 2.0, 3.0, 4.0]
    assert group.metrics[3] == {"slot": 3}
    builder.assert_clean()


@pytest.mark.parametrize(
    ("graded", "match"),
    [
        ([(0.0, {})], "returned 1 rewards for 4 trajectories"),
        ([(0.0, {})] * 3 + [(math.nan, {})], "returned nan at index 3: not finite"),
        ([0.0] * 4, "must return pairs"),
        (None, "must return pairs"),
        ([("x", {})] * 4, "must return pairs"),
    ],
)
async def test_bad_rewards(graded: Any, match: str) -> None:
    """A wrong number of rewards, or no numbers, is an error that closes everything."""

    async def grade(trajectories: Any, envs: Any) -> Any:
        return graded

    builder = ScriptedBuilder(grade=grade)
    with pytest.raises(GroupRewardError, match=match):
        await do_group_rollout(builder, policy)
    builder.assert_clean()
    assert builder.cleanups == 1


async def test_grader_timeout() -> None:
    """The grader's limit names its stage."""

    async def grade(trajectories: Any, envs: Any) -> Any:
        await anyio.sleep_forever()

    builder = ScriptedBuilder(grade=grade)
    with pytest.raises(RolloutTimeoutError, match="stage grade: took longer than grader_timeout=5"):
        await do_group_rollout(builder, policy, grader_timeout=5)
    builder.assert_clean()
    with pytest.raises(ValueError, match="grader_timeout must not be negative"):
        await do_group_rollout(builder, policy, grader_timeout=-1)


async def test_cancelled_while_grading() -> None:
    """Environments are closed and the builder cleaned up, each within its limit."""

    async def grade(trajectories: Any, envs: Any) -> Any:
        await anyio.sleep_forever()

    builder = ScriptedBuilder(grade=grade, close_seconds=2.0, on_cleanup=anyio.sleep_forever)
    start = current_time()
    with anyio.move_on_after(5) as scope:
        await do_group_rollout(builder, policy, RetryOnFailure(cleanup_timeout=10))
    assert scope.cancelled_caught
    assert current_time() - start == pytest.approx(5 + 2 + 10)
    builder.assert_clean()


async def test_cleanup_that_fails_does_not_spoil_the_group() -> None:
    """A failed or hanging cleanup() is an error on record, last."""

    async def fail() -> None:
        raise OSError("x")

    for cleanup, timed_out in ((fail, False), (anyio.sleep_forever, True)):
        builder = ScriptedBuilder(on_cleanup=cleanup)
        group = await do_group_rollout(builder, policy)
        assert [(e.stage, e.timed_out) for e in group.errors] == [("cleanup", timed_out)]


async def test_interrupt_in_cleanup_comes_out() -> None:
    """A KeyboardInterrupt in cleanup() wins over success and over failure."""

    async def interrupt() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        await do_group_rollout(ScriptedBuilder(on_cleanup=interrupt), policy)
    builder = ScriptedBuilder(on_cleanup=interrupt, script={(0, 1): crash(OSError())})
    with pytest.raises(KeyboardInterrupt):
        await do_group_rollout(builder, policy)


async def test_cancelled_while_closing_after_a_failure() -> None:
    """The cancellation wins over the failure under way."""
    builder = ScriptedBuilder(script={(0, 1): crash(OSError())}, on_cleanup=lambda: anyio.sleep(9))
    with anyio.move_on_after(5) as scope:
        await do_group_rollout(builder, policy)
    assert scope.cancelled_caught
    builder.assert_clean()


async def test_a_strategy_of_ones_own() -> None:
    """A RolloutStrategy needs execute() alone; the result's defaults do the rest."""

    class Own(RolloutStrategy):
        async def execute(self, env_group_builder: Any, policy: Any) -> RolloutResult:
            envs = await env_group_builder.make_envs()
            return RolloutResult([trajectory(2.0) for _ in envs], envs, [])

    builder = ScriptedBuilder()
    group = await do_group_rollout(builder, policy, Own())
    assert group.get_total_rewards() == [2.0] * 4
    assert (group.slots, group.group_size) == ((0, 1, 2, 3), 4)
    builder.assert_clean()


@attrs.frozen
class Odd(VerdictStrategy):
    """Decides whatever it is told."""

    verdict: Any = attrs.field(kw_only=True)
    grace: Any = attrs.field(default=None, kw_only=True)

    def decide(self, failure: Failure, ledger: Ledger) -> Verdict:
        if isinstance(self.verdict, Exception):
            raise self.verdict
        verdict: Verdict = self.verdict
        return verdict

    def grace_left(self, ledger: Ledger) -> float | None:
        if isinstance(self.grace, Exception):
            raise self.grace
        return None


async def test_decisions_that_raise_abort_the_group() -> None:
    """A predicate that raises ends the group with its own exception, everything closed."""
    for odd in (Odd(verdict=ZeroDivisionError()), Odd(verdict=None, grace=ZeroDivisionError())):
        builder = ScriptedBuilder(script={(0, 1): crash(OSError(), 0.5)} if not odd.grace else {})
        with pytest.raises(ZeroDivisionError):
            await do_group_rollout(builder, policy, odd)
        builder.assert_clean()


async def test_a_decision_that_is_none() -> None:
    """What is no verdict is a TypeError that says so."""
    builder = ScriptedBuilder(script={(0, 1): crash(OSError())})
    with pytest.raises(TypeError, match=r"decide\(\) returned 'maybe': no verdict"):
        await do_group_rollout(builder, policy, Odd(verdict="maybe"))
    builder.assert_clean()


async def test_the_wait_before_a_retry() -> None:
    """While backing off a slot holds no environment."""
    builder = ScriptedSlotBuilder(size=1, script={(0, 1): crash(OSError())})
    await do_group_rollout(builder, policy, Odd(verdict=Retry(10.0)))
    first, second = builder.envs
    assert second.made_at - first.closed_at == pytest.approx(10)


async def test_cancelled_while_backing_off() -> None:
    """A slot that waits for its retry is cancelled like any other."""
    builder = ScriptedSlotBuilder(size=2, script={(0, 1): crash(OSError()), (1, 1): hang()})
    with anyio.move_on_after(5) as scope:
        await do_group_rollout(builder, policy, Odd(verdict=Retry(100.0)))
    assert scope.cancelled_caught
    builder.assert_clean()


async def test_check_that_refuses_the_group_closes_what_was_made() -> None:
    """The size of a whole-group builder is known only when its environments exist."""

    @attrs.frozen
    class Picky(Odd):
        def check(self, group_size: int) -> None:
            raise ValueError(f"not {group_size}")

    builder = ScriptedBuilder()
    with pytest.raises(ValueError, match="not 4") as caught:
        await do_group_rollout(builder, policy, Picky(verdict=Abort(OSError())))
    assert not hasattr(caught.value, "__notes__")
    builder.assert_clean()


async def test_logging(caplog: pytest.LogCaptureFixture) -> None:
    """Failed attempts and closes are warnings, a spent budget is an error, each with its place."""
    builder = ScriptedSlotBuilder(
        size=1,
        script={(0, attempt): crash(OSError("no\nroute")) for attempt in (1, 2)},
        on_close={(0, 1): crash(ValueError("x" * 300), 0.0)},
    )
    with caplog.at_level(logging.DEBUG, "rollout_anyio"), pytest.raises(OSError, match="route"):
        await do_group_rollout(builder, policy, RetryOnFailure(1))
    logged = [(record.levelname, record.getMessage()) for record in caplog.records]
    assert logged[0] == (
        "WARNING",
        "slot 0, attempt 1, stage rollout failed after 1.000 s: OSError: no route",
    )
    assert logged[1] == ("DEBUG", "slot 0, attempt 1, stage rollout, after 1 s: retry in 0.000 s")
    assert logged[2][0] == "WARNING"
    assert logged[2][1].endswith("xxx...")
    assert logged[4] == (
        "ERROR",
        "slot 0, attempt 2, stage rollout, after 1 s: group cancelled: retry budget of 1 spent",
    )


@pytest.mark.parametrize(
    ("strategy", "match"),
    [(FailFast, r"did you mean FailFast\(\)"), (True, "no rollout strategy: True")],
)
async def test_what_is_no_strategy_is_refused(strategy: Any, match: str) -> None:
    """The class instead of an instance, or a configuration value, is refused before anything."""
    builder = ScriptedBuilder()
    with pytest.raises(ConfigurationError, match=match):
        await do_group_rollout(builder, policy, strategy)
    assert not builder.calls

"""Laws over random plans: what holds always, and what is the same on every backend."""

from __future__ import annotations

import functools
import math
from typing import Any

import anyio
import attrs
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from scripted import (
    ScriptedBuilder,
    ScriptedSlotBuilder,
    convert,
    crash,
    finish,
    hang,
    policy,
    raise_cancelled,
    swallow,
)
from virtual_time import run_virtual

from rollout_anyio import (
    Backoff,
    FailFast,
    MinViableGroup,
    RetryOnFailure,
    do_group_rollout,
)

SIZE = 4


@attrs.frozen
class Plan:
    """One random group; its repr makes it again."""

    slot_builder: bool
    session: bool
    rollouts: tuple[tuple[int, int, str, float], ...]
    closes: tuple[tuple[int, int, str], ...]
    make_seconds: float
    strategy: Any
    cancel_at: float
    ties: bool

    def builder(self) -> ScriptedBuilder:
        kind = ScriptedSlotBuilder if self.slot_builder else ScriptedBuilder
        script = {
            (slot, attempt): _behaviour(what, after + self._apart(slot, attempt))
            for slot, attempt, what, after in self.rollouts
        }
        for slot in range(SIZE):
            for attempt in range(1, 9):
                default = finish(1.0 + self._apart(slot, attempt))
                script.setdefault((slot, attempt), default)
        on_close = {(slot, attempt): _behaviour(w, 0.03) for slot, attempt, w in self.closes}
        return kind(
            size=SIZE,
            session=self.session,
            script=script,
            on_close=on_close,
            make_seconds=self.make_seconds,
            close_seconds=0.0 if self.ties else 0.0173,
        )

    def _apart(self, slot: int, attempt: int) -> float:
        """Without ties no two attempts do anything at the same moment."""
        return 0.0 if self.ties else 0.001 * slot + 0.0001 * attempt


def _behaviour(what: str, after: float) -> Any:
    match what:
        case "finish":
            return finish(after)
        case "crash":
            return crash(ConnectionError(f"at {after:.4f}"), after)
        case "timeout":
            return crash(TimeoutError("mine"), after)
        case "cancelled":
            return raise_cancelled(after)
        case "swallow":
            return swallow(2, 0.01)
        case "convert":
            return convert(KeyError("converted"))
        case _:
            return hang()


KINDS = ["finish", "crash", "crash", "timeout", "cancelled", "swallow", "convert", "hang"]
LIMITS: dict[str, Any] = {
    "cleanup_timeout": 2,
    "per_rollout_timeout": 4.00007,
    "setup_timeout": 3.00003,
}
STRATEGIES = st.one_of(
    st.just(FailFast(**LIMITS)),
    st.builds(
        lambda n, wait: RetryOnFailure(n, backoff=Backoff(wait, jitter=0), **LIMITS),
        st.integers(0, 5),
        st.sampled_from([0, 0.1007]),
    ),
    st.builds(
        lambda floor, n, grace: MinViableGroup(floor, n, grace=grace, **LIMITS),
        st.integers(1, SIZE),
        st.integers(0, 4),
        st.sampled_from([None, 0, 0.70009]),
    ),
)
PLANS = functools.partial(
    st.builds,
    Plan,
    st.booleans(),
    st.booleans(),
    st.lists(
        st.tuples(
            st.integers(0, SIZE - 1),
            st.integers(1, 3),
            st.sampled_from(KINDS),
            st.sampled_from([0.1, 0.25, 1.0, 3.3]),
        ),
        max_size=6,
    ).map(tuple),
    st.lists(
        st.tuples(
            st.integers(0, SIZE - 1),
            st.integers(1, 2),
            st.sampled_from(["crash", "hang", "cancelled"]),
        ),
        max_size=2,
    ).map(tuple),
    st.sampled_from([0.0, 0.51]),
    STRATEGIES,
    st.sampled_from(
        [math.inf, math.inf, 0.0, 0.1337, 0.51, 0.52, 0.5371, 1.0, 1.1211, 1.53, 4.0631]
    ),
)
LAWS = settings(
    max_examples=400, deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True
)


async def _run(plan: Plan) -> tuple[Any, ...]:
    builder = plan.builder()
    outcome: tuple[Any, ...] = ()
    with anyio.CancelScope() as scope:
        start = anyio.current_time()
        scope.deadline = start + plan.cancel_at
        try:
            group = await do_group_rollout(builder, policy, plan.strategy)
        except Exception as error:
            outcome = ("raised", type(error).__name__, str(error))
        else:
            # Closes side by side end in one instant, in no order.
            errors = sorted(
                (e.slot, e.attempt or 0, e.stage, e.error_type, e.timed_out) for e in group.errors
            )
            outcome = ("group", group.slots, group.missing, errors)
            assert list(group.slots) == sorted(group.slots)
            assert len(group.slots) + len(group.missing) == SIZE
            assert [t.transitions[0].ob for t in group.trajectories] == list(group.slots)
    if scope.cancelled_caught:
        outcome = ("cancelled",)
        assert anyio.current_time() - scope.deadline <= 3 * 2 + 0.1
    builder.assert_clean()
    builder.assert_one_env_per_slot()
    assert builder.cleanups == 1
    started = sum(builder.attempts.values())
    assert started <= SIZE + getattr(plan.strategy, "max_retries", 0)
    return outcome


@LAWS
@given(PLANS(st.just(False)))
def test_invariants_and_the_same_outcome_on_both_backends(plan: Plan) -> None:
    """Nothing runs, all is closed once, no budget is overrun; asyncio and trio agree."""
    outcomes = [run_virtual(_run, plan, backend=backend) for backend in ("asyncio", "trio")]
    comparable = [_without_backend(outcome) for outcome in outcomes]
    assert comparable[0] == comparable[1]


@LAWS
@given(PLANS(st.just(True)))
def test_invariants_when_much_falls_on_one_instant(plan: Plan) -> None:
    """With ties the outcome is the backend's choice, the invariants are not."""
    for backend in ("asyncio", "trio"):
        run_virtual(_run, plan, backend=backend)


def _without_backend(outcome: tuple[Any, ...]) -> tuple[Any, ...]:
    if outcome[0] == "raised":
        text = outcome[2].replace("CancelledError", "Cancelled")
        return (*outcome[:2], text)
    return outcome


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_a_day_takes_no_time(backend: str) -> None:
    """A hang of a day is over at once in virtual time."""
    builder = ScriptedBuilder(script={(0, 1): hang()})
    strategy = RetryOnFailure(per_rollout_timeout=86400)
    group = run_virtual(do_group_rollout, builder, policy, strategy, backend=backend)
    assert group.errors[0].elapsed == pytest.approx(86400)

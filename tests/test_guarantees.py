"""G1 to G11, each on both backends, both kinds of builder and both kinds of environment."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import anyio
import attrs
import pytest
from anyio import current_time
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
    trajectory,
)

from rollout_anyio import (
    Backoff,
    EmptyGroupError,
    FailFast,
    GroupNotViable,
    GroupTimeoutError,
    MinViableGroup,
    RetryOnFailure,
    RolloutCancelledError,
    RolloutTimeoutError,
    do_group_rollout,
)

pytestmark = pytest.mark.anyio

Make = Callable[..., ScriptedBuilder]

KINDS = {
    "group-plain": (ScriptedBuilder, False),
    "group-session": (ScriptedBuilder, True),
    "slot-plain": (ScriptedSlotBuilder, False),
    "slot-session": (ScriptedSlotBuilder, True),
}


@pytest.fixture(params=list(KINDS.values()), ids=list(KINDS))
def make(request: pytest.FixtureRequest) -> Make:
    kind: type[ScriptedBuilder] = request.param[0]
    session = request.param[1]

    def build(**kwargs: Any) -> ScriptedBuilder:
        return kind(session=session, **kwargs)

    return build


def boom(text: str = "boom") -> ConnectionError:
    return ConnectionError(text)


async def close(builder: ScriptedBuilder, envs: Any) -> None:
    if not builder.session:
        for env in envs:
            await env.aclose()


async def test_g1_fail_fast_leaves_no_rollout_running(make: Make) -> None:
    """The first failure cancels the siblings and is raised when they have ended."""
    builder = make(size=8, script={(3, 1): crash(boom()), (4, 1): hang()})
    with pytest.raises(ConnectionError):
        await FailFast().execute(builder, policy)
    builder.assert_clean()
    assert current_time() == pytest.approx(builder.envs[0].made_at + 1)


@pytest.mark.parametrize("after", [0.0, 0.25, 0.5, 1.0, 1.25, 2.0, 2.5])
async def test_g1_g2_outer_cancellation_leaves_nothing(make: Make, after: float) -> None:
    """Cancelled while making, entering, running, retrying or closing, all is closed."""
    builder = make(
        make_seconds=0.5,
        close_seconds=1.0,
        script={(0, 1): crash(boom(), 0.5), (1, 1): hang(), (2, 1): finish(0.25)},
    )
    with anyio.move_on_after(after) as scope:
        await do_group_rollout(builder, policy, RetryOnFailure(cleanup_timeout=5))
    assert scope.cancelled_caught
    builder.assert_clean()
    builder.assert_one_env_per_slot()
    assert builder.cleanups == 1


async def test_g2_result_of_execute_is_open_and_the_callers(make: Make) -> None:
    """Plain environments of a result are open; sessions are closed; failed ones always."""
    builder = make(script={(1, 1): crash(boom())})
    result = await RetryOnFailure().execute(builder, policy)
    assert [env.slot for env in result.envs] == [0, 1, 2, 3]
    builder.assert_clean(kept=() if builder.session else result.envs)


async def test_g2_failed_environment_is_closed_before_the_group_ends(make: Make) -> None:
    """A failed attempt's environment goes down when the attempt ends."""
    builder = make(script={(1, 1): crash(boom()), (0, 1): finish(50)})
    await do_group_rollout(builder, policy, RetryOnFailure())
    failed = next(env for env in builder.envs if env.slot == 1 and env.attempt == 1)
    assert failed.closed_at == pytest.approx(failed.made_at + 1)


async def test_g3_a_close_that_hangs_is_cut_and_recorded(make: Make) -> None:
    """A hanging close ends after cleanup_timeout and does not spoil the success."""
    builder = make(on_close={(2, 1): hang()})
    group = await do_group_rollout(builder, policy, FailFast(cleanup_timeout=7))
    builder.assert_clean()
    (error,) = group.errors
    assert (error.slot, error.stage, error.timed_out) == (2, "close", True)
    assert len(group.trajectories) == 4


async def test_g3_a_close_that_raises_masks_nothing(make: Make) -> None:
    """The failure comes out, the failed close is in its note."""
    builder = make(script={(2, 1): crash(boom())}, on_close={(2, 1): crash(OSError("gone"), 0.0)})
    with pytest.raises(ConnectionError) as caught:
        await FailFast().execute(builder, policy)
    assert "slot 2 close OSError: gone" in caught.value.__notes__[0]
    builder.assert_clean()


async def test_g3_session_says_goodbye_through_its_own_tasks() -> None:
    """Cancelled from outside, a session's task group is alive until the session is left."""
    builder = ScriptedSlotBuilder(session=True, close_seconds=1.0, script={(0, 1): hang()})
    with anyio.move_on_after(0.5):
        await do_group_rollout(builder, policy)
    sessions: list[Any] = list(builder.envs)
    assert [env.said_goodbye for env in sessions] == [True] * 4


async def test_g4_one_environment_per_slot(make: Make) -> None:
    """A retry starts only when the failed environment is closed."""
    script = {(slot, attempt): crash(boom()) for slot in range(4) for attempt in (1, 2)}
    builder = make(script=script, close_seconds=3.0)
    group = await do_group_rollout(builder, policy, RetryOnFailure(max_retries=8))
    assert len(group.errors) == 8
    builder.assert_one_env_per_slot()
    builder.assert_clean()


async def test_g4_group_builder_makes_one_group_for_failures_at_once() -> None:
    """Slots that fail together share the fresh group; its unused members are closed."""
    builder = ScriptedBuilder(
        size=4, make_seconds=1.0, script={(1, 1): crash(boom()), (2, 1): crash(boom())}
    )
    await do_group_rollout(builder, policy, RetryOnFailure())
    assert builder.calls == 2
    builder.assert_clean()


async def test_g4_superseded_spares_are_closed_at_once() -> None:
    """Of two spares for a slot the older one goes when the newer comes."""
    builder = ScriptedBuilder(
        size=3,
        script={
            (0, 1): crash(boom()),
            (0, 2): crash(boom()),
            (1, 1): finish(9),
            (2, 1): finish(1.5),
        },
    )
    await do_group_rollout(builder, policy, RetryOnFailure())
    builder.assert_clean()
    spares = [env for env in builder.envs if env.slot == 1 and not env.attempt]
    assert sorted(env.closed_at - env.made_at for env in spares) == [
        pytest.approx(1.0),
        pytest.approx(7.0),
    ]


async def test_g5_the_failing_exception_itself_is_raised(make: Make) -> None:
    """Same object, no group around it, no context, one note with the numbers."""
    error = boom()
    builder = make(
        size=6,
        script={
            (5, 1): crash(boom("a")),
            (5, 2): crash(boom("b")),
            (1, 1): crash(boom("c"), 0.5),
            (5, 3): crash(error),
            (0, 1): hang(),
        },
    )
    with pytest.raises(ConnectionError) as caught:
        await RetryOnFailure().execute(builder, policy)
    assert caught.value is error
    assert error.__context__ is None
    assert error.__notes__ == [
        (
            "rollout_anyio: slot 5, attempt 3, stage rollout, after 1 s; retry budget of 3 spent;"
            " 4 failures in this group: slot 1 ConnectionError: c, slot 5 ConnectionError: a,"
            " slot 5 ConnectionError: b, and 1 more"
        )
    ]


async def test_g5_an_exception_without_notes_is_raised_without() -> None:
    """A frozen exception comes out as it is."""

    @attrs.frozen(eq=False, slots=False)
    class Frozen(Exception):
        code: int

        def add_note(self, note: str) -> None:
            raise attrs.exceptions.FrozenInstanceError

    with pytest.raises(Frozen) as caught:
        await FailFast().execute(ScriptedBuilder(script={(0, 1): crash(Frozen(3))}), policy)
    assert caught.value.code == 3
    assert not hasattr(caught.value, "__notes__")


async def test_g6_cancellation_wins_over_a_failure_in_the_same_tick(make: Make) -> None:
    """A slot that fails in the moment of an outer cancellation does not hide it."""
    scope = anyio.CancelScope()

    async def cancel_and_fail(env: Any) -> Any:
        await anyio.sleep(1)
        scope.cancel()
        raise boom()

    builder = make(script={(1, 1): cancel_and_fail})
    with scope:
        await do_group_rollout(builder, policy, FailFast())
        raise AssertionError
    assert scope.cancelled_caught
    builder.assert_clean()


async def test_g6_cancelled_within_twice_the_cleanup_timeout(make: Make) -> None:
    """With everything hanging, execute ends within 2 and the group within 3 limits."""

    async def never() -> None:
        with anyio.CancelScope(shield=True):
            await anyio.sleep(9)

    for start in (0.25, 0.75, 2.0):
        builder = make(
            make_seconds=0.5,
            script={(0, 1): crash(boom()), (1, 1): hang(), (2, 1): finish(0.5)},
            on_close={(slot, attempt): hang() for slot in range(4) for attempt in range(3)},
            on_make_env={(0, 2): anyio.sleep_forever},
            on_make={2: anyio.sleep_forever},
            on_cleanup=anyio.sleep_forever,
        )
        cancelled_at = current_time() + start
        with anyio.CancelScope(deadline=cancelled_at):
            await do_group_rollout(builder, policy, RetryOnFailure(cleanup_timeout=10))
        assert current_time() - cancelled_at <= 30
        assert builder.running == 0


async def test_g7_an_unasked_cancelled_error_is_a_failure(make: Make) -> None:
    """A rollout that raises the backend's cancelled error is retried like any other."""
    builder = make(script={(2, 1): raise_cancelled()})
    group = await do_group_rollout(builder, policy, RetryOnFailure())
    assert [(error.error_type, error.slot) for error in group.errors] == [
        ("RolloutCancelledError", 2)
    ]
    assert len(group.trajectories) == 4
    builder.assert_clean()


async def test_g7_unasked_in_every_other_call(make: Make) -> None:
    """Making, grading, closing and cleaning up may raise it too; it is never silence."""
    stray = raise_cancelled(0.0)

    async def call(*_: Any) -> Any:
        return await stray(None)  # type: ignore[arg-type]

    slots = isinstance(make(), ScriptedSlotBuilder)
    builder = make(on_make_env={(1, 1): call})
    if slots:
        group = await do_group_rollout(builder, policy, RetryOnFailure())
        assert [error.stage for error in group.errors] == ["make_env"]
    builder = make(on_make={1: call})
    if not slots:
        with pytest.raises(RolloutCancelledError):
            await do_group_rollout(builder, policy)
    builder = make(grade=call)
    with pytest.raises(RolloutCancelledError, match="stage grade"):
        await do_group_rollout(builder, policy)
    builder.assert_clean()
    builder = make(on_close={(1, 1): stray}, on_cleanup=call)
    group = await do_group_rollout(builder, policy)
    assert [error.stage for error in group.errors] == ["close", "cleanup"]


async def test_g8_an_own_timeout_error_is_no_deadline(make: Make) -> None:
    """An environment's TimeoutError is a failure that did not time out."""
    builder = make(script={(0, 1): crash(TimeoutError("mine")), (1, 1): hang()})
    group = await do_group_rollout(builder, policy, RetryOnFailure(per_rollout_timeout=5))
    assert [(e.error_type, e.timed_out, e.slot) for e in group.errors] == [
        ("TimeoutError", False, 0),
        ("RolloutTimeoutError", True, 1),
    ]


@pytest.mark.parametrize(
    "late", [swallow(), swallow(3), swallow(1, 4.0), finish(5.0), convert(KeyError("x"))]
)
async def test_g8_late_is_late(make: Make, late: Any) -> None:
    """What comes back after the deadline has timed out, and the message says so."""
    builder = make(script={(1, 1): late})
    with pytest.raises(RolloutTimeoutError) as caught:
        await do_group_rollout(builder, policy, FailFast(per_rollout_timeout=5))
    message = str(caught.value)
    assert "slot 1, attempt 1, stage rollout: took longer than per_rollout_timeout=5 s" in message
    if late.__qualname__.startswith(("swallow", "convert")):
        assert "swallowed its cancellation, or the event loop was blocked" in message
    assert isinstance(caught.value.__cause__, (KeyError, type(None)))
    builder.assert_clean()


async def test_g8_group_timeout_and_grace_are_late_too(make: Make) -> None:
    """A straggler that swallows the end of the group does not count."""
    builder = make(script={(1, 1): swallow(1, 2.0)})
    with pytest.raises(GroupTimeoutError, match="slot 1, attempt 1 came back 2 s late"):
        await do_group_rollout(builder, policy, FailFast(group_timeout=5))
    builder.assert_clean()
    builder = make(script={(1, 1): swallow(1, 2.0)})
    group = await do_group_rollout(builder, policy, MinViableGroup(grace=1))
    assert group.missing == ((1, "cut_off"),)
    builder.assert_clean()


async def test_g8_setup_timeout(make: Make) -> None:
    """A creation, or an entry, that is too slow fails its attempt, not the group."""
    slots = isinstance(make(), ScriptedSlotBuilder)
    if slots:
        builder = make(on_make_env={(1, 1): anyio.sleep_forever})
    else:
        builder = make(script={(1, 1): crash(boom())}, on_make={2: anyio.sleep_forever})
    group = await do_group_rollout(builder, policy, RetryOnFailure(setup_timeout=5))
    assert [error.stage for error in group.errors if error.timed_out] == [
        "make_env" if slots else "make_envs"
    ]
    builder.assert_clean()


async def test_g8_late_creations_are_closed(make: Make) -> None:
    """What is made after the limit is closed and never used."""

    async def slow() -> None:
        with anyio.CancelScope(shield=True):
            await anyio.sleep(9)

    builder = make(on_make_env={(1, 1): slow}, on_make={1: slow})
    if isinstance(builder, ScriptedSlotBuilder):
        group = await do_group_rollout(builder, policy, RetryOnFailure(setup_timeout=5))
        assert group.errors[0].timed_out
    else:
        with pytest.raises(RolloutTimeoutError, match="make_envs: took longer than setup_timeout"):
            await do_group_rollout(builder, policy, RetryOnFailure(setup_timeout=5))
    assert builder.running == 0
    assert all(env.closed or builder.session for env in builder.envs)


async def test_g8_entering_too_slowly() -> None:
    """An entry that hangs is cut after setup_timeout; one that comes late is left, torn."""

    async def stubborn(env: Any) -> None:
        if env.serial == 2:
            with anyio.CancelScope(shield=True):
                await anyio.sleep(9)

    async def once(env: Any) -> None:
        if env.serial == 1:
            await anyio.sleep_forever()

    builder = ScriptedBuilder(session=True, on_enter={1: once, 2: stubborn})
    group = await do_group_rollout(builder, policy, RetryOnFailure(setup_timeout=5))
    assert [(error.slot, error.stage, error.timed_out) for error in group.errors] == [
        (1, "make_env", True),
        (2, "make_env", True),
        (2, "close", False),
    ]
    builder.assert_clean()


async def test_g9_slot_order(make: Make) -> None:
    """Results are in slot order, and a retry of slot i runs environment i."""
    script = {(slot, 1): finish(9 - slot, reward=slot) for slot in range(6)}
    script[(3, 1)] = crash(boom())
    script[(3, 2)] = finish(0.5, reward=3)
    group = await do_group_rollout(make(size=6, script=script), policy, RetryOnFailure())
    assert group.get_total_rewards() == [0, 1, 2, 3, 4, 5]
    assert [t.transitions[0].ob for t in group.trajectories] == [0, 1, 2, 3, 4, 5]


async def test_g10_a_slow_creation_delays_no_other_slot() -> None:
    """Retries start at once, each in its own slot's task."""

    async def slow() -> None:
        await anyio.sleep(100)

    builder = ScriptedSlotBuilder(
        script={(0, 1): crash(boom()), (1, 1): crash(boom())}, on_make_env={(0, 2): slow}
    )
    await do_group_rollout(builder, policy, RetryOnFailure())
    retried = next(env for env in builder.envs if env.slot == 1 and env.attempt == 2)
    assert retried.made_at - builder.envs[0].made_at == pytest.approx(1)
    assert len(builder.envs) == 6


async def test_g11_nothing_stands_in_for_a_missing_slot(make: Make) -> None:
    """A dropped slot is missing with its reason; no reward takes its place."""
    builder = make(size=4, script={(1, 1): crash(boom(), 2.0)})
    group = await do_group_rollout(builder, policy, MinViableGroup(min_successful=3))
    assert group.slots == (0, 2, 3)
    assert group.missing == ((1, "failed"),)
    assert len(group.final_rewards) == 3
    builder.assert_clean()


async def test_min_viable_group_aborts_as_soon_as_the_floor_is_out_of_reach(make: Make) -> None:
    """The group ends with the records of its failures, the last one as the cause."""
    last = boom("last")
    builder = make(
        size=4,
        script={(0, 1): crash(boom("first")), (1, 1): crash(last, 2.0), (2, 1): hang()},
    )
    with pytest.raises(GroupNotViable) as caught:
        await do_group_rollout(builder, policy, MinViableGroup(max_retries=0))
    assert caught.value.__cause__ is last
    assert [error.error_message for error in caught.value.errors] == ["first", "last"]
    assert "retry budget of 0 spent" in caught.value.__notes__[0]
    builder.assert_clean()


async def test_grace_zero_cuts_at_once(make: Make) -> None:
    """With the floor met and no grace, those still running are cut off."""
    builder = make(script={(0, 1): hang(), (1, 1): convert(ValueError()), (2, 1): finish(2)})
    start = current_time()
    group = await do_group_rollout(builder, policy, MinViableGroup(2, grace=0))
    assert group.missing == ((0, "cut_off"), (1, "cut_off"))
    assert group.errors == ()
    assert current_time() - start == pytest.approx(2)
    builder.assert_clean()


async def test_group_timeout_with_the_floor_met_cuts_off(make: Make) -> None:
    """group_timeout acts like grace once the group is viable."""
    builder = make(script={(0, 1): hang()})
    group = await do_group_rollout(builder, policy, MinViableGroup(2, group_timeout=30))
    assert group.missing == ((0, "cut_off"),)
    builder.assert_clean()


async def test_group_timeout_while_the_environments_are_made(make: Make) -> None:
    """The limit covers the making too."""
    builder = make(make_seconds=math.inf)
    with pytest.raises(GroupTimeoutError, match="group_timeout=30 s passed"):
        await do_group_rollout(builder, policy, FailFast(group_timeout=30, cleanup_timeout=1))
    builder.assert_clean()


@pytest.mark.parametrize(
    "kind", [KeyboardInterrupt, SystemExit, GeneratorExit, type("Panic", (BaseException,), {})]
)
async def test_base_exceptions_end_the_group_as_themselves(make: Make, kind: Any) -> None:
    """What is no Exception is never retried, and comes out itself, everything closed."""
    error = kind()
    builder = make(script={(1, 1): crash(error), (2, 1): hang()})
    with pytest.raises(kind) as caught:
        await do_group_rollout(builder, policy, RetryOnFailure())
    assert caught.value is error
    builder.assert_clean()
    assert builder.cleanups == 1


async def test_base_exceptions_in_a_close_come_out(make: Make) -> None:
    """An interrupt in aclose is not taken for a failed close."""
    builder = make(on_close={(1, 1): crash(KeyboardInterrupt(), 0.0)})
    with pytest.raises(KeyboardInterrupt):
        await do_group_rollout(builder, policy)
    builder.assert_clean()


async def test_an_interrupt_in_a_group_is_taken_out_of_it(make: Make) -> None:
    """Ctrl-C that reached a rollout's own task group is a KeyboardInterrupt all the same."""
    nested = BaseExceptionGroup("outer", [BaseExceptionGroup("inner", [KeyboardInterrupt()])])
    with pytest.raises(KeyboardInterrupt):
        await do_group_rollout(make(script={(1, 1): crash(nested)}), policy)


async def test_an_exception_group_of_the_rollout_stays_as_it_is(make: Make) -> None:
    """A group that the rollout raised is its failure, not unwrapped."""
    error = ExceptionGroup("mine", [boom()])
    with pytest.raises(ExceptionGroup) as caught:
        await do_group_rollout(make(script={(1, 1): crash(error)}), policy)
    assert caught.value is error


async def test_two_failures_in_one_tick_are_both_looked_at(make: Make) -> None:
    """Both failures are on record, one of them is raised."""
    gate = anyio.Event()

    async def fail(env: Any) -> Any:
        await gate.wait()
        raise boom(str(env.slot))

    async def open_gate(env: Any) -> Any:
        await anyio.sleep(1)
        gate.set()
        return trajectory()

    builder = make(script={(0, 1): fail, (1, 1): fail, (2, 1): open_gate})
    with pytest.raises(ConnectionError) as caught:
        await FailFast().execute(builder, policy)
    assert "2 failures in this group" in caught.value.__notes__[0]
    builder.assert_clean()


async def test_grader_and_cleanup_both_raise(make: Make) -> None:
    """The grader's error comes out, the failed cleanup is noted on it."""

    async def bad_grade(trajectories: Any, envs: Any) -> Any:
        raise ValueError("grade")

    async def bad_cleanup() -> None:
        raise OSError("cleanup")

    builder = make(grade=bad_grade, on_cleanup=bad_cleanup)
    with pytest.raises(ValueError, match="grade") as caught:
        await do_group_rollout(builder, policy)
    assert caught.value.__notes__ == ["rollout_anyio: cleanup failed too: OSError: cleanup"]
    builder.assert_clean()


async def test_own_scope_of_a_session_that_ends_its_rollout() -> None:
    """What leaving raises is the failure; if it raises nothing, RolloutCancelledError."""
    builder = ScriptedSlotBuilder(
        session=True, dying_pumps={1: ConnectionError("pump died"), 2: None}
    )
    group = await do_group_rollout(builder, policy, RetryOnFailure())
    assert {error.slot: error.error_type for error in group.errors} == {
        1: "ExceptionGroup",
        2: "RolloutCancelledError",
    }
    assert "pump died" in next(e for e in group.errors if e.slot == 1).traceback
    builder.assert_clean()


async def test_retry_that_gets_too_few_environments_is_a_failure() -> None:
    """A fresh group without the slot's environment costs an attempt, with a clear message."""
    builder = ScriptedBuilder(size=4, script={(3, 1): crash(boom())}, returns={2: 2, 3: 0})
    group = await do_group_rollout(builder, policy, RetryOnFailure())
    assert [error.error_type for error in group.errors][1:] == ["EmptyGroupError"] * 2
    assert "returned 2 environments on a retry, none of them for slot 3 of 4" in (
        group.errors[1].error_message
    )
    builder.assert_clean()


async def test_an_empty_group_is_an_error(make: Make) -> None:
    """No environment at all is an EmptyGroupError before any rollout."""
    with pytest.raises(EmptyGroupError):
        await do_group_rollout(make(size=0), policy)


async def test_more_environments_than_slots_on_a_retry_are_closed() -> None:
    """What no slot wants is closed at once."""
    builder = ScriptedBuilder(size=2, script={(1, 1): crash(boom())}, returns={2: 5})
    await do_group_rollout(builder, policy, RetryOnFailure())
    builder.assert_clean()


async def test_a_bare_foreign_builder_works() -> None:
    """make_envs is all that a builder needs; environments need no aclose."""

    class Env:
        async def initial_observation(self) -> Any:
            return "ob", None

        async def step(self, action: Any, *, extra: Any = None) -> Any:
            from rollout_anyio import StepResult

            return StepResult(1.0, True, "end", None)

    class Builder:
        async def make_envs(self) -> list[Env]:
            return [Env(), Env()]

    group = await do_group_rollout(Builder(), policy)
    assert group.get_total_rewards() == [1.0, 1.0]
    assert trajectory().transitions[0].reward == 1.0


async def test_a_retry_whose_environment_cannot_be_made_leaves_no_sibling_running(
    make: Make,
) -> None:
    """Making fails again and again: the budget is spent, and the others are cancelled."""

    async def down() -> None:
        raise OSError("no more sandboxes")

    builder = make(
        script={(0, 1): crash(boom()), (1, 1): hang()},
        on_make_env={(0, 2): down, (0, 3): down},
        on_make={2: down, 3: down},
    )
    start = current_time()
    with pytest.raises(OSError, match="no more sandboxes"):
        await do_group_rollout(builder, policy, RetryOnFailure(max_retries=2))
    builder.assert_clean()
    assert current_time() - start == pytest.approx(1)


async def test_only_running_counts_against_the_rollouts_limit(make: Make) -> None:
    """Making, backing off and closing take longer than the limit, and nothing times out."""
    builder = make(make_seconds=5.0, close_seconds=7.0, script={(1, 1): crash(boom())})
    strategy = RetryOnFailure(per_rollout_timeout=2, backoff=Backoff(9, jitter=0))
    group = await do_group_rollout(builder, policy, strategy)
    assert [error.error_type for error in group.errors] == ["ConnectionError"]
    assert len(group.trajectories) == 4

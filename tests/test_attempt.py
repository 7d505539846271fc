"""Corners of one attempt: environments that misbehave, groups that end at odd moments."""

from __future__ import annotations

import gc
import weakref
from typing import Any, Self

import anyio
import pytest
from scripted import (
    OneStepEnv,
    ScriptedBuilder,
    ScriptedEnv,
    ScriptedSlotBuilder,
    crash,
    finish,
    hang,
    policy,
)

from rollout_anyio import (
    FailFast,
    MinViableGroup,
    RetryOnFailure,
    RolloutTimeoutError,
    do_group_rollout,
)

pytestmark = pytest.mark.anyio


async def test_environments_without_aclose_may_fail() -> None:
    """There is nothing to close, and the failure comes out."""

    class Failing(OneStepEnv):
        async def step(self, action: Any, *, extra: Any = None) -> Any:
            raise ConnectionError("x")

    class Builder:
        async def make_envs(self) -> Any:
            return [Failing()]

    with pytest.raises(ConnectionError):
        await do_group_rollout(Builder(), policy)


@pytest.mark.parametrize("session", [False, True])
async def test_make_envs_that_swallows_the_end_of_the_group(session: bool) -> None:
    """What a retry's make_envs() brings after the end is closed, never entered or run."""

    async def stubborn() -> None:
        try:
            await anyio.sleep_forever()
        except anyio.get_cancelled_exc_class():
            return

    builder = ScriptedBuilder(
        session=session,
        script={(0, 1): crash(ConnectionError()), (1, 1): crash(ValueError("late"), 3.0)},
        on_make={2: stubborn},
    )
    with pytest.raises(ValueError, match="late"):
        await do_group_rollout(builder, policy, RetryOnFailure(1))
    assert max(env.attempt for env in builder.envs) == 1
    builder.assert_clean()


async def test_an_environment_that_corrupts_the_scope_stack_is_not_silent() -> None:
    """A session that leaves a scope open on the stack ends in an error, not in a result."""

    class Careless(OneStepEnv):
        async def __aenter__(self) -> Self:
            self.scope = anyio.CancelScope()
            self.scope.__enter__()
            return self

        async def __aexit__(self, *exc_info: object) -> None:
            await anyio.lowlevel.checkpoint()

    class Builder:
        async def make_envs(self) -> Any:
            return [Careless()]

    with pytest.raises((ExceptionGroup, RuntimeError)):
        await do_group_rollout(Builder(), policy)


async def test_two_interrupts_at_once() -> None:
    """The first of two interrupts comes out."""
    gate = anyio.Event()

    async def interrupt(env: ScriptedEnv) -> Any:
        await gate.wait()
        raise SystemExit(env.slot)

    async def release(env: ScriptedEnv) -> Any:
        gate.set()

    builder = ScriptedBuilder(script={(0, 1): interrupt, (1, 1): interrupt, (2, 1): release})
    with pytest.raises(SystemExit):
        await do_group_rollout(builder, policy)
    builder.assert_clean()


async def test_a_failure_inside_a_group_of_the_rollouts_own_tasks() -> None:
    """A rollout's own task group that fails while it is cut off is late, with its cause."""

    async def behave(env: ScriptedEnv) -> Any:
        async def fail_when_cancelled() -> None:
            try:
                await anyio.sleep_forever()
            finally:
                raise ConnectionError("while cancelled")

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(fail_when_cancelled)
            tasks.start_soon(anyio.sleep_forever)

    builder = ScriptedBuilder(script={(0, 1): behave})
    group = await do_group_rollout(builder, policy, RetryOnFailure(per_rollout_timeout=5))
    assert [(e.error_type, e.timed_out) for e in group.errors] == [("RolloutTimeoutError", True)]
    assert "while cancelled" in group.errors[0].traceback
    builder.assert_clean()


async def test_the_same_when_the_group_ends() -> None:
    """Cancelled by the group's end, such a rollout hides nothing and breaks nothing."""

    async def behave(env: ScriptedEnv) -> Any:
        async def fail_when_cancelled() -> None:
            try:
                await anyio.sleep_forever()
            finally:
                raise ConnectionError("while cancelled")

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(fail_when_cancelled)
            tasks.start_soon(anyio.sleep_forever)

    for session in (False, True):
        script = {(0, 1): behave, (1, 1): crash(ValueError("first"), 2.0)}
        builder = ScriptedBuilder(session=session, script=script)
        with pytest.raises(ValueError, match="first"):
            await do_group_rollout(builder, policy)
        builder.assert_clean()
        builder = ScriptedBuilder(session=session, script={(0, 1): behave})
        with anyio.move_on_after(5) as scope:
            await do_group_rollout(builder, policy)
        assert scope.cancelled_caught
        builder.assert_clean()


async def test_failed_rollouts_are_not_kept_alive() -> None:
    """A failure leaves a record; the exception and the environments it holds are let go."""
    failed: list[weakref.ref[Any]] = []

    class Weak(OneStepEnv):
        def __init__(self, bad: bool) -> None:
            self.bad = bad

        async def step(self, action: Any, *, extra: Any = None) -> Any:
            await anyio.lowlevel.checkpoint()
            if self.bad:
                failed.append(weakref.ref(self))
                raise ConnectionError("x")
            return await super().step(action)

    class Builder:
        calls = 0

        async def make_envs(self) -> Any:
            self.calls += 1
            return [Weak(self.calls == 1 and slot == 0) for slot in range(2)]

    gc.collect()
    gc.disable()
    try:
        group = await do_group_rollout(Builder(), policy, RetryOnFailure())
        await anyio.lowlevel.checkpoint()
        assert len(group.errors) == 1
        assert failed[0]() is None
    finally:
        gc.enable()


async def test_a_session_cut_off_by_grace_is_left_properly() -> None:
    """Cutting off stragglers gives their sessions time to say goodbye."""
    builder = ScriptedBuilder(
        session=True, close_seconds=1.0, script={(0, 1): hang(), (1, 1): finish(2)}
    )
    group = await do_group_rollout(builder, policy, MinViableGroup(2, grace=0.5))
    assert group.missing == ((0, "cut_off"), (1, "cut_off"))
    assert all(env.said_goodbye for env in builder.envs)  # type: ignore[attr-defined]
    builder.assert_clean()


async def test_nothing_else_in_an_interrupt_free_group() -> None:
    """A BaseExceptionGroup of somebody's own without an interrupt comes out as it is."""

    class Panic(BaseException):
        pass

    error = BaseExceptionGroup("mine", [Panic(), BaseExceptionGroup("inner", [Panic()])])
    with pytest.raises(BaseExceptionGroup) as caught:
        await do_group_rollout(ScriptedBuilder(script={(0, 1): crash(error)}), policy, FailFast())
    assert caught.value is error


async def test_a_session_whose_own_scope_ends_the_rollout_in_silence() -> None:
    """Nothing raised by leaving, the failure is a RolloutCancelledError."""

    class Scoped(OneStepEnv):
        async def __aenter__(self) -> Self:
            self.scope = anyio.CancelScope()
            self.scope.__enter__()
            return self

        async def __aexit__(self, *exc_info: object) -> None:
            self.scope.__exit__(None, None, None)

        async def step(self, action: Any, *, extra: Any = None) -> Any:
            self.scope.cancel()
            await anyio.sleep_forever()

    class Builder:
        calls = 0

        async def make_envs(self) -> Any:
            self.calls += 1
            return [Scoped() if self.calls == 1 else OneStepEnv()]

    group = await do_group_rollout(Builder(), policy, RetryOnFailure())
    assert [(e.error_type, e.stage) for e in group.errors] == [("RolloutCancelledError", "rollout")]


@pytest.mark.parametrize("session", [False, True])
async def test_closing_what_was_made_too_late_does_not_hold_up_the_abort(session: bool) -> None:
    """A creation past its limit ends the group at once, before what it made is closed."""

    async def stubborn() -> None:
        with anyio.CancelScope(shield=True):
            await anyio.sleep(9)

    builder = ScriptedSlotBuilder(
        session=session,
        close_seconds=20.0,
        script={(0, 1): hang()},
        on_make_env={(1, 1): stubborn},
    )
    with pytest.raises(RolloutTimeoutError):
        await do_group_rollout(builder, policy, FailFast(setup_timeout=5))
    closing = [at for at, event, slot, _ in builder.events if event == "close" and slot == 0]
    assert closing == [pytest.approx(builder.envs[0].made_at + 9)]

"""What only asyncio can do: cancel a task natively, and let a stray cancelled error loose."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import anyio
import pytest
from scripted import (
    Behaviour,
    ScriptedBuilder,
    ScriptedEnv,
    ScriptedSlotBuilder,
    crash,
    finish,
    hang,
    policy,
    trajectory,
)
from virtual_time import VirtualLoop

from rollout_anyio import (
    FailFast,
    MinViableGroup,
    RetryOnFailure,
    RolloutCancelledError,
    do_group_rollout,
)

pytestmark = pytest.mark.anyio

Make = Callable[..., ScriptedBuilder]


@pytest.fixture
def anyio_backend() -> tuple[str, dict[str, Any]]:
    return "asyncio", {"loop_factory": VirtualLoop}


@pytest.fixture(params=[(k, s) for k in (ScriptedBuilder, ScriptedSlotBuilder) for s in (0, 1)])
def make(request: pytest.FixtureRequest) -> Make:
    kind: type[ScriptedBuilder] = request.param[0]
    session = request.param[1]

    def build(**kwargs: Any) -> ScriptedBuilder:
        return kind(session=bool(session), **kwargs)

    return build


async def wait_out(task: asyncio.Task[Any]) -> None:
    await asyncio.wait([task])


INSTANTS = [0.25, 0.5, 0.75, 1.0, 1.25, 1.5, 2.0, 2.5, 3.0, 3.5, 4.0, 4.5, 5.0]


@pytest.mark.parametrize("times", [1, 2, 3])
@pytest.mark.parametrize("after", INSTANTS)
async def test_native_cancellation_of_the_caller(make: Make, after: float, times: int) -> None:
    """task.cancel(), once and again, comes out as CancelledError with everything closed."""
    builder = make(
        make_seconds=0.5,
        close_seconds=1.0,
        script={(0, 1): crash(OSError(), 0.5), (1, 1): finish(2), (2, 1): finish(0.25)},
        on_cleanup=lambda: anyio.sleep(1),
    )
    others = len(asyncio.all_tasks())
    run = do_group_rollout(builder, policy, RetryOnFailure(cleanup_timeout=5))
    task = asyncio.create_task(run)
    await asyncio.sleep(after)
    for _ in range(times):
        task.cancel()
        await asyncio.sleep(0.1)
    await wait_out(task)
    assert task.cancelled() or (after >= 4 and not task.exception())
    builder.assert_clean()
    builder.assert_one_env_per_slot()
    assert builder.cleanups == 1
    assert len(asyncio.all_tasks()) == others


async def test_native_cancellation_in_the_tick_of_a_failure(make: Make) -> None:
    """The cancellation wins, and the failure does not replace it."""
    tasks: list[asyncio.Task[Any]] = []

    async def cancel_and_fail(env: ScriptedEnv) -> Any:
        await anyio.sleep(1)
        tasks[0].cancel()
        raise ConnectionError

    builder = make(script={(1, 1): cancel_and_fail})
    tasks.append(asyncio.create_task(do_group_rollout(builder, policy)))
    await wait_out(tasks[0])
    assert tasks[0].cancelled()
    builder.assert_clean()


async def test_asyncio_timeout_and_wait_for(make: Make) -> None:
    """asyncio's own limits around a group cancel it cleanly."""
    builder = make(script={(1, 1): hang()})
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(3):
            await do_group_rollout(builder, policy)
    builder.assert_clean()
    builder = make(script={(1, 1): hang()})
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(do_group_rollout(builder, policy), 3)
    builder.assert_clean()
    task = asyncio.current_task()
    assert task is not None
    assert task.cancelling() == 0


def cancel_own_task(then: Behaviour | None = None) -> Behaviour:
    """Cancel the slot's own task natively, as a stray piece of code would."""

    async def behave(env: ScriptedEnv) -> Any:
        await anyio.sleep(1)
        task = asyncio.current_task()
        assert task is not None
        task.cancel()
        try:
            await anyio.sleep(1)
        except asyncio.CancelledError:
            if then is None:
                raise
            return await then(env)

    return behave


async def test_a_slot_cancelled_natively_is_not_silence(make: Make) -> None:
    """Somebody cancels one slot's task: the last net raises, everything closed."""
    builder = make(script={(2, 1): cancel_own_task(), (1, 1): hang()})
    with pytest.raises(RolloutCancelledError, match="was cancelled from outside"):
        await do_group_rollout(builder, policy, RetryOnFailure())
    builder.assert_clean()


async def test_a_rollout_that_takes_its_native_cancellation_back(make: Make) -> None:
    """Swallowed by the rollout, a native cancellation of its task changes nothing."""
    builder = make(script={(2, 1): cancel_own_task(finish())})
    group = await do_group_rollout(builder, policy, RetryOnFailure())
    assert len(group.trajectories) == 4
    builder.assert_clean()


@pytest.mark.parametrize("when", ["make_envs", "close", "enter"])
async def test_native_cancellation_of_a_slot_in_other_stages(when: str) -> None:
    """Cancelled natively while making, entering or closing, the group still tells."""

    async def cancel(*_: Any) -> Any:
        await cancel_own_task()(None)  # type: ignore[arg-type]

    async def on_enter(env: Any) -> None:
        await cancel()

    builder = ScriptedBuilder(
        session=when == "enter",
        script={(1, 1): crash(OSError())} if when != "enter" else {},
        on_make={2: cancel} if when == "make_envs" else {},
        on_enter={1: on_enter} if when == "enter" else {},
        on_close={(1, 1): on_enter} if when == "close" else {},
    )
    with pytest.raises(RolloutCancelledError):
        await do_group_rollout(builder, policy, RetryOnFailure())
    assert builder.running == 0
    assert all(env.closed == 1 or builder.session for env in builder.envs)


async def test_native_cancellation_while_a_session_is_left() -> None:
    """A native cancellation that tears the leaving of a filled slot is on record."""

    async def cancel(env: Any) -> None:
        await cancel_own_task()(env)

    builder = ScriptedBuilder(session=True, on_close={(1, 1): cancel})
    group = await do_group_rollout(builder, policy, FailFast())
    assert [(e.slot, e.stage, e.error_type) for e in group.errors] == [
        (1, "close", "CancelledError")
    ]
    builder.assert_clean()


async def test_awaiting_a_task_that_somebody_else_cancelled(make: Make) -> None:
    """A client that cancels its own task fails one attempt, and the group goes on."""

    async def client(env: ScriptedEnv) -> Any:
        request = asyncio.create_task(asyncio.sleep(60))
        asyncio.get_running_loop().call_later(1, request.cancel)
        await request
        return trajectory()

    builder = make(script={(0, 1): client})
    group = await do_group_rollout(builder, policy, RetryOnFailure())
    (error,) = group.errors
    assert error.error_type == "RolloutCancelledError"
    assert "CancelledError" in error.traceback
    builder.assert_clean()


async def test_stray_cancelled_error_past_the_deadline_has_timed_out(make: Make) -> None:
    """Cut off by its deadline, a rollout that raises a cancelled error of its own is late."""

    async def client(env: ScriptedEnv) -> Any:
        request = asyncio.create_task(asyncio.sleep(60))
        try:
            await anyio.sleep(60)
        except asyncio.CancelledError:
            request.cancel()
        await asyncio.wait([request])
        request.result()

    builder = make(script={(0, 1): client})
    group = await do_group_rollout(builder, policy, MinViableGroup(4, per_rollout_timeout=5))
    assert group.errors[0].timed_out
    builder.assert_clean()

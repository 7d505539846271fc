"""One attempt: make the environment, run the policy through it, close it.

An attempt tells its group how it ended, the moment that is known and before anything is
closed, so that a group whose budget is spent ends at once. Whatever happens, the
environment is closed when the attempt is over; only a plain one that earned its
trajectory is left to the group, open, for the grader to look into.
"""

from __future__ import annotations

from typing import Any, Protocol

from anyio import CancelScope
from anyio.lowlevel import checkpoint_if_cancelled

from ._call import Call
from ._closing import ToClose, close_env, is_context_manager
from ._environments import Environments
from ._guard import Guard, Guards
from ._native import native_cancellations
from ._types import Verdict

__all__ = ["AttemptHost", "run_attempt"]


class AttemptHost(Protocol):
    """What an attempt needs of its group."""

    per_rollout_timeout: float
    setup_timeout: float
    cleanup_timeout: float
    guards: Guards
    environments: Environments

    async def run_rollout(self, env: Any) -> Any: ...

    def succeed(self, item: ToClose, trajectory: Any, *, closed: bool) -> bool: ...

    def fail(self, call: Call, error: BaseException) -> Verdict | None: ...

    def report_close(self, call: Call) -> None: ...


async def run_attempt(host: AttemptHost, slot: int, attempt: int) -> Verdict | None:
    """Try once to fill ``slot``.

    Returns:
        What the strategy decided about the failure; ``None`` when there is nothing to
        decide: the slot is filled, or the group is over.
    """
    await checkpoint_if_cancelled()
    env, call = await host.environments.take(slot, attempt)
    verdict = None if call.error is None else host.fail(call, call.take())
    if env is None:
        return verdict
    item = ToClose(env, slot, attempt)
    too_late = True
    try:
        if call.late:
            return verdict
        # A shield may have kept the end of the group from this task so far.
        await checkpoint_if_cancelled()
        too_late = False
    finally:
        if too_late:
            await close_env(item, host.cleanup_timeout, host.report_close)
    if is_context_manager(env):
        return await _run_entered(host, item)
    return await _run_plain(host, item)


async def _run_plain(host: AttemptHost, item: ToClose) -> Verdict | None:
    kept = False
    trajectory: Any = None
    try:
        call = Call("rollout", host.per_rollout_timeout, slot=item.slot, attempt=item.attempt)
        with call:
            trajectory = await host.run_rollout(item.env)
        if call.error is not None:
            return host.fail(call, call.take())
        kept = host.succeed(item, trajectory, closed=False)
        return None
    finally:
        if not kept:
            await close_env(item, host.cleanup_timeout, host.report_close)


async def _run_entered(host: AttemptHost, item: ToClose) -> Verdict | None:
    """Enter, run and leave an environment, all under one guard.

    Invariant: whenever the environment is called, each scope that we opened since it was
    entered is closed again, since it may have left scopes of its own open on the stack.
    """
    verdict: Verdict | None = None
    entered = False
    closing: Call | None = None
    env: Any = None
    before = native_cancellations()
    with Guard(host.guards) as guard:
        call = Call(
            "make_env",
            host.setup_timeout,
            slot=item.slot,
            attempt=item.attempt,
            within=guard.scope,
            hold=True,
        )
        with call:
            env = await item.env.__aenter__()
            entered = True
        failed = call.error is not None
        if failed:
            verdict = host.fail(call, call.take())
        if entered:
            if not failed and not guard.ended:
                verdict, call = await _run_inside(host, item._replace(env=env), guard)
            closing = await _leave(host, item, guard)
    # Counted out here: a scope of the environment's own that was cancelled is in the count
    # until the environment has left it.
    native = native_cancellations() > before
    if closing is None:
        await close_env(item, host.cleanup_timeout, host.report_close)
    elif call.cancelled is not None and not native and not guard.ended:
        # A scope of the environment's own ended the rollout; only leaving could tell why.
        failure = closing if closing.error is not None else call
        if failure is call:
            call.error = call.unasked(call.cancelled)
        return host.fail(call, failure.take())
    cancelled = call.cancelled or (closing and closing.cancelled)
    if closing is not None and (closing.error is not None or closing.cancelled is not None):
        host.report_close(closing)
    try:
        if native and cancelled is not None:
            raise cancelled
    finally:
        del cancelled
    return verdict


async def _run_inside(
    host: AttemptHost, item: ToClose, guard: Guard
) -> tuple[Verdict | None, Call]:
    guard.inner = CancelScope()
    call = Call(
        "rollout",
        host.per_rollout_timeout,
        slot=item.slot,
        attempt=item.attempt,
        scope=guard.inner,
        hold=True,
    )
    verdict: Verdict | None = None
    trajectory: Any = None
    with call:
        trajectory = await host.run_rollout(item.env)
    guard.inner = None
    if call.error is not None:
        verdict = host.fail(call, call.take())
    elif call.cancelled is None:
        host.succeed(item, trajectory, closed=True)
    return verdict, call


async def _leave(host: AttemptHost, item: ToClose, guard: Guard) -> Call:
    """Leave the environment; it is told of no exception, and its own are held."""
    closing = Call(
        "close",
        host.cleanup_timeout,
        slot=item.slot,
        attempt=item.attempt,
        within=guard.scope,
        hold=True,
    )
    with closing:
        await item.env.__aexit__(None, None, None)
    return closing

"""Closing environments: shielded, bounded, once each, and never in the way of an error."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from anyio import create_task_group

from ._call import Call

__all__ = ["ToClose", "close_all", "close_env", "is_context_manager"]


class ToClose(NamedTuple):
    """An environment that somebody has to close."""

    env: Any
    slot: int
    attempt: int | None


def is_context_manager(env: object) -> bool:
    """Tell whether ``env`` is entered and left rather than closed with ``aclose()``."""
    kind = type(env)
    return hasattr(kind, "__aenter__") and hasattr(kind, "__aexit__")


async def close_env(item: ToClose, seconds: float, report: Callable[[Call], None]) -> None:
    """Call ``aclose()``, if there is one, under a shield and for at most ``seconds``.

    ``report`` is told when that failed; only a native cancellation of this very task is
    raised.
    """
    aclose = getattr(item.env, "aclose", None)
    if aclose is None:
        return
    with Call(
        "close", seconds, slot=item.slot, attempt=item.attempt, shield=True, hold=True
    ) as call:
        await aclose()
    cancelled = call.cancelled
    if call.error is not None or cancelled is not None:
        report(call)
    try:
        if cancelled is not None:
            raise cancelled
    finally:
        del cancelled


async def close_all(
    items: Iterable[ToClose], seconds: float, report: Callable[[Call], None]
) -> None:
    """Close side by side, in at most ``seconds``.

    One task each: a native cancellation tears the shield in the task that it hits, and
    here it hits none that closes. It comes out when all are closed.
    """
    closable = [item for item in items if hasattr(item.env, "aclose")]
    if not closable:
        return
    async with create_task_group() as task_group:
        for item in closable:
            task_group.start_soon(close_env, item, seconds, report, name="rollout_anyio close")

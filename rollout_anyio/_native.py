"""The one place that looks at the backend behind anyio.

anyio cancels through scopes, and a scope can be asked. asyncio has a second way,
``Task.cancel()``, which no scope knows of; and it has ``CancelledError`` exceptions that
no one meant for the task in which they surface, such as that of an awaited task which
somebody else cancelled. What tells them apart is :meth:`asyncio.Task.cancelling`, the
task's count of native requests. trio has neither: there the count is always 0.
"""

from __future__ import annotations

import asyncio
import math
from typing import cast

from anyio import current_effective_deadline, get_cancelled_exc_class

__all__ = ["native_cancellations", "scope_cancelled", "split_cancelled"]


def native_cancellations() -> int:
    """Count the native cancellation requests that the current task has not yet taken back.

    Requests that anyio's scopes make of this task are in the count until the scope is
    left; compare two counts taken on the same level of scopes.
    """
    # Not asyncio.current_task() alone: in trio's guest mode an asyncio task is current too.
    if get_cancelled_exc_class() is not asyncio.CancelledError:
        return 0
    task = asyncio.current_task()
    return 0 if task is None else task.cancelling()


def scope_cancelled() -> bool:
    """Tell whether a cancel scope around the caller, up to the nearest shield, is cancelled."""
    return current_effective_deadline() == -math.inf


def split_cancelled(
    error: BaseException | None,
) -> tuple[BaseException | None, BaseException | None]:
    """Split ``error`` into the backend's cancelled errors and the rest.

    A group is split member by member: a trio nursery that is cancelled while a child
    fails raises both in one group.
    """
    cancelled = get_cancelled_exc_class()
    if isinstance(error, BaseExceptionGroup):
        members, rest = cast("BaseExceptionGroup[BaseException]", error).split(cancelled)
        # The group itself where there is nothing to take out: split() makes a copy.
        return (None, cast("BaseException", error)) if members is None else (members, rest)
    if isinstance(error, cancelled):
        return error, None
    return None, error

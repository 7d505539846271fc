"""Shields that the end of their task group can still reach through.

An environment that holds a task group dies with the first cancellation that reaches it,
and with it the connection through which it would have to say goodbye. Shielding its
``__aexit__`` is too late, and puts a scope where the environment closes its own, which
corrupts the scope stack. So the shield goes around the environment's whole life, and a
watcher in the same task group tells each shield when the group ends.

The watcher has to be in that very group: asyncio hands a native cancellation to the
innermost task group that the cancelled task waits in, and to nobody else.
"""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import Self, final

from anyio import CancelScope, Event, current_time
from anyio.abc import TaskGroup

__all__ = ["Guard", "Guards"]


@final
class Guards:
    """The guards of one task group, and the watcher that its end goes through.

    Args:
        task_group: The group, entered.
        tasks: How many tasks of the group will call :meth:`task_done`. The watcher goes
            with the last, so that it does not keep the group open.
        seconds: How long after the end of the group what is being made may take.
        on_end: Called when the group is cancelled.
    """

    def __init__(
        self,
        task_group: TaskGroup,
        *,
        tasks: int,
        seconds: float,
        on_end: Callable[[], None] | None = None,
    ) -> None:
        self._task_group = task_group
        self._tasks = tasks
        self._seconds = seconds
        self._on_end = on_end
        self._all_done: Event | None = None
        self._open: set[Guard] = set()

    def task_done(self) -> None:
        """Note that a task of the group is over."""
        self._tasks -= 1
        if not self._tasks and self._all_done is not None:
            self._all_done.set()

    def add(self, guard: Guard) -> None:
        """Watch over ``guard``; the first one starts the watcher.

        Invariant: a guard is opened with no await since the last checkpoint, so the group
        has not ended, and the watcher has not gone, without it.
        """
        self._open.add(guard)
        if self._all_done is None:
            self._all_done = Event()
            self._task_group.start_soon(self._watch, self._all_done, name="rollout_anyio watcher")

    def remove(self, guard: Guard) -> None:
        """Let go of ``guard``."""
        self._open.remove(guard)

    async def _watch(self, all_done: Event) -> None:
        try:
            await all_done.wait()
        except BaseException:
            for guard in self._open:
                guard.end(self._seconds)
            if self._on_end is not None:
                self._on_end()
            raise


@final
class Guard:
    """A shield around the making, or the whole life, of one environment.

    ``scope`` is the shield; its deadline carries the limit of whatever runs in it.
    ``inner`` is the scope in it that the end of the group cancels. Without one, the end
    gives the shield ``seconds`` from then on.
    """

    __slots__ = ("_guards", "ended", "inner", "scope")

    def __init__(self, guards: Guards) -> None:
        self._guards = guards
        self.scope = CancelScope(shield=True)
        self.inner: CancelScope | None = None
        self.ended = False

    def end(self, seconds: float) -> None:
        """Pass on that the group has ended."""
        self.ended = True
        if self.inner is not None:
            self.inner.cancel()
        else:
            self.scope.deadline = min(self.scope.deadline, current_time() + seconds)

    def __enter__(self) -> Self:
        self.scope.__enter__()
        self._guards.add(self)
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> bool | None:
        self._guards.remove(self)
        return self.scope.__exit__(exc_type, exc, traceback)

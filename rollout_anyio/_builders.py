"""What users bring to a group: a builder that makes its environments and grades it."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

from anyio import create_task_group
from anyio.lowlevel import checkpoint, checkpoint_if_cancelled

from ._call import Call, interrupt_in
from ._closing import ToClose, close_all
from ._episode import do_single_rollout
from ._guard import Guard, Guards
from ._interfaces import Env, TokenCompleter
from ._types import Metrics

__all__ = ["EnvGroupBuilder", "SlotEnvGroupBuilder"]

_logger = logging.getLogger("rollout_anyio")

_CLEANUP_TIMEOUT = 30.0


class EnvGroupBuilder(ABC):
    """The description of one group: its environments and how it is graded. Picklable.

    Only :meth:`make_envs` is required of a builder. Everything else is looked up on it,
    so builders of another framework fit without deriving from this class.
    """

    @abstractmethod
    async def make_envs(self) -> Sequence[Env]:
        """Make the environments of one group; the one at index *i* is that of slot *i*.

        Called once at the start, and again for retries, one call at a time. A builder that
        keeps a list of what it made must not forget the first group when the second is
        made.

        Cancellation:
            Cancelled as it is. What it has made by then it must close itself, or leave to
            :meth:`cleanup`.
        """

    async def run_rollout(self, policy: TokenCompleter, env: Any) -> Any:
        """Run ``policy`` through ``env`` and return the trajectory."""
        return await do_single_rollout(policy, env)

    async def compute_group_rewards(
        self, trajectories: Sequence[Any], envs: Sequence[Any]
    ) -> Sequence[tuple[float, Metrics]]:
        """Grade the group: a pair (reward, metrics) per trajectory, in the same order.

        The reward is added to the step rewards. By default 0.0 each.
        """
        return [(0.0, {}) for _ in trajectories]

    async def cleanup(self) -> None:
        """Release what the builder itself holds.

        Called once per :func:`do_group_rollout`, when every environment is closed.

        Cancellation:
            Called under a shield, for at most the strategy's ``cleanup_timeout`` seconds.
        """

    def logging_tags(self) -> Sequence[str]:
        """Return the names under which a training loop averages this group's metrics."""
        return ()


class SlotEnvGroupBuilder(EnvGroupBuilder):
    """A builder that can make one environment at a time.

    Each slot then makes its own, inside its own task: a creation that fails costs one
    retry and not the group, and a retry makes one environment and not a whole group.
    """

    group_size: int
    """How many slots the group has."""

    @abstractmethod
    async def make_env(self, slot: int) -> Env:
        """Make the environment of ``slot``. Runs for several slots at once.

        Cancellation:
            Not torn when the group ends: it may run on for ``cleanup_timeout`` seconds,
            and what it makes is closed. Past that, or past ``setup_timeout``, it is
            cancelled.
        """

    async def make_envs(self) -> Sequence[Env]:
        """Make all slots' environments at once, for callers that know of no slots.

        Raises:
            Exception: What the first :meth:`make_env` that failed raised; the others are
                closed again.

        Cancellation:
            What is being made may run on for 30 seconds, and is then closed.
        """
        making = _Making(self, self.group_size)
        try:
            await making.run()
            await checkpoint()
        except BaseException:
            await making.close()
            raise
        return [making.made[slot].env for slot in range(self.group_size)]


class _Making:
    """All the environments of one group, or none."""

    def __init__(self, builder: SlotEnvGroupBuilder, size: int) -> None:
        self._builder = builder
        self._size = size
        self._failure: BaseException | None = None
        self.made: dict[int, ToClose] = {}

    async def run(self) -> None:
        try:
            async with create_task_group() as task_group:
                guards = Guards(task_group, tasks=self._size, seconds=_CLEANUP_TIMEOUT)
                for slot in range(self._size):
                    task_group.start_soon(self._make, slot, guards, task_group.cancel_scope.cancel)
        except BaseExceptionGroup as error:
            raise interrupt_in(error) or error from None
        failure, self._failure = self._failure, None
        try:
            if failure is not None:
                raise failure
        finally:
            del failure

    async def _make(self, slot: int, guards: Guards, end: Callable[[], None]) -> None:
        try:
            await checkpoint_if_cancelled()
            with Guard(guards) as guard:
                call = Call("make_env", 0, slot=slot, within=guard.scope)
                with call:
                    self.made[slot] = ToClose(await self._builder.make_env(slot), slot, None)
            if call.error is not None:
                self._failure = self._failure or call.error
                end()
        finally:
            guards.task_done()

    async def close(self) -> None:
        items, self.made = list(self.made.values()), {}
        await close_all(items, _CLEANUP_TIMEOUT, _log_close)


def _log_close(call: Call) -> None:
    _logger.warning("%s failed: %r", call.site, call.error or call.cancelled)

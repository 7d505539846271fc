"""The environments that a group owns: made for its slots, waiting as spares, left to grade.

Invariant: an environment is in exactly one place, in its attempt, among the spares, or
among the kept ones. Whoever takes it out closes it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, final

from anyio import Lock
from anyio.abc import TaskGroup

from ._call import Call
from ._closing import ToClose, close_all, close_env
from ._exceptions import ConfigurationError, EmptyGroupError
from ._guard import Guard, Guards
from ._tally import Tally

__all__ = ["Environments"]


@final
class Environments:
    """Makes a group's environments, holds those that no attempt holds, and closes them.

    Args:
        builder: The user's builder.
        tally: Which slots are still to be filled.
        setup_timeout: Seconds for one call of the builder.
        cleanup_timeout: Seconds for closing one environment.
        report: Told of a close that failed.
    """

    _tasks: TaskGroup
    _guards: Guards

    def __init__(
        self,
        builder: Any,
        tally: Tally,
        *,
        setup_timeout: float,
        cleanup_timeout: float,
        report: Callable[[Call], None],
    ) -> None:
        self._builder = builder
        self._tally = tally
        self._setup_timeout = setup_timeout
        self._cleanup_timeout = cleanup_timeout
        self._report = report
        self._making = Lock()
        self._spares: dict[int, ToClose] = {}
        self._kept: list[ToClose] = []
        self.one_by_one = (
            getattr(builder, "make_env", None) is not None
            and getattr(builder, "group_size", None) is not None
        )

    async def make_first(self) -> Call:
        """Make the first whole group, with a builder that makes no single environments."""
        call = Call("make_envs", self._setup_timeout)
        envs: tuple[Any, ...] = ()
        with call:
            envs = await self._make_envs()
            if not envs:
                raise EmptyGroupError("make_envs() returned no environment")
        self._spares = {slot: ToClose(env, slot, None) for slot, env in enumerate(envs)}
        return call

    def group_size(self) -> int:
        """Return how many slots the group has."""
        if not self.one_by_one:
            return len(self._spares)
        size = self._builder.group_size
        if isinstance(size, bool) or not isinstance(size, int):
            raise ConfigurationError(f"group_size is not an integer: {size!r}")
        if size < 1:
            raise EmptyGroupError(f"group_size must be at least 1, got {size}")
        return size

    def open(self, tasks: TaskGroup, guards: Guards) -> None:
        """Make for the slots of a group that has started."""
        self._tasks = tasks
        self._guards = guards

    async def take(self, slot: int, attempt: int) -> tuple[Any, Call]:
        """Make the slot's environment, or take it out of the spares or of a fresh group.

        Returns:
            The environment, the attempt's to close even if the call failed, since then it
            came too late; ``None`` if there is none.
        """
        if self.one_by_one:
            return await self._make_one(slot, attempt)
        call = Call("make_envs", self._setup_timeout, slot=slot, attempt=attempt)
        if slot not in self._spares:
            # A foreign make_envs() need not be reentrant; and who waited for another's call
            # looks first whether its own spare has come with it.
            async with self._making:
                if slot not in self._spares:
                    await self._make_group(call, slot)
        if call.error is not None:
            return None, call
        return self._spares.pop(slot).env, call

    async def _make_one(self, slot: int, attempt: int) -> tuple[Any, Call]:
        """Make one environment, to the end even if the group ends meanwhile.

        Torn half-way, a creation may leave a sandbox that nobody has a handle to.
        """
        env: Any = None
        with Guard(self._guards) as guard:
            call = Call(
                "make_env", self._setup_timeout, slot=slot, attempt=attempt, within=guard.scope
            )
            with call:
                env = await self._builder.make_env(slot)
                if env is None:
                    raise TypeError(f"make_env({slot}) returned None instead of an environment")
        return env, call

    async def _make_group(self, call: Call, slot: int) -> None:
        envs: tuple[Any, ...] = ()
        with call:
            envs = await self._make_envs()
            if slot >= len(envs):
                raise EmptyGroupError(
                    f"make_envs() returned {len(envs)} environments on a retry, none of them"
                    f" for slot {slot} of {self._tally.size}"
                )
        for position, env in enumerate(envs):
            spare = ToClose(env, position, None)
            if call.late or not self._tally.wants(position):
                self._close_soon(spare)
                continue
            if position in self._spares:
                self._close_soon(self._spares[position])
            self._spares[position] = spare

    async def _make_envs(self) -> tuple[Any, ...]:
        envs = tuple(await self._builder.make_envs())
        for slot, env in enumerate(envs):
            if env is None:
                raise TypeError(f"make_envs() returned None for slot {slot}")
        return envs

    def keep(self, item: ToClose) -> None:
        """Hold the open environment of a filled slot."""
        self._kept.append(item)

    def close_all_soon(self) -> None:
        """Close all that no attempt holds, each in a task of the group."""
        for item in self._release(everything=True):
            self._close_soon(item)

    async def close(self, *, everything: bool) -> None:
        """Close the spares, and with ``everything`` the environments of filled slots too."""
        await close_all(self._release(everything=everything), self._cleanup_timeout, self._report)

    def _release(self, *, everything: bool) -> list[ToClose]:
        items = list(self._spares.values())
        self._spares = {}
        if everything:
            items += self._kept
            self._kept = []
        return items

    def _close_soon(self, item: ToClose) -> None:
        self._tasks.start_soon(
            close_env, item, self._cleanup_timeout, self._report, name="rollout_anyio close"
        )

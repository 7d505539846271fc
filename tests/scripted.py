"""Builders and environments that do what a script says, and a ledger of what they did.

A script maps (slot, attempt) to what that rollout does; what it leaves out finishes after
one second. The same script runs with both kinds of builder and both kinds of environment.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Self

import anyio
import anyio.lowlevel
import attrs
from anyio import current_time

from rollout_anyio import StepResult, TokensWithLogprobs, Trajectory, Transition

Behaviour = Callable[["ScriptedEnv"], Awaitable[Any]]
Script = Mapping[tuple[int, int], Behaviour]


def trajectory(reward: float = 1.0, ob: Any = "ob") -> Trajectory:
    action = TokensWithLogprobs("act", None)
    return Trajectory([Transition(ob, action, reward, True)], final_ob="end")


def finish(after: float = 1.0, reward: float = 1.0) -> Behaviour:
    async def behave(env: ScriptedEnv) -> Trajectory:
        await anyio.sleep(after)
        return trajectory(reward, ob=env.slot)

    return behave


def crash(error: BaseException, after: float = 1.0) -> Behaviour:
    async def behave(env: ScriptedEnv) -> Trajectory:
        await anyio.sleep(after)
        raise error

    return behave


def hang() -> Behaviour:
    return finish(after=float("inf"))


def swallow(times: int = 1, then: float = 0.0) -> Behaviour:
    """Ignore cancellation so many times, then come back with a trajectory."""

    async def behave(env: ScriptedEnv) -> Trajectory:
        for _ in range(times):
            try:
                await anyio.sleep_forever()
            except anyio.get_cancelled_exc_class():
                env.builder.note("swallowed", env)
        with anyio.CancelScope(shield=True):
            await anyio.sleep(then)
        return trajectory(ob=env.slot)

    return behave


def convert(error: Exception) -> Behaviour:
    """Turn the cancellation into another error."""

    async def behave(env: ScriptedEnv) -> Trajectory:
        try:
            await anyio.sleep_forever()
        except anyio.get_cancelled_exc_class():
            raise error from None
        raise AssertionError

    return behave


def raise_cancelled(after: float = 1.0) -> Behaviour:
    """Raise the backend's cancelled error although nothing is cancelled."""

    async def behave(env: ScriptedEnv) -> Trajectory:
        await anyio.sleep(after)
        raise await stray_cancelled()

    return behave


async def stray_cancelled() -> BaseException:
    """Return a cancelled error of this backend that belongs to nobody any more."""
    try:
        with anyio.CancelScope() as scope:
            scope.cancel()
            try:
                await anyio.lowlevel.checkpoint()
            except anyio.get_cancelled_exc_class() as error:
                # asyncio's own, as a task's that somebody else cancelled would be.
                return type(error)() if type(error).__module__.startswith("asyncio") else error
    finally:
        pass
    raise AssertionError


@attrs.define(eq=False)
class ScriptedEnv:
    """A plain environment."""

    builder: ScriptedBuilder
    slot: int
    serial: int
    attempt: int = 0
    closed: int = 0
    entered: int = 0
    made_at: float = 0.0
    closed_at: float = -1.0

    async def aclose(self) -> None:
        await self._close()

    async def _close(self) -> None:
        self.closed += 1
        self.builder.note("close", self)
        try:
            behaviour = self.builder.on_close.get((self.slot, self.attempt))
            if behaviour is not None:
                await behaviour(self)
            else:
                await anyio.sleep(self.builder.close_seconds)
        finally:
            self.closed_at = current_time()
            self.builder.note("closed", self)


@attrs.define(eq=False)
class ScriptedSession(ScriptedEnv):
    """An environment that is a context manager and holds a task group with a pump."""

    _tasks: Any = None
    _stop: Any = None
    said_goodbye: bool = False

    async def __aenter__(self) -> Self:
        behaviour = self.builder.on_enter.get(self.slot)
        self.builder.note("enter", self)
        if behaviour is not None:
            await behaviour(self)
        self._tasks = anyio.create_task_group()
        await self._tasks.__aenter__()
        self._stop = anyio.Event()
        self._tasks.start_soon(self._pump)
        self.entered += 1
        return self

    async def _pump(self) -> None:
        """Alive for as long as the session; closing it needs the pump."""
        if self.slot in self.builder.dying_pumps and self.attempt <= 1:
            await anyio.sleep(0.5)
            error = self.builder.dying_pumps[self.slot]
            if error is not None:
                raise error
            self._tasks.cancel_scope.cancel()
        await self._stop.wait()
        self.said_goodbye = True

    async def __aexit__(self, *exc_info: object) -> None:
        assert exc_info == (None, None, None)
        try:
            await self._close()
        finally:
            self._stop.set()
            await self._tasks.__aexit__(None, None, None)


@attrs.define(eq=False)
class ScriptedBuilder:
    """A builder that makes whole groups only: nothing but ``make_envs`` and a rollout."""

    size: int = 4
    script: Script = attrs.Factory(dict[tuple[int, int], Behaviour])
    session: bool = False
    on_make: dict[int, Callable[[], Awaitable[Any]]] = attrs.Factory(dict)
    """By call number, from 1."""
    on_make_env: dict[tuple[int, int], Callable[[], Awaitable[Any]]] = attrs.Factory(dict)
    """By (slot, call for that slot)."""
    on_enter: dict[int, Behaviour] = attrs.Factory(dict)
    on_close: dict[tuple[int, int], Behaviour] = attrs.Factory(dict)
    dying_pumps: dict[int, Exception | None] = attrs.Factory(dict)
    returns: dict[int, int] = attrs.Factory(dict)
    """How many environments call number n of make_envs returns."""
    make_seconds: float = 0.0
    close_seconds: float = 0.0
    grade: Callable[[Any, Any], Awaitable[Any]] | None = None
    on_cleanup: Callable[[], Awaitable[Any]] | None = None
    envs: list[ScriptedEnv] = attrs.Factory(list)
    events: list[tuple[float, str, int, int]] = attrs.Factory(list)
    attempts: dict[int, int] = attrs.Factory(dict)
    running: int = 0
    making: int = 0
    calls: int = 0
    cleanups: int = 0

    def note(self, event: str, env: ScriptedEnv) -> None:
        self.events.append((current_time(), event, env.slot, env.serial))

    def new(self, slot: int) -> ScriptedEnv:
        kind = ScriptedSession if self.session else ScriptedEnv
        env = kind(self, slot, len(self.envs), made_at=current_time())
        self.envs.append(env)
        self.note("made", env)
        return env

    async def make_envs(self) -> Any:
        self.calls += 1
        number = self.calls
        assert not self.making, "make_envs() is not reentrant"
        self.making += 1
        try:
            await anyio.sleep(self.make_seconds)
            if number in self.on_make:
                await self.on_make[number]()
            return [self.new(slot) for slot in range(self.returns.get(number, self.size))]
        finally:
            self.making -= 1

    async def run_rollout(self, policy: Any, env: ScriptedEnv) -> Any:
        attempt = self.attempts[env.slot] = self.attempts.get(env.slot, 0) + 1
        env.attempt = attempt
        self.running += 1
        self.note("run", env)
        try:
            return await self.script.get((env.slot, attempt), finish())(env)
        finally:
            self.running -= 1
            self.note("ran", env)

    async def compute_group_rewards(self, trajectories: Any, envs: Any) -> Any:
        if self.grade is not None:
            return await self.grade(trajectories, envs)
        return [(0.0, {}) for _ in trajectories]

    async def cleanup(self) -> None:
        self.cleanups += 1
        assert all(env.closed_at >= 0 for env in self.envs if env.closed)
        if self.on_cleanup is not None:
            await self.on_cleanup()

    def assert_clean(self, *, kept: Any = ()) -> None:
        """Nothing runs, and all that was made is closed exactly once, but for ``kept``."""
        assert self.running == 0
        for env in self.envs:
            never_entered = isinstance(env, ScriptedSession) and not env.entered
            expected = 0 if any(env is other for other in kept) else 1
            assert env.closed == expected or (never_entered and env.closed <= 1), env
            assert env.entered <= 1
            if env.entered and env.closed:
                assert env.closed_at >= 0

    def assert_one_env_per_slot(self) -> None:
        """No rollout starts in a slot before the one before it is closed."""
        live: dict[int, int] = {}
        for _, event, slot, serial in self.events:
            if event == "run":
                assert slot not in live, (slot, self.events)
                live[slot] = serial
            elif event == "closed" and live.get(slot) == serial:
                del live[slot]


@attrs.define(eq=False)
class ScriptedSlotBuilder(ScriptedBuilder):
    """A builder that makes one environment at a time."""

    made: dict[int, int] = attrs.Factory(dict)

    @property
    def group_size(self) -> int:
        return self.size

    async def make_env(self, slot: int) -> Any:
        number = self.made[slot] = self.made.get(slot, 0) + 1
        await anyio.sleep(self.make_seconds)
        if (slot, number) in self.on_make_env:
            await self.on_make_env[slot, number]()
        return self.new(slot)


async def policy(observation: Any, stop: Any, *, max_tokens: int | None = None) -> Any:
    await anyio.lowlevel.checkpoint()
    return TokensWithLogprobs("act", None)


class OneStepEnv:
    """The smallest foreign environment: no base class, no aclose."""

    async def initial_observation(self) -> Any:
        return "ob", None

    async def step(self, action: Any, *, extra: Any = None) -> StepResult:
        await anyio.lowlevel.checkpoint()
        return StepResult(1.0, True, "end", None)

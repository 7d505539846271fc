"""Builders: the defaults, and making a whole group of environments or none."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import anyio
import pytest
from anyio import current_time
from scripted import OneStepEnv, ScriptedSlotBuilder, policy

from rollout_anyio import (
    ConfigurationError,
    EnvGroupBuilder,
    RolloutCancelledError,
    SlotEnvGroupBuilder,
    StepResult,
    do_group_rollout,
)
from rollout_anyio import Env as BaseEnv

pytestmark = pytest.mark.anyio


class Env(OneStepEnv):
    def __init__(self, builder: Builder, slot: int) -> None:
        self.builder, self.slot = builder, slot

    async def aclose(self) -> None:
        self.builder.closed.append(self.slot)
        if self.builder.on_close is not None:
            await self.builder.on_close()


class Builder(SlotEnvGroupBuilder):
    on_close: Callable[[], Awaitable[Any]] | None = None

    def __init__(self, **behaviour: Callable[[], Awaitable[Any]]) -> None:
        self.group_size = 8
        self.behaviour = behaviour
        self.closed: list[int] = []

    async def make_env(self, slot: int) -> Any:
        await anyio.sleep(1 if slot < 5 else 3)
        if f"slot{slot}" in self.behaviour:
            await self.behaviour[f"slot{slot}"]()
        return Env(self, slot)


async def fail() -> None:
    raise ConnectionError("does not boot")


async def test_make_envs_of_a_slot_builder() -> None:
    """All slots are made at once and come in slot order."""
    start = current_time()
    envs: Any = await Builder().make_envs()
    assert [env.slot for env in envs] == list(range(8))
    assert current_time() - start == pytest.approx(3)


async def test_make_envs_fails_for_one_slot() -> None:
    """The first failure is raised; those made and those still being made are closed."""
    builder = Builder(slot3=fail, slot6=fail)
    with pytest.raises(ConnectionError, match="does not boot"):
        await builder.make_envs()
    assert sorted(builder.closed) == [0, 1, 2, 4, 5, 7]


async def test_make_envs_is_cancelled() -> None:
    """What is being made is let finish and closed; what hangs is cut after 30 seconds."""
    builder = Builder(slot7=anyio.sleep_forever)
    start = current_time()
    with anyio.move_on_after(2) as scope:
        await builder.make_envs()
    assert scope.cancelled_caught
    assert sorted(builder.closed) == [0, 1, 2, 3, 4, 5, 6]
    assert current_time() - start == pytest.approx(32)


async def test_make_envs_closes_in_spite_of_a_close_that_raises(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A failed close is logged and hides nothing."""
    builder = Builder(slot3=fail)
    builder.on_close = fail
    with pytest.raises(ConnectionError):
        await builder.make_envs()
    assert len(builder.closed) == 7
    assert "slot 0, stage close failed" in caplog.text


async def test_a_base_exception_while_making() -> None:
    """It comes out as itself."""

    async def interrupt() -> None:
        raise KeyboardInterrupt

    builder = Builder(slot3=interrupt)
    with pytest.raises(KeyboardInterrupt):
        await builder.make_envs()
    assert sorted(builder.closed) == [0, 1, 2, 4, 5, 6, 7]


async def test_defaults_of_a_builder() -> None:
    """One abstract method; the episode loop, no rewards, no cleanup, no tags."""

    class Minimal(EnvGroupBuilder):
        async def make_envs(self) -> Any:
            return [OneStepEnv(), OneStepEnv()]

    builder = Minimal()
    group = await do_group_rollout(builder, policy)
    assert group.get_total_rewards() == [1.0, 1.0]
    assert builder.logging_tags() == ()


async def test_default_aclose_of_an_environment() -> None:
    """The base class has nothing to close."""

    class Own(BaseEnv):
        async def initial_observation(self) -> Any:
            return "ob", None

        async def step(self, action: Any, *, extra: Any = None) -> StepResult:
            return StepResult(2.0, True, "end", None)

    class OwnBuilder(SlotEnvGroupBuilder):
        group_size = 2

        async def make_env(self, slot: int) -> BaseEnv:
            await anyio.lowlevel.checkpoint()
            return Own()

    assert (await do_group_rollout(OwnBuilder(), policy)).get_total_rewards() == [2.0, 2.0]


@pytest.mark.parametrize("size", [True, "4", 2.0])
async def test_group_size_that_is_no_integer(size: Any) -> None:
    """A group size of the wrong type is refused before anything is made."""
    with pytest.raises(ConfigurationError, match="group_size is not an integer"):
        await do_group_rollout(ScriptedSlotBuilder(size=size), policy)


async def test_make_env_that_returns_none() -> None:
    """None is no environment: the attempt fails with a clear message."""

    class Nothing(SlotEnvGroupBuilder):
        group_size = 1

        async def make_env(self, slot: int) -> Any:
            return None

    with pytest.raises(TypeError, match=r"make_env\(0\) returned None"):
        await do_group_rollout(Nothing(), policy)


async def test_make_envs_that_returns_none() -> None:
    """None among the environments, or instead of them, fails the group."""

    class Nothing:
        envs: Any = (OneStepEnv(), None)

        async def make_envs(self) -> Any:
            return self.envs

    with pytest.raises(TypeError, match=r"make_envs\(\) returned None for slot 1"):
        await do_group_rollout(Nothing(), policy)
    Nothing.envs = None
    with pytest.raises(TypeError):
        await do_group_rollout(Nothing(), policy)


async def test_make_envs_torn_by_its_own_scope_is_no_silence() -> None:
    """A first make_envs() that raises a stray cancelled error fails the group."""
    from scripted import ScriptedBuilder, stray_cancelled

    async def stray() -> None:
        raise await stray_cancelled()

    with pytest.raises(RolloutCancelledError, match="stage make_envs"):
        await do_group_rollout(ScriptedBuilder(on_make={1: stray}), policy)

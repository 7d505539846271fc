"""Ctrl-C, by signal, on both backends: it comes out as KeyboardInterrupt, all closed."""

from __future__ import annotations

import signal
from typing import Any

import anyio
import pytest
import trio
from scripted import ScriptedBuilder, ScriptedEnv, ScriptedSlotBuilder, hang, policy, trajectory
from virtual_time import run_virtual

from rollout_anyio import RetryOnFailure, SlotEnvGroupBuilder, do_group_rollout

BUILDERS = [ScriptedBuilder, ScriptedSlotBuilder]


@trio.lowlevel.enable_ki_protection
def press_ctrl_c() -> None:
    """On trio this reaches the task that waits for the group, not the one running."""
    signal.raise_signal(signal.SIGINT)


async def interrupted(env: ScriptedEnv) -> Any:
    await anyio.sleep(1)
    press_ctrl_c()
    await anyio.sleep(1)
    return trajectory()


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
@pytest.mark.parametrize("session", [False, True])
@pytest.mark.parametrize("kind", BUILDERS)
def test_ctrl_c_while_the_group_runs(kind: Any, session: bool, backend: str) -> None:
    """The signal ends the group, not in an exception group, with everything closed."""
    builder = kind(session=session, script={(1, 1): interrupted, (2, 1): hang()})
    with pytest.raises(KeyboardInterrupt):
        run_virtual(do_group_rollout, builder, policy, RetryOnFailure(), backend=backend)
    builder.assert_clean()
    assert builder.cleanups == 1


@pytest.mark.parametrize("kind", BUILDERS)
def test_ctrl_c_in_the_rollouts_own_code_on_trio(kind: Any) -> None:
    """trio raises it in whatever code runs; there it is not taken for a failure."""

    async def unprotected(env: ScriptedEnv) -> Any:
        await anyio.sleep(1)
        signal.raise_signal(signal.SIGINT)

    builder = kind(script={(1, 1): unprotected})
    with pytest.raises(KeyboardInterrupt):
        run_virtual(do_group_rollout, builder, policy, RetryOnFailure(), backend="trio")
    builder.assert_clean()


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_ctrl_c_while_a_builder_makes_all_its_environments(backend: str) -> None:
    """make_envs() of a slot builder closes what it made."""
    closed: list[int] = []

    class Env:
        def __init__(self, slot: int) -> None:
            self.slot = slot

        async def aclose(self) -> None:
            closed.append(self.slot)

    class Builder(SlotEnvGroupBuilder):
        group_size = 3

        async def make_env(self, slot: int) -> Any:
            await anyio.sleep(slot)
            if slot == 2:
                press_ctrl_c()
                await anyio.sleep(1)
            return Env(slot)

    with pytest.raises(KeyboardInterrupt):
        run_virtual(Builder().make_envs, backend=backend)
    assert sorted(closed) == [0, 1, 2]

"""The same in real time: asyncio in debug mode, uvloop where installed, and trio."""

from __future__ import annotations

from typing import Any

import anyio
import pytest
from anyio.lowlevel import checkpoint
from scripted import ScriptedBuilder, ScriptedEnv, ScriptedSlotBuilder, hang, policy, trajectory
from virtual_time import REAL, backend_of

from rollout_anyio import MinViableGroup, RetryOnFailure, do_group_rollout

pytestmark = pytest.mark.anyio


@pytest.fixture(params=REAL)
def anyio_backend(request: pytest.FixtureRequest) -> tuple[str, dict[str, Any]]:
    return backend_of(request)


async def at_once(env: ScriptedEnv) -> Any:
    await checkpoint()
    return trajectory(ob=env.slot)


async def crash(env: ScriptedEnv) -> Any:
    await checkpoint()
    raise ConnectionError(f"slot {env.slot}")


def build(kind: type[ScriptedBuilder], session: bool, **script: Any) -> ScriptedBuilder:
    behaviours = {(slot, attempt): at_once for slot in range(8) for attempt in range(1, 5)}
    overrides = {(int(key[1:]), 1): value for key, value in script.items()}
    return kind(size=8, session=session, script={**behaviours, **overrides})


@pytest.mark.parametrize("session", [False, True])
@pytest.mark.parametrize("kind", [ScriptedBuilder, ScriptedSlotBuilder])
async def test_retry_timeout_and_abort(kind: type[ScriptedBuilder], session: bool) -> None:
    """A failure and a timeout are retried; past the budget the failure itself is raised."""
    builder = build(kind, session, s3=crash, s5=hang())
    group = await do_group_rollout(builder, policy, RetryOnFailure(2, per_rollout_timeout=1.5))
    assert group.slots == tuple(range(8))
    assert [(e.slot, e.timed_out) for e in group.errors] == [(3, False), (5, True)]
    builder.assert_clean()
    builder = build(kind, session, s3=crash, s5=hang())
    with pytest.raises(ConnectionError, match="slot 3"):
        await do_group_rollout(builder, policy, RetryOnFailure(0))
    builder.assert_clean()


@pytest.mark.parametrize("session", [False, True])
@pytest.mark.parametrize("kind", [ScriptedBuilder, ScriptedSlotBuilder])
async def test_cancellation_and_grace(kind: type[ScriptedBuilder], session: bool) -> None:
    """Cancelled from outside, or cut off by grace, everything is closed."""
    builder = build(kind, session, s5=hang())
    with anyio.move_on_after(0.02) as scope:
        await do_group_rollout(builder, policy)
    assert scope.cancelled_caught
    builder.assert_clean()
    builder = build(kind, session, s5=hang())
    group = await do_group_rollout(builder, policy, MinViableGroup(7, grace=0))
    assert group.missing == ((5, "cut_off"),)
    builder.assert_clean()

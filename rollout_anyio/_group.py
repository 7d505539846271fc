"""One group from its builder to its rewards: collect, grade, close, clean up."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from typing import Any, final

from anyio import CancelScope, create_task_group, get_cancelled_exc_class
from anyio.lowlevel import checkpoint

from ._call import Call
from ._closing import ToClose, close_all, is_context_manager
from ._exceptions import ConfigurationError, GroupRewardError
from ._interfaces import SupportsMakeEnvs, TokenCompleter
from ._notes import add_note, summary
from ._strategies import FailFast, RolloutStrategy
from ._types import Metrics, RolloutError, RolloutResult, TrajectoryGroup
from ._validate import to_seconds

__all__ = ["do_group_rollout"]

_logger = logging.getLogger("rollout_anyio")

_FAIL_FAST = FailFast()


async def do_group_rollout(
    env_group_builder: SupportsMakeEnvs,
    policy: TokenCompleter,
    strategy: RolloutStrategy = _FAIL_FAST,
    *,
    grader_timeout: float = 0,
) -> TrajectoryGroup:
    """Collect one group, grade it, close its environments, clean up.

    Args:
        env_group_builder: The group. Only ``make_envs()`` is required of it.
        policy: What turns observations into actions.
        strategy: What a failed rollout means.
        grader_timeout: Seconds that ``compute_group_rewards()`` may take; 0 for no limit.

    Returns:
        The graded group, in slot order.

    Raises:
        ConfigurationError: ``strategy`` is no strategy.
        Exception: What the strategy, or the grader, raised.
        RolloutTimeoutError: ``grader_timeout`` passed.
        GroupRewardError: The grader returned the wrong number of rewards, or one that is
            not finite.

    Cancellation:
        Rollouts and grader are cancelled and awaited. The environments are closed, then
        ``cleanup()`` is called, each shielded and bounded; that takes at most three times
        the strategy's ``cleanup_timeout``, unless the user's code refuses to be cancelled.

    Checkpoints:
        Always passes one, as its last step.
    """
    limit = to_seconds(grader_timeout, "grader_timeout")
    _check_strategy(strategy)
    ending = _Ending(env_group_builder, strategy.cleanup_timeout)
    try:
        result = await strategy.execute(env_group_builder, policy)
        ending.result = result
        rewards = await _grade(env_group_builder, result, limit)
    except BaseException as error:
        try:
            await ending.run()
        except get_cancelled_exc_class():
            # Were it to replace an ordinary failure only because it came later, the
            # failure would be lost; if it is a native one, it wins all the same.
            if isinstance(error, Exception):
                raise
        if isinstance(error, Exception):
            ending.add_notes(error)
            ending.raise_interrupt()
            await checkpoint()
        raise
    await ending.run()
    ending.raise_interrupt()
    await checkpoint()
    return TrajectoryGroup(
        trajectories=result.trajectories,
        final_rewards=[reward for reward, _ in rewards],
        metrics=[metrics for _, metrics in rewards],
        slots=result.slots,
        group_size=result.group_size,
        errors=[*result.errors, *ending.errors],
        missing=result.missing,
    )


def _check_strategy(strategy: object) -> None:
    if isinstance(strategy, type):
        name = strategy.__name__
        raise ConfigurationError(f"no rollout strategy: the class {name}; did you mean {name}()?")
    if not hasattr(strategy, "execute"):
        raise ConfigurationError(
            f"no rollout strategy: {strategy!r}; see rollout_strategy_from_config()"
        )


async def _grade(
    builder: Any, result: RolloutResult, limit: float
) -> Sequence[tuple[float, Metrics]]:
    compute = getattr(builder, "compute_group_rewards", None)
    if compute is None:
        return [(0.0, {}) for _ in result.trajectories]
    call = Call("grade", limit)
    rewards: list[tuple[float, Metrics]] = []
    with call:
        rewards = _checked(
            await compute(list(result.trajectories), list(result.envs)), len(result.trajectories)
        )
    if call.error is not None:
        raise call.take()
    return rewards


def _checked(graded: Any, expected: int) -> list[tuple[float, Metrics]]:
    try:
        rewards = [(float(reward), metrics) for reward, metrics in graded]
    except (TypeError, ValueError) as error:
        raise GroupRewardError(
            f"compute_group_rewards() must return pairs (reward, metrics), got {graded!r:.200}"
        ) from error
    if len(rewards) != expected:
        raise GroupRewardError(
            f"compute_group_rewards() returned {len(rewards)} rewards for {expected} trajectories"
        )
    for position, (reward, _) in enumerate(rewards):
        if not math.isfinite(reward):
            raise GroupRewardError(
                f"compute_group_rewards() returned {reward} at index {position}: not finite"
            )
    return rewards


@final
class _Ending:
    """Closing what the group made, then the builder's ``cleanup()``; run once, whatever happens."""

    def __init__(self, builder: Any, seconds: float) -> None:
        self._cleanup = getattr(builder, "cleanup", None)
        self._seconds = seconds
        self._interrupt: BaseException | None = None
        self.errors: list[RolloutError] = []
        self.result: RolloutResult | None = None

    async def run(self) -> None:
        """Close side by side, then clean up; a native cancellation comes out after both."""
        async with create_task_group() as task_group:
            # A task of its own: a native cancellation tears the shield in the task it hits.
            task_group.start_soon(self._run, name="rollout_anyio cleanup")

    async def _run(self) -> None:
        # Bounded by the limits of the calls in it.
        with CancelScope(shield=True):
            await self._close()
            await self._clean_up()

    async def _close(self) -> None:
        result = self.result
        if result is not None:
            await close_all(
                [
                    ToClose(env, slot, None)
                    for env, slot in zip(result.envs, result.slots, strict=True)
                    if not is_context_manager(env)
                ],
                self._seconds,
                self._report,
            )

    async def _clean_up(self) -> None:
        if self._cleanup is None:
            return
        call = Call("cleanup", self._seconds, shield=True, hold=True)
        with call:
            await self._cleanup()
        if call.error is not None or call.cancelled is not None:
            self._report(call)

    def _report(self, call: Call) -> None:
        torn = call.error is None
        error = call.take()
        self.errors.append(call.record(error))
        _logger.warning("%s failed: %s", call.site, summary(self.errors[-1]))
        if not torn and not isinstance(error, Exception):
            self._interrupt = self._interrupt or error

    def add_notes(self, error: BaseException) -> None:
        """Note on the error under way what failed besides."""
        for record in self.errors:
            add_note(error, f"{record.stage} failed too: {summary(record)}")

    def raise_interrupt(self) -> None:
        """Raise what is no :exc:`Exception`, if a close raised any, as itself."""
        if self._interrupt is not None:
            raise self._interrupt

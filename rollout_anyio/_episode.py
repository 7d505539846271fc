"""One episode: one policy, one environment, one trajectory, and the episode's own limits."""

import math
from collections.abc import Mapping
from typing import Any, final

import attrs
from anyio import CancelScope, current_time

from ._exceptions import RolloutTimeoutError
from ._interfaces import ActionExtra, Env, TokenCompleter
from ._native import native_cancellations, scope_cancelled, split_cancelled
from ._types import StopReason, TokensWithLogprobs, Trajectory, Transition
from ._validate import count, seconds

__all__ = ["RolloutLimits", "do_single_rollout"]

_STOP = "stop/"


@final
@attrs.frozen(kw_only=True)
class RolloutLimits:
    """What one episode may use; 0 stands for no limit.

    All but ``sampling_timeout`` end the episode gracefully: the trajectory so far is
    returned, its last transition marked done, with the stop reason.
    """

    max_turns: int = count()
    """Turns, that is sampling calls."""
    max_turn_tokens: int = count()
    """Tokens sampled in one turn; reaching it does not end the episode."""
    max_sampled_tokens: int = count()
    """Tokens sampled in the whole episode."""
    max_trajectory_tokens: int = count()
    """Tokens of the observation, which holds all before it, and what is sampled on it."""
    rollout_timeout: float = seconds()
    """Seconds for the whole episode."""
    sampling_timeout: float = seconds()
    """Seconds for one sampling call; past it :exc:`RolloutTimeoutError` is raised."""


async def do_single_rollout(
    policy: TokenCompleter, env: Env, *, limits: RolloutLimits | None = None
) -> Trajectory:
    """Run ``policy`` through ``env`` to the end of the episode.

    Args:
        policy: Called once a turn, with ``max_tokens`` only when the limits leave a budget.
        env: A fresh environment; its records are read by attribute.
        limits: What the episode may use; without it those of ``env.rollout_limits`` count.

    Returns:
        The trajectory. When the environment gave an :class:`InitialObservationOverflow`, it
        has one empty transition, and nothing was sampled.

    Raises:
        RolloutTimeoutError: A sampling call passed ``sampling_timeout``.
        Exception: What policy or environment raised.

    Cancellation:
        Passed on to policy or environment as it is. The environment is left to the caller
        to close. Only the limit ``rollout_timeout`` is recognised, by its own scope, and
        turned into the end of the trajectory.

    Checkpoints:
        Those of policy and environment.
    """
    allowed = _Allowed(limits if limits is not None else getattr(env, "rollout_limits", None))
    episode = _Episode(policy, env, allowed)
    if not allowed.rollout_timeout:
        return await episode.run()
    deadline = episode.deadline = current_time() + allowed.rollout_timeout
    before = native_cancellations()
    trajectory: Trajectory | None = None
    cut: BaseException | None = None
    with CancelScope(deadline=deadline):
        try:
            trajectory = await episode.run()
        except BaseException as error:
            cancelled, raised = split_cancelled(error)
            if raised is not None or current_time() < deadline:
                raise
            cut = cancelled
    try:
        if cut is not None and (native_cancellations() > before or scope_cancelled()):
            raise cut
    finally:
        del cut
    if trajectory is None or current_time() >= deadline:
        return episode.stop(StopReason.ROLLOUT_TIMEOUT)
    return trajectory


@final
class _Allowed:
    """The limits in the form in which the loop asks for them; ``None`` is no limit too."""

    __slots__ = (
        "max_sampled_tokens",
        "max_trajectory_tokens",
        "max_turn_tokens",
        "max_turns",
        "rollout_timeout",
        "sampling_timeout",
    )

    def __init__(self, limits: Any) -> None:
        self.max_turns: int = getattr(limits, "max_turns", 0) or 0
        self.max_turn_tokens: int = getattr(limits, "max_turn_tokens", 0) or 0
        self.max_sampled_tokens: int = getattr(limits, "max_sampled_tokens", 0) or 0
        self.max_trajectory_tokens: int = getattr(limits, "max_trajectory_tokens", 0) or 0
        self.rollout_timeout: float = getattr(limits, "rollout_timeout", 0) or 0
        self.sampling_timeout: float = getattr(limits, "sampling_timeout", 0) or 0


@final
class _Episode:
    """One episode under way."""

    def __init__(self, policy: TokenCompleter, env: Env, allowed: _Allowed) -> None:
        self._policy = policy
        self._env = env
        self._allowed = allowed
        self.deadline = math.inf
        self._transitions: list[Transition] = []
        self._sampled = 0
        self._ob: Any = None
        self._stop_condition: Any = None

    async def run(self) -> Trajectory:
        first: Any = await self._env.initial_observation()
        if hasattr(first, "reward"):
            self._transitions.append(_overflowed(first))
            return Trajectory(self._transitions, None, _reason_in(first.metrics))
        self._ob, self._stop_condition = first
        while True:
            reason, budget = self._budget()
            if reason is not None:
                return self.stop(reason)
            if await self._turn(budget):
                last = self._transitions[-1]
                return Trajectory(self._transitions, self._ob, _reason_in(last.metrics))

    async def _turn(self, budget: int | None) -> bool:
        action = await self._sample(budget)
        step: Any = await self._env.step(
            action.tokens, extra=ActionExtra(stop_reason=action.stop_reason)
        )
        self._transitions.append(
            Transition(self._ob, action, step.reward, step.episode_done, step.metrics, step.logs)
        )
        if self._allowed.max_sampled_tokens:
            self._sampled += len(action.tokens)
        self._ob = step.next_observation
        self._stop_condition = step.next_stop_condition
        return bool(step.episode_done)

    def _budget(self) -> tuple[StopReason | None, int | None]:
        """Return why the episode ends before the next turn, or what that turn may sample."""
        allowed = self._allowed
        if allowed.max_turns and len(self._transitions) >= allowed.max_turns:
            return StopReason.MAX_TURNS, None
        budget = allowed.max_turn_tokens or None
        # A remainder of one token is no turn: it would be sampled only to be cut off. The
        # trajectory's budget comes first, so that it wins when both are used up.
        for reason, limit, used in (
            (StopReason.MAX_TOKENS, allowed.max_trajectory_tokens, self._length),
            (StopReason.MAX_SAMPLED_TOKENS, allowed.max_sampled_tokens, self._sampled_so_far),
        ):
            if limit:
                left = limit - used()
                if left <= 1:
                    return reason, None
                budget = left if budget is None else min(budget, left)
        return None, budget

    def _length(self) -> int:
        length = getattr(self._ob, "length", None)
        return int(length) if length is not None else len(self._ob)

    def _sampled_so_far(self) -> int:
        return self._sampled

    async def _sample(self, budget: int | None) -> Any:
        limit = self._allowed.sampling_timeout
        if not limit:
            return await self._ask(budget)
        deadline = current_time() + limit
        # The episode's own limit comes first and is graceful: a call that comes back after
        # both must not make an error of it.
        if deadline >= self.deadline:
            return await self._ask(budget)
        before = native_cancellations()
        action: Any = None
        error: BaseException | None = None
        with CancelScope(deadline=deadline):
            try:
                action = await self._ask(budget)
            except BaseException as raised:
                error = raised
        try:
            return self._in_time(action, error, deadline, before)
        finally:
            del error

    def _in_time(
        self, action: Any, error: BaseException | None, deadline: float, before: int
    ) -> Any:
        cancelled, raised = split_cancelled(error)
        outside = native_cancellations() > before or scope_cancelled()
        if cancelled is not None and error is not None and outside:
            raise error
        if raised is not None and not isinstance(raised, Exception):
            raise raised
        if (late := current_time() - deadline) >= 0:
            raise RolloutTimeoutError(self._too_late(late, cancelled)) from raised
        if error is not None:
            raise error
        return action

    def _too_late(self, late: float, cancelled: BaseException | None) -> str:
        message = (
            f"turn {len(self._transitions) + 1}: sampling took longer than"
            f" sampling_timeout={self._allowed.sampling_timeout:g} s"
        )
        if cancelled is not None:
            return message
        return (
            f"{message}; it came back {late:.3g} s late: either it swallowed its"
            " cancellation, or the event loop was blocked, by it or by a neighbour"
        )

    async def _ask(self, budget: int | None) -> TokensWithLogprobs:
        if budget is None:
            return await self._policy(self._ob, self._stop_condition)
        return await self._policy(self._ob, self._stop_condition, max_tokens=budget)

    def stop(self, reason: StopReason) -> Trajectory:
        """End the trajectory here: its last transition is done, and says why."""
        if self._transitions:
            last = self._transitions[-1]
            metrics = {k: v for k, v in last.metrics.items() if not k.startswith(_STOP)}
            self._transitions[-1] = attrs.evolve(
                last, episode_done=True, metrics={**metrics, f"{_STOP}{reason}": 1.0}
            )
        return Trajectory(self._transitions, self._ob, reason)


def _overflowed(overflow: Any) -> Transition:
    empty = TokensWithLogprobs([], [], "stop")
    return Transition(None, empty, overflow.reward, True, overflow.metrics, overflow.logs)


def _reason_in(metrics: Mapping[str, Any]) -> str | None:
    for key in metrics:
        if key.startswith(_STOP):
            return key.removeprefix(_STOP)
    return None

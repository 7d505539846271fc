"""What a failed rollout means: the strategies.

A strategy with verdicts is a frozen value and three pure methods. It never awaits, holds
no state and knows of no backend; the engine asks it and obeys.

Limits are read-only properties in the contract and frozen fields in the strategies, which
is the same to whoever reads an instance; pyright compares the classes, hence the ignores.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, TypeAlias, cast, final

import attrs

from ._engine import run_group
from ._exceptions import ConfigurationError, GroupNotViable
from ._interfaces import SupportsMakeEnvs, TokenCompleter
from ._types import Abort, Drop, Failure, Ledger, Retry, RolloutResult, Verdict
from ._validate import count, seconds

__all__ = [
    "Backoff",
    "FailFast",
    "MinViableGroup",
    "RetryOn",
    "RetryOnFailure",
    "RolloutStrategy",
    "VerdictStrategy",
    "rollout_strategy_from_config",
]

RetryOn: TypeAlias = (
    type[BaseException] | tuple[type[BaseException], ...] | Callable[[Exception], bool]
)
"""Which failures are worth a retry: a type, a tuple of types, or a predicate."""


class RolloutStrategy(ABC):
    """How the trajectories of one group are collected. Frozen and picklable.

    The open contract is :meth:`execute`. A strategy that only has to decide about failures
    derives from :class:`VerdictStrategy` instead.
    """

    __slots__ = ()

    @property
    def catches_group_errors(self) -> bool:
        """Whether a training loop skips a group that failed, rather than stopping."""
        return False

    @property
    def cleanup_timeout(self) -> float:
        """Seconds that closing one environment, or ``cleanup()``, may take."""
        return 30.0

    @abstractmethod
    async def execute(
        self, env_group_builder: SupportsMakeEnvs, policy: TokenCompleter
    ) -> RolloutResult:
        """Make the environments, run the rollouts, and return what succeeded.

        Returns:
            The result. Its environments belong to the caller, who closes the plain ones.

        Raises:
            Exception: The failure that ended the group, itself, with a note that names
                slot and attempt, when every task has ended and everything is closed.

        Cancellation:
            Every rollout is cancelled and awaited, every environment closed. That takes at
            most twice ``cleanup_timeout``, unless the user's code refuses to be cancelled.

        Checkpoints:
            Always passes one, as its last step.
        """


@attrs.frozen
class VerdictStrategy(RolloutStrategy):
    """A strategy that is three decisions; the engine does the rest.

    Derive with ``@attrs.frozen``, override what differs. The methods are functions of
    their arguments: they are asked in whatever order the failures come.
    """

    setup_timeout: float = seconds(kw_only=True)
    """Seconds that one ``make_env``, ``__aenter__`` or ``make_envs`` may take."""
    group_timeout: float = seconds(kw_only=True)
    """Seconds that the whole group may take, the closing at its end not counted."""
    cleanup_timeout: float = seconds(30.0, positive=True, kw_only=True)  # pyright: ignore[reportIncompatibleMethodOverride]
    """Seconds that closing one environment, or ``cleanup()``, may take; may be ``inf``."""

    @property
    def per_rollout_timeout(self) -> float:
        """Seconds that one attempt's rollout may run; 0 for no limit.

        Making and closing its environment and backing off do not count; waiting for one of
        the policy's connections does. A field in the strategies that have it.
        """
        return 0.0

    def check(self, group_size: int) -> None:
        """Raise :exc:`ValueError` when the strategy cannot serve a group of this size."""

    @abstractmethod
    def decide(self, failure: Failure, ledger: Ledger) -> Verdict:
        """Say what follows from ``failure``, with the group where ``ledger`` says."""

    def grace_left(self, ledger: Ledger) -> float | None:
        """Say how many seconds the rest may still take; asked after each success.

        Returns:
            ``None`` while the group needs every slot. A number once it can do without
            those still running: they are cut off after as many seconds, or, with ``inf``,
            only when ``group_timeout`` passes.
        """
        return None

    async def execute(
        self, env_group_builder: SupportsMakeEnvs, policy: TokenCompleter
    ) -> RolloutResult:
        """Run the group; see :meth:`RolloutStrategy.execute`.

        Raises:
            Exception: The failure that ended the group, or the error of a verdict.
            GroupTimeoutError: ``group_timeout`` passed.
            RolloutTimeoutError: A limit of an attempt passed, and was not retried.
            RolloutCancelledError: See there.
            EmptyGroupError: The builder made no environment.
        """
        return await run_group(env_group_builder, policy, self)


@final
@attrs.frozen
class FailFast(VerdictStrategy):
    """The first failure cancels the group and is raised."""

    per_rollout_timeout: float = seconds(kw_only=True)  # pyright: ignore[reportIncompatibleMethodOverride]
    """Seconds that one attempt's rollout may run; 0 for no limit."""

    def decide(self, failure: Failure, ledger: Ledger) -> Verdict:
        """Abort with the failure itself."""
        return Abort(failure.error)


def _check_jitter(_: object, attribute: "attrs.Attribute[float]", value: float) -> None:
    if value > 1:
        raise ConfigurationError(f"{attribute.name} must be at most 1, got {value!r}")


def _check_factor(_: object, attribute: "attrs.Attribute[float]", value: float) -> None:
    if not 1 <= value < math.inf:
        raise ConfigurationError(f"{attribute.name} must be at least 1 and finite, got {value!r}")


@final
@attrs.frozen
class Backoff:
    """How long a slot waits before its next attempt: exponential, with full jitter.

    The wait before attempt *n* + 1 is ``min(maximum, initial * factor ** (n - 1))``, of
    which the share ``jitter`` is drawn at random ("full jitter" in M. Brooker, Exponential
    Backoff And Jitter, AWS Architecture Blog, 2015). So rollouts that failed together do
    not start together.
    """

    initial: float = seconds()
    """Seconds before the first retry; 0 retries at once."""
    maximum: float = seconds(30.0)
    """Seconds that no wait exceeds."""
    factor: float = seconds(2.0, validator=_check_factor)
    """What each further attempt of the slot multiplies the wait by."""
    jitter: float = seconds(1.0, validator=_check_jitter)
    """The share of the wait that is random, 0 to 1."""

    def wait(self, attempt: int, draw: float) -> float:
        """Return the seconds to wait after ``attempt`` failed, ``draw`` being in [0, 1)."""
        try:
            wait = self.initial * self.factor ** (attempt - 1)
        except OverflowError:
            wait = self.maximum if self.initial else 0.0
        return min(wait, self.maximum) * (1 - self.jitter * draw)


def _check_retry_on(_: object, attribute: "attrs.Attribute[Any]", value: object) -> None:
    kinds = cast("tuple[object, ...]", value) if isinstance(value, tuple) else (value,)
    for kind in kinds:
        if isinstance(kind, type) and issubclass(kind, BaseException):
            continue
        if isinstance(value, tuple) or isinstance(kind, type) or not callable(kind):
            raise TypeError(
                f"{attribute.name} must be an exception type, a tuple of them or a predicate,"
                f" got {value!r}"
            )


@attrs.frozen
class _Retrying(VerdictStrategy):
    """What the strategies with a retry budget share."""

    retry_on: RetryOn = attrs.field(default=Exception, kw_only=True, validator=_check_retry_on)
    """What is retried. Anything else is treated as if the budget were spent; a timeout
    counts as :exc:`RolloutTimeoutError`."""
    backoff: Backoff = attrs.field(
        default=Backoff(), kw_only=True, validator=attrs.validators.instance_of(Backoff)
    )
    """How long a slot waits before its next attempt."""

    @property
    @abstractmethod
    def max_retries(self) -> int: ...

    @property
    def catches_group_errors(self) -> bool:
        """Whether a training loop skips a group that failed: yes."""
        return True

    def _refusal(self, failure: Failure, ledger: Ledger) -> str:
        """Say why there is no retry, or nothing."""
        if ledger.retries_used >= self.max_retries:
            return f"retry budget of {self.max_retries} spent"
        if not self._admits(failure.error):
            return f"retry_on does not admit {type(failure.error).__name__}"
        return ""

    def _admits(self, error: Exception) -> bool:
        retry_on = self.retry_on
        if isinstance(retry_on, (type, tuple)):
            return isinstance(error, retry_on)
        return retry_on(error)

    def _retry(self, failure: Failure, ledger: Ledger) -> Retry:
        return Retry(self.backoff.wait(failure.attempt, ledger.draw))


@final
@attrs.frozen
class RetryOnFailure(_Retrying):
    """Retry failures in fresh environments while the group's budget lasts, then raise.

    The group comes back whole or not at all. The first ``make_envs()`` of a builder that
    makes whole groups is not retried.
    """

    max_retries: int = count(3)  # pyright: ignore[reportIncompatibleMethodOverride]
    """How many retries the whole group may spend."""
    per_rollout_timeout: float = seconds()  # pyright: ignore[reportIncompatibleMethodOverride]
    """Seconds that one attempt's rollout may run; 0 for no limit."""

    def decide(self, failure: Failure, ledger: Ledger) -> Verdict:
        """Retry, or abort with the failure itself."""
        if reason := self._refusal(failure, ledger):
            return Abort(failure.error, reason)
        return self._retry(failure, ledger)


@final
@attrs.frozen
class MinViableGroup(_Retrying):
    """Make do with part of the group, but with no less than a floor.

    Retries are spent only while the floor is unmet; then failed slots stay empty. When the
    floor is out of reach the group is cancelled. With the floor met, ``group_timeout``
    cuts off the stragglers instead of raising.
    """

    min_successful: int | None = count(None, minimum=1, optional=True)
    """The floor; ``None`` for three quarters of the group, rounded up."""
    max_retries: int = count(3)  # pyright: ignore[reportIncompatibleMethodOverride]
    """How many retries the whole group may spend."""
    per_rollout_timeout: float = seconds()  # pyright: ignore[reportIncompatibleMethodOverride]
    """Seconds that one attempt's rollout may run; 0 for no limit."""
    grace: float | None = seconds(None, optional=True, kw_only=True)
    """Seconds from meeting the floor until the stragglers are cut off; ``None`` waits for
    them, 0 cuts at once."""

    def check(self, group_size: int) -> None:
        """Raise :exc:`ConfigurationError` when the floor is above ``group_size``."""
        if self._floor(group_size) > group_size:
            raise ConfigurationError(
                f"min_successful={self.min_successful} is more than the group size {group_size}"
            )

    def decide(self, failure: Failure, ledger: Ledger) -> Verdict:
        """Retry below the floor, drop the slot above it, abort when it is out of reach.

        The abort's error is a :exc:`GroupNotViable` with the failure as its cause.
        """
        floor = self._floor(ledger.group_size)
        if ledger.succeeded >= floor:
            return Drop()
        reason = self._refusal(failure, ledger)
        if not reason:
            return self._retry(failure, ledger)
        if ledger.succeeded + ledger.in_flight >= floor:
            return Drop()
        error = GroupNotViable(
            f"{ledger.succeeded} of {ledger.group_size} slots filled and {ledger.in_flight}"
            f" still running, {floor} needed",
            ledger.errors,
        )
        error.__cause__ = failure.error
        return Abort(error, reason)

    def grace_left(self, ledger: Ledger) -> float | None:
        """Return the grace once the floor is met; ``inf`` when stragglers are waited for."""
        if ledger.succeeded < self._floor(ledger.group_size):
            return None
        return math.inf if self.grace is None else self.grace

    def _floor(self, group_size: int) -> int:
        if self.min_successful is None:
            return math.ceil(0.75 * group_size)
        return self.min_successful


def rollout_strategy_from_config(value: object) -> RolloutStrategy:
    """Return the strategy that a configuration value stands for.

    Args:
        value: ``False`` for :class:`FailFast`, ``True`` for :class:`RetryOnFailure`, or a
            strategy, which is returned as it is.

    Raises:
        ConfigurationError: ``value`` is none of these.
    """
    if value is False:
        return FailFast()
    if value is True:
        return RetryOnFailure()
    if isinstance(value, RolloutStrategy):
        return value
    raise ConfigurationError(f"no rollout strategy: {value!r}; give False, True or a strategy")

"""The strategies as values and as pure decisions, without an event loop."""

from __future__ import annotations

import math
import pickle
from typing import Any

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout_anyio import (
    Abort,
    Backoff,
    ConfigurationError,
    Drop,
    FailFast,
    Failure,
    GroupNotViable,
    Ledger,
    MinViableGroup,
    Retry,
    RetryOnFailure,
    RolloutResult,
    RolloutStrategy,
    RolloutTimeoutError,
    rollout_strategy_from_config,
)

EXAMPLES = [
    FailFast(per_rollout_timeout=3, cleanup_timeout=math.inf),
    RetryOnFailure(2, 1800, retry_on=(OSError, RolloutTimeoutError), backoff=Backoff(1)),
    RetryOnFailure(),
    MinViableGroup(3, 2, 10, grace=0),
    MinViableGroup(),
]


anything: Any = RetryOnFailure


def transient(error: Exception) -> bool:
    return "transient" in str(error)


def failure(error: Exception | None = None, attempt: int = 1) -> Failure:
    return Failure(error or OSError("x"), slot=2, attempt=attempt, stage="rollout")


@pytest.mark.parametrize("strategy", EXAMPLES)
def test_strategies_are_values(strategy: Any) -> None:
    """Equal by value, hashable, frozen, picklable under every protocol, evolvable."""
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        assert pickle.loads(pickle.dumps(strategy, protocol)) == strategy
    assert hash(attrs.evolve(strategy)) == hash(strategy)
    assert attrs.evolve(strategy, setup_timeout=9) != strategy
    with pytest.raises(attrs.exceptions.FrozenInstanceError):
        strategy.setup_timeout = 1


@pytest.mark.parametrize("field", ["per_rollout_timeout", "setup_timeout", "group_timeout"])
@pytest.mark.parametrize("value", [-1, math.nan, -0.5])
def test_bad_times_name_field_and_value(field: str, value: float) -> None:
    """A negative or NaN limit is a ConfigurationError, which is a ValueError."""
    with pytest.raises(ValueError, match=f"{field} must not be negative or NaN, got {value}"):
        FailFast(**{field: value})


@pytest.mark.parametrize("value", [True, "3", [1], 1j])
def test_times_of_the_wrong_type(value: Any) -> None:
    """Booleans, strings and the rest are a TypeError that names field and value."""
    with pytest.raises(TypeError, match="group_timeout must be a number of seconds, got"):
        RetryOnFailure(group_timeout=value)


def test_none_is_no_limit() -> None:
    """None is taken as 0, for the limits and for the budget."""
    assert RetryOnFailure(None, None) == RetryOnFailure(0, 0)  # type: ignore[arg-type]


@pytest.mark.parametrize("value", [0, None])
def test_cleanup_timeout_is_above_zero(value: Any) -> None:
    """Closing without a limit has to be asked for as inf."""
    with pytest.raises(ConfigurationError, match="cleanup_timeout must be above 0"):
        FailFast(cleanup_timeout=value)


@pytest.mark.parametrize(
    ("make", "error", "match"),
    [
        (lambda: RetryOnFailure(-1), ValueError, "max_retries must be at least 0, got -1"),
        (lambda: RetryOnFailure(2.5), TypeError, "max_retries must be an integer, got 2.5"),
        (lambda: RetryOnFailure(True), TypeError, "max_retries must be an integer, got True"),
        (lambda: MinViableGroup(0), ValueError, "min_successful must be at least 1, got 0"),
        (lambda: MinViableGroup(grace=-1), ValueError, "grace must not be negative"),
        (lambda: anything(retry_on=3), TypeError, "retry_on must be an exception type"),
        (lambda: anything(retry_on=int), TypeError, "retry_on must be"),
        (lambda: anything(retry_on=(OSError, 1)), TypeError, "retry_on must be"),
        (lambda: anything(backoff=3), TypeError, "backoff"),
        (lambda: Backoff(factor=0.5), ValueError, "factor must be at least 1 and finite"),
        (lambda: Backoff(factor=math.inf), ValueError, "factor must be at least 1 and finite"),
        (lambda: Backoff(jitter=2), ValueError, "jitter must be at most 1"),
        (lambda: MinViableGroup(5).check(4), ValueError, "min_successful=5 is more than"),
    ],
)
def test_bad_configuration(make: Any, error: type[Exception], match: str) -> None:
    """Every bad value is refused at once with its name."""
    with pytest.raises(error, match=match):
        make()


def test_what_catches_group_errors() -> None:
    """Fail-fast stops the training loop, the others let it skip the group."""
    assert [s.catches_group_errors for s in (FailFast(), RetryOnFailure(), MinViableGroup())] == [
        False,
        True,
        True,
    ]


def test_fail_fast_aborts() -> None:
    """The failure itself is the error."""
    error = OSError()
    assert FailFast().decide(failure(error), Ledger(8)) == Abort(error)
    assert FailFast().grace_left(Ledger(8, succeeded=8)) is None


def test_retry_on_failure_spends_the_groups_budget() -> None:
    """Retries while the budget lasts, then aborts and says so."""
    strategy = RetryOnFailure(2)
    error = OSError()
    assert strategy.decide(failure(error), Ledger(8, retries_used=1)) == Retry(0.0)
    assert strategy.decide(failure(error), Ledger(8, retries_used=2)) == Abort(
        error, "retry budget of 2 spent"
    )


@pytest.mark.parametrize(
    ("retry_on", "error", "retried"),
    [
        (OSError, ConnectionError(), True),
        (OSError, ValueError(), False),
        ((OSError, ValueError), ValueError(), True),
        (transient, ValueError("transient"), True),
        (transient, ValueError(), False),
        (TimeoutError, RolloutTimeoutError(), True),
    ],
)
def test_retry_on(retry_on: Any, error: Exception, retried: bool) -> None:
    """What retry_on does not admit is treated as if the budget were spent."""
    verdict = RetryOnFailure(retry_on=retry_on).decide(failure(error), Ledger(8))
    assert isinstance(verdict, Retry) is retried
    if isinstance(verdict, Abort):
        assert verdict.reason == f"retry_on does not admit {type(error).__name__}"


def test_min_viable_group_decides_by_its_floor() -> None:
    """Retry below the floor, drop above it, abort when it is out of reach."""
    strategy = MinViableGroup(max_retries=1)
    assert strategy.decide(failure(), Ledger(8, succeeded=6, in_flight=1)) == Drop()
    assert strategy.decide(failure(), Ledger(8, succeeded=5, in_flight=2)) == Retry(0.0)
    spent = Ledger(8, succeeded=4, in_flight=2, retries_used=1)
    assert strategy.decide(failure(), spent) == Drop()
    verdict = strategy.decide(failure(), attrs.evolve(spent, succeeded=3))
    assert isinstance(verdict, Abort)
    assert isinstance(verdict.error, GroupNotViable)
    assert str(verdict.error) == "3 of 8 slots filled and 2 still running, 6 needed"
    assert isinstance(pickle.loads(pickle.dumps(verdict.error)), GroupNotViable)


def test_min_viable_group_grace() -> None:
    """No grace below the floor; then what was configured, or as long as it takes."""
    assert MinViableGroup(4).grace_left(Ledger(8, succeeded=3)) is None
    assert MinViableGroup(4).grace_left(Ledger(8, succeeded=4)) == math.inf
    assert MinViableGroup(4, grace=5).grace_left(Ledger(8, succeeded=4)) == 5
    assert MinViableGroup(grace=0).grace_left(Ledger(8, succeeded=6)) == 0


@given(
    attempt=st.integers(1, 5000),
    draw=st.floats(0, 1, exclude_max=True),
    initial=st.floats(0, 1e6),
    factor=st.floats(1, 1e6),
    jitter=st.floats(0, 1),
)
def test_backoff_is_bounded(
    attempt: int, draw: float, initial: float, factor: float, jitter: float
) -> None:
    """No wait is negative, or longer than the maximum, however many attempts."""
    backoff = Backoff(initial, maximum=30, factor=factor, jitter=jitter)
    wait = backoff.wait(attempt, draw)
    assert 0 <= wait <= 30
    if initial == 0:
        assert wait == 0


def test_backoff_grows() -> None:
    """Without jitter the wait doubles up to the maximum."""
    backoff = Backoff(1, maximum=5, jitter=0)
    assert [backoff.wait(attempt, 0.7) for attempt in (1, 2, 3, 4)] == [1, 2, 4, 5]
    assert Backoff(8, jitter=1).wait(1, 0.75) == 2


def test_strategy_from_config() -> None:
    """False, True, or a strategy; anything else is refused."""
    strategy = MinViableGroup()
    assert rollout_strategy_from_config(False) == FailFast()
    assert rollout_strategy_from_config(True) == RetryOnFailure()
    assert rollout_strategy_from_config(strategy) is strategy
    with pytest.raises(ConfigurationError, match="no rollout strategy: 'yes'"):
        rollout_strategy_from_config("yes")


def test_defaults_of_the_open_contract() -> None:
    """A strategy that only has execute() neither skips groups nor closes for ever."""

    class Own(RolloutStrategy):
        async def execute(self, env_group_builder: Any, policy: Any) -> RolloutResult:
            raise AssertionError

    assert Own().cleanup_timeout == 30
    assert Own().catches_group_errors is False

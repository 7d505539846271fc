"""The records: frozen, picklable, with what users read off them."""

from __future__ import annotations

import pickle
import typing

import attrs
import pytest
from scripted import trajectory

import rollout_anyio
from rollout_anyio import (
    InitialObservationOverflow,
    RolloutError,
    RolloutResult,
    StepResult,
    TokensWithLogprobs,
    Trajectory,
    TrajectoryGroup,
    Transition,
)

RECORDS = [
    StepResult(1.0, True, "next", None, {"a": 1}, {"b": "c"}),
    InitialObservationOverflow(0.5, {"stop/max_tokens": 1.0}),
    TokensWithLogprobs("text", [-0.5]),
    Transition("ob", TokensWithLogprobs([1, 2], None, "length"), 1.0, False),
    trajectory(),
    RolloutError("ValueError", "x", 3, 2, "rollout", timed_out=True, elapsed=1.5, traceback="t"),
    RolloutResult([trajectory()], ["env"], [RolloutError("E", "m")]),
    TrajectoryGroup([trajectory()], [1.0], [{}], [0], 1),
]


@pytest.mark.parametrize("record", RECORDS, ids=lambda record: type(record).__name__)
def test_records_are_frozen_values(record: object) -> None:
    """They pickle under every protocol, compare by value and have readable type hints."""
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        assert pickle.loads(pickle.dumps(record, protocol)) == record
    names = [field.name for field in attrs.fields(type(record))]  # type: ignore[arg-type]
    assert set(names) <= set(typing.get_type_hints(type(record)))
    with pytest.raises(attrs.exceptions.FrozenInstanceError):
        setattr(record, names[0], None)


def test_sequences_are_tuples_and_tokens_are_kept() -> None:
    """Sequences become tuples; tokens stay what they were, text included."""
    assert isinstance(Trajectory([], "end").transitions, tuple)
    assert TokensWithLogprobs("text").tokens == "text"


def test_logprobs() -> None:
    """Asking for log-probabilities that the policy did not give is an error."""
    assert TokensWithLogprobs([1], [-0.1]).logprobs == [-0.1]
    with pytest.raises(ValueError, match="no log-probabilities"):
        _ = TokensWithLogprobs([1]).logprobs


def test_total_rewards() -> None:
    """The sum of the step rewards plus the grader's."""
    two = Trajectory(trajectory(1.0).transitions * 2, "end")
    group = TrajectoryGroup([two, trajectory(0.5)], [10.0, -1.0], [{}, {}], [0, 2], 3)
    assert group.get_total_rewards() == [12.0, -0.5]


def test_an_error_whose_text_raises() -> None:
    """A broken __str__ costs the text, not the record."""

    class Broken(Exception):
        def __str__(self) -> str:
            raise RuntimeError

    record = RolloutError.from_exception(Broken(), "rollout", slot=1, attempt=2)
    assert record.error_type == "Broken"
    assert record.error_message == "<str() of the exception raised RuntimeError>"


def test_an_error_that_does_not_pickle_has_a_record_that_does() -> None:
    """The record is data only."""

    class TwoArguments(Exception):
        def __init__(self, code: int, text: str) -> None:
            super().__init__(text)
            self.code = code

    record = RolloutError.from_exception(TwoArguments(1, "x"), "rollout")
    assert pickle.loads(pickle.dumps(record)) == record


@pytest.mark.parametrize(
    "error",
    [
        getattr(rollout_anyio, name)("message")
        for name in rollout_anyio.__all__
        if isinstance(getattr(rollout_anyio, name), type)
        and issubclass(getattr(rollout_anyio, name), Exception)
    ],
    ids=lambda error: type(error).__name__,
)
def test_exceptions_pickle(error: Exception) -> None:
    """What this library raises survives a worker process."""
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is type(error)
    assert str(copy) == str(error) == "message"

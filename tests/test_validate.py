"""Fields that hold seconds and counts: what they take, and what they say when they refuse."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import attrs
import pytest

from rollout_anyio import ConfigurationError
from rollout_anyio._validate import count, seconds, to_seconds


def _not_seven(_: Any, field: attrs.Attribute[float], value: float) -> None:
    if value == 7:
        raise ValueError(f"{field.name} must not be 7")


@attrs.frozen
class Record:
    limit: float = seconds()
    required: float = seconds(30, positive=True)
    grace: float | None = seconds(None, optional=True)
    named: float = seconds(1, kw_only=True, validator=_not_seven)
    turns: int = count()
    floor: int | None = count(None, minimum=1, optional=True)


def test_defaults() -> None:
    """Defaults pass through the same conversion as values."""
    assert attrs.asdict(Record()) == {
        "limit": 0.0,
        "required": 30.0,
        "grace": None,
        "named": 1.0,
        "turns": 0,
        "floor": None,
    }
    assert isinstance(Record().required, float)


@pytest.mark.parametrize("value", [2, 2.0, Fraction(2)])
def test_seconds_are_floats(value: Any) -> None:
    """Any real number is taken, and kept as a float."""
    limit = Record(limit=value).limit
    assert (limit, type(limit)) == (2.0, float)


def test_seconds_may_be_infinite() -> None:
    """Also where 0 is refused."""
    assert Record(limit=math.inf, required=math.inf).required == math.inf


def test_none_is_no_limit() -> None:
    """None is 0, but where None has a meaning of its own it is kept."""
    nothing: dict[str, Any] = {"limit": None, "turns": None, "grace": None, "floor": None}
    record = Record(**nothing)
    assert (record.limit, record.turns, record.grace, record.floor) == (0.0, 0, None, None)


@pytest.mark.parametrize("name", ["limit", "required", "grace", "named"])
@pytest.mark.parametrize("value", [-1, -0.5, -math.inf, math.nan])
def test_seconds_out_of_range(name: str, value: Any) -> None:
    """Negative numbers and NaN are a ConfigurationError that names field and value."""
    with pytest.raises(
        ConfigurationError, match=f"{name} must not be negative or NaN, got {value}"
    ):
        Record(**{name: value})


@pytest.mark.parametrize("value", [0, 0.0, None])
def test_positive_seconds_refuse_zero(value: Any) -> None:
    """Zero is refused where it would not mean 'no limit', and so is None."""
    with pytest.raises(ConfigurationError, match="required must be above 0, got"):
        Record(required=value)


@pytest.mark.parametrize("name", ["limit", "required", "grace", "named"])
@pytest.mark.parametrize("value", [True, False, "3", [1], 1j])
def test_seconds_of_the_wrong_type(name: str, value: Any) -> None:
    """Booleans and what is no real number are a TypeError that names field and value."""
    with pytest.raises(TypeError, match=f"{name} must be a number of seconds, got") as caught:
        Record(**{name: value})
    assert repr(value) in str(caught.value)


@pytest.mark.parametrize(("name", "value", "minimum"), [("turns", -1, 0), ("floor", 0, 1)])
def test_counts_below_the_minimum(name: str, value: int, minimum: int) -> None:
    """A count below its minimum is a ConfigurationError that names field, bound and value."""
    with pytest.raises(ConfigurationError, match=f"{name} must be at least {minimum}, got {value}"):
        Record(**{name: value})


@pytest.mark.parametrize("name", ["turns", "floor"])
@pytest.mark.parametrize("value", [True, 1.0, math.nan, "1"])
def test_counts_of_the_wrong_type(name: str, value: Any) -> None:
    """Booleans, floats and the rest are a TypeError that names field and value."""
    with pytest.raises(TypeError, match=f"{name} must be an integer, got {value!r}"):
        Record(**{name: value})


def test_a_validator_sees_the_converted_value() -> None:
    """A field's own validator runs after the conversion."""
    with pytest.raises(ValueError, match="named must not be 7"):
        Record(named=Fraction(7))  # type: ignore[arg-type]


def test_evolving_checks_again() -> None:
    """A record made from another passes the same checks."""
    assert attrs.evolve(Record(), turns=3).turns == 3
    with pytest.raises(ConfigurationError, match="limit"):
        attrs.evolve(Record(), limit=-1)


def test_seconds_without_a_field() -> None:
    """An argument of a function is checked in the same words."""
    assert to_seconds(None, "grader_timeout") == 0.0
    with pytest.raises(ConfigurationError, match="grader_timeout must not be negative"):
        to_seconds(-1, "grader_timeout")

"""Checked attrs fields: seconds and counts, with messages that name field and value."""

import math
from collections.abc import Callable
from numbers import Integral, Real
from typing import Any

import attrs

from ._exceptions import ConfigurationError

__all__ = ["count", "seconds", "to_seconds"]


def to_seconds(value: object, name: str, *, positive: bool = False) -> float:
    """Return ``value`` as seconds; ``None`` is 0, which stands for no limit.

    Args:
        value: A real number, or ``None``.
        name: What it is called in a message.
        positive: Whether 0 is refused.

    Raises:
        TypeError: It is no number; booleans are none.
        ConfigurationError: It is negative or NaN, or 0 where that is refused.
    """
    if value is None:
        value = 0.0
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{name} must be a number of seconds, got {value!r}")
    number = float(value)
    if math.isnan(number) or number < 0:
        raise ConfigurationError(f"{name} must not be negative or NaN, got {value!r}")
    if positive and not number:
        raise ConfigurationError(f"{name} must be above 0, got {value!r}")
    return number


def seconds(
    default: float | None = 0.0,
    *,
    positive: bool = False,
    optional: bool = False,
    kw_only: bool = False,
    validator: Callable[[Any, "attrs.Attribute[float]", float], Any] | None = None,
) -> Any:
    """Declare a field that holds seconds, or with ``optional`` also ``None``."""

    def convert(value: object, _: object, field: "attrs.Attribute[Any]") -> float | None:
        if optional and value is None:
            return None
        return to_seconds(value, field.name, positive=positive)

    return attrs.field(
        default=default,
        converter=attrs.Converter(convert, takes_self=True, takes_field=True),
        validator=validator,
        kw_only=kw_only,
    )


def count(default: int | None = 0, *, minimum: int = 0, optional: bool = False) -> Any:
    """Declare a field that holds an integer, by default none below 0.

    ``None`` is 0, but with ``optional`` it is kept.
    """

    def convert(value: object, _: object, field: "attrs.Attribute[Any]") -> int | None:
        if value is None:
            return None if optional else 0
        if isinstance(value, bool) or not isinstance(value, Integral):
            raise TypeError(f"{field.name} must be an integer, got {value!r}")
        if value < minimum:
            raise ConfigurationError(f"{field.name} must be at least {minimum}, got {value!r}")
        return int(value)

    return attrs.field(
        default=default,
        converter=attrs.Converter(convert, takes_self=True, takes_field=True),
    )

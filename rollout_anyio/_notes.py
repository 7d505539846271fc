"""The note on the exception that ends a group: where, what was spent, what else failed."""

from __future__ import annotations

from collections.abc import Sequence

from ._types import RolloutError

__all__ = ["add_note", "group_note", "summary"]

_SHOWN = 3
_LENGTH = 120


def add_note(error: BaseException, note: str) -> None:
    """Add ``note``, if ``error`` takes notes; a frozen dataclass does not."""
    try:
        error.add_note(f"rollout_anyio: {note}")
    except Exception:
        return


def group_note(head: str, errors: Sequence[RolloutError]) -> str:
    """Return ``head`` and the failures of the group: some of them, then the count."""
    if not errors:
        return head
    shown = ", ".join(_told(error) for error in errors[:_SHOWN])
    rest = f", and {len(errors) - _SHOWN} more" if len(errors) > _SHOWN else ""
    plural = "" if len(errors) == 1 else "s"
    told = f"{len(errors)} failure{plural} in this group: {shown}{rest}"
    return f"{head}; {told}" if head else told


def summary(error: RolloutError) -> str:
    """Return type and message on one line, cut to a readable length."""
    line = " ".join(f"{error.error_type}: {error.error_message}".split())
    return line if len(line) <= _LENGTH else f"{line[: _LENGTH - 3]}..."


def _told(error: RolloutError) -> str:
    place = "" if error.slot is None else f"slot {error.slot} "
    closing = "close " if error.stage == "close" else ""
    return f"{place}{closing}{summary(error)}"

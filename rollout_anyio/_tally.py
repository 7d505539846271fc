"""Where a group stands: slots filled and dropped, failures, retries spent. No awaits here."""

from __future__ import annotations

import random
from typing import Any, NamedTuple, final

from ._types import Ledger, MissingReason, RolloutError, RolloutResult

__all__ = ["Tally"]


class _Filled(NamedTuple):
    trajectory: Any
    env: Any


@final
class Tally:
    """What the engine writes down, strategies are asked about, and the result is made of."""

    def __init__(self) -> None:
        self.size = 0
        self.errors: tuple[RolloutError, ...] = ()
        self._filled: dict[int, _Filled] = {}
        self._dropped: set[int] = set()
        self._retries_used = 0

    def fill(self, slot: int, trajectory: Any, env: Any) -> None:
        """Note that ``slot`` has its trajectory."""
        self._filled[slot] = _Filled(trajectory, env)

    def drop(self, slot: int) -> None:
        """Note that ``slot`` stays empty."""
        self._dropped.add(slot)

    def spend_retry(self) -> None:
        """Note that one of the retry budget is spent."""
        self._retries_used += 1

    @property
    def filled(self) -> int:
        """How many slots are filled."""
        return len(self._filled)

    @property
    def unsettled(self) -> int:
        """How many slots are neither filled nor dropped."""
        return self.size - len(self._filled) - len(self._dropped)

    def unfilled(self) -> list[int]:
        """Return the slots that are neither filled nor dropped."""
        return [slot for slot in range(self.size) if self.wants(slot)]

    def wants(self, slot: int) -> bool:
        """Tell whether ``slot`` is one of the group's and still to be filled."""
        return slot < self.size and slot not in self._filled and slot not in self._dropped

    def ledger(self, *, in_flight: int) -> Ledger:
        """Return what a strategy decides on."""
        return Ledger(
            group_size=self.size,
            succeeded=len(self._filled),
            dropped=len(self._dropped),
            in_flight=in_flight,
            retries_used=self._retries_used,
            errors=self.errors,
            draw=random.random(),
        )

    def result(self) -> RolloutResult:
        """Return what was collected, in slot order."""
        slots = sorted(self._filled)
        missing: dict[int, MissingReason] = dict.fromkeys(self.unfilled(), "cut_off")
        missing.update(dict.fromkeys(self._dropped, "failed"))
        return RolloutResult(
            trajectories=[self._filled[slot].trajectory for slot in slots],
            envs=[self._filled[slot].env for slot in slots],
            errors=self.errors,
            slots=slots,
            group_size=self.size,
            missing=sorted(missing.items()),
        )

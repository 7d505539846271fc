"""One call into the user's code, against the clock: what comes of it is a value.

Making, entering, running, grading, closing: whatever the user brings is called inside a
:class:`Call`, so that these rules hold for all of them alike.

- A deadline is recognised by its own clock, never by an exception's type, and late is
  late: what returns or raises after the deadline has timed out, whatever it brings.
- A cancelled error that nobody asked for is a failure, one that somebody asked for is
  let through.
- A :exc:`KeyboardInterrupt` or :exc:`SystemExit` in an exception group is taken out of it.
"""

from __future__ import annotations

import math
from types import TracebackType
from typing import Self, cast, final

from anyio import CancelScope, current_time

from ._exceptions import RolloutCancelledError, RolloutTimeoutError
from ._native import native_cancellations, scope_cancelled, split_cancelled
from ._types import RolloutError, Stage

__all__ = ["Call", "interrupt_in"]

_LIMITS: dict[Stage, str] = {
    "make_envs": "setup_timeout",
    "make_env": "setup_timeout",
    "rollout": "per_rollout_timeout",
    "close": "cleanup_timeout",
    "grade": "grader_timeout",
    "cleanup": "cleanup_timeout",
}


@final
class Call:
    """A block around one call into the user's code.

    After the block ``error`` is ``None`` or what went wrong, and ``late`` says whether it
    is our limit that passed. The block itself raises only a cancellation that was asked
    for, and with ``hold`` keeps even that, in ``cancelled``.

    Args:
        stage: What is called; names the limit in messages.
        seconds: The limit; 0 for none.
        slot: The slot, for messages and records.
        attempt: The attempt, for messages and records.
        shield: Protect the call from cancellation from outside.
        within: A scope around the block whose deadline carries the limit, instead of a
            scope of the block's own: ``__aenter__`` may open scopes that it leaves open,
            and a scope of ours between would corrupt the stack.
        scope: The block's own scope, where somebody else must be able to cancel it.
        hold: Keep a cancellation instead of letting it through.
    """

    __slots__ = (
        "_before",
        "_hold",
        "_scope",
        "_shield",
        "_started",
        "_within",
        "attempt",
        "cancelled",
        "deadline",
        "elapsed",
        "error",
        "late",
        "native",
        "seconds",
        "slot",
        "stage",
    )

    def __init__(
        self,
        stage: Stage,
        seconds: float,
        *,
        slot: int | None = None,
        attempt: int | None = None,
        shield: bool = False,
        within: CancelScope | None = None,
        scope: CancelScope | None = None,
        hold: bool = False,
    ) -> None:
        self.stage: Stage = stage
        self.seconds = seconds
        self.slot = slot
        self.attempt = attempt
        self._shield = shield
        self._within = within
        self._scope = scope
        self._hold = hold
        self.error: BaseException | None = None
        self.cancelled: BaseException | None = None
        self.native = False
        self.late = False
        self.elapsed = 0.0

    def __enter__(self) -> Self:
        self._before = native_cancellations()
        self._started = current_time()
        self.deadline = self._started + self.seconds if self.seconds else math.inf
        if self._within is not None:
            self._within.deadline = self.deadline
            return self
        if self._scope is None and (self.seconds or self._shield):
            self._scope = CancelScope(shield=self._shield)
        if self._scope is not None:
            self._scope.deadline = self.deadline
            self._scope.__enter__()
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> bool:
        if self._within is not None:
            self._within.deadline = math.inf
        elif self._scope is not None:
            # Without the exception: a cancelled error that is not anyio's own would pass
            # a cancelled scope, and the judgement below wants all of them.
            self._scope.__exit__(None, None, None)
        now = current_time()
        self.elapsed = now - self._started
        self.late = now >= self.deadline
        cancelled, raised = split_cancelled(exc)
        if cancelled is not None and self._was_asked_for():
            self.cancelled = cancelled
        self.error = self._judge(cancelled, raised)
        return self.cancelled is None or self._hold or self.error is not None

    def _was_asked_for(self) -> bool:
        # A cancelled scope that is still open has its own requests in the count.
        if self._within is None or not self._within.cancel_called:
            self.native = native_cancellations() > self._before
        if self.native:
            return True
        if self.late or self._shield:
            return False
        return scope_cancelled() or (self._scope is not None and self._scope.cancel_called)

    def _judge(
        self, cancelled: BaseException | None, raised: BaseException | None
    ) -> BaseException | None:
        if raised is not None and not isinstance(raised, Exception):
            return interrupt_in(raised) or raised
        if self.native:
            return None
        if self.late:
            error = RolloutTimeoutError(self._too_late(swallowed=cancelled is None))
            error.__cause__ = raised
            return error
        if cancelled is not None and self.cancelled is None and raised is None:
            return self.unasked(cancelled)
        return raised

    def unasked(self, cancelled: BaseException) -> RolloutCancelledError:
        """Return the failure that a cancelled error is which nobody asked for."""
        error = RolloutCancelledError(
            f"{self.site}: {type(cancelled).__name__} came out of it although nothing had"
            " cancelled it; something that it awaited was cancelled by somebody else"
        )
        error.__cause__ = cancelled
        return error

    def take(self) -> BaseException:
        """Hand ``error``, or else ``cancelled``, over to the caller.

        It holds the frames that it passed, theirs hold the call: kept here, it would keep
        itself alive, and with it the environment.
        """
        error = self.error or self.cancelled
        assert error is not None
        self.error = self.cancelled = None
        try:
            return error
        finally:
            del error

    @property
    def site(self) -> str:
        """Where the call stands: slot and attempt, if it has them, and stage."""
        return site(self.stage, self.slot, self.attempt)

    def record(self, error: BaseException) -> RolloutError:
        """Take down ``error`` as this call's failure."""
        return RolloutError.from_exception(
            error,
            self.stage,
            slot=self.slot,
            attempt=self.attempt,
            timed_out=self.late,
            elapsed=self.elapsed,
        )

    def _too_late(self, *, swallowed: bool) -> str:
        message = f"{self.site}: took longer than {_LIMITS[self.stage]}={self.seconds:g} s"
        if not swallowed:
            return message
        return (
            f"{message}; it came back {self.elapsed - self.seconds:.3g} s late: either it"
            " swallowed its cancellation, or the event loop was blocked, by it or by a"
            " neighbour"
        )


def site(stage: Stage, slot: int | None, attempt: int | None) -> str:
    """Name a place in a group's life for a message."""
    if slot is None:
        return f"stage {stage}"
    if attempt is None:
        return f"slot {slot}, stage {stage}"
    return f"slot {slot}, attempt {attempt}, stage {stage}"


def interrupt_in(error: BaseException) -> BaseException | None:
    """Find a :exc:`KeyboardInterrupt` or :exc:`SystemExit` in an exception group.

    Ctrl-C reaches a trio program through whichever nursery waits, wrapped by each.
    """
    if isinstance(error, BaseExceptionGroup):
        for member in cast("BaseExceptionGroup[BaseException]", error).exceptions:
            if found := interrupt_in(member):
                return found
        return None
    return error if isinstance(error, (KeyboardInterrupt, SystemExit)) else None

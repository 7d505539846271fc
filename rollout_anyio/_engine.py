"""The one place that runs attempts concurrently: slots, verdicts, the end of the group.

One task per slot, each looping over its slot's attempts, in one task group that is the
only supervisor. Nothing is raised inside it: a failure is recorded, the group's scope is
cancelled, and the failure itself is raised when every task has ended and everything is
closed. So nothing ever has to be unwrapped, but for Ctrl-C, which trio hands to whoever
waits for a task group, as a group.

Invariant: the last step before returning or raising, after all closing, is a checkpoint,
so that a cancellation from outside wins on every backend. Until it has passed, the
environments of the result are still ours to close.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from typing import Any, Protocol, final

from anyio import create_task_group, current_time, get_cancelled_exc_class, sleep
from anyio.abc import TaskGroup
from anyio.lowlevel import checkpoint

from ._attempt import run_attempt
from ._call import Call, interrupt_in
from ._closing import ToClose
from ._environments import Environments
from ._episode import do_single_rollout
from ._exceptions import GroupTimeoutError, RolloutCancelledError
from ._guard import Guards
from ._notes import add_note, group_note, summary
from ._tally import Tally
from ._types import Abort, Drop, Failure, Ledger, Retry, RolloutResult, Verdict

__all__ = ["Rules", "run_group"]

_logger = logging.getLogger("rollout_anyio")


class Rules(Protocol):
    """What the engine asks of a strategy: its limits, and three pure decisions."""

    @property
    def per_rollout_timeout(self) -> float: ...
    @property
    def setup_timeout(self) -> float: ...
    @property
    def group_timeout(self) -> float: ...
    @property
    def cleanup_timeout(self) -> float: ...

    def check(self, group_size: int) -> None: ...

    def decide(self, failure: Failure, ledger: Ledger) -> Verdict: ...

    def grace_left(self, ledger: Ledger) -> float | None: ...


async def run_group(builder: Any, policy: Any, rules: Rules) -> RolloutResult:
    """Run the group that ``builder`` describes under ``rules``, to its result or failure."""
    group = _Group(builder, policy, rules)
    try:
        await group.run()
        await group.environments.close(everything=group.failed)
        group.raise_interrupt()
        await checkpoint()
    except BaseException:
        try:
            await group.environments.close(everything=True)
        except get_cancelled_exc_class():
            pass  # A cancellation or an interrupt is on its way out already.
        raise
    return group.result()


@final
class _Group:
    """One group under way; also what its attempts see of it (``AttemptHost``)."""

    guards: Guards
    _tasks: TaskGroup

    def __init__(self, builder: Any, policy: Any, rules: Rules) -> None:
        self._policy = policy
        self._rules = rules
        self.per_rollout_timeout = rules.per_rollout_timeout
        self.setup_timeout = rules.setup_timeout
        self.cleanup_timeout = rules.cleanup_timeout
        self._rollout: Callable[..., Any] = getattr(builder, "run_rollout", do_single_rollout)
        self._tally = Tally()
        self.environments = Environments(
            builder,
            self._tally,
            setup_timeout=rules.setup_timeout,
            cleanup_timeout=rules.cleanup_timeout,
            report=self.report_close,
        )
        self._failure: BaseException | None = None
        self._note = ""
        self._deadline = math.inf
        self._viable = False
        self._straggler = ""

    @property
    def failed(self) -> bool:
        """Whether the group ends in an exception."""
        return self._failure is not None

    async def run(self) -> None:
        """Run every slot to its end; raise only an interrupt or a cancellation."""
        try:
            async with create_task_group() as self._tasks:
                if self._rules.group_timeout:
                    self._set_deadline(current_time() + self._rules.group_timeout)
                await self._start()
        except BaseExceptionGroup as error:
            interrupt = interrupt_in(error)
            if interrupt is None:
                raise
            raise interrupt from None
        self.raise_interrupt()
        if self._failure is None:
            self._failure = self._why_incomplete()

    def raise_interrupt(self) -> None:
        """Raise what is no :exc:`Exception`, if the user's code raised any, as itself."""
        if self._failure is not None and not isinstance(self._failure, Exception):
            raise self._failure

    async def _start(self) -> None:
        if not self.environments.one_by_one:
            call = await self.environments.make_first()
            if call.error is not None:
                self.fail(call, call.take())
                return
        try:
            size = self.environments.group_size()
            self._rules.check(size)
        except Exception as error:
            self._failure = error
            return
        self._tally.size = size
        self.guards = Guards(
            self._tasks, tasks=size, seconds=self.cleanup_timeout, on_end=self._on_end
        )
        self.environments.open(self._tasks, self.guards)
        for slot in range(size):
            self._tasks.start_soon(self._run_slot, slot, name=f"rollout_anyio slot {slot}")

    async def _run_slot(self, slot: int) -> None:
        attempt = 1
        try:
            while isinstance(verdict := await run_attempt(self, slot, attempt), Retry):
                if verdict.wait > 0:
                    await sleep(verdict.wait)
                attempt += 1
        finally:
            self.guards.task_done()

    def _on_end(self) -> None:
        """Close what no attempt holds while the attempts are still winding down.

        A creation may take ``cleanup_timeout`` to end and as long again to close what it
        made; closing the rest after that would take a third.
        """
        if not self._viable or self.failed:
            self.environments.close_all_soon()

    async def run_rollout(self, env: Any) -> Any:
        """Run the builder's own rollout, or the episode loop."""
        return await self._rollout(self._policy, env)

    def succeed(self, item: ToClose, trajectory: Any, *, closed: bool) -> bool:
        """Fill the slot, unless it comes after the group's deadline; say which."""
        if self._deadline < math.inf and (late := current_time() - self._deadline) >= 0:
            self._straggler = (
                f"; slot {item.slot}, attempt {item.attempt} came back {late:.3g} s late: it"
                " swallowed its cancellation, or the event loop was blocked, by it or by a"
                " neighbour"
            )
            return False
        self._tally.fill(item.slot, trajectory, item.env)
        if not closed:
            self.environments.keep(item)
        try:
            grace = self._rules.grace_left(self._tally.ledger(in_flight=self._tally.unsettled))
        except Exception as error:
            self._abort(error, "")
            return True
        if grace is not None:
            self._viable = True
            if self._tally.unsettled:
                self._set_deadline(current_time() + grace)
        return True

    def fail(self, call: Call, error: BaseException) -> Verdict | None:
        """Take down a failed attempt, and do what the strategy says about it."""
        if not isinstance(error, Exception):
            self._interrupt(error)
            return None
        if self._viable and current_time() >= self._deadline:
            return None  # A straggler that was cut off is not an error.
        self._tally.errors += (call.record(error),)
        over = self.failed or current_time() >= self._deadline
        _logger.log(
            logging.DEBUG if over else logging.WARNING,
            "%s failed after %.3f s: %s",
            call.site,
            call.elapsed,
            summary(self._tally.errors[-1]),
        )
        if over:
            return None
        if call.slot is None or call.attempt is None:
            self._abort(error, f"{call.site}, after {call.elapsed:.3g} s")
            return None
        failure = Failure(error, call.slot, call.attempt, call.stage, call.late, call.elapsed)
        return self._obey(failure, f"{call.site}, after {call.elapsed:.3g} s")

    def _obey(self, failure: Failure, place: str) -> Verdict:
        ledger = self._tally.ledger(in_flight=self._tally.unsettled - 1)
        try:
            verdict = self._rules.decide(failure, ledger)
        except Exception as error:
            verdict = Abort(error)
        match verdict:
            case Retry():
                self._tally.spend_retry()
                _logger.debug("%s: retry in %.3f s", place, verdict.wait)
            case Drop():
                self._tally.drop(failure.slot)
                _logger.debug("%s: dropped", place)
            case Abort():
                reason = verdict.reason or type(verdict.error).__name__
                _logger.error("%s: group cancelled: %s", place, reason)
                self._abort(verdict.error, f"{place}; {reason}" if verdict.reason else place)
            case _:
                self._abort(TypeError(f"decide() returned {verdict!r}: no verdict"), place)
        return verdict

    def report_close(self, call: Call) -> None:
        """Take down a close that failed, hung or was torn."""
        torn = call.error is None
        error = call.take()
        self._tally.errors += (call.record(error),)
        _logger.warning("%s failed: %s", call.site, summary(self._tally.errors[-1]))
        if not torn and not isinstance(error, Exception):
            self._interrupt(error)

    def _abort(self, error: Exception, note: str) -> None:
        self._failure = error
        self._note = note
        self._tasks.cancel_scope.cancel()

    def _interrupt(self, error: BaseException) -> None:
        if self._failure is None or isinstance(self._failure, Exception):
            self._failure = error
        self._tasks.cancel_scope.cancel()

    def _set_deadline(self, deadline: float) -> None:
        self._deadline = min(self._deadline, deadline)
        self._tasks.cancel_scope.deadline = self._deadline

    def _why_incomplete(self) -> Exception | None:
        if self._tally.size and not self._tally.unsettled:
            return None
        if current_time() < self._deadline:
            # The last net. A cancellation of the caller's own comes out of the checkpoint
            # before this is raised.
            return RolloutCancelledError(
                f"the task of slot {self._tally.unfilled()[0]} was cancelled from outside"
                if self._tally.size
                else "stage make_envs was cancelled from outside"
            )
        if self._viable:
            return None
        return GroupTimeoutError(
            f"group_timeout={self._rules.group_timeout:g} s passed with {self._tally.filled} of"
            f" {self._tally.size} slots filled{self._straggler}"
        )

    def result(self) -> RolloutResult:
        """Return the result, or raise the failure with its note."""
        failure, self._failure = self._failure, None
        try:
            if failure is not None:
                if note := group_note(self._note, self._tally.errors):
                    add_note(failure, note)
                raise failure
        finally:
            # The exception holds this frame, and the frame would hold the exception.
            del failure
        return self._tally.result()

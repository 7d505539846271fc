"""The one place that runs attempts concurrently: slots, verdicts, the end of the group.

One task per slot, each looping over its slot's attempts, in one task group that is the
only supervisor. Nothing is raised inside it: a failure is recorded, the group's scope is
cancelled, and the failure itself is raised when every task has ended and everything is
closed. So nothing ever has to be unwrapped, but for Ctrl-C, which trio hands to whoever
waits for a task group, as a group.

Invariants:

- An environment is in exactly one place: in its slot's task, in ``_spares``, or in
  ``_kept``. Whoever takes it out closes it.
- The last step before returning or raising, after all closing, is a checkpoint: a
  cancellation from outside wins on every backend. Until it has passed, the environments
  of the result are still ours to close.
"""

from __future__ import annotations

import logging
import math
import random
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, final

from anyio import Lock, create_task_group, current_time, get_cancelled_exc_class, sleep
from anyio.abc import TaskGroup
from anyio.lowlevel import checkpoint, checkpoint_if_cancelled

from ._attempt import run_attempt
from ._call import Call, interrupt_in
from ._closing import ToClose, close_all, close_env
from ._episode import do_single_rollout
from ._exceptions import (
    ConfigurationError,
    EmptyGroupError,
    GroupTimeoutError,
    RolloutCancelledError,
)
from ._guard import Guards
from ._notes import add_note, group_note, summary
from ._types import (
    Abort,
    Drop,
    Failure,
    Ledger,
    MissingReason,
    Retry,
    RolloutError,
    RolloutResult,
    Verdict,
)

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
        await group.close(everything=group.failed)
        group.raise_interrupt()
        await checkpoint()
    except BaseException:
        try:
            await group.close(everything=True)
        except get_cancelled_exc_class():
            pass  # A cancellation or an interrupt is on its way out already.
        raise
    return group.result()


class _Kept(NamedTuple):
    """A filled slot."""

    trajectory: Any
    item: ToClose
    closed: bool


@final
class _Group:
    """One group under way; also what its attempts see of it (``AttemptHost``)."""

    guards: Guards
    _tasks: TaskGroup

    def __init__(self, builder: Any, policy: Any, rules: Rules) -> None:
        self._builder = builder
        self._policy = policy
        self._rules = rules
        self.per_rollout_timeout = rules.per_rollout_timeout
        self.setup_timeout = rules.setup_timeout
        self.cleanup_timeout = rules.cleanup_timeout
        self.makes_one = (
            getattr(builder, "make_env", None) is not None
            and getattr(builder, "group_size", None) is not None
        )
        self._rollout: Callable[..., Any] = getattr(builder, "run_rollout", do_single_rollout)
        self._making = Lock()
        self._size = 0
        self._spares: dict[int, ToClose] = {}
        self._kept: dict[int, _Kept] = {}
        self._dropped: set[int] = set()
        self._retries_used = 0
        self._errors: tuple[RolloutError, ...] = ()
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
        if not self.makes_one and not await self._make_first():
            return
        try:
            self._size = _group_size(self._builder) if self.makes_one else len(self._spares)
            self._rules.check(self._size)
        except Exception as error:
            self._failure = error
            return
        self.guards = Guards(
            self._tasks,
            tasks=self._size,
            seconds=self.cleanup_timeout,
            on_end=self._close_on_end,
        )
        for slot in range(self._size):
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

    async def make_env(self, slot: int) -> Any:
        """Make the slot's environment, with a slot builder."""
        return await self._builder.make_env(slot)

    async def run_rollout(self, env: Any) -> Any:
        """Run the builder's own rollout, or the episode loop."""
        return await self._rollout(self._policy, env)

    async def _make_first(self) -> bool:
        call = Call("make_envs", self.setup_timeout)
        envs: tuple[Any, ...] = ()
        with call:
            envs = await self._make_envs()
            if not envs:
                raise EmptyGroupError("make_envs() returned no environment")
        self._spares = {slot: ToClose(env, slot, None) for slot, env in enumerate(envs)}
        if call.error is None:
            return True
        self.fail(call, call.take())
        return False

    async def _make_envs(self) -> tuple[Any, ...]:
        envs = tuple(await self._builder.make_envs())
        for slot, env in enumerate(envs):
            if env is None:
                raise TypeError(f"make_envs() returned None for slot {slot}")
        return envs

    async def take_env(self, slot: int, attempt: int) -> tuple[Any, Call]:
        """Take the slot's environment out of the spares, or out of a fresh group."""
        call = Call("make_envs", self.setup_timeout, slot=slot, attempt=attempt)
        if slot not in self._spares:
            # A foreign make_envs() need not be reentrant; and who waited for another's call
            # looks first whether its own spare has come with it.
            async with self._making:
                if slot not in self._spares:
                    await self._make_group(call, slot)
            # Whoever waited may be late for the end of the group: the spare stays one.
            await checkpoint_if_cancelled()
        if call.error is not None:
            return None, call
        return self._spares.pop(slot).env, call

    async def _make_group(self, call: Call, slot: int) -> None:
        envs: tuple[Any, ...] = ()
        with call:
            envs = await self._make_envs()
            if slot >= len(envs):
                raise EmptyGroupError(
                    f"make_envs() returned {len(envs)} environments on a retry, none of them"
                    f" for slot {slot} of {self._size}"
                )
        for position, env in enumerate(envs):
            spare = ToClose(env, position, None)
            if call.late or position >= self._size or self._is_settled(position):
                self._close_soon(spare)
                continue
            if position in self._spares:
                self._close_soon(self._spares[position])
            self._spares[position] = spare

    def _is_settled(self, slot: int) -> bool:
        return slot in self._kept or slot in self._dropped

    def _close_soon(self, item: ToClose) -> None:
        self._tasks.start_soon(
            close_env, item, self.cleanup_timeout, self.report_close, name="rollout_anyio close"
        )

    def succeed(self, item: ToClose, trajectory: Any, *, closed: bool) -> bool:
        """Fill the slot, unless it comes after the group's deadline; say which."""
        if self._deadline < math.inf and (late := current_time() - self._deadline) >= 0:
            self._straggler = (
                f"; slot {item.slot}, attempt {item.attempt} came back {late:.3g} s late: it"
                " swallowed its cancellation, or the event loop was blocked, by it or by a"
                " neighbour"
            )
            return False
        self._kept[item.slot] = _Kept(trajectory, item, closed)
        try:
            grace = self._rules.grace_left(self._ledger(in_flight=self._unsettled()))
        except Exception as error:
            self._abort(error, "")
            return True
        if grace is not None:
            self._viable = True
            if self._unsettled():
                self._set_deadline(current_time() + grace)
        return True

    def fail(self, call: Call, error: BaseException) -> Verdict | None:
        """Take down a failed attempt, and do what the strategy says about it."""
        if not isinstance(error, Exception):
            self._interrupt(error)
            return None
        if self._viable and current_time() >= self._deadline:
            return None  # A straggler that was cut off is not an error.
        self._errors += (call.record(error),)
        over = self.failed or current_time() >= self._deadline
        _logger.log(
            logging.DEBUG if over else logging.WARNING,
            "%s failed after %.3f s: %s",
            call.site,
            call.elapsed,
            summary(self._errors[-1]),
        )
        if over:
            return None
        if call.slot is None or call.attempt is None:
            self._abort(error, f"{call.site}, after {call.elapsed:.3g} s")
            return None
        failure = Failure(error, call.slot, call.attempt, call.stage, call.late, call.elapsed)
        return self._obey(failure, f"{call.site}, after {call.elapsed:.3g} s")

    def _obey(self, failure: Failure, place: str) -> Verdict:
        ledger = self._ledger(in_flight=self._unsettled() - 1)
        try:
            verdict = self._rules.decide(failure, ledger)
        except Exception as error:
            verdict = Abort(error)
        match verdict:
            case Retry():
                self._retries_used += 1
                _logger.debug("%s: retry in %.3f s", place, verdict.wait)
            case Drop():
                self._dropped.add(failure.slot)
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
        self._errors += (call.record(error),)
        _logger.warning("%s failed: %s", call.site, summary(self._errors[-1]))
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

    def _unsettled(self) -> int:
        return self._size - len(self._kept) - len(self._dropped)

    def _ledger(self, *, in_flight: int) -> Ledger:
        return Ledger(
            group_size=self._size,
            succeeded=len(self._kept),
            dropped=len(self._dropped),
            in_flight=in_flight,
            retries_used=self._retries_used,
            errors=self._errors,
            draw=random.random(),
        )

    def _why_incomplete(self) -> Exception | None:
        if not self._unsettled() and self._size:
            return None
        if current_time() < self._deadline:
            # The last net. A cancellation of the caller's own comes out of the checkpoint
            # before this is raised.
            return RolloutCancelledError(
                f"the task of slot {self._unfilled()[0]} was cancelled from outside"
                if self._size
                else "stage make_envs was cancelled from outside"
            )
        if self._viable:
            return None
        return GroupTimeoutError(
            f"group_timeout={self._rules.group_timeout:g} s passed with {len(self._kept)} of"
            f" {self._size} slots filled{self._straggler}"
        )

    def _unfilled(self) -> list[int]:
        return [slot for slot in range(self._size) if not self._is_settled(slot)]

    def _close_on_end(self) -> None:
        """Close what no attempt holds while the attempts are still winding down.

        A creation may take ``cleanup_timeout`` to end and as long again to close what it
        made; closing the rest after that would take a third.
        """
        if not self._viable or self.failed:
            for item in self._take(everything=True):
                self._close_soon(item)

    async def close(self, *, everything: bool) -> None:
        """Close the spares, and with ``everything`` the environments of the result."""
        await close_all(self._take(everything=everything), self.cleanup_timeout, self.report_close)

    def _take(self, *, everything: bool) -> list[ToClose]:
        items = list(self._spares.values())
        self._spares = {}
        if everything:
            items += [kept.item for kept in self._kept.values() if not kept.closed]
            self._kept = {slot: kept._replace(closed=True) for slot, kept in self._kept.items()}
        return items

    def result(self) -> RolloutResult:
        """Return the result, or raise the failure with its note."""
        failure, self._failure = self._failure, None
        try:
            if failure is not None:
                if note := group_note(self._note, self._errors):
                    add_note(failure, note)
                raise failure
        finally:
            # The exception holds this frame, and the frame would hold the exception.
            del failure
        slots = sorted(self._kept)
        missing: dict[int, MissingReason] = dict.fromkeys(self._unfilled(), "cut_off")
        missing.update(dict.fromkeys(self._dropped, "failed"))
        return RolloutResult(
            trajectories=[self._kept[slot].trajectory for slot in slots],
            envs=[self._kept[slot].item.env for slot in slots],
            errors=self._errors,
            slots=slots,
            group_size=self._size,
            missing=sorted(missing.items()),
        )


def _group_size(builder: Any) -> int:
    size = builder.group_size
    if isinstance(size, bool) or not isinstance(size, int):
        raise ConfigurationError(f"group_size is not an integer: {size!r}")
    if size < 1:
        raise EmptyGroupError(f"group_size must be at least 1, got {size}")
    return size

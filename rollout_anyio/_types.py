"""The records that travel: what an episode, a group and a decision consist of.

All are frozen, slotted and picklable. Sequences are kept as tuples, tokens as they were
given. The module does without postponed annotations, so that ``typing.get_type_hints``
and structuring libraries can read the classes.
"""

import traceback
from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Any, Literal, Self, TypeAlias, final

import attrs

__all__ = [
    "Abort",
    "Action",
    "Drop",
    "Failure",
    "InitialObservationOverflow",
    "Ledger",
    "Logs",
    "Metrics",
    "MissingReason",
    "Observation",
    "Retry",
    "RolloutError",
    "RolloutResult",
    "Stage",
    "StepResult",
    "StopCondition",
    "StopReason",
    "TokensWithLogprobs",
    "Trajectory",
    "TrajectoryGroup",
    "Transition",
    "Verdict",
]

Observation: TypeAlias = Any
"""What the environment shows the policy; the two of them agree on the type."""

Action: TypeAlias = Any
"""What the policy sampled, ``TokensWithLogprobs.tokens``, as it was given."""

StopCondition: TypeAlias = Any
"""What ends one sampling call: stop strings, stop token ids, or whatever both know."""

Metrics: TypeAlias = Mapping[str, float | int]
"""Numbers that a training loop averages."""

Logs: TypeAlias = Mapping[str, str | int | float]
"""Values for a human to look at, never averaged."""

Stage: TypeAlias = Literal["make_envs", "make_env", "rollout", "close", "grade", "cleanup"]
"""Where in its life an attempt or a group is."""

MissingReason: TypeAlias = Literal["failed", "cut_off"]
"""Why a slot is empty: its attempts failed, or it was a straggler."""


class StopReason(StrEnum):
    """Why an episode ended."""

    COMPLETED = "completed"
    """The agent finished on its own."""
    TOOL_STOPPED = "tool_stopped"
    """A tool asked for the end."""
    MAX_TURNS = "max_turns"
    """The limit on turns was reached."""
    MAX_TOKENS = "max_tokens"
    """The trajectory's token budget, observations included, was used up."""
    MAX_SAMPLED_TOKENS = "max_sampled_tokens"
    """The budget of sampled tokens was used up."""
    MAX_TOOL_CALLS = "max_tool_calls"
    """The limit on tool calls was reached."""
    CONTEXT_OVERFLOW = "context_overflow"
    """The conversation outgrew the model's context."""
    PARSE_ERROR = "parse_error"
    """The model's output could not be parsed."""
    ROLLOUT_TIMEOUT = "rollout_timeout"
    """The episode's own graceful time limit passed."""


@final
@attrs.frozen
class StepResult:
    """What :meth:`Env.step` gives back."""

    reward: float
    """The reward of this step."""
    episode_done: bool
    """Whether the episode is over."""
    next_observation: Observation
    """What the policy sees next; the last observation when the episode is over."""
    next_stop_condition: StopCondition
    """What ends the next sampling call."""
    metrics: Metrics = attrs.field(factory=dict[str, float | int])
    """Numbers to average; a key ``stop/<reason>`` says why the episode ended."""
    logs: Logs = attrs.field(factory=dict[str, str | int | float], repr=False)
    """Values to look at."""


@final
@attrs.frozen
class InitialObservationOverflow:
    """Returned by :meth:`Env.initial_observation` when the prompt is already too long.

    The episode ends at once with one empty transition that carries these values; nothing
    is sampled.
    """

    reward: float
    """The reward of the empty transition."""
    metrics: Metrics = attrs.field(factory=dict[str, float | int])
    """Its metrics; a key ``stop/<reason>`` becomes the trajectory's stop reason."""
    logs: Logs = attrs.field(factory=dict[str, str | int | float], repr=False)
    """Its logs."""


@final
@attrs.frozen
class TokensWithLogprobs:
    """What a policy sampled in one turn."""

    tokens: Action
    """Token ids, or text: kept as given, text is not split into characters."""
    maybe_logprobs: Sequence[float] | None = None
    """Natural log-probabilities, one per sampled token; ``None`` when unknown."""
    stop_reason: str = "stop"
    """``"stop"`` at a stop condition, ``"length"`` at the token limit."""

    @property
    def logprobs(self) -> Sequence[float]:
        """The log-probabilities.

        Raises:
            ValueError: The policy gave none.
        """
        if self.maybe_logprobs is None:
            raise ValueError("the policy gave no log-probabilities (maybe_logprobs is None)")
        return self.maybe_logprobs


@final
@attrs.frozen
class Transition:
    """One turn: what was seen, what was done, what it earned."""

    ob: Observation
    """The observation before the action."""
    ac: TokensWithLogprobs
    """The action."""
    reward: float
    """The reward of the step."""
    episode_done: bool
    """Whether the episode ended here."""
    metrics: Metrics = attrs.field(factory=dict[str, float | int])
    """The step's metrics."""
    logs: Logs = attrs.field(factory=dict[str, str | int | float], repr=False)
    """The step's logs."""


@final
@attrs.frozen
class Trajectory:
    """One finished episode."""

    transitions: tuple[Transition, ...] = attrs.field(converter=tuple[Transition, ...], repr=False)
    """The turns, in order."""
    final_ob: Observation = attrs.field(repr=False)
    """The observation after the last action."""
    stop_reason: str | None = None
    """Why it ended, usually a :class:`StopReason`; ``None`` when nobody said."""


@final
@attrs.frozen
class RolloutError:
    """The record of one failure: data only, so it outlives and pickles without the exception."""

    error_type: str
    """The exception's class name."""
    error_message: str
    """``str(exception)``."""
    slot: int | None = None
    """The slot, 0 to G-1; ``None`` for what concerns the whole group."""
    attempt: int | None = None
    """The attempt, counted from 1; ``None`` for what concerns the whole group."""
    stage: Stage = "rollout"
    """Where it happened."""
    timed_out: bool = False
    """Whether a limit of ours passed, recognised by its scope."""
    elapsed: float = 0.0
    """Seconds from the start of the stage to the failure."""
    traceback: str = attrs.field(default="", repr=False)
    """The formatted traceback, causes included."""

    @classmethod
    def from_exception(
        cls,
        error: BaseException,
        stage: Stage,
        *,
        slot: int | None = None,
        attempt: int | None = None,
        timed_out: bool = False,
        elapsed: float = 0.0,
    ) -> Self:
        """Take down ``error`` without keeping it, or the frames that it holds, alive."""
        return cls(
            error_type=type(error).__name__,
            error_message=_text(error),
            slot=slot,
            attempt=attempt,
            stage=stage,
            timed_out=timed_out,
            elapsed=elapsed,
            traceback="".join(traceback.format_exception(error)),
        )


def _text(error: BaseException) -> str:
    try:
        return str(error)
    except Exception as broken:
        return f"<str() of the exception raised {type(broken).__name__}>"


def _all_slots(result: "RolloutResult") -> tuple[int, ...]:
    return tuple(range(len(result.trajectories)))


def _as_many(result: "RolloutResult") -> int:
    return len(result.trajectories)


@final
@attrs.frozen
class RolloutResult:
    """What :meth:`RolloutStrategy.execute` gives back.

    ``trajectories``, ``envs`` and ``slots`` are parallel and in slot order. The
    environments belong to the caller, who closes them.
    """

    trajectories: tuple[Any, ...] = attrs.field(converter=tuple[Any, ...], repr=False)
    """One trajectory per filled slot."""
    envs: tuple[Any, ...] = attrs.field(converter=tuple[Any, ...], repr=False)
    """The environments that produced them; those that are context managers are closed."""
    errors: tuple[RolloutError, ...] = attrs.field(converter=tuple[RolloutError, ...])
    """Every failure in the order it happened, retried ones and failed closes included."""
    slots: tuple[int, ...] = attrs.field(
        default=attrs.Factory(_all_slots, takes_self=True), converter=tuple[int, ...]
    )
    """The slot of each trajectory; by default 0, 1, 2, ..."""
    group_size: int = attrs.field(default=attrs.Factory(_as_many, takes_self=True))
    """How many slots the group has; by default as many as trajectories."""
    missing: tuple[tuple[int, MissingReason], ...] = attrs.field(
        default=(), converter=tuple[tuple[int, MissingReason], ...]
    )
    """A pair (slot, reason) per empty slot."""


@final
@attrs.frozen
class TrajectoryGroup:
    """A collected and graded group, ready for a group-relative learner.

    ``trajectories``, ``final_rewards``, ``metrics`` and ``slots`` are parallel and in slot
    order.
    """

    trajectories: tuple[Any, ...] = attrs.field(converter=tuple[Any, ...], repr=False)
    """One trajectory per filled slot."""
    final_rewards: tuple[float, ...] = attrs.field(converter=tuple[float, ...])
    """The grader's reward for each, in addition to the step rewards."""
    metrics: tuple[Metrics, ...] = attrs.field(converter=tuple[Metrics, ...], repr=False)
    """The grader's metrics for each."""
    slots: tuple[int, ...] = attrs.field(converter=tuple[int, ...])
    """The slot of each trajectory."""
    group_size: int
    """How many slots the group has."""
    errors: tuple[RolloutError, ...] = attrs.field(default=(), converter=tuple[RolloutError, ...])
    """Every failure on the way, failed closes included."""
    missing: tuple[tuple[int, MissingReason], ...] = attrs.field(
        default=(), converter=tuple[tuple[int, MissingReason], ...]
    )
    """A pair (slot, reason) per empty slot. No reward stands in for it."""

    def get_total_rewards(self) -> list[float]:
        """Return per trajectory the sum of its step rewards plus its final reward."""
        return [
            sum(transition.reward for transition in trajectory.transitions) + final
            for trajectory, final in zip(self.trajectories, self.final_rewards, strict=True)
        ]


@final
@attrs.frozen
class Failure:
    """One failed attempt, as :meth:`VerdictStrategy.decide` sees it."""

    error: Exception
    """What the attempt raised."""
    slot: int
    """The slot, 0 to G-1."""
    attempt: int
    """The attempt, counted from 1."""
    stage: Stage
    """Where it happened."""
    timed_out: bool = False
    """Whether a limit of ours passed."""
    elapsed: float = 0.0
    """Seconds from the start of the stage."""


@final
@attrs.frozen
class Ledger:
    """Where the group stands at the moment of a decision."""

    group_size: int
    """How many slots the group has."""
    succeeded: int = 0
    """Slots that are filled."""
    dropped: int = 0
    """Slots that were given up."""
    in_flight: int = 0
    """Slots still being worked on, a slot whose failure is being decided on not counted."""
    retries_used: int = 0
    """Retries that the group has spent."""
    errors: tuple[RolloutError, ...] = ()
    """The failures so far, the one being decided on last."""
    draw: float = 0.0
    """Uniform in [0, 1), drawn anew for each decision: so a decision with jitter in it
    remains a function of its arguments."""


@final
@attrs.frozen
class Retry:
    """Spend one of the budget: run the slot again in a fresh environment."""

    wait: float = 0.0
    """Seconds to wait first, holding no environment."""


@final
@attrs.frozen
class Drop:
    """Leave the slot empty."""


@final
@attrs.frozen
class Abort:
    """Cancel the group and raise ``error``."""

    error: Exception
    """The failure's own exception, or one that says more."""
    reason: str = ""
    """Why no more was tried, for the note on the exception."""


Verdict: TypeAlias = Retry | Drop | Abort
"""What a strategy decides about one failure."""

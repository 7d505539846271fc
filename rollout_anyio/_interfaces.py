"""What users bring to an episode: an environment and a policy.

Both are used by attribute only. Objects of another framework fit without importing this
module; :class:`Env` is here for its defaults and as a place for the documentation.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Protocol, TypedDict

from ._types import (
    Action,
    InitialObservationOverflow,
    Observation,
    StepResult,
    StopCondition,
    TokensWithLogprobs,
)

__all__ = ["ActionExtra", "Env", "SupportsMakeEnvs", "TokenCompleter"]


class ActionExtra(TypedDict, total=False):
    """What :meth:`Env.step` is told about an action besides its tokens."""

    stop_reason: str
    """Why sampling stopped: ``"stop"`` or ``"length"``."""


class Env(ABC):
    """One single-use episode.

    An environment comes in one of two kinds.

    *Plain*, like this class: it keeps no cancel scope and no task group open between
    calls. Its :meth:`aclose` runs once, in whatever task, and after grading when the
    rollout succeeded, so that a grader can look into it.

    *A context manager*, with ``__aenter__`` and ``__aexit__``: it may hold a task group.
    It is entered and left in one task, around its rollout, and what ``__aenter__`` returns
    is the environment. ``aclose`` is then not called, but on one that was never entered.
    """

    @abstractmethod
    async def initial_observation(
        self,
    ) -> tuple[Observation, StopCondition] | InitialObservationOverflow:
        """Return the first observation and what ends the first sampling call."""

    @abstractmethod
    async def step(self, action: Action, *, extra: ActionExtra | None = None) -> StepResult:
        """Take ``action``, the policy's tokens as it gave them, and return what follows."""

    async def aclose(self) -> None:
        """Release what the environment holds. Called exactly once.

        Cancellation:
            Called under a shield, for at most the strategy's ``cleanup_timeout`` seconds;
            after that it is cancelled, and the failure is recorded and logged.
        """


class TokenCompleter(Protocol):
    """A policy: what turns an observation into an action."""

    async def __call__(
        self, observation: Observation, stop: StopCondition, *, max_tokens: int | None = None
    ) -> TokensWithLogprobs:
        """Sample one action.

        ``max_tokens`` is passed only when the episode's limits leave less than infinity.
        """
        ...


class SupportsMakeEnvs(Protocol):
    """The least that a group builder is: everything else on it is looked up, not required."""

    async def make_envs(self) -> Sequence[Any]:
        """Make the environments of one group, one per slot."""
        ...

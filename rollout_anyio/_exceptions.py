"""What this library raises, and when.

What a rollout raised comes out as itself; the classes here are for what the library
alone can know: that a limit passed, that a cancelled error belonged to nobody, that too
little of a group is left. All of them pickle.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

from ._types import RolloutError

__all__ = [
    "ConfigurationError",
    "EmptyGroupError",
    "GroupNotViable",
    "GroupRewardError",
    "GroupTimeoutError",
    "RolloutAnyioError",
    "RolloutCancelledError",
    "RolloutTimeoutError",
]


class RolloutAnyioError(Exception):
    """The base of everything that this library raises on its own account."""


@final
class ConfigurationError(RolloutAnyioError, ValueError):
    """A value that no strategy or group can work with; the message names it.

    Raised before any rollout starts. Mend the configuration.
    """


@final
class RolloutTimeoutError(RolloutAnyioError, TimeoutError):
    """An attempt, a sampling call, a set-up call or the grader passed its limit.

    The message names the limit, the stage, and the slot and attempt where there is one.
    ``__cause__`` is what the call raised while it was being cut off, if anything. An
    environment's own :exc:`TimeoutError` is never turned into this.
    """


@final
class RolloutCancelledError(RolloutAnyioError):
    """The backend's cancelled error came out of a call that nobody had cancelled.

    On asyncio a client library that cancels a task of its own does this. It is a failure
    like any other: ``__cause__`` is the cancelled error, and strategies may retry it.
    Also raised when a slot ended without an outcome because its task was cancelled from
    outside.
    """


@final
class GroupTimeoutError(RolloutAnyioError, TimeoutError):
    """The strategy's ``group_timeout`` passed before the group was complete."""


@final
class GroupNotViable(RolloutAnyioError):
    """Too few slots of the group can still be filled to be worth training on.

    ``__cause__`` is the failure that put the floor out of reach. Skip the group, or raise
    the retry budget.

    Args:
        message: What is missing, with its numbers.
        errors: The records of every failure in the group, in order.
    """

    def __init__(self, message: str, errors: Sequence[RolloutError] = ()) -> None:
        super().__init__(message, tuple(errors))

    @property
    def errors(self) -> tuple[RolloutError, ...]:
        """The records of every failure in the group, in the order they happened."""
        errors: tuple[RolloutError, ...] = self.args[1]
        return errors

    def __str__(self) -> str:
        return str(self.args[0])


@final
class EmptyGroupError(RolloutAnyioError, ValueError):
    """``make_envs()`` returned no environment, or on a retry none for the slot."""


@final
class GroupRewardError(RolloutAnyioError, ValueError):
    """The grader returned the wrong number of rewards, or one that is not finite."""

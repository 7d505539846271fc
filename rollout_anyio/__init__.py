"""Structured-concurrency collection of RL rollouts, on asyncio and trio alike.

Start with :func:`do_group_rollout`: it takes a group builder, a policy and a strategy,
and returns the graded group, or raises, with nothing left running and nothing left open.
"""

import logging

from ._builders import EnvGroupBuilder, SlotEnvGroupBuilder
from ._episode import RolloutLimits, do_single_rollout
from ._exceptions import (
    ConfigurationError,
    EmptyGroupError,
    GroupNotViable,
    GroupRewardError,
    GroupTimeoutError,
    RolloutAnyioError,
    RolloutCancelledError,
    RolloutTimeoutError,
)
from ._group import do_group_rollout
from ._interfaces import ActionExtra, Env, SupportsMakeEnvs, TokenCompleter
from ._strategies import (
    Backoff,
    FailFast,
    MinViableGroup,
    RetryOnFailure,
    RolloutStrategy,
    VerdictStrategy,
    rollout_strategy_from_config,
)
from ._types import (
    Abort,
    Action,
    Drop,
    Failure,
    InitialObservationOverflow,
    Ledger,
    Logs,
    Metrics,
    MissingReason,
    Observation,
    Retry,
    RolloutError,
    RolloutResult,
    Stage,
    StepResult,
    StopCondition,
    StopReason,
    TokensWithLogprobs,
    Trajectory,
    TrajectoryGroup,
    Transition,
    Verdict,
)

# Whoever configures logging sees it; whoever does not is not written to on stderr.
logging.getLogger("rollout_anyio").addHandler(logging.NullHandler())

__all__ = [
    "Abort",
    "Action",
    "ActionExtra",
    "Backoff",
    "ConfigurationError",
    "Drop",
    "EmptyGroupError",
    "Env",
    "EnvGroupBuilder",
    "FailFast",
    "Failure",
    "GroupNotViable",
    "GroupRewardError",
    "GroupTimeoutError",
    "InitialObservationOverflow",
    "Ledger",
    "Logs",
    "Metrics",
    "MinViableGroup",
    "MissingReason",
    "Observation",
    "Retry",
    "RetryOnFailure",
    "RolloutAnyioError",
    "RolloutCancelledError",
    "RolloutError",
    "RolloutLimits",
    "RolloutResult",
    "RolloutStrategy",
    "RolloutTimeoutError",
    "SlotEnvGroupBuilder",
    "Stage",
    "StepResult",
    "StopCondition",
    "StopReason",
    "SupportsMakeEnvs",
    "TokenCompleter",
    "TokensWithLogprobs",
    "Trajectory",
    "TrajectoryGroup",
    "Transition",
    "Verdict",
    "VerdictStrategy",
    "do_group_rollout",
    "do_single_rollout",
    "rollout_strategy_from_config",
]

"""A policy over any server that speaks the OpenAI chat completions protocol.

Needs the extra ``openai``. The client runs natively on asyncio and on trio.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, Self, final

from anyio import CapacityLimiter, move_on_after
from openai import AsyncOpenAI

from rollout_anyio import ConfigurationError, RolloutAnyioError, TokensWithLogprobs

__all__ = ["OpenAIChatCompleter", "PolicyResponseError"]

_CLOSE_SECONDS = 5.0


@final
class PolicyResponseError(RolloutAnyioError):
    """The server answered, but not with a completion; the message says what it gave."""


@final
class OpenAIChatCompleter:
    """A policy that samples text from a chat completions endpoint.

    The observation is the list of messages; the action is the sampled text, a ``str``, so
    that an environment written for text gets text. A trajectory then holds in each
    transition the messages as ``ob``, and as ``ac`` the text with one log-probability per
    token that the server sampled, if it gave them. The text is not split, and token ids are
    not kept: to train on tokens, the text has to be tokenised again with the server's own
    tokenizer. Cumulative token limits of an episode would count characters; the limit per
    turn counts the server's tokens.

    Use it as an async context manager, which closes its connections. The client's own
    retries and time limits are off: what a failed call means, and how long one may take,
    is the strategy's to decide.

    Args:
        model: The model's name at the server.
        base_url: Where the server is, such as ``"http://127.0.0.1:8000/v1"``; the client's
            default if not given.
        api_key: The key; a local server takes any.
        max_connections: How many requests, and so connections, are open at once.
        temperature: The sampling temperature; the server's default if not given.
        logprobs: Whether to ask for log-probabilities.
        extra_body: Further fields of the request, as the server knows them.
        client: A client to use instead of one made from ``base_url`` and ``api_key``. It is
            not closed here, and keeps its own retries and time limits.

    Raises:
        ConfigurationError: ``max_connections`` is below 1.
    """

    def __init__(
        self,
        model: str,
        *,
        base_url: str | None = None,
        api_key: str = "none",
        max_connections: int = 64,
        temperature: float | None = None,
        logprobs: bool = True,
        extra_body: Mapping[str, Any] | None = None,
        client: AsyncOpenAI | None = None,
    ) -> None:
        if max_connections < 1:
            raise ConfigurationError(f"max_connections must be at least 1, got {max_connections}")
        self._owned = client is None
        self._client = client or AsyncOpenAI(
            base_url=base_url, api_key=api_key, max_retries=0, timeout=None
        )
        self._connections = CapacityLimiter(max_connections)
        self._options: dict[str, Any] = {"model": model}
        if logprobs:
            self._options["logprobs"] = True
        if temperature is not None:
            self._options["temperature"] = temperature
        if extra_body is not None:
            self._options["extra_body"] = dict(extra_body)

    async def __call__(
        self,
        observation: Sequence[Mapping[str, Any]],
        stop: Sequence[str] | str | None,
        *,
        max_tokens: int | None = None,
    ) -> TokensWithLogprobs:
        """Sample one answer to the messages in ``observation``.

        Args:
            observation: The messages, each with ``role`` and ``content``.
            stop: Strings that end the answer.
            max_tokens: How many tokens the answer may have at most.

        Returns:
            The text, its log-probabilities if the server gave them, and why it ended:
            ``"length"`` at ``max_tokens``, otherwise ``"stop"``.

        Raises:
            openai.APIStatusError: The server refused, with its status and message.
            openai.APIConnectionError: The server could not be reached, or hung up.
            PolicyResponseError: The answer holds no completion.

        Cancellation:
            Closes the connection of the request, so that a server that notices stops.

        Checkpoints:
            Always passes one.
        """
        options = dict(self._options)
        if stop:
            options["stop"] = stop if isinstance(stop, str) else list(stop)
        if max_tokens is not None:
            options["max_tokens"] = max_tokens
        async with self._connections:
            # Untyped: the options are the server's affair, and so is what it answers.
            completions: Any = self._client.chat.completions
            try:
                answer = await completions.create(messages=list(observation), **options)
            except (json.JSONDecodeError, UnicodeDecodeError) as error:
                raise PolicyResponseError(f"the server gave no JSON: {error}") from error
        return _completion(answer)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._owned:
            with move_on_after(_CLOSE_SECONDS, shield=True):
                await self._client.close()


def _completion(answer: Any) -> TokensWithLogprobs:
    try:
        choice: Any = answer.choices[0]
    except (AttributeError, LookupError, TypeError) as error:
        raise PolicyResponseError(f"the server gave no choices: {answer!r:.500}") from error
    text = getattr(getattr(choice, "message", None), "content", None)
    if not isinstance(text, str):
        raise PolicyResponseError(f"the server gave no text: {choice!r:.500}")
    return TokensWithLogprobs(
        text, _logprobs(choice), "length" if choice.finish_reason == "length" else "stop"
    )


def _logprobs(choice: Any) -> list[float] | None:
    entries = getattr(getattr(choice, "logprobs", None), "content", None)
    # Some servers give an empty list for "not asked for".
    if not entries:
        return None
    try:
        return [float(entry.logprob) for entry in entries]
    except (AttributeError, TypeError, ValueError) as error:
        raise PolicyResponseError(
            f"the server's log-probabilities are malformed: {entries!r:.500}"
        ) from error

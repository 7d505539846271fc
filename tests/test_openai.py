"""The policy over chat completions, against a server on a real socket, in real time."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any

import anyio
import attrs
import pytest
from anyio.abc import SocketAttribute, SocketStream
from anyio.streams.buffered import BufferedByteReceiveStream
from virtual_time import REAL, backend_of

openai = pytest.importorskip("openai")

from rollout_anyio import ConfigurationError, RolloutAnyioError  # noqa: E402
from rollout_anyio.integrations.openai import (  # noqa: E402
    OpenAIChatCompleter,
    PolicyResponseError,
)

pytestmark = pytest.mark.anyio

MESSAGES = [{"role": "user", "content": "2 + 2?"}]


@pytest.fixture(params=REAL)
def anyio_backend(request: pytest.FixtureRequest) -> tuple[str, dict[str, Any]]:
    return backend_of(request)


@attrs.define
class Answer:
    """What the server says to one request."""

    body: Any
    status: int = 200
    content_type: str = "application/json"

    def encode(self) -> bytes:
        body = self.body if isinstance(self.body, bytes) else json.dumps(self.body).encode()
        head = (
            f"HTTP/1.1 {self.status} Whatever\r\nContent-Type: {self.content_type}\r\n"
            f"Content-Length: {len(body)}\r\n\r\n"
        )
        return head.encode() + body


@attrs.define(eq=False)
class ChatServer:
    """A keep-alive HTTP server that takes down requests and counts connections."""

    respond: Callable[[], Awaitable[Answer | None]]
    url: str
    requests: list[dict[str, Any]] = attrs.Factory(list)
    connections: int = 0
    most_connections: int = 0
    all_gone: anyio.Event = attrs.Factory(anyio.Event)

    async def serve(self, stream: SocketStream) -> None:
        self.connections += 1
        self.most_connections = max(self.most_connections, self.connections)
        async with stream:
            with suppress(anyio.IncompleteRead, anyio.EndOfStream, anyio.BrokenResourceError):
                await self._converse(stream, BufferedByteReceiveStream(stream))
        self.connections -= 1
        if not self.connections:
            self.all_gone.set()

    async def _converse(self, stream: SocketStream, received: BufferedByteReceiveStream) -> None:
        while True:
            head = (await received.receive_until(b"\r\n\r\n", 65536)).decode().lower()
            length = int(head.split("content-length:")[1].split("\r\n")[0])
            self.requests.append(json.loads(await received.receive_exactly(length)))
            answer = await self.respond()
            if answer is None:
                # Until the client hangs up: it sends nothing more while it waits.
                await received.receive()
            else:
                await stream.send(answer.encode())


@asynccontextmanager
async def serving(respond: Callable[[], Awaitable[Answer | None]]) -> AsyncIterator[ChatServer]:
    async with (
        await anyio.create_tcp_listener(local_host="127.0.0.1", local_port=0) as listener,
        anyio.create_task_group() as task_group,
    ):
        port = listener.extra(SocketAttribute.local_port)
        server = ChatServer(respond, f"http://127.0.0.1:{port}/v1")
        task_group.start_soon(listener.serve, server.serve)
        yield server
        task_group.cancel_scope.cancel()


def always(answer: Answer | None) -> Callable[[], Awaitable[Answer | None]]:
    async def respond() -> Answer | None:
        return answer

    return respond


def completion(
    content: Any = "four", logprobs: Any = None, finish_reason: str = "stop"
) -> dict[str, Any]:
    choice = {
        "index": 0,
        "message": {"role": "assistant", "content": content},
        "logprobs": logprobs,
        "finish_reason": finish_reason,
    }
    return {"id": "1", "object": "chat.completion", "created": 0, "model": "m", "choices": [choice]}


def policy_for(server: ChatServer, **options: Any) -> OpenAIChatCompleter:
    return OpenAIChatCompleter("m", base_url=server.url, **options)


async def test_text_logprobs_and_stop_reason() -> None:
    """The action is the text, with one log-probability per token of the server's."""
    logprobs = {"content": [{"token": "fo", "logprob": -0.5}, {"token": "ur", "logprob": -1}]}
    async with (
        serving(always(Answer(completion("four", logprobs)))) as server,
        policy_for(server) as policy,
    ):
        action = await policy(MESSAGES, None)
    assert action.tokens == "four"
    assert action.logprobs == [-0.5, -1.0]
    assert action.stop_reason == "stop"


@pytest.mark.parametrize("logprobs", [None, {"content": None}, {"content": []}])
async def test_no_logprobs(logprobs: Any) -> None:
    """A server that gives no log-probabilities is not credited with any."""
    async with (
        serving(always(Answer(completion("four", logprobs)))) as server,
        policy_for(server) as policy,
    ):
        assert (await policy(MESSAGES, None)).maybe_logprobs is None


@pytest.mark.parametrize(
    ("finish_reason", "stop_reason"),
    [("length", "length"), ("stop", "stop"), ("content_filter", "stop"), (None, "stop")],
)
async def test_stop_reason(finish_reason: str, stop_reason: str) -> None:
    """Only the token limit is a stop reason of its own."""
    async with (
        serving(always(Answer(completion(finish_reason=finish_reason)))) as server,
        policy_for(server) as policy,
    ):
        assert (await policy(MESSAGES, None)).stop_reason == stop_reason


async def test_empty_text() -> None:
    """An empty text that the server sampled is an action like any other."""
    async with (
        serving(always(Answer(completion("")))) as server,
        policy_for(server) as policy,
    ):
        assert (await policy(MESSAGES, None)).tokens == ""


async def test_request() -> None:
    """Messages, sampling parameters and the turn's budget go to the server as given."""
    async with (
        serving(always(Answer(completion()))) as server,
        policy_for(server, temperature=0.5, extra_body={"top_k": 3}) as policy,
    ):
        await policy(MESSAGES, ("\n", "."), max_tokens=7)
    assert server.requests == [
        {
            "model": "m",
            "messages": MESSAGES,
            "logprobs": True,
            "temperature": 0.5,
            "top_k": 3,
            "stop": ["\n", "."],
            "max_tokens": 7,
        }
    ]


@pytest.mark.parametrize("stop", [None, [], ""])
async def test_least_request(stop: Any) -> None:
    """What was not given is not sent."""
    async with (
        serving(always(Answer(completion()))) as server,
        policy_for(server, logprobs=False) as policy,
    ):
        await policy(MESSAGES, stop)
    assert server.requests == [{"model": "m", "messages": MESSAGES}]


async def test_one_stop_string() -> None:
    """A single stop string is not taken for a sequence of characters."""
    async with (
        serving(always(Answer(completion()))) as server,
        policy_for(server) as policy,
    ):
        await policy(MESSAGES, "END")
    assert server.requests[0]["stop"] == "END"


@pytest.mark.parametrize("status", [400, 429, 500, 503])
async def test_http_error(status: int) -> None:
    """A refusal comes out with status and message, after one request."""
    body = {"error": {"message": "no slot is free", "type": "server_error"}}
    async with (
        serving(always(Answer(body, status))) as server,
        policy_for(server) as policy,
    ):
        with pytest.raises(openai.APIStatusError, match="no slot is free") as caught:
            await policy(MESSAGES, None)
    assert caught.value.status_code == status
    assert str(status) in str(caught.value)
    assert len(server.requests) == 1


async def test_nobody_listens() -> None:
    """A server that is not there is a connection error."""
    async with serving(always(None)) as server:
        pass
    async with policy_for(server) as policy:
        with pytest.raises(openai.APIConnectionError):
            await policy(MESSAGES, None)


async def test_server_hangs_up() -> None:
    """An answer that breaks off is a connection error, after one request."""

    async def hang_up() -> Answer:
        raise anyio.EndOfStream

    async with serving(hang_up) as server, policy_for(server) as policy:
        with pytest.raises(openai.APIConnectionError):
            await policy(MESSAGES, None)
    assert len(server.requests) == 1


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (Answer({}), "no choices"),
        (Answer([]), "no choices"),
        (Answer(None), "no choices"),
        (Answer("four"), "no choices"),
        (Answer({"error": {"message": "out of memory"}}), "out of memory"),
        (Answer({"choices": None}), "no choices"),
        (Answer({"choices": []}), "no choices"),
        (Answer({"choices": {"text": "four"}}), "no choices"),
        (Answer({"choices": [None]}), "no text"),
        (Answer({"choices": ["four"]}), "no text"),
        (Answer({"choices": [{"index": 0}]}), "no text"),
        (Answer({"choices": [{"message": "four"}]}), "no text"),
        (Answer(completion(None)), "no text"),
        (Answer(completion(4)), "no text"),
        (Answer(completion([{"type": "text", "text": "four"}])), "no text"),
        (Answer(completion("four", {"content": [{}]})), "malformed"),
        (
            Answer(completion("four", {"content": [{"token": "four", "logprob": None}]})),
            "malformed",
        ),
        (Answer(completion("four", {"content": ["four"]})), "malformed"),
        (Answer(b"{"), "no JSON"),
        (Answer(b"\xff"), "no JSON"),
        (Answer(b""), "no JSON"),
        (Answer(b"<p>log in</p>", content_type="text/html"), "log in"),
        (Answer(b"", content_type="text/html"), "no choices"),
    ],
    ids=lambda value: repr(value.body)[:30] if isinstance(value, Answer) else "",
)
async def test_answer_without_completion(answer: Answer, message: str) -> None:
    """What is no completion is an error that says what came, and never an empty text."""
    async with serving(always(answer)) as server, policy_for(server) as policy:
        with pytest.raises(PolicyResponseError, match=message) as caught:
            await policy(MESSAGES, None)
    assert isinstance(caught.value, RolloutAnyioError)
    assert len(server.requests) == 1


async def test_finish_reason_may_be_missing() -> None:
    """A text is a completion even if the server does not say why it ended."""
    answer = Answer({"choices": [{"message": {"content": "four"}}]})
    async with serving(always(answer)) as server, policy_for(server) as policy:
        action = await policy(MESSAGES, None)
    assert (action.tokens, action.stop_reason) == ("four", "stop")


async def test_cancellation_frees_the_connection() -> None:
    """A cancelled call hangs up, and the only connection serves the next one."""
    asked = anyio.Event()
    answers = iter([None, Answer(completion())])

    async def respond() -> Answer | None:
        asked.set()
        return next(answers)

    async with serving(respond) as server, policy_for(server, max_connections=1) as policy:
        async with anyio.create_task_group() as task_group:
            task_group.start_soon(policy, MESSAGES, None)
            await asked.wait()
            task_group.cancel_scope.cancel()
        with anyio.fail_after(10):
            await server.all_gone.wait()
            assert (await policy(MESSAGES, None)).tokens == "four"
    assert len(server.requests) == 2


async def test_connections_are_bounded() -> None:
    """No more than max_connections requests are at the server, and all are answered."""
    waiting = 0
    full = anyio.Event()

    async def respond() -> Answer:
        nonlocal waiting
        waiting += 1
        if waiting == 2:
            # The others had every chance to come by now.
            await anyio.wait_all_tasks_blocked()
            full.set()
        await full.wait()
        return Answer(completion())

    async with serving(respond) as server, policy_for(server, max_connections=2) as policy:
        with anyio.fail_after(10):
            async with anyio.create_task_group() as task_group:
                for _ in range(8):
                    task_group.start_soon(policy, MESSAGES, None)
    assert server.most_connections == 2
    assert len(server.requests) == 8


async def test_at_least_one_connection() -> None:
    """A policy that could never ask is refused."""
    with pytest.raises(ConfigurationError, match="max_connections"):
        OpenAIChatCompleter("m", base_url="http://127.0.0.1:1/v1", max_connections=0)


async def test_end_closes_connections() -> None:
    """At the end of the block the kept connection is closed."""
    async with serving(always(Answer(completion()))) as server:
        async with policy_for(server) as policy:
            await policy(MESSAGES, None)
            assert server.connections == 1
        with anyio.fail_after(10):
            await server.all_gone.wait()


async def test_cancelled_end_closes_connections() -> None:
    """A block that is cancelled leaves no connection either."""
    async with serving(always(Answer(completion()))) as server:
        with anyio.CancelScope() as scope:
            async with policy_for(server) as policy:
                await policy(MESSAGES, None)
                scope.cancel()
        with anyio.fail_after(10):
            await server.all_gone.wait()


async def test_given_client_stays_open() -> None:
    """A client that was given belongs to who gave it, with its own retries."""
    async with serving(always(Answer(completion()))) as server:
        async with openai.AsyncOpenAI(base_url=server.url, api_key="k", max_retries=0) as client:
            async with OpenAIChatCompleter("m", client=client) as policy:
                await policy(MESSAGES, None)
            assert not client.is_closed()
            assert (await policy(MESSAGES, None)).tokens == "four"
        assert client.is_closed()

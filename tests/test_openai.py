"""The policy over HTTP, against a real server on this machine, on both backends."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import anyio
import anyio.to_thread
import openai
import pytest

from rollout_anyio.integrations.openai import OpenAIChatCompleter, PolicyResponseError

pytestmark = pytest.mark.anyio


@pytest.fixture(params=["asyncio", "trio"])
def anyio_backend(request: pytest.FixtureRequest) -> str:
    backend: str = request.param
    return backend


class Server(ThreadingHTTPServer):
    """Gives back ``status`` and ``answer``, and keeps what it was asked."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.status = 200
        self.answer: Any = None
        self.requests: list[Any] = []
        self.release = threading.Event()
        self.release.set()
        self.second = threading.Event()

    def asked(self, request: Any) -> None:
        self.requests.append(request)
        if len(self.requests) == 2:
            self.second.set()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/v1"


class Handler(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        server = self.server
        assert isinstance(server, Server)
        length = int(self.headers["content-length"])
        server.asked(json.loads(self.rfile.read(length)))
        server.release.wait(30)
        body = json.dumps(server.answer).encode()
        try:
            self.send_response(server.status)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)
        except OSError:
            return

    def log_message(self, *_: Any) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        return


@pytest.fixture
def server() -> Iterator[Server]:
    with Server() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.release.set()
        server.shutdown()
        thread.join()


def completion(content: Any, reason: str = "stop", logprobs: Any = None) -> dict[str, Any]:
    message = {"role": "assistant", "content": content}
    choice = {"index": 0, "message": message, "finish_reason": reason, "logprobs": logprobs}
    return {"id": "x", "object": "chat.completion", "created": 0, "model": "m", "choices": [choice]}


MESSAGES = [{"role": "user", "content": "1 + 1 ="}]


async def test_text_logprobs_and_what_was_asked(server: Server) -> None:
    """Text, log-probabilities and stop reason come back; the options are passed on."""
    tokens = [{"token": "2", "logprob": -0.25, "bytes": None, "top_logprobs": []}]
    server.answer = completion("2", "length", {"content": tokens, "refusal": None})
    extra = {"top_k": 5}
    async with OpenAIChatCompleter(
        "m", base_url=server.url, temperature=0.5, extra_body=extra
    ) as policy:
        answer = await policy(MESSAGES, ["\n"], max_tokens=7)
        await policy(MESSAGES, "end")
        await policy(MESSAGES, None)
    assert (answer.tokens, answer.logprobs, answer.stop_reason) == ("2", [-0.25], "length")
    first, second, third = server.requests
    assert (first["max_tokens"], first["stop"], first["temperature"]) == (7, ["\n"], 0.5)
    assert (first["top_k"], first["messages"], first["logprobs"]) == (5, MESSAGES, True)
    assert second["stop"] == "end"
    assert "max_tokens" not in second
    assert "stop" not in third


async def test_an_error_comes_out_with_status_and_message_once(server: Server) -> None:
    """A refusal is an exception, and is not retried behind the strategy's back."""
    server.status, server.answer = 500, {"error": {"message": "out of memory"}}
    async with OpenAIChatCompleter("m", base_url=server.url) as policy:
        with pytest.raises(openai.APIStatusError, match="out of memory") as caught:
            await policy(MESSAGES, None)
    assert caught.value.status_code == 500
    assert len(server.requests) == 1


@pytest.mark.parametrize(
    ("answer", "match"),
    [
        ({"choices": []}, "gave no choices"),
        ({}, "gave no choices"),
        (completion(None), "gave no text"),
        (completion(3), "gave no text"),
    ],
)
async def test_an_answer_without_a_completion(server: Server, answer: Any, match: str) -> None:
    """What holds no text is an error, never an empty text."""
    server.answer = answer
    async with OpenAIChatCompleter("m", base_url=server.url) as policy:
        with pytest.raises(PolicyResponseError, match=match):
            await policy(MESSAGES, None)


async def test_an_empty_text_that_the_server_gave(server: Server) -> None:
    """It is legitimate, without log-probabilities if there are none."""
    server.answer = completion("")
    client = openai.AsyncOpenAI(base_url=server.url, api_key="x", max_retries=0)
    async with client, OpenAIChatCompleter("m", client=client) as policy:
        answer = await policy(MESSAGES, None)
        assert not client.is_closed()
    assert (answer.tokens, answer.maybe_logprobs, answer.stop_reason) == ("", None, "stop")


async def test_connections_are_bounded_and_freed_by_cancellation(server: Server) -> None:
    """No more requests than connections; a cancelled one makes room."""
    server.answer = completion("x")
    server.release.clear()
    async with OpenAIChatCompleter("m", base_url=server.url, max_connections=2) as policy:
        async with anyio.create_task_group() as tasks:
            for _ in range(5):
                tasks.start_soon(policy, MESSAGES, None)
            assert await anyio.to_thread.run_sync(server.second.wait, 30)
            assert len(server.requests) == 2
            tasks.cancel_scope.cancel()
        server.release.set()
        assert (await policy(MESSAGES, None)).tokens == "x"

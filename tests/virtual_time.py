"""Backends for the tests: real time and virtual time, on asyncio, uvloop and trio.

In virtual time a wait adds to the clock instead of passing, so an hour takes no time and
equal instants are equal. It knows nothing of threads and sockets.
"""

from __future__ import annotations

import asyncio
import importlib.util
import selectors
from collections.abc import Awaitable, Callable
from typing import Any

import anyio
import pytest
import trio.testing


class _JumpingSelector(selectors.DefaultSelector):
    """A selector that adds the wait to its clock when nothing is ready."""

    now = 0.0

    def select(self, timeout: float | None = None) -> Any:
        ready = super().select(0)
        if not ready:
            if timeout is None:
                raise RuntimeError("deadlock: nothing is scheduled, and nothing is ready")
            self.now += max(timeout, 0)
        return ready


class VirtualLoop(asyncio.SelectorEventLoop):
    """An asyncio event loop in virtual time."""

    def __init__(self) -> None:
        self._clock = _JumpingSelector()
        super().__init__(self._clock)

    def time(self) -> float:
        return self._clock.now


def virtual(backend: str) -> tuple[str, dict[str, Any]]:
    """Return name and options of ``backend`` with a new virtual clock."""
    if backend == "trio":
        return "trio", {"clock": trio.testing.MockClock(autojump_threshold=0)}
    return "asyncio", {"loop_factory": VirtualLoop}


def run_virtual(function: Callable[..., Awaitable[Any]], *args: Any, backend: str) -> Any:
    """Run ``function`` to its end in virtual time."""
    name, options = virtual(backend)
    return anyio.run(function, *args, backend=name, backend_options=options)


def _real(request_id: str) -> tuple[str, dict[str, Any]]:
    if request_id == "uvloop":
        return "asyncio", {"use_uvloop": True}
    if request_id == "asyncio":
        return "asyncio", {"debug": True}
    return "trio", {}


VIRTUAL = ["asyncio-virtual", "trio-virtual"]
REAL = ["asyncio", "trio"] + (["uvloop"] if importlib.util.find_spec("uvloop") else [])


def backend_of(request: pytest.FixtureRequest) -> tuple[str, dict[str, Any]]:
    """Return the backend that a parameter of ``VIRTUAL`` or ``REAL`` names."""
    name = str(request.param)
    if name.endswith("-virtual"):
        return virtual(name.removesuffix("-virtual"))
    return _real(name)

"""Every test that awaits runs on asyncio and on trio, in virtual time unless it says otherwise."""

from __future__ import annotations

from typing import Any

import pytest
from virtual_time import VIRTUAL, backend_of


@pytest.fixture(params=VIRTUAL)
def anyio_backend(request: pytest.FixtureRequest) -> tuple[str, dict[str, Any]]:
    return backend_of(request)

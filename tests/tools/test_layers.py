"""Each package imports only lower layers, and no file is too long to read."""

from __future__ import annotations

import ast
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from tests.tools.project import ROOT

# The packages, the lowest layer first; tests may import all of them.
PACKAGES = ("vgpu", "scripts", "bench", "gpu", "tests")
# Scenarios ask a real card where there is one.
ALLOWED = {("bench/scenarios/device.py", "gpu")}
LINES = 500


def sources(package: str) -> list[Path]:
    return sorted((ROOT / package).rglob("*.py"))


def imported(path: Path) -> set[str]:
    """The names of modules, and of imports from them, also in functions."""
    found = set()
    parents = path.relative_to(ROOT).parts[:-1]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            above = parents[: len(parents) + 1 - node.level] if node.level else ()
            module = ".".join((*above, *filter(None, [node.module])))
            found |= {module, *(f"{module}.{alias.name}" for alias in node.names)}
    return found


def packages_imported(path: Path) -> set[str]:
    return {name.partition(".")[0] for name in imported(path)} & set(PACKAGES)


@pytest.mark.parametrize("package", PACKAGES)
def test_package_imports_only_lower_layers(package: str) -> None:
    above = set(PACKAGES[PACKAGES.index(package) + 1 :])
    up = {
        (str(path.relative_to(ROOT)), other)
        for path in sources(package)
        for other in packages_imported(path) & above
    }
    assert up - ALLOWED == set()


@pytest.mark.parametrize("package", PACKAGES)
def test_no_modules_import_each_other_in_a_circle(package: str) -> None:
    modules = {
        ".".join(path.relative_to(ROOT).with_suffix("").parts): path
        for path in sources(package)
    }
    below = {name: imported(path) & modules.keys() for name, path in modules.items()}
    try:
        TopologicalSorter(below).prepare()
    except CycleError as error:
        pytest.fail(" <- ".join(error.args[1]))


def test_long_file_says_why() -> None:
    for package in PACKAGES:
        for path in sources(package):
            text = path.read_text()
            if len(text.splitlines()) > LINES:
                said = ast.get_docstring(ast.parse(text)) or ""
                assert "however long" in said, path

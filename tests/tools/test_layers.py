"""Each package imports only lower layers, and no file is too long to read."""

from __future__ import annotations

import ast
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


def packages_imported(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found.add(node.module.partition(".")[0])
    return found & set(PACKAGES)


@pytest.mark.parametrize("package", PACKAGES)
def test_a_package_imports_only_lower_layers(package: str) -> None:
    above = set(PACKAGES[PACKAGES.index(package) + 1 :])
    up = {
        (str(path.relative_to(ROOT)), other)
        for path in sources(package)
        for other in packages_imported(path) & above
    }
    assert up - ALLOWED == set()


def test_a_long_file_says_why() -> None:
    for package in PACKAGES:
        for path in sources(package):
            text = path.read_text()
            if len(text.splitlines()) > LINES:
                said = ast.get_docstring(ast.parse(text)) or ""
                assert "however long" in said, path

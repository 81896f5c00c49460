"""Each room imports from those below it, and no file is too long to be read."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests.tools.project import ROOT

# From the ground up; tests stand on all of them.
ROOMS = ("vgpu", "scripts", "bench", "gpu", "tests")
# Scenarios ask the card where there is one.
ALLOWED = {("bench/scenarios/device.py", "gpu")}
LINES = 500


def sources(room: str) -> list[Path]:
    return sorted((ROOT / room).rglob("*.py"))


def rooms_imported(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found.add(node.module.partition(".")[0])
    return found & set(ROOMS)


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_imports_from_those_below_it(room: str) -> None:
    above = set(ROOMS[ROOMS.index(room) + 1 :])
    up = {
        (str(path.relative_to(ROOT)), other)
        for path in sources(room)
        for other in rooms_imported(path) & above
    }
    assert up - ALLOWED == set()


def test_a_long_file_says_why() -> None:
    for room in ROOMS:
        for path in sources(room):
            text = path.read_text()
            if len(text.splitlines()) > LINES:
                said = ast.get_docstring(ast.parse(text)) or ""
                assert "however long" in said, path

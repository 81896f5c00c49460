"""The line of a scenario that has its result."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

BEGINS = "RESULT "


def print_result(result: Mapping[str, Any]) -> None:
    print(BEGINS + json.dumps(result), flush=True)


def read_result(line: str) -> dict[str, Any] | None:
    """None: the line is another."""
    if not line.startswith(BEGINS):
        return None
    result: dict[str, Any] = json.loads(line.removeprefix(BEGINS))
    return result

"""Tests of stock vLLM show the defects that the patches mend: when upstream mends one,
its test fails, and says so."""

from __future__ import annotations

import re
from collections.abc import Mapping

FIXED = """\
This is an assertion about stock vLLM. If it is stock that differs, upstream has fixed
the defect that the test shows: look whether the patch is still needed (drop_when in
patches/topics.toml), and change the test."""


def is_about_stock(test: str, parameters: Mapping[str, object], failed: str) -> bool:
    """By the source of a test, its parameters, and the statement that failed.

    Results have names: official, stock, release or theirs, next to ours or patched.
    """
    if "official" in parameters.values():
        return True
    alone = '"official"' in test and '"envelope"' not in test
    return alone or bool(
        re.search(r"(?<!\.)\b(official|stock|release|theirs)\b", failed)
    )

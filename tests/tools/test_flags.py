"""docs/flags.md lists the flags that the series adds, and no other as added."""

from __future__ import annotations

import re

from scripts.release import Base, releases
from tests.tools.project import ROOT

NEWEST = Base.load(ROOT, releases(ROOT)[0])
ADDED = r'^\+ .*?"(--[\w-]+)", \*\*\w+_kwargs\[|^\+    "(VLLM_\w+)": lambda'


def test_page_lists_what_is_added() -> None:
    series = "".join(patch.read_text(errors="replace") for patch in NEWEST.patches())
    added = {flag or name for flag, name in re.findall(ADDED, series, re.M)}
    page = (ROOT / "docs/flags.md").read_text()
    table = page.partition("## Added")[2].partition("## Read")[0]
    assert added == set(re.findall(r"^\| `([\w-]+)` \|", table, re.M)) != set()


def test_read_variables_are_in_vllm_or_pytorch() -> None:
    """No flag on the page is misspelt, or removed."""
    page = (ROOT / "docs/flags.md").read_text().partition("## Read")[2]
    flags = set(re.findall(r"`--([\w-]+)", page))
    source = NEWEST.tree / "vllm/engine/arg_utils.py"
    assert flags and source.exists(), "make source"
    text = source.read_text()
    assert {flag for flag in flags if f'"--{flag}"' not in text} == set()

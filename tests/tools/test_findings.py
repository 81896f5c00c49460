from __future__ import annotations

import re

from tests.tools.project import ROOT


def test_page_names_each_finding() -> None:
    page = (ROOT / "docs/findings.md").read_text()
    named = re.findall(r"\(\.\./findings/(.*?)\)", page)
    scripts = {path.name for path in (ROOT / "findings").glob("*.sh")} - {"common.sh"}
    assert sorted(named) == sorted(scripts)

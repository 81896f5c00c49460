"""The picture of README shows the rows of the table of starts, and is up to date."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree

import pytest

from bench.start_picture import PICTURE, TABLE, read
from bench.virtual import NAMES
from tests.tools.project import ROOT, module

HEAD = "| model | runner | utilization | official | peak/requested |\n| --- | --- |\n"
ROWS = """\
| dense | V1 | 0.26 | starts | 1.016 | 387 | 93, 80 | starts | 0.883 | 296 | 88, 80 |
| dense | V1 | 0.42 | refused | 2.609 |  |  | refused | 0.932 |  |  |
"""


def draw(folder: Path, table: str) -> tuple[int, str, list[str]]:
    """Exit status, errors, and the texts of the picture."""
    path, out = folder / "table.md", folder / "picture.svg"
    path.write_text(table)
    done = module("bench.start_picture", "--table", path, "--out", out)
    svg = ElementTree.parse(out).iter() if out.exists() else iter(())
    told = [e.text or "" for e in svg if e.tag.endswith("text")]
    return done.returncode, done.stderr, told


def test_picture_is_that_of_the_table(tmp_path: Path) -> None:
    status, errors, told = draw(tmp_path, HEAD + ROWS)
    assert status == 0, errors
    assert told[:4] == [
        "Stock starts take up to 2 % more memory than requested; patched none",
        "stock: 2 of 2 starts above",
        "patched: 0 of 2 starts above",
        "did not start (up to 161 % more)",
    ]
    assert "261 %" in told  # beyond the axis, so a figure


@pytest.mark.parametrize("table", ["", HEAD])
def test_table_without_rows_is_refused(table: str, tmp_path: Path) -> None:
    status, errors, told = draw(tmp_path, table)
    assert status == 1 and "no row of the table that bench.start prints" in errors
    assert not told


def test_picture_of_the_readme_is_up_to_date(tmp_path: Path) -> None:
    out = tmp_path / "picture.svg"
    done = module("bench.start_picture", "--out", out)
    assert done.returncode == 0, done.stderr
    assert out.read_text() == (ROOT / PICTURE).read_text()


def test_page_counts_what_the_table_has() -> None:
    starts = read((ROOT / TABLE).read_text())
    page = (ROOT / "docs/start-within-the-budget.md").read_text()
    for site, name in NAMES.items():
        rows = [s for s in starts if s.site == site]
        over, lives = sum(s.ratio > 1 for s in rows), sum(s.starts for s in rows)
        assert f"{name}: {lives} of {len(rows)} start; {over} take more" in page

"""The picture of README shows the rows of the table of starts, and is up to date."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree

import pytest

from bench.start_picture import PICTURE, read
from tests.tools.project import ROOT, module

HEAD = "| model | runner | utilization | official | peak/requested |\n| --- | --- |\n"
ROWS = """\
| dense | V1 | 0.25 | starts | 1.050 | 387 | 93, 80 | starts | 0.900 | 296 | 88, 80 |
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
    assert "Peak of each start on a virtual device of 2.5 GiB" in told
    assert "MiB above or below the budget, of starts that came up" in told
    assert "stock: 1 of 1 starts above the budget" in told
    assert "patched: 0 of 1 starts above the budget" in told
    assert told[-3:] == ["-100", "0", "100"]


def test_start_that_did_not_come_up_has_no_dot() -> None:
    assert [round(start.mib) for start in read(ROWS)] == [32, -64]


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

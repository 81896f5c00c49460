"""The pages: their figures are those of the files, their links lead somewhere."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from bench.figures import FIGURES, MARK, filled, pages
from scripts.commands import Problem
from scripts.prose import GENERATED, faults
from scripts.tables import age
from tests.tools.project import ROOT

LINK = re.compile(r"\]\(([^)\s]+)\)")
HEADING = re.compile(r"^#+ +(.*)$", re.M)
WORDS_OF_README, WORDS_OF_PAGES = 800, 25_000


def tracked() -> list[Path]:
    done = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "*.md"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    )  # fmt: skip
    return [ROOT / name for name in done.stdout.splitlines()]


def anchors(page: Path) -> set[str]:
    """As GitHub makes them of headings."""
    headings = HEADING.findall(
        re.sub(r"^```.*?^```", "", page.read_text(), flags=re.M | re.S)
    )
    plain = (re.sub(r"[^\w\- ]", "", heading.lower()) for heading in headings)
    return {heading.replace(" ", "-") for heading in plain}


def test_links_between_files_lead_somewhere() -> None:
    broken = []
    for page in tracked():
        for link in LINK.findall(page.read_text()):
            if "://" in link:
                continue
            name, _, anchor = link.partition("#")
            target = (page.parent / name).resolve() if name else page
            found = target.exists() and (not anchor or anchor in anchors(target))
            if not found:
                broken.append(f"{page.relative_to(ROOT)}: {link}")
    assert broken == []


@pytest.mark.parametrize("page", pages(ROOT), ids=lambda page: page.stem)
def test_figures_are_those_of_the_files(page: Path) -> None:
    text = page.read_text()
    assert filled(ROOT, text) == text, "make figures"


def test_each_figure_is_on_a_page() -> None:
    used = {
        name for page in pages(ROOT) for _, name, _, _ in MARK.findall(page.read_text())
    }
    assert used == FIGURES.keys()


def test_another_figure_is_seen() -> None:
    text = "<!-- figure: less-kv-cache -->of another day<!-- end -->"
    assert "of another day" not in filled(ROOT, text)
    with pytest.raises(Problem, match="no figure is called"):
        filled(ROOT, "<!-- figure: most -->1<!-- end -->")


def words(page: Path) -> int:
    """Of a page, without tables and figures that a command writes, comments and
    addresses. Those in docs/data are rows of measurements."""
    text = MARK.sub("", GENERATED.sub("", page.read_text()))
    written = page.parent != ROOT / "docs/data"
    text = re.sub(r"<!--.*?-->|\(http[^)]*\)", "", text)
    return written * len(re.findall(r"\S*\w\S*", text))


def test_pages_are_short() -> None:
    assert words(ROOT / "README.md") <= WORDS_OF_README
    more = [ROOT / "vgpu/README.md", ROOT / "CONTRIBUTING.md"]
    every = [page for page in [*pages(ROOT), *more] if page.suffix == ".md"]
    each = {str(page.relative_to(ROOT)): words(page) for page in every}
    assert sum(each.values()) <= WORDS_OF_PAGES, each


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("word " * 31, ["a sentence of 31 words: word word word word word word ..."]),
        ("word " * 16 + "ends.\nAnd " + "word " * 16, []),
        ("| " + "word " * 26 + "| b |", ["a cell of 26 words: word word word word "]),
        ("It dies beside ours.", ["'beside'", "'ours'", "'dies'"]),
        ("`ours beside`, [beside](ours.md): [x](what-is-beside)", ["'beside'"]),
        ("    code beside ours\n\n```\nbeside\n```\n\n# beside\n", []),
        ("<!-- table: a -->\n| beside |\n<!-- end -->\n", []),
    ],
)
def test_faults_of_a_page_are_found(text: str, found: list[str]) -> None:
    seen = sorted(fault for _, fault in faults(text))
    assert len(seen) == len(found)
    for fault, start in zip(seen, sorted(found), strict=True):
        assert fault.startswith(start)


def test_age_of_a_table_is_counted() -> None:
    head = subprocess.run(
        ["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True
    ).stdout.strip()
    assert age(ROOT, head, "patches").endswith(", 0 commits to patches since")
    assert age(ROOT, "0" * 7, "patches") == "0000000, which this clone does not have"

"""Choose tests by name, and read their outcomes; needs only the standard library."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from xml.etree import ElementTree


def chosen(tests: Iterable[str]) -> list[str]:
    """pytest's arguments for tests given as "file::function".

    By name: if a file could not be imported, pytest would run no node given as an
    argument. Tests whose names contain such a name are chosen, too.
    """
    pairs = [test.partition("::") for test in tests]
    files = sorted({file for file, _, _ in pairs})
    names = sorted({name for _, _, name in pairs})
    return ["--continue-on-collection-errors", "-k", " or ".join(names), *files]


def outcomes(report: Path) -> Iterator[tuple[str, str]]:
    """Name and outcome of each test of a JUnit report: passed, failed, skipped, or
    "error" where it could not be run; a file that cannot be imported is one, too."""
    for case in ElementTree.parse(report).iter("testcase"):
        kinds = {child.tag for child in case}
        name = case.get("name", "")
        if "error" in kinds:
            yield name, "error"
        elif "failure" in kinds:
            yield name, "failed"
        else:
            yield name, "skipped" if "skipped" in kinds else "passed"

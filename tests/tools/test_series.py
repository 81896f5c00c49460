"""The series of an older release has the topics of the newest, or says why not."""

from __future__ import annotations

import tomllib

import pytest

from scripts.compare import changes, difference
from tests.tools.project import ROOT

PATCHES = ROOT / "patches"
NEWEST, *OLDER = sorted(
    (folder.name for folder in PATCHES.glob("v*")),
    key=lambda name: [int(part) for part in name[1:].split(".")],
    reverse=True,
)


def topics(release: str) -> list[str]:
    return (PATCHES / release / "series").read_text().split()


@pytest.mark.parametrize("release", OLDER)
def test_topics_of_an_older_release(release: str) -> None:
    base = tomllib.loads((PATCHES / release / "base.toml").read_text())
    absent: dict[str, str] = base.get("absent", {})
    assert absent.keys() <= set(topics(NEWEST)) and all(absent.values())
    assert topics(release) == [t for t in topics(NEWEST) if t not in absent]


@pytest.mark.parametrize("release", OLDER)
def test_what_differs_says_why(release: str) -> None:
    """`make compare` shows it."""
    base = tomllib.loads((PATCHES / release / "base.toml").read_text())
    differs = [
        topic
        for topic in topics(release)
        if difference(
            changes(PATCHES / NEWEST / topic), changes(PATCHES / release / topic)
        )
    ]
    assert list(base["differs"]) == differs and all(base["differs"].values())

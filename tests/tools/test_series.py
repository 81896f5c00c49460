"""The series of an older release has the topics of the newest, or says why not."""

from __future__ import annotations

import pytest

from scripts.compare import differing, releases
from scripts.release import Base
from tests.tools.project import ROOT

NEWEST, *OLDER = (Base.load(ROOT, release) for release in releases(ROOT))
older = pytest.mark.parametrize("base", OLDER, ids=lambda base: f"v{base.version}")


def topics(base: Base) -> list[str]:
    return [patch.name for patch in base.patches()]


@older
def test_topics_of_an_older_release(base: Base) -> None:
    absent = base.absent
    assert absent.keys() <= set(topics(NEWEST)) and all(absent.values())
    assert set(topics(base)) == set(topics(NEWEST)) - set(absent)


@older
def test_differences_have_reasons(base: Base) -> None:
    """`make compare` shows it."""
    assert list(base.differs) == list(differing(NEWEST, base))
    assert all(base.differs.values())

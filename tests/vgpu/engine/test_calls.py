"""Calls to workers: each gets its own replies, an error is told once, and ends nothing
that is healthy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.vgpu.engine.harness import HOOKS, run

NAMED = (
    "a failure of all ranks",
    "a failure before others reply",
    "a failure beside a slow rank",
    "a reply after the timeout",
    "a failure in a step of a rank that is not asked",
    "a step that one fails",
    "a large reply",
    "a failure in a step that others overtake",
)
# After these the release gives each call the replies to the one before.
SHIFTS = NAMED[:2] + NAMED[3:4]
long = pytest.mark.long


def calls(vllm: str, folder: Path, **case: Any) -> dict[str, Any]:
    device = {"memory": "4GiB", "devices": 4}
    return run(
        "calls", case, vllm=vllm, device=device, hooks=HOOKS, folder=folder,
        forked=False, timeout=7200,
    )  # fmt: skip


def check(result: dict[str, Any]) -> None:
    assert not result["hangs"]
    assert not result["wrong"]


def test_outcomes_of_a_call(tmp_path: Path) -> None:
    result = calls("envelope", tmp_path, named=NAMED)
    check(result)
    # Steps end their executor: one serves those before, and another one the next.
    steps = [came for name, came in result["outcomes"].items() if "step" in name]
    assert all(came[-1] == ["ended", 1] for came in steps)
    # None of the steps after the one that rank 1 failed has an output.
    assert {outcome for outcome, *_ in steps[-1]} == {"ended"}


def test_release_shifts_replies(tmp_path: Path) -> None:
    result = calls("official", tmp_path, named=SHIFTS)
    assert not result["hangs"]
    assert {wrong.split(":")[0] for wrong in result["wrong"]} == set(SHIFTS)


@pytest.mark.timeout(7200)
@pytest.mark.parametrize(
    ("ranks", "programs"),
    [
        pytest.param(2, 10, marks=pytest.mark.full),
        pytest.param(4, 4, marks=pytest.mark.full),
        pytest.param(2, 1200, marks=long, id="2-many"),
        pytest.param(4, 800, marks=long, id="4-many"),
    ],
)
def test_random_programs_get_their_own_replies(
    ranks: int, programs: int, tmp_path: Path
) -> None:
    result = calls("envelope", tmp_path, ranks=ranks, programs=programs)
    check(result)
    assert result["seen"]["programs"] == programs
    assert {"replies", "failed"} <= set(result["seen"])
    if programs > 100:
        assert {"late", "ended"} <= set(result["seen"])


@long
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("ranks", [2, 4])
def test_random_programs_beside_the_release(ranks: int, tmp_path: Path) -> None:
    """The release gets a new executor after each error."""
    asked = {"ranks": ranks, "programs": 60, "release": True}
    ours, official = (
        calls(vllm, tmp_path, **asked) for vllm in ("envelope", "official")
    )
    for result in ours, official:
        check(result)
    for name, came in ours["outcomes"].items():
        theirs = official["outcomes"][name]
        for mine, other in zip(came, theirs, strict=False):
            if "late" in (mine[0], other[0]):
                break
            assert mine[0] == other[0], name
            if mine[0] == "replies":
                assert mine[1] == other[1], name

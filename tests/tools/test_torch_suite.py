"""What `make torch-tests` says of outcomes and its list, without PyTorch's files."""

from __future__ import annotations

import unittest
from pathlib import Path
from types import ModuleType

import pytest

from scripts import torch_suite_process
from scripts.commands import Problem
from scripts.torch_suite import LIST, Expected, Outcome, checked, compare, read_list

HEAD = 'files = "1.2.3"\ntorch = "1.2.3"\n'
ENTRY = '[[expected]]\ntests = ["T.a", "fast/T.b*"]\ncategory = "{}"\nreason = "{}"\n'


def entry(category: str = "absent", reason: str = "no such thing") -> str:
    return ENTRY.format(category, reason)


def listed(*tests: str, category: str = "arithmetic") -> list[Expected]:
    return [Expected(tests, category, "why")]


def test_outcomes_that_are_expected() -> None:
    outcomes = [
        Outcome("native/T.good", "passed"),
        Outcome("native/T.bad", "failed", "AssertionError: 1 != 2"),
        Outcome("fast/T.bad", "failed", "AssertionError: 1 != 2"),
        Outcome("native/T.else", "skipped", "no card"),
    ]
    counts, differences = compare(outcomes, listed("T.bad"))
    assert differences == []
    assert counts == {"passed": 1, "arithmetic": 2, "skipped": 1}


@pytest.mark.parametrize(
    "outcome, tests, said",
    [
        ("failed", ["other/T.x"], "native/T.x fails: ValueError: no"),
        ("passed", ["T.x"], "native/T.x passes; expected to fail: why"),
        ("passed", ["native/T.*"], "native/T.x passes; expected to fail: why"),
    ],
)
def test_each_difference_is_named(outcome: str, tests: list[str], said: str) -> None:
    trace = 'Traceback (most recent call last):\n  File "a"\nValueError: no\n'
    hint = "\nTo execute this test, run the following\n    python a\n"
    one = Outcome("native/T.x", outcome, trace + hint)
    _, differences = compare([one], listed(*tests), whole=False)
    assert differences == [said]


def test_test_that_is_skipped_may_be_listed() -> None:
    """Whether it is run depends on installed packages."""
    assert compare([Outcome("a/T.x", "skipped")], listed("T.x"))[1] == []


def test_listed_tests_must_be_there_in_a_whole_run() -> None:
    one = [Outcome("a/T.x", "failed")]
    assert compare(one, listed("T.x", "T.gone"), whole=False)[1] == []
    assert compare(one, listed("T.x", "T.gone"))[1] == [
        "T.gone is listed; no such test ran"
    ]


def test_another_release_is_a_reason_only_where_it_is_one() -> None:
    one = [Outcome("a/T.x", "failed", "E: renamed")]
    entries = listed("T.x", category="version")
    assert compare(one, entries, same_version=False)[1] == []
    assert compare(one, entries)[1] == ["a/T.x fails: E: renamed"]


def test_list_is_read() -> None:
    runs = '[runs.fast]\nfile = "test_cuda"\ntests = ["T.*"]\n'
    got = read_list(HEAD + runs + entry())
    assert (got.files, got.runs[0].name, got.runs[0].tests) == (
        "1.2.3",
        "fast",
        ("T.*",),
    )
    assert got.expected == (Expected(("T.a", "fast/T.b*"), "absent", "no such thing"),)


@pytest.mark.parametrize(
    "text, error",
    [
        (entry(category="bad luck"), "no category bad luck"),
        (entry(reason=" "), "a reason is needed"),
        (entry() + entry(), "listed twice"),
    ],
)
def test_list_with_a_mistake(text: str, error: str) -> None:
    with pytest.raises(Problem, match=error):
        read_list(HEAD + text)


def test_list_of_this_repository_has_no_mistake() -> None:
    assert read_list(LIST.read_text()).runs


def test_files_must_be_there_and_of_the_release(tmp_path: Path) -> None:
    folder = tmp_path / "test"
    with pytest.raises(Problem, match=r"has no test_cuda.py.*how to bring"):
        checked(folder, "2.14.0", False)
    folder.mkdir()
    (folder / "test_cuda.py").touch()
    with pytest.raises(Problem, match=r"version.txt is missing"):
        checked(folder, "2.14.0", False)
    (tmp_path / "version.txt").write_text("2.14.0a0\n")
    assert checked(folder, "2.14.0", False) == "2.14.0"
    with pytest.raises(Problem, match=r"of PyTorch 2.14.0, torch is 2.15.0"):
        checked(folder, "2.15.0", False)
    assert checked(folder, "2.15.0", True) == "2.14.0"


class Kinds(unittest.TestCase):
    """Like a test file of PyTorch's; run by the test below alone."""

    __test__ = False

    def test_passes(self) -> None:
        pass

    def test_fails(self) -> None:
        self.assertEqual(1, 2)

    def test_fails_in_part(self) -> None:
        for i in range(3):
            with self.subTest(i=i):
                self.assertNotEqual(i, 1)

    def test_is_skipped(self) -> None:
        self.skipTest("no card")

    @unittest.expectedFailure
    def test_is_expected_to_fail(self) -> None:
        raise ValueError

    @unittest.expectedFailure
    def test_passes_unexpectedly(self) -> None:
        pass


def test_outcomes_of_a_files_tests() -> None:
    module = ModuleType("module")
    vars(module).update(Kinds=Kinds, other=1)
    kinds = {
        name: torch_suite_process.run(module, name)["outcome"]
        for name in torch_suite_process.names(module)
    }
    assert kinds == {
        "Kinds.test_fails": "failed",
        "Kinds.test_fails_in_part": "failed",
        "Kinds.test_is_expected_to_fail": "passed",
        "Kinds.test_is_skipped": "skipped",
        "Kinds.test_passes": "passed",
        "Kinds.test_passes_unexpectedly": "failed",
    }

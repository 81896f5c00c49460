"""A failure of a test about stock vLLM says that upstream may have fixed it."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest_plugins = ["pytester"]
TESTS = """
import pytest

def run(vllm):
    return {"outcome": "served"}

def test_stock_alone():
    result = run("official")
    assert result["outcome"] == "out of memory"

@pytest.mark.parametrize("vllm", ["official", "envelope"])
def test_each(vllm):
    assert run(vllm)["outcome"] == "out of memory"

def test_both():
    official, ours = run("official"), run("envelope")
    assert ours["outcome"] == "served"
    assert official["outcome"] == "out of memory"

def test_patched_of_both():
    official, ours = run("official"), run("envelope")
    assert ours["outcome"] == "out of memory"

def test_error():
    run("official")
    raise RuntimeError
"""


def test_failure_about_stock_says_that_upstream_has_fixed_it(
    pytester: pytest.Pytester,
) -> None:
    conftest = Path(__file__).parents[1] / "vgpu/conftest.py"
    text = conftest.read_text().replace('"vgpu.pytest_plugin"', '"pytester"')
    pytester.makeconftest(text)
    pytester.makepyfile(TESTS)
    pytester.syspathinsert(Path(__file__).parents[2])
    run = pytester.inline_run()
    assert len(run.listoutcomes()[2]) == 6
    told = {
        report.location[2]
        for report in run.getreports("pytest_runtest_logreport")
        if any("upstream has fixed" in text for _, text in report.sections)
    }
    assert told == {"test_stock_alone", "test_each[official]", "test_both"}

"""Each case of gpu/suite.py: it fails without the patches, and passes with them.

    .venv/bin/python -m pytest tests/gpu

ENVELOPE_BUNDLE is what 'make bundle' wrote, where there is no checkout with wheels.
"""

from __future__ import annotations

import os
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest

from gpu import suite
from gpu.builds import Builds
from gpu.card import CardError
from scripts.commands import REPOSITORY


@pytest.fixture(scope="session")
def machine() -> suite.Machine:
    if "VGPU_RUN" in os.environ:
        pytest.skip("this is the virtual device: see tests/vgpu/gpu")
    try:
        return suite.survey()[0]
    except CardError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def builds(machine: suite.Machine, tmp_path_factory: pytest.TempPathFactory) -> Builds:
    bundle = os.environ.get("ENVELOPE_BUNDLE")
    base = os.environ.get("ENVELOPE_BASE", "0.33.0")
    where = Namespace(
        root=REPOSITORY, base=base, bundle=Path(bundle) if bundle else None
    )
    return suite.prepare(where, tmp_path_factory.mktemp("builds"))


@pytest.mark.parametrize("case", suite.CASES, ids=lambda case: case.name)
def test_checks_of_each_case_hold(
    case: suite.Case, machine: suite.Machine, builds: Builds
) -> None:
    if why := suite.why_not(case, machine):
        pytest.skip(why)
    entry: dict[str, Any] = suite.run_case(case, builds, machine, 150)
    assert entry["checks"]
    broken = [check for check in entry["checks"] if not check["holds"]]
    assert not broken, (broken, entry["unpatched"], entry["patched"])

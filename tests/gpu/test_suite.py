"""Each case of scripts/gpu.py: what is wrong without the patches, and right with them.

    .venv/bin/python -m pytest tests/gpu

ENVELOPE_BUNDLE is what 'make bundle' wrote, where there is no checkout with wheels.
"""

from __future__ import annotations

import os
from argparse import Namespace
from pathlib import Path
from typing import Any

import gpu
import pytest
from card import CardError
from kit import Kit
from series import REPOSITORY


@pytest.fixture(scope="session")
def machine() -> gpu.Machine:
    if "VGPU_RUN" in os.environ:
        pytest.skip("this is the virtual device: see tests/vgpu/gpu")
    try:
        return gpu.survey()[0]
    except CardError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def kit(machine: gpu.Machine, tmp_path_factory: pytest.TempPathFactory) -> Kit:
    bundle = os.environ.get("ENVELOPE_BUNDLE")
    base = os.environ.get("ENVELOPE_BASE", "0.33.0")
    where = Namespace(
        root=REPOSITORY, base=base, bundle=Path(bundle) if bundle else None
    )
    return gpu.prepare(where, tmp_path_factory.mktemp("kit"))


@pytest.mark.parametrize("case", gpu.CASES, ids=lambda case: case.name)
def test_case(case: gpu.Case, machine: gpu.Machine, kit: Kit) -> None:
    if why := gpu.why_not(case, machine):
        pytest.skip(why)
    entry: dict[str, Any] = gpu.run_case(case, kit, machine, 150)
    assert entry["checks"]
    broken = [check for check in entry["checks"] if not check["holds"]]
    assert not broken, (broken, entry["unpatched"], entry["patched"])

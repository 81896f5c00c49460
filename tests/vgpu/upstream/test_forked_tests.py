"""scripts/forked_tests.py with tests that spawn a process."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
UTILS = """
import os, subprocess, sys

def spawn(script: str) -> int:
    env = os.environ | {"OWN": "1"}
    command = [sys.executable, "-c", script]
    return subprocess.run(command, input=b"in", env=env).returncode
"""
TESTS = '''
import os
import torch
import pytest
from tests.utils import spawn

imported = os.getpid()
FIRST = """
import os, sys
from tests import test_spawns
assert sys.stdin.buffer.read() == b"in" and os.environ["OWN"] == "1"
assert test_spawns.imported not in (os.getpid(), os.getppid())
import torch
assert not torch.cuda.is_initialized()
held = torch.empty(1 << 20, device="cuda")
assert torch.cuda.memory_allocated() == 4 << 20
"""

@pytest.mark.parametrize(
    ("script", "status"),
    [(FIRST, 0), (FIRST, 0), ("exit()", 0), ("exit(3)", 3), ("exit('why')", 1),
     ("1 / 0", 1),
     ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", -9)],
)
def test_each(script, status):
    torch.empty(1, device="cuda")  # where no fork could call CUDA any more
    assert "OWN" not in os.environ
    assert spawn(script) == status
'''


def test_they_are_forked_from_one_that_never_calls_cuda(tmp_path: Path) -> None:
    folder = tmp_path / "tests"
    folder.mkdir()
    (folder / "__init__.py").touch()
    (folder / "utils.py").write_text(UTILS)
    (folder / "test_spawns.py").write_text(TESTS)
    pytest = ["-m", "pytest", "-q", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [sys.executable, "-m", "vgpu", "--memory", "1GiB", "--", sys.executable]
        + [*pytest, "-p", "scripts.forked_tests", "--rootdir=.", "tests"],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0 and "7 passed" in done.stdout, done.stdout + done.stderr

"""What `make check` finds in a patch without running its tests."""

from __future__ import annotations

from pathlib import Path

from scripts.check import undefined
from scripts.series import BASE_REF, git, touched_lines

RELEASED = """\
class Worker(Base):
    def begin(self):
        self.inherited()
"""
PATCHED = (
    RELEASED
    + """\
        self.begin()
        self.elsewhere()
        self.kept()
        self.lost()

    kept = None
"""
)


def test_method_that_was_lost(tmp_path: Path) -> None:
    git(tmp_path, "init", "-q")
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm/base.py").write_text("def elsewhere(self): ...\n")
    for worker in RELEASED, PATCHED:
        (tmp_path / "vllm/worker.py").write_text(worker)
        git(tmp_path, "add", "--all")
        git(tmp_path, "commit", "-q", "-m", "worker")
        if worker == RELEASED:
            git(tmp_path, "update-ref", BASE_REF, "HEAD")
    faults = undefined(tmp_path, touched_lines(tmp_path))
    assert faults == ["vllm/worker.py: self.lost() is not defined"]

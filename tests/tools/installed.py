"""An environment with the official vLLM in miniature, and the overlay for it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from dataclasses import dataclass
from pathlib import Path

from tests.tools.project import Project

ARCH = os.uname().machine


@dataclass
class Installed:
    """A virtual environment with vLLM, and the overlay for it."""

    python: Path
    overlay: Path

    @property
    def site(self) -> Path:
        (site,) = self.python.parents[1].glob("lib/python*/site-packages")
        return site

    @property
    def version(self) -> str:
        """Of the overlay."""
        with zipfile.ZipFile(self.overlay) as opened:
            return str(json.loads(opened.read("overlay.json"))["version"])

    @property
    def info(self) -> Path:
        """The dist-info folder of an environment with the overlay."""
        return self.site / f"vllm-{self.version}.dist-info"

    def run(self, *arguments: str, **environment: str) -> tuple[int, str, str]:
        done = subprocess.run(
            [self.python, self.overlay, *arguments],
            env=os.environ | environment,
            capture_output=True,
            text=True,
            timeout=60,
        )
        return done.returncode, done.stdout, done.stderr

    def ok(self, *arguments: str) -> str:
        code, out, error = self.run(*arguments)
        assert code == 0, error
        return out

    def fails(self, *arguments: str) -> str:
        code, _, error = self.run(*arguments)
        assert code == 1
        assert "Traceback" not in error
        return error

    def files(self) -> dict[str, bytes]:
        return {
            str(path.relative_to(self.site)): path.read_bytes()
            for path in sorted(self.site.rglob("*"))
            if not path.is_dir()
        }

    def tree(self) -> dict[str, object]:
        """The state that a revert must restore: contents, modes, folders, and the times
        of modules, which bytecode is checked against."""
        return {
            str(path.relative_to(self.site)): (
                path.is_dir() or path.read_bytes(),
                path.stat().st_mode,
                path.suffix == ".py" and path.stat().st_mtime_ns,
            )
            for path in sorted(self.site.rglob("*"))
        }

    def sources(self) -> dict[str, bytes]:
        """The files without bytecode, which holds the time of the install."""
        return {n: c for n, c in self.files().items() if not n.endswith(".pyc")}

    def write(self, name: str, content: bytes) -> None:
        (self.site / name).unlink()  # installers may have linked it to their cache
        (self.site / name).write_bytes(content)


def install_wheel(python: Path, wheel: Path, *options: str) -> None:
    uv = [sys.executable, "-m", "uv", "pip", "install", "-q", "--no-deps"]
    command = [*uv, "--link-mode=copy", "-p", str(python), *options, str(wheel)]
    subprocess.run(command, check=True, capture_output=True)


def make_overlay(project: Project, arch: str = ARCH) -> Path:
    project.ok("build_wheel", "--arch", arch)
    project.ok("overlay", "--arch", arch)
    (overlay,) = (project.root / "dist").glob(f"*-overlay-{arch}.pyz")
    return overlay

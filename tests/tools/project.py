"""A release in miniature, served by a package index on the loopback interface.

The scripts run as they do for a user, as processes; only the release is small.
"""

from __future__ import annotations

import base64
import csv
import hashlib
import io
import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

from scripts.release import Base

ROOT = Path(__file__).resolve().parents[2]
# For `python -m` of this project's modules.
FROM_ANYWHERE = os.environ | {"PYTHONPATH": str(ROOT)}
ARCHES = ("x86_64", "aarch64")
EXTENSION = """\
#include <cuda.h>
#include <Python.h>
static PyModuleDef module = {PyModuleDef_HEAD_INIT, "native", "", -1, 0};
extern "C" PyObject* PyInit_native(void) {
  CUdevice count = 0;
  cuDeviceGet(&count, 0);
  return PyModule_Create(&module);
}
"""
TEMPLATE = """\
## Overview

<!-- Summarize. -->

## Claims

## Validation

<!-- Show
evidence. -->

## Details

- [ ] AI assistance was used during the creation of this PR.
- [ ] Another point.
"""
SOURCES = {
    ".github/PULL_REQUEST_TEMPLATE.md": TEMPLATE,
    "PKG-INFO": "Name: vllm\n",
    ".gitignore": "*.so\n/vllm/_version.py\n",
    "csrc/native.cpp": EXTENSION,
    "csrc/other.cu": "// a kernel\n",
    "docs/page.md": "A page.\n",
    "vllm/__init__.py": "",
    "vllm/budget.py": "def requested(total):\n    return total\n",
    "vllm/gone.py": "UNUSED = 1\n",
    "tools/newer.py": "def of_newer():\n    pass\n",
    "vllm/plan.py": "".join(f"{name} = 1\n" for name in "abcdefghijklmnopqr"),
}
PLAN = SOURCES["vllm/plan.py"]
# The release before: no newer.py, and an older plan.py, with one change that 1.2.3 does
# not have.
OLDER = SOURCES | {
    "PKG-INFO": "Name: vllm\nRequires-Dist: torch==1.9\n",
    "vllm/plan.py": PLAN.replace("c = 1", "c = 0")
    .replace("i = 1", "i = 2")
    .replace("p = 1", "p = 0"),
}
del OLDER["tools/newer.py"]
VERSION = """\
__version__ = version = '1.2.3'
__version_tuple__ = version_tuple = (1, 2, 3)

__commit_id__ = commit_id = 'gabcdef123'
"""
INFO = "vllm-1.2.3.dist-info"
METADATA = "Metadata-Version: 2.4\nName: vllm\nVersion: 1.2.3\nRequires-Dist: torch\n"


def write_sdist(path: Path, sources: dict[str, str] = SOURCES) -> None:
    with tarfile.open(path, "w:gz") as tar:
        for name, text in sources.items():
            member = tarfile.TarInfo(f"{path.name.removesuffix('.tar.gz')}/{name}")
            member.size = len(text)
            tar.addfile(member, io.BytesIO(text.encode()))


def write_wheel(
    path: Path,
    native: bytes = b"official native code",
    sources: dict[str, str] = SOURCES,
) -> None:
    release = path.name.split("-")[1]
    info = f"vllm-{release}.dist-info"
    version = VERSION.replace("1.2.3", release)
    version = version.replace("1, 2, 3", release.replace(".", ", "))
    files = {n: t.encode() for n, t in sources.items() if n.startswith("vllm/")}
    files |= {
        "vllm/native.abi3.so": native,
        "vllm/large.abi3.so": bytes(range(256)) * 4096,
        "vllm/_version.py": version.encode(),
        f"{info}/METADATA": METADATA.replace("1.2.3", release).encode(),
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nRoot-Is-Purelib: false\n",
    }
    rows = io.StringIO()
    writer = csv.writer(rows, lineterminator="\n")
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as wheel:
        for name, content in files.items():
            wheel.writestr(name, content)
            digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest())
            row = [name, f"sha256={digest.decode().rstrip('=')}", len(content)]
            writer.writerow(row)
        writer.writerow([f"{info}/RECORD", "", ""])
        wheel.writestr(f"{info}/RECORD", rows.getvalue())


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


@dataclass
class Project:
    """A checkout of this project for the small release."""

    root: Path
    environment: dict[str, str]

    def command(self, script: str, *arguments: str) -> list[str]:
        return [sys.executable, "-m", f"scripts.{script}", "--root", str(self.root),
                "--base", "1.2.3", *arguments]  # fmt: skip

    def run(
        self, script: str, *arguments: str, **kwargs: object
    ) -> subprocess.CompletedProcess[str]:
        return subprocess.run(  # type: ignore[call-overload, no-any-return]
            self.command(script, *arguments),
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=120,
            **kwargs,
        )

    def ok(self, script: str, *arguments: str) -> str:
        done = self.run(script, *arguments)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def fails(self, script: str, *arguments: str, **kwargs: object) -> str:
        """The error a command ends with: one that a user can read."""
        done = self.run(script, *arguments, **kwargs)
        assert done.returncode == 1, (done.stdout, done.stderr)
        assert "Traceback" not in done.stderr, done.stderr
        return done.stderr

    def git(self, *arguments: str) -> str:
        return self.git_of(self.tree, *arguments)

    @staticmethod
    def git_of(tree: Path, *arguments: str) -> str:
        identity = ("-c", "user.name=A", "-c", "user.email=a@b")
        return subprocess.run(
            ["git", "-C", str(tree), *identity, *arguments],
            check=True, capture_output=True, text=True,
        ).stdout  # fmt: skip

    def commit(self, subject: str, **files: str | None) -> None:
        for name, content in files.items():
            path = self.tree / name.replace("__", "/").replace("_py", ".py")
            if content is None:
                path.unlink()
            else:
                path.write_text(content)
        self.git("add", "-A")
        self.git("commit", "-q", "-m", subject)

    @property
    def tree(self) -> Path:
        return self.root / "vllm"

    @property
    def patches(self) -> Path:
        return self.root / "patches/v1.2.3"

    @property
    def version(self) -> str:
        """Of our build of the series as it is now."""
        return Base.load(self.root, "1.2.3").local_version

    @property
    def info(self) -> str:
        return f"vllm-{self.version}.dist-info"

    def wheel(self, arch: str = "x86_64") -> Path:
        name = f"vllm-{self.version}-cp38-abi3-manylinux_2_28_{arch}.whl"
        return self.root / "dist" / name

    def files(self) -> dict[str, bytes]:
        """Every file outside git's own folders, by path."""
        return {
            str(path.relative_to(self.root)): path.read_bytes()
            for path in sorted(self.root.rglob("*"))
            if path.is_file() and ".git" not in path.parts
        }


def module(name: str, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """Run `python -m` with one of this project's modules."""
    return subprocess.run(
        [sys.executable, "-m", name, *arguments],
        env=FROM_ANYWHERE, capture_output=True, text=True, timeout=300,
    )  # fmt: skip


def new_project(index: tuple[str, Path], folder: Path) -> Project:
    url, published = index
    root = folder / "project"
    patches = root / "patches/v1.2.3"
    patches.mkdir(parents=True)
    (patches / "series").write_text("")
    pins = {path.name: sha256(path) for path in published.glob("vllm-*")}
    base = 'version = "1.2.3"\ntorch = "2"\n'
    for name, digest in pins.items():
        table = (
            "sdist" if name.endswith(".gz") else f"wheel.{name[:-4].split('28_')[1]}"
        )
        base += f'[{table}]\nfile = "{name}"\nsha256 = "{digest}"\n'
    base += (
        '[extension."vllm/native.abi3.so"]\nsources = ["csrc/native.cpp"]\n'
        'headers = []\nlibraries = ["libcuda.so.1"]\nlimited_api = "0x03080000"\n'
    )
    (patches / "base.toml").write_text(base)
    environment = FROM_ANYWHERE | {
        "PIP_INDEX_URL": url,
        "ENVELOPE_CACHE": str(folder / "cache"),
        "no_proxy": "127.0.0.1",
    }
    return Project(root, environment)


def tamper(wheel: Path, edit: dict[str, bytes | None]) -> None:
    """Replace, add or drop members of a wheel, leaving RECORD as it is."""
    new = wheel.with_suffix(".new")
    with zipfile.ZipFile(wheel) as source, zipfile.ZipFile(new, "w") as target:
        for entry in source.infolist():
            content = edit.pop(entry.filename, source.read(entry))
            if content is not None:
                target.writestr(entry, content)
        for name, content in edit.items():
            assert content is not None
            target.writestr(name, content)
    shutil.move(new, wheel)

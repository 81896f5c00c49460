"""Kernels cut down to one architecture, and the bundle unpacked into two vLLMs."""

from __future__ import annotations

import ctypes
import io
import json
import struct
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from gpu.builds import Builds
from scripts import bundle
from scripts.commands import Problem
from scripts.strip_fatbins import CUBIN, PTX, strip_fatbins


def entry(kind: int, architecture: int, text: bytes) -> bytes:
    content = text.ljust(64, b".")
    header = struct.pack("<HHIQ12xI", kind, 0x101, 64, len(content), architecture)
    return header.ljust(64, b"\0") + content


def container(*entries: bytes) -> bytes:
    content = b"".join(entries)
    return struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(content)) + content


def library(folder: Path, kernels: bytes) -> Path:
    """A shared object with these kernels, and a function that still works after."""
    bytes_ = ",".join(map(str, kernels))
    (folder / "kernels.c").write_text(
        '__attribute__((section(".nv_fatbin"), aligned(8), used))\n'
        f"static const unsigned char kernels[] = {{{bytes_}}};\n"
        "int answer(void) { return 42; }\n"
    )
    target = folder / "kernels.so"
    subprocess.run(
        ["cc", "-shared", "-fPIC", "-o", str(target), str(folder / "kernels.c")],
        check=True,
    )
    return target


def test_only_the_kernels_of_one_architecture_stay(tmp_path: Path) -> None:
    both = container(
        entry(CUBIN, 80, b"eighty"), entry(CUBIN, 90, b"ninety"), entry(PTX, 90, b"ptx")
    )
    neither = container(entry(CUBIN, 80, b"long" * 40), entry(PTX, 75, b"short" * 20))
    path = library(tmp_path, both + neither)
    binary = bytearray(path.read_bytes())
    before = len(binary)
    freed = strip_fatbins(binary, 90)
    assert len(binary) == before and freed == 2 * 128 + (224 + 164 - 128)
    for text, stays in (
        (b"ninety", True),
        (b"ptx.", False),
        (b"longlong", False),
        (b"short", False),
        # No code for the architecture: the smallest for another one replaces it.
        (b"eighty", True),
    ):
        assert (text in binary) == stays, text
    # Thinning again finds containers that are well formed, and nothing to free.
    assert strip_fatbins(binary, 90) == 0
    path.write_bytes(binary)
    assert ctypes.CDLL(str(path)).answer() == 42


def test_damaged_kernels_are_an_error(tmp_path: Path) -> None:
    damaged = bytearray(container(entry(CUBIN, 90, b"ninety")))
    struct.pack_into("<Q", damaged, 16 + 8, 10**6)  # the entry is too large
    binary = bytearray(library(tmp_path, bytes(damaged)).read_bytes())
    with pytest.raises(ValueError, match="do not fill their container"):
        strip_fatbins(binary, 90)
    with pytest.raises(ValueError, match="not an ELF file"):
        strip_fatbins(bytearray(b"#!/bin/sh"), 90)


def test_file_without_kernels_stays_as_it_is() -> None:
    binary = bytearray(Path(sys.executable).resolve().read_bytes())
    assert strip_fatbins(binary, 90) == 0
    assert binary == Path(sys.executable).resolve().read_bytes()


def wheel(path: Path, files: dict[str, str]) -> Path:
    with zipfile.ZipFile(path, "w") as opened:
        for name, text in files.items():
            opened.writestr(name, text)
    return path


def test_changed_and_removed_files_are_found(tmp_path: Path) -> None:
    common = {"vllm/same.py": "1"}
    official = wheel(tmp_path / "a.whl", common | {"vllm/b.py": "1", "vllm/gone": ""})
    ours = wheel(tmp_path / "b.whl", common | {"vllm/b.py": "2", "vllm/new.py": "1"})
    changed, removed = bundle.differences(official, ours)
    assert changed == {"vllm/b.py", "vllm/new.py"} and removed == {"vllm/gone"}


def pack(path: Path, python: str) -> Path:
    manifest = {
        "python": python,
        "versions": {"unpatched": "1.2.3", "patched": "1.2.3+envelope.1"},
        "removed": ["vllm/gone.py", "vllm-1.dist-info/METADATA"],
        "own_tests": ["tests/test_a.py::test_b"],
    }
    files = {
        "unpatched/vllm/same.py": "same",
        "unpatched/vllm/changed.py": "theirs",
        "unpatched/vllm/gone.py": "",
        "unpatched/vllm-1.dist-info/METADATA": "",
        "patched/vllm/changed.py": "ours",
        "patched/vllm/new/file.py": "new",
        "tests/test_a.py": "",
        "bundle.json": json.dumps(manifest),
    }
    with tarfile.open(path, "w:xz") as tar:
        for name, text in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(text)
            tar.addfile(member, io.BytesIO(text.encode()))
    return path


def test_bundle_unpacks_into_both(tmp_path: Path) -> None:
    this = f"{sys.version_info[0]}.{sys.version_info[1]}"
    builds = Builds.of_bundle(pack(tmp_path / "b.tar.xz", this), tmp_path / "builds")
    unpatched, patched = (
        Path(builds.sites[v]) / "vllm" for v in ("unpatched", "patched")
    )
    assert (unpatched / "changed.py").read_text() == "theirs"
    assert (patched / "changed.py").read_text() == "ours"
    assert (patched / "same.py").read_text() == "same"
    assert (patched / "new/file.py").exists() and not (unpatched / "new").exists()
    assert (unpatched / "gone.py").exists() and not (patched / "gone.py").exists()
    # An empty one would be taken for a vLLM that has no version.
    assert not Path(builds.sites["patched"], "vllm-1.dist-info").exists()
    assert Path(builds.sites["unpatched"], "vllm-1.dist-info/METADATA").exists()
    assert builds.versions["patched"] == "1.2.3+envelope.1"
    assert builds.own_tests == ("tests/test_a.py::test_b",)
    assert builds.environment("patched")["PYTHONPATH"].startswith(
        builds.sites["patched"]
    )


def test_another_file_or_python_is_refused(tmp_path: Path) -> None:
    with pytest.raises(Problem, match="is for Python 2.7"):
        Builds.of_bundle(pack(tmp_path / "b.tar.xz", "2.7"), tmp_path / "builds")
    (tmp_path / "c.tar.xz").write_text("text")
    with pytest.raises(Problem, match="is no bundle of 'make bundle'"):
        Builds.of_bundle(tmp_path / "c.tar.xz", tmp_path / "other")

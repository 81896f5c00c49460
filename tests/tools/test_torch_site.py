"""gpu/torch_site.py: PyTorch put together from parts, on NVIDIA libraries it finds."""

from __future__ import annotations

import io
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from gpu import torch_site
from scripts.commands import REPOSITORY


def shared_object(path: Path, code: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    subprocess.run(
        ["cc", "-shared", "-fPIC", "-x", "c", "-", "-o", str(path)],
        input=code, text=True, check=True,
    )  # fmt: skip


def machine(folder: Path) -> Path:
    """An interpreter's packages: a PyTorch, and an NCCL with one function."""
    (folder / "torch").mkdir(parents=True)
    (folder / "torch/__init__.py").touch()
    nccl = folder / "nvidia/nccl/lib/libnccl.so.2"
    shared_object(nccl, "int ncclOld(void) { return 0; }")
    return folder


def parts(folder: Path) -> list[Path]:
    """A PyTorch that calls that function and a newer one."""
    user = folder / "user.so"
    calls = "int ncclOld(void), ncclNew(void); int f(void) { return ncclOld() + %s; }"
    shared_object(user, calls % "ncclNew()")
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w:xz") as tar:
        for name in torch_site.USERS:
            tar.add(user, f"torch/lib/{name}")
    data = content.getvalue()
    third = len(data) // 3
    paths = [folder / f"torch.tar.xz.{i}" for i in range(3)]
    for i, path in enumerate(paths):
        path.write_bytes(data[i * third : (i + 1) * third if i < 2 else None])
    return paths


def call(site: Path, given: list[Path], path: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "gpu.torch_site", str(site), *map(str, given)],
        env={"PYTHONPATH": f"{path}:{REPOSITORY}", "PATH": "/usr/bin:/bin"},
        capture_output=True, text=True,
    )  # fmt: skip


def test_newer_pytorch_loads_with_an_older_nccl(tmp_path: Path) -> None:
    site = tmp_path / "site"
    packages = machine(tmp_path / "packages")
    done = call(site, parts(tmp_path), packages)
    assert done.returncode == 0, done.stderr
    assert torch_site.missing_nccl(site) == ["ncclNew"]
    load = (
        "import ctypes, os, sys\n"
        "ctypes.CDLL(sys.argv[1], os.RTLD_NOW | os.RTLD_GLOBAL)\n"
        "user = ctypes.CDLL(sys.argv[2], os.RTLD_NOW)\n"
        "print(user.f())"
    )
    nccl = site / "nvidia/nccl/lib/libnccl.so.2"
    user = site / "torch/lib/libtorch_cuda.so"
    program = ["python3", "-c", load, str(nccl), str(user)]
    without = subprocess.run(program, capture_output=True, text=True)
    assert "undefined symbol: ncclNew" in without.stderr
    command = f". {site}/environment; exec " + '"$@"'
    with_it = subprocess.run(
        ["sh", "-c", command, "sh", *program], capture_output=True, text=True
    )
    assert with_it.stdout == f"{torch_site.NCCL_INTERNAL_ERROR}\n", with_it.stderr


@pytest.mark.parametrize("left", [[0, 2], [1, 2]])
def test_all_parts_are_needed(left: list[int], tmp_path: Path) -> None:
    given = parts(tmp_path)
    done = call(tmp_path / "site", [given[i] for i in left], tmp_path)
    assert done.returncode == 1
    assert "all parts are needed" in done.stderr
    assert not (tmp_path / "site").exists()


def test_last_part_that_lacks_is_told(tmp_path: Path) -> None:
    packages = machine(tmp_path / "packages")
    done = call(tmp_path / "site", parts(tmp_path)[:2], packages)
    assert done.returncode == 1
    assert "the parts are damaged, or not all" in done.stderr
    assert not list(tmp_path.glob("*site*"))

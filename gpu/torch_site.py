"""On a GPU machine with another PyTorch: that of 'make bundle TORCH=1', from its parts.

    python3 -m gpu.torch_site FOLDER torch-2.14.0-sm90.tar.xz.*
    . FOLDER/environment

NVIDIA's libraries stay those of the machine's PyTorch, of the same major CUDA version.
An older NCCL lacks functions that this PyTorch imports: they are there then, and fail
when they are called, which a single rank does not. Needs a C compiler.
"""

from __future__ import annotations

import argparse
import ctypes
import importlib.util
import shlex
import subprocess
import tarfile
from pathlib import Path
from typing import Any

from scripts.commands import Problem, command, scratch
from vgpu import elf

NCCL_INTERNAL_ERROR = 3  # ncclInternalError of nccl.h
USERS = ("libtorch_cuda.so", "libtorch_python.so")


class Parts:
    """Files, read as one."""

    def __init__(self, paths: list[Path]) -> None:
        self._left = sorted(paths, key=lambda path: int(path.suffix[1:]))
        self._file = self._left.pop(0).open("rb")

    def read(self, size: int) -> bytes:
        content = self._file.read(size)
        while len(content) < size and self._left:
            self._file.close()
            self._file = self._left.pop(0).open("rb")
            content += self._file.read(size - len(content))
        return content


def machines_nvidia() -> Path:
    """The folder of NVIDIA's libraries next to this machine's PyTorch.

    Raises:
        Problem: it has none.
    """
    found = importlib.util.find_spec("torch")
    origin = Path(found.origin) if found and found.origin else Path()
    folder = origin.parent.parent / "nvidia"
    if not (folder / "nccl").is_dir():
        raise Problem(f"a PyTorch with NVIDIA's packages is needed; no {folder}/nccl.")
    return folder


def missing_nccl(site: Path) -> list[str]:
    """Functions of NCCL that PyTorch there imports and the machine's does not have."""
    nccl = ctypes.CDLL(str(site / "nvidia/nccl/lib/libnccl.so.2"))
    wanted = {
        name
        for user in USERS
        for name in elf.read(site / "torch/lib" / user).undefined
        if name.startswith("nccl")
    }
    return sorted(name for name in wanted if not hasattr(nccl, name))


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", type=Path, help="where to put it; made")
    parser.add_argument("parts", type=Path, nargs="+", help="all of them")


def main(args: argparse.Namespace) -> None:
    numbers = sorted(path.suffix for path in args.parts)
    if numbers != sorted(f".{i}" for i in range(len(numbers))):
        raise Problem(f"all parts are needed, .0 to the last; found {numbers}.")
    target = args.folder.absolute()
    if target.exists():
        raise Problem(f"{target} is there already: name a folder that is not.")
    with scratch(target.parent, target.name) as folder:
        site = folder / "site"
        build(site, args.parts, target)
        site.rename(target)
    print(f". {target}/environment")


def build(site: Path, paths: list[Path], target: Path) -> None:
    """Fill `site`, which will be `target`."""
    nvidia = machines_nvidia()
    parts: Any = Parts(paths)
    try:
        with tarfile.open(fileobj=parts, mode="r|xz") as tar:
            tar.extractall(site, filter="data")
    except (tarfile.TarError, EOFError) as error:
        raise Problem(f"the parts are damaged, or not all: {error}") from None
    (site / "nvidia").mkdir()
    for library in nvidia.iterdir():
        (site / "nvidia" / library.name).symlink_to(library)
    code = "".join(
        f"int {name}(void) {{ return {NCCL_INTERNAL_ERROR}; }}\n"
        for name in missing_nccl(site)
    )
    subprocess.run(
        ["cc", "-shared", "-fPIC", "-x", "c", "-", "-o", str(site / "nccl_stubs.so")],
        input=code, text=True, check=True,
    )  # fmt: skip
    (site / "environment").write_text(
        f"export PYTHONPATH={shlex.quote(str(target))}${{PYTHONPATH:+:$PYTHONPATH}}\n"
        f"export LD_PRELOAD={shlex.quote(str(target / 'nccl_stubs.so'))}\n"
    )


if __name__ == "__main__":
    command(main)

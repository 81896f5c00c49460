"""A slice of a device, made by a library that a process is started with."""

from __future__ import annotations

import subprocess
from pathlib import Path

from vgpu import build

SOURCE = Path(__file__).with_name("slice.c")


def compiled(folder: Path, source: Path = SOURCE) -> Path:
    library = folder / f"{source.stem}.so"
    includes = [f"-isystem{path}" for path in build.find_headers().folders]
    subprocess.run(
        [*build.find_compiler().split(), "-shared", "-fPIC", "-Wl,-Bsymbolic", "-Wall",
         "-Wextra", "-Werror", *includes, "-o", library, source, "-ldl", "-lpthread"],
        check=True,
    )  # fmt: skip
    return library


def environment(library: Path, size: int, folder: Path) -> dict[str, str]:
    """Added to that of the processes that share a slice of `size` bytes."""
    return {
        "LD_PRELOAD": str(library),
        "SLICE_BYTES": str(size),
        "SLICE_FILE": str(folder / "slice"),
    }

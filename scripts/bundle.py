"""Both vLLMs in one small file, for a GPU machine without a network.

    make bundle [BASE=...]      # build/bundle/vllm-<release>-sm90.tar.xz

The machine has Python, PyTorch and the requirements of PyTorch and transformers. The
bundle adds the official wheel with the kernels of one architecture (strip_fatbins.py),
the files that ours changes, vLLM's tests, and the packages below in the versions that
requirements/ pins. `python -m gpu.suite --bundle` and `gpu.calibrate --bundle` unpack
it.

    make bundle TORCH=1         # build/bundle/torch-<version>-sm90.tar.xz.0, .1, ...

The PyTorch that vLLM requires, too, with the kernels of that architecture, in parts
that a machine takes one at a time: gpu/torch_site.py puts them together there.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import lzma
import re
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

from scripts.commands import Problem, command, locked, scratch
from scripts.patch_tests import tests_of_series
from scripts.release import Base, fetch
from scripts.series import git
from scripts.strip_fatbins import strip_fatbins

# What vLLM and its tests import, and an image for PyTorch lacks.
PACKAGES = {
    "annotated-types", "anthropic", "apache-tvm-ffi", "blake3", "cachetools", "cbor2",
    "compressed-tensors", "distro", "docstring-parser", "fastapi", "httpcore2",
    "httpx2", "jiter", "jmespath", "llguidance", "loguru",
    "model-hosting-container-standards", "msgspec",
    "openai", "openai-harmony", "opentelemetry-api", "orjson", "oss-harmony",
    "partial-json-parser", "prometheus-fastapi-instrumentator", "pybase64",
    "pydantic", "pydantic-core", "pyzmq", "setproctitle", "sniffio", "starlette",
    "tblib", "truststore", "typing-extensions", "typing-inspection", "uvicorn",
    "watchfiles", "xgrammar",
}  # fmt: skip
# Not loaded where these models run: other architectures and formats, FlashAttention 2
# (3 is for sm_90), and what only the server or benchmarks read.
LEFT_OUT = re.compile(
    r"vllm/(vllm-rs$|_qutlass_C|_deepselect_C|vllm_flash_attn/_vllm_fa2_C"
    r"|third_party/(deep_gemm|fmha_sm100)/|benchmarks/.*/data/"
    r"|vllm_flash_attn/cute/.*(sm100|sm120|bwd|benchmark|testing))"
)
# What imports of PyTorch need; the rest of NVIDIA's libraries is that of the machine.
TORCH = {"torch", "torchvision"}
NO_TORCH = re.compile(r"torch/(include|test|share)/|torch/bin/(?!torch_shm_manager$)")
PART = 40 << 20  # bytes
# The manylinux tags that wheels carry, the newest first.
GLIBC = (39, 35, 34, 31, 28, 27, 26, 24, 17, 12, 5)


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--architecture", type=int, default=90, help="90 for sm_90")
    parser.add_argument("--python-version", default="3.12")
    parser.add_argument("--out", type=Path, help="folder (default: build/bundle)")
    parser.add_argument("--torch", action="store_true", help="PyTorch alone, in parts")


def main(args: argparse.Namespace) -> None:
    base = Base.load(args.root, args.base)
    if args.torch:
        write_torch(base, args)
        return
    name = base.wheel("x86_64").file
    ours = base.root / "dist" / name.replace(base.version, base.local_version, 1)
    if not ours.is_file():
        raise Problem(f"there is no {ours}: 'make wheel ARCH=x86_64' first.")
    official = fetch(base.wheel("x86_64"), base.version)
    out = args.out or base.root / "build/bundle"
    target = out / f"vllm-{base.version}-sm{args.architecture}.tar.xz"
    with locked(base.root), scratch(out, target.name) as folder:
        part = folder / "bundle"
        with compressed(part) as tar:
            fill(tar, base, official, ours, args, folder)
        part.rename(target)
    print(f"{target}: {target.stat().st_size / 2**20:.1f} MiB")


@contextlib.contextmanager
def compressed(path: Path) -> Iterator[tarfile.TarFile]:
    filters = [{"id": lzma.FILTER_LZMA2, "preset": 6, "dict_size": 64 << 20}]
    with (
        lzma.open(path, "wb", filters=filters) as xz,
        tarfile.open(fileobj=xz, mode="w") as tar,
    ):
        yield tar


def add(tar: tarfile.TarFile, name: str, content: bytes | bytearray) -> None:
    entry = tarfile.TarInfo(name)
    entry.size = len(content)
    program = name.endswith("/torch_shm_manager")
    entry.mode = 0o755 if program or ".so" in Path(name).suffixes else 0o644
    tar.addfile(entry, io.BytesIO(content))


def write_torch(base: Base, args: argparse.Namespace) -> None:
    """PyTorch as the release requires it, as parts; a part is whole or not there."""
    out = args.out or base.root / "build/bundle"
    with locked(base.root), scratch(out, "torch") as folder:
        wheels = folder / "wheels"
        download(base, wheels, args.python_version, TORCH)
        with compressed(folder / "torch") as tar:
            for wheel in sorted(wheels.glob("*.whl")):
                for name, content in members(wheel):
                    if NO_TORCH.match(name):
                        continue
                    binary = bytearray(content)
                    if binary[:4] == b"\x7fELF":
                        strip_fatbins(binary, args.architecture)
                    add(tar, name, binary)
        (wheel,) = wheels.glob("torch-*.whl")
        name = f"torch-{wheel.name.split('-')[1]}-sm{args.architecture}.tar.xz"
        for old in out.glob(f"{name}.*"):
            old.unlink()
        content = (folder / "torch").read_bytes()
        for number, at in enumerate(range(0, len(content), PART)):
            part = folder / f"{name}.{number}"
            part.write_bytes(content[at : at + PART])
            part.rename(out / part.name)
            print(f"{out / part.name}: {len(content[at : at + PART]) / 2**20:.1f} MiB")


def fill(
    tar: tarfile.TarFile,
    base: Base,
    official: Path,
    ours: Path,
    args: argparse.Namespace,
    folder: Path,
) -> None:
    changed, removed = differences(official, ours)
    for name, content in vllm_files(official, args):
        add(tar, f"unpatched/{name}", content)
    wheels = folder / "wheels"
    download(base, wheels, args.python_version)
    for wheel in sorted(wheels.glob("*.whl")):
        for name, content in members(wheel):
            name = re.sub(r"^[^/]+\.data/(purelib|platlib)/", "", name)
            add(tar, f"unpatched/{name}", content)
    for name, content in members(ours):
        if name in changed:
            add(tar, f"patched/{name}", content)
    archive = folder / "tests.tar"
    git(base.tree, "archive", "-o", str(archive), "HEAD", "tests", "pyproject.toml")
    with tarfile.open(archive) as tests:
        for entry in tests:
            if entry.isfile() and entry.name.endswith((".py", ".toml")):
                add(tar, entry.name, tests.extractfile(entry).read())  # type: ignore[union-attr]
    manifest = {
        "python": args.python_version,
        "versions": {"unpatched": base.version, "patched": base.local_version},
        "removed": sorted(removed),
        "own_tests": tests_of_series(base),
    }
    add(tar, "bundle.json", json.dumps(manifest).encode())


def differences(official: Path, ours: Path) -> tuple[set[str], set[str]]:
    """Members that ours changes or adds, and those that it removes."""
    with zipfile.ZipFile(official) as theirs, zipfile.ZipFile(ours) as opened:
        before = {entry.filename: entry.CRC for entry in theirs.infolist()}
        after = {entry.filename: entry.CRC for entry in opened.infolist()}
    changed = {name for name, crc in after.items() if before.get(name) != crc}
    return changed, before.keys() - after.keys()


def vllm_files(
    wheel: Path, args: argparse.Namespace
) -> Iterator[tuple[str, bytes | bytearray]]:
    """Files of vLLM, native code last: like next to like compresses better."""
    this = f"cpython-{args.python_version.replace('.', '')}"
    for name, content in members(wheel):
        other_python = "cpython-" in name and this not in name
        if LEFT_OUT.match(name) or other_python:
            continue
        if name.endswith(".so"):
            binary = bytearray(content)
            strip_fatbins(binary, args.architecture)
            yield name, binary
        else:
            yield name, content


def members(wheel: Path) -> Iterator[tuple[str, bytes]]:
    with zipfile.ZipFile(wheel) as opened:
        entries = [e for e in opened.infolist() if not e.is_dir()]
        for entry in sorted(entries, key=lambda e: (e.filename[-3:] == ".so")):
            yield entry.filename, opened.read(entry)


def download(
    base: Base, folder: Path, python: str, packages: set[str] = PACKAGES
) -> None:
    """Fetch packages as wheels, by pip, checked against requirements/.

    Raises:
        Problem: pip could not; shows its output.
    """
    pins = (base.root / f"requirements/vllm-{base.version}.txt").read_text()
    wanted = []
    for pin in re.split(r"\n(?=\S)", pins):
        if pin.partition("==")[0].lower() in packages:
            wanted.append(pin)
    folder.mkdir()
    chosen = folder / "requirements.txt"
    chosen.write_text("\n".join(wanted) + "\n")
    platforms = [f"--platform=manylinux_2_{n}_x86_64" for n in GLIBC]
    done = subprocess.run(
        [sys.executable, "-m", "pip", "download", "-q", "--disable-pip-version-check",
         "--no-deps", "--only-binary=:all:", "--require-hashes",
         f"--python-version={python}", "--implementation=cp", *platforms,
         "--platform=manylinux2014_x86_64", "-d", str(folder), "-r", str(chosen)],
        capture_output=True, text=True,
    )  # fmt: skip
    if done.returncode:
        raise Problem(f"pip could not download the packages:\n{done.stderr[-2000:]}")


if __name__ == "__main__":
    command(main)

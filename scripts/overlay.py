"""Write the overlay: the changed files of the patched wheel and an installer, in one
file."""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import zipfile
from pathlib import Path

from scripts import topics
from scripts.commands import Problem, command, locked, scratch
from scripts.release import Base, fetch

DATE = (2000, 1, 1, 0, 0, 0)


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--arch", default=os.uname().machine)
    topics.options(parser)


def main(args: argparse.Namespace) -> None:
    base = topics.chosen(args)
    official = base.wheel(args.arch)
    dist = base.root / "dist"
    wheel = dist / official.file.replace(base.version, base.local_version, 1)
    if not wheel.is_file():
        raise Problem(f"there is no {wheel}: 'make wheel ARCH={args.arch}' first.")
    target = dist / f"vllm-{base.local_version}-overlay-{args.arch}.pyz"
    with locked(base.root), scratch(dist, "overlay") as folder:
        part = folder / target.name
        files = write(base, args.arch, fetch(official, base.version), wheel, part)
        part.rename(target)
        for old in set(dist.glob(f"vllm-{base.version}+*-overlay-{args.arch}.pyz")):
            if old != target:
                old.unlink()
    print(f"{target}\n{files} files, {target.stat().st_size >> 10} KiB")


def write(base: Base, arch: str, official: Path, wheel: Path, target: Path) -> int:
    """Write the archive; the same wheels give the same bytes."""
    with (
        zipfile.ZipFile(official) as old,
        zipfile.ZipFile(wheel) as new,
        zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as out,
    ):
        before, after = contents(old), contents(new)
        differing = sorted(
            name
            for name in before.keys() | after.keys()
            if before.get(name) != after.get(name)
        )
        files = {}
        members = {"__main__.py": installer()}
        for name in differing:
            files[name] = {
                "old": digest(old, name),
                "new": digest(new, name),
                "built": name == "vllm/_version.py" or not name.endswith(".py"),
            }
            if name in after:
                members[f"files/{name}"] = new.read(name)
        overlay = {
            "base": base.version,
            "version": base.local_version,
            "arch": arch,
            "set": base.set,
            "topics": base.topics,
            "files": files,
        }
        members["overlay.json"] = json.dumps(overlay, indent=1).encode()
        for name, content in members.items():
            entry = zipfile.ZipInfo(name, DATE)
            entry.compress_type = zipfile.ZIP_DEFLATED
            out.writestr(entry, content)
    return len(files)


def contents(wheel: zipfile.ZipFile) -> dict[str, tuple[int, int]]:
    """Checksum and size of every file, but for the metadata."""
    return {
        entry.filename: (entry.CRC, entry.file_size)
        for entry in wheel.infolist()
        if ".dist-info/" not in entry.filename
    }


def digest(wheel: zipfile.ZipFile, name: str) -> str | None:
    if name not in wheel.NameToInfo:
        return None
    return hashlib.sha256(wheel.read(name)).hexdigest()


def installer() -> bytes:
    return Path(__file__).with_name("overlay_installer.py").read_bytes()


if __name__ == "__main__":
    command(main)

"""Verify that a built wheel is the official one plus the series, and nothing else."""

from __future__ import annotations

import argparse
import base64
import csv
import hashlib
import io
import json
import re
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import replace
from pathlib import Path

from scripts import topics
from scripts.commands import Problem, command, scratch
from scripts.release import Base, fetch
from scripts.series import BASE_REF, git


def options(parser: argparse.ArgumentParser) -> None:
    topics.options(parser)
    parser.add_argument("wheel", type=Path, nargs="*")


def main(args: argparse.Namespace) -> None:
    base = topics.chosen(args)
    if not args.wheel:
        raise Problem(
            f"there is no wheel of vLLM {base.version} in dist/: 'make wheel' first, "
            "or WHEEL=..."
        )
    for path in args.wheel:
        if told := another(base, path):
            raise Problem(f"{path.name} is the wheel of {told}")
    with scratch(args.root / "build", "verify") as folder:
        base = topics.with_tree(base, folder)
        faults = {path: verify(base, path) for path in args.wheel}
    for path, found in faults.items():
        for fault in found:
            print(f"{path.name}: {fault}", file=sys.stderr)
        if not found:
            print(f"{path.name}: vLLM {base.version} and the series, nothing else")
    if any(faults.values()):
        raise Problem("not the wheel that 'make wheel' builds from this series.")


def another(base: Base, path: Path) -> str:
    """Which other wheel of the same series this is by its name, and how to verify that;
    empty: none is known."""
    version = path.name.partition("-")[2].partition("-")[0]
    if version == base.local_version:
        return ""
    whole = replace(base, topics=(), set="")
    if version == whole.local_version:
        return "the whole series: 'make verify' without SET= and PATCHES=."
    named = re.search(r"\+envelope\.([a-z.]+)\.\d", version)
    name = named[1] if named else ""
    if set(topics.names_of(name)) <= topics.sets(base.root).keys() and (
        version == topics.of_set(whole, name).local_version
    ):
        return f"set {name}: 'make verify SET={name}'."
    if re.search(r"\+envelope\.\d+\.t", version) and (base.set or not base.topics):
        return "chosen patches: 'make verify PATCHES=' with those that it was built of."
    hash_of_ours = base.local_version.rpartition(".")[2]
    if "+envelope." in version and version.rpartition(".")[2] != hash_of_ours:
        return f"another build. This one is {base.local_version}: 'make wheel'."
    return ""


def verify(base: Base, path: Path) -> list[str]:
    """Everything that is wrong with a wheel, in words.

    Raises:
        Problem: no such wheel, or not one of this release.
    """
    arch = next((a for a, w in base.wheels.items() if path.stem.endswith(a)), None)
    if arch is None:
        raise Problem(
            f"{path.name} is not a vLLM {base.version} wheel for "
            f"{' or '.join(base.wheels)}."
        )
    official = base.wheel(arch)
    expected = official.file.replace(base.version, base.local_version, 1)
    faults = []
    if path.name != expected:
        faults.append(f"the file name should be {expected}")
    try:
        with (
            zipfile.ZipFile(path) as new,
            zipfile.ZipFile(fetch(official, base.version)) as old,
        ):
            faults += record_faults(new)
            faults += difference_faults(base, old, new)
            for extension in rebuilt(base) & set(new.namelist()):
                faults += platform_faults(base, new, extension, arch)
    except (FileNotFoundError, zipfile.BadZipFile) as error:
        raise Problem(f"{path} is not a wheel: {error}. 'make wheel' first.") from error
    return faults


def record_faults(wheel: zipfile.ZipFile) -> list[str]:
    """RECORD must have one right row for each member."""
    names = wheel.namelist()
    faults = [f"{n} is in the wheel twice" for n in set(names) if names.count(n) > 1]
    path = next((n for n in names if n.endswith(".dist-info/RECORD")), None)
    if path is None:
        return [*faults, "there is no RECORD"]
    rows = {r[0]: r[1:] for r in csv.reader(io.StringIO(wheel.read(path).decode()))}
    for name in sorted(set(names) ^ rows.keys()):
        faults.append(f"{name} is in the wheel or in RECORD, not in both")
    for name in sorted(set(names) & rows.keys() - {path}):
        digest = hashlib.sha256()
        with wheel.open(name) as member:
            while chunk := member.read(1 << 20):
                digest.update(chunk)
        value = base64.urlsafe_b64encode(digest.digest()).decode().rstrip("=")
        size = wheel.getinfo(name).file_size
        if rows[name] != [f"sha256={value}", str(size)]:
            faults.append(f"RECORD has another hash or size for {name}")
    return faults


def difference_faults(
    base: Base, old: zipfile.ZipFile, new: zipfile.ZipFile
) -> list[str]:
    """The wheels must differ in the files of the series, and in the metadata."""
    old_info = f"vllm-{base.version}.dist-info/"
    new_info = f"vllm-{base.local_version}.dist-info/"
    before = {e.filename.replace(old_info, new_info): e for e in old.infolist()}
    after = {e.filename: e for e in new.infolist()}

    def stored(entry: zipfile.ZipInfo | None) -> tuple[int, ...]:
        if entry is None:
            return ()
        return entry.CRC, entry.file_size, entry.compress_size, entry.external_attr

    differing = {
        name
        for name in before.keys() | after.keys()
        if stored(before.get(name)) != stored(after.get(name))
    }
    expected = {n for n in patched(base) if n.startswith("vllm/")} | rebuilt(base)
    metadata = {"vllm/_version.py", f"{new_info}METADATA", f"{new_info}RECORD"}
    faults = [
        f"{name} differs from the official wheel, and no patch says so"
        for name in sorted(differing - expected - metadata)
    ]
    faults += [
        f"{name} is as in the official wheel, but the series changes it"
        for name in sorted((expected | metadata) - differing)
    ]
    for name in sorted(expected & after.keys()):
        source = base.tree / name
        if source.is_file() and source.read_bytes() != new.read(name):
            faults.append(f"{name} is not the file in {base.tree.name}/")
    was, now = f"\nVersion: {base.version}\n", f"\nVersion: {base.local_version}\n"
    missing = {"vllm/_version.py", f"{new_info}METADATA"} - after.keys()
    if missing:
        return [*faults, f"missing: {', '.join(sorted(missing))}"]
    wanted = old.read(f"{old_info}METADATA").replace(was.encode(), now.encode())
    if new.read(f"{new_info}METADATA") != wanted:
        faults.append("METADATA differs in more than its version")
    version = re.search(
        rb"^__version__ = version = '(.*)'$", new.read("vllm/_version.py"), re.M
    )
    if version is None or version[1].decode() != base.local_version:
        faults.append(f"_version.py does not say {base.local_version}")
    return faults


def patched(base: Base) -> set[str]:
    diff = ("diff", "--name-only", "--no-renames", "-z", BASE_REF, "HEAD")
    return set(git(base.tree, *diff).split("\0")[:-1])


def rebuilt(base: Base) -> set[str]:
    """The extensions whose sources the series changes."""
    return {
        extension.member
        for extension in base.extensions
        if {*extension.sources, *extension.headers} & patched(base)
    }


def platform_faults(
    base: Base, wheel: zipfile.ZipFile, member: str, arch: str
) -> list[str]:
    """A rebuilt extension must not need more than the official wheel's tag says.

    auditwheel judges a wheel that holds the extension alone.
    """
    allowed = re.search(r"manylinux_(\d+)_(\d+)_", base.wheel(arch).file)
    assert allowed is not None
    with tempfile.TemporaryDirectory() as folder:
        probe = Path(folder) / f"probe-0-cp38-abi3-linux_{arch}.whl"
        info = "probe-0.dist-info/"
        with zipfile.ZipFile(probe, "w") as out:
            out.writestr("probe/extension.abi3.so", wheel.read(member))
            out.writestr(f"{info}METADATA", "Metadata-Version: 2.1\nName: probe\n")
            out.writestr(f"{info}WHEEL", f"Tag: cp38-abi3-linux_{arch}\n")
            rows = ("probe/extension.abi3.so", f"{info}METADATA", f"{info}WHEEL")
            out.writestr(f"{info}RECORD", "".join(f"{row},,\n" for row in rows))
        done = subprocess.run(
            [sys.executable, "-m", "auditwheel", "show", "--json", str(probe)],
            capture_output=True,
            text=True,
        )
    if done.returncode or not done.stdout:
        return [f"auditwheel cannot read {member} as {arch}: {done.stderr.strip()}"]
    report = json.loads(done.stdout)
    found = re.fullmatch(rf"manylinux_(\d+)_(\d+)_{arch}", report["sym_tag"])
    faults = []
    if not found or tuple(map(int, found.groups())) > tuple(map(int, allowed.groups())):
        faults.append(
            f"{member} needs {report['sym_tag']}, more than {allowed[0]}{arch}"
        )
    extension = next(e for e in base.extensions if e.member == member)
    foreign = report["external_libs"].keys() - set(extension.libraries)
    if foreign:
        faults.append(f"{member} needs {', '.join(sorted(foreign))}")
    return faults


if __name__ == "__main__":
    command(main)

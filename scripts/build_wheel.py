"""Build the patched wheel: the official one with the files that the series changes.

Members that no patch touches are copied as they are, compressed bytes and all.
The same inputs give the same wheel, on any machine.
"""

from __future__ import annotations

import argparse
import base64
import copy
import csv
import hashlib
import io
import json
import os
import re
import shutil
import struct
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path
from typing import BinaryIO

from scripts import topics
from scripts.commands import Problem, command, locked, scratch
from scripts.release import Base, Extension, fetch, sha256
from scripts.series import BASE_REF, git

GLIBC = "2.28"  # manylinux_2_28
LIMITED_API_FLAGS = ("-fno-exceptions", "-fno-rtti", "-fno-sanitize=all")


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--arch", default=os.uname().machine)
    topics.options(parser)


def main(args: argparse.Namespace) -> None:
    base = topics.chosen(args)
    official = base.wheel(args.arch)
    with locked(args.root):
        dist = base.root / "dist"
        target = dist / official.file.replace(base.version, base.local_version, 1)
        made_path = base.root / f"build/{target.name}.json"
        inputs = fingerprint(base, args.arch)
        made = json.loads(made_path.read_text()) if made_path.is_file() else {}
        same = made.get("inputs") == inputs and target.is_file()
        if same and sha256(target) == made["sha256"]:
            print(f"{target} is up to date")
            return
        source = fetch(official, base.version)
        require_space(dist, source)
        with scratch(dist, "wheel") as folder:
            base = topics.with_tree(base, folder)
            members = changed_members(base, base.tree, args.arch, folder)
            part = folder / target.name
            assemble(base, source, members, part)
            made = {"inputs": inputs, "sha256": sha256(part)}
            made_path.unlink(missing_ok=True)
            part.rename(target)
            superseded = official.file.replace(base.version, f"{base.version}+*", 1)
            for old in set(dist.glob(superseded)) - {target}:
                old.unlink()
            made_path.write_text(json.dumps(made))
        print(f"{target}\n{len(members)} members differ from {official.file}")
        if base.topics:
            print(
                f"set {base.set}:" if base.set else "patches:", *base.topics, sep="\n  "
            )


def fingerprint(base: Base, arch: str) -> str:
    """sha256 over everything the wheel depends on."""
    here = Path(__file__).resolve().parent
    total = hashlib.sha256(f"{base.digest()} {arch}".encode())
    for path in (
        base.folder / "base.toml",
        here / "build_wheel.py",
        here / "series.py",
        here.parent / "requirements/tools.txt",
    ):
        total.update(path.read_bytes())
    return total.hexdigest()


def require_space(folder: Path, source: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    needed = source.stat().st_size + (16 << 20)
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise Problem(
            f"{folder} needs {needed >> 20} MiB of disk space, {free >> 20} MiB are "
            "free: free some space and run the command again."
        )


def changed_members(
    base: Base, tree: Path, arch: str, folder: Path
) -> dict[str, bytes | None]:
    """What ``tree`` changes in the wheel: content by member name, None if deleted.

    Raises:
        Problem: a patch changes something that cannot be put into a wheel here.
    """
    members: dict[str, bytes | None] = {}
    native: set[str] = set()
    listing = git(tree, "diff", "--name-status", "--no-renames", "-z", BASE_REF, "HEAD")
    fields = listing.split("\0")[:-1]
    for status, path in zip(fields[::2], fields[1::2], strict=True):
        if path.startswith("vllm/") and (path.endswith(".py") or status != "A"):
            members[path] = None if status == "D" else (tree / path).read_bytes()
        elif path.startswith("vllm/"):
            raise Problem(
                f"{path} is new and no Python file: whether upstream packages it is "
                "not known here (setup.py, package_data)."
            )
        elif path.startswith(("csrc/", "cmake/", "rust/")) or path in (
            "CMakeLists.txt",
            "setup.py",
        ):
            native.add(path)
    for extension in base.extensions:
        files = {*extension.sources, *extension.headers}
        if native & files:
            members[extension.member] = rebuild(tree, extension, arch, folder)
            native -= files
    if native:
        known = sorted(s for e in base.extensions for s in (*e.sources, *e.headers))
        raise Problem(
            f"the series changes {', '.join(sorted(native))}, which cannot be rebuilt "
            f"without CUDA. Can be: {', '.join(known)} ({base.folder.name}/base.toml)."
        )
    return members


def rebuild(tree: Path, extension: Extension, arch: str, folder: Path) -> bytes:
    """Compile an extension for ``arch`` against the wheel's glibc.

    The compiler is the one pinned in requirements/tools.txt, not the machine's:
    a newer libstdc++ or glibc would raise the wheel's platform tag. The code
    may use the C++ language but not its library, which is not linked.

    Raises:
        Problem: Python's headers are missing, or the compiler failed.
    """
    python = Path(sysconfig.get_path("include"))
    if not (python / "Python.h").is_file():
        raise Problem(
            f"Python.h was not found in {python}: install Python's headers "
            "(on Debian, the package python3-dev)."
        )
    headers = Path(sysconfig.get_path("purelib")) / "nvidia/cu13/include"
    target = ("-target", f"{arch}-linux-gnu.{GLIBC}")
    libraries = []
    for name in extension.libraries:
        library = folder / name
        empty = folder / "empty.c"
        empty.write_text("")
        zig("cc", *target, "-shared", "-nostdlib", str(empty), f"-Wl,-soname,{name}",
            "-o", str(library))  # fmt: skip
        libraries.append(str(library))
    objects = []
    for source in extension.sources:
        objects.append(str(folder / Path(source).with_suffix(".o").name))
        zig("c++", *target, "-std=c++17", "-O2", "-g0", "-fPIC", *LIMITED_API_FLAGS,
            "-Wno-macro-redefined", f"-ffile-prefix-map={tree}=.",
            f"-DPy_LIMITED_API={extension.limited_api}", f"-I{python}",
            "-isystem", str(headers), "-c", str(tree / source),
            "-o", objects[-1])  # fmt: skip
    built = folder / Path(extension.member).name
    zig("cc", *target, "-shared", "-Wl,-s", f"-Wl,-soname,{built.name}", *objects,
        "-Wl,--no-as-needed", *libraries, "-o", str(built))  # fmt: skip
    return built.read_bytes()


def zig(*arguments: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "ziglang", *arguments], capture_output=True, text=True
    )
    if done.returncode:
        raise Problem(f"the compiler failed:\n{done.stderr.strip()}")


def assemble(
    base: Base, official: Path, members: dict[str, bytes | None], target: Path
) -> None:
    """Write the official wheel with ``members`` replaced, added or removed.

    ``_version.py``, METADATA, RECORD and the name of the dist-info folder follow.

    Raises:
        Problem: the official wheel holds another file than the source distribution.
    """
    old_info = f"vllm-{base.version}.dist-info/"
    new_info = f"vllm-{base.local_version}.dist-info/"
    with (
        zipfile.ZipFile(official) as old,
        official.open("rb") as raw,
        zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as new,
    ):
        entries = {entry.filename: entry for entry in old.infolist()}
        for name in members:
            if name.endswith(".py") and name in entries:
                original = git(base.tree, "show", f"{BASE_REF}:{name}")
                if original.encode("utf-8", "surrogateescape") != old.read(name):
                    raise Problem(
                        f"{name} differs between {base.sdist.file} and "
                        f"{official.name}: the patch was not made for that file."
                    )
        record_entry = entries.pop(f"{old_info}RECORD")
        contents = members | {
            "vllm/_version.py": version_module(old.read("vllm/_version.py"), base),
            f"{old_info}METADATA": metadata(old.read(f"{old_info}METADATA"), base),
        }
        names = {name.replace(old_info, new_info, 1): name for name in entries}
        names |= {name: name for name in sorted(contents.keys() - entries.keys())}
        written = {}
        for name, source in names.items():
            entry = entries.get(source, record_entry)
            if source not in contents:
                copy_member(raw, entry, new, name)
            elif (content := contents[source]) is not None:
                written[name] = content
                write_member(new, name, content, entry)
        kept = {name: names[name] for name in new.namelist()}
        write_member(
            new,
            f"{new_info}RECORD",
            record(old.read(record_entry), kept, written, f"{new_info}RECORD"),
            record_entry,
        )


def write_member(
    wheel: zipfile.ZipFile, name: str, content: bytes, like: zipfile.ZipInfo
) -> None:
    entry = zipfile.ZipInfo(name, like.date_time)
    entry.external_attr = like.external_attr
    entry.compress_type = zipfile.ZIP_DEFLATED
    wheel.writestr(entry, content)


def copy_member(
    raw: BinaryIO, entry: zipfile.ZipInfo, wheel: zipfile.ZipFile, name: str
) -> None:
    """Copy a member's compressed bytes, which zipfile has no call for."""
    # The local header's lengths: its extra field may differ from the directory's.
    raw.seek(entry.header_offset + 26)
    name_length, extra_length = struct.unpack("<HH", raw.read(4))
    raw.seek(name_length + extra_length, os.SEEK_CUR)
    out = wheel.fp
    assert out is not None
    new = copy.copy(entry)
    new.filename = name
    new.flag_bits &= ~0x08  # the sizes are in the header, not behind the data
    new.header_offset = out.tell()
    out.write(new.FileHeader())
    left = entry.compress_size
    while left:
        chunk = raw.read(min(left, 1 << 20))
        if not chunk:
            raise Problem(f"{raw.name} ends within {entry.filename}: fetch it again.")
        out.write(chunk)
        left -= len(chunk)
    wheel.filelist.append(new)
    wheel.NameToInfo[name] = new
    wheel.start_dir = out.tell()


def version_module(official: bytes, base: Base) -> bytes:
    """``_version.py`` as upstream's build would write it for our version."""
    numbers = base.version.replace(".", ", ")
    local = base.local_version.partition("+")[2]
    text = replace_once(official, f"'{base.version}'", f"'{base.local_version}'")
    text = replace_once(text, f"({numbers})", f"({numbers}, '{local}')")
    commit = re.search(rb"commit_id = '(\w+)'", text)
    if commit:
        known = commit[1].decode()
        text = replace_once(text, f"'{known}'", f"'{known}.{base.digest()[:9]}'")
    return text


def metadata(official: bytes, base: Base) -> bytes:
    return replace_once(
        official, f"\nVersion: {base.version}\n", f"\nVersion: {base.local_version}\n"
    )


def replace_once(content: bytes, old: str, new: str) -> bytes:
    if content.count(old.encode()) != 1:
        raise Problem(f"the official wheel does not say {old.strip()!r} once.")
    return content.replace(old.encode(), new.encode())


def record(
    official: bytes, names: dict[str, str], written: dict[str, bytes], name: str
) -> bytes:
    """RECORD: the official row of each copied file, a new one for each written file.

    ``names`` maps a member's name to its name in the official wheel.
    """
    rows = {row[0]: row[1:] for row in csv.reader(io.StringIO(official.decode()))}
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    for new, old in names.items():
        content = written.get(new)
        if content is None:
            writer.writerow([new, *rows[old]])
        else:
            digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest())
            writer.writerow([new, f"sha256={digest.decode()[:-1]}", len(content)])
    writer.writerow([name, "", ""])
    return out.getvalue().encode()


if __name__ == "__main__":
    command(main)

"""Put the patched files into an installed vLLM, print its state, or take them out.

Run it with the Python that vLLM runs with (3.10 or newer; nothing else is needed):

    python3 vllm-...-overlay-x86_64.pyz install | status | revert

Everything is staged next to the package first. Then files are only renamed, by a list
that is written before the first rename. If killed, run it again: it rolls back. The
official files are kept in the dist-info folder.

One file, however long: it is the whole program of the archive.
"""

from __future__ import annotations

import argparse
import base64
import contextlib
import csv
import fcntl
import gzip
import hashlib
import importlib.metadata
import io
import json
import os
import py_compile
import shutil
import sys
import zipfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

WORK = ".vllm-envelope"
JOURNAL = f"{WORK}/journal.json"
NEW = f"{WORK}/new"
OLD = f"{WORK}/old"
Moves = list[tuple[str, str]]
# The state of a file, as `mark` gives it, next to each move.
Journal = list[tuple[str, str, str | None]]


class Problem(Exception):
    """An error that the user can fix: wanted, found, and the remedy."""


class Unfinished(Exception):
    """Files were moved, and could not all be moved back."""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("command", choices=["install", "status", "revert"])
    parser.add_argument(
        "--other-build",
        action="store_true",
        help="install over another build of the same release: built files "
        "(extensions, _version.py) may differ from the official wheel's, if they "
        "are what this environment's RECORD says",
    )
    args = parser.parse_args()
    try:
        with zipfile.ZipFile(Path(__file__).parent) as archive:
            overlay = json.loads(archive.read("overlay.json"))
            site = find()
            with locked(site):
                if args.command == "status":
                    print(status(site, overlay))
                    return
                if undo(site):
                    print("an interrupted install or revert was undone first")
                if args.command == "install":
                    print(install(site, overlay, archive, args.other_build))
                else:
                    print(revert(site))
    except Problem as problem:
        sys.exit(f"error: {problem}")
    except Unfinished as error:
        sys.exit(f"error: {error}. Run it again to clear that up.")
    except OSError as error:
        sys.exit(f"error: {error}. 'status' says what is there.")
    except KeyboardInterrupt:
        sys.exit("error: interrupted. 'status' says what is there.")


def find() -> Path:
    """The folder that vLLM is installed in."""
    try:
        found = importlib.metadata.distribution("vllm")
    except importlib.metadata.PackageNotFoundError:
        raise Problem(
            f"vLLM is not installed for {sys.executable}: run this with the Python "
            "that vLLM runs with."
        ) from None
    site = Path(str(found.locate_file("")))
    if not (site / "vllm").is_dir():
        raise Problem(
            f"{site} has vLLM's metadata, but no folder vllm (an editable install?): "
            "install the official wheel."
        )
    return site


@contextlib.contextmanager
def locked(site: Path) -> Iterator[None]:
    """One command at a time; the lock ends with the process and leaves nothing."""
    folder = os.open(site / "vllm", os.O_RDONLY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    except BlockingIOError:
        raise Problem(f"another overlay is at work in {site}: wait for it.") from None
    finally:
        os.close(folder)


def installed(site: Path, overlay: dict[str, Any]) -> dict[str, Any] | None:
    """The notes of an installed overlay, or None where none is.

    Raises:
        Problem: another vLLM than this overlay is for.
    """
    for state in site.glob("vllm-*.dist-info/envelope/state.json"):
        return read_state(state)
    version = importlib.metadata.Distribution.at(info(site)).version
    if version != overlay["base"]:
        raise Problem(
            f"this overlay is for vLLM {overlay['base']}, {version} was found in "
            f"{site}: install the official {overlay['base']} first, or take the "
            "overlay for that version."
        )
    return None


def read_state(path: Path) -> dict[str, Any]:
    try:
        noted: dict[str, Any] = json.loads(path.read_bytes())
        if noted.keys() >= {"base", "version", "files"}:
            return noted
    except (ValueError, AttributeError):
        pass
    raise damaged([str(path)])


def damaged(names: list[str]) -> Problem:
    return Problem(
        f"the kept files are damaged: {', '.join(names)}. Nothing was changed; "
        "reinstall the official wheel."
    )


def info(site: Path) -> Path:
    found = sorted(site.glob("vllm-*.dist-info"))
    if len(found) != 1:
        names = " and ".join(path.name for path in found) or "no dist-info folder"
        raise Problem(f"{site} has {names} of vLLM: install the official wheel.")
    return found[0]


def status(site: Path, overlay: dict[str, Any]) -> str:
    """One line, if all is well.

    Raises:
        Problem: an interrupted command, another vLLM, or changed files.
    """
    if (site / JOURNAL).exists():
        raise Problem(f"install or revert was interrupted in {site}: run it again.")
    noted = installed(site, overlay)
    if noted is None:
        changed = changed_files(
            site, {n: f["old"] for n, f in overlay["files"].items()}
        )
        where = f"vLLM {overlay['base']} in {site}: no overlay"
    else:
        changed = changed_files(site, noted["files"])
        where = (
            f"vLLM {noted['version']} in {site}: overlay of {len(noted['files'])} files"
        )
        if name := noted.get("set"):
            where += f", set {name}"
        if topics := noted.get("topics"):
            where += f", patches {' '.join(topics)}"
    if changed:
        raise Problem(f"{where}, but these files were changed: {', '.join(changed)}")
    return where


def changed_files(site: Path, expected: dict[str, str | None]) -> list[str]:
    return [name for name, digest in expected.items() if sha256(site / name) != digest]


def install(
    site: Path, overlay: dict[str, Any], archive: zipfile.ZipFile, other_build: bool
) -> str:
    if os.uname().machine != overlay["arch"]:
        raise Problem(
            f"this overlay is for {overlay['arch']}, this is {os.uname().machine}."
        )
    files = overlay["files"]
    ours = {name: file["new"] for name, file in files.items()}
    noted = installed(site, overlay)
    if noted is not None:
        if noted["files"] == ours and not changed_files(site, ours):
            return f"vLLM {noted['version']} is already installed in {site}"
        raise Problem(
            f"another overlay ({noted['version']}) is installed in {site}: revert it "
            "first."
        )
    old_info, new_info = info(site).name, f"vllm-{overlay['version']}.dist-info"
    rows = read_record(site, old_info)
    check_files(site, overlay, rows if other_build else {})
    kept = f"{new_info}/envelope/official"
    init = bytecode(site, "vllm/__init__.py")
    moves: Moves = []
    staged: dict[str, bytes] = {}
    with staging(site):
        for name, file in files.items():
            compiled = bytecode(site, name)
            for old in ([name] if file["old"] else []) + compiled:
                moves.append((old, f"{kept}/{old}"))
            if file["new"] is None:
                continue
            stage(site, name, archive.read(f"files/{name}"), staged)
            moves.append((f"{NEW}/{name}", name))
            if not file["old"] and name.endswith(".py"):
                compiled = [beside(name, suffix(path)) for path in init]
            for pyc in compiled:
                if compile_like(site, name, pyc, init):
                    staged[pyc] = (site / NEW / pyc).read_bytes()
                    moves.append((f"{NEW}/{pyc}", pyc))
        metadata = (site / old_info / "METADATA").read_bytes()
        was, now = (f"\nVersion: {overlay[v]}\n".encode() for v in ("base", "version"))
        state = {key: overlay[key] for key in ("base", "version", "set", "topics")}
        state["files"] = ours
        record = (site / old_info / "RECORD").read_bytes()
        written = {
            "METADATA": metadata.replace(was, now, 1),
            "envelope/RECORD.gz": gzip.compress(record, mtime=0),
            "envelope/state.json": json.dumps(state, indent=1).encode(),
        }
        for name, content in written.items():
            stage(site, f"{new_info}/{name}", content, staged)
        moves.append((f"{old_info}/METADATA", f"{kept}/{old_info}/METADATA"))
        moves.append((f"{old_info}/RECORD", f"{OLD}/RECORD"))
        moves += moved_folder(site, old_info, new_info, {"METADATA", "RECORD"})
        here = {
            to: hash_row((site / a).read_bytes())
            for a, to in moves
            if to.startswith(kept)
        }
        gone = {a for a, to in moves if to in here} - staged.keys()
        new_rows = write_record(rows, old_info, new_info, staged, here, gone)
        stage(site, f"{new_info}/RECORD", new_rows, staged)
        moves += [(f"{NEW}/{n}", n) for n in staged if n.startswith(new_info)]
        carry_out(site, moves)
    return f"vLLM {overlay['version']} installed in {site}: {len(files)} files"


def check_files(
    site: Path, overlay: dict[str, Any], rows: dict[str, list[str]]
) -> None:
    """Every file to be replaced must be the official one.

    ``rows`` of the environment's RECORD count as well for files that a build writes.

    Raises:
        Problem: names each file that is not.
    """
    wrong, built = [], []
    for name, file in overlay["files"].items():
        found = sha256(site / name)
        if found == file["old"]:
            continue
        as_recorded = found and rows.get(name) == sha256_row(site / name)
        if file["built"] and as_recorded:
            continue
        if found is None:
            wrong.append(f"{name} is missing")
        elif found == file["new"]:
            wrong.append(f"{name} is already patched")
        elif file["old"] is None:
            wrong.append(f"{name} should not be there")
        else:
            wrong.append(f"{name} is not the official file")
            built.append(file["built"])
    if wrong:
        hint = (
            " Another build of the release (official images build their own) has "
            "other extensions: --other-build accepts those that RECORD lists."
            if any(built) and not rows
            else ""
        )
        raise Problem(
            f"{site} is not the official vLLM {overlay['base']} for "
            f"{overlay['arch']}:\n  " + "\n  ".join(wrong) + "\nNothing was changed; "
            f"install the official wheel first.{hint}"
        )


def revert(site: Path) -> str:
    (state, *_) = (*site.glob("vllm-*.dist-info/envelope/state.json"), None)
    if state is None:
        raise Problem(f"there is no overlay in {site}.")
    noted = read_state(state)
    new_info, old_info = state.parent.parent.name, f"vllm-{noted['base']}.dist-info"
    envelope = f"{new_info}/envelope"
    if changed := changed_files(site, noted["files"]):
        raise Problem(
            f"changed since the overlay was installed: {', '.join(changed)}. Nothing "
            "was changed; save your work and reinstall the official wheel."
        )
    rows = read_record(site, new_info)
    kept = {name for name in rows if name.startswith(f"{envelope}/")}
    kept |= {f"{envelope}/RECORD.gz", f"{envelope}/state.json"}
    if wrong := [n for n in sorted(kept) if rows.get(n, []) != sha256_row(site / n)]:
        raise damaged(wrong)
    moves: Moves = []
    for name, digest in noted["files"].items():
        for path in ([name] if digest else []) + bytecode(site, name):
            moves.append((path, f"{OLD}/{path}"))
    for name in sorted(kept):
        official = name.removeprefix(f"{envelope}/official/")
        moves.append((name, f"{OLD}/{name}" if official == name else official))
    # For example bytecode of the kept files: nobody else will remove it.
    for path in sorted(state.parent.rglob("*")):
        name = str(path.relative_to(site))
        if not path.is_dir() and name not in kept:
            moves.append((name, f"{OLD}/{name}"))
    with staging(site):
        record = gzip.decompress((state.parent / "RECORD.gz").read_bytes())
        stage(site, f"{old_info}/RECORD", record, {}, like=f"{new_info}/RECORD")
        for name in ("METADATA", "RECORD"):
            moves.append((f"{new_info}/{name}", f"{OLD}/{name}"))
        moves += moved_folder(site, new_info, old_info, {"METADATA", "RECORD"})
        moves.append((f"{NEW}/{old_info}/RECORD", f"{old_info}/RECORD"))
        carry_out(site, moves)
    return f"vLLM {noted['base']}, official, is back in {site}"


def moved_folder(site: Path, old: str, new: str, but: set[str]) -> Moves:
    """The moves of a dist-info folder's files to the other one."""
    names = [str(p.relative_to(site / old)) for p in (site / old).rglob("*")
             if not p.is_dir()]  # fmt: skip
    return [
        (f"{old}/{name}", f"{new}/{name}")
        for name in sorted(names)
        if name not in but and not name.startswith("envelope/")
    ]


@contextlib.contextmanager
def staging(site: Path) -> Iterator[None]:
    """The work folder, gone afterwards, with every move undone if one failed."""
    unwritable = [p for p in (site, site / "vllm", info(site)) if not writable(p)]
    if unwritable:
        raise Problem(
            f"{unwritable[0]} cannot be written: run this as its owner, on a file "
            "system that is not read-only."
        )
    try:
        (site / NEW).mkdir(parents=True)
        yield
    except OSError as error:
        undo(site)
        raise Problem(f"{error}. Nothing was changed.") from error
    finally:
        undo(site)


def writable(path: Path) -> bool:
    return os.access(path, os.W_OK | os.X_OK)


def carry_out(site: Path, moves: Moves) -> None:
    """Move every file, or none, however this ends."""
    journal = site / JOURNAL
    with journal.with_suffix(".part").open("w") as file:
        json.dump([(*move, mark(site / move[0])) for move in moves], file)
        file.flush()
        os.fsync(file.fileno())
    journal.with_suffix(".part").rename(journal)
    for source, target in moves:
        make_folder(site, (site / target).parent)
        (site / source).rename(site / target)
    prune(site, [source for source, _ in moves])
    journal.unlink()


def undo(site: Path) -> bool:
    """Put back files that an unfinished command moved; returns whether there was one.

    Raises:
        Unfinished: the file system refused.
        Problem: vLLM was reinstalled in between.
    """
    journal = site / JOURNAL
    unfinished = journal.exists()
    try:
        if unfinished:
            put_back(site, json.loads(journal.read_text()))
            journal.unlink()
        if (site / WORK).exists():
            shutil.rmtree(site / WORK)
    except OSError as error:
        raise Unfinished(error) from error
    return unfinished


def put_back(site: Path, journal: Journal) -> None:
    for source, target, _ in reversed(journal[: moved(site, journal)]):
        if os.path.lexists(site / target):
            make_folder(site, (site / source).parent)
            (site / target).replace(site / source)
    prune(site, [target for _, target, _ in journal])


def moved(site: Path, journal: Journal) -> int:
    """How many of the moves were made: that many explain every file that is there.

    Raises:
        Problem: no number does.
    """
    wanted: dict[str, str | None] = {}
    for source, target, content in journal:
        wanted.setdefault(source, content)
        wanted.setdefault(target, None)
    # Python may write bytecode again where it was moved away, but not in our folders.
    found = {
        name: mark(site / name)
        for name in wanted
        if not name.endswith(".pyc") or name.startswith(WORK) or "/envelope/" in name
    }
    for count, (source, target, moving) in enumerate([*journal, ("", "", None)]):
        if all(wanted[name] == content for name, content in found.items()):
            return count
        wanted |= {source: None, target: moving}
    raise Problem(
        f"vLLM in {site} was changed or reinstalled after an install or revert was "
        f"interrupted there. Remove {WORK}, vllm and vllm-*.dist-info in that folder, "
        "then install the official wheel."
    )


def mark(path: Path) -> str | None:
    """A file's hash, for bytecode only that it is there, or None."""
    if path.suffix == ".pyc":
        return "bytecode" if os.path.lexists(path) else None
    return sha256(path)


def make_folder(site: Path, folder: Path) -> None:
    """With the owner and mode of the package, whoever runs this."""
    if not folder.is_dir():
        make_folder(site, folder.parent)
        folder.mkdir()
        own(folder, site / "vllm")


def own(path: Path, model: Path) -> None:
    shutil.copymode(model, path)
    if os.geteuid() == 0:
        os.chown(path, model.stat().st_uid, model.stat().st_gid)


def prune(site: Path, names: Iterable[str]) -> None:
    """Remove the folders of these files that are empty now."""
    folders = {folder for name in names for folder in Path(name).parents[:-1]}
    for folder in sorted(folders, reverse=True):
        if (site / folder).is_dir() and not any((site / folder).iterdir()):
            (site / folder).rmdir()


def stage(
    site: Path, name: str, content: bytes, staged: dict[str, bytes], like: str = ""
) -> None:
    """Write a file in the work folder, with the owner and mode it will need."""
    path = site / NEW / name
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    model = site / (like or name)
    if not model.exists():
        model = site / "vllm/__init__.py"
    own(path, model)
    staged[name] = content


def bytecode(site: Path, name: str) -> list[str]:
    """The bytecode files of a module, by any interpreter, at any optimisation."""
    path = Path(name)
    folder = path.parent / "__pycache__"
    found = (site / folder).glob(f"{path.stem}.*.pyc") if path.suffix == ".py" else ()
    return sorted(str(folder / pyc.name) for pyc in found)


def suffix(pyc: str) -> str:
    return Path(pyc).name.partition(".")[2]


def beside(name: str, suffix: str) -> str:
    path = Path(name)
    return str(path.parent / "__pycache__" / f"{path.stem}.{suffix}")


def compile_like(site: Path, name: str, pyc: str, init: list[str]) -> bool:
    """Stage bytecode as the environment has it; False for other interpreters'."""
    tag, *optimised = suffix(pyc).removesuffix(".pyc").split(".")
    if tag != sys.implementation.cache_tag:
        return False
    level = int(optimised[0].removeprefix("opt-")) if optimised else 0
    model = site / pyc
    if not model.exists():
        model = site / next(path for path in init if suffix(path) == suffix(pyc))
    # PEP 552: 0 by the source's time and size, 1 by its hash, unchecked, 3 checked.
    flags = int.from_bytes(model.read_bytes()[4:8], "little")
    mode = {1: "UNCHECKED_HASH", 3: "CHECKED_HASH"}.get(flags, "TIMESTAMP")
    target = site / NEW / pyc
    py_compile.compile(
        str(site / NEW / name),
        cfile=str(target),
        dfile=str(site / name),
        doraise=True,
        optimize=level,
        invalidation_mode=py_compile.PycInvalidationMode[mode],
    )
    own(target, model)
    return True


def read_record(site: Path, folder: str) -> dict[str, list[str]]:
    path = site / folder / "RECORD"
    if not path.is_file():
        raise Problem(f"{path} is missing: install the official wheel.")
    text = path.read_text(encoding="utf-8")
    return {row[0]: row[1:] for row in csv.reader(io.StringIO(text)) if row}


def write_record(
    rows: dict[str, list[str]],
    old_info: str,
    new_info: str,
    staged: dict[str, bytes],
    added: dict[str, list[str]],
    gone: set[str],
) -> bytes:
    """RECORD after the install: rows of new, moved, added and removed files."""
    renamed = {
        name.replace(f"{old_info}/", f"{new_info}/", 1)
        if name.startswith(f"{old_info}/")
        else name: row
        for name, row in rows.items()
        if name not in gone
    }
    for name, content in staged.items():
        # Installers list bytecode without a hash, or not at all.
        if not name.endswith(".pyc"):
            renamed[name] = hash_row(content)
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerows([name, *row] for name, row in (renamed | added).items())
    return out.getvalue().encode()


def sha256(path: Path) -> str | None:
    """A file's hash, or None where there is none."""
    if not path.is_file():
        return None
    return hashlib.sha256(path.read_bytes()).hexdigest()


def hash_row(content: bytes) -> list[str]:
    digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).decode()
    return [f"sha256={digest.rstrip('=')}", str(len(content))]


def sha256_row(path: Path) -> list[str] | None:
    return hash_row(path.read_bytes()) if path.is_file() else None


if __name__ == "__main__":
    main()

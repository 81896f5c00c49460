"""What every command shares: the supported releases, their patches, and git.

A release is a folder ``patches/v<version>`` with ``base.toml`` (what upstream
published, pinned by sha256), ``series`` (patch file names in order) and the
patches. ``vllm/`` (or the ``tree`` of ``base.toml``, so that two releases can lie
side by side) is that release's source distribution plus one commit a patch; the
refs below ``refs/envelope/`` in its repository say what it was made
from, so that work which exists nowhere else is never overwritten.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import fcntl
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from pypi_simple import PyPISimple

REPOSITORY = Path(__file__).resolve().parent.parent
OUT_OF_SPACE = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}

BASE_REF = "refs/envelope/base"
APPLIED_REF = "refs/envelope/applied"
NAMES_REF = "refs/notes/envelope"
IDENTITY = ("vLLM memory envelope", "envelope@localhost")
EPOCH = "2000-01-01T00:00:00Z"
FORMAT_PATCH = (
    "format-patch",
    "--no-numbered",
    "--zero-commit",
    "--full-index",
    "--no-renames",
    "--no-signature",
    "--diff-algorithm=myers",
    "--no-notes",
    "--stdout",
)


class Problem(Exception):
    """Something the user can mend: what was wanted, what was found, what to do."""


def command(main: Callable[[argparse.Namespace], None]) -> None:
    """Run a script's ``main`` with the common options and readable errors."""
    parser = argparse.ArgumentParser(description=sys.modules["__main__"].__doc__)
    parser.add_argument("--root", type=Path, default=REPOSITORY)
    parser.add_argument("--base", default="0.33.0", help="vLLM release")
    getattr(sys.modules["__main__"], "options", lambda _: None)(parser)
    try:
        main(parser.parse_args())
    except Problem as problem:
        sys.exit(f"error: {problem}")
    except OSError as error:
        if error.errno not in OUT_OF_SPACE:
            raise
        where = error.filename or "the output folder"
        sys.exit(
            f"error: no space left while writing {where} ({error.strerror}). "
            "Nothing was replaced; free some space and run the command again."
        )
    except KeyboardInterrupt:
        sys.exit("error: interrupted. Nothing was replaced; run the command again.")


@dataclass(frozen=True)
class Artifact:
    """A published file and its sha256."""

    file: str
    sha256: str


@dataclass(frozen=True)
class Extension:
    """A native extension that can be rebuilt without CUDA or torch."""

    member: str
    sources: tuple[str, ...]
    headers: tuple[str, ...]
    libraries: tuple[str, ...]
    limited_api: str


@dataclass(frozen=True)
class Base:
    """One supported release: ``patches/v<version>``."""

    root: Path
    version: str
    torch: str
    sdist: Artifact
    wheels: dict[str, Artifact]
    extensions: tuple[Extension, ...]
    tree: Path

    @classmethod
    def load(cls, root: Path, version: str) -> Base:
        """Read ``base.toml``.

        Raises:
            Problem: the release is not supported, or its files are incomplete.
        """
        known = sorted(p.parent.name for p in root.glob("patches/v*/base.toml"))
        if f"v{version}" not in known:
            raise Problem(
                f"vLLM {version} is not a supported base. Supported: "
                f"{', '.join(name[1:] for name in known) or 'none'} (BASE=...)."
            )
        path = root / f"patches/v{version}/base.toml"
        try:
            data = tomllib.loads(path.read_text())
            return cls(
                root=root,
                version=data["version"],
                torch=data["torch"],
                sdist=Artifact(**data["sdist"]),
                wheels={a: Artifact(**w) for a, w in data["wheel"].items()},
                extensions=tuple(
                    Extension(
                        member,
                        tuple(e["sources"]),
                        tuple(e["headers"]),
                        tuple(e["libraries"]),
                        e["limited_api"],
                    )
                    for member, e in data.get("extension", {}).items()
                ),
                tree=root / data.get("tree", "vllm"),
            )
        except (tomllib.TOMLDecodeError, KeyError, TypeError) as error:
            raise Problem(f"{path} is not a valid base: {error!r}") from error

    @property
    def folder(self) -> Path:
        return self.root / f"patches/v{self.version}"

    def wheel(self, arch: str) -> Artifact:
        if arch not in self.wheels:
            raise Problem(
                f"vLLM {self.version} has no wheel for {arch!r}. "
                f"Supported: {', '.join(sorted(self.wheels))} (ARCH=...)."
            )
        return self.wheels[arch]

    def patches(self) -> list[Path]:
        """The patch files in order.

        Raises:
            Problem: ``series`` names a file that is missing, or names one twice,
                or a patch file is not in ``series``.
        """
        names = (self.folder / "series").read_text().split()
        present = {path.name for path in self.folder.glob("*.patch")}
        wrong = sorted(
            {n for n in names if names.count(n) > 1} | (set(names) ^ present)
        )
        if wrong:
            raise Problem(
                f"{self.folder / 'series'} and the patch files beside it differ: "
                f"{', '.join(wrong)}. Each patch file must be named once."
            )
        return [self.folder / name for name in names]

    def digest(self) -> str:
        """sha256 over the pinned source and the patches in order."""
        total = hashlib.sha256(self.sdist.sha256.encode())
        for patch in self.patches():
            total.update(patch.name.encode() + b"\0" + patch.read_bytes() + b"\0")
        return total.hexdigest()

    @property
    def local_version(self) -> str:
        """The version of our build: one more for each patch in the series."""
        return f"{self.version}+envelope.{len(self.patches())}"


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextlib.contextmanager
def locked(root: Path) -> Iterator[None]:
    """One command at a time in a checkout.

    Raises:
        Problem: another command holds the lock.
    """
    (root / "build").mkdir(exist_ok=True)
    with (root / "build/lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise Problem(
                f"another command is at work in {root}; wait for it to end."
            ) from None
        yield


@contextlib.contextmanager
def scratch(parent: Path, name: str) -> Iterator[Path]:
    """A folder beside its destination, gone afterwards whatever happens.

    Leftovers of runs that were killed are removed first.
    """
    parent.mkdir(parents=True, exist_ok=True)
    for leftover in parent.glob(f".{name}.*.partial"):
        shutil.rmtree(leftover, ignore_errors=True)
    path = Path(tempfile.mkdtemp(prefix=f".{name}.", suffix=".partial", dir=parent))
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


def write_whole(path: Path, text: str) -> None:
    """Replace a file, or make it: whole or not at all."""
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text(text)
    partial.rename(path)


def run_git(tree: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run git in ``tree`` without the user's configuration.

    Raises:
        Problem: git is missing.
    """
    environment = {k: v for k, v in os.environ.items() if not k.startswith("GIT_")}
    environment |= {
        "GIT_CONFIG_GLOBAL": os.devnull,
        "GIT_CONFIG_NOSYSTEM": "1",
        "GIT_AUTHOR_NAME": IDENTITY[0],
        "GIT_AUTHOR_EMAIL": IDENTITY[1],
        "GIT_COMMITTER_NAME": IDENTITY[0],
        "GIT_COMMITTER_EMAIL": IDENTITY[1],
        "GIT_AUTHOR_DATE": EPOCH,
        "GIT_COMMITTER_DATE": EPOCH,
        "GIT_TERMINAL_PROMPT": "0",
        "LC_ALL": "C",
        "TZ": "UTC",
    }
    try:
        return subprocess.run(
            ["git", "-C", str(tree), *arguments],
            env=environment,
            capture_output=True,
            encoding="utf-8",
            errors="surrogateescape",
        )
    except FileNotFoundError:
        raise Problem("git was not found: install it (2.34 or newer).") from None


def git(tree: Path, *arguments: str) -> str:
    """Run git in ``tree`` and return what it printed.

    Raises:
        Problem: git is missing, or failed.
    """
    done = run_git(tree, *arguments)
    if done.returncode:
        raise Problem(
            f"git {' '.join(arguments[:3])} failed in {tree}: "
            f"{(done.stderr or done.stdout).strip()}"
        )
    return done.stdout


def cache_folder() -> Path:
    return Path(
        os.environ.get("ENVELOPE_CACHE")
        or Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        / "vllm-envelope"
    )


def fetch(artifact: Artifact, version: str) -> Path:
    """A published file, from the cache or the package index, hash-checked.

    The index is ``PIP_INDEX_URL`` where that is set; the cache is
    ``ENVELOPE_CACHE``, by default ``~/.cache/vllm-envelope``.

    Raises:
        Problem: no network, no such file, or a hash that does not match.
    """
    target = cache_folder() / artifact.sha256[:16] / artifact.file
    if target.is_file():
        if sha256(target) == artifact.sha256:
            return target
        target.unlink()

    print(f"fetching {artifact.file}", file=sys.stderr)
    with scratch(target.parent, artifact.file) as folder:
        part = folder / artifact.file
        advice = f", or put the file into {target.parent}"
        with package_index(f"fetch {artifact.file}", advice) as client:
            page = client.get_project_page("vllm", timeout=30)
            found = [p for p in page.packages if p.filename == artifact.file]
            if not found:
                raise Problem(
                    f"the package index has no {artifact.file} (vLLM {version}). "
                    "Check PIP_INDEX_URL."
                )
            client.download_package(found[0], part, verify=False, timeout=60)
        actual = sha256(part)
        if actual != artifact.sha256:
            raise Problem(
                f"{artifact.file} is not the file this series was made for: sha256 "
                f"{artifact.sha256} wanted, {actual} found. Do not use it; if "
                "upstream published a new file, base.toml must be reviewed."
            )
        part.rename(target)
    return target


def published(version: str) -> list[Artifact]:
    """What the package index lists of a release, with its hashes.

    Raises:
        Problem: no network, or no such release.
    """
    with package_index(f"look up vLLM {version}") as client:
        page = client.get_project_page("vllm", timeout=30)
        found = [
            Artifact(package.filename, package.digests["sha256"])
            for package in page.packages
            if package.version == version and "sha256" in package.digests
        ]
    if not found:
        raise Problem(f"the package index has no vLLM {version}, or not its hashes.")
    return found


@contextlib.contextmanager
def package_index(what: str, advice: str = "") -> Iterator[PyPISimple]:
    from pypi_simple import PYPI_SIMPLE_ENDPOINT, NoSuchProjectError, PyPISimple
    from requests.exceptions import RequestException

    index = os.environ.get("PIP_INDEX_URL") or PYPI_SIMPLE_ENDPOINT
    try:
        with PyPISimple(endpoint=index) as client:
            yield client
    except (RequestException, NoSuchProjectError) as error:
        raise Problem(
            f"could not {what}: {error}. The network or the package index is out of "
            f"reach; try again{advice}."
        ) from error


def apply(base: Base, tree: Path, patches: list[Path]) -> None:
    """Commit each patch in order on ``tree``'s HEAD and note its file name.

    Raises:
        Problem: a patch does not apply; names it, the files, and what to do.
    """
    for patch in patches:
        done = run_git(
            tree,
            "am",
            "--keep-non-patch",
            "--committer-date-is-author-date",
            str(patch),
        )
        if done.returncode:
            run_git(tree, "am", "--abort")
            why = [s for s in done.stderr.splitlines() if s.startswith("error: ")]
            raise Problem(
                f"{patch.name} does not apply to vLLM {base.version} with the patches "
                "before it:\n"
                + "\n".join(f"  {s[7:]}" for s in why or ["error: not a mailbox"])
                + f"\nMend the patch, or its place in {base.folder.name}/series."
            )
        git(tree, "notes", f"--ref={NAMES_REF}", "add", "-m", patch.name, "HEAD")


@dataclass(frozen=True)
class Outcome:
    """What became of a patch on another base.

    ``files`` are those that conflict, or those that have its changes already.
    """

    kind: Literal["applies", "merged", "resolved", "taken", "skipped", "conflict"]
    files: tuple[str, ...] = ()


def transplant(source: Path, tree: Path, patch: Path) -> Outcome:
    """Commit a patch on ``tree``'s HEAD by a three-way merge, or stop in a conflict.

    ``source`` is where the patch was made: it lends the files it was made from.

    Raises:
        Problem: the patch is not from ``source``, or ``tree`` cannot be used.
    """
    content = patch.read_bytes()
    wanted = set(re.findall(rb"^index ([0-9a-f]{40})\.\.", content, re.M)) - {b"0" * 40}
    packed = subprocess.run(
        ["git", "-C", str(source), "pack-objects", "--stdout", "-q"],
        input=b"\n".join(sorted(wanted)),
        capture_output=True,
    )
    if packed.returncode:
        raise Problem(
            f"{source} does not hold the files {patch.name} was made from: 'make "
            "source' first."
        )
    subprocess.run(
        ["git", "-C", str(tree), "unpack-objects", "-q"],
        input=packed.stdout,
        check=True,
    )
    done = run_git(
        tree, "am", "-3", "--keep-non-patch", "--committer-date-is-author-date",
        str(patch),
    )  # fmt: skip
    if done.returncode:
        conflicts = git(tree, "diff", "--name-only", "--diff-filter=U", "-z")
        if not conflicts:
            run_git(tree, "am", "--abort")
            raise Problem(f"{patch.name} cannot be merged: {done.stderr.strip()}")
        return Outcome("conflict", tuple(conflicts.split("\0")[:-1]))
    if "Patch already applied" in done.stdout:
        return Outcome("taken")
    files = re.findall(r"^diff --git a/(\S+)", content.decode(errors="replace"), re.M)
    changed = git(tree, "diff", "--name-only", "--no-renames", "HEAD~", "HEAD")
    already = tuple(sorted(set(files) - set(changed.splitlines())))
    merged = "Falling back to patching base" in done.stdout
    return Outcome("merged" if merged else "applies", already)


def conflict_report(tree: Path, patch: Path, outcome: Outcome, again: str) -> str:
    """What a patch conflicts with, hunk by hunk, and how to go on."""
    hunks = git(tree, "diff", "--diff-filter=U", "-U0").strip()
    return (
        f"{patch.name} conflicts in {', '.join(outcome.files)}:\n{hunks}\n"
        f"To resolve it: in {tree}\n"
        "  edit the files, git add them, git am --continue\n"
        f"then {again} again. To give up: remove that folder."
    )


def unresolved(tree: Path) -> bool:
    """Whether a conflict in ``tree`` waits for someone."""
    state = git(tree, "rev-parse", "--git-path", "rebase-apply").strip()
    return (tree / state).exists()


def export(tree: Path, base_ref: str = BASE_REF) -> dict[str, bytes]:
    """The commits of ``tree`` as patch files, by name in order.

    A commit made by applying a patch keeps that file's name; a new one is named
    for its subject.

    Raises:
        Problem: uncommitted changes, merges, fixups not yet squashed, or two
            commits that would get one name.
    """
    if git(tree, "status", "--porcelain"):
        raise Problem(
            f"{tree} has uncommitted changes: commit them (or --fixup a commit and "
            "rebase with --autosquash), then 'make export'."
        )
    patches: dict[str, bytes] = {}
    for commit in git(tree, "rev-list", "--reverse", f"{base_ref}..HEAD").split():
        subject = git(tree, "show", "-s", "--format=%s", commit).strip()
        if len(git(tree, "show", "-s", "--format=%p", commit).split()) > 1:
            raise Problem(f"'{subject}' is a merge: rebase it into plain commits.")
        if subject.startswith(("fixup!", "squash!", "amend!")):
            raise Problem(
                f"'{subject}' is not squashed yet: git -C {tree} rebase -i "
                f"--autosquash {base_ref}, then 'make export'."
            )
        note = run_git(tree, "notes", f"--ref={NAMES_REF}", "show", commit).stdout
        name = note.strip() or patch_name(subject)
        if name in patches:
            raise Problem(
                f"two commits would be exported as {name}: give '{subject}' a "
                "subject of its own."
            )
        text = git(tree, *FORMAT_PATCH, "-1", commit)
        patches[name] = text.encode("utf-8", "surrogateescape")
    return patches


def patch_name(subject: str) -> str:
    """``[Bugfix][Core] Free what was mapped`` -> ``free-what-was-mapped.patch``."""
    topic = re.sub(r"^(\[[^]]*\]\s*)+", "", subject).lower()
    return re.sub(r"[^a-z0-9]+", "-", topic).strip("-")[:60].strip("-") + ".patch"

"""The patches as commits: applied to a source tree, and exported from it.

``vllm/`` (or the ``tree`` of ``base.toml``, so that two releases can lie side by
side) is a release's source distribution plus one commit per patch. The refs below
``refs/envelope/`` in its repository name its origin, so that unexported work
is never overwritten.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from scripts.commands import Problem
from scripts.release import Base

BASE_REF = "refs/envelope/base"
APPLIED_REF = "refs/envelope/applied"
NAMES_REF = "refs/notes/envelope"
# The author of every patch, whoever made the commit.
IDENTITY = (
    "Seed f9b18637 maintainers",
    "maintainers@users.noreply.a-seed-f9b18637.example",
)
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


def run_git(
    tree: Path, *arguments: str, index: Path | None = None
) -> subprocess.CompletedProcess[str]:
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
    if index:
        environment["GIT_INDEX_FILE"] = str(index)
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


def made(tree: Path) -> bool:
    """Whether `make source` made it."""
    return not run_git(tree, "rev-parse", "-q", "--verify", BASE_REF).returncode


def git(tree: Path, *arguments: str, index: Path | None = None) -> str:
    """Run git in ``tree`` and return its output.

    Raises:
        Problem: git is missing, or failed.
    """
    done = run_git(tree, *arguments, index=index)
    if done.returncode:
        raise Problem(
            f"git {' '.join(arguments[:3])} failed in {tree}: "
            f"{(done.stderr or done.stdout).strip()}"
        )
    return done.stdout


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


Kind = Literal[
    "applies", "merged", "remembered", "resolved", "taken", "skipped", "conflict"
]


@dataclass(frozen=True)
class Outcome:
    """What became of a patch on another base.

    ``files`` are those that conflict, those whose conflicts git resolved as before, or
    those that have its changes already.
    """

    kind: Kind
    files: tuple[str, ...] = ()


def transplant(source: Path, tree: Path, patch: Path) -> Outcome:
    """Commit a patch on ``tree``'s HEAD by a three-way merge, or stop in a conflict.

    ``source`` is where the patch was made: it has the files that the patch changes.

    Raises:
        Problem: the patch is not from ``source``, or ``tree`` cannot be used.
    """
    content = patch.read_bytes()
    blobs = re.findall(rb"^index ([0-9a-f]{40})\.\.([0-9a-f]{40})", content, re.M)
    wanted = {blob for both in blobs for blob in both} - {b"0" * 40}
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
        staged = re.findall(
            "^Staged '(.*)' using previous resolution", done.stderr, re.M
        ) + leave_out(tree)
        conflicts = git(tree, "diff", "--name-only", "--diff-filter=U", "-z")
        if conflicts:
            return Outcome("conflict", tuple(conflicts.split("\0")[:-1]))
        if staged and not run_git(tree, "diff", "--cached", "--quiet").returncode:
            git(tree, "am", "--skip")  # nothing is left of it
            return Outcome("skipped")
        if not staged or run_git(tree, "am", "--continue").returncode:
            run_git(tree, "am", "--abort")
            raise Problem(f"{patch.name} cannot be merged: {done.stderr.strip()}")
        return Outcome("remembered", tuple(staged))
    if "Patch already applied" in done.stdout:
        return Outcome("taken")
    merged = "Falling back to patching base" in done.stdout
    if not merged:
        merged = put_where_a_merge_does(tree, content)
        if not run_git(tree, "diff", "--quiet", "HEAD~", "HEAD").returncode:
            git(tree, "reset", "-q", "--hard", "HEAD~")  # nothing is left of it
            return Outcome("taken")
    files = re.findall(r"^diff --git a/(\S+)", content.decode(errors="replace"), re.M)
    changed = git(tree, "diff", "--name-only", "--no-renames", "HEAD~", "HEAD")
    already = tuple(sorted(set(files) - set(changed.splitlines())))
    return Outcome("merged" if merged else "applies", already)


def put_where_a_merge_does(tree: Path, patch: bytes) -> bool:
    """Amend a patch that applied to ``tree``'s HEAD; returns whether it differed.

    git puts a hunk where its context is found, if only in another function. A merge
    with the file that the patch was made from knows which lines are the same. Where
    that conflicts, the file is named.
    """
    text = patch.decode(errors="replace")
    header = r"^diff --git a/(\S+) .*\n(?:.+\n)??index (\w+)\.\.(\w+)"
    for name, *blobs in re.findall(header, text, re.M):
        if {"0" * 40} & set(blobs):
            continue  # a file that is new, or gone
        with tempfile.TemporaryDirectory() as folder:
            files = [Path(folder, side) for side in ("ours", "base", "theirs")]
            sides = (f"HEAD~:{name}", *blobs)
            for file, side in zip(files, sides, strict=True):
                file.write_text(git(tree, "show", side), errors="surrogateescape")
            done = run_git(tree, "merge-file", "-p", *map(str, files))
        if done.returncode:
            print(
                f"  {name}: applied where its context is, but a merge conflicts: look"
            )
        elif done.stdout != git(tree, "show", f"HEAD:{name}"):
            (tree / name).write_text(done.stdout, errors="surrogateescape")
            git(tree, "add", name)
    if not run_git(tree, "diff", "--cached", "--quiet").returncode:
        return False
    git(tree, "commit", "-q", "--amend", "--no-edit", "--no-verify", "--allow-empty")
    return True


def conflict_report(tree: Path, patch: Path, outcome: Outcome, again: str) -> str:
    """The conflicts of a patch, hunk by hunk, and how to continue."""
    hunks = git(tree, "diff", "--diff-filter=U", "-U0").strip()
    return (
        f"{patch.name} conflicts in {', '.join(outcome.files)}:\n{hunks}\n"
        f"To resolve it: in {tree}\n"
        f"  edit the files, git add them, git{nameless(tree)} am --continue\n"
        f"then {again} again. To give up: remove that folder."
    )


def nameless(tree: Path) -> str:
    """git's options for a user who has no name there, else nothing."""
    for key in ("user.name", "user.email"):
        found = ["git", "-C", str(tree), "config", key]
        if subprocess.run(found, stdout=subprocess.DEVNULL).returncode:
            break
    else:
        return ""
    return f' -c user.name="{IDENTITY[0]}" -c user.email={IDENTITY[1]}'


# In the memory: files that a release does not have, and whose changes were left out.
ABSENT = "absent"


def leave_out(tree: Path) -> list[str]:
    """Resolve conflicts about files that are not there as before; git rerere does not.

    Returns:
        The files.
    """
    memory = tree / ".git/rr-cache" / ABSENT
    known = memory.read_text().splitlines() if memory.exists() else []
    status = git(tree, "status", "--porcelain", "--", *known) if known else ""
    absent = re.findall("^DU (.*)", status, re.M)
    if absent:
        git(tree, "rm", "-q", "--", *absent)
    return absent


def recall(tree: Path, memory: Path) -> None:
    """Have git resolve conflicts in ``tree`` as before (git rerere)."""
    git(tree, "config", "rerere.enabled", "true")
    git(tree, "config", "rerere.autoUpdate", "true")
    if memory.exists():
        shutil.copytree(memory, tree / ".git/rr-cache", dirs_exist_ok=True)


def remember(tree: Path, memory: Path, conflicts: set[str]) -> None:
    """Keep in ``memory`` how conflicts in ``tree`` were resolved; ``conflicts`` are
    the files that had them.

    git keeps each file whole, before and after. It merges the difference into the next
    conflict of the same lines, so that the changed lines and three around suffice.
    """
    absent = {name for name in conflicts if not (tree / name).exists()}
    if absent and not unresolved(tree):
        memory.mkdir(exist_ok=True)
        path = memory / ABSENT
        known = path.read_text().splitlines() if path.exists() else []
        path.write_text("".join(f"{name}\n" for name in sorted({*known, *absent})))
    for after in sorted((tree / ".git/rr-cache").glob("*/postimage*")):
        kept = memory / after.parent.name / after.name
        if kept.exists():
            continue
        before = after.with_name(after.name.replace("post", "pre"))
        shown = run_git(tree, "diff", "--no-index", "-U3", str(before), str(after))
        _, *hunks = re.split("^@@.*\n", shown.stdout, flags=re.M)
        lines = "".join(hunks).split("\n")
        kept.parent.mkdir(parents=True, exist_ok=True)
        for path, sign in ((before, "-"), (after, "+")):
            text = "".join(f"{s[1:]}\n" for s in lines if s[:1] in (" ", sign))
            kept.with_name(path.name).write_text(text, errors="surrogateescape")


def unmet(tree: Path, memory: Path) -> list[str]:
    """The conflicts in ``memory`` that git did not resolve by it in ``tree``."""
    met = {p.parent.name for p in (tree / ".git/rr-cache").glob("*/thisimage*")}
    return sorted({path.parent.name for path in memory.glob("*/postimage*")} - met)


def unresolved(tree: Path) -> bool:
    """Whether ``tree`` has an unresolved conflict."""
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


def commits(tree: Path) -> dict[str, str]:
    """The commit of each topic, a patch file without its suffix, in order."""
    told = git(
        tree, "log", "--reverse", f"--notes={NAMES_REF}", "--format=%H%x00%N%x01",
        f"{BASE_REF}..HEAD",
    )  # fmt: skip
    pairs = (entry.strip().partition("\0") for entry in told.split("\1"))
    return {n.strip().removesuffix(".patch"): c for c, _, n in pairs if n.strip()}


def patch_name(subject: str) -> str:
    """``[Bugfix][Core] Free mapped memory`` -> ``free-mapped-memory.patch``."""
    topic = re.sub(r"^(\[[^]]*\]\s*)+", "", subject).lower()
    return re.sub(r"[^a-z0-9]+", "-", topic).strip("-")[:60].strip("-") + ".patch"


def touched_lines(tree: Path, since: str = "HEAD~") -> dict[str, set[int]]:
    """The lines of each file added or changed by HEAD's commit, or since another."""
    touched: dict[str, set[int]] = {}
    lines: set[int] = set()
    for line in git(tree, "diff", "-U0", "--no-renames", since, "HEAD").splitlines():
        if line.startswith("+++ "):
            lines = set()
            if line != "+++ /dev/null":
                touched[line.removeprefix("+++ b/")] = lines
        elif match := re.match(r"@@ -\S+ \+(\d+)(?:,(\d+))? @@", line):
            start, count = int(match[1]), int(match[2] or 1)
            lines.update(range(start, start + count))
    return touched

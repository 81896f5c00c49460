"""Make ``vllm/``: the pinned release plus one git commit per patch.

For a release that has the series of another one, ``vllm-<release>/``: each patch is
merged three-way. A conflict is left in build/ to be resolved; run the command again to
continue.
"""

from __future__ import annotations

import argparse
import re
import shutil
import tarfile
from dataclasses import replace
from pathlib import Path

from scripts.commands import Problem, command, locked, scratch
from scripts.headers import patch_files
from scripts.moving import keep_resolutions, lacking, move_series
from scripts.release import Base, fetch, published
from scripts.series import (
    APPLIED_REF,
    BASE_REF,
    IDENTITY,
    NAMES_REF,
    apply,
    git,
    made,
    nameless,
    recall,
    run_git,
    unmet,
    unresolved,
)


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--git", type=Path, help="an upstream clone to start from instead of the sdist"
    )


def main(args: argparse.Namespace) -> None:
    base = Base.load(args.root, args.base)
    with locked(args.root):
        if base.series:
            make(Base.load(args.root, base.series), None)
        make(base, args.git)


def make(base: Base, clone: Path | None) -> None:
    """
    Raises:
        Problem: it cannot be replaced, or the series does not apply.
    """
    if base.tree.exists() and keep(base):
        print(f"{base.tree} is up to date: {base.local_version}")
        return
    with scratch(base.root, "vllm") as folder:
        new = folder / "vllm"
        if base.series:
            merged = merge(base, clone)
            merged.rename(new)
            shutil.rmtree(merged.parent)
        else:
            start(base, new, clone)
            apply(base, new, base.patches())
        (new / ".git/envelope").write_text(base.digest())
        git(new, "update-ref", APPLIED_REF, "HEAD")
        if base.tree.exists():
            base.tree.rename(folder / "old")
        new.rename(base.tree)
    print(f"{base.tree}: {base.local_version}")


def merge(base: Base, clone: Path | None) -> Path:
    """The tree of a release that has the series of another, in a folder of build/.

    Raises:
        Problem: a conflict, with what to do about it; or a topic leaves nothing.
    """
    old = Base.load(base.root, base.series)
    folder = base.root / f"build/source-{base.version}"
    new, made_from = replace(base, tree=folder / "vllm"), folder / "made-from"
    if folder.exists() and made_from.read_text() != base.digest(resolved=False):
        if unresolved(new.tree):
            raise Problem(
                f"the series of {old.version} has changed, and {new.tree} has a "
                "conflict of the one before: git am --continue there keeps how it "
                "is resolved; or remove that folder."
            )
        keep_resolutions(old, new)
        shutil.rmtree(folder)
    if not folder.exists():
        with scratch(base.root / "build", "source") as part:
            (part / "new").mkdir()
            start(base, part / "new/vllm", clone)
            recall(part / "new/vllm", base.resolutions)
            (part / "new/made-from").write_text(base.digest(resolved=False))
            (part / "new").rename(folder)
    outcomes = move_series(old, new, f"make source BASE={base.version}")
    empty = [t for t, o in outcomes.items() if o.kind in ("taken", "skipped")]
    if empty:
        raise Problem(
            f"nothing is left on vLLM {base.version} of {', '.join(empty)}: list it in "
            f"{base.folder / 'base.toml'} under [left_out], with the reason."
        )
    for line in lacking(old, new.tree):
        print(line)
    by_hand = any(o.kind == "resolved" for o in outcomes.values())
    if not by_hand and (stale := unmet(new.tree, base.resolutions)):
        print(f"not met, remove unless another release needs them: {' '.join(stale)}")
    git(new.tree, "checkout", "-q", "envelope")
    return new.tree


def keep(base: Base) -> bool:
    """Whether ``vllm/`` already is this series; False if it may be replaced.

    Raises:
        Problem: it holds work that is not in the patch files.
    """
    tree = base.tree
    if not made(tree):
        raise Problem(f"{tree} was not made by 'make source': move it away.")
    if git(tree, "status", "--porcelain") or (tree / ".git/rebase-apply").exists():
        raise Problem(
            f"{tree} has uncommitted changes, and would be overwritten. Commit them "
            "and 'make export', or discard them (git -C {tree} stash)."
        )
    made_from = tree / ".git/envelope"
    same = made_from.is_file() and made_from.read_text() == base.digest()
    if git(tree, "rev-parse", "HEAD") == git(tree, "rev-parse", APPLIED_REF):
        return same
    exported = {path.name: path.read_bytes() for path in base.patches()}
    if base.series or patch_files(base.root, tree) != exported:
        raise Problem(
            f"{tree} has commits that are not in {base.folder.name}, and would be "
            f"overwritten. 'make export BASE={base.version}' writes them to files."
        )
    git(tree, "update-ref", APPLIED_REF, "HEAD")
    made_from.write_text(base.digest())
    return True


def start(base: Base, tree: Path, clone: Path | None) -> None:
    """A repository whose HEAD is the unpatched release."""
    if clone:
        tag = f"v{base.version}"
        if run_git(
            clone, "rev-parse", "-q", "--verify", f"{tag}^{{commit}}"
        ).returncode:
            raise Problem(f"{clone} is not a git clone with the tag {tag}: fetch it.")
        git(tree.parent, "clone", "-q", "--shared", "-b", tag, str(clone), tree.name)
        git(tree, "checkout", "-q", "-b", "envelope")
    else:
        archive = fetch(base.sdist, base.version)
        with tarfile.open(archive) as tar:
            tar.extractall(tree.parent, filter="data")
        (tree.parent / archive.name.removesuffix(".tar.gz")).rename(tree)
        git(tree, "init", "-q", "-b", "envelope")
        git(tree, "config", "gc.auto", "0")
        git(tree, "-c", "core.compression=0", "add", "--all", "--force")
        git(tree, "commit", "-q", "-m", f"vLLM {base.version}, source distribution")
    git(tree, "update-ref", BASE_REF, "HEAD")
    if nameless(tree):
        # A user without a git identity needs one to commit here.
        for key, value in zip(("user.name", "user.email"), IDENTITY, strict=True):
            git(tree, "config", key, value)
    # Rebasing keeps a line of a message that begins with the number of an issue.
    git(tree, "config", "core.commentChar", ";")
    # Amending or rebasing a commit keeps the name of its patch file.
    git(tree, "config", "notes.rewriteRef", NAMES_REF)


def another(old: Base, version: str, folder: Path) -> Base:
    """The release's pins and source below ``folder``, laid out as a project.

    Raises:
        Problem: no such release, or one without the wheels that we build.
    """
    files = published(version)
    text = (old.folder / "base.toml").read_text()
    ends = {".tar.gz": old.sdist} | {f"_{a}.whl": w for a, w in old.wheels.items()}
    for end, before in ends.items():
        after = [file for file in files if file.file.endswith(end)]
        if len(after) != 1:
            raise Problem(
                f"vLLM {version} has {len(after)} files like {before.file}: one wanted."
            )
        text = text.replace(before.file, after[0].file)
        text = text.replace(before.sha256, after[0].sha256)
    text = text.replace(old.version, version)
    path = folder / f"patches/v{version}/base.toml"
    path.parent.mkdir(parents=True)
    path.write_text(text)
    new = Base.load(folder, version)
    start(new, new.tree, None)
    required = (new.tree / "PKG-INFO").read_text()
    torch = re.search(r"^Requires-Dist: torch==(\S+)$", required, re.M)
    if torch:
        text = text.replace(f'torch = "{old.torch}"', f'torch = "{torch[1]}"')
        path.write_text(text)
    return new


if __name__ == "__main__":
    command(main)

"""What is known of each topic beside its patch: ``patches/topics.toml``.

A topic stands on the release and on what it needs: the topics whose names it uses
(`needs`, with the names), and those that its lines merely stand beside (`beside`):
these would go if a hook or a test were moved.
"""

from __future__ import annotations

import argparse
import tomllib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from scripts.commands import Problem
from scripts.merging import Repository
from scripts.release import Base
from scripts.series import BASE_REF, commits, git

FILE = "patches/topics.toml"
THREAD = r"(?:(?:HAMi-core|pytorch) )?#\d+"
UPSTREAM = "https://github.com/vllm-project/vllm"


@dataclass(frozen=True)
class Topic:
    """`told` is its table in topics.toml."""

    name: str
    told: dict[str, Any]

    @property
    def needs(self) -> dict[str, str]:
        """Why, by topic."""
        needs: dict[str, str] = self.told.get("needs", {})
        return needs

    @property
    def beside(self) -> list[str]:
        beside: list[str] = self.told.get("beside", [])
        return beside


@dataclass(frozen=True)
class Thread:
    """An issue or pull request as it was last looked at."""

    url: str
    state: str
    looked: str


def threads(root: Path) -> dict[str, Thread]:
    """By "#number"; of another project, by its name and "#number"."""
    found = {}
    for name, told in tables(root).get("threads", {}).items():
        kind = "pull" if "pull" in told else "issue"
        path = "pull" if kind == "pull" else "issues"
        url = told.get("url", f"{UPSTREAM}/{path}/{name[1:]}")
        found[name] = Thread(url, told[kind], told["looked"])
    return found


def load(root: Path) -> dict[str, Topic]:
    told = tables(root).get("topic", {})
    return {name: Topic(name, table) for name, table in told.items()}


def tables(root: Path) -> dict[str, Any]:
    path = root / FILE
    try:
        return tomllib.loads(path.read_text()) if path.exists() else {}
    except tomllib.TOMLDecodeError as error:
        raise Problem(f"{path}: {error}") from error


def with_needs(
    root: Path, series: Sequence[str], wanted: Iterable[str], beside: bool = True
) -> list[str]:
    """`wanted` and all that they need, in the order of `series`.

    Raises:
        Problem: no such topic, or one that needs what the series does not have.
    """
    topics = load(root)
    found: set[str] = set()
    left = [name.removesuffix(".patch") for name in wanted]
    while left:
        name = left.pop()
        if name not in series:
            raise Problem(f"no topic {name!r}. They are: {', '.join(series)}.")
        if name not in found:
            found.add(name)
            topic = topics.get(name, Topic(name, {}))
            # A topic of a newer release may be absent here, and what needs it adapted.
            left += [n for n in topic.needs if n in series]
            left += [n for n in topic.beside if beside and n in series]
    return [name for name in series if name in found]


@dataclass(frozen=True)
class Stack:
    """Topics on a release, as commits; or the one that conflicts, with its files."""

    head: str
    conflicts: tuple[str, ...] = ()
    stopped_at: str = ""


def stack(
    repository: Repository, base: str, series: dict[str, str], names: Sequence[str]
) -> Stack:
    """Merge the commits of `names` onto `base`, each three-way, in this order."""
    head = tree = base
    for name in names:
        merged = repository.pick(series[name], tree)
        if merged.files:
            return Stack(head, merged.files, name)
        tree = merged.tree
        head = repository.copy(series[name], tree, head)
    return Stack(head)


def also_needed(
    repository: Repository, base: str, root: Path, series: dict[str, str], name: str
) -> list[str]:
    """The fewest earlier topics, found one by one, with which a topic would apply."""
    order = list(series)
    known = set(with_needs(root, order, [name]))
    chosen = set(order[: order.index(name)]) - known

    def applies(more: set[str]) -> bool:
        names = with_needs(root, order, more | {name})
        return not stack(repository, base, series, names).conflicts

    if not applies(chosen):
        return []
    for one in reversed(order):
        if one in chosen and applies(chosen - {one}):
            chosen.discard(one)
    return [one for one in order if one in chosen]


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--topics", default="", help="these and what they need (default: all)"
    )


def chosen(args: argparse.Namespace) -> Base:
    """The release with the topics asked for, which its version then names.

    Raises:
        Problem: no such release or topic.
    """
    base = Base.load(args.root, args.base)
    if not args.topics:
        return base
    series = [patch.stem for patch in base.patches()]
    names = with_needs(args.root, series, args.topics.split())
    return base if names == series else replace(base, topics=tuple(names))


def with_tree(base: Base, folder: Path) -> Base:
    """`base` with the source of its topics alone, made below `folder`.

    Raises:
        Problem: they do not apply without the others.
    """
    if not base.topics:
        return base
    tree = folder / "vllm"
    git(folder, "clone", "-q", "--shared", "--no-checkout", str(base.tree), "vllm")
    git(tree, "fetch", "-q", "origin", f"{BASE_REF}:{BASE_REF}")
    done = stack(Repository(tree), BASE_REF, commits(base.tree), base.topics)
    if done.conflicts:
        raise Problem(
            f"{done.stopped_at} conflicts in {', '.join(done.conflicts)} with what "
            f"{FILE} says that it needs: 'make alone BASE={base.version}' says what is "
            "missing."
        )
    git(tree, "checkout", "-q", "-B", "envelope", done.head)
    return replace(base, tree=tree)

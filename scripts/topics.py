"""The facts about each topic in addition to its patch: ``patches/topics.toml``.

A topic stands on the release and on its needs: the topics whose names it uses
(`needs`, with the names), and those that its lines merely stand next to (`beside`):
these would go if a hook or a test were moved. Its cure may need more: topics
without which it applies and runs, and does not cure (`effect_needs`, with the reason).
A build has all of them; a pull request does not wait for the last.
"""

from __future__ import annotations

import argparse
import tomllib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from scripts.commands import Problem
from scripts.merging import Repository
from scripts.release import Base
from scripts.series import BASE_REF, commits, git

FILE = "patches/topics.toml"
ALL = "all"  # the set of the whole series
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
    def effect_needs(self) -> dict[str, str]:
        """Why, by topic."""
        needs: dict[str, str] = self.told.get("effect_needs", {})
        return needs

    @property
    def beside(self) -> list[str]:
        beside: list[str] = self.told.get("beside", [])
        return beside


@dataclass(frozen=True)
class Set:
    """Topics for one need. `cures` has a case of tests/vgpu/engine/test_sets.py for
    each symptom."""

    name: str
    whom: str
    costs: str
    cures: dict[str, str]
    topics: tuple[str, ...] = ()
    """Without their needs; none for the whole series."""


@dataclass(frozen=True)
class Thread:
    """An issue or pull request as it was last looked at."""

    url: str
    state: str
    looked: str


@dataclass(frozen=True)
class Upstream:
    """The day on which the entries on upstream last changed, and the order in which
    topics are to be proposed."""

    updated: str = ""
    order: tuple[str, ...] = ()


def upstream(root: Path) -> Upstream:
    told = tables(root).get("upstream", {})
    return Upstream(told.get("updated", ""), tuple(told.get("order", ())))


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


def sets(root: Path) -> dict[str, Set]:
    """In the order of the file."""
    found = {}
    for name, told in tables(root).get("set", {}).items():
        topics = tuple(told.get("topics", ()))
        found[name] = Set(name, told["for"], told["costs"], told["cures"], topics)
    return found


def members(root: Path, series: Sequence[str], name: str) -> list[str]:
    """The topics of a set, or of several ("core sleep"), and all that they need, of
    the series of a release.

    Raises:
        Problem: no such set.
    """
    known = sets(root)
    asked = names_of(name)
    for one in asked:
        if one not in {ALL, *known}:
            raise Problem(f"no set {one!r}. They are: {', '.join([*known] or [ALL])}.")
    if ALL in asked:
        return list(series)
    wanted = {topic for one in asked for topic in known[one].topics}
    return with_needs(root, series, wanted & set(series), effects=True)


def names_of(text: str) -> list[str]:
    """Of sets: as they are asked for, or between dots as in a version."""
    return sorted(set(text.replace(".", " ").split()))


def tables(root: Path) -> dict[str, Any]:
    path = root / FILE
    try:
        return tomllib.loads(path.read_text()) if path.exists() else {}
    except tomllib.TOMLDecodeError as error:
        raise Problem(f"{path}: {error}") from error


def with_needs(
    root: Path,
    series: Sequence[str],
    wanted: Iterable[str],
    beside: bool = True,
    effects: bool = False,
) -> list[str]:
    """`wanted` and all that they need, in the order of `series`; with `effects`, also
    to cure their symptoms.

    Raises:
        Problem: no such topic, or one whose needs are not in the series.
    """
    topics = load(root)
    found: set[str] = set()
    left = [name.removesuffix(".patch") for name in wanted]
    while left:
        name = left.pop()
        if name not in series:
            raise Problem(f"no patch {name!r}. {nearest(name, series)}")
        if name not in found:
            found.add(name)
            topic = topics.get(name, Topic(name, {}))
            # A topic of a newer release may be absent here, and what needs it adapted.
            left += [n for n in topic.needs if n in series]
            left += [n for n in topic.beside if beside and n in series]
            left += [n for n in topic.effect_needs if effects and n in series]
    return [name for name in series if name in found]


def nearest(name: str, series: Sequence[str]) -> str:
    """A sentence with the names that somebody may have meant."""
    found = [n for n in series if name in n]
    found = found or get_close_matches(name, series, n=3, cutoff=0.5)
    if not found:
        return "patches/README.md lists all."
    return f"Nearest: {', '.join(found[:5])}."


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
    parser.add_argument(
        "--set", default="", help="the topics of this set, or of several"
    )


def chosen(args: argparse.Namespace) -> Base:
    """The release with the topics or the set asked for, which its version then names.

    Raises:
        Problem: no such release, topic or set, or both are given.
    """
    base = Base.load(args.root, args.base)
    if args.topics and args.set:
        raise Problem("PATCHES= and SET= were given: one of them chooses.")
    return of_set(base, args.set) if args.set else of_topics(base, args.topics.split())


def of_topics(base: Base, topics: Sequence[str], name: str = "") -> Base:
    """`base` with these and their needs, or the whole series."""
    series = [patch.stem for patch in base.patches()]
    names = with_needs(base.root, series, topics, effects=True)
    if names in ([], series):
        return base
    return replace(base, topics=tuple(names), set=name)


def of_set(base: Base, name: str) -> Base:
    """`base` with the topics of a set, or of several.

    Raises:
        Problem: no such set.
    """
    series = [patch.stem for patch in base.patches()]
    topics = members(base.root, series, name)
    return of_topics(base, topics, ".".join(names_of(name)))


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

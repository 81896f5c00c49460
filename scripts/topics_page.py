"""Write the tables of patches/README.md, and of sets in README.md, from topics.toml.

The tables are between markers; text outside of them is written by hand and stays.
"""

from __future__ import annotations

import argparse
import re
from pathlib import Path

from scripts.commands import Problem, command, locked, write_whole
from scripts.release import Base, releases
from scripts.size import size
from scripts.size import told as size_of_series
from scripts.topics import (
    FILE,
    THREAD,
    Thread,
    Topic,
    load,
    members,
    sets,
    threads,
    upstream,
    with_needs,
)

PAGE = "patches/README.md"
FRONT = "README.md"  # has the table of sets, too
# A table ends with a line; figures in its cells end within one.
TABLES = re.compile(r"<!-- table: (.+?) -->\n.*?^<!-- end -->", re.S | re.M)
NEEDS, SETS, SIZE = "what each needs", "sets", "size"
ORDER = "order of proposing"


def main(args: argparse.Namespace) -> None:
    with locked(args.root):
        write(args.root)


def write(root: Path) -> None:
    """Write the tables of both pages.

    Raises:
        Problem: as `page`.
    """
    for name, made in ((PAGE, page), (FRONT, front)):
        if not (root / name).exists():
            continue
        old = (root / name).read_text()
        new = made(root, old)
        if new != old:
            write_whole(root / name, new)
        print(f"{name}: {'written' if new != old else 'up to date'}")


def page(root: Path, text: str) -> str:
    """`text` with its tables as topics.toml has them.

    Raises:
        Problem: a section has no table, or the series another topic than the file.
    """
    topics, known = load(root), threads(root)
    newest = releases(root)[0]
    series = [patch.stem for patch in Base.load(root, newest).patches()]
    if list(topics) != series:
        differ = sorted(set(topics) ^ set(series)) or ["the order"]
        raise Problem(f"{FILE} and the series of {newest}: {', '.join(differ)}.")
    sections = {topic.told["section"] for topic in topics.values()}
    tables = {
        name: described([t for t in topics.values() if t.told["section"] == name],
                        known, newest)
        for name in sections
    }  # fmt: skip
    tables[NEEDS] = needs(root, topics, known)
    tables[SIZE] = [size_of_series(root)]
    tables[ORDER] = [
        f"{n}. {name}" for n, name in enumerate(upstream(root).order, start=1)
    ]
    return filled(text, tables, PAGE)


def front(root: Path, text: str) -> str:
    """README.md with its table of sets, and the size of the series."""
    tables = {SETS: table_of_sets(root), SIZE: [size_of_series(root)]}
    return filled(text, tables, FRONT)


def filled(text: str, tables: dict[str, list[str]], where: str) -> str:
    """`text` with the lines of each table between its markers.

    Raises:
        Problem: it has not the markers of these tables.
    """
    marked = set(TABLES.findall(text))
    if marked != tables.keys():
        raise Problem(f"{where} has tables of {', '.join(sorted(marked))}.")

    def table(match: re.Match[str]) -> str:
        lines = "\n".join(tables[match[1]])
        return f"<!-- table: {match[1]} -->\n{lines}\n<!-- end -->"

    return TABLES.sub(table, text)


def table_of_sets(root: Path) -> list[str]:
    base = Base.load(root, releases(root)[0])
    patches = {patch.stem: patch for patch in base.patches()}
    lines = [
        "| symptoms cured | set | for | patches, lines | costs |",
        "| --- | --- | --- | --- | --- |",
    ]
    for one in sets(root).values():
        names = members(root, list(patches), one.name)
        added, _ = size([patches[name] for name in names])
        cures = "<br>".join(one.cures) or "[each symptom](docs/symptoms.md)"
        cells = cures, f"**{one.name}**", one.whom, f"{len(names)}, +{added}", one.costs
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def described(topics: list[Topic], known: dict[str, Thread], release: str) -> list[str]:
    lines = [
        "| patch | symptom without it | issues | upstream | evidence |",
        "| --- | --- | --- | --- | --- |",
    ]
    for topic in topics:
        told = topic.told
        cells = (
            f"[{topic.name}](v{release}/{topic.name}.patch)",
            linked(told["without"], known),
            " ".join(f"[{i}]({known[i].url})" for i in told["issues"]),
            linked(told["upstream"], known),
            told["evidence"],
        )
        lines.append("|" + "|".join(f" {c} " if c else " " for c in cells) + "|")
    return lines


def needs(root: Path, topics: dict[str, Topic], known: dict[str, Thread]) -> list[str]:
    lines = [
        "| patch | needs | cures with | adjacent | patches in all | dropped when |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for name, topic in topics.items():
        wanted, cure = (
            "; ".join(f"{n} ({why})" for n, why in told.items())
            for told in (topic.needs, topic.effect_needs)
        )
        cells = (
            name,
            wanted or "nothing",
            cure,
            ", ".join(topic.beside),
            str(len(with_needs(root, list(topics), [name]))),
            linked(topic.told["drop_when"], known),
        )
        lines.append("|" + "|".join(f" {c} " if c else " " for c in cells) + "|")
    return lines


def linked(text: str, known: dict[str, Thread]) -> str:
    return stated(text, known, link=True)


def stated(text: str, known: dict[str, Thread], link: bool = False) -> str:
    """A text with the state of each thread added where it is first named.

    Raises:
        Problem: topics.toml has no such thread.
    """
    seen = set()

    def told(match: re.Match[str]) -> str:
        name, opened = match.groups()
        if name not in known:
            raise Problem(f"{FILE} names {name}, which is not among its threads.")
        thread = known[name]
        said = f"[{name}]({thread.url})" if link else name
        if name in seen or not thread.state:
            return said + (" (" if opened else "")
        seen.add(name)
        return f"{said} ({thread.state}" + ("; " if opened else ")")

    return re.sub(rf"({THREAD})\b( \()?", told, text)


if __name__ == "__main__":
    command(main)

"""Write the tables of patches/README.md from topics.toml.

The tables are between markers; text outside of them is written by hand and stays.
"""

from __future__ import annotations

import argparse
import re
from pathlib import Path

from scripts.commands import Problem, command, locked, write_whole
from scripts.compare import releases
from scripts.release import Base
from scripts.topics import FILE, THREAD, Thread, Topic, load, threads, with_needs

PAGE = "patches/README.md"
TABLES = re.compile(r"<!-- topics: (.+?) -->\n.*?<!-- end -->", re.S)
NEEDS = "what each needs"


def main(args: argparse.Namespace) -> None:
    with locked(args.root):
        path = args.root / PAGE
        old = path.read_text()
        new = page(args.root, old)
        if new != old:
            write_whole(path, new)
        print(f"{PAGE}: {'written' if new != old else 'up to date'}")


def page(root: Path, text: str) -> str:
    """`text` with its tables as topics.toml has them.

    Raises:
        Problem: a section has no table, or the series another topic than the file.
    """
    topics, known = load(root), threads(root)
    newest, *older = releases(root)
    series = [patch.stem for patch in Base.load(root, newest).patches()]
    if list(topics) != series:
        differ = sorted(set(topics) ^ set(series)) or ["the order"]
        raise Problem(f"{FILE} and the series of {newest}: {', '.join(differ)}.")
    sections = {topic.told["section"] for topic in topics.values()}
    marked = set(TABLES.findall(text))
    if sections | {NEEDS} != marked:
        raise Problem(f"{PAGE} has tables of {', '.join(sorted(marked))}.")

    def table(match: re.Match[str]) -> str:
        if match[1] == NEEDS:
            lines = needs(root, topics, known, [newest, *older])
        else:
            chosen = [t for t in topics.values() if t.told["section"] == match[1]]
            lines = described(chosen, known, newest)
        return f"<!-- topics: {match[1]} -->\n" + "\n".join(lines) + "\n<!-- end -->"

    return TABLES.sub(table, text)


def described(topics: list[Topic], known: dict[str, Thread], release: str) -> list[str]:
    lines = [
        "| patch | what a user sees without it | issues | upstream | evidence |",
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


def needs(
    root: Path, topics: dict[str, Topic], known: dict[str, Thread], versions: list[str]
) -> list[str]:
    stems = {v: {p.stem for p in Base.load(root, v).patches()} for v in versions}
    lines = [
        "| patch | needs | adjacent | patches in all | releases | dropped when |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for name, topic in topics.items():
        wanted = "; ".join(f"{n} ({why})" for n, why in topic.needs.items())
        cells = (
            name,
            wanted or "nothing",
            ", ".join(topic.beside),
            str(len(with_needs(root, list(topics), [name]))),
            ", ".join(v for v in versions if name in stems[v]),
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

"""Check how pages read: short sentences, short cells of tables, and plain words.

Code, quoted output and generated tables are not looked at.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator
from pathlib import Path

from scripts.commands import Problem, command

SENTENCE, CELL = 30, 25
# What reads badly, and what to write.
WORDS = {
    r"\bbeside\b": "next to, compared with, in addition to",
    r"\bours\b|\btheirs\b": "patched, stock",
    r"\bofficial (?:starts?|engines?|beside|and ours)\b": "stock",
    r"\bwhat (?:is|was|are|it|they|comes?|others?|ours|each|PyTorch|NCCL|"
    r"tensors|steps?|graphs?|this|the|a|an|that)\b": "a noun",
    r"\b(?:dies|died|lives|lived)\b": "runs out of memory, ends, serves",
    r"\bg[ia]ve[sn]? back\b|\bgiving back\b": "free, return, unmap",
    r"\b(?:told|tells|said)\b": "names, reports, has",
    r"\bneighbours?\b|\bco-tenants?\b": "another process",
    r"(?<!\w)\w+, too\b": "also",
    r"\bonce more\b|\bfor good\b|\bat hand\b": "again, forever, here",
    r"\bas (?:the release|before|yours|ours)\b": "as stock vLLM",
    r"\brivals?\b": "another pull request",
}
GENERATED = re.compile(r"<!-- table: .*?-->.*?^<!-- end -->", re.S | re.M)
FENCED = re.compile(r"^( *)```.*?^\1```", re.S | re.M)
# And names of patches.
CODE = re.compile(r"`[^`]+`|\w+(?:-\w+){3,}")
LINK = re.compile(r"!?\[([^\]]*)\]\([^)]*\)")
COMMENT = re.compile(r"<!--.*?-->", re.S)
# A sentence ends with a mark and a capital letter, a digit or code after it.
END = re.compile(r"(?<=[.!?:])[\"')*]*\s+(?=[\"'(*]*(?:[A-Z0-9`]|vLLM))|(?<=;)\s")


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("pages", nargs="+", type=Path)


def main(args: argparse.Namespace) -> None:
    found = [
        f"{path}:{line}: {fault}"
        for path in args.pages
        for line, fault in faults(path.read_text())
    ]
    if found:
        raise Problem("\n".join([f"{len(found)} places read badly.", *found]))


def faults(text: str) -> Iterator[tuple[int, str]]:
    """Line and fault, of each fault of a page."""
    for line, block in blocks(text):
        table = block.startswith("|")
        plain = CODE.sub("X", LINK.sub(r"\1", block))
        parts = re.split(r"(?<!\\)\|", plain) if table else END.split(plain)
        most, what = (CELL, "cell") if table else (SENTENCE, "sentence")
        for part in parts:
            if (words := len(re.findall(r"\w[\w'.,/-]*", part))) > most:
                start = " ".join(part.split()[:6])
                yield line, f"a {what} of {words} words: {start} ..."
        for pattern, better in WORDS.items():
            for match in re.finditer(pattern, plain):
                yield line, f"{match[0]!r}: rather {better}"


def blocks(text: str) -> Iterator[tuple[int, str]]:
    """Paragraphs, items of lists and rows of tables, each with its first line."""

    def blank(match: re.Match[str]) -> str:
        return "\n" * match[0].count("\n")

    for pattern in (GENERATED, FENCED, COMMENT):
        text = pattern.sub(blank, text)
    first, held = 0, list[str]()
    for number, line in enumerate([*text.splitlines(), ""], 1):
        bare = line.lstrip("> ")
        item = re.match(r"(?:[-*]|\d+\.) ", bare)
        code = line.startswith("    ") and not held
        if held and (not bare or item or bare.startswith(("|", "#"))):
            yield first, " ".join(held)
            held = []
        if bare and not code and not bare.startswith(("| ---", "#")):
            first = first if held else number
            held.append(bare[item.end() :] if item else bare)
    if held:
        yield first, " ".join(held)


if __name__ == "__main__":
    command(main)

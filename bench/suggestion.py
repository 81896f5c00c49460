"""Start engines, and start each again with the sizes of --kv-cache-memory that its log
suggests, unpatched compared with patched.

A suggestion is true if the engine starts with it, takes no more than it was said to
fill, and has at least as many blocks as before. Prints a Markdown table.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any

from bench.start import (
    MEMORY,
    MIB,
    grid,
    grid_options,
    outcome,
    percent,
    requested,
    starts,
)
from bench.virtual import NAMES, SITES, recorded
from scripts.commands import command
from scripts.release import Base

WHERE = ("requested", "device")


def options(parser: argparse.ArgumentParser) -> None:
    grid_options(parser)


def main(args: argparse.Namespace) -> None:
    base = Base.load(args.root, args.base)
    columns = [f"{NAMES[site]}: fills {where}" for site in SITES for where in WHERE]
    print("| model | runner | utilization | " + " | ".join(columns) + " |")
    print("| --- " * (3 + len(columns)) + "|")
    told: list[dict[str, list[Suggestion]]] = []
    with ThreadPoolExecutor(len(SITES)) as pool:
        for model, runner, cases in grid(args):
            both = pool.map(partial(suggestions, base, cases), SITES)
            for asked, *pair in zip(cases, *both, strict=True):
                told.append(dict(zip(SITES, pair, strict=True)))
                cells = [model, runner, f"{percent(asked) / 100:.2f}"]
                cells += [str(suggestion) for suggestion in chain(*pair)]
                print(f"| {' | '.join(cells)} |", flush=True)
    print()
    for line in verdict(told):
        print(line)
    print(f"\n{recorded(args.root)}")


@dataclass(frozen=True)
class Suggestion:
    """A size in bytes, and what became of a start with it."""

    size: int | None = None  # None: the engine did not start, or none fits
    verdict: str = ""

    @property
    def true(self) -> bool:
        return self.verdict == "true"

    def __str__(self) -> str:
        return "" if self.size is None else f"{self.size / MIB:.0f}: {self.verdict}"


def suggestions(
    base: Base, cases: list[dict[str, Any]], site: str
) -> list[list[Suggestion]]:
    """For each case one for the request, and one for the device."""
    first = starts(base, cases, site)
    again = [
        asked | {"llm": asked["llm"] | {"kv_cache_memory_bytes": size}}
        for asked, result in zip(cases, first, strict=True)
        for size in sizes(result)
        if size is not None and size > 0
    ]
    restarted = iter(starts(base, again, site) if again else [])

    def judge(before: dict[str, Any], size: int | None, limit: int) -> Suggestion:
        if size is None:
            return Suggestion()
        if size <= 0:
            return Suggestion(size, "negative")
        after = next(restarted)
        if after["outcome"] != "started":
            return Suggestion(size, outcome(after))
        if (over := after["process_peak"] - limit) > 0:
            return Suggestion(size, f"{over / MIB:.0f} too much")
        if (fewer := before["blocks"] - after["blocks"]) > 0:
            return Suggestion(size, f"{fewer} blocks fewer")
        return Suggestion(size, "true")

    told = []
    for asked, before in zip(cases, first, strict=True):
        limits = requested(percent(asked)), MEMORY
        pairs = zip(sizes(before), limits, strict=True)
        told.append([judge(before, size, limit) for size, limit in pairs])
    return told


def sizes(result: dict[str, Any]) -> list[int | None]:
    """If one is missing, it is the smaller, which does not fit."""
    found = list(result.get("suggested", []))
    return [None] * (len(WHERE) - len(found)) + found


def verdict(told: list[dict[str, list[Suggestion]]]) -> Iterator[str]:
    for site in SITES:
        for i, where in enumerate(WHERE):
            made = [row[site][i] for row in told if row[site][i].size is not None]
            true = sum(suggestion.true for suggestion in made)
            yield f"- {NAMES[site]}, fills {where}: {true} of {len(made)} are true"


if __name__ == "__main__":
    command(main)

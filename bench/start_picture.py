"""Draw how far starts peak above or below their budgets, as SVG: a strip for each model
and runner, from the table that `make bench-start` prints.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import NamedTuple

from bench.start import MEMORY, MIB
from bench.virtual import NAMES, SITES
from scripts.commands import Problem, command, write_whole

TABLE, PICTURE = "docs/data/start-within-the-budget.md", "docs/start-peaks.svg"
CELLS = 11
COLORS = dict(zip(SITES, ("#c33", "#37b"), strict=True))
WIDTH, LEFT, RIGHT, TOP, STRIP = 720, 120, 700, 96, 30
TICK = 100  # MiB


class Start(NamedTuple):
    model: str
    runner: str
    site: str
    mib: float
    """Peak minus budget."""


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--table", type=Path, help=f"the printed table ({TABLE})")
    parser.add_argument("--out", type=Path, help=f"SVG file ({PICTURE})")


def main(args: argparse.Namespace) -> None:
    table = args.table or args.root / TABLE
    out = args.out or args.root / PICTURE
    starts = read(table.read_text())
    if not starts:
        raise Problem(f"{table}: it has no row of the table that bench.start prints.")
    write_whole(out, picture(starts))
    print(out)


def read(text: str) -> list[Start]:
    """The starts of each row that came up."""
    found = []
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) != CELLS or not cells[2].startswith(("0.", "1.")):
            continue
        for site, first in zip(SITES, (3, 7), strict=True):
            if cells[first] == "starts":
                budget = float(cells[2]) * MEMORY / MIB
                above = (float(cells[first + 1]) - 1) * budget
                found.append(Start(cells[0], cells[1], site, above))
    return found


def picture(starts: list[Start]) -> str:
    low, high = (
        TICK * edge(end(start.mib for start in starts) / TICK)
        for edge, end in ((math.floor, min), (math.ceil, max))
    )

    def place(mib: float) -> float:
        return LEFT + (RIGHT - LEFT) * (mib - low) / (high - low)

    strips = list(dict.fromkeys(start[:2] for start in starts))
    bottom, budget = TOP + STRIP * len(strips), place(0)
    device = f"a virtual device of {MEMORY / (1 << 30):.1f} GiB"
    parts = [
        text(16, 24, f"Peak of each start on {device}", 'font-weight="bold"'),
        text(16, bottom + 46, "MiB above or below the budget, of starts that came up"),
        f'<path d="M{budget:.1f} {TOP - 20}V{bottom + 6}" stroke="#222"/>',
        text(budget - 8, TOP - 8, "within the budget", 'text-anchor="end"'),
        text(budget + 8, TOP - 8, "above"),
    ]
    for number, (site, name) in enumerate(NAMES.items()):
        own = [start for start in starts if start.site == site]
        above = sum(start.mib > 0 for start in own)
        x = 22 + 300 * number
        told = f"{name}: {above} of {len(own)} starts above the budget"
        parts += [dot(x, 48, site), text(x + 10, 52, told)]
    for number, strip in enumerate(strips):
        top = TOP + STRIP * number
        parts.append(f'<path d="M16 {top}H{RIGHT}" stroke="#ddd"/>')
        parts.append(text(16, top + STRIP / 2 + 4, ", ".join(strip)))
        for lane, site in enumerate(SITES):
            y = top + STRIP * (1 + 2 * lane) / 4
            own = [s for s in starts if s[:3] == (*strip, site)]
            parts += [dot(place(start.mib), y, site) for start in own]
    for tick in range(low, high + 1, TICK):
        parts.append(text(place(tick), bottom + 22, f"{tick}", 'text-anchor="middle"'))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" '
        f'height="{bottom + 60}" font-family="sans-serif" font-size="13" fill="#222">'
        f'<rect width="100%" height="100%" fill="white"/>{"".join(parts)}</svg>\n'
    )


def dot(x: float, y: float, site: str) -> str:
    return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.5" fill="{COLORS[site]}"/>'


def text(x: float, y: float, told: str, more: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" {more}>{told}</text>'


if __name__ == "__main__":
    command(main)

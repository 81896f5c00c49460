"""Draw the peaks of starts relative to their requests, as SVG: a strip for each model
and runner, from the table that `make bench-start` prints.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import NamedTuple

from bench.virtual import NAMES, SITES
from scripts.commands import Problem, command, write_whole

TABLE, PICTURE = "docs/data/start-within-the-budget.md", "docs/start-peaks.svg"
CELLS = 11
COLORS = dict(zip(SITES, ("#c33", "#37b"), strict=True))
WIDTH, LEFT, RIGHT, TOP, STRIP = 720, 118, 650, 112, 34
# Peak by requested at LEFT and at RIGHT; a larger one is a triangle with its figure.
LOW, HIGH = 0.6, 1.2


class Start(NamedTuple):
    model: str
    runner: str
    site: str
    starts: bool
    ratio: float
    """Peak by requested."""


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
    """Both starts of each row."""
    found = []
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) != CELLS or not cells[2].startswith(("0.", "1.")):
            continue
        for site, first in zip(SITES, (3, 7), strict=True):
            starts, ratio = cells[first] == "starts", float(cells[first + 1])
            found.append(Start(cells[0], cells[1], site, starts, ratio))
    return found


def title(starts: list[Start]) -> str:
    most = excess(starts, SITES[0], started=True)
    over = sum(s.ratio > 1 for s in starts if s.site == SITES[1])
    return (
        f"Stock starts take up to {most} more memory than requested; "
        f"patched {f'too, {over} times' if over else 'none'}"
    )


def excess(starts: list[Start], site: str, started: bool) -> str:
    ratios = [s.ratio for s in starts if s.site == site and s.starts == started]
    return f"{100 * (max([1.0, *ratios]) - 1):.0f} %"


def picture(starts: list[Start]) -> str:
    strips = list(dict.fromkeys((s.model, s.runner) for s in starts))
    bottom = TOP + STRIP * len(strips)
    parts = [text(16, 26, title(starts), 'font-weight="bold" font-size="14.5"')]
    parts += legend(starts)
    asked = place(1)
    parts.append(
        f'<rect x="{asked:.1f}" y="{TOP}" width="{WIDTH - 12 - asked:.1f}" '
        f'height="{bottom - TOP}" fill="#fbe9e7"/>'
    )
    parts.append(text(asked - 8, TOP - 8, "within the request", 'text-anchor="end"'))
    parts.append(text(asked + 8, TOP - 8, "took more than it asked for"))
    for number, strip in enumerate(strips):
        top = TOP + STRIP * number
        parts.append(f'<path d="M16 {top}H{WIDTH - 12}" stroke="#ddd"/>')
        parts.append(text(16, top + STRIP / 2 + 4, f"{strip[0]}, {strip[1]}"))
        for lane, site in enumerate(SITES):
            y = top + STRIP * (1 + 2 * lane) / 4
            parts += marks([s for s in starts if s[:3] == (*strip, site)], y)
    parts.append(f'<path d="M16 {bottom}H{WIDTH - 12}" stroke="#ddd"/>')
    parts.append(
        f'<path d="M{asked:.1f} {TOP - 20}V{bottom + 6}" stroke="#222" '
        'stroke-width="1.5"/>'
    )
    for tick in (0.6, 0.7, 0.8, 0.9, 1.0, 1.1, 1.2):
        label = f"{100 * tick:.0f} %"
        parts.append(text(place(tick), bottom + 22, label, 'text-anchor="middle"'))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" '
        f'height="{bottom + 34}" font-family="sans-serif" font-size="13" fill="#222">'
        f'<rect width="100%" height="100%" fill="white"/>{"".join(parts)}</svg>\n'
    )


def legend(starts: list[Start]) -> list[str]:
    parts, x = [], 22.0
    for site, name in zip(SITES, NAMES.values(), strict=True):
        of_site = [s for s in starts if s.site == site]
        over = sum(s.ratio > 1 for s in of_site)
        told = f"{name}: {over} of {len(of_site)} starts above"
        parts += [dot(x, 50, COLORS[site], True), text(x + 10, 54, told)]
        x += 225
    most = excess(starts, SITES[0], started=False)
    told = f"did not start (up to {most} more)"
    parts += [dot(x, 50, "#666", False), text(x + 10, 54, told)]
    told = (
        "Each dot is a start: its peak memory, in % of what "
        "--gpu-memory-utilization requests."
    )
    return [*parts, text(16, 76, told, 'fill="#666"')]


def marks(starts: list[Start], y: float) -> list[str]:
    parts = [
        dot(place(s.ratio), y, COLORS[s.site], s.starts)
        for s in starts
        if s.ratio <= HIGH
    ]
    beyond = [s for s in starts if s.ratio > HIGH]
    if beyond:
        most = max(beyond, key=lambda start: start.ratio)
        color = COLORS[most.site]
        parts.append(
            f'<path class="beyond" d="M{RIGHT + 2} {y - 5}l9 5l-9 5z" '
            f'fill="{color if most.starts else "none"}" stroke="{color}"/>'
        )
        parts.append(text(RIGHT + 16, y + 4, f"{100 * most.ratio:.0f} %"))
    return parts


def place(ratio: float) -> float:
    return LEFT + (RIGHT - LEFT) * (max(ratio, LOW) - LOW) / (HIGH - LOW)


def dot(x: float, y: float, color: str, filled: bool) -> str:
    return (
        f'<circle cx="{x:.1f}" cy="{y}" r="4" fill="{color if filled else "none"}" '
        f'fill-opacity="0.7" stroke="{color}"/>'
    )


def text(x: float, y: float, told: str, more: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y}"{" " * bool(more)}{more}>{told}</text>'


if __name__ == "__main__":
    command(main)

"""Draw a worker's memory report (VLLM_STARTUP_MEMORY_REPORT) as SVG: one bar for the
memory of the device.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from scripts.commands import Problem, command, write_whole

MIB = 1 << 20
WIDTH, HEIGHT, LEFT, TOP = 900, 70, 20, 50
COLORS = {
    "others": "#bbb",
    "held before": "#888",
    "weights": "#27567b",
    "kv cache": "#3b8ea5",
    "cuda graphs": "#7b5ea7",
    "other torch": "#b07aa1",
    "outside torch": "#9c755f",
    "peak activations": "#e0a030",
    "fragmentation buffer": "#e8c468",
    "multimodal reserve": "#c9a66b",
    "left": "#d8ead3",
    "not requested": "#f4f4f4",
}


class Piece(NamedTuple):
    name: str
    size: int
    """Bytes."""


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("report", type=Path, help="JSON file of a worker")
    parser.add_argument("--out", type=Path, help="SVG file (next to the report)")


def main(args: argparse.Namespace) -> None:
    try:
        report = json.loads(args.report.read_text())
        drawn = picture(report)
    except (ValueError, KeyError) as error:
        raise Problem(
            f"{args.report}: a report as VLLM_STARTUP_MEMORY_REPORT writes it is "
            f"wanted; {error!r}"
        ) from error
    out = args.out or args.report.with_suffix(".svg")
    write_whole(out, drawn)
    print(out)


def pieces(report: dict[str, Any]) -> Iterator[Piece]:
    """The positive ones sum to the total."""
    held = report["held_before"]
    others = report["total"] - report["free_before"] - held
    yield Piece("others", others)
    yield Piece("held before", held)
    for name, size in (report["in_use"] | report["set_aside"]).items():
        yield Piece(name.replace("_", " "), size or 0)
    yield Piece("left", report["left"])
    rest = report["free_before"] - report["requested"] + min(report["left"], 0)
    yield Piece("not requested", rest)


def picture(report: dict[str, Any]) -> str:
    scale = (WIDTH - 2 * LEFT) / report["total"]
    parts = []
    x, y = float(LEFT), TOP + HEIGHT + 40
    for piece in pieces(report):
        color = COLORS[piece.name]
        if piece.size > 0:
            parts.append(
                f'<rect x="{x:.1f}" y="{TOP}" width="{piece.size * scale:.1f}" '
                f'height="{HEIGHT}" fill="{color}" stroke="white"/>'
            )
            x += piece.size * scale
        if piece.size:
            parts.append(
                f'<rect x="{LEFT}" y="{y - 11}" width="12" height="12" fill="{color}" '
                f'stroke="#888"/><text x="{LEFT + 20}" y="{y}">{piece.name}</text>'
                f'<text x="{LEFT + 300}" y="{y}" text-anchor="end">'
                f"{piece.size / MIB:,.1f} MiB</text>"
            )
            y += 20
    first = LEFT + (report["total"] - report["free_before"]) * scale
    end = first + report["requested"] * scale
    total = report["total"] / MIB
    parts.append(
        f'<path d="M{first:.1f} {TOP - 4}v-8H{end:.1f}v8" fill="none" stroke="#444"/>'
        f'<text x="{(first + end) / 2:.1f}" y="{TOP - 18}" text-anchor="middle">'
        f"requested: {report['requested'] / MIB:,.1f} MiB</text>"
        f'<text x="{LEFT}" y="{TOP + HEIGHT + 18}">{report["device"]}, '
        f"{total:,.1f} MiB in total</text>"
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{y}" '
        'font-family="sans-serif" font-size="13"><rect width="100%" height="100%" '
        f'fill="white"/>{"".join(parts)}</svg>\n'
    )


if __name__ == "__main__":
    command(main)

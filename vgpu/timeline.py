"""Reads a timeline: a table of peaks and causes, and a picture of both over time."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from xml.sax.saxutils import escape

from .errors import VgpuError

OTHERS = "other processes"
NOT_MEMORY = ("phase", "phase end", "start")
COLORS = ("#4e79a7", "#f28e2b", "#59a14f", "#e15759", "#76b7b2", "#edc948", "#b07aa1")


@dataclass(frozen=True)
class Event:
    """One change: seconds (monotonic), and bytes."""

    t: float
    pid: int
    device: int
    cause: str
    bytes: int
    process_used: int
    used: int
    phase: str


def read(path: Path) -> list[Event]:
    """The events in order of time; a torn last line is left out."""
    try:
        lines = path.read_text(errors="replace").splitlines()
    except OSError as error:
        raise VgpuError(f"cannot read {path}: {error.strerror}") from None
    events = []
    for number, line in enumerate(lines, 1):
        try:
            events.append(Event(**json.loads(line)))
        except (ValueError, TypeError):
            if number == len(lines):
                break
            raise VgpuError(f"{path}:{number} is no timeline event") from None
    return sorted(events, key=lambda e: e.t)


@dataclass
class Series:
    """Bytes held by each cause after each event of one device."""

    seconds: list[float]
    causes: list[str]
    held: list[list[int]]  # [event][cause]
    used: list[int]
    phases: list[str]


def series(events: Iterable[Event], device: int) -> Series:
    """Bytes by cause over time. A process that ends returns the bytes of each of its
    causes. Other processes' memory at the start is `used` minus the rest."""
    own = [e for e in events if e.device == device]
    by: dict[tuple[int, str], int] = defaultdict(int)
    names: list[str] = [OTHERS]
    for e in own:
        if e.cause not in (*NOT_MEMORY, "process end", "other process", *names):
            names.append(e.cause)
    result = Series([], names, [], [], [])
    start = own[0].t if own else 0.0
    for e in own:
        if e.cause == "process end":
            for key in [k for k in by if k[0] == e.pid]:
                by[key] = 0
        elif e.cause not in (*NOT_MEMORY, "other process"):
            by[e.pid, e.cause] += e.bytes
        held = [0] * len(names)
        for (_, cause), size in by.items():
            held[names.index(cause)] += size
        held[0] = e.used - sum(held[1:])
        result.seconds.append(e.t - start)
        result.held.append(held)
        result.used.append(e.used)
        result.phases.append(e.phase)
    return result


def mib(size: int) -> str:
    return f"{size / 2**20:,.2f}"


def table(events: Sequence[Event]) -> str:
    """Peak and final MiB by cause and by phase, one block a device."""
    lines = []
    for device in sorted({e.device for e in events}):
        s = series(events, device)
        if not s.used:
            continue
        top = max(range(len(s.used)), key=lambda i: s.used[i])
        lines.append(f"device {device}: {len(s.used)} changes, MiB")
        lines.append(
            f"  {'cause':24} {'at the peak':>14} {'its own peak':>14} {'last':>14}"
        )
        for i, cause in enumerate(s.causes):
            own = max(h[i] for h in s.held)
            if own:
                lines.append(
                    f"  {cause:24} {mib(s.held[top][i]):>14} {mib(own):>14} "
                    f"{mib(s.held[-1][i]):>14}"
                )
        lines.append(
            f"  {'used':24} {mib(s.used[top]):>14} {mib(s.used[top]):>14} "
            f"{mib(s.used[-1]):>14}"
        )
        phases: dict[str, int] = {}
        for phase, used in zip(s.phases, s.used, strict=True):
            if phase:
                phases[phase] = max(phases.get(phase, 0), used)
        for phase, used in phases.items():
            lines.append(f"  peak of phase {phase:10} {mib(used):>14}")
    return "\n".join(lines)


WIDTH, HEIGHT, LEFT, TOP, RIGHT, BOTTOM = 960, 360, 80, 40, 190, 40


def _device_svg(s: Series, device: int, top: int) -> list[str]:
    end = max(s.seconds[-1], 1e-9)
    peak = max(*s.used, 1)
    width, height = WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM

    def x(seconds: float) -> float:
        return LEFT + width * seconds / end

    def y(size: float) -> float:
        return top + TOP + height * (1 - size / peak)

    out = [
        f'<text x="{LEFT}" y="{top + 20}" font-weight="bold">device {device}, '
        f"peak {mib(peak)} MiB</text>"
    ]
    below = [0] * len(s.used)
    for i, cause in enumerate(s.causes):
        if not any(h[i] for h in s.held):
            continue
        above = [b + h[i] for b, h in zip(below, s.held, strict=True)]
        upper, lower = [], []
        for n, seconds in enumerate(s.seconds):
            until = s.seconds[n + 1] if n + 1 < len(s.seconds) else end
            upper += [(seconds, above[n]), (until, above[n])]
            lower += [(seconds, below[n]), (until, below[n])]
        points = " ".join(f"{x(t):.1f},{y(v):.1f}" for t, v in [*upper, *lower[::-1]])
        color = COLORS[i % len(COLORS)]
        out.append(f'<polygon points="{points}" fill="{color}"/>')
        row = top + TOP + 18 * i
        out.append(
            f'<rect x="{WIDTH - RIGHT + 14}" y="{row}" width="12" height="12" '
            f'fill="{color}"/><text x="{WIDTH - RIGHT + 32}" y="{row + 11}">'
            f"{escape(cause)}</text>"
        )
        below = above
    for fraction in (0, 0.25, 0.5, 0.75, 1):
        level = y(peak * fraction)
        out.append(
            f'<line x1="{LEFT}" y1="{level:.1f}" x2="{WIDTH - RIGHT}" y2="{level:.1f}" '
            f'stroke="#8884"/><text x="{LEFT - 6}" y="{level + 4:.1f}" '
            f'text-anchor="end">{peak * fraction / 2**20:,.0f} MiB</text>'
        )
    before = ""
    for seconds, phase in zip(s.seconds, s.phases, strict=True):
        if phase != before:
            out.append(
                f'<line x1="{x(seconds):.1f}" y1="{top + TOP}" x2="{x(seconds):.1f}" '
                f'y2="{top + HEIGHT - BOTTOM}" stroke="#0008" stroke-dasharray="3"/>'
                f'<text x="{x(seconds) + 3:.1f}" y="{top + TOP - 4}">'
                f"{escape(phase)}</text>"
            )
            before = phase
    out.append(
        f'<text x="{WIDTH - RIGHT}" y="{top + HEIGHT - BOTTOM + 18}" '
        f'text-anchor="end">{end:.2f} s</text>'
    )
    return out


def svg(events: Sequence[Event]) -> str:
    """A stacked picture of used bytes by cause, one panel a device."""
    devices = sorted({e.device for e in events})
    body: list[str] = []
    for n, device in enumerate(devices):
        body += _device_svg(series(events, device), device, n * HEIGHT)
    total = HEIGHT * max(len(devices), 1)
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{total}" '
            f'viewBox="0 0 {WIDTH} {total}" font-family="sans-serif" font-size="12">',
            f'<rect width="{WIDTH}" height="{total}" fill="white"/>',
            *body,
            "</svg>\n",
        ]
    )

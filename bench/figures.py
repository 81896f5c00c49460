"""Fill in the figures of the pages, each from the file that has it.

A page names a figure between marks: <!-- figure: NAME -->figure<!-- end -->. --check
writes nothing and fails if a page differs. One file, however long: it is the list of
figures, a function each.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable, Iterator
from math import ceil
from pathlib import Path
from statistics import median, quantiles
from typing import Any

from bench import kv_table, published_runs
from scripts import topics
from scripts.commands import Problem, command, write_whole

MARK = re.compile(r"(<!-- figure: ([\w-]+) -->)(.*?)(<!-- end -->)", re.S)
MIB, GIB = 1 << 20, 1 << 30
RANDOM = "docs/data/random-starts.json"
CALLER = "docs/data/caller-programs.json"
STARTS = "docs/data/start-within-the-budget.md"
ROWS = "docs/data/never-worse.md"
SERVING = "docs/fragmentation.md"
START_TIME = "docs/extensible-kv-cache.md"
FIRST_START = "docs/first-start.md"
SUGGESTED = "docs/suggested-kv-cache.md"
REAL = "docs/plan-against-real-cards.md"
PINNING = "patches/v0.33.0/keep-the-state-of-sleep-mode-in-the-extension.patch"


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--check", action="store_true", help="write nothing")


def main(args: argparse.Namespace) -> None:
    for path in pages(args.root):
        text = path.read_text()
        new = filled(args.root, text)
        if new == text:
            continue
        name = path.relative_to(args.root)
        if args.check:
            raise Problem(f"{name} has other figures than the files: 'make figures'.")
        write_whole(path, new)
        print(name)


def pages(root: Path) -> list[Path]:
    """topics.toml has figures in the costs of sets."""
    first = [root / name for name in ("README.md", "patches/README.md", topics.FILE)]
    return [*first, *sorted((root / "docs").glob("*.md"))]


def filled(root: Path, text: str) -> str:
    """`text` with its figures as the files have them.

    Raises:
        Problem: no such figure is known.
    """

    def figure(match: re.Match[str]) -> str:
        if match[2] not in FIGURES:
            raise Problem(f"no figure is called {match[2]}: bench/figures.py.")
        return match[1] + FIGURES[match[2]](root) + match[4]

    return MARK.sub(figure, text)


# ---- tables


def table(path: Path, head: str, until: str = "\n\n") -> Iterator[list[str]]:
    """The cells of each row below the line that begins with `head`.

    Raises:
        Problem: there is none.
    """
    _, found, rest = path.read_text().partition(f"\n{head}")
    lines = rest.partition(until)[0].splitlines()[2:]
    if not found or not lines:
        raise Problem(f"{path} has no table that begins with {head!r}.")
    for line in lines:
        yield [cell.strip() for cell in line.strip("|").split("|")]


def span(values: list[float], form: str) -> str:
    return f"{min(values):{form}} to {max(values):{form}}"


# ---- the virtual device


def planned_models(root: Path) -> str:
    """Of configs, those that `make plan` started.

    Raises:
        Problem: an engine has another number of tokens than the table.
    """
    known = json.loads((root / kv_table.DATA).read_text())
    started = [told for told in known.values() if isinstance(told.get("plan"), int)]
    if any(told["plan"] != told["tokens"] for told in started):
        raise Problem(f"{kv_table.DATA} has an engine with other KV tokens.")
    return f"{len(started)} of {len(known)} models start, each with the same number"


def caller_steps(root: Path) -> str:
    """Of programs whose every step is equal.

    Raises:
        Problem: one differs.
    """
    programs = json.loads((root / CALLER).read_text())["programs"]
    if not all(program["equal"] for program in programs):
        raise Problem(f"{CALLER} has a program that differs.")
    steps = sum(program["steps"] for program in programs)
    return f"{steps:,} steps of {len(programs)} programs"


def starts_above(root: Path) -> str:
    rows = list(table(root / STARTS, "| model |"))
    stock = sum(float(row[4]) > 1 for row in rows)
    patched = sum(float(row[8]) > 1 for row in rows)
    return (
        f"stock vLLM went above its budget in {stock} of {len(rows)} starts, "
        f"the patched build in {patched}"
    )


def full_batches(root: Path) -> str:
    rows = list(table(root / ROWS, "| model |"))
    kept = [
        sum(r[at] == "starts" and float(r[at + 1]) <= 1 and r[at + 2] == "served"
            for r in rows)
        for at in (5, 10)
    ]  # fmt: skip
    return (
        f"stock vLLM stayed within its budget in {kept[0]} of {len(rows)} "
        f"configurations, the patched build in {kept[1]}"
    )


def less_kv_cache(root: Path, hybrid: bool) -> str:
    """Stock minus patched, where both start."""
    less = [
        float(row[8]) - float(row[13])
        for row in table(root / ROWS, "| model |")
        if row[8] and row[13] and (row[0] == "hybrid") == hybrid
    ]
    return f"{span(less, '.0f')} MiB"


def serving_above(root: Path) -> str:
    rows = list(table(root / SERVING, "| case | stock: peak, MiB |"))
    stock, patched = (
        [above for row in rows if (above := int(row[at]) - 24 * 1024) > 0]
        for at in (1, 5)
    )
    return (
        f"{len(patched)} of {len(rows)} loads, by up to {max(patched)} MiB, and stock "
        f"in {len(stock)}"
    )


def loads(root: Path) -> str:
    """Out of memory of all loads: the cell is "20 of 20"."""

    def share(column: int) -> str:
        cells = [r[column] for r in table(root / SERVING, "| case | activations, MiB ")]
        failed, every = zip(*(cell.split(" of ") for cell in cells), strict=True)
        return f"{sum(map(int, failed))} of {sum(map(int, every))}"

    return (
        f"stock vLLM ran out of memory in {share(2)} loads, "
        f"the patched build in {share(5)}"
    )


def random_starts(root: Path) -> str:
    rows = json.loads((root / RANDOM).read_text())["starts"].values()

    def number(build: str, what: str) -> int:
        return sum(row[build] == what for row in rows)

    def beyond(build: str) -> int:
        return sum(row[f"{build} above"] > 0 for row in rows)

    lost = sum(row["stock"] == "serves" and row["patched"] != "serves" for row in rows)
    less = [row for row in rows if row["verdict"].endswith("less of KV cache")]
    both = [row["less"] - row["stock above"] for row in less]
    return (
        f"of {len(rows)} starts, stock vLLM serves {number('stock', 'serves')} and "
        f"exceeds its budget in {beyond('stock')}; the patched build serves "
        f"{number('patched', 'serves')} and exceeds it in {beyond('patched')}. {lost} "
        "that stock vLLM serves it does not. "
        f"In {len(less)} its KV cache is over 128 MiB smaller, and by more than stock "
        f"vLLM exceeds its budget: by at most {max(both) // MIB} MiB more"
    )


def suggestions(root: Path) -> str:
    rows = list(table(root / SUGGESTED, "| model | runner |"))

    def share(column: int) -> str:
        made = [row[column] for row in rows if row[column]]
        return f"{sum(one.endswith(': true') for one in made)} of {len(made)}"

    return (
        f"{share(3)} suggestions of stock vLLM for the budget and {share(4)} for the "
        f"device, {share(5)} and {share(6)} of the patched build"
    )


def extended(root: Path) -> str:
    """KV cache with the flag minus that with the estimate."""
    rows = table(root / START_TIME, "| model | runner | utilization |")
    return f"{span([float(row[10]) - float(row[7]) for row in rows], '+.0f')} MiB"


def first_starts(root: Path) -> str:
    rows = list(table(root / FIRST_START, "| model | device |"))

    def smaller(cold: int) -> int:
        tokens = [[int(cell.replace(",", "")) for cell in row[cold:]] for row in rows]
        return sum(first < second for first, second, *_ in tokens)

    return (
        f"stock vLLM in {smaller(4)} of {len(rows)} starts of whole models, "
        f"with the patched build in {smaller(6)}"
    )


def remapping(root: Path) -> str:
    """Cost of a step that remaps pages: the model's time of the steps in the table of
    calls, by the pages that those steps unmap."""
    served = {
        row[0]: row for row in table(root / SERVING, "| case | activations, MiB ")
    }
    calls = {
        row[0]: row
        for row in table(root / SERVING, "| case | vLLM | tokens |")
        if row[2].startswith("2049")
    }
    cost = []
    for case in ("8B", "8B of 32 layers"):
        unmapped = float(served[case][8].split(",")[1])
        each = float(calls[case][12]) / float(calls[case][9])
        cost.append(unmapped * each)
    steps = served["8B"][6]
    return f"{steps} steps, about {cost[0]:.0f} ms (8 layers) or {cost[1]:.0f} ms (32)"


def start_time(root: Path, column: int) -> str:
    rows = table(root / START_TIME, "| model | runner | stock, s |")
    return f"{span([float(row[column]) for row in rows], '.2f')} of stock"


def real_cards(root: Path, runs: str) -> str:
    for row in table(root / REAL, "| runs | quantity |"):
        if row[:2] == [runs, "KV tokens"]:
            return f"{row[3]} on average and {row[4]} at worst in {row[2]} runs"
    raise Problem(f"{REAL} has no row {runs}.")


def pinning_each(root: Path) -> list[float]:
    """CPU-seconds per GiB: in huge pages, and in small ones."""
    text = " ".join((root / PINNING).read_text().split())
    found = re.search(r"took (0\.\d+) s of a processor.*? of 2 MiB (0\.\d+) s", text)
    if not found:
        raise Problem(f"{PINNING} does not say what pinning takes.")
    return sorted(map(float, found.groups()))


def pinning(root: Path) -> str:
    huge, small = pinning_each(root)
    return f"{huge} CPU-seconds per GiB with huge pages, {small} with 4 KiB pages"


# ---- GPUs


def cases(root: Path) -> Iterator[tuple[str, str, dict[str, Any], dict[str, Any]]]:
    """GPU, name, stock and patched result of each case of the suite."""
    for path in sorted((root / "results").glob("*.json")):
        content = json.loads(path.read_text())
        gpu = content["gpu"]["name"].split()[1]
        for name, case in content.get("cases", {}).items():
            if "unpatched" in case and "patched" in case:
                yield gpu, name, case["unpatched"], case["patched"]


def gpu_time(root: Path) -> str:
    """How long the suite ran, by GPU."""
    seconds: dict[str, float] = {}
    for path in sorted((root / "results").glob("*.json")):
        content = json.loads(path.read_text())
        if "cases" in content:
            gpu = content["gpu"]["name"].split()[1]
            seconds[gpu] = seconds.get(gpu, 0) + content["seconds"]
    return " and ".join(f"{s / 60:.0f} minutes ({gpu})" for gpu, s in seconds.items())


def gpu_starts(root: Path, warm: bool) -> str:
    """Warm where neither compiled Triton's kernels, which both share."""
    ratios = [
        patched["seconds"]["engine"] / stock["seconds"]["engine"]
        for _, name, stock, patched in cases(root)
        if "extensible" not in name
        and (name == "serving: dense") == warm
        and all("engine" in as_dict(r.get("seconds")) for r in (stock, patched))
    ]
    return f"{span(ratios, '.2f')} of stock in {len(ratios)} pairs"


def as_dict(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def gpu_steps(root: Path, model: str) -> str:
    """Three ways to average pairs of turns, over all sessions."""
    averages, pairs = [], []
    for _, name, stock, patched in cases(root):
        if name == f"serving: {model}" and "ms_per_step" in patched:
            ratios = [
                p / s for s, p in zip(stock["decode"], patched["decode"], strict=False)
            ]
            pairs += ratios
            averages += [
                median(ratios),
                median(patched["decode"]) / median(stock["decode"]),
                sum(patched["decode"]) / sum(stock["decode"]),
            ]
    return f"{span(averages, '.3f')} ({of_pairs(pairs)})"


def of_pairs(ratios: list[float]) -> str:
    low, _, high = quantiles(ratios, n=4)
    return f"{len(ratios)} pairs, quartiles {low:.2f} to {high:.2f}"


def gpu_sleep(root: Path, level: int, first: bool) -> str:
    """Wall clock of sleep and wake-up, in pairs of cycles."""
    ratios = [
        took(patched) / took(stock)
        for _, name, *results in cases(root)
        if name == "sleep cycles"
        for stock, patched in zip(*(r["cycles"] for r in results), strict=True)
        if stock["level"] == level and (stock["cycle"] == 0) == first
    ]
    return f"{median(ratios):.2f} of stock ({of_pairs(ratios)})"


def took(cycle: dict[str, Any]) -> float:
    return float(cycle["sleep"]["wall"] + cycle["wake"]["wall"])


def gpu_kv_cache(root: Path, extensible: bool) -> str:
    less: dict[str, list[float]] = {}
    for gpu, name, stock, patched in cases(root):
        if (
            stock.get("kv")
            and patched.get("kv")
            and "limit" not in name
            and ("extensible" in name) == extensible
        ):
            one = (stock["kv"] - patched["kv"]) / MIB
            less.setdefault(gpu, []).append(one)
    return ", ".join(f"{smaller(sizes)} ({gpu})" for gpu, sizes in less.items())


def smaller(sizes: list[float]) -> str:
    if {f"{size:.0f}" for size in sizes} == {f"{sizes[0]:.0f}"}:
        word = "smaller" if sizes[0] > 0 else "larger"
        return f"{abs(sizes[0]):.0f} MiB {word}"
    return f"{span(sizes, '.0f')} MiB smaller"


def gpu_tests(root: Path) -> str:
    passed = [
        len(patched["passed"])
        for _, name, _, patched in cases(root)
        if name == "the patches' own tests" and "passed" in patched
    ]
    return str(max(passed))


def steps_of_callers(root: Path) -> list[list[str]]:
    """Rows of steps with a limit in bytes, in a caller's process."""
    rows = table(root / SERVING, "| model | limit |")
    return [row for row in rows if row[1] == "in bytes, a caller's process"]


def limit_per_step(root: Path) -> str:
    """The settings of a limit in bytes in a caller's process, by the fastest step on a
    GPU."""
    settings = [float(row[5]) for row in steps_of_callers(root)]
    fastest = min(stock["ms_per_step"] for _, _, stock, _ in cases(root)
                  if "ms_per_step" in stock)  # fmt: skip
    return f"{ceil(100 * max(settings) / fastest)} %"


def limit_calls(root: Path) -> str:
    """Calls of Python and C in a step with a limit in bytes, in a caller's process."""
    more = [100 * (int(row[8]) / int(row[7]) - 1) for row in steps_of_callers(root)]
    return f"{span(more, '.0f')} %"


def gpu_prediction(root: Path) -> str:
    paths = sorted((root / "results").glob("calibration-*.json"))
    starts = [
        start
        for path in paths
        for start in json.loads(path.read_text())["starts"].values()
    ]

    def off(key: str) -> float:
        def read(start: dict[str, Any], where: str) -> float:
            return float(start[where]["memory"][key])

        return max(abs(read(s, "predicted") / read(s, "card") - 1) for s in starts)

    return (
        f"KV cache within {100 * off('kv_cache'):.3f} %, "
        f"graph memory within {100 * off('graphs'):.1f} %, {len(starts)} patched starts"
    )


FIGURES: dict[str, Callable[[Path], str]] = {
    "starts-above": starts_above,
    "full-batches": full_batches,
    "random-starts": random_starts,
    "caller-steps": caller_steps,
    "planned-models": planned_models,
    "less-kv-cache": lambda root: less_kv_cache(root, hybrid=False),
    "less-kv-cache-of-hybrids": lambda root: less_kv_cache(root, hybrid=True),
    "serving-above": serving_above,
    "loads": loads,
    "suggestions": suggestions,
    "extended": extended,
    "first-starts": first_starts,
    "remapping": remapping,
    "start-time": lambda root: start_time(root, 3),
    "start-time-extensible": lambda root: start_time(root, 5),
    "real-cards": lambda root: real_cards(root, "config exact, same release"),
    "pinning": pinning,
    "gpu-time": gpu_time,
    "gpu-starts": lambda root: gpu_starts(root, warm=True),
    "gpu-starts-cold": lambda root: gpu_starts(root, warm=False),
    "gpu-steps-dense": lambda root: gpu_steps(root, "dense"),
    "gpu-steps-experts": lambda root: gpu_steps(root, "moe"),
    "gpu-sleep-first": lambda root: gpu_sleep(root, 1, first=True),
    "gpu-sleep-later": lambda root: gpu_sleep(root, 1, first=False),
    "gpu-sleep-level-2": lambda root: gpu_sleep(root, 2, first=False),
    "gpu-kv-cache": lambda root: gpu_kv_cache(root, extensible=False),
    "gpu-kv-cache-extensible": lambda root: gpu_kv_cache(root, extensible=True),
    "gpu-tests": gpu_tests,
    "gpu-prediction": gpu_prediction,
    "kv-bytes": kv_table.table,
    "added-runs": published_runs.added,
    "limit-per-step": limit_per_step,
    "limit-calls": limit_calls,
}


if __name__ == "__main__":
    command(main)

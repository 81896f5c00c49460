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
from itertools import takewhile
from math import ceil
from pathlib import Path
from statistics import median, quantiles
from typing import Any

from bench import kv_table, published_runs, safe
from scripts import topics
from scripts.commands import Problem, command, write_whole

MARK = re.compile(r"(<!-- figure: ([\w-]+) -->)(.*?)(<!-- end -->)", re.S)
MIB, GIB = 1 << 20, 1 << 30
RANDOM = "docs/data/random-starts.json"
CALLER = "docs/data/caller-programs.json"
ADVICE = "docs/data/advice.json"
STARTS = "docs/data/start-within-the-budget.md"
OF_SETS = "docs/data/sets.md"
ROWS = "docs/data/never-worse.md"
SERVING = "docs/data/serving.md"
START_TIME = "docs/data/start-time.md"
FIRST_START = "docs/first-start.md"
SUGGESTED = "docs/data/suggested-kv-cache.md"
ALL_ROWS = "| model | runner | mode |"
REAL = "docs/plan-against-real-cards.md"
PINNING = "patches/v0.33.0/undo-a-sleep-or-wake-up-that-fails.patch"


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
    each = root / published_runs.RUNS_PAGE
    return [*first, *sorted((root / "docs").glob("*.md")), each]


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


def table(path: Path, head: str, nth: int = 0) -> Iterator[list[str]]:
    """The cells of each row below the line that begins with `head`; `nth`: of several
    tables.

    Raises:
        Problem: there is none.
    """
    below = path.read_text().split(f"\n{head}")[1 + nth :]
    rest = below[0].splitlines()[2:] if below else []
    lines = list(takewhile(lambda line: line.startswith("|"), rest))
    if not lines:
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


def advice(root: Path) -> str:
    """Of starts that got too little, those whose errors advise what serves."""
    told = json.loads((root / ADVICE).read_text())["situations"].values()
    holds = [one["holds"] for one in told if "holds" in one]
    return f"{sum(holds)} of {len(holds)} errors in {len(told)} starts"


def starts_above(root: Path) -> str:
    """Of the starts that came up, those above their budget, and by how much."""
    budget = 2560  # MiB, of the device

    refused: list[bool] = []  # Whether stock vLLM refuses those of the patched build.

    def above(first: int) -> tuple[list[float], int]:
        rows = [r for r in table(root / STARTS, "| model |") if r[first] == "starts"]
        rows_above = [row for row in rows if float(row[first + 1]) > 1]
        refused[:] = [row[3] == "refused" for row in rows_above]
        over = [(float(r[first + 1]) - 1) * float(r[2]) * budget for r in rows_above]
        return over, len(rows)

    (stock, came_up), (patched, of_patched) = above(3), above(7)
    by = f", by {span(patched, '.0f')} MiB" if patched else ""
    if patched:
        by += f"; stock vLLM refuses {sum(refused)} of these {len(patched)} starts"
    return (
        f"{len(stock)} of {came_up} stock starts that came up went above their budget, "
        f"by {span(stock, '.0f')} MiB (median {median(stock):.0f}); of the patched "
        f"ones {len(patched)} of {of_patched}{by}"
    )


def full_batches(root: Path) -> str:
    rows = list(table(root / ROWS, ALL_ROWS))
    kept = [
        sum(r[at] == "starts" and float(r[at + 1]) <= 1 and r[at + 2] == "served"
            for r in rows)
        for at in (5, 10)
    ]  # fmt: skip
    return (
        f"stock vLLM stayed within its budget in {kept[0]} of {len(rows)} "
        f"configurations, the patched build in {kept[1]}"
    )


def less_kv_cache(root: Path) -> str:
    """Stock minus patched, where both start: all tables of small models."""
    less = [
        float(row[8]) - float(row[13])
        for nth in (0, 1)
        for row in table(root / ROWS, ALL_ROWS, nth)
        if row[8] and row[13]
    ]
    return of_starts(less)


def less_kv_cache_of_whole_models(root: Path) -> str:
    less = [float(r[8]) for r in table(root / FIRST_START, "| model | device |")]
    return f"{span(less, '.0f')} MiB"


def less_kv_cache_at_random(root: Path, limit: bool) -> str:
    """Of starts that both builds come up in; stock vLLM may be above its budget."""
    rows = json.loads((root / RANDOM).read_text())["starts"].values()
    less = [
        row["less"] / MIB
        for row in rows
        if "less" in row and ("a limit in bytes" in row["name"]) == limit
    ]
    return of_starts(less)


def less_kv_cache_of_set(root: Path, nth: int) -> str:
    rows = table(root / OF_SETS, "| model |", nth)
    return of_starts(
        [float(row[5]) - float(row[9]) for row in rows if row[5] and row[9]]
    )


def of_starts(less: list[float]) -> str:
    return (
        f"median {median(less):.0f} MiB, worst {max(less):.0f}, in {len(less)} starts"
    )


def oldest_table(root: Path) -> str:
    """Of those on the virtual device that figures are read from."""
    files = (
        STARTS, OF_SETS, ROWS, SERVING, START_TIME, FIRST_START, RANDOM, CALLER, ADVICE,
        SUGGESTED, safe.DATA, published_runs.RUNS_PAGE,
    )  # fmt: skip
    pattern = r"[Rr]ecorded\s+at\s+commit\s+`[\w-]+`\s+on\s+([\d-]{10})"
    found = [re.findall(pattern, (root / name).read_text()) for name in files]
    return str(min(day for days in found for day in days))


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
        failed, every = zip(
            *(r[column].split(" of ") for r in served(root, 0)), strict=True
        )
        return f"{sum(map(int, failed))} of {sum(map(int, every))}"

    return (
        f"stock vLLM ran out of memory in {share(2)} loads, the patched build in "
        f"{share(5)}"
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
    """Steps of the load that remaps most often, and the cost of such a step at worst:
    the model's time by page of the table of calls, times pages of the loads."""
    loads = [*served(root, 0), *served(root, 1)]
    calls = {
        row[0]: row
        for row in table(root / SERVING, "| case | vLLM | tokens |")
        if row[2].startswith("2049")
    }

    def ms(case: str, load: list[str]) -> float:
        row = calls[case]
        return float(load[8].split(",")[1]) * float(row[12]) / float(row[9])

    def cost(rows: list[list[str]], case: str) -> str:
        return f"{max(ms(case, r) for r in rows if r[0].startswith(case)):.0f}"

    def often(row: list[str]) -> float:
        steps, every = row[6].split(" of ")
        return int(steps) / int(every)

    usual, worst = loads[0], max(loads, key=often)
    large = "8B of 32 layers"
    free, bound = served(root, 0), served(root, 1)
    return (
        f"{usual[6]} steps, with long contexts {worst[6]}: {ms('8B', usual):.0f} ms "
        f"(8 layers), {cost(free, large)} (32), {cost(bound, large)} (limit)"
    )


def served(root: Path, nth: int) -> list[list[str]]:
    """Loads in exactly the budget; 1: also with a limit in bytes."""
    return list(table(root / SERVING, "| case | activations, MiB ", nth))


def start_time(root: Path, column: int) -> str:
    rows = table(root / START_TIME, "| model | runner | stock, s |")
    return f"{span([float(row[column]) for row in rows], '.2f')} of stock"


def real_cards(root: Path) -> str:
    """Of the runs that judge: nothing was fitted to them. The worst of both rows."""
    lines = published_runs.added(root).splitlines()
    rows = [line.split(" | ") for line in lines if line.startswith("| judging")]
    number = sum(int(row[1].split()[0]) for row in rows)
    mean, worst, graphs = (
        max(float(row[at].rstrip(" %|")) for row in rows) for at in (2, 3, 5)
    )
    quantities = list(table(root / REAL, "| runs | quantity |"))
    activations = max(
        float(row[4].rstrip(" %")) for row in quantities if row[1] == "activations"
    )
    return (
        f"at most {mean} % on average and {worst} % at worst in {number} runs that "
        f"nothing was fitted to; graphs by up to {graphs:.0f} %, activations by up to "
        f"{activations:.0f} %"
    )


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


def gpu_builds(root: Path) -> str:
    """Which builds ran on which GPU, and when."""
    found = set()
    for path in sorted((root / "results").glob("*.json")):
        content = json.loads(path.read_text())
        versions = content["versions"]
        build = versions.get("patched vllm") or versions["vllm"]
        patches = re.findall(r"envelope\.(?:[a-z]+\.)*(\d+)", build)[0]
        gpu = content["gpu"]["name"].split()[1]
        found.add((content["date"], f"{patches} patches on an {gpu}"))
    return ", ".join(f"{build} ({day})" for day, build in sorted(found))


def gpu_starts(root: Path) -> str:
    """Pairs, warm and not: one of them compiled Triton's kernels, which both share."""
    ratios = [
        patched["seconds"]["engine"] / stock["seconds"]["engine"]
        for _, name, stock, patched in cases(root)
        if "extensible" not in name
        and all("engine" in as_dict(r.get("seconds")) for r in (stock, patched))
    ]
    return f"{span(ratios, '.2f')} of stock in {len(ratios)} pairs"


def as_dict(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def gpu_steps(root: Path, model: str) -> str:
    """The median of the pairs of turns of each session."""
    medians, pairs = [], []
    for _, name, stock, patched in cases(root):
        if name == f"serving: {model}" and "ms_per_step" in patched:
            ratios = [
                p / s for s, p in zip(stock["decode"], patched["decode"], strict=False)
            ]
            pairs += ratios
            medians.append(median(ratios))
    return (
        f"medians {span(medians, '.3f')} of stock in {len(medians)} sessions "
        f"({of_pairs(pairs)})"
    )


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
    """`every` was counted by hand in the patches of that build."""
    passed = [
        len(patched["passed"])
        for _, name, _, patched in cases(root)
        if name == "the patches' own tests" and "passed" in patched
    ]
    every = 202
    return f"{max(passed)} of {every}"


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


def equal_safety(root: Path) -> str:
    """Patched KV tokens beside those of stock vLLM, lowered until it is as safe."""
    rows = json.loads((root / safe.DATA).read_text())["rows"]
    fit = [row for row in rows if safe.fits(row["patched"])]
    more = [
        r["patched"]["tokens"] / r["stock"]["tokens"] - 1 for r in fit if r["stock"]
    ]
    fewer = sum(share < 0 for share in more)
    return (
        f"more in {len(more) - fewer} of {len(rows)} configurations, by up to "
        f"{100 * max(more):.2f} %, and fewer in {fewer}, by up to "
        f"{-100 * min(more):.2f} %; out of memory in {len(rows) - len(fit)}"
    )


FIGURES: dict[str, Callable[[Path], str]] = {
    "equal-safety": equal_safety,
    "starts-above": starts_above,
    "full-batches": full_batches,
    "random-starts": random_starts,
    "caller-steps": caller_steps,
    "advice": advice,
    "planned-models": planned_models,
    "less-kv-cache": less_kv_cache,
    "less-kv-cache-whole": less_kv_cache_of_whole_models,
    "less-kv-cache-random": lambda root: less_kv_cache_at_random(root, limit=False),
    "less-kv-cache-limit": lambda root: less_kv_cache_at_random(root, limit=True),
    "less-kv-cache-core": lambda root: less_kv_cache_of_set(root, 0),
    "less-kv-cache-shared": lambda root: less_kv_cache_of_set(root, 1),
    "oldest-table": oldest_table,
    "serving-above": serving_above,
    "loads": loads,
    "suggestions": suggestions,
    "extended": extended,
    "first-starts": first_starts,
    "remapping": remapping,
    "start-time": lambda root: start_time(root, 3),
    "start-time-extensible": lambda root: start_time(root, 5),
    "real-cards": real_cards,
    "pinning": pinning,
    "gpu-time": gpu_time,
    "gpu-builds": gpu_builds,
    "gpu-starts": gpu_starts,
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

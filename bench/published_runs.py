"""Replay the runs on real cards that others have published (results/real-cards) on the
virtual device, each with its release of vLLM, and write how far the predictions are
from their logs: docs/plan-against-real-cards.md.

A run whose release has no environment here is replayed with the nearest that has one,
and marked. --results keeps the result of each start, and reads it again unless --again
is given.

One file, however long: the page and its runs are one command.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import shutil
import sys
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

from bench.simulated_start import Asked, Release, profile_of, simulate, why
from bench.virtual import recorded
from scripts.commands import Problem, command, scratch, write_whole

RUNS_PAGE = "docs/data/published-runs.md"
DATA = "results/real-cards"
REPLAYED = f"{DATA}/replayed.json"
PEERS = f"{DATA}/peers.json"
GIB = 1 << 30
MIB = 1 << 20
# By words of the published name; the others give the size of their card.
CARDS = {
    "H100": "h100",
    "A100 80GB": "a100-80gb",
    "RTX 4090": "rtx4090",
    "RTX PRO 6000": "rtx-pro-6000",
    "16 GB GPU": "rtx4090",
    "name not in the excerpt": "rtx5090",
}
FLAGS = {
    "max_model_len": "--max-model-len",
    "max_num_batched_tokens": "--max-num-batched-tokens",
    "max_num_seqs": "--max-num-seqs",
    "gpu_memory_utilization": "--gpu-memory-utilization",
    "dtype": "--dtype",
    "kv_cache_dtype": "--kv-cache-dtype",
    "max_cudagraph_capture_size": "--max-cudagraph-capture-size",
}
ESTIMATE = "vllm_memory_profiler_estimate_cudagraphs"


@dataclass(frozen=True)
class Quantity:
    name: str
    published: str
    """A field of a run."""
    key: str
    """Of what plan_engine.py tells."""
    bytes: bool = True

    def predicted(self, result: dict[str, Any]) -> float | None:
        """In GiB, or tokens."""
        found: int | None = result.get(self.key)
        return found / GIB if self.bytes and found is not None else found


QUANTITIES = [
    Quantity("weights", "model_loading_gib", "weights"),
    Quantity("activations", "torch_peak_increase_gib", "activations"),
    Quantity("outside torch", "non_torch_increase_gib", "non_torch"),
    Quantity("graphs", "cudagraph_actual_gib", "cuda_graphs"),
    Quantity("KV cache", "available_kv_gib", "kv_available"),
    Quantity("KV tokens", "kv_tokens", "kv_tokens", bytes=False),
]


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--only", default="", help="pattern: runs whose id has it")
    parser.add_argument("--again", action="store_true", help="start all of them")
    parser.add_argument(
        "--results", type=Path, help="folder of the results of each start "
        "(build/bench-plan)",
    )  # fmt: skip
    parser.add_argument("--page", type=Path, help=f"file to write, and {RUNS_PAGE}")


def main(args: argparse.Namespace) -> None:
    folder = args.root / DATA
    runs = tomllib.loads((folder / "runs.toml").read_text())["run"]
    chosen = [run for run in runs if re.search(args.only, run["id"])]
    if not chosen:
        raise Problem("--only: no run is left.")
    kept = args.results or args.root / "build/bench-plan"
    kept.mkdir(parents=True, exist_ok=True)
    rows = []
    for number, run in enumerate(chosen, 1):
        print(f"{number} of {len(chosen)}: {run['id']}", file=sys.stderr, flush=True)
        rows.append(replay(run, args.root, kept, args.again))
    record(args.root, rows)
    commit = recorded(args.root)
    text = page(rows, commit)
    if args.page:
        write_whole(args.page, text)
        write_whole(args.root / RUNS_PAGE, each_run(rows, commit))
    print(text)


# ---- a run


@dataclass(frozen=True)
class Row:
    run: dict[str, Any]
    release: str
    result: dict[str, Any]
    left_out: str = ""
    """Why it was not replayed."""

    @property
    def exact(self) -> bool:
        return bool(self.run["config_exact"]) and self.release == self.of_run

    @property
    def judges(self) -> bool:
        """Of the runs that were added later: nothing may be fitted to it. Decided by
        its id alone, before it was replayed."""
        digest = hashlib.sha256(self.run["id"].encode()).digest()
        return "added" in self.run and digest[-1] % 2 == 1

    @property
    def fits(self) -> bool:
        """Of those, constants may be fitted to it."""
        return "added" in self.run and not self.judges

    @property
    def of_run(self) -> str:
        return str(self.run["vllm_version"])

    def error(self, quantity: Quantity) -> float | None:
        """Predicted less published."""
        published = self.run.get(quantity.published)
        predicted = quantity.predicted(self.result)
        if published is None or predicted is None:
            return None
        return float(predicted - published)

    def share(self, quantity: Quantity) -> float | None:
        """The error relative to the published figure."""
        error = self.error(quantity)
        return None if error is None else error / float(self.run[quantity.published])


def replay(run: dict[str, Any], root: Path, kept: Path, again: bool) -> Row:
    version = nearest(root, run["vllm_version"])
    with scratch(root / "build", "bench-plan") as folder:
        release = Release.find(root, version, ours=None)
        try:
            start = asked(run, root, release, folder)
            file = kept / f"{digest(start)}.json"
            if file.exists() and not again:
                return Row(run, version, json.loads(file.read_text()))
            done = simulate(start, folder, run["id"])
        except Problem as problem:
            said = str(problem).replace(f"{folder}/", "").splitlines()[0]
            return Row(run, version, {}, said[:300])
    write_whole(file, json.dumps(done.result, indent=1) + "\n")
    return Row(run, version, done.result)


def digest(start: Asked) -> str:
    """The same for runs that start alike."""
    parts = [
        start.release.version,
        profile_of(start.gpu),
        str(sorted(start.device.items())),
        str(sorted(start.environment.items())),
        str(start.flags),
        str(start.warm),
    ]
    parts += [file.read_text() for file in sorted(Path(start.model).iterdir())]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]


def nearest(root: Path, version: str) -> str:
    """The release that has an environment, of those the nearest by number.

    Raises:
        Problem: there is none.
    """
    known = [
        path.name.removeprefix(".venv-vllm-")
        for path in root.glob(".venv-vllm-*")
        if (path / "ready").exists()
    ]
    if not known:
        raise Problem("'make vgpu' first.")

    def distance(other: str) -> tuple[int, ...]:
        pairs = zip(numbers(other), numbers(version), strict=False)
        return tuple(abs(a - b) for a, b in pairs)

    return min(known, key=distance)


def numbers(version: str) -> list[int]:
    return [int(part) for part in re.findall(r"\d+", version)]


def asked(run: dict[str, Any], root: Path, release: Release, folder: Path) -> Asked:
    gpu = next((gpu for word, gpu in CARDS.items() if word in run["gpu"]), None)
    if gpu is None:
        raise Problem(f"{run['gpu']}: no profile is known.")
    device: dict[str, object] = {}
    if "16 GB" in run["gpu"]:  # no card's profile: the figures of the run
        total, free = run["gpu_total_gib"], run["gpu_free_at_start_gib"]
        device = {
            "memory": f"{total}GiB",
            "context": f"{total - free:.2f}GiB",
            "cublas_handle": f"{run['non_torch_increase_gib']}GiB",
        }
    flags = []
    for key, flag in FLAGS.items():
        if key in run:
            flags += [flag, str(run[key])]
    for kind in "tensor", "pipeline":
        if (size := run.get(f"{kind}_parallel_size", 1)) > 1:
            flags += [f"--{kind}-parallel-size", str(size)]
    if run.get("enforce_eager"):
        flags.append("--enforce-eager")
    if run.get("enable_prefix_caching") is False:
        flags.append("--no-enable-prefix-caching")
    environment = {}
    if ESTIMATE in run:
        environment["VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS"] = str(
            int(run[ESTIMATE])
        )
    model = folder / run["model"].replace("/", "--")
    model.mkdir()
    config = json.loads((root / DATA / run["config_file"]).read_text())
    merge(config, run.get("config_added", {}))
    # Asked for, as the config lacks it.
    quantization = run.get("quantization", "None")
    if quantization != "None" and "quantization_config" not in config:
        flags += ["--quantization", quantization]
    (model / "config.json").write_text(json.dumps(config))
    processor = root / DATA / "processors" / config["model_type"]
    if processor.is_dir():
        shutil.copytree(processor, model, dirs_exist_ok=True)
    warm = run["id"].endswith("-warm")
    return Asked(release, str(model), gpu, tuple(flags), warm, device, environment)


def merge(config: dict[str, Any], added: dict[str, Any]) -> None:
    for key, value in added.items():
        if isinstance(value, dict) and isinstance(config.get(key), dict):
            merge(config[key], value)
        else:
            config[key] = value


# ---- runs that were added, beside other planners


def record(root: Path, rows: Sequence[Row]) -> None:
    """Keep the predictions for the runs that were added, a run a line."""
    file = root / REPLAYED
    known = json.loads(file.read_text()) if file.exists() else {}
    for row in rows:
        own = "added" in row.run and row.release == row.of_run and not row.left_out
        if own and row.result["outcome"] == "started":
            known[row.run["id"]] = {q.key: row.result.get(q.key) for q in QUANTITIES}
    lines = (f"{json.dumps(k)}: {json.dumps(v)}" for k, v in sorted(known.items()))
    write_whole(file, "{\n" + ",\n".join(lines) + "\n}\n")


def added(root: Path) -> str:
    """Tables of the runs that were added: how far predictions are off, and each run."""
    runs = tomllib.loads((root / DATA / "runs.toml").read_text())["run"]
    known = json.loads((root / REPLAYED).read_text())
    told = json.loads((root / PEERS).read_text())
    runs = [run for run in runs if "added" in run]
    rows = [
        Row(run, run["vllm_version"], {"outcome": "started"} | known[run["id"]])
        for run in runs
        if run["id"] in known
    ]
    lines = ["", "", *off_by(runs, rows), "", *of_peers(runs, rows, told), ""]
    names = [*(quantity.name for quantity in QUANTITIES), *told]
    lines += [f"| run | {' | '.join(names)} |", "| --- " + "| ---: " * len(names) + "|"]
    by_id = {row.run["id"]: row for row in rows}
    for run in runs:
        row = by_id.get(run["id"], Row(run, run["vllm_version"], {}))
        cells = [cell(row, quantity) for quantity in QUANTITIES]
        cells += [peer_cell(run, rows_of[run["id"]]) for rows_of in told.values()]
        lines.append(f"| {short_name(row)} | {' | '.join(cells)} |")
    return "\n".join([*lines, "", ""])


def short_name(row: Row) -> str:
    name = str(row.run["id"]).removeprefix("llmd-0190-")
    return name + (" (judges)" if row.judges else "")


def off_by(runs: Sequence[dict[str, Any]], rows: Sequence[Row]) -> Iterator[str]:
    yield "| runs | replayed | KV tokens, mean | worst | goal | graphs, worst |"
    yield "| --- | ---: | ---: | ---: | --- | ---: |"
    graphs, tokens = QUANTITIES[3], QUANTITIES[5]
    for several, goal in ((False, "0.1 %, 0.5 %"), (True, "1 %, 3 %")):
        for judges in (True, False):
            every = [
                run["id"]
                for run in runs
                if (run["gpu_count"] > 1, Row(run, "", {}).judges) == (several, judges)
            ]
            those = [row for row in rows if row.run["id"] in every]
            name = "judging" if judges else "for fitting"
            place = "several GPUs" if several else "one GPU"
            cells = [
                f"{name}, {place}", f"{len(those)} of {len(every)}",
                *percent([row.share(tokens) for row in those]), goal,
                percent([row.share(graphs) for row in those])[1],
            ]  # fmt: skip
            yield f"| {' | '.join(cells)} |"


def percent(shares: Sequence[float | None]) -> tuple[str, str]:
    """Mean and worst."""
    known = [100 * abs(share) for share in shares if share is not None]
    return (f"{mean(known):.2f} %", f"{max(known):.2f} %") if known else ("", "")


def of_peers(
    runs: Sequence[dict[str, Any]],
    rows: Sequence[Row],
    told: dict[str, dict[str, dict[str, Any]]],
) -> Iterator[str]:
    """How far each is off in KV tokens, and in bytes of a token."""
    ends = "runs | mean | worst"
    yield f"| planner | quantity | {ends} | `make plan`, {ends} |"
    yield "| --- | --- " + "| ---: " * 6 + "|"
    ours = {row.run["id"]: row.share(QUANTITIES[5]) for row in rows}
    published = {
        run["id"]: {"kv_tokens": run["llm_d_planner_kv_tokens"]}
        for run in runs
        if "llm_d_planner_kv_tokens" in run
    }
    for name, answers in ({"llm-d-planner, as published": published} | told).items():
        for key, words in {"kv_tokens": "KV tokens", "kv_bytes": "bytes/token"}.items():
            off = {
                run["id"]: answers[run["id"]][key] / truth(run)[key] - 1
                for run in runs
                if key in answers.get(run["id"], {})
            }
            if not off:
                continue
            same = [ours[i] for i in off if i in ours] if key == "kv_tokens" else []
            cells = [name, words, str(len(off)), *percent(list(off.values()))]
            cells += [str(len(same)) if same else "", *percent(same)]
            yield f"| {' | '.join(cells)} |"


def truth(run: dict[str, Any]) -> dict[str, float]:
    """What was published, of one GPU."""
    tokens = run["kv_tokens"]
    return {"kv_tokens": tokens, "kv_bytes": run["available_kv_gib"] * GIB / tokens}


def peer_cell(run: dict[str, Any], answer: dict[str, Any]) -> str:
    for key in "kv_tokens", "kv_bytes":
        if key in answer:
            share = 100 * (answer[key] / truth(run)[key] - 1)
            unit = " B" if key == "kv_bytes" else ""
            return f"{answer[key]:,.0f}{unit} ({share:+.1f} %)"
    return "-"


# ---- the page


INTRODUCTION = """\
# Predictions against real cards

For whoever asks how far predictions of `make plan` can be trusted. The runs are stock
vLLM on real GPUs, published by others ([each](data/published-runs.md)):
`results/real-cards/runs.toml` has 65 and their sources. `make bench-plan` replays them:
the engine of the same release starts, with dummy weights, on the virtual device with
the profile of the same GPU. Some constants of the profiles are fitted to these runs
([how](data/driver-constants.md)). The driver of the published runs is not known.

Most runs are from issue #205 of llm-d-planner, the best public planner that we know. On
similar runs it is off by 7.8 % on average and 62 % at worst in KV cache memory, and by
213 % in activations.
"""


def page(rows: Sequence[Row], commit: str = "") -> str:
    replayed = [row for row in rows if not row.left_out]
    lines = [
        INTRODUCTION,
        "## Mean and worst",
        "",
        *([commit, ""] if commit else []),
        "<!-- table: summary -->",
        *summary(replayed),
        "<!-- end -->",
        "",
        *peer(replayed),
        "",
        f"[Goals, deviations and their causes, sources](../{DATA}/NOTES.md).",
    ]
    return "\n".join(lines) + "\n"


def each_run(rows: Sequence[Row], commit: str = "") -> str:
    """The page with a row for each run."""
    names = [quantity.name for quantity in QUANTITIES]
    lines = [
        "# Each published run",
        "",
        "Of [predictions against real cards](../plan-against-real-cards.md), written "
        "by `make bench-plan`.",
        "Predicted / published, in GiB and tokens.",
        "",
        *([commit, ""] if commit else []),
        f"| run | release | {' | '.join(names)} |",
        "| --- " * 2 + "| ---: " * len(names) + "|",
        *(of_run(row) for row in rows if not row.left_out),
        "",
    ]
    left_out = [row for row in rows if row.left_out]
    if left_out:
        lines += ["Left out:", ""]
        lines += [f"- {row.run['id']}: {row.left_out}" for row in left_out]
        lines.append("")
    figure = "<!-- figure: added-runs --><!-- end -->"
    lines += ["## Added on 27 November 2026", "", figure]
    return "\n".join(lines) + "\n"


def of_run(row: Row) -> str:
    release = row.release
    if row.release != row.of_run:
        release += f" for {row.of_run}"
    name = row.run["id"] + ("" if row.run["config_exact"] else " (config not exact)")
    name += " (judges)" if row.judges else ""
    if row.result["outcome"] != "started":
        blank = " | " * (len(QUANTITIES) - 1)
        return f"| {name} | {release} | {why(row.result)}{blank} |"
    return f"| {name} | {release} | {' | '.join(cell(row, q) for q in QUANTITIES)} |"


def cell(row: Row, quantity: Quantity) -> str:
    predicted, share = quantity.predicted(row.result), row.share(quantity)
    if predicted is None or share is None:
        return ""
    published = row.run[quantity.published]
    both = f"{predicted:,.0f} / {published:,}"
    if quantity.bytes:
        both = f"{predicted:.2f} / {published:.2f}"
    return f"{both} ({100 * share:+.1f} %)"


def summary(rows: Sequence[Row]) -> Iterator[str]:
    """Mean and worst by quantity, of the runs that can be held against the goals and of
    all."""
    started = [row for row in rows if row.result["outcome"] == "started"]
    single = [row for row in started if row.run["gpu_count"] == 1]
    sets = {
        "config exact, same release": [row for row in single if row.exact],
        "all on one GPU": single,
        "on several GPUs": [row for row in started if row not in single],
        "added, for fitting, one GPU": [row for row in single if row.fits],
        "added, judging, one GPU": [row for row in single if row.judges],
        "added, for fitting, several GPUs": [
            row for row in started if row.fits and row not in single
        ],
        "added, judging, several GPUs": [
            row for row in started if row.judges and row not in single
        ],
    }
    yield "| runs | quantity | number | mean error | worst | mean, bytes | worst |"
    yield "| --- | --- | ---: | ---: | ---: | ---: | ---: |"
    for name, those in sets.items():
        for quantity in QUANTITIES:
            known = [row for row in those if row.error(quantity) is not None]
            if not known:
                continue
            shares = [abs(row.share(quantity) or 0) for row in known]
            errors = [abs(row.error(quantity) or 0) * GIB / MIB for row in known]
            cells = [
                name, quantity.name, str(len(known)),
                f"{100 * mean(shares):.2f} %", f"{100 * max(shares):.2f} %",
            ]  # fmt: skip
            if quantity.bytes:
                cells += [f"{mean(errors):.0f} MiB", f"{max(errors):.0f} MiB"]
            else:
                cells += ["", ""]
            yield f"| {' | '.join(cells)} |"


def peer(rows: Sequence[Row]) -> Iterator[str]:
    """KV tokens by llm-d-planner, for the runs that have its prediction."""
    key, tokens = "llm_d_planner_kv_tokens", QUANTITIES[-1]
    known = [row for row in rows if key in row.run and row.error(tokens) is not None]
    if not known:
        return
    ours = [100 * abs(row.share(tokens) or 0) for row in known]
    theirs = [100 * (row.run[key] / row.run["kv_tokens"] - 1) for row in known]
    off = [abs(share) for share in theirs]
    yield from ("## Compared with llm-d-planner", "")
    yield (
        f"Its own published predictions of KV tokens for {len(known)} of these runs "
        f"are off by {mean(off):.1f} % on average and {max(off):.1f} % at worst."
    )
    yield f"Those of `make plan` are off by {mean(ours):.2f} % and {max(ours):.2f} %."
    yield from ("", "| run | published | `make plan` | llm-d-planner |")
    yield "| --- | ---: | ---: | ---: |"
    for row, share in zip(known, theirs, strict=True):
        own = tokens.predicted(row.result)
        figures = (
            f"{row.run['kv_tokens']:,} | {own:,} | {row.run[key]:,} ({share:+.1f} %)"
        )
        yield f"| {row.run['id']} | {figures} |"
    yield ""


if __name__ == "__main__":
    command(main)

"""Predict the GPU memory of a model before there is a GPU: vLLM's own engine starts,
with dummy weights, on a virtual card.

Prints a table: weights, activations, memory outside of PyTorch, CUDA graphs, the KV
cache in bytes and tokens, and how many requests of full length it holds at once. If it
does not fit, changes of flags that help are tried, each by a start. --sweep starts for
each of many values of a flag, or on many GPUs.
"""

from __future__ import annotations

import argparse
import json
import re
import shlex
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from bench import memory_picture
from bench.model_files import (
    CONFIG,
    MISTRAL,
    config_of,
    is_mistral,
    lay_out,
    name_of,
    quantized,
)
from bench.plan_tables import SWEPT_HEAD, beside, swept_row, table, verdict
from bench.simulated_start import Asked, Plan, Release, ranks, simulate
from scripts import topics
from scripts.commands import Problem, command, write_whole
from scripts.release import Base
from vgpu import config as vgpu_config

# As `vllm serve` reads them in its own flags.
NUMBERS = {
    "": 1,
    **{"k": 1000, "m": 1000**2, "g": 1000**3, "t": 1000**4},
    **{"K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40},
}
# Of a card, what may be requested; the rest is for the driver.
MOST_REQUESTED = 0.97
# Of a request, weights may take at most this; the rest is for what serving needs.
MOST_WEIGHTS = 0.95
LONGEST = re.compile(r"maximum model length is (\d+)")


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", help="config.json, its folder, or a name on the hub")
    parser.add_argument("--gpu", help=" ".join(cards()))
    parser.add_argument("--flags", default="", help="of vllm serve, in one string")
    parser.add_argument("--release", default="ours", choices=["ours", "official"])
    topics.options(parser)
    parser.add_argument("--report", type=Path, help="a VLLM_STARTUP_MEMORY_REPORT")
    parser.add_argument(
        "--warm", action="store_true", help="find the compiled model of a first start"
    )
    parser.add_argument(
        "--cold", dest="warm", action="store_false", help="compile it (default)"
    )
    parser.add_argument(
        "--sweep", metavar="NAME=A..B or A,B", help="a flag of vllm serve, or gpu"
    )
    parser.add_argument("--json", type=Path, help="file to write")
    parser.add_argument("--svg", type=Path, help="file to draw the memory in")


def main(args: argparse.Namespace) -> None:
    # Not `scratch`: another plan may be at work.
    with tempfile.TemporaryDirectory(prefix=".plan.", dir=args.root / "build") as name:
        folder = Path(name)
        if args.report:
            plans = [simulate_again(args, folder)]
        elif args.sweep:
            plans = sweep(args, folder)
        else:
            plans = [simulate_with_changes(args, folder)]
    if args.json:
        told = [plan.as_dict() for plan in plans]
        whole = told if args.sweep else told[0]
        write_whole(args.json, json.dumps(whole, indent=1) + "\n")
    if args.svg:
        drawn = next((plan for plan in plans if plan.fits), None)
        if drawn is None:
            raise Problem("--svg: there is nothing to draw, as it does not fit.")
        write_whole(args.svg, memory_picture.picture(drawn.report()))


def simulate_with_changes(args: argparse.Namespace, folder: Path) -> Plan:
    """One start; where it does not fit, one more for each change that may help."""
    plan = simulate(asked(args, folder), folder)
    print(table(plan), flush=True)
    if plan.fits:
        return plan
    if not plan.weights_fit and (least := list(changes(plan))):
        needed = ", or ".join(" ".join(change) for change in least)
        print(f"At least needed: {needed}.", flush=True)
    for change in changes(plan):
        words = " ".join(change)
        changed = replace(plan.asked, flags=(*plan.asked.flags, *change))
        try:
            tried = simulate(changed, folder, words)
        except Problem as problem:
            print(f"- {words}: {problem}", flush=True)
            continue
        plan.tried.append(tried)
        print(f"- {words}: {tried.in_short()}", flush=True)
    if not any(tried.fits for tried in plan.tried):
        none = "None of these" if plan.tried else "No change of flags"
        print(f"{none} helps: a larger GPU, or a smaller model.")
    return plan


def sweep(args: argparse.Namespace, folder: Path) -> list[Plan]:
    base = asked(args, folder)
    cases = list(swept(args.sweep, base))
    print(SWEPT_HEAD)
    plans = []
    for label, case in cases:
        plans.append(simulate(case, folder, label))
        print(swept_row(label, plans[-1]), flush=True)
    print(verdict(args.sweep, [label for label, _ in cases], plans))
    return plans


def simulate_again(args: argparse.Namespace, folder: Path) -> Plan:
    """The start that a report is of, next to the report."""
    try:
        report = json.loads(args.report.read_text())
        again = asked_by(report, args, folder)
    except OSError as error:
        raise Problem(f"{args.report}: {error.strerror}.") from error
    except (ValueError, KeyError, TypeError) as error:
        raise Problem(
            f"{args.report}: a report as VLLM_STARTUP_MEMORY_REPORT writes it, with "
            f"what started, is wanted; {error!r}."
        ) from error
    plan = simulate(again, folder)
    print(table(plan))
    print(beside(plan, report))
    return plan


def asked(args: argparse.Namespace, folder: Path) -> Asked:
    """What the command line asks for.

    Raises:
        Problem: something is missing, or cannot be read.
    """
    if args.model is None:
        raise Problem("MODEL=config.json or its folder is needed.")
    try:
        flags = shlex.split(args.flags)
    except ValueError as error:
        raise Problem(f"--flags: {error}.") from error
    over_cards = (args.sweep or "").startswith("gpu=")
    gpu = None if over_cards else card(args.gpu)
    model = model_folder(args.model, folder)
    if args.release == "official" and (args.set or args.topics):
        raise Problem("SET= and PATCHES= are of patched vLLM, RELEASE=official is not.")
    ours = topics.chosen(args) if args.release == "ours" else None
    release = Release.find(args.root, args.base, ours)
    return Asked(release, model, gpu, tuple(flags), args.warm)


def asked_by(report: Any, args: argparse.Namespace, folder: Path) -> Asked:
    """What a report says that was started, on the card that it was started on.

    Raises:
        KeyError, TypeError, ValueError: it is no such report.
        Problem: there is no such release here.
    """
    if isinstance(report, dict) and "set_aside" in report and "start" not in report:
        raise Problem(
            "The report does not say what started. Write it with bench/report_plugin "
            "on PYTHONPATH (docs/plan.md)."
        )
    start, options = report["start"], dict(report["start"]["options"])
    version, _, build = start["vllm"].partition("+")
    ours = None
    if build.startswith("envelope"):
        ours = Base.load(args.root, version)
        if named := re.match(r"envelope\.([a-z.]+)\.\d", build):
            ours = topics.of_set(ours, named[1])
    release = Release.find(args.root, version, ours)
    if "gpu_memory_limit_bytes" in options:
        options.pop("gpu_memory_utilization", None)
    flags = []
    for name, value in options.items():
        flag = name.replace("_", "-")
        if value is True:
            flags.append(f"--{flag}")
        elif value is False:
            flags += [f"--no-{flag}"] if name == "enable_prefix_caching" else []
        else:
            values = value if isinstance(value, list) else [value]
            flags += [f"--{flag}", *map(str, values)]
    model = folder / "reported"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(start["model"]))
    model_folder(str(model), folder)
    return Asked(
        release, str(model), None, tuple(flags), args.warm, device_of(report),
        start["environment"],
    )  # fmt: skip


def device_of(report: Mapping[str, Any]) -> dict[str, object]:
    """Settings of a virtual device with the figures of the report's card."""
    totals = {source["source"]: source["total"] for source in report["sources"]}
    known = [total for total in totals.values() if total]
    torch_sources = [totals.get("mem_get_info"), totals.get("device properties")]
    memory = max((t for t in torch_sources if t), default=max(known))
    held, free, total = (report[key] for key in ("held_before", "free_before", "total"))
    graphs = report["cuda_graphs"] or 0
    settings = {
        "memory": memory,
        "meminfo_total": totals.get("mem_get_info"),
        "properties_total": totals.get("device properties"),
        "nvml_total": totals.get("NVML"),
        "context": held,
        "other": max(0, total - free - held),
        # Their number is not in the report: the first takes all of the driver's memory.
        "first_graph": graphs - (report["cuda_graphs_torch"] or 0),
    } | dict(report["card"])
    return {key: value for key, value in settings.items() if value is not None}


def cards() -> list[str]:
    return vgpu_config.profiles()


def card(name: str | None) -> str:
    """A profile's name.

    Raises:
        Problem: there is none, or several, of that name.
    """
    plain = re.sub(r"[^a-z0-9]", "", (name or "").lower())
    plain = re.sub(r"nvidia|geforce|tesla", "", plain)
    known = {re.sub(r"[^a-z0-9]", "", card): card for card in cards()}
    found = [card for key, card in known.items() if plain and plain in key]
    if plain in known:
        return known[plain]
    if len(found) == 1:
        return found[0]
    raise Problem(f"GPU={name or ''}: one of {', '.join(cards())} is needed.")


def model_folder(given: str, folder: Path) -> str:
    """A folder that vLLM reads; a name on the hub stays as it is. A file of another
    name than vLLM's is laid out below `folder`.

    Raises:
        Problem: there is no config, or no model's.
    """
    path = Path(given)
    if path.is_dir():
        path /= MISTRAL if is_mistral(path) else CONFIG
    if not path.is_file():
        if path.name != CONFIG and re.fullmatch(r"[\w.-]+/[\w.-]+", given):
            return given
        raise Problem(f"{path}: there is no such file; a model's config is needed.")
    if path.name == name_of(path) and (path.name == CONFIG or is_mistral(path.parent)):
        return str(path.parent.resolve())
    return str(lay_out(path, folder / path.stem))


def number(text: str) -> int:
    """As `vllm serve` reads it: 8k is 8000, 8K is 8192, 25.6k is 25600.

    Raises:
        Problem: it is no number.
    """
    match = re.fullmatch(r"(\d+)([kKmMgGtT]?)|(\d+\.\d+)([kmgt])", text.strip())
    if not match:
        raise Problem(f"{text!r} is no number (as 8K or 8192).")
    if match[3]:
        return int(float(match[3]) * NUMBERS[match[4]])
    return int(match[1]) * NUMBERS[match[2]]


def swept(sweep: str, base: Asked) -> Iterator[tuple[str, Asked]]:
    """Label and start of each value.

    Raises:
        Problem: the sweep cannot be read.
    """
    name, _, values = sweep.partition("=")
    name = name.strip().removeprefix("--")
    if not values:
        raise Problem(
            f"--sweep {sweep}: write max-model-len=8K..128K or gpu=l40s,h100."
        )
    if name == "gpu":
        chosen = cards() if values == "all" else [card(v) for v in values.split(",")]
        for each in sorted(chosen, key=memory_of):
            yield each, replace(base, gpu=each)
        return
    try:
        texts = swept_values(values)
    except Problem as problem:
        raise Problem(f"--sweep {sweep}: {problem}") from problem
    for text in texts:
        yield text, replace(base, flags=(*base.flags, f"--{name}", text))


def swept_values(values: str) -> list[str]:
    """Of "A..B", A doubled up to B, and B; of "A,B" each.

    Raises:
        Problem: an end is no number, or there is nothing between them.
    """
    if ".." not in values:
        return [
            str(number(v)) if re.fullmatch(r"[\d.]+[kKmMgGtT]", v) else v
            for v in values.split(",")
        ]
    first, last = (number(end) for end in values.split("..", 1))
    if not 0 < first <= last:
        raise Problem(f"{first} to {last} is empty.")
    texts = []
    while first < last:
        texts.append(str(first))
        first *= 2
    return [*texts, str(last)]


def memory_of(gpu: str) -> int:
    return vgpu_config.parse_size(vgpu_config.read_profile(gpu)["memory"])


def changes(plan: Plan) -> Iterator[list[str]]:
    """Flags that may make it fit, the cheapest first. What came of each is in
    `plan.tried` when the next is asked for."""
    given = " ".join(plan.asked.flags).replace("_", "-")
    if not plan.weights_fit:
        yield from room_for_weights(plan, given)
        return
    if found := LONGEST.search(plan.result["error"]):
        yield ["--max-model-len", found[1]]
    if more := larger_request(plan, given):
        yield more
    if plan.result.get("max_num_seqs", 0) > 64 and "max-num-batched" not in given:
        yield ["--max-num-seqs", "64", "--max-num-batched-tokens", "2048"]
    if "enforce-eager" not in given:
        yield ["--enforce-eager"]
    if "kv-cache-dtype" not in given:
        yield ["--kv-cache-dtype", "fp8"]
    if "quantization" not in given and not is_quantized(plan):
        yield ["--quantization", "fp8"]


def is_quantized(plan: Plan) -> bool:
    """As the engine says, if it came as far."""
    files = plan.asked.model
    return bool(plan.result.get("quantization", quantized(files)))


def larger_request(plan: Plan, given: str) -> list[str] | None:
    """More of the card, by the flag that bounds the request; None: all that
    may be is."""
    result = plan.result
    held, requested = (result.get(k, 0) for k in ("non_torch_before", "requested"))
    limits = re.findall(r"gpu-memory-limit-bytes[ =](\S+)", given)
    # Of flags that are given twice, the last counts.
    if limits and requested + held >= (limit := number(limits[-1])):
        most = int(result.get("total", 0) * MOST_REQUESTED)
        return ["--gpu-memory-limit-bytes", str(most)] if limit < most else None
    shares = re.findall(r"gpu-memory-utilization[ =]([\d.]+)", given)
    if shares and float(shares[-1]) >= MOST_REQUESTED:
        return None
    return ["--gpu-memory-utilization", str(MOST_REQUESTED)]


def room_for_weights(plan: Plan, given: str) -> Iterator[list[str]]:
    """More of the card, weights in 8 bits, or as few more cards as do, if the weights
    would fit."""
    weights, total = plan.result["weights"], plan.result["total"]
    more = larger_request(plan, given)
    if more and weights <= total * MOST_REQUESTED * MOST_WEIGHTS:
        yield more
    room = plan.result["requested"] * MOST_WEIGHTS
    halves = "quantization" not in given and not is_quantized(plan)
    if halves and plan.result.get("weights_fp8", weights / 2) <= room:
        yield ["--quantization", "fp8"]
    for cards in numbers_of_cards(plan, given):
        change = ["--tensor-parallel-size", str(cards)]
        yield change
        if not plan.tried or plan.tried[-1].fits:
            return
        if found := LONGEST.search(plan.tried[-1].result["error"]):
            yield [*change, "--max-model-len", found[1]]
            return


def numbers_of_cards(plan: Plan, given: str) -> Iterator[int]:
    """Those that split the model so that its weights fit, the smallest first."""
    if "pipeline-parallel" in given or "-pp" in given:
        return
    config = config_of(plan.asked.model)
    config = config.get("text_config", config)
    now = ranks(plan.asked.flags)
    for cards in 2, 4, 8, 16:
        heads = config.get("num_attention_heads", cards)
        kv_heads = config.get("num_key_value_heads") or heads
        splits = heads % cards == 0 and (kv_heads % cards == 0 or cards % kv_heads == 0)
        fits = plan.result["weights"] * now <= (
            cards * plan.result["requested"] * MOST_WEIGHTS
        )
        if cards > now and splits and fits:
            yield cards


if __name__ == "__main__":
    command(main)

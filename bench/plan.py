"""Say what a model will take of a GPU before there is one: vLLM's own engine starts,
with dummy weights, on a virtual card.

Prints a table: weights, activations, what is outside of PyTorch, CUDA graphs, the KV
cache in bytes and tokens, and how many requests of full length it holds at once. If it
does not fit, changes of flags that help are tried, each by a start. --sweep starts for
each of many values of a flag, or on many GPUs.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from bench import memory_picture
from scripts import caches
from scripts.series import REPOSITORY, Base, Problem, command, write_whole
from vgpu import config as vgpu_config

GIB = 1 << 30
TOKENIZERS = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model")
PROCESSORS = ("preprocessor_config.json", "processor_config.json")
# How a start says that there is too little memory.
TOO_LITTLE = re.compile(
    r"out of memory|No available memory|KV cache|[Ff]ree memory on device|takes more "
    r"than|exceeds (available )?Mamba|does not fit",
)
NUMBERS = {"": 1, "k": 1 << 10, "m": 1 << 20}
TIMEOUT = 1800


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", help="config.json, its folder, or a name on the hub")
    parser.add_argument("--gpu", help=" ".join(cards()))
    parser.add_argument("--flags", default="", help="of vllm serve, in one string")
    parser.add_argument("--release", default="ours", choices=["ours", "official"])
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
            plans = [foresee_again(args, folder)]
        elif args.sweep:
            plans = sweep(args, folder)
        else:
            plans = [foresee_with_changes(args, folder)]
    if args.json:
        told = [plan.as_dict() for plan in plans]
        whole = told if args.sweep else told[0]
        write_whole(args.json, json.dumps(whole, indent=1) + "\n")
    if args.svg:
        drawn = next((plan for plan in plans if plan.fits), None)
        if drawn is None:
            raise Problem("--svg: there is nothing to draw, as it does not fit.")
        write_whole(args.svg, memory_picture.picture(drawn.report()))


def foresee_with_changes(args: argparse.Namespace, folder: Path) -> Plan:
    """One start; where it does not fit, one more for each change that may help."""
    plan = foresee(asked(args, folder), folder)
    print(table(plan), flush=True)
    if plan.fits:
        return plan
    for change in changes(plan):
        words = " ".join(change)
        changed = replace(plan.asked, flags=(*plan.asked.flags, *change))
        try:
            tried = foresee(changed, folder, words)
        except Problem as problem:
            print(f"- {words}: {problem}", flush=True)
            continue
        plan.tried.append(tried)
        print(f"- {words}: {tried.in_short()}", flush=True)
    if not any(tried.fits for tried in plan.tried):
        print("None of these helps: a larger GPU, or a smaller model.")
    return plan


def sweep(args: argparse.Namespace, folder: Path) -> list[Plan]:
    base = asked(args, folder)
    cases = list(swept(args.sweep, base))
    print(SWEPT_HEAD)
    plans = []
    for label, case in cases:
        plans.append(foresee(case, folder, label))
        print(swept_row(label, plans[-1]), flush=True)
    print(verdict(args.sweep, [label for label, _ in cases], plans))
    return plans


def foresee_again(args: argparse.Namespace, folder: Path) -> Plan:
    """The start that a report is of, beside what it says."""
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
    plan = foresee(again, folder)
    print(table(plan))
    print(beside(plan, report))
    return plan


# ---- what is asked


@dataclass(frozen=True)
class Release:
    """A vLLM that can be started."""

    root: Path
    version: str
    ours: Path | None
    """The folder that lies before the official one; None: official."""

    @classmethod
    def find(cls, root: Path, version: str, ours: bool) -> Release:
        """
        Raises:
            Problem: it has not been made.
        """
        if ours:
            folder = root / f"build/envelope-{Base.load(root, version).version}"
        else:
            folder = None
        release = cls(root, version, folder)
        if not release.python.exists() or (folder and not folder.is_dir()):
            target = (
                f"vgpu envelope BASE={version}" if ours else f"{release.name}/ready"
            )
            raise Problem(f"'make {target}' first.")
        return release

    @property
    def name(self) -> str:
        return f".venv-vllm-{self.version}"

    @property
    def python(self) -> Path:
        return self.root / self.name / "bin/python"


@dataclass(frozen=True)
class Asked:
    """A start: which vLLM, of which model, on which card."""

    release: Release
    model: str
    """A folder with config.json, or a name on the hub."""
    gpu: str | None
    """A profile of the virtual device; None: `device` has all."""
    flags: tuple[str, ...]
    warm: bool = False
    device: Mapping[str, object] = field(default_factory=dict)
    """Settings of the virtual device over the profile's."""
    environment: Mapping[str, str] = field(default_factory=dict)

    @property
    def card(self) -> str:
        own = self.device.get("name")
        profile = vgpu_config.read_profile(self.gpu) if self.gpu else {}
        return str(own or profile["name"])


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
    release = Release.find(args.root, args.base, args.release == "ours")
    return Asked(release, model, gpu, tuple(flags), args.warm)


def asked_by(report: Any, args: argparse.Namespace, folder: Path) -> Asked:
    """What a report says that was started, on the card that it was started on.

    Raises:
        KeyError, TypeError, ValueError: it is no such report.
        Problem: there is no such release here.
    """
    start, options = report["start"], dict(report["start"]["options"])
    version, _, ours = start["vllm"].partition("+")
    release = Release.find(args.root, version, ours.startswith("envelope"))
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
    """Settings of a virtual device that tells what the report's card told."""
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
        # How many there were is not told: the first takes what the driver took.
        "first_graph": graphs - (report["cuda_graphs_torch"] or 0),
    } | dict(report["card"])
    return {key: value for key, value in settings.items() if value is not None}


@dataclass
class Plan:
    asked: Asked
    result: dict[str, Any]
    """As plan_engine.py tells it."""
    tried: list[Plan] = field(default_factory=list)

    @property
    def fits(self) -> bool:
        return bool(self.result["outcome"] == "started")

    @property
    def tokens(self) -> int:
        return int(self.result.get("kv_tokens", 0))

    def in_short(self) -> str:
        if not self.fits:
            return f"does not fit ({why(self.result)})"
        return (
            f"fits: {self.tokens:,} tokens of KV cache, "
            f"{self.result['concurrency']:.2f} requests of full length"
        )

    def report(self) -> dict[str, Any]:
        """In the form that memory_picture.py draws."""
        result = self.result
        return dict(result.get("report") or {}) | {
            "device": self.asked.card,
            "total": result["total"],
            "free_before": result["free"],
            "held_before": result["non_torch_before"],
            "requested": result["requested"],
            "in_use": result["in_use"],
            "set_aside": self.set_aside(),
            "left": self.left(),
        }

    def set_aside(self) -> dict[str, int]:
        """Ours tells more of it than the release."""
        told = (self.result.get("report") or self.result).get("set_aside", {})
        return {name: size or 0 for name, size in told.items()}

    def left(self) -> int:
        used = sum(self.result["in_use"].values()) + sum(self.set_aside().values())
        return int(self.result["requested"] - used)

    def as_dict(self) -> dict[str, Any]:
        return {
            "model": Path(self.asked.model).name,
            "gpu": self.asked.gpu or self.asked.card,
            "vllm": self.result.get("version"),
            "release": "ours" if self.asked.release.ours else "official",
            "flags": list(self.asked.flags),
            "warm": self.asked.warm,
            "fits": self.fits,
            "result": self.result,
            "tried": [plan.as_dict() for plan in self.tried],
        }


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
    """A folder that vLLM reads; a name on the hub stays as it is.

    Raises:
        Problem: there is no config, or no model's.
    """
    path = Path(given)
    if path.is_dir():
        path /= "config.json"
    if not path.is_file():
        if path.name != "config.json" and re.fullmatch(r"[\w.-]+/[\w.-]+", given):
            return given
        raise Problem(f"{path}: there is no such file; a model's config is needed.")
    try:
        told = json.loads(path.read_text())
        kind = told["model_type"]
    except (ValueError, KeyError, TypeError) as error:
        raise Problem(f"{path}: no config of a model ({error!r}).") from error
    if not isinstance(kind, str):
        raise Problem(f"{path}: model_type is {kind!r}.")
    if path.name == "config.json":
        return str(path.parent.resolve())
    place = folder / path.stem
    place.mkdir()
    shutil.copyfile(path, place / "config.json")
    return str(place)


def number(text: str) -> int:
    """8k is 8192.

    Raises:
        Problem: it is no number.
    """
    match = re.fullmatch(r"(\d+)([km]?)", text.strip().lower())
    if not match:
        raise Problem(f"--sweep: {text!r} is no number (as 8k or 8192).")
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
            f"--sweep {sweep}: write max-model-len=8k..128k or gpu=l40s,h100."
        )
    if name == "gpu":
        chosen = cards() if values == "all" else [card(v) for v in values.split(",")]
        for each in sorted(chosen, key=memory_of):
            yield each, replace(base, gpu=each)
        return
    if ".." in values:
        first, last = (number(end) for end in values.split("..", 1))
        if not 0 < first <= last:
            raise Problem(f"--sweep {sweep}: {first} to {last} is empty.")
        texts = []
        while first < last:
            texts.append(str(first))
            first *= 2
        texts.append(str(last))
    else:
        texts = [
            str(number(v)) if re.fullmatch(r"\d+[kKmM]", v) else v
            for v in values.split(",")
        ]
    for text in texts:
        yield text, replace(base, flags=(*base.flags, f"--{name}", text))


def profile_of(gpu: str | None) -> str:
    return str(vgpu_config.read_profile(gpu)) if gpu else ""


def memory_of(gpu: str) -> int:
    return vgpu_config.parse_size(vgpu_config.read_profile(gpu)["memory"])


# ---- a start


def foresee(asked: Asked, folder: Path, label: str = "") -> Plan:
    """Start it; if it is to be warm, for the second time.

    Raises:
        Problem: it cannot be started on any card, as vLLM says.
    """
    own = Path(tempfile.mkdtemp(prefix="caches-", dir=folder))
    try:
        result = started(asked, own, label)
        if asked.warm and result["outcome"] == "started":
            result = started(asked, own, f"{label} warm")
    finally:
        shutil.rmtree(own, ignore_errors=True)
    return Plan(asked, result)


def started(asked: Asked, own: Path, label: str) -> dict[str, Any]:
    """What plan_engine.py tells; `own` is where the start keeps what it compiles.

    Raises:
        Problem: it ended for another reason than memory, or said nothing.
    """
    release = asked.release
    paths = [*([release.ours] if release.ours else []), REPOSITORY]
    environment = caches.environment(
        os.environ | {"PYTHONPATH": os.pathsep.join(map(str, paths))},
        own,
        release.root / "build/kernels",
    )
    case = {
        "model": asked.model,
        "flags": [*asked.flags, *of_dummies(asked.model)],
        "environment": dict(asked.environment),
    }
    settings = [f"--set={key}={toml(value)}" for key, value in asked.device.items()]
    settings.append(f"--set=devices={ranks(asked.flags)}")
    if asked.gpu:
        settings.append(f"--profile={asked.gpu}")
    order = [
        *(release.python, "-m", "vgpu", *settings, "--"),
        *(release.python, "-m", "bench.plan_engine", json.dumps(case)),
    ]
    with (own / "log").open("w+") as log:
        told = follow(order, environment, own, log, label or asked.card)
        log.seek(0)
        said = log.read()
    if told is None:
        raise Problem(f"The engine ended without a word:\n{said[-2000:]}")
    if told["outcome"] != "started" and not about_memory(told):
        raise Problem(plainly(told["error"]))
    return told


def ranks(flags: Sequence[str]) -> int:
    """The number of cards that an engine takes."""
    size = r"(?:--(?:tensor|pipeline)[-_]parallel[-_]size|-tp|-pp)[ =](\d+)"
    return math.prod(map(int, re.findall(size, " ".join(flags))))


def toml(value: object) -> str:
    return json.dumps(value)


def follow(
    order: Sequence[object],
    environment: Mapping[str, str],
    cwd: Path,
    log: Any,
    label: str,
) -> dict[str, Any] | None:
    """The result that a command prints; says meanwhile how far it is."""
    began = time.monotonic()
    told = None
    with subprocess.Popen(
        list(map(str, order)), env=dict(environment), cwd=cwd, text=True,
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=log, errors="replace",
    ) as process:  # fmt: skip
        assert process.stdout
        try:
            for line in process.stdout:
                if line.startswith("PHASE "):
                    progress(f"{label}: {line[6:].strip()}", began)
                elif line.startswith("RESULT "):
                    told = json.loads(line.removeprefix("RESULT "))
                else:
                    log.write(line)
        except BaseException:
            process.terminate()
            raise
    if sys.stderr.isatty():
        print("\r\033[K", end="", file=sys.stderr, flush=True)
    return told


def progress(text: str, began: float) -> None:
    line = f"[{time.monotonic() - began:4.0f} s] {text}"
    end = "" if sys.stderr.isatty() else "\n"
    start = "\r\033[K" if sys.stderr.isatty() else ""
    print(f"{start}{line}", end=end, file=sys.stderr, flush=True)


def of_dummies(model: str) -> list[str]:
    """Flags of a start without weights and, if there is none, without a tokenizer."""
    flags = ["--load-format", "dummy"]
    folder = Path(model)
    if not folder.is_dir():
        return flags
    if not any((folder / name).exists() for name in TOKENIZERS):
        flags.append("--skip-tokenizer-init")
    return flags


def about_memory(result: Mapping[str, Any]) -> bool:
    return (
        "requested" in result
        and bool(TOO_LITTLE.search(result["error"]))
        or ("ree memory on device" in result["error"])
    )


def plainly(error: str) -> str:
    """The one line of an error that says what is wrong."""
    error = re.sub(r"^\d+ validation errors? for \w+ (Value error, )?", "", error)
    error = error.partition(" [type=")[0]
    return f"vLLM refuses to start: {error[:600]}"


# ---- what is answered


def why(result: Mapping[str, Any]) -> str:
    """The first sentence or two of vLLM's own words."""
    text = " ".join(str(result["error"]).split())
    return text if len(text) < 300 else text[:297] + "..."


def gib(size: float) -> str:
    return f"{size / GIB:9.2f} GiB"


def rows(plan: Plan) -> Iterator[tuple[str, int | None, str]]:
    """Name, bytes and a note; those after "requested" sum to it."""
    result = plan.result
    yield "total", result["total"], ""
    yield "held before", result["non_torch_before"], "CUDA context"
    yield "requested", result["requested"], ""
    if not plan.fits:
        yield "  weights", result.get("weights"), ""
        yield "  peak activations", result.get("activations"), ""
        yield "  outside torch", result.get("non_torch"), ""
        return
    notes = {
        "kv_cache": f"{result['blocks']} blocks, {plan.tokens:,} tokens",
        "cuda_graphs": f"{gib(result['graphs_estimated']).strip()} estimated",
    }
    for name, size in (result["in_use"] | plan.set_aside()).items():
        yield f"  {name.replace('_', ' ')}", size, notes.get(name, "")
    yield "  left", plan.left(), ""


def table(plan: Plan) -> str:
    result, asked = plan.result, plan.asked
    attention = ", ".join(result.get("attention", [])) or "no attention"
    runner = "V2" if result.get("v2") else "V1"
    state = "warm" if asked.warm else "cold"
    lines = [
        f"{Path(asked.model).name} on {asked.card}: vLLM {result['version']} "
        f"({'ours' if asked.release.ours else 'official'}), {runner} runner, "
        f"{attention}, {state}",
        f"{result.get('max_model_len', 0):,} tokens a request, "
        f"{result.get('max_num_seqs')} requests and "
        f"{result.get('max_num_batched_tokens'):,} tokens a batch"
        if "max_model_len" in result
        else "",
    ]
    if "total" in result:
        for name, size, note in rows(plan):
            if size is not None:
                lines.append(f"{name:<24}{gib(size)}  {note}".rstrip())
    if plan.fits:
        lines.append(
            f"It fits: {result['concurrency']:.2f} requests of full length at once."
        )
    else:
        lines.append(f"It does not fit: {why(result)}")
    return "\n".join(line for line in lines if line)


SWEPT_HEAD = """\
| | fits | weights, GiB | activations, GiB | KV cache, GiB | KV tokens | requests |
| --- | --- | --- | --- | --- | --- | --- |"""


def swept_row(label: str, plan: Plan) -> str:
    result = plan.result
    cells = [label, "yes" if plan.fits else "no"]
    for key in ("weights", "activations", "kv_cache"):
        size = result.get(key) if plan.fits or key == "weights" else None
        cells.append("" if size is None else f"{size / GIB:.2f}")
    full = f"{result['concurrency']:.2f}" if plan.fits else ""
    cells += [f"{plan.tokens:,}" if plan.fits else "", full]
    return f"| {' | '.join(cells)} |"


def verdict(sweep: str, labels: Sequence[str], plans: Sequence[Plan]) -> str:
    fitting = [label for label, plan in zip(labels, plans, strict=True) if plan.fits]
    name = sweep.partition("=")[0]
    if not fitting:
        return f"None of these fits: {why(plans[-1].result)}"
    if name == "gpu":
        return f"The smallest that fits: {fitting[0]}"
    return f"Those that fit: {name} {', '.join(fitting)}"


def beside(plan: Plan, report: Mapping[str, Any]) -> str:
    """What the report says, beside what is foreseen."""
    said = dict(report["in_use"]) | dict(report["set_aside"])
    foreseen = (
        plan.result["in_use"] | plan.set_aside()
        if plan.fits
        else {"weights": plan.result.get("weights")}
    )
    lines = ["", f"{'':<24}{'reported':>13}{'foreseen':>13}"]
    for name, size in said.items():
        cells = [
            gib(size) if size is not None else "-"
            for size in (size, foreseen.get(name))
        ]
        lines.append(f"{name.replace('_', ' '):<24}{cells[0]:>13}{cells[1]:>13}")
    if report["failed_phase"]:
        lines.append(f"It was reported as failed: {report['failed_phase']}.")
    return "\n".join(lines)


def changes(plan: Plan) -> Iterator[list[str]]:
    """Flags that may make it fit, the cheapest first."""
    given = " ".join(plan.asked.flags).replace("_", "-")
    error = plan.result["error"]
    if found := re.search(r"maximum model length is (\d+)", error):
        yield ["--max-model-len", found[1]]
    explicit = re.search(r"gpu-memory-(limit|utilization)[ =]([\d.]+)", given)
    if explicit is None or (explicit[1] == "utilization" and float(explicit[2]) < 0.97):
        yield ["--gpu-memory-utilization", "0.97"]
    if plan.result.get("max_num_seqs", 0) > 64 and "max-num-batched" not in given:
        yield ["--max-num-seqs", "64", "--max-num-batched-tokens", "2048"]
    if "enforce-eager" not in given:
        yield ["--enforce-eager"]
    if "kv-cache-dtype" not in given:
        yield ["--kv-cache-dtype", "fp8"]
    if "quantization" not in given and not quantized(plan.asked.model):
        yield ["--quantization", "fp8"]


def quantized(model: str) -> bool:
    with contextlib.suppress(OSError, ValueError):
        told = json.loads((Path(model) / "config.json").read_text())
        return "quantization_config" in told
    return True  # unknown


if __name__ == "__main__":
    command(main)

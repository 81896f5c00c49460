"""The output of make plan, as text."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.simulated_start import GIB, Plan, why


def gib(size: float) -> str:
    return f"{size / GIB:z9.2f} GiB"


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
    }
    # None is estimated where the KV cache is sized last.
    if estimated := result.get("graphs_estimated"):
        notes["cuda_graphs"] = f"{gib(estimated).strip()} estimated"
    if "loading_peak" in result:
        notes["weights"] = f"{gib(result['loading_peak']).strip()} while they load"
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
        holds = "no KV cache."
        if plan.requests is not None:
            holds = f"{plan.requests:.2f} requests of full length at once."
        lines.append(f"It fits: {holds}")
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
    full = "" if plan.requests is None else f"{plan.requests:.2f}"
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
    """The figures of the report, next to the predicted ones."""
    said = dict(report["in_use"]) | dict(report["set_aside"])
    predicted = (
        plan.result["in_use"] | plan.set_aside()
        if plan.fits
        else {"weights": plan.result.get("weights")}
    )
    lines = ["", f"{'':<24}{'reported':>13}{'predicted':>13}"]
    for name, size in said.items():
        cells = [
            gib(size) if size is not None else "-"
            for size in (size, predicted.get(name))
        ]
        lines.append(f"{name.replace('_', ' '):<24}{cells[0]:>13}{cells[1]:>13}")
    if report["failed_phase"]:
        lines.append(f"It was reported as failed: {report['failed_phase']}.")
    return "\n".join(lines)

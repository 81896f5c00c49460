"""What weights take once they are loaded, and what loading takes at most, for a format
of quantization each: stock vLLM from a checkpoint, and from dummies as in `make plan`.

Prints the table of docs/plan.md.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any

from bench.simulated_start import Release
from bench.virtual import recorded, results
from scripts.commands import command
from scripts.release import Base
from vgpu.config import PROFILES

# FlashInfer's kernels of 4 bits on a B200 are compiled with tools that are not here.
CASES = {
    "h100": "bf16 FP8 GPTQ AWQ NVFP4 MXFP4",
    "a100-80gb": "FP8 GPTQ AWQ MXFP4",
    "b200": "FP8",
}
HEAD = """\
| card | format | checkpoint, MiB | weights, MiB | peak, MiB | peak in the plan, MiB |
| --- | --- | ---: | ---: | ---: | ---: |"""


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("cards", nargs="*", default=list(CASES))


def main(args: argparse.Namespace) -> None:
    base = Base.load(args.root, args.base)
    nvrtc = Release.find(args.root, args.base, None).nvrtc
    environment = {"LD_LIBRARY_PATH": str(nvrtc)} if nvrtc else {}
    print(HEAD)
    for card in args.cards:
        loads: dict[str, list[Mapping[str, Any]]] = {}
        for told in results(
            base, "official", {}, "loading", CASES[card], environment,
            PROFILES / f"{card}.toml",
        ):  # fmt: skip
            both = loads.setdefault(told["format"], [])
            both.append(told)
            if len(both) == 2:
                print(row(card, *both), flush=True)
        for name in CASES[card].split():
            if len(loads.get(name, [])) < 2:
                print(f"| {card} | {name} | does not load | | | |", flush=True)
    print(f"\n{recorded(args.root)}")


def row(card: str, real: Mapping[str, Any], planned: Mapping[str, Any]) -> str:
    """Of one format: from its checkpoint, and from dummies."""
    sizes = real["stored"], real["weights"], real["peak"], planned["peak"]
    cells = [card, real["format"], *(f"{size / (1 << 20):,.0f}" for size in sizes)]
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    command(main)

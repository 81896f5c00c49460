"""Random programs of a process that serves an engine and does other things, stock next
to patched (bench/scenarios/caller.py): each step has to find the same.

The seed draws the model runner, CUDA graphs, adapters and sleep mode. Prints a line a
program; ends with 1 if one differs.
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path
from typing import Any

from bench.virtual import HOOKS, SITES, recorded, results
from scripts.commands import Problem, command, write_whole
from scripts.release import Base

DEVICE: dict[str, Any] = {
    "memory": "8GiB",
    "streams_behind": "true",
    "behind_queries": 0,
}


def case(seed: int, steps: int, site: str) -> dict[str, Any]:
    rng = random.Random(seed)
    v2 = seed % 2 == 0
    return {
        "v2": v2,
        "graphs": rng.random() < 0.5,
        "lora": rng.random() < 0.5,
        "sleep": rng.random() < 0.5,
        # See caller.py: stock reads too early there.
        "streams": not v2 or site != "official",
        "seed": seed,
        "steps": steps,
    }


def differs(official: list[Any], ours: list[Any], steps: int) -> str:
    """Where two logs do, or ours has lost data; empty if they are equal."""
    if len(official) != 1 + steps or len(ours) != 1 + steps:
        return f"{len(official)} and {len(ours)} lines of {1 + steps}"
    for number, (theirs, own) in enumerate(zip(official, ours, strict=True)):
        if theirs != own:
            return f"step {number}: {str(theirs)[:300]}, ours {str(own)[:300]}"
    for number, (action, found, is_its_stream, *_) in enumerate(ours[1:], 1):
        if lost(action, found, is_its_stream):
            return f"step {number} lost data: {action} {found}"
    return ""


def lost(action: str, found: Any, is_its_stream: bool) -> bool:
    match action:
        case "replay":
            return any(len(set(values)) != 1 for values in found)
        case "check":
            return not all(found)
        case "copy_on_the_default_stream":
            # Stock changes the stream of who generates in another thread.
            return is_its_stream and len(set(found)) != 1
    return False


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seed", type=int, default=1, help="of the first program")
    parser.add_argument("--count", type=int, default=8, help="programs")
    parser.add_argument("--steps", type=int, default=1250, help="of each")
    parser.add_argument("--results", type=Path, help="JSON file to write")


def main(args: argparse.Namespace) -> None:
    base = Base.load(args.root, args.base)
    commit = recorded(args.root)
    rows = []
    for seed in range(args.seed, args.seed + args.count):
        logs = {}
        for site in SITES:
            asked = case(seed, args.steps, site)
            (done,) = results(
                base, site, DEVICE, "caller", json.dumps(asked), config=HOOKS
            )
            logs[site] = done["log"]
        difference = differs(logs["official"], logs["envelope"], args.steps)
        del asked["streams"]
        rows.append(asked | {"equal": not difference, "difference": difference})
        print(json.dumps(rows[-1]), flush=True)
        if args.results:
            told = {"recorded": commit, "device": DEVICE, "programs": rows}
            write_whole(args.results, json.dumps(told, indent=1) + "\n")
    failed = [row["seed"] for row in rows if not row["equal"]]
    if failed:
        raise Problem(f"{len(failed)} of {len(rows)} programs differ: {failed}")


if __name__ == "__main__":
    command(main)

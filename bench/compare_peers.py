"""Ask other planners about the published runs that were added later, each from its
pinned package in an environment of its own, and write their answers:
results/real-cards/peers.json. `make bench-plan` puts them next to that of make plan.

gguf-parser reads GGUF files alone, which these models are not published in.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bench.kv_table import DATA as KV_BYTES
from bench.published_runs import DATA, merge
from bench.published_runs import PEERS as FILE
from scripts.commands import REPOSITORY, Problem, command, scratch, write_whole

PEERS = {
    "hf-mem": ["hf-mem==0.5.6"],
    "llm-d-planner": ["llm-d-planner==0.3.3"],
    "aiconfigurator": [
        "aiconfigurator-core==0.12.0", "numpy==2.4.6", "pandas==3.1.1",
        "pyarrow==26.0.1", "PyYAML==6.0.4", "scipy==1.17.1",
    ],
}  # fmt: skip


def main(args: argparse.Namespace) -> None:
    folder = args.root / DATA
    runs = tomllib.loads((folder / "runs.toml").read_text())["run"]
    parameters = json.loads((args.root / KV_BYTES).read_text())
    with scratch(args.root / "build", "peers") as own:
        asked = [
            question(run, folder, own, parameters) for run in runs if "added" in run
        ]
        told = {name: ask(name, asked, args.root, own) for name in PEERS}
    lines = (
        f"{json.dumps(PEERS[name][0])}: {{\n"
        + ",\n".join(f" {json.dumps(k)}: {json.dumps(v)}" for k, v in rows.items())
        + "\n}"
        for name, rows in told.items()
    )
    write_whole(args.root / FILE, "{\n" + ",\n".join(lines) + "\n}\n")


def question(
    run: Mapping[str, Any], folder: Path, own: Path, known: Mapping[str, Any]
) -> dict[str, Any]:
    """A run as each peer is asked about it."""
    config = json.loads((folder / run["config_file"]).read_text())
    merge(config, run.get("config_added", {}))
    place = own / run["id"]
    place.mkdir()
    (place / "config.json").write_text(json.dumps(config))
    model = known.get(Path(run["config_file"]).stem, {})
    plain = run["quantization"] == "None"
    return {
        "id": run["id"],
        "folder": place.name,
        "config": config,
        "parameters": model.get("parameters") if plain else None,
        "share": run["gpu_memory_utilization"],
        "batch": run["max_num_batched_tokens"],
        "tp": run["tensor_parallel_size"],
        "pp": run["pipeline_parallel_size"],
    } | {
        key: run[key]
        for key in (
            *("dtype", "quantization", "kv_cache_dtype"),
            *("max_model_len", "max_num_seqs"),
        )
    }


def ask(name: str, asked: list[dict[str, Any]], root: Path, own: Path) -> Any:
    """
    Raises:
        Problem: the peer could not be installed, or ended without an answer.
    """
    place = own / f"environment-{name}"
    uv = root / ".venv/bin/uv"
    program = REPOSITORY / f"bench/peers/{name.replace('-', '_')}.py"
    shown = own / "program.py"  # away from our modules of the same names
    shutil.copy(program, shown)
    for order in (
        [uv, "venv", "-q", place],
        [uv, "pip", "install", "-q", "-p", place, *PEERS[name]],
    ):
        subprocess.run(list(map(str, order)), check=True)
    done = subprocess.run(
        [place / "bin/python", shown], cwd=own, input=json.dumps(asked), text=True,
        capture_output=True,
    )  # fmt: skip
    if done.returncode:
        raise Problem(f"{name}:\n{done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


if __name__ == "__main__":
    command(main)

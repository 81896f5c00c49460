"""Write the bytes of KV cache that models keep for a token: by vLLM's own code, which
kv_specs.py runs, and by hand from the config alone.

--configs has folders of config.json files, each named after its model, in place of
ours; --only chooses some. With --plan, an engine starts for those that its pattern
names, as `make plan` would, and its tokens are kept, too. docs/data/kv-bytes.json has
all of it; `make figures` writes the table of docs/kv-cache-of-models.md from it.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.kv_specs import AVAILABLE, FLAGS, LENGTH
from bench.model_files import SCHEME, lay_out, scheme_of
from bench.scenarios.result import read_result
from bench.simulated_start import Asked, Release, simulate
from scripts import caches
from scripts.commands import REPOSITORY, Problem, command, scratch, write_whole

CARD = "h200"
DATA = "docs/data/kv-bytes.json"
# Models of a shorter context.
LENGTHS = {"llava-hf--llava-1.5-7b-hf": 2048, "microsoft--phi-2": 2048}
# Of a config: how the kinds of layers are written that attend to all.
FULL = {"attention", "full_attention", "*"}
BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
COLUMNS = [
    *("model", "by hand", "vLLM, all tokens", "vLLM, of a window"),
    *("state of a request", "groups of layers", "KV tokens in 64 GiB", "`make plan`"),
]


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--configs",
        nargs="+",
        type=Path,
        help="folders of others, which are shown alone",
    )
    parser.add_argument("--only", default="", help="pattern: models")
    parser.add_argument("--plan", default="^$", help="pattern: models to start")


def main(args: argparse.Namespace) -> None:
    folders = args.configs or [args.root / "results/real-cards/configs"]
    files = {
        file.stem: file
        for folder in folders
        for file in sorted(folder.glob("*.json"))
        if not file.stem.endswith(f".{SCHEME}") and re.search(args.only, file.stem)
    }
    release = Release.find(args.root, args.base, ours=None)
    data = args.root / DATA
    known = json.loads(data.read_text()) if data.exists() else {}

    def keep() -> None:
        if not args.configs:  # those of the page
            write(data, known)

    with scratch(args.root / "build", "kv-table") as folder:
        models = {name: lay_out(file, folder / name) for name, file in files.items()}
        for told in specs(release, models, folder):
            name = told.pop("name")
            kept = {k: v for k, v in known.get(name, {}).items() if k == "plan"}
            known[name] = {"by_hand": by_hand(config_of(files[name]))} | told | kept
            keep()
        for name, path in models.items():
            if re.search(args.plan, name):
                known[name]["plan"] = planned(release, path, folder)
                keep()
    for name in files:
        print(row(name, known[name]))


def write(file: Path, known: Mapping[str, Any]) -> None:
    """A model a line."""
    lines = (
        f"{json.dumps(name)}: {json.dumps(told)}"
        for name, told in sorted(known.items())
    )
    write_whole(file, "{\n" + ",\n".join(lines) + "\n}\n")


def config_of(file: Path) -> dict[str, Any]:
    """With the KV cache of the second file of a quantized model. It counts
    where config.json says nothing (get_config of vLLM's transformers_utils)."""
    config: dict[str, Any] = json.loads(file.read_text())
    scheme = scheme_of(file)
    if scheme.exists() and "quantization_config" not in config:
        told = json.loads(scheme.read_text())["quantization"]
        if told.get("kv_cache_quant_algo") == "FP8":
            config["quantization_config"] = {"kv_cache_scheme": {"num_bits": 8}}
    return config


def specs(
    release: Release, models: Mapping[str, Path], own: Path
) -> Iterator[dict[str, Any]]:
    """What kv_specs.py tells of each.

    Raises:
        Problem: it ended before the last.
    """
    cases = [
        {"name": name, "model": str(path), "length": LENGTHS.get(name, LENGTH)}
        for name, path in models.items()
    ]
    environment = caches.environment(
        os.environ | {"PYTHONPATH": str(REPOSITORY)},
        own,
        release.root / "build/kernels",
    )
    order = [
        *(release.python, "-m", "vgpu", f"--profile={CARD}", "--"),
        *(release.python, "-m", "bench.kv_specs", json.dumps(cases)),
    ]
    left = len(cases)
    with (own / "log").open("w+") as log:
        with subprocess.Popen(
            list(map(str, order)),
            env=dict(environment),
            text=True,
            stdout=subprocess.PIPE,
            stderr=log,
        ) as process:
            assert process.stdout
            for line in process.stdout:
                if (told := read_result(line)) is not None:
                    left -= 1
                    yield told
        log.seek(0)
        if left:
            raise Problem(f"{left} of {len(cases)} models left:\n{log.read()[-2000:]}")


def planned(release: Release, path: Path, folder: Path) -> int | str:
    """The KV tokens of an engine on a card that all weights fit on."""
    length = LENGTHS.get(path.name, LENGTH)
    flags = [*FLAGS, "--max-model-len", str(length)]
    flags += ["--kv-cache-memory-bytes", str(AVAILABLE)]
    start = Asked(
        release, str(path), CARD, tuple(flags), device={"memory": "2TiB"},
    )  # fmt: skip
    try:
        done = simulate(start, folder, path.name)
    except Problem as problem:
        refused = str(problem).splitlines()[0]
    else:
        if done.fits:
            return done.tokens
        refused = str(done.result["error"])
    return refused.replace(str(folder), "FOLDER")[:200]


# ---- the table


def table(root: Path) -> str:
    known = json.loads((root / DATA).read_text())
    head = [line(COLUMNS), line("---" if c == "model" else "---:" for c in COLUMNS)]
    names = sorted(known, key=str.lower)
    return "\n".join(["", "", *head, *(row(n, known[n]) for n in names), "", ""])


def row(name: str, told: Mapping[str, Any]) -> str:
    begin = [name.replace("--", "/"), number(told["by_hand"])]
    if "error" in told:
        return line([*begin, told["error"][:120], "", "", "", "", ""])
    full, windows, state = of_layers(told["specs"])
    groups = Counter(f"{n} {short(kind)}" for n, kind in told["groups"])
    names = (f"{n} x {kind}" if n > 1 else kind for kind, n in groups.items())
    plan = told.get("plan", "")
    return line(
        [
            *begin,
            number(full) + (" (FP8)" if told["fp8"] else ""),
            number(windows or None),
            number(state or None),
            ", ".join(names),
            number(told["tokens"]),
            number(plan) if isinstance(plan, int) else plan and "does not start",
        ]
    )


def short(kind: str) -> str:
    return re.sub("(KVCache)?Specs?$", "", kind)


def line(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def number(value: float | None) -> str:
    return "" if value is None else f"{value:,.0f}"


def of_layers(layers: Sequence[Mapping[str, Any]]) -> tuple[float, float, float]:
    """Bytes of a token that stay, bytes of one while it is in the window, and bytes of
    a request, however long it is."""
    full = windows = state = 0.0
    for layer in layers:
        if layer["kind"] == "MambaSpec":
            state += layer["layers"] * layer["page"]
            continue
        of_token = layer["layers"] * layer["page"] / layer["block"]
        if layer["window"]:
            windows += of_token
        else:
            full += of_token
    return full, windows, state


# ---- by hand


def by_hand(config: Mapping[str, Any]) -> float | None:
    """Bytes of a token of layers that attend to all, from the fields that papers name.
    None: the config has none of them, or its paper has more than these."""
    text = config.get("text_config", config)
    layers = text.get("num_hidden_layers")
    heads = text.get("num_attention_heads")
    if layers is None or heads is None or "compress_ratios" in text:
        return None
    size: float = BYTES[text.get("dtype", text.get("torch_dtype")) or "bfloat16"]
    if (bits := kv_bits(config)) is not None:
        size = bits / 8
    kinds = kinds_of(text, layers)
    kinds = kinds[: len(kinds) - (text.get("num_kv_shared_layers") or 0)]
    full = sum(kind in FULL for kind in kinds)
    if rank := text.get("kv_lora_rank"):  # DeepSeek-V2, equation 9: (d_c + d_R) l
        latent = layers * (rank + text["qk_rope_head_dim"]) * size
        return float(latent + of_indexers(text, layers))
    kv_heads = text.get("num_key_value_heads") or heads
    head = text.get("head_dim") or text["hidden_size"] // heads
    if full != len(kinds):  # Gemma 4: global layers have sizes of their own
        kv_heads = text.get("num_global_key_value_heads") or kv_heads
        head = text.get("global_head_dim") or head
    return float(2 * full * kv_heads * head * size)


def of_indexers(text: Mapping[str, Any], layers: int) -> int:
    """Of layers that choose tokens (DeepSeek-V3.2): a key in FP8 and a scale for each
    128 of its elements."""
    size = text.get("index_head_dim", 0)
    own = text.get("indexer_types", ["full"] * layers).count("full")
    return int(own * (size + size // 128 * 4))


def kv_bits(config: Mapping[str, Any]) -> float | None:
    """Of the checkpoint's own scheme of its KV cache; that of weights is another."""
    scheme = (config.get("quantization_config") or {}).get("kv_cache_scheme")
    return float(scheme["num_bits"]) if isinstance(scheme, dict) else None


def kinds_of(text: Mapping[str, Any], layers: int) -> list[str]:
    """One for each layer."""
    if pattern := text.get("hybrid_override_pattern"):
        return list(pattern)
    if given := text.get("layer_types"):
        return list(given)
    every = text.get("sliding_window_pattern") or text.get("full_attention_interval")
    if text.get("model_type") == "gemma2":
        every = 2
    if text.get("attention_chunk_size"):  # Llama 4
        every = 4
    if every:  # the last of each is full
        other = "sliding_attention"
        return [other if (i + 1) % every else "full_attention" for i in range(layers)]
    return ["full_attention"] * layers


if __name__ == "__main__":
    command(main)

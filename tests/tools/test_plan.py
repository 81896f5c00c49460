"""make plan: what is asked wrongly is one line, without an engine."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.tools.project import module

MODEL = {"model_type": "llama", "architectures": ["LlamaForCausalLM"]}
CASES = {
    "no model": (["--gpu", "h100"], "MODEL=config.json or its folder is needed"),
    "missing": (["--model", "none", "--gpu", "h100"], "none: there is no such file"),
    "folder": (["--model", "{empty}", "--gpu", "h100"], "config.json: there is no"),
    "no JSON": (["--model", "{text}", "--gpu", "h100"], "no config of a model"),
    "no model type": (["--model", "{other}", "--gpu", "h100"], "'model_type'"),
    "no card": (["--model", "{model}"], "GPU=: one of a100-40gb, a100-80gb, b200"),
    "unknown card": (["--model", "{model}", "--gpu", "h9"], "GPU=h9: one of"),
    "several cards": (["--model", "{model}", "--gpu", "a100"], "GPU=a100: one of"),
    "quotes": (["--model", "{model}", "--gpu", "h100", "--flags=a 'b"], "--flags: No"),
    "sweep of nothing": (
        ["--model", "{model}", "--gpu", "h100", "--sweep", "max-model-len"],
        "write max-model-len=8k..128k or gpu=",
    ),
    "empty sweep": (
        ["--model", "{model}", "--gpu", "h100", "--sweep", "max-model-len=8k..4k"],
        "8192 to 4096 is empty",
    ),
    "sweep of words": (
        ["--model", "{model}", "--gpu", "h100", "--sweep", "max-model-len=a..b"],
        "'a' is no number (as 8k or 8192)",
    ),
    "no report": (["--report", "none"], "none: No such file"),
    "another report": (["--report", "{model}"], "as VLLM_STARTUP_MEMORY_REPORT writes"),
}


@pytest.mark.parametrize("case", CASES)
def test_what_is_asked_wrongly_is_one_line(case: str, tmp_path: Path) -> None:
    arguments, expected = CASES[case]
    files = {name: tmp_path / name for name in ("empty", "text", "other", "model")}
    files["empty"].mkdir()
    files["text"].write_text("no JSON")
    files["other"].write_text("{}")
    files["model"].write_text(json.dumps(MODEL))
    # Cards and sweeps are read once there is an environment.
    root = tmp_path / "root"
    python = root / ".venv-vllm-0.33.0/bin/python"
    python.parent.mkdir(parents=True)
    python.touch()
    (root / "build").mkdir()
    given = [argument.format(**files) for argument in arguments]
    done = module("bench.plan", "--root", root, "--release", "official", *given)
    assert done.returncode == 1, (done.stdout, done.stderr)
    assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1
    assert expected in done.stderr


def test_no_environment_says_what_makes_it(tmp_path: Path) -> None:
    model = tmp_path / "model.json"
    model.write_text(json.dumps(MODEL))
    (tmp_path / "build").mkdir()
    done = module(
        "bench.plan", "--root", tmp_path, "--release", "official", "--model", model,
        "--gpu", "RTX 4090",
    )  # fmt: skip
    assert done.returncode == 1
    assert done.stderr == "error: 'make .venv-vllm-0.33.0/ready' first.\n"

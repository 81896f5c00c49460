"""make plan: a mistake in a flag is a one-line error, without starting an engine."""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bench.plan import (
    changes,
    model_folder,
    number,
    simulate_with_changes,
    swept_values,
)
from bench.plan_tables import swept_row, table
from bench.simulated_start import Asked, Plan, Release, of_dummies, of_hub, ranks, why
from scripts import topics
from scripts.commands import REPOSITORY, Problem
from scripts.release import Base
from tests.tools.project import module

GIB = 1 << 30
LENGTH = "estimated maximum model length is"
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
        "write max-model-len=8K..128K or gpu=",
    ),
    "empty sweep": (
        ["--model", "{model}", "--gpu", "h100", "--sweep", "max-model-len=8K..4K"],
        "8192 to 4096 is empty",
    ),
    "sweep of words": (
        ["--model", "{model}", "--gpu", "h100", "--sweep", "max-model-len=a..b"],
        "'a' is no number (as 8K or 8192)",
    ),
    "set of the release": (
        ["--model", "{model}", "--gpu", "h100", "--set", "shared"],
        "SET= and PATCHES= are of patched vLLM",
    ),
    "no report": (["--report", "none"], "none: No such file"),
    "another report": (["--report", "{model}"], "as VLLM_STARTUP_MEMORY_REPORT writes"),
}


@pytest.mark.parametrize("case", CASES)
def test_wrong_question_is_one_line(case: str, tmp_path: Path) -> None:
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


@pytest.mark.parametrize("by_report", [False, True])
def test_set_that_is_not_built_says_what_makes_it(
    by_report: bool, tmp_path: Path
) -> None:
    (tmp_path / "patches").symlink_to(REPOSITORY / "patches")
    (tmp_path / "build").mkdir()
    model = tmp_path / "model.json"
    given: list[str | Path] = ["--model", model, "--gpu", "h100", "--set", "shared"]
    if by_report:
        start = {"vllm": "0.33.0+envelope.shared.20.g3231ee46", "options": {}}
        model.write_text(json.dumps({"start": start}))
        given = ["--report", model]
    else:
        model.write_text(json.dumps(MODEL))
    done = module("bench.plan", "--root", tmp_path, *given)
    assert done.returncode == 1
    assert done.stderr == (
        "error: 'make vgpu envelope BASE=0.33.0 SET=shared' first.\n"
    )


def test_set_is_started_from_its_own_build(tmp_path: Path) -> None:
    (tmp_path / "patches").symlink_to(REPOSITORY / "patches")
    ours = topics.of_set(Base.load(tmp_path, "0.33.0"), "shared")
    ours.unpacked.mkdir(parents=True)
    python = Release(tmp_path, "0.33.0", None).python
    python.parent.mkdir(parents=True)
    python.touch()
    release = Release.find(tmp_path, "0.33.0", ours)
    assert release.ours == ours.unpacked
    assert ours.unpacked.name.startswith("envelope-0.33.0+envelope.shared.")


MODELOPT = REPOSITORY / "results/real-cards/configs/nvidia--Llama-3.1-70B-Instruct-FP8"


def test_file_and_folder_of_a_model_are_alike(tmp_path: Path) -> None:
    """With the second file of a quantized model, by the name that vLLM reads."""
    folder = Path(model_folder(f"{MODELOPT}.json", tmp_path))
    scheme = MODELOPT.with_name(f"{MODELOPT.name}.hf_quant_config.json").read_bytes()
    assert (folder / "hf_quant_config.json").read_bytes() == scheme
    config = folder / "config.json"
    assert config.read_bytes() == Path(f"{MODELOPT}.json").read_bytes()
    assert model_folder(str(folder), tmp_path) == str(folder)
    assert model_folder(str(config), tmp_path) == str(folder)


def test_mistral_folder_is_read_as_vllm_does(tmp_path: Path) -> None:
    """Its params.json counts next to weights in its format; a file alone by a flag."""
    folder, own = tmp_path / "mistral", tmp_path / "own"
    folder.mkdir()
    own.mkdir()
    params = folder / "params.json"
    params.write_text(json.dumps({"dim": 512, "n_layers": 4}))
    as_mistral = ["--config-format", "mistral"]
    alone = Path(model_folder(str(params), own))
    assert alone.parent == own and of_dummies(str(alone))[-2:] == as_mistral
    (folder / "consolidated-00001-of-00002.safetensors").touch()
    for given in params, folder:
        assert model_folder(str(given), own) == str(folder)
    assert of_dummies(str(folder))[-2:] == as_mistral
    (folder / "tekken.json").touch()
    (folder / "config.json").write_text(json.dumps(MODEL))
    assert model_folder(str(folder), own) == str(folder)
    assert not {"mistral", "--skip-tokenizer-init"} & set(of_dummies(str(folder)))


@pytest.mark.parametrize(
    ("config", "scheme", "expected"),
    [
        ({}, False, False),
        ({}, True, True),
        ({"quantization_config": {}}, False, True),
        ({"compression_config": {}}, False, True),
        ({"text_config": {"quantization_config": {}}}, False, True),
        ({"text_config": None}, False, False),
    ],
)
def test_fp8_is_not_proposed_for_a_quantized_model(
    config: dict[str, Any], scheme: bool, expected: bool, tmp_path: Path
) -> None:
    of = plan(tmp_path, config=MODEL | config)
    if scheme:
        (tmp_path / "hf_quant_config.json").write_text("{}")
    fp8 = ["--quantization", "fp8"]
    assert (fp8 not in list(changes(of))) == expected
    # The engine's word counts, also for a model on the hub.
    of.result["quantization"] = None if expected else "modelopt"
    assert (fp8 in list(changes(of))) == expected


@pytest.mark.parametrize(
    ("flags", "online"),
    [
        ("--max-model-len 8K --served-model-name acme/tiny", False),
        ("--tokenizer {folder} --hf-config-path={folder}", False),
        ("--tokenizer acme/tiny", True),
        ("--hf_config_path=acme/tiny", True),
        ("--speculative-config.model acme/tiny", True),
        ("""--speculative-config '{{"model": "acme/tiny"}}'""", True),
        ("""-sc '{{"method": "ngram"}}'""", False),
        ("--spec-model {folder}", False),
    ],
)
def test_hub_is_asked_for_names_alone(flags: str, online: bool, tmp_path: Path) -> None:
    """With the cache of the user, who may be offline by a variable."""
    of = plan(tmp_path, *shlex.split(flags.format(folder=tmp_path)), config=MODEL)
    told = of_hub(of.asked, {"HOME": "/home/me"})
    assert told == (
        {"HF_HOME": "/home/me/.cache/huggingface"}
        if online
        else {"HF_HUB_OFFLINE": "1"}
    )


def test_cache_of_the_hub_is_the_users(tmp_path: Path) -> None:
    asked = replace(plan(tmp_path, config=MODEL).asked, model="acme/tiny")
    for user in {"HF_HOME": "/c/hf", "XDG_CACHE_HOME": "/d"}, {"HF_HOME": "/c/hf"}:
        assert of_hub(asked, user) == {"HF_HOME": "/c/hf"}
    assert of_hub(asked, {"XDG_CACHE_HOME": "/d"}) == {"HF_HOME": "/d/huggingface"}


def plan(folder: Path, *flags: str, config: dict[str, Any], **result: Any) -> Plan:
    (folder / "config.json").write_text(json.dumps(config))
    release = Release(folder, "0.33.0", None)
    told = {"outcome": "OutOfMemoryError", "error": "CUDA out of memory.", **result}
    return Plan(Asked(release, str(folder), "h100", flags), told)


def test_weights_that_do_not_fit_are_halved_or_split(tmp_path: Path) -> None:
    """Nothing else is tried: a shorter request makes no weights smaller."""
    asked = {"total": 24 * GIB, "requested": 20 * GIB}
    config = MODEL | {"num_attention_heads": 12}

    def tried(weights: int, *flags: str, **more: object) -> list[str]:
        of = plan(
            tmp_path, *flags, config=config | more, weights=weights * GIB, **asked
        )
        assert f"take {weights}.00 GiB, more than the 20.00 GiB" in why(of.result)
        return [" ".join(change) for change in changes(of)]

    fp8, cards = "--quantization fp8", "--tensor-parallel-size "
    assert tried(30) == [fp8, cards + "2"]
    assert tried(60) == [cards + "4"]
    assert tried(30, "--quantization", "fp8") == [cards + "2"]
    assert tried(30, quantization_config={}) == [cards + "2"]
    assert tried(30, "-tp", "2") == [fp8, cards + "4"]
    assert tried(90) == []  # 8 cards do not split 12 heads
    assert tried(60, num_key_value_heads=6) == []  # nor 4 cards 6 of them


def test_weights_in_eight_bits_are_those_that_were_counted(tmp_path: Path) -> None:
    """Embeddings stay as they are: half of all may fit where they do not."""
    told = {"weights": 30 * GIB, "total": 24 * GIB, "requested": 20 * GIB}

    def first(size: int) -> list[str]:
        return next(
            changes(plan(tmp_path, config=MODEL, weights_fp8=size * GIB, **told))
        )

    assert first(19) == ["--quantization", "fp8"]
    assert first(20) == ["--tensor-parallel-size", "2"]


def test_loading_that_does_not_fit_is_said_and_given_room(tmp_path: Path) -> None:
    """A shorter request would not help, though the weights alone fit."""
    told = {"weights": 15 * GIB, "total": 24 * GIB, "requested": 20 * GIB}
    of = plan(tmp_path, config=MODEL | {"quantization_config": {}}, **told)
    assert ["--enforce-eager"] in list(changes(of))
    assert why(of.result) == "CUDA out of memory."
    of.result["phase"] = "weights"
    assert why(of.result) == (
        "loading takes more than the 15.00 GiB of weights: CUDA out of memory."
    )
    assert [" ".join(change) for change in changes(of)] == [
        "--gpu-memory-utilization 0.97", "--tensor-parallel-size 2",
    ]  # fmt: skip


def test_model_without_a_kv_cache_fits(tmp_path: Path) -> None:
    told = {"outcome": "started", "version": "0.33.0"}
    of = plan(tmp_path, config=MODEL, **told)
    assert of.in_short() == "fits: no KV cache"
    assert table(of).endswith("It fits: no KV cache.")
    assert swept_row("one", of) == "| one | yes |  |  |  | 0 |  |"


def test_more_of_the_card_is_tried_where_it_holds_the_weights(tmp_path: Path) -> None:
    told = {"weights": 15 * GIB, "total": 24 * GIB, "non_torch_before": GIB}

    def first(requested: int, *flags: str) -> list[str]:
        of = plan(tmp_path, *flags, config=MODEL, requested=requested * GIB, **told)
        return next(changes(of))

    utilization = ["--gpu-memory-utilization", "0.97"]
    assert first(12, "--gpu-memory-utilization", "0.5") == utilization
    limit = ["--gpu-memory-limit-bytes", str(int(24 * GIB * 0.97))]
    assert first(11, "--gpu-memory-limit-bytes=12G") == limit
    # The fraction is what bounds it.
    both = ("--gpu-memory-limit-bytes", "20G", "--gpu-memory-utilization", "0.5")
    assert first(12, *both) == utilization


def test_more_cards_are_tried_until_their_number_fits(tmp_path: Path) -> None:
    told = {"weights": 30 * GIB, "total": 24 * GIB, "requested": 20 * GIB}
    config: dict[str, Any] = MODEL | {"quantization_config": {}}
    of = plan(tmp_path, config=config, **told)
    none = plan(tmp_path, config=config, weights=15 * GIB, requested=20 * GIB)
    fits = plan(tmp_path, config=config, outcome="started")
    tried = []
    for change in changes(of):
        tried.append(" ".join(change))
        of.tried.append(fits if len(tried) == 2 else none)
    assert tried == ["--tensor-parallel-size 2", "--tensor-parallel-size 4"]
    short = replace(none, result=none.result | {"error": f"the {LENGTH} 8192."})
    of.tried.clear()
    words = []
    for change in changes(of):
        words.append(" ".join(change))
        of.tried.append(short)
    assert words[1:] == ["--tensor-parallel-size 2 --max-model-len 8192"]


def test_weights_that_do_not_fit_are_said_before_anything_is_tried(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    told = {"version": "0.33.0", "total": 24 * GIB, "non_torch_before": GIB}
    told |= {"weights": 30 * GIB, "weights_fp8": 16 * GIB, "requested": 20 * GIB}
    starts = []

    def start(asked: Asked, folder: Path, label: str = "") -> Plan:
        starts.append((label, capsys.readouterr().out))
        outcome = "started" if "parallel" in label else "OutOfMemoryError"
        of = told | {"outcome": outcome, "concurrency": 1.0}
        return plan(tmp_path, config=MODEL, **of)

    monkeypatch.setattr("bench.plan.simulate", start)
    asked = plan(tmp_path, config=MODEL).asked
    monkeypatch.setattr("bench.plan.asked", lambda args, folder: asked)
    simulate_with_changes(argparse.Namespace(), tmp_path)
    _, (first, said), (second, _) = starts
    assert [first, second] == ["--quantization fp8", "--tensor-parallel-size 2"]
    assert said.endswith(
        "It does not fit: the weights of a card take 30.00 GiB, "
        "more than the 20.00 GiB requested\n"
        "At least needed: --quantization fp8, or --tensor-parallel-size 2.\n"
    )


def test_of_a_flag_that_is_given_twice_the_last_counts() -> None:
    assert ranks(["-tp", "2", "--tensor-parallel-size=4"]) == 4
    assert ranks(["--tensor_parallel_size", "2", "-pp", "3"]) == 6
    assert ranks([]) == 1


def test_limit_in_bytes_is_raised(tmp_path: Path) -> None:
    """The limit bounds a larger fraction."""

    def first(limit: int) -> list[str]:
        of = plan(
            tmp_path, "--gpu-memory-limit-bytes", str(limit * GIB), config=MODEL,
            total=100 * GIB, requested=(limit - 1) * GIB, non_torch_before=GIB,
        )  # fmt: skip
        return next(changes(of))

    assert first(20) == ["--gpu-memory-limit-bytes", str(97 * GIB)]
    assert first(98) == ["--enforce-eager"]


def test_numbers_are_those_of_vllm_serve() -> None:
    """test_plan.py of the engine asks vLLM's own function."""
    assert [number(n) for n in ("32k", "32K", "1m", "1M", "7", "25.6k", "2G")] == [
        32000, 32768, 1000**2, 1 << 20, 7, 25600, 2 << 30,
    ]  # fmt: skip
    for wrong in "1.5K", "1.5", "k", "32 k", "-1", "":
        with pytest.raises(Problem, match="is no number"):
            number(wrong)


def test_values_of_a_sweep_are_the_same_numbers() -> None:
    assert swept_values("32k,32K,auto") == ["32000", "32768", "auto"]
    assert swept_values("8K..20k") == ["8192", "16384", "20000"]


def test_flags_survive_the_shell() -> None:
    """Quotes of either kind, as JSON has them."""
    flags = """--hf-overrides '{"a": 1, "b": [2]}' --x "it's" """
    done = subprocess.run(
        ["make", "-s", "-o", ".venv/ready", "plan", f"FLAGS={flags}", "RUN=printf %s"],
        cwd=REPOSITORY, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert done.stdout == f"--flags={flags}"

"""make plan: vLLM's own engine on a virtual card, as a command."""

from __future__ import annotations

import contextlib
import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from bench.plan import number
from bench.plan_engine import (
    Dropped,
    dropped,
    fill_without_copies,
    quantize_without_weights,
    refuse_dropped,
    sample_without_kernels,
    untie_as_the_checkpoint,
)
from bench.scenarios.models import MODELS
from tests.vgpu.engine.harness import ROOT, run
from tests.vgpu.engine.hub import hub
from tests.vgpu.scenarios.reload import checkpoint

MODEL = MODELS["dense"]
# Embedding, head, the last norm and the layers' tensors, in elements of two bytes.
LAYER = 512 * (512 + 2 * 256) + 512 * 512 + 3 * 512 * 1408 + 2 * 512
WEIGHTS = 2 * (2 * 32000 * 512 + 4 * LAYER + 512)
FLAGS = "--max-model-len 2048 --max-num-seqs 16 --enforce-eager"


def plan(tmp_path: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "bench.plan", *arguments],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True, text=True, cwd=tmp_path, timeout=500,
    )  # fmt: skip


def model(tmp_path: Path, **changed: Any) -> str:
    path = tmp_path / "tiny.json"
    path.write_text(json.dumps(MODEL | changed))
    return str(path)


def predicted(tmp_path: Path, *arguments: str) -> tuple[dict[str, Any], str]:
    """Run make plan: the file that it writes, and its output."""
    done = plan(tmp_path, *arguments, "--json", "plan.json", "--svg", "plan.svg")
    assert done.returncode == 0, done.stderr
    told: dict[str, Any] = json.loads((tmp_path / "plan.json").read_text())
    return told, done.stdout


@pytest.mark.full
@pytest.mark.parametrize("release", ["official", "ours"])
def test_where_memory_will_go(release: str, tmp_path: Path) -> None:
    told, said = predicted(
        tmp_path, "--model", model(tmp_path), "--gpu", "RTX 4090", "--flags", FLAGS,
        "--release", release,
    )  # fmt: skip
    result = told["result"]
    assert told["fits"] and told["release"] == release and told["gpu"] == "rtx4090"
    assert "It fits: " in said and f"{result['kv_tokens']:,} tokens" in said
    assert result["max_num_batched_tokens"] == 2048  # that of `vllm serve`
    # PyTorch's segments of the weights, which it rounds to 2 MiB.
    assert WEIGHTS <= result["weights"] < WEIGHTS + (8 << 20)
    assert result["weights"] <= result["loading_peak"] < result["peak"]
    assert " while they load\n" in said
    assert result["kv_tokens"] == result["blocks"] * 16
    assert result["kv_cache"] == result["blocks"] * 16 * 4 * 2 * 2 * 128 * 2
    assert result["requested"] == math.ceil(result["total"] * 0.92)
    used = sum(result["in_use"].values()) + sum(result["set_aside"].values())
    assert used + result["left"] == result["requested"]
    assert "<svg" in (tmp_path / "plan.svg").read_text()


@pytest.mark.full
def test_what_a_start_changes_and_does_not_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A length that is fitted, without a line in the log, and flags of a loader."""
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "WARNING")
    told, said = predicted(
        tmp_path, "--model", model(tmp_path, max_position_embeddings=1 << 20), "--gpu",
        "rtx4090", "--release", "official", "--flags", "--max-model-len auto "
        "--max-num-seqs 16 --enforce-eager --gpu-memory-utilization 0.1 "
        """--model-loader-extra-config '{"concurrency": 8}'""",
    )  # fmt: skip
    result = told["result"]
    length = (result["blocks"] - 1) * 16  # a block is vLLM's own
    assert result["max_model_len"] == length < 1 << 20
    assert f"{length:,} tokens a request" in said
    assert result["kv_tokens"] == int(result["concurrency"] * length)


@pytest.mark.full
def test_layers_that_share_the_kv_cache(tmp_path: Path) -> None:
    """A hybrid's groups of layers lie in the same memory, which is counted once."""
    config = tmp_path / "hybrid.json"
    config.write_text(json.dumps(MODELS["hybrid"]))
    told, _ = predicted(
        tmp_path, "--model", str(config), "--gpu", "h100", "--release", "official",
        "--flags", f"{FLAGS} --gdn-prefill-backend triton",
    )  # fmt: skip
    result = told["result"]
    assert result["kv_cache"] <= result["kv_available"]
    assert min(result["in_use"].values()) >= 0


@pytest.mark.long
def test_first_of_two_ranks(tmp_path: Path) -> None:
    told, _ = predicted(
        tmp_path, "--model", model(tmp_path), "--gpu", "h100", "--flags",
        f"{FLAGS} --tensor-parallel-size 2", "--release", "official",
    )  # fmt: skip
    result = told["result"]
    # Norms are on each rank.
    assert WEIGHTS // 2 <= result["weights"] < WEIGHTS // 2 + (8 << 20)
    assert result["kv_cache"] == result["blocks"] * 16 * 4 * 2 * 128 * 2
    # Before the first snapshot: the context, NCCL's communicator, code and stacks.
    assert result["non_torch_before"] >= (522 + 484 + 101 + 183) << 20


@pytest.mark.full
def test_changes_that_make_it_fit_are_tried(tmp_path: Path) -> None:
    # 128 layers of 1 KiB a token: 32 GiB for one request.
    long = {"max_position_embeddings": 1 << 18, "num_hidden_layers": 128}
    done = plan(
        tmp_path, "--model", model(tmp_path, **long), "--gpu", "rtx4090", "--release",
        "official", "--flags", "--max-num-seqs 16 --enforce-eager "
        "--gpu-memory-utilization 0.97 --kv-cache-dtype auto --quantization fp8",
        "--json", "plan.json",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    told = json.loads((tmp_path / "plan.json").read_text())
    assert not told["fits"] and "It does not fit: To serve at least one" in done.stdout
    (tried,) = told["tried"]
    assert tried["fits"] and tried["result"]["concurrency"] >= 1
    length = tried["flags"][-1]
    assert tried["flags"][-2] == "--max-model-len"
    assert f"- --max-model-len {length}: fits: " in done.stdout


@pytest.mark.full
def test_weights_that_do_not_fit_are_said_and_nothing_is_tried(tmp_path: Path) -> None:
    """Its four heads are split by four cards at most, which do not hold them either.
    JSON in the flags has the number of layers."""
    layers, wide = 128, 1 << 18
    overrides = json.dumps({"num_hidden_layers": layers})
    done = plan(
        tmp_path, "--model", model(tmp_path, intermediate_size=wide), "--gpu",
        "rtx4090", "--release", "official", "--json", "plan.json", "--flags",
        f"--max-model-len 2K --hf-overrides '{overrides}'",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    told = json.loads((tmp_path / "plan.json").read_text())
    matrices = layers * (512 * (512 + 2 * 256) + 512 * 512 + 3 * 512 * wide)
    embeddings, norms = 2 * 32000 * 512, (2 * layers + 1) * 512
    result = told["result"]
    assert result["max_model_len"] == 2048
    assert result["weights"] == 2 * (matrices + embeddings + norms)
    assert result["weights_fp8"] == matrices + 2 * (embeddings + norms)
    assert told["tried"] == []
    assert f"take {result['weights'] / (1 << 30):.2f} GiB, more than" in done.stdout
    assert "No change of flags helps: a larger GPU, or a smaller model." in done.stdout


def test_numbers_are_those_of_vllm_serve() -> None:
    from vllm.utils.argparse_utils import human_readable_int

    for text in "32k", "32K", "25.6k", "1m", "1M", "2g", "2G", "1t", "1T", "7", " 8K ":
        assert number(text) == human_readable_int(text), text


@pytest.mark.full
@pytest.mark.parametrize(
    ("changed", "flags", "expected"),
    [
        ({}, "--no-such-flag 1", "unrecognized arguments: --no-such-flag 1"),
        ({}, "--data-parallel-size 2", "not several engines"),
    ],
)
def test_refusal_of_vllm_is_one_line(
    changed: dict[str, Any], flags: str, expected: str, tmp_path: Path
) -> None:
    done = plan(
        tmp_path, "--model", model(tmp_path, **changed), "--gpu", "h100", "--release",
        "official", f"--flags={flags}",
    )  # fmt: skip
    assert done.returncode == 1
    *_, last = done.stderr.strip().splitlines()
    assert last.startswith("error: vLLM refuses to start: ") and expected in last
    assert "Traceback" not in done.stderr


@pytest.mark.full
def test_name_is_looked_up_on_the_hub_and_kept_in_the_users_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hub"))
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    arguments = ("--model", "acme/tiny", "--gpu", "h100", "--release", "official")
    with hub(MODEL | {"model_type": "unheard-of"}) as (address, asked):
        monkeypatch.setenv("HF_ENDPOINT", address)
        done = plan(tmp_path, *arguments)
    assert any(path.endswith("config.json") for path in asked), asked
    assert "vLLM refuses to start: " in done.stderr
    assert "model type `unheard-of`" in done.stderr
    (cached,) = (tmp_path / "hub").rglob("config.json")
    assert json.loads(cached.read_text())["model_type"] == "unheard-of"


PATTERN = {"model_type": "nemotron_h", "hybrid_override_pattern": "ME*-" * 2}
IMAGES = {"model_type": "gemma3", "text_config": {"num_hidden_layers": 6}}


@pytest.mark.parametrize(
    ("config", "asked", "expected"),
    [
        (MODEL, {"num_hidden_layers": 2, "rope_theta": 1e4}, []),
        (PATTERN, {"layers_block_type": ["full_attention"], "head_dim": 64}, []),
        (PATTERN, {"num_hidden_layers": 2}, ["stays 8 for nemotron_h, the length of"]),
        (IMAGES, {"mm_tokens_per_image": 64}, []),
        (IMAGES, {"num_hidden_layers": 2}, ['stays 6 for gemma3_text: write {"text_c']),
    ],
)
def test_overrides_that_a_config_drops_are_found(
    config: dict[str, Any], asked: dict[str, Any], expected: list[str], tmp_path: Path
) -> None:
    from vllm.transformers_utils.config import get_config, get_hf_text_config

    (tmp_path / "config.json").write_text(json.dumps(config))
    made = get_config(str(tmp_path), False, hf_overrides_kw=asked)
    found = list(dropped(made, get_hf_text_config(made), asked))
    assert len(found) == len(expected), found
    assert all(part in line for part, line in zip(expected, found, strict=True))


@pytest.mark.parametrize(
    ("said", "taken"),
    [
        ({}, True),
        ({"quantization_config": {"quant_method": "fp8"}}, True),
        # As MLX writes it; older files have the first alone.
        ({"quantization": {"bits": 4}, "quantization_config": {"bits": 4}}, False),
        ({"quantization": {"bits": 4}}, False),
    ],
)
def test_quantization_that_vllm_drops_is_refused(
    said: dict[str, Any], taken: bool, tmp_path: Path
) -> None:
    from vllm.config import ModelConfig

    (tmp_path / "config.json").write_text(json.dumps(MODEL | said))
    made = ModelConfig(model=str(tmp_path), skip_tokenizer_init=True)
    with (
        contextlib.nullcontext()
        if taken
        else pytest.raises(
            Dropped,
            match='vLLM knows no quantization.* {"bits": 4.*weights in bfloat16',
        )
    ):
        refuse_dropped(made, {})


@pytest.mark.full
def test_dropped_override_starts_nothing(tmp_path: Path) -> None:
    overrides = json.dumps({"num_hidden_layers": 2})
    config = tmp_path / "config.json"
    config.write_text(json.dumps(PATTERN | {"architectures": ["NemotronHForCausalLM"]}))
    done = plan(
        tmp_path, "--model", str(config), "--gpu", "h100", "--release", "official",
        f"--flags=--hf-overrides '{overrides}'",
    )  # fmt: skip
    assert done.returncode == 1, done.stdout
    *_, last = done.stderr.strip().splitlines()
    assert last.startswith("error: --hf-overrides: num_hidden_layers stays 8 ")


def test_gptq_without_a_checkpoint_is_quantized(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.model_executor.layers.quantization.auto_gptq import AutoGPTQConfig
    from vllm.model_executor.layers.quantization.utils.gptq_utils import (
        is_layer_gptq_quantized,
    )

    look_up = AutoGPTQConfig.maybe_update_config
    monkeypatch.setattr(AutoGPTQConfig, "maybe_update_config", look_up)
    quantize_without_weights()
    said = {"bits": 4, "group_size": 128, "desc_act": False, "sym": True}
    config = AutoGPTQConfig.from_config(said | {"quant_method": "gptq"})
    config.maybe_update_config(str(tmp_path))
    layers = config.modules_in_block_to_quantize
    assert is_layer_gptq_quantized("model.layers.0.self_attn.o_proj", layers)


@pytest.mark.parametrize("head", ["none", "equal", "different"])
def test_head_is_untied_if_that_of_the_checkpoint_differs(
    head: str, tmp_path: Path
) -> None:
    import torch
    from safetensors.torch import save_file
    from vllm.config import ModelConfig

    config = MODEL | {"tie_word_embeddings": True}
    (tmp_path / "config.json").write_text(json.dumps(config))
    embeddings = torch.arange(8192 * 4).reshape(8192, 4)
    tensors = {"model.embed_tokens.weight": embeddings}
    if head != "none":
        tensors["lm_head.weight"] = embeddings.clone()
    if head == "different":
        tensors["lm_head.weight"][-1, -1] = 0
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    made = ModelConfig(model=str(tmp_path), skip_tokenizer_init=True)
    untie_as_the_checkpoint(made)
    assert made.hf_config.tie_word_embeddings == (head != "different")
    # Dummies are equal: vLLM would tie them again.
    assert not made.word_embeddings_untied_by_checkpoint


@pytest.mark.vgpu(memory="1GiB")
def test_dummies_of_eight_bits_take_no_copy() -> None:
    import torch
    from vllm.model_executor.model_loader import dummy_loader

    fill_without_copies()
    weight = torch.empty(1 << 20, dtype=torch.float8_e4m3fn, device="cuda")
    dummy_loader.initialize_single_dummy_weight(weight)
    assert torch.cuda.max_memory_allocated() == weight.nbytes


@pytest.mark.vgpu(memory="1GiB")
def test_scales_of_an_fp8_kv_cache_without_a_checkpoint() -> None:
    import torch
    from vllm.model_executor.layers.quantization.kv_cache import BaseKVCacheMethod

    from bench.scenarios.on_the_host import compare_scales_on_host

    method, layer = BaseKVCacheMethod(None), torch.nn.Module()
    layer.kv_cache_dtype = "fp8"
    with torch.device("cuda"):
        method.create_weights(layer)
        for name in "q", "k", "v", "prob":
            layer.register_buffer(f"_{name}_scale", torch.tensor(7.0))
    for name in "k", "v":
        layer.register_buffer(f"_{name}_scale_cpu", torch.tensor(7.0))
    compare_scales_on_host()
    method.process_weights_after_loading(layer)
    assert (layer._k_scale_float, layer._v_scale_float) == (1, 1)
    assert (layer._q_scale_float, layer._v_scale_cpu) == (1, 1)


@pytest.mark.vgpu(memory="1GiB")
def test_size_of_repeats_is_counted_on_the_host() -> None:
    import torch

    from bench.scenarios.on_the_host import count_repeats_on_host

    count_repeats_on_host()
    x = torch.zeros(2, 3, device="cuda")
    each, all_of = (torch.tensor(n).cuda() for n in ([1, 0, 4], [2]))
    assert x.repeat_interleave(each, 1).shape == (2, 5)
    assert x.repeat_interleave(all_of, dim=1).shape == (2, 6)
    assert x.repeat_interleave(repeats=each, dim=1).shape == (2, 5)
    assert x.repeat_interleave(2, 0).shape == (4, 3)


@pytest.mark.vgpu(memory="1GiB")
def test_unique_values_are_counted_on_the_host() -> None:
    import torch

    from bench.scenarios.on_the_host import count_unique_on_host

    count_unique_on_host()
    x = torch.tensor([3, 1, 3, 3], device="cuda")
    assert torch.unique(x).tolist() == [1, 3]
    values, counts = torch.unique(x, return_counts=True)
    assert (values.tolist(), counts.tolist()) == ([1, 3], [1, 3])
    assert values.is_cuda and torch.unique(x).is_cuda


@pytest.mark.vgpu(memory="1GiB")
def test_rope_of_flashinfer_is_not_compiled() -> None:
    import torch
    from flashinfer.jit.core import JitSpec
    from flashinfer.rope import apply_rope_with_cos_sin_cache_inplace

    from vgpu import control

    JitSpec.build = None
    sample_without_kernels()
    q, k = (torch.zeros(4, heads * 64, device="cuda") for heads in (8, 2))
    positions, cache = torch.arange(4).cuda(), torch.zeros(16, 64, device="cuda")
    before = control.kernels()
    apply_rope_with_cos_sin_cache_inplace(positions, q, k, 64, cache)
    assert control.kernels() == before + 1


@pytest.mark.full
def test_reported_start_is_started_again(tmp_path: Path) -> None:
    """On a slice whose sources disagree, next to another process."""
    device = {"memory": "6GiB", "nvml_total": "16GiB", "context": "300MiB"}
    device |= {"name": "A Slice", "compute_capability": "8.6", "other": "1GiB"}
    case = {"model": "dense", "v2": True, "report": True}
    started = run("start", case, vllm="envelope", device=device, folder=tmp_path)
    file = tmp_path / "report.json"
    file.write_text(json.dumps(started["report"]))
    assert str(tmp_path) not in file.read_text()
    told, said = predicted(tmp_path, "--report", str(file))
    assert told["result"]["blocks"] == started["blocks"]
    again = told["result"]["report"]
    for key in "sources", "total", "free_before", "held_before", "requested", "card":
        assert again[key] == started["report"][key], key
    assert again["in_use"] == started["report"]["in_use"]
    assert "A Slice" in said and "reported" in said


@pytest.mark.long
def test_head_that_is_a_copy_is_reported_as_it_is_held(tmp_path: Path) -> None:
    """Once it is loaded, it shares the memory of the embeddings."""
    from safetensors.torch import save_file

    weights = checkpoint(MODEL, 0)
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()
    folder = tmp_path / "model"
    folder.mkdir()
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    tied = {"load_format": "auto", "hf_overrides": {"tie_word_embeddings": True}}
    case = {"v2": True, "report": True, "folder": str(folder), "llm": tied}
    device = {"memory": "8GiB"}
    started = run("start", case, vllm="envelope", device=device, folder=tmp_path)
    (file := tmp_path / "report.json").write_text(json.dumps(started["report"]))
    told, _ = predicted(tmp_path, "--report", str(file))
    head = weights["lm_head.weight"].nbytes
    for held in told["result"]["weights"], started["report"]["in_use"]["weights"]:
        assert WEIGHTS - head <= held < WEIGHTS - head + (8 << 20)

"""The code of libraries that build on vLLM, from their packages: build/libraries.

As derived.py. Only vLLM's code that they call runs; modules of theirs that are not
installed here are stand-ins that accept everything.
"""

from __future__ import annotations

import ast
import importlib
import importlib.abc
import importlib.machinery
import os
import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.vgpu.scenarios import derived

LIBRARIES = Path(__file__).resolve().parents[3] / "build/libraries"


def unsloth_standby() -> dict[str, Any]:
    """unsloth_zoo replaces the allocator's methods; its functions are taken out of
    their module, which needs a trainer's packages."""
    import gc
    import logging

    import torch
    import vllm

    names: dict[str, Any] = {
        "DEVICE_TYPE": "cuda", "logger": logging.getLogger("unsloth"), "os": os,
        "gc": gc, "torch": torch, "vllm": vllm, "vllm_version": vllm.__version__,
        "_device_empty_cache": torch.cuda.empty_cache,
    }  # fmt: skip
    exec("from typing import *", names)
    source = (LIBRARIES / "unsloth_zoo/vllm_utils.py").read_text()
    patches = "patch_vllm_enable_sleep_mode", "patch_vllm_reset_caches_on_sleep"
    for node in ast.parse(source).body:
        if isinstance(node, ast.FunctionDef) and node.name in patches:
            exec(ast.get_source_segment(source, node) or "", names)
    for patch in patches:
        names[patch]()
    llm = derived.engine(enable_sleep_mode=True, kv_cache_memory_bytes=64 << 20)
    runner = llm.llm_engine.model_executor.driver_worker.worker.model_runner
    weights = [weight.data for weight in runner.model.parameters()]
    for weight in weights:  # kernels do nothing
        weight.copy_(torch.full(weight.shape, 3, dtype=weight.dtype))
    result: dict[str, Any] = {}
    for cycle in (1, 2):
        llm.sleep(1)
        llm.wake_up()
        kept = all(bool((weight.cpu() == 3).all()) for weight in weights)
        result[f"cycle {cycle}"] = [kept, derived.serve(llm)]
    assert all(kept for kept, _ in result.values()), result
    return result


def omni_worker() -> dict[str, Any]:
    """vllm-omni's worker and runner, with a talker that has CUDA graphs of its own."""
    import torch

    with stand_ins(
        "av", "kernels", "cache_dit", "torchsde", "whisper", "imageio", "gguf",
        "x_transformers", "cosmos_guardrail", "s3tokenizer", "onnxruntime", "librosa",
        "resampy", "mooncake", "hydra", "scipy", "vector_quantize_pytorch", "ftfy",
        "torchdiffeq", "pydub", "cv2x", "fa3_fwd", "flash_attn", "diffusers",
        "prettytable", "omegaconf", "soundfile", "janus", "hyperpyyaml",
        "imageio_ffmpeg",
    ):  # fmt: skip
        from vllm_omni.worker.gpu_ar_model_runner import GPUARModelRunner
        from vllm_omni.worker.gpu_ar_worker import GPUARWorker

    class Talker(GPUARModelRunner):  # type: ignore[misc]
        def load_model(self, *arguments: Any, **options: Any) -> None:
            super().load_model(*arguments, **options)
            from vllm.compilation.cuda_graph import CUDAGraphWrapper
            from vllm.config import CUDAGraphMode

            self.has_talker_mtp = True
            self.talker_mtp = CUDAGraphWrapper(
                lambda *_, **__: torch.empty(1, device="cuda"),
                self.vllm_config,
                runtime_mode=CUDAGraphMode.FULL,
            )

        def _capture_talker_mtp_graphs(self, skip_full: bool = False) -> None:
            pass

        def _talker_mtp_runs_in_dummy_run(self) -> bool:
            return False

    class TalkerWorker(GPUARWorker):  # type: ignore[misc]
        model_runner_cls = Talker

    # It starts. To serve, it needs one of vllm-omni's models.
    return derived.starts(TalkerWorker, **derived.GRAPHS)


def verl_extension() -> dict[str, Any]:
    """verl's own extension of the worker, by its name, and its call of a method."""
    module = "verl.workers.rollout.vllm_rollout.utils"
    with stand_ins(
        "tensordict", "ray", "hydra", "omegaconf", "codetiming", "torchdata", "peft",
        "datasets", "pandas", "wandb", "pylatexenc", "liger_kernel",
        "dill", "pyarrow", "tensorboard",
    ):  # fmt: skip
        importlib.import_module(module)
    name = "vLLMColocateWorkerExtension"
    llm = derived.engine(worker_extension_cls=f"{module}.{name}")
    worker = llm.llm_engine.model_executor.driver_worker.worker
    given = [c.__name__ for c in type(worker).__mro__ if "verl" in c.__module__]
    before = worker.model_runner.model.compute_logits
    llm.collective_rpc("monkey_patch_model", args=(1000,))
    replaced = worker.model_runner.model.compute_logits is not before
    return {"classes": given, "replaced": replaced, "tokens": derived.serve(llm)}


def lmcache_connector() -> dict[str, Any]:
    """LMCache's connector, with a backend in the memory of the host. Its kernels for
    CUDA are made for another PyTorch: it copies with PyTorch's instead."""
    os.environ["LMCACHE_LOCAL_CPU"] = "True"
    os.environ["LMCACHE_MAX_LOCAL_CPU_SIZE"] = "0.1"
    os.environ["LMCACHE_CHUNK_SIZE"] = "16"
    told = {"kv_connector": "LMCacheConnectorV1", "kv_role": "kv_both"}
    with stand_ins(
        "aiofile", "aiofiles", "awscrt", "cufile", "grpc_observability", "redis",
        "cupy",
    ):  # fmt: skip
        llm = derived.engine(
            kv_transfer_config=told,
            kv_cache_memory_bytes=64 << 20,
            disable_hybrid_kv_cache_manager=True,
        )
        return {"tokens": [derived.serve(llm), derived.serve(llm)]}


def lens_plugin() -> dict[str, Any]:
    """vllm-lens's plugin, which captures the output of each layer. Of a pass that
    fails, it has each position once."""
    from vllm_lens._activations_plugin import register

    register()
    llm = derived.engine()
    worker = llm.llm_engine.model_executor.driver_worker.worker
    layers = worker.model_runner.model.model.layers
    wanted = {"output_residual_stream": list(range(len(layers)))}
    output = derived.generate(llm, extra_args=wanted)
    captured = list(output.activations["residual_stream"].shape)
    derived.fail_once(layers[-1].mlp)
    failed = derived.tokens_or_error(
        lambda: len(derived.generate(llm, extra_args=wanted).outputs[0].token_ids)
    )
    (left,) = worker._captured_states.values()
    positions = [sum(map(len, tensors)) for tensors in left.values()]
    return {"captured": captured, "failed": failed, "positions": positions}


class Anything(type):
    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return StandIn

    def __or__(cls, other: Any) -> Any:
        return cls

    __ror__ = __getitem__ = __or__


class StandIn(metaclass=Anything):
    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        return getattr(type(self), name)

    def __call__(self, *given: Any, **_: Any) -> Any:
        return given[0] if len(given) == 1 and callable(given[0]) else StandIn()


class StandInModule(types.ModuleType):
    __path__: list[str] = []
    __version__ = "99.0.0"

    def __getattr__(self, name: str) -> Any:
        return getattr(StandIn, name)


class StandIns(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def __init__(self, names: tuple[str, ...]) -> None:
        self.names = names

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        if name.split(".")[0] in self.names:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: Any) -> types.ModuleType:
        return StandInModule(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        pass


@contextmanager
def stand_ins(*names: str) -> Iterator[None]:
    """For packages that are not installed, while a library is imported."""
    import transformers  # looks for some of them

    del transformers
    finder = StandIns(names)
    sys.meta_path.append(finder)  # behind installed modules
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
        for name in [n for n in sys.modules if n.split(".")[0] in names]:
            if isinstance(sys.modules[name], StandInModule):
                del sys.modules[name]


WAYS = {
    way.__name__: way
    for way in (
        unsloth_standby,
        omni_worker,
        verl_extension,
        lmcache_connector,
        lens_plugin,
    )
}


if __name__ == "__main__":
    sys.path.append(str(LIBRARIES))
    # Not those of the other packages: a plugin of vLLM's is loaded if it is there.
    os.environ["VLLM_PLUGINS"] = "vgpu_block_ids"
    derived.main(WAYS)

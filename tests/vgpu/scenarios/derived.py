"""Libraries that build on vLLM: each of their ways to reach into it, by name, serving.

The argument is a JSON object {"ways": [...]}. Prints a RESULT line for each way: what
it saw, and how it ended. Each is run in a process of its own, forked before CUDA is
used. One file, however long: it is the list of ways, which share a few helpers.
"""

from __future__ import annotations

import json
import math
import os
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

from bench.scenarios.result import print_result

MIB = 2**20
NEIGHBOURS: list[int] = []
GRAPHS: dict[str, Any] = {
    "enforce_eager": False,
    "compilation_config": {
        "mode": 0,
        "cudagraph_mode": "FULL_DECODE_ONLY",
        "cudagraph_capture_sizes": [1, 2],
    },
}


def settings() -> dict[str, Any]:
    from bench.scenarios.models import MODELS

    folder = Path(tempfile.mkdtemp())
    (folder / "config.json").write_text(json.dumps(MODELS["dense"]))
    return {
        "model": str(folder),
        "max_model_len": 512,
        "max_num_seqs": 2,
        "max_num_batched_tokens": 512,
        "gpu_memory_utilization": 0.5,
        "attention_backend": "TRITON_ATTN",
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "enable_prefix_caching": False,
        "enforce_eager": True,
        "disable_log_stats": True,
    }


def engine(**more: Any) -> Any:
    from vllm import LLM

    return LLM(**(settings() | more))


def serve(llm: Any) -> int:
    """Tokens of a request; 4 were asked for."""
    return len(list(generate(llm).outputs[0].token_ids))


def generate(llm: Any, **more: Any) -> Any:
    from vllm import SamplingParams

    told = SamplingParams(temperature=0, max_tokens=4, detokenize=False, **more)
    told.ignore_eos = True
    prompt = {"prompt_token_ids": list(range(3, 23))}
    (output,) = llm.generate(prompt, told, use_tqdm=False)
    return output


def serves(worker: type, **more: Any) -> dict[str, Any]:
    llm = start(worker, **more)
    return {"tokens": serve(llm), "blocks": blocks(llm)}


def starts(worker: type, **more: Any) -> dict[str, Any]:
    return {"blocks": blocks(start(worker, **more))}


def blocks(llm: Any) -> int:
    return int(llm.llm_engine.vllm_config.cache_config.num_gpu_blocks)


def start(worker: type, **more: Any) -> Any:
    """An engine, with this class in the module that `worker_cls` names."""
    globals()[worker.__name__] = worker
    worker.__module__ = __name__
    sys.modules.setdefault("tests.vgpu.scenarios.derived", sys.modules[__name__])
    return engine(worker_cls=f"tests.vgpu.scenarios.derived.{worker.__name__}", **more)


def neighbour(mebibytes: int) -> None:
    """Memory of another process, until this one ends."""
    from vgpu import control

    control.other_process(mebibytes * MIB)
    NEIGHBOURS.append(mebibytes * MIB)


def request_memory_replaced() -> dict[str, Any]:
    """kvcached, verl's forks, workers that wait for memory: gpu_worker's function."""
    from vllm.v1.worker import gpu_worker

    calls = []

    def patched(snapshot: Any, config: Any, *rest: Any) -> int:
        calls.append(snapshot.free_memory)
        wanted: float = snapshot.total_memory * config.gpu_memory_utilization
        return math.ceil(wanted)

    gpu_worker.request_memory = patched
    neighbour(1024)  # less than the request is free
    llm = engine(gpu_memory_utilization=0.9, num_gpu_blocks_override=256)
    return {"tokens": serve(llm), "calls": len(calls)}


def graphs_overridden() -> dict[str, Any]:
    """vllm-omni's talker, vllm-ascend: a runner that profiles graphs of its own, with
    the release's KV cache for it, too."""
    import torch
    from vllm.config import set_current_vllm_config
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner
    from vllm.v1.worker.gpu_worker import Worker

    class Runner(GPUModelRunner):  # type: ignore[misc]
        @torch.inference_mode()  # type: ignore[untyped-decorator]
        def profile_cudagraph_memory(self) -> int:
            graphs = super().profile_cudagraph_memory()
            with set_current_vllm_config(self.vllm_config):
                self._init_minimal_kv_cache_for_profiling()
            self._cleanup_profiling_kv_cache()
            return int(graphs)

    class OwnGraphs(Worker):  # type: ignore[misc]
        def _make_model_runner(self) -> Any:
            return Runner(self.vllm_config, self.device)

    return serves(OwnGraphs, **GRAPHS)


def worker_overridden() -> dict[str, Any]:
    """Methods of the worker, as Dynamo's and forks override them, and functions that
    Dynamo, SkyRL and kvcached replace."""
    from vllm.v1.worker import gpu_model_runner, gpu_worker

    calls: list[str] = []
    allocated: set[str] = set()
    runner = gpu_model_runner.GPUModelRunner
    load_model = runner.load_model

    def recorded(self: Any, *given: Any, **named: Any) -> Any:
        calls.append("load_model")
        return load_model(self, *given, **named)

    runner.load_model = recorded
    if allocate := getattr(gpu_model_runner, "allocate_kv_cache", None):

        def own_allocate(
            kv_cache_config: Any,
            device: Any,
            layout: Any,
            kernel_block_sizes: Any = None,
        ) -> Any:
            allocated.add("KV cache")  # also while memory is profiled
            return allocate(kv_cache_config, device, layout, kernel_block_sizes)

        gpu_model_runner.allocate_kv_cache = own_allocate
    environment = gpu_worker.init_worker_distributed_environment

    def own_environment(
        vllm_config: Any, rank: int, distributed_init_method: str | None = None,
        local_rank: int = -1, backend: str = "nccl",
    ) -> None:  # fmt: skip
        calls.append("environment")
        environment(vllm_config, rank, distributed_init_method, local_rank, backend)

    gpu_worker.init_worker_distributed_environment = own_environment

    class Overridden(gpu_worker.Worker):  # type: ignore[misc]
        @contextmanager
        def _scoped_allocator_max_split(self, max_split_size_mb: int) -> Iterator[None]:
            calls.append(f"split {max_split_size_mb}")
            with super()._scoped_allocator_max_split(max_split_size_mb):
                yield

        def determine_available_memory(self) -> int:
            memory = super().determine_available_memory()
            calls.append(f"activations {self.peak_activation_memory > 0}")
            # Room for the activations of one more step.
            return int(memory - self.peak_activation_memory)

        def initialize_from_config(self, kv_cache_config: Any) -> None:
            calls.append("initialize_from_config")
            super().initialize_from_config(kv_cache_config)

        def compile_or_warm_up_model(self) -> Any:
            kernel_warmup = gpu_worker.kernel_warmup
            gpu_worker.kernel_warmup = lambda worker: calls.append("kernel_warmup")
            try:
                return super().compile_or_warm_up_model()
            finally:
                gpu_worker.kernel_warmup = kernel_warmup

        def execute_model(self, scheduler_output: Any) -> Any:
            calls.append("execute_model")
            return super().execute_model(scheduler_output)

    result = serves(Overridden) | {"calls": calls}
    return result | {"allocated": sorted(allocated)} if allocate else result


MANAGED = """
#include <sys/types.h>
int cudaMallocManaged(void**, size_t, unsigned);
int cudaFree(void*);
void* kv_malloc(ssize_t size, int device, void* stream) {
  void* p = 0;
  return cudaMallocManaged(&p, size, 1) ? 0 : p;
}
void kv_free(void* p, ssize_t size, int device, void* stream) { cudaFree(p); }
"""


def virtual_kv_cache() -> dict[str, Any]:
    """Dynamo's memory service: a pool of its own for the KV cache, not backed yet."""
    import torch
    from vllm.v1.worker.gpu_worker import Worker

    library = managed_memory()

    class Virtual(Worker):  # type: ignore[misc]
        def _maybe_get_memory_pool_context(self, tag: str) -> Any:
            if tag == "weights":
                return nullcontext()
            if tag != "kv_cache":
                return super()._maybe_get_memory_pool_context(tag)
            self.own = torch.cuda.memory.CUDAPluggableAllocator(
                str(library), "kv_malloc", "kv_free"
            )
            self.pool = torch.cuda.memory.MemPool(self.own._allocator)
            return torch.cuda.use_mem_pool(self.pool)

    neighbour(3600)
    explicit = {"gpu_memory_utilization": 0.05, "kv_cache_memory_bytes": 1 << 30}
    return serves(Virtual, **explicit)


def managed_memory() -> Path:
    import subprocess

    folder = Path(tempfile.mkdtemp())
    source, library = folder / "managed.c", folder / "managed.so"
    source.write_text(MANAGED)
    build = ["gcc", "-shared", "-fPIC", "-o", str(library), str(source)]
    subprocess.run(build, check=True)
    return library


def own_measure() -> dict[str, Any]:
    """A worker that leaves PyTorch's peak next to the KV cache, and nothing more."""
    import torch
    from vllm.v1.worker.gpu_worker import Worker

    class Peak(Worker):  # type: ignore[misc]
        @torch.inference_mode()  # type: ignore[untyped-decorator]
        def determine_available_memory(self) -> int:
            torch.cuda.reset_peak_memory_stats()
            self.model_runner.profile_run()
            self.cudagraph_memory_estimate = 0
            self.available_kv_cache_memory_bytes = int(
                self.requested_memory - torch.cuda.max_memory_allocated()
            )
            return self.available_kv_cache_memory_bytes

    return serves(Peak)


def hooks_append() -> dict[str, Any]:
    """vllm-lens: a hook's result of a pass that fails is there once."""
    llm = engine()
    runner = llm.llm_engine.model_executor.driver_worker.worker.model_runner
    layers = runner.model.model.layers
    positions: list[int] = []
    layers[0].register_forward_hook(
        lambda module, given, output: positions.append(len(output[0]))
    )
    fail_once(layers[-1].mlp)
    return {"tokens": tokens_or_error(lambda: serve(llm)), "positions": positions}


def tokens_or_error(serve: Callable[[], int]) -> int | str:
    try:
        return serve()
    except Exception as error:
        return type(error).__name__


def fail_once(module: Any) -> None:
    """The module's next pass begins with an allocation that fails."""
    import torch

    from vgpu import control

    times = [1]

    def fail(module: Any, given: Any) -> None:
        if not times:
            return
        times.clear()
        torch.cuda.empty_cache()
        for call in ("cudaMalloc*", "cuMemAlloc*", "cuMemCreate"):
            control.inject(call, times=1000, over=MIB)
        try:
            torch.empty(256 * MIB, dtype=torch.uint8, device="cuda")
        finally:
            control.clear_injections()

    module.register_forward_pre_hook(fail)


def extension_and_plugin() -> dict[str, Any]:
    """verl's worker_extension_cls, and a collective_rpc with a function."""
    llm = engine(worker_extension_cls="tests.vgpu.scenarios.derived.Extension")
    (rank,) = llm.collective_rpc("own_rank")
    (layers,) = llm.collective_rpc(lambda worker: len(worker.model_runner.attn_groups))
    return {"ranks": rank + 1, "groups": layers, "tokens": serve(llm)}


class Extension:
    def own_rank(self) -> int:
        return int(self.rank)  # type: ignore[attr-defined]


def own_inits() -> dict[str, Any]:
    """A worker and an allocator that set the attributes of the release's __init__."""
    from vllm.device_allocator.cumem import CuMemAllocator
    from vllm.distributed.elastic_ep.elastic_execute import ElasticEPScalingExecutor
    from vllm.v1.worker.gpu_worker import Worker
    from vllm.v1.worker.worker_base import WorkerBase

    class OwnAllocator(CuMemAllocator):  # type: ignore[misc]
        def __init__(self) -> None:
            self.current_tag = CuMemAllocator.default_tag
            self.pointer_to_data: dict[int, Any] = {}
            self.allocator_and_pools: dict[str, Any] = {}
            self.python_malloc_callback = self._python_malloc_callback
            self.python_free_callback = self._python_free_callback

    class OwnInit(Worker):  # type: ignore[misc]
        def __init__(self, vllm_config: Any, **more: Any) -> None:
            WorkerBase.__init__(self, vllm_config, **more)
            self.use_v2_model_runner = False
            self.elastic_ep_executor = ElasticEPScalingExecutor(self)
            self.worker_sentinel = self.weight_transfer_engine = self.profiler = None
            self._sleep_saved_buffers: dict[str, Any] = {}
            self._sleep_saved_parameters: dict[str, Any] = {}
            self._sleep_saved_draft_buffers: dict[str, Any] = {}
            self._sleep_rebuild_draft_metadata_buffers = False
            self._weight_update_active = self._weight_update_is_draft = False
            self.profiler_config = vllm_config.profiler_config
            self._pp_send_work: list[Any] = []
            self._sleep_mode_backend = None

    CuMemAllocator.instance = OwnAllocator()
    llm = start(OwnInit, enable_sleep_mode=True)
    tokens = serve(llm)
    llm.sleep(1)
    asleep = CuMemAllocator.instance.get_current_usage()
    llm.wake_up()
    return {"tokens": [tokens, serve(llm)], "asleep": asleep > 0, "blocks": blocks(llm)}


def sleep_cycles() -> dict[str, Any]:
    """SkyRL's weight synchronization, which keeps the KV cache alone, and TRL's, which
    keeps nothing: the weights are written between two parts of waking up."""
    import torch
    from vllm.device_allocator import get_mem_allocator_instance

    from vgpu import control

    def write(tensors: list[Any], value: int) -> None:  # kernels do nothing
        for tensor in tensors:
            tensor.copy_(torch.full(tensor.shape, value, dtype=tensor.dtype))

    def hold(tensors: list[Any], value: int) -> bool:
        return all(bool((tensor.cpu() == value).all()) for tensor in tensors)

    llm = engine(enable_sleep_mode=True, kv_cache_memory_bytes=64 * MIB)
    runner = llm.llm_engine.model_executor.driver_worker.worker.model_runner
    weights = [weight.data for weight in runner.model.parameters()]
    # Views of them have the order of their layout.
    storages = {t.untyped_storage().data_ptr(): t for t in runner.kv_caches}
    cache = [
        torch.empty(0, dtype=torch.uint8, device="cuda").set_(t.untyped_storage())
        for t in storages.values()
    ]
    allocator = get_mem_allocator_instance()
    result: dict[str, Any] = {}
    for cycle in (1, 2):
        write(cache, cycle)
        awake = control.used()
        allocator.sleep(offload_tags=("kv_cache",))
        released = awake - control.used() >= allocator.get_current_usage()
        torch.cuda.empty_cache()
        allocator.wake_up(["weights"])
        write(weights, cycle)
        torch.cuda.empty_cache()
        allocator.wake_up(["kv_cache"])
        kept: dict[str, Any] = {"released": released, "weights": hold(weights, cycle)}
        kept |= {"cache": hold(cache, cycle), "tokens": serve(llm)}
        result[f"skyrl {cycle}"] = kept
    for cycle in (3, 4):
        awake = control.used()
        llm.sleep(level=2)
        released = awake - control.used() >= allocator.get_current_usage()
        llm.wake_up(tags=["weights"])
        write(weights, cycle)
        llm.wake_up(tags=["kv_cache"])
        kept = {"released": released, "weights": hold(weights, cycle)}
        result[f"trl {cycle}"] = kept | {"tokens": serve(llm)}
    assert all(all(kept.values()) for kept in result.values()), result
    return result


def texts() -> dict[str, Any]:
    """Log lines that scripts search for."""
    import logging

    said: list[str] = []

    make = logging.getLogRecordFactory()

    def kept(*given: Any, **named: Any) -> logging.LogRecord:
        record = make(*given, **named)
        said.append(record.getMessage())
        return record

    logging.setLogRecordFactory(kept)  # an engine configures its handlers anew
    tokens = serve(engine())
    words = "Actual usage is", "to fit into requested memory", "kv cache memory in use"
    found = [word for word in words if any(word in text for text in said)]
    return {"found": found, "tokens": tokens}


def engine_dead() -> dict[str, Any]:
    """vllm-omni's and vllm-ascend's handlers of fatal errors: without arguments."""
    import queue

    from vllm.v1.engine.core import EngineCoreProc

    core: Any = EngineCoreProc.__new__(EngineCoreProc)
    core.output_queue = queue.Queue()
    core.output_thread = threading.Thread(target=time.sleep, args=(0,))
    core.output_thread.start()
    try:
        raise RuntimeError("a fatal error")
    except RuntimeError:
        core._send_engine_dead()
    return {"sent": core.output_queue.get() == EngineCoreProc.ENGINE_CORE_DEAD}


def process_made_by_others() -> dict[str, Any]:
    """vllm-ascend's executor: an _init_executor, processes and handles of its own."""
    import weakref
    from collections import deque

    from vllm.distributed.device_communicators.shm_broadcast import MessageQueue
    from vllm.utils.network_utils import (
        get_distributed_init_method,
        get_ip,
        get_loopback_ip,
        get_open_port,
    )
    from vllm.utils.system_utils import get_mp_context
    from vllm.v1.executor.multiproc_executor import (
        MultiprocExecutor,
        UnreadyWorkerProcHandle,
        WorkerProc,
    )

    class OwnProcesses(MultiprocExecutor):  # type: ignore[misc]
        def _init_executor(self) -> None:
            self._finalizer = weakref.finalize(self, self.shutdown)
            self.is_failed = False
            self.failure_callback = None
            self._get_parallel_sizes()
            self.rpc_broadcast_mq = MessageQueue(1, 1, connect_ip=get_ip())
            self.workers = WorkerProc.wait_for_ready([self.own_process()])
            self.start_worker_monitor()
            self.response_mqs = [self.workers[0].worker_response_mq]
            for queue in (self.rpc_broadcast_mq, *self.response_mqs):
                queue.wait_until_ready()
            self.futures_queue = deque[Any]()
            self.output_rank = self._get_output_rank()

        def own_process(self) -> Any:
            context = get_mp_context()
            ready, tells_ready = context.Pipe(duplex=False)
            death, death_writer = context.Pipe(duplex=False)
            given = {
                "vllm_config": self.vllm_config, "local_rank": 0, "rank": 0,
                "distributed_init_method": get_distributed_init_method(
                    get_loopback_ip(), get_open_port()
                ),
                "input_shm_handle": self.rpc_broadcast_mq.export_handle(),
                "ready_pipe": tells_ready, "death_pipe": death,
                "shared_worker_lock": context.Lock(), "is_driver_worker": True,
                "inherited_fds": [ready.fileno(), death_writer.fileno()],
            }  # fmt: skip
            process = context.Process(
                target=WorkerProc.worker_main, kwargs=given, daemon=True
            )
            process.start()
            tells_ready.close()
            death.close()
            return UnreadyWorkerProcHandle(process, 0, ready, death_writer)

    os.environ["VLLM_WORKER_MULTIPROCESSING_METHOD"] = "fork"
    llm = engine(distributed_executor_backend=OwnProcesses)
    tokens = [serve(llm)]
    try:
        llm.collective_rpc(fails)
        raised = False
    except RuntimeError as error:
        raised = "Worker failed with error 'a call fails'" in str(error)
    tokens.append(serve(llm))
    executor = llm.llm_engine.model_executor
    executor.shutdown()
    ended = [not handle.proc.is_alive() for handle in executor.workers]
    return {"tokens": tokens, "raised": raised, "ended": ended, "blocks": blocks(llm)}


def own_loop_of_requests() -> dict[str, Any]:
    """vllm-ascend's recovery: a worker_busy_loop that unpacks requests itself."""
    import pickle

    from vllm.v1.executor.multiproc_executor import WorkerProc

    def own_loop(self: Any) -> None:
        while True:
            request = self.rpc_broadcast_mq.dequeue(indefinite=True)
            method, args, kwargs, output_rank = request
            try:
                if isinstance(method, str):
                    output = getattr(self.worker, method)(*args, **kwargs)
                else:
                    output = pickle.loads(method)(self.worker, *args, **kwargs)
            except Exception as error:
                output = error
            if output_rank in (None, self.rank):
                self.handle_output(output)

    WorkerProc.worker_busy_loop = own_loop  # the process is forked
    return process_made_by_others()


def worker_driven_by_hand() -> dict[str, Any]:
    """No engine: the layout of the KV cache is resolved after its size is asked for."""
    from vllm.engine.arg_utils import EngineArgs
    from vllm.utils.network_utils import (
        get_distributed_init_method,
        get_ip,
        get_open_port,
    )
    from vllm.v1.attention.backends.utils import resolve_kv_cache_layout
    from vllm.v1.core.kv_cache_planning import (
        get_global_kv_cache_groups,
        get_kv_cache_configs,
    )
    from vllm.v1.worker.worker_base import WorkerWrapperBase

    config = EngineArgs(**settings()).create_engine_config()
    wrapper = WorkerWrapperBase(rpc_rank=0)
    method = get_distributed_init_method(get_ip(), get_open_port())
    wrapper.init_worker(
        [
            {
                "vllm_config": config,
                "local_rank": 0,
                "rank": 0,
                "distributed_init_method": method,
                "is_driver_worker": True,
            }
        ]
    )
    wrapper.init_device()
    wrapper.load_model()
    worker = wrapper.worker
    spec = worker.get_kv_cache_spec()
    available = worker.determine_available_memory()
    layouts = [worker.get_supported_kv_cache_layouts()]
    layout = resolve_kv_cache_layout(config, layouts, list(spec.values()))
    parallel = config.parallel_config
    worker.set_kv_cache_layout(layout.name, parallel.cp_kv_cache_interleave_size)
    groups = get_global_kv_cache_groups(config, [spec])
    planned = get_kv_cache_configs(config, [spec], [available], groups)
    for plan in planned:
        plan.kv_cache_layout = config.cache_config.kv_cache_layout
    config.cache_config.num_gpu_blocks = planned[0].num_blocks
    wrapper.initialize_from_config(planned)
    worker.compile_or_warm_up_model()
    return {"blocks": planned[0].num_blocks}


def replaced_on_the_class() -> dict[str, Any]:
    """A function that another one wraps on the class, and that reads the KV cache and
    makes what attention needs. Attention keeps the first KV cache that it sees. Another
    process releases memory while vLLM profiles."""
    import torch
    from vllm.v1.attention.backends.triton_attn import TritonAttentionImpl
    from vllm.v1.worker.gpu_worker import Worker

    neighbour(600)
    caches: list[int] = []
    views: dict[int, torch.Tensor] = {}
    initialize, forward = Worker.initialize_from_config, TritonAttentionImpl.forward

    def replaced(self: Any, config: Any) -> None:
        neighbour(-sum(NEIGHBOURS))
        initialize(self, config)
        caches.append(len(self.model_runner.kv_caches))

    def attend(
        self: Any, layer: Any, q: Any, k: Any, v: Any, kv_cache: Any, *more: Any,
        **named: Any,
    ) -> Any:  # fmt: skip
        if kv_cache is not None and kv_cache.numel():
            assert caches, "attention runs before initialize_from_config"
            views.setdefault(id(self), kv_cache)
        return forward(self, layer, q, k, v, kv_cache, *more, **named)

    Worker.initialize_from_config = replaced
    TritonAttentionImpl.forward = attend
    llm = engine(gpu_memory_utilization=0.7)
    served = {"tokens": serve(llm), "blocks": blocks(llm), "caches": caches}
    runner = llm.llm_engine.model_executor.driver_worker.worker.model_runner

    def storages(tensors: Any) -> set[int]:
        return {tensor.untyped_storage().data_ptr() for tensor in tensors}

    real = storages(views.values()) == storages(runner.kv_caches)
    return served | {"views of the KV cache": real}


def replaced_on_the_object() -> dict[str, Any]:
    """A function of the runner itself, with the parameters of the release."""
    from vllm.v1.worker.gpu_worker import Worker

    calls: list[int] = []
    load = Worker.load_model

    def loaded(self: Any, **more: Any) -> None:
        load(self, **more)
        initialize = self.model_runner.initialize_kv_cache

        def replaced(config: Any, kv_cache_allocation_context: Any = None) -> None:
            calls.append(config.num_blocks)
            initialize(config, kv_cache_allocation_context=kv_cache_allocation_context)

        self.model_runner.initialize_kv_cache = replaced

    Worker.load_model = loaded
    llm = engine()
    served = {"tokens": serve(llm), "blocks": blocks(llm)}
    return served | {"calls": len(calls), "whole": calls == [blocks(llm)]}


def executor_replaced() -> dict[str, Any]:
    """What the workers say is available, changed for all executors."""
    from vllm.v1.executor.abstract import Executor

    Executor.determine_available_memory = lambda self: [64 * MIB]
    llm = engine()
    return {"tokens": serve(llm), "as told": blocks(llm)}


def fails(worker: Any) -> None:
    raise ValueError("a call fails")


WAYS: dict[str, Callable[[], dict[str, Any]]] = {
    way.__name__: way
    for way in (
        request_memory_replaced,
        graphs_overridden,
        worker_overridden,
        virtual_kv_cache,
        own_measure,
        hooks_append,
        extension_and_plugin,
        own_inits,
        sleep_cycles,
        texts,
        engine_dead,
        process_made_by_others,
        own_loop_of_requests,
        worker_driven_by_hand,
        replaced_on_the_class,
        replaced_on_the_object,
        executor_replaced,
    )
}


def main(ways: dict[str, Callable[[], dict[str, Any]]] = WAYS) -> None:
    os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "0"
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"
    os.environ["VLLM_USE_FLASHINFER_SAMPLER"] = "0"
    from vgpu import control

    for name in json.loads(sys.argv[1])["ways"]:
        sys.stdout.flush()
        if (child := os.fork()) == 0:
            try:
                from bench.scenarios.on_the_host import inspect_models_here

                with suppress(AttributeError):
                    inspect_models_here()
                result = ways[name]()
            except BaseException as error:
                traceback.print_exc()
                result = {"error": f"{type(error).__name__}: {error}"[:500]}
            if NEIGHBOURS:
                control.other_process(-sum(NEIGHBOURS))
            print_result({"way": name} | result)
            os._exit(0)
        os.waitpid(child, 0)


if __name__ == "__main__":
    main()

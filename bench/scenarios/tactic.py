"""FlashInfer's autotuner measures a tactic that asks for memory.

FlashInfer's own kernels cannot run on the virtual device, but its autotuner can. So
this adds an operation to the model's first layer norm that asks the autotuner for a
tactic.
"""

from __future__ import annotations

import os
import tempfile
from typing import Any

from bench.scenarios.wrap import after


def add(result: dict[str, Any], transient: int = 0, kept: int = 0) -> None:
    """Let each model that is loaded from here on ask the autotuner for a tactic.

    `result["tactic"]` becomes "measured", or "out of memory" if the autotuner skips it.
    It is not set if the autotuner never runs.

    Args:
        transient: Bytes that the tactic allocates while it is measured.
        kept: Bytes that it allocates when it is first measured, and keeps.
    """
    # Otherwise FlashInfer needs nvcc to count as installed, and remembers the tactic.
    os.environ["VLLM_HAS_FLASHINFER_CUBIN"] = "1"
    os.environ["VLLM_FLASHINFER_AUTOTUNE_CACHE_DIR"] = tempfile.mkdtemp()
    import torch
    from flashinfer.autotuner import AutoTuner, TunableRunner, TuningConfig
    from vllm.v1.worker.gpu_worker import Worker

    class Tactic(TunableRunner):  # type: ignore[misc]
        workspace: Any = None

        def get_valid_tactics(self, inputs: Any, profile: Any) -> list[int]:
            return [0]

        def forward(
            self,
            inputs: Any,
            tactic: int = -1,
            do_preparation: bool = False,
            **options: Any,
        ) -> Any:
            if tactic == 0 and AutoTuner.get().is_tuning_mode:
                result["tactic"] = "out of memory"
                if self.workspace is None:
                    self.workspace = torch.empty(kept, dtype=torch.uint8, device="cuda")
                torch.empty(transient, dtype=torch.uint8, device="cuda")
                result["tactic"] = "measured"
            return inputs[0]

    runner = Tactic()

    def operation(_: Any, inputs: tuple[Any, ...]) -> None:
        tuner = AutoTuner.get()
        tensors = [inputs[0]]
        chosen, tactic = tuner.choose_one("stand_in", [runner], TuningConfig(), tensors)
        chosen(tensors, tactic=tactic)

    def ask(worker: Any) -> None:
        norm = next(
            module
            for name, module in worker.model_runner.get_model().named_modules()
            if name.endswith("layernorm")
        )
        norm.register_forward_pre_hook(operation)

    after(Worker, "load_model", ask)

"""The imports of PyTorch's test files, before a process is forked for each test.

Imports ask which card there is, and none may be initialized before a fork: NVML
answers, and whether Triton is installed stands for whether the card runs it.
"""

import pynvml
import torch
from torch.utils import _triton

_asked = _triton.has_triton, torch.cuda.get_device_capability


def _capability(device: object = None) -> tuple[int, int]:
    handle = pynvml.nvmlDeviceGetHandleByIndex(0)
    major, minor = pynvml.nvmlDeviceGetCudaComputeCapability(handle)
    return major, minor


pynvml.nvmlInit()
_triton.has_triton, torch.cuda.get_device_capability = (
    _triton.has_triton_package,
    _capability,
)
try:
    import torch._inductor.cudagraph_trees  # after each test, PyTorch resets it
    import torch.testing._internal.autocast_test_lists
    import torch.testing._internal.common_cuda
    import torch.testing._internal.common_device_type
    import torch.testing._internal.common_optimizers
    import torch.testing._internal.common_utils  # noqa: F401
finally:
    _triton.has_triton, torch.cuda.get_device_capability = _asked

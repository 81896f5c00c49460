"""Bytes of the device: counted by the virtual one, asked of NVML on a GPU.

Import it before CUDA is initialized: on a GPU, memory that is used at that time is not
this process's, and the peak counts only later memory.
"""

from __future__ import annotations

import os

# The GPU suite asks NVML even where a virtual device stands in for a GPU.
VIRTUAL = "VGPU_RUN" in os.environ and os.environ.get("ENVELOPE_METER") != "NVML"
# What the runtime does not call the driver for.
CALLS = ("cu[A-Z]*", "nvml*", "cudaHost*", "cudaFreeHost", "cudaMemcpy*")
if VIRTUAL:
    from vgpu import control
else:
    from gpu.card import Meter

    _meter = Meter()


def is_out_of_memory(error: RuntimeError) -> bool:
    """Extensions with PyTorch's stable ABI raise no torch.OutOfMemoryError."""
    return "out of memory" in str(error)


def used() -> int:
    return control.used() if VIRTUAL else _meter.used()


def process_used() -> int:
    return control.process_used() if VIRTUAL else _meter.used()


def watch_peak() -> None:
    """Start to watch the peak; the virtual device always does."""
    if not VIRTUAL:
        _meter.watch()


def peak() -> int:
    return control.peak() if VIRTUAL else _meter.peak()


def process_peak() -> int:
    return control.process_peak() if VIRTUAL else _meter.peak()


def least_available() -> int | None:
    """The least that could still be taken, of unified memory by the host too; a GPU
    does not tell."""
    return control.least_available() if VIRTUAL else None


def reset_peak() -> None:
    if VIRTUAL:
        control.reset_peak()
    else:
        _meter.reset_peak()


def kernels() -> int | None:
    """How many were launched; a GPU does not count them."""
    return control.kernels() if VIRTUAL else None


def pinned() -> int | None:
    """Bytes of host memory that this process has pinned; a GPU does not tell."""
    return control.pinned() if VIRTUAL else None


def calls() -> dict[str, int] | None:
    """How often this process called the driver, NVML and for host memory; a GPU does
    not count them."""
    if not VIRTUAL:
        return None
    return {pattern: control.made(pattern) for pattern in CALLS}


def nvml_initializations() -> int | None:
    """How often this process initialized NVML; a GPU does not count them."""
    return control.made("nvmlInit*") if VIRTUAL else None


def other_process(size: int, index: int = 0) -> None:
    """Let another process take `size` bytes, or release as many if it is negative."""
    if VIRTUAL:
        control.other_process(size, index)
    else:
        _meter.move(f"take {size}" if size > 0 else f"release {-size}")


def leave(size: int) -> None:
    """Let another process take all free memory except `size` bytes."""
    if VIRTUAL:
        control.other_process(max(0, control.memory() - control.used() - size))
    else:
        _meter.move(f"leave {size}")

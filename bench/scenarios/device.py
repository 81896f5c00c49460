"""Bytes of the device: counted by the virtual one, asked of NVML on a GPU.

Import it before CUDA is initialized: on a GPU, what is used then is not this process's,
and the peak is that of this process alone.
"""

from __future__ import annotations

import os

# The suite for GPUs asks NVML where a virtual device stands in for one, too.
VIRTUAL = "VGPU_RUN" in os.environ and os.environ.get("ENVELOPE_METER") != "NVML"
if VIRTUAL:
    from vgpu import control
else:
    from gpu.card import Meter

    _meter = Meter()


def used() -> int:
    return control.used() if VIRTUAL else _meter.used()


def process_used() -> int:
    return control.process_used() if VIRTUAL else _meter.used()


def watch_peak() -> None:
    """From here on; the virtual device always does."""
    if not VIRTUAL:
        _meter.watch()


def peak() -> int:
    return control.peak() if VIRTUAL else _meter.peak()


def process_peak() -> int:
    return control.process_peak() if VIRTUAL else _meter.peak()


def reset_peak() -> None:
    if VIRTUAL:
        control.reset_peak()
    else:
        _meter.reset_peak()


def kernels() -> int | None:
    """How many were launched; a GPU does not count them."""
    return control.kernels() if VIRTUAL else None


def other_process(size: int) -> None:
    """Let another process take `size` bytes, or release as many if it is negative."""
    if VIRTUAL:
        control.other_process(size)
    else:
        _meter.move(f"take {size}" if size > 0 else f"release {-size}")


def leave(size: int) -> None:
    """Let another process take all that is free but `size`."""
    if VIRTUAL:
        control.other_process(max(0, control.memory() - control.used() - size))
    else:
        _meter.move(f"leave {size}")

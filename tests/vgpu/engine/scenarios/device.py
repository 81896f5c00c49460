"""Bytes of the device: counted by the virtual one, asked of NVML on a GPU.

Import it before CUDA is initialized: on a GPU, what is used then is not this process's,
and the peak is that of this process alone.
"""

from __future__ import annotations

import importlib.util
import os

VIRTUAL = "VGPU_RUN" in os.environ and importlib.util.find_spec("vgpu") is not None
if VIRTUAL:
    from vgpu.control import (
        kernels,
        memory,
        other_process,
        peak,
        process_peak,
        process_used,
        reset_peak,
        used,
    )

    def watch_peak() -> None:
        """It is counted."""

    def leave(size: int) -> None:
        """Let another process take all that is free but `size`."""
        other_process(max(0, memory() - used() - size))

else:
    from card import Meter

    _meter = Meter()
    used = process_used = _meter.used
    watch_peak = _meter.watch
    peak = process_peak = _meter.peak
    reset_peak = _meter.reset_peak

    def kernels() -> None:
        """A GPU does not count them."""

    def other_process(size: int, device: int = 0) -> None:
        assert device == 0
        _meter.move(f"take {size}" if size > 0 else f"release {-size}")

    def leave(size: int) -> None:
        """Let another process take all that is free but `size`."""
        _meter.move(f"leave {size}")

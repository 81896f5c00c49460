"""Control of the virtual device from inside the program that runs on it.

Every function raises VgpuError off the device. Sizes are bytes, or texts such as
"2GiB"; devices are numbered as configured, whatever CUDA_VISIBLE_DEVICES says.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from . import build
from .config import default_error, error_code, parse_size, signed_size
from .errors import VgpuError
from .launch import library

_USED, _PEAK, _PROCESS_USED, _PROCESS_PEAK, _OTHER, _MEMORY, _ALLOCATIONS = range(7)
_AVAILABLE, _LEAST_AVAILABLE = 7, 8


def attach(run: Path) -> None:
    """Controls the run in this folder from outside, without being part of it."""
    os.environ["VGPU_RUN"], os.environ["VGPU_OBSERVER"] = str(run.resolve()), "1"
    os.environ["VGPU_LIBRARY"] = str(build.ensure() / "libcuda.so.1")


@cache
def _library() -> ctypes.CDLL:
    lib = library()
    size, text, number = ctypes.c_int64, ctypes.c_char_p, ctypes.c_int
    unsigned = ctypes.c_uint64
    signatures = {
        "vgpu_bytes": (size, [number, number]),
        "vgpu_phase_peak": (size, [text, number, number]),
        "vgpu_phase_begin": (number, [text]),
        "vgpu_phase_end": (number, [text]),
        "vgpu_reset_peak": (number, [number]),
        "vgpu_inject": (number, [text, number, unsigned, unsigned, unsigned, number]),
        "vgpu_fired": (size, [number]),
        "vgpu_inject_clear": (None, []),
        "vgpu_other": (number, [number, size, unsigned, text]),
        "vgpu_devices": (number, []),
        "vgpu_kernels": (unsigned, []),
        "vgpu_pinned": (size, [number]),
        "vgpu_calls": (size, [text]),
        "vgpu_made": (unsigned, [text]),
    }
    for name, (result, arguments) in signatures.items():
        function = getattr(lib, name)
        function.restype, function.argtypes = result, arguments
    if lib.vgpu_devices() < 0:
        raise VgpuError("the virtual device could not be opened; see stderr")
    return lib


def _bytes(device: int, what: int) -> int:
    value = int(_library().vgpu_bytes(device, what))
    if value < 0:
        raise VgpuError(f"there is no device {device}; there are {devices()}")
    return value


def devices() -> int:
    """The number of configured devices."""
    return int(_library().vgpu_devices())


def memory(device: int = 0) -> int:
    """The bytes a device has."""
    return _bytes(device, _MEMORY)


def used(device: int = 0) -> int:
    """Bytes in use, by every process of the run and the other processes."""
    return _bytes(device, _USED)


def peak(device: int = 0) -> int:
    """The largest `used` since the start or `reset_peak`."""
    return _bytes(device, _PEAK)


def process_used(device: int = 0) -> int:
    """Bytes in use by this process."""
    return _bytes(device, _PROCESS_USED)


def process_peak(device: int = 0) -> int:
    """The largest `process_used` since the start or `reset_peak`."""
    return _bytes(device, _PROCESS_PEAK)


def other(device: int = 0) -> int:
    """Bytes that other processes hold."""
    return _bytes(device, _OTHER)


def available(device: int = 0) -> int:
    """Bytes that can still be taken; of an integrated device, MemAvailable of its host,
    whose plain memory is measured now."""
    return _bytes(device, _AVAILABLE)


def least_available(device: int = 0) -> int:
    """The least `available` since the start or `reset_peak`, as far as it was measured:
    with each allocation, question for free memory and process that ends."""
    return _bytes(device, _LEAST_AVAILABLE)


def allocations(device: int = 0) -> int:
    """Allocations of device memory so far, by every process of the run."""
    return _bytes(device, _ALLOCATIONS)


def pinned() -> int:
    """Bytes of host memory that this process has pinned: allocated as such, or
    registered, in whole pages."""
    return int(_library().vgpu_pinned(0))


def pinned_peak() -> int:
    """The largest `pinned` since the start or `reset_peak`."""
    return int(_library().vgpu_pinned(1))


def kernels() -> int:
    """Kernels this process launched (they did nothing)."""
    return int(_library().vgpu_kernels())


def made(pattern: str) -> int:
    """How often this process made implemented calls of that name or pattern.

    The runtime's calls for memory are calls of the driver, too: count one or the other.
    """
    return int(_library().vgpu_made(pattern.encode()))


def finish(stream: int = 0) -> None:
    """Lets a stream do its waiting work (`streams_behind`); 0: the default stream."""
    if error := _library().vgpu_finish(ctypes.c_void_p(stream)):
        raise ValueError(f"stream {stream:#x}: error {error}")


def calls(name: str) -> int:
    """How often this process made a call that is not implemented."""
    return int(_library().vgpu_calls(name.encode()))


def reset_peak(device: int = 0) -> None:
    _bytes(device, _USED)
    _library().vgpu_reset_peak(device)


def begin_phase(name: str) -> None:
    if not name or len(name.encode()) > 90:
        raise VgpuError(f"a phase's name has 1 to 90 bytes, {name!r} has not")
    if _library().vgpu_phase_begin(name.encode()):
        raise VgpuError(f"no room for phase {name!r}: 64 names at most")


def end_phase(name: str) -> None:
    if _library().vgpu_phase_end(name.encode()):
        raise VgpuError(f"phase {name!r} is not open")


@contextmanager
def phase(name: str) -> Iterator[None]:
    """Names what happens inside, in every process of the run, for the timeline
    and for `phase_peak`. Phases may nest; a name opened again adds to its peak."""
    begin_phase(name)
    try:
        yield
    finally:
        end_phase(name)


def phase_peak(name: str, device: int = 0, *, process: bool = False) -> int:
    """The largest `used` (or `process_used`) while a phase was open."""
    _bytes(device, _USED)
    value = int(_library().vgpu_phase_peak(name.encode(), device, int(process)))
    if value < 0:
        raise VgpuError(f"no phase {name!r} was opened")
    return value


@dataclass(frozen=True)
class Injection:
    """A rule that makes calls fail."""

    call: str
    number: int

    @property
    def fired(self) -> int:
        """How often it made a call fail."""
        return int(_library().vgpu_fired(self.number))


def inject(
    call: str,
    *,
    device: int = -1,
    nth: int = 0,
    over: int | str = 0,
    times: int = 1,
    error: str | int | None = None,
) -> Injection:
    """Makes calls fail, in any process of the run.

    `call` is a name or a pattern (cuMemCreate, cudaMalloc, nvml*). Of the calls of
    more than `over` bytes on `device` (-1: any), the `nth` from now (1, or 0: the next)
    and those after it fail, `times` in all. `error` is a name (out_of_memory;
    NoPermission for NVML) or a number.
    """
    code = error_code(default_error(call) if error is None else error, call)
    if min(nth, times) < 0:
        raise VgpuError("nth and times must not be negative")
    number = _library().vgpu_inject(
        call.encode(), device, nth, parse_size(over, "over"), times, code
    )
    if number < 0:
        raise VgpuError("no room for another injection: 64 at most")
    return Injection(call, number)


def clear_injections() -> None:
    """No more injected failures."""
    _library().vgpu_inject_clear()


def other_process(
    size: int | str,
    device: int = 0,
    *,
    at_allocation: int = 0,
    at_phase: str = "",
) -> None:
    """Another process takes `size`, or gives it back if negative ("-1GiB").

    At once; or at the device's `at_allocation`-th allocation of the run; or when a
    phase opens. It takes at most the free memory and returns at most its own.
    """
    _bytes(device, _USED)
    moved = signed_size(size, "size")
    if _library().vgpu_other(device, moved, at_allocation, at_phase.encode()):
        raise VgpuError("no room for another move: 64 at most")

"""The GPU that CUDA calls 0, as its driver and NVML tell it; all sizes in bytes.

Needs only the standard library, and touches no GPU when imported.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import subprocess
import sys
import threading
import uuid
from ctypes import byref, c_char_p, c_int, c_size_t, c_ulonglong, c_void_p
from pathlib import Path
from typing import Any

MIB = 2**20
CHUNK = 32 * MIB
# CUdevice_attribute
ATTRIBUTES = {
    "clock_khz": 13,
    "sm_count": 16,
    "memory_clock_khz": 36,
    "bus_bits": 37,
    "l2_bytes": 38,
    "major": 75,
    "minor": 76,
    "shared_per_sm": 81,
    "shared_optin": 97,
    "integrated": 18,
}


class CardError(RuntimeError):
    """There is no GPU, or its driver refused a call."""


def _library(name: str) -> ctypes.CDLL:
    # Where NVIDIA's container runtime puts it, if the loader does not find it.
    for path in (name, f"/usr/local/nvidia/lib64/{name}"):
        with contextlib.suppress(OSError):
            return ctypes.CDLL(path)
    raise CardError(f"no GPU: there is no {name}, which the NVIDIA driver brings")


class Driver:
    """libcuda.so.1, with errors raised."""

    def __init__(self) -> None:
        self._cuda = _library("libcuda.so.1")
        self.call("cuInit", 0)
        count = c_int()
        self.call("cuDeviceGetCount", byref(count))
        if not count.value:
            raise CardError("no GPU: the driver is here, but shows no device")
        self.device = c_int()
        self.call("cuDeviceGet", byref(self.device), 0)

    def call(self, name: str, *arguments: Any) -> None:
        if code := getattr(self._cuda, name)(*arguments):
            text = c_char_p()
            self._cuda.cuGetErrorString(code, byref(text))
            why = (text.value or b"unknown error").decode()
            missing = "no GPU: " if name == "cuInit" else ""
            raise CardError(f"{missing}{name} failed: {why} ({code})")

    def enter_context(self) -> None:
        context = c_void_p()
        self.call("cuDevicePrimaryCtxRetain", byref(context), self.device)
        self.call("cuCtxSetCurrent", context)

    def allocate(self, size: int) -> c_void_p:
        address = c_void_p()
        self.call("cuMemAlloc_v2", byref(address), c_size_t(size))
        return address

    def free(self, address: c_void_p) -> None:
        self.call("cuMemFree_v2", address)

    def leave_context(self) -> None:
        self.call("cuDevicePrimaryCtxRelease_v2", self.device)

    def memory(self) -> tuple[int, int]:
        """Free and total, as cudaMemGetInfo says; needs a context."""
        free, total = c_size_t(), c_size_t()
        self.call("cuMemGetInfo_v2", byref(free), byref(total))
        return free.value, total.value

    def properties(self) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for key, number in ATTRIBUTES.items():
            value = c_int()
            self.call("cuDeviceGetAttribute", byref(value), number, self.device)
            found[key] = value.value
        name = ctypes.create_string_buffer(256)
        self.call("cuDeviceGetName", name, 256, self.device)
        total = c_size_t()
        self.call("cuDeviceTotalMem_v2", byref(total), self.device)
        return found | {"name": name.value.decode(), "total": total.value}

    def uuid(self) -> str:
        raw = (ctypes.c_ubyte * 16)()
        self.call("cuDeviceGetUuid_v2", raw, self.device)
        return str(uuid.UUID(bytes=bytes(raw)))


class _Memory(ctypes.Structure):
    _fields_ = [(name, c_ulonglong) for name in ("total", "free", "used")]


class Card:
    """The device in NVML: what all processes together hold of it."""

    def __init__(self) -> None:
        self.driver = Driver()
        self._nvml = _library("libnvidia-ml.so.1")
        self._call("nvmlInit_v2")
        self._handle = c_void_p()
        name = self.driver.uuid()
        self.is_mig = False
        try:
            self._find(f"GPU-{name}")
        except CardError:
            self._find(f"MIG-{name}")
            self.is_mig = True

    def _call(self, name: str, *arguments: Any) -> None:
        if code := getattr(self._nvml, name)(*arguments):
            raise CardError(f"{name} failed: NVML error {code}")

    def _find(self, name: str) -> None:
        self._call("nvmlDeviceGetHandleByUUID", name.encode(), byref(self._handle))

    def _memory(self) -> _Memory:
        memory = _Memory()
        self._call("nvmlDeviceGetMemoryInfo", self._handle, byref(memory))
        return memory

    def used(self) -> int:
        return int(self._memory().used)

    def nvml_total(self) -> int:
        return int(self._memory().total)

    def driver_version(self) -> str:
        text = ctypes.create_string_buffer(80)
        self._call("nvmlSystemGetDriverVersion", text, 80)
        return text.value.decode()

    def describe(self) -> dict[str, Any]:
        """The description of the machine's GPU in a result."""
        properties = self.driver.properties()
        return {
            "name": properties["name"],
            "memory": properties["total"],
            "compute_capability": f"{properties['major']}.{properties['minor']}",
            "driver": self.driver_version(),
            "share": share(self.is_mig),
            "used_before": self.used(),
        }


def share(is_mig: bool) -> str:
    """What slices the GPU: "HAMi", "MIG", "MPS", or "" for nothing."""
    kinds = []
    if any(key.startswith("CUDA_DEVICE_MEMORY_LIMIT") for key in os.environ) or (
        "libvgpu.so" in Path("/proc/self/maps").read_text()
    ):
        kinds.append("HAMi")
    if is_mig:
        kinds.append("MIG")
    pipes = os.environ.get("CUDA_MPS_PIPE_DIRECTORY", "/tmp/nvidia-mps")
    if (Path(pipes) / "control").exists():
        kinds.append("MPS")
    return ", ".join(kinds)


class Meter:
    """Memory of this process, if no other than its co-tenant moves memory."""

    def __init__(self) -> None:
        self._card = Card()
        self._lock = threading.Lock()
        self._base = self._card.used()
        self._peak = 0
        self._co_tenant: CoTenant | None = None

    def watch(self) -> None:
        """Watch the peak from here on: NVML has none, so ask it every millisecond."""
        threading.Thread(target=self._sample, daemon=True).start()

    def _sample(self) -> None:
        pause = threading.Event()
        while not pause.wait(0.001):
            self.used()

    def used(self) -> int:
        with self._lock:
            used = self._card.used() - self._base
            self._peak = max(self._peak, used)
            return used

    def peak(self) -> int:
        self.used()
        return self._peak

    def reset_peak(self) -> None:
        self._peak = 0
        self.used()

    def move(self, order: str) -> None:
        """Let the co-tenant carry out an order; its memory is not this process's."""
        with self._lock:
            before = self._card.used()
            if self._co_tenant is None:
                self._co_tenant = CoTenant()
            self._co_tenant.ask(order)
            self._base += self._card.used() - before


class CoTenant:
    """Another process on the GPU, which takes and releases memory as it is told.

    Orders: "take BYTES", "release BYTES" (multiples of 32 MiB), "leave BYTES" (take
    all that is free but these, as far as the driver gives it). It ends with the
    process that started it.
    """

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "gpu.card"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._answer()

    def ask(self, order: str) -> int:
        """Bytes that it holds then, its context aside.

        Raises:
            CardError: it could not, and says why.
        """
        assert self._process.stdin
        self._process.stdin.write(order + "\n")
        self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> int:
        assert self._process.stdout
        line = self._process.stdout.readline()
        answer = json.loads(line or '{"error": "it ended"}')
        if "error" in answer:
            raise CardError(f"the co-tenant: {answer['error']}")
        return int(answer["held"])


def serve_orders() -> None:
    """The co-tenant's own side."""
    blocks: list[tuple[int, c_void_p]] = []

    def answer(**what: object) -> None:
        print(json.dumps(what), flush=True)

    def take(driver: Driver, size: int) -> None:
        for part in [size % CHUNK, *[CHUNK] * (size // CHUNK)]:
            if part:
                blocks.append((part, driver.allocate(part)))

    def carry_out(driver: Driver, verb: str, size: int) -> None:
        if verb == "leave":
            size = max(0, driver.memory()[0] - size)
            size -= size % (2 * MIB)
            with contextlib.suppress(CardError):
                take(driver, size)
            return
        if verb == "take":
            take(driver, size)
            return
        chunks = [block for block in blocks if block[0] == CHUNK][: size // CHUNK]
        if size % CHUNK or len(chunks) * CHUNK != size:
            raise CardError(f"cannot release {size} bytes: multiples of 32 MiB, of own")
        for block in chunks:
            blocks.remove(block)
            driver.free(block[1])

    try:
        driver = Driver()
        driver.enter_context()
        answer(held=0)
        for line in sys.stdin:
            verb, size = line.split()
            carry_out(driver, verb, int(size))
            answer(held=sum(size for size, _ in blocks))
    except (CardError, ValueError) as error:
        answer(error=str(error))


if __name__ == "__main__":
    serve_orders()

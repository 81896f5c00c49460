"""The CUDA calls the tests make, through ctypes: codes are returned, not raised."""

from __future__ import annotations

import ctypes
from ctypes import byref, c_int, c_size_t, c_uint64, c_void_p

MIB, GIB = 2**20, 2**30
OK, INVALID_VALUE, OUT_OF_MEMORY = 0, 1, 2
INVALID_HANDLE, ILLEGAL_ADDRESS, NOT_SUPPORTED = 400, 700, 801


class Location(ctypes.Structure):
    _fields_ = [("type", c_int), ("id", c_int)]


class Properties(ctypes.Structure):
    """CUmemAllocationProp."""

    _fields_ = [
        ("type", c_int),
        ("handle_types", c_int),
        ("location", Location),
        ("win32", c_void_p),
        ("flags", ctypes.c_ubyte * 8),
    ]


class Access(ctypes.Structure):
    """CUmemAccessDesc."""

    _fields_ = [("location", Location), ("flags", c_int)]


READ_WRITE, READ, NONE = 3, 1, 0


class Cuda:
    """libcuda.so.1, which answers for the runtime too."""

    def __init__(self) -> None:
        self.lib = ctypes.CDLL("libcuda.so.1")
        self.call("cuInit", 0)

    def call(self, name: str, *arguments: object) -> int:
        return int(getattr(self.lib, name)(*arguments))

    # runtime
    def malloc(self, size: int) -> tuple[int, int]:
        address = c_void_p()
        error = self.call("cudaMalloc", byref(address), c_size_t(size))
        return error, address.value or 0

    def free(self, address: int) -> int:
        return self.call("cudaFree", c_void_p(address))

    def info(self) -> tuple[int, int]:
        free, total = c_size_t(), c_size_t()
        assert self.call("cudaMemGetInfo", byref(free), byref(total)) == OK
        return free.value, total.value

    def used(self) -> int:
        free, total = self.info()
        return total - free

    def write(self, address: int, data: bytes) -> int:
        return self.call(
            "cudaMemcpy", c_void_p(address), data, c_size_t(len(data)), c_int(1)
        )

    def read(self, address: int, size: int) -> tuple[int, bytes]:
        buffer = ctypes.create_string_buffer(size)
        error = self.call(
            "cudaMemcpy", buffer, c_void_p(address), c_size_t(size), c_int(2)
        )
        return error, buffer.raw

    def copy(self, to: int, source: int, size: int) -> int:
        return self.call(
            "cudaMemcpy", c_void_p(to), c_void_p(source), c_size_t(size), c_int(3)
        )

    def memset(self, address: int, value: int, size: int) -> int:
        return self.call("cudaMemset", c_void_p(address), c_int(value), c_size_t(size))

    def set_device(self, device: int) -> int:
        return self.call("cudaSetDevice", c_int(device))

    # virtual memory
    def reserve(self, size: int, alignment: int = 0) -> tuple[int, int]:
        address = c_uint64()
        error = self.call(
            "cuMemAddressReserve",
            byref(address),
            c_size_t(size),
            c_size_t(alignment),
            c_uint64(0),
            c_uint64(0),
        )
        return error, address.value

    def unreserve(self, address: int, size: int) -> int:
        return self.call("cuMemAddressFree", c_uint64(address), c_size_t(size))

    def create(self, size: int, device: int = 0) -> tuple[int, int]:
        handle = c_uint64()
        properties = Properties(type=1, location=Location(1, device))
        error = self.call(
            "cuMemCreate", byref(handle), c_size_t(size), byref(properties), c_uint64(0)
        )
        return error, handle.value

    def release(self, handle: int) -> int:
        return self.call("cuMemRelease", c_uint64(handle))

    def map(self, address: int, size: int, handle: int, offset: int = 0) -> int:
        return self.call(
            "cuMemMap",
            c_uint64(address),
            c_size_t(size),
            c_size_t(offset),
            c_uint64(handle),
            c_uint64(0),
        )

    def allow(
        self, address: int, size: int, flags: int = READ_WRITE, device: int = 0
    ) -> int:
        access = Access(Location(1, device), flags)
        return self.call(
            "cuMemSetAccess",
            c_uint64(address),
            c_size_t(size),
            byref(access),
            c_size_t(1),
        )

    def unmap(self, address: int, size: int) -> int:
        return self.call("cuMemUnmap", c_uint64(address), c_size_t(size))

    def retain(self, address: int) -> tuple[int, int]:
        handle = c_uint64()
        error = self.call(
            "cuMemRetainAllocationHandle", byref(handle), c_void_p(address)
        )
        return error, handle.value

    # streams, events, graphs
    def new(self, call: str, *arguments: object) -> c_void_p:
        handle = c_void_p()
        assert self.call(call, byref(handle), *arguments) == OK
        return handle

    def stream(self, flags: int = 1) -> c_void_p:
        return self.new("cudaStreamCreateWithFlags", c_int(flags))

    def event(self) -> c_void_p:
        return self.new("cudaEventCreate")

    def begin(self, stream: c_void_p, mode: int = 0) -> int:
        return self.call("cudaStreamBeginCapture", stream, c_int(mode))

    def end(self, stream: c_void_p) -> tuple[int, c_void_p]:
        graph = c_void_p()
        return self.call("cudaStreamEndCapture", stream, byref(graph)), graph

    def node_count(self, graph: c_void_p) -> int:
        n = c_size_t()
        assert self.call("cudaGraphGetNodes", graph, None, byref(n)) == OK
        return n.value

    def fill_async(self, address: int, value: int, size: int, stream: c_void_p) -> int:
        return self.call(
            "cudaMemsetAsync", c_void_p(address), c_int(value), c_size_t(size), stream
        )

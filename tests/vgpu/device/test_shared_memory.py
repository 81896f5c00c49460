"""Handles of memory that processes share, and multicast objects."""

from __future__ import annotations

import ctypes
import os
import socket
from ctypes import byref, c_int, c_size_t, c_uint64, c_void_p

import pytest

from tests.vgpu.device.ctypes_cuda import (
    INVALID_VALUE,
    MIB,
    NOT_SUPPORTED,
    OK,
    READ_WRITE,
    Access,
    Cuda,
    Location,
    Properties,
)
from tests.vgpu.device.test_nccl import in_ranks

FILE, MULTICAST_SUPPORTED = 1, 132


class Object(ctypes.Structure):
    """CUmulticastObjectProp."""

    _fields_ = [
        ("devices", ctypes.c_uint),
        ("size", c_size_t),
        ("handle_types", c_uint64),
        ("flags", c_uint64),
    ]


def create(gpu: Cuda, size: int, device: int, types: int = FILE) -> int:
    handle = c_uint64()
    properties = Properties(type=1, handle_types=types, location=Location(1, device))
    assert not gpu.call(
        "cuMemCreate", byref(handle), c_size_t(size), byref(properties), c_uint64(0)
    )
    return handle.value


def export(gpu: Cuda, handle: int) -> tuple[int, int]:
    file = c_int(-1)
    error = gpu.call(
        "cuMemExportToShareableHandle", byref(file), c_uint64(handle), FILE, c_uint64(0)
    )
    return error, file.value


def take(gpu: Cuda, file: int) -> tuple[int, int]:
    handle = c_uint64()
    error = gpu.call("cuMemImportFromShareableHandle", byref(handle), c_void_p(file), 1)
    return error, handle.value


def mapped(gpu: Cuda, handle: int, size: int, device: int) -> int:
    error, address = gpu.reserve(size)
    assert error == OK
    assert gpu.map(address, size, handle) == OK
    access = Access(Location(1, device), READ_WRITE)
    assert not gpu.call(
        "cuMemSetAccess", c_uint64(address), c_size_t(size), byref(access), c_size_t(1)
    )
    assert gpu.memset(address, 1, size) == OK
    return address


FIRST, SECOND = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)


def shared(rank: int, ranks: int, meet: str) -> None:
    from vgpu import control

    gpu = Cuda()
    gpu.set_device(rank)
    gpu.malloc(1)
    held = control.process_used(rank)
    handle = create(gpu, 4 * MIB, rank)
    mapped(gpu, handle, 4 * MIB, rank)
    error, file = export(gpu, handle)
    assert error == OK
    mine = FIRST if rank else SECOND
    socket.send_fds(mine, [b"x"], [file])
    _, (theirs,), _, _ = socket.recv_fds(mine, 1, 1)
    error, of_peer = take(gpu, theirs)
    assert error == OK
    os.close(theirs)
    mapped(gpu, of_peer, 4 * MIB, rank)
    # Each holds its own: imported memory is charged where it was made.
    assert control.process_used(rank) == held + 4 * MIB
    assert gpu.release(of_peer) == OK
    assert control.process_used(rank) == held + 4 * MIB


@pytest.mark.vgpu(memory="1GiB", devices=2, multicast_granularity="512MiB")
def test_imported_handle_is_charged_to_who_made_it() -> None:
    assert in_ranks(2, shared) == [0, 0]


@pytest.mark.vgpu(memory="1GiB", multicast_granularity="512MiB")
def test_multicast_objects_take_no_memory() -> None:
    gpu = Cuda()
    gpu.set_device(0)
    gpu.malloc(1)
    supported = c_int()
    gpu.call("cuDeviceGetAttribute", byref(supported), MULTICAST_SUPPORTED, 0)
    assert supported.value == 1
    size = 4 * MIB
    properties = Object(devices=1, size=size, handle_types=FILE)
    for option, expected in {0: 2 * MIB, 1: 512 * MIB}.items():
        unit = c_size_t()
        assert not gpu.call(
            "cuMulticastGetGranularity", byref(unit), byref(properties), option
        )
        assert unit.value == expected
    held = gpu.used()
    handle = c_uint64()
    assert gpu.call("cuMulticastCreate", byref(handle), byref(properties)) == OK
    assert gpu.call("cuMulticastAddDevice", handle, 0) == OK
    mapped(gpu, handle.value, size, 0)
    assert gpu.used() == held
    memory = create(gpu, size, 0)
    zero, whole = c_size_t(0), c_size_t(size)

    def bind(to: object, what: int) -> int:
        return gpu.call(
            "cuMulticastBindMem", to, zero, c_uint64(what), zero, whole, c_uint64(0)
        )

    assert bind(handle, memory) == OK
    assert bind(c_uint64(memory), memory) == INVALID_VALUE
    assert bind(handle, handle.value) == INVALID_VALUE
    assert gpu.call("cuMulticastUnbind", handle, 0, zero, whole) == OK
    assert export(gpu, handle.value)[0] == OK
    assert gpu.used() == held + size


@pytest.mark.vgpu(memory="1GiB", multicast_granularity="512MiB")
def test_refused_handles() -> None:
    gpu = Cuda()
    gpu.set_device(0)
    gpu.malloc(1)
    # Its handle type was not asked for, and a file that is none.
    assert export(gpu, create(gpu, 2 * MIB, 0, types=0))[0] == INVALID_VALUE
    assert export(gpu, 1)[0] == INVALID_VALUE
    file = os.memfd_create("other")
    assert take(gpu, file)[0] == INVALID_VALUE
    os.close(file)


@pytest.mark.vgpu(memory="1GiB")
def test_card_without_multicast_has_neither() -> None:
    gpu = Cuda()
    gpu.set_device(0)
    gpu.malloc(1)
    assert export(gpu, create(gpu, 2 * MIB, 0))[0] == NOT_SUPPORTED
    supported = c_int(1)
    gpu.call("cuDeviceGetAttribute", byref(supported), MULTICAST_SUPPORTED, 0)
    assert supported.value == 0

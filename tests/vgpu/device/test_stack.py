"""The driver's stacks: of the largest kernel that was launched, for every thread that
the device can have in flight."""

from __future__ import annotations

import ctypes
import subprocess
from ctypes import byref, c_void_p
from pathlib import Path

import pytest

from tests.vgpu.device.ctypes_cuda import OK, OUT_OF_MEMORY, Cuda

THREADS = 132 * 2048
FILE_NOT_FOUND = 301
PTX = """
.version 8.0
.target sm_90
.address_size 64
.visible .entry kernel(.param .u64 at)
{{
  .local .align 16 .b8 frame[{bytes}];
  .reg .b64 %a<4>;
  .reg .b32 %v<2>;
  ld.param.u64 %a0, [at];
  mov.u64 %a1, frame;
  add.u64 %a2, %a1, %a0;
  st.local.u32 [%a2], 1;
  ld.local.u32 %v0, [%a2+4];
  st.global.u32 [%a0], %v0;
  ret;
}}
"""


def image(folder: Path, stack: int) -> bytes:
    """A kernel for sm_90 as ptxas compiles it, with a stack of so many bytes."""
    triton = pytest.importorskip("triton")
    ptxas = Path(triton.__file__).parent / "backends/nvidia/bin/ptxas"
    source, output = folder / f"{stack}.ptx", folder / f"{stack}.cubin"
    source.write_text(PTX.format(bytes=stack))
    subprocess.run([ptxas, "-arch=sm_90", source, "-o", output], check=True)
    return output.read_bytes()


def launch(gpu: Cuda, data: bytes) -> int:
    module, kernel = c_void_p(), c_void_p()
    assert gpu.call("cuModuleLoadData", byref(module), data) == OK
    assert gpu.call("cuModuleGetFunction", byref(kernel), module, b"kernel") == OK
    unsigned = [ctypes.c_uint(1)] * 6 + [ctypes.c_uint(0)]
    error = gpu.call("cuLaunchKernel", kernel, *unsigned, None, None, None)
    gpu.call("cuModuleUnload", module)
    return error


@pytest.mark.vgpu(memory="1GiB", local_memory=True)
def test_larger_stack_than_the_default_takes_memory(tmp_path: Path) -> None:
    gpu = Cuda()
    gpu.set_device(0)
    assert gpu.malloc(1)[0] == OK
    held = gpu.used()
    for stack, takes in {512: 0, 1024: 0, 1888: 864, 1200: 864, 2048: 1024}.items():
        assert launch(gpu, image(tmp_path, stack)) == OK
        assert gpu.used() == held + takes * THREADS
    assert launch(gpu, image(tmp_path, 8192)) == OUT_OF_MEMORY
    assert gpu.used() == held + 1024 * THREADS


@pytest.mark.vgpu(memory="1GiB")
def test_card_without_it_takes_none(tmp_path: Path) -> None:
    gpu = Cuda()
    gpu.set_device(0)
    assert gpu.malloc(1)[0] == OK
    held = gpu.used()
    assert launch(gpu, image(tmp_path, 8192)) == OK
    assert gpu.used() == held


@pytest.mark.vgpu(memory="1GiB")
def test_kernels_of_a_library_are_those_of_its_file(tmp_path: Path) -> None:
    """DeepGEMM loads what it compiles so, and takes the only kernel."""
    gpu = Cuda()
    gpu.set_device(0)
    image(tmp_path, 16)
    library, missing, count = c_void_p(), c_void_p(), ctypes.c_uint()
    nothing = (None, None, 0, None, None, 0)
    path = str(tmp_path / "16.cubin").encode()
    assert gpu.call("cuLibraryLoadFromFile", byref(library), path, *nothing) == OK
    error = gpu.call("cuLibraryLoadFromFile", byref(missing), path + b"2", *nothing)
    assert error == FILE_NOT_FOUND
    assert gpu.call("cuLibraryGetKernelCount", byref(count), library) == OK
    assert count.value == 1
    kernels = (c_void_p * 2)()
    assert gpu.call("cuLibraryEnumerateKernels", kernels, 2, library) == OK
    name = ctypes.c_char_p()
    assert gpu.call("cuKernelGetName", byref(name), c_void_p(kernels[0])) == OK
    assert name.value == b"kernel" and kernels[1] is None
    assert gpu.call("cuLibraryUnload", library) == OK
    assert gpu.call("cuLibraryGetKernelCount", byref(count), library) != OK

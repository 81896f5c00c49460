"""Kernels for the tests of those that compute; imported on the device."""

import triton
import triton.language as tl
from triton.language import cdiv, zeros


@triton.jit
def _double(x):
    return x * 2


@triton.jit
def chosen_kernel(to, of, n, halve, scale, BLOCK: tl.constexpr):
    """With names of the language in the module, a loop's index, functions, methods."""
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(of + index, mask=index < n, other=0)
    blocks = zeros([BLOCK], dtype=tl.int32)
    for i in range(cdiv(n, BLOCK)):
        blocks += (i.to(tl.int64) >= 0).to(tl.int32)
    if halve:
        x = (x * scale.to(tl.float32)).to(tl.int32)
    result = _double(x) + blocks + x.sum(0) * 0 + tl.max(x, axis=0) * 0
    tl.store(to + index, result, mask=index < n)


@triton.jit
def other_kernel(to, n, BLOCK: tl.constexpr):
    index = tl.arange(0, BLOCK)
    tl.store(to + index, index, mask=index < n)


@triton.jit
def follow_kernel(to, pointers):
    """Stores the values that the pointers in memory lead to."""
    index = tl.program_id(0)
    at = tl.cast(tl.load(pointers + index), tl.pointer_type(tl.int32))
    tl.store(to + index, tl.load(at))


@triton.jit
def add_kernel(to, of):
    tl.atomic_add(to, tl.load(of))


@triton.autotune([triton.Config({"BLOCK": 16}), triton.Config({"BLOCK": 32})], ["n"])
@triton.heuristics({"LAST": lambda values: values["n"] - 1})
@triton.jit
def tuned_kernel(to, n, LAST: tl.constexpr, BLOCK: tl.constexpr):
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(to + index, LAST - index, mask=index < n)


@triton.jit
def refused_kernel(to):
    low = tl.inline_asm_elementwise("mov.u32 $0, 7;", "=r", [], tl.int32, True, 1)
    tl.store(to, low)


@triton.jit
def chosen_sum_kernel(to, x, y, narrow, n, BLOCK: tl.constexpr):
    """Sums in the type of `x`, which are compared, and float32 as such a number."""
    index = tl.arange(0, BLOCK)
    a, b = tl.load(x + index), tl.load(y + index)
    tl.store(to + index, tl.where(a < b, a + b, -(a * b)))
    tl.store(to + n + index, tl.load(narrow + index).to(to.dtype.element_ty))


@triton.jit
def chosen_rows_kernel(to, product, of, BLOCK: tl.constexpr):
    """A row's sum and running sums, and the product of all with themselves."""
    index = tl.arange(0, BLOCK)
    square = index[:, None] * BLOCK + index[None, :]
    x = tl.load(of + square)
    tl.store(to + index, tl.sum(x, axis=1))
    tl.store(to + BLOCK + square, tl.cumsum(x, axis=1))
    tl.store(product + square, tl.dot(x, x))

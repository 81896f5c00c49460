"""Triton's language as its interpreter runs it, over the device's memory.

The interpreter expects a process in which all kernels are interpreted, and copies their
arguments. Here most are compiled, and each load and store asks the device where an
address is: nothing is copied, and pointers in memory may be followed.

Arguments of a kernel may be noise, and so may its addresses. Loads of unmapped memory
give 0, and stores are left out. A line on stderr says so once per kernel.
"""

from __future__ import annotations

import ast
import ctypes
import functools
import inspect
import itertools
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import SimpleNamespace
from typing import Any

import numpy as np
import triton.language as tl
from triton.runtime import interpreter
from triton.runtime.jit import JITFunction

from .errors import IllegalAddress
from .launch import library

# ---- the device's memory


class _Memory:
    """Triton's own loads and stores, at device addresses."""

    native = interpreter._interpreter
    unmapped = False  # whether a kernel touched such an address

    def __getattr__(self, name: str) -> Any:
        return getattr(self.native, name)

    def load(self, at: Any, mask: Any, other: Any, dtype: Any) -> Any:
        at, mask = self.on_host(at, mask, write=False)
        return self.native.load(at, mask, other, dtype)

    def store(self, at: Any, value: Any, mask: Any) -> Any:
        at, mask = self.on_host(at, mask, write=True)
        return self.native.store(at, value, mask)

    def atomic_cas(self, at: Any, expected: Any, value: Any, order: Any) -> Any:
        at, mapped = self.on_host(at, True, write=True)
        if not mapped.all():
            raise IllegalAddress
        return self.native.atomic_cas(at, expected, value, order)

    def atomic_rmw(self, what: Any, at: Any, value: Any, mask: Any, order: Any) -> Any:
        at, mask = self.on_host(at, mask, write=True)
        return self.native.atomic_rmw(what, at, value, mask, order)

    def on_host(self, addresses: Any, mask: Any, *, write: bool) -> tuple[Any, Any]:
        """Where the host finds elements, and which of the mask's are mapped."""
        at = np.array(addresses, np.uint64, order="C")
        wanted = np.empty(at.shape, np.bool_)
        wanted[...] = mask
        missing = _find(at.ctypes.data, wanted.ctypes.data, at.size, write)
        if missing < 0:
            raise IllegalAddress
        self.unmapped |= missing > 0
        return at, wanted


_memory = _Memory()
_find = library().vgpu_host_addresses
_find.restype = ctypes.c_int64
_find.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint64, ctypes.c_int]


@functools.cache
def _tell(kernel: str) -> None:
    print(f"[vgpu] {kernel} touches what is not mapped; loads give 0", file=sys.stderr)


# ---- bfloat16 and FP8

_FP8 = {
    tl.float8e5, tl.float8e5b16, tl.float8e4nv, tl.float8e4b8, tl.float8e4b15,
}  # fmt: skip


def _widened(handle: Any) -> Any:
    """A bfloat16, which numpy does not have, as float32: the interpreter has bits."""
    if handle.dtype.scalar != tl.bfloat16:
        return handle
    bits = np.asarray(handle.data).astype(np.uint32) << 16
    return interpreter.TensorHandle(bits.view(np.float32), tl.float32)


def _narrowed(values: Any) -> Any:
    """Numbers as bfloat16, rounded to the nearest, of two to the even one."""
    values = np.asarray(values).astype(np.float32)
    bits = values.view(np.uint32)
    rounded = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16
    rounded = np.where(np.isnan(values), 0x7FC0, rounded).astype(np.uint16)
    return interpreter.TensorHandle(rounded, tl.bfloat16)


def _refuse_fp8(*kinds: Any) -> None:
    if any(kind.scalar in _FP8 for kind in kinds):
        raise NotImplementedError("Triton's interpreter computes no FP8")


def _computes(native: Any) -> Any:
    """An operation of the interpreter, in float32 where it is one of bfloat16."""

    def operation(self: Any, *given: Any) -> Any:
        *handles, what = given
        _refuse_fp8(*(handle.dtype for handle in handles))
        wide = [_widened(handle) for handle in handles]
        result = native(self, *wide, what)
        narrow = handles[-1].dtype.scalar == tl.bfloat16
        if not narrow or what in _COMPARISONS:
            return result
        return _narrowed(result.data)

    return operation


_COMPARISONS = (
    np.less, np.less_equal, np.greater, np.greater_equal, np.equal, np.not_equal,
)  # fmt: skip


def _casts(native: Any) -> Any:
    def cast(self: Any, source: Any, kind: Any, *rounding: Any) -> Any:
        _refuse_fp8(kind)
        wide = _widened(source)
        if kind.scalar != tl.bfloat16 or source.dtype.scalar in _FP8:
            if wide is source:
                return native(self, source, kind, *rounding)
            data = wide.data.astype(interpreter._get_np_dtype(kind))
            return interpreter.TensorHandle(data, kind.scalar)
        return _narrowed(wide.data)

    return cast


def _multiplies(native: Any) -> Any:
    def dot(self: Any, a: Any, b: Any, *more: Any) -> Any:
        return native(self, _widened(a), _widened(b), *more)

    return dot


def _collects(native: Any) -> Any:
    """A sum or product of a row, in float32 where it is one of bfloat16."""

    def collected(self: Any, row: Any) -> Any:
        _refuse_fp8(row.dtype)
        if row.dtype.scalar != tl.bfloat16:
            return native(self, row)
        wide = native(self, self.to_tensor(_widened(row.handle).data, tl.float32))
        several = isinstance(wide, list)
        narrow = [
            self.to_tensor(_narrowed(each.handle.data).data, tl.bfloat16)
            for each in (wide if several else [wide])
        ]
        return narrow if several else narrow[0]

    return collected


def _refuses_small_floats(native: Any) -> Any:
    def atomic(self: Any, what: Any, at: Any, value: Any, *more: Any) -> Any:
        if value.dtype.scalar == tl.bfloat16:
            raise NotImplementedError("Triton's interpreter has no atomics of bfloat16")
        return native(self, what, at, value, *more)

    return atomic


# ---- the language


class _Language:
    """Interpreted between enter and exit, else as it was. One thread at a time."""

    def __init__(self) -> None:
        self.entered = 0
        # Without the checks for overflow that a debug build makes.
        options = interpreter.InterpreterOptions(sanitize_overflow=False)
        interpreter.interpreter_builder.options = options
        everything = SimpleNamespace(__globals__={"tl": tl, "core": tl.core})
        scope = interpreter._patch_lang(everything)
        scope.set_attr(interpreter, "_interpreter", _memory)
        builder = interpreter.InterpreterBuilder
        for name in ("unary_op", "binary_op", "ternary_op"):
            scope.set_attr(builder, name, _computes(getattr(builder, name)))
        for name in ("cast_impl", "create_fp_to_fp"):
            scope.set_attr(builder, name, _casts(getattr(builder, name)))
        scope.set_attr(builder, "create_dot", _multiplies(builder.create_dot))
        atomic = _refuses_small_floats(builder.create_atomic_rmw)
        scope.set_attr(builder, "create_atomic_rmw", atomic)
        for owner, name in (
            (interpreter.ReduceOps, "sum"),
            (interpreter.ScanOps, "cumsum"),
            (interpreter.ScanOps, "cumprod"),
        ):
            scope.set_attr(owner, name, _collects(getattr(owner, name)))
        for name, member in list(vars(tl.tensor).items()):
            if isinstance(member, JITFunction):
                scope.set_attr(tl.tensor, name, _method(member))
        places = {(id(where), name): where for where, name, _ in scope._changes}
        changed = [(where, name) for (_, name), where in places.items()]
        inside = [vars(where)[name] for where, name in changed]
        scope.restore()
        outside = [vars(where).get(name) for where, name in changed]
        self.changes = [
            (*place, *values)
            for place, *values in zip(changed, inside, outside, strict=True)
        ]

    def __enter__(self) -> None:
        self.entered += 1
        if self.entered == 1:
            for where, name, inside, _ in self.changes:
                setattr(where, name, inside)

    def __exit__(self, *_: object) -> None:
        self.entered -= 1
        if self.entered:
            return
        for where, name, _, outside in self.changes:
            if outside is None:
                delattr(where, name)
            else:
                setattr(where, name, outside)


def _method(function: Any) -> Callable[..., Any]:
    return lambda *arguments, **options: function(*arguments, **options)


language = _Language()


# ---- kernels


class _Index(int):
    """Of a loop, which is a tensor in a compiled kernel."""

    def to(self, *arguments: Any, **options: Any) -> Any:
        value = interpreter.interpreter_semantic.to_tensor(int(self), False)
        return value.to(*arguments, **options)


def _indices(values: Iterable[Any]) -> Iterator[Any]:
    return (_Index(v) if type(v) is int else v for v in values)


class _Transformer(interpreter.ASTTransformer):
    def visit_For(self, node: ast.For) -> ast.AST:
        call = ast.Name("_indices", ast.Load())
        node.iter = ast.Call(call, [node.iter], [])
        self.generic_visit(node)
        return node


class _Rewriter(interpreter.FunctionRewriter):
    ast_transformer = _Transformer()

    def _compile_and_exec(self, tree: Any) -> Any:
        nonlocals = inspect.getclosurevars(self.fn).nonlocals
        scope = {
            name: _taken(value)
            for name, value in {**self.fn.__globals__, **nonlocals}.items()
        }
        scope["interpreter_semantic"] = interpreter.interpreter_semantic
        scope["_indices"] = _indices
        exec(compile(tree, self.filename, "exec"), scope)
        return scope[self.fn.__name__]


def _taken(value: Any) -> Any:
    """A function that a module took from Triton's language does not change with it."""
    if not tl.core.is_builtin(value):
        return value

    def interpreted(*arguments: Any, **options: Any) -> Any:
        options["_semantic"] = interpreter.interpreter_semantic
        return value(*arguments, **options)

    return interpreted


@functools.cache
def rewritten(function: Any) -> Any:
    """The function of a kernel, or one that it calls, as the interpreter runs it."""
    return _Rewriter(function).rewrite_ast()


def argument(value: Any) -> Any:
    """The kernel's argument for it, without keeping a tensor."""
    kind = {bool: tl.int1, float: tl.float32}.get(type(value))
    if kind is None:
        return interpreter._implicit_cvt(value)
    data = np.array([value], interpreter._get_np_dtype(kind))
    return tl.tensor(interpreter.TensorHandle(data, kind), kind)


def compute(function: Any, grid: tuple[int, ...], values: Mapping[str, Any]) -> None:
    """Runs each program of the grid, one after the other."""
    builder, run = interpreter.interpreter_builder, rewritten(function)
    _memory.unmapped = False
    builder.set_grid_dim(*grid)
    with np.errstate(all="ignore"):
        for index in itertools.product(*map(range, grid)):
            builder.set_grid_idx(*index)
            run(**values)
    if _memory.unmapped:
        _tell(function.__name__)

"""Triton kernels that compute: Triton's interpreter runs them on the host.

The configuration chooses them by name (`interpret`). Such a kernel is compiled and
launched as any other; when its stream gets there, the interpreter does its work.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import os
import sys
import threading
import traceback
from collections.abc import Mapping
from fnmatch import fnmatchcase
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

from .errors import IllegalAddress

JIT = "triton.runtime.jit"
ILLEGAL_ADDRESS, LAUNCH_FAILED = 700, 719
_Function = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)

_patterns: list[str] = []
# Triton's language is compiled or interpreted, for all threads.
_lock = threading.RLock()
_launches: dict[int, _Launch] = {}
_numbers = itertools.count(1)


def install() -> None:
    """Lets the kernels compute that the run's configuration names, if it names any."""
    if "VGPU_RUN" not in os.environ:
        return
    lines = Path(os.environ["VGPU_RUN"], "config").read_text().splitlines()
    settings = [line.partition(" ") for line in lines]
    _patterns[:] = [value for key, _, value in settings if key[:10] == "interpret."]
    if not _patterns:
        return
    if JIT in sys.modules:
        _adapt(sys.modules[JIT])
    else:
        sys.meta_path.insert(0, _Finder())


class _Finder:
    """Adapts Triton when it is imported."""

    def find_spec(
        self, name: str, path: Any, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        spec = PathFinder.find_spec(name, path, target) if name == JIT else None
        if spec is None:
            return None
        loader: Any = spec.loader
        execute = loader.exec_module

        def adapted(module: ModuleType) -> None:
            execute(module)
            _adapt(module)

        loader.exec_module = adapted
        return spec


def _adapt(jit: Any) -> None:
    function = jit.JITFunction
    start, refuse = function.run, function.__call__

    def run(self: Any, *arguments: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        launch: _Launch | None = None

        def bound(values: dict[str, Any]) -> Any:
            nonlocal launch
            size = grid(values) if callable(grid) else grid
            launch = _Launch(self, size, values)
            return size

        computes = not warmup and _is_chosen(self.__name__)
        given = bound if computes else grid
        try:
            with _lock:
                return start(self, *arguments, grid=given, warmup=warmup, **options)
        except RuntimeError as error:
            if launch and launch.failure:
                raise launch.failure from error
            raise
        finally:
            if launch:
                launch.leave()

    def call(self: Any, *arguments: Any, **options: Any) -> Any:
        from . import triton_interpreter as interpreter

        if not interpreter.language.entered:
            return refuse(self, *arguments, **options)
        return interpreter.rewritten(self.fn)(*arguments, **options)

    function.run, function.__call__ = run, call


@functools.cache
def _is_chosen(name: str) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in _patterns)


class _Launch:
    """Of a kernel; it computes once, or whenever the graph is launched that has it.

    It keeps addresses, not tensors, so that memory is free as early as on a card.
    """

    def __init__(
        self, kernel: Any, grid: tuple[int, ...], values: Mapping[str, Any]
    ) -> None:
        from . import triton_interpreter as interpreter

        self.kernel, self.grid = kernel, (*grid, 1, 1)[:3]
        constants = {kernel.params[i].name for i in kernel.constexprs}
        with interpreter.language:
            self.values = {
                name: value if name in constants else interpreter.argument(value)
                for name, value in values.items()
            }
        self.done = self.left = False
        self.failure: BaseException | None = None
        self.number = next(_numbers)
        _launches[self.number] = self
        _compute_next(_compute_function, self.number)

    def leave(self) -> None:
        """A captured launch stays: its graph may be launched as long as it lives."""
        self.left = True
        was_launched = _compute_next(_Function(), None)
        if self.done or not was_launched:
            del _launches[self.number]

    def compute(self) -> None:
        from . import triton_interpreter as interpreter

        with _lock, interpreter.language:
            interpreter.compute(self.kernel.fn, self.grid, self.values)


def _compute_next(function: Any, number: int | None) -> bool:
    """Sets the function of this thread's next launch; whether one took the last."""
    from .launch import library  # each process of the run imports this module

    set_next = library().vgpu_compute
    set_next.argtypes = [_Function, ctypes.c_void_p]
    return bool(set_next(function, number))


def _compute(number: int) -> int:
    launch = _launches[number]
    launch.done = True
    try:
        launch.compute()
    except BaseException as error:
        error.add_note(f"in {launch.kernel.__name__}, interpreted on the host")
        if launch.left:  # a graph has it, and can only say that it failed
            traceback.print_exception(error)
        launch.failure = error
        return ILLEGAL_ADDRESS if isinstance(error, IllegalAddress) else LAUNCH_FAILED
    return 0


_compute_function = _Function(_compute)  # lives as long as what calls it

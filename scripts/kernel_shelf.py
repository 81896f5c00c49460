"""Triton's cache in two places: compiled kernels on a shelf that all runs share,
results of autotuning in the run's own folder.

A kernel's key is a hash of its source and of its compiler, so a run that finds it would
have compiled the same. A result of autotuning is a measurement: a start that
finds one allocates less than the first start, which measures.
"""

from __future__ import annotations

import os

from triton.runtime.cache import FileCacheManager


class Shelf(FileCacheManager):
    """Both places, by the kind of file; Triton makes a manager for each key."""

    def __init__(self, key: str, override: bool = False, dump: bool = False) -> None:
        super().__init__(key, override=override, dump=dump)
        self._own = self.cache_dir
        self._shelf = os.path.join(os.environ["KERNEL_SHELF"], key)
        os.makedirs(self._shelf, exist_ok=True)

    def _make_path(self, filename: str) -> str:
        return os.path.join(self._place(filename), filename)

    def put(self, data: bytes | str, filename: str, binary: bool = True) -> str:
        self.cache_dir = self._place(filename)
        return str(super().put(data, filename, binary))

    def _place(self, filename: str) -> str:
        result = filename.endswith(".autotune.json")
        return str(self._own if result else self._shelf)

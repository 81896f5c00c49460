"""Triton's cache in two places: compiled kernels in a folder that all runs share,
results of autotuning in the run's own folder.

A kernel's key is a hash of its source and of its compiler, so a run that finds it would
have compiled the same. A result of autotuning is a measurement: a start that
finds one allocates less than the first start, which measures.

It measures on the virtual device, where kernels do nothing: each configuration a few
times, not for an eighth of a second.
"""

from __future__ import annotations

import fcntl
import os
import time
from functools import partial
from typing import IO

from triton import testing
from triton.runtime.cache import FileCacheManager, triton_key

# A hash of all of Triton, 0.4 s: once, where this is imported before processes fork.
triton_key()
testing.do_bench = partial(testing.do_bench, warmup=0, rep=0)
# Seconds in which another process has compiled a kernel, or hangs.
LONGEST = 300


class SharedCache(FileCacheManager):
    """Both places, by the kind of file; Triton makes a manager for each key.

    Ranks of an engine want the same kernels at the same time. One of them compiles, the
    others wait: on two cores, each would take as long as all. The lock is a process's
    (POSIX): its own threads, and a second attempt after an error, do not wait for it,
    and children do not inherit it.
    """

    def __init__(self, key: str, override: bool = False, dump: bool = False) -> None:
        super().__init__(key, override=override, dump=dump)
        self._own = self.cache_dir
        self._shared = os.path.join(os.environ["SHARED_TRITON_CACHE"], key)
        self._lock: IO[bytes] | None = None
        os.makedirs(self._shared, exist_ok=True)

    def get_group(self, filename: str) -> dict[str, str] | None:
        """The files of a compiled kernel; None: the caller compiles it, and
        others wait until it has put it, or ends, or drops this manager."""
        group: dict[str, str] | None = super().get_group(filename)
        if group is None:
            self._acquire()
            group = super().get_group(filename)
            if group is not None:
                self._release()
        return group

    def put_group(self, filename: str, group: dict[str, str]) -> str:
        try:
            return str(super().put_group(filename, group))
        finally:
            self._release()

    def _acquire(self) -> None:
        self._lock = open(os.path.join(self._shared, "compiling"), "wb")  # noqa: SIM115
        deadline = time.monotonic() + LONGEST
        while time.monotonic() < deadline:
            try:
                fcntl.lockf(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except BlockingIOError:
                time.sleep(0.02)

    def _release(self) -> None:
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def _make_path(self, filename: str) -> str:
        return os.path.join(self._place(filename), filename)

    def put(self, data: bytes | str, filename: str, binary: bool = True) -> str:
        self.cache_dir = self._place(filename)
        return str(super().put(data, filename, binary))

    def _place(self, filename: str) -> str:
        result = filename.endswith(".autotune.json")
        return str(self._own if result else self._shared)

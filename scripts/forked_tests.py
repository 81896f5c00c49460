"""A pytest plugin: vLLM's tests that each spawn a process are forked instead.

`spawn_new_process_for_each_test` (tests/utils.py) runs a script in a new interpreter,
which imports PyTorch, vLLM and the tests: all but a second of such a test. Here that
script runs in a fork of a process that has collected the tests, and never calls CUDA.
And vLLM inspects a model's class in the test's process, not in another new one.
"""

from __future__ import annotations

import io
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from multiprocessing import Pipe
from typing import Any, NoReturn

import pytest

from vgpu import frozen
from vgpu.server import end_with


class Forks:
    """Stands for the module `subprocess` in tests/utils.py."""

    def __init__(self) -> None:
        self._orders, orders = Pipe()
        if os.fork() == 0:
            self._orders.close()
            serve(orders)
        orders.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(subprocess, name)

    def run(
        self,
        command: Sequence[str],
        *,
        input: bytes,  # noqa: A002 (as subprocess has it)
        env: Mapping[str, str],
    ) -> subprocess.CompletedProcess[bytes]:
        python, option, script = command
        assert (python, option) == (sys.executable, "-c")
        self._orders.send((script, input, dict(env)))
        return subprocess.CompletedProcess(command, self._orders.recv())


def serve(orders: Any) -> NoReturn:
    """Fork for each order, until the other end closes."""
    while True:
        try:
            order = orders.recv()
        except EOFError:
            os._exit(0)
        child = os.fork()
        if child == 0:
            end_with(partial(become, *order))
        _, status = os.waitpid(child, 0)
        orders.send(os.waitstatus_to_exitcode(status))


def become(script: str, given: bytes, environment: dict[str, str]) -> None:
    """Run a script with its input, like an interpreter."""
    os.environ.clear()
    os.environ.update(environment)
    sys.stdin = io.TextIOWrapper(io.BytesIO(given))
    frozen.keep_no_longer()
    exec(compile(script, "<script>", "exec"), {"__name__": "__main__"})


def pytest_collection_finish(session: pytest.Session) -> None:
    frozen.freeze()
    if registry := sys.modules.get("vllm.model_executor.models.registry"):
        registry._run_in_subprocess = lambda inspect: inspect()  # type: ignore[attr-defined]
    utils, torch = map(sys.modules.get, ("tests.utils", "torch"))
    # A process that has called CUDA cannot be forked.
    if utils and torch and not torch.cuda.is_initialized():
        utils.subprocess = Forks()  # type: ignore[attr-defined]

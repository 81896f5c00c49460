"""In a process on the device: lists the tests of one of PyTorch's files, or runs one.

    torch_suite_process.py list FOLDER MODULE OUT
    torch_suite_process.py run FOLDER MODULE OUT TEST [SETTINGS]

OUT is JSON: the names, or the outcome and the output. SETTINGS are the allocator's,
set after the file was imported, as PyTorch's own files do. Needs only PyTorch.
"""

from __future__ import annotations

import importlib
import json
import sys
import traceback
import unittest
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

_Failure = tuple[type[BaseException], BaseException, TracebackType]


def _cases(suite: unittest.TestSuite) -> Iterator[unittest.TestCase]:
    for test in suite:
        if isinstance(test, unittest.TestSuite):
            yield from _cases(test)
        else:
            yield test


def names(module: Any) -> list[str]:
    """Class.method of each test; load_tests of a file, for shards, is not asked."""
    loader = unittest.TestLoader()
    found = []
    for value in vars(module).values():
        if isinstance(value, type) and issubclass(value, unittest.TestCase):
            for case in _cases(loader.loadTestsFromTestCase(value)):
                found.append(f"{type(case).__name__}.{case._testMethodName}")
    return sorted(set(found))


class _Result(unittest.TestResult):
    """Keeps the first thing that was wrong, with its traceback."""

    outcome = "passed"
    said = ""

    def _bad(self, err: Any) -> None:
        if self.outcome != "failed":
            self.outcome = "failed"
            self.said = "".join(traceback.format_exception(*err))

    def addError(self, test: unittest.TestCase, err: Any) -> None:
        self._bad(err)

    def addFailure(self, test: unittest.TestCase, err: Any) -> None:
        self._bad(err)

    def addSubTest(self, test: Any, subtest: Any, err: Any) -> None:
        if err is not None:
            self._bad(err)

    def addSkip(self, test: unittest.TestCase, reason: str) -> None:
        if self.outcome == "passed":
            self.outcome, self.said = "skipped", reason

    def addUnexpectedSuccess(self, test: unittest.TestCase) -> None:
        self.outcome, self.said = "failed", "a success that PyTorch does not expect"


def run(module: Any, name: str) -> dict[str, str]:
    result = _Result()
    unittest.TestLoader().loadTestsFromName(name, module).run(result)
    return {"outcome": result.outcome, "said": result.said}


def main(command: str, folder: str, name: str, out: str, *more: str) -> None:
    sys.path.insert(0, folder)
    sys.argv = [str(Path(folder, f"{name}.py"))]  # the file's own arguments
    module = importlib.import_module(name)
    if command == "list":
        answer: Any = names(module)
    else:
        test, *settings = more
        if settings:
            import torch

            torch.cuda.memory._set_allocator_settings(settings[0])
        answer = run(module, test)
    Path(out).write_text(json.dumps(answer))


if __name__ == "__main__":
    main(*sys.argv[1:])

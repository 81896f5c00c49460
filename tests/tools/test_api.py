"""Each removed or different name of the release has its reason, and no other has
one."""

from __future__ import annotations

import pytest

from scripts.api import (
    WORKERS,
    c_names,
    compare,
    keeps_calls,
    messages,
    new_keywords,
    parts,
    python_names,
    replaced,
    sent,
)
from tests.tools.project import SOURCES, Project

BUDGET = SOURCES["vllm/budget.py"]
BEFORE = """
import math
from typing import Any
LIMIT = 1
class Worker(Base):
    kept: int = 0
    def __init__(self, config):
        self.memory, self.later = config, None
    def profile(self, size: int = 1) -> int: ...
    @property
    def free(self): ...
"""


@pytest.mark.parametrize(
    ("there", "here", "different"),
    [
        ("import math", "import os", "math"),
        ("LIMIT = 1", "LIMIT = 2", "LIMIT"),
        ("Worker(Base)", "Worker", "Worker"),
        ("kept: int = 0", "other: int = 1\n    kept: int = 0", "Worker fields"),
        ("kept: int = 0", "kept: int = 0\n    other: int = 1", ""),
        ("size: int = 1", "size: int, budget", "Worker.profile"),
        ("size: int = 1", "size: int = 1, budget=None", "Worker.profile"),
        ("size: int = 1", "size: int = 1, *, budget", "Worker.profile"),
        ("size: int = 1", "size: int = 1, *, budget=None", ""),
        (") -> int", ") -> None", "Worker.profile"),
        ("    def profile", "    @measured\n    def profile", ""),
        ("    @property\n    def free", "    def free", "Worker.free"),
        ("self.memory, self.later = config, None", "self.later = 1", "Worker.memory"),
    ],
)
def test_names_that_a_library_may_use(there: str, here: str, different: str) -> None:
    assert there in BEFORE
    found = compare(python_names(BEFORE), python_names(BEFORE.replace(there, here)))
    assert different in found if different else not found


def test_attribute_may_be_set_where_it_became_a_property() -> None:
    reads = "\n    @property\n    def memory(self): ...\n"
    after = BEFORE.replace("self.memory, self.later", "_, self.later") + reads
    old, new = python_names(BEFORE), python_names(after)
    assert list(compare(old, new)) == ["Worker.memory to set"]
    sets = "    @memory.setter\n    def memory(self, value): ...\n"
    assert not compare(old, python_names(after + sets))


@pytest.mark.parametrize(
    ("call", "found"),
    [("run(1, size=2)", ["run(size=)"]), ("run(1)", []), ("other(size=2)", [])],
)
def test_keyword_that_a_replaced_function_does_not_take(
    call: str, found: list[str]
) -> None:
    old = "def run(x): ...\ndef step(): run(1)\n"
    new = f"def run(x, *, size=None): ...\ndef step(): {call}\n"
    assert list(new_keywords({"a.py": (old, new)}).get("a.py", {})) == found


@pytest.mark.parametrize(
    ("step", "found"),
    [
        ("run(1)", []),
        ("self.measure()", ["run()"]),
        ("f = run\n  return f(1)", []),
        ("run(self.run is Worker.run)", ["is Worker.run"]),
        ("run(self.run is None)", []),
    ],
)
def test_function_that_is_replaced(step: str, found: list[str]) -> None:
    old = "from a import run\nclass Worker:\n def run(self): run(1)\n"
    new = f"from a import run\nclass Worker:\n def run(self):\n  {step}\n"
    assert list(replaced({"b.py": (old, new)}).get("b.py", {})) == found


@pytest.mark.parametrize(
    ("method", "found"),
    [
        ("'start'", False),
        ("'grow'", False),
        ("'other'", True),
        ("grow", True),
        ("lambda w: w.grow()", True),
    ],
)
def test_executor_sends_names_alone(method: str, found: bool) -> None:
    old = "executor.collective_rpc('start')\nexecutor.collective_rpc(kept)\n"
    new = f"{old}executor.collective_rpc({method}, args=(1,))\n"
    workers = "class WorkerBase:\n def grow(self): ...\n"
    pairs = {"a.py": (old, new), WORKERS: ("", workers)}
    assert ("a.py" in sent(pairs)) == found


def test_messages_are_found_by_their_words() -> None:
    source = 'logger.info("Actual usage is %s GiB for weights, of %d", a, b)\n'
    (text,) = messages("a.py", source)
    assert parts(text) == ["Actual usage is", "GiB for weights, of"]
    assert messages("a.py", "raise ValueError(f'{size} does not fit')\n")
    assert keeps_calls("(self)", "(self, *, reason='')")
    assert keeps_calls("(handle) -> None", "(handle) -> bool")


def test_methods_of_an_extension() -> None:
    source = (
        "static PyObject* map(PyObject* self, PyObject* args) {\n"
        '  PyArg_ParseTuple(args, "KK");\n}\n'
        'static PyMethodDef methods[] = {{"map", (PyCFunction)map, METH_VARARGS}};\n'
    )  # fmt: skip
    assert c_names(source) == {"method map": "KK"}


def test_each_has_its_reason(project: Project) -> None:
    project.ok("source")
    changed = BUDGET.replace("total", "total, limit")
    project.commit("[Core] Budget", vllm__budget_py=changed)
    project.ok("export")
    said = project.fails("api")
    assert "vllm/budget.py: requested: was (total), is (total, limit)" in said
    listed = next(project.root.glob("patches/v*/series")).parent / "changes.toml"
    listed.write_text('["vllm/budget.py"]\nrequested = "callers know the limit"\n')
    assert "1 names and texts" in project.ok("api")
    listed.write_text(listed.read_text() + 'gone = "nobody knows"\n')
    assert "vllm/budget.py: gone" in project.fails("api")
    listed.write_text('["vllm/budget.py"]\nrequested = ""\n')
    assert "has no reason" in project.fails("api")

"""The names of other topics that a topic uses, from the syntax tree of its lines.

Only names that no file of the release has count: the topic that defines one must be
there.
"""

from __future__ import annotations

import ast
import io
import re
import subprocess
import tarfile
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path


@dataclass
class Names:
    defined: set[str] = field(default_factory=set)
    used: dict[str, str] = field(default_factory=dict)
    """Where it is first used, "file:line"."""


def names(tree: Path, touched: dict[str, set[int]]) -> Names:
    """Names that the touched lines of Python files define and use."""
    found = Names()
    for file, lines in touched.items():
        if file.endswith(".py"):
            found.defined.add(Path(file).stem)
            for node in ast.walk(ast.parse((tree / file).read_text())):
                if getattr(node, "lineno", 0) in lines:
                    collect(node, file, found)
    return found


def collect(node: ast.AST, file: str, found: Names) -> None:
    used: Iterable[str] = ()
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        found.defined.add(node.name)
    elif isinstance(node, ast.arg):
        found.defined.add(node.arg)
    elif isinstance(node, ast.Name | ast.Attribute):
        name = node.id if isinstance(node, ast.Name) else node.attr
        if isinstance(node.ctx, ast.Load):
            used = [name]
        else:
            found.defined.add(name)
    elif isinstance(node, ast.keyword) and node.arg:
        used = [node.arg]
    elif isinstance(node, ast.ImportFrom) and node.module:
        used = [*node.module.split("."), *(alias.name for alias in node.names)]
    for name in used:
        found.used.setdefault(name, f"{file}:{node.lineno}")  # type: ignore[attr-defined]


def words(tree: Path, commit: str) -> set[str]:
    """Every word of the release's own Python and native code, and its files' names."""
    archive = subprocess.run(
        ["git", "-C", str(tree), "archive", commit],
        check=True, capture_output=True,
    ).stdout  # fmt: skip
    found: set[str] = set()
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        for member in tar:
            if member.isfile() and member.name.endswith((".py", ".cpp", ".h")):
                found.add(Path(member.name).stem)
                file = tar.extractfile(member)
                assert file is not None
                found |= set(re.findall(r"\w+", file.read().decode(errors="replace")))
    return found

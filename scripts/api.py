"""Which names of the release the series removes or changes, and why.

    make api

Libraries derive from vLLM's classes, replace its functions and search its log. So each
name of a file that the series changes is compared: functions and methods with their
parameters, classes with their bases and fields, attributes, constants, imports that
others may import from there, command-line flags, environment variables, methods of C
extensions, and the text of messages. A name of one leading underscore counts, too.

A new name is no change, nor are a new keyword-only parameter with a default, a value
where None was returned, a new last field, or another decorator. A call that passes such
a parameter is one: a library may have replaced the function by one that has the
release's. So are a file that no longer calls a function it has, a comparison that takes
a function replaced on its class for vLLM's own, and a call that is sent to workers not
by the name of a method that all of them have.

Whatever else is gone or different has its reason in changes.toml next to the patches,
by file and name; no other name has one.
"""

from __future__ import annotations

import argparse
import ast
import re
import subprocess
import tomllib
from collections.abc import Iterator
from pathlib import Path

from scripts.commands import Problem, command
from scripts.release import Base
from scripts.series import BASE_REF, git, made

Names = dict[str, str]
Changes = dict[str, dict[str, str]]
CHANGES = "changes.toml"
# Decorators that say how a function is used.
KINDS = ("property", "cached_property", "staticmethod", "classmethod", "contextmanager")
# A shorter part of a message is found in too many others.
LEAST_TEXT = 12
# Where the methods are that all workers have.
WORKERS = "vllm/v1/worker/worker_base.py"


def main(args: argparse.Namespace) -> None:
    base = Base.load(args.root, args.base)
    if not made(base.tree):
        raise Problem(f"'make source BASE={base.version}' first.")
    found = changes(base.tree)
    listed = reasons(base.folder / CHANGES)
    if base.series:  # its own file has what differs there alone
        of_series = reasons(base.root / f"patches/v{base.series}" / CHANGES)
        known = {path: of_series.get(path, {}) | listed.get(path, {}) for path in found}
    else:
        known = listed
    unlisted = [
        f"{path}: {name}: {how}"
        for path, names in found.items()
        for name, how in names.items()
        if name not in known.get(path, {})
    ]
    stale = [
        f"{path}: {name}"
        for path, names in listed.items()
        for name in names
        if name not in found.get(path, {})
    ]
    count = sum(map(len, found.values()))
    print(f"vLLM {base.version}: {count} names and texts are gone or different")
    if unlisted or stale:
        raise Problem(
            f"{base.folder / CHANGES} needs a reason for\n  "
            + "\n  ".join(unlisted or ["no more"])
            + "\nand none for\n  "
            + "\n  ".join(stale or ["others"])
        )


def reasons(path: Path) -> Changes:
    """Raises Problem if one has no text."""
    listed: Changes = tomllib.loads(path.read_text()) if path.exists() else {}
    for file, names in listed.items():
        for name, why in names.items():
            if not why.strip():
                raise Problem(f"{path}: {file}: {name} has no reason.")
    return listed


def changes(tree: Path) -> Changes:
    """Removed and different names, by file and name."""
    found: Changes = {}
    listing = git(tree, "diff", "--name-status", "--no-renames", BASE_REF, "HEAD")
    files = [
        line.split("\t")
        for line in listing.splitlines()
        if re.search(r"\t(vllm|csrc)/.*\.(py|cpp)$", line)
    ]
    pairs = {
        path: (
            "" if status == "A" else show(tree, BASE_REF, path),
            "" if status == "D" else show(tree, "HEAD", path),
        )
        for status, path in files
    }
    said = " ".join(
        text for path, (_, new) in pairs.items() for text in messages(path, new)
    )
    for path, (old, new) in pairs.items():
        different = compare(names_in(path, old), names_in(path, new))
        for text in messages(path, old):
            if any(part not in said for part in parts(text)):
                different[f"text {text[:60].strip()}"] = "is not said any more"
        if different:
            found[path] = different
    for more in (new_keywords(pairs), replaced(pairs), sent(pairs)):
        for path, calls in more.items():
            found[path] = found.get(path, {}) | calls
    return found


def new_keywords(pairs: dict[str, tuple[str, str]]) -> Changes:
    """Calls of the release's functions with a keyword that only the series knows: a
    function that a library put in its place would not take it."""
    gained: dict[str, set[str]] = {}
    python = {path: pair for path, pair in pairs.items() if path.endswith(".py")}
    for old, new in python.values():
        now = python_names(new)
        for name, was in python_names(old).items():
            if was.startswith("(") and now.get(name, "").startswith("("):
                more = parameters(now[name]) - parameters(was)
                gained.setdefault(name.rpartition(".")[2], set()).update(more)
    found: Changes = {}
    for path, (_, new) in python.items():
        for node in ast.walk(ast.parse(new)):
            if isinstance(node, ast.Call):
                name = ast.unparse(node.func).rpartition(".")[2]
                for keyword in node.keywords:
                    if keyword.arg in gained.get(name, ()):
                        call = f"{name}({keyword.arg}=)"
                        found.setdefault(path, {})[call] = "the release does not pass"
    return found


def replaced(pairs: dict[str, tuple[str, str]]) -> Changes:
    """Functions of the release that another one in their place would miss."""
    found: Changes = {}
    python = {path: pair for path, pair in pairs.items() if path.endswith(".py")}
    methods = {
        name.rpartition(".")[2]
        for old, _ in python.values()
        for name, how in python_names(old).items()
        if "." in name and how.startswith("(")
    }
    for path, (old, new) in python.items():
        here = found.setdefault(path, {})
        known = {name.rpartition(".")[2] for name in python_names(new)}
        called = {name_of(node.func) for node in calls_in(old)}
        nodes = list(ast.walk(ast.parse(new)))
        used = {name_of(node) for node in nodes}
        for name in called & known - used:
            here[f"{name}()"] = "is not called there any more"
        for node in nodes:
            if isinstance(node, ast.Compare):
                for operator, to in zip(node.ops, node.comparators, strict=True):
                    if isinstance(operator, ast.Is | ast.IsNot) and (
                        isinstance(to, ast.Attribute) and to.attr in methods
                    ):
                        here[f"is {ast.unparse(to)}"] = "may be replaced on its class"
    return {path: names for path, names in found.items() if names}


def sent(pairs: dict[str, tuple[str, str]]) -> Changes:
    """What the series alone sends to workers: not names, or of methods that workers of
    a library lack."""
    _, workers = pairs.get(WORKERS, ("", ""))
    answered = {name.rpartition(".")[2] for name in python_names(workers)}
    found: Changes = {}
    for path, (old, new) in pairs.items():
        if path.endswith(".py"):
            was, now = ({*methods_sent(source)} for source in (old, new))
            for method in now - was:
                if method.strip("'") not in answered or method[0] != "'":
                    call = f"collective_rpc({method})"
                    found.setdefault(path, {})[call] = f"{WORKERS} does not answer it"
    return found


def methods_sent(source: str) -> Iterator[str]:
    for node in calls_in(source):
        if name_of(node.func) == "collective_rpc" and node.args:
            yield ast.unparse(node.args[0])


def calls_in(source: str) -> list[ast.Call]:
    return [n for n in ast.walk(ast.parse(source)) if isinstance(n, ast.Call)]


def name_of(node: ast.AST) -> str:
    if isinstance(node, ast.Name):
        return node.id
    return node.attr if isinstance(node, ast.Attribute) else ""


def show(tree: Path, revision: str, path: str) -> str:
    command = ["git", "-C", str(tree), "show", f"{revision}:{path}"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def compare(old: Names, new: Names) -> dict[str, str]:
    different = {}
    for name, was in old.items():
        if name not in new:
            different[name] = "is gone"
        elif not holds(name, was, new[name]):
            different[name] = f"was {was or 'there'}, is {new[name]}"
    return different


def holds(name: str, was: str, now: str) -> bool:
    if name.endswith(" fields"):
        return now == was or now.startswith(f"{was}, ")
    if was.startswith("(") and now.startswith("(") and was != now:
        return keeps_calls(was, now)
    return was == now


def keeps_calls(was: str, now: str) -> bool:
    """Whether all that is new are keyword-only parameters with a default, and a
    value where nothing was returned."""
    old, new = (ast.parse(f"def f{text}: pass").body[0] for text in (was, now))
    assert isinstance(old, ast.FunctionDef) and isinstance(new, ast.FunctionDef)
    if old.returns is not None and ast.unparse(old.returns) == "None":
        new.returns = old.returns
    known = {argument.arg for argument in old.args.kwonlyargs}
    for argument, default in zip(
        new.args.kwonlyargs[:], new.args.kw_defaults[:], strict=True
    ):
        if argument.arg not in known and default is not None:
            at = new.args.kwonlyargs.index(argument)
            del new.args.kwonlyargs[at], new.args.kw_defaults[at]
    return ast.unparse(old) == ast.unparse(new)


def parameters(signature: str) -> set[str]:
    (defined,) = ast.parse(f"def f{signature}: pass").body
    return {node.arg for node in ast.walk(defined) if isinstance(node, ast.arg)}


def names_in(path: str, source: str) -> Names:
    return python_names(source) if path.endswith(".py") else c_names(source)


def c_names(source: str) -> Names:
    """Methods of a Python extension, and the arguments that each parses."""
    names = {}
    table = r'\{"(\w+)",\s*(?:\(PyCFunction\))?(\w+),'
    for name, function in re.findall(table, source):
        found = re.search(rf"PyObject\* {function}\(.*?^\}}", source, re.S | re.M)
        body = found[0] if found else ""
        formats = re.findall(r'ParseTuple\(\s*\w+,\s*"([^"]*)"', body)
        names[f"method {name}"] = " or ".join(formats)
    return names


def python_names(source: str) -> Names:
    tree = ast.parse(source)
    names = dict(members(tree.body, ""))
    for flag in re.findall(r'add_argument\(\s*"(--[\w-]+)"', source):
        names[f"flag {flag}"] = ""
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.AnnAssign | ast.Assign)
            and isinstance(node.value, ast.Dict)
            and "environment_variables" in targets(node)
        ):
            keys = [k for k in node.value.keys if isinstance(k, ast.Constant)]
            names |= {f"variable {key.value!s}": "" for key in keys}
    return names


def members(body: list[ast.stmt], prefix: str) -> Iterator[tuple[str, str]]:
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield from function(node, prefix)
        elif isinstance(node, ast.ClassDef):
            bases = [ast.unparse(base) for base in node.bases]
            yield prefix + node.name, f"class {', '.join(bases)}"
            own = f"{prefix}{node.name}."
            fields = [
                ast.unparse(n.target) for n in node.body if isinstance(n, ast.AnnAssign)
            ]
            if fields:
                yield f"{prefix}{node.name} fields", ", ".join(fields)
            yield from members(node.body, own)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            # A field's default or a constant; a class's attribute is a field, too.
            value = ast.unparse(node.value) if node.value is not None else ""
            if len(value) > 80 or "(" in value:
                value = ""  # made, not chosen
            for name in targets(node):
                yield prefix + name, value
        elif isinstance(node, ast.Import | ast.ImportFrom):
            for alias in node.names:
                name = alias.asname or alias.name.partition(".")[0]
                yield f"{prefix}{name}", ""
        elif isinstance(node, ast.If | ast.Try | ast.With):
            for part in ("body", "orelse", "finalbody"):
                yield from members(getattr(node, part, []), prefix)
            for handler in getattr(node, "handlers", []):
                yield from members(handler.body, prefix)


def function(
    node: ast.FunctionDef | ast.AsyncFunctionDef, prefix: str
) -> Iterator[tuple[str, str]]:
    kinds = [k for d in node.decorator_list if (k := ast.unparse(d)) in KINDS]
    kinds += ["async"] * isinstance(node, ast.AsyncFunctionDef)
    key = prefix + node.name
    if any(ast.unparse(d) == f"{node.name}.setter" for d in node.decorator_list):
        yield f"{key} to set", ""
        return
    returns = f" -> {ast.unparse(node.returns)}" if node.returns else ""
    if kinds:  # it is not called by its parameters alone
        yield f"{key} is", " ".join(kinds)
    if "property" in kinds:
        yield key, ""
        return
    yield key, f"({ast.unparse(node.args)}){returns}"
    if prefix:
        for inner in ast.walk(node):
            if (
                isinstance(inner, ast.Attribute)
                and isinstance(inner.ctx, ast.Store)
                and ast.unparse(inner.value) == "self"
            ):
                yield f"{prefix}{inner.attr}", ""
                yield f"{prefix}{inner.attr} to set", ""


def targets(node: ast.Assign | ast.AnnAssign) -> list[str]:
    found = node.targets if isinstance(node, ast.Assign) else [node.target]
    return [n.id for t in found for n in ast.walk(t) if isinstance(n, ast.Name)]


def messages(path: str, source: str) -> list[str]:
    """Texts that are logged, or built to be, and those of errors."""
    if not path.endswith(".py"):
        return []
    texts = []
    for node in ast.walk(ast.parse(source)):
        given: ast.expr | None = None
        if isinstance(node, ast.Call) and node.args:
            name = ast.unparse(node.func)
            if name.startswith("logger.") or name.endswith(("Error", "Exception")):
                given = node.args[0]
        elif isinstance(node, ast.Assign | ast.Return):
            given = node.value if isinstance(node.value, ast.JoinedStr) else None
        if given is not None and (text := text_of(given)):
            texts.append(text)
    return texts


def text_of(node: ast.expr) -> str:
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        return text_of(node.func.value)  # "...".rstrip()
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else ""
    if isinstance(node, ast.JoinedStr):
        return "".join(
            str(v.value) if isinstance(v, ast.Constant) else "%s" for v in node.values
        )
    return ""


def parts(text: str) -> list[str]:
    """What of it a search may look for."""
    found = re.split(r"%[-\d.]*[sdrfx]", text)
    return [part.strip() for part in found if len(part.strip()) >= LEAST_TEXT]


if __name__ == "__main__":
    command(main)

"""The C sources of the device form layers, and none refers to a higher one.

The layers are `build.LAYERS`, a folder each. Every source is compiled on its own, as
the build compiles all of them, and its object file has its references. Calls of the
driver through its table (`driver()->cuMemAlloc`) are read from the source.
"""

from __future__ import annotations

import os
import re
import subprocess
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest
from elftools.elf.elffile import ELFFile

from vgpu import build

LINES = 500


@dataclass
class Object:
    """A compiled source; its symbols are those that other files could see."""

    source: Path
    defined: set[str] = field(default_factory=set)
    undefined: set[str] = field(default_factory=set)

    @property
    def layer(self) -> int:
        return build.LAYERS.index(self.source.parent.name)

    def __str__(self) -> str:
        return f"{self.source.parent.name}/{self.source.name}"


def sources(*suffixes: str) -> list[Path]:
    return sorted(p for p in build.SOURCES.rglob("*") if p.suffix in suffixes)


def compiled(source: Path, flags: list[str], output: Path) -> Object:
    subprocess.run([*flags, "-c", "-o", output, source], check=True)
    result = Object(source)
    with output.open("rb") as file:
        symbols = ELFFile(file).get_section_by_name(".symtab")
        for symbol in symbols.iter_symbols():
            if symbol["st_info"]["bind"] == "STB_LOCAL":
                continue
            absent = symbol["st_shndx"] == "SHN_UNDEF"
            (result.undefined if absent else result.defined).add(symbol.name)
    return result


@pytest.fixture(scope="module")
def objects(tmp_path_factory: pytest.TempPathFactory) -> list[Object]:
    folder = tmp_path_factory.mktemp("layers")
    flags = build.compile_flags(build.find_headers(), folder)
    command = [*build.find_compiler().split(), *flags]
    generated = build.write_stubs(folder / "generated", ["cuSomething"], [])
    every = [*sources(".c"), *generated]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return list(
            pool.map(
                lambda i: compiled(every[i], command, folder / f"{i}.o"),
                range(len(every)),
            )
        )


def through_table(source: Path) -> set[str]:
    """The driver's calls that it makes by pointer, under each of their names."""
    calls = re.findall(r"\bdriver\(\)->(\w+)", source.read_text())
    return {call + suffix for call in calls for suffix in ("", "_v2", "_v3", "_v4")}


def references(objects: list[Object]) -> list[tuple[Object, str, Object]]:
    """(who refers, to which symbol, who defines it), of two files each."""
    home = {symbol: o for o in objects for symbol in o.defined}
    return [
        (o, symbol, home[symbol])
        for o in objects
        for symbol in sorted((o.undefined | through_table(o.source)) & home.keys())
        if home[symbol] is not o
    ]


def test_layers_are_the_folders_of_the_sources() -> None:
    found = {p.relative_to(build.SOURCES).parts[0] for p in sources(".c", ".h")}
    assert found == set(build.LAYERS)


def test_no_layer_refers_to_one_above(objects: list[Object]) -> None:
    found = references(objects)
    assert any(callee.layer < caller.layer for caller, _, callee in found)
    assert any(o.defined & through_table(o.source) for o in objects)
    up = [
        f"{caller} -> {symbol}, defined in {callee}"
        for caller, symbol, callee in found
        if callee.layer > caller.layer
    ]
    assert not up, f"{len(up)} upward references:\n" + "\n".join(up)


def test_no_files_refer_to_each_other_in_a_circle(objects: list[Object]) -> None:
    below: dict[str, set[str]] = {}
    for caller, _, callee in references(objects):
        below.setdefault(str(caller), set()).add(str(callee))
    try:
        TopologicalSorter(below).prepare()
    except CycleError as error:
        pytest.fail(" <- ".join(error.args[1]))


def test_no_file_includes_a_header_of_a_layer_above() -> None:
    up = []
    for path in sources(".c", ".h"):
        own = build.LAYERS.index(path.parent.name)
        for layer, name in re.findall(
            r'^#include "(?:(\w+)/)?(\w+\.h)"', path.read_text(), re.MULTILINE
        ):
            if layer not in build.LAYERS[: own + 1]:
                up.append(f"{path.parent.name}/{path.name} -> {layer}/{name}")
    assert not up, "\n".join(up)


def test_no_file_is_long() -> None:
    lengths = {p.name: len(p.read_text().splitlines()) for p in sources(".c", ".h")}
    assert {name: n for name, n in lengths.items() if n > LINES} == {}

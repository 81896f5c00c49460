"""The dynamic symbols of an ELF shared object (64-bit, little-endian)."""

from __future__ import annotations

import mmap
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

SHT_DYNAMIC, SHT_DYNSYM = 6, 11
SHT_GNU_VERNEED, SHT_GNU_VERSYM = 0x6FFFFFFE, 0x6FFFFFFF
DT_NEEDED, DT_SONAME = 1, 14


@dataclass
class SharedObject:
    """What one shared object needs and offers.

    `undefined` maps a symbol to the library its version names ("" if it has no
    version); `versions` maps a library to the version names asked of it.
    """

    soname: str = ""
    needed: list[str] = field(default_factory=list)
    undefined: dict[str, str] = field(default_factory=dict)
    defined: set[str] = field(default_factory=set)
    versions: dict[str, set[str]] = field(default_factory=dict)


class NotElf(ValueError):
    """The file is no 64-bit little-endian ELF file."""


def _text(data: mmap.mmap, offset: int) -> str:
    return data[offset : data.find(b"\0", offset)].decode()


def _needs(
    data: mmap.mmap, offset: int, count: int, strings: int
) -> Iterator[tuple[str, str, int]]:
    """(library, version, index) of a version-needs section."""
    for _ in range(count):
        _, auxes, file, aux, following = struct.unpack_from("<HHIII", data, offset)
        library, at = _text(data, strings + file), offset + aux
        for _ in range(auxes):
            _, _, index, name, step = struct.unpack_from("<IHHII", data, at)
            yield library, _text(data, strings + name), index
            at += step
        offset += following


def read(path: Path) -> SharedObject:
    """Reads the dynamic section and symbols; raises NotElf."""
    if path.stat().st_size < 64:
        raise NotElf(path)
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as d:
        if d[:6] != b"\x7fELF\x02\x01":
            raise NotElf(path)
        return _read(d)


def _read(data: mmap.mmap) -> SharedObject:
    result = SharedObject()
    (section_table,) = struct.unpack_from("<Q", data, 40)
    entry, count = struct.unpack_from("<HH", data, 58)
    sections = [
        struct.unpack_from("<IIQQQQIIQQ", data, section_table + i * entry)
        for i in range(count)
    ]
    by_type = {s[1]: s for s in sections}
    names: dict[int, tuple[str, str]] = {}
    if SHT_GNU_VERNEED in by_type:
        s = by_type[SHT_GNU_VERNEED]
        for library, version, index in _needs(data, s[4], s[7], sections[s[6]][4]):
            names[index] = (library, version)
            result.versions.setdefault(library, set()).add(version)
    if SHT_DYNAMIC in by_type:
        s = by_type[SHT_DYNAMIC]
        strings = sections[s[6]][4]
        for tag, value in struct.iter_unpack("<QQ", data[s[4] : s[4] + s[5]]):
            if tag == DT_NEEDED:
                result.needed.append(_text(data, strings + value))
            elif tag == DT_SONAME:
                result.soname = _text(data, strings + value)
    if SHT_DYNSYM in by_type:
        s = by_type[SHT_DYNSYM]
        strings = sections[s[6]][4]
        versions: list[int] = []
        if SHT_GNU_VERSYM in by_type:
            v = by_type[SHT_GNU_VERSYM]
            versions = [
                x[0] for x in struct.iter_unpack("<H", data[v[4] : v[4] + v[5]])
            ]
        table = struct.iter_unpack("<IBBHQQ", data[s[4] : s[4] + s[5]])
        for i, (name, info, _, section, _, _) in enumerate(table):
            if not name or info >> 4 == 0:
                continue
            symbol = _text(data, strings + name)
            if section:
                result.defined.add(symbol)
            else:
                library = (
                    names.get(versions[i] & 0x7FFF, ("", ""))[0] if versions else ""
                )
                result.undefined[symbol] = library
    return result

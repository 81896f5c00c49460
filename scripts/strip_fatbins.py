"""Cut the kernels in an ELF file down to one GPU architecture, in place.

An official wheel holds every kernel once for each architecture, hundreds of MiB. The
section .nv_fatbin is a row of containers: a header (u32 magic, u16 version, u16 header
bytes, u64 bytes that follow) and entries (u16 kind, u16 version, u32 header bytes, u64
bytes that follow, ..., u32 architecture at 28). Here a container keeps the entries
for the architecture, its size field says so, and zeros fill the rest: no offset in the
file moves, and zeros compress away.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from io import BytesIO

from elftools.common.exceptions import ELFError
from elftools.elf.elffile import ELFFile

MAGIC = 0xBA55ED50
PTX, CUBIN = 1, 2
CONTAINER = struct.Struct("<IHHQ")
ENTRY = struct.Struct("<HHIQ12xI")


@dataclass(frozen=True)
class Entry:
    kind: int
    architecture: int
    content: bytes


def strip_fatbins(elf: bytearray, architecture: int) -> int:
    """Keep the machine code for `architecture` (90 for sm_90); returns bytes freed.

    Where there is none, the container keeps the smallest code for another device in
    the file: a driver then finds no code for this one when that kernel is launched,
    not a damaged file.

    Raises:
        ValueError: it is no ELF file, or a container is malformed.
    """
    containers = [
        (
            start,
            header,
            size,
            list(_entries(elf, start + header, start + header + size)),
        )
        for start, header, size in _containers(elf)
    ]
    others = [
        entry.content
        for *_, entries in containers
        for entry in entries
        if entry.kind == CUBIN and entry.architecture != architecture
    ]
    smallest = sorted(others, key=len)[:1]
    freed = 0
    for start, header, size, entries in containers:
        kept = [
            entry.content
            for entry in entries
            if entry.kind == CUBIN and entry.architecture == architecture
        ] or [min([*(entry.content for entry in entries), *smallest], key=len)]
        content = b"".join(kept)
        elf[start + 8 : start + 16] = struct.pack("<Q", len(content))
        elf[start + header : start + header + size] = content.ljust(size, b"\0")
        freed += size - len(content)
    return freed


def _containers(elf: bytearray) -> Iterator[tuple[int, int, int]]:
    """Offset, header bytes and content bytes of each."""
    try:
        section = ELFFile(BytesIO(elf)).get_section_by_name(".nv_fatbin")
    except ELFError as error:
        raise ValueError(f"not an ELF file: {error}") from error
    if section is None:
        return
    position = section["sh_offset"]
    end = position + section["sh_size"]
    while position + CONTAINER.size <= end:
        magic, _, header, size = CONTAINER.unpack_from(elf, position)
        if magic != MAGIC:
            position += 8
            continue
        yield position, header, size
        position = (position + header + size + 7) // 8 * 8


def _entries(elf: bytearray, position: int, end: int) -> Iterator[Entry]:
    while position < end:
        kind, _, header, size, architecture = ENTRY.unpack_from(elf, position)
        after = position + header + size
        if not header or after > end:
            raise ValueError(
                f"the kernels at {position:#x} do not fill their container"
            )
        yield Entry(kind, architecture, bytes(elf[position:after]))
        position = after

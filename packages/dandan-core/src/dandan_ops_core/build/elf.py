"""A small reader of ELF64 shared libraries: what they need, and the platform tag that follows from it."""

from __future__ import annotations

import re
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from .errors import BuildError

_DT_NEEDED, _DT_STRTAB, _DT_VERNEED, _DT_VERNEEDNUM = 1, 5, 0x6FFFFFFE, 0x6FFFFFFF
_PT_LOAD, _PT_DYNAMIC = 1, 2

# manylinux_2_N: the newest symbol versions that a system with glibc 2.N promises (the table of the manylinux policies).
_POLICIES: tuple[tuple[int, tuple[int, ...], tuple[int, ...], tuple[int, ...]], ...] = (
    # glibc 2.N  GLIBCXX      CXXABI      GCC
    (17, (3, 4, 19), (1, 3, 7), (4, 8, 0)),
    (28, (3, 4, 24), (1, 3, 11), (7, 0, 0)),
    (31, (3, 4, 28), (1, 3, 12), (7, 0, 0)),
    (34, (3, 4, 29), (1, 3, 13), (7, 0, 0)),
    (35, (3, 4, 30), (1, 3, 13), (12, 0, 0)),
    (39, (3, 4, 33), (1, 3, 14), (14, 0, 0)),
)
# Libraries that every manylinux system has, and torch's own, which the declared dependency on torch brings.
_PROMISED = re.compile(
    r"^(lib(c|m|dl|rt|pthread|util|resolv|stdc\+\+|gcc_s)\.so\.\d+|ld-linux[\w-]*\.so\.\d+|libtorch(_cpu)?\.so|libc10\.so)$"
)


@dataclass(frozen=True)
class Needs:
    """What a shared library asks of the system: libraries by name, symbol versions per family (GLIBC, GLIBCXX, ...)."""

    libraries: tuple[str, ...]
    versions: Mapping[str, tuple[tuple[int, ...], ...]]

    def highest(self, family: str) -> tuple[int, ...]:
        return max(self.versions.get(family, ()), default=(0,))


def read_needs(image: bytes) -> Needs:
    """Read the dynamic section of a little-endian ELF64 library. Raises BuildError for anything else."""
    if image[:6] != b"\x7fELF\x02\x01":
        raise BuildError("the built library is no little-endian 64-bit ELF file.")
    program_offset, entry_size, count = (
        struct.unpack_from("<Q", image, 32)[0],
        *struct.unpack_from("<HH", image, 54),
    )
    loads: list[tuple[int, int, int]] = []
    dynamic: tuple[int, int] | None = None
    for index in range(count):
        kind, _, offset, address, _, size = struct.unpack_from("<IIQQQQ", image, program_offset + index * entry_size)
        if kind == _PT_LOAD:
            loads.append((address, offset, size))
        elif kind == _PT_DYNAMIC:
            dynamic = (offset, size)
    if dynamic is None:
        raise BuildError("the built library has no dynamic section.")

    def at(address: int) -> int:
        for start, offset, size in loads:
            if start <= address < start + size:
                return address - start + offset
        raise BuildError("the built library's dynamic section points outside of the file.")

    entries = [struct.unpack_from("<qQ", image, dynamic[0] + step) for step in range(0, dynamic[1], 16)]
    tags = dict(entries)
    strings = at(tags[_DT_STRTAB])

    def string(offset: int) -> str:
        start = strings + offset
        return image[start : image.index(b"\0", start)].decode()

    libraries = tuple(string(value) for tag, value in entries if tag == _DT_NEEDED)
    versions: dict[str, list[tuple[int, ...]]] = {}
    if _DT_VERNEED in tags:
        need = at(tags[_DT_VERNEED])
        for _ in range(tags[_DT_VERNEEDNUM]):
            _, names, _, first, following = struct.unpack_from("<HHIII", image, need)
            name = need + first
            for _ in range(names):
                _, _, _, text, next_name = struct.unpack_from("<IHHII", image, name)
                family, _, numbers = string(text).partition("_")
                if re.fullmatch(r"[\d.]+", numbers):
                    versions.setdefault(family, []).append(tuple(int(part) for part in numbers.split(".")))
                else:
                    versions.setdefault(string(text), []).append(())
                name += next_name
            need += following
    return Needs(libraries, {family: tuple(sorted(found)) for family, found in versions.items()})


def platform_tag(needs: Needs, machine: str) -> tuple[str, str]:
    """The wheel's platform tag and the reason for it.

    manylinux_2_N where a system with glibc 2.N promises every symbol version and library, else linux_<machine>.
    """
    foreign = [name for name in needs.libraries if not _PROMISED.match(name)]
    if foreign:
        return f"linux_{machine}", f"needs {', '.join(foreign)}, which no manylinux system promises"
    unknown = sorted(family for family in needs.versions if family not in ("GLIBC", "GLIBCXX", "CXXABI", "GCC"))
    if unknown:
        return f"linux_{machine}", f"needs symbol versions {', '.join(unknown)}"
    asked = {family: needs.highest(family) for family in ("GLIBC", "GLIBCXX", "CXXABI", "GCC")}
    shown = ", ".join(f"{family} {dotted(version)}" for family, version in asked.items() if version != (0,))
    for minor, glibcxx, cxxabi, gcc in _POLICIES:
        limits = {"GLIBC": (2, minor), "GLIBCXX": glibcxx, "CXXABI": cxxabi, "GCC": gcc}
        if all(asked[family] <= limits[family] for family in limits):
            return f"manylinux_2_{minor}_{machine}", f"highest symbol versions: {shown}"
    return f"linux_{machine}", f"symbol versions beyond every manylinux policy known here: {shown}"


def dotted(version: Iterable[int]) -> str:
    """ "2.34" for (2, 34)."""
    return ".".join(str(part) for part in version)


def library_tag(library: Path, machine: str) -> tuple[str, str]:
    """platform_tag() of a file."""
    return platform_tag(read_needs(library.read_bytes()), machine)

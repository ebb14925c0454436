"""GPU architectures: parsing lists, finding the visible GPUs, choosing what each source file is compiled for."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from .errors import BuildError

_NAME = re.compile(r"^(\d+)\.(\d)([af]?)(\+PTX)?$", re.IGNORECASE)
_STEM = re.compile(r"^sm(\d{2,3})([af]?)_")

# The first toolkit (major, minor) whose nvcc knows an architecture; those up to 9.0 every toolkit we accept knows.
_FIRST_TOOLKIT = {100: (12, 8), 101: (12, 8), 103: (12, 9), 110: (13, 0), 120: (12, 8), 121: (12, 9)}


@dataclass(frozen=True, order=True)
class Arch:
    """One GPU architecture, such as 8.0 or 9.0a (`suffix` a: architecture-specific, f: family-specific)."""

    number: int
    suffix: str = ""

    @property
    def name(self) -> str:
        """As users write it: 9.0a."""
        return f"{self.number // 10}.{self.number % 10}{self.suffix}"

    @property
    def code(self) -> str:
        """As nvcc writes it behind sm_ and compute_: 90a."""
        return f"{self.number}{self.suffix}"


@dataclass(frozen=True)
class ArchList:
    """What to build for: machine code (`sass`), intermediate code (`ptx`); `source` says where the choice came from."""

    sass: tuple[Arch, ...]
    ptx: tuple[Arch, ...]
    source: str


DEFAULT_SASS = (Arch(80), Arch(86), Arch(89), Arch(90, "a"), Arch(120))
DEFAULT_PTX = (Arch(90),)


def parse_arch_list(text: str) -> tuple[tuple[Arch, ...], tuple[Arch, ...]]:
    """Parse TORCH_CUDA_ARCH_LIST ("8.0;9.0a+PTX", also with spaces or commas) to (machine code, PTX), sorted.

    Raises BuildError for an entry that is no architecture, or one older than 8.0.
    """
    sass: set[Arch] = set()
    ptx: set[Arch] = set()
    for entry in re.split(r"[;,\s]+", text.strip()):
        if not entry:
            continue
        match = _NAME.match(entry)
        if match is None:
            raise BuildError(
                f"TORCH_CUDA_ARCH_LIST has {entry!r}, which is no architecture; write numbers: 8.0;9.0a;12.0+PTX."
            )
        major, minor, suffix, with_ptx = match.groups()
        arch = Arch(int(major) * 10 + int(minor), suffix.lower())
        if arch.number < 80:
            raise BuildError(f"TORCH_CUDA_ARCH_LIST has {entry!r}, but these kernels need architecture 8.0 or newer.")
        sass.add(arch)
        if with_ptx:
            ptx.add(arch)
    if not sass:
        raise BuildError("TORCH_CUDA_ARCH_LIST is set but names no architecture; unset it or write for example 9.0a.")
    return tuple(sorted(sass)), tuple(sorted(ptx))


def for_device(major: int, minor: int) -> Arch:
    """The architecture to compile for a GPU of this capability: Hopper gets 9.0a, where its own instructions live."""
    number = major * 10 + minor
    return Arch(number, "a" if number == 90 else "")


def choose_archs(
    environ: Mapping[str, str], capabilities: Sequence[tuple[int, int]], toolkit: tuple[int, int]
) -> ArchList:
    """Choose the architectures: TORCH_CUDA_ARCH_LIST, else the visible GPUs, else the default list.

    `capabilities` are those of the visible GPUs, `toolkit` the version of nvcc. Raises BuildError for a list that this
    nvcc cannot build; the default list leaves out what an older nvcc does not know.
    """
    text = environ.get("TORCH_CUDA_ARCH_LIST", "").strip()
    if text:
        sass, ptx = parse_arch_list(text)
        chosen = ArchList(sass, ptx, f"TORCH_CUDA_ARCH_LIST={text}")
    else:
        usable = sorted({for_device(major, minor) for major, minor in capabilities if major >= 8})
        if usable:
            chosen = ArchList(tuple(usable), (), "the visible GPUs")
        else:
            known = tuple(arch for arch in DEFAULT_SASS if _known(arch, toolkit))
            return ArchList(known, DEFAULT_PTX, "the default list")
    unknown = [arch.name for arch in chosen.sass if not _known(arch, toolkit)]
    if unknown:
        raise BuildError(
            f"CUDA {toolkit[0]}.{toolkit[1]} cannot compile for {', '.join(unknown)} (from {chosen.source}); "
            "use a newer toolkit or set TORCH_CUDA_ARCH_LIST."
        )
    return chosen


def _known(arch: Arch, toolkit: tuple[int, int]) -> bool:
    first = _FIRST_TOOLKIT.get(arch.number)
    if first is None:
        return arch.number < 100
    return toolkit >= first


def stem_arch(stem: str) -> Arch | None:
    """The architecture that a source file's name asks for (sm90a_gemm -> 9.0a), or None where it asks for none."""
    match = _STEM.match(stem)
    return Arch(int(match[1]), match[2]) if match else None


def file_archs(stem: str, archs: ArchList) -> tuple[tuple[Arch, ...], tuple[Arch, ...]]:
    """What one .cu file is compiled for, by the prefix of its stem: (machine code, PTX).

    sm80_x: every chosen architecture from 8.0 up; sm90a_x: 9.0a alone; no prefix: all. A file that fits none of the
    chosen architectures is compiled for its own, so that the library links; the binding refuses it by name, since the
    library's list of architectures does not have it.
    """
    lowest = stem_arch(stem)
    if lowest is None:
        return archs.sass, archs.ptx
    if lowest.suffix:
        sass = tuple(arch for arch in archs.sass if arch == lowest)
        ptx = tuple(arch for arch in archs.ptx if arch == lowest)
    else:
        sass = tuple(arch for arch in archs.sass if arch.number >= lowest.number)
        ptx = tuple(arch for arch in archs.ptx if arch.number >= lowest.number)
    return (sass or (lowest,)), ptx


def gencode_flags(sass: Iterable[Arch], ptx: Iterable[Arch]) -> list[str]:
    """The nvcc flags for these architectures."""
    flags = [f"-gencode=arch=compute_{arch.code},code=sm_{arch.code}" for arch in sass]
    flags += [f"-gencode=arch=compute_{arch.code},code=compute_{arch.code}" for arch in ptx]
    return flags


# Asks the driver in a process of its own: the build process keeps no CUDA state, and CUDA_VISIBLE_DEVICES is honoured.
_ASK_DRIVER = """
import ctypes, sys
lib = ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")
count, device, major, minor = (ctypes.c_int() for _ in range(4))
if lib.cuInit(0) == 0 and lib.cuDeviceGetCount(ctypes.byref(count)) == 0:
    for index in range(count.value):
        lib.cuDeviceGet(ctypes.byref(device), index)
        lib.cuDeviceGetAttribute(ctypes.byref(major), 75, device)
        lib.cuDeviceGetAttribute(ctypes.byref(minor), 76, device)
        print(major.value, minor.value)
"""


def visible_capabilities() -> tuple[tuple[int, int], ...]:
    """Compute capabilities of the visible GPUs; empty where there is no driver or no GPU."""
    try:
        done = subprocess.run(
            [sys.executable, "-c", _ASK_DRIVER], capture_output=True, text=True, timeout=60, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return ()
    found = []
    for line in done.stdout.splitlines():
        major, minor = line.split()
        found.append((int(major), int(minor)))
    return tuple(found)

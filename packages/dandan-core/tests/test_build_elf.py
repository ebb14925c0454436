"""The wheel tag from what a library needs."""

from __future__ import annotations

import platform
import shutil
import subprocess
from pathlib import Path

import pytest

from dandan_ops_core.build.elf import Needs, library_tag, platform_tag, read_needs
from dandan_ops_core.build.errors import BuildError

LIBRARIES = ("libtorch.so", "libtorch_cpu.so", "libstdc++.so.6", "libgcc_s.so.1", "libc.so.6", "ld-linux-x86-64.so.2")


def needs(libraries: tuple[str, ...] = LIBRARIES, **versions: str) -> Needs:
    return Needs(libraries, {family: ((1,), numbers(text)) for family, text in versions.items()})


def numbers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split("."))


@pytest.mark.parametrize(
    ("versions", "tag"),
    [
        ({"GLIBC": "2.14", "GLIBCXX": "3.4.18"}, "manylinux_2_17_x86_64"),
        ({"GLIBC": "2.28"}, "manylinux_2_28_x86_64"),
        ({"GLIBC": "2.34", "GLIBCXX": "3.4.29"}, "manylinux_2_34_x86_64"),
        ({"GLIBC": "2.14", "GLIBCXX": "3.4.29"}, "manylinux_2_34_x86_64"),  # libstdc++ decides
        ({"GLIBC": "2.34", "GLIBCXX": "3.4.30"}, "manylinux_2_35_x86_64"),
        ({"GLIBC": "2.34", "CXXABI": "1.3.14"}, "manylinux_2_39_x86_64"),
        ({"GLIBC": "2.99"}, "linux_x86_64"),
    ],
)
def test_tag_from_symbol_versions(versions: dict[str, str], tag: str) -> None:
    found, reason = platform_tag(needs(**versions), "x86_64")
    assert found == tag
    assert max(versions.values(), key=len) in reason


@pytest.mark.parametrize("library", ["libcudart.so.13", "libcuda.so.1", "libpython3.11.so.1.0", "libgomp.so.1"])
def test_no_manylinux_tag_with_a_foreign_library(library: str) -> None:
    found, reason = platform_tag(needs((*LIBRARIES, library), GLIBC="2.17"), "x86_64")
    assert found == "linux_x86_64"
    assert library in reason


def test_no_manylinux_tag_with_private_symbols() -> None:
    found, _ = platform_tag(Needs(LIBRARIES, {"GLIBC": ((2, 17),), "GLIBC_PRIVATE": ((),)}), "x86_64")
    assert found == "linux_x86_64"


def test_no_library_image() -> None:
    with pytest.raises(BuildError, match="no little-endian 64-bit ELF file"):
        read_needs(b"MZ" + bytes(100))


@pytest.mark.skipif(platform.system() != "Linux" or not shutil.which("gcc"), reason="needs gcc on Linux")
def test_a_real_library(tmp_path: Path) -> None:
    source, library = tmp_path / "a.c", tmp_path / "liba.so"
    source.write_text(
        '#include <math.h>\n#include <stdlib.h>\ndouble f(double x) { return sin(x) + atoi(getenv("A")); }\n'
    )
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", str(library), str(source), "-lm"], check=True)
    found = read_needs(library.read_bytes())
    assert set(found.libraries) == {"libm.so.6", "libc.so.6"}
    assert found.highest("GLIBC") >= (2, 2, 5)
    assert found.highest("GLIBCXX") == (0,)
    assert library_tag(library, platform.machine())[0].endswith(platform.machine())

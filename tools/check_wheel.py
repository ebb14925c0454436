#!/usr/bin/env python3
"""Inspect built wheels and sdists against what the project promises of them.

    python tools/check_wheel.py --torch-headers INCLUDE --platform-wheel dist/dandan_norm-*

Wheel: its files, tag and metadata; its route tables, whose rows must be for its own kernels. Library: needed libraries,
symbols (each undefined one known to the oldest torch, by the headers of that version, or to a system of the stated
age), nothing exported that could clash, and the GPU code for every architecture that _build_info.json names. Sdist:
sources and headers in; tests, docs, build products out.
"""

from __future__ import annotations

import argparse
import io
import json
import re
import struct
import sys
import tarfile
import zipfile
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from email.parser import Parser
from pathlib import Path

from elftools.elf.dynamic import DynamicSection
from elftools.elf.elffile import ELFFile
from elftools.elf.gnuversions import GNUVerNeedSection, GNUVerSymSection
from elftools.elf.sections import SymbolTableSection

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "packages" / "dandan-core" / "src"))

from dandan_ops_core.profiles import parse_table, route_fingerprint

# The oldest system that a wheel may ask for: glibc 2.34, libstdc++ and libgcc of GCC 11 (Debian 12, Ubuntu 22.04,
# RHEL 9). A build machine with something newer fails here, not at the user's.
LIMITS = {"GLIBC": (2, 34), "GLIBCXX": (3, 4, 29), "CXXABI": (1, 3, 13), "GCC": (7, 0, 0)}

SYSTEM_LIBRARIES = re.compile(r"^(lib(c|m|dl|rt|pthread|stdc\+\+|gcc_s)\.so\.\d+|ld-linux-[\w-]+\.so\.\d+)$")
TORCH_LIBRARIES = ("libtorch.so", "libtorch_cpu.so")
# What every shared library may leave open, since the loader or nobody fills it.
LOADER_SYMBOLS = ("__gmon_start__", "_ITM_deregisterTMCloneTable", "_ITM_registerTMCloneTable", "__cxa_finalize")

WHEEL_FILES = re.compile(
    r"^(py\.typed|(\w+/)*\w+\.py|profiles/[\w.-]+\.json|_build_info\.json|lib\w+\.so|\w+\.dll"
    r"|include/dandan/[\w/]+\.(h|cuh|hpp))$"
)
SDIST_FOLDERS = ("src/", "csrc/")
SDIST_FILES = re.compile(
    r"^(pyproject\.toml|setup\.(py|cfg)|MANIFEST\.in|PKG-INFO|README\.md|CHANGELOG\.md|LICENSE|COMMIT|\.gitignore)$"
)
NOT_SHIPPED = re.compile(
    r"(^|/)(tests?|benchmarks?|docs|build|__pycache__)(/|$)|\.(pyc|so|dll|o|obj|a)$|_build_info\.json$"
)

# What a released library has machine code for.
RELEASE_ARCHITECTURES = ("8.0", "8.6", "8.9", "9.0a", "12.0")

FATBIN_MAGIC = 0xBA55ED50
PTX, CUBIN = 1, 2
ARCHITECTURE_SPECIFIC, FAMILY_SPECIFIC = 1 << 20, 1 << 21


@dataclass
class Library:
    """What a compiled library says of itself."""

    needed: list[str] = field(default_factory=list)
    run_paths: list[str] = field(default_factory=list)
    versions: dict[str, set[str]] = field(default_factory=dict)  # family -> versions, such as GLIBC -> {"2.34"}
    undefined: dict[str, str] = field(
        default_factory=dict
    )  # symbol without a version -> binding (STB_GLOBAL, STB_WEAK)
    exported: list[str] = field(default_factory=list)
    gpu_code: Counter[tuple[str, str]] = field(default_factory=Counter)  # ("sm" | "ptx", "90a") -> number of entries


def gpu_code(section: bytes) -> Counter[tuple[str, str]]:
    """Count the code in an .nv_fatbin section: ("sm", "90a") and ("ptx", "90") -> entries.

    The section is a row of containers, each 16 bytes (magic, version, header size, size of the rest) and then entries
    of a header (kind at 0, header size at 4, payload size at 8, architecture at 28, flags at 40) and a payload.
    """
    found: Counter[tuple[str, str]] = Counter()
    position = 0
    while position + 16 <= len(section):
        magic, version, header, size = struct.unpack_from("<IHHQ", section, position)
        if magic == 0:  # padding between containers
            position += 8
            continue
        if magic != FATBIN_MAGIC or version != 1 or header != 16 or position + header + size > len(section):
            raise ValueError(f"no fatbin container at offset {position} of .nv_fatbin")
        entry, end = position + header, position + header + size
        while entry + 48 <= end:
            kind, _, entry_header, payload = struct.unpack_from("<HHIQ", section, entry)
            number = struct.unpack_from("<I", section, entry + 28)[0]
            flags = struct.unpack_from("<Q", section, entry + 40)[0]
            if kind not in (PTX, CUBIN) or entry_header < 48 or entry + entry_header + payload > end:
                raise ValueError(f"no fatbin entry at offset {entry} of .nv_fatbin")
            suffix = "a" if flags & ARCHITECTURE_SPECIFIC else "f" if flags & FAMILY_SPECIFIC else ""
            found["ptx" if kind == PTX else "sm", f"{number}{suffix}"] += 1
            entry += entry_header + payload
        position = (end + 7) & ~7
    return found


def read_library(image: bytes) -> Library:
    """Read an ELF shared library."""
    elf = ELFFile(io.BytesIO(image))
    library = Library()
    for section in elf.iter_sections():
        if isinstance(section, DynamicSection):
            for tag in section.iter_tags():
                # elftools names the string after the tag: .needed, .rpath, .runpath
                if tag.entry.d_tag == "DT_NEEDED":
                    library.needed.append(getattr(tag, "needed"))  # noqa: B009
                elif tag.entry.d_tag in ("DT_RPATH", "DT_RUNPATH"):
                    library.run_paths.append(getattr(tag, tag.entry.d_tag.removeprefix("DT_").lower()))
        elif isinstance(section, GNUVerNeedSection):
            for _, names in section.iter_versions():
                for name in names:
                    family, _, number = name.name.partition("_")
                    library.versions.setdefault(family, set()).add(number)
    table, versions = elf.get_section_by_name(".dynsym"), elf.get_section_by_name(".gnu.version")
    if not isinstance(table, SymbolTableSection) or not isinstance(versions, GNUVerSymSection):
        raise ValueError("the library has no dynamic symbols, or none with versions")
    for index, symbol in enumerate(table.iter_symbols()):
        if not symbol.name:
            continue
        bind = symbol["st_info"]["bind"]
        if symbol["st_shndx"] == "SHN_UNDEF":
            version = versions.get_symbol(index)["ndx"]
            if isinstance(version, str):  # VER_NDX_LOCAL or VER_NDX_GLOBAL: bound to no version of no library
                library.undefined[symbol.name] = bind
        elif bind != "STB_LOCAL" and symbol["st_other"]["visibility"] == "STV_DEFAULT":
            library.exported.append(symbol.name)
    fatbin = elf.get_section_by_name(".nv_fatbin")
    if fatbin is not None:
        library.gpu_code = gpu_code(fatbin.data())
    return library


def torch_functions(include: Path) -> tuple[set[str], set[str]]:
    """The C functions that headers of a torch version declare: (in every build of torch, in CUDA builds alone)."""
    shims = include / "torch/csrc/inductor/aoti_torch"
    everywhere: set[str] = set()
    cuda: set[str] = set()
    for header in sorted(
        [*shims.glob("c/*.h"), *shims.glob("generated/*.h"), *include.glob("torch/csrc/stable/c/*.h")]
    ):
        text = re.sub(r"//[^\n]*|/\*.*?\*/", "", header.read_text(encoding="utf-8", errors="replace"), flags=re.DOTALL)
        names = set(re.findall(r"\b((?:aoti_)?torch_\w+)\s*\(", text))
        device = re.search(r"_(cuda|xpu|mps)\.h$", header.name) is not None
        for name in names:
            (cuda if device or "_cuda_" in name else everywhere).add(name)
    if "aoti_torch_call_dispatcher" not in everywhere or len(everywhere) < 100:
        raise SystemExit(f"{include} does not hold the headers of torch's stable ABI.")
    return everywhere, cuda - everywhere


def check_library(
    library: Library, everywhere: Iterable[str], cuda_only: Iterable[str], info: Mapping[str, object]
) -> list[str]:
    """What is wrong with a library, given torch's functions and its _build_info.json."""
    problems = []
    for name in library.needed:
        if name not in TORCH_LIBRARIES and not SYSTEM_LIBRARIES.match(name):
            problems.append(f"needs {name}, which no dependency of the wheel brings")
    if "libtorch.so" not in library.needed:
        problems.append("does not need libtorch.so, so that loading it before torch fails")
    problems += [f"has the run path {path}" for path in library.run_paths]
    for family, numbers in sorted(library.versions.items()):
        limit = LIMITS.get(family)
        for number in sorted(numbers):
            version = tuple(int(part) for part in number.split(".")) if re.fullmatch(r"[\d.]+", number) else None
            if limit is None or version is None or version > limit:
                allowed = ".".join(map(str, limit)) if limit else "no version"
                problems.append(f"needs {family}_{number}; {allowed} is the newest allowed")
    known, cuda_known = set(everywhere), set(cuda_only)
    for name, bind in sorted(library.undefined.items()):
        if name in LOADER_SYMBOLS or name in known or (name in cuda_known and bind == "STB_WEAK"):
            continue
        if re.match(r"_?Py[A-Z_]", name):
            reason = "of CPython, which ties the wheel to one Python"
        elif name in cuda_known:
            reason = "that a CPU build of torch lacks (look it up at run time, or make it weak)"
        elif re.match(r"cu(da)?[A-Z]", name):
            reason = "of CUDA (link the runtime statically; the driver is found at run time)"
        else:
            reason = "that the oldest torch does not have"
        problems.append(f"needs the symbol {name} {reason}")
    clashes = [name for name in library.exported if re.match(r"_*cu(da|DNN|blas)?[A-Z]|__cuda", name)]
    problems += [f"exports {name} of the CUDA runtime" for name in sorted(clashes)]
    problems += check_gpu_code(library.gpu_code, info)
    return problems


def expected_gpu_code(info: Mapping[str, object]) -> Counter[tuple[str, str]]:
    """What _build_info.json says the library holds: one entry per kernel file and architecture of its name."""
    found: Counter[tuple[str, str]] = Counter()
    architectures = [name.replace(".", "") for name in _strings(info.get("architectures"))]
    ptx = [name.replace(".", "") for name in _strings(info.get("ptx"))]
    for stem in _strings(info.get("fingerprints")):
        match = re.match(r"sm(\d+)([af]?)_", stem)

        def fits(code: str, match: re.Match[str] | None = match) -> bool:
            if match is None:
                return True
            return code == match[1] + match[2] if match[2] else int(code.rstrip("af")) >= int(match[1])

        own = [code for code in architectures if fits(code)]
        if match is not None and not own:
            own = [match[1] + match[2]]  # compiled for its own architecture, so that the library links
        found.update(("sm", code) for code in own)
        found.update(("ptx", code) for code in ptx if fits(code))
    return found


def check_gpu_code(present: Counter[tuple[str, str]], info: Mapping[str, object]) -> list[str]:
    """Whether the GPU code is exactly what the record names."""
    expected = expected_gpu_code(info)
    problems = []
    if not expected:
        problems.append("_build_info.json names no kernel or no architecture")
    for kind, code in sorted(expected.keys() | present.keys()):
        want, have = expected[kind, code], present[kind, code]
        if want != have:
            problems.append(f"has GPU code {kind}_{code} for {have} kernel files; _build_info.json makes it {want}")
    return problems


def _strings(value: object) -> list[str]:
    return [str(item) for item in value] if isinstance(value, (list, dict)) else []


def check_wheel(path: Path, headers: Path | None, must_have_library: bool) -> list[str]:
    """What is wrong with a wheel."""
    problems: list[str] = []
    name, version, *tag = path.name.removesuffix(".whl").split("-")
    distribution = name.replace("_", "-")
    with zipfile.ZipFile(path) as archive:
        files = {member: archive.read(member) for member in archive.namelist() if not member.endswith("/")}
    meta = f"{name}-{version}.dist-info/"
    inside = {
        member.removeprefix(f"{name}/"): content for member, content in files.items() if member.startswith(f"{name}/")
    }
    for member in sorted(files):
        if member.startswith(meta):
            continue
        shipped = member.removeprefix(f"{name}/")
        if distribution == "dandan-ops-core":  # its build helper is a package named build
            shipped = re.sub(r"^build/(?=\w+\.py$)", "", shipped)
        foreign = not member.startswith(f"{name}/") or not WHEEL_FILES.match(shipped)
        if foreign or re.search(r"(^|/)(tests?|benchmarks?|docs|csrc|build)/", shipped):
            problems.append(f"holds {member}, which is no file to ship")
    for needed in ("__init__.py", "py.typed"):
        if needed not in inside:
            problems.append(f"lacks {name}/{needed}")
    if distribution == "dandan-ops-core" and not any(
        re.match(r"include/dandan/ptx/.+\.cuh$", member) for member in inside
    ):
        problems.append("lacks the headers in include/dandan, which every CUDA package is built with")
    if not any(member.startswith(f"{meta}licenses/LICENSE") for member in files):
        problems.append("lacks the licence")

    metadata = Parser().parsestr(files.get(f"{meta}METADATA", b"").decode())
    if metadata["Requires-Python"] != ">=3.10":
        problems.append(f"has Requires-Python {metadata['Requires-Python']!r}, not '>=3.10'")
    for requirement in metadata.get_all("Requires-Dist") or []:
        named = requirement.partition(";")[0]  # behind it: the marker, such as extra == "checkpoints"
        if "==" in named or named.lower().startswith("nvidia"):
            problems.append(f"requires {requirement!r}; no exact versions and no nvidia packages")
    tags = re.findall(r"^Tag: (\S+)$", files.get(f"{meta}WHEEL", b"").decode(), re.MULTILINE)
    if tags != ["-".join(tag)]:
        problems.append(f"is named {'-'.join(tag)} but its WHEEL file says {tags}")
    if tag[:2] != ["py3", "none"]:
        problems.append(f"has the tag {'-'.join(tag)}; py3-none-<platform> is promised")

    libraries = [member for member in inside if re.match(r"^(lib\w+\.so|\w+\.dll)$", member)]
    if bool(libraries) != (tag[-1] != "any"):
        problems.append(f"is tagged {tag[-1]} but holds {libraries or 'no library'}")
    if must_have_library and not libraries:
        problems.append("has no CUDA library")
    if "_build_info.json" in inside:
        info = json.loads(inside["_build_info.json"])
        wanted = {"package": distribution, "version": version, "library": libraries[0] if libraries else None}
        for key, value in wanted.items():
            if info.get(key) != value:
                problems.append(f"_build_info.json has {key} {info.get(key)!r}, not {value!r}")
        if bool(info.get("reason")) == bool(libraries):
            problems.append(
                f"_build_info.json has the reason {info.get('reason')!r} beside {libraries or 'no library'}"
            )
        if must_have_library:
            missing = [name for name in RELEASE_ARCHITECTURES if name not in _strings(info.get("architectures"))]
            problems += [f"has no machine code for {name}" for name in missing]
        for member in libraries:
            if member.endswith(".dll"):
                print(f"{path.name}: {member} is no ELF file; only its presence was checked")
                continue
            if headers is None:
                problems.append("has a library, but --torch-headers was not given to check its symbols")
                continue
            library = read_library(inside[member])
            print(f"{path.name}: {describe(library)}")
            problems += [f"{member} {problem}" for problem in check_library(library, *torch_functions(headers), info)]
        problems += check_tables(inside, distribution, info)
    elif libraries or must_have_library:
        problems.append("has no _build_info.json")
    return problems


def check_tables(inside: Mapping[str, bytes], distribution: str, info: Mapping[str, object]) -> list[str]:
    """What is wrong with the route tables: rows for other kernels would be ignored at the user's, with a warning."""
    problems = []
    recorded = info.get("fingerprints")
    fingerprints = {str(stem): str(text) for stem, text in recorded.items()} if isinstance(recorded, dict) else {}
    for member, content in sorted(inside.items()):
        if not member.startswith("profiles/"):
            continue
        try:
            table = parse_table(json.loads(content))
        except ValueError as error:
            problems.append(f"{member} is no route table: {error}")
            continue
        if table.package != distribution:
            problems.append(f"{member} is a table of {table.package}")
        stale = [row for row in table.rows if route_fingerprint(fingerprints, row.kernel) != row.kernel_fingerprint]
        if stale:
            problems.append(
                f"{member} has {len(stale)} of {len(table.rows)} rows for other kernels than the wheel's, the first "
                f"for {stale[0].kernel}; calibrate again or take them out"
            )
    return problems


def describe(library: Library) -> str:
    code = ", ".join(f"{kind}_{arch} x{count}" for (kind, arch), count in sorted(library.gpu_code.items()))
    return (
        f"needs {' '.join(library.needed)}; {len(library.undefined)} symbols of torch and the loader; GPU code {code}"
    )


def check_sdist(path: Path) -> list[str]:
    """What is wrong with an sdist."""
    problems: list[str] = []
    root = path.name.removesuffix(".tar.gz") + "/"
    with tarfile.open(path) as archive:
        members = [member.name for member in archive.getmembers() if member.isfile()]
    names = [member.removeprefix(root) for member in members]
    core = root.startswith("dandan_ops_core-")
    for name in names:
        shipped = name.replace("src/dandan_ops_core/build/", "src/dandan_ops_core/", 1) if core else name
        known = SDIST_FILES.match(name) or name.startswith(SDIST_FOLDERS)
        if not known or NOT_SHIPPED.search(shipped):
            problems.append(f"holds {name}, which is no file to ship")
    problems += [
        f"lacks {name}" for name in ("pyproject.toml", "README.md", "CHANGELOG.md", "LICENSE") if name not in names
    ]
    if core and not any(re.match(r"src/dandan_ops_core/include/dandan/ptx/.+\.cuh$", name) for name in names):
        problems.append("lacks the headers in include/dandan, which every CUDA package is built with")
    if "setup.py" in names:
        for kind, pattern in (
            ("bindings.cpp", r"csrc/bindings\.cpp"),
            (".cu", r"csrc/.+\.cu"),
            (".cuh", r"csrc/.+\.cuh"),
        ):
            if not any(re.fullmatch(pattern, name) for name in names):
                problems.append(f"lacks the {kind} files of csrc")
    return problems


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", type=Path, nargs="+")
    parser.add_argument(
        "--torch-headers", type=Path, help="include folder of the oldest torch that must know every symbol"
    )
    parser.add_argument(
        "--platform-wheel",
        action="store_true",
        help="a wheel without its CUDA library, or without an architecture of a release, fails",
    )
    arguments = parser.parse_args()
    bad = 0
    for path in arguments.files:
        if path.name.endswith(".whl"):
            problems = check_wheel(path, arguments.torch_headers, arguments.platform_wheel)
        elif path.name.endswith(".tar.gz"):
            problems = check_sdist(path)
        else:
            problems = ["is neither a wheel nor an sdist"]
        for problem in problems:
            print(f"error: {path.name} {problem}")
        print(f"{path.name}: {f'{len(problems)} problems' if problems else 'good'}")
        bad += len(problems)
    raise SystemExit(1 if bad else 0)


if __name__ == "__main__":
    main()

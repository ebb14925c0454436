"""The build plan: which commands make the library. Pure functions of their arguments, for Linux and Windows alike."""

from __future__ import annotations

import ntpath
import posixpath
import shlex
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from .arch import ArchList, file_archs, gencode_flags
from .errors import BuildError
from .toolkit import Toolkit, Torch

TORCH_TARGET = "2.9"
TORCH_TARGET_MACRO = "0x0209000000000000"
_BYTES_PER_JOB = 3 << 30  # one nvcc on templates of this project stays below it


@dataclass(frozen=True)
class BuildInputs:
    """Everything that the plan depends on. Paths are strings of the target system."""

    system: str  # "Linux" or "Windows"
    name: str  # import name
    package_dir: str  # what paths in messages are relative to
    csrc: str
    sources: tuple[str, ...]  # file names in csrc
    include_root: str  # the folder that holds dandan/
    build_dir: str
    toolkit: Toolkit
    torch: Torch
    archs: ArchList
    cxx: str
    driver_lib: str | None = None


@dataclass(frozen=True)
class Step:
    """One command. `deps` is how ninja learns of headers: gcc (a depfile), msvc (/showIncludes) or none."""

    kind: str  # cuda, cxx, stub or link
    command: tuple[str, ...]
    inputs: tuple[str, ...]
    output: str
    depfile: str | None = None
    deps: str | None = None
    implicit: tuple[str, ...] = ()


@dataclass(frozen=True)
class BuildPlan:
    """The commands that make a library, where it will be, and the files to write before they run."""

    steps: tuple[Step, ...]
    library: str
    config_path: str
    config_text: str
    ninja_text: str


def library_name(name: str, system: str) -> str:
    """File name of a package's compiled library."""
    return f"{name}.dll" if system == "Windows" else f"lib{name}.so"


def config_header(archs: ArchList) -> str:
    """The header that every source of a package is compiled with: which architectures the library has code for.

    A forced include rather than -D: nvcc splits the values of its -D at commas.
    """
    sass = ",".join(arch.code for arch in archs.sass)
    ptx = ",".join(arch.code for arch in archs.ptx)
    return f'#pragma once\n#define DANDAN_SASS_ARCHS "{sass}"\n#define DANDAN_PTX_ARCHS "{ptx}"\n'


def make_plan(inputs: BuildInputs) -> BuildPlan:
    """Plan the build of one library. Raises BuildError where the inputs cannot make one."""
    if inputs.system not in ("Linux", "Windows"):
        raise BuildError(f"CUDA parts can be built on Linux and Windows, not on {inputs.system}.")
    if "bindings.cpp" not in inputs.sources:
        raise BuildError(f"{inputs.csrc} has no bindings.cpp.")
    windows = inputs.system == "Windows"
    join = ntpath.join if windows else posixpath.join
    config = join(inputs.build_dir, "dandan_build_config.h")
    library = join(inputs.build_dir, library_name(inputs.name, inputs.system))

    steps: list[Step] = []
    for source in sorted(inputs.sources):
        stem, extension = source.rsplit(".", 1)
        path = join(inputs.csrc, source)
        output = join(inputs.build_dir, f"{stem}.{extension}.{'obj' if windows else 'o'}")
        if extension == "cu":
            steps.append(_cuda_step(inputs, stem, path, output, config))
        elif extension == "cpp":
            steps.append(_cxx_step(inputs, path, output, config))
        else:
            raise BuildError(f"{path} is neither .cpp nor .cu.")
    objects = tuple(step.output for step in steps)
    if windows:
        steps.append(_windows_link(inputs, objects, library))
    else:
        stubs, library_dir = _torch_libraries(inputs)
        steps += stubs
        steps.append(_linux_link(inputs, objects, library, library_dir, tuple(stub.output for stub in stubs)))
    ninja = ninja_file(steps, library, inputs.system)
    return BuildPlan(tuple(steps), library, config, config_header(inputs.archs), ninja)


def _cuda_step(inputs: BuildInputs, stem: str, path: str, output: str, config: str) -> Step:
    windows = inputs.system == "Windows"
    sass, ptx = file_archs(stem, inputs.archs)
    if windows:
        host = ["-Xcompiler", "/MD,/EHsc,/Zc:preprocessor,/utf-8"]
    else:
        host = ["-Xcompiler", "-fPIC,-fvisibility=hidden", "-Xcompiler", f"-ffile-prefix-map={inputs.package_dir}=."]
        if inputs.cxx:
            host = ["-ccbin", inputs.cxx, *host]
    command = [
        inputs.toolkit.nvcc,
        "-c",
        path,
        "-o",
        output,
        "-std=c++20",
        "-O3",
        "--threads",
        "1",
        *host,
        *gencode_flags(sass, ptx),
        "-DUSE_CUDA",
        "-include",
        config,
        f"-I{inputs.include_root}",
        "-MD",
        "-MF",
        f"{output}.d",
    ]
    return Step("cuda", tuple(command), (path,), output, f"{output}.d", "gcc")


def _cxx_step(inputs: BuildInputs, path: str, output: str, config: str) -> Step:
    defines = ("USE_CUDA", f"TORCH_TARGET_VERSION={TORCH_TARGET_MACRO}")
    if inputs.system == "Windows":
        command = [inputs.cxx, "/nologo", "/c", path, f"/Fo{output}", "/std:c++20", "/O2", "/MD", "/EHsc"]
        command += ["/Zc:preprocessor", "/Zc:__cplusplus", "/utf-8", "/showIncludes"]
        command += [f"/D{define}" for define in (*defines, "NOMINMAX", "WIN32_LEAN_AND_MEAN")]
        command += [f"/FI{config}"]
        command += [f"/I{folder}" for folder in (inputs.include_root, inputs.torch.include, inputs.toolkit.include)]
        return Step("cxx", tuple(command), (path,), output, None, "msvc")
    command = [inputs.cxx, "-c", path, "-o", output, "-std=c++20", "-O2", "-fPIC", "-fvisibility=hidden"]
    command += [f"-ffile-prefix-map={inputs.package_dir}=.", f"-ffile-prefix-map={inputs.torch.include}=torch"]
    command += [f"-D{define}" for define in defines]
    command += ["-include", config, f"-I{inputs.include_root}"]
    command += ["-isystem", inputs.torch.include, "-isystem", inputs.toolkit.include, "-MD", "-MF", f"{output}.d"]
    return Step("cxx", tuple(command), (path,), output, f"{output}.d", "gcc")


def _torch_libraries(inputs: BuildInputs) -> tuple[list[Step], str]:
    """The folder to link torch from; with headers alone, steps that make empty stand-ins with the right names."""
    if inputs.torch.library is not None:
        return [], inputs.torch.library
    folder = posixpath.join(inputs.build_dir, "stubs")
    steps = []
    for name in ("libtorch.so", "libtorch_cpu.so"):
        output = posixpath.join(folder, name)
        command = (inputs.cxx, "-shared", "-nostdlib", f"-Wl,-soname,{name}", "-o", output, "-x", "c", "/dev/null")
        steps.append(Step("stub", command, (), output))
    return steps, folder


def _linux_link(
    inputs: BuildInputs, objects: Sequence[str], library: str, library_dir: str, stubs: tuple[str, ...]
) -> Step:
    command = [inputs.cxx, "-shared", "-o", library, *objects]
    command += ["-Wl,--exclude-libs,ALL", "-Wl,-s", "-Wl,-z,relro,-z,now"]
    # libstdc++ comes first: torch's libraries export instances of its templates, and a symbol that the linker found
    # there would be asked of every later torch. Then libtorch, kept although nothing names it: it brings the others.
    command += ["-lstdc++", f"-L{library_dir}", "-Wl,--no-as-needed", "-ltorch", "-Wl,--as-needed", "-ltorch_cpu"]
    if not stubs:
        # With the real libraries at hand a symbol that torch does not have is an error here, not at the user's.
        command += ["-Wl,-z,defs"]
    command += [f"{inputs.toolkit.library}/libcudart_static.a", "-ldl", "-lrt", "-lpthread"]
    return Step("link", tuple(command), tuple(objects), library, implicit=stubs)


def _windows_link(inputs: BuildInputs, objects: Sequence[str], library: str) -> Step:
    if inputs.torch.library is None:
        raise BuildError("On Windows linking needs torch's import libraries; install torch or set DANDAN_TORCH_LIB.")
    torch = inputs.torch.library
    command = ["link.exe", "/NOLOGO", "/DLL", f"/OUT:{library}", *objects]
    command += [ntpath.join(torch, name) for name in ("torch.lib", "torch_cpu.lib", "c10.lib")]
    command += [ntpath.join(inputs.toolkit.library, "cudart_static.lib")]
    if inputs.driver_lib:
        command += [inputs.driver_lib]
    return Step("link", tuple(command), tuple(objects), library)


def _ninja_path(path: str) -> str:
    return path.replace("$", "$$").replace(":", "$:").replace(" ", "$ ")


def ninja_file(steps: Sequence[Step], default: str, system: str) -> str:
    """The ninja file of these steps. Each names its own command, so a change of flags rebuilds what it concerns."""
    quote = subprocess.list2cmdline if system == "Windows" else shlex.join
    lines = ["# Written by dandan_ops_core.build; every build writes it anew.", "ninja_required_version = 1.10", ""]
    for number, step in enumerate(steps):
        command = quote(list(step.command)).replace("$", "$$")
        short = step.output.replace("\\", "/").rsplit("/", 1)[1]
        lines += [f"rule step{number}", f"  command = {command}", f"  description = {step.kind} {short}"]
        if step.deps:
            lines.append(f"  deps = {step.deps}")
        if step.depfile:
            lines.append(f"  depfile = {_ninja_path(step.depfile)}")
        inputs = "".join(f" {_ninja_path(path)}" for path in step.inputs)
        implicit = "".join(f" {_ninja_path(path)}" for path in step.implicit)
        after = f" |{implicit}" if implicit else ""
        lines += [f"build {_ninja_path(step.output)}: step{number}{inputs}{after}", ""]
    lines += [f"default {_ninja_path(default)}", ""]
    return "\n".join(lines)


def choose_jobs(environ: Mapping[str, str], cpus: int, free_bytes: int | None) -> int:
    """How many compilers run at once: MAX_JOBS, else the CPUs, bounded by free memory.

    Raises BuildError for a MAX_JOBS that is no positive number.
    """
    text = environ.get("MAX_JOBS", "").strip()
    if text:
        if not text.isdecimal() or int(text) < 1:
            raise BuildError(f"MAX_JOBS is {text!r}; it must be a whole number from 1 up.")
        return int(text)
    if free_bytes is None:
        return max(1, cpus)
    return max(1, min(cpus, free_bytes // _BYTES_PER_JOB))

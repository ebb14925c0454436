"""The build plan on Linux and Windows, its ninja file run with stand-in compilers, and the variables that steer it."""

from __future__ import annotations

import dataclasses
import platform
import subprocess
import sys
from pathlib import Path

import pytest

from dandan_ops_core.build.arch import DEFAULT_PTX, DEFAULT_SASS, ArchList
from dandan_ops_core.build.errors import BuildError
from dandan_ops_core.build.library import find_ninja
from dandan_ops_core.build.plan import (
    BuildInputs,
    BuildPlan,
    Step,
    choose_jobs,
    config_header,
    library_name,
    make_plan,
    ninja_file,
)
from dandan_ops_core.build.toolkit import Toolkit, Torch

DEFAULT = ArchList(DEFAULT_SASS, DEFAULT_PTX, "the default list")
LINUX = BuildInputs(
    system="Linux",
    name="dandan_norm",
    package_dir="/src/norm",
    csrc="/src/norm/csrc",
    sources=("bindings.cpp", "sm80_row.cu", "sm90_cluster.cu", "sm90a_x.cu"),
    include_root="/core/include",
    build_dir="/src/norm/build/cuda",
    toolkit=Toolkit("/cuda", "/cuda/bin/nvcc", (13, 0), "/cuda/include", "/cuda/lib64", "test"),
    torch=Torch("/torch/include", "/torch/lib", "2.13.0"),
    archs=DEFAULT,
    cxx="/usr/bin/g++",
)
WINDOWS = dataclasses.replace(
    LINUX,
    system="Windows",
    package_dir=r"C:\norm",
    csrc=r"C:\norm\csrc",
    include_root=r"C:\core\include",
    build_dir=r"C:\norm\build dir",
    toolkit=Toolkit(r"C:\cuda", r"C:\cuda\bin\nvcc.exe", (13, 0), r"C:\cuda\include", r"C:\cuda\lib\x64", "test"),
    torch=Torch(r"C:\torch\include", r"C:\torch\lib", "2.13.0"),
    cxx="cl.exe",
)


def step(plan: BuildPlan, ending: str) -> Step:
    (found,) = [step for step in plan.steps if step.output.endswith(ending)]
    return found


def codes(step: Step) -> list[str]:
    return [word.rsplit("code=", 1)[1] for word in step.command if word.startswith("-gencode")]


@pytest.mark.parametrize("inputs", [LINUX, WINDOWS], ids=["linux", "windows"])
def test_each_file_gets_its_architectures(inputs: BuildInputs) -> None:
    plan = make_plan(inputs)
    suffix = "obj" if inputs.system == "Windows" else "o"
    everywhere = ["sm_80", "sm_86", "sm_89", "sm_90a", "sm_120", "compute_90"]
    assert codes(step(plan, f"sm80_row.cu.{suffix}")) == everywhere
    assert codes(step(plan, f"sm90_cluster.cu.{suffix}")) == ["sm_90a", "sm_120", "compute_90"]
    assert codes(step(plan, f"sm90a_x.cu.{suffix}")) == ["sm_90a"]


@pytest.mark.parametrize("inputs", [LINUX, WINDOWS], ids=["linux", "windows"])
def test_nvcc_never_sees_torch(inputs: BuildInputs) -> None:
    for found in make_plan(inputs).steps:
        if found.kind == "cuda":
            assert not [word for word in found.command if "torch" in word.lower()]


def test_linux_binding() -> None:
    command = step(make_plan(LINUX), "bindings.cpp.o").command
    assert command[0] == "/usr/bin/g++"
    for word in (
        "-std=c++20",
        "-O2",
        "-fPIC",
        "-fvisibility=hidden",
        "-DUSE_CUDA",
        "-DTORCH_TARGET_VERSION=0x0209000000000000",
        "-I/core/include",
    ):
        assert word in command
    assert "/torch/include" in command
    assert "/cuda/include" in command


def test_linux_link() -> None:
    plan = make_plan(LINUX)
    command = step(plan, "libdandan_norm.so").command
    assert plan.library == "/src/norm/build/cuda/libdandan_norm.so"
    text = " ".join(command)
    assert "-Wl,--no-as-needed -ltorch -Wl,--as-needed" in text
    assert command.index("-lstdc++") < command.index("-ltorch")
    assert "/cuda/lib64/libcudart_static.a" in command
    assert "-Wl,--exclude-libs,ALL" in command
    assert "-Wl,-z,defs" in command
    for word in ("rpath", "-lcuda", "-lcudart", "python"):
        assert word not in text.replace("libcudart_static.a", "")


def test_headers_alone_are_linked_against_stand_ins() -> None:
    inputs = dataclasses.replace(LINUX, torch=Torch("/headers", None, "2.9.1"))
    plan = make_plan(inputs)
    stubs = [found for found in plan.steps if found.kind == "stub"]
    assert [found.output.rsplit("/", 1)[1] for found in stubs] == ["libtorch.so", "libtorch_cpu.so"]
    link = step(plan, "libdandan_norm.so")
    assert link.implicit == tuple(found.output for found in stubs)
    assert "-Wl,-z,defs" not in link.command
    with pytest.raises(BuildError, match="On Windows linking needs torch's import libraries"):
        make_plan(dataclasses.replace(WINDOWS, torch=Torch(r"C:\headers", None, "2.9.1")))


def test_windows_plan() -> None:
    plan = make_plan(WINDOWS)
    assert plan.library == r"C:\norm\build dir\dandan_norm.dll"
    binding = step(plan, "bindings.cpp.obj")
    assert binding.command[0] == "cl.exe"
    assert binding.deps == "msvc"
    for word in ("/std:c++20", "/MD", "/DUSE_CUDA", "/DTORCH_TARGET_VERSION=0x0209000000000000", r"/IC:\torch\include"):
        assert word in binding.command
    link = step(plan, "dandan_norm.dll").command
    assert link[:3] == ("link.exe", "/NOLOGO", "/DLL")
    assert r"C:\torch\lib\torch_cpu.lib" in link
    assert r"C:\cuda\lib\x64\cudart_static.lib" in link
    assert not [word for word in link if word.endswith((r"\cuda.lib", "python3.lib"))]
    assert not [word for found in plan.steps for word in found.command if "fPIC" in word or "visibility" in word]


def test_windows_driver_library_is_honoured() -> None:
    link = step(make_plan(dataclasses.replace(WINDOWS, driver_lib=r"D:\cuda.lib")), "dandan_norm.dll").command
    assert link[-1] == r"D:\cuda.lib"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"system": "Darwin"}, "not on Darwin"),
        ({"sources": ("sm80_row.cu",)}, "has no bindings.cpp"),
        ({"sources": ("bindings.cpp", "a.cc")}, "neither .cpp nor .cu"),
    ],
)
def test_bad_inputs(change: dict[str, object], message: str) -> None:
    with pytest.raises(BuildError, match=message):
        make_plan(dataclasses.replace(LINUX, **change))  # type: ignore[arg-type]


def test_config_header() -> None:
    text = config_header(DEFAULT)
    assert '#define DANDAN_SASS_ARCHS "80,86,89,90a,120"' in text
    assert '#define DANDAN_PTX_ARCHS "90"' in text


def test_library_name() -> None:
    assert library_name("dandan_norm", "Linux") == "libdandan_norm.so"
    assert library_name("dandan_norm", "Windows") == "dandan_norm.dll"


def test_ninja_escapes_paths() -> None:
    text = ninja_file([Step("cxx", ("c$c", "a b"), (r"C:\a b",), r"C:\o$ut")], r"C:\o$ut", "Windows")
    assert "build C$:\\o$$ut: step0 C$:\\a$ b" in text
    assert 'command = c$$c "a b"' in text


COMPILER = """#!{python}
import pathlib, re, sys
arguments = sys.argv[1:]
output = arguments[arguments.index("-o") + 1]
with open({log!r}, "a") as log:
    log.write(pathlib.Path(output).name + "\\n")
if "-MF" in arguments:
    source = pathlib.Path(arguments[arguments.index("-c") + 1])
    needs = [source, *(source.parent / name for name in re.findall(r'#include "(.+)"', source.read_text()))]
    config = arguments[arguments.index("-include") + 1]
    line = output + ": " + " ".join(str(path).replace(" ", "\\\\ ") for path in [*needs, config])
    pathlib.Path(arguments[arguments.index("-MF") + 1]).write_text(line + "\\n")
pathlib.Path(output).write_text("made")
"""


@pytest.mark.skipif(platform.system() != "Linux", reason="the stand-in compiler is a script with a #! line")
def test_touching_one_kernel_compiles_that_kernel_alone(tmp_path: Path) -> None:
    root = tmp_path / "with space"
    csrc = root / "csrc"
    csrc.mkdir(parents=True)
    for name in ("params.h", "row.cuh"):
        (csrc / name).write_text("")
    (csrc / "bindings.cpp").write_text('#include "params.h"\n')
    (csrc / "sm80_row.cu").write_text('#include "row.cuh"\n#include "params.h"\n')
    (csrc / "sm80_stream.cu").write_text('#include "params.h"\n')
    log, compiler = root / "log", root / "compiler"
    compiler.write_text(COMPILER.format(python=sys.executable, log=str(log)))
    compiler.chmod(0o755)
    build_dir = root / "build"
    build_dir.mkdir()
    inputs = dataclasses.replace(
        LINUX,
        package_dir=str(root),
        csrc=str(csrc),
        sources=("bindings.cpp", "sm80_row.cu", "sm80_stream.cu"),
        build_dir=str(build_dir),
        toolkit=dataclasses.replace(LINUX.toolkit, nvcc=str(compiler)),
        cxx=str(compiler),
    )

    def run(inputs: BuildInputs) -> set[str]:
        plan = make_plan(inputs)
        config = Path(plan.config_path)
        if not config.exists() or config.read_text() != plan.config_text:
            config.write_text(plan.config_text)
        (build_dir / "build.ninja").write_text(plan.ninja_text)
        log.write_text("")
        subprocess.run([find_ninja(), "-C", str(build_dir), "--quiet"], check=True)
        return set(log.read_text().split())

    def touch(name: str) -> None:
        path = csrc / name
        path.write_text(path.read_text() + "\n")

    library = "libdandan_norm.so"
    everything = {"bindings.cpp.o", "sm80_row.cu.o", "sm80_stream.cu.o", library}
    assert run(inputs) == everything
    assert run(inputs) == set()
    touch("sm80_row.cu")
    assert run(inputs) == {"sm80_row.cu.o", library}
    touch("row.cuh")
    assert run(inputs) == {"sm80_row.cu.o", library}
    touch("bindings.cpp")
    assert run(inputs) == {"bindings.cpp.o", library}
    touch("params.h")
    assert run(inputs) == everything
    fewer = dataclasses.replace(inputs, archs=ArchList(DEFAULT_SASS[:1], (), "test"))
    assert run(fewer) == everything  # other architectures, other code


@pytest.mark.parametrize(
    ("environ", "cpus", "gib", "jobs"),
    [
        ({}, 16, 128, 16),
        ({}, 16, 7, 2),  # bounded by memory
        ({}, 16, 1, 1),
        ({}, 2, None, 2),
        ({"MAX_JOBS": "5"}, 2, 1, 5),  # an order
        ({"MAX_JOBS": " 1 "}, 16, 128, 1),
        ({"MAX_JOBS": ""}, 4, 128, 4),
    ],
)
def test_jobs(environ: dict[str, str], cpus: int, gib: int | None, jobs: int) -> None:
    assert choose_jobs(environ, cpus, None if gib is None else gib << 30) == jobs


@pytest.mark.parametrize("value", ["0", "-1", "two", "1.5"])
def test_bad_jobs(value: str) -> None:
    with pytest.raises(BuildError, match="MAX_JOBS is .*; it must be a whole number from 1 up"):
        choose_jobs({"MAX_JOBS": value}, 4, None)

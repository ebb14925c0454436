"""Whole builds of a tiny package: pure wheels; platform wheels with g++ and a stand-in toolkit."""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

needs_compiler = pytest.mark.skipif(
    platform.system() != "Linux" or not shutil.which("g++"), reason="needs g++ on Linux for the stand-in toolkit"
)

PYPROJECT = """
[build-system]
requires = ["setuptools>=77"]
build-backend = "dandan_ops_core.build.backend"

[project]
name = "dandan-tiny"
version = "0.3.0"

[tool.setuptools]
include-package-data = false

[tool.setuptools.packages.find]
where = ["src"]

[tool.setuptools.package-data]
dandan_tiny = ["py.typed", "profiles/*.json"]
"""
FILES = {
    "pyproject.toml": PYPROJECT,
    "setup.py": 'from dandan_ops_core.build import cuda_package\n\ncuda_package(name="dandan_tiny")\n',
    "MANIFEST.in": "graft csrc\ngraft src\nprune tests\nglobal-exclude *.so _build_info.json\n",
    "src/dandan_tiny/__init__.py": "",
    "src/dandan_tiny/py.typed": "",
    "src/dandan_tiny/profiles/a.json": "{}",
    "csrc/bindings.cpp": '#include "tiny.h"\nextern "C" const char* archs() { return DANDAN_SASS_ARCHS; }\n',
    "csrc/tiny.h": "#pragma once\n",
    "csrc/sm80_row.cuh": "#pragma once\n",
    "csrc/sm80_row.cu": '#include "sm80_row.cuh"\nint row() { return 1; }\n',
    "tests/test_tiny.py": "",
}
# Answers --version, else compiles with g++, keeping the words that g++ knows.
NVCC = """#!{python}
import subprocess, sys
if "--version" in sys.argv:
    print("Cuda compilation tools, release 13.0, V13.0.88")
    sys.exit()
words = sys.argv[1:]
value = lambda word: words[words.index(word) + 1]
command = ["g++", "-fPIC", "-x", "c++", "-c", value("-c"), "-o", value("-o"), "-include", value("-include")]
sys.exit(subprocess.run([*command, "-MD", "-MF", value("-MF")]).returncode)
"""


@pytest.fixture
def package(tmp_path: Path) -> Path:
    root = tmp_path / "package"
    for name, text in FILES.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


@pytest.fixture
def cuda(tmp_path: Path) -> dict[str, str]:
    """Variables that make a CUDA build with a stand-in toolkit and headers."""
    home, include = tmp_path / "cuda", tmp_path / "torch"
    for folder in (home / "bin", home / "include", home / "lib64", include / "torch/csrc/stable"):
        folder.mkdir(parents=True)
    nvcc = home / "bin/nvcc"
    nvcc.write_text(NVCC.format(python=sys.executable))
    nvcc.chmod(0o755)
    (home / "include/cuda_runtime.h").write_text("")
    (include / "torch/csrc/stable/library.h").write_text("")
    subprocess.run(["ar", "rcs", str(home / "lib64/libcudart_static.a")], check=True)
    return {
        "DANDAN_BUILD_CUDA": "1",
        "DANDAN_CUDA_HOME": str(home),
        "DANDAN_TORCH_INCLUDE": str(include),
        "TORCH_CUDA_ARCH_LIST": "8.0;9.0a;9.0+PTX",
    }


def run(package: Path, code: str, environ: dict[str, str]) -> subprocess.CompletedProcess[str]:
    """Run the build backend as pip does, in a process of its own."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("DANDAN_", "TORCH_CUDA"))}
    return subprocess.run(
        [sys.executable, "-c", f"from dandan_ops_core.build import backend; {code}"],
        cwd=package,
        env={**kept, **environ},
        capture_output=True,
        text=True,
        check=False,
    )


def build_wheel(package: Path, environ: dict[str, str]) -> Path:
    dist = package / "dist"
    shutil.rmtree(dist, ignore_errors=True)
    done = run(package, f"backend.build_wheel({str(dist)!r})", environ)
    assert done.returncode == 0, done.stdout + done.stderr
    (wheel,) = dist.glob("*.whl")
    return wheel


def contents(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return {name for name in archive.namelist() if not name.startswith("dandan_tiny-")}


def record(wheel: Path) -> dict[str, object]:
    with zipfile.ZipFile(wheel) as archive:
        found: dict[str, object] = json.loads(archive.read("dandan_tiny/_build_info.json"))
    return found


PURE = {
    "dandan_tiny/__init__.py",
    "dandan_tiny/py.typed",
    "dandan_tiny/profiles/a.json",
    "dandan_tiny/_build_info.json",
}
LIBRARY = "dandan_tiny/libdandan_tiny.so"


def test_a_wheel_without_cuda(package: Path) -> None:
    wheel = build_wheel(package, {"DANDAN_BUILD_CUDA": "0"})
    assert wheel.name == "dandan_tiny-0.3.0-py3-none-any.whl"
    assert contents(wheel) == PURE
    info = record(wheel)
    assert info["library"] is None
    assert info["reason"] == "DANDAN_BUILD_CUDA=0"
    assert info["toolkit"] is None
    assert info["driver_floor"] is None
    assert info["architectures"] == []
    assert list(info["fingerprints"]) == ["sm80_row"]  # type: ignore[call-overload]


def test_an_old_library_in_the_sources_is_not_shipped(package: Path) -> None:
    for name in ("libdandan_tiny.so", "_build_info.json"):
        (package / "src/dandan_tiny" / name).write_text("old")
    wheel = build_wheel(package, {"DANDAN_BUILD_CUDA": "0"})
    assert contents(wheel) == PURE
    assert record(wheel)["library"] is None
    assert (package / "src/dandan_tiny/libdandan_tiny.so").read_text() == "old"  # and is left alone


@needs_compiler
def test_a_platform_wheel(package: Path, cuda: dict[str, str]) -> None:
    wheel = build_wheel(package, cuda)
    assert wheel.name.startswith("dandan_tiny-0.3.0-py3-none-manylinux_2_")
    assert wheel.name.endswith(f"_{platform.machine()}.whl")
    assert contents(wheel) == PURE | {LIBRARY}
    with zipfile.ZipFile(wheel) as archive:
        assert b"Root-Is-Purelib: false" in archive.read("dandan_tiny-0.3.0.dist-info/WHEEL")
        image = archive.read(LIBRARY)
    assert b"80,90,90a" in image  # what the sources see as DANDAN_SASS_ARCHS
    assert str(package).encode() not in image
    info = record(wheel)
    assert info == {
        "schema": 1,
        "package": "dandan-tiny",
        "version": "0.3.0",
        "plugin_api": info["plugin_api"],
        "library": "libdandan_tiny.so",
        "reason": None,
        "toolkit": "13.0",
        "driver_floor": 13000,
        "architectures": ["8.0", "9.0", "9.0a"],
        "ptx": ["9.0"],
        "torch_target": "2.9",
        "torch_headers": "unknown",
        "commit": "unknown",
        "fingerprints": info["fingerprints"],
    }


@needs_compiler
def test_a_pure_wheel_after_a_platform_wheel(package: Path, cuda: dict[str, str]) -> None:
    build_wheel(package, cuda)
    wheel = build_wheel(package, {"DANDAN_BUILD_CUDA": "0"})
    assert wheel.name.endswith("-py3-none-any.whl")
    assert contents(wheel) == PURE


@needs_compiler
def test_an_editable_install_has_the_library_beside_the_sources(package: Path, cuda: dict[str, str]) -> None:
    source = package / "src/dandan_tiny"
    for environ, present in ((cuda, True), ({"DANDAN_BUILD_CUDA": "0"}, False)):
        done = run(package, f"backend.build_editable({str(package / 'dist')!r})", environ)
        assert done.returncode == 0, done.stdout + done.stderr
        assert (source / "libdandan_tiny.so").is_file() is present
        info = json.loads((source / "_build_info.json").read_text())
        assert bool(info["library"]) is present


@needs_compiler
def test_in_place_build_and_reuse(package: Path, cuda: dict[str, str]) -> None:
    folder = package.rename(package.with_name("dandan-tiny"))
    main = "from dandan_ops_core.build.__main__ import main; import sys; sys.argv[1:] = "
    library = folder / "src/dandan_tiny/libdandan_tiny.so"
    # Without a toolkit there is nothing to reuse yet. The stand-in is the only one that these variables can find.
    gone = {"CUDA_HOME": str(folder / "none")}
    reuse = (
        f"import dandan_ops_core.build.__main__ as m; m.find_toolkit = lambda e: 'no toolkit'; {main}['--reuse', '.']"
    )
    done = run(folder, f"{reuse}; main()", gone)
    assert done.returncode != 0
    assert "has no compiled library" in done.stderr
    done = run(folder, f"{main}['.']; main()", cuda)
    assert done.returncode == 0, done.stderr
    assert library.is_file()
    assert run(folder, f"{reuse}; main()", gone).returncode == 0
    (folder / "csrc/sm80_row.cuh").write_text("#pragma once\nint more();\n")
    done = run(folder, f"{reuse}; main()", gone)
    assert done.returncode != 0
    assert "was built from other kernels than this tree's" in done.stderr


@needs_compiler
def test_a_compile_error_is_an_error(package: Path, cuda: dict[str, str]) -> None:
    (package / "csrc/sm80_row.cu").write_text("int row( {\n")
    done = run(package, f"backend.build_wheel({str(package / 'dist')!r})", cuda)
    assert done.returncode != 0
    assert "error: dandan-tiny: the CUDA build failed" in done.stderr
    assert "Traceback" not in done.stderr
    assert not list(package.glob("dist/*.whl"))


def test_bad_variables_are_a_sentence(package: Path) -> None:
    for code in ("backend.get_requires_for_build_wheel()", "backend.build_wheel('dist')"):
        done = run(package, code, {"DANDAN_BUILD_CUDA": "maybe"})
        assert done.returncode != 0
        assert "error: DANDAN_BUILD_CUDA is 'maybe'; it must be auto, 1 or 0." in done.stderr
        assert "Traceback" not in done.stderr


def test_an_old_setuptools_is_a_sentence(package: Path) -> None:
    code = "import sys; sys.modules['setuptools.command.bdist_wheel'] = None; backend.build_wheel('dist')"
    done = run(package, code, {"DANDAN_BUILD_CUDA": "0"})
    assert done.returncode != 0
    assert "error: building needs setuptools 77 or newer" in done.stderr
    assert "Traceback" not in done.stderr


def test_requirements_without_cuda_are_none(package: Path) -> None:
    done = run(package, "print(backend.get_requires_for_build_wheel())", {"DANDAN_BUILD_CUDA": "0"})
    assert done.stdout.strip().splitlines()[-1] == "[]"


def test_the_sdist(package: Path) -> None:
    git = ["git", "-c", "user.name=t", "-c", "user.email=t@example.com"]
    for words in (["init", "-q"], ["add", "."], ["commit", "-q", "-m", "one"]):
        subprocess.run([*git, *words], cwd=package, check=True)
    head = subprocess.run([*git, "rev-parse", "HEAD"], cwd=package, check=True, capture_output=True, text=True).stdout
    (package / "src/dandan_tiny/libdandan_tiny.so").write_text("old")
    (package / ".git/info/exclude").write_text("*.so\ndist\nbuild\n*.egg-info\n")
    # An sdist needs no compiler: that CUDA is ordered must not matter.
    done = run(package, "backend.build_sdist('dist')", {"DANDAN_BUILD_CUDA": "1", "DANDAN_CUDA_HOME": "/nowhere"})
    assert done.returncode == 0, done.stdout + done.stderr
    with tarfile.open(package / "dist/dandan_tiny-0.3.0.tar.gz") as archive:
        names = {name.split("/", 1)[1] for name in archive.getnames() if "/" in name}
        archive.extractall(package.parent / "unpacked", filter="data")
    for name in ("csrc/bindings.cpp", "csrc/tiny.h", "csrc/sm80_row.cuh", "csrc/sm80_row.cu", "COMMIT", "setup.py"):
        assert name in names
    assert not [name for name in names if name.startswith("tests") or name.endswith(".so")]
    wheel = build_wheel(package.parent / "unpacked/dandan_tiny-0.3.0", {"DANDAN_BUILD_CUDA": "0"})
    assert record(wheel)["commit"] == head.strip()

"""check_wheel on made-up wheels, libraries and sdists: a good one passes, each fault is found."""

from __future__ import annotations

import dataclasses
import io
import json
import platform
import shutil
import struct
import subprocess
import tarfile
import zipfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

TORCH = {"aoti_torch_call_dispatcher", "aoti_torch_get_data_ptr"}
TORCH_CUDA = {"aoti_torch_get_current_cuda_stream"}
INFO = {
    "package": "dandan-norm",
    "version": "0.1.0",
    "library": "libdandan_norm.so",
    "reason": None,
    "architectures": ["8.0", "9.0a", "12.0"],
    "ptx": ["9.0"],
    "fingerprints": {"sm80_row": "1", "sm90a_x": "2", "sm90_cluster": "3"},
}
CODE = {("sm", "80"): 1, ("sm", "90a"): 3, ("sm", "120"): 2, ("ptx", "90"): 2}


def good_library(tool: Callable[[str], ModuleType]) -> object:
    return tool("check_wheel").Library(
        needed=["libstdc++.so.6", "libtorch.so", "libtorch_cpu.so", "libc.so.6", "ld-linux-x86-64.so.2"],
        versions={"GLIBC": {"2.2.5", "2.34"}, "GLIBCXX": {"3.4", "3.4.29"}, "CXXABI": {"1.3"}, "GCC": {"3.0"}},
        undefined={
            "aoti_torch_call_dispatcher": "STB_GLOBAL",
            "aoti_torch_get_current_cuda_stream": "STB_WEAK",
            "__gmon_start__": "STB_WEAK",
        },
        exported=["_ZNSt6vectorIiE3fooEv"],
        gpu_code=Counter(CODE),
    )


def test_a_good_library(tool: Callable[[str], ModuleType]) -> None:
    assert tool("check_wheel").check_library(good_library(tool), TORCH, TORCH_CUDA, INFO) == []


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"needed": ["libtorch.so", "libcudart.so.13"]}, "needs libcudart.so.13"),
        ({"needed": ["libtorch.so", "libcuda.so.1"]}, "needs libcuda.so.1"),
        ({"needed": ["libtorch.so", "libpython3.11.so.1.0"]}, "needs libpython3.11.so.1.0"),
        ({"needed": ["libtorch.so", "libtorch_cuda.so"]}, "needs libtorch_cuda.so"),
        ({"needed": ["libtorch.so", "libc10.so"]}, "needs libc10.so"),
        ({"needed": ["libc.so.6"]}, "does not need libtorch.so"),
        ({"run_paths": ["/home/me/torch/lib"]}, "has the run path /home/me/torch/lib"),
        ({"versions": {"GLIBC": {"2.38"}}}, "needs GLIBC_2.38; 2.34 is the newest allowed"),
        ({"versions": {"GLIBCXX": {"3.4.30"}}}, "needs GLIBCXX_3.4.30"),
        ({"versions": {"GLIBC": {"PRIVATE"}}}, "needs GLIBC_PRIVATE"),
        ({"versions": {"GOMP": {"1.0"}}}, "needs GOMP_1.0; no version is the newest allowed"),
        ({"undefined": {"PyLong_FromLong": "STB_GLOBAL"}}, "PyLong_FromLong of CPython"),
        ({"undefined": {"_Py_Dealloc": "STB_GLOBAL"}}, "_Py_Dealloc of CPython"),
        ({"undefined": {"cuLaunchKernel": "STB_GLOBAL"}}, "cuLaunchKernel of CUDA"),
        ({"undefined": {"cudaMalloc": "STB_GLOBAL"}}, "cudaMalloc of CUDA"),
        ({"undefined": {"torch_new_in_2_12": "STB_GLOBAL"}}, "torch_new_in_2_12 that the oldest torch does not have"),
        ({"undefined": {"_ZN2at4mulEv": "STB_GLOBAL"}}, "_ZN2at4mulEv that the oldest torch does not have"),
        ({"undefined": {"aoti_torch_get_current_cuda_stream": "STB_GLOBAL"}}, "that a CPU build of torch lacks"),
        ({"exported": ["cudaGetDeviceCount"]}, "exports cudaGetDeviceCount"),
        ({"exported": ["__cudaRegisterFatBinary"]}, "exports __cudaRegisterFatBinary"),
        (
            {"gpu_code": Counter({**CODE, ("sm", "90a"): 2})},
            "GPU code sm_90a for 2 kernel files; _build_info.json makes it 3",
        ),
        (
            {"gpu_code": Counter({**CODE, ("sm", "75"): 1})},
            "GPU code sm_75 for 1 kernel files; _build_info.json makes it 0",
        ),
        ({"gpu_code": Counter()}, "GPU code ptx_90 for 0 kernel files"),
    ],
)
def test_each_fault_of_a_library(tool: Callable[[str], ModuleType], change: dict[str, object], problem: str) -> None:
    library = dataclasses.replace(good_library(tool), **change)  # type: ignore[type-var]
    found = tool("check_wheel").check_library(library, TORCH, TORCH_CUDA, INFO)
    assert any(problem in text for text in found), found


def test_a_record_without_kernels_does_not_pass(tool: Callable[[str], ModuleType]) -> None:
    found = tool("check_wheel").check_gpu_code(Counter(), {**INFO, "fingerprints": {}})
    assert found == ["_build_info.json names no kernel or no architecture"]


def test_a_file_outside_the_list_counts_for_its_own_architecture(tool: Callable[[str], ModuleType]) -> None:
    expected = tool("check_wheel").expected_gpu_code({**INFO, "architectures": ["8.0"], "ptx": []})
    assert expected == Counter({("sm", "80"): 1, ("sm", "90a"): 1, ("sm", "90"): 1})


def container(*entries: tuple[int, int, int]) -> bytes:
    """A fatbin container of entries (kind, architecture, flags), each with some payload."""
    body = b""
    for kind, arch, flags in entries:
        header = bytearray(64)
        payload = bytes(range(24))
        struct.pack_into("<HHIQ", header, 0, kind, 0x101, 64, len(payload))
        struct.pack_into("<I", header, 28, arch)
        struct.pack_into("<Q", header, 40, flags)
        body += bytes(header) + payload
    return struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(body)) + body


def test_gpu_code_of_a_section(tool: Callable[[str], ModuleType]) -> None:
    section = container((2, 80, 0x11), (2, 90, 0x100011), (1, 90, 0x8011)) + bytes(8) + container((2, 120, 0x200011))
    found = tool("check_wheel").gpu_code(section)
    assert found == Counter({("sm", "80"): 1, ("sm", "90a"): 1, ("ptx", "90"): 1, ("sm", "120f"): 1})


@pytest.mark.parametrize("section", [b"\x01" * 32, container((2, 80, 0))[:-8], container((7, 80, 0))])
def test_a_broken_section_is_an_error(tool: Callable[[str], ModuleType], section: bytes) -> None:
    with pytest.raises(ValueError, match="no fatbin"):
        tool("check_wheel").gpu_code(section)


@pytest.mark.skipif(platform.system() != "Linux" or not shutil.which("gcc"), reason="needs gcc on Linux")
def test_reading_a_real_library(tool: Callable[[str], ModuleType], tmp_path: Path) -> None:
    source, library = tmp_path / "a.c", tmp_path / "liba.so"
    section = container((2, 90, 0x100011))
    words = ",".join(map(str, section))
    source.write_text(
        "#include <math.h>\nextern int PyLong_Check(void); extern int weak_one(void) __attribute__((weak));\n"
        f'const unsigned char fatbin[] __attribute__((section(".nv_fatbin"), used)) = {{{words}}};\n'
        "double f(double x) { return sin(x) + PyLong_Check() + weak_one(); }\n"
        '__attribute__((visibility("hidden"))) int hidden(void) { return 1; }\n'
    )
    subprocess.run(
        ["gcc", "-shared", "-fPIC", "-o", str(library), str(source), "-lm", "-Wl,-rpath,/somewhere"], check=True
    )
    found = tool("check_wheel").read_library(library.read_bytes())
    assert found.needed == ["libm.so.6", "libc.so.6"] or found.needed == ["libm.so.6"]
    assert found.run_paths == ["/somewhere"]
    assert found.undefined["PyLong_Check"] == "STB_GLOBAL"
    assert found.undefined["weak_one"] == "STB_WEAK"
    assert "sin" not in found.undefined  # it has a version, and so an owner
    assert "2.2.5" in found.versions["GLIBC"] or found.versions["GLIBC"]
    assert "f" in found.exported
    assert "hidden" not in found.exported
    assert found.gpu_code == Counter({("sm", "90a"): 1})


def test_functions_of_torch_headers(tool: Callable[[str], ModuleType], tmp_path: Path) -> None:
    shims = tmp_path / "torch/csrc/inductor/aoti_torch"
    (shims / "c").mkdir(parents=True)
    (shims / "generated").mkdir()
    many = "\n".join(f"AOTI_TORCH_EXPORT int aoti_torch_f{number}(int a);" for number in range(120))
    text = (
        "int aoti_torch_call_dispatcher(\n  int x);\n// aoti_torch_gone(int);\nint aoti_torch_get_cuda_now_stream(int);"
    )
    (shims / "c/shim.h").write_text(f"{many}\n{text}")
    (shims / "generated/c_shim_cuda.h").write_text("AOTIE aoti_torch_cuda_mm(int);")
    everywhere, cuda = tool("check_wheel").torch_functions(tmp_path)
    assert "aoti_torch_call_dispatcher" in everywhere
    assert "aoti_torch_gone" not in everywhere
    assert cuda == {"aoti_torch_cuda_mm", "aoti_torch_get_cuda_now_stream"}
    (shims / "c/shim.h").write_text("")
    with pytest.raises(SystemExit, match="does not hold the headers"):
        tool("check_wheel").torch_functions(tmp_path)


PURE = "dandan_norm-0.1.0-py3-none-any.whl"
META = "dandan_norm-0.1.0.dist-info"
METADATA = (
    "Metadata-Version: 2.4\nName: dandan-norm\nVersion: 0.1.0\nRequires-Python: >=3.10\n"
    "Requires-Dist: torch>=2.9\nRequires-Dist: dandan-ops-core<0.2,>=0.1\n"
)
TABLE = {
    "schema": 1,
    "package": "dandan-norm",
    "device": "NVIDIA H200",
    "torch": "2.11.0",
    "cuda": "13.0",
    "rows": [
        {
            "op": "rms_norm",
            "dtype": "float16",
            "shape": {"cols": 4096},
            "kernel": "sm80_row.r8.4",
            "kernel_fingerprint": "1",
            "ratio": 1.1,
            "record": "h200-calibration.json",
        }
    ],
}
NO_LIBRARY = {**INFO, "library": None, "reason": "DANDAN_BUILD_CUDA=0", "architectures": [], "ptx": []}
WHEEL = {
    "dandan_norm/__init__.py": "",
    "dandan_norm/py.typed": "",
    "dandan_norm/sub/ops.py": "",
    "dandan_norm/profiles/h200.json": json.dumps(TABLE),
    "dandan_norm/_build_info.json": json.dumps(NO_LIBRARY),
    f"{META}/METADATA": METADATA,
    f"{META}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    f"{META}/RECORD": "",
    f"{META}/licenses/LICENSE": "MIT",
}


def write_wheel(path: Path, files: dict[str, str]) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        for name, text in files.items():
            archive.writestr(name, text)
    return path


def test_a_good_wheel(tool: Callable[[str], ModuleType], tmp_path: Path) -> None:
    wheel = write_wheel(tmp_path / PURE, WHEEL)
    assert tool("check_wheel").check_wheel(wheel, None, False) == []
    extra = 'Provides-Extra: checkpoints\nRequires-Dist: safetensors>=0.4; extra == "checkpoints"\n'
    wheel = write_wheel(tmp_path / PURE, {**WHEEL, f"{META}/METADATA": METADATA + extra})
    assert tool("check_wheel").check_wheel(wheel, None, False) == []
    found = tool("check_wheel").check_wheel(wheel, None, True)
    assert found[0] == "has no CUDA library"
    assert found[1:] == [f"has no machine code for {name}" for name in ("8.0", "8.6", "8.9", "9.0a", "12.0")]


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"dandan_norm/tests/test_a.py": ""}, "holds dandan_norm/tests/test_a.py"),
        ({"dandan_norm/benchmarks/bench.py": ""}, "holds dandan_norm/benchmarks/bench.py"),
        ({"dandan_norm/csrc/a.cu": ""}, "holds dandan_norm/csrc/a.cu"),
        ({"dandan_norm/build/a.py": ""}, "holds dandan_norm/build/a.py"),
        ({"tests/test_a.py": ""}, "holds tests/test_a.py"),
        ({"dandan_norm/__pycache__/a.cpython-311.pyc": ""}, "which is no file to ship"),
        ({"dandan_norm/py.typed": None}, "lacks dandan_norm/py.typed"),
        ({"dandan_norm/__init__.py": None}, "lacks dandan_norm/__init__.py"),
        ({f"{META}/licenses/LICENSE": None}, "lacks the licence"),
        ({f"{META}/METADATA": METADATA.replace(">=3.10", ">=3.11")}, "has Requires-Python '>=3.11'"),
        ({f"{META}/METADATA": METADATA.replace("torch>=2.9", "torch==2.13.0")}, "requires 'torch==2.13.0'"),
        ({f"{META}/METADATA": METADATA + "Requires-Dist: nvidia-cublas\n"}, "requires 'nvidia-cublas'"),
        ({f"{META}/METADATA": METADATA + "Requires-Dist: a==1; extra == 'b'\n"}, "requires \"a==1; extra == 'b'\""),
        ({f"{META}/WHEEL": "Tag: cp311-cp311-linux_x86_64\n"}, "but its WHEEL file says"),
        ({"dandan_norm/libdandan_norm.so": "x"}, "is tagged any but holds"),
        ({"dandan_norm/_build_info.json": json.dumps({**NO_LIBRARY, "version": "0.2.0"})}, "has version '0.2.0'"),
        ({"dandan_norm/_build_info.json": json.dumps({**NO_LIBRARY, "library": "x"})}, "has library 'x'"),
        ({"dandan_norm/_build_info.json": json.dumps({**NO_LIBRARY, "reason": None})}, "has the reason None"),
        ({"dandan_norm/profiles/h200.json": "{"}, "profiles/h200.json is no route table: "),
        (
            {"dandan_norm/profiles/h200.json": "{}"},
            "profiles/h200.json is no route table: schema: wanted 1, found None",
        ),
        (
            {"dandan_norm/profiles/h200.json": json.dumps({**TABLE, "package": "dandan-gemm"})},
            "is a table of dandan-gemm",
        ),
        (
            {"dandan_norm/_build_info.json": json.dumps({**NO_LIBRARY, "fingerprints": {"sm80_row": "9"}})},
            "profiles/h200.json has 1 of 1 rows for other kernels than the wheel's, the first for sm80_row.r8.4",
        ),
    ],
)
def test_each_fault_of_a_wheel(
    tool: Callable[[str], ModuleType], tmp_path: Path, change: dict[str, str | None], problem: str
) -> None:
    files = {name: text for name, text in {**WHEEL, **change}.items() if text is not None}
    found = tool("check_wheel").check_wheel(write_wheel(tmp_path / PURE, files), None, False)
    assert any(problem in text for text in found), found


def test_a_wheel_for_one_python_is_found(tool: Callable[[str], ModuleType], tmp_path: Path) -> None:
    wheel = write_wheel(tmp_path / PURE.replace("py3-none-any", "cp311-cp311-linux_x86_64"), WHEEL)
    found = tool("check_wheel").check_wheel(wheel, None, False)
    assert any("py3-none-<platform> is promised" in text for text in found), found
    assert any("is tagged linux_x86_64 but holds no library" in text for text in found), found


SDIST = ("PKG-INFO", "pyproject.toml", "setup.py", "MANIFEST.in", "README.md", "CHANGELOG.md", "LICENSE", "COMMIT")
SOURCES = ("csrc/bindings.cpp", "csrc/sm80_row.cu", "csrc/sm80_row.cuh", "csrc/norm.h", "src/dandan_norm/__init__.py")


def write_sdist(folder: Path, names: list[str], package: str = "dandan_norm") -> Path:
    path = folder / f"{package}-0.1.0.tar.gz"
    with tarfile.open(path, "w:gz") as archive:
        for name in names:
            archive.addfile(tarfile.TarInfo(f"{package}-0.1.0/{name}"), io.BytesIO())
    return path


def test_a_good_sdist(tool: Callable[[str], ModuleType], tmp_path: Path) -> None:
    assert tool("check_wheel").check_sdist(write_sdist(tmp_path, [*SDIST, *SOURCES])) == []


@pytest.mark.parametrize(
    "name",
    [
        "tests/test_norm.py",
        "benchmarks/bench_norm.py",
        "docs/index.md",
        "src/dandan_norm/tests/test_a.py",
        "src/dandan_norm/libdandan_norm.so",
        "src/dandan_norm/_build_info.json",
        "build/cuda/a.o",
        "csrc/a.o",
        "notes.txt",
    ],
)
def test_what_an_sdist_must_not_hold(tool: Callable[[str], ModuleType], tmp_path: Path, name: str) -> None:
    found = tool("check_wheel").check_sdist(write_sdist(tmp_path, [*SDIST, *SOURCES, name]))
    assert found == [f"holds {name}, which is no file to ship"]


@pytest.mark.parametrize(
    ("gone", "problem"),
    [
        ("csrc/sm80_row.cuh", "lacks the .cuh files of csrc"),
        ("csrc/sm80_row.cu", "lacks the .cu files of csrc"),
        ("csrc/bindings.cpp", "lacks the bindings.cpp files of csrc"),
        ("CHANGELOG.md", "lacks CHANGELOG.md"),
        ("LICENSE", "lacks LICENSE"),
    ],
)
def test_what_an_sdist_must_hold(tool: Callable[[str], ModuleType], tmp_path: Path, gone: str, problem: str) -> None:
    names = [name for name in (*SDIST, *SOURCES) if name != gone]
    assert tool("check_wheel").check_sdist(write_sdist(tmp_path, names)) == [problem]


def test_the_build_helper_of_core_is_no_build_folder(tool: Callable[[str], ModuleType], tmp_path: Path) -> None:
    names = [name for name in SDIST if name != "setup.py"]
    names += ["src/dandan_ops_core/build/plan.py", "src/dandan_ops_core/include/dandan/ptx/pdl.cuh"]
    check_sdist = tool("check_wheel").check_sdist
    assert check_sdist(write_sdist(tmp_path, names, "dandan_ops_core")) == []
    assert "lacks the headers" in check_sdist(write_sdist(tmp_path, names[:-1], "dandan_ops_core"))[0]


@pytest.mark.parametrize("headers", [True, False])
def test_the_headers_of_core(tool: Callable[[str], ModuleType], tmp_path: Path, headers: bool) -> None:
    names = {name.replace("dandan_norm", "dandan_ops_core"): text for name, text in WHEEL.items()}
    del names["dandan_ops_core/_build_info.json"], names["dandan_ops_core/profiles/h200.json"]
    names["dandan_ops_core/build/plan.py"] = ""
    if headers:
        names["dandan_ops_core/include/dandan/ptx/pdl.cuh"] = ""
    wheel = write_wheel(tmp_path / PURE.replace("dandan_norm", "dandan_ops_core"), names)
    found = tool("check_wheel").check_wheel(wheel, None, False)
    assert bool(found) is not headers
    assert headers or "lacks the headers in include/dandan" in found[0]

"""Importing a package, each time in a process of its own: before torch, without a GPU, and what it must not do."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

MODULES = ("dandan_ops_core", "dandan_norm", "dandan_gemm", "dandan_w4a16", "dandan_attention", "dandan_ops")
# A call of an operator on `x`, [2, 8] of threes, whose result is all ones; and the question about it.
CALLS = {
    "dandan_norm": ("package.rms_norm(x)", "package.elementwise_execution_info('rms_norm', x)"),
    "dandan_gemm": ("package.gemm(x.half(), w.half())", "package.gemm_execution_info(x.half(), w.half())"),
    "dandan_w4a16": (
        "package.QuantizedLinear.from_float(w.half().repeat(1, 4) / 4, 32)(x.half().repeat(1, 4))",
        "package.QuantizedLinear.from_float(w.half().repeat(1, 4), 32).execution_info(x.half().repeat(1, 4))",
    ),
    "dandan_attention": (
        "package.flash_attention(*[x.half().view(1, 1, 2, 8) / 3] * 3).view(2, 8)",
        "package.flash_attention_execution_info(*[x.half().view(1, 1, 2, 8)] * 3)",
    ),
    "dandan_ops": ("package.rms_norm(x)", "package.gemm_execution_info(x.half(), w.half())"),
}
OPERATORS = tuple(CALLS)


def operands(device: str = "cpu") -> str:
    """x, and a weight with which its product is all ones."""
    return f"x = torch.full((2, 8), 3.0, device={device!r}); w = torch.full((8, 8), 1 / 24, device={device!r})"


# What a program that only wants to run an operator should not pay for.
HEAVY = (
    "triton",
    "pytest",
    "hypothesis",
    "setuptools",
    "torch._inductor",
    "torch.testing",
    "torch.utils.benchmark",
    "dandan_ops.demo",
    "dandan_ops.cli",
    "dandan_ops_core.benchmark",
    "dandan_ops_core.build",
    "dandan_ops_core.collect_env",
    "dandan_ops_core.testing",
)


def run(script: str, **variables: str) -> str:
    done = subprocess.run(
        [sys.executable, "-B", "-c", script],
        capture_output=True, text=True, check=False, timeout=300, env={**os.environ, **variables},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("name", OPERATORS)
@pytest.mark.parametrize("devices", [None, "", "-1"])
def test_works_before_torch_and_without_a_gpu(name: str, devices: str | None) -> None:
    script = (
        f"import sys, {name} as package\n"
        "import torch\n"
        f"{operands()}\n"
        f"found = {CALLS[name][0]}.float()\n"
        "assert torch.allclose(found, torch.ones(2, 8), atol=1e-3), found\n"
        "assert not torch.cuda.is_initialized()\n"
        "print('done')\n"
    )
    variables = {} if devices is None else {"CUDA_VISIBLE_DEVICES": devices}
    assert run(script, **variables) == "done\n"


@pytest.mark.parametrize("name", MODULES)
def test_imports_nothing_heavy(name: str) -> None:
    script = (
        "import sys, torch\n"
        "before = set(sys.modules)\n"
        f"import {name}\n"
        f"print([each for each in {HEAVY!r} if each in sys.modules and each not in before])\n"
    )
    assert run(script) == "[]\n"


def test_core_alone_imports_no_torch() -> None:
    assert run("import sys, dandan_ops_core; print('torch' in sys.modules)") == "False\n"


AUDIT = """
import sys
seen = []
FORBIDDEN = ("socket.", "subprocess.", "os.system", "os.exec", "os.posix_spawn", "os.fork", "urllib.")
def hook(event, arguments):
    if not armed:
        return
    if event.startswith(FORBIDDEN):
        seen.append((event, repr(arguments)[:200]))
    elif event == "open" and isinstance(arguments[2], int) and arguments[2] & 0x3 and arguments[0] != "/dev/null":
        seen.append(("write", repr(arguments[0])))
armed = False
sys.addaudithook(hook)
"""


@pytest.mark.parametrize("name", MODULES)
def test_no_network_no_process_no_file_written(name: str) -> None:
    script = f"{AUDIT}import torch\narmed = True\nimport {name}\narmed = False\nprint(seen)"
    assert run(script) == "[]\n"


@pytest.mark.parametrize("act", ["import socket; socket.create_connection(('127.0.0.1', 9), 0.1)", "open(path, 'w')"])
def test_the_watch_sees_what_it_looks_for(act: str, tmp_path: Path) -> None:
    path = str(tmp_path / "written")
    attempt = f"path = {path!r}\narmed = True\ntry:\n    {act}\nexcept OSError:\n    pass\narmed = False\n"
    script = f"{AUDIT}{attempt}print(len(seen) > 0)"
    assert run(script) == "True\n"


# A driver that writes down every call but the one for its version.
DRIVER = """
#include <cstdio>
#include <cstdlib>
static int note(const char* name) {
  if (std::FILE* file = std::fopen(std::getenv("DRIVER_CALLS"), "a")) {
    std::fprintf(file, "%s\\n", name);
    std::fclose(file);
  }
  return 100;  // no device
}
extern "C" {
int cuDriverGetVersion(int* version) { *version = 13000; return 0; }
int cuInit(unsigned) { return note("cuInit"); }
int cuGetProcAddress(const char* symbol, void** found, int, unsigned long long) {
  *found = nullptr;
  return note(symbol);
}
int cuGetProcAddress_v2(const char* symbol, void** found, int, unsigned long long, void*) {
  *found = nullptr;
  return note(symbol);
}
int cuDeviceGetCount(int* count) { *count = 0; return note("cuDeviceGetCount"); }
int cuCtxCreate_v2(void**, unsigned, int) { return note("cuCtxCreate"); }
int cuDevicePrimaryCtxRetain(void**, int) { return note("cuDevicePrimaryCtxRetain"); }
}
"""


@pytest.mark.skipif(
    sys.platform != "linux" or shutil.which("g++") is None, reason="a driver of our own is built with g++ on Linux"
)
@pytest.mark.parametrize("name", OPERATORS)
def test_the_driver_is_asked_for_its_version_alone(name: str, tmp_path: Path) -> None:
    """A53: torch.cuda.is_initialized() being False says little, so the driver itself writes down who called.

    The operators of the CPU may be called as well; the compiled library, where there is one, is loaded by then.
    """
    source, calls = tmp_path / "driver.cpp", tmp_path / "calls"
    source.write_text(DRIVER)
    command = ["g++", "-shared", "-fPIC", "-o", str(tmp_path / "libcuda.so.1"), str(source)]
    subprocess.run(command, check=True, capture_output=True)
    path = os.pathsep.join([str(tmp_path), os.environ.get("LD_LIBRARY_PATH", "")]).rstrip(os.pathsep)
    variables = {"LD_LIBRARY_PATH": path, "DRIVER_CALLS": str(calls)}
    script = (
        f"import {name} as package, torch\n"
        "from dandan_ops_core import device\n"
        "assert device.driver_version() == 13000, device.probe_driver()\n"
        f"{operands()}\n"
        f"{CALLS[name][0]}\n"
        f"{CALLS[name][1]}\n"
    )
    run(script, **variables)
    assert not calls.exists(), calls.read_text()
    run("import ctypes; ctypes.CDLL('libcuda.so.1').cuInit(0)", **variables)
    assert calls.read_text() == "cuInit\n"  # so the file would have told


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system cannot fork")
@pytest.mark.parametrize("place", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("name", OPERATORS)
def test_a_child_that_forks_after_the_import_runs_operators(name: str, place: str) -> None:
    """A53: a context in the parent would break every CUDA call of the child."""
    script = (
        f"import os, {name} as package, torch\n"
        "pid = os.fork()\n"
        "if pid == 0:\n"
        f"    {operands(place)}\n"
        f"    right = torch.allclose({CALLS[name][0]}.float().cpu(), torch.ones(2, 8), atol=1e-3)\n"
        "    os._exit(0 if right else 1)\n"
        "print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))\n"
    )
    assert run(script) == "0\n"


def test_every_package_has_its_types() -> None:
    for name in MODULES:
        script = f"import pathlib, {name}; print((pathlib.Path({name}.__file__).parent / 'py.typed').is_file())"
        assert run(script) == "True\n", name

"""What device.py finds out, with drivers of our own making, and what it must not do on the way."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dandan_ops_core import device


def fake_library(**functions: Callable[..., int]) -> Callable[[str], SimpleNamespace]:
    return lambda name: SimpleNamespace(**functions)


def no_library(name: str) -> None:
    raise OSError(f"{name}: cannot open shared object file")


def answers(version: int, status: int = 0) -> Callable[[Any], int]:
    def ask(pointer: Any) -> int:
        pointer._obj.value = version
        return status

    return ask


def test_driver_version_is_asked_without_cuinit(monkeypatch: pytest.MonkeyPatch) -> None:
    # The fake has nothing but cuDriverGetVersion: any other call, cuInit above all, would raise.
    monkeypatch.setattr(device.ctypes, "CDLL", fake_library(cuDriverGetVersion=answers(13000)))
    assert device.driver_version() == 13000
    assert device.probe_driver() == device.Probe(13000, None)


@pytest.mark.parametrize(
    ("library", "reason"),
    [
        (no_library, "no CUDA driver: .* cannot be loaded"),
        (fake_library(), "has no cuDriverGetVersion"),
        (fake_library(cuDriverGetVersion=answers(0, 3)), "cuDriverGetVersion failed with status 3"),
        (fake_library(cuDriverGetVersion=answers(0)), "is a stub"),
    ],
)
def test_absent_driver_has_a_reason(monkeypatch: pytest.MonkeyPatch, library: Any, reason: str) -> None:
    monkeypatch.setattr(device.ctypes, "CDLL", library)
    assert device.driver_version() is None
    with pytest.raises(AssertionError, match=reason):
        raise AssertionError(device.probe_driver().reason)


@pytest.mark.parametrize(("platform", "name"), [("linux", "libcuda.so.1"), ("win32", "nvcuda.dll")])
def test_driver_library_of_each_system(monkeypatch: pytest.MonkeyPatch, platform: str, name: str) -> None:
    monkeypatch.setattr(device.sys, "platform", platform)
    asked: list[str] = []

    def record(library: str) -> None:
        asked.append(library)
        raise OSError("absent")

    monkeypatch.setattr(device.ctypes, "CDLL", record)
    device.probe_driver()
    assert asked == [name]


PROC = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.159.04  Release Build\nGCC version: gcc 12.2.0\n"


def test_driver_name_comes_from_the_kernel_module(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = tmp_path / "version"
    path.write_text(PROC)
    monkeypatch.setattr(device, "_PROC_VERSION", path)
    monkeypatch.setattr(device.ctypes, "CDLL", no_library)
    assert device.driver_name() == "580.159.04"


def nvml(version: bytes, init: int = 0, ask: int = 0, closed: list[int] | None = None) -> Callable[[str], Any]:
    def get(buffer: Any, size: int) -> int:
        buffer.value = version
        return ask

    def shutdown() -> int:
        if closed is not None:
            closed.append(1)
        return 0

    return fake_library(nvmlInit_v2=lambda: init, nvmlSystemGetDriverVersion=get, nvmlShutdown=shutdown)


def test_driver_name_falls_back_to_nvml(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    closed: list[int] = []
    monkeypatch.setattr(device, "_PROC_VERSION", tmp_path / "absent")
    monkeypatch.setattr(device.ctypes, "CDLL", nvml(b"581.15", closed=closed))
    assert device.driver_name() == "581.15"
    assert closed == [1]


@pytest.mark.parametrize(
    ("library", "reason"),
    [
        (no_library, "No such file or directory; .*: cannot open shared object"),
        (nvml(b"", init=9), "nvmlInit_v2 failed with status 9"),
        (nvml(b"", ask=2), "nvmlSystemGetDriverVersion failed with status 2"),
    ],
)
def test_absent_driver_name_has_every_reason(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, library: Any, reason: str
) -> None:
    monkeypatch.setattr(device, "_PROC_VERSION", tmp_path / "absent")
    monkeypatch.setattr(device.ctypes, "CDLL", library)
    assert device.driver_name() is None
    with pytest.raises(AssertionError, match=reason):
        raise AssertionError(device.probe_driver_name().reason)


def test_kernel_module_file_without_a_version_is_a_reason(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = tmp_path / "version"
    path.write_text("nothing here\n")
    monkeypatch.setattr(device, "_PROC_VERSION", path)
    monkeypatch.setattr(device.ctypes, "CDLL", no_library)
    assert "no version in it" in str(device.probe_driver_name().reason)


@pytest.mark.parametrize(("version", "text"), [(13000, "13.0"), (12080, "12.8"), (13020, "13.2")])
def test_cuda_version_as_text(version: int, text: str) -> None:
    assert device.format_cuda_version(version) == text


def test_describe_without_a_gpu_is_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    info = device.describe()
    assert (info.name, info.capability) == ("cpu", None)
    assert info.torch == torch.__version__
    assert info.torch_cuda == torch.version.cuda
    assert device.describe("cpu").name == "cpu"


@pytest.mark.parametrize("asked", [None, "cuda:0", 0])
def test_describe_a_gpu(monkeypatch: pytest.MonkeyPatch, asked: Any) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    properties = SimpleNamespace(name="NVIDIA H200", major=9, minor=0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda place: properties)
    info = device.describe(asked)
    assert (info.name, info.capability) == ("NVIDIA H200", "9.0")


def test_describe_an_absent_gpu_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(ValueError, match="device cuda:3 was asked for but torch sees 1 CUDA devices"):
        device.describe("cuda:3")


def test_describe_without_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    info = device.describe()
    assert (info.name, info.torch, info.torch_cuda) == ("cpu", None, None)
    with pytest.raises(ValueError, match="torch is not installed"):
        device.describe("cuda")


IMPORTS = ("device", "profiles", "records", "benchmark", "collect_env")


@pytest.mark.parametrize("module", IMPORTS)
def test_import_loads_no_driver_and_no_torch(module: str) -> None:
    script = (
        "import ctypes, sys\n"
        "def refuse(name, *rest, **more):\n"
        "    raise SystemExit(f'loaded {name}')\n"
        "ctypes.CDLL = refuse\n"
        f"import dandan_ops_core.{module}\n"
        "assert 'torch' not in sys.modules, 'torch was imported'\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.gpu
def test_real_driver() -> None:
    version = device.driver_version()
    assert version is not None
    assert version >= 12000
    assert device.driver_name() is not None
    assert device.describe().name == torch.cuda.get_device_name()

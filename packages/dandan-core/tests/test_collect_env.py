"""collect_env on machines of our own making: every missing thing has its reason in the report."""

from __future__ import annotations

import ctypes
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dandan_ops_core import collect_env, device

BUILD = {
    "schema": 1,
    "package": "dandan-norm",
    "version": "0.1.0",
    "library": "libdandan_norm.so",
    "toolkit": "13.0",
    "driver_floor": 13000,
    "architectures": ["9.0a", "12.0"],
    "ptx": ["9.0"],
    "commit": "abc123",
}


def no_library(name: str, *rest: Any, **more: Any) -> Any:
    raise OSError(f"{name}: cannot open shared object file")


@pytest.fixture
def bare(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A machine without driver, NVML and nvcc."""
    monkeypatch.setattr(ctypes, "CDLL", no_library)
    monkeypatch.setattr(device, "_PROC_VERSION", tmp_path / "absent")
    monkeypatch.setattr(collect_env.shutil, "which", lambda name: None)


@pytest.mark.usefixtures("bare")
def test_bare_machine_has_reasons_everywhere() -> None:
    data = collect_env.collect()
    assert data["driver"]["cuda"] is None
    assert "cannot be loaded" in data["driver"]["cuda_missing"]
    assert "cannot open shared object" in data["driver"]["version_missing"]
    assert data["gpus"]["list"] == []
    assert "cannot be loaded" in data["gpus"]["missing"]
    assert data["toolkit"]["missing"].startswith("no nvcc found")
    text = collect_env.render(data)
    assert "none (no CUDA driver" in text
    assert "GPUs:             none (" in text
    json.dumps(data)


def test_environment_has_the_variables_that_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DANDAN_DEBUG", "1")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "9.0a")
    monkeypatch.setenv("SECRET_TOKEN", "hidden")
    found = collect_env.collect()["environment"]
    assert found["DANDAN_DEBUG"] == "1"
    assert found["CUDA_VISIBLE_DEVICES"] == "0"
    assert found["TORCH_CUDA_ARCH_LIST"] == "9.0a"
    assert "SECRET_TOKEN" not in found


class FakeNvml:
    """Just enough of NVML for two GPUs, the second of which does not answer."""

    closed = 0

    def nvmlInit_v2(self) -> int:
        return 0

    def nvmlShutdown(self) -> int:
        FakeNvml.closed += 1
        return 0

    def nvmlDeviceGetCount_v2(self, count: Any) -> int:
        count._obj.value = 2
        return 0

    def nvmlDeviceGetHandleByIndex_v2(self, index: int, handle: Any) -> int:
        return 0 if index == 0 else 15

    def nvmlDeviceGetName(self, handle: Any, buffer: Any, size: int) -> int:
        buffer.value = b"NVIDIA H200"
        return 0

    def nvmlDeviceGetUUID(self, handle: Any, buffer: Any, size: int) -> int:
        buffer.value = b"GPU-1"
        return 0

    def nvmlDeviceGetCudaComputeCapability(self, handle: Any, major: Any, minor: Any) -> int:
        major._obj.value, minor._obj.value = 9, 0
        return 0

    def nvmlDeviceGetMemoryInfo(self, handle: Any, memory: Any) -> int:
        memory._obj.total = 140 * 2**30
        return 0


def test_gpus_are_listed_through_nvml(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collect_env.ctypes, "CDLL", lambda name: FakeNvml())
    found = collect_env._gpus()
    assert found["list"][0] == {"name": "NVIDIA H200", "capability": "9.0", "memory_gib": 140.0, "uuid": "GPU-1"}
    assert found["list"][1]["missing"] == "nvmlDeviceGetHandleByIndex_v2(1) failed with status 15"
    assert FakeNvml.closed == 1


@pytest.mark.parametrize(
    ("init", "count", "reason"),
    [(9, 0, "nvmlInit_v2 failed with status 9"), (0, 3, "nvmlDeviceGetCount_v2 failed with status 3")],
)
def test_failing_nvml_has_a_reason(monkeypatch: pytest.MonkeyPatch, init: int, count: int, reason: str) -> None:
    fake = SimpleNamespace(
        nvmlInit_v2=lambda: init, nvmlDeviceGetCount_v2=lambda pointer: count, nvmlShutdown=lambda: 0
    )
    monkeypatch.setattr(collect_env.ctypes, "CDLL", lambda name: fake)
    assert collect_env._gpus() == {"list": [], "missing": reason}


@pytest.mark.parametrize(
    ("output", "version", "missing"),
    [("Cuda compilation tools, release 13.0, V13.0.88", "13.0", None), ("hello", None, "says no release")],
)
def test_toolkit(monkeypatch: pytest.MonkeyPatch, output: str, version: str | None, missing: str | None) -> None:
    monkeypatch.setattr(collect_env.shutil, "which", lambda name: "/opt/cuda/bin/nvcc")
    monkeypatch.setattr(collect_env.subprocess, "run", lambda *a, **k: SimpleNamespace(stdout=output, returncode=0))
    found = collect_env._toolkit()
    assert found["nvcc"] == "/opt/cuda/bin/nvcc"
    assert found["version"] == version
    assert (missing or "") in (found["missing"] or "")


@pytest.mark.parametrize(
    ("driver", "floor", "enough", "text"),
    [
        (13000, 13000, True, "needs a driver for CUDA 13.0, this one serves 13.0"),
        (13020, 13000, True, "this one serves 13.2"),
        (12080, 13000, False, "this one serves 12.8: update the driver, or build from source with an older toolkit"),
        (None, 13000, False, "there is none"),
        (None, None, None, "any driver will do"),
    ],
)
def test_driver_floor(driver: int | None, floor: int | None, enough: bool | None, text: str) -> None:
    found = collect_env._driver_against_floor(driver, floor)
    assert found["enough"] is enough
    assert text in found["text"]


def example(folder: Path, monkeypatch: pytest.MonkeyPatch, build: str | None, state: Any) -> dict[str, Any]:
    """The entry of a package `dandan-example` with this _build_info.json and this answer of the loader."""
    package = folder / "dandan_example"
    package.mkdir()
    (package / "__init__.py").write_text("")
    if build is not None:
        (package / "_build_info.json").write_text(build)
    monkeypatch.syspath_prepend(str(folder))
    real = collect_env.import_module

    def load(name: str) -> Any:
        if isinstance(state, Exception):
            raise state
        return state

    fake = SimpleNamespace(load=load)
    monkeypatch.setattr(
        collect_env, "import_module", lambda name: fake if name == "dandan_ops_core.loader" else real(name)
    )
    entry = collect_env._package("dandan-example", 13000)
    sys.modules.pop("dandan_example", None)
    assert entry is not None
    return entry


def shown(entry: dict[str, Any]) -> str:
    return collect_env.render({**collect_env.collect(), "packages": [entry]})


def test_package_with_a_loaded_library(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    state = SimpleNamespace(loaded=True, reason="", path="/x/libdandan_example.so")
    entry = example(tmp_path, monkeypatch, json.dumps(BUILD), state)
    assert entry["library"] == {"loaded": True, "reason": "", "path": "/x/libdandan_example.so"}
    assert entry["version_missing"] == "importable, but not installed as a distribution"
    text = shown(entry)
    assert "library         loaded" in text
    assert "built for       9.0a, 12.0 + PTX 9.0" in text
    assert "built with      CUDA 13.0, commit abc123" in text


def test_package_whose_library_did_not_load_says_why(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    state = SimpleNamespace(loaded=False, reason="built without CUDA", path=None)
    entry = example(tmp_path, monkeypatch, None, state)
    text = shown(entry)
    assert "library         not loaded: built without CUDA" in text
    assert "build           unknown: _build_info.json is absent: the package was not built" in text


@pytest.mark.parametrize(("build", "missing"), [("{", "cannot be read"), ("[]", "is not an object")])
def test_package_with_a_bad_build_info_and_a_raising_loader(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, build: str, missing: str
) -> None:
    entry = example(tmp_path, monkeypatch, build, OSError("undefined symbol: foo"))
    assert missing in entry["build_missing"]
    assert entry["library"]["reason"] == "OSError: undefined symbol: foo"


def test_absent_package_is_left_out() -> None:
    assert collect_env._package("dandan-absent", None) is None


def test_torch_that_is_absent_or_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(name: str) -> Any:
        raise ImportError("libcudart.so.13: cannot open")

    monkeypatch.setattr(collect_env, "import_module", broken)
    assert "import failed: ImportError: libcudart.so.13" in collect_env._torch()["missing"]

    def absent(name: str) -> str:
        raise collect_env.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(collect_env.metadata, "version", absent)
    data = collect_env.collect()
    assert data["torch"] == {"version": None, "missing": "torch is not installed"}
    assert "none (torch is not installed)" in collect_env.render(data)


def test_command_prints_text_and_json() -> None:
    command = [sys.executable, "-m", "dandan_ops_core.collect_env"]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert "python:" in text
    assert "torch:" in text
    data = json.loads(subprocess.run([*command, "--json"], capture_output=True, text=True, check=True).stdout)
    assert data["schema"] == 1
    assert data["python"]["executable"] == sys.executable

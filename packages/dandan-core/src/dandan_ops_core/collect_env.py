"""`python -m dandan_ops_core.collect_env [--json]`: what a bug report needs to say about the machine.

Python, torch, driver, GPUs, toolkit, every installed dandan package with its library's state, and the environment
variables that matter. GPUs are listed through NVML, which starts no CUDA context. Nothing here raises for what is
missing: the reason stands in its place.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from importlib import import_module, metadata, util
from pathlib import Path
from typing import Any

from dandan_ops_core import device

__all__ = ["collect", "main", "render"]

PACKAGES = ("dandan-ops-core", "dandan-norm", "dandan-gemm", "dandan-w4a16", "dandan-attention", "dandan-ops")
WITHOUT_LIBRARY = ("dandan-ops-core", "dandan-ops")
VARIABLES = re.compile(
    r"(DANDAN_|CUDA_|TORCH_CUDA_ARCH_LIST$|TORCH_LIB|PYTORCH_CUDA_ALLOC_CONF$|NVIDIA_VISIBLE_DEVICES$)"
)


def collect() -> dict[str, Any]:
    """Everything as one JSON-ready dictionary."""
    driver = device.probe_driver()
    name = device.probe_driver_name()
    packages = [_package(distribution, driver.value) for distribution in PACKAGES]
    return {
        "schema": 1,
        "system": {"platform": platform.platform(), "machine": platform.machine(), "cpus": os.cpu_count()},
        "python": {"version": platform.python_version(), "executable": sys.executable},
        "torch": _torch(),
        "driver": {
            "version": name.value,
            "version_missing": name.reason,
            "cuda": device.format_cuda_version(driver.value) if isinstance(driver.value, int) else None,
            "cuda_missing": driver.reason,
        },
        "gpus": _gpus(),
        "toolkit": _toolkit(),
        "packages": [package for package in packages if package is not None],
        "environment": {key: os.environ[key] for key in sorted(os.environ) if VARIABLES.match(key)},
    }


def _torch() -> dict[str, Any]:
    try:
        version = metadata.version("torch")
    except metadata.PackageNotFoundError:
        return {"version": None, "missing": "torch is not installed"}
    try:
        torch = import_module("torch")
    except Exception as error:  # a torch that is there but broken is exactly what a report must show
        return {"version": version, "missing": f"import failed: {type(error).__name__}: {error}"}
    return {"version": torch.__version__, "cuda": torch.version.cuda, "path": str(Path(str(torch.__file__)).parent)}


# NVML: enough of it to list GPUs. Handles are opaque pointers.


class _Memory(ctypes.Structure):
    _fields_ = (("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong))


def _gpus() -> dict[str, Any]:
    """{"list": [{"name", "capability", "memory_gib", "uuid"}], "missing": reason or None}."""
    library = "nvml.dll" if sys.platform == "win32" else "libnvidia-ml.so.1"
    try:
        nvml = ctypes.CDLL(library)
    except OSError as error:
        return {"list": [], "missing": f"{library} cannot be loaded ({error})"}
    status = nvml.nvmlInit_v2()
    if status != 0:
        return {"list": [], "missing": f"nvmlInit_v2 failed with status {status}"}
    try:
        count = ctypes.c_uint()
        status = nvml.nvmlDeviceGetCount_v2(ctypes.byref(count))
        if status != 0:
            return {"list": [], "missing": f"nvmlDeviceGetCount_v2 failed with status {status}"}
        found = [_gpu(nvml, index) for index in range(count.value)]
        return {"list": found, "missing": None if found else "the driver sees no GPU"}
    finally:
        nvml.nvmlShutdown()


def _gpu(nvml: Any, index: int) -> dict[str, Any]:
    handle = ctypes.c_void_p()
    status = nvml.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(handle))
    if status != 0:
        return {"name": None, "missing": f"nvmlDeviceGetHandleByIndex_v2({index}) failed with status {status}"}
    name, uuid = ctypes.create_string_buffer(96), ctypes.create_string_buffer(96)
    major, minor, memory = ctypes.c_int(), ctypes.c_int(), _Memory()
    got_name = nvml.nvmlDeviceGetName(handle, name, 96) == 0
    got_uuid = nvml.nvmlDeviceGetUUID(handle, uuid, 96) == 0
    got_arch = nvml.nvmlDeviceGetCudaComputeCapability(handle, ctypes.byref(major), ctypes.byref(minor)) == 0
    got_memory = nvml.nvmlDeviceGetMemoryInfo(handle, ctypes.byref(memory)) == 0
    return {
        "name": name.value.decode("utf-8", "replace") if got_name else None,
        "capability": f"{major.value}.{minor.value}" if got_arch else None,
        "memory_gib": round(memory.total / 2**30, 1) if got_memory else None,
        "uuid": uuid.value.decode("ascii", "replace") if got_uuid else None,
    }


def _toolkit() -> dict[str, Any]:
    """The nvcc that a source build would most likely take, and its version."""
    home = os.environ.get("DANDAN_CUDA_HOME") or os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    candidates = [str(Path(home) / "bin" / "nvcc")] if home else []
    candidates += ["nvcc", "/usr/local/cuda/bin/nvcc"]
    for candidate in candidates:
        program = shutil.which(candidate)
        if program is None:
            continue
        try:
            done = subprocess.run([program, "--version"], capture_output=True, text=True, timeout=30, check=False)
        except (OSError, subprocess.TimeoutExpired) as error:
            return {"nvcc": program, "version": None, "missing": f"{program} --version failed: {error}"}
        found = re.search(r"release (\d+\.\d+)", done.stdout)
        if found:
            return {"nvcc": program, "version": found.group(1), "missing": None}
        return {"nvcc": program, "version": None, "missing": f"{program} --version says no release"}
    return {"nvcc": None, "version": None, "missing": "no nvcc found (only a source build needs one)"}


def _package(distribution: str, driver: object) -> dict[str, Any] | None:
    """State of one package; None where it is not installed."""
    name = "dandan_ops_core" if distribution == "dandan-ops-core" else distribution.replace("-", "_")
    try:
        version: str | None = metadata.version(distribution)
    except metadata.PackageNotFoundError:
        version = None
    spec = util.find_spec(name)
    if version is None and spec is None:
        return None
    places = list(spec.submodule_search_locations or []) if spec is not None else []
    entry: dict[str, Any] = {"name": distribution, "version": version, "path": places[0] if places else None}
    if version is None:
        entry["version_missing"] = "importable, but not installed as a distribution"
    if distribution in WITHOUT_LIBRARY:
        return entry
    build, missing = _build_info(places)
    entry["build"] = build
    if missing is not None:
        entry["build_missing"] = missing
    entry["library"] = _library(distribution, build)
    entry["driver"] = _driver_against_floor(driver, build.get("driver_floor"))
    return entry


def _build_info(places: Sequence[str]) -> tuple[dict[str, Any], str | None]:
    if not places:
        return {}, "the package cannot be found"
    path = Path(places[0]) / "_build_info.json"
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}, f"{path.name} is absent: the package was not built"
    except (OSError, ValueError) as error:
        return {}, f"{path.name} cannot be read: {error}"
    return (data, None) if isinstance(data, dict) else ({}, f"{path.name} is not an object")


def _library(distribution: str, build: dict[str, Any]) -> dict[str, Any]:
    """Whether the compiled library loads, asked from the loader; or the reason why not."""
    try:
        loader = import_module("dandan_ops_core.loader")
        import_module(distribution.replace("-", "_"))
        state = loader.load(distribution.replace("-", "_"))
    except Exception as error:  # whatever stops a package from loading is what this report is for
        return {"loaded": False, "reason": f"{type(error).__name__}: {error}", "path": None}
    return {"loaded": bool(state.loaded), "reason": state.reason, "path": str(state.path) if state.path else None}


def _driver_against_floor(driver: object, floor: object) -> dict[str, Any]:
    """Whether the driver serves the CUDA version the library was built with."""
    if not isinstance(floor, int):
        return {"floor": None, "enough": None, "text": "no CUDA part, so any driver will do"}
    needed = device.format_cuda_version(floor)
    if not isinstance(driver, int):
        return {"floor": needed, "enough": False, "text": f"needs a driver for CUDA {needed}; there is none"}
    enough = driver >= floor
    has = device.format_cuda_version(driver)
    text = f"needs a driver for CUDA {needed}, this one serves {has}"
    if not enough:
        text += ": update the driver, or build from source with an older toolkit"
    return {"floor": needed, "enough": enough, "text": text}


# ------------------------------------------------------------------------------------------------------------------
# For people


def _or(value: object, reason: object) -> str:
    return str(value) if value is not None else f"none ({reason})"


def render(data: dict[str, Any]) -> str:
    """The dictionary of `collect` as aligned lines."""
    lines: list[str] = []

    def add(name: str, text: object) -> None:
        lines.append(f"{name + ':':<17} {text}")

    add("system", f"{data['system']['platform']}, {data['system']['cpus']} CPUs")
    add("python", f"{data['python']['version']} ({data['python']['executable']})")
    torch = data["torch"]
    if torch.get("missing"):
        add("torch", f"{torch['version'] or 'none'} ({torch['missing']})")
    else:
        add("torch", f"{torch['version']}, CUDA {torch['cuda'] or 'none (a CPU build)'}")
    driver = data["driver"]
    add("driver", _or(driver["version"], driver["version_missing"]))
    add("driver's CUDA", _or(driver["cuda"], driver["cuda_missing"]))
    for index, gpu in enumerate(data["gpus"]["list"]):
        if gpu["name"] is None:
            add(f"GPU {index}", f"unknown ({gpu.get('missing', 'NVML gives no name')})")
        else:
            add(f"GPU {index}", f"{gpu['name']}, compute capability {gpu['capability']}, {gpu['memory_gib']} GiB")
    if not data["gpus"]["list"]:
        add("GPUs", f"none ({data['gpus']['missing']})")
    toolkit = data["toolkit"]
    found = f"{toolkit['version']} ({toolkit['nvcc']})" if toolkit["version"] else None
    add("CUDA toolkit", _or(found, toolkit["missing"]))
    for package in data["packages"]:
        add(package["name"], _or(package["version"], package.get("version_missing")))
        if "library" not in package:
            continue
        library, build = package["library"], package["build"]
        state = "loaded" if library["loaded"] else f"not loaded: {library['reason']}"
        lines.append(f"  library         {state}")
        if build:
            archs = ", ".join(build.get("architectures") or []) or "none"
            ptx = ", ".join(build.get("ptx") or [])
            lines.append(f"  built for       {archs}{f' + PTX {ptx}' if ptx else ''}")
            lines.append(f"  built with      CUDA {build.get('toolkit') or 'none'}, commit {build.get('commit')}")
        else:
            lines.append(f"  build           unknown: {package.get('build_missing')}")
        lines.append(f"  driver          {package['driver']['text']}")
    for key, value in data["environment"].items():
        add(key, value)
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; returns 0."""
    parser = argparse.ArgumentParser(prog="python -m dandan_ops_core.collect_env", description=__doc__)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    arguments = parser.parse_args(argv)
    data = collect()
    print(json.dumps(data, indent=2) if arguments.json else render(data))
    return 0


if __name__ == "__main__":
    sys.exit(main())

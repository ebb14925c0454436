"""What the present device, driver, torch and CUDA are. Importing this module asks nothing and imports no torch."""

from __future__ import annotations

import ctypes
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

__all__ = [
    "DeviceInfo",
    "Probe",
    "describe",
    "driver_name",
    "driver_version",
    "format_cuda_version",
    "probe_driver",
    "probe_driver_name",
]

_PROC_VERSION = Path("/proc/driver/nvidia/version")


@dataclass(frozen=True)
class Probe:
    """An answer, or the reason why there is none. Exactly one of both is None."""

    value: int | str | None
    reason: str | None


@dataclass(frozen=True)
class DeviceInfo:
    """The device a call would run on and the software under it.

    Attributes:
        name: the GPU's name, or "cpu".
        capability: such as "9.0"; None on the CPU.
        driver: the driver's own version, such as "580.159.04"; None when there is none or it does not tell.
        cuda_driver_api: newest CUDA version the driver serves as 1000 * major + 10 * minor; None without a driver.
        torch: torch's version; None when it is not installed.
        torch_cuda: the CUDA version torch was built with; None for a CPU build.
    """

    name: str
    capability: str | None
    driver: str | None
    cuda_driver_api: int | None
    torch: str | None
    torch_cuda: str | None


def _driver_library() -> str:
    return "nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1"


def probe_driver() -> Probe:
    """The CUDA version of the driver (13000 for 13.0) through cuDriverGetVersion, which needs no cuInit; or why not."""
    name = _driver_library()
    try:
        library = ctypes.CDLL(name)
    except OSError as error:
        return Probe(None, f"no CUDA driver: {name} cannot be loaded ({error})")
    try:
        ask = library.cuDriverGetVersion
    except AttributeError:
        return Probe(None, f"{name} has no cuDriverGetVersion")
    version = ctypes.c_int(0)
    status = ask(ctypes.byref(version))
    if status != 0:
        return Probe(None, f"cuDriverGetVersion failed with status {status}")
    if version.value <= 0:
        return Probe(None, f"{name} is a stub: it reports version {version.value}")
    return Probe(version.value, None)


def driver_version() -> int | None:
    """The CUDA version the driver serves (13000 for 13.0), or None; `probe_driver` also has the reason."""
    value = probe_driver().value
    return value if isinstance(value, int) else None


def format_cuda_version(version: int) -> str:
    """ "13.0" for 13000, "12.8" for 12080."""
    return f"{version // 1000}.{version % 1000 // 10}"


def probe_driver_name() -> Probe:
    """The driver's own version, such as "580.159.04", from the kernel module's file or NVML; or why not."""
    tried = []
    try:
        text = _PROC_VERSION.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        tried.append(f"{_PROC_VERSION}: {error.strerror or error}")
    else:
        found = re.search(r"\b(\d{3,}\.\d+(?:\.\d+)?)\b", text)
        if found:
            return Probe(found.group(1), None)
        tried.append(f"{_PROC_VERSION}: no version in it")
    name = "nvml.dll" if sys.platform == "win32" else "libnvidia-ml.so.1"
    try:
        nvml = ctypes.CDLL(name)
    except OSError as error:
        tried.append(f"{name}: {error}")
        return Probe(None, "; ".join(tried))
    status = nvml.nvmlInit_v2()
    if status != 0:
        tried.append(f"{name}: nvmlInit_v2 failed with status {status}")
        return Probe(None, "; ".join(tried))
    try:
        buffer = ctypes.create_string_buffer(96)
        status = nvml.nvmlSystemGetDriverVersion(buffer, 96)
        if status == 0 and buffer.value:
            return Probe(buffer.value.decode("ascii", "replace"), None)
        tried.append(f"{name}: nvmlSystemGetDriverVersion failed with status {status}")
    finally:
        nvml.nvmlShutdown()
    return Probe(None, "; ".join(tried))


def driver_name() -> str | None:
    """The driver's own version as text, or None; `probe_driver_name` also has the reason."""
    value = probe_driver_name().value
    return value if isinstance(value, str) else None


def describe(device: torch.device | str | int | None = None) -> DeviceInfo:
    """Describes a device: by default the current CUDA device where torch sees one, else the CPU.

    torch is imported when this is called. For a CUDA device torch's own properties are asked, which starts torch's CUDA
    runtime in this process; without a visible GPU nothing is started.

    Raises:
        ValueError: the device is a CUDA device that is not there.
    """
    try:
        import torch
    except ImportError:
        if device not in (None, "cpu"):
            raise ValueError(f"describe: torch is not installed, so there is no device {device!r}") from None
        return DeviceInfo("cpu", None, driver_name(), driver_version(), None, None)

    place = None
    if device is None:
        if torch.cuda.is_available():
            place = torch.device("cuda", torch.cuda.current_device())
    else:
        place = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
    software = (driver_name(), driver_version(), str(torch.__version__), torch.version.cuda)
    if place is None or place.type != "cuda":
        return DeviceInfo("cpu", None, *software)
    count = torch.cuda.device_count()
    if (place.index or 0) >= count:
        raise ValueError(f"describe: device {place} was asked for but torch sees {count} CUDA devices")
    properties = torch.cuda.get_device_properties(place)
    return DeviceInfo(properties.name, f"{properties.major}.{properties.minor}", *software)

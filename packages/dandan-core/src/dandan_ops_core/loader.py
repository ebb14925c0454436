"""Finds and loads the compiled library of an operator package, or keeps the reason why not."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, field
from importlib import util
from pathlib import Path
from typing import Any

from dandan_ops_core import PLUGIN_API, device

__all__ = ["LoadedLibrary", "library_name", "load"]

BUILD_INFO = "_build_info.json"


@dataclass(frozen=True)
class LoadedLibrary:
    """What became of a package's compiled library.

    Attributes:
        package: import name, such as "dandan_norm".
        loaded: True when its operators are registered.
        reason: why it is not loaded; empty when it is.
        path: the library's file, or None when the package has none.
        build_info: contents of `_build_info.json`; empty when there is no such file.
    """

    package: str
    loaded: bool
    reason: str
    path: Path | None = None
    build_info: dict[str, Any] = field(default_factory=dict)


_libraries: dict[str, LoadedLibrary] = {}


def library_name(package: str, platform: str | None = None) -> str:
    """File name of a package's library on `platform` (a value of `sys.platform`)."""
    return f"{package}.dll" if (platform or sys.platform) == "win32" else f"lib{package}.so"


def load(package: str) -> LoadedLibrary:
    """Loads the library of `package` once in the process; later calls return the same answer. Raises nothing."""
    if package not in _libraries:
        _libraries[package] = _load(package)
    return _libraries[package]


def _load(package: str) -> LoadedLibrary:
    spec = util.find_spec(package)
    if spec is None or spec.origin is None:
        return LoadedLibrary(package, False, f"{package} is not installed")
    folder = Path(spec.origin).parent
    try:
        info = json.loads((folder / BUILD_INFO).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return LoadedLibrary(
            package, False, f"{package} was not built: it runs from a source tree without {BUILD_INFO}"
        )
    except (OSError, ValueError) as error:
        return LoadedLibrary(package, False, f"{folder / BUILD_INFO} cannot be read: {error}")
    if not isinstance(info, dict):
        return LoadedLibrary(package, False, f"{folder / BUILD_INFO} cannot be read: it holds no object")
    reason = obstacle(info, device.probe_driver())
    path = folder / library_name(package)
    if not reason and not path.is_file():
        reason = f"{path} is missing"
    if reason:
        return LoadedLibrary(package, False, reason, None if info.get("library") is None else path, info)
    try:
        import torch

        torch.ops.load_library(path)
    except (OSError, RuntimeError) as error:
        # torch's own message names the file alone; the linker's stands behind it.
        detail = f"{error}" if error.__cause__ is None else f"{error}: {error.__cause__}"
        return LoadedLibrary(
            package,
            False,
            f"{path.name}, built against torch {info.get('torch_headers')} for torch >= {info.get('torch_target')}, "
            f"does not load in torch {torch.__version__}: {detail}",
            path,
            info,
        )
    if not hasattr(getattr(torch.ops, package), "describe"):
        return LoadedLibrary(package, False, f"{path} defines no operators of {package}", path, info)
    return LoadedLibrary(package, True, "", path, info)


def obstacle(info: dict[str, Any], driver: device.Probe) -> str:
    """Why a library with this build information should not be loaded; empty when nothing speaks against it.

    A machine without a driver may load it: its CUDA kernels cannot be reached there.
    """
    if info.get("library") is None:
        return f"this build has no CUDA part: {info.get('reason') or 'no reason recorded'}"
    if info.get("plugin_api") != PLUGIN_API:
        spoken = info.get("plugin_api")
        return f"the library speaks plug-in API {spoken}, the installed dandan-ops-core speaks {PLUGIN_API}"
    floor = info.get("driver_floor")
    if isinstance(driver.value, int) and isinstance(floor, int) and driver.value < floor:
        return (
            f"the driver serves CUDA {device.format_cuda_version(driver.value)}, "
            f"this build (CUDA {info.get('toolkit')}) needs a driver for "
            f"CUDA {device.format_cuda_version(floor)} or later"
        )
    return ""

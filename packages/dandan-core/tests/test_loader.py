"""Every reason why a compiled library is not loaded, with packages made for the purpose."""

from __future__ import annotations

import ctypes.util
import itertools
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from dandan_ops_core import PLUGIN_API, device, loader

_numbers = itertools.count()
INFO = {
    "schema": 1,
    "library": "lib.so",
    "plugin_api": PLUGIN_API,
    "toolkit": "13.0",
    "driver_floor": 13000,
    "torch_target": "2.9",
    "torch_headers": "2.13.0",
}
Package = Callable[..., tuple[str, Path]]


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Package:
    """package(info, library=...) makes an importable package that was never loaded before; its name and its folder."""
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(device, "probe_driver", lambda: device.Probe(None, "no driver"))

    def make(info: Any = None, *, text: str | None = None, library: bytes | None = None) -> tuple[str, Path]:
        name = f"loader_toy_{next(_numbers)}"
        folder = tmp_path / name
        folder.mkdir()
        (folder / "__init__.py").write_text("")
        if info is not None or text is not None:
            (folder / "_build_info.json").write_text(json.dumps(info) if text is None else text)
        if library is not None:
            (folder / loader.library_name(name)).write_bytes(library)
        return name, folder

    return make


def refused(name: str) -> loader.LoadedLibrary:
    found = loader.load(name)
    assert not found.loaded
    assert found.package == name
    assert found.reason
    return found


def test_package_that_is_not_installed() -> None:
    found = refused("no_such_package_of_ours")
    assert found.reason == "no_such_package_of_ours is not installed"
    assert (found.path, found.build_info) == (None, {})


def test_source_tree(package: Package) -> None:
    name, _ = package()
    assert refused(name).reason == f"{name} was not built: it runs from a source tree without _build_info.json"


@pytest.mark.parametrize(
    "text",
    ['{"schema": 1, "library": "lib', "", "[]", "null", '"text"', "\x00"],
    ids=["truncated", "empty", "list", "null", "text", "bytes"],
)
def test_build_information_that_cannot_be_read(package: Package, text: str) -> None:
    name, folder = package(text=text, library=b"")
    assert refused(name).reason.startswith(f"{folder / '_build_info.json'} cannot be read: ")


def test_build_information_that_is_a_folder(package: Package) -> None:
    name, folder = package()
    (folder / "_build_info.json").mkdir()
    assert "cannot be read" in refused(name).reason


@pytest.mark.parametrize(
    ("why", "shown"), [("DANDAN_BUILD_CUDA is 0", "DANDAN_BUILD_CUDA is 0"), (None, "no reason recorded")]
)
def test_build_without_a_cuda_part(package: Package, why: str | None, shown: str) -> None:
    info = {**INFO, "library": None, "reason": why}
    name, _ = package(info)
    found = refused(name)
    assert found.reason == f"this build has no CUDA part: {shown}"
    assert found.path is None
    assert found.build_info == info


@pytest.mark.parametrize("spoken", [PLUGIN_API + 1, PLUGIN_API - 1, None, str(PLUGIN_API)])
def test_another_plugin_api(package: Package, spoken: Any) -> None:
    name, folder = package({**INFO, "plugin_api": spoken}, library=b"")
    found = refused(name)
    assert found.reason == (
        f"the library speaks plug-in API {spoken}, the installed dandan-ops-core speaks {PLUGIN_API}"
    )
    assert found.path == folder / loader.library_name(name)


def test_driver_too_old(package: Package, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "probe_driver", lambda: device.Probe(12080, None))
    name, _ = package(INFO, library=b"")
    assert refused(name).reason == (
        "the driver serves CUDA 12.8, this build (CUDA 13.0) needs a driver for CUDA 13.0 or later"
    )


@pytest.mark.parametrize(
    ("driver", "floor", "stops"),
    [
        (13000, 13000, False),
        (13010, 13000, False),
        (12999, 13000, True),
        (None, 13000, False),  # no driver at all: its operators on CPU and fake tensors still serve
        (12000, None, False),
    ],
)
def test_driver_and_floor(driver: int | None, floor: int | None, stops: bool) -> None:
    probe = device.Probe(driver, None if driver else "no driver")
    assert bool(loader.obstacle({**INFO, "driver_floor": floor}, probe)) == stops


def test_missing_file(package: Package) -> None:
    name, folder = package(INFO)
    assert refused(name).reason == f"{folder / loader.library_name(name)} is missing"


def test_file_that_is_no_library(package: Package) -> None:
    """What torch and the linker say is in the reason, and what the library was built against."""
    name, _ = package(INFO, library=b"not a library")
    reason = refused(name).reason
    start = f"{loader.library_name(name)}, built against torch 2.13.0 for torch >= 2.9, does not load in torch "
    assert reason.startswith(f"{start}{torch.__version__}: ")
    assert "invalid ELF header" in reason or "file too short" in reason or "not a valid Win32" in reason


def test_library_of_somebody_else(package: Package) -> None:
    """It loads, but defines none of the operators: taken for ours, it would break the import."""
    path = ctypes.util.find_library("m")
    if path is None:
        pytest.skip("this system has no libm to borrow")
    folders = [
        Path(line) for line in ("/lib/x86_64-linux-gnu", "/usr/lib/x86_64-linux-gnu", "/lib64", "/usr/lib64", "/lib")
    ]
    source = next((folder / path for folder in folders if (folder / path).is_file()), None)
    if source is None:
        pytest.skip(f"{path} was not found")
    name, folder = package(INFO)
    shutil.copyfile(source, folder / loader.library_name(name))
    assert refused(name).reason == f"{folder / loader.library_name(name)} defines no operators of {name}"


def test_the_answer_is_kept(package: Package) -> None:
    """Asked again, a process gives the same answer, whatever became of the files since."""
    name, folder = package()
    first = loader.load(name)
    (folder / "_build_info.json").write_text(json.dumps({**INFO, "library": None}))
    assert loader.load(name) is first


def test_a_loaded_library(package: Package, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's part is played by a fake: the path it is given, and an answer without a reason."""
    name, folder = package(INFO, library=b"")
    given: list[Path] = []

    def load(path: Path) -> None:
        given.append(path)
        fragment = torch.library.Library(name, "DEF")
        fragment.define("describe() -> Tensor")
        kept.append(fragment)

    kept: list[torch.library.Library] = []
    monkeypatch.setattr(torch.ops, "load_library", load)
    found = loader.load(name)
    assert found == loader.LoadedLibrary(name, True, "", folder / loader.library_name(name), INFO)
    assert given == [found.path]


@pytest.mark.parametrize(
    ("platform", "name"),
    [("linux", "libdandan_norm.so"), ("win32", "dandan_norm.dll"), ("darwin", "libdandan_norm.so")],
)
def test_file_name_of_each_system(platform: str, name: str) -> None:
    assert loader.library_name("dandan_norm", platform) == name


@pytest.mark.parametrize("platform", ["linux", "win32"])
def test_the_file_of_this_system_is_looked_for(
    package: Package, monkeypatch: pytest.MonkeyPatch, platform: str
) -> None:
    monkeypatch.setattr(loader.sys, "platform", platform)
    name, folder = package(INFO)
    other = {"linux": "win32", "win32": "linux"}[platform]
    (folder / loader.library_name(name, other)).write_bytes(b"")
    assert refused(name).reason == f"{folder / loader.library_name(name, platform)} is missing"

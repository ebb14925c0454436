"""Architectures: lists, defaults, what each file is compiled for."""

from __future__ import annotations

import pytest

from dandan_ops_core.build.arch import (
    DEFAULT_PTX,
    DEFAULT_SASS,
    Arch,
    ArchList,
    choose_archs,
    file_archs,
    for_device,
    gencode_flags,
    parse_arch_list,
)
from dandan_ops_core.build.errors import BuildError

CUDA_13 = (13, 0)
DEFAULT = ArchList(DEFAULT_SASS, DEFAULT_PTX, "the default list")


def names(archs: tuple[Arch, ...]) -> list[str]:
    return [arch.name for arch in archs]


@pytest.mark.parametrize(
    ("text", "sass", "ptx"),
    [
        ("9.0a", ["9.0a"], []),
        ("8.0;9.0a;12.0", ["8.0", "9.0a", "12.0"], []),
        ("12.0 8.0", ["8.0", "12.0"], []),  # spaces, as torch takes them; sorted
        ("8.0, 9.0", ["8.0", "9.0"], []),
        ("8.0;9.0+PTX", ["8.0", "9.0"], ["9.0"]),
        ("9.0a+ptx", ["9.0a"], ["9.0a"]),
        ("8.9;8.9;8.9+PTX", ["8.9"], ["8.9"]),
        ("10.0f", ["10.0f"], []),
        (" 9.0A ; ", ["9.0a"], []),
    ],
)
def test_parse_arch_list(text: str, sass: list[str], ptx: list[str]) -> None:
    found = parse_arch_list(text)
    assert (names(found[0]), names(found[1])) == (sass, ptx)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("Hopper", "'Hopper', which is no architecture"),
        ("sm_90", "'sm_90', which is no architecture"),
        ("90", "'90', which is no architecture"),
        ("9.0b", "'9.0b', which is no architecture"),
        ("8.0;9.0+SASS", "'9.0\\+SASS', which is no architecture"),
        ("7.5", "need architecture 8.0 or newer"),
        (";;", "names no architecture"),
    ],
)
def test_bad_arch_list(text: str, message: str) -> None:
    with pytest.raises(BuildError, match=message):
        parse_arch_list(text)


def test_the_list_wins_over_gpus_and_is_never_ignored() -> None:
    chosen = choose_archs({"TORCH_CUDA_ARCH_LIST": "8.0"}, [(9, 0)], CUDA_13)
    assert names(chosen.sass) == ["8.0"]
    assert chosen.ptx == ()  # with a list, PTX only where it says +PTX
    assert "TORCH_CUDA_ARCH_LIST=8.0" in chosen.source


def test_visible_gpus_come_before_the_default() -> None:
    chosen = choose_archs({}, [(9, 0), (8, 9), (9, 0)], CUDA_13)
    assert names(chosen.sass) == ["8.9", "9.0a"]
    assert chosen.ptx == ()
    assert chosen.source == "the visible GPUs"


def test_an_old_gpu_beside_a_new_one_is_left_out() -> None:
    assert names(choose_archs({}, [(7, 5), (12, 0)], CUDA_13).sass) == ["12.0"]


def test_default_list() -> None:
    chosen = choose_archs({}, [], CUDA_13)
    assert names(chosen.sass) == ["8.0", "8.6", "8.9", "9.0a", "12.0"]
    assert names(chosen.ptx) == ["9.0"]


def test_default_list_leaves_out_what_an_older_nvcc_does_not_know() -> None:
    assert names(choose_archs({}, [], (12, 4)).sass) == ["8.0", "8.6", "8.9", "9.0a"]


@pytest.mark.parametrize(("environ", "gpus"), [({"TORCH_CUDA_ARCH_LIST": "12.0"}, []), ({}, [(12, 0)])])
def test_an_architecture_beyond_the_toolkit_is_an_error(environ: dict[str, str], gpus: list[tuple[int, int]]) -> None:
    with pytest.raises(BuildError, match=r"CUDA 12\.4 cannot compile for 12\.0"):
        choose_archs(environ, gpus, (12, 4))


def test_for_device() -> None:
    assert for_device(9, 0).name == "9.0a"  # where wgmma and its kind live
    assert for_device(8, 6).name == "8.6"
    assert for_device(12, 1).code == "121"


@pytest.mark.parametrize(
    ("stem", "sass", "ptx"),
    [
        ("sm80_row", ["8.0", "8.6", "8.9", "9.0a", "12.0"], ["9.0"]),
        ("sm90_cluster", ["9.0a", "12.0"], ["9.0"]),
        ("sm90a_wgmma", ["9.0a"], []),  # code for 9.0a runs nowhere else, so its PTX would not either
        ("sm120_mma", ["12.0"], []),
        ("helper", ["8.0", "8.6", "8.9", "9.0a", "12.0"], ["9.0"]),
        ("small_thing", ["8.0", "8.6", "8.9", "9.0a", "12.0"], ["9.0"]),  # `sm` alone is no prefix
    ],
)
def test_file_archs(stem: str, sass: list[str], ptx: list[str]) -> None:
    found = file_archs(stem, DEFAULT)
    assert (names(found[0]), names(found[1])) == (sass, ptx)


@pytest.mark.parametrize("stem", ["sm90_cluster", "sm90a_wgmma"])
def test_a_file_outside_the_list_is_compiled_for_its_own_architecture(stem: str) -> None:
    found = file_archs(stem, ArchList((Arch(80),), (), "test"))
    assert names(found[0]) == [stem.split("_")[0].replace("sm90", "9.0")]
    assert found[1] == ()


def test_gencode_flags() -> None:
    assert gencode_flags((Arch(90, "a"),), (Arch(90),)) == [
        "-gencode=arch=compute_90a,code=sm_90a",
        "-gencode=arch=compute_90,code=compute_90",
    ]

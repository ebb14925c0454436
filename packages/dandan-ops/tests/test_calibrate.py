"""`dandan-ops calibrate` with a fake timer: which shapes and candidates, what it writes, says and returns."""

from __future__ import annotations

import importlib
import io
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from dandan_ops import calibrate, cli
from dandan_ops_core import benchmark, profiles
from dandan_ops_core.benchmark import Implementation
from dandan_ops_core.calibrate import Candidate, Trial
from dandan_ops_core.records import Case

MACHINE = {
    "gpu": "NVIDIA H200",
    "driver": "580.1",
    "sm_clock": None,
    "torch": "2.11.0",
    "cuda": "13.0",
    "python": "3.12.1",
    "package_version": "0.1.0",
}
GEMM, W4A16 = calibrate.FAMILIES["dandan-gemm"], calibrate.FAMILIES["dandan-w4a16"]
US = {"torch": 4.0, "skinny.r8.4": 2.0}


@dataclass
class FakeGraph:
    calls: int
    name: str

    def replay(self) -> None: ...


class FakeEngine:
    def capture(self, calls: Sequence[Callable[[], Any]], count: int) -> FakeGraph:
        return FakeGraph(count, calls[0]())

    def time(self, graphs: Sequence[Any], repeats: int) -> list[list[float]]:
        return [[graph.calls * US[graph.name]] * repeats for graph in graphs]

    def synchronize(self) -> None: ...


def trial(case: Case, most: int) -> Trial:
    if case.shape["k"] == 13:
        raise RuntimeError("out of memory")
    made = [Candidate(name, Implementation(name, lambda i, name=name: lambda: name)) for name in US]  # type: ignore[misc]
    return Trial(case, 1, made, "torch")


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU that is not there: fake times, real tables."""
    family = replace(GEMM, prepare=lambda: {"skinny_gemm": "aaa"}, trial=trial)
    monkeypatch.setitem(calibrate.FAMILIES, "dandan-gemm", family)
    monkeypatch.setattr(benchmark, "CudaEngine", FakeEngine)
    monkeypatch.setattr(benchmark, "environment", lambda package: dict(MACHINE))
    monkeypatch.setattr(benchmark, "sm_clock", lambda: 1980)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)


def shapes(folder: Path, text: str) -> Path:
    path = folder / "shapes.txt"
    path.write_text(text)
    return path


def estimate(kernel: str, us: float, config: str = "r8", split: int = 1) -> dict[str, Any]:
    return {"kernel": kernel, "config": None if kernel == "torch" else config, "number": 0, "split": split, "us": us}


def chosen(estimates: list[dict[str, Any]], default: str, most: int) -> list[str]:
    return [calibrate.route_name(each) for each in calibrate.worth_timing(estimates, default, most)]


# Candidates and shapes ----------------------------------------------------------------------------------------------


def test_candidates_are_the_cheapest_and_some_of_each_kernel() -> None:
    skinny = [estimate("skinny", 2.0 + 0.1 * split, split=split) for split in (1, 2, 3, 4)]
    mma = [estimate("sm80_mma", 3.0 + 0.1 * split, "64x64", split) for split in (1, 2, 3)]
    found = [*skinny, *mma, estimate("torch", 3.9)]
    two = ["sm80_mma.64x64.1", "sm80_mma.64x64.2"]
    assert chosen(found, "skinny.r8.1", 3) == ["skinny.r8.1", "skinny.r8.2", "skinny.r8.3", *two]
    assert chosen(found, "skinny.r8.1", 1) == ["skinny.r8.1", "skinny.r8.2", *two]
    assert len(chosen(found, "torch", 10)) == 7


def test_candidates_that_are_estimated_far_slower_are_not_timed_but_for_the_default() -> None:
    found = [estimate("sm90a_wgmma", 10.0, "128x256"), estimate("sm80_mma", 26.0, "16x64")]
    assert chosen(found, "torch", 10) == ["sm90a_wgmma.128x256.1"]
    assert chosen(found, "sm80_mma.16x64.1", 10) == ["sm90a_wgmma.128x256.1", "sm80_mma.16x64.1"]
    assert chosen([estimate("torch", 4.0)], "torch", 10) == []


def test_checked_places_are_both_ends_and_the_middle() -> None:
    assert calibrate.places(10, 2) == [0, 1, 4, 5, 8, 9]
    assert calibrate.places(5, 2) == [0, 1, 2, 3, 4]
    assert calibrate.places(1, 32) == [0]


def test_shapes_of_a_file(tmp_path: Path) -> None:
    path = shapes(tmp_path, "m=1,2 n=64 k=32 weight_transposed=0,1 dtype=float16 name=mine\nn=8 k=8\n")
    cases = calibrate.chosen_cases(GEMM, path, [])
    assert len(cases) == 4 + 13 * 2
    first = cases[0]
    assert (first.op, first.case, first.dtype, first.topic) == ("gemm", "mine", "float16", "calibration")
    assert first.shape == {"m": 1, "n": 64, "k": 32, "weight_transposed": 0}
    assert cases[1].shape == {"m": 1, "n": 64, "k": 32}
    assert cases[4].shape == {"m": 1, "n": 8, "k": 8}
    assert len(calibrate.chosen_cases(GEMM, path, ["mine", "m=2"])) == 2
    assert len(calibrate.chosen_cases(GEMM, None, [])) == 1248


def test_shapes_of_w4a16(tmp_path: Path) -> None:
    """Sizes are those of a route table's row; groups of 64 unless the line says otherwise."""
    path = shapes(tmp_path, "m=1 n=64 k=256 group_size=32,128 dtype=float16 name=mine\nn=8 k=64\n")
    cases = calibrate.chosen_cases(W4A16, path, [])
    assert len(cases) == 2 + 13 * 2
    first = cases[0]
    assert (first.op, first.case, first.topic, first.variant) == ("packed_linear", "mine", "calibration", "fastest")
    assert first.shape == {"m": 1, "n": 64, "k": 256, "group_size": 32}
    assert first.flops == 2 * 64 * 256
    assert first.bytes == 64 * 256 // 2 + 4 * 64 * 8 + 2 * (256 + 64)
    assert cases[2].shape == {"m": 1, "n": 8, "k": 64, "group_size": 64}
    every = calibrate.chosen_cases(W4A16, None, [])
    assert len(every) == 11 * 13 * 2
    assert all(case.shape["k"] % 64 == 0 for case in every)
    assert len({(case.dtype, *case.shape.items()) for case in every}) == len(every)


# The command --------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("machine")
def test_command_writes_a_table_and_says_how_to_use_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = shapes(tmp_path, "m=1,2 n=64 k=32 dtype=float16")
    arguments = ["calibrate", "--package", "dandan-gemm", "--shapes", str(path), "--out", str(tmp_path / "tables")]
    assert cli.main(arguments) == 0
    table_path = tmp_path / "tables" / "dandan-gemm-h200-torch-2-11-0-cuda-13-0.json"
    table = profiles.load_table(table_path)
    assert [row.line() for row in table.rows] == [f"gemm;float16;k=32,m={m},n=64;skinny.r8.4" for m in (1, 2)]
    assert {row.ratio for row in table.rows} == {2.0}
    printed = capsys.readouterr().out
    assert "[1/2] gemm m=1 n=64 k=32 float16: skinny.r8.4 2.000x torch" in printed
    assert f"{table_path}: 2 rows; fastest: skinny 2" in printed
    assert "rows that replace the default route: 2, 2.000 times as fast by geometric mean" in printed
    assert f"DANDAN_PROFILES={tmp_path / 'tables'}" in printed

    assert cli.main(arguments) == 0
    printed = capsys.readouterr().out
    assert "2 of 2 rows of dandan-gemm-h200-torch-2-11-0-cuda-13-0.json still hold" in printed
    assert "[1/" not in printed
    assert cli.main([*arguments, "--again"]) == 0
    assert "[2/2]" in capsys.readouterr().out


@pytest.mark.usefixtures("machine")
def test_command_stops_at_its_budget(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = shapes(tmp_path, "n=64 k=32")
    arguments = ["calibrate", "--package", "dandan-gemm", "--shapes", str(path), "--out", str(tmp_path)]
    assert cli.main([*arguments, "--budget", "0"]) == 0
    assert (
        "shapes that were not reached: 26; the same command goes on where this one stopped" in capsys.readouterr().out
    )
    assert list(tmp_path.glob("*.json")) == []


@pytest.mark.usefixtures("machine")
def test_failed_shape_fails_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = shapes(tmp_path, "m=1 n=64 k=13,16 dtype=float16")
    assert cli.main(["calibrate", "--package", "dandan-gemm", "--shapes", str(path), "--out", str(tmp_path)]) == 1
    printed = capsys.readouterr().out
    assert "FAILED gemm given m=1 n=64 k=13" in printed
    assert "shapes that failed and have no row: 1" in printed
    assert len(profiles.load_table(tmp_path / "dandan-gemm-h200-torch-2-11-0-cuda-13-0.json").rows) == 1


@pytest.mark.usefixtures("machine")
def test_folder_is_that_of_the_users_tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = shapes(tmp_path, "m=1 n=64 k=32 dtype=float16")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DANDAN_PROFILES", str(tmp_path / "mine"))
    assert calibrate.main("dandan-gemm", shapes=path, stream=io.StringIO()) == 0
    monkeypatch.delenv("DANDAN_PROFILES")
    assert calibrate.main("dandan-gemm", shapes=path, stream=io.StringIO()) == 0
    for folder in ("mine", "dandan-profiles"):
        assert len(list((tmp_path / folder).glob("*.json"))) == 1


def test_list_needs_no_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["calibrate", "--package", "dandan-gemm", "--list", "--only", "TP8", "--only", "m=16 "]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2 * 10
    assert lines[0] == "gemm Llama-3-8B TP8 qkv m=16 n=768 k=4096 float16 fastest"


def test_command_without_a_gpu(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert cli.main(["calibrate", "--package", "dandan-gemm"]) == 2
    assert capsys.readouterr().err == ("dandan-ops calibrate: it needs a CUDA device and none is visible to torch\n")


def test_command_without_the_library(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for package in calibrate.FAMILIES:
        library = importlib.import_module(f"{package.replace('-', '_')}._ops").LIBRARY
        monkeypatch.setattr(library, "library", replace(library.library, loaded=False, reason="it was not built"))
        assert cli.main(["calibrate", "--package", package]) == 2
        assert capsys.readouterr().err == "dandan-ops calibrate: it was not built\n"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("m=1 n=64", "shapes.txt: line 1: k is missing"),
        ("n=1 k=1 weight_transposed=2", "line 1: weight_transposed '2'"),
    ],
)
def test_file_that_has_no_shapes(text: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["calibrate", "--package", "dandan-gemm", "--shapes", str(shapes(tmp_path, text))]) == 2
    assert message in capsys.readouterr().err
    assert cli.main(["calibrate", "--package", "dandan-gemm", "--shapes", str(tmp_path / "absent")]) == 2
    assert "No such file" in capsys.readouterr().err
    assert cli.main(["calibrate", "--package", "dandan-gemm", "--only", "nothing like it"]) == 2
    assert "no shape fits" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["--package", "dandan-tea"],
        ["--package", "dandan-gemm", "--budget", "-1"],
        ["--package", "dandan-gemm", "--budget", "nan"],
        ["--package", "dandan-gemm", "--repeats", "3"],
        ["--package", "dandan-gemm", "--candidates", "0"],
    ],
)
def test_bad_arguments_are_refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(["calibrate", *arguments])
    assert caught.value.code == 2
    assert "usage: dandan-ops calibrate" in capsys.readouterr().err


def test_every_family_can_be_named() -> None:
    (action,) = [
        action
        for parser in cli.parser()._subparsers._group_actions[0].choices.values()  # type: ignore[union-attr]
        for action in parser._actions
        if action.dest == "package"
    ]
    assert set(action.choices or ()) == set(calibrate.FAMILIES)


# On a GPU -------------------------------------------------------------------------------------------------------------

ASK = """
import torch, dandan_gemm
a, w = torch.randn(4, 1024, device="cuda").half(), torch.randn(4096, 1024, device="cuda").half()
for m in (4, 3):
    info = dandan_gemm.gemm_execution_info(a[:m], w, weight_transposed=True)
    print(info.kernel, info.profile)
"""


@pytest.mark.gpu
def test_calibrated_shape_takes_the_route_of_its_row(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The whole way: measured, written, read by a new process without a warning, followed for that shape."""
    path = shapes(tmp_path, "m=4,256 n=4096 k=1024 dtype=float16\nm=1 n=512 k=1024 weight_transposed=0 dtype=bfloat16")
    assert cli.main(["calibrate", "--package", "dandan-gemm", "--shapes", str(path), "--out", str(tmp_path)]) == 0
    (table_path,) = tmp_path.glob("*.json")
    table = profiles.load_table(table_path)
    assert len(table.rows) == 3
    (row,) = [row for row in table.rows if dict(row.shape)["m"] == 4]
    env = {**os.environ, "DANDAN_PROFILES": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", ASK], capture_output=True, text=True, check=False, env=env)
    assert done.returncode == 0, done.stderr
    assert table_path.name not in done.stderr
    four, three = done.stdout.splitlines()
    assert four.startswith(f"{row.kernel.partition('.')[0]} ")
    assert row.record in four
    assert three.endswith(" None")


ASK_W4A16 = """
import torch, dandan_w4a16
layer = dandan_w4a16.QuantizedLinear.from_float(torch.randn(4096, 1024, device="cuda").half())
for m in (4, 3):
    info = layer.execution_info(torch.randn(m, 1024, device="cuda").half())
    print(info.kernel, info.profile)
"""


@pytest.mark.gpu
def test_calibrated_layer_takes_the_route_of_its_row(tmp_path: Path) -> None:
    """The same of dandan-w4a16: the row of a weight in the kernels' order is that of a finalised module."""
    path = shapes(tmp_path, "m=4,256 n=4096 k=1024 dtype=float16\nm=1 n=512 k=1024 group_size=32 dtype=bfloat16")
    assert cli.main(["calibrate", "--package", "dandan-w4a16", "--shapes", str(path), "--out", str(tmp_path)]) == 0
    (table_path,) = tmp_path.glob("*.json")
    table = profiles.load_table(table_path)
    assert len(table.rows) == 3
    (row,) = [row for row in table.rows if dict(row.shape)["m"] == 4]
    env = {**os.environ, "DANDAN_PROFILES": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", ASK_W4A16], capture_output=True, text=True, check=False, env=env)
    assert done.returncode == 0, done.stderr
    assert table_path.name not in done.stderr
    four, three = done.stdout.splitlines()
    assert four.startswith(f"{row.kernel.partition('.')[0]} ")
    assert row.record in four
    assert three.endswith(" None")

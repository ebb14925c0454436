"""`dandan-ops demo`: it shows every operator, and a wrong result fails it."""

from __future__ import annotations

import io
import json
import sys
import time
from typing import Any

import pytest
import torch

import dandan_attention
import dandan_gemm
import dandan_norm
import dandan_w4a16
from dandan_attention import _cache_ops
from dandan_ops import cli, demo

PRODUCTS = {"gemm", "QuantizedLinear"}
ATTENTION = {"flash_attention", "flash_attention_varlen"}
NORMS = {"rms_norm", "layer_norm", "softmax", "residual_rms_norm", "silu_and_mul", "argmax"}
OPERATORS = NORMS | PRODUCTS | ATTENTION


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Smaller tensors and hardly any timing, for tests that are about something else."""
    monkeypatch.setattr(demo._CpuClock, "budget_s", 0.0)
    monkeypatch.setattr(demo, "VOCABULARY", 1000)
    monkeypatch.setattr(demo, "INTERMEDIATE", 256)
    monkeypatch.setattr(demo, "DECODE_TOKENS", (1, 2))
    monkeypatch.setattr(demo, "PREFILL_TOKENS", {"cpu": 4, "cuda": 4})


def broken(monkeypatch: pytest.MonkeyPatch, op: str, damage: Any) -> None:
    if op == "QuantizedLinear":
        family, name = dandan_w4a16.QuantizedLinear, "forward"
    else:
        family, name = dandan_attention if op in ATTENTION else dandan_gemm if op == "gemm" else dandan_norm, op
    real = getattr(family, name)
    monkeypatch.setattr(family, name, lambda *args, **kwargs: damage(real(*args, **kwargs)))


def test_demo_passes_on_the_cpu_with_the_models_shapes() -> None:
    out = io.StringIO()
    begin = time.perf_counter()
    assert demo.main("cpu", out=out) == 0
    assert time.perf_counter() - begin < 45
    lines = out.getvalue().splitlines()
    assert lines[0].startswith("Qwen3-0.6B shapes on the CPU, torch ")
    assert lines[-1] == "44 of 44 results are within their error limits."
    rows = [line.split() for line in lines[2:-1]]
    assert len(rows) == 44
    assert {row[0] for row in rows} == OPERATORS
    text = out.getvalue()
    for shape in (
        "1x1024",
        "8x16x128",
        "8x8x128",
        "8x3072",
        "8x151936",
        "64x1024",
        "1x151936",
        "1x4096x1024",
        "64x1024x3072",
    ):
        assert shape in text
    assert {row[1] for row in rows} == {"decode", "prefill"}


def test_every_operator_of_the_installed_families_is_shown() -> None:
    shown = {case.op for case in demo.cases(torch.device("cpu"), torch.bfloat16)}
    assert shown == OPERATORS
    names = [*dandan_norm.__all__, *dandan_gemm.__all__, *dandan_attention.__all__, "QuantizedLinear"]
    # What PyTorch alone computes so far has no kernel to show.
    unbuilt = {"DecodePlan", *_cache_ops.LIBRARY.operators}
    assert shown == {name for name in names if not name.endswith("execution_info")} - unbuilt


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_demo_as_json(dtype: str) -> None:
    out = io.StringIO()
    assert demo.main("cpu", dtype, as_json=True, out=out) == 0
    data = json.loads(out.getvalue())
    assert data["device"] == "the CPU"
    assert len(data["rows"]) == (24 if dtype == "float32" else 44)  # there is no product and no attention of float32
    for row in data["rows"]:
        assert row["dtype"] == dtype
        assert row["ok"] is True
        assert row["error"] <= row["limit"]
        assert row["us"] > 0
        assert row["pytorch_us"] > 0
        assert row["backend"]
        assert row["reason"]


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("op", sorted(OPERATORS - {"argmax", "residual_rms_norm"}))
def test_result_over_its_limit_fails_the_demo(
    op: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    broken(monkeypatch, op, lambda output: output * 1.05)
    assert demo.main("cpu") == 1
    captured = capsys.readouterr()
    assert f"over its limit: {'prefill 4' if op in ATTENTION else 'decode 1'}, " in captured.err
    assert f"{op}: worst element at [" in captured.err
    assert "!" in captured.out
    assert "44 of 44" not in captured.out


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("which", [0, 1])
def test_either_output_of_a_fused_operator_is_checked(
    which: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    broken(
        monkeypatch, "residual_rms_norm", lambda out: tuple(o * 1.05 if i == which else o for i, o in enumerate(out))
    )
    assert demo.main("cpu") == 1
    assert "41 of 44 results are within" in capsys.readouterr().out


@pytest.mark.usefixtures("quick")
def test_wrong_index_fails_the_demo(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    broken(monkeypatch, "argmax", lambda index: index + 1)
    assert demo.main("cpu") == 1
    assert "argmax: 1 of 1 indices are wrong" in capsys.readouterr().err


@pytest.mark.usefixtures("quick")
def test_wrong_dtype_or_shape_fails_the_demo(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    broken(monkeypatch, "softmax", lambda output: output.float())
    broken(monkeypatch, "layer_norm", lambda output: output[..., :-1])
    assert demo.main("cpu") == 1
    err = capsys.readouterr().err
    assert "dtype is torch.float32, must be torch.bfloat16" in err
    assert "shape is (1, 1023), must be (1, 1024)" in err


@pytest.mark.usefixtures("quick")
def test_progress_is_shown_on_a_terminal_alone(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert demo.main("cpu") == 0
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    assert demo.main("cpu") == 0
    err = capsys.readouterr().err
    assert "[1/44] rms_norm, decode 1, hidden" in err
    assert "[44/44] argmax, prefill 4, logits" in err


def test_command_without_the_device_that_was_asked_for(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert cli.main(["demo", "--device", "cuda"]) == 2
    assert "no CUDA device is visible to torch" in capsys.readouterr().err


@pytest.mark.usefixtures("quick")
def test_command_runs_the_demo_and_env(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["demo", "--device", "cpu", "--dtype", "float16"]) == 0
    assert "float16" in capsys.readouterr().out
    assert cli.main(["env"]) == 0
    printed = capsys.readouterr().out
    assert "dandan-norm:" in printed
    assert "dandan-gemm:" in printed
    assert "dandan-w4a16:" in printed
    assert "dandan-attention:" in printed
    assert cli.main(["env", "--json"]) == 0
    names = {package["name"] for package in json.loads(capsys.readouterr().out)["packages"]}
    families = {"dandan-norm", "dandan-gemm", "dandan-w4a16", "dandan-attention"}
    assert {"dandan-ops-core", *families, "dandan-ops"} <= names


@pytest.mark.parametrize("arguments", [[], ["fly"], ["demo", "--dtype", "int8"], ["demo", "--device", "tpu"]])
def test_bad_arguments_are_refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(arguments)
    assert caught.value.code == 2
    assert "usage: dandan-ops" in capsys.readouterr().err


@pytest.mark.gpu
def test_demo_passes_on_the_gpu_with_our_kernels() -> None:
    out = io.StringIO()
    assert demo.main("cuda", as_json=True, out=out) == 0
    rows = json.loads(out.getvalue())["rows"]
    assert len(rows) == 56  # with the LM head's product
    assert {row["backend"] for row in rows if row["op"] not in PRODUCTS} == {"cuda"}
    assert {row["backend"] for row in rows if row["op"] == "QuantizedLinear" and row["step"].startswith("decode")} == {
        "cuda"
    }
    assert {row["backend"] for row in rows if row["op"] == "gemm" and row["step"].startswith("decode")} == {"cuda"}
    assert "512x1024" in {row["shape"] for row in rows}

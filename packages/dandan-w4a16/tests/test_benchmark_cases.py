"""The parts of the benchmark that need no GPU: its grid, and the weights that it hands to its peers."""

from __future__ import annotations

import importlib.util
import sys
from collections import Counter
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from dandan_w4a16 import reference
from dandan_w4a16._ops import KERNELS

PACKAGE = Path(__file__).resolve().parents[1]


def _load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"w4a16_benchmark_{name}", PACKAGE / "benchmarks" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


cases = _load("cases")
int4_peers = _load("int4_peers")


def test_no_case_is_doubled() -> None:
    counts = Counter((case.topic, *case.key) for case in cases.CASES)
    assert [key for key, count in counts.items() if count > 1] == []
    topics = ["plain", "chained", "host", "accuracy", "calibration"]
    assert list(dict.fromkeys(case.topic for case in cases.CASES)) == topics


@pytest.mark.parametrize(
    ("topic", "rows"), [("plain", [1, 2, 4, 8, 16, 32, 64, 128, 256, 1024, 4096]), ("chained", [1, 2, 4, 8, 16])]
)
def test_every_layer_has_every_number_of_rows_in_both_dtypes(topic: str, rows: list[int]) -> None:
    found = Counter(
        (case.shape["n"], case.shape["k"], case.dtype, case.shape["m"])
        for case in cases.CASES
        if case.topic == topic and case.variant == "auto"
    )
    assert len({(n, k) for n, k, _, _ in found}) == 11
    wanted = {(n, k, dtype, m) for n, k, _, _ in found for dtype in ("float16", "bfloat16") for m in rows}
    assert set(found) == wanted
    assert {case.shape["group_size"] for case in cases.CASES if case.topic != "accuracy"} == {64}


def test_bytes_and_operations() -> None:
    case = cases.case("plain", "", 16, 4096, 1024, "float16")
    assert case.bytes == 4096 * 1024 // 2 + 3 * 4096 * 16 + 2 * 16 * 1024 + 2 * 16 * 4096
    assert case.flops == 2 * 16 * 4096 * 1024


def forced() -> list[Any]:
    return [case for case in cases.CASES if case.variant != "auto" and case.topic != "calibration"]


def test_every_kernel_is_forced_somewhere() -> None:
    assert list(dict.fromkeys(kernel for kernel, *_ in cases.FORCED)) == list(KERNELS)
    assert Counter(case.variant for case in forced()) == {
        "sm80_decode": 6,
        "sm90_decode": 16,
        "sm80_mma": 9,
        "sm90a_wgmma": 12,
        "sm80_dequantize": 4,
    }
    assert {case.topic for case in forced()} == {"plain"}


def test_forced_kernels_can_take_their_cases() -> None:
    most = {"sm80_decode": 16, "sm90_decode": 64}
    for case in forced():
        assert case.shape["m"] <= most.get(case.variant, 4096), case
        if case.variant == "sm80_dequantize":
            assert 2 * case.shape["n"] * case.shape["k"] <= 16 << 20, case


def test_plain_cases_are_so_few_that_a_record_takes_minutes() -> None:
    assert sum(case.topic == "plain" for case in cases.CASES) == 11 * 11 * 2 + 47 < 300


def test_quick_takes_some_of_every_topic() -> None:
    few = Counter(case.topic for case in cases.CASES if cases.quick(case))
    every = Counter(case.topic for case in cases.CASES if case.topic != "calibration")  # which another program takes
    assert set(few) == set(every)
    assert all(count < every[topic] / 2 for topic, count in few.items() if topic != "host")


def test_marlin_takes_column_i_plus_8_j_at_8_i_plus_j() -> None:
    scales = torch.arange(128 * 3).view(128, 3)  # [N, K/G]
    ordered = int4_peers.marlin_columns(scales)
    assert ordered.shape == (3, 128)
    for block in range(2):
        for i in range(8):
            for j in range(8):
                place, column = 64 * block + 8 * i + j, 64 * block + i + 8 * j
                assert ordered[:, place].tolist() == scales[column].tolist()


def test_marlin_zeros_lie_in_nibbles_of_the_mixed_columns() -> None:
    zeros = torch.randint(16, (64, 2), generator=torch.Generator().manual_seed(1)).to(torch.uint8)
    words = int4_peers.marlin_zeros(zeros)
    assert (words.shape, words.dtype) == ((2, 8), torch.int32)
    columns = int4_peers.marlin_columns(zeros)
    for word in range(8):
        for nibble, column in enumerate((0, 2, 4, 6, 1, 3, 5, 7)):
            assert ((words[:, word] >> 4 * nibble) & 15).tolist() == columns[:, 8 * word + column].tolist()


@pytest.mark.parametrize("symmetric", [False, True])
def test_random_weights_have_the_variance_of_one_over_k(symmetric: bool) -> None:
    torch.manual_seed(0)
    weight = int4_peers.random_weight(512, 1024, 64, torch.float16, symmetric=symmetric, device="cpu")
    values = reference.dequantize(*weight.tensors(), 64, torch.float32)
    assert values.square().mean().item() == pytest.approx(1 / 1024, rel=0.05)
    assert set(reference.unpack(weight.qweight).unique().tolist()) == set(range(16))
    assert set(weight.zeros.unique().tolist()) == ({8} if symmetric else set(range(16)))


def test_a_peer_that_is_wrong_is_found() -> None:
    torch.manual_seed(0)
    weight = int4_peers.random_weight(128, 256, 64, torch.float16, device="cpu")
    x = torch.randn(4, 256).half()
    right = reference.w4a16_linear(x, *weight.tensors(), None, 64)
    assert int4_peers.wrong(right, x, weight) is None
    assert "away from FP64" in int4_peers.wrong(right.flip(1), x, weight)
    assert "shape" in int4_peers.wrong(right[:2], x, weight)
    assert "not finite" in int4_peers.wrong(torch.full_like(right, float("nan")), x, weight)


def test_the_weights_of_a_rotation_keep_their_layout() -> None:
    first = int4_peers.Stored(torch.arange(32, dtype=torch.int32).view(8, 4).t(), torch.ones(2, 2), None)
    stored = int4_peers.rotating(first, 3)
    assert len(stored) == 3
    assert stored[0] is first
    for other in stored[1:]:
        assert other.codes.stride() == first.codes.stride()
        assert other.codes.data_ptr() != first.codes.data_ptr()
        assert other.scales.data_ptr() != first.scales.data_ptr()
        assert not torch.equal(other.codes, first.codes)

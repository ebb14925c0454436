"""Bad inputs raise before any launch, with operator, argument, rule and value."""

from __future__ import annotations

import pytest
from w4a16_bad_inputs import CASES, M, N, valid

import dandan_w4a16
from dandan_ops_core.testing.bad_inputs import (
    Case,
    at,
    check_table,
    cuda_works,
    refuse,
    refuse_on_fakes,
    refuse_under_compile,
)
from dandan_w4a16._ops import LIBRARY


def check_refused(case: Case, device: str) -> None:
    refuse(case, device, dandan_w4a16.w4a16_linear, dandan_w4a16.w4a16_linear_execution_info)


def test_the_table_holds_every_kind() -> None:
    check_table(CASES, {"cpu": 100, "meta": 85, "fake": 80, "cuda": 100})
    assert {case.error.__name__ for case in CASES} == {"TypeError", "ValueError"}


@pytest.mark.parametrize("backend", ["auto", "torch"])
def test_the_arguments_that_the_table_starts_from_are_valid(backend: str) -> None:
    """Otherwise each of its cases could be refused for a reason of its own."""
    assert dandan_w4a16.w4a16_linear(**valid("cpu"), backend=backend).shape == (M, N)


@pytest.mark.parametrize("case", at(CASES, "cpu"))
def test_on_the_cpu(case: Case) -> None:
    check_refused(case, "cpu")


@pytest.mark.parametrize("case", at(CASES, "meta"))
def test_on_meta_tensors(case: Case) -> None:
    check_refused(case, "meta")


@pytest.mark.parametrize("case", at(CASES, "fake"))
def test_on_fake_tensors(case: Case) -> None:
    refuse_on_fakes(case, dandan_w4a16.w4a16_linear)


# A few of them through the whole of torch.compile.
COMPILED = [
    case for case in CASES if case.name in {"x with K 120", "scales [24, 1]", "group_size 48", "x int32", "out [24]"}
]


@pytest.mark.parametrize("case", COMPILED, ids=lambda case: case.name)
def test_under_compile(case: Case) -> None:
    refuse_under_compile(case, dandan_w4a16.w4a16_linear)


def test_every_case_of_compile_is_in_the_table() -> None:
    assert len(COMPILED) == 5


@pytest.mark.gpu
@pytest.mark.parametrize("case", at(CASES, "cuda"))
def test_on_cuda(case: Case) -> None:
    check_refused(case, "cuda")
    cuda_works()


@pytest.mark.gpu
@pytest.mark.parametrize(("home", "away"), [("cuda:0", "cpu"), ("cpu", "cuda:0")])
def test_mixed_devices(home: str, away: str) -> None:
    """A29: each operand alone on another device than the rest."""
    for name in ("x", "qweight", "scales", "zeros", "bias"):
        mixed = valid(home.split(":")[0])
        mixed[name] = mixed[name].to(away)
        with pytest.raises(ValueError, match=rf"^w4a16_linear: \w+ (is|are) on {home if name == 'x' else away} but "):
            dandan_w4a16.w4a16_linear(**mixed)
    cuda_works()


def test_backend_numbers_of_the_raw_operator() -> None:
    arguments = valid("cpu")
    inputs = [arguments[name] for name in ("x", "qweight", "scales", "zeros", "bias", "group_size")]
    with pytest.raises(ValueError, match="^w4a16_linear: backend number 99 is unknown$"):
        LIBRARY.op("w4a16_linear")(*inputs, 99)

"""Bad inputs raise before any launch, with operator, argument, rule and value; odd but valid ones do not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from gemm_bad_inputs import CASES, K, M, N, tensor, valid

import dandan_gemm
from dandan_gemm import reference
from dandan_gemm._ops import LIBRARY
from dandan_ops_core.testing import assert_bit_equal
from dandan_ops_core.testing.bad_inputs import (
    SELECTION,
    Case,
    at,
    check_table,
    cuda_works,
    refuse,
    refuse_in_library,
    refuse_on_fakes,
    refuse_under_compile,
)
from dandan_ops_core.testing.routes import require_code

# The table makes sparse and nested tensors, about which torch has something to say.
pytestmark = pytest.mark.filterwarnings("ignore:.*(CSR|nested|ComplexHalf).*:UserWarning")


def check_refused(case: Case, device: str) -> None:
    refuse(case, device, dandan_gemm.gemm, dandan_gemm.gemm_execution_info)


def test_the_table_holds_every_kind() -> None:
    check_table(CASES, {"cpu": 120, "meta": 90, "fake": 90, "library": 100, "cuda": 130})
    assert {case.error.__name__ for case in CASES} == {"TypeError", "ValueError", "BackendUnavailableError"}


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("backend", ["auto", "torch"])
def test_the_arguments_that_the_table_starts_from_are_valid(transposed: bool, backend: str) -> None:
    """Otherwise each of its cases could be refused for a reason of its own."""
    result = dandan_gemm.gemm(**valid("cpu", transposed=transposed), backend=backend)
    assert result.shape == (M, N)


@pytest.mark.parametrize("case", at(CASES, "cpu"))
def test_on_the_cpu(case: Case) -> None:
    check_refused(case, "cpu")


@pytest.mark.parametrize("case", at(CASES, "meta"))
def test_on_meta_tensors(case: Case) -> None:
    check_refused(case, "meta")


@pytest.mark.parametrize("case", at(CASES, "fake"))
def test_on_fake_tensors(case: Case) -> None:
    refuse_on_fakes(case, dandan_gemm.gemm)


# A few of them through the whole of torch.compile, which wraps the error in its own.
COMPILED = [
    case
    for case in CASES
    if case.name
    in {
        "K 4095 and 4096",
        "b [] for [N, K]",
        "bias [23]",
        "a int32",
        "b bfloat16",
        "out [4, 23]",
        "out expanded",
    }
]


@pytest.mark.parametrize("case", COMPILED, ids=lambda case: case.name)
def test_under_compile(case: Case) -> None:
    refuse_under_compile(case, dandan_gemm.gemm)


def test_every_case_of_compile_is_in_the_table() -> None:
    assert len(COMPILED) == 7


def route(arguments: dict[str, Any], arch: int = 90) -> dict[str, Any]:
    """The compiled library's answer for a device of an architecture, after its own checks."""
    inputs = (
        arguments["a"],
        arguments["b"],
        arguments.get("bias"),
        arguments.get("weight_transposed", False),
        arguments.get("static_weight", False),
    )
    return LIBRARY.info("gemm", inputs, (arguments.get("out"),), arguments.get("backend", "auto"), arch)


@pytest.mark.library
@pytest.mark.parametrize("case", at(CASES, "library"))
def test_the_compiled_checks_say_the_same(case: Case) -> None:
    if case.places == SELECTION:
        require_code(LIBRARY, "90a")
    refuse_in_library(case, route)


@pytest.mark.gpu
@pytest.mark.parametrize("case", at(CASES, "cuda"))
def test_on_cuda(case: Case) -> None:
    check_refused(case, "cuda")
    cuda_works()


@pytest.mark.gpu
@pytest.mark.parametrize(("home", "away"), [("cuda:0", "cpu"), ("cpu", "cuda:0")])
def test_mixed_devices(home: str, away: str) -> None:
    """A29: each operand alone on another device than the rest; the first one that differs from a is named."""
    for name in ("a", "b", "bias"):
        mixed = valid(home)
        mixed[name] = mixed[name].to(away)
        named, a_place, place = ("b", away, home) if name == "a" else (name, home, away)
        with pytest.raises(ValueError) as raised:
            dandan_gemm.gemm(**mixed)
        assert str(raised.value) == f"gemm: {named} is on {place} but a is on {a_place}"
        cuda_works()


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_mixed_cuda_devices() -> None:
    """A29: one tensor on the first device and the rest on the second."""
    for name in ("b", "bias", "out"):
        arguments = {**valid("cuda:1"), "out": tensor(M, N)("cuda:1")}
        arguments[name] = arguments[name].to("cuda:0")
        with pytest.raises(ValueError, match=f"^gemm: {name} is on cuda:0 but a is on cuda:1$"):
            dandan_gemm.gemm(**arguments)
        cuda_works()


# --------------------------------------------------------------------------------------------------- odd, but valid

# What a, [..., 16], may be.
ODD_A: dict[str, Callable[[str], torch.Tensor]] = {
    "no rows": tensor(0, 16),
    "no columns": tensor(4, 0),
    "nothing": tensor(0, 0),
    "an empty leading dimension": tensor(2, 0, 16),
    "a vector": tensor(16),
    "an empty vector": tensor(0),
    "one column": tensor(5, 1),
    "one element": tensor(1),
    "leading ones": tensor(1, 1, 4, 16),
    "columns of a wider tensor": lambda device: tensor(4, 40)(device)[:, 8:24],
    "every second row": lambda device: tensor(8, 16)(device)[::2],
    "every second column": lambda device: tensor(4, 32)(device)[:, ::2],
    "transposed": lambda device: tensor(16, 4)(device).t(),
    "expanded rows": lambda device: tensor(1, 16)(device).expand(5, 16),
    "expanded columns": lambda device: tensor(5, 1)(device).expand(5, 16),
    "odd start": lambda device: tensor(65)(device)[1:].view(4, 16),
    "five uneven leading dimensions": lambda device: tensor(3, 3, 3, 3, 3, 16)(device)[:2, :2, :2, :2, :2],
    "heads of a qkv tensor": lambda device: tensor(7, 96)(device)[:, 32:64].view(7, 2, 16),
}
# What becomes of b, [N, K] or [K, N].
ODD_B: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "contiguous": lambda b: b,
    "transposed": lambda b: b.t().contiguous().t(),
    "with a row stride": lambda b: torch.cat((b, b), 1)[:, : b.shape[1]],
    "every second column": lambda b: b.repeat_interleave(2, 1)[:, ::2],
    "odd start": lambda b: torch.cat((b.new_zeros(1), b.reshape(-1)))[1:].view(b.shape),
}


def odd_arguments(a_kind: str, b_kind: str, transposed: bool, device: str, n: int = 24) -> dict[str, Any]:
    a = ODD_A[a_kind](device)
    k = a.shape[-1]
    shape = (n, k) if transposed else (k, n)
    return {"a": a, "b": ODD_B[b_kind](tensor(*shape)(device)), "weight_transposed": transposed}


@pytest.mark.parametrize("a_kind", ODD_A)
@pytest.mark.parametrize("b_kind", ODD_B)
@pytest.mark.parametrize("transposed", [False, True], ids=["[K, N]", "[N, K]"])
@pytest.mark.parametrize("device", ["cpu", "meta", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_odd_but_valid(a_kind: str, b_kind: str, transposed: bool, device: str) -> None:
    """Whole numbers, whose sums are exact in any order."""
    arguments = odd_arguments(a_kind, b_kind, transposed, device)
    shape = (*arguments["a"].shape[:-1], 24)
    for backend in ("auto", "torch"):
        found = dandan_gemm.gemm(**arguments, backend=backend)
        assert found.shape == shape
        assert found.device.type == device
        assert found.is_contiguous()
        if device != "meta":
            wide = reference.gemm(**arguments, compute_dtype=torch.float64)
            assert_bit_equal(found, wide.to(torch.float16))
    assert dandan_gemm.gemm_execution_info(**arguments).reason


@pytest.mark.library
@pytest.mark.parametrize("a_kind", ODD_A)
@pytest.mark.parametrize("b_kind", ODD_B)
@pytest.mark.parametrize("transposed", [False, True], ids=["[K, N]", "[N, K]"])
def test_the_compiled_checks_take_what_is_odd_but_valid(a_kind: str, b_kind: str, transposed: bool) -> None:
    arguments = odd_arguments(a_kind, b_kind, transposed, "cpu")
    assert route(arguments)["kernel"] in ("torch", *LIBRARY.codes)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("transposed", [False, True])
def test_no_columns_of_the_result(device: str, bias: bool, transposed: bool) -> None:
    arguments = valid(device, n=0, bias=bias, transposed=transposed)
    assert dandan_gemm.gemm(**arguments).shape == (M, 0)
    out = torch.empty(M, 0, dtype=torch.float16, device=device)
    assert dandan_gemm.gemm(**arguments, out=out) is out


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize(
    "kind", ["contiguous", "transposed", "every second column", "rows of a wider tensor", "odd start"]
)
@pytest.mark.parametrize("lead", [(4,), (2, 3), ()], ids=str)
def test_out_of_any_layout(device: str, kind: str, lead: tuple[int, ...]) -> None:
    """Every element is written, none beside it."""
    shape = (*lead, N)
    wide = torch.full((*lead, 2 * N + 8), -1.0, dtype=torch.float16, device=device)
    out = {
        "contiguous": lambda: torch.full(shape, -1.0, dtype=torch.float16, device=device),
        "transposed": lambda: torch.full(shape[::-1], -1.0, dtype=torch.float16, device=device).permute(
            *range(len(shape) - 1, -1, -1)
        ),
        "every second column": lambda: wide[..., : 2 * N : 2],
        "rows of a wider tensor": lambda: wide[..., 8 : 8 + N],
        "odd start": lambda: wide[..., 1 : 1 + N],
    }[kind]()
    arguments = {**valid(device), "a": tensor(*lead, K)(device)}
    expected = reference.gemm(**arguments, compute_dtype=torch.float64).to(torch.float16)
    assert dandan_gemm.gemm(**arguments, out=out) is out
    assert_bit_equal(out.contiguous(), expected)
    if out.untyped_storage().data_ptr() == wide.untyped_storage().data_ptr():
        assert int((wide != -1).sum()) == int((expected != -1).sum())


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_slices_of_one_tensor_are_not_an_overlap(device: str) -> None:
    """Rows of a and out of one tensor lie in turn."""
    wide = tensor(M, K + N)(device)
    before = wide.clone()
    arguments = {**valid(device), "a": wide[:, :K]}
    expected = dandan_gemm.gemm(**{**arguments, "a": before[:, :K].clone()})
    dandan_gemm.gemm(**arguments, out=wide[:, K:])
    assert_bit_equal(wide[:, K:].contiguous(), expected)
    assert torch.equal(wide[:, :K], before[:, :K])


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("kind", ["every second", "expanded", "odd start"])
def test_bias_of_any_layout(device: str, kind: str) -> None:
    bias = {
        "every second": lambda: tensor(2 * N)(device)[::2],
        "expanded": lambda: tensor(1)(device).expand(N),
        "odd start": lambda: tensor(N + 1)(device)[1:],
    }[kind]()
    arguments = {**valid(device), "bias": bias}
    expected = reference.gemm(**arguments, compute_dtype=torch.float64).to(torch.float16)
    assert_bit_equal(dandan_gemm.gemm(**arguments), expected)


@pytest.mark.parametrize("value", [0, 1, True, None, 0.5, "numpy"], ids=str)
def test_what_a_flag_may_be(value: Any) -> None:
    """What has a truth value, as torch's own dispatcher takes it."""
    if value == "numpy":
        value = pytest.importorskip("numpy").bool_(True)
    arguments = valid("cpu", transposed=bool(value))
    expected = dandan_gemm.gemm(**arguments)
    found = dandan_gemm.gemm(**{**arguments, "weight_transposed": value}, static_weight=value)
    assert_bit_equal(found, expected)
    assert dandan_gemm.gemm_execution_info(**{**arguments, "weight_transposed": value}).kernel == "torch"


@pytest.mark.parametrize("device", ["meta", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_an_own_kernel_may_be_named_for_meta_tensors(device: str) -> None:
    """What will run is known only on the device: the fake of a call that names a kernel is that of any call."""
    assert dandan_gemm.gemm(**valid(device), backend="sm80_mma").device.type == device


def test_backend_numbers_of_the_raw_operators() -> None:
    a = torch.ones(2, 8, dtype=torch.float16)
    for number in (-1, 7, 99):
        with pytest.raises(ValueError, match=f"^gemm: backend number {number} is unknown$"):
            torch.ops.dandan_gemm.gemm(a, a, None, True, False, number)


@pytest.mark.library
def test_backend_numbers_in_the_compiled_library() -> None:
    a = torch.ones(2, 8, dtype=torch.float16)
    for number in (-1, 7, 99):
        with pytest.raises(RuntimeError, match=f"^ValueError: gemm: backend number {number} is unknown"):
            torch.ops.dandan_gemm.gemm_info(a, a, None, True, False, number, None, 90)
    with pytest.raises(ValueError, match="^gemm_info: a is not on a CUDA device$"):
        LIBRARY.info("gemm", (a, a, None, True, False), (None,), "auto")


def test_no_warning_on_the_way(recwarn: pytest.WarningsRecorder) -> None:
    """A refusal is an exception and nothing else."""
    with pytest.raises(ValueError):
        dandan_gemm.gemm(**{**valid("cpu"), "bias": tensor(N - 1)("cpu")})
    assert not recwarn.list

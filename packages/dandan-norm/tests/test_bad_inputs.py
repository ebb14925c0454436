"""Bad inputs raise before any launch, with operator, argument, rule and value; odd but valid ones do not."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import pytest
import torch
from norm_bad_inputs import AFFINE, CASES, FIRST, OPS, SECOND, tensor, valid

import dandan_norm
from dandan_norm._ops import LIBRARY
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


def label(case: Case) -> str:
    return f"{case.op}-{case.name}"


def call(op: str, arguments: dict[str, Any]) -> Any:
    return getattr(dandan_norm, op)(**arguments)


def check_refused(case: Case, device: str) -> None:
    def ask(**arguments: Any) -> Any:
        return dandan_norm.elementwise_execution_info(case.op, **arguments)

    refuse(case, device, getattr(dandan_norm, case.op), ask)


def test_the_table_holds_every_operator_and_kind() -> None:
    check_table(CASES, {})
    for op in OPS:
        least = {"cpu": 40, "meta": 30, "fake": 30, "library": 25, "cuda": 35}
        check_table([case for case in CASES if case.op == op], least)
    assert {case.error.__name__ for case in CASES} == {"TypeError", "ValueError", "BackendUnavailableError"}


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("backend", ["auto", "torch"])
def test_the_arguments_that_the_table_starts_from_are_valid(op: str, backend: str) -> None:
    """Otherwise each of its cases could be refused for a reason of its own."""
    result = call(op, {**valid(op, "cpu"), "backend": backend})
    assert (result[0] if isinstance(result, tuple) else result).shape[:1] == (4,)


@pytest.mark.parametrize("case", at(CASES, "cpu", label))
def test_on_the_cpu(case: Case) -> None:
    check_refused(case, "cpu")


@pytest.mark.parametrize("case", at(CASES, "meta", label))
def test_on_meta_tensors(case: Case) -> None:
    check_refused(case, "meta")


@pytest.mark.parametrize("case", at(CASES, "fake", label))
def test_on_fake_tensors(case: Case) -> None:
    refuse_on_fakes(case, getattr(dandan_norm, case.op))


# A few of them through the whole of torch.compile, which wraps the error in its own.
COMPILED = [
    case
    for case in CASES
    if (case.op, case.name)
    in {
        ("rms_norm", "weight [63]"),
        ("rms_norm", "eps -1e-06"),
        ("layer_norm", "bias float64"),
        ("residual_rms_norm", "residual [4, 63]"),
        ("residual_rms_norm", "out[1] expanded"),
        ("softmax", "x int32"),
        ("silu_and_mul", "up bfloat16"),
        ("argmax", "zero columns"),
    }
]


@pytest.mark.parametrize("case", COMPILED, ids=label)
def test_under_compile(case: Case) -> None:
    refuse_under_compile(case, getattr(dandan_norm, case.op))


def test_every_case_of_compile_is_in_the_table() -> None:
    assert len(COMPILED) == 8


def route(case: Case, arguments: dict[str, Any], arch: int = 90) -> dict[str, Any]:
    """The compiled library's answer for a device of an architecture, after its own checks."""
    bound = inspect.signature(getattr(dandan_norm, case.op)).bind(**arguments)
    bound.apply_defaults()
    backend, out = bound.arguments.pop("backend"), bound.arguments.pop("out")
    count = len(LIBRARY.operators[case.op].outputs)
    outputs = (None,) * count if out is None else (out,) if count == 1 else out
    return LIBRARY.info(case.op, tuple(bound.arguments.values()), outputs, backend, arch)


@pytest.mark.library
@pytest.mark.parametrize("case", at(CASES, "library", label))
def test_the_compiled_checks_say_the_same(case: Case) -> None:
    if case.places == SELECTION:
        require_code(LIBRARY, "90a")
    refuse_in_library(case, lambda arguments: route(case, arguments))


@pytest.mark.gpu
@pytest.mark.parametrize("case", at(CASES, "cuda", label))
def test_on_cuda(case: Case) -> None:
    check_refused(case, "cuda")
    cuda_works()


@pytest.mark.gpu
@pytest.mark.parametrize("op", [op for op in OPS if op in AFFINE or op in SECOND])
@pytest.mark.parametrize(("home", "away"), [("cuda:0", "cpu"), ("cpu", "cuda:0")])
def test_mixed_devices(op: str, home: str, away: str) -> None:
    """Each operand alone on another device than the rest; the first one that differs from x is named."""
    x, *others = valid(op, home)
    for name in (x, *others):
        mixed = {key: value.to(away if key == name else home) for key, value in valid(op, home).items()}
        named, x_place, place = (others[0], away, home) if name == x else (name, home, away)
        with pytest.raises(ValueError) as raised:
            call(op, mixed)
        assert str(raised.value) == f"{op}: {named} is on {place} but {x} is on {x_place}"
        cuda_works()


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
@pytest.mark.parametrize("op", OPS)
def test_mixed_cuda_devices(op: str) -> None:
    """A29: an output on the second device."""
    arguments = valid(op, "cuda:1")
    out = call(op, {key: t.to("cuda:0") for key, t in arguments.items()})
    name = "out[0]" if isinstance(out, tuple) else "out"
    with pytest.raises(ValueError) as raised:
        call(op, {**arguments, "out": out})
    assert str(raised.value) == f"{op}: {name} is on cuda:0 but {FIRST[op]} is on cuda:1"
    cuda_works()


# -------------------------------------------------------------------------------------------------- odd, but valid


def strided(device: str) -> torch.Tensor:
    return tensor(4, 130)(device)[:, :64]


# What the first argument (and the second one) may be.
ODD: dict[str, Callable[[str], torch.Tensor]] = {
    "no rows": tensor(0, 64),
    "no columns": tensor(4, 0),
    "nothing": tensor(0, 0),
    "an empty leading dimension": tensor(2, 0, 64),
    "one row without a leading dimension": tensor(64),
    "one column": tensor(5, 1),
    "one element": tensor(1),
    "leading ones": tensor(1, 1, 4, 64),
    "columns of a wider tensor": strided,
    "every second row": lambda device: tensor(8, 64)(device)[::2],
    "every second column": lambda device: tensor(4, 128)(device)[:, ::2],
    "transposed": lambda device: tensor(64, 4)(device).t(),
    "expanded rows": lambda device: tensor(1, 64)(device).expand(5, 64),
    "expanded columns": lambda device: tensor(5, 1)(device).expand(5, 64),
    "odd start": lambda device: tensor(257)(device)[1:].view(4, 64),
    "five uneven leading dimensions": lambda device: tensor(3, 3, 3, 3, 3, 8)(device)[:2, :2, :2, :2, :2],
    "heads of a qkv tensor": lambda device: tensor(37, 384)(device)[:, 128:256].view(37, 2, 64),
}


def outputs(result: Any) -> tuple[torch.Tensor, ...]:
    return result if isinstance(result, tuple) else (result,)


def odd_arguments(op: str, kind: str, device: str) -> dict[str, Any] | None:
    x = ODD[kind](device)
    if op == "argmax" and x.shape[-1] == 0:
        return None
    arguments = valid(op, device, tuple(x.shape))
    return {key: ODD[kind](device) if key in (FIRST[op], SECOND.get(op)) else t for key, t in arguments.items()}


def check_odd(op: str, kind: str, device: str) -> None:
    arguments = odd_arguments(op, kind, device)
    if arguments is None:
        return
    plain = {key: t.contiguous().clone() for key, t in arguments.items()}
    shape = arguments[FIRST[op]].shape
    for backend in ("auto", "torch"):
        found, expected = (outputs(call(op, {**a, "backend": backend})) for a in (arguments, plain))
        for a, b in zip(found, expected, strict=True):
            assert a.shape == (shape[:-1] if op == "argmax" else shape)
            assert a.device.type == device
            assert a.is_contiguous()
            if device != "meta":
                assert_bit_equal(a, b, f"{op} {kind}")
    assert dandan_norm.elementwise_execution_info(op, **arguments).reason


@pytest.mark.parametrize("kind", ODD)
@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("device", ["cpu", "meta", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_odd_but_valid(op: str, kind: str, device: str) -> None:
    check_odd(op, kind, device)


@pytest.mark.library
@pytest.mark.parametrize("kind", ODD)
@pytest.mark.parametrize("op", OPS)
def test_the_compiled_checks_take_what_is_odd_but_valid(op: str, kind: str) -> None:
    arguments = odd_arguments(op, kind, "cpu")
    if arguments is not None:
        case = Case(op, kind, lambda device: {}, ValueError, "", frozenset())
        answer = route(case, arguments)
        assert answer["kernel"] in ("torch", *LIBRARY.codes)
        if kind == "five uneven leading dimensions":
            assert answer["fallback_reason"] == "the leading dimensions do not merge into four"


def in_place(op: str, device: str, x: torch.Tensor) -> None:
    """out = x: the values of the call that allocates."""
    arguments = {**valid(op, device, tuple(x.shape)), FIRST[op]: x}
    expected = call(op, {key: t.clone() for key, t in arguments.items()})
    result = call(op, {**arguments, "out": x})
    assert result is x
    assert_bit_equal(x.clone(), expected, op)


@pytest.mark.parametrize("op", ["rms_norm", "layer_norm", "softmax", "silu_and_mul"])
@pytest.mark.parametrize(
    "kind", ["one row without a leading dimension", "columns of a wider tensor", "odd start", "no rows"]
)
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_out_is_x(op: str, kind: str, device: str) -> None:
    in_place(op, device, ODD[kind](device))


@pytest.mark.parametrize("swapped", [False, True])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_out_is_x_and_residual(swapped: bool, device: str) -> None:
    x, residual = tensor(4, 64)(device), tensor(4, 64)(device) * 0.5
    expected = dandan_norm.residual_rms_norm(x.clone(), residual.clone())
    out = (residual, x) if swapped else (x, residual)
    assert dandan_norm.residual_rms_norm(x, residual, out=out) is out
    for a, b, name in zip(out, expected, ("normalized", "summed"), strict=True):
        assert_bit_equal(a, b, name)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_out_is_up(device: str) -> None:
    gate, up = (tensor(4, 128)(device) * 0.25).chunk(2, -1)
    expected = dandan_norm.silu_and_mul(gate.clone(), up.clone())
    dandan_norm.silu_and_mul(gate, up, out=up)
    assert_bit_equal(up.clone(), expected)


@pytest.mark.parametrize("op", ["rms_norm", "layer_norm", "softmax"])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_slices_of_one_tensor_are_not_an_overlap(op: str, device: str) -> None:
    """A05: rows of q and k of one qkv tensor lie in turn; q may be written while k is read, and either in place."""
    qkv = tensor(37, 12 * 16)(device)
    before = qkv.clone()
    q, k, v = qkv[:, :64].view(37, 4, 16), qkv[:, 64:128].view(37, 4, 16), qkv[:, 128:].view(37, 4, 16)
    arguments = {**valid(op, device, (37, 4, 16)), FIRST[op]: k.contiguous()}
    expected = call(op, arguments)
    call(op, {**arguments, FIRST[op]: k, "out": q})
    assert_bit_equal(q.contiguous(), expected)
    assert torch.equal(qkv[:, 64:], before[:, 64:])
    call(op, {**arguments, FIRST[op]: k, "out": k})
    assert_bit_equal(k.contiguous(), expected)
    assert torch.equal(v, before[:, 128:].view(37, 4, 16))


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("device", ["meta", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_an_own_kernel_may_be_named_for_meta_tensors(op: str, device: str) -> None:
    """What will run is known only on the device: the fake of a call that names a kernel is that of any call."""
    kernel = "sm80_elementwise" if op == "silu_and_mul" else "sm80_row"
    result = outputs(call(op, {**valid(op, device), "backend": kernel}))
    assert all(each.device.type == device for each in result)


# eps may be any number that torch takes for a float.
@pytest.mark.parametrize("op", AFFINE)
@pytest.mark.parametrize("backend", ["auto", "torch"])
@pytest.mark.parametrize("eps", [1, True, 2.0**-126, 3e38, "fraction", "float32"], ids=str)
def test_numbers_that_eps_may_be(op: str, backend: str, eps: Any) -> None:
    if eps == "fraction":
        eps = Fraction(1, 2)
    elif eps == "float32":
        eps = pytest.importorskip("numpy").float32(0.5)
    arguments = valid(op, "cpu")
    found = outputs(call(op, {**arguments, "eps": eps, "backend": backend}))
    for a, b in zip(found, outputs(call(op, {**arguments, "eps": float(eps)})), strict=True):
        assert_bit_equal(a, b)


@pytest.mark.parametrize("name", ["", "rmsnorm", None, []])
def test_unknown_operator_of_execution_info(name: Any) -> None:
    text = f"elementwise_execution_info: op {name!r} is unknown; it is one of argmax, layer_norm, residual_rms_norm, "
    with pytest.raises(ValueError, match=re.escape(text)):
        dandan_norm.elementwise_execution_info(name, torch.ones(1))


def test_backend_numbers_of_the_raw_operators() -> None:
    for number in (-1, 7, 99):
        with pytest.raises(ValueError, match=f"^softmax: backend number {number} is unknown$"):
            torch.ops.dandan_norm.softmax(torch.ones(4), number)


@pytest.mark.library
def test_backend_numbers_in_the_compiled_library() -> None:
    for number in (-1, 7, 99):
        with pytest.raises(RuntimeError, match=f"^ValueError: softmax: backend number {number} is unknown"):
            torch.ops.dandan_norm.softmax_info(torch.ones(4), number, None, 90)
    with pytest.raises(ValueError, match="^softmax_info: x is not on a CUDA device$"):
        LIBRARY.info("softmax", (torch.ones(4),), (None,), "auto")


def test_no_warning_on_the_way(recwarn: pytest.WarningsRecorder) -> None:
    """A refusal is an exception and nothing else."""
    with pytest.raises(ValueError):
        dandan_norm.rms_norm(torch.ones(2, 8), torch.ones(7))
    assert not recwarn.list

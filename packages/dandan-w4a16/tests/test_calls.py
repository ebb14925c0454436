"""Gradients, schemas, and what a call says of itself."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from w4a16_cases import (
    DTYPES,
    generator,
    random_weight,
    tensors,
    weight_of,
)

from dandan_ops_core.backend import BackendUnavailableError
from dandan_ops_core.testing import assert_bit_equal
from dandan_w4a16 import (
    QuantizedLinear,
    reference,
    w4a16_linear,
    w4a16_linear_execution_info,
)
from dandan_w4a16._ops import LIBRARY

EVERY_DTYPE = pytest.mark.parametrize("dtype", DTYPES, ids=str)


# --------------------------------------------------------------------------------------------------------- gradients


@EVERY_DTYPE
@pytest.mark.parametrize("lead", [(6,), (2, 3), ()], ids=str)
@pytest.mark.parametrize("backend", ["auto", "torch"])
def test_gradients(dtype: torch.dtype, lead: tuple[int, ...], backend: str) -> None:
    """A51: those of the product with the dequantised weight, to one rounding."""
    weight = random_weight(40, 128)
    x = torch.randn(*lead, 128, generator=generator(1)).to(dtype)
    bias = torch.randn(40, generator=generator(2)).to(dtype)
    up = torch.randn(*lead, 40, generator=generator(3)).to(dtype)
    mine = [t.clone().requires_grad_() for t in (x, bias)]
    found = w4a16_linear(mine[0], *tensors(weight), bias=mine[1], backend=backend)
    assert found.requires_grad
    found.backward(up)
    theirs = [t.double().requires_grad_() for t in (x, bias)]
    (theirs[0] @ weight_of(weight, dtype).double().t() + theirs[1]).backward(up.double())
    for grad, expected in zip((t.grad for t in mine), (t.grad for t in theirs), strict=True):
        assert grad is not None
        assert expected is not None
        assert grad.dtype == dtype
        limit = expected.abs().max() * torch.finfo(dtype).eps
        assert (grad.double() - expected).abs().max() <= limit


def test_gradient_of_x_alone_and_of_bias_alone() -> None:
    weight = random_weight(8, 64, whole=True)
    for which in ("x", "bias"):
        x, bias = torch.ones(2, 64).half(), torch.ones(8).half()
        wanted = x if which == "x" else bias
        wanted.requires_grad_()
        w4a16_linear(x, *tensors(weight), bias=bias).sum().backward()
        expected = weight_of(weight, torch.float16).sum(0).expand(2, 64) if which == "x" else torch.full((8,), 2.0)
        assert torch.equal(wanted.grad.float(), expected.float())  # type: ignore[union-attr]


def test_a_second_derivative_is_refused() -> None:
    """There is none in the library: an error, not a graph that is silently cut."""
    x, up = torch.ones(2, 64).half().requires_grad_(), torch.ones(2, 8).half().requires_grad_()
    out = w4a16_linear(x, *tensors(random_weight(8, 64)))
    (grad,) = torch.autograd.grad(out, x, up, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()


def test_grad_x_adds_over_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reference, "TILE", 64 * 5)
    weight = random_weight(24, 64, whole=True)
    grad = torch.randint(-2, 3, (3, 24), generator=generator(4)).half()
    found = reference.grad_x(grad, *tensors(weight), 64)
    assert_bit_equal(found, (grad.double() @ weight_of(weight, torch.float16).double()).half())


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_no_gradient_is_recorded_where_none_is_wanted(mode: type) -> None:
    weight = random_weight(8, 64)
    x = torch.ones(2, 64).half().requires_grad_()
    with mode():
        assert not w4a16_linear(x, *tensors(weight)).requires_grad


def test_gradients_that_are_refused() -> None:
    q, s, z = tensors(random_weight(8, 64, zero_mode="float", scale_dtype=torch.float32))
    x = torch.ones(2, 64).half()
    for changed, name in (
        ((q, s.clone().requires_grad_(), z), "scales"),
        ((q, s, z.clone().requires_grad_()), "zeros"),
    ):
        text = (
            f"w4a16_linear: {name} require a gradient; gradients are computed for x and bias alone, call it with "
            f"{name}.detach() or under torch.no_grad()"
        )
        for call in (w4a16_linear, w4a16_linear_execution_info):
            with pytest.raises(ValueError) as raised:
                call(x, *changed, zero_mode="float")
            assert str(raised.value) == text
        with torch.no_grad():
            w4a16_linear(x, *changed, zero_mode="float")
    with pytest.raises(ValueError, match="^w4a16_linear: out= takes no part in automatic differentiation"):
        w4a16_linear(x.clone().requires_grad_(), q, s, z, zero_mode="float", out=torch.empty(2, 8).half())


# ------------------------------------------------------------------------------------------------- schemas, execution


def test_schemas() -> None:
    """What the compiled library defines, word for word."""
    inputs = "Tensor x, Tensor qweight, Tensor scales, Tensor zeros, Tensor? bias, int group_size, int backend"
    assert LIBRARY.operators["w4a16_linear"].schemas() == [
        f"w4a16_linear({inputs}) -> Tensor",
        f"w4a16_linear_out({inputs}, Tensor(a!) out) -> ()",
        f"w4a16_linear_info({inputs}, Tensor? out, int arch) -> Tensor",
    ]
    for schema in LIBRARY.operators["w4a16_linear"].schemas()[: 3 if LIBRARY.library.loaded else 2]:
        assert str(LIBRARY.op(schema.split("(")[0])._schema) == f"dandan_w4a16::{schema}"


def test_execution_info_on_the_cpu() -> None:
    weight = random_weight(8, 64)
    x = torch.ones(2, 64).half()
    info = w4a16_linear_execution_info(x, *tensors(weight))
    assert (info.op, info.backend, info.kernel, info.device) == ("w4a16_linear", "torch", "torch", "cpu")
    assert info.fallback_reason == "x is on cpu, the own kernels run on CUDA devices"
    assert w4a16_linear_execution_info(x, *tensors(weight), backend="torch").reason == "asked for"
    x.requires_grad_()
    assert w4a16_linear_execution_info(x, *tensors(weight)).reason == "an argument needs a gradient"


def test_cuda_is_refused_with_the_reason() -> None:
    weight = random_weight(8, 64)
    x = torch.ones(2, 64).half()
    for call in (w4a16_linear, w4a16_linear_execution_info):
        for mode in (torch.enable_grad, torch.no_grad):
            with mode(), pytest.raises(BackendUnavailableError) as raised:
                call(x, *tensors(weight), backend="cuda")
            assert str(raised.value) == (
                'w4a16_linear: backend "cuda" cannot run: x is on cpu, the own kernels run on CUDA devices; "auto" and '
                '"torch" can'
            )


@pytest.mark.parametrize("why", ["the package was not built"])
def test_on_cuda_without_the_library_the_reason_is_told(why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fake tensors are on a CUDA device without one."""
    monkeypatch.setattr(LIBRARY, "library", dataclasses.replace(LIBRARY.library, loaded=False, reason=why))
    with FakeTensorMode():
        x = torch.empty(2, 64, dtype=torch.float16, device="cuda")
        weight = (
            torch.empty(8, 8, dtype=torch.int32, device="cuda"),
            torch.empty(8, 1, dtype=torch.float16, device="cuda"),
            torch.empty(8, 1, dtype=torch.uint8, device="cuda"),
        )
        info = w4a16_linear_execution_info(x, *weight)
        assert (info.backend, info.reason, info.fallback_reason) == (
            "torch",
            "the compiled library is not loaded",
            why,
        )
        with pytest.raises(BackendUnavailableError) as raised:
            w4a16_linear_execution_info(x, *weight, backend="cuda")
        layer = QuantizedLinear(64, 8, device="cuda")
        assert not layer.finalize().is_finalized
    assert str(raised.value) == f'w4a16_linear: backend "cuda" cannot run: {why}; "auto" and "torch" can'

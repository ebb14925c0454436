"""torch.ops.dandan_w4a16: schemas, CPU kernels, fakes; CUDA kernels where the compiled library is loaded."""

from __future__ import annotations

from typing import Any

import torch

from dandan_ops_core.registry import Operator, OperatorLibrary
from dandan_w4a16 import checks, kernel_order, reference

KERNELS = ("sm80_decode", "sm90_decode", "sm80_mma", "sm90a_wgmma", "sm80_dequantize")
"""Own kernels in the order of their numbers; csrc/routes.h has the same."""

INPUTS = "Tensor x, Tensor qweight, Tensor scales, Tensor zeros, Tensor? bias, int group_size"
PACKED_INPUTS = "Tensor x, Tensor codes, Tensor scales, Tensor? bias, int n, int k, int group_size"

ORDERING = (
    "repack(Tensor qweight, Tensor scales, Tensor zeros, int group_size) -> (Tensor, Tensor)",
    "unpack(Tensor codes, Tensor scales, int n, int k, int group_size) -> (Tensor, Tensor, Tensor)",
)
"""From one order of a weight to the other. `repack` ends with a synchronisation: what it returns is there."""

MEASURING = (
    f"packed_tile_out({PACKED_INPUTS}, int backend, int config, int split, Tensor(a!) out) -> ()",
    f"packed_candidates({PACKED_INPUTS}, Tensor? out, int arch) -> Tensor",
)
"""What the compiled library defines for tests, benchmarks and calibration."""

GRADIENTS = (
    "w4a16_linear_grad_x(Tensor grad, Tensor qweight, Tensor scales, Tensor zeros, int group_size) -> Tensor",
    "packed_linear_grad_x(Tensor grad, Tensor codes, Tensor scales, int n, int k, int group_size) -> Tensor",
)
"""Python's, with the compiled library and without it."""


class _Differentiable(torch.autograd.Function):
    """The torch route with gradients for x and bias. It keeps the packed weight, and dequantises again by tiles.

    `weight` is what the operator `name` takes between x and backend beside the bias: tensors, then numbers.
    """

    @staticmethod
    def forward(ctx: Any, name: str, x: torch.Tensor, bias: torch.Tensor | None, *weight: Any) -> torch.Tensor:
        ctx.name, ctx.bias_dtype = name, None if bias is None else bias.dtype
        tensors = [each for each in weight if isinstance(each, torch.Tensor)]
        ctx.numbers = weight[len(tensors) :]
        ctx.save_for_backward(*tensors)
        # The operator rather than its Python, so that torch.compile sees one node and not a loop over tiles.
        result: torch.Tensor = LIBRARY.op(name)(x, *tensors, bias, *ctx.numbers, LIBRARY.codes["torch"])
        return result

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        grad_x = grad_bias = None
        if ctx.needs_input_grad[1]:
            grad_x = LIBRARY.op(f"{ctx.name}_grad_x")(grad, *ctx.saved_tensors, *ctx.numbers)
        if ctx.needs_input_grad[2]:
            leading = tuple(range(grad.dim() - 1))  # none for a vector, whose gradient needs no sum
            total = grad.sum(leading, dtype=torch.float32) if leading else grad
            grad_bias = total.to(ctx.bias_dtype)
        return None, grad_x, grad_bias, *(None for _ in (*ctx.saved_tensors, *ctx.numbers))


def _needs_gradients(x: torch.Tensor, bias: torch.Tensor | None) -> bool:
    return torch.is_grad_enabled() and (x.requires_grad or (bias is not None and bias.requires_grad))


def _torch_route(
    x: torch.Tensor,
    qweight: torch.Tensor,
    scales: torch.Tensor,
    zeros: torch.Tensor,
    bias: torch.Tensor | None,
    group_size: int,
) -> torch.Tensor:
    if torch.is_grad_enabled():
        checks.no_gradient("w4a16_linear", scales, zeros)
    if _needs_gradients(x, bias):
        result: torch.Tensor = _Differentiable.apply("w4a16_linear", x, bias, qweight, scales, zeros, group_size)
        return result
    return reference.w4a16_linear(x, qweight, scales, zeros, bias, group_size)


def _packed_torch_route(
    x: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor | None, n: int, k: int, group: int
) -> torch.Tensor:
    if _needs_gradients(x, bias):
        result: torch.Tensor = _Differentiable.apply("packed_linear", x, bias, codes, scales, n, k, group)
        return result
    return kernel_order.packed_linear(x, codes, scales, bias, n, k, group)


def _result(
    x: torch.Tensor,
    qweight: torch.Tensor,
    scales: torch.Tensor,
    zeros: torch.Tensor,
    bias: torch.Tensor | None,
    group_size: int,
) -> torch.Tensor:
    return x.new_empty((*x.shape[:-1], qweight.shape[0]))


def packed_result(
    x: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor | None, n: int, k: int, group: int
) -> torch.Tensor:
    """The uninitialised result of `packed_linear`."""
    return x.new_empty((*x.shape[:-1], n))


LIBRARY = OperatorLibrary(
    "dandan_w4a16",
    KERNELS,
    [
        Operator("w4a16_linear", INPUTS, ("out",), checks.w4a16_linear, _torch_route, _result),
        Operator("packed_linear", PACKED_INPUTS, ("out",), checks.packed_linear, _packed_torch_route, packed_result),
    ],
)


def _repack(
    qweight: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor, group_size: int
) -> tuple[torch.Tensor, torch.Tensor]:
    checks.repack(qweight, scales, zeros, group_size)
    return kernel_order.repack(qweight, scales, zeros, group_size)


def _unpack(
    codes: torch.Tensor, scales: torch.Tensor, n: int, k: int, group_size: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    checks.ordered_weight("unpack", codes, scales, n, k, group_size)
    return kernel_order.unpack(codes, scales, n, k, group_size)


def _repack_result(
    qweight: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor, group_size: int
) -> tuple[torch.Tensor, torch.Tensor]:
    checks.repack(qweight, scales, zeros, group_size)
    n, k = qweight.shape[0], qweight.shape[1] * 8
    elements = kernel_order.scale_elements(n, k, group_size)
    return qweight.new_empty(kernel_order.code_words(n, k)), scales.new_empty(elements)


def _unpack_result(
    codes: torch.Tensor, scales: torch.Tensor, n: int, k: int, group_size: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    checks.ordered_weight("unpack", codes, scales, n, k, group_size)
    grouped = (n, (k + group_size - 1) // group_size)
    zeros = torch.empty(grouped, dtype=torch.uint8, device=codes.device)
    return codes.new_empty(n, k // 8), scales.new_empty(grouped), zeros


def _grad_result(
    grad: torch.Tensor, qweight: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor, group_size: int
) -> torch.Tensor:
    return grad.new_empty((*grad.shape[:-1], qweight.shape[1] * 8))


def _packed_grad_result(
    grad: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor, n: int, k: int, group_size: int
) -> torch.Tensor:
    return grad.new_empty((*grad.shape[:-1], k))


def _register(library: torch.library.Library) -> None:
    for schema in (*GRADIENTS, *(() if LIBRARY.library.loaded else ORDERING)):
        library.define(schema)
    for name, kernel, fake, keys in (
        ("repack", _repack, _repack_result, ("CPU",)),
        ("unpack", _unpack, _unpack_result, ("CPU",)),
        ("w4a16_linear_grad_x", reference.grad_x, _grad_result, ("CPU", "CUDA")),
        ("packed_linear_grad_x", kernel_order.grad_x, _packed_grad_result, ("CPU", "CUDA")),
    ):
        for key in keys:
            library.impl(name, kernel, key)
        torch.library.register_fake(f"dandan_w4a16::{name}", fake, lib=library)


_FRAGMENT = torch.library.Library("dandan_w4a16", "FRAGMENT")
_register(_FRAGMENT)

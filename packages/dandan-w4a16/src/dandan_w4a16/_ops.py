"""torch.ops.dandan_w4a16: schemas, CPU kernel, fakes; CUDA kernels where the compiled library is loaded."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from dandan_ops_core.registry import Operator, OperatorLibrary
from dandan_w4a16 import checks, reference

KERNELS: tuple[str, ...] = ()
"""Own kernels in the order of their numbers."""

INPUTS = "Tensor x, Tensor qweight, Tensor scales, Tensor zeros, Tensor? bias, int group_size"

NO_KERNELS = "dandan-w4a16 0.1.0 has no CUDA kernels yet, they follow"


class _Differentiable(torch.autograd.Function):
    """The torch route with gradients for x and bias. It keeps the packed weight, and dequantises again by tiles."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        qweight: torch.Tensor,
        scales: torch.Tensor,
        zeros: torch.Tensor,
        bias: torch.Tensor | None,
        group_size: int,
    ) -> torch.Tensor:
        ctx.save_for_backward(qweight, scales, zeros)
        ctx.group_size = group_size
        ctx.bias_dtype = None if bias is None else bias.dtype
        # The operator rather than its Python, so that torch.compile sees one node and not a loop over tiles.
        result: torch.Tensor = LIBRARY.op("w4a16_linear")(
            x, qweight, scales, zeros, bias, group_size, LIBRARY.codes["torch"]
        )
        return result

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        grad_x = grad_bias = None
        if ctx.needs_input_grad[0]:
            grad_x = torch.ops.dandan_w4a16.w4a16_linear_grad_x(grad, *ctx.saved_tensors, ctx.group_size)
        if ctx.needs_input_grad[4]:
            leading = tuple(range(grad.dim() - 1))  # none for a vector, whose gradient needs no sum
            total = grad.sum(leading, dtype=torch.float32) if leading else grad
            grad_bias = total.to(ctx.bias_dtype)
        return grad_x, None, None, None, grad_bias, None


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
        if x.requires_grad or (bias is not None and bias.requires_grad):
            result: torch.Tensor = _Differentiable.apply(x, qweight, scales, zeros, bias, group_size)
            return result
    return reference.w4a16_linear(x, qweight, scales, zeros, bias, group_size)


def _result(
    x: torch.Tensor,
    qweight: torch.Tensor,
    scales: torch.Tensor,
    zeros: torch.Tensor,
    bias: torch.Tensor | None,
    group_size: int,
) -> torch.Tensor:
    return x.new_empty((*x.shape[:-1], qweight.shape[0]))


def _grad_result(
    grad: torch.Tensor, qweight: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor, group_size: int
) -> torch.Tensor:
    return grad.new_empty((*grad.shape[:-1], qweight.shape[1] * 8))


LIBRARY = OperatorLibrary(
    "dandan_w4a16", KERNELS, [Operator("w4a16_linear", INPUTS, ("out",), checks.w4a16_linear, _torch_route, _result)]
)
if not KERNELS:
    # The loader says how the package was built, which is not why there are no kernels.
    LIBRARY.library = dataclasses.replace(LIBRARY.library, reason=NO_KERNELS)

# The gradient is Python's, with the compiled library and without it.
_FRAGMENT = torch.library.Library("dandan_w4a16", "FRAGMENT")
_FRAGMENT.define(
    "w4a16_linear_grad_x(Tensor grad, Tensor qweight, Tensor scales, Tensor zeros, int group_size) -> Tensor"
)
_FRAGMENT.impl("w4a16_linear_grad_x", reference.grad_x, "CPU")
_FRAGMENT.impl("w4a16_linear_grad_x", reference.grad_x, "CUDA")
torch.library.register_fake("dandan_w4a16::w4a16_linear_grad_x", _grad_result, lib=_FRAGMENT)

"""What each operator means, in plain PyTorch: torch backend, CPU kernel and, in float64, the truth of the tests.

`compute_dtype` is the dtype of the arithmetic. With the default, float32, the result is rounded once to the dtype of x.
With float64 the result stays in float64, unrounded; what an operator rounds on its way by definition (the sum of
residual_rms_norm, the activation of silu_and_mul) is rounded in both.
"""

from __future__ import annotations

import torch

__all__ = ["argmax", "layer_norm", "residual_rms_norm", "rms_norm", "silu_and_mul", "softmax"]


def _rounded(result: torch.Tensor, dtype: torch.dtype, compute_dtype: torch.dtype) -> torch.Tensor:
    return result.to(dtype) if compute_dtype == torch.float32 else result


def rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor | None = None,
    eps: float = 1e-6,
    *,
    compute_dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """x * rsqrt(mean(x^2) + eps) * weight over the last dimension; the weight is multiplied before the rounding.

    Args:
        x: [..., cols], a floating dtype.
        weight: [cols], any floating dtype, or None.
        eps: added to the mean square inside the root.
        compute_dtype: of the arithmetic.

    Returns:
        [..., cols], contiguous.

    Source: Zhang and Sennrich, "Root Mean Square Layer Normalization", 2019.
    """
    values = x.to(compute_dtype)
    result = values * torch.rsqrt(values.square().mean(-1, keepdim=True) + float(eps))
    if weight is not None:
        result = result * weight.to(compute_dtype)
    return _rounded(result, x.dtype, compute_dtype).contiguous()


def residual_rms_norm(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor | None = None,
    eps: float = 1e-6,
    *,
    compute_dtype: torch.dtype = torch.float32,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(rms_norm(s), s) with s = x + residual rounded to the dtype of x.

    Args:
        x: [..., cols], a floating dtype.
        residual: shape and dtype of x.
        weight: [cols], any floating dtype, or None.
        eps: added to the mean square inside the root.
        compute_dtype: of the arithmetic of the norm. The sum is always that of FP32.

    Returns:
        (normalized, summed), both [..., cols], contiguous.

    Source: the composition of an addition and Zhang and Sennrich, 2019.
    """
    summed = (x.to(torch.float32) + residual.to(torch.float32)).to(x.dtype).contiguous()
    return rms_norm(summed, weight, eps, compute_dtype=compute_dtype), summed


def layer_norm(
    x: torch.Tensor,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    eps: float = 1e-5,
    *,
    compute_dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """(x - mean) * rsqrt(variance + eps) * weight + bias over the last dimension, the variance of the centred row.

    Args:
        x: [..., cols], a floating dtype.
        weight: [cols], any floating dtype, or None.
        bias: [cols], any floating dtype, or None.
        eps: added to the variance inside the root.
        compute_dtype: of the arithmetic.

    Returns:
        [..., cols], contiguous.

    Source: Ba, Kiros and Hinton, "Layer Normalization", 2016.
    """
    values = x.to(compute_dtype)
    centred = values - values.mean(-1, keepdim=True)
    centred = centred - centred.mean(-1, keepdim=True)  # the mean was rounded: take the rest off as well
    result = centred * torch.rsqrt(centred.square().mean(-1, keepdim=True) + float(eps))
    if weight is not None:
        result = result * weight.to(compute_dtype)
    if bias is not None:
        result = result + bias.to(compute_dtype)
    return _rounded(result, x.dtype, compute_dtype).contiguous()


def softmax(x: torch.Tensor, *, compute_dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """exp(x - max) / sum(exp(x - max)) over the last dimension.

    Args:
        x: [..., cols], a floating dtype.
        compute_dtype: of the arithmetic.

    Returns:
        [..., cols], contiguous.
    """
    return _rounded(torch.softmax(x.to(compute_dtype), -1), x.dtype, compute_dtype).contiguous()


def silu_and_mul(gate: torch.Tensor, up: torch.Tensor, *, compute_dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """silu(gate), rounded to the dtype of gate, times up.

    Args:
        gate: [..., cols], a floating dtype.
        up: shape and dtype of gate.
        compute_dtype: of the arithmetic. The activation is rounded to the dtype of gate with any of them.

    Returns:
        [..., cols], contiguous.

    Source: Shazeer, "GLU Variants Improve Transformer", 2020.
    """
    values = gate.to(compute_dtype)
    activated = (values / (1 + torch.exp(-values))).to(gate.dtype)
    return _rounded(activated.to(compute_dtype) * up.to(compute_dtype), gate.dtype, compute_dtype).contiguous()


def argmax(x: torch.Tensor, *, compute_dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Index of the first NaN, else the lowest index of the maximum, over the last dimension.

    Args:
        x: [..., cols] with at least one column, a floating dtype.
        compute_dtype: changes nothing.

    Returns:
        [...], int64.
    """
    return torch.argmax(x, -1)

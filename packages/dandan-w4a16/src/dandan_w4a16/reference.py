"""What the operators mean, in plain PyTorch: CPU kernel, torch backend and, in float64, the truth of the tests.

`compute_dtype` is the dtype of products and sums. With the default, float32, the result is rounded once to the dtype of
x. With float64 the result stays in float64, unrounded; the weight is rounded to x's dtype first in both, as the rule
says. No more than TILE elements of the weight are dequantised at a time.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch

__all__ = ["dequantize", "grad_x", "multiply", "multiply_back", "pack", "tiles", "unpack", "w4a16_linear"]

TILE = 1 << 20
"""Elements of the weight that are dequantised at a time, or one row where that is longer: 4 MB in FP32."""


def pack(codes: torch.Tensor) -> torch.Tensor:
    """[N, K] codes of any integer dtype, 0..15, to [N, K/8] int32."""
    # By bytes, so that no shift reaches a sign bit; every platform of PyTorch is little-endian.
    narrow = codes.to(torch.uint8)
    pairs = narrow[:, 0::2] | (narrow[:, 1::2] << 4)
    return pairs.flatten().view(torch.int32).view(codes.shape[0], codes.shape[1] // 8)


def unpack(qweight: torch.Tensor) -> torch.Tensor:
    """[N, K/8] int32 to [N, K] codes in uint8."""
    pairs = qweight.contiguous().view(torch.uint8)
    return torch.stack((pairs & 15, pairs >> 4), -1).flatten(1)


def dequantize(
    qweight: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor, group_size: int, dtype: torch.dtype
) -> torch.Tensor:
    """The weight [N, K]: ``round_to(dtype)(fp32(q - z) * fp32(s))``."""
    n, groups = scales.shape
    weight = unpack(qweight).to(torch.float32).view(n, groups, group_size)
    weight -= zeros.to(torch.float32).unsqueeze(-1)
    weight *= scales.to(torch.float32).unsqueeze(-1)
    return weight.to(dtype).view(n, groups * group_size)


def tiles(n: int, k: int) -> Iterator[slice]:
    """Rows of a weight [n, k], some at a time: TILE elements, or one row."""
    rows = max(1, TILE // max(1, k))
    for first in range(0, n, rows):
        yield slice(first, min(n, first + rows))


def _rows(x: torch.Tensor) -> torch.Tensor:
    # reshape(-1, size) cannot tell the number of rows of no columns.
    return x.unsqueeze(0) if x.dim() == 1 else x.flatten(0, -2)


def _product(rows: torch.Tensor, weight: torch.Tensor, compute_dtype: torch.dtype) -> torch.Tensor:
    if rows.is_cuda and compute_dtype == torch.float32 and rows.numel() and weight.numel():
        # 16-bit operands, FP32 sums and result: cuBLAS without a copy of either operand in FP32.
        return torch.mm(rows, weight, out_dtype=torch.float32)
    return rows.to(compute_dtype) @ weight.to(compute_dtype)


def multiply(
    x: torch.Tensor,
    weights: Iterable[tuple[slice, torch.Tensor]],
    n: int,
    bias: torch.Tensor | None,
    compute_dtype: torch.dtype,
) -> torch.Tensor:
    """``x @ w.T + bias`` of a weight that comes some rows at a time: which, and they in the dtype of x."""
    rows = _rows(x)
    result_dtype = x.dtype if compute_dtype == torch.float32 else compute_dtype
    out = torch.empty(rows.shape[0], n, dtype=result_dtype, device=x.device)
    if x.shape[-1] == 0:
        out.copy_(torch.zeros((), device=x.device) if bias is None else bias)
        return out.view(*x.shape[:-1], n)
    if not rows.is_cuda:
        rows = rows.to(compute_dtype)  # once, not for every tile
    for tile, weight in weights:
        product = _product(rows, weight.t(), compute_dtype)
        if bias is not None:
            product += bias[tile].to(compute_dtype)
        out[:, tile] = product
    return out.view(*x.shape[:-1], n)


def multiply_back(grad: torch.Tensor, weights: Iterable[tuple[slice, torch.Tensor]], k: int) -> torch.Tensor:
    """``grad @ w`` of such a weight, added in FP32 and rounded once."""
    rows = _rows(grad)
    total = torch.zeros(rows.shape[0], k, dtype=torch.float32, device=grad.device)
    for tile, weight in weights:
        total += _product(rows[:, tile], weight, torch.float32)
    return total.to(grad.dtype).view(*grad.shape[:-1], k)


def _weights(
    qweight: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor, group_size: int, dtype: torch.dtype
) -> Iterator[tuple[slice, torch.Tensor]]:
    for tile in tiles(qweight.shape[0], qweight.shape[1] * 8):
        yield tile, dequantize(qweight[tile], scales[tile], zeros[tile], group_size, dtype)


def w4a16_linear(
    x: torch.Tensor,
    qweight: torch.Tensor,
    scales: torch.Tensor,
    zeros: torch.Tensor,
    bias: torch.Tensor | None = None,
    group_size: int = 64,
    *,
    compute_dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """``x @ w.T + bias`` with ``w = round_to(x.dtype)(fp32(q - z) * fp32(s))``; the bias is added before the rounding.

    Args:
        x: [..., K], a floating dtype.
        qweight: [N, K/8] int32.
        scales: [N, K/G], a floating dtype.
        zeros: [N, K/G] uint8 or a floating dtype.
        bias: [N], a floating dtype, or None.
        group_size: G.
        compute_dtype: of products and sums.

    Returns:
        [..., N], contiguous.
    """
    weights = _weights(qweight, scales, zeros, group_size, x.dtype)
    return multiply(x, weights, qweight.shape[0], bias, compute_dtype)


def grad_x(
    grad: torch.Tensor, qweight: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor, group_size: int
) -> torch.Tensor:
    """The gradient of `w4a16_linear` with respect to x: ``grad @ w``, added in FP32 and rounded once.

    Args:
        grad: [..., N], float16 or bfloat16, the dtype of x.
        qweight: as in `w4a16_linear`, and so are the others.

    Returns:
        [..., K], contiguous.
    """
    weights = _weights(qweight, scales, zeros, group_size, grad.dtype)
    return multiply_back(grad, weights, qweight.shape[1] * 8)

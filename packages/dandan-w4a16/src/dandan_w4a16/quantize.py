"""From a floating weight to INT4 and back."""

from __future__ import annotations

import torch

from dandan_ops_core.tensors import dtype_name, shape_text
from dandan_w4a16 import checks, reference
from dandan_w4a16.weight import Int4Weight

__all__ = ["dequantize_int4", "quantize_int4"]

_BITS = {torch.float16: torch.int16, torch.bfloat16: torch.int16, torch.float32: torch.int32}


def _rounded(exact: torch.Tensor, dtype: torch.dtype, up: torch.Tensor) -> torch.Tensor:
    """Positive float64 rounded to the next number of `dtype`: upwards where `up`, else downwards."""
    rounded = exact.to(dtype)
    wide = rounded.to(torch.float64)
    # Positive floating numbers are ordered as their bits are.
    step = (up & (wide < exact)).to(_BITS[dtype]) - (~up & (wide > exact)).to(_BITS[dtype])
    return (rounded.view(_BITS[dtype]) + step).view(dtype)


def _quantize_rows(
    weight: torch.Tensor, group_size: int, scale_dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    n, k = weight.shape
    largest = torch.finfo(weight.dtype).max
    # FP64: the range of a group can be twice the largest number of its dtype, and a fifteenth of it below the smallest.
    groups = weight.to(torch.float64).reshape(n, k // group_size, group_size)
    low, high = groups.amin(-1).clamp(max=0), groups.amax(-1).clamp(min=0)
    spread = (high - low) / 15
    exact = torch.where(spread == 0, torch.ones_like(spread), spread)
    # Rounded up, 15 steps cover the range. Where half a step more than the range is out of the dtype's reach, down: a
    # group of nothing but the largest number would else come back as infinity, or a whole step smaller.
    scales = _rounded(exact, scale_dtype, torch.maximum(high, -low) + exact <= largest)
    wide = scales.to(torch.float64)
    zeros = torch.round(-low / wide).clamp(0, 15)
    reach = torch.floor(largest / wide).clamp(max=15).unsqueeze(-1)
    steps = torch.round(groups / wide.unsqueeze(-1)).clamp(-reach, reach)
    codes = (steps + zeros.unsqueeze(-1)).clamp(0, 15)
    return reference.pack(codes.view(n, k).to(torch.uint8)), scales, zeros.to(torch.uint8)


def quantize_int4(weight: torch.Tensor, group_size: int = 64, *, scale_dtype: torch.dtype | None = None) -> Int4Weight:
    """Quantises a weight to unsigned INT4, round to nearest, with one scale and one integer zero a group.

    The range of a group is that of its values and 0, so 0 is always exact. The scale is a fifteenth of it, rounded up
    in its dtype: no value is clipped, and the error of each is at most half a step (scale / 2). A group of zeros has
    scale 1, zero 0 and dequantises to zeros. A group of values so small that a fifteenth of them is below the smallest
    number of the scale's dtype has that number as its scale. Within a step of the largest number of the weight's dtype
    the scale is rounded down and no code is taken that would dequantise to infinity; there the error is below one step.

    Args:
        weight: [N, K] float16, bfloat16 or float32, finite, any strides; K is a multiple of group_size.
        group_size: 32, 64 or 128 neighbours along K that share a scale and a zero.
        scale_dtype: float16, bfloat16 or float32; None is the weight's.

    Returns:
        The weight in the canonical format, on the same device.

    Raises:
        TypeError: weight is no strided tensor of a supported dtype, or scale_dtype is another.
        ValueError: weight has not two dimensions, holds NaN or infinity or no values at all (meta), K is no multiple of
            group_size, group_size is none of the above, or a scale does not fit scale_dtype.

    Source: affine quantisation by minimum and maximum (R. Krishnamoorthi, arXiv:1806.08342, 2018).
    """
    op = "quantize_int4"
    checks.floating(op, "weight", weight)
    weight = weight.detach()
    if weight.dim() != 2:
        raise ValueError(f"{op}: weight has shape {shape_text(weight.shape)}; [N, K] is needed")
    checks.group_size(op, group_size)
    n, k = weight.shape
    if k % group_size != 0:
        raise ValueError(f"{op}: weight has K={k}; a multiple of group_size={group_size} is needed")
    scale_dtype = weight.dtype if scale_dtype is None else scale_dtype
    if scale_dtype not in checks.FLOATS:
        raise TypeError(f"{op}: scale_dtype is {scale_dtype}; float16, bfloat16 and float32 are supported")
    if weight.device.type == "meta":
        raise ValueError(f"{op}: weight is on meta; a tensor with values is needed")
    qweight = torch.empty(n, k // 8, dtype=torch.int32, device=weight.device)
    scales = torch.empty(n, k // group_size, dtype=scale_dtype, device=weight.device)
    zeros = torch.empty(n, k // group_size, dtype=torch.uint8, device=weight.device)
    if k == 0:
        return Int4Weight(qweight, scales, zeros, group_size)
    for tile in reference.tiles(n, 4 * k):  # some arrays of FP64 at a time
        if bad := int((~torch.isfinite(weight[tile])).sum()):
            raise ValueError(
                f"{op}: weight holds {bad} NaN or infinite value{'s' * (bad > 1)} in rows {tile.start} to "
                f"{tile.stop - 1}; finite ones are needed"
            )
        qweight[tile], scales[tile], zeros[tile] = _quantize_rows(weight[tile], group_size, scale_dtype)
    if not bool(torch.isfinite(scales).all()):
        raise ValueError(
            f"{op}: a group of weight needs a scale beyond the largest {dtype_name(scale_dtype)}; scale_dtype=float32 "
            f"has room for it"
        )
    return Int4Weight(qweight, scales, zeros, group_size)


def dequantize_int4(weight: Int4Weight, dtype: torch.dtype = torch.float16) -> torch.Tensor:
    """The whole weight as numbers: ``round_to(dtype)(fp32(q - z) * fp32(s))``. For tests and for export.

    Args:
        weight: in the canonical format.
        dtype: float16, bfloat16 or float32. `w4a16_linear` multiplies with the weight in the dtype of x.

    Returns:
        [N, K] of dtype, contiguous.

    Raises:
        TypeError: weight is no Int4Weight, or dtype is none of the above.

    Source: the definition, docs/w4a16-format.md.
    """
    op = "dequantize_int4"
    if not isinstance(weight, Int4Weight):
        raise TypeError(f"{op}: weight is {type(weight).__name__}; an Int4Weight is needed")
    if dtype not in checks.FLOATS:
        raise TypeError(f"{op}: dtype is {dtype}; float16, bfloat16 and float32 are supported")
    out = torch.empty(weight.shape, dtype=dtype, device=weight.device)
    for tile in reference.tiles(*weight.shape):
        out[tile] = reference.dequantize(
            weight.qweight[tile], weight.scales[tile], weight.zeros[tile], weight.group_size, dtype
        )
    return out

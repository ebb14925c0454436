"""compressed-tensors, format pack-quantized, four bits."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from dandan_ops_core.tensors import shape_text
from dandan_w4a16 import checks
from dandan_w4a16.importers.layout import canonical, group_of, nibbles, trivial_order, words
from dandan_w4a16.importers.signed import _offset
from dandan_w4a16.weight import Int4Weight

__all__ = ["from_compressed_tensors"]


def from_compressed_tensors(
    weight_packed: torch.Tensor,
    weight_scale: torch.Tensor,
    weight_zero_point: torch.Tensor | None = None,
    *,
    weight_shape: torch.Tensor | Sequence[int] | None = None,
    weight_g_idx: torch.Tensor | None = None,
    group_size: int | None = None,
    target_group_size: int | None = None,
) -> Int4Weight:
    """From a layer of a compressed-tensors checkpoint. The source's rule: ``w = (c - c0) * s`` with signed c and c0.

    Stored are c + 8 along K, low nibble first, which are the words of the canonical format, and c0 + 8 along N.

    Args:
        weight_packed: [N, K/8] int32.
        weight_scale: [N, groups] float16, bfloat16 or float32; one group a row is the channel strategy.
        weight_zero_point: [ceil(N/8), groups] int32, or [N, groups] int8 (signed, not packed); None is symmetric.
        weight_shape: N and K of the checkpoint, checked where given.
        weight_g_idx: [K], the activation order; it must be none (i // group_size, or all -1).
        group_size: of the source, checked where given; -1 is one group a row.
        target_group_size: 32, 64 or 128; None is the largest of them that divides the source's.

    Returns:
        The weight in the canonical format, every element with the value that it had.

    Raises:
        TypeError: an argument is no tensor of a fitting dtype.
        ValueError: sizes do not fit each other, a scale is not finite, or there is an activation order.

    Source: the published format of compressed-tensors (Apache-2.0), read from its packing functions.
    """
    op = "from_compressed_tensors"
    packed = words(op, "weight_packed", weight_packed, "[N, K/8]")
    n, k = packed.shape[0], packed.shape[1] * 8
    if weight_shape is not None:
        declared = [int(size) for size in weight_shape]
        if declared != [n, k]:
            raise ValueError(f"{op}: weight_shape is {declared} but weight_packed holds {[n, k]} codes of 4 bits")
    checks.floating(op, "weight_scale", weight_scale)
    if weight_scale.dim() != 2 or weight_scale.shape[0] != n:
        raise ValueError(f"{op}: weight_scale has shape {shape_text(weight_scale.shape)}; [{n}, groups] is needed")
    groups = weight_scale.shape[1]
    group = group_of(op, k, groups, group_size)
    if weight_g_idx is not None and not bool((weight_g_idx == -1).all()):
        trivial_order(op, "weight_g_idx", weight_g_idx, k, group)
    zeros = None
    if weight_zero_point is not None:
        point = checks.integer(op, "weight_zero_point", weight_zero_point)
        if point.dtype == torch.int8:
            needed: tuple[int, int] = (n, groups)
        else:
            point = words(op, "weight_zero_point", weight_zero_point, "[N/8, groups]")
            needed = (-(-n // 8), groups)
        if point.shape != needed:
            raise ValueError(
                f"{op}: weight_zero_point has shape {shape_text(point.shape)}; {shape_text(needed)} is needed"
            )
        if point.dtype == torch.int8:
            zeros = _offset(op, "weight_zero_point", point)
        else:
            zeros = nibbles(point.t()).t()[:n]
    return canonical(op, packed, weight_scale, zeros, group, target_group_size)

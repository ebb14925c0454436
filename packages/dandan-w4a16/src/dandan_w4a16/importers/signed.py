"""Signed INT4: two's complement codes, as many exporters have them."""

from __future__ import annotations

import torch

from dandan_ops_core.tensors import shape_text
from dandan_w4a16 import checks
from dandan_w4a16.importers.layout import canonical, group_of, words
from dandan_w4a16.weight import Int4Weight, pack_int4

__all__ = ["from_signed_int4"]


def _offset(op: str, argument: str, t: torch.Tensor) -> torch.Tensor:
    """Signed values -8..7 plus 8, in uint8."""
    if t.device.type == "meta":
        raise ValueError(f"{op}: {argument} is on meta; a tensor with values is needed")
    if t.numel():
        low, high = (int(end) for end in torch.aminmax(t))
        if low < -8 or high > 7:
            raise ValueError(f"{op}: {argument} hold {low if low < -8 else high}; -8 to 7 is needed")
    return (t.to(torch.int8) + 8).to(torch.uint8)


def from_signed_int4(
    codes: torch.Tensor,
    scales: torch.Tensor,
    zeros: torch.Tensor | None = None,
    *,
    group_size: int = 128,
    target_group_size: int = 64,
    packed: bool = False,
) -> Int4Weight:
    """From signed codes with ``w = (c - c0) * s``: ``q = c + 8`` and ``z = c0 + 8`` are stored, so ``q - z = c - c0``.

    Args:
        codes: [N, K] of an integer dtype, -8 to 7. With `packed`, [N, K/8] int32 of two's complement nibbles, low
            nibble first along K.
        scales: [N, ceil(K / group_size)] float16, bfloat16 or float32; the last group may be short.
        zeros: [N, ceil(K / group_size)] of an integer dtype, -8 to 7; None is symmetric, 0.
        group_size: of the source.
        target_group_size: 32, 64 or 128; divides group_size and K. Scales and zeros are repeated.
        packed: codes are packed.

    Returns:
        The weight in the canonical format, every element with the value that it had.

    Raises:
        TypeError: an argument is no tensor of a fitting dtype.
        ValueError: a value is out of range, a scale is not finite, or sizes do not fit each other.

    Source: the definition of two's complement.
    """
    op = "from_signed_int4"
    if packed:
        # Adding 8 to a two's complement nibble turns its highest bit.
        qweight = words(op, "codes", codes, "[N, K/8]") ^ -0x77777778
    else:
        checks.integer(op, "codes", codes)
        if codes.dim() != 2 or codes.shape[1] % 8 != 0:
            raise ValueError(f"{op}: codes has shape {shape_text(codes.shape)}; [N, 8 * words] is needed")
        qweight = pack_int4(_offset(op, "codes", codes))
    checks.floating(op, "scales", scales)
    n, k = qweight.shape[0], qweight.shape[1] * 8
    if scales.dim() != 2 or scales.shape[0] != n:
        raise ValueError(f"{op}: scales has shape {shape_text(scales.shape)}; [{n}, K/group_size] is needed")
    group = group_of(op, k, scales.shape[1], group_size, tail=True)
    if zeros is not None:
        checks.integer(op, "zeros", zeros)
        if zeros.shape != scales.shape:
            raise ValueError(f"{op}: zeros has shape {shape_text(zeros.shape)}; {shape_text(scales.shape)} is needed")
        zeros = _offset(op, "zeros", zeros)
    return canonical(op, qweight, scales, zeros, group, target_group_size)

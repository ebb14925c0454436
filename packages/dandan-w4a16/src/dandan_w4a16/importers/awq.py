"""AWQ, version gemm, four bits."""

from __future__ import annotations

import torch

from dandan_ops_core.tensors import shape_text
from dandan_w4a16 import checks
from dandan_w4a16.importers.layout import canonical, group_of, nibbles, words
from dandan_w4a16.weight import Int4Weight, pack_int4

__all__ = ["from_awq"]

# Nibble of a word that holds column j of its eight; the word's nibbles hold columns 0, 2, 4, 6, 1, 3, 5, 7.
NIBBLE = [0, 4, 1, 5, 2, 6, 3, 7]


def _columns(packed: torch.Tensor) -> torch.Tensor:
    """[R, N/8] words to [R, N] codes in the order of the columns."""
    return nibbles(packed).view(*packed.shape, 8)[:, :, NIBBLE].flatten(1)


def from_awq(
    qweight: torch.Tensor,
    qzeros: torch.Tensor,
    scales: torch.Tensor,
    *,
    group_size: int | None = None,
    target_group_size: int | None = None,
) -> Int4Weight:
    """From a layer of an AWQ checkpoint (version gemm). The source's rule: ``w = (q - z) * s``, all unsigned.

    Weights and zeros are both packed along N, in the order 0, 2, 4, 6, 1, 3, 5, 7 of eight columns.

    Args:
        qweight: [K, N/8] int32.
        qzeros: [K/G, N/8] int32.
        scales: [K/G, N] float16, bfloat16 or float32.
        group_size: of the source, checked where given; -1 is one group for all of K.
        target_group_size: 32, 64 or 128; None is the largest of them that divides the source's.

    Returns:
        The weight [N, K] in the canonical format, every element with the value that it had.

    Raises:
        TypeError: an argument is no tensor of a fitting dtype.
        ValueError: sizes do not fit each other, or a scale is not finite.

    Source: the format of AutoAWQ (MIT), read from its packing functions; J. Lin et al., arXiv:2306.00978.
    """
    op = "from_awq"
    weight_words = words(op, "qweight", qweight, "[K, N/8]")
    k, n = weight_words.shape[0], weight_words.shape[1] * 8
    zero_words = words(op, "qzeros", qzeros, "[K/G, N/8]")
    checks.floating(op, "scales", scales)
    if scales.dim() != 2 or scales.shape[1] != n:
        raise ValueError(f"{op}: scales has shape {shape_text(scales.shape)}; [K/G, {n}] is needed")
    groups = scales.shape[0]
    group = group_of(op, k, groups, group_size)
    if zero_words.shape != (groups, n // 8):
        raise ValueError(
            f"{op}: qzeros has shape {shape_text(zero_words.shape)}; {shape_text((groups, n // 8))} is needed"
        )
    if k % 8 != 0:
        raise ValueError(f"{op}: qweight has K={k}; a multiple of 8 is needed")
    codes = pack_int4(_columns(weight_words).t())
    return canonical(op, codes, scales.t(), _columns(zero_words).t(), group, target_group_size)

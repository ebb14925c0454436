"""GPTQ, four bits, checkpoint formats gptq (v1) and gptq_v2."""

from __future__ import annotations

import torch

from dandan_ops_core.tensors import shape_text
from dandan_w4a16 import checks
from dandan_w4a16.importers.layout import canonical, group_of, nibbles, trivial_order, words
from dandan_w4a16.weight import Int4Weight, pack_int4

__all__ = ["from_gptq"]

# What each declared format adds to a stored zero.
OFFSETS = {"gptq": 1, "gptq_v2": 0}


def _offset(op: str, stored: torch.Tensor, checkpoint_format: str, zero_offset: int | None) -> int:
    """What is added to the stored zeros: what the caller states, else what the format says and the values bear out."""
    if zero_offset is not None:
        if zero_offset not in (0, 1) or isinstance(zero_offset, bool):
            raise ValueError(f"{op}: zero_offset is {zero_offset!r}; 0, 1 or None is needed")
        return zero_offset
    if checkpoint_format not in OFFSETS:
        raise ValueError(f"{op}: checkpoint_format is {checkpoint_format!r}; 'gptq' (v1) or 'gptq_v2' is needed")
    offset = OFFSETS[checkpoint_format]
    # A symmetric weight has zeros of 8 everywhere, so what is stored says which format it really is.
    if stored.numel() and bool((stored == stored.reshape(-1)[0]).all()):
        value = int(stored.reshape(-1)[0])
        if value in (7, 8) and value + offset != 8:
            other = 1 - offset
            raise ValueError(
                f"{op}: every stored zero is {value}. As the declared {checkpoint_format!r} the zeros are "
                f"{value + offset} (zero_offset={offset}); a symmetric weight has zeros of 8, which is "
                f"zero_offset={other}. Pass the zero_offset that the checkpoint was written with"
            )
    return offset


def from_gptq(
    qweight: torch.Tensor,
    qzeros: torch.Tensor,
    scales: torch.Tensor,
    g_idx: torch.Tensor | None = None,
    *,
    checkpoint_format: str = "gptq",
    zero_offset: int | None = None,
    wrap: bool = False,
    group_size: int | None = None,
    target_group_size: int | None = None,
) -> Int4Weight:
    """From a layer of a GPTQ checkpoint. The source's rule: ``w = (q - z) * s``; v1 stores z - 1, v2 stores z.

    Weights are packed along K, zeros along N, both low nibble first. The offset of v1 is added to each zero, not to the
    word.

    Args:
        qweight: [K/8, N] int32.
        qzeros: [K/G, ceil(N/8)] int32.
        scales: [K/G, N] float16, bfloat16 or float32.
        g_idx: [K], the group of each row of K. It must be i // G: the format has no order of columns.
        checkpoint_format: what the checkpoint declares, "gptq" (v1; also where it declares nothing) or "gptq_v2".
        zero_offset: what is added to a stored zero, 0 or 1, whatever is declared. None takes it from checkpoint_format,
            and refuses where all stored zeros are 7 or all are 8 and that would not make them 8.
        wrap: with an offset of 1 a stored 15 is either 16, which no 4-bit zero can be, or a zero of 0 that wrapped.
            False refuses it, True reads it as 0.
        group_size: of the source, checked where given; -1 is one group for all of K.
        target_group_size: 32, 64 or 128; None is the largest of them that divides the source's.

    Returns:
        The weight [N, K] in the canonical format, every element with the value that it had.

    Raises:
        TypeError: an argument is no tensor of a fitting dtype.
        ValueError: sizes do not fit each other, a scale is not finite, the zeros can be read in two ways, or there is
            an activation order.

    Source: the formats of AutoGPTQ (MIT) and GPTQModel (Apache-2.0), read from their sources; E. Frantar et al.,
    arXiv:2210.17323.
    """
    op = "from_gptq"
    weight_words = words(op, "qweight", qweight, "[K/8, N]")
    k, n = weight_words.shape[0] * 8, weight_words.shape[1]
    zero_words = words(op, "qzeros", qzeros, "[K/G, N/8]")
    checks.floating(op, "scales", scales)
    if scales.dim() != 2 or scales.shape[1] != n:
        raise ValueError(f"{op}: scales has shape {shape_text(scales.shape)}; [K/G, {n}] is needed")
    groups = scales.shape[0]
    group = group_of(op, k, groups, group_size)
    if zero_words.shape != (groups, -(-n // 8)):
        raise ValueError(
            f"{op}: qzeros has shape {shape_text(zero_words.shape)}; {shape_text((groups, -(-n // 8)))} is needed"
        )
    if g_idx is not None:
        trivial_order(op, "g_idx", g_idx, k, group)
    stored = nibbles(zero_words)[:, :n]
    offset = _offset(op, stored, checkpoint_format, zero_offset)
    if offset == 1 and not wrap and bool((stored == 15).any()):
        raise ValueError(
            f"{op}: {int((stored == 15).sum())} stored zeros are 15, which with zero_offset=1 are 16 or, wrapped, 0; "
            f"wrap=True reads them as 0, zero_offset=0 as 15"
        )
    zeros = (stored + offset) & 15
    codes = pack_int4(nibbles(weight_words.t()))
    return canonical(op, codes, scales.t(), zeros.t(), group, target_group_size)

"""The order in which the CUDA kernels read a weight, in plain PyTorch: what csrc/w4a16.h draws and csrc/pack.h does.

    codes   [n/64][k/64][4 of 16 rows][8 rows g][4 pairs t][4 of 16 columns] words of int32
    scales  [n/64][k/group][4 of 16 rows][8 rows g][2 rows: g, g + 8][scale, zero point], of the dtype of the scales

The eight nibbles of a word, lowest first, are the rows g and g + 8 in turn, of the columns 2t, 2t + 8, 2t + 1, 2t + 9.
N and K are padded to multiples of 64 so that everything that does not exist is a weight of exactly 0: rows and groups
have scale, zero point and codes of 0, columns of a group that exists have its zero point as their code.

This is the CPU kernel of `repack` and `unpack`, and what the torch backend reads a finalised weight with.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from dandan_w4a16 import reference

__all__ = ["BLOCK", "code_words", "grad_x", "packed_linear", "repack", "scale_elements", "unpack"]

BLOCK = 64

_CODES = (4, 2, 8, 4, 2, 4, 2)  # of a block: rows 16 x 2 x 8, columns 16 x 2 x 4 x 2
_CODES_ORDER = (0, 4, 1, 3, 7, 5, 8, 6, 2)  # to [block of n, block of k, rows, g, t, columns, odd, half of 16, row + 8]


def _blocks(size: int) -> int:
    return -(-size // BLOCK)


def _groups(k: int, group_size: int) -> int:
    return -(-_blocks(k) * BLOCK // group_size)


def code_words(n: int, k: int) -> int:
    """Elements of the tensor of codes."""
    return _blocks(n) * _blocks(k) * (BLOCK * BLOCK // 8)


def scale_elements(n: int, k: int, group_size: int) -> int:
    """Elements of the tensor of scales and zero points."""
    return _blocks(n) * BLOCK * _groups(k, group_size) * 2


def tiles(n: int, k: int) -> list[slice]:
    """Rows of a weight [n, k] some at a time, in whole blocks: about `reference.TILE` elements."""
    rows = max(BLOCK, reference.TILE // max(1, k) // BLOCK * BLOCK)
    return [slice(first, min(n, first + rows)) for first in range(0, n if k else 0, rows)]


def _span(tile: slice, of_row: int) -> slice:
    """Where the blocks of some rows lie in a tensor that has `of_row` elements for each."""
    return slice(tile.start * of_row, _blocks(tile.stop) * BLOCK * of_row)


def _order_codes(codes: torch.Tensor) -> torch.Tensor:
    """[N, K] codes, both multiples of 64, to words in order."""
    rows, columns = (size // BLOCK for size in codes.shape)
    split = codes.view(rows, *_CODES[:3], columns, *_CODES[3:])
    return reference.pack(split.permute(_CODES_ORDER).reshape(-1, 8)).view(-1)


def _take_codes(words: torch.Tensor, columns: int) -> torch.Tensor:
    """The other way: [rows of whole blocks, 64 * columns] codes."""
    ordered = reference.unpack(words.reshape(-1, 1)).view(-1, columns, 4, 8, 4, 4, 2, 2, 2)
    places = [_CODES_ORDER.index(place) for place in range(9)]
    return ordered.permute(places).reshape(-1, columns * BLOCK)


def _order_scales(scales: torch.Tensor, zeros: torch.Tensor) -> torch.Tensor:
    """[N, K/G] scales and zero points of one dtype, N a multiple of 64, to pairs in order."""
    pairs = torch.stack((scales, zeros), -1)
    return pairs.view(-1, 4, 2, 8, scales.shape[1], 2).permute(0, 4, 1, 3, 2, 5).reshape(-1)


def _take_scales(pairs: torch.Tensor, groups: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The other way: scales and zero points [rows of whole blocks, groups]."""
    ordered = pairs.reshape(-1, groups, 4, 8, 2, 2).permute(0, 2, 4, 3, 1, 5).reshape(-1, groups, 2)
    return ordered[..., 0], ordered[..., 1]


def repack(
    qweight: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor, group_size: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and scales in the kernels' order.

    Args:
        qweight: [N, K/8] int32; K is any multiple of 8, the last group may be short.
        scales: [N, ceil(K/G)] float16 or bfloat16.
        zeros: [N, ceil(K/G)] uint8 in 0..15.
        group_size: G: 32, 64 or 128.
    """
    n, k = qweight.shape[0], qweight.shape[1] * 8
    groups, ordered_groups = scales.shape[1], _groups(k, group_size)
    columns = _blocks(k) * BLOCK
    codes = qweight.new_empty(code_words(n, k))
    pairs = scales.new_empty(scale_elements(n, k, group_size))
    for tile in tiles(n, k):
        rows = tile.stop - tile.start
        whole = torch.zeros(_blocks(rows) * BLOCK, columns, dtype=torch.uint8, device=qweight.device)
        whole[:rows, :k] = reference.unpack(qweight[tile])
        end = min(columns, groups * group_size)
        whole[:rows, k:end] = zeros[tile, -1:]
        codes[_span(tile, columns // 8)] = _order_codes(whole)
        both = scales.new_zeros(2, _blocks(rows) * BLOCK, ordered_groups)
        both[0, :rows, :groups] = scales[tile]
        both[1, :rows, :groups] = zeros[tile].to(scales.dtype)
        pairs[_span(tile, 2 * ordered_groups)] = _order_scales(both[0], both[1])
    return codes, pairs


def unpack(
    codes: torch.Tensor, scales: torch.Tensor, n: int, k: int, group_size: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`qweight`, `scales` and `zeros` of what `repack` made, bit for bit."""
    groups, ordered_groups, columns = -(-k // group_size), _groups(k, group_size), _blocks(k)
    qweight = codes.new_empty(n, k // 8)
    flat = scales.new_empty(n, groups)
    zeros = torch.empty(n, groups, dtype=torch.uint8, device=codes.device)
    for tile in tiles(n, k):
        rows = tile.stop - tile.start
        qweight[tile] = reference.pack(_take_codes(codes[_span(tile, columns * 8)], columns)[:rows, :k])
        found, points = _take_scales(scales[_span(tile, 2 * ordered_groups)], ordered_groups)
        flat[tile] = found[:rows, :groups]
        zeros[tile] = points[:rows, :groups].to(torch.uint8)
    return qweight, flat, zeros


def _weight(
    codes: torch.Tensor, scales: torch.Tensor, tile: slice, k: int, group_size: int, dtype: torch.dtype
) -> torch.Tensor:
    """Rows of the weight by the rule: those of `tile`, one of `tiles`."""
    groups, columns = _groups(k, group_size), _blocks(k)
    missing = groups * group_size - columns * BLOCK  # a group of 128 may reach beyond the last block
    words = _take_codes(codes[_span(tile, columns * 8)], columns)
    found, points = _take_scales(scales[_span(tile, 2 * groups)], groups)
    weight = torch.nn.functional.pad(words, (0, missing)).to(torch.float32).unflatten(1, (groups, group_size))
    weight -= points.to(torch.float32).unsqueeze(-1)
    weight *= found.to(torch.float32).unsqueeze(-1)
    return weight.to(dtype).flatten(1)[: tile.stop - tile.start, :k]


def _weights(
    codes: torch.Tensor, scales: torch.Tensor, n: int, k: int, group_size: int, dtype: torch.dtype
) -> Iterator[tuple[slice, torch.Tensor]]:
    for tile in tiles(n, k):
        yield tile, _weight(codes, scales, tile, k, group_size, dtype)


def packed_linear(
    x: torch.Tensor,
    codes: torch.Tensor,
    scales: torch.Tensor,
    bias: torch.Tensor | None,
    n: int,
    k: int,
    group_size: int,
    *,
    compute_dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """`reference.w4a16_linear` of a weight in the kernels' order.

    Args:
        x: [..., K], a floating dtype.
        codes: as `repack` makes it, and so are the scales.
        bias: [N], a floating dtype, or None.
        n: N.
        k: K.
        group_size: G.
        compute_dtype: of products and sums.

    Returns:
        [..., N], contiguous.
    """
    weights = _weights(codes, scales, n, k, group_size, x.dtype)
    return reference.multiply(x, weights, n, bias, compute_dtype)


def grad_x(
    grad: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor, n: int, k: int, group_size: int
) -> torch.Tensor:
    """`reference.grad_x` of a weight in the kernels' order."""
    return reference.multiply_back(grad, _weights(codes, scales, n, k, group_size, grad.dtype), k)

"""Awkward inputs: the same values in another layout. What surrounds them is poison, so that reading it shows."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from dandan_ops_core.testing.guards import Guarded, dense_strides


def _placed(values: torch.Tensor, strides: Sequence[int], offset: int) -> torch.Tensor:
    holder = Guarded(values.shape, values.dtype, values.device, strides, offset, "input")
    holder.tensor.copy_(values)
    return holder.tensor


def rows_strided(values: torch.Tensor, padding: int = 8) -> torch.Tensor:
    """The same values with `padding` poisoned elements between rows of the last dimension."""
    if values.dim() == 0:
        raise ValueError("rows_strided: needs at least one dimension")
    padded = (*values.shape[:-1], values.shape[-1] + padding)
    return _placed(values, dense_strides(padded), 0)


def misaligned(values: torch.Tensor, offset: int = 1) -> torch.Tensor:
    """A contiguous copy that starts `offset` elements past a 256-byte boundary."""
    return _placed(values, dense_strides(values.shape), offset)


def expanded(row: torch.Tensor, rows: int) -> torch.Tensor:
    """A `[rows, ...]` view of one row: stride 0 in the first dimension."""
    return row.unsqueeze(0).expand(rows, *row.shape)


def halves(left: torch.Tensor, right: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Both inputs as the two halves of the last dimension of one tensor: views, no copies afterwards."""
    if left.shape != right.shape or left.dtype != right.dtype:
        raise ValueError("halves: both inputs must have one shape and dtype")
    both = torch.cat((left, right), dim=-1)
    return both[..., : left.shape[-1]], both[..., left.shape[-1] :]

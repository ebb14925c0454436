"""The other formats, written from their descriptions: how each packs a layer, and what each says a weight is.

Integers of Python and numpy throughout, so that nothing is shared with the importers. A source's weight is in the dtype
of its scales, as its own code has it: an exact small integer times the scale, rounded once.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy
import torch

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # column of each nibble, the lowest first


def words(nibbles: numpy.ndarray, axis: int, order: tuple[int, ...] = tuple(range(8))) -> torch.Tensor:
    """Eight values of 0..15 to an int32 along an axis, padded with zeros; nibble i holds value order[i]."""
    values = numpy.moveaxis(nibbles.astype(object), axis, -1)
    rest = -values.shape[-1] % 8
    values = numpy.concatenate([values, numpy.zeros((*values.shape[:-1], rest), dtype=object)], -1)
    values = values.reshape(*values.shape[:-1], -1, 8)
    total = sum(values[..., column] * 16**place for place, column in enumerate(order))
    signed = numpy.where(total >= 2**31, total - 2**32, total).astype(numpy.int32)
    return torch.from_numpy(numpy.ascontiguousarray(numpy.moveaxis(signed, -1, axis)))


@dataclass(frozen=True)
class Layer:
    """A layer [N, K] in integers: unsigned codes [N, K] and zeros [N, groups], scales [N, groups]."""

    codes: numpy.ndarray
    zeros: numpy.ndarray
    scales: torch.Tensor
    group: int

    @property
    def weight(self) -> torch.Tensor:
        """``(q - z) * s`` in the dtype of the scales."""
        index = numpy.arange(self.codes.shape[1]) // self.group
        difference = self.codes.astype(numpy.int64) - self.zeros.astype(numpy.int64)[:, index]
        return torch.from_numpy(difference).to(self.scales.dtype) * self.scales[:, torch.from_numpy(index)]


def layer(
    n: int, k: int, group: int, *, symmetric: bool = False, dtype: torch.dtype = torch.float16, seed: int = 0
) -> Layer:
    """Codes of the whole range in every group, zeros of the whole range."""
    source = numpy.random.default_rng(seed)
    groups = -(-k // group)
    zeros = numpy.full((n, groups), 8) if symmetric else source.integers(0, 16, (n, groups))
    scales = torch.from_numpy(source.standard_normal((n, groups))).to(dtype)
    return Layer(source.integers(0, 16, (n, k)), zeros, scales, group)


def awq(layer: Layer) -> dict[str, torch.Tensor]:
    """gemm: [K, N] packed along N in AWQ_ORDER, the zeros in the same."""
    return {
        "qweight": words(layer.codes.T, 1, AWQ_ORDER),
        "qzeros": words(layer.zeros.T, 1, AWQ_ORDER),
        "scales": layer.scales.t().contiguous(),
    }


def gptq(layer: Layer, version: int) -> dict[str, torch.Tensor]:
    """[K, N] packed along K; zeros [groups, N] along N, version 1 stores one less (a 0 wraps to 15)."""
    stored = (layer.zeros.T - (version == 1)) % 16
    return {
        "qweight": words(layer.codes.T, 0),
        "qzeros": words(stored, 1),
        "scales": layer.scales.t().contiguous(),
        "g_idx": torch.arange(layer.codes.shape[1], dtype=torch.int32) // layer.group,
    }


def compressed_tensors(layer: Layer, symmetric: bool) -> dict[str, torch.Tensor]:
    """Signed values plus 8: [N, K] along K; zeros [N, groups] along N, none where symmetric."""
    tensors = {
        "weight_packed": words(layer.codes, 1),
        "weight_scale": layer.scales,
        "weight_shape": torch.tensor(layer.codes.shape),
    }
    if not symmetric:
        tensors["weight_zero_point"] = words(layer.zeros, 0)
    return tensors

"""The format: eight codes to a word, and the dataclass that keeps words, scales and zeros together."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from dandan_ops_core.tensors import shape_text
from dandan_w4a16 import checks, reference

__all__ = ["Int4Weight", "pack_int4", "shard_bounds", "unpack_int4"]


def pack_int4(codes: torch.Tensor) -> torch.Tensor:
    """Packs eight 4-bit codes into each int32 along the last dimension, the first code in the lowest bits.

    Args:
        codes: [N, K] of an integer dtype, 0 to 15, any strides; K is a multiple of 8.

    Returns:
        [N, K/8] int32, contiguous. Bits 4i to 4i+3 of word j are code 8j+i of the row.

    Raises:
        TypeError: codes is no strided tensor of an integer dtype.
        ValueError: codes has not two dimensions, K is no multiple of 8, or a code is not in 0..15.

    Source: the definition, docs/w4a16-format.md.
    """
    op = "pack_int4"
    checks.integer(op, "codes", codes)
    if codes.dim() != 2:
        raise ValueError(f"{op}: codes has shape {shape_text(codes.shape)}; [N, K] is needed")
    if codes.shape[1] % 8 != 0:
        raise ValueError(f"{op}: codes has K={codes.shape[1]}; a multiple of 8 is needed")
    if codes.numel() and codes.device.type != "meta":
        low, high = (int(t) for t in torch.aminmax(codes))
        if low < 0 or high > 15:
            raise ValueError(f"{op}: codes hold {low if low < 0 else high}; 0 to 15 is needed")
    return reference.pack(codes)


def unpack_int4(qweight: torch.Tensor) -> torch.Tensor:
    """The codes of packed words: what `pack_int4` packed.

    Args:
        qweight: [N, K/8] int32, any strides.

    Returns:
        [N, K] uint8, contiguous, 0 to 15.

    Raises:
        TypeError: qweight is no strided tensor of int32.
        ValueError: qweight has not two dimensions.

    Source: the definition, docs/w4a16-format.md.
    """
    op = "unpack_int4"
    if checks.tensor(op, "qweight", qweight).dtype != torch.int32:
        raise TypeError(f"{op}: qweight has dtype {checks.dtype_name(qweight.dtype)}; int32 is needed")
    if qweight.dim() != 2:
        raise ValueError(f"{op}: qweight has shape {shape_text(qweight.shape)}; [N, K/8] is needed")
    return reference.unpack(qweight)


def shard_bounds(op: str, size: int, what: str, rank: int, world: int, step: int = 1) -> tuple[int, int]:
    """First and past-the-last index of a rank's part of `size`; parts are equal and multiples of `step`."""
    if world < 1 or not 0 <= rank < world:
        raise ValueError(f"{op}: rank is {rank} of world {world}; 0 <= rank < world is needed")
    if size % (world * step) != 0:
        needed = f"world={world}" if step == 1 else f"world={world} times group_size={step}"
        raise ValueError(f"{op}: {what}={size} is not a multiple of {needed}")
    part = size // world
    return rank * part, (rank + 1) * part


@dataclass(frozen=True, eq=False)
class Int4Weight:
    """An INT4 weight [N, K] in the canonical format: ``w[n, k] = (q[n, k] - z[n, k // G]) * s[n, k // G]``.

    Shapes, dtypes and devices are checked when it is made; `check_values` looks at the values.

    Attributes:
        qweight: [N, K/8] int32, eight codes to a word, low nibble first along K.
        scales: [N, K/G] float16, bfloat16 or float32, in the dtype in which they were made.
        zeros: [N, K/G] uint8 in 0..15; with `zero_mode="float"`, float16, bfloat16 or float32.
        group_size: G: 32, 64 or 128.
        zero_mode: "integer" or "float".

    Raises:
        TypeError: a tensor has a dtype that the format or the mode does not have.
        ValueError: shapes or devices do not fit each other, or group_size or zero_mode is none of the above.
    """

    qweight: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor
    group_size: int = 64
    zero_mode: str = "integer"

    def __post_init__(self) -> None:
        checks.packed_weight("Int4Weight", self.qweight, self.scales, self.zeros, self.group_size)
        checks.zero_mode("Int4Weight", self.zeros, self.zero_mode)

    @property
    def shape(self) -> torch.Size:
        """[N, K]: the shape of the weight that this stands for."""
        return torch.Size((self.qweight.shape[0], self.qweight.shape[1] * 8))

    @property
    def device(self) -> torch.device:
        """Where all three tensors are."""
        return self.qweight.device

    @property
    def nbytes(self) -> int:
        """Bytes of the three tensors."""
        return sum(t.numel() * t.element_size() for t in (self.qweight, self.scales, self.zeros))

    def check_values(self) -> Int4Weight:
        """This weight, if its scales are finite and its zeros in 0..15 (or finite). Waits for the device.

        Raises:
            ValueError: a value breaks that.
        """
        checks.values("Int4Weight", self.scales, self.zeros)
        return self

    def to(self, device: torch.device | str | int) -> Int4Weight:
        """The same weight on another device."""
        return self._map(lambda t: t.to(device))

    def _map(self, function: Callable[[torch.Tensor], torch.Tensor]) -> Int4Weight:
        qweight, scales, zeros = (function(t) for t in (self.qweight, self.scales, self.zeros))
        return Int4Weight(qweight, scales, zeros, self.group_size, self.zero_mode)

    def shard(self, dim: int, rank: int, world: int) -> Int4Weight:
        """One of `world` equal parts, as a copy: rows (dim 0, of N) or columns (dim 1, of K, whole groups).

        Raises:
            ValueError: dim is neither 0 nor 1, rank is not in 0..world-1, or N or K/G does not divide by world.
        """
        op = "Int4Weight.shard"
        n, k = self.shape
        if dim == 0:
            first, last = shard_bounds(op, n, "N", rank, world)
            part = self._map(lambda t: t[first:last])
        elif dim == 1:
            first, last = shard_bounds(op, k, "K", rank, world, self.group_size)
            groups = slice(first // self.group_size, last // self.group_size)
            words = self.qweight[:, first // 8 : last // 8]
            part = Int4Weight(words, self.scales[:, groups], self.zeros[:, groups], self.group_size, self.zero_mode)
        else:
            raise ValueError(f"{op}: dim is {dim!r}; 0 (rows, N) or 1 (columns, K) is needed")
        return part._map(lambda t: t.clone(memory_format=torch.contiguous_format))

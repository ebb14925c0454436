"""Outputs inside poisoned guard bands: what a kernel writes beside its output, or leaves unwritten, is found."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from types import TracebackType

import torch

from dandan_ops_core.testing.bounds import INT_OF_SIZE

# Bytes on either side of a guarded tensor: more than a warp of 16-byte accesses, so that one stray vector store
# lands inside.
GUARD_BYTES = 4096
# Every address handed out is a multiple of this before the caller's own offset is added.
ALIGNMENT = 256
# Elements looked at in one piece by Guarded.check: bounds its scratch memory on outputs of many gigabytes.
CHECK_CHUNK = 1 << 27
# NaNs with a payload that no arithmetic produces (the hardware's own NaN is 0x7fff, 0x7fffffff or the 0x7fc0...
# family).
_POISON_BITS: dict[torch.dtype, int] = {
    torch.float16: 0x7E5A,
    torch.bfloat16: 0x7FDA,
    torch.float32: 0x7FDA5A5A,
    torch.float64: 0x7FFA5A5A5A5A5A5A,
}
_POISON_BY_SIZE = {1: 0xA5, 2: 0x5AA5, 4: 0x5AA55AA5, 8: 0x5AA55AA55AA55AA5}


class GuardError(AssertionError):
    """A guard byte changed, or an output element was never written."""


def _poison_bits(dtype: torch.dtype) -> int:
    return _POISON_BITS.get(dtype, _POISON_BY_SIZE[dtype.itemsize])


def dense_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """The strides of a contiguous tensor."""
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


def _aligned(count: int, dtype: torch.dtype, device: torch.device, before: int, after: int) -> tuple[torch.Tensor, int]:
    """A 1-D tensor of `before` elements, an ALIGNMENT-aligned place for `count` and `after` more; and that place."""
    size = dtype.itemsize
    storage = torch.empty(before + count + after + ALIGNMENT // size, dtype=dtype, device=device)
    start = before
    missing = -(storage.data_ptr() + start * size) % ALIGNMENT
    return storage, start + missing // size


class Guarded:
    """A tensor inside poisoned guard bands; made by `guarded_empty`.

    Attributes:
        tensor: what the operator writes into. Every element holds the poison until it is written.
    """

    def __init__(
        self,
        shape: Sequence[int],
        dtype: torch.dtype,
        device: torch.device,
        strides: Sequence[int],
        offset: int,
        name: str,
    ) -> None:
        self.name = name
        self._shape = tuple(shape)
        self._strides = tuple(strides)
        self._poison = _poison_bits(dtype)
        extent = (
            0 if 0 in self._shape else 1 + sum((n - 1) * s for n, s in zip(self._shape, self._strides, strict=True))
        )
        guard = GUARD_BYTES // dtype.itemsize
        storage, start = _aligned(offset + extent, dtype, device, guard, guard)
        self._bits = storage.view(INT_OF_SIZE[dtype.itemsize])
        self._bits.fill_(self._poison)
        self._start = start + offset
        self._extent = extent
        self._dense = self._strides == dense_strides(self._shape)
        self.tensor = storage.as_strided(self._shape, self._strides, self._start)

    def __enter__(self) -> Guarded:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.check()

    def check(self, *, written: bool = True) -> None:
        """Raises GuardError when memory outside the tensor changed or, with `written`, when an element still holds
        the poison.

        With strides that leave gaps, the gaps count as guard bands. For one-byte dtypes the poison is also a legal
        value, so pass `written=False` where an output may hold it.
        """
        stop = self._start + self._extent
        self._untouched(self._bits[: self._start], -self._start, "before")
        self._untouched(self._bits[stop:], self._extent, "after")
        if self._extent == 0:
            return
        body = self._bits[self._start : stop]
        if not self._dense:
            gaps = torch.ones(self._extent, dtype=torch.bool, device=body.device)
            gaps.as_strided(self._shape, self._strides).fill_(False)
            touched = gaps & (body != self._poison)
            if bool(touched.any()):
                first = int(touched.nonzero()[0])
                raise GuardError(
                    f"{self.name}: {int(touched.sum())} elements between the rows were overwritten, "
                    f"the first {first} elements after the start (strides {self._strides})"
                )
        if written:
            self._all_written(body)

    def _untouched(self, band: torch.Tensor, base: int, side: str) -> None:
        changed = band != self._poison
        if bool(changed.any()):
            where = changed.nonzero().reshape(-1)
            nearest = int(where[-1] if side == "before" else where[0]) + base
            distance = -nearest if side == "before" else nearest - self._extent + 1
            unit = f"{self.tensor.element_size()}-byte elements"
            raise GuardError(
                f"{self.name}: memory {side} the output was overwritten: {where.numel()} {unit} of the guard changed, "
                f"the nearest {distance} elements {side} the {'start' if side == 'before' else 'end'}"
            )

    def _all_written(self, body: torch.Tensor) -> None:
        if self._dense:
            pieces: Iterator[torch.Tensor] = iter(body.split(CHECK_CHUNK))
        else:
            pieces = iter((body.as_strided(self._shape, self._strides, self._start).reshape(-1),))
        seen = 0
        for piece in pieces:
            holds = piece == self._poison
            if bool(holds.any()):
                flat = seen + int(holds.nonzero()[0])
                index = [int(i) for i in torch.unravel_index(torch.tensor(flat), self._shape)] if self._shape else []
                count = int(holds.sum())
                raise GuardError(f"{self.name}: {count} elements were never written, the first at {index}")
            seen += piece.numel()


def guarded_empty(
    shape: Sequence[int],
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    *,
    strides: Sequence[int] | None = None,
    row_padding: int = 0,
    offset: int = 0,
    name: str = "output",
) -> Guarded:
    """An uninitialised output inside poisoned guard bands.

    Args:
        shape: of the tensor.
        dtype: of the tensor.
        device: of the tensor.
        strides: in elements; may leave gaps (which are then guarded too) but not overlap.
        row_padding: elements between rows of the last dimension, instead of `strides`.
        offset: elements past a 256-byte boundary at which the tensor starts: 0 is aligned, 1 is misaligned for every
            vector access.
        name: for messages.

    Use it as `with guarded_empty(...) as out: op(x, out=out.tensor)`, or call `check()` yourself.
    """
    shape = tuple(int(n) for n in shape)
    if strides is not None and row_padding:
        raise ValueError("guarded_empty: give strides or row_padding, not both")
    if strides is None:
        padded = (*shape[:-1], shape[-1] + row_padding) if shape else ()
        strides = dense_strides(padded)
    if len(strides) != len(shape):
        raise ValueError(f"guarded_empty: {len(strides)} strides for {len(shape)} dimensions")
    needed = 1
    for size, stride in sorted(zip(shape, strides, strict=True), key=lambda pair: pair[1]):
        if size > 1:
            if stride < needed:
                raise ValueError(f"guarded_empty: strides {tuple(strides)} make elements of shape {shape} overlap")
            needed = stride * (size - 1) + needed
    if offset < 0:
        raise ValueError(f"guarded_empty: offset must be 0 or more, got {offset}")
    return Guarded(shape, dtype, torch.device(device), strides, offset, name)

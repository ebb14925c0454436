"""What the tests of every operator package share: error bounds, guarded allocations, awkward inputs, delayed streams.

The bound of `error_limit` is the only tolerance of this project. It is relative to what an honest implementation in
PyTorch reaches on the same inputs, so it follows the dtype, the width and the data, and no test carries a number of
its own.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import torch

__all__ = [
    "Comparison",
    "GuardError",
    "Guarded",
    "assert_bit_equal",
    "assert_close_to",
    "compare",
    "delay_stream",
    "error_limit",
    "expanded",
    "guarded_empty",
    "halves",
    "honest_math",
    "misaligned",
    "rounding_step",
    "rows_strided",
]

# Bytes on either side of a guarded tensor: more than a warp of 16-byte accesses, so that one stray vector store
# lands inside.
GUARD_BYTES = 4096
# Every address handed out is a multiple of this before the caller's own offset is added.
ALIGNMENT = 256
# Elements looked at in one piece by Guarded.check: bounds its scratch memory on outputs of many gigabytes.
CHECK_CHUNK = 1 << 27

_INT_OF_SIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
# NaNs with a payload that no arithmetic produces (the hardware's own NaN is 0x7fff, 0x7fffffff or the 0x7fc0...
# family).
_POISON_BITS: dict[torch.dtype, int] = {
    torch.float16: 0x7E5A,
    torch.bfloat16: 0x7FDA,
    torch.float32: 0x7FDA5A5A,
    torch.float64: 0x7FFA5A5A5A5A5A5A,
}
_POISON_BY_SIZE = {1: 0xA5, 2: 0x5AA5, 4: 0x5AA55AA5, 8: 0x5AA55AA55AA55AA5}


# ------------------------------------------------------------------------------------------------------------------
# Error bounds


def rounding_step(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Distance between neighbouring numbers of `dtype` at each value's magnitude (float64, same shape).

    Below the smallest normal number it is the smallest subnormal; values beyond the largest number get the step of
    the last binade.
    """
    info = torch.finfo(dtype)
    magnitude = values.detach().to(torch.float64).abs().clamp(min=info.tiny, max=info.max)
    _, exponent = torch.frexp(magnitude)  # magnitude = m * 2**exponent with m in [0.5, 1)
    return torch.ldexp(torch.full_like(magnitude, info.eps), exponent - 1)


def _row_max(values: torch.Tensor) -> torch.Tensor:
    """Largest finite magnitude of each row, keeping the last dimension as 1."""
    finite = torch.where(torch.isfinite(values), values, 0.0).abs()
    if finite.dim() == 0:
        return finite
    if finite.shape[-1] == 0:
        return finite.new_zeros((*finite.shape[:-1], 1))
    return finite.amax(dim=-1, keepdim=True)


def _finite_error(values: torch.Tensor, reference64: torch.Tensor) -> torch.Tensor:
    """|values - reference| in float64, 0 where either is not finite (those are compared by kind, not by distance)."""
    wide = values.to(torch.float64)
    both = torch.isfinite(wide) & torch.isfinite(reference64)
    return torch.where(both, wide - reference64, 0.0).abs()


def error_limit(
    actual_like: torch.Tensor | torch.dtype, reference64: torch.Tensor, honest: torch.Tensor | float
) -> torch.Tensor:
    """Largest allowed |actual - reference| of each row, float64, shape `[..., 1]` (broadcasts over the last dimension).

    limit = 2 * (largest error of `honest`) + half a rounding step of the dtype at the row's largest reference value.

    `honest` is the same computation written plainly in PyTorch with the same input and output dtype (FP32 inside,
    one rounding), or its largest error as a number. Its largest error is looked for over the whole tensor, once in
    absolute terms and once in rounding steps of each row; the smaller of the two bounds holds. So a row of small
    numbers is not excused by the errors of a row of large ones, and no row's limit is under twice the honest error
    in that row.

    Raises:
        TypeError: the dtype is not a floating one, or `reference64` is not float64.
        ValueError: `honest` has another shape than `reference64`.
    """
    dtype = actual_like if isinstance(actual_like, torch.dtype) else actual_like.dtype
    if not dtype.is_floating_point:
        raise TypeError(f"error_limit: {dtype} has no rounding step; compare integers exactly")
    if reference64.dtype != torch.float64:
        raise TypeError(f"error_limit: reference64 must be float64, got {reference64.dtype}")
    step = rounding_step(_row_max(reference64), dtype)
    if not isinstance(honest, torch.Tensor):
        return 2.0 * float(honest) + 0.5 * step
    if honest.shape != reference64.shape:
        raise ValueError(
            f"error_limit: honest has shape {tuple(honest.shape)} but reference64 has {tuple(reference64.shape)}"
        )
    if reference64.numel() == 0:
        return 0.5 * step
    row_error = _row_max(_finite_error(honest, reference64))
    absolute = row_error.amax()
    in_steps = (row_error / step).amax() * step
    return 2.0 * torch.minimum(absolute, in_steps) + 0.5 * step


@dataclass(frozen=True)
class Comparison:
    """How far an output is from the truth. `error` and `limit` belong to the element that uses most of its limit."""

    name: str
    ok: bool
    error: float
    limit: float
    index: tuple[int, ...] | None
    actual: float
    expected: float
    outside: int
    count: int
    problem: str | None

    @property
    def share(self) -> float:
        """error / limit; above 1 the output is wrong."""
        if self.limit > 0:
            return self.error / self.limit
        return 0.0 if self.error == 0 else math.inf

    def message(self) -> str:
        """One paragraph for a person: what is wrong, where, by how much."""
        if self.problem is not None and self.index is None:
            return f"{self.name}: {self.problem}"
        where = "" if self.index is None else f" at {list(self.index)}"
        text = (
            f"{self.name}: worst element{where} is {self.actual!r}, reference {self.expected!r}, "
            f"error {self.error:.3e}, limit {self.limit:.3e} ({self.share:.2f} of it); "
            f"{self.outside} of {self.count} elements are outside"
        )
        return text if self.problem is None else f"{text}; {self.problem}"


def _refused(name: str, problem: str) -> Comparison:
    return Comparison(name, False, math.inf, 0.0, None, math.nan, math.nan, 0, 0, problem)


def compare(
    actual: torch.Tensor,
    reference64: torch.Tensor,
    honest: torch.Tensor | float,
    name: str = "output",
    *,
    dtype: torch.dtype | None = None,
) -> Comparison:
    """Compares `actual` with the float64 truth under `error_limit`; never raises for a wrong result.

    Where the reference is NaN or infinite the output must be the same; a finite reference that rounds to infinity in
    the output's dtype may be that infinity. `dtype` is the dtype the output has to have (by default the one it has).
    """
    if dtype is not None and actual.dtype != dtype:
        return _refused(name, f"dtype is {actual.dtype}, must be {dtype}")
    if actual.shape != reference64.shape:
        return _refused(name, f"shape is {tuple(actual.shape)}, must be {tuple(reference64.shape)}")
    reference64 = reference64.to(actual.device)
    if isinstance(honest, torch.Tensor):
        honest = honest.to(actual.device)
    limit = error_limit(actual, reference64, honest)
    if actual.numel() == 0:
        return Comparison(name, True, 0.0, float(limit.amax()) if limit.numel() else 0.0, None, 0.0, 0.0, 0, 0, None)

    wide = actual.to(torch.float64)
    limits = limit.expand(wide.shape)
    error = (wide - reference64).abs()
    # A value and a reference that agree in not being finite have no distance; one alone has an infinite one.
    rounded = reference64.to(actual.dtype).to(torch.float64)
    same_kind = (torch.isnan(wide) & torch.isnan(reference64)) | (~torch.isfinite(wide) & (wide == rounded))
    error = torch.where(same_kind, 0.0, torch.where(torch.isnan(error), math.inf, error))
    # Rank by the share of the limit; a limit of 0 with an error counts as infinitely bad.
    share = torch.where(error == 0, 0.0, error / limits.clamp(min=torch.finfo(torch.float64).tiny))
    flat = int(share.argmax())
    index = tuple(int(i) for i in torch.unravel_index(torch.tensor(flat), wide.shape)) if wide.dim() else ()
    outside = int((error > limits).sum())
    at = error.reshape(-1)[flat]
    problem = None
    if outside:
        bad_nan = int((torch.isnan(wide) & ~torch.isnan(reference64)).sum())
        if bad_nan:
            problem = f"{bad_nan} NaN where the reference has none"
    return Comparison(
        name,
        outside == 0,
        float(at),
        float(limits.reshape(-1)[flat]),
        index,
        float(wide.reshape(-1)[flat]),
        float(reference64.reshape(-1)[flat]),
        outside,
        wide.numel(),
        problem,
    )


def assert_close_to(
    actual: torch.Tensor,
    reference64: torch.Tensor,
    honest: torch.Tensor | float,
    name: str = "output",
    *,
    dtype: torch.dtype | None = None,
) -> Comparison:
    """Raises AssertionError with the worst element, its index, error and limit when it is outside `error_limit`."""
    result = compare(actual, reference64, honest, name, dtype=dtype)
    if not result.ok:
        raise AssertionError(result.message())
    return result


def assert_bit_equal(actual: torch.Tensor, expected: torch.Tensor, name: str = "output") -> None:
    """Raises AssertionError unless shape, dtype and bits are the same (NaN payloads and signs of zero included)."""
    if actual.dtype != expected.dtype or actual.shape != expected.shape:
        raise AssertionError(
            f"{name}: {actual.dtype} {tuple(actual.shape)} compared with {expected.dtype} {tuple(expected.shape)}"
        )
    as_int = _INT_OF_SIZE[actual.element_size()]
    left = actual.contiguous().view(as_int).reshape(-1)
    right = expected.to(actual.device).contiguous().view(as_int).reshape(-1)
    if torch.equal(left, right):
        return
    wrong = (left != right).nonzero().reshape(-1)
    flat = int(wrong[0])
    index = [int(i) for i in torch.unravel_index(torch.tensor(flat), actual.shape)] if actual.dim() else []
    raise AssertionError(
        f"{name}: {wrong.numel()} of {left.numel()} elements differ in their bits; first at {index}: "
        f"{actual.reshape(-1)[flat].item()!r} instead of {expected.reshape(-1)[flat].item()!r}"
    )


@contextlib.contextmanager
def honest_math() -> Iterator[None]:
    """Inside, PyTorch's matrix products accumulate in FP32: no TF32, no reduced-precision reductions."""
    matmul = torch.backends.cuda.matmul
    names = ("allow_tf32", "allow_fp16_reduced_precision_reduction", "allow_bf16_reduced_precision_reduction")
    before = {name: getattr(matmul, name) for name in names}
    before_cudnn = torch.backends.cudnn.allow_tf32
    try:
        for name in names:
            setattr(matmul, name, False)
        torch.backends.cudnn.allow_tf32 = False
        yield
    finally:
        for name, value in before.items():
            setattr(matmul, name, value)
        torch.backends.cudnn.allow_tf32 = before_cudnn


# ------------------------------------------------------------------------------------------------------------------
# Guarded allocations


class GuardError(AssertionError):
    """A guard byte changed, or an output element was never written."""


def _poison_bits(dtype: torch.dtype) -> int:
    return _POISON_BITS.get(dtype, _POISON_BY_SIZE[dtype.itemsize])


def _dense_strides(shape: Sequence[int]) -> tuple[int, ...]:
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
        self._bits = storage.view(_INT_OF_SIZE[dtype.itemsize])
        self._bits.fill_(self._poison)
        self._start = start + offset
        self._extent = extent
        self._dense = self._strides == _dense_strides(self._shape)
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
        strides = _dense_strides(padded)
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


# ------------------------------------------------------------------------------------------------------------------
# Awkward inputs: the same values in another layout. What surrounds them is poison, so that reading it shows.


def _placed(values: torch.Tensor, strides: Sequence[int], offset: int) -> torch.Tensor:
    holder = Guarded(values.shape, values.dtype, values.device, strides, offset, "input")
    holder.tensor.copy_(values)
    return holder.tensor


def rows_strided(values: torch.Tensor, padding: int = 8) -> torch.Tensor:
    """The same values with `padding` poisoned elements between rows of the last dimension."""
    if values.dim() == 0:
        raise ValueError("rows_strided: needs at least one dimension")
    padded = (*values.shape[:-1], values.shape[-1] + padding)
    return _placed(values, _dense_strides(padded), 0)


def misaligned(values: torch.Tensor, offset: int = 1) -> torch.Tensor:
    """A contiguous copy that starts `offset` elements past a 256-byte boundary."""
    return _placed(values, _dense_strides(values.shape), offset)


def expanded(row: torch.Tensor, rows: int) -> torch.Tensor:
    """A `[rows, ...]` view of one row: stride 0 in the first dimension."""
    return row.unsqueeze(0).expand(rows, *row.shape)


def halves(left: torch.Tensor, right: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Both inputs as the two halves of the last dimension of one tensor: views, no copies afterwards."""
    if left.shape != right.shape or left.dtype != right.dtype:
        raise ValueError("halves: both inputs must have one shape and dtype")
    both = torch.cat((left, right), dim=-1)
    return both[..., : left.shape[-1]], both[..., left.shape[-1] :]


# ------------------------------------------------------------------------------------------------------------------
# Streams


def delay_stream(milliseconds: float = 20.0, stream: Any = None) -> None:
    """Keeps a CUDA stream busy (the current one by default), so that work ordered wrongly against it reads stale data.

    Work enqueued afterwards on that stream waits; the call itself returns at once.
    """
    cycles_per_ms = 2_000_000  # at 2 GHz; a slower clock makes the delay longer, which is the safe side
    with torch.cuda.stream(stream if stream is not None else torch.cuda.current_stream()):
        torch.cuda._sleep(int(milliseconds * cycles_per_ms))

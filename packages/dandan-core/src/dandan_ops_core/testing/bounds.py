"""How far a result may be from the truth: the only tolerance of this project, and comparison bit by bit."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch

# The integer of the same size, under which bits are compared.
INT_OF_SIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


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
    as_int = INT_OF_SIZE[actual.element_size()]
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

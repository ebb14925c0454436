"""The rules of the arguments, for the CPU kernel, the fakes and the words of an error. csrc/bindings.cpp has the same
for CUDA.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from dandan_ops_core.tensors import dtype_name, overlap, overlaps_itself, shape_text

__all__ = ["gemm"]

DTYPES = (torch.float16, torch.bfloat16)

Outputs = Sequence[torch.Tensor] | None


def _tensor(argument: str, t: object) -> torch.Tensor:
    if not isinstance(t, torch.Tensor):
        raise TypeError(f"gemm: {argument} is {type(t).__name__}; a tensor is needed")
    if t.is_nested and t.layout == torch.strided:
        raise TypeError(f"gemm: {argument} is a nested tensor; a strided tensor is needed")
    if t.layout != torch.strided:
        raise TypeError(f"gemm: {argument} has layout {dtype_name(t.layout)}; a strided tensor is needed")  # type: ignore[arg-type]
    return t


def _like_a(argument: str, t: object, a: torch.Tensor) -> torch.Tensor:
    other = _tensor(argument, t)
    if other.device != a.device:
        raise ValueError(f"gemm: {argument} is on {other.device} but a is on {a.device}")
    if other.dtype != a.dtype:
        raise TypeError(f"gemm: {argument} has dtype {dtype_name(other.dtype)} but a has dtype {dtype_name(a.dtype)}")
    return other


def _flag(argument: str, value: object) -> None:
    # What torch's dispatcher takes for a bool: whatever has a truth value of its own (numpy's bool, 0, 1), and None.
    if value is not None and not hasattr(type(value), "__bool__"):
        raise TypeError(f"gemm: {argument} is {type(value).__name__}; a bool is needed")


def gemm(a: object, b: object, bias: object, weight_transposed: object, static_weight: object, *, out: Outputs) -> None:
    """Raises TypeError or ValueError when an argument of gemm breaks a rule; `out`: the output in a tuple, or None."""
    left = _tensor("a", a)
    _flag("weight_transposed", weight_transposed)
    _flag("static_weight", static_weight)
    if left.dim() < 1:
        raise ValueError("gemm: a has 0 dimensions; at least 1 is needed")
    if left.dtype not in DTYPES:
        raise TypeError(f"gemm: a has dtype {dtype_name(left.dtype)}; float16 and bfloat16 are supported")
    right = _like_a("b", b, left)
    if right.dim() != 2:
        form = "[N, K]" if weight_transposed else "[K, N]"
        raise ValueError(f"gemm: b has shape {shape_text(right.shape)}; {form} is needed")
    n, k = right.shape if weight_transposed else reversed(right.shape)
    if k != left.shape[-1]:
        hint = f"; with weight_transposed={not weight_transposed} it would fit" if n == left.shape[-1] else ""
        raise ValueError(f"gemm: b has K={k} but a has K={left.shape[-1]}{hint}")
    if bias is not None:
        vector = _like_a("bias", bias, left)
        if vector.dim() != 1 or vector.shape[0] != n:
            raise ValueError(f"gemm: bias has shape {shape_text(vector.shape)} but b has N={n}")
    if out is not None:
        _output(out[0], left, right, bias, n)


def _output(t: object, a: torch.Tensor, b: torch.Tensor, bias: object, n: int) -> None:
    out = _like_a("out", t, a)
    shape = (*a.shape[:-1], n)
    if out.shape != shape:
        raise ValueError(f"gemm: out has shape {shape_text(out.shape)}; {shape_text(shape)} is needed")
    if overlaps_itself(out):
        raise ValueError("gemm: elements of out share memory")
    for name, other in (("a", a), ("b", b), ("bias", bias)):
        if isinstance(other, torch.Tensor) and overlap(out, other) != "none":
            raise ValueError(f"gemm: out overlaps {name}")

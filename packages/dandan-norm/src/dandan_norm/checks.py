"""The rules of the arguments, for the CPU kernels, the fakes and the words of an error. csrc/bindings.cpp has the same
for CUDA.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import SupportsFloat

import torch

from dandan_ops_core.tensors import dtype_name, overlap, overlaps_itself, shape_text

__all__ = ["argmax", "layer_norm", "residual_rms_norm", "rms_norm", "silu_and_mul", "softmax"]

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
_SMALLEST, _LARGEST = torch.finfo(torch.float32).tiny, torch.finfo(torch.float32).max

Outputs = Sequence[torch.Tensor] | None


def _tensor(op: str, argument: str, t: object) -> torch.Tensor:
    if not isinstance(t, torch.Tensor):
        raise TypeError(f"{op}: {argument} is {type(t).__name__}; a tensor is needed")
    if t.is_nested and t.layout == torch.strided:
        raise TypeError(f"{op}: {argument} is a nested tensor; a strided tensor is needed")
    if t.layout != torch.strided:
        raise TypeError(f"{op}: {argument} has layout {dtype_name(t.layout)}; a strided tensor is needed")  # type: ignore[arg-type]
    return t


def _dtype(op: str, argument: str, t: torch.Tensor) -> None:
    if t.dtype not in DTYPES:
        raise TypeError(
            f"{op}: {argument} has dtype {dtype_name(t.dtype)}; float16, bfloat16 and float32 are supported"
        )


def _activation(op: str, argument: str, t: object) -> torch.Tensor:
    x = _tensor(op, argument, t)
    if x.dim() < 1:
        raise ValueError(f"{op}: {argument} has 0 dimensions; at least 1 is needed")
    _dtype(op, argument, x)
    return x


def _device(op: str, argument: str, t: torch.Tensor, x_name: str, x: torch.Tensor) -> None:
    if t.device != x.device:
        raise ValueError(f"{op}: {argument} is on {t.device} but {x_name} is on {x.device}")


def _like(op: str, argument: str, t: object, x_name: str, x: torch.Tensor) -> torch.Tensor:
    other = _tensor(op, argument, t)
    _device(op, argument, other, x_name, x)
    if other.dtype != x.dtype:
        raise TypeError(
            f"{op}: {argument} has dtype {dtype_name(other.dtype)} but {x_name} has dtype {dtype_name(x.dtype)}"
        )
    if other.shape != x.shape:
        raise ValueError(
            f"{op}: {argument} has shape {shape_text(other.shape)} but {x_name} has shape {shape_text(x.shape)}"
        )
    return other


def _row_vector(op: str, argument: str, t: object, x: torch.Tensor) -> None:
    if t is None:
        return
    vector = _tensor(op, argument, t)
    _device(op, argument, vector, "x", x)
    _dtype(op, argument, vector)
    if vector.shape != x.shape[-1:]:
        raise ValueError(f"{op}: {argument} has shape {shape_text(vector.shape)} but x has {x.shape[-1]} columns")


def _eps(op: str, eps: object) -> None:
    # What torch's dispatcher takes for a float: whatever converts to one (numpy scalars, Fraction, Decimal), no text.
    if not isinstance(eps, SupportsFloat) or isinstance(eps, torch.Tensor):
        raise TypeError(f"{op}: eps is {type(eps).__name__}; a number is needed")
    try:
        value = float(eps)
    except OverflowError:
        value = math.inf
    if not _SMALLEST <= value <= _LARGEST:
        raise ValueError(f"{op}: eps is {value:g}; a positive normal float32 number is needed")


def _overlap(op: str, argument: str, out: torch.Tensor, name: str, t: torch.Tensor | None, same_allowed: bool) -> None:
    found = "none" if t is None else overlap(out, t)
    if found == "none" or (found == "same" and same_allowed):
        return
    raise ValueError(f"{op}: {argument} overlaps {name}" + (" without being the same elements" if same_allowed else ""))


def _output(
    op: str,
    argument: str,
    t: object,
    x_name: str,
    x: torch.Tensor,
    others: Sequence[tuple[str, torch.Tensor | None]] = (),
    vectors: Sequence[tuple[str, torch.Tensor | None]] = (),
) -> torch.Tensor:
    out = _tensor(op, argument, t)
    _device(op, argument, out, x_name, x)
    dtype, shape = (torch.int64, x.shape[:-1]) if op == "argmax" else (x.dtype, x.shape)
    if out.dtype != dtype:
        raise TypeError(f"{op}: {argument} has dtype {dtype_name(out.dtype)}; {dtype_name(dtype)} is needed")
    if out.shape != shape:
        raise ValueError(f"{op}: {argument} has shape {shape_text(out.shape)}; {shape_text(shape)} is needed")
    if overlaps_itself(out):
        raise ValueError(f"{op}: elements of {argument} share memory")
    for name, other in ((x_name, x), *others):
        _overlap(op, argument, out, name, other, op != "argmax")
    for name, vector in vectors:
        _overlap(op, argument, out, name, vector, False)
    return out


def rms_norm(x: object, weight: object, eps: object, *, out: Outputs) -> None:
    """Raises TypeError or ValueError when an argument of rms_norm breaks a rule; `out`: the outputs, or None."""
    values = _activation("rms_norm", "x", x)
    _row_vector("rms_norm", "weight", weight, values)
    _eps("rms_norm", eps)
    if out is not None:
        _output("rms_norm", "out", out[0], "x", values, vectors=[("weight", weight)])  # type: ignore[list-item]


def residual_rms_norm(x: object, residual: object, weight: object, eps: object, *, out: Outputs) -> None:
    """Raises TypeError or ValueError when an argument of residual_rms_norm breaks a rule; `out`: both, or None."""
    op = "residual_rms_norm"
    values = _activation(op, "x", x)
    other = _like(op, "residual", residual, "x", values)
    _row_vector(op, "weight", weight, values)
    _eps(op, eps)
    if out is None:
        return
    if not isinstance(out, (tuple, list)) or len(out) != 2:
        count = f" of {len(out)}" if isinstance(out, (tuple, list)) else ""
        raise TypeError(f"{op}: out is {type(out).__name__}{count}; a pair of tensors (normalized, summed) is needed")
    for number, t in enumerate(out):
        _output(op, f"out[{number}]", t, "x", values, [("residual", other)], [("weight", weight)])  # type: ignore[list-item]
    _overlap(op, "out[1]", out[1], "out[0]", out[0], False)


def layer_norm(x: object, weight: object, bias: object, eps: object, *, out: Outputs) -> None:
    """Raises TypeError or ValueError when an argument of layer_norm breaks a rule; `out`: the outputs, or None."""
    values = _activation("layer_norm", "x", x)
    _row_vector("layer_norm", "weight", weight, values)
    _row_vector("layer_norm", "bias", bias, values)
    _eps("layer_norm", eps)
    if out is not None:
        _output("layer_norm", "out", out[0], "x", values, vectors=[("weight", weight), ("bias", bias)])  # type: ignore[list-item]


def softmax(x: object, *, out: Outputs) -> None:
    """Raises TypeError or ValueError when an argument of softmax breaks a rule; `out`: the outputs, or None."""
    values = _activation("softmax", "x", x)
    if out is not None:
        _output("softmax", "out", out[0], "x", values)


def silu_and_mul(gate: object, up: object, *, out: Outputs) -> None:
    """Raises TypeError or ValueError when an argument of silu_and_mul breaks a rule; `out`: the outputs, or None."""
    values = _activation("silu_and_mul", "gate", gate)
    other = _like("silu_and_mul", "up", up, "gate", values)
    if out is not None:
        _output("silu_and_mul", "out", out[0], "gate", values, [("up", other)])


def argmax(x: object, *, out: Outputs) -> None:
    """Raises TypeError or ValueError when an argument of argmax breaks a rule; `out`: the outputs, or None."""
    values = _activation("argmax", "x", x)
    if values.shape[-1] == 0:
        raise ValueError("argmax: x has 0 columns; the maximum of nothing is undefined")
    if out is not None:
        _output("argmax", "out", out[0], "x", values)

"""The rules of the arguments, for the CPU kernel, the fakes, the words of an error, and the format.

Each rule names the operator, the argument, what is needed and what came. `op` is the name that a message begins with.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from dandan_ops_core.tensors import dtype_name, overlap, overlaps_itself, shape_text
from dandan_w4a16 import kernel_order

__all__ = [
    "GROUP_SIZES",
    "ZERO_MODES",
    "floating",
    "group_size",
    "integer",
    "no_gradient",
    "ordered_weight",
    "packed_linear",
    "packed_weight",
    "repack",
    "tensor",
    "values",
    "w4a16_linear",
    "zero_mode",
]

GROUP_SIZES = (32, 64, 128)
ZERO_MODES = ("integer", "float")
ACTIVATIONS = (torch.float16, torch.bfloat16)
FLOATS = (torch.float16, torch.bfloat16, torch.float32)
INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)

Outputs = Sequence[torch.Tensor] | None


def tensor(op: str, argument: str, t: object) -> torch.Tensor:
    """`t`, if it is a strided tensor."""
    if not isinstance(t, torch.Tensor):
        raise TypeError(f"{op}: {argument} is {type(t).__name__}; a tensor is needed")
    if t.is_nested and t.layout == torch.strided:
        raise TypeError(f"{op}: {argument} is a nested tensor; a strided tensor is needed")
    if t.layout != torch.strided:
        raise TypeError(f"{op}: {argument} has layout {dtype_name(t.layout)}; a strided tensor is needed")  # type: ignore[arg-type]
    return t


def floating(op: str, argument: str, t: object) -> torch.Tensor:
    """`t`, if it is a tensor of one of the three floating dtypes."""
    checked = tensor(op, argument, t)
    if checked.dtype not in FLOATS:
        raise TypeError(
            f"{op}: {argument} has dtype {dtype_name(checked.dtype)}; float16, bfloat16 and float32 are supported"
        )
    return checked


def integer(op: str, argument: str, t: object) -> torch.Tensor:
    """`t`, if it is a tensor of an integer dtype."""
    checked = tensor(op, argument, t)
    if checked.dtype not in INTEGERS:
        raise TypeError(f"{op}: {argument} has dtype {dtype_name(checked.dtype)}; an integer dtype is needed")
    return checked


def group_size(op: str, size: object) -> int:
    """`size`, if the format has groups of it."""
    if size not in GROUP_SIZES or isinstance(size, bool):
        raise ValueError(f"{op}: group_size is {size!r}; 32, 64 or 128 is needed")
    return int(size)


def zero_mode(op: str, zeros: torch.Tensor, mode: object) -> None:
    """Whether `zeros` have the dtype that the mode has; float zeros are never rounded to integers."""
    if mode not in ZERO_MODES:
        raise ValueError(f"{op}: zero_mode is {mode!r}; 'integer' or 'float' is needed")
    if mode == "integer" and zeros.dtype != torch.uint8:
        hint = "; zero_mode='float' keeps them as they are" if zeros.dtype in FLOATS else ""
        raise TypeError(f"{op}: zeros have dtype {dtype_name(zeros.dtype)}; zero_mode='integer' needs uint8{hint}")
    if mode == "float" and zeros.dtype not in FLOATS:
        raise TypeError(
            f"{op}: zeros have dtype {dtype_name(zeros.dtype)}; zero_mode='float' needs float16, bfloat16 or float32"
        )


def packed_weight(
    op: str, qweight: object, scales: object, zeros: object, size: object, *, whole_groups: bool = True
) -> tuple[int, int]:
    """N and K of a weight whose three tensors fit each other. `whole_groups`: the last one is not short."""
    words = tensor(op, "qweight", qweight)
    if words.dtype != torch.int32:
        raise TypeError(f"{op}: qweight has dtype {dtype_name(words.dtype)}; int32 is needed")
    if words.dim() != 2:
        raise ValueError(f"{op}: qweight has shape {shape_text(words.shape)}; [N, K/8] is needed")
    group = group_size(op, size)
    n, k = words.shape[0], words.shape[1] * 8
    if whole_groups and k % group != 0:
        raise ValueError(f"{op}: K={k} of qweight is not a multiple of group_size={group}")
    groups = (k + group - 1) // group
    for name, t in (("scales", scales), ("zeros", zeros)):
        other = tensor(op, name, t)
        if other.device != words.device:
            raise ValueError(f"{op}: {name} are on {other.device} but qweight is on {words.device}")
        if name == "scales":
            floating(op, name, other)
        elif other.dtype != torch.uint8 and other.dtype not in FLOATS:
            raise TypeError(
                f"{op}: zeros have dtype {dtype_name(other.dtype)}; uint8, or float16, bfloat16 or float32 is needed"
            )
        if other.dim() != 2 or other.shape[0] != n or other.shape[1] != groups:
            raise ValueError(
                f"{op}: {name} have shape {shape_text(other.shape)}; {shape_text((n, groups))} is needed for "
                f"N={n}, K={k}, group_size={group}"
            )
    return n, k


def values(op: str, scales: torch.Tensor, zeros: torch.Tensor) -> None:
    """The rules of values: finite scales, zeros in 0..15 or finite. Reads the tensors, so it waits for a device."""
    for name, t in (("scales", scales), ("zeros", zeros)):
        if t.device.type == "meta":
            continue
        if t.dtype == torch.uint8:
            if t.numel() and int(t.max()) > 15:
                raise ValueError(f"{op}: zeros hold {int(t.max())}; 0 to 15 is needed")
        elif bad := int((~torch.isfinite(t)).sum()):
            raise ValueError(f"{op}: {name} hold {bad} NaN or infinite value{'s' * (bad > 1)}; finite ones are needed")


def no_gradient(op: str, scales: torch.Tensor, zeros: torch.Tensor) -> None:
    """Whether neither of them asks for the gradient that nothing computes; only for calls that record gradients."""
    for name, t in (("scales", scales), ("zeros", zeros)):
        if t.requires_grad:
            raise ValueError(
                f"{op}: {name} require a gradient; gradients are computed for x and bias alone, call it with "
                f"{name}.detach() or under torch.no_grad()"
            )


def _activations(op: str, x: object) -> torch.Tensor:
    left = tensor(op, "x", x)
    if left.dim() < 1:
        raise ValueError(f"{op}: x has 0 dimensions; at least 1 is needed")
    if left.dtype not in ACTIVATIONS:
        raise TypeError(f"{op}: x has dtype {dtype_name(left.dtype)}; float16 and bfloat16 are supported")
    return left


def _rest(op: str, x: torch.Tensor, bias: object, n: int, k: int, weight: str) -> None:
    """The rules that do not depend on the order of the weight, which messages call `weight`."""
    if x.shape[-1] != k:
        raise ValueError(f"{op}: x has K={x.shape[-1]} but {weight} has K={k}")
    if bias is not None:
        vector = tensor(op, "bias", bias)
        if vector.device != x.device:
            raise ValueError(f"{op}: bias is on {vector.device} but x is on {x.device}")
        floating(op, "bias", vector)
        if vector.dim() != 1 or vector.shape[0] != n:
            raise ValueError(f"{op}: bias has shape {shape_text(vector.shape)} but {weight} has N={n}")


def w4a16_linear(
    x: object, qweight: object, scales: object, zeros: object, bias: object, group_size: object, *, out: Outputs
) -> None:
    """Raises TypeError or ValueError when an argument breaks a rule; `out`: the output in a tuple, or None."""
    op = "w4a16_linear"
    left = _activations(op, x)
    if isinstance(qweight, torch.Tensor) and qweight.device != left.device:
        raise ValueError(f"{op}: qweight is on {qweight.device} but x is on {left.device}")
    n, k = packed_weight(op, qweight, scales, zeros, group_size)
    _rest(op, left, bias, n, k, "qweight")
    if out is not None:
        inputs = (("x", left), ("qweight", qweight), ("scales", scales), ("zeros", zeros), ("bias", bias))
        _output(op, out[0], left, n, inputs)


def ordered_weight(op: str, codes: object, scales: object, n: object, k: object, size: object) -> tuple[int, int]:
    """N and K of a weight in the kernels' order whose two tensors fit them."""
    group = group_size(op, size)
    sizes: list[Any] = []  # ints, under torch.compile perhaps symbolic ones
    for name, given in (("n", n), ("k", k)):
        if not isinstance(given, (int, torch.SymInt)) or isinstance(given, bool):
            raise TypeError(f"{op}: {name} is {type(given).__name__}; an int is needed")
        if given < 0 or given > 0x7FFFFFFF:
            raise ValueError(f"{op}: {name} is {given}; 0 to 2147483647 is needed")
        sizes.append(given)
    rows, columns = sizes
    if columns % 8 != 0:
        raise ValueError(f"{op}: k is {columns}; a multiple of 8 is needed")
    words = tensor(op, "codes", codes)
    if words.dtype != torch.int32:
        raise TypeError(f"{op}: codes have dtype {dtype_name(words.dtype)}; int32 is needed")
    pairs = tensor(op, "scales", scales)
    if pairs.device != words.device:
        raise ValueError(f"{op}: scales are on {pairs.device} but codes are on {words.device}")
    if pairs.dtype not in ACTIVATIONS:
        raise TypeError(f"{op}: scales have dtype {dtype_name(pairs.dtype)}; float16 and bfloat16 are supported")
    for name, t, elements in (
        ("codes", words, kernel_order.code_words(rows, columns)),
        ("scales", pairs, kernel_order.scale_elements(rows, columns, group)),
    ):
        if t.dim() != 1 or t.shape[0] != elements:
            raise ValueError(
                f"{op}: {name} have shape {shape_text(t.shape)}; [{elements}] is needed for n={rows}, k={columns}, "
                f"group_size={group}"
            )
    return rows, columns


def packed_linear(
    x: object, codes: object, scales: object, bias: object, n: object, k: object, group_size: object, *, out: Outputs
) -> None:
    """The same as `w4a16_linear` for a weight in the kernels' order."""
    op = "packed_linear"
    left = _activations(op, x)
    if isinstance(codes, torch.Tensor) and codes.device != left.device:
        raise ValueError(f"{op}: codes are on {codes.device} but x is on {left.device}")
    rows, columns = ordered_weight(op, codes, scales, n, k, group_size)
    _rest(op, left, bias, rows, columns, "the weight")
    if out is not None:
        inputs = (("x", left), ("codes", codes), ("scales", scales), ("bias", bias))
        _output(op, out[0], left, rows, inputs)


def repack(qweight: object, scales: object, zeros: object, group_size: object) -> None:
    """What can be put in order: scales of a dtype that kernels compute in, integer zeros."""
    op = "repack"
    packed_weight(op, qweight, scales, zeros, group_size, whole_groups=False)
    for name, t, allowed, needed in (
        ("scales", scales, ACTIVATIONS, "float16 or bfloat16, the dtype of the activations, is needed"),
        ("zeros", zeros, (torch.uint8,), "uint8 is needed"),
    ):
        if isinstance(t, torch.Tensor) and t.dtype not in allowed:
            raise TypeError(f"{op}: {name} have dtype {dtype_name(t.dtype)}; {needed}")


def _output(op: str, t: object, x: torch.Tensor, n: int, inputs: Sequence[tuple[str, object]]) -> None:
    out = tensor(op, "out", t)
    if out.device != x.device:
        raise ValueError(f"{op}: out is on {out.device} but x is on {x.device}")
    if out.dtype != x.dtype:
        raise TypeError(f"{op}: out has dtype {dtype_name(out.dtype)} but x has dtype {dtype_name(x.dtype)}")
    shape = (*x.shape[:-1], n)
    if out.shape != shape:
        raise ValueError(f"{op}: out has shape {shape_text(out.shape)}; {shape_text(shape)} is needed")
    if overlaps_itself(out):
        raise ValueError(f"{op}: elements of out share memory")
    for name, other in inputs:
        if isinstance(other, torch.Tensor) and overlap(out, other) != "none":
            raise ValueError(f"{op}: out overlaps {name}")

"""The rules of the arguments, for the CPU kernel, the fakes and the words of an error. csrc/bindings.cpp has the same
for CUDA, but for the values inside cu_seqlens and seqused_k: those are read where the host has them, and on CUDA
devices under DANDAN_DEBUG=1 alone, since reading them waits for the device.
"""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Sequence

import torch

from dandan_ops_core.tensors import dtype_name, overlap, overlaps_itself, shape_text

__all__ = ["DEBUG", "flash_attention", "flash_attention_varlen", "starts"]

DEBUG = os.environ.get("DANDAN_DEBUG") == "1"
"""Whether values on CUDA devices are read; decided when the package is imported."""

DTYPES = (torch.float16, torch.bfloat16)

Outputs = Sequence[torch.Tensor] | None


# ------------------------------------------------------------------------------------------------------------ arguments


def _tensor(op: str, argument: str, t: object) -> torch.Tensor:
    if not isinstance(t, torch.Tensor):
        raise TypeError(f"{op}: {argument} is {type(t).__name__}; a tensor is needed")
    if t.is_nested and t.layout == torch.strided:
        raise TypeError(f"{op}: {argument} is a nested tensor; a strided tensor is needed")
    if t.layout != torch.strided:
        raise TypeError(f"{op}: {argument} has layout {dtype_name(t.layout)}; a strided tensor is needed")  # type: ignore[arg-type]
    return t


def _on_device(op: str, argument: str, t: object, q: torch.Tensor) -> torch.Tensor:
    other = _tensor(op, argument, t)
    if other.device != q.device:
        raise ValueError(f"{op}: {argument} is on {other.device} but q is on {q.device}")
    return other


def _like_q(op: str, argument: str, t: object, q: torch.Tensor) -> torch.Tensor:
    other = _on_device(op, argument, t, q)
    if other.dtype != q.dtype:
        raise TypeError(f"{op}: {argument} has dtype {dtype_name(other.dtype)} but q has dtype {dtype_name(q.dtype)}")
    return other


def _of_sequences(op: str, argument: str, t: object, q: torch.Tensor, length: int | None, why: str) -> torch.Tensor:
    """`t`, if it is an int32 vector on q's device, of `length` numbers unless that is None."""
    vector = _on_device(op, argument, t, q)
    if vector.dtype != torch.int32:
        raise TypeError(f"{op}: {argument} has dtype {dtype_name(vector.dtype)}; int32 is needed")
    if vector.dim() != 1:
        raise ValueError(f"{op}: {argument} has shape {shape_text(vector.shape)}; a vector is needed")
    if length is not None and vector.shape[0] != length:
        raise ValueError(f"{op}: {argument} has {vector.shape[0]} numbers; {length} are needed {why}")
    return vector


def _flag(op: str, argument: str, value: object) -> None:
    # What torch's dispatcher takes for a bool: whatever has a truth value of its own (numpy's bool, 0, 1), and None.
    if value is not None and not hasattr(type(value), "__bool__"):
        raise TypeError(f"{op}: {argument} is {type(value).__name__}; a bool is needed")


def _whole(op: str, argument: str, value: object, least: int | None = None) -> None:
    """A whole number that fits 64 bits, of `least` or more. A symbolic one is not asked for its size."""
    if isinstance(value, torch.SymInt):
        return
    # What torch's dispatcher takes for an int: whatever has a whole value of its own, but no float.
    if isinstance(value, float) or not hasattr(type(value), "__int__"):
        raise TypeError(f"{op}: {argument} is {type(value).__name__}; an int is needed")
    number = int(value)  # type: ignore[call-overload]
    if not -(2**63) <= number < 2**63:
        raise ValueError(f"{op}: {argument} is {number}; a number of 64 bits is needed")
    if least is not None and number < least:
        raise ValueError(f"{op}: {argument} is {number}; {least} or more is needed")


def _number(op: str, argument: str, value: object) -> float | None:
    """A floating number; None for a symbolic one."""
    if isinstance(value, (torch.SymInt, torch.SymFloat)):
        return None
    if not hasattr(type(value), "__float__"):
        raise TypeError(f"{op}: {argument} is {type(value).__name__}; a float is needed")
    try:
        return float(value)  # type: ignore[arg-type]
    except OverflowError:  # an int beyond the floats
        return math.inf


def _options(op: str, causal: object, softmax_scale: object, window_size: object, softcap: object) -> None:
    _flag(op, "causal", causal)
    if softmax_scale is not None:
        scale = _number(op, "softmax_scale", softmax_scale)
        if scale is not None and not (math.isfinite(scale) and scale > 0):
            raise ValueError(f"{op}: softmax_scale is {scale}; a finite number above 0 is needed")
    if window_size is not None:
        _whole(op, "window_size", window_size, 1)
    cap = _number(op, "softcap", softcap)
    if cap is not None and not (math.isfinite(cap) and cap >= 0):
        raise ValueError(f"{op}: softcap is {cap}; 0, for none, or a finite number above it is needed")


def _heads(op: str, q: torch.Tensor, k: object, v: object, form: str, axis: int) -> tuple[torch.Tensor, torch.Tensor]:
    """k and v, if they fit q and each other; `axis` is that of the heads."""
    keys, values = _like_q(op, "k", k, q), _like_q(op, "v", v, q)
    if keys.dim() != q.dim():
        raise ValueError(f"{op}: k has shape {shape_text(keys.shape)}; {form} is needed")
    if q.shape[-1] < 1:
        raise ValueError(f"{op}: q has head_dim=0; at least 1 is needed")
    if keys.shape[-1] != q.shape[-1]:
        raise ValueError(f"{op}: k has head_dim={keys.shape[-1]} but q has head_dim={q.shape[-1]}")
    if keys.shape[axis] < 1:
        raise ValueError(f"{op}: k has num_heads_kv=0; at least 1 is needed")
    if q.shape[axis] % keys.shape[axis] != 0:
        raise ValueError(
            f"{op}: q has num_heads_q={q.shape[axis]}, which is not a multiple of num_heads_kv={keys.shape[axis]} of k"
        )
    if values.shape != keys.shape:
        raise ValueError(f"{op}: v has shape {shape_text(values.shape)} but k has shape {shape_text(keys.shape)}")
    return keys, values


def _outputs(
    op: str, outputs: Sequence[torch.Tensor], q: torch.Tensor, lse_shape: tuple[int, ...], inputs: dict[str, object]
) -> None:
    out = _like_q(op, "out", outputs[0], q)
    written = {"out": (out, tuple(q.shape))}
    if len(outputs) > 1:
        lse = _on_device(op, "lse", outputs[1], q)
        if lse.dtype != torch.float32:
            raise TypeError(f"{op}: lse has dtype {dtype_name(lse.dtype)}; float32 is needed")
        written["lse"] = (lse, lse_shape)
        inputs = {**inputs, "out": out}
    for name, (t, shape) in written.items():
        if t.shape != shape:
            raise ValueError(f"{op}: {name} has shape {shape_text(t.shape)}; {shape_text(shape)} is needed")
        if overlaps_itself(t):
            raise ValueError(f"{op}: elements of {name} share memory")
        for other_name, other in inputs.items():
            if isinstance(other, torch.Tensor) and other is not t and overlap(t, other) != "none":
                raise ValueError(f"{op}: {name} overlaps {other_name}")
    if len(outputs) > 1 and not outputs[1].is_contiguous():
        raise ValueError(f"{op}: lse is not contiguous; a contiguous tensor is needed")


# --------------------------------------------------------------------------------------------------------------- values


def _numbers(t: torch.Tensor) -> list[int] | None:
    """A vector's values where they may be read: on the host, or under DANDAN_DEBUG=1 outside of a graph capture."""
    if isinstance(t, torch._subclasses.FakeTensor) or t.device.type not in ("cpu", "cuda"):
        return None
    if t.is_cuda and (not DEBUG or torch.cuda.is_current_stream_capturing()):
        return None
    numbers: list[int] = t.tolist()
    return numbers


def _bounds(op: str, side: str, cu_seqlens: torch.Tensor, total: int, longest: object) -> list[int] | None:
    """The lengths that cu_seqlens gives, if they can be read; its rules."""
    name = f"cu_seqlens_{side}"
    bounds = _numbers(cu_seqlens)
    if bounds is None:
        return None
    if bounds[0] != 0:
        raise ValueError(f"{op}: {name} starts at {bounds[0]}; 0 is needed")
    for i, (begin, end) in enumerate(itertools.pairwise(bounds)):
        if end < begin:
            raise ValueError(f"{op}: {name} falls from {begin} to {end} at sequence {i}; ascending numbers are needed")
    if bounds[-1] > total:
        tensor = "q" if side == "q" else "k"
        raise ValueError(f"{op}: {name} ends at {bounds[-1]} but {tensor} has {total} rows")
    lengths = [end - begin for begin, end in itertools.pairwise(bounds)]
    if isinstance(longest, int) and max(lengths, default=0) > longest:
        raise ValueError(
            f"{op}: max_seqlen_{side} is {longest} but {name} has a sequence of {max(lengths)} rows, "
            f"number {lengths.index(max(lengths))}"
        )
    return lengths


def _used(op: str, seqused_k: torch.Tensor, lengths: list[int] | None) -> None:
    used = _numbers(seqused_k)
    for i, (live, length) in enumerate(zip(used or (), lengths or (), strict=False)):
        if not 0 <= live <= length:
            raise ValueError(f"{op}: seqused_k[{i}] is {live}; 0 to {length} is needed")


# ------------------------------------------------------------------------------------------------------------ operators


def flash_attention(
    q: object,
    k: object,
    v: object,
    causal: object,
    softmax_scale: object,
    query_start: object,
    query_starts: object,
    window_size: object,
    softcap: object,
    seqused_k: object,
    *,
    out: Outputs,
) -> None:
    """Raises TypeError or ValueError when an argument breaks a rule; `out`: the outputs in a tuple, or None."""
    op = "flash_attention"
    queries = _tensor(op, "q", q)
    if queries.dtype not in DTYPES:
        raise TypeError(f"{op}: q has dtype {dtype_name(queries.dtype)}; float16 and bfloat16 are supported")
    if queries.dim() != 4:
        raise ValueError(f"{op}: q has shape {shape_text(queries.shape)}; [B, Hq, Sq, D] is needed")
    keys, _ = _heads(op, queries, k, v, "[B, Hkv, Sk, D]", 1)
    batch, heads, seqlen_q, _ = queries.shape
    if keys.shape[0] != batch:
        raise ValueError(f"{op}: k has batch={keys.shape[0]} but q has batch={batch}")
    _options(op, causal, softmax_scale, window_size, softcap)
    why = f"for batch={batch}"
    if query_starts is not None:
        _of_sequences(op, "query_start", query_starts, queries, batch, why)
    elif query_start is not None:
        _whole(op, "query_start", query_start)
    elif (causal or window_size is not None) and seqlen_q != keys.shape[2]:
        option = "causal=True" if causal else f"window_size={window_size}"
        raise ValueError(
            f"{op}: query_start is None; with {option} it is needed for seqlen_q={seqlen_q} and "
            f"seqlen_k={keys.shape[2]}: seqlen_k - seqlen_q for queries that end with the keys, 0 for queries that "
            f"start with them"
        )
    if seqused_k is not None:
        live = _of_sequences(op, "seqused_k", seqused_k, queries, batch, why)
        _used(op, live, [int(keys.shape[2])] * len(live) if _numbers(live) is not None else None)
    if out is not None:
        inputs = {"q": q, "k": k, "v": v, "query_start": query_starts, "seqused_k": seqused_k}
        _outputs(op, out, queries, (batch, heads, seqlen_q), inputs)


def flash_attention_varlen(
    q: object,
    k: object,
    v: object,
    cu_seqlens_q: object,
    cu_seqlens_k: object,
    max_seqlen_q: object,
    max_seqlen_k: object,
    causal: object,
    softmax_scale: object,
    query_starts: object,
    suffix: object,
    window_size: object,
    softcap: object,
    seqused_k: object,
    *,
    out: Outputs,
) -> None:
    """Raises TypeError or ValueError when an argument breaks a rule; `out`: the outputs in a tuple, or None."""
    op = "flash_attention_varlen"
    queries = _tensor(op, "q", q)
    if queries.dtype not in DTYPES:
        raise TypeError(f"{op}: q has dtype {dtype_name(queries.dtype)}; float16 and bfloat16 are supported")
    if queries.dim() != 3:
        raise ValueError(f"{op}: q has shape {shape_text(queries.shape)}; [total_q, Hq, D] is needed")
    keys, _ = _heads(op, queries, k, v, "[total_k, Hkv, D]", 1)
    bounds_q = _of_sequences(op, "cu_seqlens_q", cu_seqlens_q, queries, None, "")
    if bounds_q.shape[0] < 1:
        raise ValueError(f"{op}: cu_seqlens_q has 0 numbers; at least 1 is needed, one more than sequences")
    batch = bounds_q.shape[0] - 1
    bounds_k = _of_sequences(op, "cu_seqlens_k", cu_seqlens_k, queries, batch + 1, "as in cu_seqlens_q")
    _whole(op, "max_seqlen_q", max_seqlen_q, 0)
    _whole(op, "max_seqlen_k", max_seqlen_k, 0)
    _options(op, causal, softmax_scale, window_size, softcap)
    _flag(op, "suffix", suffix)
    why = f"for {batch} sequences"
    if query_starts is not None:
        _of_sequences(op, "query_starts", query_starts, queries, batch, why)
        if suffix:
            raise ValueError(f'{op}: query_starts is a tensor and "suffix" at once; one of them is needed')
    live = None if seqused_k is None else _of_sequences(op, "seqused_k", seqused_k, queries, batch, why)
    _bounds(op, "q", bounds_q, queries.shape[0], max_seqlen_q)
    lengths = _bounds(op, "k", bounds_k, keys.shape[0], max_seqlen_k)
    if live is not None:
        _used(op, live, lengths)
    if out is not None:
        inputs = {
            "q": q,
            "k": k,
            "v": v,
            "cu_seqlens_q": cu_seqlens_q,
            "cu_seqlens_k": cu_seqlens_k,
            "query_starts": query_starts,
            "seqused_k": seqused_k,
        }
        _outputs(op, out, queries, (queries.shape[1], queries.shape[0]), inputs)


# ------------------------------------------------------------------------------- what only Python sees of a packed call


def starts(
    query_starts: object, cu_seqlens_q: object, cu_seqlens_k: object, causal: object, window_size: object
) -> None:
    """The rules of `query_starts` that is no tensor: "suffix", or None where every sequence surely starts at 0."""
    op = "flash_attention_varlen"
    if query_starts is not None:
        if query_starts != "suffix":
            shown = repr(query_starts) if isinstance(query_starts, str) else type(query_starts).__name__
            raise TypeError(f'{op}: query_starts is {shown}; an int32 tensor, "suffix" or None is needed')
    elif (causal or window_size is not None) and cu_seqlens_q is not cu_seqlens_k:
        option = "causal=True" if causal else f"window_size={window_size}"
        raise ValueError(
            f"{op}: query_starts is None; with {option} it is needed unless cu_seqlens_q and cu_seqlens_k are one "
            f'tensor: "suffix" for queries that end with the keys, zeros for queries that start with them'
        )

"""The rules of the arguments of the operators around a paged cache, as `checks` has those of the others.

Page ids, slots and positions that lie outside are no error: what they name is skipped. Under DANDAN_DEBUG=1 they raise.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from dandan_attention.checks import (
    DEBUG,
    DTYPES,
    _bounds,
    _flag,
    _number,
    _numbers,
    _of_sequences,
    _options,
    _outputs,
    _tensor,
    _whole,
)
from dandan_attention.reference_paged import lse_shape
from dandan_ops_core.tensors import dtype_name, overlap, overlaps_itself, shape_text

__all__ = [
    "MAX_PAGE_SIZE",
    "MAX_SEQLEN_Q",
    "no_gradients",
    "paged_attention",
    "paged_attention_varlen",
    "qk_norm_rope_write_kv",
    "rope",
    "write_kv",
]

MAX_SEQLEN_Q = 16
"""Queries of a sequence that paged_attention takes."""

MAX_PAGE_SIZE = 1024

Outputs = Sequence[torch.Tensor | None] | None


# ------------------------------------------------------------------------------------------------------------ arguments


def _like(op: str, argument: str, t: object, name: str, first: torch.Tensor) -> torch.Tensor:
    """`t`, if it is a tensor of the dtype and on the device of `first`, which is called `name`."""
    other = _tensor(op, argument, t)
    if other.device != first.device:
        raise ValueError(f"{op}: {argument} is on {other.device} but {name} is on {first.device}")
    if other.dtype != first.dtype:
        raise TypeError(
            f"{op}: {argument} has dtype {dtype_name(other.dtype)} but {name} has dtype {dtype_name(first.dtype)}"
        )
    return other


def _first(op: str, argument: str, t: object, *forms: str) -> torch.Tensor:
    """The first argument: float16 or bfloat16, with as many dimensions as one of `forms`."""
    first = _tensor(op, argument, t)
    if first.dtype not in DTYPES:
        raise TypeError(f"{op}: {argument} has dtype {dtype_name(first.dtype)}; float16 and bfloat16 are supported")
    if first.dim() not in [form.count(",") + 1 for form in forms]:
        raise ValueError(f"{op}: {argument} has shape {shape_text(first.shape)}; {' or '.join(forms)} is needed")
    if first.shape[-1] < 1:
        raise ValueError(f"{op}: {argument} has head_dim=0; at least 1 is needed")
    return first


def _tokens(op: str, argument: str, t: object, name: str, first: torch.Tensor) -> torch.Tensor:
    """[T, heads, D] with the tokens and the head dimension of `first`."""
    rows = _like(op, argument, t, name, first)
    if rows.dim() != 3:
        raise ValueError(f"{op}: {argument} has shape {shape_text(rows.shape)}; [T, Hkv, D] is needed")
    if rows.shape[0] != first.shape[0]:
        raise ValueError(f"{op}: {argument} has {rows.shape[0]} tokens but {name} has {first.shape[0]}")
    if rows.shape[2] != first.shape[2]:
        raise ValueError(f"{op}: {argument} has head_dim={rows.shape[2]} but {name} has head_dim={first.shape[2]}")
    return rows


def _indices(op: str, argument: str, t: object, name: str, first: torch.Tensor, limit: int | None) -> torch.Tensor:
    """int32 or int64 [T]; under DANDAN_DEBUG=1 none is `limit` or more."""
    indices = _tensor(op, argument, t)
    if indices.device != first.device:
        raise ValueError(f"{op}: {argument} is on {indices.device} but {name} is on {first.device}")
    if indices.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"{op}: {argument} has dtype {dtype_name(indices.dtype)}; int32 or int64 is needed")
    if indices.dim() != 1:
        raise ValueError(f"{op}: {argument} has shape {shape_text(indices.shape)}; a vector is needed")
    if indices.shape[0] != first.shape[0]:
        raise ValueError(f"{op}: {argument} has {indices.shape[0]} numbers; {first.shape[0]} are needed, one per token")
    if DEBUG and limit is not None:
        least = -1 if argument == "slot_mapping" else 0  # a slot of -1 is a token to skip
        for i, index in enumerate(_numbers(indices) or ()):
            if not least <= index < limit:
                raise ValueError(f"{op}: {argument}[{i}] is {index}; {least} to {limit - 1} is needed")
    return indices


def _caches(
    op: str, k_cache: object, v_cache: object, name: str, first: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    keys, values = _like(op, "k_cache", k_cache, name, first), _like(op, "v_cache", v_cache, name, first)
    if keys.dim() != 4:
        raise ValueError(f"{op}: k_cache has shape {shape_text(keys.shape)}; [num_pages, page_size, Hkv, D] is needed")
    if not 1 <= keys.shape[1] <= MAX_PAGE_SIZE:
        raise ValueError(f"{op}: k_cache has page_size={keys.shape[1]}; 1 to {MAX_PAGE_SIZE} is needed")
    if keys.shape[2] < 1:
        raise ValueError(f"{op}: k_cache has num_heads_kv=0; at least 1 is needed")
    if keys.shape[3] != first.shape[-1]:
        raise ValueError(f"{op}: k_cache has head_dim={keys.shape[3]} but {name} has head_dim={first.shape[-1]}")
    if values.shape != keys.shape:
        raise ValueError(
            f"{op}: v_cache has shape {shape_text(values.shape)} but k_cache has shape {shape_text(keys.shape)}"
        )
    return keys, values


def _written_caches(op: str, k_cache: torch.Tensor, v_cache: torch.Tensor, inputs: dict[str, torch.Tensor]) -> None:
    """Caches that are written share no element with each other, with themselves or with what is read."""
    for name, cache in (("k_cache", k_cache), ("v_cache", v_cache)):
        if overlaps_itself(cache):
            raise ValueError(f"{op}: elements of {name} share memory")
        for other_name, other in inputs.items():
            if overlap(cache, other) != "none":
                raise ValueError(f"{op}: {name} overlaps {other_name}")
    # Two halves of one buffer lie in each other's gaps, in ways that strides alone do not tell from a fault.
    if overlap(k_cache, v_cache) == "same":
        raise ValueError(f"{op}: k_cache and v_cache are the same memory")


def _table(op: str, page_table: object, q: torch.Tensor, batch: int, num_pages: int) -> torch.Tensor:
    table = _tensor(op, "page_table", page_table)
    if table.device != q.device:
        raise ValueError(f"{op}: page_table is on {table.device} but q is on {q.device}")
    if table.dtype != torch.int32:
        raise TypeError(f"{op}: page_table has dtype {dtype_name(table.dtype)}; int32 is needed")
    if table.dim() != 2:
        raise ValueError(f"{op}: page_table has shape {shape_text(table.shape)}; [B, max_pages] is needed")
    if table.shape[0] != batch:
        raise ValueError(f"{op}: page_table has {table.shape[0]} rows; {batch} are needed, one per sequence")
    return table


def _live(op: str, seqused_k: object, q: torch.Tensor, table: torch.Tensor, keys: torch.Tensor) -> None:
    """seqused_k, and, under DANDAN_DEBUG=1, the ids of the pages that it makes live."""
    batch, width = table.shape
    used = _numbers(_of_sequences(op, "seqused_k", seqused_k, q, batch, f"for batch={batch}"))
    if used is None:
        return
    page_size = keys.shape[1]
    for i, live in enumerate(used):
        if not 0 <= live <= width * page_size:
            raise ValueError(
                f"{op}: seqused_k[{i}] is {live}; 0 to {width * page_size} is needed, what {width} pages of "
                f"{page_size} hold"
            )
        for column in range(-(-live // page_size) if DEBUG else 0):
            page = int(table[i, column])
            if not 0 <= page < keys.shape[0]:
                raise ValueError(f"{op}: page_table[{i}, {column}] is {page}; 0 to {keys.shape[0] - 1} is needed")


def _grouped_heads(op: str, heads_q: int, keys: torch.Tensor) -> None:
    if heads_q % keys.shape[2] != 0:
        raise ValueError(
            f"{op}: q has num_heads_q={heads_q}, which is not a multiple of num_heads_kv={keys.shape[2]} of k_cache"
        )


def _tables(op: str, cos: object, sin: object, name: str, first: torch.Tensor) -> torch.Tensor:
    """cos, if it and sin fit."""
    tables = []
    for argument, t in (("cos", cos), ("sin", sin)):
        table = _tensor(op, argument, t)
        if table.device != first.device:
            raise ValueError(f"{op}: {argument} is on {table.device} but {name} is on {first.device}")
        if table.dtype not in (torch.float32, first.dtype):
            raise TypeError(
                f"{op}: {argument} has dtype {dtype_name(table.dtype)}; float32 or {dtype_name(first.dtype)} is needed"
            )
        if table.dim() != 2:
            raise ValueError(
                f"{op}: {argument} has shape {shape_text(table.shape)}; [max_positions, rotary_dim / 2] is needed"
            )
        tables.append(table)
    angles, others = tables
    if others.dtype != angles.dtype:
        raise TypeError(f"{op}: sin has dtype {dtype_name(others.dtype)} but cos has dtype {dtype_name(angles.dtype)}")
    if others.shape != angles.shape:
        raise ValueError(f"{op}: sin has shape {shape_text(others.shape)} but cos has shape {shape_text(angles.shape)}")
    if not 1 <= angles.shape[1] <= first.shape[-1] // 2:
        raise ValueError(
            f"{op}: cos has {angles.shape[1]} columns; 1 to {first.shape[-1] // 2} are needed, half of what is turned "
            f"of head_dim={first.shape[-1]}"
        )
    return angles


def _rows_out(
    op: str, argument: str, t: object, of: str, like: torch.Tensor, others: dict[str, torch.Tensor]
) -> torch.Tensor:
    """An output of the shape of input `of`, which may be that input itself, but shares no element with the others."""
    out = _like(op, argument, t, of, like)
    if out.shape != like.shape:
        raise ValueError(f"{op}: {argument} has shape {shape_text(out.shape)}; {shape_text(like.shape)} is needed")
    if overlaps_itself(out):
        raise ValueError(f"{op}: elements of {argument} share memory")
    if overlap(out, like) == "partial":
        raise ValueError(f"{op}: {argument} overlaps {of} without being it")
    for name, other in others.items():
        if overlap(out, other) != "none":
            raise ValueError(f"{op}: {argument} overlaps {name}")
    return out


def no_gradients(op: str, **tensors: torch.Tensor | None) -> None:
    """Raises ValueError where gradients are recorded and a tensor needs one."""
    if not torch.is_grad_enabled():
        return
    for name, t in tensors.items():
        if t is not None and t.requires_grad:
            raise ValueError(
                f"{op}: {name} requires a gradient, which {op} does not compute; call it under torch.no_grad() or "
                f"with {name}.detach()"
            )


# ------------------------------------------------------------------------------------------------------------ operators


def paged_attention(
    q: object,
    k_cache: object,
    v_cache: object,
    page_table: object,
    seqused_k: object,
    softmax_scale: object,
    window_size: object,
    softcap: object,
    *,
    out: Sequence[torch.Tensor] | None,
) -> None:
    """Raises TypeError or ValueError when an argument breaks a rule; `out`: the outputs in a tuple, or None."""
    op = "paged_attention"
    queries = _first(op, "q", q, "[B, Hq, D]", "[B, Sq, Hq, D]")
    if queries.dim() == 4 and queries.shape[1] > MAX_SEQLEN_Q:
        raise ValueError(
            f"{op}: q has seqlen_q={queries.shape[1]}; up to {MAX_SEQLEN_Q} are supported, paged_attention_varlen "
            f"takes more"
        )
    keys, values = _caches(op, k_cache, v_cache, "q", queries)
    _grouped_heads(op, queries.shape[-2], keys)
    table = _table(op, page_table, queries, queries.shape[0], keys.shape[0])
    _live(op, seqused_k, queries, table, keys)
    _options(op, True, softmax_scale, window_size, softcap)
    if out is not None:
        inputs = {"q": q, "k_cache": keys, "v_cache": values, "page_table": table, "seqused_k": seqused_k}
        _outputs(op, out, queries, lse_shape(queries), inputs)


def paged_attention_varlen(
    q: object,
    k_cache: object,
    v_cache: object,
    page_table: object,
    seqused_k: object,
    cu_seqlens_q: object,
    max_seqlen_q: object,
    softmax_scale: object,
    window_size: object,
    softcap: object,
    *,
    out: Sequence[torch.Tensor] | None,
) -> None:
    """Raises TypeError or ValueError when an argument breaks a rule; `out`: the outputs in a tuple, or None."""
    op = "paged_attention_varlen"
    queries = _first(op, "q", q, "[total_q, Hq, D]")
    keys, values = _caches(op, k_cache, v_cache, "q", queries)
    _grouped_heads(op, queries.shape[1], keys)
    bounds = _of_sequences(op, "cu_seqlens_q", cu_seqlens_q, queries, None, "")
    if bounds.shape[0] < 1:
        raise ValueError(f"{op}: cu_seqlens_q has 0 numbers; at least 1 is needed, one more than sequences")
    table = _table(op, page_table, queries, bounds.shape[0] - 1, keys.shape[0])
    _whole(op, "max_seqlen_q", max_seqlen_q, 0)
    _live(op, seqused_k, queries, table, keys)
    _options(op, True, softmax_scale, window_size, softcap)
    _bounds(op, "q", bounds, queries.shape[0], max_seqlen_q)
    if out is not None:
        inputs = {
            "q": q,
            "k_cache": keys,
            "v_cache": values,
            "page_table": table,
            "seqused_k": seqused_k,
            "cu_seqlens_q": bounds,
        }
        _outputs(op, out, queries, (queries.shape[1], queries.shape[0]), inputs)


def rope(
    q: object, k: object, cos: object, sin: object, positions: object, interleaved: object, *, out: Outputs
) -> None:
    """Raises TypeError or ValueError when an argument breaks a rule; `out`: both outputs in a tuple, or None."""
    op = "rope"
    queries = _first(op, "q", q, "[T, Hq, D]")
    keys = _tokens(op, "k", k, "q", queries)
    angles = _tables(op, cos, sin, "q", queries)
    _indices(op, "positions", positions, "q", queries, angles.shape[0])
    _flag(op, "interleaved", interleaved)
    if out is None:
        return
    if not isinstance(out, (tuple, list)) or len(out) != 2:
        raise TypeError(f"{op}: out is {type(out).__name__}; a pair of tensors is needed, for q and for k")
    tables = {"cos": angles, "sin": sin, "positions": positions}
    others = {name: t for name, t in tables.items() if isinstance(t, torch.Tensor)}
    turned = _rows_out(op, "out[0]", out[0], "q", queries, {"k": keys, **others})
    _rows_out(op, "out[1]", out[1], "k", keys, {"q": queries, "out[0]": turned, **others})


def write_kv(k: object, v: object, k_cache: object, v_cache: object, slot_mapping: object, *, out: None = None) -> None:
    """Raises TypeError or ValueError when an argument breaks a rule."""
    op = "write_kv"
    keys = _first(op, "k", k, "[T, Hkv, D]")
    values = _like(op, "v", v, "k", keys)
    if values.shape != keys.shape:
        raise ValueError(f"{op}: v has shape {shape_text(values.shape)} but k has shape {shape_text(keys.shape)}")
    caches = _caches(op, k_cache, v_cache, "k", keys)
    if caches[0].shape[2] != keys.shape[1]:
        raise ValueError(f"{op}: k_cache has num_heads_kv={caches[0].shape[2]} but k has num_heads_kv={keys.shape[1]}")
    slots = _indices(op, "slot_mapping", slot_mapping, "k", keys, caches[0].shape[0] * caches[0].shape[1])
    _written_caches(op, *caches, {"k": keys, "v": values, "slot_mapping": slots})


def qk_norm_rope_write_kv(
    q: object,
    k: object,
    v: object,
    q_weight: object,
    k_weight: object,
    cos: object,
    sin: object,
    positions: object,
    k_cache: object,
    v_cache: object,
    slot_mapping: object,
    eps: object,
    interleaved: object,
    *,
    out: Outputs,
) -> None:
    """Raises TypeError or ValueError when an argument breaks a rule; `out`: out and key_out, each of which may be
    None, or None.
    """
    op = "qk_norm_rope_write_kv"
    queries = _first(op, "q", q, "[T, Hq, D]")
    keys = _tokens(op, "k", k, "q", queries)
    values = _tokens(op, "v", v, "q", queries)
    if values.shape != keys.shape:
        raise ValueError(f"{op}: v has shape {shape_text(values.shape)} but k has shape {shape_text(keys.shape)}")
    read = {"q": queries, "k": keys, "v": values}
    for name, weight in (("q_weight", q_weight), ("k_weight", k_weight)):
        vector = _tensor(op, name, weight)
        if vector.device != queries.device:
            raise ValueError(f"{op}: {name} is on {vector.device} but q is on {queries.device}")
        if vector.dtype not in (torch.float32, queries.dtype):
            raise TypeError(
                f"{op}: {name} has dtype {dtype_name(vector.dtype)}; float32 or {dtype_name(queries.dtype)} is needed"
            )
        if vector.shape != (queries.shape[2],):
            raise ValueError(f"{op}: {name} has shape {shape_text(vector.shape)}; [{queries.shape[2]}] is needed")
        read[name] = vector
    angles = _tables(op, cos, sin, "q", queries)
    read["positions"] = _indices(op, "positions", positions, "q", queries, angles.shape[0])
    caches = _caches(op, k_cache, v_cache, "q", queries)
    if caches[0].shape[2] != keys.shape[1]:
        raise ValueError(f"{op}: k_cache has num_heads_kv={caches[0].shape[2]} but k has num_heads_kv={keys.shape[1]}")
    slots = caches[0].shape[0] * caches[0].shape[1]
    read["slot_mapping"] = _indices(op, "slot_mapping", slot_mapping, "q", queries, slots)
    number = _number(op, "eps", eps)
    if number is not None and not (math.isfinite(number) and number >= 0):
        raise ValueError(f"{op}: eps is {number}; a finite number of 0 or more is needed")
    _flag(op, "interleaved", interleaved)
    read |= {"cos": angles, "sin": _tensor(op, "sin", sin)}
    _written_caches(op, *caches, read)
    rows, key_out = out or (None, None)
    read |= {"k_cache": caches[0], "v_cache": caches[1]}
    if rows is not None:
        turned = _rows_out(op, "out", rows, "q", queries, {name: t for name, t in read.items() if name != "q"})
        read["out"] = turned
    if key_out is not None:
        _rows_out(op, "key_out", key_out, "k", keys, {name: t for name, t in read.items() if name != "k"})

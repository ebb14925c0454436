"""What the operators mean, in plain PyTorch: CPU kernel, torch backend, and the gradients.

Logits, softmax and sums are FP32, whatever the dtype of q; the result is rounded once. On CUDA the products follow the
caller's `torch.backends.cuda.matmul.allow_tf32`. Queries are taken in blocks, so that no more than BLOCK logits are
held at a time (or one row of each head of one sequence, where those are more); keys that no query of a block can see
are left out. Grouped heads share their keys and values: nothing is repeated.

Nothing here waits for a CUDA device, so the torch backend can be captured in a graph.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

__all__ = [
    "dense_lse",
    "dense_out",
    "empty_grads",
    "flash_attention",
    "flash_attention_grad",
    "flash_attention_varlen",
    "flash_attention_varlen_grad",
    "packed_lse",
    "packed_out",
]

BLOCK = 1 << 22
"""Logits that are held at a time: 16 MB in FP32, and as much again for each temporary of the same shape."""

FAR = 1 << 40
"""Farther from any key than a sequence can be long: positions beyond are moved here, where int64 has room."""

Where = int | torch.Tensor
"""A start or a length: of every sequence, or int64 [B, 1, 1, 1, 1]."""


# ------------------------------------------------------------------------------------------------------------- results


def dense_out(q: torch.Tensor) -> torch.Tensor:
    """Uninitialised [B, Hq, Sq, D] without gaps: rows outside of heads where q has them so in memory, as a view of
    [B, S, H, D] has, else heads outside of rows.
    """
    batch, heads, seqlen, head_dim = q.shape
    if q.stride(1) < q.stride(2):
        return q.new_empty((batch, seqlen, heads, head_dim)).transpose(1, 2)
    return q.new_empty((batch, heads, seqlen, head_dim))


def dense_lse(q: torch.Tensor) -> torch.Tensor:
    """Uninitialised [B, Hq, Sq] in FP32."""
    return q.new_empty(q.shape[:-1], dtype=torch.float32)


def packed_out(q: torch.Tensor) -> torch.Tensor:
    """Uninitialised [total_q, Hq, D], contiguous."""
    return q.new_empty(q.shape)


def packed_lse(q: torch.Tensor) -> torch.Tensor:
    """Uninitialised [Hq, total_q] in FP32."""
    return q.new_empty((q.shape[1], q.shape[0]), dtype=torch.float32)


def empty_grads(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *_: object
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Uninitialised gradients of q, k and v, contiguous."""
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


# ------------------------------------------------------------------------------------------------- one set of sequences


@dataclass(frozen=True)
class Rule:
    """The options of a call. A window of None sees every key."""

    scale: float
    causal: bool
    window: int | None
    softcap: float

    @classmethod
    def of(cls, q: torch.Tensor, causal: bool, scale: float | None, window: int | None, softcap: float) -> Rule:
        return cls(q.shape[-1] ** -0.5 if scale is None else scale, causal, window, softcap)


def _far(position: int) -> int:
    return max(-FAR, min(FAR, position))


@dataclass(frozen=True)
class Block:
    """Queries and the keys that one of them may see; `seen` says which sees which, for [B, Hkv, group, rows, keys]."""

    rows: slice
    keys: slice
    seen: torch.Tensor


def _blocks(q: torch.Tensor, k: torch.Tensor, start: Where, live: Where, rule: Rule) -> Iterator[Block]:
    """The queries of q, in blocks of no more than BLOCK logits."""
    batch, heads, seqlen_q, _ = q.shape
    seqlen_k = k.shape[2]
    size = max(1, BLOCK // max(1, batch * heads * seqlen_k))
    for first in range(0, seqlen_q, size):
        last = min(seqlen_q, first + size)
        low, high = 0, seqlen_k if isinstance(live, torch.Tensor) else min(live, seqlen_k)
        newest: Where
        oldest: Where
        if isinstance(start, torch.Tensor):
            newest, oldest = start, start - min(rule.window or 0, FAR)
        else:
            newest, oldest = own, left = _far(start), _far(start - (rule.window or 0))
            high = min(high, own + last) if rule.causal else high
            low = max(low, left + first + 1) if rule.window else low
        high = max(low, high)
        row = torch.arange(first, last, device=q.device).unsqueeze(1)
        key = torch.arange(low, high, device=q.device)
        seen = (key < live).expand(1, 1, 1, 1, -1) if isinstance(live, int) else key < live
        if rule.causal:
            seen = seen & (key <= newest + row)
        if rule.window:
            seen = seen & (key > oldest + row)
        yield Block(slice(first, last), slice(low, high), seen)


def _wide(t: torch.Tensor) -> torch.Tensor:
    """In FP32 and contiguous: products of the same values then have the same bits, however those lay in memory."""
    return t.to(torch.float32, memory_format=torch.contiguous_format)


def _grouped(rows: torch.Tensor, heads_kv: int) -> torch.Tensor:
    """[B, Hq, R, X] as [B, Hkv, Hq/Hkv * R, X] in FP32: the rows that share keys, one after the other."""
    return _wide(rows).unflatten(1, (heads_kv, -1)).flatten(2, 3)


def _heads(grouped: torch.Tensor, rows: int) -> torch.Tensor:
    """The opposite of `_grouped`."""
    return grouped.unflatten(2, (-1, rows)).flatten(1, 2)


def _masked(t: torch.Tensor, live: Where) -> torch.Tensor:
    """Keys or values with zeros behind the live ones: 0 * NaN would be NaN."""
    if isinstance(live, int):
        return t
    return torch.where(torch.arange(t.shape[2], device=t.device).unsqueeze(1) < live.squeeze(1), t, 0)


def _logits(queries: torch.Tensor, keys: torch.Tensor, block: Block, rule: Rule) -> torch.Tensor:
    """[B, Hkv, group, rows, keys], before the mask."""
    logits = (queries @ keys.mT).mul_(rule.scale).unflatten(2, (-1, block.rows.stop - block.rows.start))
    return logits.div_(rule.softcap).tanh_().mul_(rule.softcap) if rule.softcap else logits


def _attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    start: Where,
    live: Where,
    rule: Rule,
    out: torch.Tensor,
    lse: torch.Tensor,
    known: torch.Tensor | None = None,
) -> None:
    """Attention of q [B, Hq, Sq, D] to k and v [B, Hkv, Sk, D] into out and lse [B, Hq, Sq].

    `known`, bool [B, Sk]: keys that are there; the others are hidden from every query, and finite.
    """
    if q.numel() == 0:
        return
    heads_kv = k.shape[1]
    k, v = _masked(k, live), _masked(v, live)
    for block in _blocks(q, k, start, live, rule):
        if block.keys.start == block.keys.stop:
            out[:, :, block.rows] = 0
            lse[:, :, block.rows] = -torch.inf
            continue
        keys, values = (_wide(t[:, :, block.keys]) for t in (k, v))
        logits = _logits(_grouped(q[:, :, block.rows], heads_kv), keys, block, rule)
        seen = block.seen if known is None else block.seen & known[:, None, None, None, block.keys]
        logits = logits.masked_fill_(~seen, -torch.inf)
        largest = logits.amax(-1, keepdim=True)
        # A row without keys: -inf - -inf would be NaN.
        largest = torch.where(largest == -torch.inf, 0, largest)
        weights = logits.sub_(largest).exp_()
        total = weights.sum(-1, keepdim=True)
        result = (weights.flatten(2, 3) @ values).view(*total.shape[:4], -1) / total
        out[:, :, block.rows] = torch.where(total == 0, 0, result).flatten(1, 2)
        lse[:, :, block.rows] = (largest + total.log()).squeeze(-1).flatten(1, 2)


def _attend_grad(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    start: Where,
    live: Where,
    rule: Rule,
    saved: Sequence[torch.Tensor],
    grads: Sequence[torch.Tensor],
) -> None:
    """Gradients of `_attend`, in FP32: q's is written, those of k and v added to. `saved`: out, lse, their gradients.

    With P = exp(logit - lse): dV = P^T dO, dP = dO V^T, dlogit = P (dP - sum(dO * O) + dlse), then the chain through
    softcap and scale to q and k.
    """
    if q.numel() == 0:
        return
    heads_kv = k.shape[1]
    grad_q, grad_k, grad_v = grads
    k, v = _masked(k, live), _masked(v, live)
    for block in _blocks(q, k, start, live, rule):
        rows = block.rows.stop - block.rows.start
        if block.keys.start == block.keys.stop:
            grad_q[:, :, block.rows] = 0
            continue
        keys, values = (_wide(t[:, :, block.keys]) for t in (k, v))
        queries = _grouped(q[:, :, block.rows], heads_kv)
        out, grad_out = (_grouped(t[:, :, block.rows], heads_kv) for t in (saved[0], saved[2]))
        lse, grad_lse = (_grouped(t[:, :, block.rows].unsqueeze(-1), heads_kv) for t in (saved[1], saved[3]))
        logits = _logits(queries, keys, block, rule)
        hidden = ~block.seen
        weights = (logits - lse.view(*logits.shape[:4], 1)).exp_().masked_fill_(hidden, 0).flatten(2, 3)
        slope = rule.scale * (1 - (logits / rule.softcap).square()) if rule.softcap else rule.scale
        from_weights = weights * (grad_out @ values.mT - ((grad_out * out).sum(-1, keepdim=True) - grad_lse))
        from_logits = (from_weights.view_as(logits) * slope).masked_fill_(hidden, 0).flatten(2, 3)
        grad_q[:, :, block.rows] = _heads(from_logits @ keys, rows)
        grad_k[:, :, block.keys] += from_logits.mT @ queries
        grad_v[:, :, block.keys] += weights.mT @ grad_out


# ----------------------------------------------------------------------------------------------------------- dense form


@dataclass(frozen=True)
class Piece:
    """Sequences of a dense batch, with their starts and live lengths."""

    batch: slice
    start: Where
    live: Where


def _pieces(
    q: torch.Tensor,
    k: torch.Tensor,
    query_start: int | None,
    query_starts: torch.Tensor | None,
    seqused_k: torch.Tensor | None,
) -> Iterator[Piece]:
    """A batch in pieces whose logits BLOCK holds, or one sequence each."""
    batch, heads, seqlen_q, _ = q.shape
    seqlen_k = k.shape[2]
    size = max(1, BLOCK // max(1, heads * seqlen_q * seqlen_k))
    for first in range(0, batch, size):
        part = slice(first, min(batch, first + size))
        start: Where = query_start or 0
        live: Where = seqlen_k
        if query_starts is not None:
            start = query_starts[part].long().view(-1, 1, 1, 1, 1)
        if seqused_k is not None:
            live = seqused_k[part].long().clamp(0, seqlen_k).view(-1, 1, 1, 1, 1)
        yield Piece(part, start, live)


def flash_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    causal: bool = False,
    softmax_scale: float | None = None,
    query_start: int | None = None,
    query_starts: torch.Tensor | None = None,
    window_size: int | None = None,
    softcap: float = 0.0,
    seqused_k: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Result [B, Hq, Sq, D] and lse [B, Hq, Sq]; arguments as in the schema."""
    rule = Rule.of(q, causal, softmax_scale, window_size, softcap)
    out, lse = dense_out(q), dense_lse(q)
    for piece in _pieces(q, k, query_start, query_starts, seqused_k):
        at = piece.batch
        _attend(q[at], k[at], v[at], piece.start, piece.live, rule, out[at], lse[at])
    return out, lse


def flash_attention_grad(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    causal: bool,
    softmax_scale: float | None,
    query_start: int | None,
    query_starts: torch.Tensor | None,
    window_size: int | None,
    softcap: float,
    seqused_k: torch.Tensor | None,
    out: torch.Tensor,
    lse: torch.Tensor,
    grad_out: torch.Tensor,
    grad_lse: torch.Tensor,
) -> tuple[torch.Tensor, ...]:
    """Gradients of `flash_attention` with respect to q, k and v, in their dtype."""
    rule = Rule.of(q, causal, softmax_scale, window_size, softcap)
    grads = [torch.zeros(t.shape, dtype=torch.float32, device=t.device) for t in (q, k, v)]
    for piece in _pieces(q, k, query_start, query_starts, seqused_k):
        at = piece.batch
        saved = [t[at] for t in (out, lse, grad_out, grad_lse)]
        _attend_grad(q[at], k[at], v[at], piece.start, piece.live, rule, saved, [t[at] for t in grads])
    return tuple(grad.to(q.dtype) for grad in grads)


# ---------------------------------------------------------------------------------------------------------- packed form


@dataclass(frozen=True)
class Rows:
    """Rows of one sequence in a packed tensor.

    On the CPU `places` is their slice. On CUDA, where the host does not know their number, it is as many places as the
    longest sequence has: the rows' own, then the tensor's number of rows.
    """

    places: slice | torch.Tensor

    def take(self, t: torch.Tensor, behind: float | None = None) -> torch.Tensor:
        """[1, H, rows, X] of t [total, H, X]; behind the last row any other row, or the value `behind`."""
        if isinstance(self.places, slice):
            return t[self.places].transpose(0, 1).unsqueeze(0)
        taken = t[self.places.clamp(max=t.shape[0] - 1)].transpose(0, 1).unsqueeze(0)
        if behind is None:
            return taken
        return torch.where((self.places < t.shape[0]).unsqueeze(1), taken, behind)

    def put(self, t: torch.Tensor, rows: torch.Tensor) -> None:
        """Writes [1, H, rows, X] to t [total + 1, H, X], whose last row takes what lies behind the sequence."""
        t[self.places] = rows[0].transpose(0, 1)


@dataclass(frozen=True)
class Span:
    """One sequence of a packed batch: its rows of q and out, those of k and v, its start and its live length."""

    queries: Rows
    keys: Rows
    start: Where
    live: Where


def _host_spans(
    q: torch.Tensor,
    k: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    query_starts: torch.Tensor | None,
    suffix: bool,
    seqused_k: torch.Tensor | None,
) -> Iterator[Span]:
    """The sequences of a batch on the CPU, one by one."""
    bounds_q, bounds_k = cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
    starts = None if query_starts is None else query_starts.tolist()
    used = None if seqused_k is None else seqused_k.tolist()
    for i in range(len(bounds_q) - 1):
        queries, keys = slice(*bounds_q[i : i + 2]), slice(*bounds_k[i : i + 2])
        length = keys.stop - keys.start
        live = length if used is None else max(0, min(length, used[i]))
        first = live - (queries.stop - queries.start) if suffix else 0
        yield Span(Rows(queries), Rows(keys), first if starts is None else starts[i], live)


def _device_rows(begin: torch.Tensor, end: torch.Tensor, longest: int, total: int) -> Rows:
    """Rows from `begin` to `end` of a tensor of `total`, whose bounds the host does not know."""
    places = begin + torch.arange(min(longest, total), device=begin.device)
    return Rows(torch.where((places >= 0) & (places < end), places, total).clamp(max=total))


def _device_spans(
    q: torch.Tensor,
    k: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    query_starts: torch.Tensor | None,
    suffix: bool,
    seqused_k: torch.Tensor | None,
) -> Iterator[Span]:
    """The same without reading a value on the host; a wrong one reaches no memory outside of the tensors."""

    one = (1, 1, 1, 1, 1)
    for i in range(len(cu_seqlens_q) - 1):
        (begin_q, end_q), (begin_k, end_k) = (cu[i : i + 2].long() for cu in (cu_seqlens_q, cu_seqlens_k))
        live = end_k - begin_k
        if seqused_k is not None:
            live = torch.minimum(live, seqused_k[i].long().clamp(min=0))
        first = live - (end_q - begin_q) if suffix else torch.zeros_like(live)
        if query_starts is not None:
            first = query_starts[i].long()
        queries = _device_rows(begin_q, end_q, max_seqlen_q, q.shape[0])
        keys = _device_rows(begin_k, end_k, max_seqlen_k, k.shape[0])
        yield Span(queries, keys, first.view(one), live.view(one))


def _spans(q: torch.Tensor, *rest: Any) -> Iterator[Span]:
    return (_device_spans if q.is_cuda else _host_spans)(q, *rest)


def flash_attention_varlen(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    causal: bool = False,
    softmax_scale: float | None = None,
    query_starts: torch.Tensor | None = None,
    suffix: bool = False,
    window_size: int | None = None,
    softcap: float = 0.0,
    seqused_k: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Result [total_q, Hq, D] and lse [Hq, total_q]; arguments as in the schema. Rows of no sequence are 0."""
    rule = Rule.of(q, causal, softmax_scale, window_size, softcap)
    total, heads, head_dim = q.shape
    # One row more than q has: what lies behind a sequence's end is written there.
    out = q.new_zeros((total + 1, heads, head_dim))
    lse = q.new_full((total + 1, heads, 1), -torch.inf, dtype=torch.float32)
    longest = (max_seqlen_q, max_seqlen_k)
    for span in _spans(q, k, cu_seqlens_q, cu_seqlens_k, *longest, query_starts, suffix, seqused_k):
        queries = span.queries.take(q)
        result, its_lse = dense_out(queries), dense_lse(queries)
        _attend(queries, span.keys.take(k), span.keys.take(v), span.start, span.live, rule, result, its_lse)
        span.queries.put(out, result)
        span.queries.put(lse, its_lse.unsqueeze(-1))
    return out[:total], lse[:total, :, 0].t().contiguous()


def flash_attention_varlen_grad(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    causal: bool,
    softmax_scale: float | None,
    query_starts: torch.Tensor | None,
    suffix: bool,
    window_size: int | None,
    softcap: float,
    seqused_k: torch.Tensor | None,
    out: torch.Tensor,
    lse: torch.Tensor,
    grad_out: torch.Tensor,
    grad_lse: torch.Tensor,
) -> tuple[torch.Tensor, ...]:
    """Gradients of `flash_attention_varlen` with respect to q, k and v, in their dtype."""
    rule = Rule.of(q, causal, softmax_scale, window_size, softcap)
    grads = [torch.zeros((len(t) + 1, *t.shape[1:]), dtype=torch.float32, device=t.device) for t in (q, k, v)]
    longest = (max_seqlen_q, max_seqlen_k)
    for span in _spans(q, k, cu_seqlens_q, cu_seqlens_k, *longest, query_starts, suffix, seqused_k):
        queries, keys, values = span.queries.take(q), span.keys.take(k), span.keys.take(v)
        # Rows behind the last one add nothing to the gradients of keys and values.
        saved = [
            span.queries.take(out, 0),
            span.queries.take(lse.t().unsqueeze(-1), torch.inf).squeeze(-1),
            span.queries.take(grad_out, 0),
            span.queries.take(grad_lse.t().unsqueeze(-1), 0).squeeze(-1),
        ]
        its = [torch.zeros(t.shape, dtype=torch.float32, device=t.device) for t in (queries, keys, values)]
        _attend_grad(queries, keys, values, span.start, span.live, rule, saved, its)
        for rows, grad, mine in zip((span.queries, span.keys, span.keys), grads, its, strict=True):
            rows.put(grad, mine)
    return tuple(grad[:-1].to(q.dtype) for grad in grads)

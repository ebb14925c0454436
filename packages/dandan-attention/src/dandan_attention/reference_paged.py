"""What the operators over a paged cache mean, in plain PyTorch: CPU kernel and torch backend.

Pages of a sequence are gathered, and attention is that of `reference`. On the CPU the host knows the lengths, so only
live pages are read, and a sequence has the same bits whatever the table's width and the other sequences are. On CUDA
devices nothing waits for the device: whole rows of the table are gathered, so one captured graph serves every length.
"""

from __future__ import annotations

import torch

from dandan_attention.reference import BLOCK, Rows, Rule, _attend, _device_rows

__all__ = ["paged_attention", "paged_attention_varlen", "paged_lse"]


def paged_lse(q: torch.Tensor) -> torch.Tensor:
    """Uninitialised [B, Hq, Sq] in FP32, [B, Hq] for q [B, Hq, D]."""
    return q.new_empty(lse_shape(q), dtype=torch.float32)


def lse_shape(q: torch.Tensor) -> tuple[int, ...]:
    return (q.shape[0], q.shape[2], q.shape[1]) if q.dim() == 4 else (q.shape[0], q.shape[1])


def _lengths_stay(q: torch.Tensor) -> bool:
    """Whether reading lengths on the host would wait for a device."""
    return q.is_cuda


def _gather(cache: torch.Tensor, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys or values [B, Hkv, pages * page_size, D] of the pages `ids` [B, pages], and which of them are there,
    [B, pages * page_size]. Ids that no page has give zeros.
    """
    num_pages, page_size, heads, head_dim = cache.shape
    fits = (ids >= 0) & (ids < num_pages)
    known = fits.repeat_interleave(page_size, 1)
    if num_pages == 0:
        return cache.new_zeros((ids.shape[0], heads, known.shape[1], head_dim)), known
    taken = cache[torch.where(fits, ids, 0).long()].flatten(1, 2).transpose(1, 2)
    return torch.where(known[:, None, :, None], taken, 0), known


def _one(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    ids: torch.Tensor,
    live: int,
    rule: Rule,
    out: torch.Tensor,
    lse: torch.Tensor,
) -> None:
    """One sequence of known length: q and out [1, Hq, Sq, D], lse [1, Hq, Sq], ids [1, max_pages]."""
    page_size = k_cache.shape[1]
    live = max(0, min(live, ids.shape[1] * page_size))
    ids = ids[:, : -(-live // page_size)]
    (k, known), (v, _) = _gather(k_cache, ids), _gather(v_cache, ids)
    _attend(q, k[:, :, :live], v[:, :, :live], live - q.shape[2], live, rule, out, lse, known[:, :live])


def _many(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    ids: torch.Tensor,
    used: torch.Tensor,
    lengths_q: torch.Tensor,
    rule: Rule,
    out: torch.Tensor,
    lse: torch.Tensor,
) -> None:
    """Sequences whose lengths only the device knows: `used` and `lengths_q` are int64 [B]."""
    live = used.clamp(0, ids.shape[1] * k_cache.shape[1]).view(-1, 1, 1, 1, 1)
    (k, known), (v, _) = _gather(k_cache, ids), _gather(v_cache, ids)
    _attend(q, k, v, live - lengths_q.view(-1, 1, 1, 1, 1), live, rule, out, lse, known)


def paged_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    page_table: torch.Tensor,
    seqused_k: torch.Tensor,
    softmax_scale: float | None = None,
    window_size: int | None = None,
    softcap: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Result of q's shape and lse [B, Hq, Sq] or [B, Hq]; arguments as in the schema."""
    rule = Rule.of(q, True, softmax_scale, window_size, softcap)
    out, lse = q.new_empty(q.shape), paged_lse(q)
    # [B, Hq, Sq, D] and [B, Hq, Sq], of the memory of the results.
    queries, result = (t.transpose(1, 2) if t.dim() == 4 else t.unsqueeze(2) for t in (q, out))
    its_lse = lse if q.dim() == 4 else lse.unsqueeze(2)
    batch, _, seqlen_q, head_dim = queries.shape
    if _lengths_stay(q):
        width = max(1, page_table.shape[1] * k_cache.shape[1] * k_cache.shape[2] * head_dim)
        step = max(1, BLOCK // width)
        for first in range(0, batch, step):
            at = slice(first, min(batch, first + step))
            used = seqused_k[at].long()
            lengths = torch.full_like(used, seqlen_q)
            _many(queries[at], k_cache, v_cache, page_table[at], used, lengths, rule, result[at], its_lse[at])
        return out, lse
    for i, used in enumerate(seqused_k.tolist()):
        at = slice(i, i + 1)
        _one(queries[at], k_cache, v_cache, page_table[at], used, rule, result[at], its_lse[at])
    return out, lse


def paged_attention_varlen(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    page_table: torch.Tensor,
    seqused_k: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    max_seqlen_q: int,
    softmax_scale: float | None = None,
    window_size: int | None = None,
    softcap: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Result [total_q, Hq, D] and lse [Hq, total_q]; arguments as in the schema. Rows of no sequence are 0."""
    rule = Rule.of(q, True, softmax_scale, window_size, softcap)
    total, heads, head_dim = q.shape
    # One row more than q has: what lies behind a sequence's end is written there.
    out = q.new_zeros((total + 1, heads, head_dim))
    lse = q.new_full((total + 1, heads, 1), -torch.inf, dtype=torch.float32)
    stay = _lengths_stay(q)
    bounds, used = ([], []) if stay else (cu_seqlens_q.tolist(), seqused_k.tolist())
    for i in range(page_table.shape[0]):
        at = slice(i, i + 1)
        if stay:
            begin, end = cu_seqlens_q[i].long(), cu_seqlens_q[i + 1].long()
            rows = _device_rows(begin, end, max_seqlen_q, total)
        else:
            rows = Rows(slice(*bounds[i : i + 2]))
        queries = rows.take(q)
        result, its_lse = queries.new_empty(queries.shape), queries.new_empty(queries.shape[:-1], dtype=torch.float32)
        if stay:
            lengths = (seqused_k[at].long(), (end - begin).view(1))
            _many(queries, k_cache, v_cache, page_table[at], *lengths, rule, result, its_lse)
        else:
            _one(queries, k_cache, v_cache, page_table[at], used[i], rule, result, its_lse)
        rows.put(out, result)
        rows.put(lse, its_lse.unsqueeze(-1))
    return out[:total], lse[:total, :, 0].t().contiguous()

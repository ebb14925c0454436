"""flash_attention and flash_attention_varlen: softmax(q k^T) v, dense and packed."""

from __future__ import annotations

from typing import Any, Literal

import torch

from dandan_attention import checks
from dandan_attention._ops import LIBRARY, explain, run_reference

__all__ = ["flash_attention", "flash_attention_varlen"]

_CODES = LIBRARY.codes
_FORMS = ("", "_out", "_lse", "_lse_out")
_DENSE = tuple(LIBRARY.op(f"flash_attention{form}") for form in _FORMS)
_PACKED = tuple(LIBRARY.op(f"flash_attention_varlen{form}") for form in _FORMS)


def flash_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: bool = False,
    softmax_scale: float | None = None,
    query_start: int | torch.Tensor | None = None,
    window_size: int | None = None,
    softcap: float = 0.0,
    seqused_k: torch.Tensor | None = None,
    return_lse: bool = False,
    out: torch.Tensor | None = None,
    backend: str = "auto",
) -> Any:
    """Grouped-query attention ``softmax(softmax_scale * q @ k.T) @ v`` over a batch of sequences of one length.

    Key j is visible to query i of its sequence when ``j < seqused_k``, with `causal` ``j <= query_start + i``, and with
    `window_size` ``j > query_start + i - window_size``. A query without a visible key gives exactly 0. With `softcap` a
    logit is ``softcap * tanh(softmax_scale * q @ k / softcap)``, before the mask. Query head h reads head
    ``h // (Hq / Hkv)`` of k and v.

    Logits, softmax and sums are FP32; the result is rounded once. Every kernel is deterministic: the same inputs give
    the same bits on every run and stream.

    Args:
        q: [B, Hq, Sq, D], float16 or bfloat16, any strides. Views of [B, S, H, D] are read in place.
        k: [B, Hkv, Sk, D], dtype and device of q, any strides; Hq is a multiple of Hkv.
        v: [B, Hkv, Sk, D], as k. Values at `seqused_k` and behind it never reach the result, NaN included; the same
            holds for k.
        causal: a query sees no key behind its own place.
        softmax_scale: finite and above 0; None is ``1 / sqrt(D)``.
        query_start: place of the first query among the keys: an int, or int32 [B]; may be negative. None is 0 where Sq
            equals Sk or neither `causal` nor `window_size` asks for places; else it has to be given, ``Sk - Sq`` for
            queries that end with the keys.
        window_size: how many keys a query sees to the left, its own place included; 1 or more. It limits the left side
            alone, causal or not. None: all.
        softcap: 0: none.
        seqused_k: int32 [B]: live length of each sequence of keys, 0 to Sk. On CUDA devices a value outside counts as
            the nearest of these (under ``DANDAN_DEBUG=1`` it raises).
        return_lse: return the logarithm of the sum of exponentials too.
        out: [B, Hq, Sq, D] of q's dtype to write into, any strides; shares no memory with the inputs.
        backend: "auto", "torch", "cuda", "sm80_mma" or "sm90a_wgmma". The own kernels take a head dimension of 64, 128
            or 256; "auto" takes PyTorch for others.

    Returns:
        [B, Hq, Sq, D] of q's dtype, or ``out``. Without gaps: rows outside of heads in memory where q has them so
        (``q.stride(1) < q.stride(2)``, a view of [B, S, H, D]), else contiguous.
        With `return_lse` also [B, Hq, Sq] float32, contiguous: natural logarithm; -inf for a query without keys.

    Raises:
        TypeError: an argument is of another type, or a tensor of an unsupported dtype or of another dtype than q.
        ValueError: a shape, device, number, backend name or `out` breaks a rule; the text names operator, argument,
            rule and value.
        BackendUnavailableError: the named backend cannot run this call; the text says why and what can.

    Source: FlashAttention (T. Dao et al., 2022, arXiv:2205.14135; 2023, arXiv:2307.08691; J. Shah et al., 2024,
    arXiv:2407.08608; T. Zadouri et al., 2026, arXiv:2603.05451); online softmax (M. Milakov, N. Gimelshein, 2018,
    arXiv:1805.02867); grouped queries (J. Ainslie et al., 2023, arXiv:2305.13245).
    """
    inputs = dense_inputs(q, k, v, causal, softmax_scale, query_start, window_size, softcap, seqused_k)
    return _call("flash_attention", _DENSE, inputs, out, return_lse, backend)


def flash_attention_varlen(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    *,
    max_seqlen_q: int,
    max_seqlen_k: int,
    causal: bool = False,
    softmax_scale: float | None = None,
    query_starts: torch.Tensor | Literal["suffix"] | None = None,
    window_size: int | None = None,
    softcap: float = 0.0,
    seqused_k: torch.Tensor | None = None,
    return_lse: bool = False,
    out: torch.Tensor | None = None,
    backend: str = "auto",
) -> Any:
    """`flash_attention` over sequences of different lengths, packed one after the other: sequence b has the rows
    ``cu_seqlens_q[b]`` up to ``cu_seqlens_q[b + 1]`` of q, and those of ``cu_seqlens_k`` of k and v.

    Values inside cu_seqlens are checked on the CPU and under ``DANDAN_DEBUG=1``; wrong ones on CUDA devices give a
    wrong result and touch no memory outside of the tensors.

    Args:
        q: [total_q, Hq, D], float16 or bfloat16, any strides.
        k: [total_k, Hkv, D], dtype and device of q, any strides; Hq is a multiple of Hkv.
        v: [total_k, Hkv, D], as k.
        cu_seqlens_q: int32 [B + 1] on q's device, from 0, ascending, up to total_q or less. A sequence may be empty.
        cu_seqlens_k: as cu_seqlens_q, for k and v.
        max_seqlen_q: at least the length of the longest sequence of queries.
        max_seqlen_k: at least the length of the longest sequence of keys.
        causal: as in `flash_attention`.
        softmax_scale: as in `flash_attention`.
        query_starts: place of each sequence's first query among its keys: int32 [B], or "suffix" for live keys minus
            queries, so that both end together. With `causal` or `window_size` it has to be given unless cu_seqlens_q
            and cu_seqlens_k are one tensor, for then every sequence starts at 0.
        window_size: as in `flash_attention`.
        softcap: as in `flash_attention`.
        seqused_k: int32 [B]: live length of each sequence of keys, as in `flash_attention`.
        return_lse: return the logarithm of the sum of exponentials too.
        out: [total_q, Hq, D] of q's dtype to write into, any strides; shares no memory with the inputs.
        backend: as in `flash_attention`.

    Returns:
        [total_q, Hq, D] of q's dtype, contiguous, or ``out``. Rows behind ``cu_seqlens_q[B]`` hold anything.
        With `return_lse` also [Hq, total_q] float32, contiguous: natural logarithm; -inf for a query without keys.

    Raises:
        TypeError: as in `flash_attention`.
        ValueError: as in `flash_attention`; cu_seqlens of another length, not ascending or beyond the rows.
        BackendUnavailableError: as in `flash_attention`.

    Source: as `flash_attention`.
    """
    inputs = packed_inputs(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k,
        causal, softmax_scale, query_starts, window_size, softcap, seqused_k,
    )  # fmt: skip
    return _call("flash_attention_varlen", _PACKED, inputs, out, return_lse, backend)


def dense_inputs(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    causal: bool,
    softmax_scale: float | None,
    query_start: int | torch.Tensor | None,
    window_size: int | None,
    softcap: float,
    seqused_k: torch.Tensor | None,
) -> tuple[Any, ...]:
    """What the schema of `flash_attention` takes: a number and a tensor are two arguments there."""
    start, starts = (None, query_start) if isinstance(query_start, torch.Tensor) else (query_start, None)
    return q, k, v, causal, softmax_scale, start, starts, window_size, softcap, seqused_k


def packed_inputs(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    causal: bool,
    softmax_scale: float | None,
    query_starts: torch.Tensor | Literal["suffix"] | None,
    window_size: int | None,
    softcap: float,
    seqused_k: torch.Tensor | None,
) -> tuple[Any, ...]:
    """What the schema of `flash_attention_varlen` takes.

    Raises:
        TypeError, ValueError: `query_starts` is neither, or has to be given.
    """
    tensor, suffix = (None, True) if isinstance(query_starts, str) else (query_starts, False)
    if not isinstance(query_starts, torch.Tensor):
        checks.starts(query_starts, cu_seqlens_q, cu_seqlens_k, causal, window_size)
    return (
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k,
        causal, softmax_scale, tensor, suffix, window_size, softcap, seqused_k,
    )  # fmt: skip


def _call(
    name: str,
    forms: tuple[Any, ...],
    inputs: tuple[Any, ...],
    out: torch.Tensor | None,
    return_lse: bool,
    backend: str,
) -> Any:
    """One of the four forms of an operator, or its reference where a gradient is needed."""
    q, k, v = inputs[:3]
    try:
        if checks.DEBUG and not torch.compiler.is_compiling():
            getattr(checks, name)(*inputs, out=None if out is None else (out,))
        if torch.is_grad_enabled() and (
            q.requires_grad or k.requires_grad or v.requires_grad or (out is not None and out.requires_grad)
        ):
            return run_reference(name, inputs, out, return_lse, backend)
        plain, plain_out, with_lse, with_lse_out = forms
        if out is None:
            return (with_lse if return_lse else plain)(*inputs, _CODES[backend])
        if not return_lse:
            plain_out(*inputs, _CODES[backend], out)
            return out
        lse = q.new_empty(q.shape[:-1] if forms is _DENSE else (q.shape[1], q.shape[0]), dtype=torch.float32)
        with_lse_out(*inputs, _CODES[backend], out, lse)
        return out, lse
    except (AttributeError, LookupError, OverflowError, RuntimeError, TypeError) as error:
        raise explain(name, error, inputs, out, backend) from None

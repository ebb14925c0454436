"""paged_attention and paged_attention_varlen: attention to keys and values that lie in pages; DecodePlan."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from dandan_attention import cache_checks
from dandan_attention._cache_ops import LIBRARY, explain
from dandan_attention.checks import DTYPES
from dandan_ops_core.backend import ExecutionInfo
from dandan_ops_core.tensors import dtype_name

__all__ = [
    "DecodePlan",
    "paged_attention",
    "paged_attention_execution_info",
    "paged_attention_varlen",
    "paged_attention_varlen_execution_info",
]

_CODES = LIBRARY.codes


@dataclass(frozen=True)
class DecodePlan:
    """The capacity that calls of `paged_attention` share: how much they may be, not how much they are.

    A plan holds no lengths. Those are read from `seqused_k` on the device at every call, so one plan, and one captured
    graph, serves every length up to its capacity. With PyTorch, which computes now, a plan only checks that a call fits
    it: results with and without one are the same bits.

    Attributes:
        max_batch: sequences of a call at most.
        num_heads_q: heads of q.
        num_heads_kv: heads of the caches.
        head_dim: D.
        max_seqlen_k: keys of a sequence at most. A table may end with a page that goes beyond.
        max_seqlen_q: queries of a sequence at most, 1 to 16.
        dtype: of q and the caches, float16 or bfloat16.
        device: of the calls.

    Raises:
        TypeError: an attribute is of another type.
        ValueError: a number is out of range.
    """

    max_batch: int
    num_heads_q: int
    num_heads_kv: int
    head_dim: int
    max_seqlen_k: int
    max_seqlen_q: int = 1
    dtype: torch.dtype = torch.bfloat16
    device: torch.device | str = "cuda"

    def __post_init__(self) -> None:
        for name in ("max_batch", "num_heads_q", "num_heads_kv", "head_dim", "max_seqlen_k", "max_seqlen_q"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool):
                raise TypeError(f"DecodePlan: {name} is {type(value).__name__}; an int is needed")
            if value < 1:
                raise ValueError(f"DecodePlan: {name} is {value}; 1 or more is needed")
        if self.max_seqlen_q > cache_checks.MAX_SEQLEN_Q:
            raise ValueError(
                f"DecodePlan: max_seqlen_q is {self.max_seqlen_q}; up to {cache_checks.MAX_SEQLEN_Q} are supported"
            )
        if self.num_heads_q % self.num_heads_kv:
            raise ValueError(
                f"DecodePlan: num_heads_q is {self.num_heads_q}, which is not a multiple of "
                f"num_heads_kv={self.num_heads_kv}"
            )
        if not isinstance(self.dtype, torch.dtype):
            raise TypeError(f"DecodePlan: dtype is {type(self.dtype).__name__}; a torch.dtype is needed")
        if self.dtype not in DTYPES:
            raise TypeError(f"DecodePlan: dtype is {dtype_name(self.dtype)}; float16 and bfloat16 are supported")
        object.__setattr__(self, "device", torch.device(self.device))

    def _check(self, q: torch.Tensor, k_cache: torch.Tensor, page_table: torch.Tensor) -> None:
        """Raises ValueError where a call is not within this plan."""
        op = "paged_attention"
        here = torch.device(self.device)
        if q.device.type != here.type or here.index not in (None, q.device.index):
            raise ValueError(f"{op}: plan is for {here} but q is on {q.device}")
        if q.dtype != self.dtype:
            raise ValueError(f"{op}: plan is for {dtype_name(self.dtype)} but q has dtype {dtype_name(q.dtype)}")
        seqlen_q = q.shape[1] if q.dim() == 4 else 1
        for what, size, limit in (
            ("sequences", q.shape[0], self.max_batch),
            ("queries of a sequence", seqlen_q, self.max_seqlen_q),
        ):
            if size > limit:
                raise ValueError(f"{op}: plan is for up to {limit} {what}; q has {size}")
        for what, size, planned in (
            ("num_heads_q", q.shape[-2], self.num_heads_q),
            ("num_heads_kv", k_cache.shape[2], self.num_heads_kv),
            ("head_dim", q.shape[-1], self.head_dim),
        ):
            if size != planned:
                raise ValueError(f"{op}: plan is for {what}={planned}; the call has {what}={size}")
        page_size = k_cache.shape[1]
        if (page_table.shape[1] - 1) * page_size >= self.max_seqlen_k:
            raise ValueError(
                f"{op}: plan is for max_seqlen_k={self.max_seqlen_k}; page_table has {page_table.shape[1]} columns for "
                f"pages of {page_size}, where {-(-self.max_seqlen_k // page_size)} are enough"
            )


def _check_plan(plan: object, inputs: Sequence[Any]) -> None:
    if plan is None:
        return
    if not isinstance(plan, DecodePlan):
        raise TypeError(f"paged_attention: plan is {type(plan).__name__}; a DecodePlan or None is needed")
    plan._check(inputs[0], inputs[1], inputs[3])


def _attend(
    name: str,
    inputs: Sequence[Any],
    out: torch.Tensor | None,
    return_lse: bool,
    backend: str,
    plan: DecodePlan | None = None,
) -> Any:
    try:
        q = inputs[0]
        _check_plan(plan, inputs)
        cache_checks.no_gradients(name, q=q, k_cache=inputs[1], v_cache=inputs[2], out=out)
        if out is None:
            return LIBRARY.op(f"{name}_lse" if return_lse else name)(*inputs, _CODES[backend])
        if not return_lse:
            LIBRARY.op(f"{name}_out")(*inputs, _CODES[backend], out)
            return out
        if name == "paged_attention":
            shape = (q.shape[0], q.shape[2], q.shape[1]) if q.dim() == 4 else q.shape[:2]
        else:
            shape = (q.shape[1], q.shape[0])
        lse = q.new_empty(shape, dtype=torch.float32)
        LIBRARY.op(f"{name}_lse_out")(*inputs, _CODES[backend], out, lse)
        return out, lse
    except (AttributeError, LookupError, OverflowError, RuntimeError, TypeError) as error:
        raise explain(name, error, inputs, None if out is None else (out,), backend) from None


def paged_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    page_table: torch.Tensor,
    seqused_k: torch.Tensor,
    *,
    softmax_scale: float | None = None,
    window_size: int | None = None,
    softcap: float = 0.0,
    plan: DecodePlan | None = None,
    out: torch.Tensor | None = None,
    return_lse: bool = False,
    backend: str = "auto",
) -> Any:
    """Attention of the last tokens of each sequence to its keys and values, which lie in pages of a cache.

    Key j of sequence b lies in page ``page_table[b, j // page_size]`` at slot ``j % page_size``. The queries are the
    last Sq of the ``seqused_k[b]`` tokens, whose keys are in the cache already: query i stands at key
    ``seqused_k[b] - Sq + i`` and sees the keys up to its own. A query without a visible key, as all of a sequence of
    length 0 are, gives exactly 0. Softcap, window and heads are those of `flash_attention`.

    Entries of page_table behind the live pages are never read. A live entry that names no page hides its keys. Values
    behind the live length never reach the result, NaN included. The caches are read where they lie.

    Computed by PyTorch: own kernels follow. Nothing here waits for a CUDA device.

    Args:
        q: [B, Hq, D], or [B, Sq, Hq, D] with Sq up to 16; float16 or bfloat16, any strides.
        k_cache: [num_pages, page_size, Hkv, D], dtype and device of q, page_size 1 to 1024, any strides: a layer of a
            stacked buffer, a half of a packed one, or heads outside of slots
            (``cache.transpose(1, 2)`` of [num_pages, Hkv, page_size, D]). Hq is a multiple of Hkv.
        v_cache: as k_cache.
        page_table: int32 [B, max_pages] on q's device, any strides.
        seqused_k: int32 [B]: live tokens of each sequence, 0 to max_pages * page_size. On CUDA devices a value outside
            counts as the nearest of these (under ``DANDAN_DEBUG=1`` it raises, and so does a live entry of page_table
            that names no page).
        softmax_scale: finite and above 0; None is ``1 / sqrt(D)``.
        window_size: how many keys a query sees, its own included; 1 or more. None: all up to its own.
        softcap: 0: none.
        plan: the capacity of calls that share it, see `DecodePlan`; the result is the same with it and without.
        out: tensor of q's shape and dtype to write into, any strides; shares no memory with the inputs.
        return_lse: return the logarithm of the sum of exponentials too.
        backend: "auto" or "torch". No own kernel of this operator is built yet.

    Returns:
        Of q's shape and dtype, contiguous, or ``out``. With `return_lse` also [B, Hq] or [B, Hq, Sq] float32,
        contiguous: natural logarithm; -inf for a query without keys.

    Raises:
        TypeError: an argument is of another type, or a tensor of an unsupported dtype or of another dtype than q.
        ValueError: a shape, device, number, backend name, `out` or the plan breaks a rule, or an argument requires a
            gradient, in grad mode; the text names operator, argument, rule and value.
        BackendUnavailableError: the named backend cannot run this call.

    Source: PagedAttention (W. Kwon et al., 2023, arXiv:2309.06180); FlashDecoding (T. Dao et al., 2023); the softmax as
    `flash_attention`.
    """
    inputs = (q, k_cache, v_cache, page_table, seqused_k, softmax_scale, window_size, softcap)
    return _attend("paged_attention", inputs, out, return_lse, backend, plan)


def paged_attention_varlen(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    page_table: torch.Tensor,
    seqused_k: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    *,
    max_seqlen_q: int,
    softmax_scale: float | None = None,
    window_size: int | None = None,
    softcap: float = 0.0,
    out: torch.Tensor | None = None,
    return_lse: bool = False,
    backend: str = "auto",
) -> Any:
    """`paged_attention` for any number of queries per sequence, packed one after the other: sequence b has the rows
    ``cu_seqlens_q[b]`` up to ``cu_seqlens_q[b + 1]`` of q, the last of its ``seqused_k[b]`` tokens. So a prompt is
    computed in chunks, or behind a prefix that an earlier request left in the cache.

    Args:
        q: [total_q, Hq, D], float16 or bfloat16, any strides.
        k_cache: as in `paged_attention`; the keys of the queries are in it already.
        v_cache: as k_cache.
        page_table: as in `paged_attention`.
        seqused_k: as in `paged_attention`; the queries count among the live tokens.
        cu_seqlens_q: int32 [B + 1] on q's device, from 0, ascending, up to total_q or less; its values are checked as
            in `flash_attention_varlen`.
        max_seqlen_q: at least the number of queries of the longest sequence.
        softmax_scale: as in `paged_attention`.
        window_size: as in `paged_attention`.
        softcap: as in `paged_attention`.
        out: [total_q, Hq, D] of q's dtype to write into, any strides; shares no memory with the inputs.
        return_lse: return the logarithm of the sum of exponentials too.
        backend: as in `paged_attention`.

    Returns:
        [total_q, Hq, D] of q's dtype, contiguous, or ``out``. Rows behind ``cu_seqlens_q[B]`` hold anything.
        With `return_lse` also [Hq, total_q] float32, contiguous: natural logarithm; -inf for a query without keys.

    Raises:
        TypeError: as in `paged_attention`.
        ValueError: as in `paged_attention`; cu_seqlens_q not ascending or beyond the rows.
        BackendUnavailableError: as in `paged_attention`.

    Source: as `paged_attention`.
    """
    inputs = (
        q, k_cache, v_cache, page_table, seqused_k, cu_seqlens_q, max_seqlen_q, softmax_scale, window_size, softcap,
    )  # fmt: skip
    return _attend("paged_attention_varlen", inputs, out, return_lse, backend)


def _execution_info(name: str, inputs: Sequence[Any], out: torch.Tensor | None, backend: str) -> ExecutionInfo:
    info = LIBRARY.execution_info(name, inputs, None if out is None else (out,), backend)
    cache_checks.no_gradients(name, q=inputs[0], k_cache=inputs[1], v_cache=inputs[2], out=out)
    return info


def paged_attention_execution_info(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    page_table: torch.Tensor,
    seqused_k: torch.Tensor,
    *,
    softmax_scale: float | None = None,
    window_size: int | None = None,
    softcap: float = 0.0,
    plan: DecodePlan | None = None,
    out: torch.Tensor | None = None,
    return_lse: bool = False,
    backend: str = "auto",
) -> ExecutionInfo:
    """How ``paged_attention`` with the same arguments would run. Launches nothing.

    Args:
        q: as in `paged_attention`, and so are the others.

    Returns:
        As `flash_attention_execution_info`.

    Raises:
        TypeError: where the call raises it.
        ValueError: where the call raises it.
        BackendUnavailableError: where the call raises it.
    """
    inputs = (q, k_cache, v_cache, page_table, seqused_k, softmax_scale, window_size, softcap)
    info = _execution_info("paged_attention", inputs, out, backend)
    _check_plan(plan, inputs)
    return info


def paged_attention_varlen_execution_info(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    page_table: torch.Tensor,
    seqused_k: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    *,
    max_seqlen_q: int,
    softmax_scale: float | None = None,
    window_size: int | None = None,
    softcap: float = 0.0,
    out: torch.Tensor | None = None,
    return_lse: bool = False,
    backend: str = "auto",
) -> ExecutionInfo:
    """How ``paged_attention_varlen`` with the same arguments would run. Launches nothing.

    Args:
        q: as in `paged_attention_varlen`, and so are the others.

    Returns:
        As `flash_attention_execution_info`.

    Raises:
        TypeError: where the call raises it.
        ValueError: where the call raises it.
        BackendUnavailableError: where the call raises it.
    """
    inputs = (
        q, k_cache, v_cache, page_table, seqused_k, cu_seqlens_q, max_seqlen_q, softmax_scale, window_size, softcap,
    )  # fmt: skip
    return _execution_info("paged_attention_varlen", inputs, out, backend)

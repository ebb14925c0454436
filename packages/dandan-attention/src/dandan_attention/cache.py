"""rope, write_kv and qk_norm_rope_write_kv: what a decoder layer does between its projections and its attention."""

from __future__ import annotations

from typing import Any

import torch

from dandan_attention import cache_checks
from dandan_attention._cache_ops import LIBRARY, explain
from dandan_ops_core.backend import ExecutionInfo

__all__ = [
    "qk_norm_rope_write_kv",
    "qk_norm_rope_write_kv_execution_info",
    "rope",
    "rope_execution_info",
    "write_kv",
    "write_kv_execution_info",
]

_CODES = LIBRARY.codes
_FAILURES = (AttributeError, LookupError, OverflowError, RuntimeError, TypeError)


def rope(
    q: torch.Tensor,
    k: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    positions: torch.Tensor,
    *,
    interleaved: bool = False,
    out: tuple[torch.Tensor, torch.Tensor] | None = None,
    backend: str = "auto",
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotary position embedding: pairs (a, b) of each head become ``(a cos - b sin, b cos + a sin)``.

    With R = 2 * columns of cos, the first R of the D dimensions turn and the others stay, bit for bit. Pairs are
    dimensions (i, i + R / 2), or (2i, 2i + 1) with `interleaved`; pair i turns by column i of cos and sin. Products and
    sums are FP32, rounded once. A token whose position is not a row of the tables stays as it is.

    Computed by PyTorch: own kernels follow.

    Args:
        q: [T, Hq, D], float16 or bfloat16, any strides, such as a slice of one qkv tensor.
        k: [T, Hkv, D], dtype and device of q, any strides.
        cos: [max_positions, R / 2], float32 or q's dtype, R up to D.
        sin: as cos.
        positions: int32 or int64 [T]. One outside of 0 to max_positions - 1 raises under ``DANDAN_DEBUG=1``.
        interleaved: pairs of neighbours, as GPT-J has them, and not of halves, as GPT-NeoX and Llama.
        out: tensors to write into, for q and for k, any strides. ``out=(q, k)`` turns in place; else they share no
            memory with the inputs.
        backend: "auto" or "torch". No own kernel of this operator is built yet.

    Returns:
        q and k turned, contiguous, or ``out``. Differentiable without ``out``.

    Raises:
        TypeError: an argument is of another type, or a tensor of an unsupported dtype.
        ValueError: a shape, device, backend name or `out` breaks a rule; the text names operator, argument, rule and
            value.
        BackendUnavailableError: the named backend cannot run this call.

    Source: RoFormer (J. Su et al., 2021, arXiv:2104.09864).
    """
    inputs = (q, k, cos, sin, positions, interleaved)
    try:
        outputs = () if out is None else tuple(out)
        if torch.is_grad_enabled() and any(t.requires_grad for t in (q, k, cos, sin, *outputs)):
            result: tuple[torch.Tensor, torch.Tensor] = LIBRARY.run_reference("rope", inputs, out, backend)
            return result
        if out is None:
            result = LIBRARY.op("rope")(*inputs, _CODES[backend])
            return result
        LIBRARY.op("rope_out")(*inputs, _CODES[backend], *outputs)
        return out
    except _FAILURES as error:
        raise explain("rope", error, inputs, out, backend) from None


def rope_execution_info(
    q: torch.Tensor,
    k: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    positions: torch.Tensor,
    *,
    interleaved: bool = False,
    out: tuple[torch.Tensor, torch.Tensor] | None = None,
    backend: str = "auto",
) -> ExecutionInfo:
    """How ``rope`` with the same arguments would run. Launches nothing.

    Args:
        q: as in `rope`, and so are the others.

    Returns:
        As `flash_attention_execution_info`.

    Raises:
        TypeError: where the call raises it.
        ValueError: where the call raises it.
        BackendUnavailableError: where the call raises it.
    """
    inputs = (q, k, cos, sin, positions, interleaved)
    info = LIBRARY.execution_info("rope", inputs, out, backend)
    LIBRARY.check_gradients("rope", inputs, out, backend)
    return info


def write_kv(
    k: torch.Tensor,
    v: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    *,
    backend: str = "auto",
) -> None:
    """Writes the keys and values of tokens to their places in a paged cache: token t to slot ``s % page_size`` of page
    ``s // page_size`` with ``s = slot_mapping[t]``. Nothing else of the caches changes.

    A slot of -1, or any other that no page has, is skipped: padding of a fixed batch. No slot may be given twice; which
    of its tokens it would then hold is not defined.

    Computed by PyTorch: own kernels follow.

    Args:
        k: [T, Hkv, D], float16 or bfloat16, any strides.
        v: as k.
        k_cache: [num_pages, page_size, Hkv, D], dtype and device of k, page_size 1 to 1024, any strides under which no
            two elements share memory; written to. It shares no memory with k or v.
        v_cache: as k_cache.
        slot_mapping: int32 or int64 [T]. One that is neither -1 nor a slot raises under ``DANDAN_DEBUG=1``.
        backend: "auto" or "torch". No own kernel of this operator is built yet.

    Raises:
        TypeError: an argument is of another type, or a tensor of an unsupported dtype.
        ValueError: a shape, device or backend name breaks a rule, or an argument requires a gradient, in grad mode; the
            text names operator, argument, rule and value. The caches are then unchanged.
        BackendUnavailableError: the named backend cannot run this call.

    Source: the slot mapping of PagedAttention (W. Kwon et al., 2023, arXiv:2309.06180).
    """
    inputs = (k, v, k_cache, v_cache, slot_mapping)
    try:
        cache_checks.no_gradients("write_kv", k=k, v=v, k_cache=k_cache, v_cache=v_cache)
        LIBRARY.op("write_kv")(*inputs, _CODES[backend])
    except _FAILURES as error:
        raise explain("write_kv", error, inputs, None, backend) from None


def write_kv_execution_info(
    k: torch.Tensor,
    v: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    *,
    backend: str = "auto",
) -> ExecutionInfo:
    """How ``write_kv`` with the same arguments would run. Launches and writes nothing.

    Args:
        k: as in `write_kv`, and so are the others.

    Returns:
        As `flash_attention_execution_info`.

    Raises:
        TypeError: where the call raises it.
        ValueError: where the call raises it.
        BackendUnavailableError: where the call raises it.
    """
    info = LIBRARY.execution_info("write_kv", (k, v, k_cache, v_cache, slot_mapping), None, backend)
    cache_checks.no_gradients("write_kv", k=k, v=v, k_cache=k_cache, v_cache=v_cache)
    return info


def qk_norm_rope_write_kv(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    positions: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    *,
    eps: float = 1e-6,
    interleaved: bool = False,
    out: torch.Tensor | None = None,
    key_out: torch.Tensor | None = None,
    backend: str = "auto",
) -> torch.Tensor:
    """RMSNorm of each head of q and k, `rope` of both, and `write_kv` of the keys and v, as Qwen3 has them, in one
    operator. Each step rounds as the operator that it stands for, so the results are those of the three.

    Computed by PyTorch: own kernels follow.

    Args:
        q: [T, Hq, D], float16 or bfloat16, any strides, such as a slice of one qkv tensor.
        k: [T, Hkv, D], as q.
        v: [T, Hkv, D], as q.
        q_weight: [D], float32 or q's dtype: weight of the norm of q's heads, multiplied in FP32 before the rounding.
        k_weight: as q_weight, for k.
        cos: as in `rope`.
        sin: as in `rope`.
        positions: as in `rope`.
        k_cache: as in `write_kv`; written to.
        v_cache: as k_cache.
        slot_mapping: as in `write_kv`. A token that is skipped there is computed nevertheless.
        eps: added to the mean square inside the root.
        interleaved: as in `rope`.
        out: [T, Hq, D] of q's dtype to write the queries into, any strides; q itself, or no memory of the inputs.
        key_out: [T, Hkv, D] of q's dtype to write the keys into as well, for a prefill that reads them from there; k
            itself, or no memory of the inputs. None: they go to the cache alone.
        backend: "auto" or "torch". No own kernel of this operator is built yet.

    Returns:
        The queries [T, Hq, D], contiguous, or ``out``.

    Raises:
        TypeError: an argument is of another type, or a tensor of an unsupported dtype.
        ValueError: a shape, device, number, backend name or output breaks a rule, or an argument requires a gradient,
            in grad mode; the text names operator, argument, rule and value. The caches are then unchanged.
        BackendUnavailableError: the named backend cannot run this call.

    Source: Qwen3 (Qwen Team, 2025, arXiv:2505.09388); RMSNorm (B. Zhang, R. Sennrich, 2019, arXiv:1910.07467); the rest
    as `rope` and `write_kv`.
    """
    inputs = (
        q, k, v, q_weight, k_weight, cos, sin, positions, k_cache, v_cache, slot_mapping, eps, interleaved,
    )  # fmt: skip
    try:
        _no_gradients(*inputs, out=out, key_out=key_out)
        if out is None and key_out is None:
            result: torch.Tensor = LIBRARY.op("qk_norm_rope_write_kv")(*inputs, _CODES[backend])
            return result
        result = q.new_empty(q.shape) if out is None else out
        LIBRARY.op("qk_norm_rope_write_kv_out")(*inputs, _CODES[backend], result, key_out)
        return result
    except _FAILURES as error:
        raise explain("qk_norm_rope_write_kv", error, inputs, (out, key_out), backend) from None


def _no_gradients(*inputs: Any, **outputs: torch.Tensor | None) -> None:
    names = ("q", "k", "v", "q_weight", "k_weight", "cos", "sin", "positions", "k_cache", "v_cache", "slot_mapping")
    cache_checks.no_gradients("qk_norm_rope_write_kv", **dict(zip(names, inputs, strict=False)), **outputs)


def qk_norm_rope_write_kv_execution_info(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    positions: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    *,
    eps: float = 1e-6,
    interleaved: bool = False,
    out: torch.Tensor | None = None,
    key_out: torch.Tensor | None = None,
    backend: str = "auto",
) -> ExecutionInfo:
    """How ``qk_norm_rope_write_kv`` with the same arguments would run. Launches and writes nothing.

    Args:
        q: as in `qk_norm_rope_write_kv`, and so are the others.

    Returns:
        As `flash_attention_execution_info`.

    Raises:
        TypeError: where the call raises it.
        ValueError: where the call raises it.
        BackendUnavailableError: where the call raises it.
    """
    inputs = (
        q, k, v, q_weight, k_weight, cos, sin, positions, k_cache, v_cache, slot_mapping, eps, interleaved,
    )  # fmt: skip
    info = LIBRARY.execution_info("qk_norm_rope_write_kv", inputs, (out, key_out), backend)
    _no_gradients(*inputs, out=out, key_out=key_out)
    return info

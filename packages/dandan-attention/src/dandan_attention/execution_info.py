"""How a call would run, without running it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch

from dandan_attention._ops import LIBRARY, explain
from dandan_attention.attention import dense_inputs, packed_inputs
from dandan_ops_core.backend import ExecutionInfo

__all__ = ["flash_attention_execution_info", "flash_attention_varlen_execution_info"]


def flash_attention_execution_info(
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
) -> ExecutionInfo:
    """How ``flash_attention`` with the same arguments would run. Launches nothing; asks the selection that the call
    asks.

    Args:
        q: as in `flash_attention`, and so are the others.

    Returns:
        Backend ("cuda" or "torch"), kernel, the reason for it, the arguments that would be copied, and what else
        `ExecutionInfo` holds.

    Raises:
        TypeError: where the call raises it.
        ValueError: where the call raises it.
        BackendUnavailableError: where the call raises it.
    """
    inputs = dense_inputs(q, k, v, causal, softmax_scale, query_start, window_size, softcap, seqused_k)
    return _execution_info("flash_attention", inputs, out, return_lse, backend)


def flash_attention_varlen_execution_info(
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
) -> ExecutionInfo:
    """How ``flash_attention_varlen`` with the same arguments would run. Launches nothing; asks the selection that the
    call asks.

    Args:
        q: as in `flash_attention_varlen`, and so are the others.

    Returns:
        As `flash_attention_execution_info`.

    Raises:
        TypeError: where the call raises it.
        ValueError: where the call raises it.
        BackendUnavailableError: where the call raises it.
    """
    inputs = packed_inputs(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k,
        causal, softmax_scale, query_starts, window_size, softcap, seqused_k,
    )  # fmt: skip
    return _execution_info("flash_attention_varlen", inputs, out, return_lse, backend)


def _execution_info(
    name: str, inputs: Sequence[Any], out: torch.Tensor | None, return_lse: bool, backend: str
) -> ExecutionInfo:
    outputs = None if out is None else (out,)
    LIBRARY.number(name, backend)
    LIBRARY.operators[name].check(*inputs, out=outputs)
    gradients = LIBRARY.check_gradients(name, inputs, outputs, backend)
    q: torch.Tensor = inputs[0]

    def torch_info(reason: str, fallback_reason: str | None) -> ExecutionInfo:
        return ExecutionInfo(name, "torch", "torch", reason, None, fallback_reason, (), str(q.device))

    if gradients and backend == "auto":
        return torch_info("an argument needs a gradient", "the own kernels compute no gradients")
    if gradients:
        return torch_info("asked for", None)
    if not (q.is_cuda and LIBRARY.library.loaded):
        if backend == "torch":
            return torch_info("asked for", None)
        if backend != "auto":
            raise LIBRARY.unavailable(name, backend, q)
        if not q.is_cuda:
            return torch_info("q is not on a CUDA device", f"q is on {q.device}, the own kernels run on CUDA devices")
        return torch_info("the compiled library is not loaded", LIBRARY.library.reason)
    try:
        if return_lse:
            route = LIBRARY.info(f"{name}_lse", inputs, (out, None), backend)
        else:
            route = LIBRARY.info(name, inputs, (out,), backend)
    except RuntimeError as error:
        raise explain(name, error, inputs, out, backend) from None
    return ExecutionInfo(
        name,
        route["backend"],
        route["kernel"],
        route["reason"],
        LIBRARY.profile if route["profile"] else None,
        route["fallback_reason"],
        tuple(route["copies"]),
        str(q.device),
    )

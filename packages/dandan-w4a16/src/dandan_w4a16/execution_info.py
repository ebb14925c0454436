"""How a call would run, without running it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from dandan_ops_core.backend import ExecutionInfo
from dandan_w4a16 import checks
from dandan_w4a16._ops import LIBRARY

__all__ = ["packed_linear_execution_info", "w4a16_linear_execution_info"]


def w4a16_linear_execution_info(
    x: torch.Tensor,
    qweight: torch.Tensor,
    scales: torch.Tensor,
    zeros: torch.Tensor,
    *,
    group_size: int = 64,
    bias: torch.Tensor | None = None,
    zero_mode: str = "integer",
    out: torch.Tensor | None = None,
    backend: str = "auto",
) -> ExecutionInfo:
    """How ``w4a16_linear`` with the same arguments would run. Launches nothing; asks the selection that the call asks.

    Args:
        x: as in `w4a16_linear`, and so are the others.

    Returns:
        Backend ("cuda" or "torch"), kernel, the reason for it, why no own kernel runs, and what else `ExecutionInfo`
        holds. `copies` names the weight's tensors where an own kernel runs: each call puts them in the kernel's order,
        which a finalised `QuantizedLinear` does once.

    Raises:
        TypeError: where the call raises it.
        ValueError: where the call raises it.
        BackendUnavailableError: where the call raises it.
    """
    op = "w4a16_linear"
    inputs = (x, qweight, scales, zeros, bias, group_size)
    outputs = None if out is None else (out,)
    LIBRARY.number(op, backend)
    LIBRARY.operators[op].check(*inputs, out=outputs)
    checks.zero_mode(op, zeros, zero_mode)
    gradients = LIBRARY.check_gradients(op, inputs, outputs, backend)
    if gradients:
        checks.no_gradient(op, scales, zeros)
    return _info(op, inputs, outputs, backend, gradients)


def packed_linear_execution_info(
    x: torch.Tensor,
    codes: torch.Tensor,
    scales: torch.Tensor,
    bias: torch.Tensor | None,
    n: int,
    k: int,
    group_size: int,
    *,
    out: torch.Tensor | None = None,
    backend: str = "auto",
) -> ExecutionInfo:
    """The same for `packed_linear`."""
    op = "packed_linear"
    inputs = (x, codes, scales, bias, n, k, group_size)
    outputs = None if out is None else (out,)
    LIBRARY.number(op, backend)
    LIBRARY.operators[op].check(*inputs, out=outputs)
    return _info(op, inputs, outputs, backend, LIBRARY.check_gradients(op, inputs, outputs, backend))


def _info(
    op: str, inputs: Sequence[Any], outputs: Sequence[torch.Tensor] | None, backend: str, gradients: bool
) -> ExecutionInfo:
    x = inputs[0]

    def torch_info(reason: str, fallback_reason: str | None) -> ExecutionInfo:
        return ExecutionInfo(op, "torch", "torch", reason, None, fallback_reason, (), str(x.device))

    if gradients and backend == "auto":
        return torch_info("an argument needs a gradient", "the own kernels compute no gradients")
    if gradients:
        return torch_info("asked for", None)
    if not (x.is_cuda and LIBRARY.library.loaded):
        if backend == "torch":
            return torch_info("asked for", None)
        if backend != "auto":
            raise LIBRARY.unavailable(op, backend, x)
        if not x.is_cuda:
            return torch_info("x is not on a CUDA device", f"x is on {x.device}, the own kernels run on CUDA devices")
        return torch_info("the compiled library is not loaded", LIBRARY.library.reason)
    try:
        route = LIBRARY.info(op, inputs, outputs or (None,), backend)
    except RuntimeError as error:
        raise LIBRARY.explain(op, error, inputs, outputs[0] if outputs else None, backend) from None
    return ExecutionInfo(
        op,
        route["backend"],
        route["kernel"],
        route["reason"],
        LIBRARY.profile if route["profile"] else None,
        route["fallback_reason"],
        tuple(route["copies"]),
        str(x.device),
    )

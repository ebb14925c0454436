"""How a call would run, without running it."""

from __future__ import annotations

import torch

from dandan_gemm._ops import LIBRARY
from dandan_ops_core.backend import ExecutionInfo

__all__ = ["gemm_execution_info"]


def gemm_execution_info(
    a: torch.Tensor,
    b: torch.Tensor,
    *,
    weight_transposed: bool = False,
    bias: torch.Tensor | None = None,
    static_weight: bool = False,
    out: torch.Tensor | None = None,
    backend: str = "auto",
) -> ExecutionInfo:
    """How ``gemm`` with the same arguments would run. Launches nothing; asks the selection that the call asks.

    Args:
        a: as in `gemm`, and so are the others.

    Returns:
        Backend ("cuda" or "torch"), kernel, the reason for it, the arguments that would be copied, and what else
        `ExecutionInfo` holds.

    Raises:
        TypeError: where the call raises it.
        ValueError: where the call raises it.
        BackendUnavailableError: where the call raises it.
    """
    inputs = (a, b, bias, weight_transposed, static_weight)
    outputs = None if out is None else (out,)
    LIBRARY.number("gemm", backend)
    LIBRARY.operators["gemm"].check(*inputs, out=outputs)
    gradients = LIBRARY.check_gradients("gemm", inputs, outputs, backend)

    def torch_info(reason: str, fallback_reason: str | None) -> ExecutionInfo:
        return ExecutionInfo("gemm", "torch", "torch", reason, None, fallback_reason, (), str(a.device))

    if gradients and backend == "auto":
        return torch_info("an argument needs a gradient", "the own kernels compute no gradients")
    if gradients:
        return torch_info("asked for", None)
    if not (a.is_cuda and LIBRARY.library.loaded):
        if backend == "torch":
            return torch_info("asked for", None)
        if backend != "auto":
            raise LIBRARY.unavailable("gemm", backend, a)
        if not a.is_cuda:
            return torch_info("a is not on a CUDA device", f"a is on {a.device}, the own kernels run on CUDA devices")
        return torch_info("the compiled library is not loaded", LIBRARY.library.reason)
    try:
        route = LIBRARY.info("gemm", inputs, outputs or (None,), backend)
    except RuntimeError as error:
        raise LIBRARY.explain("gemm", error, inputs, out, backend) from None
    return ExecutionInfo(
        "gemm",
        route["backend"],
        route["kernel"],
        route["reason"],
        LIBRARY.profile if route["profile"] else None,
        route["fallback_reason"],
        tuple(route["copies"]),
        str(a.device),
    )

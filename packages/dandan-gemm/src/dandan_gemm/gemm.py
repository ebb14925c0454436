"""gemm: one matrix product, with the weight in either layout."""

from __future__ import annotations

import torch

from dandan_gemm._ops import LIBRARY

__all__ = ["gemm"]

_CODES = LIBRARY.codes
_gemm = LIBRARY.op("gemm")
_gemm_out = LIBRARY.op("gemm_out")


def gemm(
    a: torch.Tensor,
    b: torch.Tensor,
    *,
    weight_transposed: bool = False,
    bias: torch.Tensor | None = None,
    static_weight: bool = False,
    out: torch.Tensor | None = None,
    backend: str = "auto",
) -> torch.Tensor:
    """Matrix product ``a @ b + bias``; with `weight_transposed`, ``a @ b.T + bias``, which is `F.linear`.

    Products are added in FP32, the bias as well, and the sum is rounded once. Every kernel is deterministic: the same
    inputs give the same bits on every run and stream. Which kernel runs, and with it the order of additions, depends on
    the number of rows: a row's bits may differ between batches of different sizes.

    Args:
        a: [..., K], float16 or bfloat16, any strides.
        b: [K, N], or [N, K] with `weight_transposed`, the layout of `torch.nn.Linear.weight`; dtype and device of a,
            any strides. Which of both it is in memory is seen from the strides: a transposed view is read in place.
        weight_transposed: b is [N, K].
        bias: [N], dtype and device of a.
        static_weight: no work enqueued since the last synchronisation of the device writes b. Kernels may then read b
            while the work before them still runs, where the device can (compute capability 9.0). Wrong results are
            possible where it is said and not true.
        out: [..., N] of a's dtype to write into; shares no memory with a, b or bias.
        backend: "auto", "torch", "cuda", "sm80_mma", "sm90_tma_mma", "sm90a_wgmma" or "skinny".

    Returns:
        [..., N] of a's dtype, contiguous, or ``out``. With K = 0 the bias, or zeros.

    Raises:
        TypeError: an argument is no strided tensor, of an unsupported dtype, or of another dtype than a.
        ValueError: a shape, device, backend name or `out` breaks a rule; the text names operator, argument, rule and
            value.
        BackendUnavailableError: the named backend cannot run this call; the text says why and what can.

    Source: the definition. Tiling and pipelines are described in the header comments of the kernels.
    """
    try:
        if torch.is_grad_enabled() and (
            a.requires_grad
            or b.requires_grad
            or (bias is not None and bias.requires_grad)
            or (out is not None and out.requires_grad)
        ):
            return LIBRARY.run_reference("gemm", (a, b, bias, weight_transposed, static_weight), out, backend)
        if out is None:
            return _gemm(a, b, bias, weight_transposed, static_weight, _CODES[backend])
        _gemm_out(a, b, bias, weight_transposed, static_weight, _CODES[backend], out)
        return out
    except (AttributeError, LookupError, OverflowError, RuntimeError, TypeError) as error:
        raise LIBRARY.explain("gemm", error, (a, b, bias, weight_transposed, static_weight), out, backend) from None

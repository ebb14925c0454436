"""What the operator means, in plain PyTorch: CPU kernel and, in float64, the truth of the tests; and the torch backend.

`compute_dtype` is the dtype of the arithmetic. With the default, float32, the result is rounded once to the dtype of a.
With float64 the result stays in float64, unrounded.
"""

from __future__ import annotations

import torch

__all__ = ["gemm", "torch_gemm"]


def gemm(
    a: torch.Tensor,
    b: torch.Tensor,
    bias: torch.Tensor | None = None,
    weight_transposed: bool = False,
    static_weight: bool = False,
    *,
    compute_dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """``a @ b + bias``, or ``a @ b.T + bias``; the bias is added before the rounding.

    Args:
        a: [..., K], a floating dtype.
        b: [K, N], or [N, K] with `weight_transposed`; dtype of a.
        bias: [N], dtype of a, or None.
        weight_transposed: b is [N, K].
        static_weight: changes nothing.
        compute_dtype: of the arithmetic.

    Returns:
        [..., N], contiguous.
    """
    weight = (b.t() if weight_transposed else b).to(compute_dtype)
    result = a.to(compute_dtype) @ weight
    if bias is not None:
        result = result + bias.to(compute_dtype)
    return (result.to(a.dtype) if compute_dtype == torch.float32 else result).contiguous()


def torch_gemm(
    a: torch.Tensor,
    b: torch.Tensor,
    bias: torch.Tensor | None = None,
    weight_transposed: bool = False,
    static_weight: bool = False,
) -> torch.Tensor:
    """The same by PyTorch's own matrix product: the torch backend, and what gradients flow through.

    On CUDA that is cuBLAS under the caller's settings: `torch.backends.cuda.matmul` decides whether it may add FP16 or
    BF16 partial sums. On other devices PyTorch's 16-bit products promise no FP32 accumulation, so there it is `gemm`.
    """
    if not a.is_cuda:
        return gemm(a, b, bias, weight_transposed, static_weight)
    weight = b.t() if weight_transposed else b
    rows = a.unsqueeze(0) if a.dim() == 1 else a.flatten(0, -2)
    result = rows @ weight if bias is None else torch.addmm(bias, rows, weight)
    return result.view(*a.shape[:-1], weight.shape[1])

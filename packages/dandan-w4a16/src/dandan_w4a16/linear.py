"""w4a16_linear: activations times an INT4 weight."""

from __future__ import annotations

import torch

from dandan_w4a16 import checks
from dandan_w4a16._ops import LIBRARY

__all__ = ["w4a16_linear"]

_CODES = LIBRARY.codes
_linear = LIBRARY.op("w4a16_linear")
_linear_out = LIBRARY.op("w4a16_linear_out")


def w4a16_linear(
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
) -> torch.Tensor:
    """Linear layer with an INT4 weight: ``x @ w.T + bias``, where ``w = round_to(x.dtype)(fp32(q - z) * fp32(s))``.

    Products are added in FP32, the bias as well, and the sum is rounded once. Every kernel is deterministic: the same
    inputs give the same bits on every run and stream. Which kernel runs, and with it the order of additions, depends on
    the number of rows: a row's bits may differ between batches of different sizes. Gradients are computed for x and
    bias.

    The own kernels read the weight in an order of their own, in which this puts it anew in each call, in at most 16 MB
    of workspace (or 64 rows of the weight); a finalised `QuantizedLinear` has it in that order. PyTorch dequantises it
    by tiles, of which none outlives its use. Values of scales and zeros are not looked at (`Int4Weight.check_values`
    looks): with scales that are not finite the result is what the rule gives, with zeros above 15 it is undefined.

    Args:
        x: [..., K], float16 or bfloat16, any strides.
        qweight: [N, K/8] int32, low nibble first along K, as `pack_int4` makes it; device of x.
        scales: [N, K/G] float16, bfloat16 or float32; device of x.
        zeros: [N, K/G] uint8 in 0..15, or a floating dtype with ``zero_mode="float"``; device of x.
        group_size: G: 32, 64 or 128.
        bias: [N] float16, bfloat16 or float32; device of x.
        zero_mode: "integer" or "float". Float zeros are subtracted in FP32; they are never rounded to integers.
        out: [..., N] of x's dtype to write into; shares no memory with the other tensors.
        backend: "auto", "torch", "cuda" or the name of a kernel: "sm80_decode", "sm90_decode", "sm80_mma" or
            "sm90a_wgmma" ("sm80_dequantize" needs a finalised weight). The own kernels need scales and bias of the
            dtype of x and integer zeros.

    Returns:
        [..., N] of x's dtype, contiguous, or ``out``. With K = 0 the bias, or zeros.

    Raises:
        TypeError: an argument is no strided tensor, or of an unsupported dtype.
        ValueError: a shape, device, mode, backend name or `out` breaks a rule, or scales or zeros require a gradient;
            the text names operator, argument, rule and value.
        BackendUnavailableError: the named backend cannot run this call; the text says why and what can.

    Source: the definition, docs/w4a16-format.md.
    """
    try:
        if zero_mode != "integer" or zeros.dtype != torch.uint8:
            checks.zero_mode("w4a16_linear", zeros, zero_mode)
        if torch.is_grad_enabled() and (
            x.requires_grad
            or scales.requires_grad
            or zeros.requires_grad
            or (bias is not None and bias.requires_grad)
            or (out is not None and out.requires_grad)
        ):
            return LIBRARY.run_reference("w4a16_linear", (x, qweight, scales, zeros, bias, group_size), out, backend)
        if out is None:
            return _linear(x, qweight, scales, zeros, bias, group_size, _CODES[backend])
        _linear_out(x, qweight, scales, zeros, bias, group_size, _CODES[backend], out)
        return out
    except (AttributeError, LookupError, OverflowError, RuntimeError, TypeError) as error:
        inputs = (x, qweight, scales, zeros, bias, group_size)
        raise LIBRARY.explain("w4a16_linear", error, inputs, out, backend) from None

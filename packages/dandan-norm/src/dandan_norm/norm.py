"""rms_norm, residual_rms_norm, layer_norm."""

from __future__ import annotations

import torch

from dandan_norm._ops import LIBRARY

__all__ = ["layer_norm", "residual_rms_norm", "rms_norm"]

_CODES = LIBRARY.codes
_rms_norm = LIBRARY.op("rms_norm")
_rms_norm_out = LIBRARY.op("rms_norm_out")
_residual_rms_norm = LIBRARY.op("residual_rms_norm")
_residual_rms_norm_out = LIBRARY.op("residual_rms_norm_out")
_layer_norm = LIBRARY.op("layer_norm")
_layer_norm_out = LIBRARY.op("layer_norm_out")


def rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor | None = None,
    eps: float = 1e-6,
    *,
    out: torch.Tensor | None = None,
    backend: str = "auto",
) -> torch.Tensor:
    """Root mean square normalisation over the last dimension: ``x * rsqrt(mean(x^2) + eps) * weight``.

    The arithmetic is FP32 and rounds once, after the weight. In the own kernels the order of additions depends on the
    width and dtype alone: a row's result is the same bits in every batch, slice and stream.

    Args:
        x: [..., cols], float16, bfloat16 or float32, any strides.
        weight: [cols] on x's device, any of these dtypes; None is all ones.
        eps: added to the mean square inside the root; a positive normal float32 number.
        out: [..., cols] of x's dtype to write into; may be x itself.
        backend: "auto", "torch", "cuda", "sm80_row", "sm90_cluster" or "sm80_stream".

    Returns:
        [..., cols] of x's dtype, contiguous, or ``out``.

    Raises:
        TypeError: an argument is no strided tensor, or of an unsupported dtype.
        ValueError: a shape, device, eps, backend name or ``out`` breaks a rule; the text names operator, argument, rule
            and value.
        BackendUnavailableError: the named backend cannot run this call; the text says why and what can.

    Source: Zhang and Sennrich, "Root Mean Square Layer Normalization", 2019.
    """
    try:
        if backend == "torch" or (
            torch.is_grad_enabled()
            and (
                x.requires_grad
                or (weight is not None and weight.requires_grad)
                or (out is not None and out.requires_grad)
            )
        ):
            return LIBRARY.run_reference("rms_norm", (x, weight, eps), out, backend)
        if out is None:
            return _rms_norm(x, weight, eps, _CODES[backend])
        _rms_norm_out(x, weight, eps, _CODES[backend], out)
        return out
    except (AttributeError, LookupError, OverflowError, RuntimeError, TypeError) as error:
        raise LIBRARY.explain("rms_norm", error, (x, weight, eps), out, backend) from None


def residual_rms_norm(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor | None = None,
    eps: float = 1e-6,
    *,
    out: tuple[torch.Tensor, torch.Tensor] | None = None,
    backend: str = "auto",
) -> tuple[torch.Tensor, torch.Tensor]:
    """Adds a residual and normalises the sum: ``summed = x + residual``, ``normalized = rms_norm(summed, weight,
    eps)``.

    ``summed`` is rounded to x's dtype, and the rounded sum is what is normalised, as if the two operators ran one after
    the other.

    Args:
        x: [..., cols], float16, bfloat16 or float32, any strides.
        residual: shape, dtype and device of x, any strides.
        weight: [cols] on x's device, float16, bfloat16 or float32; None is all ones.
        eps: added to the mean square inside the root; a positive normal float32 number.
        out: (normalized, summed) to write into, each of x's shape and dtype; each may be x or residual itself, not the
            other one.
        backend: as in `rms_norm`.

    Returns:
        (normalized, summed), both [..., cols] of x's dtype, contiguous, or ``out``.

    Raises:
        TypeError: an argument is no strided tensor, of an unsupported dtype, or residual of another dtype than x; `out`
            is no pair.
        ValueError: a shape, device, eps, backend name or `out` breaks a rule.
        BackendUnavailableError: the named backend cannot run this call.

    Source: the composition of an addition and Zhang and Sennrich, 2019.
    """
    try:
        if backend == "torch" or (
            torch.is_grad_enabled()
            and (
                x.requires_grad
                or residual.requires_grad
                or (weight is not None and weight.requires_grad)
                or (out is not None and (out[0].requires_grad or out[1].requires_grad))
            )
        ):
            return LIBRARY.run_reference("residual_rms_norm", (x, residual, weight, eps), out, backend)
        if out is None:
            return _residual_rms_norm(x, residual, weight, eps, _CODES[backend])
        _residual_rms_norm_out(x, residual, weight, eps, _CODES[backend], *out)
        return out
    except (AttributeError, LookupError, OverflowError, RuntimeError, TypeError) as error:
        raise LIBRARY.explain("residual_rms_norm", error, (x, residual, weight, eps), out, backend) from None


def layer_norm(
    x: torch.Tensor,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    eps: float = 1e-5,
    *,
    out: torch.Tensor | None = None,
    backend: str = "auto",
) -> torch.Tensor:
    """Layer normalisation over the last dimension: ``(x - mean) * rsqrt(variance + eps) * weight + bias``.

    The variance is that of the centred row (two passes), so it does not cancel for rows far from zero. FP32 arithmetic,
    one rounding.

    Args:
        x: [..., cols], float16, bfloat16 or float32, any strides.
        weight: [cols] on x's device, any of these dtypes; None is all ones.
        bias: [cols] on x's device, any of these dtypes; None is all zeros.
        eps: added to the variance inside the root; a positive normal float32 number.
        out: [..., cols] of x's dtype to write into; may be x itself.
        backend: as in `rms_norm`.

    Returns:
        [..., cols] of x's dtype, contiguous, or ``out``.

    Raises:
        TypeError: an argument is no strided tensor, or of an unsupported dtype.
        ValueError: a shape, device, eps, backend name or `out` breaks a rule.
        BackendUnavailableError: the named backend cannot run this call.

    Source: Ba, Kiros and Hinton, "Layer Normalization", 2016.
    """
    try:
        if backend == "torch" or (
            torch.is_grad_enabled()
            and (
                x.requires_grad
                or (weight is not None and weight.requires_grad)
                or (bias is not None and bias.requires_grad)
                or (out is not None and out.requires_grad)
            )
        ):
            return LIBRARY.run_reference("layer_norm", (x, weight, bias, eps), out, backend)
        if out is None:
            return _layer_norm(x, weight, bias, eps, _CODES[backend])
        _layer_norm_out(x, weight, bias, eps, _CODES[backend], out)
        return out
    except (AttributeError, LookupError, OverflowError, RuntimeError, TypeError) as error:
        raise LIBRARY.explain("layer_norm", error, (x, weight, bias, eps), out, backend) from None

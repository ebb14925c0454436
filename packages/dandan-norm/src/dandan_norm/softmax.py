"""softmax and argmax: from logits to probabilities and to the greedy token."""

from __future__ import annotations

import torch

from dandan_norm._ops import LIBRARY

__all__ = ["argmax", "softmax"]

_CODES = LIBRARY.codes
_softmax = LIBRARY.op("softmax")
_softmax_out = LIBRARY.op("softmax_out")
_argmax = LIBRARY.op("argmax")
_argmax_out = LIBRARY.op("argmax_out")


def softmax(x: torch.Tensor, *, out: torch.Tensor | None = None, backend: str = "auto") -> torch.Tensor:
    """Softmax over the last dimension: ``exp(x - max) / sum(exp(x - max))``.

    FP32 arithmetic, one rounding. A row that holds NaN or +inf, or nothing but -inf, is NaN, as in PyTorch.

    Args:
        x: [..., cols], float16, bfloat16 or float32, any strides.
        out: [..., cols] of x's dtype to write into; may be x itself.
        backend: as in `rms_norm`.

    Returns:
        [..., cols] of x's dtype, contiguous, or ``out``.

    Raises:
        TypeError: an argument is no strided tensor, or of an unsupported dtype.
        ValueError: a shape, device, backend name or `out` breaks a rule.
        BackendUnavailableError: the named backend cannot run this call.

    Source: the definition, shifted by the maximum.
    """
    try:
        if backend == "torch" or (
            torch.is_grad_enabled() and (x.requires_grad or (out is not None and out.requires_grad))
        ):
            return LIBRARY.run_reference("softmax", (x,), out, backend)
        if out is None:
            return _softmax(x, _CODES[backend])
        _softmax_out(x, _CODES[backend], out)
        return out
    except (AttributeError, LookupError, OverflowError, RuntimeError, TypeError) as error:
        raise LIBRARY.explain("softmax", error, (x,), out, backend) from None


def argmax(x: torch.Tensor, *, out: torch.Tensor | None = None, backend: str = "auto") -> torch.Tensor:
    """Index of the largest element of the last dimension: the greedy token.

    The lowest index among equals; where a row holds NaN, the first NaN. Both zeros are equal.

    Args:
        x: [..., cols] with at least one column, float16, bfloat16 or float32, any strides.
        out: [...], int64, to write into; shares no memory with x.
        backend: as in `rms_norm`.

    Returns:
        [...], int64, contiguous, or ``out``.

    Raises:
        TypeError: an argument is no strided tensor, or of an unsupported dtype.
        ValueError: x has zero columns, or a shape, device, backend name or `out` breaks a rule.
        BackendUnavailableError: the named backend cannot run this call.

    Source: the definition of torch.argmax.
    """
    try:
        # An index has no gradient, so tensors that need one are welcome.
        if backend == "torch":
            return LIBRARY.run_reference("argmax", (x.detach(),), out, backend)
        if torch.is_grad_enabled() and x.requires_grad:
            x = x.detach()
        if out is None:
            return _argmax(x, _CODES[backend])
        _argmax_out(x, _CODES[backend], out)
        return out
    except (AttributeError, LookupError, OverflowError, RuntimeError, TypeError) as error:
        raise LIBRARY.explain("argmax", error, (x,), out, backend) from None

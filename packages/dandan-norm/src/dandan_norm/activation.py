"""silu_and_mul: the gated activation of SwiGLU layers."""

from __future__ import annotations

import torch

from dandan_norm._ops import LIBRARY

__all__ = ["silu_and_mul"]

_CODES = LIBRARY.codes
_silu_and_mul = LIBRARY.op("silu_and_mul")
_silu_and_mul_out = LIBRARY.op("silu_and_mul_out")


def silu_and_mul(
    gate: torch.Tensor, up: torch.Tensor, *, out: torch.Tensor | None = None, backend: str = "auto"
) -> torch.Tensor:
    """``silu(gate) * up`` element by element, with ``silu(g) = g / (1 + exp(-g))``.

    ``silu(gate)`` is computed in FP32 and rounded to the dtype, then multiplied and rounded again: the rounding of the
    two PyTorch operators.

    Args:
        gate: [..., cols], float16, bfloat16 or float32, any strides.
        up: shape, dtype and device of gate. The two may be halves of one tensor (``x.chunk(2, -1)``); they are read
            where they are.
        out: [..., cols] of gate's dtype to write into; may be gate or up itself.
        backend: "auto", "torch", "cuda" or "sm80_elementwise".

    Returns:
        [..., cols] of gate's dtype, contiguous, or ``out``.

    Raises:
        TypeError: an argument is no strided tensor, of an unsupported dtype, or up has another dtype than gate.
        ValueError: a shape, device, backend name or `out` breaks a rule.
        BackendUnavailableError: the named backend cannot run this call.

    Source: Shazeer, "GLU Variants Improve Transformer", 2020.
    """
    try:
        if backend == "torch" or (
            torch.is_grad_enabled()
            and (gate.requires_grad or up.requires_grad or (out is not None and out.requires_grad))
        ):
            return LIBRARY.run_reference("silu_and_mul", (gate, up), out, backend)
        if out is None:
            return _silu_and_mul(gate, up, _CODES[backend])
        _silu_and_mul_out(gate, up, _CODES[backend], out)
        return out
    except (AttributeError, LookupError, OverflowError, RuntimeError, TypeError) as error:
        raise LIBRARY.explain("silu_and_mul", error, (gate, up), out, backend) from None

"""How a call would run, without running it."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from dandan_norm import activation, norm, softmax
from dandan_norm._ops import LIBRARY
from dandan_ops_core.backend import ExecutionInfo

__all__ = ["elementwise_execution_info"]

_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "argmax": softmax.argmax,
    "layer_norm": norm.layer_norm,
    "residual_rms_norm": norm.residual_rms_norm,
    "rms_norm": norm.rms_norm,
    "silu_and_mul": activation.silu_and_mul,
    "softmax": softmax.softmax,
}


def elementwise_execution_info(op: str, *args: Any, **kwargs: Any) -> ExecutionInfo:
    """How ``dandan_norm.OP(*args, **kwargs)`` would run. Launches nothing; asks the selection that the call asks.

    Args:
        op: name of an operator of this package, such as "rms_norm".
        *args: the arguments of the call.
        **kwargs: its keyword arguments, `out` and `backend` included.

    Returns:
        Backend ("cuda" or "torch"), kernel, the reason for it, and what else `ExecutionInfo` holds.

    Raises:
        TypeError: where the call raises it.
        ValueError: where the call raises it, and for an unknown `op`.
        BackendUnavailableError: where the call raises it.
    """
    if not isinstance(op, str) or op not in _FUNCTIONS:
        raise ValueError(f"elementwise_execution_info: op {op!r} is unknown; it is one of {', '.join(_FUNCTIONS)}")
    bound = inspect.signature(_FUNCTIONS[op]).bind(*args, **kwargs)
    bound.apply_defaults()
    backend, out = bound.arguments.pop("backend"), bound.arguments.pop("out")
    inputs = tuple(bound.arguments.values())
    operator = LIBRARY.operators[op]
    outputs = None if out is None else (out,) if len(operator.outputs) == 1 else out
    LIBRARY.number(op, backend)
    operator.check(*inputs, out=outputs)
    if op == "argmax":  # an index has no gradient
        inputs = (inputs[0].detach(),)
    x = inputs[0]
    gradients = LIBRARY.check_gradients(op, inputs, outputs, backend)

    def torch_info(reason: str, fallback_reason: str | None) -> ExecutionInfo:
        return ExecutionInfo(op, "torch", "torch", reason, None, fallback_reason, (), str(x.device))

    if backend == "torch":
        return torch_info("asked for", None)
    explicit = backend != "auto"
    if gradients:
        return torch_info("an argument needs a gradient", "the own kernels compute no gradients")
    if not (x.is_cuda and LIBRARY.library.loaded):
        if explicit:
            raise LIBRARY.unavailable(op, backend, x)
        if not x.is_cuda:
            return torch_info("x is not on a CUDA device", f"x is on {x.device}, the own kernels run on CUDA devices")
        return torch_info("the compiled library is not loaded", LIBRARY.library.reason)
    try:
        route = LIBRARY.info(op, inputs, outputs or (None,) * len(operator.outputs), backend)
    except RuntimeError as error:
        raise LIBRARY.explain(op, error, inputs, out, backend) from None
    return ExecutionInfo(
        op,
        route["backend"],
        route["kernel"],
        route["reason"],
        LIBRARY.profile if route["profile"] else None,
        route["fallback_reason"],
        (),
        str(x.device),
    )

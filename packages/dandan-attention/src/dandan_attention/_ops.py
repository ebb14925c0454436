"""torch.ops.dandan_attention: schemas, CPU kernel, fakes; CUDA kernels where the compiled library is loaded.

Each operator has a twin NAME_lse that returns the logarithm of the sum of exponentials too; messages name both NAME.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from dandan_attention import checks, reference
from dandan_ops_core.backend import BackendUnavailableError
from dandan_ops_core.registry import Operator, OperatorLibrary

KERNELS = ("sm80_mma", "sm90a_wgmma")
"""Own kernels in the order of their numbers; csrc/routes.h has the same."""

OPTIONS = "SymInt? window_size, float softcap, Tensor? seqused_k"

INPUTS = {
    "flash_attention": (
        "Tensor q, Tensor k, Tensor v, bool causal, float? softmax_scale, SymInt? query_start, Tensor? query_starts, "
        + OPTIONS
    ),
    "flash_attention_varlen": (
        "Tensor q, Tensor k, Tensor v, Tensor cu_seqlens_q, Tensor cu_seqlens_k, SymInt max_seqlen_q, "
        "SymInt max_seqlen_k, bool causal, float? softmax_scale, Tensor? query_starts, bool suffix, " + OPTIONS
    ),
}
"""Arguments of the schemas before `backend`. None is what None is in Python: the scale 1/sqrt(head_dim), no window, a
query_start that is 0. `query_starts` is the tensor of `query_start`; `suffix` is query_starts="suffix". With neither, a
packed call starts every sequence at 0: that its lengths are equal was seen in Python, where cu_seqlens_q is
cu_seqlens_k.
"""

ATTEND: dict[str, Callable[..., Any]] = {
    "flash_attention": reference.flash_attention,
    "flash_attention_varlen": reference.flash_attention_varlen,
}
GRADIENT: dict[str, Callable[..., Any]] = {
    "flash_attention": reference.flash_attention_grad,
    "flash_attention_varlen": reference.flash_attention_varlen_grad,
}
CHECK: dict[str, Callable[..., None]] = {
    "flash_attention": checks.flash_attention,
    "flash_attention_varlen": checks.flash_attention_varlen,
}


def _torch_route(name: str, return_lse: bool) -> Callable[..., Any]:
    """Result of an operator without the compiled library: its reference, and gradients where they are recorded."""

    def route(*inputs: Any) -> Any:
        if torch.is_grad_enabled() and any(t.requires_grad for t in inputs[:3]):
            results = LIBRARY.op(f"{name}_differentiable")(*inputs)
        else:
            results = ATTEND[name](*inputs)
        return results if return_lse else results[0]

    return route


def _empty(name: str, return_lse: bool) -> Callable[..., Any]:
    """Results of an operator, for its fake."""
    dense = name == "flash_attention"

    def empty(q: torch.Tensor, *_: Any) -> Any:
        out = reference.dense_out(q) if dense else reference.packed_out(q)
        if not return_lse:
            return out
        return out, reference.dense_lse(q) if dense else reference.packed_lse(q)

    return empty


def _operators(name: str) -> list[Operator]:
    return [
        Operator(
            name + ("_lse" if return_lse else ""),
            INPUTS[name],
            ("out", "lse") if return_lse else ("out",),
            CHECK[name],
            _torch_route(name, return_lse),
            _empty(name, return_lse),
            first="q",
        )
        for return_lse in (False, True)
    ]


LIBRARY = OperatorLibrary("dandan_attention", KERNELS, [each for name in INPUTS for each in _operators(name)])

# With gradients a call is an operator of its own: one node to torch.compile and not a loop over blocks, and no Python
# between the dispatcher and the kernels of calls without gradients.
_FRAGMENT = torch.library.Library("dandan_attention", "FRAGMENT")


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    ctx.options = tuple(None if isinstance(each, torch.Tensor) else each for each in inputs)
    ctx.save_for_backward(*(each if isinstance(each, torch.Tensor) else None for each in inputs), *output)


def _backward(name: str) -> Callable[..., Any]:
    def backward(ctx: Any, grad_out: torch.Tensor, grad_lse: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        tensors = ctx.saved_tensors
        inputs = [option if t is None else t for t, option in zip(tensors[:-2], ctx.options, strict=True)]
        grads = LIBRARY.op(f"{name}_grad")(*inputs, *tensors[-2:], grad_out, grad_lse)
        return (*grads, *[None] * (len(inputs) - 3))

    return backward


def _no_second_derivative(ctx: Any, *_: Any) -> None:
    raise RuntimeError("attention: derivatives of its gradients are not computed")


def _register_gradient(name: str) -> None:
    """NAME_differentiable, which is the reference of NAME_lse, and NAME_grad: Python's, whatever library is loaded."""

    def fake(*inputs: Any) -> Any:
        CHECK[name](*inputs, out=None)
        return _empty(name, True)(*inputs)

    forward, backward = f"{name}_differentiable", f"{name}_grad"
    saved = "Tensor out, Tensor lse, Tensor grad_out, Tensor grad_lse"
    _FRAGMENT.define(f"{forward}({INPUTS[name]}) -> (Tensor, Tensor)")
    _FRAGMENT.define(f"{backward}({INPUTS[name]}, {saved}) -> (Tensor, Tensor, Tensor)")
    for key in ("CPU", "CUDA"):
        _FRAGMENT.impl(forward, ATTEND[name], key)
        _FRAGMENT.impl(backward, GRADIENT[name], key)
    for op, shapes in ((forward, fake), (backward, reference.empty_grads)):
        torch.library.register_fake(f"dandan_attention::{op}", shapes, lib=_FRAGMENT)
    torch.library.register_autograd(f"dandan_attention::{forward}", _backward(name), setup_context=_keep, lib=_FRAGMENT)
    torch.library.register_autograd(f"dandan_attention::{backward}", _no_second_derivative, lib=_FRAGMENT)


for _name in INPUTS:
    _register_gradient(_name)


def run_reference(name: str, inputs: Sequence[Any], out: torch.Tensor | None, return_lse: bool, backend: str) -> Any:
    """The torch route in Python, for arguments that need gradients; raises where `out` or `backend` forbid them."""
    outputs = None if out is None else (out,)
    LIBRARY.number(name, backend)
    if not torch.compiler.is_compiling():  # else the fake checks, which nobody traces
        LIBRARY.operators[name].check(*inputs, out=outputs)
    LIBRARY.check_gradients(name, inputs, outputs, backend)
    return LIBRARY.operators[f"{name}_lse" if return_lse else name].reference(*inputs)


def explain(name: str, error: Exception, inputs: Sequence[Any], out: Any, backend: str) -> Exception:
    """The exception to raise when a call of `name` or of its twin failed with `error`."""
    explained = LIBRARY.explain(name, error, inputs, out, backend)
    text = str(explained)
    if isinstance(explained, (BackendUnavailableError, ValueError, TypeError)) and text.startswith(f"{name}_lse: "):
        return type(explained)(name + text.removeprefix(f"{name}_lse"))
    return explained

"""Gradients, all by the reference: equal to those of the definition in FP64, never silently cut."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from attention_cases import DTYPES, Call, dense, generator, int32, packed, poison

from dandan_attention import flash_attention
from dandan_ops_core.backend import BackendUnavailableError

CALLS: dict[str, Any] = {
    "plain": lambda dtype: dense(2, (4, 4), 5, 7, 16, dtype),
    "causal": lambda dtype: dense(2, (6, 2), 9, 9, 16, dtype, causal=True),
    "softcap": lambda dtype: dense(2, (6, 2), 5, 7, 16, dtype, softcap=1.5, softmax_scale=1.0),
    "window": lambda dtype: dense(1, (3, 1), 12, 12, 16, dtype, window_size=3, causal=True, softcap=5.0),
    "rows without keys": lambda dtype: dense(2, (4, 2), 5, 2, 16, dtype, causal=True, query_start=-3),
    "live lengths": lambda dtype: dense(3, (4, 2), 5, 7, 16, dtype, seqused_k=int32(0, 3, 7)),
    "starts": lambda dtype: dense(3, (4, 2), 5, 7, 16, dtype, causal=True, query_start=int32(2, 0, -2)),
    "no keys": lambda dtype: dense(2, (4, 2), 5, 0, 16, dtype),
    "packed": lambda dtype: packed(
        [3, 0, 5], [7, 2, 4], (6, 3), 16, dtype, behind=2, causal=True, query_starts="suffix"
    ),
    "packed, live": lambda dtype: packed([3, 2], [7, 4], (6, 3), 16, dtype, softcap=2.0, seqused_k=int32(4, 0)),
    "packed, one tensor": lambda dtype: packed([3, 2], None, (6, 3), 16, dtype, causal=True, window_size=2),
}


def leaves(call: Call) -> tuple[Call, list[torch.Tensor]]:
    made = {name: getattr(call, name).clone().requires_grad_() for name in "qkv"}
    return call.with_(**made), list(made.values())


def finite_lse(lse: torch.Tensor) -> torch.Tensor:
    """-inf has no gradient worth the name: those rows take no part in a loss."""
    return torch.where(lse == -math.inf, 0, lse)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("loss", ["out", "lse", "both"])
def test_equal_to_those_of_the_definition(name: str, loss: str, dtype: torch.dtype) -> None:
    call = CALLS[name](dtype)
    rows = int(call.cu_seqlens[0][-1]) if call.cu_seqlens else call.q.shape[0]
    up = torch.randn(call.q.shape, generator=generator(1))
    up[rows:] = 0

    def total(out: torch.Tensor, lse: torch.Tensor) -> torch.Tensor:
        parts = []
        if loss != "lse":
            parts.append((out * up.to(out.dtype)).sum())
        if loss != "out":
            parts.append((finite_lse(lse) * torch.arange(lse.shape[-1])).sum())
        return sum(parts[1:], parts[0].double())

    mine, mine_leaves = leaves(call)
    total(*mine.run(return_lse=True)).backward()
    theirs, their_leaves = leaves(call)
    total(*theirs.truth()).backward()
    for which, left, right in zip("qkv", mine_leaves, their_leaves, strict=True):
        assert left.grad is not None
        wanted = torch.zeros_like(right) if right.grad is None else right.grad
        # The result that the formula uses is rounded: an error of a step of it, summed over keys.
        scale = max(1.0, float(wanted.abs().max())) if wanted.numel() else 1.0
        torch.testing.assert_close(
            left.grad, wanted, rtol=0, atol=scale * 4 * torch.finfo(dtype).eps, msg=f"grad of {which}"
        )


@pytest.mark.parametrize("form", ["dense", "packed"])
def test_poison_reaches_no_gradient(form: str) -> None:
    """A23 through backward: NaN behind the live keys gives neither NaN nor a gradient there."""
    if form == "dense":
        call = dense(2, (4, 2), 5, 8, 16, causal=True, query_start=3, seqused_k=int32(5, 0))
    else:
        call = packed([3, 2], [8, 4], (4, 2), 16, behind=3, causal=True, query_starts="suffix", seqused_k=int32(5, 0))
    mine, (q, k, v) = leaves(poison(call))
    out = mine.run()
    rows = 5 if form == "packed" else len(out)
    out[:rows].float().square().sum().backward()
    clean, (q0, k0, v0) = leaves(poison(call, 0.0))
    clean.run()[:rows].float().square().sum().backward()
    for left, right in ((q, q0), (k, k0), (v, v0)):
        assert left.grad is not None
        assert torch.isfinite(left.grad).all()
        assert torch.equal(left.grad, right.grad)
    behind = (k.grad[0, :, 5:], k.grad[1], v.grad[0, :, 5:]) if form == "dense" else (k.grad[5:], v.grad[5:])
    assert all((each == 0).all() for each in behind)


def test_each_operand_alone() -> None:
    """A51: whichever input needs a gradient, the result says so."""
    call = dense(1, (2, 1), 3, 3, 16, causal=True)
    _, everything = leaves(call)
    full = call.with_(q=everything[0], k=everything[1], v=everything[2])
    full.run().sum().backward()
    for name, right in zip("qkv", everything, strict=True):
        leaf = getattr(call, name).clone().requires_grad_()
        out, lse = call.with_(**{name: leaf}).run(return_lse=True)
        assert out.requires_grad
        assert lse.requires_grad
        out.sum().backward()
        assert torch.equal(leaf.grad, right.grad)


def test_without_grad_mode() -> None:
    call, _ = leaves(dense(1, (2, 1), 3, 3, 16))
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            out, lse = call.run(return_lse=True)
            assert not out.requires_grad
            assert not lse.requires_grad
            call.run(out=torch.empty_like(call.q))


def test_an_output_takes_no_part() -> None:
    call, _ = leaves(dense(1, (2, 1), 3, 3, 16))
    text = "^flash_attention: out= takes no part in automatic differentiation; call it without out= or under"
    with pytest.raises(ValueError, match=text):
        call.run(out=torch.empty_like(call.q))
    with pytest.raises(ValueError, match=text):
        call.info(out=torch.empty_like(call.q))


def test_own_kernels_compute_none() -> None:
    call, _ = leaves(dense(1, (2, 1), 3, 3, 64))
    for backend in ("cuda", "sm80_mma", "sm90a_wgmma"):
        for run in (call.run, call.info):
            with pytest.raises(BackendUnavailableError, match=f'^flash_attention: backend "{backend}" cannot run: '):
                run(backend)
    assert call.info().fallback_reason == "the own kernels compute no gradients"


def test_second_derivatives_are_refused() -> None:
    call, (q, _, _) = leaves(dense(1, (2, 1), 3, 3, 16))
    (grad,) = torch.autograd.grad(call.run().float().square().sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="derivatives of its gradients are not computed"):
        grad.sum().backward()


def test_gradients_of_views() -> None:
    """q, k, v as slices of one projection: the gradient of the whole is that of its parts."""
    qkv = torch.randn(2, 5, 8, 16, generator=generator(0)).half().requires_grad_()
    q, k, v = (t.transpose(1, 2) for t in qkv.split((4, 2, 2), 2))
    flash_attention(q, k, v, causal=True).float().square().sum().backward()
    call, parts = leaves(Call(*(t.detach() for t in (q, k, v)), {"causal": True}))
    call.run().float().square().sum().backward()
    whole = torch.cat([t.grad.transpose(1, 2) for t in parts], 2)
    assert torch.equal(qkv.grad, whole)

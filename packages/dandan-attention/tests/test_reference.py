"""The reference against the definition in FP64: thousands of configurations, blocks of every size, memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from attention_cases import check, dense, packed, random_call, same_bits

from dandan_attention import reference

CONFIGURATIONS = 2400
GROUPS = 12


@pytest.mark.parametrize("group", range(GROUPS))
def test_random_configurations(group: int) -> None:
    for number in range(group, CONFIGURATIONS, GROUPS):
        check(random_call(number))


def test_the_configurations_hold_every_option() -> None:
    """Otherwise the test above could agree on nothing."""
    calls = [random_call(number) for number in range(CONFIGURATIONS)]
    assert {call.name for call in calls} == {"flash_attention", "flash_attention_varlen"}
    for option in ("causal", "softmax_scale", "window_size", "softcap", "seqused_k", "query_start", "query_starts"):
        values = [call.options.get(option) for call in calls]
        given = sum(isinstance(value, (torch.Tensor, str)) or value not in (None, False, 0.0) for value in values)
        assert given > 200, option
    for condition in (
        lambda call: call.q.numel() == 0,
        lambda call: call.k.shape[-2 if call.cu_seqlens is None else 0] == 0,
        lambda call: call.k.isnan().any() or call.k.isinf().any(),
        lambda call: not call.q.is_contiguous(),
        lambda call: call.q.numel() and call.q.stride(-1) != 1 and call.q.shape[-1] > 1,
        lambda call: call.q.shape[1] // call.k.shape[1] in (3, 5, 7),
    ):
        assert sum(bool(condition(call)) for call in calls) > 50


# -------------------------------------------------------------------------------------------------------------- blocks

CALLS: dict[str, Callable[[], Any]] = {
    "dense": lambda: dense(3, (4, 2), 17, 23, 16, causal=True, query_start=6),
    "dense, window": lambda: dense(3, (4, 2), 40, 40, 16, causal=True, window_size=5),
    "dense, window, no causal": lambda: dense(2, (4, 2), 40, 40, 16, window_size=5, softcap=2.0),
    "dense, starts and lengths": lambda: dense(
        3,
        (6, 2),
        9,
        12,
        16,
        causal=True,
        query_start=torch.tensor([0, 3, -4], dtype=torch.int32),
        seqused_k=torch.tensor([12, 0, 7], dtype=torch.int32),
    ),
    "packed": lambda: packed([3, 0, 11], [7, 2, 5], (6, 3), 16, causal=True, query_starts="suffix"),
}


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("block", [1, 50, 333, 2000])
def test_blocks_of_every_size(name: str, block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Down to one row of one sequence; a window skips keys on both sides of a block."""
    call = CALLS[name]()
    check(call)
    monkeypatch.setattr(reference, "BLOCK", block)
    check(call)
    out, lse = call.run(return_lse=True)
    up, up_lse = torch.ones_like(out), torch.ones_like(lse)
    parts = gradients(call, up, up_lse)
    monkeypatch.undo()
    for mine, theirs in zip(parts, gradients(call, up, up_lse), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=2e-2, atol=2e-3)


def gradients(call: Any, up: torch.Tensor, up_lse: torch.Tensor) -> list[torch.Tensor]:
    leaves = {name: getattr(call, name).clone().requires_grad_() for name in "qkv"}
    results = call.with_(**leaves).run(return_lse=True)
    return list(torch.autograd.grad(results, list(leaves.values()), (up, up_lse)))


def test_a_block_reads_no_key_that_none_of_its_queries_sees(monkeypatch: pytest.MonkeyPatch) -> None:
    """Causal and window skip keys: the logits of a window of 4 over 64 keys are few."""
    counted = []
    original = reference._logits

    def count(*arguments: Any) -> torch.Tensor:
        logits = original(*arguments)
        counted.append(logits.numel())
        return logits

    monkeypatch.setattr(reference, "_logits", count)
    monkeypatch.setattr(reference, "BLOCK", 8 * 64)
    dense(1, (1, 1), 64, 64, 8, causal=True, window_size=4).run()
    assert sum(counted) <= 64 * 11  # blocks of 8 rows see at most 8 + 3 keys
    counted.clear()
    dense(1, (1, 1), 64, 64, 8, causal=True).run()
    assert sum(counted) == sum(8 * (first + 8) for first in range(0, 64, 8))


# ------------------------------------------------------------------------------------- the packed form as on a device


@pytest.fixture
def _as_on_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """The packed form as CUDA tensors take it: no length is read on the host."""
    monkeypatch.setattr(reference, "_host_spans", reference._device_spans)


@pytest.mark.usefixtures("_as_on_a_device")
def test_random_packed_configurations_without_lengths_on_the_host() -> None:
    calls = [call for call in map(random_call, range(5000, 5600)) if call.cu_seqlens is not None]
    assert len(calls) > 200
    for call in calls:
        check(call)


@pytest.mark.parametrize("number", range(5000, 5040))
def test_gradients_without_lengths_on_the_host(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows behind the end of a sequence, which are there as padding, add nothing."""
    call = random_call(number)
    out, lse = call.run(return_lse=True)
    if call.cu_seqlens is None or out.numel() == 0:
        call = packed([3, 0, 5], [7, 2, 4], (6, 3), 16, behind=2, causal=True, query_starts="suffix", seed=number)
        out, lse = call.run(return_lse=True)
    source = torch.Generator().manual_seed(number)
    up = torch.randn(out.shape, generator=source).to(out.dtype)
    up_lse = torch.where(lse.isinf(), 0, torch.randn(lse.shape, generator=source))
    expected = gradients(call, up, up_lse)
    monkeypatch.setattr(reference, "_host_spans", reference._device_spans)
    for mine, theirs in zip(gradients(call, up, up_lse), expected, strict=True):
        scale = max(1.0, float(theirs.abs().max())) if theirs.numel() else 1.0
        torch.testing.assert_close(mine, theirs, rtol=0, atol=scale * torch.finfo(mine.dtype).eps)


@pytest.mark.usefixtures("_as_on_a_device")
@pytest.mark.parametrize(
    "bounds", [(0, 9, 5), (-3, 2, 5), (0, 5, 2**30), (7, 8, 9), (5, 0, 0), (-(2**31), 0, 2**31 - 1)]
)
def test_wrong_lengths_reach_no_memory_outside_of_the_tensors(bounds: tuple[int, ...]) -> None:
    """On a device nothing checks them; indices out of range would raise here."""
    call = packed([2, 3], None, (2, 1), 16, causal=True)
    cu = torch.tensor(bounds, dtype=torch.int32)
    for starts in ({}, {"query_starts": torch.tensor([-(2**31), 2**31 - 1], dtype=torch.int32)}):
        rest = (3, 3, True, None, starts.get("query_starts"), not starts, None, 0.0, None)
        leaves = [t.clone().requires_grad_() for t in call.positional[:3]]
        with torch.no_grad():
            out, lse = reference.flash_attention_varlen(*leaves, cu, cu, *rest)
        assert out.shape == call.q.shape
        grads = reference.flash_attention_varlen_grad(*leaves, cu, cu, *rest, out, lse, out, torch.zeros_like(lse))
        assert [grad.shape for grad in grads] == [t.shape for t in leaves]


def test_the_sequences_of_a_batch_do_not_touch_each_other() -> None:
    call = dense(5, (4, 2), 7, 9, 16, causal=True, query_start=2)
    whole = call.run(return_lse=True)
    for b in range(5):
        one = call.with_(**{name: getattr(call, name)[b : b + 1] for name in "qkv"}).run(return_lse=True)
        same_bits(one, tuple(t[b : b + 1] for t in whole), f"sequence {b}")


# -------------------------------------------------------------------------------------------------------------- memory


def peak_memory(run: Callable[[], Any]) -> int:
    """Bytes that `run` has allocated at its fullest, temporaries included: the CPU allocator's own record."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        result = run()
    events = [event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
    events.sort(key=lambda event: event.start_ns())
    held = peak = 0
    for event in events:
        held += event.nbytes()
        peak = max(peak, held)
    del result
    return peak


@pytest.mark.parametrize("form", ["dense", "packed"])
@pytest.mark.parametrize("gradient", [False, True])
def test_memory_does_not_grow_with_the_square_of_the_length(
    form: str, gradient: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A prompt of 16384 with 8 heads has 2^31 logits, 8 GB. Here 1024 and 8 heads: 32 MB, in blocks of 1 MB."""
    monkeypatch.setattr(reference, "BLOCK", 1 << 18)
    seqlen = 1024
    if form == "dense":
        call = dense(1, (8, 2), seqlen, seqlen, 16, causal=True)
    else:
        call = packed([seqlen], None, (8, 2), 16, causal=True)
    operands = 2 * sum(getattr(call, name).numel() for name in "qkv") * 4 * (4 if gradient else 2)
    if gradient:
        leaves = {name: getattr(call, name).clone().requires_grad_() for name in "qkv"}
        peak = peak_memory(lambda: call.with_(**leaves).run().sum().backward())
    else:
        peak = peak_memory(call.run)
    assert peak < 7 * 4 * reference.BLOCK + operands < 4 * 8 * seqlen * seqlen / 2


def test_grouped_heads_repeat_no_keys() -> None:
    """64 heads over one: keys of 4 MB in FP32 would be 256 MB."""
    call = dense(1, (64, 1), 4, 16384, 64)
    assert peak_memory(call.run) < 64 * 2**20

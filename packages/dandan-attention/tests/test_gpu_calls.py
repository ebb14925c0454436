"""Calls on CUDA: same bits on every run, stream and thread; graphs, memory, gradients, compile, devices."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from attention_cases import DTYPES, KERNELS, Call, check, dense, int32, packed, poison, raw, same_bits

import dandan_attention
from dandan_attention._ops import LIBRARY
from dandan_ops_core.backend import BackendUnavailableError
from dandan_ops_core.testing import assert_bit_equal, delay_stream

pytestmark = pytest.mark.gpu

EVERY_KERNEL = pytest.mark.parametrize("kernel", KERNELS)
EVERY_DIM = pytest.mark.parametrize("head_dim", [64, 128, 256])
# In the names of a kernel's own functions.
SYMBOLS = {"sm80_mma": "sm80_mma", "sm90a_wgmma": "wgmma"}


def prompt(head_dim: int = 128, **options: Any) -> Call:
    return dense(2, (8, 2), 515, 515, head_dim, torch.bfloat16, device="cuda", causal=True, **options)


def ragged(head_dim: int = 128, **options: Any) -> Call:
    return packed([300, 1, 0, 129, 64], [400, 77, 5, 129, 64], (8, 2), head_dim, device="cuda", causal=True,
                  query_starts="suffix", **options)  # fmt: skip


EVERY_FORM = pytest.mark.parametrize("form", [prompt, ragged])


@EVERY_KERNEL
@EVERY_DIM
@EVERY_FORM
def test_repeated_runs_have_the_same_bits(kernel: str, head_dim: int, form: Any) -> None:
    """60 runs, on the current stream and on another that is busy with them at the same time."""
    side = torch.cuda.Stream()
    call = form(head_dim)
    first = call.run(kernel, return_lse=True)
    torch.cuda.synchronize()
    seen = []
    for number in range(60):
        with torch.cuda.stream(side if number % 2 else torch.cuda.current_stream()):
            seen.append(call.run(kernel, return_lse=True))
    torch.cuda.synchronize()
    for number, each in enumerate(seen):
        same_bits(each, first, f"run {number}")


@EVERY_KERNEL
@EVERY_DIM
@pytest.mark.parametrize("options", [{}, {"window_size": 100, "softcap": 20.0}], ids=str)
def test_a_sequence_has_the_same_bits_in_every_batch(kernel: str, head_dim: int, options: dict[str, Any]) -> None:
    """Batch invariance, promised per kernel: neither batch nor place changes a row, and no split of keys by size."""
    call = dense(70, (4, 2), 200, 260, head_dim, device="cuda", causal=True, query_start=60, **options)
    whole = call.run(kernel, return_lse=True)
    for first, count in ((0, 1), (3, 1), (69, 1), (10, 20), (0, 69)):
        part = call.with_(**{name: getattr(call, name)[first : first + count] for name in "qkv"})
        its = part.run(kernel, return_lse=True)
        same_bits(its, tuple(t[first : first + count] for t in whole), f"{first}+{count}")


@EVERY_KERNEL
@EVERY_FORM
def test_side_stream(kernel: str, form: Any) -> None:
    """A28: the kernel waits for the copy before it and the consumer waits for the kernel."""
    side = torch.cuda.Stream()
    call = form()
    source = torch.randn(20, *call.q.shape).to(call.q.dtype).pin_memory()
    expected = [call.with_(q=each.cuda()).run(kernel) for each in source]
    torch.cuda.synchronize()
    for number in range(20):
        with torch.cuda.stream(side):
            delay_stream(2.0)
            call.q.copy_(source[number], non_blocking=True)
            got = call.run(kernel) * 1.0
        side.synchronize()
        assert_bit_equal(got, expected[number], f"repetition {number}")


def test_threads_with_their_own_streams() -> None:
    """A30: many calls from several threads at once, each kernel in turns."""
    calls = [form(head_dim) for form in (prompt, ragged) for head_dim in (64, 128)]
    expected = [[call.run(kernel) for kernel in KERNELS] for call in calls]
    torch.cuda.synchronize()
    failures: list[str] = []

    def work(number: int) -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            for repetition in range(100):
                which = (repetition + number) % len(KERNELS)
                got = calls[number].run(KERNELS[which])
                torch.cuda.current_stream().synchronize()
                if not torch.equal(got, expected[number][which]):
                    failures.append(f"thread {number}, {KERNELS[which]}, repetition {repetition}")

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


# --------------------------------------------------------------------------------------------------------------- graphs


@pytest.mark.parametrize("backend", ["torch", *KERNELS])
def test_graph_of_a_dense_call_replayed_with_other_inputs(backend: str) -> None:
    """Operands, starts and live lengths change between replays."""
    call = dense(3, (4, 2), 65, 300, 128, device="cuda", causal=True, query_start=int32(0, 0, 0, device="cuda"),
                 seqused_k=int32(65, 65, 65, device="cuda"))  # fmt: skip
    call.run(backend)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = call.run(backend, return_lse=True)
    for number, (starts, lives) in enumerate(
        (((0, 0, 0), (65, 65, 65)), ((235, 10, -70), (300, 75, 1)), ((0, 5, 100), (0, 300, 165)))
    ):
        other = dense(3, (4, 2), 65, 300, 128, device="cuda", seed=number + 1)
        for mine, theirs in zip(call.positional, other.positional, strict=True):
            mine.copy_(theirs)
        call.options["query_start"].copy_(int32(*starts))
        call.options["seqused_k"].copy_(int32(*lives))
        graph.replay()
        same_bits(results, call.run(backend, return_lse=True), f"replay {number}")
        check(poison(call), backend)


@pytest.mark.parametrize("backend", ["torch", *KERNELS])
def test_graph_of_a_packed_call_replayed_with_other_lengths(backend: str) -> None:
    """Lengths grow, shrink and vanish behind cu_seqlens; capacity is what max_seqlen and the rows say."""
    call = packed([100] * 4, [200] * 4, (4, 2), 64, device="cuda", causal=True, query_starts="suffix")
    call.options.update(max_seqlen_q=400, max_seqlen_k=800)
    assert call.cu_seqlens is not None
    call.run(backend)
    out = torch.zeros_like(call.q)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        _, lse = call.run(backend, return_lse=True, out=out)
    for lengths_q, lengths_k in (
        ([100] * 4, [200] * 4),
        ([400, 0, 0, 0], [800, 0, 0, 0]),
        ([1, 1, 1, 397], [799, 0, 1, 0]),
        ([3, 0, 7, 0], [5, 5, 5, 5]),
    ):
        for cu, lengths in zip(call.cu_seqlens, (lengths_q, lengths_k), strict=True):
            cu.copy_(torch.tensor([0, *lengths]).cumsum(0).int())
        graph.replay()
        rows = sum(lengths_q)
        eager, eager_lse = call.run(backend, return_lse=True)
        same_bits((out[:rows], lse[:, :rows]), (eager[:rows], eager_lse[:, :rows]), str(lengths_q))
        right, _ = call.truth()
        assert (eager[:rows].double() - right[:rows]).abs().max() < 2e-3


# --------------------------------------------------------------------------------------------------------------- memory


@EVERY_KERNEL
def test_memory_is_flat(kernel: str) -> None:
    """A55: scratch comes from torch's allocator and goes back."""
    calls = [form(head_dim) for form in (prompt, ragged) for head_dim in (64, 128, 256)]
    for call in calls:
        call.run(kernel)
    torch.cuda.synchronize()
    before, free = torch.cuda.memory_allocated(), torch.cuda.mem_get_info()[0]
    for number in range(600):
        calls[number % len(calls)].run(kernel)
    for length in range(1, 200):
        dense(1, (4, 2), length, length, 64, device="cuda").run(kernel)
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() == before
    assert torch.cuda.mem_get_info()[0] > free - 64 * 2**20


@EVERY_KERNEL
def test_no_synchronisation(kernel: str) -> None:
    """Starts, live lengths and cu_seqlens stay on the device."""
    calls = [prompt(), ragged(), dense(2, (4, 2), 9, 9, 64, device="cuda", seqused_k=int32(3, 9, device="cuda"))]
    torch.cuda.set_sync_debug_mode("error")
    try:
        for call in calls:
            call.run(kernel, return_lse=True)
            call.run("torch")
            call.info(kernel)
    finally:
        torch.cuda.set_sync_debug_mode("default")


# ------------------------------------------------------------------------------------------------- gradients, compile


@EVERY_FORM
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gradients_are_those_of_the_cpu(form: Any, dtype: torch.dtype) -> None:
    """A51: any operand; torch takes the call, and a kernel by name refuses."""
    call = form(64)
    call = call.with_(**{name: getattr(call, name).to(dtype) for name in "qkv"})
    grads = []
    for device in ("cuda", "cpu"):
        there = call.to(device)
        leaves = [getattr(there, name).detach().requires_grad_() for name in "qkv"]
        out, lse = there.with_(q=leaves[0], k=leaves[1], v=leaves[2]).run(return_lse=True)
        total = out.float().square().sum() + torch.where(lse.isinf(), 0, lse).sum()
        total.backward()
        grads.append([leaf.grad.cpu().float() for leaf in leaves])
    for name, mine, theirs in zip("qkv", *grads, strict=True):
        scale = float(theirs.abs().max())
        torch.testing.assert_close(mine, theirs, rtol=0, atol=2 * scale * torch.finfo(dtype).eps, msg=name)
    needs = call.with_(k=call.k.clone().requires_grad_())
    assert needs.info().fallback_reason == "the own kernels compute no gradients"
    for backend in ("cuda", *KERNELS):
        with pytest.raises(BackendUnavailableError, match=f'"{backend}" cannot run: an argument needs a gradient'):
            needs.run(backend)
        with torch.no_grad():
            assert not needs.run(backend).requires_grad


@pytest.mark.parametrize("backend", ["auto", *KERNELS])
def test_one_graph_for_ten_lengths(backend: str) -> None:
    graphs = 0

    def count(graph: Any, _: Any) -> Any:
        nonlocal graphs
        graphs += 1
        return graph.forward

    def model(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        out = dandan_attention.flash_attention(
            q, k, v, causal=True, query_start=k.shape[2] - q.shape[2], backend=backend
        )
        return out.transpose(1, 2).flatten(2) * 2

    compiled = torch.compile(model, fullgraph=True, dynamic=True, backend=count)
    inductor = torch.compile(model, fullgraph=True, dynamic=True)
    for length in (37, 2, 3, 5, 8, 16, 33, 64, 100, 129):
        call = dense(2, (6, 3), length, length, 64, device="cuda", seed=length)
        assert torch.equal(compiled(*call.positional), model(*call.positional))
        if backend == "auto":
            assert torch.equal(inductor(*call.positional), model(*call.positional))
    assert graphs == 1


def test_opcheck_of_the_kernels() -> None:
    tests = ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")
    for call in (prompt(64), ragged(128)):
        for code in (LIBRARY.codes[name] for name in ("auto", *KERNELS)):
            for form in ("", "_lse"):
                torch.library.opcheck(LIBRARY.op(call.name + form), raw(call, code), test_utils=tests)
            out = torch.empty_like(call.q)
            torch.library.opcheck(LIBRARY.op(f"{call.name}_out"), (*raw(call, code), out), test_utils=tests[:2])


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled_calls_of_every_layout(dynamic: bool) -> None:
    """A50: strides of the fake result are those of the real one, or the compiled code asserts."""

    def model(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        return dandan_attention.flash_attention(q, k, k).transpose(1, 2) * 2

    compiled = torch.compile(model, fullgraph=True, dynamic=dynamic)
    k = torch.randn(2, 3, 7, 64, device="cuda").half()
    for q in (
        torch.randn(2, 6, 5, 64, device="cuda").half(),
        torch.randn(2, 5, 6, 64, device="cuda").half().transpose(1, 2),
        torch.randn(2, 5, 12, 64, device="cuda").half()[:, :, :6].transpose(1, 2),
        torch.randn(2, 1, 5, 64, device="cuda").half().expand(2, 6, 5, 64),
    ):
        got, wanted = compiled(q, k), model(q, k)
        assert got.stride() == wanted.stride()
        assert torch.equal(got, wanted)


# -------------------------------------------------------------------------------------------------------------- kernels


@EVERY_KERNEL
@EVERY_DIM
@EVERY_FORM
def test_kernel_that_is_told_is_the_one_that_runs(kernel: str, head_dim: int, form: Any) -> None:
    """The profiler sees the kernel's own functions, and no copy."""
    call = form(head_dim)
    info = call.info(kernel)
    assert (info.kernel, info.copies, info.profile) == (kernel, (), None)
    call.run(kernel)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        call.run(kernel)
        torch.cuda.synchronize()
    names = [event.key for event in profile.key_averages() if event.device_type == torch.autograd.DeviceType.CUDA]
    assert any(SYMBOLS[kernel] in name for name in names), names
    assert all("dandan" in name for name in names), names


def test_every_kernel_can_run_here() -> None:
    """Without this, a kernel that refuses everything would pass the tests that are skipped where it cannot run."""
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("both kernels run on compute capability 9.0 alone")
    assert LIBRARY.library.loaded, LIBRARY.library.reason
    for kernel in KERNELS:
        for call in (prompt(64), prompt(128), prompt(256), ragged(64), ragged(128), ragged(256)):
            assert call.info(kernel).kernel == kernel
    assert prompt().info("cuda").backend == "cuda"
    assert prompt().info().backend == "cuda"


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@EVERY_KERNEL
@EVERY_FORM
def test_second_device(kernel: str, form: Any) -> None:
    """A29: values right on cuda:1 while cuda:0 is current, nothing allocated on cuda:0; no mixed devices."""
    torch.cuda.set_device(0)
    here = form()
    there = here.to("cuda:1")
    expected = here.run(kernel)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated(0)
    got = there.run(kernel)
    assert got.device == there.q.device
    assert torch.cuda.current_device() == 0
    assert torch.cuda.memory_allocated(0) == before
    assert_bit_equal(got.cpu(), expected.cpu())
    check(there, kernel)
    with pytest.raises(ValueError, match=f"^{here.name}: k is on cuda:0 but q is on cuda:1$"):
        there.with_(k=here.k).run(kernel)

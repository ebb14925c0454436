"""Properties of calls: batch invariance, streams, graphs, memory, dependent launches, threads, compile, large sizes."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

import dandan_norm
from dandan_norm import reference
from dandan_norm._ops import LIBRARY
from dandan_ops_core.backend import BackendUnavailableError
from dandan_ops_core.testing import assert_bit_equal, assert_close_to, delay_stream, guarded_empty

pytestmark = pytest.mark.gpu

Call = Callable[..., Any]


def calls(cols: int, dtype: torch.dtype = torch.float16) -> dict[str, Call]:
    """Each operator as a function of one activation."""
    weight = torch.randn(cols, device="cuda").to(dtype)
    return {
        "rms_norm": lambda x, **k: dandan_norm.rms_norm(x, weight, **k),
        "residual_rms_norm": lambda x, **k: dandan_norm.residual_rms_norm(x, x.flip(-1), weight, **k),
        "layer_norm": lambda x, **k: dandan_norm.layer_norm(x, weight, weight, **k),
        "softmax": lambda x, **k: dandan_norm.softmax(x, **k),
        "silu_and_mul": lambda x, **k: dandan_norm.silu_and_mul(x, x.flip(-1), **k),
        "argmax": lambda x, **k: dandan_norm.argmax(x, **k),
    }


def tensors(result: Any) -> tuple[torch.Tensor, ...]:
    return result if isinstance(result, tuple) else (result,)


@pytest.mark.parametrize("op", ["rms_norm", "residual_rms_norm", "layer_norm", "softmax", "silu_and_mul", "argmax"])
@pytest.mark.parametrize("cols", [128, 1024, 4096, 4099, 151936])
def test_a_row_has_the_same_bits_in_every_batch(op: str, cols: int) -> None:
    """A35: all rows in one call, in chunks of 255, one at a time."""
    rows = 1024 if cols < 100000 else 300
    call = calls(cols)[op]
    x = torch.randn(rows, cols, device="cuda").half()
    whole = tensors(call(x))
    for size in (255, 64, 1):
        for first in range(0, rows, size) if size > 1 else range(0, rows, 37):
            for a, b in zip(tensors(call(x[first : first + size])), whole, strict=True):
                assert_bit_equal(a, b[first : first + size], f"{op} rows {first}+{size}")


@pytest.mark.parametrize("op", ["rms_norm", "layer_norm", "softmax", "argmax"])
def test_repeated_runs_have_the_same_bits(op: str) -> None:
    for cols in (4096, 151936):
        call, x = calls(cols)[op], torch.randn(64, cols, device="cuda").half()
        first = tensors(call(x))
        for _ in range(100):
            for a, b in zip(tensors(call(x)), first, strict=True):
                assert torch.equal(a, b)


@pytest.mark.parametrize("op", ["rms_norm", "residual_rms_norm", "layer_norm", "softmax", "silu_and_mul", "argmax"])
def test_side_stream(op: str) -> None:
    """A28: the kernel waits for the copy before it and the consumer waits for the kernel."""
    call = calls(4096)[op]
    side = torch.cuda.Stream()
    source = torch.randn(20, 64, 4096).half().pin_memory()
    expected = [tensors(call(s.cuda())) for s in source]
    torch.cuda.synchronize()
    x = torch.empty(64, 4096, device="cuda", dtype=torch.float16)
    for number in range(20):
        with torch.cuda.stream(side):
            delay_stream(5.0)
            x.copy_(source[number], non_blocking=True)
            got = [t.clone() for t in tensors(call(x))]
        side.synchronize()
        for a, b in zip(got, expected[number], strict=True):
            assert_bit_equal(a, b, f"{op} repetition {number}")


@pytest.mark.parametrize("op", ["rms_norm", "residual_rms_norm", "layer_norm", "softmax", "silu_and_mul", "argmax"])
def test_graph_replay_with_changed_inputs(op: str) -> None:
    for cols in (1024, 4099, 151936):
        call = calls(cols)[op]
        x = torch.randn(8, cols, device="cuda").half()
        call(x)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            result = tensors(call(x))
        for _ in range(5):
            x.copy_(torch.randn(8, cols, device="cuda"))
            graph.replay()
            for a, b in zip(result, tensors(call(x)), strict=True):
                assert_bit_equal(a, b, op)


def test_memory_stays_flat() -> None:
    """A55: results come from torch's allocator and nothing else is kept."""
    for cols in (4096, 151936):
        for call in calls(cols).values():
            for rows in (4, 5, 6):
                call(torch.randn(rows, cols, device="cuda").half())
        torch.cuda.synchronize()
        x = torch.randn(6, cols, device="cuda").half()
        before, free = torch.cuda.memory_allocated(), torch.cuda.mem_get_info()[0]
        for call in calls(cols).values():
            for number in range(1000):
                call(x[: 4 + number % 3])
        torch.cuda.synchronize()
        assert torch.cuda.memory_allocated() <= before + 8 * cols
        assert torch.cuda.mem_get_info()[0] >= free - (64 << 20)


@pytest.fixture(params=[0, 1], ids=["plain", "dependent"])
def dependent(request: pytest.FixtureRequest) -> Any:
    """Both ways of launching, and the setting restored."""
    before = LIBRARY.op("set_dependent_launch")(request.param)
    yield request.param
    LIBRARY.op("set_dependent_launch")(before)


def test_chains_of_dependent_launches(dependent: int) -> None:
    """Writers and readers of activations and weights one behind the other, in a graph and eagerly: every bit as with a
    barrier between.
    """

    def chain(x: torch.Tensor, weight: torch.Tensor, fence: Callable[[], None]) -> list[torch.Tensor]:
        seen = []
        for step in range(40):
            fence()
            normalized, summed = dandan_norm.residual_rms_norm(x, x, weight)
            fence()
            gated = dandan_norm.silu_and_mul(normalized, summed)
            fence()
            gated.clamp_(-8, 8)  # torch's kernels write what ours read next, activations and weights
            fence()
            weight.copy_(gated[step % x.shape[0]].abs().clamp(0.5, 2.0))
            fence()
            x = dandan_norm.layer_norm(gated, weight, weight, out=x)
            fence()
            probabilities = dandan_norm.softmax(x)
            fence()
            x = dandan_norm.rms_norm(x, weight, out=x)
            fence()
            x.clamp_(-8, 8)
            fence()
            seen += [normalized, summed, gated, probabilities, x.clone(), dandan_norm.argmax(x)]
        return seen

    for rows, cols in ((1, 1024), (8, 4096), (64, 4096), (512, 2048), (4, 40960)):
        x, weight = torch.randn(rows, cols, device="cuda").half(), torch.rand(cols, device="cuda").half() + 0.5
        expected = chain(x.clone(), weight.clone(), torch.cuda.synchronize)
        assert all(torch.isfinite(t).all() for t in expected)
        for repetition in range(3):
            got = chain(x.clone(), weight.clone(), lambda: None)
            for a, b in zip(got, expected, strict=True):
                assert torch.equal(a, b), f"eager {rows}x{cols} repetition {repetition}"
        xs, ws = x.clone(), weight.clone()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = chain(xs, ws, lambda: None)
        for repetition in range(5):
            xs.copy_(x)
            ws.copy_(weight)
            graph.replay()
            for a, b in zip(captured, expected, strict=True):
                assert torch.equal(a, b), f"graph {rows}x{cols} repetition {repetition}"


def test_threads_with_their_own_streams() -> None:
    """A30: first use and many uses from several threads at once."""
    call = calls(4096)["residual_rms_norm"]
    inputs = [torch.randn(16, 4096, device="cuda").half() for _ in range(4)]
    expected = [tensors(call(x)) for x in inputs]
    torch.cuda.synchronize()
    failures: list[str] = []

    def work(number: int) -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            for _ in range(200):
                got = tensors(call(inputs[number]))
                torch.cuda.current_stream().synchronize()
                if not all(torch.equal(a, b) for a, b in zip(got, expected[number], strict=True)):
                    failures.append(f"thread {number}")

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


def test_gradients_go_to_the_reference() -> None:
    """A51, on CUDA tensors."""
    x = torch.randn(4, 256, device="cuda", requires_grad=True)
    weight = torch.randn(256, device="cuda", requires_grad=True)
    dandan_norm.rms_norm(x, weight).square().sum().backward()
    got = (x.grad, weight.grad)
    x.grad = weight.grad = None
    reference.rms_norm(x, weight).square().sum().backward()
    assert got[0] is not None
    assert got[1] is not None
    torch.testing.assert_close(got, (x.grad, weight.grad))
    with pytest.raises(
        BackendUnavailableError, match='rms_norm: backend "cuda" cannot run: an argument needs a gradient'
    ):
        dandan_norm.rms_norm(x, weight, backend="cuda")
    assert dandan_norm.elementwise_execution_info("rms_norm", x, weight).fallback_reason
    for context in (torch.no_grad(), torch.inference_mode()):
        with context:
            assert dandan_norm.elementwise_execution_info("rms_norm", x, weight).kernel == "sm80_row"
            assert not dandan_norm.rms_norm(x, weight, backend="cuda").requires_grad


def test_one_graph_for_ten_batches() -> None:
    graphs = 0

    def count(graph: Any, _: Any) -> Any:
        nonlocal graphs
        graphs += 1
        return graph.forward

    weight = torch.randn(512, device="cuda").half()

    def model(x: torch.Tensor) -> torch.Tensor:
        normalized, summed = dandan_norm.residual_rms_norm(x, x * 2, weight)
        gated = dandan_norm.silu_and_mul(normalized, summed)
        return dandan_norm.argmax(dandan_norm.softmax(dandan_norm.layer_norm(gated, weight, weight)))

    compiled = torch.compile(model, fullgraph=True, dynamic=True, backend=count)
    inductor = torch.compile(model, fullgraph=True, dynamic=True)
    for rows in range(2, 12):
        x = torch.randn(rows, 512, device="cuda").half()
        assert torch.equal(compiled(x), model(x))
        assert torch.equal(inductor(x), model(x))
    assert graphs == 1


def test_compiled_functions_that_write_into_views_of_one_base() -> None:
    """A49."""

    def write(base: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        dandan_norm.rms_norm(x, out=base[0])
        dandan_norm.softmax(x, out=base[1])
        return base.sum()

    x = torch.randn(4, 64, device="cuda")
    eager, traced = torch.zeros(2, 4, 64, device="cuda"), torch.zeros(2, 4, 64, device="cuda")
    total = write(eager, x)
    torch.testing.assert_close(torch.compile(write, fullgraph=True)(traced, x), total)
    assert_bit_equal(traced, eager)


def test_opcheck_of_the_kernels() -> None:
    x, w = torch.randn(6, 128, device="cuda").half(), torch.randn(128, device="cuda").half()
    index = torch.empty(6, device="cuda", dtype=torch.int64)
    samples: dict[str, list[tuple[Any, ...]]] = {
        "rms_norm": [(x, w, 1e-6, 2), (x[:, 1:100], None, 1e-6, 0)],
        "rms_norm_out": [(x, w, 1e-6, 2, torch.empty_like(x))],
        "residual_rms_norm": [(x, x.clone(), w, 1e-6, 2)],
        "residual_rms_norm_out": [(x, x.clone(), w, 1e-6, 2, torch.empty_like(x), torch.empty_like(x))],
        "layer_norm": [(x, w, w.clone(), 1e-5, 2), (x.t().contiguous().t(), None, None, 1e-5, 2)],
        "layer_norm_out": [(x, w, w.clone(), 1e-5, 2, torch.empty_like(x))],
        "softmax": [(x, 2), (x.expand(3, 6, 128), 2)],
        "softmax_out": [(x, 2, torch.empty_like(x))],
        "silu_and_mul": [(x[:, :64], x[:, 64:], 2)],
        "silu_and_mul_out": [(x, x.clone(), 2, torch.empty_like(x))],
        "argmax": [(x, 2)],
        "argmax_out": [(x, 2, index)],
    }
    for name, arguments in samples.items():
        for values in arguments:
            torch.library.opcheck(LIBRARY.op(name), values)


def test_routes_that_are_told_are_taken() -> None:
    """The profiler sees the kernel that execution_info names."""
    x, wide = torch.randn(4, 4096, device="cuda").half(), torch.randn(4, 151936, device="cuda").half()
    cases: list[tuple[str, tuple[Any, ...], str]] = [
        ("rms_norm", (x,), "row_rms_kernel"),
        ("rms_norm", (x[:, 1:],), "stream_rms_kernel"),
        ("softmax", (wide,), "row_softmax_kernel"),
        ("silu_and_mul", (x, x), "elementwise"),
        ("argmax", (wide,), "row_argmax_kernel"),
    ]
    for op, arguments, symbol in cases:
        getattr(dandan_norm, op)(*arguments)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            getattr(dandan_norm, op)(*arguments)
            torch.cuda.synchronize()
        names = [event.key for event in profile.key_averages() if event.device_type == torch.autograd.DeviceType.CUDA]
        assert any(symbol in name for name in names), f"{op}: {names}"


def test_errors_leave_the_context_usable() -> None:
    x = torch.randn(4, 4096, device="cuda").half()
    before = x.clone()
    with pytest.raises(ValueError, match="rms_norm: weight is on cpu but x is on cuda:0"):
        dandan_norm.rms_norm(x, torch.ones(4096).half())
    with pytest.raises(ValueError, match=r"rms_norm: weight has shape \[5\] but x has 4096 columns"):
        dandan_norm.rms_norm(x, torch.ones(5, device="cuda").half())
    with pytest.raises(
        BackendUnavailableError, match='softmax: backend "sm80_elementwise" cannot run: it does not compute'
    ):
        dandan_norm.softmax(x, backend="sm80_elementwise")
    with pytest.raises(
        BackendUnavailableError, match='"sm80_row" cannot run: rows are not whole 16-byte vectors.*"sm80_stream"'
    ):
        dandan_norm.softmax(x[:, 1:], backend="sm80_row")
    assert torch.ones(4, device="cuda").sum().item() == 4
    assert_bit_equal(x, before)


def test_process_that_forks_after_import() -> None:
    """A53: importing creates no CUDA context, so a forked child can use CUDA."""
    code = (
        "import dandan_norm, os\n"
        "import torch\n"
        "assert not torch.cuda.is_initialized()\n"
        "pid = os.fork()\n"
        "if pid == 0:\n"
        "    x = torch.ones(2, 8, device='cuda')\n"
        "    ok = bool((dandan_norm.softmax(x, backend='cuda') == 0.125).all())\n"
        "    os._exit(0 if ok else 1)\n"
        "assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, env=os.environ.copy())


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_second_device() -> None:
    """A29: values right on cuda:1 while cuda:0 is current, nothing allocated on cuda:0."""
    torch.cuda.set_device(0)
    before = torch.cuda.memory_allocated(0)
    x = torch.randn(8, 4096, device="cuda:1").half()
    got = dandan_norm.softmax(x)
    assert got.device == x.device
    assert torch.cuda.current_device() == 0
    assert torch.cuda.memory_allocated(0) == before
    assert_close_to(got, reference.softmax(x, compute_dtype=torch.float64), reference.softmax(x), "softmax")
    with pytest.raises(ValueError, match="weight is on cuda:0 but x is on cuda:1"):
        dandan_norm.rms_norm(x, torch.ones(4096, device="cuda:0").half())


@pytest.mark.large
def test_offsets_beyond_32_bits() -> None:
    """A01: more than 2^32 elements; rows whose offset is 2^31 and 2^32 are right and the guard bands untouched."""
    rows, cols = 1048641, 4096
    row = torch.randn(cols, device="cuda").half()
    weight = torch.randn(cols, device="cuda").half()
    x = torch.empty(rows, cols, device="cuda", dtype=torch.float16)
    for first in range(0, rows, 65536):
        scale = 1 + torch.arange(first, min(first + 65536, rows), device="cuda") % 7
        x[first : first + 65536] = (scale[:, None] * row.float()).half()
    wanted = [0, 524287, 524288, 1048575, 1048576, 1048640]
    for op, arguments in (("rms_norm", (x, weight)), ("softmax", (x,)), ("silu_and_mul", (x, x))):
        guard = guarded_empty(x.shape, x.dtype, "cuda")
        getattr(dandan_norm, op)(*arguments, out=guard.tensor, backend="cuda")
        guard.check()
        chosen = tuple(t[wanted] if t.dim() == 2 else t for t in arguments)
        function = getattr(reference, op)
        assert_close_to(guard.tensor[wanted], function(*chosen, compute_dtype=torch.float64), function(*chosen), op)
        assert_bit_equal(guard.tensor[wanted], getattr(dandan_norm, op)(*chosen, backend="cuda"), op)
        del guard
    assert torch.equal(dandan_norm.argmax(x, backend="cuda")[wanted], x[wanted].argmax(-1))
    # One row of every other: offsets beyond 2^32 with a stride, on the general kernel.
    slices = x[::2, 1:]
    got = dandan_norm.rms_norm(slices[-3:], weight[1:], backend="sm80_stream")
    whole = dandan_norm.rms_norm(slices, weight[1:], backend="sm80_stream")
    assert_bit_equal(whole[-3:], got)

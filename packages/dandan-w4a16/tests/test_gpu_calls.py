"""Properties of calls: same bits on every run, stream and thread; rows alone; graphs, memory, compile; w4a16_linear."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from typing import Any

import pytest
import torch
from gpu_cases import (
    EVERY_DTYPE,
    EVERY_GROUP,
    EVERY_KERNEL,
    EVERY_KERNEL_WITH_BIAS,
    KERNELS,
    WITH_BIAS,
    Layer,
    Tile,
    assert_exact,
    by_tile,
    configurations,
    layer,
    most_rows,
    random_x,
    tiles,
    whole_x,
    widest_splits,
)

from dandan_ops_core.testing import assert_bit_equal, delay_stream, guarded_empty
from dandan_w4a16 import w4a16_linear, w4a16_linear_execution_info
from dandan_w4a16._ops import LIBRARY
from dandan_w4a16.execution_info import packed_linear_execution_info
from dandan_w4a16.packed import packed_linear

pytestmark = pytest.mark.gpu


def call(made: Layer, x: torch.Tensor, backend: str = "auto") -> torch.Tensor:
    return packed_linear(*made.inputs(x), backend=backend)


SYMBOLS = {
    "sm80_decode": "decode_kernel",
    "sm90_decode": "ring_kernel",
    "sm80_mma": "mma_kernel",
    "sm90a_wgmma": "wgmma_kernel",
    "sm80_dequantize": "dequantize_kernel",
}
"""Part of the name of each kernel's own function."""


def some_rows(kernel: str) -> int:
    """As many as a kernel takes, or more than a tile of it."""
    return most_rows(kernel) or 300


@EVERY_DTYPE
@EVERY_KERNEL_WITH_BIAS  # torch, whose product follows the other one, does not promise it
def test_a_row_has_the_same_bits_in_every_batch_of_one_configuration(kernel: str, dtype: torch.dtype) -> None:
    """A35: while kernel, configuration and split stay, neither the number of rows nor a row's place changes its bits.

    `auto` chooses by the number of rows, so it does not promise this; the documentation says so.
    """
    rows = some_rows(kernel)
    made = layer(520, 1544, 64, dtype, bias=True, whole=False)
    seen = set()
    for count in {rows, min(rows, 16), 8}:
        x = random_x(count, 1544, dtype)
        for tile in widest_splits(made, x, kernel):
            whole = by_tile(made, x, tile)
            for first, part in ((0, 1), (3, 1), (count - 1, 1), (1, 7), (count // 2, count // 2), (0, count - 1)):
                found = by_tile(made, x[first : first + part], tile)
                assert_bit_equal(found, whole[first : first + part], f"{tile} rows {first}+{part}")
            seen.add(tile.number)
    assert len(seen) == len(configurations(kernel))


@EVERY_KERNEL
def test_repeated_runs_have_the_same_bits(kernel: str) -> None:
    """100 runs, on the current stream and on another that is busy with them at the same time."""
    side = torch.cuda.Stream()
    for m, n, k in ((1, 4096, 1024), (some_rows(kernel), 1032, 3080)):
        made, x = layer(n, k, 64, bias=kernel in WITH_BIAS, whole=False), random_x(m, k)
        for tile in [None, *widest_splits(made, x, kernel)]:

            def again(made: Layer = made, x: torch.Tensor = x, tile: Tile | None = tile) -> torch.Tensor:
                return call(made, x, kernel) if tile is None else by_tile(made, x, tile)

            first = again()
            torch.cuda.synchronize()
            seen = []
            for number in range(100 if tile is None else 20):
                with torch.cuda.stream(side if number % 2 else torch.cuda.current_stream()):
                    seen.append(again())
            torch.cuda.synchronize()
            same = torch.stack([(each.view(torch.int16) == first.view(torch.int16)).all() for each in seen])
            assert same.all(), f"{made} by {tile or kernel}: run {int((~same).nonzero()[0])} differs"


@EVERY_KERNEL
def test_side_stream(kernel: str) -> None:
    """A28: the kernel waits for the copy before it and the consumer waits for the kernel."""
    most_rows(kernel)
    side = torch.cuda.Stream()
    made = layer(1024, 2048, 64, whole=False)
    source = torch.randn(20, 8, 2048).half().pin_memory()
    expected = [call(made, x.cuda(), kernel) for x in source]
    x = torch.zeros(8, 2048, device="cuda").half()
    torch.cuda.synchronize()
    for number in range(20):
        with torch.cuda.stream(side):
            delay_stream(2.0)
            x.copy_(source[number], non_blocking=True)
            found = call(made, x, kernel) * 1.0
        side.synchronize()
        assert_bit_equal(found, expected[number], f"{kernel} repetition {number}")


def test_threads_with_their_own_streams() -> None:
    """A30: many calls from several threads at once, kernels and both operators in turns."""
    made = layer(1024, 2048, 64, whole=False)
    inputs = [random_x(8 + n, 2048, seed=n) for n in range(4)]

    def canonical(x: torch.Tensor) -> torch.Tensor:
        return w4a16_linear(x, *made.canonical)

    ways = [lambda x, kernel=kernel: call(made, x, kernel) for kernel in KERNELS if tiles(made, inputs[0], kernel)]
    ways.append(canonical)
    expected = [[way(x) for way in ways] for x in inputs]
    torch.cuda.synchronize()
    failures: list[str] = []

    def work(number: int) -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            for repetition in range(200):
                which = (repetition + number) % len(ways)
                found = ways[which](inputs[number])
                torch.cuda.current_stream().synchronize()
                if not torch.equal(found, expected[number][which]):
                    failures.append(f"thread {number}, way {which}, repetition {repetition}")

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


FIRST_USE = """
import threading, torch
from dandan_w4a16 import Int4Weight, QuantizedLinear, pack_int4, w4a16_linear
weight = Int4Weight(pack_int4(torch.full((64, 512), 9)), torch.full((64, 8), 0.5).half(),
                    torch.full((64, 8), 7, dtype=torch.uint8)).to("cuda")
a = torch.full((40, 512), 0.25, device="cuda").half()
torch.cuda.synchronize()
wrong, start = [], threading.Barrier(8)
def work(rows):
    with torch.cuda.stream(torch.cuda.Stream()):
        start.wait()
        for _ in range(20):
            module = QuantizedLinear.from_packed(weight)
            for found in (module(a[:rows]), w4a16_linear(a[:rows], weight.qweight, weight.scales, weight.zeros)):
                torch.cuda.current_stream().synchronize()
                if not (found == 128).all():
                    wrong.append(rows)
threads = [threading.Thread(target=work, args=(rows,)) for rows in (1, 8, 9, 16, 17, 32, 33, 40)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
assert not wrong, wrong
print("done")
"""


def test_first_use_from_eight_threads_at_once() -> None:
    """A30: what is set up once in a process (device facts, shared memory sizes, route tables) is set up by one."""
    done = subprocess.run([sys.executable, "-c", FIRST_USE], capture_output=True, text=True, env=os.environ.copy())
    assert done.stdout == "done\n", done.stderr


@EVERY_KERNEL_WITH_BIAS
def test_graph_replay_with_changed_inputs(kernel: str) -> None:
    """x and bias are read anew at each replay."""
    rows = min(some_rows(kernel), 70)
    made, x = layer(520, 1544, 64, torch.bfloat16, bias=True, whole=False), random_x(rows, 1544, torch.bfloat16)
    assert made.bias is not None
    for tile in widest_splits(made, x, kernel):
        by_tile(made, x, tile)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            result = by_tile(made, x, tile)
        for seed in range(3):
            x.copy_(random_x(rows, 1544, torch.bfloat16, seed=seed + 1))
            made.bias.mul_(-1.5)
            graph.replay()
            assert_bit_equal(result, by_tile(made, x.clone(), tile), f"{tile} replay {seed}")


def test_memory_stays_flat() -> None:
    """A55: results and workspaces come from torch's allocator, nothing else is kept: 1000 calls of every kernel in
    turn, then 1000 with changing sizes.
    """
    made, x = layer(1024, 2048, 64, bias=True, whole=False), random_x(16, 2048)
    ways = [tile for kernel in KERNELS for tile in widest_splits(made, x[:8], kernel)]

    def calls(count: int, rows: int) -> None:
        for number in range(count):
            part = x[: 1 + number % rows]
            by_tile(made, part, ways[number % len(ways)])
            call(made, part)
            w4a16_linear(part, *made.canonical, bias=made.bias)

    calls(2 * len(ways), 8)
    torch.cuda.synchronize()
    before, free = torch.cuda.memory_allocated(), torch.cuda.mem_get_info()[0]
    calls(1000, 1)
    calls(1000, 8)
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() == before
    assert torch.cuda.mem_get_info()[0] >= free - (64 << 20)


def test_opcheck_of_the_kernels() -> None:
    made, x = layer(64, 128, 64, bias=True), whole_x(6, 128)
    for name in ("auto", *(kernel for kernel in KERNELS if tiles(made, x, kernel))):
        arguments = (*made.inputs(x), LIBRARY.codes[name])
        torch.library.opcheck(LIBRARY.op("packed_linear"), arguments)
        torch.library.opcheck(LIBRARY.op("packed_linear_out"), (*arguments, torch.empty_like(call(made, x))))
    both = ("test_schema", "test_faketensor")
    torch.library.opcheck(LIBRARY.op("repack"), (*made.canonical, 64), test_utils=both)
    torch.library.opcheck(LIBRARY.op("unpack"), (made.codes, made.pairs, 64, 128, 64), test_utils=both)


@EVERY_KERNEL
def test_kernel_that_is_told_is_the_one_that_runs(kernel: str) -> None:
    """The profiler sees the kernel's own functions, and no copy; of w4a16_linear also those that put in order."""
    most_rows(kernel)
    made, x = layer(1024, 2048, 64), whole_x(8, 2048)
    symbol = SYMBOLS[kernel]

    def names(run: Any) -> list[str]:
        run()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            run()
            torch.cuda.synchronize()
        events = profile.key_averages()
        return [event.key for event in events if event.device_type == torch.autograd.DeviceType.CUDA]

    info = packed_linear_execution_info(*made.inputs(x), backend=kernel)
    assert (info.kernel, info.copies, info.profile) == (kernel, (), None)
    found = names(lambda: call(made, x, kernel))
    assert found
    if kernel == "sm80_dequantize":  # a product of torch follows it; no w4a16_linear by it
        assert any(symbol in name for name in found), found
        return
    assert all(symbol in name or "split_sum" in name for name in found), found
    told = w4a16_linear_execution_info(x, *made.canonical, backend=kernel)
    assert (told.kernel, told.copies) == (kernel, ("qweight", "scales", "zeros"))
    found = names(lambda: w4a16_linear(x, *made.canonical, backend=kernel))
    assert any("repack_kernel" in name for name in found), found
    assert any(symbol in name for name in found), found


def test_every_kernel_and_configuration_can_run_here() -> None:
    """Without this, a kernel that refuses everything would pass the tests that ask for what can run."""
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("all kernels run on compute capability 9.0 alone")
    made = layer(512, 2048, 64)
    listed = {(tile.kernel, tile.number) for m in (8, 16, 64, 1024) for tile in tiles(made, whole_x(m, 2048))}
    assert listed == {(kernel, number) for kernel in KERNELS for number, _ in enumerate(configurations(kernel))}


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_second_device() -> None:
    """A29: values right on cuda:1 while cuda:0 is current, nothing allocated on cuda:0."""
    torch.cuda.set_device(0)
    here = layer(1024, 2048, 64, bias=True)
    assert here.bias is not None
    there = here.with_(codes=here.codes.to("cuda:1"), pairs=here.pairs.to("cuda:1"), bias=here.bias.to("cuda:1"))
    for m in (1, 16, 64):
        x = whole_x(m, 2048)
        expected, elsewhere = call(here, x), x.to("cuda:1")
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated(0)
        assert_bit_equal(call(there, elsewhere).cpu(), expected.cpu())
        moved = [t.to("cuda:1") for t in here.canonical]
        assert_bit_equal(w4a16_linear(elsewhere, *moved, bias=there.bias).cpu(), expected.cpu())
        back = LIBRARY.op("unpack")(*LIBRARY.op("repack")(*moved, 64), 1024, 2048, 64)
        for found, wanted in zip(back, here.canonical, strict=True):
            assert_bit_equal(found.cpu(), wanted.cpu())
        assert torch.cuda.memory_allocated(0) == before
    assert torch.cuda.current_device() == 0


# ---------------------------------------------------------------------------------------------- the canonical operator


@EVERY_DTYPE
@EVERY_GROUP
def test_w4a16_linear_by_every_kernel(dtype: torch.dtype, group: int) -> None:
    """The weight is put in order by the call: whole numbers, bits of the exact result; strided weights, guarded out."""
    made = layer(136, 384, group, dtype, bias=True)
    wide = [torch.cat((t, t), 1)[:, t.shape[1] :] for t in made.canonical]
    for m in (1, 9, 70):
        x = whole_x(m, 384, dtype)
        exact = made.exact(x)
        kernels = [kernel for kernel in WITH_BIAS if tiles(made, x, kernel)]
        for backend in ("auto", "cuda", *kernels):
            info = w4a16_linear_execution_info(x, *made.canonical, group_size=group, bias=made.bias, backend=backend)
            assert info.backend == "cuda"
            assert info.copies == ("qweight", "scales", "zeros")
            for weight in (made.canonical, wide):
                for padding in (0, 3):
                    with guarded_empty((m, 136), dtype, "cuda", row_padding=padding) as out:
                        w4a16_linear(x, *weight, group_size=group, bias=made.bias, out=out.tensor, backend=backend)
                    assert_exact(out.tensor, exact, f"{made} by {backend}")


@pytest.mark.parametrize("m", [1, 16, 40])
def test_a_weight_that_is_put_in_order_in_parts(m: int) -> None:
    """27 MB in order, in 16 MB of workspace that is written again while the first product may still read it."""
    made = layer(24 * 1024 + 40, 2048, 64, bias=True)
    x = whole_x(m, 2048)
    exact = made.exact(x)
    for _ in range(5):
        assert_exact(w4a16_linear(x, *made.canonical, bias=made.bias), exact, f"{m} rows")
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    out = w4a16_linear(x, *made.canonical, bias=made.bias)
    torch.cuda.synchronize()
    assert torch.cuda.max_memory_allocated() - before <= (16 << 20) + out.numel() * 2 + 1024


def test_w4a16_linear_in_a_graph() -> None:
    made, x = layer(520, 1536, 64, bias=True), whole_x(8, 1536)
    w4a16_linear(x, *made.canonical, bias=made.bias)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = w4a16_linear(x, *made.canonical, bias=made.bias)
    for seed in range(3):
        x.copy_(whole_x(8, 1536, seed=seed + 1))
        made.qweight.bitwise_xor_(0x11111111)  # the weight is read at each replay, not remembered
        changed = LIBRARY.op("repack")(*made.canonical, 64)
        wanted = call(made.with_(codes=changed[0], pairs=changed[1]), x)
        graph.replay()
        assert_bit_equal(out, wanted, f"replay {seed}")

"""Properties of calls: same bits on every run, stream and thread; rows alone; graphs, memory, gradients, compile."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from itertools import product as product_of
from typing import Any

import pytest
import torch
from gemm_cases import DTYPES, KERNELS, Product, Tile, configurations, layouts, random_product, tiles, whole_product

import dandan_gemm
from dandan_gemm import reference
from dandan_gemm._ops import LIBRARY, run_tile
from dandan_ops_core.backend import BackendUnavailableError
from dandan_ops_core.testing import assert_bit_equal, assert_close_to, delay_stream

pytestmark = pytest.mark.gpu

EVERY_KERNEL = pytest.mark.parametrize("kernel", KERNELS)
# In the names of a kernel's own functions.
SYMBOLS = {"sm80_mma": "sm80_mma_", "sm90_tma_mma": "sm90_tma_mma_", "sm90a_wgmma": "wgmma_", "skinny": "skinny_"}


def gemm(product: Product, **keywords: Any) -> torch.Tensor:
    return dandan_gemm.gemm(product.a, product.b, **product.keywords, **keywords)


def by_tile(product: Product, tile: Tile, a: torch.Tensor | None = None) -> torch.Tensor:
    a = product.a if a is None else a
    return run_tile(a, product.b, kernel=tile.kernel, config=tile.number, split=tile.split, **product.keywords)


def widest_splits(product: Product, kernel: str) -> list[Tile]:
    """Each configuration of a kernel without slices of K and with as many as it takes."""
    found: dict[int, list[Tile]] = {}
    for tile in sorted(tiles(product, kernel), key=lambda each: each.split):
        found.setdefault(tile.number, []).append(tile)
    return [tile for group in found.values() for tile in dict.fromkeys((group[0], group[-1]))]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@EVERY_KERNEL
def test_a_row_has_the_same_bits_in_every_batch_of_one_configuration(kernel: str, dtype: torch.dtype) -> None:
    """A35: while kernel, configuration and split stay, neither the number of rows nor a row's place changes its bits.

    `auto` chooses by the number of rows, so it does not promise this; the documentation of gemm says so.
    """
    for rows, weight_transposed in product_of((8, 16) if kernel == "skinny" else (300,), layouts(kernel)):
        product = random_product(rows, 520, 1544, dtype, weight_transposed=weight_transposed, bias=True)
        for tile in widest_splits(product, kernel):
            whole = by_tile(product, tile)
            for first, count in ((0, 1), (3, 1), (rows - 1, 1), (1, 7), (rows // 2, rows // 2), (0, rows - 1)):
                part = by_tile(product, tile, product.a[first : first + count])
                assert_bit_equal(part, whole[first : first + count], f"{tile} rows {first}+{count}")


@EVERY_KERNEL
def test_repeated_runs_have_the_same_bits(kernel: str) -> None:
    """100 runs, on the current stream and on another that is busy with them at the same time."""
    side = torch.cuda.Stream()
    for m, n, k in ((1, 4096, 1024), (16, 1032, 3080)) if kernel == "skinny" else ((1, 4096, 1024), (200, 1032, 3080)):
        product = random_product(m, n, k, torch.float16, bias=True)
        for tile in [None, *widest_splits(product, kernel)]:

            def call(product: Product = product, tile: Tile | None = tile) -> torch.Tensor:
                return gemm(product, backend=kernel) if tile is None else by_tile(product, tile)

            first = call()
            torch.cuda.synchronize()
            seen = []
            for number in range(100 if tile is None else 20):
                with torch.cuda.stream(side if number % 2 else torch.cuda.current_stream()):
                    seen.append(call())
            torch.cuda.synchronize()
            same = torch.stack([(each.view(torch.int16) == first.view(torch.int16)).all() for each in seen])
            assert same.all(), f"{product} by {tile or kernel}: run {int((~same).nonzero()[0])} differs"


@EVERY_KERNEL
def test_side_stream(kernel: str) -> None:
    """A28: the kernel waits for the copy before it and the consumer waits for the kernel."""
    side = torch.cuda.Stream()
    product = random_product(8, 1024, 2048, torch.float16)
    source = torch.randn(20, 8, 2048).half().pin_memory()
    expected = [gemm(product.with_(a=a.cuda()), backend=kernel) for a in source]
    torch.cuda.synchronize()
    for number in range(20):
        with torch.cuda.stream(side):
            delay_stream(2.0)
            product.a.copy_(source[number], non_blocking=True)
            got = gemm(product, backend=kernel) * 1.0
        side.synchronize()
        assert_bit_equal(got, expected[number], f"{kernel} repetition {number}")


def test_threads_with_their_own_streams() -> None:
    """A30: many calls from several threads at once, each kernel in turns."""
    products = [random_product(8 + n, 1024, 2048, torch.float16, seed=n) for n in range(4)]
    expected = [[gemm(product, backend=kernel) for kernel in KERNELS] for product in products]
    torch.cuda.synchronize()
    failures: list[str] = []

    def work(number: int) -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            for repetition in range(200):
                which = (repetition + number) % len(KERNELS)
                got = gemm(products[number], backend=KERNELS[which])
                torch.cuda.current_stream().synchronize()
                if not torch.equal(got, expected[number][which]):
                    failures.append(f"thread {number}, {KERNELS[which]}, repetition {repetition}")

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


FIRST_USE = """
import threading, torch, dandan_gemm
a, w = torch.full((8, 512), 0.5, device="cuda").half(), torch.full((64, 512), 0.25, device="cuda").half()
torch.cuda.synchronize()
wrong, start = [], threading.Barrier(8)
def work(kernel):
    with torch.cuda.stream(torch.cuda.Stream()):
        start.wait()
        for _ in range(20):
            got = dandan_gemm.gemm(a, w, weight_transposed=True, backend=kernel)
            torch.cuda.current_stream().synchronize()
            if not (got == 64).all():
                wrong.append(kernel)
kernels = ("auto", "sm80_mma", "sm90_tma_mma", "sm90a_wgmma", "skinny") * 2
threads = [threading.Thread(target=work, args=(kernel,)) for kernel in kernels[:8]]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
assert not wrong, wrong
print("done")
"""


def test_first_use_from_eight_threads_at_once() -> None:
    """A30: what is set up once in a process (device facts, shared memory sizes, route tables) is set up by one."""
    done = subprocess.run([sys.executable, "-c", FIRST_USE], capture_output=True, text=True, env=os.environ.copy())
    assert done.stdout == "done\n", done.stderr


@EVERY_KERNEL
def test_graph_replay_with_changed_inputs(kernel: str) -> None:
    """Operands, bias and the workspace of slices are read anew at each replay."""
    m = 8 if kernel == "skinny" else 70
    product = random_product(m, 520, 1544, torch.bfloat16, bias=True)
    for tile in widest_splits(product, kernel):
        by_tile(product, tile)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            result = by_tile(product, tile)
        for seed in range(3):
            fresh = random_product(m, 520, 1544, torch.bfloat16, bias=True, seed=seed + 1)
            assert product.bias is not None
            assert fresh.bias is not None
            for old, new in ((product.a, fresh.a), (product.b, fresh.b), (product.bias, fresh.bias)):
                old.copy_(new)
            graph.replay()
            assert_bit_equal(result, by_tile(fresh, tile), f"{tile} replay {seed}")


def test_memory_stays_flat() -> None:
    """A55: results and workspaces come from torch's allocator, nothing else is kept: 1000 calls of each kernel, then
    1000 with changing sizes.
    """
    product = random_product(16, 1024, 2048, torch.float16, bias=True)
    ways = [tile for kernel in KERNELS for tile in widest_splits(product, kernel)]

    def calls(count: int, rows: int) -> None:
        for number in range(count):
            tile = ways[number % len(ways)]
            by_tile(product, tile, product.a[: 1 + number % rows])
            gemm(product.with_(a=product.a[: 1 + number % rows]))

    calls(2 * len(ways), 8)
    torch.cuda.synchronize()
    before, free = torch.cuda.memory_allocated(), torch.cuda.mem_get_info()[0]
    calls(1000, 1)
    calls(1000, 8)
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() == before
    assert torch.cuda.mem_get_info()[0] >= free - (64 << 20)


def test_gradients_go_to_torch() -> None:
    """A51: any operand; the own kernels refuse, and run where no gradient is recorded."""
    product = random_product(4, 64, 256, torch.float16, bias=True)
    for argument in ("a", "b", "bias"):
        leaf = getattr(product, argument).detach().clone().requires_grad_(True)
        needs = product.with_(**{argument: leaf})
        gemm(needs).square().sum().backward()
        got, leaf.grad = leaf.grad, None
        reference.torch_gemm(needs.a, needs.b, needs.bias, True).square().sum().backward()
        assert got is not None
        assert leaf.grad is not None
        assert_bit_equal(got, leaf.grad, f"gradient of {argument}")
        info = dandan_gemm.gemm_execution_info(needs.a, needs.b, **needs.keywords)
        assert (info.kernel, info.fallback_reason) == ("torch", "the own kernels compute no gradients")
        for backend in ("cuda", *KERNELS):
            with pytest.raises(BackendUnavailableError, match=f'"{backend}" cannot run: an argument needs a gradient'):
                gemm(needs, backend=backend)
        for context in (torch.no_grad(), torch.inference_mode()):
            with context:
                assert not gemm(needs, backend="cuda").requires_grad


def test_one_graph_for_ten_batches() -> None:
    graphs = 0

    def count(graph: Any, _: Any) -> Any:
        nonlocal graphs
        graphs += 1
        return graph.forward

    product = random_product(1, 1024, 512, torch.float16, bias=True)

    def model(x: torch.Tensor) -> torch.Tensor:
        up = dandan_gemm.gemm(x, product.b, weight_transposed=True, bias=product.bias)
        return dandan_gemm.gemm(torch.relu(up), product.b)

    compiled = torch.compile(model, fullgraph=True, dynamic=True, backend=count)
    inductor = torch.compile(model, fullgraph=True, dynamic=True)
    for rows in range(2, 12):
        x = torch.randn(rows, 512, device="cuda").half()
        assert torch.equal(compiled(x), model(x))
        assert torch.equal(inductor(x), model(x))
    assert graphs == 1


def test_compiled_functions_that_write_into_views_of_one_base() -> None:
    """A49."""
    product = random_product(4, 64, 128, torch.float16)

    def write(base: torch.Tensor) -> torch.Tensor:
        gemm(product, out=base[0])
        gemm(product, out=base[1], backend="sm80_mma")
        return base.sum()

    eager, traced = (torch.zeros(2, 4, 64, device="cuda", dtype=torch.float16) for _ in range(2))
    total = write(eager)
    torch.testing.assert_close(torch.compile(write, fullgraph=True)(traced), total)
    assert_bit_equal(traced, eager)


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled_calls_of_every_layout(dynamic: bool) -> None:
    """A50: strides of the fake result are those of the real one, or the compiled code asserts."""
    product = whole_product(12, 64, 128, torch.float16, aligned=False)
    wide = whole_product(12, 8, 400, torch.float16, aligned=False).a.view(4, 3, 400)

    def model(x: torch.Tensor, w: torch.Tensor, weight_transposed: bool) -> torch.Tensor:
        return dandan_gemm.gemm(x, w, weight_transposed=weight_transposed).transpose(-1, -2) * 2

    compiled = torch.compile(model, fullgraph=True, dynamic=dynamic)
    for x, w, weight_transposed in (
        (product.a.view(3, 4, 128).transpose(0, 1), product.b.t(), False),
        (wide[..., 128:256], product.b, True),
        (wide[:1, :, 1:129].expand(4, 3, 128), product.b.t().contiguous(), False),
    ):
        got, wanted = compiled(x, w, weight_transposed), model(x, w, weight_transposed)
        assert got.stride() == wanted.stride()
        assert torch.equal(got, wanted)


def test_opcheck_of_the_kernels() -> None:
    product = random_product(6, 64, 128, torch.float16, bias=True)
    for code in (LIBRARY.codes[name] for name in ("auto", *KERNELS)):
        arguments = (product.a, product.b, product.bias, True, False, code)
        torch.library.opcheck(LIBRARY.op("gemm"), arguments)
        torch.library.opcheck(LIBRARY.op("gemm_out"), (*arguments, torch.empty_like(gemm(product))))
    torch.library.opcheck(LIBRARY.op("gemm"), (product.a[:, 1:], product.b[:, 1:].t(), None, False, True, 0))


@EVERY_KERNEL
def test_kernel_that_is_told_is_the_one_that_runs(kernel: str) -> None:
    """The profiler sees the kernel's own functions, and no copy."""
    product = random_product(8, 1024, 2048, torch.float16)
    info = dandan_gemm.gemm_execution_info(product.a, product.b, backend=kernel, **product.keywords)
    assert (info.kernel, info.copies, info.profile) == (kernel, (), None)
    gemm(product, backend=kernel)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        gemm(product, backend=kernel)
        torch.cuda.synchronize()
    names = [event.key for event in profile.key_averages() if event.device_type == torch.autograd.DeviceType.CUDA]
    assert any(SYMBOLS[kernel] in name for name in names), names
    assert all(SYMBOLS[kernel] in name or "split_reduce" in name for name in names), names


def test_every_kernel_and_configuration_can_run_here() -> None:
    """Without this, a kernel that refuses everything would pass the tests that ask for what can run."""
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("all four kernels run on compute capability 9.0 alone")
    products = [random_product(m, 512, 2048, torch.float16) for m in (8, 1024)]
    listed = {(tile.kernel, tile.number) for product in products for tile in tiles(product)}
    assert listed == {(kernel, number) for kernel in KERNELS for number, _ in enumerate(configurations(kernel))}


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@EVERY_KERNEL
def test_second_device(kernel: str) -> None:
    """A29: values right on cuda:1 while cuda:0 is current, nothing allocated on cuda:0; no mixed devices."""
    torch.cuda.set_device(0)
    here = random_product(8, 1024, 2048, torch.float16)
    there = here.with_(a=here.a.to("cuda:1"), b=here.b.to("cuda:1"))
    gemm(here, backend=kernel)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated(0)
    for tile in [None, *widest_splits(there, kernel)]:
        got = gemm(there, backend=kernel) if tile is None else by_tile(there, tile)
        assert got.device == there.a.device
        assert torch.cuda.current_device() == 0
        assert_close_to(got, there.exact(), there.honest(), f"{tile or kernel} on cuda:1")
        assert_bit_equal(got.cpu(), (gemm(here, backend=kernel) if tile is None else by_tile(here, tile)).cpu())
    assert torch.cuda.memory_allocated(0) == before
    with pytest.raises(ValueError, match="gemm: b is on cuda:0 but a is on cuda:1"):
        gemm(there.with_(b=here.b), backend=kernel)

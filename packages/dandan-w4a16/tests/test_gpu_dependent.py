"""Dependent launches: chains of writers and readers give the bits of plain launches, whatever overlaps.

Weights are read before the kernel in front has ended, activations and out are not. Small layers, so that the next
kernel starts while the one before is at work.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise

import pytest
import torch
from gpu_cases import (
    EVERY_KERNEL,
    KERNELS,
    WITH_BIAS,
    Layer,
    by_tile,
    layer,
    most_rows,
    random_x,
    tiles,
    whole_x,
    widest_splits,
)

from dandan_ops_core.testing import assert_bit_equal
from dandan_w4a16 import Int4Weight, QuantizedLinear, w4a16_linear
from dandan_w4a16._ops import LIBRARY
from dandan_w4a16.packed import packed_linear

pytestmark = pytest.mark.gpu

Step = Callable[[torch.Tensor, Layer, torch.Tensor], object]


@pytest.fixture
def dependent() -> Iterator[Callable[[bool], None]]:
    """Turns dependent launches on or off; the setting from before comes back."""
    switch = LIBRARY.op("set_dependent_launch")
    before = switch(1)
    yield lambda on: switch(int(on))
    switch(before)


def chain(step: Step, layers: list[Layer], x: torch.Tensor, buffers: list[torch.Tensor]) -> list[torch.Tensor]:
    """Each product reads what the one before wrote, into buffers that are used again; what came between is kept."""
    kept = []
    current = x
    for number, made in enumerate(layers):
        out = buffers[number % len(buffers)][:, : made.n]
        step(current, made, out)
        kept.append(out.clone() if number % 3 == 0 else out.abs())
        # A writer of the next activation that is no kernel of ours.
        current = out.mul_(0.25) if number % 4 == 3 else out
    return kept


def check_chain(step: Step, rows: int, name: str, dependent: Callable[[bool], None], bias: bool) -> None:
    sizes = [256, 520, 64, 1032, 128, 264, 2048, 72, 256]
    layers = [
        layer(n, k, (32, 64, 128)[i % 3], whole=False, bias=bias and i % 2 == 0, seed=i)
        for i, (k, n) in enumerate(pairwise(sizes))
    ] * 3
    x = random_x(rows, sizes[0])
    # Rows at multiples of 16 bytes: read where they were written.
    buffers = [torch.zeros(rows, 2048, device="cuda", dtype=torch.float16) for _ in range(2)]
    torch.cuda.synchronize()
    dependent(False)
    expected = chain(step, layers, x, buffers)
    torch.cuda.synchronize()
    dependent(True)
    for repetition in range(10):
        for found, wanted in zip(chain(step, layers, x, buffers), expected, strict=True):
            assert_bit_equal(found, wanted, f"{name}, eager {repetition}")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = chain(step, layers, x, buffers)
    for repetition in range(20):
        for each in captured:
            each.fill_(float("nan"))
        graph.replay()
        for found, wanted in zip(captured, expected, strict=True):
            assert_bit_equal(found, wanted, f"{name}, graph {repetition}")


@EVERY_KERNEL
def test_chains_of_one_kernel(kernel: str, dependent: Callable[[bool], None]) -> None:
    most = most_rows(kernel)
    for rows in (1, 8, 16, 70):
        if most is None or rows <= most:

            def step(x: torch.Tensor, made: Layer, out: torch.Tensor) -> None:
                packed_linear(*made.inputs(x), out=out, backend=kernel)

            check_chain(step, rows, f"{kernel}, {rows} rows", dependent, kernel in WITH_BIAS)


@EVERY_KERNEL
def test_chains_of_every_configuration(kernel: str, dependent: Callable[[bool], None]) -> None:
    """Without slices of K and with as many as each takes, so that clusters end while the next kernel begins."""
    most_rows(kernel)
    probe = layer(64, 2048, 64)
    for tile in widest_splits(probe, whole_x(8, 2048), kernel):

        def step(x: torch.Tensor, made: Layer, out: torch.Tensor, number: int = tile.number) -> None:
            fitting = [each for each in tiles(made, x, kernel) if each.number == number]
            by_tile(made, x, max(fitting, key=lambda each: each.split), out)

        check_chain(step, 8, f"{tile}", dependent, kernel in WITH_BIAS)


def test_chains_of_mixed_kernels(dependent: Callable[[bool], None]) -> None:
    """Kernels after each other, and between them w4a16_linear, whose weight is written by the kernel in front."""
    turn = 0

    def step(x: torch.Tensor, made: Layer, out: torch.Tensor) -> None:
        nonlocal turn
        turn += 1
        ways = [kernel for kernel in KERNELS if tiles(made, x, kernel)]
        if turn % (len(ways) + 1) == 0 and made.k % made.group == 0:
            w4a16_linear(x, *made.canonical, group_size=made.group, bias=made.bias, out=out, backend=ways[turn % 2])
        else:
            packed_linear(*made.inputs(x), out=out, backend=ways[turn % len(ways)])

    layers = [layer(n, k, 64, whole=False, seed=i) for i, (k, n) in enumerate(((256, 512), (512, 64), (64, 256)))] * 8
    x = random_x(8, 256)
    buffers = [torch.zeros(8, 512, device="cuda", dtype=torch.float16) for _ in range(2)]
    torch.cuda.synchronize()
    results = []
    for on in (False, True, True, True):
        dependent(on)
        turn = 0
        results.append(chain(step, layers, x, buffers))
        torch.cuda.synchronize()
    for found in results[1:]:
        for mine, wanted in zip(found, results[0], strict=True):
            assert_bit_equal(mine, wanted)


def test_weights_that_come_and_go(dependent: Callable[[bool], None]) -> None:
    """Modules are made while the stream is at work, and freed; the allocator hands their memory to others. Each path
    that makes a packed weight ends with a synchronisation, so no kernel reads the weight that was there before.
    """
    dependent(True)
    made = [layer(520, 1024, 64, seed=seed) for seed in range(4)]
    x = whole_x(8, 1024)
    exact = [each.exact(x).half() for each in made]
    ways: list[Callable[[Int4Weight], QuantizedLinear]] = [
        QuantizedLinear.from_packed,
        lambda weight: QuantizedLinear.from_packed(weight.to("cpu")).cuda(),
        lambda weight: QuantizedLinear.from_packed(weight)._apply(torch.clone),
    ]
    for repetition in range(60):
        which = repetition % 4
        filler = torch.full((1 << 20,), float("nan"), device="cuda", dtype=torch.float16)
        del filler  # memory full of NaN for the weight to come
        module = ways[repetition % len(ways)](Int4Weight(*made[which].canonical, 64))
        assert module.is_finalized
        busy = x
        for _ in range(3):
            busy = busy * 1.0
        found = module(busy)
        assert_bit_equal(found, exact[which], f"repetition {repetition}")
        del module

"""Dependent launches: kernels that start while the one before them ends see every bit as with a barrier between."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from gemm_cases import KERNELS, Tile, random_product, tiles

import dandan_gemm
from dandan_gemm._ops import LIBRARY, run_tile

pytestmark = pytest.mark.gpu

Gemm = Callable[..., torch.Tensor]
Fence = Callable[[], None]
Pair = tuple[torch.Tensor, torch.Tensor]
EVERY_KERNEL = pytest.mark.parametrize("kernel", KERNELS)
STEPS = 24


@pytest.fixture
def dependent() -> Iterator[Callable[[bool], None]]:
    """Switches dependent launches; the setting is restored."""
    before = LIBRARY.op("set_dependent_launch")(1)
    yield lambda enabled: LIBRARY.op("set_dependent_launch")(int(enabled))
    LIBRARY.op("set_dependent_launch")(before)


def ways(kernel: str, m: int, n: int, k: int) -> list[tuple[str, Gemm]]:
    """The kernel's own choice, then a selection of its configurations and splits from the cheapest to the dearest."""
    product = random_product(m, n, k, torch.float16)

    def by_tile(tile: Tile) -> Gemm:
        return lambda a, b, **keywords: run_tile(
            a, b, kernel=tile.kernel, config=tile.number, split=tile.split, weight_transposed=True, **keywords
        )

    def by_name(a: torch.Tensor, b: torch.Tensor, **keywords: Any) -> torch.Tensor:
        return dandan_gemm.gemm(a, b, weight_transposed=True, backend=kernel, **keywords)

    found = tiles(product, kernel)
    chosen = dict.fromkeys([*found[:2], *found[2:-1:7], found[-1]])
    return [(f"{kernel}, own choice", by_name), *((str(tile), by_tile(tile)) for tile in chosen)]


def changing_weights(
    gemm: Gemm, x: torch.Tensor, w: torch.Tensor, pairs: list[Pair], fence: Fence
) -> list[torch.Tensor]:
    """Between two products that read the weight, one of our own kernels writes it. It lets the next kernel start early,
    which may not read before it waits; nor may the writer write while the reader before it reads. Activations are
    written by ours and by torch's kernels in turns, into memory that was just read.
    """
    x, w, seen = x.clone(), w.clone(), []
    k = x.shape[1]
    for step in range(STEPS):
        fence()
        y = gemm(x, w)
        fence()
        writer = "sm80_mma" if step % 2 else "cuda"
        dandan_gemm.gemm(*pairs[step % len(pairs)], weight_transposed=True, out=w, backend=writer)
        fence()
        z = gemm(x, w)
        fence()
        u = gemm(z[:, :k], w)
        fence()
        x.copy_(((u + y)[:, :k] * 0.7).clamp(-4, 4))  # keeps the magnitude over the steps
        fence()
        if step % 3 == 0:
            w.copy_(w.flip(0))
        seen += [y, z, u, x.clone()]
    return seen


def standing_weights(
    gemm: Gemm, x: torch.Tensor, weights: list[torch.Tensor], fence: Fence, **keywords: Any
) -> list[torch.Tensor]:
    """Each product's activation is written by the product before it; nobody writes the weights."""
    seen = []
    for step in range(STEPS):
        fence()
        y = gemm(x, weights[step % len(weights)], **keywords)
        seen.append(y)
        x = y[:, : x.shape[1]]
    return seen


def assert_same(got: list[torch.Tensor], expected: list[torch.Tensor], name: str) -> None:
    assert all(torch.isfinite(each).all() for each in expected)
    same = [torch.equal(a.view(torch.int16), b.view(torch.int16)) for a, b in zip(got, expected, strict=True)]
    assert all(same), f"{name}: result {same.index(False)} of {len(same)} differs"


SIZES = [(1, 1024, 512), (8, 1024, 1024), (16, 520, 264)]
"""n >= k, so that a slice of a result is the next activation."""


@EVERY_KERNEL
def test_chain_that_rewrites_weights(kernel: str, dependent: Callable[[bool], None]) -> None:
    """static_weight=False: eagerly and in a graph, the bits of the chain with a synchronisation after each call."""
    for m, n, k in SIZES:
        product = random_product(m, n, k, torch.float16, seed=m)
        sources = [random_product(n, k, 64, torch.float16, seed=seed) for seed in (1, 2)]
        pairs = [(each.a, each.b * k**-0.5) for each in sources]  # whose products are weights of the usual magnitude
        for name, gemm in ways(kernel, m, n, k):
            dependent(False)
            expected = changing_weights(gemm, product.a, product.b, pairs, torch.cuda.synchronize)
            dependent(True)
            for _ in range(2):
                got = changing_weights(gemm, product.a, product.b, pairs, lambda: None)
                assert_same(got, expected, f"{name}, {m}x{n}x{k}, eager")
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                captured = changing_weights(gemm, product.a, product.b, pairs, lambda: None)
            for _ in range(2):
                graph.replay()
                assert_same(captured, expected, f"{name}, {m}x{n}x{k}, graph")


@EVERY_KERNEL
def test_chain_of_static_weights(kernel: str, dependent: Callable[[bool], None]) -> None:
    """static_weight=True: weights are read before the kernel before has ended, activations are not."""
    for m, n, k in SIZES:
        products = [random_product(m, n, k, torch.float16, seed=seed) for seed in range(3)]
        weights, x = [product.b for product in products], products[0].a
        torch.cuda.synchronize()
        for name, gemm in ways(kernel, m, n, k):
            dependent(False)
            expected = standing_weights(gemm, x, weights, torch.cuda.synchronize, static_weight=True)
            dependent(True)
            for _ in range(3):
                got = standing_weights(gemm, x, weights, lambda: None, static_weight=True)
                assert_same(got, expected, f"{name}, {m}x{n}x{k}, eager")
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                captured = standing_weights(gemm, x, weights, lambda: None, static_weight=True)
            for _ in range(3):
                for each in captured:
                    each.fill_(float("nan"))
                graph.replay()
                assert_same(captured, expected, f"{name}, {m}x{n}x{k}, graph")


def test_copied_weight_is_never_read_early(dependent: Callable[[bool], None]) -> None:
    """static_weight=True speaks of b, not of the copy of b that the call itself makes."""
    product = random_product(8, 520, 264, torch.float16)
    holder = torch.zeros(520, 528, device="cuda", dtype=torch.float16)
    holder[:, ::2] = product.b
    torch.cuda.synchronize()
    for kernel in KERNELS:
        dependent(False)
        expected = dandan_gemm.gemm(product.a, product.b, weight_transposed=True, static_weight=True, backend=kernel)
        info = dandan_gemm.gemm_execution_info(
            product.a, holder[:, ::2], weight_transposed=True, static_weight=True, backend=kernel
        )
        assert info.copies == ("b",)
        dependent(True)
        for _ in range(50):
            got = dandan_gemm.gemm(
                product.a, holder[:, ::2], weight_transposed=True, static_weight=True, backend=kernel
            )
            assert torch.equal(got, expected), kernel

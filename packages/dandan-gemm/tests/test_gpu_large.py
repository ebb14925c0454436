"""More than 2^31 elements in a, b or out: offsets beyond 32 bits in every kernel."""

from __future__ import annotations

import pytest
import torch
from gemm_cases import EVERY_KERNEL_AND_LAYOUT, KERNELS, Product, assert_exact, tiles, whole_numbers

import dandan_gemm
from dandan_gemm._ops import run_tile
from dandan_ops_core.testing import guarded_empty

pytestmark = [pytest.mark.gpu, pytest.mark.large]

EVERY_KERNEL = pytest.mark.parametrize("kernel", KERNELS)
BEYOND = (1 << 31) + (1 << 16)  # a multiple of 8 rows of either side


def values(*shape: int, seed: int) -> torch.Tensor:
    """Whole numbers, made in pieces: their generator works in int64."""
    generator = torch.Generator("cuda").manual_seed(seed)
    made = torch.empty(shape, device="cuda", dtype=torch.float16)
    for piece in made.split(max(1, (1 << 27) // shape[1])):
        piece.copy_(whole_numbers(generator, *piece.shape))
    return made


def ends(size: int, row: int) -> list[int]:
    """Rows of `row` elements at both ends and on either side of 2^30, 2^31 and 2^32 bytes."""
    marks = [mark // row + step for mark in (1 << 29, 1 << 30, 1 << 31) for step in (-1, 0, 1)]
    return sorted({0, size - 1, *(mark for mark in marks if 0 <= mark < size)})


def check(product: Product, kernel: str, rows: list[int], columns: list[int]) -> None:
    """The whole product between guard bands; the chosen rows and columns against FP64."""
    out = guarded_empty((product.m, product.n), torch.float16, "cuda", name=f"{product} by {kernel}")
    dandan_gemm.gemm(product.a, product.b, out=out.tensor, backend=kernel, **product.keywords)
    torch.cuda.synchronize()
    out.check()
    b = product.b[columns] if product.weight_transposed else product.b[:, columns]
    some = product.with_(a=product.a[rows], b=b)
    assert_exact(out.tensor[rows][:, columns], some.exact(), f"{product} by {kernel}")


@EVERY_KERNEL_AND_LAYOUT
def test_large_b(kernel: str, weight_transposed: bool) -> None:
    k = 1024
    n = BEYOND // k
    b = values(*((n, k) if weight_transposed else (k, n)), seed=1)
    product = Product(values(8, k, seed=2), b, None, weight_transposed)
    # [K, N]: the offsets grow with K, so every column passes 2^31.
    columns = ends(n, k) if weight_transposed else [0, n // 2, n - 1]
    check(product, kernel, list(range(8)), columns)


@EVERY_KERNEL
def test_large_a(kernel: str) -> None:
    k = 1024
    if kernel == "skinny":  # few rows that are far apart
        apart = torch.empty((3 << 30) + k, device="cuda", dtype=torch.float16).as_strided((4, k), (1 << 30, 1))
        apart.copy_(values(4, k, seed=1))
        check(Product(apart, values(72, k, seed=2)), kernel, [0, 1, 2, 3], list(range(72)))
    else:
        product = Product(values(BEYOND // k, k, seed=1), values(72, k, seed=2))
        check(product, kernel, ends(product.m, k), list(range(72)))


@EVERY_KERNEL
def test_large_out(kernel: str) -> None:
    m, n = (8, BEYOND // 8) if kernel == "skinny" else (BEYOND // (1 << 16), 1 << 16)
    product = Product(values(m, 16, seed=1), values(n, 16, seed=2))
    check(product, kernel, list(range(8)) if kernel == "skinny" else ends(m, n), [0, 1, n // 2, n - 1])


@pytest.mark.parametrize("kernel", ["sm80_mma", "sm90_tma_mma"])
def test_large_workspace(kernel: str) -> None:
    """FP32 sums of slices: split * m * n elements beyond 2^31."""
    m, n, k = 16384, 16384, 1024
    product = Product(values(m, k, seed=1), values(n, k, seed=2))
    tile = next(each for each in tiles(product, kernel) if each.split == 8)
    out = guarded_empty((m, n), torch.float16, "cuda")
    run_tile(product.a, product.b, kernel=kernel, config=tile.number, split=8, weight_transposed=True, out=out.tensor)
    torch.cuda.synchronize()
    out.check()
    rows = [0, 1, m // 2, m - 1]
    assert_exact(out.tensor[rows], product.with_(a=product.a[rows]).exact(), str(tile))

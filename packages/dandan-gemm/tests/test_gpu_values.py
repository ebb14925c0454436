"""Values of every kernel, configuration and split in guard bands: whole numbers bit by bit, others against FP64."""

from __future__ import annotations

import pytest
import torch
from gemm_cases import (
    DTYPES,
    EDGES,
    EVERY_KERNEL_AND_LAYOUT,
    KERNELS,
    MOST_SKINNY_ROWS,
    Product,
    assert_exact,
    check_close,
    check_exact,
    configurations,
    layouts,
    random_product,
    reads_rows_along_k,
    run,
    tiles,
    whole_product,
)

import dandan_gemm
from dandan_ops_core.testing import assert_bit_equal

pytestmark = pytest.mark.gpu

LAYOUTS = pytest.mark.parametrize("weight_transposed", [True, False], ids=["[N,K]", "[K,N]"])
EVERY_KERNEL = pytest.mark.parametrize("kernel", KERNELS)
EVERY_DTYPE = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def fitting(kernel: str, k: int) -> int:
    """The nearest K that a kernel takes: skinny reads whole vectors."""
    return -(-k // 8) * 8 if kernel == "skinny" else k


@EVERY_DTYPE
@EVERY_KERNEL_AND_LAYOUT
def test_edges_of_tiles(kernel: str, dtype: torch.dtype, weight_transposed: bool) -> None:
    """A10: odd and unaligned sizes. A Latin square: each pair of two edges, in any two dimensions, occurs once; each
    product by the kernel's own choice and by one configuration after the other.
    """
    ran = 0
    for i, m in enumerate(EDGES):
        for j, n in enumerate(EDGES):
            product = whole_product(
                m,
                n,
                fitting(kernel, EDGES[(i + j) % len(EDGES)]),
                dtype,
                weight_transposed=weight_transposed,
                bias=(i + j) % 2 == 0,
                aligned=kernel != "sm80_mma" or i % 2 == 0,
                seed=i,
            )
            found = tiles(product, kernel)
            if kernel == "skinny" and m > MOST_SKINNY_ROWS:
                assert not found
                continue
            exact = product.exact()
            check_exact(product, kernel, exact)
            check_exact(product, found[(len(EDGES) * i + j) % len(found)], exact)
            ran += 1
    rows = [m for m in EDGES if kernel != "skinny" or m <= MOST_SKINNY_ROWS]
    assert ran == len(rows) * len(EDGES)


@EVERY_DTYPE
@EVERY_KERNEL_AND_LAYOUT
def test_every_configuration_and_split(kernel: str, dtype: torch.dtype, weight_transposed: bool) -> None:
    """Each at one tile more and one less than whole, and at whole tiles; K long enough for all splits, with a tail."""
    for number, config in enumerate(configurations(kernel)):
        tile_m, tile_n, tile_k, most = (config[name] for name in ("tile_m", "tile_n", "tile_k", "max_split"))
        hit = set()
        for m, n, k in (
            (tile_m + 1, tile_n + 1, tile_k * most + 24),
            (2 * tile_m, 2 * tile_n, tile_k * most),
            (tile_m - 1, tile_n - 1, 2 * tile_k + 8),
        ):
            rows = min(m, tile_m) if kernel == "skinny" else m  # it has one tile of rows
            product = whole_product(rows, n, k, dtype, weight_transposed=weight_transposed, bias=True, seed=number)
            exact = product.exact()
            for tile in tiles(product, kernel):
                if tile.number == number:
                    check_exact(product, tile, exact)
                    hit.add(tile.split)
        wanted = set(config["splits"]) if weight_transposed or reads_rows_along_k(kernel, config) else set()
        assert hit == wanted, f"{kernel} {config['name']}"


@EVERY_DTYPE
@EVERY_KERNEL_AND_LAYOUT
def test_sizes_of_models(kernel: str, dtype: torch.dtype, weight_transposed: bool) -> None:
    """Layers of Qwen3-0.6B and one wide N, on random numbers, against FP64."""
    for m, n, k in ((1, 4096, 1024), (5, 1024, 2048), (16, 1024, 3072), (64, 6144, 1024), (200, 1024, 3072)):
        product = random_product(m, n, k, dtype, weight_transposed=weight_transposed, bias=m != 16, seed=m)
        if kernel != "skinny" or m <= MOST_SKINNY_ROWS:
            check_close(product, kernel)
    for backend in ("auto", "cuda"):
        check_close(random_product(3, 9000, 512, dtype, weight_transposed=weight_transposed), backend)


@pytest.mark.sanitize
@EVERY_KERNEL_AND_LAYOUT
def test_smallest_sizes_with_tails(kernel: str, weight_transposed: bool) -> None:
    """One tile and a bit with a tail of K, without and with slices of K: each part of a kernel runs."""
    product = whole_product(9, 72, 520, torch.float16, weight_transposed=weight_transposed, bias=True)
    exact, found = product.exact(), tiles(product, kernel)
    check_exact(product, kernel, exact)
    check_exact(product, next(tile for tile in found if tile.split == 1), exact)
    check_exact(product, next(tile for tile in found if tile.split > 1), exact)


@pytest.mark.parametrize(("m", "k", "n"), [(2, 3, 4), (3, 5, 7), (1, 1, 1), (2, 4099, 6)])
@LAYOUTS
@EVERY_DTYPE
def test_sizes_of_no_vector(m: int, k: int, n: int, dtype: torch.dtype, weight_transposed: bool) -> None:
    """A10: the reported sizes; whole numbers 0..11 as the report has them, so every product is exact."""
    a = (torch.arange(m * k, device="cuda") % 12).view(m, k).to(dtype)
    b = (torch.arange(n * k, device="cuda") % 12).view(*((n, k) if weight_transposed else (k, n))).to(dtype)
    for backend in ("auto", "cuda", "sm80_mma"):
        check_exact(Product(a, b, None, weight_transposed), backend)


@EVERY_DTYPE
@pytest.mark.parametrize("m", [1, 64])
def test_partial_sums_beyond_the_range_of_fp16(m: int, dtype: torch.dtype) -> None:
    """A37: partial sums of 819,200 cancel to exactly 0 in every configuration and split."""
    n, k = 64, 4096
    a = torch.full((m, k), 200.0, device="cuda", dtype=dtype)
    a[:, k // 2 :] = -200.0
    zero, ran = torch.zeros(m, n, device="cuda", dtype=torch.float64), set()
    for weight_transposed in (True, False):
        b = torch.full((n, k) if weight_transposed else (k, n), 2.0, device="cuda", dtype=dtype)
        product = Product(a, b, None, weight_transposed)
        for tile in tiles(product):
            check_exact(product, tile, zero)
            ran.add(tile.kernel)
    assert ran == set(KERNELS) - ({"skinny"} if m > MOST_SKINNY_ROWS else set())


@EVERY_DTYPE
@EVERY_KERNEL
def test_bias_is_added_before_the_one_rounding(kernel: str, dtype: torch.dtype) -> None:
    """2049 + 1 in FP16, 257 + 1 in BF16: a sum rounded before the bias comes would lose both ones."""
    ones = 2049 if dtype == torch.float16 else 257
    a, b = (torch.zeros(rows, 2056, device="cuda", dtype=dtype) for rows in (3, 24))
    a[:, :ones], b[:, :ones] = 1.0, 1.0
    product = Product(a, b, torch.ones(24, device="cuda", dtype=dtype))
    for tile in tiles(product, kernel):
        got = run(product, tile)
        assert torch.equal(got, torch.full_like(got, ones + 1)), str(tile)


@EVERY_KERNEL
def test_ends_of_the_range(kernel: str) -> None:
    """Subnormal inputs count, sums beyond the range of FP16 become infinity, those of BF16 do not."""
    small = Product(
        torch.full((2, 64), 2.0**-24, device="cuda", dtype=torch.float16),
        torch.full((8, 64), 1024.0, device="cuda", dtype=torch.float16),
    )
    got = run(small, kernel)
    assert torch.equal(got, torch.full_like(got, 64 * 2.0**-14))
    for dtype, wanted in ((torch.float16, float("inf")), (torch.bfloat16, 64 * 256.0**2)):
        large = torch.full((8, 64), 256.0, device="cuda", dtype=dtype)
        got = run(Product(large[:2], large), kernel)
        assert torch.equal(got, torch.full_like(got, wanted))


@EVERY_KERNEL_AND_LAYOUT
def test_nan_and_infinity_stay_in_their_row_and_column(kernel: str, weight_transposed: bool) -> None:
    clean = whole_product(7, 72, 200, torch.float16, weight_transposed=weight_transposed)
    expected = check_exact(clean, kernel)
    for bad in (float("nan"), float("inf")):
        a, b = clean.a.clone(), clean.b.clone()
        a[3, 100] = bad
        (b if weight_transposed else b.t())[17, 50] = bad
        got = run(clean.with_(a=a, b=b), kernel)
        assert not torch.isfinite(got[3]).any()
        assert not torch.isfinite(got[:, 17]).any()
        got[3], got[:, 17] = expected[3], expected[:, 17]
        assert_bit_equal(got, expected, f"{kernel} {bad}")


@pytest.mark.parametrize("a_shape", [(1, 128), (1, 1, 128), (9, 128), (128,)], ids=str)
def test_declared_layout_decides_never_the_shape(a_shape: tuple[int, ...]) -> None:
    """A45: K=128, N=64 and K=N=128, weights of either layout, the path of one row and that of nine."""
    for n in (64, 128):
        whole = whole_product(9, n, 128, torch.float16, aligned=False, seed=n)
        wanted = whole.exact()[: a_shape[0] if len(a_shape) == 2 else 1].view(*a_shape[:-1], n)
        a = whole.a.flatten()[: torch.Size(a_shape).numel()].view(a_shape)
        for backend in ("auto", "cuda", "torch", *KERNELS):
            for weight_transposed in layouts(backend):
                b = whole.b if weight_transposed else whole.b.t().contiguous()
                got = dandan_gemm.gemm(a, b, weight_transposed=weight_transposed, backend=backend)
                assert_exact(got, wanted, f"{backend} {a_shape} N={n} weight_transposed={weight_transposed}")
        if n == 64:
            for b, weight_transposed in ((whole.b, False), (whole.b.t().contiguous(), True)):
                with pytest.raises(ValueError, match="gemm: b has K=64 but a has K=128; with weight_transposed="):
                    dandan_gemm.gemm(a, b, weight_transposed=weight_transposed)


@EVERY_DTYPE
def test_every_caller_gets_the_same_choice(dtype: torch.dtype) -> None:
    """A54: around each number of rows where routes change, the call that allocates, the call with out=, leading
    dimensions and gemm_execution_info agree.
    """
    for m in (1, 8, 9, 16, 17, 32, 33, 64, 65, 128, 129, 1024):
        product = random_product(m, 1024, 2048, dtype, seed=m)
        for backend in ("auto", "cuda"):
            got = dandan_gemm.gemm(product.a, product.b, backend=backend, **product.keywords)
            assert_bit_equal(run(product, backend), got, f"{product} {backend} out=")
            deep = dandan_gemm.gemm(product.a.view(1, m, 2048), product.b, backend=backend, **product.keywords)
            assert_bit_equal(deep[0], got, f"{product} {backend} leading dimensions")
            info = dandan_gemm.gemm_execution_info(product.a, product.b, backend=backend, **product.keywords)
            if info.profile is None:  # a table's row may name another configuration than the kernel itself would take
                named = dandan_gemm.gemm(product.a, product.b, backend=info.kernel, **product.keywords)
                assert_bit_equal(named, got, f"{product} {backend} and {info.kernel}")

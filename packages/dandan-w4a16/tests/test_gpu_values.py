"""Values of every kernel, configuration and split in guard bands: weights read out one by one, whole numbers bit by
bit, others against FP64; and the two orders of a weight.
"""

from __future__ import annotations

import pytest
import torch
from gpu_cases import (
    DEPTHS,
    DTYPES,
    EDGES,
    EVERY_DTYPE,
    EVERY_GROUP,
    EVERY_KERNEL,
    EVERY_KERNEL_WITH_BIAS,
    GROUPS,
    WITH_BIAS,
    assert_exact,
    by_tile,
    check_close,
    check_exact,
    configurations,
    layer,
    most_rows,
    random_x,
    run,
    tiles,
    whole_x,
)

from dandan_ops_core.testing import assert_bit_equal, guarded_empty
from dandan_w4a16 import kernel_order
from dandan_w4a16._ops import KERNELS, LIBRARY

pytestmark = pytest.mark.gpu


# ------------------------------------------------------------------------------------------------------ the two orders


@EVERY_DTYPE
@EVERY_GROUP
def test_putting_in_order_and_back(dtype: torch.dtype, group: int) -> None:
    """Bit for bit what the CPU kernel does, padding included, and bit for bit back."""
    sizes = [(n, DEPTHS[(i + j) % len(DEPTHS)]) for i, n in enumerate(EDGES) for j in range(3)]
    for seed, (n, k) in enumerate([*sizes, (1000, 4096)]):
        made = layer(n, k, group, dtype, seed=seed)
        expected = kernel_order.repack(*(t.cpu() for t in made.canonical), group)
        for found, wanted in zip((made.codes, made.pairs), expected, strict=True):
            assert_bit_equal(found.cpu(), wanted, f"{made}")
        back = LIBRARY.op("unpack")(made.codes, made.pairs, n, k, group)
        for found, wanted in zip(back, made.canonical, strict=True):
            assert_bit_equal(found, wanted, f"{made}")


@EVERY_DTYPE
def test_every_bit_of_a_scale_comes_back(dtype: torch.dtype) -> None:
    """Signs of zero, subnormal numbers, NaN and infinity included: moving is no arithmetic."""
    scales = torch.arange(-(1 << 15), 1 << 15, device="cuda").to(torch.int16).view(dtype).view(-1, 4)
    rows = scales.shape[0]
    words = torch.zeros(rows, 16, dtype=torch.int32, device="cuda")
    codes, pairs = LIBRARY.op("repack")(words, scales, torch.zeros_like(scales, dtype=torch.uint8), 32)
    assert_bit_equal(LIBRARY.op("unpack")(codes, pairs, rows, 128, 32)[1], scales)


def test_weights_of_other_layouts_are_put_in_order() -> None:
    made = layer(136, 256, 64)
    wide = [torch.cat((t, t), 1)[:, t.shape[1] :] for t in made.canonical]
    turned = [t.t().contiguous().t() for t in made.canonical]
    for given in (wide, turned):
        for found, wanted in zip(LIBRARY.op("repack")(*given, 64), (made.codes, made.pairs), strict=True):
            assert_bit_equal(found, wanted)


# -------------------------------------------------------------------------------------------------------------- weights


@EVERY_DTYPE
@EVERY_GROUP
@EVERY_KERNEL
def test_the_identity_reads_out_every_weight(kernel: str, dtype: torch.dtype, group: int) -> None:
    """A38: through every configuration and split, with tails of N and K. Rows of x are those of the identity, as many
    at a time as the kernel takes.
    """
    limited = most_rows(kernel) is not None
    n, k = 264, 5 * 64 + 40
    made = layer(n, k, group, dtype, whole=False)
    x = torch.eye(k, dtype=dtype, device="cuda")
    for number, config in enumerate(configurations(kernel)):
        step = config["tile_m"] if limited else k
        found = [tile for tile in tiles(made, x[:step], kernel) if tile.number == number]
        assert [tile.split for tile in sorted(found, key=lambda tile: tile.split)] == [
            split for split in config["splits"] if split <= -(-k // 64)
        ]
        for tile in found:
            with guarded_empty((k, n), dtype, "cuda", name=f"{made} by {tile}") as out:
                for first in range(0, k, step):
                    by_tile(made, x[first : first + step], tile, out.tensor[first : first + step])
            assert_bit_equal(out.tensor.t().contiguous() + 0.0, made.weight + 0.0, f"{made} by {tile}")


@EVERY_DTYPE
@EVERY_KERNEL
def test_every_code_zero_and_kind_of_scale(kernel: str, dtype: torch.dtype) -> None:
    """All 256 pairs of a code and a zero, by scales that round, that are near the largest, subnormal, negative, 0."""
    most_rows(kernel)
    largest = torch.finfo(dtype).max
    kinds = torch.tensor([0.1, -0.3, largest / 16, 1e-7 if dtype == torch.float16 else 1e-30, 0.0, 1.0], device="cuda")
    n = 16 * len(kinds)
    blank = layer(n, 32, 32, dtype)
    codes = (torch.arange(32, device="cuda") % 16).expand(n, 32)
    words = (codes.view(n, 4, 8).to(torch.int64) << (4 * torch.arange(8, device="cuda"))).sum(-1)
    qweight = torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)
    zeros = (torch.arange(n, device="cuda") % 16).view(n, 1).to(torch.uint8)
    scales = kinds.repeat_interleave(16).view(n, 1).to(dtype)
    weight = ((codes.float() - zeros.float()) * scales.float()).to(dtype)
    ordered = LIBRARY.op("repack")(qweight, scales, zeros, 32)
    made = blank.with_(codes=ordered[0], pairs=ordered[1], weight=weight)
    x = torch.eye(32, dtype=dtype, device="cuda")
    for rows in (x[:16], x[16:]):
        for tile in tiles(made, rows, kernel):
            found = by_tile(made, rows, tile)
            assert_bit_equal(found + 0.0, (rows.double() @ weight.double().t()).to(dtype) + 0.0, f"{tile}")


# ---------------------------------------------------------------------------------------------------------------- sizes


@EVERY_DTYPE
@EVERY_KERNEL
def test_edges_of_tiles(kernel: str, dtype: torch.dtype) -> None:
    """Each pair of an M and an N at the edge of a tile, K and group in turn; each product by the kernel's own choice
    and by one configuration after the other.
    """
    most, ran = most_rows(kernel), 0
    for j, n in enumerate(EDGES):
        made = layer(n, DEPTHS[j % len(DEPTHS)], GROUPS[j % 3], dtype, bias=j % 2 == 0 and kernel in WITH_BIAS, seed=j)
        for i, m in enumerate(EDGES):
            x = whole_x(m, made.k, dtype, seed=i)
            found = tiles(made, x, kernel)
            if most is not None and m > most:
                assert not found
                continue
            exact = made.exact(x)
            check_exact(made, x, kernel, exact)
            check_exact(made, x, found[(len(EDGES) * j + i) % len(found)], exact)
            ran += 1
    assert ran == len(EDGES) * len([m for m in EDGES if most is None or m <= most])


@EVERY_DTYPE
@EVERY_KERNEL
def test_every_configuration_and_split(kernel: str, dtype: torch.dtype) -> None:
    """Each at one tile more and one less than whole, and at whole tiles; K long enough for all splits, with a tail."""
    most = most_rows(kernel)
    for number, config in enumerate(configurations(kernel)):
        tile_m, tile_n, slices = (config[name] for name in ("tile_m", "tile_n", "max_split"))
        hit = set()
        for turn, (m, n, k) in enumerate(
            (
                (tile_m + 1, tile_n + 1, 64 * slices + 24),
                (2 * tile_m, 2 * tile_n, 64 * slices),
                (tile_m - 1, tile_n - 1, 2 * 64 + 8),
            )
        ):
            made = layer(n, k, GROUPS[(number + turn) % 3], dtype, bias=kernel in WITH_BIAS, seed=number)
            x = whole_x(m if most is None else min(m, tile_m), k, dtype)
            exact = made.exact(x)
            for tile in tiles(made, x, kernel):
                if tile.number == number:
                    check_exact(made, x, tile, exact)
                    hit.add(tile.split)
        assert hit == set(config["splits"]), f"{kernel} {config['name']}"


@EVERY_DTYPE
@EVERY_KERNEL
def test_long_k(kernel: str, dtype: torch.dtype) -> None:
    """More blocks of K than any ring of stages holds, so that each place of it is used again; K odd in blocks."""
    most = most_rows(kernel)
    made = layer(192, 64 * 101 + 8, 64, dtype, bias=kernel in WITH_BIAS)
    x = whole_x(most or 70, made.k, dtype)
    exact = made.exact(x)
    for tile in tiles(made, x, kernel):
        check_exact(made, x, tile, exact)


@EVERY_DTYPE
@EVERY_GROUP
def test_sizes_of_models(dtype: torch.dtype, group: int) -> None:
    """Layers of Qwen3-0.6B and one wide N, on random numbers, against FP64."""
    for m, n, k in ((1, 4096, 1024), (5, 1024, 2048), (16, 1024, 3072), (64, 6144, 1024), (200, 1024, 3072)):
        made, x = layer(n, k, group, dtype, bias=m != 16, whole=False), random_x(m, k, dtype)
        for kernel in ("auto", "cuda", *KERNELS):
            if kernel in ("auto", "cuda") or tiles(made, x, kernel):
                check_close(made, x, kernel)
    check_close(layer(9000, 512, group, dtype, whole=False), random_x(3, 512, dtype), "auto")


@pytest.mark.sanitize
@EVERY_KERNEL
def test_smallest_sizes_with_tails(kernel: str) -> None:
    """One tile and a bit with a tail of K, without and with slices of K: each part of a kernel runs."""
    most_rows(kernel)
    for group in GROUPS:
        made, x = layer(72, 520, group, bias=kernel in WITH_BIAS), whole_x(9, 520)
        exact, found = made.exact(x), tiles(made, x, kernel)
        check_exact(made, x, kernel, exact)
        check_exact(made, x, next(tile for tile in found if tile.split == 1), exact)
        cut = [tile for tile in found if tile.split > 1]
        assert bool(cut) == (kernel != "sm80_dequantize"), "the others all cut K"
        for tile in cut[:1]:
            check_exact(made, x, tile, exact)
    back = LIBRARY.op("unpack")(made.codes, made.pairs, 72, 520, made.group)
    for found_, wanted in zip(back, made.canonical, strict=True):
        assert_bit_equal(found_, wanted)


# ----------------------------------------------------------------------------------------------------------------- sums


@EVERY_DTYPE
@pytest.mark.parametrize("m", [1, 16, 64])
def test_partial_sums_beyond_the_range_of_fp16(m: int, dtype: torch.dtype) -> None:
    """A37: partial sums of 819,200 cancel to exactly 0 in every configuration and split."""
    n, k = 64, 4096
    made = layer(n, k, 64, dtype)
    codes = torch.full((n, k // 8), -0x55555556, dtype=torch.int32, device="cuda")  # 0xAAAAAAAA: every code is 10
    zeros, scales = torch.full_like(made.zeros, 8), torch.ones_like(made.scales)
    ordered = LIBRARY.op("repack")(codes, scales, zeros, 64)
    made = made.with_(codes=ordered[0], pairs=ordered[1], weight=torch.full_like(made.weight, 2.0))
    x = torch.full((m, k), 200.0, device="cuda", dtype=dtype)
    x[:, k // 2 :] = -200.0
    ran = set()
    for tile in tiles(made, x):
        check_exact(made, x, tile, torch.zeros(m, n, device="cuda", dtype=torch.float64))
        ran.add(tile.kernel)
    assert ran


@EVERY_DTYPE
@EVERY_KERNEL_WITH_BIAS
def test_bias_is_added_before_the_one_rounding(kernel: str, dtype: torch.dtype) -> None:
    """2049 + 1 in FP16, 257 + 1 in BF16: a sum rounded before the bias comes would lose both ones."""
    most_rows(kernel)
    ones = 2049 if dtype == torch.float16 else 257
    made = layer(24, 2112, 64, dtype)
    word = torch.full((24, 264), 0x11111111, dtype=torch.int32, device="cuda")
    ordered = LIBRARY.op("repack")(word, torch.ones_like(made.scales), torch.zeros_like(made.zeros), 64)
    bias = torch.ones(24, device="cuda", dtype=dtype)
    made = made.with_(codes=ordered[0], pairs=ordered[1], weight=torch.ones_like(made.weight), bias=bias)
    x = torch.zeros(3, 2112, device="cuda", dtype=dtype)
    x[:, :ones] = 1.0
    for tile in tiles(made, x, kernel):
        found = run(made, x, tile)
        assert torch.equal(found, torch.full_like(found, ones + 1)), str(tile)


@EVERY_KERNEL
def test_what_is_not_finite_stays_in_its_row(kernel: str) -> None:
    """NaN and infinity of x reach that row alone, and rows that do not exist reach nobody."""
    most_rows(kernel)
    made = layer(72, 264, 64)
    x = whole_x(5, 264)
    clean = made.exact(x)
    x[1, 3], x[3, 200] = torch.nan, torch.inf
    for tile in tiles(made, x, kernel):
        found = run(made, x, tile)
        assert_exact(found[[0, 2, 4]], clean[[0, 2, 4]], f"{tile}")
        assert found[1].isnan().all()
        assert not found[3].isfinite().any()


def test_both_dtypes_are_there() -> None:
    """Of x and scales alike; a mixture is PyTorch's."""
    for dtype in DTYPES:
        made, x = layer(64, 128, 64, dtype), whole_x(3, 128, dtype)
        check_exact(made, x, "cuda")
        other = next(each for each in DTYPES if each != dtype)
        mixed = whole_x(3, 128, other)
        exact = mixed.double() @ made.weight.double().t()  # weights of up to 30 are exact in both
        check_exact(made, mixed, "auto", exact)

"""Where operands lie: strides, starts, views, leading dimensions, out, empty sizes; what is copied; what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from gemm_cases import (
    DTYPES,
    EVERY_KERNEL_AND_LAYOUT,
    KERNELS,
    MOST_SKINNY_ROWS,
    Product,
    assert_exact,
    check_exact,
    layouts,
    run,
    spread,
    tiles,
    whole_product,
)

import dandan_gemm
from dandan_ops_core.backend import BackendUnavailableError
from dandan_ops_core.testing import assert_bit_equal, expanded, guarded_empty, misaligned, rows_strided

pytestmark = pytest.mark.gpu

EVERY_KERNEL = pytest.mark.parametrize("kernel", KERNELS)
EVERY_DTYPE = pytest.mark.parametrize("dtype", DTYPES, ids=str)
LAYOUTS = pytest.mark.parametrize("weight_transposed", [True, False], ids=["[N,K]", "[K,N]"])


def info(product: Product, backend: str = "auto", **keywords: Any) -> Any:
    return dandan_gemm.gemm_execution_info(product.a, product.b, backend=backend, **product.keywords, **keywords)


@EVERY_DTYPE
@EVERY_KERNEL_AND_LAYOUT
def test_rows_with_a_stride_are_read_in_place(kernel: str, dtype: torch.dtype, weight_transposed: bool) -> None:
    """Slices of wider tensors that start at multiples of 16 bytes: every kernel, no copy."""
    whole = whole_product(13, 136, 264, dtype, weight_transposed=weight_transposed, bias=True, aligned=False)
    exact = whole.exact()
    for padding in (8, 64):
        for product in (
            whole.with_(a=rows_strided(whole.a, padding)),
            whole.with_(b=rows_strided(whole.b, padding)),
            whole.with_(a=rows_strided(whole.a, padding), b=rows_strided(whole.b, padding)),
        ):
            assert info(product, kernel).copies == ()
            check_exact(product, kernel, exact)
    qkv = torch.full((13, 3 * 264), float("nan"), device="cuda", dtype=dtype)
    qkv[:, 264:528] = whole.a
    check_exact(whole.with_(a=qkv[:, 264:528]), kernel, exact)


@LAYOUTS
@EVERY_DTYPE
def test_odd_strides_and_starts_take_the_general_kernel_in_place(dtype: torch.dtype, weight_transposed: bool) -> None:
    """A10: rows that start anywhere; the kernels that need multiples of 16 bytes say so."""
    for sizes in ((13, 136, 264), (5, 33, 77), (1, 1000, 513), (130, 257, 129)):
        whole = whole_product(*sizes, dtype, weight_transposed=weight_transposed, bias=True, aligned=False)
        exact = whole.exact()
        assert whole.bias is not None
        for product in (
            whole.with_(a=rows_strided(whole.a, 1), b=rows_strided(whole.b, 3)),
            whole.with_(a=misaligned(whole.a, 1), b=misaligned(whole.b, 5)),
            whole.with_(b=misaligned(whole.b, 1)),
            whole.with_(bias=misaligned(whole.bias, 1)),
        ):
            assert info(product, "sm80_mma").copies == ()
            for backend in ("sm80_mma", "cuda"):  # auto may take torch, whose bias cuBLAS may add after rounding
                check_exact(product, backend, exact)
            for tile in tiles(product, "sm80_mma"):
                check_exact(product, tile, exact)
        unaligned = whole.with_(a=misaligned(whole.a, 1), b=misaligned(whole.b, 1))
        for kernel in ("sm90_tma_mma", "sm90a_wgmma", "skinny"):
            if weight_transposed not in layouts(kernel) or (kernel == "skinny" and sizes[0] > MOST_SKINNY_ROWS):
                continue
            why = "rows of a do not start at multiples of 16 bytes"
            with pytest.raises(BackendUnavailableError, match=f'"{kernel}" cannot run: {why}; .*"sm80_mma"'):
                run(unaligned, kernel)


@EVERY_DTYPE
@EVERY_KERNEL
def test_a_transposed_view_is_the_other_layout(kernel: str, dtype: torch.dtype) -> None:
    """A45, A50: b.t() is read where it is, whichever layout the caller declares."""
    whole = whole_product(9, 136, 264, dtype, aligned=False)
    exact = whole.exact()
    views = [
        whole.with_(b=whole.b.t(), weight_transposed=False),
        whole.with_(b=spread(whole.b).t(), weight_transposed=False),
    ]
    if False in layouts(kernel):
        views.append(whole.with_(b=whole.b.t().contiguous().t()))
    for product in views:
        assert info(product, kernel).copies == ()
        check_exact(product, kernel, exact)


@EVERY_KERNEL_AND_LAYOUT
def test_what_no_kernel_can_read_is_copied_and_said(kernel: str, weight_transposed: bool) -> None:
    whole = whole_product(9, 136, 264, torch.float16, weight_transposed=weight_transposed, bias=True, aligned=False)
    exact = whole.exact()

    def every_other(t: torch.Tensor) -> torch.Tensor:
        holder = t.new_full((*t.shape[:-1], 2 * t.shape[-1]), float("nan"))
        holder[..., ::2] = t
        return holder[..., ::2]

    assert whole.bias is not None
    for product, copies in (
        (whole.with_(a=every_other(whole.a)), ("a",)),
        (whole.with_(b=every_other(whole.b)), ("b",)),
        (whole.with_(bias=every_other(whole.bias)), ("bias",)),
        (whole.with_(a=every_other(whole.a), b=every_other(whole.b), bias=every_other(whole.bias)), ("a", "b", "bias")),
        (whole.with_(a=whole.a.t().contiguous().t()), ("a",)),
    ):
        assert info(product, kernel).copies == copies
        check_exact(product, kernel, exact)
        check_exact(product, "auto", exact)
    # Into the columns of a wider and the rows of a transposed tensor.
    columns = torch.zeros(136, 9, device="cuda", dtype=torch.float16).t()
    assert info(whole, kernel, out=columns).copies == ("out",)
    dandan_gemm.gemm(whole.a, whole.b, out=columns, backend=kernel, **whole.keywords)
    assert_exact(columns, exact, f"{kernel} transposed out")


@EVERY_DTYPE
@EVERY_KERNEL_AND_LAYOUT
def test_out_with_a_row_stride_and_any_start(kernel: str, dtype: torch.dtype, weight_transposed: bool) -> None:
    """The gaps between rows stay as they were; N of vectors and not."""
    for n in (136, 129):
        product = whole_product(13, n, 264, dtype, weight_transposed=weight_transposed, bias=True, seed=n)
        exact = product.exact()
        for layout in ({"row_padding": 8}, {"row_padding": 3}, {"offset": 1}, {"row_padding": 3, "offset": 1}):
            check_exact(product, kernel, exact, **layout)
            check_exact(product, "auto", exact, **layout)
            for tile in tiles(product, kernel)[:3]:
                check_exact(product, tile, exact, **layout)


@EVERY_DTYPE
def test_rows_that_share_memory(dtype: torch.dtype) -> None:
    """Expanded and overlapping rows of a; TMA does not take them, the general kernel does."""
    whole = whole_product(1, 136, 264, dtype, aligned=False)
    for backend in ("auto", "cuda", "sm80_mma", "torch"):
        check_exact(whole.with_(a=expanded(whole.a[0], 9)), backend)
    band = whole_product(1, 136, 264 + 8 * 20, dtype, aligned=False).a[0].as_strided((20, 264), (8, 1))
    for backend in ("auto", "cuda", "sm80_mma"):
        check_exact(whole.with_(a=band), backend)


@EVERY_DTYPE
@EVERY_KERNEL
def test_leading_dimensions(kernel: str, dtype: torch.dtype) -> None:
    """They merge to rows where strides allow, else a or out is copied; the result has a's leading dimensions."""
    whole = whole_product(12, 136, 264, dtype, bias=True, aligned=False)
    exact = whole.exact()
    wide = torch.full((3, 6, 264), float("nan"), device="cuda", dtype=dtype)
    wide[:, :4] = whole.a.view(3, 4, 264)
    for a, copies in (
        (whole.a.view(3, 4, 264), ()),
        (whole.a.view(3, 1, 2, 2, 264), ()),
        (rows_strided(whole.a, 8).unflatten(0, (3, 4)), ()),
        (wide[:, :4], ("a",)),
        (whole.a.view(4, 3, 264).transpose(0, 1), ("a",)),
    ):
        product = whole.with_(a=a)
        wanted = exact.view(4, 3, 136).transpose(0, 1) if a.stride(0) < a.stride(1) else exact.view(*a.shape[:-1], 136)
        assert info(product, kernel).copies == copies
        check_exact(product, kernel, wanted)
        got = dandan_gemm.gemm(a, product.b, backend=kernel, **product.keywords)
        assert got.is_contiguous()
        assert_exact(got, wanted, f"{kernel} {a.shape} allocated")
    apart = guarded_empty((3, 4, 136), dtype, "cuda", strides=(6 * 136, 136, 1))
    product = whole.with_(a=whole.a.view(3, 4, 264))
    dandan_gemm.gemm(product.a, product.b, out=apart.tensor, backend=kernel, **product.keywords)
    apart.check()
    assert_exact(apart.tensor, exact.view(3, 4, 136), f"{kernel} out of slices")


def filled(value: float, *shape: int) -> torch.Tensor:
    return torch.full(shape, value, device="cuda", dtype=torch.float16)


@pytest.mark.parametrize("backend", ["auto", "cuda", "torch", *KERNELS])
def test_no_rows_no_columns_no_sums(backend: str) -> None:
    """A13, A16: nothing is launched with an empty grid, no memory of earlier results comes back, and torch goes on."""
    nan = float("nan")

    def gemm(a: tuple[int, ...], n: int, vector: torch.Tensor | None = None) -> torch.Tensor:
        results = []
        for b, weight_transposed in ((filled(1.0, n, a[-1]), True), (filled(1.0, a[-1], n), False)):
            for given in (False, True):
                x, out = filled(1.0, *a), filled(nan, *a[:-1], n)
                if not given:
                    out = None  # type: ignore[assignment]  # the allocator gives this memory, full of NaN, to the result
                got = dandan_gemm.gemm(x, b, weight_transposed=weight_transposed, bias=vector, out=out, backend=backend)
                assert torch.ones(4, device="cuda").sum().item() == 4
                assert got.shape == (*a[:-1], n)
                results.append(got)
        assert all(torch.equal(results[0], each) for each in results)
        return results[0]

    bias = torch.tensor([1.0, 2.0, 3.0], device="cuda", dtype=torch.float16)
    assert torch.equal(gemm((2, 0), 3, bias), bias.expand(2, 3))
    assert torch.equal(gemm((2, 0), 3), filled(0.0, 2, 3))
    assert torch.equal(gemm((4, 5, 0), 64), filled(0.0, 4, 5, 64))
    for a in ((0, 64), (0, 7168), (3, 0, 64)):
        gemm(a, 3, bias)
    gemm((2, 64), 0)
    gemm((0, 0), 0)


def test_refusals_change_nothing_and_leave_the_context_usable() -> None:
    product = whole_product(9, 136, 264, torch.float16, aligned=False)
    a, b = product.a.clone(), product.b.clone()
    many = whole_product(64, 136, 264, torch.float16, aligned=False)
    out = torch.zeros(9, 136, device="cuda", dtype=torch.float16)
    refused: list[tuple[type[Exception], str, torch.Tensor, dict[str, Any]]] = [
        (ValueError, "gemm: b is on cpu but a is on cuda:0", b.cpu(), {}),
        (TypeError, "gemm: b has dtype bfloat16 but a has dtype float16", b.bfloat16(), {}),
        (ValueError, r"gemm: b has K=263 but a has K=264", b[:, 1:], {}),
        (ValueError, r"gemm: b has shape \[1, 136, 264\]; \[N, K\] is needed", b[None], {}),
        (ValueError, r"gemm: bias has shape \[135\] but b has N=136", b, {"bias": out[0, 1:]}),
        (ValueError, r"gemm: out has shape \[8, 136\]; \[9, 136\] is needed", b, {"out": out[1:]}),
        (ValueError, "gemm: out overlaps b", b, {"out": b.view(-1)[: 9 * 136].view(9, 136)}),
        (ValueError, "gemm: elements of out share memory", b, {"out": out[:1].expand(9, 136)}),
        (ValueError, "gemm: backend 'wgmma' is unknown", b, {"backend": "wgmma"}),
    ]
    for error, message, weight, keywords in refused:
        with pytest.raises(error, match=message):
            dandan_gemm.gemm(a, weight, weight_transposed=True, **keywords)
        assert torch.ones(4, device="cuda").sum().item() == 4
    with pytest.raises(TypeError, match="gemm: a has dtype float32; float16 and bfloat16 are supported"):
        dandan_gemm.gemm(a.float(), b.float(), weight_transposed=True)
    with pytest.raises(BackendUnavailableError, match='"skinny" cannot run: a has more than 16 rows; .* can'):
        dandan_gemm.gemm(many.a, many.b, weight_transposed=True, backend="skinny")
    with pytest.raises(BackendUnavailableError, match='"skinny" cannot run: rows of b are along K; .* can'):
        dandan_gemm.gemm(a, b.t().contiguous(), backend="skinny")
    with pytest.raises(BackendUnavailableError, match='"skinny" cannot run: K is no multiple of 8; .* can'):
        dandan_gemm.gemm(spread(a[:, :257]), spread(b[:, :257]), weight_transposed=True, backend="skinny")
    assert_bit_equal(a, product.a)
    assert_bit_equal(b, product.b)
    assert not out.any()
    check_exact(product, "cuda")

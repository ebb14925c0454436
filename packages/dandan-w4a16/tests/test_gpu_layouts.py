"""Where operands lie: strides, starts, views, leading dimensions, out, empty sizes; what is copied; what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from gpu_cases import (
    EVERY_DTYPE,
    EVERY_KERNEL,
    EVERY_KERNEL_WITH_BIAS,
    WITH_BIAS,
    Layer,
    assert_exact,
    check_exact,
    layer,
    most_rows,
    tiles,
    whole_x,
)

from dandan_ops_core.backend import BackendUnavailableError
from dandan_ops_core.testing import assert_bit_equal, expanded, guarded_empty, misaligned, rows_strided
from dandan_w4a16._ops import KERNELS
from dandan_w4a16.execution_info import packed_linear_execution_info
from dandan_w4a16.packed import packed_linear

pytestmark = pytest.mark.gpu


def copies(made: Layer, x: torch.Tensor, backend: str, **keywords: Any) -> tuple[str, ...]:
    return packed_linear_execution_info(*made.inputs(x), backend=backend, **keywords).copies


def every_other(t: torch.Tensor) -> torch.Tensor:
    holder = t.new_full((*t.shape[:-1], 2 * t.shape[-1]), float("nan"))
    holder[..., ::2] = t
    return holder[..., ::2]


@EVERY_DTYPE
@EVERY_KERNEL
def test_rows_with_a_stride_are_read_in_place(kernel: str, dtype: torch.dtype) -> None:
    """Slices of wider tensors that start at multiples of 16 bytes: no copy, and nothing beside the rows is read."""
    most_rows(kernel)
    made, x = layer(136, 264, 64, dtype, bias=kernel in WITH_BIAS), whole_x(13, 264, dtype)
    exact = made.exact(x)
    qkv = torch.full((13, 3 * 264), float("nan"), device="cuda", dtype=dtype)
    qkv[:, 264:528] = x
    for view in (rows_strided(x, 8), rows_strided(x, 64), qkv[:, 264:528]):
        assert copies(made, view, kernel) == ()
        for tile in tiles(made, view, kernel)[:4]:
            check_exact(made, view, tile, exact)


@EVERY_KERNEL_WITH_BIAS
def test_what_no_kernel_can_read_is_copied_and_said(kernel: str) -> None:
    most_rows(kernel)
    made, x = layer(136, 264, 64, bias=True), whole_x(9, 264)
    exact = made.exact(x)
    assert made.bias is not None
    for view in (every_other(x), misaligned(x, 1), rows_strided(x, 3), x.t().contiguous().t()):
        assert copies(made, view, kernel) == ("x",)
        check_exact(made, view, kernel, exact)
    for bias, copied in ((every_other(made.bias), ("bias",)), (misaligned(made.bias, 1), ())):
        other = made.with_(bias=bias)
        assert copies(other, x, kernel) == copied
        check_exact(other, x, kernel, exact)
    columns = torch.zeros(136, 9, device="cuda", dtype=torch.float16).t()
    assert copies(made, x, kernel, out=columns) == ("out",)
    packed_linear(*made.inputs(x), out=columns, backend=kernel)
    assert_exact(columns, exact, f"{kernel} transposed out")
    row = whole_x(1, 264)[0]
    for view in (expanded(row, 9), whole_x(1, 264 + 8 * 9)[0].as_strided((9, 264), (8, 1))):
        check_exact(made, view, kernel)


@EVERY_DTYPE
@EVERY_KERNEL
def test_out_with_a_row_stride_and_any_start(kernel: str, dtype: torch.dtype) -> None:
    """The gaps between rows stay as they were; N of vectors and not."""
    most_rows(kernel)
    for n in (136, 129):
        made, x = layer(n, 264, 64, dtype, bias=kernel in WITH_BIAS), whole_x(13, 264, dtype)
        exact = made.exact(x)
        for layout in ({"row_padding": 8}, {"row_padding": 3}, {"offset": 1}, {"row_padding": 3, "offset": 1}):
            check_exact(made, x, "auto", exact, **layout)
            for tile in tiles(made, x, kernel)[:3]:
                check_exact(made, x, tile, exact, **layout)


@EVERY_KERNEL
def test_leading_dimensions(kernel: str) -> None:
    """They merge to rows where strides allow, else x or out is copied; the result has x's leading dimensions."""
    most_rows(kernel)
    made, flat = layer(136, 264, 64, bias=kernel in WITH_BIAS), whole_x(12, 264)
    exact = made.exact(flat)
    wide = torch.full((3, 6, 264), float("nan"), device="cuda", dtype=torch.float16)
    wide[:, :4] = flat.view(3, 4, 264)
    for x, copied in (
        (flat.view(3, 4, 264), ()),
        (flat.view(3, 1, 2, 2, 264), ()),
        (rows_strided(flat, 8).unflatten(0, (3, 4)), ()),
        (wide[:, :4], ("x",)),
        (flat.view(4, 3, 264).transpose(0, 1), ("x",)),
        (flat[0], ()),
    ):
        turned = x.dim() > 1 and x.stride(0) < x.stride(1)
        wanted = exact.view(4, 3, 136).transpose(0, 1) if turned else exact[: x.numel() // 264].view(*x.shape[:-1], 136)
        assert copies(made, x, kernel) == copied
        check_exact(made, x, kernel, wanted)
        found = packed_linear(*made.inputs(x), backend=kernel)
        assert found.is_contiguous()
        assert_exact(found, wanted, f"{kernel} {x.shape} allocated")
    apart = guarded_empty((3, 4, 136), torch.float16, "cuda", strides=(6 * 136, 136, 1))
    packed_linear(*made.inputs(flat.view(3, 4, 264)), out=apart.tensor, backend=kernel)
    apart.check()
    assert_exact(apart.tensor, exact.view(3, 4, 136), f"{kernel} out of slices")


@pytest.mark.parametrize("backend", ["auto", "cuda", "torch", *KERNELS])
def test_no_rows_no_columns_no_sums(backend: str) -> None:
    """A13: nothing is launched with an empty grid, no memory of earlier results comes back, and torch goes on."""
    for n, k, lead in ((3, 64, (0,)), (3, 64, (2, 0)), (0, 64, (2,)), (3, 0, (2,)), (3, 0, (4, 5)), (0, 0, (0,))):
        made = layer(n, k, 64, bias=True)
        for given in (made, made.with_(bias=None)):
            x = torch.ones(*lead, k, device="cuda", dtype=torch.float16)
            out = torch.full((*lead, n), float("nan"), device="cuda", dtype=torch.float16)
            packed_linear(*given.inputs(x), out=out, backend=backend)
            assert_exact(out, given.exact(x), f"{backend} {lead} {n} {k}")
            del out  # the allocator gives this memory, full of NaN, to the next result
            found = packed_linear(*given.inputs(x), backend=backend)
            assert_exact(found, given.exact(x), f"{backend} {lead} {n} {k}")
            assert torch.ones(4, device="cuda").sum().item() == 4


def test_refusals_change_nothing_and_leave_the_context_usable() -> None:
    made, x = layer(136, 264, 64), whole_x(17, 264)
    before = [t.clone() for t in (x, made.codes, made.pairs)]
    out = torch.zeros(17, 136, device="cuda", dtype=torch.float16)
    for error, message, inputs, keywords in (
        (ValueError, r"codes are on cpu but x is on cuda:0", made.with_(codes=made.codes.cpu()).inputs(x), {}),
        (ValueError, r"codes have shape \[\d+\]; \[\d+\]", made.with_(codes=made.codes[1:]).inputs(x), {}),
        (ValueError, r"x has K=256 but the weight has K=264", made.inputs(x[:, :256]), {}),
        (ValueError, r"out has shape \[16, 136\]; \[17, 136\]", made.inputs(x), {"out": out[1:]}),
        (ValueError, r"out overlaps x", made.inputs(x), {"out": x.view(-1)[: 17 * 136].view(17, 136)}),
        (BackendUnavailableError, r'"sm80_decode" cannot run: x has more than 16 rows; "auto" and "torch" can',
         made.inputs(x), {"backend": "sm80_decode", "out": out}),
        (BackendUnavailableError, r'"cuda" cannot run: scales have another dtype than x',
         made.inputs(x.bfloat16()), {"backend": "cuda"}),
        (BackendUnavailableError, r'"cuda" cannot run: bias has another dtype than x',
         made.with_(bias=torch.zeros(136, device="cuda")).inputs(x), {"backend": "cuda", "out": out}),
        (BackendUnavailableError, r'"cuda" cannot run: codes or scales are not contiguous from a multiple of 16 bytes',
         made.with_(codes=misaligned(made.codes, 1)).inputs(x), {"backend": "cuda", "out": out}),
    ):  # fmt: skip
        with pytest.raises(error, match=f"^packed_linear: (backend )?{message}"):
            packed_linear(*inputs, **keywords)
        assert torch.ones(4, device="cuda").sum().item() == 4
    for now, then in zip((x, made.codes, made.pairs), before, strict=True):
        assert_bit_equal(now, then)
    assert not out.any()
    check_exact(made, x, "cuda")


def test_what_the_kernels_do_not_take_is_computed_by_torch() -> None:
    """And said. Whole numbers: bits of the exact result."""
    made, x = layer(136, 264, 64, bias=True), whole_x(9, 264)
    assert made.bias is not None
    exact = made.exact(x)
    for other, why in (
        (made.with_(bias=made.bias.float()), "bias has another dtype than x"),
        (made.with_(codes=misaligned(made.codes, 1)), "codes or scales are not contiguous from a multiple of 16 bytes"),
        (made.with_(pairs=every_other(made.pairs)), "codes or scales are not contiguous from a multiple of 16 bytes"),
    ):
        info = packed_linear_execution_info(*other.inputs(x))
        assert (info.backend, info.fallback_reason) == ("torch", why)
        check_exact(other, x, "auto", exact)

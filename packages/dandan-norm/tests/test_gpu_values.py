"""Values of every kernel against FP64, inside guard bands, over the edges of routes, layouts and dtypes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import hypothesis
import pytest
import torch
from hypothesis import strategies

import dandan_norm
from dandan_norm import reference
from dandan_norm._ops import LIBRARY
from dandan_ops_core.backend import BackendUnavailableError
from dandan_ops_core.testing import (
    assert_bit_equal,
    assert_close_to,
    expanded,
    guarded_empty,
    halves,
    misaligned,
    rows_strided,
)

pytestmark = pytest.mark.gpu

DTYPES = [torch.float16, torch.bfloat16, torch.float32]
# One row below, at and above each change of tile: a warp's lanes, two and four vectors a thread, a block's registers,
# cluster sizes.
WIDTHS = [
    1,
    2,
    3,
    7,
    8,
    9,
    17,
    31,
    32,
    33,
    64,
    127,
    128,
    130,
    256,
    1000,
    1016,
    1024,
    1032,
    2048,
    2056,
    4096,
    4099,
    5120,
    8192,
    12288,
]
WIDE = [16384, 16392, 32768, 32776, 65536, 65544, 131072, 151936, 262144, 262147]
OPS = ["rms_norm", "residual_rms_norm", "layer_norm", "softmax", "silu_and_mul"]
Inputs = tuple[torch.Tensor | float | None, ...]


def make_inputs(
    op: str, shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0, weight_dtype: torch.dtype | None = None
) -> Inputs:
    generator = torch.Generator("cuda").manual_seed(seed)

    def random(*size: int, scale: float = 1.0, shift: float = 0.0) -> torch.Tensor:
        return (torch.randn(size, generator=generator, device="cuda") * scale + shift).to(dtype)

    x = random(*shape, scale=3.0, shift=0.5)
    weight, bias = (random(shape[-1], shift=1.0).to(weight_dtype or dtype) for _ in range(2))
    return {
        "rms_norm": (x, weight, 1e-6),
        "residual_rms_norm": (x, random(*shape, scale=10.0), weight, 1e-6),
        "layer_norm": (x, weight, bias, 1e-5),
        "softmax": (x,),
        "silu_and_mul": (x, random(*shape)),
        "argmax": (x,),
    }[op]


def truth(op: str, inputs: Inputs) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """The FP64 results and those of the honest composition in the inputs' dtype."""
    function: Callable[..., Any] = getattr(reference, op)
    exact, honest = function(*inputs, compute_dtype=torch.float64), function(*inputs)
    return (list(exact), list(honest)) if isinstance(exact, tuple) else ([exact], [honest])


def run_guarded(op: str, inputs: Inputs, backend: str, **layout: Any) -> list[torch.Tensor]:
    """The operator's results, written into poisoned guard bands that are checked afterwards."""
    x = inputs[0]
    assert isinstance(x, torch.Tensor)
    guards = [guarded_empty(x.shape, x.dtype, "cuda", **layout) for _ in range(2 if op == "residual_rms_norm" else 1)]
    out = tuple(g.tensor for g in guards) if len(guards) > 1 else guards[0].tensor
    getattr(dandan_norm, op)(*inputs, out=out, backend=backend)
    torch.cuda.synchronize()
    for guard in guards:
        guard.check()
    return [g.tensor for g in guards]


def check(op: str, inputs: Inputs, backend: str = "cuda", **layout: Any) -> list[torch.Tensor]:
    actual = run_guarded(op, inputs, backend, **layout)
    for number, (a, exact, honest) in enumerate(zip(actual, *truth(op, inputs), strict=True)):
        if op == "residual_rms_norm" and number == 1:
            assert_bit_equal(a, honest, "summed")
        else:
            assert_close_to(a, exact.double(), honest, f"{op} {backend}")
    return actual


def kernels_of(op: str, inputs: Inputs) -> Iterator[str]:
    """The own kernels that can take a call."""
    for kernel in ("sm80_row", "sm80_stream", "sm90_cluster", "sm80_elementwise"):
        try:
            dandan_norm.elementwise_execution_info(op, *inputs, backend=kernel)
        except BackendUnavailableError:
            continue
        yield kernel


@pytest.mark.sanitize
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("op", OPS)
def test_widths(op: str, dtype: torch.dtype) -> None:
    for cols in WIDTHS:
        check(op, make_inputs(op, (5, cols), dtype, seed=cols))


@pytest.mark.sanitize
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("op", OPS)
def test_wide(op: str, dtype: torch.dtype) -> None:
    """A11: rows that need more than a block's default shared memory or registers."""
    for cols in WIDE:
        check(op, make_inputs(op, (3, cols), dtype, seed=cols))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("op", [*OPS, "argmax"])
def test_every_kernel_by_name_gives_the_same_bits(op: str, dtype: torch.dtype) -> None:
    """sm80_row, sm80_stream and sm90_cluster add in one order for one width, so a width's own kernel and the general
    one agree bit for bit.
    """
    hit = set()
    for cols in (128, 1024, 2048, 4096, 5120, 8192, 16384, 32768, 40960, 65536, 131072, 151936):
        inputs = make_inputs(op, (4, cols), dtype, seed=cols)
        if op == "argmax":
            x = inputs[0]
            assert isinstance(x, torch.Tensor)
            results = {k: [dandan_norm.argmax(x, backend=k)] for k in kernels_of(op, inputs)}
            for got in results.values():
                assert torch.equal(got[0], reference.argmax(x))
        else:
            results = {k: check(op, inputs, k) for k in kernels_of(op, inputs)}
        hit |= set(results)
        chosen = dandan_norm.elementwise_execution_info(op, *inputs, backend="cuda").kernel
        for kernel in {chosen, "sm80_stream"} & set(results):
            for a, b in zip(results[kernel], results[chosen], strict=True):
                assert_bit_equal(a, b, f"{op} {cols} {kernel} against {chosen}")
    assert hit == ({"sm80_elementwise"} if op == "silu_and_mul" else {"sm80_row", "sm80_stream", "sm90_cluster"})


@pytest.mark.parametrize(
    ("cols", "dtype"),
    [
        (cols, dtype)
        for cols in (128, 256, 260, 512, 768, 1000, 1024, 1032, 1280, 2048, 2056, 3072, 4096, 4104)
        for dtype in DTYPES
        if cols * dtype.itemsize % 16 == 0  # 260: whole vectors of float32 alone
    ],
    ids=str,
)
def test_layer_norm_of_few_and_of_many_rows_gives_the_same_bits(cols: int, dtype: torch.dtype) -> None:
    """The forms of sm80_row that the number of rows decides, sm80_stream, and misaligned rows, against one another."""
    inputs = make_inputs("layer_norm", (5000, cols), dtype, seed=cols)
    x, weight, bias, eps = inputs
    assert isinstance(x, torch.Tensor)
    x[1] += 300.0  # far from zero
    x[2] = -0.0
    many = check("layer_norm", inputs)[0]
    forms = set()
    for rows in (1, 16, 512, 700, 1000, 2100, 3000, 4000, 4500, 5000):
        part = (x[:rows], weight, bias, eps)
        route = LIBRARY.info("layer_norm", part, (None,), "cuda")
        assert route["kernel"] == "sm80_row"
        forms.add((route["vectors"], route["threads"]))
        for tensor in (x[:rows], x[-rows:]):
            got = run_guarded("layer_norm", (tensor, weight, bias, eps), "sm80_row")[0]
            same = many[:rows] if tensor.data_ptr() == x.data_ptr() else many[-rows:]
            assert_bit_equal(got, same, f"{cols} columns, {rows} rows")
    for rows in (3, 2000, 5000):
        assert_bit_equal(
            run_guarded("layer_norm", (x[:rows], weight, bias, eps), "sm80_stream")[0], many[:rows], "stream"
        )
    odd = run_guarded("layer_norm", (misaligned(x, 1), weight, bias, eps), "cuda")[0]
    assert_bit_equal(odd, many, "misaligned")
    if cols == 1024 and dtype != torch.float32:
        assert forms == {(1, 128), (2, 64), (4, 32)}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_layer_norm_of_negative_zeros(dtype: torch.dtype) -> None:
    """The mean is +0 whichever zeros a kernel adds to the row's own, so no sign in the result depends on the kernel."""
    for cols in (64, 512, 1000, 1024, 2048, 4096, 8192, 20480):
        x, bias = (torch.full(shape, -0.0, device="cuda", dtype=dtype) for shape in ((3, cols), (cols,)))
        weight = torch.ones(cols, device="cuda", dtype=dtype)
        expected = run_guarded("layer_norm", (x, weight, bias, 1e-5), "cuda")[0]
        assert torch.equal(expected, torch.zeros_like(x))
        for seen in (x, misaligned(x, 1)):
            got = run_guarded("layer_norm", (seen, weight, bias, 1e-5), "sm80_stream")[0]
            assert_bit_equal(got, expected, f"{cols} columns")


@pytest.mark.parametrize("rows", [1, 2, 3, 127, 128, 1023, 1024, 1025, 5000])
@pytest.mark.parametrize("op", OPS)
def test_rows(op: str, rows: int) -> None:
    """Numbers of rows around those where blocks take several rows."""
    for cols in (8, 24, 128, 512, 1024):
        check(op, make_inputs(op, (rows, cols), torch.bfloat16, seed=rows + cols))


@pytest.mark.sanitize
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("cols", [128, 1234, 4096, 20480, 3])
def test_layouts_give_the_same_bits(op: str, dtype: torch.dtype, cols: int) -> None:
    """A05, A35, A56: row strides, odd starts, slices of three dimensions, transposed rows: the bits of the contiguous
    call.
    """
    inputs = make_inputs(op, (12, cols), dtype, seed=cols)
    expected = check(op, inputs)

    def same(view: Callable[[torch.Tensor], torch.Tensor], name: str, **layout: Any) -> None:
        seen = tuple(view(t) if isinstance(t, torch.Tensor) and t.dim() == 2 else t for t in inputs)
        for a, b in zip(run_guarded(op, seen, "cuda", **layout), expected, strict=True):
            assert_bit_equal(a.reshape(b.shape), b, f"{op} {cols} {name}")

    same(lambda t: rows_strided(t, 8), "row stride, aligned")
    same(lambda t: rows_strided(t, 1), "odd row stride")
    same(lambda t: misaligned(t, 1), "odd start")
    same(lambda t: t.t().contiguous().t(), "transposed")
    same(lambda t: t, "padded output", row_padding=8)
    same(lambda t: t, "odd output", row_padding=3, offset=1)

    def in_three(t: torch.Tensor) -> torch.Tensor:
        base = t.new_full((3, 6, 2 * cols + 8), float("nan"))
        base[:, :4, :cols] = t.view(3, 4, cols)
        return base[:, :4, :cols]

    same(in_three, "three dimensions that do not merge")
    for first in range(0, 12, 5):
        chunk = tuple(t[first : first + 5] if isinstance(t, torch.Tensor) and t.dim() == 2 else t for t in inputs)
        for a, b in zip(run_guarded(op, chunk, "cuda"), expected, strict=True):
            assert_bit_equal(a, b[first : first + 5], f"{op} {cols} chunk at {first}")


def test_heads_in_a_qkv_tensor() -> None:
    """A05: q and k are slices of one projection; the input stays as it is."""
    for dtype in DTYPES:
        qkv = make_inputs("rms_norm", (37, (32 + 8 + 8) * 128), dtype)[0]
        assert isinstance(qkv, torch.Tensor)
        before, weight = qkv.clone(), torch.randn(128, device="cuda").to(dtype)
        q, k = qkv[:, :4096].unflatten(1, (32, 128)), qkv[:, 4096:5120].unflatten(1, (8, 128))
        for view in (q, k):
            info = dandan_norm.elementwise_execution_info("rms_norm", view, weight)
            assert info.kernel == "sm80_row"
            assert_bit_equal(dandan_norm.rms_norm(view, weight), dandan_norm.rms_norm(view.contiguous(), weight))
        assert_bit_equal(qkv, before, "input")


def test_more_dimensions_than_merge_go_to_torch() -> None:
    x = torch.randn(2, 3, 2, 3, 2, 16, device="cuda")[:, ::2, :, ::2, :, :8]
    x = x.permute(4, 3, 2, 1, 0, 5)
    info = dandan_norm.elementwise_execution_info("rms_norm", x)
    assert info.kernel == "torch"
    assert info.fallback_reason == "the leading dimensions do not merge into four"
    assert_close_to(
        dandan_norm.rms_norm(x), reference.rms_norm(x, compute_dtype=torch.float64), reference.rms_norm(x), "rms_norm"
    )


@pytest.mark.parametrize("d", [3420, 12, 4, 1234, 1, 3072, 12288])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_halves_of_one_tensor(d: int, dtype: torch.dtype) -> None:
    """A09: the second half of a row may not start at 16 bytes although the whole row does."""
    gate, up = make_inputs("silu_and_mul", (5, d), dtype)
    assert isinstance(gate, torch.Tensor)
    assert isinstance(up, torch.Tensor)
    left, right = halves(gate, up)
    check("silu_and_mul", (left, right))
    assert (torch.zeros(1, device="cuda") + 1).item() == 1


@pytest.mark.parametrize("x_dtype", DTYPES, ids=str)
@pytest.mark.parametrize("weight_dtype", DTYPES, ids=str)
def test_weight_of_another_dtype(x_dtype: torch.dtype, weight_dtype: torch.dtype) -> None:
    """A34: the weight is read in its own dtype and multiplied in FP32."""
    for cols in (1152, 4096, 1001, 20480):
        for op in ("rms_norm", "residual_rms_norm", "layer_norm"):
            check(op, make_inputs(op, (3, cols), x_dtype, weight_dtype=weight_dtype))


def test_weight_strided_misaligned_or_absent() -> None:
    x = torch.randn(6, 1024, device="cuda", dtype=torch.bfloat16)
    weight = torch.randn(1024, device="cuda", dtype=torch.bfloat16)
    spread = torch.full((2048,), float("nan"), device="cuda", dtype=torch.bfloat16)
    spread[::2] = weight
    for other in (spread[::2], misaligned(weight, 3)):
        assert_bit_equal(dandan_norm.rms_norm(x, other, backend="cuda"), dandan_norm.rms_norm(x, weight))
        assert_bit_equal(
            dandan_norm.layer_norm(x, other, other, backend="cuda"), dandan_norm.layer_norm(x, weight, weight)
        )
    check("rms_norm", (x, None, 1e-6))
    check("residual_rms_norm", (x, x, None, 1e-6))
    for pair in ((None, None), (weight, None), (None, weight)):
        check("layer_norm", (x, *pair, 1e-5))


@pytest.mark.parametrize("op", OPS)
def test_output_may_be_an_input(op: str) -> None:
    for cols in (128, 4096, 4099, 40000, 151936):
        inputs = make_inputs(op, (7, cols), torch.float16, seed=cols)
        expected = check(op, inputs)
        x = inputs[0]
        assert isinstance(x, torch.Tensor)
        copies = tuple(t.clone() if isinstance(t, torch.Tensor) else t for t in inputs)
        out: Any = copies[0] if op != "residual_rms_norm" else (copies[0], copies[1])
        getattr(dandan_norm, op)(*copies, out=out, backend="cuda")
        for a, b in zip(out if isinstance(out, tuple) else (out,), expected, strict=True):
            assert_bit_equal(a, b, f"{op} {cols} in place")
        if op == "residual_rms_norm":  # the other way round: the sum over x, the norm over the residual
            copies = tuple(t.clone() if isinstance(t, torch.Tensor) else t for t in inputs)
            out = (copies[1], copies[0])
            dandan_norm.residual_rms_norm(*copies, out=out, backend="cuda")  # type: ignore[arg-type]
            for a, b in zip(out, expected, strict=True):
                assert_bit_equal(a, b, f"{op} {cols} in place, crossed")


@pytest.mark.parametrize("op", OPS)
def test_expanded_rows(op: str) -> None:
    row = make_inputs(op, (1, 4096), torch.float16)
    seen = tuple(expanded(t[0], 9) if isinstance(t, torch.Tensor) and t.dim() == 2 else t for t in row)
    check(op, seen)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rms_norm_of_large_values(dtype: torch.dtype) -> None:
    """A31: squares beyond FP16's range are summed in FP32."""
    weight = torch.ones(4096, device="cuda", dtype=dtype)
    for value in (300.0, 60000.0):
        x = torch.full((2, 4096), value, device="cuda", dtype=dtype)
        assert torch.equal(dandan_norm.rms_norm(x, weight, backend="cuda"), torch.ones_like(x))
    spike = torch.zeros(1, 4096, device="cuda", dtype=dtype)
    spike[0, 17] = 60000.0
    expected = torch.zeros_like(spike)
    expected[0, 17] = 64.0
    assert torch.equal(dandan_norm.rms_norm(spike, weight, backend="cuda"), expected)


def test_residual_sum_is_rounded_and_normalised() -> None:
    """A32: the rounded sum is what is normalised, on the aligned and on the general path."""
    for cols in (4096, 4099):
        x = torch.randn(512, cols, device="cuda").bfloat16()
        residual = (30 * torch.randn(512, cols, device="cuda")).bfloat16()
        weight = torch.randn(cols, device="cuda").bfloat16()
        normalized, summed = dandan_norm.residual_rms_norm(x, residual, weight, backend="cuda")
        assert_bit_equal(summed, (x.float() + residual.float()).bfloat16(), "sum")
        assert_bit_equal(normalized, dandan_norm.rms_norm(summed, weight, backend="cuda"), "norm of the sum")


def test_layer_norm_far_from_zero() -> None:
    """A33: a variance that a one-pass formula loses."""
    ramp = torch.arange(16, device="cuda", dtype=torch.float64) * 1e-3
    rows = torch.stack([ramp + m for m in (0.0, 100.0, 1000.0, 10000.0)]).float()
    got = dandan_norm.layer_norm(rows, eps=1e-5, backend="cuda")
    torch.testing.assert_close(got[:, 0].cpu(), torch.tensor([-1.3416, -1.3415, -1.3415, -1.3313]), atol=1e-4, rtol=0)
    half = torch.arange(2000, 2008, device="cuda").half()[None]
    got = dandan_norm.layer_norm(half, eps=1e-5, backend="cuda")
    wanted = torch.tensor([[-1.5275, -1.0911, -0.6547, -0.2182, 0.2182, 0.6547, 1.0911, 1.5275]])
    torch.testing.assert_close(got.float().cpu(), wanted, atol=1e-3, rtol=0)
    check("layer_norm", (torch.randn(5, 4, device="cuda") + 2000, None, None, 1e-5))
    for m in (100.0, 1000.0, 10000.0):
        for cols in (4096, 4099, 131072):
            check("layer_norm", (torch.randn(3, cols, device="cuda") * 1e-2 + m, None, None, 1e-5))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_softmax_of_low_values(dtype: torch.dtype) -> None:
    """A12: a maximum that starts at zero would underflow these rows."""
    for cols in (1, 2, 3, 17, 31, 32, 33):
        for shift in (-50.0, -200.0):
            for rows in (1, 1000):
                x = (
                    (shift - torch.arange(cols, device="cuda", dtype=torch.float32))
                    .to(dtype)
                    .expand(rows, cols)
                    .contiguous()
                )
                (got,) = check("softmax", (x,))
                torch.testing.assert_close(got.float().sum(-1), torch.ones(rows, device="cuda"), atol=4e-3, rtol=0)
                if cols == 1:
                    assert torch.equal(got, torch.ones_like(got))


@pytest.mark.parametrize("cols", [1024, 1025, 1238, 2047, 2048, 2049])
def test_softmax_of_fp16_is_that_of_fp32(cols: int) -> None:
    """A54: FP32 inside, whatever route the width takes: at most one rounding step between both."""
    x = (torch.randn(1024, cols, device="cuda") * 4).half()
    narrow, wide = dandan_norm.softmax(x, backend="cuda"), dandan_norm.softmax(x.float(), backend="cuda").half()
    steps = (narrow.view(torch.int16).int() - wide.view(torch.int16).int()).abs()
    assert steps.max().item() <= 1
    assert (steps != 0).float().mean().item() < 0.01


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("cols", [128, 4096, 4099, 40960])
def test_nan_and_infinity_stay_in_their_row(op: str, cols: int) -> None:
    for bad in (float("nan"), float("inf"), float("-inf")):
        inputs = make_inputs(op, (4, cols), torch.float16, seed=cols)
        x = inputs[0]
        assert isinstance(x, torch.Tensor)
        clean = run_guarded(op, inputs, "cuda")
        x[2, cols // 2] = bad
        got = run_guarded(op, inputs, "cuda")
        honest = truth(op, inputs)[1]
        for a, b, c in zip(got, clean, honest, strict=True):
            keep = [0, 1, 3]
            assert_bit_equal(a[keep], b[keep], "other rows")
            assert torch.equal(torch.isnan(a), torch.isnan(c)), f"{op} {bad}"
    rows = torch.full((2, cols), float("-inf"), device="cuda", dtype=torch.float16)
    assert torch.isnan(dandan_norm.softmax(rows, backend="cuda")).all()


def argmax_rows() -> Iterator[tuple[str, torch.Tensor, list[int]]]:
    nan, inf = float("nan"), float("inf")
    yield "ties", torch.tensor([[2.0, 3, 0, 3, 3], [1, 3, 1, 3, 1]]), [1, 1]
    wide = torch.full((1, 512), -1.0)
    wide[0, [5, 256]] = 7
    yield "tie across threads", wide, [5]
    logits = torch.zeros(1, 151936)
    logits[0, [3, 151935]] = 1
    yield "tie across blocks", logits, [3]
    for cols in (1, 5, 8, 512, 4096, 70000, 151936):
        yield f"equal {cols}", torch.zeros(2, cols), [0, 0]
        yield f"-inf {cols}", torch.full((2, cols), -inf), [0, 0]
        yield f"nan {cols}", torch.full((2, cols), nan), [0, 0]
        last = torch.full((1, cols), -inf)
        last[0, cols - 1] = -5.0
        yield f"last {cols}", last, [cols - 1]
    zeros = torch.zeros(1, 64)
    zeros[0, :7] = -0.0
    yield "both zeros are equal", zeros, [0]
    mixed = torch.randn(1, 9000)
    mixed[0, [4000, 8000]] = nan
    mixed[0, 100] = inf
    yield "first NaN wins", mixed, [4000]


@pytest.mark.sanitize
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_argmax_of_awkward_rows(dtype: torch.dtype) -> None:
    """A36, on every kernel that can take the row, aligned and not."""
    for name, values, wanted in argmax_rows():
        x = values.cuda().to(dtype)
        for seen in (x, misaligned(x, 1)):
            for kernel in kernels_of("argmax", (seen,)):
                out = guarded_empty(seen.shape[:-1], torch.int64, "cuda")
                dandan_norm.argmax(seen, out=out.tensor, backend=kernel)
                out.check()
                assert out.tensor.tolist() == wanted, f"{name} {kernel}"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_argmax_of_random_rows(dtype: torch.dtype) -> None:
    """Few distinct values, so that ties are everywhere; the CPU's argmax is the truth."""
    for rows, cols in (
        (1, 1),
        (300, 7),
        (64, 128),
        (9, 4096),
        (5, 4099),
        (3, 50257),
        (130, 8192),
        (200, 33000),
        (1, 151936),
    ):
        x = torch.randint(-50, 50, (rows, cols), device="cuda").to(dtype)
        wanted = x.float().cpu().argmax(-1)
        for seen in (x, rows_strided(x, 3)):
            for kernel in kernels_of("argmax", (seen,)):
                assert torch.equal(dandan_norm.argmax(seen, backend=kernel).cpu(), wanted), f"{rows}x{cols} {kernel}"
    strided = torch.full((40, 3), -7, device="cuda", dtype=torch.int64)
    x = torch.randn(40, 515, device="cuda").to(dtype)
    dandan_norm.argmax(x, out=strided[:, 1], backend="cuda")
    assert torch.equal(strided[:, 1], x.argmax(-1))
    assert (strided[:, ::2] == -7).all()


@pytest.mark.parametrize("op", [*OPS, "argmax"])
def test_no_rows_and_no_columns(op: str) -> None:
    """A13: nothing is launched, and the next CUDA call finds no pending error."""
    for shape in ((0, 8192), (0, 7168), (3, 0, 128), (0,), (4, 0), (0, 0)):
        if op == "argmax" and shape[-1] == 0:
            continue
        x = torch.empty(shape, device="cuda", dtype=torch.float16)
        weight = torch.ones(shape[-1], device="cuda", dtype=torch.float16)
        arguments = {
            "rms_norm": (x, weight),
            "residual_rms_norm": (x, x, weight),
            "layer_norm": (x, weight, weight),
            "softmax": (x,),
            "silu_and_mul": (x, x),
            "argmax": (x,),
        }[op]
        for backend in ("auto", "cuda", "torch"):
            result = getattr(dandan_norm, op)(*arguments, backend=backend)
            for t in result if isinstance(result, tuple) else (result,):
                assert t.shape == (x.shape[:-1] if op == "argmax" else x.shape)
                assert t.dtype == (torch.int64 if op == "argmax" else x.dtype)
                assert t.device == x.device
            assert torch.ones(4, device="cuda").sum().item() == 4


@hypothesis.settings(max_examples=300, deadline=None, suppress_health_check=list(hypothesis.HealthCheck))
@hypothesis.given(data=strategies.data())
def test_random_calls(data: strategies.DataObject) -> None:
    """Random operators, shapes, strides, offsets, dtypes and outputs; the same bits as the contiguous call."""
    op = data.draw(strategies.sampled_from(OPS))
    dtype = data.draw(strategies.sampled_from(DTYPES))
    cols = data.draw(
        strategies.one_of(strategies.integers(1, 300), strategies.integers(1, 9000), strategies.sampled_from(WIDTHS))
    )
    leading = data.draw(strategies.lists(strategies.integers(1, 5), min_size=0, max_size=4))
    step = data.draw(strategies.integers(1, 2))
    padding, offset = data.draw(strategies.integers(0, 9)), data.draw(strategies.integers(0, 9))
    inputs = make_inputs(op, (*leading, cols), dtype, seed=cols + len(leading))

    def view(t: Any) -> Any:
        if not isinstance(t, torch.Tensor) or (t.dim() == 1 and t is not inputs[0] and op != "silu_and_mul"):
            return t
        shape = [step * n for n in t.shape[:-1]] + [t.shape[-1] + padding]
        base = torch.full((offset + torch.Size(shape).numel(),), float("nan"), device="cuda", dtype=t.dtype)[offset:]
        seen = base.view(shape)[tuple(slice(None, None, step) for _ in t.shape[:-1])][..., : t.shape[-1]]
        seen.copy_(t)
        return seen

    expected = check(op, inputs)
    got = run_guarded(op, tuple(view(t) for t in inputs), "cuda", row_padding=padding if leading else 0, offset=offset)
    for a, b in zip(got, expected, strict=True):
        assert_bit_equal(a, b, f"{op} {cols} {leading} {step} {padding} {offset}")


def test_torch_backend_and_auto_agree_with_the_meaning() -> None:
    for op in OPS:
        inputs = make_inputs(op, (33, 1024), torch.bfloat16)
        for backend in ("auto", "torch"):
            check(op, inputs, backend)
    assert LIBRARY.library.loaded

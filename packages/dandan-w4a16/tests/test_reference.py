"""w4a16_linear on the CPU: every weight read out, values against FP64, memory, gradients, schemas."""

from __future__ import annotations

import hypothesis
import pytest
import torch
from hypothesis import strategies
from w4a16_cases import (
    DTYPES,
    GROUPS,
    SCALE_DTYPES,
    check,
    generator,
    peak_memory,
    random_codes,
    random_weight,
    tensors,
    truth,
    weight_of,
)

from dandan_ops_core.testing import assert_bit_equal, guarded_empty
from dandan_w4a16 import (
    Int4Weight,
    dequantize_int4,
    pack_int4,
    reference,
    w4a16_linear,
)

EVERY_DTYPE = pytest.mark.parametrize("dtype", DTYPES, ids=str)


# ------------------------------------------------------------------------------------------------------------ values


@EVERY_DTYPE
@pytest.mark.parametrize("n", [1, 8, 64, 72, 192, 200])
def test_the_identity_reads_out_every_weight(dtype: torch.dtype, n: int) -> None:
    """A38: out[k, n] is exactly the weight, for N around multiples of 64 and 128."""
    weight = random_weight(n, 128)
    out = w4a16_linear(torch.eye(128, dtype=dtype), *tensors(weight))
    # A weight of -0 (a negative scale) comes out of a sum with zeros as +0.
    assert_bit_equal(out.t().contiguous(), weight_of(weight, dtype) + 0.0)


@EVERY_DTYPE
@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("scale_dtype", SCALE_DTYPES, ids=str)
@pytest.mark.parametrize("zero_mode", ["integer", "float"])
@pytest.mark.parametrize("bias", [False, True])
def test_every_mode(dtype: torch.dtype, group: int, scale_dtype: torch.dtype, zero_mode: str, bias: bool) -> None:
    weight = random_weight(72, 384, group, scale_dtype=scale_dtype, zero_mode=zero_mode)
    x = torch.randn(7, 384, generator=generator(2)).to(dtype)
    vector = torch.randn(72, generator=generator(3)).to(scale_dtype) if bias else None
    for backend in ("auto", "torch"):
        found = w4a16_linear(x, *tensors(weight), group_size=group, zero_mode=zero_mode, bias=vector, backend=backend)
        check(found, x, weight, vector)
        assert found.is_contiguous()
    wide = reference.w4a16_linear(x, *tensors(weight), vector, group, compute_dtype=torch.float64)
    assert wide.dtype == torch.float64
    torch.testing.assert_close(wide, truth(x, weight, vector), rtol=1e-13, atol=1e-13)


@hypothesis.given(data=strategies.data())
@hypothesis.settings(max_examples=60, deadline=None)
def test_whole_numbers_are_exact(data: strategies.DataObject) -> None:
    """Any sizes, any leading dimensions; all products and sums are exact, so the result has one value."""
    group = data.draw(strategies.sampled_from(GROUPS))
    n, groups = data.draw(strategies.integers(0, 40)), data.draw(strategies.integers(0, 3))
    lead = data.draw(strategies.lists(strategies.integers(0, 5), max_size=3))
    dtype, seed = data.draw(strategies.sampled_from(DTYPES)), data.draw(strategies.integers(0, 99))
    weight = random_weight(n, groups * group, group, whole=True, seed=seed)
    x = torch.randint(-2, 3, (*lead, groups * group), generator=generator(seed)).to(dtype)
    bias = torch.randint(-9, 10, (n,), generator=generator(seed)).float() if data.draw(strategies.booleans()) else None
    found = w4a16_linear(x, *tensors(weight), group_size=group, bias=bias)
    assert found.shape == (*lead, n)
    assert_bit_equal(found, truth(x, weight, bias).to(dtype))


@pytest.mark.parametrize("m", [1, 64])
def test_sums_beyond_float16(m: int) -> None:
    """A37: partial sums of 819200; the whole is exactly 0."""
    x = torch.full((m, 4096), 200.0).half()
    x[:, 2048:] = -200
    weight = Int4Weight(
        pack_int4(torch.full((64, 4096), 10)), torch.ones(64, 64).half(), torch.full((64, 64), 8, dtype=torch.uint8)
    )
    assert (w4a16_linear(x, *tensors(weight)) == 0).all()


@pytest.mark.parametrize("bias_dtype", SCALE_DTYPES, ids=str)
def test_bias_is_added_before_the_rounding(bias_dtype: torch.dtype) -> None:
    """1024 + 0.25 + 0.25: in float16 each addition alone would round to 1024."""
    x = torch.zeros(1, 64).half()
    x[0, 0], x[0, 1] = 1024, 0.25
    weight = Int4Weight(
        pack_int4(torch.ones(2, 64, dtype=torch.uint8)), torch.ones(2, 1).half(), torch.zeros(2, 1, dtype=torch.uint8)
    )
    bias = torch.tensor([0.25, 0.5]).to(bias_dtype)
    assert w4a16_linear(x, *tensors(weight), bias=bias).tolist() == [[1024.0, 1025.0]]  # 1024.5 to even, 1024.75 up


def test_the_weight_is_rounded_to_the_dtype_of_x() -> None:
    """Scales keep a precision that x has not: the product takes round(w), not w."""
    scale = 1 + 2**-9  # exact in float32 and float16, not in bfloat16
    weight = Int4Weight(
        pack_int4(torch.ones(1, 32, dtype=torch.uint8)),
        torch.tensor([[scale]]),
        torch.zeros(1, 1, dtype=torch.uint8),
        32,
    )
    for dtype, expected in ((torch.float16, 32 * scale), (torch.bfloat16, 32.0)):
        out = w4a16_linear(torch.ones(1, 32, dtype=dtype), *tensors(weight), group_size=32)
        assert out.item() == torch.tensor(expected).to(dtype).item()


def test_float_zeros_are_kept() -> None:
    """A46: (q - 8) * s + 0.03 with s = 0.1 has the zero 7.7; as 8 it would shift every weight by 0.03."""
    codes = random_codes(8, 64)
    weight = Int4Weight(
        pack_int4(codes), torch.full((8, 1), 0.1), torch.full((8, 1), 8 - 0.03 / 0.1), zero_mode="float"
    )
    additive = (codes.double() - 8) * 0.1 + 0.03
    out = w4a16_linear(torch.eye(64).half(), *tensors(weight), zero_mode="float").t().double()
    assert (out - additive).abs().max() <= 0.73 * 2**-11 + 1e-6
    with pytest.raises(TypeError, match="zero_mode='float' keeps them as they are"):
        w4a16_linear(torch.eye(64).half(), *tensors(weight))


@EVERY_DTYPE
def test_layout_is_declared_not_guessed(dtype: torch.dtype) -> None:
    """A45: a square weight, one row and many; a row of a batch equals the row alone within the bound."""
    weight = random_weight(128, 128)
    x = torch.randn(9, 128, generator=generator(5)).to(dtype)
    for rows in (x, x[:1], x[:1].unsqueeze(0), x[0]):
        found = w4a16_linear(rows, *tensors(weight))
        assert found.shape == (*rows.shape[:-1], 128)
        check(found, rows, weight)
    with pytest.raises(ValueError, match=r"^w4a16_linear: x has K=128 but qweight has K=64$"):
        w4a16_linear(x, *tensors(random_weight(128, 64)))


@EVERY_DTYPE
@pytest.mark.parametrize("lead", [(0,), (2, 0), (0, 3)], ids=str)
def test_no_rows(dtype: torch.dtype, lead: tuple[int, ...]) -> None:
    """A13."""
    weight = random_weight(24, 64)
    found = w4a16_linear(torch.empty(*lead, 64, dtype=dtype), *tensors(weight), bias=torch.ones(24))
    assert found.shape == (*lead, 24)
    assert found.dtype == dtype
    assert w4a16_linear(torch.empty(*lead, 64, dtype=dtype), *tensors(random_weight(0, 64))).shape == (*lead, 0)


def test_no_columns_give_the_bias_or_zeros() -> None:
    weight = random_weight(3, 0)
    x = torch.empty(2, 0).half()
    assert w4a16_linear(x, *tensors(weight)).tolist() == [[0.0] * 3] * 2
    assert w4a16_linear(x, *tensors(weight), bias=torch.tensor([1.0, 2, 3])).tolist() == [[1.0, 2, 3]] * 2


LAYOUTS = {
    "every second row": lambda x: torch.cat((x, x), 1).reshape(-1, x.shape[1])[::2],
    "columns of a wider tensor": lambda x: torch.cat((x * 0 + 9, x, x * 0 - 9), 1)[:, x.shape[1] : 2 * x.shape[1]],
    "every second column": lambda x: x.repeat_interleave(2, 1)[:, ::2],
    "transposed": lambda x: x.t().contiguous().t(),
    "odd start": lambda x: torch.cat((x.new_zeros(1), x.reshape(-1)))[1:].view(x.shape),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_strides_of_every_argument(layout: str) -> None:
    """The same bits as of contiguous copies."""
    view = LAYOUTS[layout]
    weight = random_weight(24, 256, whole=True)
    x, bias = torch.randint(-2, 3, (6, 256), generator=generator(6)).half(), torch.arange(24).half()
    expected = truth(x, weight, bias).half()
    moved = [view(t) for t in (x, *tensors(weight))]
    for t, whole in zip(moved, (x, *tensors(weight)), strict=True):
        assert torch.equal(t, whole)
    assert_bit_equal(w4a16_linear(*moved, bias=bias.repeat_interleave(2)[::2]), expected)  # type: ignore[misc]


@EVERY_DTYPE
def test_out(dtype: torch.dtype) -> None:
    weight = random_weight(24, 128)
    x = torch.randn(5, 128, generator=generator(7)).to(dtype)
    with guarded_empty((5, 24), dtype) as guarded:
        assert w4a16_linear(x, *tensors(weight), out=guarded.tensor) is guarded.tensor
    check(guarded.tensor, x, weight)
    wide = torch.full((5, 60), 7.0, dtype=dtype)
    w4a16_linear(x, *tensors(weight), out=wide[:, 3:51:2])
    assert_bit_equal(wide[:, 3:51:2].contiguous(), guarded.tensor)
    wide[:, 3:51:2] = 7
    assert (wide == 7).all()


@pytest.mark.parametrize("rows", [1, 5, 24])
def test_tiles_of_every_size(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles that divide N, that leave a rest, and rows longer than a tile."""
    weight = random_weight(24, 128, whole=True)
    x = torch.randint(-2, 3, (3, 128), generator=generator(8)).half()
    for elements in (rows * 128, 1):
        monkeypatch.setattr(reference, "TILE", elements)
        assert_bit_equal(w4a16_linear(x, *tensors(weight)), truth(x, weight).half())
        assert_bit_equal(dequantize_int4(weight), weight_of(weight, torch.float16))


def test_the_same_bits_twice() -> None:
    weight = random_weight(200, 512)
    x = torch.randn(5, 512, generator=generator(9)).half()
    first = w4a16_linear(x, *tensors(weight))
    for _ in range(3):
        assert_bit_equal(w4a16_linear(x, *tensors(weight)), first)


def test_inputs_are_not_changed() -> None:
    weight = random_weight(24, 128)
    arguments = (torch.randn(5, 128).half(), *tensors(weight))
    before = [t.clone() for t in arguments]
    w4a16_linear(*arguments, bias=torch.ones(24))
    for now, then in zip(arguments, before, strict=True):
        assert torch.equal(now, then)


# ------------------------------------------------------------------------------------------------------------ memory

# The weight in float16 would be 32 MiB, packed it is 8.75.
BOUND = 12 << 20


@pytest.fixture(scope="module")
def large() -> Int4Weight:
    return random_weight(4096, 4096)


def test_the_memory_test_sees_a_dequantised_weight(large: Int4Weight) -> None:
    """Otherwise the bounds below would prove nothing."""
    assert peak_memory(lambda: dequantize_int4(large)) >= 32 << 20


@pytest.mark.parametrize("m", [1, 16])
def test_a_call_keeps_no_dequantised_weight(large: Int4Weight, m: int) -> None:
    x = torch.randn(m, 4096).half()
    assert peak_memory(lambda: w4a16_linear(x, *tensors(large))) < BOUND


def test_a_call_with_gradients_keeps_no_dequantised_weight(large: Int4Weight) -> None:
    x = torch.randn(4, 4096).half().requires_grad_()

    def run() -> None:
        w4a16_linear(x, *tensors(large)).sum().backward()

    assert peak_memory(run) < BOUND

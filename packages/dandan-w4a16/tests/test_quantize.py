"""quantize_int4: codes, scales and zeros of odd groups, and the loss against the floating weight."""

from __future__ import annotations

import hypothesis
import pytest
import torch
from hypothesis import strategies
from w4a16_cases import GROUPS, codes_of, generator, tensors, weight_of

import dandan_w4a16
from dandan_ops_core.testing import assert_bit_equal
from dandan_w4a16 import Int4Weight, dequantize_int4, quantize_int4, reference, w4a16_linear

FLOATS = (torch.float16, torch.bfloat16, torch.float32)


def exact(weight: Int4Weight) -> torch.Tensor:
    """(q - z) * s without any rounding."""
    q, z = codes_of(weight.qweight).double(), weight.zeros.double().repeat_interleave(weight.group_size, 1)
    return (q - z) * weight.scales.double().repeat_interleave(weight.group_size, 1)


def steps(weight: Int4Weight) -> torch.Tensor:
    return weight.scales.double().repeat_interleave(weight.group_size, 1)


def assert_sound(quantized: Int4Weight, weight: torch.Tensor) -> None:
    """What holds of every finite weight: the format, finite positive scales, the loss."""
    n, k = weight.shape
    assert quantized.shape == (n, k)
    quantized.check_values()
    assert bool((quantized.scales > 0).all())
    step, loss = steps(quantized), (exact(quantized) - weight.double()).abs()
    # The largest codes near the largest number of the dtype would be infinite half a step further.
    near = weight.abs().double().unflatten(1, (-1, quantized.group_size)).amax(-1) + quantized.scales.double() * 1.01
    near = (near > torch.finfo(weight.dtype).max).repeat_interleave(quantized.group_size, 1)
    bound = torch.where(near, step, step / 2) * (1 + 1e-12)
    assert bool((loss <= bound).all()), float((loss / step).max())
    assert bool(torch.isfinite(weight_of(quantized, weight.dtype)).all())
    # An element of 0 stays 0.
    assert bool((exact(quantized)[weight == 0] == 0).all())
    assert_bit_equal(dequantize_int4(quantized, weight.dtype), weight_of(quantized, weight.dtype))


# -------------------------------------------------------------------------------------------------------------- loss


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("shift", [0.0, 1.0, -3.0])
def test_loss_is_at_most_half_a_step(dtype: torch.dtype, group: int, shift: float) -> None:
    """Quantisation loss alone; the error of the product is test_reference.py's."""
    weight = (torch.randn(33, 512, generator=generator(1)) + shift).to(dtype)
    quantized = quantize_int4(weight, group)
    assert quantized.scales.dtype == dtype
    assert_sound(quantized, weight)
    # A fifteenth of the range with 0 in it, rounded up in the scale's dtype: never less, at most one step of it more.
    groups = weight.double().unflatten(1, (-1, group))
    spread = (groups.amax(-1).clamp(min=0) - groups.amin(-1).clamp(max=0)) / 15
    ratio = quantized.scales.double() / spread
    assert bool((ratio >= 1 - 1e-15).all())
    assert bool((ratio <= 1 + 2 * torch.finfo(dtype).eps).all())


def test_loss_of_a_normal_weight() -> None:
    """Uniform errors of a step: the mean square is a twelfth of its square, and half a step is nearly reached."""
    weight = torch.randn(512, 1024, generator=generator(2))
    quantized = quantize_int4(weight)
    loss = (exact(quantized) - weight.double()) / steps(quantized)
    assert abs(float(loss.square().mean()) * 12 - 1) < 0.05
    assert 0.49 < float(loss.abs().max()) <= 0.5 + 1e-12


def numbers(dtype: torch.dtype) -> strategies.SearchStrategy[float]:
    """Finite numbers of a dtype, of every magnitude."""
    if dtype == torch.bfloat16:
        raw = strategies.integers(-0x7F7F, 0x7F7F)
        return raw.map(lambda bits: float(torch.tensor(abs(bits), dtype=torch.int16).view(dtype)) * (-1) ** (bits < 0))
    return strategies.floats(width=16 if dtype == torch.float16 else 32, allow_nan=False, allow_infinity=False)


@hypothesis.given(data=strategies.data())
@hypothesis.settings(max_examples=150, deadline=None)
def test_any_finite_weight(data: strategies.DataObject) -> None:
    dtype = data.draw(strategies.sampled_from(FLOATS))
    few = data.draw(strategies.lists(numbers(dtype), min_size=1, max_size=6))
    picks = data.draw(strategies.lists(strategies.integers(0, len(few) - 1), min_size=64, max_size=64))
    weight = torch.tensor([few[i] for i in picks], dtype=dtype).reshape(2, 32)
    assert_sound(quantize_int4(weight, 32), weight)


# -------------------------------------------------------------------------------------------------------- odd groups


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_odd_groups(dtype: torch.dtype) -> None:
    """A42: zeros, constants, tiny numbers, a single one."""
    smallest = torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps
    rows = {
        "zeros": torch.zeros(64),
        "negative zeros": -torch.zeros(64),
        "constant": torch.full((64,), 0.75),
        "negative constant": torch.full((64,), -0.3),
        "tiny": torch.full((64,), 1e-30),  # 0 in float16
        "the smallest number": torch.full((64,), smallest, dtype=torch.float64),
        "the smallest numbers": torch.arange(64, dtype=torch.float64) * smallest,
        "one among zeros": torch.nn.functional.one_hot(torch.tensor(5), 64).float(),
    }
    weight = torch.stack([row.double() for row in rows.values()]).to(dtype)
    quantized = quantize_int4(weight)
    assert_sound(quantized, weight)
    found = dict(zip(rows, exact(quantized), strict=True))
    for name in ("zeros", "negative zeros"):
        assert (found[name] == 0).all()
    assert quantized.scales[0].item() == 1
    # One step is the smallest number there is, so small multiples of it are exact.
    assert found["the smallest number"].tolist() == weight[5].tolist()
    assert found["one among zeros"][5] == pytest.approx(1, rel=float(torch.finfo(dtype).eps) * 2)
    assert int((found["one among zeros"] != 0).sum()) == 1


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_huge_groups(dtype: torch.dtype) -> None:
    """The range of a group can be twice the largest number; nothing comes back as infinity."""
    largest = torch.finfo(dtype).max
    weight = torch.zeros(5, 64, dtype=torch.float64)
    weight[0] = largest
    weight[1] = -largest
    weight[2, ::2], weight[2, 1::2] = largest, -largest
    weight[3] = torch.linspace(-largest, largest, 64, dtype=torch.float64)
    weight[4, 0], weight[4, 1] = largest, -largest / 33
    weight = weight.to(dtype)
    quantized = quantize_int4(weight)
    assert_sound(quantized, weight)
    # A constant is met to fifteen roundings of the scale.
    for row in (0, 1):
        assert dequantize_int4(quantized, dtype)[row].double().div(weight[row].double()).sub(1).abs().max() < (
            torch.finfo(dtype).eps
        )


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_the_product_with_odd_groups(dtype: torch.dtype) -> None:
    """A42: the linear layer on these equals the product with the dequantised weight."""
    weight = torch.zeros(4, 64, dtype=dtype)
    weight[1], weight[2], weight[3, 7] = 0.75, -0.3, 1.0
    quantized = quantize_int4(weight)
    out = w4a16_linear(torch.eye(64, dtype=dtype), *tensors(quantized))
    assert_bit_equal(out.t().contiguous(), dequantize_int4(quantized, dtype))


@pytest.mark.parametrize("group", GROUPS)
def test_a_group_knows_nothing_of_its_neighbours(group: int) -> None:
    weight = torch.randn(3, 4 * group, generator=generator(4))
    whole = quantize_int4(weight, group)
    for index in range(4):
        part = quantize_int4(weight[:, index * group : (index + 1) * group], group)
        assert_bit_equal(part.scales[:, 0], whole.scales[:, index])
        assert_bit_equal(part.zeros[:, 0], whole.zeros[:, index])


def test_more_than_one_tile(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = torch.randn(37, 256, generator=generator(5)).half()
    whole = quantize_int4(weight)
    monkeypatch.setattr(reference, "TILE", 4 * 256 * 5)
    for mine, theirs in zip(tensors(quantize_int4(weight)), tensors(whole), strict=True):
        assert_bit_equal(mine, theirs)


# ----------------------------------------------------------------------------------------------------------- layouts


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_slices_and_transposes(dtype: torch.dtype) -> None:
    """A06: the same as of a contiguous copy."""
    views = {
        "a slice of three dimensions": torch.randn(512, 2, 256).to(dtype)[:, ::2, :].squeeze(1),
        "columns": torch.randn(512, 1024).to(dtype)[:, 256:512],
        "transposed": torch.randn(256, 96).to(dtype).t(),
        "every second column": torch.randn(9, 256).to(dtype)[:, ::2],
        "expanded": torch.randn(1, 128).to(dtype).expand(7, -1),
    }
    for name, view in views.items():
        assert not view.is_contiguous(), name
        for mine, theirs in zip(tensors(quantize_int4(view)), tensors(quantize_int4(view.contiguous())), strict=True):
            assert_bit_equal(mine, theirs)


def test_no_rows_and_no_columns() -> None:
    assert quantize_int4(torch.zeros(0, 128)).shape == (0, 128)
    assert quantize_int4(torch.zeros(3, 0)).shape == (3, 0)


def test_the_weight_is_not_changed() -> None:
    weight = torch.randn(4, 64)
    before = weight.clone()
    quantize_int4(weight.requires_grad_())
    assert torch.equal(weight, before)


@pytest.mark.parametrize("scale_dtype", FLOATS, ids=str)
def test_scale_dtype(scale_dtype: torch.dtype) -> None:
    weight = torch.randn(4, 128, generator=generator(6))
    quantized = quantize_int4(weight, scale_dtype=scale_dtype)
    assert quantized.scales.dtype == scale_dtype
    assert_sound(quantized, weight)


def refused(name: str, error: type[Exception], text: str, *arguments: object, **keywords: object) -> object:
    return pytest.param(arguments, keywords, error, text, id=name)


ONES = torch.ones(4, 64)


@pytest.mark.parametrize(
    ("arguments", "keywords", "error", "text"),
    [
        refused("list", TypeError, "weight is list; a tensor is needed", [[1.0]]),
        refused("int", TypeError, "weight has dtype int64; float16, bfloat16 and float32 are supported", ONES.long()),
        refused(
            "double", TypeError, "weight has dtype float64; float16, bfloat16 and float32 are supported", ONES.double()
        ),
        refused("vector", ValueError, "weight has shape [64]; [N, K] is needed", ONES[0]),
        refused("group", ValueError, "group_size is 16; 32, 64 or 128 is needed", ONES, 16),
        refused("K", ValueError, "weight has K=64; a multiple of group_size=128 is needed", ONES, 128),
        refused("meta", ValueError, "weight is on meta; a tensor with values is needed", ONES.to("meta")),
        refused(
            "NaN",
            ValueError,
            "weight holds 256 NaN or infinite values in rows 0 to 3; finite ones are needed",
            ONES * torch.nan,
        ),
        refused(
            "one infinity",
            ValueError,
            "weight holds 1 NaN or infinite value in rows 0 to 3; finite ones are needed",
            torch.cat((torch.tensor([-torch.inf]), torch.ones(255))).reshape(4, 64),
        ),
        refused(
            "scale dtype",
            TypeError,
            "scale_dtype is torch.float64; float16, bfloat16 and float32 are supported",
            ONES,
            scale_dtype=torch.float64,
        ),
        refused(
            "scale overflow",
            ValueError,
            "a group of weight needs a scale beyond the largest float16; scale_dtype=float32 has room for it",
            ONES * 1e6,
            scale_dtype=torch.float16,
        ),
    ],
)
def test_refusals(
    arguments: tuple[object, ...], keywords: dict[str, object], error: type[Exception], text: str
) -> None:
    with pytest.raises(error) as raised:
        dandan_w4a16.quantize_int4(*arguments, **keywords)  # type: ignore[arg-type]
    assert str(raised.value) == f"quantize_int4: {text}"

"""The test helpers themselves: every check is shown to fail on what it is there to catch."""

from __future__ import annotations

import math

import pytest
import torch

from dandan_ops_core import testing as dt
from dandan_ops_core.testing import guards

HALF_DTYPES = [torch.float16, torch.bfloat16]
FLOAT_DTYPES = [*HALF_DTYPES, torch.float32]


@pytest.mark.parametrize("dtype", FLOAT_DTYPES)
@pytest.mark.parametrize("value", [1.0, 1.5, 1.999, 2.0, 3.0, 100.0, 1e-3, 6e4, -5.0])
def test_rounding_step_is_the_distance_to_the_next_number(dtype: torch.dtype, value: float) -> None:
    here = torch.tensor(value, dtype=torch.float64).to(dtype)
    above = torch.nextafter(here.abs(), torch.tensor(math.inf, dtype=dtype))
    assert dt.rounding_step(here, dtype).item() == (above.double() - here.abs().double()).item()


def test_rounding_step_of_zero_is_the_smallest_subnormal() -> None:
    assert dt.rounding_step(torch.zeros(()), torch.float16).item() == 2.0**-24
    assert dt.rounding_step(torch.zeros(()), torch.float32).item() == 2.0**-149


def test_rounding_step_beyond_the_largest_number_is_finite() -> None:
    assert dt.rounding_step(torch.tensor([1e9, math.inf], dtype=torch.float64), torch.float16).tolist() == [32.0, 32.0]


def test_limit_is_twice_the_honest_error_plus_half_a_step() -> None:
    reference = torch.tensor([[1.0, 3.0]], dtype=torch.float64)
    honest = torch.tensor([[1.0, 3.0]], dtype=torch.float16)
    honest[0, 1] += 2.0**-9
    limit = dt.error_limit(honest, reference, honest)
    assert limit.shape == (1, 1)
    assert limit.item() == 2 * 2.0**-9 + 2.0**-10  # half of the step 2**-9 at 3.0
    assert dt.error_limit(torch.float16, reference, 2.0**-9).item() == limit.item()


def test_limit_of_a_small_row_does_not_follow_a_large_one() -> None:
    reference = torch.tensor([[1000.3, 2.0], [0.001, 0.0005]], dtype=torch.float64)
    honest = reference.to(torch.float16)
    limit = dt.error_limit(honest, reference, honest)
    assert limit[1, 0] < 2e-6 < 0.3 < limit[0, 0]


def test_limit_is_never_under_twice_the_rows_own_honest_error() -> None:
    generator = torch.Generator().manual_seed(0)
    scale = torch.logspace(-3, 3, 16, dtype=torch.float64)[:, None]
    reference = torch.randn(16, 64, generator=generator, dtype=torch.float64) * scale
    honest = (reference + 0.01 * torch.randn(16, 64, generator=generator, dtype=torch.float64)).to(torch.bfloat16)
    own = (honest.double() - reference).abs().amax(-1, keepdim=True)
    limit = dt.error_limit(honest, reference, honest)
    assert bool((limit >= 2 * own).all())
    literal = 2 * own.amax() + 0.5 * dt.rounding_step(reference.abs().amax(-1, keepdim=True), torch.bfloat16)
    assert bool((limit <= literal).all())


def test_limit_refuses_integers_narrow_references_and_other_shapes() -> None:
    with pytest.raises(TypeError, match="compare integers exactly"):
        dt.error_limit(torch.int64, torch.zeros(2, dtype=torch.float64), 0.0)
    with pytest.raises(TypeError, match=r"must be float64, got torch\.float32"):
        dt.error_limit(torch.float16, torch.zeros(2), 0.0)
    with pytest.raises(ValueError, match=r"honest has shape \(3,\) but reference64 has \(2,\)"):
        dt.error_limit(torch.float16, torch.zeros(2, dtype=torch.float64), torch.zeros(3))


def test_assert_close_to_accepts_the_honest_result_and_names_the_worst_element() -> None:
    generator = torch.Generator().manual_seed(1)
    reference = torch.randn(4, 32, generator=generator, dtype=torch.float64)
    honest = reference.to(torch.bfloat16)
    good = dt.assert_close_to(honest, reference, honest, "rms_norm")
    assert good.ok
    assert good.share <= 1
    assert good.outside == 0
    assert good.count == 128
    bad = honest.clone()
    bad[2, 7] += 0.5
    with pytest.raises(
        AssertionError, match=r"rms_norm: worst element at \[2, 7\].*error 5\.\d+e-01, limit .* 1 of 128"
    ):
        dt.assert_close_to(bad, reference, honest, "rms_norm")


def test_assert_close_to_fails_on_nan_shape_and_dtype() -> None:
    reference = torch.ones(2, 3, dtype=torch.float64)
    honest = reference.half()
    poisoned = honest.clone()
    poisoned[1, 2] = math.nan
    with pytest.raises(AssertionError, match=r"at \[1, 2\].*1 NaN where the reference has none"):
        dt.assert_close_to(poisoned, reference, honest)
    with pytest.raises(AssertionError, match=r"shape is \(3,\), must be \(2, 3\)"):
        dt.assert_close_to(honest[0], reference, honest)
    with pytest.raises(AssertionError, match=r"dtype is torch\.float16, must be torch\.bfloat16"):
        dt.assert_close_to(honest, reference, honest, dtype=torch.bfloat16)


def test_not_finite_results_are_compared_by_kind() -> None:
    reference = torch.tensor([math.nan, math.inf, -math.inf, 1e6, 1.0], dtype=torch.float64)
    right = reference.half()  # 1e6 rounds to infinity in fp16
    dt.assert_close_to(right, reference, 0.0)
    for place, wrong in ((0, 1.0), (1, -math.inf), (2, math.nan), (3, -math.inf), (4, math.inf)):
        bad = right.clone()
        bad[place] = wrong
        result = dt.compare(bad, reference, 0.0)
        assert not result.ok
        assert result.index == (place,)
        assert result.outside == 1


def test_empty_and_zero_dimensional_comparisons() -> None:
    assert dt.compare(torch.zeros(0, 8), torch.zeros(0, 8, dtype=torch.float64), torch.zeros(0, 8)).ok
    assert dt.compare(torch.zeros(4, 0), torch.zeros(4, 0, dtype=torch.float64), torch.zeros(4, 0)).ok
    assert dt.compare(torch.tensor(1.0), torch.tensor(1.0, dtype=torch.float64), 0.0).ok
    assert not dt.compare(torch.tensor(2.0), torch.tensor(1.0, dtype=torch.float64), 0.0).ok


def test_bit_equality_sees_the_sign_of_zero_and_nan_payloads() -> None:
    dt.assert_bit_equal(torch.tensor([math.nan, 0.0]), torch.tensor([math.nan, 0.0]))
    with pytest.raises(
        AssertionError, match=r"1 of 2 elements differ in their bits; first at \[1\]: -0.0 instead of 0.0"
    ):
        dt.assert_bit_equal(torch.tensor([1.0, -0.0]), torch.tensor([1.0, 0.0]))
    with pytest.raises(AssertionError, match="compared with"):
        dt.assert_bit_equal(torch.zeros(2), torch.zeros(2, dtype=torch.float16))


def test_honest_math_restores_what_it_changed() -> None:
    matmul = torch.backends.cuda.matmul
    before = matmul.allow_fp16_reduced_precision_reduction
    with dt.honest_math():
        assert not matmul.allow_fp16_reduced_precision_reduction
        assert not matmul.allow_tf32
    assert matmul.allow_fp16_reduced_precision_reduction == before


DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int64, torch.int32, torch.uint8]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("offset", [0, 1, 3])
def test_guarded_tensor_is_placed_where_it_was_asked_for(dtype: torch.dtype, offset: int) -> None:
    guarded = dt.guarded_empty((3, 5), dtype, offset=offset)
    assert guarded.tensor.shape == (3, 5)
    assert guarded.tensor.is_contiguous()
    assert guarded.tensor.dtype == dtype
    assert guarded.tensor.data_ptr() % guards.ALIGNMENT == offset * dtype.itemsize
    guarded.tensor.fill_(1)
    guarded.check()


@pytest.mark.parametrize("dtype", FLOAT_DTYPES)
def test_poison_is_nan(dtype: torch.dtype) -> None:
    assert bool(torch.isnan(dt.guarded_empty((4,), dtype).tensor).all())


@pytest.mark.parametrize("dtype", DTYPES)
def test_unwritten_element_is_found(dtype: torch.dtype) -> None:
    guarded = dt.guarded_empty((4, 6), dtype, name="softmax")
    guarded.tensor[:2].fill_(0)
    guarded.tensor[3].fill_(0)
    guarded.tensor[2, 1:].fill_(0)
    with pytest.raises(dt.GuardError, match=r"softmax: 1 elements were never written, the first at \[2, 0\]"):
        guarded.check()
    guarded.check(written=False)
    guarded.tensor[2, 0] = 0
    guarded.check()


def test_unwritten_element_is_found_across_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guards, "CHECK_CHUNK", 4)
    guarded = dt.guarded_empty((3, 5), torch.float32)
    guarded.tensor.fill_(0)
    guarded.tensor[2, 3] = dt.guarded_empty((1,), torch.float32).tensor[0]
    with pytest.raises(dt.GuardError, match=r"first at \[2, 3\]"):
        guarded.check()


@pytest.mark.parametrize(
    ("place", "text"),
    [
        (-1, "before the output.* 1 elements before the start"),
        (24, "after the output.* 1 elements after the end"),
        (-100, "before .* 100 elements"),
        (24 + 99, "after .* 100 elements"),
    ],
)
def test_overwritten_guard_is_found(place: int, text: str) -> None:
    guarded = dt.guarded_empty((4, 6), torch.float16)
    guarded.tensor.fill_(0)
    guarded.check()
    guarded.tensor.as_strided((1,), (1,), guarded.tensor.storage_offset() + place).fill_(0)
    with pytest.raises(dt.GuardError, match=text):
        guarded.check()


def test_gap_between_rows_is_a_guard() -> None:
    guarded = dt.guarded_empty((3, 4), torch.float32, row_padding=2)
    assert guarded.tensor.stride() == (6, 1)
    guarded.tensor.fill_(0)
    guarded.check()
    guarded.tensor.as_strided((1,), (1,), guarded.tensor.storage_offset() + 10).fill_(0)
    with pytest.raises(
        dt.GuardError, match="1 elements between the rows were overwritten, the first 10 elements after"
    ):
        guarded.check()


def test_unwritten_element_of_a_strided_output_is_found() -> None:
    guarded = dt.guarded_empty((3, 4), torch.float32, strides=(1, 5))
    guarded.tensor.fill_(0)
    guarded.tensor[1, 2] = dt.guarded_empty((1,), torch.float32).tensor[0]
    with pytest.raises(dt.GuardError, match=r"1 elements were never written, the first at \[1, 2\]"):
        guarded.check()


@pytest.mark.parametrize("shape", [(0, 8), (4, 0), (0,)])
def test_empty_output_still_has_guards(shape: tuple[int, ...]) -> None:
    guarded = dt.guarded_empty(shape, torch.float32)
    guarded.check()
    guarded.tensor.as_strided((1,), (1,), guarded.tensor.storage_offset()).fill_(0)
    with pytest.raises(dt.GuardError, match="after the output"):
        guarded.check()


def test_context_manager_checks_and_lets_errors_through() -> None:
    with pytest.raises(dt.GuardError), dt.guarded_empty((4,), torch.float32):
        pass
    with pytest.raises(RuntimeError, match="from inside"), dt.guarded_empty((4,), torch.float32):
        raise RuntimeError("from inside")


def test_guarded_empty_refuses_overlap_and_contradictions() -> None:
    with pytest.raises(ValueError, match="overlap"):
        dt.guarded_empty((3, 4), torch.float32, strides=(3, 1))
    with pytest.raises(ValueError, match="not both"):
        dt.guarded_empty((3, 4), torch.float32, strides=(4, 1), row_padding=1)
    with pytest.raises(ValueError, match="1 strides for 2"):
        dt.guarded_empty((3, 4), torch.float32, strides=(4,))
    with pytest.raises(ValueError, match="offset must be 0 or more"):
        dt.guarded_empty((3,), torch.float32, offset=-1)


def test_inputs_keep_their_values_and_get_their_layout() -> None:
    values = torch.arange(12.0).reshape(3, 4)
    strided = dt.rows_strided(values, padding=3)
    assert torch.equal(strided, values)
    assert strided.stride() == (7, 1)
    assert math.isnan(strided.as_strided((1,), (1,), strided.storage_offset() + 4).item())
    shifted = dt.misaligned(values, 1)
    assert torch.equal(shifted, values)
    assert shifted.data_ptr() % 16 == 4
    assert shifted.is_contiguous()
    wide = dt.expanded(values[0], 5)
    assert wide.shape == (5, 4)
    assert wide.stride() == (0, 1)
    assert torch.equal(wide[3], values[0])
    left, right = dt.halves(values, values + 100)
    assert torch.equal(left, values)
    assert torch.equal(right, values + 100)
    assert left.untyped_storage().data_ptr() == right.untyped_storage().data_ptr()
    assert left.stride() == (8, 1)
    with pytest.raises(ValueError, match="one shape"):
        dt.halves(values, values[:2])


@pytest.mark.gpu
def test_delay_keeps_the_stream_busy() -> None:
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    dt.delay_stream(20.0, stream)
    assert not stream.query()
    stream.synchronize()


@pytest.mark.gpu
def test_guards_work_on_the_device() -> None:
    guarded = dt.guarded_empty((64, 128), torch.bfloat16, "cuda", offset=1)
    guarded.tensor.fill_(0)
    guarded.check()
    guarded.tensor.as_strided((1,), (1,), guarded.tensor.storage_offset() - 1).fill_(0)
    with pytest.raises(dt.GuardError, match="before the output"):
        guarded.check()

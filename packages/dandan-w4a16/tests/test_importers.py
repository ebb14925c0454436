"""The importers: every element keeps, in bits, the value of the source's own rule; what is ambiguous is refused."""

from __future__ import annotations

import hypothesis
import numpy
import pytest
import sources
import torch
from hypothesis import strategies
from importer_cases import (
    ALL,
    assert_imported,
    from_awq_layer,
    from_ct,
    from_ct_symmetric,
    from_signed,
    from_signed_packed,
    from_v1,
    from_v2,
)
from sources import Layer, layer
from w4a16_cases import codes_of, weight_of

from dandan_ops_core.testing import assert_bit_equal
from dandan_w4a16 import (
    from_awq,
    from_compressed_tensors,
    from_gptq,
    from_signed_int4,
)

DTYPES = (torch.float16, torch.bfloat16)
every_importer = pytest.mark.parametrize("name", ALL)


@every_importer
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("n", "k", "group"), [(64, 128, 128), (8, 384, 128), (24, 128, 64), (40, 96, 32)])
def test_bit_for_bit(name: str, dtype: torch.dtype, n: int, k: int, group: int) -> None:
    source = layer(n, k, group, dtype=dtype)
    assert_imported(ALL[name](source), source)


@every_importer
@pytest.mark.parametrize("target", [32, 64, 128])
def test_smaller_groups_repeat(name: str, target: int) -> None:
    source = layer(16, 384, 128)
    assert_imported(ALL[name](source, target_group_size=target), source, target)


@pytest.mark.parametrize("name", ["awq", "gptq v1", "gptq v2", "compressed-tensors"])
@pytest.mark.parametrize(("group", "expected"), [(32, 32), (64, 64), (96, 32), (128, 128), (192, 64), (384, 128)])
def test_the_largest_group_that_fits_is_the_default(name: str, group: int, expected: int) -> None:
    """384 is one group a row, the channel strategy."""
    source = layer(16, 384, group)
    assert_imported(ALL[name](source), source, expected)
    assert_imported(ALL[name](source, group_size=group if group < 384 else -1), source, expected)


@hypothesis.given(data=strategies.data())
@hypothesis.settings(max_examples=60, deadline=None)
def test_any_layer(data: strategies.DataObject) -> None:
    name = data.draw(strategies.sampled_from([*ALL, "compressed-tensors, symmetric"]))
    group = data.draw(strategies.sampled_from([32, 64, 128]))
    n, k = data.draw(strategies.integers(1, 5)) * 8, data.draw(strategies.integers(1, 4)) * group
    symmetric = name.endswith("symmetric")
    source = layer(n, k, group, symmetric=symmetric, seed=data.draw(strategies.integers(0, 1 << 20)))
    if name == "gptq v1" or name == "gptq v2":
        # All zeros 7 or 8 by chance are ambiguous and have a test of their own.
        hypothesis.assume(len(numpy.unique(source.zeros)) > 1)
    assert_imported(from_ct_symmetric(source) if symmetric else ALL[name](source), source)


def test_symmetric_weights_have_zeros_of_eight() -> None:
    source = layer(16, 256, 128, symmetric=True)
    for found in (from_ct_symmetric(source), from_v1(source), from_v2(source)):
        assert_imported(found, source)
        assert (found.zeros == 8).all()
    codes = torch.from_numpy(source.codes - 8)
    assert_imported(from_signed_int4(codes, source.scales), source, 64)


# ------------------------------------------------------------------------------------------------- single conventions


def test_awq_order() -> None:
    """A41: columns 0..7 of a word are its nibbles 0, 4, 1, 5, 2, 6, 3, 7, in the weights and in the zeros."""
    word = torch.tensor([[0x75316420]], dtype=torch.int32)
    found = from_awq(word.expand(32, 1), word, torch.ones(1, 8).half())
    assert torch.equal(codes_of(found.qweight), torch.arange(8).unsqueeze(1).expand(8, 32))
    assert found.zeros.flatten().tolist() == list(range(8))


def test_zeros_of_zero_beside_others() -> None:
    """A40: all eight come back, from AWQ and from the masked z - 1 word 0x770e27f7."""
    zeros = [8, 0, 8, 3, 15, 1, 8, 8]
    source = Layer(
        numpy.arange(8 * 32).reshape(8, 32) % 16, numpy.array(zeros).reshape(8, 1), torch.ones(8, 1).half(), 32
    )
    packed = sources.gptq(source, 1)
    assert packed["qzeros"].tolist() == [[0x770E27F7]]
    assert_imported(from_awq_layer(source), source)
    assert_imported(from_gptq(**packed, wrap=True), source)
    assert from_awq_layer(source).zeros.flatten().tolist() == zeros
    with pytest.raises(ValueError) as raised:
        from_gptq(**packed)
    assert str(raised.value) == (
        "from_gptq: 1 stored zeros are 15, which with zero_offset=1 are 16 or, wrapped, 0; wrap=True reads them as 0, "
        "zero_offset=0 as 15"
    )
    # The offset of 1 is added to each nibble: a carry out of the f would change its neighbour.
    assert from_gptq(**packed, zero_offset=0).zeros.flatten().tolist() == [7, 15, 7, 2, 14, 0, 7, 7]


def test_every_pair_of_code_and_zero() -> None:
    """A43: 256 pairs; the offset is added once, codes and zeros of 8 to 15 are not clamped."""
    zeros = numpy.arange(16).reshape(16, 1)
    codes = numpy.tile(numpy.arange(16), (16, 2))
    source = Layer(codes, zeros, torch.full((16, 1), 0.5).half(), 32)
    for name, convert in ALL.items():
        assert_imported(convert(source), source)
        for z in range(16):
            expected = [(q - z) * 0.5 for q in range(16)] * 2
            assert weight_of(convert(source), torch.float16)[z].tolist() == expected, name
    signed = from_signed_int4(
        torch.tensor([[-8, 7] * 16]), torch.ones(1, 1), torch.tensor([[-8]]), group_size=32, target_group_size=32
    )
    assert codes_of(signed.qweight)[0, :2].tolist() == [0, 15]
    assert signed.zeros.item() == 0


def test_zero_points_that_are_not_packed() -> None:
    """Older compressed-tensors checkpoints hold signed int8 zeros."""
    source = layer(16, 256, 64)
    tensors = sources.compressed_tensors(source, False)
    tensors["weight_zero_point"] = torch.from_numpy(source.zeros - 8).to(torch.int8)
    assert_imported(from_compressed_tensors(**tensors), source)


@pytest.mark.parametrize("n", [1, 7, 9, 20])
def test_rows_that_do_not_fill_a_word_of_zeros(n: int) -> None:
    source = layer(n, 128, 64)
    assert_imported(from_ct(source), source)
    assert_imported(from_v2(source), source)


# ------------------------------------------------------------------------------------------------ tails of a group


@pytest.mark.parametrize(("k", "index"), [(192, [0, 0, 1]), (448, [0, 0, 1, 1, 2, 2, 3]), (64, [0])])
def test_a_short_last_group(k: int, index: list[int]) -> None:
    """A44: K = 128 + 64 gives three groups of 64, with the scales s0, s0, s1."""
    source = layer(8, k, 128)
    for convert in (from_signed, from_signed_packed):
        found = convert(source)
        assert_imported(found, source, 64)
        assert_bit_equal(found.scales, source.scales[:, index])


@pytest.mark.parametrize(
    ("k", "group", "target", "text"),
    [
        (4304, 128, 64, "K=4304 is not a multiple of target_group_size=64"),
        (192, 128, 128, "K=192 is not a multiple of target_group_size=128"),
        (256, 64, 128, "target_group_size=128 does not divide the source's group_size=64; its groups would have two "
         "scales"),
        (256, 128, 16, "group_size is 16; 32, 64 or 128 is needed"),
    ],
)  # fmt: skip
def test_groups_that_do_not_fit(k: int, group: int, target: int, text: str) -> None:
    with pytest.raises(ValueError) as raised:
        from_signed(layer(8, k, group), target_group_size=target)
    assert str(raised.value) == f"from_signed_int4: {text}"

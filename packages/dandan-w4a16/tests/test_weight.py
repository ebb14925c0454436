"""The format: which bits hold which code, the dataclass, shards."""

from __future__ import annotations

import copy
import pickle

import hypothesis
import numpy
import pytest
import torch
from hypothesis import strategies
from w4a16_cases import GROUPS, codes_of, random_codes, random_weight, tensors, weight_of

from dandan_ops_core.testing import assert_bit_equal
from dandan_w4a16 import Int4Weight, dequantize_int4, pack_int4, unpack_int4


def test_a_word_by_hand() -> None:
    """Low nibble first: codes 0..7 are 0x76543210; a code of 8 or more in the last place makes the int32 negative."""
    codes = torch.tensor([[0, 1, 2, 3, 4, 5, 6, 7, 15, 14, 13, 12, 11, 10, 9, 8]])
    words = pack_int4(codes)
    assert words.tolist() == [[0x76543210, 0x89ABCDEF - (1 << 32)]]
    assert unpack_int4(words).tolist() == codes.tolist()


@hypothesis.given(data=strategies.data())
@hypothesis.settings(max_examples=100, deadline=None)
def test_pack_is_the_definition_and_unpack_its_inverse(data: strategies.DataObject) -> None:
    n, words = data.draw(strategies.integers(0, 5)), data.draw(strategies.integers(0, 6))
    codes = data.draw(
        strategies.lists(strategies.lists(strategies.integers(0, 15), min_size=8 * words, max_size=8 * words),
                         min_size=n, max_size=n)
    )  # fmt: skip
    dtype = data.draw(strategies.sampled_from([torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64]))
    packed = pack_int4(torch.tensor(codes, dtype=dtype).reshape(n, 8 * words))
    expected = [[sum(code << 4 * i for i, code in enumerate(row[8 * j : 8 * j + 8])) for j in range(words)]
                for row in codes]  # fmt: skip
    assert packed.dtype == torch.int32
    assert packed.shape == (n, words)
    assert packed.is_contiguous()
    assert (packed.to(torch.int64) & 0xFFFFFFFF).tolist() == expected
    unpacked = unpack_int4(packed)
    assert unpacked.dtype == torch.uint8
    assert unpacked.shape == (n, 8 * words)
    assert unpacked.tolist() == codes


def test_every_word_survives() -> None:
    words = torch.randint(-(1 << 31), 1 << 31, (64, 33), generator=torch.Generator().manual_seed(3)).to(torch.int32)
    assert torch.equal(pack_int4(unpack_int4(words)), words)
    assert torch.equal(unpack_int4(words).to(torch.int64), codes_of(words))


@pytest.mark.parametrize(
    "view",
    [
        lambda t: t[::2],
        lambda t: t[:, 8:24],
        lambda t: torch.cat((t, t), 1)[:, ::2],
        lambda t: t.t().contiguous().t(),
        lambda t: t[:1].expand(4, -1),
    ],
)
def test_views_are_read_as_they_are(view: object) -> None:
    codes = view(random_codes(6, 32))  # type: ignore[operator]
    assert torch.equal(pack_int4(codes), pack_int4(codes.contiguous()))
    words = view(torch.randint(-9, 9, (6, 32), dtype=torch.int32))  # type: ignore[operator]
    assert torch.equal(unpack_int4(words), unpack_int4(words.contiguous()))


def test_numpy_reads_the_same_bytes() -> None:
    """Checkpoints are bytes: the codes 2j and 2j+1 of a row are the nibbles of its byte j."""
    codes = random_codes(3, 40)
    raw = numpy.frombuffer(pack_int4(codes).numpy().tobytes(), dtype=numpy.uint8).reshape(3, 20)
    pairs = codes.numpy().reshape(3, 20, 2)
    assert (raw == pairs[:, :, 0] + 16 * pairs[:, :, 1]).all()


@pytest.mark.parametrize(
    ("codes", "error", "text"),
    [
        ([[0] * 8], TypeError, "pack_int4: codes is list; a tensor is needed"),
        (torch.zeros(2, 8), TypeError, "pack_int4: codes has dtype float32; an integer dtype is needed"),
        (torch.zeros(2, 8, dtype=torch.bool), TypeError, "pack_int4: codes has dtype bool; an integer dtype is needed"),
        (torch.zeros(8, dtype=torch.uint8), ValueError, "pack_int4: codes has shape [8]; [N, K] is needed"),
        (torch.zeros(2, 9, dtype=torch.uint8), ValueError, "pack_int4: codes has K=9; a multiple of 8 is needed"),
        (torch.full((2, 8), 16), ValueError, "pack_int4: codes hold 16; 0 to 15 is needed"),
        (torch.full((2, 8), 256), ValueError, "pack_int4: codes hold 256; 0 to 15 is needed"),
        (torch.full((2, 8), -1), ValueError, "pack_int4: codes hold -1; 0 to 15 is needed"),
    ],
)
def test_pack_refuses(codes: object, error: type[Exception], text: str) -> None:
    with pytest.raises(error) as raised:
        pack_int4(codes)  # type: ignore[arg-type]
    assert str(raised.value) == text


@pytest.mark.parametrize(
    ("words", "error", "text"),
    [
        (None, TypeError, "unpack_int4: qweight is NoneType; a tensor is needed"),
        (torch.zeros(2, 8), TypeError, "unpack_int4: qweight has dtype float32; int32 is needed"),
        (torch.zeros(2, 8, dtype=torch.int64), TypeError, "unpack_int4: qweight has dtype int64; int32 is needed"),
        (torch.zeros(8, dtype=torch.int32), ValueError, "unpack_int4: qweight has shape [8]; [N, K/8] is needed"),
    ],
)
def test_unpack_refuses(words: object, error: type[Exception], text: str) -> None:
    with pytest.raises(error) as raised:
        unpack_int4(words)  # type: ignore[arg-type]
    assert str(raised.value) == text


# ------------------------------------------------------------------------------------------------------- Int4Weight


@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("zero_mode", ["integer", "float"])
@pytest.mark.parametrize("scale_dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_dequantize_is_the_rule(group: int, zero_mode: str, scale_dtype: torch.dtype, dtype: torch.dtype) -> None:
    weight = random_weight(24, 384, group, scale_dtype=scale_dtype, zero_mode=zero_mode)
    assert_bit_equal(dequantize_int4(weight, dtype), weight_of(weight, dtype))


def test_dequantize_of_more_than_one_tile() -> None:
    weight = random_weight(300, 8192)
    assert_bit_equal(dequantize_int4(weight), weight_of(weight, torch.float16))


def test_dequantize_refuses() -> None:
    with pytest.raises(TypeError, match="^dequantize_int4: weight is Tensor; an Int4Weight is needed$"):
        dequantize_int4(torch.zeros(2, 8))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"^dequantize_int4: dtype is torch.float64; float16, bfloat16 and float32 are"):
        dequantize_int4(random_weight(2, 64), torch.float64)


def test_zero_is_exact_for_every_zero_and_scale() -> None:
    """q = z gives 0 whatever the scale is."""
    z = torch.arange(16, dtype=torch.uint8).reshape(16, 1)
    weight = Int4Weight(pack_int4(z.expand(16, 32)), torch.full((16, 1), 60000.0).half(), z, 32)
    assert (dequantize_int4(weight) == 0).all()


def test_what_it_tells() -> None:
    weight = random_weight(24, 384, 32)
    assert weight.shape == (24, 384)
    assert weight.device == torch.device("cpu")
    assert weight.nbytes == 24 * 192 + 24 * 12 * 2 + 24 * 12
    assert weight.check_values() is weight
    assert weight.to("cpu").qweight is weight.qweight


@pytest.mark.parametrize("make", [copy.deepcopy, lambda weight: pickle.loads(pickle.dumps(weight))])
def test_copies(make: object) -> None:
    weight = random_weight(5, 128)
    other = make(weight)  # type: ignore[operator]
    for mine, theirs in zip(tensors(weight), tensors(other), strict=True):
        assert_bit_equal(theirs, mine)
    assert (other.group_size, other.zero_mode) == (64, "integer")


def word(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.int32)


def half(*shape: int) -> torch.Tensor:
    return torch.ones(shape, dtype=torch.float16)


def byte(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.uint8)


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ((half(4, 8), half(4, 1), byte(4, 1)), TypeError, "qweight has dtype float16; int32 is needed"),
        ((word(4), half(4, 1), byte(4, 1)), ValueError, "qweight has shape [4]; [N, K/8] is needed"),
        ((word(4, 8), half(4, 1), byte(4, 1), 48), ValueError, "group_size is 48; 32, 64 or 128 is needed"),
        ((word(4, 8), half(4, 1), byte(4, 1), "64"), ValueError, "group_size is '64'; 32, 64 or 128 is needed"),
        ((word(4, 9), half(4, 1), byte(4, 1)), ValueError, "K=72 of qweight is not a multiple of group_size=64"),
        (
            (word(4, 8), half(4, 2), byte(4, 1)),
            ValueError,
            "scales have shape [4, 2]; [4, 1] is needed for N=4, K=64, group_size=64",
        ),
        (
            (word(4, 8), half(4, 1), byte(1, 4)),
            ValueError,
            "zeros have shape [1, 4]; [4, 1] is needed for N=4, K=64, group_size=64",
        ),
        (
            (word(4, 8), half(4, 1).double(), byte(4, 1)),
            TypeError,
            "scales has dtype float64; float16, bfloat16 and float32 are supported",
        ),
        (
            (word(4, 8), half(4, 1), byte(4, 1).int()),
            TypeError,
            "zeros have dtype int32; uint8, or float16, bfloat16 or float32 is needed",
        ),
        (
            (word(4, 8), half(4, 1), half(4, 1)),
            TypeError,
            "zeros have dtype float16; zero_mode='integer' needs uint8; zero_mode='float' keeps them as they are",
        ),
        (
            (word(4, 8), half(4, 1), byte(4, 1), 64, "float"),
            TypeError,
            "zeros have dtype uint8; zero_mode='float' needs float16, bfloat16 or float32",
        ),
        (
            (word(4, 8), half(4, 1), byte(4, 1), 64, "round"),
            ValueError,
            "zero_mode is 'round'; 'integer' or 'float' is needed",
        ),
        ((word(4, 8), half(4, 1).to("meta"), byte(4, 1)), ValueError, "scales are on meta but qweight is on cpu"),
    ],
)
def test_int4_weight_refuses(arguments: tuple[object, ...], error: type[Exception], text: str) -> None:
    with pytest.raises(error) as raised:
        Int4Weight(*arguments)  # type: ignore[arg-type]
    assert str(raised.value) == f"Int4Weight: {text}"


def test_values_that_break_the_rules() -> None:
    for zeros, scales, mode, text in (
        (byte(4, 1) + 16, half(4, 1), "integer", "zeros hold 16; 0 to 15 is needed"),
        (byte(4, 1), half(4, 1) * torch.nan, "integer", "scales hold 4 NaN or infinite values; finite ones are needed"),
        (half(4, 1), half(4, 1) * torch.inf, "float", "scales hold 4 NaN or infinite values; finite ones are needed"),
        (
            torch.tensor([[0.0], [1], [2], [-torch.inf]]),
            half(4, 1),
            "float",
            "zeros hold 1 NaN or infinite value; finite ones are needed",
        ),
    ):
        weight = Int4Weight(word(4, 8), scales, zeros, 64, mode)
        with pytest.raises(ValueError) as raised:
            weight.check_values()
        assert str(raised.value) == f"Int4Weight: {text}"


# ------------------------------------------------------------------------------------------------------------ shards


@pytest.mark.parametrize("world", [1, 2, 3, 6])
@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("zero_mode", ["integer", "float"])
def test_shards_put_together_are_the_whole(world: int, dim: int, zero_mode: str) -> None:
    weight = random_weight(12, 384, 64, zero_mode=zero_mode)
    parts = [weight.shard(dim, rank, world) for rank in range(world)]
    for part in parts:
        assert part.shape == ((12 // world, 384) if dim == 0 else (12, 384 // world))
        assert part.zero_mode == zero_mode
        assert all(t.is_contiguous() for t in tensors(part))
    for name in ("qweight", "scales", "zeros"):
        assert_bit_equal(torch.cat([getattr(part, name) for part in parts], dim), getattr(weight, name))
    whole = torch.cat([dequantize_int4(part) for part in parts], dim)
    assert_bit_equal(whole, dequantize_int4(weight))


def test_a_shard_is_a_copy() -> None:
    """Otherwise one rank's part would keep the whole weight alive."""
    weight = random_weight(12, 128)
    for dim in (0, 1):
        for t in tensors(weight.shard(dim, 0, 2)):
            assert t.untyped_storage().nbytes() == t.numel() * t.element_size()


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ((2, 0, 2), "dim is 2; 0 (rows, N) or 1 (columns, K) is needed"),
        ((0, 2, 2), "rank is 2 of world 2; 0 <= rank < world is needed"),
        ((0, -1, 2), "rank is -1 of world 2; 0 <= rank < world is needed"),
        ((0, 0, 0), "rank is 0 of world 0; 0 <= rank < world is needed"),
        ((0, 0, 5), "N=12 is not a multiple of world=5"),
        ((1, 0, 4), "K=384 is not a multiple of world=4 times group_size=64"),
    ],
)
def test_shard_refuses(arguments: tuple[int, int, int], text: str) -> None:
    with pytest.raises(ValueError) as raised:
        random_weight(12, 384, 64).shard(*arguments)
    assert str(raised.value) == f"Int4Weight.shard: {text}"

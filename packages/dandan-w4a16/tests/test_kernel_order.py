"""The kernels' order of a weight: places of codes and scales, padding, the way back, and products of it on the CPU."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode
from w4a16_cases import DTYPES, GROUPS, codes_of, generator, random_codes, random_weight, tensors, truth, weight_of

from dandan_ops_core.testing import assert_bit_equal
from dandan_w4a16 import pack_int4, reference
from dandan_w4a16._ops import LIBRARY
from dandan_w4a16.packed import packed_linear

EVERY_DTYPE = pytest.mark.parametrize("dtype", DTYPES, ids=str)
EVERY_GROUP = pytest.mark.parametrize("group", GROUPS)
# n: one, around the 8 and 16 rows of a fragment, around blocks; k: shorter than a block, no multiple of one, an odd
# number of blocks under a group of 128.
SIZES = list(itertools.product((1, 7, 16, 17, 63, 64, 65, 130), (8, 24, 64, 72, 96, 128, 192, 264)))

repack, unpack = LIBRARY.op("repack"), LIBRARY.op("unpack")


def loose_weight(
    n: int, k: int, group: int, dtype: torch.dtype = torch.float16, seed: int = 0
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Words, scales and zeros of any K; the last group may be short."""
    source = generator(seed)
    groups = (n, -(-k // group))
    scales = (torch.randn(groups, generator=source) / 8).to(dtype)
    zeros = torch.randint(0, 16, groups, generator=source).to(torch.uint8)
    return pack_int4(random_codes(n, k, seed + 1)), scales, zeros


def loose_dequantized(
    qweight: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor, group: int, dtype: torch.dtype
) -> torch.Tensor:
    """The rule, element by element."""
    k = qweight.shape[1] * 8
    s, z = (t.float().repeat_interleave(group, 1)[:, :k] for t in (scales, zeros))
    return ((codes_of(qweight).float() - z) * s).to(dtype)


def code_at(codes: torch.Tensor, row: int, column: int, k: int) -> int:
    """From the picture in csrc/w4a16.h: lane 4g + t of a fragment holds rows g and g + 8, columns 2t, 2t + 1, 2t + 8,
    2t + 9; the nibbles of its word from the lowest: rows in turn, of columns 2t, 2t + 8, 2t + 1, 2t + 9.
    """
    blocks_k = -(-k // 64)
    lane = 4 * (row % 8) + column % 8 // 2
    block = row // 64 * blocks_k + column // 64
    word = int(codes[((block * 4 + row % 64 // 16) * 32 + lane) * 4 + column % 64 // 16])
    nibble = {0: 0, 8: 1, 1: 2, 9: 3}[column % 16 - 2 * (column % 8 // 2)] * 2 + row % 16 // 8
    return word >> (4 * nibble) & 15


def pair_at(pairs: torch.Tensor, row: int, group_index: int, k: int, group: int) -> tuple[float, float]:
    groups = -(-(-(-k // 64) * 64) // group)
    at = (((row // 64 * groups + group_index) * 4 + row % 64 // 16) * 8 + row % 8) * 2 + row % 16 // 8
    return float(pairs[2 * at]), float(pairs[2 * at + 1])


@EVERY_DTYPE
@EVERY_GROUP
def test_every_place(dtype: torch.dtype, group: int) -> None:
    """And of what does not exist: weights of exactly 0."""
    for n, k in ((70, 200), (64, 64), (1, 8), (17, 96)):
        qweight, scales, zeros = loose_weight(n, k, group, dtype)
        codes, pairs = repack(qweight, scales, zeros, group)
        rows, columns = -(-n // 64) * 64, -(-k // 64) * 64
        assert codes.shape == (rows * columns // 8,)
        assert pairs.shape == (rows * -(-columns // group) * 2,)
        plain, groups = codes_of(qweight).tolist(), scales.shape[1]
        for row, column in itertools.product(range(rows), range(columns)):
            g = column // group
            exists = row < n and g < groups
            wanted = plain[row][column] if row < n and column < k else int(zeros[row, g]) if exists else 0
            assert code_at(codes, row, column, k) == wanted, (row, column)
        for row, g in itertools.product(range(rows), range(-(-columns // group))):
            exists = row < n and g < groups
            found = pair_at(pairs, row, g, k, group)
            assert found == ((float(scales[row, g]), float(zeros[row, g])) if exists else (0.0, 0.0)), (row, g)


@EVERY_DTYPE
@EVERY_GROUP
@pytest.mark.parametrize("tile", [reference.TILE, 64 * 72], ids=["one tile", "tiles of a block of rows"])
def test_there_and_back(dtype: torch.dtype, group: int, tile: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reference, "TILE", tile)
    for seed, (n, k) in enumerate(SIZES):
        weight = loose_weight(n, k, group, dtype, seed)
        for found, wanted in zip(unpack(*repack(*weight, group), n, k, group), weight, strict=True):
            assert_bit_equal(found, wanted)


@settings(max_examples=60, deadline=None)
@given(n=st.integers(0, 200), k=st.integers(0, 60), group=st.sampled_from(GROUPS), seed=st.integers(0, 99))
def test_there_and_back_of_any_size(n: int, k: int, group: int, seed: int) -> None:
    weight = loose_weight(n, 8 * k, group, seed=seed)
    for found, wanted in zip(unpack(*repack(*weight, group), n, 8 * k, group), weight, strict=True):
        assert_bit_equal(found, wanted)


def test_every_bit_of_a_scale_comes_back() -> None:
    """Signs of zero, subnormal numbers, NaN and infinity included: moving is no arithmetic."""
    for dtype in DTYPES:
        scales = torch.arange(-(1 << 15), 1 << 15).to(torch.int16).view(dtype).view(-1, 4)
        weight = pack_int4(torch.zeros(scales.shape[0], 128, dtype=torch.uint8)), scales, torch.zeros(scales.shape)
        codes, pairs = repack(weight[0], scales, weight[2].to(torch.uint8), 32)
        assert_bit_equal(unpack(codes, pairs, scales.shape[0], 128, 32)[1], scales)


def test_weights_of_other_layouts() -> None:
    qweight, scales, zeros = loose_weight(40, 256, 64)
    wanted = repack(qweight, scales, zeros, 64)
    wide = [torch.cat((t, t), 1)[:, t.shape[1] :] for t in (qweight, scales, zeros)]
    turned = [t.t().contiguous().t() for t in (qweight, scales, zeros)]
    for given_ in (wide, turned):
        assert not any(t.is_contiguous() for t in given_)
        for found, right in zip(repack(*given_, 64), wanted, strict=True):
            assert_bit_equal(found, right)
    spread = [torch.stack((t, t), 1).flatten()[::2] for t in wanted]
    for found, right in zip(unpack(*spread, 40, 256, 64), (qweight, scales, zeros), strict=True):
        assert_bit_equal(found, right)


@EVERY_DTYPE
@EVERY_GROUP
def test_products_of_every_size(dtype: torch.dtype, group: int) -> None:
    """The identity reads out every weight, whatever is padded."""
    for seed, (n, k) in enumerate(SIZES):
        weight = loose_weight(n, k, group, dtype, seed)
        found = packed_linear(torch.eye(k, dtype=dtype), *repack(*weight, group), None, n, k, group)
        assert_bit_equal(found.t().contiguous() + 0.0, loose_dequantized(*weight, group, dtype) + 0.0)


@EVERY_DTYPE
@pytest.mark.parametrize("tile", [reference.TILE, 64 * 128], ids=["one tile", "tiles"])
def test_products_by_tiles(dtype: torch.dtype, tile: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reference, "TILE", tile)
    weight = random_weight(200, 128, 64, scale_dtype=dtype, whole=True)
    x = torch.randint(-2, 3, (2, 3, 128), generator=generator(1)).to(dtype)
    bias = torch.arange(200).float()
    ordered = repack(*tensors(weight), 64)
    found = packed_linear(x, *ordered, bias, 200, 128, 64)
    assert_bit_equal(found, truth(x, weight, bias).to(dtype))
    out = torch.empty(2, 3, 200, dtype=dtype)
    assert packed_linear(x, *ordered, bias, 200, 128, 64, out=out) is out
    assert_bit_equal(out, found)
    grad = torch.randint(-2, 3, (5, 200), generator=generator(2)).to(dtype)
    wanted = (grad.double() @ weight_of(weight, dtype).double()).to(dtype)
    assert_bit_equal(LIBRARY.op("packed_linear_grad_x")(grad, *ordered, 200, 128, 64), wanted)


def test_no_rows_no_columns_no_sums() -> None:
    bias = torch.tensor([1.0, 2.0, 3.0]).half()
    ordered = repack(*loose_weight(3, 64, 64), 64)
    assert packed_linear(torch.empty(2, 0, 64).half(), *ordered, bias, 3, 64, 64).shape == (2, 0, 3)
    nothing = repack(*loose_weight(3, 0, 64), 64)
    assert torch.equal(packed_linear(torch.empty(2, 0).half(), *nothing, bias, 3, 0, 64), bias.expand(2, 3))
    assert not packed_linear(torch.empty(2, 0).half(), *nothing, None, 3, 0, 64).any()
    assert packed_linear(torch.empty(2, 64).half(), *repack(*loose_weight(0, 64, 64), 64), None, 0, 64, 64).shape == (
        2,
        0,
    )


@pytest.mark.parametrize("form", ["", "_out", "_reference", "_reference_out"])
def test_opcheck_of_every_form(form: str) -> None:
    ordered = repack(*loose_weight(24, 128, 64), 64)
    arguments = (torch.ones(3, 128).half(), *ordered, torch.ones(24).half(), 24, 128, 64)
    if "reference" not in form:
        arguments = (*arguments, 0)
    if form.endswith("out"):
        arguments = (*arguments, torch.empty(3, 24).half())
    checks = ("test_schema", "test_faketensor") if "reference" not in form else ("test_schema",)
    torch.library.opcheck(LIBRARY.op(f"packed_linear{form}"), arguments, test_utils=checks)


def test_opcheck_of_the_others() -> None:
    weight = loose_weight(24, 136, 64)
    ordered = repack(*weight, 64)
    both = ("test_schema", "test_faketensor")
    torch.library.opcheck(repack, (*weight, 64), test_utils=both)
    torch.library.opcheck(unpack, (*ordered, 24, 136, 64), test_utils=both)
    arguments = (torch.ones(3, 24).half(), *ordered, 24, 136, 64)
    torch.library.opcheck(LIBRARY.op("packed_linear_grad_x"), arguments, test_utils=both)


# ------------------------------------------------------------------------------------------------------------ refusals


GOOD = {"x": torch.ones(4, 136).half(), "n": 24, "k": 136, "group_size": 64, "bias": None}
PAIRS = repack(*loose_weight(24, 136, 64), 64)
REFUSED = [
    ({"x": torch.ones(4, 128).half()}, ValueError, "x has K=128 but the weight has K=136"),
    ({"x": torch.ones(4, 136)}, TypeError, "x has dtype float32; float16 and bfloat16 are supported"),
    ({"x": torch.tensor(1.0).half()}, ValueError, "x has 0 dimensions; at least 1 is needed"),
    ({"codes": PAIRS[0].float()}, TypeError, "codes have dtype float32; int32 is needed"),
    ({"codes": PAIRS[0].view(2, -1)}, ValueError,
     "codes have shape [2, 768]; [1536] is needed for n=24, k=136, group_size=64"),
    ({"codes": PAIRS[0].to("meta")}, ValueError, "codes are on meta but x is on cpu"),
    ({"scales": PAIRS[1].float()}, TypeError, "scales have dtype float32; float16 and bfloat16 are supported"),
    ({"scales": PAIRS[1].to("meta")}, ValueError, "scales are on meta but codes are on cpu"),
    ({"scales": PAIRS[1][1:]}, ValueError,
     "scales have shape [383]; [384] is needed for n=24, k=136, group_size=64"),
    ({"n": 65}, ValueError, "codes have shape [1536]; [3072] is needed for n=65, k=136, group_size=64"),
    ({"n": -1}, ValueError, "n is -1; 0 to 2147483647 is needed"),
    ({"k": 1 << 31}, ValueError, "k is 2147483648; 0 to 2147483647 is needed"),
    ({"k": 132}, ValueError, "k is 132; a multiple of 8 is needed"),
    ({"group_size": 16}, ValueError, "group_size is 16; 32, 64 or 128 is needed"),
    ({"bias": torch.ones(25).half()}, ValueError, "bias has shape [25] but the weight has N=24"),
    ({"bias": torch.ones(24).int()}, TypeError,
     "bias has dtype int32; float16, bfloat16 and float32 are supported"),
    ({"bias": torch.ones(24, device="meta")}, ValueError, "bias is on meta but x is on cpu"),
    ({"out": torch.ones(4, 25).half()}, ValueError, "out has shape [4, 25]; [4, 24] is needed"),
    ({"out": torch.ones(1, 24).half().expand(4, 24)}, ValueError, "elements of out share memory"),
    ({"out": GOOD["x"].view(-1)[:96].view(4, 24)}, ValueError, "out overlaps x"),  # type: ignore[union-attr]
    ({"out": PAIRS[1][:96].view(4, 24)}, ValueError, "out overlaps scales"),
    ({"backend": "marlin"}, ValueError,
     "backend 'marlin' is unknown; it is one of auto, torch, cuda, sm80_decode, sm90_decode, sm80_mma, sm90a_wgmma, "
     "sm80_dequantize"),
]  # fmt: skip


@pytest.mark.parametrize("place", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize(("changes", "error", "text"), REFUSED, ids=[text for _, _, text in REFUSED])
def test_refused(changes: dict[str, object], error: type[Exception], text: str, place: str) -> None:
    def there(value: object) -> object:
        if not isinstance(value, torch.Tensor) or place == "cpu" or value.is_meta:
            return value
        # With the strides and the sharing of memory that the case is about.
        key = value.untyped_storage().data_ptr()
        if key not in moved:
            moved[key] = torch.empty(0, dtype=value.dtype).set_(value.untyped_storage()).cuda()  # type: ignore[call-overload]
        return moved[key].as_strided(value.shape, value.stride(), value.storage_offset())

    moved: dict[int, torch.Tensor] = {}
    keywords = {**GOOD, "codes": PAIRS[0], "scales": PAIRS[1], **changes}
    with pytest.raises(error) as raised:
        packed_linear(**{name: there(value) for name, value in keywords.items()})  # type: ignore[arg-type]
    assert str(raised.value) == f"packed_linear: {text}".replace("cpu", "cuda:0" if place == "cuda" else "cpu")
    if place == "cuda":
        assert torch.ones(4, device="cuda").sum().item() == 4


def test_what_is_not_put_in_order() -> None:
    qweight, scales, zeros = loose_weight(8, 64, 64)
    for given_, text in (
        ((qweight, scales.float(), zeros), "scales have dtype float32; float16 or bfloat16, the dtype of the"),
        ((qweight, scales, zeros.half()), "zeros have dtype float16; uint8 is needed"),
    ):
        with pytest.raises(TypeError, match=f"^repack: {text}"):
            repack(*given_, 64)
    with pytest.raises(ValueError, match=r"^repack: scales have shape \[8, 1\]; \[8, 2\] is needed for N=8, K=72"):
        repack(torch.zeros(8, 9, dtype=torch.int32), scales, zeros, 64)
    codes, pairs = repack(qweight, scales, zeros, 64)
    with pytest.raises(ValueError, match=r"^unpack: codes have shape \[512\]; \[1024\] is needed"):
        unpack(codes, pairs, 65, 64, 64)


def test_the_fake_has_the_strides_of_the_real_result() -> None:
    weight = loose_weight(24, 136, 128)
    ordered = repack(*weight, 128)
    for op, arguments in (
        (repack, (*weight, 128)),
        (unpack, (*ordered, 24, 136, 128)),
        (LIBRARY.op("packed_linear"), (torch.ones(2, 3, 136).half(), *ordered, None, 24, 136, 128, 0)),
    ):
        with FakeTensorMode() as mode:
            fakes = op(*(mode.from_tensor(a) if isinstance(a, torch.Tensor) else a for a in arguments))
        reals = op(*arguments)
        if isinstance(reals, torch.Tensor):
            reals, fakes = (reals,), (fakes,)
        for real, fake in zip(reals, fakes, strict=True):
            assert (real.shape, real.stride(), real.dtype) == (fake.shape, fake.stride(), fake.dtype)

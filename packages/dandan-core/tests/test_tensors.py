"""How memory is shared, against the sets of bytes that the elements really take."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dandan_ops_core.tensors import dtype_name, overlap, overlaps_itself, shape_text

STORAGE = torch.zeros(4096, dtype=torch.uint8)
DTYPES = (torch.int8, torch.float16, torch.float32, torch.int64)


def addresses(t: torch.Tensor) -> list[int]:
    """The byte at which each element starts, in the order of the indices."""
    places = [t.data_ptr()]
    for size, stride in zip(t.shape, t.stride(), strict=True):
        places = [at + i * stride * t.element_size() for at in places for i in range(size)]
    return places


def taken(t: torch.Tensor) -> list[int]:
    return [at + byte for at in addresses(t) for byte in range(t.element_size())]


def share(a: torch.Tensor, b: torch.Tensor) -> bool:
    return bool(set(taken(a)) & set(taken(b)))


@st.composite
def views(draw: st.DrawFn, rank: int | None = None) -> torch.Tensor:
    """A tensor of any strides inside one small storage."""
    dims = draw(st.integers(0, 4)) if rank is None else rank
    shape = [draw(st.integers(0, 4)) for _ in range(dims)]
    strides = [draw(st.one_of(st.integers(0, 9), st.sampled_from([12, 16, 24]))) for _ in range(dims)]
    dtype = draw(st.sampled_from(DTYPES))
    return STORAGE.view(dtype).as_strided(shape, strides, draw(st.integers(0, 40)))


@st.composite
def windows(draw: st.DrawFn) -> tuple[torch.Tensor, torch.Tensor]:
    """Two windows of one matrix: rows that lie in turn, which is where the answer is not "partial" at once."""
    dtype, stride = draw(st.sampled_from(DTYPES)), draw(st.integers(1, 16))

    def one(stride: int) -> torch.Tensor:
        inner = draw(st.sampled_from([(), (2,), (3, 2)]))
        shape = (draw(st.integers(1, 5)), *inner, draw(st.integers(1, 6)))
        strides = (stride, *(draw(st.integers(0, 6)) for _ in inner), draw(st.integers(0, 2)))
        return STORAGE.view(dtype).as_strided(shape, strides, draw(st.integers(0, 40)))

    # Seldom with another distance between rows: they then meet somewhere, or only seem not to.
    return one(stride), one(draw(st.sampled_from([stride, stride, stride + 1, 2 * stride, 0])))


def check(a: torch.Tensor, b: torch.Tensor) -> None:
    found = overlap(a, b)
    assert found in ("none", "same", "partial")
    assert found == overlap(b, a)
    if share(a, b):
        assert found != "none"
    if found == "same":
        assert addresses(a) == addresses(b)
        assert a.dtype.itemsize == b.dtype.itemsize
    if a.numel() == 0 or b.numel() == 0:
        assert found == "none"


@settings(max_examples=1500, deadline=None)
@given(views(), views())
def test_overlap_of_any_two_views(a: torch.Tensor, b: torch.Tensor) -> None:
    check(a, b)


@settings(max_examples=1500, deadline=None)
@given(windows())
def test_overlap_of_windows_of_one_matrix(pair: tuple[torch.Tensor, torch.Tensor]) -> None:
    check(*pair)


@settings(max_examples=300, deadline=None)
@given(views())
def test_a_tensor_is_the_same_as_itself(t: torch.Tensor) -> None:
    assert overlap(t, t) == ("none" if t.numel() == 0 else "same")
    assert overlap(t, t.view_as(t)) == overlap(t, t)


@settings(max_examples=1500, deadline=None)
@given(views())
def test_elements_that_share_memory_are_never_missed(t: torch.Tensor) -> None:
    if len(set(addresses(t))) < t.numel():
        assert overlaps_itself(t)


@settings(max_examples=300, deadline=None)
@given(st.lists(st.integers(0, 4), max_size=4), st.permutations(range(4)), st.data())
def test_ordinary_layouts_do_not_overlap_themselves(shape: list[int], order: list[int], data: st.DataObject) -> None:
    """Dense ones in any order of dimensions, and every second or third element of them: those may be written into."""
    dense = torch.zeros(shape, dtype=torch.int8)
    turned = dense.permute([d for d in order if d < dense.dim()])
    assert not overlaps_itself(turned)
    sliced = turned[
        tuple(slice(data.draw(st.integers(0, 2)), None, data.draw(st.integers(1, 3))) for _ in turned.shape)
    ]
    assert not overlaps_itself(sliced)


def test_slices_whose_rows_lie_in_turn_share_nothing() -> None:
    """q, k and v of one tensor; halves of gate and up: an answer of "partial" here would refuse what models do."""
    qkv = torch.zeros(37, 48 * 128, dtype=torch.bfloat16)
    q, k, v = qkv[:, :4096].view(37, 32, 128), qkv[:, 4096:5120].view(37, 8, 128), qkv[:, 5120:].view(37, 8, 128)
    for a, b in ((q, k), (q, v), (k, v), (v, q)):
        assert overlap(a, b) == "none"
        assert not share(a[:3], b[:3])
    gate, up = torch.zeros(5, 24).chunk(2, -1)
    assert overlap(gate, up) == "none"
    assert overlap(qkv, k) == "partial"
    assert overlap(qkv[:, :4097], qkv[:, 4096:]) == "partial"
    assert overlap(qkv[:20], qkv[20:]) == "none"
    assert overlap(qkv[:21], qkv[20:]) == "partial"
    assert overlap(qkv[:1, :8], qkv[:1, 8:16]) == "none"


def test_the_same_elements_in_another_order_or_dtype_are_not_the_same() -> None:
    x = torch.zeros(4, 4)
    assert overlap(x, x.t()) == "partial"
    assert overlap(x, x.view(torch.int32)) == "same"
    assert overlap(x, x.view(2, 8)) == "partial"
    assert overlap(x, x.view(torch.int16)) == "partial"
    assert overlap(x[:, :1], x[:, :1].clone()) == "none"
    # The stride of a dimension of one means nothing.
    row = x[:1]
    assert overlap(row, row.as_strided((1, 4), (77, 1))) == "same"


@pytest.mark.parametrize("device", ["meta", "cpu"])
def test_other_devices_and_tensors_without_memory_share_none(device: str) -> None:
    meta = torch.zeros(4, 4, device="meta")
    assert overlap(meta, torch.zeros(4, 4, device=device)) == "none"
    assert overlap(meta, meta) == "none"
    with torch._subclasses.FakeTensorMode():
        fake = torch.zeros(4, 4)
        assert overlap(fake, fake) == "none"
        assert overlaps_itself(fake.expand(4, 4)) is False
        assert overlaps_itself(fake[:1].expand(4, 4))
    assert overlaps_itself(meta[:1].expand(4, 4))


def test_words_of_messages() -> None:
    assert dtype_name(torch.bfloat16) == "bfloat16"
    assert shape_text(torch.zeros(3, 0, 5).shape) == "[3, 0, 5]"
    assert shape_text(()) == "[]"

"""Every kernel by name against the definition in FP64: edges of tiles, options, random configurations, poison."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from attention_cases import (
    DTYPES,
    KERNELS,
    LAYOUTS,
    Call,
    check,
    dense,
    int32,
    packed,
    poison,
    random_call,
    raw,
    same_bits,
    with_layout,
)

from dandan_attention import flash_attention
from dandan_attention._ops import LIBRARY
from dandan_ops_core.backend import BackendUnavailableError
from dandan_ops_core.testing import misaligned

pytestmark = pytest.mark.gpu

HEAD_DIMS = (64, 128, 256)
RANDOM = 400  # configurations of each kernel
EVERY_DTYPE = pytest.mark.parametrize("dtype", DTYPES, ids=str)
EVERY_DIM = pytest.mark.parametrize("head_dim", HEAD_DIMS)
# "torch" is the reference on CUDA, which finds its sequences without reading a value on the host.
EVERY_BACKEND = pytest.mark.parametrize("backend", ["torch", *KERNELS])
EVERY_KERNEL = pytest.mark.parametrize("kernel", KERNELS)


@pytest.fixture(autouse=True)
def _kernel_is_there(request: pytest.FixtureRequest) -> None:
    """A test of a kernel that this GPU or this build does not have is skipped, but not on a GPU that has both."""
    kernel = request.node.callspec.params.get("kernel") if hasattr(request.node, "callspec") else None
    kernel = kernel or (request.node.callspec.params.get("backend") if hasattr(request.node, "callspec") else None)
    if kernel in KERNELS:
        try:
            dense(1, (1, 1), 8, 8, 64, device="cuda").info(kernel)
        except BackendUnavailableError as error:
            if LIBRARY.library.loaded and torch.cuda.get_device_capability() == (9, 0):
                raise
            pytest.skip(str(error))


# -------------------------------------------------------------------------------------------------------------- lengths

# Around a fragment, a warp's rows, and the tiles of 64, 80, 128, 176 and 192; every configuration meets them below.
EDGES = [1, 15, 16, 17, 63, 64, 65, 79, 81, 127, 128, 129, 175, 177, 191, 193, 257]


@EVERY_KERNEL
@EVERY_DIM
@pytest.mark.parametrize("causal", [False, True])
def test_lengths_around_tiles(kernel: str, head_dim: int, causal: bool) -> None:
    for number, seqlen_q in enumerate(EDGES):
        seqlen_k = EDGES[(7 * number + 3) % len(EDGES)]
        options = {"causal": True, "query_start": seqlen_k - seqlen_q} if causal else {}
        dtype = DTYPES[number % 2]
        check(dense(1, (2, 1), seqlen_q, seqlen_k, head_dim, dtype, device="cuda", **options), kernel)


@pytest.mark.sanitize
@EVERY_KERNEL
@EVERY_DIM
def test_smallest_sizes_with_tails(kernel: str, head_dim: int) -> None:
    """Two or three tiles of queries and of keys, whose last ones are cut: each part of a kernel runs, few times."""
    for options in ({}, {"causal": True, "query_start": 20}, {"causal": True, "query_start": 20, "softcap": 9.0}):
        check(dense(1, (2, 1), 200, 220, head_dim, device="cuda", **options), kernel)
    ragged = packed([5, 0, 130], [9, 3, 140], (2, 1), head_dim, torch.bfloat16, device="cuda", causal=True,
                    query_starts="suffix", window_size=40)  # fmt: skip
    check(ragged, kernel)
    call = dense(1, (2, 1), 70, 90, head_dim, device="cuda")
    expected = call.run(kernel, return_lse=True)
    odd = call.with_(**{name: misaligned(getattr(call, name)) for name in "qkv"})
    same_bits(odd.run(kernel, return_lse=True, out=misaligned(torch.empty_like(call.q))), expected, "misaligned")


@pytest.fixture
def profile() -> Iterator[Callable[[str], None]]:
    """profile(text) hands rows of a route table to the library; they are taken back."""

    def put(text: str) -> None:
        raw_text = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8) if text else torch.empty(0).byte()
        torch.ops.dandan_attention.set_profile(raw_text)

    yield put
    put("")


@EVERY_KERNEL
@EVERY_DIM
def test_every_configuration(kernel: str, head_dim: int, profile: Callable[[str], None]) -> None:
    """Those that no call takes by itself too, by a row of a route table: lengths around tiles, causal and not."""
    names = {each["name"] for each in LIBRARY.describe()["configs"][kernel] if each["head_dim"] == head_dim}
    ran = set()
    for number, (seqlen_q, seqlen_k) in enumerate(((65, 81), (129, 177), (193, 161), (257, 700), (700, 385))):
        dtype = DTYPES[number % 2]
        for causal in (False, True):
            options = {"causal": True, "query_start": seqlen_k - seqlen_q} if causal else {}
            call = dense(2, (4, 2), seqlen_q, seqlen_k, head_dim, dtype, device="cuda", **options)
            truth = call.truth()
            for name in names:
                profile(
                    f"flash_attention;{str(dtype).removeprefix('torch.')};batch=2,causal={causal:d},"
                    f"head_dim={head_dim},num_heads_kv=2,num_heads_q=4,seqlen_k={seqlen_k},seqlen_q={seqlen_q};"
                    f"{kernel}.{name}"
                )
                info = LIBRARY.info(call.name, raw(call)[:-1], (None,), "auto")
                if info["profile"]:  # a configuration may take no mask
                    assert (info["kernel"], info["config"]) == (kernel, name)
                    check(call, truth=truth)
                    ran.add(name)
    assert ran == names


@EVERY_KERNEL
@EVERY_DIM
@EVERY_DTYPE
def test_a_long_prompt(kernel: str, head_dim: int, dtype: torch.dtype) -> None:
    """Many tiles a row: running maxima, pipelines that wrap, several rounds of a persistent grid; lengths on both sides
    of those at which the configuration changes.
    """
    check(dense(2, (4, 2), 1100, 1100, head_dim, dtype, device="cuda", causal=True), kernel)
    check(dense(1, (4, 2), 1000, 1000, head_dim, dtype, device="cuda", causal=True), kernel)
    check(dense(1, (2, 2), 130, 2100, head_dim, dtype, device="cuda"), kernel)


@EVERY_BACKEND
@EVERY_DIM
@pytest.mark.parametrize("group", [1, 2, 3, 5, 7, 8])
def test_groups(backend: str, head_dim: int, group: int) -> None:
    """A22: any ratio; head h reads head h // ratio."""
    call = dense(2, (3 * group, 3), 33, 70, head_dim, torch.bfloat16, device="cuda", causal=True, query_start=37)
    check(call, backend)
    numbered = torch.arange(3, device="cuda").view(1, -1, 1, 1).expand(call.v.shape).bfloat16()
    out = call.with_(v=numbered).run(backend)
    right = (torch.arange(3 * group, device="cuda") // group).view(1, -1, 1, 1).expand(out.shape)
    assert (out.double() - right).abs().max() <= 2**-7


# -------------------------------------------------------------------------------------------------------------- options


@EVERY_BACKEND
@EVERY_DIM
@EVERY_DTYPE
def test_options(backend: str, head_dim: int, dtype: torch.dtype) -> None:
    options: list[dict[str, Any]] = [
        {"causal": True, "window_size": 1},
        {"causal": True, "window_size": 64},
        {"causal": True, "window_size": 100, "softcap": 30.0},
        {"window_size": 65},
        {"softcap": 30.0},
        {"causal": True, "softcap": 1.0, "softmax_scale": 1.0},
        {"softmax_scale": 3.0},
        {"softmax_scale": 1e-4},
    ]
    for each in options:
        check(dense(1, (3, 1), 300, 300, head_dim, dtype, device="cuda", **each), backend)


@EVERY_BACKEND
@pytest.mark.parametrize("start", [-400, -129, -1, 0, 1, 63, 128, 199, 1000, 2**40, -(2**62), 2**63 - 1])
def test_starts(backend: str, start: int) -> None:
    """Rows and whole tiles without keys before, among and behind the keys."""
    for window in (None, 70):
        call = dense(1, (2, 1), 260, 200, 64, device="cuda", causal=True, query_start=start, window_size=window)
        check(call, backend)
    check(dense(1, (2, 1), 260, 200, 128, device="cuda", query_start=start, window_size=70), backend)


@EVERY_BACKEND
@EVERY_DIM
def test_starts_and_lengths_of_each_sequence(backend: str, head_dim: int) -> None:
    """A compiled static cache: a fixed Sk, the live part and the place of the queries by tensors."""
    call = dense(
        5, (4, 2), 130, 400, head_dim, device="cuda", causal=True,
        query_start=int32(0, 270, -50, 199, 17, device="cuda"),
        seqused_k=int32(130, 400, 80, 0, 147, device="cuda"),
    )  # fmt: skip
    check(poison(call), backend)
    check(poison(call.with_(options={**call.options, "window_size": 90, "softcap": 5.0})), backend)


@EVERY_DTYPE
@EVERY_BACKEND
def test_a_first_tile_without_keys(backend: str, dtype: torch.dtype) -> None:
    """A20: all logits are -297.2, and the first tile of keys is hidden from whole rows."""
    q = torch.full((1, 14, 88, 128), 5.125, dtype=dtype, device="cuda")
    call = dense(1, (14, 2), 88, 448, 128, dtype, device="cuda", causal=True, query_start=360)
    call = call.with_(q=q, k=torch.full_like(call.k, -5.125))
    check(call, backend)
    for options in ({"query_start": -40}, {"window_size": 100}, {"window_size": 3}):
        check(call.with_(options={**call.options, **options}), backend)
    noise = torch.randn(call.k.shape, device="cuda", generator=torch.Generator("cuda").manual_seed(0)).mul(0.01)
    check(call.with_(k=call.k + noise.to(dtype)), backend)


@EVERY_BACKEND
def test_softcap_before_the_mask(backend: str) -> None:
    """A21: keys that a row does not see hold 1e4."""
    q = torch.zeros(1, 1, 130, 64, device="cuda").half()
    v = torch.full_like(q, 1e4)
    v[:, :, 0] = 0
    out = flash_attention(q, q, v, causal=True, softcap=1.0, backend=backend)
    assert (out[0, 0, 0] == 0).all()
    assert (out[0, 0, 1].float() == 5000).all()


@EVERY_BACKEND
@EVERY_DTYPE
@pytest.mark.parametrize("sign", [1, -1])
def test_large_logits(backend: str, dtype: torch.dtype, sign: int) -> None:
    q = torch.full((1, 1, 3, 64), 100.0, dtype=dtype, device="cuda")
    k = torch.full((1, 1, 200, 64), sign * 100.0, dtype=dtype, device="cuda")
    v = torch.ones_like(k)
    v[:, :, ::2] = 3
    out, lse = flash_attention(q, k, v, return_lse=True, backend=backend)
    # All weights are one number; rounded to the dtype, it may be off by half a step of 1.
    torch.testing.assert_close(out, torch.full_like(out, 2), rtol=torch.finfo(dtype).eps, atol=0)
    right = torch.full_like(lse, sign * 80000.0 + math.log(200))
    torch.testing.assert_close(lse, right, rtol=4e-7, atol=0)


# --------------------------------------------------------------------------------------------------------------- packed


@EVERY_BACKEND
@EVERY_DIM
def test_packed_batches(backend: str, head_dim: int) -> None:
    """Lengths of 0 and 1, around tiles, and one long; both kinds of starts; A14."""
    lengths = ([1, 0, 64, 129, 700, 3], [5, 9, 200, 129, 701, 0])
    for options in (
        {"causal": True, "query_starts": "suffix"},
        {},
        {"causal": True, "query_starts": int32(4, 0, 100, 0, -2, 5, device="cuda"), "window_size": 50},
        {"causal": True, "query_starts": "suffix", "seqused_k": int32(5, 0, 100, 128, 1, 0, device="cuda")},
    ):
        call = packed(*lengths, (6, 2), head_dim, torch.bfloat16, behind=7, device="cuda", **options)
        check(poison(call) if "seqused_k" in options else call, backend)
    check(packed(lengths[0], None, (4, 4), head_dim, device="cuda", causal=True), backend)
    check(
        packed([0, 1, 0, 1], [0, 3, 0, 5], (9, 3), head_dim, device="cuda", causal=True, query_starts="suffix"), backend
    )
    check(packed([0, 0, 0, 1], None, (21, 7), head_dim, device="cuda"), backend)


@EVERY_KERNEL
@EVERY_DIM
def test_neighbours_of_a_packed_sequence_do_not_reach_it(kernel: str, head_dim: int) -> None:
    """NaN in every other sequence, and behind the last: the sequences between are untouched, bit for bit."""
    lengths_q, lengths_k = [70, 130, 33, 200, 64], [90, 1, 129, 200, 64]
    call = packed(
        lengths_q, lengths_k, (4, 2), head_dim, behind=9, device="cuda", causal=True, query_starts="suffix"
    )  # fmt: skip
    expected, expected_lse = call.run(kernel, return_lse=True)
    q, k, v = (t.clone() for t in (call.q, call.k, call.v))
    bounds_q, bounds_k = (each.tolist() for each in call.cu_seqlens or ())
    for number in (0, 2, 4):
        q[bounds_q[number] : bounds_q[number + 1]] = math.nan
        for t in (k, v):
            t[bounds_k[number] : bounds_k[number + 1]] = math.nan
    for t, bounds in ((q, bounds_q), (k, bounds_k), (v, bounds_k)):
        t[bounds[-1] :] = math.nan
    out, lse = call.with_(q=q, k=k, v=v).run(kernel, return_lse=True)
    for number in (1, 3):
        rows = slice(bounds_q[number], bounds_q[number + 1])
        same_bits(
            (out[rows], lse[:, rows].contiguous()), (expected[rows], expected_lse[:, rows].contiguous()), str(number)
        )


# -------------------------------------------------------------------------------------------------------- empty, poison


@EVERY_BACKEND
@EVERY_DIM
def test_empty(backend: str, head_dim: int) -> None:
    """A13, A15: no keys, no queries, no sequences; then torch works on."""
    for options in ({}, {"causal": True, "query_start": -5}, {"window_size": 2, "query_start": 0}):
        out, lse = dense(2, (6, 2), 5, 0, head_dim, device="cuda", **options).run(backend, return_lse=True)
        assert (out == 0).all()
        assert (lse == -math.inf).all()
    for batch, heads, seqlen in ((0, (4, 2), 3), (2, (4, 2), 0), (2, (0, 2), 3)):
        call = dense(batch, heads, seqlen, 3, head_dim, device="cuda")
        assert call.run(backend).shape == call.q.shape
    for lengths_q, lengths_k in (([], []), ([0, 0], [3, 0]), ([2, 3], [0, 0])):
        call = packed(lengths_q, lengths_k, (4, 2), head_dim, device="cuda")
        out, lse = call.run(backend, return_lse=True)
        assert out.shape == call.q.shape
        assert (out == 0).all()
        assert (lse == -math.inf).all()
    assert torch.ones(4, device="cuda").sum().item() == 4


@EVERY_BACKEND
@EVERY_DIM
@pytest.mark.parametrize("which", ["k", "v", "kv"])
def test_poison_behind_the_live_keys(backend: str, head_dim: int, which: str) -> None:
    """A23: NaN and infinity where nothing lives change no bit of the result."""
    for call in (
        dense(2, (1, 1), 1, 3, head_dim, device="cuda", seqused_k=int32(1, 3, device="cuda")),
        dense(4, (8, 8), 1, 128, head_dim, device="cuda", seqused_k=int32(32, 64, 96, 48, device="cuda")),
        dense(2, (4, 2), 200, 300, head_dim, device="cuda", causal=True, query_start=100,
              seqused_k=int32(257, 129, device="cuda")),
    ):  # fmt: skip
        zeros = poison(call, 0.0)
        expected = zeros.run(backend, return_lse=True)
        check(zeros, backend)
        for value in (math.nan, math.inf, -math.inf):
            poisoned = poison(call, value)
            some = zeros.with_(**{name: getattr(poisoned, name) for name in which})
            same_bits(some.run(backend, return_lse=True), expected, f"{which} = {value}")


@EVERY_KERNEL
@EVERY_DIM
def test_values_of_seqused_outside_of_the_keys(kernel: str, head_dim: int) -> None:
    """On CUDA a length above Sk counts as Sk, one below 0 as 0."""
    call = dense(3, (2, 1), 65, 100, head_dim, device="cuda", seqused_k=int32(2**30, -5, 100, device="cuda"))
    right = call.with_(options={"seqused_k": int32(100, 0, 100, device="cuda")})
    same_bits(call.run(kernel, return_lse=True), right.run(kernel, return_lse=True), "clamped")
    check(right, kernel)


# --------------------------------------------------------------------------------------------------------------- layout


@EVERY_KERNEL
@EVERY_DIM
@pytest.mark.parametrize("layout", LAYOUTS[1:])
def test_every_layout_gives_the_bits_of_contiguous_operands(kernel: str, head_dim: int, layout: str) -> None:
    """A08, A50. Layouts that a kernel cannot read are copied, and the info says which."""
    for call in (
        dense(2, (4, 2), 77, 130, head_dim, torch.bfloat16, device="cuda", causal=True, query_start=53),
        packed([70, 0, 33], [90, 5, 33], (4, 2), head_dim, device="cuda", causal=True, query_starts="suffix"),
    ):
        expected = call.run(kernel, return_lse=True)
        for which in ("q", "k", "v", "qkv"):
            changed = call.with_(**{name: with_layout(getattr(call, name), layout) for name in which})
            same_bits(changed.run(kernel, return_lse=True), expected, f"{which}: {layout}")
            copies = changed.info(kernel).copies
            assert set(copies) <= set(which)
            if layout in ("rows outside of heads", "slices of one tensor"):
                assert copies == (), f"{which} {layout}: read in place"
            if layout == "reversed axes":
                assert set(copies) == set(which), "no contiguous last dimension: copied"


@EVERY_KERNEL
@EVERY_DIM
def test_misaligned_and_expanded_operands(kernel: str, head_dim: int) -> None:
    call = dense(2, (4, 2), 77, 130, head_dim, device="cuda", causal=True, query_start=53)
    expected = call.run(kernel, return_lse=True)
    for which in ("q", "k", "v", "qkv"):
        odd = call.with_(**{name: misaligned(getattr(call, name)) for name in which})
        same_bits(odd.run(kernel, return_lse=True), expected, f"{which} misaligned")
    one = call.with_(k=call.k[:, :1].expand(call.k.shape), v=call.v[:1].expand(call.v.shape))
    plain = one.with_(k=one.k.contiguous(), v=one.v.contiguous())
    same_bits(one.run(kernel, return_lse=True), plain.run(kernel, return_lse=True), "expanded")


@EVERY_KERNEL
@EVERY_DIM
def test_outputs_of_every_layout(kernel: str, head_dim: int) -> None:
    """Between guard bands, whose gaps are guarded as well: rows apart, rows outside of heads, misaligned."""
    call = dense(2, (4, 2), 77, 130, head_dim, device="cuda", causal=True, query_start=53)
    truth = call.truth()
    rows_first = (77 * 4 * head_dim, head_dim, 4 * head_dim, 1)
    for out in ({}, {"row_padding": 8}, {"row_padding": 1}, {"strides": rows_first}, {"offset": 1}):
        check(call, kernel, truth=truth, out=out)
    ragged = packed([70, 0, 33], [90, 5, 33], (4, 2), head_dim, device="cuda", causal=True, query_starts="suffix")
    truth = ragged.truth()
    for out in ({}, {"row_padding": 8}, {"offset": 3}):
        check(ragged, kernel, truth=truth, out=out)


@EVERY_KERNEL
def test_rows_of_no_sequence_are_not_written(kernel: str) -> None:
    call = packed([70, 33], [90, 33], (4, 2), 64, behind=50, device="cuda", causal=True, query_starts="suffix")
    out = torch.full_like(call.q, 7.0)
    call.run(kernel, out=out)
    assert (out[103:] == 7).all()


# ----------------------------------------------------------------------------------------------------------------- many


@EVERY_KERNEL
@pytest.mark.parametrize("batch", [65535, 65536, 100000])
def test_more_sequences_than_a_grid_has_rows(kernel: str, batch: int) -> None:
    """A04: batch * heads far beyond 65535, equal to halves and, here and there, to the definition."""
    call = dense(batch, (8, 8), 4, 4, 64, device="cuda", causal=True)
    whole, half = call.run(kernel), batch // 2
    for part in (slice(half), slice(half, None)):
        some = call.with_(**{name: getattr(call, name)[part] for name in "qkv"})
        assert torch.equal(some.run(kernel), whole[part])
    for first in (0, 65534, batch - 2):
        some = call.with_(**{name: getattr(call, name)[first : first + 2] for name in "qkv"})
        assert torch.equal(check(some, kernel), whole[first : first + 2])


@EVERY_KERNEL
def test_many_packed_sequences(kernel: str) -> None:
    """70000 sequences of one or no token, of 8 heads: more tiles than a grid has rows."""
    lengths = [1, 0, 1, 2] * 17500
    call = packed(lengths, None, (8, 2), 64, device="cuda", causal=True)
    out = call.run(kernel)
    assert call.cu_seqlens is not None
    ends = call.cu_seqlens[0].long()
    single = (ends[1:] - ends[:-1]) == 1
    rows = ends[:-1][single]
    assert torch.equal(out[rows], call.v[rows].repeat_interleave(4, 1))
    tail = packed(lengths[:8], None, (8, 2), 64, device="cuda", causal=True)
    check(tail, kernel)


# --------------------------------------------------------------------------------------------------------------- random


@EVERY_KERNEL
@pytest.mark.parametrize("group", range(4))
def test_random_configurations(kernel: str, group: int) -> None:
    """The generator of the CPU tests, with lengths that reach over tiles."""
    for number in range(group, RANDOM, 4):
        check(random_call(10000 + number, device="cuda", head_dims=HEAD_DIMS, longest=300), kernel)


def test_random_configurations_of_the_torch_backend() -> None:
    for number in range(100):
        check(random_call(number, device="cuda"), "torch")


@EVERY_KERNEL
@pytest.mark.parametrize("head_dim", [8, 40, 80, 96, 192, 512])
def test_other_head_dims(kernel: str, head_dim: int) -> None:
    """`auto` takes torch and says why; a kernel by name is an order that cannot be followed."""
    call = dense(1, (2, 1), 20, 20, head_dim, device="cuda", causal=True)
    info = call.info()
    assert info.kernel == "torch"
    assert str(head_dim) in (info.fallback_reason or "")
    check(call)
    for run in (call.run, call.info):
        for backend in ("cuda", kernel):
            with pytest.raises(
                BackendUnavailableError, match=rf'^flash_attention: backend "{backend}" .*{head_dim}.* can'
            ):
                run(backend)


@EVERY_KERNEL
@EVERY_DIM
def test_a_packed_sequence_has_the_same_bits_alone(kernel: str, head_dim: int) -> None:
    """Batch invariance: neither the other sequences nor the longest of them change a row."""
    call = packed([70, 1, 300], [90, 400, 300], (4, 2), head_dim, device="cuda", causal=True, query_starts="suffix")
    out, lse = call.run(kernel, return_lse=True)
    for each in call.sequences():
        cu = tuple(int32(0, t.shape[1], device="cuda") for t in (each.q, each.k))
        q, k, v = (t.transpose(0, 1) for t in (each.q, each.k, each.v))
        for longest in (
            {},
            {"max_seqlen_q": len(q), "max_seqlen_k": len(k)},
            {"max_seqlen_q": 9000, "max_seqlen_k": 5000},
        ):
            its, its_lse = Call(q, k, v, {**call.options, **longest}, (cu[0], cu[1])).run(kernel, return_lse=True)
            same_bits((out[each.rows], lse[:, each.rows]), (its, its_lse), f"rows {each.rows}, {longest}")


@EVERY_KERNEL
@EVERY_DIM
@pytest.mark.parametrize("options", [{}, {"window_size": 90}, {"softcap": 20.0}], ids=str)
def test_a_prompt_in_pieces_has_the_bits_of_the_whole(kernel: str, head_dim: int, options: dict[str, Any]) -> None:
    """Tiles of queries begin elsewhere, and those of keys do not: chunked prefill in the packed form."""
    call = packed([700], None, (4, 2), head_dim, torch.bfloat16, device="cuda", causal=True, **options)
    out, lse = call.run(kernel, return_lse=True)
    for begin, end in ((0, 1), (1, 130), (130, 135), (135, 499), (499, 700)):
        cu = (int32(0, end - begin, device="cuda"), int32(0, end, device="cuda"))
        its_options = {**call.options, "query_starts": "suffix", "max_seqlen_q": end - begin, "max_seqlen_k": end}
        piece = Call(call.q[begin:end], call.k[:end], call.v[:end], its_options, cu)
        same_bits(
            piece.run(kernel, return_lse=True), (out[begin:end], lse[:, begin:end].contiguous()), f"rows {begin}:{end}"
        )

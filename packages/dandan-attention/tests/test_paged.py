"""paged_attention and paged_attention_varlen on the CPU: hand-worked values, public faults, FP64 differential."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from attention_cases import one_hot
from paged_cases import LAYOUTS, PagedCall, caches, paged_call, random_paged_call, table

from dandan_attention import (
    DecodePlan,
    cache_checks,
    flash_attention,
    paged_attention,
    paged_attention_varlen,
    reference_paged,
)
from dandan_attention import paged_attention_execution_info as info
from dandan_ops_core.backend import BackendUnavailableError


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.contiguous().view(torch.int16), b.contiguous().view(torch.int16))


def int32(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


# --------------------------------------------------------------------------------------------------------- differential


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("block", range(20))
def test_random_calls_equal_fp64(packed: bool, block: int) -> None:
    """1,200 calls: page sizes, layouts, ratios, window, softcap, scale, lengths of 0, pages that are not there."""
    for seed in range(block * 30, block * 30 + 30):
        call = random_paged_call(seed, packed)
        before = [t.clone() for t in (call.k_cache, call.v_cache)]
        call.check()
        assert all(same_bits(*pair) for pair in zip(before, (call.k_cache, call.v_cache), strict=True))


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("block", [1, 1 << 22])
def test_the_way_of_cuda_devices_equals_fp64(packed: bool, block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """400 calls without a length read on the host, in pieces of one sequence and of all."""
    monkeypatch.setattr(reference_paged, "_lengths_stay", lambda q: True)
    monkeypatch.setattr(reference_paged, "BLOCK", block)
    for seed in range(100):
        random_paged_call(seed, packed).check()


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("length", [-1, -(2**31), 17, 2**31 - 1])
def test_lengths_that_no_table_holds_are_harmless_there(
    packed: bool, length: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The operator behind the checks, as on a CUDA device: the nearest length that the table holds."""
    monkeypatch.setattr(reference_paged, "_lengths_stay", lambda q: True)
    attend = reference_paged.paged_attention_varlen if packed else reference_paged.paged_attention
    call = paged_call([16, 3], lengths_q=[1, 1] if packed else None)
    near = dataclasses.replace(call, lengths=[max(0, min(16, length)), 3])
    wrong = dataclasses.replace(call, lengths=[length, 3])
    assert same_bits(attend(*wrong.raw()[:-1])[0], attend(*near.raw()[:-1])[0])


def test_debug_names_the_page_that_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    call = paged_call([5, 9])
    call.page_table[0, 2] = call.page_table[1, 0] = 77
    call.run()
    monkeypatch.setattr(cache_checks, "DEBUG", True)
    with pytest.raises(ValueError, match=r"^paged_attention: page_table\[1, 0\] is 77; 0 to 6 is needed$"):
        call.run()


@pytest.mark.parametrize("size", [1, 3, 16, 256, 1000, 1024])
@pytest.mark.parametrize("d", [64, 128, 256])
def test_page_sizes_and_head_dims(size: int, d: int) -> None:
    paged_call([1, 333, 0, 257], (4, 2), d, size, torch.bfloat16, seqlen_q=2).check()


# ------------------------------------------------------------------------------------------------------------- meanings


def uniform(live: int, seqlen_q: int, size: int = 3) -> PagedCall:
    """q is 0, so each query takes the mean of the values that it sees; value j is one-hot at j."""
    call = paged_call([live], (1, 1), 8, size, seqlen_q=seqlen_q)
    values = one_hot(8, 8)
    for j in range(live):
        call.v_cache[call.page_table[0, j // size], j % size, 0] = values[j]
    return dataclasses.replace(call, q=torch.zeros_like(call.q))


@pytest.mark.parametrize(("window", "expected"), [(None, [[0, 1, 2], [0, 1, 2, 3], [0, 1, 2, 3, 4]]),
                                                  (2, [[1, 2], [2, 3], [3, 4]]), (1, [[2], [3], [4]])])  # fmt: skip
def test_which_keys_a_query_sees(window: int | None, expected: list[list[int]]) -> None:
    out = uniform(5, 3).run(window_size=window)[0, :, 0]
    for row, keys in zip(out, expected, strict=True):
        assert row.nonzero().flatten().tolist() == keys
        assert torch.equal(row[keys], torch.full((len(keys),), 1 / len(keys)).half())


def test_more_queries_than_keys_give_0_to_those_before_the_first_key() -> None:
    """A19: 5 queries, 2 keys, v = [1, 3]: exactly 0, 0, 0, 1, 2, packed as well; v = 7 leaves the rows of no key 0."""
    k = torch.zeros(1, 4, 1, 8).half()
    v = torch.tensor([1.0, 3.0, 9.0, 9.0]).half().view(1, 4, 1, 1).expand(1, 4, 1, 8)
    q = torch.zeros(1, 5, 1, 8).half()
    ids, used = table([[0]], 1), int32(2)
    out, lse = paged_attention(q, k, v, ids, used, return_lse=True)
    assert out[0, :, 0, 0].tolist() == [0, 0, 0, 1, 2]
    assert lse[0, 0, :3].tolist() == [-torch.inf] * 3
    packed = paged_attention_varlen(q[0], k, v, ids, used, int32(0, 5), max_seqlen_q=5)
    assert torch.equal(packed, out[0])
    assert paged_attention(q, k, torch.full_like(k, 7), ids, used)[0, :, 0, 0].tolist() == [0, 0, 0, 7, 7]


@pytest.mark.parametrize("pages", [0, 3])
def test_no_keys_give_0(pages: int) -> None:
    """A15, also with a cache without pages and a table without columns."""
    k = torch.ones(pages, 4, 2, 8).half()
    out, lse = paged_attention(
        torch.ones(2, 5, 4, 8).half(), k, k, torch.empty(2, 0, dtype=torch.int32), int32(0, 0), return_lse=True
    )
    assert torch.equal(out, torch.zeros(2, 5, 4, 8).half())
    assert (lse == -torch.inf).all()


def test_softcap_comes_before_the_mask() -> None:
    """A21: a hidden key of value 1000 must not leak."""
    k, q = torch.zeros(1, 2, 1, 8).half(), torch.zeros(1, 2, 1, 8).half()
    v = torch.tensor([0.0, 1000.0]).half().view(1, 2, 1, 1).expand(1, 2, 1, 8)
    out = paged_attention(q, k, v, table([[0]], 1), int32(2), softcap=1.0)
    assert out[0, :, 0, 0].tolist() == [0, 500]


@pytest.mark.parametrize("heads", [(28, 4), (40, 8), (14, 2), (5, 1)])
@pytest.mark.parametrize("d", [64, 128, 256])
def test_head_mapping(heads: tuple[int, int], d: int) -> None:
    """A22: v is the number of its head."""
    call = paged_call([1, 15, 16, 17, 333], heads, d, 16)
    call.v_cache[:] = torch.arange(heads[1]).view(1, 1, -1, 1)
    expected = (torch.arange(heads[0]) // (heads[0] // heads[1])).view(1, -1, 1).expand(5, -1, d)
    assert torch.equal(call.run(), expected.half())


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("only_v", [False, True])
def test_what_lies_behind_the_length_does_not_matter(value: float, packed: bool, only_v: bool) -> None:
    """A23: NaN and infinity behind each length, and in every page of no sequence."""
    lengths = [1, 3, 32, 33, 48]
    call = paged_call(lengths, (4, 2), 64, 16, torch.bfloat16, lengths_q=[1, 2, 5, 0, 7] if packed else None)
    expected = call.run()
    live = torch.zeros(call.k_cache.shape[:2], dtype=torch.bool)
    for row, length in zip(call.page_table.tolist(), lengths, strict=True):
        for j in range(length):
            live[row[j // 16], j % 16] = True
    for cache in (call.v_cache,) if only_v else (call.k_cache, call.v_cache):
        cache[~live] = value
    assert same_bits(call.run(), expected)


@pytest.mark.parametrize("stale", [-1, 5, 10**9, 2**31 - 1, -(2**31)])
def test_stale_table_entries_are_not_read(stale: int) -> None:
    """A24, A27: a buffer of 8 rows, 3 of them live; a table wider than before gives the same bits."""
    call = paged_call([9, 24, 1, 0, 0, 0, 0, 0], (4, 2), 16, 4, seqlen_q=1)
    expected = call.run()
    wide = torch.full((8, 17), stale, dtype=torch.int32)
    for i, live in enumerate(call.lengths):
        wide[i, : -(-live // 4)] = call.page_table[i, : -(-live // 4)]
    assert same_bits(dataclasses.replace(call, page_table=wide).run(), expected)
    assert (expected[3:] == 0).all()


@pytest.mark.parametrize("page", [-1, -(2**31), 7, 2**31 - 1])
def test_live_entries_that_name_no_page_hide_their_keys(page: int) -> None:
    call = uniform(7, 1)
    call.page_table[0, 1] = page  # keys 3, 4, 5
    assert call.run()[0, 0, 0].nonzero().flatten().tolist() == [0, 1, 2, 6]
    call.page_table[0] = page
    out, lse = call.run(return_lse=True)
    assert (out == 0).all()
    assert (lse == -torch.inf).all()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("packed", [False, True])
def test_strides_do_not_change_a_bit(layout: str, packed: bool) -> None:
    """A07: halves of one buffer, layers of a stack, heads outside of slots."""
    call = paged_call([1, 16, 17, 100], (8, 2), 32, 16, layout=layout, lengths_q=[1, 2, 3, 4] if packed else None)
    copies = dataclasses.replace(call, k_cache=call.k_cache.contiguous(), v_cache=call.v_cache.contiguous())
    assert same_bits(call.run(), copies.run())
    call.check()


def test_one_query_equals_its_forms_and_dense_attention() -> None:
    call = paged_call([11], (4, 2), 16, 4)
    out = call.run()
    assert same_bits(dataclasses.replace(call, q=call.q.unsqueeze(1)).run().squeeze(1), out)
    assert same_bits(dataclasses.replace(call, lengths_q=[1]).run(), out)
    k, v = (c[call.page_table[0].long()].flatten(0, 1)[:11].transpose(0, 1)[None] for c in (call.k_cache, call.v_cache))
    assert same_bits(flash_attention(call.q.unsqueeze(2), k, v).squeeze(2), out)


def test_a_sequence_has_the_same_bits_in_every_batch() -> None:
    """On the CPU, where the host knows the lengths."""
    call = paged_call([40, 3, 0, 17], (4, 2), 16, 4, seqlen_q=2)
    whole = call.run()
    for order in ([3, 2, 1, 0], [1], [0, 3]):
        part = dataclasses.replace(
            call, q=call.q[order], page_table=call.page_table[order], lengths=[call.lengths[i] for i in order]
        )
        assert same_bits(part.run(), whole[order])


def test_chunks_of_a_prompt_equal_the_whole() -> None:
    whole = paged_call([20], (4, 2), 16, 4, lengths_q=[20])
    expected = whole.run()
    for first, last in ((0, 7), (7, 8), (8, 20)):
        part = dataclasses.replace(whole, q=whole.q[first:last], lengths=[last], lengths_q=[last - first])
        assert torch.allclose(part.run().float(), expected[first:last].float(), atol=2e-3)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("return_lse", [False, True])
def test_out_is_written_and_rows_of_no_sequence_may_hold_anything(packed: bool, return_lse: bool) -> None:
    call = paged_call([5, 9], lengths_q=[2, 3] if packed else None)
    buffer = torch.full((*call.q.shape[:-1], 2 * call.q.shape[-1]), 3.0).half()
    out = buffer[..., ::2]
    result = call.run(out=out, return_lse=return_lse)
    assert (result[0] if return_lse else result) is out
    assert same_bits(out, call.run())
    assert (buffer[..., 1::2] == 3).all()


# ----------------------------------------------------------------------------------------------- backends, plans, modes


@pytest.mark.parametrize("backend", ["cuda", "sm80_mma", "sm90a_wgmma"])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("return_lse", [False, True])
def test_own_kernels_are_not_built_yet(backend: str, packed: bool, return_lse: bool) -> None:
    call = paged_call([5], lengths_q=[2] if packed else None)
    text = rf'^{call.name}: backend "{backend}" cannot run: no kernel of it is built yet; "auto" and "torch" can$'
    with pytest.raises(BackendUnavailableError, match=text):
        call.run(backend=backend, return_lse=return_lse)


def test_execution_info() -> None:
    call = paged_call([5])
    found = info(**call.arguments())
    assert (found.op, found.backend, found.kernel, found.device) == ("paged_attention", "torch", "torch", "cpu")
    assert found.fallback_reason == found.reason == "no kernel of it is built yet"
    assert info(**call.arguments(), backend="torch").fallback_reason is None
    with pytest.raises(BackendUnavailableError, match="no kernel of it is built yet"):
        info(**call.arguments(), backend="cuda")
    with pytest.raises(ValueError, match=r"^paged_attention: backend 'fast' is unknown; it is one of auto, torch, "):
        info(**call.arguments(), backend="fast")


def test_gradients_are_refused_not_dropped() -> None:
    """A51."""
    call = paged_call([5])
    call.q.requires_grad_()
    with pytest.raises(ValueError, match=r"^paged_attention: q requires a gradient, which paged_attention does not"):
        call.run()
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            assert not call.run().requires_grad


PLAN = DecodePlan(4, 4, 2, 16, 100, 2, torch.float16, "cpu")


def test_a_plan_changes_no_bit_and_serves_every_length() -> None:
    for lengths in ([1, 1, 1, 1], [99, 3, 0, 100], [7]):
        call = paged_call(lengths, seqlen_q=2)
        assert same_bits(call.run(plan=PLAN), call.run())


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"max_batch": 1}, "plan is for up to 1 sequences; q has 2"),
        ({"max_seqlen_q": 1}, "plan is for up to 1 queries of a sequence; q has 2"),
        ({"num_heads_q": 8}, "plan is for num_heads_q=8; the call has num_heads_q=4"),
        ({"num_heads_kv": 4}, "plan is for num_heads_kv=4; the call has num_heads_kv=2"),
        ({"head_dim": 64}, "plan is for head_dim=64; the call has head_dim=16"),
        ({"dtype": torch.bfloat16}, "plan is for bfloat16 but q has dtype float16"),
        ({"device": "cuda"}, "plan is for cuda but q is on cpu"),
        (
            {"max_seqlen_k": 8},
            "plan is for max_seqlen_k=8; page_table has 3 columns for pages of 4, where 2 are enough",
        ),
    ],
)
def test_calls_beyond_a_plan_are_refused(changes: dict[str, object], text: str) -> None:
    call = paged_call([9, 1], seqlen_q=2)
    call.run(plan=dataclasses.replace(PLAN, max_seqlen_k=9))
    with pytest.raises(ValueError, match=f"^paged_attention: {text}$"):
        call.run(plan=dataclasses.replace(PLAN, **changes))


@pytest.mark.parametrize(
    ("changes", "error", "text"),
    [
        ({"max_batch": 0}, ValueError, "max_batch is 0; 1 or more is needed"),
        ({"max_seqlen_k": 1.5}, TypeError, "max_seqlen_k is float; an int is needed"),
        ({"max_seqlen_q": 17}, ValueError, "max_seqlen_q is 17; up to 16 are supported"),
        ({"num_heads_q": 3}, ValueError, "num_heads_q is 3, which is not a multiple of num_heads_kv=2"),
        ({"dtype": torch.float32}, TypeError, "dtype is float32; float16 and bfloat16 are supported"),
        ({"dtype": "half"}, TypeError, "dtype is str; a torch.dtype is needed"),
    ],
)
def test_plans_that_are_refused(changes: dict[str, object], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=f"^DecodePlan: {text}$"):
        dataclasses.replace(PLAN, **changes)


# ----------------------------------------------------------------------------------------------------------- bad inputs

K = torch.zeros(3, 4, 2, 16).half()


@pytest.mark.parametrize(
    ("changes", "error", "text"),
    [
        ({"q": [1.0]}, TypeError, "q is list; a tensor is needed"),
        ({"q": torch.zeros(2, 4, 16)}, TypeError, "q has dtype float32; float16 and bfloat16 are supported"),
        ({"q": torch.zeros(2, 4).half()}, ValueError, "q has shape [2, 4]; [B, Hq, D] or [B, Sq, Hq, D] is needed"),
        (
            {"q": torch.zeros(2, 17, 4, 16).half()},
            ValueError,
            "q has seqlen_q=17; up to 16 are supported, paged_attention_varlen takes more",
        ),
        ({"q": torch.zeros(2, 3, 16).half()}, ValueError, "q has num_heads_q=3, which is not a multiple of "
            "num_heads_kv=2 of k_cache"),
        ({"q": torch.zeros(2, 4, 8).half()}, ValueError, "k_cache has head_dim=16 but q has head_dim=8"),
        ({"k_cache": K.bfloat16()}, TypeError, "k_cache has dtype bfloat16 but q has dtype float16"),
        ({"k_cache": K.to("meta")}, ValueError, "k_cache is on meta but q is on cpu"),
        ({"v_cache": None}, TypeError, "v_cache is NoneType; a tensor is needed"),
        ({"k_cache": K[0]}, ValueError, "k_cache has shape [4, 2, 16]; [num_pages, page_size, Hkv, D] is needed"),
        ({"k_cache": K[:, :0]}, ValueError, "k_cache has page_size=0; 1 to 1024 is needed"),
        ({"k_cache": torch.zeros(1, 1025, 2, 16).half()}, ValueError,
            "k_cache has page_size=1025; 1 to 1024 is needed"),
        ({"k_cache": K[:, :, :0]}, ValueError, "k_cache has num_heads_kv=0; at least 1 is needed"),
        ({"v_cache": K[:, :2]}, ValueError, "v_cache has shape [3, 2, 2, 16] but k_cache has shape [3, 4, 2, 16]"),
        ({"page_table": torch.zeros(2, 2).long()}, TypeError, "page_table has dtype int64; int32 is needed"),
        ({"page_table": int32(0, 1)}, ValueError, "page_table has shape [2]; [B, max_pages] is needed"),
        ({"page_table": torch.zeros(3, 2).int()}, ValueError, "page_table has 3 rows; 2 are needed, one per sequence"),
        ({"page_table": torch.zeros(2, 2, device="meta").int()}, ValueError, "page_table is on meta but q is on cpu"),
        ({"seqused_k": int32(1, 1).long()}, TypeError, "seqused_k has dtype int64; int32 is needed"),
        ({"seqused_k": int32(1)}, ValueError, "seqused_k has 1 numbers; 2 are needed for batch=2"),
        ({"seqused_k": int32(1, 9)}, ValueError, "seqused_k[1] is 9; 0 to 8 is needed, what 2 pages of 4 hold"),
        ({"seqused_k": int32(-1, 8)}, ValueError, "seqused_k[0] is -1; 0 to 8 is needed, what 2 pages of 4 hold"),
        ({"softmax_scale": 0.0}, ValueError, "softmax_scale is 0.0; a finite number above 0 is needed"),
        ({"window_size": 0}, ValueError, "window_size is 0; 1 or more is needed"),
        ({"softcap": -1.0}, ValueError, "softcap is -1.0; 0, for none, or a finite number above it is needed"),
        ({"plan": 3}, TypeError, "plan is int; a DecodePlan or None is needed"),
        ({"out": torch.zeros(2, 4, 8).half()}, ValueError, "out has shape [2, 4, 8]; [2, 4, 16] is needed"),
        ({"out": K[0]}, ValueError, "out overlaps k_cache"),
        ({"backend": "fast"}, ValueError,
            "backend 'fast' is unknown; it is one of auto, torch, cuda, sm80_mma, sm90a_wgmma"),
    ],
)  # fmt: skip
def test_bad_inputs_of_paged_attention(changes: dict[str, object], error: type[Exception], text: str) -> None:
    given = {
        "q": torch.zeros(2, 4, 16).half(),
        "k_cache": K,
        "v_cache": K.clone(),
        "page_table": torch.zeros(2, 2).int(),
        "seqused_k": int32(8, 0),
    }
    paged_attention(**given)
    if text == "out overlaps k_cache":
        given |= {
            "q": torch.zeros(4, 2, 16).half(),
            "page_table": torch.zeros(4, 2).int(),
            "seqused_k": int32(0, 0, 0, 0),
        }
    for question in (paged_attention, info):
        with pytest.raises(error) as caught:
            question(**{**given, **changes})
        assert str(caught.value) == f"paged_attention: {text}"


@pytest.mark.parametrize(
    ("changes", "error", "text"),
    [
        ({"q": torch.zeros(2, 4).half()}, ValueError, "q has shape [2, 4]; [total_q, Hq, D] is needed"),
        ({"cu_seqlens_q": int32()}, ValueError, "cu_seqlens_q has 0 numbers; at least 1 is needed, one more than "
            "sequences"),
        ({"cu_seqlens_q": int32(0, 1)}, ValueError, "page_table has 2 rows; 1 are needed, one per sequence"),
        ({"cu_seqlens_q": int32(1, 2, 3)}, ValueError, "cu_seqlens_q starts at 1; 0 is needed"),
        ({"cu_seqlens_q": int32(0, 1, 4)}, ValueError, "cu_seqlens_q ends at 4 but q has 3 rows"),
        ({"cu_seqlens_q": int32(0, 2, 1)}, ValueError, "cu_seqlens_q falls from 2 to 1 at sequence 1; ascending "
            "numbers are needed"),
        ({"max_seqlen_q": 1}, ValueError, "max_seqlen_q is 1 but cu_seqlens_q has a sequence of 2 rows, number 1"),
        ({"max_seqlen_q": -1}, ValueError, "max_seqlen_q is -1; 0 or more is needed"),
        ({"seqused_k": int32(1, 9)}, ValueError, "seqused_k[1] is 9; 0 to 8 is needed, what 2 pages of 4 hold"),
    ],
)  # fmt: skip
def test_bad_inputs_of_paged_attention_varlen(changes: dict[str, object], error: type[Exception], text: str) -> None:
    given = {
        "q": torch.zeros(3, 4, 16).half(),
        "k_cache": K,
        "v_cache": K.clone(),
        "page_table": torch.zeros(2, 2).int(),
        "seqused_k": int32(8, 0),
        "cu_seqlens_q": int32(0, 1, 3),
        "max_seqlen_q": 2,
    }
    paged_attention_varlen(**given)
    with pytest.raises(error) as caught:
        paged_attention_varlen(**{**given, **changes})
    assert str(caught.value) == f"paged_attention_varlen: {text}"


def test_caches_of_every_layout_are_views_of_the_named_kind() -> None:
    """The layouts above are what they say, and not all the plain one."""
    strides = {layout: caches((3, 4, 2, 8), torch.float16, layout)[0].stride() for layout in LAYOUTS}
    assert strides == {
        "plain": (64, 16, 8, 1),
        "stacked": (64, 16, 8, 1),
        "unbind": (128, 16, 8, 1),
        "packed": (128, 16, 64, 1),
        "hnd": (64, 8, 32, 1),
        "gaps": (160, 32, 8, 1),
    }

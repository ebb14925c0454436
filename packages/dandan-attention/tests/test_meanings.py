"""What the options mean, on inputs whose right result is worked out by hand, and on inputs that broke others."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from attention_cases import DTYPES, Call, check, dense, generator, int32, one_hot, packed, poison

from dandan_attention import flash_attention, flash_attention_varlen
from dandan_ops_core.testing import assert_bit_equal

EVERY_DTYPE = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def seen(out: torch.Tensor) -> list[list[int]]:
    """Which keys each row of one head took the mean of, where v is one-hot and all logits are equal."""
    rows = []
    for row in out.double():
        keys = row.nonzero().flatten().tolist()
        assert all(abs(float(row[key]) * len(keys) - 1) < 0.01 for key in keys), row
        rows.append(keys)
    return rows


def mean_of_keys(seqlen_q: int, seqlen_k: int, **options: Any) -> list[list[int]]:
    """The keys that each query sees, by flash_attention; the packed form and another dtype agree."""
    q, v = torch.zeros(1, 1, seqlen_q, seqlen_k).half(), one_hot(1, 1, seqlen_k, seqlen_k)
    found = seen(flash_attention(q, v, v, **options)[0, 0])
    start = options.pop("query_start", None)
    if start is None:
        start = 0
    starts = start if isinstance(start, torch.Tensor) else int32(start)
    cu_q, cu_k = int32(0, seqlen_q), int32(0, seqlen_k)
    longest = {"max_seqlen_q": seqlen_q, "max_seqlen_k": seqlen_k}
    rows, keys = torch.zeros(seqlen_q, 1, seqlen_k).bfloat16(), one_hot(seqlen_k, 1, seqlen_k)
    keys = torch.eye(seqlen_k).unsqueeze(1).bfloat16()
    packed_out = flash_attention_varlen(rows, keys, keys, cu_q, cu_k, query_starts=starts, **longest, **options)
    assert seen(packed_out[:, 0]) == found
    return found


# ---------------------------------------------------------------------------------------------- which keys a query sees


def test_without_options_every_query_sees_every_key() -> None:
    assert mean_of_keys(2, 3) == [[0, 1, 2]] * 2


def test_causal() -> None:
    assert mean_of_keys(4, 4, causal=True) == [[0], [0, 1], [0, 1, 2], [0, 1, 2, 3]]


def test_the_window_counts_the_own_key() -> None:
    """A17: 1, 2, 3, 4, 4, 4, 4, 4 keys for a window of 4."""
    found = mean_of_keys(8, 8, causal=True, window_size=4)
    assert [len(row) for row in found] == [1, 2, 3, 4, 4, 4, 4, 4]
    assert found[7] == [4, 5, 6, 7]
    assert mean_of_keys(3, 3, causal=True, window_size=1) == [[0], [1], [2]]


def test_the_window_limits_the_left_side_alone() -> None:
    assert mean_of_keys(4, 4, window_size=2) == [[0, 1, 2, 3], [0, 1, 2, 3], [1, 2, 3], [2, 3]]


@pytest.mark.parametrize("window", [4, 100, 2**62])
def test_a_window_as_wide_as_the_keys_hides_nothing(window: int) -> None:
    assert mean_of_keys(4, 4, causal=True, window_size=window) == mean_of_keys(4, 4, causal=True)


@pytest.mark.parametrize(
    ("seqlen_q", "seqlen_k", "start", "counts"),
    [(2, 10, 8, [9, 10]), (1, 16, 15, [16]), (2, 10, 0, [1, 2]), (1, 16, 0, [1])],
)
def test_where_queries_lie_among_the_keys(seqlen_q: int, seqlen_k: int, start: int, counts: list[int]) -> None:
    """A18: both alignments, by query_start and never by a guess."""
    found = mean_of_keys(seqlen_q, seqlen_k, causal=True, query_start=start)
    assert found == [list(range(count)) for count in counts]


def test_more_queries_than_keys() -> None:
    """A19: exactly 0, 0, 0, 1, 2, and 0 where every value is 7."""
    q, k = torch.zeros(1, 1, 5, 64).half(), torch.zeros(1, 1, 2, 64).half()
    v = torch.tensor([1.0, 3.0]).half().view(1, 1, 2, 1).expand(1, 1, 2, 64)
    out, lse = flash_attention(q, k, v, causal=True, query_start=-3, return_lse=True)
    assert out[0, 0].tolist() == [[value] * 64 for value in (0, 0, 0, 1, 2)]
    assert lse[0, 0].tolist() == [-math.inf] * 3 + [0.0, pytest.approx(math.log(2))]
    sevens = flash_attention(q, k, torch.full_like(v, 7), causal=True, query_start=-3)
    assert sevens[0, 0, :, 0].tolist() == [0, 0, 0, 7, 7]
    rows = flash_attention_varlen(
        q[0].transpose(0, 1), k[0].transpose(0, 1), v[0].transpose(0, 1), int32(0, 5), int32(0, 2),
        max_seqlen_q=5, max_seqlen_k=2, causal=True, query_starts="suffix",
    )  # fmt: skip
    assert_bit_equal(rows[:, 0], out[0, 0])


def test_starts_far_from_every_key() -> None:
    assert mean_of_keys(2, 3, causal=True, query_start=1000) == [[0, 1, 2]] * 2
    assert mean_of_keys(2, 3, causal=True, query_start=-1000) == [[], []]
    assert mean_of_keys(2, 3, window_size=5, query_start=1000) == [[], []]
    assert mean_of_keys(2, 3, window_size=5, query_start=-1000) == [[0, 1, 2]] * 2


@pytest.mark.parametrize("start", [2**63 - 1, -(2**63), 2**40, -(2**40)])
def test_starts_at_the_ends_of_64_bits(start: int) -> None:
    """No sum of places wraps around."""
    q, v = torch.zeros(1, 1, 2, 3).half(), one_hot(1, 1, 3, 3)
    keys = [[0, 1, 2]] * 2 if start > 0 else [[], []]
    assert seen(flash_attention(q, v, v, causal=True, query_start=start)[0, 0]) == keys
    for window in (3, 2**20, 2**50, 2**63 - 1):
        found = seen(flash_attention(q, v, v, window_size=window, query_start=start)[0, 0])
        assert found == [[j for j in range(3) if j > start + i - window] for i in range(2)]


def test_a_start_of_each_sequence() -> None:
    q, v = torch.zeros(3, 1, 2, 4).half(), one_hot(3, 1, 4, 4)
    out = flash_attention(q, v, v, causal=True, query_start=int32(0, 2, -1))
    assert [seen(each[0]) for each in out] == [[[0], [0, 1]], [[0, 1, 2], [0, 1, 2, 3]], [[], [0]]]


def test_live_lengths() -> None:
    """Keys behind seqused_k are not there; the packed suffix ends with the live keys."""
    q, v = torch.zeros(3, 1, 2, 4).half(), one_hot(3, 1, 4, 4)
    out = flash_attention(q, v, v, seqused_k=int32(0, 3, 4))
    assert [seen(each[0]) for each in out] == [[[], []], [[0, 1, 2]] * 2, [[0, 1, 2, 3]] * 2]
    assert [
        seen(each[0]) for each in flash_attention(q, v, v, causal=True, query_start=2, seqused_k=int32(0, 1, 4))
    ] == [
        [[], []],
        [[0], [0]],
        [[0, 1, 2], [0, 1, 2, 3]],
    ]
    rows, keys = torch.zeros(4, 1, 4).half(), torch.eye(4).repeat(2, 1).unsqueeze(1).half()
    suffix = flash_attention_varlen(
        rows, keys, keys, int32(0, 2, 4), int32(0, 4, 8), max_seqlen_q=2, max_seqlen_k=4,
        causal=True, query_starts="suffix", seqused_k=int32(3, 1),
    )  # fmt: skip
    assert seen(suffix[:2, 0]) == [[0, 1], [0, 1, 2]]
    assert seen(suffix[2:, 0]) == [[], [0]]


def test_packed_with_one_tensor_of_lengths_starts_at_0() -> None:
    rows = torch.eye(3).repeat(2, 1).unsqueeze(1).half()[:5]
    cu = int32(0, 3, 5)
    out = flash_attention_varlen(rows * 0, rows, rows, cu, cu, max_seqlen_q=3, max_seqlen_k=3, causal=True)
    assert seen(out[:, 0]) == [[0], [0, 1], [0, 1, 2], [0], [0, 1]]


# --------------------------------------------------------------------------------------------------- logits and softmax


def test_the_scale() -> None:
    """One coordinate: logits scale * (0, 2); None is 1/sqrt(4)."""
    q, k, v = torch.zeros(1, 1, 1, 4).half(), torch.zeros(1, 1, 2, 4).half(), torch.zeros(1, 1, 2, 4).half()
    q[..., 0], k[0, 0, 1, 0], v[0, 0, 1] = 1, 2, 1
    for scale, logit in ((None, 1.0), (2.0, 4.0), (1e-6, 2e-6)):
        out, lse = flash_attention(q, k, v, softmax_scale=scale, return_lse=True)
        right = math.exp(logit) / (1 + math.exp(logit))
        assert out[0, 0, 0].tolist() == [torch.tensor(right).half().item()] * 4
        assert float(lse) == pytest.approx(math.log(1 + math.exp(logit)), rel=1e-6)


def test_lse_is_the_natural_logarithm_of_the_number_of_keys() -> None:
    q = torch.zeros(1, 2, 3, 8).half()
    _, lse = flash_attention(q, q, q, causal=True, return_lse=True)
    assert lse.dtype == torch.float32
    torch.testing.assert_close(lse, torch.tensor([[[1.0, 2.0, 3.0]] * 2]).log())


def test_softcap_before_the_mask() -> None:
    """A21: row 0 is v[0] = 0 exactly; capping -inf would leak 269 of v[1] = 1000."""
    q = torch.zeros(1, 1, 2, 64).half()
    v = torch.tensor([0.0, 1000.0]).half().view(1, 1, 2, 1).expand(1, 1, 2, 64)
    out = flash_attention(q, q, v, causal=True, softcap=1.0)
    assert out[0, 0].tolist() == [[0.0] * 64, [500.0] * 64]
    for seqlen in (3, 65, 130):
        q = torch.zeros(1, 1, seqlen, 64).half()
        v = torch.zeros(1, 1, seqlen, 64).half()
        v[0, 0, 1:] = 1e4
        assert (flash_attention(q, q, v, causal=True, softcap=1.0)[0, 0, 0] == 0).all()


def test_the_value_of_a_capped_logit() -> None:
    """softcap * tanh(scale * qk / softcap): 2 * tanh(8 / 2) against a logit of 0."""
    q, k, v = torch.zeros(1, 1, 1, 4).half(), torch.zeros(1, 1, 2, 4).half(), torch.zeros(1, 1, 2, 4).half()
    q[..., 0], k[0, 0, 1, 0], v[0, 0, 1] = 2, 8, 1
    _, lse = flash_attention(q, k, v, softcap=2.0, return_lse=True)
    assert float(lse) == pytest.approx(math.log(1 + math.exp(2 * math.tanh(4))), rel=1e-6)


@EVERY_DTYPE
def test_a_first_tile_without_keys(dtype: torch.dtype) -> None:
    """A20: every logit is -297 and whole tiles are hidden; a maximum that starts at 0 makes rows 0."""
    q = torch.full((1, 14, 88, 128), 5.125, dtype=dtype)
    k = torch.full((1, 2, 448, 128), -5.125, dtype=dtype)
    v = torch.randn(1, 2, 448, 128, generator=generator(0)).to(dtype)
    call = Call(q, k, v, {"causal": True, "query_start": 360})
    out = check(call)
    means = v[0].double().cumsum(1)[:, 360:] / torch.arange(361, 449).view(1, -1, 1)
    assert (out[0].double() - means.repeat_interleave(7, 0)).abs().max() < 2e-3 * (1 if dtype == torch.float16 else 8)
    noise = torch.randn(k.shape, generator=generator(1)).mul(0.01).to(dtype)
    check(call.with_(k=k + noise, options={"causal": True, "query_start": -40}))


@EVERY_DTYPE
@pytest.mark.parametrize("sign", [1, -1])
def test_large_logits(dtype: torch.dtype, sign: int) -> None:
    """exp of the largest is 1 whatever the logits are: no overflow, no row of zeros."""
    q, k = torch.full((1, 1, 3, 64), 100.0, dtype=dtype), torch.full((1, 1, 5, 64), sign * 100.0, dtype=dtype)
    v = torch.arange(5, dtype=dtype).view(1, 1, 5, 1).expand(1, 1, 5, 64)
    out, lse = flash_attention(q, k, v, return_lse=True)
    assert (out == 2).all()
    torch.testing.assert_close(lse, torch.full((1, 1, 3), sign * 80000.0 + math.log(5)), rtol=2e-7, atol=0)


# ------------------------------------------------------------------------------------------------------ grouped queries


@pytest.mark.parametrize(("heads_q", "heads_kv"), [(28, 4), (40, 8), (14, 2), (5, 1), (21, 7), (9, 3), (4, 4)])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_query_head_h_reads_head_h_over_the_ratio(heads_q: int, heads_kv: int, head_dim: int) -> None:
    """A22: v is the number of its head."""
    for seqlen in (1, 16, 17):
        q = torch.randn(1, heads_q, 2, head_dim, generator=generator(seqlen)).bfloat16()
        k = torch.randn(1, heads_kv, seqlen, head_dim, generator=generator(seqlen + 1)).bfloat16()
        v = torch.arange(heads_kv).view(1, -1, 1, 1).expand(k.shape).bfloat16()
        right = torch.arange(heads_q) // (heads_q // heads_kv)
        out = flash_attention(q, k, v)
        torch.testing.assert_close(out, right.view(1, -1, 1, 1).expand(out.shape).bfloat16(), rtol=0, atol=2**-7)
        rows = flash_attention_varlen(
            *(t[0].transpose(0, 1) for t in (q, k, v)),
            int32(0, 2),
            int32(0, seqlen),
            max_seqlen_q=2,
            max_seqlen_k=seqlen,
        )
        assert_bit_equal(rows.transpose(0, 1).contiguous(), out[0].contiguous())


# --------------------------------------------------------------------------------------------------------- empty inputs


def test_one_query_a_sequence_with_more_sequences_than_tokens() -> None:
    """A14: token 0 sees 3 keys, token 1 sees 5; and an only token behind three sequences without any."""
    call = packed([0, 1, 0, 1], [0, 3, 0, 5], (9, 3), 64, torch.bfloat16, causal=True, softmax_scale=1.0)
    check(call.with_(options={**call.options, "query_starts": "suffix"}))
    q, v = torch.zeros(2, 1, 8).half(), torch.eye(8).unsqueeze(1).half()
    out = flash_attention_varlen(
        q, v, v, int32(0, 0, 1, 1, 2), int32(0, 0, 3, 3, 8), max_seqlen_q=1, max_seqlen_k=5,
        causal=True, query_starts="suffix",
    )  # fmt: skip
    assert seen(out[:, 0]) == [[0, 1, 2], [3, 4, 5, 6, 7]]
    last = packed([0, 0, 0, 1], None, (21, 7), 128, torch.bfloat16)
    assert_bit_equal(last.run()[0], last.v[0].repeat_interleave(3, 0))


@pytest.mark.parametrize(
    "options", [{}, {"causal": True, "query_start": -5}, {"window_size": 2, "query_start": 0}], ids=str
)
@pytest.mark.parametrize("head_dim", [40, 64, 128, 256])
def test_no_keys(options: dict[str, Any], head_dim: int) -> None:
    """A15: zeros and -inf."""
    call = dense(2, (6, 2), 5, 0, head_dim, **options)
    out, lse = call.run(return_lse=True)
    assert out.shape == (2, 6, 5, head_dim)
    assert (out == 0).all()
    assert (lse == -math.inf).all()
    starts = {"query_starts": int32(0, 0)} if options else {}
    its = {name: value for name, value in options.items() if name != "query_start"}
    rows, its_lse = packed([5, 1], [0, 0], (6, 2), head_dim, **starts, **its).run(return_lse=True)
    assert rows.shape == (6, 6, head_dim)
    assert (rows == 0).all()
    assert (its_lse == -math.inf).all()


@pytest.mark.parametrize(
    ("batch", "heads", "seqlen_q", "seqlen_k"),
    [(0, (4, 2), 3, 3), (2, (4, 2), 0, 3), (2, (0, 2), 3, 3), (2, (4, 2), 0, 0)],
)
def test_no_queries(batch: int, heads: tuple[int, int], seqlen_q: int, seqlen_k: int) -> None:
    """A13."""
    out, lse = dense(batch, heads, seqlen_q, seqlen_k, 64).run(return_lse=True)
    assert out.shape == (batch, heads[0], seqlen_q, 64)
    assert lse.shape == (batch, heads[0], seqlen_q)
    assert out.dtype == torch.float16


def test_no_sequences() -> None:
    for behind in (0, 3):
        call = packed([], [], (4, 2), 64, behind=behind)
        out, lse = call.run(return_lse=True)
        assert out.shape == call.q.shape == (behind, 4, 64)
        assert lse.shape == (4, behind)


# --------------------------------------------------------------------------------------- what lies behind the live keys


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("which", ["k", "v", "kv"])
@EVERY_DTYPE
def test_poison_behind_the_live_keys(value: float, which: str, dtype: torch.dtype) -> None:
    """A23: lengths [1, 3] of 3 with q = 0.5, and [32, 64, 96, 48] of 128."""
    small = dense(2, (1, 1), 1, 3, 64, dtype, seqused_k=int32(1, 3))
    large = dense(4, (8, 8), 1, 128, 64, dtype, seqused_k=int32(32, 64, 96, 48))
    for call in (small.with_(q=torch.full_like(small.q, 0.5)), large):
        poisoned = poison(call, value)
        call = call.with_(**{name: getattr(poisoned, name) for name in which})
        out = check(call)
        assert torch.isfinite(out).all()
        zeros = poison(call, 0.0)
        assert_bit_equal(call.run(), zeros.run())


def test_poison_between_packed_sequences() -> None:
    call = packed([3, 2], [6, 5], (4, 2), 64, behind=4, causal=True, query_starts="suffix", seqused_k=int32(4, 0))
    out = check(poison(call))
    assert torch.isfinite(out[:5]).all()
    assert (out[3:5] == 0).all()


# ----------------------------------------------------------------------------------------------------------- many of it


def test_more_sequences_than_a_grid_has_rows() -> None:
    """A04: 65535, 65536 and 100000 sequences equal halves of them."""
    for batch in (65535, 65536, 100000):
        call = dense(batch, (1, 1), 2, 2, 2)
        whole, half = call.run(), batch // 2
        parts = [
            call.with_(**{name: getattr(call, name)[part] for name in "qkv"}).run()
            for part in (slice(half), slice(half, None))
        ]
        assert_bit_equal(torch.cat(parts), whole)

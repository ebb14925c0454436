"""rope, write_kv and qk_norm_rope_write_kv on the CPU: hand-worked values, public faults, FP64 differential."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from attention_cases import generator
from paged_cases import LAYOUTS, caches

import dandan_attention
from dandan_attention import cache_checks, qk_norm_rope_write_kv, rope, write_kv
from dandan_ops_core.backend import BackendUnavailableError

DTYPES = (torch.float16, torch.bfloat16)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.contiguous().view(torch.int16), b.contiguous().view(torch.int16))


def normal(*shape: int, dtype: torch.dtype = torch.float16, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=generator(seed)).to(dtype)


def tables(rows: int, half: int, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    angles = torch.arange(rows).unsqueeze(1) * 10000.0 ** (-torch.arange(half) / half)
    return angles.cos().to(dtype), angles.sin().to(dtype)


def turned64(
    x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, positions: torch.Tensor, interleaved: bool
) -> torch.Tensor:
    """The definition, pair by pair, in FP64."""
    out = x.double().clone()
    half = cos.shape[1]
    for t, p in enumerate(positions.tolist()):
        if not 0 <= p < len(cos):
            continue
        for i in range(half):
            a, b = (2 * i, 2 * i + 1) if interleaved else (i, i + half)
            c, s = cos[p, i].double(), sin[p, i].double()
            first, second = x[t, :, a].double(), x[t, :, b].double()
            out[t, :, a], out[t, :, b] = first * c - second * s, second * c + first * s
    return out


def close(out: torch.Tensor, truth: torch.Tensor, extra: float = 1e-6) -> None:
    limit = torch.finfo(out.dtype).eps / 2 * truth.abs() * (1 + 1e-3) + extra + 2.0**-25
    assert ((out.double() - truth).abs() <= limit).all()


# ----------------------------------------------------------------------------------------------------------------- rope


def test_a_quarter_turn_by_hand() -> None:
    """cos 0, sin 1: (a, b) becomes (-b, a)."""
    x = torch.arange(1.0, 9.0).half().view(1, 1, 8)
    cos, sin, at = torch.zeros(1, 2), torch.ones(1, 2), torch.tensor([0])
    halves, _ = rope(x, x, cos, sin, at)
    assert halves.flatten().tolist() == [-3, -4, 1, 2, 5, 6, 7, 8]
    neighbours, keys = rope(x, x, cos, sin, at, interleaved=True)
    assert neighbours.flatten().tolist() == [-2, 1, -4, 3, 5, 6, 7, 8]
    assert torch.equal(keys, neighbours)


@pytest.mark.parametrize("block", range(10))
def test_random_rope_equals_fp64(block: int) -> None:
    """200 calls: partial, both styles, both integer types, tables of both dtypes, positions out of range."""
    for seed in range(block * 20, block * 20 + 20):
        pick = random.Random(seed)
        d, dtype = pick.choice([2, 6, 8, 16, 64]), pick.choice(DTYPES)
        half, tokens = pick.randint(1, d // 2), pick.randint(0, 6)
        qkv = normal(tokens, 7, d, dtype=dtype, seed=seed)
        q, k = qkv[:, :4], qkv[:, 4:6]
        cos, sin = tables(9, half, pick.choice([torch.float32, dtype]))
        positions = torch.tensor([pick.choice([0, 1, 8, 9, -1, 5]) for _ in range(tokens)], dtype=torch.long)
        interleaved = pick.random() < 0.5
        results = rope(q, k, cos, sin, positions, interleaved=interleaved)
        for x, result in zip((q, k), results, strict=True):
            close(result, turned64(x, cos, sin, positions, interleaved))
            assert same_bits(result[..., 2 * half :], x[..., 2 * half :])
            assert result.is_contiguous()
        again = rope(q, k, cos, sin, positions.int(), interleaved=interleaved)
        assert all(same_bits(*pair) for pair in zip(results, again, strict=True))
        before = qkv.clone()
        out = rope(q, k, cos, sin, positions, interleaved=interleaved, out=(q, k))
        assert out[0] is q
        assert all(same_bits(*pair) for pair in zip(results, (q, k), strict=True))
        assert same_bits(qkv[:, 6], before[:, 6])


@pytest.mark.parametrize("interleaved", [False, True])
def test_partial_rotary(interleaved: bool) -> None:
    """A47: 64 of 128 dimensions turn; the table ends with its memory."""
    cos, sin = tables(4001, 32)
    q, k = normal(5, 8, 128), normal(5, 2, 128, seed=1)
    positions = torch.tensor([0, 1, 7, 100, 4000])
    for x, result in zip((q, k), rope(q, k, cos, sin, positions, interleaved=interleaved), strict=True):
        close(result, turned64(x, cos, sin, positions, interleaved))
        assert same_bits(result[..., 64:], x[..., 64:])
        assert same_bits(result[0], x[0])


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_positions_out_of_the_table_leave_their_token(dtype: torch.dtype) -> None:
    """A48, NaN included, which no arithmetic may touch."""
    cos, sin = tables(16, 4)
    x = normal(4, 2, 8)
    x[2, 0, 0] = float("nan")
    far = 2**31 - 1
    for positions in ([0, 15, 16, -1], [0, 15, far, -far]):
        q, _ = rope(x, x, cos, sin, torch.tensor(positions, dtype=dtype))
        assert same_bits(q[2:], x[2:])
        close(q[:2], turned64(x[:2], cos, sin, torch.tensor([0, 15]), False))
    empty, _ = rope(x, x, cos[:0], sin[:0], torch.zeros(4, dtype=dtype))
    assert same_bits(empty, x)


def test_gradients_of_rope() -> None:
    """A51: those of PyTorch, in both arguments; none with out=."""
    cos, sin = tables(8, 3)
    q, k = (normal(3, 2, 8, seed=seed).requires_grad_() for seed in (0, 1))
    positions = torch.tensor([1, 5, 9])
    weights = [normal(3, 2, 8, seed=seed) for seed in (2, 3)]
    results = rope(q, k, cos, sin, positions)
    torch.autograd.backward(results, weights)
    # The gradient of a rotation is the rotation back.
    for x, weight in zip((q, k), weights, strict=True):
        assert x.grad is not None
        close(x.grad, turned64(weight, cos, -sin, positions, False), 2e-3)
    with pytest.raises(ValueError, match=r"^rope: out= takes no part in automatic differentiation"):
        rope(q, k, cos, sin, positions, out=(q, k))
    with torch.no_grad():
        assert not rope(q, k, cos, sin, positions)[0].requires_grad


# ------------------------------------------------------------------------------------------------------------- write_kv


def written(cache: torch.Tensor, rows: torch.Tensor, slots: list[int]) -> torch.Tensor:
    """The cache afterwards, token by token."""
    expected = cache.clone()
    size = cache.shape[1]
    for row, slot in zip(rows, slots, strict=True):
        if 0 <= slot < len(cache) * size:
            expected[slot // size, slot % size] = row
    return expected


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_skipped_slots_write_nothing(dtype: torch.dtype) -> None:
    """A25: -1 is no last slot, and what lies behind the last one is none either."""
    for slots in ([3, -1, 20, -1], [-1, -1, -1, -1], [-1, 64, 2**31 - 1, -5], [-1, 0, 63, -1]):
        pair = caches((4, 16, 2, 8), torch.float16, "plain")
        k, v = normal(4, 2, 8, seed=1), normal(4, 2, 8, seed=2)
        expected = [written(cache, rows, slots) for cache, rows in zip(pair, (k, v), strict=True)]
        write_kv(k, v, *pair, torch.tensor(slots, dtype=dtype))
        assert all(same_bits(*each) for each in zip(pair, expected, strict=True))


def test_debug_names_slots_and_positions_that_are_none(monkeypatch: pytest.MonkeyPatch) -> None:
    pair = caches((4, 16, 2, 8), torch.float16, "plain")
    rows, (cos, sin) = normal(3, 2, 8), tables(9, 4)
    monkeypatch.setattr(cache_checks, "DEBUG", True)
    write_kv(rows, rows, *pair, torch.tensor([-1, 0, 63]))
    with pytest.raises(ValueError, match=r"^write_kv: slot_mapping\[2\] is 64; -1 to 63 is needed$"):
        write_kv(rows, rows, *pair, torch.tensor([-1, 0, 64]))
    with pytest.raises(ValueError, match=r"^rope: positions\[0\] is -1; 0 to 8 is needed$"):
        rope(rows, rows, cos, sin, torch.tensor([-1, 0, 8]))


def test_slots_far_beyond_32_bits_are_skipped() -> None:
    pair = caches((4, 16, 2, 8), torch.float16, "plain")
    before = [cache.clone() for cache in pair]
    write_kv(normal(2, 2, 8), normal(2, 2, 8), *pair, torch.tensor([2**32, -(2**40)]))
    assert all(same_bits(*each) for each in zip(pair, before, strict=True))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("block", range(10))
def test_random_writes(layout: str, block: int) -> None:
    """A07, 600 calls: exact, and the rest of the buffer that the caches are views of stays as it was."""
    for seed in range(block * 10, block * 10 + 10):
        pick = random.Random(seed)
        pages, size, heads, d = pick.randint(0, 4), pick.randint(1, 5), pick.randint(1, 3), 8
        dtype = pick.choice(DTYPES)
        k_cache, v_cache = caches((pages, size, heads, d), dtype, layout, seed)
        owner = k_cache._base if k_cache._base is not None else k_cache
        before = owner.clone()
        slots = random.Random(seed).sample(range(-3, pages * size + 3), min(pages * size + 3, pick.randint(0, 9)))
        qkv = normal(len(slots), 2 * heads + 1, d, dtype=dtype, seed=seed + 1)
        k, v = qkv[:, 1 : heads + 1], qkv[:, heads + 1 :]
        expected = written(k_cache, k, slots), written(v_cache, v, slots)
        write_kv(k, v, k_cache, v_cache, torch.tensor(slots, dtype=torch.long))
        assert same_bits(k_cache, expected[0])
        assert same_bits(v_cache, expected[1])
        # Put back what the views held: the buffer is then the old one.
        for cache, old in ((k_cache, before), (v_cache, before)):
            view = old.as_strided(cache.shape, cache.stride(), cache.storage_offset())
            cache.copy_(view)
        assert same_bits(owner, before)


# ---------------------------------------------------------------------------------------------------------------- fused


def fused_inputs(seed: int, dtype: torch.dtype, layout: str = "plain", tokens: int = 5) -> dict[str, Any]:
    pick = random.Random(seed)
    d = pick.choice([8, 16, 64, 128])
    hq, hkv = pick.choice([(4, 2), (5, 1), (3, 3)])
    qkv = normal(tokens, hq + 2 * hkv, d, dtype=dtype, seed=seed) * 3
    cos, sin = tables(9, pick.choice([d // 2, max(1, d // 4)]), pick.choice([torch.float32, dtype]))
    k_cache, v_cache = caches((3, 4, hkv, d), dtype, layout, seed)
    weight_dtype = pick.choice([torch.float32, dtype])
    return {
        "q": qkv[:, :hq],
        "k": qkv[:, hq : hq + hkv],
        "v": qkv[:, hq + hkv :],
        "q_weight": normal(d, dtype=weight_dtype, seed=seed + 1),
        "k_weight": normal(d, dtype=weight_dtype, seed=seed + 2),
        "cos": cos,
        "sin": sin,
        "positions": torch.tensor([pick.randint(-1, 9) for _ in range(tokens)], dtype=torch.long),
        "k_cache": k_cache,
        "v_cache": v_cache,
        "slot_mapping": torch.tensor(pick.sample(range(-2, 14), tokens), dtype=torch.long),
        "eps": pick.choice([1e-6, 1e-5, 0.1]),
        "interleaved": pick.random() < 0.5,
    }


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """As dandan_norm has it: FP32, the weight included, rounded once."""
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight.float()).to(x.dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_fused_operator_is_the_unfused_composition_bit_for_bit(dtype: torch.dtype, layout: str) -> None:
    for seed in range(40):
        given = fused_inputs(seed, dtype, layout)
        names = ("cos", "sin", "positions")
        normed = (rms_norm(given[x], given[f"{x}_weight"], given["eps"]) for x in "qk")
        queries, keys = rope(*normed, *(given[name] for name in names), interleaved=given["interleaved"])
        caches_apart = given["k_cache"].clone(), given["v_cache"].clone()
        write_kv(keys, given["v"], *caches_apart, given["slot_mapping"])
        key_out = torch.empty_like(keys)
        before = given["q"].clone()
        result = qk_norm_rope_write_kv(**given, key_out=key_out if seed % 2 else None)
        assert same_bits(result, queries)
        assert same_bits(given["k_cache"], caches_apart[0])
        assert same_bits(given["v_cache"], caches_apart[1])
        assert same_bits(given["q"], before)
        if seed % 2:
            assert same_bits(key_out, keys)
        # Once more, in place.
        out = qk_norm_rope_write_kv(**given, out=given["q"], key_out=given["k"])
        assert out is given["q"]
        assert same_bits(given["q"], queries)
        assert same_bits(given["k"], keys)


def test_the_fused_operator_by_hand() -> None:
    """A head of [3, 4] has the norm 5 / sqrt(2); weights 1 and 2; a quarter turn; slot 1."""
    x = torch.tensor([3.0, 4.0]).half().view(1, 1, 2)
    cache = [torch.zeros(1, 2, 1, 2).half() for _ in range(2)]
    ones = torch.ones(2)
    q = qk_norm_rope_write_kv(
        x,
        x,
        x,
        ones,
        2 * ones,
        torch.zeros(1, 1),
        torch.ones(1, 1),
        torch.tensor([0]),
        *cache,
        torch.tensor([1]),
        eps=0.0,
    )
    unit = torch.tensor([-4.0, 3.0]) / 12.5**0.5
    assert torch.equal(q.flatten(), unit.half())
    assert torch.equal(cache[0].flatten(), torch.cat((torch.zeros(2), 2 * unit)).half())
    assert cache[1].flatten().tolist() == [0, 0, 3, 4]


def test_gradients_of_writing_operators_are_refused() -> None:
    given = fused_inputs(0, torch.float16)
    for name in ("q", "k", "v", "q_weight", "cos", "k_cache"):
        changed = {**given, name: given[name].clone().requires_grad_()}
        with pytest.raises(ValueError, match=rf"^qk_norm_rope_write_kv: {name} requires a gradient, which "):
            qk_norm_rope_write_kv(**changed)
        with torch.no_grad():
            qk_norm_rope_write_kv(**changed)
    rows = given["k"].clone().requires_grad_()
    with pytest.raises(ValueError, match=r"^write_kv: k requires a gradient, which write_kv does not compute"):
        write_kv(rows, given["v"], given["k_cache"], given["v_cache"], given["slot_mapping"])


@pytest.mark.parametrize("op", ["rope", "write_kv", "qk_norm_rope_write_kv"])
def test_no_tokens_and_backends(op: str) -> None:
    """A13, and what own kernels say that do not exist."""
    arguments = calls(0)[op]
    call, info = getattr(dandan_attention, op), getattr(dandan_attention, f"{op}_execution_info")
    before = arguments["k_cache"].clone() if "k_cache" in arguments else None
    result = call(**arguments)
    if op == "rope":
        assert [t.shape[0] for t in result] == [0, 0]
    elif op != "write_kv":
        assert result.shape == arguments["q"].shape
    if before is not None:
        assert same_bits(arguments["k_cache"], before)
    assert info(**arguments).kernel == "torch"
    assert info(**arguments).fallback_reason == "no kernel of it is built yet"
    for backend in ("cuda", "sm80_mma", "sm90a_wgmma"):
        for question in (call, info):
            with pytest.raises(BackendUnavailableError) as caught:
                question(**arguments, backend=backend)
            expected = f'{op}: backend "{backend}" cannot run: no kernel of it is built yet; "auto" and "torch" can'
            assert str(caught.value) == expected


# ----------------------------------------------------------------------------------------------------------- bad inputs


def calls(tokens: int = 5) -> dict[str, dict[str, Any]]:
    given = fused_inputs(2, torch.float16, tokens=tokens)
    turn = ("q", "k", "cos", "sin", "positions")
    write = ("k", "v", "k_cache", "v_cache", "slot_mapping")
    return {
        "rope": {name: given[name] for name in turn},
        "write_kv": {name: given[name] for name in write},
        "qk_norm_rope_write_kv": given,
    }


GIVEN = fused_inputs(2, torch.float16)
T, HQ, DIM = GIVEN["q"].shape
HKV = GIVEN["k"].shape[1]
HALF = GIVEN["cos"].shape[1]
FUSED, BOTH = ("qk_norm_rope_write_kv",), ("rope", "qk_norm_rope_write_kv")
WRITE = ("write_kv", "qk_norm_rope_write_kv")
OUT = torch.empty(T, HQ, DIM).half()


@pytest.mark.parametrize(
    ("ops", "changes", "error", "text"),
    [
        (BOTH, {"q": 1}, TypeError, "q is int; a tensor is needed"),
        (BOTH, {"q": GIVEN["q"].float()}, TypeError, "q has dtype float32; float16 and bfloat16 are supported"),
        (BOTH, {"q": GIVEN["q"][0]}, ValueError, f"q has shape [{HQ}, {DIM}]; [T, Hq, D] is needed"),
        (BOTH, {"k": GIVEN["k"].bfloat16()}, TypeError, "k has dtype bfloat16 but q has dtype float16"),
        (BOTH, {"k": GIVEN["k"][:3]}, ValueError, f"k has 3 tokens but q has {T}"),
        (BOTH, {"k": GIVEN["k"][..., :4]}, ValueError, f"k has head_dim=4 but q has head_dim={DIM}"),
        (BOTH, {"k": GIVEN["k"].to("meta")}, ValueError, "k is on meta but q is on cpu"),
        (BOTH, {"cos": GIVEN["cos"].double()}, TypeError, "cos has dtype float64; float32 or float16 is needed"),
        (BOTH, {"cos": GIVEN["cos"][0]}, ValueError,
            f"cos has shape [{HALF}]; [max_positions, rotary_dim / 2] is needed"),
        (BOTH, {"cos": torch.ones(9, DIM), "sin": torch.ones(9, DIM)}, ValueError,
            f"cos has {DIM} columns; 1 to {DIM // 2} are needed, half of what is turned of head_dim={DIM}"),
        (BOTH, {"cos": torch.ones(9, HALF), "sin": torch.ones(8, HALF)}, ValueError,
            f"sin has shape [8, {HALF}] but cos has shape [9, {HALF}]"),
        (BOTH, {"cos": torch.ones(9, HALF), "sin": torch.ones(9, HALF).half()}, TypeError,
            "sin has dtype float16 but cos has dtype float32"),
        (BOTH, {"positions": torch.zeros(T)}, TypeError, "positions has dtype float32; int32 or int64 is needed"),
        (BOTH, {"positions": torch.zeros(T, 1).int()}, ValueError, f"positions has shape [{T}, 1]; a vector is needed"),
        (BOTH, {"positions": torch.zeros(2).int()}, ValueError,
            f"positions has 2 numbers; {T} are needed, one per token"),
        (BOTH, {"interleaved": "yes"}, TypeError, "interleaved is str; a bool is needed"),
        (("rope",), {"out": OUT}, TypeError, "out is Tensor; a pair of tensors is needed, for q and for k"),
        (("rope",), {"out": (OUT,)}, TypeError, "out is tuple; a pair of tensors is needed, for q and for k"),
        (("rope",), {"out": (OUT, OUT)}, ValueError, f"out[1] has shape [{T}, {HQ}, {DIM}]; [{T}, {HKV}, {DIM}] is "
            "needed"),
        (("rope",), {"out": (GIVEN["q"], GIVEN["v"].expand(T, HKV, DIM)), "k": GIVEN["v"], "q": GIVEN["k"]}, ValueError,
            f"out[0] has shape [{T}, {HQ}, {DIM}]; [{T}, {HKV}, {DIM}] is needed"),
        (("rope",), {"out": (GIVEN["k"], GIVEN["k"]), "q": GIVEN["v"]}, ValueError, "out[0] overlaps k"),
        (WRITE, {"v": GIVEN["v"].bfloat16()}, TypeError, "v has dtype bfloat16 but {first} has dtype float16"),
        (WRITE, {"k_cache": GIVEN["k_cache"][0]}, ValueError,
            f"k_cache has shape [4, {HKV}, {DIM}]; [num_pages, page_size, Hkv, D] is needed"),
        (WRITE, {"k_cache": GIVEN["k_cache"][..., :4]}, ValueError,
            f"k_cache has head_dim=4 but {{first}} has head_dim={DIM}"),
        (WRITE, {"v_cache": GIVEN["v_cache"][:1]}, ValueError,
            f"v_cache has shape [1, 4, {HKV}, {DIM}] but k_cache has shape [3, 4, {HKV}, {DIM}]"),
        (WRITE, {"k_cache": torch.ones(3, 4, HKV + 1, DIM).half(), "v_cache": torch.ones(3, 4, HKV + 1, DIM).half()},
            ValueError, f"k_cache has num_heads_kv={HKV + 1} but k has num_heads_kv={HKV}"),
        (WRITE, {"v_cache": GIVEN["k_cache"]}, ValueError, "k_cache and v_cache are the same memory"),
        (WRITE, {"k_cache": GIVEN["k_cache"][:1].expand(3, -1, -1, -1)}, ValueError,
            "elements of k_cache share memory"),
        (WRITE, {"slot_mapping": torch.zeros(T)}, TypeError,
            "slot_mapping has dtype float32; int32 or int64 is needed"),
        (WRITE, {"slot_mapping": torch.zeros(1).int()}, ValueError,
            f"slot_mapping has 1 numbers; {T} are needed, one per token"),
        (FUSED, {"q_weight": torch.ones(3)}, ValueError, f"q_weight has shape [3]; [{DIM}] is needed"),
        (FUSED, {"k_weight": torch.ones(DIM).double()}, TypeError,
            "k_weight has dtype float64; float32 or float16 is needed"),
        (FUSED, {"eps": -1.0}, ValueError, "eps is -1.0; a finite number of 0 or more is needed"),
        (FUSED, {"out": GIVEN["k"]}, ValueError, f"out has shape [{T}, {HKV}, {DIM}]; [{T}, {HQ}, {DIM}] is needed"),
        (FUSED, {"key_out": GIVEN["v"]}, ValueError, "key_out overlaps v"),
        ((*BOTH, "write_kv"), {"backend": "fast"}, ValueError,
            "backend 'fast' is unknown; it is one of auto, torch, cuda, sm80_mma, sm90a_wgmma"),
    ],
)  # fmt: skip
def test_bad_inputs(ops: tuple[str, ...], changes: dict[str, Any], error: type[Exception], text: str) -> None:
    for op in ops:
        arguments = {**{name: GIVEN[name] for name in calls()[op]}, **changes}
        before = GIVEN["k_cache"].clone(), GIVEN["q"].clone()
        for question in (getattr(dandan_attention, op), getattr(dandan_attention, f"{op}_execution_info")):
            with pytest.raises(error) as caught:
                question(**arguments)
            assert str(caught.value) == f"{op}: " + text.replace("{first}", "k" if op == "write_kv" else "q")
        assert same_bits(GIVEN["k_cache"], before[0])
        assert same_bits(GIVEN["q"], before[1])

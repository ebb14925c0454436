"""flash_attention against FlashAttention-3, cuDNN and FlashAttention-2, on prompts of models.

    python packages/dandan-attention/benchmarks/bench_attention.py [--record docs/results/dandan-attention]

The environment variable DANDAN_PEERS names the folder that tools/peers.py wrote (default: .peers in the repository):
FlashAttention-3 is `torch.ops._vllm_fa3_C.fwd`, which takes packed batches. cuDNN and FlashAttention-2 are those of
`F.scaled_dot_product_attention`. All read the same memory, [B, S, H, D], each in the form that it takes:

    dandan          t.transpose(1, 2)       [B, H, S, D]
    cudnn, fa2      t.transpose(1, 2)       [B, H, S, D]
    fa3             t.view(B * S, H, D)     and the lengths

Topics. `plain`: the grid of lengths at 16384 tokens in the batch, then what softcap and windows cost at 2 x 8192, which
cuDNN and FlashAttention-2 do not take. `ragged`: packed prompts of a serving-like distribution, some of them behind a
prefix; FlashAttention-3 alone takes those. `host`: what an eager call of a small prompt costs the host, against
`F.scaled_dot_product_attention` as it chooses by itself. The kernel `sm80_mma` is compared with FlashAttention-2.
"""

from __future__ import annotations

import functools
import itertools
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from cases import CASES, SERVING, options
from torch.nn.attention import SDPBackend, sdpa_kernel

import dandan_attention
from dandan_attention._ops import LIBRARY
from dandan_ops_core.benchmark import (
    Case,
    Implementation,
    Peer,
    Rotating,
    Row,
    Workload,
    geometric_mean,
    kernel_fingerprint,
    main,
)
from dandan_ops_core.testing import Comparison, compare, honest_math

ROOT = Path(__file__).resolve().parents[3]
DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16}
CHECKED_ROWS = 16  # of a sequence, compared in FP64: so many at the start, in the middle and at the end
Call = Callable[[], Any]
Set = dict[str, torch.Tensor]


def load_fa3() -> Any:
    sys.path.insert(0, str(ROOT / "tools"))
    from peers import find_peers

    find_peers().require("_vllm_fa3_C::fwd")
    return torch.ops._vllm_fa3_C.fwd


# ------------------------------------------------------------------------------------------------------------------
# Correctness


def checked(
    case: Case, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, start: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Rows of one sequence, q and out [Sq, Hq, D], k and v [Sk, Hkv, D]: what came out, FP64, FP32 with P rounded."""
    given, seqlen = options(case.case), q.shape[0]
    starts = (0, (seqlen - CHECKED_ROWS) // 2, seqlen - CHECKED_ROWS)
    rows = sorted({row for first in starts for row in range(max(first, 0), min(first + CHECKED_ROWS, seqlen))})
    causal = given["causal"] or case.topic == "ragged"
    place = torch.tensor(rows, device=q.device).view(1, 1, -1, 1) + start
    key = torch.arange(k.shape[0], device=q.device)
    seen = key <= place if causal else torch.ones_like(key <= place)
    if given["window_size"] is not None:
        seen = seen & (key > place - given["window_size"])

    def attend(dtype: torch.dtype) -> torch.Tensor:
        grouped = q[rows].to(dtype).transpose(0, 1).unflatten(0, (k.shape[1], -1))  # [Hkv, group, rows, D]
        keys, values = (t.to(dtype).transpose(0, 1).unsqueeze(1) for t in (k, v))
        logits = (grouped @ keys.mT) * q.shape[-1] ** -0.5
        cap = given["softcap"]
        if cap:
            logits = cap * torch.tanh(logits / cap)
        weights = torch.softmax(logits.masked_fill(~seen, -torch.inf), -1)
        if dtype == torch.float32:
            weights = weights.to(q.dtype).float()
        return (weights @ values).flatten(0, 1).transpose(0, 1)

    with honest_math():
        return out[rows], attend(torch.float64), attend(torch.float32).to(q.dtype)


def compared(case: Case, parts: Sequence[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]) -> Comparison:
    actual, exact, honest = (torch.cat(each) for each in zip(*parts, strict=True))
    return compare(actual, exact, honest, case.title())


# ------------------------------------------------------------------------------------------------------------------
# Workloads


def fa3_call(
    fwd: Any, s: Set, cu_q: torch.Tensor, cu_k: torch.Tensor, longest: tuple[int, int], given: dict[str, Any]
) -> Call:
    """FlashAttention-3 of [total, H, D]. Its windows are distances, so ours of W is W - 1 to its left."""
    scale = s["q"].shape[-1] ** -0.5
    left = -1 if given["window_size"] is None else given["window_size"] - 1
    none = [None] * 8
    behind = (True, None, 0, None, 0, None, 1, 0, None)
    q, k, v, out = s["q"], s["k"], s["v"], s["out"]
    causal, right = given["causal"], 0 if given["causal"] else -1
    return lambda: fwd(
        q, k, v, None, None, None, out, cu_q, cu_k, None, None, None, *longest, None, *none,
        scale, causal, left, right, given["softcap"], *behind,
    )  # fmt: skip


def workload(
    case: Case, sets: Rotating, own: Implementation, peers: list[Implementation], check: Any, info: Any
) -> Any:
    return Workload(
        case,
        sets=len(sets),
        own=own,
        peers=peers,
        check=check,
        route=info.kernel,
        fingerprint=kernel_fingerprint(LIBRARY.library.build_info["fingerprints"], info.kernel),
    )


def packed_sets(case: Case, total_q: int, total_k: int) -> Rotating:
    """q, k, v and out as [total, H, D]."""
    heads_q, heads_kv, head_dim = (case.shape[name] for name in ("num_heads_q", "num_heads_kv", "head_dim"))
    rows, keys = ((total_q, heads_q, head_dim), (total_k, heads_kv, head_dim))
    dtype = DTYPES[case.dtype]
    return Rotating.sized({"q": (rows, dtype), "k": (keys, dtype), "v": (keys, dtype), "out": (rows, dtype)})


def plain(case: Case, fa3: Any) -> Workload:
    batch, seqlen, heads_q, heads_kv = (
        case.shape[name] for name in ("batch", "seqlen_q", "num_heads_q", "num_heads_kv")
    )
    given = options(case.case)
    sets = packed_sets(case, batch * seqlen, batch * seqlen)
    bounds = torch.arange(0, (batch + 1) * seqlen, seqlen, dtype=torch.int32, device="cuda")

    def views(i: int) -> Set:
        return {name: t.view(batch, seqlen, *t.shape[1:]).transpose(1, 2) for name, t in sets[i].items()}

    def own(i: int) -> Call:
        s = views(i)
        return lambda: dandan_attention.flash_attention(
            s["q"], s["k"], s["v"], **given, out=s["out"], backend=case.variant
        )

    def sdpa(i: int) -> Call:
        s = views(i)
        causal, gqa = given["causal"], heads_q != heads_kv
        return lambda: F.scaled_dot_product_attention(s["q"], s["k"], s["v"], is_causal=causal, enable_gqa=gqa)

    def three(i: int) -> Call:
        return fa3_call(fa3, sets[i], bounds, bounds, (seqlen, seqlen), given)

    fa2 = Implementation("fa2", sdpa, around=lambda: sdpa_kernel(SDPBackend.FLASH_ATTENTION))
    if case.variant == "sm80_mma":
        peers = [fa2]
    else:
        peers = [Implementation("fa3", three)] if fa3 is not None else []
        if given["window_size"] is None and not given["softcap"]:
            peers.append(Implementation("cudnn", sdpa, around=lambda: sdpa_kernel(SDPBackend.CUDNN_ATTENTION)))
            peers.append(fa2)

    def check() -> Comparison:
        own(0)()
        parts = []
        for b in sorted({0, batch - 1}):
            q, k, v, out = (sets[0][name][b * seqlen : (b + 1) * seqlen] for name in ("q", "k", "v", "out"))
            parts.append(checked(case, q, k, v, out, 0))
        return compared(case, parts)

    s = views(0)
    info = dandan_attention.flash_attention_execution_info(
        s["q"], s["k"], s["v"], **given, out=s["out"], backend=case.variant
    )
    return workload(case, sets, Implementation("dandan", own), peers, check, info)


def ragged(case: Case, fa3: Any) -> Workload:
    lengths = SERVING[case.case]
    bounds = [
        [0, *itertools.accumulate(each)] for each in ([new for new, _ in lengths], [new + old for new, old in lengths])
    ]
    sets = packed_sets(case, bounds[0][-1], bounds[1][-1])
    cu_q, cu_k = (torch.tensor(each, dtype=torch.int32, device="cuda") for each in bounds)
    longest = (case.shape["seqlen_q"], case.shape["seqlen_k"])
    keywords = {"max_seqlen_q": longest[0], "max_seqlen_k": longest[1], "causal": True, "query_starts": "suffix"}

    def own(i: int) -> Call:
        s = sets[i]
        return lambda: dandan_attention.flash_attention_varlen(
            s["q"], s["k"], s["v"], cu_q, cu_k, **keywords, out=s["out"], backend=case.variant
        )

    def three(i: int) -> Call:
        return fa3_call(fa3, sets[i], cu_q, cu_k, longest, {"causal": True, "window_size": None, "softcap": 0.0})

    def check() -> Comparison:
        own(0)()
        parts = []
        by_length = sorted(range(len(lengths)), key=lambda b: lengths[b])
        for b in (by_length[0], by_length[len(lengths) // 2], by_length[-1]):
            rows, keys = (slice(each[b], each[b + 1]) for each in bounds)
            q, out, k, v = sets[0]["q"][rows], sets[0]["out"][rows], sets[0]["k"][keys], sets[0]["v"][keys]
            parts.append(checked(case, q, k, v, out, lengths[b][1]))
        return compared(case, parts)

    s = sets[0]
    info = dandan_attention.flash_attention_varlen_execution_info(
        s["q"], s["k"], s["v"], cu_q, cu_k, **keywords, out=s["out"], backend=case.variant
    )
    peers = [Implementation("fa3", three)] if fa3 is not None else []
    return workload(case, sets, Implementation("dandan", own), peers, check, info)


def host(case: Case, fa3: Any) -> Workload:
    """Eager calls as a user makes them; SDPA chooses its backend itself."""
    made = plain(case, fa3)
    batch, seqlen, heads_q, heads_kv, head_dim = (
        case.shape[name] for name in ("batch", "seqlen_q", "num_heads_q", "num_heads_kv", "head_dim")
    )
    q, out = (torch.randn(batch, heads_q, seqlen, head_dim, device="cuda").to(DTYPES[case.dtype]) for _ in range(2))
    k, v = (torch.randn(batch, heads_kv, seqlen, head_dim, device="cuda").to(DTYPES[case.dtype]) for _ in range(2))
    causal, gqa = options(case.case)["causal"], heads_q != heads_kv
    extra: dict[str, Any] = {}
    if case.case.endswith("out="):
        extra = {"out": out}
    elif case.case.endswith("lse"):
        extra = {"return_lse": True}

    def own() -> Any:
        return dandan_attention.flash_attention(q, k, v, causal=causal, **extra)

    def sdpa() -> Any:
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=gqa)

    made.own = Implementation("dandan", made.own.make, eager=own, host=True)
    cudnn = next(peer for peer in made.peers if peer.name == "cudnn")
    made.peers = [Implementation("sdpa", cudnn.make, eager=sdpa, host=True)]
    return made


def build(case: Case, peers: dict[str, Any]) -> Workload:
    kind = {"plain": plain, "ragged": ragged, "host": host}[case.topic]
    return kind(case, peers.get("fa3"))


# ------------------------------------------------------------------------------------------------------------------
# The summary


def line(name: str, ratios: dict[str, float]) -> str:
    worst = min(ratios, key=ratios.__getitem__)
    mean = geometric_mean(ratios.values())
    return f"  {name:<44} {len(ratios):4} cases, geometric mean {mean:.3f}, worst {ratios[worst]:.3f} at {worst}"


def summary(measured: Sequence[tuple[Case, Row]]) -> Iterator[str]:
    """The goals of the grid: best peer's time over ours by head dimension, short causal prompts, options, lengths."""
    rows = [(case, row) for case, row in measured if row.ratio is not None]
    yield "best peer's time / ours:"

    def group(name: str, wanted: Callable[[Case], bool]) -> Iterator[str]:
        ratios = {case.title(): row.ratio or 0.0 for case, row in rows if wanted(case)}
        if ratios:
            yield line(name, ratios)

    def grid(case: Case, head_dim: int | None = None) -> bool:
        ours = case.topic == "plain" and case.variant == "auto" and case.case in ("causal", "full")
        return ours and head_dim in (None, case.shape["head_dim"])

    for head_dim in (64, 128, 256):
        yield from group(f"head_dim {head_dim}", functools.partial(grid, head_dim=head_dim))
    yield from group(
        "causal, up to 1024", lambda case: grid(case) and case.case == "causal" and case.shape["seqlen_q"] <= 1024
    )
    for option in ("softcap 30", "window 4096", "window 1024", "window 128"):
        yield from group(option, lambda case: case.topic == "plain" and option in case.case)  # noqa: B023
    yield from group("sm80_mma against fa2", lambda case: case.topic == "plain" and case.variant == "sm80_mma")
    for variant in ("auto", "sm80_mma"):
        yield from group(f"ragged, {variant}", lambda case: case.topic == "ragged" and case.variant == variant)  # noqa: B023
    # What softcap costs: the same shape without it.
    times = {(case.case, case.dtype, case.variant, tuple(case.shape.items())): row.us for case, row in measured}
    for (name, dtype, variant, shape), us in times.items():
        if "softcap" in name:
            plain_us = times.get((name.split(", softcap")[0], dtype, variant, shape))
            if plain_us:
                yield f"  {name}, head_dim {dict(shape)['head_dim']}: {us / plain_us:.3f} of the time without it"
    rates = [(case.flops / row.us * 1e-6, case.title()) for case, row in measured if case.flops]
    if rates:
        yield "  at best {:.0f} TFLOP/s, at {}".format(*max(rates))


def quick(case: Case) -> bool:
    """A few of each kind."""
    return case.dtype == "bfloat16" and case.shape["seqlen_q"] in (128, 1024, 8192) and case.shape["num_heads_q"] != 8


if __name__ == "__main__":
    sys.exit(main("dandan-attention", CASES, build, peers=[Peer("fa3", load_fa3)], quick=quick, summary=summary))

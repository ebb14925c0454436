"""The committed grid of cases: what the records of dandan-attention hold, no more and no less."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dandan_ops_core.model_shapes import HALF_DTYPES
from dandan_ops_core.records import Case

TOKENS = 16384  # in the batch of every dense case
LENGTHS = (512, 1024, 2048, 4096, 8192, 16384)
# (head_dim, num_heads_q, num_heads_kv)
HEADS = ((64, 32, 32), (128, 16, 16), (128, 32, 8), (256, 8, 8), (256, 16, 4))

# Prompts as a serving engine batches them: (new tokens, tokens that are in the cache already). Drawn once, by
# random.Random(0), from log-normal distributions, and kept here. New prompts: median 900, sigma 1.1, 64 to 8192.
# Continued ones: median 300, sigma 1, 16 to 2048, behind a prefix of median 2000, sigma 1, 64 to 8192, together at most
# 8192.
SERVING = {
    "serving, 15 prompts": (
        (735, 0), (933, 0), (1941, 0), (809, 0), (4261, 0), (167, 0), (1212, 0), (239, 0), (849, 0), (654, 0),
        (652, 0), (89, 0), (988, 0), (1794, 0), (5708, 0),
    ),
    "serving, 38 prompts": (
        (2253, 0), (71, 0), (234, 0), (2537, 0), (281, 0), (1125, 0), (174, 0), (2130, 0), (3272, 0), (1212, 0),
        (1209, 0), (1101, 0), (438, 0), (1673, 0), (857, 0), (1021, 0), (1536, 0), (5540, 0), (6780, 0), (684, 0),
        (1645, 0), (1362, 0), (4393, 0), (148, 0), (356, 0), (2070, 0), (1746, 0), (99, 0), (120, 0), (4738, 0),
        (1277, 0), (1719, 0), (1139, 0), (366, 0), (188, 0), (326, 0), (202, 0), (638, 0),
    ),
    "serving, 12 continued": (
        (302, 895), (739, 692), (266, 1842), (382, 1209), (650, 2222), (560, 677), (210, 3664), (549, 1313),
        (206, 2923), (1333, 1564), (544, 2678), (264, 577),
    ),
}  # fmt: skip


def visible(seqlen_q: int, seqlen_k: int, start: int, causal: bool, window: int | None) -> int:
    """Pairs of a query and a key that it sees."""
    if not causal and window is None:
        return seqlen_q * seqlen_k
    total = 0
    for i in range(seqlen_q):
        high = min(seqlen_k, start + i + 1) if causal else seqlen_k
        low = max(0, start + i - window + 1) if window is not None else 0
        total += max(0, high - low)
    return total


def dense(
    name: str,
    heads: tuple[int, int, int],
    seqlen: int,
    dtype: str,
    *,
    topic: str = "plain",
    variant: str = "auto",
    tokens: int = TOKENS,
) -> Case:
    """`name` says the options, as `options` reads them."""
    head_dim, heads_q, heads_kv = heads
    batch = max(1, tokens // seqlen)
    given = options(name)
    pairs = batch * visible(seqlen, seqlen, 0, given["causal"], given["window_size"])
    shape = {
        "batch": batch,
        "seqlen_q": seqlen,
        "seqlen_k": seqlen,
        "num_heads_q": heads_q,
        "num_heads_kv": heads_kv,
        "head_dim": head_dim,
    }
    return Case(
        topic,
        "flash_attention",
        name,
        shape,
        dtype,
        variant,
        bytes=2 * batch * seqlen * head_dim * 2 * (heads_q + heads_kv),
        flops=4 * head_dim * heads_q * pairs,
    )


def options(name: str) -> dict[str, Any]:
    """Options of a case by its name: "causal, softcap 30", "full", "causal, window 1024"."""
    found: dict[str, Any] = {"causal": False, "window_size": None, "softcap": 0.0}
    for part in name.split(", "):
        word, _, value = part.partition(" ")
        if word == "causal":
            found["causal"] = True
        elif word == "window":
            found["window_size"] = int(value)
        elif word == "softcap":
            found["softcap"] = float(value)
    return found


def ragged(name: str, heads: tuple[int, int, int], dtype: str, variant: str = "auto") -> Case:
    """Packed prompts of SERVING: causal, queries at the end of the keys. Sizes are those of the longest."""
    head_dim, heads_q, heads_kv = heads
    lengths: Sequence[tuple[int, int]] = SERVING[name]
    total_q = sum(new for new, _ in lengths)
    total_k = sum(new + cached for new, cached in lengths)
    pairs = sum(visible(new, new + cached, cached, True, None) for new, cached in lengths)
    shape = {
        "batch": len(lengths),
        "seqlen_q": max(new for new, _ in lengths),
        "seqlen_k": max(new + cached for new, cached in lengths),
        "num_heads_q": heads_q,
        "num_heads_kv": heads_kv,
        "head_dim": head_dim,
    }
    return Case(
        "ragged",
        "flash_attention_varlen",
        name,
        shape,
        dtype,
        variant,
        bytes=4 * head_dim * (total_q * heads_q + total_k * heads_kv),
        flops=4 * head_dim * heads_q * pairs,
    )


CASES = [
    *(
        dense(name, heads, seqlen, dtype)
        for dtype in HALF_DTYPES
        for heads in HEADS
        for name in ("causal", "full")
        for seqlen in LENGTHS
    ),
    # What options cost, at 2 x 8192.
    *(
        dense(name, heads, 8192, "bfloat16")
        for heads in ((64, 32, 32), (128, 16, 16), (256, 8, 8))
        for name in (
            "causal, softcap 30",
            "full, softcap 30",
            "causal, window 4096",
            "causal, window 1024",
            "causal, window 128",
        )
    ),
    # The portable kernel, against FlashAttention-2 of the same card.
    *(
        dense(name, heads, seqlen, "bfloat16", variant="sm80_mma")
        for heads in HEADS
        for name in ("causal", "full")
        for seqlen in (512, 2048, 8192)
    ),
    *(ragged(name, heads, dtype) for dtype in HALF_DTYPES for name in SERVING for heads in HEADS),
    *(ragged(name, heads, "bfloat16", "sm80_mma") for name in SERVING for heads in ((64, 32, 32), (128, 32, 8))),
    *(
        dense(name, (128, 32, 8), 128, "bfloat16", topic="host", tokens=128)
        for name in ("causal, eager", "causal, eager, out=", "causal, eager, lse", "full, eager")
    ),
]  # fmt: skip

NOT_MEASURED = ("plain", "ragged", "host")
"""Topics that owe their record; `tools/report.py --check` asks for the others."""

"""The committed grid of cases: what the records of dandan-norm hold, no more and no less."""

from __future__ import annotations

from dandan_ops_core.records import Case

ROWS = (1, 4, 16, 64, 256, 1024, 4096, 16384)
COLS = (1024, 2048, 4096, 5120, 8192, 12288)
HALF_DTYPES = ("float16", "bfloat16")
HEADS = 32 + 8  # query and key heads of Qwen3-8B, 128 wide
TOKENS = (1, 64, 256, 1024, 4096, 16384)
NAMED = (
    (1, 4096),
    (16, 1024),
    (16, 4096),
    (256, 4096),
    (256, 5120),
    (4096, 1024),
    (4096, 4096),
    (16384, 4096),
    (16384, 8192),
    (8, 151936),
    (64, 151936),
    (256, 151936),
)

# Tensors of [rows, cols] that cross DRAM once, and vectors of [cols].
TENSORS = {
    "rms_norm": (2, 1),
    "residual_rms_norm": (4, 1),
    "silu_and_mul": (3, 0),
    "layer_norm": (2, 2),
    "softmax": (2, 0),
    "argmax": (1, 0),
}


def traffic(op: str, rows: int, cols: int, dtype: str) -> int:
    size = 4 if dtype == "float32" else 2
    tensors, vectors = TENSORS[op]
    return (tensors * rows + vectors) * cols * size + (8 * rows if op == "argmax" else 0)


def case(topic: str, op: str, name: str, rows: int, cols: int, dtype: str) -> Case:
    return Case(topic, op, name, {"rows": rows, "cols": cols}, dtype, bytes=traffic(op, rows, cols, dtype))


CASES = [
    *(
        case("plain", op, "grid", rows, cols, dtype)
        for op in ("rms_norm", "residual_rms_norm", "silu_and_mul")
        for dtype in HALF_DTYPES
        for cols in COLS
        for rows in ROWS
    ),
    *(
        case("plain", "rms_norm", f"heads, {tokens} tokens", tokens * HEADS, 128, dtype)
        for dtype in HALF_DTYPES
        for tokens in TOKENS
    ),
    *(
        case("plain", op, "named", rows, cols, "float16")
        for op in ("layer_norm", "softmax", "argmax")
        for rows, cols in NAMED
    ),
    *(
        case("plain", op, "named", rows, cols, "float32")
        for op in ("layer_norm", "softmax")
        for rows, cols in ((16, 4096), (16384, 8192))
    ),
    *(
        case("chained", op, "grid", rows, cols, "float16")
        for op in ("rms_norm", "residual_rms_norm", "silu_and_mul")
        for cols in COLS
        for rows in (1, 4, 16, 64, 256)
    ),
    *(
        case("host", "rms_norm", name, rows, 4096, "float16")
        for name in ("eager, out=", "eager, allocating")
        for rows in (1, 16)
    ),
]

"""The committed grid of cases: what the records of dandan-gemm hold, no more and no less."""

from __future__ import annotations

from dandan_ops_core.model_shapes import HALF_DTYPES, distinct_layers, gemm_calibration_cases, gemm_case
from dandan_ops_core.records import Case

# (n, k) by the layer that has it.
NAMES = distinct_layers((name, 1) for name in ("Qwen3-0.6B", "Qwen3-8B", "Qwen3-32B", "Llama-3-70B"))
LAYERS = (
    (4096, 1024),
    (1024, 2048),
    (6144, 1024),
    (1024, 3072),
    (6144, 4096),
    (4096, 4096),
    (24576, 4096),
    (4096, 12288),
    (51200, 5120),
    (5120, 25600),
    (8192, 8192),
    (151936, 1024),
)
ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 1024, 4096)
FEW_ROWS = (1, 2, 4, 8, 16)
KN = ", [K,N]"  # behind the name of a layer whose weight is not in the layout of Linear

# Each kernel by name where it is meant to be good, so that the record holds its share of its bound: (kernel, rows,
# layers, dtypes). For many rows `auto` may take torch; what the own kernel does there stands here for every layer.
FORCED = (
    ("skinny", (1, 4, 16), ((1024, 2048), (6144, 1024), (4096, 4096), (8192, 8192), (51200, 5120)), ("float16",)),
    ("sm90a_wgmma", (16, 64), ((6144, 1024), (4096, 4096), (8192, 8192)), ("float16",)),
    ("sm90a_wgmma", (256, 1024, 4096), LAYERS, HALF_DTYPES),
    ("sm90_tma_mma", (16, 256, 4096), ((4096, 4096), (8192, 8192)), ("float16",)),
    ("sm80_mma", (16, 256, 4096), ((4096, 4096), (8192, 8192)), ("float16",)),
)


def plain() -> list[Case]:
    """Those that share a weight follow each other: it is made once for all of them."""
    cases = []
    for dtype in HALF_DTYPES:
        for n, k in LAYERS:
            name = NAMES[n, k]
            cases += [gemm_case(name, m, n, k, dtype, topic="plain") for m in ROWS]
            cases += [
                gemm_case(name, m, n, k, dtype, topic="plain", variant=kernel)
                for kernel, rows, layers, dtypes in FORCED
                for m in rows
                if (n, k) in layers and dtype in dtypes
            ]
    for n, k in ((1024, 2048), (6144, 1024), (4096, 4096), (4096, 12288), (8192, 8192)):
        name = NAMES[n, k] + KN
        cases += [gemm_case(name, m, n, k, "float16", topic="plain") for m in (1, 4, 16, 64, 256, 1024, 4096)]
    return cases


CASES = [
    *plain(),
    *(
        gemm_case(NAMES[n, k], m, n, k, dtype, topic="chained")
        for dtype in HALF_DTYPES
        for n, k in LAYERS
        for m in FEW_ROWS
    ),
    *(
        gemm_case(name, m, 4096, 4096, "float16", topic="host")
        for name in ("eager, out=", "eager, allocating", "eager, allocating, bias")
        for m in (1, 16, 256)
    ),
    *gemm_calibration_cases(),
]

"""The committed grid of cases: what the records of dandan-w4a16 hold, no more and no less."""

from __future__ import annotations

from dandan_ops_core.model_shapes import HALF_DTYPES, INT4_LAYERS, INT4_NAMES, int4_calibration_cases
from dandan_ops_core.records import Case

ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 1024, 4096)
FEW_ROWS = (1, 2, 4, 8, 16)
GROUP = 64
GROUPS = (32, 64, 128)  # of the accuracy

# Each kernel by name where it is meant to be good, so that the record holds its share of its bound: (kernel, rows,
# layers, dtypes).
SOME_LAYERS = ((6144, 1024), (4096, 4096), (8192, 8192))
FORCED = (
    ("sm80_decode", (1, 16), SOME_LAYERS, ("float16",)),
    ("sm90_decode", (1, 8, 16, 32), (*SOME_LAYERS, (51200, 5120)), ("float16",)),
    ("sm80_mma", (32, 128, 1024), SOME_LAYERS, ("float16",)),
    ("sm90a_wgmma", (64, 256, 4096), (*SOME_LAYERS, (51200, 5120)), ("float16",)),
    # It takes weights of at most 16 MiB in float16.
    ("sm80_dequantize", (1024, 4096), ((1024, 2048), (6144, 1024)), ("float16",)),
)


def traffic(m: int, n: int, k: int, group: int) -> int:
    """What has to cross DRAM: the weight as the format has it (half a byte a code; two for the scale and one for the
    zero of a group), x and out. The kernels' own copy has a byte more for each group.
    """
    return n * k // 2 + 3 * n * (k // group) + 2 * m * (k + n)


def case(
    topic: str, name: str, m: int, n: int, k: int, dtype: str, *, variant: str = "auto", group: int = GROUP
) -> Case:
    """One call. The sizes of the shape are those of a route table."""
    shape = {"m": m, "n": n, "k": k, "group_size": group}
    return Case(topic, "w4a16_linear", name, shape, dtype, variant, bytes=traffic(m, n, k, group), flops=2 * m * n * k)


def plain() -> list[Case]:
    """Those that share a weight follow each other: it is made once for all of them."""
    cases = []
    for dtype in HALF_DTYPES:
        for n, k in INT4_LAYERS:
            cases += [case("plain", INT4_NAMES[n, k], m, n, k, dtype) for m in ROWS]
            cases += [
                case("plain", INT4_NAMES[n, k], m, n, k, dtype, variant=kernel)
                for kernel, rows, layers, dtypes in FORCED
                for m in rows
                if (n, k) in layers and dtype in dtypes
            ]
    return cases


CASES = [
    *plain(),
    *(
        case("chained", INT4_NAMES[n, k], m, n, k, dtype)
        for dtype in HALF_DTYPES
        for n, k in INT4_LAYERS
        for m in FEW_ROWS
    ),
    *(
        case("host", name, m, 4096, 4096, "float16")
        for name in ("eager, operator, out=", "eager, module", "eager, module, bias")
        for m in (1, 16, 256)
    ),
    *(
        case("accuracy", INT4_NAMES[n, k], m, n, k, dtype, group=group)
        for dtype in HALF_DTYPES
        for n, k in ((6144, 1024), (4096, 4096), (4096, 12288))
        for group in GROUPS
        for m in (1, 16, 256)
    ),
    *int4_calibration_cases(),
]


def quick(case: Case) -> bool:
    """The cases of --quick: three layers, few sizes, one dtype."""
    some = (case.shape["n"], case.shape["k"]) in ((6144, 1024), (4096, 4096), (8192, 8192))
    rows = (1, 16, 64, 128, 256, 4096) if case.topic == "plain" else (1, 16)
    return some and case.shape["m"] in rows and case.dtype == "float16" and case.variant == "auto"

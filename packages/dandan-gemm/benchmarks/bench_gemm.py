"""gemm against PyTorch's own matrix product (cuBLAS), on the linear layers of models.

    python packages/dandan-gemm/benchmarks/bench_gemm.py [--record docs/results/dandan-gemm]

Topics. `plain`: launches without the dependent-launch attribute, against F.linear. `host`: what an eager call costs the
host. `chained`: dependent launches with static_weight=True, in one graph, bit for bit as with plain launches:

    link i-1: [m, max(n, k)]                     link i: [m, max(n, k)]
    |<--- first k columns: x --->|    gemm(x, w_i)    |<--- first n columns: written --->|

Each call reads what the call before it wrote and nothing else runs between them, for every n and k: where n >= k the
next activation is a slice of the result; where n < k the result is a slice of the next activation, whose other columns
nobody writes. The first call of a rotation reads what the last one wrote. torch.mm runs the same chain in the same
memory, launched as it comes. Weights have the variance 1/k, so the chain neither grows nor fades. The weights of a
rotation exceed L2 twice, in all topics.

The topic `calibration` of cases.py is measured by `dandan-ops calibrate`.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from cases import CASES, KN

import dandan_gemm
from dandan_gemm import reference
from dandan_gemm._ops import LIBRARY
from dandan_ops_core.benchmark import (
    Case,
    CudaEngine,
    Implementation,
    Rotating,
    Row,
    Workload,
    check_chain,
    dependent_launch,
    geometric_mean,
    kernel_fingerprint,
    main,
)
from dandan_ops_core.testing import Comparison, compare, honest_math

DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16}
CHECKED_ROWS = 32  # compared in FP64: so many at the start, in the middle and at the end
# Of an H200, for the share of the bound in the summary: bytes by a bare read kernel, FLOPs by the datasheet.
READ_BYTES_PER_S, TENSOR_FLOPS = 4.58e12, 989e12
GROUPS = ((1, 16), (32, 64), (128, 256), (1024, 4096))
Call = Callable[[], Any]


# ------------------------------------------------------------------------------------------------------------------
# Tensors

_made: dict[tuple[int, int, str, bool], Rotating] = {}


def weights(case: Case) -> Rotating:
    """The rotating weights of a layer; kept until a case of another layer comes."""
    n, k, transposed = case.shape["n"], case.shape["k"], not case.case.endswith(KN)
    key = (n, k, case.dtype, transposed)
    if key not in _made:
        _made.clear()
        shape = (n, k) if transposed else (k, n)
        _made[key] = Rotating.sized({"w": (shape, DTYPES[case.dtype])})
        for index in range(len(_made[key])):
            _made[key][index]["w"].mul_(k**-0.5)
        torch.cuda.synchronize()  # from here on they are static
    return _made[key]


def checked(case: Case, a: torch.Tensor, w: torch.Tensor, out: torch.Tensor, call: Call) -> Comparison:
    """Rows at the start, in the middle and at the end of one call against FP64."""
    call()
    m, transposed = a.shape[0], not case.case.endswith(KN)
    starts = (0, (m - CHECKED_ROWS) // 2, m - CHECKED_ROWS)
    kept = sorted({row for start in starts for row in range(max(start, 0), min(start + CHECKED_ROWS, m))})
    rows = a[kept]
    exact = reference.gemm(rows, w, None, transposed, compute_dtype=torch.float64)
    with honest_math():
        honest = reference.gemm(rows, w, None, transposed)
    return compare(out[kept], exact, honest, case.title())


# ------------------------------------------------------------------------------------------------------------------
# Workloads


def workload(
    case: Case,
    sets: int,
    first: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    own: Implementation,
    torchs: Callable[[int], Call],
    *,
    static_weight: bool = False,
) -> Workload:
    """A case with `first`, its a, w and out of buffer set 0."""
    a, w, out = first
    info = dandan_gemm.gemm_execution_info(
        a,
        w,
        weight_transposed=not case.case.endswith(KN),
        static_weight=static_weight,
        out=out,
        backend=case.variant,
    )
    return Workload(
        case,
        sets=sets,
        own=own,
        peers=[Implementation("torch", torchs)],
        check=lambda: checked(case, a, w, out, own.make(0)),
        route=info.kernel,
        fingerprint=kernel_fingerprint(LIBRARY.library.build_info["fingerprints"], info.kernel),
    )


def plain(case: Case) -> Workload:
    m, n, k, dtype = (*(case.shape[name] for name in "mnk"), DTYPES[case.dtype])
    layer, transposed = weights(case), not case.case.endswith(KN)
    rows = Rotating({"a": ((m, k), dtype), "out": ((m, n), dtype)}, len(layer), seed=1)

    def own(i: int) -> Call:
        a, w, out = rows[i]["a"], layer[i]["w"], rows[i]["out"]
        return lambda: dandan_gemm.gemm(a, w, weight_transposed=transposed, out=out, backend=case.variant)

    def linear(i: int) -> Call:
        a, w = rows[i]["a"], layer[i]["w"] if transposed else layer[i]["w"].t()
        return lambda: F.linear(a, w)

    first = (rows[0]["a"], layer[0]["w"], rows[0]["out"])
    ours = Implementation("dandan", own, around=lambda: dependent_launch(LIBRARY, False))
    return workload(case, len(layer), first, ours, linear)


def chained(case: Case, engine: CudaEngine) -> Workload:
    m, n, k, dtype = (*(case.shape[name] for name in "mnk"), DTYPES[case.dtype])
    layer = weights(case)
    links = Rotating({"y": ((m, max(n, k)), dtype)}, len(layer), seed=1)

    def operands(i: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return links[i - 1]["y"][:, :k], layer[i]["w"], links[i]["y"][:, :n]

    def own(i: int) -> Call:
        x, w, y = operands(i)
        return lambda: dandan_gemm.gemm(x, w, weight_transposed=True, static_weight=True, out=y)

    def mm(i: int) -> Call:
        x, w, y = operands(i)
        return lambda: torch.mm(x, w.t(), out=y)

    def same_bits() -> None:
        memory = [links[i]["y"] for i in range(len(links))]
        calls = [own(i) for i in range(len(links))]
        check_chain(case.title(), engine, calls, memory, lambda enabled: dependent_launch(LIBRARY, enabled))

    ours = Implementation("dandan", own, around=lambda: dependent_launch(LIBRARY, True))
    made = workload(case, len(layer), operands(0), ours, mm, static_weight=True)
    made.after = same_bits
    return made


def host(case: Case) -> Workload:
    """Eager calls as a user makes them: dependent launches as the library decides."""
    made = plain(case)
    m, n, k, dtype = (*(case.shape[name] for name in "mnk"), DTYPES[case.dtype])
    w = weights(case)[0]["w"]
    a, out, bias = (torch.randn(*shape, device="cuda").to(dtype) for shape in ((m, k), (m, n), (n,)))
    calls: dict[str, tuple[Call, Call]] = {
        "eager, out=": (
            lambda: dandan_gemm.gemm(a, w, weight_transposed=True, out=out),
            lambda: F.linear(a, w),
        ),
        "eager, allocating": (lambda: dandan_gemm.gemm(a, w, weight_transposed=True), lambda: F.linear(a, w)),
        "eager, allocating, bias": (
            lambda: dandan_gemm.gemm(a, w, weight_transposed=True, bias=bias),
            lambda: F.linear(a, w, bias),
        ),
    }
    ours, theirs = calls[case.case]
    made.own = Implementation("dandan", made.own.make, eager=ours, host=True)
    made.peers = [Implementation("torch", made.peers[0].make, eager=theirs, host=True)]
    return made


# ------------------------------------------------------------------------------------------------------------------
# The summary


def bound_us(case: Case) -> float:
    return max(case.bytes / READ_BYTES_PER_S, case.flops / TENSOR_FLOPS) * 1e6


def line(name: str, ratios: dict[str, float]) -> str:
    worst = min(ratios, key=ratios.__getitem__)
    mean = geometric_mean(ratios.values())
    return f"  {name:<34} {len(ratios):4} cases, geometric mean {mean:.3f}, worst {ratios[worst]:.3f} at {worst}"


def summary(measured: Sequence[tuple[Case, list[float]]]) -> Iterator[str]:
    """torch's time over ours by rows; the layouts against each other; each kernel's share of its bound."""

    def group(topic: str, variant: str, low: int, high: int) -> list[tuple[Case, list[float]]]:
        return [
            (case, us)
            for case, us in measured
            if case.topic == topic and case.variant == variant and low <= case.shape["m"] <= high
        ]

    def ratios(cases: Sequence[tuple[Case, list[float]]]) -> dict[str, float]:
        return {case.title(): us[1] / us[0] for case, us in cases}

    for topic in ("plain", "chained"):
        for low, high in GROUPS:
            for dtype in DTYPES:
                found = [(case, us) for case, us in group(topic, "auto", low, high) if case.dtype == dtype]
                if found:
                    yield line(f"{topic} auto, M {low}..{high}, {dtype}", ratios(found))
    times = {(case.topic, *case.key): us[0] for case, us in measured}
    layouts = {}
    for case, us in measured:
        op, name, variant, dtype, shape = case.key
        linear = times.get((case.topic, op, name.removesuffix(KN), variant, dtype, shape))
        if name.endswith(KN) and linear is not None:
            layouts[case.title()] = linear / us[0]
    if layouts:
        yield line("time of [N,K] / time of [K,N]", layouts)
    for kernel in LIBRARY.codes:
        for low, high in GROUPS:
            forced = group("plain", kernel, low, high)
            if forced and kernel != "auto":
                yield line(f"{kernel}, M {low}..{high}", ratios(forced))
                bounds = {case.title(): bound_us(case) / us[0] for case, us in forced}
                best = max(bounds, key=bounds.__getitem__)
                yield f"  {'':<34} at best {100 * bounds[best]:.0f} % of its bound, at {best}"
    rates = [(case.flops / us[0] * 1e-6, case.title()) for case, us in measured if case.flops]
    if rates:
        yield "  at best {:.0f} TFLOP/s, at {}".format(*max(rates))


def command() -> int:
    """The command line of every package's benchmark, and one summary of all topics behind it."""
    engine = functools.cache(CudaEngine)  # of the checks of chains; main has its own

    def build(case: Case, _: dict[str, Any]) -> Workload:
        return chained(case, engine()) if case.topic == "chained" else {"plain": plain, "host": host}[case.topic](case)

    def lines(measured: Sequence[tuple[Case, Row]]) -> Iterator[str]:
        yield "torch's time / ours:"
        yield from summary([(case, [row.us, *row.peers.values()]) for case, row in measured if row.peers])

    cases = [case for case in CASES if case.topic != "calibration"]
    return main("dandan-gemm", cases, build, summary=lines)


if __name__ == "__main__":
    sys.exit(command())

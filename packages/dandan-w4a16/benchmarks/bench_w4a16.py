"""INT4 weights against Marlin and Machete (INT4 weights as well) and against cuBLAS with FP16 or BF16 weights.

    python packages/dandan-w4a16/benchmarks/bench_w4a16.py [--quick] [--record docs/results/dandan-w4a16]

The environment variable DANDAN_PEERS names the folder that tools/peers.py wrote (default: .peers in the repository).
Own weights are affine with groups of 64; `marlin g128` and `machete g128` are symmetric, `marlin g64 affine` has the
same format as ours. `torch` is F.linear. All take both dtypes. A peer's first weight of each layer is compared with
FP64 before it is timed.

Topics. `plain`: launches without the dependent-launch attribute. `host`: what an eager call costs the host. `accuracy`:
what the quantisation loses, and how far the kernel is from FP64 of the dequantised weight. `chained`: dependent
launches in one graph, bit for bit as with plain launches:

    link i-1: [m, max(n, k)]                     link i: [m, max(n, k)]
    |<--- first k columns: x --->|    call(x, w_i)    |<--- first n columns: written --->|

Each call reads what the call before it wrote, for every n and k; the first call of a rotation reads what the last one
wrote. torch.mm runs the same chain in the same memory, launched as it comes. Marlin writes contiguous results alone:
where n < k, the first m n elements of the same memory. Machete allocates its results: where n >= k each call reads the
result of the one before, where n < k nothing links its calls.

The weights of a rotation exceed L2 twice, in all topics. The first call of each Marlin kernel compiles it from PTX.
"""

from __future__ import annotations

import functools
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from cases import CASES, GROUP, quick
from int4_peers import Canonical, PeerWeights, Vllm, peer_weights, random_weight, relative_error

from dandan_ops_core.benchmark import (
    Case,
    CudaEngine,
    Implementation,
    Peer,
    Rotating,
    Row,
    Workload,
    check_chain,
    dependent_launch,
    geometric_mean,
    kernel_fingerprint,
    l2_size,
    main,
    set_count,
)
from dandan_ops_core.testing import Comparison, compare, honest_math
from dandan_w4a16 import Int4Weight, QuantizedLinear, quantize_int4, reference
from dandan_w4a16._ops import LIBRARY

ROOT = Path(__file__).resolve().parents[3]
DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16}
CHECKED_ROWS = 32  # compared in FP64: so many at the start, in the middle and at the end
READ_BYTES_PER_S = 4.58e12  # of an H200, by a bare read kernel: the floor of the summary
ROW_GROUPS = ((1, 16), (32, 64), (128, 128), (256, 256), (1024, 4096))
Call = Callable[[], Any]


def load_vllm() -> Vllm:
    sys.path.insert(0, str(ROOT / "tools"))
    from peers import find_peers

    found = find_peers()
    found.require("_C::marlin_gemm", "_C::gptq_marlin_repack", "_C::machete_mm", "_C::machete_prepack_B")
    return Vllm(torch.ops._C, found.scalar_type("uint4b8"), found.scalar_type("uint4"))


# ------------------------------------------------------------------------------------------------------------------
# Weights


@dataclass
class Layer:
    """The rotating weights of a layer: ours in the kernels' order, the peers', and those of cuBLAS."""

    canonical: Canonical  # of own[0]
    own: list[tuple[torch.Tensor, torch.Tensor]]  # codes, scales
    peers: list[PeerWeights]
    peers_failed: dict[str, str]
    dense: Rotating


_made: dict[tuple[int, int, str], Layer] = {}


def layer(case: Case, peers: dict[str, Any]) -> Layer:
    """Kept until a case of another layer comes."""
    n, k, dtype = case.shape["n"], case.shape["k"], DTYPES[case.dtype]
    key = (n, k, case.dtype)
    if key not in _made:
        _made.clear()
        torch.manual_seed(0)
        count = set_count(n * k // 2, l2_size())
        canonical = random_weight(n, k, GROUP, dtype)
        own = [repacked(canonical if i == 0 else random_weight(n, k, GROUP, dtype)) for i in range(count)]
        others, failed = peer_weights(peers["vllm"], n, k, dtype, count) if "vllm" in peers else ([], {})
        dense = Rotating.sized({"w": ((n, k), dtype)})
        for i in range(len(dense)):
            dense[i]["w"].mul_(k**-0.5)
        torch.cuda.synchronize()
        _made[key] = Layer(canonical, own, others, failed, dense)
    return _made[key]


def repacked(weight: Canonical) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and scales in the kernels' order. They are static from here on: repack ends with a synchronisation."""
    codes, scales = LIBRARY.op("repack")(*weight.tensors(), weight.group)
    return codes, scales


# ------------------------------------------------------------------------------------------------------------------
# Workloads


def sizes(case: Case) -> tuple[int, int, int, int]:
    m, n, k, group = (case.shape[name] for name in ("m", "n", "k", "group_size"))
    return m, n, k, group


def own_call(case: Case, x: torch.Tensor, weight: tuple[torch.Tensor, torch.Tensor], out: torch.Tensor) -> Call:
    _, n, k, group = sizes(case)
    packed_linear_out, number = LIBRARY.op("packed_linear_out"), LIBRARY.codes[case.variant]
    codes, scales = weight
    return lambda: packed_linear_out(x, codes, scales, None, n, k, group, number, out)


def checked(case: Case, x: torch.Tensor, weight: Canonical, out: torch.Tensor, call: Call) -> Comparison:
    """Rows at the start, in the middle and at the end of one call against FP64 of the dequantised weight."""
    call()
    m = x.shape[0]
    starts = (0, (m - CHECKED_ROWS) // 2, m - CHECKED_ROWS)
    kept = sorted({row for start in starts for row in range(max(start, 0), min(start + CHECKED_ROWS, m))})
    rows = x[kept]
    exact = reference.w4a16_linear(rows, *weight.tensors(), None, weight.group, compute_dtype=torch.float64)
    with honest_math():
        honest = reference.w4a16_linear(rows, *weight.tensors(), None, weight.group)
    return compare(out[kept], exact, honest, case.title())


def workload(
    case: Case,
    count: int,
    own: Implementation,
    first: tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor], torch.Tensor],
    canonical: Canonical,
) -> Workload:
    """A case with `first`, its x, weight and out of buffer set 0."""
    x, (codes, scales), out = first
    _, n, k, group = sizes(case)
    route = LIBRARY.info("packed_linear", (x, codes, scales, None, n, k, group), (out,), case.variant)
    if route["copies"]:
        raise AssertionError(f"{case.title()}: {route['copies']} would be copied, which is not what is to be timed")
    return Workload(
        case,
        sets=count,
        own=own,
        check=lambda: checked(case, x, canonical, out, own.make(0)),
        route=route["kernel"],
        fingerprint=kernel_fingerprint(LIBRARY.library.build_info["fingerprints"], route["kernel"]),
    )


def peer(weights: PeerWeights, tensors: Callable[[int], tuple[torch.Tensor, torch.Tensor]]) -> Implementation:
    """A peer with its first result checked; `tensors` gives x and a contiguous out of a buffer set."""

    def make(i: int) -> Call:
        if not weights.checked:
            begin = time.monotonic()
            weights.check(*tensors(0))
            if (took := time.monotonic() - begin) > 2:
                print(f"{weights.name}: its first call took {took:.0f} s")
        weights.check(*tensors(0))  # raises again where it was wrong
        return weights.make(i, *tensors(i))

    return Implementation(weights.name, make)


def plain(case: Case, peers: dict[str, Any]) -> Workload:
    m, n, k, _ = sizes(case)
    of_layer, dtype = layer(case, peers), DTYPES[case.dtype]
    count = len(of_layer.own)
    moved = 2 * m * (n + k)
    rows = Rotating({"x": ((m, k), dtype), "out": ((m, n), dtype)}, min(count, set_count(moved, l2_size())), seed=1)

    def own(i: int) -> Call:
        return own_call(case, rows[i]["x"], of_layer.own[i], rows[i]["out"])

    def linear(i: int) -> Call:
        x, w = rows[i]["x"], of_layer.dense[i]["w"]
        return lambda: F.linear(x, w)

    ours = Implementation("dandan", own, around=lambda: dependent_launch(LIBRARY, False))
    made = workload(case, count, ours, (rows[0]["x"], of_layer.own[0], rows[0]["out"]), of_layer.canonical)
    made.peers = [
        *(peer(weights, lambda i: (rows[i]["x"], rows[i]["out"])) for weights in of_layer.peers),
        Implementation("torch", linear),
    ]
    made.peers_failed = dict(of_layer.peers_failed)
    return made


def chained(case: Case, peers: dict[str, Any], engine: CudaEngine) -> Workload:
    m, n, k, _ = sizes(case)
    of_layer, dtype = layer(case, peers), DTYPES[case.dtype]
    count = len(of_layer.own)
    links = Rotating({"y": ((m, max(n, k)), dtype)}, count, seed=1)

    def x_of(i: int) -> torch.Tensor:
        return links[i - 1]["y"][:, :k]

    def own(i: int) -> Call:
        return own_call(case, x_of(i), of_layer.own[i], links[i]["y"][:, :n])

    def mm(i: int) -> Call:
        x, w, y = x_of(i), of_layer.dense[i]["w"], links[i]["y"][:, :n]
        return lambda: torch.mm(x, w.t(), out=y)

    def contiguous(i: int) -> tuple[torch.Tensor, torch.Tensor]:
        return x_of(i), links[i]["y"].view(-1)[: m * n].view(m, n)

    def in_turn(weights: PeerWeights) -> Implementation:
        """Machete: each call reads the result of the one before."""
        results: dict[int, torch.Tensor] = {}
        whole = peer(weights, contiguous)

        def make(i: int) -> Call:
            whole.make(i)  # the check
            stored, (x, out) = weights.stored[i], contiguous(i)
            before = (i - 1) % count

            def call() -> torch.Tensor:
                y = weights.call(results[before][:, :k] if before in results and n >= k else x, stored, out)
                results[i] = y
                return y

            return call

        return Implementation(weights.name, make)

    def same_bits() -> None:
        memory, calls = [links[i]["y"] for i in range(count)], [own(i) for i in range(count)]
        check_chain(case.title(), engine, calls, memory, lambda enabled: dependent_launch(LIBRARY, enabled))

    ours = Implementation("dandan", own, around=lambda: dependent_launch(LIBRARY, True))
    made = workload(case, count, ours, (x_of(0), of_layer.own[0], links[0]["y"][:, :n]), of_layer.canonical)
    made.peers = [
        *(peer(w, contiguous) if w.takes_out else in_turn(w) for w in of_layer.peers),
        Implementation("torch", mm),
    ]
    made.peers_failed = dict(of_layer.peers_failed)
    made.after = same_bits
    return made


def host(case: Case, peers: dict[str, Any]) -> Workload:
    """Eager calls as a user makes them: dependent launches as the library decides."""
    made = plain(case, peers)
    m, n, k, _ = sizes(case)
    of_layer = layer(case, peers)
    w, dtype, packed = of_layer.dense[0]["w"], DTYPES[case.dtype], of_layer.canonical
    x, out, bias = (torch.randn(*shape, device="cuda").to(dtype) for shape in ((m, k), (m, n), (n,)))
    weight = Int4Weight(*packed.tensors(), packed.group)
    theirs: list[Implementation] = []
    if case.case == "eager, operator, out=":
        ours = own_call(case, x, of_layer.own[0], out)
        marlins = [each for each in made.peers if each.name.startswith("marlin")]
        theirs = [Implementation(each.name, each.make, host=True) for each in marlins]
    else:
        module = QuantizedLinear.from_packed(weight, bias if case.case.endswith("bias") else None)

        def ours() -> Any:
            return module(x)

    linear = (lambda: F.linear(x, w, bias)) if case.case.endswith("bias") else (lambda: F.linear(x, w))
    made.own = Implementation("dandan", made.own.make, eager=ours, host=True)
    made.peers = [*theirs, Implementation("torch", made.peers[-1].make, eager=linear, host=True)]
    return made


@functools.lru_cache(maxsize=1)
def quantised(n: int, k: int, dtype: torch.dtype, group: int) -> tuple[torch.Tensor, Canonical, dict[str, float]]:
    """A normally distributed weight, its INT4 form, and what that loses of the weight."""
    weight = torch.randn(n, k, generator=torch.Generator("cuda").manual_seed(3), device="cuda") * k**-0.5
    weight = weight.to(dtype)
    packed = quantize_int4(weight, group)
    kept = Canonical(packed.qweight, packed.scales, packed.zeros, group)
    dequantised = reference.dequantize(*kept.tensors(), group, dtype)
    away = (dequantised.float() - weight.float()).abs().view(n, k // group, group)
    loss = {
        "weight_loss": relative_error(dequantised, weight),
        "weight_loss_steps": float((away / kept.scales.float().unsqueeze(-1)).max()),
    }
    return weight, kept, loss


def accuracy(case: Case, _: dict[str, Any]) -> Workload:
    m, n, k, group = sizes(case)
    dtype = DTYPES[case.dtype]
    weight, canonical, loss = quantised(n, k, dtype, group)
    codes, scales = repacked(canonical)
    count = set_count(n * k // 2, l2_size())
    own = [(codes, scales), *((codes.clone(), scales.clone()) for _ in range(count - 1))]
    torch.cuda.synchronize()
    rows = Rotating({"x": ((m, k), dtype), "out": ((m, n), dtype)}, count, seed=2)
    x, out = rows[0]["x"], rows[0]["out"]

    def figures() -> dict[str, float]:
        exact = reference.w4a16_linear(x, *canonical.tensors(), None, group, compute_dtype=torch.float64)
        unquantised = x.to(torch.float64) @ weight.to(torch.float64).t()
        return {
            **loss,
            "result_loss": relative_error(exact, unquantised),
            "kernel_error": relative_error(out, exact),
            "rounding_error": relative_error(exact.to(dtype), exact),
        }

    def call(i: int) -> Call:
        return own_call(case, rows[i]["x"], own[i % count], rows[i]["out"])

    ours = Implementation("dandan", call, around=lambda: dependent_launch(LIBRARY, False))
    made = workload(case, count, ours, (x, own[0], out), canonical)
    made.figures = figures
    return made


# ------------------------------------------------------------------------------------------------------------------
# The summary


def against(row: Row, which: str) -> float | None:
    """The time of the best INT4 peer, of torch or of the best of all, over ours."""
    times = {
        "INT4 peers": [us for name, us in row.peers.items() if name != "torch"],
        "torch": [us for name, us in row.peers.items() if name == "torch"],
        "all": list(row.peers.values()),
    }[which]
    return min(times) / row.us if times else None


def line(name: str, rows: Sequence[Row], which: str) -> Iterator[str]:
    ratios = {row.title(): ratio for row in rows if (ratio := against(row, which)) is not None}
    if ratios:
        worst = min(ratios, key=ratios.__getitem__)
        mean = geometric_mean(ratios.values())
        yield (
            f"  {name:<34} {which:<10} {len(ratios):4} cases, geometric mean {mean:.3f}, "
            f"worst {ratios[worst]:.3f} at {worst}"
        )


def summary(measured: Sequence[tuple[Case, Row]]) -> Iterator[str]:
    """Peers' times over ours by rows of x, and the share of the floor that few rows reach."""
    yield "peers' time / ours:"
    for topic in ("plain", "chained"):
        of_topic = [(case, row) for case, row in measured if case.topic == topic]
        for variant in dict.fromkeys(case.variant for case, _ in of_topic):
            for low, high in ROW_GROUPS:
                for dtype in DTYPES:
                    rows = [
                        row
                        for case, row in of_topic
                        if (case.variant, case.dtype) == (variant, dtype) and low <= case.shape["m"] <= high
                    ]
                    for which in ("INT4 peers", "torch", "all"):
                        yield from line(f"{topic} {variant}, M {low}..{high}, {dtype}", rows, which)
        for name, fits in (("above 50 MB", lambda size: size > 50e6), ("up to 50 MB", lambda size: size <= 50e6)):
            shares = [
                100 * row.bytes / READ_BYTES_PER_S * 1e6 / row.us
                for case, row in of_topic
                if case.variant == "auto" and case.shape["m"] == 1 and fits(case.shape["n"] * case.shape["k"] / 2)
            ]
            if shares:
                yield f"  {topic}, M 1, {name} packed: {min(shares):.0f}-{max(shares):.0f} % of the floor (4.58 TB/s)"


def command() -> int:
    """The command line of every package's benchmark, and one summary of all topics behind it."""
    engine = functools.cache(CudaEngine)  # of the checks of chains; main has its own

    def build(case: Case, peers: dict[str, Any]) -> Workload:
        if case.topic == "chained":
            return chained(case, peers, engine())
        return {"plain": plain, "host": host, "accuracy": accuracy}[case.topic](case, peers)

    cases = [case for case in CASES if case.topic != "calibration"]  # that is `dandan-ops calibrate`
    return main("dandan-w4a16", cases, build, peers=[Peer("vllm", load_vllm)], quick=quick, summary=summary)


if __name__ == "__main__":
    sys.exit(command())

"""Every operator of dandan-norm against vLLM's kernels, PyTorch's eager functions and torch.compile.

    python packages/dandan-norm/benchmarks/bench_norm.py [--record docs/results/dandan-norm]

The environment variable DANDAN_PEERS names the folder that tools/peers.py wrote (default: .peers in the repository).

Topics: `plain` launches without the dependent-launch attribute; `chained` with it, one graph in which each call reads
what the call before it wrote, bit for bit as with plain launches; `host` is what an eager call costs the host.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from cases import CASES

import dandan_norm
from dandan_norm import reference
from dandan_norm._ops import LIBRARY
from dandan_ops_core.benchmark import (
    Case,
    Implementation,
    Peer,
    Rotating,
    Workload,
    compiled,
    dependent_launch,
    kernel_fingerprint,
    l2_size,
    main,
    set_count,
)
from dandan_ops_core.testing import Comparison, compare

ROOT = Path(__file__).resolve().parents[3]
CHECKED_ROWS = 64  # compared in FP64: so many at either end
EPS = 1e-6
DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}
Call = Callable[[], Any]
Set = dict[str, torch.Tensor]


def load_vllm() -> Any:
    sys.path.insert(0, str(ROOT / "tools"))
    from peers import find_peers

    find_peers().require("_C::rms_norm", "_C::fused_add_rms_norm", "_C::silu_and_mul")
    return torch.ops._C


def tensors(case: Case) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """One buffer set of a case."""
    rows, cols, dtype = case.shape["rows"], case.shape["cols"], DTYPES[case.dtype]
    full = ((rows, cols), dtype)
    return {
        "rms_norm": {"x": full, "out": full},
        "residual_rms_norm": {"x": full, "residual": full, "out": full, "summed": full},
        "silu_and_mul": {"x": ((rows, 2 * cols), dtype), "out": full},
        "layer_norm": {"x": full, "out": full},
        "softmax": {"x": full, "out": full},
        "argmax": {"x": full, "out": ((rows,), torch.int64)},
    }[case.op]


def rotating(case: Case) -> Rotating:
    """Enough sets that the tensors which every implementation touches exceed L2 twice: vLLM's residual form works in
    place, on half of the tensors of ours, and would else find some of them in L2.
    """
    every = tensors(case)
    touched = {n: t for n, t in every.items() if case.op != "residual_rms_norm" or n in ("x", "residual")}
    size = sum(math.prod(shape) * dtype.itemsize for shape, dtype in touched.values())
    return Rotating(every, set_count(size, l2_size()))


def arguments(case: Case, s: Set, weight: torch.Tensor, bias: torch.Tensor) -> tuple[Any, ...]:
    cols = case.shape["cols"]
    return {
        "rms_norm": lambda: (s["x"], weight, EPS),
        "residual_rms_norm": lambda: (s["x"], s["residual"], weight, EPS),
        "silu_and_mul": lambda: (s["x"][:, :cols], s["x"][:, cols:]),
        "layer_norm": lambda: (s["x"], weight, bias, EPS),
        "softmax": lambda: (s["x"],),
        "argmax": lambda: (s["x"],),
    }[case.op]()


def output(case: Case, s: Set) -> Any:
    return (s["out"], s["summed"]) if case.op == "residual_rms_norm" else s["out"]


def own_call(case: Case, s: Set, weight: torch.Tensor, bias: torch.Tensor) -> Call:
    function, inputs, out = getattr(dandan_norm, case.op), arguments(case, s, weight, bias), output(case, s)
    return lambda: function(*inputs, out=out)


def vllm_call(case: Case, ops: Any, s: Set, weight: torch.Tensor) -> Call:
    if case.op == "rms_norm":
        return lambda: ops.rms_norm(s["out"], s["x"], weight, EPS)
    if case.op == "residual_rms_norm":
        return lambda: ops.fused_add_rms_norm(s["x"], s["residual"], weight, EPS)
    return lambda: ops.silu_and_mul(s["out"], s["x"])


def eager_function(case: Case, weight: torch.Tensor, bias: torch.Tensor) -> Callable[..., Any]:
    cols = (case.shape["cols"],)
    return {
        "rms_norm": lambda x, *_: F.rms_norm(x, cols, weight, EPS),
        "residual_rms_norm": lambda x, residual, *_: F.rms_norm(x + residual, cols, weight, EPS),
        "silu_and_mul": lambda gate, up: F.silu(gate) * up,
        "layer_norm": lambda x, *_: F.layer_norm(x, cols, weight, bias, EPS),
        "softmax": lambda x: torch.softmax(x, -1),
        "argmax": lambda x: torch.argmax(x, -1),
    }[case.op]


def checked(case: Case, s: Set, weight: torch.Tensor, bias: torch.Tensor) -> Comparison:
    """The first and last rows of one call against FP64."""
    own_call(case, s, weight, bias)()
    rows = case.shape["rows"]
    kept = slice(None) if rows <= 2 * CHECKED_ROWS else [*range(CHECKED_ROWS), *range(rows - CHECKED_ROWS, rows)]
    inputs = tuple(
        t[kept] if isinstance(t, torch.Tensor) and t.dim() == 2 else t for t in arguments(case, s, weight, bias)
    )
    function = getattr(reference, case.op)
    exact, honest, actual = function(*inputs, compute_dtype=torch.float64), function(*inputs), s["out"][kept]
    if case.op == "argmax":
        wrong = int((actual != exact).sum())
        return Comparison(case.title(), wrong == 0, float(wrong), 0.0, None, 0.0, 0.0, wrong, exact.numel(), None)
    if case.op == "residual_rms_norm":
        exact, honest = exact[0], honest[0]
    return compare(actual, exact, honest, case.title())


def build(case: Case, peers: dict[str, Any]) -> Workload:
    cols, dtype = case.shape["cols"], DTYPES[case.dtype]
    weight, bias = (torch.randn(cols, device="cuda").to(dtype) for _ in range(2))
    sets = rotating(case)
    info = dandan_norm.elementwise_execution_info(
        case.op, *arguments(case, sets[0], weight, bias), out=output(case, sets[0])
    )
    workload = Workload(
        case,
        sets=len(sets),
        own=Implementation(
            "dandan",
            lambda i: own_call(case, sets[i], weight, bias),
            around=lambda: dependent_launch(LIBRARY, False),
        ),
        check=lambda: checked(case, sets[0], weight, bias),
        route=info.kernel,
        fingerprint=kernel_fingerprint(LIBRARY.library.build_info["fingerprints"], info.kernel),
    )
    eager = eager_function(case, weight, bias)
    if case.topic == "host":
        return host(workload, sets, weight, bias, peers, eager)
    if case.op in ("rms_norm", "residual_rms_norm", "silu_and_mul") and "vllm" in peers:
        workload.peers = [Implementation("vllm", lambda i: vllm_call(case, peers["vllm"], sets[i], weight))]
    if case.topic == "chained":
        return chained(workload, weight, peers)

    def eager_call(i: int) -> Call:
        inputs = arguments(case, sets[i], weight, bias)
        return lambda: eager(*inputs)

    if case.op in ("layer_norm", "softmax", "argmax"):
        workload.peers = [
            compiled("torch.compile", eager, lambda i: arguments(case, sets[i], weight, bias)),
            Implementation("torch", eager_call),
        ]
    elif case.case == "grid" and case.dtype == "float16":
        workload.peers = [*workload.peers, Implementation("torch", eager_call)]
    return workload


def chained(workload: Workload, weight: torch.Tensor, peers: dict[str, Any]) -> Workload:
    """Call i reads what call i - 1 wrote. vLLM's kernels run in the same chain, launched as they come.

    Its residual form works in place, so both sides do: one pair of tensors, in L2 from the second call on.
    """
    case = workload.case
    rows, cols, dtype = case.shape["rows"], case.shape["cols"], DTYPES[case.dtype]
    full = ((rows, cols), dtype)
    sets = Rotating.sized({"y": full, "other": full})
    links = [sets[i] for i in range(len(sets))]
    pair = torch.randn(rows, 2 * cols, device="cuda").to(dtype)

    def own(i: int) -> Call:
        x, to, start = links[i - 1]["y"], links[i], links[0]
        if case.op == "rms_norm":
            return lambda: dandan_norm.rms_norm(x, weight, EPS, out=to["y"])
        if case.op == "residual_rms_norm":
            both = (start["y"], start["other"])
            return lambda: dandan_norm.residual_rms_norm(*both, weight, EPS, out=both)
        return lambda: dandan_norm.silu_and_mul(x, to["other"], out=to["y"])

    def vllm(i: int) -> Call:
        ops, x, to, start = peers["vllm"], links[i - 1]["y"], links[i], links[0]
        if case.op == "rms_norm":
            return lambda: ops.rms_norm(to["y"], x, weight, EPS)
        if case.op == "residual_rms_norm":
            return lambda: ops.fused_add_rms_norm(start["y"], start["other"], weight, EPS)
        # Its operand is one tensor, so its calls form no chain of that shape: the same call again and again.
        return lambda: ops.silu_and_mul(to["y"], pair)

    def same_bits() -> None:
        start = torch.randn(rows, cols, device="cuda").to(dtype)
        others = [torch.randn(rows, cols, device="cuda").to(dtype) for _ in links]
        seen = []
        for enabled in (False, True):
            for link, other in zip(links, others, strict=True):
                link["other"].copy_(other)
            links[-1]["y"].copy_(start)
            with dependent_launch(LIBRARY, enabled):
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph):
                    for i in range(len(links)):
                        own(i)()
                links[-1]["y"].copy_(start)
                graph.replay()
            torch.cuda.synchronize()
            seen.append([link["y"].clone() for link in links])
        for number, (plain, dependent) in enumerate(zip(*seen, strict=True)):
            if not torch.equal(plain.view(torch.int16), dependent.view(torch.int16)):
                raise AssertionError(f"{case.title()}: link {number} differs between plain and dependent launches")

    workload.sets = len(links)
    workload.own = Implementation("dandan", own, around=lambda: dependent_launch(LIBRARY, True))
    workload.peers = [Implementation("vllm", vllm)] if "vllm" in peers else []
    workload.after = same_bits
    return workload


def host(
    workload: Workload,
    sets: Rotating,
    weight: torch.Tensor,
    bias: torch.Tensor,
    peers: dict[str, Any],
    eager: Callable[..., Any],
) -> Workload:
    """Eager calls as a user makes them: dependent launches as the library decides, default arguments."""
    s = sets[0]
    x = s["x"]
    if workload.case.case == "eager, out=":
        call: Call = own_call(workload.case, s, weight, bias)
    else:

        def call() -> torch.Tensor:
            return dandan_norm.rms_norm(x, weight, EPS)

    def torch_call() -> torch.Tensor:
        return F.rms_norm(x, (x.shape[-1],), weight, EPS)

    workload.own = Implementation("dandan", workload.own.make, eager=call, host=True)
    workload.peers = [Implementation("torch", lambda i: torch_call, host=True)]
    if "vllm" in peers and workload.case.case == "eager, out=":
        vllm = Implementation("vllm", lambda i: vllm_call(workload.case, peers["vllm"], sets[i], weight), host=True)
        workload.peers = [*workload.peers, vllm]
    return workload


if __name__ == "__main__":
    sys.exit(main("dandan-norm", CASES, build, peers=[Peer("vllm", load_vllm)]))

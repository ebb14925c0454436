"""`dandan-ops demo`: every operator on the tensors of one model step, with what ran, why, how exact and how fast.

The shapes are those of Qwen3-0.6B: hidden size 1024, intermediate size 3072, 16 query and 8 key-value heads of 128
with a norm per head, vocabulary 151,936. The LM head's product is left out on the CPU, where it would take most of the
time. Weights and activations are random; nothing is downloaded.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from types import ModuleType
from typing import Any, TextIO

import torch
import torch.nn.functional as F

import dandan_gemm
import dandan_norm
from dandan_ops_core.backend import ExecutionInfo
from dandan_ops_core.testing import Comparison, compare

__all__ = ["Case", "DeviceMissingError", "Result", "cases", "main", "run"]

HIDDEN, INTERMEDIATE, VOCABULARY = 1024, 3072, 151936
QUERY_HEADS, KEY_VALUE_HEADS, HEAD = 16, 8, 128
GEMM_DTYPES = (torch.bfloat16, torch.float16)
EPS = 1e-6
DECODE_TOKENS = (1, 8)
PREFILL_TOKENS = {"cuda": 512, "cpu": 64}

Tensors = tuple[torch.Tensor, ...]


class DeviceMissingError(RuntimeError):
    """The device that was asked for is not there."""


@dataclass(frozen=True)
class Case:
    """One operator on one tensor of the model.

    `arguments` are what the operator takes; `keywords` go to the operator and its reference; `pytorch` computes the
    same with PyTorch's own functions, and is what the time is compared with.
    """

    op: str
    step: str
    tensor: str
    arguments: Tensors
    keywords: dict[str, Any]
    pytorch: Callable[[], Any]

    @property
    def shape(self) -> str:
        """Of the first argument; of a product M, N and K."""
        sizes = list(self.arguments[0].shape)
        if self.op == "gemm":
            sizes.insert(-1, self.arguments[1].shape[0])
        return "x".join(str(size) for size in sizes)

    @property
    def family(self) -> ModuleType:
        return dandan_gemm if self.op == "gemm" else dandan_norm


@dataclass(frozen=True)
class Result:
    """One row of the demo. Times are microseconds a call; `error` and `limit` belong to the worst element."""

    op: str
    step: str
    tensor: str
    shape: str
    dtype: str
    backend: str
    kernel: str
    reason: str
    error: float
    limit: float
    ok: bool
    us: float
    pytorch_us: float
    message: str

    @property
    def speedup(self) -> float:
        return self.pytorch_us / self.us


def cases(device: torch.device, dtype: torch.dtype) -> Iterator[Case]:
    """The operators of decode steps of 1 and 8 tokens and of a prefill step, in the order in which a layer has them."""
    generator = torch.Generator(device=device).manual_seed(0)

    def random(*shape: int, scale: float = 1.0) -> torch.Tensor:
        return (torch.randn(shape, generator=generator, device=device) * scale).to(dtype)

    heads = (QUERY_HEADS + 2 * KEY_VALUE_HEADS) * HEAD
    layers = {
        "qkv": (heads, HIDDEN),
        "o": (HIDDEN, QUERY_HEADS * HEAD),
        "gate, up": (2 * INTERMEDIATE, HIDDEN),
        "down": (HIDDEN, INTERMEDIATE),
        "LM head": (VOCABULARY, HIDDEN),
    }
    if device.type == "cpu":
        del layers["LM head"]
    weights = {name: random(n, k, scale=k**-0.5) for name, (n, k) in layers.items() if dtype in GEMM_DTYPES}
    prefill = PREFILL_TOKENS[device.type]
    for tokens in (*DECODE_TOKENS, prefill):
        phase = "prefill" if tokens == prefill else "decode"
        yield from _layer(f"{phase} {tokens}", tokens, random, weights)
        # Only the last token of each sequence meets the LM head: all of a decode step, one of a prefill.
        yield from _head(f"{phase} {tokens}", 1 if phase == "prefill" else tokens, random, weights)


def _linear(
    step: str, name: str, tokens: int, random: Callable[..., torch.Tensor], weights: Mapping[str, torch.Tensor]
) -> Iterator[Case]:
    if name in weights:
        weight = weights[name]
        x = random(tokens, weight.shape[1])
        yield Case("gemm", step, name, (x, weight), {"weight_transposed": True}, lambda: F.linear(x, weight))


def _layer(
    step: str, tokens: int, random: Callable[..., torch.Tensor], weights: Mapping[str, torch.Tensor]
) -> Iterator[Case]:
    x, residual = random(tokens, HIDDEN), random(tokens, HIDDEN, scale=4.0)
    weight, bias = 1 + random(HIDDEN, scale=0.1), random(HIDDEN, scale=0.1)
    eps = {"eps": EPS}
    yield Case("rms_norm", step, "hidden", (x, weight), eps, lambda: F.rms_norm(x, (HIDDEN,), weight, EPS))
    yield from _linear(step, "qkv", tokens, random, weights)
    # q and k are slices of one projection, read where they are.
    qkv = random(tokens, (QUERY_HEADS + 2 * KEY_VALUE_HEADS) * HEAD)
    q = qkv[:, : QUERY_HEADS * HEAD].unflatten(1, (QUERY_HEADS, HEAD))
    k = qkv[:, QUERY_HEADS * HEAD : (QUERY_HEADS + KEY_VALUE_HEADS) * HEAD].unflatten(1, (KEY_VALUE_HEADS, HEAD))
    head = 1 + random(HEAD, scale=0.1)
    yield Case("rms_norm", step, "query heads", (q, head), eps, lambda: F.rms_norm(q, (HEAD,), head, EPS))
    yield Case("rms_norm", step, "key heads", (k, head), eps, lambda: F.rms_norm(k, (HEAD,), head, EPS))

    yield from _linear(step, "o", tokens, random, weights)

    def add_and_norm() -> Tensors:
        summed = x + residual
        return F.rms_norm(summed, (HIDDEN,), weight, EPS), summed

    yield Case("residual_rms_norm", step, "hidden", (x, residual, weight), eps, add_and_norm)
    yield from _linear(step, "gate, up", tokens, random, weights)
    # gate and up are the two halves of one projection.
    gate, up = random(tokens, 2 * INTERMEDIATE).chunk(2, dim=-1)
    yield Case("silu_and_mul", step, "gate, up", (gate, up), {}, lambda: F.silu(gate) * up)
    yield from _linear(step, "down", tokens, random, weights)
    # Not in Qwen3, but in many models beside it.
    yield Case(
        "layer_norm", step, "hidden", (x, weight, bias), eps, lambda: F.layer_norm(x, (HIDDEN,), weight, bias, EPS)
    )


def _head(
    step: str, rows: int, random: Callable[..., torch.Tensor], weights: Mapping[str, torch.Tensor]
) -> Iterator[Case]:
    yield from _linear(step, "LM head", rows, random, weights)
    logits = random(rows, VOCABULARY, scale=3.0)
    yield Case("softmax", step, "logits", (logits,), {}, lambda: torch.softmax(logits, dim=-1))
    yield Case("argmax", step, "logits", (logits,), {}, lambda: torch.argmax(logits, dim=-1))


# ------------------------------------------------------------------------------------------------------------------
# Exactness


def check(case: Case, output: Any) -> Comparison:
    """Compares an output with the FP64 reference under the project's error bound; indices have to be equal."""
    function = getattr(case.family.reference, case.op)
    truth = function(*case.arguments, **case.keywords, compute_dtype=torch.float64)
    honest = function(*case.arguments, **case.keywords)
    pairs = list(zip(_tuple(output), _tuple(truth), _tuple(honest), strict=True))
    return max((_compare(case.op, *pair) for pair in pairs), key=lambda result: result.share)


def _tuple(value: Any) -> Tensors:
    return value if isinstance(value, tuple) else (value,)


def _compare(name: str, output: torch.Tensor, truth: torch.Tensor, honest: torch.Tensor) -> Comparison:
    if truth.dtype.is_floating_point:
        return compare(output, truth.to(torch.float64), honest, name, dtype=honest.dtype)
    wrong = int((output != truth).sum()) if output.shape == truth.shape else output.numel()
    problem = f"{wrong} of {output.numel()} indices are wrong" if wrong else None
    return Comparison(name, wrong == 0, float(wrong), 0.0, None, 0.0, 0.0, wrong, output.numel(), problem)


# ------------------------------------------------------------------------------------------------------------------
# Time


class _CpuClock:
    """Median over repeated calls within a small budget, own and PyTorch's in turns."""

    budget_s = 0.05

    def time(self, calls: Sequence[Callable[[], Any]]) -> list[float]:
        took: list[list[float]] = [[] for _ in calls]
        for call in calls:
            call()
        stop = time.perf_counter() + self.budget_s * len(calls)
        while len(took[0]) < 3 or (time.perf_counter() < stop and len(took[0]) < 100):
            for index, call in enumerate(calls):
                begin = time.perf_counter()
                call()
                took[index].append((time.perf_counter() - begin) * 1e6)
        return [statistics.median(values) for values in took]


class _CudaClock:
    """Replays of CUDA graphs, as the benchmarks do it, on the one set of tensors that is there."""

    calls = 50

    def __init__(self) -> None:
        from dandan_ops_core.benchmark import CudaEngine

        self._engine = CudaEngine()

    def time(self, calls: Sequence[Callable[[], Any]]) -> list[float]:
        graphs = [self._engine.capture([call], self.calls) for call in calls]
        return [statistics.median(times) / self.calls for times in self._engine.time(graphs, 5)]


# ------------------------------------------------------------------------------------------------------------------
# The run


def execution_info(case: Case) -> ExecutionInfo:
    """How the case's call would run."""
    if case.op == "gemm":
        return dandan_gemm.gemm_execution_info(*case.arguments, **case.keywords)
    return dandan_norm.elementwise_execution_info(case.op, *case.arguments, **case.keywords)


def run(case: Case, clock: _CpuClock | _CudaClock) -> Result:
    """Runs, checks and times one case."""
    operator = getattr(case.family, case.op)

    def call() -> Any:
        return operator(*case.arguments, **case.keywords)

    info = execution_info(case)
    compared = check(case, call())
    own, theirs = clock.time([call, case.pytorch])
    return Result(
        op=case.op,
        step=case.step,
        tensor=case.tensor,
        shape=case.shape,
        dtype=str(case.arguments[0].dtype).removeprefix("torch."),
        backend=info.backend,
        kernel=info.kernel or "",
        reason=info.fallback_reason or info.reason,
        error=compared.error,
        limit=compared.limit,
        ok=compared.ok,
        us=own,
        pytorch_us=theirs,
        message="" if compared.ok else compared.message(),
    )


COLUMNS = (
    ("operator", 17),
    ("step", 11),
    ("tensor", 11),
    ("shape", 13),
    ("dtype", 8),
    ("backend", 7),
    ("kernel", 17),
    ("error", 9),
    ("limit", 9),
    ("us", 9),
    ("vs PyTorch", 10),
    ("why this kernel", 0),
)


def _line(cells: Sequence[str]) -> str:
    padded = [cell.ljust(width) for cell, (_, width) in zip(cells, COLUMNS, strict=True)]
    return "  ".join(padded).rstrip()


def row_text(result: Result) -> str:
    """A result as one line of the table."""
    return _line(
        [
            result.op,
            result.step,
            result.tensor,
            result.shape,
            result.dtype,
            result.backend,
            result.kernel,
            f"{result.error:.2e}" + ("" if result.ok else "!"),
            f"{result.limit:.2e}",
            f"{result.us:.2f}",
            f"{result.speedup:.2f}x",
            result.reason,
        ]
    )


def _device(name: str) -> torch.device:
    present = torch.cuda.is_available()
    if name == "cuda" and not present:
        raise DeviceMissingError("no CUDA device is visible to torch; `dandan-ops env` says what is there")
    return torch.device("cuda" if present and name != "cpu" else "cpu")


def main(device: str = "auto", dtype: str = "bfloat16", *, as_json: bool = False, out: TextIO | None = None) -> int:
    """Runs the demo and prints it. Returns 0, or 1 when any output is over its error limit.

    Raises:
        DeviceMissingError: "cuda" was asked for and is not there.
    """
    out = out or sys.stdout
    place = _device(device)
    clock = _CudaClock() if place.type == "cuda" else _CpuClock()
    every = list(cases(place, getattr(torch, dtype)))
    results: list[Result] = []
    show_progress = sys.stderr.isatty()
    if not as_json:
        print(f"Qwen3-0.6B shapes on {_name(place)}, torch {torch.__version__}", file=out)
        print(_line([name for name, _ in COLUMNS]), file=out, flush=True)
    with torch.inference_mode():
        for number, case in enumerate(every, 1):
            if show_progress:
                text = f"[{number}/{len(every)}] {case.op}, {case.step}, {case.tensor}"
                print(f"\r{text:<78}", end="", file=sys.stderr, flush=True)
            result = run(case, clock)
            if show_progress:
                print(f"\r{'':<78}\r", end="", file=sys.stderr, flush=True)
            results.append(result)
            if not as_json:
                print(row_text(result), file=out, flush=True)
    wrong = [result for result in results if not result.ok]
    if as_json:
        rows = [asdict(result) for result in results]
        print(json.dumps({"device": _name(place), "torch": torch.__version__, "rows": rows}, indent=1), file=out)
    else:
        print(f"{len(results) - len(wrong)} of {len(results)} results are within their error limits.", file=out)
    for result in wrong:
        print(f"over its limit: {result.step}, {result.tensor}: {result.message}", file=sys.stderr)
    return 1 if wrong else 0


def _name(place: torch.device) -> str:
    return torch.cuda.get_device_name(place) if place.type == "cuda" else "the CPU"

"""`dandan-ops demo`: every operator on the tensors of one model step, with what ran, why, how exact and how fast.

The shapes are those of Qwen3-0.6B: hidden size 1024, intermediate size 3072, 16 query and 8 key-value heads of 128
with a norm per head, vocabulary 151,936. Each linear layer runs with its weight in 16 bits and in INT4. On the CPU the
LM head's product and the larger INT4 layers are left out, which would take most of the time. Attention is that of the
prefill step: one prompt, and the same tokens as two prompts in one packed batch. Operators around a paged cache are
left out while PyTorch alone computes them. Weights and activations are random; nothing is downloaded.
"""

from __future__ import annotations

import itertools
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

import dandan_attention
import dandan_gemm
import dandan_norm
import dandan_w4a16
from dandan_ops_core.backend import ExecutionInfo
from dandan_ops_core.testing import Comparison, compare

__all__ = ["Case", "DeviceMissingError", "Result", "cases", "main", "run"]

HIDDEN, INTERMEDIATE, VOCABULARY = 1024, 3072, 151936
QUERY_HEADS, KEY_VALUE_HEADS, HEAD = 16, 8, 128
HALF_DTYPES = (torch.bfloat16, torch.float16)  # of products and attention
EPS = 1e-6
DECODE_TOKENS = (1, 8)
PREFILL_TOKENS = {"cuda": 512, "cpu": 64}
CPU_QUANTIZED = ("o", "down")
ATTENTION = ("flash_attention", "flash_attention_varlen")

Tensors = tuple[torch.Tensor, ...]
# Of each linear layer: the weight, and the layer with it quantised.
Weights = Mapping[str, tuple[torch.Tensor, dandan_w4a16.QuantizedLinear | None]]


class DeviceMissingError(RuntimeError):
    """The device that was asked for is not there."""


@dataclass(frozen=True)
class Case:
    """One operator on one tensor of the model.

    `arguments` are what the operator takes; `keywords` go to the operator and its reference; `pytorch` computes the
    same with PyTorch's own functions, and is what the time is compared with; of a quantised layer, which PyTorch does
    not have, the product with the weight as it was before.
    """

    op: str
    step: str
    tensor: str
    arguments: Tensors
    keywords: dict[str, Any]
    pytorch: Callable[[], Any]
    layer: dandan_w4a16.QuantizedLinear | None = None

    @property
    def shape(self) -> str:
        """Of the first argument; of a product M, N and K."""
        sizes = list(self.arguments[0].shape)
        if self.op == "gemm":
            sizes.insert(-1, self.arguments[1].shape[0])
        if self.layer is not None:
            sizes.insert(-1, self.layer.out_features)
        return "x".join(str(size) for size in sizes)

    @property
    def family(self) -> ModuleType:
        return {"gemm": dandan_gemm, **dict.fromkeys(ATTENTION, dandan_attention)}.get(self.op, dandan_norm)

    def call(self) -> Any:
        """Runs the operator."""
        if self.layer is not None:
            return self.layer(*self.arguments)
        return getattr(self.family, self.op)(*self.arguments, **self.keywords)

    def reference(self, compute_dtype: torch.dtype = torch.float32) -> Any:
        """What the call means, in plain PyTorch."""
        if self.op in ATTENTION:
            return _causal_attention(self, compute_dtype)
        if self.layer is None:
            function = getattr(self.family.reference, self.op)
            return function(*self.arguments, **self.keywords, compute_dtype=compute_dtype)
        (x,), w = self.arguments, self.layer.weight_int4
        function = dandan_w4a16.reference.w4a16_linear
        return function(x, w.qweight, w.scales, w.zeros, None, w.group_size, compute_dtype=compute_dtype)


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
    weights: dict[str, tuple[torch.Tensor, dandan_w4a16.QuantizedLinear | None]] = {}
    for name, (n, k) in layers.items() if dtype in HALF_DTYPES else ():
        weight = random(n, k, scale=k**-0.5)
        quantized = device.type != "cpu" or name in CPU_QUANTIZED
        weights[name] = weight, dandan_w4a16.QuantizedLinear.from_float(weight) if quantized else None
    prefill = PREFILL_TOKENS[device.type]
    for tokens in (*DECODE_TOKENS, prefill):
        phase = "prefill" if tokens == prefill else "decode"
        yield from _layer(f"{phase} {tokens}", tokens, random, weights)
        # Only the last token of each sequence meets the LM head: all of a decode step, one of a prefill.
        yield from _head(f"{phase} {tokens}", 1 if phase == "prefill" else tokens, random, weights)


def _linear(step: str, name: str, tokens: int, random: Callable[..., torch.Tensor], weights: Weights) -> Iterator[Case]:
    if name in weights:
        weight, layer = weights[name]
        x = random(tokens, weight.shape[1])
        yield Case("gemm", step, name, (x, weight), {"weight_transposed": True}, lambda: F.linear(x, weight))
        if layer is not None:
            yield Case("QuantizedLinear", step, name, (x,), {}, lambda: F.linear(x, weight), layer)


def _layer(step: str, tokens: int, random: Callable[..., torch.Tensor], weights: Weights) -> Iterator[Case]:
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
    if step.startswith("prefill") and x.dtype in HALF_DTYPES:
        v = qkv[:, -KEY_VALUE_HEADS * HEAD :].unflatten(1, (KEY_VALUE_HEADS, HEAD))
        yield from _attention(step, q, k, v)
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


def _attention(step: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Iterator[Case]:
    """Of q [tokens, heads, HEAD], and k and v alike, all three read where the projection has them."""

    def prompt(rows: slice) -> Tensors:
        return tuple(t[rows].transpose(0, 1).unsqueeze(0) for t in (q, k, v))

    def one(rows: slice) -> torch.Tensor:
        queries, keys, values = prompt(rows)
        return F.scaled_dot_product_attention(queries, keys, values, is_causal=True, enable_gqa=True)

    whole, first = len(q), len(q) // 4
    yield Case("flash_attention", step, "heads", prompt(slice(None)), {"causal": True}, lambda: one(slice(None)))
    bounds = torch.tensor([0, first, whole], dtype=torch.int32, device=q.device)
    longest = {"max_seqlen_q": whole - first, "max_seqlen_k": whole - first}
    yield Case(
        "flash_attention_varlen",
        step,
        "heads",
        (q, k, v, bounds, bounds),
        {"causal": True, **longest},
        lambda: (one(slice(first)), one(slice(first, None))),
    )


def _head(step: str, rows: int, random: Callable[..., torch.Tensor], weights: Weights) -> Iterator[Case]:
    yield from _linear(step, "LM head", rows, random, weights)
    logits = random(rows, VOCABULARY, scale=3.0)
    yield Case("softmax", step, "logits", (logits,), {}, lambda: torch.softmax(logits, dim=-1))
    yield Case("argmax", step, "logits", (logits,), {}, lambda: torch.argmax(logits, dim=-1))


# ------------------------------------------------------------------------------------------------------------------
# Exactness


def check(case: Case, output: Any) -> Comparison:
    """Compares an output with the FP64 reference under the project's error bound; indices have to be equal."""
    truth, honest = case.reference(torch.float64), case.reference()
    pairs = list(zip(_tuple(output), _tuple(truth), _tuple(honest), strict=True))
    return max((_compare(case.op, *pair) for pair in pairs), key=lambda result: result.share)


def _causal_attention(case: Case, compute_dtype: torch.dtype) -> torch.Tensor:
    """Of each prompt, with the weights rounded to the dtype of v unless `compute_dtype` is FP64."""
    q, k, v, *bounds = case.arguments
    dtype = q.dtype
    if not bounds:
        q, k, v = (t[0].transpose(0, 1) for t in (q, k, v))
    ends = bounds[0].tolist() if bounds else [0, len(q)]
    found = []
    for begin, end in itertools.pairwise(ends):
        queries = q[begin:end].transpose(0, 1).to(compute_dtype)
        keys, values = (
            t[begin:end].transpose(0, 1).to(compute_dtype).repeat_interleave(QUERY_HEADS // KEY_VALUE_HEADS, 0)
            for t in (k, v)
        )
        later = torch.ones(end - begin, end - begin, dtype=torch.bool, device=q.device).triu(1)
        logits = (queries @ keys.mT * HEAD**-0.5).masked_fill(later, -torch.inf)
        weights = torch.exp(logits - logits.amax(-1, keepdim=True))
        total = weights.sum(-1, keepdim=True)
        if compute_dtype != torch.float64:
            weights = weights.to(dtype).to(compute_dtype)
        found.append((weights @ values / total).transpose(0, 1))
    out = torch.cat(found)
    out = out if bounds else out.transpose(0, 1).unsqueeze(0)
    return out if compute_dtype == torch.float64 else out.to(dtype)


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
    if case.layer is not None:
        return case.layer.execution_info(case.arguments[0])
    if case.op == "gemm" or case.op in ATTENTION:
        info: ExecutionInfo = getattr(case.family, f"{case.op}_execution_info")(*case.arguments, **case.keywords)
        return info
    return dandan_norm.elementwise_execution_info(case.op, *case.arguments, **case.keywords)


def run(case: Case, clock: _CpuClock | _CudaClock) -> Result:
    """Runs, checks and times one case."""
    info = execution_info(case)
    compared = check(case, case.call())
    own, theirs = clock.time([case.call, case.pytorch])
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
    ("operator", 22),
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

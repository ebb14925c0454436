"""What the tests share: calls, the definition written out in FP64, the honest composition, random configurations."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

import dandan_attention
from dandan_attention._ops import KERNELS
from dandan_ops_core.backend import ExecutionInfo
from dandan_ops_core.testing import assert_bit_equal, assert_close_to, guarded_empty, honest_math

__all__ = [
    "DTYPES",
    "KERNELS",
    "LAYOUTS",
    "Call",
    "Sequence",
    "attend64",
    "check",
    "dense",
    "generator",
    "int32",
    "one_hot",
    "packed",
    "poison",
    "random_call",
    "raw",
    "same_bits",
    "with_layout",
]

DTYPES = (torch.float16, torch.bfloat16)


def generator(seed: int, device: str = "cpu") -> torch.Generator:
    return torch.Generator(device).manual_seed(seed)


def int32(*values: int, device: str = "cpu") -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)


def one_hot(*shape: int, dtype: torch.dtype = torch.float16) -> torch.Tensor:
    """[..., S, D] with a 1 at place j of row j: a plain mean of such values tells which rows it is of."""
    return torch.eye(shape[-2], shape[-1]).expand(shape).to(dtype).contiguous()


# ------------------------------------------------------------------------------------------------------ the definition


@dataclass(frozen=True)
class Sequence:
    """One sequence of a call: q [Hq, Sq, D], the live part of k and v [Hkv, live, D], and where its rows lie in out."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    start: int
    batch: int
    rows: slice

    def visible(self, causal: bool, window: int | None) -> torch.Tensor:
        """[Sq, live]: which key each query sees, as the documentation says it."""
        j = torch.arange(self.k.shape[1], device=self.q.device)
        mask = torch.ones(self.q.shape[1], len(j), dtype=torch.bool, device=self.q.device)

        def column(places: list[int]) -> torch.Tensor:
            """Python's ints have no end; int64 has, and no key is as far as 2^40."""
            near = [max(-(2**40), min(2**40, place)) for place in places]
            return torch.tensor(near, dtype=torch.long, device=self.q.device).unsqueeze(1)

        if causal:
            mask = mask & (j <= column([self.start + i for i in range(len(mask))]))
        if window is not None:
            mask = mask & (j > column([self.start + i - window for i in range(len(mask))]))
        return mask


def attend64(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor, scale: float, softcap: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Result [Hq, Sq, D] and lse [Hq, Sq] in FP64 of one sequence; differentiable."""
    group = q.shape[0] // k.shape[0]
    head = torch.tensor([h // group for h in range(q.shape[0])], dtype=torch.long, device=q.device)
    logits = scale * (q.double() @ k.double()[head].mT)
    if softcap:
        logits = softcap * torch.tanh(logits / softcap)
    logits = logits.masked_fill(~mask, -torch.inf)
    lse = torch.logsumexp(logits, -1) if k.shape[1] else logits.sum(-1) - torch.inf
    weights = torch.exp(logits - torch.where(lse == -torch.inf, 0.0, lse).unsqueeze(-1))
    return weights @ v.double()[head], lse


def _honest(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor, scale: float, softcap: float
) -> list[torch.Tensor]:
    """The same with FP32 logits and softmax, P rounded to the dtype, FP32 sums, one rounding. P once divided by its
    sum, and at other scales, of which none is more honest: what an online softmax rounds depends on the maximum so far.
    """
    group = q.shape[0] // k.shape[0]
    head = torch.tensor([h // group for h in range(q.shape[0])], dtype=torch.long, device=q.device)
    logits = scale * (q.float() @ k.float()[head].mT)
    if softcap:
        logits = softcap * torch.tanh(logits / softcap)
    logits = logits.masked_fill(~mask, -torch.inf)
    if k.shape[1] == 0:
        return [q * 0]
    largest = logits.amax(-1, keepdim=True)
    p = torch.exp(logits - torch.where(largest == -torch.inf, 0.0, largest))
    total = p.sum(-1, keepdim=True)
    found = []
    for factor in (1 / total, torch.ones_like(total), torch.full_like(total, 0.7), torch.full_like(total, 0.83)):
        factor = torch.where(total == 0, 0.0, factor)
        rounded = (p * factor).to(q.dtype).float() @ v.float()[head]
        found.append(torch.where(total == 0, 0.0, rounded / (total * factor)).to(q.dtype))
    return found


# ---------------------------------------------------------------------------------------------------------------- calls


@dataclass(frozen=True)
class Call:
    """The arguments of one call: dense, or packed with `cu_seqlens`."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    options: dict[str, Any] = field(default_factory=dict)
    cu_seqlens: tuple[torch.Tensor, torch.Tensor] | None = None

    @property
    def name(self) -> str:
        return "flash_attention" if self.cu_seqlens is None else "flash_attention_varlen"

    @property
    def positional(self) -> tuple[torch.Tensor, ...]:
        return (self.q, self.k, self.v, *(self.cu_seqlens or ()))

    def __str__(self) -> str:
        options = {
            name: value.tolist() if isinstance(value, torch.Tensor) else value for name, value in self.options.items()
        }
        lengths = "" if self.cu_seqlens is None else f" {[each.tolist() for each in self.cu_seqlens]}"
        return f"{self.name} q {list(self.q.shape)} k {list(self.k.shape)}{lengths} {self.q.dtype} {options}"

    def with_(self, **changes: Any) -> Call:
        return dataclasses.replace(self, **changes)

    def to(self, device: str) -> Call:
        options = {
            name: value.to(device) if isinstance(value, torch.Tensor) else value for name, value in self.options.items()
        }
        q, k, v = (t.to(device) for t in (self.q, self.k, self.v))
        if self.cu_seqlens is None:
            return Call(q, k, v, options)
        one = self.cu_seqlens[0].to(device)
        other = one if self.cu_seqlens[0] is self.cu_seqlens[1] else self.cu_seqlens[1].to(device)
        return Call(q, k, v, options, (one, other))

    def run(self, backend: str = "auto", **keywords: Any) -> Any:
        return getattr(dandan_attention, self.name)(*self.positional, **self.options, backend=backend, **keywords)

    def info(self, backend: str = "auto", **keywords: Any) -> ExecutionInfo:
        function = getattr(dandan_attention, f"{self.name}_execution_info")
        found: ExecutionInfo = function(*self.positional, **self.options, backend=backend, **keywords)
        return found

    @property
    def scale(self) -> float:
        scale = self.options.get("softmax_scale")
        return self.q.shape[-1] ** -0.5 if scale is None else float(scale)

    def sequences(self) -> Iterator[Sequence]:
        """The sequences, their keys cut at the live length: what lies behind takes no part in the truth."""
        used = self.options.get("seqused_k")
        live_of = None if used is None else used.tolist()
        if self.cu_seqlens is None:
            start = self.options.get("query_start")
            starts = start.tolist() if isinstance(start, torch.Tensor) else [start or 0] * self.q.shape[0]
            for b in range(self.q.shape[0]):
                live = self.k.shape[2] if live_of is None else live_of[b]
                yield Sequence(self.q[b], self.k[b, :, :live], self.v[b, :, :live], starts[b], b, slice(None))
            return
        bounds_q, bounds_k = (each.tolist() for each in self.cu_seqlens)
        start = self.options.get("query_starts")
        for b in range(len(bounds_q) - 1):
            rows = slice(bounds_q[b], bounds_q[b + 1])
            live = bounds_k[b + 1] - bounds_k[b] if live_of is None else live_of[b]
            q = self.q[rows].transpose(0, 1)
            k, v = (t[bounds_k[b] : bounds_k[b] + live].transpose(0, 1) for t in (self.k, self.v))
            if isinstance(start, str):
                first = live - q.shape[1]
            else:
                first = 0 if start is None else int(start[b])
            yield Sequence(q, k, v, first, b, rows)

    def _place(self, t: torch.Tensor, sequence: Sequence, value: torch.Tensor) -> None:
        if self.cu_seqlens is None:
            t[sequence.batch] = value
        else:
            t[sequence.rows] = value.transpose(0, 1)

    def masks(self) -> Iterator[tuple[Sequence, torch.Tensor]]:
        causal, window = bool(self.options.get("causal")), self.options.get("window_size")
        for sequence in self.sequences():
            yield sequence, sequence.visible(causal, window)

    def truth(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Result and lse in FP64; rows of no sequence 0 and -inf."""
        out = torch.zeros(self.q.shape, dtype=torch.float64, device=self.q.device)
        lse = torch.full((*self.q.shape[:-1], 1), -torch.inf, dtype=torch.float64, device=self.q.device)
        for sequence, mask in self.masks():
            found, its_lse = attend64(
                sequence.q, sequence.k, sequence.v, mask, self.scale, self.options.get("softcap", 0.0)
            )
            self._place(out, sequence, found)
            self._place(lse, sequence, its_lse.unsqueeze(-1))
        return out, lse[..., 0] if self.cu_seqlens is None else lse[..., 0].t()

    def honest(self, truth: torch.Tensor) -> torch.Tensor:
        """Of the honest compositions, in each element the one that is farthest from the truth."""
        worst = torch.zeros(self.q.shape, dtype=self.q.dtype, device=self.q.device)
        with honest_math():
            for sequence, mask in self.masks():
                softcap = self.options.get("softcap", 0.0)
                found = torch.stack(_honest(sequence.q, sequence.k, sequence.v, mask, self.scale, softcap))
                if self.cu_seqlens is None:
                    right = truth[sequence.batch]
                else:
                    right = truth[sequence.rows].transpose(0, 1)
                far = (found.double() - right).abs().argmax(0, keepdim=True)
                self._place(worst, sequence, found.gather(0, far)[0])
        return worst

    def lse_limit(self) -> torch.Tensor:
        """How far the FP32 logarithm may be from the truth, of the shape of `truth()[1]`.

        Two roundings of each of the D products and sums of a logit, 2^-20 of the sum of exponentials and of a softcap,
        and the rounding of the result.
        """
        limit = torch.zeros((*self.q.shape[:-1], 1), dtype=torch.float64, device=self.q.device)
        for sequence, mask in self.masks():
            group = sequence.q.shape[0] // sequence.k.shape[0]
            largest = sequence.q.double().abs() @ sequence.k.double().abs().repeat_interleave(group, 0).mT
            largest = (largest * mask).amax(-1) if mask.shape[1] else largest.sum(-1)
            its = self.scale * 2 * self.q.shape[-1] * 2.0**-24 * largest
            its = its + 2.0**-20 * (1 + float(self.options.get("softcap", 0.0))) + 2.0**-23 * self.scale * largest
            self._place(limit, sequence, its.unsqueeze(-1) + 1e-6)
        return limit[..., 0] if self.cu_seqlens is None else limit[..., 0].t()


def check(
    call: Call,
    backend: str = "auto",
    *,
    truth: tuple[torch.Tensor, torch.Tensor] | None = None,
    out: dict[str, Any] | None = None,
) -> torch.Tensor:
    """Runs a call between guard bands and compares every element with the definition, lse included.

    Rows of no sequence are not looked at. `out`: how the output is laid out, for `guarded_empty`.
    """
    right, right_lse = call.truth() if truth is None else truth
    covered = True if call.cu_seqlens is None else int(call.cu_seqlens[0][-1]) == call.q.shape[0]
    guarded = guarded_empty(call.q.shape, call.q.dtype, str(call.q.device), name=str(call), **(out or {}))
    _, lse = call.run(backend, out=guarded.tensor, return_lse=True)
    guarded.check(written=covered)
    rows = slice(None) if covered or call.cu_seqlens is None else slice(0, int(call.cu_seqlens[0][-1]))
    name = f"{call} by {backend}"
    assert_close_to(guarded.tensor[rows], right[rows], call.honest(right)[rows], name, dtype=call.q.dtype)
    its_rows = slice(None) if call.cu_seqlens is None else rows
    found, wanted, limit = (t[..., its_rows] for t in (lse, right_lse, call.lse_limit()))
    assert found.dtype == torch.float32
    assert found.shape == wanted.shape
    wrong = torch.where(torch.isinf(wanted), found.double() != wanted, ~((found.double() - wanted).abs() <= limit))
    if wrong.any():
        at = tuple(int(i) for i in wrong.nonzero()[0])
        raise AssertionError(f"{name}: lse{list(at)} is {float(found[at])}, {float(wanted[at])} is right")
    empty = right_lse == -torch.inf
    if call.cu_seqlens is not None:
        empty = empty.t()
    nothing = guarded.tensor[rows][empty[rows]]
    assert (nothing == 0).all(), f"{name}: a row without keys is not 0"
    return guarded.tensor


def dense(
    batch: int,
    heads: tuple[int, int],
    seqlen_q: int,
    seqlen_k: int,
    head_dim: int,
    dtype: torch.dtype = torch.float16,
    *,
    seed: int = 0,
    device: str = "cpu",
    **options: Any,
) -> Call:
    """Normally distributed operands."""
    source = generator(seed, device)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=source, device=device).to(dtype)

    k, v = (normal(batch, heads[1], seqlen_k, head_dim) for _ in range(2))
    return Call(normal(batch, heads[0], seqlen_q, head_dim), k, v, options)


def packed(
    lengths_q: list[int],
    lengths_k: list[int] | None,
    heads: tuple[int, int],
    head_dim: int,
    dtype: torch.dtype = torch.float16,
    *,
    behind: int = 0,
    seed: int = 0,
    device: str = "cpu",
    **options: Any,
) -> Call:
    """Normally distributed operands. No `lengths_k`: those of the queries, in the same tensor; `behind`: rows of q, k
    and v behind the last sequence.
    """
    source = generator(seed, device)

    def normal(rows: int, count: int) -> torch.Tensor:
        return torch.randn(rows + behind, count, head_dim, generator=source, device=device).to(dtype)

    def bounds(lengths: list[int]) -> torch.Tensor:
        return torch.tensor([0, *lengths], dtype=torch.int32, device=device).cumsum(0, dtype=torch.int32)

    cu_q = bounds(lengths_q)
    cu_k = cu_q if lengths_k is None else bounds(lengths_k)
    lengths_k = lengths_q if lengths_k is None else lengths_k
    options = {
        "max_seqlen_q": max(lengths_q, default=0),
        "max_seqlen_k": max(lengths_k, default=0),
        **options,
    }
    k, v = (normal(sum(lengths_k), heads[1]) for _ in range(2))
    return Call(normal(sum(lengths_q), heads[0]), k, v, options, (cu_q, cu_k))


def poison(call: Call, value: float = float("nan")) -> Call:
    """The same call with `value` in every key and value behind the live ones."""
    used = call.options["seqused_k"].tolist()
    k, v = call.k.clone(), call.v.clone()
    for b, live in enumerate(used):
        for t in (k, v):
            if call.cu_seqlens is None:
                t[b, :, live:] = value
            else:
                begin, end = call.cu_seqlens[1][b : b + 2].tolist()
                t[begin + live : end] = value
    if call.cu_seqlens is not None:
        for t in (k, v):
            t[int(call.cu_seqlens[1][-1]) :] = value
    return call.with_(k=k, v=v)


LAYOUTS = ("contiguous", "rows outside of heads", "slices of one tensor", "spread rows", "reversed axes")


def with_layout(t: torch.Tensor, layout: str) -> torch.Tensor:
    """The values of t [B, H, S, D] or [S, H, D] laid out otherwise; "reversed axes" has no contiguous last one."""
    if layout == "rows outside of heads":
        return t.transpose(-3, -2).contiguous().transpose(-3, -2)
    if layout == "slices of one tensor":
        wide = torch.full((*t.shape[:-1], 3 * t.shape[-1]), float("nan"), dtype=t.dtype, device=t.device)
        wide[..., t.shape[-1] : 2 * t.shape[-1]] = t
        return wide[..., t.shape[-1] : 2 * t.shape[-1]]
    if layout == "spread rows":
        wide = torch.full((*t.shape[:-1], t.shape[-1] + 1), float("nan"), dtype=t.dtype, device=t.device)
        wide[..., : t.shape[-1]] = t
        return wide[..., : t.shape[-1]]
    if layout == "reversed axes":
        return t.permute(*reversed(range(t.dim()))).contiguous().permute(*reversed(range(t.dim())))
    return t


def random_call(
    number: int,
    *,
    device: str = "cpu",
    head_dims: tuple[int, ...] = (1, 8, 16, 40, 64, 80, 128, 256),
    longest: int = 48,
) -> Call:
    """The configuration of a number: every option, small sizes, edges often."""
    pick = random.Random(number)

    def length(least: int = 0) -> int:
        return pick.choice([least, 1, 2, 3, pick.randint(1, longest), pick.randint(1, longest), longest])

    kv = pick.choice([1, 1, 2, 3])
    heads = (kv * pick.choice([1, 1, 2, 3, 4, 5, 7, 8]), kv)
    common: dict[str, Any] = {
        "dtype": pick.choice(DTYPES),
        "seed": number,
        "device": device,
        "causal": pick.random() < 0.6,
        "softmax_scale": pick.choice([None, None, 0.05, 1.0, 3.0]),
        "window_size": pick.choice([None, None, 1, 2, pick.randint(1, longest), 2 * longest]),
        "softcap": pick.choice([0.0, 0.0, 1.0, 30.0]),
    }
    head_dim = pick.choice(head_dims)
    used = pick.random() < 0.4
    if pick.random() < 0.5:
        batch, seqlen_q, seqlen_k = pick.choice([0, 1, 1, 2, 3]), length(), length()
        if pick.random() < 0.3:
            seqlen_k = seqlen_q
        start = pick.choice(["none", "suffix", "int", "tensor"])
        if start == "suffix":
            common["query_start"] = seqlen_k - seqlen_q
        elif start == "int" or (start == "none" and seqlen_q != seqlen_k):
            common["query_start"] = pick.randint(-longest, longest)
        elif start == "tensor":
            starts = [pick.randint(-longest, longest) for _ in range(batch)]
            common["query_start"] = int32(*starts, device=device)
        if used:
            lives = [pick.choice([0, seqlen_k, pick.randint(0, seqlen_k)]) for _ in range(batch)]
            common["seqused_k"] = int32(*lives, device=device)
        call = dense(batch, heads, seqlen_q, seqlen_k, head_dim, **common)
    else:
        batch = pick.choice([0, 1, 2, 4])
        lengths_q = [length() for _ in range(batch)]
        lengths_k: list[int] | None = [length() for _ in range(batch)]
        start = pick.choice(["none", "suffix", "suffix", "tensor"])
        if start == "none":
            lengths_k = None
        elif start == "suffix":
            common["query_starts"] = "suffix"
        else:
            starts = [pick.randint(-longest, longest) for _ in range(batch)]
            common["query_starts"] = int32(*starts, device=device)
        if used:
            lives = [pick.choice([0, n, pick.randint(0, n)]) for n in lengths_k or lengths_q]
            common["seqused_k"] = int32(*lives, device=device)
        if pick.random() < 0.2:
            common["max_seqlen_k"] = max(lengths_k or lengths_q, default=0) + pick.randint(0, 100)
        call = packed(lengths_q, lengths_k, heads, head_dim, behind=pick.choice([0, 0, 3]), **common)
    if used:
        call = poison(call, pick.choice([float("nan"), float("inf")]))
    layouts = [pick.choice(LAYOUTS) for _ in range(3)]
    return call.with_(**{name: with_layout(getattr(call, name), its) for name, its in zip("qkv", layouts, strict=True)})


def raw(call: Call, code: int = 0) -> tuple[Any, ...]:
    """The arguments of the operator behind a call."""
    o = call.options
    rest = (o.get("window_size"), o.get("softcap", 0.0), o.get("seqused_k"), code)
    if call.cu_seqlens is None:
        start = o.get("query_start")
        start, starts = (None, start) if isinstance(start, torch.Tensor) else (start, None)
        return (*call.positional, o.get("causal", False), o.get("softmax_scale"), start, starts, *rest)
    starts = o.get("query_starts")
    tensor, suffix = (None, True) if isinstance(starts, str) else (starts, False)
    longest = (o["max_seqlen_q"], o["max_seqlen_k"])
    return (*call.positional, *longest, o.get("causal", False), o.get("softmax_scale"), tensor, suffix, *rest)


def same_bits(one: Any, other: Any, name: str) -> None:
    """Two results, with or without lse, are the same bits."""
    for mine, theirs in zip(*((each if isinstance(each, tuple) else (each,)) for each in (one, other)), strict=True):
        assert_bit_equal(mine, theirs, name)

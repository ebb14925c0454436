"""Weights of a layer for everybody who computes it, and the calls of vLLM's kernels: Marlin and Machete.

The layouts, as facts of those kernels. Codes are made by their own operators from what the format here has anyway:
the transposed qweight is GPTQ's order for `gptq_marlin_repack` and the column-major operand of `machete_prepack_B`.

    Machete  scales [K/G, N] as they are
    Marlin   scales [K/G, N], and of every 64 columns the square of 8 by 8 transposed: place 8 i + j has column i + 8 j
             zeros  [K/G, N/8] int32: columns as those of the scales, then of every 8 the order 0 2 4 6 1 3 5 7, low
             nibble first

Symmetric weights are codes less 8 (vLLM's `uint4b8`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from dandan_w4a16 import reference

INTERLEAVED = (0, 2, 4, 6, 1, 3, 5, 7)
MIDDLE = 8  # the zero of symmetric weights
LOCKS = 4 * 132  # int32 words in which blocks of Marlin wait for each other: 4 a multiprocessor of an H200
# A peer's result may differ from FP64 by this share (root mean square). Rounding to bfloat16 takes 0.002; a weight
# that is not where the peer looks for it gives 1.4.
PEER_LIMIT = 0.01

Call = Callable[[], Any]


@dataclass
class Canonical:
    """A weight as the format has it."""

    qweight: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor
    group: int

    def tensors(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return self.qweight, self.scales, self.zeros


def random_codes(shape: Sequence[int], device: torch.device | str) -> torch.Tensor:
    """int32 words of random bits."""
    return torch.randint(-(2**31), 2**31, tuple(shape), dtype=torch.int32, device=device)


def random_weight(
    n: int, k: int, group: int, dtype: torch.dtype, *, symmetric: bool = False, device: torch.device | str = "cuda"
) -> Canonical:
    """Every code and zero equally likely, scales that give the weight the variance 1/k."""
    groups = (n, k // group)
    if symmetric:
        zeros = torch.full(groups, MIDDLE, dtype=torch.uint8, device=device)
    else:
        zeros = torch.randint(16, groups, dtype=torch.uint8, device=device)
    steps = 21.5 if symmetric else 42.5  # mean square of q - z
    spread = torch.rand(groups, device=device) + 0.5  # mean square 13/12
    scales = spread * (k * steps * 13 / 12) ** -0.5
    return Canonical(random_codes((n, k // 8), device), scales.to(dtype), zeros, group)


def marlin_columns(grouped: torch.Tensor) -> torch.Tensor:
    """[N, K/G] to [K/G, N] in Marlin's order of columns."""
    rows = grouped.t()
    return rows.reshape(rows.shape[0], -1, 8, 8).transpose(2, 3).reshape(rows.shape)


def marlin_zeros(zeros: torch.Tensor) -> torch.Tensor:
    """[N, K/G] uint8 to Marlin's [K/G, N/8] int32."""
    columns = marlin_columns(zeros)
    mixed = columns.reshape(columns.shape[0], -1, 8)[:, :, list(INTERLEAVED)].reshape(columns.shape)
    return reference.pack(mixed)


@dataclass
class Vllm:
    """The operators, and the numbers of the two types of weight."""

    ops: Any
    uint4b8: int
    uint4: int


@dataclass
class Stored:
    """One of a peer's rotating weights."""

    codes: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor | None


@dataclass
class PeerWeights:
    """A peer's weights of a layer, as many as rotate. `canonical` is the first of them, for the check."""

    name: str
    canonical: Canonical
    stored: list[Stored]
    call: Callable[[torch.Tensor, Stored, torch.Tensor], torch.Tensor]  # x, weight, out
    takes_out: bool  # contiguous; else the result is allocated
    problem: str | None = None
    checked: bool = False

    def make(self, i: int, x: torch.Tensor, out: torch.Tensor) -> Call:
        stored = self.stored[i % len(self.stored)]
        return lambda: self.call(x, stored, out)

    def check(self, x: torch.Tensor, out: torch.Tensor) -> None:
        """Raises AssertionError where the peer does not compute its first weight. It is run once."""
        if not self.checked:
            self.checked = True
            self.problem = wrong(self.call(x, self.stored[0], out), x, self.canonical)
        if self.problem is not None:
            raise AssertionError(f"{self.name}: {self.problem}")


def wrong(result: torch.Tensor, x: torch.Tensor, weight: Canonical) -> str | None:
    """What is wrong with a peer's result, or None."""
    wanted = (x.shape[0], weight.qweight.shape[0])
    if tuple(result.shape) != wanted:
        return f"its result has the shape {tuple(result.shape)}, not {wanted}"
    some = slice(0, 32)
    found = result[some].to(torch.float64)
    if not bool(torch.isfinite(found).all()):
        return "its result is not finite"
    exact = reference.w4a16_linear(x[some], *weight.tensors(), None, weight.group, compute_dtype=torch.float64)
    share = relative_error(found, exact)
    return None if share <= PEER_LIMIT else f"its result is {share:.3g} away from FP64, more than {PEER_LIMIT}"


def relative_error(found: torch.Tensor, exact: torch.Tensor) -> float:
    """Root mean square of the difference over that of the exact values."""
    wide = exact.to(torch.float64)
    return float((found.to(torch.float64) - wide).norm() / wide.norm())


def rotating(first: Stored, count: int) -> list[Stored]:
    """`first` and as many more as make `count`, their codes random bits, all of which are valid."""

    def another() -> Stored:
        codes = torch.empty_like(first.codes).random_(-(2**31), 2**31 - 1)
        return Stored(codes, first.scales.clone(), None if first.zeros is None else first.zeros.clone())

    return [first, *(another() for _ in range(count - 1))]


def marlin(
    vllm: Vllm, n: int, k: int, group: int, dtype: torch.dtype, *, symmetric: bool, count: int, name: str
) -> PeerWeights:
    weight = random_weight(n, k, group, dtype, symmetric=symmetric)
    codes = vllm.ops.gptq_marlin_repack(weight.qweight.t().contiguous(), k, n, 4, False)
    first = Stored(codes, marlin_columns(weight.scales), None if symmetric else marlin_zeros(weight.zeros))
    locks = torch.zeros(LOCKS, dtype=torch.int32, device="cuda")
    kind = vllm.uint4b8 if symmetric else vllm.uint4

    def call(x: torch.Tensor, w: Stored, out: torch.Tensor) -> torch.Tensor:
        # no atomic additions, FP32 between blocks, zeros are integers
        sizes = (x.shape[0], n, k)
        result: torch.Tensor = vllm.ops.marlin_gemm(
            x, out, w.codes, None, w.scales, None, None, w.zeros, locks, kind, *sizes, False, True, False
        )
        return result

    return PeerWeights(name, weight, rotating(first, count), call, takes_out=True)


def machete(vllm: Vllm, n: int, k: int, group: int, dtype: torch.dtype, *, count: int, name: str) -> PeerWeights:
    weight = random_weight(n, k, group, dtype, symmetric=True)
    codes = vllm.ops.machete_prepack_B(weight.qweight.t(), dtype, vllm.uint4b8, dtype)
    first = Stored(codes, weight.scales.t().contiguous(), None)

    def call(x: torch.Tensor, w: Stored, _: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = vllm.ops.machete_mm(
            x, w.codes, vllm.uint4b8, None, w.scales, None, group, None, None, None
        )
        return result

    return PeerWeights(name, weight, rotating(first, count), call, takes_out=False)


def peer_weights(
    vllm: Vllm, n: int, k: int, dtype: torch.dtype, count: int
) -> tuple[list[PeerWeights], dict[str, str]]:
    """Every peer's weights of a layer, and the reason of those that could not be made."""
    makers: dict[str, Callable[[str], PeerWeights]] = {
        "marlin g128": lambda name: marlin(vllm, n, k, 128, dtype, symmetric=True, count=count, name=name),
        "marlin g64 affine": lambda name: marlin(vllm, n, k, 64, dtype, symmetric=False, count=count, name=name),
        "machete g128": lambda name: machete(vllm, n, k, 128, dtype, count=count, name=name),
    }
    made, failed = [], {}
    for name, maker in makers.items():
        try:
            made.append(maker(name))
        except Exception as error:  # a peer that does not take a layer is a finding about the peer
            failed[name] = " ".join(f"{type(error).__name__}: {error}".split())[:300]
    return made, failed

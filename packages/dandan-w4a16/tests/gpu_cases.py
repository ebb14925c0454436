"""Layers with known results on the GPU, and how the GPU tests run one configuration of one kernel on them.

Most tests multiply small whole numbers: then every partial sum is exact in FP32, so there is one right result whatever
the tile, the slices of K and the order of additions, and it is compared bit by bit.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from dandan_ops_core.testing import assert_bit_equal, assert_close_to, guarded_empty
from dandan_w4a16._ops import KERNELS, LIBRARY
from dandan_w4a16.packed import candidates, packed_linear, run_tile

DTYPES = (torch.float16, torch.bfloat16)
GROUPS = (32, 64, 128)
# Around a fragment, a half of the rows of decode, a warp group's columns, and the tiles.
EDGES = (1, 7, 8, 9, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129, 255, 256, 257)
# K: shorter than a block of 64, no multiple of one, a short last group, as many blocks as slices and more.
DEPTHS = (8, 24, 64, 72, 96, 128, 136, 192, 264, 320, 520)

EVERY_KERNEL = pytest.mark.parametrize("kernel", KERNELS)
WITH_BIAS = tuple(kernel for kernel in KERNELS if kernel != "sm80_dequantize")
"""Torch's product, which follows that one, may round before it adds a bias: the kernel takes none."""
EVERY_KERNEL_WITH_BIAS = pytest.mark.parametrize("kernel", WITH_BIAS)
EVERY_DTYPE = pytest.mark.parametrize("dtype", DTYPES, ids=str)
EVERY_GROUP = pytest.mark.parametrize("group", GROUPS)


@dataclass(frozen=True)
class Layer:
    """A weight [n, k] in both orders, and as the numbers that the rule makes of it; perhaps a bias."""

    qweight: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor
    group: int
    codes: torch.Tensor
    pairs: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor | None

    @property
    def n(self) -> int:
        return self.weight.shape[0]

    @property
    def k(self) -> int:
        return self.weight.shape[1]

    @property
    def canonical(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return self.qweight, self.scales, self.zeros

    def inputs(self, x: torch.Tensor) -> tuple[Any, ...]:
        """Arguments of packed_linear."""
        return x, self.codes, self.pairs, self.bias, self.n, self.k, self.group

    def with_(self, **changes: Any) -> Layer:
        return dataclasses.replace(self, **changes)

    def exact(self, x: torch.Tensor) -> torch.Tensor:
        """The result in FP64."""
        result = x.double() @ self.weight.double().t()
        return result if self.bias is None else result + self.bias.double()

    def honest(self, x: torch.Tensor) -> torch.Tensor:
        """The result of FP32 arithmetic and one rounding; products of 16-bit numbers are exact in FP32."""
        result = torch.mm(x.flatten(0, -2), self.weight.t(), out_dtype=torch.float32).view(*x.shape[:-1], self.n)
        return (result if self.bias is None else result + self.bias.float()).to(x.dtype)

    def __str__(self) -> str:
        return f"[{self.n}, {self.k}] group {self.group} {self.scales.dtype}{'' if self.bias is None else ' bias'}"


def random(seed: int) -> torch.Generator:
    return torch.Generator("cuda").manual_seed(seed)


def _words(codes: torch.Tensor) -> torch.Tensor:
    wide = codes.to(torch.int64).view(codes.shape[0], codes.shape[1] // 8, 8)
    words = (wide << (4 * torch.arange(8, device="cuda"))).sum(-1)
    return torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)


def layer(
    n: int,
    k: int,
    group: int = 64,
    dtype: torch.dtype = torch.float16,
    *,
    bias: bool = False,
    whole: bool = True,
    seed: int = 0,
) -> Layer:
    """Codes and zeros of the whole range. `whole`: scales of 1, -1 and 2 and halves in the bias, so that sums of whole
    x are exact; else scales as a model has them. K is any multiple of 8.
    """
    source = random(seed)
    groups = (n, -(-k // group))
    codes = torch.randint(0, 16, (n, k), generator=source, device="cuda")
    zeros = torch.randint(0, 16, groups, generator=source, device="cuda")
    if whole:
        scales = torch.tensor([1.0, -1.0, 2.0], device="cuda")[
            torch.randint(0, 3, groups, generator=source, device="cuda")
        ]
        vector = torch.randint(-8, 9, (n,), generator=source, device="cuda") / 2
    else:
        scales = torch.randn(groups, generator=source, device="cuda") * k**-0.5 / 4
        vector = torch.randn(n, generator=source, device="cuda")
    scales, vector = scales.to(dtype), vector.to(dtype)
    s, z = (t.float().repeat_interleave(group, 1)[:, :k] for t in (scales, zeros))
    weight = ((codes.float() - z) * s).to(dtype)
    qweight, byte_zeros = _words(codes), zeros.to(torch.uint8)
    ordered = LIBRARY.op("repack")(qweight, scales, byte_zeros, group)
    return Layer(qweight, scales, byte_zeros, group, *ordered, weight, vector if bias else None)


def whole_x(m: int, k: int, dtype: torch.dtype = torch.float16, seed: int = 0) -> torch.Tensor:
    """From -2 to 2."""
    return torch.randint(-2, 3, (m, k), generator=random(seed + 1000), device="cuda").to(dtype)


def random_x(m: int, k: int, dtype: torch.dtype = torch.float16, seed: int = 0) -> torch.Tensor:
    return torch.randn(m, k, generator=random(seed + 2000), device="cuda").to(dtype)


# ------------------------------------------------------------------------------------------------------------------
# Kernels and their configurations


@dataclass(frozen=True)
class Tile:
    """One configuration of one kernel and the number of slices of K."""

    kernel: str
    name: str
    number: int
    split: int

    def __str__(self) -> str:
        return f"{self.kernel} {self.name} split {self.split}"


def configurations(kernel: str) -> list[dict[str, Any]]:
    """Name, tile and splits of each configuration of a kernel."""
    found: list[dict[str, Any]] = LIBRARY.describe()["configs"][kernel]
    return found


def tiles(made: Layer, x: torch.Tensor, kernel: str | None = None) -> list[Tile]:
    """What the library says can run a call: every configuration and split, of one kernel or of all."""
    found = candidates(*made.inputs(x))["candidates"]
    return [
        Tile(each["kernel"], each["config"], each["number"], each["split"])
        for each in found
        if kernel in (None, each["kernel"])
    ]


def widest_splits(made: Layer, x: torch.Tensor, kernel: str) -> list[Tile]:
    """Each configuration of a kernel without slices of K and with as many as it takes."""
    found: dict[int, list[Tile]] = {}
    for tile in sorted(tiles(made, x, kernel), key=lambda each: each.split):
        found.setdefault(tile.number, []).append(tile)
    return [tile for group in found.values() for tile in dict.fromkeys((group[0], group[-1]))]


def most_rows(kernel: str) -> int | None:
    """The most rows that a kernel takes, or None where there is no limit: asked of the library."""
    few, many = (candidates(*_sheet(m))["obstacles"].get(kernel) for m in (1, 1 << 20))
    if few is not None:
        pytest.skip(f"{kernel}: {few}")
    if many is None:
        return None
    return max(m for m in (1, 8, 16, 32, 64, 128) if kernel not in candidates(*_sheet(m))["obstacles"])


def _sheet(m: int) -> tuple[Any, ...]:
    """A call that takes no memory but for one row."""
    x = torch.empty(1, 64, dtype=torch.float16, device="cuda").expand(m, 64)
    codes = torch.empty(512, dtype=torch.int32, device="cuda")
    return x, codes, torch.empty(128, dtype=torch.float16, device="cuda"), None, 64, 64, 64


# ------------------------------------------------------------------------------------------------------------------
# Running and comparing


def by_tile(made: Layer, x: torch.Tensor, tile: Tile, out: torch.Tensor | None = None) -> torch.Tensor:
    return run_tile(*made.inputs(x), kernel=tile.kernel, config=tile.number, split=tile.split, out=out)


def run(made: Layer, x: torch.Tensor, how: str | Tile, **layout: Any) -> torch.Tensor:
    """The product by a backend or a tile, written between poisoned guard bands that are checked afterwards."""
    shape, name = (*x.shape[:-1], made.n), f"{list(x.shape)} x {made} by {how}"
    with guarded_empty(shape, x.dtype, "cuda", name=name, **layout) as out:
        if isinstance(how, Tile):
            by_tile(made, x, how, out.tensor)
        else:
            packed_linear(*made.inputs(x), out=out.tensor, backend=how)
    return out.tensor


def assert_exact(actual: torch.Tensor, exact: torch.Tensor, name: str) -> None:
    """The bits of the exact result rounded once; zeros of either sign are the same."""
    assert_bit_equal(actual + 0.0, exact.to(actual.dtype) + 0.0, name)


def check_exact(
    made: Layer, x: torch.Tensor, how: str | Tile, exact: torch.Tensor | None = None, **layout: Any
) -> torch.Tensor:
    """Runs a product of whole numbers and compares every bit."""
    actual = run(made, x, how, **layout)
    assert_exact(actual, made.exact(x) if exact is None else exact, f"{list(x.shape)} x {made} by {how}")
    return actual


def check_close(made: Layer, x: torch.Tensor, how: str | Tile) -> None:
    """Runs any product and compares within the bound of dandan_ops_core.testing."""
    assert_close_to(run(made, x, how), made.exact(x), made.honest(x), f"{list(x.shape)} x {made} by {how}")

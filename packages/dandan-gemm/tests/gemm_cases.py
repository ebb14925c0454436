"""Products with known results, and how the GPU tests run one configuration of one kernel on them.

Most tests multiply small whole numbers: then every partial sum is exact in FP32, so there is one right result whatever
the tile, the slices of K and the order of additions, and it is compared bit by bit.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import pytest
import torch

import dandan_gemm
from dandan_gemm import reference
from dandan_gemm._ops import KERNELS, LIBRARY, candidates, run_tile
from dandan_ops_core.testing import assert_bit_equal, assert_close_to, guarded_empty, honest_math, rows_strided

__all__ = [
    "DTYPES",
    "EDGES",
    "EVERY_KERNEL_AND_LAYOUT",
    "KERNELS",
    "MOST_SKINNY_ROWS",
    "Product",
    "Tile",
    "assert_exact",
    "check_close",
    "check_exact",
    "configurations",
    "layouts",
    "random_product",
    "reads_rows_along_k",
    "run",
    "spread",
    "tiles",
    "whole_product",
]

DTYPES = [torch.float16, torch.bfloat16]
# Around a vector, a fragment, a warp's part, and the tiles.
EDGES = [1, 7, 8, 9, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129, 255, 256, 257]
LARGEST = 4  # of the whole numbers
MOST_SKINNY_ROWS = 16


def layouts(kernel: str) -> tuple[bool, ...]:
    """Values of `weight_transposed` that a kernel takes: skinny reads no weight of [K, N]."""
    return (True,) if kernel == "skinny" else (True, False)


EVERY_KERNEL_AND_LAYOUT = pytest.mark.parametrize(
    ("kernel", "weight_transposed"),
    [
        pytest.param(kernel, transposed, id=f"{kernel}-{'[N,K]' if transposed else '[K,N]'}")
        for kernel in KERNELS
        for transposed in layouts(kernel)
    ],
)


@dataclass(frozen=True)
class Product:
    """The operands of one call on the GPU."""

    a: torch.Tensor
    b: torch.Tensor
    bias: torch.Tensor | None = None
    weight_transposed: bool = True

    @property
    def m(self) -> int:
        return self.a.shape[:-1].numel()

    @property
    def n(self) -> int:
        return self.b.shape[0 if self.weight_transposed else 1]

    @property
    def k(self) -> int:
        return self.a.shape[-1]

    @property
    def keywords(self) -> dict[str, Any]:
        return {"weight_transposed": self.weight_transposed, "bias": self.bias}

    def __str__(self) -> str:
        layout = "[N, K]" if self.weight_transposed else "[K, N]"
        bias = "" if self.bias is None else ", bias"
        return f"{self.m}x{self.n}x{self.k} {self.a.dtype} {layout}{bias}"

    def with_(self, **changes: Any) -> Product:
        """The same product with other views of its operands."""
        return dataclasses.replace(self, **changes)

    def exact(self) -> torch.Tensor:
        """The result in FP64."""
        return reference.gemm(self.a, self.b, self.bias, self.weight_transposed, compute_dtype=torch.float64)

    def honest(self) -> torch.Tensor:
        """The result of FP32 arithmetic and one rounding."""
        with honest_math():
            return reference.gemm(self.a, self.b, self.bias, self.weight_transposed)


def whole_numbers(generator: torch.Generator, *shape: int) -> torch.Tensor:
    """From -LARGEST to LARGEST without 0, so that no product is a negative zero."""
    values = torch.randint(1, LARGEST + 1, shape, generator=generator, device="cuda")
    return values * (2 * torch.randint(0, 2, shape, generator=generator, device="cuda") - 1)


def spread(rows: torch.Tensor) -> torch.Tensor:
    """The same values with rows that start at multiples of 16 bytes, and poison behind each."""
    return rows_strided(rows, 8 + -rows.shape[-1] % 8)


def whole_product(
    m: int,
    n: int,
    k: int,
    dtype: torch.dtype,
    *,
    weight_transposed: bool = True,
    bias: bool = False,
    aligned: bool = True,
    seed: int = 0,
) -> Product:
    """Whole numbers in a and b, halves in the bias. `aligned`: rows start at multiples of 16 bytes, with poison between
    them; else they follow each other.
    """
    generator = torch.Generator("cuda").manual_seed(seed)
    a = whole_numbers(generator, m, k).to(dtype)
    b = whole_numbers(generator, *((n, k) if weight_transposed else (k, n))).to(dtype)
    vector = (whole_numbers(generator, n) / 2).to(dtype) if bias else None
    return Product(spread(a) if aligned else a, spread(b) if aligned else b, vector, weight_transposed)


def random_product(
    m: int, n: int, k: int, dtype: torch.dtype, *, weight_transposed: bool = True, bias: bool = False, seed: int = 0
) -> Product:
    """Normally distributed operands, contiguous; results of about 1, as in a model."""
    generator = torch.Generator("cuda").manual_seed(seed)

    def normal(*shape: int, scale: float = 1.0) -> torch.Tensor:
        return (torch.randn(shape, generator=generator, device="cuda") * scale).to(dtype)

    b = normal(*((n, k) if weight_transposed else (k, n)), scale=k**-0.5)
    return Product(normal(m, k), b, normal(n) if bias else None, weight_transposed)


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


def reads_rows_along_k(kernel: str, config: dict[str, Any]) -> bool:
    """Whether a configuration takes a weight of [K, N]: wgmma reads those in boxes of 64 columns."""
    return kernel != "skinny" and (kernel != "sm90a_wgmma" or config["tile_n"] % 64 == 0)


def tiles(product: Product, kernel: str | None = None, out: torch.Tensor | None = None) -> list[Tile]:
    """What the library says can run a product: every configuration and split, of one kernel or of all."""
    found = candidates(product.a, product.b, out=out, **product.keywords)["candidates"]
    return [
        Tile(each["kernel"], each["config"], each["number"], each["split"])
        for each in found
        if each["kernel"] == kernel or (kernel is None and each["kernel"] != "torch")
    ]


# ------------------------------------------------------------------------------------------------------------------
# Running and comparing


def run(product: Product, how: str | Tile, *, static_weight: bool = False, **layout: Any) -> torch.Tensor:
    """The product by a backend or a tile, written between poisoned guard bands that are checked afterwards.

    Where torch is taken it adds in FP32, as ours do: no FP16 or BF16 partial sums.
    """
    shape = (*product.a.shape[:-1], product.n)
    with honest_math(), guarded_empty(shape, product.a.dtype, "cuda", name=f"{product} by {how}", **layout) as out:
        keywords = {**product.keywords, "static_weight": static_weight, "out": out.tensor}
        if isinstance(how, Tile):
            run_tile(product.a, product.b, kernel=how.kernel, config=how.number, split=how.split, **keywords)
        else:
            dandan_gemm.gemm(product.a, product.b, backend=how, **keywords)
    return out.tensor


def assert_exact(actual: torch.Tensor, exact: torch.Tensor, name: str) -> None:
    """The bits of the exact result rounded once; zeros of either sign are the same."""
    assert_bit_equal(actual + 0.0, exact.to(actual.dtype) + 0.0, name)


def check_exact(product: Product, how: str | Tile, exact: torch.Tensor | None = None, **layout: Any) -> torch.Tensor:
    """Runs a product of whole numbers and compares every bit."""
    actual = run(product, how, **layout)
    assert_exact(actual, product.exact() if exact is None else exact, f"{product} by {how}")
    return actual


def check_close(product: Product, how: str | Tile, **layout: Any) -> torch.Tensor:
    """Runs any product and compares within the bound of dandan_ops_core.testing."""
    actual = run(product, how, **layout)
    assert_close_to(actual, product.exact(), product.honest(), f"{product} by {how}")
    return actual

"""Linear layers of public models, by the names that benchmarks and calibration use. Plain data, no torch.

The sizes are those of the models' public configurations (`config.json` on their model pages). A linear layer is (n, k):
`y = x W^T` with W of [n, k]. The projections of query, key and value are one layer, and so are gate and up.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from dandan_ops_core.records import Case

__all__ = [
    "CALIBRATED",
    "CALIBRATED_KN",
    "HALF_DTYPES",
    "INT4_LAYERS",
    "INT4_NAMES",
    "LAYERS",
    "MODELS",
    "TOKENS",
    "Model",
    "distinct_layers",
    "gemm_calibration_cases",
    "gemm_case",
    "int4_calibration_case",
    "int4_calibration_cases",
    "linear_layers",
]

LAYERS = ("qkv", "o", "gate_up", "down", "lm_head")


@dataclass(frozen=True)
class Model:
    """The sizes of a decoder that its linear layers depend on."""

    name: str
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocabulary: int


MODELS = {
    model.name: model
    for model in (
        Model("Qwen3-0.6B", 1024, 16, 8, 128, 3072, 151936),
        Model("Qwen3-4B", 2560, 32, 8, 128, 9728, 151936),
        Model("Qwen3-8B", 4096, 32, 8, 128, 12288, 151936),
        Model("Qwen3-32B", 5120, 64, 8, 128, 25600, 151936),
        Model("Llama-3-8B", 4096, 32, 8, 128, 14336, 128256),
        Model("Llama-3-70B", 8192, 64, 8, 128, 28672, 128256),
    )
}


def linear_layers(model: Model, ranks: int = 1) -> dict[str, tuple[int, int]]:
    """(n, k) of each layer on one of `ranks` GPUs under tensor parallelism.

    qkv, gate_up and lm_head are cut along n, o and down along k, as tensor-parallel engines do.

    Raises:
        ValueError: the ranks do not divide the heads, the key-value heads or a size.
    """
    divided = (model.heads, model.kv_heads, model.intermediate, model.vocabulary)
    if ranks < 1 or any(size % ranks for size in divided):
        raise ValueError(f"linear_layers: {model.name} cannot be cut for {ranks} GPUs: {divided} must be multiples")
    rows = model.heads * model.head_dim
    kv_rows = 2 * model.kv_heads * model.head_dim
    return {
        "qkv": ((rows + kv_rows) // ranks, model.hidden),
        "o": (model.hidden, rows // ranks),
        "gate_up": (2 * model.intermediate // ranks, model.hidden),
        "down": (model.hidden, model.intermediate // ranks),
        "lm_head": (model.vocabulary // ranks, model.hidden),
    }


def distinct_layers(models: Iterable[tuple[str, int]]) -> dict[tuple[int, int], str]:
    """Every (n, k) of the models once, with the names of the layers that have it.

    Args:
        models: pairs of a name in `MODELS` and a number of GPUs.

    Returns:
        Such as `{(6144, 4096): "Qwen3-8B qkv, Llama-3-8B qkv"}`, in the order of first appearance.
    """
    found: dict[tuple[int, int], list[str]] = {}
    for name, ranks in models:
        shown = name if ranks == 1 else f"{name} TP{ranks}"
        for layer, sizes in linear_layers(MODELS[name], ranks).items():
            found.setdefault(sizes, []).append(f"{shown} {layer}")
    return {sizes: ", ".join(names) for sizes, names in found.items()}


CALIBRATED = (*((name, 1) for name in MODELS), ("Llama-3-8B", 8), ("Llama-3-70B", 8))
"""The models and numbers of GPUs whose layers a shipped route table covers."""
CALIBRATED_KN = (("Qwen3-0.6B", 1), ("Qwen3-8B", 1))
"""The same for weights in the layout [K, N]."""

TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)
HALF_DTYPES = ("float16", "bfloat16")


def gemm_case(
    name: str,
    m: int,
    n: int,
    k: int,
    dtype: str,
    *,
    topic: str,
    variant: str = "auto",
    weight_transposed: bool = True,
) -> Case:
    """A product of [m, k] and a weight of n columns as a case. As in a route table, only a weight that is not in the
    layout of `torch.nn.Linear` has `weight_transposed` among the sizes of the shape.
    """
    shape = {"m": m, "n": n, "k": k}
    if not weight_transposed:
        shape["weight_transposed"] = 0
    return Case(topic, "gemm", name, shape, dtype, variant, bytes=2 * (m * k + n * k + m * n), flops=2 * m * n * k)


def gemm_calibration_cases() -> list[Case]:
    """What `dandan-ops calibrate --package dandan-gemm` measures unless it is given other shapes: the layout of
    `torch.nn.Linear`, then [K, N], few tokens first.
    """
    return [
        gemm_case(name, m, n, k, dtype, topic="calibration", variant="fastest", weight_transposed=transposed)
        for models, transposed in ((CALIBRATED, True), (CALIBRATED_KN, False))
        for m in TOKENS
        for (n, k), name in distinct_layers(models).items()
        for dtype in HALF_DTYPES
    ]


INT4_LAYERS = (
    (4096, 1024),
    (1024, 2048),
    (6144, 1024),
    (1024, 3072),
    (6144, 4096),
    (4096, 4096),
    (24576, 4096),
    (4096, 12288),
    (51200, 5120),
    (5120, 25600),
    (8192, 8192),
)
"""(n, k) of the layers that the record and the route table of products with INT4 weights hold."""
INT4_NAMES = distinct_layers((name, 1) for name in ("Qwen3-0.6B", "Qwen3-8B", "Qwen3-32B", "Llama-3-70B"))


def int4_calibration_case(name: str, m: int, n: int, k: int, group_size: int, dtype: str) -> Case:
    """A product with an INT4 weight in the kernels' order as a case of the calibration: half a byte a code, two for the
    scale and two for the zero point of a group.
    """
    shape = {"m": m, "n": n, "k": k, "group_size": group_size}
    traffic = n * k // 2 + 4 * n * (k // group_size) + 2 * m * (k + n)
    return Case("calibration", "packed_linear", name, shape, dtype, "fastest", bytes=traffic, flops=2 * m * n * k)


def int4_calibration_cases() -> list[Case]:
    """What `dandan-ops calibrate --package dandan-w4a16` measures unless it is given other shapes: groups of 64."""
    return [
        int4_calibration_case(INT4_NAMES[n, k], m, n, k, 64, dtype)
        for m in TOKENS
        for n, k in INT4_LAYERS
        for dtype in HALF_DTYPES
    ]

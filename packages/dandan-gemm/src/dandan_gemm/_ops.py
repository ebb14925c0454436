"""torch.ops.dandan_gemm: schemas, CPU kernel, fakes; CUDA kernels where the compiled library is loaded."""

from __future__ import annotations

import json
from typing import Any

import torch

from dandan_gemm import checks, reference
from dandan_ops_core.registry import Operator, OperatorLibrary, named_error

KERNELS = ("sm80_mma", "sm90_tma_mma", "sm90a_wgmma", "skinny")
"""Own kernels in the order of their numbers; csrc/routes.h has the same."""

INPUTS = "Tensor a, Tensor b, Tensor? bias, bool weight_transposed, bool static_weight"

MEASURING = (
    f"gemm_tile_out({INPUTS}, int backend, int config, int split, Tensor(a!) out) -> ()",
    f"gemm_candidates({INPUTS}, Tensor? out, int arch) -> Tensor",
)
"""What the compiled library defines for tests, benchmarks and calibration."""


def _result(
    a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None, weight_transposed: bool, static_weight: bool
) -> torch.Tensor:
    return a.new_empty((*a.shape[:-1], b.shape[0 if weight_transposed else 1]))


LIBRARY = OperatorLibrary(
    "dandan_gemm", KERNELS, [Operator("gemm", INPUTS, ("out",), checks.gemm, reference.torch_gemm, _result, first="a")]
)


def candidates(
    a: torch.Tensor,
    b: torch.Tensor,
    *,
    weight_transposed: bool = False,
    bias: torch.Tensor | None = None,
    static_weight: bool = False,
    out: torch.Tensor | None = None,
    arch: int = 0,
) -> dict[str, Any]:
    """What the compiled library's cost model says of a call.

    Args:
        a: as in `gemm`, and so are the others.
        arch: such as 90, to ask for a device of that architecture instead of a's.

    Returns:
        "candidates": kernel, config, number (of the configuration), split (slices of K) and us (estimated) of each, the
        cheapest first, torch among them; "obstacles": for each kernel that cannot run, why; and the problem as the
        kernels see it.
    """
    try:
        raw = LIBRARY.op("gemm_candidates")(a, b, bias, weight_transposed, static_weight, out, arch)
    except RuntimeError as error:
        raise named_error(error) or error from None
    found: dict[str, Any] = json.loads(bytes(raw.tolist()).decode())
    return found


def run_tile(
    a: torch.Tensor,
    b: torch.Tensor,
    *,
    kernel: str,
    config: str | int,
    split: int = 1,
    weight_transposed: bool = False,
    bias: torch.Tensor | None = None,
    static_weight: bool = False,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """`gemm` on one configuration of one kernel, for tests and measurements; runs or raises like an explicit backend.

    Args:
        a: as in `gemm`, and so are the others.
        kernel: one of KERNELS.
        config: name or number of a configuration in `LIBRARY.describe()["configs"][kernel]`.
        split: slices of K.
    """
    number = config
    if isinstance(config, str):
        names = [each["name"] for each in LIBRARY.describe()["configs"][kernel]]
        if config not in names:
            raise ValueError(f"gemm: {kernel} has no configuration {config!r}; it is one of {', '.join(names)}")
        number = names.index(config)
    if out is None:
        out = _result(a, b, bias, weight_transposed, static_weight)
    try:
        LIBRARY.op("gemm_tile_out")(
            a, b, bias, weight_transposed, static_weight, LIBRARY.number("gemm", kernel), number, split, out
        )
    except RuntimeError as error:
        raise named_error(error) or error from None
    return out

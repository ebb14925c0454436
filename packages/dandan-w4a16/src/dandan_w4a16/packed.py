"""packed_linear: the product with a weight in the kernels' order, which a finalised `QuantizedLinear` calls."""

from __future__ import annotations

import json
from typing import Any

import torch

from dandan_ops_core.registry import named_error
from dandan_w4a16._ops import LIBRARY, packed_result

__all__ = ["candidates", "packed_linear", "run_tile"]

_CODES = LIBRARY.codes
_linear = LIBRARY.op("packed_linear")
_linear_out = LIBRARY.op("packed_linear_out")


def packed_linear(
    x: torch.Tensor,
    codes: torch.Tensor,
    scales: torch.Tensor,
    bias: torch.Tensor | None,
    n: int,
    k: int,
    group_size: int,
    *,
    out: torch.Tensor | None = None,
    backend: str = "auto",
) -> torch.Tensor:
    """`w4a16_linear` of a weight in the kernels' order.

    Kernels may read codes and scales while the work before them still runs: no work enqueued since the last
    synchronisation of the device may have written them.

    Args:
        x: [..., K], float16 or bfloat16, any strides.
        codes: as torch.ops.dandan_w4a16.repack makes it, and so are the scales; device of x.
        bias: [N] float16, bfloat16 or float32; device of x.
        n: N.
        k: K.
        group_size: G.
        out: as in `w4a16_linear`, and so is backend.

    Raises:
        TypeError: where `w4a16_linear` raises it.
        ValueError: where `w4a16_linear` raises it.
        BackendUnavailableError: where `w4a16_linear` raises it.
    """
    try:
        if torch.is_grad_enabled() and (
            x.requires_grad or (bias is not None and bias.requires_grad) or (out is not None and out.requires_grad)
        ):
            inputs = (x, codes, scales, bias, n, k, group_size)
            result: torch.Tensor = LIBRARY.run_reference("packed_linear", inputs, out, backend)
            return result
        if out is None:
            return _linear(x, codes, scales, bias, n, k, group_size, _CODES[backend])
        _linear_out(x, codes, scales, bias, n, k, group_size, _CODES[backend], out)
        return out
    except (AttributeError, LookupError, OverflowError, RuntimeError, TypeError) as error:
        inputs = (x, codes, scales, bias, n, k, group_size)
        raise LIBRARY.explain("packed_linear", error, inputs, out, backend) from None


def candidates(
    x: torch.Tensor,
    codes: torch.Tensor,
    scales: torch.Tensor,
    bias: torch.Tensor | None,
    n: int,
    k: int,
    group_size: int,
    *,
    out: torch.Tensor | None = None,
    arch: int = 0,
) -> dict[str, Any]:
    """What the compiled library's cost model says of a call.

    Args:
        x: as in `packed_linear`, and so are the others.
        arch: such as 90, to ask for a device of that architecture instead of x's.

    Returns:
        "candidates": kernel, config, number (of the configuration), split (slices of K) and us (estimated) of each, the
        cheapest first; "obstacles": for each kernel that cannot run, why; and the problem as the kernels see it.
    """
    try:
        raw = LIBRARY.op("packed_candidates")(x, codes, scales, bias, n, k, group_size, out, arch)
    except RuntimeError as error:
        raise named_error(error) or error from None
    found: dict[str, Any] = json.loads(bytes(raw.tolist()).decode())
    return found


def run_tile(
    x: torch.Tensor,
    codes: torch.Tensor,
    scales: torch.Tensor,
    bias: torch.Tensor | None,
    n: int,
    k: int,
    group_size: int,
    *,
    kernel: str,
    config: str | int,
    split: int = 1,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """`packed_linear` on one configuration of one kernel, for tests and measurements; runs or raises like an explicit
    backend.

    Args:
        x: as in `packed_linear`, and so are the others.
        kernel: one of KERNELS.
        config: name or number of a configuration in `LIBRARY.describe()["configs"][kernel]`.
        split: slices of K.
    """
    number = config
    if isinstance(config, str):
        names = [each["name"] for each in LIBRARY.describe()["configs"][kernel]]
        if config not in names:
            known = ", ".join(names)
            raise ValueError(f"packed_linear: {kernel} has no configuration {config!r}; it is one of {known}")
        number = names.index(config)
    inputs = (x, codes, scales, bias, n, k, group_size)
    if out is None:
        out = packed_result(*inputs)
    try:
        LIBRARY.op("packed_tile_out")(*inputs, LIBRARY.number("packed_linear", kernel), number, split, out)
    except RuntimeError as error:
        raise named_error(error) or error from None
    return out

"""Every kind of input that w4a16_linear refuses, with the exception and its whole text, made for a device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from dandan_ops_core.testing.bad_inputs import NEEDED, PYTHON, REAL, Case, Make, changed, dtype_of, other, tensor

# One tensor without a device of its own kind.
DEVICES = PYTHON - {"fake"}

M, N, K, G = 4, 24, 128, 64


def words(*shape: int) -> Make:
    return tensor(*shape, dtype=torch.int32)


def bytes_(*shape: int) -> Make:
    return tensor(*shape, dtype=torch.uint8)


def valid(device: str) -> dict[str, Any]:
    """Arguments that the operator takes."""
    return {
        "x": tensor(M, K)(device),
        "qweight": words(N, K // 8)(device),
        "scales": tensor(N, K // G)(device),
        "zeros": bytes_(N, K // G)(device),
        "group_size": G,
        "bias": tensor(N)(device),
    }


CASES: list[Case] = []


def refused(
    name: str,
    error: type[Exception],
    text: str,
    places: frozenset[str] = PYTHON,
    *,
    grad: bool = False,
    **changes: Any,
) -> None:
    """Adds a case: valid arguments with `changes` (values, or what makes them on a device)."""
    CASES.append(Case("w4a16_linear", name, changed(valid, changes), error, text, places, grad))


TENSORS = ("x", "qweight", "scales", "zeros", "bias", "out")
FLOATS = "float16, bfloat16 and float32 are supported"

# --------------------------------------------------------------------------------------------------- no strided tensors

for _name in TENSORS:
    for _value, _kind in (([[1.0]], "list"), (1.0, "float"), ("x", "str")):
        refused(f"{_name} is {_kind}", TypeError, f"{_name} is {_kind}; {NEEDED}", **{_name: _value})
    if _name not in ("bias", "out"):
        refused(f"{_name} missing", TypeError, f"{_name} is NoneType; {NEEDED}", **{_name: None})
    refused(
        f"{_name} sparse",
        TypeError,
        f"{_name} has layout sparse_coo; a strided tensor is needed",
        REAL,
        **{_name: lambda d: torch.eye(4, device=d).to_sparse()},
    )

# --------------------------------------------------------------------------------------------------------------- dtypes

for _dtype in (torch.float32, torch.float64, torch.int8, torch.uint8, torch.int32, torch.bool, torch.complex64,
               torch.float8_e4m3fn):  # fmt: skip
    _shown = dtype_of(_dtype)
    refused(
        f"x {_shown}",
        TypeError,
        f"x has dtype {_shown}; float16 and bfloat16 are supported",
        x=tensor(M, K, dtype=_dtype),
    )
for _dtype in (torch.int64, torch.uint8, torch.float16):
    _shown = dtype_of(_dtype)
    refused(
        f"qweight {_shown}",
        TypeError,
        f"qweight has dtype {_shown}; int32 is needed",
        qweight=tensor(N, K // 8, dtype=_dtype),
    )
for _dtype in (torch.float64, torch.int32, torch.uint8):
    _shown = dtype_of(_dtype)
    refused(
        f"scales {_shown}", TypeError, f"scales has dtype {_shown}; {FLOATS}", scales=tensor(N, K // G, dtype=_dtype)
    )
    refused(f"bias {_shown}", TypeError, f"bias has dtype {_shown}; {FLOATS}", bias=tensor(N, dtype=_dtype))
for _dtype in (torch.int8, torch.int32, torch.bool):
    _shown = dtype_of(_dtype)
    refused(
        f"zeros {_shown}",
        TypeError,
        f"zeros have dtype {_shown}; uint8, or float16, bfloat16 or float32 is needed",
        zeros=tensor(N, K // G, dtype=_dtype),
    )
for _dtype in (torch.float16, torch.float32):
    _shown = dtype_of(_dtype)
    refused(
        f"zeros {_shown}",
        TypeError,
        f"zeros have dtype {_shown}; zero_mode='integer' needs uint8; zero_mode='float' keeps them as they are",
        zeros=tensor(N, K // G, dtype=_dtype),
    )
refused(
    "zeros uint8 as float",
    TypeError,
    "zeros have dtype uint8; zero_mode='float' needs float16, bfloat16 or float32",
    zero_mode="float",
)
for _mode in ("Integer", None, 0):
    refused(
        f"zero_mode {_mode}",
        ValueError,
        f"zero_mode is {_mode!r}; 'integer' or 'float' is needed",
        zero_mode=_mode,
    )
refused(
    "out bfloat16",
    TypeError,
    "out has dtype bfloat16 but x has dtype float16",
    out=tensor(M, N, dtype=torch.bfloat16),
)

# --------------------------------------------------------------------------------------------------------------- shapes

refused("x 0-d", ValueError, "x has 0 dimensions; at least 1 is needed", x=tensor())
for _k in (0, 8, 120, 127, 129, 256):
    refused(f"x with K {_k}", ValueError, f"x has K={_k} but qweight has K=128", x=tensor(M, _k))
for _shape, _shown in (((), "[]"), ((N,), "[24]"), ((1, N, K // 8), "[1, 24, 16]")):
    refused(f"qweight {_shown}", ValueError, f"qweight has shape {_shown}; [N, K/8] is needed", qweight=words(*_shape))
refused(
    "qweight [K/8, N]",
    ValueError,
    "scales have shape [24, 2]; [16, 3] is needed for N=16, K=192, group_size=64",
    qweight=words(K // 8, N),
)
refused("K of 72", ValueError, "K=72 of qweight is not a multiple of group_size=64", qweight=words(N, 9))
for _group in (0, 1, 16, 48, 96, 256, -64, 64.5, "64", None):
    refused(
        f"group_size {_group!r}",
        ValueError,
        f"group_size is {_group!r}; 32, 64 or 128 is needed",
        group_size=_group,
    )
for _group, _count in ((32, 4), (128, 1)):
    refused(
        f"scales of groups of 64 for {_group}",
        ValueError,
        f"scales have shape [24, 2]; [24, {_count}] is needed for N=24, K=128, group_size={_group}",
        group_size=_group,
    )
for _name, _make in (("scales", tensor), ("zeros", bytes_)):
    for _shape, _shown in (((N, 1), "[24, 1]"), ((2, N), "[2, 24]"), ((N * 2,), "[48]"), ((N - 1, 2), "[23, 2]")):
        refused(
            f"{_name} {_shown}",
            ValueError,
            f"{_name} have shape {_shown}; [24, 2] is needed for N=24, K=128, group_size=64",
            **{_name: _make(*_shape)},
        )
for _shape, _shown in (((N - 1,), "[23]"), ((1, N), "[1, 24]"), ((), "[]"), ((1,), "[1]")):
    refused(f"bias {_shown}", ValueError, f"bias has shape {_shown} but qweight has N=24", bias=tensor(*_shape))
for _shape, _shown in (((M, N + 1), "[4, 25]"), ((N,), "[24]"), ((1, M, N), "[1, 4, 24]")):
    refused(f"out {_shown}", ValueError, f"out has shape {_shown}; [4, 24] is needed", out=tensor(*_shape))

# ---------------------------------------------------------------------------------------------- devices, memory, choice

for _name, _made in (("qweight", words(N, K // 8)), ("bias", tensor(N))):
    refused(
        f"{_name} elsewhere",
        ValueError,
        f"{_name} is on {{other}} but x is on {{device}}",
        DEVICES,
        **{_name: lambda d, make=_made: make(other(d))},
    )
for _name, _made in (("scales", tensor(N, K // G)), ("zeros", bytes_(N, K // G))):
    refused(
        f"{_name} elsewhere",
        ValueError,
        f"{_name} are on {{other}} but qweight is on {{device}}",
        DEVICES,
        **{_name: lambda d, make=_made: make(other(d))},
    )
refused(
    "out elsewhere",
    ValueError,
    "out is on {other} but x is on {device}",
    DEVICES,
    out=lambda d: tensor(M, N)(other(d)),
)
refused("out expanded", ValueError, "elements of out share memory", out=lambda d: tensor(1, N)(d).expand(M, N))


def _aliased(name: str) -> Callable[[str], dict[str, Any]]:
    def make(device: str) -> dict[str, Any]:
        arguments = valid(device)
        raw = arguments[name].view(torch.uint8).flatten()
        arguments["out"] = torch.cat((raw, raw.new_zeros(2 * M * N - raw.numel()))) if raw.numel() < 2 * M * N else raw
        if raw.numel() < 2 * M * N:
            big = arguments["out"]
            arguments[name] = big[: raw.numel()].view(arguments[name].dtype).view(arguments[name].shape)
        arguments["out"] = arguments["out"][: 2 * M * N].view(torch.float16).view(M, N)
        return arguments

    return make


for _name in ("x", "qweight", "scales", "zeros", "bias"):
    CASES.append(
        Case("w4a16_linear", f"out overlaps {_name}", _aliased(_name), ValueError, f"out overlaps {_name}", REAL)
    )
refused(
    "backend unknown",
    ValueError,
    "backend 'marlin' is unknown; it is one of auto, torch, cuda, sm80_decode, sm90_decode, sm80_mma, sm90a_wgmma, "
    "sm80_dequantize",
    backend="marlin",
)
refused(
    "out with gradients",
    ValueError,
    "out= takes no part in automatic differentiation; call it without out= or under torch.no_grad()",
    grad=True,
    x=lambda d: tensor(M, K)(d).requires_grad_(),
    out=tensor(M, N),
)

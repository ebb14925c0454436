"""What the tests share: weights of every kind, the format read a second time from its definition, memory in use."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from dandan_ops_core.testing import assert_close_to
from dandan_w4a16 import Int4Weight, QuantizedLinear, pack_int4

DTYPES = (torch.float16, torch.bfloat16)
SCALE_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
GROUPS = (32, 64, 128)
N, K = 24, 256  # of the modules


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def random_codes(n: int, k: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 16, (n, k), generator=generator(seed), dtype=torch.uint8)


def random_weight(
    n: int,
    k: int,
    group_size: int = 64,
    *,
    scale_dtype: torch.dtype = torch.float16,
    zero_mode: str = "integer",
    seed: int = 0,
    whole: bool = False,
) -> Int4Weight:
    """Codes and zeros of the whole range, scales of both signs; `whole`: scales of 1 or 2, so that sums are exact."""
    source = generator(seed)
    groups = (n, k // group_size)
    if whole:
        scales = torch.randint(1, 3, groups, generator=source).to(scale_dtype)
    else:
        scales = (torch.randn(groups, generator=source) / 8).to(scale_dtype)
    if zero_mode == "float":
        zeros = (torch.rand(groups, generator=source) * 15).to(scale_dtype)
    else:
        zeros = torch.randint(0, 16, groups, generator=source).to(torch.uint8)
    return Int4Weight(pack_int4(random_codes(n, k, seed + 1)), scales, zeros, group_size, zero_mode)


def codes_of(qweight: torch.Tensor) -> torch.Tensor:
    """[N, K] codes by the definition: bits 4i to 4i+3 of word j are code 8j+i."""
    shifted = [(qweight.to(torch.int64) >> (4 * i)) & 15 for i in range(8)]
    return torch.stack(shifted, -1).flatten(1)


def weight_of(weight: Int4Weight, dtype: torch.dtype) -> torch.Tensor:
    """[N, K] by the rule ``round_to(dtype)(fp32(q - z) * fp32(s))``, element by element."""
    q = codes_of(weight.qweight).to(torch.float32)
    z = weight.zeros.to(torch.float32).repeat_interleave(weight.group_size, 1)
    s = weight.scales.to(torch.float32).repeat_interleave(weight.group_size, 1)
    return ((q - z) * s).to(dtype)


def truth(x: torch.Tensor, weight: Int4Weight, bias: torch.Tensor | None = None) -> torch.Tensor:
    """The product in float64, of the weight rounded to x's dtype."""
    result = x.double() @ weight_of(weight, x.dtype).double().t()
    return result if bias is None else result + bias.double()


def check(actual: torch.Tensor, x: torch.Tensor, weight: Int4Weight, bias: torch.Tensor | None = None) -> None:
    """`actual` within the bound that a plain composition with FP32 sums and one rounding sets."""
    honest = x.float() @ weight_of(weight, x.dtype).float().t()
    if bias is not None:
        honest += bias.float()
    assert_close_to(actual, truth(x, weight, bias), honest.to(x.dtype), "w4a16_linear", dtype=x.dtype)


def tensors(weight: Int4Weight) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return weight.qweight, weight.scales, weight.zeros


def module(
    *, bias: bool = True, zero_mode: str = "integer", scale_dtype: torch.dtype = torch.float16
) -> QuantizedLinear:
    weight = random_weight(N, K, scale_dtype=scale_dtype, zero_mode=zero_mode, whole=True)
    return QuantizedLinear.from_packed(weight, torch.arange(N).half() if bias else None)


def whole_x(dtype: torch.dtype = torch.float16, rows: int = 5) -> torch.Tensor:
    return torch.randint(-2, 3, (rows, K), generator=generator(1)).to(dtype)


def peak_memory(run: Callable[[], Any]) -> int:
    """Bytes that `run` has allocated at its fullest, over what was allocated before, temporaries of PyTorch's own
    functions included: the CPU allocator's own record.
    """
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        result = run()
    events = [event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
    events.sort(key=lambda event: event.start_ns())
    held = peak = 0
    for event in events:
        held += event.nbytes()
        peak = max(peak, held)
    del result
    return peak

"""Every importer by name, and what holds of a layer that it has taken."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy
import sources
import torch
from sources import Layer
from w4a16_cases import weight_of

from dandan_ops_core.testing import assert_bit_equal
from dandan_w4a16 import (
    Int4Weight,
    from_awq,
    from_compressed_tensors,
    from_gptq,
    from_signed_int4,
    unpack_int4,
    w4a16_linear,
)


def assert_imported(found: Int4Weight, source: Layer, group: int | None = None) -> None:
    """Codes, zeros and scales are the source's, and so is every element."""
    n, k = source.codes.shape
    assert found.shape == (n, k)
    assert found.zero_mode == "integer"
    assert found.scales.dtype == source.scales.dtype
    if group is not None:
        assert found.group_size == group
    assert numpy.array_equal(unpack_int4(found.qweight).numpy(), source.codes)
    index = numpy.arange(k // found.group_size) * found.group_size // source.group
    assert numpy.array_equal(found.zeros.numpy(), source.zeros[:, index])
    assert_bit_equal(found.scales, source.scales[:, torch.from_numpy(index)])
    assert all(t.is_contiguous() for t in (found.qweight, found.scales, found.zeros))
    assert_bit_equal(weight_of(found, source.scales.dtype), source.weight)
    if k:
        out = w4a16_linear(torch.eye(k, dtype=source.scales.dtype), found.qweight, found.scales, found.zeros,
                           group_size=found.group_size)  # fmt: skip
        assert torch.equal(out.t(), source.weight)


def from_v2(source: Layer, **keywords: Any) -> Int4Weight:
    return from_gptq(**sources.gptq(source, 2), checkpoint_format="gptq_v2", **keywords)


def from_v1(source: Layer, **keywords: Any) -> Int4Weight:
    return from_gptq(**sources.gptq(source, 1), wrap=True, **keywords)


def from_ct(source: Layer, **keywords: Any) -> Int4Weight:
    return from_compressed_tensors(**sources.compressed_tensors(source, False), **keywords)


def from_ct_symmetric(source: Layer, **keywords: Any) -> Int4Weight:
    return from_compressed_tensors(**sources.compressed_tensors(source, True), **keywords)


def from_signed(source: Layer, **keywords: Any) -> Int4Weight:
    keywords.setdefault("target_group_size", 64 if source.group % 64 == 0 else 32)
    keywords.setdefault("group_size", source.group)
    codes, zeros = (torch.from_numpy(t - 8).to(torch.int8) for t in (source.codes, source.zeros))
    return from_signed_int4(codes, source.scales, zeros, **keywords)


def from_signed_packed(source: Layer, **keywords: Any) -> Int4Weight:
    keywords.setdefault("target_group_size", 64 if source.group % 64 == 0 else 32)
    keywords.setdefault("group_size", source.group)
    codes = sources.words((source.codes - 8) % 16, 1)
    zeros = torch.from_numpy(source.zeros - 8)
    return from_signed_int4(codes, source.scales, zeros, packed=True, **keywords)


def from_awq_layer(source: Layer, **keywords: Any) -> Int4Weight:
    return from_awq(**sources.awq(source), **keywords)


ALL: dict[str, Callable[..., Int4Weight]] = {
    "awq": from_awq_layer,
    "gptq v1": from_v1,
    "gptq v2": from_v2,
    "compressed-tensors": from_ct,
    "signed": from_signed,
    "signed, packed": from_signed_packed,
}

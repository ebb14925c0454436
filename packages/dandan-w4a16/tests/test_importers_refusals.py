"""What the importers refuse: versions that contradict the values, activation orders, shapes and dtypes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy
import pytest
import sources
import torch
from importer_cases import (
    ALL,
    assert_imported,
)
from sources import layer

from dandan_w4a16 import (
    Int4Weight,
    from_awq,
    from_compressed_tensors,
    from_gptq,
    from_signed_int4,
)

# ------------------------------------------------------------------------------------------------ versions of GPTQ


def symmetric_gptq(stored: int) -> dict[str, torch.Tensor]:
    tensors = sources.gptq(layer(16, 128, 64, symmetric=True), 2)
    tensors["qzeros"] = sources.words(numpy.full((2, 16), stored), 1)
    return tensors


@pytest.mark.parametrize(("stored", "declared"), [(7, "gptq"), (8, "gptq_v2")])
def test_symmetric_zeros_that_agree_with_the_format(stored: int, declared: str) -> None:
    """A39 (i), (ii)."""
    found = from_gptq(**symmetric_gptq(stored), checkpoint_format=declared)
    assert_imported(found, layer(16, 128, 64, symmetric=True))


@pytest.mark.parametrize(
    ("stored", "declared", "text"),
    [
        (
            8,
            "gptq",
            "every stored zero is 8. As the declared 'gptq' the zeros are 9 (zero_offset=1); a symmetric weight has "
            "zeros of 8, which is zero_offset=0. Pass the zero_offset that the checkpoint was written with",
        ),
        (
            7,
            "gptq_v2",
            "every stored zero is 7. As the declared 'gptq_v2' the zeros are 7 (zero_offset=0); a symmetric weight has "
            "zeros of 8, which is zero_offset=1. Pass the zero_offset that the checkpoint was written with",
        ),
    ],
)
def test_symmetric_zeros_that_contradict_the_format(stored: int, declared: str, text: str) -> None:
    """A39 (iii), (iv): both readings are named, and the caller's word decides."""
    with pytest.raises(ValueError) as raised:
        from_gptq(**symmetric_gptq(stored), checkpoint_format=declared)
    assert str(raised.value) == f"from_gptq: {text}"
    for offset in (0, 1):
        found = from_gptq(**symmetric_gptq(stored), checkpoint_format=declared, zero_offset=offset)
        assert (found.zeros == stored + offset).all()


def test_zeros_that_only_look_symmetric_in_part() -> None:
    """One other zero, and nothing contradicts the declaration."""
    tensors = symmetric_gptq(8)
    stored = numpy.full((2, 16), 8)
    stored[1, 3] = 2
    tensors["qzeros"] = sources.words(stored, 1)
    found = from_gptq(**tensors)
    assert sorted(found.zeros.unique().tolist()) == [3, 9]


@pytest.mark.parametrize(
    ("keywords", "text"),
    [
        ({"zero_offset": 2}, "zero_offset is 2; 0, 1 or None is needed"),
        ({"zero_offset": True}, "zero_offset is True; 0, 1 or None is needed"),
        ({"checkpoint_format": "marlin"}, "checkpoint_format is 'marlin'; 'gptq' (v1) or 'gptq_v2' is needed"),
    ],
)
def test_unknown_versions(keywords: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError) as raised:
        from_gptq(**symmetric_gptq(7), **keywords)
    assert str(raised.value) == f"from_gptq: {text}"


# -------------------------------------------------------------------------------------------------- activation order


def test_an_activation_order_is_refused() -> None:
    source = layer(16, 128, 64)
    for function, tensors, name in (
        (from_gptq, sources.gptq(source, 2), "g_idx"),
        (from_compressed_tensors, sources.compressed_tensors(source, False), "weight_g_idx"),
    ):
        order = torch.arange(128, dtype=torch.int32) // 64
        function(**{**tensors, name: order}, **({"zero_offset": 0} if function is from_gptq else {}))
        order = order.clone()
        order[[5, 100]] = order[[100, 5]]
        with pytest.raises(ValueError) as raised:
            function(**{**tensors, name: order})
        assert str(raised.value) == (
            f"{function.__name__}: {name} is an activation order: column 5 is in group 1 instead of 0 (group_size=64). "
            f"The format has no order of columns; quantise without act-order (desc_act=False, static or no actorder)"
        )
        with pytest.raises(ValueError, match=rf"^{function.__name__}: {name} has shape \[64\]; \[128\] is needed$"):
            function(**{**tensors, name: order[:64]})


def test_no_activation_order_in_compressed_tensors() -> None:
    source = layer(16, 128, 64)
    tensors = sources.compressed_tensors(source, False)
    assert_imported(from_compressed_tensors(**tensors, weight_g_idx=torch.full((128,), -1)), source)


# ----------------------------------------------------------------------------------------------------- what is refused


def test_scales_that_are_not_finite() -> None:
    source = layer(16, 128, 64)
    source.scales[3, 1] = torch.inf
    for name, convert in ALL.items():
        with pytest.raises(ValueError, match=": scales hold 1 NaN or infinite value; finite ones are needed$"):
            convert(source)
        assert name


AWQ, GPTQ, CT = (make(layer(16, 128, 64)) for make in (
    sources.awq, lambda x: sources.gptq(x, 2), lambda x: sources.compressed_tensors(x, False)))  # fmt: skip
SIGNED = {"codes": torch.zeros(16, 128, dtype=torch.int8), "scales": torch.ones(16, 1)}


@pytest.mark.parametrize(
    ("function", "base", "changes", "error", "text"),
    [
        (from_awq, AWQ, {"qweight": None}, TypeError, "qweight is NoneType; a tensor is needed"),
        (from_awq, AWQ, {"qweight": torch.zeros(128, 2)}, TypeError, "qweight has dtype float32; int32 is needed"),
        (from_awq, AWQ, {"qweight": AWQ["qweight"][0]}, ValueError, "qweight has shape [2]; [K, N/8] is needed"),
        (from_awq, AWQ, {"qzeros": AWQ["qzeros"][:1]}, ValueError, "qzeros has shape [1, 2]; [2, 2] is needed"),
        (from_awq, AWQ, {"scales": AWQ["scales"].t()}, ValueError, "scales has shape [16, 2]; [K/G, 16] is needed"),
        (
            from_awq,
            AWQ,
            {"scales": AWQ["scales"].int()},
            TypeError,
            "scales has dtype int32; float16, bfloat16 and float32 are supported",
        ),
        (
            from_awq,
            AWQ,
            {"group_size": 128},
            ValueError,
            "scales have 2 groups a row but K=128 has 1 of group_size=128",
        ),
        (
            from_awq,
            AWQ,
            {"group_size": 48},
            ValueError,
            "scales have 2 groups a row but K=128 has 2 of group_size=48, of which 32 are left over",
        ),
        (from_awq, AWQ, {"group_size": -1}, ValueError, "group_size=-1 is one group a row but scales have 2"),
        (
            from_awq,
            AWQ,
            {"group_size": 0},
            ValueError,
            "group_size is 0; a positive number, or -1 for one group a row, is needed",
        ),
        (
            from_gptq,
            GPTQ,
            {"qzeros": GPTQ["qzeros"][:1]},
            ValueError,
            "qzeros has shape [1, 2]; [2, 2] is needed",
        ),
        (
            from_gptq,
            GPTQ,
            {"scales": GPTQ["scales"][:, :8]},
            ValueError,
            "scales has shape [2, 8]; [K/G, 16] is needed",
        ),
        (
            from_gptq,
            GPTQ,
            {"qweight": GPTQ["qweight"].to("meta")},
            ValueError,
            "qweight is on meta; a tensor with values is needed",
        ),
        (
            from_compressed_tensors,
            CT,
            {"weight_shape": [16, 256]},
            ValueError,
            "weight_shape is [16, 256] but weight_packed holds [16, 128] codes of 4 bits",
        ),
        (
            from_compressed_tensors,
            CT,
            {"weight_scale": torch.ones(8, 2)},
            ValueError,
            "weight_scale has shape [8, 2]; [16, groups] is needed",
        ),
        (
            from_compressed_tensors,
            CT,
            {"weight_scale": torch.ones(16, 3)},
            ValueError,
            "K=128 does not divide into the 3 groups of scales",
        ),
        (
            from_compressed_tensors,
            CT,
            {"weight_zero_point": torch.zeros(16, 2, dtype=torch.int32)},
            ValueError,
            "weight_zero_point has shape [16, 2]; [2, 2] is needed",
        ),
        (
            from_compressed_tensors,
            CT,
            {"weight_zero_point": torch.zeros(2, 2)},
            TypeError,
            "weight_zero_point has dtype float32; an integer dtype is needed",
        ),
        (from_signed_int4, SIGNED, {"codes": SIGNED["codes"] + 8}, ValueError, "codes hold 8; -8 to 7 is needed"),
        (from_signed_int4, SIGNED, {"codes": SIGNED["codes"] - 9}, ValueError, "codes hold -9; -8 to 7 is needed"),
        (
            from_signed_int4,
            SIGNED,
            {"zeros": torch.full((16, 1), 8)},
            ValueError,
            "zeros hold 8; -8 to 7 is needed",
        ),
        (
            from_signed_int4,
            SIGNED,
            {"zeros": torch.zeros(16, 2, dtype=torch.int8)},
            ValueError,
            "zeros has shape [16, 2]; [16, 1] is needed",
        ),
        (
            from_signed_int4,
            SIGNED,
            {"codes": torch.zeros(16, 100, dtype=torch.int8)},
            ValueError,
            "codes has shape [16, 100]; [N, 8 * words] is needed",
        ),
        (
            from_signed_int4,
            SIGNED,
            {"codes": torch.zeros(16, 128)},
            TypeError,
            "codes has dtype float32; an integer dtype is needed",
        ),
        (
            from_signed_int4,
            SIGNED,
            {"scales": torch.ones(16, 2)},
            ValueError,
            "scales have 2 groups a row but K=128 has 1 of group_size=128",
        ),
    ],
)
def test_refusals(
    function: Callable[..., Int4Weight],
    base: dict[str, Any],
    changes: dict[str, Any],
    error: type[Exception],
    text: str,
) -> None:
    with pytest.raises(error) as raised:
        function(**{**base, **changes})
    assert str(raised.value) == f"{function.__name__}: {text}"

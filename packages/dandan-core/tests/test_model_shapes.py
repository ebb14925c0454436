"""The linear layers of the models that benchmarks and calibration name."""

from __future__ import annotations

import pytest

from dandan_ops_core.model_shapes import (
    LAYERS,
    MODELS,
    TOKENS,
    distinct_layers,
    gemm_calibration_cases,
    gemm_case,
    linear_layers,
)

# (n, k) of qkv, o, gate_up, down, lm_head, written out.
KNOWN = {
    ("Qwen3-0.6B", 1): [(4096, 1024), (1024, 2048), (6144, 1024), (1024, 3072), (151936, 1024)],
    ("Qwen3-4B", 1): [(6144, 2560), (2560, 4096), (19456, 2560), (2560, 9728), (151936, 2560)],
    ("Qwen3-8B", 1): [(6144, 4096), (4096, 4096), (24576, 4096), (4096, 12288), (151936, 4096)],
    ("Qwen3-32B", 1): [(10240, 5120), (5120, 8192), (51200, 5120), (5120, 25600), (151936, 5120)],
    ("Llama-3-8B", 1): [(6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336), (128256, 4096)],
    ("Llama-3-8B", 8): [(768, 4096), (4096, 512), (3584, 4096), (4096, 1792), (16032, 4096)],
    ("Llama-3-70B", 1): [(10240, 8192), (8192, 8192), (57344, 8192), (8192, 28672), (128256, 8192)],
    ("Llama-3-70B", 8): [(1280, 8192), (8192, 1024), (7168, 8192), (8192, 3584), (16032, 8192)],
}


@pytest.mark.parametrize(("name", "ranks"), KNOWN)
def test_layers_of_a_model(name: str, ranks: int) -> None:
    assert list(linear_layers(MODELS[name], ranks).items()) == list(zip(LAYERS, KNOWN[name, ranks], strict=True))


def test_every_model_is_known_here() -> None:
    assert {name for name, _ in KNOWN} == set(MODELS)


def test_layers_that_several_models_have_are_one() -> None:
    found = distinct_layers([("Qwen3-8B", 1), ("Llama-3-8B", 1), ("Llama-3-8B", 8)])
    assert found[6144, 4096] == "Qwen3-8B qkv, Llama-3-8B qkv"
    assert found[768, 4096] == "Llama-3-8B TP8 qkv"
    assert len(found) == 13
    assert len(distinct_layers(KNOWN)) == len({sizes for layers in KNOWN.values() for sizes in layers}) == 38


@pytest.mark.parametrize("ranks", [0, 3, 16])
def test_ranks_that_do_not_divide_the_heads(ranks: int) -> None:
    with pytest.raises(ValueError, match=f"Qwen3-8B cannot be cut for {ranks} GPUs"):
        linear_layers(MODELS["Qwen3-8B"], ranks)


def test_calibration_covers_every_layer_once_for_each_number_of_tokens_and_dtype() -> None:
    cases = gemm_calibration_cases()
    wanted = {sizes for layers in KNOWN.values() for sizes in layers}
    some = {sizes for name in ("Qwen3-0.6B", "Qwen3-8B") for sizes in linear_layers(MODELS[name]).values()}
    for own, layers in ((cases[:988], wanted), (cases[988:], some)):  # the layout of Linear, then [K, N]
        shapes = {(case.shape["m"], case.shape["n"], case.shape["k"], case.dtype) for case in own}
        assert len(shapes) == len(own) == len(layers) * 13 * 2
        assert {(n, k) for _, n, k, _ in shapes} == layers
        assert {m for m, *_ in shapes} == set(TOKENS) == {1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096}
        assert [case.shape["m"] for case in own] == sorted(case.shape["m"] for case in own)
    assert {case.topic for case in cases} == {"calibration"}
    assert all(set(case.shape) == {"m", "n", "k"} for case in cases[:988])
    assert all(case.shape["weight_transposed"] == 0 for case in cases[988:])


def test_bytes_and_operations_of_a_product() -> None:
    case = gemm_case("a layer", 2, 3, 5, "float16", topic="plain")
    assert (case.bytes, case.flops) == (2 * (10 + 15 + 6), 60)
    assert case.shape == {"m": 2, "n": 3, "k": 5}
    other = gemm_case("a layer", 2, 3, 5, "float16", topic="plain", weight_transposed=False)
    assert other.shape == {"m": 2, "n": 3, "k": 5, "weight_transposed": 0}

"""Layers of small checkpoint folders, laid out as the formats' tools write them, and by those tools where installed."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import sources
import torch
from sources import Layer, layer
from w4a16_cases import peak_memory, weight_of

from dandan_ops_core.testing import assert_bit_equal
from dandan_w4a16 import QuantizedLinear, from_awq, from_checkpoint, from_compressed_tensors

NAME = "model.layers.1.self_attn.q_proj"


@pytest.fixture
def save() -> Any:
    return pytest.importorskip("safetensors.torch", reason="safetensors is not installed").save_file


AWQ_CONFIG = {"quant_method": "awq", "bits": 4, "group_size": 64, "version": "gemm", "zero_point": True}
GPTQ_CONFIG = {"quant_method": "gptq", "bits": 4, "group_size": 64, "desc_act": False, "sym": False}
CT_CONFIG = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {"num_bits": 4, "type": "int", "symmetric": False, "strategy": "group", "group_size": 64},
        }
    },
}

SOURCES: dict[str, tuple[dict[str, Any], Any, dict[str, Any]]] = {
    "awq": (AWQ_CONFIG, sources.awq, {}),
    "gptq": (GPTQ_CONFIG, lambda source: sources.gptq(source, 1), {"wrap": True}),
    "gptq declared": (
        {**GPTQ_CONFIG, "checkpoint_format": "gptq"},
        lambda source: sources.gptq(source, 1),
        {"wrap": True},
    ),
    "gptq v2": ({**GPTQ_CONFIG, "checkpoint_format": "gptq_v2"}, lambda source: sources.gptq(source, 2), {}),
    "gptq, offset stated": (GPTQ_CONFIG, lambda source: sources.gptq(source, 2), {"zero_offset": 0}),
    "compressed-tensors": (CT_CONFIG, lambda source: sources.compressed_tensors(source, False), {}),
}  # fmt: skip


def write(
    save: Any, folder: Path, config: dict[str, Any], tensors: dict[str, torch.Tensor], *, shards: int = 1,
    bias: torch.Tensor | None = None,
) -> None:  # fmt: skip
    """The layer among others of its model, in one file or in two with an index."""
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen3", "quantization_config": config}))
    named = {f"{NAME}.{key}": value.contiguous() for key, value in tensors.items()}
    if bias is not None:
        named[f"{NAME}.bias"] = bias
    others = {
        "model.embed_tokens.weight": torch.ones(8, 4),
        f"{NAME}_norm.weight": torch.ones(4),
        f"{NAME}.inner.weight": torch.ones(4),
    }
    if shards == 1:
        save({**named, **others}, folder / "model.safetensors", metadata={"format": "pt"})
        return
    parts: list[dict[str, torch.Tensor]] = [{}, {}]
    for number, (key, value) in enumerate({**named, **others}.items()):
        parts[number % 2][key] = value
    places = {}
    for number, part in enumerate(parts):
        file = f"model-{number + 1:05}-of-00002.safetensors"
        save(part, folder / file, metadata={"format": "pt"})
        places.update(dict.fromkeys(part, file))
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))


def assert_layer(found: QuantizedLinear, source: Layer, bias: torch.Tensor | None) -> None:
    assert_bit_equal(weight_of(found.weight_int4, source.scales.dtype), source.weight)
    assert (found.bias is None) == (bias is None)
    if bias is not None:
        assert_bit_equal(found.bias.detach(), bias)  # type: ignore[union-attr]


@pytest.mark.parametrize("name", SOURCES)
@pytest.mark.parametrize("shards", [1, 2])
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_a_layer(save: Any, tmp_path: Path, name: str, shards: int, with_bias: bool, dtype: torch.dtype) -> None:
    config, pack, keywords = SOURCES[name]
    source = layer(24, 192, 64, dtype=dtype)
    bias = torch.arange(24).to(dtype) if with_bias else None
    write(save, tmp_path, config, pack(source), shards=shards, bias=bias)
    found = from_checkpoint(tmp_path, NAME, **keywords)
    assert_layer(found, source, bias)
    x = torch.eye(192, dtype=dtype)
    if bias is None:
        assert torch.equal(found(x).t(), source.weight)
    assert from_checkpoint(str(tmp_path), NAME, target_group_size=32, **keywords).group_size == 32


def test_configurations_of_older_tools(save: Any, tmp_path: Path) -> None:
    """quantize_config.json of GPTQ, quant_config.json of AWQ with its own names."""
    source = layer(16, 128, 64)
    for name, config, tensors in (
        ("quantize_config.json", {"bits": 4, "group_size": 64, "desc_act": False}, sources.gptq(source, 1)),
        ("quant_config.json", {"w_bit": 4, "q_group_size": 64, "version": "GEMM"}, sources.awq(source)),
    ):
        folder = tmp_path / name.removesuffix(".json")
        folder.mkdir()
        write(save, folder, {}, tensors)
        (folder / "config.json").write_text("{}")
        (folder / name).write_text(json.dumps(config))
        assert_layer(from_checkpoint(folder, NAME, wrap=True), source, None)


@pytest.mark.parametrize(
    ("config", "text"),
    [
        ({**AWQ_CONFIG, "quant_method": "hqq"}, "quant_method is 'hqq'; awq, compressed-tensors, gptq are supported"),
        ({**AWQ_CONFIG, "bits": 8}, "quantization_config has bits=8; 4 is supported"),
        ({**AWQ_CONFIG, "version": "gemv"}, "quantization_config has version='gemv'; 'gemm' is supported"),
        ({**GPTQ_CONFIG, "bits": 3}, "quantization_config has bits=3; 4 is supported"),
        (
            {**CT_CONFIG, "format": "nvfp4-pack-quantized"},
            "quantization_config has format='nvfp4-pack-quantized'; 'pack-quantized' is supported",
        ),
        (CT_CONFIG, "the layer has no tensor 'weight_packed'; it has qweight, qzeros, scales"),
    ],
)
def test_configurations_that_are_refused(save: Any, tmp_path: Path, config: dict[str, Any], text: str) -> None:
    write(save, tmp_path, config, sources.awq(layer(16, 128, 64)))
    with pytest.raises(ValueError) as raised:
        from_checkpoint(tmp_path, NAME)
    assert str(raised.value) == f"from_checkpoint: {text}"


def test_folders_that_are_refused(save: Any, tmp_path: Path) -> None:
    for prepare, text in (
        (lambda: None, "has neither a config.json with quantization_config nor quantize_config.json"),
        (lambda: (tmp_path / "config.json").write_text("{"), "is no JSON"),
        (lambda: (tmp_path / "config.json").write_text("[]"), "holds no JSON object"),
        (
            lambda: (tmp_path / "config.json").write_text(json.dumps({"quantization_config": AWQ_CONFIG})),
            "has no .safetensors file",
        ),
        (
            lambda: write(save, tmp_path, AWQ_CONFIG, sources.awq(layer(16, 128, 64))),
            "no tensor of .* begins with 'model.layers.9.mlp.'",
        ),
    ):
        prepare()
        with pytest.raises(ValueError, match=f"^from_checkpoint: .*{text}"):
            from_checkpoint(tmp_path, "model.layers.9.mlp")


def test_refusals_of_the_importers_come_through(save: Any, tmp_path: Path) -> None:
    source = layer(16, 128, 64, symmetric=True)
    write(save, tmp_path, GPTQ_CONFIG, sources.gptq(source, 2))
    with pytest.raises(ValueError, match="^from_gptq: every stored zero is 8. As the declared 'gptq' the zeros are 9"):
        from_checkpoint(tmp_path, NAME)
    assert_layer(from_checkpoint(tmp_path, NAME, zero_offset=0), source, None)


def test_without_safetensors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": AWQ_CONFIG}))
    (tmp_path / "model.safetensors").write_bytes(b"")
    monkeypatch.setitem(sys.modules, "safetensors", None)
    with pytest.raises(ImportError, match="^from_checkpoint: safetensors is not installed; it is the extra"):
        from_checkpoint(tmp_path, NAME)


def test_no_dequantised_weight_while_reading(save: Any, tmp_path: Path) -> None:
    """The words of compressed-tensors are kept as they are; the weight in float16 would be 32 MiB more."""
    tile = sources.compressed_tensors(layer(64, 64, 64), False)
    tensors = {
        "weight_packed": tile["weight_packed"].repeat(64, 64),
        "weight_scale": tile["weight_scale"].repeat(64, 64),
        "weight_zero_point": tile["weight_zero_point"].repeat(64, 64),
        "weight_shape": torch.tensor([4096, 4096]),
    }
    write(save, tmp_path, CT_CONFIG, tensors)
    packed = 4096 * 4096 // 2 + 4096 * 64 * 3
    assert peak_memory(lambda: from_checkpoint(tmp_path, NAME)) < packed + (6 << 20)


# ------------------------------------------------------------------------------------------- the libraries themselves


@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("group", [32, 128, -1])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_what_compressed_tensors_writes(symmetric: bool, group: int, dtype: torch.dtype) -> None:
    """Its compressor packs a layer; our elements are those that its decompressor gives."""
    packing = pytest.importorskip(
        "compressed_tensors.compressors.pack_quantized",
        reason="compressed-tensors is not installed",
        exc_type=ImportError,
    )
    quantization = pytest.importorskip("compressed_tensors.quantization", exc_type=ImportError)
    arguments = {"num_bits": 4, "type": "int", "symmetric": symmetric}
    arguments |= {"strategy": "channel"} if group == -1 else {"strategy": "group", "group_size": group}
    scheme = quantization.QuantizationScheme(targets=["Linear"], weights=quantization.QuantizationArgs(**arguments))
    source = layer(20, 256, 256 if group == -1 else group, symmetric=symmetric, dtype=dtype)
    scales = source.scales.abs() + 0.01
    state = {"weight": Layer(source.codes, source.zeros, scales, source.group).weight, "weight_scale": scales}
    if not symmetric:
        state["weight_zero_point"] = torch.from_numpy(source.zeros - 8).to(torch.int8)
    compressor = packing.PackedQuantizationCompressor
    written = compressor.compress(state, scheme)
    assert written["weight_packed"].dtype == torch.int32
    names = ("weight_packed", "weight_scale", "weight_zero_point", "weight_shape")
    found = from_compressed_tensors(**{name: written[name] for name in names if name in written})
    theirs = compressor.decompress(written, scheme)["weight"]
    assert_bit_equal(weight_of(found, dtype) + 0.0, theirs + 0.0)
    assert_bit_equal(weight_of(found, dtype) + 0.0, state["weight"] + 0.0)


def test_what_autoawq_reads() -> None:
    packing = pytest.importorskip("awq.utils.packing_utils", reason="autoawq is not installed", exc_type=ImportError)
    source = layer(64, 256, 64)
    tensors = sources.awq(source)
    theirs = packing.dequantize_gemm(tensors["qweight"], tensors["qzeros"], tensors["scales"], 4, 64)
    assert_bit_equal(weight_of(from_awq(**tensors), torch.float16) + 0.0, theirs.t().contiguous() + 0.0)

"""One layer of a checkpoint folder, as the formats' own tools write it: config.json and safetensors files."""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from dandan_w4a16.importers.awq import from_awq
from dandan_w4a16.importers.compressed_tensors import from_compressed_tensors
from dandan_w4a16.importers.gptq import from_gptq
from dandan_w4a16.module import QuantizedLinear
from dandan_w4a16.weight import Int4Weight

__all__ = ["from_checkpoint"]

OP = "from_checkpoint"
INDEX = "model.safetensors.index.json"

Tensors = Mapping[str, torch.Tensor]
Config = Mapping[str, Any]


def _json(path: Path) -> dict[str, Any]:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{OP}: {path} is no JSON: {error}") from None
    if not isinstance(data, dict):
        raise ValueError(f"{OP}: {path} holds no JSON object")
    return data


def _config(folder: Path) -> dict[str, Any]:
    """What the checkpoint says of its quantisation."""
    if (folder / "config.json").is_file():
        found = _json(folder / "config.json").get("quantization_config")
        if isinstance(found, dict):
            return found
    # Older tools of GPTQ and AWQ write a file of their own.
    for name, method in (("quantize_config.json", "gptq"), ("quant_config.json", "awq")):
        if (folder / name).is_file():
            return {"quant_method": method, **_json(folder / name)}
    raise ValueError(f"{OP}: {folder} has neither a config.json with quantization_config nor quantize_config.json")


def _need(config: Config, key: str, wanted: Any, *names: str) -> None:
    """The first of the names that the configuration has must have the wanted value."""
    for name in (key, *names):
        if name in config:
            if config[name] != wanted:
                raise ValueError(f"{OP}: quantization_config has {name}={config[name]!r}; {wanted!r} is supported")
            return


def _files(folder: Path, name: str) -> dict[str, list[str]]:
    """File -> tensors of layer `name` in it."""
    prefix = name + "."
    if (folder / INDEX).is_file():
        places = _json(folder / INDEX).get("weight_map", {})
    else:
        files = sorted(path.name for path in folder.glob("*.safetensors"))
        if not files:
            raise ValueError(f"{OP}: {folder} has no .safetensors file")
        places = {key: file for file in files for key in _keys(folder / file)}
    found: dict[str, list[str]] = {}
    for key, file in places.items():
        if key.startswith(prefix) and "." not in key.removeprefix(prefix):
            found.setdefault(file, []).append(key)
    if not found:
        raise ValueError(f"{OP}: no tensor of {folder} begins with {prefix!r}")
    return found


def _safe_open(path: Path, device: str = "cpu") -> Any:
    try:
        safetensors = importlib.import_module("safetensors")
    except ImportError:
        raise ImportError(
            f"{OP}: safetensors is not installed; it is the extra 'checkpoints' of dandan-w4a16"
        ) from None
    return safetensors.safe_open(str(path), framework="pt", device=device)


def _keys(path: Path) -> list[str]:
    with _safe_open(path) as file:
        return list(file.keys())


def _tensor(tensors: Tensors, name: str) -> torch.Tensor:
    if name not in tensors:
        raise ValueError(f"{OP}: the layer has no tensor {name!r}; it has {', '.join(sorted(tensors))}")
    return tensors[name]


def _compressed_tensors(config: Config, tensors: Tensors, target: int | None, **_: Any) -> Int4Weight:
    _need(config, "format", "pack-quantized")
    return from_compressed_tensors(
        _tensor(tensors, "weight_packed"),
        _tensor(tensors, "weight_scale"),
        tensors.get("weight_zero_point"),
        weight_shape=_tensor(tensors, "weight_shape"),
        weight_g_idx=tensors.get("weight_g_idx"),
        target_group_size=target,
    )


def _awq(config: Config, tensors: Tensors, target: int | None, **_: Any) -> Int4Weight:
    _need(config, "bits", 4, "w_bit")
    _need({k: str(v).lower() for k, v in config.items() if k == "version"}, "version", "gemm")
    return from_awq(
        _tensor(tensors, "qweight"),
        _tensor(tensors, "qzeros"),
        _tensor(tensors, "scales"),
        group_size=config.get("group_size", config.get("q_group_size")),
        target_group_size=target,
    )


def _gptq(config: Config, tensors: Tensors, target: int | None, zero_offset: int | None, wrap: bool) -> Int4Weight:
    _need(config, "bits", 4)
    return from_gptq(
        _tensor(tensors, "qweight"),
        _tensor(tensors, "qzeros"),
        _tensor(tensors, "scales"),
        tensors.get("g_idx"),
        checkpoint_format=config.get("checkpoint_format") or "gptq",
        zero_offset=zero_offset,
        wrap=wrap,
        group_size=config.get("group_size"),
        target_group_size=target,
    )


METHODS: dict[str, Callable[..., Int4Weight]] = {
    "awq": _awq,
    "compressed-tensors": _compressed_tensors,
    "gptq": _gptq,
}


def from_checkpoint(
    folder: str | Path,
    name: str,
    *,
    target_group_size: int | None = None,
    zero_offset: int | None = None,
    wrap: bool = False,
    device: torch.device | str = "cpu",
) -> QuantizedLinear:
    """One linear layer of a quantised checkpoint, read from its safetensors; the rest of the files is not read.

    Args:
        folder: holds config.json with quantization_config (quant_method awq, gptq or compressed-tensors; or the
            quantize_config.json of GPTQ, the quant_config.json of AWQ), and the .safetensors files with or without an
            index.
        name: of the layer, such as "model.layers.0.self_attn.q_proj".
        target_group_size: as in the importers.
        zero_offset: as in `from_gptq`, and so is wrap.
        device: where the layer goes.

    Returns:
        The layer with its bias, where the checkpoint has one.

    Raises:
        ImportError: safetensors is not installed.
        ValueError: the folder has no such layer or no configuration, or the importer refuses it.

    Source: the layouts that AutoAWQ, GPTQModel and compressed-tensors write.
    """
    folder = Path(folder)
    config = _config(folder)
    method = config.get("quant_method")
    if method not in METHODS:
        raise ValueError(f"{OP}: quant_method is {method!r}; {', '.join(sorted(METHODS))} are supported")
    tensors: dict[str, torch.Tensor] = {}
    for file, keys in _files(folder, name).items():
        with _safe_open(folder / file, str(device)) as opened:
            for key in keys:
                tensors[key.removeprefix(name + ".")] = opened.get_tensor(key)
    weight = METHODS[method](config, tensors, target_group_size, zero_offset=zero_offset, wrap=wrap)
    return QuantizedLinear.from_packed(weight, tensors.get("bias"))

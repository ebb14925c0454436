"""Linear layers with INT4 weights and FP16 or BF16 activations for LLM inference, as CUDA operators for PyTorch."""

from __future__ import annotations

from dandan_w4a16.execution_info import w4a16_linear_execution_info
from dandan_w4a16.importers import from_awq, from_checkpoint, from_compressed_tensors, from_gptq, from_signed_int4
from dandan_w4a16.linear import w4a16_linear
from dandan_w4a16.module import QuantizedLinear
from dandan_w4a16.quantize import dequantize_int4, quantize_int4
from dandan_w4a16.weight import Int4Weight, pack_int4, unpack_int4

__all__ = [
    "Int4Weight",
    "QuantizedLinear",
    "dequantize_int4",
    "from_awq",
    "from_checkpoint",
    "from_compressed_tensors",
    "from_gptq",
    "from_signed_int4",
    "pack_int4",
    "quantize_int4",
    "unpack_int4",
    "w4a16_linear",
    "w4a16_linear_execution_info",
]

"""Every dandan operator under one name: `import dandan_ops as ops; y = ops.rms_norm(x, weight)`.

The operators live in packages of their own (`dandan_norm`, `dandan_gemm`, `dandan_w4a16`, `dandan_attention`), which
this one requires; what they export is the same object here. Importing it compiles nothing, creates no CUDA context and
works without a GPU.
"""

from __future__ import annotations

from dandan_attention import (
    DecodePlan,
    flash_attention,
    flash_attention_execution_info,
    flash_attention_varlen,
    flash_attention_varlen_execution_info,
    paged_attention,
    paged_attention_execution_info,
    paged_attention_varlen,
    paged_attention_varlen_execution_info,
    qk_norm_rope_write_kv,
    qk_norm_rope_write_kv_execution_info,
    rope,
    rope_execution_info,
    write_kv,
    write_kv_execution_info,
)
from dandan_gemm import gemm, gemm_execution_info
from dandan_norm import (
    argmax,
    elementwise_execution_info,
    layer_norm,
    residual_rms_norm,
    rms_norm,
    silu_and_mul,
    softmax,
)
from dandan_ops_core.backend import BackendUnavailableError, ExecutionInfo
from dandan_w4a16 import (
    Int4Weight,
    QuantizedLinear,
    dequantize_int4,
    from_awq,
    from_checkpoint,
    from_compressed_tensors,
    from_gptq,
    from_signed_int4,
    pack_int4,
    quantize_int4,
    unpack_int4,
    w4a16_linear,
    w4a16_linear_execution_info,
)

__version__ = "0.1.0"

__all__ = [
    "BackendUnavailableError",
    "DecodePlan",
    "ExecutionInfo",
    "Int4Weight",
    "QuantizedLinear",
    "__version__",
    "argmax",
    "dequantize_int4",
    "elementwise_execution_info",
    "flash_attention",
    "flash_attention_execution_info",
    "flash_attention_varlen",
    "flash_attention_varlen_execution_info",
    "from_awq",
    "from_checkpoint",
    "from_compressed_tensors",
    "from_gptq",
    "from_signed_int4",
    "gemm",
    "gemm_execution_info",
    "layer_norm",
    "pack_int4",
    "paged_attention",
    "paged_attention_execution_info",
    "paged_attention_varlen",
    "paged_attention_varlen_execution_info",
    "qk_norm_rope_write_kv",
    "qk_norm_rope_write_kv_execution_info",
    "quantize_int4",
    "residual_rms_norm",
    "rms_norm",
    "rope",
    "rope_execution_info",
    "silu_and_mul",
    "softmax",
    "unpack_int4",
    "w4a16_linear",
    "w4a16_linear_execution_info",
    "write_kv",
    "write_kv_execution_info",
]

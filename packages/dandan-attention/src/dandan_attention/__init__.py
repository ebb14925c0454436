"""FP16 and BF16 grouped-query attention for LLM inference, as CUDA operators for PyTorch."""

from __future__ import annotations

from dandan_attention.attention import flash_attention, flash_attention_varlen
from dandan_attention.cache import (
    qk_norm_rope_write_kv,
    qk_norm_rope_write_kv_execution_info,
    rope,
    rope_execution_info,
    write_kv,
    write_kv_execution_info,
)
from dandan_attention.execution_info import flash_attention_execution_info, flash_attention_varlen_execution_info
from dandan_attention.paged import (
    DecodePlan,
    paged_attention,
    paged_attention_execution_info,
    paged_attention_varlen,
    paged_attention_varlen_execution_info,
)

__all__ = [
    "DecodePlan",
    "flash_attention",
    "flash_attention_execution_info",
    "flash_attention_varlen",
    "flash_attention_varlen_execution_info",
    "paged_attention",
    "paged_attention_execution_info",
    "paged_attention_varlen",
    "paged_attention_varlen_execution_info",
    "qk_norm_rope_write_kv",
    "qk_norm_rope_write_kv_execution_info",
    "rope",
    "rope_execution_info",
    "write_kv",
    "write_kv_execution_info",
]

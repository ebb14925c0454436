"""FP16 and BF16 grouped-query attention for LLM inference, as CUDA operators for PyTorch."""

from __future__ import annotations

from dandan_attention.attention import flash_attention, flash_attention_varlen
from dandan_attention.execution_info import flash_attention_execution_info, flash_attention_varlen_execution_info

__all__ = [
    "flash_attention",
    "flash_attention_execution_info",
    "flash_attention_varlen",
    "flash_attention_varlen_execution_info",
]

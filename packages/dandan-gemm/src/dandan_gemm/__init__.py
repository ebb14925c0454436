"""FP16 and BF16 matrix products for LLM inference, as CUDA operators for PyTorch."""

from __future__ import annotations

from dandan_gemm.execution_info import gemm_execution_info
from dandan_gemm.gemm import gemm

__all__ = ["gemm", "gemm_execution_info"]

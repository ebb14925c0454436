"""Every dandan operator under one name: `import dandan_ops as ops; y = ops.rms_norm(x, weight)`.

The operators live in packages of their own (`dandan_norm`, `dandan_gemm`), which this one requires; what they export is
the same object here. Importing it compiles nothing, creates no CUDA context and works without a GPU.
"""

from __future__ import annotations

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

__version__ = "0.1.0"

__all__ = [
    "BackendUnavailableError",
    "ExecutionInfo",
    "__version__",
    "argmax",
    "elementwise_execution_info",
    "gemm",
    "gemm_execution_info",
    "layer_norm",
    "residual_rms_norm",
    "rms_norm",
    "silu_and_mul",
    "softmax",
]

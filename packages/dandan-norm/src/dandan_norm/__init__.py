"""Norms and the small operators around them for LLM inference, as CUDA operators for PyTorch."""

from __future__ import annotations

from dandan_norm.activation import silu_and_mul
from dandan_norm.execution_info import elementwise_execution_info
from dandan_norm.norm import layer_norm, residual_rms_norm, rms_norm
from dandan_norm.softmax import argmax, softmax

__all__ = [
    "argmax",
    "elementwise_execution_info",
    "layer_norm",
    "residual_rms_norm",
    "rms_norm",
    "silu_and_mul",
    "softmax",
]

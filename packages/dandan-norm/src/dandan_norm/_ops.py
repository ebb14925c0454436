"""torch.ops.dandan_norm: schemas, CPU kernels, fakes; CUDA kernels where the compiled library is loaded."""

from __future__ import annotations

from typing import Any

import torch

from dandan_norm import checks, reference
from dandan_ops_core.registry import Operator, OperatorLibrary

KERNELS = ("sm80_row", "sm80_stream", "sm90_cluster", "sm80_elementwise")
"""Own kernels in the order of their numbers; csrc/routes.h has the same."""


def _like(x: torch.Tensor, *_: Any) -> torch.Tensor:
    return x.new_empty(x.shape)


def _pair(x: torch.Tensor, *_: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return x.new_empty(x.shape), x.new_empty(x.shape)


def _index(x: torch.Tensor) -> torch.Tensor:
    return x.new_empty(x.shape[:-1], dtype=torch.int64)


LIBRARY = OperatorLibrary(
    "dandan_norm",
    KERNELS,
    [
        Operator(
            "rms_norm", "Tensor x, Tensor? weight, float eps", ("out",), checks.rms_norm, reference.rms_norm, _like
        ),
        Operator(
            "residual_rms_norm",
            "Tensor x, Tensor residual, Tensor? weight, float eps",
            ("normalized", "summed"),
            checks.residual_rms_norm,
            reference.residual_rms_norm,
            _pair,
        ),
        Operator(
            "layer_norm",
            "Tensor x, Tensor? weight, Tensor? bias, float eps",
            ("out",),
            checks.layer_norm,
            reference.layer_norm,
            _like,
        ),
        Operator("softmax", "Tensor x", ("out",), checks.softmax, reference.softmax, _like),
        Operator(
            "silu_and_mul", "Tensor gate, Tensor up", ("out",), checks.silu_and_mul, reference.silu_and_mul, _like
        ),
        Operator("argmax", "Tensor x", ("out",), checks.argmax, reference.argmax, _index),
    ],
)

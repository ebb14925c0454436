"""Names of backends, the answer of `*_execution_info`, and the error of an explicit choice that cannot run."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["AUTO", "CUDA", "TORCH", "BackendUnavailableError", "ExecutionInfo"]

AUTO = "auto"
"""The fastest backend that is known to serve the call: a profile row, else measured heuristics, else PyTorch."""

TORCH = "torch"
"""Plain PyTorch: the operator's reference."""

CUDA = "cuda"
"""The package's best own kernel for the call."""


class BackendUnavailableError(RuntimeError):
    """An explicitly chosen backend cannot run the call. The text says why and what would."""


@dataclass(frozen=True)
class ExecutionInfo:
    """How a call would run. Asked of the same selection as the call itself; nothing is launched.

    Attributes:
        op: name of the operator.
        backend: "cuda" (own kernel) or "torch".
        kernel: name of the kernel, or "torch".
        reason: why this kernel.
        profile: records of the route tables in use, when a row of theirs decided; else None.
        fallback_reason: why no own kernel was taken, or None when one was or when torch was asked for.
        copies: arguments that are copied before the kernel can read them.
        device: such as "cuda:0".
    """

    op: str
    backend: str
    kernel: str
    reason: str
    profile: str | None
    fallback_reason: str | None
    copies: tuple[str, ...]
    device: str

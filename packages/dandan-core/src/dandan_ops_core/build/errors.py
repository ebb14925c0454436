"""The one exception of the build helper."""

from __future__ import annotations


class BuildError(RuntimeError):
    """The CUDA part cannot be built; the message is a sentence that says why and what would help."""

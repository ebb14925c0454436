"""Weights of other INT4 formats in the canonical one, bit for bit: no code, scale or zero is changed or rounded."""

from __future__ import annotations

from dandan_w4a16.importers.awq import from_awq
from dandan_w4a16.importers.checkpoint import from_checkpoint
from dandan_w4a16.importers.compressed_tensors import from_compressed_tensors
from dandan_w4a16.importers.gptq import from_gptq
from dandan_w4a16.importers.signed import from_signed_int4

__all__ = ["from_awq", "from_checkpoint", "from_compressed_tensors", "from_gptq", "from_signed_int4"]

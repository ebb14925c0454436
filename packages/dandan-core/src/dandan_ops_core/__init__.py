"""What the dandan operator packages share. Importing it imports no torch, creates no CUDA context and reads no file."""

from __future__ import annotations

__version__ = "0.1.0"

# What a compiled operator library and this package expect of each other. A library built for another one is not loaded.
PLUGIN_API = 1

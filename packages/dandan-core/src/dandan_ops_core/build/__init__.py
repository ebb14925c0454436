"""What the CUDA operator packages' setup.py calls: toolkit, flags, ninja file, wheel tag. Needs no torch to import.

Environment variables:
    DANDAN_BUILD_CUDA       auto (default: with a toolkit and a GPU or an architecture list), 1 (must), 0 (never)
    TORCH_CUDA_ARCH_LIST    architectures, such as "8.0;9.0a;12.0+PTX"; else the visible GPUs', else the default list
    DANDAN_CUDA_HOME        the toolkit; else CUDA_HOME, CUDA_PATH, nvcc on PATH, /usr/local/cuda, toolkit wheels
    DANDAN_TORCH_INCLUDE    torch headers (2.9 or newer) instead of the installed ones; DANDAN_TORCH_LIB the libraries
    DANDAN_CUDA_DRIVER_LIB  Windows: a driver import library to link as well
    CXX                     the host compiler (Linux)
    MAX_JOBS                compilers at once; default the CPUs, bounded by free memory
"""

from __future__ import annotations

from .errors import BuildError
from .fingerprint import fingerprints

__all__ = ["BuildError", "cuda_package", "fingerprints"]


def cuda_package(name: str) -> None:
    """Call setuptools.setup() for the CUDA operator package `name` (import name) in the current folder."""
    try:
        from .hooks import cuda_package as run  # setuptools is needed only here
    except ImportError as error:
        raise SystemExit(
            f"error: building needs setuptools 77 or newer ({error}); upgrade it, or build with isolation."
        ) from None
    run(name)

"""The PEP 517 build backend of the CUDA packages: setuptools, plus torch and ninja where CUDA is built."""

from __future__ import annotations

from typing import Any

from setuptools import build_meta as _setuptools
from setuptools.build_meta import (
    build_editable,
    build_sdist,
    build_wheel,
    get_requires_for_build_sdist,
    prepare_metadata_for_build_editable,
    prepare_metadata_for_build_wheel,
)

from .decide import build_requirements
from .errors import BuildError

__all__ = [
    "build_editable",
    "build_sdist",
    "build_wheel",
    "get_requires_for_build_editable",
    "get_requires_for_build_sdist",
    "get_requires_for_build_wheel",
    "prepare_metadata_for_build_editable",
    "prepare_metadata_for_build_wheel",
]


def _needs() -> list[str]:
    try:
        return build_requirements()
    except BuildError as error:
        raise SystemExit(f"error: {error}") from None


def get_requires_for_build_wheel(config_settings: Any = None) -> list[str]:
    """What setuptools needs, and torch and ninja where CUDA is built."""
    return [*_setuptools.get_requires_for_build_wheel(config_settings), *_needs()]


def get_requires_for_build_editable(config_settings: Any = None) -> list[str]:
    """As for a wheel."""
    return [*_setuptools.get_requires_for_build_editable(config_settings), *_needs()]

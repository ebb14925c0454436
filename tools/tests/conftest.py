"""The tools are scripts, not a package: load them by path."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

TOOLS = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="session")
def tool() -> Callable[[str], ModuleType]:
    """tool("check_tree") is the module tools/check_tree.py."""

    def load(name: str) -> ModuleType:
        if (found := sys.modules.get(f"tools_{name}")) is not None:
            return found
        spec = importlib.util.spec_from_file_location(f"tools_{name}", TOOLS / f"{name}.py")
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module
        spec.loader.exec_module(module)
        return module

    return load

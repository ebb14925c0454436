"""The meta-package: one name for every operator, and an import without side effects."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import dandan_attention
import dandan_gemm
import dandan_norm
import dandan_ops
import dandan_w4a16
from dandan_ops_core import backend

FOLDER = Path(dandan_ops.__file__).parent
PYPROJECT = Path(__file__).resolve().parents[1] / "pyproject.toml"
FAMILIES = (dandan_attention, dandan_gemm, dandan_norm, dandan_w4a16)


def test_every_operator_is_here_and_is_the_same_object() -> None:
    for family in FAMILIES:
        for name in family.__all__:
            assert getattr(dandan_ops, name) is getattr(family, name)
            assert name in dandan_ops.__all__
    assert dandan_ops.ExecutionInfo is backend.ExecutionInfo
    assert dandan_ops.BackendUnavailableError is backend.BackendUnavailableError
    assert all(hasattr(dandan_ops, name) for name in dandan_ops.__all__)


def test_version_is_the_packages_and_types_are_shipped() -> None:
    found = re.search(r'^version = "(.+)"$', PYPROJECT.read_text(encoding="utf-8"), re.MULTILINE)
    assert found is not None
    assert dandan_ops.__version__ == found.group(1)
    assert (FOLDER / "py.typed").is_file()


def test_import_has_no_side_effects() -> None:
    script = (
        "import sys, dandan_ops, torch\n"
        "assert not torch.cuda.is_initialized(), 'CUDA was initialised'\n"
        "for name in ('dandan_ops.demo', 'dandan_ops_core.benchmark', 'dandan_ops_core.build', 'torch._dynamo'):\n"
        "    assert name not in sys.modules, name\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_module_is_the_command() -> None:
    done = subprocess.run([sys.executable, "-m", "dandan_ops", "--help"], capture_output=True, text=True, check=False)
    assert done.returncode == 0
    assert "usage: dandan-ops" in done.stdout
    assert "demo" in done.stdout

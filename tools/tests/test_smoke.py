"""The smoke test fails where a package is broken: run on made-up packages."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SMOKE = Path(__file__).resolve().parent.parent / "smoke.py"
TORCH = """
class Tensor(list):
    def reshape(self, *shape):
        return self
def linspace(low, high, count):
    return Tensor([low, high])
class nn:
    class functional:
        @staticmethod
        def rms_norm(x, shape, weight, eps):
            return ["right"]
class testing:
    @staticmethod
    def assert_close(found, expected, **limits):
        assert found == expected, "wrong result"
"""
NORM = """
import types
__all__ = ["rms_norm", "elementwise_execution_info"]
def rms_norm(x, weight, eps):
    return ["right"]
def elementwise_execution_info(op, *arguments):
    return types.SimpleNamespace(backend="torch", reason="x is on cpu")
"""
LOADER = """
import types
def load(package):
    return types.SimpleNamespace(loaded=True, reason="", path="lib.so", build_info={"architectures": ["9.0a"]})
"""


def run(folder: Path, norm: str, loader: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    files = {
        "torch.py": TORCH,
        "dandan_norm.py": norm,
        "dandan_ops_core/__init__.py": "",
        "dandan_ops_core/loader.py": loader,
    }
    files["dandan_norm-0.1.0.dist-info/METADATA"] = "Metadata-Version: 2.1\nName: dandan-norm\nVersion: 0.1.0\n"
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    command = [sys.executable, str(SMOKE), "dandan_norm", *arguments]
    return subprocess.run(
        command, env={"PYTHONPATH": str(folder)}, capture_output=True, text=True, cwd=folder, check=False
    )


def test_a_good_package(tmp_path: Path) -> None:
    done = run(tmp_path, NORM, LOADER, "--library", "dandan_norm")
    assert done.returncode == 0, done.stderr
    assert "lib.so loaded, architectures 9.0a" in done.stdout
    assert "dandan_norm 0.1.0 works" in done.stdout


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('["right"]', '["wrong"]', "wrong result"),
        ('__all__ = ["rms_norm"', '__all__ = ["gone", "rms_norm"', "names what is not there: ['gone']"),
        ('reason="x is on cpu"', 'reason=""', "names no backend or no reason"),
        ("import types\n", "import types, nowhere\n", "No module named 'nowhere'"),
    ],
)
def test_a_broken_package(tmp_path: Path, old: str, new: str, message: str) -> None:
    assert old in NORM
    done = run(tmp_path, NORM.replace(old, new), LOADER)
    assert done.returncode != 0
    assert message in done.stderr


def test_a_library_that_does_not_load(tmp_path: Path) -> None:
    """The PyTorch backend hides it: everything else works."""
    loader = LOADER.replace("loaded=True", "loaded=False").replace('reason=""', 'reason="undefined symbol: x"')
    assert run(tmp_path, NORM, loader).returncode == 0
    done = run(tmp_path, NORM, loader, "--library", "dandan_norm")
    assert done.returncode != 0
    assert "dandan_norm: the compiled library did not load: undefined symbol: x" in done.stderr

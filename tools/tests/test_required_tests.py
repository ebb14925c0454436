"""The repository's conftest: GPU and library tests are skipped where they cannot run, or required."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

CONFTEST = Path(__file__).resolve().parent.parent.parent / "conftest.py"
TESTS = """
import pytest

@pytest.mark.gpu
def test_on_the_gpu():
    assert {gpu}

@pytest.mark.library
def test_of_the_library():
    pass

def test_elsewhere():
    pass
"""
TORCH = "class cuda:\n    @staticmethod\n    def is_available():\n        return {present}\n"
LOADER = (
    "import types\n"
    "def load(package):\n"
    "    assert package == 'dandan_norm'\n"
    "    return types.SimpleNamespace(loaded={present}, reason='not built')\n"
)


def run(
    folder: Path, *arguments: str, gpu: bool = False, library: bool = False, passes: bool = True
) -> tuple[int, str]:
    """Run the three tests in a made-up repository with a made-up torch and loader."""
    (folder / "conftest.py").write_text(CONFTEST.read_text(encoding="utf-8"))
    (folder / "pytest.ini").write_text("[pytest]\nmarkers =\n    gpu: x\n    library: x\n")
    tests = folder / "packages/dandan-norm/tests"
    core = folder / "site/dandan_ops_core"
    tests.mkdir(parents=True, exist_ok=True)
    core.mkdir(parents=True, exist_ok=True)
    (tests / "test_a.py").write_text(TESTS.format(gpu=passes))
    (folder / "site/torch.py").write_text(TORCH.format(present=gpu))
    (core / "__init__.py").write_text("")
    (core / "loader.py").write_text(LOADER.format(present=library))
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-rs", str(tests), *arguments]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, cwd=folder, env={"PYTHONPATH": str(folder / "site")}
    )
    return done.returncode, done.stdout


def test_skipped_with_a_reason_where_they_cannot_run(tmp_path: Path) -> None:
    code, words = run(tmp_path)
    assert code == 0
    assert "1 passed, 2 skipped" in words
    assert "no CUDA GPU is visible to torch" in words
    assert "the compiled library is not loaded: not built" in words


def test_run_where_they_can(tmp_path: Path) -> None:
    code, words = run(tmp_path, "--require-gpu", "--require-library", gpu=True, library=True)
    assert code == 0
    assert "3 passed" in words
    assert "tests marked gpu that ran and passed: 1" in words


@pytest.mark.parametrize(
    ("arguments", "gpu", "library", "passes"),
    [
        (["--require-gpu"], False, True, True),  # all skipped
        (["--require-library"], True, False, True),
        (["--require-gpu", "-k", "elsewhere"], True, True, True),  # none selected
        (["--require-gpu", "-k", "nothing"], True, True, True),
        (["--require-gpu"], True, True, False),  # the only one failed
        (["--require-any", "-k", "gpu"], False, True, True),
    ],
)
def test_absence_is_an_error_where_required(
    tmp_path: Path, arguments: list[str], gpu: bool, library: bool, passes: bool
) -> None:
    code, words = run(tmp_path, *arguments, gpu=gpu, library=library, passes=passes)
    assert code == 1, words
    assert "but no such test passed" in words

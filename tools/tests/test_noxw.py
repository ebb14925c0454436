"""noxw: makes, keeps and renews its environment; passes arguments and the exit code on."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).resolve().parent.parent / "noxw.py"


@pytest.fixture
def noxw() -> ModuleType:
    spec = importlib.util.spec_from_file_location("noxw", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_it_parses_on_old_pythons() -> None:
    """An old Python must reach the sentence that says which one is needed."""
    import ast

    ast.parse(SCRIPT.read_text(encoding="utf-8"), feature_version=(3, 6))


def test_old_python_is_a_sentence(
    noxw: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(noxw, "OLDEST_PYTHON", (99, 0))
    assert noxw.main([]) == 2
    assert "Python 3.10 or newer is needed" in capsys.readouterr().err


def fake_environment(noxw: ModuleType, home: Path) -> None:
    """An environment whose Python is this one and whose stamp is right."""
    python = noxw.environment_python(home)
    python.parent.mkdir(parents=True)
    python.write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
    python.chmod(0o755)
    (home / "stamp.json").write_text(json.dumps(noxw.wanted_stamp()))


@pytest.mark.skipif(sys.platform == "win32", reason="the stand-in Python is a shell script")
def test_usable_only_when_complete_and_of_this_pin(
    noxw: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "nox.py").write_text("")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    home = tmp_path / "home"
    assert not noxw.is_usable(home)
    fake_environment(noxw, home)
    assert noxw.is_usable(home)
    (tmp_path / "nox.py").write_text("raise ImportError")
    assert not noxw.is_usable(home)  # broken
    (tmp_path / "nox.py").write_text("")
    monkeypatch.setattr(noxw, "NOX", "nox==0.0.1")
    assert not noxw.is_usable(home)  # another pin
    monkeypatch.undo()
    (home / "stamp.json").write_text("{")
    assert not noxw.is_usable(home)  # a set-up that was broken off
    noxw.environment_python(home).unlink()
    assert not noxw.is_usable(home)


def test_missing_ensurepip_names_the_package(
    noxw: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = "The virtual environment was not created successfully because ensurepip is not available."
    answer = subprocess.CompletedProcess([], 1, stdout=words, stderr="")
    monkeypatch.setattr(noxw.subprocess, "run", lambda *args, **kwargs: answer)
    monkeypatch.setattr(noxw, "HOME", tmp_path / "home")
    assert noxw.main(["--list"]) == 2
    assert f"apt install python{sys.version_info[0]}.{sys.version_info[1]}-venv" in capsys.readouterr().err


@pytest.mark.skipif(sys.platform == "win32", reason="the stand-in Python is a shell script")
@pytest.mark.parametrize("code", [0, 3])
def test_arguments_and_exit_code_pass_through(tmp_path: Path, code: int) -> None:
    """In a copy of the repository's tools, with a nox that reports what it got."""
    tools = tmp_path / "tools"
    tools.mkdir()
    script = tools / "noxw.py"
    script.write_text(SCRIPT.read_text(encoding="utf-8"))
    (tmp_path / "nox.py").write_text(
        f"import sys\nif __name__ == '__main__':\n    print(sys.argv[1:])\n    sys.exit({code})\n"
    )
    spec = importlib.util.spec_from_file_location("noxw_copy", script)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    fake_environment(module, module.HOME)
    done = subprocess.run(
        [sys.executable, str(script), "-s", "build(dandan-norm)", "--", "-k", "a b"],
        capture_output=True,
        text=True,
        env={"PYTHONPATH": str(tmp_path), "PATH": "/usr/bin:/bin"},
        cwd="/",
        check=False,
    )
    expected = ["--noxfile", str(tmp_path / "noxfile.py"), "-s", "build(dandan-norm)", "--", "-k", "a b"]
    assert done.stdout.strip() == str(expected), done.stderr
    assert done.returncode == code

"""The noxfile has the sessions that the project promises, and knows every package. Read as text: nox is not needed."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
NOXFILE = (ROOT / "noxfile.py").read_text(encoding="utf-8")
TREE = ast.parse(NOXFILE)


def sessions() -> set[str]:
    """The names of the sessions: the function's, or what the decorator says."""
    found = set()
    for node in TREE.body:
        if not isinstance(node, ast.FunctionDef):
            continue
        for decorator in node.decorator_list:
            target = decorator.func if isinstance(decorator, ast.Call) else decorator
            if ast.unparse(target) != "nox.session":
                continue
            named = [word.value for word in getattr(decorator, "keywords", []) if word.arg == "name"]
            found.add(ast.literal_eval(named[0]) if named else node.name)
    return found


def packages() -> list[tuple[str, str, str]]:
    """(folder, import name, kind) of the PACKAGES list."""
    for node in TREE.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "PACKAGES":
            assert isinstance(node.value, ast.Tuple)
            return [tuple(ast.literal_eval(each) for each in call.args) for call in node.value.elts]  # type: ignore
    raise AssertionError("the noxfile has no PACKAGES")


@pytest.mark.parametrize(
    "name",
    [
        "demo",
        "test",
        "test-gpu",
        "build",
        "install-check",
        "lint",
        "typecheck",
        "docs",
        "bench",
        "sanitize",
        "abi",
        "lowest",
        "dev",
    ],
)
def test_session(name: str) -> None:
    assert name in sessions()


def test_every_package_is_listed() -> None:
    """A package that the noxfile does not know would be neither built nor tested."""
    found = {}
    for settings in ROOT.glob("packages/*/pyproject.toml"):
        match = re.search(r'^name = "(.+)"', settings.read_text(encoding="utf-8"), re.MULTILINE)
        assert match is not None
        found[settings.parent.name] = match[1]
    assert {folder: module.replace("_", "-") for folder, module, _ in packages()} == found


def test_dependency_order() -> None:
    order = [module.replace("_", "-") for _, module, _ in packages()]
    for folder, module, _ in packages():
        text = (ROOT / "packages" / folder / "pyproject.toml").read_text(encoding="utf-8")
        dependencies = re.search(r"^dependencies = \[(.*?)\]", text, re.MULTILINE | re.DOTALL)
        assert dependencies is not None
        for name in re.findall(r'"(dandan-[\w-]+?)>=', dependencies[1]):
            assert order.index(name) < order.index(module.replace("_", "-"))


def test_kinds() -> None:
    for folder, _, kind in packages():
        compiles = 'build-backend = "dandan_ops_core.build.backend"'
        settings = (ROOT / "packages" / folder / "pyproject.toml").read_text(encoding="utf-8")
        assert (kind == "operator") is (compiles in settings), folder
        if (ROOT / "packages" / folder / "csrc").is_dir():
            assert kind in ("operator", "python"), folder


def test_ci_calls_the_commands_of_the_readme() -> None:
    words = (ROOT / ".ci/run").read_text(encoding="utf-8")
    assert 'nox() { python3 tools/noxw.py "$@"; }' in words
    for name in re.findall(r"^step nox -s (.+)$", words, re.MULTILINE):
        assert set(name.split()) <= sessions()


def test_the_torch_of_the_cpu_sessions_is_pinned_in_one_place() -> None:
    places = [*ROOT.glob("packages/*/pyproject.toml"), *ROOT.glob(".github/workflows/*.yml"), ROOT / ".ci/run"]
    for path in places:
        assert "torch==" not in path.read_text(encoding="utf-8"), path
    assert re.findall(r'^TORCH = "[\d.]+"$', NOXFILE, re.MULTILINE)
    assert not re.findall(r'"torch==\d', NOXFILE)

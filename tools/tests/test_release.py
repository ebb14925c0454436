"""Tags, versions, changelogs and sibling ranges."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

PROJECT = (
    '[build-system]\nrequires = []\n\n[project]\nname = "{name}"\nversion = "{version}"\ndependencies = [{needs}]\n'
)


def write(root: Path, folder: str, name: str, version: str, needs: str = "", changes: str | None = None) -> None:
    path = root / "packages" / folder
    path.mkdir(parents=True, exist_ok=True)
    (path / "pyproject.toml").write_text(PROJECT.format(name=name, version=version, needs=needs))
    if changes is None:
        changes = f"# Changelog\n\n## {version}\n\n- Something.\n\n## 0.0.1\n\n- Old.\n"
    (path / "CHANGELOG.md").write_text(changes)


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    write(tmp_path, "dandan-core", "dandan-ops-core", "0.1.2")
    write(tmp_path, "dandan-norm", "dandan-norm", "0.1.0", '"torch>=2.9", "dandan-ops-core>=0.1,<0.2"')
    return tmp_path


def test_good_tags(tool: Callable[[str], ModuleType], tree: Path) -> None:
    release = tool("release")
    assert release.check_tag("dandan-norm-v0.1.0", tree).folder.name == "dandan-norm"
    package = release.check_tag("dandan-ops-core-v0.1.2", tree)
    assert package.folder.name == "dandan-core"
    assert release.notes(package) == "- Something."


@pytest.mark.parametrize(
    ("tag", "message"),
    [
        ("v0.1.0", "is no release tag"),
        ("dandan-norm-0.1.0", "is no release tag"),
        ("dandan-norm-v0.1.1", "has version 0.1.0"),
        ("dandan-core-v0.1.2", "names no package of this tree"),  # the folder, not the distribution
        ("dandan-gemm-v0.1.0", "names no package of this tree"),
    ],
)
def test_bad_tags(tool: Callable[[str], ModuleType], tree: Path, tag: str, message: str) -> None:
    release = tool("release")
    with pytest.raises(release.ReleaseError, match=message):
        release.check_tag(tag, tree)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ("# Changelog\n\n## 0.0.9\n\n- Old.\n", "has no section '## 0.1.0'"),
        ("# Changelog\n\n## 0.1.0rc1\n\n- Early.\n", "has no section '## 0.1.0'"),
        ("# Changelog\n\n## 0.1.0\n\n## 0.0.9\n\n- Old.\n", "says nothing under '## 0.1.0'"),
    ],
)
def test_changelog(tool: Callable[[str], ModuleType], tree: Path, changes: str, message: str) -> None:
    write(tree, "dandan-norm", "dandan-norm", "0.1.0", changes=changes)
    release = tool("release")
    with pytest.raises(release.ReleaseError, match=message):
        release.check_tag("dandan-norm-v0.1.0", tree)


def test_the_version_must_be_static(tool: Callable[[str], ModuleType], tree: Path) -> None:
    (tree / "packages/dandan-norm/pyproject.toml").write_text(
        '[project]\nname = "dandan-norm"\ndynamic = ["version"]\n'
    )
    release = tool("release")
    with pytest.raises(release.ReleaseError, match="no static name and version"):
        release.check_tag("dandan-norm-v0.1.0", tree)


def test_a_sibling_outside_the_range(tool: Callable[[str], ModuleType], tree: Path) -> None:
    write(tree, "dandan-core", "dandan-ops-core", "0.2.0")
    release = tool("release")
    with pytest.raises(
        release.ReleaseError, match=r"needs dandan-ops-core>=0\.1,<0\.2, but dandan-ops-core here is 0\.2\.0"
    ):
        release.check_tag("dandan-norm-v0.1.0", tree)

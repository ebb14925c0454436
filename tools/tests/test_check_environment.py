"""What passes as built from this tree, on made-up installations."""

from __future__ import annotations

import json
import zipfile
from collections.abc import Callable
from importlib.metadata import Distribution, distributions
from pathlib import Path
from types import ModuleType

import pytest

SOURCE = "VALUE = 1\n"


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    root = tmp_path / "tree"
    package = root / "packages/dandan-norm"
    (package / "src/dandan_norm").mkdir(parents=True)
    (package / "pyproject.toml").write_text('[project]\nname = "dandan-norm"\n')
    (package / "src/dandan_norm/__init__.py").write_text(SOURCE)
    return root


def install(site: Path, name: str, content: str = SOURCE, direct_url: dict[str, object] | None = None) -> None:
    module = name.replace("-", "_")
    meta = site / f"{module}-0.1.0.dist-info"
    meta.mkdir(parents=True)
    (meta / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 0.1.0\n")
    record = [f"{module}-0.1.0.dist-info/METADATA,,"]
    if direct_url is None:
        (site / module).mkdir()
        (site / module / "__init__.py").write_text(content)
        record.append(f"{module}/__init__.py,,")
    else:
        (meta / "direct_url.json").write_text(json.dumps(direct_url))
    (meta / "RECORD").write_text("\n".join(record))


def installed(site: Path) -> list[Distribution]:
    return list(distributions(path=[str(site)]))


def check(
    tool: Callable[[str], ModuleType], tree: Path, site: Path, dist: Path | None = None, expect: str = ""
) -> list[str]:
    found: list[str] = tool("check_environment").check(installed(site), tree, dist, expect.split())
    return found


def test_an_install_of_these_sources_passes(tool: Callable[[str], ModuleType], tree: Path, tmp_path: Path) -> None:
    install(tmp_path / "site", "dandan-norm")
    install(tmp_path / "site", "unrelated", "other")
    assert check(tool, tree, tmp_path / "site", expect="dandan-norm") == []


def test_other_sources_fail(tool: Callable[[str], ModuleType], tree: Path, tmp_path: Path) -> None:
    install(tmp_path / "site", "dandan-norm", "VALUE = 2\n")
    assert "dandan_norm/__init__.py is not the one in" in check(tool, tree, tmp_path / "site")[0]


def test_a_strangers_package_fails(tool: Callable[[str], ModuleType], tree: Path, tmp_path: Path) -> None:
    install(tmp_path / "site", "dandan-core")
    (problem,) = check(tool, tree, tmp_path / "site")
    assert problem == "dandan-core 0.1.0 is installed, but this tree has no such package"


def test_a_missing_package_fails(tool: Callable[[str], ModuleType], tree: Path, tmp_path: Path) -> None:
    (tmp_path / "site").mkdir()
    assert check(tool, tree, tmp_path / "site", expect="dandan-norm") == ["dandan-norm is not installed"]


def test_editable_installs(tool: Callable[[str], ModuleType], tree: Path, tmp_path: Path) -> None:
    ours, theirs = tree / "packages/dandan-norm", tmp_path / "another tree"
    for site, folder, good in (("a", ours, True), ("b", theirs, False)):
        url = {"url": folder.as_uri(), "dir_info": {"editable": True}}
        install(tmp_path / site, "dandan-norm", direct_url=url)
        assert (check(tool, tree, tmp_path / site) == []) is good


def test_the_tree_itself_on_the_path(tool: Callable[[str], ModuleType], tree: Path) -> None:
    """An editable install leaves metadata beside the sources, of files as the sdist has them."""
    sources = tree / "packages/dandan-norm/src"
    meta = sources / "dandan_norm.egg-info"
    meta.mkdir()
    (meta / "PKG-INFO").write_text("Metadata-Version: 2.1\nName: dandan-norm\nVersion: 0.1.0\n")
    (meta / "SOURCES.txt").write_text("CHANGELOG.md\nsrc/dandan_norm/__init__.py\n")
    assert check(tool, tree, sources, expect="dandan-norm") == []


def test_against_wheels(tool: Callable[[str], ModuleType], tree: Path, tmp_path: Path) -> None:
    dist = tmp_path / "dist"
    dist.mkdir()
    install(tmp_path / "site", "dandan-norm", "BUILT = 1\n")
    assert "is not what a wheel" in check(tool, tree, tmp_path / "site", dist)[0]
    with zipfile.ZipFile(dist / "dandan_norm-0.1.0-py3-none-any.whl", "w") as archive:
        archive.writestr("dandan_norm/__init__.py", "BUILT = 1\n")
        archive.writestr("dandan_norm-0.1.0.dist-info/METADATA", "")
    assert check(tool, tree, tmp_path / "site", dist) == []
    (tmp_path / "site/dandan_norm/__init__.py").write_text("BUILT = 2\n")
    assert "is not what a wheel" in check(tool, tree, tmp_path / "site", dist)[0]

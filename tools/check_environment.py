#!/usr/bin/env python3
"""Fail when the environment that runs this holds a dandan package that was not built from this tree.

    python tools/check_environment.py [--dist dist] [--expect dandan-norm ...]

Several names of this project's kind belong to strangers on the package index, and pip may prefer those. A package
passes when its name is one of this tree's and either all its Python files are byte for byte those of packages/*/src,
or (an editable install) it points there, or it is exactly a wheel in --dist.
"""

from __future__ import annotations

import argparse
import base64
import hashlib
import json
import re
import zipfile
from collections.abc import Iterable
from importlib.metadata import Distribution, distributions
from pathlib import Path
from urllib.parse import unquote, urlparse
from urllib.request import url2pathname

ROOT = Path(__file__).resolve().parent.parent


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def tree_packages(root: Path) -> dict[str, Path]:
    """Distribution name -> folder, of every package in the tree."""
    found = {}
    for settings in sorted(root.glob("packages/*/pyproject.toml")):
        match = re.search(r'^name = "([^"]+)"', settings.read_text(encoding="utf-8"), re.MULTILINE)
        if match:
            found[canonical(match[1])] = settings.parent
    return found


def digest(content: bytes) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()


def wheel_digests(wheel: Path) -> dict[str, str]:
    """Path -> sha256 of the files in a wheel, without its metadata folder (pip adds to that)."""
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if ".dist-info/" not in name]
        return {name: digest(archive.read(name)) for name in names}


def installed_digests(package: Distribution) -> dict[str, str]:
    """Path -> sha256 of the installed files that lie in a package folder; compiled Python and metadata left out."""
    found = {}
    for entry in package.files or ():
        path = entry.as_posix()
        if ".dist-info/" in path or "__pycache__/" in path or path.startswith(".."):
            continue
        found[path] = digest(Path(str(entry.locate())).read_bytes())
    return found


def editable_folder(package: Distribution) -> Path | None:
    """Where an editable install points, or None."""
    text = package.read_text("direct_url.json")
    record = json.loads(text) if text else {}
    if not record.get("dir_info", {}).get("editable"):
        return None
    return Path(url2pathname(unquote(urlparse(record["url"]).path)))


def problem_of(package: Distribution, tree: dict[str, Path], dist: Path | None) -> str | None:
    """Why this installed package is not of this tree, or None."""
    name = canonical(package.metadata["Name"])
    shown = f"{name} {package.version}"
    if name not in tree:
        return f"{shown} is installed, but this tree has no such package"
    if Path(str(package.locate_file(""))).resolve() == (tree[name] / "src").resolve():
        return None  # the tree itself is on the path
    folder = editable_folder(package)
    if folder is not None:
        same = folder.resolve() == tree[name].resolve()
        return None if same else f"{shown} is an editable install of {folder}, not of {tree[name]}"
    installed = installed_digests(package)
    if not installed:
        return f"{shown} is installed without any file"
    if dist is not None:
        prefix = f"{name.replace('-', '_')}-{package.version}-"
        wheels = sorted(dist.glob(f"{prefix}*.whl"))
        if not any(wheel_digests(wheel) == installed for wheel in wheels):
            return f"{shown} is not what a wheel {prefix}*.whl in {dist} holds"
        return None
    sources = tree[name] / "src"
    for path, value in installed.items():
        if path.endswith(".py"):
            source = sources / path
            if not source.is_file() or digest(source.read_bytes()) != value:
                return f"{shown}: the installed {path} is not the one in {sources}"
    return None


def check(packages: Iterable[Distribution], root: Path, dist: Path | None, expected: Iterable[str]) -> list[str]:
    """All problems of an environment; `expected` names must be installed."""
    tree = tree_packages(root)
    ours = [package for package in packages if canonical(package.metadata["Name"]).startswith("dandan")]
    problems = [problem for package in ours if (problem := problem_of(package, tree, dist))]
    missing = {canonical(name) for name in expected} - {canonical(package.metadata["Name"]) for package in ours}
    problems += [f"{name} is not installed" for name in sorted(missing)]
    return problems


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dist", type=Path, help="compare with the wheels in this folder")
    parser.add_argument("--expect", nargs="*", default=[], help="packages that must be there")
    arguments = parser.parse_args()
    problems = check(distributions(), ROOT, arguments.dist, arguments.expect)
    if problems:
        raise SystemExit("\n".join(f"error: {problem}" for problem in problems))
    print("every dandan package here is built from this tree")


if __name__ == "__main__":
    main()

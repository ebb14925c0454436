#!/usr/bin/env python3
"""Check what a release needs. Each package has its own version, CHANGELOG and tags (dandan-norm-v0.1.0).

python tools/release.py --check                    every package: static version, its section in CHANGELOG.md
python tools/release.py --tag dandan-norm-v0.1.0   the same for one tag; prints the package's folder
python tools/release.py --notes dandan-norm-v0.1.0 prints the section for the release page
"""

from __future__ import annotations

import argparse
import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VERSION = re.compile(r"\d+\.\d+\.\d+((a|b|rc)\d+)?(\.post\d+)?")


class ReleaseError(Exception):
    """Something that a release needs is missing; the message says what."""


@dataclass(frozen=True)
class Package:
    folder: Path
    distribution: str
    version: str

    @property
    def tag(self) -> str:
        return f"{self.distribution}-v{self.version}"


def read_package(folder: Path) -> Package:
    """Name and static version from pyproject.toml. Raises ReleaseError."""
    text = (folder / "pyproject.toml").read_text(encoding="utf-8")
    project = re.search(r"^\[project\]\n(.*?)(?=^\[|\Z)", text, re.MULTILINE | re.DOTALL)
    fields = dict(re.findall(r'^(name|version) = "([^"]*)"', project[1], re.MULTILINE)) if project else {}
    if "name" not in fields or not VERSION.fullmatch(fields.get("version", "")):
        raise ReleaseError(f"{folder.name}/pyproject.toml has no static name and version")
    return Package(folder, fields["name"], fields["version"])


def notes(package: Package) -> str:
    """The section of this version in CHANGELOG.md. Raises ReleaseError where it is missing or empty."""
    path = package.folder / "CHANGELOG.md"
    if not path.is_file():
        raise ReleaseError(f"{package.folder.name} has no CHANGELOG.md")
    text = path.read_text(encoding="utf-8")
    heading = rf"^## \[?v?{re.escape(package.version)}\]?(?![\w.])[^\n]*\n"
    match = re.search(heading + r"(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL)
    if match is None:
        raise ReleaseError(f"{package.folder.name}/CHANGELOG.md has no section '## {package.version}'")
    if not match[1].strip():
        raise ReleaseError(f"{package.folder.name}/CHANGELOG.md says nothing under '## {package.version}'")
    return match[1].strip()


def all_packages(root: Path) -> list[Package]:
    found = [read_package(path.parent) for path in sorted(root.glob("packages/*/pyproject.toml"))]
    if not found:
        raise ReleaseError(f"no package under {root / 'packages'}")
    return found


def check_siblings(packages: list[Package], root: Path) -> None:
    """Each declared range of a package of ours admits that package's present version. Raises ReleaseError."""
    versions = {package.distribution: package.version for package in packages}
    for package in packages:
        text = (package.folder / "pyproject.toml").read_text(encoding="utf-8")
        for name, low, high in re.findall(r'"(dandan-[\w-]+)>=([\d.]+),<([\d.]+)"', text):
            version = numbers(versions.get(name, ""))
            if not version or not numbers(low) <= version < numbers(high):
                found = versions.get(name, "missing")
                raise ReleaseError(f"{package.distribution} needs {name}>={low},<{high}, but {name} here is {found}")


def numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version)[:3])


def check_tag(tag: str, root: Path) -> Package:
    """The package of a tag, with everything checked. Raises ReleaseError."""
    packages = all_packages(root)
    match = re.fullmatch(r"(?P<name>[\w-]+)-v(?P<version>[\w.]+)", tag)
    if match is None:
        raise ReleaseError(f"{tag!r} is no release tag; the form is dandan-norm-v0.1.0")
    package = next((package for package in packages if package.distribution == match["name"]), None)
    if package is None:
        known = ", ".join(package.distribution for package in packages)
        raise ReleaseError(f"{tag!r} names no package of this tree ({known})")
    if package.version != match["version"]:
        raise ReleaseError(
            f"{tag!r} does not fit {package.folder.name}/pyproject.toml, which has version {package.version}"
        )
    notes(package)
    check_siblings(packages, root)
    return package


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    choice = parser.add_mutually_exclusive_group(required=True)
    choice.add_argument("--check", action="store_true")
    choice.add_argument("--tag")
    choice.add_argument("--notes")
    arguments = parser.parse_args()
    try:
        if arguments.check:
            packages = all_packages(ROOT)
            for package in packages:
                check_tag(package.tag, ROOT)
            print("ready for their tags: " + ", ".join(package.tag for package in packages))
        elif arguments.tag:
            print(check_tag(arguments.tag, ROOT).folder.name)
        else:
            print(notes(check_tag(arguments.notes, ROOT)))
    except ReleaseError as error:
        raise SystemExit(f"error: {error}") from None


if __name__ == "__main__":
    main()

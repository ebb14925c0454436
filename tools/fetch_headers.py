#!/usr/bin/env python3
"""Fetch the C++ headers of one torch version into a folder, out of the smallest wheel that has them.

    python tools/fetch_headers.py 2.9.1 .nox/torch-headers      prints the include folder

The headers of torch's stable ABI are the same in the wheels of every platform; the macOS wheel has no CUDA libraries
and is about a twentieth of the Linux one. What is there already is not fetched again.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

PLATFORMS = ("macosx_11_0_arm64", "macosx_12_0_arm64", "macosx_13_0_arm64", "macosx_14_0_arm64", "macosx_15_0_arm64")


def extract(wheel: Path, target: Path) -> Path:
    """Unpack torch/include of a wheel into `target`, all or nothing; return the include folder."""
    partial = target.with_name(f"{target.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    with zipfile.ZipFile(wheel) as archive:
        members = [name for name in archive.namelist() if name.startswith("torch/include/")]
        if "torch/include/torch/csrc/stable/library.h" not in members:
            raise SystemExit(f"{wheel.name} has no torch/csrc/stable/library.h; torch 2.9 or newer is needed.")
        archive.extractall(partial, members)
    shutil.rmtree(target, ignore_errors=True)
    partial.rename(target)
    return target / "torch" / "include"


def fetch(version: str, cache: Path) -> Path:
    """The include folder of this torch version under `cache`, fetched if need be."""
    target = cache / version
    include = target / "torch" / "include"
    if include.is_dir():
        return include
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache) as folder:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
        command += ["--only-binary=:all:", "--python-version=3.12", "--dest", folder]
        command += [f"--platform={platform}" for platform in PLATFORMS]
        if subprocess.run([*command, f"torch=={version}"], check=False).returncode != 0:
            raise SystemExit(f"pip could not download a wheel of torch {version} (see above).")
        return extract(next(Path(folder).glob("torch-*.whl")), target)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("version")
    parser.add_argument("cache", type=Path)
    arguments = parser.parse_args()
    print(fetch(arguments.version, arguments.cache))


if __name__ == "__main__":
    main()

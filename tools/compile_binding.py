#!/usr/bin/env python3
"""Compile a package's bindings.cpp against the headers of other torch versions than the installed one.

    python tools/compile_binding.py packages/dandan-norm INCLUDE [INCLUDE ...]

Only compiles, with the flags of the real build; needs g++ and a CUDA toolkit's headers, and dandan_ops_core installed.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import tempfile
from pathlib import Path

from dandan_ops_core.build.arch import DEFAULT_PTX, DEFAULT_SASS, ArchList
from dandan_ops_core.build.decide import find_cxx
from dandan_ops_core.build.errors import BuildError
from dandan_ops_core.build.fingerprint import default_include_root
from dandan_ops_core.build.plan import BuildInputs, make_plan
from dandan_ops_core.build.toolkit import Torch, find_toolkit, header_version


def compile_binding(package: Path, include: Path, folder: Path) -> None:
    """Compile; raises BuildError where a tool is missing or the compiler refuses."""
    package = package.resolve()
    toolkit = find_toolkit(os.environ)
    if isinstance(toolkit, str):
        raise BuildError(toolkit)
    cxx = find_cxx(os.environ, "Linux")
    if cxx is None:
        raise BuildError("no C++ compiler was found; install g++ or set CXX.")
    version = header_version(include)
    plan = make_plan(
        BuildInputs(
            system="Linux",
            name=package.name.replace("-", "_"),
            package_dir=str(package),
            csrc=str(package / "csrc"),
            sources=("bindings.cpp",),
            include_root=str(default_include_root()),
            build_dir=str(folder),
            toolkit=toolkit,
            torch=Torch(str(include), None, version),
            archs=ArchList(DEFAULT_SASS, DEFAULT_PTX, "the default list"),
            cxx=cxx,
        )
    )
    Path(plan.config_path).write_text(plan.config_text, encoding="utf-8")
    step = next(step for step in plan.steps if step.kind == "cxx")
    done = subprocess.run(step.command, check=False)
    if done.returncode != 0 or not Path(step.output).is_file():
        raise BuildError(f"{package.name}: bindings.cpp does not compile against the headers of torch {version}.")
    print(f"{package.name}: bindings.cpp compiles against the headers of torch {version}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("package", type=Path)
    parser.add_argument("include", type=Path, nargs="+")
    arguments = parser.parse_args()
    try:
        for include in arguments.include:
            with tempfile.TemporaryDirectory() as folder:
                compile_binding(arguments.package, include, Path(folder))
    except BuildError as error:
        raise SystemExit(f"error: {error}") from None


if __name__ == "__main__":
    main()

"""Build a package's library in place, without pip: python -m dandan_ops_core.build packages/dandan-norm

The library and its _build_info.json land in src/<package>, where a checkout on PYTHONPATH finds them.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
from pathlib import Path

from .decide import decide
from .errors import BuildError
from .fingerprint import fingerprints
from .library import INFO_NAME, build, default_build_dir
from .plan import library_name
from .toolkit import find_toolkit


def main() -> None:
    """The command line: builds the named packages in place; exits with a sentence where it cannot."""
    parser = argparse.ArgumentParser(prog="python -m dandan_ops_core.build", description=__doc__)
    parser.add_argument("package", type=Path, nargs="+", help="folder of a CUDA operator package")
    parser.add_argument(
        "--reuse",
        action="store_true",
        help="without a CUDA toolkit keep the library that is there, if its kernels are these",
    )
    parser.add_argument("--out", type=Path, help="leave the library in OUT/<package> instead; src/ stays as it is")
    arguments = parser.parse_args()
    try:
        for folder in arguments.package:
            if arguments.reuse and isinstance(reason := find_toolkit(os.environ), str):
                check_in_place(folder.resolve(), reason)
            else:
                build_one(folder.resolve(), arguments.out)
    except BuildError as error:
        raise SystemExit(f"error: {error}") from None


def check_in_place(folder: Path, reason: str) -> None:
    """Raise BuildError unless src/<package> has a library built from the kernels of this tree."""
    name = folder.name.replace("-", "_")
    library = folder / "src" / name / library_name(name, platform.system())
    record = library.with_name(INFO_NAME)
    if not library.is_file() or not record.is_file():
        raise BuildError(
            f"{folder.name} has no compiled library in {library.parent}, and it cannot be built: {reason}."
        )
    if json.loads(record.read_text(encoding="utf-8"))["fingerprints"] != fingerprints(folder / "csrc"):
        raise BuildError(
            f"{library} was built from other kernels than this tree's, and it cannot be rebuilt: {reason}."
        )
    print(f"{folder.name}: using {library}, built from the kernels of this tree")


def build_one(folder: Path, out: Path | None) -> None:
    """Build one package's library into src/<package>, or into `out`/<package>."""
    settings = folder / "pyproject.toml"
    if not settings.is_file() or not (folder / "csrc").is_dir():
        raise BuildError(f"{folder} is no CUDA operator package: it has no pyproject.toml or no csrc.")
    text = settings.read_text(encoding="utf-8")
    found = [re.search(rf'^{key} = "([^"]+)"', text, re.MULTILINE) for key in ("name", "version")]
    if found[0] is None or found[1] is None:
        raise BuildError(f"{settings} has no static name and version.")
    distribution, version = found[0][1], found[1][1]
    name = distribution.replace("-", "_")
    out_dir = (out or folder / "src") / name
    library = build(name, distribution, version, folder, out_dir, default_build_dir(folder), decide())
    if library is not None:
        print(library)


if __name__ == "__main__":
    main()

"""Build a package's library in place, without pip: python -m dandan_ops_core.build packages/dandan-norm

The library and its _build_info.json land in src/<package>, where a checkout on PYTHONPATH finds them.
"""

from __future__ import annotations

import argparse
import re
from pathlib import Path

from .decide import decide
from .errors import BuildError
from .library import build, default_build_dir


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m dandan_ops_core.build", description=__doc__)
    parser.add_argument("package", type=Path, nargs="+", help="folder of a CUDA operator package")
    arguments = parser.parse_args()
    try:
        for folder in arguments.package:
            build_in_place(folder.resolve())
    except BuildError as error:
        raise SystemExit(f"error: {error}") from None


def build_in_place(folder: Path) -> None:
    settings = folder / "pyproject.toml"
    if not settings.is_file() or not (folder / "csrc").is_dir():
        raise BuildError(f"{folder} is no CUDA operator package: it has no pyproject.toml or no csrc.")
    text = settings.read_text(encoding="utf-8")
    found = [re.search(rf'^{key} = "([^"]+)"', text, re.MULTILINE) for key in ("name", "version")]
    if found[0] is None or found[1] is None:
        raise BuildError(f"{settings} has no static name and version.")
    distribution, version = found[0][1], found[1][1]
    name = distribution.replace("-", "_")
    library = build(name, distribution, version, folder, folder / "src" / name, default_build_dir(folder), decide())
    if library is not None:
        print(library)


if __name__ == "__main__":
    main()

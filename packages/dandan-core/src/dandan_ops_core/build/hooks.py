"""The setuptools side: build the library with the package, tag the wheel, keep the commit in the sdist."""

from __future__ import annotations

import platform
import shutil
import sys
from pathlib import Path
from typing import Any

import setuptools
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py
from setuptools.command.sdist import sdist
from setuptools.dist import Distribution

from .decide import Decision, decide
from .elf import library_tag
from .errors import BuildError
from .library import COMMIT_FILE, INFO_NAME, build, commit_of, default_build_dir
from .plan import library_name


def wheel_platform(library: Path, bdist_platform: str) -> tuple[str, str]:
    """The platform tag for a wheel with this library, and the reason. On Windows the one that setuptools gives."""
    if platform.system() == "Linux":
        return library_tag(library, platform.machine())
    return bdist_platform, "the platform of this Python"


def commands(name: str, decision: Decision) -> dict[str, type[setuptools.Command]]:
    """The command classes for one package."""
    package_dir = Path.cwd()

    class BuildPy(build_py):
        """Also builds the library: into the source folder for an editable install, else into the build folder."""

        def run(self) -> None:
            out_dir = package_dir / "src" / name if self.editable_mode else Path(self.build_lib) / name
            if not self.editable_mode and out_dir.exists():
                shutil.rmtree(out_dir)  # a build of another day may have left a library there
            super().run()
            metadata = self.distribution.metadata
            build(
                name=name,
                distribution=str(metadata.get_name()),
                version=str(metadata.get_version()),
                package_dir=package_dir,
                out_dir=out_dir,
                build_dir=default_build_dir(package_dir),
                decision=decision,
            )

        def get_outputs(self, include_bytecode: bool = True) -> list[str]:
            out_dir = Path(self.build_lib) / name
            made = [out_dir / INFO_NAME]
            if decision.cuda:
                made.append(out_dir / library_name(name, platform.system()))
            return [*super().get_outputs(include_bytecode), *(str(path) for path in made)]

    class BdistWheel(bdist_wheel):
        """py3-none-any without CUDA, py3-none-<platform> with it: no CPython symbol is used."""

        def finalize_options(self) -> None:
            super().finalize_options()
            self.root_is_pure = not decision.cuda

        def get_tag(self) -> tuple[str, str, str]:
            if not decision.cuda:
                return "py3", "none", "any"
            plain = super().get_tag()[2]
            library = Path(self.get_finalized_command("build_py").build_lib) / name
            library /= library_name(name, platform.system())
            if not library.is_file():  # asked before the build, for the metadata alone
                return "py3", "none", plain
            tag, reason = wheel_platform(library, plain)
            print(f"{self.distribution.metadata.get_name()}: wheel tag py3-none-{tag} ({reason})", flush=True)
            return "py3", "none", tag

    class Sdist(sdist):
        """Adds the commit that it is made from, which a build from it records."""

        def make_release_tree(self, base_dir: str, files: Any) -> None:
            commit = commit_of(package_dir)  # before the release tree lies there and makes the checkout look changed
            super().make_release_tree(base_dir, files)
            (Path(base_dir) / COMMIT_FILE).write_text(commit + "\n", encoding="utf-8")

    return {"build_py": BuildPy, "bdist_wheel": BdistWheel, "sdist": Sdist}


def cuda_package(name: str) -> None:
    """Call setuptools.setup() for the CUDA operator package in the current folder; the whole of its setup.py.

    `name` is the import name. The CUDA part is built by DANDAN_BUILD_CUDA, see dandan_ops_core.build. Ends with a
    sentence, not a traceback, where it cannot be.
    """
    try:
        # An sdist or the metadata need no compiler, and must not fail for the lack of one.
        building = {"bdist_wheel", "editable_wheel", "build", "build_py", "install", "develop"}
        builds = not building.isdisjoint(sys.argv)
        decision = decide() if builds else Decision("metadata only")

        class CudaDistribution(Distribution):
            def has_ext_modules(self) -> bool:  # files go to the platform's folder
                return decision.cuda

        setuptools.setup(distclass=CudaDistribution, cmdclass=commands(name, decision))
    except BuildError as error:
        raise SystemExit(f"error: {error}") from None

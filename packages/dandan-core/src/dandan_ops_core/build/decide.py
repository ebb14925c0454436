"""Whether the CUDA part is built: DANDAN_BUILD_CUDA, what the machine has, and the reason."""

from __future__ import annotations

import os
import platform
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from . import arch, windows
from .arch import ArchList
from .errors import BuildError
from .toolkit import Toolkit, find_toolkit


@dataclass(frozen=True)
class Decision:
    """`toolkit`, `archs` and `cxx` are set where the CUDA part is built, `reason` where it is not."""

    reason: str | None
    toolkit: Toolkit | None = None
    archs: ArchList | None = None
    cxx: str = ""

    @property
    def cuda(self) -> bool:
        """Whether the CUDA part is built."""
        return self.toolkit is not None and self.archs is not None


def build_mode(environ: Mapping[str, str]) -> str:
    """DANDAN_BUILD_CUDA: "auto" (default), "1" (must) or "0" (never). Raises BuildError for anything else."""
    text = environ.get("DANDAN_BUILD_CUDA", "").strip().lower() or "auto"
    if text not in ("auto", "0", "1"):
        raise BuildError(f"DANDAN_BUILD_CUDA is {text!r}; it must be auto, 1 or 0.")
    return text


def find_cxx(environ: Mapping[str, str], system: str) -> str | None:
    """The host compiler: CXX, else g++, c++ or clang++ (Linux); cl.exe (Windows, where its environment has it)."""
    if system == "Windows":
        return "cl.exe"
    explicit = environ.get("CXX", "").strip()
    for name in (explicit,) if explicit else ("g++", "c++", "clang++"):
        found = shutil.which(name, path=environ.get("PATH"))
        if found:
            return found
    return None


def decide(
    environ: Mapping[str, str] | None = None,
    *,
    system: str | None = None,
    toolkit: Callable[[Mapping[str, str], str], Toolkit | str] = find_toolkit,
    capabilities: Callable[[], tuple[tuple[int, int], ...]] = arch.visible_capabilities,
    cxx: Callable[[Mapping[str, str], str], str | None] = find_cxx,
) -> Decision:
    """Decide. Raises BuildError where the CUDA part is ordered (1) and cannot be built, or a variable has a bad value.

    `auto` builds where a toolkit and a host compiler are found and there is a GPU or TORCH_CUDA_ARCH_LIST.
    """
    environ = os.environ if environ is None else environ
    system = system or platform.system()
    mode = build_mode(environ)
    if mode == "0":
        return Decision("DANDAN_BUILD_CUDA=0")
    must = mode == "1"

    def no(reason: str, help_: str) -> Decision:
        if must:
            raise BuildError(f"DANDAN_BUILD_CUDA=1, but {reason}; {help_}")
        return Decision(reason)

    if system not in ("Linux", "Windows"):
        return no(f"CUDA is not available on {system}", "build on Linux or Windows.")
    found = toolkit(environ, system)
    if isinstance(found, str):
        return no(found, "install one, or set DANDAN_CUDA_HOME to the folder that holds its bin/nvcc.")
    host = cxx(environ, system)
    if host is None:
        return no("no C++ compiler was found", "install g++ or set CXX.")
    if system == "Windows" and not must:
        try:
            windows.compiler_environment(environ)
        except BuildError as error:
            return Decision(str(error))
    has_list = bool(environ.get("TORCH_CUDA_ARCH_LIST", "").strip())
    gpus = () if has_list else capabilities()
    if not must and not has_list:
        if not gpus:
            return Decision("no GPU was visible at build time and TORCH_CUDA_ARCH_LIST was not set")
        if all(major < 8 for major, _ in gpus):
            return Decision("the visible GPUs are older than architecture 8.0")
    return Decision(None, found, arch.choose_archs(environ, gpus, found.version), host)


def build_requirements(environ: Mapping[str, str] | None = None) -> list[str]:
    """What an isolated build environment needs beyond pyproject.toml: torch and ninja, and only where CUDA is built."""
    environ = os.environ if environ is None else environ
    if not decide(environ).cuda:
        return []
    needs = ["ninja>=1.10"]
    if not environ.get("DANDAN_TORCH_INCLUDE", "").strip():
        needs.append("torch>=2.9")
    return needs

"""Finding a CUDA toolkit and torch's headers."""

from __future__ import annotations

import importlib.util
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from .errors import BuildError

OLDEST_TOOLKIT = (12, 0)
_RELEASE = re.compile(r"release (\d+)\.(\d+)")


@dataclass(frozen=True)
class Toolkit:
    """A CUDA toolkit. `library` is the folder of the static runtime, `source` says how it was found."""

    home: str
    nvcc: str
    version: tuple[int, int]
    include: str
    library: str
    source: str

    @property
    def version_text(self) -> str:
        """The version as text, such as "13.0"."""
        return f"{self.version[0]}.{self.version[1]}"

    @property
    def driver_floor(self) -> int:
        """Lowest CUDA driver API version that runs this build: by minor-version compatibility, the major release's."""
        return self.version[0] * 1000


@dataclass(frozen=True)
class Torch:
    """Where torch's headers are, and its libraries (None: headers only)."""

    include: str
    library: str | None
    version: str


def parse_nvcc_version(text: str) -> tuple[int, int] | None:
    """(13, 0) from what `nvcc --version` prints; None where no release is named."""
    match = _RELEASE.search(text)
    return (int(match[1]), int(match[2])) if match else None


def _ask_nvcc(nvcc: Path) -> str:
    try:
        return subprocess.run([str(nvcc), "--version"], capture_output=True, text=True, timeout=60, check=False).stdout
    except (OSError, subprocess.TimeoutExpired):
        return ""


def nvcc_name(system: str) -> str:
    """File name of nvcc on a system ("Linux" or "Windows")."""
    return "nvcc.exe" if system == "Windows" else "nvcc"


def static_runtime_name(system: str) -> str:
    """File name of the static CUDA runtime on a system ("Linux" or "Windows")."""
    return "cudart_static.lib" if system == "Windows" else "libcudart_static.a"


def _library_folders(system: str, machine: str) -> Sequence[str]:
    if system == "Windows":
        return ("lib/x64", "lib")
    target = "sbsa-linux" if machine == "aarch64" else f"{machine}-linux"
    return ("lib64", f"targets/{target}/lib", "lib")


def inspect_toolkit(
    home: Path, source: str, system: str, machine: str, ask: Callable[[Path], str] = _ask_nvcc
) -> Toolkit | str:
    """Look at one folder: a Toolkit, or a sentence that says what it lacks."""
    nvcc = home / "bin" / nvcc_name(system)
    if not nvcc.is_file():
        return f"{source} names {home}, where there is no bin/{nvcc.name}"
    version = parse_nvcc_version(ask(nvcc))
    if version is None:
        return f"{nvcc} ({source}) does not run or does not say its version"
    if version < OLDEST_TOOLKIT:
        oldest = ".".join(map(str, OLDEST_TOOLKIT))
        return f"{nvcc} ({source}) is CUDA {version[0]}.{version[1]}, older than {oldest}"
    include = home / "include"
    if not (include / "cuda_runtime.h").is_file():
        return f"{home} ({source}) has no include/cuda_runtime.h (the package nvidia-cuda-runtime has it)"
    runtime = static_runtime_name(system)
    library = next((home / sub for sub in _library_folders(system, machine) if (home / sub / runtime).is_file()), None)
    if library is None:
        return f"{home} ({source}) has no {runtime} (the package nvidia-cuda-runtime has it)"
    return Toolkit(str(home), str(nvcc), version, str(include), str(library), source)


def find_toolkit(
    environ: Mapping[str, str],
    system: str | None = None,
    *,
    machine: str | None = None,
    ask: Callable[[Path], str] = _ask_nvcc,
    usual: Sequence[Path] = (Path("/usr/local/cuda"),),
    python_path: Sequence[str] | None = None,
) -> Toolkit | str:
    """Find a CUDA toolkit; return it, or the reason why there is none.

    In this order: DANDAN_CUDA_HOME, CUDA_HOME, CUDA_PATH, nvcc on PATH, /usr/local/cuda, the toolkit wheels from the
    package index (nvidia/cu13 on the Python path). DANDAN_CUDA_HOME is an order: raises BuildError where it names no
    usable toolkit.
    """
    system = system or platform.system()
    machine = machine or platform.machine()
    explicit = environ.get("DANDAN_CUDA_HOME", "").strip()
    if explicit:
        found = inspect_toolkit(Path(explicit), "DANDAN_CUDA_HOME", system, machine, ask)
        if isinstance(found, str):
            raise BuildError(f"{found}; set DANDAN_CUDA_HOME to the folder that holds bin/{nvcc_name(system)}.")
        return found

    candidates: list[tuple[Path, str]] = []
    for name in ("CUDA_HOME", "CUDA_PATH"):
        if environ.get(name, "").strip():
            candidates.append((Path(environ[name].strip()), name))
    on_path = shutil.which(nvcc_name(system), path=environ.get("PATH", ""))
    if on_path:
        candidates.append((Path(os.path.realpath(on_path)).parent.parent, "nvcc on PATH"))
    candidates += [(folder, "the usual place") for folder in usual if folder.is_dir()]
    for entry in sys.path if python_path is None else python_path:
        wheels = Path(entry) / "nvidia"
        if entry and wheels.is_dir():
            candidates += [(folder, "toolkit wheels") for folder in sorted(wheels.glob("cu[0-9]*"), reverse=True)]

    reasons = []
    for home, source in candidates:
        found = inspect_toolkit(home, source, system, machine, ask)
        if isinstance(found, Toolkit):
            return found
        reasons.append(found)
    if reasons:
        return "no usable CUDA toolkit: " + "; ".join(reasons)
    return "no CUDA toolkit (DANDAN_CUDA_HOME, CUDA_HOME, CUDA_PATH, nvcc on PATH, /usr/local/cuda, toolkit wheels)"


def find_torch(environ: Mapping[str, str]) -> Torch | str:
    """Find torch's headers without importing torch; return them, or the reason why there are none.

    DANDAN_TORCH_INCLUDE names an include folder (unpacked headers do), DANDAN_TORCH_LIB the libraries; without
    them the installed torch is used. Raises BuildError where DANDAN_TORCH_INCLUDE has no stable headers.
    """
    explicit = environ.get("DANDAN_TORCH_INCLUDE", "").strip()
    if explicit:
        include = Path(explicit)
        if not (include / "torch/csrc/stable/library.h").is_file():
            raise BuildError(f"DANDAN_TORCH_INCLUDE names {include}, which has no torch/csrc/stable/library.h.")
        library = environ.get("DANDAN_TORCH_LIB", "").strip() or None
        if library is not None and not Path(library).is_dir():
            raise BuildError(f"DANDAN_TORCH_LIB names {library}, which is no folder.")
        return Torch(str(include), library, header_version(include))
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return "torch is not installed and DANDAN_TORCH_INCLUDE names no headers"
    root = Path(spec.origin).parent
    include = root / "include"
    if not (include / "torch/csrc/stable/library.h").is_file():
        return f"the torch in {root} has no stable-ABI headers; torch 2.9 or newer is needed"
    return Torch(str(include), str(root / "lib"), header_version(include))


def header_version(include: Path) -> str:
    """The torch version that headers say they are ("2.13.0"), or "unknown"."""
    for name in ("torch/headeronly/version.h", "torch/csrc/api/include/torch/version.h"):
        path = include / name
        if path.is_file():
            text = path.read_text(encoding="utf-8", errors="replace")
            numbers = dict(re.findall(r"#define\s+TORCH_VERSION_(MAJOR|MINOR|PATCH)\s+(\d+)", text))
            if len(numbers) == 3:
                return ".".join(numbers[part] for part in ("MAJOR", "MINOR", "PATCH"))
    return "unknown"

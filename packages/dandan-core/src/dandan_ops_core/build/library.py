"""Building one package's library with ninja, and the record of the build."""

from __future__ import annotations

import ctypes
import json
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from . import windows
from .decide import Decision
from .errors import BuildError
from .fingerprint import default_include_root, fingerprints
from .plan import TORCH_TARGET, BuildInputs, choose_jobs, library_name, make_plan
from .toolkit import Torch, find_torch

INFO_NAME = "_build_info.json"
COMMIT_FILE = "COMMIT"  # in an sdist: the commit that it was made from
SCHEMA = 1


def default_build_dir(package_dir: Path) -> Path:
    """Where objects and the ninja file stay between builds of a checkout."""
    return package_dir / "build" / f"cuda-{platform.system().lower()}-{platform.machine().lower()}"


def free_memory() -> int | None:
    """Bytes that a build may use without swapping, within the limits of a container; None where unknown."""
    found: list[int] = []
    if platform.system() == "Windows":
        return _free_memory_windows()
    try:
        match = re.search(r"^MemAvailable:\s+(\d+) kB", Path("/proc/meminfo").read_text(), re.MULTILINE)
        if match:
            found.append(int(match[1]) * 1024)
    except OSError:
        pass
    for limit, used in (
        ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
        ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
    ):
        try:
            found.append(max(0, int(Path(limit).read_text()) - int(Path(used).read_text())))
        except (OSError, ValueError):  # no such group, or the word "max"
            continue
    return min(found, default=None)


def _free_memory_windows() -> int | None:
    class Status(ctypes.Structure):
        _fields_ = [("length", ctypes.c_uint32), ("load", ctypes.c_uint32)] + [
            (name, ctypes.c_uint64)
            for name in ("total", "available", "total_page", "free_page", "total_virtual", "free_virtual", "extended")
        ]

    status = Status(length=ctypes.sizeof(Status))
    if not getattr(ctypes, "windll").kernel32.GlobalMemoryStatusEx(ctypes.byref(status)):  # noqa: B009
        return None
    return int(status.available)


def cpu_count() -> int:
    """CPUs that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def find_ninja() -> str:
    """The ninja program: of the ninja package, on PATH, or beside this Python. Raises BuildError without one."""
    try:
        import ninja

        packaged = Path(ninja.BIN_DIR) / ("ninja.exe" if platform.system() == "Windows" else "ninja")
        if packaged.is_file():
            return str(packaged)
    except (ImportError, AttributeError):
        pass
    found = shutil.which("ninja") or shutil.which("ninja", path=str(Path(sys.executable).parent))
    if found is None:
        raise BuildError(
            "ninja is needed for the CUDA part: pip install ninja, build with isolation, or set DANDAN_BUILD_CUDA=0."
        )
    return found


def commit_of(package_dir: Path) -> str:
    """The commit of these sources: from the sdist's COMMIT file, else from git (with -dirty), else "unknown"."""
    recorded = package_dir / COMMIT_FILE
    if recorded.is_file():
        return recorded.read_text(encoding="utf-8").strip() or "unknown"

    def git(*arguments: str) -> str | None:
        try:
            done = subprocess.run(
                ["git", *arguments], cwd=package_dir, capture_output=True, text=True, timeout=30, check=False
            )
        except (OSError, subprocess.TimeoutExpired):
            return None
        return done.stdout.strip() if done.returncode == 0 else None

    if not git("ls-files", "setup.py"):  # not in a repository, or unpacked inside a foreign one
        return "unknown"
    head = git("rev-parse", "HEAD")
    if not head:
        return "unknown"
    return f"{head}-dirty" if git("status", "--porcelain", "--", ".") else head


def plugin_api() -> int:
    """The core's PLUGIN_API, which the library is made for; read as text, since importing it may need torch."""
    for path in sorted(Path(__file__).resolve().parent.parent.glob("*.py")):
        match = re.search(r"^PLUGIN_API(?::\s*[\w.\[\]]+)?\s*=\s*(\d+)", path.read_text(encoding="utf-8"), re.MULTILINE)
        if match:
            return int(match[1])
    raise BuildError("dandan_ops_core has no PLUGIN_API.")


def build_info(
    distribution: str, version: str, package_dir: Path, name: str, decision: Decision, torch: Torch | None
) -> dict[str, Any]:
    """The content of _build_info.json."""
    toolkit, archs = decision.toolkit, decision.archs
    built = decision.cuda and toolkit is not None and archs is not None
    return {
        "schema": SCHEMA,
        "package": distribution,
        "version": version,
        "plugin_api": plugin_api(),
        "library": library_name(name, platform.system()) if built else None,
        "reason": decision.reason,
        "toolkit": toolkit.version_text if toolkit and built else None,
        "driver_floor": toolkit.driver_floor if toolkit and built else None,
        "architectures": [arch.name for arch in archs.sass] if archs and built else [],
        "ptx": [arch.name for arch in archs.ptx] if archs and built else [],
        "torch_target": TORCH_TARGET,
        "torch_headers": torch.version if torch else None,
        "commit": commit_of(package_dir),
        "fingerprints": fingerprints(package_dir / "csrc"),
    }


def build(
    name: str,
    distribution: str,
    version: str,
    package_dir: Path,
    out_dir: Path,
    build_dir: Path,
    decision: Decision,
    environ: Mapping[str, str] | None = None,
) -> Path | None:
    """Build the library of one package into `out_dir` and write _build_info.json beside it.

    Returns the library's path, or None where the decision is against CUDA; an older library in `out_dir` then goes.
    Raises BuildError where a tool is missing or a compiler fails.
    """
    environ = os.environ if environ is None else environ
    package_dir, out_dir, build_dir = package_dir.resolve(), out_dir.resolve(), build_dir.resolve()
    out_dir.mkdir(parents=True, exist_ok=True)
    target = out_dir / library_name(name, platform.system())
    torch: Torch | None = None
    if not decision.cuda:
        target.unlink(missing_ok=True)
        print(f"{distribution}: no CUDA part: {decision.reason}", flush=True)
        library = None
    else:
        found = find_torch(environ)
        if isinstance(found, str):
            raise BuildError(
                f"{found}; install torch>=2.9 (and build with --no-build-isolation), build with isolation, "
                "or set DANDAN_BUILD_CUDA=0."
            )
        torch = found
        library = _compile(name, distribution, package_dir, build_dir, decision, torch, environ)
        partial = target.with_name(target.name + ".partial")
        shutil.copyfile(library, partial)
        os.replace(partial, target)  # a process that has the old library loaded keeps it
    info = build_info(distribution, version, package_dir, name, decision, torch)
    (out_dir / INFO_NAME).write_text(json.dumps(info, indent=2) + "\n", encoding="utf-8")
    return target if library else None


def _compile(
    name: str,
    distribution: str,
    package_dir: Path,
    build_dir: Path,
    decision: Decision,
    torch: Torch,
    environ: Mapping[str, str],
) -> Path:
    toolkit, archs, system = decision.toolkit, decision.archs, platform.system()
    if toolkit is None or archs is None:
        raise BuildError("the decision is against CUDA.")
    csrc = package_dir / "csrc"
    driver_lib = environ.get("DANDAN_CUDA_DRIVER_LIB", "").strip() or None
    if driver_lib is not None and not Path(driver_lib).is_file():
        raise BuildError(f"DANDAN_CUDA_DRIVER_LIB names {driver_lib}, which is no file.")
    plan = make_plan(
        BuildInputs(
            system=system,
            name=name,
            package_dir=str(package_dir),
            csrc=str(csrc),
            sources=tuple(sorted(path.name for path in csrc.glob("*") if path.suffix in (".cpp", ".cu"))),
            include_root=str(default_include_root()),
            build_dir=str(build_dir),
            toolkit=toolkit,
            torch=torch,
            archs=archs,
            cxx=decision.cxx,
            driver_lib=driver_lib,
        )
    )
    build_dir.mkdir(parents=True, exist_ok=True)
    config = Path(plan.config_path)
    if not config.is_file() or config.read_text(encoding="utf-8") != plan.config_text:
        config.write_text(plan.config_text, encoding="utf-8")
    (build_dir / "build.ninja").write_text(plan.ninja_text, encoding="utf-8")
    jobs = choose_jobs(environ, cpu_count(), free_memory())
    shown = " ".join(arch.name for arch in archs.sass) + "".join(f" {arch.name}+PTX" for arch in archs.ptx)
    print(
        f"{distribution}: CUDA {toolkit.version_text} ({toolkit.source}: {toolkit.home}), "
        f"torch headers {torch.version}, architectures {shown} ({archs.source}), {jobs} job{'s' if jobs > 1 else ''}",
        flush=True,
    )
    compiler_environ = windows.compiler_environment(environ) if system == "Windows" else dict(environ)
    # nvcc reads these two and would add flags that the plan, and so the record, does not know.
    for variable in ("NVCC_PREPEND_FLAGS", "NVCC_APPEND_FLAGS"):
        compiler_environ.pop(variable, None)
    done = subprocess.run([find_ninja(), "-C", str(build_dir), f"-j{jobs}"], env=compiler_environ, check=False)
    if done.returncode != 0:
        raise BuildError(f"{distribution}: the CUDA build failed (ninja exit code {done.returncode}); see above.")
    return Path(plan.library)

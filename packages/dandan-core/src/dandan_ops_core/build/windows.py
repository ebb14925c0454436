"""The Visual Studio 2022 x64 environment, which cl.exe, link.exe and nvcc need on Windows."""

from __future__ import annotations

import ntpath
import subprocess
from collections.abc import Callable, Mapping, Sequence

from .errors import BuildError

_HELP = (
    "install the Visual Studio 2022 Build Tools with the C++ workload, "
    "or start from an 'x64 Native Tools Command Prompt for VS 2022'."
)


def _run(command: Sequence[str] | str) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, errors="replace", check=False).stdout
    except OSError:
        return ""


def vswhere_command(environ: Mapping[str, str]) -> list[str]:
    """The command that asks where Visual Studio 2022 with the x64 C++ tools is."""
    programs = environ.get("ProgramFiles(x86)") or environ.get("PROGRAMFILES(X86)") or r"C:\Program Files (x86)"
    return [
        ntpath.join(programs, "Microsoft Visual Studio", "Installer", "vswhere.exe"),
        "-latest",
        "-products",
        "*",
        "-version",
        "[17.0,18.0)",
        "-requires",
        "Microsoft.VisualStudio.Component.VC.Tools.x86.x64",
        "-property",
        "installationPath",
    ]


def vcvars_command(installation: str) -> str:
    """The command line that sets the x64 environment up and prints it."""
    script = ntpath.join(installation, "VC", "Auxiliary", "Build", "vcvars64.bat")
    return f'cmd /s /c ""{script}" >nul && set"'


def parse_set(text: str) -> dict[str, str]:
    """The variables that `set` prints; names in upper case, as Windows takes them."""
    found = {}
    for line in text.splitlines():
        name, mark, value = line.partition("=")
        if mark and name:
            found[name.upper()] = value
    return found


def compiler_environment(
    environ: Mapping[str, str], run: Callable[[Sequence[str] | str], str] = _run
) -> dict[str, str]:
    """The environment to compile in. Used as it is where the x64 tools are already set up, else made by vcvars64.bat.

    Raises BuildError where Visual Studio 2022 or its x64 compiler is missing.
    """
    current = {name.upper(): value for name, value in environ.items()}
    if current.get("VSCMD_ARG_TGT_ARCH", "").lower() == "x64":
        return current
    lines = [line.strip() for line in run(vswhere_command(environ)).splitlines() if line.strip()]
    if not lines:
        raise BuildError(f"Visual Studio 2022 with the x64 C++ tools was not found; {_HELP}")
    made = parse_set(run(vcvars_command(lines[0])))
    if made.get("VSCMD_ARG_TGT_ARCH", "").lower() != "x64":
        raise BuildError(f"vcvars64.bat of {lines[0]} did not set up the x64 tools; {_HELP}")
    return {**current, **made}

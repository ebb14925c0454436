#!/usr/bin/env python3
"""Run nox without installing it: makes a private environment with a pinned nox, then passes its arguments on.

    python3 tools/noxw.py -s demo
    python3 tools/noxw.py --list

Needs Python 3.10 or newer and nothing else. The environment lies in .noxw/ in the repository; it is made anew when the
pin or the Python changes, or when it is broken. The exit code is nox's.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

NOX = "nox==2026.10.20"
OLDEST_PYTHON = (3, 10)

ROOT = Path(__file__).resolve().parent.parent
HOME = ROOT / ".noxw"


class SetUpError(Exception):
    """The private environment cannot be made; the message says why and what helps."""


def environment_python(home: Path) -> Path:
    """The Python of the environment in `home`."""
    return home / "Scripts" / "python.exe" if os.name == "nt" else home / "bin" / "python"


def wanted_stamp() -> "dict[str, str]":
    """What the environment must have been made from."""
    return {"nox": NOX, "python": ".".join(map(str, sys.version_info[:3])), "base": sys.base_prefix}


def is_usable(home: Path) -> bool:
    """Whether the environment is complete, of this pin and this Python, and its nox starts."""
    try:
        if json.loads((home / "stamp.json").read_text(encoding="utf-8")) != wanted_stamp():
            return False
        done = subprocess.run([str(environment_python(home)), "-c", "import nox"], capture_output=True, check=False)
    except (OSError, ValueError):
        return False
    return done.returncode == 0


def make(home: Path) -> None:
    """Make the environment anew. Raises SetUpError."""
    print(f"noxw: making a private environment with {NOX} in {home}", file=sys.stderr, flush=True)
    if home.exists():
        shutil.rmtree(home)
    done = subprocess.run([sys.executable, "-m", "venv", str(home)], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        version = f"{sys.version_info[0]}.{sys.version_info[1]}"
        words = (done.stderr + done.stdout).strip()
        hint = ""
        if "ensurepip" in words or "No module named venv" in words:
            hint = f"\nPython's venv module is incomplete here; on Debian and Ubuntu: apt install python{version}-venv"
        raise SetUpError(f"cannot make an environment with {sys.executable}:\n{words}{hint}")
    python = str(environment_python(home))
    command = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", NOX]
    if subprocess.run(command, check=False).returncode != 0:
        raise SetUpError(f"pip could not install {NOX} (see above); is the package index reachable?")
    (home / "stamp.json").write_text(json.dumps(wanted_stamp()), encoding="utf-8")


def main(arguments: "list[str]") -> int:
    if sys.version_info < OLDEST_PYTHON:
        found = ".".join(map(str, sys.version_info[:3]))
        print(f"noxw: Python 3.10 or newer is needed; this is {found} ({sys.executable}).", file=sys.stderr)
        return 2
    try:
        if not is_usable(HOME):
            make(HOME)
    except SetUpError as error:
        print(f"noxw: {error}", file=sys.stderr)
        return 2
    command = [str(environment_python(HOME)), "-m", "nox"]
    if not any(word in ("-f", "--noxfile") or word.startswith("--noxfile=") for word in arguments):
        command += ["--noxfile", str(ROOT / "noxfile.py")]
    command += arguments
    if os.name != "nt":
        sys.stdout.flush()
        os.execv(command[0], command)
    try:
        return subprocess.run(command, check=False).returncode
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

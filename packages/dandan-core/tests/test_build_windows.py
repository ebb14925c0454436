"""The Windows compiler environment, with a made-up Visual Studio."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from dandan_ops_core.build.errors import BuildError
from dandan_ops_core.build.windows import compiler_environment, parse_set, vcvars_command, vswhere_command

INSTALLATION = r"C:\Program Files\Microsoft Visual Studio\2022\BuildTools"


class Machine:
    """Answers the two commands."""

    def __init__(self, vswhere: str, variables: str) -> None:
        self.vswhere, self.variables, self.asked = vswhere, variables, []

    def __call__(self, command: Sequence[str] | str) -> str:
        self.asked.append(command)
        return self.variables if isinstance(command, str) else self.vswhere


def test_environment_is_made_by_vcvars() -> None:
    machine = Machine(
        f"{INSTALLATION}\r\n", "VSCMD_ARG_TGT_ARCH=x64\r\nPath=C:\\VC\\bin\r\nINCLUDE=C:\\VC\\include\r\n"
    )
    found = compiler_environment({"Path": "C:\\Windows", "TEMP": "C:\\T"}, machine)
    assert found["PATH"] == "C:\\VC\\bin"
    assert found["INCLUDE"] == "C:\\VC\\include"
    assert found["TEMP"] == "C:\\T"
    assert machine.asked[1] == vcvars_command(INSTALLATION)


def test_environment_that_is_set_up_is_kept() -> None:
    machine = Machine("", "")
    environ = {"VSCMD_ARG_TGT_ARCH": "x64", "PATH": "C:\\VC\\bin"}
    assert compiler_environment(environ, machine) == environ
    assert machine.asked == []


def test_an_x86_prompt_is_not_taken_for_x64() -> None:
    machine = Machine(INSTALLATION, "VSCMD_ARG_TGT_ARCH=x64\nPATH=64\n")
    assert compiler_environment({"VSCMD_ARG_TGT_ARCH": "x86", "PATH": "32"}, machine)["PATH"] == "64"


@pytest.mark.parametrize(
    ("machine", "message"),
    [
        (Machine("", ""), "Visual Studio 2022 with the x64 C\\+\\+ tools was not found"),
        (Machine(INSTALLATION, "PATH=C:\\Windows\n"), "did not set up the x64 tools"),
    ],
)
def test_missing_tools_are_a_sentence(machine: Machine, message: str) -> None:
    with pytest.raises(BuildError, match=message) as error:
        compiler_environment({}, machine)
    assert "x64 Native Tools Command Prompt" in str(error.value)


def test_commands() -> None:
    command = vswhere_command({"ProgramFiles(x86)": r"D:\P"})
    assert command[0] == r"D:\P\Microsoft Visual Studio\Installer\vswhere.exe"
    assert "[17.0,18.0)" in command  # Visual Studio 2022
    assert vcvars_command(r"C:\VS") == r'cmd /s /c ""C:\VS\VC\Auxiliary\Build\vcvars64.bat" >nul && set"'


def test_parse_set() -> None:
    assert parse_set("Path=a=b;c\nnonsense\n=C:=C:\\x\n") == {"PATH": "a=b;c"}

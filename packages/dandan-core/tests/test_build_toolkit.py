"""Finding toolkit, torch headers and the decision to build, on made-up machines."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from dandan_ops_core.build import decide as decide_module
from dandan_ops_core.build import library as library_module
from dandan_ops_core.build.decide import Decision, build_mode, build_requirements, decide, find_cxx
from dandan_ops_core.build.errors import BuildError
from dandan_ops_core.build.library import commit_of, plugin_api
from dandan_ops_core.build.toolkit import Toolkit, find_toolkit, find_torch, parse_nvcc_version

RELEASE_13 = "Cuda compilation tools, release 13.0, V13.0.88"


def make_toolkit(home: Path, system: str = "Linux", library: str = "lib64") -> Path:
    """A folder that looks like a toolkit."""
    windows = system == "Windows"
    for name in (
        "bin/nvcc.exe" if windows else "bin/nvcc",
        "include/cuda_runtime.h",
        "lib/x64/cudart_static.lib" if windows else f"{library}/libcudart_static.a",
    ):
        path = home / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("")
        path.chmod(0o755)
    return home


def find(
    environ: Mapping[str, str], system: str = "Linux", usual: tuple[Path, ...] = (), python_path: tuple[str, ...] = ()
) -> Toolkit | str:
    return find_toolkit(
        environ, system, machine="x86_64", ask=lambda nvcc: RELEASE_13, usual=usual, python_path=python_path
    )


def test_order_of_places(tmp_path: Path) -> None:
    """Each place is taken when those before it are gone."""
    homes = {name: make_toolkit(tmp_path / name) for name in ("dandan", "home", "path", "onpath", "usual")}
    wheels = make_toolkit(tmp_path / "site" / "nvidia" / "cu13", library="lib")
    environ = {
        "DANDAN_CUDA_HOME": str(homes["dandan"]),
        "CUDA_HOME": str(homes["home"]),
        "CUDA_PATH": str(homes["path"]),
        "PATH": str(homes["onpath"] / "bin"),
    }
    usual = (homes["usual"],)
    expected = [*(str(home) for home in homes.values()), str(wheels)]
    found = []
    for gone in ("DANDAN_CUDA_HOME", "CUDA_HOME", "CUDA_PATH", "PATH", None, None):
        toolkit = find(environ, usual=usual, python_path=(str(tmp_path / "site"),))
        assert isinstance(toolkit, Toolkit)
        found.append(toolkit.home)
        if gone is not None:
            environ.pop(gone)
        else:
            usual = ()
    assert found == expected


@pytest.mark.parametrize(
    ("system", "library", "expected"),
    [
        ("Linux", "lib64", "lib64"),
        ("Linux", "lib", "lib"),  # the toolkit wheels
        ("Linux", "targets/x86_64-linux/lib", "targets/x86_64-linux/lib"),
        ("Windows", "lib/x64", "lib/x64"),
    ],
)
def test_library_folder(tmp_path: Path, system: str, library: str, expected: str) -> None:
    make_toolkit(tmp_path, system, library)
    toolkit = find({"DANDAN_CUDA_HOME": str(tmp_path)}, system)
    assert isinstance(toolkit, Toolkit)
    assert Path(toolkit.library) == tmp_path / expected
    assert toolkit.version == (13, 0)
    assert toolkit.version_text == "13.0"
    assert toolkit.driver_floor == 13000


@pytest.mark.parametrize(
    ("missing", "message"),
    [
        ("bin/nvcc", "where there is no bin/nvcc"),
        ("include/cuda_runtime.h", "has no include/cuda_runtime.h"),
        ("lib64/libcudart_static.a", "has no libcudart_static.a"),
    ],
)
def test_an_incomplete_toolkit_says_what_it_lacks(tmp_path: Path, missing: str, message: str) -> None:
    (make_toolkit(tmp_path) / missing).unlink()
    with pytest.raises(BuildError, match=message):
        find({"DANDAN_CUDA_HOME": str(tmp_path)})
    reason = find({"CUDA_HOME": str(tmp_path)})  # not an order: another place may have one
    assert isinstance(reason, str)
    assert "no usable CUDA toolkit" in reason
    assert message in reason


def test_too_old_a_toolkit_is_passed_over(tmp_path: Path) -> None:
    old, new = make_toolkit(tmp_path / "old"), make_toolkit(tmp_path / "new")

    def ask(nvcc: Path) -> str:
        return "release 11.8, V11.8.89" if "old" in nvcc.parts else RELEASE_13

    toolkit = find_toolkit({"CUDA_HOME": str(old)}, "Linux", machine="x86_64", ask=ask, usual=(new,), python_path=())
    assert isinstance(toolkit, Toolkit)
    assert toolkit.home == str(new)


def test_nothing_found() -> None:
    reason = find({"PATH": ""})
    assert isinstance(reason, str)
    assert reason.startswith("no CUDA toolkit")


def test_parse_nvcc_version() -> None:
    assert parse_nvcc_version(f"nvcc: NVIDIA (R) Cuda compiler driver\n{RELEASE_13}\n") == (13, 0)
    assert parse_nvcc_version("bash: nvcc: not found") is None


def make_headers(include: Path, version: tuple[int, int, int] = (2, 9, 1)) -> Path:
    library = include / "torch/csrc/stable/library.h"
    library.parent.mkdir(parents=True)
    library.write_text("")
    header = include / "torch/csrc/api/include/torch/version.h"
    header.parent.mkdir(parents=True)
    parts = zip(("MAJOR", "MINOR", "PATCH"), version, strict=True)
    header.write_text("".join(f"#define TORCH_VERSION_{name} {number}\n" for name, number in parts))
    return include


def test_torch_headers_by_variable(tmp_path: Path) -> None:
    include = make_headers(tmp_path / "include")
    found = find_torch({"DANDAN_TORCH_INCLUDE": str(include)})
    assert not isinstance(found, str)
    assert (found.include, found.library, found.version) == (str(include), None, "2.9.1")
    found = find_torch({"DANDAN_TORCH_INCLUDE": str(include), "DANDAN_TORCH_LIB": str(tmp_path)})
    assert not isinstance(found, str)
    assert found.library == str(tmp_path)


def test_bad_torch_variables(tmp_path: Path) -> None:
    with pytest.raises(BuildError, match="DANDAN_TORCH_INCLUDE names .* no torch/csrc/stable/library.h"):
        find_torch({"DANDAN_TORCH_INCLUDE": str(tmp_path)})
    include = make_headers(tmp_path / "include")
    with pytest.raises(BuildError, match="DANDAN_TORCH_LIB names .* is no folder"):
        find_torch({"DANDAN_TORCH_INCLUDE": str(include), "DANDAN_TORCH_LIB": str(tmp_path / "none")})


def test_installed_torch_is_found_without_importing_it() -> None:
    code = (
        "import sys; from dandan_ops_core.build.toolkit import find_torch; found = find_torch({});"
        "assert not isinstance(found, str), found; assert found.version.count('.') == 2, found.version;"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_build_helper_imports_without_torch() -> None:
    """An isolated build of a wheel without CUDA has no torch."""
    code = (
        "import sys; sys.modules['torch'] = None;"
        "import dandan_ops_core.build.backend, dandan_ops_core.build.hooks, dandan_ops_core.build.__main__"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


TOOLKIT = Toolkit("/cuda", "/cuda/bin/nvcc", (13, 0), "/cuda/include", "/cuda/lib64", "test")


def decide_on(
    environ: dict[str, str],
    *,
    system: str = "Linux",
    toolkit: Toolkit | str = TOOLKIT,
    gpus: tuple[tuple[int, int], ...] = ((9, 0),),
    cxx: str | None = "/usr/bin/g++",
) -> Decision:
    return decide(
        environ,
        system=system,
        toolkit=lambda environ, system: toolkit,
        capabilities=lambda: gpus,
        cxx=lambda environ, system: cxx,
    )


def test_auto_builds_with_toolkit_and_gpu() -> None:
    decision = decide_on({})
    assert decision.cuda
    assert decision.reason is None
    assert decision.archs is not None
    assert [arch.name for arch in decision.archs.sass] == ["9.0a"]


def test_auto_builds_with_a_list_and_no_gpu() -> None:
    assert decide_on({"TORCH_CUDA_ARCH_LIST": "8.0"}, gpus=()).cuda


def test_auto_says_why_not() -> None:
    assert decide_on({}, toolkit="no CUDA toolkit").reason == "no CUDA toolkit"
    assert decide_on({}, cxx=None).reason == "no C++ compiler was found"
    assert "no GPU was visible" in str(decide_on({}, gpus=()).reason)
    assert "older than architecture 8.0" in str(decide_on({}, gpus=((7, 5),)).reason)
    assert decide_on({}, system="Darwin").reason == "CUDA is not available on Darwin"


def test_must_builds_the_default_list_without_gpu() -> None:
    decision = decide_on({"DANDAN_BUILD_CUDA": "1"}, gpus=())
    assert decision.archs is not None
    assert len(decision.archs.sass) == 5


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"toolkit": "no CUDA toolkit"},
            "DANDAN_BUILD_CUDA=1, but no CUDA toolkit; install one, or set DANDAN_CUDA_HOME",
        ),
        ({"cxx": None}, "no C\\+\\+ compiler was found; install g\\+\\+ or set CXX"),
        ({"system": "Darwin"}, "CUDA is not available on Darwin"),
    ],
)
def test_must_is_an_error_where_it_cannot(change: dict[str, str | None], message: str) -> None:
    with pytest.raises(BuildError, match=message):
        decide_on({"DANDAN_BUILD_CUDA": "1"}, **change)  # type: ignore[arg-type]


def test_never() -> None:
    decision = decide_on({"DANDAN_BUILD_CUDA": "0", "TORCH_CUDA_ARCH_LIST": "nonsense"})
    assert not decision.cuda
    assert decision.reason == "DANDAN_BUILD_CUDA=0"


@pytest.mark.parametrize("value", ["yes", "2", "true", "on"])
def test_bad_mode(value: str) -> None:
    with pytest.raises(BuildError, match=f"DANDAN_BUILD_CUDA is '{value}'; it must be auto, 1 or 0"):
        build_mode({"DANDAN_BUILD_CUDA": value})


def test_requirements_of_an_isolated_build(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decide_module, "decide", lambda environ: decide_on(dict(environ)))
    assert build_requirements({"DANDAN_BUILD_CUDA": "0"}) == []
    assert build_requirements({}) == ["ninja>=1.10", "torch>=2.9"]
    assert build_requirements({"DANDAN_TORCH_INCLUDE": "/headers"}) == ["ninja>=1.10"]


def test_cxx(tmp_path: Path) -> None:
    for name in ("c++", "clang++", "my-g++"):
        (tmp_path / name).write_text("")
        (tmp_path / name).chmod(0o755)
    assert find_cxx({"PATH": str(tmp_path)}, "Linux") == str(tmp_path / "c++")
    assert find_cxx({"PATH": str(tmp_path), "CXX": "my-g++"}, "Linux") == str(tmp_path / "my-g++")
    assert find_cxx({"PATH": str(tmp_path), "CXX": "absent"}, "Linux") is None
    assert find_cxx({}, "Windows") == "cl.exe"


def test_commit(tmp_path: Path) -> None:
    assert commit_of(tmp_path) == "unknown"
    git = ["git", "-c", "user.name=t", "-c", "user.email=t@example.com"]
    (tmp_path / "setup.py").write_text("")
    subprocess.run([*git, "init", "-q"], cwd=tmp_path, check=True)
    assert commit_of(tmp_path) == "unknown"  # inside a repository that does not know the package
    subprocess.run([*git, "add", "setup.py"], cwd=tmp_path, check=True)
    subprocess.run([*git, "commit", "-q", "-m", "one"], cwd=tmp_path, check=True)
    head = subprocess.run(
        [*git, "rev-parse", "HEAD"], cwd=tmp_path, check=True, capture_output=True, text=True
    ).stdout.strip()
    assert commit_of(tmp_path) == head
    (tmp_path / "setup.py").write_text("changed")
    assert commit_of(tmp_path) == f"{head}-dirty"
    (tmp_path / "COMMIT").write_text("from the sdist\n")
    assert commit_of(tmp_path) == "from the sdist"


def test_plugin_api_is_read_as_text() -> None:
    import dandan_ops_core.loader

    assert plugin_api() == dandan_ops_core.loader.PLUGIN_API


def test_ninja_missing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "ninja", None)
    monkeypatch.setattr(library_module.sys, "executable", str(tmp_path / "python"))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(BuildError, match="ninja is needed"):
        library_module.find_ninja()

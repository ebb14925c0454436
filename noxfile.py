"""Every task of the project, and the only place that knows the build and test matrix.

python3 tools/noxw.py -s demo          see the operators run
python3 tools/noxw.py -s test          the CPU suite of every package
python3 tools/noxw.py --list           everything else
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import nox

ROOT = Path(__file__).resolve().parent
PACKAGES_DIR = ROOT / "packages"
DIST = ROOT / "dist"
STATE = ROOT / ".nox"

# The torch of the CPU sessions, and the torch versions that a built library must load under, oldest first.
TORCH = "2.13.0"
ABI_TORCH = ("2.9.1", TORCH, "2.14.1")


@dataclass(frozen=True)
class Package:
    """One package: its folder under packages/, its import name, its kind (core, operator, python or meta)."""

    folder: str
    module: str
    kind: str

    @property
    def path(self) -> Path:
        return PACKAGES_DIR / self.folder

    @property
    def distribution(self) -> str:
        return self.module.replace("_", "-")

    @property
    def settings(self) -> str:
        return (self.path / "pyproject.toml").read_text(encoding="utf-8")

    @property
    def wheels(self) -> list[Path]:
        return sorted(DIST.glob(f"{self.module}-*.whl"))


# In dependency order. A new operator package is one line here; python is one that has no compiled part yet.
PACKAGES = (
    Package("dandan-core", "dandan_ops_core", "core"),
    Package("dandan-norm", "dandan_norm", "operator"),
    Package("dandan-gemm", "dandan_gemm", "operator"),
    Package("dandan-w4a16", "dandan_w4a16", "operator"),
    Package("dandan-attention", "dandan_attention", "operator"),
    Package("dandan-ops", "dandan_ops", "meta"),
)
CORE = PACKAGES[0]
OPERATORS = tuple(package for package in PACKAGES if package.kind == "operator")

BUILD_TOOLS = ("setuptools>=77", "hatchling>=1.27", "editables>=0.5", "build>=1.2", "ninja>=1.10", "packaging>=24")
TEST_TOOLS = ("pytest>=8", "hypothesis>=6.100", "numpy", "safetensors>=0.4", "pyelftools==0.33")
TYPE_TOOLS = ("mypy==2.4.1",)
LINT_TOOLS = ("ruff==0.17.6", "check-jsonschema==0.39.0")
# The CUDA toolkit as wheels (compiler, its parts, static runtime, headers), for a build where none is installed.
CUDA_TOOLKIT = (
    "nvidia-cuda-nvcc==13.0.88",
    "nvidia-nvvm==13.0.88",
    "nvidia-cuda-crt==13.0.88",
    "nvidia-cuda-runtime==13.0.96",
    "nvidia-cuda-cccl==13.0.85",
)
# ruff formats the signatures on the API pages.
DOCS_TOOLS = ("mkdocs>=1.6,<2", "mkdocs-material>=9.5,<10", "mkdocstrings[python]>=0.29", LINT_TOOLS[0])

nox.needs_version = ">=2024.10.9"
nox.options.sessions = ["lint", "typecheck", "test"]
nox.options.error_on_missing_interpreters = True

# nox has no public word for it, and sessions here choose their environment themselves.
_OPTIONS = " ".join(sys.argv[1:]).split(" -- ")[0]
NO_VENV = re.search(r"--no-venv|(-fb|--force-venv-backend)[ =]none", _OPTIONS) is not None


def over(packages: tuple[Package, ...]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Parametrise a session over packages: `nox -s "build(dandan-norm)"`."""
    return nox.parametrize("package", packages, ids=[package.folder for package in packages])


# --------------------------------------------------------------------------------------------------- environments


@dataclass(frozen=True)
class Environment:
    """A virtual environment that several sessions share: a torch in each would cost a gigabyte and half a minute."""

    path: Path

    @property
    def bin(self) -> Path:
        return self.path / ("Scripts" if os.name == "nt" else "bin")

    @property
    def python(self) -> str:
        return str(self.bin / ("python.exe" if os.name == "nt" else "python"))

    def program(self, name: str) -> str:
        return str(self.bin / (f"{name}.exe" if os.name == "nt" else name))


def shared_environment(
    session: nox.Session, path: Path, *steps: tuple[str, ...], interpreter: str = sys.executable, fresh: bool = False
) -> Environment:
    """The environment at `path` with what `steps` (pip arguments, one call each) say; made anew when those change."""
    environment = Environment(path)
    stamp = path / "stamp.json"
    wanted = json.dumps({"steps": steps, "interpreter": interpreter, "version": sys.version})
    usable = not fresh and stamp.is_file() and stamp.read_text(encoding="utf-8") == wanted
    if usable and subprocess.run([environment.python, "-m", "pip", "--version"], capture_output=True).returncode == 0:
        return environment
    session.log(f"making the environment {path.relative_to(ROOT)}")
    shutil.rmtree(path, ignore_errors=True)
    path.parent.mkdir(parents=True, exist_ok=True)
    session.run(sys.executable, "-m", "virtualenv", "--quiet", "--python", interpreter, str(path), external=True)
    for step in steps:
        pip_install(session, environment, *step)
    stamp.write_text(wanted, encoding="utf-8")
    return environment


def pip_install(
    session: nox.Session, environment: Environment, *arguments: str, env: dict[str, str] | None = None
) -> None:
    command = [environment.python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *arguments]
    session.run(*command, external=True, env=env)


def cpu_environment(session: nox.Session) -> Environment:
    """The one environment of the CPU sessions."""
    return shared_environment(session, STATE / "cpu", (f"torch=={TORCH}",), (*BUILD_TOOLS, *TEST_TOOLS, *TYPE_TOOLS))


def gpu_environment(session: nox.Session) -> Environment:
    """The one environment of the GPU sessions, with the torch that pip takes for this machine."""
    return shared_environment(session, STATE / "gpu", ("torch>=2.9",), (*BUILD_TOOLS, *TEST_TOOLS))


# What is ours is built and installed as the tree has it: no wheel that pip kept, nothing by name from an index.
AS_IT_IS = ("--no-deps", "--no-build-isolation", "--force-reinstall", "--no-cache-dir")

_installed: set[tuple[Path, str]] = set()


def install_ours(session: nox.Session, environment: Environment, *, cuda: str) -> None:
    """Build and install our packages from this tree, by path, core first; then prove that no other was taken.

    Not editable: the tests then see what a wheel holds, and libraries built in the source folders stay as they are.
    """
    if (environment.path, cuda) in _installed:
        return
    others = [str(package.path) for package in PACKAGES if package is not CORE]
    session.log(f"installing {', '.join(package.distribution for package in PACKAGES)} from this tree")
    pip_install(session, environment, *AS_IT_IS, str(CORE.path))
    env = {"DANDAN_BUILD_CUDA": cuda}
    if cuda == "1":
        env.update(cuda_toolkit(session, environment))
    if cuda != "0":
        # It takes minutes, and pip would hide its progress; the wheel's build then finds everything compiled.
        folders = [str(package.path) for package in OPERATORS]
        command = [environment.python, "-m", "dandan_ops_core.build", "--out", str(STATE / "libraries"), *folders]
        session.run(*command, external=True, env=env)
    pip_install(session, environment, *AS_IT_IS, *others, env=env)
    names = [package.distribution for package in PACKAGES]
    session.run(
        environment.python, str(ROOT / "tools/check_environment.py"), "--expect", *names, external=True, silent=True
    )
    _installed.add((environment.path, cuda))


def source_path() -> dict[str, str]:
    """Variables under which Python imports our packages from this tree, without any install."""
    folders = [str(package.path / "src") for package in PACKAGES]
    if os.environ.get("PYTHONPATH"):
        folders.append(os.environ["PYTHONPATH"])
    return {"PYTHONPATH": os.pathsep.join(folders)}


def present_python(session: nox.Session) -> str:
    """Under --no-venv: the first Python at hand that has torch and pytest."""
    candidates = [sys.executable, shutil.which("python"), shutil.which("python3")]
    probe = "import importlib.util as u, sys; sys.exit(not (u.find_spec('torch') and u.find_spec('pytest')))"
    for python in candidates:
        if python and subprocess.run([python, "-c", probe], capture_output=True).returncode == 0:
            return python
    session.error(
        "--no-venv: no Python at hand (the one that runs nox, python, python3) has torch and pytest installed"
    )
    raise AssertionError  # for a mypy that does not see nox: session.error raises


def gpu_python(session: nox.Session, package: Package | None = None) -> tuple[str, dict[str, str]]:
    """The Python of a GPU session and its variables, with our packages and the CUDA library in place.

    Under --no-venv nothing is installed: packages come from this tree, and the library is built in place.
    """
    if not NO_VENV:
        environment = gpu_environment(session)
        install_ours(session, environment, cuda="1")
        return environment.python, {}
    python, env = present_python(session), source_path()
    for operator in OPERATORS:
        if package is None or package.kind != "operator" or operator is package:
            command = [python, "-m", "dandan_ops_core.build", "--reuse", str(operator.path)]
            session.run(*command, external=True, env={**env, "DANDAN_BUILD_CUDA": "1"})
    return python, env


def has_gpu() -> bool:
    """Whether an NVIDIA GPU is visible; asks the driver in a process of its own."""
    code = "from dandan_ops_core.build.arch import visible_capabilities as v; import sys; sys.exit(not v())"
    env = {**os.environ, "PYTHONPATH": str(CORE.path / "src")}
    return subprocess.run([sys.executable, "-c", code], env=env, check=False).returncode == 0


# ------------------------------------------------------------------------------------------------------- sessions


@nox.session(venv_backend="none")
def demo(session: nox.Session) -> None:
    """Each operator on a model's tensors: backend, kernel, reason, error, time; CUDA where GPU and toolkit are."""
    if NO_VENV:
        python, env = present_python(session), source_path()
        session.run(python, "-m", "dandan_ops.cli", "demo", *session.posargs, external=True, env=env)
        return
    gpu = has_gpu()
    session.log("an NVIDIA GPU is visible" if gpu else "no NVIDIA GPU is visible: the demo runs on the CPU")
    environment = gpu_environment(session) if gpu else cpu_environment(session)
    install_ours(session, environment, cuda="auto" if gpu else "0")
    session.run(environment.program("dandan-ops"), "demo", *session.posargs, external=True)


@nox.session(venv_backend="none")
@nox.parametrize("suite", [*PACKAGES, None], ids=[*(package.folder for package in PACKAGES), "tools"])
def test(session: nox.Session, suite: Package | None) -> None:
    """The CPU suite of every package and of the tools; GPU tests report as skipped."""
    tests = suite.path / "tests" if suite else ROOT / "tools" / "tests"
    env = {"CUDA_VISIBLE_DEVICES": ""}
    if NO_VENV:
        python, env = present_python(session), {**env, **source_path()}
    else:
        environment = cpu_environment(session)
        install_ours(session, environment, cuda="0")
        python = environment.python
    session.run(python, "-m", "pytest", "--require-any", str(tests), *session.posargs, external=True, env=env)


@nox.session(name="test-gpu", venv_backend="none")
@over(PACKAGES)
def test_gpu(session: nox.Session, package: Package) -> None:
    """The GPU suite; fails when no CUDA test ran. With --no-venv it installs nothing and needs no network."""
    tests = package.path / "tests"
    marked = any(re.search(r"\bmark\.gpu\b", path.read_text(encoding="utf-8")) for path in tests.glob("**/*.py"))
    if package.kind != "operator" and not marked:
        session.skip(f"{package.folder} has no kernels and no test marked gpu")
    python, env = gpu_python(session, package)
    command = [python, "-m", "pytest", "--require-gpu", "-m", "gpu", str(tests.relative_to(ROOT)), *session.posargs]
    shown = [f"{name}={value}" for name, value in env.items()] + command
    session.log("the same without nox: " + " ".join(shown))
    session.run(*command, external=True, env=env)


@nox.session(venv_backend="none")
@over(PACKAGES)
def build(session: nox.Session, package: Package) -> None:
    """The sdist, and the wheel from that sdist, into dist/. An operator package must get its CUDA part."""
    environment = cpu_environment(session)
    pip_install(session, environment, *AS_IT_IS, str(CORE.path))
    DIST.mkdir(exist_ok=True)
    for old in DIST.glob(f"{package.module}-*"):
        old.unlink()
    command = [environment.python, "-m", "build", "--no-isolation", "--outdir", str(DIST), str(package.path)]
    # No visible GPU: the architectures are then the whole default list, unless TORCH_CUDA_ARCH_LIST says otherwise.
    env = {"DANDAN_BUILD_CUDA": "1", "CUDA_VISIBLE_DEVICES": ""}
    if package.kind == "operator":
        env.update(cuda_toolkit(session, environment))
    session.run(*command, external=True, env=env)


@nox.session(name="check-wheel", venv_backend="none")
@over(PACKAGES)
def check_wheel(session: nox.Session, package: Package) -> None:
    """The wheel and sdist in dist/: contents, needed libraries, symbols known to the oldest torch, GPU code."""
    environment = cpu_environment(session)
    wheel, sdist = built_wheel(session, package), sorted(DIST.glob(f"{package.module}-*.tar.gz"))
    arguments = [str(wheel), *map(str, sdist)]
    if package.kind == "operator":
        arguments += ["--torch-headers", torch_headers(session, environment, ABI_TORCH[0]), "--platform-wheel"]
    session.run(environment.python, "tools/check_wheel.py", *arguments, external=True)


@nox.session(venv_backend="none")
@over(OPERATORS)
def headers(session: nox.Session, package: Package) -> None:
    """The binding compiles against the headers of the oldest and the newest torch."""
    environment = cpu_environment(session)
    pip_install(session, environment, *AS_IT_IS, str(CORE.path))
    folders = [torch_headers(session, environment, version) for version in (ABI_TORCH[0], ABI_TORCH[-1])]
    command = [environment.python, "tools/compile_binding.py", str(package.path), *folders]
    session.run(*command, external=True, env=cuda_toolkit(session, environment))


@nox.session(name="test-library", venv_backend="none")
@over(OPERATORS)
def test_library(session: nox.Session, package: Package) -> None:
    """The CPU suite against the wheels in dist/, compiled library included: its schemas, routes and fakes."""
    environment = cpu_environment(session)
    wheels = [str(built_wheel(session, each)) for each in PACKAGES]
    pip_install(session, environment, *AS_IT_IS, *wheels)
    _installed.clear()
    names = [each.distribution for each in PACKAGES]
    session.run(
        environment.python, "tools/check_environment.py", "--dist", str(DIST), "--expect", *names, external=True
    )
    command = [environment.python, "-m", "pytest", "--require-library", str(package.path / "tests"), *session.posargs]
    session.run(*command, external=True, env={"CUDA_VISIBLE_DEVICES": ""})


@nox.session(name="install-check", reuse_venv=False)
@over(PACKAGES)
def install_check(session: nox.Session, package: Package) -> None:
    """A fresh environment with this wheel from dist/ and what it declares: smoke test; the library must load."""
    session.install(f"torch=={TORCH}", silent=True)
    install_wheel(session, package)
    smoke(session, "python", package)


@nox.session
@nox.parametrize("torch", ABI_TORCH, ids=list(ABI_TORCH))
def abi(session: nox.Session, torch: str) -> None:
    """The built wheels under the oldest, the pinned and the newest torch; several GB each."""
    session.install(f"torch=={torch}", silent=True)
    for package in PACKAGES:
        install_wheel(session, package)
        smoke(session, "python", package)


@nox.session(venv_backend="none")
def lowest(session: nox.Session) -> None:
    """The CPU suite with the lowest dependencies that the packages declare, on the lowest Python at hand."""
    floor = sorted(
        {f"torch=={low}" for package in PACKAGES for low in re.findall(r'"torch>=([\d.]+)"', package.settings)}
    )
    if len(floor) != 1:
        session.error(f"the packages declare different lowest torch versions: {floor}")
    interpreter = shutil.which("python3.10")
    # A version manager may have a python3.10 on the path that only says which versions it has.
    if interpreter is None or subprocess.run([interpreter, "--version"], capture_output=True).returncode != 0:
        interpreter = sys.executable
    session.log(f"{floor[0]}, {interpreter}")
    tests = (*TEST_TOOLS, "numpy<2.3")
    environment = shared_environment(
        session, STATE / "lowest", (floor[0],), (*BUILD_TOOLS, *tests), interpreter=interpreter
    )
    install_ours(session, environment, cuda="0")
    for package in PACKAGES:
        session.run(
            environment.python, "-m", "pytest", str(package.path / "tests"), *session.posargs,
            external=True, env={"CUDA_VISIBLE_DEVICES": ""},
        )  # fmt: skip


@nox.session(reuse_venv=True)
def lint(session: nox.Session) -> None:
    """ruff, the workflows against their published schema, dependency rules, the two READMEs, releases, records."""
    session.install(*LINT_TOOLS)
    session.run("ruff", "check", ".")
    session.run("ruff", "format", "--check", ".")
    workflows = sorted(str(path.relative_to(ROOT)) for path in (ROOT / ".github/workflows").glob("*.yml"))
    session.run("check-jsonschema", "--builtin-schema", "vendor.github-workflows", *workflows)
    session.run("python", "tools/check_tree.py")
    session.run("python", "tools/check_readme.py")
    session.run("python", "tools/release.py", "--check")
    session.run("python", "tools/report.py", "--check")


@nox.session(venv_backend="none")
def typecheck(session: nox.Session) -> None:
    """mypy over the packages' sources, the tools and this file."""
    environment = cpu_environment(session)
    sources = [str(package.path / "src" / package.module) for package in PACKAGES]
    session.run(environment.python, "-m", "mypy", *sources, external=True)
    session.run(
        environment.python, "-m", "mypy", "noxfile.py", *map(str, sorted(Path("tools").glob("*.py"))), external=True
    )


@nox.session(reuse_venv=True)
def docs(session: nox.Session) -> None:
    """The documentation site into site/; a warning is an error. `-- serve` shows it while it is written."""
    session.install(*DOCS_TOOLS)
    if session.posargs:
        session.run("mkdocs", *session.posargs)
    else:
        session.run("mkdocs", "build", "--strict", "--clean", env={"NO_MKDOCS_2_WARNING": "1"})


@nox.session(venv_backend="none")
@over(OPERATORS)
def bench(session: nox.Session, package: Package) -> None:
    """The package's benchmarks on this GPU; arguments behind -- go to each script."""
    scripts = sorted((package.path / "benchmarks").glob("bench_*.py"))
    if not scripts:
        session.error(f"{package.folder} has no benchmarks/bench_*.py")
    python, env = gpu_python(session, package)
    for script in scripts:
        session.run(python, str(script.relative_to(ROOT)), *session.posargs, external=True, env=env)


@nox.session(venv_backend="none")
def calibrate(session: nox.Session) -> None:
    """`dandan-ops calibrate` on libraries built from this tree: `-- --package dandan-gemm --budget 300`."""
    python, env = gpu_python(session)
    session.run(python, "-m", "dandan_ops.cli", "calibrate", *session.posargs, external=True, env=env)


@nox.session(venv_backend="none")
@over(OPERATORS)
def sanitize(session: nox.Session, package: Package) -> None:
    """The tests marked sanitize under compute-sanitizer's memcheck and racecheck."""
    python, env = gpu_python(session, package)
    sanitizer = compute_sanitizer(session)
    env = {**env, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}  # else most out-of-bounds accesses stay inside torch's pool
    tests = str((package.path / "tests").relative_to(ROOT))
    for tool in ("memcheck", "racecheck"):
        command = [sanitizer, f"--tool={tool}", "--error-exitcode=1", "--target-processes=all"]
        # Only own kernels: racecheck reports hazards in PyTorch's reductions, and checking those takes the longest.
        command += ["--kernel-name=kernel_substring=dandan", python, "-m", "pytest"]
        command += ["--require-gpu", "-m", "gpu and sanitize", tests, *session.posargs]
        session.run(*command, external=True, env=env)


@nox.session(venv_backend="none")
def dev(session: nox.Session) -> None:
    """An environment in .venv with every package as an editable install, in dependency order."""
    gpu = has_gpu()
    torch = "torch>=2.9" if gpu else f"torch=={TORCH}"
    path = ROOT / ".venv"
    environment = shared_environment(session, path, (torch,), (*BUILD_TOOLS, *TEST_TOOLS, *TYPE_TOOLS, *LINT_TOOLS))
    for package in PACKAGES:
        pip_install(session, environment, "--no-deps", "--no-build-isolation", "--editable", str(package.path))
    names = [package.distribution for package in PACKAGES]
    session.run(environment.python, "tools/check_environment.py", "--expect", *names, external=True)
    session.log(f"activate it with: source {environment.bin.relative_to(ROOT)}/activate")


# -------------------------------------------------------------------------------------------------------- helpers


def built_wheel(session: nox.Session, package: Package) -> Path:
    wheels = package.wheels
    if len(wheels) != 1:
        session.error(f'dist/ has {len(wheels)} wheels of {package.distribution}; run nox -s "build({package.folder})"')
    return wheels[0]


def install_wheel(session: nox.Session, package: Package) -> None:
    """Install one wheel by its path; what it declares of ours comes from dist/, and that is proven."""
    session.install("--find-links", str(DIST), str(built_wheel(session, package)), silent=True)
    arguments = ("--dist", str(DIST), "--expect", package.distribution)
    session.run("python", str(ROOT / "tools/check_environment.py"), *arguments)


def smoke(session: nox.Session, python: str, package: Package) -> None:
    """Run the smoke test from an empty folder, so that nothing of the tree is importable."""
    arguments = [package.module]
    compiled = {"core": (), "operator": (package,), "python": (), "meta": OPERATORS}[package.kind]
    for operator in compiled:
        if built_wheel(session, operator).name.endswith("-none-any.whl"):
            session.error(f"the wheel of {operator.distribution} has no CUDA library")
    if compiled:
        arguments += ["--library", *(operator.module for operator in compiled)]
    with session.chdir(session.create_tmp()):
        session.run(python, "-I", str(ROOT / "tools/smoke.py"), *arguments)


def cuda_toolkit(session: nox.Session, environment: Environment) -> dict[str, str]:
    """Variables for a CUDA build: none where this machine has a toolkit, else one from its wheels, in .nox/toolkit."""
    code = "import os; from dandan_ops_core.build.toolkit import Toolkit, find_toolkit as find"
    code += "; raise SystemExit(not isinstance(find(os.environ), Toolkit))"
    if subprocess.run([environment.python, "-c", code], check=False).returncode == 0:
        return {}
    toolkit = shared_environment(session, STATE / "toolkit", CUDA_TOOLKIT)
    (home,) = toolkit.path.glob("**/site-packages/nvidia/cu13")
    return {"DANDAN_CUDA_HOME": str(home)}


def torch_headers(session: nox.Session, environment: Environment, version: str) -> str:
    """The include folder of a torch version, fetched once into .nox/torch-headers."""
    command = [environment.python, str(ROOT / "tools/fetch_headers.py"), version, str(STATE / "torch-headers")]
    printed = session.run(*command, external=True, silent=True)
    return str(printed).strip().splitlines()[-1]


def compute_sanitizer(session: nox.Session) -> str:
    """compute-sanitizer of the toolkit."""
    homes = [os.environ.get("DANDAN_CUDA_HOME"), os.environ.get("CUDA_HOME"), "/usr/local/cuda"]
    places = [f"{home}/{folder}" for home in homes if home for folder in ("bin", "compute-sanitizer")]
    found = shutil.which("compute-sanitizer") or shutil.which("compute-sanitizer", path=os.pathsep.join(places))
    if found is None:
        session.error("compute-sanitizer was not found; it is part of the CUDA toolkit")
        raise AssertionError  # for a mypy that does not see nox: session.error raises
    return found

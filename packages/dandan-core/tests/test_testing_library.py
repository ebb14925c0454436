"""The checks of a compiled library: each passes for one that is as Python says, and fails for one that is not."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dandan_ops_core import PLUGIN_API, loader
from dandan_ops_core.backend import BackendUnavailableError
from dandan_ops_core.registry import OperatorLibrary
from dandan_ops_core.testing import library as checks

PACKAGE = "dandan_checked"
TWICE = "twice(Tensor x, int backend) -> Tensor"
REFUSED = 'twice: backend "row" cannot run: rows are odd; "auto" and "torch" can'


@pytest.fixture(scope="module")
def twice() -> Any:
    """An operator in torch.ops with a kernel for the CPU and a fake."""
    fragment = torch.library.Library(PACKAGE, "DEF")
    fragment.define(TWICE)
    fragment.impl("twice", lambda x, backend: x * 2, "CompositeExplicitAutograd")
    yield torch.ops.dandan_checked.twice.default
    fragment._destroy()


class Compiled:
    """What the checks read of an OperatorLibrary, with a build for sm_80 and sm_90a of two kernel files."""

    COMMON = OperatorLibrary.COMMON

    def __init__(self) -> None:
        self.package = PACKAGE
        self.codes = {"auto": 0, "torch": 1, "cuda": 2, "row": 3, "tile": 4}
        schemas = [TWICE, "twice_out(...)", "twice_info(...)"]
        self.operators = {"twice": SimpleNamespace(outputs=("out",), schemas=lambda: schemas)}
        prints = {"row_x": "a1", "tile_x": "b2"}
        self.build = {"plugin_api": PLUGIN_API, "architectures": ["8.0", "9.0a"], "ptx": [], "fingerprints": prints}
        self.library = SimpleNamespace(build_info=self.build)
        self.described: dict[str, Any] = {"plugin_api": PLUGIN_API, "backends": list(self.codes), "sass": "80,90a"}
        self.described |= {"ptx": "", "configs": {"row": [{"name": "8x8"}]}}
        self.answer: dict[str, Any] | str = {"backend": "cuda", "kernel": "row", "config": "8x8"}

    def op(self, name: str) -> Any:
        return getattr(torch.ops.dandan_checked, name).default

    def describe(self) -> dict[str, Any]:
        return self.described

    def info(self, op: str, inputs: Any, outputs: Any, backend: str, arch: int) -> dict[str, Any]:
        assert (op, inputs, outputs, arch) == ("twice", ("x",), (None,), 90)
        if isinstance(self.answer, str):
            raise BackendUnavailableError(self.answer)
        return self.answer


@pytest.fixture
def csrc(tmp_path: Path) -> Path:
    for name in ("row_x.cu", "tile_x.cu", "row_x.cuh", "bindings.cpp"):
        (tmp_path / name).touch()
    return tmp_path


@pytest.fixture
def compiled() -> Any:
    return Compiled()


def test_a_library_that_was_built_and_is_not_loaded_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(loaded: bool, build_info: dict[str, Any]) -> None:
        found = SimpleNamespace(loaded=loaded, build_info=build_info, reason="a symbol is missing")
        monkeypatch.setattr(loader, "load", lambda package: found)
        checks.check_loaded_if_built(PACKAGE)

    load(True, {"library": "lib.so"})
    load(False, {"library": None})
    load(False, {})
    with pytest.raises(AssertionError, match="dandan_checked was built and is not loaded: a symbol is missing"):
        load(False, {"library": "lib.so"})


def test_schemas_are_those_of_the_package_the_operators_and_what_is_besides(compiled: Any) -> None:
    found = checks.schemas(compiled, ["tile_out(...)"], ("pack(...)", "unpack(...)"))
    names = ["describe", "set_profile", "set_dependent_launch", "twice", "twice_out", "twice_info"]
    assert [checks.name_of(schema) for schema in found] == [*names, "tile_out", "pack", "unpack"]


def test_another_schema_is_found(compiled: Any, twice: Any) -> None:
    checks.check_schema(compiled, TWICE)
    with pytest.raises(AssertionError, match=r"the library defines dandan_checked::twice\(Tensor x, int backend\)"):
        checks.check_schema(compiled, "twice(Tensor x, int backend, int more) -> Tensor")


def test_a_missing_kernel_is_found(compiled: Any, twice: Any) -> None:
    checks.check_registered(compiled, "twice", launches=False)
    with pytest.raises(AssertionError, match="dandan_checked::twice has no kernel for CUDA"):
        checks.check_registered(compiled, "twice", launches=True)


def test_a_description_that_agrees(compiled: Any, csrc: Path) -> None:
    checks.check_description(compiled, csrc)


@pytest.mark.parametrize(
    ("where", "key", "value"),
    [
        ("described", "plugin_api", PLUGIN_API + 1),
        ("build", "plugin_api", PLUGIN_API + 1),
        ("described", "backends", ["auto", "torch", "cuda", "tile", "row"]),
        ("described", "sass", "80"),
        ("described", "sass", ""),
        ("build", "architectures", ["8.0", "9.0"]),
        ("described", "ptx", "90"),
        ("build", "ptx", ["9.0"]),
        ("build", "fingerprints", {"row_x": "a1"}),
        ("build", "fingerprints", {"row_x": "a1", "tile_x": "b2", "more_x": "c3"}),
    ],
)
def test_a_description_that_does_not_agree_is_found(
    compiled: Any, csrc: Path, where: str, key: str, value: Any
) -> None:
    getattr(compiled, where)[key] = value
    with pytest.raises(AssertionError, match="must be"):
        checks.check_description(compiled, csrc)


def test_kernels_and_their_files(compiled: Any, csrc: Path) -> None:
    checks.check_kernel_files(compiled, csrc, suffix="_x")
    with pytest.raises(AssertionError, match=r"kernel files without a kernel: .*, kernels without one: .*'more_x'"):
        checks.check_kernel_files(compiled, csrc, suffix="_x", besides=["more"])
    (csrc / "more_x.cu").touch()
    checks.check_kernel_files(compiled, csrc, suffix="_x", besides=["more"])
    with pytest.raises(AssertionError, match="kernel files without a kernel: {'more_x'}"):
        checks.check_kernel_files(compiled, csrc, suffix="_x")


def test_a_kernel_of_two_fingerprints_is_found(compiled: Any, csrc: Path) -> None:
    """Records of row carry the fingerprint of all files that begin with its name."""
    compiled.build["fingerprints"]["row_y"] = "d4"
    with pytest.raises(AssertionError, match=r"row: its records carry another fingerprint than row_x\.cu"):
        checks.check_kernel_files(compiled, csrc, suffix="_x")


def test_a_refusal_is_its_text() -> None:
    def refuse() -> None:
        raise BackendUnavailableError(REFUSED)

    assert checks.refusal(refuse) == REFUSED
    with pytest.raises(AssertionError, match="nothing was refused: 3"):
        checks.refusal(max, 1, 3)
    with pytest.raises(RuntimeError, match="^boom$"):
        checks.refusal(lambda: (_ for _ in ()).throw(RuntimeError("boom")).__next__())


def test_answers_and_refusals_of_a_kernel(compiled: Any) -> None:
    assert checks.answer_or_refusal(compiled, "twice", ("x",), "row") == compiled.answer
    checks.check_route(compiled, "twice", ("x",), "row")
    compiled.answer = REFUSED
    assert checks.answer_or_refusal(compiled, "twice", ("x",), "row") == REFUSED
    checks.check_route(compiled, "twice", ("x",), "row")


@pytest.mark.parametrize(
    "answer",
    [
        {"backend": "cuda", "kernel": "tile", "config": "8x8"},
        {"backend": "torch", "kernel": "torch", "config": None},
        {"backend": "cuda", "kernel": "row", "config": "8x9"},
        REFUSED.replace('"row"', '"tile"'),
        REFUSED.replace("twice", "thrice"),
        'twice: backend "row" cannot run: rows are odd',
    ],
)
def test_what_a_kernel_may_not_answer(compiled: Any, answer: Any) -> None:
    compiled.answer = answer
    with pytest.raises(AssertionError, match="row"):
        checks.check_route(compiled, "twice", ("x",), "row")


def test_a_kernel_without_configurations_needs_none(compiled: Any) -> None:
    del compiled.answer["config"], compiled.described["configs"]
    checks.check_route(compiled, "twice", ("x",), "row")


def test_a_fake_result_has_no_memory(twice: Any) -> None:
    fake = checks.fake_result(twice, (torch.ones(2, 3).t(), 0))
    assert isinstance(fake, torch._subclasses.FakeTensor)
    assert (fake.shape, fake.stride()) == ((3, 2), (1, 3))

"""Operators in torch.ops without a compiled library: a small package of two, under a name of its own."""

from __future__ import annotations

import dataclasses
import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from dandan_ops_core import device, profiles
from dandan_ops_core.backend import BackendUnavailableError
from dandan_ops_core.registry import Operator, OperatorLibrary, named_error

_numbers = itertools.count()


def check_scale(x: Any, by: Any, *, out: Any) -> None:
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"scale: x is {type(x).__name__}; a tensor is needed")
    if by == 0:
        raise ValueError("scale: by is 0; another number is needed")
    if out is not None and out[0].shape != x.shape:
        raise ValueError(f"scale: out has shape {list(out[0].shape)}; {list(x.shape)} is needed")


def check_parts(x: Any, *, out: Any) -> None:
    if x.shape[-1] < 2:
        raise ValueError("parts: x has 1 column; 2 are needed")


OPERATORS = [
    Operator(
        "scale", "Tensor x, float by", ("out",), check_scale, lambda x, by: x * by, lambda x, by: x.new_empty(x.shape)
    ),
    Operator(
        "parts",
        "Tensor x",
        ("low", "high"),
        check_parts,
        lambda x: (x[..., :1].clone(), x[..., 1:].clone()),
        lambda x: (x.new_empty((*x.shape[:-1], 1)), x.new_empty((*x.shape[:-1], x.shape[-1] - 1))),
    ),
]


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> OperatorLibrary:
    """The two operators in a namespace that nobody had before: torch keeps them for the whole process."""
    name = f"registry_toy_{next(_numbers)}"
    (tmp_path / name).mkdir()
    (tmp_path / name / "__init__.py").write_text("")
    monkeypatch.syspath_prepend(str(tmp_path))
    return OperatorLibrary(name, ("sm80_fast", "sm90_faster"), OPERATORS)


X = torch.arange(6.0).reshape(2, 3)

# ------------------------------------------------------------------------------------------------------------- schemas


def test_schemas_of_one_and_of_two_outputs() -> None:
    scale, parts = OPERATORS
    assert scale.schemas() == [
        "scale(Tensor x, float by, int backend) -> Tensor",
        "scale_out(Tensor x, float by, int backend, Tensor(a!) out) -> ()",
        "scale_info(Tensor x, float by, int backend, Tensor? out, int arch) -> Tensor",
    ]
    assert parts.schemas() == [
        "parts(Tensor x, int backend) -> (Tensor, Tensor)",
        "parts_out(Tensor x, int backend, Tensor(a!) low, Tensor(b!) high) -> ()",
        "parts_info(Tensor x, int backend, Tensor? low, Tensor? high, int arch) -> Tensor",
    ]
    assert scale.reference_schemas() == [
        "scale_reference(Tensor x, float by) -> Tensor",
        "scale_reference_out(Tensor x, float by, Tensor(a!) out) -> ()",
    ]
    assert parts.reference_schemas() == [
        "parts_reference(Tensor x) -> (Tensor, Tensor)",
        "parts_reference_out(Tensor x, Tensor(a!) low, Tensor(b!) high) -> ()",
    ]


def test_torch_holds_these_schemas(library: OperatorLibrary) -> None:
    for operator in OPERATORS:
        for schema in [*operator.schemas()[:2], *operator.reference_schemas()]:
            assert str(library.op(schema.split("(")[0])._schema) == f"{library.package}::{schema}"


def test_every_key_has_a_kernel_when_there_is_no_library(library: OperatorLibrary) -> None:
    """CUDA too: the torch backend must work where only the library is missing."""
    assert not library.library.loaded
    assert "was not built" in library.library.reason
    for name in ("scale", "scale_out", "parts", "parts_out"):
        for key in ("CPU", "CUDA", "Meta"):
            assert torch._C._dispatch_has_kernel_for_dispatch_key(f"{library.package}::{name}", key), (name, key)


def test_numbers_of_backends(library: OperatorLibrary) -> None:
    assert library.codes == {"auto": 0, "torch": 1, "cuda": 2, "sm80_fast": 3, "sm90_faster": 4}
    assert library.number("scale", "sm90_faster") == 4


@pytest.mark.parametrize("name", ["", "fast", "Auto", None, 0, True, [], {}, b"auto", ("auto",)])
def test_unknown_backend(library: OperatorLibrary, name: Any) -> None:
    with pytest.raises(ValueError) as raised:
        library.number("scale", name)
    assert str(raised.value) == (
        f"scale: backend {name!r} is unknown; it is one of auto, torch, cuda, sm80_fast, sm90_faster"
    )


# --------------------------------------------------------------------------------------------------------------- calls


def test_results_and_outputs(library: OperatorLibrary) -> None:
    for number in (0, 1):
        assert torch.equal(library.op("scale")(X, 2.0, number), X * 2)
        out = torch.empty_like(X)
        assert library.op("scale_out")(X, 3.0, number, out) is None
        assert torch.equal(out, X * 3)
        low, high = library.op("parts")(X, number)
        assert torch.equal(low, X[:, :1])
        assert torch.equal(high, X[:, 1:])
        low, high = torch.empty(2, 1), torch.empty(2, 2)
        library.op("parts_out")(X, number, low, high)
        assert torch.equal(torch.cat((low, high), -1), X)
    assert torch.equal(library.op("scale_reference")(X, 2.0), X * 2)
    out = torch.empty_like(X)
    library.op("scale_reference_out")(X, 2.0, out)
    assert torch.equal(out, X * 2)


@pytest.mark.parametrize("form", ["scale", "scale_out"])
@pytest.mark.parametrize("device_name", ["cpu", "meta"])
def test_rules_are_checked_by_kernels_and_fakes(library: OperatorLibrary, form: str, device_name: str) -> None:
    x = X.to(device_name)
    more = (torch.empty_like(x),) if form.endswith("out") else ()
    with pytest.raises(ValueError, match="^scale: by is 0; another number is needed$"):
        library.op(form)(x, 0.0, 0, *more)
    if more:
        with pytest.raises(ValueError, match=r"^scale: out has shape \[3, 2\]; \[2, 3\] is needed$"):
            library.op(form)(x, 1.0, 0, torch.empty(3, 2, device=device_name))


@pytest.mark.parametrize("name", ["cuda", "sm80_fast"])
def test_own_kernels_without_a_gpu(library: OperatorLibrary, name: str) -> None:
    why = "x is on cpu, the own kernels run on CUDA devices"
    text = f'^scale: backend "{name}" cannot run: {why}; "auto" and "torch" can$'
    with pytest.raises(BackendUnavailableError, match=text):
        library.op("scale")(X, 2.0, library.codes[name])
    with pytest.raises(BackendUnavailableError, match=text):
        library.op("scale_out")(X, 2.0, library.codes[name], torch.empty_like(X))


def test_unavailable_calls_the_first_argument_by_its_name(library: OperatorLibrary) -> None:
    library.operators["scale"] = dataclasses.replace(library.operators["scale"], first="a")
    why = "a is on cpu, the own kernels run on CUDA devices"
    assert str(library.unavailable("scale", "cuda", X)) == (
        f'scale: backend "cuda" cannot run: {why}; "auto" and "torch" can'
    )


def test_unavailable_names_the_missing_library_for_a_cuda_tensor(library: OperatorLibrary) -> None:
    class OnCuda:
        is_cuda = True

    error = library.unavailable("scale", "cuda", OnCuda())  # type: ignore[arg-type]
    assert str(error) == (f'scale: backend "cuda" cannot run: {library.library.reason}; "auto" and "torch" can')


@pytest.mark.parametrize("number", [-1, 5, 99])
def test_unknown_number(library: OperatorLibrary, number: int) -> None:
    with pytest.raises(ValueError, match=f"^scale: backend number {number} is unknown$"):
        library.op("scale")(X, 2.0, number)


def test_fakes_have_shapes_and_dtypes(library: OperatorLibrary) -> None:
    found = library.op("scale")(X.half().to("meta"), 2.0, 0)
    assert (found.shape, found.dtype, found.device.type) == (X.shape, torch.float16, "meta")
    low, high = library.op("parts")(X.to("meta"), 4)  # which kernel runs is known only on the device
    assert (low.shape, high.shape) == ((2, 1), (2, 2))
    for form, arguments in (("scale", (X, 2.0, 0)), ("parts", (X, 0)), ("scale_out", (X, 2.0, 0, torch.empty_like(X)))):
        torch.library.opcheck(library.op(form), arguments, test_utils=("test_schema", "test_faketensor"))


# -------------------------------------------------------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("text", "kind", "words"),
    [
        ("ValueError: scale: by is 0", ValueError, "scale: by is 0"),
        ("TypeError: scale: x is list", TypeError, "scale: x is list"),
        ("RuntimeError: torch could not read a tensor", RuntimeError, "torch could not read a tensor"),
        ("BackendUnavailableError: no: really", BackendUnavailableError, "no: really"),
        ("ValueError: one\nException raised from check at a.cpp:1\n frame #0", ValueError, "one"),
        ("ValueError: one\ntwo", ValueError, "one\ntwo"),
    ],
)
def test_named_error(text: str, kind: type[Exception], words: str) -> None:
    error = named_error(RuntimeError(text))
    assert type(error) is kind
    assert str(error) == words


@pytest.mark.parametrize(
    "text", ["", "CUDA error: an illegal memory access", "ValueErrors: x", "KeyError: x", "a ValueError: x"]
)
def test_errors_of_others_are_not_renamed(text: str) -> None:
    assert named_error(RuntimeError(text)) is None


def test_explain_names_what_is_broken_first(library: OperatorLibrary) -> None:
    """In this order: the backend's name, a rule, the operator's own words, the error as it came."""

    def explain(error: Exception, *inputs: Any, out: Any = None, backend: str = "auto") -> Exception:
        return library.explain("scale", error, inputs, out, backend)

    plain = RuntimeError("out of memory")
    assert "backend 'fast' is unknown" in str(explain(plain, [1], 0.0, backend="fast"))
    assert str(explain(plain, [1], 0.0)) == "scale: x is list; a tensor is needed"
    assert str(explain(plain, X, 0.0)) == "scale: by is 0; another number is needed"
    assert "out has shape [1]" in str(explain(plain, X, 1.0, out=torch.empty(1)))
    told = explain(RuntimeError("BackendUnavailableError: scale: no"), X, 1.0)
    assert (type(told), str(told)) == (BackendUnavailableError, "scale: no")
    already = BackendUnavailableError("TypeError: not to be read again")
    assert explain(already, X, 1.0) is already
    assert explain(plain, X, 1.0) is plain


def test_info_raises_the_named_error(library: OperatorLibrary) -> None:
    """The compiled library's errors are RuntimeErrors whose text begins with a name."""
    errors = {1.0: "ValueError: scale: no", 2.0: "BackendUnavailableError: scale: never", 3.0: "something else"}

    def info(x: torch.Tensor, by: float, backend: int, out: torch.Tensor | None, arch: int) -> torch.Tensor:
        if by in errors:
            raise RuntimeError(errors[by])
        answer = json.dumps({"backend": backend, "arch": arch, "out": out is not None})
        return torch.tensor(list(answer.encode()), dtype=torch.uint8)

    library._fragment.define(OPERATORS[0].schemas()[2])
    library._fragment.impl("scale_info", info, "CompositeExplicitAutograd")
    assert library.info("scale", (X, 9.0), (None,), "cuda", 90) == {"backend": 2, "arch": 90, "out": False}
    assert library.info("scale", (X, 9.0), (X,), "sm80_fast") == {"backend": 3, "arch": 0, "out": True}
    for by, kind, words in ((1.0, ValueError, "scale: no"), (2.0, BackendUnavailableError, "scale: never")):
        with pytest.raises(kind, match=f"^{words}$"):
            library.info("scale", (X, by), (None,), "cuda", 90)
    with pytest.raises(RuntimeError, match="^something else$"):
        library.info("scale", (X, 3.0), (None,), "cuda", 90)
    with pytest.raises(ValueError, match="backend 'fast' is unknown"):
        library.info("scale", (X, 9.0), (None,), "fast", 90)


# ----------------------------------------------------------------------------------------------- the torch route, grads


def test_run_reference(library: OperatorLibrary) -> None:
    assert torch.equal(library.run_reference("scale", (X, 2.0), None, "torch"), X * 2)
    out = torch.empty_like(X)
    assert library.run_reference("scale", (X, 2.0), out, "auto") is out
    assert torch.equal(out, X * 2)
    pair = (torch.empty(2, 1), torch.empty(2, 2))
    assert library.run_reference("parts", (X,), pair, "torch") is pair
    assert torch.equal(torch.cat(pair, -1), X)
    with pytest.raises(ValueError, match="^scale: by is 0"):
        library.run_reference("scale", (X, 0.0), None, "torch")
    with pytest.raises(ValueError, match="backend 'fast' is unknown"):
        library.run_reference("scale", (X, 0.0), None, "fast")


def test_gradients_flow_through_the_reference(library: OperatorLibrary) -> None:
    x = X.clone().requires_grad_()
    result = library.run_reference("scale", (x, 3.0), None, "auto")
    result.sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad, torch.full_like(X, 3))


def test_calls_that_cannot_record_a_gradient(library: OperatorLibrary) -> None:
    x, out = X.clone().requires_grad_(), torch.empty_like(X)
    refusal = (
        "^scale: out= takes no part in automatic differentiation; call it without out= or under torch.no_grad\\(\\)$"
    )
    for inputs, target in (((x, 2.0), out), ((X, 2.0), out.clone().requires_grad_())):
        before = target.detach().clone()
        with pytest.raises(ValueError, match=refusal):
            library.run_reference("scale", inputs, target, "torch")
        assert torch.equal(target.detach().nan_to_num(), before.nan_to_num())
        with torch.no_grad():
            assert library.run_reference("scale", inputs, target, "torch") is target
    with pytest.raises(BackendUnavailableError, match='^scale: backend "cuda" cannot run: x is on cpu'):
        library.run_reference("scale", (x, 2.0), None, "cuda")
    assert library.check_gradients("scale", (x, 2.0), None, "auto")
    assert not library.check_gradients("scale", (X, 2.0), None, "auto")
    with torch.no_grad():
        assert not library.check_gradients("scale", (x, 2.0), (out,), "cuda")


# ------------------------------------------------------------------------------------------------------------ profiles

ROW = profiles.Row("scale", "float16", (("cols", 64),), "sm80_fast", "abc", 1.2, "h200-plain.json")


@pytest.fixture
def rows(library: OperatorLibrary, monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """What the compiled library was handed; its part is played here."""
    handed: list[bytes] = []

    def set_profile(raw: torch.Tensor) -> None:
        text = bytes(raw.tolist())
        if b"refused" in text:
            raise RuntimeError('ValueError: profile row "refused" is not op;dtype;cols=N;kernel')
        handed.append(text)

    library._fragment.define("set_profile(Tensor rows) -> ()")
    library._fragment.impl("set_profile", set_profile, "CompositeExplicitAutograd")
    monkeypatch.setattr(device, "describe", lambda: device.DeviceInfo("toy", None, None, None, None, None))
    return handed


def test_profile_rows_are_handed_over(
    library: OperatorLibrary, rows: list[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []

    def rows_for(*arguments: Any) -> list[profiles.Row]:
        asked.append(arguments)
        return [ROW]

    monkeypatch.setattr(profiles, "rows_for", rows_for)
    library.op("load_profile")()
    assert rows == [b"scale;float16;cols=64;sm80_fast\n"]
    assert library.profile == "h200-plain.json"
    assert asked[0][0] == library.package


def test_no_rows_are_not_handed_over(
    library: OperatorLibrary, rows: list[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(profiles, "rows_for", lambda *arguments: [])
    library.op("load_profile")()
    assert rows == []
    assert library.profile is None


def test_rows_that_the_library_refuses_are_a_warning(
    library: OperatorLibrary, rows: list[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    bad = profiles.Row("scale", "float16", (("cols", 64),), "refused", "abc", 1.2, "h200-plain.json")
    monkeypatch.setattr(profiles, "rows_for", lambda *arguments: [ROW, bad])
    words = f'route tables of {library.package} are ignored: profile row "refused" is not op;dtype;cols=N;kernel'
    with pytest.warns(profiles.ProfileWarning, match=words):
        library.op("load_profile")()
    assert rows == []
    assert library.profile is None

"""The checks of tables of refused calls: each passes for an operator that refuses, and fails for one that does not."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch

from dandan_ops_core.testing import bad_inputs
from dandan_ops_core.testing.bad_inputs import Case, changed, tensor

RULE = "x has 3 columns; an even number is needed"


def doubled(x: torch.Tensor, *, out: torch.Tensor | None = None, backend: str = "auto") -> torch.Tensor:
    """An operator with one rule."""
    if x.shape[-1] % 2:
        raise ValueError(f"doubled: x has {x.shape[-1]} columns; an even number is needed")
    return x * 2


def case(**changes: Any) -> Case:
    arguments = changed(lambda device: {"x": tensor(2, 3)(device)}, {})
    odd = Case("doubled", "odd", arguments, ValueError, RULE, bad_inputs.EVERYWHERE)
    return dataclasses.replace(odd, **changes)


# ------------------------------------------------------------------------------------------------------------ the table


def test_a_message_names_the_devices() -> None:
    elsewhere = case(text="y is on {other} but x is on {device}")
    assert elsewhere.message("cpu") == "doubled: y is on meta but x is on cpu"
    assert elsewhere.message("meta") == "doubled: y is on cpu but x is on meta"
    assert elsewhere.message("cuda") == "doubled: y is on cpu but x is on cuda:0"


def test_tensors_are_the_same_numbers_on_every_device() -> None:
    made = tensor(2, 5, dtype=torch.int32)("cpu")
    assert made.tolist() == [[0, 1, 2, 3, 4], [5, 6, 0, 1, 2]]
    assert tensor(2, 5, elsewhere=True)("cpu").device.type == "meta"
    assert tensor()("cpu").shape == ()


def test_changes_are_made_on_the_device_and_leave_the_rest() -> None:
    make = changed(lambda device: {"x": device, "y": 1, "z": 2}, {"y": lambda device: f"y of {device}", "z": None})
    assert make("meta") == {"x": "meta", "y": "y of meta", "z": None}


def test_cases_are_found_by_their_place() -> None:
    cases = [case(), case(name="on the CPU", places=frozenset({"cpu"}))]
    assert [each.id for each in bad_inputs.at(cases, "cpu")] == ["odd", "on the CPU"]
    assert [each.values for each in bad_inputs.at(cases, "meta", lambda each: each.op)] == [(cases[0],)]


def test_a_table_with_a_case_twice_or_too_few_is_refused() -> None:
    bad_inputs.check_table([case(), case(op="other"), case(name="even")], {"cpu": 3, "cuda": 3})
    with pytest.raises(AssertionError, match=r"cases of one name: \[\('doubled', 'odd'\)\]"):
        bad_inputs.check_table([case(), case()], {})
    with pytest.raises(AssertionError, match="1 cases for meta, 2 are needed"):
        bad_inputs.check_table([case(), case(name="real", places=bad_inputs.REAL)], {"cpu": 2, "meta": 2})


# ----------------------------------------------------------------------------------------------------------- the checks


def test_memory_is_all_that_lies_behind_the_tensors() -> None:
    base = torch.arange(8, dtype=torch.uint8)
    arguments = {
        "view": base[2:4],
        "pair": (base[:1], [1]),
        "number": 3,
        "sparse": torch.eye(2).to_sparse(),
        "meta": torch.empty(4, device="meta"),
    }
    assert [copy.tolist() for copy in bad_inputs.memory(arguments)] == [base.tolist()] * 2


@pytest.mark.parametrize("holder", [lambda x: {"x": x}, lambda x: {"out": (None, x)}], ids=["tensor", "in a tuple"])
def test_a_byte_beside_a_view_is_missed_by_nobody(holder: Callable[[torch.Tensor], dict[str, Any]]) -> None:
    base = torch.zeros(8)
    with bad_inputs.kept(holder(base[2:4])):
        pass
    with pytest.raises(AssertionError, match="memory of an argument was changed"), bad_inputs.kept(holder(base[2:4])):
        base[7] = 1


class Derived(ValueError):
    """Not the class that the table names."""


@pytest.mark.parametrize(
    ("raised", "expected", "text"),
    [
        (None, AssertionError, "nothing was raised"),
        (ValueError(f"doubled: {RULE} "), AssertionError, "it says"),
        (ValueError(RULE), AssertionError, "it says"),
        (Derived(f"doubled: {RULE}"), AssertionError, "Derived was raised, ValueError is expected"),
        (TypeError(f"doubled: {RULE}"), TypeError, "doubled"),  # of another class: it comes through
    ],
    ids=["nothing", "another text", "no operator", "a derived class", "another class"],
)
def test_what_is_not_the_expected_error(raised: Exception | None, expected: type[Exception], text: str) -> None:
    def run() -> None:
        if raised is not None:
            raise raised

    with pytest.raises(expected, match=text):
        bad_inputs.expect(case(), "cpu", run)


def test_modes_are_all_unless_only_gradients_are_refused() -> None:
    assert [mode.__name__ for mode in bad_inputs.modes(case())] == ["enable_grad", "no_grad", "inference_mode"]
    assert [mode.__name__ for mode in bad_inputs.modes(case(grad=True))] == ["enable_grad"]


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_an_operator_that_refuses_passes(device: str) -> None:
    bad_inputs.refuse(case(), device, doubled, doubled)
    bad_inputs.refuse_on_fakes(case(), doubled)
    bad_inputs.refuse_under_compile(case(), doubled)
    bad_inputs.refuse_in_library(case(), lambda arguments: doubled(**arguments))


def test_every_question_is_asked_with_every_choice_in_every_mode() -> None:
    asked = []

    def ask(x: torch.Tensor, **choice: Any) -> Any:
        asked.append((torch.is_grad_enabled(), torch.is_inference_mode_enabled(), choice))
        return doubled(x)

    also = ({"backend": "torch"}, {"lse": True})
    bad_inputs.refuse(case(), "cpu", ask, ask, also=also)
    choices = [{}, {"backend": "torch"}, {"lse": True}] * 2
    assert asked == [(grad, inference, choice) for grad, inference in ((True, False), (False, False), (False, True))
                     for choice in choices]  # fmt: skip
    asked.clear()
    named = case(make=lambda device: {"x": tensor(2, 3)(device), "backend": "cuda"}, grad=True)
    bad_inputs.refuse(named, "cpu", ask, also=also)
    assert [choice for _, _, choice in asked] == [{"backend": "cuda"}, {"backend": "cuda", "lse": True}]


def takes(x: torch.Tensor, **choice: Any) -> torch.Tensor:
    """Refuses nothing."""
    return x


def takes_without_gradients(x: torch.Tensor, **choice: Any) -> torch.Tensor:
    return doubled(x) if torch.is_grad_enabled() else x


def takes_with_torch(x: torch.Tensor, backend: str = "auto") -> torch.Tensor:
    return x if backend == "torch" else doubled(x)


def writes_first(x: torch.Tensor, **choice: Any) -> torch.Tensor:
    x.add_(1)
    return doubled(x)


@pytest.mark.parametrize("wrong", [takes, takes_without_gradients, takes_with_torch, writes_first])
def test_an_operator_that_does_not_refuse_is_found(wrong: Callable[..., Any]) -> None:
    with pytest.raises(AssertionError):
        bad_inputs.refuse(case(), "cpu", doubled, wrong)


@pytest.mark.parametrize("wrong", [takes, takes_without_gradients])
def test_one_that_takes_fakes_is_found(wrong: Callable[..., Any]) -> None:
    with pytest.raises(AssertionError, match="nothing was raised"):
        bad_inputs.refuse_on_fakes(case(), wrong)


def test_one_that_compiles_is_found() -> None:
    with pytest.raises(AssertionError, match="nothing was raised"):
        bad_inputs.refuse_under_compile(case(), takes)
    with pytest.raises(AssertionError, match="which lacks 'doubled: x has 5 columns"):
        bad_inputs.refuse_under_compile(case(text="x has 5 columns"), doubled)


@pytest.mark.parametrize("wrong", [takes, writes_first])
def test_a_library_that_does_not_refuse_is_found(wrong: Callable[..., Any]) -> None:
    with pytest.raises(AssertionError):
        bad_inputs.refuse_in_library(case(), lambda arguments: wrong(**arguments))


@pytest.mark.gpu
def test_cuda_works() -> None:
    bad_inputs.cuda_works()

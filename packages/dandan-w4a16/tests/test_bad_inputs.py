"""Bad inputs raise before any launch, with operator, argument, rule and value."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from w4a16_bad_inputs import CASES, Case, M, N, valid

import dandan_w4a16
from dandan_w4a16._ops import LIBRARY


def at(place: str) -> list[Any]:
    return [pytest.param(case, id=case.name) for case in CASES if place in case.places]


def memory(arguments: dict[str, Any]) -> list[torch.Tensor]:
    """A copy of all bytes behind the tensors of a call."""
    return [
        torch.empty(0, dtype=torch.uint8, device=t.device).set_(t.detach().untyped_storage()).clone()
        for t in arguments.values()
        if isinstance(t, torch.Tensor) and t.layout == torch.strided and t.device.type != "meta"
    ]


def expect(case: Case, device: str, run: Callable[[], Any]) -> None:
    """`run` raises exactly what the table says."""
    with pytest.raises(case.error) as raised:
        run()
    assert str(raised.value) == case.message(device)
    assert type(raised.value) is case.error


def modes(case: Case) -> Iterator[Any]:
    """Each way through the Python of the operator: gradients on, off, and in inference mode."""
    yield torch.enable_grad
    if not case.grad:
        yield torch.no_grad
        yield torch.inference_mode


def refuse(case: Case, device: str) -> None:
    """The call, the call with the torch backend and the question about the call all raise it, and change nothing."""
    for mode in modes(case):
        arguments = case.make(device)
        before = memory(arguments)
        with mode():
            expect(case, device, lambda: dandan_w4a16.w4a16_linear(**arguments))  # noqa: B023
            if "backend" not in arguments:
                expect(case, device, lambda: dandan_w4a16.w4a16_linear(**arguments, backend="torch"))  # noqa: B023
            expect(case, device, lambda: dandan_w4a16.w4a16_linear_execution_info(**arguments))  # noqa: B023
        for now, then in zip(memory(arguments), before, strict=True):
            assert torch.equal(now, then), "memory of an argument was changed"


def test_the_table_holds_every_kind() -> None:
    names = [case.name for case in CASES]
    assert len(set(names)) == len(names)
    for place, least in (("cpu", 100), ("meta", 85), ("fake", 80), ("cuda", 100)):
        assert sum(place in case.places for case in CASES) >= least, place
    assert {case.error.__name__ for case in CASES} == {"TypeError", "ValueError"}


@pytest.mark.parametrize("backend", ["auto", "torch"])
def test_the_arguments_that_the_table_starts_from_are_valid(backend: str) -> None:
    """Otherwise each of its cases could be refused for a reason of its own."""
    assert dandan_w4a16.w4a16_linear(**valid("cpu"), backend=backend).shape == (M, N)


@pytest.mark.parametrize("case", at("cpu"))
def test_on_the_cpu(case: Case) -> None:
    refuse(case, "cpu")


@pytest.mark.parametrize("case", at("meta"))
def test_on_meta_tensors(case: Case) -> None:
    refuse(case, "meta")


@pytest.mark.parametrize("case", at("fake"))
def test_on_fake_tensors(case: Case) -> None:
    """What torch.compile and export see."""
    for mode in modes(case):
        with FakeTensorMode(), mode():
            arguments = case.make("cpu")
            expect(case, "cpu", lambda: dandan_w4a16.w4a16_linear(**arguments))  # noqa: B023


COMPILED = [
    case for case in CASES if case.name in {"x with K 120", "scales [24, 1]", "group_size 48", "x int32", "out [24]"}
]


@pytest.mark.parametrize("case", COMPILED, ids=lambda case: case.name)
def test_under_compile(case: Case) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(dandan_w4a16.w4a16_linear, fullgraph=True, backend="eager")
    with pytest.raises(Exception, match=re.escape(case.message("cpu"))), torch.no_grad():
        compiled(**case.make("cpu"))


def test_every_case_of_compile_is_in_the_table() -> None:
    assert len(COMPILED) == 5


@pytest.mark.gpu
@pytest.mark.parametrize("case", at("cuda"))
def test_on_cuda(case: Case) -> None:
    refuse(case, "cuda")
    torch.cuda.synchronize()
    assert torch.ones(4, device="cuda").sum().item() == 4


@pytest.mark.gpu
@pytest.mark.parametrize(("home", "away"), [("cuda:0", "cpu"), ("cpu", "cuda:0")])
def test_mixed_devices(home: str, away: str) -> None:
    """A29: each operand alone on another device than the rest."""
    for name in ("x", "qweight", "scales", "zeros", "bias"):
        mixed = valid(home.split(":")[0])
        mixed[name] = mixed[name].to(away)
        with pytest.raises(ValueError, match=rf"^w4a16_linear: \w+ (is|are) on {home if name == 'x' else away} but "):
            dandan_w4a16.w4a16_linear(**mixed)
    assert torch.ones(4, device="cuda").sum().item() == 4


def test_backend_numbers_of_the_raw_operator() -> None:
    arguments = valid("cpu")
    inputs = [arguments[name] for name in ("x", "qweight", "scales", "zeros", "bias", "group_size")]
    with pytest.raises(ValueError, match="^w4a16_linear: backend number 99 is unknown$"):
        LIBRARY.op("w4a16_linear")(*inputs, 99)

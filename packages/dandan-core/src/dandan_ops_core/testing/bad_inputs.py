"""Tables of calls that an operator refuses, each with the exception and its whole text, and the checks that it does.

A case is made for a device, so that one table serves the CPU, meta and fake tensors, the checks of the compiled library
(which needs no GPU for them) and CUDA. A package holds the table; what proves that the operator agrees is here.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

__all__ = [
    "DEVICES",
    "DTYPES",
    "EVERYWHERE",
    "MEMORY",
    "NEEDED",
    "PYTHON",
    "REAL",
    "SELECTION",
    "Case",
    "Make",
    "at",
    "changed",
    "check_table",
    "cuda_works",
    "dtype_of",
    "expect",
    "given",
    "kept",
    "memory",
    "modes",
    "other",
    "refuse",
    "refuse_in_library",
    "refuse_on_fakes",
    "refuse_under_compile",
    "tensor",
]

# Where a case is refused, and by whom.
EVERYWHERE = frozenset({"cpu", "meta", "fake", "library", "cuda"})
# The compiled library's schema takes no such argument, so its own checks never see it.
PYTHON = EVERYWHERE - {"library"}
# Rules about memory: tensors without memory cannot break them.
MEMORY = frozenset({"cpu", "library", "cuda"})
# What the selection says, which runs for CUDA tensors alone.
SELECTION = frozenset({"library", "cuda"})
# One tensor without a device of its own kind.
DEVICES = EVERYWHERE - {"fake"}
REAL = frozenset({"cpu", "cuda"})

NEEDED = "a tensor is needed"
# What no operator takes for an activation.
DTYPES = (
    torch.float64,
    torch.complex64,
    torch.complex32,
    torch.int8,
    torch.uint8,
    torch.int32,
    torch.int64,
    torch.uint16,
    torch.bool,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
)

Make = Callable[[str], Any]
"""A value for a device."""


# --------------------------------------------------------------------------------------------------------- the table


@dataclass(frozen=True)
class Case:
    """One refused call. `text` is the whole message, with {device} and {other} for devices."""

    op: str
    name: str
    make: Callable[[str], dict[str, Any]]
    error: type[Exception]
    text: str
    places: frozenset[str]
    grad: bool = False  # only refused while gradients are recorded

    def message(self, device: str) -> str:
        place = f"{device}:0" if device == "cuda" else device
        return f"{self.op}: {self.text}".replace("{device}", place).replace("{other}", other(device))


def other(device: str) -> str:
    """A device that is not `device` and is always there."""
    return "meta" if device == "cpu" else "cpu"


def tensor(*shape: int, dtype: torch.dtype = torch.float16, elsewhere: bool = False) -> Make:
    """Small whole numbers, the same on every device; `elsewhere` puts them on another one."""

    def make(device: str) -> torch.Tensor:
        place = other(device) if elsewhere else device
        return (torch.arange(math.prod(shape), device=place) % 7).reshape(shape).to(dtype)

    return make


def dtype_of(dtype: torch.dtype) -> str:
    """The name of a dtype as messages have it."""
    return str(dtype).removeprefix("torch.")


def changed(base: Callable[[str], Mapping[str, Any]], changes: Mapping[str, Any]) -> Callable[[str], dict[str, Any]]:
    """The arguments of `base` with `changes`: values, or what makes them on a device."""

    def make(device: str) -> dict[str, Any]:
        arguments = dict(base(device))
        for key, change in changes.items():
            arguments[key] = change(device) if callable(change) else change
        return arguments

    return make


def at(cases: Iterable[Case], place: str, label: Callable[[Case], str] = lambda case: case.name) -> list[Any]:
    """The cases that are refused at a place, as parameters of a test."""
    import pytest

    return [pytest.param(case, id=label(case)) for case in cases if place in case.places]


def check_table(cases: Iterable[Case], least: Mapping[str, int]) -> None:
    """No case stands twice, and each place has as many as it must: a table that lost its cases proves nothing."""
    cases = list(cases)
    names = [(case.op, case.name) for case in cases]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise AssertionError(f"cases of one name: {twice}")
    for place, count in least.items():
        found = sum(place in case.places for case in cases)
        if found < count:
            raise AssertionError(f"{found} cases for {place}, {count} are needed")


# -------------------------------------------------------------------------------------------------------- the checks


def given(arguments: Mapping[str, Any]) -> Iterator[torch.Tensor]:
    """The tensors of a call, those in tuples and lists too."""
    for value in arguments.values():
        for each in value if isinstance(value, (tuple, list)) else (value,):
            if isinstance(each, torch.Tensor):
                yield each


def memory(arguments: Mapping[str, Any]) -> list[torch.Tensor]:
    """A copy of all bytes behind the tensors of a call."""
    copies = []
    for t in given(arguments):
        if t.layout == torch.strided and not t.is_nested and t.device.type != "meta":
            raw = torch.empty(0, dtype=torch.uint8, device=t.device).set_(t.detach().untyped_storage())
            copies.append(raw.clone())
    return copies


@contextlib.contextmanager
def kept(arguments: Mapping[str, Any]) -> Iterator[None]:
    """Inside, no byte behind the tensors of a call may change."""
    before = memory(arguments)
    yield
    for now, then in zip(memory(arguments), before, strict=True):
        if not torch.equal(now, then):
            raise AssertionError("memory of an argument was changed")


def expect(case: Case, device: str, run: Callable[[], Any]) -> None:
    """`run` raises exactly what the table says: this class, none derived from it, and this text."""
    try:
        run()
    except case.error as error:
        if type(error) is not case.error:
            raise AssertionError(f"{type(error).__name__} was raised, {case.error.__name__} is expected") from error
        if str(error) != case.message(device):
            raise AssertionError(f"it says {str(error)!r}, expected {case.message(device)!r}") from error
        return
    raise AssertionError(f"nothing was raised, expected {case.error.__name__}: {case.message(device)}")


def modes(case: Case) -> Iterator[Callable[[], contextlib.AbstractContextManager[Any]]]:
    """Each way through the Python of an operator: gradients on, off, and in inference mode."""
    yield torch.enable_grad
    if not case.grad:
        yield torch.no_grad
        yield torch.inference_mode


def refuse(
    case: Case,
    device: str,
    *questions: Callable[..., Any],
    also: Collection[Mapping[str, Any]] = ({"backend": "torch"},),
) -> None:
    """The call and the question about it raise it, as they are and with each of `also`, and change nothing.

    Args:
        case: what has to be refused.
        device: where its tensors are made.
        questions: functions of the arguments: the operator and its execution info.
        also: further arguments; left out where the case itself has one of them.
    """
    for mode in modes(case):
        arguments = case.make(device)
        with kept(arguments), mode():
            for question in questions:
                for extra in ({}, *also):
                    if not extra.keys() & arguments.keys():
                        expect(case, device, lambda: question(**arguments, **extra))  # noqa: B023


def refuse_on_fakes(case: Case, call: Callable[..., Any]) -> None:
    """The call raises it on what torch.compile and export see."""
    for mode in modes(case):
        with FakeTensorMode(), mode():
            arguments = case.make("cpu")
            expect(case, "cpu", lambda: call(**arguments))  # noqa: B023


def refuse_under_compile(case: Case, call: Callable[..., Any]) -> None:
    """The text comes through the whole of torch.compile, which wraps the error in its own."""
    torch._dynamo.reset()
    compiled = torch.compile(call, fullgraph=True, backend="eager")
    with torch.no_grad():
        arguments = case.make("cpu")
        try:
            compiled(**arguments)
        except Exception as error:
            if case.message("cpu") not in str(error):
                raise AssertionError(f"it says {str(error)!r}, which lacks {case.message('cpu')!r}") from error
            return
    raise AssertionError(f"nothing was raised, expected {case.error.__name__}: {case.message('cpu')}")


def refuse_in_library(case: Case, ask: Callable[[dict[str, Any]], Any]) -> None:
    """The compiled library's own checks say the same about tensors of the CPU, and change nothing.

    `ask` hands the arguments to the compiled operator that answers for a device which is not there.
    """
    arguments = case.make("cpu")
    with kept(arguments):
        expect(case, "cpu", lambda: ask(arguments))


def cuda_works() -> None:
    """The CUDA context still computes: no launch of a refused call left an error in it."""
    torch.cuda.synchronize()
    if torch.ones(4, device="cuda").sum().item() != 4:
        raise AssertionError("four ones on the device do not add to 4")

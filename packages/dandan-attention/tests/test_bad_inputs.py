"""Bad inputs raise before any launch, with operator, argument, rule and value."""

from __future__ import annotations

import re

import pytest
import torch
from attention_bad_inputs import CASES, DENSE, PACKED, VALUES, numbers, tensor, valid

import dandan_attention
from dandan_attention import checks
from dandan_attention._ops import LIBRARY
from dandan_ops_core.testing.bad_inputs import (
    Case,
    at,
    check_table,
    cuda_works,
    expect,
    refuse,
    refuse_on_fakes,
    refuse_under_compile,
)


def label(case: Case) -> str:
    return f"{case.op}, {case.name}"


def check_refused(case: Case, device: str) -> None:
    """The call and the question about it, with lse and without, and with the torch backend."""
    questions = (getattr(dandan_attention, case.op), getattr(dandan_attention, f"{case.op}_execution_info"))
    refuse(case, device, *questions, also=({"return_lse": True}, {"backend": "torch"}))


def test_the_table_holds_every_kind() -> None:
    check_table(CASES, {"cpu": 190, "meta": 150, "fake": 130, "cuda": 170})
    assert {case.error.__name__ for case in CASES} == {"TypeError", "ValueError"}
    assert {case.op for case in CASES} == {DENSE, PACKED}


@pytest.mark.parametrize("op", [DENSE, PACKED])
@pytest.mark.parametrize("backend", ["auto", "torch"])
def test_the_arguments_that_the_table_starts_from_are_valid(op: str, backend: str) -> None:
    """Otherwise each of its cases could be refused for a reason of its own."""
    arguments = valid(op, "cpu")
    out = torch.empty_like(arguments["q"])
    assert getattr(dandan_attention, op)(**arguments, backend=backend, out=out) is out


@pytest.mark.parametrize("case", at(CASES, "cpu", label))
def test_on_the_cpu(case: Case) -> None:
    check_refused(case, "cpu")


@pytest.mark.parametrize("case", at(CASES, "meta", label))
def test_on_meta_tensors(case: Case) -> None:
    check_refused(case, "meta")


@pytest.mark.parametrize("case", at(CASES, "fake", label))
def test_on_fake_tensors(case: Case) -> None:
    refuse_on_fakes(case, getattr(dandan_attention, case.op))


# A few of them through the whole of torch.compile.
COMPILED = [
    case
    for case in CASES
    if case.name in {"ratio", "q int32", "window_size -1", "softcap -1.0", "no query_start with causal=True",
                     "no query_starts with causal=True", "cu_seqlens_k one number more"}
]  # fmt: skip


@pytest.mark.parametrize("case", COMPILED, ids=label)
def test_under_compile(case: Case) -> None:
    refuse_under_compile(case, getattr(dandan_attention, case.op))


def test_every_case_of_compile_is_in_the_table() -> None:
    assert len(COMPILED) == 11


@pytest.mark.gpu
@pytest.mark.parametrize("case", at(CASES, "cuda", label))
def test_on_cuda(case: Case) -> None:
    check_refused(case, "cuda")
    cuda_works()


@pytest.mark.gpu
@pytest.mark.parametrize("case", [case for case in CASES if case.places == VALUES], ids=lambda case: f"{case.name}")
def test_values_on_cuda(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """Read under DANDAN_DEBUG=1; without it a wrong result and no access outside of the tensors."""
    arguments = case.make("cuda")
    call = getattr(dandan_attention, case.op)
    with torch.no_grad():
        for backend in ("auto", "torch"):
            assert call(**arguments, backend=backend).shape == arguments["q"].shape
        torch.cuda.synchronize()
        monkeypatch.setattr(checks, "DEBUG", True)
        expect(case, "cuda", lambda: call(**arguments))
    cuda_works()


@pytest.mark.gpu
@pytest.mark.parametrize("op", [DENSE, PACKED])
def test_debugging_reads_nothing_while_a_graph_is_captured(op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "DEBUG", True)
    arguments = valid(op, "cuda")
    call = getattr(dandan_attention, op)
    expected = call(**arguments)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = call(**arguments)
    graph.replay()
    assert torch.equal(out, expected)


@pytest.mark.gpu
@pytest.mark.parametrize("op", [DENSE, PACKED])
@pytest.mark.parametrize(("home", "away"), [("cuda:0", "cpu"), ("cpu", "cuda:0")])
def test_mixed_devices(op: str, home: str, away: str) -> None:
    """A29: each operand alone on another device than the rest."""
    for name, value in valid(op, home.split(":")[0]).items():
        if isinstance(value, torch.Tensor):
            mixed = {**valid(op, home.split(":")[0]), name: value.to(away)}
            place = home if name == "q" else away
            with pytest.raises(ValueError, match=rf"^{op}: \w+ is on {home if place == home else away} but q is on "):
                getattr(dandan_attention, op)(**mixed)
    cuda_works()


def test_debugging_is_read_from_the_environment() -> None:
    """Here it is off, so values on CUDA devices are not waited for."""
    import os
    import subprocess
    import sys

    code = "from dandan_attention import checks; print(checks.DEBUG)"
    for value, shown in (("1", "True"), ("0", "False"), ("", "False")):
        env = {**os.environ, "DANDAN_DEBUG": value}
        assert subprocess.check_output([sys.executable, "-c", code], env=env, text=True).strip() == shown


def test_debugging_checks_every_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not only those of the CPU kernel: the check stands before the operator, and not in a graph of torch.compile."""
    seen: list[str] = []
    for name in (DENSE, PACKED):
        monkeypatch.setattr(checks, name, lambda *_, name=name, **__: seen.append(name))
    for debug in (False, True):
        monkeypatch.setattr(checks, "DEBUG", debug)
        for name in (DENSE, PACKED):
            getattr(dandan_attention, name)(**valid(name, "cpu"))
    assert seen == [DENSE, PACKED]


@pytest.mark.parametrize("op", [DENSE, PACKED])
def test_what_only_the_raw_operators_can_be_given(op: str) -> None:
    """A backend number, an lse to write into, starts and "suffix" at once."""
    a = valid(op, "cpu")
    options = (False, None, None, None) if op == DENSE else (False, None, None, False)
    inputs = (*a.values(), *options, None, 0.0, None)
    with pytest.raises(ValueError, match=f"^{op}: backend number 99 is unknown$"):
        LIBRARY.op(op)(*inputs, 99)
    out = torch.empty_like(a["q"])
    shape = (2, 4, 5) if op == DENSE else (4, 5)
    write = LIBRARY.op(f"{op}_lse_out")
    for lse, error, text in (
        (tensor(*shape)("cpu"), TypeError, "lse has dtype float16; float32 is needed"),
        (torch.empty(*shape[:-1], 6), ValueError, f"lse has shape {[*shape[:-1], 6]}; {list(shape)} is needed"),
        (torch.empty(1).expand(shape), ValueError, "elements of lse share memory"),
        (torch.empty(*shape, 2)[..., 0], ValueError, "lse is not contiguous; a contiguous tensor is needed"),
        (out.view(-1)[: 2 * torch.Size(shape).numel()].view(torch.float32).view(shape), ValueError, "lse overlaps out"),
    ):
        with pytest.raises(error, match=f"^{op}: {re.escape(text)}"):
            write(*inputs, 0, out, lse)
    if op == PACKED:
        both = (*a.values(), False, None, numbers(0, 0)("cpu"), True, None, 0.0, None)
        with pytest.raises(ValueError, match='query_starts is a tensor and "suffix" at once; one of them is needed'):
            LIBRARY.op(op)(*both, 0)

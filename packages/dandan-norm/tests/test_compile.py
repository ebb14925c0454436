"""torch.compile, export and opcheck on the CPU: one graph for every number of rows, mutation through views, fakes.

They hold with the compiled library and without it. The kernels' own checks need a GPU.
"""

from __future__ import annotations

import shutil
import sysconfig
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from norm_bad_inputs import AFFINE, FIRST, OPS, SECOND, tensor, valid
from torch._dynamo.utils import counters
from torch._subclasses.fake_tensor import FakeTensorMode

import dandan_norm
from dandan_norm._ops import LIBRARY
from dandan_ops_core.testing import assert_bit_equal

INDUCTOR = pytest.mark.skipif(
    not any(map(shutil.which, ("g++", "clang++"))) or not Path(sysconfig.get_paths()["include"], "Python.h").is_file(),
    reason="inductor needs a C++ compiler and Python's headers",
)
ROWS = (1, 2, 3, 5, 8, 16, 33, 64, 100, 257)  # ten values of M; 1 is the one that dynamic shapes like to specialise on


@pytest.fixture(autouse=True)
def _fresh_compiler() -> None:
    torch._dynamo.reset()
    counters.clear()


def graphs_made() -> int:
    """Graphs that torch.compile made. Its backend may be called twice for one: a float that turns out to be a constant
    starts the analysis again.
    """
    return int(counters["stats"]["unique_graphs"])


def outputs(result: Any) -> tuple[torch.Tensor, ...]:
    return tuple(result) if isinstance(result, (tuple, list)) else (result,)


def inputs(op: str, x: torch.Tensor) -> tuple[Any, ...]:
    """The operator's arguments before `backend`, in the order of its schema, around an activation of any layout."""
    cols = x.shape[-1]
    weight, bias = torch.linspace(0.5, 1.5, cols).to(x.dtype), torch.linspace(-1, 1, cols).to(x.dtype)
    return {
        "rms_norm": (x, weight, 1e-6),
        "residual_rms_norm": (x, x, weight, 1e-6),
        "layer_norm": (x, weight, bias, 1e-5),
        "softmax": (x,),
        "silu_and_mul": (x, x),
        "argmax": (x,),
    }[op]


def new_outputs(op: str, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    if op == "argmax":
        return (torch.empty(x.shape[:-1], dtype=torch.int64),)
    return tuple(torch.empty(x.shape, dtype=x.dtype) for _ in LIBRARY.operators[op].outputs)


def assert_all_equal(found: Any, expected: Any) -> None:
    for a, b in zip(outputs(found), outputs(expected), strict=True):
        assert_bit_equal(a, b)


# ------------------------------------------------------------------------------------------------------------- opcheck


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("form", ["", "_out", "_reference", "_reference_out"])
def test_opcheck_of_every_form(op: str, dtype: torch.dtype, form: str) -> None:
    """The schema says what is written, the fake has the real shapes, strides and dtypes."""
    arguments: tuple[Any, ...] = inputs(op, torch.randn(3, 64).to(dtype))
    if "reference" not in form:
        arguments = (*arguments, 0)
    if form.endswith("out"):
        arguments = (*arguments, *new_outputs(op, arguments[0]))
    checks = ("test_schema", "test_faketensor") if "reference" not in form else ("test_schema",)
    torch.library.opcheck(LIBRARY.op(f"{op}{form}"), arguments, test_utils=checks)


@pytest.mark.parametrize("op", OPS)
def test_opcheck_under_aot_autograd_with_dynamic_shapes(op: str) -> None:
    arguments = (*inputs(op, torch.randn(3, 64)), 0)
    torch.library.opcheck(LIBRARY.op(op), arguments, test_utils=("test_aot_dispatch_dynamic",))


@pytest.mark.parametrize("op", OPS)
def test_every_written_argument_is_marked(op: str) -> None:
    written = {
        argument.name: argument.alias_info is not None and argument.alias_info.is_write
        for argument in LIBRARY.op(f"{op}_out")._schema.arguments
    }
    assert {name for name, is_write in written.items() if is_write} == set(LIBRARY.operators[op].outputs)
    assert not any(a.alias_info for a in LIBRARY.op(op)._schema.arguments)


# --------------------------------------------------------------------------------------------------------------- fakes

# What a caller may pass.
LAYOUTS: dict[str, Callable[[], torch.Tensor]] = {
    "rows": lambda: torch.randn(6, 64),
    "one row": lambda: torch.randn(64),
    "transposed": lambda: torch.randn(64, 6).t(),
    "transposed leading dimensions": lambda: torch.randn(4, 6, 64).transpose(0, 1),
    "columns of a wider tensor": lambda: torch.randn(6, 192)[:, 64:128],
    "every second column": lambda: torch.randn(6, 128)[:, ::2],
    "every second row": lambda: torch.randn(12, 64)[::2],
    "heads of a qkv tensor": lambda: torch.randn(6, 384)[:, 128:256].view(6, 2, 64),
    "expanded rows": lambda: torch.randn(1, 64).expand(6, 64),
    "expanded columns": lambda: torch.randn(6, 1).expand(6, 64),
    "odd start": lambda: torch.randn(6 * 63 + 1)[1:].view(6, 63),
    "A56, strides 10H, 2H, 1": lambda: torch.randn(3, 5, 256)[..., :128],
    "A56, strides 9H, H, 1": lambda: torch.randn(3, 9, 128)[:, :5],
    "no rows": lambda: torch.randn(0, 64),
    "one element": lambda: torch.randn(1, 1),
    "leading ones of odd strides": lambda: torch.randn(64).as_strided((1, 1, 64), (7, 3, 1)),
}


def described(t: torch.Tensor) -> tuple[Any, ...]:
    return tuple(t.shape), t.stride(), t.storage_offset(), t.dtype, t.device


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_fake_and_meta_results_are_described_as_the_real_one(op: str, layout: str, dtype: torch.dtype) -> None:
    """A50: shape, strides, offset, dtype and device."""
    x = LAYOUTS[layout]()
    x = x.to(dtype) if x.dtype != dtype else x
    assert dtype != torch.float32 or x.stride() == LAYOUTS[layout]().stride()
    arguments = inputs(op, x)
    real = outputs(LIBRARY.op(op)(*arguments, 0))
    meta = outputs(LIBRARY.op(op)(*(t.to("meta") if isinstance(t, torch.Tensor) else t for t in arguments), 0))
    with FakeTensorMode() as mode:
        faked = (mode.from_tensor(t) if isinstance(t, torch.Tensor) else t for t in arguments)
        fake = outputs(LIBRARY.op(op)(*faked, 0))
    assert [described(t) for t in fake] == [described(t) for t in real]
    assert [described(t)[:-1] for t in meta] == [described(t)[:-1] for t in real]
    shape = x.shape[:-1] if op == "argmax" else x.shape
    for t in real:
        # Contiguous strides whatever the input's were: torch.empty's, also for dimensions of one.
        assert described(t)[:2] == (tuple(shape), torch.empty(shape).stride())


# ------------------------------------------------------------------------------------------------------------- compile


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("backend", ["auto", "torch"])
def test_one_graph_for_ten_numbers_of_rows(op: str, backend: str) -> None:
    function = getattr(dandan_norm, op)
    compiled = torch.compile(
        lambda *tensors, eps: function(*tensors, *eps, backend=backend),
        fullgraph=True,
        dynamic=True,
        backend="aot_eager",
    )
    for rows in ROWS[1:]:
        arguments = inputs(op, torch.randn(rows, 64))
        eps = tuple(a for a in arguments if isinstance(a, float))
        tensors = tuple(a for a in arguments if isinstance(a, torch.Tensor))
        assert_all_equal(compiled(*tensors, eps=eps), function(*tensors, *eps))
    assert graphs_made() == 1
    # A single row is a case of its own to torch.compile, never to the operator.
    arguments = inputs(op, torch.randn(1, 64))
    tensors = tuple(a for a in arguments if isinstance(a, torch.Tensor))
    assert_all_equal(compiled(*tensors, eps=eps), function(*tensors, *eps))
    assert graphs_made() <= 2


@pytest.mark.parametrize("op", OPS)
def test_the_graph_holds_the_operator(op: str) -> None:
    """Not its reference: that would be compiled by inductor and never reach an own kernel."""
    graphs: list[torch.fx.GraphModule] = []

    def keep(graph: torch.fx.GraphModule, _: Any) -> Any:
        graphs.append(graph)
        return graph

    arguments = inputs(op, torch.randn(4, 64))
    with torch.no_grad():
        torch.compile(getattr(dandan_norm, op), fullgraph=True, backend=keep)(*arguments)
    (graph,) = graphs
    called = [node.target for node in graph.graph.nodes if node.op == "call_function"]
    assert LIBRARY.op(op) in called


@pytest.mark.parametrize("op", OPS)
def test_several_leading_dimensions_may_all_change(op: str) -> None:
    function = getattr(dandan_norm, op)
    compiled = torch.compile(function, fullgraph=True, dynamic=True, backend="aot_eager")
    for batch, rows, cols in ((2, 3, 64), (4, 7, 64), (3, 5, 128), (6, 2, 96)):
        arguments = inputs(op, torch.randn(batch, rows, cols))
        assert_all_equal(compiled(*arguments), function(*arguments))
    assert graphs_made() == 1


@INDUCTOR
@pytest.mark.parametrize("op", OPS)
def test_inductor_takes_the_fakes_at_their_word(op: str) -> None:
    """Inductor asserts sizes and strides of what an operator returns."""
    function = getattr(dandan_norm, op)
    compiled = torch.compile(function, fullgraph=True, dynamic=True)
    for layout in ("rows", "transposed", "heads of a qkv tensor", "expanded rows"):
        arguments = inputs(op, LAYOUTS[layout]())
        with torch.no_grad():
            assert_all_equal(compiled(*arguments), function(*arguments))


def write_into_views(op: str, base: torch.Tensor, *rest: Any) -> tuple[torch.Tensor, ...]:
    """A49: in place on both halves of one tensor, then a read of the views and of what lies around them."""
    first, second = base[0], base[1]
    function = getattr(dandan_norm, op)
    if op == "residual_rms_norm":
        function(first, second, *rest, out=(first, second))
    elif op == "silu_and_mul":
        function(first, second, out=second)
    elif op == "argmax":
        indices = torch.zeros(2, base.shape[1], dtype=torch.int64)
        function(first, out=indices[0])
        function(second, out=indices[1])
        return indices, indices.sum(0)
    else:
        function(first, *rest, out=first)
        function(second + first, *rest, out=second)
    return first + 1, second * 2, base.sum()


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("backend", ["eager", "aot_eager", pytest.param("inductor", marks=INDUCTOR)])
def test_in_place_on_views_of_one_base(op: str, backend: str) -> None:
    rest = tuple(a for a in inputs(op, torch.randn(1, 64))[1:] if op in AFFINE)
    rest = rest[1:] if op == "residual_rms_norm" else rest
    torch.manual_seed(0)
    eager_base = torch.randn(2, 5, 64)
    compiled_base = eager_base.clone()
    with torch.no_grad():
        expected = write_into_views(op, eager_base, *rest)
        compiled = torch.compile(write_into_views, fullgraph=True, backend=backend)
        found = compiled(op, compiled_base, *rest)
    for a, b in zip(found, expected, strict=True):
        # Inductor adds in another order.
        torch.testing.assert_close(a, b) if backend == "inductor" else assert_bit_equal(a, b)
    assert_bit_equal(compiled_base, eager_base)


@pytest.mark.parametrize("op", ["rms_norm", "layer_norm", "softmax"])
def test_in_place_on_slices_of_one_qkv_tensor(op: str) -> None:
    """q and k are normalised in place, v and the rest of the tensor stay."""

    def normalise(qkv: torch.Tensor) -> torch.Tensor:
        q, k = qkv[:, :128].view(-1, 2, 64), qkv[:, 128:192].view(-1, 1, 64)
        function = getattr(dandan_norm, op)
        function(q, out=q)
        function(k, out=k)
        return q.sum() + k.sum()

    compiled = torch.compile(normalise, fullgraph=True, dynamic=True, backend="aot_eager")
    for rows in (3, 5, 9):
        eager = torch.randn(rows, 256)
        other, before = eager.clone(), eager.clone()
        with torch.no_grad():
            assert_bit_equal(compiled(other), normalise(eager))
        assert_bit_equal(other, eager)
        assert torch.equal(other[:, 192:], before[:, 192:])
        assert not torch.equal(other[:, :192], before[:, :192])
    assert graphs_made() == 1


@pytest.mark.parametrize("op", OPS)
def test_gradients_through_compile(op: str) -> None:
    """A51: a graph in grad mode keeps the gradient (argmax has none)."""
    if op == "argmax":
        x = torch.randn(4, 64, requires_grad=True)
        found = torch.compile(dandan_norm.argmax, fullgraph=True, backend="aot_eager")(x)
        assert not found.requires_grad
        assert torch.equal(found, x.argmax(-1))
        return
    function = getattr(dandan_norm, op)
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    grads = []
    for call in (function, compiled):
        torch.manual_seed(1)
        arguments = inputs(op, torch.randn(4, 64, requires_grad=True))
        sum(t.square().sum() for t in outputs(call(*arguments))).backward()
        grads.append(arguments[0].grad)
    assert grads[0] is not None
    torch.testing.assert_close(grads[1], grads[0])


# -------------------------------------------------------------------------------------------------------------- export


class Model(torch.nn.Module):
    """One operator with its weights as parameters, as a model has it."""

    def __init__(self, op: str, cols: int) -> None:
        super().__init__()
        self.op = op
        names = {"layer_norm": ("weight", "bias")}.get(op, ("weight",) if op in AFFINE else ())
        for name in names:
            self.register_parameter(name, torch.nn.Parameter(torch.rand(cols), requires_grad=False))

    def forward(self, x: torch.Tensor) -> Any:
        arguments = {FIRST[self.op]: x, **dict(self.named_parameters())}
        if self.op in SECOND:
            arguments[SECOND[self.op]] = x * 2
        return getattr(dandan_norm, self.op)(**arguments)


@pytest.mark.parametrize("op", OPS)
def test_export_with_a_free_number_of_rows(op: str) -> None:
    model = Model(op, 64)
    program = torch.export.export(
        model, (torch.randn(4, 64),), dynamic_shapes={"x": {0: torch.export.Dim("rows", min=1)}}
    )
    called = [node.target for node in program.graph.nodes if node.op == "call_function"]
    assert LIBRARY.op(op) in called
    module = program.module()
    for rows in ROWS:
        x = torch.randn(rows, 64)
        assert_all_equal(module(x), model(x))


def test_the_valid_arguments_compile_as_keywords() -> None:
    for op in OPS:
        arguments = valid(op, "cpu")
        found = torch.compile(getattr(dandan_norm, op), fullgraph=True, backend="eager")(**arguments)
        assert_all_equal(found, getattr(dandan_norm, op)(**arguments))


def test_out_of_the_compiled_call_is_the_given_tensor() -> None:
    def into(x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        return dandan_norm.rms_norm(x, out=out)

    x, out = tensor(4, 64)("cpu"), tensor(4, 64)("cpu")
    result = torch.compile(into, fullgraph=True, backend="aot_eager")(x, out)
    assert result is out
    assert_bit_equal(out, dandan_norm.rms_norm(x))

"""torch.compile, export and opcheck on the CPU: one graph for every number of rows, fakes, mutation through views."""

from __future__ import annotations

import shutil
import sysconfig
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters
from torch._subclasses.fake_tensor import FakeTensorMode
from w4a16_cases import generator, random_weight, tensors

from dandan_ops_core.testing import assert_bit_equal
from dandan_w4a16 import QuantizedLinear, w4a16_linear
from dandan_w4a16._ops import LIBRARY

INDUCTOR = pytest.mark.skipif(
    not any(map(shutil.which, ("g++", "clang++"))) or not Path(sysconfig.get_paths()["include"], "Python.h").is_file(),
    reason="inductor needs a C++ compiler and Python's headers",
)
ROWS = (2, 3, 5, 8, 16, 33, 64, 100, 257, 300)
N, K = 24, 128
WEIGHT = random_weight(N, K, whole=True)
BIAS = torch.arange(N).half()


@pytest.fixture(autouse=True)
def _fresh_compiler() -> None:
    torch._dynamo.reset()
    counters.clear()


def graphs_made() -> int:
    """Graphs that torch.compile made."""
    return int(counters["stats"]["unique_graphs"])


def whole(*shape: int, dtype: torch.dtype = torch.float16) -> torch.Tensor:
    """Small whole numbers: sums are exact, so results are the same bits in any order."""
    return torch.randint(-2, 3, shape, generator=generator(sum(shape))).to(dtype)


# ------------------------------------------------------------------------------------------------------------- opcheck


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("form", ["", "_out", "_reference", "_reference_out"])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("zero_mode", ["integer", "float"])
def test_opcheck_of_every_form(dtype: torch.dtype, form: str, bias: bool, zero_mode: str) -> None:
    """The schema says what is written, the fake has the real shapes, strides and dtypes."""
    weight = random_weight(N, K, zero_mode=zero_mode)
    arguments: tuple[Any, ...] = (whole(3, K, dtype=dtype), *tensors(weight), BIAS if bias else None, 64)
    if "reference" not in form:
        arguments = (*arguments, 0)
    if form.endswith("out"):
        arguments = (*arguments, torch.empty(3, N, dtype=dtype))
    checks = ("test_schema", "test_faketensor") if "reference" not in form else ("test_schema",)
    torch.library.opcheck(LIBRARY.op(f"w4a16_linear{form}"), arguments, test_utils=checks)


def test_opcheck_of_the_gradient() -> None:
    arguments = (whole(3, N), *tensors(WEIGHT), 64)
    op = torch.ops.dandan_w4a16.w4a16_linear_grad_x.default
    torch.library.opcheck(op, arguments, test_utils=("test_schema", "test_faketensor"))


def test_opcheck_under_aot_autograd_with_dynamic_shapes() -> None:
    arguments = (whole(3, K), *tensors(WEIGHT), BIAS, 64, 0)
    torch.library.opcheck(LIBRARY.op("w4a16_linear"), arguments, test_utils=("test_aot_dispatch_dynamic",))


def test_every_written_argument_is_marked() -> None:
    written = {
        argument.name
        for argument in LIBRARY.op("w4a16_linear_out")._schema.arguments
        if argument.alias_info is not None and argument.alias_info.is_write
    }
    assert written == {"out"}
    assert not any(a.alias_info for a in LIBRARY.op("w4a16_linear")._schema.arguments)


# --------------------------------------------------------------------------------------------------------------- fakes

LAYOUTS = {
    "rows": lambda: whole(6, K),
    "a vector": lambda: whole(K),
    "transposed": lambda: whole(K, 6).t(),
    "transposed leading dimensions": lambda: whole(4, 6, K).transpose(0, 1),
    "columns of a wider tensor": lambda: whole(6, 3 * K)[:, K : 2 * K],
    "every second column": lambda: whole(6, 2 * K)[:, ::2],
    "every second row": lambda: whole(12, K)[::2],
    "expanded rows": lambda: whole(1, K).expand(6, K),
    "expanded columns": lambda: whole(6, 1).expand(6, K),
    "no rows": lambda: whole(0, K),
    "leading ones of odd strides": lambda: whole(K).as_strided((1, 1, K), (7, 3, 1)),
}


def described(t: torch.Tensor) -> tuple[Any, ...]:
    return tuple(t.shape), t.stride(), t.storage_offset(), t.dtype


@pytest.mark.parametrize("layout", LAYOUTS)
def test_fake_and_meta_results_are_described_as_the_real_one(layout: str) -> None:
    """A50: shape, strides, offset and dtype; contiguous whatever the input was."""
    x = LAYOUTS[layout]()
    op = LIBRARY.op("w4a16_linear")
    real = op(x, *tensors(WEIGHT), None, 64, 0)
    meta = op(x.to("meta"), *(t.to("meta") for t in tensors(WEIGHT)), None, 64, 0)
    with FakeTensorMode() as mode:
        fake = op(mode.from_tensor(x), *(mode.from_tensor(t) for t in tensors(WEIGHT)), None, 64, 0)
    assert described(fake) == described(real) == described(meta)
    shape = (*x.shape[:-1], N)
    assert described(real)[:2] == (shape, torch.empty(shape).stride())


# ------------------------------------------------------------------------------------------------------------- compile


@pytest.mark.parametrize("backend", ["auto", "torch"])
@pytest.mark.parametrize("bias", [False, True])
def test_one_graph_for_ten_numbers_of_rows(backend: str, bias: bool) -> None:
    layer = QuantizedLinear.from_packed(WEIGHT, BIAS if bias else None)
    compiled = torch.compile(lambda x: layer(x, backend=backend), fullgraph=True, dynamic=True, backend="aot_eager")
    for rows in ROWS:
        x = whole(rows, K)
        assert_bit_equal(compiled(x), layer(x))
    assert graphs_made() == 1
    # A single row is a case of its own to torch.compile, never to the operator.
    assert_bit_equal(compiled(whole(1, K)), layer(whole(1, K)))
    assert graphs_made() <= 2


def test_the_graph_holds_the_operator_and_no_weight() -> None:
    """Not its reference: that would be compiled by inductor, with the weight dequantised in the graph."""
    graphs: list[torch.fx.GraphModule] = []

    def keep(graph: torch.fx.GraphModule, _: Any) -> Any:
        graphs.append(graph)
        return graph

    layer = QuantizedLinear.from_packed(WEIGHT, BIAS)
    with torch.no_grad():
        torch.compile(layer, fullgraph=True, backend=keep)(whole(3, K))
    (graph,) = graphs
    called = [node.target for node in graph.graph.nodes if node.op == "call_function"]
    assert called == [LIBRARY.op("w4a16_linear")]


def test_every_dimension_may_change() -> None:
    compiled = torch.compile(w4a16_linear, fullgraph=True, dynamic=True, backend="aot_eager")
    for rows, n, groups in ((3, 24, 2), (7, 40, 3), (5, 17, 5)):
        weight = random_weight(n, groups * 64, whole=True)
        x = whole(rows, groups * 64)
        assert_bit_equal(compiled(x, *tensors(weight)), w4a16_linear(x, *tensors(weight)))
    assert graphs_made() == 1


@INDUCTOR
def test_inductor_takes_the_fakes_at_their_word() -> None:
    """Inductor asserts sizes and strides of what an operator returns."""
    layer = QuantizedLinear.from_packed(WEIGHT, BIAS)
    compiled = torch.compile(layer, fullgraph=True, dynamic=True)
    for layout in ("rows", "transposed", "columns of a wider tensor", "expanded rows"):
        x = LAYOUTS[layout]()
        with torch.no_grad():
            assert_bit_equal(compiled(x), layer(x))


def write_into_views(base: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """A49: into both halves of one tensor, then a read of the views and of what lies around them."""
    first, second = base[0], base[1]
    w4a16_linear(x, *tensors(WEIGHT), out=first)
    w4a16_linear(x + 1, *tensors(WEIGHT), out=second)
    return first + 1, second * 2, base.float().sum()


@pytest.mark.parametrize("backend", ["eager", "aot_eager", pytest.param("inductor", marks=INDUCTOR)])
def test_views_of_one_base(backend: str) -> None:
    x = whole(5, K)
    eager_base, compiled_base = (torch.full((2, 5, N), 7.0, dtype=torch.float16) for _ in range(2))
    with torch.no_grad():
        expected = write_into_views(eager_base, x)
        found = torch.compile(write_into_views, fullgraph=True, backend=backend)(compiled_base, x)
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, theirs) if backend == "inductor" else assert_bit_equal(mine, theirs)
    assert_bit_equal(compiled_base, eager_base)
    assert not (eager_base == 7.0).all()


@pytest.mark.parametrize("backend", ["eager", "aot_eager", pytest.param("inductor", marks=INDUCTOR)])
def test_gradients_through_compile(backend: str) -> None:
    """A51: a graph in grad mode keeps the gradients of x and of the bias."""
    layer = QuantizedLinear.from_packed(random_weight(N, K), BIAS).requires_grad_(True)
    grads = []
    for call in (layer, torch.compile(layer, fullgraph=True, backend=backend)):
        x = torch.randn(4, K, generator=generator(1)).half().requires_grad_()
        layer.zero_grad()
        call(x).float().square().sum().backward()
        grads.append((x.grad, layer.bias.grad))
    for mine, theirs in zip(*grads, strict=True):
        torch.testing.assert_close(mine, theirs)


def test_the_graph_of_a_gradient_does_not_grow_with_the_weight() -> None:
    """Both directions are one operator each, not a loop over the weight's tiles."""
    graphs: list[torch.fx.GraphModule] = []

    def keep(graph: torch.fx.GraphModule, _: Any) -> Any:
        graphs.append(graph)
        return graph

    weight = random_weight(64, 65536)  # four tiles
    from torch._dynamo.backends.common import aot_autograd

    compiled = torch.compile(
        lambda x: w4a16_linear(x, *tensors(weight)), fullgraph=True, backend=aot_autograd(fw_compiler=keep)
    )
    compiled(whole(2, 65536).requires_grad_()).sum().backward()
    called = [str(node.target) for graph in graphs for node in graph.graph.nodes if node.op == "call_function"]
    assert called.count("dandan_w4a16.w4a16_linear.default") == 1
    assert called.count("dandan_w4a16.w4a16_linear_grad_x.default") == 1
    assert not any("mm" in name for name in called)


# -------------------------------------------------------------------------------------------------------------- export


@pytest.mark.parametrize("zero_mode", ["integer", "float"])
def test_export_with_a_free_number_of_rows(zero_mode: str) -> None:
    layer = QuantizedLinear.from_packed(random_weight(N, K, whole=True, zero_mode=zero_mode), BIAS)
    program = torch.export.export(layer, (whole(4, K),), dynamic_shapes={"x": {0: torch.export.Dim("rows", min=1)}})
    called = [node.target for node in program.graph.nodes if node.op == "call_function"]
    assert LIBRARY.op("w4a16_linear") in called
    module = program.module()
    for rows in (1, *ROWS):
        x = whole(rows, K)
        assert_bit_equal(module(x), layer(x))

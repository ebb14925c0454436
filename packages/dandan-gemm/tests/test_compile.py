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
from gemm_bad_inputs import valid
from torch._dynamo.utils import counters
from torch._subclasses.fake_tensor import FakeTensorMode

import dandan_gemm
from dandan_gemm._ops import LIBRARY
from dandan_ops_core.testing import assert_bit_equal

INDUCTOR = pytest.mark.skipif(
    not any(map(shutil.which, ("g++", "clang++"))) or not Path(sysconfig.get_paths()["include"], "Python.h").is_file(),
    reason="inductor needs a C++ compiler and Python's headers",
)
ROWS = (1, 2, 3, 5, 8, 16, 33, 64, 100, 257)  # ten values of M; 1 is the one that dynamic shapes like to specialise on
N, K = 24, 64
every_layout = pytest.mark.parametrize("transposed", [False, True], ids=["[K, N]", "[N, K]"])


@pytest.fixture(autouse=True)
def _fresh_compiler() -> None:
    torch._dynamo.reset()
    counters.clear()


def graphs_made() -> int:
    """Graphs that torch.compile made."""
    return int(counters["stats"]["unique_graphs"])


def whole(*shape: int, dtype: torch.dtype = torch.float16) -> torch.Tensor:
    """Small whole numbers: every sum of products of them is exact, so results are the same bits in any order."""
    return torch.randint(-3, 4, shape).to(dtype)


def weight(transposed: bool, dtype: torch.dtype = torch.float16) -> torch.Tensor:
    return whole(*((N, K) if transposed else (K, N)), dtype=dtype)


# ------------------------------------------------------------------------------------------------------------- opcheck


@every_layout
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("form", ["", "_out", "_reference", "_reference_out"])
@pytest.mark.parametrize("bias", [False, True])
def test_opcheck_of_every_form(dtype: torch.dtype, form: str, bias: bool, transposed: bool) -> None:
    """The schema says what is written, the fake has the real shapes, strides and dtypes."""
    vector = whole(N, dtype=dtype) if bias else None
    arguments: tuple[Any, ...] = (whole(3, K, dtype=dtype), weight(transposed, dtype), vector, transposed, False)
    if "reference" not in form:
        arguments = (*arguments, 0)
    if form.endswith("out"):
        arguments = (*arguments, torch.empty(3, N, dtype=dtype))
    checks = ("test_schema", "test_faketensor") if "reference" not in form else ("test_schema",)
    torch.library.opcheck(LIBRARY.op(f"gemm{form}"), arguments, test_utils=checks)


@every_layout
def test_opcheck_under_aot_autograd_with_dynamic_shapes(transposed: bool) -> None:
    arguments = (whole(3, K), weight(transposed), whole(N), transposed, False, 0)
    torch.library.opcheck(LIBRARY.op("gemm"), arguments, test_utils=("test_aot_dispatch_dynamic",))


def test_every_written_argument_is_marked() -> None:
    written = {
        argument.name
        for argument in LIBRARY.op("gemm_out")._schema.arguments
        if argument.alias_info is not None and argument.alias_info.is_write
    }
    assert written == {"out"}
    assert not any(a.alias_info for a in LIBRARY.op("gemm")._schema.arguments)


# --------------------------------------------------------------------------------------------------------------- fakes

# What a caller may pass for a.
LAYOUTS: dict[str, Callable[[], torch.Tensor]] = {
    "rows": lambda: whole(6, 64),
    "a vector": lambda: whole(64),
    "transposed": lambda: whole(64, 6).t(),
    "transposed leading dimensions": lambda: whole(4, 6, 64).transpose(0, 1),
    "columns of a wider tensor": lambda: whole(6, 192)[:, 64:128],
    "every second column": lambda: whole(6, 128)[:, ::2],
    "every second row": lambda: whole(12, 64)[::2],
    "heads of a qkv tensor": lambda: whole(6, 384)[:, 128:256].view(6, 2, 64),
    "expanded rows": lambda: whole(1, 64).expand(6, 64),
    "expanded columns": lambda: whole(6, 1).expand(6, 64),
    "odd start": lambda: whole(6 * 63 + 1)[1:].view(6, 63),
    "no rows": lambda: whole(0, 64),
    "no columns": lambda: whole(6, 0),
    "one element": lambda: whole(1, 1),
    "leading ones of odd strides": lambda: whole(64).as_strided((1, 1, 64), (7, 3, 1)),
}
# What may become of a [N, K] or [K, N] weight.
WEIGHTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "contiguous": lambda b: b,
    "transposed": lambda b: b.t().contiguous().t(),
    "columns of a wider tensor": lambda b: torch.cat((b, b), 1)[:, : b.shape[1]],
    "every second column": lambda b: b.repeat_interleave(2, 1)[:, ::2],
}


def described(t: torch.Tensor) -> tuple[Any, ...]:
    return tuple(t.shape), t.stride(), t.storage_offset(), t.dtype, t.device


@every_layout
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", WEIGHTS)
def test_fake_and_meta_results_are_described_as_the_real_one(layout: str, kind: str, transposed: bool) -> None:
    """A50: shape, strides, offset, dtype and device."""
    a = LAYOUTS[layout]()
    k = a.shape[-1]
    b = WEIGHTS[kind](whole(*((N, k) if transposed else (k, N))))
    arguments = (a, b, None, transposed, False)
    real = LIBRARY.op("gemm")(*arguments, 0)
    meta = LIBRARY.op("gemm")(*(t.to("meta") if isinstance(t, torch.Tensor) else t for t in arguments), 0)
    with FakeTensorMode() as mode:
        faked = (mode.from_tensor(t) if isinstance(t, torch.Tensor) else t for t in arguments)
        fake = LIBRARY.op("gemm")(*faked, 0)
    assert described(fake) == described(real)
    assert described(meta)[:-1] == described(real)[:-1]
    # Contiguous strides whatever the input's were: torch.empty's, also for dimensions of one.
    shape = (*a.shape[:-1], N)
    assert described(real)[:2] == (shape, torch.empty(shape).stride())


# ------------------------------------------------------------------------------------------------------------- compile


@every_layout
@pytest.mark.parametrize("backend", ["auto", "torch"])
@pytest.mark.parametrize("bias", [False, True])
def test_one_graph_for_ten_numbers_of_rows(transposed: bool, backend: str, bias: bool) -> None:
    b, vector = weight(transposed), whole(N) if bias else None

    def function(a: torch.Tensor) -> torch.Tensor:
        return dandan_gemm.gemm(a, b, weight_transposed=transposed, bias=vector, backend=backend)

    compiled = torch.compile(function, fullgraph=True, dynamic=True, backend="aot_eager")
    for rows in ROWS[1:]:
        a = whole(rows, K)
        assert_bit_equal(compiled(a), function(a))
    assert graphs_made() == 1
    # A single row is a case of its own to torch.compile, never to the operator.
    a = whole(1, K)
    assert_bit_equal(compiled(a), function(a))
    assert graphs_made() <= 2


def test_the_graph_holds_the_operator() -> None:
    """Not its reference: that would be compiled by inductor and never reach an own kernel."""
    graphs: list[torch.fx.GraphModule] = []

    def keep(graph: torch.fx.GraphModule, _: Any) -> Any:
        graphs.append(graph)
        return graph

    with torch.no_grad():
        torch.compile(dandan_gemm.gemm, fullgraph=True, backend=keep)(**valid("cpu"))
    (graph,) = graphs
    called = [node.target for node in graph.graph.nodes if node.op == "call_function"]
    assert LIBRARY.op("gemm") in called


@every_layout
def test_every_dimension_may_change(transposed: bool) -> None:
    def function(a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        return dandan_gemm.gemm(a, b, bias=bias, weight_transposed=transposed)

    compiled = torch.compile(function, fullgraph=True, dynamic=True, backend="aot_eager")
    for batch, rows, n, k in ((2, 3, 24, 64), (4, 7, 40, 72), (3, 5, 17, 128), (6, 2, 9, 33)):
        arguments = (whole(batch, rows, k), whole(*((n, k) if transposed else (k, n))), whole(n))
        assert_bit_equal(compiled(*arguments), function(*arguments))
    assert graphs_made() == 1


@INDUCTOR
@every_layout
def test_inductor_takes_the_fakes_at_their_word(transposed: bool) -> None:
    """Inductor asserts sizes and strides of what an operator returns."""
    b = weight(transposed)
    compiled = torch.compile(
        lambda a: dandan_gemm.gemm(a, b, weight_transposed=transposed), fullgraph=True, dynamic=True
    )
    for layout in ("rows", "transposed", "heads of a qkv tensor", "expanded rows"):
        a = LAYOUTS[layout]()
        with torch.no_grad():
            assert_bit_equal(compiled(a), dandan_gemm.gemm(a, b, weight_transposed=transposed))


def write_into_views(base: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """A49: into both halves of one tensor, then a read of the views and of what lies around them."""
    first, second = base[0], base[1]
    dandan_gemm.gemm(a, b, weight_transposed=True, out=first)
    dandan_gemm.gemm(first, b[:, :N], weight_transposed=True, out=second)
    return first + 1, second * 2, base.float().sum()


@pytest.mark.parametrize("backend", ["eager", "aot_eager", pytest.param("inductor", marks=INDUCTOR)])
def test_views_of_one_base(backend: str) -> None:
    torch.manual_seed(0)
    a, b = whole(5, K), whole(N, K)
    eager_base, compiled_base = (torch.full((2, 5, N), 7.0, dtype=torch.float16) for _ in range(2))
    with torch.no_grad():
        expected = write_into_views(eager_base, a, b)
        found = torch.compile(write_into_views, fullgraph=True, backend=backend)(compiled_base, a, b)
    for x, y in zip(found, expected, strict=True):
        # Inductor adds in another order.
        torch.testing.assert_close(x, y) if backend == "inductor" else assert_bit_equal(x, y)
    assert_bit_equal(compiled_base, eager_base)
    assert not (eager_base == 7.0).all()


def test_columns_of_a_wider_tensor_are_written_alone() -> None:
    """Projections of a layer into one qkv tensor."""

    def project(qkv: torch.Tensor, x: torch.Tensor, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        dandan_gemm.gemm(x, q, weight_transposed=True, out=qkv[:, :N])
        dandan_gemm.gemm(x, k, weight_transposed=True, out=qkv[:, N : 2 * N])
        return qkv[:, : 2 * N].float().sum()

    q, k = whole(N, K), whole(N, K)
    compiled = torch.compile(project, fullgraph=True, dynamic=True, backend="aot_eager")
    for rows in (3, 5, 9):
        x = whole(rows, K)
        eager, other = (torch.full((rows, 3 * N), 9.0, dtype=torch.float16) for _ in range(2))
        with torch.no_grad():
            assert_bit_equal(compiled(other, x, q, k), project(eager, x, q, k))
        assert_bit_equal(other, eager)
        assert (other[:, 2 * N :] == 9.0).all()
        assert_bit_equal(other[:, :N].contiguous(), dandan_gemm.gemm(x, q, weight_transposed=True))
    assert graphs_made() == 1


def test_gradients_through_compile() -> None:
    """A51: a graph in grad mode keeps the gradient."""
    grads = []
    for call in (dandan_gemm.gemm, torch.compile(dandan_gemm.gemm, fullgraph=True, backend="aot_eager")):
        torch.manual_seed(1)
        a = torch.randn(4, K).half().requires_grad_()
        call(a, weight(True), weight_transposed=True).float().square().sum().backward()
        grads.append(a.grad)
    assert grads[0] is not None
    torch.testing.assert_close(grads[1], grads[0])


# -------------------------------------------------------------------------------------------------------------- export


class Linear(torch.nn.Module):
    """A linear layer as a model has it."""

    def __init__(self, transposed: bool) -> None:
        super().__init__()
        self.transposed = transposed
        self.weight = torch.nn.Parameter(weight(transposed), requires_grad=False)
        self.bias = torch.nn.Parameter(whole(N), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return dandan_gemm.gemm(x, self.weight, bias=self.bias, weight_transposed=self.transposed, static_weight=True)


@every_layout
def test_export_with_a_free_number_of_rows(transposed: bool) -> None:
    model = Linear(transposed)
    program = torch.export.export(model, (whole(4, K),), dynamic_shapes={"x": {0: torch.export.Dim("rows", min=1)}})
    called = [node.target for node in program.graph.nodes if node.op == "call_function"]
    assert LIBRARY.op("gemm") in called
    module = program.module()
    for rows in ROWS:
        x = whole(rows, K)
        assert_bit_equal(module(x), model(x))


def test_the_valid_arguments_compile_as_keywords() -> None:
    for transposed in (False, True):
        arguments = valid("cpu", transposed=transposed)
        found = torch.compile(dandan_gemm.gemm, fullgraph=True, backend="eager")(**arguments)
        assert_bit_equal(found, dandan_gemm.gemm(**arguments))


def test_out_of_the_compiled_call_is_the_given_tensor() -> None:
    def into(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        return dandan_gemm.gemm(a, b, weight_transposed=True, out=out)

    a, b, out = whole(4, K), whole(N, K), whole(4, N)
    result = torch.compile(into, fullgraph=True, backend="aot_eager")(a, b, out)
    assert result is out
    assert_bit_equal(out, dandan_gemm.gemm(a, b, weight_transposed=True))

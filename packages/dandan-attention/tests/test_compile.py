"""torch.compile, export and opcheck on the CPU: one graph for every length, fakes, mutation through views."""

from __future__ import annotations

import shutil
import sysconfig
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from attention_cases import Call, dense, int32, packed, raw, same_bits
from torch._dynamo.utils import counters
from torch._subclasses.fake_tensor import FakeTensorMode

from dandan_attention import flash_attention, flash_attention_varlen
from dandan_attention._ops import LIBRARY

INDUCTOR = pytest.mark.skipif(
    not any(map(shutil.which, ("g++", "clang++"))) or not Path(sysconfig.get_paths()["include"], "Python.h").is_file(),
    reason="inductor needs a C++ compiler and Python's headers",
)
# The first is no other size of the tensors: torch.compile takes sizes that are equal at first for one.
LENGTHS = (37, 2, 3, 5, 8, 16, 33, 64, 100, 129)
HEADS, D = (6, 3), 16


@pytest.fixture(autouse=True)
def _fresh_compiler() -> None:
    torch._dynamo.reset()
    counters.clear()


def graphs_made() -> int:
    return int(counters["stats"]["unique_graphs"])


CALLS: dict[str, Callable[[], Call]] = {
    "plain": lambda: dense(2, HEADS, 5, 7, D),
    "options": lambda: dense(
        2, HEADS, 5, 7, D, torch.bfloat16, causal=True, query_start=2, window_size=3, softcap=2.0, softmax_scale=0.3
    ),
    "tensors": lambda: dense(2, HEADS, 5, 7, D, causal=True, query_start=int32(2, 0), seqused_k=int32(3, 7)),
    "packed": lambda: packed([3, 0, 2], None, HEADS, D, causal=True),
    "packed, options": lambda: packed(
        [3, 2], [4, 5], HEADS, D, causal=True, query_starts="suffix", seqused_k=int32(3, 5), window_size=2
    ),
    "packed, starts": lambda: packed([3, 2], [4, 5], HEADS, D, window_size=4, query_starts=int32(1, -1)),
}
EVERY_CALL = pytest.mark.parametrize("name", CALLS)


# ------------------------------------------------------------------------------------------------------------- opcheck


@EVERY_CALL
@pytest.mark.parametrize("form", ["", "_out", "_lse", "_lse_out", "_reference", "_reference_out", "_lse_reference"])
def test_opcheck_of_every_form(name: str, form: str) -> None:
    """The schema says what is written, the fake has the real shapes, strides and dtypes."""
    call = CALLS[name]()
    arguments = raw(call)
    if "reference" in form:
        arguments = arguments[:-1]
    if form.endswith("out"):
        arguments = (*arguments, torch.empty_like(call.q))
    if form == "_lse_out":
        arguments = (*arguments, call.run(return_lse=True)[1])
    checks = ("test_schema",) if "reference" in form else ("test_schema", "test_faketensor")
    torch.library.opcheck(LIBRARY.op(f"{call.name}{form}"), arguments, test_utils=checks)


@EVERY_CALL
def test_opcheck_of_the_gradient(name: str) -> None:
    """All of opcheck, autograd registration and dynamic shapes included, of the operator that gradients go through."""
    call = CALLS[name]()
    call = call.with_(**{each: getattr(call, each).requires_grad_() for each in "qkv"})
    torch.library.opcheck(LIBRARY.op(f"{call.name}_differentiable"), raw(call)[:-1])
    with torch.no_grad():
        results = call.run(return_lse=True)
    arguments = (*raw(call)[:-1], *results, *results)
    tests = ("test_schema", "test_faketensor")
    torch.library.opcheck(LIBRARY.op(f"{call.name}_grad"), arguments, test_utils=tests)


@EVERY_CALL
def test_opcheck_under_aot_autograd_with_dynamic_shapes(name: str) -> None:
    call = CALLS[name]()
    torch.library.opcheck(LIBRARY.op(call.name), raw(call), test_utils=("test_aot_dispatch_dynamic",))


@pytest.mark.parametrize("name", ["flash_attention", "flash_attention_varlen"])
def test_every_written_argument_is_marked(name: str) -> None:
    for form, expected in (("_out", {"out"}), ("_lse_out", {"out", "lse"}), ("", set()), ("_lse", set())):
        arguments = LIBRARY.op(f"{name}{form}")._schema.arguments
        assert {each.name for each in arguments if each.alias_info is not None and each.alias_info.is_write} == expected


# --------------------------------------------------------------------------------------------------------------- fakes


def rows_outside(*shape: int) -> torch.Tensor:
    batch, heads, seqlen, head_dim = shape
    return torch.randn(batch, seqlen, heads, head_dim).half().transpose(1, 2)


LAYOUTS: dict[str, Callable[[], torch.Tensor]] = {
    "contiguous": lambda: torch.randn(2, 6, 5, D).half(),
    "rows outside of heads": lambda: rows_outside(2, 6, 5, D),
    "a slice of qkv": lambda: torch.randn(2, 5, 12, D).half()[:, :, :6].transpose(1, 2),
    "every second column": lambda: torch.randn(2, 6, 5, 2 * D).half()[..., ::2],
    "batch inside": lambda: torch.randn(6, 5, 2, D).half().permute(2, 0, 1, 3),
    "expanded batch": lambda: torch.randn(1, 6, 5, D).half().expand(2, 6, 5, D),
    "expanded heads": lambda: torch.randn(2, 1, 5, D).half().expand(2, 6, 5, D),
    "expanded rows": lambda: torch.randn(2, 6, 1, D).half().expand(2, 6, 5, D),
    "one row": lambda: torch.randn(2, 6, 1, D).half(),
    "one row of another layout": lambda: rows_outside(2, 6, 1, D),
    "no rows": lambda: torch.randn(2, 6, 0, D).half(),
    "no batch": lambda: torch.randn(0, 6, 5, D).half(),
    "axes of size 1 with odd strides": lambda: torch.randn(64).half().as_strided((1, 6, 1, D), (7, 0, 3, 1)),
}


def described(t: torch.Tensor) -> tuple[Any, ...]:
    return tuple(t.shape), t.stride(), t.storage_offset(), t.dtype


@pytest.mark.parametrize("layout", LAYOUTS)
def test_fake_and_meta_results_are_described_as_the_real_ones(layout: str) -> None:
    """A50: shape, strides, offset and dtype."""
    q = LAYOUTS[layout]()
    k = torch.randn(q.shape[0], 3, 7, D).half()
    for form in ("", "_lse"):
        op = LIBRARY.op(f"flash_attention{form}")
        rest = (False, None, None, None, None, 0.0, None, 0)
        real = op(q, k, k, *rest)
        meta = op(q.to("meta").as_strided(q.shape, q.stride()), k.to("meta"), k.to("meta"), *rest)
        with FakeTensorMode() as mode:
            fake = op(mode.from_tensor(q), mode.from_tensor(k), mode.from_tensor(k), *rest)
        for each in zip(*(result if form else (result,) for result in (real, fake, meta)), strict=True):
            assert described(each[0]) == described(each[1]) == described(each[2])


@pytest.mark.parametrize(
    ("layout", "rows_first"),
    [("contiguous", False), ("rows outside of heads", True), ("a slice of qkv", True), ("batch inside", False)],
)
def test_the_result_lies_in_memory_as_q_does(layout: str, rows_first: bool) -> None:
    q = LAYOUTS[layout]()
    out = flash_attention(q, torch.randn(2, 3, 7, D).half(), torch.randn(2, 3, 7, D).half())
    strides = (5 * 6 * D, D, 6 * D, 1) if rows_first else (6 * 5 * D, 5 * D, D, 1)
    assert out.stride() == strides


def test_packed_results_are_contiguous() -> None:
    call = packed([3, 2], None, HEADS, D)
    q = call.q.transpose(0, 1).contiguous().transpose(0, 1)
    out, lse = call.with_(q=q).run(return_lse=True)
    assert out.is_contiguous()
    assert lse.is_contiguous()
    assert out.shape == (5, 6, D)
    assert lse.shape == (6, 5)
    with FakeTensorMode() as mode:
        arguments = [mode.from_tensor(t) if isinstance(t, torch.Tensor) else t for t in raw(call.with_(q=q))]
        fakes = LIBRARY.op("flash_attention_varlen_lse")(*arguments)
    assert [described(t) for t in fakes] == [described(out), described(lse)]


# ------------------------------------------------------------------------------------------------------------- compile

MODELS: dict[str, Callable[..., Any]] = {
    "causal": lambda q, k, v: flash_attention(q, k, v, causal=True),
    "suffix": lambda q, k, v: flash_attention(
        q, k, v, causal=True, query_start=k.shape[2] - q.shape[2], return_lse=True
    ),
    "window of the length": lambda q, k, v: flash_attention(q, k, v, window_size=q.shape[2], softcap=3.0),
    "views of [B, S, H, D]": lambda q, k, v: flash_attention(
        *(t.transpose(1, 2).contiguous().transpose(1, 2) for t in (q, k, v)), causal=True
    ),
    "out": lambda q, k, v: flash_attention(q, k, v, out=torch.empty_like(q)),
}


@pytest.mark.parametrize(
    ("name", "gradient"),
    [(name, gradient) for name in MODELS for gradient in (False, True) if not (gradient and name == "out")],
)
def test_one_graph_for_ten_lengths(name: str, gradient: bool) -> None:
    model = MODELS[name]
    compiled = torch.compile(model, fullgraph=True, dynamic=True, backend="aot_eager")
    for length in LENGTHS:
        call = dense(2, HEADS, length, length, D, seed=length)
        leaves = [[t.clone().requires_grad_(gradient) for t in call.positional] for _ in range(2)]
        results = [compiled(*leaves[0]), model(*leaves[1])]
        same_bits(*results, f"length {length}")
        if gradient:
            for result in results:
                (result[0] if isinstance(result, tuple) else result).float().square().sum().backward()
            same_bits(tuple(t.grad for t in leaves[0]), tuple(t.grad for t in leaves[1]), "gradients")
    assert graphs_made() == 1


@pytest.mark.parametrize("gradient", [False, True])
@pytest.mark.parametrize("suffix", [False, True])
def test_one_graph_for_ten_packed_batches(gradient: bool, suffix: bool) -> None:
    """With one tensor of lengths for both sides as well, with gradients as well."""

    def model(call: Call, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu: torch.Tensor, longest: int) -> Any:
        return flash_attention_varlen(
            q, k, v, cu, cu + 0 if suffix else cu, max_seqlen_q=longest, max_seqlen_k=longest,
            causal=True, query_starts="suffix" if suffix else None,
        )  # fmt: skip

    compiled = torch.compile(model, fullgraph=True, dynamic=True, backend="aot_eager")
    for length in LENGTHS[:1] + LENGTHS[2:]:
        call = packed([length - 2, 2, 0, 0], None, HEADS, D, seed=length)
        cu = call.cu_seqlens[0] if call.cu_seqlens else None
        leaves = [[t.clone().requires_grad_(gradient) for t in call.positional[:3]] for _ in range(2)]
        results = [run(None, *its, cu, length) for run, its in zip((compiled, model), leaves, strict=True)]
        same_bits(*results, f"length {length}")
        if gradient:
            for result in results:
                result.float().square().sum().backward()
            same_bits(tuple(t.grad for t in leaves[0]), tuple(t.grad for t in leaves[1]), "gradients")
    assert graphs_made() == 1


@pytest.mark.parametrize("gradient", [False, True])
def test_the_graph_holds_the_operator(gradient: bool) -> None:
    """Not its reference, whose loop over blocks would be unrolled."""
    graphs: list[torch.fx.GraphModule] = []

    def keep(graph: torch.fx.GraphModule, _: Any) -> Any:
        graphs.append(graph)
        return graph

    call = dense(1, HEADS, 5, 5, D)
    inputs = [t.requires_grad_(gradient) for t in call.positional]
    torch.compile(MODELS["causal"], fullgraph=True, backend=keep)(*inputs)
    (graph,) = graphs
    called = [node.target for node in graph.graph.nodes if node.op == "call_function"]
    assert LIBRARY.op("flash_attention_differentiable" if gradient else "flash_attention") in called
    assert not any("matmul" in str(target) or "softmax" in str(target) for target in called)


@INDUCTOR
def test_inductor_takes_the_fakes_at_their_word() -> None:
    """Inductor asserts sizes and strides of what an operator returns."""
    compiled = torch.compile(lambda q, k: flash_attention(q, k, k).transpose(1, 2) * 2, fullgraph=True, dynamic=True)
    for layout in ("contiguous", "rows outside of heads", "a slice of qkv", "expanded heads"):
        q, k = LAYOUTS[layout](), torch.randn(2, 3, 7, D).half()
        with torch.no_grad():
            torch.testing.assert_close(compiled(q, k), flash_attention(q, k, k).transpose(1, 2) * 2, rtol=0, atol=0)


def write_into_views(base: torch.Tensor, call: Call) -> tuple[torch.Tensor, ...]:
    """A49: into both halves of one tensor, then a read of the views and of what lies around them."""
    first, second = base[0], base[1]
    flash_attention(*call.positional, out=first)
    _, lse = flash_attention(call.q, call.k, call.v + 1, out=second, return_lse=True)
    return first + 1, second * 2, base.float().sum(), lse


@pytest.mark.parametrize("backend", ["eager", "aot_eager", pytest.param("inductor", marks=INDUCTOR)])
def test_views_of_one_base(backend: str) -> None:
    call = dense(1, HEADS, 5, 7, D)
    eager_base, compiled_base = (torch.full((2, *call.q.shape), 7.0).half() for _ in range(2))
    with torch.no_grad():
        expected = write_into_views(eager_base, call)
        q, k, v = call.positional
        program = torch.compile(
            lambda base, q, k, v: write_into_views(base, Call(q, k, v)), fullgraph=True, backend=backend
        )
        found = program(compiled_base, q, k, v)
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, theirs)
    same_bits(compiled_base, eager_base, "the base")
    assert not (eager_base == 7.0).all()


# -------------------------------------------------------------------------------------------------------------- export


class Prefill(torch.nn.Module):
    """Queries that end with the keys, in [B, S, H, D]."""

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = flash_attention(
            *(t.transpose(1, 2) for t in (q, k, v)), causal=True, query_start=k.shape[1] - q.shape[1]
        )
        return result


def test_export_with_free_lengths() -> None:
    new, whole = torch.export.Dim("new", min=2, max=4096), torch.export.Dim("whole", min=2, max=8192)

    def example(seqlen_q: int, seqlen_k: int) -> tuple[torch.Tensor, ...]:
        call = dense(2, HEADS, seqlen_q, seqlen_k, D, seed=seqlen_k)
        return tuple(t.transpose(1, 2).contiguous() for t in call.positional)

    program = torch.export.export(
        Prefill(), example(5, 9), dynamic_shapes={"q": {1: new}, "k": {1: whole}, "v": {1: whole}}
    )
    for lengths in ((2, 2), (7, 7), (33, 100), (129, 130)):
        inputs = example(*lengths)
        same_bits(program.module()(*inputs), Prefill()(*inputs), str(lengths))


def test_export_of_causal_self_attention() -> None:
    class Model(torch.nn.Module):
        def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:
            return flash_attention(q, k, v, causal=True, return_lse=True)

    length = torch.export.Dim("length", min=2, max=4096)
    program = torch.export.export(
        Model(), dense(2, HEADS, 9, 9, D).positional, dynamic_shapes=tuple({2: length} for _ in range(3))
    )
    for seqlen in (2, 10, 65):
        inputs = dense(2, HEADS, seqlen, seqlen, D, seed=seqlen).positional
        same_bits(program.module()(*inputs), Model()(*inputs), str(seqlen))


def test_unequal_lengths_are_refused_while_tracing() -> None:
    call = dense(2, HEADS, 5, 7, D)
    with pytest.raises(
        Exception, match="query_start is None; with causal=True it is needed for seqlen_q=5 and seqlen_k=7"
    ):
        torch.compile(MODELS["causal"], fullgraph=True, backend="eager")(*call.positional)

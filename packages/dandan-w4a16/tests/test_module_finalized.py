"""QuantizedLinear with its weight in the kernels' order, on the CPU: its whole life but for the kernels.

The CPU keeps the canonical form in earnest; here it is declared a device on which modules are finalised.
"""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from module_cases import WAYS, assert_compiles, assert_same, blank
from w4a16_cases import GROUPS, K, N, generator, module, random_weight, tensors, weight_of, whole_x

from dandan_ops_core.testing import assert_bit_equal
from dandan_w4a16 import Int4Weight, QuantizedLinear, kernel_order
from dandan_w4a16 import module as implementation
from dandan_w4a16._ops import LIBRARY

PACKED = ("qweight", "scales", "zeros")
HALVES = (torch.float16, torch.bfloat16)


@pytest.fixture(autouse=True)
def _the_cpu_has_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(implementation, "DEVICES", ("cuda", "cpu"))


def canonical(made: QuantizedLinear, monkeypatch: pytest.MonkeyPatch) -> QuantizedLinear:
    """The same weight in a module that is not finalised."""
    with monkeypatch.context() as patch:
        patch.setattr(implementation, "DEVICES", ())
        return QuantizedLinear.from_packed(made.weight_int4, made.bias)


# ------------------------------------------------------------------------------------------------------ construction


@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_one_copy_takes_the_place_of_the_canonical_tensors(group: int, dtype: torch.dtype) -> None:
    weight = random_weight(N, K, group, scale_dtype=dtype)
    made = QuantizedLinear.from_packed(weight)
    assert made.is_finalized
    assert sorted(name for name, _ in made.named_buffers()) == ["codes", "scale_pairs"]
    assert not any(hasattr(made, name) for name in PACKED)
    assert sorted(made.state_dict()) == sorted(PACKED)
    for mine, theirs in zip(tensors(made.weight_int4), tensors(weight), strict=True):
        assert_bit_equal(mine, theirs)
    assert made.finalize() is made
    assert "scales=" in repr(made)


def test_from_float_and_shards_are_finalised() -> None:
    made = QuantizedLinear.from_float(torch.randn(N, K, generator=generator(2)).half())
    assert made.is_finalized
    for dim, world in ((0, 2), (1, 4)):
        part = made.shard(dim, 1, world)
        assert part.is_finalized
        for mine, theirs in zip(tensors(part.weight_int4), tensors(made.weight_int4.shard(dim, 1, world)), strict=True):
            assert_bit_equal(mine, theirs)


@pytest.mark.parametrize(
    ("weight", "why"),
    [
        (random_weight(N, K, scale_dtype=torch.float32), "scales in float32 have more bits than the kernels take"),
        (random_weight(N, K, zero_mode="float"), "float zeros are never rounded"),
    ],
    ids=["scales", "zeros"],
)
def test_what_the_kernels_do_not_compute_stays_canonical(weight: Int4Weight, why: str) -> None:
    made = QuantizedLinear.from_packed(weight)
    assert not made.finalize().is_finalized, why
    for mine, theirs in zip(tensors(made.weight_int4), tensors(weight), strict=True):
        assert mine.data_ptr() == theirs.data_ptr()


def test_values_that_the_kernels_cannot_hold_are_refused() -> None:
    made = blank()
    assert not made.is_finalized, "there is no weight yet"
    for name, value, text in (
        ("zeros", torch.full((N, K // 64), 16, dtype=torch.uint8), "zeros hold 16; 0 to 15 is needed"),
        ("scales", torch.full((N, K // 64), torch.inf).half(), f"scales hold {N * K // 64} NaN or infinite values"),
    ):
        other = copy.deepcopy(made)
        setattr(other, name, value)
        with pytest.raises(ValueError, match=f"^QuantizedLinear.finalize: {text}"):
            other.finalize()
        assert not other.is_finalized
        assert_bit_equal(getattr(other, name), value)


def test_both_forms_compute_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole numbers, so in any order of additions; and gradients."""
    made = module()
    plain = canonical(made, monkeypatch)
    assert (made.is_finalized, plain.is_finalized) == (True, False)
    for dtype in HALVES:
        results = []
        for each in (made, plain):
            x = whole_x(dtype).requires_grad_()
            out = each(x)
            out.backward(torch.ones_like(out))
            results.append((out.detach(), x.grad))
            assert_bit_equal(each(x.detach()), out.detach())
        for mine, theirs in zip(*results, strict=True):
            assert_bit_equal(mine, theirs)  # type: ignore[arg-type]


def test_execution_info_names_the_form(monkeypatch: pytest.MonkeyPatch) -> None:
    made = module()
    assert made.execution_info(whole_x()).op == "packed_linear"
    assert canonical(made, monkeypatch).execution_info(whole_x()).op == "w4a16_linear"


# ----------------------------------------------------------------------------------------------------------- its life


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("bias", [False, True])
def test_every_way_to_another_module(way: str, bias: bool) -> None:
    """Bit for bit the same weight, finalised again, the same product, and torch.compile takes it."""
    wanted = module(bias=bias)
    found = WAYS[way](copy.deepcopy(wanted))
    assert isinstance(found, QuantizedLinear)
    assert found.is_finalized
    assert_same(found, wanted)
    assert list(found.state_dict()) == list(wanted.state_dict())
    assert_compiles(found)


@pytest.mark.parametrize("way", WAYS)
def test_every_way_between_the_forms(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """State made where there are kernels, read where there are none, and the other way."""
    wanted = module()
    plain = canonical(wanted, monkeypatch)
    state, pickled = wanted.state_dict(), pickle.dumps(wanted)
    with monkeypatch.context() as patch:
        patch.setattr(implementation, "DEVICES", ())
        other, unpickled = blank(), pickle.loads(pickled)
        other.load_state_dict(state)
        for found in (other, unpickled):
            assert not found.is_finalized
            assert_same(found, plain)
            assert_same(WAYS[way](found), plain)
    assert_same(WAYS[way](plain), wanted)


@pytest.mark.parametrize("cast", ["half", "bfloat16", "float", "double"])
def test_casts_change_the_bias_alone(cast: str) -> None:
    made = torch.nn.Sequential(module())
    before = {name: t.data_ptr() for name, t in made.named_buffers()}
    getattr(made, cast)()
    dtype = {"half": torch.float16, "float": torch.float32}.get(cast, getattr(torch, cast))
    assert made[0].bias.dtype == dtype
    assert {name: t.data_ptr() for name, t in made.named_buffers()} == before


def test_a_tensor_set_by_name_is_the_weight_from_then_on() -> None:
    """The module goes back to the canonical form: an attribute beside the packed weight would be read by nobody."""
    made, other = module(), random_weight(N, K, whole=True, seed=9)
    for name in PACKED:
        setattr(made, name, getattr(other, name))
        assert not made.is_finalized
    made.finalize()
    assert made.is_finalized
    for mine, theirs in zip(tensors(made.weight_int4), tensors(other), strict=True):
        assert_bit_equal(mine, theirs)


def test_a_refused_state_leaves_the_module_as_it_was() -> None:
    wanted = module()
    for changes in (
        {"zeros": torch.full((N, K // 64), 16, dtype=torch.uint8)},
        {"scales": torch.ones(N, 1).half()},  # another shape: torch's own refusal, after which the rest is loaded
        {"surplus": torch.ones(1)},
    ):
        found = copy.deepcopy(wanted)
        with pytest.raises(RuntimeError):
            found.load_state_dict({**wanted.state_dict(), **changes})
        assert found.is_finalized
        assert_same(found, wanted)


def test_an_inner_module_goes_to_meta_and_back() -> None:
    made = torch.nn.Sequential(module())
    wanted = copy.deepcopy(made[0])
    state = made.state_dict()
    made.to("meta")
    assert not made[0].is_finalized
    assert made(torch.empty(3, K, dtype=torch.float16, device="meta")).shape == (3, N)
    made.load_state_dict(state, assign=True)
    assert made[0].is_finalized
    assert_same(made[0], wanted)


def test_to_empty_over_anything() -> None:
    """What is there is no weight; it is neither refused nor kept from being loaded over."""
    wanted = module()
    found = copy.deepcopy(wanted).to_empty(device="cpu")
    found.load_state_dict(wanted.state_dict())
    assert_same(found, wanted)


def test_export_with_free_rows() -> None:
    made = module()
    rows = torch.export.Dim("rows", min=2, max=1024)
    program = torch.export.export(made, (whole_x(),), dynamic_shapes={"x": {0: rows}}, strict=False)
    for count in (2, 5, 33):
        x = whole_x(rows=count)
        assert_bit_equal(program.module()(x), made(x))


def test_one_graph_for_ten_numbers_of_rows() -> None:
    graphs = 0

    def count(graph: torch.fx.GraphModule, _: object) -> object:
        nonlocal graphs
        graphs += 1
        called = [node.target for node in graph.graph.nodes if node.op == "call_function"]
        assert called == [LIBRARY.op("packed_linear")]
        return graph.forward

    torch._dynamo.reset()
    made = module()
    compiled = torch.compile(made, fullgraph=True, dynamic=True, backend=count)
    for rows in (2, 3, 5, 8, 16, 33, 64, 100, 257, 300):
        with torch.no_grad():
            assert_bit_equal(compiled(whole_x(rows=rows)), made(whole_x(rows=rows)))
    assert graphs == 1


def test_the_weight_of_a_finalised_module_reads_by_the_rule() -> None:
    made = QuantizedLinear.from_packed(random_weight(N, K))
    for dtype in HALVES:
        found = kernel_order.packed_linear(
            torch.eye(K, dtype=dtype), made.codes, made.scale_pairs, None, N, K, made.group_size
        )
        assert_bit_equal(found.t().contiguous() + 0.0, weight_of(made.weight_int4, dtype) + 0.0)

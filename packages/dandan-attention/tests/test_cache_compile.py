"""torch.compile and opcheck of the operators around a paged cache, on the CPU; what their schemas mark as written."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from paged_cases import LAYOUTS, caches, paged_call
from test_cache import fused_inputs, same_bits

from dandan_attention import DecodePlan, paged_attention, qk_norm_rope_write_kv, rope, write_kv
from dandan_attention._cache_ops import LIBRARY


@pytest.fixture(autouse=True)
def _fresh_compiler() -> None:
    torch._dynamo.reset()


def compiled(function: Callable[..., Any], dynamic: bool | None = None) -> Callable[..., Any]:
    return torch.compile(function, fullgraph=True, backend="aot_eager", dynamic=dynamic)


TURN = ("q", "k", "cos", "sin", "positions", "interleaved")
WRITE = ("k", "v", "k_cache", "v_cache", "slot_mapping")


def forms() -> dict[str, Callable[[], tuple[Any, ...]]]:
    """Arguments of every operator in torch.ops."""
    one, packed = paged_call([5, 9], seqlen_q=2), paged_call([5, 9], lengths_q=[2, 3], softcap=2.0, window_size=3)
    found: dict[str, Callable[[], tuple[Any, ...]]] = {}
    for call, shape in ((one, (2, 4, 2)), (packed, (4, 5))):
        raw, out, lse = call.raw(), torch.empty_like(call.q), torch.empty(shape)
        found[call.name] = found[f"{call.name}_lse"] = lambda raw=raw: raw
        found[f"{call.name}_out"] = lambda raw=raw, out=out: (*raw, out)
        found[f"{call.name}_lse_out"] = lambda raw=raw, out=out, lse=lse: (*raw, out, lse)
    given = fused_inputs(2, torch.float16)
    outputs = torch.empty_like(given["q"]), torch.empty_like(given["k"])
    found["rope"] = lambda: (*(given[name] for name in TURN), 0)
    found["rope_out"] = lambda: (*(given[name] for name in TURN), 0, *outputs)
    found["write_kv"] = lambda: (*(given[name] for name in WRITE), 0)
    found["qk_norm_rope_write_kv"] = lambda: (*given.values(), 0)
    found["qk_norm_rope_write_kv_out"] = lambda: (*given.values(), 0, *outputs)
    return found


FORMS = forms()


@pytest.mark.parametrize("name", FORMS)
def test_opcheck(name: str) -> None:
    """The schema says what is written; the fake has the real shapes, strides and dtypes."""
    tests = ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")
    torch.library.opcheck(LIBRARY.op(name), FORMS[name](), test_utils=tests)


def test_opcheck_of_an_output_that_is_left_out() -> None:
    arguments = (*FORMS["qk_norm_rope_write_kv_out"]()[:-1], None)
    torch.library.opcheck(
        LIBRARY.op("qk_norm_rope_write_kv_out"), arguments, test_utils=("test_schema", "test_faketensor")
    )


@pytest.mark.parametrize("name", FORMS)
def test_every_written_argument_is_marked(name: str) -> None:
    expected = {
        "rope_out": {"q_out", "k_out"},
        "write_kv": {"k_cache", "v_cache"},
        "qk_norm_rope_write_kv": {"k_cache", "v_cache"},
        "qk_norm_rope_write_kv_out": {"k_cache", "v_cache", "out", "key_out"},
    }
    default = {"out", "lse"} if name.endswith("_lse_out") else {"out"} if name.endswith("_out") else set()
    arguments = LIBRARY.op(name)._schema.arguments
    written = {each.name for each in arguments if each.alias_info is not None and each.alias_info.is_write}
    assert written == expected.get(name, default)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_decoder_layer_is_one_graph_that_writes_through_views(layout: str) -> None:
    """A49: caches that are views of one buffer, and q, k, v slices of one qkv tensor that is turned in place."""
    given = fused_inputs(2, torch.float16)
    heads_q, heads_kv, d = given["q"].shape[1], given["k"].shape[1], given["q"].shape[2]
    pages = torch.tensor([[0, 1, 2]], dtype=torch.int32)
    used = torch.tensor([9], dtype=torch.int32)
    plan = DecodePlan(8, heads_q, heads_kv, d, 12, 5, torch.float16, "cpu")

    def layer(qkv: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor) -> tuple[torch.Tensor, ...]:
        q, k, v = qkv.split([heads_q, heads_kv, heads_kv], 1)
        rest = {name: value for name, value in given.items() if name not in ("q", "k", "v", "k_cache", "v_cache")}
        turned = qk_norm_rope_write_kv(q, k, v, k_cache=k_cache, v_cache=v_cache, **rest)
        first = paged_attention(turned.unsqueeze(0), k_cache, v_cache, pages, used, plan=plan)
        rope(q, k, *(given[name] for name in ("cos", "sin", "positions")), out=(q, k))
        write_kv(k, v, k_cache, v_cache, given["slot_mapping"].flip(0))
        second = paged_attention(q.unsqueeze(0), k_cache, v_cache, pages, used)
        return first, second, k_cache.clone(), v_cache.clone()

    found = []
    for function in (layer, compiled(layer)):
        qkv = torch.cat((given["q"], given["k"], given["v"]), 1)
        k_cache, v_cache = caches((3, 4, heads_kv, d), torch.float16, layout, 5)
        before = k_cache.clone()
        results = function(qkv, k_cache, v_cache)
        assert not same_bits(k_cache, before)
        found.append((*results, qkv, k_cache._base if k_cache._base is not None else k_cache, v_cache))
    assert all(same_bits(*pair) for pair in zip(*found, strict=True))


def test_one_graph_serves_every_length_and_batch() -> None:
    torch._dynamo.utils.counters.clear()
    run = compiled(lambda *arguments: paged_attention(*arguments, return_lse=True), dynamic=True)
    # No size of the first call is that of another dimension: torch.compile takes sizes that are equal at first for one.
    for lengths in ([5, 9, 1, 20, 3, 6, 2], [5, 9], [1, 1, 30], [0, 7, 100, 3], [64, 2]):
        call = paged_call(lengths, seqlen_q=3)
        given = call.arguments()
        out, lse = run(*given.values())
        assert same_bits(out, call.run())
        assert torch.equal(lse, call.run(return_lse=True)[1])
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


def test_rope_trains_under_compile() -> None:
    given = fused_inputs(2, torch.float16)
    grads = []
    for function in (rope, compiled(rope)):
        q, k = given["q"].clone().requires_grad_(), given["k"].clone().requires_grad_()
        turned = function(q, k, *(given[name] for name in ("cos", "sin", "positions")))
        sum(t.float().square().sum() for t in turned).backward()
        grads += [q.grad, k.grad]
    assert same_bits(grads[0], grads[2])
    assert same_bits(grads[1], grads[3])

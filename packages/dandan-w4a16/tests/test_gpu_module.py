"""QuantizedLinear on CUDA: finalised wherever it is made or moved, its ways to other modules and devices, memory."""

from __future__ import annotations

import copy
import gc
import io
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from module_cases import WAYS, assert_compiles, assert_same
from w4a16_cases import GROUPS, K, N, module, random_weight, tensors, whole_x

from dandan_ops_core.backend import BackendUnavailableError
from dandan_ops_core.testing import assert_bit_equal
from dandan_w4a16 import Int4Weight, QuantizedLinear
from dandan_w4a16._ops import KERNELS, LIBRARY

pytestmark = pytest.mark.gpu

WORKSPACE = 16 << 20


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("bias", [False, True])
def test_every_way_to_another_module(way: str, bias: bool) -> None:
    """Bit for bit the same weight, finalised again, the same product."""
    wanted = module(bias=bias)
    found = WAYS[way](copy.deepcopy(wanted).cuda())
    assert isinstance(found, QuantizedLinear)
    assert found.is_finalized
    assert_same(found, wanted)
    assert list(found.state_dict()) == list(wanted.state_dict())
    assert {t.device.type for t in found.state_dict().values()} == {"cuda"}
    if way in ("itself", "deepcopy", "load assign", "by attribute", "bfloat16 and back"):
        assert_compiles(found)


@pytest.mark.parametrize("group", GROUPS)
def test_there_and_back(group: int) -> None:
    """Bit for bit, from the CPU and to it; the copy on the CPU is in the canonical form."""
    weight = random_weight(200, 512, group)
    made = QuantizedLinear.from_packed(weight).cuda()
    assert made.is_finalized
    made.cpu()
    assert not made.is_finalized
    for found, wanted in zip(tensors(made.weight_int4), tensors(weight), strict=True):
        assert_bit_equal(found, wanted)


def test_pickles_are_read_without_a_gpu() -> None:
    wanted = module()
    buffer = io.BytesIO()
    torch.save(copy.deepcopy(wanted).cuda(), buffer)
    buffer.seek(0)
    found = torch.load(buffer, map_location="cpu", weights_only=False)
    assert not found.is_finalized
    assert_same(found, wanted)


def test_safetensors_hold_the_canonical_form(tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors.torch", reason="safetensors is not installed")
    wanted = module()
    model = torch.nn.Sequential(copy.deepcopy(wanted).cuda())
    safetensors.save_model(model, tmp_path / "model.safetensors")
    for name, value in safetensors.load_file(tmp_path / "model.safetensors").items():
        assert_bit_equal(value, wanted.state_dict()[name.removeprefix("0.")])
    found = torch.nn.Sequential(QuantizedLinear(K, N, device="meta"))
    found.load_state_dict(safetensors.load_file(tmp_path / "model.safetensors", device="cuda"), assign=True)
    assert found[0].is_finalized
    assert_same(found[0], wanted)


@pytest.mark.parametrize("rows", [1, 5, 17, 200])
def test_execution_info(rows: int) -> None:
    made, x = module().cuda(), whole_x(rows=rows).cuda()
    info = made.execution_info(x)
    assert (info.op, info.backend, info.copies, info.fallback_reason) == ("packed_linear", "cuda", (), None)
    assert info.kernel in KERNELS
    assert made.execution_info(x, backend="torch").kernel == "torch"
    assert_bit_equal(made(x, backend="torch"), made(x))
    assert made.execution_info(x, backend=info.kernel).reason == "asked for"
    assert_bit_equal(made(x, backend=info.kernel), made(x))
    plain = QuantizedLinear(K, N, device="cuda")
    assert not plain.is_finalized
    told = plain.execution_info(x)
    assert (told.op, told.backend) == ("w4a16_linear", "cuda")
    assert "the weight is not finalised" in told.reason
    assert (plain(x) == 0).all()


def test_scales_in_float32_stay_canonical_and_say_so() -> None:
    made, x = module(scale_dtype=torch.float32).cuda(), whole_x().cuda()
    assert not made.is_finalized
    info = made.execution_info(x)
    assert (info.backend, info.fallback_reason) == ("torch", "scales have another dtype than x")
    with pytest.raises(BackendUnavailableError, match='backend "cuda" cannot run: scales have another dtype than x'):
        made(x, backend="cuda")
    assert_same(made, module(scale_dtype=torch.float32))


def test_gradients_reach_the_layer_below() -> None:
    made, x = module().cuda(), whole_x().cuda().requires_grad_()
    plain = module()
    for each, given in ((made, x), (plain, x.detach().cpu().requires_grad_())):
        each(given).sum().backward()
        grad = given.grad
        assert grad is not None
        if each is made:
            first = grad
    assert_bit_equal(first.cpu(), grad)
    with pytest.raises(BackendUnavailableError, match="an argument needs a gradient"):
        made(x, backend="cuda")


def test_one_graph_for_ten_batches() -> None:
    graphs = 0

    def count(graph: Any, _: Any) -> Any:
        nonlocal graphs
        graphs += 1
        return graph.forward

    torch._dynamo.reset()
    made = module().cuda()
    layers = torch.nn.Sequential(made, torch.nn.ReLU())
    compiled = torch.compile(layers, fullgraph=True, dynamic=True, backend=count)
    inductor = torch.compile(layers, fullgraph=True, dynamic=True)
    with torch.no_grad():
        for rows in range(2, 12):
            x = whole_x(rows=rows).cuda()
            assert torch.equal(compiled(x), layers(x))
            assert torch.equal(inductor(x), layers(x))
    assert graphs == 1


# ------------------------------------------------------------------------------------------------------------ memory


CANONICAL = 4096 * 4096 // 2 + 4096 * 64 * 3
ORDERED = 4096 * 4096 // 2 + 4096 * 64 * 4
SLACK = 64 << 10  # the allocator rounds sizes up


@pytest.fixture
def memory() -> Iterator[Callable[[Callable[[], Any]], tuple[int, int]]]:
    """Bytes that a call has allocated at its fullest, and that are left when its result alone is kept."""

    def measure(run: Callable[[], Any]) -> tuple[int, int]:
        gc.collect()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        result = run()
        torch.cuda.synchronize()
        peak, kept = torch.cuda.max_memory_allocated() - before, torch.cuda.memory_allocated() - before
        del result
        return peak, kept

    yield measure
    torch.cuda.empty_cache()


def test_loading_keeps_one_copy(memory: Callable[[Callable[[], Any]], tuple[int, int]]) -> None:
    """At the fullest the canonical form and the one in order; in the end the latter. In float16 it would be 32 MiB."""
    weight = random_weight(4096, 4096).to("cuda")
    state = {name: t.cpu() for name, t in zip(("qweight", "scales", "zeros"), tensors(weight), strict=True)}
    on_device = {name: t.cuda() for name, t in state.items()}

    def load(given: dict[str, torch.Tensor], device: str, assign: bool) -> QuantizedLinear:
        made = QuantizedLinear(4096, 4096, bias=False, device=device)
        made.load_state_dict(given, assign=assign)
        assert made.is_finalized
        return made

    checks = 4 << 20  # of the values
    for run in (
        lambda: QuantizedLinear.from_packed(weight),
        lambda: QuantizedLinear.from_packed(weight.to("cpu")).cuda(),
        lambda: load(state, "cuda", False),
        lambda: load(on_device, "meta", True),
        lambda: copy.deepcopy(QuantizedLinear.from_packed(weight)),
    ):
        peak, kept = memory(run)
        assert kept <= ORDERED + SLACK
        assert peak <= 2 * ORDERED + 2 * CANONICAL + checks
    made = QuantizedLinear.from_packed(weight)
    peak, kept = memory(lambda: made.load_state_dict(on_device))
    assert kept <= SLACK
    assert peak <= CANONICAL + checks + SLACK, "the old weight is given up before the new one comes"
    peak, kept = memory(lambda: made.half().bfloat16())
    assert kept == 0
    assert peak <= 1 << 20, "the pairs of scales and zeros, for a moment"
    peak, kept = memory(made.state_dict)
    assert peak <= CANONICAL + SLACK


def test_from_float_keeps_one_copy(memory: Callable[[Callable[[], Any]], tuple[int, int]]) -> None:
    weight = torch.randn(4096, 4096, device="cuda").half()
    peak, kept = memory(lambda: QuantizedLinear.from_float(weight))
    assert kept <= ORDERED + SLACK
    assert peak <= CANONICAL + max(ORDERED, WORKSPACE) + SLACK


@pytest.mark.parametrize("rows", [1, 16, 64, 1024])
def test_a_call_holds_its_result_alone(rows: int, memory: Callable[[Callable[[], Any]], tuple[int, int]]) -> None:
    """By every kernel, and by auto: no dequantised weight, and no workspace but for the sums of slices of K."""
    made = QuantizedLinear.from_packed(random_weight(4096, 4096).to("cuda"))
    x = torch.randn(rows, 4096, device="cuda").half()
    result = rows * 4096 * 2
    for backend in ("auto", *KERNELS):
        try:
            made(x, backend=backend)
        except BackendUnavailableError:
            continue
        peak, kept = memory(lambda: made(x, backend=backend))  # noqa: B023
        assert kept <= result + 512
        workspace = WORKSPACE if backend in ("auto", "sm80_mma", "sm80_dequantize") else 0
        assert peak <= result + 512 + workspace, backend
    peak, _ = memory(lambda: made(x, backend="torch"))
    assert peak <= WORKSPACE + 3 * result + (32 << 20), "some tiles, and what cuBLAS takes once"


def test_finalising_waits_for_the_weight() -> None:
    """The order is made of what the stream is still writing."""
    weight = random_weight(N, K, whole=True)
    wanted = QuantizedLinear.from_packed(weight)
    host = [t.pin_memory() for t in tensors(weight)]
    for _ in range(10):
        target = Int4Weight(*(torch.empty_like(t, device="cuda") for t in tensors(weight)))
        torch.cuda._sleep(20_000_000)
        for t, source in zip(tensors(target), host, strict=True):
            t.copy_(source, non_blocking=True)
        assert_same(QuantizedLinear.from_packed(target), wanted)


def test_a_device_without_code_keeps_the_canonical_form(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the library refuses is no error of finalize."""

    class Refusing:
        def __call__(self, *_: Any) -> Any:
            raise RuntimeError("BackendUnavailableError: repack: this build has no code for the device's architecture")

    op = LIBRARY.op
    monkeypatch.setattr(LIBRARY, "op", lambda name: Refusing() if name == "repack" else op(name))
    made = QuantizedLinear.from_packed(random_weight(N, K).to("cuda"))
    assert not made.is_finalized

"""`w4a16_linear` on CUDA, by whatever takes the call: values, streams, threads, graphs, devices, memory."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import torch
from w4a16_cases import (
    DTYPES,
    GROUPS,
    SCALE_DTYPES,
    check,
    generator,
    random_weight,
    tensors,
    truth,
    weight_of,
)

from dandan_ops_core.testing import assert_bit_equal, delay_stream, guarded_empty
from dandan_w4a16 import Int4Weight, QuantizedLinear, dequantize_int4, pack_int4, quantize_int4, w4a16_linear

pytestmark = pytest.mark.gpu

EVERY_DTYPE = pytest.mark.parametrize("dtype", DTYPES, ids=str)
WORKSPACE = 16 << 20  # bytes of dequantised tiles that a call may hold


def whole(*shape: int, dtype: torch.dtype = torch.float16, seed: int = 0) -> torch.Tensor:
    return torch.randint(-2, 3, shape, generator=generator(seed)).to(dtype).cuda()


@EVERY_DTYPE
@pytest.mark.parametrize("n", [1, 8, 64, 72, 192, 200])
def test_the_identity_reads_out_every_weight(dtype: torch.dtype, n: int) -> None:
    """A38."""
    weight = random_weight(n, 128)
    out = w4a16_linear(torch.eye(128, dtype=dtype, device="cuda"), *tensors(weight.to("cuda")))
    assert_bit_equal(out.t().contiguous().cpu() + 0.0, weight_of(weight, dtype) + 0.0)


@EVERY_DTYPE
@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("scale_dtype", SCALE_DTYPES, ids=str)
@pytest.mark.parametrize("zero_mode", ["integer", "float"])
@pytest.mark.parametrize("m", [1, 17])
def test_values(dtype: torch.dtype, group: int, scale_dtype: torch.dtype, zero_mode: str, m: int) -> None:
    weight = random_weight(200, 512, group, scale_dtype=scale_dtype, zero_mode=zero_mode)
    x = torch.randn(m, 512, generator=generator(2)).to(dtype)
    bias = torch.randn(200, generator=generator(3)).to(scale_dtype)
    found = w4a16_linear(x.cuda(), *tensors(weight.to("cuda")), group_size=group, zero_mode=zero_mode, bias=bias.cuda())
    check(found.cpu(), x, weight, bias)


@pytest.mark.parametrize("m", [1, 64])
def test_sums_beyond_float16(m: int) -> None:
    """A37, under PyTorch's default settings, which let cuBLAS add in float16."""
    x = torch.full((m, 4096), 200.0, device="cuda").half()
    x[:, 2048:] = -200
    codes = pack_int4(torch.full((64, 4096), 10))
    weight = Int4Weight(codes, torch.ones(64, 64).half(), torch.full((64, 64), 8, dtype=torch.uint8)).to("cuda")
    assert (w4a16_linear(x, *tensors(weight)) == 0).all()


def test_the_bias_is_added_before_the_rounding() -> None:
    x = torch.zeros(1, 64, device="cuda").half()
    x[0, 0], x[0, 1] = 1024, 0.25
    codes = pack_int4(torch.ones(2, 64, dtype=torch.uint8))
    weight = Int4Weight(codes, torch.ones(2, 1).half(), torch.zeros(2, 1, dtype=torch.uint8)).to("cuda")
    out = w4a16_linear(x, *tensors(weight), bias=torch.tensor([0.25, 0.5], device="cuda"))
    assert out.tolist() == [[1024.0, 1025.0]]


@EVERY_DTYPE
@pytest.mark.parametrize("lead", [(0,), (2, 0)], ids=str)
def test_no_rows_and_no_columns(dtype: torch.dtype, lead: tuple[int, ...]) -> None:
    """A13."""
    weight = random_weight(24, 64).to("cuda")
    assert w4a16_linear(torch.empty(*lead, 64, dtype=dtype, device="cuda"), *tensors(weight)).shape == (*lead, 24)
    nothing = torch.empty(3, 0, dtype=dtype, device="cuda")
    assert (w4a16_linear(nothing, *tensors(random_weight(24, 0).to("cuda"))) == 0).all()
    assert torch.ones(4, device="cuda").sum().item() == 4


@EVERY_DTYPE
def test_out_in_guard_bands(dtype: torch.dtype) -> None:
    weight, x = random_weight(72, 128, whole=True), whole(5, 128, dtype=dtype)
    with guarded_empty((5, 72), dtype, device="cuda") as guarded:
        w4a16_linear(x, *tensors(weight.to("cuda")), out=guarded.tensor)
    assert_bit_equal(guarded.tensor.cpu(), truth(x.cpu(), weight).to(dtype))


def test_gradients() -> None:
    weight = random_weight(40, 128)
    x = torch.randn(6, 128, generator=generator(1)).half().cuda().requires_grad_()
    up = torch.randn(6, 40, generator=generator(2)).half().cuda()
    w4a16_linear(x, *tensors(weight.to("cuda"))).backward(up)
    expected = up.cpu().double() @ weight_of(weight, torch.float16).double()
    assert x.grad is not None
    assert (x.grad.cpu().double() - expected).abs().max() <= expected.abs().max() * 2**-10


@pytest.mark.parametrize("dtype", SCALE_DTYPES, ids=str)
def test_quantisation_gives_the_bits_of_the_cpu(dtype: torch.dtype) -> None:
    weight = torch.randn(300, 1024, generator=generator(4)).to(dtype)
    mine, theirs = quantize_int4(weight.cuda()), quantize_int4(weight)
    for here, there in zip(tensors(mine), tensors(theirs), strict=True):
        assert_bit_equal(here.cpu(), there)
    assert_bit_equal(dequantize_int4(mine).cpu(), dequantize_int4(theirs))


def test_a_module_goes_there_and_back() -> None:
    layer = QuantizedLinear.from_packed(random_weight(24, 128, whole=True), torch.arange(24).half())
    before, x = {name: t.clone() for name, t in layer.state_dict().items()}, whole(5, 128)
    expected = truth(x.cpu(), layer.weight_int4, layer.bias).half()
    layer.cuda()
    assert {t.device.type for t in layer.state_dict().values()} == {"cuda"}
    assert_bit_equal(layer(x).cpu(), expected)
    assert_bit_equal(torch.compile(layer, fullgraph=True)(x).cpu(), expected)
    layer.cpu()
    for name, value in before.items():
        assert_bit_equal(layer.state_dict()[name], value)


# ----------------------------------------------------------------------------------------- streams, threads, devices


def test_on_a_side_stream() -> None:
    """A28: work on the current stream, after what is enqueued there."""
    weight, host = random_weight(64, 256, whole=True).to("cuda"), torch.ones(4, 256).half().pin_memory()
    expected = w4a16_linear(host.cuda(), *tensors(weight))
    side = torch.cuda.Stream()
    torch.cuda.synchronize()
    for _ in range(20):
        x = torch.zeros(4, 256, device="cuda").half()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            delay_stream(20, side)
            x.copy_(host, non_blocking=True)
            found = w4a16_linear(x, *tensors(weight)) * 1
        side.synchronize()
        assert_bit_equal(found, expected)


def test_threads_with_streams_of_their_own() -> None:
    """A30."""
    weight = random_weight(200, 512).to("cuda")
    inputs = [torch.randn(4, 512, generator=generator(i)).half().cuda() for i in range(4)]
    expected = [w4a16_linear(x, *tensors(weight)) for x in inputs]
    torch.cuda.synchronize()
    problems: list[str] = []

    def work(index: int) -> None:
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            for _ in range(200):
                found = w4a16_linear(inputs[index], *tensors(weight))
                stream.synchronize()
                if not torch.equal(found, expected[index]):
                    problems.append(f"thread {index} differs")
                    return

    threads = [threading.Thread(target=work, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert problems == []


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_on_the_second_device() -> None:
    """A29."""
    weight, x = random_weight(24, 128, whole=True), whole(5, 128)
    expected, before = truth(x.cpu(), weight).half(), torch.cuda.memory_allocated(0)
    found = w4a16_linear(x.to("cuda:1"), *tensors(weight.to("cuda:1")))
    assert torch.cuda.current_device() == 0
    assert torch.cuda.memory_allocated(0) == before
    assert_bit_equal(found.cpu(), expected)


def test_capture_and_replay() -> None:
    """A call synchronises nothing, so a graph can hold it; inputs may change between replays."""
    weight = random_weight(64, 256, whole=True)
    on_device, x = weight.to("cuda"), whole(4, 256)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        w4a16_linear(x, *tensors(on_device))
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = w4a16_linear(x, *tensors(on_device))
    for seed in range(3):
        x.copy_(whole(4, 256, seed=seed))
        graph.replay()
        assert_bit_equal(out.cpu(), truth(x.cpu(), weight).half())


# ------------------------------------------------------------------------------------------------------------ memory


@pytest.fixture
def large() -> Iterator[Int4Weight]:
    yield random_weight(4096, 4096).to("cuda")
    torch.cuda.empty_cache()


def extra(run: object) -> int:
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    result = run()  # type: ignore[operator]
    del result
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


@pytest.mark.parametrize("m", [1, 16, 256])
def test_a_call_keeps_no_dequantised_weight(large: Int4Weight, m: int) -> None:
    """The weight in float16 would be 32 MiB, which the last line shows that this can see."""
    x = torch.randn(m, 4096, device="cuda").half()
    w4a16_linear(x, *tensors(large))  # cuBLAS takes its own workspace once
    outputs = m * 4096 * 2 + m * 4096 * 4
    assert extra(lambda: w4a16_linear(x, *tensors(large))) <= WORKSPACE + outputs
    assert extra(lambda: dequantize_int4(large)) >= 32 << 20


def test_memory_is_flat(large: Int4Weight) -> None:
    """A55: the same shape again and again, then shapes that change."""
    for rows in ([4] * 50, list(range(1, 51))):
        for m in rows:
            w4a16_linear(torch.ones(m, 4096, device="cuda").half(), *tensors(large))
        torch.cuda.synchronize()
        held, free = torch.cuda.memory_allocated(), torch.cuda.mem_get_info()[0]
        for m in rows:
            w4a16_linear(torch.ones(m, 4096, device="cuda").half(), *tensors(large))
        torch.cuda.synchronize()
        assert torch.cuda.memory_allocated() == held
        assert torch.cuda.mem_get_info()[0] >= free


def test_from_float_keeps_nothing_beside_the_packed_weight() -> None:
    weight = torch.randn(4096, 4096, device="cuda").half()
    packed = 4096 * 4096 // 2 + 4096 * 64 * 3
    assert extra(lambda: QuantizedLinear.from_float(weight)) <= packed + WORKSPACE

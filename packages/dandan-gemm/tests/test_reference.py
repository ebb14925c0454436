"""Values that are known without this package: products computed by hand, public reports, torch in float64; gradients;
what execution_info says of all of them.

The CPU kernel is the reference, so on the CPU these tests say that the operator means the right thing; on CUDA, that
the own kernels compute it.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

import dandan_gemm
from dandan_gemm import reference
from dandan_gemm._ops import KERNELS
from dandan_ops_core.backend import BackendUnavailableError, ExecutionInfo
from dandan_ops_core.testing import assert_bit_equal, assert_close_to, honest_math, rounding_step

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
DTYPES = [torch.float16, torch.bfloat16]
every_device = pytest.mark.parametrize("device", DEVICES)
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)
every_layout = pytest.mark.parametrize("transposed", [False, True], ids=["[K, N]", "[N, K]"])


def exactly(found: torch.Tensor, expected: Any) -> None:
    """The same numbers, of the output's dtype."""
    assert_bit_equal(found, torch.as_tensor(expected, dtype=found.dtype).to(found.device))


def product(a: torch.Tensor, weight: torch.Tensor, transposed: bool, **keywords: Any) -> torch.Tensor:
    """a @ weight.T of a [N, K] weight, which is handed over in either layout."""
    b = weight if transposed else weight.t().contiguous()
    return dandan_gemm.gemm(a, b, weight_transposed=transposed, **keywords)


# ------------------------------------------------------------------------------------------------------------- by hand


@every_device
@every_dtype
@every_layout
def test_by_hand(device: str, dtype: torch.dtype, transposed: bool) -> None:
    a = torch.tensor([[1, 2, 3], [-1, 0, 4]], dtype=dtype, device=device)
    weight = torch.tensor([[1, 0, 0], [0, 1, 0], [1, 1, 1], [2, -3, 0.5]], dtype=dtype, device=device)
    bias = torch.tensor([10, 20, 30, 40], dtype=dtype, device=device)
    exactly(product(a, weight, transposed), [[1, 2, 6, -2.5], [-1, 0, 3, 0]])
    exactly(product(a, weight, transposed, bias=bias), [[11, 22, 36, 37.5], [9, 20, 33, 40]])
    exactly(product(a[1], weight, transposed, bias=bias), [9, 20, 33, 40])
    exactly(product(a.view(2, 1, 3), weight, transposed), [[[1, 2, 6, -2.5]], [[-1, 0, 3, 0]]])


@every_device
@every_dtype
@every_layout
@pytest.mark.parametrize(("m", "k", "n"), [(2, 3, 4), (3, 5, 7), (1, 1, 1), (2, 4099, 6)])
def test_odd_sizes(device: str, dtype: torch.dtype, transposed: bool, m: int, k: int, n: int) -> None:
    """A10: whole numbers from 0 to 11 in the small ones, so every sum is exact."""
    a = (torch.arange(m * k) % 12).view(m, k).to(dtype).to(device)
    weight = ((torch.arange(n * k) * 5) % 12).view(n, k).to(dtype).to(device)
    truth = a.double() @ weight.double().t()
    found = product(a, weight, transposed)
    assert_bit_equal(found, truth.to(dtype))
    if k < 10:
        assert torch.equal(found.double(), truth)


@every_device
@every_layout
@pytest.mark.parametrize(("dtype", "whole"), [(torch.float16, 2048.0), (torch.bfloat16, 256.0)], ids=str)
def test_the_bias_is_added_before_the_one_rounding(
    device: str, transposed: bool, dtype: torch.dtype, whole: float
) -> None:
    """whole + 1 is halfway between two numbers of the dtype and would be rounded to whole; less 1, it is whole."""
    a = torch.ones(3, 8, dtype=dtype, device=device)
    weight = torch.zeros(16, 8, dtype=dtype, device=device)
    weight[:, 0], weight[:, 1] = whole, 1.0
    bias = torch.full((16,), -1.0, dtype=dtype, device=device)
    exactly(product(a, weight, transposed), torch.full((3, 16), whole))
    exactly(product(a, weight, transposed, bias=bias), torch.full((3, 16), whole))


@every_device
@every_layout
@pytest.mark.parametrize("m", [1, 64])
def test_sums_beyond_the_range_of_float16_that_cancel(device: str, transposed: bool, m: int) -> None:
    """A37: the sum of either half is 819,200."""
    a = torch.full((m, 4096), 200.0, dtype=torch.float16, device=device)
    a[:, 2048:] = -200.0
    weight = torch.full((64, 4096), 2.0, dtype=torch.float16, device=device)
    with honest_math():  # where the choice is torch, it adds in FP32 as well
        exactly(product(a, weight, transposed).abs(), torch.zeros(m, 64))
        exactly(product(a, weight, transposed, bias=weight[:, 0].contiguous()), torch.full((m, 64), 2.0))


@every_device
@every_layout
@pytest.mark.parametrize("special", [float("inf"), float("nan")])
def test_infinities_and_nan_stay_in_their_row(device: str, transposed: bool, special: float) -> None:
    a = torch.ones(5, 64, dtype=torch.float16, device=device)
    a[2, 7] = special
    weight = torch.ones(24, 64, dtype=torch.float16, device=device)
    found = product(a, weight, transposed)
    exactly(found[[0, 1, 3, 4]], torch.full((4, 24), 64.0))
    assert not torch.isfinite(found[2]).any()


@every_device
@every_layout
def test_results_beyond_the_range_are_infinite(device: str, transposed: bool) -> None:
    a = torch.full((2, 64), 100.0, dtype=torch.float16, device=device)
    weight = torch.full((8, 64), 100.0, dtype=torch.float16, device=device)
    weight[1] *= -1
    found = product(a, weight, transposed)
    exactly(found[:, 0], [float("inf")] * 2)
    exactly(found[:, 1], [-float("inf")] * 2)


# ---------------------------------------------------------------------------------------------------------- empty sums


@every_device
@every_dtype
@every_layout
@pytest.mark.parametrize("given", [False, True], ids=["allocated", "out"])
def test_no_k(device: str, dtype: torch.dtype, transposed: bool, given: bool) -> None:
    """A16: the bias, or exact zeros, never what was in memory before."""
    a = torch.empty(2, 0, dtype=dtype, device=device)
    weight = torch.empty(3, 0, dtype=dtype, device=device)
    bias = torch.tensor([1, 2, 3], dtype=dtype, device=device)
    for vector, expected in ((None, [[0.0] * 3] * 2), (bias, [[1, 2, 3]] * 2)):
        for _ in range(20):
            dirty = torch.full((2, 3), float("nan"), dtype=dtype, device=device)
            out = torch.full((2, 3), float("nan"), dtype=dtype, device=device) if given else None
            del dirty
            exactly(product(a, weight, transposed, bias=vector, out=out), expected)
        exactly(product(a[0], weight, transposed, bias=vector), expected[0])
        exactly(product(a.view(1, 2, 0), weight, transposed, bias=vector), [expected])


@every_device
@every_layout
def test_no_rows_and_what_comes_after(device: str, transposed: bool) -> None:
    """A13: a launch of nothing must not leave an error behind."""
    weight = torch.ones(24, 64, dtype=torch.float16, device=device)
    for shape in ((0, 64), (2, 0, 64), (0, 3, 64)):
        found = product(torch.empty(shape, dtype=torch.float16, device=device), weight, transposed)
        assert (found.shape, found.dtype, found.device.type) == ((*shape[:-1], 24), torch.float16, device)
        assert torch.ones(4, device=device).sum().item() == 4


# -------------------------------------------------------------------------------------------------------------- layout


@every_device
@pytest.mark.parametrize("square", [False, True])
def test_the_declared_layout_decides_and_not_the_shape(device: str, square: bool) -> None:
    """A45: one row, one row with leading ones, nine rows; a weight that fits both ways, and one that does not."""
    torch.manual_seed(45)
    k, n = 128, 128 if square else 64
    rows = torch.randint(-4, 5, (9, k)).half().to(device)
    weight = torch.randint(-4, 5, (n, k)).half().to(device)
    truth = rows.double() @ weight.double().t()
    for b, transposed in ((weight, True), (weight.t().contiguous(), False)):
        keywords = {"weight_transposed": transposed}
        assert torch.equal(dandan_gemm.gemm(rows, b, **keywords).double(), truth)
        for a in (rows[:1], rows[:1].view(1, 1, k), rows[0]):
            assert torch.equal(dandan_gemm.gemm(a, b, **keywords).double(), truth[0].view(*a.shape[:-1], n))
        if square:
            wrong = dandan_gemm.gemm(rows, b, weight_transposed=not transposed)
            assert torch.equal(wrong.double(), rows.double() @ weight.double())
        else:
            with pytest.raises(ValueError, match=r"^gemm: b has K=64 but a has K=128; with weight_transposed="):
                dandan_gemm.gemm(rows, b, weight_transposed=not transposed)


@every_device
@every_dtype
def test_a_transposed_view_is_the_same_weight(device: str, dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    a, weight = torch.randn(5, 72).to(dtype).to(device), torch.randn(40, 72).to(dtype).to(device)
    expected = dandan_gemm.gemm(a, weight, weight_transposed=True)
    assert_bit_equal(dandan_gemm.gemm(a, weight.t()), expected)
    other = weight.t().contiguous()
    assert_bit_equal(dandan_gemm.gemm(a, other.t(), weight_transposed=True), dandan_gemm.gemm(a, other))


@every_dtype
def test_rows_do_not_depend_on_their_batch_on_the_cpu(dtype: torch.dtype) -> None:
    """A35: within one rounding step of the row's largest; that a number of rows takes the same kernel as another, and
    adds in its order, is not promised.
    """
    torch.manual_seed(35)
    a, weight = torch.randn(300, 512).to(dtype), torch.randn(64, 512).to(dtype)
    whole = dandan_gemm.gemm(a, weight, weight_transposed=True)
    for size in (255, 1):
        parts = torch.cat([dandan_gemm.gemm(part, weight, weight_transposed=True) for part in a.split(size)])
        limit = rounding_step(whole.double().abs().amax(-1, keepdim=True), dtype)
        assert ((parts.double() - whole.double()).abs() <= limit).all()


# ----------------------------------------------------------------------------------------- torch's product in float64


@every_dtype
@settings(max_examples=60, deadline=None)
@given(
    m=st.integers(1, 9),
    n=st.integers(1, 40),
    k=st.integers(1, 300),
    transposed=st.booleans(),
    has_bias=st.booleans(),
    seed=st.integers(0, 99),
)
def test_reference_against_torch_in_float64(
    dtype: torch.dtype, m: int, n: int, k: int, transposed: bool, has_bias: bool, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    a, weight = (torch.randn(shape, generator=generator).to(dtype) for shape in ((m, k), (n, k)))
    bias = torch.randn(n, generator=generator).to(dtype) if has_bias else None
    truth = F.linear(a.double(), weight.double(), None if bias is None else bias.double())
    honest = F.linear(a.float(), weight.float(), None if bias is None else bias.float()).to(dtype)
    # The honest composition may be exact where ours rounds: then half a step and FP32's own error.
    slack = honest.double() + 1e-6 * truth.abs().amax(-1, keepdim=True)
    assert_close_to(product(a, weight, transposed, bias=bias), truth, slack, dtype=dtype)
    b = weight if transposed else weight.t().contiguous()
    exact = reference.gemm(a, b, bias, transposed, compute_dtype=torch.float64)
    assert exact.dtype == torch.float64
    torch.testing.assert_close(exact, truth, rtol=0, atol=1e-12)


@every_dtype
def test_the_torch_backend_on_the_cpu_is_the_reference(dtype: torch.dtype) -> None:
    torch.manual_seed(2)
    a, weight, bias = torch.randn(2, 3, 72).to(dtype), torch.randn(40, 72).to(dtype), torch.randn(40).to(dtype)
    expected = reference.gemm(a, weight, bias, True)
    assert_bit_equal(reference.torch_gemm(a, weight, bias, True), expected)
    for backend in ("auto", "torch"):
        assert_bit_equal(dandan_gemm.gemm(a, weight, weight_transposed=True, bias=bias, backend=backend), expected)


@pytest.mark.gpu
@every_dtype
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("lead", [(1,), (7,), (2, 3), ()], ids=str)
def test_the_torch_backend_on_cuda_is_linear(dtype: torch.dtype, has_bias: bool, lead: tuple[int, ...]) -> None:
    """The bits of F.linear, with and without the compiled library, and into a given tensor."""
    torch.manual_seed(2)
    a = torch.randn(*lead, 72, device="cuda").to(dtype)
    weight = torch.randn(40, 72, device="cuda").to(dtype)
    bias = torch.randn(40, device="cuda").to(dtype) if has_bias else None
    expected = F.linear(a.reshape(-1, 72), weight, bias).view(*lead, 40)
    keywords = {"weight_transposed": True, "bias": bias, "backend": "torch"}
    assert_bit_equal(dandan_gemm.gemm(a, weight, **keywords), expected)
    assert_bit_equal(reference.torch_gemm(a, weight, bias, True), expected)
    out = torch.empty(*lead, 80, device="cuda", dtype=dtype)[..., :40]
    dandan_gemm.gemm(a, weight, out=out, **keywords)
    exact = a.double() @ weight.double().t()
    if bias is not None:
        exact += bias.double()
    assert_close_to(out, exact, expected)  # not the same bits: cuBLAS may take another way there


# ----------------------------------------------------------------------------------------------------------- gradients

NAMES = ("a", "b", "bias")


def differentiable(
    device: str, transposed: bool, dtype: torch.dtype = torch.float16, needing: tuple[str, ...] = NAMES
) -> dict[str, torch.Tensor]:
    torch.manual_seed(51)
    shapes = {"a": (2, 3, 40), "b": (24, 40) if transposed else (40, 24), "bias": (24,)}
    return {
        name: torch.randn(shape).to(dtype).to(device).requires_grad_(name in needing) for name, shape in shapes.items()
    }


def torch_function(t: dict[str, torch.Tensor], transposed: bool) -> torch.Tensor:
    return F.linear(t["a"], t["b"] if transposed else t["b"].t(), t["bias"])


@every_device
@every_dtype
@every_layout
@pytest.mark.parametrize("backend", ["auto", "torch"])
def test_gradients_are_torchs_own(device: str, dtype: torch.dtype, transposed: bool, backend: str) -> None:
    """A51: every argument's gradient, within one rounding of float64's and, on CUDA, the bits of F.linear's."""
    tensors = differentiable(device, transposed, dtype)
    upstream = torch.randn(2, 3, 24).to(dtype).to(device)
    keywords = {"weight_transposed": transposed, "backend": backend}
    found = dandan_gemm.gemm(**tensors, **keywords)
    assert found.requires_grad
    grads = torch.autograd.grad(found, list(tensors.values()), upstream)
    wide = {name: t.detach().double().requires_grad_() for name, t in tensors.items()}
    truths = torch.autograd.grad(torch_function(wide, transposed), list(wide.values()), upstream.double())
    theirs = torch.autograd.grad(torch_function(tensors, transposed), list(tensors.values()), upstream)
    for name, grad, truth, own in zip(NAMES, grads, truths, theirs, strict=True):
        assert grad.dtype == dtype
        assert truth.abs().max() > 0
        error = (grad.double() - truth).abs()
        assert (error <= 2 * rounding_step(truth.abs().amax(), dtype)).all(), name
        if device == "cuda":
            torch.testing.assert_close(grad, own, rtol=0, atol=0, msg=f"gradient of {name}")


@every_device
@every_layout
def test_one_argument_that_needs_a_gradient_is_enough(device: str, transposed: bool) -> None:
    for name in NAMES:
        tensors = differentiable(device, transposed, needing=(name,))
        result = dandan_gemm.gemm(**tensors, weight_transposed=transposed)
        assert result.requires_grad, name
        (grad,) = torch.autograd.grad(result.float().square().sum(), [tensors[name]])
        assert grad.abs().max() > 0, name
        info = dandan_gemm.gemm_execution_info(**tensors, weight_transposed=transposed)
        assert (info.backend, info.kernel) == ("torch", "torch")
        assert info.reason == "an argument needs a gradient"
        assert info.fallback_reason == "the own kernels compute no gradients"
        asked = dandan_gemm.gemm_execution_info(**tensors, weight_transposed=transposed, backend="torch")
        assert (asked.kernel, asked.reason, asked.fallback_reason) == ("torch", "asked for", None)


@every_device
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode], ids=["no_grad", "inference_mode"])
def test_nothing_is_recorded_where_no_gradient_is_wanted(mode: Any, device: str) -> None:
    """A51: the normal result, which in these modes may also go into `out`."""
    tensors = differentiable(device, True)
    with mode():
        result = dandan_gemm.gemm(**tensors, weight_transposed=True)
        info = dandan_gemm.gemm_execution_info(**tensors, weight_transposed=True)
        out = torch.empty_like(result)
        assert dandan_gemm.gemm(**tensors, weight_transposed=True, out=out) is out
        plain = {name: t.detach() for name, t in tensors.items()}
        expected = dandan_gemm.gemm(**plain, weight_transposed=True)
    assert not result.requires_grad
    assert_bit_equal(result, expected)
    assert_bit_equal(out, expected)
    assert info.reason != "an argument needs a gradient"


def test_gradcheck_of_the_reference() -> None:
    torch.manual_seed(1)
    tensors = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in ((2, 5), (3, 5), (3,))]
    assert torch.autograd.gradcheck(
        lambda a, b, bias: reference.gemm(a, b, bias, True, compute_dtype=torch.float64), tensors
    )


# ------------------------------------------------------------------------------------------------------ execution_info


def test_execution_info_on_the_cpu() -> None:
    a, b = torch.randn(3, 40).half(), torch.randn(24, 40).half()
    keywords = {"weight_transposed": True}
    reason, fallback = "a is not on a CUDA device", "a is on cpu, the own kernels run on CUDA devices"
    info = dandan_gemm.gemm_execution_info(a, b, **keywords)
    assert info == ExecutionInfo("gemm", "torch", "torch", reason, None, fallback, (), "cpu")
    asked = dandan_gemm.gemm_execution_info(a, b, **keywords, backend="torch")
    assert asked == ExecutionInfo("gemm", "torch", "torch", "asked for", None, None, (), "cpu")
    for backend in ("cuda", *KERNELS):
        for function in (dandan_gemm.gemm, dandan_gemm.gemm_execution_info):
            with pytest.raises(BackendUnavailableError, match="a is on cpu, the own kernels run on CUDA devices"):
                function(a, b, **keywords, backend=backend)
    meta = dandan_gemm.gemm_execution_info(a.to("meta"), b.to("meta"), **keywords)
    assert (meta.backend, meta.device) == ("torch", "meta")


def test_execution_info_computes_nothing() -> None:
    a, b, out = torch.ones(3, 8).half(), torch.ones(4, 8).half(), torch.zeros(3, 4).half()
    dandan_gemm.gemm_execution_info(a, b, weight_transposed=True, out=out)
    assert not out.any()


@pytest.mark.parametrize("function", [dandan_gemm.gemm, dandan_gemm.gemm_execution_info])
def test_calls_that_are_none(function: Any) -> None:
    a = torch.ones(2, 8).half()
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'b'"):
        function(a)
    with pytest.raises(TypeError, match="takes 2 positional arguments but 3 were given"):
        function(a, a, True)

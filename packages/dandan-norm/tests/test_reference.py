"""Values that are known without this package: plain numbers of public reports, rows computed by hand, torch in float64;
gradients; what execution_info says of all of them.

The CPU kernel is the reference, so on the CPU these tests say that the operators mean the right thing; on CUDA, that
the own kernels compute it.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

import dandan_norm
from dandan_norm import reference
from dandan_ops_core.backend import BackendUnavailableError, ExecutionInfo
from dandan_ops_core.testing import assert_bit_equal, assert_close_to, rounding_step

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
DTYPES = [torch.float16, torch.bfloat16, torch.float32]
every_device = pytest.mark.parametrize("device", DEVICES)
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def exactly(found: torch.Tensor, expected: list[Any] | torch.Tensor) -> None:
    """The same numbers, of the output's dtype."""
    assert_bit_equal(found, torch.as_tensor(expected, dtype=found.dtype).to(found.device))


def rounded(found: torch.Tensor, expected: list[Any], steps: int = 1) -> None:
    """Each number is within so many rounding steps of the one that was computed by hand in double precision."""
    wanted = torch.tensor(expected, dtype=torch.float64)
    error = (found.detach().double().cpu() - wanted).abs()
    assert (error <= steps * rounding_step(wanted, found.dtype)).all(), f"{found.tolist()} instead of {expected}"


# ------------------------------------------------------------------------------------------------------------ rms_norm


@every_device
def test_rms_norm_of_half_numbers_whose_squares_overflow(device: str) -> None:
    """A31: 300 squared is beyond float16."""
    ones = torch.ones(4096, dtype=torch.float16, device=device)
    for value in (300.0, 60000.0):
        x = torch.full((2, 4096), value, dtype=torch.float16, device=device)
        exactly(dandan_norm.rms_norm(x, ones, 1e-6), torch.ones(2, 4096))
    spike = torch.zeros(2, 4096, dtype=torch.float16, device=device)
    spike[0, 17] = 60000.0
    wanted = torch.zeros(2, 4096)
    wanted[0, 17] = 64.0  # the root of 4096
    exactly(dandan_norm.rms_norm(spike, ones, 1e-6), wanted)


@every_device
@every_dtype
def test_rms_norm_by_hand(device: str, dtype: torch.dtype) -> None:
    x = torch.tensor([[3.0, 4.0], [0.0, 0.0], [-5.0, 5.0]], dtype=dtype, device=device)
    weight = torch.tensor([1.0, -2.0], dtype=dtype, device=device)
    # The mean square of 3, 4 is 12.5.
    root = math.sqrt(12.5 + 0.5)
    rounded(dandan_norm.rms_norm(x[:1], weight, 0.5), [[3 / root, -8 / root]])
    exactly(dandan_norm.rms_norm(x[1:2], weight, 0.5), [[0.0, -0.0]])
    # 25 + 11 is 36: eps stands inside the root.
    rounded(dandan_norm.rms_norm(x[2:], weight, 11.0), [[-5 / 6, -10 / 6]])
    rounded(dandan_norm.rms_norm(x[2:], None, 11.0), [[-5 / 6, 5 / 6]])


@every_device
@every_dtype
def test_default_eps_is_the_documented_one(device: str, dtype: torch.dtype) -> None:
    x = torch.full((1, 8), 1e-3, dtype=dtype, device=device)
    value = float(x[0, 0])
    rounded(dandan_norm.rms_norm(x), [[value / math.sqrt(value**2 + 1e-6)] * 8])
    alternating = x * torch.tensor([1.0, -1.0] * 4, dtype=dtype, device=device)
    found = dandan_norm.layer_norm(alternating)
    rounded(found, [[sign * value / math.sqrt(value**2 + 1e-5) for sign in (1, -1) * 4]])


@every_device
def test_weight_is_multiplied_before_the_one_rounding(device: str) -> None:
    """A57: not the order of the Hugging Face models, which round to bfloat16 first."""
    torch.manual_seed(57)
    x, weight = torch.randn(8, 4096).bfloat16().to(device), torch.randn(4096).bfloat16().to(device)
    found = dandan_norm.rms_norm(x, weight, 1e-6)
    normalised = x.double() * torch.rsqrt(x.double().square().mean(-1, keepdim=True) + 1e-6)
    once = (normalised * weight.double()).bfloat16()
    twice = normalised.bfloat16() * weight
    assert (found != once).float().mean() < 0.001  # float32 arithmetic may move what lies on a tie
    assert (found != twice).float().mean() > 0.1
    assert (found.double() - twice.double()).abs().max() > 1e-2  # the report's difference per layer is 3e-2


@every_device
@pytest.mark.parametrize("cols", [1152, 4096])
@pytest.mark.parametrize(
    ("dtype", "weight_dtype"),
    [
        (torch.bfloat16, torch.float32),
        (torch.float16, torch.float32),
        (torch.bfloat16, torch.float16),
        (torch.float32, torch.bfloat16),
    ],
    ids=str,
)
def test_weight_of_another_dtype(device: str, cols: int, dtype: torch.dtype, weight_dtype: torch.dtype) -> None:
    """A34: the weight is widened, the result has x's dtype."""
    torch.manual_seed(34)
    x, residual = (torch.randn(5, cols).to(dtype).to(device) for _ in range(2))
    weight, bias = (torch.randn(cols).to(weight_dtype).to(device) for _ in range(2))
    wide = x.double()
    for found, truth, honest in (
        (
            dandan_norm.rms_norm(x, weight),
            F.rms_norm(wide, (cols,), weight.double(), 1e-6),
            F.rms_norm(x.float(), (cols,), weight.float(), 1e-6),
        ),
        (
            dandan_norm.layer_norm(x, weight, bias),
            F.layer_norm(wide, (cols,), weight.double(), bias.double(), 1e-5),
            F.layer_norm(x.float(), (cols,), weight.float(), bias.float(), 1e-5),
        ),
        (
            dandan_norm.residual_rms_norm(x, residual, weight)[0],
            F.rms_norm((x + residual).double(), (cols,), weight.double(), 1e-6),
            F.rms_norm((x + residual).float(), (cols,), weight.float(), 1e-6),
        ),
    ):
        assert_close_to(found, truth, honest.to(dtype), dtype=dtype)
        assert not found.isnan().any()


# --------------------------------------------------------------------------------------------------- residual_rms_norm


@every_device
@pytest.mark.parametrize("cols", [4096, 4099])  # A32: the vector and the scalar path
def test_the_rounded_sum_is_what_is_normalised(device: str, cols: int) -> None:
    torch.manual_seed(32)
    x = torch.randn(512, cols).bfloat16().to(device)
    residual = (30 * torch.randn(512, cols)).bfloat16().to(device)
    normalized, summed = dandan_norm.residual_rms_norm(x, residual)
    exactly(summed, (x.float() + residual.float()).bfloat16())
    assert_bit_equal(normalized, dandan_norm.rms_norm(summed))
    # The other reading, of the unrounded sum, is another function on this input.
    unrounded = x.double() + residual.double()
    other = (unrounded * torch.rsqrt(unrounded.square().mean(-1, keepdim=True) + 1e-6)).bfloat16()
    assert (normalized != other).float().mean() > 0.05


@every_device
@every_dtype
def test_residual_by_hand(device: str, dtype: torch.dtype) -> None:
    x = torch.tensor([[1.0, 2.0]], dtype=dtype, device=device)
    residual = torch.tensor([[2.0, 2.0]], dtype=dtype, device=device)
    normalized, summed = dandan_norm.residual_rms_norm(x, residual, None, 0.5)
    exactly(summed, [[3.0, 4.0]])
    rounded(normalized, [[3 / math.sqrt(13), 4 / math.sqrt(13)]])


# ---------------------------------------------------------------------------------------------------------- layer_norm


@every_device
@pytest.mark.parametrize("mean", [0.0, 100.0, 1000.0, 10000.0])
def test_layer_norm_far_from_zero(device: str, mean: float) -> None:
    """A33: E[x^2] - E[x]^2 would leave nothing of the variance. Numbers: two passes in double precision over the row as
    float32 holds it.
    """
    row = [float(torch.tensor(mean + i * 1e-3, dtype=torch.float32)) for i in range(16)]
    centre = math.fsum(row) / 16
    variance = math.fsum((v - centre) ** 2 for v in row) / 16
    wanted = [(v - centre) / math.sqrt(variance + 1e-5) for v in row]
    reported = {0.0: -1.3416, 100.0: -1.3415, 1000.0: -1.3415, 10000.0: -1.3313}[mean]
    assert round(wanted[0], 4) == reported
    found = dandan_norm.layer_norm(torch.tensor([row], device=device))
    # The mean itself is rounded, by at most half a step of a number of this size, over a deviation of 5.6e-3.
    step = float(rounding_step(torch.tensor(max(mean, 1e-3)), torch.float32))
    torch.testing.assert_close(
        found.double().cpu(), torch.tensor([wanted], dtype=torch.float64), rtol=1e-5, atol=1e-6 + step
    )


@every_device
def test_layer_norm_of_half_integers(device: str) -> None:
    """A33: 2000 to 2007 in float16, all of them exact."""
    x = torch.arange(2000, 2008, device=device).half()[None]
    found = dandan_norm.layer_norm(x)
    half = [-1.5275, -1.0911, -0.6547, -0.2182]
    torch.testing.assert_close(
        found.float().cpu(), torch.tensor([half + [-v for v in reversed(half)]]), rtol=0, atol=1e-3
    )
    assert_bit_equal(found, -found.flip(-1))


@every_device
def test_layer_norm_of_random_rows_around_2000(device: str) -> None:
    """A33: fp32 randn(5, 4) + 2000."""
    torch.manual_seed(33)
    x = (torch.randn(5, 4) + 2000).to(device)
    truth = F.layer_norm(x.double(), (4,), eps=1e-5)
    assert (dandan_norm.layer_norm(x).double() - truth).abs().max() < 1e-5


@every_device
@every_dtype
def test_layer_norm_by_hand(device: str, dtype: torch.dtype) -> None:
    x = torch.tensor([[1.0, 3.0], [7.0, 7.0]], dtype=dtype, device=device)
    weight = torch.tensor([2.0, -1.0], dtype=dtype, device=device)
    bias = torch.tensor([0.5, 4.0], dtype=dtype, device=device)
    # Variance 1 and eps 3 make a root of 2; a constant row leaves the bias.
    exactly(dandan_norm.layer_norm(x, weight, bias, 3.0), [[-0.5, 3.5], [0.5, 4.0]])
    exactly(dandan_norm.layer_norm(x, None, bias, 3.0), [[0.0, 4.5], [0.5, 4.0]])
    exactly(dandan_norm.layer_norm(x[:1], weight, None, 3.0), [[-1.0, -0.5]])
    # A constant row is zero; of which sign is not promised, since a missing bias is a bias of zeros.
    assert (dandan_norm.layer_norm(x[1:], weight, None, 3.0) == 0).all()
    exactly(dandan_norm.layer_norm(x, eps=3.0), [[-0.5, 0.5], [0.0, 0.0]])


# ------------------------------------------------------------------------------------------------------------- softmax


@every_device
@every_dtype
@pytest.mark.parametrize("cols", [1, 2, 3, 17, 31, 32, 33])
@pytest.mark.parametrize("rows", [1, 1000])
@pytest.mark.parametrize("top", [-50.0, -200.0])
def test_softmax_of_rows_far_below_zero(device: str, dtype: torch.dtype, cols: int, rows: int, top: float) -> None:
    """A12: a maximum that starts at 0 would underflow them all."""
    x = (top - torch.arange(cols, dtype=torch.float64)).to(dtype).expand(rows, cols).to(device)
    found = dandan_norm.softmax(x)
    assert not found.isnan().any()
    if cols == 1:
        exactly(found, torch.ones(rows, 1))
    # float16 and bfloat16 round each of the numbers, so their sum is off by half a step of each at most.
    slack = 0.5 * float(rounding_step(found[0].double().cpu(), dtype).sum()) + 1e-6
    assert ((found.double().sum(-1) - 1).abs() <= slack).all()
    values = x[0].double().tolist()
    total = math.fsum(math.exp(v - values[0]) for v in values)
    truth = torch.tensor([math.exp(v - values[0]) / total for v in values], dtype=torch.float64)
    assert_close_to(found, truth.expand(rows, cols), torch.softmax(x, -1), dtype=dtype)


@every_device
@every_dtype
def test_softmax_by_hand(device: str, dtype: torch.dtype) -> None:
    inf, nan = math.inf, math.nan
    x = torch.tensor(
        [
            [0.0, 0.0, 0.0, 0.0],
            [1.0, -inf, 1.0, -inf],
            [-inf, -inf, 5.0, -inf],
            [-inf, -inf, -inf, -inf],
            [0.0, inf, 0.0, 0.0],
            [0.0, nan, 0.0, 0.0],
            [60000.0, 60000.0, -60000.0, -60000.0],
        ],
        dtype=dtype,
        device=device,
    )
    found = dandan_norm.softmax(x)
    for row in (3, 4, 5):
        assert found[row].isnan().all(), row
    exactly(
        found[[0, 1, 2, 6]],
        [[0.25] * 4, [0.5, 0.0, 0.5, 0.0], [0.0, 0.0, 1.0, 0.0], [0.5, 0.5, 0.0, 0.0]],
    )
    thirds = dandan_norm.softmax(torch.tensor([[0.0, math.log(2)]], device=device))
    rounded(thirds, [[1 / 3, 2 / 3]])


# -------------------------------------------------------------------------------------------------------------- argmax


@every_device
@every_dtype
def test_argmax_of_ties(device: str, dtype: torch.dtype) -> None:
    """A36: the lowest index of the maximum, also where another thread holds it."""

    def index(row: Any) -> int:
        x = torch.as_tensor(row).to(dtype).to(device)
        found = dandan_norm.argmax(x)
        assert found.dtype == torch.int64
        assert found.shape == ()
        return int(found)

    assert index([2, 3, 0, 3, 3]) == 1
    assert index([1, 3, 1, 3, 1]) == 1
    row = torch.full((512,), -1.0)
    row[[5, 256]] = 7
    assert index(row) == 5
    wide = torch.zeros(151936)
    wide[[3, 151935]] = 1
    assert index(wide) == 3
    assert index(torch.ones(1000)) == 0
    assert index(torch.full((1000,), -math.inf)) == 0
    assert index([-math.inf, -math.inf, -5.0]) == 2


@every_device
@every_dtype
def test_argmax_of_nan_and_zeros(device: str, dtype: torch.dtype) -> None:
    nan, inf = math.nan, math.inf
    x = torch.tensor(
        [[1, inf, nan, nan], [nan, inf, 0, 0], [-0.0, 0.0, -0.0, 0.0], [0.0, -0.0, 0, 0], [-1, -0.0, 0.0, -2]],
        dtype=dtype,
        device=device,
    )
    exactly(dandan_norm.argmax(x), [2, 0, 0, 0, 1])


# -------------------------------------------------------------------------------------------------------- silu_and_mul


@every_device
@every_dtype
def test_silu_and_mul_by_hand(device: str, dtype: torch.dtype) -> None:
    gate = torch.tensor([[0.0, 1.0, -1.0, 40.0, -40.0, -300.0]], dtype=dtype, device=device)
    up = torch.tensor([[5.0, 2.0, 2.0, 1.0, 1.0, 1.0]], dtype=dtype, device=device)
    found = dandan_norm.silu_and_mul(gate, up)
    e = math.e
    silu = [0.0, 1 / (1 + 1 / e), -1 / (1 + e), 40.0, -40 / (1 + math.exp(40)), -0.0]
    # exp(300) is infinite in float32, which leaves zero and not NaN.
    # CUDA's expf, which stands behind the float32 kernel, is within two steps.
    rounded(found, [[s * u for s, u in zip(silu, (5, 2, 2, 1, 1, 1), strict=True)]], steps=2)
    assert not found.isnan().any()


@every_device
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("half", [3420, 12, 4, 1234, 1])
def test_silu_and_mul_rounds_twice(device: str, dtype: torch.dtype, half: int) -> None:
    """A09: round(round(silu(gate)) * up), for halves of one tensor of which the second starts anywhere."""
    torch.manual_seed(9)
    x = torch.randn(5, 2 * half).to(dtype).to(device)
    gate, up = x.chunk(2, -1)
    found = dandan_norm.silu_and_mul(gate, up)
    wide = gate.double()
    activated = (wide / (1 + (-wide).exp())).to(dtype)
    # Both sides round the activation the same way, except on ties that float32 arithmetic moves.
    expected = (activated.double() * up.double()).to(dtype)
    assert ((found.double() - expected.double()).abs() <= rounding_step(expected.double(), dtype)).all()
    assert (found != expected).float().mean() <= 0.01


# ----------------------------------------------------------------------------------- torch's own functions in float64


@every_dtype
@settings(max_examples=60, deadline=None)
@given(
    rows=st.integers(1, 9), cols=st.integers(1, 700), scale=st.sampled_from([1e-3, 1.0, 50.0]), seed=st.integers(0, 99)
)
def test_reference_against_torch_in_float64(dtype: torch.dtype, rows: int, cols: int, scale: float, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int, by: float = 1.0) -> torch.Tensor:
        return (torch.randn(shape, generator=generator) * by).to(dtype)

    x, other, weight, bias = random(rows, cols, by=scale), random(rows, cols), random(cols), random(cols)
    wide, w, b, shape = x.double(), weight.double(), bias.double(), (cols,)
    narrow = x.float()
    for name, found, truth, honest in (
        (
            "rms_norm",
            dandan_norm.rms_norm(x, weight),
            F.rms_norm(wide, shape, w, 1e-6),
            F.rms_norm(narrow, shape, weight.float(), 1e-6),
        ),
        (
            "layer_norm",
            dandan_norm.layer_norm(x, weight, bias),
            F.layer_norm(wide, shape, w, b, 1e-5),
            F.layer_norm(narrow, shape, weight.float(), bias.float(), 1e-5),
        ),
        ("softmax", dandan_norm.softmax(x), F.softmax(wide, -1), F.softmax(narrow, -1)),
        (
            "silu_and_mul",
            dandan_norm.silu_and_mul(x, other),
            F.silu(wide).to(dtype).double() * other.double(),
            F.silu(x) * other,
        ),
        (
            "residual_rms_norm",
            dandan_norm.residual_rms_norm(x, other, weight)[0],
            F.rms_norm((x + other).double(), shape, w, 1e-6),
            F.rms_norm((x + other).float(), shape, weight.float(), 1e-6),
        ),
    ):
        if cols == 1 and name == "layer_norm":
            exactly(found, bias.expand(rows, 1))  # one number has no spread
            continue
        # An honest composition may be exact where ours rounds once: then half a step and the arithmetic's own error.
        slack = honest.to(dtype).double() + 4e-7 * truth.abs().amax(-1, keepdim=True)
        assert_close_to(found, truth, slack, name, dtype=dtype)
    assert torch.equal(dandan_norm.argmax(x), x.double().argmax(-1))


@pytest.mark.parametrize("op", ["rms_norm", "layer_norm", "softmax", "silu_and_mul"])
def test_float64_of_the_reference_is_torch_in_float64(op: str) -> None:
    """The truth of all other tests."""
    torch.manual_seed(64)
    x, y, weight, bias = torch.randn(4, 300), torch.randn(4, 300), torch.randn(300), torch.randn(300)
    wide = x.double()
    found, truth = {
        "rms_norm": (
            reference.rms_norm(x, weight, compute_dtype=torch.float64),
            F.rms_norm(wide, (300,), weight.double(), 1e-6),
        ),
        "layer_norm": (
            reference.layer_norm(x, weight, bias, compute_dtype=torch.float64),
            F.layer_norm(wide, (300,), weight.double(), bias.double(), 1e-5),
        ),
        "softmax": (reference.softmax(x, compute_dtype=torch.float64), F.softmax(wide, -1)),
        "silu_and_mul": (
            reference.silu_and_mul(x, y, compute_dtype=torch.float64),
            F.silu(wide).float().double() * y.double(),
        ),
    }[op]
    assert found.dtype == torch.float64
    # The activation of silu_and_mul is rounded to float32 on its way, from either side of a tie.
    atol = 1e-6 if op == "silu_and_mul" else 1e-13
    torch.testing.assert_close(found, truth, rtol=0 if op != "silu_and_mul" else 1e-7, atol=atol)


@every_dtype
@pytest.mark.parametrize("cols", [1024, 1025, 1238, 2047, 2048, 2049])
def test_softmax_does_not_depend_on_the_dtype_of_its_caller(dtype: torch.dtype, cols: int) -> None:
    """A54: float32 inside, so a row of numbers that all dtypes hold differs by its last rounding alone."""
    torch.manual_seed(54)
    x = torch.randint(-8, 8, (16, cols)).float() / 2
    assert_bit_equal(dandan_norm.softmax(x.to(dtype)), dandan_norm.softmax(x).to(dtype))


# ------------------------------------------------------------------------------------------------------------ gradients

GRADIENTS = {
    "rms_norm": ("x", "weight"),
    "residual_rms_norm": ("x", "residual", "weight"),
    "layer_norm": ("x", "weight", "bias"),
    "softmax": ("x",),
    "silu_and_mul": ("gate", "up"),
}


def differentiable(op: str, device: str = "cpu", needing: tuple[str, ...] | None = None) -> dict[str, torch.Tensor]:
    torch.manual_seed(51)
    tensors = {}
    for name in GRADIENTS[op]:
        t = torch.randn(40) if name in ("weight", "bias") else torch.randn(3, 40)
        tensors[name] = t.to(device).requires_grad_(needing is None or name in needing)
    return tensors


def torch_function(op: str, **t: torch.Tensor) -> torch.Tensor:
    """The same in torch's own words."""
    if op == "rms_norm":
        return F.rms_norm(t["x"], (40,), t["weight"], 1e-6)
    if op == "layer_norm":
        return F.layer_norm(t["x"], (40,), t["weight"], t["bias"], 1e-5)
    if op == "softmax":
        return F.softmax(t["x"], -1)
    if op == "silu_and_mul":
        return F.silu(t["gate"]) * t["up"]
    summed = t["x"] + t["residual"]
    return torch.cat((F.rms_norm(summed, (40,), t["weight"], 1e-6), summed))


def joined(result: Any) -> torch.Tensor:
    return torch.cat(result) if isinstance(result, tuple) else result


@every_device
@pytest.mark.parametrize("backend", ["auto", "torch"])
@pytest.mark.parametrize("op", GRADIENTS)
def test_gradients_are_torchs_own(op: str, backend: str, device: str) -> None:
    """A51: every argument's gradient; in float32 against torch's functions in float64."""
    tensors = differentiable(op, device)
    upstream = torch.randn(joined(torch_function(op, **tensors)).shape).to(device)
    found = joined(getattr(dandan_norm, op)(**tensors, backend=backend))
    assert found.requires_grad
    grads = torch.autograd.grad(found, list(tensors.values()), upstream)
    wide = {name: t.detach().double().requires_grad_() for name, t in tensors.items()}
    truths = torch.autograd.grad(torch_function(op, **wide), list(wide.values()), upstream.double())
    for name, grad, truth in zip(tensors, grads, truths, strict=True):
        assert truth.abs().max() > 0
        torch.testing.assert_close(grad.double(), truth, rtol=1e-5, atol=1e-5, msg=f"{op}: gradient of {name}")


@every_device
@pytest.mark.parametrize("op", GRADIENTS)
def test_one_argument_that_needs_a_gradient_is_enough(op: str, device: str) -> None:
    for name in GRADIENTS[op]:
        tensors = differentiable(op, device, (name,))
        result = joined(getattr(dandan_norm, op)(**tensors))
        assert result.requires_grad, name
        (grad,) = torch.autograd.grad(result.sum() + result.square().sum(), [tensors[name]])
        assert grad.abs().max() > 0, name
        info = dandan_norm.elementwise_execution_info(op, **tensors)
        assert (info.backend, info.kernel) == ("torch", "torch")
        assert info.reason == "an argument needs a gradient"
        assert info.fallback_reason == "the own kernels compute no gradients"


@every_device
@pytest.mark.parametrize("op", GRADIENTS)
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode], ids=["no_grad", "inference_mode"])
def test_nothing_is_recorded_where_no_gradient_is_wanted(op: str, mode: Any, device: str) -> None:
    """A51: the normal result, which in these modes may also go into `out`."""
    tensors = differentiable(op, device)
    with mode():
        result = getattr(dandan_norm, op)(**tensors)
        info = dandan_norm.elementwise_execution_info(op, **tensors)
        plain = {name: t.detach() for name, t in tensors.items()}
        out = tuple(torch.empty_like(t) for t in result) if isinstance(result, tuple) else torch.empty_like(result)
        assert getattr(dandan_norm, op)(**tensors, out=out) is out
        expected = getattr(dandan_norm, op)(**plain)
    assert not joined(result).requires_grad
    assert_bit_equal(joined(result), joined(expected))
    assert_bit_equal(joined(out), joined(expected))
    assert info.reason != "an argument needs a gradient"


def test_gradcheck_of_the_references() -> None:
    """The formulas themselves, in float64."""
    for op, names in GRADIENTS.items():
        torch.manual_seed(1)
        arguments = [
            (torch.randn(5) if name in ("weight", "bias") else torch.randn(2, 5)).double().requires_grad_()
            for name in names
        ]
        if op in ("silu_and_mul", "residual_rms_norm"):
            continue  # they round to x's dtype on the way through float32, which finite differences see
        function = getattr(reference, op)
        assert torch.autograd.gradcheck(lambda *a, f=function: f(*a, compute_dtype=torch.float64), arguments)


@every_device
def test_argmax_takes_what_needs_a_gradient(device: str) -> None:
    x = torch.randn(3, 40, device=device, requires_grad=True)
    for backend in ("auto", "torch"):
        found = dandan_norm.argmax(x, backend=backend)
        assert not found.requires_grad
        assert torch.equal(found, x.detach().argmax(-1))
        out = torch.empty(3, dtype=torch.int64, device=device)
        assert torch.equal(dandan_norm.argmax(x, out=out, backend=backend), found)
    assert dandan_norm.elementwise_execution_info("argmax", x).reason != "an argument needs a gradient"


# ------------------------------------------------------------------------------------------------------- execution_info


@pytest.mark.parametrize("op", [*GRADIENTS, "argmax"])
def test_execution_info_on_the_cpu(op: str) -> None:
    names = GRADIENTS.get(op, ("x",))
    tensors = {name: torch.randn(40) if name in ("weight", "bias") else torch.randn(3, 40) for name in names}
    reason, fallback = "x is not on a CUDA device", "x is on cpu, the own kernels run on CUDA devices"
    info = dandan_norm.elementwise_execution_info(op, **tensors)
    assert info == ExecutionInfo(op, "torch", "torch", reason, None, fallback, (), "cpu")
    assert info == dandan_norm.elementwise_execution_info(op, *tensors.values())
    asked = dandan_norm.elementwise_execution_info(op, **tensors, backend="torch")
    assert asked == ExecutionInfo(op, "torch", "torch", "asked for", None, None, (), "cpu")
    for backend in ("cuda", "sm80_row"):
        with pytest.raises(BackendUnavailableError, match="x is on cpu, the own kernels run on CUDA devices"):
            dandan_norm.elementwise_execution_info(op, **tensors, backend=backend)
        with pytest.raises(BackendUnavailableError, match="x is on cpu, the own kernels run on CUDA devices"):
            getattr(dandan_norm, op)(**tensors, backend=backend)
    meta = dandan_norm.elementwise_execution_info(op, **{name: t.to("meta") for name, t in tensors.items()})
    assert (meta.backend, meta.device) == ("torch", "meta")


def test_execution_info_computes_nothing() -> None:
    x, out = torch.randn(3, 40), torch.zeros(3, 40)
    dandan_norm.elementwise_execution_info("rms_norm", x, out=out)
    assert not out.any()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((), "missing a required argument: 'x'"),
        ((torch.ones(4), None, 1e-6, 5), "too many positional arguments"),
    ],
)
def test_execution_info_of_a_call_that_is_none(arguments: tuple[Any, ...], words: str) -> None:
    with pytest.raises(TypeError, match=words):
        dandan_norm.elementwise_execution_info("rms_norm", *arguments)
    with pytest.raises(TypeError):
        dandan_norm.rms_norm(*arguments)

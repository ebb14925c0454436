"""QuantizedLinear: construction, state_dict and loading, casts, copies, shards, torch.compile after each of them."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from module_cases import WAYS, assert_compiles, assert_same, blank
from w4a16_cases import K, N, check, generator, module, random_weight, tensors, truth, weight_of, whole_x

from dandan_ops_core.backend import BackendUnavailableError
from dandan_ops_core.testing import assert_bit_equal
from dandan_w4a16 import Int4Weight, QuantizedLinear, quantize_int4

PACKED = ("qweight", "scales", "zeros")


# ------------------------------------------------------------------------------------------------------ construction


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("group", [32, 64, 128])
def test_from_float(dtype: torch.dtype, group: int) -> None:
    weight = torch.randn(N, K, generator=generator(2)).to(dtype)
    bias = torch.randn(N, generator=generator(3)).to(dtype)
    made = QuantizedLinear.from_float(weight, group, bias)
    expected = quantize_int4(weight, group)
    for mine, theirs in zip(tensors(made.weight_int4), tensors(expected), strict=True):
        assert_bit_equal(mine, theirs)
    assert (made.in_features, made.out_features, made.group_size) == (K, N, group)
    for activation in (torch.float16, torch.bfloat16):
        x = torch.randn(3, K, generator=generator(4)).to(activation)
        check(made(x), x, expected, bias)


def test_from_packed_keeps_the_tensors() -> None:
    weight = random_weight(N, K)
    made = QuantizedLinear.from_packed(weight)
    for name in PACKED:
        assert getattr(made, name).data_ptr() == getattr(weight, name).data_ptr()
    assert made.finalize() is made
    assert made.bias is None


@pytest.mark.parametrize(
    ("weight", "bias", "error", "text"),
    [
        (torch.zeros(2, 64), None, TypeError, "weight is Tensor; an Int4Weight is needed"),
        (random_weight(2, 64), [1.0, 2.0], TypeError, "bias is list; a tensor is needed"),
        (
            random_weight(2, 64),
            torch.zeros(2).int(),
            TypeError,
            "bias has dtype int32; float16, bfloat16 and float32 are supported",
        ),
        (random_weight(2, 64), torch.zeros(3), ValueError, "bias has shape [3]; [2] is needed"),
        (random_weight(2, 64), torch.zeros(2, device="meta"), ValueError, "bias is on meta but weight is on cpu"),
        (
            Int4Weight(
                torch.zeros(2, 8, dtype=torch.int32),
                torch.full((2, 1), torch.nan),
                torch.zeros(2, 1, dtype=torch.uint8),
            ),
            None,
            ValueError,
            "scales hold 2 NaN or infinite values; finite ones are needed",
        ),
        (
            Int4Weight(
                torch.zeros(2, 8, dtype=torch.int32), torch.ones(2, 1), torch.full((2, 1), 200, dtype=torch.uint8)
            ),
            None,
            ValueError,
            "zeros hold 200; 0 to 15 is needed",
        ),
    ],
)
def test_from_packed_refuses(weight: Int4Weight, bias: torch.Tensor, error: type[Exception], text: str) -> None:
    with pytest.raises(error) as raised:
        QuantizedLinear.from_packed(weight, bias)
    assert str(raised.value) == f"QuantizedLinear.from_packed: {text}"


def test_a_new_module() -> None:
    made = blank()
    assert (made(whole_x()) == 0).all()
    assert made.bias is not None
    assert not made.bias.requires_grad
    assert sorted(made.state_dict()) == ["bias", "qweight", "scales", "zeros"]
    assert repr(made) == (
        "QuantizedLinear(in_features=256, out_features=24, bias=True, group_size=64, zero_mode='integer', "
        "scales=float16)"
    )
    with pytest.raises(ValueError, match="^QuantizedLinear: in_features is 100; a multiple of group_size=64 is needed"):
        QuantizedLinear(100, 8)
    with pytest.raises(ValueError, match="^QuantizedLinear: group_size is 16; 32, 64 or 128 is needed"):
        QuantizedLinear(128, 8, group_size=16)


def test_execution_info() -> None:
    made = module()
    assert made.execution_info(whole_x()).kernel == "torch"
    for call in (made, made.execution_info):
        with pytest.raises(BackendUnavailableError, match='^w4a16_linear: backend "cuda" cannot run: '):
            call(whole_x(), backend="cuda")


def test_gradients_reach_the_layer_below() -> None:
    made, x = module(), whole_x().requires_grad_()
    made(x).sum().backward()
    expected = weight_of(made.weight_int4, torch.float16).double().sum(0).expand(5, K)
    assert_bit_equal(x.grad, expected.half().contiguous())  # type: ignore[arg-type]


# ----------------------------------------------------------------------------------------------------------- copies


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("zero_mode", ["integer", "float"])
@pytest.mark.parametrize("bias", [False, True])
def test_every_way_to_another_module(way: str, zero_mode: str, bias: bool) -> None:
    """Bit for bit the same weight, the same product, and torch.compile takes it."""
    wanted = module(bias=bias, zero_mode=zero_mode, scale_dtype=torch.float32)
    found = WAYS[way](copy.deepcopy(wanted))
    assert isinstance(found, QuantizedLinear)
    assert_same(found, wanted)
    assert list(found.state_dict()) == list(wanted.state_dict())
    assert_compiles(found)


@pytest.mark.parametrize("cast", ["half", "bfloat16", "float", "double"])
def test_casts_change_the_bias_alone(cast: str) -> None:
    made = torch.nn.Sequential(module(scale_dtype=torch.float32), torch.nn.Linear(N, 2))
    before = {name: getattr(made[0], name) for name in PACKED}
    getattr(made, cast)()
    dtype = {"half": torch.float16, "float": torch.float32}.get(cast, getattr(torch, cast))
    assert made[1].weight.dtype == made[0].bias.dtype == dtype
    for name, value in before.items():
        assert_bit_equal(getattr(made[0], name), value)


def test_an_inner_module_goes_to_meta_and_keeps_its_dtypes() -> None:
    made = torch.nn.Sequential(module(zero_mode="float", scale_dtype=torch.bfloat16)).to("meta", torch.float32)[0]
    assert {made.qweight.device.type, made.scales.device.type, made.bias.device.type} == {"meta"}
    assert (made.qweight.dtype, made.scales.dtype, made.zeros.dtype) == (torch.int32, torch.bfloat16, torch.bfloat16)
    assert made(torch.empty(3, K, dtype=torch.float16, device="meta")).shape == (3, N)


def test_meta_init_allocates_nothing() -> None:
    made = QuantizedLinear(65536, 65536, device="meta")
    assert made.qweight.shape == (65536, 8192)
    assert all(t.is_meta for t in made.state_dict().values())


def test_both_activation_dtypes_without_a_cast() -> None:
    made = module()
    for dtype in (torch.float16, torch.bfloat16):
        x = whole_x(dtype)
        assert_bit_equal(made(x), truth(x, made.weight_int4, made.bias).to(dtype))


# ---------------------------------------------------------------------------------------------------------- loading


@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("scale_dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_loading_keeps_the_dtype_of_the_scales(assign: bool, scale_dtype: torch.dtype) -> None:
    wanted = QuantizedLinear.from_packed(random_weight(N, K, scale_dtype=scale_dtype))
    found = blank(bias=False, scale_dtype=torch.float16)
    found.load_state_dict(wanted.state_dict(), assign=assign)
    assert_bit_equal(found.scales, wanted.scales)


def test_loading_without_assign_copies_and_with_assign_keeps() -> None:
    wanted, copied, kept = module(), blank(), blank(device="meta")
    copied.load_state_dict(wanted.state_dict())
    kept.load_state_dict(wanted.state_dict(), assign=True)
    for name in PACKED:
        assert getattr(copied, name).data_ptr() != getattr(wanted, name).data_ptr()
        assert getattr(kept, name).data_ptr() == getattr(wanted, name).data_ptr()


BAD_STATES: dict[str, tuple[dict[str, torch.Tensor], str]] = {
    "qweight of int64": (
        {"qweight": torch.zeros(N, K // 8, dtype=torch.int64)},
        "layer.qweight has dtype int64; int32 is needed",
    ),
    "scales of int32": (
        {"scales": torch.ones(N, K // 64, dtype=torch.int32)},
        "layer.scales has dtype int32; float16, bfloat16 and float32 are supported",
    ),
    "float zeros": (
        {"zeros": torch.ones(N, K // 64)},
        "zeros have dtype float32; zero_mode='integer' needs uint8; zero_mode='float' keeps them as they are",
    ),
    "zeros above 15": (
        {"zeros": torch.full((N, K // 64), 16, dtype=torch.uint8)},
        "zeros hold 16; 0 to 15 is needed",
    ),
    "NaN in scales": (
        {"scales": torch.full((N, K // 64), torch.nan)},
        f"scales hold {N * K // 64} NaN or infinite values; finite ones are needed",
    ),
}


@pytest.mark.parametrize("case", BAD_STATES)
@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("strict", [False, True])
def test_loading_refuses_what_is_not_the_format(case: str, assign: bool, strict: bool) -> None:
    """And leaves the module as it was."""
    changes, text = BAD_STATES[case]
    model, before = torch.nn.Sequential(), module()
    model.add_module("layer", copy.deepcopy(before))
    state = {f"layer.{name}": value for name, value in {**before.state_dict(), **changes}.items()}
    with pytest.raises(RuntimeError) as raised:
        model.load_state_dict(state, strict=strict, assign=assign)
    assert f"QuantizedLinear.load_state_dict: {text}" in str(raised.value)
    assert_same(model.layer, before)


def test_loading_another_size_is_refused_by_torch() -> None:
    state = QuantizedLinear.from_packed(random_weight(N, K, 32)).state_dict()
    with pytest.raises(RuntimeError, match="size mismatch for scales"):
        blank(bias=False).load_state_dict(state)
    with pytest.raises(RuntimeError, match="Missing key"):
        blank(bias=False).load_state_dict({})


def test_safetensors_round_trip(tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors.torch", reason="safetensors is not installed")
    wanted = module(scale_dtype=torch.bfloat16)
    safetensors.save_file(wanted.state_dict(), tmp_path / "model.safetensors")
    found = blank(device="meta")
    found.load_state_dict(safetensors.load_file(tmp_path / "model.safetensors"), assign=True)
    assert_same(found, wanted)


def test_a_model_of_transformers(tmp_path: Path) -> None:
    """Its loader converts to the dtype that the module declares, so `scale_dtype` has to be the checkpoint's."""
    transformers = pytest.importorskip("transformers", reason="transformers is not installed", exc_type=ImportError)

    class Config(transformers.PretrainedConfig):  # type: ignore[name-defined, misc]
        model_type = "dandan_test"

    class Model(transformers.PreTrainedModel):  # type: ignore[name-defined, misc]
        config_class = Config

        def __init__(self, config: Config) -> None:
            super().__init__(config)
            self.layer = blank(scale_dtype=torch.bfloat16)
            self.post_init()

        def _init_weights(self, module: torch.nn.Module) -> None:
            pass

    model = Model(Config())
    model.layer = module(scale_dtype=torch.bfloat16)
    model.save_pretrained(tmp_path)
    for dtype in ("auto", torch.float16, torch.float32):
        found = Model.from_pretrained(tmp_path, dtype=dtype)
        assert_same(found.layer, model.layer)
        assert_compiles(found.layer)

"""The compiled library under a torch without a GPU: its schemas, kernels, routes and fakes against what Python says."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from attention_cases import KERNELS, dense, packed, raw
from torch._subclasses.fake_tensor import FakeTensorMode

from dandan_attention._ops import LIBRARY
from dandan_ops_core import PLUGIN_API
from dandan_ops_core.backend import BackendUnavailableError
from dandan_ops_core.records import kernel_fingerprint

pytestmark = pytest.mark.library

CSRC = Path(__file__).resolve().parents[1] / "csrc"
CALLS = {
    "flash_attention": dense(2, (8, 2), 128, 128, 128, torch.bfloat16, causal=True),
    "flash_attention_varlen": packed([100, 28], None, (8, 2), 128, torch.bfloat16, causal=True),
}
EVERY_CALL = pytest.mark.parametrize("name", CALLS)


def schemas() -> list[str]:
    return [*LIBRARY.COMMON, *(schema for operator in LIBRARY.operators.values() for schema in operator.schemas())]


@pytest.mark.parametrize("schema", schemas(), ids=lambda schema: schema.split("(")[0])
def test_schema_is_the_one_that_python_defines_without_the_library(schema: str) -> None:
    assert str(LIBRARY.op(schema.split("(")[0])._schema) == f"dandan_attention::{schema}"


@pytest.mark.parametrize("schema", schemas(), ids=lambda schema: schema.split("(")[0])
def test_the_compiled_kernel_is_registered(schema: str) -> None:
    """Not only its schema: a library that registers nothing for CUDA would pass every CPU test."""
    name = schema.split("(")[0]
    launches = name in LIBRARY.operators or (name.endswith("_out") and name.removesuffix("_out") in LIBRARY.operators)
    key = "CUDA" if launches else "CompositeExplicitAutograd"
    assert torch._C._dispatch_has_kernel_for_dispatch_key(f"dandan_attention::{name}", key)


def test_description() -> None:
    described, info = LIBRARY.describe(), LIBRARY.library.build_info
    assert described["plugin_api"] == info["plugin_api"] == PLUGIN_API
    assert described["backends"] == ["auto", "torch", "cuda", *KERNELS]
    assert described["sass"].split(",") == [name.replace(".", "") for name in info["architectures"]]
    assert [each for each in described["ptx"].split(",") if each] == [name.replace(".", "") for name in info["ptx"]]
    assert set(info["fingerprints"]) == {path.stem for path in CSRC.glob("*.cu")}


def test_every_kernel_has_a_fingerprint() -> None:
    fingerprints = LIBRARY.library.build_info["fingerprints"]
    for kernel in KERNELS:
        assert kernel_fingerprint(fingerprints, kernel) is not None
    assert all(any(stem.startswith(f"{kernel}_") for kernel in KERNELS) for stem in fingerprints)


@EVERY_CALL
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("arch", [90, 80, 120])
def test_routes_without_a_gpu(name: str, kernel: str, arch: int) -> None:
    """sm80_mma runs anywhere from 8.0; sm90a_wgmma on 9.0 alone, and elsewhere says what can run."""
    call = CALLS[name]
    built = LIBRARY.library.build_info["architectures"]
    try:
        found = LIBRARY.info(name, raw(call)[:-1], (None,), kernel, arch=arch)
    except BackendUnavailableError as error:
        refusal = str(error)
    else:
        assert kernel != "sm90a_wgmma" or arch == 90
        assert (found["backend"], found["kernel"], found["copies"]) == ("cuda", kernel, [])
        return
    runs = kernel == "sm80_mma" or arch == 90
    assert not runs or not any(each.startswith(f"{arch / 10:.1f}") for each in built), refusal
    assert refusal.startswith(f"{name}: ")
    assert kernel in refusal
    assert "can" in refusal


@pytest.mark.parametrize("head_dim", [40, 80, 96, 192, 512])
def test_other_head_dims_take_torch_and_are_refused_by_name(head_dim: int) -> None:
    call = dense(2, (8, 2), 16, 16, head_dim, torch.bfloat16, causal=True)
    found = LIBRARY.info("flash_attention", raw(call)[:-1], (None,), "auto", arch=90)
    assert (found["backend"], found["kernel"]) == ("torch", "torch")
    assert str(head_dim) in found["fallback_reason"]
    for backend in ("cuda", *KERNELS):
        with pytest.raises(BackendUnavailableError, match=rf'^flash_attention: backend "{backend}" .*{head_dim}.* can'):
            LIBRARY.info("flash_attention", raw(call)[:-1], (None,), backend, arch=90)


@EVERY_CALL
def test_fakes_have_the_strides_of_the_real_results(name: str) -> None:
    call = CALLS[name]
    for form in ("", "_lse"):
        op = LIBRARY.op(name + form)
        real = op(*raw(call))
        with FakeTensorMode() as mode:
            fake = op(*(mode.from_tensor(t) if isinstance(t, torch.Tensor) else t for t in raw(call)))
        for mine, theirs in zip(*(each if form else (each,) for each in (real, fake)), strict=True):
            assert (mine.shape, mine.stride(), mine.dtype) == (theirs.shape, theirs.stride(), theirs.dtype)

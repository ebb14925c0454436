"""The compiled library under a torch without a GPU: its schemas, kernels, routes and fakes against what Python says."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from attention_cases import KERNELS, dense, packed, raw

from dandan_attention._ops import LIBRARY
from dandan_ops_core.backend import BackendUnavailableError
from dandan_ops_core.records import kernel_fingerprint
from dandan_ops_core.testing import library

pytestmark = pytest.mark.library

CSRC = Path(__file__).resolve().parents[1] / "csrc"
CALLS = {
    "flash_attention": dense(2, (8, 2), 128, 128, 128, torch.bfloat16, causal=True),
    "flash_attention_varlen": packed([100, 28], None, (8, 2), 128, torch.bfloat16, causal=True),
}
EVERY_CALL = pytest.mark.parametrize("name", CALLS)


EVERY_SCHEMA = pytest.mark.parametrize("schema", library.schemas(LIBRARY), ids=library.name_of)


@EVERY_SCHEMA
def test_schema_is_the_one_that_python_defines_without_the_library(schema: str) -> None:
    library.check_schema(LIBRARY, schema)


@EVERY_SCHEMA
def test_the_compiled_kernel_is_registered(schema: str) -> None:
    name = library.name_of(schema)
    launches = name in LIBRARY.operators or (name.endswith("_out") and name.removesuffix("_out") in LIBRARY.operators)
    library.check_registered(LIBRARY, name, launches=launches)


def test_description() -> None:
    library.check_description(LIBRARY, CSRC)


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
    built = LIBRARY.library.build_info["architectures"]
    found = library.answer_or_refusal(LIBRARY, name, raw(CALLS[name])[:-1], kernel, arch)
    runs = kernel == "sm80_mma" or arch == 90
    if isinstance(found, str):
        assert not runs or not any(each.startswith(f"{arch / 10:.1f}") for each in built), found
    else:
        assert runs
        assert found["copies"] == []


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
        fake = library.fake_result(op, raw(call))
        for mine, theirs in zip(*(each if form else (each,) for each in (real, fake)), strict=True):
            assert (mine.shape, mine.stride(), mine.dtype) == (theirs.shape, theirs.stride(), theirs.dtype)

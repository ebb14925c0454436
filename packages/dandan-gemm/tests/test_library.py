"""The compiled library under a torch without a GPU: its schemas, kernels, routes and fakes against what Python says."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from dandan_gemm._ops import KERNELS, LIBRARY, MEASURING, run_tile
from dandan_ops_core import PLUGIN_API
from dandan_ops_core.backend import BackendUnavailableError
from dandan_ops_core.records import kernel_fingerprint

pytestmark = pytest.mark.library

CSRC = Path(__file__).resolve().parents[1] / "csrc"
A = torch.zeros(8, 4096, dtype=torch.bfloat16)
B = torch.zeros(1024, 4096, dtype=torch.bfloat16)


def schemas() -> list[str]:
    return [*LIBRARY.COMMON, *LIBRARY.operators["gemm"].schemas(), *MEASURING]


@pytest.mark.parametrize("schema", schemas(), ids=lambda schema: schema.split("(")[0])
def test_schema_is_the_one_that_python_defines_without_the_library(schema: str) -> None:
    assert str(LIBRARY.op(schema.split("(")[0])._schema) == f"dandan_gemm::{schema}"


@pytest.mark.parametrize("schema", schemas(), ids=lambda schema: schema.split("(")[0])
def test_the_compiled_kernel_is_registered(schema: str) -> None:
    """Not only its schema: a library that registers nothing for CUDA would pass every CPU test."""
    name = schema.split("(")[0]
    key = "CUDA" if name in ("gemm", "gemm_out", "gemm_tile_out") else "CompositeExplicitAutograd"
    assert torch._C._dispatch_has_kernel_for_dispatch_key(f"dandan_gemm::{name}", key)


def test_description() -> None:
    described, info = LIBRARY.describe(), LIBRARY.library.build_info
    assert described["plugin_api"] == info["plugin_api"] == PLUGIN_API
    assert described["backends"] == ["auto", "torch", "cuda", *KERNELS]
    assert described["sass"].split(",") == [name.replace(".", "") for name in info["architectures"]]
    assert [each for each in described["ptx"].split(",") if each] == [name.replace(".", "") for name in info["ptx"]]
    assert set(info["fingerprints"]) == {path.stem for path in CSRC.glob("*.cu")}


def test_every_kernel_is_a_file_and_back() -> None:
    assert {path.stem for path in CSRC.glob("*.cu")} == {f"{kernel}_gemm" for kernel in KERNELS}
    fingerprints = LIBRARY.library.build_info["fingerprints"]
    for kernel in KERNELS:
        assert kernel_fingerprint(fingerprints, kernel) == fingerprints[f"{kernel}_gemm"]


@pytest.mark.parametrize("kernel", KERNELS)
def test_routes_without_a_gpu(kernel: str) -> None:
    """Asked for an H200, each kernel either takes the call under its own name or says that it cannot and what can."""
    try:
        found = LIBRARY.info("gemm", (A, B, None, True, False), (None,), kernel, arch=90)
    except BackendUnavailableError as error:
        refusal = str(error)
    else:
        assert (found["backend"], found["kernel"]) == ("cuda", kernel)
        assert found["config"] in {each["name"] for each in LIBRARY.describe()["configs"][kernel]}
        return
    assert kernel in refusal
    assert "can" in refusal


def test_a_tile_cannot_be_run_on_the_cpu() -> None:
    with pytest.raises(NotImplementedError, match="gemm_tile_out"):
        run_tile(A, B, kernel="sm80_mma", config=0, weight_transposed=True)
    with pytest.raises(ValueError, match=r"^gemm: skinny has no configuration 'r5'; it is one of "):
        run_tile(A, B, kernel="skinny", config="r5", weight_transposed=True)


@pytest.mark.parametrize("transposed", [False, True], ids=["[K, N]", "[N, K]"])
@pytest.mark.parametrize("shape", [(4, 64), (64,), (2, 3, 64), (0, 64), (4, 0)], ids=str)
def test_fake_has_the_strides_of_the_real_result(shape: tuple[int, ...], transposed: bool) -> None:
    a = torch.ones(shape).half()
    b = torch.ones((24, shape[-1]) if transposed else (shape[-1], 24)).half()
    op = LIBRARY.op("gemm")
    real = op(a, b, None, transposed, False, 0)
    with FakeTensorMode() as mode:
        fake = op(mode.from_tensor(a), mode.from_tensor(b), None, transposed, False, 0)
    assert real.shape == fake.shape == (*shape[:-1], 24)
    assert real.stride() == fake.stride() == torch.empty(real.shape).stride()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_opcheck_of_schema_and_fake(dtype: torch.dtype) -> None:
    """The kernels' own opcheck runs on the GPU; here the CPU kernel answers for schema and fake."""
    arguments = (torch.randn(3, 64).to(dtype), torch.randn(24, 64).to(dtype), torch.randn(24).to(dtype), True, False, 0)
    torch.library.opcheck(LIBRARY.op("gemm"), arguments, test_utils=("test_schema", "test_faketensor"))

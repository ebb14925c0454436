"""The compiled library under a torch without a GPU: its schemas, kernels, routes and fakes against what Python says."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from dandan_gemm._ops import KERNELS, LIBRARY, MEASURING, run_tile
from dandan_ops_core.testing import library

pytestmark = pytest.mark.library

CSRC = Path(__file__).resolve().parents[1] / "csrc"
A = torch.zeros(8, 4096, dtype=torch.bfloat16)
B = torch.zeros(1024, 4096, dtype=torch.bfloat16)


EVERY_SCHEMA = pytest.mark.parametrize("schema", library.schemas(LIBRARY, MEASURING), ids=library.name_of)


@EVERY_SCHEMA
def test_schema_is_the_one_that_python_defines_without_the_library(schema: str) -> None:
    library.check_schema(LIBRARY, schema)


@EVERY_SCHEMA
def test_the_compiled_kernel_is_registered(schema: str) -> None:
    name = library.name_of(schema)
    library.check_registered(LIBRARY, name, launches=name in ("gemm", "gemm_out", "gemm_tile_out"))


def test_description() -> None:
    library.check_description(LIBRARY, CSRC)


def test_every_kernel_is_a_file_and_back() -> None:
    library.check_kernel_files(LIBRARY, CSRC, suffix="_gemm")


@pytest.mark.parametrize("kernel", KERNELS)
def test_routes_without_a_gpu(kernel: str) -> None:
    library.check_route(LIBRARY, "gemm", (A, B, None, True, False), kernel)


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
    arguments = (a, b, None, transposed, False, 0)
    real, fake = LIBRARY.op("gemm")(*arguments), library.fake_result(LIBRARY.op("gemm"), arguments)
    assert real.shape == fake.shape == (*shape[:-1], 24)
    assert real.stride() == fake.stride() == torch.empty(real.shape).stride()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_opcheck_of_schema_and_fake(dtype: torch.dtype) -> None:
    """The kernels' own opcheck runs on the GPU; here the CPU kernel answers for schema and fake."""
    arguments = (torch.randn(3, 64).to(dtype), torch.randn(24, 64).to(dtype), torch.randn(24).to(dtype), True, False, 0)
    torch.library.opcheck(LIBRARY.op("gemm"), arguments, test_utils=("test_schema", "test_faketensor"))

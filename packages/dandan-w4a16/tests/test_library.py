"""The compiled library under a torch without a GPU: its schemas, kernels, routes and fakes against what Python says."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from w4a16_cases import random_weight, tensors

from dandan_ops_core.backend import BackendUnavailableError
from dandan_ops_core.testing import library
from dandan_w4a16._ops import KERNELS, LIBRARY, MEASURING, ORDERING
from dandan_w4a16.packed import packed_linear, run_tile

pytestmark = pytest.mark.library

CSRC = Path(__file__).resolve().parents[1] / "csrc"
WEIGHT = random_weight(200, 512)
ORDERED = LIBRARY.op("repack")(*tensors(WEIGHT), 64)
X = torch.zeros(8, 512).half()
CALLS = {
    "w4a16_linear": (X, *tensors(WEIGHT), None, 64),
    "packed_linear": (X, *ORDERED, None, 200, 512, 64),
}


EVERY_SCHEMA = pytest.mark.parametrize("schema", library.schemas(LIBRARY, MEASURING, ORDERING), ids=library.name_of)


@EVERY_SCHEMA
def test_schema_is_the_one_that_python_defines_without_the_library(schema: str) -> None:
    library.check_schema(LIBRARY, schema)


@EVERY_SCHEMA
def test_the_compiled_kernel_is_registered(schema: str) -> None:
    name = library.name_of(schema)
    asked = name.endswith(("_info", "_candidates")) or schema in LIBRARY.COMMON
    library.check_registered(LIBRARY, name, launches=not asked)


def test_description() -> None:
    library.check_description(LIBRARY, CSRC)


def test_every_kernel_is_a_file_and_back() -> None:
    """Beside them the one that no backend is called after: it puts a weight in order."""
    library.check_kernel_files(LIBRARY, CSRC, suffix="_w4a16", besides=["sm80_repack"])


@pytest.mark.parametrize("op", CALLS)
@pytest.mark.parametrize("kernel", KERNELS)
def test_routes_without_a_gpu(op: str, kernel: str) -> None:
    library.check_route(LIBRARY, op, CALLS[op], kernel)


def test_a_tile_cannot_be_run_on_the_cpu() -> None:
    with pytest.raises(NotImplementedError, match="packed_tile_out"):
        run_tile(*CALLS["packed_linear"], kernel="sm80_decode", config=0)
    with pytest.raises(ValueError, match=r"^packed_linear: sm80_decode has no configuration 'r5'; it is one of "):
        run_tile(*CALLS["packed_linear"], kernel="sm80_decode", config="r5")


def test_kernels_are_refused_on_the_cpu() -> None:
    for kernel in ("cuda", *KERNELS):
        with pytest.raises(BackendUnavailableError) as raised:
            packed_linear(*CALLS["packed_linear"], backend=kernel)
        assert str(raised.value) == (
            f'packed_linear: backend "{kernel}" cannot run: x is on cpu, the own kernels run on CUDA devices; "auto" '
            'and "torch" can'
        )


@pytest.mark.parametrize("op", CALLS)
@pytest.mark.parametrize("shape", [(4, 512), (512,), (2, 3, 512), (0, 512)], ids=str)
def test_fake_has_the_strides_of_the_real_result(op: str, shape: tuple[int, ...]) -> None:
    arguments = (torch.ones(shape).half(), *CALLS[op][1:], 0)
    real, fake = LIBRARY.op(op)(*arguments), library.fake_result(LIBRARY.op(op), arguments)
    assert real.shape == fake.shape == (*shape[:-1], 200)
    assert real.stride() == fake.stride() == torch.empty(real.shape).stride()

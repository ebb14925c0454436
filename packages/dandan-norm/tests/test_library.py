"""The compiled library under a torch without a GPU: its schemas, kernels, routes and fakes against what Python says."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from dandan_norm._ops import KERNELS, LIBRARY
from dandan_ops_core.testing import library

pytestmark = pytest.mark.library

CSRC = Path(__file__).resolve().parents[1] / "csrc"
EXTRA = {
    "rms_norm": (None, 1e-6),
    "residual_rms_norm": (None, 1e-6),
    "layer_norm": (None, None, 1e-5),
    "softmax": (),
    "silu_and_mul": (),
    "argmax": (),
}
TENSORS = {name: 2 if name in ("residual_rms_norm", "silu_and_mul") else 1 for name in EXTRA}


def arguments(name: str, make: Callable[[], torch.Tensor]) -> tuple[object, ...]:
    return (*(make() for _ in range(TENSORS[name])), *EXTRA[name])


EVERY_SCHEMA = pytest.mark.parametrize("schema", library.schemas(LIBRARY), ids=library.name_of)


def test_every_operator_is_in_these_tables() -> None:
    assert set(EXTRA) == set(LIBRARY.operators)


@EVERY_SCHEMA
def test_schema_is_the_one_that_python_defines_without_the_library(schema: str) -> None:
    library.check_schema(LIBRARY, schema)


@EVERY_SCHEMA
def test_the_compiled_kernel_is_registered(schema: str) -> None:
    name = library.name_of(schema)
    library.check_registered(LIBRARY, name, launches=name.removesuffix("_out") in LIBRARY.operators)


def test_description() -> None:
    library.check_description(LIBRARY, CSRC)


def test_every_kernel_file_is_a_kernel_name_and_back() -> None:
    library.check_kernel_files(LIBRARY, CSRC)


@pytest.mark.parametrize("name", sorted(EXTRA))
@pytest.mark.parametrize("kernel", KERNELS)
def test_routes_without_a_gpu(name: str, kernel: str) -> None:
    library.check_route(LIBRARY, name, arguments(name, lambda: torch.zeros(8, 4096, dtype=torch.bfloat16)), kernel)


@pytest.mark.parametrize("name", sorted(EXTRA))
def test_auto_on_a_measured_architecture_is_an_own_kernel(name: str) -> None:
    inputs = arguments(name, lambda: torch.zeros(8, 4096, dtype=torch.bfloat16))
    outputs = (None,) * len(LIBRARY.operators[name].outputs)
    found = LIBRARY.info(name, inputs, outputs, "auto", arch=90)
    assert found["kernel"] in KERNELS
    assert found["reason"]


# What a caller may pass -> the strides of every output: always contiguous, in the shape of the input.
LAYOUTS: dict[str, tuple[Callable[[], torch.Tensor], tuple[int, ...]]] = {
    "rows": (lambda: torch.randn(4, 64), (64, 1)),
    "one row": (lambda: torch.randn(64), (1,)),
    "leading dimensions": (lambda: torch.randn(2, 3, 64), (192, 64, 1)),
    "half of a wider tensor": (lambda: torch.randn(4, 128)[:, 64:], (64, 1)),
    "expanded": (lambda: torch.randn(1, 64).expand(4, 64), (64, 1)),
    "transposed": (lambda: torch.randn(64, 4).t(), (64, 1)),
    "odd width and offset": (lambda: torch.randn(4, 66)[1:, 1:64], (63, 1)),
    "no rows": (lambda: torch.randn(0, 64), (64, 1)),
}


@pytest.mark.parametrize("name", sorted(EXTRA))
@pytest.mark.parametrize("layout", LAYOUTS)
def test_fake_has_the_strides_of_the_table_and_of_the_real_result(name: str, layout: str) -> None:
    make, strides = LAYOUTS[layout]
    op = LIBRARY.op(name)
    inputs = arguments(name, make)
    real = op(*inputs, 0)
    fake = library.fake_result(op, (*inputs, 0))
    expected = strides
    if name == "argmax":  # the last dimension is gone: the other strides are divided by its length
        expected = torch.empty(make().shape[:-1]).stride()
    for result in (real, fake):
        for output in result if isinstance(result, tuple) else (result,):
            assert output.stride() == expected
    shapes = [[tuple(each.shape) for each in (out if isinstance(out, tuple) else (out,))] for out in (real, fake)]
    assert shapes[0] == shapes[1]


@pytest.mark.parametrize("name", sorted(EXTRA))
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_opcheck_of_schema_and_fake(name: str, dtype: torch.dtype) -> None:
    """The kernels' own opcheck runs on the GPU; here the CPU kernel answers for schema and fake."""
    inputs = arguments(name, lambda: torch.randn(3, 64).to(dtype))
    torch.library.opcheck(LIBRARY.op(name), (*inputs, 0), test_utils=("test_schema", "test_faketensor"))

"""The compiled library under a torch without a GPU: its schemas, kernels, routes and fakes against what Python says."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from w4a16_cases import random_weight, tensors

from dandan_ops_core import PLUGIN_API
from dandan_ops_core.backend import BackendUnavailableError
from dandan_ops_core.records import kernel_fingerprint
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


def schemas() -> list[str]:
    operators = [schema for operator in LIBRARY.operators.values() for schema in operator.schemas()]
    return [*LIBRARY.COMMON, *operators, *MEASURING, *ORDERING]


@pytest.mark.parametrize("schema", schemas(), ids=lambda schema: schema.split("(")[0])
def test_schema_is_the_one_that_python_defines_without_the_library(schema: str) -> None:
    assert str(LIBRARY.op(schema.split("(")[0])._schema) == f"dandan_w4a16::{schema}"


@pytest.mark.parametrize("schema", schemas(), ids=lambda schema: schema.split("(")[0])
def test_the_compiled_kernel_is_registered(schema: str) -> None:
    """Not only its schema: a library that registers nothing for CUDA would pass every CPU test."""
    name = schema.split("(")[0]
    asked = name.endswith(("_info", "_candidates")) or schema in LIBRARY.COMMON
    key = "CompositeExplicitAutograd" if asked else "CUDA"
    assert torch._C._dispatch_has_kernel_for_dispatch_key(f"dandan_w4a16::{name}", key)


def test_description() -> None:
    described, info = LIBRARY.describe(), LIBRARY.library.build_info
    assert described["plugin_api"] == info["plugin_api"] == PLUGIN_API
    assert described["backends"] == ["auto", "torch", "cuda", *KERNELS]
    assert described["sass"].split(",") == [name.replace(".", "") for name in info["architectures"]]
    assert [each for each in described["ptx"].split(",") if each] == [name.replace(".", "") for name in info["ptx"]]
    assert set(info["fingerprints"]) == {path.stem for path in CSRC.glob("*.cu")}


def test_every_kernel_is_a_file_and_back() -> None:
    """Beside them the one that no backend is called after: it puts a weight in order."""
    files = {path.stem.removesuffix("_w4a16") for path in CSRC.glob("*.cu")}
    assert files == {*KERNELS, "sm80_repack"}
    fingerprints = LIBRARY.library.build_info["fingerprints"]
    for kernel in KERNELS:
        assert kernel_fingerprint(fingerprints, kernel) == fingerprints[f"{kernel}_w4a16"]


@pytest.mark.parametrize("op", CALLS)
@pytest.mark.parametrize("kernel", KERNELS)
def test_routes_without_a_gpu(op: str, kernel: str) -> None:
    """Asked for an H200, each kernel either takes the call under its own name or says that it cannot and what can."""
    try:
        found = LIBRARY.info(op, CALLS[op], (None,), kernel, arch=90)
    except BackendUnavailableError as error:
        refusal = str(error)
    else:
        assert (found["backend"], found["kernel"]) == ("cuda", kernel)
        assert found["config"] in {each["name"] for each in LIBRARY.describe()["configs"][kernel]}
        return
    assert kernel in refusal
    assert "can" in refusal


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
    real = LIBRARY.op(op)(*arguments)
    with FakeTensorMode() as mode:
        fake = LIBRARY.op(op)(*(mode.from_tensor(a) if isinstance(a, torch.Tensor) else a for a in arguments))
    assert real.shape == fake.shape == (*shape[:-1], 200)
    assert real.stride() == fake.stride() == torch.empty(real.shape).stride()

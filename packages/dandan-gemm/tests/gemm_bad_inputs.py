"""Every kind of input that gemm refuses, with the exception and its whole text.

A case is made for a device, so that one table serves the CPU, meta and fake tensors, the checks of the compiled library
(which needs no GPU for them) and CUDA.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from dandan_gemm._ops import KERNELS, LIBRARY
from dandan_ops_core.backend import BackendUnavailableError
from dandan_ops_core.testing.bad_inputs import (
    DEVICES,
    DTYPES,
    EVERYWHERE,
    MEMORY,
    NEEDED,
    PYTHON,
    REAL,
    SELECTION,
    Case,
    Make,
    changed,
    dtype_of,
    tensor,
)

M, N, K = 4, 24, 64


def valid(
    device: str, *, transposed: bool = True, bias: bool = True, m: int = M, n: int = N, k: int = K
) -> dict[str, Any]:
    """Arguments that the operator takes."""
    arguments = {
        "a": tensor(m, k)(device),
        "b": tensor(n, k)(device) if transposed else tensor(k, n)(device),
        "weight_transposed": transposed,
    }
    if bias:
        arguments["bias"] = tensor(n)(device)
    return arguments


CASES: list[Case] = []


def refused(
    name: str,
    error: type[Exception],
    text: str,
    places: frozenset[str] = EVERYWHERE,
    *,
    grad: bool = False,
    base: Callable[[str], dict[str, Any]] = valid,
    **changes: Any,
) -> None:
    """Adds a case: valid arguments with `changes` (values, or what makes them on a device)."""
    CASES.append(Case("gemm", name, changed(base, changes), error, text, places, grad))


# ------------------------------------------------------------------------------------------------- no strided tensors

_EYES: tuple[tuple[str, Make, str], ...] = (
    ("sparse", lambda d: torch.eye(4, device=d).to_sparse(), "layout sparse_coo"),
    ("compressed", lambda d: torch.eye(4, device=d).to_sparse_csr(), "layout sparse_csr"),
)
for _name in ("a", "b", "bias", "out"):
    for _value, _kind in (([[1.0, 2.0]], "list"), (1.0, "float"), ("x", "str")):
        refused(f"{_name} is {_kind}", TypeError, f"{_name} is {_kind}; {NEEDED}", PYTHON, **{_name: _value})
    for _kind, _make, _layout in _EYES:
        refused(
            f"{_name} {_kind}",
            TypeError,
            f"{_name} has {_layout}; a strided tensor is needed",
            REAL,
            **{_name: _make},
        )
for _name in ("a", "b"):
    refused(f"{_name} missing", TypeError, f"{_name} is NoneType; {NEEDED}", PYTHON, **{_name: None})
    refused(
        f"{_name} an array",
        TypeError,
        f"{_name} is ndarray; {NEEDED}",
        frozenset({"cpu", "meta", "cuda"}),
        **{_name: lambda device: torch.ones(4, 64).numpy()},
    )
refused(
    "a nested",
    TypeError,
    "a is a nested tensor; a strided tensor is needed",
    REAL,
    a=lambda device: torch.nested.nested_tensor([torch.ones(2, 64), torch.ones(3, 64)], device=device),
)
refused("out a pair", TypeError, f"out is tuple; {NEEDED}", PYTHON, out=lambda d: (tensor(M, N)(d), tensor(M, N)(d)))

# ------------------------------------------------------------------------------------------------------ dtype and rank

for _dtype in (torch.float32, *DTYPES):
    refused(
        f"a {dtype_of(_dtype)}",
        TypeError,
        f"a has dtype {dtype_of(_dtype)}; float16 and bfloat16 are supported",
        a=tensor(M, K, dtype=_dtype),
    )
for _dtype in (torch.bfloat16, torch.float32, torch.int8):
    for _name, _shape in (("b", (N, K)), ("bias", (N,)), ("out", (M, N))):
        refused(
            f"{_name} {dtype_of(_dtype)}",
            TypeError,
            f"{_name} has dtype {dtype_of(_dtype)} but a has dtype float16",
            **{_name: tensor(*_shape, dtype=_dtype)},
        )
refused(
    "a bfloat16 alone",
    TypeError,
    "b has dtype float16 but a has dtype bfloat16",
    a=tensor(M, K, dtype=torch.bfloat16),
)
refused("a 0-d", ValueError, "a has 0 dimensions; at least 1 is needed", a=tensor())
for _transposed, _form in ((True, "[N, K]"), (False, "[K, N]")):
    for _shape, _shown in (((), "[]"), ((K,), "[64]"), ((1, N, K), "[1, 24, 64]"), ((N, K, 1), "[24, 64, 1]")):
        refused(
            f"b {_shown} for {_form}",
            ValueError,
            f"b has shape {_shown}; {_form} is needed",
            b=tensor(*_shape),
            weight_transposed=_transposed,
        )

# -------------------------------------------------------------------------------------------------------------- shapes

for _k in (1, 63, 65, 128, 0):
    refused(f"b with K {_k}", ValueError, f"b has K={_k} but a has K=64", b=tensor(N, _k))
    refused(
        f"b [K, N] with K {_k}",
        ValueError,
        f"b has K={_k} but a has K=64",
        b=tensor(_k, N),
        weight_transposed=False,
        bias=None,
    )
refused(
    "K 4095 and 4096",
    ValueError,
    "b has K=4095 but a has K=4096",
    a=tensor(1, 4096),
    b=tensor(8, 4095),
    bias=None,
)
refused(
    "the other layout",
    ValueError,
    "b has K=24 but a has K=64; with weight_transposed=False it would fit",
    b=tensor(K, N),
)
refused(
    "the other layout again",
    ValueError,
    "b has K=24 but a has K=64; with weight_transposed=True it would fit",
    b=tensor(N, K),
    weight_transposed=False,
)
refused("a of one number", ValueError, "b has K=64 but a has K=1", a=tensor(1))
refused("a [K, M]", ValueError, "b has K=64 but a has K=4", a=tensor(K, M))
for _shape, _shown in (
    ((N - 1,), "[23]"),
    ((1,), "[1]"),
    ((), "[]"),
    ((1, N), "[1, 24]"),
    ((0,), "[0]"),
    ((M,), "[4]"),
):
    refused(f"bias {_shown}", ValueError, f"bias has shape {_shown} but b has N=24", bias=tensor(*_shape))
for _shape, _shown in (
    ((M, N - 1), "[4, 23]"),
    ((N,), "[24]"),
    ((M, N, 1), "[4, 24, 1]"),
    ((N, M), "[24, 4]"),
    ((0, N), "[0, 24]"),
    ((M, K), "[4, 64]"),
):
    refused(f"out {_shown}", ValueError, f"out has shape {_shown}; [4, 24] is needed", out=tensor(*_shape))
refused("out of a vector", ValueError, "out has shape [1, 24]; [24] is needed", a=tensor(K), out=tensor(1, N))
refused(
    "out of three dimensions",
    ValueError,
    "out has shape [6, 24]; [2, 3, 24] is needed",
    a=tensor(2, 3, K),
    out=tensor(6, N),
)

# ------------------------------------------------------------------------------------------------------------- devices

for _name, _shape in (("b", (N, K)), ("bias", (N,)), ("out", (M, N))):
    refused(
        f"{_name} elsewhere",
        ValueError,
        f"{_name} is on {{other}} but a is on {{device}}",
        DEVICES,
        **{_name: tensor(*_shape, elsewhere=True)},
    )

# --------------------------------------------------------------------------------------------------------------- flags

for _name in ("weight_transposed", "static_weight"):
    for _value in ("yes", [True], (), 1j, b"1", {}):
        _kind = type(_value).__name__
        if _kind == "complex":
            continue  # has a truth value
        refused(f"{_name} {_value!r}", TypeError, f"{_name} is {_kind}; a bool is needed", PYTHON, **{_name: _value})

# ------------------------------------------------------------------------------------------------------------- outputs

refused(
    "out expanded", ValueError, "elements of out share memory", out=lambda device: tensor(1, N)(device).expand(M, N)
)
refused(
    "out windows",
    ValueError,
    "elements of out share memory",
    out=lambda device: tensor(512)(device).as_strided((M, N), (N - 1, 1)),
)


def square(device: str) -> dict[str, Any]:
    """N = K = M, so that out could be an input."""
    return valid(device, m=8, n=8, k=8)


for _name in ("a", "b"):

    def _same(device: str, name: str = _name) -> dict[str, Any]:
        arguments = square(device)
        return {**arguments, "out": arguments[name]}

    def _turned(device: str, name: str = _name) -> dict[str, Any]:
        arguments = square(device)
        return {**arguments, "out": arguments[name].t()}

    def _behind(device: str, name: str = _name) -> dict[str, Any]:
        base = tensor(256)(device)
        return {**square(device), name: base[:64].view(8, 8), "out": base[63:127].view(8, 8)}

    for _kind, _base in (("is", _same), ("is the transposed", _turned), ("ends in", _behind)):
        refused(f"out {_kind} {_name}", ValueError, f"out overlaps {_name}", MEMORY, base=_base)
refused(
    "bias inside out",
    ValueError,
    "out overlaps bias",
    MEMORY,
    base=lambda device: (lambda out: {**valid(device), "out": out, "bias": out[2]})(tensor(M, N)(device)),
)
refused(
    "out among columns of a",
    ValueError,
    "out overlaps a",
    MEMORY,
    base=lambda device: (lambda wide: {**valid(device), "a": wide[:, :K], "out": wide[:, K - 1 : K - 1 + N]})(
        tensor(M, K + N)(device)
    ),
)
_NO_GRAD = "out= takes no part in automatic differentiation; call it without out= or under torch.no_grad()"
for _name, _shape in (("a", (M, K)), ("b", (N, K)), ("bias", (N,))):

    def _needing(device: str, shape: tuple[int, ...] = _shape) -> torch.Tensor:
        return tensor(*shape)(device).requires_grad_()

    refused(
        f"out and {_name} that needs a gradient",
        ValueError,
        _NO_GRAD,
        PYTHON,
        grad=True,
        out=tensor(M, N),
        **{_name: _needing},
    )
refused(
    "out needs a gradient",
    ValueError,
    _NO_GRAD,
    PYTHON,
    grad=True,
    out=lambda device: tensor(M, N)(device).requires_grad_(),
)

# ------------------------------------------------------------------------------------------------------------- backend

_ALWAYS = '"auto" and "torch" can'
for _value in ("fast", "", "CUDA", "sm80", None, 3, True, [], {}, b"cuda"):
    refused(
        f"backend {_value!r}",
        ValueError,
        f"backend {_value!r} is unknown; it is one of {', '.join(LIBRARY.codes)}",
        backend=_value,
    )
for _backend in ("cuda", *KERNELS):
    refused(
        f"backend {_backend} on the CPU",
        BackendUnavailableError,
        f'backend "{_backend}" cannot run: a is on cpu, the own kernels run on CUDA devices; {_ALWAYS}',
        frozenset({"cpu"}),
        backend=_backend,
    )
    refused(
        f"{_backend} and a gradient",
        BackendUnavailableError,
        f'backend "{_backend}" cannot run: an argument needs a gradient, which the own kernels do not compute; '
        f'"auto" and "torch" can, and so can "{_backend}" under torch.no_grad()',
        frozenset({"cuda"}),
        grad=True,
        backend=_backend,
        a=lambda device: tensor(M, K)(device).requires_grad_(),
    )

# Only sm80_mma takes any layout, so it is what can where another kernel cannot.
for _kernel in ("sm90_tma_mma", "sm90a_wgmma", "skinny"):
    for _name, _argument, _changes in (
        ("an odd K", "a", {"base": lambda device: valid(device, k=63)}),
        ("an odd start of a", "a", {"a": lambda device: tensor(M * K + 1)(device)[1:].view(M, K)}),
        ("an odd row stride of a", "a", {"a": lambda device: tensor(M, K + 1)(device)[:, :K]}),
        ("expanded rows of a", "a", {"a": lambda device: tensor(1, K)(device).expand(M, K)}),
        ("rows of a that overlap", "a", {"a": lambda device: tensor(1024)(device).as_strided((M, K), (8, 1))}),
        ("an odd start of b", "b", {"b": lambda device: tensor(N * K + 1)(device)[1:].view(N, K)}),
        ("an odd row stride of b", "b", {"b": lambda device: tensor(N, K + 4)(device)[:, :K]}),
    ):
        refused(
            f"{_kernel} for {_name}",
            BackendUnavailableError,
            f'backend "{_kernel}" cannot run: rows of {_argument} do not start at multiples of 16 bytes; '
            f'{_ALWAYS}, and so can "sm80_mma"',
            SELECTION,
            backend=_kernel,
            **_changes,
        )

"""Every kind of input that an operator refuses, with the exception and its whole text.

A case is made for a device, so that one table serves the CPU, meta and fake tensors, the checks of the compiled library
(which needs no GPU for them) and CUDA.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from dandan_norm._ops import LIBRARY
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

OPS = ("rms_norm", "residual_rms_norm", "layer_norm", "softmax", "silu_and_mul", "argmax")
AFFINE = ("rms_norm", "residual_rms_norm", "layer_norm")
FIRST = {op: "gate" if op == "silu_and_mul" else "x" for op in OPS}
SECOND = {"residual_rms_norm": "residual", "silu_and_mul": "up"}


def valid(op: str, device: str, shape: tuple[int, ...] = (4, 64), dtype: torch.dtype = torch.float16) -> dict[str, Any]:
    """Arguments that the operator takes."""
    arguments = {FIRST[op]: tensor(*shape, dtype=dtype)(device)}
    if op in SECOND:
        arguments[SECOND[op]] = tensor(*shape, dtype=dtype)(device)
    if op in AFFINE:
        arguments["weight"] = tensor(shape[-1], dtype=dtype)(device)
    if op == "layer_norm":
        arguments["bias"] = tensor(shape[-1], dtype=dtype)(device)
    return arguments


CASES: list[Case] = []


def refused(
    op: str,
    name: str,
    error: type[Exception],
    text: str,
    places: frozenset[str] = EVERYWHERE,
    *,
    grad: bool = False,
    whole: Callable[[str], Mapping[str, Any]] = lambda device: {},
    **changes: Any,
) -> None:
    """Adds a case: valid arguments with `changes` (values, or what makes them on a device), after those of `whole`."""

    def base(device: str) -> dict[str, Any]:
        return {**valid(op, device), **whole(device)}

    CASES.append(Case(op, name, changed(base, changes), error, text, places, grad))


FLOATS = "float16, bfloat16 and float32 are supported"

# ----------------------------------------------------------------------------------- the activation, of every operator

for _op in OPS:
    _x = FIRST[_op]
    for _value, _kind in ((None, "NoneType"), ([[1.0, 2.0]], "list"), (1.0, "float"), ("x", "str")):
        refused(_op, f"{_x} is {_kind}", TypeError, f"{_x} is {_kind}; {NEEDED}", PYTHON, **{_x: _value})
    refused(
        _op,
        f"{_x} is an array",
        TypeError,
        f"{_x} is ndarray; {NEEDED}",
        frozenset({"cpu", "meta", "cuda"}),
        **{_x: lambda device: torch.ones(4, 64).numpy()},
    )
    refused(_op, f"{_x} 0-d", ValueError, f"{_x} has 0 dimensions; at least 1 is needed", **{_x: tensor()})
    for _dtype in DTYPES:
        refused(
            _op,
            f"{_x} {dtype_of(_dtype)}",
            TypeError,
            f"{_x} has dtype {dtype_of(_dtype)}; {FLOATS}",
            **{_x: tensor(4, 64, dtype=_dtype)},
        )
    refused(
        _op,
        f"{_x} sparse",
        TypeError,
        f"{_x} has layout sparse_coo; a strided tensor is needed",
        REAL,
        **{_x: lambda device: torch.eye(4, device=device).to_sparse()},
    )
    refused(
        _op,
        f"{_x} compressed",
        TypeError,
        f"{_x} has layout sparse_csr; a strided tensor is needed",
        REAL,
        **{_x: lambda device: torch.eye(4, device=device).to_sparse_csr()},
    )
    refused(
        _op,
        f"{_x} nested",
        TypeError,
        f"{_x} is a nested tensor; a strided tensor is needed",
        REAL,
        **{_x: lambda device: torch.nested.nested_tensor([torch.ones(2, 64), torch.ones(3, 64)], device=device)},
    )
    refused(
        _op,
        f"{_x} jagged",
        TypeError,
        f"{_x} has layout jagged; a strided tensor is needed",
        REAL,
        **{
            _x: lambda device: torch.nested.nested_tensor(
                [torch.ones(2, 64), torch.ones(3, 64)], device=device, layout=torch.jagged
            )
        },
    )

refused("argmax", "zero columns", ValueError, "x has 0 columns; the maximum of nothing is undefined", x=tensor(4, 0))
refused("argmax", "one empty row", ValueError, "x has 0 columns; the maximum of nothing is undefined", x=tensor(0))
refused("argmax", "nothing at all", ValueError, "x has 0 columns; the maximum of nothing is undefined", x=tensor(0, 0))

# --------------------------------------------------------------------------------------------- the second activation

for _op, _second in SECOND.items():
    _x = FIRST[_op]
    for _shape, _shown in (
        ((4, 63), "[4, 63]"),
        ((64,), "[64]"),
        ((1, 4, 64), "[1, 4, 64]"),
        ((5, 64), "[5, 64]"),
        ((), "[]"),
    ):
        refused(
            _op,
            f"{_second} {_shown}",
            ValueError,
            f"{_second} has shape {_shown} but {_x} has shape [4, 64]",
            **{_second: tensor(*_shape)},
        )
    for _dtype in (torch.bfloat16, torch.float32, torch.int32, torch.float64):
        refused(
            _op,
            f"{_second} {dtype_of(_dtype)}",
            TypeError,
            f"{_second} has dtype {dtype_of(_dtype)} but {_x} has dtype float16",
            **{_second: tensor(4, 64, dtype=_dtype)},
        )
    refused(
        _op,
        f"{_second} elsewhere",
        ValueError,
        f"{_second} is on {{other}} but {_x} is on {{device}}",
        DEVICES,
        **{_second: tensor(4, 64, elsewhere=True)},
    )
    refused(_op, f"{_second} missing", TypeError, f"{_second} is NoneType; {NEEDED}", PYTHON, **{_second: None})
    refused(_op, f"{_second} a number", TypeError, f"{_second} is float; {NEEDED}", PYTHON, **{_second: 1.0})
    refused(
        _op,
        f"{_second} sparse",
        TypeError,
        f"{_second} has layout sparse_coo; a strided tensor is needed",
        REAL,
        **{_second: lambda device: torch.eye(4, device=device).to_sparse()},
    )

# ----------------------------------------------------------------------------------------------------- weight and bias

for _op in AFFINE:
    for _vector in ("weight", "bias") if _op == "layer_norm" else ("weight",):
        for _shape, _shown in (
            ((63,), "[63]"),
            ((65,), "[65]"),
            ((1,), "[1]"),
            ((1, 64), "[1, 64]"),
            ((), "[]"),
            ((0,), "[0]"),
        ):
            refused(
                _op,
                f"{_vector} {_shown}",
                ValueError,
                f"{_vector} has shape {_shown} but x has 64 columns",
                **{_vector: tensor(*_shape)},
            )
        for _dtype in (torch.float64, torch.int64, torch.bool, torch.complex64, torch.float8_e4m3fn):
            refused(
                _op,
                f"{_vector} {dtype_of(_dtype)}",
                TypeError,
                f"{_vector} has dtype {dtype_of(_dtype)}; {FLOATS}",
                **{_vector: tensor(64, dtype=_dtype)},
            )
        refused(
            _op,
            f"{_vector} elsewhere",
            ValueError,
            f"{_vector} is on {{other}} but x is on {{device}}",
            DEVICES,
            **{_vector: tensor(64, elsewhere=True)},
        )
        refused(_op, f"{_vector} a list", TypeError, f"{_vector} is list; {NEEDED}", PYTHON, **{_vector: [1.0] * 64})
        refused(
            _op,
            f"{_vector} sparse",
            TypeError,
            f"{_vector} has layout sparse_coo; a strided tensor is needed",
            REAL,
            **{_vector: lambda device: torch.ones(64, device=device).to_sparse()},
        )

# ----------------------------------------------------------------------------------------------------------------- eps

_NORMAL = "a positive normal float32 number is needed"
EPS = (
    (-1e-6, "-1e-06"),
    (0.0, "0"),
    (-0.0, "-0"),
    (float("nan"), "nan"),
    (float("inf"), "inf"),
    (-float("inf"), "-inf"),
    (1e-40, "1e-40"),  # subnormal in float32: the kernels flush it
    (1e39, "1e+39"),  # beyond float32
    (-1, "-1"),
    (0, "0"),
)
for _op in AFFINE:
    for _value, _shown in EPS:
        refused(_op, f"eps {_value!r}", ValueError, f"eps is {_shown}; {_NORMAL}", eps=_value)
    # No float64 holds it, so it ends in an OverflowError before any operator is reached.
    refused(_op, "eps 10^400", ValueError, f"eps is inf; {_NORMAL}", PYTHON, eps=10**400)
    for _value in ("1e-6", None, 1e-6 + 0j, [1e-6], b"1"):
        _kind = type(_value).__name__
        refused(_op, f"eps {_kind}", TypeError, f"eps is {_kind}; a number is needed", PYTHON, eps=_value)

# ----------------------------------------------------------------------------------------------------------------- out


def rows_and(shift: int, op: str) -> Callable[[str], dict[str, Any]]:
    """The first argument and `out` in one memory, `shift` elements apart."""

    def make(device: str) -> dict[str, Any]:
        base = tensor(1024)(device)
        return {FIRST[op]: base[:256].view(4, 64), "out": base[shift : shift + 256].view(4, 64)}

    return make


def square(op: str) -> Callable[[str], dict[str, Any]]:
    """The same elements in another order."""

    def make(device: str) -> dict[str, Any]:
        x = tensor(64, 64)(device)
        return {**valid(op, device, (64, 64)), FIRST[op]: x, "out": x.t()}

    return make


def shared(name: str) -> Callable[[str], dict[str, Any]]:
    """A weight or bias that lies inside `out`."""

    def make(device: str) -> dict[str, Any]:
        out = tensor(4, 64)(device)
        return {"out": out, name: out[2]}

    return make


for _op in ("rms_norm", "layer_norm", "softmax", "silu_and_mul"):
    _x = FIRST[_op]
    for _shape, _shown in (
        ((4, 63), "[4, 63]"),
        ((64,), "[64]"),
        ((4, 64, 1), "[4, 64, 1]"),
        ((5, 64), "[5, 64]"),
        ((0, 64), "[0, 64]"),
    ):
        refused(_op, f"out {_shown}", ValueError, f"out has shape {_shown}; [4, 64] is needed", out=tensor(*_shape))
    for _dtype in (torch.bfloat16, torch.float32, torch.int64, torch.float64):
        refused(
            _op,
            f"out {dtype_of(_dtype)}",
            TypeError,
            f"out has dtype {dtype_of(_dtype)}; float16 is needed",
            out=tensor(4, 64, dtype=_dtype),
        )
    refused(
        _op,
        "out elsewhere",
        ValueError,
        f"out is on {{other}} but {_x} is on {{device}}",
        DEVICES,
        out=tensor(4, 64, elsewhere=True),
    )
    refused(_op, "out a list", TypeError, f"out is list; {NEEDED}", PYTHON, out=[])
    refused(_op, "out a number", TypeError, f"out is int; {NEEDED}", PYTHON, out=4)
    refused(
        _op,
        "out a pair",
        TypeError,
        f"out is tuple; {NEEDED}",
        PYTHON,
        out=lambda d: (tensor(4, 64)(d), tensor(4, 64)(d)),
    )
    refused(
        _op,
        "out sparse",
        TypeError,
        "out has layout sparse_coo; a strided tensor is needed",
        REAL,
        out=lambda device: torch.eye(4, device=device).to_sparse(),
    )
    refused(
        _op,
        "out expanded",
        ValueError,
        "elements of out share memory",
        out=lambda device: tensor(1, 64)(device).expand(4, 64),
    )
    refused(
        _op,
        "out windows",
        ValueError,
        "elements of out share memory",
        out=lambda device: tensor(512)(device).as_strided((4, 64), (63, 1)),
    )
    for _shift in (1, 63, 64, 255):
        refused(
            _op,
            f"out {_shift} elements behind",
            ValueError,
            f"out overlaps {_x} without being the same elements",
            MEMORY,
            whole=rows_and(_shift, _op),
        )
    refused(
        _op,
        "out transposed input",
        ValueError,
        f"out overlaps {_x} without being the same elements",
        MEMORY,
        whole=square(_op),
    )
    refused(
        _op,
        "out needs a gradient",
        ValueError,
        "out= takes no part in automatic differentiation; call it without out= or under torch.no_grad()",
        PYTHON,
        grad=True,
        out=lambda device: tensor(4, 64)(device).requires_grad_(),
    )
    refused(
        _op,
        "out is not a leaf",
        ValueError,
        "out= takes no part in automatic differentiation; call it without out= or under torch.no_grad()",
        PYTHON,
        grad=True,
        out=lambda device: tensor(4, 64)(device).requires_grad_() * 2,
    )
    refused(
        _op,
        "out and an input that needs a gradient",
        ValueError,
        "out= takes no part in automatic differentiation; call it without out= or under torch.no_grad()",
        PYTHON,
        grad=True,
        out=tensor(4, 64),
        **{_x: lambda device: tensor(4, 64)(device).requires_grad_()},
    )

refused("rms_norm", "out overlaps weight", ValueError, "out overlaps weight", MEMORY, whole=shared("weight"))
refused("layer_norm", "out overlaps weight", ValueError, "out overlaps weight", MEMORY, whole=shared("weight"))
refused("layer_norm", "out overlaps bias", ValueError, "out overlaps bias", MEMORY, whole=shared("bias"))
# Exactly the same elements: allowed for x, but a weight is read again for the next row.
refused(
    "rms_norm",
    "out is weight",
    ValueError,
    "out overlaps weight",
    MEMORY,
    whole=lambda device: (lambda row: {"x": tensor(64)(device), "weight": row, "out": row})(tensor(64)(device)),
)
refused(
    "rms_norm",
    "weight needs a gradient, with out",
    ValueError,
    "out= takes no part in automatic differentiation; call it without out= or under torch.no_grad()",
    PYTHON,
    grad=True,
    out=tensor(4, 64),
    weight=lambda device: tensor(64)(device).requires_grad_(),
)
refused(
    "silu_and_mul",
    "out overlaps up",
    ValueError,
    "out overlaps up without being the same elements",
    MEMORY,
    whole=lambda device: (lambda base: {"up": base[:256].view(4, 64), "out": base[8:264].view(4, 64)})(
        tensor(512)(device)
    ),
)
refused(
    "silu_and_mul",
    "out between the halves",
    ValueError,
    "out overlaps gate without being the same elements",
    MEMORY,
    whole=lambda device: (lambda base: {"gate": base[:, :64], "up": base[:, 64:], "out": base[:, 32:96]})(
        tensor(4, 128)(device)
    ),
)

# Indices.
refused("argmax", "out int32", TypeError, "out has dtype int32; int64 is needed", out=tensor(4, dtype=torch.int32))
refused("argmax", "out of x's dtype", TypeError, "out has dtype float16; int64 is needed", out=tensor(4))
refused(
    "argmax",
    "out keeps the dimension",
    ValueError,
    "out has shape [4, 1]; [4] is needed",
    out=tensor(4, 1, dtype=torch.int64),
)
refused("argmax", "out 0-d", ValueError, "out has shape []; [4] is needed", out=tensor(dtype=torch.int64))
refused(
    "argmax",
    "out elsewhere",
    ValueError,
    "out is on {other} but x is on {device}",
    DEVICES,
    out=tensor(4, dtype=torch.int64, elsewhere=True),
)
refused(
    "argmax",
    "out expanded",
    ValueError,
    "elements of out share memory",
    out=lambda device: tensor(1, dtype=torch.int64)(device).expand(4),
)
refused(
    "argmax",
    "out inside x",
    ValueError,
    "out overlaps x",
    MEMORY,
    whole=lambda device: (lambda x: {"x": x, "out": x.view(torch.int64)[:, 0]})(tensor(4, 64)(device)),
)

# Pairs.
_PAIR = "a pair of tensors (normalized, summed) is needed"


def pair(first: Make, second: Make) -> Make:
    return lambda device: (first(device), second(device))


_fine = tensor(4, 64)
for _name, _value, _shown in (
    ("one tensor", _fine, "Tensor"),
    ("a number", 1, "int"),
    ("one in a tuple", lambda d: (_fine(d),), "tuple of 1"),
    ("three", lambda d: (_fine(d), _fine(d), _fine(d)), "tuple of 3"),
    ("an empty list", [], "list of 0"),
    ("a dict", {}, "dict"),
):
    if _name == "one tensor":  # of three rows: two would be taken for the pair
        refused(
            "residual_rms_norm",
            "out one tensor of three rows",
            TypeError,
            f"out is Tensor; {_PAIR}",
            PYTHON - {"fake"},
            out=tensor(3, 4, 64),
        )
    else:
        refused("residual_rms_norm", f"out {_name}", TypeError, f"out is {_shown}; {_PAIR}", PYTHON, out=_value)
for _number in (0, 1):

    def _pair_with(bad: Make, number: int = _number) -> Make:
        return pair(bad, _fine) if number == 0 else pair(_fine, bad)

    _out = f"out[{_number}]"
    refused(
        "residual_rms_norm",
        f"{_out} missing",
        TypeError,
        f"{_out} is NoneType; {NEEDED}",
        PYTHON,
        out=_pair_with(lambda d: None),
    )
    refused(
        "residual_rms_norm",
        f"{_out} [4, 63]",
        ValueError,
        f"{_out} has shape [4, 63]; [4, 64] is needed",
        out=_pair_with(tensor(4, 63)),
    )
    refused(
        "residual_rms_norm",
        f"{_out} float32",
        TypeError,
        f"{_out} has dtype float32; float16 is needed",
        out=_pair_with(tensor(4, 64, dtype=torch.float32)),
    )
    refused(
        "residual_rms_norm",
        f"{_out} elsewhere",
        ValueError,
        f"{_out} is on {{other}} but x is on {{device}}",
        DEVICES,
        out=_pair_with(tensor(4, 64, elsewhere=True)),
    )
    refused(
        "residual_rms_norm",
        f"{_out} expanded",
        ValueError,
        f"elements of {_out} share memory",
        out=_pair_with(lambda device: tensor(1, 64)(device).expand(4, 64)),
    )
    refused(
        "residual_rms_norm",
        f"{_out} needs a gradient",
        ValueError,
        "out= takes no part in automatic differentiation; call it without out= or under torch.no_grad()",
        PYTHON,
        grad=True,
        out=_pair_with(lambda device: tensor(4, 64)(device).requires_grad_()),
    )

    def _overlapping(name: str, number: int = _number) -> Callable[[str], dict[str, Any]]:
        def make(device: str) -> dict[str, Any]:
            base = tensor(512)(device)
            out = [_fine(device), _fine(device)]
            out[number] = base[8:264].view(4, 64)
            return {name: base[2:258].view(4, 64), "out": tuple(out)}

        return make

    for _input in ("x", "residual"):
        refused(
            "residual_rms_norm",
            f"{_out} overlaps {_input}",
            ValueError,
            f"{_out} overlaps {_input} without being the same elements",
            MEMORY,
            whole=_overlapping(_input),
        )

    def _over_weight(device: str, number: int = _number) -> dict[str, Any]:
        out = [_fine(device), _fine(device)]
        return {"out": tuple(out), "weight": out[number][1]}

    refused(
        "residual_rms_norm",
        f"{_out} overlaps weight",
        ValueError,
        f"{_out} overlaps weight",
        MEMORY,
        whole=_over_weight,
    )

refused(
    "residual_rms_norm",
    "out twice the same",
    ValueError,
    "out[1] overlaps out[0]",
    MEMORY,
    out=lambda device: (_fine(device),) * 2,
)
refused(
    "residual_rms_norm",
    "out pair overlaps",
    ValueError,
    "out[1] overlaps out[0]",
    MEMORY,
    out=lambda device: (lambda base: (base[:256].view(4, 64), base[255:511].view(4, 64)))(tensor(512)(device)),
)

# ------------------------------------------------------------------------------------------------------------- backend

_ALWAYS = '"auto" and "torch" can'
for _op in OPS:
    for _value in ("fast", "", "CUDA", "sm80", None, 3, True, [], {}, b"cuda"):
        refused(
            _op,
            f"backend {_value!r}",
            ValueError,
            f"backend {_value!r} is unknown; it is one of {', '.join(LIBRARY.codes)}",
            backend=_value,
        )
    for _backend in LIBRARY.codes:
        if _backend not in ("auto", "torch"):
            refused(
                _op,
                f"backend {_backend} on the CPU",
                BackendUnavailableError,
                f'backend "{_backend}" cannot run: x is on cpu, the own kernels run on CUDA devices; {_ALWAYS}',
                frozenset({"cpu"}),
                backend=_backend,
            )

for _op in OPS:
    _can = "sm80_elementwise" if _op == "silu_and_mul" else "sm80_row"
    for _kernel in ("sm80_row", "sm80_stream", "sm90_cluster", "sm80_elementwise"):
        if (_kernel == "sm80_elementwise") != (_op == "silu_and_mul"):
            refused(
                _op,
                f"kernel {_kernel} of another operator",
                BackendUnavailableError,
                f'backend "{_kernel}" cannot run: it does not compute this operator; {_ALWAYS}, and so can "{_can}"',
                SELECTION,
                backend=_kernel,
            )
for _op in ("rms_norm", "layer_norm", "residual_rms_norm", "softmax", "argmax"):
    for _kernel in ("sm80_row", "sm90_cluster"):
        for _name, _whole in (
            ("an odd width", lambda device, op=_op: valid(op, device, (4, 63))),
            ("an odd start", lambda device, op=_op: {**valid(op, device), "x": tensor(257)(device)[1:].view(4, 64)}),
            ("an odd row stride", lambda device, op=_op: {**valid(op, device), "x": tensor(4, 65)(device)[:, :64]}),
        ):
            refused(
                _op,
                f"{_kernel} for {_name}",
                BackendUnavailableError,
                f'backend "{_kernel}" cannot run: rows are not whole 16-byte vectors at multiples of 16 bytes; '
                '"auto" and "torch" can, and so can "sm80_stream"',
                SELECTION,
                backend=_kernel,
                whole=_whole,
            )
    if _op in AFFINE:
        refused(
            _op,
            "sm80_row for a weight of another dtype",
            BackendUnavailableError,
            'backend "sm80_row" cannot run: weight or bias is not contiguous, aligned and of x\'s dtype; '
            '"auto" and "torch" can, and so can "sm80_stream"',
            SELECTION,
            backend="sm80_row",
            weight=tensor(64, dtype=torch.float32),
        )
    if _op != "argmax":
        refused(
            _op,
            "sm80_row for 65,552 bytes",
            BackendUnavailableError,
            f'backend "sm80_row" cannot run: rows are wider than 65536 bytes; {_ALWAYS}, and so can "sm90_cluster"',
            SELECTION,
            backend="sm80_row",
            whole=lambda device, op=_op: valid(op, device, (2, 32776)),
        )
        refused(
            _op,
            "sm90_cluster for 1 MiB and 16 bytes",
            BackendUnavailableError,
            f'backend "sm90_cluster" cannot run: rows are wider than 1 MiB; {_ALWAYS}, and so can "sm80_stream"',
            SELECTION,
            backend="sm90_cluster",
            whole=lambda device, op=_op: valid(op, device, (1, 524296)),
        )
    refused(
        _op,
        "five uneven leading dimensions",
        BackendUnavailableError,
        'backend "cuda" cannot run: the leading dimensions do not merge into four; "auto" and "torch" can',
        SELECTION,
        backend="cuda",
        whole=lambda device, op=_op: (
            lambda fine: {**fine, **{k: uneven(device) for k in ("x", "residual") if k in fine}}
        )(valid(op, device)),
    )


def uneven(device: str) -> torch.Tensor:
    """[2, 2, 2, 2, 2, 64] of which no two leading dimensions are one."""
    return torch.zeros(3, 3, 3, 3, 3, 64, dtype=torch.float16, device=device)[:2, :2, :2, :2, :2]


_GRADIENT = "an argument needs a gradient, which the own kernels do not compute"
for _op in OPS:
    if _op != "argmax":  # its result has no gradient, so an input that needs one is welcome
        refused(
            _op,
            "own kernel and a gradient",
            BackendUnavailableError,
            f'backend "cuda" cannot run: {_GRADIENT}; "auto" and "torch" can, and so can "cuda" under torch.no_grad()',
            frozenset({"cuda"}),
            grad=True,
            backend="cuda",
            **{FIRST[_op]: lambda device: tensor(4, 64)(device).requires_grad_()},
        )

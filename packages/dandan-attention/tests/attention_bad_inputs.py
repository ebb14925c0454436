"""Every kind of input that the operators refuse, with the exception and its whole text, made for a device."""

from __future__ import annotations

import functools
import math
from typing import Any

import torch

from dandan_ops_core.testing.bad_inputs import PYTHON, REAL, Case, Make, changed, other, tensor

# One tensor without a device of its own kind.
DEVICES = PYTHON - {"fake"}
# Rules about values: read on the host; on CUDA devices under DANDAN_DEBUG=1 alone.
VALUES = frozenset({"cpu"})

DENSE, PACKED = "flash_attention", "flash_attention_varlen"
B, HQ, HKV, SQ, SK, D = 2, 4, 2, 5, 7, 64


def numbers(*values: int, dtype: torch.dtype = torch.int32, elsewhere: bool = False) -> Make:
    return lambda device: torch.tensor(values, dtype=dtype, device=other(device) if elsewhere else device)


def sparse(*shape: int) -> Make:
    return lambda device: tensor(*shape)(device).to_sparse()


def valid(op: str, device: str) -> dict[str, Any]:
    """Arguments that the operator takes."""
    if op == DENSE:
        return {
            "q": tensor(B, HQ, SQ, D)(device),
            "k": tensor(B, HKV, SK, D)(device),
            "v": tensor(B, HKV, SK, D)(device),
        }
    return {
        "q": tensor(SQ, HQ, D)(device),
        "k": tensor(SK, HKV, D)(device),
        "v": tensor(SK, HKV, D)(device),
        "cu_seqlens_q": numbers(0, 2, SQ)(device),
        "cu_seqlens_k": numbers(0, 3, SK)(device),
        "max_seqlen_q": 3,
        "max_seqlen_k": 4,
    }


CASES: list[Case] = []


def refused(
    ops: str | tuple[str, ...],
    name: str,
    error: type[Exception],
    text: str,
    places: frozenset[str] = PYTHON,
    grad: bool = False,
    **changes: Any,
) -> None:
    """Adds a case: valid arguments but for `changes`, values or functions of the device."""
    for op in (ops,) if isinstance(ops, str) else ops:
        make = changed(functools.partial(valid, op), changes)
        CASES.append(Case(op, name, make, error, text, places, grad))


BOTH = (DENSE, PACKED)
TENSORS: dict[str, dict[str, tuple[int, ...]]] = {
    DENSE: {"q": (B, HQ, SQ, D), "k": (B, HKV, SK, D), "v": (B, HKV, SK, D), "out": (B, HQ, SQ, D)},
    PACKED: {"q": (SQ, HQ, D), "k": (SK, HKV, D), "v": (SK, HKV, D), "out": (SQ, HQ, D)},
}
VECTORS = {
    DENSE: {"query_start": (0, 2), "seqused_k": (3, 7)},
    PACKED: {"cu_seqlens_q": (0, 2, 5), "cu_seqlens_k": (0, 3, 7), "query_starts": (0, 2), "seqused_k": (3, 4)},
}

# What is no strided tensor, of another dtype, or on another device.
for _op, _shapes in TENSORS.items():
    for _name, _shape in _shapes.items():
        _also = "" if _name == "q" else " but q has dtype float16"
        for _dtype in ("float32", "float64", "int32", "bool"):
            refused(
                _op,
                f"{_name} {_dtype}",
                TypeError,
                f"{_name} has dtype {_dtype}{_also or '; float16 and bfloat16 are supported'}",
                **{_name: tensor(*_shape, dtype=getattr(torch, _dtype))},
            )
        if _name != "q":
            refused(
                _op,
                f"{_name} bfloat16",
                TypeError,
                f"{_name} has dtype bfloat16{_also}",
                **{_name: tensor(*_shape, dtype=torch.bfloat16)},
            )
            refused(
                _op,
                f"{_name} elsewhere",
                ValueError,
                f"{_name} is on {{other}} but q is on {{device}}",
                DEVICES,
                **{_name: tensor(*_shape, elsewhere=True)},
            )
            _text = f"{_name} is list; a tensor is needed"
            refused(_op, f"{_name} a list", TypeError, _text, **{_name: [1.0]})
        else:
            refused(_op, "q a list", TypeError, "q is list; a tensor is needed", q=[1.0])
        if _name != "out":
            refused(_op, f"{_name} None", TypeError, f"{_name} is NoneType; a tensor is needed", **{_name: None})
            refused(
                _op,
                f"{_name} sparse",
                TypeError,
                f"{_name} has layout sparse_coo; a strided tensor is needed",
                REAL,
                **{_name: sparse(*_shape)},
            )
for _op, _vectors in VECTORS.items():
    for _name, _values in _vectors.items():
        for _dtype in ("int64", "float32", "int16"):
            refused(
                _op,
                f"{_name} {_dtype}",
                TypeError,
                f"{_name} has dtype {_dtype}; int32 is needed",
                **{_name: numbers(*_values, dtype=getattr(torch, _dtype))},
            )
        refused(
            _op,
            f"{_name} elsewhere",
            ValueError,
            f"{_name} is on {{other}} but q is on {{device}}",
            DEVICES,
            **{_name: numbers(*_values, elsewhere=True)},
        )
        _count = len(_values)
        if _name != "cu_seqlens_q":
            _why = {"cu_seqlens_k": "as in cu_seqlens_q"}.get(
                _name, f"for batch={B}" if _op == DENSE else "for 2 sequences"
            )
            refused(
                _op,
                f"{_name} one number more",
                ValueError,
                f"{_name} has {_count + 1} numbers; {_count} are needed {_why}",
                **{_name: numbers(*_values, 7)},
            )
        refused(
            _op,
            f"{_name} [1, n]",
            ValueError,
            f"{_name} has shape [1, {_count}]; a vector is needed",
            **{_name: lambda device, values=_values: numbers(*values)(device).unsqueeze(0)},
        )
        if "start" not in _name:
            refused(
                _op,
                f"{_name} a list",
                TypeError,
                f"{_name} is list; a tensor is needed",
                **{_name: list(_values)},
            )
_text = "cu_seqlens_q has 0 numbers; at least 1 is needed, one more than sequences"
refused(PACKED, "cu_seqlens_q empty", ValueError, _text, cu_seqlens_q=numbers())

# Shapes.
for _shape in ((SQ, HQ, D), (1, B, HQ, SQ, D), ()):
    _text = f"q has shape {list(_shape)}; [B, Hq, Sq, D] is needed"
    refused(DENSE, f"q {list(_shape)}", ValueError, _text, q=tensor(*_shape))
for _shape in ((B, HQ, SQ, D), (SQ, HQ * D)):
    _text = f"q has shape {list(_shape)}; [total_q, Hq, D] is needed"
    refused(PACKED, f"q {list(_shape)}", ValueError, _text, q=tensor(*_shape))
refused(DENSE, "k of 3 dimensions", ValueError, f"k has shape [{HKV}, {SK}, {D}]; [B, Hkv, Sk, D] is needed",
        k=tensor(HKV, SK, D))  # fmt: skip
refused(PACKED, "k of 4 dimensions", ValueError, f"k has shape [1, {SK}, {HKV}, {D}]; [total_k, Hkv, D] is needed",
        k=tensor(1, SK, HKV, D))  # fmt: skip
for _op, _lead in ((DENSE, (B, HKV, SK)), (PACKED, (SK, HKV))):
    _kv = {"k": tensor(*_lead, 80), "v": tensor(*_lead, 80)}
    refused(_op, "k of another head_dim", ValueError, f"k has head_dim=80 but q has head_dim={D}", **_kv)
    _text = f"v has shape {[*_lead, 80]} but k has shape {[*_lead, D]}"
    refused(_op, "v of another head_dim", ValueError, _text, v=tensor(*_lead, 80))
    _three, _none = ([count if axis == 1 else size for axis, size in enumerate(_lead)] for count in (3, 0))
    refused(_op, "ratio", ValueError, f"q has num_heads_q={HQ}, which is not a multiple of num_heads_kv=3 of k",
            k=tensor(*_three, D), v=tensor(*_three, D))  # fmt: skip
    refused(_op, "no heads of k", ValueError, "k has num_heads_kv=0; at least 1 is needed",
            k=tensor(*_none, D), v=tensor(*_none, D))  # fmt: skip
    _q = TENSORS[_op]["q"][:-1]
    refused(_op, "head_dim 0", ValueError, "q has head_dim=0; at least 1 is needed",
            q=tensor(*_q, 0), k=tensor(*_lead, 0), v=tensor(*_lead, 0))  # fmt: skip
refused(DENSE, "v of another length", ValueError, f"v has shape [2, 2, 6, 64] but k has shape [2, 2, {SK}, 64]",
        v=tensor(B, HKV, 6, D))  # fmt: skip
refused(DENSE, "k of another batch", ValueError, "k has batch=3 but q has batch=2",
        k=tensor(3, HKV, SK, D), v=tensor(3, HKV, SK, D))  # fmt: skip

# Options.
for _value, _shown in ((0, "0.0"), (-1, "-1.0"), (math.nan, "nan"), (math.inf, "inf"), (10**400, "inf")):
    _text = f"softmax_scale is {_shown}; a finite number above 0 is needed"
    refused(BOTH, f"softmax_scale {_shown} {type(_value).__name__}", ValueError, _text, softmax_scale=_value)
for _value in (-1.0, math.nan, math.inf):
    _text = f"softcap is {_value}; 0, for none, or a finite number above it is needed"
    refused(BOTH, f"softcap {_value}", ValueError, _text, softcap=_value)
for _value in (0, -1, -(2**63)):
    _text = f"window_size is {_value}; 1 or more is needed"
    # A place is needed with a window; it is there, so that the window alone is wrong.
    refused(DENSE, f"window_size {_value}", ValueError, _text, window_size=_value, query_start=0)
    refused(PACKED, f"window_size {_value}", ValueError, _text, window_size=_value, query_starts="suffix")
refused(BOTH, "softmax_scale a text", TypeError, "softmax_scale is str; a float is needed", softmax_scale="1")
refused(BOTH, "softcap None", TypeError, "softcap is NoneType; a float is needed", softcap=None)
refused(
    DENSE, "window_size a float", TypeError, "window_size is float; an int is needed", window_size=1.5, query_start=0
)
refused(DENSE, "window_size of 65 bits", ValueError,
        f"window_size is {2**64}; a number of 64 bits is needed", window_size=2**64, query_start=0)  # fmt: skip
refused(DENSE, "causal a text", TypeError, "causal is str; a bool is needed", causal="yes", query_start=0)
refused(PACKED, "causal a text", TypeError, "causal is str; a bool is needed", causal="yes", query_starts="suffix")
refused(BOTH, "backend unknown", ValueError,
        "backend 'fa3' is unknown; it is one of auto, torch, cuda, sm80_mma, sm90a_wgmma", backend="fa3")  # fmt: skip
refused(BOTH, "backend None", ValueError,
        "backend None is unknown; it is one of auto, torch, cuda, sm80_mma, sm90a_wgmma", backend=None)  # fmt: skip

# Where queries lie.
_HINT = "seqlen_k - seqlen_q for queries that end with the keys, 0 for queries that start with them"
for _options, _shown in (({"causal": True}, "causal=True"), ({"window_size": 3}, "window_size=3")):
    _text = f"query_start is None; with {_shown} it is needed for seqlen_q={SQ} and seqlen_k={SK}: {_HINT}"
    refused(DENSE, f"no query_start with {_shown}", ValueError, _text, **_options)
    _text = (
        f"query_starts is None; with {_shown} it is needed unless cu_seqlens_q and cu_seqlens_k are one tensor: "
        f'"suffix" for queries that end with the keys, zeros for queries that start with them'
    )
    refused(PACKED, f"no query_starts with {_shown}", ValueError, _text, **_options)
refused(DENSE, "query_start a text", TypeError, "query_start is str; an int is needed", query_start="suffix")
refused(DENSE, "query_start a float", TypeError, "query_start is float; an int is needed", query_start=1.0)
refused(DENSE, "query_start of 65 bits", ValueError,
        f"query_start is {2**63}; a number of 64 bits is needed", query_start=2**63)  # fmt: skip
refused(PACKED, "query_starts another text", TypeError,
        "query_starts is 'prefix'; an int32 tensor, \"suffix\" or None is needed", query_starts="prefix")  # fmt: skip
refused(PACKED, "query_starts an int", TypeError,
        'query_starts is int; an int32 tensor, "suffix" or None is needed', query_starts=0)  # fmt: skip

# Lengths of a packed batch.
for _side in "qk":
    refused(PACKED, f"max_seqlen_{_side} -1", ValueError, f"max_seqlen_{_side} is -1; 0 or more is needed",
            **{f"max_seqlen_{_side}": -1})  # fmt: skip
    refused(PACKED, f"max_seqlen_{_side} a float", TypeError, f"max_seqlen_{_side} is float; an int is needed",
            **{f"max_seqlen_{_side}": 3.0})  # fmt: skip
    refused(PACKED, f"max_seqlen_{_side} None", TypeError, f"max_seqlen_{_side} is NoneType; an int is needed",
            **{f"max_seqlen_{_side}": None})  # fmt: skip
    _total = SQ if _side == "q" else SK
    for _values, _text in (
        ((1, 2, _total), "starts at 1; 0 is needed"),
        ((-1, 2, _total), "starts at -1; 0 is needed"),
        ((0, 3, 2), "falls from 3 to 2 at sequence 1; ascending numbers are needed"),
        ((0, -1, 2), "falls from 0 to -1 at sequence 0; ascending numbers are needed"),
        ((0, 2, _total + 1), f"ends at {_total + 1} but {_side} has {_total} rows"),
    ):
        refused(PACKED, f"cu_seqlens_{_side} {_values}", ValueError, f"cu_seqlens_{_side} {_text}", VALUES,
                **{f"cu_seqlens_{_side}": numbers(*_values)})  # fmt: skip
    _longest = 3 if _side == "q" else 4
    refused(PACKED, f"max_seqlen_{_side} too small", ValueError,
            f"max_seqlen_{_side} is {_longest - 1} but cu_seqlens_{_side} has a sequence of {_longest} rows, number 1",
            VALUES, **{f"max_seqlen_{_side}": _longest - 1})  # fmt: skip
for _values, _index in (((3, 8), 1), ((-1, 2), 0)):
    _text = f"seqused_k[{_index}] is {_values[_index]}; 0 to 7 is needed"
    refused(DENSE, f"seqused_k {_values}", ValueError, _text, VALUES, seqused_k=numbers(*_values))
for _values, _index, _most in (((4, 4), 0, 3), ((3, 5), 1, 4), ((0, -1), 1, 4)):
    refused(PACKED, f"seqused_k {_values}", ValueError,
            f"seqused_k[{_index}] is {_values[_index]}; 0 to {_most} is needed", VALUES,
            seqused_k=numbers(*_values))  # fmt: skip


# Outputs.
def _overlapping(op: str, name: str, offset: int = 0) -> None:
    """`out` is a view of an input's memory."""

    def make(device: str) -> dict[str, Any]:
        arguments = valid(op, device)
        shape = arguments["q"].shape
        base = torch.zeros(
            arguments["q"].numel() + arguments[name].numel() + offset, dtype=torch.float16, device=device
        )
        arguments["out"] = base[: arguments["q"].numel()].view(shape)
        arguments[name] = base[offset : offset + arguments[name].numel()].view(arguments[name].shape)
        return arguments

    CASES.append(Case(op, f"out overlaps {name} at {offset}", make, ValueError, f"out overlaps {name}", REAL))


for _op, _shapes in TENSORS.items():
    _shape = list(_shapes["q"])
    _longer = [*_shape[:-2], _shape[-2] + 1, D]
    refused(_op, "out of another shape", ValueError, f"out has shape {_longer}; {_shape} is needed",
            out=tensor(*_longer))  # fmt: skip
    _out = lambda device, shape=_shape: tensor(1, D)(device).expand(shape)  # noqa: E731
    refused(_op, "out expanded", ValueError, "elements of out share memory", out=_out)
    for _name in "qkv":
        for _offset in (0, 8):
            _overlapping(_op, _name, _offset)
    _text = "out= takes no part in automatic differentiation; call it without out= or under torch.no_grad()"
    _q = lambda device, shape=_shape: tensor(*shape)(device).requires_grad_()  # noqa: E731
    refused(_op, "out with gradients", ValueError, _text, grad=True, q=_q, out=tensor(*_shape))

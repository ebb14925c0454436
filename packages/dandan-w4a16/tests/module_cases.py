"""Ways from one QuantizedLinear to another that holds the same weight, for tests of every form and device."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable

import torch
from w4a16_cases import K, N, tensors, truth, whole_x

from dandan_ops_core.testing import assert_bit_equal
from dandan_w4a16 import QuantizedLinear


def blank(**changes: object) -> QuantizedLinear:
    return QuantizedLinear(K, N, **changes)  # type: ignore[arg-type]


def device_of(made: QuantizedLinear) -> torch.device:
    return next(made.buffers()).device


def assert_same(found: QuantizedLinear, wanted: QuantizedLinear) -> None:
    """The same bits, and a product of them."""
    for mine, theirs in zip(tensors(found.weight_int4), tensors(wanted.weight_int4), strict=True):
        assert_bit_equal(mine.cpu(), theirs.cpu())
    assert (found.group_size, found.zero_mode) == (wanted.group_size, wanted.zero_mode)
    assert (found.bias is None) == (wanted.bias is None)
    bias = None if wanted.bias is None else wanted.bias.cpu()
    x = whole_x()
    assert_bit_equal(found(x.to(device_of(found))).cpu(), truth(x, wanted.weight_int4.to("cpu"), bias).half())


def assert_compiles(found: QuantizedLinear) -> None:
    torch._dynamo.reset()
    x = whole_x().to(device_of(found))
    compiled = torch.compile(found, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        assert_bit_equal(compiled(x), found(x))


def moved_to_meta_and_filled(made: QuantizedLinear) -> QuantizedLinear:
    state = made.state_dict()
    other = copy.deepcopy(made).to("meta").to_empty(device=device_of(made))
    other.load_state_dict(state)
    return other


def loaded(made: QuantizedLinear, assign: bool) -> QuantizedLinear:
    kept = {"bias": made.bias is not None, "zero_mode": made.zero_mode, "scale_dtype": torch.float32}
    other = blank(**kept, device="meta" if assign else device_of(made))
    other.load_state_dict(made.state_dict(), assign=assign)
    return other


def saved(made: QuantizedLinear) -> QuantizedLinear:
    buffer = io.BytesIO()
    torch.save(made.state_dict(), buffer)
    buffer.seek(0)
    other = blank(bias=made.bias is not None, zero_mode=made.zero_mode, device=device_of(made))
    other.load_state_dict(torch.load(buffer, weights_only=True))
    return other


def by_name(made: QuantizedLinear) -> QuantizedLinear:
    """One tensor at a time into a module on meta, as model loaders do."""
    other = blank(bias=made.bias is not None, zero_mode=made.zero_mode, device="meta")
    for name, value in made.state_dict().items():
        other.load_state_dict({name: value}, strict=False, assign=True)
    return other


def whole_module(made: QuantizedLinear) -> QuantizedLinear:
    buffer = io.BytesIO()
    torch.save(made, buffer)
    buffer.seek(0)
    other: QuantizedLinear = torch.load(buffer, weights_only=False)
    return other


def in_parts(made: QuantizedLinear) -> QuantizedLinear:
    """One tensor at a time over those of another weight, which is there all the time."""
    other = copy.deepcopy(made)
    other.scales = torch.ones_like(other.weight_int4.scales)
    other.finalize()
    for name, value in made.state_dict().items():
        other.load_state_dict({name: value}, strict=False)
    return other


def by_attribute(made: QuantizedLinear) -> QuantizedLinear:
    other = blank(bias=made.bias is not None, zero_mode=made.zero_mode, device="meta")
    for name, value in made.state_dict().items():
        setattr(other, name, torch.nn.Parameter(value, requires_grad=False) if name == "bias" else value)
    return other


WAYS: dict[str, Callable[[QuantizedLinear], torch.nn.Module]] = {
    "itself": lambda made: made,
    "deepcopy": copy.deepcopy,
    "copy": copy.copy,
    "pickle": lambda made: pickle.loads(pickle.dumps(made)),
    "load": lambda made: loaded(made, False),
    "load assign": lambda made: loaded(made, True),
    "save and load": saved,
    "whole module": whole_module,
    "by name": by_name,
    "in parts": in_parts,
    "by attribute": by_attribute,
    "meta and back": moved_to_meta_and_filled,
    "there": lambda made: made.to(device_of(made)),
    "to": lambda made: made.to(device_of(made), torch.float16),
    "apply": lambda made: made._apply(torch.clone),
    "half": lambda made: made.half(),
    "bfloat16 and back": lambda made: made.bfloat16().half(),
    "float and back": lambda made: made.float().to(torch.float16),
    "type": lambda made: made.type(torch.float16),
    "shared memory": lambda made: made.share_memory(),
    "finalize": lambda made: made.finalize(),
    "eval": lambda made: made.eval().requires_grad_(False),
}

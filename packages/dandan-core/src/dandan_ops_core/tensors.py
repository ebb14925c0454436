"""Questions about tensors that checks of operators ask: how memory is shared, how a tensor is shown in a message."""

from __future__ import annotations

from collections.abc import Sequence

import torch

__all__ = ["dtype_name", "overlap", "overlaps_itself", "shape_text"]


def dtype_name(dtype: torch.dtype) -> str:
    """ "float16" for torch.float16."""
    return str(dtype).removeprefix("torch.")


def shape_text(shape: Sequence[int]) -> str:
    """ "[16, 4096]" for a shape."""
    return "[" + ", ".join(str(size) for size in shape) + "]"


def overlaps_itself(t: torch.Tensor) -> bool:
    """True when two elements of `t` share memory, as far as strides tell."""
    if any(size == 0 for size in t.shape):
        return False
    extent = 1
    for stride, size in sorted((stride, size) for stride, size in zip(t.stride(), t.shape, strict=True) if size > 1):
        if stride < extent:
            return True
        extent += stride * (size - 1)
    return False


def _extent(t: torch.Tensor, first: int = 0) -> int:
    if any(size == 0 for size in t.shape):
        return 0
    return 1 + sum((size - 1) * stride for size, stride in zip(t.shape[first:], t.stride()[first:], strict=True))


def overlap(a: torch.Tensor, b: torch.Tensor) -> str:
    """How two tensors share memory: "none", "same" (element for element) or "partial".

    Slices of one tensor whose rows lie in turn, as q and k of a qkv tensor, are told apart by their columns. Tensors
    without memory (meta, fake) share none. Where strides do not tell, the answer is "partial".
    """
    if a.device != b.device or a.device.type == "meta" or isinstance(a, torch._subclasses.FakeTensor):
        return "none"
    begin_a, begin_b = a.data_ptr(), b.data_ptr()
    size_a, size_b = a.element_size(), b.element_size()
    if begin_a >= begin_b + _extent(b) * size_b or begin_b >= begin_a + _extent(a) * size_a:
        return "none"
    same_strides = all(x == y or n == 1 for x, y, n in zip(a.stride(), b.stride(), a.shape, strict=False))
    if begin_a == begin_b and size_a == size_b and a.shape == b.shape and same_strides:
        return "same"
    if size_a == size_b and a.dim() == b.dim() and a.dim() >= 2 and a.stride(0) == b.stride(0) > 0:
        step = a.stride(0) * size_a
        shift = (begin_b - begin_a) % step
        if _extent(a, 1) * size_a <= shift and shift + _extent(b, 1) * size_b <= step:
            return "none"
    return "partial"

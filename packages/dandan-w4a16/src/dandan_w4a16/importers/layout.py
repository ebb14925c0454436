"""What the importers share: nibbles of words along either dimension, and groups of another size."""

from __future__ import annotations

import torch

from dandan_ops_core.tensors import dtype_name, shape_text
from dandan_w4a16 import checks, reference
from dandan_w4a16.weight import Int4Weight

__all__ = ["canonical", "group_of", "nibbles", "trivial_order", "words"]


def words(op: str, argument: str, t: object, form: str) -> torch.Tensor:
    """`t`, if it is a two-dimensional tensor of int32 with values."""
    checked = checks.tensor(op, argument, t)
    if checked.dtype != torch.int32:
        raise TypeError(f"{op}: {argument} has dtype {dtype_name(checked.dtype)}; int32 is needed")
    if checked.dim() != 2:
        raise ValueError(f"{op}: {argument} has shape {shape_text(checked.shape)}; {form} is needed")
    if checked.device.type == "meta":
        raise ValueError(f"{op}: {argument} is on meta; a tensor with values is needed")
    return checked


def nibbles(packed: torch.Tensor) -> torch.Tensor:
    """[R, C] words to [R, 8C] codes in uint8, low nibble first along the rows."""
    return reference.unpack(packed)


def group_of(op: str, k: int, groups: int, stated: int | None, *, tail: bool = False) -> int:
    """Size of the source's groups along K, from the number of groups and from what the caller states.

    Args:
        op: what a message begins with.
        k: of the weight.
        groups: a row has.
        stated: the group size that the source declares; -1 and None leave it to the shapes.
        tail: whether the last group may be shorter.
    """
    if stated is not None and stated != -1:
        if stated < 1:
            raise ValueError(f"{op}: group_size is {stated}; a positive number, or -1 for one group a row, is needed")
        needed = -(-k // stated) if tail else k // stated
        if (not tail and k % stated != 0) or needed != groups:
            rest = f", of which {k % stated} are left over" if k % stated else ""
            raise ValueError(
                f"{op}: scales have {groups} group{'s' * (groups != 1)} a row but K={k} has {needed} of "
                f"group_size={stated}{rest}"
            )
        return stated
    if stated == -1 and groups != 1:
        raise ValueError(f"{op}: group_size=-1 is one group a row but scales have {groups}")
    if groups == 0 or k % groups != 0:
        raise ValueError(f"{op}: K={k} does not divide into the {groups} groups of scales")
    return k // groups


def trivial_order(op: str, argument: str, g_idx: object, k: int, group: int) -> None:
    """Raises unless element i of every row belongs to group i // group."""
    order = checks.integer(op, argument, g_idx)
    if order.shape != (k,):
        raise ValueError(f"{op}: {argument} has shape {shape_text(order.shape)}; {shape_text((k,))} is needed")
    wrong = (order.cpu() != torch.arange(k) // group).nonzero()
    if len(wrong):
        first = int(wrong[0])
        raise ValueError(
            f"{op}: {argument} is an activation order: column {first} is in group {int(order[first])} instead of "
            f"{first // group} (group_size={group}). The format has no order of columns; quantise without act-order "
            f"(desc_act=False, static or no actorder)"
        )


def _target(op: str, k: int, source: int, stated: int | None) -> int:
    """Group size of the result: the source's where the format has it, else the largest that divides it."""
    if stated is None:
        fitting = [size for size in checks.GROUP_SIZES if source % size == 0 and k % size == 0]
        if not fitting:
            raise ValueError(
                f"{op}: K={k} with group_size={source} has no groups of 32, 64 or 128 that lie within the source's and "
                f"divide K"
            )
        return max(fitting)
    size = checks.group_size(op, stated)
    if source % size != 0:
        raise ValueError(
            f"{op}: target_group_size={size} does not divide the source's group_size={source}; its groups would have "
            f"two scales"
        )
    if k % size != 0:
        raise ValueError(f"{op}: K={k} is not a multiple of target_group_size={size}")
    return size


def canonical(
    op: str,
    qweight: torch.Tensor,
    scales: torch.Tensor,
    zeros: torch.Tensor | None,
    group: int,
    target: int | None,
) -> Int4Weight:
    """The weight of words [N, K/8], and scales and zeros [N, groups] of `group` elements; None for zeros of 8.

    A group of the source becomes several of the result by repeating its scale and zero.
    """
    n, k = qweight.shape[0], qweight.shape[1] * 8
    size = _target(op, k, group, target)
    repeats, count = group // size, k // size
    if zeros is None:
        zeros = torch.full(scales.shape, 8, dtype=torch.uint8, device=scales.device)
    # With a tail the last group repeats less often: of 192 = 128 + 64 come three groups of 64, s0 s0 s1.
    scales, zeros = (t.repeat_interleave(repeats, 1)[:, :count].contiguous() for t in (scales, zeros))
    if scales.shape != (n, count):
        raise ValueError(f"{op}: scales have {scales.shape[0]} rows but the codes have N={n}")
    checks.values(op, scales, zeros)
    return Int4Weight(qweight.contiguous(), scales, zeros, size)

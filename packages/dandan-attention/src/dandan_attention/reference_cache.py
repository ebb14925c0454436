"""What `rope`, `write_kv` and `qk_norm_rope_write_kv` mean, in plain PyTorch: CPU kernel and torch backend.

Products are FP32; each step of the fused operator rounds as the operator that it stands for. Nothing here waits for a
CUDA device.
"""

from __future__ import annotations

import torch

__all__ = ["qk_norm_rope_write_kv", "rope", "write_kv"]


def _turn(
    x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, positions: torch.Tensor, interleaved: bool
) -> torch.Tensor:
    """x [T, H, D] turned by the angles of its positions, contiguous. Rows whose position the table has not are x's."""
    count, half = cos.shape
    if count == 0:
        return x.clone(memory_format=torch.contiguous_format)
    fits = (positions >= 0) & (positions < count)
    at = torch.where(fits, positions, 0).long()
    c, s = (table[at].float().unsqueeze(1) for table in (cos, sin))
    turning, rest = x[..., : 2 * half], x[..., 2 * half :]
    wide = turning.float()
    first, second = (wide[..., 0::2], wide[..., 1::2]) if interleaved else (wide[..., :half], wide[..., half:])
    pairs = (first * c - second * s, second * c + first * s)
    turned = torch.stack(pairs, -1).flatten(-2) if interleaved else torch.cat(pairs, -1)
    kept = torch.where(fits[:, None, None], turned.to(x.dtype), turning)
    return torch.cat((kept, rest), -1).contiguous()


def rope(
    q: torch.Tensor,
    k: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    positions: torch.Tensor,
    interleaved: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """q [T, Hq, D] and k [T, Hkv, D] turned; arguments as in the schema. Differentiable."""
    return _turn(q, cos, sin, positions, interleaved), _turn(k, cos, sin, positions, interleaved)


def write_kv(
    k: torch.Tensor, v: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, slot_mapping: torch.Tensor
) -> None:
    """Row t of k and v to slot slot_mapping[t] of the caches; slots that no page has are skipped."""
    num_pages, page_size = k_cache.shape[:2]
    if k.shape[0] == 0 or num_pages == 0:
        return
    slots = slot_mapping.long()
    fits = (slots >= 0) & (slots < num_pages * page_size)
    # The host does not know which rows are skipped. In their place the first row that is not is written again, or,
    # where all are, slot 0 with what it holds.
    some = fits.any()
    row = torch.where(fits, torch.arange(len(slots), device=slots.device), fits.int().argmax())
    slot = torch.where(some, slots[row], 0)
    page, place = slot.div(page_size, rounding_mode="floor"), slot % page_size
    for rows, cache in ((k, k_cache), (v, v_cache)):
        cache[page, place] = torch.where(some, rows[row], cache[0, 0])


def _normed(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """RMSNorm over the last dimension as dandan_norm.rms_norm has it: the weight in FP32, one rounding."""
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight.float()).to(x.dtype).contiguous()


def qk_norm_rope_write_kv(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    positions: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    eps: float = 1e-6,
    interleaved: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Queries and keys, normalised and turned; keys and v are written to the caches."""
    normed = _normed(q, q_weight, eps), _normed(k, k_weight, eps)
    queries, keys = rope(*normed, cos, sin, positions, interleaved)
    write_kv(keys, v, k_cache, v_cache, slot_mapping)
    return queries, keys

"""What the tests of paged attention share: calls, a cache in each layout, the definition in FP64, random calls."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

import torch
from attention_cases import attend64, generator

import dandan_attention

__all__ = ["LAYOUTS", "PagedCall", "caches", "paged_call", "random_paged_call", "table"]

LAYOUTS = ("plain", "stacked", "unbind", "packed", "hnd", "gaps")


def caches(shape: tuple[int, ...], dtype: torch.dtype, layout: str, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """k_cache and v_cache [pages, page_size, Hkv, D] of random values, as views of what an engine allocates."""
    pages, size, heads, d = shape

    def normal(*sizes: int) -> torch.Tensor:
        return torch.randn(sizes, generator=generator(seed)).to(dtype)

    if layout == "stacked":  # [2, layers, ...]
        both = normal(2, 3, *shape)
        return both[0, 1], both[1, 1]
    if layout == "unbind":
        halves = normal(pages, 2, size, heads, d).unbind(1)
        return halves[0], halves[1]
    if layout == "packed":  # [pages, Hkv, page_size, 2 * D]
        both = normal(pages, heads, size, 2 * d).transpose(1, 2)
        return both[..., :d], both[..., d:]
    if layout == "hnd":
        both = normal(2, pages, heads, size, d).transpose(2, 3)
        return both[0], both[1]
    if layout == "gaps":
        both = normal(2, pages, size + 1, heads + 2, d)[:, :, :size, :heads]
        return both[0], both[1]
    both = normal(2, *shape)
    return both[0], both[1]


def table(rows: list[list[int]], width: int, padding: int = -1) -> torch.Tensor:
    return torch.tensor([[*row, *[padding] * (width - len(row))] for row in rows], dtype=torch.int32).view(-1, width)


@dataclass(frozen=True)
class PagedCall:
    """One call: `lengths_q` of a packed one, None of paged_attention."""

    q: torch.Tensor
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    page_table: torch.Tensor
    lengths: list[int]
    lengths_q: list[int] | None = None
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return "paged_attention" if self.lengths_q is None else "paged_attention_varlen"

    def arguments(self) -> dict[str, Any]:
        found = {
            "q": self.q,
            "k_cache": self.k_cache,
            "v_cache": self.v_cache,
            "page_table": self.page_table,
            "seqused_k": torch.tensor(self.lengths, dtype=torch.int32),
            **self.options,
        }
        if self.lengths_q is not None:
            bounds = torch.tensor([0, *self.lengths_q]).cumsum(0)
            found["cu_seqlens_q"] = bounds.to(torch.int32)
            found["max_seqlen_q"] = max(self.lengths_q, default=0)
        return found

    def run(self, **keywords: Any) -> Any:
        return getattr(dandan_attention, self.name)(**self.arguments(), **keywords)

    def raw(self) -> tuple[Any, ...]:
        """Arguments of the operator in torch.ops."""
        given = {"softmax_scale": None, "window_size": None, "softcap": 0.0, **self.arguments()}
        names = ["q", "k_cache", "v_cache", "page_table", "seqused_k"]
        names += [] if self.lengths_q is None else ["cu_seqlens_q", "max_seqlen_q"]
        return (*(given[name] for name in (*names, "softmax_scale", "window_size", "softcap")), 0)

    def truth(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Result of q's shape and lse [rows, Hq] in FP64, token by token from the definition."""
        heads_q, d = self.q.shape[-2:]
        pages, size = self.k_cache.shape[:2]
        out = torch.zeros(self.q.shape, dtype=torch.double).view(-1, heads_q, d)
        lse = torch.full((len(out), heads_q), -torch.inf, dtype=torch.double)
        rows = self.q.reshape(-1, heads_q, d)
        sq = self.q.shape[1] if self.q.dim() == 4 else 1
        lengths_q = [sq] * len(self.lengths) if self.lengths_q is None else self.lengths_q
        scale, window = self.options.get("softmax_scale") or d**-0.5, self.options.get("window_size")
        first = 0
        for b, (live, count) in enumerate(zip(self.lengths, lengths_q, strict=True)):
            own = slice(first, first + count)
            first += count
            places = [(int(self.page_table[b, j // size]), j % size) for j in range(live)]
            keys = [j for j, (page, _) in enumerate(places) if 0 <= page < pages]
            if not keys or not count:
                continue
            k, v = (torch.stack([c[places[j]] for j in keys], 1) for c in (self.k_cache, self.v_cache))
            j, i = torch.tensor(keys), torch.arange(count).unsqueeze(1) + live - count
            mask = (j <= i) if window is None else (j <= i) & (j > i - window)
            result, its_lse = attend64(rows[own].transpose(0, 1), k, v, mask, scale, self.options.get("softcap", 0.0))
            out[own], lse[own] = result.transpose(0, 1), its_lse.t()
        return out.view(self.q.shape), lse

    def check(self, **keywords: Any) -> None:
        """Result and lse against the definition: FP32 throughout and one rounding."""
        out, lse = self.run(return_lse=True, **keywords)
        truth, its_lse = self.truth()
        assert out.shape == self.q.shape
        assert out.dtype == self.q.dtype
        known = [v for v in self.v_cache.flatten().tolist() if abs(v) < 1e5] if self.v_cache.numel() < 100 else [8.0]
        limit = torch.finfo(out.dtype).eps / 2 * truth.abs() + 4e-6 * max(map(abs, known), default=1.0) + 2.0**-25
        error = (out.double() - truth).abs()
        assert (error <= limit).all(), f"{error.max()}"
        flat = lse.t() if self.lengths_q is not None else lse.transpose(1, 2).flatten(0, 1) if lse.dim() == 3 else lse
        assert ((flat == -torch.inf) == (its_lse == -torch.inf)).all()
        seen = its_lse > -torch.inf
        assert torch.allclose(flat.double()[seen], its_lse[seen], rtol=1e-5, atol=1e-5)


def paged_call(
    lengths: list[int],
    heads: tuple[int, int] = (4, 2),
    d: int = 16,
    size: int = 4,
    dtype: torch.dtype = torch.float16,
    *,
    seqlen_q: int | None = None,
    lengths_q: list[int] | None = None,
    layout: str = "plain",
    spare: int = 2,
    width: int | None = None,
    seed: int = 0,
    **options: Any,
) -> PagedCall:
    """A call whose pages are shuffled, with `spare` pages that no sequence has."""
    needed = [-(-length // size) for length in lengths]
    ids = list(range(sum(needed) + spare))
    random.Random(seed).shuffle(ids)
    rows = []
    for count in needed:
        rows.append(ids[:count])
        ids = ids[count:]
    k_cache, v_cache = caches((sum(needed) + spare, size, heads[1], d), dtype, layout, seed)
    if lengths_q is not None:
        shape: tuple[int, ...] = (sum(lengths_q), heads[0], d)
    else:
        shape = (len(lengths), heads[0], d) if seqlen_q is None else (len(lengths), seqlen_q, heads[0], d)
    q = torch.randn(shape, generator=generator(seed + 1)).to(dtype)
    pages = table(rows, max([width or 0, 1, *needed]))
    return PagedCall(q, k_cache, v_cache, pages, lengths, lengths_q, options)


def random_paged_call(seed: int, packed: bool) -> PagedCall:
    pick = random.Random(seed)
    size = pick.choice([1, 2, 3, 4, 5, 7, 8, 16, 17])
    heads_kv = pick.choice([1, 2, 3])
    batch = pick.randint(0, 4)
    options: dict[str, Any] = {}
    if pick.random() < 0.4:
        options["window_size"] = pick.choice([1, 2, 3, 8, 1000])
    if pick.random() < 0.3:
        options["softcap"] = pick.choice([0.5, 2.0, 30.0])
    if pick.random() < 0.3:
        options["softmax_scale"] = pick.choice([0.1, 1.0])
    lengths = [pick.choice([0, 1, size, size + 1, pick.randint(0, 40)]) for _ in range(batch)]
    call = paged_call(
        lengths,
        (heads_kv * pick.choice([1, 2, 5, 7]), heads_kv),
        pick.choice([8, 16, 64]),
        size,
        pick.choice([torch.float16, torch.bfloat16]),
        seqlen_q=None if packed else pick.choice([None, 1, 2, 5, 16]),
        lengths_q=[pick.choice([0, 1, 3, 20]) for _ in range(batch)] if packed else None,
        layout=pick.choice(LAYOUTS),
        width=pick.choice([None, 45]),
        seed=seed,
        **options,
    )
    if pick.random() < 0.2 and call.page_table.numel():  # a live entry may name no page
        call.page_table[pick.randrange(batch), 0] = pick.choice([-1, call.k_cache.shape[0], 2**31 - 1])
    return call

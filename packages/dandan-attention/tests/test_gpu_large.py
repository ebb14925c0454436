"""More than 2^31 elements in q, k, v or out: offsets beyond 32 bits in every kernel."""

from __future__ import annotations

import pytest
import torch
from attention_cases import KERNELS, Call, check, dense, int32

from dandan_attention import flash_attention, flash_attention_varlen

pytestmark = [pytest.mark.gpu, pytest.mark.large]

EVERY_KERNEL = pytest.mark.parametrize("kernel", KERNELS)
BEYOND = (1 << 31) + (1 << 16)


@EVERY_KERNEL
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_views_far_apart(kernel: str, head_dim: int) -> None:
    """Sequences, heads and rows whose strides alone pass 2^31 elements; the tensors themselves are small."""
    memory = torch.empty(3 * BEYOND + (1 << 20), dtype=torch.float16, device="cuda")
    call = dense(2, (2, 2), 33, 50, head_dim, device="cuda", causal=True, query_start=17)
    expected = call.run(kernel, return_lse=True)
    for axis in range(3):
        for name in "qkv":
            t = getattr(call, name)
            strides = list(t.stride())
            # The last step along the axis starts behind 2^31 elements.
            strides[axis] = -(-BEYOND // (t.shape[axis] - 1) // 8) * 8
            far = memory.as_strided(t.shape, strides)
            far.copy_(t)
            found = call.with_(**{name: far}).run(kernel, return_lse=True)
            for mine, theirs in zip(found, expected, strict=True):
                assert torch.equal(mine, theirs), f"axis {axis} of {name}"


@EVERY_KERNEL
def test_large_tensors(kernel: str) -> None:
    """q, k, v and out of more than 2^31 elements each: the last sequences are those of a small call."""
    heads, seqlen, head_dim = 32, 512, 128
    batch = BEYOND // (heads * seqlen * head_dim) + 1
    some = dense(2, (heads, heads), seqlen, seqlen, head_dim, torch.bfloat16, device="cuda", causal=True)
    q, k, v = (t[:1].expand(batch, -1, -1, -1).contiguous() for t in some.positional)
    for mine, theirs in zip((q, k, v), some.positional, strict=True):
        mine[-1] = theirs[1]
    out = flash_attention(q, k, v, causal=True, backend=kernel)
    expected = check(some, kernel)
    assert torch.equal(out[-1], expected[1])
    assert torch.equal(out[-2], expected[0])
    assert torch.equal(out[0], expected[0])


@EVERY_KERNEL
def test_large_packed_tensors(kernel: str) -> None:
    """A sequence that starts behind 2^31 elements of q, k and v."""
    heads, head_dim = 64, 128
    total = BEYOND // (heads * head_dim) + 300
    some = dense(1, (heads, heads), 200, 200, head_dim, device="cuda", causal=True)
    q, k, v = (torch.zeros(total, heads, head_dim, dtype=torch.float16, device="cuda") for _ in range(3))
    for mine, theirs in zip((q, k, v), some.positional, strict=True):
        mine[-200:] = theirs[0].transpose(0, 1)
    cu = int32(0, 100, total - 200, total, device="cuda")
    # The long sequence between has no keys, so that it costs nothing.
    cu_k = int32(0, total - 200, total - 200, total, device="cuda")
    out = flash_attention_varlen(
        q, k, v, cu, cu_k, max_seqlen_q=total, max_seqlen_k=total, causal=True,
        query_starts=int32(0, 0, 0, device="cuda"), backend=kernel,
    )  # fmt: skip
    assert torch.equal(out[-200:].transpose(0, 1), some.run(kernel)[0])
    assert (out[100:-200] == 0).all()


@EVERY_KERNEL
def test_a_start_beyond_32_bits(kernel: str) -> None:
    """All keys lie before a query at 2^31 and more; with a window none is in sight."""
    call = dense(1, (2, 1), 65, 100, 64, device="cuda")
    for start in (2**31 - 1, 2**31, 2**33):
        options = {"causal": True, "query_start": start}
        assert torch.equal(Call(*call.positional, options).run(kernel), call.run(kernel))
        assert (Call(*call.positional, {**options, "window_size": 200}).run(kernel) == 0).all()

"""QuantizedLinear: shards for tensor parallelism, and memory while it is made, loaded and called."""

from __future__ import annotations

import pytest
import torch
from w4a16_cases import K, N, module, peak_memory, random_weight, whole_x

from dandan_ops_core.testing import assert_bit_equal
from dandan_w4a16 import QuantizedLinear, w4a16_linear

# ----------------------------------------------------------------------------------------------------------- shards


@pytest.mark.parametrize("world", [1, 2, 4])
def test_shards_of_rows(world: int) -> None:
    made, x = module(), whole_x()
    parts = [made.shard(0, rank, world) for rank in range(world)]
    assert_bit_equal(torch.cat([part(x) for part in parts], -1), made(x))
    assert all(part.out_features == N // world for part in parts)


@pytest.mark.parametrize("world", [1, 2, 4])
def test_shards_of_columns(world: int) -> None:
    """The bias is in one of them."""
    made, x = module(), whole_x()
    step = K // world
    parts = [made.shard(1, rank, world) for rank in range(world)]
    results = [part(x[:, rank * step : (rank + 1) * step]) for rank, part in enumerate(parts)]
    assert [part.bias is not None for part in parts] == [True] + [False] * (world - 1)
    assert_bit_equal(torch.stack(results).double().sum(0).half(), made(x))


def test_shard_refuses() -> None:
    with pytest.raises(ValueError, match="^Int4Weight.shard: N=24 is not a multiple of world=5$"):
        module().shard(0, 0, 5)
    with pytest.raises(ValueError, match="^Int4Weight.shard: K=256 is not a multiple of world=8 times group_size=64$"):
        module().shard(1, 0, 8)


# ----------------------------------------------------------------------------------------------------------- memory

PACKED_BYTES = 4096 * 4096 // 2 + 4096 * 64 * 3
SPARE = 12 << 20  # the largest tiles; the weight in float16 would be 32 MiB


def test_from_float_and_forward_keep_nothing_beside_the_packed_weight() -> None:
    weight = torch.randn(4096, 4096).half()
    assert peak_memory(lambda: QuantizedLinear.from_float(weight)) < PACKED_BYTES + SPARE
    made, x = QuantizedLinear.from_float(weight), torch.randn(4, 4096).half()
    assert peak_memory(lambda: made(x)) < SPARE


def test_loading_keeps_one_packed_weight() -> None:
    state = QuantizedLinear.from_packed(random_weight(4096, 4096)).state_dict()
    spare = 4 << 20  # for the check of the values

    def load() -> QuantizedLinear:
        made = QuantizedLinear(4096, 4096, bias=False, device="meta")
        made.load_state_dict(state, assign=True)
        return made

    assert peak_memory(load) < spare
    made = QuantizedLinear(4096, 4096, bias=False)
    assert peak_memory(lambda: made.load_state_dict(state)) < spare
    assert peak_memory(lambda: made.half().float()) < spare


def test_function_and_module_agree() -> None:
    made, x = module(), whole_x()
    found = w4a16_linear(x, made.qweight, made.scales, made.zeros, bias=made.bias)
    assert_bit_equal(made(x), found)

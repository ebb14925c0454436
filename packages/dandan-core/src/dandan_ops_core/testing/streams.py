"""CUDA streams that are busy."""

from __future__ import annotations

from typing import Any

import torch


def delay_stream(milliseconds: float = 20.0, stream: Any = None) -> None:
    """Keeps a CUDA stream busy (the current one by default), so that work ordered wrongly against it reads stale data.

    Work enqueued afterwards on that stream waits; the call itself returns at once.
    """
    cycles_per_ms = 2_000_000  # at 2 GHz; a slower clock makes the delay longer, which is the safe side
    with torch.cuda.stream(stream if stream is not None else torch.cuda.current_stream()):
        torch.cuda._sleep(int(milliseconds * cycles_per_ms))

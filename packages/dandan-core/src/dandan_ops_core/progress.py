"""How far a long run is: a bar on a terminal, numbered lines elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import TextIO

__all__ = ["Progress"]


class Progress:
    """A bar on a terminal; elsewhere the lines alone, each with its number."""

    def __init__(
        self, total: int, stream: TextIO | None = None, now: Callable[[], float] = time.monotonic, width: int = 24
    ) -> None:
        self._total, self._width, self._now = total, width, now
        self._stream = stream or sys.stdout
        self._bar = self._stream.isatty()
        self._begin = now()

    def step(self, done: int, text: str) -> None:
        """Prints a line and, on a terminal, the bar under it."""
        digits = len(str(self._total))
        clear = "\r\x1b[K" if self._bar else ""
        self._stream.write(f"{clear}[{done:{digits}}/{self._total}] {text}\n")
        if self._bar and done < self._total:
            full = self._width * done // self._total
            left = (self._now() - self._begin) / max(done, 1) * (self._total - done)
            bar = "#" * full + "." * (self._width - full)
            self._stream.write(f"[{bar}] {done}/{self._total}, about {_clock(left)} left")
        self._stream.flush()

    def close(self) -> None:
        """Takes the bar away."""
        if self._bar:
            self._stream.write("\r\x1b[K")
            self._stream.flush()


def _clock(seconds: float) -> str:
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"

"""A bar for people, lines for files."""

from __future__ import annotations

import io
from itertools import count

from dandan_ops_core.progress import Progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_bar_on_a_terminal_and_lines_alone_elsewhere() -> None:
    terminal, file = Terminal(), io.StringIO()
    for stream in (terminal, file):
        progress = Progress(4, stream, count(1.0).__next__, width=8)
        progress.step(1, "first")
        progress.step(4, "last")
    assert file.getvalue() == "[1/4] first\n[4/4] last\n"
    # One second for the first of four: three more are left.
    assert terminal.getvalue() == "\r\x1b[K[1/4] first\n[##......] 1/4, about 0:03 left\r\x1b[K[4/4] last\n"


def test_bar_goes_when_the_run_ends_early() -> None:
    terminal, file = Terminal(), io.StringIO()
    for stream in (terminal, file):
        progress = Progress(4, stream, count(1.0).__next__, width=4)
        progress.step(2, "second")
        progress.close()
    assert terminal.getvalue().endswith("[##..] 2/4, about 0:01 left\r\x1b[K")
    assert file.getvalue() == "[2/4] second\n"

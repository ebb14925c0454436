"""Lists of shapes: what a line stands for, and what is none."""

from __future__ import annotations

from typing import Any

import pytest

from dandan_ops_core.shape_lists import read_shapes


def shapes(text: str, **keywords: Any) -> list[tuple[str, dict[str, int], str]]:
    return list(read_shapes(text, ("m", "n", "k"), {"m": (1, 16)}, ("float16", "bfloat16"), **keywords))


def test_file_of_shapes() -> None:
    text = """
    # two layers
    m=1,4 n=64 k=32 dtype=float16 name=my layer   # mine
    n=128 k=8 dtype=bfloat16
    m=4 n=64 k=32 dtype=float16
    """
    assert shapes(text) == [
        ("my layer", {"m": 1, "n": 64, "k": 32}, "float16"),
        ("my layer", {"m": 4, "n": 64, "k": 32}, "float16"),
        ("", {"m": 1, "n": 128, "k": 8}, "bfloat16"),
        ("", {"m": 16, "n": 128, "k": 8}, "bfloat16"),
    ]
    assert len(shapes("n=1 k=1")) == 4


def test_flags_are_0_or_1() -> None:
    assert [sizes["k"] for _, sizes, _ in shapes("m=1 n=1 k=0,1 dtype=float16", flags=["k"])] == [0, 1]
    with pytest.raises(ValueError, match="line 1: k '2' is not 0 or 1"):
        shapes("n=1 k=2", flags=["k"])


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("n=4", "line 2: k is missing"),
        ("n=4 k=4 q=1", "line 2: 'q=1' is not KEY=VALUE with a key of m, n, k, dtype, name, each once"),
        ("n=4 k=4 4", "line 2: '4' is not KEY=VALUE"),
        ("n=4 k=4 n=8", "line 2: 'n=8' is not KEY=VALUE"),
        ("n=4 k=0", "line 2: k '0' is not a whole number above 0"),
        ("n=4 k=1,", "line 2: k '' is not a whole number above 0"),
        ("n=4 k=1.5", "line 2: k '1.5' is not a whole number above 0"),
        ("n=4 k=4 dtype=float32", "line 2: dtype 'float32' is not one of float16, bfloat16"),
    ],
)
def test_line_that_is_no_shape(line: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        shapes(f"# shapes\n{line}\n")

"""Lists of shapes that people write: one line a product of lists. Plain Python, no torch."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from typing import Any

__all__ = ["read_shapes"]


def read_shapes(
    text: str,
    keys: Sequence[str],
    defaults: Mapping[str, Sequence[int]],
    dtypes: Sequence[str],
    flags: Sequence[str] = (),
) -> Iterator[tuple[str, dict[str, int], str]]:
    """The shapes of a user's file: (name, sizes, dtype), each once.

    A line is `m=1,8,64 n=4096 k=4096 dtype=float16 name=my layer`: lists give every combination, a key of `defaults`
    and the dtype may be missing, the name takes the rest of the line, `#` begins a comment. Sizes are above 0, a key of
    `flags` is 0 or 1.

    Raises:
        ValueError: a line does not fit; the message has its number and the rule.
    """
    seen: set[object] = set()
    for number, line in enumerate(text.splitlines(), 1):
        content = line.partition("#")[0].strip()
        if not content:
            continue
        content, _, name = re.sub(r"\s+", " ", f" {content}").partition(" name=")
        values: dict[str, Sequence[Any]] = {**defaults, "dtype": list(dtypes)}
        given: set[str] = set()
        for item in content.split():
            key, sign, listed = item.partition("=")
            if not sign or key not in (*keys, "dtype") or key in given:
                wanted = ", ".join([*keys, "dtype", "name"])
                raise ValueError(f"line {number}: {item!r} is not KEY=VALUE with a key of {wanted}, each once")
            given.add(key)
            values[key] = [_entry(number, key, each, dtypes, flags) for each in listed.split(",")]
        missing = [key for key in keys if key not in values]
        if missing:
            raise ValueError(f"line {number}: {missing[0]} is missing")
        for combination in product(*(values[key] for key in (*keys, "dtype"))):
            if combination not in seen:
                seen.add(combination)
                yield name.strip(), dict(zip(keys, combination[:-1], strict=True)), combination[-1]


def _entry(number: int, key: str, text: str, dtypes: Sequence[str], flags: Sequence[str]) -> Any:
    if key == "dtype":
        if text not in dtypes:
            raise ValueError(f"line {number}: dtype {text!r} is not one of {', '.join(dtypes)}")
        return text
    if key in flags:
        if text not in ("0", "1"):
            raise ValueError(f"line {number}: {key} {text!r} is not 0 or 1")
    elif not re.fullmatch(r"[1-9][0-9]*", text):
        raise ValueError(f"line {number}: {key} {text!r} is not a whole number above 0")
    return int(text)

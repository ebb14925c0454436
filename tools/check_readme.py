#!/usr/bin/env python3
"""Check that README.md and README.zh-CN.md hold the same code blocks, in the same order.

python tools/check_readme.py
"""

from __future__ import annotations

import argparse
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FENCE = re.compile(
    r"^(?P<fence>`{3,}|~{3,})(?P<language>[^\n`]*)\n(?P<body>.*?)^(?P=fence)[ \t]*$", re.MULTILINE | re.DOTALL
)


def code_blocks(text: str) -> list[tuple[str, str]]:
    """(language, content) of each fenced block; trailing white space does not count."""
    found = []
    for match in FENCE.finditer(text.replace("\r\n", "\n")):
        body = "\n".join(line.rstrip() for line in match["body"].splitlines())
        found.append((match["language"].strip(), body))
    return found


def compare(first: str, second: str) -> list[str]:
    """What differs between the code blocks of two texts."""
    ours, theirs = code_blocks(first), code_blocks(second)
    if not ours:
        return ["README.md has no code block"]
    problems = []
    if len(ours) != len(theirs):
        problems.append(f"README.md has {len(ours)} code blocks, README.zh-CN.md has {len(theirs)}")
    for number, (mine, other) in enumerate(zip(ours, theirs, strict=False), start=1):
        if mine != other:
            start = mine[1].splitlines()[0] if mine[1] else "(empty)"
            problems.append(f"code block {number} ({start!r}) differs in README.zh-CN.md")
    return problems


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    texts = [(ROOT / name).read_text(encoding="utf-8") for name in ("README.md", "README.zh-CN.md")]
    problems = compare(*texts)
    if problems:
        raise SystemExit("\n".join(f"error: {problem}" for problem in problems))
    print(f"README.md and README.zh-CN.md have the same {len(code_blocks(texts[0]))} code blocks")


if __name__ == "__main__":
    main()

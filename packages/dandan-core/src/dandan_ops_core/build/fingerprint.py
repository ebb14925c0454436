"""Fingerprints of kernel families: they change when the code does, not when its comments or layout do."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from pathlib import Path

from .errors import BuildError

_INCLUDE = re.compile(r'^#include(?:"([^"]+)"|<(dandan/[^>]+)>)', re.MULTILINE)

# Raw strings first, since they may hold anything; then the other literals, comments, line joins.
_PIECES = re.compile(
    r"""(?P<raw>(?:u8|[uUL])?R"(?P<mark>[^()\\\s]{0,16})\(.*?\)(?P=mark)")"""
    r"""|(?P<text>"(?:\\.|[^"\\\n])*"|(?<![0-9A-Fa-f])'(?:\\.|[^'\\\n])*')"""
    r"""|(?P<comment>//[^\n]*|/\*.*?\*/)""",
    re.DOTALL,
)
_WORD = re.compile(r"[\w\x00\x01]")  # a literal's placeholder counts as a word: `L "a"` is not `L"a"`
_OPERATORS = "+-*/%&|^<>=!:.#?"


def normalise(text: str) -> str:
    """C++ source without what does not matter: comments, white space between tokens, line ends, joined lines.

    White space stays, as one space, where taking it out could join two tokens into another (`int x`, `a + +b`), and
    inside literals. A preprocessor directive keeps its own line and the spaces in it, because `#define F (x)` is not
    `#define F(x)`.
    """
    text = text.removeprefix("\ufeff").replace("\r\n", "\n").replace("\r", "\n").replace("\\\n", "")
    literals: list[str] = []

    def keep(match: re.Match[str]) -> str:
        if match["comment"] is not None:
            return "\n" if match["comment"].startswith("//") else " "
        literals.append(match[0])
        return f"\x00{len(literals) - 1}\x01"

    text = _PIECES.sub(keep, text)
    lines: list[str] = []
    code: list[str] = []
    for line in text.split("\n"):
        stripped = line.strip()
        if stripped.startswith("#"):
            lines.append(_squeeze(" ".join(code)))
            code = []
            directive = "#" + re.sub(r"\s+", " ", stripped[1:].lstrip())
            lines.append(re.sub(r"^#include (?=[<\x00])", "#include", directive))
        elif stripped:
            code.append(stripped)
    lines.append(_squeeze(" ".join(code)))
    joined = "\n".join(line for line in lines if line)
    return re.sub("\x00(\\d+)\x01", lambda match: literals[int(match[1])], joined)


def _squeeze(code: str) -> str:
    """Drop each run of white space, or make it one space where without it two tokens could be another one."""

    def gap(match: re.Match[str]) -> str:
        before, after = code[match.start() - 1], code[match.end()]
        words = _WORD.match(before) and _WORD.match(after)
        return " " if words or (before in _OPERATORS and after in _OPERATORS) else ""

    return re.sub(r"\s+", gap, code.strip())


def _includes(normalised: str, holder: Path, include_root: Path) -> Iterator[Path]:
    for quoted, angled in _INCLUDE.findall(normalised):
        if quoted:
            path = holder.parent / quoted
            if path.is_file():  # a toolkit header in quotes is not ours
                yield path.resolve()
        else:
            path = include_root / angled
            if not path.is_file():
                raise BuildError(f"{holder} includes <{angled}>, which is not in {include_root}.")
            yield path.resolve()


def closure(source: Path, include_root: Path) -> dict[Path, str]:
    """The file and all it includes with "..." or <dandan/...>, directly or not: path -> normalised text."""
    found: dict[Path, str] = {}
    waiting = [source.resolve()]
    while waiting:
        path = waiting.pop()
        if path in found:
            continue
        found[path] = normalise(path.read_bytes().decode("utf-8"))
        waiting.extend(_includes(found[path], path, include_root))
    return found


def _logical_name(path: Path, csrc: Path, include_root: Path) -> str:
    for root in (csrc, include_root):
        if path.is_relative_to(root):
            return path.relative_to(root).as_posix()
    return path.name


def fingerprint(source: Path, csrc: Path, include_root: Path) -> str:
    """16 hex digits for one .cu file and everything of ours that it includes."""
    csrc, include_root = csrc.resolve(), include_root.resolve()
    digest = hashlib.sha256()
    parts = {_logical_name(path, csrc, include_root): text for path, text in closure(source, include_root).items()}
    for name in sorted(parts):
        digest.update(f"{name}\n{len(parts[name])}\n{parts[name]}\n".encode())
    return digest.hexdigest()[:16]


def fingerprints(csrc: Path, include_root: Path | None = None) -> dict[str, str]:
    """Fingerprint per kernel family of a package: file stem of each csrc/*.cu -> 16 hex digits.

    `include_root` is the folder that holds dandan/ (default: this installation's). Needs no compiler.
    """
    root = include_root if include_root is not None else default_include_root()
    return {source.stem: fingerprint(source, csrc, root) for source in sorted(csrc.glob("*.cu"))}


def default_include_root() -> Path:
    """The include folder of the dandan_ops_core that runs."""
    return Path(__file__).resolve().parent.parent / "include"

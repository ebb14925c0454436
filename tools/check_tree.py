#!/usr/bin/env python3
"""Check the directions of dependency in the tree, and the files that must agree.

    python tools/check_tree.py

Python: dandan-ops -> operator packages -> dandan-core; operator packages do not import each other.
C++: ptx -> nothing; tile -> ptx; kernel (.cuh) -> tile, ptx; launcher (.cu) -> kernels and what launching needs of host
(launch.h, shared_memory.h, tensor_map.h); plain headers (.h) -> host and plain headers; bindings.cpp -> everything but
kernels. What nvcc compiles never reaches a torch header.
Each package carries the repository's LICENSE.
"""

from __future__ import annotations

import argparse
import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CORE = "dandan_ops_core"
INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]*(?:"([^"]+)"|<([^>]+)>)', re.MULTILINE)
COMMENT = re.compile(r"/\*.*?\*/|//[^\n]*", re.DOTALL)
LAUNCH = ("launch.h", "shared_memory.h", "tensor_map.h")  # of dandan/host: what a launcher needs, without torch
TORCH = re.compile(r"^(torch|ATen|c10|caffe2)/")

# layer -> what it may include of ours; a layer may include itself
ALLOWED = {
    "ptx": {"ptx"},
    "tile": {"tile", "ptx"},
    "host": {"host"},
    "kernel": {"kernel", "tile", "ptx", "params"},
    "launcher": {"kernel", "launch", "params"},
    "params": {"params", "host", "launch", "tile-data"},
    "bindings": {"params", "host", "launch", "tile", "ptx", "tile-data"},
}
READABLE = {
    "ptx": "dandan/ptx",
    "tile": "dandan/tile",
    "tile-data": "a plain header of dandan/tile",
    "host": "dandan/host",
    "launch": "dandan/host (launching)",
    "kernel": "a kernel (.cuh)",
    "launcher": "a launcher (.cu)",
    "params": "a plain header (.h)",
    "bindings": "bindings.cpp",
}


def modules(root: Path) -> dict[str, Path]:
    """Import name -> source folder, of every package."""
    return {path.name: path for path in sorted(root.glob("packages/*/src/*")) if (path / "__init__.py").is_file()}


def imports(source: Path) -> Iterator[tuple[int, str]]:
    """Top-level names that a Python file imports, in any form that names them: (line, name)."""
    for node in ast.walk(ast.parse(source.read_text(encoding="utf-8"), str(source))):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name.split(".")[0]
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            yield node.lineno, node.module.split(".")[0]
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if called in ("import_module", "__import__") and isinstance(node.args[0].value, str):
                yield node.lineno, node.args[0].value.split(".")[0]


def check_python(root: Path) -> list[str]:
    """Imports that run against the direction of dependency."""
    ours = modules(root)
    operators = {name for name, path in ours.items() if (path.parent.parent / "csrc").is_dir()}
    problems = []
    for name, folder in ours.items():
        if name == CORE:
            allowed = {CORE}
        elif name in operators:
            allowed = {CORE, name}
        else:
            allowed = set(ours)
        for source in sorted(folder.rglob("*.py")):
            for line, imported in imports(source):
                if imported in ours and imported not in allowed:
                    problems.append(f"{source.relative_to(root)}:{line}: {name} must not import {imported}")
    return problems


def layer(path: Path, include_root: Path) -> str | None:
    """The layer of one of our C++ files."""
    if path.is_relative_to(include_root):
        parts = path.relative_to(include_root).parts  # dandan/ptx/x.cuh
        if parts[1] == "host" and parts[2:] in [(name,) for name in LAUNCH]:
            return "launch"
        if parts[1] == "tile" and path.suffix == ".h":
            return "tile-data"  # plain structs that parameters and kernels share; no CUDA in them
        return parts[1] if parts[1] in ("ptx", "tile", "host") else None
    return {".cuh": "kernel", ".cu": "launcher", ".h": "params", ".cpp": "bindings"}.get(path.suffix)


def allowed(holder: str, held: str) -> bool:
    if holder == "tile-data":
        return held == "tile-data"
    if holder == "launch":
        return held in ("launch", "host")
    names = ALLOWED[holder]
    return held in names or (held == "tile-data" and "tile" in names) or (held == "launch" and holder == "host")


def included(path: Path) -> Iterator[tuple[int, str, bool]]:
    """(line, name, in quotes) of each include of a file; comments do not count."""

    def blank(match: re.Match[str]) -> str:
        return re.sub(r"[^\n]", " ", match[0])

    text = COMMENT.sub(blank, path.read_text(encoding="utf-8"))
    for match in INCLUDE.finditer(text):
        yield text.count("\n", 0, match.start()) + 1, match[1] or match[2], match[1] is not None


def resolve(name: str, quoted: bool, holder: Path, include_root: Path) -> Path | None:
    """The file of ours that an include names, or None for somebody else's."""
    for path in ([holder.parent / name] if quoted else []) + [include_root / name]:
        if path.is_file():
            return path.resolve()
    return None


def check_cpp(root: Path) -> list[str]:
    """Includes that run against the layers, missing files of ours, torch headers where nvcc would parse them."""
    include_root = (root / f"packages/dandan-core/src/{CORE}/include").resolve()
    files = [path for path in include_root.rglob("*") if path.suffix in (".h", ".cuh", ".hpp")]
    for csrc in root.glob("packages/*/csrc"):
        files += [path for path in csrc.resolve().rglob("*") if path.suffix in (".h", ".cuh", ".cu", ".cpp")]
    problems = []
    graph: dict[Path, list[Path]] = {}
    torch: dict[Path, str] = {}
    for path in sorted(files):
        shown, mine = path.relative_to(root.resolve()), layer(path, include_root)
        if mine is None:
            problems.append(f"{shown}: belongs to no layer (dandan/ptx, dandan/tile, dandan/host; .cuh, .cu, .h, .cpp)")
            continue
        graph[path] = []
        for line, name, quoted in included(path):
            target = resolve(name, quoted, path, include_root)
            if target is not None:
                graph[path].append(target)
                held = layer(target, include_root)
                if held is not None and not allowed(mine, held):
                    problems.append(f"{shown}:{line}: {READABLE[mine]} must not include {READABLE[held]}: {name}")
            elif name.startswith("dandan/"):
                problems.append(f"{shown}:{line}: {name} does not exist")
            elif TORCH.match(name):
                torch[path] = name
                if mine not in ("bindings", "host"):
                    problems.append(f"{shown}:{line}: {READABLE[mine]} must not include a torch header: {name}")
    for path in graph:
        if path.suffix == ".cu":
            for reached in reach(path, graph):
                if reached in torch:
                    shown, through = path.relative_to(root.resolve()), reached.relative_to(root.resolve())
                    problems.append(f"{shown}: nvcc would parse {torch[reached]}, included by {through}")
    return problems


def reach(start: Path, graph: dict[Path, list[Path]]) -> set[Path]:
    """Everything that a file includes, directly or not, and itself."""
    found: set[Path] = set()
    waiting = [start]
    while waiting:
        path = waiting.pop()
        if path not in found:
            found.add(path)
            waiting += graph.get(path, [])
    return found


def check_licences(root: Path) -> list[str]:
    """Packages whose LICENSE is missing or another."""
    wanted = (root / "LICENSE").read_bytes()
    problems = []
    for settings in sorted(root.glob("packages/*/pyproject.toml")):
        licence = settings.parent / "LICENSE"
        if not licence.is_file() or licence.read_bytes() != wanted:
            problems.append(f"{licence.relative_to(root)}: is not the repository's LICENSE")
    return problems


def check(root: Path) -> list[str]:
    problems = check_python(root) + check_cpp(root) + check_licences(root)
    if not modules(root):
        problems.append(f"{root}: no package found under packages/*/src")
    return problems


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    problems = check(ROOT)
    if problems:
        raise SystemExit("\n".join(f"error: {problem}" for problem in problems))
    print(f"dependencies of {len(modules(ROOT))} packages point the right way")


if __name__ == "__main__":
    main()

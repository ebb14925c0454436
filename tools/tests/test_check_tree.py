"""Each rule of check_tree holds on a good tree and fails on a bad one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

CORE = "packages/dandan-core/src/dandan_ops_core"
NORM = "packages/dandan-norm"
FILES = {
    "LICENSE": "MIT\n",
    "packages/dandan-core/pyproject.toml": "",
    "packages/dandan-core/LICENSE": "MIT\n",
    f"{CORE}/__init__.py": "import torch\n",
    f"{CORE}/include/dandan/ptx/pdl.cuh": "#include <cstdint>\n",
    f"{CORE}/include/dandan/tile/rows.cuh": "#include <dandan/ptx/pdl.cuh>\n#include <dandan/tile/row_map.h>\n",
    f"{CORE}/include/dandan/tile/row_map.h": "#include <cstdint>\n",
    f"{CORE}/include/dandan/host/launch.h": "#include <cuda_runtime.h>\n",
    f"{CORE}/include/dandan/host/tensor_map.h": "#include <dandan/host/launch.h>\n",
    f"{CORE}/include/dandan/host/checks.h": "#include <torch/csrc/stable/tensor.h>\n",
    f"{NORM}/pyproject.toml": "",
    f"{NORM}/LICENSE": "MIT\n",
    f"{NORM}/src/dandan_norm/__init__.py": "from dandan_ops_core import backend\nfrom . import ops\n",
    f"{NORM}/src/dandan_norm/ops.py": "def f():\n    import dandan_ops_core.loader\n",
    f"{NORM}/csrc/norm.h": "#include <dandan/tile/row_map.h>\n",
    f"{NORM}/csrc/sm80_row.cuh": '#include "norm.h"\n#include <dandan/tile/rows.cuh>\n',
    f"{NORM}/csrc/sm80_row.cu": '#include "sm80_row.cuh"\n#include <dandan/host/launch.h>\n'
    "#include <dandan/host/tensor_map.h>\n",
    f"{NORM}/csrc/bindings.cpp": '#include "norm.h"\n#include <dandan/host/checks.h>\n#include <torch/a.h>\n',
    "packages/dandan-gemm/pyproject.toml": "",
    "packages/dandan-gemm/LICENSE": "MIT\n",
    "packages/dandan-gemm/csrc/bindings.cpp": "",
    "packages/dandan-gemm/src/dandan_gemm/__init__.py": "",
    "packages/dandan-ops/pyproject.toml": "",
    "packages/dandan-ops/LICENSE": "MIT\n",
    "packages/dandan-ops/src/dandan_ops/__init__.py": "import dandan_norm, dandan_gemm, dandan_ops_core\n",
}


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    for name, text in FILES.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path


def test_a_good_tree_passes(tool: Callable[[str], ModuleType], tree: Path) -> None:
    assert tool("check_tree").check(tree) == []


@pytest.mark.parametrize(
    ("name", "added", "problem"),
    [
        (f"{NORM}/src/dandan_norm/ops.py", "import dandan_gemm", "dandan_norm must not import dandan_gemm"),
        (f"{NORM}/src/dandan_norm/ops.py", "def g():\n    from dandan_gemm.x import y", "must not import dandan_gemm"),
        (f"{NORM}/src/dandan_norm/ops.py", "importlib.import_module('dandan_ops.x')", "must not import dandan_ops"),
        (f"{CORE}/__init__.py", "import dandan_norm", "dandan_ops_core must not import dandan_norm"),
        (
            f"{CORE}/include/dandan/ptx/pdl.cuh",
            "#include <dandan/tile/rows.cuh>",
            "dandan/ptx must not include dandan/tile",
        ),
        (
            f"{CORE}/include/dandan/tile/rows.cuh",
            "#include <dandan/host/launch.h>",
            "dandan/tile must not include dandan/host",
        ),
        (f"{CORE}/include/dandan/tile/row_map.h", "#include <dandan/ptx/pdl.cuh>", "must not include dandan/ptx"),
        (
            f"{CORE}/include/dandan/host/launch.h",
            "#include <torch/all.h>",
            "must not include a torch header: torch/all.h",
        ),
        (
            f"{CORE}/include/dandan/host/checks.h",
            '#  include "../tile/rows.cuh"',
            "dandan/host must not include dandan/tile",
        ),
        (
            f"{NORM}/csrc/sm80_row.cuh",
            "#include <dandan/host/launch.h>",
            "a kernel (.cuh) must not include dandan/host",
        ),
        (
            f"{NORM}/csrc/sm80_row.cu",
            "#include <dandan/tile/rows.cuh>",
            "a launcher (.cu) must not include dandan/tile",
        ),
        (
            f"{NORM}/csrc/sm80_row.cu",
            "#include <dandan/host/checks.h>",
            "a launcher (.cu) must not include dandan/host",
        ),
        (f"{NORM}/csrc/sm80_row.cu", "#include <torch/types.h>", "must not include a torch header: torch/types.h"),
        (f"{NORM}/csrc/bindings.cpp", '#include "sm80_row.cuh"', "bindings.cpp must not include a kernel (.cuh)"),
        (f"{NORM}/csrc/norm.h", '#include "sm80_row.cuh"', "a plain header (.h) must not include a kernel (.cuh)"),
        (
            f"{NORM}/csrc/norm.h",
            "#include <dandan/host/checks.h>",
            "sm80_row.cu: nvcc would parse torch/csrc/stable/tensor.h",
        ),
        (f"{NORM}/csrc/norm.h", "#include <dandan/tile/none.h>", "dandan/tile/none.h does not exist"),
        (f"{CORE}/include/dandan/misc/x.h", "", "belongs to no layer"),
        (f"{NORM}/LICENSE", "another", "is not the repository's LICENSE"),
    ],
)
def test_each_rule_can_fail(tool: Callable[[str], ModuleType], tree: Path, name: str, added: str, problem: str) -> None:
    path = tree / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text((path.read_text() if path.exists() else "") + added + "\n")
    assert any(problem in found for found in tool("check_tree").check(tree)), tool("check_tree").check(tree)


def test_comments_do_not_count(tool: Callable[[str], ModuleType], tree: Path) -> None:
    path = tree / f"{NORM}/csrc/bindings.cpp"
    path.write_text(path.read_text() + '// #include "sm80_row.cuh"\n/*\n#include "sm80_row.cuh"\n*/\n')
    assert tool("check_tree").check(tree) == []


def test_an_empty_tree_does_not_pass(tool: Callable[[str], ModuleType], tmp_path: Path) -> None:
    (tmp_path / "LICENSE").write_text("")
    assert any("no package found" in problem for problem in tool("check_tree").check(tmp_path))

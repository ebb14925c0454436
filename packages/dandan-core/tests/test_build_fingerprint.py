"""Fingerprints: what must change them, and what must not."""

from __future__ import annotations

from pathlib import Path

import pytest

from dandan_ops_core.build.errors import BuildError
from dandan_ops_core.build.fingerprint import fingerprints, normalise

KERNEL = """// A kernel.
#include "row.cuh"
#include <dandan/tile/reduce.cuh>
#include <cuda_fp16.h>

#define SCALE(x) \\
    ((x) * 2)

__global__ void row(float* x, int n) {
    /* one
       row */
    const char* name = "a // b   c";
    if (n > 0) x[0] = SCALE(x[0]) + +x[1];  // why
}
"""
FILES = {
    "csrc/sm80_row.cu": KERNEL,
    "csrc/row.cuh": '#pragma once\n#include "params.h"\ninline int width() { return 1; }\n',
    "csrc/sm80_stream.cu": '#include "params.h"\n__global__ void stream(float* x) { x[0] = 1; }\n',
    "csrc/params.h": "#pragma once\nstruct Params { int n; };\n",
    "csrc/routes.h": "#pragma once\nint route();\n",
    "csrc/bindings.cpp": '#include "routes.h"\n',
    "include/dandan/tile/reduce.cuh": "#include <dandan/ptx/shfl.cuh>\ninline int reduce() { return 3; }\n",
    "include/dandan/ptx/shfl.cuh": "#pragma once\ninline int shfl() { return 4; }\n",
}


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    for name, text in FILES.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path


def of(tree: Path) -> dict[str, str]:
    return fingerprints(tree / "csrc", tree / "include")


def change(tree: Path, name: str, old: str, new: str) -> None:
    path = tree / name
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


def test_one_per_kernel_file(tree: Path) -> None:
    found = of(tree)
    assert list(found) == ["sm80_row", "sm80_stream"]
    assert all(len(value) == 16 and int(value, 16) >= 0 for value in found.values())
    assert found["sm80_row"] != found["sm80_stream"]


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("// A kernel.\n", ""),
        ("  // why", ""),
        ("    /* one\n       row */\n", ""),
        ("    if (n > 0)", "\tif(n>0)\n"),
        ("float* x, int n", "float  *x,int n"),
        ("x[0]) + +x[1]", "x[0])+ +x[1]"),
        ("\n\n", "\n\n\n\n"),
        ("SCALE(x) \\\n    ((x) * 2)", "SCALE(x)   ((x) * 2)"),
        ('#include "row.cuh"', '#  include   "row.cuh"  // why'),
        ("#include <dandan/tile/reduce.cuh>", "# include<dandan/tile/reduce.cuh>"),
        ('name = "', 'name="'),
    ],
)
def test_layout_and_comments_do_not_matter(tree: Path, old: str, new: str) -> None:
    before = of(tree)
    change(tree, "csrc/sm80_row.cu", old, new)
    assert of(tree) == before


def test_line_ends_and_marks_do_not_matter(tree: Path) -> None:
    before = of(tree)
    for path in tree.rglob("*.*"):
        path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes().replace(b"\n", b"\r\n"))
    assert of(tree) == before


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("a // b   c", "a // b c"),  # inside a literal white space and slashes count
        ("x[0]) + +x[1]", "x[0]) ++x[1]"),
        ("n > 0", "n > 1"),
        ("float* x", "floatx"),
        ("SCALE(x) \\\n    ((x)", "SCALE (x) \\\n    ((x)"),  # a macro without arguments
        ("#include <cuda_fp16.h>\n", ""),
        ("const char*", "char*"),
    ],
)
def test_code_matters(tree: Path, old: str, new: str) -> None:
    before = of(tree)
    change(tree, "csrc/sm80_row.cu", old, new)
    after = of(tree)
    assert after["sm80_row"] != before["sm80_row"]
    assert after["sm80_stream"] == before["sm80_stream"]


@pytest.mark.parametrize(
    ("name", "old", "new", "changed"),
    [
        ("csrc/row.cuh", "return 1", "return 2", {"sm80_row"}),
        ("csrc/params.h", "int n", "long n", {"sm80_row", "sm80_stream"}),
        ("include/dandan/tile/reduce.cuh", "return 3", "return 5", {"sm80_row"}),
        ("include/dandan/ptx/shfl.cuh", "return 4", "return 5", {"sm80_row"}),  # through another header
        ("csrc/routes.h", "int route", "long route", set()),
        ("csrc/bindings.cpp", "routes.h", "row.cuh", set()),
    ],
)
def test_a_header_changes_only_what_includes_it(tree: Path, name: str, old: str, new: str, changed: set[str]) -> None:
    before = of(tree)
    change(tree, name, old, new)
    after = of(tree)
    assert {stem for stem in after if after[stem] != before[stem]} == changed


def test_the_folder_does_not_matter(tree: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    other = tmp_path_factory.mktemp("elsewhere")
    for name, text in FILES.items():
        path = other / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    assert of(other) == of(tree)


def test_includes_in_a_circle_end(tree: Path) -> None:
    change(tree, "csrc/params.h", "#pragma once\n", '#pragma once\n#include "row.cuh"\n')
    assert len(of(tree)) == 2


def test_a_missing_header_of_ours_is_an_error(tree: Path) -> None:
    (tree / "include/dandan/ptx/shfl.cuh").unlink()
    with pytest.raises(BuildError, match=r"reduce\.cuh includes <dandan/ptx/shfl\.cuh>, which is not in"):
        of(tree)


def test_an_include_in_a_comment_is_none(tree: Path) -> None:
    before = of(tree)
    change(tree, "csrc/sm80_stream.cu", "__global__", "// #include <dandan/none.cuh>\n__global__")
    assert of(tree) == before


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("int  a ;\n\n int b;", "int a;int b;"),
        ("a+ +b; a ++b; f() + +b;", "a+ +b;a++b;f()+ +b;"),
        ('asm("x // y" /* z */ : "=r"(a));', 'asm("x // y":"=r"(a));'),
        ('R"(  // kept  )" ;', 'R"(  // kept  )";'),
        ("1'000 + 'c' + '\"' // x", "1'000+'c'+'\"'"),
        ("int a; // b \\\n c\nint d;", "int a;int d;"),
        ("#if A  /* b */\nx\n#endif", "#if A\nx\n#endif"),
    ],
)
def test_normalise(text: str, expected: str) -> None:
    assert normalise(text) == expected

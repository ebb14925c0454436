"""tools/report.py on a small project: it renders what the records give, and --check fails on every kind of lie."""

from __future__ import annotations

import importlib.util
import json
import sys
import xml.etree.ElementTree as ET
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

TOOLS = Path(__file__).resolve().parents[1]


def _load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"tools_{name}", TOOLS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


report = _load("report")

CASES = """
from dandan_ops_core.records import Case
CASES = [
    Case("plain", "rms_norm", "grid", {"rows": rows, "cols": 4096}, dtype, bytes=rows * 16384)
    for rows in (1, 16384) for dtype in ("float16", "bfloat16")
] + [Case("plain", "argmax", "logits", {"rows": 8, "cols": 151936}, "float16", bytes=2430976)]
"""
VIEWS = ("summary", "grid rms_norm float16", "cases argmax", "cases", "host", "chart")
KERNEL = "__global__ void f() {}\n"


class Tree:
    """A project with one package, one record and the documents that show it."""

    def __init__(self, root: Path) -> None:
        self.root = root
        package = root / "packages" / "dandan-norm"
        self.put("packages/dandan-norm/benchmarks/cases.py", CASES)
        self.put("packages/dandan-norm/csrc/sm80_row.cu", KERNEL)
        self.put("packages/dandan-core/src/dandan_ops_core/include/dandan/ptx/x.h", "")
        self.kernel = report.fingerprints(package / "csrc", root)["sm80_row"]
        self.result = root / "docs" / "results" / "dandan-norm" / "h200-plain.json"
        self.put(str(self.result.relative_to(root)), json.dumps(self.record()))
        markers = "\n".join(
            f"<!-- report:begin {name} -->\nold\n<!-- report:end {name} -->\n"
            for name in (f"dandan-norm/h200-plain {view}" for view in VIEWS)
        )
        self.put("README.md", f"# Title\n\n{markers}\nafter\n")
        self.put("README.zh-CN.md", f"# 标题\n\n{markers}")
        self.put("docs/deep/page.md", markers)
        self.put("docs/plain.md", "no markers\n")

    def put(self, name: str, text: str) -> None:
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")

    def row(self, **changes: Any) -> dict[str, Any]:
        return {
            "op": "rms_norm",
            "case": "grid",
            "variant": "auto",
            "shape": {"rows": 1, "cols": 4096},
            "dtype": "float16",
            "kernel_fingerprint": self.kernel,
            "route": "sm80_row",
            "us": 1.5,
            "spread": 0.01,
            "peers": {"vllm": 1.8, "torch": 4.0},
            "best_peer": "vllm",
            "ratio": 1.2,
            "bound_us": 0.5,
            "host_us": 7.25,
            "peers_host": {"torch": 8.9},
            "bytes": 16384,
            **changes,
        }

    def record(self) -> dict[str, Any]:
        large = {"rows": 16384, "cols": 4096}
        slow = {"us": 64.0, "peers": {"vllm": 70.4}, "ratio": 1.1, "bytes": 268435456}
        logits = {"op": "argmax", "case": "logits", "shape": {"rows": 8, "cols": 151936}, "bytes": 2430976}
        return {
            "schema": 1,
            "package": "dandan-norm",
            "topic": "plain",
            "date": "2026-12-02",
            "environment": {"gpu": "NVIDIA H200", "driver": "580.1", "sm_clock": 1980, "torch": "2.11.0+cu130",
                            "cuda": "13.0", "python": "3.12.1", "package_version": "0.1.0"},
            "peers_unavailable": {"fa3": "no file"},
            "rows": [self.row(), self.row(dtype="bfloat16"), self.row(shape=large, **slow),
                     self.row(shape=large, dtype="bfloat16", **slow), self.row(**logits)],
        }  # fmt: skip

    def change(self, how: Callable[[dict[str, Any]], Any]) -> None:
        data = json.loads(self.result.read_text())
        how(data)
        self.result.write_text(json.dumps(data))

    def write(self) -> int:
        return int(report.main(["--root", str(self.root)]))

    def check(self) -> list[str]:
        return list(report.check(report.Project(self.root)))

    def readme(self) -> str:
        return (self.root / "README.md").read_text(encoding="utf-8")


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    made = Tree(tmp_path)
    assert made.write() == 0
    return made


def test_rendered_project_passes_its_check_and_stays_as_it_is(tree: Tree, capsys: pytest.CaptureFixture[str]) -> None:
    assert tree.check() == []
    assert report.main(["--root", str(tree.root), "--check"]) == 0
    before = tree.readme()
    capsys.readouterr()
    assert tree.write() == 0
    assert capsys.readouterr().out == ""
    assert tree.readme() == before


def test_tables_say_what_the_record_says(tree: Tree) -> None:
    text = tree.readme()
    assert "| `rms_norm` | 4 | 1.15 | 1.10 | 16384 × 4096 float16 | 4.19–4.19 |" in text
    assert "| `argmax` | 1 | 1.20 | 1.20 | 8 × 151936 float16 |  |" in text
    assert "| rows \\ cols | 4096 |" in text
    assert "| 16384 | 64.00 (1.10) |" in text
    assert "| `argmax` | logits | 8 × 151936 | float16 | `sm80_row` | 1.50 | 33 % | vllm | 1.80 | 1.20 |" in text
    assert "| `rms_norm` | grid | 1 × 4096 | float16 | 7.25 | 8.90 |" in text
    assert "NVIDIA H200, driver 580.1, torch 2.11.0+cu130, CUDA 13.0, SM clock 1980 MHz, 2026-12-02." in text
    assert "ratio = best peer's time / ours. Peers that were not available: fa3." in text
    assert "Host time of one eager call" in text
    assert "other kernels" not in text
    assert text.startswith("# Title\n")
    assert text.endswith("\nafter\n")
    assert "old" not in text


def test_chinese_file_has_chinese_words(tree: Tree) -> None:
    text = (tree.root / "README.zh-CN.md").read_text(encoding="utf-8")
    assert "| 算子 | 用例数 | 几何平均 |" in text
    assert "| `rms_norm` | 4 | 1.15 | 1.10 | 16384 × 4096 float16 | 4.19–4.19 |" in text
    assert set(report.CHINESE) == set(report.ENGLISH)


def test_chart_is_valid_deterministic_and_linked_from_everywhere(tree: Tree) -> None:
    picture = tree.root / "docs" / "assets" / "dandan-norm-h200-plain.svg"
    image = ET.fromstring(picture.read_text(encoding="utf-8"))
    assert image.tag.endswith("svg")
    points = [circle for circle in image.iter() if circle.tag.endswith("circle") and circle.get("r") == "3"]
    assert len(points) == 5
    assert "(docs/assets/dandan-norm-h200-plain.svg)" in tree.readme()
    assert "(../assets/dandan-norm-h200-plain.svg)" in (tree.root / "docs/deep/page.md").read_text()
    record = report.Project(tree.root).records["dandan-norm/h200-plain"]
    assert report.chart(record) == report.chart(record) == picture.read_text(encoding="utf-8")


def test_summary_of_one_peer_leaves_the_others_out(tree: Tree) -> None:
    tree.put("README.md", pair("dandan-norm/h200-plain summary torch"))
    assert tree.write() == 0
    # 4.0 / 1.5; the large cases were not measured with torch
    assert "| `rms_norm` | 4 | 2.67 | 2.67 | 1 × 4096 float16 | 4.19–4.19 |" in tree.readme()
    assert "ratio = time of torch / ours." in tree.readme()


PRODUCT_VIEWS = ("summary", "grid gemm float16", "grid gemm float16 KN", "kernels", "forced skinny", "chart")
# m, us, torch's us, other keys: two chosen rows of [N, K], two of [K, N] by name and by shape, one forced.
PRODUCTS: tuple[tuple[int, float, float, dict[str, Any]], ...] = (
    (1, 4.0, 8.0, {}),
    (16, 5.0, 5.0, {"route": "torch"}),
    (256, 10.0, 9.0, {"case": "o, [K,N]"}),
    (1024, 20.0, 22.0, {"shape": {"m": 1024, "n": 4096, "k": 1024, "weight_transposed": 0}, "variant": "fastest"}),
    (1, 6.0, 3.0, {"variant": "skinny", "bound_us": 1.5}),
)


@pytest.fixture
def products(tmp_path: Path) -> Tree:
    """A project whose record holds matrix products."""
    made = Tree(tmp_path)
    rows = []
    for m, us, torch, changes in PRODUCTS:
        shape = {"m": m, "n": 4096, "k": 1024}
        own = {
            "op": "gemm",
            "case": "o",
            "route": "skinny",
            "shape": shape,
            "bound_us": 2.0,
            "bytes": 8388608,
            "us": us,
        }
        row = made.row(**{**own, "peers": {"torch": torch}, "best_peer": "torch", "ratio": torch / us, **changes})
        rows.append({**row, "kernel_fingerprint": None if row["route"] == "torch" else made.kernel})
    made.put("packages/dandan-norm/csrc/skinny.cu", KERNEL)
    made.change(lambda data: data.update(rows=rows))
    keys = [(r["op"], r["case"], r["shape"], r["dtype"], r["variant"]) for r in rows]
    made.put(
        "packages/dandan-norm/benchmarks/cases.py",
        f"from dandan_ops_core.records import Case\nCASES = [Case('plain', *key, bytes=8388608) for key in {keys!r}]\n",
    )
    for name in ("README.zh-CN.md", "docs/deep/page.md"):
        made.put(name, "nothing\n")
    made.put("README.md", "".join(pair(f"dandan-norm/h200-plain {view}") for view in PRODUCT_VIEWS))
    assert made.write() == 0
    return made


def test_products_are_told_apart_by_layout_rows_and_kernel(products: Tree) -> None:
    assert products.check() == []
    text = products.readme()
    # sqrt(2 * 1); of torch's own call neither the share of the bound nor the rate counts
    assert "| `gemm` | [N, K] | 1–16 | 2 | 1 | 1.41 | 1.00 | 16 × 4096 × 1024 float16 | 50–50 % | 2 |" in text
    assert "| `gemm` | [K, N] | 256 | 1 | 1 | 0.90 | 0.90 | 256 × 4096 × 1024 float16 | 20–20 % | 215 |" in text
    assert "| `gemm` | [K, N] | 1024 | 1 | 1 | 1.10 | 1.10 | 1024 × 4096 × 1024 float16 | 10–10 % | 429 |" in text
    assert "| layer | n × k | 1 | 16 |" in text
    assert "| o | 4096 × 1024 | 4.00 (2.00) | 5.00 (1.00)† |" in text
    assert "† `auto` took torch" in text
    assert "| o | 4096 × 1024 | 10.00 (0.90) | 20.00 (1.10) |" in text
    assert "| `skinny` | 1 | 1 | 0.50 | 0.50 | 1 × 4096 × 1024 float16 | 25–25 % | 1 |" in text
    assert "| 1 × 4096 × 1024 | float16 | 6.00 | 25 % | 1.40 | 1 | 3.00 | 0.50 |" in text


def test_chart_of_products_has_a_panel_for_each_range_of_rows_and_no_forced_kernel(products: Tree) -> None:
    text = (products.root / "docs" / "assets" / "dandan-norm-h200-plain.svg").read_text(encoding="utf-8")
    assert [name for name in ("1–16", "256", "1024") if f">gemm, m = {name}</text>" in text] == ["1–16", "256", "1024"]
    assert ">float16 [K, N]</text>" in text
    points = [each for each in ET.fromstring(text).iter() if each.tag.endswith("circle") and each.get("r") == "3"]
    assert len(points) == 4


@pytest.mark.parametrize(
    ("view", "message"),
    [
        ("grid gemm bfloat16 KN", "the record has no grid of gemm bfloat16 with weights of [K, N]"),
        ("forced sm80_mma", "the record has no products of 'sm80_mma' forced by name"),
        ("forced skinny bfloat16", "the record has no products of 'skinny' forced by name, bfloat16"),
    ],
)
def test_products_that_the_record_lacks_are_found(products: Tree, view: str, message: str) -> None:
    products.put("README.md", pair(f"dandan-norm/h200-plain {view}"))
    assert any(text.endswith(message) for text in products.check()), products.check()


INT4_VIEWS = ("int4", "int4 float16", "grid w4a16_linear float16", "floor", "loss", "error")


@pytest.fixture
def int4(tmp_path: Path) -> Tree:
    """A project whose record holds products with INT4 weights."""
    made = Tree(tmp_path)
    rows = []
    # m, us, Marlin's us, torch's us
    for m, us, marlin, torch in (
        (1, 4.0, 9.0, 12.0),
        (16, 4.0, 4.0, 2.0),
        (128, 5.0, 6.0, 10.0),
        (256, 10.0, 9.0, 8.0),
    ):
        figures = {"weight_loss": 0.08, "weight_loss_steps": 0.5, "result_loss": 0.08 + m / 12800}
        figures |= {"kernel_error": m * 1e-4, "rounding_error": 2e-4}
        own = {"op": "w4a16_linear", "case": "o", "shape": {"m": m, "n": 4096, "k": 1024, "group_size": 64}, "us": us}
        peers = {"marlin g128": marlin, "machete g128": 2 * marlin, "torch": torch}
        best = min(peers, key=lambda name: peers[name])
        own |= {"peers": peers, "best_peer": best, "ratio": peers[best] / us, "bytes": 4580000, "figures": figures}
        rows.append(made.row(**own, error=0.25, error_limit=1.0))
    made.change(lambda data: data.update(rows=rows))
    keys = [(r["op"], r["case"], r["shape"], r["dtype"], r["variant"]) for r in rows]
    made.put(
        "packages/dandan-norm/benchmarks/cases.py",
        f"from dandan_ops_core.records import Case\nCASES = [Case('plain', *key, bytes=4580000) for key in {keys!r}]\n",
    )
    for name in ("README.zh-CN.md", "docs/deep/page.md"):
        made.put(name, "nothing\n")
    made.put("README.md", "".join(pair(f"dandan-norm/h200-plain {view}") for view in INT4_VIEWS))
    assert made.write() == 0
    return made


def test_int4_products_are_compared_with_each_kind_of_peer(int4: Tree) -> None:
    assert int4.check() == []
    text = int4.readme()
    at = "× 4096 × 1024 float16"
    # sqrt(9/4 * 4/4), sqrt(12/4 * 2/4), sqrt(9/4 * 2/4)
    few = f"| 1–16 | 2 | 1.50 | 1.00 (16 {at}) | 1.22 | 0.50 (16 {at}) | 1.06 | 0.50 (16 {at}) |"
    assert text.count(few) == 2
    assert f"| 128 | 1 | 1.20 | 1.20 (128 {at}) | 2.00 | 2.00 (128 {at}) | 1.20 | 1.20 (128 {at}) |" in text
    assert f"| 256 | 1 | 0.90 | 0.90 (256 {at}) | 0.80 | 0.80 (256 {at}) | 0.80 | 0.80 (256 {at}) |" in text
    assert (
        "| o | 4096 × 1024 | 4.00 (2.25, 3.00) | 4.00 (1.00, 0.50) | 5.00 (1.20, 2.00) | 10.00 (0.90, 0.80) |" in text
    )
    assert "groups of 64" in text
    # 4.58 MB at 4.58 TB/s are 1 us; only few rows are shown
    assert "| layer | n × k | packed | 1 | 16 |" in text
    assert "| o | 4096 × 1024 | 2.1 MB | 25 % | 25 % |" in text


def test_loss_and_error_are_two_tables(int4: Tree) -> None:
    text = int4.readme()
    assert "| o | 4096 × 1024 | float16 | 64 | 8.00 % | 0.500 | 8.01–10.00 % |" in text
    assert "| `sm80_row` | float16 | 16 | 1 | 1.60e-03 | 2.00e-04 | 25 % |" in text
    assert "No kernel takes part." in text
    assert "Results against FP64 of the dequantised weight." in text


@pytest.mark.parametrize(
    ("view", "message"),
    [
        ("int4 bfloat16", "the record has no products with INT4 weights, bfloat16"),
        ("floor bfloat16", "the record has no products with INT4 weights, bfloat16"),
    ],
)
def test_int4_products_that_the_record_lacks_are_found(int4: Tree, view: str, message: str) -> None:
    int4.put("README.md", pair(f"dandan-norm/h200-plain {view}"))
    assert any(text.endswith(message) for text in int4.check()), int4.check()


@pytest.mark.parametrize("view", ["int4", "floor"])
def test_products_of_16_bits_have_no_view_of_int4(products: Tree, view: str) -> None:
    products.put("README.md", pair(f"dandan-norm/h200-plain {view}"))
    assert any("the record has no products with INT4 weights" in text for text in products.check())


def test_loss_needs_its_figures(products: Tree) -> None:
    products.put("README.md", pair("dandan-norm/h200-plain loss"))
    assert any(
        text.endswith("the record has no weight_loss and weight_loss_steps and result_loss")
        for text in products.check()
    )


def test_changed_figure_in_a_document_is_found(tree: Tree) -> None:
    tree.put("README.md", tree.readme().replace("| 1.20 | 8 ×", "| 1.90 | 8 ×"))
    (problem,) = [text for text in tree.check() if text.startswith("README.md:")]
    assert "is not what the record gives" in problem
    assert "1.90" in problem


def test_changed_record_is_found_in_every_document_and_chart(tree: Tree) -> None:
    tree.change(lambda data: data["rows"][0].update(us=1.6, ratio=1.125))
    found = {text.split(":")[0] for text in tree.check()}
    assert found == {"README.md", "README.zh-CN.md", "docs/deep/page.md", "docs/assets/dandan-norm-h200-plain.svg"}


def test_missing_chart_is_found(tree: Tree) -> None:
    (tree.root / "docs" / "assets" / "dandan-norm-h200-plain.svg").unlink()
    assert tree.check() == ["docs/assets/dandan-norm-h200-plain.svg: is missing; run tools/report.py"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda data: data["rows"].pop(), "argmax logits cols=151936 rows=8 float16 auto: no row for this case"),
        (lambda data: data["rows"].append(data["rows"][0]), "measured 2 times"),
        (lambda data: data["rows"][0].update(case="other"), "no such case in cases.py"),
        (lambda data: data["rows"][0].update(ratio=1.3), "ratio is 1.3 but its microseconds give 1.2000"),
        (lambda data: data["rows"][0].update(best_peer="torch"), "best_peer is 'torch' but 'vllm' is faster"),
        (lambda data: data.update(package="dandan-gemm"), "is a record of dandan-gemm"),
        (lambda data: data.update(topic="chained"), "is a record of the topic 'chained'"),
        (lambda data: data.update(schema=3), "schema must be 1, found 3"),
        (lambda data: data["environment"].pop("driver"), "environment has no 'driver'"),
    ],
)
def test_bad_record_is_found(tree: Tree, change: Callable[[Any], Any], message: str) -> None:
    tree.change(change)
    assert any(message in problem for problem in tree.check()), tree.check()


def test_topic_without_a_record_is_found(tree: Tree) -> None:
    tree.put("packages/dandan-norm/benchmarks/cases.py", CASES + "\nCASES.append(Case('host', 'x', '', {}, 'f'))\n")
    assert any("the topic 'host' of cases.py has no record" in text for text in tree.check())


def test_topic_that_owes_its_record_says_so(tree: Tree) -> None:
    """And stops saying so when there is one."""
    more = CASES + "\nCASES.append(Case('host', 'x', '', {}, 'f'))\n"
    tree.put("packages/dandan-norm/benchmarks/cases.py", more + "NOT_MEASURED = ('host',)\n")
    assert not any("host" in text for text in tree.check())
    for topic, said in (("plain", "has a record"), ("ragged", "is no topic of it")):
        tree.put("packages/dandan-norm/benchmarks/cases.py", more + f"NOT_MEASURED = ('host', {topic!r})\n")
        assert [text for text in tree.check() if "NOT_MEASURED" in text] == [
            f"dandan-norm: NOT_MEASURED of cases.py names {topic!r}, which {said}"
        ]


def test_record_of_a_package_without_cases_is_found(tree: Tree) -> None:
    (tree.root / "packages" / "dandan-norm" / "benchmarks" / "cases.py").unlink()
    assert any("cases.py has no CASES" in text for text in tree.check())


def test_changed_kernel_is_said_by_the_tables_themselves(tree: Tree) -> None:
    tree.put("packages/dandan-norm/csrc/sm80_row.cu", KERNEL.replace("f()", "g()"))
    assert any("is not what the record gives" in text for text in tree.check())
    assert tree.write() == 0
    assert "> **Taken on other kernels than the present sources:** `sm80_row`." in tree.readme()
    assert tree.check() == []


def test_comment_in_a_kernel_ages_nothing(tree: Tree) -> None:
    tree.put("packages/dandan-norm/csrc/sm80_row.cu", "// why\n" + KERNEL)
    assert tree.check() == []


def test_changed_kernel_of_a_record_that_nothing_shows_is_found(tree: Tree) -> None:
    for name in ("README.md", "README.zh-CN.md", "docs/deep/page.md"):
        tree.put(name, "nothing\n")
    assert tree.check() == []
    tree.put("packages/dandan-norm/csrc/sm80_row.cu", KERNEL.replace("f()", "g()"))
    assert len([text for text in tree.check() if text.endswith("and no table says so")]) == 5


def test_peer_that_failed_on_some_cases_is_named(tree: Tree) -> None:
    tree.change(lambda data: [row.update(peers_failed={"marlin": "no such shape"}) for row in data["rows"][:2]])
    assert tree.write() == 0
    assert "Peers that could not run some of the cases: marlin (2)." in tree.readme()


def test_view_without_a_record_says_so(tree: Tree) -> None:
    tree.put(
        "README.md",
        "<!-- report:begin dandan-norm/l4-plain summary -->\n<!-- report:end dandan-norm/l4-plain summary -->\n",
    )
    assert tree.write() == 0
    assert "*Not measured yet.*" in tree.readme()
    assert tree.check() == []


def pair(name: str) -> str:
    return f"<!-- report:begin {name} -->\nkept\n<!-- report:end {name} -->\n"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            pair("dandan-norm/h200-plain pie"),
            "unknown view 'pie'; views are summary, grid, cases, host, kernels, forced, int4, floor, loss, error, "
            "chart",
        ),
        (pair("dandan-norm/h200-plain"), "unknown view ''"),
        (pair("dandan-norm/h200-plain cases softmax"), "the record has no operator 'softmax'"),
        (pair("dandan-norm/h200-plain grid argmax float32"), "the record has no grid of argmax float32"),
        (pair("dandan-norm/h200-plain grid"), "grid takes 2 to 3 arguments, got 0"),
        (pair("dandan-norm/h200-plain grid rms_norm float16 MN"), "weights are NK or KN, not 'MN'"),
        (pair("dandan-norm/h200-plain summary cublas"), "the record has no peer 'cublas'"),
        (pair("dandan-norm/h200-plain kernels"), "the record has no products of a kernel forced by name"),
        (pair("dandan-norm/h200-plain forced skinny"), "the record has no products of a kernel forced by name"),
        ("<!-- report:begin a summary -->\nkept\n", "'a summary' is never ended"),
        ("kept\n<!-- report:end a summary -->\n", "marker 'a summary' where there is no open marker"),
        ("<!-- report:begin a cases -->\nkept\n<!-- report:end b cases -->", "where there is the end of 'a cases'"),
    ],
)
def test_bad_marker_is_found_and_its_text_kept(tree: Tree, text: str, message: str) -> None:
    tree.put("README.md", text)
    assert any(message in problem for problem in tree.check()), tree.check()
    assert report.main(["--root", str(tree.root), "--check"]) == 1
    assert tree.write() == 1
    assert tree.readme() == text


def test_marker_inside_a_code_block_is_an_example(tree: Tree) -> None:
    text = f"```\n{pair('dandan-norm/h200-plain summary')}```\n"
    tree.put("README.md", text)
    assert tree.write() == 0
    assert tree.readme() == text

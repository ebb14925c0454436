"""Renders the tables and charts of README and docs from the raw records, or checks that they still say what the
records say.

    python tools/report.py            writes what is between the markers, and the charts
    python tools/report.py --check    changes nothing; prints what is wrong and returns 1 if anything is

A marker pair in a Markdown file asks for one view of one record (`docs/results/<package>/<stem>.json`):

    <!-- report:begin dandan-norm/h200-plain summary -->
    <!-- report:end dandan-norm/h200-plain summary -->

Views: `summary [PEER]` (one line per operator; ratios to the best peer, or to that one), `grid OP DTYPE` (rows by
columns), `cases [OP]` (one line per case), `host [OP]` (host cost of a call) and `chart` (an SVG in docs/assets). Files
whose name has `zh-CN` get Chinese headings.

Matrix products, whose shapes have m, n and k: `summary` and `chart` take the calls that choose for themselves, by rows
of a and layout of the weight; `grid OP DTYPE [KN]` is layers by rows, KN for weights of [K, N]; `kernels` has one line
for each kernel that was forced by name and range of rows, `forced KERNEL [DTYPE]` one line for each of its cases.

Products with INT4 weights, whose shape has a group_size as well: `int4 [DTYPE]` has the ratios to the best peer with
INT4 weights, to torch with weights of 16 bits, and to the best of all, by rows of x; `grid` has the first two;
`floor [DTYPE]` is the share of the time in which a bare kernel reads the bytes, for few rows; `loss` and `error` are
what the quantisation loses, and how far the kernels are from FP64 of the dequantised weight.

`--check` fails when a text or chart differs from its record, when a record lacks or doubles a case of
`benchmarks/cases.py`, has a ratio that its own microseconds do not give, or was taken on other kernels than the
sources and is shown nowhere (a view of such a record says so by itself), and when a topic of `cases.py` has no record,
unless its `NOT_MEASURED` says so.
"""

from __future__ import annotations

import argparse
import importlib.util
import math
import os
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from xml.sax.saxutils import escape

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "packages" / "dandan-core" / "src"))

from dandan_ops_core.build.fingerprint import fingerprints  # noqa: E402
from dandan_ops_core.records import (  # noqa: E402
    Case,
    Record,
    RecordError,
    Row,
    check_record,
    geometric_mean,
    other_kernels,
    read_record,
)

BEGIN = re.compile(r"^<!-- report:begin (?P<name>.+?) -->$")
END = re.compile(r"^<!-- report:end (?P<name>.+?) -->$")
LARGE_BYTES = 100e6  # "above 100 MB" of the summary
CHOOSING = ("auto", "fastest")  # variants that are no kernel's name
KN = ", [K,N]"  # ends the name of a layer whose weight has rows along K, where the shape does not say so
ROW_GROUPS = (16, 64, 256)  # up to so many rows of a, and more
INT4_ROW_GROUPS = (16, 64, 128, 256)
READ_BYTES_PER_US = {"NVIDIA H200": 4.58e6}  # by a bare read kernel
FEW_ROWS = 16
TORCH = "torch"  # the peer whose weights have 16 bits, in records of INT4 weights


class ReportError(ValueError):
    """A marker that cannot be served; the message says which and why."""


# ------------------------------------------------------------------------------------------------------------------
# Words

ENGLISH = {
    "op": "operator",
    "case": "case",
    "shape": "shape",
    "dtype": "dtype",
    "kernel": "kernel",
    "us": "µs",
    "bound": "of the bound",
    "best": "best peer",
    "peer_us": "its µs",
    "ratio": "ratio",
    "cases": "cases",
    "geomean": "geometric mean",
    "worst": "worst",
    "at": "at",
    "rate": "TB/s above 100 MB",
    "host": "host µs per call",
    "none": "*Not measured yet.*",
    "grid": "µs of {op}, {dtype}; in brackets: best peer's time / ours",
    "products": "µs of {op}, {dtype}, weights of {layout}, by rows of a; in brackets: best peer's time / ours{taken}",
    "taken": "; † `auto` took torch, for both times",
    "int4_products": "µs of {op}, {dtype}, groups of {group}, by rows of x; in brackets: time of the best INT4 peer "
    "/ ours, time of torch with {dtype} weights / ours",
    "int4_taken": "; † without an own kernel",
    "int4_peers": "best INT4 peer / ours",
    "dense_peer": "torch, 16-bit weights / ours",
    "all_peers": "best of all / ours",
    "floor": "Share of the floor of {op}, {dtype}: time in which a bare kernel reads the bytes ({rate} TB/s) / ours, "
    "by rows of x",
    "packed": "packed",
    "group": "group",
    "weight_loss": "weight, relative RMS",
    "steps": "largest of a weight, steps",
    "result_loss": "result, relative RMS",
    "kernel_error": "relative RMS",
    "rounding_error": "of that, rounding the result",
    "limit": "largest error, share of its limit",
    "layer": "layer",
    "weight": "weight",
    "own": "by own kernels",
    "bounds": "of the bound",
    "flops": "TFLOP/s up to",
    "tflops": "TFLOP/s",
    "tbytes": "TB/s",
    "chart": "best peer's time / ours by operator and size",
    "caption": "{gpu}, driver {driver}, torch {torch}, CUDA {cuda}, SM clock {clock}, {date}. {how}",
    "how": "Median of CUDA-graph replays over rotating buffers; ratio = best peer's time / ours.",
    "how_peer": "Median of CUDA-graph replays over rotating buffers; ratio = time of {peer} / ours.",
    "how_host": "Host time of one eager call: median over batches that take turns.",
    "how_floor": "Median of CUDA-graph replays over rotating buffers.",
    "how_loss": "Normally distributed weights, quantised by `quantize_int4`, against themselves before; results in "
    "FP64 from both. No kernel takes part.",
    "how_error": "Results against FP64 of the dequantised weight.",
    "failed": "Peers that could not run some of the cases: {names}.",
    "absent": "Peers that were not available: {names}.",
    "stale": "**Taken on other kernels than the present sources:** {names}. The figures may differ today.",
}
CHINESE = {
    "op": "算子",
    "case": "用例",
    "shape": "形状",
    "dtype": "类型",
    "kernel": "内核",
    "us": "µs",
    "bound": "达到物理下限的比例",
    "best": "最快的对照",
    "peer_us": "对照 µs",
    "ratio": "比值",
    "cases": "用例数",
    "geomean": "几何平均",
    "worst": "最差",
    "at": "最差所在",
    "rate": "100 MB 以上 TB/s",
    "host": "每次调用的主机 µs",
    "none": "*尚未测量。*",
    "grid": "{op} 的 µs，{dtype}；括号内为最快对照的时间 / 本库时间",
    "products": "{op} 的 µs，{dtype}，权重 {layout}，按 a 的行数；括号内为最快对照的时间 / 本库时间{taken}",
    "taken": "；† 表示 `auto` 选择了 torch，两个时间都是它的",
    "int4_products": "{op} 的 µs，{dtype}，分组 {group}，按 x 的行数；括号内为最快 INT4 对照的时间 / 本库时间，"
    "{dtype} 权重的 torch 的时间 / 本库时间",
    "int4_taken": "；† 表示没有使用自有内核",
    "int4_peers": "最快 INT4 对照 / 本库",
    "dense_peer": "16 位权重的 torch / 本库",
    "all_peers": "全部对照中最快 / 本库",
    "floor": "{op} 达到下限的比例，{dtype}：单纯读取内核读完这些字节的时间（{rate} TB/s）/ 本库时间，按 x 的行数",
    "packed": "打包后",
    "group": "分组",
    "weight_loss": "权重，相对 RMS",
    "steps": "单个权重最大值，步",
    "result_loss": "结果，相对 RMS",
    "kernel_error": "相对 RMS",
    "rounding_error": "其中结果舍入",
    "limit": "最大误差占其上限",
    "layer": "层",
    "weight": "权重",
    "own": "由自有内核",
    "bounds": "达到物理下限的比例",
    "flops": "最高 TFLOP/s",
    "tflops": "TFLOP/s",
    "tbytes": "TB/s",
    "chart": "各算子与规模下最快对照的时间 / 本库时间",
    "caption": "{gpu}，驱动 {driver}，torch {torch}，CUDA {cuda}，SM 频率 {clock}，{date}。{how}",
    "how": "轮换缓冲区上 CUDA graph 重放的中位数；比值 = 最快对照的时间 / 本库时间。",
    "how_peer": "轮换缓冲区上 CUDA graph 重放的中位数；比值 = {peer} 的时间 / 本库时间。",
    "how_host": "一次即时调用的主机时间：轮流分批测量的中位数。",
    "how_floor": "轮换缓冲区上 CUDA graph 重放的中位数。",
    "how_loss": "正态分布的权重，经 `quantize_int4` 量化后与原权重比较；两者的结果都以 FP64 计算，不涉及任何内核。",
    "how_error": "结果与反量化权重的 FP64 结果比较。",
    "failed": "有些用例无法运行的对照：{names}。",
    "absent": "未能使用的对照：{names}。",
    "stale": "**测量时的内核与当前源码不同：** {names}。今天的数字可能不同。",
}


# ------------------------------------------------------------------------------------------------------------------
# The project's files


@dataclass
class Project:
    """The tree that is reported on. Records, cases and fingerprints are read once."""

    root: Path
    records: dict[str, Record] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    prints: dict[str, dict[str, str]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for path in sorted((self.root / "docs" / "results").glob("*/*.json")):
            name = f"{path.parent.name}/{path.stem}"
            try:
                record = read_record(path)
            except RecordError as error:
                self.problems.append(f"{name}: {error}")
                continue
            if record.package != path.parent.name:
                self.problems.append(f"{name}: is a record of {record.package}")
            elif not path.stem.endswith(f"-{record.topic}"):
                self.problems.append(f"{name}: is a record of the topic {record.topic!r}")
            else:
                self.records[name] = record

    def markdown(self) -> list[Path]:
        files = [*self.root.glob("*.md"), *self.root.glob("docs/**/*.md"), *self.root.glob("packages/*/README.md")]
        return sorted(files)

    def packages(self) -> list[str]:
        return sorted(path.parents[1].name for path in self.root.glob("packages/*/benchmarks/cases.py"))

    def cases(self, package: str) -> list[Case]:
        """CASES of a package's benchmarks/cases.py, or nothing where it has none."""
        return list(getattr(self._cases_module(package), "CASES", ()))

    def not_measured(self, package: str) -> tuple[str, ...]:
        """NOT_MEASURED of a package's benchmarks/cases.py: topics that owe their record."""
        return tuple(getattr(self._cases_module(package), "NOT_MEASURED", ()))

    def _cases_module(self, package: str) -> ModuleType | None:
        path = self.root / "packages" / package / "benchmarks" / "cases.py"
        if not path.is_file():
            return None
        name = f"_cases_of_{package.replace('-', '_')}"
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        try:
            spec.loader.exec_module(module)
        finally:
            del sys.modules[name]
        return module

    def fingerprints(self, package: str) -> dict[str, str]:
        if package not in self.prints:
            csrc = self.root / "packages" / package / "csrc"
            include = self.root / "packages" / "dandan-core" / "src" / "dandan_ops_core" / "include"
            self.prints[package] = fingerprints(csrc, include) if csrc.is_dir() else {}
        return self.prints[package]

    def stale_kernels(self, name: str) -> list[str]:
        """Kernels of a record that are not those of the sources, by name."""
        record = self.records[name]
        return sorted({row.route for row, _ in other_kernels(record, self.fingerprints(record.package))})


# ------------------------------------------------------------------------------------------------------------------
# Views


def _shape(row: Row) -> str:
    return " × ".join(str(size) for size in row.shape.values())


def _table(head: Sequence[str], rows: Sequence[Sequence[str]], numbers: int) -> list[str]:
    """A Markdown table; the last `numbers` columns are aligned to the right."""
    rules = ["---"] * (len(head) - numbers) + ["---:"] * numbers
    return ["| " + " | ".join(line) + " |" for line in (head, rules, *rows)]


def _us(value: float) -> str:
    return f"{value:.2f}" if value < 100 else f"{value:.1f}" if value < 1000 else f"{value:.0f}"


def _ratio(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def _of(record: Record, op: str | None) -> list[Row]:
    rows = [row for row in record.rows if op is None or row.op == op]
    if not rows:
        raise ReportError(f"the record has no operator {op!r}")
    return rows


def _ops(rows: Sequence[Row]) -> list[str]:
    return list(dict.fromkeys(row.op for row in rows))


def _product(row: Row) -> bool:
    return {"m", "n", "k"} <= set(row.shape)


def _layout(row: Row) -> str:
    """How the weight of a product lies in memory."""
    return "[K, N]" if row.case.endswith(KN) or row.shape.get("weight_transposed") == 0 else "[N, K]"


def _sizes(row: Row) -> str:
    return " × ".join(str(row.shape[name]) for name in ("m", "n", "k")) if _product(row) else _shape(row)


def _tflops(row: Row) -> float:
    return 2 * row.shape["m"] * row.shape["n"] * row.shape["k"] / row.us / 1e6


def _choosing(record: Record) -> list[Row]:
    """The products whose kernel was not forced."""
    return [row for row in record.rows if _product(row) and row.variant in CHOOSING]


def _by_rows(rows: Sequence[Row], groups: Sequence[int] = ROW_GROUPS) -> Iterator[tuple[str, list[Row]]]:
    """The rows of a product in groups by m, each with the range of m that it has."""
    for low, high in zip((0, *groups), (*groups, math.inf), strict=True):
        group = [row for row in rows if low < row.shape["m"] <= high]
        if group:
            first, last = (pick(row.shape["m"] for row in group) for pick in (min, max))
            yield (str(first) if first == last else f"{first}–{last}"), group


def _judged(rows: Sequence[Row], peer: str | None = None) -> list[str]:
    """Geometric mean of the ratios to the best peer or the named one, the worst, and where it is."""
    if peer is None:
        return _means([(row.ratio, row) for row in rows if row.ratio is not None])
    return _means([(row.peers[peer] / row.us, row) for row in rows if peer in row.peers])


def _means(compared: Sequence[tuple[float, Row]]) -> list[str]:
    if not compared:
        return ["", "", ""]
    ratio, worst = min(compared, key=lambda pair: pair[0])
    mean = geometric_mean(each for each, _ in compared)
    return [f"{mean:.2f}", _ratio(ratio), f"{_sizes(worst)} {worst.dtype}"]


def _reached(rows: Sequence[Row]) -> list[str]:
    """Shares of the bound and the most operations a second, of what own kernels ran."""
    own = [row for row in rows if row.route != "torch"]
    shares = [100 * row.bound_us / row.us for row in own if row.bound_us]
    share = f"{min(shares):.0f}–{max(shares):.0f} %" if shares else ""
    return [share, f"{max(map(_tflops, own)):.0f}" if own else ""]


def _product_summary(record: Record, words: Mapping[str, str], peer: str | None) -> list[str]:
    """One line per operator, layout of the weight and range of rows."""
    lines = []
    rows = _choosing(record)
    for op, layout in dict.fromkeys((row.op, _layout(row)) for row in rows):
        for name, group in _by_rows([row for row in rows if (row.op, _layout(row)) == (op, layout)]):
            own = sum(row.route != "torch" for row in group)
            counts = [str(len(group)), str(own)]
            lines.append([f"`{op}`", layout, name, *counts, *_judged(group, peer), *_reached(group)])
    names = ("op", "weight", "m", "cases", "own", "geomean", "worst", "at", "bounds", "flops")
    return _table([words.get(name, name) for name in names], lines, 7)


def view_summary(record: Record, words: Mapping[str, str], peer: str | None = None) -> list[str]:
    """One line per operator: cases, geometric mean, worst ratio and where, rate of large cases. Products: see there."""
    if peer is not None and not any(peer in row.peers for row in record.rows):
        raise ReportError(f"the record has no peer {peer!r}")
    if record.rows and all(map(_product, record.rows)):
        return _product_summary(record, words, peer)
    lines = []
    for op in _ops(record.rows):
        rows = _of(record, op)
        rates = [row.gigabytes_per_s for row in rows if row.bytes >= LARGE_BYTES and row.gigabytes_per_s]
        rate = f"{min(rates) / 1e3:.2f}–{max(rates) / 1e3:.2f}" if rates else ""
        lines.append([f"`{op}`", str(len(rows)), *_judged(rows, peer), rate])
    head = [words[name] for name in ("op", "cases", "geomean", "worst", "at", "rate")]
    return _table(head, lines, 5)


def _int4(row: Row) -> bool:
    return _product(row) and "group_size" in row.shape


def _int4_ratio(row: Row) -> float | None:
    """Time of the best peer with INT4 weights over ours."""
    times = [us for name, us in row.peers.items() if name != TORCH]
    return min(times) / row.us if times else None


def _dense_ratio(row: Row) -> float | None:
    """Time of torch with weights of 16 bits over ours."""
    return row.peers[TORCH] / row.us if TORCH in row.peers else None


def _cell(row: Row) -> str:
    if _int4(row) and row.peers:
        return f"{_us(row.us)} ({', '.join(_ratio(each) or '–' for each in (_int4_ratio(row), _dense_ratio(row)))})"
    return _us(row.us) + (f" ({_ratio(row.ratio)})" if row.ratio is not None else "")


def _product_grid(record: Record, words: Mapping[str, str], op: str, dtype: str, layout: str) -> list[str]:
    """Layers by rows of a."""
    rows = [row for row in _choosing(record) if (row.op, row.dtype, _layout(row)) == (op, dtype, layout)]
    if not rows:
        raise ReportError(f"the record has no grid of {op} {dtype} with weights of {layout}")
    columns = sorted({row.shape["m"] for row in rows})
    layers: dict[tuple[int, int], dict[int, Row]] = {}
    for row in rows:
        layers.setdefault((row.shape["n"], row.shape["k"]), {})[row.shape["m"]] = row
    lines = []
    for (n, k), cells in layers.items():
        name = next(iter(cells.values())).case.removesuffix(KN)
        texts = [_cell(cells[m]) + "†" * (cells[m].route == "torch") if m in cells else "" for m in columns]
        lines.append([name, f"{n} × {k}", *texts])
    taken = words["taken"] if any(row.route == "torch" for row in rows) else ""
    if all(map(_int4, rows)):
        groups = ", ".join(map(str, sorted({row.shape["group_size"] for row in rows})))
        title = words["int4_products"].format(op=f"`{op}`", dtype=dtype, group=groups)
        title += words["int4_taken"] if taken else ""
        return [title, "", *_table([words["layer"], "n × k", *map(str, columns)], lines, len(columns))]
    title = words["products"].format(op=f"`{op}`", dtype=dtype, layout=layout, taken=taken)
    return [title, "", *_table([words["layer"], "n × k", *map(str, columns)], lines, len(columns))]


def view_grid(record: Record, words: Mapping[str, str], op: str, dtype: str, weight: str = "NK") -> list[str]:
    """Rows by columns of one operator and dtype; only cases whose shape has exactly these two sizes. Products: layers
    by rows, of one layout of the weight.
    """
    if weight not in ("NK", "KN"):
        raise ReportError(f"weights are NK or KN, not {weight!r}")
    if all(map(_product, _of(record, op))):
        return _product_grid(record, words, op, dtype, "[N, K]" if weight == "NK" else "[K, N]")
    cells: dict[tuple[int, int], str] = {}
    for row in _of(record, op):
        if row.dtype == dtype and set(row.shape) == {"rows", "cols"} and row.variant == "auto":
            cells[row.shape["rows"], row.shape["cols"]] = _cell(row)
    if not cells:
        raise ReportError(f"the record has no grid of {op} {dtype}")
    columns = sorted({cols for _, cols in cells})
    head = ["rows \\ cols", *map(str, columns)]
    lines = [[str(rows), *(cells.get((rows, cols), "") for cols in columns)] for rows in sorted({r for r, _ in cells})]
    return [words["grid"].format(op=f"`{op}`", dtype=dtype), "", *_table(head, lines, len(columns))]


def view_cases(record: Record, words: Mapping[str, str], op: str | None = None) -> list[str]:
    """One line per case."""
    lines = []
    for row in _of(record, op):
        share = f"{100 * row.bound_us / row.us:.0f} %" if row.bound_us else ""
        peer = row.best_peer or ""
        peer_us = _us(row.peers[peer]) if peer else ""
        what = [f"`{row.op}`", row.case, _shape(row), row.dtype, f"`{row.route}`"]
        lines.append([*what, _us(row.us), share, peer, peer_us, _ratio(row.ratio)])
    names = ("op", "case", "shape", "dtype", "kernel", "us", "bound", "best", "peer_us", "ratio")
    return _table([words[name] for name in names], lines, 5)


def _forced(record: Record) -> list[Row]:
    rows = [row for row in record.rows if _product(row) and row.variant not in CHOOSING]
    if not rows:
        raise ReportError("the record has no products of a kernel forced by name")
    return rows


def view_kernels(record: Record, words: Mapping[str, str]) -> list[str]:
    """Products of each kernel forced by name: one line per range of rows."""
    lines = []
    rows = _forced(record)
    for kernel in dict.fromkeys(row.variant for row in rows):
        for name, group in _by_rows([row for row in rows if row.variant == kernel]):
            lines.append([f"`{kernel}`", name, str(len(group)), *_judged(group), *_reached(group)])
    names = ("kernel", "m", "cases", "geomean", "worst", "at", "bounds", "flops")
    return _table([words.get(name, name) for name in names], lines, 6)


def view_forced(record: Record, words: Mapping[str, str], kernel: str, dtype: str | None = None) -> list[str]:
    """Products of one kernel forced by name: one line per case."""
    rows = [row for row in _forced(record) if row.variant == kernel and dtype in (None, row.dtype)]
    if not rows:
        raise ReportError(f"the record has no products of {kernel!r} forced by name" + (f", {dtype}" if dtype else ""))
    peers = list(dict.fromkeys(name for row in rows for name in row.peers))
    lines = []
    for row in rows:
        share = f"{100 * row.bound_us / row.us:.0f} %" if row.bound_us else ""
        rates = [f"{row.gigabytes_per_s / 1e3:.2f}" if row.gigabytes_per_s else "", f"{_tflops(row):.0f}"]
        others = [_us(row.peers[name]) if name in row.peers else "" for name in peers]
        lines.append([_sizes(row), row.dtype, _us(row.us), share, *rates, *others, _ratio(row.ratio)])
    names = ("dtype", "us", "bound", "tbytes", "tflops")
    head = ["m × n × k", *(words[name] for name in names), *(f"{name} µs" for name in peers), words["ratio"]]
    return _table(head, lines, 5 + len(peers))


def _int4_rows(record: Record, dtype: str | None) -> list[Row]:
    rows = [row for row in _choosing(record) if _int4(row) and dtype in (None, row.dtype)]
    if not rows:
        raise ReportError("the record has no products with INT4 weights" + (f", {dtype}" if dtype else ""))
    return rows


def view_int4(record: Record, words: Mapping[str, str], dtype: str | None = None) -> list[str]:
    """Products with INT4 weights by rows of x: geometric mean and worst against three sets of peers."""
    lines = []
    for name, group in _by_rows(_int4_rows(record, dtype), INT4_ROW_GROUPS):
        cells = []
        for ratio in (_int4_ratio, _dense_ratio, lambda row: row.ratio):
            mean, worst, at = _means([(value, row) for row in group if (value := ratio(row)) is not None])
            cells += [mean, worst and f"{worst} ({at})"]
        lines.append([name, str(len(group)), *cells])
    names = (words[name] for name in ("int4_peers", "dense_peer", "all_peers"))
    head = ["m", words["cases"], *(text for name in names for text in (name, words["worst"]))]
    return _table(head, lines, 7)


def view_floor(record: Record, words: Mapping[str, str], dtype: str = "float16") -> list[str]:
    """Products with INT4 weights and few rows: the share of the time in which a bare kernel reads as many bytes."""
    rate = READ_BYTES_PER_US.get(str(record.environment.get("gpu")))
    if rate is None:
        raise ReportError(f"nothing is known of the read rate of {record.environment.get('gpu')}")
    rows = [row for row in _int4_rows(record, dtype) if row.shape["m"] <= FEW_ROWS]
    layers: dict[tuple[int, int], dict[int, Row]] = {}
    for row in rows:
        layers.setdefault((row.shape["n"], row.shape["k"]), {})[row.shape["m"]] = row
    columns = sorted({row.shape["m"] for row in rows})
    lines = []
    for (n, k), cells in sorted(layers.items(), key=lambda item: item[0][0] * item[0][1]):
        shares = [f"{100 * cells[m].bytes / rate / cells[m].us:.0f} %" if m in cells else "" for m in columns]
        lines.append([next(iter(cells.values())).case, f"{n} × {k}", f"{n * k / 2e6:.1f} MB", *shares])
    ops = ", ".join(f"`{op}`" for op in _ops(rows))
    head = [words["layer"], "n × k", words["packed"], *map(str, columns)]
    return [
        words["floor"].format(op=ops, dtype=dtype, rate=f"{rate / 1e6:g}"),
        "",
        *_table(head, lines, 1 + len(columns)),
    ]


def _figures(record: Record, *names: str) -> list[Row]:
    rows = [row for row in record.rows if all(name in row.figures for name in names)]
    if not rows:
        raise ReportError(f"the record has no {' and '.join(names)}")
    return rows


def view_loss(record: Record, words: Mapping[str, str]) -> list[str]:
    """What the quantisation loses: one line per layer, dtype and group. The loss of results is a range over m."""
    names = ("weight_loss", "weight_loss_steps", "result_loss")
    found: dict[tuple[str, str, str, str], list[Row]] = {}
    for row in _figures(record, *names):
        n, k, group = (str(row.shape[name]) for name in ("n", "k", "group_size"))
        found.setdefault((row.case, f"{n} × {k}", row.dtype, group), []).append(row)
    lines = []
    for what, rows in found.items():
        results = [100 * row.figures["result_loss"] for row in rows]
        one = rows[0].figures
        shown = [f"{100 * one['weight_loss']:.2f} %", f"{one['weight_loss_steps']:.3f}"]
        lines.append([*what, *shown, f"{min(results):.2f}–{max(results):.2f} %"])
    head = [
        words["layer"],
        "n × k",
        *(words[name] for name in ("dtype", "group", "weight_loss", "steps", "result_loss")),
    ]
    return _table(head, lines, 4)


def view_error(record: Record, words: Mapping[str, str]) -> list[str]:
    """How far kernels are from FP64 of the dequantised weight: one line per kernel, dtype and m, the worst of its
    cases.
    """
    found: dict[tuple[str, str, str], list[Row]] = {}
    for row in _figures(record, "kernel_error", "rounding_error"):
        found.setdefault((f"`{row.route}`", row.dtype, str(row.shape["m"])), []).append(row)
    lines = []
    for what, rows in found.items():
        worst = max(rows, key=lambda row: row.figures["kernel_error"])
        shares = [row.error / row.error_limit for row in rows if row.error is not None and row.error_limit]
        figures = [f"{worst.figures[name]:.2e}" for name in ("kernel_error", "rounding_error")]
        lines.append([*what, str(len(rows)), *figures, f"{100 * max(shares):.0f} %" if shares else ""])
    head = [words["kernel"], words["dtype"], "m", words["cases"]]
    head += [words[name] for name in ("kernel_error", "rounding_error", "limit")]
    return _table(head, lines, 4)


def view_host(record: Record, words: Mapping[str, str], op: str | None = None) -> list[str]:
    """Host microseconds of an eager call, ours and the peers'."""
    rows = [row for row in _of(record, op) if row.host_us is not None]
    if not rows:
        raise ReportError("the record has no host times")
    peers = list(dict.fromkeys(name for row in rows for name in row.peers_host))
    head = [words["op"], words["case"], words["shape"], words["dtype"], words["host"], *peers]
    lines = []
    for row in rows:
        others = [f"{row.peers_host[name]:.2f}" if name in row.peers_host else "" for name in peers]
        lines.append([f"`{row.op}`", row.case, _sizes(row), row.dtype, f"{row.host_us:.2f}", *others])
    return _table(head, lines, 1 + len(peers))


VIEWS: dict[str, tuple[Callable[..., list[str]], range]] = {
    "summary": (view_summary, range(2)),
    "grid": (view_grid, range(2, 4)),
    "cases": (view_cases, range(2)),
    "host": (view_host, range(2)),
    "kernels": (view_kernels, range(1)),
    "forced": (view_forced, range(1, 3)),
    "int4": (view_int4, range(2)),
    "floor": (view_floor, range(2)),
    "loss": (view_loss, range(1)),
    "error": (view_error, range(1)),
}


def caption(
    record: Record, kind: str, stale: Sequence[str], words: Mapping[str, str], peer: str | None = None
) -> list[str]:
    """What the figures were taken on; and, where that is so, that the kernels have changed since."""
    how = words.get(f"how_{kind}") or (words["how_peer"].format(peer=peer) if peer else words["how"])
    place = record.environment
    clock = f"{place['sm_clock']} MHz" if place.get("sm_clock") else "?"
    text = words["caption"].format(
        gpu=place.get("gpu") or "?",
        driver=place.get("driver") or "?",
        torch=place.get("torch") or "?",
        cuda=place.get("cuda") or "?",
        clock=clock,
        date=record.date,
        how=how,
    )
    lines = ["", text]
    if record.peers_unavailable:
        lines[-1] += " " + words["absent"].format(names=", ".join(sorted(record.peers_unavailable)))
    failed = Counter(name for row in record.rows for name in row.peers_failed)
    if failed:
        names = ", ".join(f"{name} ({count})" for name, count in sorted(failed.items()))
        lines[-1] += " " + words["failed"].format(names=names)
    if stale:
        lines += ["", "> " + words["stale"].format(names=", ".join(f"`{name}`" for name in stale))]
    return lines


# ------------------------------------------------------------------------------------------------------------------
# The chart: one panel per operator, or per range of rows of a product; size to the right, ratio upwards, both
# logarithmic. One colour per dtype and layout of the weight. Own SVG, so that the same record gives the same bytes
# everywhere.

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7")  # told apart with colour-blind eyes
WIDTH, PANEL, LEFT, RIGHT, TOP, GAP = 760, 150, 64, 16, 44, 46


def _ticks(low: float, high: float, steps: Sequence[float]) -> list[float]:
    return [step for step in steps if low <= step * 1.0001 and step <= high * 1.0001]


def _bytes_text(value: float) -> str:
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if value >= size:
            return f"{value / size:.0f} {unit}"
    return f"{value:.0f} B"


def _panels(rows: Sequence[Row]) -> Iterator[tuple[str, list[Row]]]:
    for op in _ops(rows):
        of_op = [row for row in rows if row.op == op]
        if all(map(_product, of_op)):
            yield from ((f"{op}, m = {name}", group) for name, group in _by_rows(of_op))
        else:
            yield op, of_op


def _series(row: Row) -> str:
    return f"{row.dtype} [K, N]" if _layout(row) == "[K, N]" else row.dtype


def chart(record: Record) -> str:
    """The SVG of a record's ratios. Raises ReportError where no row has both a ratio and bytes."""
    shown = [row for row in record.rows if not _product(row) or row.variant in CHOOSING]
    rows = [row for row in shown if row.ratio is not None and row.bytes]
    if not rows:
        raise ReportError("the record has no ratios to draw")
    panels, dtypes = list(_panels(rows)), list(dict.fromkeys(map(_series, rows)))
    ratios = [row.ratio for row in rows if row.ratio is not None]
    low, high = min(*ratios, 0.9) / 1.05, max(*ratios, 1.2) * 1.05
    small, large = min(row.bytes for row in rows) / 1.3, max(row.bytes for row in rows) * 1.3
    height = TOP + len(panels) * (PANEL + GAP) + 4
    inner = WIDTH - LEFT - RIGHT

    def x(value: float) -> float:
        return LEFT + inner * math.log(value / small) / math.log(large / small)

    def y(value: float, top: float) -> float:
        return top + PANEL * (1 - math.log(value / low) / math.log(high / low))

    title = f"{record.package} on {record.environment.get('gpu')}: best peer's time / ours ({record.topic})"
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" viewBox="0 0 {WIDTH} {height}" '
        'font-family="sans-serif" font-size="12" role="img">',
        f"<title>{escape(title)}</title>",
        f'<rect width="{WIDTH}" height="{height}" fill="#ffffff"/>',
        f'<text x="{LEFT}" y="18" font-weight="bold">{escape(title)}</text>',
    ]
    for number, dtype in enumerate(dtypes):
        place, colour = LEFT + 110 * number, COLOURS[number % len(COLOURS)]
        out.append(f'<circle cx="{place + 4}" cy="30" r="4" fill="{colour}"/>')
        out.append(f'<text x="{place + 13}" y="34">{escape(dtype)}</text>')
    for panel, (name, group) in enumerate(panels):
        top = TOP + 14 + panel * (PANEL + GAP)
        out.append(f'<text x="{LEFT}" y="{top - 4}" font-style="italic">{escape(name)}</text>')
        out.append(f'<rect x="{LEFT}" y="{top}" width="{inner}" height="{PANEL}" fill="none" stroke="#999999"/>')
        for tick in _ticks(low, high, (0.25, 0.5, 0.75, 1, 1.5, 2, 3, 4, 6, 8, 12, 16, 24, 32)):
            at = y(tick, top)
            stroke = 'stroke="#333333" stroke-width="1.5"' if tick == 1 else 'stroke="#dddddd"'
            out.append(f'<line x1="{LEFT}" y1="{at:.1f}" x2="{WIDTH - RIGHT}" y2="{at:.1f}" {stroke}/>')
            out.append(f'<text x="{LEFT - 6}" y="{at + 4:.1f}" text-anchor="end">{tick:g}×</text>')
        for tick in _ticks(small, large, [10.0**power for power in range(2, 12)]):
            at = x(tick)
            out.append(f'<line x1="{at:.1f}" y1="{top}" x2="{at:.1f}" y2="{top + PANEL}" stroke="#eeeeee"/>')
            label = _bytes_text(tick)
            out.append(f'<text x="{at:.1f}" y="{top + PANEL + 15}" text-anchor="middle">{label}</text>')
        for row in group:
            if row.ratio is not None:
                colour = COLOURS[dtypes.index(_series(row)) % len(COLOURS)]
                spot = f'cx="{x(row.bytes):.1f}" cy="{y(row.ratio, top):.1f}" r="3"'
                about = escape(f"{_shape(row)} {row.dtype}: {row.ratio:.2f}× {row.best_peer}")
                out.append(f'<circle {spot} fill="{colour}" fill-opacity="0.75"><title>{about}</title></circle>')
    return "\n".join([*out, "</svg>"]) + "\n"


# ------------------------------------------------------------------------------------------------------------------
# Markers


@dataclass
class Rendered:
    """What the files should hold: path to text. `shown` are the records that some view shows."""

    files: dict[Path, str] = field(default_factory=dict)
    shown: set[str] = field(default_factory=set)
    problems: list[str] = field(default_factory=list)


def _view(project: Project, path: Path, marker: str, rendered: Rendered) -> list[str]:
    name, *arguments = marker.split()
    words = CHINESE if "zh-CN" in path.name else ENGLISH
    kind = arguments.pop(0) if arguments else ""
    if kind != "chart" and kind not in VIEWS:
        raise ReportError(f"unknown view {kind!r}; views are {', '.join([*VIEWS, 'chart'])}")
    if name not in project.records:
        if (project.root / "docs" / "results" / f"{name}.json").exists():
            raise ReportError("its record cannot be used")
        return [words["none"]]
    record = project.records[name]
    rendered.shown.add(name)
    if kind == "chart":
        picture = project.root / "docs" / "assets" / f"{name.replace('/', '-')}.svg"
        rendered.files[picture] = chart(record)
        link = Path(os.path.relpath(picture, path.parent)).as_posix()
        body = [f"![{record.package}: {words['chart']}]({link})"]
    else:
        make, accepts = VIEWS[kind]
        if len(arguments) not in accepts:
            raise ReportError(f"{kind} takes {accepts[0]} to {accepts[-1]} arguments, got {len(arguments)}")
        body = make(record, words, *arguments)
    peer = arguments[0] if kind == "summary" and arguments else None
    return [*body, *caption(record, kind, project.stale_kernels(name), words, peer)]


def render_text(project: Project, path: Path, text: str, rendered: Rendered) -> str:
    """The text with everything between markers written anew. Problems go to `rendered.problems`, their text stays."""
    out: list[str] = []
    open_marker: str | None = None
    old: list[str] = []
    where = path.relative_to(project.root).as_posix()
    fenced = False
    for number, line in enumerate(text.split("\n"), 1):
        if line.lstrip().startswith("```") and open_marker is None:
            fenced = not fenced
        begin, end = (None, None) if fenced else (BEGIN.match(line), END.match(line))
        if begin and open_marker is None:
            open_marker, old = begin["name"], []
            out.append(line)
        elif end and open_marker is not None and open_marker == end["name"]:
            try:
                out += ["", *_view(project, path, open_marker, rendered), ""]
            except ReportError as error:
                rendered.problems.append(f"{where}:{number}: {open_marker}: {error}")
                out += old
            out.append(line)
            open_marker = None
        elif begin or end:
            found = (begin or end or {"name": "?"})["name"]
            expected = f"the end of {open_marker!r}" if open_marker else "no open marker"
            rendered.problems.append(f"{where}:{number}: marker {found!r} where there is {expected}")
            (out if open_marker is None else old).append(line)
        else:
            (out if open_marker is None else old).append(line)
    if open_marker is not None:
        rendered.problems.append(f"{where}: {open_marker!r} is never ended")
        out += old
    return "\n".join(out)


def render(project: Project) -> Rendered:
    """Everything that should be on disk."""
    rendered = Rendered()
    for path in project.markdown():
        text = path.read_text(encoding="utf-8")
        if "<!-- report:" in text:
            rendered.files[path] = render_text(project, path, text, rendered)
    return rendered


def check(project: Project) -> list[str]:
    """Everything that is wrong, one sentence each."""
    rendered = render(project)
    problems = [*project.problems, *rendered.problems, *_check_records(project, rendered.shown)]
    for path, text in rendered.files.items():
        where = path.relative_to(project.root).as_posix()
        if not path.is_file():
            problems.append(f"{where}: is missing; run tools/report.py")
        elif (present := path.read_text(encoding="utf-8")) != text:
            problems.append(f"{where}:{_first_difference(present, text)}")
    return problems


def _first_difference(present: str, wanted: str) -> str:
    left, right = present.split("\n"), wanted.split("\n")
    for number, (a, b) in enumerate(zip(left, right, strict=False), 1):
        if a != b:
            return f"{number}: is not what the record gives: {a[:90]!r}, not {b[:90]!r}; run tools/report.py"
    return f"{min(len(left), len(right))}: ends differently from what the record gives; run tools/report.py"


def _check_records(project: Project, shown: set[str]) -> Iterator[str]:
    measured: dict[str, set[str]] = {}
    for name, record in project.records.items():
        measured.setdefault(record.package, set()).add(record.topic)
        cases = project.cases(record.package)
        if not cases:
            yield f"{name}: packages/{record.package}/benchmarks/cases.py has no CASES"
        for problem in check_record(record, cases or None):
            yield f"{name}: {problem}"
        if name not in shown:
            for row, text in other_kernels(record, project.fingerprints(record.package)):
                yield f"{name}: {row.title()}: {text}, and no table says so"
    for package in project.packages():
        topics, owed = dict.fromkeys(case.topic for case in project.cases(package)), project.not_measured(package)
        for topic in topics:
            if topic not in measured.get(package, set()) and topic not in owed:
                yield f"{package}: the topic {topic!r} of cases.py has no record in docs/results/{package}"
        for topic in owed:
            if topic not in topics or topic in measured.get(package, set()):
                said = "has a record" if topic in topics else "is no topic of it"
                yield f"{package}: NOT_MEASURED of cases.py names {topic!r}, which {said}"


def main(argv: Sequence[str] | None = None) -> int:
    summary, _, details = (__doc__ or "").partition("\n")
    parser = argparse.ArgumentParser(description=summary, epilog=details, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--check", action="store_true", help="change nothing, fail on what is wrong")
    parser.add_argument("--root", type=Path, default=ROOT, help="the project's root folder")
    arguments = parser.parse_args(argv)
    project = Project(arguments.root.resolve())
    if arguments.check:
        problems = check(project)
        for problem in problems:
            print(problem, file=sys.stderr)
        if problems:
            print(f"{len(problems)} problems", file=sys.stderr)
        return 1 if problems else 0
    rendered = render(project)
    for path, text in rendered.files.items():
        if not path.is_file() or path.read_text(encoding="utf-8") != text:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8", newline="\n")
            print(f"wrote {path.relative_to(project.root).as_posix()}")
    for problem in [*project.problems, *rendered.problems]:
        print(problem, file=sys.stderr)
    return 1 if project.problems or rendered.problems else 0


if __name__ == "__main__":
    sys.exit(main())

"""Benchmark records: what a row holds, reading, writing and checking them. Plain Python, so that tools read records
without torch.

A record is one file `docs/results/<package>/<gpu>-<topic>.json`, one row per case. The list of cases is committed
beside the benchmark (`benchmarks/cases.py`), so a row that is missing, doubled or was never asked for can be told.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

__all__ = [
    "SCHEMA",
    "Case",
    "Record",
    "RecordError",
    "Row",
    "check_record",
    "geometric_mean",
    "kernel_fingerprint",
    "other_kernels",
    "read_record",
    "record_name",
    "write_record",
]

SCHEMA = 1
ENVIRONMENT_KEYS = ("gpu", "driver", "sm_clock", "torch", "cuda", "python", "package_version")
# Microseconds and ratios are stored with this many decimals; a ratio is computed from the stored microseconds.
DECIMALS = 4

Key = tuple[str, str, str, str, tuple[tuple[str, int], ...]]


class RecordError(ValueError):
    """A record that cannot be read or must not be written; the message names the file, the row and the rule."""


@dataclass(frozen=True)
class Case:
    """One line of a grid: what is measured, without saying how.

    Attributes:
        topic: the record it belongs to (`plain`, `chained`, `ragged`, `host`).
        op: the operator's name.
        case: what the shape stands for, such as `Qwen3-0.6B hidden` or `grid`.
        shape: the operator's sizes by name, such as `{"rows": 16, "cols": 4096}`.
        dtype: `float16`, `bfloat16`, `float32` or a longer name of the operator's own, such as `float16 int4 g64`.
        variant: `auto`, or the kernel that is forced.
        bytes: what has to cross DRAM once: every input read and every output written.
        flops: arithmetic that cannot be avoided; 0 where the bytes decide.
    """

    topic: str
    op: str
    case: str
    shape: Mapping[str, int]
    dtype: str
    variant: str = "auto"
    bytes: int = 0
    flops: int = 0

    @property
    def key(self) -> Key:
        """What names a case: operator, case, variant, dtype, shape."""
        return (self.op, self.case, self.variant, self.dtype, tuple(sorted(self.shape.items())))

    def title(self) -> str:
        """The key for people: `rms_norm grid rows=16 cols=4096 float16 auto`."""
        return key_title(self.key, self.shape)


def key_title(key: Key, shape: Mapping[str, int] | None = None) -> str:
    """A row's key for people: `rms_norm grid rows=16 cols=4096 float16 auto`."""
    op, case, variant, dtype, items = key
    sizes = " ".join(f"{name}={size}" for name, size in (shape or dict(items)).items())
    return " ".join(part for part in (op, case, sizes, dtype, variant) if part)


@dataclass
class Row:
    """One measured case. Times are microseconds per call.

    `spread` is the interquartile range of the replays over their median. `peers` holds each peer's median;
    `peers_failed` names those that did not run on this case and why. `ratio` is the best peer's time over ours
    (above 1: ours is faster). `bound_us` is the physical floor on that GPU. `error` and `error_limit` are of the
    element nearest to its limit. `figures` holds what else is to be known of a case, by name.
    """

    op: str
    case: str
    variant: str
    shape: dict[str, int]
    dtype: str
    kernel_fingerprint: str | None
    route: str
    us: float
    spread: float
    peers: dict[str, float] = field(default_factory=dict)
    best_peer: str | None = None
    ratio: float | None = None
    bound_us: float | None = None
    host_us: float | None = None
    peers_host: dict[str, float] = field(default_factory=dict)
    error: float | None = None
    error_limit: float | None = None
    bytes: int = 0
    peers_failed: dict[str, str] = field(default_factory=dict)
    peers_spread: dict[str, float] = field(default_factory=dict)
    figures: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.us = _rounded(self.us)
        self.spread = _rounded(self.spread)
        self.peers = {name: _rounded(us) for name, us in self.peers.items()}
        if self.peers and self.best_peer is None:
            self.best_peer = min(self.peers, key=lambda name: self.peers[name])
        if self.ratio is None and self.best_peer is not None and self.us > 0:
            self.ratio = _rounded(self.peers[self.best_peer] / self.us)

    @property
    def key(self) -> Key:
        """The key of the case that the row measures."""
        return (self.op, self.case, self.variant, self.dtype, tuple(sorted(self.shape.items())))

    @property
    def gigabytes_per_s(self) -> float | None:
        """Bytes that cross DRAM over the time, in GB/s (1e9); None without bytes."""
        return self.bytes / self.us / 1e3 if self.bytes and self.us > 0 else None

    def title(self) -> str:
        """The key for people."""
        return key_title(self.key, self.shape)


@dataclass
class Record:
    """A file of rows that were measured in one run on one machine."""

    package: str
    topic: str
    date: str
    environment: dict[str, Any]
    rows: list[Row] = field(default_factory=list)
    peers_unavailable: dict[str, str] = field(default_factory=dict)
    schema: int = SCHEMA


def _rounded(value: float) -> float:
    return round(float(value), DECIMALS)


def geometric_mean(values: Iterable[float]) -> float:
    """Geometric mean; NaN of nothing, so that an empty selection cannot pass for a result."""
    logs = [math.log(value) for value in values]
    return math.exp(sum(logs) / len(logs)) if logs else math.nan


def record_name(gpu: str, topic: str) -> str:
    """`h200-plain.json` for "NVIDIA H200" and "plain"."""
    short = re.sub(r"^nvidia\s+(geforce\s+)?", "", gpu.strip().lower())
    return f"{re.sub(r'[^a-z0-9]+', '-', short).strip('-')}-{topic}.json"


def write_record(path: str | Path, record: Record) -> Path:
    """Writes a record with one row per line, so that differences of two runs can be read. Returns the path.

    Raises:
        RecordError: the record is incomplete or contradicts itself (see `check_record`).
    """
    path = Path(path)
    problems = check_record(record)
    if problems:
        raise RecordError(f"{path.name}: not written: " + "; ".join(problems[:5]))
    head = {name: value for name, value in dataclasses.asdict(record).items() if name != "rows"}
    head = {"schema": head.pop("schema"), **head}
    lines = ["{"]
    lines += [f"{json.dumps(name)}: {json.dumps(value, allow_nan=False)}," for name, value in head.items()]
    rows = [json.dumps(_row_to_json(row), allow_nan=False) for row in record.rows]
    lines += ['"rows": [', ",\n".join(rows), "]", "}"]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(lines) + "\n", encoding="utf-8", newline="\n")
    return path


def _row_to_json(row: Row) -> dict[str, Any]:
    values = dataclasses.asdict(row)
    optional = ("peers_failed", "peers_host", "peers_spread", "figures")
    return {name: value for name, value in values.items() if value or name not in optional}


def read_record(path: str | Path) -> Record:
    """Reads a record and checks its form.

    Raises:
        RecordError: not JSON, another schema, or a key that is missing, unknown or of the wrong type.
    """
    path = Path(path)
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise RecordError(f"{path.name}: cannot be read: {error}") from error
    if not isinstance(data, dict) or data.get("schema") != SCHEMA:
        found = data.get("schema") if isinstance(data, dict) else type(data).__name__
        raise RecordError(f"{path.name}: schema must be {SCHEMA}, found {found!r}")
    rows_data = data.get("rows")
    if not isinstance(rows_data, list):
        raise RecordError(f"{path.name}: rows must be a list")
    rows = [_build(Row, row, f"{path.name}: row {number}") for number, row in enumerate(rows_data)]
    record: Record = _build(Record, {**data, "rows": rows}, path.name)
    return record


def _build(cls: Any, data: Any, where: str) -> Any:
    if not isinstance(data, dict):
        raise RecordError(f"{where}: must be an object, found {type(data).__name__}")
    fields = {f.name: f for f in dataclasses.fields(cls)}
    unknown = sorted(set(data) - set(fields))
    if unknown:
        raise RecordError(f"{where}: unknown key {unknown[0]!r}")
    for name, f in fields.items():
        required = f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING
        if name not in data:
            if required:
                raise RecordError(f"{where}: key {name!r} is missing")
            continue
        expected = _TYPES[str(f.type)]
        value = data[name]
        if not isinstance(value, expected) or isinstance(value, bool):
            raise RecordError(f"{where}: {name} must be {f.type}, found {value!r}")
    return cls(**data)


_NUMBER = (int, float)
_NONE = type(None)
_TYPES: dict[str, tuple[type, ...]] = {
    "str": (str,),
    "int": (int,),
    "float": _NUMBER,
    "str | None": (str, _NONE),
    "float | None": (*_NUMBER, _NONE),
    "dict[str, int]": (dict,),
    "dict[str, float]": (dict,),
    "dict[str, str]": (dict,),
    "dict[str, Any]": (dict,),
    "list[Row]": (list,),
}


def check_record(
    record: Record, cases: Sequence[Case] | None = None, fingerprints: Mapping[str, str] | None = None
) -> list[str]:
    """Everything that is wrong with a record, one sentence each; an empty list when nothing is.

    Args:
        cases: the committed grid. Rows must be exactly the cases of the record's topic, each once.
        fingerprints: kernel family to fingerprint of the present sources. A row taken on another kernel is reported.
    """
    problems: list[str] = []
    for name in ENVIRONMENT_KEYS:
        if name not in record.environment:
            problems.append(f"environment has no {name!r}")
    if not record.rows:
        problems.append("no rows")
    for key, count in Counter(row.key for row in record.rows).items():
        if count > 1:
            problems.append(f"{key_title(key)}: measured {count} times")
    for row in record.rows:
        problems += [f"{row.title()}: {text}" for text in _check_row(row)]
    if cases is not None:
        wanted = Counter(case.key for case in cases if case.topic == record.topic)
        present = {row.key for row in record.rows}
        problems += [f"{key_title(key)}: listed {n} times in cases.py" for key, n in wanted.items() if n > 1]
        problems += [f"{key_title(key)}: no row for this case" for key in wanted if key not in present]
        problems += [f"{key_title(key)}: no such case in cases.py" for key in sorted(present - set(wanted))]
    if fingerprints is not None:
        problems += [f"{row.title()}: {text}" for row, text in other_kernels(record, fingerprints)]
    return problems


def _check_row(row: Row) -> list[str]:
    problems = []
    numbers = {"us": row.us, **{f"peer {name}": us for name, us in row.peers.items()}}
    for name, us in numbers.items():
        if not (isinstance(us, _NUMBER) and math.isfinite(us) and us > 0):
            problems.append(f"{name} is {us!r}, must be above 0")
    if problems:
        return problems
    if row.peers:
        fastest = min(row.peers.values())
        if row.best_peer not in row.peers:
            problems.append(f"best_peer {row.best_peer!r} is not among its peers {sorted(row.peers)}")
        elif row.peers[row.best_peer] != fastest:
            name = min(row.peers, key=lambda peer: row.peers[peer])
            problems.append(f"best_peer is {row.best_peer!r} but {name!r} is faster")
        expected = fastest / row.us
        if row.ratio is None or abs(row.ratio - expected) > 0.6 * 10**-DECIMALS:
            problems.append(f"ratio is {row.ratio} but its microseconds give {expected:.{DECIMALS}f}")
    elif row.ratio is not None or row.best_peer is not None:
        problems.append("has a ratio or best_peer but no peers")
    if row.error is not None and row.error_limit is not None and not row.error <= row.error_limit:
        problems.append(f"error {row.error:.3e} is over its limit {row.error_limit:.3e}")
    return problems


def kernel_fingerprint(fingerprints: Mapping[str, str], kernel: str) -> str | None:
    """The fingerprint of a kernel by its name, or None when the sources have no such kernel.

    A kernel is one file of `csrc/` (`sm80_stream` of `sm80_stream.cu`) or several that continue its name (`sm80_row` of
    `sm80_row_rms.cu` and `sm80_row_softmax.cu`); of several, their fingerprints together are the kernel's.
    """
    if kernel in fingerprints:
        return fingerprints[kernel]
    parts = [f"{stem} {fingerprints[stem]}" for stem in sorted(fingerprints) if stem.startswith(f"{kernel}_")]
    if len(parts) == 1:
        return parts[0].split()[1]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16] if parts else None


def other_kernels(record: Record, fingerprints: Mapping[str, str]) -> list[tuple[Row, str]]:
    """The rows whose own kernel is not the one of the present sources, with a sentence each.

    Rows without a fingerprint ran on torch (their route says so) and have no kernel to compare.
    """
    stale = []
    for row in record.rows:
        present = kernel_fingerprint(fingerprints, row.route)
        if row.kernel_fingerprint is None:
            if present is not None:
                stale.append((row, f"ran {row.route} but has no fingerprint of it"))
        elif present is None:
            stale.append((row, f"kernel {row.route!r} is not in the sources"))
        elif present != row.kernel_fingerprint:
            stale.append((row, f"was taken on {row.route} {row.kernel_fingerprint}, the sources are {present}"))
    return stale

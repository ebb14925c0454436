"""Offline route tables: which kernel was measured to be fastest for one exact shape on one exact machine.

A table is a JSON file in `<package>/profiles/` or in the folder that `DANDAN_PROFILES` names (for tables of the
user's own):

    {"schema": 1, "package": "dandan-norm", "device": "NVIDIA H200", "torch": "2.13.0", "cuda": "13.0",
     "rows": [{"op": "rms_norm", "dtype": "float16", "shape": {"cols": 4096}, "kernel": "sm80_row",
               "kernel_fingerprint": "3f1c...", "ratio": 1.21, "record": "h200-plain.json"}]}

A kernel may be followed by one of its configurations and by a number of slices, where the package's kernels have them:
`skinny.8x128.1`. A row that names torch has the fingerprint of all own kernels together (`route_fingerprint`).

Tables are strict because a stale route is worse than none: a row counts only on the same device name, torch version,
CUDA version and kernel fingerprint, and serves one exact shape. Of a table that is truncated, foreign or older
nothing is used, and one warning names the key that differed, what was wanted and what was found. A row whose kernel
has changed since is left out, and the table's one warning says so. The compiled library gets what is left as text
lines (`encode`), looks its rows up while it selects a kernel, and `ExecutionInfo.profile` names the row that decided.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib import util
from pathlib import Path
from typing import Any

from dandan_ops_core.backend import TORCH
from dandan_ops_core.device import DeviceInfo
from dandan_ops_core.records import kernel_fingerprint

__all__ = [
    "SCHEMA",
    "ProfileWarning",
    "Row",
    "Table",
    "TableError",
    "decode",
    "encode",
    "load_table",
    "parse_table",
    "profile_folders",
    "route_fingerprint",
    "rows_for",
    "shipped_folders",
    "table_json",
]

SCHEMA = 1
# Tables that one warning names.
SHOWN = 5
# A name that can stand in an encoded line: none of the characters that separate there.
_NAME = re.compile(r"[A-Za-z0-9_.+-]+")


class TableError(ValueError):
    """A table that does not fit. `key` is what differed; `wanted` and `found` say how."""

    def __init__(self, key: str, wanted: object, found: object) -> None:
        super().__init__(f"{key}: wanted {wanted}, found {found}")
        self.key = key
        self.wanted = wanted
        self.found = found


class ProfileWarning(UserWarning):
    """A route table, or some of its rows, were ignored."""


@dataclass(frozen=True)
class Row:
    """One measured route. `shape` is sorted by name; `ratio` is the time of the default route over this one's."""

    op: str
    dtype: str
    shape: tuple[tuple[str, int], ...]
    kernel: str
    kernel_fingerprint: str
    ratio: float
    record: str

    @property
    def key(self) -> tuple[str, str, tuple[tuple[str, int], ...]]:
        """What a row is looked up by: operator, dtype, shape."""
        return (self.op, self.dtype, self.shape)

    def line(self) -> str:
        """`rms_norm;float16;cols=4096,rows=16;sm80_row`."""
        sizes = ",".join(f"{name}={size}" for name, size in self.shape)
        return f"{self.op};{self.dtype};{sizes};{self.kernel}"


@dataclass(frozen=True)
class Table:
    """A parsed table: what it was measured on, and its rows."""

    package: str
    device: str
    torch: str
    cuda: str
    rows: tuple[Row, ...]


# ------------------------------------------------------------------------------------------------------------------
# Form


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _check_keys(data: Any, wanted: Sequence[str], where: str) -> None:
    if not isinstance(data, dict):
        raise TableError(where or "table", "an object", _shown(data))
    prefix = f"{where}." if where else ""
    for name in wanted:
        if name not in data:
            raise TableError(f"{prefix}{name}", "a value", "nothing")
    for name in data:
        if name not in wanted:
            raise TableError(f"{prefix}{name}", "no such key", _shown(data[name]))


def _text(data: Mapping[str, Any], name: str, where: str, *, encoded: bool = False) -> str:
    value = data[name]
    if not isinstance(value, str) or not value:
        raise TableError(f"{where}{name}", "a text that is not empty", _shown(value))
    if encoded and not _NAME.fullmatch(value):
        raise TableError(f"{where}{name}", "letters, digits, '_', '.', '+', '-'", _shown(value))
    return value


def _parse_row(data: Any, number: int) -> Row:
    where = f"rows[{number}]"
    _check_keys(data, ("op", "dtype", "shape", "kernel", "kernel_fingerprint", "ratio", "record"), where)
    shape = data["shape"]
    if not isinstance(shape, dict) or not shape:
        raise TableError(f"{where}.shape", "an object of sizes", _shown(shape))
    for name, size in shape.items():
        if not _NAME.fullmatch(name):
            raise TableError(f"{where}.shape", "names of letters, digits and '_'", _shown(name))
        if not isinstance(size, int) or isinstance(size, bool) or size < 0:
            raise TableError(f"{where}.shape.{name}", "a whole number of 0 or more", _shown(size))
    ratio = data["ratio"]
    if not isinstance(ratio, (int, float)) or isinstance(ratio, bool) or not math.isfinite(ratio) or ratio <= 0:
        raise TableError(f"{where}.ratio", "a number above 0", _shown(ratio))
    prefix = f"{where}."
    return Row(
        op=_text(data, "op", prefix, encoded=True),
        dtype=_text(data, "dtype", prefix, encoded=True),
        shape=tuple(sorted(shape.items())),
        kernel=_text(data, "kernel", prefix, encoded=True),
        kernel_fingerprint=_text(data, "kernel_fingerprint", prefix),
        ratio=float(ratio),
        record=_text(data, "record", prefix),
    )


def parse_table(data: Any) -> Table:
    """Checks the form of a table's JSON value.

    Raises:
        TableError: a key is missing, unknown, of the wrong type, or two rows have one op, dtype and shape.
    """
    if isinstance(data, dict) and data.get("schema") != SCHEMA:
        raise TableError("schema", SCHEMA, _shown(data.get("schema")))
    _check_keys(data, ("schema", "package", "device", "torch", "cuda", "rows"), "")
    rows_data = data["rows"]
    if not isinstance(rows_data, list):
        raise TableError("rows", "a list", _shown(rows_data))
    rows = [_parse_row(row, number) for number, row in enumerate(rows_data)]
    seen: dict[object, int] = {}
    for number, row in enumerate(rows):
        if row.key in seen:
            raise TableError(f"rows[{number}]", f"a shape of its own (rows[{seen[row.key]}] has it)", row.line())
        seen[row.key] = number
    return Table(
        package=_text(data, "package", ""),
        device=_text(data, "device", ""),
        torch=_text(data, "torch", ""),
        cuda=_text(data, "cuda", ""),
        rows=tuple(rows),
    )


def load_table(path: str | Path) -> Table:
    """Reads and checks one file.

    Raises:
        TableError: it cannot be read, is not JSON (truncated) or has another form.
    """
    try:
        data = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise TableError("file", "a readable file", error.strerror or str(error)) from error
    except ValueError as error:
        raise TableError("file", "a complete JSON value", str(error)) from error
    return parse_table(data)


def table_json(table: Table) -> str:
    """The file of a table, one row per line."""
    head = {"schema": SCHEMA, "package": table.package, "device": table.device, "torch": table.torch}
    head["cuda"] = table.cuda
    lines = [f"{json.dumps(name)}: {json.dumps(value)}," for name, value in head.items()]
    rows = [json.dumps({**vars(row), "shape": dict(row.shape)}) for row in table.rows]
    return "\n".join(["{", *lines, '"rows": [', ",\n".join(rows), "]", "}"]) + "\n"


# ------------------------------------------------------------------------------------------------------------------
# Matching


def shipped_folders(package: str) -> list[Path]:
    """The `profiles/` of an installed package."""
    spec = util.find_spec(package.replace("-", "_"))
    places = (spec.submodule_search_locations or []) if spec is not None else []
    return [Path(place) / "profiles" for place in places]


def profile_folders(package: str) -> list[Path]:
    """Where tables of a package are looked for: its own `profiles/` first, then the folder in DANDAN_PROFILES."""
    folders = shipped_folders(package)
    extra = os.environ.get("DANDAN_PROFILES")
    if extra:
        folders.append(Path(extra))
    return folders


def _public(version: str) -> str:
    """A torch version without its local part: "2.13.0" for "2.13.0+cu130". The CUDA version is a key of its own."""
    return version.partition("+")[0]


def _require(key: str, wanted: object, found: object) -> None:
    if wanted != found:
        raise TableError(key, wanted, found)


def _match(table: Table, package: str, device_info: DeviceInfo) -> None:
    _require("package", package, table.package)
    _require("device", device_info.name, table.device)
    _require("torch", _public(device_info.torch or "none"), _public(table.torch))
    _require("cuda", device_info.torch_cuda, table.cuda)


def route_fingerprint(fingerprints: Mapping[str, str], kernel: str) -> str | None:
    """What a row keeps as its kernel's fingerprint; None when the sources have no such kernel.

    For `skinny.8x128.1` that of `skinny`. For torch that of all own kernels together, because torch won against them
    and a change of any of them reopens the question.
    """
    if kernel != TORCH:
        return kernel_fingerprint(fingerprints, kernel.partition(".")[0])
    if not fingerprints:
        return None
    together = "\n".join(f"{stem} {fingerprints[stem]}" for stem in sorted(fingerprints))
    return hashlib.sha256(together.encode()).hexdigest()[:16]


def _fresh(table: Table, fingerprints: Mapping[str, str]) -> tuple[list[Row], list[TableError]]:
    """The rows whose kernel is the built one, and for each other row what differed."""
    rows, stale = [], []
    for number, row in enumerate(table.rows):
        present = route_fingerprint(fingerprints, row.kernel)
        if present == row.kernel_fingerprint:
            rows.append(row)
        elif present is None:
            stale.append(TableError(f"rows[{number}].kernel", f"one of {sorted(fingerprints)}", row.kernel))
        else:
            where = f"rows[{number}].kernel_fingerprint of {row.kernel}"
            stale.append(TableError(where, present, row.kernel_fingerprint))
    return rows, stale


def rows_for(
    package: str,
    build_info: Mapping[str, Any],
    device_info: DeviceInfo,
    *,
    folders: Iterable[str | Path] | None = None,
) -> list[Row]:
    """The rows of all tables of `package` that fit this device, torch, CUDA and these kernels, sorted by their key.

    Args:
        package: the distribution's name, such as "dandan-norm".
        build_info: the library's `_build_info.json`; its "fingerprints" are the present kernels.
        device_info: of the device that calls will run on.
        folders: where to look instead of `profile_folders(package)`.

    Tables that are not used, in whole or in part, cause one ProfileWarning with the key that differed; only a shipped
    table of another device is passed over in silence. A later table replaces rows of an earlier one, so the user's own
    measurements win over the shipped ones. Never raises for a table.
    """
    package = package.replace("_", "-")
    fingerprints = dict(build_info.get("fingerprints") or {})
    found: dict[object, Row] = {}
    ignored: list[tuple[str, str]] = []
    fitted = False
    shipped = set(shipped_folders(package)) if folders is None else set()
    for folder in profile_folders(package) if folders is None else [Path(f) for f in folders]:
        for path in sorted(folder.glob("*.json")) if folder.is_dir() else []:
            try:
                table = load_table(path)
                _match(table, package, device_info)
            except TableError as error:
                if error.key != "device" or folder not in shipped:
                    ignored.append((error.key, f"{path} is ignored: {error}"))
                continue
            fitted = True
            rows, stale = _fresh(table, fingerprints)
            if stale:
                part = f"{len(stale)} of {len(table.rows)} rows of {path} are ignored"
                ignored.append((stale[0].key, f"{part}, the first for {stale[0]}"))
            found.update({row.key: row for row in rows})
    texts = [text for key, text in ignored if not (fitted and key == "device")]
    if texts:
        more = f"; and {len(texts) - SHOWN} more" if len(texts) > SHOWN else ""
        warnings.warn(f"route tables of {package}: {'; '.join(texts[:SHOWN])}{more}", ProfileWarning, stacklevel=2)
    return sorted(found.values(), key=lambda row: row.key)


# ------------------------------------------------------------------------------------------------------------------
# What the compiled library gets


def encode(rows: Iterable[Row]) -> bytes:
    """Rows as the compiled library reads them: ASCII lines `op;dtype;key=value,...;kernel`, keys sorted."""
    return "".join(row.line() + "\n" for row in rows).encode("ascii")


def decode(data: bytes) -> list[tuple[str, str, tuple[tuple[str, int], ...], str]]:
    """The reverse of `encode`: (op, dtype, shape, kernel) of each line; for tests and for showing what a library holds.

    Raises:
        ValueError: a line does not have the four parts.
    """
    rows = []
    for line in data.decode("ascii").splitlines():
        parts = line.split(";")
        if len(parts) != 4:
            raise ValueError(f"route line {line!r}: wanted 4 parts, found {len(parts)}")
        op, dtype, sizes, kernel = parts
        shape = tuple((name, int(size)) for name, _, size in (item.partition("=") for item in sizes.split(",")))
        rows.append((op, dtype, shape, kernel))
    return rows

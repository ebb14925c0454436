"""Route tables: what fits is used, everything else is ignored with one warning that names the key."""

from __future__ import annotations

import dataclasses
import json
import warnings
from pathlib import Path
from typing import Any

import pytest

from dandan_ops_core import profiles
from dandan_ops_core.device import DeviceInfo

H200 = DeviceInfo("NVIDIA H200", "9.0", "580.159.04", 13000, "2.13.0+cu130", "13.0")
BUILD = {"fingerprints": {"sm80_row": "aaa111", "sm90_cluster": "bbb222"}}


def table(**changes: Any) -> dict[str, Any]:
    return {
        "schema": 1,
        "package": "dandan-norm",
        "device": "NVIDIA H200",
        "torch": "2.13.0",
        "cuda": "13.0",
        "rows": [row(), row(op="softmax", shape={"cols": 151936, "rows": 8}, kernel="sm90_cluster")],
        **changes,
    }


def row(**changes: Any) -> dict[str, Any]:
    values = {
        "op": "rms_norm",
        "dtype": "float16",
        "shape": {"rows": 16, "cols": 4096},
        "kernel": "sm80_row",
        "kernel_fingerprint": "aaa111",
        "ratio": 1.2,
        "record": "h200-plain.json",
        **changes,
    }
    if changes.get("kernel") == "sm90_cluster" and "kernel_fingerprint" not in changes:
        values["kernel_fingerprint"] = "bbb222"
    return values


def put(folder: Path, value: Any, name: str = "h200.json") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / name
    path.write_text(value if isinstance(value, str) else json.dumps(value))
    return path


def rows_of(folder: Path, device: DeviceInfo = H200, build: dict[str, Any] = BUILD) -> list[profiles.Row]:
    return profiles.rows_for("dandan-norm", build, device, folders=[folder])


def test_fitting_table_gives_its_rows_without_a_warning(tmp_path: Path) -> None:
    put(tmp_path, table())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        rows = rows_of(tmp_path)
    assert [r.line() for r in rows] == [
        "rms_norm;float16;cols=4096,rows=16;sm80_row",
        "softmax;float16;cols=151936,rows=8;sm90_cluster",
    ]
    encoded = profiles.encode(rows)
    assert encoded == b"rms_norm;float16;cols=4096,rows=16;sm80_row\nsoftmax;float16;cols=151936,rows=8;sm90_cluster\n"
    assert profiles.decode(encoded) == [(r.op, r.dtype, r.shape, r.kernel) for r in rows]


def test_nothing_there_is_nothing_said(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert rows_of(tmp_path / "absent") == []
        assert profiles.encode([]) == b""


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (table(device="NVIDIA H100 80GB HBM3"), "device: wanted NVIDIA H200, found NVIDIA H100 80GB HBM3"),
        (table(torch="2.12.1"), r"torch: wanted 2\.13\.0, found 2\.12\.1"),
        (table(cuda="12.8"), r"cuda: wanted 13\.0, found 12\.8"),
        (table(package="dandan-gemm"), "package: wanted dandan-norm, found dandan-gemm"),
        (table(schema=0), "schema: wanted 1, found 0"),
        (table(schema=2), "schema: wanted 1, found 2"),
        ({key: value for key, value in table().items() if key != "cuda"}, "cuda: wanted a value, found nothing"),
        ({key: value for key, value in table().items() if key != "schema"}, "schema: wanted 1, found None"),
        (table(note="hello"), "note: wanted no such key, found 'hello'"),
        (table(device=7), "device: wanted a text that is not empty, found 7"),
        (table(rows={}), r"rows: wanted a list, found \{\}"),
        (table(rows=[7]), r"rows\[0\]: wanted an object, found 7"),
        (table(rows=[row(ratio="fast")]), r"rows\[0\]\.ratio: wanted a number above 0, found 'fast'"),
        (table(rows=[row(ratio=True)]), r"rows\[0\]\.ratio: wanted a number above 0, found True"),
        (table(rows=[row(), row(shape={})]), r"rows\[1\]\.shape: wanted an object of sizes"),
        (
            table(rows=[row(shape={"rows": -1})]),
            r"rows\[0\]\.shape\.rows: wanted a whole number of 0 or more, found -1",
        ),
        (table(rows=[row(shape={"rows": 1.5})]), r"rows\[0\]\.shape\.rows: wanted a whole number"),
        (table(rows=[row(shape={"a=b": 1})]), r"rows\[0\]\.shape: wanted names of letters"),
        (table(rows=[row(kernel="a;b")]), r"rows\[0\]\.kernel: wanted letters, digits"),
        (table(rows=[row(op="")]), r"rows\[0\]\.op: wanted a text that is not empty"),
        (table(rows=[{"op": "rms_norm"}]), r"rows\[0\]\.dtype: wanted a value, found nothing"),
        (table(rows=[row(), row(kernel="sm90_cluster")]), r"rows\[1\]: wanted a shape of its own \(rows\[0\] has it\)"),
        ([], r"table: wanted an object, found \[\]"),
        (json.dumps(table())[:-30], "file: wanted a complete JSON value"),
        ("", "file: wanted a complete JSON value"),
    ],
)
def test_table_that_does_not_fit_is_ignored_with_one_warning(tmp_path: Path, bad: Any, message: str) -> None:
    path = put(tmp_path, bad)
    with pytest.warns(profiles.ProfileWarning) as caught:
        assert rows_of(tmp_path) == []
    assert len(caught) == 1
    text = str(caught[0].message)
    assert str(path) in text
    with pytest.raises(AssertionError, match=message):
        raise AssertionError(text)


def test_binary_file_is_ignored_with_one_warning(tmp_path: Path) -> None:
    (tmp_path / "bad.json").write_bytes(b"\xff\xfe\x00{")
    with pytest.warns(profiles.ProfileWarning, match="wanted a complete JSON value") as caught:
        assert rows_of(tmp_path) == []
    assert len(caught) == 1


def test_rows_of_changed_kernels_are_left_out_with_one_warning(tmp_path: Path) -> None:
    put(tmp_path, table(rows=[row(kernel_fingerprint="old1"), row(dtype="bfloat16", kernel_fingerprint="old2"),
                              row(dtype="float32"), row(op="argmax", kernel="sm70_gone")]))  # fmt: skip
    with pytest.warns(profiles.ProfileWarning) as caught:
        rows = rows_of(tmp_path)
    assert [r.dtype for r in rows] == ["float32"]
    assert len(caught) == 1
    text = str(caught[0].message)
    assert "3 of 4 rows" in text
    assert "rows[0].kernel_fingerprint of sm80_row: wanted aaa111, found old1" in text


def test_row_of_torch_ends_with_any_change_of_a_kernel(tmp_path: Path) -> None:
    """Torch was the fastest beside the kernels of that day."""
    together = profiles.route_fingerprint(BUILD["fingerprints"], "torch")
    assert together is not None
    assert together not in BUILD["fingerprints"].values()
    put(tmp_path, table(rows=[row(kernel="torch", kernel_fingerprint=together)]))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert [r.kernel for r in rows_of(tmp_path)] == ["torch"]
    for name in BUILD["fingerprints"]:
        changed = {"fingerprints": {**BUILD["fingerprints"], name: "new"}}
        with pytest.warns(profiles.ProfileWarning, match=r"kernel_fingerprint of torch: wanted \w{16}, found"):
            assert rows_of(tmp_path, build=changed) == []
    with pytest.warns(profiles.ProfileWarning, match=r"rows\[0\]\.kernel: wanted one of \[\], found torch"):
        assert rows_of(tmp_path, build={}) == []


def test_row_may_name_a_configuration_of_its_kernel(tmp_path: Path) -> None:
    put(tmp_path, table(rows=[row(kernel="sm80_row.r8.4"), row(op="softmax", kernel="sm70_gone.r8.4")]))
    with pytest.warns(profiles.ProfileWarning, match=r"1 of 2 rows .*rows\[1\]\.kernel: .*found sm70_gone\.r8\.4"):
        rows = rows_of(tmp_path)
    assert profiles.encode(rows) == b"rms_norm;float16;cols=4096,rows=16;sm80_row.r8.4\n"


def test_build_without_kernels_uses_no_row(tmp_path: Path) -> None:
    put(tmp_path, table())
    with pytest.warns(
        profiles.ProfileWarning, match=r"2 of 2 rows .*rows\[0\]\.kernel: wanted one of \[\], found sm80_row"
    ):
        assert rows_of(tmp_path, build={}) == []


def test_cpu_and_cpu_torch_fit_no_table(tmp_path: Path) -> None:
    put(tmp_path, table())
    for device, key in (
        (dataclasses.replace(H200, name="cpu"), "device: wanted cpu"),
        (dataclasses.replace(H200, torch_cuda=None), "cuda: wanted None"),
        (dataclasses.replace(H200, torch=None), "torch: wanted none"),
    ):
        with pytest.warns(profiles.ProfileWarning, match=key):
            assert rows_of(tmp_path, device) == []


def test_shipped_table_of_another_device_is_passed_over_in_silence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shipped, own = tmp_path / "shipped", tmp_path / "own"
    shipped.mkdir()
    own.mkdir()
    put(shipped, table(device="NVIDIA GeForce RTX 5080"))
    monkeypatch.setattr(profiles, "shipped_folders", lambda package: [shipped])
    monkeypatch.delenv("DANDAN_PROFILES", raising=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert profiles.rows_for("dandan-norm", BUILD, H200) == []
    put(own, table(device="NVIDIA GeForce RTX 5080"))
    monkeypatch.setenv("DANDAN_PROFILES", str(own))
    with pytest.warns(profiles.ProfileWarning, match="device: wanted NVIDIA H200"):
        assert profiles.rows_for("dandan-norm", BUILD, H200) == []
    put(shipped, table(torch="2.9.0"))
    monkeypatch.delenv("DANDAN_PROFILES")
    with pytest.warns(profiles.ProfileWarning, match=r"torch: wanted .*, found 2\.9\.0"):
        assert profiles.rows_for("dandan-norm", BUILD, H200) == []


def test_good_table_beside_a_bad_one_is_used(tmp_path: Path) -> None:
    put(tmp_path, "{", "a.json")
    put(tmp_path, table(), "b.json")
    with pytest.warns(profiles.ProfileWarning) as caught:
        assert len(rows_of(tmp_path)) == 2
    assert len(caught) == 1


def test_all_that_is_ignored_is_in_one_warning(tmp_path: Path) -> None:
    for number in range(7):
        put(tmp_path, table(torch=f"2.9.{number}"), f"{number}.json")
    with pytest.warns(profiles.ProfileWarning, match=r"found 2\.9\.4; and 2 more") as caught:
        assert rows_of(tmp_path) == []
    assert len(caught) == 1


def test_table_of_another_device_is_no_news_beside_one_of_this(tmp_path: Path) -> None:
    put(tmp_path, table(device="NVIDIA L4"), "a.json")
    put(tmp_path, table(), "b.json")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert len(rows_of(tmp_path)) == 2


def test_later_folder_replaces_rows_of_an_earlier_one(tmp_path: Path) -> None:
    put(tmp_path / "shipped", table(rows=[row()]))
    put(tmp_path / "own", table(rows=[row(kernel="sm90_cluster")]))
    rows = profiles.rows_for("dandan_norm", BUILD, H200, folders=[tmp_path / "shipped", tmp_path / "own"])
    assert [r.kernel for r in rows] == ["sm90_cluster"]


def test_folders_are_the_packages_own_and_the_users(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "dandan_example"
    (package / "profiles").mkdir(parents=True)
    (package / "__init__.py").write_text("")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delenv("DANDAN_PROFILES", raising=False)
    assert profiles.profile_folders("dandan-example") == [package / "profiles"]
    monkeypatch.setenv("DANDAN_PROFILES", str(tmp_path / "mine"))
    assert profiles.profile_folders("dandan-example") == [package / "profiles", tmp_path / "mine"]
    assert profiles.profile_folders("dandan-absent") == [tmp_path / "mine"]
    put(package / "profiles", table(package="dandan-example"))
    assert len(profiles.rows_for("dandan-example", BUILD, H200)) == 2


def test_written_table_reads_back(tmp_path: Path) -> None:
    parsed = profiles.parse_table(table())
    path = put(tmp_path, profiles.table_json(parsed))
    assert profiles.load_table(path) == parsed
    assert profiles.load_table(path).rows[0].shape == (("cols", 4096), ("rows", 16))


def test_missing_file_is_a_table_error(tmp_path: Path) -> None:
    with pytest.raises(profiles.TableError, match="file: wanted a readable file, found No such file") as caught:
        profiles.load_table(tmp_path / "absent.json")
    assert caught.value.key == "file"


def test_decode_refuses_other_lines() -> None:
    with pytest.raises(ValueError, match="wanted 4 parts, found 2"):
        profiles.decode(b"a;b\n")

"""tools/peers.py on small libraries and wheels of our own making."""

from __future__ import annotations

import importlib.util
import json
import lzma
import struct
import sys
import zipfile
from pathlib import Path
from types import ModuleType

import pytest
import torch

TOOLS = Path(__file__).resolve().parents[1]


def _load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"tools_{name}", TOOLS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


peers = _load("peers")
PTX, CODE = 1, 2


def entry(kind: int, arch: int, payload: bytes, header: int = 64) -> bytes:
    head = struct.pack("<HHIQ", kind, 0x101, header, len(payload)).ljust(28, b"\0") + struct.pack("<I", arch)
    return head.ljust(header, b"\0") + payload


def container(*parts: bytes) -> bytes:
    body = b"".join(parts)
    return struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(body)) + body


def library() -> bytes:
    looks_like_one = struct.pack("<IHHQ", 0xBA55ED50, 7, 16, 8)
    return b"".join(
        [
            b"ELF front",
            looks_like_one,
            container(entry(CODE, 80, b"A" * 40), entry(CODE, 90, b"B" * 48), entry(PTX, 80, b"P" * 16)),
            b"between",
            container(entry(CODE, 86, b"C" * 8, header=80), entry(CODE, 120, b"D" * 24)),
            b"tail",
            looks_like_one[:10],
        ]
    )


def test_entries_of_every_container_are_found() -> None:
    image = library()
    found = [(e.label, e.size) for e in peers.entries(image)]
    assert found == [("sm_80", 40), ("sm_90", 48), ("ptx_80", 16), ("sm_86", 8), ("sm_120", 24)]
    for e in peers.entries(image):
        assert len(set(image[e.start : e.start + e.size])) == 1


@pytest.mark.parametrize(
    ("code", "gpu", "runs"),
    [(80, 80, True), (80, 86, True), (86, 80, False), (80, 90, False), (90, 90, True), (120, 90, False)],
)
def test_which_code_runs(code: int, gpu: int, runs: bool) -> None:
    assert peers.runs_on(code, gpu) is runs


@pytest.mark.parametrize(
    ("gpu", "kept"),
    [
        (90, {"sm_90": 48, "ptx_80": 16}),
        (86, {"sm_80": 40, "ptx_80": 16, "sm_86": 8}),
        (120, {"ptx_80": 16, "sm_120": 24}),
    ],
)
def test_only_foreign_machine_code_is_zeroed(gpu: int, kept: dict[str, int]) -> None:
    before = library()
    image = bytearray(before)
    assert peers.keep_one_architecture(image, gpu) == kept
    assert len(image) == len(before)
    for e in peers.entries(before):
        payload = image[e.start : e.start + e.size]
        assert payload == (before[e.start : e.start + e.size] if e.label in kept else bytes(e.size))
    outside = bytearray(before)
    for e in peers.entries(before):
        image[e.start : e.start + e.size] = outside[e.start : e.start + e.size] = bytes(e.size)
    assert image == outside


def test_truncated_container_is_left_alone() -> None:
    image = bytearray(container(entry(CODE, 80, b"A" * 40))[:-1])
    before = bytes(image)
    assert peers.keep_one_architecture(image, 90) == {}
    assert image == before


LIBRARY = peers.Library("vllm/example.so", "peers_example.so", ("example_peer::known", "example_peer::unknown"))


def wheel(folder: Path, image: bytes) -> Path:
    path = folder / "vllm-0.33.0-cp38-abi3-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("vllm/scalar_type.py", "uint4 = 1\n")
        archive.writestr("vllm/example.so", image)
    return path


def test_take_writes_library_types_and_manifest(tmp_path: Path) -> None:
    out = tmp_path / "out"
    lines = list(peers.take(wheel(tmp_path, library()), out, 90, [LIBRARY]))
    assert len(lines) == 1
    assert "ptx_80 0.0 MB, sm_90 0.0 MB" in lines[0]
    assert (out / "scalar_type.py").read_text() == "uint4 = 1\n"
    expected = bytearray(library())
    peers.keep_one_architecture(expected, 90)
    assert lzma.decompress((out / "peers_example.so.xz").read_bytes()) == expected
    assert json.loads((out / "peers.json").read_text())["arch"] == 90
    assert peers.unpack(out, LIBRARY, tmp_path).read_bytes() == expected


def test_take_refuses_a_wheel_without_the_library_or_the_code(tmp_path: Path) -> None:
    other = peers.Library("vllm/absent.so", "peers_absent.so", ())
    with pytest.raises(ValueError, match=r"has no vllm/absent\.so"):
        list(peers.take(wheel(tmp_path, library()), tmp_path / "out", 90, [other]))
    with pytest.raises(ValueError, match="no device code for sm_90"):
        list(peers.take(wheel(tmp_path, container(entry(CODE, 80, b"A"))), tmp_path / "out", 90, [LIBRARY]))


def test_command_takes_from_a_given_wheel(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(peers.take, "__defaults__", ([LIBRARY],))
    assert peers.main([str(tmp_path / "out"), "--arch", "8.6", "--wheel", str(wheel(tmp_path, library()))]) == 0
    assert "peers_example.so.xz" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        peers.main([str(tmp_path / "out"), "--arch", "hopper"])


def prepared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    out = tmp_path / "out"
    list(peers.take(wheel(tmp_path, library()), out, 90, [LIBRARY]))
    defined = torch.library.Library("example_peer", "FRAGMENT")
    defined.define("known(Tensor x) -> Tensor")
    monkeypatch.setattr(torch.ops, "load_library", lambda path: None)
    monkeypatch.setattr(peers, "_keep", defined, raising=False)
    return out


def test_load_says_which_operators_there_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = peers.load_peers(prepared(tmp_path, monkeypatch), [LIBRARY])
    assert loaded.ops == {"example_peer::known"}
    assert loaded.missing == {"example_peer::unknown": "peers_example.so does not define it"}
    loaded.require("example_peer::known")
    with pytest.raises(RuntimeError, match=r"example_peer::unknown: peers_example\.so does not define it"):
        loaded.require("example_peer::known", "example_peer::unknown")
    with pytest.raises(RuntimeError, match="no peer library has it"):
        loaded.require("other::op")


def test_load_keeps_the_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = prepared(tmp_path, monkeypatch)

    def refuse(path: str) -> None:
        raise OSError(f"Could not load this library: {path}") from OSError(f"{path}: undefined symbol: abc")

    monkeypatch.setattr(torch.ops, "load_library", refuse)
    loaded = peers.load_peers(out, [LIBRARY])
    assert loaded.ops == set()
    assert "undefined symbol: abc" in loaded.missing["example_peer::known"]
    assert "run tools/peers.py" in peers.load_peers(tmp_path / "nowhere", [LIBRARY]).missing["example_peer::known"]


def test_load_refuses_damaged_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = prepared(tmp_path, monkeypatch)
    packed = out / "peers_example.so.xz"
    good = packed.read_bytes()
    packed.write_bytes(good[:-8])
    assert "is damaged" in peers.load_peers(out, [LIBRARY]).missing["example_peer::known"]
    packed.write_bytes(lzma.compress(b"something else"))
    assert "its checksum is" in peers.load_peers(out, [LIBRARY]).missing["example_peer::known"]


def test_numbers_of_quantised_types_come_from_the_folder(tmp_path: Path) -> None:
    loaded = peers.LoadedPeers(folder=tmp_path)
    with pytest.raises(FileNotFoundError, match=r"run tools/peers\.py"):
        loaded.scalar_type("uint4")
    (tmp_path / "scalar_type.py").write_text(
        "from dataclasses import dataclass\n@dataclass\nclass T:\n    id: int\nclass scalar_types:\n    uint4 = T(7)\n"
    )
    assert loaded.scalar_type("uint4") == 7
    with pytest.raises(AttributeError):
        loaded.scalar_type("uint5")


def test_the_folder_can_be_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DANDAN_PEERS", str(tmp_path / "nowhere"))
    found = peers.find_peers()
    assert found.folder == tmp_path / "nowhere"
    with pytest.raises(RuntimeError, match=r"_C::marlin_gemm: .*is not in"):
        found.require("_C::marlin_gemm")

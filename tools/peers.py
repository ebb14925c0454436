"""Takes the kernels that our benchmarks compare with out of vLLM's wheel, and loads them without installing vLLM.

    python tools/peers.py FOLDER [--arch 9.0] [--wheel vllm-0.33.0-....whl]

vLLM's libraries are built on PyTorch's stable ABI, so `torch.ops.load_library` is enough to call their operators.
The wheel is large (336 MB) because it holds machine code of many architectures. What is written here has the code of
one: the rest is overwritten with zeros, which the CUDA loader never looks at and compression removes. FOLDER then
has NAME.so.xz for each library, `scalar_type.py` (the numbers by which vLLM's operators name quantised types) and
`peers.json` with the checksums that `load_peers` verifies.

Nothing of vLLM becomes part of this project or its wheels; it is Apache-2.0 software that benchmarks call.
"""

from __future__ import annotations

import argparse
import atexit
import hashlib
import importlib.util
import json
import lzma
import os
import shutil
import struct
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

WHEEL = "vllm==0.33.0"
MANIFEST = "peers.json"
SCALAR_TYPES = "vllm/scalar_type.py"


@dataclass(frozen=True)
class Library:
    """A shared library of the wheel: where it is, what it is called here, and the operators that benchmarks use."""

    member: str
    name: str
    ops: tuple[str, ...]


LIBRARIES = (
    Library(
        "vllm/_C_stable_libtorch.abi3.so",
        "peers_C.so",
        (
            "_C::rms_norm",
            "_C::fused_add_rms_norm",
            "_C::silu_and_mul",
            "_C::rotary_embedding",
            "_C::fused_qknorm_rope_cache",
            "_C::marlin_gemm",
            "_C::gptq_marlin_repack",
            "_C::machete_mm",
            "_C::machete_prepack_B",
        ),
    ),
    Library("vllm/vllm_flash_attn/_vllm_fa3_C.abi3.so", "peers_fa3.so", ("_vllm_fa3_C::fwd",)),
)


# ------------------------------------------------------------------------------------------------------------------
# Fat binaries. A container is a header (magic, version, header size, body size) and a body of entries; an entry is a
# header (kind, header size, payload size, ..., architecture at byte 28) and its payload. Kind 1 is PTX, 2 machine code.

_MAGIC = struct.pack("<I", 0xBA55ED50)
_CONTAINER = struct.Struct("<IHHQ")
_ENTRY = struct.Struct("<HHIQ")
_ARCH_AT = 28
_PTX, _CODE = 1, 2


@dataclass(frozen=True)
class Entry:
    """One piece of device code in a fat binary: its kind, architecture (90 for 9.0) and payload bytes."""

    kind: int
    arch: int
    start: int
    size: int

    @property
    def label(self) -> str:
        return f"{'ptx' if self.kind == _PTX else 'sm'}_{self.arch}"


def entries(image: bytes | bytearray) -> Iterator[Entry]:
    """Every entry of every container in a library. Bytes that only look like a container are stepped over."""
    position = image.find(_MAGIC)
    while position >= 0:
        body = position + _CONTAINER.size
        resume = position + len(_MAGIC)
        if body <= len(image):
            _, version, header_size, body_size = _CONTAINER.unpack_from(image, position)
            end = body + body_size
            if version == 1 and header_size == _CONTAINER.size and end <= len(image):
                yield from _container(image, body, end)
                resume = end
        position = image.find(_MAGIC, resume)


def _container(image: bytes | bytearray, position: int, end: int) -> Iterator[Entry]:
    while position + _ARCH_AT + 4 <= end:
        kind, _, header_size, size = _ENTRY.unpack_from(image, position)
        start = position + header_size
        if kind not in (_PTX, _CODE) or header_size < _ARCH_AT + 4 or start + size > end:
            return
        (arch,) = struct.unpack_from("<I", image, position + _ARCH_AT)
        yield Entry(kind, arch, start, size)
        position = start + size


def runs_on(code_arch: int, gpu_arch: int) -> bool:
    """Machine code runs within its own major architecture, on the same or a later minor one."""
    return code_arch // 10 == gpu_arch // 10 and code_arch <= gpu_arch


def keep_one_architecture(image: bytearray, gpu_arch: int) -> dict[str, int]:
    """Zeroes, in place, machine code that a GPU of `gpu_arch` cannot run; PTX stays. Returns bytes kept by label."""
    kept: dict[str, int] = {}
    for entry in list(entries(image)):
        if entry.kind == _CODE and not runs_on(entry.arch, gpu_arch):
            image[entry.start : entry.start + entry.size] = bytes(entry.size)
        else:
            kept[entry.label] = kept.get(entry.label, 0) + entry.size
    return kept


# ------------------------------------------------------------------------------------------------------------------
# Taking out


def download(folder: Path) -> Path:
    """Downloads the wheel with pip and returns its path. Raises CalledProcessError when pip fails."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
    command += ["--python-version=3.12", "--implementation=cp", "--abi=abi3", "--dest", str(folder)]
    command += [f"--platform=manylinux_2_{minor}_x86_64" for minor in (28, 31, 34, 35)]
    subprocess.run([*command, WHEEL], check=True)
    return next(folder.glob("vllm-*.whl"))


def take(wheel: Path, out: Path, gpu_arch: int, libraries: Sequence[Library] = LIBRARIES) -> Iterator[str]:
    """Writes the libraries of `wheel` into `out`, yielding one line about each.

    Raises:
        ValueError: the wheel lacks a library, or a library has no code that `gpu_arch` can run.
    """
    out.mkdir(parents=True, exist_ok=True)
    checksums = {}
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        wanted = [SCALAR_TYPES, *(library.member for library in libraries)]
        absent = [member for member in wanted if member not in names]
        if absent:
            raise ValueError(f"{wheel.name} has no {absent[0]}")
        (out / "scalar_type.py").write_bytes(archive.read(SCALAR_TYPES))
        for library in libraries:
            image = bytearray(archive.read(library.member))
            kept = keep_one_architecture(image, gpu_arch)
            if not any(size for label, size in kept.items()):
                raise ValueError(f"{library.member} has no device code for sm_{gpu_arch}")
            packed = lzma.compress(bytes(image), preset=6)
            checksums[library.name] = hashlib.sha256(image).hexdigest()
            (out / f"{library.name}.xz").write_bytes(packed)
            shown = ", ".join(f"{label} {size / 1e6:.1f} MB" for label, size in sorted(kept.items()))
            yield f"{library.name}.xz: {len(packed) / 1e6:.1f} MB; device code kept: {shown}"
    manifest = {"schema": 1, "wheel": wheel.name, "arch": gpu_arch, "sha256": checksums}
    (out / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")


# ------------------------------------------------------------------------------------------------------------------
# Loading


@dataclass
class LoadedPeers:
    """Operators that can be called through `torch.ops`, as `namespace::name`, and why others cannot."""

    ops: set[str] = field(default_factory=set)
    missing: dict[str, str] = field(default_factory=dict)
    folder: Path = Path()

    def require(self, *names: str) -> None:
        """Raises RuntimeError with the reason unless every operator is there: the loader of a benchmark peer."""
        for name in names:
            if name not in self.ops:
                raise RuntimeError(f"{name}: {self.missing.get(name, 'no peer library has it')}")

    def scalar_type(self, name: str) -> int:
        """The number by which vLLM's operators call a quantised type, such as `uint4b8`.

        Raises:
            FileNotFoundError: the folder has no scalar_type.py.
            AttributeError: it has no such type.
        """
        path = self.folder / "scalar_type.py"
        spec = importlib.util.spec_from_file_location("_peers_scalar_type", path)
        if spec is None or spec.loader is None or not path.is_file():
            raise FileNotFoundError(f"scalar_type.py is not in {self.folder}: run tools/peers.py")
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module  # its dataclasses look for it there
        spec.loader.exec_module(module)
        return int(getattr(module.scalar_types, name).id)


def unpack(folder: Path, library: Library, target: Path) -> Path:
    """Unpacks one library into `target` and verifies its checksum where the folder has a manifest.

    Raises:
        FileNotFoundError: the folder does not have it.
        ValueError: it is damaged.
    """
    packed = folder / f"{library.name}.xz"
    if not packed.is_file():
        raise FileNotFoundError(f"{packed.name} is not in {folder}: run tools/peers.py")
    try:
        image = lzma.decompress(packed.read_bytes())
    except (lzma.LZMAError, EOFError) as error:
        raise ValueError(f"{packed.name} is damaged: {error}") from error
    manifest = folder / MANIFEST
    if manifest.is_file():
        wanted = json.loads(manifest.read_text(encoding="utf-8"))["sha256"].get(library.name)
        found = hashlib.sha256(image).hexdigest()
        if wanted != found:
            raise ValueError(f"{packed.name} is damaged: its checksum is {found[:12]}, the manifest says {wanted}")
    path = target / library.name
    path.write_bytes(image)
    return path


def load_peers(folder: str | Path, libraries: Sequence[Library] = LIBRARIES) -> LoadedPeers:
    """Loads the libraries of a folder that `take` wrote. Never raises for a peer: `missing` has the reason per
    operator.

    The unpacked files live in a temporary folder until the process ends.
    """
    import torch

    folder = Path(folder)
    target = Path(tempfile.mkdtemp(prefix="dandan-peers-"))
    atexit.register(shutil.rmtree, target, ignore_errors=True)
    loaded = LoadedPeers(folder=folder)
    for library in libraries:
        try:
            torch.ops.load_library(str(unpack(folder, library, target)))
        except (OSError, ValueError, KeyError, RuntimeError) as error:
            # torch says that it could not load; what the dynamic linker said is the cause.
            first = error.__cause__ if isinstance(error, OSError) else None
            reason = " ".join(str(first or error).split())
            loaded.missing.update(dict.fromkeys(library.ops, f"{library.name} did not load: {reason}"))
            continue
        for op in library.ops:
            namespace, name = op.split("::")
            if hasattr(getattr(torch.ops, namespace), name):
                loaded.ops.add(op)
            else:
                loaded.missing[op] = f"{library.name} does not define it"
    return loaded


def find_peers() -> LoadedPeers:
    """The libraries of the folder that DANDAN_PEERS names, or of .peers in the repository; see `load_peers`."""
    return load_peers(os.environ.get("DANDAN_PEERS") or Path(__file__).resolve().parents[1] / ".peers")


def _arch(text: str) -> int:
    major, _, minor = text.partition(".")
    if not (major.isdigit() and minor.isdigit()):
        raise argparse.ArgumentTypeError(f"{text!r} is not an architecture such as 9.0")
    return int(major) * 10 + int(minor)


def main(argv: Sequence[str] | None = None) -> int:
    summary, _, details = (__doc__ or "").partition("\n")
    parser = argparse.ArgumentParser(description=summary, epilog=details, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("out", type=Path, metavar="FOLDER", help="where to write")
    parser.add_argument("--arch", type=_arch, default=90, help="the GPU's compute capability (default 9.0)")
    parser.add_argument("--wheel", type=Path, help=f"a wheel that is already here, instead of downloading {WHEEL}")
    arguments = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        wheel = arguments.wheel
        if wheel is None:
            print(f"downloading {WHEEL} (336 MB)", flush=True)
            wheel = download(Path(folder))
        for line in take(wheel, arguments.out, arguments.arch):
            print(line, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""What a compiled library is, checked under a torch without a GPU: its schemas, kernels and description against what
Python says of it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from dandan_ops_core import PLUGIN_API, loader
from dandan_ops_core.backend import BackendUnavailableError
from dandan_ops_core.records import kernel_fingerprint
from dandan_ops_core.registry import OperatorLibrary

__all__ = [
    "answer_or_refusal",
    "check_description",
    "check_kernel_files",
    "check_loaded_if_built",
    "check_registered",
    "check_route",
    "check_schema",
    "fake_result",
    "name_of",
    "refusal",
    "schemas",
]


def check_loaded_if_built(package: str) -> None:
    """A library that was built is loaded: otherwise its tests would be skipped, and nobody would see a broken wheel."""
    library = loader.load(package)
    if not library.loaded and library.build_info.get("library") is not None:
        raise AssertionError(f"{package} was built and is not loaded: {library.reason}")


# ------------------------------------------------------------------------------------------- schemas and registrations


def schemas(library: OperatorLibrary, *more: Iterable[str]) -> list[str]:
    """Every schema that the compiled library must define; `more` are those that belong to no operator."""
    operators = [schema for operator in library.operators.values() for schema in operator.schemas()]
    return [*library.COMMON, *operators, *(schema for each in more for schema in each)]


def name_of(schema: str) -> str:
    """The name of an operator from its schema."""
    return schema.split("(")[0]


def check_schema(library: OperatorLibrary, schema: str) -> None:
    """The compiled schema is the one that Python defines without the library."""
    found = str(library.op(name_of(schema))._schema)
    if found != f"{library.package}::{schema}":
        raise AssertionError(f"the library defines {found}, Python {library.package}::{schema}")


def check_registered(library: OperatorLibrary, name: str, *, launches: bool) -> None:
    """A kernel is registered, for CUDA where it `launches`: a library with schemas alone would pass every CPU test."""
    key = "CUDA" if launches else "CompositeExplicitAutograd"
    if not torch._C._dispatch_has_kernel_for_dispatch_key(f"{library.package}::{name}", key):
        raise AssertionError(f"{library.package}::{name} has no kernel for {key}")


# ---------------------------------------------------------------------------------------------- what it says of itself


def check_description(library: OperatorLibrary, csrc: Path) -> None:
    """`describe()` and the record of the build agree with each other, with the backends of Python and with the kernel
    files in `csrc`.
    """
    described, info = library.describe(), library.library.build_info
    listed = {key: [name for name in described[key].split(",") if name] for key in ("sass", "ptx")}
    for what, found, wanted in (
        ("plugin_api of the library", described["plugin_api"], PLUGIN_API),
        ("plugin_api of the build", info["plugin_api"], PLUGIN_API),
        ("backends", described["backends"], list(library.codes)),
        ("machine code", listed["sass"], [name.replace(".", "") for name in info["architectures"]]),
        ("PTX", listed["ptx"], [name.replace(".", "") for name in info["ptx"]]),
        ("fingerprints", sorted(info["fingerprints"]), sorted(path.stem for path in csrc.glob("*.cu"))),
    ):
        if found != wanted:
            raise AssertionError(f"{what}: {found}, must be {wanted}")


def check_kernel_files(
    library: OperatorLibrary, csrc: Path, *, suffix: str = "", besides: Collection[str] = ()
) -> None:
    """Every kernel of Python is a file KERNEL + `suffix`.cu with a fingerprint of its own, and every file is one.

    `besides` are files of kernels that no backend is called after.
    """
    kernels = list(library.codes)[3:]  # after auto, torch and cuda
    files = {path.stem for path in csrc.glob("*.cu")}
    wanted = {f"{name}{suffix}" for name in (*kernels, *besides)}
    if files != wanted:
        raise AssertionError(f"kernel files without a kernel: {files - wanted}, kernels without one: {wanted - files}")
    fingerprints = library.library.build_info["fingerprints"]
    for kernel in kernels:
        if kernel_fingerprint(fingerprints, kernel) != fingerprints[f"{kernel}{suffix}"]:
            raise AssertionError(f"{kernel}: its records carry another fingerprint than {kernel}{suffix}.cu")


# ------------------------------------------------------------------------------------------------- routes without a GPU


def refusal(question: Callable[..., Any], *arguments: Any, **keywords: Any) -> str:
    """What a backend that cannot run says; a question that is answered is an AssertionError."""
    try:
        answer = question(*arguments, **keywords)
    except BackendUnavailableError as error:
        return str(error)
    raise AssertionError(f"nothing was refused: {answer}")


def answer_or_refusal(
    library: OperatorLibrary, op: str, inputs: Sequence[Any], kernel: str, arch: int = 90
) -> dict[str, Any] | str:
    """The route of a call on a device of an architecture when `kernel` is asked for, or what the refusal says.

    An answer is of that kernel; a refusal names it, and says what can run.
    """
    outputs = (None,) * len(library.operators[op].outputs)
    try:
        found = library.info(op, inputs, outputs, kernel, arch=arch)
    except BackendUnavailableError as error:
        text = str(error)
        if not (text.startswith(f'{op}: backend "{kernel}" cannot run: ') and '; "auto" and "torch" can' in text):
            raise AssertionError(f"a refusal names {kernel}, why, and what can: {text}") from error
        return text
    if (found["backend"], found["kernel"]) != ("cuda", kernel):
        raise AssertionError(f"{kernel} was asked for: {found}")
    return found


def check_route(library: OperatorLibrary, op: str, inputs: Sequence[Any], kernel: str) -> None:
    """Asked for an H200, a kernel takes the call in one of its configurations, or says that it cannot and what can."""
    found = answer_or_refusal(library, op, inputs, kernel)
    if isinstance(found, dict) and "config" in found:
        names = {each["name"] for each in library.describe()["configs"][kernel]}
        if found["config"] not in names:
            raise AssertionError(f"{kernel} has no configuration {found['config']!r}: {found}")


def fake_result(op: Callable[..., Any], arguments: Sequence[Any]) -> Any:
    """What an operator returns on fakes of its arguments: what torch.compile sees."""
    with FakeTensorMode() as mode:
        return op(*(mode.from_tensor(each) if isinstance(each, torch.Tensor) else each for each in arguments))

"""Routes of a compiled library, asked without a GPU: which code a device would run, what rows of a profile change, and
that every sentence of routes.h which explains a choice is met.
"""

from __future__ import annotations

import contextlib
import functools
import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch

from dandan_ops_core.backend import BackendUnavailableError
from dandan_ops_core.registry import OperatorLibrary
from dandan_ops_core.testing.library import refusal

__all__ = [
    "ARCHITECTURES",
    "H200",
    "NO_ROWS",
    "built",
    "cannot",
    "check_configurations",
    "check_dependent_launch",
    "check_not_rows",
    "check_row_refused",
    "check_without_code",
    "code_for",
    "code_targets",
    "explanations",
    "function_text",
    "home",
    "keys_of",
    "names_in",
    "profile_rows",
    "require_code",
    "sentences",
    "sheet",
]

ARCHITECTURES = (75, 80, 86, 89, 90, 100, 120)
H200 = 90


def sheet(*shape: int, dtype: torch.dtype = torch.float16) -> torch.Tensor:
    """A contiguous tensor of any size that takes no memory; its address counts as aligned."""
    return torch.empty(shape, dtype=dtype, device="meta")


# ------------------------------------------------------------------------------------------------------ architectures


def code_targets(library: OperatorLibrary) -> tuple[list[str], list[int]]:
    """What a library was built for: machine code by name, such as "90a", and PTX by number."""
    described = library.describe()
    machine = [name for name in described["sass"].split(",") if name]
    return machine, [int(name.rstrip("af")) for name in described["ptx"].split(",") if name]


def code_for(library: OperatorLibrary, arch: int) -> int:
    """The architecture of the code that a device would run, said once more: machine code first, then PTX; 0 is none."""
    machine, portable = code_targets(library)
    exact = [int(name[:-1]) for name in machine if name[-1] in "af" and int(name[:-1]) == arch]
    same_major = [int(n) for n in machine if n[-1] not in "af" and int(n) // 10 == arch // 10 and int(n) <= arch]
    return max([*exact, *same_major], default=0) or max([n for n in portable if n <= arch], default=0)


@functools.cache
def home(library: OperatorLibrary) -> int:
    """The architecture that is asked about where it does not matter: an H200's, if the library has code for it."""
    return next(arch for arch in (H200, *ARCHITECTURES) if code_for(library, arch))


def built(library: OperatorLibrary, name: str) -> bool:
    """Whether the library holds machine code of that name, such as "90a"."""
    return name in code_targets(library)[0]


def require_code(library: OperatorLibrary, name: str) -> None:
    """Skips the test where the library holds no machine code of that name: its selection has another answer."""
    if not built(library, name):
        import pytest

        pytest.skip(f"the library was built without code for sm_{name}")


def check_without_code(question: Callable[[str], dict[str, Any]], op: str, backends: Iterable[str]) -> None:
    """Where a library has no code for a device, `auto` takes torch and every one of `backends` is refused, for that
    reason. `question` asks for the route of one call on that device under a backend.
    """
    why = "this build has no code for the device's architecture"
    auto = question("auto")
    if (auto["kernel"], auto["fallback_reason"]) != ("torch", why):
        raise AssertionError(f"there is no code for the device: {auto}")
    for backend in backends:
        found = refusal(question, backend)
        if found != cannot(op, backend, why):
            raise AssertionError(f"the refusal says: {found}")


# ------------------------------------------------------------------------------------------------------------ answers


def keys_of(answer: torch.Tensor) -> set[str]:
    """The keys of what an NAME_info operator returned: JSON as bytes."""
    if answer.dtype != torch.uint8:
        raise AssertionError(f"an answer is bytes, not {answer.dtype}")
    return set(json.loads(bytes(answer.tolist())))


def cannot(op: str, backend: str, why: str, instead: str | None = None) -> str:
    """What a refused backend says; `instead` is the own kernel that would run."""
    own = f', and so can "{instead}"' if instead else ""
    return f'{op}: backend "{backend}" cannot run: {why}; "auto" and "torch" can{own}'


def explanations(question: Callable[..., dict[str, Any]], *arguments: Any, **keywords: Any) -> set[str | None]:
    """Why a route was taken and why no own kernel (None where one was); or why the backend asked for cannot run."""
    try:
        answer = question(*arguments, **keywords)
    except BackendUnavailableError as error:
        return {str(error).split("cannot run: ")[1].split('; "auto"')[0]}
    return {answer["reason"], answer["fallback_reason"]}


def check_configurations(library: OperatorLibrary, kernels: Sequence[str], *, alike: str | None = None) -> None:
    """Each kernel has configurations with names that a row of a profile can hold, no two of one name.

    With `alike`, such as "head_dim", two may have one name when they differ in that.
    """
    tables: dict[str, list[dict[str, Any]]] = library.describe()["configs"]
    if list(tables) != list(kernels):
        raise AssertionError(f"configurations of {list(tables)}, the kernels are {list(kernels)}")
    for kernel, table in tables.items():
        names = [each["name"] for each in table]
        if not names:
            raise AssertionError(f"{kernel} has no configuration")
        for name in names:
            if not re.fullmatch(r"[A-Za-z0-9_+-]+", name):
                raise AssertionError(f"{kernel}: a row of a profile cannot hold {name!r}, it separates by dots")
        kept = [(each["name"], each[alike] if alike else None) for each in table]
        if len(set(kept)) != len(kept):
            raise AssertionError(f"{kernel}: configurations of one name: {sorted(names)}")


# ----------------------------------------------------------------------------------------------------------- profiles


@contextlib.contextmanager
def profile_rows(library: OperatorLibrary) -> Iterator[Callable[[str], None]]:
    """A function that hands rows such as "gemm;float16;k=64,m=4,n=24;sm80_mma\\n" to the library in place of the ones
    before; afterwards there are none.
    """

    def put(text: str) -> None:
        raw = (
            torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8) if text else torch.empty(0, dtype=torch.uint8)
        )
        library.op("set_profile")(raw)

    try:
        yield put
    finally:
        put("")


def check_row_refused(put: Callable[[str], None], good: str, line: str, form: str) -> None:
    """A row in another form is refused by name together with the rows around it, so that those from before stay.

    Args:
        put: hands rows to the library; `profile_rows` makes it.
        good: a row, which is in force afterwards.
        line: the refused row.
        form: the form of a row, as the message says it.
    """
    put(good)
    try:
        put(f"{good}\n{line}\n")
    except RuntimeError as error:
        first = str(error).split("\n")[0]
        if first != f'ValueError: profile row "{line}" is not {form}':
            raise AssertionError(f'the refusal of row "{line}" says: {first}') from error
        return
    raise AssertionError(f'row "{line}" was taken')


NO_ROWS = {
    "float32": torch.zeros(4),
    "2-d": torch.zeros(2, 2, dtype=torch.uint8),
    "strided": torch.zeros(8, dtype=torch.uint8)[::2],
}
"""Tensors that hold no rows of a profile."""


def check_not_rows(library: OperatorLibrary, raw: torch.Tensor) -> None:
    """Rows come as contiguous bytes of the CPU, and nothing else is read."""
    try:
        library.op("set_profile")(raw)
    except RuntimeError as error:
        if not str(error).startswith("TypeError: a contiguous 1-d uint8 tensor on the CPU is needed"):
            raise AssertionError(f"the refusal says: {error}") from error
        return
    raise AssertionError(f"a tensor of {raw.dtype} {tuple(raw.shape)} {raw.stride()} was taken for rows")


def check_dependent_launch(library: OperatorLibrary) -> None:
    """The switch returns what it was before; anything but 0 is on."""
    switch = library.op("set_dependent_launch")
    before = switch(0)
    try:
        for value, was in ((1, 0), (5, 1), (0, 1)):
            found = switch(value)
            if found != was:
                raise AssertionError(f"set_dependent_launch({value}) returned {found}; it was {was} before")
    finally:
        switch(before)


# ----------------------------------------------------------------------------------------------------------- routes.h


def function_text(routes: str, name: str) -> str:
    """The body of one function of routes.h."""
    start = re.search(rf"^inline [\w:* ]+ {name}\(", routes, re.MULTILINE)
    if start is None:
        raise AssertionError(f"routes.h has no function {name}")
    return routes[start.start() : routes.index("\n}\n", start.start())]


def sentences(routes: str, *functions: str, words: int = 2) -> set[str]:
    """Every text of at least so many words in these functions: the sentences with which they explain a choice."""
    texts: set[str] = set()
    for name in functions:
        for line in function_text(routes, name).splitlines():
            texts |= {text for text in re.findall(r'"((?:[^"\\]|\\.)+)"', line) if text.count(" ") >= words - 1}
    return {text.replace('\\"', '"') for text in texts}


def names_in(routes: str, array: str) -> list[str]:
    """The names in an array of routes.h, in its order."""
    found = re.search(rf"{array}\[\] = \{{(.*?)\}}", routes)
    if found is None:
        raise AssertionError(f"routes.h has no array {array}")
    return re.findall(r'"(\w+)"', found.group(1))

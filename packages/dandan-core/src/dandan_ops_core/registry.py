"""Operators of a package in torch.ops, whether its compiled library is loaded or not.

The compiled library defines schemas and CUDA kernels. Where it is not loaded, this module defines the same schemas and
registers the reference for CUDA as well. In both cases it registers here the CPU kernel (the reference), the fake
(shapes and strides, for torch.compile and export) and the `NAME_reference` operators, through which a compiled operator
reaches the torch route.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from dandan_ops_core import device, loader, profiles
from dandan_ops_core.backend import BackendUnavailableError

__all__ = ["Operator", "OperatorLibrary", "named_error"]

_EXCEPTIONS: dict[str, type[Exception]] = {
    "BackendUnavailableError": BackendUnavailableError,
    "RuntimeError": RuntimeError,
    "TypeError": TypeError,
    "ValueError": ValueError,
}


def named_error(error: BaseException) -> Exception | None:
    """The Python exception that an error of a compiled operator stands for: its text begins with the name."""
    text = str(error)
    for name, exception in _EXCEPTIONS.items():
        if text.startswith(f"{name}: "):
            # torch may append a C++ stack trace in later lines.
            return exception(text.removeprefix(f"{name}: ").split("\nException raised from")[0].strip())
    return None


@dataclass(frozen=True)
class Operator:
    """One operator. The callables take the arguments of the schema without `backend` and outputs.

    Attributes:
        name: such as "rms_norm".
        inputs: the schema's input arguments before `backend`, such as "Tensor x, Tensor? weight, float eps".
        outputs: names of the tensors that the `_out` form writes.
        check: raises for arguments that break a rule; takes the outputs, or None, as keyword `out`.
        reference: the result in plain PyTorch.
        empty: uninitialised tensors of the result's shapes, strides and dtypes, for a fake.
        first: what messages call the first argument, whose device is the call's.
    """

    name: str
    inputs: str
    outputs: tuple[str, ...]
    check: Callable[..., None]
    reference: Callable[..., Any]
    empty: Callable[..., Any]
    first: str = "x"

    def schemas(self) -> list[str]:
        """Schemas that a compiled library defines for this operator: NAME, NAME_out, NAME_info."""
        returns = "Tensor" if len(self.outputs) == 1 else "(" + ", ".join("Tensor" for _ in self.outputs) + ")"
        written = ", ".join(f"Tensor({chr(ord('a') + i)}!) {name}" for i, name in enumerate(self.outputs))
        asked = ", ".join(f"Tensor? {name}" for name in self.outputs)
        return [
            f"{self.name}({self.inputs}, int backend) -> {returns}",
            f"{self.name}_out({self.inputs}, int backend, {written}) -> ()",
            f"{self.name}_info({self.inputs}, int backend, {asked}, int arch) -> Tensor",
        ]

    def reference_schemas(self) -> list[str]:
        """Schemas of the torch route: NAME_reference, NAME_reference_out."""
        returns = "Tensor" if len(self.outputs) == 1 else "(" + ", ".join("Tensor" for _ in self.outputs) + ")"
        written = ", ".join(f"Tensor({chr(ord('a') + i)}!) {name}" for i, name in enumerate(self.outputs))
        return [
            f"{self.name}_reference({self.inputs}) -> {returns}",
            f"{self.name}_reference_out({self.inputs}, {written}) -> ()",
        ]


class OperatorLibrary:
    """The operators of one package in torch.ops.

    Attributes:
        library: what became of the compiled library.
        codes: numbers of the `backend` argument by name: "auto", "torch", "cuda", then the kernels.
    """

    COMMON = ("describe() -> Tensor", "set_profile(Tensor rows) -> ()", "set_dependent_launch(int enabled) -> int")
    """What a compiled library defines besides its operators."""

    def __init__(self, package: str, kernels: Sequence[str], operators: Sequence[Operator]) -> None:
        self.package = package
        self.operators = {operator.name: operator for operator in operators}
        self.codes = {name: number for number, name in enumerate(("auto", "torch", "cuda", *kernels))}
        self.profile: str | None = None
        self.library = loader.load(package)
        self._fragment = torch.library.Library(package, "FRAGMENT" if self.library.loaded else "DEF")
        for operator in operators:
            self._register(operator)
        self._fragment.define("load_profile() -> ()")
        self._fragment.impl("load_profile", self._load_profile, "CompositeExplicitAutograd")

    def _register(self, operator: Operator) -> None:
        name, count = operator.name, len(operator.outputs)

        def write(outputs: Sequence[torch.Tensor], results: Any) -> None:
            for output, result in zip(outputs, (results,) if count == 1 else results, strict=True):
                output.copy_(result)

        def kernel(*arguments: Any) -> Any:
            *inputs, backend = arguments
            operator.check(*inputs, out=None)
            self._require_torch(name, backend, inputs[0])
            return operator.reference(*inputs)

        def kernel_out(*arguments: Any) -> None:
            inputs, backend, outputs = arguments[: -count - 1], arguments[-count - 1], arguments[-count:]
            operator.check(*inputs, out=outputs)
            self._require_torch(name, backend, inputs[0])
            write(outputs, operator.reference(*inputs))

        def fake(*arguments: Any) -> Any:
            operator.check(*arguments[:-1], out=None)
            return operator.empty(*arguments[:-1])

        def fake_out(*arguments: Any) -> None:
            operator.check(*arguments[: -count - 1], out=arguments[-count:])

        def reference_out(*arguments: Any) -> None:
            write(arguments[-count:], operator.reference(*arguments[:-count]))

        if not self.library.loaded:
            for schema in operator.schemas()[:2]:
                self._fragment.define(schema)
        for schema in operator.reference_schemas():
            self._fragment.define(schema)
        for key in ("CPU",) if self.library.loaded else ("CPU", "CUDA"):
            self._fragment.impl(name, kernel, key)
            self._fragment.impl(f"{name}_out", kernel_out, key)
        self._fragment.impl(f"{name}_reference", operator.reference, "CompositeExplicitAutograd")
        self._fragment.impl(f"{name}_reference_out", reference_out, "CompositeExplicitAutograd")
        torch.library.register_fake(f"{self.package}::{name}", fake, lib=self._fragment)
        torch.library.register_fake(f"{self.package}::{name}_out", fake_out, lib=self._fragment)

    def op(self, name: str) -> Any:
        """The default overload of torch.ops.PACKAGE.NAME."""
        return getattr(getattr(torch.ops, self.package), name).default

    def number(self, op: str, backend: str) -> int:
        """Number of a backend; ValueError for an unknown name."""
        try:
            return self.codes[backend]
        except (KeyError, TypeError):
            raise ValueError(f"{op}: backend {backend!r} is unknown; it is one of {', '.join(self.codes)}") from None

    def unavailable(self, name: str, backend: str, x: torch.Tensor) -> BackendUnavailableError:
        """The error of an explicit choice on a tensor that no own kernel can reach."""
        why = self.library.reason
        if not x.is_cuda:
            why = f"{self.operators[name].first} is on {x.device}, the own kernels run on CUDA devices"
        return BackendUnavailableError(f'{name}: backend "{backend}" cannot run: {why}; "auto" and "torch" can')

    def _require_torch(self, name: str, number: int, x: torch.Tensor) -> None:
        if number not in (self.codes["auto"], self.codes["torch"]):
            backend = next((known for known, code in self.codes.items() if code == number), None)
            if backend is None:
                raise ValueError(f"{name}: backend number {number} is unknown")
            raise self.unavailable(name, backend, x)

    def explain(self, name: str, error: Exception, inputs: Sequence[Any], out: Any, backend: str) -> Exception:
        """The exception to raise when a call failed with `error`: the broken rule where one is broken, the compiled
        operator's own words else.
        """
        operator = self.operators[name]
        try:
            self.number(name, backend)
            operator.check(*inputs, out=None if out is None else (out,) if len(operator.outputs) == 1 else out)
        except (TypeError, ValueError) as broken:
            return broken
        if isinstance(error, BackendUnavailableError):
            return error
        return named_error(error) or error

    def check_gradients(
        self, name: str, inputs: Sequence[Any], outputs: Sequence[torch.Tensor] | None, backend: str
    ) -> bool:
        """Whether a call records gradients; raises where it would have to and cannot: into `out`, or in an own kernel.

        Args:
            name: the operator.
            inputs: arguments of the schema before `backend`; they and `outputs` have passed the operator's check.
            outputs: the tensors to write into, or None.
            backend: the name that the caller gave.

        Raises:
            ValueError: `out` is given and it or an input requires a gradient.
            BackendUnavailableError: an own kernel is asked for.
        """
        tensors = [t for t in (*inputs, *(outputs or ())) if isinstance(t, torch.Tensor)]
        if not (torch.is_grad_enabled() and any(t.requires_grad for t in tensors)):
            return False
        if outputs is not None:
            raise ValueError(
                f"{name}: out= takes no part in automatic differentiation; call it without out= or under "
                f"torch.no_grad()"
            )
        if backend in ("auto", "torch"):
            return True
        if not (inputs[0].is_cuda and self.library.loaded):
            raise self.unavailable(name, backend, inputs[0])
        raise BackendUnavailableError(
            f'{name}: backend "{backend}" cannot run: an argument needs a gradient, which the own kernels do not '
            f'compute; "auto" and "torch" can, and so can "{backend}" under torch.no_grad()'
        )

    def run_reference(self, name: str, inputs: Sequence[Any], out: Any, backend: str) -> Any:
        """The torch route in Python: for `backend="torch"` and for arguments that need gradients."""
        operator = self.operators[name]
        outputs = None if out is None else (out,) if len(operator.outputs) == 1 else tuple(out)
        self.number(name, backend)
        operator.check(*inputs, out=outputs)
        self.check_gradients(name, inputs, outputs, backend)
        results = operator.reference(*inputs)
        if outputs is None:
            return results
        for output, result in zip(outputs, (results,) if len(outputs) == 1 else results, strict=True):
            output.copy_(result)
        return out

    def info(
        self, name: str, inputs: Sequence[Any], outputs: Sequence[Any], backend: str, arch: int = 0
    ) -> dict[str, Any]:
        """The compiled library's route of a call, as a dictionary. `arch` such as 90 asks for a device of that
        architecture instead of x's.
        """
        try:
            raw = self.op(f"{name}_info")(*inputs, self.number(name, backend), *outputs, arch)
        except RuntimeError as error:
            raise named_error(error) or error from None
        result: dict[str, Any] = json.loads(bytes(raw.tolist()).decode())
        return result

    def describe(self) -> dict[str, Any]:
        """What the compiled library says of itself."""
        result: dict[str, Any] = json.loads(bytes(self.op("describe")().tolist()).decode())
        return result

    def _load_profile(self) -> None:
        """Hands the profile rows that fit the present device to the library. The library asks for this at its first
        launch.

        Rows that the library refuses are reported and left out as a whole; the call that asked goes on with the
        heuristics.
        """
        rows = profiles.rows_for(self.package, self.library.build_info, device.describe())
        if not rows:
            return
        text = profiles.encode(rows)
        try:
            self.op("set_profile")(torch.frombuffer(bytearray(text), dtype=torch.uint8))
        except RuntimeError as error:
            reason = named_error(error) or error
            warnings.warn(
                f"route tables of {self.package} are ignored: {reason}", profiles.ProfileWarning, stacklevel=2
            )
            return
        self.profile = ", ".join(sorted({row.record for row in rows}))

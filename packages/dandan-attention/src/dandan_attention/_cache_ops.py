"""torch.ops.dandan_attention: the operators around a paged cache. The compiled library has no kernel of them yet, so
their schemas, CPU and CUDA kernels are defined here whether it is loaded or not.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from dandan_attention import cache_checks, reference, reference_cache, reference_paged
from dandan_attention._ops import KERNELS
from dandan_ops_core.backend import BackendUnavailableError, ExecutionInfo
from dandan_ops_core.loader import LoadedLibrary
from dandan_ops_core.registry import Operator, OperatorLibrary

UNBUILT = "no kernel of it is built yet"

OPTIONS = "float? softmax_scale, SymInt? window_size, float softcap"
PAGES = "Tensor k_cache, Tensor v_cache, Tensor page_table, Tensor seqused_k"
WRITTEN = "Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor slot_mapping"

PAGED = {
    "paged_attention": f"Tensor q, {PAGES}, {OPTIONS}",
    "paged_attention_varlen": f"Tensor q, {PAGES}, Tensor cu_seqlens_q, SymInt max_seqlen_q, {OPTIONS}",
}
"""Arguments of the schemas before `backend`. None is what None is in Python."""

ROPE = "Tensor q, Tensor k, Tensor cos, Tensor sin, Tensor positions, bool interleaved"
WRITE_KV = f"Tensor k, Tensor v, {WRITTEN}"
FUSED = (
    "Tensor q, Tensor k, Tensor v, Tensor q_weight, Tensor k_weight, Tensor cos, Tensor sin, Tensor positions, "
    f"{WRITTEN}, float eps, bool interleaved"
)


def _paged_operator(name: str, return_lse: bool) -> Operator:
    varlen = name == "paged_attention_varlen"
    check = cache_checks.paged_attention_varlen if varlen else cache_checks.paged_attention
    attend = reference_paged.paged_attention_varlen if varlen else reference_paged.paged_attention

    def result(*inputs: Any) -> Any:
        return attend(*inputs) if return_lse else attend(*inputs)[0]

    def empty(q: torch.Tensor, *_: Any) -> Any:
        out = q.new_empty(q.shape)
        if not return_lse:
            return out
        return out, reference.packed_lse(q) if varlen else reference_paged.paged_lse(q)

    outputs = ("out", "lse") if return_lse else ("out",)
    return Operator(name + ("_lse" if return_lse else ""), PAGED[name], outputs, check, result, empty, first="q")


def _empty_rope(q: torch.Tensor, k: torch.Tensor, *_: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape)


def _empty_fused(q: torch.Tensor, *_: Any) -> torch.Tensor:
    return q.new_empty(q.shape)


def _no_result(*_: Any) -> None:
    return None


class CacheLibrary(OperatorLibrary):
    """Operators of a package that its compiled library does not define."""

    def __init__(self, package: str, kernels: Sequence[str], operators: Sequence[Operator]) -> None:
        self.package = package
        self.operators = {operator.name: operator for operator in operators}
        self.codes = {name: number for number, name in enumerate(("auto", "torch", "cuda", *kernels))}
        self.profile = None
        self.library = LoadedLibrary(package, False, UNBUILT)
        self._fragment = torch.library.Library(package, "FRAGMENT")
        for operator in operators:
            self._register(operator)

    def writer(self, operator: Operator, forms: dict[str, str]) -> None:
        """Adds an operator that writes to its arguments. `forms`: schemas by name; what they have behind `backend` is
        written with the results, None left out.
        """
        self.operators[operator.name] = operator
        count = operator.inputs.count(",") + 1

        def kernel(*arguments: Any) -> Any:
            inputs, backend, outputs = arguments[:count], arguments[count], arguments[count + 1 :]
            operator.check(*inputs, out=outputs or None)
            self._require_torch(operator.name, backend, inputs[0])
            results = operator.reference(*inputs)
            if not outputs:
                return None if results is None else results[0]
            for output, result in zip(outputs, results, strict=True):
                if output is not None:
                    output.copy_(result)
            return None

        def fake(*arguments: Any) -> Any:
            inputs, outputs = arguments[:count], arguments[count + 1 :]
            operator.check(*inputs, out=outputs or None)
            return None if outputs else operator.empty(*inputs)

        for name, schema in forms.items():
            self._fragment.define(name + schema)
            for key in ("CPU", "CUDA"):
                self._fragment.impl(name, kernel, key)
            torch.library.register_fake(f"{self.package}::{name}", fake, lib=self._fragment)

    def unavailable(self, name: str, backend: str, x: torch.Tensor) -> BackendUnavailableError:
        """The error of every choice of an own kernel."""
        return BackendUnavailableError(f'{name}: backend "{backend}" cannot run: {UNBUILT}; "auto" and "torch" can')

    def execution_info(self, name: str, inputs: Sequence[Any], out: Any, backend: str) -> ExecutionInfo:
        """How a call would run; raises where the call does. `out`: the outputs in a tuple, or None."""
        self.number(name, backend)
        self.operators[name].check(*inputs, out=out)
        x: torch.Tensor = inputs[0]
        if backend not in ("auto", "torch"):
            raise self.unavailable(name, backend, x)
        reason, fallback = ("asked for", None) if backend == "torch" else (UNBUILT, UNBUILT)
        return ExecutionInfo(name, "torch", "torch", reason, None, fallback, (), str(x.device))


LIBRARY = CacheLibrary(
    "dandan_attention",
    KERNELS,
    [
        *(_paged_operator(name, return_lse) for name in PAGED for return_lse in (False, True)),
        Operator("rope", ROPE, ("q_out", "k_out"), cache_checks.rope, reference_cache.rope, _empty_rope, first="q"),
    ],
)
LIBRARY.writer(
    Operator("write_kv", WRITE_KV, (), cache_checks.write_kv, reference_cache.write_kv, _no_result, first="k"),
    {"write_kv": f"({WRITE_KV}, int backend) -> ()"},
)
LIBRARY.writer(
    Operator(
        "qk_norm_rope_write_kv",
        FUSED,
        ("out", "key_out"),
        cache_checks.qk_norm_rope_write_kv,
        reference_cache.qk_norm_rope_write_kv,
        _empty_fused,
        first="q",
    ),
    {
        "qk_norm_rope_write_kv": f"({FUSED}, int backend) -> Tensor",
        "qk_norm_rope_write_kv_out": f"({FUSED}, int backend, Tensor(c!) out, Tensor(d!)? key_out) -> ()",
    },
)


def explain(name: str, error: Exception, inputs: Sequence[Any], out: Any, backend: str) -> Exception:
    """The exception to raise when a call of `name` or of its twin NAME_lse failed with `error`; `out` as in a check."""
    if isinstance(error, BackendUnavailableError):
        text = str(error)
        return BackendUnavailableError(text.replace(f"{name}_lse: ", f"{name}: ", 1))
    check: Callable[..., None] = LIBRARY.operators[name].check
    try:
        LIBRARY.number(name, backend)
        check(*inputs, out=out)
    except (TypeError, ValueError) as broken:
        return broken
    return error

"""`dandan-ops calibrate`: which kernel is fastest for exact shapes on this GPU, as a route table.

`dandan_ops_core.calibrate` has the rules. Here stands what each operator package contributes: its shapes, and what can
run one of them. Launches are plain ones, as in the records: what wins without overlap also wins with it.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from dandan_ops_core import calibrate
from dandan_ops_core.calibrate import Candidate, Trial
from dandan_ops_core.model_shapes import (
    HALF_DTYPES,
    TOKENS,
    gemm_calibration_cases,
    gemm_case,
    int4_calibration_case,
    int4_calibration_cases,
)
from dandan_ops_core.records import Case, geometric_mean
from dandan_ops_core.shape_lists import read_shapes

__all__ = ["FAMILIES", "CannotCalibrateError", "Family", "main"]

CANDIDATES = 10
"""Own candidates of a shape that are timed, the cheapest by the cost model; and so many at least of each kernel:"""
OF_EACH_KERNEL = 2
# A candidate that is estimated to be so many times slower than the cheapest is not timed.
WITHIN = 2.5
# Compared in FP64: so many rows and columns at the start, in the middle and at the end.
CHECKED_ROWS, CHECKED_COLUMNS = 32, 1024


class CannotCalibrateError(RuntimeError):
    """There is no GPU, or the package's library is not loaded; the message is the reason."""


@dataclass(frozen=True)
class Family:
    """What calibration needs to know of an operator package.

    Attributes:
        cases: the shapes that are measured unless others are given.
        keys, defaults, flags: of the lines of a file of shapes.
        case: a line of such a file as a case.
        prepare: makes the library ready; returns its fingerprints. Raises CannotCalibrateError.
        trial: a case's tensors and candidates, of which at most so many own ones.
    """

    cases: Callable[[], list[Case]]
    keys: tuple[str, ...]
    defaults: Mapping[str, Sequence[int]]
    flags: tuple[str, ...]
    case: Callable[[str, Mapping[str, int], str], Case]
    prepare: Callable[[], dict[str, str]]
    trial: Callable[[Case, int], Trial]


# ------------------------------------------------------------------------------------------------------------------
# dandan-gemm


def worth_timing(estimates: Sequence[Mapping[str, Any]], default: str, most: int) -> list[Mapping[str, Any]]:
    """The own candidates that may be the fastest, cheapest first, and the default in any case.

    Args:
        estimates: of the package's `candidates`: kernel, config, split and us (estimated), the cheapest first.
        default: name of the route that `auto` takes.
        most: to choose, besides `OF_EACH_KERNEL` of each kernel.
    """
    own = [each for each in estimates if each["kernel"] != "torch"]
    near = [each for each in own if each["us"] <= WITHIN * own[0]["us"]]
    seen: Counter[str] = Counter()
    chosen = []
    for place, each in enumerate(near):
        seen[each["kernel"]] += 1
        if place < most or seen[each["kernel"]] <= OF_EACH_KERNEL:
            chosen.append(each)
    return chosen + [each for each in own if route_name(each) == default and each not in chosen]


def plain_launches(library: Any) -> Callable[[], contextlib.AbstractContextManager[None]]:
    """Inside, the kernels of an operator package are not launched as dependent ones."""

    @contextlib.contextmanager
    def plain() -> Iterator[None]:
        before = library.op("set_dependent_launch")(0)
        try:
            yield
        finally:
            library.op("set_dependent_launch")(before)

    return plain


def route_name(route: Mapping[str, Any]) -> str:
    """A route as a table's row names it: `torch`, `skinny.r8.4`."""
    return "torch" if route["kernel"] == "torch" else f"{route['kernel']}.{route['config']}.{route['split']}"


def places(size: int, count: int) -> list[int]:
    """`count` places at the start, in the middle and at the end of `size`, each once."""
    starts = (0, (size - count) // 2, size - count)
    return sorted({place for start in starts for place in range(max(start, 0), min(start + count, size))})


def _prepare_gemm() -> dict[str, str]:
    import torch

    from dandan_gemm._ops import LIBRARY

    if not LIBRARY.library.loaded:
        raise CannotCalibrateError(LIBRARY.library.reason)
    # Asking once makes the library load the tables that fit; then they are taken away, because the default to beat is
    # what `auto` takes without any.
    one = torch.zeros(8, 8, device="cuda", dtype=torch.float16)
    LIBRARY.info("gemm", (one, one, None, True, False), (None,), "auto")
    LIBRARY.op("set_profile")(torch.empty(0, dtype=torch.uint8))
    return dict(LIBRARY.library.build_info["fingerprints"])


def _gemm_trial(case: Case, most: int) -> Trial:
    import torch

    from dandan_gemm import reference
    from dandan_gemm._ops import LIBRARY, candidates, run_tile
    from dandan_ops_core.benchmark import Implementation, Rotating
    from dandan_ops_core.testing import Comparison, compare, honest_math

    m, n, k = (case.shape[name] for name in "mnk")
    transposed, dtype = bool(case.shape.get("weight_transposed", 1)), getattr(torch, case.dtype)
    weight = (n, k) if transposed else (k, n)
    sets = Rotating.sized({"a": ((m, k), dtype), "w": (weight, dtype), "out": ((m, n), dtype)})
    for index in range(len(sets)):
        sets[index]["w"].mul_(k**-0.5)
    a, w, out = (sets[0][name] for name in ("a", "w", "out"))
    rows, columns = places(m, CHECKED_ROWS), places(n, CHECKED_COLUMNS)

    @functools.cache
    def truth() -> tuple[torch.Tensor, torch.Tensor]:
        operands = (a[rows], w[columns] if transposed else w[:, columns], None, transposed)
        with honest_math():
            honest = reference.gemm(*operands)
        return reference.gemm(*operands, compute_dtype=torch.float64), honest

    plain = plain_launches(LIBRARY)

    def own(route: Mapping[str, Any]) -> Candidate:
        tile: dict[str, Any] = {"kernel": route["kernel"], "config": route["number"], "split": route["split"]}

        def make(i: int) -> Callable[[], Any]:
            s = sets[i]
            return lambda: run_tile(s["a"], s["w"], weight_transposed=transposed, out=s["out"], **tile)

        def check() -> Comparison:
            out.fill_(float("nan"))
            make(0)()
            return compare(out[rows][:, columns], *truth(), "gemm")

        name = route_name(route)
        return Candidate(name, Implementation(name, make, around=plain), check)

    def mm(i: int) -> Callable[[], Any]:
        s = sets[i]
        b = s["w"].t() if transposed else s["w"]
        return lambda: torch.mm(s["a"], b, out=s["out"])

    default = route_name(LIBRARY.info("gemm", (a, w, None, transposed, False), (out,), "auto"))
    estimates = candidates(a, w, weight_transposed=transposed, out=out)["candidates"]
    ours = [own(route) for route in worth_timing(estimates, default, most)]
    return Trial(case, len(sets), [Candidate("torch", Implementation("torch", mm)), *ours], default)


def _gemm_case(name: str, sizes: Mapping[str, int], dtype: str) -> Case:
    return gemm_case(
        name or "given",
        sizes["m"],
        sizes["n"],
        sizes["k"],
        dtype,
        topic=calibrate.TOPIC,
        variant=calibrate.VARIANT,
        weight_transposed=bool(sizes["weight_transposed"]),
    )


# ------------------------------------------------------------------------------------------------------------------
# dandan-w4a16


def _w4a16_case(name: str, sizes: Mapping[str, int], dtype: str) -> Case:
    m, n, k, group_size = (sizes[key] for key in ("m", "n", "k", "group_size"))
    return int4_calibration_case(name or "given", m, n, k, group_size, dtype)


def _prepare_w4a16() -> dict[str, str]:
    import torch

    from dandan_w4a16._ops import LIBRARY

    if not LIBRARY.library.loaded:
        raise CannotCalibrateError(LIBRARY.library.reason)
    words, scales = torch.zeros(64, 8, device="cuda", dtype=torch.int32), torch.ones(64, 1, device="cuda").half()
    ordered = LIBRARY.op("repack")(words, scales, torch.zeros_like(scales, dtype=torch.uint8), 64)
    # As for gemm: tables that fit are loaded by the first question, and taken away.
    LIBRARY.info("packed_linear", (scales.view(1, 64), *ordered, None, 64, 64, 64), (None,), "auto")
    LIBRARY.op("set_profile")(torch.empty(0, dtype=torch.uint8))
    return dict(LIBRARY.library.build_info["fingerprints"])


def _w4a16_trial(case: Case, most: int) -> Trial:
    """PyTorch is no candidate: it has no such product, and its route dequantises the weight by tiles."""
    import torch

    from dandan_ops_core.benchmark import Implementation, Rotating
    from dandan_ops_core.testing import Comparison, compare, honest_math
    from dandan_w4a16 import kernel_order, reference
    from dandan_w4a16._ops import LIBRARY
    from dandan_w4a16.packed import candidates, run_tile

    m, n, k, group = (case.shape[name] for name in ("m", "n", "k", "group_size"))
    dtype = getattr(torch, case.dtype)
    sets = Rotating.sized(
        {
            "x": ((m, k), dtype),
            "codes": ((kernel_order.code_words(n, k),), torch.int32),
            "scales": ((kernel_order.scale_elements(n, k, group),), dtype),
            "out": ((m, n), dtype),
        }
    )
    generator = torch.Generator("cuda").manual_seed(0)
    qweight = torch.randint(-(1 << 31), 1 << 31, (n, k // 8), generator=generator, device="cuda").to(torch.int32)
    scales = (torch.rand(n, k // group, generator=generator, device="cuda") / (4 * k**0.5)).to(dtype)
    zeros = torch.randint(0, 16, (n, k // group), generator=generator, device="cuda").to(torch.uint8)
    for index in range(len(sets)):
        for name, t in zip(("codes", "scales"), LIBRARY.op("repack")(qweight, scales, zeros, group), strict=True):
            sets[index][name].copy_(t)
    torch.cuda.synchronize()  # kernels may read a weight before they wait
    x, out = sets[0]["x"], sets[0]["out"]
    rows, columns = places(m, CHECKED_ROWS), places(n, CHECKED_COLUMNS)

    @functools.cache
    def truth() -> tuple[torch.Tensor, torch.Tensor]:
        operands = (x[rows], qweight[columns], scales[columns], zeros[columns], None, group)
        with honest_math():
            honest = reference.w4a16_linear(*operands)
        return reference.w4a16_linear(*operands, compute_dtype=torch.float64), honest

    def inputs(i: int) -> tuple[Any, ...]:
        s = sets[i]
        return s["x"], s["codes"], s["scales"], None, n, k, group

    plain = plain_launches(LIBRARY)

    def own(route: Mapping[str, Any]) -> Candidate:
        tile: dict[str, Any] = {"kernel": route["kernel"], "config": route["number"], "split": route["split"]}

        def make(i: int) -> Callable[[], Any]:
            return lambda: run_tile(*inputs(i), out=sets[i]["out"], **tile)

        def check() -> Comparison:
            out.fill_(float("nan"))
            make(0)()
            return compare(out[rows][:, columns], *truth(), "packed_linear")

        name = route_name(route)
        return Candidate(name, Implementation(name, make, around=plain), check)

    default = route_name(LIBRARY.info("packed_linear", inputs(0), (out,), "auto"))
    estimates = candidates(*inputs(0), out=out)["candidates"]
    return Trial(case, len(sets), [own(route) for route in worth_timing(estimates, default, most)], default)


FAMILIES = {
    "dandan-gemm": Family(
        cases=gemm_calibration_cases,
        keys=("m", "n", "k", "weight_transposed"),
        defaults={"m": TOKENS, "weight_transposed": (1,)},
        flags=("weight_transposed",),
        case=_gemm_case,
        prepare=_prepare_gemm,
        trial=_gemm_trial,
    ),
    "dandan-w4a16": Family(
        cases=int4_calibration_cases,
        keys=("m", "n", "k", "group_size"),
        defaults={"m": TOKENS, "group_size": (64,)},
        flags=(),
        case=_w4a16_case,
        prepare=_prepare_w4a16,
        trial=_w4a16_trial,
    ),
}

# ------------------------------------------------------------------------------------------------------------------
# The command


def chosen_cases(family: Family, shapes: Path | None, only: Sequence[str]) -> list[Case]:
    """The family's cases or those of a file, as far as their titles have every text of `only`.

    Raises:
        ValueError: the file cannot be read or a line of it is no shape.
    """
    if shapes is None:
        cases = family.cases()
    else:
        try:
            text = shapes.read_text(encoding="utf-8")
            found = list(read_shapes(text, family.keys, family.defaults, HALF_DTYPES, family.flags))
        except (OSError, ValueError) as error:
            raise ValueError(f"{shapes}: {error}") from None
        cases = [family.case(*each) for each in found]
    return [case for case in cases if all(text in case.title() for text in only)]


def main(
    package: str,
    *,
    shapes: Path | None = None,
    out: Path | None = None,
    budget: float | None = None,
    only: Sequence[str] = (),
    again: bool = False,
    most: int = CANDIDATES,
    repeats: int = calibrate.REPEATS,
    list_only: bool = False,
    stream: TextIO | None = None,
) -> int:
    """Returns 0, 1 when a shape failed, 2 when nothing can be measured."""
    stream = stream or sys.stdout
    family = FAMILIES[package]
    try:
        cases = chosen_cases(family, shapes, only)
        if list_only:
            stream.writelines(f"{case.title()}\n" for case in cases)
            return 0
        if not cases:
            raise CannotCalibrateError("no shape fits")
        import torch

        if not torch.cuda.is_available():
            raise CannotCalibrateError("it needs a CUDA device and none is visible to torch")
        fingerprints = family.prepare()
    except (CannotCalibrateError, ValueError) as error:
        print(f"dandan-ops calibrate: {error}", file=sys.stderr)
        return 2

    from dandan_ops_core import benchmark

    folder = out or Path(os.environ.get("DANDAN_PROFILES") or "dandan-profiles")
    machine = benchmark.environment(package)
    kept, said = (None, "") if again else calibrate.previous(folder, package, machine, fingerprints)
    if said:
        stream.write(f"{said}\n")
    done = calibrate.run(
        package,
        cases,
        lambda case: family.trial(case, most),
        engine=benchmark.CudaEngine(),
        machine=machine,
        fingerprints=fingerprints,
        folder=folder,
        kept=kept,
        budget=budget,
        repeats=repeats,
        sm_clock=benchmark.sm_clock,
        stream=stream,
    )
    for line in closing(done, calibrate.paths(folder, package, machine)[0], folder):
        stream.write(f"{line}\n")
    return 1 if done.failures else 0


def closing(done: calibrate.Calibration, table: Path, folder: Path) -> Iterator[str]:
    """What a run says at its end."""
    rows = done.table.rows
    if rows:
        winners = Counter(row.kernel.partition(".")[0] for row in rows)
        counts = ", ".join(f"{kernel} {count}" for kernel, count in winners.most_common())
        yield f"{table}: {len(rows)} rows; fastest: {counts}"
        changed = [row.ratio for row in rows if row.ratio > 1]
        if changed:
            gain = geometric_mean(changed)
            yield f"rows that replace the default route: {len(changed)}, {gain:.3f} times as fast by geometric mean"
        yield f"processes that have DANDAN_PROFILES={folder} in their environment use it"
    if done.left:
        yield f"shapes that were not reached: {len(done.left)}; the same command goes on where this one stopped"
    if done.failures:
        yield f"shapes that failed and have no row: {len(done.failures)}"

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
from dandan_ops_core.model_shapes import HALF_DTYPES, TOKENS, gemm_calibration_cases, gemm_case
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
        estimates: of `dandan_gemm._ops.candidates`: kernel, config, split and us (estimated), the cheapest first.
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

    @contextlib.contextmanager
    def plain() -> Iterator[None]:
        before = LIBRARY.op("set_dependent_launch")(0)
        try:
            yield
        finally:
            LIBRARY.op("set_dependent_launch")(before)

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


FAMILIES = {
    "dandan-gemm": Family(
        cases=gemm_calibration_cases,
        keys=("m", "n", "k", "weight_transposed"),
        defaults={"m": TOKENS, "weight_transposed": (1,)},
        flags=("weight_transposed",),
        case=_gemm_case,
        prepare=_prepare_gemm,
        trial=_gemm_trial,
    )
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

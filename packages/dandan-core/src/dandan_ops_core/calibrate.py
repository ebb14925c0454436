"""Measures which route is fastest for exact shapes on this machine, and writes what won as a route table.

Rules. The candidates of a shape are torch and the package's own kernels. A candidate that does not run is left out and
named; one with a wrong result fails the shape. All candidates are timed shortly, in turns. The default route (what
`auto` takes without a table), torch and the fastest others are then timed anew, again in turns: the first times chose
the finalists, so they cannot judge them as well. A finalist replaces the default only where it is faster by more than
the noise, which is the larger spread of the two and never under `NOISE_FLOOR`; else the default stays, with ratio 1.

A table's row names the winner, its ratio over the default and the record. The record has one row per shape: the fastest
own kernel against torch and the other finalists, with times and spreads, so every win can be weighed again.

An operator package's part is a function from a case to a `Trial`; `dandan-ops calibrate` calls `run` with it.
"""

from __future__ import annotations

import contextlib
import datetime
import math
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from dandan_ops_core import profiles
from dandan_ops_core.backend import TORCH
from dandan_ops_core.benchmark import Engine, Implementation, WorkGraph, bound_us
from dandan_ops_core.profiles import route_fingerprint
from dandan_ops_core.progress import Progress
from dandan_ops_core.records import (
    Case,
    Record,
    RecordError,
    Row,
    kernel_fingerprint,
    read_record,
    record_name,
    write_record,
)

if TYPE_CHECKING:
    from dandan_ops_core.testing import Comparison

__all__ = [
    "Calibration",
    "Candidate",
    "Decision",
    "Finding",
    "Timing",
    "Trial",
    "decide",
    "find",
    "paths",
    "previous",
    "run",
    "write",
]

TOPIC = "calibration"
VARIANT = "fastest"
# A gain below this is never a win: clocks and placements of buffers move medians by as much from run to run.
NOISE_FLOOR = 0.01
# Own candidates besides default and torch that are timed anew.
FINALISTS = 3
SCREEN_REPEATS = 3
REPEATS = 9
TARGET_US = 400.0
FIRST_CALLS = 2
MAX_CALLS = 200
# Seconds between two saves while a run goes on.
SAVE_EVERY = 30.0


# ------------------------------------------------------------------------------------------------------------------
# One shape


@dataclass
class Candidate:
    """One route that a shape may take.

    Attributes:
        kernel: as a table's row names it: "torch", a kernel, or a kernel's configuration and slices (`skinny.r8.4`).
        implementation: what is timed. Its name tells the candidates of a shape apart.
        check: compares the output with the truth; None where there is nothing to check (torch).
    """

    kernel: str
    implementation: Implementation
    check: Callable[[], Comparison | None] = lambda: None


@dataclass
class Trial:
    """A shape with its tensors and every route it may take.

    Attributes:
        sets: number of rotating buffer sets.
        default: implementation's name of the candidate that `auto` takes without a table.
    """

    case: Case
    sets: int
    candidates: Sequence[Candidate]
    default: str


@dataclass(frozen=True)
class Timing:
    """Median microseconds of a candidate and their spread (interquartile range over median)."""

    name: str
    kernel: str
    us: float
    spread: float


@dataclass(frozen=True)
class Decision:
    """What a shape's row will say. `ratio` is the default's time over the winner's; 1 when the default stays."""

    winner: Timing
    default: Timing
    ratio: float
    noise: float

    @property
    def kept(self) -> bool:
        return self.winner.name == self.default.name


@dataclass(frozen=True)
class Finding:
    """A decision, the times it was taken on, and the record's row."""

    decision: Decision
    timings: Sequence[Timing]
    row: Row


def decide(timings: Sequence[Timing], default: str) -> Decision:
    """The fastest candidate where it beats the default by more than the noise, else the default.

    Raises:
        ValueError: the default is not among the timings.
    """
    standing = next((timing for timing in timings if timing.name == default), None)
    if standing is None:
        raise ValueError(f"decide: the default {default!r} has no time; there are {[t.name for t in timings]}")
    best = min(timings, key=lambda timing: timing.us)
    noise = max(NOISE_FLOOR, standing.spread, best.spread)
    ratio = standing.us / best.us
    if best is standing or ratio - 1 <= noise:
        return Decision(standing, standing, 1.0, noise)
    return Decision(best, standing, ratio, noise)


def _captured(engine: Engine, implementation: Implementation, sets: int, target_us: float) -> WorkGraph:
    calls = [implementation.make(index) for index in range(sets)]
    with implementation.around():
        graph = engine.capture(calls, FIRST_CALLS)
        (times,) = engine.time([graph], 1)
        count = min(MAX_CALLS, math.ceil(target_us / max(statistics.median(times) / FIRST_CALLS, 1e-3)))
        return engine.capture(calls, count) if count > FIRST_CALLS else graph


def _timed(
    engine: Engine, candidates: Sequence[Candidate], graphs: Mapping[str, WorkGraph], repeats: int
) -> list[Timing]:
    taking_turns = [graphs[candidate.implementation.name] for candidate in candidates]
    timings = []
    all_times = engine.time(taking_turns, repeats)
    for candidate, graph, times in zip(candidates, taking_turns, all_times, strict=True):
        middle = statistics.median(times)
        low, _, high = statistics.quantiles(times, n=4, method="inclusive")
        name, spread = candidate.implementation.name, (high - low) / middle
        timings.append(Timing(name, candidate.kernel, middle / graph.calls, spread))
    return timings


def _kernel(route: str) -> str:
    """The kernel of a route that also names a configuration: "skinny" of "skinny.r8.4"."""
    return route.partition(".")[0]


def _reason(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:300]


def find(
    trial: Trial,
    engine: Engine,
    *,
    fingerprints: Mapping[str, str],
    gpu: str = "",
    repeats: int = REPEATS,
    target_us: float = TARGET_US,
) -> Finding:
    """Checks, times and decides one shape.

    Raises:
        AssertionError: an output is over its error limit.
        ValueError: two candidates have one name, or the default does not run.
    """
    case, names = trial.case, [candidate.implementation.name for candidate in trial.candidates]
    if len(set(names)) != len(names):
        raise ValueError(f"{case.title()}: candidates must have different names, got {names}")
    graphs: dict[str, WorkGraph] = {}
    left_out: dict[str, str] = {}
    checked: dict[str, Comparison | None] = {}
    for name, candidate in zip(names, trial.candidates, strict=True):
        try:
            checked[name] = comparison = candidate.check()
            if comparison is None or comparison.ok:
                graphs[name] = _captured(engine, candidate.implementation, trial.sets, target_us)
        except Exception as error:  # a route that cannot take the shape is a finding, not the end of the run
            left_out[name] = _reason(error)
            continue
        if comparison is not None and not comparison.ok:
            raise AssertionError(f"{case.title()}: {name}: {comparison.message()}")
    if trial.default not in graphs:
        why = left_out.get(trial.default, "it is not among the candidates")
        raise ValueError(f"{case.title()}: the default route {trial.default!r} does not run: {why}")

    running = [c for c in trial.candidates if c.implementation.name in graphs]
    screened = {timing.name: timing.us for timing in _timed(engine, running, graphs, SCREEN_REPEATS)}
    standing = {c.implementation.name for c in running if c.kernel == TORCH} | {trial.default}
    others = sorted((name for name in screened if name not in standing), key=screened.__getitem__)
    standing.update(others[:FINALISTS])
    finalists = [c for c in running if c.implementation.name in standing]
    timings = _timed(engine, finalists, graphs, repeats)

    own = min((t for t in timings if t.kernel != TORCH), key=lambda t: t.us, default=timings[0])
    rest = [timing for timing in timings if timing is not own]
    comparison = checked[own.name]
    row = Row(
        op=case.op,
        case=case.case,
        variant=case.variant,
        shape=dict(case.shape),
        dtype=case.dtype,
        kernel_fingerprint=kernel_fingerprint(fingerprints, _kernel(own.kernel)),
        route=_kernel(own.kernel),
        us=own.us,
        spread=own.spread,
        peers={timing.name: timing.us for timing in rest},
        peers_spread={timing.name: round(timing.spread, 4) for timing in rest},
        peers_failed=left_out,
        bound_us=bound_us(case, gpu),
        error=None if comparison is None else comparison.error,
        error_limit=None if comparison is None else comparison.limit,
        bytes=case.bytes,
    )
    return Finding(decide(timings, trial.default), timings, row)


# ------------------------------------------------------------------------------------------------------------------
# A run over many shapes


def finding_line(case: Case, finding: Finding) -> str:
    """One line for people: shape, what stays or wins, times."""
    sizes = " ".join(f"{name}={size}" for name, size in case.shape.items())
    decision = finding.decision
    winner, default = decision.winner.name, decision.default.name
    times = ", ".join(f"{each.name} {each.us:.2f}" for each in sorted(finding.timings, key=lambda each: each.us))
    verdict = f"{winner} stays" if decision.kept else f"{winner} {decision.ratio:.3f}x {default}"
    return f"{case.op} {sizes} {case.dtype}: {verdict} (noise {100 * decision.noise:.1f} %); us: {times}"


@dataclass
class Calibration:
    """What came out of a run: the table, the record, the shapes that failed and those that were not reached."""

    table: profiles.Table
    record: Record
    failures: dict[str, str] = field(default_factory=dict)
    left: list[Case] = field(default_factory=list)


def _table(package: str, machine: Mapping[str, Any], rows: Iterable[profiles.Row]) -> profiles.Table:
    version = str(machine["torch"]).partition("+")[0]
    ordered = tuple(sorted(rows, key=lambda row: row.key))
    return profiles.Table(package, str(machine["gpu"]), version, str(machine["cuda"]), ordered)


def paths(folder: Path, package: str, machine: Mapping[str, Any]) -> tuple[Path, Path]:
    """Where a run writes: (table, record). The record's folder is not searched for tables."""
    version = str(machine["torch"]).partition("+")[0]
    record = record_name(f"{machine['gpu']} torch {version} cuda {machine['cuda']}", TOPIC)
    table = f"{package}-{record.removesuffix(f'-{TOPIC}.json')}.json"
    return folder / table, folder / "records" / package / record


Key = tuple[str, str, tuple[tuple[str, int], ...]]


def _key(op: str, dtype: str, shape: Mapping[str, int]) -> Key:
    return (op, dtype, tuple(sorted(shape.items())))


def _profile_row(key: Key, decision: Decision, fingerprints: Mapping[str, str], record: str) -> profiles.Row:
    kernel = decision.winner.kernel
    fingerprint = route_fingerprint(fingerprints, kernel)
    if fingerprint is None:
        raise ValueError(f"the library's build information has no fingerprint of {kernel}")
    return profiles.Row(*key, kernel, fingerprint, round(decision.ratio, 4), record)


def previous(
    folder: Path, package: str, machine: Mapping[str, Any], fingerprints: Mapping[str, str]
) -> tuple[Calibration | None, str]:
    """What an earlier run left in `folder` that still holds, and one sentence about it.

    A shape is kept when the same machine, torch, CUDA and package version measured it and neither its winner nor its
    fastest own kernel has changed since; everything else will be measured again.
    """
    table_path, record_path = paths(folder, package, machine)
    if not table_path.is_file():
        return None, ""
    try:
        table, record = profiles.load_table(table_path), read_record(record_path)
    except (profiles.TableError, RecordError) as error:
        return None, f"{table_path.name} is measured anew: {error}"
    for name, value in machine.items():
        if name != "sm_clock" and record.environment.get(name) != value:
            found = record.environment.get(name)
            return None, f"{table_path.name} is measured anew: its {name} is {found}, here it is {value}"
    rows = [row for row in table.rows if row.kernel_fingerprint == route_fingerprint(fingerprints, row.kernel)]
    fresh = {row.key for row in rows}
    recorded = [
        row
        for row in record.rows
        if _key(row.op, row.dtype, row.shape) in fresh
        and row.kernel_fingerprint == kernel_fingerprint(fingerprints, row.route)
    ]
    both = {_key(row.op, row.dtype, row.shape) for row in recorded}
    record.rows = recorded
    kept = _table(package, machine, (row for row in rows if row.key in both))
    return Calibration(kept, record), f"{len(kept.rows)} of {len(table.rows)} rows of {table_path.name} still hold"


def run(
    package: str,
    cases: Sequence[Case],
    build: Callable[[Case], Trial],
    *,
    engine: Engine,
    machine: dict[str, Any],
    fingerprints: Mapping[str, str],
    folder: Path,
    kept: Calibration | None = None,
    budget: float | None = None,
    repeats: int = REPEATS,
    sm_clock: Callable[[], int | None] = lambda: None,
    now: Callable[[], float] = time.monotonic,
    stream: TextIO | None = None,
) -> Calibration:
    """Measures every case that `kept` has no row for, and writes table and record into `folder`, also on the way.

    A case that fails has no row; the run goes on. When `budget` seconds are over, or on Ctrl-C, no further case is
    begun and what was measured is written.

    Args:
        build: makes a case's tensors and candidates; called per case, so one case's tensors are alive at a time.
        kept: of `previous`; its rows stand beside the new ones.
    """
    date = datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d")
    record = Record(package, TOPIC, date, dict(machine), rows=list(kept.record.rows) if kept else [])
    found = {row.key: row for row in kept.table.rows} if kept else {}
    name = paths(folder, package, machine)[1].name
    failures: dict[str, str] = {}
    waiting = [case for case in cases if _key(case.op, case.dtype, case.shape) not in found]
    progress, begin = Progress(len(waiting), stream, now), now()
    saved = begin
    clocks: list[int] = []

    def result(left: Sequence[Case]) -> Calibration:
        record.environment["sm_clock"] = int(statistics.median(clocks)) if clocks else machine.get("sm_clock")
        return Calibration(_table(package, machine, found.values()), record, failures, list(left))

    done = 0
    with contextlib.suppress(KeyboardInterrupt):
        for done, case in enumerate(waiting):
            if budget is not None and now() - begin >= budget:
                break
            try:
                trial = build(case)
                finding = find(
                    trial, engine, fingerprints=fingerprints, gpu=str(machine.get("gpu", "")), repeats=repeats
                )
                key = _key(case.op, case.dtype, case.shape)
                row = _profile_row(key, finding.decision, fingerprints, name)
            except Exception as error:  # one bad shape must not cost the others their time; it fails the run at its end
                failures[case.title()] = _reason(error)
                progress.step(done + 1, f"FAILED {case.title()}: {_reason(error)}")
                continue
            del trial
            found[key] = row
            record.rows.append(finding.row)
            if (clock := sm_clock()) is not None:
                clocks.append(clock)
            progress.step(done + 1, finding_line(case, finding))
            if now() - saved >= SAVE_EVERY:
                write(folder, result(waiting[done + 1 :]))
                saved = now()
        else:
            done = len(waiting)
    progress.close()
    calibration = result(waiting[done:])
    if calibration.table.rows:
        write(folder, calibration)
    return calibration


def write(folder: Path, calibration: Calibration) -> tuple[Path, Path]:
    """Writes table and record; both or, when the record contradicts itself, none."""
    table_path, record_path = paths(folder, calibration.table.package, calibration.record.environment)
    write_record(record_path, calibration.record)
    table_path.parent.mkdir(parents=True, exist_ok=True)
    table_path.write_text(profiles.table_json(calibration.table), encoding="utf-8", newline="\n")
    return table_path, record_path

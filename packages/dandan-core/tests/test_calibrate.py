"""Calibration on the CPU with a fake timer: what wins, what the noise hides, and what is written, kept and left."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from dandan_ops_core import calibrate, profiles, records
from dandan_ops_core.benchmark import Implementation
from dandan_ops_core.calibrate import Candidate, Timing, Trial, decide, find, previous, run
from dandan_ops_core.device import DeviceInfo
from dandan_ops_core.records import Case
from dandan_ops_core.testing import compare

MACHINE = {
    "gpu": "NVIDIA H200",
    "driver": "580.1",
    "sm_clock": None,
    "torch": "2.11.0+cu130",
    "cuda": "13.0",
    "python": "3.12.1",
    "package_version": "0.1.0",
}
FINGERPRINTS = {"skinny_gemm": "aaa", "sm80_mma_gemm": "bbb", "sm90a_wgmma_gemm": "ccc"}
CASES = [
    Case("calibration", "gemm", "a layer", {"m": m, "n": 64, "k": 32}, dtype, "fastest", bytes=1000 * m)
    for m in (1, 16, 64)
    for dtype in ("float16", "bfloat16")
]


@dataclass
class FakeGraph:
    calls: int
    name: str

    def replay(self) -> None: ...


@dataclass
class FakeEngine:
    """Each call returns its candidate's name; `cost` says its microseconds, `late` those after the screening."""

    cost: dict[str, float]
    late: dict[str, float] = field(default_factory=dict)
    wobble: dict[str, Sequence[float]] = field(default_factory=dict)
    timed: list[list[str]] = field(default_factory=list)

    def capture(self, calls: Sequence[Callable[[], Any]], count: int) -> FakeGraph:
        return FakeGraph(count, calls[0]())

    def time(self, graphs: Sequence[Any], repeats: int) -> list[list[float]]:
        self.timed.append([graph.name for graph in graphs])
        cost = {**self.cost, **self.late} if repeats > calibrate.SCREEN_REPEATS else self.cost

        def of(graph: FakeGraph) -> list[float]:
            wobble = self.wobble.get(graph.name, (1.0,))
            return [graph.calls * cost[graph.name] * wobble[turn % len(wobble)] for turn in range(repeats)]

        return [of(graph) for graph in graphs]

    def synchronize(self) -> None: ...


def candidate(name: str, check: Callable[[], Any] = lambda: None) -> Candidate:
    return Candidate(name, Implementation(name, lambda index: lambda: name), check)


def refusing(name: str) -> Candidate:
    def make(index: int) -> Callable[[], Any]:
        raise RuntimeError("rows of a do not start\nat multiples of 16 bytes")

    return Candidate(name, Implementation(name, make))


def trial(*names: str, default: str = "skinny.r8.4", case: Case = CASES[0]) -> Trial:
    return Trial(case, 3, [candidate(name) for name in ("torch", "skinny.r8.4", *names)], default)


def timing(name: str, us: float, spread: float = 0.0) -> Timing:
    return Timing(name, name, us, spread)


# Decisions ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("times", "winner", "ratio", "noise"),
    [
        # The default is the fastest.
        ([timing("skinny", 2.0), timing("torch", 3.0)], "skinny", 1.0, 0.01),
        # Faster, and no spread hides it: 2.0 / 1.9 is 5.3 % against a floor of 1 %.
        ([timing("skinny", 2.0), timing("sm80_mma", 1.9)], "sm80_mma", 2.0 / 1.9, 0.01),
        ([timing("skinny", 2.0), timing("torch", 1.0)], "torch", 2.0, 0.01),
        # Within the floor.
        ([timing("skinny", 2.0), timing("torch", 1.985)], "skinny", 1.0, 0.01),
        # Within the spread of either.
        ([timing("skinny", 2.0, 0.06), timing("torch", 1.9)], "skinny", 1.0, 0.06),
        ([timing("skinny", 2.0), timing("torch", 1.9, 0.06)], "skinny", 1.0, 0.06),
        # Over the spread of both.
        ([timing("skinny", 2.0, 0.04), timing("torch", 1.9, 0.05)], "torch", 2.0 / 1.9, 0.05),
        # The noise of one that is neither the default nor the fastest says nothing.
        ([timing("skinny", 2.0), timing("torch", 1.9), timing("x", 1.95, 0.5)], "torch", 2.0 / 1.9, 0.01),
    ],
)
def test_a_win_is_one_over_the_noise(times: list[Timing], winner: str, ratio: float, noise: float) -> None:
    decision = decide(times, "skinny")
    assert (decision.winner.name, decision.default.name) == (winner, "skinny")
    assert decision.ratio == pytest.approx(ratio)
    assert decision.noise == noise
    assert decision.kept == (winner == "skinny")


def test_a_decision_needs_the_default() -> None:
    with pytest.raises(ValueError, match=r"the default 'skinny' has no time; there are \['torch'\]"):
        decide([timing("torch", 1.0)], "skinny")


# One shape ----------------------------------------------------------------------------------------------------------


def test_finalists_are_timed_anew_and_alone_decide() -> None:
    """sm90a_wgmma looked fastest while candidates were chosen and was not: the second times count."""
    engine = FakeEngine(
        {
            "torch": 4.0,
            "skinny.r8.4": 3.0,
            "sm90a_wgmma.n16.2": 2.0,
            "sm80_mma.64x64.1": 2.5,
            "slow": 9.0,
            "slower": 10.0,
        },
        late={"sm90a_wgmma.n16.2": 5.0},
    )
    found = find(trial("sm90a_wgmma.n16.2", "sm80_mma.64x64.1", "slow", "slower"), engine, fingerprints=FINGERPRINTS)
    assert found.decision.winner.name == "sm80_mma.64x64.1"
    assert found.decision.ratio == pytest.approx(1.2)
    screened, final = engine.timed[-2:]
    assert screened == ["torch", "skinny.r8.4", "sm90a_wgmma.n16.2", "sm80_mma.64x64.1", "slow", "slower"]
    assert final == ["torch", "skinny.r8.4", "sm90a_wgmma.n16.2", "sm80_mma.64x64.1", "slow"]


def test_record_row_holds_what_the_decision_was_taken_from() -> None:
    engine = FakeEngine({"torch": 4.0, "skinny.r8.4": 2.0}, wobble={"torch": (0.9, 1.0, 1.1)})
    row = find(trial(), engine, fingerprints=FINGERPRINTS, gpu="NVIDIA H200").row
    assert (row.route, row.us, row.kernel_fingerprint) == ("skinny", 2.0, "aaa")
    assert row.peers == {"torch": 4.0}
    assert row.peers_spread["torch"] > 0.1
    assert (row.ratio, row.best_peer, row.variant) == (2.0, "torch", "fastest")
    assert row.bound_us == pytest.approx(1000 / 4.8e12 * 1e6, abs=1e-4)


def test_torch_can_win_and_own_kernels_are_still_recorded() -> None:
    engine = FakeEngine({"torch": 1.0, "skinny.r8.4": 2.0, "sm80_mma": 1.5})
    found = find(trial("sm80_mma"), engine, fingerprints=FINGERPRINTS)
    assert (found.decision.winner.kernel, found.decision.ratio) == ("torch", 2.0)
    assert (found.row.route, found.row.ratio) == ("sm80_mma", pytest.approx(1.0 / 1.5, abs=1e-4))
    alone = find(Trial(CASES[0], 1, [candidate("torch")], "torch"), engine, fingerprints=FINGERPRINTS)
    assert (alone.row.route, alone.row.kernel_fingerprint, alone.row.peers) == ("torch", None, {})


def test_candidate_that_cannot_run_is_left_out_and_named() -> None:
    engine = FakeEngine({"torch": 4.0, "skinny.r8.4": 2.0})
    made = trial()
    made.candidates = [*made.candidates, refusing("sm90_tma_mma")]
    row = find(made, engine, fingerprints=FINGERPRINTS).row
    reason = "RuntimeError: rows of a do not start at multiples of 16 bytes"
    assert row.peers_failed == {"sm90_tma_mma": reason}
    made.default = "sm90_tma_mma"
    with pytest.raises(ValueError, match=f"the default route 'sm90_tma_mma' does not run: {reason}"):
        find(made, engine, fingerprints=FINGERPRINTS)


def test_wrong_output_fails_the_shape_whoever_is_faster() -> None:
    def wrong() -> Any:
        return compare(torch.full((4,), 2.0), torch.ones(4, dtype=torch.float64), 0.0, "gemm")

    made = trial()
    made.candidates = [*made.candidates, candidate("sm80_mma", wrong)]
    engine = FakeEngine({"torch": 4.0, "skinny.r8.4": 2.0, "sm80_mma": 9.0})
    with pytest.raises(AssertionError, match=r"gemm a layer m=1 .*: sm80_mma: gemm: worst element at \[0\]"):
        find(made, engine, fingerprints=FINGERPRINTS)


def test_two_candidates_of_one_name_are_refused() -> None:
    with pytest.raises(ValueError, match="must have different names"):
        find(trial("torch"), FakeEngine({"torch": 1.0}), fingerprints=FINGERPRINTS)


def test_graphs_are_sized_by_what_a_call_takes() -> None:
    engine = FakeEngine({"torch": 4.0, "skinny.r8.4": 5000.0})
    seen: list[FakeGraph] = []
    capture = engine.capture

    def watched(calls: Sequence[Callable[[], Any]], count: int) -> FakeGraph:
        seen.append(capture(calls, count))
        return seen[-1]

    engine.capture = watched  # type: ignore[method-assign]
    find(trial(), engine, fingerprints=FINGERPRINTS, target_us=400.0)
    assert [(graph.name, graph.calls) for graph in seen] == [("torch", 2), ("torch", 100), ("skinny.r8.4", 2)]


# A run --------------------------------------------------------------------------------------------------------------


class Clock:
    """Goes on by a second at each look."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def __call__(self) -> float:
        self.seconds += 1.0
        return self.seconds


def build(case: Case) -> Trial:
    return trial("sm80_mma", case=case)


def calibration(folder: Path, **changes: Any) -> tuple[calibrate.Calibration, str]:
    stream = io.StringIO()
    values: dict[str, Any] = {
        "engine": FakeEngine({"torch": 4.0, "skinny.r8.4": 2.0, "sm80_mma": 1.5}),
        "machine": dict(MACHINE),
        "fingerprints": FINGERPRINTS,
        "folder": folder,
        "now": Clock(),
        "stream": stream,
        "cases": CASES,
        "build": build,
        **changes,
    }
    cases, make = values.pop("cases"), values.pop("build")
    return run("dandan-gemm", cases, make, **values), stream.getvalue()


def test_run_writes_a_table_that_profiles_reads_and_the_record_it_names(tmp_path: Path) -> None:
    done, printed = calibration(tmp_path, sm_clock=lambda: 1980)
    table_path, record_path = calibrate.paths(tmp_path, "dandan-gemm", MACHINE)
    assert table_path == tmp_path / "dandan-gemm-h200-torch-2-11-0-cuda-13-0.json"
    table = profiles.load_table(table_path)
    assert table == done.table
    assert (table.package, table.device, table.torch, table.cuda) == ("dandan-gemm", "NVIDIA H200", "2.11.0", "13.0")
    assert len(table.rows) == len(CASES)
    for row in table.rows:
        assert (row.kernel, row.ratio, row.kernel_fingerprint) == ("sm80_mma", 1.3333, "bbb")
        assert row.record == record_path.name
    record = records.read_record(record_path)
    assert records.check_record(record, CASES, FINGERPRINTS) == []
    assert record.environment["sm_clock"] == 1980
    assert record.topic == "calibration"
    lines = printed.splitlines()
    assert len(lines) == len(CASES)
    assert lines[0] == (
        "[1/6] gemm m=1 n=64 k=32 float16: sm80_mma 1.333x skinny.r8.4 (noise 1.0 %); "
        "us: sm80_mma 1.50, skinny.r8.4 2.00, torch 4.00"
    )
    assert (done.failures, done.left) == ({}, [])


def test_tables_of_the_folder_are_all_that_is_searched_for(tmp_path: Path) -> None:
    """DANDAN_PROFILES may name the folder as it is: the record lies deeper."""
    calibration(tmp_path)
    assert [path.name for path in tmp_path.glob("*.json")] == ["dandan-gemm-h200-torch-2-11-0-cuda-13-0.json"]


def test_rows_say_torch_or_the_default_where_they_win(tmp_path: Path) -> None:
    costs = {"torch": 1.0, "skinny.r8.4": 2.0, "sm80_mma": 1.99}
    done, printed = calibration(tmp_path, engine=FakeEngine(costs))
    assert {(row.kernel, row.ratio) for row in done.table.rows} == {("torch", 2.0)}
    costs["torch"] = 4.0
    done, printed = calibration(tmp_path / "b", engine=FakeEngine(costs))
    assert {(row.kernel, row.ratio) for row in done.table.rows} == {("skinny.r8.4", 1.0)}
    assert "skinny.r8.4 stays (noise 1.0 %); us: skinny" not in printed  # sm80_mma is faster, within the noise
    assert "skinny.r8.4 stays (noise 1.0 %); us: sm80_mma 1.99, skinny.r8.4 2.00, torch 4.00" in printed


def test_rows_fit_the_build_that_they_were_taken_on(tmp_path: Path) -> None:
    """What calibration writes, torch rows included, is what the strict matching of profiles accepts."""
    device = DeviceInfo("NVIDIA H200", "9.0", "580.1", 13000, "2.11.0+cu130", "13.0")
    for winner in ("torch", "sm80_mma", "skinny.r8.4"):
        costs = {"torch": 4.0, "skinny.r8.4": 4.0, "sm80_mma": 4.0, winner: 1.0}
        calibration(tmp_path, engine=FakeEngine(costs))
        rows = profiles.rows_for("dandan-gemm", {"fingerprints": FINGERPRINTS}, device, folders=[tmp_path])
        assert len(rows) == len(CASES)
        assert {row.kernel for row in rows} == {winner}


def test_kernel_without_a_fingerprint_gets_no_row(tmp_path: Path) -> None:
    done, printed = calibration(tmp_path, fingerprints={"skinny_gemm": "aaa"})
    assert done.table.rows == ()
    assert "ValueError: the library's build information has no fingerprint of sm80_mma" in printed


def test_failing_case_has_no_row_and_the_run_goes_on(tmp_path: Path) -> None:
    def sometimes(case: Case) -> Trial:
        if case.shape["m"] == 16:
            raise RuntimeError("out of memory")
        return build(case)

    done, printed = calibration(tmp_path, build=sometimes)
    assert len(done.table.rows) == 4
    assert set(done.failures.values()) == {"RuntimeError: out of memory"}
    assert printed.count("FAILED gemm a layer m=16 n=64 k=32") == 2


def test_budget_ends_the_run_between_two_shapes(tmp_path: Path) -> None:
    # The clock is looked at three times before the first case, then for the budget, the next save and so on.
    done, _ = calibration(tmp_path, budget=6.0)
    assert 0 < len(done.table.rows) < len(CASES)
    assert len(done.table.rows) + len(done.left) == len(CASES)
    assert done.left == CASES[len(done.table.rows) :]
    assert len(profiles.load_table(calibrate.paths(tmp_path, "dandan-gemm", MACHINE)[0]).rows) == len(done.table.rows)
    none, _ = calibration(tmp_path / "none", budget=0.0)
    assert (none.table.rows, none.left) == ((), CASES)
    assert not (tmp_path / "none").exists()


def test_interrupt_keeps_what_was_measured(tmp_path: Path) -> None:
    def third(case: Case) -> Trial:
        if case is CASES[2]:
            raise KeyboardInterrupt
        return build(case)

    done, _ = calibration(tmp_path, build=third)
    assert len(done.table.rows) == 2
    assert done.left == CASES[2:]
    assert len(profiles.load_table(calibrate.paths(tmp_path, "dandan-gemm", MACHINE)[0]).rows) == 2


def test_results_are_saved_on_the_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved: list[int] = []
    write = calibrate.write

    def watched(folder: Path, part: calibrate.Calibration) -> Any:
        saved.append(len(part.table.rows))
        return write(folder, part)

    monkeypatch.setattr(calibrate, "write", watched)
    monkeypatch.setattr(calibrate, "SAVE_EVERY", 3.0)
    calibration(tmp_path)
    assert saved[-1] == len(CASES)
    assert len(saved) > 2
    assert saved == sorted(saved)


# What an earlier run left -------------------------------------------------------------------------------------------


def test_second_run_goes_on_where_the_first_stopped(tmp_path: Path) -> None:
    first, _ = calibration(tmp_path, cases=CASES[:4])
    kept, said = previous(tmp_path, "dandan-gemm", MACHINE, FINGERPRINTS)
    assert said == "4 of 4 rows of dandan-gemm-h200-torch-2-11-0-cuda-13-0.json still hold"
    assert kept is not None
    assert kept.table == first.table
    built: list[Case] = []

    def watched(case: Case) -> Trial:
        built.append(case)
        return build(case)

    second, printed = calibration(tmp_path, kept=kept, build=watched)
    assert built == CASES[4:]
    assert printed.startswith("[1/2] ")
    assert len(second.table.rows) == len(CASES)
    assert records.check_record(second.record, CASES, FINGERPRINTS) == []


def test_rows_of_changed_kernels_are_not_kept(tmp_path: Path) -> None:
    calibration(tmp_path)
    kept, said = previous(tmp_path, "dandan-gemm", MACHINE, {**FINGERPRINTS, "sm80_mma_gemm": "new"})
    assert kept is not None
    assert kept.table.rows == ()
    assert kept.record.rows == []
    assert "0 of 6 rows" in said
    kept, _ = previous(tmp_path, "dandan-gemm", MACHINE, {**FINGERPRINTS, "sm90a_wgmma_gemm": "new"})
    assert kept is not None
    assert len(kept.table.rows) == 6


@pytest.mark.parametrize("changed", ["skinny_gemm", "sm80_mma_gemm"])
def test_winner_and_fastest_own_kernel_both_have_to_be_the_same(tmp_path: Path, changed: str) -> None:
    """Within the noise skinny stays, although sm80_mma is the record's fastest."""
    calibration(tmp_path, engine=FakeEngine({"torch": 4.0, "skinny.r8.4": 2.0, "sm80_mma": 1.99}))
    kept, said = previous(tmp_path, "dandan-gemm", MACHINE, {**FINGERPRINTS, changed: "new"})
    assert kept is not None
    assert (kept.table.rows, kept.record.rows) == ((), [])
    assert "0 of 6 rows" in said


@pytest.mark.parametrize(("name", "value"), [("driver", "590.1"), ("package_version", "0.2.0"), ("python", "3.13.0")])
def test_nothing_is_kept_of_another_machine(tmp_path: Path, name: str, value: str) -> None:
    calibration(tmp_path)
    kept, said = previous(tmp_path, "dandan-gemm", {**MACHINE, name: value}, FINGERPRINTS)
    assert kept is None
    assert f"is measured anew: its {name} is {MACHINE[name]}, here it is {value}" in said


def test_nothing_is_kept_of_what_cannot_be_read(tmp_path: Path) -> None:
    assert previous(tmp_path, "dandan-gemm", MACHINE, FINGERPRINTS) == (None, "")
    calibration(tmp_path)
    _, record_path = calibrate.paths(tmp_path, "dandan-gemm", MACHINE)
    record_path.write_text("{")
    kept, said = previous(tmp_path, "dandan-gemm", MACHINE, FINGERPRINTS)
    assert kept is None
    assert "cannot be read" in said


def test_row_without_its_record_is_measured_again(tmp_path: Path) -> None:
    calibration(tmp_path)
    _, record_path = calibrate.paths(tmp_path, "dandan-gemm", MACHINE)
    data = json.loads(record_path.read_text())
    del data["rows"][2:]
    record_path.write_text(json.dumps(data))
    kept, said = previous(tmp_path, "dandan-gemm", MACHINE, FINGERPRINTS)
    assert kept is not None
    assert len(kept.table.rows) == 2
    assert said.startswith("2 of 6 rows")

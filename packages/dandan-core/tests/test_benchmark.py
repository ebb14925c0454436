"""The benchmark harness and its records on the CPU: a fake engine stands for the GPU; every check is shown to fail."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dandan_ops_core import benchmark as bench
from dandan_ops_core import records
from dandan_ops_core.testing import compare

MACHINE = {
    "gpu": "NVIDIA H200",
    "driver": "580.1",
    "sm_clock": None,
    "torch": "2.11.0",
    "cuda": "13.0",
    "python": "3.12.1",
    "package_version": "0.1.0",
}
CASE = bench.Case("plain", "rms_norm", "grid", {"rows": 16, "cols": 4096}, "float16", bytes=262144)


@dataclasses.dataclass
class FakeGraph:
    calls: int
    name: str

    def replay(self) -> None: ...


class FakeEngine:
    """Each call returns its implementation's name; `cost` says how many microseconds a call of that name takes."""

    def __init__(self, cost: dict[str, float], noise: Sequence[float] = (1.0,)) -> None:
        self.cost = cost
        self.noise = itertools.cycle(noise)
        self.captured: list[tuple[str, int, int]] = []
        self.replayed: list[str] = []

    def capture(self, calls: Sequence[Callable[[], Any]], count: int) -> FakeGraph:
        name = calls[0]()
        self.captured.append((name, len(calls), count))
        return FakeGraph(count, name)

    def time(self, graphs: Sequence[Any], repeats: int) -> list[list[float]]:
        times: list[list[float]] = [[] for _ in graphs]
        for _ in range(repeats):
            for index, graph in enumerate(graphs):
                self.replayed.append(graph.name)
                times[index].append(graph.calls * self.cost[graph.name] * next(self.noise))
        return times

    def synchronize(self) -> None: ...


def named(name: str) -> bench.Implementation:
    return bench.Implementation(name, lambda index: lambda: name)


def broken(name: str) -> bench.Implementation:
    def make(index: int) -> Callable[[], Any]:
        def call() -> None:
            raise RuntimeError("unsupported\nhead size 80")

        return call

    return bench.Implementation(name, make)


def workload(**changes: Any) -> bench.Workload:
    values: dict[str, Any] = {
        "case": CASE,
        "sets": 3,
        "own": named("dandan"),
        "peers": [named("vllm"), named("torch")],
        "route": "sm80_row",
        "fingerprint": "abc",
    }
    return bench.Workload(**{**values, **changes})


def test_row_has_medians_ratio_and_best_peer() -> None:
    engine = FakeEngine({"dandan": 2.0, "vllm": 2.5, "torch": 8.0})
    row = bench.measure(workload(), engine, gpu="NVIDIA H200")
    assert (row.us, row.peers, row.best_peer, row.ratio) == (2.0, {"vllm": 2.5, "torch": 8.0}, "vllm", 1.25)
    assert (row.op, row.shape, row.dtype, row.variant) == ("rms_norm", {"rows": 16, "cols": 4096}, "float16", "auto")
    assert (row.route, row.kernel_fingerprint) == ("sm80_row", "abc")
    assert row.bound_us == pytest.approx(262144 / 4.8e12 * 1e6, abs=1e-4)
    assert row.gigabytes_per_s == pytest.approx(131.07, abs=0.01)


def test_graphs_hold_enough_calls_for_the_target_and_are_replayed_in_turns() -> None:
    engine = FakeEngine({"dandan": 4.0, "vllm": 100.0, "torch": 0.5})
    bench.measure(workload(), engine, repeats=3, target_us=400.0)
    counts = {name: count for name, _, count in engine.captured}
    assert counts == {"dandan": 100, "vllm": bench.MIN_CALLS, "torch": bench.MAX_CALLS}
    assert {sets for _, sets, _ in engine.captured} == {3}
    assert engine.replayed[-9:] == ["dandan", "vllm", "torch"] * 3


def test_graphs_of_long_calls_hold_few() -> None:
    engine = FakeEngine({"dandan": 1000.0, "vllm": 250.0, "torch": 150.0})
    bench.measure(workload(), engine, repeats=3, target_us=400.0)
    counts = {name: count for name, _, count in engine.captured}
    assert counts == {"dandan": bench.FEWEST_CALLS, "vllm": 8, "torch": 14}  # 2 ms


def test_spread_is_the_interquartile_range_over_the_median() -> None:
    assert bench._median_and_spread([1.0, 2.0, 3.0, 4.0, 5.0]) == (3.0, 2.0 / 3.0)
    engine = FakeEngine({"dandan": 100.0}, noise=(0.9, 1.0, 1.1))
    row = bench.measure(workload(peers=[]), engine, repeats=9)
    assert row.us == 100.0
    assert row.spread == pytest.approx(0.2, abs=0.01)


def test_wrong_output_is_not_timed() -> None:
    reference = torch.ones(4, dtype=torch.float64)
    engine = FakeEngine({})
    wrong = workload(check=lambda: compare(torch.full((4,), 2.0), reference, 0.0, "rms_norm"))
    with pytest.raises(AssertionError, match=r"rms_norm grid rows=16 cols=4096.*worst element at \[0\]"):
        bench.measure(wrong, engine)
    assert engine.captured == []


def test_error_of_the_checked_output_is_recorded() -> None:
    reference = torch.ones(4, dtype=torch.float64)
    right = workload(peers=[], check=lambda: compare(torch.ones(4), reference, 0.25, "rms_norm"))
    row = bench.measure(right, FakeEngine({"dandan": 1.0}))
    assert row.error == 0.0
    assert row.error_limit == pytest.approx(0.5, abs=1e-6)


def test_peer_that_does_not_run_is_named_with_its_reason() -> None:
    engine = FakeEngine({"dandan": 2.0, "torch": 3.0})
    row = bench.measure(workload(peers=[broken("vllm"), named("torch")], peers_failed={"fa3": "no D=80"}), engine)
    assert row.peers == {"torch": 3.0}
    assert row.peers_failed == {"fa3": "no D=80", "vllm": "RuntimeError: unsupported head size 80"}
    assert "vllm did not run: RuntimeError: unsupported head size 80" in bench.row_line(row)


def test_own_failure_and_a_failing_last_check_are_raised() -> None:
    with pytest.raises(RuntimeError, match="head size 80"):
        bench.measure(workload(own=broken("dandan")), FakeEngine({}))

    def differs() -> None:
        raise AssertionError("chained differs from plain")

    with pytest.raises(AssertionError, match="chained differs"):
        bench.measure(workload(peers=[], after=differs), FakeEngine({"dandan": 1.0}))


def test_two_implementations_of_one_name_are_refused() -> None:
    with pytest.raises(ValueError, match="must have different names"):
        bench.measure(workload(peers=[named("dandan")]), FakeEngine({"dandan": 1.0}))


def test_contexts_are_entered_for_capture_and_eager_calls() -> None:
    inside: list[str] = []

    class Around:
        def __enter__(self) -> None:
            inside.append("in")

        def __exit__(self, *_: object) -> None:
            inside.append("out")

    own = bench.Implementation("dandan", lambda index: lambda: "dandan", around=Around, host=True)
    row = bench.measure(workload(own=own, peers=[]), FakeEngine({"dandan": 1.0}))
    # Once for capture, then for each batch of eager calls; never nested.
    assert inside[:4] == ["in", "out", "in", "out"]
    assert inside == ["in", "out"] * (len(inside) // 2)
    assert row.host_us is not None
    assert row.host_us > 0


def test_host_time_takes_turns_and_idles_before_each_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []
    monkeypatch.setattr(bench, "WARM_UP_BATCHES", 1)
    calls = [lambda: seen.append("a"), lambda: seen.append("b")]
    times = bench.host_microseconds(calls, lambda: seen.append("sync"), batch=2, batches=3)
    assert len(times) == 2
    assert min(times) > 0
    assert seen == ["sync", "a", "a", "sync", "b", "b"] * 4 + ["sync"]


def test_host_time_is_the_median_over_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    # Two warm-up batches, then 1, 5 and 3 microseconds a call.
    monkeypatch.setattr(bench, "WARM_UP_BATCHES", 2)
    # The last batches read the clock twice, the warm-up ones once.
    monkeypatch.setattr(bench, "time", SimpleNamespace(perf_counter=Ticking([10, 50, 30], warm_up=2)))
    (us,) = bench.host_microseconds([lambda: None], lambda: None, batch=10, batches=3)
    assert us == pytest.approx(3.0)


class Ticking:
    """A clock that is read once for each warm-up batch, then twice a batch, the given microseconds apart."""

    def __init__(self, microseconds: list[float], warm_up: int) -> None:
        counted = [reading for us in microseconds for reading in (0.0, us * 1e-6)]
        self.readings = iter([0.0] * warm_up + counted)

    def __call__(self) -> float:
        return next(self.readings)


def test_version_of_a_source_tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "src" / "dandan_example"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    monkeypatch.syspath_prepend(str(tmp_path / "src"))
    assert bench.package_version("dandan-example") is None
    (tmp_path / "pyproject.toml").write_text('[project]\nname = "x"\nversion = "1.2.3"\n')
    assert bench.package_version("dandan-example") == "1.2.3"
    assert bench.package_version("dandan-absent") is None
    assert bench.package_version("pytest") == pytest.__version__


def test_peers_load_or_are_named() -> None:
    def missing() -> None:
        raise bench.PeerUnavailableError("peers_C.so.xz is not in the folder")

    loaded, unavailable = bench.load_peers([bench.Peer("torch", lambda: 7), bench.Peer("vllm", missing)])
    assert loaded == {"torch": 7}
    assert unavailable == {"vllm": "PeerUnavailableError: peers_C.so.xz is not in the folder"}


def test_rotating_sets_are_aligned_distinct_and_large_enough() -> None:
    sets = bench.Rotating({"x": ((3, 5), torch.float16), "i": ((7,), torch.int32)}, 4, "cpu")
    addresses = {s["x"].data_ptr() for s in (sets[i] for i in range(4))}
    assert len(addresses) == 4
    assert all(address % 64 == sets[0]["x"].data_ptr() % 64 for address in addresses)
    assert sets[0]["x"].shape == (3, 5)
    assert sets[0]["x"].is_contiguous()
    assert not torch.equal(sets[0]["x"], sets[1]["x"])
    assert sets[4]["x"].data_ptr() == sets[0]["x"].data_ptr()
    sized = bench.Rotating.sized({"x": ((1024,), torch.float32)}, "cpu", l2_bytes=10_000)
    assert len(sized) == 5


@pytest.mark.parametrize(("set_bytes", "count"), [(1, 200), (1_000_000, 120), (60_000_000, 2), (10**9, 2), (0, 200)])
def test_number_of_sets(set_bytes: int, count: int) -> None:
    assert bench.set_count(set_bytes, 60_000_000) == count


def test_bound_is_the_larger_of_bytes_and_flops() -> None:
    by_bytes = dataclasses.replace(CASE, bytes=4_800_000, flops=1)
    by_flops = dataclasses.replace(CASE, bytes=1, flops=989_000_000)
    assert bench.bound_us(by_bytes, "NVIDIA H200") == 1.0
    assert bench.bound_us(by_flops, "NVIDIA H200") == 1.0
    assert bench.bound_us(by_bytes, "Some other GPU") is None


# Records ------------------------------------------------------------------------------------------------------------


def row(**changes: Any) -> bench.Row:
    values: dict[str, Any] = {
        "op": "rms_norm",
        "case": "grid",
        "variant": "auto",
        "shape": {"rows": 16, "cols": 4096},
        "dtype": "float16",
        "kernel_fingerprint": "abc",
        "route": "sm80_row",
        "us": 2.0,
        "spread": 0.01,
        "peers": {"vllm": 2.5},
    }
    return bench.Row(**{**values, **changes})


def record(*rows: bench.Row, **changes: Any) -> bench.Record:
    values: dict[str, Any] = {"package": "dandan-norm", "topic": "plain", "date": "2026-12-01", "environment": MACHINE}
    return bench.Record(**{**values, **changes}, rows=list(rows or (row(),)))


def test_record_survives_a_round_trip(tmp_path: Path) -> None:
    before = record(
        row(), row(shape={"rows": 4, "cols": 4096}, peers_failed={"fa3": "no"}), peers_unavailable={"a": "b"}
    )
    path = bench.write_record(tmp_path / "deep" / "h200-plain.json", before)
    assert bench.read_record(path) == before
    text = path.read_text()
    assert json.loads(text)["schema"] == 1
    assert len([line for line in text.splitlines() if line.startswith('{"op"')]) == 2


def test_record_name() -> None:
    assert bench.record_name("NVIDIA H200", "plain") == "h200-plain.json"
    assert bench.record_name("NVIDIA GeForce RTX 5090", "host") == "rtx-5090-host.json"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: d.update(schema=2), "schema must be 1, found 2"),
        (lambda d: d.pop("topic"), "key 'topic' is missing"),
        (lambda d: d.update(extra=1), "unknown key 'extra'"),
        (lambda d: d.update(rows={}), "rows must be a list"),
        (lambda d: d["rows"][0].pop("us"), "row 0: key 'us' is missing"),
        (lambda d: d["rows"][0].update(us="2"), "row 0: us must be float, found '2'"),
        (lambda d: d["rows"][0].update(fast=True), "row 0: unknown key 'fast'"),
        (lambda d: d["rows"].append(3), "row 1: must be an object, found int"),
    ],
)
def test_malformed_records_are_refused(tmp_path: Path, change: Callable[[Any], Any], message: str) -> None:
    path = bench.write_record(tmp_path / "a.json", record())
    data = json.loads(path.read_text())
    change(data)
    path.write_text(json.dumps(data))
    with pytest.raises(bench.RecordError, match=message):
        bench.read_record(path)


def test_truncated_record_is_refused(tmp_path: Path) -> None:
    path = bench.write_record(tmp_path / "a.json", record())
    path.write_text(path.read_text()[:-20])
    with pytest.raises(bench.RecordError, match=r"a\.json: cannot be read"):
        bench.read_record(path)


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (record(row(ratio=1.3)), "ratio is 1.3 but its microseconds give 1.2500"),
        (record(row(peers={"a": 3.0, "b": 4.0}, best_peer="b", ratio=1.5)), "best_peer is 'b' but 'a' is faster"),
        (record(row(best_peer="fa3", peers={"a": 2.0}, ratio=1.0)), "best_peer 'fa3' is not among its peers"),
        (record(row(peers={}, ratio=1.0)), "has a ratio or best_peer but no peers"),
        (record(row(us=0.0, ratio=1.0)), "us is 0.0, must be above 0"),
        (record(row(us=math.nan, ratio=1.0)), "us is nan, must be above 0"),
        (record(row(error=2.0, error_limit=1.0)), "error 2.000e\\+00 is over its limit 1.000e\\+00"),
        (record(row(), row()), "measured 2 times"),
        (record(environment={"gpu": "x"}), "environment has no 'driver'"),
    ],
)
def test_contradicting_records_are_reported_and_not_written(tmp_path: Path, bad: bench.Record, message: str) -> None:
    problems = bench.check_record(bad)
    with pytest.raises(bench.RecordError, match=message):
        bench.write_record(tmp_path / "a.json", bad)
    assert problems
    assert not (tmp_path / "a.json").exists()


def test_empty_record_is_not_written(tmp_path: Path) -> None:
    empty = bench.Record("dandan-norm", "plain", "2026-12-01", MACHINE)
    with pytest.raises(bench.RecordError, match="no rows"):
        bench.write_record(tmp_path / "a.json", empty)


def test_rows_must_be_exactly_the_cases() -> None:
    other = dataclasses.replace(CASE, shape={"rows": 4, "cols": 4096})
    elsewhere = dataclasses.replace(other, topic="chained")
    assert bench.check_record(record(), [CASE, elsewhere]) == []
    assert bench.check_record(record(), [CASE, other]) == [
        "rms_norm grid cols=4096 rows=4 float16 auto: no row for this case"
    ]
    assert bench.check_record(record(), [CASE, CASE]) == [
        "rms_norm grid cols=4096 rows=16 float16 auto: listed 2 times in cases.py"
    ]
    assert bench.check_record(record(), [elsewhere]) == [
        "rms_norm grid cols=4096 rows=16 float16 auto: no such case in cases.py"
    ]


def test_rows_of_other_kernels_are_reported() -> None:
    assert bench.check_record(record(), fingerprints={"sm80_row": "abc"}) == []
    assert (
        "was taken on sm80_row abc, the sources are def"
        in bench.check_record(record(), fingerprints={"sm80_row": "def"})[0]
    )
    assert "kernel 'sm80_row' is not in the sources" in bench.check_record(record(), fingerprints={})[0]
    anonymous = record(row(kernel_fingerprint=None))
    assert "has no fingerprint of it" in bench.check_record(anonymous, fingerprints={"sm80_row": "abc"})[0]
    on_torch = record(row(kernel_fingerprint=None, route="torch"))
    assert bench.check_record(on_torch, fingerprints={"sm80_row": "abc"}) == []


def test_kernel_of_several_files_has_one_fingerprint() -> None:
    files = {"sm80_row_rms": "a", "sm80_row_softmax": "b", "sm80_stream": "c", "sm90_cluster_x": "d"}
    assert records.kernel_fingerprint(files, "sm80_stream") == "c"
    assert records.kernel_fingerprint(files, "sm90_cluster") == "d"
    assert records.kernel_fingerprint(files, "sm80_ro") is None
    whole = records.kernel_fingerprint(files, "sm80_row")
    assert whole is not None
    assert whole != records.kernel_fingerprint({**files, "sm80_row_softmax": "B"}, "sm80_row")
    assert whole == records.kernel_fingerprint({**files, "sm80_stream": "C"}, "sm80_row")


def test_geometric_mean() -> None:
    assert records.geometric_mean([1.0, 4.0]) == pytest.approx(2.0)
    assert math.isnan(records.geometric_mean([]))


# A run and its command line ------------------------------------------------------------------------------------------

CASES = [
    CASE,
    dataclasses.replace(CASE, shape={"rows": 4, "cols": 4096}),
    dataclasses.replace(CASE, topic="chained"),
]


def build(case: bench.Case, peers: dict[str, Any]) -> bench.Workload:
    return workload(case=case, peers=[named(name) for name in peers])


def command(argv: list[str], make: Callable[..., bench.Workload] = build) -> int:
    clocks = itertools.cycle([1700, 1980, 1980])
    return bench.main(
        "dandan-norm",
        CASES,
        make,
        peers=[bench.Peer("vllm", lambda: 1), bench.Peer("fa3", lambda: 1 // 0)],
        argv=argv,
        engine=lambda: FakeEngine({"dandan": 2.0, "vllm": 2.5}),
        machine=lambda: dict(MACHINE),
        clock=lambda: next(clocks),
    )


def test_command_records_each_topic(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command(["--record", str(tmp_path)]) == 0
    plain = bench.read_record(tmp_path / "h200-plain.json")
    assert bench.check_record(plain, CASES) == []
    assert plain.environment["sm_clock"] == 1840
    assert plain.peers_unavailable["fa3"].startswith("ZeroDivisionError")
    assert bench.check_record(bench.read_record(tmp_path / "h200-chained.json"), CASES) == []
    printed = capsys.readouterr().out
    assert "peer fa3 is not available: ZeroDivisionError" in printed
    assert "rms_norm: 2 cases, geometric mean 1.250, worst 1.250" in printed
    assert "1.250x vllm (2.50 us)" in printed


def test_failing_case_fails_the_command_and_writes_no_record(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def sometimes(case: bench.Case, peers: dict[str, Any]) -> bench.Workload:
        if case.shape["rows"] == 4:
            raise RuntimeError("out of memory")
        return build(case, peers)

    assert command(["--record", str(tmp_path)], sometimes) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["h200-chained.json"]
    assert "FAILED rms_norm grid rows=4 cols=4096 float16 auto: RuntimeError: out of memory" in capsys.readouterr().out


def test_command_lists_filters_and_refuses_a_partial_record(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command(["--list", "--topic", "plain"]) == 0
    assert capsys.readouterr().out.count("plain: rms_norm") == 2
    assert command(["--only", "rows=4"]) == 0
    assert "1 cases" in capsys.readouterr().out
    assert command(["--only", "nothing like it"]) == 2
    with pytest.raises(SystemExit):
        command(["--only", "rows=4", "--record", str(tmp_path)])


def test_command_needs_a_gpu(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert bench.main("dandan-norm", CASES, build, argv=[]) == 2
    assert "need a CUDA device" in capsys.readouterr().err


def test_clock_without_nvml_or_nvidia_smi_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> None:
        raise OSError(name)

    monkeypatch.setattr(bench.ctypes, "CDLL", absent)
    monkeypatch.setattr(bench.shutil, "which", lambda name: None)
    assert bench._nvml_sm_clock("GPU-1") is None
    assert bench._smi_sm_clock("GPU-1") is None


# On a GPU -------------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
def test_graph_of_a_known_copy_is_timed_plausibly() -> None:
    engine = bench.CudaEngine()
    sets = bench.Rotating.sized({"x": ((1 << 24,), torch.float16), "out": ((1 << 24,), torch.float16)})
    copy = bench.Implementation("copy", lambda i: lambda: sets[i]["out"].copy_(sets[i]["x"]), host=True)
    twice = bench.Implementation("twice", lambda i: lambda: (copy.make(i)(), copy.make(i)()))
    allocating = bench.Implementation("clone", lambda i: lambda: sets[i]["x"].clone())
    case = dataclasses.replace(CASE, bytes=2 << 25)
    made = bench.Workload(case, len(sets), copy, [twice, allocating, broken("vllm")], route="torch")
    row = bench.measure(made, engine, gpu=torch.cuda.get_device_name())
    assert row.bound_us is None or row.us > row.bound_us
    assert 1.5 < row.peers["twice"] / row.us < 2.5
    assert 0.7 < row.peers["clone"] / row.us < 1.5
    assert row.peers_failed["vllm"].startswith("RuntimeError: unsupported")
    assert row.host_us is not None
    assert 0.5 < row.host_us < 100
    assert torch.equal(sets[0]["out"], sets[0]["x"])


@pytest.mark.gpu
def test_peer_that_fails_while_it_is_captured_does_not_spoil_what_follows() -> None:
    sets = bench.Rotating({"x": ((1 << 20,), torch.float16), "out": ((1 << 20,), torch.float16)}, 2)
    copy = bench.Implementation("copy", lambda i: lambda: sets[i]["out"].copy_(sets[i]["x"]))
    # Fine when called eagerly; a synchronisation is not allowed in a capture.
    waiting = bench.Implementation("waiting", lambda i: lambda: float(sets[i]["x"].clone()[0]))
    clone = bench.Implementation("clone", lambda i: lambda: sets[i]["x"].clone())
    row = bench.measure(bench.Workload(CASE, 2, copy, [waiting, clone]), bench.CudaEngine())
    assert set(row.peers) == {"clone"}
    assert "captur" in row.peers_failed["waiting"]
    torch.cuda.empty_cache()
    torch.cuda.synchronize()


@pytest.mark.gpu
def test_environment_of_a_gpu() -> None:
    found = bench.environment("dandan-ops-core")
    assert set(found) == set(records.ENVIRONMENT_KEYS)
    assert found["gpu"] == torch.cuda.get_device_name()


# ------------------------------------------------------------------------------------------------------------------
# Chains, figures, quick runs


class FakeLibrary:
    """What `dependent_launch` needs of an OperatorLibrary."""

    def __init__(self) -> None:
        self.enabled = 1

    def op(self, name: str) -> Callable[[int], int]:
        assert name == "set_dependent_launch"

        def switch(enabled: int) -> int:
            before, self.enabled = self.enabled, enabled
            return before

        return switch


def test_dependent_launch_is_as_it_was_afterwards() -> None:
    library: Any = FakeLibrary()
    with bench.dependent_launch(library, False):
        assert library.enabled == 0
        with bench.dependent_launch(library, True):
            assert library.enabled == 1
        assert library.enabled == 0
    assert library.enabled == 1


class ReplayingEngine(FakeEngine):
    """Runs the calls on replay."""

    def capture(self, calls: Sequence[Callable[[], Any]], count: int) -> Any:
        def replay() -> None:
            for number in range(count):
                calls[number % len(calls)]()

        return SimpleNamespace(calls=count, replay=replay)


@pytest.mark.parametrize(
    ("fault", "scale", "message"),
    [(0.0, 1.0, None), (1.0, 1.0, "link 1 differs between plain and dependent launches"), (0.0, 1e9, "not finite")],
)
def test_chains_are_compared_bit_by_bit(fault: float, scale: float, message: str | None) -> None:
    links = [torch.zeros(4, dtype=torch.float16) for _ in range(2)]
    dependent: list[bool] = []  # of the last capture, whose replay follows

    def launch(enabled: bool) -> Any:
        dependent.append(enabled)
        return contextlib.nullcontext()

    def first() -> None:
        links[0].copy_(links[1] * scale)

    def second() -> None:
        links[1].copy_(links[0] + fault * dependent[-1])

    def check() -> None:
        bench.check_chain("gemm", ReplayingEngine({}), [first, second], links, launch)

    if message is None:
        check()
    else:
        with pytest.raises(AssertionError, match=message):
            check()
    assert dependent == [False, True]


def test_figures_are_recorded_and_left_out_where_there_are_none(tmp_path: Path) -> None:
    engine = FakeEngine({"dandan": 2.0})
    row = bench.measure(workload(peers=[], figures=lambda: {"loss": 0.123456789}), engine)
    assert row.figures == {"loss": 0.123457}
    assert "loss 0.123" in bench.row_line(row)
    record = records.Record("p", "plain", "2026-12-01", MACHINE, [row])
    assert records.read_record(records.write_record(tmp_path / "a-plain.json", record)).rows == [row]
    row.figures = {}
    assert "figures" not in records.write_record(tmp_path / "b-plain.json", record).read_text()


def test_quick_takes_its_cases_and_is_never_recorded(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cases = [dataclasses.replace(CASE, shape={"rows": rows, "cols": 4096}) for rows in (1, 16)]
    seen: list[tuple[bench.Case, bench.Row]] = []

    def summary(measured: Sequence[tuple[bench.Case, bench.Row]]) -> list[str]:
        seen.extend(measured)
        return ["the end"]

    def run(*arguments: str) -> int:
        return bench.main(
            "p",
            cases,
            lambda case, _: workload(case=case, peers=[]),
            argv=arguments,
            engine=lambda: FakeEngine({"dandan": 2.0}),
            machine=lambda: MACHINE,
            quick=lambda case: case.shape["rows"] == 16,
            summary=summary,
        )

    assert run("--quick") == 0
    assert [(case.shape["rows"], row.shape["rows"]) for case, row in seen] == [(16, 16)]
    assert capsys.readouterr().out.endswith("the end\n")
    with pytest.raises(SystemExit):
        run("--quick", "--record", str(tmp_path))
    assert "leave --only out, and --quick" in capsys.readouterr().err

"""Times operators against peers under one set of rules, and writes what came out as a record.

Rules. Correctness first: a case that is wrong is not timed. Each implementation is captured into one CUDA graph of many
calls over rotating buffers; own and peer graphs are replayed in turns, and before each replay the L2 cache is filled
with other data, so inputs come from DRAM for everybody. The figure is the median over replays, the spread its
interquartile range over the median. What an eager call costs the host is measured apart. A peer that cannot be
loaded or does not run is named with its reason, never left out.

A package's `benchmarks/bench_*.py` holds little more than this:

    from cases import CASES
    from dandan_ops_core.benchmark import Implementation, Workload, main

    def build(case, peers):                # tensors of one case and who computes it; peers: what the loaders returned
        sets = Rotating.sized({"x": (shape, dtype), "out": (shape, dtype)})
        own = Implementation("dandan", lambda i: lambda: op(sets[i]["x"], out=sets[i]["out"]))
        return Workload(case, sets=len(sets), own=own, peers=[...], check=..., route=..., fingerprint=...)

    if __name__ == "__main__":
        sys.exit(main("dandan-norm", CASES, build, peers=[Peer("vllm", load_vllm)]))
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import datetime
import gc
import math
import platform
import re
import shutil
import statistics
import subprocess
import sys
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from importlib import metadata, util
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from dandan_ops_core.records import (
    Case,
    Record,
    RecordError,
    Row,
    check_record,
    geometric_mean,
    kernel_fingerprint,
    read_record,
    record_name,
    write_record,
)

if TYPE_CHECKING:
    import torch

    from dandan_ops_core.registry import OperatorLibrary
    from dandan_ops_core.testing import Comparison

__all__ = [
    "Case",
    "CudaEngine",
    "Implementation",
    "Limits",
    "Peer",
    "PeerUnavailableError",
    "Record",
    "RecordError",
    "Rotating",
    "Row",
    "Run",
    "WorkGraph",
    "Workload",
    "bound_us",
    "check_chain",
    "check_record",
    "compiled",
    "dependent_launch",
    "environment",
    "geometric_mean",
    "host_microseconds",
    "kernel_fingerprint",
    "load_peers",
    "main",
    "measure",
    "read_record",
    "record_name",
    "run",
    "write_record",
]

REPEATS = 9
TARGET_US = 400.0
MIN_CALLS = 20
MAX_CALLS = 200
# A graph of long calls has fewer than MIN_CALLS: as many as fill this time, but no fewer than these.
LONG_US = 2000.0
FEWEST_CALLS = 4
# Batches of eager calls before the host time counts: lazy set-up and the CPU's clock need some milliseconds.
WARM_UP_BATCHES = 3
# Rotation and flush buffers are this many times the L2 cache.
L2_FACTOR = 2


# ------------------------------------------------------------------------------------------------------------------
# What is measured


@dataclass
class Implementation:
    """One way to compute a case.

    Attributes:
        name: as it appears in the record.
        make: takes the index of a buffer set and returns a call without arguments. All calls are made before
            anything is captured; a call returns its outputs or None. Outputs that the call allocates itself are kept
            alive over one rotation, so that nobody writes the same memory again and again.
        around: a context for warm-up, capture and eager calls (a backend choice, an environment switch).
        eager: what the host time is measured on; by default the call of buffer set 0. None with `host=False`.
        host: measure the host time.
    """

    name: str
    make: Callable[[int], Callable[[], Any]]
    around: Callable[[], AbstractContextManager[Any]] = contextlib.nullcontext
    eager: Callable[[], Any] | None = None
    host: bool = False


@dataclass
class Workload:
    """A case with its tensors and everybody who computes it.

    Attributes:
        sets: number of rotating buffer sets.
        own, peers: who is timed.
        check: compares own output with the truth before anything is timed; a failing comparison fails the case.
        figures: what else is to be known of the case, by name; asked after the check.
        route: the kernel that runs, asked from the operator's execution info.
        fingerprint: `kernel_fingerprint(build_info["fingerprints"], route)`; None on the torch backend.
        peers_failed: peers that cannot compute this case, with the reason.
        after: called after timing; raises when what the graphs left behind is wrong (chained output against plain,
            bit by bit).
    """

    case: Case
    sets: int
    own: Implementation
    peers: Sequence[Implementation] = ()
    check: Callable[[], Comparison | None] = lambda: None
    figures: Callable[[], Mapping[str, float]] = dict
    route: str = ""
    fingerprint: str | None = None
    peers_failed: dict[str, str] = field(default_factory=dict)
    after: Callable[[], None] | None = None


@contextlib.contextmanager
def dependent_launch(library: OperatorLibrary, enabled: bool) -> Iterator[None]:
    """A package's kernels with or without dependent launch; afterwards as it was."""
    switch = library.op("set_dependent_launch")
    before = switch(int(enabled))
    try:
        yield
    finally:
        switch(before)


def check_chain(
    title: str,
    engine: Engine,
    calls: Sequence[Callable[[], Any]],
    links: Sequence[torch.Tensor],
    launch: Callable[[bool], AbstractContextManager[Any]],
) -> None:
    """Runs a chain once with plain and once with dependent launches, from the same start, and compares what is left.

    Args:
        title: of the case, for messages.
        engine: captures the calls.
        calls: the links in order, each reading what the one before it wrote.
        links: the memory that the calls read and write, of a dtype of 16 bits.
        launch: the context for dependent launch on (True) or off.

    Raises:
        AssertionError: the bits of a link differ, or are not finite, so that equal ones would say little.
    """
    import torch

    start = [torch.randn(link.shape, device=link.device).to(link.dtype) for link in links]
    seen = []
    for enabled in (False, True):
        with launch(enabled):
            graph = engine.capture(calls, len(calls))
        for link, values in zip(links, start, strict=True):
            link.copy_(values)
        graph.replay()
        engine.synchronize()
        seen.append([link.clone() for link in links])
    for number, (plain, dependent) in enumerate(zip(*seen, strict=True)):
        if not torch.equal(plain.view(torch.int16), dependent.view(torch.int16)):
            raise AssertionError(f"{title}: link {number} differs between plain and dependent launches")
        if not torch.isfinite(plain).all():
            raise AssertionError(f"{title}: link {number} is not finite, so equal bits say little")


class PeerUnavailableError(RuntimeError):
    """Raised by a peer's loader: the message is the reason that the record keeps."""


@dataclass
class Peer:
    """A library to compare with. `load` returns whatever the workloads need of it, or raises."""

    name: str
    load: Callable[[], Any]


def load_peers(peers: Iterable[Peer]) -> tuple[dict[str, Any], dict[str, str]]:
    """Loads every peer. Returns (what loaded by name, reason by name of those that did not)."""
    loaded: dict[str, Any] = {}
    unavailable: dict[str, str] = {}
    for peer in peers:
        try:
            loaded[peer.name] = peer.load()
        except Exception as error:  # whatever a foreign library throws while loading is the reason to report
            unavailable[peer.name] = _reason(error)
    return loaded, unavailable


def _reason(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}"[:300]


def compiled(name: str, function: Callable[..., Any], arguments: Callable[[int], Sequence[Any]]) -> Implementation:
    """`torch.compile(function, dynamic=False)` as a peer, compiled afresh for this shape alone."""
    import torch

    torch._dynamo.reset()
    program = torch.compile(function, dynamic=False)

    def make(index: int) -> Callable[[], Any]:
        values = tuple(arguments(index))
        return lambda: program(*values)

    return Implementation(name, make)


class Rotating:
    """Equal sets of tensors cut from one allocation per name, each tensor on a 256-byte boundary of its own.

    `Rotating.sized` picks the number of sets: enough that together they exceed the L2 cache twice, at least 2, at most
    `MAX_CALLS` (a graph has no more calls; what is then left in L2 is flushed between replays).
    """

    def __init__(
        self,
        tensors: Mapping[str, tuple[Sequence[int], torch.dtype]],
        count: int,
        device: torch.device | str = "cuda",
        seed: int = 0,
    ) -> None:
        import torch

        self._sets: list[dict[str, torch.Tensor]] = [{} for _ in range(count)]
        generator = torch.Generator(device=device).manual_seed(seed)
        for name, (shape, dtype) in tensors.items():
            size = math.prod(shape)
            step = -(-size * dtype.itemsize // 256) * 256 // dtype.itemsize
            block = torch.empty(max(count * step, 1), dtype=dtype, device=device)
            if dtype.is_floating_point:
                block.normal_(generator=generator)
            else:
                block.zero_()
            for index in range(count):
                self._sets[index][name] = block[index * step : index * step + size].view(*shape)

    @classmethod
    def sized(
        cls,
        tensors: Mapping[str, tuple[Sequence[int], torch.dtype]],
        device: torch.device | str = "cuda",
        *,
        l2_bytes: int | None = None,
        seed: int = 0,
    ) -> Rotating:
        """As many sets as together exceed the L2 cache twice, for these shapes and dtypes."""
        set_bytes = sum(math.prod(shape) * dtype.itemsize for shape, dtype in tensors.values())
        return cls(tensors, set_count(set_bytes, l2_bytes or l2_size(device)), device, seed)

    def __len__(self) -> int:
        return len(self._sets)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return self._sets[index % len(self._sets)]


def set_count(set_bytes: int, l2_bytes: int) -> int:
    """Buffer sets for one case: together at least twice the L2 cache, at least 2, at most the calls of one graph."""
    return min(max(2, -(-L2_FACTOR * l2_bytes // max(set_bytes, 1))), MAX_CALLS)


def l2_size(device: torch.device | str = "cuda") -> int:
    """Bytes of L2 cache of a CUDA device; 60 MB where it cannot be asked (CPU)."""
    import torch

    if torch.device(device).type != "cuda":
        return 60_000_000
    return int(getattr(torch.cuda.get_device_properties(device), "L2_cache_size", 60_000_000))


# ------------------------------------------------------------------------------------------------------------------
# The physical floor


@dataclass(frozen=True)
class Limits:
    """What a GPU can do at most, by its datasheet: nothing measured may be under the floor these give."""

    dram_bytes_per_s: float
    tensor_flops: float  # dense FP16/BF16 with FP32 accumulation


LIMITS: dict[str, Limits] = {
    "NVIDIA H200": Limits(4.8e12, 989e12),
    "NVIDIA H100 80GB HBM3": Limits(3.35e12, 989e12),
    "NVIDIA A100-SXM4-80GB": Limits(2.039e12, 312e12),
    "NVIDIA GeForce RTX 4090": Limits(1.008e12, 165e12),
    "NVIDIA GeForce RTX 5090": Limits(1.792e12, 209e12),
}


def bound_us(case: Case, gpu: str) -> float | None:
    """The larger of bytes over DRAM rate and FLOPs over tensor rate in microseconds; None for a GPU not in `LIMITS`."""
    limits = LIMITS.get(gpu)
    if limits is None or not (case.bytes or case.flops):
        return None
    return round(max(case.bytes / limits.dram_bytes_per_s, case.flops / limits.tensor_flops) * 1e6, 4)


# ------------------------------------------------------------------------------------------------------------------
# Timing


class WorkGraph(Protocol):
    """Calls that were captured once and can be replayed."""

    calls: int

    def replay(self) -> None: ...


class Engine(Protocol):
    """Where work is captured and timed; `CudaEngine`, or a fake in tests."""

    def capture(self, calls: Sequence[Callable[[], Any]], count: int) -> WorkGraph: ...

    def time(self, graphs: Sequence[WorkGraph], repeats: int) -> list[list[float]]:
        """Replays the graphs in turns; per graph the microseconds of each whole replay."""
        ...

    def synchronize(self) -> None: ...


@dataclass
class _CudaGraph:
    graph: Any
    calls: int
    kept: list[Any]

    def replay(self) -> None:
        self.graph.replay()


class CudaEngine:
    """CUDA graphs and events on the current device."""

    def __init__(self, device: torch.device | str = "cuda") -> None:
        import torch

        self._torch = torch
        self._device = torch.device(device)
        self._stream = torch.cuda.Stream(self._device)
        self._total = torch.cuda.get_device_properties(self._device).total_memory
        words = L2_FACTOR * l2_size(self._device) // 4
        self._flush = torch.zeros(words, dtype=torch.int32, device=self._device)
        self._sink = torch.zeros((), dtype=torch.int64, device=self._device)

    def capture(self, calls: Sequence[Callable[[], Any]], count: int) -> WorkGraph:
        """Captures `count` calls, `calls` in turns, into one CUDA graph. Raises what a call raises."""
        torch = self._torch
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            for call in calls[:3]:
                call()
        self._stream.synchronize()
        # Memory of earlier graphs goes back to the device only here; doing it for every graph would cost more than
        # timing.
        if torch.cuda.memory_reserved(self._device) > self._total // 2:
            torch.cuda.empty_cache()
        graph = torch.cuda.CUDAGraph()
        # Outputs that a call allocates stay alive for one rotation, so its memory is not warmer than a peer's `out`.
        kept: deque[Any] = deque(maxlen=len(calls))
        # Not torch.cuda.graph: some versions collect garbage and empty the cache on entry, 100 ms for a 400 us graph.
        with torch.cuda.stream(self._stream):
            pool = torch.cuda.graph_pool_handle()
            graph.capture_begin(pool=pool, capture_error_mode="thread_local")
            try:
                for number in range(count):
                    kept.append(calls[number % len(calls)]())
            except BaseException:
                self._abandon(graph, pool)
                raise
            graph.capture_end()
        return _CudaGraph(graph, count, list(kept))

    def _abandon(self, graph: Any, pool: Any) -> None:
        """Ends a capture that a call has made invalid, so that the next capture and the allocator work again."""
        torch = self._torch
        try:
            graph.capture_end()
        except RuntimeError:  # says that the capture is invalid, and leaves the allocator believing that it goes on
            index = torch.cuda.current_device() if self._device.index is None else self._device.index
            torch._C._cuda_endAllocateToPool(index, pool)

    def time(self, graphs: Sequence[WorkGraph], repeats: int) -> list[list[float]]:
        """Replays the graphs in turns, L2 flushed before each; per graph the microseconds of each whole replay."""
        torch = self._torch
        pairs: list[list[tuple[Any, Any]]] = [[] for _ in graphs]
        with torch.cuda.stream(self._stream):
            for graph in graphs:
                graph.replay()
            for repeat in range(repeats):
                order = range(len(graphs)) if repeat % 2 == 0 else range(len(graphs) - 1, -1, -1)
                for index in order:
                    start = torch.cuda.Event(enable_timing=True)
                    stop = torch.cuda.Event(enable_timing=True)
                    # Reading, not writing: dirty lines would be written back on the next graph's account. The GPU is
                    # also busy meanwhile, so the events and the graph are queued before it gets there.
                    torch.sum(self._flush, dim=0, out=self._sink)
                    start.record()
                    graphs[index].replay()
                    stop.record()
                    pairs[index].append((start, stop))
        self._stream.synchronize()
        return [[start.elapsed_time(stop) * 1e3 for start, stop in of_graph] for of_graph in pairs]

    def synchronize(self) -> None:
        """Waits for the device."""
        self._torch.cuda.synchronize(self._device)


def _captured(engine: Engine, implementation: Implementation, sets: int, target_us: float) -> WorkGraph:
    """A graph of about `target_us` and MIN_CALLS calls at least, fewer where they are long."""
    calls = [implementation.make(index) for index in range(sets)]
    with implementation.around():
        graph = engine.capture(calls, FEWEST_CALLS)
        (times,) = engine.time([graph], 3)
        one = max(statistics.median(times) / FEWEST_CALLS, 1e-3)
        least = max(FEWEST_CALLS, min(MIN_CALLS, math.ceil(LONG_US / one)))
        count = min(MAX_CALLS, max(least, math.ceil(target_us / one)))
        if count > FEWEST_CALLS:
            graph = engine.capture(calls, count)
    return graph


def _median_and_spread(times: Sequence[float]) -> tuple[float, float]:
    """Median and interquartile range over median."""
    middle = statistics.median(times)
    if len(times) < 2:
        return middle, 0.0
    low, _, high = statistics.quantiles(times, n=4, method="inclusive")
    return middle, (high - low) / middle


def host_microseconds(
    calls: Sequence[Callable[[], Any]],
    synchronize: Callable[[], None] | None = None,
    *,
    contexts: Sequence[Callable[[], AbstractContextManager[Any]]] | None = None,
    batch: int = 32,
    batches: int = 21,
) -> list[float]:
    """Host time of one eager call of each in microseconds: medians over batches that take turns, the device idle
    before each.

    A batch stays far below the depth of the launch queue, so the host never waits for the device. Taking turns
    matters: the clock of a CPU core and its caches drift by more than what is measured here.
    """
    if synchronize is None:
        import torch

        synchronize = torch.cuda.synchronize
    around = contexts or [contextlib.nullcontext] * len(calls)
    took: list[list[float]] = [[] for _ in calls]
    collecting = gc.isenabled()
    gc.disable()
    try:
        for turn in range(-WARM_UP_BATCHES, batches):
            for call, context, times in zip(calls, around, took, strict=True):
                with context():
                    synchronize()
                    begin = time.perf_counter()
                    for _ in range(batch):
                        call()
                    if turn >= 0:
                        times.append((time.perf_counter() - begin) / batch * 1e6)
    finally:
        if collecting:
            gc.enable()
    synchronize()
    return [statistics.median(times) for times in took]


def measure(
    workload: Workload,
    engine: Engine,
    *,
    gpu: str = "",
    repeats: int = REPEATS,
    target_us: float = TARGET_US,
) -> Row:
    """Checks and times one workload.

    Raises:
        AssertionError: the own output is over its error limit.
        Exception: whatever the own implementation raises. A peer that raises is recorded in `peers_failed` instead.
    """
    case = workload.case
    names = [workload.own.name, *(peer.name for peer in workload.peers)]
    if len(set(names)) != len(names):
        raise ValueError(f"{case.title()}: implementations must have different names, got {names}")
    checked = workload.check()
    if checked is not None and not checked.ok:
        raise AssertionError(f"{case.title()}: {checked.message()}")

    figures = {name: float(f"{value:.6g}") for name, value in workload.figures().items()}
    failed = dict(workload.peers_failed)
    graphs = [_captured(engine, workload.own, workload.sets, target_us)]
    timed = [workload.own]
    for peer in workload.peers:
        try:
            graphs.append(_captured(engine, peer, workload.sets, target_us))
            timed.append(peer)
        except Exception as error:  # a peer's failure is a finding about the peer, not about this run
            failed[peer.name] = _reason(error)
    all_times = engine.time(graphs, repeats)
    if workload.after is not None:
        engine.synchronize()
        workload.after()

    results = {}
    for implementation, graph, times in zip(timed, graphs, all_times, strict=True):
        results[implementation.name] = _median_and_spread([t / graph.calls for t in times])
    hosted = [implementation for implementation in timed if implementation.host]
    eager = [implementation.eager or implementation.make(0) for implementation in hosted]
    around = [implementation.around for implementation in hosted]
    host_times = host_microseconds(eager, engine.synchronize, contexts=around) if hosted else []
    host = {implementation.name: round(us, 3) for implementation, us in zip(hosted, host_times, strict=True)}

    own = workload.own.name
    us, spread = results.pop(own)
    return Row(
        op=case.op,
        case=case.case,
        variant=case.variant,
        shape=dict(case.shape),
        dtype=case.dtype,
        kernel_fingerprint=workload.fingerprint,
        route=workload.route,
        us=us,
        spread=spread,
        peers={name: value for name, (value, _) in results.items()},
        peers_spread={name: round(value, 4) for name, (_, value) in results.items()},
        bound_us=bound_us(case, gpu),
        host_us=host.pop(own, None),
        peers_host=host,
        error=None if checked is None else checked.error,
        error_limit=None if checked is None else checked.limit,
        bytes=case.bytes,
        peers_failed=failed,
        figures=figures,
    )


# ------------------------------------------------------------------------------------------------------------------
# The environment of a record


def _nvml_sm_clock(uuid: str) -> int | None:
    """The SM clock in MHz right now through NVML, or None."""
    name = "nvml.dll" if sys.platform == "win32" else "libnvidia-ml.so.1"
    try:
        nvml = ctypes.CDLL(name)
    except OSError:
        return None
    if nvml.nvmlInit_v2() != 0:
        return None
    try:
        handle, clock = ctypes.c_void_p(), ctypes.c_uint()
        if nvml.nvmlDeviceGetHandleByUUID(uuid.encode(), ctypes.byref(handle)) != 0:
            return None
        return clock.value if nvml.nvmlDeviceGetClockInfo(handle, 1, ctypes.byref(clock)) == 0 else None
    finally:
        nvml.nvmlShutdown()


def _smi_sm_clock(uuid: str) -> int | None:
    program = shutil.which("nvidia-smi")
    if program is None:
        return None
    command = [program, f"--id={uuid}", "--query-gpu=clocks.sm", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    text = done.stdout.strip()
    return int(text) if done.returncode == 0 and text.isdigit() else None


def sm_clock(device: torch.device | str = "cuda") -> int | None:
    """The SM clock in MHz right now; None when neither NVML nor nvidia-smi tells. Ask while the GPU is working."""
    import torch

    uuid = f"GPU-{torch.cuda.get_device_properties(device).uuid}"
    clock = _nvml_sm_clock(uuid)
    return clock if clock is not None else _smi_sm_clock(uuid)


def package_version(package: str) -> str | None:
    """A package's version: of the installed distribution, else of the source tree that it is imported from."""
    with contextlib.suppress(metadata.PackageNotFoundError):
        return metadata.version(package)
    spec = util.find_spec(package.replace("-", "_"))
    for place in (spec.submodule_search_locations or []) if spec is not None else []:
        project = Path(place).parents[1] / "pyproject.toml"
        if project.is_file():
            found = re.search(r'^version = "(.+)"$', project.read_text(encoding="utf-8"), re.MULTILINE)
            return found.group(1) if found else None
    return None


def environment(package: str, device: torch.device | str = "cuda") -> dict[str, Any]:
    """What a record says about the machine. `sm_clock` is filled in by `run` while the GPU works."""
    import torch

    from dandan_ops_core import device as dandan_device

    info = dandan_device.describe(device)
    return {
        "gpu": info.name,
        "driver": info.driver,
        "sm_clock": None,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
        "package_version": package_version(package),
    }


# ------------------------------------------------------------------------------------------------------------------
# A run


@dataclass
class Run:
    """What came out of `run`: the record, and what went wrong by case."""

    record: Record
    failures: dict[str, str] = field(default_factory=dict)


def row_line(row: Row) -> str:
    """One line for people: shape, route, time, rate, share of the bound, ratio to the best peer."""
    parts = [f"{row.title():<72} {row.route:<18} {row.us:9.2f} us ±{row.spread * 100:4.1f}%"]
    rate = row.gigabytes_per_s
    if rate is not None:
        parts.append(f"{rate:7.0f} GB/s")
    if row.bound_us:
        parts.append(f"{100 * row.bound_us / row.us:5.1f}% of bound")
    if row.ratio is not None and row.best_peer is not None:
        others = "".join(f", {name} {us:.2f}" for name, us in row.peers.items() if name != row.best_peer)
        parts.append(f"{row.ratio:6.3f}x {row.best_peer} ({row.peers[row.best_peer]:.2f} us{others})")
    if row.host_us is not None:
        peers = ", ".join(f"{name} {us:.2f}" for name, us in row.peers_host.items())
        parts.append(f"host {row.host_us:.2f} us" + (f" ({peers})" if peers else ""))
    parts += [f"{name} {value:.3g}" for name, value in row.figures.items()]
    parts += [f"[{name} did not run: {reason}]" for name, reason in row.peers_failed.items()]
    return "  ".join(parts)


def run(
    package: str,
    topic: str,
    cases: Iterable[Case],
    build: Callable[[Case], Workload],
    *,
    engine: Engine,
    machine: dict[str, Any],
    clock: Callable[[], int | None] = lambda: None,
    peers_unavailable: Mapping[str, str] | None = None,
    repeats: int = REPEATS,
    report: Callable[[str], None] = print,
) -> Run:
    """Measures every case of one topic. A case that fails is kept with its reason and the run goes on.

    `build` is called per case, so only one case's tensors are alive at a time.
    """
    date = datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d")
    record = Record(package, topic, date, dict(machine), peers_unavailable=dict(peers_unavailable or {}))
    outcome = Run(record)
    for name, reason in record.peers_unavailable.items():
        report(f"peer {name} is not available: {reason}")
    clocks = []
    for case in cases:
        try:
            workload = build(case)
            row = measure(workload, engine, gpu=str(machine.get("gpu", "")), repeats=repeats)
        except Exception as error:  # one bad case must not cost the others their GPU time; it fails the run at its end
            outcome.failures[case.title()] = _reason(error)
            report(f"FAILED {case.title()}: {_reason(error)}")
            traceback.print_exc()
            continue
        record.rows.append(row)
        report(row_line(row))
        if (now := clock()) is not None:
            clocks.append(now)
        del workload
    if clocks:
        record.environment["sm_clock"] = int(statistics.median(clocks))
    for line in summary(record.rows):
        report(line)
    return outcome


def summary(rows: Sequence[Row]) -> Iterator[str]:
    """Per operator: geometric mean and worst of the ratios."""
    for op in sorted({row.op for row in rows}):
        compared = [row for row in rows if row.op == op and row.ratio is not None]
        if compared:
            ratios = [row.ratio for row in compared if row.ratio is not None]
            worst = min(compared, key=lambda row: row.ratio or 0.0)
            yield (
                f"{op}: {len(compared)} cases, geometric mean {geometric_mean(ratios):.3f}, "
                f"worst {worst.ratio:.3f} at {worst.title()} against {worst.best_peer}"
            )


def main(
    package: str,
    cases: Sequence[Case],
    build: Callable[..., Workload],
    *,
    peers: Sequence[Peer] = (),
    quick: Callable[[Case], bool] | None = None,
    summary: Callable[[Sequence[tuple[Case, Row]]], Iterable[str]] | None = None,
    argv: Sequence[str] | None = None,
    engine: Callable[[], Engine] | None = None,
    machine: Callable[[], dict[str, Any]] | None = None,
    clock: Callable[[], int | None] | None = None,
) -> int:
    """The command line of a package's benchmark. `build(case, loaded_peers)` makes a workload.

    Args:
        quick: the cases of `--quick`; None where the package has no such choice.
        summary: lines about everything that was measured, printed at the end.

    Returns 0, or 1 when a case failed (nothing is recorded for a topic that is not complete), or 2 without a GPU.
    """
    parser = argparse.ArgumentParser(description=f"Benchmarks of {package}")
    parser.add_argument("--topic", action="append", help="only this topic; may be given more than once")
    parser.add_argument("--only", action="append", default=[], metavar="TEXT", help="only cases whose title has TEXT")
    if quick is not None:
        parser.add_argument("--quick", action="store_true", help="few cases of each topic, to see how it stands")
    parser.add_argument("--repeats", type=int, default=REPEATS, help="replays of each graph (default %(default)s)")
    parser.add_argument("--record", type=Path, metavar="FOLDER", help="write FOLDER/<gpu>-<topic>.json for each topic")
    parser.add_argument("--list", action="store_true", help="print the cases and stop")
    arguments = parser.parse_args(argv)

    chosen = [case for case in cases if not arguments.topic or case.topic in arguments.topic]
    chosen = [case for case in chosen if all(text in case.title() for text in arguments.only)]
    few = quick is not None and arguments.quick
    if quick is not None and few:
        chosen = [case for case in chosen if quick(case)]
    if arguments.list:
        for case in chosen:
            print(f"{case.topic}: {case.title()}")
        return 0
    if not chosen:
        print("no case fits", file=sys.stderr)
        return 2
    if arguments.record is not None and (arguments.only or few):
        parser.error("--record needs the whole grid: leave --only out" + (", and --quick" if quick else ""))
    if engine is None:
        import torch

        if not torch.cuda.is_available():
            print("benchmarks need a CUDA device and none is visible", file=sys.stderr)
            return 2
        engine = CudaEngine
    machine = machine or (lambda: environment(package))
    loaded, unavailable = load_peers(peers)
    working = engine()
    present = machine()
    status = 0
    measured: list[tuple[Case, Row]] = []
    for topic in dict.fromkeys(case.topic for case in chosen):
        of_topic = [case for case in chosen if case.topic == topic]
        begin = time.monotonic()
        outcome = run(
            package,
            topic,
            of_topic,
            lambda case: build(case, loaded),
            engine=working,
            machine=present,
            clock=clock or (sm_clock if isinstance(working, CudaEngine) else lambda: None),
            peers_unavailable=unavailable,
            repeats=arguments.repeats,
        )
        by_key = {case.key: case for case in of_topic}
        measured += [(by_key[row.key], row) for row in outcome.record.rows]
        print(f"{topic}: {len(of_topic)} cases took {time.monotonic() - begin:.0f} s")
        if outcome.failures:
            status = 1
            print(f"{topic}: {len(outcome.failures)} cases failed", file=sys.stderr)
        elif arguments.record is not None:
            name = record_name(str(present.get("gpu", "gpu")), topic)
            print(f"wrote {write_record(arguments.record / name, outcome.record)}")
    for line in summary(measured) if summary is not None and measured else ():
        print(line)
    return status

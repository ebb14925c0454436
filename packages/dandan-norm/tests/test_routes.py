"""Routes of the compiled library, asked without a GPU: which kernel and tile a width, layout and architecture take, and
why not another.

Two things are read from csrc/routes.h itself, so that a row or threshold added there is tested without a word here: its
numbers (each one below, at and above it becomes a width) and its reasons (each has to be seen).
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dandan_norm._ops import KERNELS, LIBRARY
from dandan_ops_core.backend import BackendUnavailableError
from dandan_ops_core.testing import routes
from dandan_ops_core.testing.library import check_loaded_if_built, refusal
from dandan_ops_core.testing.routes import ARCHITECTURES, H200, cannot
from dandan_ops_core.testing.routes import sheet as rows

ROUTES = (Path(__file__).resolve().parents[1] / "csrc/routes.h").read_text(encoding="utf-8")
DTYPES = (torch.float16, torch.bfloat16, torch.float32)
ADDING = ("rms_norm", "residual_rms_norm", "layer_norm", "softmax")  # operators whose bits the lanes decide
OPS = (*ADDING, "silu_and_mul", "argmax")
MULTIPROCESSORS = 132  # what the library assumes for a device that is not there
ROW_BYTES = 65536  # widest row that a block holds in registers
CLUSTER_BYTES = 1 << 20  # widest row of a cluster

code_for = functools.partial(routes.code_for, LIBRARY)


def test_a_library_that_was_built_is_loaded() -> None:
    check_loaded_if_built("dandan_norm")


def operands(
    op: str, x: torch.Tensor, weight: torch.Tensor | None = None, bias: torch.Tensor | None = None
) -> tuple[Any, ...]:
    return {
        "rms_norm": (x, weight, 1e-6),
        "residual_rms_norm": (x, x, weight, 1e-6),
        "layer_norm": (x, weight, bias, 1e-5),
        "softmax": (x,),
        "silu_and_mul": (x, x),
        "argmax": (x,),
    }[op]


def ask(op: str, inputs: tuple[Any, ...], backend: str = "auto", arch: int = H200, out: Any = None) -> dict[str, Any]:
    count = len(LIBRARY.operators[op].outputs)
    return LIBRARY.info(op, inputs, (None,) * count if out is None else out, backend, arch)


def misaligned(*shape: int, dtype: torch.dtype = torch.float16) -> torch.Tensor:
    """Rows that start one element past a vector; only its strides matter, so memory is taken for one row."""
    count = shape[-1]
    return torch.zeros(count + 16, dtype=dtype)[1 : count + 1].expand(shape)


def per_vector(dtype: torch.dtype) -> int:
    return 16 // dtype.itemsize


def folded(op: str, vectors: int, dtype: torch.dtype) -> bool:
    """Whether a row is folded onto the 32 lanes of a warp."""
    return op == "layer_norm" and 32 < vectors <= (1024 if dtype == torch.float32 else 512)


def lanes(op: str, cols: int, dtype: torch.dtype, answer: dict[str, Any]) -> int:
    """Partial sums of a row. In a norm, a thread that keeps four vectors stands for two lanes of two. A folded row has
    32 lanes whatever the warps, as long as they and their vectors are powers of two that hold the row.
    """
    threads = int(answer["threads"])
    vectors = -(-cols // per_vector(dtype))
    if folded(op, vectors, dtype) and answer["kernel"] in ("sm80_row", "sm80_stream"):
        assert threads in (32, 64, 128, 256), answer  # sm80_stream has scratch for eight warps
        kept = answer["vectors"] or 8  # partial sums of a thread of sm80_stream
        assert kept in (1, 2, 4, 8), answer
        assert kept * threads >= vectors, answer
        assert threads == 32 or answer["rows"] == 1 or answer["vectors"] == 0, answer
        return 32
    return int(threads * answer["cluster"] * (2 if answer["vectors"] == 4 and op != "softmax" else 1))


# ------------------------------------------------------------------------------------------------------------- widths


def thresholds() -> list[int]:
    """Every number in routes.h, as a number of vectors: whichever is a threshold is met from both sides."""
    numbers = {int(text, 0) for text in re.findall(r"\b(?:0x[0-9a-fA-F]+|\d+)\b", re.sub(r"//.*", "", ROUTES))}
    known = {1, 2, 4, 8, 64, 256, 4096, 65536}
    assert known <= numbers
    return sorted(number for number in numbers if 1 <= number <= 4 * 65536)


VECTORS = sorted({at for edge in thresholds() for at in (edge - 1, edge, edge + 1) if at >= 1})


def expected_kernel(op: str, vectors: int, count: int) -> str:
    if op == "silu_and_mul":
        return "sm80_elementwise"
    size = 16 * vectors
    if op == "argmax":
        return "sm90_cluster" if size > ROW_BYTES and count <= MULTIPROCESSORS else "sm80_row"
    return "sm80_row" if size <= ROW_BYTES else "sm90_cluster" if size <= CLUSTER_BYTES else "sm80_stream"


@pytest.mark.library
@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_kernel_at_every_edge_of_width(op: str, dtype: torch.dtype) -> None:
    for vectors in VECTORS:
        cols = vectors * per_vector(dtype)
        for count in (1, MULTIPROCESSORS, MULTIPROCESSORS + 1):
            answer = ask(op, operands(op, rows(count, cols, dtype=dtype)), "cuda")
            assert answer["kernel"] == expected_kernel(op, vectors, count), (cols, count)
            assert answer["aligned"]
            # One element more or less, or an odd start: the same operator on the kernel that takes anything.
            slow = "sm80_elementwise" if op == "silu_and_mul" else "sm80_stream"
            for odd in (cols - 1, cols + 1):
                answer = ask(op, operands(op, rows(count, odd, dtype=dtype)), "cuda")
                assert (answer["kernel"], answer["aligned"]) == (slow, False), (odd, count)


@pytest.mark.library
@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kernel", KERNELS)
def test_tiles_hold_a_row_and_fit_a_block(op: str, dtype: torch.dtype, kernel: str) -> None:
    """Every kernel by name at every edge: it takes the row whole, or says why not."""
    seen = 0
    for vectors in VECTORS:
        for count in (1, 512, 513, 1023, 1024, 70000):
            try:
                answer = ask(op, operands(op, rows(count, vectors * per_vector(dtype), dtype=dtype)), kernel)
            except BackendUnavailableError:
                continue
            seen += 1
            where = f"{vectors} vectors, {count} rows: {answer}"
            assert answer["kernel"] == kernel, where
            threads = answer["threads"]
            assert 1 <= threads <= (768 if kernel == "sm80_stream" else 512), where
            assert threads % 32 == 0 or threads in (1, 2, 4, 8, 16) or kernel == "sm80_elementwise", where
            assert 1 <= answer["rows"] * threads <= 1024, where
            assert answer["cluster"] in ((2, 4, 8, 16) if kernel == "sm90_cluster" else (1, 4, 8, 16)), where
            if kernel in ("sm80_row", "sm90_cluster") and op != "argmax":
                assert answer["vectors"] * threads * answer["cluster"] >= vectors, where
            if kernel == "sm80_stream":
                assert answer["vectors"] == 0, where
    elementwise = kernel == "sm80_elementwise"
    assert (seen > 0) == (elementwise == (op == "silu_and_mul"))


# ---------------------------------------------------------------------------------------------- the order of additions


@pytest.mark.library
@pytest.mark.parametrize("op", ADDING)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_stream_adds_in_the_lanes_of_the_aligned_kernel_at_every_edge(op: str, dtype: torch.dtype) -> None:
    for vectors in VECTORS:
        cols = vectors * per_vector(dtype)
        if 16 * vectors > CLUSTER_BYTES:
            continue  # both are sm80_stream
        aligned = ask(op, operands(op, rows(3, cols, dtype=dtype)), "cuda")
        assert aligned["kernel"] != "sm80_stream"
        for slow in (
            ask(op, operands(op, misaligned(3, cols, dtype=dtype)), "cuda"),
            ask(op, operands(op, rows(3, cols, dtype=dtype)), "sm80_stream"),
            ask(op, operands(op, rows(3, cols - 1, dtype=dtype)), "cuda") if per_vector(dtype) > 1 else aligned,
        ):
            assert slow["kernel"] == "sm80_stream"
            assert lanes(op, cols, dtype, slow) == lanes(op, cols, dtype, aligned), f"{cols}: {slow} and {aligned}"
            assert slow["cluster"] == aligned["cluster"]


@pytest.mark.library
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_folded_rows_have_tiles_for_few_and_for_many(dtype: torch.dtype) -> None:
    """Each tile that folded_tile names, with the number of rows that takes it: a change is seen here."""
    seen = set()
    for vectors in range(33, (1024 if dtype == torch.float32 else 512) + 1):
        for count in (1, 512, 513, 661, 1188, 1189, 2112, 2113, 3168, 3169, 4224, 4752, 4753, 70000):
            inputs = operands("layer_norm", rows(count, vectors * per_vector(dtype), dtype=dtype))
            answer = ask("layer_norm", inputs, "cuda")
            warps = answer["threads"] // 32
            slots = answer["vectors"] * warps
            assert 32 * slots >= vectors
            assert slots == 2 or 16 * slots < vectors, "half the threads would do"
            assert answer["rows"] == (4 if warps == 1 else 1)
            seen.add((answer["vectors"], warps))
    few = {(2, 1), (2, 2), (4, 1)}
    assert seen == few | ({(4, 2), (4, 4), (4, 8)} if dtype == torch.float32 else {(1, 4), (2, 4), (2, 8), (4, 4)})


COLS = st.one_of(
    st.integers(1, 300_000),
    st.sampled_from(VECTORS).flatmap(lambda vectors: st.integers(max(1, 8 * vectors - 9), 8 * vectors + 9)),
)


@pytest.mark.library
@settings(max_examples=300, deadline=None)
@given(
    op=st.sampled_from(ADDING),
    dtype=st.sampled_from(DTYPES),
    cols=COLS,
    # 400 * 400 * 400 rows are fewer than fit into a grid of clusters, and wider ones than memory holds.
    shapes=st.lists(st.lists(st.integers(1, 400), min_size=0, max_size=3), min_size=2, max_size=5),
    odd=st.booleans(),
    backend=st.sampled_from(["auto", "cuda", "sm80_row", "sm80_stream", "sm90_cluster"]),
)
def test_kernel_and_lanes_depend_on_operator_width_and_dtype_alone(
    op: str, dtype: torch.dtype, cols: int, shapes: list[list[int]], odd: bool, backend: str
) -> None:
    """A35: never on the rows around a row."""
    make = misaligned if odd else rows
    answers = set()
    for leading in shapes:
        try:
            answer = ask(op, operands(op, make(*leading, cols, dtype=dtype)), backend)
        except BackendUnavailableError as error:
            answers.add(str(error))
        else:
            answers.add((answer["kernel"], lanes(op, cols, dtype, answer), answer["cluster"]))
    assert len(answers) == 1, answers


@pytest.mark.library
@settings(max_examples=200, deadline=None)
@given(op=st.sampled_from(ADDING), dtype=st.sampled_from(DTYPES), cols=COLS, first=st.integers(1, 9000))
def test_lanes_are_those_of_the_next_whole_vector(op: str, dtype: torch.dtype, cols: int, first: int) -> None:
    """An odd width, an odd start and a weight of another dtype add as the aligned rows of as many vectors do."""
    step = per_vector(dtype)
    whole = -(-cols // step) * step
    other = torch.float32 if dtype != torch.float32 else torch.float16
    best = ask(op, operands(op, rows(first, whole, dtype=dtype)), "cuda")
    calls = [operands(op, rows(7, cols, dtype=dtype)), operands(op, misaligned(2, cols, dtype=dtype))]
    if op != "softmax":
        x = torch.zeros(cols, dtype=dtype).expand(5, cols)
        calls.append(operands(op, x, torch.zeros(cols, dtype=other)))
        assert ask(op, calls[-1], "cuda")["kernel"] == "sm80_stream"
    for inputs in calls:
        answer = ask(op, inputs, "cuda")
        seen, wanted = (lanes(op, cols, dtype, each) for each in (answer, best))
        assert (seen, answer["cluster"]) == (wanted, best["cluster"]), f"{answer} and {best}"


# ----------------------------------------------------------------------------------------------------------- alignment


def aligned(op: str, x: torch.Tensor, out: Any = None, **vectors: torch.Tensor) -> bool:
    return bool(ask(op, operands(op, x, **vectors), "cuda", out=out)["aligned"])


@pytest.mark.library
@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_what_counts_as_aligned(op: str, dtype: torch.dtype) -> None:
    step = per_vector(dtype)
    base = torch.zeros(8, 8 * step * 8, dtype=dtype)
    assert base.data_ptr() % 16 == 0
    width = 4 * step
    assert aligned(op, base[:, :width])
    assert aligned(op, base[:, step : step + width])  # a start that is a whole vector
    assert aligned(op, base[::3, :width])
    assert aligned(op, base[:1, :width].expand(5, width))  # one row again and again
    assert aligned(op, base.view(8, 4, -1)[:, :, :width])  # leading dimensions that lie evenly
    # Two levels of rows; the indices of argmax then have two as well, which its fast kernels do not write.
    assert aligned(op, base.view(8, 4, -1)[:, 1:3, :width]) == (op != "argmax")
    for start in range(1, step):
        assert not aligned(op, base[:, start : start + width]), start
    for less in range(1, step):
        assert not aligned(op, base[:, : width - less]), less
    assert not aligned(op, base.as_strided((4, width), (width + 1, 1)))  # odd row stride
    assert not aligned(op, base.view(-1)[:256].as_strided((4, width), (width, 2)))  # every second element
    assert not aligned(op, base.view(2, 2, 2, -1)[:, :1, :, : 3 * step].expand(2, 3, 2, 3 * step))  # three levels
    # A row stride of one more vector is fine, of half a vector is not.
    assert aligned(op, base.as_strided((3, width), (width + step, 1)))
    assert not aligned(op, base.as_strided((3, width), (width + step // 2, 1)))


@pytest.mark.library
def test_strides_that_a_32_bit_number_does_not_hold_take_the_slow_path() -> None:
    # Never touched, so it takes addresses, not memory.
    far = torch.empty((1 << 30) + 4096, dtype=torch.float16)
    near, beyond = (far.as_strided((2, 4096), (stride, 1)) for stride in ((1 << 30) - 8, 1 << 30))
    assert aligned("rms_norm", near)
    assert not aligned("rms_norm", beyond)
    assert aligned("rms_norm", far.as_strided((1, 4096), (1 << 30, 1)))  # one row has no stride
    assert ask("rms_norm", operands("rms_norm", beyond), "cuda")["kernel"] == "sm80_stream"


@pytest.mark.library
@pytest.mark.parametrize("op", ["rms_norm", "layer_norm", "softmax", "silu_and_mul"])
def test_an_odd_output_takes_the_slow_path(op: str) -> None:
    x = torch.zeros(4, 64, dtype=torch.float16)
    wide = torch.zeros(4, 136, dtype=torch.float16)
    assert aligned(op, x, (wide[:, 64:128],))
    assert not aligned(op, x, (wide[:, 1:65],))
    assert not aligned(op, x, (torch.zeros(4, 65, dtype=torch.float16)[:, :64],))


@pytest.mark.library
def test_either_odd_output_of_the_pair_takes_the_slow_path() -> None:
    x, odd = torch.zeros(4, 64, dtype=torch.float16), torch.zeros(4, 65, dtype=torch.float16)[:, 1:]
    fine = torch.zeros(2, 4, 64, dtype=torch.float16)
    assert aligned("residual_rms_norm", x, (fine[0], fine[1]))
    assert not aligned("residual_rms_norm", x, (odd, fine[1]))
    assert not aligned("residual_rms_norm", x, (fine[0], odd))


@pytest.mark.library
def test_strided_indices_take_the_slow_path() -> None:
    x = torch.zeros(4, 64, dtype=torch.float16)
    assert aligned("argmax", x, (torch.zeros(4, dtype=torch.int64),))
    assert not aligned("argmax", x, (torch.zeros(4, 2, dtype=torch.int64)[:, 0],))


@pytest.mark.library
@pytest.mark.parametrize("op", ["rms_norm", "residual_rms_norm", "layer_norm"])
def test_weights_that_the_fast_kernels_do_not_read(op: str) -> None:
    x = torch.zeros(4, 64, dtype=torch.bfloat16)

    def kernel(name: str, vector: torch.Tensor) -> str:
        return str(ask(op, operands(op, x, **{name: vector}), "cuda")["kernel"])

    for name in ("weight", "bias") if op == "layer_norm" else ("weight",):
        assert kernel(name, torch.zeros(64, dtype=torch.bfloat16)) == "sm80_row"
        assert kernel(name, torch.zeros(72, dtype=torch.bfloat16)[8:]) == "sm80_row"
        for vector in (
            torch.zeros(64, dtype=torch.float32),
            torch.zeros(64, dtype=torch.float16),
            torch.zeros(65, dtype=torch.bfloat16)[1:],
            torch.zeros(64, 2, dtype=torch.bfloat16)[:, 0],
            torch.zeros(1, dtype=torch.bfloat16).expand(64),
        ):
            assert kernel(name, vector) == "sm80_stream"


# -------------------------------------------------------------------------------------------------------- architectures


@pytest.mark.library
@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("op", OPS)
def test_architecture(op: str, arch: int) -> None:
    """auto takes an own kernel on measured architectures alone; "cuda" wherever there is code; else the reason."""
    inputs = operands(op, rows(4, 4096))
    code, own = code_for(arch), expected_kernel(op, 512, 4)
    auto = ask(op, inputs, "auto", arch)
    assert ask(op, inputs, "torch", arch)["reason"] == "asked for"
    if code == 0:
        routes.check_without_code(lambda backend: ask(op, inputs, backend, arch), op, ("cuda", own))
        return
    assert ask(op, inputs, "cuda", arch)["kernel"] == own
    if arch == H200:
        assert (auto["backend"], auto["kernel"], auto["fallback_reason"]) == ("cuda", own, None)
    else:
        assert auto["backend"] == auto["kernel"] == "torch"
        assert auto["reason"] == "the kernels were never measured on this architecture"
        assert auto["fallback_reason"] == 'architecture never measured; name backend="cuda" to take the own kernel'
    wide = operands(op, rows(4, 40960))
    if op != "silu_and_mul":
        if code >= 90:
            assert ask(op, wide, "cuda", arch)["kernel"] == "sm90_cluster"
        else:
            can = "sm80_row" if op == "argmax" else "sm80_stream"
            assert ask(op, wide, "cuda", arch)["kernel"] == can
            why = "clusters need sm_90 or later"
            assert refusal(ask, op, wide, "sm90_cluster", arch) == cannot(op, "sm90_cluster", why, can)


@pytest.mark.library
def test_the_library_says_what_it_was_built_for() -> None:
    machine, _ = routes.code_targets(LIBRARY)
    assert machine
    assert [code_for(int(name.rstrip("af"))) for name in machine] == [int(name.rstrip("af")) for name in machine]
    assert code_for(75) == 0  # no kernel runs there, and nothing may be built for it


@pytest.mark.library
def test_the_answer_is_json_with_these_keys() -> None:
    raw = LIBRARY.op("softmax_info")(torch.zeros(2, 8), 0, None, H200)
    wanted = {"backend", "kernel", "reason", "fallback_reason", "profile", "aligned", "vectors", "threads", "rows"}
    assert wanted | {"cluster"} <= routes.keys_of(raw)


# ------------------------------------------------------------------------------------------------------------ profiles


@pytest.fixture
def profile() -> Iterator[Callable[[str], None]]:
    """profile("rms_norm;float16;cols=4096;sm80_stream\\n") hands rows to the library; they are taken back."""

    with routes.profile_rows(LIBRARY) as put:
        yield put


@pytest.mark.library
@pytest.mark.parametrize("op", ADDING)
def test_a_profile_row_decides_its_own_width_alone(op: str, profile: Callable[[str], None]) -> None:
    def kernel(cols: int, dtype: torch.dtype = torch.float16, backend: str = "auto") -> tuple[str, bool]:
        answer = ask(op, operands(op, rows(4, cols, dtype=dtype)), backend)
        return answer["kernel"], answer["profile"]

    assert kernel(4096) == ("sm80_row", False)
    profile(f"{op};float16;cols=4096;sm80_stream\n{op};float16;cols=2048;torch")
    assert kernel(4096) == ("sm80_stream", True)
    assert kernel(2048) == ("torch", True)
    assert kernel(4104) == ("sm80_row", False)
    assert kernel(4096, torch.bfloat16) == ("sm80_row", False)
    assert kernel(4096, backend="cuda") == ("sm80_row", False)
    other = next(name for name in ADDING if name != op)
    assert ask(other, operands(other, rows(4, 4096)))["profile"] is False
    profile(f"{op};bfloat16;cols=4096;sm90_cluster\n")
    assert kernel(4096) == ("sm80_row", False), "a new table replaces the old one"
    assert kernel(4096, torch.bfloat16) == ("sm90_cluster", True)
    profile("")
    assert kernel(4096, torch.bfloat16) == ("sm80_row", False)


@pytest.mark.library
def test_a_profile_row_that_cannot_run_is_passed_over(profile: Callable[[str], None]) -> None:
    profile("rms_norm;float16;cols=4099;sm80_row\nrms_norm;float16;cols=4096;sm80_row\n")
    answer = ask("rms_norm", operands("rms_norm", rows(4, 4099)))
    assert (answer["kernel"], answer["profile"]) == ("sm80_stream", False)
    answer = ask("rms_norm", operands("rms_norm", misaligned(4, 4096)))
    assert (answer["kernel"], answer["profile"]) == ("sm80_stream", False)
    # On a device without measurements a row is one.
    if code_for(80):
        answer = ask("rms_norm", operands("rms_norm", rows(4, 4096)), "auto", 80)
        assert (answer["kernel"], answer["profile"]) == ("sm80_row", True)


@pytest.mark.library
@pytest.mark.parametrize(
    "line",
    [
        "rms_norm",
        "rms_norm;float16;cols=4096",
        "rms_norm;float16;cols=4096;sm80_row;more",
        "rmsnorm;float16;cols=4096;sm80_row",
        "rms_norm;float64;cols=4096;sm80_row",
        "rms_norm;float16;rows=4096;sm80_row",
        "rms_norm;float16;cols=4096,rows=16;sm80_row",  # no row may name a number of rows
        "rms_norm;float16;cols=;sm80_row",
        "rms_norm;float16;cols= 4096;sm80_row",
        "rms_norm;float16;cols=x;sm80_row",
        "rms_norm;float16;cols=-1;sm80_row",
        "rms_norm;float16;cols=4096;sm80_fast",
        "rms_norm;float16;cols=4096;auto",
        "rms_norm;float16;cols=4096;cuda",
        "rms_norm;float16;cols=4096;",
        " rms_norm;float16;cols=4096;sm80_row",
    ],
)
def test_bad_profile_text(line: str, profile: Callable[[str], None]) -> None:
    """Refused by name, and the rows from before stay."""
    good = "softmax;float16;cols=4096;sm80_stream"
    routes.check_row_refused(profile, good, line, "op;dtype;cols=N;kernel")
    assert ask("softmax", operands("softmax", rows(4, 4096)))["profile"] is True


@pytest.mark.library
@pytest.mark.parametrize("kind", routes.NO_ROWS)
def test_a_profile_is_contiguous_bytes(kind: str) -> None:
    routes.check_not_rows(LIBRARY, routes.NO_ROWS[kind])


@pytest.mark.library
def test_dependent_launch_is_a_switch_with_a_memory() -> None:
    routes.check_dependent_launch(LIBRARY)


# ---------------------------------------------------------------------------------------------------- every row is hit


def reasons() -> set[str]:
    """Every sentence with which routes.h explains a choice: one for each of its rows. What a refusal has around it
    begins with a mark.
    """
    texts = routes.sentences(ROUTES, "obstacle", "kernel_reason", "select")
    return {text for text in texts if text[0].isalpha()}


def calls() -> Iterator[tuple[str, tuple[Any, ...], str, int]]:
    """Calls that between them take every row."""
    plain = rows(4, 4096)
    for arch in ARCHITECTURES:
        for backend in ("auto", "cuda", "torch", *KERNELS):
            yield "rms_norm", operands("rms_norm", plain), backend, arch
            yield "silu_and_mul", operands("silu_and_mul", plain), backend, arch
            yield "argmax", operands("argmax", rows(4, 40960)), backend, arch
    for x in (rows(4, 40960), rows(4, 4099), rows(1, 524296), rows(1, 0x7FFF0001), rows(0x7FFFFFFF // 16 + 1, 8)):
        for backend in ("auto", "cuda", "sm80_row", "sm90_cluster", "sm80_stream"):
            yield "rms_norm", operands("rms_norm", x), backend, H200
    yield "rms_norm", operands("rms_norm", torch.zeros(4096), torch.ones(4096).half()), "sm80_row", H200
    uneven = rows(3, 3, 3, 3, 3, 64)[:2, :2, :2, :2, :2]
    yield "softmax", operands("softmax", uneven), "auto", H200


@pytest.mark.library
def test_every_row_of_the_table_is_hit(profile: Callable[[str], None]) -> None:
    seen: set[str | None] = set()
    profile("softmax;float16;cols=64;sm80_row")
    wanted = reasons()
    assert len(wanted) >= 16
    every = [*calls(), ("softmax", operands("softmax", rows(4, 64)), "auto", H200)]
    for op, inputs, backend, arch in every:
        seen |= routes.explanations(ask, op, inputs, backend, arch)
    missing = wanted - seen
    # No build has code below sm_80: the floor is there for a list of architectures that somebody writes by hand.
    missing.discard("it needs sm_80 or later")
    if not any(0 < code_for(arch) < 90 for arch in ARCHITECTURES):
        missing.discard("clusters need sm_90 or later")
    if not any(code_for(arch) for arch in ARCHITECTURES if arch != H200):
        missing -= {
            "the kernels were never measured on this architecture",
            'architecture never measured; name backend="cuda" to take the own kernel',
        }
    assert not missing
    assert None in seen


@pytest.mark.library
def test_names_of_operators_and_kernels_are_those_of_python() -> None:
    assert routes.names_in(ROUTES, "kOpNames") == list(LIBRARY.operators)
    assert routes.names_in(ROUTES, "kBackendNames") == list(LIBRARY.codes)


@pytest.mark.library
@pytest.mark.parametrize("op", OPS)
def test_zero_rows_and_columns_have_a_route(op: str) -> None:
    for shape in ((0, 64), (0, 4096), (2, 0, 64)):
        assert ask(op, operands(op, rows(*shape)), "cuda")["kernel"] in KERNELS
    if op != "argmax":
        assert ask(op, operands(op, rows(4, 0)), "cuda")["kernel"] in KERNELS

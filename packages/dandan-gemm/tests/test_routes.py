"""Routes of the compiled library, asked without a GPU: which kernel, configuration and slices of K a shape, layout and
architecture take, what is copied, and why not another.

The estimates are tuned on a GPU, so these tests do not say which kernel wins where. They say that the choice is what
the estimates say, that it can run, that layouts are read in place where they can be, and that every reason of
csrc/routes.h is met.
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

from dandan_gemm._ops import KERNELS, LIBRARY, candidates
from dandan_ops_core.backend import BackendUnavailableError
from dandan_ops_core.testing import routes
from dandan_ops_core.testing.library import check_loaded_if_built, refusal
from dandan_ops_core.testing.routes import ARCHITECTURES, H200, sheet

ROUTES = (Path(__file__).resolve().parents[1] / "csrc/routes.h").read_text(encoding="utf-8")
ROWS = (1, 2, 4, 8, 16, 17, 32, 33, 64, 128, 256, 1024, 4096)
LAYERS = ((4096, 1024), (1024, 3072), (6144, 4096), (4096, 12288), (51200, 5120), (151936, 1024))  # (n, k)
AWKWARD = ((1, 8), (8, 1), (7, 4095), (4095, 7), (130, 72), (3, 100000))

cannot = functools.partial(routes.cannot, "gemm")
code_for = functools.partial(routes.code_for, LIBRARY)
home = functools.partial(routes.home, LIBRARY)
built = functools.partial(routes.built, LIBRARY)


def test_a_library_that_was_built_is_loaded() -> None:
    check_loaded_if_built("dandan_gemm")


def operands(m: int, n: int, k: int, *, transposed: bool = True, dtype: torch.dtype = torch.float16) -> dict[str, Any]:
    b = sheet(*((n, k) if transposed else (k, n)), dtype=dtype)
    return {"a": sheet(m, k, dtype=dtype), "b": b, "weight_transposed": transposed}


def ask(
    a: torch.Tensor,
    b: torch.Tensor,
    *,
    weight_transposed: bool = True,
    bias: torch.Tensor | None = None,
    static_weight: bool = False,
    out: torch.Tensor | None = None,
    backend: str = "auto",
    arch: int | None = None,
) -> dict[str, Any]:
    return LIBRARY.info("gemm", (a, b, bias, weight_transposed, static_weight), (out,), backend, arch or home())


def configs() -> dict[str, list[dict[str, Any]]]:
    found: dict[str, list[dict[str, Any]]] = LIBRARY.describe()["configs"]
    return found


@pytest.fixture
def needs_90a() -> None:
    routes.require_code(LIBRARY, "90a")


# ------------------------------------------------------------------------------------------------------ configurations


@pytest.mark.library
def test_tables_of_configurations() -> None:
    routes.check_configurations(LIBRARY, KERNELS)
    for table in configs().values():
        for each in table:
            assert each["tile_m"] % 8 == 0
            assert each["tile_n"] % 8 == 0
            assert each["tile_k"] % 16 == 0
            assert each["splits"] == sorted(set(each["splits"]))
            assert each["splits"][0] >= 1
            assert each["splits"][-1] == each["max_split"]


# -------------------------------------------------------------------------------------------------------- the estimates


@pytest.mark.library
@pytest.mark.usefixtures("needs_90a")
@pytest.mark.parametrize("transposed", [False, True], ids=["[K, N]", "[N, K]"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_the_choice_is_the_cheapest_candidate(transposed: bool, dtype: torch.dtype) -> None:
    """Of torch and the own kernels, torch where it is cheaper by the margin that routes.h says."""
    margin = re.search(r"kTorchMargin = ([0-9.]+);", ROUTES)
    assert margin is not None
    for n, k in (*LAYERS, *AWKWARD):
        for m in ROWS:
            call = operands(m, n, k, transposed=transposed, dtype=dtype)
            where = f"{m} {n} {k}"
            found = candidates(**call, arch=H200)
            every = found["candidates"]
            assert [each["us"] for each in every] == sorted(each["us"] for each in every), where
            assert len({(c["kernel"], c["config"], c["split"]) for c in every}) == len(every), where
            assert sum(each["kernel"] == "torch" for each in every) == 1, where
            assert all(each["us"] > 0 for each in every), where
            own = [each for each in every if each["kernel"] != "torch"]
            assert {each["kernel"] for each in own} | set(found["obstacles"]) == set(KERNELS), where
            (torchs,) = (each for each in every if each["kernel"] == "torch")
            auto = ask(**call)
            if abs(torchs["us"] - float(margin[1]) * own[0]["us"]) > 0.01:  # the answer has three decimals
                wins = torchs if torchs["us"] < float(margin[1]) * own[0]["us"] else own[0]
                assert (auto["kernel"], auto["us"]) == (wins["kernel"], wins["us"]), where
            assert (auto["fallback_reason"] is None) == (auto["kernel"] != "torch"), where
            for backend in ("cuda", *KERNELS):
                mine = [each for each in own if backend in ("cuda", each["kernel"])]
                if mine:
                    route = ask(**call, backend=backend)
                    assert route["us"] == mine[0]["us"], where
                    assert any(
                        (route["kernel"], route["config"], route["split"]) == (c["kernel"], c["config"], c["split"])
                        for c in mine
                    ), where
                else:
                    with pytest.raises(BackendUnavailableError, match=re.escape(found["obstacles"][backend])):
                        ask(**call, backend=backend)


@pytest.mark.library
@pytest.mark.usefixtures("needs_90a")
@settings(max_examples=200, deadline=None)
@given(m=st.integers(1, 1 << 20), n=st.integers(1, 1 << 20), k=st.integers(1, 1 << 20), transposed=st.booleans())
def test_candidates_can_run(m: int, n: int, k: int, transposed: bool) -> None:
    """No more slices than tiles of K, none that a configuration does not take, all rows in one tile where they must."""
    tables = {kernel: {each["name"]: each for each in table} for kernel, table in configs().items()}
    found = candidates(**operands(m, n, k, transposed=transposed), arch=H200)
    assert any(each["kernel"] == "sm80_mma" for each in found["candidates"]), "it takes everything"
    for each in found["candidates"]:
        if each["kernel"] == "torch":
            continue
        config = tables[each["kernel"]][each["config"]]
        assert list(tables[each["kernel"]]).index(each["config"]) == each["number"]
        assert each["split"] in config["splits"]
        assert each["split"] == 1 or each["split"] <= -(-k // config["tile_k"])
        if each["kernel"] == "skinny":
            assert m <= config["tile_m"]
    aligned = k % 8 == 0 or m == 1
    assert found["a_aligned"] == aligned


@pytest.mark.library
@pytest.mark.usefixtures("needs_90a")
def test_the_workspace_holds_the_sums_of_every_slice() -> None:
    seen = set()
    for n, k in LAYERS:
        for m in (1, 16, 64):
            for kernel in KERNELS:
                try:
                    answer = ask(**operands(m, n, k), backend=kernel)
                except BackendUnavailableError:
                    continue
                slices = answer["split"] if answer["kernel"] in ("sm80_mma", "sm90_tma_mma") else 0
                assert answer["workspace"] == (4 * m * n * slices if slices > 1 else 0)
                seen.add(slices > 1)
    assert seen == {False, True}


@pytest.mark.library
def test_a_call_costs_more_with_more_work() -> None:
    """Of the fastest own candidate: more rows, columns or K are never estimated cheaper by more than a tail's worth."""
    for n, k in LAYERS:
        before = 0.0
        for m in (64, 256, 1024, 4096, 16384):
            us = ask(**operands(m, n, k), backend="cuda")["us"]
            assert us >= before, (m, n, k)
            before = us


# -------------------------------------------------------------------------------------------------------------- layouts


def half(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.float16)


M, N, K = 4, 24, 64
# What a may be -> (aligned, copied).
LEFT: dict[str, tuple[torch.Tensor, bool, bool]] = {
    "rows": (half(M, K), True, False),
    "a vector": (half(K), True, False),
    "one row, any stride": (half(M, K + 1)[:1, :K], True, False),
    "leading dimensions": (half(2, 3, K), True, False),
    "leading ones": (half(M, K).view(1, M, 1, K), True, False),
    "columns of a wider tensor": (half(M, 2 * K)[:, K:], True, False),
    "leading dimensions of columns": (half(2, 3, 2 * K)[..., :K], True, False),
    "every second row": (half(2 * M, K)[::2], True, False),
    "odd K": (half(M, K - 1), False, False),
    "odd row stride": (half(M, K + 4)[:, :K], False, False),
    "odd start": (half(M * K + 1)[1:].view(M, K), False, False),
    "a start at 8 bytes": (half(M * K + 4)[4:].view(M, K), False, False),
    "expanded rows": (half(1, K).expand(M, K), False, False),
    "rows that overlap": (half(1000).as_strided((M, K), (8, 1)), False, False),
    "one element a row": (half(M, 1), False, False),
    "every second column": (half(M, 2 * K)[:, ::2], True, True),
    "transposed": (half(K, M).t(), True, True),
    "transposed leading dimensions": (half(3, 2, K).transpose(0, 1), True, True),
    "uneven leading dimensions": (half(3, 3, K)[:2, :2], True, True),
    "expanded columns": (half(M, 1).expand(M, K), True, True),
    "transposed of an odd K": (half(K - 1, M).t(), True, True),
}


@pytest.mark.library
@pytest.mark.parametrize("kind", LEFT)
def test_rows_of_a(kind: str) -> None:
    a, aligned, copied = LEFT[kind]
    answer = ask(a, half(N, a.shape[-1]), backend="sm80_mma")
    assert (answer["a_aligned"], answer["copies"]) == (aligned, ["a"] if copied else []), kind
    assert (answer["m"], answer["n"], answer["k"]) == (a.shape[:-1].numel(), N, a.shape[-1])
    # torch takes any strides of a matrix; only leading dimensions that are not one have to be copied for it.
    reshaped = kind in ("transposed leading dimensions", "uneven leading dimensions")
    assert ask(a, half(N, a.shape[-1]), backend="torch")["copies"] == (["a"] if reshaped else [])


# b of [N, K] -> (rows along N as the kernel reads it, aligned, copied).
RIGHT: dict[str, tuple[torch.Tensor, bool, bool, bool]] = {
    "rows": (half(N, K), True, True, False),
    "transposed view of [K, N]": (half(K, N).t(), False, True, False),
    "columns of a wider tensor": (half(N, 2 * K)[:, K:], True, True, False),
    "columns of a wider transposed": (half(K, 2 * N)[:, N:].t(), False, True, False),
    "odd row stride": (half(N, K + 4)[:, :K], True, False, False),
    "odd start": (half(N * K + 1)[1:].view(N, K), True, False, False),
    "transposed with an odd stride": (half(K, N + 1)[:, :N].t(), False, False, False),
    "expanded rows": (half(1, K).expand(N, K), True, False, False),
    "one column": (half(1, K), True, True, False),
    "odd K": (half(N, K - 1), True, False, False),
    "K is 1": (half(N, 1), False, True, False),  # as [1, N] its one row is aligned, as [N, 1] its rows are not
    "every second column": (half(N, 2 * K)[:, ::2], True, True, True),
    "every second column of an odd K": (half(N, 2 * K - 2)[:, ::2], True, True, True),
    "transposed and every second": (half(2 * K, 2 * N)[::2, ::2].t(), True, True, True),
}


@pytest.mark.library
@pytest.mark.parametrize("kind", RIGHT)
@pytest.mark.parametrize("declared", [True, False], ids=["[N, K]", "[K, N]"])
def test_rows_of_b(kind: str, declared: bool) -> None:
    """Memory decides: the same weight under either name is read the same way, unless it has to be copied."""
    weight, rows_along_n, aligned, copied = RIGHT[kind]
    b = weight if declared else weight.t()
    answer = ask(half(M, weight.shape[1]), b, weight_transposed=declared, backend="sm80_mma")
    expected = declared if copied else rows_along_n
    assert answer["copies"] == (["b"] if copied else []), kind
    assert answer["weight_transposed"] == expected, kind
    assert answer["b_aligned"] == aligned, kind
    assert ask(half(M, weight.shape[1]), b, weight_transposed=declared, backend="torch")["copies"] == []


# out -> (aligned, copied by an own kernel, copied by torch).
RESULT: dict[str, tuple[torch.Tensor, bool, bool, bool]] = {
    "rows": (half(2, 3, N), True, False, False),
    "columns of a wider tensor": (half(2, 3, 2 * N)[..., N:], True, False, False),
    "odd start": (half(6 * N + 1)[1:].view(2, 3, N), False, False, False),
    "odd row stride": (half(2, 3, N + 1)[..., :N], False, False, False),
    "every second column": (half(2, 3, 2 * N)[..., ::2], True, True, False),
    "transposed": (half(N, 6).t().unflatten(0, (2, 3)), True, True, False),
    "transposed leading dimensions": (half(3, 2, N).transpose(0, 1), True, True, True),
}


@pytest.mark.library
@pytest.mark.parametrize("kind", RESULT)
def test_rows_of_out(kind: str) -> None:
    out, aligned, copied, by_torch = RESULT[kind]
    answer = ask(half(2, 3, K), half(N, K), out=out, backend="sm80_mma")
    assert (answer["out_aligned"], answer["copies"]) == (aligned, ["out"] if copied else []), kind
    assert ask(half(2, 3, K), half(N, K), out=out, backend="torch")["copies"] == (["out"] if by_torch else [])


@pytest.mark.library
@pytest.mark.parametrize(
    ("bias", "copied"),
    [(half(N), False), (half(N + 1)[1:], False), (half(2 * N)[::2], True), (half(1).expand(N), True)],
    ids=["contiguous", "odd start", "every second", "expanded"],
)
def test_bias(bias: torch.Tensor, copied: bool) -> None:
    assert ask(half(M, K), half(N, K), bias=bias, backend="sm80_mma")["copies"] == (["bias"] if copied else [])
    one = half(4)[::4]
    assert ask(half(M, K), half(1, K), bias=one, backend="sm80_mma")["copies"] == []


@pytest.mark.library
def test_all_that_is_copied_is_named_in_order() -> None:
    answer = ask(
        half(M, 2 * K)[:, ::2],
        half(N, 2 * K)[:, ::2],
        bias=half(2 * N)[::2],
        out=half(M, 2 * N)[:, ::2],
        backend="sm80_mma",
    )
    assert answer["copies"] == ["a", "b", "bias", "out"]


@pytest.mark.library
@pytest.mark.usefixtures("needs_90a")
def test_copies_cost() -> None:
    """A candidate's time includes the copies that it needs."""
    plain, copied = half(64, 4096), half(4096, 64).t()
    weight = half(1024, 4096)
    for kernel in ("sm80_mma", "sm90_tma_mma", "sm90a_wgmma"):
        fast, slow = (ask(a, weight, backend=kernel) for a in (plain, copied))
        assert slow["copies"] == ["a"]
        assert slow["us"] > fast["us"] + 0.5


@pytest.mark.library
def test_sizes_beyond_32_bits() -> None:
    """Offsets have 64 bits; what the coordinates of TMA cannot hold goes to the kernel that has none."""
    huge = 1 << 32
    for call in (operands(huge, 8, 8), operands(8, huge, 8), operands(8, 8, huge), operands(huge, huge, 8)):
        answer = ask(**call, backend="sm80_mma") if call["a"].shape[0] * call["b"].shape[0] < 1 << 40 else None
        if answer is not None:
            assert answer["kernel"] == "sm80_mma"
    if built("90a"):
        for kernel in ("sm90_tma_mma", "sm90a_wgmma"):
            with pytest.raises(BackendUnavailableError, match="a dimension does not fit 32-bit coordinates"):
                ask(**operands(1 << 31, 8, 8), backend=kernel)
            assert ask(**operands((1 << 31) - 1, 8, 8), backend=kernel)["kernel"] == kernel
    far = torch.empty(1, dtype=torch.float16, device="meta").as_strided((2, 64), (1 << 39, 1))
    assert not ask(far, half(N, K).to("meta"), backend="sm80_mma")["a_aligned"], "TMA takes strides below 2^40 bytes"
    near = torch.empty(1, dtype=torch.float16, device="meta").as_strided((2, 64), ((1 << 39) - 8, 1))
    assert ask(near, half(N, K).to("meta"), backend="sm80_mma")["a_aligned"]


@pytest.mark.library
@pytest.mark.parametrize(
    ("m", "n", "k", "reason"),
    [(0, 8, 8, "out has no elements"), (8, 0, 8, "out has no elements"), (0, 8, 0, "out has no elements"),
     (8, 8, 0, "K is 0: the sums are empty")],
)  # fmt: skip
@pytest.mark.parametrize("backend", ["auto", "cuda", *KERNELS])
def test_nothing_to_multiply(m: int, n: int, k: int, reason: str, backend: str) -> None:
    """No kernel runs, so every backend can."""
    answer = ask(**operands(m, n, k), backend=backend)
    assert (answer["kernel"], answer["reason"], answer["copies"]) == ("torch", reason, [])
    assert candidates(**operands(m, n, k), arch=H200)["candidates"] == []


# -------------------------------------------------------------------------------------------------------- architectures


@pytest.mark.library
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_architecture(arch: int) -> None:
    """auto takes an own kernel on measured architectures alone; "cuda" wherever there is code; else the reason."""
    call = operands(8, 4096, 4096)
    code = code_for(arch)
    auto = ask(**call, arch=arch)
    assert ask(**call, backend="torch", arch=arch)["reason"] == "asked for"
    if code == 0:
        routes.check_without_code(lambda backend: ask(**call, backend=backend, arch=arch), "gemm", ("cuda", *KERNELS))
        return
    own = ask(**call, backend="cuda", arch=arch)
    assert own["kernel"] in KERNELS
    if arch != H200:
        assert auto["kernel"] == "torch"
        assert auto["reason"] == "the kernels were never measured on this architecture"
        assert auto["fallback_reason"] == 'architecture never measured; name backend="cuda" to take the own kernel'
    runs = {"sm80_mma", "skinny"} | ({"sm90_tma_mma"} if code >= 90 else set())
    runs |= {"sm90a_wgmma"} if arch == 90 and built("90a") else set()
    for kernel in KERNELS:
        if kernel in runs:
            assert ask(**call, backend=kernel, arch=arch)["kernel"] == kernel
        else:
            why = {
                "sm90_tma_mma": "TMA needs sm_90 or later",
                "sm90a_wgmma": "wgmma needs a device of sm_90 and a build with code for sm_90a",
            }[kernel]
            assert refusal(ask, **call, backend=kernel, arch=arch) == cannot(kernel, why, own["kernel"])


@pytest.mark.library
def test_the_answer_is_json_with_these_keys() -> None:
    raw = LIBRARY.op("gemm_info")(half(2, 8), half(4, 8), None, True, False, 0, None, H200)
    wanted = {"backend", "kernel", "reason", "fallback_reason", "profile", "copies", "config", "split", "us"}
    wanted |= {"workspace", "m", "n", "k", "weight_transposed"}
    assert wanted <= routes.keys_of(raw)


# ------------------------------------------------------------------------------------------------------------- profiles


@pytest.fixture
def profile() -> Iterator[Callable[[str], None]]:
    """profile("gemm;float16;k=64,m=4,n=24;sm80_mma\\n") hands rows to the library; they are taken back."""

    with routes.profile_rows(LIBRARY) as put:
        yield put


def shown(m: int = M, n: int = N, k: int = K, **keywords: Any) -> tuple[str, bool]:
    dtype = keywords.pop("dtype", torch.float16)
    transposed = keywords.pop("transposed", True)
    answer = ask(**operands(m, n, k, transposed=transposed, dtype=dtype), **keywords)
    return answer["kernel"], answer["profile"]


@pytest.mark.library
@pytest.mark.usefixtures("needs_90a")
def test_a_profile_row_decides_its_own_shape_alone(profile: Callable[[str], None]) -> None:
    usual, _ = shown()
    other = next(kernel for kernel in KERNELS if kernel != usual)
    profile(f"gemm;float16;k=64,m=4,n=24;{other}\ngemm;bfloat16;k=64,m=4,n=24,weight_transposed=0;torch")
    assert shown() == (other, True)
    assert shown(backend="cuda")[1] is False
    for changes in ({"m": 5}, {"n": 32}, {"k": 72}, {"dtype": torch.bfloat16}, {"transposed": False}):
        assert shown(**changes)[1] is False, changes
    assert shown(dtype=torch.bfloat16, transposed=False) == ("torch", True)
    profile(f"gemm;bfloat16;k=64,m=4,n=24,weight_transposed=1;{other}\n")
    assert shown() == (usual, False), "a new table replaces the old one"
    assert shown(dtype=torch.bfloat16) == (other, True)
    profile("")
    assert shown(dtype=torch.bfloat16) == (usual, False)


@pytest.mark.library
@pytest.mark.usefixtures("needs_90a")
def test_a_static_weight_changes_no_route(profile: Callable[[str], None]) -> None:
    """The caller's word on who wrote b decides when it is read, not the bits of the result."""
    assert shown(static_weight=True) == shown()
    profile("gemm;float16;k=64,m=4,n=24;torch")
    assert shown(static_weight=True) == shown() == ("torch", True)


@pytest.mark.library
@pytest.mark.usefixtures("needs_90a")
def test_a_profile_row_is_of_the_layout_in_memory(profile: Callable[[str], None]) -> None:
    """Whatever the caller calls it."""
    profile("gemm;float16;k=64,m=4,n=24,weight_transposed=1;sm80_mma")
    assert ask(half(M, K), half(N, K))["profile"] is True
    assert ask(half(M, K), half(N, K).t(), weight_transposed=False)["profile"] is True
    assert ask(half(M, K), half(K, N).t())["profile"] is False
    assert ask(half(2, 2, K), half(N, K))["profile"] is True


@pytest.mark.library
@pytest.mark.usefixtures("needs_90a")
@pytest.mark.parametrize("kernel", KERNELS)
def test_a_profile_row_may_name_a_configuration_and_slices(kernel: str, profile: Callable[[str], None]) -> None:
    call = operands(4, 4096, 4096)
    every = [each for each in candidates(**call, arch=H200)["candidates"] if each["kernel"] == kernel]
    for each in every:
        profile(f"gemm;float16;k=4096,m=4,n=4096;{kernel}.{each['config']}.{each['split']}")
        answer = ask(**call)
        assert (answer["kernel"], answer["config"], answer["split"]) == (kernel, each["config"], each["split"])
        assert answer["profile"] is True
        assert answer["us"] == each["us"]


@pytest.mark.library
@pytest.mark.usefixtures("needs_90a")
def test_a_profile_row_that_cannot_run_is_passed_over(profile: Callable[[str], None]) -> None:
    usual = shown(k=63)
    assert usual[1] is False
    profile("gemm;float16;k=63,m=4,n=24;sm90a_wgmma\ngemm;float16;k=64,m=4,n=24;sm90a_wgmma\n")
    assert shown(k=63) == usual
    assert shown() == ("sm90a_wgmma", True)
    crooked = half(M * K + 1)[1:].view(M, K)
    assert ask(crooked, half(N, K))["profile"] is False
    # Slices of which some would have nothing to do.
    name = configs()["sm80_mma"][0]["name"]
    most = configs()["sm80_mma"][0]["max_split"]
    profile(f"gemm;float16;k=64,m=4,n=24;sm80_mma.{name}.{most}")
    assert shown()[1] is False
    # On a device without measurements a row is one.
    if code_for(80):
        profile("gemm;float16;k=64,m=4,n=24;sm80_mma")
        assert shown(arch=80) == ("sm80_mma", True)


@pytest.mark.library
@pytest.mark.parametrize(
    "line",
    [
        "gemm",
        "gemm;float16;k=64,m=4,n=24",
        "gemm;float16;k=64,m=4,n=24;sm80_mma;more",
        "linear;float16;k=64,m=4,n=24;sm80_mma",
        "gemm;float32;k=64,m=4,n=24;sm80_mma",
        "gemm;float16;k=64,m=4;sm80_mma",
        "gemm;float16;k=64,m=4,rows=24;sm80_mma",
        "gemm;float16;k=64,m=4,n=24,batch=1;sm80_mma",
        "gemm;float16;k=64,m=4,n=24,weight_transposed=2;sm80_mma",
        "gemm;float16;k=64,m=4,n=24,weight_transposed=1,batch=1;sm80_mma",
        "gemm;float16;k=64,m=4,weight_transposed=1;sm80_mma",
        "gemm;float16;k=64,k=64,m=4;sm80_mma",
        "gemm;float16;k=,m=4,n=24;sm80_mma",
        "gemm;float16;k= 64,m=4,n=24;sm80_mma",
        "gemm;float16;k=x,m=4,n=24;sm80_mma",
        "gemm;float16;k=-1,m=4,n=24;sm80_mma",
        "gemm;float16;k=64,m=4,n=24;sm80_fast",
        "gemm;float16;k=64,m=4,n=24;auto",
        "gemm;float16;k=64,m=4,n=24;cuda",
        "gemm;float16;k=64,m=4,n=24;",
        "gemm;float16;k=64,m=4,n=24;sm80_mma.",
        "gemm;float16;k=64,m=4,n=24;sm80_mma.64x64",
        "gemm;float16;k=64,m=4,n=24;sm80_mma.64x63.1",
        "gemm;float16;k=64,m=4,n=24;sm80_mma.64x64.0",
        "gemm;float16;k=64,m=4,n=24;sm80_mma.64x64.1000",
        "gemm;float16;k=64,m=4,n=24;sm80_mma.64x64.1.1",
        "gemm;float16;k=64,m=4,n=24;torch.64x64.1",
        " gemm;float16;k=64,m=4,n=24;sm80_mma",
    ],
)
def test_bad_profile_text(line: str, profile: Callable[[str], None]) -> None:
    """Refused by name, and the rows from before stay."""
    good = "gemm;float16;k=64,m=4,n=24;torch"
    form = "gemm;dtype;k=K,m=M,n=N or that with ,weight_transposed=0 or 1;kernel or kernel.configuration.slices"
    routes.check_row_refused(profile, good, line, form)
    assert shown() == ("torch", True)


@pytest.mark.library
@pytest.mark.parametrize("kind", routes.NO_ROWS)
def test_a_profile_is_contiguous_bytes(kind: str) -> None:
    routes.check_not_rows(LIBRARY, routes.NO_ROWS[kind])


@pytest.mark.library
def test_dependent_launch_is_a_switch_with_a_memory() -> None:
    routes.check_dependent_launch(LIBRARY)


# --------------------------------------------------------------------------------------------------- every row is hit


@pytest.mark.library
@pytest.mark.usefixtures("needs_90a")
def test_every_reason_is_met(profile: Callable[[str], None]) -> None:
    profile("gemm;float16;k=64,m=4,n=24;sm80_mma")
    seen: set[str | None] = set()
    calls: list[dict[str, Any]] = [operands(M, N, K)]
    calls += [operands(m, n, k, transposed=t) for m in ROWS for n, k in (*LAYERS, *AWKWARD) for t in (False, True)]
    calls += [operands(1 << 31, 8, 8), operands(1 << 40, 1 << 40, 8)]
    calls += [{"a": half(8, 64)[:, :60], "b": half(24, 64)[:, :60]}]
    calls += [{"a": half(4, 63), "b": half(24, 63)}, {"a": half(4, 64), "b": half(24, 68)[:, :64]}]
    for call in calls:
        for backend in ("auto", "cuda", "torch", *KERNELS):
            seen |= routes.explanations(ask, **call, backend=backend)
    for arch in ARCHITECTURES:
        for backend in ("auto", *KERNELS):
            seen |= routes.explanations(ask, **operands(8, 4096, 4096), backend=backend, arch=arch)
    wanted = routes.sentences(ROUTES, "obstacle", "kernel_reason", "select")
    assert len(wanted) >= 16
    missing = wanted - seen
    # No build has code below sm_80: the floor is there for a list of architectures that somebody writes by hand.
    missing.discard("it needs sm_80 or later")
    if not any(0 < code_for(arch) < 90 for arch in ARCHITECTURES):
        missing.discard("TMA needs sm_90 or later")
    if not any(code_for(arch) for arch in ARCHITECTURES if arch != H200):
        missing -= {
            "the kernels were never measured on this architecture",
            'architecture never measured; name backend="cuda" to take the own kernel',
            "wgmma needs a device of sm_90 and a build with code for sm_90a",
        }
    # Which kernel is the fastest somewhere is for the estimates to say.
    missing = {text for text in missing if not text.startswith("estimated to be the fastest")}
    assert not missing
    assert None in seen


@pytest.mark.library
def test_names_of_kernels_are_those_of_python() -> None:
    assert routes.names_in(ROUTES, "kBackendNames") == list(LIBRARY.codes)

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

from dandan_ops_core.backend import BackendUnavailableError
from dandan_ops_core.model_shapes import CALIBRATED, TOKENS, distinct_layers
from dandan_ops_core.testing import routes
from dandan_ops_core.testing.library import check_loaded_if_built, refusal
from dandan_ops_core.testing.routes import ARCHITECTURES, H200, sheet
from dandan_w4a16._ops import KERNELS, LIBRARY
from dandan_w4a16.kernel_order import code_words, scale_elements
from dandan_w4a16.packed import candidates

ROUTES = (Path(__file__).resolve().parents[1] / "csrc/routes.h").read_text(encoding="utf-8")
DECODE_ROWS, RING_ROWS = 16, 64  # at most, of sm80_decode and sm90_decode
WORKSPACE = 16 << 20  # bytes
ROWS = (1, 2, 4, 8, 9, 16, 17, 32, 33, 64, 128, 256, 1024, 4096)
# (n, k)
LAYERS = ((4096, 1024), (1024, 2048), (1024, 3072), (6144, 4096), (4096, 12288), (51200, 5120), (151936, 1024))
AWKWARD = ((1, 8), (8, 64), (7, 4088), (4095, 8), (130, 72), (3, 100000))

cannot = functools.partial(routes.cannot, "packed_linear")
code_for = functools.partial(routes.code_for, LIBRARY)
home = functools.partial(routes.home, LIBRARY)
built = functools.partial(routes.built, LIBRARY)


def test_a_library_that_was_built_is_loaded() -> None:
    check_loaded_if_built("dandan_w4a16")


def ordered(n: int, k: int, group: int = 64, dtype: torch.dtype = torch.float16) -> dict[str, Any]:
    """A weight in the kernels' order."""
    codes = sheet(code_words(n, k), dtype=torch.int32)
    pairs = sheet(scale_elements(n, k, group), dtype=dtype)
    return {"codes": codes, "scales": pairs, "n": n, "k": k, "group_size": group}


def operands(m: int, n: int, k: int, *, group: int = 64, dtype: torch.dtype = torch.float16) -> dict[str, Any]:
    return {"x": sheet(m, k, dtype=dtype), "bias": None, **ordered(n, k, group, dtype)}


def ask(
    x: torch.Tensor,
    codes: torch.Tensor,
    scales: torch.Tensor,
    bias: torch.Tensor | None,
    n: int,
    k: int,
    group_size: int,
    *,
    out: torch.Tensor | None = None,
    backend: str = "auto",
    arch: int | None = None,
) -> dict[str, Any]:
    inputs = (x, codes, scales, bias, n, k, group_size)
    return LIBRARY.info("packed_linear", inputs, (out,), backend, arch or home())


def ask_canonical(
    x: torch.Tensor,
    n: int,
    *,
    group: int = 64,
    scales: torch.dtype | None = None,
    zeros: torch.dtype = torch.uint8,
    bias: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    backend: str = "auto",
    arch: int | None = None,
) -> dict[str, Any]:
    device, k = x.device, x.shape[-1]
    qweight = torch.empty(n, k // 8, dtype=torch.int32, device=device)
    s = torch.empty(n, k // group, dtype=scales or x.dtype, device=device)
    z = torch.empty(n, k // group, dtype=zeros, device=device)
    return LIBRARY.info("w4a16_linear", (x, qweight, s, z, bias, group), (out,), backend, arch or home())


def configs() -> dict[str, list[dict[str, Any]]]:
    found: dict[str, list[dict[str, Any]]] = LIBRARY.describe()["configs"]
    return found


def measured() -> set[int]:
    """Architectures of which routes.h says that they were measured."""
    found = re.search(r"kMeasuredArchitectures\[\] = \{([^}]*)\}", ROUTES)
    assert found is not None
    return {int(number) for number in found[1].split(",") if number.strip()}


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
            assert each["tile_n"] % 16 == 0
            assert each["tile_k"] == 64
            assert each["splits"] == sorted(set(each["splits"]))
            assert each["splits"][0] == 1
            assert each["splits"][-1] == each["max_split"]
    assert all(each["tile_m"] == DECODE_ROWS for each in configs()["sm80_decode"])
    assert {each["tile_m"] for each in configs()["sm90_decode"]} == {8, 16, 32, RING_ROWS}
    assert {tuple(each["splits"]) for each in configs()["sm80_mma"]} == {(1, 2, 3, 4, 6, 8, 12, 16)}
    assert [(each["name"], each["splits"]) for each in configs()["sm80_dequantize"]] == [("rows", [1])]


# -------------------------------------------------------------------------------------------------------- the estimates


@pytest.mark.library
@pytest.mark.usefixtures("needs_90a")
@pytest.mark.parametrize("group", [32, 64, 128])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_the_choice_is_the_cheapest_candidate(group: int, dtype: torch.dtype) -> None:
    for n, k in (*LAYERS, *AWKWARD):
        for m in ROWS:
            call = operands(m, n, k, group=group, dtype=dtype)
            where = f"{m} {n} {k}"
            found = candidates(**call, arch=H200)
            every = found["candidates"]
            assert [each["us"] for each in every] == sorted(each["us"] for each in every), where
            assert len({(c["kernel"], c["config"], c["split"]) for c in every}) == len(every), where
            assert all(each["us"] > 0 for each in every), where
            assert {each["kernel"] for each in every} | set(found["obstacles"]) == set(KERNELS), where
            auto = ask(**call)
            assert (auto["kernel"], auto["us"]) == (every[0]["kernel"], every[0]["us"]), where
            assert (auto["backend"], auto["fallback_reason"], auto["copies"]) == ("cuda", None, []), where
            for backend in ("cuda", *KERNELS):
                mine = [each for each in every if backend in ("cuda", each["kernel"])]
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


def can_run(kernel: str, config: dict[str, Any], split: int, m: int, n: int, k: int, code: int = H200) -> bool:
    """The rules of csrc/routes.h, said once more; of a weight in order, with code for the device and for sm_90a."""
    if -(-m // config["tile_m"]) * -(-n // config["tile_n"]) * split >= 1 << 31 or split > max(-(-k // 64), 1):
        return False
    if kernel == "sm80_dequantize":
        return 2 * n * k <= WORKSPACE
    if kernel == "sm80_mma":
        return split == 1 or 4 * split * m * n <= WORKSPACE
    if code < 90 and (split > 1 or kernel != "sm80_decode"):
        return False
    return kernel == "sm90a_wgmma" or m <= config["tile_m"]


@pytest.mark.library
@pytest.mark.usefixtures("needs_90a")
@settings(max_examples=300, deadline=None)
@given(
    m=st.one_of(st.integers(1, 80), st.integers(1, 1 << 20), st.integers(1, (1 << 31) - 1)),
    n=st.one_of(st.integers(1, 1 << 13), st.integers(1, 1 << 20), st.integers(1, (1 << 31) - 1)),
    words=st.one_of(st.integers(1, 1 << 9), st.integers(1, 1 << 17), st.integers(1, (1 << 28) - 1)),
)
def test_candidates_are_all_that_can_run_and_nothing_else(m: int, n: int, words: int) -> None:
    k = 8 * words
    found = candidates(**operands(m, n, k), arch=H200)["candidates"]
    for each in found:
        assert configs()[each["kernel"]][each["number"]]["name"] == each["config"]
    assert {(each["kernel"], each["config"], each["split"]) for each in found} == {
        (kernel, config["name"], split)
        for kernel, table in configs().items()
        for config in table
        for split in config["splits"]
        if can_run(kernel, config, split, m, n, k)
    }
    if m * n <= 1 << 40:
        assert {"sm80_mma", "sm90a_wgmma"} <= {each["kernel"] for each in found}, "they take everything"


@pytest.mark.library
@pytest.mark.usefixtures("needs_90a")
def test_a_call_costs_more_with_more_work() -> None:
    """Of the fastest candidate: many more rows are never estimated cheaper."""
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
WEIGHT = {name: t if isinstance(t, int) else torch.zeros(t.shape, dtype=t.dtype) for name, t in ordered(N, K).items()}
# What x may be -> whether a kernel needs a copy.
LEFT: dict[str, tuple[torch.Tensor, bool]] = {
    "rows": (half(M, K), False),
    "a vector": (half(K), False),
    "one row, any stride": (half(M, K + 1)[:1, :K], False),
    "leading dimensions": (half(2, 3, K), False),
    "leading ones": (half(M, K).view(1, M, 1, K), False),
    "columns of a wider tensor": (half(M, 2 * K)[:, K:], False),
    "leading dimensions of columns": (half(2, 3, 2 * K)[..., :K], False),
    "every second row": (half(2 * M, K)[::2], False),
    "odd row stride": (half(M, K + 4)[:, :K], True),
    "odd start": (half(M * K + 1)[1:].view(M, K), True),
    "a start at 8 bytes": (half(M * K + 4)[4:].view(M, K), True),
    "expanded rows": (half(1, K).expand(M, K), True),
    "rows that overlap": (half(1000).as_strided((M, K), (8, 1)), True),
    "every second column": (half(M, 2 * K)[:, ::2], True),
    "transposed": (half(K, M).t(), True),
    "transposed leading dimensions": (half(3, 2, K).transpose(0, 1), True),
    "uneven leading dimensions": (half(3, 3, K)[:2, :2], True),
    "expanded columns": (half(M, 1).expand(M, K), True),
}


@pytest.mark.library
@pytest.mark.parametrize("kind", LEFT)
def test_rows_of_x(kind: str) -> None:
    x, copied = LEFT[kind]
    answer = ask(x, bias=None, **WEIGHT, backend="sm80_decode")
    assert answer["copies"] == (["x"] if copied else []), kind
    assert (answer["m"], answer["n"], answer["k"], answer["group_size"]) == (x.shape[:-1].numel(), N, K, 64)
    # torch takes any strides of a matrix; only leading dimensions that are not one have to be copied for it.
    reshaped = kind in ("transposed leading dimensions", "uneven leading dimensions")
    assert ask(x, bias=None, **WEIGHT, backend="torch")["copies"] == (["x"] if reshaped else [])
    canonical = ask_canonical(x, N, backend="sm80_decode")
    assert canonical["copies"] == [*(["x"] if copied else []), "qweight", "scales", "zeros"]


RESULT: dict[str, tuple[torch.Tensor, bool]] = {
    "rows": (half(2, 3, N), False),
    "columns of a wider tensor": (half(2, 3, 2 * N)[..., N:], False),
    "odd start": (half(6 * N + 1)[1:].view(2, 3, N), False),
    "odd row stride": (half(2, 3, N + 1)[..., :N], False),
    "every second column": (half(2, 3, 2 * N)[..., ::2], True),
    "transposed": (half(N, 6).t().unflatten(0, (2, 3)), True),
    "transposed leading dimensions": (half(3, 2, N).transpose(0, 1), True),
}


@pytest.mark.library
@pytest.mark.parametrize("kind", RESULT)
def test_rows_of_out(kind: str) -> None:
    out, copied = RESULT[kind]
    answer = ask(half(2, 3, K), bias=None, **WEIGHT, out=out, backend="sm80_decode")
    assert answer["copies"] == (["out"] if copied else []), kind
    assert ask(half(2, 3, K), bias=None, **WEIGHT, out=out, backend="torch")["copies"] == ["out"]


@pytest.mark.library
@pytest.mark.parametrize(
    ("bias", "copied"),
    [(half(N), False), (half(N + 1)[1:], False), (half(2 * N)[::2], True), (half(1).expand(N), True)],
    ids=["contiguous", "odd start", "every second", "expanded"],
)
def test_bias(bias: torch.Tensor, copied: bool) -> None:
    answer = ask(half(M, K), bias=bias, **WEIGHT, backend="sm80_decode")
    assert answer["copies"] == (["bias"] if copied else [])


@pytest.mark.library
def test_all_that_is_copied_is_named_in_order() -> None:
    awkward = {"bias": half(2 * N)[::2], "out": half(M, 2 * N)[:, ::2], "backend": "sm80_decode"}
    answer = ask(half(M, 2 * K)[:, ::2], **WEIGHT, **awkward)
    assert answer["copies"] == ["x", "bias", "out"]
    answer = ask_canonical(half(M, 2 * K)[:, ::2], N, **awkward)
    assert answer["copies"] == ["x", "qweight", "scales", "zeros", "bias", "out"]


@pytest.mark.library
@pytest.mark.usefixtures("needs_90a")
def test_copies_cost() -> None:
    """A candidate's time includes the copies that it needs."""
    for kernel, m in (("sm80_decode", 8), ("sm90a_wgmma", 64)):
        plain, turned = operands(m, 1024, 4096), operands(m, 1024, 4096)
        turned["x"] = sheet(4096, m).t()
        fast, slow = ask(**plain, backend=kernel), ask(**turned, backend=kernel)
        assert slow["copies"] == ["x"]
        assert slow["us"] > fast["us"] + 0.5


# What no kernel takes -> the words, in the kernels' order and in the canonical one where it can be.
NOT_TAKEN: dict[str, tuple[dict[str, Any], str]] = {
    "scales of another dtype": ({"scales": sheet(WEIGHT["scales"].shape[0], dtype=torch.bfloat16)},
                                "scales have another dtype than x"),
    "bias of another dtype": ({"bias": sheet(N, dtype=torch.float32)}, "bias has another dtype than x"),
    "strided codes": ({"codes": torch.zeros(2 * WEIGHT["codes"].shape[0], dtype=torch.int32)[::2]},
                      "codes or scales are not contiguous from a multiple of 16 bytes"),
    "codes at 4 bytes": ({"codes": torch.zeros(WEIGHT["codes"].shape[0] + 1, dtype=torch.int32)[1:]},
                         "codes or scales are not contiguous from a multiple of 16 bytes"),
    "scales at 4 bytes": ({"scales": half(WEIGHT["scales"].shape[0] + 2)[2:]},
                          "codes or scales are not contiguous from a multiple of 16 bytes"),
}  # fmt: skip


@pytest.mark.library
@pytest.mark.parametrize("kind", NOT_TAKEN)
def test_what_no_kernel_takes(kind: str) -> None:
    changes, why = NOT_TAKEN[kind]
    call = {"x": half(M, K), "bias": None, **WEIGHT, **changes}
    if any(isinstance(value, torch.Tensor) and value.is_meta for value in changes.values()):
        call = {name: value.to("meta") if isinstance(value, torch.Tensor) else value for name, value in call.items()}
    answer = ask(**call)
    assert (answer["kernel"], answer["reason"]) == ("torch", "no own kernel can take the call")
    assert answer["fallback_reason"] == why
    for backend in ("cuda", *KERNELS):
        assert refusal(ask, **call, backend=backend) == cannot(backend, why)


# ------------------------------------------------------------------------------------------- what each kernel can take


def taken(kernel: str, m: int, n: int, k: int) -> set[tuple[str, int]]:
    """Configurations and slices of a kernel that are candidates on an H200."""
    every = candidates(**operands(m, n, k), arch=H200)["candidates"]
    return {(each["config"], each["split"]) for each in every if each["kernel"] == kernel}


@pytest.mark.library
@pytest.mark.usefixtures("needs_90a")
@pytest.mark.parametrize(("kernel", "most"), [("sm80_decode", DECODE_ROWS), ("sm90_decode", RING_ROWS)])
def test_the_decode_kernels_take_few_rows(kernel: str, most: int) -> None:
    assert ask(**operands(most, 4096, 4096), backend=kernel)["kernel"] == kernel
    call = operands(most + 1, 4096, 4096)
    instead = ask(**call, backend="cuda")["kernel"]
    assert refusal(ask, **call, backend=kernel) == cannot(kernel, f"x has more than {most} rows", instead)


@pytest.mark.library
@pytest.mark.usefixtures("needs_90a")
@pytest.mark.parametrize("m", [1, 8, 9, 16, 17, 32, 33, 64, 65])
def test_a_configuration_of_sm90_decode_takes_its_own_number_of_rows(m: int) -> None:
    most = {each["name"]: each["tile_m"] for each in configs()["sm90_decode"]}
    assert most["64x8x3"] == 8
    assert most["16x8"] == 16
    assert most["32x16"] == 32
    assert most["64x8m"] == 64
    fit = {name for name, rows in most.items() if m <= rows}
    assert taken("sm90_decode", m, 4096, 4096) == {(name, split) for name in fit for split in (1, 2, 3, 4)}


@pytest.mark.library
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_sm80_mma_takes_everything_wherever_there_is_code(arch: int) -> None:
    """So `auto` has an own kernel for every number of rows, on architectures that were never measured as well."""
    if not code_for(arch):
        pytest.skip(f"the library has no code for sm_{arch}")
    for n, k in (*LAYERS, *AWKWARD):
        for m in ROWS:
            call = operands(m, n, k)
            assert ask(**call, backend="sm80_mma", arch=arch)["kernel"] == "sm80_mma"
            assert ask(**call, arch=arch)["kernel"] in KERNELS
            assert ask_canonical(sheet(m, 64 * k), n, arch=arch)["kernel"] in KERNELS


@pytest.mark.library
@pytest.mark.parametrize(
    ("m", "n", "k", "most"),
    [
        (1024, 1024, 4096, 4),  # 4 x 1024 x 1024 sums of 4 bytes: 16 MiB
        (1025, 1024, 4096, 3),
        (1024, 1024, 136, 3),  # three blocks of 64 k
        (1024, 1024, 128, 2),
        (2048, 1024, 4096, 2),
        (2049, 1024, 4096, 1),
        (4096, 4096, 4096, 1),
        (1, 4096, 4096, 16),
        (64, 4096, 4096, 16),
        (65, 4096, 4096, 12),
        (1, 64, 8, 1),
    ],
)
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_slices_of_sm80_mma_need_room_for_their_sums_and_no_clusters(
    m: int, n: int, k: int, most: int, arch: int
) -> None:
    if not code_for(arch):
        pytest.skip(f"the library has no code for sm_{arch}")
    every = candidates(**operands(m, n, k), arch=arch)["candidates"]
    mine = {(each["config"], each["split"]) for each in every if each["kernel"] == "sm80_mma"}
    splits = [split for split in (1, 2, 3, 4, 6, 8, 12, 16) if split <= most]
    assert mine == {(config["name"], split) for config in configs()["sm80_mma"] for split in splits}


@pytest.mark.library
@pytest.mark.parametrize(("m", "n", "k"), [(1, 2048, 4096), (4096, 2048, 4096), (1024, 1024, 8192), (4096, 1, 8)])
def test_sm80_dequantize_takes_any_rows_of_a_small_weight(m: int, n: int, k: int) -> None:
    answer = ask(**operands(m, n, k), backend="sm80_dequantize")
    assert (answer["kernel"], answer["config"], answer["split"]) == ("sm80_dequantize", "rows", 1)
    assert (answer["backend"], answer["copies"]) == ("cuda", [])


@pytest.mark.library
@pytest.mark.parametrize(("n", "k"), [(2049, 4096), (2048, 4104), (4096, 4096), (1, 1 << 23)])
def test_sm80_dequantize_takes_no_more_than_16_mib(n: int, k: int) -> None:
    k += 8 if n == 1 else 0
    call = operands(1024, n, k)
    why = "the dequantised weight is larger than 16 MiB"
    instead = ask(**call, backend="cuda")["kernel"]
    assert refusal(ask, **call, backend="sm80_dequantize") == cannot("sm80_dequantize", why, instead)
    assert candidates(**call, arch=home())["obstacles"]["sm80_dequantize"] == why


@pytest.mark.library
def test_sm80_dequantize_takes_no_bias() -> None:
    """torch may round the product to x's dtype before it adds a bias, which would be a second rounding."""
    call = {**operands(1024, 1024, 2048), "bias": sheet(1024)}
    instead = ask(**call, backend="cuda")["kernel"]
    assert instead != "sm80_dequantize"
    assert ask(**call)["kernel"] == instead
    why = "torch's product may round before it adds a bias"
    assert refusal(ask, **call, backend="sm80_dequantize") == cannot("sm80_dequantize", why, instead)


@pytest.mark.library
def test_sm80_dequantize_takes_a_weight_in_order_alone() -> None:
    """For a canonical one each call would put the weight in order, and then dequantise what it has put there."""
    for m in (1, 1024, 4096):
        x = sheet(m, 2048)
        instead = ask_canonical(x, 1024, backend="cuda")["kernel"]
        assert instead != "sm80_dequantize"
        assert ask_canonical(x, 1024)["kernel"] == instead
        why = "the weight is not in the kernels' order"
        found = refusal(ask_canonical, x, 1024, backend="sm80_dequantize")
        assert found == routes.cannot("w4a16_linear", "sm80_dequantize", why, instead)


@pytest.mark.library
@pytest.mark.usefixtures("needs_90a")
def test_every_kernel_is_the_choice_for_some_layer_of_a_model() -> None:
    """By the estimates for an H200: a kernel that is never chosen there is a fault of the estimates or no use."""
    chosen = {ask(**operands(m, n, k))["kernel"] for m in TOKENS for n, k in distinct_layers(CALIBRATED)}
    assert chosen == set(KERNELS)


@pytest.mark.library
def test_a_canonical_weight_is_put_in_order_by_the_call() -> None:
    note = "; the weight is not finalised and is put in the kernel's order for this call"
    for backend, kernel in (("auto", None), ("cuda", None), ("sm80_decode", "sm80_decode")):
        answer = ask_canonical(sheet(M, K), N, backend=backend)
        assert answer["backend"] == "cuda"
        assert answer["kernel"] == (kernel or answer["kernel"])
        assert answer["reason"].endswith(note)
        assert answer["copies"] == ["qweight", "scales", "zeros"]
        assert (answer["n"], answer["fallback_reason"], answer["profile"]) == (N, None, False)
    answer = ask_canonical(sheet(M, K), N, backend="torch")
    assert (answer["reason"], answer["copies"]) == ("asked for", [])
    for changes, why in (
        ({"scales": torch.float32}, "scales have another dtype than x"),
        ({"scales": torch.bfloat16}, "scales have another dtype than x"),
        ({"zeros": torch.float16}, "zeros are no integers"),
    ):
        answer = ask_canonical(sheet(M, K), N, **changes)
        assert (answer["kernel"], answer["fallback_reason"], answer["copies"]) == ("torch", why, [])
        found = refusal(ask_canonical, sheet(M, K), N, **changes, backend="cuda")
        assert found == routes.cannot("w4a16_linear", "cuda", why)


@pytest.mark.library
def test_a_large_canonical_weight_is_put_in_order_in_parts() -> None:
    """Its route is that of the rows that fit the workspace."""
    workspace = re.search(r"kWorkspaceBytes = int64_t\{(\d+)\} << 20;", ROUTES)
    assert workspace is not None
    assert int(workspace[1]) <= 16
    n, k = 24576, 4096
    fits = [4 * code_words(rows, k) + 2 * scale_elements(rows, k, 64) <= 16 << 20 for rows in range(64, n, 64)]
    part = 64 * sum(fits)
    for m in (4, 64, 1024):
        for kernel in ("sm80_decode", "sm90_decode", "sm80_mma", "sm90a_wgmma"):
            if kernel in candidates(**operands(m, part, k), arch=home())["obstacles"]:
                continue
            answer = ask_canonical(sheet(m, k), n, backend=kernel)
            assert answer["n"] == n
            expected = ask(**operands(m, part, k), backend=kernel)
            assert [answer[key] for key in ("kernel", "config", "split", "us")] == [
                expected[key] for key in ("kernel", "config", "split", "us")
            ], (m, kernel)


@pytest.mark.library
@pytest.mark.usefixtures("needs_90a")
def test_sizes_beyond_32_bits() -> None:
    most = (1 << 31) - 1
    for m, n, k in ((most, 8, 8), (1, most, 8), (1, 8, most - 7)):
        assert ask(**operands(m, n, k))["kernel"] in KERNELS, (m, n, k)
        for kernel in ("sm80_mma", "sm90a_wgmma"):
            assert ask(**operands(m, n, k), backend=kernel)["kernel"] == kernel, (m, n, k)
    answer = ask(**operands(1 << 31, 8, 8))
    assert (answer["kernel"], answer["fallback_reason"]) == ("torch", "a dimension does not fit 32-bit coordinates")
    answer = ask_canonical(sheet(1, 1 << 31), 8)
    assert (answer["kernel"], answer["fallback_reason"]) == ("torch", "a dimension does not fit 32-bit coordinates")
    why = "there are too many tiles for one grid"
    # The sums of four slices of the second are 2^64 bytes.
    for m, n, k in ((most, most, 8), (1 << 30, 1 << 30, 1024)):
        answer = ask(**operands(m, n, k))
        assert (answer["kernel"], answer["fallback_reason"]) == ("torch", why)
        assert candidates(**operands(m, n, k), arch=H200)["candidates"] == []
        for backend in ("cuda", "sm80_mma", "sm90a_wgmma"):
            assert refusal(ask, **operands(m, n, k), backend=backend) == cannot(backend, why)


@pytest.mark.library
@pytest.mark.parametrize(
    ("m", "n", "k", "reason"),
    [(0, 8, 64, "out has no elements"), (8, 0, 64, "out has no elements"), (0, 8, 0, "out has no elements"),
     (8, 8, 0, "K is 0: the sums are empty")],
)  # fmt: skip
@pytest.mark.parametrize("backend", ["auto", "cuda", *KERNELS])
def test_nothing_to_multiply(m: int, n: int, k: int, reason: str, backend: str) -> None:
    """No kernel runs, so every backend can."""
    for answer in (ask(**operands(m, n, k), backend=backend), ask_canonical(sheet(m, k), n, backend=backend)):
        assert (answer["kernel"], answer["reason"], answer["copies"]) == ("torch", reason, [])
    assert candidates(**operands(m, n, k), arch=H200)["candidates"] == []


# -------------------------------------------------------------------------------------------------------- architectures


@pytest.mark.library
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_architecture(arch: int) -> None:
    """auto takes an own kernel wherever there is code for one, measured or not; else the reason."""
    call = operands(8, 4096, 4096)
    code = code_for(arch)
    auto = ask(**call, arch=arch)
    assert ask(**call, backend="torch", arch=arch)["reason"] == "asked for"
    if code == 0:
        routes.check_without_code(
            lambda backend: ask(**call, backend=backend, arch=arch), "packed_linear", ("cuda", *KERNELS)
        )
        return
    own = ask(**call, backend="cuda", arch=arch)
    assert auto["kernel"] == own["kernel"]
    assert auto["fallback_reason"] is None
    unknown = "no measurements on this architecture, and PyTorch has no such product"
    assert (auto["reason"] == unknown) == (arch not in measured())
    small = operands(8, 2048, 4096)
    for kernel in ("sm80_decode", "sm80_mma", "sm80_dequantize"):
        assert ask(**small, backend=kernel, arch=arch)["kernel"] == kernel
    # On these the library has the code of sm_90a too, or none.
    wide = arch == 90 and built("90a")
    refused = {}
    if not wide:
        refused["sm90a_wgmma"] = "wgmma needs a device of sm_90 and a build with code for sm_90a"
    if code < 90:
        refused["sm90_decode"] = "bulk copies need sm_90 or later"
        split = {c["kernel"] for c in candidates(**small, arch=arch)["candidates"] if c["split"] > 1}
        assert split == {"sm80_mma"}, "slices of the others need clusters"
    elif arch // 10 != 12:
        assert ask(**small, backend="sm90_decode", arch=arch)["kernel"] == "sm90_decode"
    for kernel, why in refused.items():
        assert refusal(ask, **call, backend=kernel, arch=arch) == cannot(kernel, why, own["kernel"])
        for m in ROWS:
            assert ask(**operands(m, 4096, 4096), arch=arch)["kernel"] not in (kernel, "torch")
    if wide:
        assert ask(**call, backend="sm90a_wgmma", arch=arch)["kernel"] == "sm90a_wgmma"


@pytest.mark.library
def test_rings_do_not_fit_the_shared_memory_of_sm_120() -> None:
    """Its blocks have 99 KB of it (CUDA programming guide, technical specifications per compute capability), the
    configurations of sm90_decode use up to 227.
    """
    if not code_for(120):
        pytest.skip("the library has no code for sm_120")
    for m in (1, 8, 16, 64):
        found = candidates(**operands(m, 4096, 4096), arch=120)
        # By arithmetic, with what the blocks of a cluster send: 16x8 53 to 66 KB, 64x8x3 59, 64x8 from 9 rows up 81.
        fit = {"16x8", "64x8x3"} if m <= 8 else {"16x8", "64x8"}
        assert {c["config"] for c in found["candidates"] if c["kernel"] == "sm90_decode"} <= fit


@pytest.mark.library
def test_the_answer_is_json_with_these_keys() -> None:
    raw = LIBRARY.op("packed_linear_info")(half(2, K), *list(WEIGHT.values())[:2], None, N, K, 64, 0, None, H200)
    wanted = {"backend", "kernel", "reason", "fallback_reason", "profile", "copies", "config", "split", "us"}
    assert wanted | {"m", "n", "k", "group_size"} <= routes.keys_of(raw)


# ------------------------------------------------------------------------------------------------------------- profiles


@pytest.fixture
def profile() -> Iterator[Callable[[str], None]]:
    """profile("packed_linear;float16;group_size=64,k=64,m=4,n=24;sm80_decode\\n") hands rows to the library; they are
    taken back.
    """

    with routes.profile_rows(LIBRARY) as put:
        yield put


def shown(m: int = M, n: int = N, k: int = K, *, group: int = 64, **keywords: Any) -> tuple[str, bool]:
    dtype = keywords.pop("dtype", torch.float16)
    answer = ask(**operands(m, n, k, group=group, dtype=dtype), **keywords)
    return answer["kernel"], answer["profile"]


@pytest.mark.library
@pytest.mark.usefixtures("needs_90a")
def test_a_profile_row_decides_its_own_shape_alone(profile: Callable[[str], None]) -> None:
    usual, _ = shown()
    other = next(kernel for kernel in KERNELS if kernel != usual)
    profile(
        f"packed_linear;float16;group_size=64,k=64,m=4,n=24;{other}\n"
        "packed_linear;bfloat16;group_size=64,k=64,m=4,n=24;torch"
    )
    assert shown() == (other, True)
    assert shown(backend="cuda")[1] is False
    for changes in ({"m": 5}, {"n": 32}, {"k": 72}, {"group": 32}):
        assert shown(**changes)[1] is False, changes
    assert shown(dtype=torch.bfloat16) == ("torch", True)
    # Rows are of the weight in order: putting it there for a call is another matter.
    assert ask_canonical(sheet(M, K), N)["profile"] is False
    profile(f"packed_linear;bfloat16;group_size=64,k=64,m=4,n=24;{other}\n")
    assert shown() == (usual, False), "a new table replaces the old one"
    assert shown(dtype=torch.bfloat16) == (other, True)
    profile("")
    assert shown(dtype=torch.bfloat16) == (usual, False)


@pytest.mark.library
@pytest.mark.usefixtures("needs_90a")
@pytest.mark.parametrize("kernel", KERNELS)
def test_a_profile_row_may_name_a_configuration_and_slices(kernel: str, profile: Callable[[str], None]) -> None:
    call = operands(4, 2048, 4096)
    every = [each for each in candidates(**call, arch=H200)["candidates"] if each["kernel"] == kernel]
    assert {(each["config"], each["split"]) for each in every} == {
        (config["name"], split) for config in configs()[kernel] for split in config["splits"]
    }
    for each in every:
        profile(f"packed_linear;float16;group_size=64,k=4096,m=4,n=2048;{kernel}.{each['config']}.{each['split']}")
        answer = ask(**call)
        assert (answer["kernel"], answer["config"], answer["split"]) == (kernel, each["config"], each["split"])
        assert answer["profile"] is True
        assert answer["us"] == each["us"]


@pytest.mark.library
@pytest.mark.usefixtures("needs_90a")
def test_a_profile_row_that_cannot_run_is_passed_over(profile: Callable[[str], None]) -> None:
    for m, n, k, route in (
        (17, N, K, "sm80_decode"),
        (65, N, K, "sm90_decode"),
        (9, N, K, "sm90_decode.64x8x3.1"),  # of at most 8 rows
        (1024, 4096, 4096, "sm80_dequantize"),
        (1024, 4096, 4096, "sm80_dequantize.rows.1"),
        (4096, 4096, 4096, "sm80_mma.64x64.2"),  # 128 MiB of sums
    ):
        usual = shown(m, n, k)
        profile(f"packed_linear;float16;group_size=64,k={k},m={m},n={n};{route}")
        assert shown(m, n, k) == usual, route
        assert usual[1] is False
    # Slices of which some would have nothing to do.
    for kernel in set(KERNELS) - {"sm80_dequantize"}:
        config = configs()[kernel][0]
        assert config["max_split"] > 1
        profile(f"packed_linear;float16;group_size=64,k=64,m=4,n=24;{kernel}.{config['name']}.{config['max_split']}")
        assert shown()[1] is False


@pytest.mark.library
@pytest.mark.parametrize(
    "line",
    [
        "packed_linear",
        "packed_linear;float16;group_size=64,k=64,m=4,n=24",
        "packed_linear;float16;group_size=64,k=64,m=4,n=24;sm80_decode;more",
        "w4a16_linear;float16;group_size=64,k=64,m=4,n=24;sm80_decode",
        "packed_linear;float32;group_size=64,k=64,m=4,n=24;sm80_decode",
        "packed_linear;float16;k=64,m=4,n=24;sm80_decode",
        "packed_linear;float16;group_size=16,k=64,m=4,n=24;sm80_decode",
        "packed_linear;float16;group_size=64,k=64,m=4,rows=24;sm80_decode",
        "packed_linear;float16;group_size=64,k=64,m=4,n=24,batch=1;sm80_decode",
        "packed_linear;float16;group_size=64,k=64,k=64,m=4;sm80_decode",
        "packed_linear;float16;group_size=64,k=,m=4,n=24;sm80_decode",
        "packed_linear;float16;group_size=64,k=-1,m=4,n=24;sm80_decode",
        "packed_linear;float16;group_size=64,k=64,m=4,n=24;sm80_fast",
        "packed_linear;float16;group_size=64,k=64,m=4,n=24;auto",
        "packed_linear;float16;group_size=64,k=64,m=4,n=24;cuda",
        "packed_linear;float16;group_size=64,k=64,m=4,n=24;",
        "packed_linear;float16;group_size=64,k=64,m=4,n=24;sm80_decode.",
        "packed_linear;float16;group_size=64,k=64,m=4,n=24;sm80_decode.15x8.1",
        "packed_linear;float16;group_size=64,k=64,m=4,n=24;torch.16x8.1",
        " packed_linear;float16;group_size=64,k=64,m=4,n=24;sm80_decode",
    ],
)
def test_bad_profile_text(line: str, profile: Callable[[str], None]) -> None:
    """Refused by name, and the rows from before stay."""
    good = "packed_linear;float16;group_size=64,k=64,m=4,n=24;torch"
    form = "packed_linear;dtype;group_size=G,k=K,m=M,n=N;kernel or kernel.configuration.slices"
    routes.check_row_refused(profile, good, line, form)
    assert shown() == ("torch", True)


@pytest.mark.library
def test_slices_of_a_profile_row_are_those_that_the_configuration_takes(profile: Callable[[str], None]) -> None:
    for kernel, table in configs().items():
        for config in table:
            for split in range(18):
                line = f"packed_linear;float16;group_size=64,k=64,m=4,n=24;{kernel}.{config['name']}.{split}"
                if split in config["splits"]:
                    profile(line)
                else:
                    with pytest.raises(RuntimeError, match="is not packed_linear;dtype;"):
                        profile(line)


@pytest.mark.library
def test_dependent_launch_is_a_switch_with_a_memory() -> None:
    routes.check_dependent_launch(LIBRARY)


# --------------------------------------------------------------------------------------------------- every row is hit


def reasons() -> set[str]:
    """Every sentence with which routes.h explains a choice."""
    texts = routes.sentences(ROUTES, "common_obstacle", "obstacle", "kernel_reason", "select")
    return texts | set(re.findall(r'kTooManyTiles = "([^"]+)"', ROUTES))


@pytest.mark.library
@pytest.mark.usefixtures("needs_90a")
def test_every_reason_is_met(profile: Callable[[str], None]) -> None:
    profile("packed_linear;float16;group_size=64,k=64,m=4,n=24;sm80_decode")
    seen: set[str | None] = set()

    def meet(question: Any, **keywords: Any) -> None:
        seen.update(routes.explanations(question, **keywords))

    calls: list[dict[str, Any]] = [operands(M, N, K)]
    calls += [operands(m, n, k) for m in ROWS for n, k in (*LAYERS, *AWKWARD)]
    calls += [operands(1 << 31, 8, 8), operands((1 << 31) - 1, (1 << 31) - 1, 8)]
    calls += [{**operands(M, N, K), "bias": sheet(N, dtype=dtype)} for dtype in (torch.float16, torch.float32)]
    calls += [{**operands(M, N, K), "scales": sheet(scale_elements(N, K, 64), dtype=torch.bfloat16)}]
    calls += [{**operands(M, N, K), "codes": sheet(2 * code_words(N, K), dtype=torch.int32)[::2]}]
    for backend in ("auto", "cuda", "torch", *KERNELS):
        for call in calls:
            meet(ask, **call, backend=backend)
        for arch in ARCHITECTURES:
            for m in (8, 17):
                meet(ask, **operands(m, 4096, 4096), backend=backend, arch=arch)
        meet(ask_canonical, x=sheet(M, K), n=N, zeros=torch.float16, backend=backend)
        meet(ask_canonical, x=sheet(M, K), n=N, backend=backend)
    seen = {text and text.split("; the weight is not finalised")[0] for text in seen}
    wanted = reasons()
    assert len(wanted) >= 22
    missing = wanted - seen
    # No build has code below sm_80: the floor is there for a list of architectures that somebody writes by hand.
    missing.discard("it needs sm_80 or later")
    if not any(code_for(arch) for arch in ARCHITECTURES if arch not in measured()):
        missing.discard("no measurements on this architecture, and PyTorch has no such product")
    if not any(code_for(arch) for arch in ARCHITECTURES if arch != H200):
        missing.discard("wgmma needs a device of sm_90 and a build with code for sm_90a")
    if not any(0 < code_for(arch) < 90 for arch in ARCHITECTURES):
        missing.discard("bulk copies need sm_90 or later")
    if not any(code_for(arch) for arch in ARCHITECTURES if arch // 10 == 12):
        missing.discard("its rings need more shared memory than a block of sm_12x has")
    assert not missing
    assert None in seen


@pytest.mark.library
def test_names_of_kernels_are_those_of_python() -> None:
    assert routes.names_in(ROUTES, "kBackendNames") == list(LIBRARY.codes)

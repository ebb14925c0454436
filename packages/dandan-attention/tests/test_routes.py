"""Routes of the compiled library, asked without a GPU: which kernel and configuration a call takes on an architecture,
what is copied, and why not another. Every reason of csrc/routes.h is met.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from attention_cases import KERNELS, int32

from dandan_attention._ops import LIBRARY
from dandan_ops_core.backend import BackendUnavailableError
from dandan_ops_core.testing import routes
from dandan_ops_core.testing.library import check_loaded_if_built, refusal
from dandan_ops_core.testing.routes import ARCHITECTURES, H200, cannot, sheet

ROUTES = (Path(__file__).resolve().parents[1] / "csrc" / "routes.h").read_text(encoding="utf-8")
HEAD_DIMS = (64, 128, 256)
LENGTHS = (1, 7, 64, 65, 512, 1024, 1025, 2047, 2048, 4096, 16384)
MASKS: tuple[dict[str, Any], ...] = ({"causal": True}, {"window_size": 100}, {"softcap": 30.0})

code_for = functools.partial(routes.code_for, LIBRARY)
home = functools.partial(routes.home, LIBRARY)
built = functools.partial(routes.built, LIBRARY)


def test_a_library_that_was_built_is_loaded() -> None:
    check_loaded_if_built("dandan_attention")


def ask(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: bool = False,
    query_start: int | torch.Tensor | None = 0,
    window_size: int | None = None,
    softcap: float = 0.0,
    seqused_k: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    backend: str = "auto",
    arch: int = H200,
) -> dict[str, Any]:
    """The route of a dense call."""
    start, starts = (None, query_start) if isinstance(query_start, torch.Tensor) else (query_start, None)
    inputs = (q, k, v, causal, None, start, starts, window_size, softcap, seqused_k)
    return LIBRARY.info("flash_attention", inputs, (out,), backend, arch)


def ask_packed(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    longest: int,
    cu: tuple[torch.Tensor, torch.Tensor] | None = None,
    sequences: int = 2,
    causal: bool = False,
    window_size: int | None = None,
    softcap: float = 0.0,
    backend: str = "auto",
    arch: int = H200,
) -> dict[str, Any]:
    """The route of a packed call whose longest sequences of queries and keys are alike."""
    bounds = (sheet(sequences + 1, dtype=torch.int32),) * 2 if cu is None else cu
    inputs = (q, k, v, *bounds, longest, longest, causal, None, None, True, window_size, softcap, None)
    return LIBRARY.info("flash_attention_varlen", inputs, (None,), backend, arch)


def dense(seqlen: int, head_dim: int, *, batch: int = 2, heads: tuple[int, int] = (8, 2), seqlen_k: int | None = None,
          dtype: torch.dtype = torch.float16, **options: Any) -> dict[str, Any]:  # fmt: skip
    q = sheet(batch, heads[0], seqlen, head_dim, dtype=dtype)
    k = sheet(batch, heads[1], seqlen if seqlen_k is None else seqlen_k, head_dim, dtype=dtype)
    return ask(q, k, k, **options)


def packed(total: int, head_dim: int, *, longest: int, heads: tuple[int, int] = (8, 2),
           dtype: torch.dtype = torch.float16, **options: Any) -> dict[str, Any]:  # fmt: skip
    q, k = (sheet(total, count, head_dim, dtype=dtype) for count in heads)
    return ask_packed(q, k, k, longest=longest, **options)


def configs(kernel: str, head_dim: int) -> dict[str, dict[str, Any]]:
    """Configurations of a kernel by name."""
    table: list[dict[str, Any]] = LIBRARY.describe()["configs"][kernel]
    return {each["name"]: each for each in table if each["head_dim"] == head_dim}


@pytest.fixture
def needs_90a() -> None:
    routes.require_code(LIBRARY, "90a")


# ------------------------------------------------------------------------------------------------------ configurations


@pytest.mark.library
def test_tables_of_configurations() -> None:
    routes.check_configurations(LIBRARY, KERNELS, alike="head_dim")
    for table in LIBRARY.describe()["configs"].values():
        assert {each["head_dim"] for each in table} == set(HEAD_DIMS)
        for each in table:
            assert each["name"].startswith(f"{each['tile_m']}x{each['tile_n']}")


@pytest.mark.library
@pytest.mark.usefixtures("needs_90a")
def test_the_measured_choice_of_sm90a_wgmma() -> None:
    """What was fastest on an H200, by head_dim, mask and, in dense calls, length."""
    for length in LENGTHS:
        for options in MASKS:
            assert dense(length, 64, **options)["config"] == ("128x192s6q2" if length <= 1024 else "192x128s8q2")
            assert dense(length, 128, **options)["config"] == "128x128s4q2"
            assert dense(length, 256, **options)["config"] == "128x80s4q1"
        assert dense(length, 64)["config"] == "192x128s8q2"
        assert dense(length, 128)["config"] == ("128x160s4q2" if length >= 2048 else "128x128s4q2")
        assert dense(length, 256)["config"] == "128x64s5q1"
    assert dense(64, 64, seqlen_k=1025, causal=True)["config"] == "192x128s8q2", "few queries, many keys"
    assert dense(64, 128, seqlen_k=2048)["config"] == "128x160s4q2", "keys decide"
    for longest in LENGTHS:
        for options in MASKS:
            assert packed(20000, 64, longest=longest, **options)["config"] == "192x128s8q2"
            assert packed(20000, 128, longest=longest, **options)["config"] == "128x128s4q2"
            assert packed(20000, 256, longest=longest, **options)["config"] == "128x80s4q1"
        assert packed(20000, 64, longest=longest)["config"] == "192x128s8q2"
        assert packed(20000, 128, longest=longest)["config"] == "128x128s4q2"
        assert packed(20000, 256, longest=longest)["config"] == "128x64s5q1"


@pytest.mark.library
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_the_batch_changes_no_configuration(kernel: str, head_dim: int) -> None:
    """Neither do heads nor the dtype: a row's bits do not depend on what is computed beside it."""
    if kernel == "sm90a_wgmma":
        routes.require_code(LIBRARY, "90a")
    for options in ({}, *MASKS):
        for length in LENGTHS:
            names = {
                dense(length, head_dim, batch=batch, heads=heads, dtype=dtype, backend=kernel, arch=home(), **options)[
                    "config"
                ]
                for batch in (1, 3, 5000)
                for heads in ((1, 1), (8, 2), (96, 1))
                for dtype in (torch.float16, torch.bfloat16)
            }
            assert len(names) == 1, (length, options)


@pytest.mark.library
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_packed_batches_change_no_tile_of_keys(head_dim: int) -> None:
    """sm90a_wgmma has one configuration whatever the longest sequence is; sm80_mma's differ in rows of queries alone,
    on every architecture.
    """
    for options in ({}, *MASKS):
        for kernel in KERNELS:
            found = set()
            for arch in ARCHITECTURES:
                if not code_for(arch) or (kernel == "sm90a_wgmma" and (arch != H200 or not built("90a"))):
                    continue
                for longest in LENGTHS:
                    for total, sequences in ((longest, 1), (60000, 300)):
                        answer = packed(
                            total, head_dim, longest=longest, sequences=sequences, backend=kernel, arch=arch, **options
                        )
                        found.add(configs(kernel, head_dim)[answer["config"]]["tile_n"])
            assert len(found) == (1 if found or kernel == "sm80_mma" else 0), (kernel, options)


@pytest.mark.library
@pytest.mark.parametrize("kernel", KERNELS)
def test_every_candidate_can_be_named_and_every_configuration_is_one(
    kernel: str, profile: Callable[[str], None]
) -> None:
    """Over calls with and without masks; a route table's row with its name is followed."""
    if kernel == "sm90a_wgmma":
        routes.require_code(LIBRARY, "90a")
    for head_dim in HEAD_DIMS:
        seen = set()
        for causal in (False, True):
            found = dense(512, head_dim, arch=home(), causal=causal)
            mine = [each for each in found["candidates"] if each["kernel"] == kernel]
            for each in mine:
                profile(f"{row(512, head_dim, causal)};{kernel}.{each['config']}")
                answer = dense(512, head_dim, arch=home(), causal=causal)
                assert (answer["kernel"], answer["config"], answer["profile"]) == (kernel, each["config"], True)
                seen.add(each["config"])
            profile("")
        assert seen == set(configs(kernel, head_dim))


# -------------------------------------------------------------------------------------------------------------- kernels


@pytest.mark.library
@pytest.mark.usefixtures("needs_90a")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_auto_takes_wgmma_where_it_was_measured(dtype: torch.dtype) -> None:
    for head_dim in HEAD_DIMS:
        for options in ({}, *MASKS):
            for answer in (
                dense(300, head_dim, dtype=dtype, **options),
                packed(1000, head_dim, longest=300, dtype=dtype, **options),
            ):
                assert (answer["backend"], answer["kernel"]) == ("cuda", "sm90a_wgmma")
                assert (answer["fallback_reason"], answer["copies"], answer["profile"]) == (None, [], False)


@pytest.mark.library
@pytest.mark.parametrize("arch", [arch for arch in ARCHITECTURES if arch != H200])
def test_auto_takes_torch_where_nothing_was_measured(arch: int) -> None:
    """A kernel by name runs all the same, where there is code for it."""
    answer = dense(300, 128, causal=True, arch=arch)
    assert (answer["backend"], answer["kernel"], answer["copies"]) == ("torch", "torch", [])
    if not code_for(arch):
        assert "no code for the device's architecture" in answer["fallback_reason"]
        with pytest.raises(
            BackendUnavailableError, match=r'^flash_attention: backend "cuda" cannot run: this build has'
        ):
            dense(300, 128, causal=True, arch=arch, backend="cuda")
        return
    assert "never measured" in answer["fallback_reason"]
    for backend in ("cuda", "sm80_mma"):
        named = dense(300, 128, causal=True, arch=arch, backend=backend)
        assert (named["kernel"], named["fallback_reason"]) == ("sm80_mma", None)
    why = "wgmma needs a device of sm_90 and a build with code for sm_90a"
    found = refusal(dense, 300, 128, causal=True, arch=arch, backend="sm90a_wgmma")
    assert found == cannot("flash_attention", "sm90a_wgmma", why, "sm80_mma")


@pytest.mark.library
@pytest.mark.usefixtures("needs_90a")
def test_sizes_that_no_kernel_takes() -> None:
    for answer in (
        dense(8, 80),
        dense(8, 512, causal=True),
        dense(1 << 32, 64),
        dense(64, 64, batch=1 << 33),
        dense(1 << 20, 64, batch=1 << 20),
        packed(1 << 32, 64, longest=64),
    ):
        assert answer["kernel"] == "torch"
        assert answer["fallback_reason"]
    with pytest.raises(BackendUnavailableError, match=r"head_dim is 80, the own kernels take 64, 128 and 256"):
        dense(8, 80, backend="sm90a_wgmma")
    with pytest.raises(BackendUnavailableError, match=r"there are more than 2\^31 tiles of queries"):
        dense(1 << 20, 64, batch=1 << 20, backend="sm80_mma")


@pytest.mark.library
@pytest.mark.parametrize("backend", ["auto", "torch", "cuda", *KERNELS])
def test_an_empty_result_needs_no_kernel(backend: str) -> None:
    for answer in (dense(0, 64, backend=backend), dense(5, 80, batch=0, backend=backend)):
        assert (answer["backend"], answer["reason"]) == ("torch", "out has no elements")


# --------------------------------------------------------------------------------------------------------------- copies


def half(*shape: int) -> torch.Tensor:
    """A tensor with an address, at a multiple of 16 bytes."""
    t = torch.zeros(shape, dtype=torch.float16)
    assert t.data_ptr() % 16 == 0
    return t


def shifted(*shape: int) -> torch.Tensor:
    """The same, one element behind such an address."""
    count = torch.Size(shape).numel()
    return half(count + 1)[1:].view(shape)


READ_IN_PLACE: dict[str, torch.Tensor] = {
    "contiguous": half(2, 4, 6, 64),
    "rows outside of heads": half(2, 6, 4, 64).transpose(1, 2),
    "part of one projection": half(2, 6, 12, 64)[:, :, 4:8].transpose(1, 2),
    "columns of wider rows": half(2, 4, 6, 128)[..., 64:],
    "heads expanded": half(2, 1, 6, 64).expand(2, 4, 6, 64),
    "batch expanded": half(1, 4, 6, 64).expand(2, 4, 6, 64),
}
COPIED: dict[str, torch.Tensor] = {
    "start between": shifted(2, 4, 6, 64),
    "rows between": half(2, 4, 6, 65)[..., :64],
    "heads between": half(2, 4, 6 * 64 + 4)[..., : 6 * 64].unflatten(-1, (6, 64)),
    "gaps in rows": half(2, 4, 6, 128)[..., ::2],
    "columns outside": half(2, 4, 64, 6).mT,
}


@pytest.mark.library
@pytest.mark.parametrize("layout", [*READ_IN_PLACE, *COPIED])
def test_what_is_read_where_it_lies(layout: str) -> None:
    """q, k and v alone and together; a copy is reported, and changes nothing of the choice on an H200."""
    plain, other = half(2, 4, 6, 64), {**READ_IN_PLACE, **COPIED}[layout]
    for which in ("q", "k", "v", "qkv"):
        operands = [other if name in which else plain for name in "qkv"]
        for kernel in KERNELS:
            if kernel == "sm90a_wgmma" and not built("90a"):
                continue
            answer = ask(*operands, backend=kernel, arch=home())
            assert answer["copies"] == ([] if layout in READ_IN_PLACE else list(which)), kernel
        if built("90a"):
            answer = ask(*operands)
            assert (answer["kernel"], answer["fallback_reason"]) == ("sm90a_wgmma", None)
            assert answer["copies"] == ([] if layout in READ_IN_PLACE else list(which))
        assert ask(*operands, backend="torch", arch=home())["copies"] == []


@pytest.mark.library
@pytest.mark.usefixtures("needs_90a")
def test_rows_that_are_one_row_are_copied_for_the_copy_engine() -> None:
    """A tensor map has no stride of 0 and none of 2^40 bytes; cp.async reads both where they are."""
    plain, one = half(2, 4, 6, 64), half(2, 4, 1, 64).expand(2, 4, 6, 64)
    assert ask(plain, one, one, backend="sm90a_wgmma")["copies"] == ["k", "v"]
    assert ask(plain, one, one, backend="sm80_mma")["copies"] == []
    far = torch.empty_strided((2, 4, 6, 64), (1 << 39, 6 * 64, 64, 1), dtype=torch.float16, device="meta")
    near = sheet(2, 4, 6, 64)
    assert ask(near, far, near, backend="sm90a_wgmma")["copies"] == ["k"]
    assert ask(near, far, near, backend="sm80_mma")["copies"] == []
    single = half(2, 4, 1, 64).expand(2, 4, 1, 64)
    assert ask(single, single, single, backend="sm90a_wgmma")["copies"] == []


@pytest.mark.library
def test_where_results_are_written() -> None:
    """sm80_mma stores single elements where rows of out start between; neither stores into rows with gaps."""
    q = half(2, 4, 6, 64)
    outs = {
        "aligned": (half(2, 4, 6, 64), []),
        "rows outside": (half(2, 6, 4, 64).transpose(1, 2), []),
        "between": (shifted(2, 4, 6, 64), ["out"]),
        "gaps": (half(2, 4, 6, 128)[..., ::2], ["out"]),
    }
    for name, (out, copies) in outs.items():
        if built("90a"):
            assert ask(q, q, q, out=out, backend="sm90a_wgmma")["copies"] == copies, name
        wanted = copies if name == "gaps" else []
        assert ask(q, q, q, out=out, backend="sm80_mma", arch=home())["copies"] == wanted, name


@pytest.mark.library
def test_scattered_vectors_are_copied() -> None:
    q, apart = half(3, 4, 6, 64), torch.zeros(6, dtype=torch.int32)[::2]
    answer = ask(q, q, q, causal=True, query_start=apart, seqused_k=apart, backend="sm80_mma", arch=home())
    assert answer["copies"] == ["query_start", "seqused_k"]
    rows, apart = half(6, 4, 64), torch.zeros(8, dtype=torch.int32)[::2]
    answer = ask_packed(rows, rows, rows, cu=(apart, int32(0, 1, 2, 3)), longest=6, backend="sm80_mma", arch=home())
    assert answer["copies"] == ["cu_seqlens_q"]


@pytest.mark.library
def test_auto_copies_nothing_for_sm80_mma() -> None:
    """Where wgmma cannot run, an operand that would have to be copied goes to torch."""
    if built("90a") or not code_for(H200):
        pytest.skip("for a library that runs sm80_mma alone on sm_90")
    plain = half(2, 4, 6, 64)
    assert ask(plain, plain, plain)["kernel"] == "sm80_mma"
    for operands in ((shifted(2, 4, 6, 64), plain, plain), (plain, plain, COPIED["rows between"])):
        answer = ask(*operands)
        assert answer["kernel"] == "torch"
        assert answer["fallback_reason"] == 'sm80_mma would copy q, k or v; name backend="cuda" to take it all the same'
        assert ask(*operands, backend="cuda")["kernel"] == "sm80_mma"


# ------------------------------------------------------------------------------------------------------------- profiles


def row(seqlen: int, head_dim: int, causal: bool, *, batch: int = 2, heads: tuple[int, int] = (8, 2),
        op: str = "flash_attention", dtype: str = "float16") -> str:  # fmt: skip
    return (
        f"{op};{dtype};batch={batch},causal={causal:d},head_dim={head_dim},num_heads_kv={heads[1]},"
        f"num_heads_q={heads[0]},seqlen_k={seqlen},seqlen_q={seqlen}"
    )


@pytest.fixture
def profile() -> Iterator[Callable[[str], None]]:
    """profile("flash_attention;float16;...;sm80_mma\\n") hands rows to the library; they are taken back."""

    with routes.profile_rows(LIBRARY) as put:
        yield put


def shown(**changes: Any) -> tuple[str, bool]:
    answer = dense(**{"seqlen": 512, "head_dim": 128, "causal": True, "arch": home(), **changes})
    return answer["kernel"], answer["profile"]


@pytest.mark.library
def test_a_profile_row_decides_its_own_shape_alone(profile: Callable[[str], None]) -> None:
    usual, _ = shown()
    other = "torch" if usual == "sm80_mma" else "sm80_mma"
    profile(f"{row(512, 128, True)};{other}\n{row(512, 128, False, dtype='bfloat16')};torch")
    assert shown() == (other, True)
    assert shown(backend="cuda")[1] is False
    for changes in (
        {"seqlen": 513},
        {"seqlen_k": 511},
        {"head_dim": 64},
        {"batch": 3},
        {"heads": (8, 4)},
        {"heads": (16, 2)},
        {"causal": False},
        {"dtype": torch.bfloat16},
        {"window_size": 100},
        {"softcap": 5.0},
    ):
        assert shown(**changes)[1] is False, changes
    assert shown(dtype=torch.bfloat16, causal=False) == ("torch", True)
    profile(f"{row(512, 128, True, dtype='bfloat16')};{other}\n")
    assert shown() == (usual, False), "a new table replaces the old one"
    profile("")
    assert shown(dtype=torch.bfloat16) == (usual, False)


@pytest.mark.library
def test_a_profile_row_of_packed_calls(profile: Callable[[str], None]) -> None:
    """Its lengths are the longest ones that the caller names."""
    profile(f"{row(300, 128, True, op='flash_attention_varlen')};sm80_mma")

    def found(longest: int) -> tuple[str, bool]:
        answer = packed(1000, 128, longest=longest, causal=True, arch=home())
        return answer["kernel"], answer["profile"]

    assert found(300) == ("sm80_mma", True)
    assert found(301)[1] is False
    assert shown(seqlen=300)[1] is False


@pytest.mark.library
@pytest.mark.usefixtures("needs_90a")
def test_a_profile_row_that_cannot_run_is_passed_over(profile: Callable[[str], None]) -> None:
    profile(f"{row(512, 128, True)};sm90a_wgmma.128x160s4q2")  # takes no mask
    assert shown() == ("sm90a_wgmma", False)
    profile(f"{row(512, 80, True)};sm80_mma")
    assert shown(head_dim=80) == ("torch", False)
    if code_for(80):  # on a device without measurements a row is one
        profile(f"{row(512, 128, True)};sm80_mma")
        assert shown(arch=80) == ("sm80_mma", True)


GOOD = row(512, 128, True)


@pytest.mark.library
@pytest.mark.parametrize(
    "line",
    [
        "flash_attention",
        GOOD,
        f"{GOOD};sm80_mma;more",
        f"{GOOD.replace('flash_attention', 'attention')};sm80_mma",
        f"{GOOD.replace('float16', 'float32')};sm80_mma",
        f"{GOOD.replace(',seqlen_q=512', '')};sm80_mma",
        f"{GOOD.replace('seqlen_q', 'rows')};sm80_mma",
        f"{GOOD},window_size=1;sm80_mma",
        f"{GOOD.replace('causal=1', 'causal=2')};sm80_mma",
        f"{GOOD.replace('batch=2', 'batch=-2')};sm80_mma",
        f"{GOOD.replace('batch=2', 'batch=')};sm80_mma",
        f"{GOOD};sm80_fast",
        f"{GOOD};auto",
        f"{GOOD};cuda",
        f"{GOOD};",
        f"{GOOD};sm80_mma.",
        f"{GOOD};sm80_mma.1x1",
        f"{GOOD};sm80_mma.64x32w4s4",
        f"{GOOD};sm80_mma.64x64w4s2.1",
        f"{GOOD};torch.64x64w4s2",
    ],
)
def test_bad_profile_text(line: str, profile: Callable[[str], None]) -> None:
    """Refused by name, and the rows from before stay. 64x32w4s4 is of another head_dim."""
    form = (
        "flash_attention or flash_attention_varlen;dtype;"
        "batch=B,causal=0 or 1,head_dim=D,num_heads_kv=N,num_heads_q=N,seqlen_k=S,seqlen_q=S;"
        "kernel or kernel.configuration"
    )
    routes.check_row_refused(profile, f"{GOOD};torch", line, form)
    assert shown() == ("torch", True)


@pytest.mark.library
def test_dependent_launch_is_a_switch_with_a_memory() -> None:
    routes.check_dependent_launch(LIBRARY)


# --------------------------------------------------------------------------------------------------- every row is hit


def reasons() -> set[str]:
    """Every sentence with which routes.h explains a choice."""
    texts = routes.sentences(ROUTES, "obstacle", "kernel_reason", "select", words=3)
    return {text.strip(" ,") for text in texts}


@pytest.mark.library
@pytest.mark.usefixtures("needs_90a")
def test_every_reason_is_met(profile: Callable[[str], None]) -> None:
    profile(f"{row(512, 64, True)};sm80_mma")
    seen: set[str | None] = set()
    calls: list[Callable[..., dict[str, Any]]] = [
        lambda **choice: dense(512, 64, causal=True, **choice),
        lambda **choice: dense(512, 128, **choice),
        lambda **choice: dense(512, 80, **choice),
        lambda **choice: dense(1 << 32, 64, **choice),
        lambda **choice: dense(1 << 20, 64, batch=1 << 20, **choice),
        lambda **choice: packed(600, 256, longest=100, **choice),
    ]
    for call in calls:
        for arch in ARCHITECTURES:
            for backend in ("auto", "torch", "cuda", *KERNELS):
                seen |= routes.explanations(call, backend=backend, arch=arch)
    wanted = reasons()
    assert len(wanted) >= 12, wanted
    text = "\n".join(sorted(filter(None, seen)))
    missing = {each for each in wanted if each not in text}
    # No build has code below sm_80: the floor is there for a list of architectures that somebody writes by hand.
    missing.discard("it needs sm_80 or later")
    # A library with code for sm_90a alone meets these nowhere; test_auto_copies_nothing_for_sm80_mma has the last two.
    missing -= {
        "sm80_mma would copy q, k or v",
        'sm80_mma would copy q, k or v; name backend="cuda" to take it all the same',
    }
    if not any(code_for(arch) for arch in ARCHITECTURES if arch != H200):
        missing -= {
            "the kernels were never measured on this architecture",
            'architecture never measured; name backend="cuda" to take the own kernel',
            "wgmma needs a device of sm_90 and a build with code for sm_90a",
            "the fastest that can run here: mma.sync",
        }
    assert not missing
    assert None in seen


@pytest.mark.library
def test_names_of_kernels_are_those_of_python() -> None:
    assert routes.names_in(ROUTES, "kBackendNames") == list(LIBRARY.codes)

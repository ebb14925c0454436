"""Layouts, outputs, threads, schemas and execution info on the CPU."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from attention_cases import KERNELS, LAYOUTS, Call, check, dense, int32, packed, same_bits, with_layout
from torch._subclasses.fake_tensor import FakeTensorMode

import dandan_attention
from dandan_attention._ops import INPUTS, LIBRARY
from dandan_ops_core.backend import BackendUnavailableError
from dandan_ops_core.testing import assert_bit_equal, guarded_empty, misaligned

CALLS: dict[str, Any] = {
    "flash_attention": lambda: dense(2, (6, 2), 7, 9, 64, causal=True, query_start=2, window_size=6),
    "flash_attention_varlen": lambda: packed([3, 0, 4], [5, 2, 2], (6, 2), 64, causal=True, query_starts="suffix"),
}
EVERY_CALL = pytest.mark.parametrize("name", CALLS)


# ------------------------------------------------------------------------------------------------------------- layouts


@EVERY_CALL
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_gives_the_bits_of_contiguous_operands(name: str, layout: str) -> None:
    call = CALLS[name]()
    expected = call.run(return_lse=True)
    for which in ("q", "k", "v"):
        other = call.with_(**{which: with_layout(getattr(call, which), layout)})
        same_bits(other.run(return_lse=True), expected, f"{which}: {layout}")
    everything = call.with_(**{which: with_layout(getattr(call, which), layout) for which in "qkv"})
    same_bits(everything.run(return_lse=True), expected, layout)


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("seqlen", [77, 256])
def test_heads_outside_of_rows_seen_as_rows_outside_of_heads(head_dim: int, seqlen: int) -> None:
    """A08: allocated [B, H, S, D] and handed over as it is; the other way round the same bits."""
    call = dense(1, (4, 2), seqlen, seqlen, head_dim, torch.bfloat16, causal=True)
    views = call.with_(**{name: with_layout(getattr(call, name), "rows outside of heads") for name in "qkv"})
    assert views.q.stride() == (seqlen * 4 * head_dim, head_dim, 4 * head_dim, 1)
    same_bits(views.run(), call.run(), "views")


@EVERY_CALL
def test_expanded_and_misaligned_operands(name: str) -> None:
    call = CALLS[name]()
    one = call.with_(k=call.k[..., :1, :].expand(call.k.shape), v=misaligned(call.v))
    plain = one.with_(k=one.k.contiguous(), v=call.v)
    same_bits(one.run(return_lse=True), plain.run(return_lse=True), "expanded keys, misaligned values")


# ------------------------------------------------------------------------------------------------------------- outputs


@EVERY_CALL
@pytest.mark.parametrize("return_lse", [False, True])
def test_out(name: str, return_lse: bool) -> None:
    """Written where it lies, with gaps left alone, and returned; the lse comes with it."""
    call = CALLS[name]()
    expected = call.run(return_lse=True)
    shape = call.q.shape
    strides = {"contiguous": None, "padded": [2 * stride for stride in torch.empty(shape).stride()]}
    strides["padded"][-1] = 1
    for how, its in strides.items():
        with guarded_empty(shape, call.q.dtype, strides=its, name=how) as guarded:
            found = call.run(out=guarded.tensor, return_lse=return_lse)
            assert (found[0] if return_lse else found) is guarded.tensor
        same_bits(found, expected if return_lse else expected[0], how)


def test_out_in_the_layout_of_a_model() -> None:
    """[B, S, H * D], seen as [B, H, S, D]."""
    call = dense(2, (4, 2), 7, 7, 64, causal=True)
    hidden = torch.zeros(2, 7, 4 * 64).half()
    call.run(out=hidden.view(2, 7, 4, 64).transpose(1, 2))
    assert_bit_equal(hidden, call.run().transpose(1, 2).reshape(2, 7, 256))


@EVERY_CALL
def test_inputs_are_not_written(name: str) -> None:
    call = CALLS[name]()
    before = [t.clone() for t in call.positional]
    call.run(return_lse=True)
    for now, then in zip(call.positional, before, strict=True):
        assert torch.equal(now, then)


def test_threads() -> None:
    """A30, on the CPU: the first calls of several threads at once."""
    calls = [CALLS[name]() for name in CALLS] * 2
    expected = [call.run() for call in calls]
    failures: list[int] = []

    def work(number: int) -> None:
        for _ in range(50):
            if not torch.equal(calls[number].run(), expected[number]):
                failures.append(number)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


# ----------------------------------------------------------------------------------------------- packed and dense agree


def test_a_packed_batch_is_its_sequences_one_by_one() -> None:
    call = packed([3, 0, 5], [7, 2, 6], (4, 2), 16, causal=True, query_starts="suffix", window_size=4, softcap=3.0)
    out, lse = call.run(return_lse=True)
    for sequence in call.sequences():
        alone = Call(
            *(t.unsqueeze(0) for t in (sequence.q, sequence.k, sequence.v)),
            {"causal": True, "query_start": sequence.start, "window_size": 4, "softcap": 3.0},
        ).run(return_lse=True)
        assert_bit_equal(out[sequence.rows].transpose(0, 1).contiguous(), alone[0][0].contiguous())
        assert_bit_equal(lse[:, sequence.rows].contiguous(), alone[1][0])


def test_rows_behind_the_last_sequence() -> None:
    """They may be there, and change nothing."""
    call = packed([3, 2], [4, 6], (4, 2), 16, behind=5, causal=True, query_starts="suffix")
    check(call)
    short = call.with_(q=call.q[:5], k=call.k[:10], v=call.v[:10])
    out, lse = call.run(return_lse=True)
    same_bits((out[:5], lse[:, :5].contiguous()), short.run(return_lse=True), "without them")


# ------------------------------------------------------------------------------------------------- schemas, execution


@EVERY_CALL
def test_schemas(name: str) -> None:
    """What the compiled library has to define, word for word."""
    inputs = {
        "flash_attention": "Tensor q, Tensor k, Tensor v, bool causal, float? softmax_scale, SymInt? query_start, "
        "Tensor? query_starts, SymInt? window_size, float softcap, Tensor? seqused_k",
        "flash_attention_varlen": "Tensor q, Tensor k, Tensor v, Tensor cu_seqlens_q, Tensor cu_seqlens_k, "
        "SymInt max_seqlen_q, SymInt max_seqlen_k, bool causal, float? softmax_scale, Tensor? query_starts, "
        "bool suffix, SymInt? window_size, float softcap, Tensor? seqused_k",
    }[name]
    assert INPUTS[name] == inputs
    assert LIBRARY.operators[name].schemas() == [
        f"{name}({inputs}, int backend) -> Tensor",
        f"{name}_out({inputs}, int backend, Tensor(a!) out) -> ()",
        f"{name}_info({inputs}, int backend, Tensor? out, int arch) -> Tensor",
    ]
    assert LIBRARY.operators[f"{name}_lse"].schemas() == [
        f"{name}_lse({inputs}, int backend) -> (Tensor, Tensor)",
        f"{name}_lse_out({inputs}, int backend, Tensor(a!) out, Tensor(b!) lse) -> ()",
        f"{name}_lse_info({inputs}, int backend, Tensor? out, Tensor? lse, int arch) -> Tensor",
    ]
    for operator in (name, f"{name}_lse"):
        for schema in LIBRARY.operators[operator].schemas()[: 3 if LIBRARY.library.loaded else 2]:
            assert str(LIBRARY.op(schema.split("(")[0])._schema) == f"dandan_attention::{schema}"


def test_backends_and_names() -> None:
    assert list(LIBRARY.codes) == ["auto", "torch", "cuda", "sm80_mma", "sm90a_wgmma"]
    assert KERNELS == ("sm80_mma", "sm90a_wgmma")
    assert sorted(dandan_attention.__all__) == dandan_attention.__all__


@EVERY_CALL
@pytest.mark.parametrize("return_lse", [False, True])
def test_execution_info_on_the_cpu(name: str, return_lse: bool) -> None:
    call = CALLS[name]()
    info = call.info(return_lse=return_lse)
    assert (info.op, info.backend, info.kernel, info.device, info.copies) == (name, "torch", "torch", "cpu", ())
    assert info.fallback_reason == "q is on cpu, the own kernels run on CUDA devices"
    assert call.info("torch", return_lse=return_lse).reason == "asked for"
    needs = call.with_(k=call.k.clone().requires_grad_())
    assert needs.info(return_lse=return_lse).reason == "an argument needs a gradient"


@EVERY_CALL
@pytest.mark.parametrize("backend", ["cuda", *KERNELS])
@pytest.mark.parametrize("extra", ["", "return_lse", "out"])
def test_own_kernels_are_refused_on_the_cpu_with_the_reason(name: str, backend: str, extra: str) -> None:
    call = CALLS[name]()
    keywords = {"": {}, "return_lse": {"return_lse": True}, "out": {"out": torch.empty_like(call.q)}}[extra]
    for run in (call.run, call.info):
        with pytest.raises(BackendUnavailableError) as raised:
            run(backend, **keywords)
        assert str(raised.value) == (
            f'{name}: backend "{backend}" cannot run: q is on cpu, the own kernels run on CUDA devices; "auto" and '
            f'"torch" can'
        )


@pytest.mark.skipif(LIBRARY.library.loaded, reason="the library is loaded")
@EVERY_CALL
def test_on_cuda_without_the_library_the_reason_is_the_loaders(name: str) -> None:
    """Fake tensors are on a CUDA device without one."""
    call = CALLS[name]()
    with FakeTensorMode():
        there = call.with_(
            **{each: torch.empty_strided(getattr(call, each).shape, getattr(call, each).stride(), dtype=call.q.dtype,
                                         device="cuda") for each in "qkv"},
            cu_seqlens=None if call.cu_seqlens is None else tuple(
                torch.empty(4, dtype=torch.int32, device="cuda") for _ in range(2)
            ),
        )  # fmt: skip
        info = there.info()
        assert (info.backend, info.fallback_reason) == ("torch", LIBRARY.library.reason)
        with pytest.raises(BackendUnavailableError) as raised:
            there.info("sm90a_wgmma")
    assert str(raised.value) == (
        f'{name}: backend "sm90a_wgmma" cannot run: {LIBRARY.library.reason}; "auto" and "torch" can'
    )


# ------------------------------------------------------------------------------------------------ what a user may pass


def test_numbers_of_other_kinds() -> None:
    """Whatever torch's dispatcher takes for an int, a float or a bool."""
    numpy = pytest.importorskip("numpy")
    call = dense(1, (2, 1), 5, 5, 16)
    expected = call.run("auto", causal=True, window_size=3, softcap=2.0, softmax_scale=1.0)
    for causal, window, softcap, scale in (
        (1, numpy.int64(3), 2, 1),
        (numpy.bool_(True), numpy.int32(3), numpy.float32(2), numpy.float64(1)),
    ):
        options = {"causal": causal, "window_size": window, "softcap": softcap, "softmax_scale": scale}
        assert_bit_equal(call.run("auto", **options), expected)
        assert call.info("auto", **options).kernel == "torch"
    assert_bit_equal(call.run(causal=True, query_start=True), call.run(causal=True, query_start=1))


def test_operands_of_one_tensor() -> None:
    """q, k and v may be the same memory."""
    call = dense(1, (2, 2), 5, 5, 16)
    same = call.with_(k=call.q, v=call.q)
    assert_bit_equal(same.run(), same.with_(k=call.q.clone(), v=call.q.clone()).run())


def test_a_start_of_each_sequence_equals_an_int() -> None:
    call = dense(2, (2, 1), 5, 9, 16, causal=True, query_start=4)
    tensors = call.with_(options={**call.options, "query_start": int32(4, 4)})
    for mine, theirs in zip(call.run(return_lse=True), tensors.run(return_lse=True), strict=True):
        torch.testing.assert_close(mine, theirs)

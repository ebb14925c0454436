"""QuantizedLinear: a linear layer whose weight is INT4 in memory, in checkpoints and in the product."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import torch

from dandan_ops_core.backend import BackendUnavailableError, ExecutionInfo
from dandan_ops_core.registry import named_error
from dandan_ops_core.tensors import dtype_name
from dandan_w4a16 import checks
from dandan_w4a16._ops import LIBRARY
from dandan_w4a16.execution_info import packed_linear_execution_info, w4a16_linear_execution_info
from dandan_w4a16.linear import w4a16_linear
from dandan_w4a16.packed import packed_linear
from dandan_w4a16.quantize import quantize_int4
from dandan_w4a16.weight import Int4Weight, shard_bounds

__all__ = ["QuantizedLinear"]

PACKED = ("qweight", "scales", "zeros")
"""The buffers of the canonical form."""

ORDERED = ("codes", "scale_pairs")
"""The buffers that replace them in a finalised module; see dandan_w4a16.kernel_order."""

DEVICES = ("cuda",)
"""Types of devices on which a module is finalised. The CPU kernels read the canonical form faster."""


def _move(t: torch.Tensor, convert: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """`convert` (what Module.to, half, cuda, to_empty and the like hand over) without any change of dtype."""
    moved = convert(t)
    return moved if moved.dtype == t.dtype else t.to(moved.device)


def _why_canonical(weight: Int4Weight) -> str | None:
    """Why a weight cannot be brought into the kernels' order where it is, or None."""
    if weight.device.type not in DEVICES:
        return f"it is on {weight.device}"
    if weight.device.type == "cuda" and not LIBRARY.library.loaded:
        return LIBRARY.library.reason
    if weight.scales.dtype not in checks.ACTIVATIONS:
        return f"scales are {dtype_name(weight.scales.dtype)}, the kernels multiply by float16 or bfloat16"
    if weight.zeros.dtype != torch.uint8:
        return "zeros are no integers"
    return None


class QuantizedLinear(torch.nn.Module):
    """``y = x @ w.T + bias`` with an INT4 weight in the canonical format (`Int4Weight`); see `w4a16_linear`.

    The canonical tensors `qweight`, `scales` and `zeros` are what `state_dict` holds and what loaders assign by name,
    on every device. On CUDA one copy of them in the order of the kernels takes their place in memory (`finalize`, which
    `from_float`, `from_packed`, loading and moves to a CUDA device call). `weight_int4` then makes the three anew, and
    assigning one by name takes the module back to the canonical form.

    Casts of the module (`half()`, `to(torch.bfloat16)`) change the bias alone: codes, scales and zeros keep their
    dtypes, and x decides what the weight is rounded to. The kernels run where x, scales and bias have one dtype.
    Loading keeps the dtype of the scales that are loaded, and refuses tensors that are not in the format rather than
    convert them.

    Args:
        in_features: K, a multiple of group_size.
        out_features: N.
        bias: whether there is a bias [N], a parameter without gradient.
        group_size: 32, 64 or 128.
        zero_mode: "integer" (zeros are uint8) or "float" (zeros have the dtype of the scales).
        scale_dtype: float16, bfloat16 or float32.
        device: of the tensors; "meta" for a module to be loaded.
        dtype: of the bias; None is float16.

    A new module has zeros as its codes, scales of one, and so a weight of zeros, and is not finalised; `from_float` and
    `from_packed` make one with a weight.

    Raises:
        ValueError: a size or mode breaks the rules of the format.
        TypeError: a dtype is not supported.
    """

    qweight: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor
    bias: torch.Tensor | None
    codes: torch.Tensor
    scale_pairs: torch.Tensor

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        group_size: int = 64,
        zero_mode: str = "integer",
        scale_dtype: torch.dtype = torch.float16,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if in_features % checks.group_size("QuantizedLinear", group_size) != 0:
            raise ValueError(
                f"QuantizedLinear: in_features is {in_features}; a multiple of group_size={group_size} is needed"
            )
        groups = (out_features, in_features // group_size)
        qweight = torch.zeros(out_features, in_features // 8, dtype=torch.int32, device=device)
        scales = torch.ones(groups, dtype=scale_dtype, device=device)
        zeros = torch.zeros(groups, dtype=scale_dtype if zero_mode == "float" else torch.uint8, device=device)
        vector = torch.zeros(out_features, dtype=dtype or torch.float16, device=device) if bias else None
        self._take(Int4Weight(qweight, scales, zeros, group_size, zero_mode), vector)

    def _take(self, weight: Int4Weight, bias: torch.Tensor | None) -> None:
        self.out_features, self.in_features = weight.shape
        self.group_size = weight.group_size
        self.zero_mode = weight.zero_mode
        self._finalized = False
        for name in PACKED:
            self.register_buffer(name, getattr(weight, name).detach().contiguous())
        if bias is not None:
            bias = torch.nn.Parameter(bias.detach(), requires_grad=False)
        self.register_parameter("bias", bias)

    @classmethod
    def from_packed(cls, weight: Int4Weight, bias: torch.Tensor | None = None) -> QuantizedLinear:
        """A module of a packed weight, finalised where it can be. Where not, it keeps the tensors it gets, without a
        copy where they are contiguous.

        Args:
            weight: in the canonical format.
            bias: [N] float16, bfloat16 or float32, on the weight's device.

        Raises:
            TypeError: weight is no Int4Weight, or bias has another dtype.
            ValueError: scales are not finite or zeros not in 0..15, or bias has another shape or device.
        """
        op = "QuantizedLinear.from_packed"
        if not isinstance(weight, Int4Weight):
            raise TypeError(f"{op}: weight is {type(weight).__name__}; an Int4Weight is needed")
        checks.values(op, weight.scales, weight.zeros)
        if bias is not None:
            checks.floating(op, "bias", bias)
            if bias.shape != weight.shape[:1]:
                raise ValueError(f"{op}: bias has shape {list(bias.shape)}; {[weight.shape[0]]} is needed")
            if bias.device != weight.device:
                raise ValueError(f"{op}: bias is on {bias.device} but weight is on {weight.device}")
        module = cls.__new__(cls)
        torch.nn.Module.__init__(module)
        module._take(weight, bias)
        return module.finalize()

    @classmethod
    def from_float(
        cls,
        weight: torch.Tensor,
        group_size: int = 64,
        bias: torch.Tensor | None = None,
        *,
        scale_dtype: torch.dtype | None = None,
    ) -> QuantizedLinear:
        """A module of a floating weight [N, K], as `torch.nn.Linear` has it, quantised by `quantize_int4`.

        Args:
            weight: as in `quantize_int4`, and so are group_size and scale_dtype.
            bias: as in `from_packed`.

        Raises:
            TypeError: where `quantize_int4` or `from_packed` raises it.
            ValueError: where `quantize_int4` or `from_packed` raises it.
        """
        return cls.from_packed(quantize_int4(weight, group_size, scale_dtype=scale_dtype), bias)

    @property
    def weight_int4(self) -> Int4Weight:
        """The weight in the canonical format: the module's own tensors, or of a finalised module new ones."""
        return Int4Weight(*self._canonical(), self.group_size, self.zero_mode)

    @property
    def is_finalized(self) -> bool:
        """Whether the weight is in the order of the kernels."""
        return self._finalized

    def finalize(self) -> QuantizedLinear:
        """Brings the weight into the order of the kernels of the device that it is on; waits for that device.

        One tensor in that order takes the place of the canonical ones. Where there are no own kernels (on the CPU,
        without the compiled library, on an architecture that it has no code for) or they do not compute with the weight
        (float zeros, scales in float32), nothing changes, and `execution_info` says why.

        `from_float`, `from_packed`, `load_state_dict`, moves to a CUDA device and copies of a finalised module call it.
        Call it after setting tensors in any other way. Nothing computes before it has ended, so no kernel sees half a
        weight. Returns the module.

        Raises:
            ValueError: scales are not finite or zeros not in 0..15.
        """
        if self._finalized:
            return self
        held = [self._buffers[name] for name in PACKED]
        tensors = [t for t in held if t is not None]
        if len(tensors) < len(PACKED) or len({t.device for t in tensors}) > 1:
            return self  # tensors are still to be set
        weight = self.weight_int4
        if _why_canonical(weight) is not None:
            return self
        checks.values("QuantizedLinear.finalize", weight.scales, weight.zeros)
        try:
            ordered = LIBRARY.op("repack")(*held, self.group_size)
        except RuntimeError as error:
            if isinstance(named_error(error), BackendUnavailableError):
                return self
            raise named_error(error) or error from None
        self._replace(PACKED, dict(zip(ORDERED, ordered, strict=True)), finalized=True)
        return self

    def _canonical(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        if not self._finalized:
            return self.qweight, self.scales, self.zeros
        unpacked: tuple[torch.Tensor, torch.Tensor, torch.Tensor] = LIBRARY.op("unpack")(
            *self._ordered(), self.out_features, self.in_features, self.group_size
        )
        return unpacked

    def _ordered(self) -> tuple[torch.Tensor, torch.Tensor]:
        return self.codes, self.scale_pairs

    def _replace(self, old: Sequence[str], new: dict[str, torch.Tensor], *, finalized: bool) -> None:
        for name in old:
            del self._buffers[name]
            self._non_persistent_buffers_set.discard(name)
        self._finalized = finalized
        for name, t in new.items():
            # What is in the kernels' order is not for state_dict.
            self.register_buffer(name, t, persistent=not finalized)

    def _unfinalize(self) -> None:
        """Back to the canonical form, bit for bit."""
        if self._finalized:
            self._replace(ORDERED, dict(zip(PACKED, self._canonical(), strict=True)), finalized=False)

    def _finalize_if_sound(self) -> None:
        """`finalize` after a move, which may have moved anything: what is not a weight stays as it is."""
        with contextlib.suppress(TypeError, ValueError):
            self.finalize()

    def forward(self, x: torch.Tensor, backend: str = "auto") -> torch.Tensor:
        """`w4a16_linear` of x, [..., K] float16 or bfloat16, with this weight and bias. Returns [..., N]."""
        if self._finalized:
            buffers = self._buffers  # not through Module.__getattr__, which is slow
            return packed_linear(
                x,
                buffers["codes"],  # type: ignore[arg-type]
                buffers["scale_pairs"],  # type: ignore[arg-type]
                self._parameters["bias"],
                self.out_features,
                self.in_features,
                self.group_size,
                backend=backend,
            )
        return w4a16_linear(
            x,
            self.qweight,
            self.scales,
            self.zeros,
            group_size=self.group_size,
            bias=self.bias,
            zero_mode=self.zero_mode,
            backend=backend,
        )

    def execution_info(self, x: torch.Tensor, backend: str = "auto") -> ExecutionInfo:
        """How `forward` with the same arguments would run. Its `op` tells the forms apart: a finalised module calls
        `packed_linear`, another one `w4a16_linear`; see `w4a16_linear_execution_info`.
        """
        if self._finalized:
            sizes = (self.out_features, self.in_features, self.group_size)
            return packed_linear_execution_info(x, *self._ordered(), self.bias, *sizes, backend=backend)
        return w4a16_linear_execution_info(
            x,
            self.qweight,
            self.scales,
            self.zeros,
            group_size=self.group_size,
            bias=self.bias,
            zero_mode=self.zero_mode,
            backend=backend,
        )

    def shard(self, dim: int, rank: int, world: int) -> QuantizedLinear:
        """A rank's part for tensor parallelism, as a copy; codes, scales and zeros are exactly the whole's.

        Args:
            dim: 0 splits the rows (N): results of the ranks, side by side, are the whole's. 1 splits the columns (K)
                between groups: results of the ranks are added, so the bias goes to rank 0 alone.
            rank: 0 to world - 1.
            world: number of ranks; divides N, or K / group_size.

        Raises:
            ValueError: dim, rank or world breaks that.
        """
        weight = self.weight_int4.shard(dim, rank, world)
        bias = self.bias
        if bias is not None and dim == 0:
            bias = bias[slice(*shard_bounds("QuantizedLinear.shard", self.out_features, "N", rank, world))].clone()
        elif bias is not None:
            bias = bias.clone() if rank == 0 else None
        return type(self).from_packed(weight, bias)

    def extra_repr(self) -> str:
        """Sizes and modes."""
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}, "
            f"group_size={self.group_size}, zero_mode={self.zero_mode!r}, scales={dtype_name(self._scale_dtype)}"
        )

    @property
    def _scale_dtype(self) -> torch.dtype:
        return (self.scale_pairs if self._finalized else self.scales).dtype

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in PACKED:
            super().__setattr__(name, value)
            return
        self._unfinalize()
        before = self._buffers.get(name)
        super().__setattr__(name, value)
        if before is not None and before.is_meta:
            # The last of the tensors that a loader sets one by one.
            self._finalize_if_sound()

    # Moves and casts.

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> QuantizedLinear:
        again = self._finalized
        if self._finalized and fn(self.codes.new_empty(0)).device != self.codes.device:
            self._unfinalize()
        names = ORDERED if self._finalized else PACKED
        before = {name: self._buffers.pop(name) for name in names}
        after = before
        try:
            super()._apply(fn, recurse)
            after = {name: None if t is None else _move(t, fn) for name, t in before.items()}
        finally:
            self._buffers.update(after)
        if self._finalized:
            if self.codes.is_cuda and any(after[name] is not before[name] for name in names):
                torch.cuda.synchronize(self.codes.device)  # as after `finalize`: what kernels read early is there
            return self
        first, moved = before["qweight"], after["qweight"]
        if first is None or moved is None:
            return self
        if again or (first.device != moved.device and not first.is_meta):
            self._finalize_if_sound()
        return self

    # Copies and pickles hold the canonical form, so that they can be read without a GPU.

    def __getstate__(self) -> dict[str, Any]:
        state = self.__dict__.copy()
        if self._finalized:
            buffers = {name: t for name, t in self._buffers.items() if name not in ORDERED}
            state["_buffers"] = {**buffers, **dict(zip(PACKED, self._canonical(), strict=True))}
            state["_non_persistent_buffers_set"] = self._non_persistent_buffers_set - set(ORDERED)
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        finalized = state.get("_finalized", False)
        super().__setstate__({**state, "_finalized": False})
        if finalized:
            self.finalize()

    # Saving and loading.

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if self._finalized:
            destination.update((prefix + name, t) for name, t in zip(PACKED, self._canonical(), strict=True))

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, local_metadata: Any, strict: bool,
        missing_keys: list[str], unexpected_keys: list[str], error_msgs: list[str],
    ) -> None:  # fmt: skip
        problems = self._refused(state_dict, prefix)
        if problems:
            error_msgs.extend(problems)
            return
        found = {name: state_dict[prefix + name] for name in PACKED if prefix + name in state_dict}
        if found and self._finalized:
            self._make_room(found)
        scaled = ("scales", "zeros") if self.zero_mode == "float" else ("scales",)
        for name in scaled if not self._finalized else ():
            loaded, mine = found.get(name), self._buffers[name]
            if loaded is not None and mine is not None and loaded.dtype != mine.dtype:
                # Copying into the present buffer would round the loaded scales.
                self._buffers[name] = torch.empty_like(mine, dtype=loaded.dtype)
        super()._load_from_state_dict(
            state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )
        if found:
            self._finalize_if_sound()

    def _make_room(self, found: dict[str, torch.Tensor]) -> None:
        """Canonical buffers to load into: this weight's, or empty ones where all of it is about to be replaced."""
        shapes = {
            "qweight": (self.out_features, self.in_features // 8),
            "scales": (self.out_features, self.in_features // self.group_size),
            "zeros": (self.out_features, self.in_features // self.group_size),
        }
        if all(name in found and found[name].shape == shape for name, shape in shapes.items()):
            device = self.codes.device
            empty = {name: torch.empty(shapes[name], dtype=t.dtype, device=device) for name, t in found.items()}
            self._replace(ORDERED, empty, finalized=False)
        else:
            self._unfinalize()

    def _refused(self, state_dict: dict[str, Any], prefix: str) -> list[str]:
        """What is wrong with the tensors of a state_dict, before any of them is taken. Parts may be missing."""
        op = "QuantizedLinear.load_state_dict"
        found = {name: state_dict[prefix + name] for name in PACKED if prefix + name in state_dict}
        try:
            if "qweight" in found:
                words = checks.tensor(op, prefix + "qweight", found["qweight"])
                if words.dtype != torch.int32:
                    raise TypeError(f"{op}: {prefix}qweight has dtype {dtype_name(words.dtype)}; int32 is needed")
            if "scales" in found:
                checks.floating(op, prefix + "scales", found["scales"])
            if "zeros" in found:
                checks.zero_mode(op, checks.tensor(op, prefix + "zeros", found["zeros"]), self.zero_mode)
            for name in ("scales", "zeros"):
                if name in found:
                    checks.values(op, found[name], found[name])
        except (TypeError, ValueError) as error:
            return [str(error)]
        return []

"""QuantizedLinear: a linear layer whose weight is INT4 in memory, in checkpoints and in the product."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from dandan_ops_core.backend import ExecutionInfo
from dandan_ops_core.tensors import dtype_name
from dandan_w4a16 import checks
from dandan_w4a16.execution_info import w4a16_linear_execution_info
from dandan_w4a16.linear import w4a16_linear
from dandan_w4a16.quantize import quantize_int4
from dandan_w4a16.weight import Int4Weight, shard_bounds

__all__ = ["QuantizedLinear"]

PACKED = ("qweight", "scales", "zeros")


def _move(t: torch.Tensor, convert: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """`convert` (what Module.to, half, cuda, to_empty and the like hand over) without any change of dtype."""
    moved = convert(t)
    return moved if moved.dtype == t.dtype else t.to(moved.device)


class QuantizedLinear(torch.nn.Module):
    """``y = x @ w.T + bias`` with an INT4 weight in the canonical format (`Int4Weight`); see `w4a16_linear`.

    The buffers `qweight`, `scales` and `zeros` are what `state_dict` holds and what loaders assign by name. Casts of
    the module (`half()`, `to(torch.bfloat16)`) change the bias alone: codes, scales and zeros keep their dtypes, and
    x decides what the weight is rounded to. Loading keeps the dtype of the scales that are loaded, and refuses tensors
    that are not in the format rather than convert them.

    Args:
        in_features: K, a multiple of group_size.
        out_features: N.
        bias: whether there is a bias [N], a parameter without gradient.
        group_size: 32, 64 or 128.
        zero_mode: "integer" (zeros are uint8) or "float" (zeros have the dtype of the scales).
        scale_dtype: float16, bfloat16 or float32.
        device: of the tensors; "meta" for a module to be loaded.
        dtype: of the bias; None is float16.

    A new module has zeros as its codes, scales of one, and so a weight of zeros; `from_float` and `from_packed` make
    one with a weight.

    Raises:
        ValueError: a size or mode breaks the rules of the format.
        TypeError: a dtype is not supported.
    """

    qweight: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor
    bias: torch.Tensor | None

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
        for name in PACKED:
            self.register_buffer(name, getattr(weight, name).detach().contiguous())
        if bias is not None:
            bias = torch.nn.Parameter(bias.detach(), requires_grad=False)
        self.register_parameter("bias", bias)

    @classmethod
    def from_packed(cls, weight: Int4Weight, bias: torch.Tensor | None = None) -> QuantizedLinear:
        """A module of a packed weight. It keeps the tensors it gets, without a copy where they are contiguous.

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
        """The weight: these very tensors, not a copy."""
        return Int4Weight(self.qweight, self.scales, self.zeros, self.group_size, self.zero_mode)

    def finalize(self) -> QuantizedLinear:
        """Brings the weight into the layout of this device's kernels. There are none yet: it changes nothing, and the
        canonical buffers are what `forward` reads.

        `from_float` and `from_packed` call it; call it after loading and moving a module. Returns the module.
        """
        return self

    def forward(self, x: torch.Tensor, backend: str = "auto") -> torch.Tensor:
        """`w4a16_linear` of x, [..., K] float16 or bfloat16, with this weight and bias. Returns [..., N]."""
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
        """How `forward` with the same arguments would run; see `w4a16_linear_execution_info`."""
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
            f"group_size={self.group_size}, zero_mode={self.zero_mode!r}, scales={dtype_name(self.scales.dtype)}"
        )

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> QuantizedLinear:
        packed = {name: self._buffers.pop(name) for name in PACKED}
        try:
            super()._apply(fn, recurse)
            packed = {name: None if t is None else _move(t, fn) for name, t in packed.items()}
        finally:
            self._buffers.update(packed)
        return self

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, local_metadata: Any, strict: bool,
        missing_keys: list[str], unexpected_keys: list[str], error_msgs: list[str],
    ) -> None:  # fmt: skip
        problems = self._refused(state_dict, prefix)
        if problems:
            error_msgs.extend(problems)
            return
        scaled = ("scales", "zeros") if self.zero_mode == "float" else ("scales",)
        for name in scaled:
            loaded, mine = state_dict.get(prefix + name), self._buffers[name]
            if loaded is not None and mine is not None and loaded.dtype != mine.dtype:
                # Copying into the present buffer would round the loaded scales.
                self._buffers[name] = torch.empty_like(mine, dtype=loaded.dtype)
        super()._load_from_state_dict(
            state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )

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

#!/usr/bin/env python3
"""The smoke test of an installed package, for a fresh environment.

    python -I tools/smoke.py dandan_ops --library dandan_norm

Imports it before torch, resolves every public name, runs it on the CPU, and asks the loader about the compiled library:
the PyTorch backend would hide a library that does not load.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import io
from collections.abc import Callable
from importlib.metadata import entry_points, version
from types import ModuleType

CORE_MODULES = (
    "backend",
    "benchmark",
    "build",
    "calibrate",
    "device",
    "loader",
    "model_shapes",
    "profiles",
    "records",
    "registry",
    "shape_lists",
    "tensors",
    "testing",
    "testing.bad_inputs",
    "testing.library",
    "testing.routes",
)


def check_core(module: ModuleType) -> None:
    """The modules that the other packages use are there, and the environment report runs."""
    for name in CORE_MODULES:
        importlib.import_module(f"dandan_ops_core.{name}")
    collect_env = importlib.import_module("dandan_ops_core.collect_env")
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.suppress(SystemExit):
        collect_env.main([])
    if "torch" not in printed.getvalue():
        raise SystemExit("collect_env does not name torch")


def check_norm(module: ModuleType) -> None:
    """RMSNorm is right on the CPU, and its execution info names a backend and a reason."""
    import torch

    x = torch.linspace(-2, 2, 2 * 1024).reshape(2, 1024)
    weight = torch.linspace(0.5, 1.5, 1024)
    found = module.rms_norm(x, weight, eps=1e-6)
    expected = torch.nn.functional.rms_norm(x, (1024,), weight, 1e-6)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    info = module.elementwise_execution_info("rms_norm", x, weight)
    if not info.backend or not info.reason:
        raise SystemExit(f"the execution info names no backend or no reason: {info}")


def check_gemm(module: ModuleType) -> None:
    """A product is right on the CPU, and its execution info names a backend and a reason."""
    import torch

    a = torch.arange(6).reshape(2, 3).half()
    b = torch.arange(12).reshape(4, 3).half()
    found = module.gemm(a, b, weight_transposed=True)
    torch.testing.assert_close(found, (a.double() @ b.double().t()).half(), rtol=0, atol=0)
    info = module.gemm_execution_info(a, b, weight_transposed=True)
    if not info.backend or not info.reason:
        raise SystemExit(f"the execution info names no backend or no reason: {info}")


def check_w4a16(module: ModuleType) -> None:
    """A quantised layer computes what its dequantised weight says, and its execution info names backend and reason."""
    import torch

    weight = torch.linspace(-1, 1, 4 * 64, dtype=torch.float16).reshape(4, 64)
    x = torch.eye(64, dtype=torch.float16)[:2]
    linear = module.QuantizedLinear.from_float(weight, group_size=32)
    expected = module.dequantize_int4(linear.weight_int4)[:, :2].t()
    torch.testing.assert_close(linear(x), expected, rtol=0, atol=0)
    info = linear.execution_info(x)
    if not info.backend or not info.reason:
        raise SystemExit(f"the execution info names no backend or no reason: {info}")


def check_attention(module: ModuleType) -> None:
    """Causal attention is right on the CPU, packed and dense, and its execution info names a backend and a reason."""
    import torch

    v = torch.eye(4, dtype=torch.float16).reshape(1, 1, 4, 4)
    q = torch.zeros_like(v)
    expected = torch.ones(4, 4).tril() / torch.arange(1, 5).unsqueeze(1)
    found = module.flash_attention(q, v, v, causal=True)
    torch.testing.assert_close(found[0, 0].float(), expected, rtol=0, atol=2**-12)
    lengths = torch.tensor([0, 4], dtype=torch.int32)
    rows = (q[0].transpose(0, 1), v[0].transpose(0, 1), v[0].transpose(0, 1), lengths, lengths)
    packed = module.flash_attention_varlen(*rows, max_seqlen_q=4, max_seqlen_k=4, causal=True)
    torch.testing.assert_close(packed[:, 0], found[0, 0], rtol=0, atol=0)
    info = module.flash_attention_execution_info(q, v, v, causal=True)
    if not info.backend or not info.reason:
        raise SystemExit(f"the execution info names no backend or no reason: {info}")


def check_meta(module: ModuleType) -> None:
    """The command is there."""
    if not [entry for entry in entry_points(group="console_scripts") if entry.name == "dandan-ops"]:
        raise SystemExit("the command dandan-ops is not installed")
    check_norm(module)
    check_gemm(module)
    check_w4a16(module)
    check_attention(module)


CHECKS: dict[str, Callable[[ModuleType], None]] = {
    "dandan_ops_core": check_core,
    "dandan_norm": check_norm,
    "dandan_gemm": check_gemm,
    "dandan_w4a16": check_w4a16,
    "dandan_attention": check_attention,
    "dandan_ops": check_meta,
}


def check_library(package: str) -> None:
    """The compiled library is loaded. Raises SystemExit with the loader's reason."""
    loader = importlib.import_module("dandan_ops_core.loader")
    loaded = loader.load(package)
    if not loaded.loaded:
        raise SystemExit(f"{package}: the compiled library did not load: {loaded.reason}")
    print(f"{package}: {loaded.path} loaded, architectures {' '.join(loaded.build_info['architectures'])}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("package")
    parser.add_argument("--library", nargs="*", default=[], help="packages whose compiled library must load")
    arguments = parser.parse_args()
    name = arguments.package
    module = importlib.import_module(name)
    missing = [public for public in getattr(module, "__all__", ()) if not hasattr(module, public)]
    if missing:
        raise SystemExit(f"{name}.__all__ names what is not there: {missing}")
    CHECKS[name](module)
    for package in arguments.library:
        check_library(package)
    print(f"{name} {version(name.replace('_', '-'))} works")


if __name__ == "__main__":
    main()

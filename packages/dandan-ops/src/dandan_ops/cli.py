"""The command line: `dandan-ops demo` and `dandan-ops env`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence


def parser() -> argparse.ArgumentParser:
    """The command's arguments."""
    made = argparse.ArgumentParser(prog="dandan-ops", description="CUDA operators for LLM inference on PyTorch.")
    commands = made.add_subparsers(dest="command", required=True, metavar="COMMAND")

    demo = commands.add_parser(
        "demo",
        help="run every operator on the tensors of a Qwen3-0.6B step",
        description="Runs every operator on the tensors of a Qwen3-0.6B decode and prefill step and prints for each "
        "which backend and kernel ran and why, its error against FP64 beside the limit, and its time beside PyTorch's. "
        "Returns 1 when any error is over its limit.",
    )
    demo.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="default: CUDA where it is")
    demo.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16")
    demo.add_argument("--json", action="store_true", help="print one JSON object instead of the table")

    env = commands.add_parser("env", help="describe this machine for a bug report")
    env.add_argument("--json", action="store_true", help="print one JSON object")
    return made


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit status: 0, 1 when a check failed, 2 when the device that was asked for is not there."""
    arguments = parser().parse_args(argv)
    if arguments.command == "env":
        from dandan_ops_core import collect_env

        return collect_env.main(["--json"] if arguments.json else [])

    from dandan_ops import demo

    try:
        return demo.main(device=arguments.device, dtype=arguments.dtype, as_json=arguments.json)
    except demo.DeviceMissingError as error:
        print(f"dandan-ops demo: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())

"""The command line: `dandan-ops demo`, `dandan-ops calibrate` and `dandan-ops env`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path


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

    calibrate = commands.add_parser(
        "calibrate",
        help="measure which kernel is fastest for exact shapes on this GPU",
        description="Times the package's own kernels, and PyTorch where it has the operator, on each shape, in turns, "
        "and writes a route table and the record it was taken from. A kernel replaces the default only where it is "
        "faster by more than the noise. "
        "Shapes that the folder's table already has for this machine and these kernels are not measured again. Returns "
        "1 when a shape failed, 2 when there is no GPU or no compiled library.",
    )
    calibrate.add_argument("--package", required=True, choices=("dandan-gemm", "dandan-w4a16"), help="whose kernels")
    calibrate.add_argument(
        "--shapes",
        type=Path,
        metavar="FILE",
        help="lines such as `m=1,16 n=4096 k=4096 dtype=float16`, instead of the layers of Qwen3 and Llama-3",
    )
    calibrate.add_argument(
        "--out", type=Path, metavar="DIR", help="folder of the table (default: $DANDAN_PROFILES, else dandan-profiles)"
    )
    calibrate.add_argument(
        "--budget", type=_at_least(float, 0.0), metavar="SECONDS", help="begin no further shape after it"
    )
    calibrate.add_argument(
        "--only", action="append", default=[], metavar="TEXT", help="only shapes whose line in --list has TEXT"
    )
    calibrate.add_argument(
        "--candidates", type=_at_least(int, 1), metavar="N", help="own candidates that are timed for each shape"
    )
    calibrate.add_argument(
        "--repeats", type=_at_least(int, 4), metavar="N", help="replays of each graph that decide, 4 or more"
    )
    calibrate.add_argument("--again", action="store_true", help="measure also what the folder's table already has")
    calibrate.add_argument("--list", action="store_true", help="print the shapes and stop")

    env = commands.add_parser("env", help="describe this machine for a bug report")
    env.add_argument("--json", action="store_true", help="print one JSON object")
    return made


def _at_least(kind: type[int] | type[float], least: float) -> Callable[[str], float]:
    def number(text: str) -> float:
        value = kind(text)
        if not value >= least:
            raise argparse.ArgumentTypeError(f"{text} is below {least:g}")
        return value

    return number


def _calibrate(arguments: argparse.Namespace) -> int:
    from dandan_ops import calibrate

    given = {"most": arguments.candidates, "repeats": arguments.repeats}
    return calibrate.main(
        arguments.package,
        shapes=arguments.shapes,
        out=arguments.out,
        budget=arguments.budget,
        only=arguments.only,
        again=arguments.again,
        list_only=arguments.list,
        **{name: value for name, value in given.items() if value is not None},
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit status: 0, 1 when a check failed, 2 when the device that was asked for is not there."""
    arguments = parser().parse_args(argv)
    if arguments.command == "env":
        from dandan_ops_core import collect_env

        return collect_env.main(["--json"] if arguments.json else [])

    if arguments.command == "calibrate":
        return _calibrate(arguments)

    from dandan_ops import demo

    try:
        return demo.main(device=arguments.device, dtype=arguments.dtype, as_json=arguments.json)
    except demo.DeviceMissingError as error:
        print(f"dandan-ops demo: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())

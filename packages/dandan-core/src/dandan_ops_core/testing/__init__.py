"""What the tests of every operator package share: error bounds, guarded allocations, awkward inputs, delayed streams.

The bound of `error_limit` is the only tolerance of this project. It is relative to what an honest implementation in
PyTorch reaches on the same inputs, so it follows the dtype, the width and the data, and no test carries a number of
its own.

Three modules hold what only tests use, and are imported by name: `bad_inputs` (tables of refused calls), `library`
(what a compiled library defines) and `routes` (which kernel it would take, and why).
"""

from dandan_ops_core.testing.bounds import (
    Comparison,
    assert_bit_equal,
    assert_close_to,
    compare,
    error_limit,
    honest_math,
    rounding_step,
)
from dandan_ops_core.testing.guards import Guarded, GuardError, guarded_empty
from dandan_ops_core.testing.layouts import expanded, halves, misaligned, rows_strided
from dandan_ops_core.testing.streams import delay_stream

__all__ = [
    "Comparison",
    "GuardError",
    "Guarded",
    "assert_bit_equal",
    "assert_close_to",
    "compare",
    "delay_stream",
    "error_limit",
    "expanded",
    "guarded_empty",
    "halves",
    "honest_math",
    "misaligned",
    "rounding_step",
    "rows_strided",
]

"""What DeepGEMM's test files take from `deep_gemm.testing`."""

from megamoe.compat.deep_gemm.testing import numeric, utils
from megamoe.compat.deep_gemm.testing.bench import (
    bench,
    bench_kineto,
    empty_suppress,
    suppress_stdout_stderr,
)
from megamoe.compat.deep_gemm.testing.numeric import (
    assert_bitwise_equal,
    calc_diff,
    count_bytes,
)
from megamoe.compat.deep_gemm.testing.utils import get_arch_major, ignore_env, test_filter

__all__ = [
    "assert_bitwise_equal",
    "bench",  # the function: as upstream, it hides the module of that name
    "bench_kineto",
    "calc_diff",
    "count_bytes",
    "empty_suppress",
    "get_arch_major",
    "ignore_env",
    "numeric",
    "suppress_stdout_stderr",
    "test_filter",
    "utils",
]

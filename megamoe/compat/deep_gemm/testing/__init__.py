"""What DeepGEMM's test files take from `deep_gemm.testing`."""

from megamoe.compat.deep_gemm.testing import bench, numeric, utils
from megamoe.compat.deep_gemm.testing.bench import bench_kineto
from megamoe.compat.deep_gemm.testing.numeric import calc_diff, count_bytes
from megamoe.compat.deep_gemm.testing.utils import get_arch_major

__all__ = [
    "bench",
    "bench_kineto",
    "calc_diff",
    "count_bytes",
    "get_arch_major",
    "numeric",
    "utils",
]

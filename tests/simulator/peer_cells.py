"""Measured cells for the simulator: a staged FP8 grouped GEMM peer, then this library's launches.

One H200, medians of CUDA-graph replays with L2 flushed in between; one rank's share of an
expert-parallel layer, uniform routing over its local experts. Times in us.
"""

from megamoe.problem import Problem
from megamoe.simulator.fit import Cell, Times

# name: hidden, intermediate, local experts, top_k
SHAPES = {
    "flash-ep8": (4096, 2048, 32, 6),
    "pro-ep8": (7168, 3072, 48, 6),
    "v3-ep8": (7168, 2048, 32, 8),
    "public-48": (6144, 2048, 48, 8),
}

# fmt: off
# The peer, 2026-11-15: L1 alone, L2 alone, both with the activation, the full layer with permute
# and combine. (shape, tokens, experts with a row, l1, l2, chain, full)
MEASURED = (
    ("flash-ep8",    8, 25,  123.2,   68.6,  189.2,  196.6),
    ("flash-ep8",   64, 32,  147.0,   81.8,  226.7,  234.2),
    ("flash-ep8",  512, 32,  168.0,   96.0,  269.5,  284.4),
    ("flash-ep8", 2048, 32,  371.6,  202.8,  606.8,  669.3),
    ("flash-ep8", 8192, 32, 1256.5,  725.2, 2231.0, 2521.3),
    ("pro-ep8",      8, 33,  368.6,  200.3,  574.3,  583.3),
    ("pro-ep8",     64, 48,  530.9,  279.5,  817.4,  827.4),
    ("pro-ep8",    512, 48,  565.1,  294.2,  875.2,  904.4),
    ("pro-ep8",   2048, 48, 1048.7,  577.0, 1745.1, 1848.9),
    ("pro-ep8",   8192, 48, 3664.4, 1961.3, 5943.2, 6227.8),
    ("v3-ep8",       8, 27,  211.9,  115.9,  325.0,  332.4),
    ("v3-ep8",      64, 32,  244.8,  137.1,  381.7,  391.8),
    ("v3-ep8",     512, 32,  301.1,  165.3,  476.4,  513.4),
    ("v3-ep8",    2048, 32,  799.6,  449.1, 1352.1, 1573.2),
    ("v3-ep8",    8192, 32, 3376.6, 1808.4, 5526.0, 5629.9),
)
# fmt: on


def _cell(name, tokens, touched, *times):
    hidden, intermediate, experts, top_k = SHAPES[name]
    problem = Problem(tokens, hidden, intermediate, experts, top_k, 1, "w8a8")
    return Cell(f"{name} {tokens}", problem, touched, "h200", Times(*times))


CELLS = {cell.name: cell for cell in (_cell(*row) for row in MEASURED)}
FLASH = tuple(cell for name, cell in CELLS.items() if name.startswith("flash-ep8"))
OTHERS = tuple(cell for name, cell in CELLS.items() if not name.startswith("flash-ep8"))

# fmt: off
# This library's own launches: benchmarks/h200/hopper-layer.txt and public-48.txt, one H200, cold
# L2, at 560e008cbfde, from 2048 tokens on at a2d57ee245b5.
# (mode, recipe, shape, tokens, experts with a row, us)
OWN = (
    ("fused",  "w4a8_block", "flash-ep8",    8, 25,   94.2),
    ("fused",  "w4a8_block", "flash-ep8",   64, 32,  116.3),
    ("fused",  "w4a8_block", "pro-ep8",      8, 33,  268.2),
    ("fused",  "w4a8_block", "pro-ep8",     64, 48,  382.9),
    ("fused",  "w4a8_block", "v3-ep8",       8, 27,  156.2),
    ("fused",  "w4a8_block", "v3-ep8",      64, 32,  191.6),
    ("fused",  "w4a8_block", "public-48",    8, 39,  189.5),
    ("fused",  "w4a8_block", "public-48",   32, 48,  229.5),
    ("fused",  "w4a8_block", "public-48",   64, 48,  234.6),
    ("fused",  "w4a8_block", "public-48",  128, 48,  242.4),
    ("staged", "w4a8_block", "public-48",  256, 48,  321.2),
    ("staged", "w4a8_block", "flash-ep8",    8, 25,  108.3),
    ("staged", "w4a8_block", "flash-ep8",   64, 32,  124.0),
    ("staged", "w4a8_block", "pro-ep8",      8, 33,  274.2),
    ("staged", "w4a8_block", "pro-ep8",     64, 48,  397.3),
    ("staged", "w4a8_block", "v3-ep8",       8, 27,  176.1),
    ("staged", "w4a8_block", "v3-ep8",      64, 32,  205.3),
    ("staged", "w4a8_block", "flash-ep8",  512, 32,  268.9),
    ("staged", "w4a8_block", "pro-ep8",    512, 48,  786.8),
    ("staged", "w4a8_block", "v3-ep8",     512, 32,  593.1),
    ("staged", "w4a8_block", "flash-ep8", 2048, 32,  784.3),
    ("staged", "w4a8_block", "pro-ep8",   2048, 48, 2211.9),
    ("staged", "w4a8_block", "v3-ep8",    2048, 32, 1602.1),
    ("staged", "w4a8_block", "flash-ep8", 8192, 32, 2575.0),
    ("staged", "w4a8_block", "pro-ep8",   8192, 48, 6760.7),
    ("staged", "w4a8_block", "v3-ep8",    8192, 32, 5846.1),
    ("staged", "w8a8",       "flash-ep8", 2048, 32,  636.0),
    ("staged", "w8a8",       "pro-ep8",   2048, 48, 1752.0),
    ("staged", "w8a8",       "v3-ep8",    2048, 32, 1380.3),
    ("staged", "w8a8",       "flash-ep8", 8192, 32, 2483.3),
    ("staged", "w8a8",       "pro-ep8",   8192, 48, 6191.6),
    ("staged", "w8a8",       "v3-ep8",    8192, 32, 5645.2),
)
# fmt: on

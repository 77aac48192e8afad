"""Measured cells for the simulator: one H200, 2026-11-15, staged FP8 grouped GEMM peer.

Medians of CUDA-graph replays with L2 flushed in between; one rank's share of an expert-parallel
layer, uniform routing over its local experts. Times in us: L1 alone, L2 alone, both with the
activation, and the full layer with permute and combine.
"""

from megamoe.problem import Problem
from megamoe.schedule.fit import Cell, Times

# name: hidden, intermediate, local experts, top_k
SHAPES = {
    "flash-ep8": (4096, 2048, 32, 6),
    "pro-ep8": (7168, 3072, 48, 6),
    "v3-ep8": (7168, 2048, 32, 8),
}

# fmt: off
# (shape, tokens, experts with a row, l1, l2, chain, full)
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
# One H200, 2026-11, one fused launch, recipe w4a8_block, cold L2; never fitted.
# (shape, tokens, hidden, intermediate, local experts, top_k, experts with a row, us)
FUSED = (
    ("flash-ep8",   8, 4096, 2048, 32, 6, 25, 100.8),
    ("flash-ep8",  64, 4096, 2048, 32, 6, 32, 136.1),
    ("pro-ep8",     8, 7168, 3072, 48, 6, 33, 278.4),
    ("pro-ep8",    64, 7168, 3072, 48, 6, 48, 406.0),
    ("v3-ep8",      8, 7168, 2048, 32, 8, 27, 164.7),
    ("v3-ep8",     64, 7168, 2048, 32, 8, 32, 213.5),
    ("48 experts",  8, 6144, 2048, 48, 8, 40, 201.7),
    ("48 experts", 32, 6144, 2048, 48, 8, 47, 237.8),
    ("48 experts", 64, 6144, 2048, 48, 8, 48, 258.6),
    ("48 experts", 128, 6144, 2048, 48, 8, 48, 280.9),
)
# fmt: on

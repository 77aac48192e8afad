"""Words: which cell of the model's memory holds which word of which rank.

Control words keep the place that `workspace` gives them: cell = byte offset / 4, and a
64-bit word takes two cells of address and one of them holds it. Rows of data take one cell each,
whatever they hold. Behind them come the words in shared memory of each SM.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache

from megamoe.errors import RangeError, require
from megamoe.layout.regions import Workspace
from megamoe.problem import Problem
from megamoe.studies.deep_gemm.blocks import Grid
from megamoe.studies.deep_gemm.capacity import Capacity, capacity
from megamoe.studies.deep_gemm.protocol.ops import Violation
from megamoe.studies.deep_gemm.workspace import mask_words, workspace

MODEL_BLOCK_N = (
    64  # weight rows of a block in the model's problem; only the number of blocks counts
)
SM_MEETINGS = 2  # of an SM's roles: all have read; cleaning may start
PHASE_WORD = 2  # cells of an mbarrier: phase, arrivals left


@dataclass(frozen=True, slots=True)
class Shape:
    """A layer and its launch in integers: what all calls on one workspace have in common."""

    num_ranks: int
    num_sms: int  # per rank
    num_experts: int
    top_k: int
    max_tokens: int  # per rank
    grid: Grid
    experts_per_wave: int
    ring_rows: int | None = None
    lag: int | None = None
    num_stages: int = 2  # blocks whose operands an SM holds in shared memory

    def __post_init__(self) -> None:
        require(
            min(self.num_sms, self.max_tokens, self.num_stages) >= 1,
            "num_sms, max_tokens and num_stages must be at least 1",
            got=f"{self.num_sms}, {self.max_tokens} and {self.num_stages}",
            kind=RangeError,
        )

    @property
    def num_local(self) -> int:
        """Experts per rank."""
        return self.num_experts // self.num_ranks

    @property
    def problem(self) -> Problem:
        """A problem with this grid; its widths only count blocks."""
        return Problem(
            num_tokens=self.max_tokens,
            hidden=MODEL_BLOCK_N * self.grid.num_l2_n,
            intermediate=MODEL_BLOCK_N // 2 * self.grid.num_l1_n,
            num_experts=self.num_experts,
            top_k=self.top_k,
            num_ranks=self.num_ranks,
        )

    @property
    def capacity(self) -> Capacity:
        """Rows of pool and ring."""
        return capacity(
            self.num_ranks,
            self.max_tokens,
            self.top_k,
            self.num_local,
            block_ms=(self.grid.block_m,),
            ring_rows=self.ring_rows,
        )


@dataclass(frozen=True, slots=True)
class Array:
    """Cells first, first + step, ... of each rank."""

    first: int
    size: int
    step: int = 1


@dataclass(frozen=True, slots=True)
class Words:
    """The map of one shape."""

    shape: Shape
    layout: Workspace
    ring_blocks: int
    mask_words: int  # of one pool block
    num_cells: int  # of one rank
    arrays: dict[str, Array] = field(repr=False)

    def at(self, name: str, rank: int, i: int = 0) -> int:
        """The cell of element `i` of an array of `rank`."""
        array = self.arrays[name]
        if not 0 <= i < array.size:
            raise Violation(f"out of bounds: {name}[{i}] on rank {rank} has {array.size} elements")
        return rank * self.num_cells + array.first + i * array.step

    def name(self, cell: int) -> str:
        """The array and element of a cell, for people."""
        rank, inner = divmod(cell, self.num_cells)
        for name, array in self.arrays.items():
            i, rest = divmod(inner - array.first, array.step)
            if 0 <= i < array.size and rest == 0:
                return f"rank {rank} {name}[{i}]"
        return f"rank {rank} cell {inner}"

    def cells_of(self, name: str, rank: int) -> range:
        """All cells of an array of one rank."""
        array = self.arrays[name]
        first = rank * self.num_cells + array.first
        return range(first, first + array.size * array.step, array.step)

    @property
    def cleaned(self) -> tuple[str, ...]:
        """Control arrays that must be zero between calls."""
        return tuple(r.name for r in self.layout.section("control") if r.is_cleaned)

    @property
    def control(self) -> tuple[str, ...]:
        """All control arrays: what a reset zeroes."""
        return tuple(r.name for r in self.layout.section("control"))


@lru_cache(maxsize=64)
def words(shape: Shape) -> Words:
    """The map of `shape`; made once."""
    sizes = shape.capacity
    layout = workspace(shape.problem, sizes, min_block_n=MODEL_BLOCK_N)
    arrays = {
        r.name: Array(r.offset // 4, r.num_bytes // r.item_bytes, r.item_bytes // 4)
        for r in layout.section("control")
    }
    tokens, slots, ring = shape.max_tokens, shape.max_tokens * shape.top_k, sizes.ring_rows
    ring_blocks = ring // shape.grid.block_m
    stages = shape.num_sms * shape.num_stages
    data = {
        "input_token": (tokens, 1),
        "input_topk_idx": (slots, 1),
        "input_topk_weights": (slots, 1),
        "l1_token": (ring, 1),
        "l1_topk_weights": (ring, 1),
        "l2_token": (ring_blocks * shape.grid.num_l1_n, 1),
        "combine_token": (slots * shape.grid.num_l2_n, 1),
        "recv_stats": (shape.num_local, 1),
        "stage_full": (stages, PHASE_WORD),
        "stage_empty": (stages, PHASE_WORD),
        "stage_tokens": (stages, 1),
        "stage_weights": (stages, 1),
        "sm_sync": (shape.num_sms * SM_MEETINGS, PHASE_WORD),
        "running": (1, 1),
    }
    end = layout.control_bytes // 4
    for name, (size, step) in data.items():
        arrays[name] = Array(end, size, step)
        end += size * step
    return Words(
        shape=shape,
        layout=layout,
        ring_blocks=ring_blocks,
        mask_words=mask_words(shape.grid.num_l1_n),
        num_cells=end,
        arrays=arrays,
    )

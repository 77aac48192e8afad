"""Launches as values: what a kernel is compiled for, its grid, and why. Launchers add nothing.

`constants()` of a configuration are the compile-time arguments that it decides, by the names that
the kernel has for them; all others follow from tensors and the recipe.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

Constants = dict[str, int | bool]

WARPGROUPS = 2  # math warpgroups of a CTA
SLAB = 64  # weight rows of one wgmma
K_BLOCK = 128  # columns of K under one activation scale
NUM_WARPS = 4  # of the warpgroup that a Gluon kernel starts with


def next_power_of_2(n: int, least: int = 1) -> int:
    """The least power of two that is neither below n nor below `least`.

    >>> next_power_of_2(5), next_power_of_2(0), next_power_of_2(5, 32)
    (8, 1, 32)
    """
    return max(1 << max(n - 1, 0).bit_length(), least)


class Config(Protocol):
    """What a kernel is compiled for."""

    def constants(self) -> Constants:
        """Compile-time arguments and launch options."""
        ...


@dataclass(frozen=True, slots=True)
class GemmSwapAb:
    """Grouped GEMM with weights as wgmma's M and tokens as its N, for few rows an expert."""

    block_m: int  # tokens of a tile
    slabs: int  # of 64 weight rows, for each of two warpgroups
    k_blocks: int  # blocks of 128 columns in a stage
    num_stages: int
    group_m: int = 1  # token tiles that share each tile of weights
    evict_first: bool = True  # weights leave L2 first: no later tile reads them again
    max_in_flight: int = 0  # stages that a fused launch asks for at once; 0: all there are
    math_regs: int = 232
    load_regs: int = 40

    @property
    def block_n(self) -> int:
        """Weight rows of a tile."""
        return SLAB * WARPGROUPS * self.slabs

    @property
    def block_k(self) -> int:
        """Columns of a stage."""
        return K_BLOCK * self.k_blocks

    @property
    def is_dynamic(self) -> bool:
        """Whether CTAs take their tiles from a counter: they stride over them."""
        return False

    @property
    def has_items(self) -> bool:
        """Whether its work items are written down before the launch."""
        return False

    def constants(self) -> Constants:
        """Of `gemm_swap_ab_kernel`."""
        return {
            "TOKENS": self.block_m, "IS_STREAM": self.evict_first, "SLABS": self.slabs,
            "DEPTH": self.k_blocks, "STAGES": self.num_stages, "SPAN": self.group_m,
            "MATH_REGS": self.math_regs, "LOAD_REGS": self.load_regs, "num_warps": NUM_WARPS,
        }  # fmt: skip

    def __str__(self) -> str:
        return f"swap_ab {self.block_m}x{self.block_n}x{self.block_k}, {self.num_stages} stages"


SCHEDULES = ("strided", "static", "dynamic")


@dataclass(frozen=True, slots=True)
class Gemm:
    """Grouped GEMM with tokens as wgmma's M: 128 tokens x 256 weight rows, FP8, for many rows."""

    num_stages: int
    num_image_stages: int = 1  # stages of FP4 images, or of jobs that decode ahead
    group_m: int = 8  # token tiles of an expert that come together
    math_regs: int = 232
    decode_regs: int = 0  # of the warpgroup that decodes FP4
    load_regs: int = 40
    # static: work items are written before the launch, so that half tiles spread evenly;
    # dynamic: CTAs take the items from a counter, and L2 follows L1 tile by tile
    schedule: str = "strided"
    decode_ahead: int = 0  # K blocks of each ring that FP4 is decoded into once for many tiles
    decode_chunk: int = 0  # K blocks that are decoded together; follows from the width
    block_m: int = 128

    @property
    def block_n(self) -> int:
        """Weight rows of a tile."""
        return 256

    @property
    def block_k(self) -> int:
        """Columns of a stage."""
        return K_BLOCK

    @property
    def is_dynamic(self) -> bool:
        """Whether CTAs take their tiles from a counter."""
        return self.schedule == "dynamic"

    @property
    def has_items(self) -> bool:
        """Whether its work items are written down before the launch."""
        return self.schedule != "strided" or self.decode_ahead > 0

    def constants(self) -> Constants:
        """Of `gemm_kernel`."""
        constants: Constants = {
            "HAS_ITEMS": self.has_items, "DYNAMIC": self.is_dynamic,
            "DEPTH": self.decode_ahead, "CHUNK": self.decode_chunk if self.decode_ahead else 0,
            "STAGES": self.num_stages, "IMAGES": self.num_image_stages,
            "SPAN": 0 if self.has_items else self.group_m, "MATH_REGS": self.math_regs,
            "DECODE_REGS": self.decode_regs, "LOAD_REGS": self.load_regs, "num_warps": NUM_WARPS,
        }  # fmt: skip
        if self.decode_ahead:
            constants["launch_cooperative_grid"] = True  # its CTAs wait for each other
        return constants

    def __str__(self) -> str:
        how = f", {self.schedule}" if self.schedule != "strided" else ""
        if self.decode_ahead:
            how = f", decoded {self.decode_ahead} blocks ahead"
        return f"gemm {self.block_m}x256x128, {self.num_stages} stages{how}"


@dataclass(frozen=True, slots=True)
class GemmTmem:
    """Blackwell's grouped GEMM: weights are the MMA's M, tokens its N, sums in tensor memory."""

    block_m: int  # tokens of a tile
    block_k: int
    num_stages: int
    num_sums: int  # tiles, or promoted K blocks, whose sums stand in tensor memory
    chunk: int  # tokens that the epilogue has in registers
    num_warps: int = NUM_WARPS  # of the epilogue
    group_m: int = 1  # token tiles that share each tile of weights
    load_regs: int = 40
    block_rows: int = 128  # weight rows of one MMA
    num_halves: int = 2  # of so many rows in a tile; a gated linear has two
    num_ctas: int = 1  # that share a product; 2: a pair of a cluster, each with rows of its own
    schedule: str = "strided"  # dynamic: tiles come from a counter; sorted: large experts' first
    math_regs: int = 0  # fused: of each of two warpgroups that take tiles in turn
    decode_regs: int = 0  # fused, w4a16: of the warpgroup that decodes

    @property
    def block_n(self) -> int:
        """Weight rows of a tile, in each CTA."""
        return self.num_halves * self.block_rows

    @property
    def is_dynamic(self) -> bool:
        """Whether CTAs take their tiles from a counter: those that begin late cost nothing."""
        return self.schedule != "strided"

    @property
    def has_items(self) -> bool:
        """Whether its work items are written down before the launch."""
        return False

    def constants(self) -> Constants:
        """Of `gemm_tmem_kernel`."""
        pair: Constants = {"PAIR": True, "num_ctas": 2} if self.num_ctas == 2 else {}
        return {
            "TOKENS": self.block_m, "BLOCK_K": self.block_k, "STAGES": self.num_stages,
            "SUMS": self.num_sums, "CHUNK": self.chunk, "SPAN": self.group_m,
            "HALVES": self.num_halves, "DYNAMIC": self.is_dynamic, "LOAD_REGS": self.load_regs,
            "NUM_WARPS": self.num_warps, "num_warps": self.num_warps,
            **pair,
        }  # fmt: skip

    def __str__(self) -> str:
        size = f"{self.block_m}x{self.block_n}x{self.block_k}"
        how = "" if self.schedule == "strided" else f", {self.schedule}"
        how += ", pairs of CTAs" if self.num_ctas == 2 else ""
        return f"tmem {size}, {self.num_stages} stages, {self.num_sums} sums{how}"


Tile = GemmSwapAb | Gemm


@dataclass(frozen=True, slots=True)
class Mega:
    """The fused launch: dispatch, both GEMMs and combine."""

    tile: GemmSwapAb | GemmTmem
    max_slots: int  # of one rank that the kernel is compiled for; 0 over several ranks
    max_experts: int  # of one rank, a power of two
    max_top_k: int  # a power of two
    weights_ahead: int  # stages of a CTA's first weights that come before all tokens are in
    pool_rows: int  # of one rank
    wave_rows: int = 0  # rows of a wave where the pool is a ring; 0: it holds all rows

    @property
    def is_ring(self) -> bool:
        """Whether later waves reuse the pool."""
        return self.wave_rows > 0

    def constants(self) -> Constants:
        """Of `mega_kernel` and `mega_tmem_kernel`."""
        t = self.tile
        if isinstance(t, GemmTmem):
            own: Constants = {
                "BLOCK_K": t.block_k, "SUMS": t.num_sums, "CHUNK": t.chunk,
                "DECODE_REGS": t.decode_regs,
            }  # fmt: skip
        else:
            own = {"SLABS": t.slabs, "DEPTH": t.k_blocks, "IN_FLIGHT": t.max_in_flight}
        return own | {
            "EXPERTS": self.max_experts, "SLOTS": self.max_slots, "K_SLOTS": self.max_top_k,
            "TOKENS": t.block_m, "STAGES": t.num_stages, "MATH_REGS": t.math_regs,
            "LOAD_REGS": t.load_regs, "RING": self.is_ring, "num_warps": NUM_WARPS,
            "launch_cooperative_grid": True,
        }  # fmt: skip

    def __str__(self) -> str:
        ring = f", ring of {self.pool_rows} rows" if self.is_ring else ""
        slots = f", up to {self.max_slots} slots" if self.max_slots else ""
        return f"{self.tile}{slots}{ring}"


@dataclass(frozen=True, slots=True)
class Permute:
    """Tokens quantised into the expert-sorted pool; small calls find every row on the way."""

    is_small: bool
    block_m: int
    cols: int  # of a program
    num_warps: int
    max_slots: int
    max_experts: int
    max_top_k: int
    row_align: int  # rows of the pool at which an expert begins
    is_sorted: bool = False  # tiles of experts with many rows come first

    def constants(self) -> Constants:
        """Of `_pool_kernel`."""
        return {
            "IS_SMALL": self.is_small, "BLOCK": self.block_m, "ALIGN": self.row_align,
            "COLS": self.cols,
            "SLOTS": self.max_slots, "E": self.max_experts, "K_SLOTS": self.max_top_k,
            "SORTED": self.is_sorted, "num_warps": self.num_warps,
        }  # fmt: skip

    def __str__(self) -> str:
        return f"{self.cols} columns a program, {self.num_warps} warps"


@dataclass(frozen=True, slots=True)
class Place:
    """The row of each slot, the list of tiles, and the work items of both GEMMs."""

    block_m: int
    chunk: int  # slots of a program
    count_chunk: int  # slots that are counted together
    is_counted: bool  # counts of all chunks are known from launches before
    max_experts: int
    max_ctas: int  # CTAs that get work items, to a power of two; 0: there are no items
    is_dynamic: bool
    num_warps: int
    row_align: int  # rows of the pool at which an expert begins
    is_sorted: bool = False  # tiles of experts with many rows come first

    def constants(self) -> Constants:
        """Of Hopper's `_place_kernel`."""
        return {
            "BLOCK": self.block_m, "ALIGN": self.row_align, "CHUNK": self.chunk,
            "AT_ONCE": self.count_chunk,
            "IS_COUNTED": self.is_counted, "E": self.max_experts, "CTAS": self.max_ctas,
            "IS_DYNAMIC": self.is_dynamic, "SORTED": self.is_sorted, "num_warps": self.num_warps,
        }  # fmt: skip

    def __str__(self) -> str:
        return f"{self.chunk} slots a program, {self.num_warps} warps"


@dataclass(frozen=True, slots=True)
class PlaceGroups:
    """Blackwell's grouped GEMM alone: its tiles, the row of each, scales where the MMA's lie."""

    block_m: int
    max_groups: int  # a power of two
    cols: int  # scales of a row at a time
    is_sorted: bool
    num_warps: int = NUM_WARPS

    def constants(self) -> Constants:
        """Of `_place_groups_kernel`."""
        return {
            "TOKENS": self.block_m, "GROUPS": self.max_groups, "COLS": self.cols,
            "SORTED": self.is_sorted, "num_warps": self.num_warps,
        }  # fmt: skip

    def __str__(self) -> str:
        order = "large groups first" if self.is_sorted else "in order of groups"
        return f"a tile of {self.block_m} rows a program, {order}"


@dataclass(frozen=True, slots=True)
class Window:
    """Split: tiles and work items of a window of the rows, and which slots have rows in it."""

    block_m: int
    chunk: int  # slots of a program
    chunks: int
    max_experts: int
    first_row: int  # of the call's rows that the window begins with
    num_rows: int
    is_whole: bool  # it is the only window: slots keep their rows
    waves: tuple[int, int]  # of work items, of L1 and L2; (0, 0): there are none
    max_ctas: int  # CTAs that work items go to round robin, to a power of two; 0: no items
    is_dynamic: bool
    num_warps: int = 4

    def constants(self) -> Constants:
        """Of `_window_kernel`."""
        return {
            "BLOCK": self.block_m, "CHUNK": self.chunk, "CHUNKS": self.chunks,
            "E": self.max_experts, "IS_WHOLE": self.is_whole, "CTAS": self.max_ctas,
            "IS_DYNAMIC": self.is_dynamic, "num_warps": self.num_warps,
        }  # fmt: skip

    def __str__(self) -> str:
        rows = "all rows" if self.is_whole else f"{self.num_rows} rows from {self.first_row} on"
        return f"{rows}, {self.chunk} slots a program"


@dataclass(frozen=True, slots=True)
class Count:
    """Rows of each expert in each chunk of slots."""

    chunk: int
    max_experts: int
    num_warps: int = 1

    def constants(self) -> Constants:
        """Of both backends' `_count_kernel`."""
        return {"CHUNK": self.chunk, "E": self.max_experts, "num_warps": self.num_warps}

    def __str__(self) -> str:
        return f"{self.chunk} slots a program"


@dataclass(frozen=True, slots=True)
class Scan:
    """Running sums of the counts over all chunks."""

    max_chunks: int
    num_warps: int = 1

    def constants(self) -> Constants:
        """Of `_scan_kernel`."""
        return {"CHUNKS": self.max_chunks, "num_warps": self.num_warps}

    def __str__(self) -> str:
        return "one program an expert"


@dataclass(frozen=True, slots=True)
class Sort:
    """Portable: the row of each slot and the maps of tiles."""

    block_m: int
    chunk: int
    max_experts: int
    num_warps: int = 4

    def constants(self) -> Constants:
        """Of portable's `_place_kernel`."""
        return {
            "TILE_M": self.block_m, "CHUNK": self.chunk, "E": self.max_experts,
            "num_warps": self.num_warps,
        }  # fmt: skip

    def __str__(self) -> str:
        return f"{self.chunk} slots a program, {self.num_warps} warps"


@dataclass(frozen=True, slots=True)
class Quantize:
    """Rows into an activation format, or just the routing checked."""

    rows: int  # of a program
    cols: int
    num_warps: int
    is_deep: bool  # more row tiles than the grid's second axis holds
    group: int = 0  # FP4: values under a scale, in the kernel that packs words; 0: the general one.
    # Rows that begin between two words, which a view of other rows may have, are copied first.

    def constants(self) -> Constants:
        """Of `_dispatch_kernel`, or of `_pack_kernel` where there are groups."""
        constants: Constants = {
            "ROWS": self.rows, "IS_DEEP": self.is_deep, "num_warps": self.num_warps,
        }  # fmt: skip
        if self.group:
            return {**constants, "BLOCKS": self.cols // self.group}
        return {**constants, "COLS": self.cols}

    def __str__(self) -> str:
        return f"{self.rows}x{self.cols} values a program, {self.num_warps} warps"


@dataclass(frozen=True, slots=True)
class PortableGemm:
    """One linear in plain Triton: the shape of a program's work and how it is pipelined."""

    block_m: int  # tokens: the MMA's N operand
    block_n: int  # weight rows: the MMA's M operand
    block_k: int
    num_warps: int
    num_stages: int
    group_m: int = 1  # token tiles that run side by side on the same weights; 1 is along N

    def constants(self) -> Constants:
        """Of `_gated_kernel` and `_linear_kernel`."""
        return {
            "BLOCK_M": self.block_m, "BLOCK_N": self.block_n, "BLOCK_K": self.block_k,
            "GROUP_M": self.group_m, "num_warps": self.num_warps, "num_stages": self.num_stages,
        }  # fmt: skip

    def __str__(self) -> str:
        size = f"{self.block_m}x{self.block_n}x{self.block_k}"
        return f"triton {size}, {self.num_stages} stages, {self.num_warps} warps"


@dataclass(frozen=True, slots=True)
class Combine:
    """The rows of each token added up."""

    cols: int  # of a program
    num_warps: int
    is_deep: bool

    def constants(self) -> Constants:
        """Of `_combine_kernel`."""
        return {"COLS": self.cols, "IS_DEEP": self.is_deep, "num_warps": self.num_warps}

    def __str__(self) -> str:
        return f"{self.cols} columns a program, {self.num_warps} warps"


@dataclass(frozen=True, slots=True)
class Copy:
    """Rows from where a call has them to where launches read them, or back."""

    cols: int  # of a program
    num_warps: int
    max_slots: int = 0  # of a token, to a power of two; 0: rows alone
    max_passes: int = 0  # launches whose tokens are counted, likewise; 0: none

    def constants(self) -> Constants:
        """Of `_put_kernel`, `_copy_inputs_kernel` and `_copy_output_kernel`."""
        constants: Constants = {"COLS": self.cols, "num_warps": self.num_warps}
        slots: Constants = {"SLOTS": self.max_slots} if self.max_slots else {}
        passes: Constants = {"PASSES": self.max_passes} if self.max_passes else {}
        return constants | slots | passes

    def __str__(self) -> str:
        return f"{self.cols} columns a program, {self.num_warps} warps"


@dataclass(frozen=True, slots=True)
class ReadArgs:
    """The arguments of a replay."""

    num_warps: int

    def constants(self) -> Constants:
        """Of `_read_args_kernel`."""
        return {"num_warps": self.num_warps}

    def __str__(self) -> str:
        return "one slot of host memory"


@dataclass(frozen=True, slots=True)
class Decode:
    """Rows that come quantised, as BF16."""

    values: int  # of a program
    num_warps: int

    def constants(self) -> Constants:
        """Of `_decode_kernel`."""
        return {"VALUES": self.values, "num_warps": self.num_warps}

    def __str__(self) -> str:
        return f"{self.values} values a program, {self.num_warps} warps"


@dataclass(frozen=True, slots=True)
class Prepare:
    """Portable's grouped GEMM alone: tile maps of the groups, rows decoded."""

    block_m: int
    max_groups: int  # a power of two
    chunk: int  # rows or tiles of a group at a time
    values: int  # that a program decodes
    is_sorted: bool  # large groups come first
    num_warps: int

    def constants(self) -> Constants:
        """Of `_prepare_kernel`."""
        return {
            "TILE_M": self.block_m, "GROUPS": self.max_groups, "CHUNK": self.chunk,
            "VALUES": self.values, "SORTED": self.is_sorted, "num_warps": self.num_warps,
        }  # fmt: skip

    def __str__(self) -> str:
        order = "large groups first" if self.is_sorted else "in order of groups"
        return f"a group a program, {order}"


@dataclass(frozen=True, slots=True)
class Launch:
    """One kernel launch of a call."""

    name: str  # "put", "mega"; or "count", "scan", "place", "permute", "l1", "l2", "combine", ...
    kernel: str  # the function that is launched
    grid: tuple[int, ...]
    config: Config
    why: str
    partition: str = ""  # split: the part of the SMs that it runs on, "l1" or "l2"; "": all
    overlaps: bool = False  # it is placed while the launch before it on its stream ends (PDL)

    @property
    def num_ctas(self) -> int:
        """CTAs of a persistent launch: its grid is one number."""
        (num,) = self.grid
        return num


@dataclass(frozen=True, slots=True)
class Pass:
    """The launches of one set of experts, routed or shared, in order."""

    experts: str  # "routed", "shared", or "routed and shared"
    num_slots: int
    num_experts: int
    launches: tuple[Launch, ...]

    def find(self, name: str) -> Launch | None:
        """The launch of that name, if the pass has one."""
        return next((one for one in self.launches if one.name == name), None)

    def __getitem__(self, name: str) -> Launch:
        launch = self.find(name)
        assert launch is not None, f"no launch {name}"
        return launch

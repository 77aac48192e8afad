"""Costs: what one block asks of the tensor cores, of HBM and of its SM's port, from a schedule."""

from __future__ import annotations

from dataclasses import dataclass
from math import exp

from megamoe.formats.spec import recipe_named
from megamoe.layout.regions import align_up
from megamoe.simulator.blocks import L1, L2
from megamoe.simulator.constants import DECODE_US, DECODED_US, HELD_BITS, MATH_US, Constants
from megamoe.simulator.schedule import Experts, Schedule
from megamoe.simulator.traffic import RowBytes

STEP = 128  # of K: the step in which weight decoding was measured
MATH_ROWS = 256  # weight rows of the tiles in MATH_US
TILE = 128 * 128  # outputs of the tile that `epilogue_us` was fitted on
WIDE = 128  # bytes of a copy's row from which HBM is read at `wide_share`


@dataclass(frozen=True, slots=True)
class BlockCost:
    """One block of one linear."""

    weight_bytes: float  # of the tile, all of K
    again: float  # share of them that a later row block of the expert reads from HBM again
    row_in_bytes: float  # of one row, all of K: from HBM once, from L2 for every block
    row_out_bytes: float  # of one row, to HBM, this block's columns
    math_us: tuple[float, ...]  # by rows computed / row_step
    row_step: int
    epilogue_us: float
    epilogue_row_us: float  # more of it for each valid row
    decode_us: float  # once for the tile's weights, which all tiles of tokens share
    lead_us: float  # how far a full ring of stages lets loads run ahead

    def epilogue(self, rows: int) -> float:
        """Time of a block's epilogue: of the tile, or of its valid rows."""
        return self.epilogue_us + self.epilogue_row_us * rows

    def math(self, rows: int) -> float:
        """Tensor time of a block with `rows` valid rows."""
        return self.math_us[-(-rows // self.row_step)]


@dataclass(frozen=True, slots=True)
class Costs:
    """All that the event loop needs; times in us, rates as us a byte."""

    l1: BlockCost
    l2: BlockCost
    rows: RowBytes
    result_bytes: float  # of one row, the columns of one L2 block
    hbm: float  # us a byte of the matrix launches
    move: float  # us a byte of launches that only move rows
    port: float  # us a byte from L2 into one SM
    link: float  # us a byte in one direction of one rank
    is_overlapped: bool  # the epilogue runs in warps of its own, beside the next block's math
    block_us: float = 0.0  # of a block's math beside its steps
    clock_drop: float = 0.0
    clock_us: float = 1.0
    is_shared: bool = False  # ranks share a GPU, and so its memory

    def clock(self, us: float) -> float:
        """The chip's clock so far into a call, of what it begins with."""
        return 1.0 - self.clock_drop * (1.0 - exp(-us / self.clock_us))

    def of(self, phase: str) -> BlockCost:
        """The linear of a phase."""
        return self.l1 if phase == L1 else self.l2


def costs(how: Schedule, constants: Constants, experts: Experts | None = None) -> Costs:
    """The costs of a schedule, of its routed experts or of others."""
    hw, of = how.hardware, experts or how.experts
    reached = hw.hbm_gbs.reached.value * 1e3  # bytes a us
    hbm = 1.0 / (reached * _stream_share(how, constants))
    rows = RowBytes.of(how)
    return Costs(
        l1=_block(how, of, constants, L1, rows, hbm),
        l2=_block(how, of, constants, L2, rows, hbm),
        rows=rows,
        result_bytes=rows.results / of.l2.num_n,
        hbm=hbm,
        move=1.0 / (reached * constants.row_share),
        port=1.0 / (constants.sm_gbs * 1e3),
        link=1.0 / (hw.nvlink_gbs.reached.value * constants.link_share * 1e3),
        is_overlapped=how.has_epilogue_warps,
        block_us=constants.split_us if how.mode == "split" else constants.block_us,
        clock_drop=constants.clock_drop if how.is_own_stream else 0.0,
        clock_us=constants.clock_us,
        is_shared=how.shares_gpu,
    )


def _stream_share(how: Schedule, constants: Constants) -> float:
    """Of HBM, by who reads weights and how long the rows of a copy are."""
    if how.is_own_stream:
        return constants.own_share * (constants.crowd_share if how.shares_gpu else 1.0)
    return constants.wide_share if how.copy_bytes >= WIDE else constants.stream_share


def _block(
    how: Schedule, of: Experts, constants: Constants, phase: str, rows: RowBytes, hbm: float
) -> BlockCost:
    p, tile = of.problem, of.linear(phase)
    bits = recipe_named(p.recipe).weights.bits_per_value
    if how.is_own_stream:
        bits = HELD_BITS.get(p.recipe, bits)
    width, depth = 2 * p.intermediate, p.hidden
    row_in, row_out = rows.tokens, rows.acts / tile.num_n
    if how.writes_gate_up:
        row_out = 2.0 * tile.block_n
    if phase == L2:
        width, depth = p.hidden, p.intermediate
        row_in, row_out = rows.acts, 0.0  # results are charged where they land
    l2_bytes = constants.l2_share * how.hardware.l2_bytes
    row_step = how.mma_rows or tile.block_m
    computed = range(0, align_up(tile.block_m, row_step) + 1, row_step)
    size = tile.block_m * tile.block_n / TILE
    return BlockCost(
        weight_bytes=tile.block_n * depth * bits / 8,
        again=max(0.0, 1.0 - l2_bytes / (width * depth * bits / 8)),
        row_in_bytes=row_in,
        row_out_bytes=row_out,
        math_us=tuple(
            _math_us(how, of, tile.block_n, m + constants.mma_rows * (m > 0), depth)
            / (constants.fp4_share if of.mma == "fp4" else constants.math_share)
            for m in computed
        ),
        row_step=row_step,
        epilogue_us=0.0 if how.has_epilogue_warps else constants.epilogue_us * max(1.0, size),
        epilogue_row_us=constants.epilogue_us * size / tile.block_m * how.has_epilogue_warps,
        decode_us=DECODE_US * depth / STEP * tile.block_n / MATH_ROWS if how.decodes_once else 0.0,
        lead_us=tile.ring_bytes * hbm * how.num_sms,
    )


def _math_us(how: Schedule, of: Experts, block_n: int, rows: float, depth: int) -> float:
    """All steps of a block: the tensor rate, or Hopper's FP4 decoding where that is slower."""
    hw = how.hardware
    per_sm = hw.tensor(of.mma).reached.value * 1e6 / hw.num_sms  # FLOP a us
    step_us = 2 * rows * block_n * STEP / per_sm
    weights = recipe_named(of.problem.recipe).weights.element
    if how.backend == "hopper" and weights.bits == 4 and rows:
        known = DECODED_US if how.decodes_once else MATH_US[of.block_m]
        if how.mma_rows:
            known *= rows / of.block_m
        step_us = max(step_us, known * block_n / MATH_ROWS)
    return step_us * depth / STEP

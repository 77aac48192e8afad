"""Costs: what one block asks of the tensor cores, of HBM and of its SM's port, from a plan."""

from __future__ import annotations

from dataclasses import dataclass

from megamoe.formats.spec import recipe_named
from megamoe.studies.deep_gemm.blocks import L1, L2, aligned_m
from megamoe.simulator.constants import Constants
from megamoe.studies.deep_gemm.heuristics.hopper import HELD_BITS, MATH_US
from megamoe.studies.deep_gemm.plan import Plan
from megamoe.simulator.traffic import RowBytes

STEP = 128  # of K: the step in which weight decoding was measured
MMA_ROWS = 16  # A036: Blackwell computes rows up to the next 16; Hopper's tile is computed whole
TILE = 128 * 128  # outputs of the tile that `epilogue_us` was fitted on


@dataclass(frozen=True, slots=True)
class BlockCost:
    """One block of one linear."""

    weight_bytes: float  # of the tile, all of K
    again: float  # share of them that a later row block of the expert reads from HBM again
    row_in_bytes: float  # of one row, all of K: from HBM once, from L2 for every block
    row_out_bytes: float  # of one row, to HBM, this block's columns
    math_us: tuple[float, ...]  # by rows computed / row_step
    row_step: int

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
    lead_us: float  # how far a full ring of stages lets loads run ahead
    epilogue_us: float
    is_overlapped: bool  # the epilogue runs in warps of its own, beside the next block's math

    def of(self, phase: str) -> BlockCost:
        """The linear of a phase."""
        return self.l1 if phase == L1 else self.l2


def costs(plan: Plan, constants: Constants, *, is_grouped: bool = False) -> Costs:
    """The costs of a plan. `is_grouped`: L1 writes gate and up in BF16 for a launch of its own."""
    hw, tiles = plan.hardware, plan.tiles
    reached = hw.hbm_gbs.reached.value * 1e3  # bytes a us
    is_own = _is_own(plan, is_grouped=is_grouped)
    hbm = 1.0 / (reached * (constants.own_share if is_own else constants.stream_share))
    ring = plan.num_stages * plan.smem.stage_bytes
    rows = RowBytes.of(plan.problem, plan.combine)
    return Costs(
        l1=_block(plan, constants, L1, rows, is_grouped=is_grouped),
        l2=_block(plan, constants, L2, rows, is_grouped=is_grouped),
        rows=rows,
        result_bytes=rows.results / plan.grid.num_l2_n,
        hbm=hbm,
        move=1.0 / (reached * constants.row_share),
        port=1.0 / (constants.sm_gbs * 1e3),
        link=1.0 / (hw.nvlink_gbs.reached.value * 1e3),
        lead_us=ring * hbm * plan.num_sms,
        epilogue_us=constants.epilogue_us * max(1.0, tiles.block_m * tiles.block_n / TILE),
        is_overlapped=plan.backend == "blackwell",
    )


def _is_own(plan: Plan, *, is_grouped: bool) -> bool:
    """Whether the launches are this library's, on a machine where they were measured."""
    return plan.backend == "hopper" and not is_grouped


def _block(
    plan: Plan, constants: Constants, phase: str, rows: RowBytes, *, is_grouped: bool
) -> BlockCost:
    problem, tiles = plan.problem, plan.tiles
    bits = recipe_named(problem.recipe).weights.bits_per_value
    if _is_own(plan, is_grouped=is_grouped):
        bits = HELD_BITS.get(problem.recipe, bits)
    width, depth = 2 * problem.intermediate, problem.hidden
    row_in, row_out = rows.tokens, rows.acts / (width / tiles.block_n)
    if is_grouped:
        row_out = 2.0 * tiles.block_n
    if phase == L2:
        width, depth = problem.hidden, problem.intermediate
        row_in, row_out = rows.acts, 0.0  # results are charged where they land
    phase_bytes = width * depth * bits / 8
    room = constants.l2_share * plan.hardware.l2_bytes
    row_step = MMA_ROWS if plan.backend == "blackwell" else tiles.block_m
    computed = range(0, aligned_m(tiles.block_m, row_step) + 1, row_step)
    return BlockCost(
        weight_bytes=tiles.block_n * depth * bits / 8,
        again=max(0.0, 1.0 - room / phase_bytes),
        row_in_bytes=row_in,
        row_out_bytes=row_out,
        math_us=tuple(_math_us(plan, m, depth) for m in computed),
        row_step=row_step,
    )


def _math_us(plan: Plan, rows: int, depth: int) -> float:
    """All steps of a block: the tensor rate, or Hopper's FP4 decoding where that is slower."""
    tiles, hw = plan.tiles, plan.hardware
    per_sm = hw.tensor(tiles.mma).reached.value * 1e6 / hw.num_sms  # FLOP a us
    step_us = 2 * rows * tiles.block_n * STEP / per_sm
    weights = recipe_named(plan.problem.recipe).weights.element
    if plan.backend == "hopper" and weights.bits == 4 and rows:
        step_us = max(step_us, MATH_US[tiles.block_m])
    return step_us * depth / STEP

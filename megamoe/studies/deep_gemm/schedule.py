"""The reference system's plan as a schedule that the simulator plays; every picture says: study."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from megamoe.formats.spec import recipe_named
from megamoe.layout.rows import stored_bytes
from megamoe.simulator.blocks import Block
from megamoe.simulator.schedule import Experts, Linear, Schedule, Step
from megamoe.studies.deep_gemm.plan import Plan

NAME = "deep_gemm"
MMA_ROWS = 16  # A036: Blackwell computes rows up to the next 16; Hopper's tile is computed whole


@dataclass(frozen=True)
class Waves:
    """Waves of experts; a slot of the ring is reused when its last owner is done."""

    plan: Plan

    def blocks(self, experts: Experts, rows: Sequence[int]) -> Iterator[Block]:
        """The order of claims."""
        return self.plan.blocks(rows)

    def waits_for(self, experts: Experts, rows: Sequence[int]) -> tuple[int, ...]:
        """Pool block b lies in slot b % ring_blocks."""
        num = self.plan.grid.pool_offsets(rows)[-1]
        if not self.plan.capacity.is_ring:
            return (-1,) * num
        return tuple(max(b - self.plan.ring_blocks, -1) for b in range(num))


def schedule_of(plan: Plan) -> Schedule:
    """What the simulator plays of a plan of the reference system."""
    p, tiles, grid = plan.problem, plan.tiles, plan.grid
    ring = plan.num_stages * plan.smem.stage_bytes
    linears = (
        Linear(tiles.block_m, tiles.block_n, num, ring) for num in (grid.num_l1_n, grid.num_l2_n)
    )
    is_blackwell = plan.backend == "blackwell"
    k1 = plan["k1_sms"] if plan.mode == "split" else None
    assert k1 is None or isinstance(k1, int)
    return Schedule(
        problem=p,
        hardware=plan.hardware,
        backend=plan.backend,
        mode=plan.mode,
        combine=plan.combine,
        experts=Experts(p, p.num_local_experts, tiles.mma, *linears),
        num_sms=plan.num_sms,
        order=Waves(plan),
        steps=_steps(plan),
        assignment="static" if plan.deal == "static" else "ticket",
        l1_sms=k1,
        is_own_stream=not is_blackwell,
        peels=True,
        mma_rows=MMA_ROWS if is_blackwell else None,
        has_epilogue_warps=is_blackwell,
        copy_bytes=tiles.block_k * recipe_named(p.recipe).weights.element.bits // 8,
        study=NAME,
    )


def _steps(plan: Plan) -> tuple[Step, ...]:
    """Staged: its phases as launches one after the other."""
    if plan.mode != "staged":
        return ()
    tokens = stored_bytes(plan.problem.hidden, recipe_named(plan.problem.recipe).acts)
    is_group = plan.problem.num_ranks > 1
    return (
        Step("permute", "move", row_bytes=2 * tokens),
        *((Step("rows sent", "send"),) if is_group else ()),
        Step("l1", "gemm"),
        Step("l2", "gemm"),
        *((Step("results sent", "return"),) if is_group else ()),
        Step("combine", "combine"),
    )

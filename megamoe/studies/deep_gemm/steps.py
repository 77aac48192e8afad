"""The steps of `plan`, one decision each: ask the tables, let an override speak, check, record."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import lcm

from megamoe.errors import CapacityError, NotAvailable, ShapeError, require
from megamoe.hardware import Hardware
from megamoe.layout.regions import Workspace, align_up, ceil_div
from megamoe.planner.choice import SharedMemory
from megamoe.planner.load import even_rows
from megamoe.problem import Problem
from megamoe.studies.deep_gemm.blocks import Grid, num_m_blocks
from megamoe.studies.deep_gemm.capacity import Capacity, capacity, scale_pool_rows
from megamoe.studies.deep_gemm.choice import (
    MAX_STAGES,
    MIN_STAGES,
    Picked,
    Role,
    Tiles,
    num_registers,
    num_stages,
)
from megamoe.studies.deep_gemm.deal import DEALS
from megamoe.studies.deep_gemm.heuristics import BACKENDS, BY_ARCH, Backend
from megamoe.studies.deep_gemm.overrides import Picks
from megamoe.studies.deep_gemm.waves import WAVE_RULES, experts_per_wave
from megamoe.studies.deep_gemm.workspace import ring_bytes, workspace

MODES = ("fused", "staged", "split")
COMBINES = ("bf16", "fp8")
RING_SHARE = 16  # the pools may take one part in this many of HBM before they become a ring
SPLIT_L1_SHARE = 0.65  # B001: 96 of 148 SMs run dispatch and L1
SPLIT_UNIT = 8  # SM partitions come in eights
MAX_WARPS = 32


def backend(picks: Picks, hw: Hardware) -> Backend:
    """The tables of the architecture."""
    name = BY_ARCH[hw.arch]
    picks.note("backend", name, f"{hw.label} is {hw.arch}")
    return BACKENDS[name]


def mode(picks: Picks, problem: Problem, hw: Hardware) -> str:
    """One launch where plain loads reach every rank, else phase by phase."""
    picks.drop("mode", "auto")
    if problem.num_ranks > hw.nvlink_domain:
        auto = ("staged", f"beyond the {hw.nvlink_domain} GPUs of one NVLink domain")
    else:
        auto = ("fused", "one launch hides dispatch and scatter behind the matrix products")
    name = picks.word("mode", auto, MODES)
    require(
        name == "staged" or problem.num_ranks <= hw.nvlink_domain,
        f"{name} reaches at most {hw.nvlink_domain} ranks on {hw.label}",
        got=problem.num_ranks,
        fix="use mode staged",
        kind=NotAvailable,
    )
    return name


def num_sms(picks: Picks, hw: Hardware, chosen: Backend) -> int:
    """The SMs of the launch: all but the reserved ones, in whole clusters."""
    reserve = picks.number(
        "reserve_sms",
        Picked(0, "all SMs; a whole-grid barrier needs every one of them free"),
        high=hw.num_sms - chosen.CLUSTER,
    )
    used = (hw.num_sms - reserve) // chosen.CLUSTER * chosen.CLUSTER
    why = f"{hw.num_sms} less {reserve}"
    picks.note("num_sms", used, f"{why}, in clusters of {chosen.CLUSTER}; one CTA each")
    return used


def tiles(picks: Picks, problem: Problem, hw: Hardware, chosen: Backend, sms: int) -> Tiles:
    """The tile, and what the tensor cores see."""
    operand, why = chosen.mma(problem)
    picks.note("mma", operand, why)
    m = picks.number("block_m", chosen.block_m(problem), legal=chosen.BLOCK_MS)
    n = picks.number("block_n", chosen.block_n(problem, hw, sms, m), legal=chosen.BLOCK_NS)
    k = picks.number("block_k", chosen.block_k(problem, m), legal=chosen.BLOCK_KS)
    found = Tiles(m, n, k, operand)
    chosen.check(problem, found)
    return found


def shared_memory(
    picks: Picks, problem: Problem, hw: Hardware, chosen: Backend, tile: Tiles
) -> SharedMemory:
    """The budget, with as many stages as fit."""
    fixed, stage = chosen.shared_memory(problem, tile)
    most = num_stages(fixed, stage, hw.smem_per_sm)
    stages = picks.number(
        "num_stages",
        most,
        low=MIN_STAGES,
        high=MAX_STAGES,
        fix="leave it out to fill shared memory",
    )
    budget = SharedMemory(fixed, stage, stages, hw.smem_per_sm)
    require(
        budget.num_bytes <= budget.limit,
        f"shared memory of a CTA must not exceed {budget.limit} bytes",
        got=f"{budget.num_bytes} with {stages} stages of {budget.stage_bytes}",
        fix=f"take at most {most.value} stages",
        kind=CapacityError,
    )
    return budget


def roles(problem: Problem, hw: Hardware, chosen: Backend, tile: Tiles) -> tuple[Role, ...]:
    """The warps of a CTA; their registers must fit the SM."""
    found = chosen.roles(problem, tile)
    used, warps = num_registers(found), sum(role.num_warps for role in found)
    require(
        used <= hw.registers_per_sm and warps <= MAX_WARPS,
        f"a CTA has {hw.registers_per_sm} registers and {MAX_WARPS} warps",
        got=f"{used} registers in {warps} warps",
        kind=CapacityError,
    )
    return found


def combine(picks: Picks) -> str:
    """The width of rows on their way home."""
    return picks.word("combine", ("bf16", "exact; fp8 halves the bytes home"), COMBINES)


def pool_capacity(
    picks: Picks, problem: Problem, hw: Hardware, chosen: Backend, tile: Tiles
) -> Capacity:
    """Rows of the pool: the worst case if HBM can spare it, else a ring that waves reuse.

    Sized for every tile that a batch of up to max_tokens may choose, so that all of them share
    one workspace.
    """
    picks_tokens = Picked(max(problem.num_tokens, 1), "this batch is the largest")
    tokens = picks.number("max_tokens", picks_tokens, low=1)
    require(
        tokens >= problem.num_tokens,
        f"a batch must hold at most max_tokens = {tokens} tokens per rank",
        got=problem.num_tokens,
        fix="raise max_tokens, or split the batch",
        kind=CapacityError,
    )
    ranks, top_k, local = problem.num_ranks, problem.top_k, problem.num_local_experts
    widest = max(tile.block_m, chosen.block_m(replace(problem, num_tokens=tokens)).value)
    block_ms = tuple(m for m in chosen.BLOCK_MS if m <= widest)

    def sized(ring: int | None) -> Capacity:
        return capacity(
            ranks,
            tokens,
            top_k,
            local,
            block_ms=block_ms,
            ring_rows=ring,
            scale_align=chosen.SCALE_ALIGN,
        )

    unit = lcm(*block_ms)
    unit_bytes = ring_bytes(problem, unit, scale_pool_rows(unit, block_ms, chosen.SCALE_ALIGN))
    budget = hw.hbm_bytes // RING_SHARE
    worst = sized(None).pool_rows
    most = max(1, budget // unit_bytes) * unit
    if worst <= most:
        auto = Picked(worst, f"the worst case fits in a {RING_SHARE}th of HBM: no reuse")
    else:
        auto = Picked(
            most, f"a {RING_SHARE}th of HBM; the worst case of {worst} rows runs in waves"
        )
    given = picks.integer("ring_rows") if picks.given("ring_rows") else auto.value
    found = sized(given)
    picks.number("ring_rows", auto, low=unit)
    return found


def place(
    problem: Problem, hw: Hardware, chosen: Backend, sizes: Capacity, width: str
) -> Workspace:
    """The workspace; it must fit in HBM."""
    found = workspace(problem, sizes, combine=width, min_block_n=min(chosen.BLOCK_NS))
    require(
        found.num_bytes <= hw.hbm_bytes,
        f"the workspace must fit in the {hw.hbm_bytes} bytes of {hw.label}",
        got=f"{found.num_bytes} ({sizes.max_tokens} tokens, {sizes.ring_rows} ring rows)",
        fix="lower max_tokens, or ring_rows",
        kind=CapacityError,
    )
    return found


def waves(
    picks: Picks, problem: Problem, chosen: Backend, tile: Tiles, sizes: Capacity, sms: int
) -> int:
    """Experts per wave; a ring holds at least two waves, so that the next one can arrive."""
    rule = picks.word("wave_rule", chosen.WAVE_RULE, tuple(WAVE_RULES))
    local = problem.num_local_experts
    value, why = experts_per_wave(
        problem.tokens_per_expert,
        block_m=tile.block_m,
        num_l1_n=grid(problem, tile).num_l1_n,
        num_sms=sms,
        num_experts=local,
        rule=rule,
    )
    if sizes.is_ring:
        per_expert = max(1, num_m_blocks(max(even_rows(problem)), tile.block_m))
        fit = max(1, sizes.ring_rows // tile.block_m // 2 // per_expert)
        if fit < value:
            value, why = fit, f"two waves must fit in the ring of {sizes.ring_rows} rows"
    chosen_value = Picked(value, why)
    return picks.number("experts_per_wave", chosen_value, low=1, high=local)


SPLIT_DEAL = (
    "ticket",
    "dealt in turns, 96 SMs meet 48 tiles a row: some would have short tiles alone, which no "
    "published time shows",
)


def order(picks: Picks, chosen: Backend, mode: str) -> None:
    """How blocks are dealt, and whether L2 follows L1 within a wave."""
    is_turns = mode == "split" and chosen.DEAL[0] == "static"
    how = picks.word("deal", SPLIT_DEAL if is_turns else chosen.DEAL, tuple(DEALS))
    if picks.given("lag"):
        picks.number("lag", Picked(0, ""), low=0)
    else:
        why = f"L1 of the whole wave, then L2; {how} keeps that order"
        picks.note("lag", None, why)


def split(picks: Picks, sms: int) -> None:
    """SMs of dispatch and L1; the others run L2 and scatter beside them (B001, B005)."""
    share = round(sms * SPLIT_L1_SHARE / SPLIT_UNIT) * SPLIT_UNIT
    low, high = SPLIT_UNIT, sms - SPLIT_UNIT
    require(
        high >= low,
        f"split needs at least {2 * SPLIT_UNIT} SMs",
        got=sms,
        fix="use mode fused",
        kind=CapacityError,
    )
    why = "L1 is two thirds of the work; partitions come in eights"
    k1 = picks.number("k1_sms", Picked(min(max(share, low), high), why), low=low, high=high)
    require(
        k1 % SPLIT_UNIT == 0,
        f"k1_sms must be a multiple of {SPLIT_UNIT}",
        got=k1,
        fix=f"take {align_up(k1, SPLIT_UNIT)}",
        kind=ShapeError,
    )
    picks.note("k2_sms", sms - k1, "the rest run L2 and scatter; combine runs on all")


def grid(problem: Problem, tile: Tiles) -> Grid:
    """The tile grid of a problem; a last weight block may be short."""
    return Grid(
        tile.block_m,
        ceil_div(2 * problem.intermediate, tile.block_n),
        ceil_div(problem.hidden, tile.block_n),
    )


def check_rows(problem: Problem, sizes: Capacity, rows: Sequence[int]) -> None:
    """Rows per local expert must be the right number of counts and within the pool."""
    most = problem.num_ranks * sizes.max_tokens * problem.top_k
    require(
        len(rows) == problem.num_local_experts,
        f"rows must have one count for each of {problem.num_local_experts} local experts",
        got=len(rows),
        kind=ShapeError,
    )
    require(
        sum(rows) <= most,
        f"a rank receives at most {most} rows",
        got=sum(rows),
        fix="raise max_tokens",
        kind=CapacityError,
    )

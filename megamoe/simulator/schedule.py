"""Schedule: what the event loop plays. `Schedule.of_plan` makes it of the planner's launches.

It says what is launched in which order, with which tiles, on how many SMs, and nothing else: no
decision is taken here. A study makes one of a system that this library does not run, and names
itself in `study`; everything that is printed or drawn of it then says so.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Protocol, TypedDict

from megamoe.errors import NotAvailable, ShapeError, require
from megamoe.formats.spec import FP8_COMBINE, recipe_named
from megamoe.hardware import Figure, Hardware, Rate
from megamoe.layout.regions import align_up, ceil_div
from megamoe.layout.rows import stored_bytes
from megamoe.planner import blackwell, chain, smem
from megamoe.planner.launches import (
    Gemm,
    GemmSwapAb,
    GemmTmem,
    Launch,
    Mega,
    Pass,
    Permute,
    PortableGemm,
)
from megamoe.planner.numerics import Numerics, numerics
from megamoe.planner.plan import Plan
from megamoe.planner.tables.blackwell import WIDTH as BLACKWELL_WIDTH
from megamoe.planner.tables.hopper import ROW_ALIGN, WIDTH
from megamoe.problem import Problem
from megamoe.simulator.blocks import L1, L2, Block, token_tiles

NOT_OURS = "study: not a launch of this library"

# What must be said beside a time on Blackwell: of the published kernel's schedule, and of ours.
OF_PUBLISHED = (
    "simulated: Blackwell's constants are fitted to times that others published of this kernel on "
    "B200: 75 cells come out within 15%; nothing was measured there by us"
)
OF_OURS = (
    "simulated: Blackwell's constants are fitted to published times of another kernel than this; "
    "no launch of this library was timed there, so how far the figures are off is not known"
)


@dataclass(frozen=True, slots=True)
class Linear:
    """The tiles of one linear."""

    block_m: int  # tokens
    block_n: int  # weight rows
    num_n: int  # tiles of weights across
    ring_bytes: int  # of a CTA's stages: how far loads run ahead


@dataclass(frozen=True, slots=True)
class Experts:
    """The experts that launches go through, and both linears' tiles."""

    problem: Problem  # recipe and widths
    num_local: int
    mma: str
    l1: Linear
    l2: Linear

    def linear(self, phase: str) -> Linear:
        """One of the two."""
        return self.l1 if phase == L1 else self.l2

    @property
    def block_m(self) -> int:
        """Tokens of a tile: the same in both linears, since rows are sorted once."""
        return self.l1.block_m


class Order(Protocol):
    """The order in which the blocks of a rank are taken."""

    def blocks(self, experts: Experts, rows: Sequence[int]) -> Iterator[Block]:
        """Every block once, each L2 block after the L1 blocks it reads."""
        ...

    def waits_for(self, experts: Experts, rows: Sequence[int]) -> tuple[int, ...]:
        """For each tile of tokens the one whose L2 must be over before its rows come; -1: none."""
        ...


@dataclass(frozen=True, slots=True)
class Phases:
    """All of L1, then all of L2; in waves of `wave_rows` rows where the pool is a ring.

    The waves are those of the fused kernel: a tile belongs to the wave in which its first row lies,
    and the order is L1(0) L1(1) | L2(0) L1(2) | L2(1) L1(3) | ...
    """

    wave_rows: int = 0

    def waves(self, experts: Experts, rows: Sequence[int]) -> tuple[int, ...]:
        """The wave of each tile of tokens."""
        tiles = token_tiles(rows, experts.block_m)
        if not self.wave_rows:
            return (0,) * len(tiles)
        first, waves = 0, []
        for expert, count in enumerate(rows):
            of_expert = (m for e, m in tiles if e == expert)
            waves += [(first + m * experts.block_m) // self.wave_rows for m in of_expert]
            first += align_up(count, ROW_ALIGN)
        return tuple(waves)

    def blocks(self, experts: Experts, rows: Sequence[int]) -> Iterator[Block]:
        """Phase by phase, tiles of tokens in pool order, weights fastest."""
        waves = self.waves(experts, rows)
        tiles = token_tiles(rows, experts.block_m)
        last = max(waves, default=-1)
        by_wave: list[list[tuple[int, int]]] = [[] for _ in range(last + 1)]
        for tile, wave in zip(tiles, waves, strict=True):
            by_wave[wave].append(tile)
        order = [(L1, 0), (L1, 1)]
        order += [one for w in range(last + 1) for one in ((L2, w), (L1, w + 2))]
        for phase, wave in order:
            for expert, m in by_wave[wave] if wave <= last else ():
                for n in range(experts.linear(phase).num_n):
                    yield Block(wave, phase, expert, m, n)

    def waits_for(self, experts: Experts, rows: Sequence[int]) -> tuple[int, ...]:
        """The last tile of the wave before the last, which had the same half of the ring."""
        waves = self.waves(experts, rows)
        ends = {wave: at for at, wave in enumerate(waves)}
        return tuple(ends.get(wave - 2, -1) for wave in waves)


@dataclass(frozen=True, slots=True)
class Step:
    """One launch of a staged call, or rows that cross the links between two launches.

    kind         "move" (rows through HBM and nothing else), "index" (a few integers), "gemm",
                 "send" (rows to their experts), "return" (results to their tokens) or "combine"
    row_bytes    move: for each row that the rank's experts received
    token_bytes  move: for each token of the rank
    """

    name: str
    kind: str
    row_bytes: float = 0.0
    token_bytes: float = 0.0
    sorts: bool = False  # the row of every slot is found here
    is_shared: bool = False  # of shared experts that are apart
    follows: bool = False  # gemm, L2: its blocks follow those of L1, tile by tile


@dataclass(frozen=True, slots=True)
class Schedule:
    """One call as the event loop plays it."""

    problem: Problem
    hardware: Hardware
    backend: str
    mode: str  # "fused", "staged", "chain" or "split"
    combine: str  # rows on their way to combine
    experts: Experts
    num_sms: int
    order: Order
    steps: tuple[Step, ...] = ()  # staged
    shared: Experts | None = None  # in launches of their own
    num_joined: int = 0  # shared experts that are the last ones of `experts`
    num_passes: int = 1  # fused launches of a call, or passes of a chain, each with its part
    pull_sms: int = 0  # of the chain's launches: SMs that pull rows before they compute
    pullers_take: bool = True  # they take blocks of L1 then; False: the others have them
    shares_gpu: bool = False  # `hardware` is one rank's part of a GPU that all ranks share
    links_alone: bool = False  # of a chain: rows come and go home, and nothing is computed
    l2_follows: bool = False  # of the chain's launches: L2 follows L1 tile by tile
    assignment: str = "ticket"  # or "static": block i is for SM i mod num_sms
    l1_sms: int | None = None  # split: SMs that run L1; the others run L2
    is_own_stream: bool = False  # HBM is read as by this library's launches on Hopper
    writes_gate_up: bool = False  # L1 leaves gate and up in BF16 for a launch of its own
    pools_at_once: bool = False  # L1 waits for all rows of a wave, not for those of its tile
    peels: bool = False  # rows of an expert come from the ranks in turn, not rank after rank
    mma_rows: int | None = None  # rows that the tensor cores compute at once; None: the tile
    decodes_once: bool = False  # FP4 becomes FP8 once per wave, not in every tile
    has_epilogue_warps: bool = False  # epilogues run beside the next block's math
    copy_bytes: int = 0  # Blackwell: contiguous bytes of a weight row in one stage
    study: str = ""  # name of the study, where this is no launch of this library

    @property
    def name(self) -> str:
        """The call in words."""
        p = self.problem
        ranks = f"{p.num_ranks} rank{'s' if p.num_ranks > 1 else ''}"
        tokens = f"{p.num_tokens} token{'s' if p.num_tokens != 1 else ''} a rank"
        return f"{tokens}, {ranks}, {p.recipe}, {self.mode} on {self.hardware.label}"

    @property
    def label(self) -> str:
        """What must be said of a study; empty for launches of this library."""
        return f"{NOT_OURS} ({self.study})" if self.study else ""

    @property
    def note(self) -> str:
        """What must be said beside every figure; "" where own launches were measured."""
        if not self.hardware.is_blackwell:
            return ""
        return OF_PUBLISHED if self.study else OF_OURS

    def over_links(self, gbs: float) -> Schedule:
        """The same call over links of so many GB/s a rank and direction."""
        speed = Rate(*(Figure(gbs, "given"),) * 2)
        return replace(self, hardware=replace(self.hardware, nvlink_gbs=speed))

    @staticmethod
    def of_plan(plan: Plan) -> Schedule:
        """The launches of a plan."""
        require(
            plan.backend != "reference",
            "a simulated call has launches",
            got="backend reference, which computes on the CPU",
            fix="plan for a GPU, such as h200",
            kind=NotAvailable,
        )
        require(
            len(plan.launches) > 0,
            "a simulated call has launches",
            got=f"{plan.problem.num_tokens} tokens",
            kind=ShapeError,
        )
        require(
            plan.call.local_ranks == 1 or plan.is_chained,
            "ranks that share a GPU are simulated as a chain",
            got=f"mode {plan.mode}, {plan.call.local_ranks} ranks on one GPU",
            kind=NotAvailable,
        )
        if plan.is_chained:
            return _chain(plan)
        schedule = {"fused": _fused, "split": _split}.get(plan.mode, _staged)
        return schedule(plan)


def fused_schedule(
    problem: Problem,
    hardware: Hardware,
    how: Numerics,
    tile: GemmSwapAb | GemmTmem,
    num_sms: int,
    *,
    wave_rows: int = 0,
    num_joined: int = 0,
    num_passes: int = 1,
    combine: str = "bf16",
) -> Schedule:
    """A launch of the fused kernel with that tile on `num_sms` SMs of each rank."""
    local = problem.num_local_experts + num_joined
    return Schedule(
        problem=problem,
        hardware=hardware,
        backend="blackwell" if isinstance(tile, GemmTmem) else "hopper",
        mode="fused",
        combine=combine,
        experts=_gluon_experts(problem, how, tile, local),
        num_sms=num_sms,
        order=Phases(wave_rows),
        num_joined=num_joined,
        num_passes=num_passes,
        is_own_stream=not isinstance(tile, GemmTmem),
        pools_at_once=True,
        **_of_tmem(problem.recipe, tile),
    )


def _fused(plan: Plan) -> Schedule:
    assert plan.mega is not None and isinstance(plan.mega.config, Mega)
    config = plan.mega.config
    return fused_schedule(
        plan.problem,
        plan.hardware,
        plan.numerics,
        config.tile,
        plan.mega.num_ctas,
        wave_rows=config.wave_rows,
        num_joined=plan.call.joined,
        num_passes=plan.num_passes,
        combine=plan.call.combine,
    )


def _hopper_experts(
    problem: Problem, how: Numerics, tile: GemmSwapAb | Gemm, num_local: int
) -> Experts:
    """Both linears of a Hopper kernel: widths are padded to WIDTH."""
    sums = (
        smem.gemm(problem.recipe, tile)
        if isinstance(tile, Gemm)
        else smem.gemm_swap_ab(problem.recipe, how, tile)
    )
    ring = tile.num_stages * sums.stage_bytes
    l1_n = ceil_div(2 * align_up(problem.intermediate, WIDTH), tile.block_n)
    l2_n = ceil_div(problem.hidden, tile.block_n)
    linears = (Linear(tile.block_m, tile.block_n, num, ring) for num in (l1_n, l2_n))
    return Experts(problem, num_local, how.mma, *linears)


def _gluon_experts(
    problem: Problem, how: Numerics, tile: GemmSwapAb | Gemm | GemmTmem, num_local: int
) -> Experts:
    """Both linears of a Gluon kernel."""
    if not isinstance(tile, GemmTmem):
        return _hopper_experts(problem, how, tile, num_local)
    ring = tile.num_stages * blackwell.shared_memory(problem.recipe, tile).stage_bytes
    l1_n = ceil_div(2 * align_up(problem.intermediate, BLACKWELL_WIDTH), tile.block_n)
    l2_n = ceil_div(problem.hidden, tile.block_n)
    linears = (Linear(tile.block_m, tile.block_n, num, ring) for num in (l1_n, l2_n))
    return Experts(problem, num_local, how.mma, *linears)


def _portable_experts(problem: Problem, how: Numerics, one: Pass, num_local: int) -> Experts:
    """Both linears of portable's kernels; a program of L1 has the weight rows of gate and up."""
    weights = recipe_named(problem.recipe).weights
    linears = []
    for name, halves, width in (("l1", 2, problem.intermediate), ("l2", 1, problem.hidden)):
        tile = one[name].config
        assert isinstance(tile, PortableGemm)
        rows = halves * tile.block_n
        acts = tile.block_m * tile.block_k * (1 if how.mma == "fp8" else 2)
        stage = int(rows * tile.block_k * weights.bits_per_value / 8) + acts
        linears.append(
            Linear(tile.block_m, rows, ceil_div(width, tile.block_n), tile.num_stages * stage)
        )
    return Experts(problem, num_local, how.mma, *linears)


def _experts(plan: Plan, one: Pass) -> Experts:
    """What one pass of a staged call goes through."""
    call, p = plan.call, plan.problem
    how, num_local = plan.numerics, one.num_experts
    if one.experts == "shared":
        shared = call.shared
        assert shared is not None
        p = Problem(
            p.num_tokens, p.hidden, shared.intermediate, shared.num, shared.num, 1, shared.recipe
        )
        how = numerics(
            plan.backend, shared.recipe, arch=plan.hardware.arch, fits_e4m3=shared.fits_e4m3
        )
    tile = one["l1"].config
    if isinstance(tile, GemmSwapAb | Gemm | GemmTmem):
        return _gluon_experts(p, how, tile, num_local)
    return _portable_experts(p, how, one, num_local)


def _staged(plan: Plan) -> Schedule:
    call = plan.call
    shared = _shared_pass(plan)
    tile = plan.tile
    is_dynamic = isinstance(tile, PortableGemm) or (
        isinstance(tile, Gemm) and tile.schedule == "dynamic"
    )
    return Schedule(
        problem=plan.problem,
        hardware=plan.hardware,
        backend=plan.backend,
        mode="staged",
        combine=call.combine,
        experts=_experts(plan, plan.passes[0]),
        num_sms=plan.hardware.num_sms,
        order=Phases(),
        steps=tuple(_steps(plan)),
        shared=None if shared is None else _experts(plan, shared),
        num_joined=call.joined if plan.passes[0].experts == "routed and shared" else 0,
        assignment="ticket" if is_dynamic else "static",
        is_own_stream=plan.backend == "hopper",
        **_halves(tile),
        **_of_tmem(plan.problem.recipe, tile),
    )


class _OfTmem(TypedDict):
    has_epilogue_warps: bool
    copy_bytes: int


def _of_tmem(recipe: str, tile: object) -> _OfTmem:
    """Blackwell: epilogues beside the next tile's products where sums stand twice, and its copies.

    A fused launch has two warpgroups, each with sums of its own.
    """
    if not isinstance(tile, GemmTmem):
        return {"has_epilogue_warps": False, "copy_bytes": 0}
    bits = recipe_named(recipe).weights.element.bits
    return {
        "has_epilogue_warps": tile.num_sums > 1 or tile.math_regs > 0,
        "copy_bytes": tile.block_k * bits // 8,
    }


class _Computed(TypedDict):
    mma_rows: int | None
    decodes_once: bool


def _halves(tile: object) -> _Computed:
    """How a tile of tokens is computed: the plain kernel skips a half that has no rows."""
    once = isinstance(tile, Gemm) and tile.decode_ahead > 0
    return {"mma_rows": tile.block_m // 2 if isinstance(tile, Gemm) else None, "decodes_once": once}


def _require_one_window(num: int) -> None:
    require(
        num == 1,
        "a simulated split call has its rows in one window",
        got=f"{num} windows",
        fix="leave pool_rows out",
        kind=NotAvailable,
    )


def _split(plan: Plan) -> Schedule:
    """Staged launches of which L1 and L2 run side by side, each on its part of the SMs."""
    _require_one_window(sum(one.find("window") is not None for one in plan.passes))
    on = plan.launch("l1").num_ctas, plan.launch("l2").num_ctas
    steps = tuple(
        replace(step, follows=step.follows or (step.name == L2 and not step.is_shared))
        for step in _steps(plan)
    )
    how = replace(_staged(plan), mode="split", steps=steps)
    return replace(how, num_sms=sum(on), l1_sms=on[0])


def _chain(plan: Plan) -> Schedule:
    """Exchange, then pull, L1 and L2 as launches that follow tiles, or split over the SMs."""
    _, *owner = plan.passes
    num_sms = owner[0]["l2"].num_ctas
    l1_sms: int | None = None
    if plan.mode == "split":
        _require_one_window(len(owner))
        asked_sms = plan["l1_sms"]
        assert isinstance(asked_sms, int)
        l1_sms, num_sms = asked_sms, num_sms + asked_sms
    shared, tile = _shared_pass(plan), owner[0]["l1"].config
    assert isinstance(tile, GemmSwapAb | Gemm | GemmTmem)
    is_dynamic = tile.is_dynamic
    ranks = plan.call.local_ranks
    return Schedule(
        problem=plan.problem,
        hardware=plan.hardware if ranks == 1 else plan.hardware.part(ranks, num_sms),
        backend=plan.backend,
        mode=plan.mode,
        combine="fp8" if chain.has_fp8_rows(plan.call, plan.backend) else "bf16",  # rounded at home
        experts=_experts(plan, owner[0]),
        num_sms=num_sms,
        l1_sms=l1_sms,
        order=Phases(),
        steps=tuple(_chain_steps(plan)),
        shared=None if shared is None else _experts(plan, shared),
        num_passes=len(owner),
        assignment="ticket" if is_dynamic else "static",
        is_own_stream=plan.backend == "hopper",
        **_halves(tile),
        **_of_tmem(plan.problem.recipe, tile),
        pull_sms=owner[0]["pull"].num_ctas,
        pullers_take=is_dynamic,
        shares_gpu=plan.call.local_ranks > 1,
        l2_follows=l1_sms is not None or not (isinstance(tile, Gemm) and tile.decode_ahead > 0),
    )


def _chain_steps(plan: Plan) -> Iterator[Step]:
    source, *owner = plan.passes
    for one in source.launches:
        known = one.name == "exchange"
        yield Step("exchange", "exchange") if known else _step(plan, one, is_shared=False)
    for each in owner:
        yield Step("rows", "index", sorts=True)
        yield Step("pull, l1, l2", "chain")
        if each.find("scales") is not None:
            yield Step("scales", "index")
    for one in plan.rest:
        if one.name == "finish":
            yield Step("rows home", "finish")
        else:
            yield _step(plan, one, is_shared=one.name != "combine")


def _shared_pass(plan: Plan) -> Pass | None:
    """The launches of shared experts that are apart."""
    shared = next((one for one in plan.passes if one.experts == "shared"), None)
    if shared is None and any(one.name == "l1" for one in plan.rest):
        num = plan.call.num_shared
        return Pass("shared", num * plan.problem.num_tokens, num, plan.rest)
    return shared


def _steps(plan: Plan) -> Iterator[Step]:
    """The launches of a staged call in order, and where rows cross the links."""
    is_group = plan.call.is_group
    for one in plan.before:
        yield _step(plan, one, is_shared=False)
    if is_group:
        yield Step("rows sent", "send")
    for each in plan.passes:
        for one in each.launches:
            yield _step(plan, one, is_shared=each.experts == "shared")
    is_home = not is_group
    for one in plan.rest:
        if not is_home and one.name != "rows_to_fp8":
            yield Step("results sent", "return")
            is_home = True
        yield _step(plan, one, is_shared=one.name != "combine")


def _step(plan: Plan, one: Launch, *, is_shared: bool) -> Step:
    p = plan.problem
    acts = recipe_named(p.recipe).acts
    wide, stored = 2.0 * p.hidden, float(stored_bytes(p.hidden, acts))
    name = one.name
    if name in ("l1", "l2"):
        tile = one.config
        follows = name == L2 and isinstance(tile, Gemm) and tile.schedule == "dynamic"
        return Step(name, "gemm", is_shared=is_shared, follows=follows)
    if name == "permute":
        assert isinstance(one.config, Permute)
        sorts = one.config.is_small
        return Step(name, "move", row_bytes=2 * stored, sorts=sorts, is_shared=is_shared)
    if name == "rows_to_fp8":
        return Step(name, "move", row_bytes=wide + stored_bytes(p.hidden, FP8_COMBINE))
    if name in ("quantize", "dispatch"):
        return Step(name, "move", token_bytes=wide + stored, is_shared=is_shared)
    if name == "combine":
        return Step(name, "combine")
    return Step(name, "index", sorts=name == "place", is_shared=is_shared)

"""Plan: how a call runs. `plan(problem, hardware, **overrides)` is what `moe` and `MoE` launch.

Every decision of a call is taken here, with its reason: backend, mode, each launch with its grid
and configuration, buffers, numerics. The engine asks once for each layer and size, launchers pass
on what they are given, and the simulator plays the same launches.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from megamoe.errors import DTypeError, NotAvailable, RangeError, one_of, require
from megamoe.formats.spec import recipe_named
from megamoe.hardware import Hardware
from megamoe.layout.regions import Workspace
from megamoe.planner import (
    blackwell,
    blackwell_fused,
    chain,
    copies,
    fused,
    hopper,
    memory,
    portable,
    split,
)
from megamoe.planner.backends import reasons_on
from megamoe.planner.call import CallSpec
from megamoe.planner.choice import Choice, SharedMemory, Value
from megamoe.planner.floor import Floor, floor
from megamoe.planner.launches import (
    Gemm,
    GemmSwapAb,
    GemmTmem,
    Launch,
    Mega,
    Pass,
    PortableGemm,
    Tile,
)
from megamoe.planner.memory import Buffer
from megamoe.planner.modes import mode_of
from megamoe.planner.numerics import Numerics, not_on, numerics
from megamoe.planner.overrides import Overrides, check_pairs, check_values, checked, word
from megamoe.planner.tables.blackwell import SCHEDULES as BLACKWELL_SCHEDULES
from megamoe.planner.tables.split import why_not_auto
from megamoe.problem import Problem

BACKENDS = ("hopper", "blackwell", "portable", "reference")  # best first
# Never yet run on hardware by us: `auto` takes one only where the machine has a certificate.
OPT_IN = ("blackwell",)
PORTABLE_NOT_RUN = "portable is compiled for Blackwell, not yet run there"
NO_CERTIFICATE = "no certificate, which `megamoe certify` makes on the machine"
MODES = ("auto", "staged", "fused", "chain", "split")
# backend -> modes that it has; the oracle computes what any mode would
BACKEND_MODES = {
    "hopper": ("staged", "fused", "chain", "split"),
    "blackwell": ("staged", "fused", "chain"),
    "portable": ("staged",),
    "reference": ("staged", "fused", "chain", "split"),
}


@dataclass(frozen=True, slots=True)
class Plan:
    """How a call runs. Print it: it explains itself."""

    call: CallSpec  # what is computed: the problem, and traits of the weights
    hardware: Hardware  # what it runs on
    backend: str  # "hopper", "blackwell", "portable" or "reference"
    mode: str  # "staged", "fused", "split" or, over ranks, "chain"; on the reference as asked for
    why: str  # of the backend and the mode
    numerics: Numerics  # MMA type, promotion, how activations are stored
    passes: tuple[Pass, ...]  # staged: routed experts, then shared ones that are apart; chain: the
    # exchange, then routed experts, window after window of the pool; split: the windows alone
    mega: Launch | None  # the fused launch; None in other modes
    num_passes: int  # fused over a group: launches of a call
    rest: tuple[Launch, ...]  # staged, chain, split: what follows the passes, combine last
    buffers: tuple[Buffer, ...]  # memory of a rank
    overrides: Overrides  # what the caller fixed

    @property
    def problem(self) -> Problem:
        """The call in integers."""
        return self.call.problem

    @property
    def launches(self) -> tuple[Launch, ...]:
        """Every launch on this rank, in order; over a group all-to-alls lie between them."""
        if self.mega is not None:
            return self.before + (self.mega,) * self.num_passes
        return (*self.before, *(one for each in self.passes for one in each.launches), *self.rest)

    @property
    def captured(self) -> tuple[Launch, ...]:
        """Every launch of the call in a CUDA graph of its own; its inputs are copied in and out."""
        p = self.problem
        first, inputs, output = copies.around(p.num_tokens, p.hidden, p.top_k)
        launches = self.launches if self.mega is None else (self.mega,) * self.num_passes
        return (first, inputs, *launches, output)

    @property
    def before(self) -> tuple[Launch, ...]:
        """Over ranks, what comes before tokens are sent.

        fused   each rank of the GPU puts its tokens where the launches of all ranks read them
        staged  tokens are quantised
        """
        p = self.problem
        if self.mega is not None:
            if p.num_ranks == 1:
                return ()
            return (self.put(p.num_tokens),) * self.call.local_ranks
        if not self.call.is_group or self.backend == "reference" or self.call.is_quantized:
            return ()
        if self.is_chained:
            return ()
        acts = recipe_named(p.recipe).acts.name
        if acts == "bf16" or p.num_tokens == 0:
            return ()
        return (portable.quantize_rows("quantize", p.num_tokens, p.hidden, f"codes-{acts}"),)

    def put(self, num_tokens: int) -> Launch:
        """Fused over ranks: the launch that puts the tokens of one rank, which may have fewer.

        num_tokens  of that rank
        """
        p = self.problem
        return copies.put(num_tokens, p.hidden, p.top_k, self.num_passes)

    @property
    def why_no_launches(self) -> str:
        """Of a plan without any."""
        if self.backend == "reference":
            return "no launches: computed by the oracle"
        return "no launches: a call without tokens computes nothing"

    def launch(self, name: str) -> Launch:
        """The first launch of that name.

        name  "l1", "l2", "combine", ...
        """
        launch = next((one for one in self.launches if one.name == name), None)
        have = ", ".join(dict.fromkeys(one.name for one in self.launches)) or "none"
        require(launch is not None, f"the plan's launches are {have}", got=name, kind=RangeError)
        assert launch is not None
        return launch

    @property
    def tile(self) -> Tile | GemmTmem | PortableGemm | None:
        """The tile of the routed experts' L1; None where nothing is launched."""
        if self.mega is not None:
            assert isinstance(self.mega.config, Mega)
            return self.mega.config.tile
        if self.routed is None:
            return None
        config = self.routed["l1"].config
        assert isinstance(config, GemmSwapAb | Gemm | GemmTmem | PortableGemm)
        return config

    @property
    def is_chained(self) -> bool:
        """Whether the launches are those of the chain: mode chain, and split over ranks."""
        return _is_chained(self.call, self.mode)

    @property
    def routed(self) -> Pass | None:
        """The first pass of the routed experts; None where nothing is launched, or all at once."""
        return next((one for one in self.passes if one.find("l1") is not None), None)

    @property
    def overlaps(self) -> bool:
        """Whether launches are placed while the one before ends; usual on Hopper and in a chain.

        Over a group other launches and all-to-alls lie between them.
        """
        chosen = dict(self.overrides).get("overlap_launches")
        if self.call.is_group and not self.is_chained:
            return False
        is_usual = self.backend == "hopper" or self.is_chained
        return is_usual if chosen is None else bool(chosen)

    @property
    def num_sms(self) -> int:
        """SMs that the GEMMs run on."""
        return self.mega.num_ctas if self.mega is not None else self.hardware.num_sms

    @property
    def shared_memory(self) -> SharedMemory | None:
        """The sum of a CTA of Gluon's GEMMs; Triton's compiler lays out portable's."""
        recipe = self.problem.recipe
        if isinstance(self.tile, GemmTmem) and self.mega is not None:
            return blackwell_fused.shared_memory(recipe, self.tile, self._routing_bytes)
        if isinstance(self.tile, GemmSwapAb) and self.mega is not None:
            return hopper.fused_shared_memory(self.call, self.tile)
        if isinstance(self.tile, GemmTmem):
            return blackwell.shared_memory(recipe, self.tile)
        if isinstance(self.tile, GemmSwapAb | Gemm):
            return hopper.shared_memory(self.call, self.tile)
        return None

    @property
    def _routing_bytes(self) -> int:
        """Of a CTA of a fused launch."""
        p = self.problem
        slots = p.num_ranks * self.fused_tokens * (p.top_k + self.call.joined)
        experts = p.num_experts // p.num_ranks + self.call.joined
        return fused.routing_bytes(slots, experts, p.num_ranks)

    @property
    def fused_tokens(self) -> int:
        """Tokens of a rank in each launch of a fused call."""
        _, each = _fused(self.backend).passes_of(self.call)
        return int(each)

    @property
    def max_fused_tokens(self) -> int:
        """Tokens of the largest call of one rank that a fused launch takes."""
        return int(_fused(self.backend).max_fused_tokens(self.call))

    @property
    def exchange(self) -> Workspace:
        """The memory that a rank shares with its peers in fused calls."""
        workspace: Workspace = _fused(self.backend).exchange_of(self.call)
        return workspace

    @property
    def floor(self) -> Floor:
        """What no schedule beats, at the speeds that were reached on this hardware."""
        return floor(self.problem, self.hardware, self.numerics.mma, self.call.combine)

    @property
    def choices(self) -> tuple[Choice, ...]:
        """The decisions in the order in which they are taken, each with its reason."""
        how = self.numerics
        choices = [
            Choice("backend", self.backend, self._why_backend()),
            Choice("mode", self.mode, self.why),
            Choice("mma", how.mma, how.why),
            Choice(
                "promotion", how.promotion or None, "columns of K between additions in registers"
            ),
        ]
        tile = self.tile
        if tile is not None:
            l1 = self.mega or self.routed["l1"]  # type: ignore[index]
            choices += [
                Choice("tile", str(tile), l1.why),
                Choice("block_m", tile.block_m, "tokens"),
                Choice("block_n", tile.block_n, "weight rows"),
                Choice("block_k", tile.block_k, "columns of a stage"),
                Choice("num_stages", tile.num_stages, "of the ring in shared memory"),
            ]
        if self.num_passes > 1:
            choices.append(Choice("num_passes", self.num_passes, "launches of a fused call"))
        if self.is_chained and self.routed is not None:
            pull = self.routed["pull"]
            choices.append(Choice("pull_sms", pull.num_ctas, pull.why))
            choices.append(Choice("l2", str(tile), self.routed["l2"].why))
            num = len(self.passes) - 1
            choices.append(
                Choice("pool_passes", num, "times the pool is filled: once but for pool_rows")
            )
        choices += self._split_choices()
        if isinstance(tile, GemmTmem):
            if self.mega is None:
                why = BLACKWELL_SCHEDULES[tile.schedule]
                choices.append(Choice("schedule", tile.schedule, why))
            columns = blackwell.tmem_columns(self.problem.recipe, tile)
            choices.append(Choice("tmem_columns", columns, "of 512: sums, scales, decoded weights"))
        names = {name for name, _ in self.overrides} - {"backend", "mode"}
        return tuple(
            Choice(c.name, c.value, f"given; {c.why}") if c.name in names else c for c in choices
        )

    def _split_choices(self) -> list[Choice]:
        """How the SMs are parted, or why they are not."""
        if self.mode == "split" and self.routed is not None:
            on = split.parts(self.hardware.num_sms, dict(self.overrides))
            num = sum(one.experts.startswith("routed") for one in self.passes)
            l1 = "; the pull has its SMs among them" if self.is_chained else ""
            choices = [
                Choice("l1_sms", on.l1, on.why + l1),
                Choice("l2_sms", on.l2, "the rest: L2 follows L1 tile by tile"),
            ]
            if not self.is_chained:
                choices.append(Choice("windows", num, "of the ring; more than one by choice"))
            return choices
        if self.backend == "hopper" and self.mode == "staged" and self.problem.num_ranks == 1:
            return [Choice("split", "no", why_not_auto(self.problem.recipe))]
        return []

    def _why_backend(self) -> str:
        why = self._why_this_backend()
        if self.backend == "portable" and self.hardware.is_blackwell:
            why += f"; {PORTABLE_NOT_RUN}"
        return why

    def _why_this_backend(self) -> str:
        reasons = reasons_on(self.hardware.arch)
        best = next(name for name, why in reasons.items() if not why)
        if self.backend == "portable" and self.call.not_hopper:
            return self.call.not_hopper
        recipes = [self.problem.recipe, *([self.call.shared.recipe] if self.call.shared else [])]
        lack = next(filter(None, (not_on(best, recipe) for recipe in recipes)), "")
        if self.backend != best and lack:
            return f"{best} has {lack}"
        if best in OPT_IN and not self.call.is_certified and "backend" not in dict(self.overrides):
            return f"{best} is opt-in: {NO_CERTIFICATE}"
        return (
            f"{self.hardware.label} is {self.hardware.arch}"
            if self.backend == best
            else "asked for"
        )

    def __getitem__(self, name: str) -> Value:
        choices = {choice.name: choice.value for choice in self.choices}
        require(
            name in choices,
            f"a plan has the choices {', '.join(choices)}",
            got=name,
            kind=RangeError,
        )
        return choices[name]

    def __repr__(self) -> str:
        p = self.problem
        names = ", ".join(one.name for one in self.launches) or "no launches"
        return (
            f"Plan({p.num_tokens} tokens x {ranks_in_words(p.num_ranks)}, {p.recipe}, "
            f"{self.backend} {self.mode} on {self.hardware.name}: {names})"
        )

    def __str__(self) -> str:
        p = self.problem
        rows = [
            f"{p.num_tokens} tokens a rank, {ranks_in_words(p.num_ranks)}, "
            f"{p.num_experts} experts, top-{p.top_k}, {p.hidden} x {p.intermediate}, {p.recipe} "
            f"on {self.hardware.label}",
            "choices",
        ]
        shown = [(c.name, "none" if c.value is None else str(c.value), c.why) for c in self.choices]
        rows += [f"  {name:<12}{value:<34} {why}" for name, value, why in shown]
        rows.append("launches" if self.launches else self.why_no_launches)
        for one in self.launches:
            grid = " x ".join(map(str, one.grid))
            side = f" on {one.partition}_sms" * bool(one.partition)
            rows.append(f"  {one.name:<12}{one.kernel:<20} grid {grid:<14} {one.config}{side}")
        if self.shared_memory is not None:
            rows += ["shared memory of a CTA", str(self.shared_memory)]
        rows.append("memory of a rank")
        rows += [f"  {b.name:<20}{b.num_bytes:>16,}  {b.kind}: {b.about}" for b in self.buffers]
        if self.backend != "reference":
            rows += ["floor of the call", str(self.floor)]
        return "\n".join(rows)


def ranks_in_words(num: int) -> str:
    """Of a plan's text.

    >>> ranks_in_words(1), ranks_in_words(8)
    ('1 rank', '8 ranks')
    """
    return "1 rank" if num == 1 else f"{num} ranks"


def choose_backend(
    asked: str,
    mode: str,
    reasons: Mapping[str, str],
    not_hopper: str = "",
    not_certified: str = NO_CERTIFICATE,
) -> tuple[str, str]:
    """(backend, why `auto` passed over a better one).

    reasons        by name, best first: why a backend cannot run here; "" where it can
    not_hopper     why the Hopper kernels cannot hold the weights exactly
    not_certified  why `auto` may not take a backend of OPT_IN here; "": it may
    """
    one_of(asked, ("auto", *reasons), "backend")
    one_of(mode, MODES, "mode")
    working = [name for name, why in reasons.items() if not why]
    passed = ""
    if asked != "auto":
        require(
            asked in working,
            f"backend {asked} cannot run here ({reasons[asked]})",
            got=f"backend={asked!r}",
            fix=f"use {' or '.join(working)}",
            kind=NotAvailable,
        )
        name = asked
        require(
            not (name == "hopper" and not_hopper),
            "the hopper backend must be able to compute this layer exactly",
            got=not_hopper,
            fix='use backend="portable", which can',
            kind=NotAvailable,
        )
    else:
        name = working[0]
        proven = [one for one in working if one not in OPT_IN or not not_certified]
        if name == "hopper" and not_hopper:
            passed = f"hopper cannot compute this layer exactly: {not_hopper}"
            name = next(one for one in proven if one != "hopper")
        elif name in OPT_IN and not_certified:
            name, passed = proven[0], f"{name} is opt-in: {not_certified}"
    modes = BACKEND_MODES[name]
    because = f" ({passed})" if passed else ""
    require(
        mode == "auto" or mode in modes,
        f"backend {name} has mode {' or '.join(('auto', *modes))}{because}",
        got=mode,
        kind=NotAvailable,
    )
    return name, passed


def plan(problem: Problem | CallSpec, hardware: Hardware | str, **overrides: Value) -> Plan:
    """How a call runs on a machine: exactly what `moe` and `MoE` launch there.

    problem    a Problem, or a CallSpec with traits of weights and tokens (`layer.plan` has them)
    hardware   a name such as "h200", or a Hardware
    overrides  by the names of `planner.overrides.OVERRIDES`, checked; None leaves it to the planner

    >>> found = plan(Problem(8, 4096, 2048, 32, 6), "h200")
    >>> found.mode, [launch.name for launch in found.launches]
    ('fused', ['mega'])
    """
    hw = Hardware.named(hardware) if isinstance(hardware, str) else hardware
    require(
        isinstance(problem, Problem | CallSpec) and isinstance(hw, Hardware),
        "a plan is of a Problem or a CallSpec on a Hardware or the name of one",
        got=f"{problem!r}, {hardware!r}",
        fix='such as mm.Problem(8, 4096, 2048, 256, 6) and "h200"; megamoe plan takes presets',
        kind=DTypeError,
    )
    if isinstance(problem, CallSpec):
        call = problem
    else:  # one rank alone shares no memory, and so has no bound of its tokens
        bound = problem.num_tokens if problem.num_ranks > 1 else None
        call = CallSpec(problem, max_tokens=bound)
    return plan_call(call, hw, checked(overrides))


@lru_cache(maxsize=4096)
def plan_call(call: CallSpec, hw: Hardware, overrides: Overrides) -> Plan:
    """`plan` of checked overrides; made once for each call, machine and overrides."""
    chosen = dict(overrides)
    asked = str(chosen.get("backend", "auto"))
    check_pairs(asked, overrides)
    wanted = word(chosen, "mode", MODES) or "auto"
    reasons = reasons_on(hw.arch)
    if asked == "portable" and hw.arch == "cpu":
        reasons["portable"] = ""  # Triton's interpreter; the engine has looked
    recipes = [call.problem.recipe, *([] if call.shared is None else [call.shared.recipe])]
    for name in reasons:
        reasons[name] = next(filter(None, (reasons[name], *(not_on(name, r) for r in recipes))), "")
    not_certified = "" if call.is_certified else NO_CERTIFICATE
    backend, passed = choose_backend(asked, wanted, reasons, call.not_hopper, not_certified)
    how = numerics(backend, call.problem.recipe, arch=hw.arch, fits_e4m3=call.fits_e4m3)
    mode, why = mode_of(call, backend, chosen, wanted)
    require(
        "l1_sms" not in chosen or mode == "split" or backend == "reference",
        "l1_sms parts the SMs of mode split",
        got=f"mode {mode}",
        fix="leave it out, or ask for mode='split'",
        kind=NotAvailable,
    )
    why = f"{passed}; {why}" if passed else why
    passes: tuple[Pass, ...] = ()
    mega, num = None, 1
    rest: tuple[Launch, ...] = ()
    if backend == "reference" or (call.problem.num_tokens == 0 and not _is_chained(call, mode)):
        pass
    elif _is_chained(call, mode):
        owner = chain.owner_passes(call, backend, hw.num_sms, chosen, is_split=mode == "split")
        passes = chain.source_pass(call, backend), *owner
        rest = chain.rest(call, backend, hw.num_sms)
    elif mode == "split":
        passes = split.passes(call, hw.num_sms, chosen)
        rest = tuple(hopper.finish(call, call.problem.num_tokens))
    elif mode == "fused":
        num, _ = _fused(backend).passes_of(call)
        mega = _fused(backend).fused_launch(call, hw.num_sms, chosen)
    elif call.is_group:
        passes, rest = _over_group(call, backend, hw, chosen)
    elif backend == "hopper":
        passes = hopper.staged_passes(call, hw.num_sms, chosen)
        rest = tuple(hopper.finish(call, call.problem.num_tokens))
    elif backend == "blackwell":
        passes = blackwell.staged_passes(call, hw.num_sms, chosen)
        rest = tuple(hopper.finish(call, call.problem.num_tokens))
    else:
        passes = portable.staged_passes(call, hw.arch, chosen)
        rest = (portable.combine(call.problem.num_tokens, call.problem.hidden),)
    if backend in ("reference", "portable"):
        check_values(overrides)
    plan = Plan(
        call=call, hardware=hw, backend=backend, mode=mode, why=why, numerics=how, passes=passes,
        mega=mega, num_passes=num, rest=rest, buffers=(), overrides=overrides,
    )  # fmt: skip
    return _with_buffers(_with_overlaps(plan))


def _is_chained(call: CallSpec, mode: str) -> bool:
    return mode == "chain" or (mode == "split" and call.problem.num_ranks > 1)


def _fused(backend: str) -> Any:
    """The module of a backend's fused launches."""
    return blackwell_fused if backend == "blackwell" else hopper


def with_tile(plan: Plan, tile: Tile) -> Plan:
    """A staged plan of Hopper's routed experts with another tile in both linears, for sweeps."""
    p = plan.problem
    sizes = hopper.Sizes(p.num_tokens, p.top_k, p.num_experts, 0, p.hidden, p.intermediate)
    one = hopper.staged_pass(sizes, tile, plan.hardware.num_sms, "given", "routed")
    rest = tuple(hopper.finish(plan.call, p.num_tokens))
    changed = replace(plan, mode="staged", passes=(one,), mega=None, rest=rest)
    return _with_buffers(_with_overlaps(changed))


def rows_plan(
    call: CallSpec, backend: str, hw: Hardware, num_rows: int, overrides: Overrides
) -> Pass:
    """Staged over a group: the launches of the rows that a rank received."""
    if backend == "portable":
        return portable.rows_pass(call, num_rows, hw.arch, dict(overrides))
    gluon = blackwell if backend == "blackwell" else hopper
    return _to_wire(call, gluon.rows_pass(call, num_rows, hw.num_sms, dict(overrides)))


def _to_wire(call: CallSpec, one: Pass) -> Pass:
    """The pass whose BF16 rows cross the links, rounded to FP8 last where combine takes that."""
    if call.combine != "fp8":
        return one
    step = portable.quantize_rows(
        "rows_to_fp8", one.num_slots, call.problem.hidden, "codes-fp8_combine"
    )
    return replace(one, launches=(*one.launches, step))


def shared_plan(plan: Plan) -> Pass:
    """Over a group: the launches of the shared experts, which see this rank's tokens."""
    return _shared_pass(plan.call, plan.backend, plan.hardware, plan.is_chained)


def _shared_pass(call: CallSpec, backend: str, hw: Hardware, is_chained: bool) -> Pass:
    if backend == "portable":
        return portable.shared_pass(call, hw.arch)
    gluon = blackwell if backend == "blackwell" else hopper
    one = gluon.shared_pass(call, hw.num_sms)
    return one if is_chained else _to_wire(call, one)


def _over_group(
    call: CallSpec, backend: str, hw: Hardware, overrides: Mapping[str, Value]
) -> tuple[tuple[Pass, ...], tuple[Launch, ...]]:
    """Passes and the rest under even routing, where a rank receives as many rows as it sends."""
    p = call.problem
    rows = p.num_tokens * p.top_k
    passes = [rows_plan(call, backend, hw, rows, tuple(overrides.items()))]
    rest: list[Launch] = []
    if call.shared is not None:
        rest += _shared_pass(call, backend, hw, is_chained=False).launches
    rest.append(portable.combine(p.num_tokens, p.hidden))
    return tuple(passes), tuple(rest)


def _with_overlaps(plan: Plan) -> Plan:
    """Each launch with whether it is placed while the one before it on its stream ends.

    Split: a launch that waits for one of the other part, or for both parts, is not.
    """
    if not plan.overlaps:
        return plan
    is_split = plan.mode == "split"
    passes: list[Pass] = []
    for one in plan.passes:
        is_later = any(before.experts == one.experts for before in passes[plan.is_chained :])
        waits = _waiting(is_later, plan.is_chained) if is_split and one.find("l1") else ()
        passes.append(_overlapping(one, waits if one.experts != "shared" else ()))
    rest = Pass("", 0, 0, plan.rest)
    waits = ("finish",) if plan.is_chained else (plan.rest[0].name,) if plan.rest else ()
    is_joined = is_split and (plan.is_chained or passes[-1].experts != "shared")
    rest = _overlapping(rest, waits if is_joined else ())
    return replace(plan, passes=tuple(passes), rest=rest.launches)


def _waiting(is_later: bool, is_chained: bool) -> tuple[str, ...]:
    """Launches of a window in mode split that wait for the other part of the SMs."""
    first = ("window", "rows") if is_later else ("pull",) if is_chained else ("l1",)
    return (*first, "l2", "scales")


def _overlapping(one: Pass, waits: tuple[str, ...]) -> Pass:
    """The pass with its launches overlapping, but for those that wait by name and `decode`."""
    launches = (
        replace(step, overlaps=step.name not in (*waits, "decode")) for step in one.launches
    )
    return replace(one, launches=tuple(launches))


def _with_buffers(plan: Plan) -> Plan:
    return replace(plan, buffers=memory.buffers(plan))

"""Plans of grouped GEMMs alone: backend, tile, schedule and launches, each with its reason.

The four contiguous variants (E003): a plain product, gate and up with the activation, the same of
rows that are gathered, and a product whose rows go back to their tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from megamoe.errors import NotAvailable, one_of, require
from megamoe.formats.spec import recipe_named
from megamoe.hardware import Hardware
from megamoe.layout.regions import ceil_div
from megamoe.planner import blackwell, copies, portable
from megamoe.planner.backends import reasons_on
from megamoe.planner.choice import Choice, SharedMemory, Value
from megamoe.planner.hopper import max_tiles
from megamoe.planner.launches import GemmTmem, Launch, PlaceGroups, next_power_of_2
from megamoe.planner.numerics import Numerics, not_on, numerics
from megamoe.planner.overrides import checked
from megamoe.planner.plan import NO_CERTIFICATE, OPT_IN, choose_backend
from megamoe.planner.tables import blackwell as tables

VARIANTS = {
    "gemm": "each group's rows times its matrix",
    "swiglu": "gate and up of each row, the activation, the recipe's format",
    "gather": "swiglu of rows that are read from where they are, without a permutation before",
    "finalize": "a product whose rows are weighted and added for each token",
}
GATED = ("swiglu", "gather")
LINE = 128  # bytes of a row that one gather brings
SCALE_COLS = 32  # scales of a row that the launch before moves at a time


@dataclass(frozen=True, slots=True)
class GroupedSpec:
    """A grouped GEMM in integers: sorted rows [num_rows, k], matrices [num_groups, n, k].

    n           outputs of a row; a gated variant has twice as many weight rows
    num_tokens  finalize: rows of the result, if a launch of its own adds them up in their order; 0:
                the product adds them atomically
    """

    recipe: str
    num_rows: int
    num_groups: int
    n: int
    k: int
    variant: str = "gemm"
    num_tokens: int = 0

    def __post_init__(self) -> None:
        one_of(self.variant, tuple(VARIANTS), "variant")
        assert self.num_tokens == 0 or self.variant == "finalize"


@dataclass(frozen=True, slots=True)
class GroupedPlan:
    """How a grouped GEMM runs. Print it: it explains itself."""

    spec: GroupedSpec
    hardware: Hardware
    backend: str
    numerics: Numerics
    maps: Launch  # places rows or makes their maps
    gemm: Launch  # multiplies
    choices: tuple[Choice, ...]

    @property
    def launches(self) -> tuple[Launch, ...]:
        """Every launch in order; the first two where there are rows, and `finalize` adds them."""
        s = self.spec
        product = (self.maps, self.gemm) if s.num_rows else ()
        added = (portable.combine(s.num_tokens, s.n),) if s.num_tokens else ()
        return (*product, *added)

    @property
    def shared_memory(self) -> SharedMemory | None:
        """The sum of a CTA of Gluon's GEMM."""
        tile = self.gemm.config
        if not isinstance(tile, GemmTmem):
            return None
        return blackwell.shared_memory(self.spec.recipe, tile)

    def __getitem__(self, name: str) -> Value:
        return next(choice.value for choice in self.choices if choice.name == name)

    def __str__(self) -> str:
        s = self.spec
        rows = [
            f"{s.variant}: {s.num_rows} rows in {s.num_groups} groups, {s.n} x {s.k}, {s.recipe} "
            f"on {self.hardware.label}"
        ]
        rows += [f"  {c.name:<12}{c.value!s:<42} {c.why}" for c in self.choices]
        for one in self.launches:
            grid = " x ".join(map(str, one.grid))
            rows.append(f"  {one.name:<12}{one.kernel:<22} grid {grid:<10} {one.config}")
        return "\n".join(rows if self.shared_memory is None else [*rows, str(self.shared_memory)])


def plan_grouped(
    spec: GroupedSpec,
    hardware: Hardware | str,
    *,
    schedule: str = "auto",
    sort_by_m: bool = False,
    is_certified: bool = False,
    **overrides: Value,
) -> GroupedPlan:
    """How a grouped GEMM runs on a machine.

    schedule   "static", "dynamic", or "auto": by the number of tiles
    sort_by_m  large groups first
    overrides  backend and a tile, by the names of `planner.overrides`

    >>> print(plan_grouped(GroupedSpec("nvfp4", 1024, 8, 4096, 7168), "b200",
    ...                    backend="blackwell")["tile"])
    tmem 128x128x256, 6 stages, 2 sums, dynamic
    """
    hw = Hardware.named(hardware) if isinstance(hardware, str) else hardware
    one_of(schedule, ("auto", "static", "dynamic"), "schedule")
    chosen = dict(checked(overrides))
    require(
        not chosen.get("cta_pair"),
        "a grouped GEMM alone has one CTA a tile",
        got="cta_pair",
        fix="leave it out: pairs are of layers",
        kind=NotAvailable,
    )
    reasons = {n: why for n, why in reasons_on(hw.arch).items() if n in ("blackwell", "portable")}
    asked = str(chosen.pop("backend", "auto"))
    if hw.arch == "cpu":
        reasons["portable"] = ""  # Triton's interpreter; the caller has looked
    if spec.variant != "gemm":
        reasons["portable"] = f"has no variant {spec.variant} alone"
    for name in reasons:
        reasons[name] = reasons[name] or not_on(name, spec.recipe)
    not_certified = "" if is_certified else NO_CERTIFICATE
    working = [name for name, why in reasons.items() if not why]
    require(
        bool(working) and (asked != "auto" or not not_certified or working != list(OPT_IN)),
        f"variant {spec.variant} of {spec.recipe} needs a backend that runs here by itself",
        got="; ".join(f"{name}: {why or 'opt-in, ' + NO_CERTIFICATE}"
                      for name, why in reasons.items()),
        fix='ask for backend="blackwell"' if working else "",
        kind=NotAvailable,
    )  # fmt: skip
    name, passed = choose_backend(asked, "auto", reasons, not_certified=not_certified)
    if asked != "auto":
        because = "asked for"
    elif name == "portable":
        because = f"no other backend has a grouped GEMM alone on {hw.arch}"
    else:
        because = f"{hw.label} is {hw.arch}"
    why = Choice("backend", name, passed or because)
    if name == "portable":
        return _portable(spec, hw, why, schedule, sort_by_m, chosen)
    return _blackwell(spec, hw, why, schedule, sort_by_m, chosen)


def _portable(
    spec: GroupedSpec, hw: Hardware, backend: Choice, schedule: str, sort_by_m: bool,
    overrides: Mapping[str, Value],
) -> GroupedPlan:  # fmt: skip
    how = numerics("portable", spec.recipe, arch=hw.arch)
    _, tile, why = portable.tiles_for(spec.recipe, how, spec.num_rows / spec.num_groups, overrides)
    schedule = "static" if schedule == "auto" else schedule
    sms = hw.num_sms if schedule == "dynamic" else None
    step = portable.grouped(tile, spec.num_rows, spec.num_groups, spec.n, sms)
    choices = (backend, Choice("tile", str(tile), why), Choice("schedule", schedule, step.why))
    maps = copies.prepare(
        spec.num_rows, spec.k, spec.num_groups, tile.block_m,
        decodes=portable.is_ordered(spec.recipe, how), is_sorted=sort_by_m,
    )  # fmt: skip
    return GroupedPlan(spec, hw, "portable", how, maps, step, choices)


def tile_of(spec: GroupedSpec, overrides: Mapping[str, Value]) -> tuple[GemmTmem, str]:
    """(Blackwell's tile, why): by rows a group, and by width where a tile has all tokens it can.

    With 128 tokens a stage's tokens weigh as much as 128 weight rows, so that 256 rows read them
    once instead of twice; narrow matrices rather have twice the tiles for the SMs (C009).
    """
    tile, why = blackwell.pick(spec.recipe, spec.num_rows / spec.num_groups)
    is_gated, bits = spec.variant in GATED, recipe_named(spec.recipe).acts.element.bits
    if spec.variant == "gather" and bits == 4 and tile.block_k * bits // 8 != LINE:
        tile = replace(tile, block_k=LINE * 8 // bits, num_stages=0)
        tile = replace(tile, num_stages=blackwell.max_stages(spec.recipe, tile))
        why = f"a gather brings {LINE} bytes of each row to a stage"
    if not is_gated and tile.block_m == tables.BLOCK_MS[-1]:
        if spec.n <= tables.WIDE_N:
            tile = blackwell.narrowed(spec.recipe, tile)
            why = f"n up to {tables.WIDE_N}: tiles of 128 weight rows, twice as many for the SMs"
        else:
            why = (
                f"n above {tables.WIDE_N}: 256 weight rows a tile, whose tokens serve twice as many"
            )
    changed, asked = blackwell.overridden(spec.recipe, tile, overrides, is_gated=is_gated)
    require(
        spec.variant != "gather" or changed.block_k * bits // 8 == LINE,
        f"a gather brings {LINE} bytes of each row to a stage",
        got=f"{changed.block_k * bits // 8} with block_k {changed.block_k} of {spec.recipe}",
        fix='sort the rows and take variant="swiglu"',
        kind=NotAvailable,
    )
    return changed, asked or why


def _schedule(spec: GroupedSpec, tile: GemmTmem, num_sms: int, asked: str) -> Choice:
    """static or dynamic, by how many tiles there may be."""
    outputs = tile.block_n // (2 if spec.variant in GATED else 1)
    rows, groups = spec.num_rows, spec.num_groups
    tiles = max_tiles(rows, groups, tile.block_m) * ceil_div(spec.n, outputs)
    if asked != "auto":
        return Choice("schedule", asked, "given")
    if tiles <= num_sms:
        return Choice("schedule", "static", f"at most {tiles} tiles: none is left to take")
    why = f"up to {tiles} tiles on {num_sms} SMs: a CTA that is done takes the next"
    return Choice("schedule", "dynamic", why)


def _blackwell(
    spec: GroupedSpec, hw: Hardware, backend: Choice, schedule: str, sort_by_m: bool,
    overrides: Mapping[str, Value],
) -> GroupedPlan:  # fmt: skip
    tile, why = tile_of(spec, overrides)
    how = _schedule(spec, tile, hw.num_sms, schedule)
    tile = replace(tile, schedule="dynamic" if how.value == "dynamic" else "strided")
    places = blackwell.num_rows(spec.num_rows, spec.num_groups, tile.block_m)
    groups = next_power_of_2(spec.num_groups, 2)
    place = PlaceGroups(tile.block_m, groups, SCALE_COLS, sort_by_m)
    order = "large groups first: the last tiles are of short groups" if sort_by_m else "as given"
    grid = (1 + places // tile.block_m,)
    maps = Launch("place", "_place_groups_kernel", grid, place, "tiles, rows, scales of a place")
    gemm = Launch("gemm", "gemm_tmem_kernel", (hw.num_sms,), tile, why)
    columns = blackwell.tmem_columns(spec.recipe, tile)
    choices = (
        backend,
        Choice("tile", str(tile), why),
        Choice("block_m", tile.block_m, "tokens"),
        Choice("block_n", tile.block_n, "weight rows"),
        Choice("block_k", tile.block_k, "columns of a stage"),
        Choice("num_stages", tile.num_stages, "the number that fits in shared memory"),
        how,
        Choice("order", "sorted" if sort_by_m else "groups", order),
        Choice("tmem_columns", columns, "of 512: sums, scales, decoded weights"),
    )
    by = numerics("blackwell", spec.recipe)
    return GroupedPlan(spec, hw, "blackwell", by, maps, gemm, choices)

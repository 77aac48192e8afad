"""The chain: expert parallelism above decode sizes, as launches that wait for tiles, not for peers.

    quantize, count, scan, place   the source's tokens and slots
    exchange                       counts, lists and a signal to each owner; their signals here
    rows, pull, l1, l2             the owner's rows, in as many passes as its pool asks for
    finish                         rows are home, here and there
    combine                        after shared experts and FP8 rows, where there are any

No host in between: a call is one stretch of a stream, which a CUDA graph can hold. In mode split
pull and L1 run on one part of the SMs and L2 on the other (`planner/split.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

from megamoe.errors import CapacityError, NotAvailable, require
from megamoe.formats.spec import recipe_named
from megamoe.layout.pushed import (
    TokenWords,
    fp8_row_bytes,
    list_capacity,
    pushed_exchange,
    token_words,
)
from megamoe.layout.regions import Workspace, align_up, ceil_div
from megamoe.planner import blackwell, fused, hopper, split
from megamoe.planner.call import CallSpec
from megamoe.planner.choice import Value
from megamoe.planner.launches import (
    Constants,
    Gemm,
    GemmTmem,
    Launch,
    Pass,
    Place,
    Tile,
    next_power_of_2,
)
from megamoe.planner.numerics import numerics
from megamoe.planner.portable import combine, quantize_rows
from megamoe.planner.tables import blackwell as tmem_tables
from megamoe.planner.tables import hopper as tables
from megamoe.problem import MAX_TOP_K

EXCHANGE_WARPS, ROWS_WARPS, PULL_WARPS = 8, 4, 16
PULL_COLS = 4096  # words of a row that a CTA has in registers: a group of 8 rows is loaded together
LIST_CHUNK = 512  # entries of a pushed list that a program takes
WIDTHS = {"hopper": tables.WIDTH, "blackwell": tmem_tables.WIDTH}  # rows are padded to
LEAST_LOAD = 22.6  # rows an expert from which on tiles have 64 tokens: rows of 16-byte stores


@dataclass(frozen=True, slots=True)
class Records:
    """Tokens quantised once, where owners of experts read them."""

    cols: int
    num_warps: int = 4

    def constants(self) -> Constants:
        """Of `_quantize_kernel`."""
        return {"COLS": self.cols, "num_warps": self.num_warps}

    def __str__(self) -> str:
        return f"{self.cols} columns a program, {self.num_warps} warps"


@dataclass(frozen=True, slots=True)
class Exchange:
    """Counts, lists and signals to every peer: a CTA for each."""

    num_ranks: int
    max_experts: int  # of all ranks, a power of two
    max_local: int  # of one

    def constants(self) -> Constants:
        """Of `exchange_kernel`."""
        return {
            "RANKS": self.num_ranks, "EXPERTS": self.max_experts, "LOCAL": self.max_local,
            "num_warps": EXCHANGE_WARPS,
        }  # fmt: skip

    def __str__(self) -> str:
        return f"{self.num_ranks} ranks, {EXCHANGE_WARPS} warps"


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows, tiles and work items of what sources pushed."""

    num_ranks: int
    max_experts: int  # of one rank, a power of two
    block_m: int
    row_align: int  # rows at whose multiples experts begin
    chunks: int  # of each source's list
    first_row: int  # of the call's rows that the pool holds in this pass
    pool_rows: int
    waves: tuple[int, int]  # of work items, of L1 and L2; (0, 0): there are none
    max_ctas: int
    is_dynamic: bool

    def constants(self) -> Constants:
        """Of `_rows_kernel`."""
        return {
            "RANKS": self.num_ranks, "R": next_power_of_2(self.num_ranks), "E": self.max_experts,
            "CHUNK": LIST_CHUNK, "BLOCK": self.block_m, "ALIGN": self.row_align,
            "CTAS": self.max_ctas, "IS_DYNAMIC": self.is_dynamic, "IS_FIRST": self.first_row == 0,
            "num_warps": ROWS_WARPS,
        }  # fmt: skip

    def __str__(self) -> str:
        return f"{LIST_CHUNK} slots a program, rows from {self.first_row} on"


@dataclass(frozen=True, slots=True)
class Pull:
    """Tokens into the pool, 8 rows at a time, in the order of the tiles."""

    num_ranks: int
    block_m: int
    cols: int  # words of a row at a time
    max_scales: int  # words after the data, to a power of two
    is_placed: bool = False  # the pool's scales, by tile as an MMA's copies find them

    def constants(self) -> Constants:
        """Of `pull_kernel`."""
        return {
            "RANKS": self.num_ranks, "BLOCK": self.block_m, "COLS": self.cols,
            "SCALES": self.max_scales, "PLACED": self.is_placed, "num_warps": PULL_WARPS,
        }  # fmt: skip

    def __str__(self) -> str:
        return f"8 rows x {4 * self.cols} bytes, {PULL_WARPS} warps"


@dataclass(frozen=True, slots=True)
class Scales:
    """The scales of FP8 rows to their homes, 32 rows at a time."""

    block_m: int
    blocks: int  # of 128 columns of a row, to a power of two
    pitch: int  # to a multiple of 16

    def constants(self) -> Constants:
        """Of `scales_kernel`."""
        return {"BLOCK": self.block_m, "BLOCKS": self.blocks, "PITCH": self.pitch, "num_warps": 4}

    def __str__(self) -> str:
        return f"32 rows x {self.pitch} bytes"


@dataclass(frozen=True, slots=True)
class Finish:
    """Signals that rows are home."""

    num_ranks: int
    max_local: int  # experts of one rank, to a power of two

    def constants(self) -> Constants:
        """Of `finish_kernel`."""
        return {"RANKS": self.num_ranks, "LOCAL": self.max_local, "num_warps": 4}

    def __str__(self) -> str:
        return f"{self.num_ranks} ranks"


class Following(NamedTuple):
    """Which launches wait for tiles instead of for the launch before them, by their own words."""

    l1: bool
    l2: bool
    publishes: bool  # L1 counts its tiles for L2


def following(tile: Tile | GemmTmem, *, is_split: bool = False) -> Following:
    """How the GEMMs of a tile follow."""
    if isinstance(tile, Gemm) and tile.is_dynamic:
        return Following(True, False, False)  # L2 follows by the tile list, as on one rank
    if isinstance(tile, Gemm) and tile.decode_ahead and not is_split:
        return Following(True, False, False)
    return Following(True, True, True)


def why_not_alone(call: CallSpec) -> fused.Refusal | None:
    """Why the chain does not take the call of a layer without ranks; None where it has ranks."""
    if call.problem.num_ranks > 1 or call.max_tokens is not None:
        return None
    return fused.Refusal("the chain is for ranks; one layer alone runs staged or fused")


def why_not(call: CallSpec) -> fused.Refusal | None:
    """Why the chain does not take a call; None where it does."""
    p = call.problem
    if (alone := why_not_alone(call)) is not None:
        return alone
    if p.num_ranks > tables.MAX_RANKS:
        return fused.Refusal(f"the chain takes {tables.MAX_RANKS} ranks at most")
    if call.is_group and not call.max_tokens:
        why = "the chain needs max_tokens_per_rank: memory is shared up front"
        return fused.Refusal(why, CapacityError)
    if p.top_k + call.num_shared > MAX_TOP_K:
        return fused.Refusal(f"combine takes {MAX_TOP_K} slots of a token at most", CapacityError)
    return None


def bound(call: CallSpec) -> int:
    """Tokens of a rank that a call may have: what all ranks plan for."""
    return max(call.problem.num_tokens, call.max_tokens or 0, 1)


def words_of(call: CallSpec, backend: str) -> TokenWords:
    """A token's record."""
    p = call.problem
    has_factor = recipe_named(p.recipe).acts.has_global
    if backend == "blackwell":
        width = align_up(p.hidden, tmem_tables.WIDTH)
        return token_words(*blackwell.token_bytes(p.recipe, width), has_factor)
    how = numerics("hopper", p.recipe, fits_e4m3=call.fits_e4m3)
    width = align_up(p.hidden, tables.WIDTH)
    data = width if how.mma == "fp8" else 2 * width
    return token_words(data, 4 * width // 128 if how.promotion else 0, has_factor)


def has_fp8_rows(call: CallSpec, backend: str) -> bool:
    """Whether rows cross as FP8: where a warpgroup has all 128 columns that share a scale.

    So they do on Hopper where sums are promoted every 128 columns (w8a8, w4a8_block). Tiles of the
    others may have 64 columns a warpgroup, and Blackwell's epilogue stores BF16: such rows are
    rounded at home.
    """
    if backend == "blackwell":
        return False
    how = numerics("hopper", call.problem.recipe, fits_e4m3=call.fits_e4m3)
    return call.combine == "fp8" and how.promotion > 0


def row_bytes(call: CallSpec, backend: str) -> int:
    """Bytes of a row on its way home."""
    hidden = call.problem.hidden
    return fp8_row_bytes(hidden) if has_fp8_rows(call, backend) else 2 * hidden


def memory(call: CallSpec, backend: str) -> Workspace:
    """What a rank shares with its peers."""
    p = call.problem
    fp8_row = row_bytes(call, backend) if has_fp8_rows(call, backend) else None
    return pushed_exchange(
        bound(call), p.top_k + call.num_shared, p.top_k, p.hidden, p.num_ranks,
        p.num_local_experts, words_of(call, backend), fp8_row,
    )  # fmt: skip


def row_align(tile: Tile | GemmTmem) -> int:
    """Rows at whose multiples experts begin, and windows of the pool."""
    return tile.block_m if isinstance(tile, GemmTmem) else tables.ROW_ALIGN


def max_rows(call: CallSpec, tile: Tile | GemmTmem) -> int:
    """Rows that a rank may receive."""
    p = call.problem
    slots = bound(call) * p.num_ranks * p.top_k
    if isinstance(tile, GemmTmem):
        return blackwell.num_rows(slots, p.num_local_experts, tile.block_m)
    return hopper.num_rows(slots, p.num_local_experts)


def windows(
    call: CallSpec, tile: Tile | GemmTmem, overrides: Mapping[str, Value]
) -> tuple[int, int]:
    """(rows of the pool, passes): `pool_rows` bounds the pool, and more rows run in passes."""
    num_rows, wanted, align = max_rows(call, tile), overrides.get("pool_rows"), row_align(tile)
    if wanted is None:
        return num_rows, 1
    assert isinstance(wanted, int)
    rows = min(wanted // align * align, num_rows)
    passes = ceil_div(num_rows, max(rows, 1))
    require(
        rows > 0 and passes <= tables.MAX_WAVES,
        f"a call of up to {num_rows} rows must go through its pool in {tables.MAX_WAVES} passes",
        got=f"pool_rows {wanted}",
        fix=f"give at least {align_up(ceil_div(num_rows, tables.MAX_WAVES), align)}",
        kind=CapacityError,
    )
    return rows, passes


def num_pull_sms(num_sms: int) -> int:
    """SMs that pull."""
    return max(min(tables.PULL_SMS, num_sms // 8), 1)


def sms_of(call: CallSpec, num_sms: int, overrides: Mapping[str, Value]) -> int:
    """SMs of one rank."""
    reserve = overrides.get("reserve_sms") or 0
    assert isinstance(reserve, int)
    fused.check_grid(num_sms, reserve, 2 * call.local_ranks)
    return (num_sms - reserve) // call.local_ranks


class Sms(NamedTuple):
    """SMs of a rank by what runs on them; `is_split`: L1 and L2 each have a part of their own."""

    pull: int
    l1: int  # beside the pull
    l2: int
    is_split: bool


def sms_for(call: CallSpec, num_sms: int, overrides: Mapping[str, Value], *, is_split: bool) -> Sms:
    """Who runs where."""
    sms = sms_of(call, num_sms, overrides)
    pull = num_pull_sms(sms)
    if is_split:
        on = split.parts(num_sms, overrides)
        pull = min(pull, on.l1 // 2)
        return Sms(pull, on.l1 - pull, on.l2, is_split)
    return Sms(pull, sms - pull, sms, is_split)


def tile_for(
    call: CallSpec, backend: str, on: Sms, overrides: Mapping[str, Value]
) -> tuple[Tile | GemmTmem, str]:
    """The tile of both linears on so many SMs: on Hopper of 64 tokens at least."""
    p = call.problem
    load = bound(call) * p.num_ranks * p.top_k / p.num_experts
    if backend == "blackwell":
        return _tmem_tile(call, load, overrides)
    tile, why = hopper.tile_for(call, max(load, LEAST_LOAD), overrides)
    if isinstance(tile, Gemm) and tile.decode_ahead and "decode_ahead" not in overrides:
        l1 = hopper.decodes_per_wave(p.hidden, on.l1)
        if not (l1 and hopper.decodes_per_wave(p.intermediate, on.l2)):
            tile, asked = hopper.tile_for(call, tables.PER_TILE_ROWS, overrides)
            sms = f"{on.l1} and {on.l2}" if on.is_split else f"{on.l2}"
            few = f"{sms} SMs of a rank are too few to decode weights once per wave"
            why = f"{few}; {asked}"
    return tile, why


def _tmem_tile(call: CallSpec, load: float, overrides: Mapping[str, Value]) -> tuple[GemmTmem, str]:
    """The staged tile, whose rows are stored 16 bytes a thread whatever its width."""
    recipe = call.problem.recipe
    tile, why = blackwell.pick(recipe, load)
    changed, asked = blackwell.overridden(recipe, tile, overrides)
    require(
        changed.num_ctas == 1,
        "tiles of a chain are computed by one CTA: pairs wait for launches, not for tiles",
        got="cta_pair",
        fix="leave it out, or use mode='staged'",
        kind=NotAvailable,
    )
    require(
        changed.schedule != "sorted",
        "tiles of a chain come in the order in which their rows are pulled",
        got="schedule sorted",
        fix="use strided or dynamic",
        kind=NotAvailable,
    )
    return changed, asked or why


def gemm_launch(name: str, tile: Tile | GemmTmem, depth: int, num_sms: int, why: str) -> Launch:
    """One linear of the chain over K of `depth` columns."""
    if isinstance(tile, GemmTmem):
        return Launch(name, "gemm_tmem_kernel", (num_sms,), tile, why)
    return hopper.gemm_launch(name, tile, depth, num_sms, why)


def source_pass(call: CallSpec, backend: str) -> Pass:
    """This rank's tokens and slots, for their owners."""
    p = call.problem
    slots, experts = p.num_tokens * p.top_k, p.num_experts
    launches: list[Launch] = []
    if slots:
        cols, warps = tables.PERMUTE_COLS[False]
        width = align_up(p.hidden, WIDTHS[backend])
        grid = (p.num_tokens, ceil_div(width, cols))
        why = "by the source, once: owners pull tokens in the recipe's format"
        launches.append(Launch("quantize", "_quantize_kernel", grid, Records(cols, warps), why))
        chunks, max_experts = ceil_div(slots, tables.CHUNK), next_power_of_2(experts, 2)
        launches += hopper.count_and_scan(chunks, experts, tables.CHUNK, max_experts)
        place = Place(
            block_m=128, chunk=tables.CHUNK, count_chunk=tables.COUNT_CHUNK, is_counted=True,
            max_experts=max_experts,
            max_ctas=0, is_dynamic=False, num_warps=tables.PLACE_WARPS[False],
            row_align=tables.ROW_ALIGN,
        )  # fmt: skip
        launches.append(
            Launch("place", "_place_kernel", (chunks + 1,), place, "own slots, by expert")
        )
    config = Exchange(
        p.num_ranks, next_power_of_2(experts, 128), next_power_of_2(p.num_local_experts, 128)
    )
    why = "pushed by the source, so that no rank reads a peer's memory for it"
    launches.append(Launch("exchange", "exchange_kernel", (p.num_ranks,), config, why))
    return Pass("exchange", slots, experts, tuple(launches))


def owner_passes(
    call: CallSpec,
    backend: str,
    num_sms: int,
    overrides: Mapping[str, Value],
    *,
    is_split: bool = False,
) -> tuple[Pass, ...]:
    """Rows, pull, L1 and L2 of what this rank receives, window after window."""
    p = call.problem
    on = sms_for(call, num_sms, overrides, is_split=is_split)
    tile, why = tile_for(call, backend, on, overrides)
    if is_split:
        rows, passes = split.windows(max_rows(call, tile), overrides)
    else:
        rows, passes = windows(call, tile, overrides)
    is_dynamic = tile.is_dynamic
    l1_sms = on.l1 + on.pull if is_dynamic else on.l1
    has_items = tile.has_items
    slots, local = bound(call) * p.num_ranks * p.top_k, p.num_local_experts
    sizes = hopper.Sizes(min(slots, rows), 1, local, 0, p.hidden, p.intermediate)
    waves = (0, 0)
    if has_items:
        assert isinstance(tile, Gemm)
        waves = hopper.waves_of(sizes, tile, l1_sms)[0], hopper.waves_of(sizes, tile, on.l2)[1]
    words = words_of(call, backend)
    chunks = ceil_div(list_capacity(bound(call) * p.top_k, local), LIST_CHUNK)
    config = Rows(
        num_ranks=p.num_ranks,
        max_experts=next_power_of_2(local, 2),
        block_m=tile.block_m,
        row_align=row_align(tile),
        chunks=chunks,
        first_row=0,
        pool_rows=rows,
        waves=waves,
        max_ctas=next_power_of_2(max(l1_sms, on.l2)) if has_items else 0,
        is_dynamic=has_items and is_dynamic,
    )
    pull = Pull(
        p.num_ranks, tile.block_m, min(next_power_of_2(words.data, 256), PULL_COLS),
        next_power_of_2(words.pitch - words.data, 256) if words.pitch > words.data else 0,
        numerics(backend, p.recipe, fits_e4m3=call.fits_e4m3).acts == "placed",
    )  # fmt: skip
    grid = (p.num_ranks * chunks + 1 + sum(waves),)
    l1, l2 = ("l1", "l2") if is_split else ("", "")
    how_l2 = _how_l2(tile, is_split=is_split)
    gemms = [
        _on(l1, gemm_launch("l1", tile, p.hidden, l1_sms, f"{why}; {_how_l1(tile)}")),
        _on(l2, gemm_launch("l2", tile, p.intermediate, on.l2, f"{why}; {how_l2}")),
    ]
    if has_fp8_rows(call, backend):
        pitch = fp8_row_bytes(p.hidden) - p.hidden
        send = Scales(tile.block_m, next_power_of_2(pitch, 16), pitch)
        why = "a byte a row and block: together, after the codes that L2 sends"
        gemms.append(Launch("scales", "scales_kernel", (on.l2,), send, why, l2))
    why_pull = (tmem_tables if backend == "blackwell" else tables).WHY_PULL_SMS
    launches = []
    for number in range(passes):
        own = Launch(
            "rows", "_rows_kernel", grid, replace(config, first_row=number * rows),
            "rows in the order of one rank: by source, token and slot", l1 if number else "",
        )  # fmt: skip
        bring = Launch("pull", "pull_kernel", (on.pull,), pull, why_pull, l1)
        launches.append(Pass("routed", min(slots, rows), local, (own, bring, *gemms)))
    return tuple(launches)


def _on(partition: str, one: Launch) -> Launch:
    return replace(one, partition=partition)


def _how_l1(tile: Tile | GemmTmem) -> str:
    sms = "as they become free" if tile.is_dynamic else "that do not pull"
    return f"follows the pull tile by tile, on the SMs {sms}"


def _how_l2(tile: Tile | GemmTmem, *, is_split: bool) -> str:
    if isinstance(tile, Gemm) and tile.decode_ahead and not is_split:
        return "waits for all of L1, since its CTAs must all be resident"
    return "follows L1 tile by tile"


def rest(call: CallSpec, backend: str, num_sms: int) -> tuple[Launch, ...]:
    """What follows the passes."""
    p = call.problem
    config = Finish(p.num_ranks, next_power_of_2(p.num_local_experts, 128))
    launches = [Launch("finish", "finish_kernel", (p.num_ranks,), config, "rows are home")]
    if p.num_tokens == 0:
        return tuple(launches)
    slots = p.top_k + call.num_shared
    if call.shared is not None:
        own = blackwell if backend == "blackwell" else hopper
        launches += own.shared_pass(call, num_sms).launches
    at_home = call.num_shared if has_fp8_rows(call, backend) else slots
    if call.combine == "fp8" and at_home:
        kind = "codes-fp8_combine"
        launches.append(quantize_rows("rows_to_fp8", p.num_tokens * at_home, p.hidden, kind))
    launches.append(combine(p.num_tokens, p.hidden))
    return tuple(launches)

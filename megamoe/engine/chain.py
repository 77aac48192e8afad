"""The chain: one call of a rank over shared memory, as launches with no host between them.

Every rank makes the same calls. What a rank writes into its peers' memory, and when it may do so
again, is in `kernels/gluon/exchange.py`; who follows whom is in `kernels/gluon/pull.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megamoe.engine import chain_home
from megamoe.engine.call import Call
from megamoe.engine.chain_backend import ChainBackend, chain_backend
from megamoe.engine.launch_options import bound_s
from megamoe.formats.quantized import Quantized
from megamoe.kernels.common.compat import overlap
from megamoe.kernels.gluon import exchange, pull
from megamoe.kernels.gluon.dispatch import Tokens
from megamoe.kernels.gluon.follow import Chain
from megamoe.kernels.gluon.permute import place
from megamoe.kernels.gluon.pool import Pool
from megamoe.kernels.gluon.tile_scheduler import LinearTiles, WorkItems
from megamoe.kernels.hopper.gemm import fp8_rows
from megamoe.kernels.portable.routing import Routing
from megamoe.layout.pushed import TokenWords
from megamoe.layout.regions import Workspace, align_up
from megamoe.planner import chain as planned
from megamoe.planner.hopper import max_tiles, num_rows
from megamoe.planner.launches import Gemm, GemmSwapAb, GemmTmem, Launch, Pass
from megamoe.planner.plan import Plan
from megamoe.planner.tables.hopper import WIDTH

DTYPES = {"i32": torch.int32, "f32": torch.float32, "bf16": torch.bfloat16, "u8": torch.uint8}


class ChainBuffer(NamedTuple):
    """The regions of `layout.pushed.pushed_exchange`."""

    begun: Tensor
    done: Tensor
    state: Tensor
    counts_in: Tensor
    list_in: Tensor
    weight_in: Tensor
    tokens: Tensor
    rows: Tensor


def buffer_in(memory: Tensor, of: Workspace) -> ChainBuffer:
    """Zeroed uint8 memory as a rank's regions."""
    return ChainBuffer(
        *(
            memory[r.offset : r.end].view(DTYPES[r.dtype]).view(r.shape)
            for r in (of[name] for name in ChainBuffer._fields)
        )
    )


class Member(NamedTuple):
    """One rank of the chain: its memory, and where its peers' lies."""

    buffer: ChainBuffer
    peers: Tensor  # int64 [R] on the device: bytes from a place here to the same place there
    rank: int
    num_ranks: int


class Links(NamedTuple):
    """Links that are no faster than these, for ranks that share a GPU.

    is_alone   without the GEMMs: what links take alone, with rows that nobody computed
    latency_s  from asking a peer for rows until they are there, at least
    """

    bytes_per_s: float
    is_alone: bool = False
    latency_s: float = 0.0

    def ns_of(self, num_bytes: int) -> int:
        """Nanoseconds that they take for so many bytes."""
        return round(1e9 * num_bytes / self.bytes_per_s)


class _Ranked(NamedTuple):
    """What the launches of one call share."""

    me: Member
    call: Call
    words: TokenWords
    backend: ChainBackend
    packed: Any  # the weights as its kernels read them
    pdl: bool
    num_slots: int  # rows of a token: routed, then shared
    limit: int  # tokens of a rank that all ranks plan for
    links: Links | None
    l2_begun: Tensor | None  # int64 [1], with `links`: when L2 began

    @property
    def control(self) -> dict[str, Tensor | int]:
        """What kernels that signal and wait all take."""
        return {
            "state": self.me.buffer.state, "peers": self.me.peers,
            "report": self.call.status.report, "rank": self.me.rank,
            "bound_ns": int(bound_s(self.call.timeout_s) * 1e9),
        }  # fmt: skip


def run(me: Member, call: Call, plan: Plan, links: Links | None = None) -> Tensor:
    """The launches of a plan on this rank: bf16 [T, H] -> bf16 [T, H]."""
    *_, y = stretches(me, call, plan, links)
    assert y is not None
    return y


def stretches(
    me: Member, call: Call, plan: Plan, links: Links | None = None
) -> Iterator[Tensor | None]:
    """`run` in stretches; the last gives the result.

    No launch of a stretch waits for a later one of a peer. So ranks of one process that issue a
    stretch for all ranks before the next do not wait for what the host has still to compile, load
    or issue, in however few queues the driver puts their streams.
    """
    backend = chain_backend(plan.backend)
    backend.check_activation(call.options)
    extra = 0 if call.shared is None else call.shared.num_experts
    begun = None
    if links is not None:
        begun = torch.zeros(1, dtype=torch.int64, device=call.weights.device)
    here = _Ranked(
        me, call, planned.words_of(plan.call, plan.backend), backend,
        backend.prepared(call.weights), plan.overlaps, call.top_k + extra,
        planned.bound(plan.call), links, begun,
    )  # fmt: skip
    num, hidden = call.num_tokens, call.weights.hidden
    source, *owner = plan.passes
    routing, pushed = _source(here, source)
    yield None
    _exchange(here, source, pushed)
    yield None
    if plan.mode == "split":
        from megamoe.engine import chain_split

        chain_split.compute(here, owner, plan)
    else:
        for steps in owner:
            _compute(here, steps)
    yield None
    finish, *rest = plan.rest
    exchange.finish_kernel[finish.grid](
        done=me.buffer.done, error=call.status.bad_slot, **here.control,
        counts_in=me.buffer.counts_in, pitch=me.buffer.counts_in.shape[1], l2_begun=begun,
        ns_per_row=0 if links is None else links.ns_of(planned.row_bytes(plan.call, plan.backend)),
        **finish.config.constants(), **overlap(finish.overlaps),
    )  # fmt: skip
    yield None
    y = torch.empty(num, hidden, dtype=torch.bfloat16, device=call.weights.device)
    if num > 0:
        chain_home.combine_rows(here, plan, rest, routing, y)
    yield y


class _Pushed(NamedTuple):
    """What a source has for owners."""

    counts: Tensor  # int32 [experts of all ranks]
    slots: Tensor
    weights: Tensor


def _source(here: _Ranked, steps: Pass) -> tuple[Routing, _Pushed]:
    """This rank's tokens, quantised, and its slots by expert."""
    call = here.call
    device, num_slots = call.weights.device, steps.num_slots
    checked = (
        torch.empty(call.topk_idx.shape, dtype=torch.int32, device=device),
        torch.empty(call.topk_idx.shape, dtype=torch.float32, device=device),
    )
    error = call.status.bad_slot
    routing = Routing(call.topk_idx, call.topk_weights, *checked, error, call.num_valid)
    counts = torch.empty(steps.num_experts, dtype=torch.int32, device=device)
    slots, weights = counts, checked[1]
    if num_slots:
        _quantize(here, steps["quantize"])
        slots, weights = _sort(here, steps, routing, counts)
    else:
        counts.zero_()
        weights = torch.empty(16, dtype=torch.float32, device=device)
    return routing, _Pushed(counts, slots, weights)


def _exchange(here: _Ranked, steps: Pass, pushed: _Pushed) -> None:
    """Counts, slots and weights to their owners; and theirs here."""
    step, buffer = steps["exchange"], here.me.buffer
    num_local = steps.num_experts // here.me.num_ranks
    exchange.exchange_kernel[step.grid](
        counts=pushed.counts, slots=pushed.slots, slot_weights=pushed.weights,
        counts_in=buffer.counts_in,
        list_in=buffer.list_in, weight_in=buffer.weight_in, begun=buffer.begun, **here.control,
        local_experts=num_local, pitch=buffer.counts_in.shape[1],
        capacity=buffer.list_in.shape[1], limit=here.limit, **step.config.constants(),
        **overlap(here.pdl),
    )  # fmt: skip


def _quantize(here: _Ranked, step: Launch) -> None:
    """Tokens into this rank's records."""
    call, how = here.call, here.packed.how
    x, g = call.x, call.weights.x_global
    values = here.backend.ready(x, how) if isinstance(x, Quantized) else Tokens(x, g=g)
    tokens = here.me.buffer.tokens
    element = torch.bfloat16 if how.dtype == torch.bfloat16 else torch.uint8
    exchange.quantize_tokens(
        values.x, how.acts, tokens.view(torch.float32), here.words, tokens.view(element), step,
        x_scale=values.scale, g=values.g, is_ready=values.is_ready, by_group=how.to_e4m3,
        hidden=values.hidden, pdl=here.pdl,
    )  # fmt: skip


def _sort(here: _Ranked, steps: Pass, routing: Routing, counts: Tensor) -> tuple[Tensor, Tensor]:
    """(slots, their weights) by expert of all ranks; their number goes to `counts`."""
    num = steps.num_slots
    rows = num_rows(num, steps.num_experts)
    most = max_tiles(num, steps.num_experts, 128)
    slots, tiles, num_tiles = counts.new_empty(rows), counts.new_empty(most, 4), counts.new_empty(4)
    weights = torch.empty(rows, dtype=torch.float32, device=counts.device)
    pool = Pool(tiles, tiles, slots, weights, weights, tiles, num_tiles)
    place(
        routing, pool, steps, work=None, g=None, g_stride=0, stats=None, first_slot=0,
        num_dest=here.num_slots, num_shared=0, pdl=here.pdl, counts=counts,
    )  # fmt: skip
    return slots, weights


class _Window(NamedTuple):
    """Memory of one window of this rank's rows."""

    pool: Pool
    acts: Pool
    pulled: pull.Pulled
    work: tuple[WorkItems, WorkItems] | None


def _compute(here: _Ranked, steps: Pass) -> None:
    """One window of this rank's rows, from what sources pushed to rows at their homes."""
    window = _window(here, steps)
    _rows(here, steps, window)
    _pull(here, steps["pull"], window)
    if here.links is not None and here.links.is_alone:
        return
    follows = planned.following(tile_in(steps))
    _l1(here, steps, window, follows)
    _l2(here, steps, window, follows)


def _window(here: _Ranked, steps: Pass, first: _Window | None = None) -> _Window:
    """Memory of a window; tokens and their scales are those of the `first` half of a ring."""
    weights, how = here.call.weights, here.packed.how
    own = steps["rows"].config
    assert isinstance(own, planned.Rows)
    block_m = tile_in(steps).block_m
    sizes = steps.num_slots, steps.num_experts, block_m, weights.device

    def pool_of(width: int, tiles: Pool | None = None) -> Pool:
        slots, experts, block, device = sizes
        pool: Pool = here.backend.launch.pool(
            how, slots, width, experts, block, device, tiles, is_far=True, rows=own.pool_rows
        )
        return pool

    pool = pool_of(weights.hidden if first is None else 1)
    if first is not None:
        pool = pool._replace(data=first.pool.data, scale=first.pool.scale)
    counters = pool.num_tiles.new_empty(2, own.pool_rows // 8)
    pulled = pull.Pulled(pool.dest.new_empty(own.pool_rows), *counters)
    acts = pool_of(weights.intermediate, pool)
    return _Window(pool, acts, pulled, _items(here, steps, pool))


def _l1(here: _Ranked, steps: Pass, window: _Window, follows: planned.Following) -> None:
    """Rows of the pool to activations, tile by tile after the pull."""
    call, work, pulled = here.call, window.work, window.pulled
    here.backend.launch.gated(
        window.pool, here.packed.w13, window.acts, steps["l1"], here.packed.how, call.options,
        bias=call.weights.b13, **_taken(work, 0),
        acts_factor=call.weights.acts_global, error=call.status.bad_slot,
        use_pdl=steps["l1"].overlaps,
        chain=Chain(
            pulled.arrived, pulled.l1_done if follows.publishes else None,
            bound_s=bound_s(call.timeout_s),
        ),
    )  # fmt: skip


def _l2(here: _Ranked, steps: Pass, window: _Window, follows: planned.Following) -> None:
    """Activations to rows at their homes."""
    call, work, pool = here.call, window.work, window.pool
    send, rows, row_scale = steps.find("scales"), here.me.buffer.rows, None
    if send is not None:
        blocks, num_rows = align_up(call.weights.hidden, WIDTH) // 128, len(pool.dest)
        row_scale = torch.empty(blocks, num_rows, dtype=torch.uint8, device=rows.device)
        rows = rows.view(torch.float8_e4m3fn)
    here.backend.launch.linear(
        window.acts, here.packed.w2, rows, steps["l2"], here.packed.how, call.options,
        bias=call.weights.b2, **_taken(work, 1),
        acts_factor=call.weights.acts_global, error=call.status.bad_slot,
        use_pdl=steps["l2"].overlaps,
        chain=Chain(
            window.pulled.l1_done if follows.l2 else None, dest_unit=here.backend.dest_unit,
            after=here.packed.w13, begun=here.l2_begun, row_scale=row_scale,
            bound_s=bound_s(call.timeout_s),
        ),
    )  # fmt: skip
    if send is not None:
        fp8_rows.scales_kernel[send.grid](
            scale=row_scale, rows=here.me.buffer.rows, dest=pool.dest, tiles=pool.tiles,
            num_tiles=pool.num_tiles, pool_rows=len(pool.dest), hidden=call.weights.hidden,
            **send.config.constants(), **overlap(send.overlaps),
        )  # fmt: skip


def tile_in(steps: Pass) -> Gemm | GemmSwapAb | GemmTmem:
    """The tile of both linears of a pass."""
    tile = steps["l1"].config
    assert isinstance(tile, Gemm | GemmSwapAb | GemmTmem)
    return tile


def _taken(work: tuple[WorkItems, WorkItems] | None, which: int) -> dict[str, Tensor]:
    """The items of a linear, where its tile has any."""
    return {} if work is None else {"items": work[which].items}


def _items(here: _Ranked, steps: Pass, pool: Pool) -> tuple[WorkItems, WorkItems] | None:
    """Room for the work items of both linears, each of its own grid."""
    tile = steps["l1"].config
    if not isinstance(tile, Gemm) or not tile.has_items:
        return None
    is_dynamic = tile.schedule == "dynamic"
    l1, l2 = (
        WorkItems.empty(
            pool.tiles, [LinearTiles(-(-w.num_rows // 256), w.data.shape[1])],
            steps[name].num_ctas, tile.group_m, len(pool.tiles), is_dynamic=is_dynamic,
        )
        for name, w in (("l1", here.packed.w13), ("l2", here.packed.w2))
    )  # fmt: skip
    return l1, l2


def _rows(here: _Ranked, steps: Pass, window: _Window) -> None:
    """Rows, tiles and items of a window."""
    step, (pool, _, pulled, work) = steps["rows"], window
    own = step.config
    assert isinstance(own, planned.Rows)
    call, buffer, unused = here.call, here.me.buffer, pool.num_tiles
    names = "n_tiles", "slabs", "ctas"
    items: dict[str, Tensor | int] = {
        "l1_items": unused, "l2_items": unused, "l1_waves": 0, "span": 0,
        **{f"{linear}_{name}": 0 for linear in ("l1", "l2") for name in names},
    }  # fmt: skip
    if work is not None:
        assert tuple(one.waves[0] for one in work) == own.waves
        items |= {"l1_waves": own.waves[0], "span": work[0].span}
        for linear, one in zip(("l1", "l2"), work, strict=True):
            values = (*one.linears[0], one.ctas)
            items |= {f"{linear}_{name}": v for name, v in zip(names, values, strict=True)}
            items[f"{linear}_items"] = one.items
    pull._rows_kernel[step.grid](
        counts_in=buffer.counts_in, list_in=buffer.list_in, weight_in=buffer.weight_in,
        state=buffer.state, peers=here.me.peers,
        stats=unused if call.stats is None else call.stats, dest=pool.dest, origin=pulled.origin,
        weight=pool.weight, arrived=pulled.arrived, l1_done=pulled.l1_done, tiles=pool.tiles,
        num_tiles=pool.num_tiles, num_experts=call.weights.num_experts, num_dest=here.num_slots,
        row_bytes=buffer.rows.shape[1] * buffer.rows.element_size(),
        record_bytes=4 * here.words.pitch,
        pitch=buffer.counts_in.shape[1], capacity=buffer.list_in.shape[1], chunks=own.chunks,
        first_row=own.first_row, pool_rows=own.pool_rows, **items,
        HAS_STATS=call.stats is not None,
        DEST_BYTES=here.backend.dest_unit * buffer.rows.element_size(),
        **step.config.constants(), **overlap(step.overlaps),
    )  # fmt: skip


def _pull(here: _Ranked, step: Launch, window: _Window) -> None:
    """Tokens of a window into the pool."""
    pool, _, pulled, _ = window
    words, tokens, links = here.words, here.me.buffer.tokens, here.links
    scale = pool.scale if pool.scale.element_size() == 4 else pool.scale.view(torch.float32)
    ns_per_row, latency_ns = 0, 0
    if links is not None:  # every CTA is one of the link's lanes
        ns_per_row = links.ns_of(4 * words.pitch * step.num_ctas)
        latency_ns = round(1e9 * links.latency_s)
    pull.pull_kernel[step.grid](
        tokens=tokens, data=pool.data.view(torch.int32), scale=scale, factor=pool.factor,
        origin=pulled.origin, tiles=pool.tiles, num_tiles=pool.num_tiles, arrived=pulled.arrived,
        rank=here.me.rank, pool_rows=pool.data.shape[0], pitch=words.pitch, data_words=words.data,
        scale_words=words.scales, own_units=tokens.numel() // pull.ORIGIN_UNIT,
        ns_per_row=ns_per_row, latency_ns=latency_ns, HAS_FACTOR=words.factor > 0,
        PACE=links is not None, **step.config.constants(), **overlap(step.overlaps),
    )  # fmt: skip

"""The chain: one call of a rank over shared memory, as launches with no host between them.

Every rank makes the same calls. What a rank writes into its peers' memory, and when it may do so
again, is in `kernels/gluon/exchange.py`; which launch waits for which is in
`kernels/gluon/pull.py`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from megamoe.engine import partition, staged
from megamoe.engine.call import Call
from megamoe.engine.gluon import Gluon, tile_in
from megamoe.engine.interface import Prepared, SlotRows, backend_named
from megamoe.engine.launch_options import bound_s
from megamoe.engine.symm_buffer import regions_in
from megamoe.engine.window import Window, ring, side_by_side
from megamoe.kernels.common.compat import overlap
from megamoe.kernels.gluon import exchange, pull
from megamoe.kernels.gluon.follow import Chain
from megamoe.kernels.gluon.permute import place
from megamoe.kernels.gluon.pool import Pool
from megamoe.kernels.hopper.gemm import fp8_rows
from megamoe.kernels.portable.routing import Routing
from megamoe.layout.pushed import TokenWords
from megamoe.layout.regions import Workspace, align_up
from megamoe.planner import chain as planned
from megamoe.planner.hopper import max_tiles, num_rows
from megamoe.planner.launches import Launch, Pass
from megamoe.planner.plan import Plan, shared_plan
from megamoe.planner.tables.hopper import WIDTH


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
    return ChainBuffer(*regions_in(memory, of, ChainBuffer._fields))


class Member(NamedTuple):
    """One rank of the chain: its memory, and where its peers' lies."""

    buffer: ChainBuffer
    peers: Tensor  # int64 [R] on the device: bytes from a place here to the same place there
    rank: int
    num_ranks: int


class Links(NamedTuple):
    """Links that are no faster than these, for ranks that share a GPU.

    is_alone   without the GEMMs: what links take alone, with rows that were not computed
    latency_s  from asking a peer for rows until they are there, at least
    """

    bytes_per_s: float
    is_alone: bool = False
    latency_s: float = 0.0

    def ns_of(self, num_bytes: int) -> int:
        """Nanoseconds that they take for `num_bytes`."""
        return round(1e9 * num_bytes / self.bytes_per_s)


class _Context(NamedTuple):
    """What the launches of one call share."""

    me: Member
    call: Call
    plan: Plan
    words: TokenWords
    backend: Gluon
    packed: Prepared
    links: Links | None
    l2_start: Tensor | None  # int64 [1], with `links`: when L2 began

    @property
    def pdl(self) -> bool:
        """Whether a launch is placed while the one before it ends."""
        return self.plan.overlaps

    @property
    def num_slots(self) -> int:
        """Rows of a token: routed, then shared."""
        return self.call.top_k + self.call.num_shared

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
    *_, y = phases(me, call, plan, links)
    assert y is not None
    return y


def phases(
    me: Member, call: Call, plan: Plan, links: Links | None = None
) -> Iterator[Tensor | None]:
    """`run` phase by phase; the last gives the result.

    No launch of a phase waits for a later one of a peer. So ranks of one process that issue a phase
    for all ranks before the next do not wait for what the host has still to compile, load or issue,
    in however few queues the driver puts their streams.
    """
    backend = backend_named(plan.backend)
    assert isinstance(backend, Gluon)
    backend.check_activation(call.options)
    l2_start = None
    if links is not None:
        l2_start = torch.zeros(1, dtype=torch.int64, device=call.weights.device)
    words, packed = planned.words_of(plan.call, plan.backend), backend.prepare(call.weights)
    ctx = _Context(me, call, plan, words, backend, packed, links, l2_start)
    source, *owner = plan.passes
    routing, pushed = _source(ctx, source)
    yield None
    _exchange(ctx, source, pushed)
    yield None
    if plan.mode == "split":
        _compute_split(ctx, owner)
    else:
        for steps in owner:
            _compute(ctx, steps)
    yield None
    finish = plan.rest[0]
    ns_per_row = 0 if links is None else links.ns_of(planned.row_bytes(plan.call, plan.backend))
    exchange.finish_kernel[finish.grid](
        done=me.buffer.done, error=call.status.bad_slot, **ctx.control,
        counts_in=me.buffer.counts_in, pitch=me.buffer.counts_in.shape[1], l2_begun=l2_start,
        ns_per_row=ns_per_row, **finish.config.constants(),
        **overlap(finish.overlaps),
    )  # fmt: skip
    yield None
    yield _combine(ctx, routing)


def _combine(ctx: _Context, routing: Routing) -> Tensor:
    """Rows that came back, and those of shared experts, to bf16 [T, H]."""
    call, plan, num, hidden = ctx.call, ctx.plan, ctx.call.num_tokens, ctx.call.weights.hidden
    if num == 0:
        return torch.empty(0, hidden, dtype=torch.bfloat16, device=call.weights.device)
    rows = ctx.me.buffer.rows[: num * ctx.num_slots].view(num, ctx.num_slots, -1)
    out = SlotRows(rows)
    if rows.dtype == torch.uint8:  # FP8, the scales of a row after its codes
        out = SlotRows(rows[:, :, :hidden], rows[:, :, hidden:])
    return staged.finish(
        ctx.backend, call, plan, out, routing.idx, routing.weights,
        shared=None if call.shared is None else shared_plan(plan), to_fp8=staged.fp8_step(plan),
    )  # fmt: skip


class _Pushed(NamedTuple):
    """What a source has for owners."""

    counts: Tensor  # int32 [experts of all ranks]
    slots: Tensor
    weights: Tensor


def _source(ctx: _Context, steps: Pass) -> tuple[Routing, _Pushed]:
    """This rank's tokens, quantised, and its slots by expert."""
    call = ctx.call
    device, num_slots = call.weights.device, steps.num_slots
    routing = staged.routing_of(call)
    counts = torch.empty(steps.num_experts, dtype=torch.int32, device=device)
    slots, weights = counts, routing.weights
    if num_slots:
        _quantize(ctx, steps["quantize"])
        slots, weights = _sort(ctx, steps, routing, counts)
    else:
        counts.zero_()
        weights = torch.empty(16, dtype=torch.float32, device=device)
    return routing, _Pushed(counts, slots, weights)


def _exchange(ctx: _Context, steps: Pass, pushed: _Pushed) -> None:
    """Counts, slots and weights to their owners; and theirs to here."""
    step, buffer = steps["exchange"], ctx.me.buffer
    num_local = steps.num_experts // ctx.me.num_ranks
    exchange.exchange_kernel[step.grid](
        counts=pushed.counts, slots=pushed.slots, slot_weights=pushed.weights,
        counts_in=buffer.counts_in,
        list_in=buffer.list_in, weight_in=buffer.weight_in, begun=buffer.begun, **ctx.control,
        local_experts=num_local, pitch=buffer.counts_in.shape[1],
        capacity=buffer.list_in.shape[1], limit=planned.bound(ctx.plan.call),
        **step.config.constants(), **overlap(ctx.pdl),
    )  # fmt: skip


def _quantize(ctx: _Context, step: Launch) -> None:
    """Tokens into this rank's records."""
    call, arithmetic = ctx.call, ctx.packed.arithmetic
    values = ctx.backend.tokens(call.x, call.weights, arithmetic)
    tokens = ctx.me.buffer.tokens
    element = torch.bfloat16 if arithmetic.dtype == torch.bfloat16 else torch.uint8
    exchange.quantize_tokens(
        values.x, arithmetic.acts, tokens.view(torch.float32), ctx.words, tokens.view(element),
        step, x_scale=values.scale, g=values.g, is_ready=values.is_ready,
        by_group=arithmetic.to_e4m3, hidden=values.hidden, pdl=ctx.pdl,
    )  # fmt: skip


def _sort(ctx: _Context, steps: Pass, routing: Routing, counts: Tensor) -> tuple[Tensor, Tensor]:
    """(slots, their weights) by expert of all ranks; their number goes to `counts`."""
    num = steps.num_slots
    rows = num_rows(num, steps.num_experts)
    slots, num_tiles = counts.new_empty(rows), counts.new_empty(4)
    tiles = counts.new_empty(max_tiles(num, steps.num_experts, 128), 4)
    weights = torch.empty(rows, dtype=torch.float32, device=counts.device)
    pool = Pool(tiles, tiles, slots, weights, weights, tiles, num_tiles)
    place(
        routing, pool, steps, work=None, g=None, g_stride=0, stats=None, first_slot=0,
        num_dest=ctx.num_slots, num_shared=0, pdl=ctx.pdl, counts=counts,
    )  # fmt: skip
    return slots, weights


def _compute(ctx: _Context, steps: Pass) -> None:
    """One window of this rank's rows, from what sources pushed to rows at their sources."""
    (window,) = _ring(ctx, [steps])
    _rows(ctx, steps, window)
    _pull(ctx, steps["pull"], window)
    if ctx.links is not None and ctx.links.is_alone:
        return
    follows = planned.following(tile_in(steps))
    _l1(ctx, steps, window, publishes=follows.publishes)
    _l2(ctx, steps, window, follows=follows.l2)


def _compute_split(ctx: _Context, passes: Sequence[Pass]) -> None:
    """All windows: pull and L1 on one part of the SMs, L2 and the rows that it sends on the other.

    L1 waits for the pull before it on its own side, L2 for tiles of L1.
    """
    first, windows, l1_sms = passes[0], _ring(ctx, passes), ctx.plan["l1_sms"]
    assert isinstance(l1_sms, int)
    _rows(ctx, first, windows[0])
    follows = planned.following(tile_in(first), is_split=True)

    def l1(steps: Pass, window: Window) -> None:
        _pull(ctx, steps["pull"], window)
        _l1(ctx, steps, window, publishes=follows.publishes)

    side_by_side(
        passes, windows,
        partition.fork(ctx.call.weights.device, l1_sms, ctx.plan.hardware.num_sms),
        fill=partial(_rows, ctx), l1=l1, l2=partial(_l2, ctx, follows=follows.l2),
    )  # fmt: skip


def _ring(ctx: _Context, passes: Sequence[Pass]) -> list[Window]:
    """Memory of windows that follow each other."""
    steps = passes[0]
    own = steps["rows"].config
    assert isinstance(own, planned.Rows)
    return ring(
        ctx.backend, ctx.packed, ctx.call.weights, steps, len(passes), slots=steps.num_slots,
        rows=own.pool_rows, is_far=True,
    )  # fmt: skip


def _l1(ctx: _Context, steps: Pass, window: Window, *, publishes: bool) -> None:
    """Rows of the pool to activations, tile by tile after the pull."""
    call = ctx.call
    assert window.pulled is not None
    ctx.backend.launch.gated(
        window.pool, ctx.packed.w13, window.acts, steps["l1"], ctx.packed.arithmetic, call.options,
        bias=call.weights.b13, **window.items(0),
        acts_factor=call.weights.acts_global, error=call.status.bad_slot,
        use_pdl=steps["l1"].overlaps,
        chain=Chain(
            window.pulled.arrived, window.l1_done if publishes else None,
            bound_s=bound_s(call.timeout_s),
        ),
    )  # fmt: skip


def _l2(ctx: _Context, steps: Pass, window: Window, *, follows: bool) -> None:
    """Activations to rows at their sources."""
    call, pool = ctx.call, window.pool
    send, rows, row_scale = steps.find("scales"), ctx.me.buffer.rows, None
    if send is not None:
        blocks, num_rows = align_up(call.weights.hidden, WIDTH) // 128, len(pool.dest)
        row_scale = torch.empty(blocks, num_rows, dtype=torch.uint8, device=rows.device)
        rows = rows.view(torch.float8_e4m3fn)
    ctx.backend.launch.linear(
        window.acts, ctx.packed.w2, rows, steps["l2"], ctx.packed.arithmetic, call.options,
        bias=call.weights.b2, **window.items(1),
        acts_factor=call.weights.acts_global, error=call.status.bad_slot,
        use_pdl=steps["l2"].overlaps,
        chain=Chain(
            window.l1_done if follows else None, dest_unit=ctx.backend.dest_unit,
            after=ctx.packed.w13, begun=ctx.l2_start, row_scale=row_scale,
            bound_s=bound_s(call.timeout_s),
        ),
    )  # fmt: skip
    if send is not None:
        fp8_rows.scales_kernel[send.grid](
            scale=row_scale, rows=ctx.me.buffer.rows, dest=pool.dest, tiles=pool.tiles,
            num_tiles=pool.num_tiles, pool_rows=len(pool.dest), hidden=call.weights.hidden,
            **send.config.constants(), **overlap(send.overlaps),
        )  # fmt: skip


def _rows(ctx: _Context, steps: Pass, window: Window) -> None:
    """Rows, tiles and items of a window."""
    step, pool, work, pulled = steps["rows"], window.pool, window.work, window.pulled
    own = step.config
    assert isinstance(own, planned.Rows) and pulled is not None
    call, buffer, unused = ctx.call, ctx.me.buffer, pool.num_tiles
    names = "n_tiles", "slabs", "ctas"
    items: dict[str, Tensor | int] = {
        "l1_items": unused, "l2_items": unused, "l1_waves": 0, "span": 0,
        **{f"{linear}_{name}": 0 for linear in ("l1", "l2") for name in names},
    }  # fmt: skip
    if work:
        assert tuple(one.waves[0] for one in work) == own.waves
        items |= {"l1_waves": own.waves[0], "span": work[0].span}
        for linear, one in zip(("l1", "l2"), work, strict=True):
            values = (*one.linears[0], one.ctas)
            items |= {f"{linear}_{name}": v for name, v in zip(names, values, strict=True)}
            items[f"{linear}_items"] = one.items
    pull._rows_kernel[step.grid](
        counts_in=buffer.counts_in, list_in=buffer.list_in, weight_in=buffer.weight_in,
        state=buffer.state, peers=ctx.me.peers,
        stats=unused if call.stats is None else call.stats, dest=pool.dest, origin=pulled.origin,
        weight=pool.weight, arrived=pulled.arrived, l1_done=pulled.l1_done, tiles=pool.tiles,
        num_tiles=pool.num_tiles, num_experts=call.weights.num_experts, num_dest=ctx.num_slots,
        row_bytes=buffer.rows.shape[1] * buffer.rows.element_size(),
        record_bytes=4 * ctx.words.pitch,
        pitch=buffer.counts_in.shape[1], capacity=buffer.list_in.shape[1], chunks=own.chunks,
        first_row=own.first_row, pool_rows=own.pool_rows, **items,
        HAS_STATS=call.stats is not None,
        DEST_BYTES=ctx.backend.dest_unit * buffer.rows.element_size(),
        **step.config.constants(), **overlap(step.overlaps),
    )  # fmt: skip


def _pull(ctx: _Context, step: Launch, window: Window) -> None:
    """Tokens of a window into the pool."""
    pool, pulled = window.pool, window.pulled
    assert pulled is not None
    words, tokens, links = ctx.words, ctx.me.buffer.tokens, ctx.links
    scale = pool.scale if pool.scale.element_size() == 4 else pool.scale.view(torch.float32)
    ns_per_row, latency_ns = 0, 0
    if links is not None:  # every CTA is one of the link's lanes
        ns_per_row = links.ns_of(4 * words.pitch * step.num_ctas)
        latency_ns = round(1e9 * links.latency_s)
    pull.pull_kernel[step.grid](
        tokens=tokens, data=pool.data.view(torch.int32), scale=scale, factor=pool.factor,
        origin=pulled.origin, tiles=pool.tiles, num_tiles=pool.num_tiles, arrived=pulled.arrived,
        rank=ctx.me.rank, pool_rows=pool.data.shape[0], pitch=words.pitch, data_words=words.data,
        scale_words=words.scales, own_units=tokens.numel() // pull.ORIGIN_UNIT,
        ns_per_row=ns_per_row, latency_ns=latency_ns, HAS_FACTOR=words.factor > 0,
        PACE=links is not None, **step.config.constants(), **overlap(step.overlaps),
    )  # fmt: skip

"""Split: L1 on one part of the SMs, L2 on the other, side by side; bit for bit staged calls.

L1 waits for nobody but its own CTAs, which are all resident: its part has an SM for each. L2 waits
for tiles of L1, on SMs of its own, so nothing waits in a circle, and every wait has a bound that
ends in the layer's word. A window's L1 is placed after L2 of the window before the last, whose half
of the ring it takes: that wait is between launches. So each launch waits only for those that the
host issued before it, also where calls of several layers or threads share the two streams.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megamoe.engine import hopper, partition
from megamoe.engine.call import Call
from megamoe.engine.images import Prepared, prepared, with_shared
from megamoe.engine.launch_options import bound_s
from megamoe.formats.quantized import Quantized
from megamoe.kernels.gluon.dispatch import Tokens, permute, stride_of
from megamoe.kernels.gluon.follow import Chain
from megamoe.kernels.gluon.permute import place
from megamoe.kernels.gluon.pool import ROW_ALIGN, Pool
from megamoe.kernels.gluon.tile_scheduler import LinearTiles, WorkItems
from megamoe.kernels.gluon.window import Slots, window
from megamoe.kernels.hopper import launch
from megamoe.kernels.portable.combine import combine
from megamoe.kernels.portable.routing import Routing
from megamoe.planner.hopper import max_tiles
from megamoe.planner.launches import Gemm, Pass, Window
from megamoe.planner.plan import Plan
from megamoe.planner.split import WINDOWS, publishes


class _Half(NamedTuple):
    """What a window has for itself; two of them are a ring."""

    pool: Pool  # its tokens are those of all windows, in turn
    acts: Pool
    l1_done: Tensor  # int32 [R / 8]
    work: Sequence[WorkItems]  # of L1 and of L2, or none


class _Layer(NamedTuple):
    """What the launches of one call share."""

    call: Call
    tokens: Tokens
    packed: Prepared
    routing: Routing
    rows: Tensor  # [T, slots, H]
    shared: int  # experts of the routed launches that see every token
    pdl: bool


def run(call: Call, plan: Plan) -> Tensor:
    """The launches of a plan: bf16 [T, H] -> bf16 [T, H]."""
    hopper.check_activation(call.options)
    device, hidden, top_k = call.weights.device, call.weights.hidden, call.top_k
    num_tokens, extra, error = call.num_tokens, hopper.num_of(call.shared), call.status.bad_slot
    y = torch.empty(num_tokens, hidden, dtype=torch.bfloat16, device=device)
    idx = torch.empty(num_tokens, top_k, dtype=torch.int32, device=device)
    weight = torch.empty(num_tokens, top_k, dtype=torch.float32, device=device)
    routing = Routing(call.topk_idx, call.topk_weights, idx, weight, error, call.num_valid)
    rows = torch.empty(num_tokens, top_k + extra, hidden, dtype=torch.bfloat16, device=device)
    routed = [one for one in plan.passes if one.find("window") is not None]
    others = plan.passes[len(routed) :]
    _compute(_layer(call, routing, rows, plan, 0 if others else extra), routed, plan)
    for steps in others:
        assert call.shared is not None
        hopper.shared_rows(
            call.x, call.shared, call.options, error, rows, steps, top_k, plan.overlaps
        )
    row_scale = None
    *to_fp8, last = plan.rest
    for step in to_fp8:
        rows, row_scale = hopper.as_fp8(rows, step, step.overlaps)
    combine(
        rows, row_scale, idx, weight, y, step=last, weighted=call.options.weight_at == "combine",
        pdl=last.overlaps,
    )  # fmt: skip
    return y


def _layer(call: Call, routing: Routing, rows: Tensor, plan: Plan, joined: int) -> _Layer:
    weights = call.weights
    if joined:
        assert call.shared is not None
        packed = with_shared(weights, call.shared)
    else:
        packed = prepared(weights)
    x = call.x
    tokens = (
        hopper.ready(x, packed.how) if isinstance(x, Quantized) else Tokens(x, g=weights.x_global)
    )
    return _Layer(call, tokens, packed, routing, rows, joined, plan.overlaps)


def _compute(layer: _Layer, passes: Sequence[Pass], plan: Plan) -> None:
    """Every window: its tokens and L1 on one side, its L2 on the other; over when both are."""
    first = passes[0]
    slots, whole = _place(layer, passes)
    halves = _halves(layer, passes)
    _pool(layer, first, slots, halves[0])
    sides = partition.fork(whole.dest.device, first["l1"].num_ctas, plan.hardware.num_sms)
    left: list[Any] = []  # marks of L2
    try:
        for number, steps in enumerate(passes):
            half = halves[number % len(halves)]
            if number:
                if number >= WINDOWS:
                    sides.wait(0, left[number - WINDOWS])
                sides.run(0, partial(_pool, layer, steps, slots, half))
                sides.wait(1, sides.mark(0))
            sides.run(0, partial(_l1, layer, steps, whole, half))
            sides.run(1, partial(_l2, layer, steps, whole, half))
            left.append(sides.mark(1))
    finally:
        sides.join()  # also where a launch failed: those before it still read what is let go


def _place(layer: _Layer, passes: Sequence[Pass]) -> tuple[Slots, Pool]:
    """The row of every slot; and destination, weight and factor of every row of all windows."""
    steps, config = passes[0], passes[0]["window"].config
    assert isinstance(config, Window)
    like, num = layer.routing.idx, len(passes) * config.num_rows
    counts = like.new_empty(steps.num_experts)
    weight, factor = (layer.routing.weights.new_empty(num) for _ in range(2))
    tiles = like.new_empty(max_tiles(steps.num_slots, steps.num_experts, config.block_m), 4)
    whole = Pool(tiles, tiles, like.new_empty(num), weight, factor, tiles, like.new_empty(4))
    g = layer.tokens.g
    rows = place(
        layer.routing, whole, steps, work=None, g=g, g_stride=stride_of(g),
        stats=layer.call.stats, first_slot=0, num_dest=layer.rows.shape[1],
        num_shared=layer.shared, pdl=layer.pdl, counts=counts,
    )  # fmt: skip
    return Slots(rows, counts), whole


def _halves(layer: _Layer, passes: Sequence[Pass]) -> list[_Half]:
    """Memory of one window, or of two that take turns."""
    steps, config = passes[0], passes[0]["window"].config
    assert isinstance(config, Window)
    how, weights, num = layer.packed.how, layer.call.weights, config.num_rows
    slots, experts = min(steps.num_slots, num), steps.num_experts
    parts: list[_Half] = []
    for _ in range(min(len(passes), WINDOWS)):
        pool = launch.pool(
            how, slots, weights.hidden if not parts else 1, experts, config.block_m, weights.device,
            rows=num,
        )  # fmt: skip
        if parts:
            pool = pool._replace(data=parts[0].pool.data, scale=parts[0].pool.scale)
        acts = launch.pool(
            how, slots, weights.intermediate, experts, config.block_m, weights.device, pool,
            rows=num,
        )  # fmt: skip
        l1_done = pool.num_tiles.new_empty(num // ROW_ALIGN.value)
        parts.append(_Half(pool, acts, l1_done, _work(layer, steps, pool)))
    return parts


def _work(layer: _Layer, steps: Pass, pool: Pool) -> tuple[WorkItems, ...]:
    """Room for the items of both linears, each of its own grid, where the tile asks for them."""
    tile = steps["l1"].config
    if not isinstance(tile, Gemm) or not tile.has_items:
        return ()
    return tuple(
        WorkItems.empty(
            pool.tiles, [LinearTiles(-(-w.num_rows // 256), w.data.shape[1])],
            steps[name].num_ctas, tile.group_m, len(pool.tiles),
            is_dynamic=tile.schedule == "dynamic",
        )
        for name, w in (("l1", layer.packed.w13), ("l2", layer.packed.w2))
    )  # fmt: skip


def _pool(layer: _Layer, steps: Pass, slots: Slots, half: _Half) -> None:
    """Tiles, items and tokens of a window."""
    rows = window(
        slots, half.pool, half.l1_done, half.work, steps["window"],
        pdl=steps["window"].overlaps,
    )  # fmt: skip
    permute(
        layer.tokens, layer.routing, layer.packed.how.acts, half.pool, steps, rows,
        num_dest=layer.rows.shape[1], num_shared=layer.shared, by_group=layer.packed.how.to_e4m3,
        pdl=layer.pdl,
    )  # fmt: skip


def _l1(layer: _Layer, steps: Pass, whole: Pool, half: _Half) -> None:
    """Dispatched tokens to activations; signals each tile to L2."""
    call = layer.call
    items = half.work[0].items if half.work else None
    launch.gated(
        _window_of(half.pool, whole, steps), layer.packed.w13, half.acts, steps["l1"],
        layer.packed.how, call.options, items=items, bias=call.weights.b13,
        acts_factor=call.weights.acts_global, error=layer.routing.error,
        use_pdl=steps["l1"].overlaps,
        chain=Chain(publishes=half.l1_done if _counts(steps) else None),
    )  # fmt: skip


def _l2(layer: _Layer, steps: Pass, whole: Pool, half: _Half) -> None:
    """Activations to rows at their destinations, tile by tile after L1."""
    call = layer.call
    items = half.work[1].items if half.work else None
    launch.linear(
        _window_of(half.acts, whole, steps), layer.packed.w2, layer.rows, steps["l2"],
        layer.packed.how, call.options, items=items, bias=call.weights.b2,
        acts_factor=call.weights.acts_global, error=layer.routing.error,
        chain=Chain(
            half.l1_done if _counts(steps) else None, after=layer.packed.w13,
            bound_s=bound_s(layer.call.timeout_s),
        ),
    )  # fmt: skip


def _counts(steps: Pass) -> bool:
    return publishes(hopper.tile_in(steps["l1"]))


def _window_of(pool: Pool, whole: Pool, steps: Pass) -> Pool:
    """A pool with what `place` wrote of the window's rows."""
    config = steps["window"].config
    assert isinstance(config, Window)
    rows = slice(config.first_row, config.first_row + config.num_rows)
    return pool._replace(
        dest=whole.dest[rows], weight=whole.weight[rows], factor=whole.factor[rows]
    )

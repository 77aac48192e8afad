"""Split: L1 on one part of the SMs, L2 on the other, side by side; bit for bit staged calls.

L1 waits only for its own CTAs, which are all resident: its part has an SM for each. L2 waits
for tiles of L1, on SMs of its own, so nothing waits in a circle, and every wait has a bound that
ends in the layer's word. Windows of the rows take turns (`window.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

from torch import Tensor

from megamoe.engine import partition
from megamoe.engine.call import Call
from megamoe.engine.gluon import tile_in
from megamoe.engine.hopper import HOPPER
from megamoe.engine.interface import Prepared
from megamoe.engine.launch_options import bound_s
from megamoe.engine.window import Window, ring, side_by_side
from megamoe.kernels.gluon.dispatch import Tokens, permute, stride_of
from megamoe.kernels.gluon.follow import Chain
from megamoe.kernels.gluon.permute import place
from megamoe.kernels.gluon.pool import Pool
from megamoe.kernels.gluon.window import Slots, window
from megamoe.kernels.hopper import launch
from megamoe.kernels.portable.routing import Routing
from megamoe.planner.hopper import max_tiles
from megamoe.planner.launches import Gemm, GemmSwapAb, Pass
from megamoe.planner.launches import Window as Config
from megamoe.planner.plan import Plan
from megamoe.planner.split import publishes


class _Layer(NamedTuple):
    """What the launches of one call share."""

    call: Call  # its shared experts are in the same launches
    tokens: Tokens
    packed: Prepared
    routing: Routing
    out: Tensor  # [T, slots, H]
    pdl: bool


def rows(call: Call, plan: Plan, passes: Sequence[Pass], out: Tensor, routing: Routing) -> None:
    """Dispatch, L1 and L2 of the routed experts, window after window; rows to out [T, slots, H]."""
    HOPPER.check_activation(call.options)
    packed, first = HOPPER.prepare(call.weights, call.shared), passes[0]
    tokens = HOPPER.tokens(call.x, call.weights, packed.arithmetic)
    layer, num = _Layer(call, tokens, packed, routing, out, plan.overlaps), _config(first).num_rows
    slots, whole = _place(layer, passes)
    windows = ring(
        HOPPER, packed, call.weights, first, len(passes), slots=min(first.num_slots, num), rows=num
    )
    fill = partial(_fill, layer, slots)
    fill(first, windows[0])
    side_by_side(
        passes, windows,
        partition.fork(call.weights.device, first["l1"].num_ctas, plan.hardware.num_sms),
        fill=fill, l1=partial(_l1, layer, whole), l2=partial(_l2, layer, whole),
    )  # fmt: skip


def _config(steps: Pass) -> Config:
    config = steps["window"].config
    assert isinstance(config, Config)
    return config


def _place(layer: _Layer, passes: Sequence[Pass]) -> tuple[Slots, Pool]:
    """The row of every slot; and destination, weight and factor of every row of all windows."""
    steps, config = passes[0], _config(passes[0])
    like, num = layer.routing.idx, len(passes) * config.num_rows
    counts = like.new_empty(steps.num_experts)
    weight, factor = (layer.routing.weights.new_empty(num) for _ in range(2))
    tiles = like.new_empty(max_tiles(steps.num_slots, steps.num_experts, config.block_m), 4)
    whole = Pool(tiles, tiles, like.new_empty(num), weight, factor, tiles, like.new_empty(4))
    g = layer.tokens.g
    slot_rows = place(
        layer.routing, whole, steps, work=None, g=g, g_stride=stride_of(g),
        stats=layer.call.stats, first_slot=0, num_dest=layer.out.shape[1],
        num_shared=layer.call.num_shared, pdl=layer.pdl, counts=counts,
    )  # fmt: skip
    return Slots(slot_rows, counts), whole


def _fill(layer: _Layer, slots: Slots, steps: Pass, half: Window) -> None:
    """Tiles, items and tokens of a window."""
    step, arithmetic = steps["window"], layer.packed.arithmetic
    slot_rows = window(slots, half.pool, half.l1_done, half.work, step, pdl=step.overlaps)
    permute(
        layer.tokens, layer.routing, arithmetic.acts, half.pool, steps, slot_rows,
        num_dest=layer.out.shape[1], num_shared=layer.call.num_shared, by_group=arithmetic.to_e4m3,
        pdl=layer.pdl,
    )  # fmt: skip


def _l1(layer: _Layer, whole: Pool, steps: Pass, half: Window) -> None:
    """Dispatched tokens to activations; signals each tile to L2."""
    call = layer.call
    launch.gated(
        _part_of(half.pool, whole, steps), layer.packed.w13, half.acts, steps["l1"],
        layer.packed.arithmetic, call.options, bias=call.weights.b13,
        acts_factor=call.weights.acts_global, error=layer.routing.error,
        use_pdl=steps["l1"].overlaps,
        chain=Chain(publishes=_signals(half, steps)), **half.items(0),
    )  # fmt: skip


def _l2(layer: _Layer, whole: Pool, steps: Pass, half: Window) -> None:
    """Activations to rows at their destinations, tile by tile after L1."""
    call = layer.call
    launch.linear(
        _part_of(half.acts, whole, steps), layer.packed.w2, layer.out, steps["l2"],
        layer.packed.arithmetic, call.options, bias=call.weights.b2,
        acts_factor=call.weights.acts_global, error=layer.routing.error, **half.items(1),
        chain=Chain(
            _signals(half, steps), after=layer.packed.w13, bound_s=bound_s(call.timeout_s)
        ),
    )  # fmt: skip


def _signals(half: Window, steps: Pass) -> Tensor | None:
    """Where L1 counts its tiles for L2; None: in the tile list."""
    tile = tile_in(steps)
    assert isinstance(tile, Gemm | GemmSwapAb)
    return half.l1_done if publishes(tile) else None


def _part_of(pool: Pool, whole: Pool, steps: Pass) -> Pool:
    """A pool with what `place` wrote of the window's rows."""
    config = _config(steps)
    rows = slice(config.first_row, config.first_row + config.num_rows)
    return pool._replace(
        dest=whole.dest[rows], weight=whole.weight[rows], factor=whole.factor[rows]
    )

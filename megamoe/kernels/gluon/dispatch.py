"""Dispatch on the device: tokens into the expert-sorted pool that the GEMMs read.

A small call is one launch, every program finding the rows of its own slots; otherwise they are
written before by `permute`, as the plan says. Nothing is read back to the host.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from megamoe.kernels.common.columns import token_column
from megamoe.kernels.common.compat import after_previous, overlap, to_bf16
from megamoe.kernels.common.numbers import Kind
from megamoe.kernels.gluon.permute import (
    legal,
    place,
    rank,
    report_bad,
    routing_place,
    write_tiles,
)
from megamoe.kernels.gluon.placed import PLACED_ROWS, placed_group, placed_row
from megamoe.kernels.gluon.pool import Pool
from megamoe.kernels.gluon.tile_scheduler import WorkItems, expert_rows
from megamoe.kernels.portable.acts import quantise_blocks
from megamoe.kernels.portable.routing import Routing
from megamoe.planner.launches import Pass, Permute


@triton.jit
def token_codes(x_row, by, first_col, hidden, ACTS: tl.constexpr, COLS: tl.constexpr):
    """Bytes of COLS columns of a token in the format, and their scales [COLS / group]."""
    G: tl.constexpr = ACTS.GROUP
    col = first_col + tl.arange(0, COLS)
    source = tl.load(x_row + col, mask=col < hidden, other=0)
    tile = tl.reshape(source.to(tl.float32), (1, COLS // G, G))
    ratio, stored, _ = quantise_blocks(tile, by, ACTS)
    codes = ACTS.code(ratio)
    if ACTS.BITS == 4:
        low, high = tl.split(tl.reshape(codes, (COLS // 2, 2)))
        codes = low | (high << 4)
    else:
        codes = tl.reshape(codes, (COLS,))
    return codes, tl.reshape(stored, (COLS // G,))


@triton.jit
def ready_codes(x_row, scale_row, first_col, hidden, ACTS: tl.constexpr, COLS: tl.constexpr):
    """The same of a token that comes quantised; zeros beyond its width."""
    PACK: tl.constexpr = 8 // ACTS.BITS
    byte = first_col // PACK + tl.arange(0, COLS // PACK)
    group = first_col // ACTS.GROUP + tl.arange(0, COLS // ACTS.GROUP)
    codes = tl.load(x_row + byte, mask=byte < hidden // PACK, other=0)
    return codes, tl.load(scale_row + group, mask=group < hidden // ACTS.GROUP, other=0)


@triton.jit
def quantised(source, by, ACTS: tl.constexpr, COLS: tl.constexpr):
    """COLS columns of a token in the format, one element a column, and their scales."""
    G: tl.constexpr = ACTS.GROUP
    tile = tl.reshape(source.to(tl.float32), (1, COLS // G, G))
    ratio, stored, step = quantise_blocks(tile, by, ACTS)
    if ACTS.STORED_AS == "values":
        values = to_bf16(tl.reshape(ACTS.round(ratio) * step[:, :, None], (COLS,)))
    elif ACTS.STORED_AS == "scaled":
        values = to_bf16(tl.reshape(ACTS.round(ratio), (COLS,)))
    else:
        values = tl.reshape(ACTS.code(ratio), (COLS,))
    return values, stored


@triton.jit
def _store_placed(
    codes, stored, row, used, data, scale, first_col, width, ACTS: tl.constexpr,
    COLS: tl.constexpr, ALIGN: tl.constexpr,
):  # fmt: skip
    """Bytes and scales of COLS columns to the token's rows; tiles begin at multiples of ALIGN."""
    PACK: tl.constexpr = 8 // ACTS.BITS
    G: tl.constexpr = ACTS.GROUP
    byte = first_col // PACK + tl.arange(0, COLS // PACK)
    at = row.to(tl.int64)[:, None] * (width // PACK) + byte[None, :]
    mask = used[:, None] & (byte < width // PACK)[None, :]
    tl.store(data + at, tl.broadcast_to(codes[None, :], at.shape), mask=mask)
    group = first_col // G + tl.arange(0, COLS // G)
    tile_bytes = width // G * PLACED_ROWS
    begin = (row // ALIGN).to(tl.int64) * tile_bytes + placed_row(row % ALIGN)
    at = begin[:, None] + placed_group(group)[None, :]
    mask = used[:, None] & (group < width // G)[None, :]
    tl.store(scale + at, tl.broadcast_to(stored.to(tl.uint8)[None, :], at.shape), mask=mask)


@triton.jit
def _pool_kernel(
    x, x_scale, x_stride, g, g_stride, idx, weights, num_valid, error, idx_out, weights_out, rows,
    stats, data, scale, dest, weight, factor, tiles, num_tiles,
    num_slots, pool_rows, num_experts, hidden, width, first_slot, num_dest,
    ACTS: tl.constexpr, READY: tl.constexpr, HAS_G: tl.constexpr, HAS_STATS: tl.constexpr,
    HAS_COUNT: tl.constexpr, TOP_K: tl.constexpr, SHARED: tl.constexpr, K_SLOTS: tl.constexpr,
    SLOTS: tl.constexpr, IS_SMALL: tl.constexpr, BLOCK: tl.constexpr, ALIGN: tl.constexpr,
    COLS: tl.constexpr, E: tl.constexpr, SORTED: tl.constexpr, BY_GROUP: tl.constexpr,
):  # fmt: skip
    """Program (token, block of columns): quantise once, write to each of the token's rows.

    IS_SMALL: every program looks at all slots; otherwise `rows` are known. READY tokens come in the
    pool's own format, with their scales. BY_GROUP: how columns stand in it (`common.columns`).
    """
    after_previous()
    token = tl.program_id(0)
    part = tl.program_id(1)
    slot = tl.arange(0, K_SLOTS)
    at = token * TOP_K + slot
    own = slot < TOP_K
    if IS_SMALL:
        mine, share, bad = legal(
            idx, weights, at, own, num_valid, num_experts, TOP_K, SHARED, HAS_COUNT
        )
        other = tl.arange(0, SLOTS)
        experts, _, _ = legal(
            idx, weights, other, other < num_slots, num_valid, num_experts, TOP_K, SHARED, HAS_COUNT
        )
        count = tl.histogram(tl.maximum(experts, 0), E, mask=experts >= 0)
        row_begin = expert_rows(count, ALIGN)
        used = mine >= 0
        row = tl.gather(row_begin, tl.maximum(mine, 0), 0) + rank(experts, other, mine, at)
    else:
        row = tl.load(rows + at, mask=own, other=-1)
        used = row >= 0
    if ACTS.STORED_AS == "placed":
        if READY:
            codes, stored = ready_codes(
                x + token.to(tl.int64) * x_stride, x_scale + token * tl.cdiv(hidden, ACTS.GROUP),
                part * COLS, hidden, ACTS, COLS,
            )  # fmt: skip
        else:
            by = tl.load(g + token * g_stride) if HAS_G else 1.0
            x_row = x + token.to(tl.int64) * x_stride
            codes, stored = token_codes(x_row, by, part * COLS, hidden, ACTS, COLS)
        _store_placed(codes, stored, row, used, data, scale, part * COLS, width, ACTS, COLS, ALIGN)
    else:
        col = part * COLS + tl.arange(0, COLS)
        block = part * (COLS // 128) + tl.arange(0, COLS // 128)
        place = row.to(tl.int64)[:, None] * width + col[None, :]
        mask = used[:, None] & (col < width)[None, :]
        scale_place = block[None, :].to(tl.int64) * pool_rows + row[:, None]
        scale_mask = used[:, None] & (block < width // 128)[None, :]
        place_of = part * COLS + token_column(tl.arange(0, COLS)) if BY_GROUP else col
        source = tl.load(
            x + token.to(tl.int64) * x_stride + place_of, mask=place_of < hidden, other=0
        )
        if READY or ACTS.STORED_AS == "plain":
            values = source
            if READY and ACTS.STORED_AS != "values" and ACTS.STORED_AS != "plain":
                blocks = tl.cdiv(hidden, 128)
                scales = tl.load(x_scale + token * blocks + block, mask=block < blocks, other=1.0)
                wide = tl.broadcast_to(scales[None, :], scale_place.shape)
                tl.store(scale + scale_place, wide, mask=scale_mask)
        else:
            by = tl.load(g + token * g_stride) if HAS_G else 1.0
            values, stored = quantised(source, by, ACTS, COLS)
            if ACTS.STORED_AS != "values":
                wide = tl.broadcast_to(stored, scale_place.shape)
                tl.store(scale + scale_place, wide, mask=scale_mask)
        tl.store(data + place, tl.broadcast_to(values[None, :], place.shape), mask=mask)
    if IS_SMALL and part == 0:
        tl.store(dest + row, token * num_dest + first_slot + slot, mask=used)
        tl.store(weight + row, share, mask=used)
        if HAS_G:
            token_factor = tl.load(g + token * g_stride)
            tl.store(factor + row, tl.zeros([K_SLOTS], tl.float32) + token_factor, mask=used)
        to, is_routed = routing_place(at, TOP_K, SHARED)
        tl.store(idx_out + to, mine, mask=own & is_routed)
        tl.store(weights_out + to, share, mask=own & is_routed)
        report_bad(bad, to, error)
        if token == 0:
            if HAS_STATS:
                expert = tl.arange(0, E)
                inside = expert < num_experts - SHARED
                total = tl.load(stats + expert, mask=inside)
                tl.store(stats + expert, total + count, mask=inside)
            write_tiles(count, row_begin, tiles, num_tiles, BLOCK, SORTED)


class Tokens(NamedTuple):
    """Tokens [T, H] as they come: BF16, or `is_ready` in the pool's format with their scales."""

    x: Tensor
    scale: Tensor | None = None
    g: Tensor | None = None  # NVFP4's global scale, of all or of each
    is_ready: bool = False
    hidden: int = 0  # where x has two values a byte


def route(
    tokens: Tokens,
    routing: Routing,
    acts: Kind,
    pool: Pool,
    steps: Pass,
    *,
    work: WorkItems | None = None,
    stats: Tensor | None = None,
    first_slot: int = 0,
    num_dest: int = 0,
    num_shared: int = 0,
    by_group: bool = False,
    pdl: bool = False,
) -> None:
    """Fill `pool` from tokens and their routing, in the plan's `steps`.

    Writes the work items of `work` too. The last `num_shared` experts see every token, with weight
    1, in slots after the routed ones.
    """
    top_k = routing.topk_idx.shape[1] + num_shared
    config, g = steps["permute"].config, tokens.g
    assert isinstance(config, Permute)
    num_dest = num_dest or top_k
    rows = pool.num_tiles
    if not config.is_small:
        rows = place(
            routing, pool, steps, work=work, g=g, g_stride=stride_of(g), stats=stats,
            first_slot=first_slot, num_dest=num_dest, num_shared=num_shared, pdl=pdl,
        )  # fmt: skip
    permute(
        tokens, routing, acts, pool, steps, rows, stats=stats, first_slot=first_slot,
        num_dest=num_dest, num_shared=num_shared, by_group=by_group, pdl=pdl,
    )  # fmt: skip


def stride_of(g: Tensor | None) -> int:
    """From one token's global scale to the next's; 0 where there is one of all."""
    return 0 if g is None or g.ndim == 0 else 1


def permute(
    tokens: Tokens,
    routing: Routing,
    acts: Kind,
    pool: Pool,
    steps: Pass,
    rows: Tensor,
    *,
    stats: Tensor | None = None,
    first_slot: int = 0,
    num_dest: int = 0,
    num_shared: int = 0,
    by_group: bool = False,
    pdl: bool = False,
) -> None:
    """Tokens to their `rows`, int32 [slots]; in small calls programs find the rows themselves."""
    x, x_scale, g, is_ready, hidden = tokens
    top_k = routing.topk_idx.shape[1] + num_shared
    slots, num_experts = len(x) * top_k, steps.num_experts
    config = steps["permute"].config
    assert isinstance(config, Permute) and slots == steps.num_slots
    is_small, unused = config.is_small, pool.num_tiles
    pack = 8 // acts.BITS.value if acts.STORED_AS.value == "placed" else 1
    width = pool.data.shape[1] * pack
    has_count = is_small and routing.num_valid is not None
    _pool_kernel[steps["permute"].grid](
        x=_raw(x), x_scale=unused if x_scale is None else _raw(x_scale), x_stride=x.stride(0),
        g=unused if g is None else g, g_stride=stride_of(g), idx=routing.topk_idx,
        weights=routing.topk_weights, num_valid=routing.num_valid if has_count else unused,
        error=routing.error, idx_out=routing.idx, weights_out=routing.weights, rows=rows,
        stats=unused if stats is None else stats, data=_raw(pool.data), scale=_raw(pool.scale),
        dest=pool.dest, weight=pool.weight, factor=pool.factor, tiles=pool.tiles,
        num_tiles=pool.num_tiles, num_slots=slots, pool_rows=pool.data.shape[0],
        num_experts=num_experts, hidden=hidden or x.shape[1], width=width, first_slot=first_slot,
        num_dest=num_dest, ACTS=acts, READY=is_ready, HAS_G=g is not None,
        HAS_STATS=is_small and stats is not None, HAS_COUNT=has_count, TOP_K=top_k,
        SHARED=num_shared, BY_GROUP=by_group, **config.constants(), **overlap(pdl),
    )  # fmt: skip


def _raw(t: Tensor) -> Tensor:
    return t.view(torch.uint8) if t.dtype == torch.float8_e4m3fn else t

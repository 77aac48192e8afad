"""Routing and dispatch on the device: tokens into the expert-sorted pool that the GEMMs read.

Rows of one expert lie together in slot order and start at a multiple of ALIGN (TMA reads scales in
whole 16 bytes). A tile is (expert, first row, end row). Up to SMALL slots one launch does it all,
every program counting for itself; above that three more check and count. Nothing is read back.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from megamoe.kernels.device.columns import token_column
from megamoe.kernels.device.compat import after_previous, overlap, to_bf16
from megamoe.kernels.device.numbers import Kind
from megamoe.kernels.portable.acts import quantise_blocks
from megamoe.kernels.portable.dispatch import Routing, dispatch
from megamoe.kernels.portable.routing import legal_or
from megamoe.kernels.portable.sort import CHUNK, count_slots
from megamoe.layout.regions import align_up

SMALL = 1024  # slots
ALIGN = tl.constexpr(8)  # rows
COLS = {True: (1024, 4), False: (2048, 2)}  # whether small: columns and warps of a program


class Pool(NamedTuple):
    """Tokens sorted by expert, and what the GEMMs ask about each row; `num_rows` rows."""

    data: Tensor  # [R, width]: E4M3 or BF16, zero beyond the tokens' width
    scale: Tensor  # FP32 [width / 128, R], where the format has them
    dest: Tensor  # int32 [R]: row of the combine buffer; int64: offset there, over ranks
    weight: Tensor  # FP32 [R]
    factor: Tensor  # FP32 [R]: NVFP4's global scale of the token
    tiles: Tensor  # int32 [max_tiles, 4]: expert, first row, end row
    num_tiles: Tensor  # int32 [1]


def num_rows(slots: int, experts: int) -> int:
    """Rows of a pool that any routing fits, gaps before experts included."""
    return align_up(slots + min(slots, experts) * (ALIGN.value - 1), ALIGN.value)


def max_tiles(slots: int, experts: int, block: int) -> int:
    """Tiles of `block` rows that any routing can ask for."""
    return max(min(slots, slots // block + experts), 1)


@triton.jit
def _legal(
    idx, weights, at, used, num_valid, num_experts, TOP_K: tl.constexpr, HAS_COUNT: tl.constexpr
):
    """(expert or -1, weight, whether it was neither legal nor masked) of slots `at`."""
    expert = legal_or(tl.load(idx + at, mask=used, other=-1), num_experts)
    weight = tl.load(weights + at, mask=used, other=0.0)
    if HAS_COUNT:
        expert = tl.where(at // TOP_K < tl.load(num_valid), expert, -1)
    finite = tl.abs(weight) < float("inf")
    bad = (expert < -1) | ((expert >= 0) & (finite == 0))
    keep = (expert >= 0) & (bad == 0)
    return tl.where(keep, expert, -1), tl.where(keep, weight, 0.0), bad & used


@triton.jit
def _first_rows(count, mine, E: tl.constexpr):
    """Where the rows of experts `mine` begin."""
    aligned = (count + ALIGN - 1) // ALIGN * ALIGN
    lower = tl.arange(0, E)[None, :] < mine[:, None]
    return tl.sum(tl.where(lower, aligned[None, :], 0), 1)


@triton.jit
def _rank(experts, other, mine, slot):
    """How many of the slots `other` come before `slot` and have the same expert."""
    same = (experts == mine[:, None]) & (other < slot[:, None])
    return tl.sum(same.to(tl.int32), 1)


@triton.jit
def _write_tiles(
    count, tiles, num_tiles, BLOCK: tl.constexpr, CHUNK: tl.constexpr, E: tl.constexpr
):
    """One program: rows per expert to tiles."""
    expert = tl.arange(0, E)
    blocks = (count + BLOCK - 1) // BLOCK
    last = tl.cumsum(blocks, 0)
    aligned = (count + ALIGN - 1) // ALIGN * ALIGN
    first = tl.cumsum(aligned, 0) - aligned
    total = tl.sum(blocks, 0)
    tl.store(num_tiles, total)
    for start in tl.range(0, total, CHUNK):
        tile = start + tl.arange(0, CHUNK)
        passed = last[None, :] <= tile[:, None]
        group = tl.sum(passed.to(tl.int32), 1)
        before = tl.sum(tl.where(passed, blocks[None, :], 0), 1)
        own = group[:, None] == expert[None, :]
        begin = tl.sum(tl.where(own, first[None, :], 0), 1)
        stop = tl.sum(tl.where(own, (first + count)[None, :], 0), 1)
        row = begin + (tile - before) * BLOCK
        mask = tile < total
        tl.store(tiles + tile * 4, group, mask=mask)
        tl.store(tiles + tile * 4 + 1, row, mask=mask)
        tl.store(tiles + tile * 4 + 2, tl.minimum(row + BLOCK, stop), mask=mask)


@triton.jit
def _pool_kernel(
    x, x_scale, x_stride, g, g_stride, idx, weights, num_valid, error, idx_out, weights_out,
    chunk_counts, counts, stats, data, scale, dest, weight, factor, tiles, num_tiles,
    num_slots, pool_rows, num_experts, hidden, width, first_slot, num_dest,
    ACTS: tl.constexpr, READY: tl.constexpr, HAS_G: tl.constexpr, HAS_STATS: tl.constexpr,
    HAS_COUNT: tl.constexpr, CHECK: tl.constexpr, TOP_K: tl.constexpr, K_SLOTS: tl.constexpr,
    SLOTS: tl.constexpr, IS_SMALL: tl.constexpr, BLOCK: tl.constexpr, COLS: tl.constexpr,
    CHUNK: tl.constexpr, E: tl.constexpr, BY_GROUP: tl.constexpr,
):  # fmt: skip
    """Program (token, block of columns): quantise once, write to each of the token's rows.

    IS_SMALL: every program looks at all slots, and CHECKs its own; otherwise `idx` is checked and
    counted already. READY tokens come in the pool's own format, with their scales. BY_GROUP: how
    columns stand in the pool (`device.columns`).
    """
    after_previous()
    token = tl.program_id(0)
    part = tl.program_id(1)
    slot = tl.arange(0, K_SLOTS)
    at = token * TOP_K + slot
    own = slot < TOP_K
    mine, share, bad = _legal(idx, weights, at, own, num_valid, num_experts, TOP_K, HAS_COUNT)
    used = mine >= 0
    expert = tl.arange(0, E)
    inside = expert < num_experts
    if IS_SMALL:
        other = tl.arange(0, SLOTS)
        experts, _, _ = _legal(
            idx, weights, other, other < num_slots, num_valid, num_experts, TOP_K, HAS_COUNT
        )
        count = tl.histogram(tl.maximum(experts, 0), E, mask=experts >= 0)
        before = _rank(experts[None, :], other[None, :], mine, at)
    else:
        chunk = at // CHUNK
        other = chunk[:, None] * CHUNK + tl.arange(0, CHUNK)[None, :]
        experts = tl.load(idx + other, mask=other < num_slots, other=-1)
        count = tl.load(counts + expert, mask=inside, other=0)
        before = _rank(experts, other, mine, at)
        before += tl.load(chunk_counts + chunk * num_experts + mine, mask=used, other=0)
    row = _first_rows(count, mine, E) + before
    col = part * COLS + tl.arange(0, COLS)
    block = part * (COLS // 128) + tl.arange(0, COLS // 128)
    place = row.to(tl.int64)[:, None] * width + col[None, :]
    mask = used[:, None] & (col < width)[None, :]
    scale_place = block[None, :].to(tl.int64) * pool_rows + row[:, None]
    scale_mask = used[:, None] & (block < width // 128)[None, :]
    given = part * COLS + token_column(tl.arange(0, COLS)) if BY_GROUP else col
    source = tl.load(x + token.to(tl.int64) * x_stride + given, mask=given < hidden, other=0)
    if READY or ACTS.HOLD == "plain":
        held = source
        if READY and ACTS.HOLD != "values" and ACTS.HOLD != "plain":
            blocks = tl.cdiv(hidden, 128)
            given = tl.load(x_scale + token * blocks + block, mask=block < blocks, other=1.0)
            wide = tl.broadcast_to(given[None, :], scale_place.shape)
            tl.store(scale + scale_place, wide, mask=scale_mask)
    else:
        G: tl.constexpr = ACTS.GROUP
        by = tl.load(g + token * g_stride) if HAS_G else 1.0
        tile = tl.reshape(source.to(tl.float32), (1, COLS // G, G))
        ratio, stored, step = quantise_blocks(tile, by, ACTS)
        if ACTS.HOLD == "values":
            held = to_bf16(tl.reshape(ACTS.round(ratio) * step[:, :, None], (COLS,)))
        else:
            if ACTS.HOLD == "scaled":
                held = to_bf16(tl.reshape(ACTS.round(ratio), (COLS,)))
            else:
                held = tl.reshape(ACTS.code(ratio), (COLS,))
            wide = tl.broadcast_to(stored, scale_place.shape)
            tl.store(scale + scale_place, wide, mask=scale_mask)
    tl.store(data + place, tl.broadcast_to(held[None, :], place.shape), mask=mask)
    if part == 0:
        tl.store(dest + row, token * num_dest + first_slot + slot, mask=used)
        tl.store(weight + row, share, mask=used)
        if HAS_G:
            one = tl.load(g + token * g_stride)
            tl.store(factor + row, tl.zeros([K_SLOTS], tl.float32) + one, mask=used)
        if CHECK:
            tl.store(idx_out + at, mine, mask=own)
            tl.store(weights_out + at, share, mask=own)
            first_bad = tl.min(tl.where(bad, at, 2147483647))
            if first_bad < 2147483647:
                tl.atomic_min(error, first_bad)
        if token == 0:
            if IS_SMALL and HAS_STATS:
                seen = tl.load(stats + expert, mask=inside)
                tl.store(stats + expert, seen + count, mask=inside)
            _write_tiles(count, tiles, num_tiles, BLOCK, max(4096 // E, 8), E)


def route(
    x: Tensor,
    routing: Routing,
    acts: Kind,
    pool: Pool,
    block: int,
    num_experts: int,
    *,
    x_scale: Tensor | None = None,
    g: Tensor | None = None,
    stats: Tensor | None = None,
    first_slot: int = 0,
    num_dest: int = 0,
    is_ready: bool = False,
    by_group: bool = False,
    pdl: bool = False,
) -> None:
    """Fill `pool` from tokens x [T, H] and their routing, for tiles of `block` rows."""
    num_tokens, hidden = x.shape
    top_k = routing.topk_idx.shape[1]
    slots = num_tokens * top_k
    is_small = slots <= SMALL
    idx, weights, counts = routing.topk_idx, routing.topk_weights, pool.num_tiles
    chunk_counts = counts
    if not is_small:
        dispatch(None, None, None, acts, routing=routing, num_experts=num_experts, pdl=pdl)
        idx, weights = routing.idx, routing.weights
        counts = torch.empty(num_experts, dtype=torch.int32, device=x.device)
        chunk_counts = counts.new_empty(triton.cdiv(slots, CHUNK), num_experts)
        count_slots(idx, counts, chunk_counts, stats, pdl=pdl)
    width = pool.data.shape[1]
    cols, warps = COLS[is_small]
    some = pool.num_tiles
    has_count = is_small and routing.num_valid is not None
    _pool_kernel[(num_tokens, triton.cdiv(width, cols))](
        _raw(x), some if x_scale is None else x_scale, x.stride(0), some if g is None else g,
        0 if g is None or g.ndim == 0 else 1, idx, weights,
        routing.num_valid if has_count else some, routing.error, routing.idx, routing.weights,
        chunk_counts, counts, some if stats is None else stats, _raw(pool.data), pool.scale,
        pool.dest, pool.weight, pool.factor, pool.tiles, pool.num_tiles, slots,
        pool.data.shape[0], num_experts, hidden, width, first_slot, num_dest or top_k,
        ACTS=acts, READY=is_ready, HAS_G=g is not None, HAS_STATS=stats is not None,
        HAS_COUNT=has_count, CHECK=is_small, TOP_K=top_k, K_SLOTS=triton.next_power_of_2(top_k),
        SLOTS=max(triton.next_power_of_2(slots), 16) if is_small else 16, IS_SMALL=is_small,
        BLOCK=block, COLS=cols, CHUNK=CHUNK, E=max(triton.next_power_of_2(num_experts), 2),
        BY_GROUP=by_group, num_warps=warps, **overlap(pdl),
    )  # fmt: skip


def _raw(t: Tensor) -> Tensor:
    return t.view(torch.uint8) if t.dtype == torch.float8_e4m3fn else t

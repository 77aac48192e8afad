"""Grouped GEMMs alone: rows [M, k] that lie sorted by group, no layer around them (E003).

Two launches. One makes the list of tiles from the counts, finds the row of each place of a tile,
and places the scales; the GEMM then reads rows where they are: one after another, or gathered.
Nothing is read back, so counts may change under a CUDA graph.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from megamoe.formats.quantized import DATA_DTYPE, SCALE_DTYPE, Quantized, data_shape, scale_shape
from megamoe.formats.spec import recipe_named
from megamoe.kernels.blackwell import launch
from megamoe.kernels.blackwell.launch import BYTES, Arithmetic
from megamoe.kernels.blackwell.weights import ROW_BLOCK, Placed
from megamoe.kernels.gluon.permute import write_tiles
from megamoe.kernels.gluon.placed import PLACED_ROWS, placed_group, placed_row
from megamoe.kernels.gluon.pool import Pool
from megamoe.kernels.gluon.tile_scheduler import expert_rows, first_above
from megamoe.kernels.portable.acts import PLAIN
from megamoe.layout.regions import align_up
from megamoe.planner.blackwell import max_tiles, num_rows
from megamoe.planner.launches import Launch, PlaceGroups
from megamoe.planner.tables.blackwell import WIDTH
from megamoe.problem import Options


@triton.jit(do_not_specialize=["rows", "num_sources", "num_dests", "pool_rows"])
def _place_groups_kernel(
    counts, source_in, dest_in, weight_in, g, x_scale, source, dest, weight, factor, scale, tiles,
    num_tiles, rows, num_sources, num_dests, num_groups, pool_rows, num_scales, wide,
    HAS_SOURCE: tl.constexpr, HAS_DEST: tl.constexpr, TOP_K: tl.constexpr, WEIGHTED: tl.constexpr,
    HAS_G: tl.constexpr, SCALES: tl.constexpr, TOKENS: tl.constexpr, GROUPS: tl.constexpr,
    COLS: tl.constexpr, SORTED: tl.constexpr,
):  # fmt: skip
    """Program 0: the list of tiles. The others: TOKENS places of the pool each.

    Place p of a group is row `first + p` of all: it reads row source_in[that] of x, and goes to row
    dest_in[that] // TOP_K; without these to its own. SCALES: "placed", "codes" (FP32) or "plain".
    Groups whose counts go beyond the rows are cut there. A source that x does not have is the row
    after its last, which copies take for zeros; such a destination is -1, which is not stored to.
    """
    group = tl.arange(0, GROUPS)
    count = tl.maximum(tl.load(counts + group, mask=group < num_groups, other=0), 0).to(tl.int64)
    first = tl.minimum(tl.cumsum(count, 0) - count, rows)
    count = tl.minimum(count, rows - first).to(tl.int32)
    first = first.to(tl.int32)
    begin = expert_rows(count, TOKENS)
    if tl.program_id(0) == 0:
        write_tiles(count, begin, tiles, num_tiles, TOKENS, SORTED)
    else:
        block = tl.program_id(0) - 1
        token = tl.arange(0, TOKENS)
        place = block * TOKENS + token
        own = first_above(begin + (count + TOKENS - 1) // TOKENS * TOKENS, place)
        inside = place - tl.gather(begin, own, 0)
        used = inside < tl.gather(count, own, 0)
        row = tl.where(used, tl.gather(first, own, 0) + inside, 0)
        come, is_there = row, used
        if HAS_SOURCE:
            come = tl.load(source_in + row, mask=used, other=0)
            is_there = used & (come >= 0) & (come < num_sources)
            come = tl.where(is_there, come, num_sources)
        tl.store(source + place, come)
        to, is_wanted = row, used
        if HAS_DEST:
            to = tl.load(dest_in + row, mask=used, other=0)
            is_wanted = used & (to >= 0) & (to < num_dests)
        tl.store(dest + place, tl.where(is_wanted, to // TOP_K, -1))
        if WEIGHTED:
            tl.store(weight + place, tl.load(weight_in + to, mask=is_wanted, other=0.0))
        if HAS_G:
            tl.store(factor + place, tl.zeros([TOKENS], tl.float32) + tl.load(g))
        if SCALES != "plain":
            for col in tl.range(0, wide, COLS):
                at = col + tl.arange(0, COLS)
                known = is_there[:, None] & (at < num_scales)[None, :]
                from_row = come.to(tl.int64)[:, None] * num_scales
                value = tl.load(x_scale + from_row + at[None, :], mask=known, other=0)
                if SCALES == "placed":
                    first_byte = block.to(tl.int64) * (wide * PLACED_ROWS)
                    to_byte = placed_row(token)[:, None] + placed_group(at)[None, :]
                    tl.store(scale + first_byte + to_byte, value, mask=(at < wide)[None, :])
                else:
                    to_scale = at.to(tl.int64)[None, :] * pool_rows + place[:, None]
                    tl.store(scale + to_scale, value, mask=(at < wide)[None, :])


class Rows(NamedTuple):
    """Where rows come from and go to: int32 by sorted row, on the device.

    source     [M] the row of x that it is, or of zeros; None: x lies sorted itself
    dest       [M] its slot, token * top_k + k, in the result and in `weights`; None: itself
    num_dests  slots that there are; rows of others are left out
    top_k      slots that are added to one row of the result; 1: each slot has its own
    weights    FP32 [T, top_k]
    """

    source: Tensor | None = None
    dest: Tensor | None = None
    num_dests: int = 0
    top_k: int = 1
    weights: Tensor | None = None


AS_THEY_LIE = Rows()


def place_groups(x: Quantized, counts: Tensor, step: Launch, arithmetic: Arithmetic,
                 rows: Rows) -> tuple[Pool, Tensor]:  # fmt: skip
    """(the pool whose data are x itself, the row of x of each of its places)."""
    config, (width, device) = step.config, (x.shape[1], counts.device)
    assert isinstance(config, PlaceGroups)
    num, block = len(counts), config.block_m
    sorted_rows = x.shape[0] if rows.source is None else len(rows.source)
    places = num_rows(sorted_rows, num, block)

    def new(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(*shape, dtype=dtype, device=device)

    wide, scales = align_up(width, WIDTH) // ROW_BLOCK, "plain"
    scale = new(1)
    if arithmetic.scale_dtype is torch.float32:
        scale, scales = new(wide, places), "codes"
    elif arithmetic.scale_dtype is not None:
        wide, scales = align_up(width, WIDTH) // arithmetic.kind.VEC.value, "placed"
        scale = new(1, places // block, wide // 4, 2, 256, dtype=arithmetic.scale_dtype)
    pool = Pool(
        x.data, scale, new(places, dtype=torch.int32), new(places), new(places),
        new(max(max_tiles(sorted_rows, num, block), 1), 4, dtype=torch.int32),
        new(4, dtype=torch.int32),
    )  # fmt: skip
    source, unused, g = new(places, dtype=torch.int32), counts, x.global_scale
    x_scale = unused if x.scale is None else _raw(x.scale.contiguous())
    _place_groups_kernel[step.grid](
        counts=counts, source_in=_or(rows.source, unused), dest_in=_or(rows.dest, unused),
        weight_in=_or(rows.weights, unused), g=_or(g, unused),
        x_scale=x_scale, source=source, dest=pool.dest,
        weight=pool.weight, factor=pool.factor, scale=_raw(scale), tiles=pool.tiles,
        num_tiles=pool.num_tiles, rows=sorted_rows, num_sources=x.shape[0],
        num_dests=rows.num_dests, num_groups=num, pool_rows=places,
        num_scales=0 if x.scale is None else x.scale.shape[-1], wide=wide,
        HAS_SOURCE=rows.source is not None, HAS_DEST=rows.dest is not None, TOP_K=rows.top_k,
        WEIGHTED=rows.weights is not None, HAS_G=g is not None, SCALES=scales,
        **config.constants(),
    )  # fmt: skip
    return pool, source


def linear(x: Quantized, w: Placed, counts: Tensor, out: Tensor, steps: tuple[Launch, Launch],
           recipe: str, rows: Rows = AS_THEY_LIE) -> None:  # fmt: skip
    """out[row's destination] = w[g] @ x[row]: BF16 rows, or FP32 sums of weighted ones."""
    arithmetic, (place, gemm) = launch.arithmetic(recipe), steps
    pool, source = place_groups(x, counts, place, arithmetic, rows)
    sums = out.dtype == torch.float32
    launch.run(
        pool, w, gemm, arithmetic, None, _spread(x.global_scale, counts), source=source,
        SOURCE="rows" if rows.source is None else "gather", STORE="sum" if sums else "rows",
        out=out, out_scale=out, num_outputs=w.num_outputs, clamp=0.0, ACTS=PLAIN,
        ACTIVATION="swiglu", WEIGHTED=False,
    )  # fmt: skip


def gated(x: Quantized, w: Placed, counts: Tensor, steps: tuple[Launch, Launch], recipe: str,
          options: Options, rows: Rows = AS_THEY_LIE,
          acts_global: Tensor | None = None) -> Quantized:  # fmt: skip
    """Gate, up and the activation of each row, in the format of the recipe's activations."""
    arithmetic, fmt, (place, gemm) = launch.arithmetic(recipe), recipe_named(recipe).acts, steps
    shape = (x.shape[0] if rows.source is None else len(rows.source), w.num_outputs)
    data = torch.empty(
        data_shape(shape, fmt), dtype=DATA_DTYPE[fmt.element.name], device=counts.device
    )
    scale = None
    if arithmetic.scale_dtype is not None:
        scale = torch.empty(
            scale_shape(shape, fmt), dtype=SCALE_DTYPE[fmt.scale], device=counts.device
        )
    result = Quantized(data, scale, fmt.name, shape, acts_global)
    if shape[0] == 0:
        return result
    pool, source = place_groups(x, counts, place, arithmetic, rows)
    launch.run(
        pool, w, gemm, arithmetic, None, _spread(acts_global, counts), source=source,
        SOURCE="rows" if rows.source is None else "gather", STORE="rows", out=_raw(data),
        out_scale=data if scale is None else _raw(scale), num_outputs=w.num_outputs,
        clamp=float(options.limit), ACTS=arithmetic.acts, ACTIVATION=options.activation,
        WEIGHTED=False,
    )  # fmt: skip
    return result


def _spread(g: Tensor | None, counts: Tensor) -> Tensor | None:
    """A global scale for each group."""
    return None if g is None else g.expand(len(counts)).contiguous()


def _raw(t: Tensor) -> Tensor:
    return t.view(BYTES) if t.element_size() == 1 else t


def _or(t: Tensor | None, unused: Tensor) -> Tensor:
    return unused if t is None else t

"""Launchers of the Hopper kernels. Tiles come from the caller; nothing is chosen here."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from megamoe.formats.spec import recipe_named
from megamoe.kernels.common.numbers import Kind
from megamoe.kernels.hopper.gemm.plain import gemm_kernel
from megamoe.kernels.hopper.gemm.swap_ab import gemm_swap_ab_kernel
from megamoe.kernels.hopper.gemm.tile_scheduler import HALF, LinearTiles, WorkItems
from megamoe.kernels.hopper.pool import Pool, max_tiles, num_rows
from megamoe.kernels.hopper.weights.decode import PAIR_WORDS
from megamoe.kernels.hopper.weights.operands import WEIGHTS
from megamoe.kernels.hopper.weights.pack import WIDTH, Packed
from megamoe.kernels.portable.acts import CODES, PLAIN, SCALED, VALUES
from megamoe.layout.regions import align_up
from megamoe.problem import Options
from megamoe.schedule.heuristics.hopper_tiles import Straight, Swapped, Tile


@dataclass(frozen=True, slots=True)
class Arithmetic:
    """How Hopper computes one recipe: one arithmetic, whatever the tiles."""

    acts: Kind
    dtype: torch.dtype  # of pooled activations
    is_promoted: bool
    to_e4m3: bool  # FP4 weights decode to E4M3

    @property
    def is_fp8(self) -> bool:
        """Whether wgmma multiplies E4M3."""
        return self.dtype == torch.float8_e4m3fn


def arithmetic(recipe: str, *, fits_e4m3: bool = True) -> Arithmetic:
    """FP8 where scales are per 128 and the weights fit E4M3; BF16, exact too, elsewhere."""
    acts = recipe_named(recipe).acts.name
    if recipe == "w8a8" or (recipe == "w4a8_block" and fits_e4m3):
        return Arithmetic(CODES[acts], torch.float8_e4m3fn, True, recipe != "w8a8")
    if recipe == "w4a8_block":
        return Arithmetic(SCALED[acts], torch.bfloat16, True, False)
    kind = PLAIN if acts == "bf16" else VALUES[acts]
    return Arithmetic(kind, torch.bfloat16, False, False)


def pool(how: Arithmetic, slots: int, width: int, experts: int, block: int, device: torch.device,
         tiles: Pool | None = None, ranks: int = 1, *, is_far: bool = False,
         rows: int | None = None) -> Pool:  # fmt: skip
    """Room for `slots` slots on each rank; the routing is that of `tiles` where it is given.

    is_far  rows may go to other ranks: destinations are offsets, not numbers of rows
    rows    of a ring on each rank, instead of as many as any routing needs
    """
    wide, rows = align_up(width, WIDTH), ranks * (rows or num_rows(slots, experts))

    def new(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(*shape, dtype=dtype, device=device)

    data = new(rows, wide, dtype=how.dtype)
    scale = new(wide // 128, rows) if how.is_promoted else new(1)
    if tiles is not None:
        return tiles._replace(data=data, scale=scale)
    dest = new(rows, dtype=torch.int64 if is_far else torch.int32)
    return Pool(
        data, scale, dest, new(rows), new(rows),
        new(max_tiles(slots, experts, block), 4, dtype=torch.int32), new(4, dtype=torch.int32),
    )  # fmt: skip


def work_items(pool: Pool, weights: Sequence[Packed], tile: Tile) -> WorkItems | None:
    """Room for the items of one or two linears with these weights, where the tile asks for them."""
    if not isinstance(tile, Straight) or not tile.is_in_waves:
        return None
    linears = [LinearTiles(-(-w.num_rows // 256), w.data.shape[1]) for w in weights]
    ctas, most = num_sms(pool.tiles.device), len(pool.tiles)
    return WorkItems.empty(pool.tiles, linears, ctas, tile.span, most, is_dynamic=tile.is_drawn)


def gated(x: Pool, w: Packed, out: Pool, tile: Tile, how: Arithmetic, options: Options,
          *, items: Tensor | None = None, bias: Tensor | None = None,
          acts_factor: Tensor | None = None, error: Tensor | None = None,
          use_pdl: bool = False) -> None:  # fmt: skip
    """L1 with activation, weight and format: pool [R, hidden] -> pool [R, intermediate].

    items  its own of the work items (`tile_scheduler`)
    error  is set to -1 by a wait that is given up, where CTAs wait for each other
    """
    width = out.data.shape[1]
    _run(
        x, w, out.data, out.scale, tile, how, width, width, float(options.limit), bias,
        acts_factor, waits={"items": items, "error": error}, ACTS=how.acts,
        ACTIVATION=options.activation, WEIGHTED=options.weight_at == "l1", launch_pdl=use_pdl,
    )  # fmt: skip


def linear(x: Pool, w: Packed, out: Tensor, tile: Tile, how: Arithmetic, options: Options,
           *, after: Packed | None = None, items: Tensor | None = None,
           bias: Tensor | None = None, acts_factor: Tensor | None = None,
           error: Tensor | None = None, use_pdl: bool = False) -> None:  # fmt: skip
    """L2: pool [R, intermediate] -> BF16 rows of `out` [.., hidden] at each row's destination.

    With `use_pdl` it may begin before the launch before it ends: items must be older than that.

    after  weights of the L1 that was launched before it
    """
    awaited = 0 if after is None else -(-after.num_rows // 256)
    _run(
        x, w, out, out, tile, how, w.num_outputs, w.num_outputs, 0.0, bias, acts_factor,
        waits={"items": items, "error": error, "awaited": awaited}, ACTS=PLAIN,
        ACTIVATION="swiglu", WEIGHTED=options.weight_at == "l1", launch_pdl=use_pdl,
    )  # fmt: skip


def _run(x: Pool, w: Packed, out: Tensor, out_scale: Tensor, tile: Tile, *rest: Any,
         waits: dict[str, Any], **constants: Any) -> None:  # fmt: skip
    """The launch that the tile asks for; only the plain GEMM has items and waits between CTAs."""
    if isinstance(tile, Straight):
        _straight(x, w, out, out_scale, tile, *rest, **waits, **constants)
    else:
        _swapped(x, w, out, out_scale, tile, *rest, **constants)


def _swapped(
    x: Pool, w: Packed, out: Tensor, out_scale: Tensor, tile: Swapped, how: Arithmetic,
    num_outputs: int, out_width: int, clamp: float, bias: Tensor | None,
    acts_factor: Tensor | None, **constants: Any,
) -> None:  # fmt: skip
    rows, width = x.data.shape
    data, scale = weight_descriptors(w, tile.depth, tile.rows)
    unused = x.num_tiles
    gemm_swap_ab_kernel[(num_sms(x.data.device),)](
        data, scale, token_descriptor(x.data, tile.tokens),
        scale_descriptor(x.scale, tile.tokens) if how.is_promoted else data,
        or_unused(w.factor, unused), or_unused(bias, unused), or_unused(acts_factor, unused),
        x.factor, x.weight, x.dest, out, out_scale, x.tiles, x.num_tiles, rows,
        width // 128 // tile.depth, num_outputs, out_width, *factor_shape(w), clamp, w.num_outputs,
        WEIGHTS=WEIGHTS[w.kind], GATED=w.is_gated, PROMOTED=how.is_promoted, FACTOR=w.factor_is,
        HAS_BIAS=bias is not None, TOKENS=tile.tokens, IS_STREAM=tile.is_stream, SLABS=tile.slabs,
        DEPTH=tile.depth, STAGES=tile.stages, SPAN=tile.span, MATH_REGS=tile.math_regs,
        LOAD_REGS=tile.load_regs, num_warps=4, **constants,
    )  # fmt: skip


def _straight(
    x: Pool, w: Packed, out: Tensor, out_scale: Tensor, tile: Straight, how: Arithmetic,
    num_outputs: int, out_width: int, clamp: float, bias: Tensor | None,
    acts_factor: Tensor | None, *, items: Tensor | None, error: Tensor | None, awaited: int = 0,
    ACTS: Kind, **constants: Any,
) -> None:  # fmt: skip
    rows, width = x.data.shape
    ctas, unused = num_sms(x.data.device), x.num_tiles
    fp4 = fp4_scale = ring = unused
    assert (items is not None) == tile.is_in_waves
    if tile.ahead:
        assert w.scale is not None and tile.ahead % 4 == 0 and width // 256 < ctas
        chunk = 2 if width % 512 else 4  # K blocks that are decoded together
        fp4 = _tma(w.data.flatten(0, 1), [1, 4 * chunk, 256], 0)
        fp4_scale = _tma(w.scale.flatten(0, 1), [1, chunk * PAIR_WORDS.value], 0)
        ring = w.data.new_empty(ctas * tile.ahead * 256, 128, dtype=torch.float8_e4m3fn)
        data = scale = _tma(ring, [256, 128], 128)
        constants["launch_cooperative_grid"] = True  # its CTAs wait for each other
        constants["CHUNK"] = chunk
    else:
        data, scale = weight_descriptors(w, 1, 256)
        constants["CHUNK"] = 0
    gemm_kernel[(ctas,)](
        data, scale, token_descriptor(x.data, HALF.value), scale_descriptor(x.scale, tile.tokens),
        or_unused(w.factor, unused), or_unused(bias, unused), x.weight, x.dest, out, out_scale,
        x.tiles, x.num_tiles, awaited, or_unused(items, unused), fp4, fp4_scale, ring,
        or_unused(error, unused), rows, width // 128, num_outputs, out_width, *factor_shape(w),
        clamp, w.num_outputs,
        DECODED=w.kind == "e4m3_image", HAS_ITEMS=tile.is_in_waves, DYNAMIC=tile.is_drawn,
        DEPTH=tile.ahead, GATED=w.is_gated, HAS_BIAS=bias is not None, STAGES=tile.stages,
        IMAGES=tile.images, SPAN=0 if tile.is_in_waves else tile.span, MATH_REGS=tile.math_regs,
        DECODE_REGS=tile.decode_regs, LOAD_REGS=tile.load_regs, num_warps=4, **constants,
    )  # fmt: skip


def factor_shape(w: Packed) -> tuple[int, int]:
    """Rows (or blocks of 128 rows) and blocks of K that `factor` has per matrix."""
    if w.factor is None or w.factor_is == "expert":
        return 1, 1
    if w.factor_is == "row":
        return w.factor.shape[-1], 1
    return w.factor.shape[-2], w.factor.shape[-1]


def or_unused(t: Tensor | None, unused: Tensor) -> Tensor:
    """`t`, or any tensor where the kernel does not look."""
    return unused if t is None else t


def weight_descriptors(
    w: Packed, depth: int, rows: int
) -> tuple[TensorDescriptor, TensorDescriptor]:
    """TMA over the weights, `rows` at a time, and over the scales of an image, slab by slab."""
    if w.scale is not None:
        words = w.scale.shape[2] // (w.data.shape[2] // 4) * depth
        data = _tma(w.data, [1, rows // 64, 4 * depth, 256], 0)
        return data, _tma(w.scale, [1, rows // 64, words], 0)
    if w.is_gated:
        experts, _, outputs, width = w.data.shape
        eights = w.data.view(experts, 2, outputs // 8, 8, width).transpose(1, 2)
        data = _tma(eights, [1, rows // 16, 2, 8, 128], 128)
    else:
        data = _tma(w.data, [1, rows, 128], 128)
    return data, data


def token_descriptor(data: Tensor, tokens: int) -> TensorDescriptor:
    return _tma(data, [tokens, 128], 128)


def scale_descriptor(scale: Tensor, tokens: int) -> TensorDescriptor:
    return _tma(scale.view(-1), [max(tokens, 32)], 0)


def _tma(t: Tensor, block: list[int], swizzle: int) -> TensorDescriptor:
    layout = gl.NVMMASharedLayout(swizzle, 8 * t.element_size(), rank=len(block))
    return TensorDescriptor(t, list(t.shape), list(t.stride()), block, layout)


@functools.cache
def num_sms(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count

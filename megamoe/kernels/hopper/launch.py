"""Launchers of the Hopper GEMMs. Configurations come from the plan; nothing is chosen here."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from megamoe.formats.spec import recipe_named
from megamoe.kernels.common.numbers import Kind
from megamoe.kernels.gluon.follow import NO_CHAIN, Chain
from megamoe.kernels.gluon.pipeline import scale_width
from megamoe.kernels.gluon.pool import Pool
from megamoe.kernels.gluon.tile_scheduler import PLAIN_HALF, LinearTiles, WorkItems
from megamoe.kernels.hopper.gemm.plain import gemm_kernel
from megamoe.kernels.hopper.gemm.swap_ab import gemm_swap_ab_kernel
from megamoe.kernels.hopper.weights.decode import PAIR_WORDS
from megamoe.kernels.hopper.weights.operands import WEIGHTS
from megamoe.kernels.hopper.weights.pack import WIDTH, Packed
from megamoe.kernels.portable.acts import CODES, PLAIN, SCALED, VALUES
from megamoe.layout.regions import align_up
from megamoe.planner.hopper import max_tiles, num_rows
from megamoe.planner.launches import Gemm, GemmSwapAb, Launch
from megamoe.planner.numerics import numerics
from megamoe.problem import Options


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


@functools.cache
def arithmetic(recipe: str, *, fits_e4m3: bool = True) -> Arithmetic:
    """The row of `planner.numerics` as the kernels take it."""
    row, contract = recipe_named(recipe), numerics("hopper", recipe, fits_e4m3=fits_e4m3)
    kinds = {"codes": CODES, "scaled": SCALED, "values": VALUES}
    kind = PLAIN if contract.acts == "plain" else kinds[contract.acts][row.acts.name]
    is_fp8 = contract.mma == "fp8"
    dtype = torch.float8_e4m3fn if is_fp8 else torch.bfloat16
    return Arithmetic(kind, dtype, contract.promotion > 0, is_fp8 and row.weights.element.bits == 4)


def pool(arithmetic: Arithmetic, slots: int, width: int, experts: int, block: int,
         device: torch.device, tiles: Pool | None = None, ranks: int = 1, *, is_far: bool = False,
         rows: int | None = None) -> Pool:  # fmt: skip
    """Memory for `slots` slots on each rank; the routing is that of `tiles` if there is one.

    is_far  rows may go to other ranks: destinations are offsets, not numbers of rows
    rows    of a ring on each rank, instead of what the worst routing needs
    """
    wide, rows = align_up(width, WIDTH), ranks * (rows or num_rows(slots, experts))

    def new(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(*shape, dtype=dtype, device=device)

    data = new(rows, wide, dtype=arithmetic.dtype)
    scale = new(wide // 128, rows) if arithmetic.is_promoted else new(1)
    if tiles is not None:
        return tiles._replace(data=data, scale=scale)
    dest = new(rows, dtype=torch.int64 if is_far else torch.int32)
    return Pool(
        data, scale, dest, new(rows), new(rows),
        new(max_tiles(slots, experts, block), 4, dtype=torch.int32), new(4, dtype=torch.int32),
    )  # fmt: skip


def work_items(pool: Pool, weights: Sequence[Packed], step: Launch) -> WorkItems | None:
    """Memory for the items of one or two linears with these weights, if the tile has items."""
    tile = step.config
    if not isinstance(tile, Gemm) or not tile.has_items:
        return None
    linears = [LinearTiles(-(-w.num_rows // 256), w.data.shape[1]) for w in weights]
    is_dynamic = tile.schedule == "dynamic"
    max_tiles = len(pool.tiles)
    return WorkItems.empty(
        pool.tiles, linears, step.num_ctas, tile.group_m, max_tiles, is_dynamic=is_dynamic
    )


def gated(x: Pool, w: Packed, out: Pool, step: Launch, arithmetic: Arithmetic, options: Options,
          *, items: Tensor | None = None, bias: Tensor | None = None,
          acts_factor: Tensor | None = None, error: Tensor | None = None,
          use_pdl: bool = False, chain: Chain | None = None) -> None:  # fmt: skip
    """L1 with activation, weight and format: pool [R, hidden] -> pool [R, intermediate].

    items  its own of the work items (`tile_scheduler`)
    error  is set to -1 by a wait that is given up, where CTAs wait for each other
    chain  it waits for the rows of each tile
    """
    width = out.data.shape[1]
    _run(
        x, w, step, arithmetic, bias, acts_factor, items, error, out=out.data, out_scale=out.scale,
        num_outputs=width, out_width=width, clamp=float(options.limit), ACTS=arithmetic.acts,
        ACTIVATION=options.activation, WEIGHTED=options.weight_at == "l1", launch_pdl=use_pdl,
        chain=chain or NO_CHAIN,
    )  # fmt: skip


def linear(x: Pool, w: Packed, out: Tensor, step: Launch, arithmetic: Arithmetic, options: Options,
           *, items: Tensor | None = None, bias: Tensor | None = None,
           acts_factor: Tensor | None = None, error: Tensor | None = None,
           use_pdl: bool = False, chain: Chain | None = None) -> None:  # fmt: skip
    """L2: pool [R, intermediate] -> BF16 rows of `out` [.., hidden] at each row's destination.

    With `use_pdl` it may begin before the launch before it ends: items must be older than that.

    chain  the L1 before it; of ranks, rows go where `x.dest` says in units, also to other ranks
    """
    chain = chain or NO_CHAIN
    _run(
        x, w, step, arithmetic, bias, acts_factor, items, error,
        0 if chain.after is None else -(-chain.after.num_rows // _block_n(step)), out=out,
        out_scale=or_unused(chain.row_scale, out), num_outputs=w.num_outputs,
        out_width=chain.dest_unit or w.num_outputs, clamp=0.0, ACTS=PLAIN, ACTIVATION="swiglu",
        WEIGHTED=options.weight_at == "l1", launch_pdl=use_pdl, chain=chain,
    )  # fmt: skip


def _block_n(step: Launch) -> int:
    assert isinstance(step.config, Gemm | GemmSwapAb)
    return step.config.block_n


def _run(x: Pool, w: Packed, step: Launch, arithmetic: Arithmetic, bias: Tensor | None,
         acts_factor: Tensor | None, items: Tensor | None, error: Tensor | None,
         l1_n_tiles: int = 0, *, chain: Chain, **rest: Any) -> None:  # fmt: skip
    """The launch that the plan asks for; only the plain GEMM has items and waits between CTAs."""
    unused = x.num_tiles
    factor_rows, factor_cols = factor_shape(w)
    rest |= {
        "factor": or_unused(w.factor, unused), "bias": or_unused(bias, unused),
        "row_weight": x.weight, "row_dest": x.dest, "tiles": x.tiles, "num_tiles": x.num_tiles,
        "pool_rows": x.data.shape[0], "factor_rows": factor_rows, "factor_cols": factor_cols,
        "num_bias": w.num_outputs, "GATED": w.is_gated, "HAS_BIAS": bias is not None,
        "follows": chain.follows, "publishes": chain.publishes, "begun": chain.begun,
        "bound_us": chain.bound_us,
    }  # fmt: skip
    if isinstance(step.config, Gemm):
        rest |= {
            "items": or_unused(items, unused), "error": or_unused(error, unused),
            "l1_n_tiles": l1_n_tiles,
        }  # fmt: skip
        assert (items is not None) == step.config.has_items
        _gemm(x, w, step, step.config, rest)
    else:
        assert isinstance(step.config, GemmSwapAb)
        rest |= {"acts_factor": or_unused(acts_factor, unused), "row_factor": x.factor}
        is_alone = chain.follows is None  # arguments that are None are none of the kernel's
        rest |= {
            "l1_n_tiles": None if is_alone else l1_n_tiles,
            "error": None if is_alone else error,
        }
        _gemm_swap_ab(x, w, step, step.config, arithmetic, rest)


def _gemm_swap_ab(x: Pool, w: Packed, step: Launch, tile: GemmSwapAb, arithmetic: Arithmetic,
                  rest: dict[str, Any]) -> None:  # fmt: skip
    data, scale = weight_descriptors(w, tile.k_blocks, tile.block_n)
    gemm_swap_ab_kernel[step.grid](
        w=data, w_scale=scale, x=token_descriptor(x.data, tile.block_m),
        x_scale=scale_descriptor(x.scale, tile.block_m) if arithmetic.is_promoted else data,
        steps=x.data.shape[1] // tile.block_k, WEIGHTS=WEIGHTS[w.kind],
        PROMOTED=arithmetic.is_promoted, FACTOR=w.factor_is, **rest, **tile.constants(),
    )  # fmt: skip


def _gemm(x: Pool, w: Packed, step: Launch, tile: Gemm, rest: dict[str, Any]) -> None:
    fp4 = fp4_scale = ring = x.num_tiles
    if tile.decode_ahead:
        assert w.scale is not None and tile.decode_ahead % 4 == 0
        chunk = tile.decode_chunk
        fp4 = _tma(w.data.flatten(0, 1), (1, 4 * chunk, 256), 0)
        fp4_scale = _tma(w.scale.flatten(0, 1), (1, chunk * PAIR_WORDS.value), 0)
        num_rows = step.num_ctas * tile.decode_ahead * 256
        ring = w.data.new_empty(num_rows, 128, dtype=torch.float8_e4m3fn)
        data = scale = _tma(ring, (256, 128), 128)
    else:
        data, scale = weight_descriptors(w, 1, 256)
    rest = {name: value for name, value in rest.items() if name != "ACTS"}
    gemm_kernel[step.grid](
        w=data, w_scale=scale, x=token_descriptor(x.data, PLAIN_HALF.value),
        x_scale=scale_descriptor(x.scale, tile.block_m), fp4=fp4, fp4_scale=fp4_scale, ring=ring,
        steps=x.data.shape[1] // 128, DECODED=w.kind == "e4m3_image", **rest, **tile.constants(),
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
        data = _tma(w.data, (1, rows // 64, 4 * depth, 256), 0)
        return data, _tma(w.scale, (1, rows // 64, words), 0)
    if w.is_gated:
        experts, _, outputs, width = w.data.shape
        by_expert, by_half, by_row, one = w.data.stride()
        shape = experts, outputs // 8, 2, 8, width  # eight of gate, eight of up
        strides = by_expert, 8 * by_row, by_half, by_row, one
        data = _described(w.data, shape, strides, (1, rows // 16, 2, 8, 128), 128)
    else:
        data = _tma(w.data, (1, rows, 128), 128)
    return data, data


def token_descriptor(data: Tensor, tokens: int) -> TensorDescriptor:
    """TMA over tokens, `tokens` at a time."""
    return _tma(data, (tokens, 128), 128)


def scale_descriptor(scale: Tensor, tokens: int) -> TensorDescriptor:
    """TMA over their scales."""
    assert scale.is_contiguous()
    return _described(scale, (scale.numel(),), (1,), (scale_width(tokens),), 0)


def _tma(t: Tensor, block: tuple[int, ...], swizzle: int) -> TensorDescriptor:
    return _described(t, tuple(t.shape), t.stride(), block, swizzle)


def _described(
    t: Tensor, shape: tuple[int, ...], strides: tuple[int, ...], block: tuple[int, ...],
    swizzle: int,
) -> TensorDescriptor:  # fmt: skip
    """Builds a TMA descriptor. Only the layout is cached, never the pointer, so weights may move or
    be freed."""
    form = _form(t.dtype, shape, strides, block, swizzle)
    assert t.data_ptr() % 16 == 0, "TMA reads from multiples of 16 bytes"
    descriptor = object.__new__(TensorDescriptor)
    descriptor.__dict__.update(form.__dict__)
    descriptor.base = t
    return descriptor


class _Base(NamedTuple):
    """Stands for the tensor of a form."""

    dtype: torch.dtype

    @staticmethod
    def data_ptr() -> int:
        return 0


@functools.lru_cache(4096)
def _form(
    dtype: torch.dtype, shape: tuple[int, ...], strides: tuple[int, ...],
    block: tuple[int, ...], swizzle: int,
) -> TensorDescriptor:  # fmt: skip
    """A descriptor of any tensor of a form, checked once: making one takes longer than many a
    kernel."""
    layout = gl.NVMMASharedLayout(swizzle, 8 * dtype.itemsize, rank=len(block))
    return TensorDescriptor(_Base(dtype), list(shape), list(strides), list(block), layout)

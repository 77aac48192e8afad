"""The grouped GEMM alone: rows sorted by group, each group multiplied with a matrix of its own.

Two launches: one makes the tile maps from the counts (and decodes the rows where they are packed),
one multiplies. Nothing is read back, so that counts may change under a CUDA graph (C002, C003).
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from megamoe.errors import DeviceError, DTypeError, RangeError, ShapeError, require
from megamoe.formats.quantized import Quantized
from megamoe.formats.spec import recipe_named
from megamoe.kernels.portable import launch
from megamoe.kernels.portable.decode_tokens import decode_blocks, decoding
from megamoe.kernels.portable.launch import Arithmetic
from megamoe.kernels.portable.sort import Order
from megamoe.planner.launches import Launch, PortableGemm
from megamoe.problem import RECIPES, check_width


@triton.jit
def _prepare_kernel(
    counts, globals_in, globals_out, to_row, tile_group, tile_limit, num_tiles, ticket,
    data, scale, out, num_rows, num_groups, max_tiles, num_blocks, width,
    FORMAT: tl.constexpr, VALUES: tl.constexpr, HAS_GLOBAL: tl.constexpr, SORTED: tl.constexpr,
    TILE_M: tl.constexpr, GROUPS: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """First programs: the maps of a group each. The rest: rows decoded, where FORMAT is given.

    A group's tiles and rows come after those of earlier ones, or SORTED of larger ones.
    """
    if tl.program_id(0) < num_groups:
        group = tl.program_id(0)
        other = tl.arange(0, GROUPS)
        count = tl.maximum(tl.load(counts + other, mask=other < num_groups, other=0), 0)
        num = (count + TILE_M - 1) // TILE_M
        own = tl.sum(tl.where(other == group, count, 0), 0)
        before = other < group
        first_row = tl.sum(tl.where(before, count, 0), 0)
        if SORTED:
            before = (count > own) | ((count == own) & before)
        first = tl.sum(tl.where(before, num, 0), 0)
        end = first * TILE_M + tl.minimum(own, tl.maximum(num_rows - first_row, 0))
        step = tl.arange(0, CHUNK)
        for done in tl.range(0, own, CHUNK):
            row = first * TILE_M + done + step
            inside = row < tl.minimum(end, max_tiles * TILE_M)
            tl.store(to_row + row, first_row + done + step, mask=inside)
        for done in tl.range(0, (own + TILE_M - 1) // TILE_M, CHUNK):
            tile = first + done + step
            inside = (done + step < (own + TILE_M - 1) // TILE_M) & (tile < max_tiles)
            tl.store(tile_group + tile, tl.full([CHUNK], 0, tl.int32) + group, mask=inside)
            tl.store(tile_limit + tile, tl.minimum((tile + 1) * TILE_M, end), mask=inside)
        if HAS_GLOBAL:
            tl.store(globals_out + group, tl.load(globals_in))
        if group == 0:
            tl.store(num_tiles, tl.minimum(tl.sum(num, 0), max_tiles))
            tl.store(ticket, 0)
    elif FORMAT is not None:
        decode_blocks(
            data, scale, out, tl.program_id(0) - num_groups, num_blocks, width, FORMAT, VALUES
        )


def grouped_gemm(
    x: Quantized, w: Quantized, counts: Tensor, how: Arithmetic, *,
    steps: tuple[Launch, Launch], is_dynamic: bool,
) -> Tensor:  # fmt: skip
    """y[r] = w[g] @ x[r] for the rows r of each group g, in the formats of any recipe.

    x           [M, k], sorted by group; NVFP4 with one global scale
    w           [G, n, k]; NVFP4 with one global scale, or one per group
    counts      int32 [G] on the device: rows of each group, M in all (not checked: never read back)
    how         the plan's numerics
    steps       the planned launches, that of the maps and that of the product
    is_dynamic  programs take tiles until none is left
    returns     bf16 [M, n]; every schedule, order and tile gives the same bits
    """
    (num_rows, _), (num_groups, n, _) = x.shape, w.shape
    device, (prepare, gemm) = w.device, steps
    y = torch.empty(num_rows, n, dtype=torch.bfloat16, device=device)
    if num_rows == 0:
        return y
    assert isinstance(gemm.config, PortableGemm)
    order = Order.empty(num_rows, num_groups, gemm.config.block_m, device)
    ticket = torch.empty(1, dtype=torch.int32, device=device)
    todo = decoding(x, how)
    g = x.global_scale
    spread = counts if g is None else torch.empty(num_groups, dtype=torch.float32, device=device)
    _prepare_kernel[prepare.grid](
        counts=counts, globals_in=counts if g is None else g, globals_out=spread,
        to_row=order.permuted_idx_to_expanded_idx, tile_group=order.tile_idx_to_group_idx,
        tile_limit=order.tile_idx_to_mn_limit, num_tiles=order.num_non_exiting_tiles,
        ticket=ticket, data=todo.data, scale=todo.scale, out=todo.out, num_rows=num_rows,
        num_groups=num_groups, max_tiles=order.tile_idx_to_group_idx.numel(),
        num_blocks=todo.num_blocks, width=x.shape[1], FORMAT=todo.format,
        HAS_GLOBAL=g is not None, **prepare.config.constants(),
    )  # fmt: skip
    launch.linear(
        todo.activations, _per_group(w), order, y.view(num_rows, 1, n), gemm, how,
        to=launch.Destination("slots"),
        factors=launch.Factors(x_global=None if g is None else spread), gather=True,
        ticket=ticket if is_dynamic else None,
    )  # fmt: skip
    return y


def check_operands(x: Quantized, w: Quantized, counts: Tensor, *, is_gated: bool = False) -> str:
    """The recipe of these operands, once they fit each other; no value is read.

    is_gated  w has gate and up: [G, 2, n, k]
    """
    recipe = next(
        (r for r in RECIPES if (w.format, x.format) == _formats(r)),
        None,
    )
    require(
        recipe is not None,
        "weights and rows must be in the formats of one recipe",
        got=f"{w.format} and {x.format}",
        fix="see docs/numerics.md",
        kind=RangeError,
    )
    lead = w.shape[1:-2]
    fits = len(x.shape) == 2 and lead == ((2,) if is_gated else ()) and w.shape[0] >= 1
    require(
        fits and x.shape[1] == w.shape[-1],
        f"x must be [M, k] and w [G, {'2, ' if is_gated else ''}n, k]",
        got=f"{x.shape} and {w.shape}",
        kind=ShapeError,
    )
    check_width("k", x.shape[1])
    require(
        isinstance(counts, Tensor) and counts.dtype == torch.int32 and counts.is_contiguous(),
        "counts must be int32 and contiguous",
        got=getattr(counts, "dtype", type(counts).__name__),
        kind=DTypeError,
    )
    require(
        tuple(counts.shape) == w.shape[:1],
        f"counts must be [{w.shape[0]}]",
        got=tuple(counts.shape),
        kind=ShapeError,
    )
    require(
        x.device == w.device == counts.device,
        "x, w and counts must lie on one device",
        got=f"{x.device}, {w.device}, {counts.device}",
        kind=DeviceError,
    )
    for name, g, max_ndim in (("x", x.global_scale, 0), ("w", w.global_scale, 1 + is_gated)):
        require(
            g is None or g.ndim <= max_ndim,
            f"{name} takes one global scale{' per group at most' if max_ndim else ''}",
            got=None if g is None else tuple(g.shape),
            kind=ShapeError,
        )
    assert recipe is not None
    return recipe


@functools.cache
def _formats(recipe: str) -> tuple[str, str]:
    row = recipe_named(recipe)
    return row.weights.name, row.acts.name


def _per_group(w: Quantized) -> Quantized:
    """The same weights with a global scale per group where they have one."""
    g = w.global_scale
    if g is None or g.ndim == 1:
        return w
    return Quantized(w.data, w.scale, w.format, w.shape, g.expand(w.shape[0]).contiguous())

"""Launchers of the grouped GEMMs. Configurations come from the plan; nothing is chosen here."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from megamoe.formats.quantized import DATA_DTYPE, Quantized
from megamoe.formats.spec import Scale, recipe_named
from megamoe.kernels.common.compat import overlap
from megamoe.kernels.common.numbers import Kind
from megamoe.kernels.portable import gemm
from megamoe.kernels.portable.acts import CODES, ORDERED, PLAIN, SCALED, VALUES
from megamoe.kernels.portable.k_order import stored_width
from megamoe.kernels.portable.operands import TOKENS, WEIGHTS
from megamoe.kernels.portable.sort import Order
from megamoe.planner.launches import Launch, PortableGemm
from megamoe.planner.numerics import Numerics
from megamoe.problem import Options


class Activations(NamedTuple):
    """Activations in memory as the GEMM loads them."""

    data: Tensor
    scale: Tensor | None


class Factors(NamedTuple):
    """What a linear adds to its sums, and NVFP4's global scales."""

    bias: Tensor | None = None
    x_global: Tensor | None = None  # FP32: of L1 one per token, of other linears one per expert
    acts_global: Tensor | None = None  # of L1's output, one per expert


class Destination(NamedTuple):
    """Where the rows of a linear go, and what they are multiplied with there.

    store        "rows": out [rows, N]; "slots": out [T, slots, N] from `first_slot` on, BF16, or
                 FP8 bytes with `scale`; "atomic": out FP32 [T, N], added in no fixed order, so the
                 result is not deterministic
    top_k        slots of a token
    weighted     with "atomic": multiply by the topk weight here
    weight_bias  multiply the bias by the topk weight, as the activations were
    """

    store: str = "rows"
    scale: Tensor | None = None
    first_slot: int = 0
    top_k: int = 1
    topk_weights: Tensor | None = None
    weighted: bool = False
    weight_bias: bool = False


ROWS, NO_FACTORS = Destination(), Factors()


@dataclass(frozen=True, slots=True)
class Arithmetic:
    """How the portable backend computes one recipe: one arithmetic, whatever the tiles."""

    weights: Kind
    tokens: Kind
    acts: Kind
    data_dtype: torch.dtype = torch.bfloat16  # of stored activations; bytes hold two codes
    group: int = 0  # columns of one of their scales; 0: they have none
    scale_dtype: torch.dtype = torch.float32

    @property
    def is_ordered(self) -> bool:
        """Whether activations lie in the order of K that FP4 weights want (k_order.py)."""
        return bool(self.tokens.ORDERED.value)

    @property
    def has_scale(self) -> bool:
        """Whether stored activations have scales beside them."""
        return self.group > 0

    @property
    def is_native(self) -> bool:
        """As `Numerics` has it."""
        return bool(self.tokens.CODED.value)

    def allocate(self, rows: int, width: int, device: torch.device) -> Activations:
        """Memory for activations [rows, width]."""
        cols = width // 2 if self.data_dtype == torch.uint8 else width
        cols = stored_width(width) if self.is_ordered else cols
        data = torch.empty(rows, cols, dtype=self.data_dtype, device=device)
        scale = None
        if self.has_scale:
            shape = rows, triton.cdiv(width, self.group)
            scale = torch.empty(shape, dtype=self.scale_dtype, device=device)
        return Activations(data, scale)


@functools.cache
def arithmetic_of(recipe: str, how: Numerics) -> Arithmetic:
    """The words of the plan's numerics as the kernels' kinds."""
    fmt = recipe_named(recipe).acts
    if how.is_native:
        tokens = fmt.name
    elif how.decodes:
        tokens = "ordered_scaled" if how.promotion else "ordered"
    else:
        tokens = "scaled" if how.promotion else "plain"
    if how.acts == "plain":
        return Arithmetic(WEIGHTS[how.weights], TOKENS[tokens], ORDERED if how.decodes else PLAIN)
    acts = {"codes": CODES, "values": VALUES, "scaled": SCALED}[how.acts][fmt.name]
    data = DATA_DTYPE[fmt.element.name] if how.acts == "codes" else torch.bfloat16
    group = 0 if how.acts == "values" else fmt.block[1]
    scale = torch.uint8 if group and fmt.scale is not Scale.FP32 else torch.float32
    return Arithmetic(WEIGHTS[how.weights], TOKENS[tokens], acts, data, group, scale)


def gated(
    x: Activations,
    w13: Quantized,
    order: Order,
    topk_weights: Tensor,
    out: Activations,
    step: Launch,
    how: Arithmetic,
    options: Options,
    *,
    top_k: int,
    factors: Factors = NO_FACTORS,
    gather: bool = True,
    pdl: bool = False,
) -> None:
    """L1, activation, weight and quantisation: x [T, H] (or permuted rows) -> out [rows, I]."""
    intermediate, hidden = w13.shape[2:]
    tile = _tile(step, how, order)
    assert 128 % tile.block_n == 0 or not how.is_ordered, "acts are written in blocks of 128"
    unused = x.data
    bias, x_global, acts_global = factors
    gemm._gated_kernel[step.grid](
        x=x.data, x_scale=_token_scales(x, how), w=_rows(w13, tile, how),
        w_scale=_scales(w13, how), w_global=_halves(w13, unused), x_global=_or(x_global, unused),
        bias=_or(bias, unused), topk_weights=topk_weights, out=as_bytes(out.data),
        out_scale=_or(out.scale, unused), acts_global=_or(acts_global, unused),
        to_expanded=order.permuted_idx_to_expanded_idx, tile_group=order.tile_idx_to_group_idx,
        tile_limit=order.tile_idx_to_mn_limit, num_tiles=order.num_non_exiting_tiles,
        hidden=hidden, intermediate=intermediate, clamp=float(options.limit),
        TOKENS=how.tokens, WEIGHTS=how.weights, ACTS=how.acts,
        ACTIVATION=options.activation, FAST_MATH=options.fast_math,
        WEIGHTED=options.weight_at == "l1", HAS_BIAS=bias is not None,
        HAS_GLOBAL=w13.global_scale is not None, TOKEN_GLOBAL=x_global is not None,
        GATHER=gather, TOP_K=top_k,
        **tile.constants(), **overlap(pdl),
    )  # fmt: skip


def linear(
    x: Activations,
    w: Quantized,
    order: Order,
    out: Tensor,
    step: Launch,
    how: Arithmetic,
    *,
    to: Destination = ROWS,
    factors: Factors = NO_FACTORS,
    gather: bool = False,
    ticket: Tensor | None = None,
    pdl: bool = False,
) -> None:
    """One linear over permuted rows: the plain grouped GEMM ("rows"), or L2 finalising.

    gather     x holds tokens, not permuted rows
    ticket     int32 zero: the grid's programs take their tiles from it, instead of one a program
    pdl        place programs while the launch before ends
    """
    num_cols, width = w.shape[1:]
    tile = _tile(step, how, order)
    assert to.scale is None or tile.block_n % 128 == 0, "one scale of FP8 combine is 128 columns"
    assert to.store in ("rows", "slots", "atomic")
    unused = x.data
    bias, x_global, _ = factors
    gemm._linear_kernel[step.grid](
        x=x.data, x_scale=_token_scales(x, how), w=_rows(w, tile, how), w_scale=_scales(w, how),
        w_global=_or(w.global_scale, unused), x_global=_or(x_global, unused),
        bias=_or(bias, unused), topk_weights=_or(to.topk_weights, unused), out=as_bytes(out),
        out_scale=_or(to.scale, unused), to_expanded=order.permuted_idx_to_expanded_idx,
        tile_group=order.tile_idx_to_group_idx, tile_limit=order.tile_idx_to_mn_limit,
        num_tiles=order.num_non_exiting_tiles, ticket=_or(ticket, unused), width=width,
        num_cols=num_cols, first_slot=to.first_slot,
        num_slots=out.shape[1] if to.store == "slots" else 1,
        TOKENS=how.tokens, WEIGHTS=how.weights,
        ACTS=PLAIN if to.scale is None else CODES["fp8_combine"], STORE=to.store,
        WEIGHTED=to.weighted, WEIGHT_BIAS=to.weight_bias, HAS_BIAS=bias is not None,
        HAS_GLOBAL=w.global_scale is not None,
        TOKEN_GLOBAL=x_global is not None, GATHER=gather, TOP_K=to.top_k,
        DYNAMIC=ticket is not None, **tile.constants(), **overlap(pdl),
    )  # fmt: skip


def _tile(step: Launch, how: Arithmetic, order: Order) -> PortableGemm:
    """The step's tile; `planner.portable.check` refuses what the kernels cannot do, and why."""
    tile = step.config
    assert isinstance(tile, PortableGemm)
    assert tile.block_m == order.tile_m, "slots were sorted for other tiles"
    assert tile.block_k == 128 or not how.tokens.PROMOTED.value
    assert tile.block_k % 128 == 0 or not how.is_ordered
    assert tile.block_n == 128 or how.acts.STORED_AS.value not in ("codes", "scaled")
    return tile


def _rows(w: Quantized, tile: PortableGemm, how: Arithmetic) -> TensorDescriptor:
    """A descriptor over the rows of all experts: of elements, bytes or words of eight codes."""
    flat, depth = w.data.flatten(0, -2), tile.block_k
    if how.weights.WORDS.value:
        flat, depth = flat.view(torch.int32), depth // 8
    elif w.spec.element.bits == 4:
        depth //= 2
    return TensorDescriptor.from_tensor(flat, [tile.block_n, depth])


def _scales(w: Quantized, how: Arithmetic) -> Tensor | tuple[Tensor, Tensor | int]:
    """The scales of weights; of codes, the number of them in a row too.

    Weights in words: scales in words of four codes, if rows are whole words, and the shifts in one.
    """
    if w.scale is None:
        return w.data
    if how.is_native:
        return w.scale.view(torch.uint8), w.scale.shape[-1]
    if not how.weights.WORDS.value:
        return w.scale
    is_whole = w.scale.shape[-1] % 4 == 0 and w.scale.storage_offset() % 4 == 0
    raw = w.scale.view(torch.int32 if is_whole else torch.uint8)
    return raw, _shifts(w.device)


def _token_scales(x: Activations, how: Arithmetic) -> Tensor | tuple[Tensor, int]:
    """The scales of activations, as `_scales` gives those of weights."""
    if x.scale is None:
        return x.data
    return (x.scale.view(torch.uint8), x.scale.shape[-1]) if how.is_native else x.scale


def _shifts(device: torch.device) -> Tensor:
    """0, 8, 16, 24 on the device, made once; inside a graph's capture, the graph's own."""
    if device not in _SHIFTS:
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            return torch.arange(0, 32, 8, dtype=torch.int32, device=device)
        _SHIFTS[device] = torch.tensor([0, 8, 16, 24], dtype=torch.int32, device=device)
    return _SHIFTS[device]


_SHIFTS: dict[torch.device, Tensor] = {}


def _or(t: Tensor | None, unused: Tensor) -> Tensor:
    """`t`, or any tensor where the kernel does not look."""
    return unused if t is None else t


def as_bytes(t: Tensor) -> Tensor:
    """E4M3 as bytes, which is how kernels write it."""
    return t.view(torch.uint8) if t.dtype == torch.float8_e4m3fn else t


def _halves(w13: Quantized, unused: Tensor) -> Tensor:
    """The global scales of gate and up of every expert, [E, 2]."""
    g = w13.global_scale
    if g is None:
        return unused
    return g if g.ndim == 2 else g[:, None].expand(-1, 2).contiguous()

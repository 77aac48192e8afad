"""The calls: tokens out of a SymmBuffer, through transformed weights, into `y`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megamoe.compat.deep_gemm.buffer import (
    RECIPE_OF,
    SymmBuffer,
    get_symm_buffer_for_mega_moe,
    num_ranks,
)
from megamoe.compat.deep_gemm.prepared import (
    Packed,
    Weights,
    check_activation,
    prepare,
    transform_weights_for_mega_moe,
)
from megamoe.compat.deep_gemm.utils.math import per_token_cast_to_fp4, per_token_cast_to_fp8
from megamoe.errors import CapacityError, DeviceError, DTypeError, RangeError, ShapeError, require

__all__ = [
    "SymmBuffer",
    "bf16_mega_moe",
    "fp8_fp4_mega_moe",
    "get_symm_buffer_for_mega_moe",
    "mega_moe_pre_dispatch",
    "transform_weights_for_mega_moe",
]


def fp8_fp4_mega_moe(
    y: Tensor,
    l1_weights: Packed,
    l2_weights: Packed,
    sym_buffer: SymmBuffer,
    cumulative_local_expert_recv_stats: Tensor | None = None,
    recipe: tuple[int, int, int] = (1, 1, 32),
    activation: str = "swiglu",
    activation_clamp: float | None = None,
    fast_math: bool = True,
) -> None:
    """y = the layer over the buffer's first y.shape[0] tokens: MXFP8 tokens, MXFP4 weights.

    y            bfloat16 [num_tokens, hidden], written
    l1_weights, l2_weights              from `transform_weights_for_mega_moe`
    cumulative_local_expert_recv_stats  int32 [local experts], added to
    fast_math    accepted; silu is exact either way
    """
    require(tuple(recipe) == (1, 1, 32), "recipe must be (1, 1, 32)", got=recipe, kind=RangeError)
    require(
        isinstance(l1_weights, (tuple, list)),
        "fp8_fp4_mega_moe takes pairs of packed values and scales",
        got=type(l1_weights).__name__,
        fix="BF16 weights go to bf16_mega_moe",
        kind=DTypeError,
    )
    _run(
        ("w4a8", "w4a4"), y, l1_weights, l2_weights, sym_buffer,
        cumulative_local_expert_recv_stats, activation, activation_clamp,
    )  # fmt: skip


def bf16_mega_moe(
    y: Tensor,
    l1_weights: Tensor,
    l2_weights: Tensor,
    sym_buffer: SymmBuffer,
    cumulative_local_expert_recv_stats: Tensor | None = None,
    activation: str = "swiglu",
    activation_clamp: float | None = None,
    fast_math: bool = True,
) -> None:
    """The same in BF16; the buffer's `mma_type` is "bf16xbf16"."""
    require(
        isinstance(l1_weights, Tensor),
        "bf16_mega_moe takes bfloat16 tensors",
        got=type(l1_weights).__name__,
        fix="packed weights go to fp8_fp4_mega_moe",
        kind=DTypeError,
    )
    _run(
        ("bf16",), y, l1_weights, l2_weights, sym_buffer,
        cumulative_local_expert_recv_stats, activation, activation_clamp,
    )  # fmt: skip


def mega_moe_pre_dispatch(
    x: Tensor,
    topk_idx: Tensor,
    topk_weights: Tensor,
    buf_x: Tensor,
    buf_x_sf: Tensor,
    buf_topk_idx: Tensor,
    buf_topk_weights: Tensor,
    num_tokens: int,
    group_size: int = 32,
    use_fp4_acts: bool = False,
) -> None:
    """Quantise BF16 tokens into a buffer's views, copy their slots, and mask the rows after them.

    x, topk_idx, topk_weights   bfloat16 [num_tokens, hidden], int32 or int64 [num_tokens, k],
                                float32 [num_tokens, k]
    buf_*                       x, x_sf, topk_idx, topk_weights of a SymmBuffer, or views like them
    Same bytes as `per_token_cast_to_fp8`, or `_fp4` with `use_fp4_acts`; in the rows after
    num_tokens topk_idx is -1 and topk_weights 0.
    """
    require(x.dtype == torch.bfloat16, "x must be bfloat16", got=x.dtype, kind=DTypeError)
    require(
        x.ndim == 2 and num_tokens == x.shape[0] <= buf_x.shape[0],
        f"x must be [num_tokens, hidden] with at most {buf_x.shape[0]} tokens",
        got=f"{tuple(x.shape)} and num_tokens {num_tokens}",
        kind=ShapeError,
    )
    require(
        topk_idx.shape == topk_weights.shape == (num_tokens, buf_topk_idx.shape[1]),
        f"topk_idx and topk_weights must be {(num_tokens, buf_topk_idx.shape[1])}",
        got=f"{tuple(topk_idx.shape)} and {tuple(topk_weights.shape)}",
        kind=ShapeError,
    )
    cast = per_token_cast_to_fp4 if use_fp4_acts else per_token_cast_to_fp8
    data, scale = cast(x, True, group_size, True)
    require(
        buf_x.element_size() == 1
        and buf_x.shape[1] == data.shape[1]
        and buf_x_sf.dtype == torch.int32
        and buf_x_sf.shape[1] == scale.shape[1],
        f"buf_x must have {data.shape[1]} bytes a row and buf_x_sf {scale.shape[1]} int32",
        got=f"{buf_x.dtype} {tuple(buf_x.shape)}, {buf_x_sf.dtype} {tuple(buf_x_sf.shape)}",
        kind=ShapeError,
    )
    buf_x[:num_tokens].view(torch.uint8).copy_(data.view(torch.uint8))
    buf_x_sf[:num_tokens].copy_(scale)
    buf_topk_idx[:num_tokens].copy_(topk_idx)
    buf_topk_weights[:num_tokens].copy_(topk_weights)
    buf_topk_idx[num_tokens:].fill_(-1)
    buf_topk_weights[num_tokens:].zero_()


def _run(
    legal: tuple[str, ...],
    y: Tensor,
    l1: Weights,
    l2: Weights,
    buffer: SymmBuffer,
    stats: Tensor | None,
    activation: str,
    clamp: float | None,
) -> None:
    check_activation(activation)
    _check_buffer(buffer, legal)
    _check_y(y, buffer)
    prepared = prepare(l1, l2)
    experts = prepared.experts
    _check_fit(experts.num_experts, experts.hidden, experts.intermediate, buffer)
    if stats is not None:
        _check_stats(stats, experts.num_experts, buffer)
    num_tokens = y.shape[0]
    layer = prepared.layer(
        buffer.recipe, buffer.num_experts, buffer.num_topk,
        buffer.group if num_ranks(buffer.group) > 1 else None,
        max_tokens_per_rank=buffer.num_max_tokens_per_rank, clamp=clamp, backend=buffer.backend,
    )  # fmt: skip
    layer.stats.zero_()
    y.copy_(
        layer(
            buffer.tokens(num_tokens), buffer.topk_idx[:num_tokens],
            buffer.topk_weights[:num_tokens],
        )
    )  # fmt: skip
    if stats is not None:
        stats.add_(layer.stats)


def _check_buffer(buffer: Any, legal: tuple[str, ...]) -> None:
    require(
        isinstance(buffer, SymmBuffer),
        "sym_buffer must come from get_symm_buffer_for_mega_moe",
        got=type(buffer).__name__,
        kind=DTypeError,
    )
    require(
        buffer.buffer is not None, "the buffer must be alive", got="a destroyed one",
        kind=RangeError,
    )  # fmt: skip
    names = [mma for mma, recipe in RECIPE_OF.items() if recipe in legal]
    require(
        buffer.recipe in legal,
        f"this call needs a buffer of mma_type {' or '.join(names)}",
        got=buffer.mma_type,
        kind=RangeError,
    )


def _check_y(y: object, buffer: SymmBuffer) -> None:
    require(
        isinstance(y, Tensor) and y.dtype == torch.bfloat16,
        "y must be a bfloat16 tensor",
        got=getattr(y, "dtype", type(y).__name__),
        kind=DTypeError,
    )
    assert isinstance(y, Tensor)
    require(
        y.ndim == 2 and y.shape[1] == buffer.hidden,
        f"y must be [num_tokens, {buffer.hidden}]",
        got=tuple(y.shape),
        kind=ShapeError,
    )
    require(
        y.shape[0] <= buffer.num_max_tokens_per_rank,
        f"a call may hold at most {buffer.num_max_tokens_per_rank} tokens",
        got=y.shape[0],
        fix="ask get_symm_buffer_for_mega_moe for more",
        kind=CapacityError,
    )
    require(
        y.device == buffer.device,
        f"y must lie where the buffer lies, on {buffer.device}",
        got=y.device,
        kind=DeviceError,
    )


def _check_fit(local_experts: int, hidden: int, intermediate: int, buffer: SymmBuffer) -> None:
    wanted = (
        buffer.num_experts // num_ranks(buffer.group), buffer.hidden, buffer.intermediate_hidden
    )  # fmt: skip
    require(
        (local_experts, hidden, intermediate) == wanted,
        f"the buffer is for {wanted} local experts, hidden and intermediate",
        got=f"weights of {(local_experts, hidden, intermediate)}",
        kind=ShapeError,
    )


def _check_stats(stats: object, local_experts: int, buffer: SymmBuffer) -> None:
    require(
        isinstance(stats, Tensor) and stats.dtype == torch.int32,
        "cumulative_local_expert_recv_stats must be int32",
        got=getattr(stats, "dtype", type(stats).__name__),
        kind=DTypeError,
    )
    assert isinstance(stats, Tensor)
    require(
        tuple(stats.shape) == (local_experts,) and stats.device == buffer.device,
        f"cumulative_local_expert_recv_stats must be [{local_experts}] on {buffer.device}",
        got=f"{tuple(stats.shape)} on {stats.device}",
        kind=ShapeError,
    )

"""Tokens into a buffer's views, quantised on the way."""

from __future__ import annotations

import torch
from torch import Tensor

from megamoe.compat.deep_gemm.kinds import mma_named
from megamoe.compat.deep_gemm.utils.math import (
    pack_ue4m3_to_int,
    per_token_cast_to_fp4,
    per_token_cast_to_fp8,
)
from megamoe.errors import DTypeError, NotAvailable, RangeError, ShapeError, require
from megamoe.formats.quantize import quantize


def mega_moe_pre_dispatch(
    x: Tensor,
    topk_idx: Tensor,
    topk_weights: Tensor,
    buf_x: Tensor,
    buf_x_sf: Tensor,
    buf_topk_idx: Tensor,
    buf_topk_weights: Tensor,
    num_tokens: int,
    group_size: int | None = None,
    mma_type: str | bool = "fp8xfp4",
    buf_x_scales: Tensor | None = None,
    expert_scales: Tensor | None = None,
    *,
    use_fp4_acts: bool = False,
) -> None:
    """Quantise BF16 tokens into a buffer's views, copy their slots, and mask the rows after them.

    x, topk_idx, topk_weights   bfloat16 [num_tokens, hidden], int32 or int64 [num_tokens, k],
                                float32 [num_tokens, k]
    buf_*         x, x_sf, topk_idx, topk_weights, x_scales of a SymmBuffer, or views like them
    mma_type      of the buffer; True (or `use_fp4_acts`) is "mxf4xmxf4", as it was
    Same bytes as `per_token_cast_to_fp8`, or `_fp4`; NVFP4 by `mm.quantize`, each token with a
    factor of its own in `buf_x_scales`, 1 where it is None. In the rows after num_tokens topk_idx
    is -1 and topk_weights 0.
    """
    if isinstance(mma_type, bool):
        use_fp4_acts, mma_type = use_fp4_acts or mma_type, "fp8xfp4"
    if use_fp4_acts:
        mma_type = "mxf4xmxf4"
    recipe = mma_named(mma_type).recipe
    require(
        expert_scales is None, "expert_scales are not built", got="some",
        fix="multiply topk_weights", kind=NotAvailable,
    )  # fmt: skip
    _check_tokens(x, topk_idx, topk_weights, buf_x, buf_topk_idx, num_tokens)
    if recipe == "nvfp4":
        group = 16 if group_size is None else group_size
        require(group == 16, "NVFP4 has groups of 16", got=group, kind=RangeError)
        g = None
        if buf_x_scales is not None:
            g = (x.float().abs().amax(1) / 2688.0).clamp(min=2.0**-100)
            buf_x_scales[:num_tokens].copy_(g)
        quantized = quantize(
            x,
            "nvfp4",
            global_scale=torch.ones((), dtype=torch.float32, device=x.device) if g is None else g,
        )
        assert quantized.scale is not None
        data, scale = quantized.data, pack_ue4m3_to_int(quantized.scale)
    else:
        require(
            recipe in ("w4a8", "w4a4"), "BF16 tokens are copied, not quantised", got=mma_type,
            kind=RangeError,
        )  # fmt: skip
        cast = per_token_cast_to_fp4 if recipe == "w4a4" else per_token_cast_to_fp8
        group = 32 if group_size is None else group_size
        data, scale = cast(x, True, group, True)
        if recipe == "w4a4":  # E2M1 has no NaN: the scale has it
            is_bad = ~x.isfinite().unflatten(1, (-1, group)).all(dim=2)
            code = scale.contiguous().view(torch.uint8)
            code[:, : is_bad.shape[1]].masked_fill_(is_bad, 255)
            scale = code.view(torch.int32)
    _put(data, scale, topk_idx, topk_weights, (buf_x, buf_x_sf, buf_topk_idx, buf_topk_weights))


def mega_moe_pre_dispatch_sm90(
    x: Tensor,
    topk_idx: Tensor,
    topk_weights: Tensor,
    buf_x: Tensor,
    buf_x_sf: Tensor,
    buf_topk_idx: Tensor,
    buf_topk_weights: Tensor,
    num_tokens: int,
    group_size: int = 128,
    routed_scaling_factor: float = 1.0,
) -> None:
    """The same for `fp8_mega_moe`: FP32 scales per 128 columns, weights times a factor.

    buf_x_sf  float32 or int32 [max tokens, hidden / 128]; FP32 bits are written
    """
    _check_tokens(x, topk_idx, topk_weights, buf_x, buf_topk_idx, num_tokens)
    require(group_size == 128, "scales come per 128 columns", got=group_size, kind=RangeError)
    data, scale = per_token_cast_to_fp8(x, False, 128)
    into = buf_x, buf_x_sf.view(torch.int32), buf_topk_idx, buf_topk_weights
    _put(data, scale.view(torch.int32), topk_idx, topk_weights * routed_scaling_factor, into)


def _check_tokens(
    x: Tensor, topk_idx: Tensor, topk_weights: Tensor, buf_x: Tensor, buf_idx: Tensor, num: int
) -> None:
    require(x.dtype == torch.bfloat16, "x must be bfloat16", got=x.dtype, kind=DTypeError)
    require(
        topk_idx.dtype in (torch.int32, torch.int64) and topk_weights.is_floating_point(),
        "topk_idx must be int32 or int64, and topk_weights float",
        got=f"{topk_idx.dtype} and {topk_weights.dtype}",
        kind=DTypeError,
    )
    require(
        x.ndim == 2 and num == x.shape[0] <= buf_x.shape[0],
        f"x must be [num_tokens, hidden] with at most {buf_x.shape[0]} tokens",
        got=f"{tuple(x.shape)} and num_tokens {num}",
        kind=ShapeError,
    )
    require(
        topk_idx.shape == topk_weights.shape == (num, buf_idx.shape[1]),
        f"topk_idx and topk_weights must be {(num, buf_idx.shape[1])}",
        got=f"{tuple(topk_idx.shape)} and {tuple(topk_weights.shape)}",
        kind=ShapeError,
    )


def _put(
    data: Tensor, scale: Tensor, topk_idx: Tensor, topk_weights: Tensor, into: tuple[Tensor, ...]
) -> None:
    buf_x, buf_x_sf, buf_topk_idx, buf_topk_weights = into
    num_tokens = len(data)
    require(
        buf_x.element_size() == 1
        and buf_x.shape[1] == data.shape[1]
        and buf_x_sf.dtype == torch.int32
        and buf_x_sf.shape[1] == scale.shape[1],
        f"buf_x must have {data.shape[1]} bytes a row and buf_x_sf {scale.shape[1]} int32",
        got=f"{buf_x.dtype} {tuple(buf_x.shape)}, {buf_x_sf.dtype} {tuple(buf_x_sf.shape)}",
        fix="the buffer's mma_type must be the one given here",
        kind=ShapeError,
    )
    buf_x[:num_tokens].view(torch.uint8).copy_(data.view(torch.uint8))
    buf_x_sf[:num_tokens].copy_(scale)
    buf_topk_idx[:num_tokens].copy_(topk_idx)
    buf_topk_weights[:num_tokens].copy_(topk_weights)
    buf_topk_idx[num_tokens:].fill_(-1)
    buf_topk_weights[num_tokens:].zero_()

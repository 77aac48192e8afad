"""The calls: tokens out of a SymmBuffer, through transformed weights, into `y`."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megamoe.compat.deep_gemm.buffer import (
    NVFP4SymmBuffer,
    SymmBuffer,
    get_block_m_for_mega_moe,
    get_block_m_for_nvfp4_mega_moe,
    get_symm_buffer_for_mega_moe,
    get_symm_buffer_for_sm90_mega_moe,
    num_ranks,
)
from megamoe.compat.deep_gemm.kinds import CALL, MMA, activation_of, mma_named, sorted_out
from megamoe.compat.deep_gemm.machine import reserved_sms
from megamoe.compat.deep_gemm.prepared import (
    Alphas,
    Packed,
    interleave,
    interleave_packed,
    permute_scales,
    prepare,
    read_source,
    transform_scales_for_mega_moe,
    transform_weights_for_mega_moe,
    transform_weights_for_mega_moe_sm90,
)
from megamoe.compat.deep_gemm.shared import shared_rows
from megamoe.compat.deep_gemm.utils.math import (
    pack_ue4m3_to_int,
    per_token_cast_to_fp4,
    per_token_cast_to_fp8,
)
from megamoe.errors import (
    CapacityError,
    DeviceError,
    DTypeError,
    NotAvailable,
    RangeError,
    ShapeError,
    require,
)
from megamoe.formats.quantize import quantize
from megamoe.problem import Options

__all__ = [
    "NVFP4SymmBuffer",
    "SymmBuffer",
    "bf16_mega_moe",
    "fp8_fp4_mega_moe",
    "fp8_mega_moe",
    "get_block_m_for_mega_moe",
    "get_block_m_for_nvfp4_mega_moe",
    "get_symm_buffer_for_mega_moe",
    "get_symm_buffer_for_sm90_mega_moe",
    "mega_moe_pre_dispatch",
    "mega_moe_pre_dispatch_sm90",
    "nvfp4_mega_moe",
    "transform_scales_for_mega_moe",
    "transform_weights_for_mega_moe",
    "transform_weights_for_mega_moe_sm90",
]

# Names that callers import although they are not public upstream.
_interleave_weights = interleave
_interleave_weights_packed_fp4 = interleave_packed
_transpose_sf_for_utccp = permute_scales


@dataclass(frozen=True, slots=True)
class _Call:
    """One call, its arguments sorted out."""

    y: Any
    l1: Any
    l2: Any
    buffer: Any
    shared_l1_weights: Any = None
    shared_l2_weights: Any = None
    stats: Any = None
    recipe: Any = None
    activation: str = "swiglu"
    fast_math: bool = True  # silu is exact either way
    clamp: float | None = None
    alpha: float = 1.0
    beta: float = 0.0
    use_x_scales: bool = False
    alphas: Alphas | None = None

    def options(self) -> Options:
        """The activation and its clamp, which is the caller's alone."""
        activation = activation_of(self.activation, self.alpha, self.beta)
        return Options(activation, math.inf if self.clamp is None else float(self.clamp))


def fp8_fp4_mega_moe(
    y: Tensor,
    l1_weights: Packed,
    l2_weights: Packed,
    sym_buffer: SymmBuffer,
    shared_l1_weights: Packed | None = None,
    shared_l2_weights: Packed | None = None,
    cumulative_local_expert_recv_stats: Tensor | None = None,
    recipe: tuple[int, int, int] | None = None,
    activation: str = "swiglu",
    activation_clamp: float | None = None,
    fast_math: bool = True,
    use_x_scales: bool = False,
    l1_alphas: Tensor | None = None,
    l2_alphas: Tensor | None = None,
    l2_act_scales: Tensor | None = None,
    weight_layout: str = "megamoe",
    global_num_tokens: int | None = None,
    post_expert_norm: bool = False,
    post_expert_norm_weight: Tensor | None = None,
    post_expert_norm_eps: float = 1e-6,
    post_expert_norm_weight_first: bool = False,
    *,
    activation_alpha: float = 1.0,
    activation_beta: float = 0.0,
) -> None:
    """y = the layer over the buffer's first y.shape[0] tokens, weights packed FP4.

    y            bfloat16 [num_tokens, hidden], written
    l1_weights, l2_weights  from `transform_weights_for_mega_moe`
    shared_l1_weights, shared_l2_weights   the same of [2S, H] and [H, S], S = I times the buffer's
                 num_shared_experts; values float8_e4m3fn or packed FP4
    cumulative_local_expert_recv_stats     int32 [local experts], added to
    recipe       (1, 1, 32), for NVFP4 (1, 1, 16)
    use_x_scales, l1_alphas, l2_alphas, l2_act_scales   NVFP4: x_scales of the buffer count; factors
                 of the sums; the reciprocals of the scales that L2's input is quantised with
    activation_alpha, activation_beta      1.702 and 1 make "swiglu" gpt-oss's ("swigluoai")
    fast_math, global_num_tokens           accepted; no bit depends on them
    The arguments after `sym_buffer` may come in the order of releases without shared experts.
    """
    _refuse(weight_layout, post_expert_norm, post_expert_norm_weight)
    given = sorted_out(
        (shared_l1_weights, shared_l2_weights, cumulative_local_expert_recv_stats, recipe,
         activation, activation_clamp, fast_math),
        CALL,
    )  # fmt: skip
    _check_global_num_tokens(global_num_tokens, sym_buffer)
    _run(
        _Call(
            y, l1_weights, l2_weights, sym_buffer, **given, alpha=activation_alpha,
            beta=activation_beta, use_x_scales=use_x_scales,
            alphas=Alphas(l1_alphas, l2_alphas, l2_act_scales, is_divisor=True),
        ),
        ("w4a8", "w4a4", "nvfp4"),
    )  # fmt: skip


def nvfp4_mega_moe(
    y: Tensor,
    l1_weights: Packed,
    l2_weights: Packed,
    sym_buffer: SymmBuffer,
    shared_l1_weights: Packed | None = None,
    shared_l2_weights: Packed | None = None,
    cumulative_local_expert_recv_stats: Tensor | None = None,
    activation: str = "swiglu",
    activation_clamp: float | None = None,
    fast_math: bool = True,
    use_x_scales: bool = False,
    l1_alphas: Tensor | None = None,
    l2_alphas: Tensor | None = None,
    l2_act_scales: Tensor | None = None,
    weight_layout: str = "megamoe",
    global_num_tokens: int | None = None,
    post_expert_norm: bool = False,
    post_expert_norm_weight: Tensor | None = None,
    post_expert_norm_eps: float = 1e-6,
    post_expert_norm_weight_first: bool = False,
    *,
    activation_alpha: float = 1.0,
    activation_beta: float = 0.0,
    l1_alpha: Tensor | None = None,
    l2_alpha: Tensor | None = None,
    l2_activation_scale: float | Tensor | None = None,
) -> None:
    """The same in NVFP4.

    l1_alpha, l2_alpha, l2_activation_scale   vLLM's names; its scale of L2's input multiplies,
                 where `l2_act_scales` divides
    """
    _refuse(weight_layout, post_expert_norm, post_expert_norm_weight)
    given = sorted_out(
        (shared_l1_weights, shared_l2_weights, cumulative_local_expert_recv_stats, activation,
         activation_clamp, fast_math),
        CALL,
    )  # fmt: skip
    _check_global_num_tokens(global_num_tokens, sym_buffer)
    for one, other in (
        (l1_alphas, l1_alpha), (l2_alphas, l2_alpha), (l2_act_scales, l2_activation_scale)
    ):  # fmt: skip
        require(
            one is None or other is None, "each scale must be given under one name", got="two",
            kind=RangeError,
        )  # fmt: skip
    is_divisor = l2_act_scales is not None
    alphas = Alphas(
        l1_alphas if l1_alpha is None else l1_alpha,
        l2_alphas if l2_alpha is None else l2_alpha,
        l2_act_scales if is_divisor else l2_activation_scale,
        is_divisor,
    )
    _run(
        _Call(
            y, l1_weights, l2_weights, sym_buffer, **given | {"recipe": (1, 1, 16)},
            alpha=activation_alpha, beta=activation_beta, use_x_scales=use_x_scales, alphas=alphas,
        ),
        ("nvfp4",),
    )  # fmt: skip


def bf16_mega_moe(
    y: Tensor,
    l1_weights: Tensor,
    l2_weights: Tensor,
    sym_buffer: SymmBuffer,
    shared_l1_weights: Tensor | None = None,
    shared_l2_weights: Tensor | None = None,
    cumulative_local_expert_recv_stats: Tensor | None = None,
    activation: str = "swiglu",
    activation_clamp: float | None = None,
    fast_math: bool = True,
    weight_layout: str = "megamoe",
    global_num_tokens: int | None = None,
    post_expert_norm: bool = False,
    post_expert_norm_weight: Tensor | None = None,
    post_expert_norm_eps: float = 1e-6,
    post_expert_norm_weight_first: bool = False,
    *,
    activation_alpha: float = 1.0,
    activation_beta: float = 0.0,
    post_expert_norm_gamma: Tensor | None = None,
) -> None:
    """The same in BF16; the buffer's `mma_type` is "bf16xbf16"."""
    gamma = post_expert_norm_weight if post_expert_norm_gamma is None else post_expert_norm_gamma
    _refuse(weight_layout, post_expert_norm, gamma)
    given = sorted_out(
        (shared_l1_weights, shared_l2_weights, cumulative_local_expert_recv_stats, activation,
         activation_clamp, fast_math),
        CALL,
    )  # fmt: skip
    _check_global_num_tokens(global_num_tokens, sym_buffer)
    _run(
        _Call(
            y, l1_weights, l2_weights, sym_buffer, **given, alpha=activation_alpha,
            beta=activation_beta,
        ),
        ("bf16",),
    )  # fmt: skip


def fp8_mega_moe(
    y: Tensor,
    l1_weights: Packed,
    l2_weights: Packed,
    sym_buffer: SymmBuffer,
    cumulative_local_expert_recv_stats: Tensor | None = None,
    recipe: tuple[int, int, int] = (128, 128, 128),
    activation: str = "swiglu",
    activation_clamp: float | None = None,
    fast_math: bool = True,
    num_tokens_bound: int = 0,
) -> None:
    """The Hopper call: FP8 tokens and weights, FP32 scales per 128 and per 128 x 128.

    l1_weights, l2_weights   from `transform_weights_for_mega_moe_sm90`
    sym_buffer   of `get_symm_buffer_for_sm90_mega_moe`; one of "fp8xfp4", whose x_sf then holds
                 float32 as `mega_moe_pre_dispatch_sm90` writes it, is taken too
    """
    given = sorted_out(
        (cumulative_local_expert_recv_stats, recipe, activation, activation_clamp, fast_math), CALL
    )
    _run(_Call(y, l1_weights, l2_weights, sym_buffer, **given), ("w8a8",))


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
        made = quantize(
            x, "nvfp4", global_scale=torch.ones((), device=x.device) if g is None else g
        )
        assert made.scale is not None
        data, scale = made.data, pack_ue4m3_to_int(made.scale)
    else:
        require(
            recipe in ("w4a8", "w4a4"), "BF16 tokens are copied, not quantised", got=mma_type,
            kind=RangeError,
        )  # fmt: skip
        cast = per_token_cast_to_fp4 if recipe == "w4a4" else per_token_cast_to_fp8
        data, scale = cast(x, True, 32 if group_size is None else group_size, True)
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


def _run(call: _Call, legal: tuple[str, ...]) -> None:
    buffer, y = call.buffer, call.y
    options = call.options()
    is_pair = isinstance(call.l1, (tuple, list))
    require(
        is_pair == (legal != ("bf16",)),
        "bf16_mega_moe takes bfloat16 tensors, the other calls pairs of values and scales",
        got=type(call.l1).__name__,
        fix=f"{'packed' if is_pair else 'BF16'} weights go to "
        f"{'fp8_fp4_mega_moe' if is_pair else 'bf16_mega_moe'}",
        kind=DTypeError,
    )
    _check_buffer(buffer, legal)
    recipe = buffer.recipe if buffer.recipe in legal else legal[0]
    _check_y(y, buffer)
    _check_weights(call, recipe)
    prepared = prepare(
        read_source(call.l1, call.l2), buffer.mma.is_packed,
        call.alphas if recipe == "nvfp4" else None,
    )  # fmt: skip
    experts = prepared.experts
    _check_fit(experts.num_experts, experts.hidden, experts.intermediate, buffer)
    if call.stats is not None:
        _check_stats(call.stats, experts.num_experts, buffer)
    num_tokens = y.shape[0]
    layer = prepared.layer(
        recipe, buffer.num_experts, buffer.num_topk,
        buffer.group if num_ranks(buffer.group) > 1 else None,
        max_tokens_per_rank=buffer.num_max_tokens_per_rank, activation=options.activation,
        clamp=options.clamp, backend=buffer.backend, reserve_sms=reserved_sms(buffer.device),
    )  # fmt: skip
    layer.stats.zero_()
    x = buffer.tokens(num_tokens, recipe, use_x_scales=call.use_x_scales)
    rows = layer(x, buffer.topk_idx[:num_tokens], buffer.topk_weights[:num_tokens])
    if call.shared_l1_weights is not None:
        width = buffer.num_shared_experts * buffer.intermediate_hidden
        weights = call.shared_l1_weights, call.shared_l2_weights
        rows = rows.float() + shared_rows(*weights, x, width, options)
    y.copy_(rows)
    if call.stats is not None:
        call.stats.add_(layer.stats)


def _refuse(weight_layout: str, norm: bool, norm_weight: Tensor | None) -> None:
    """Arguments of upstream's that nothing here computes."""
    require(
        weight_layout == "megamoe",
        'weight_layout must be "megamoe"',
        got=repr(weight_layout),
        fix="give weights as transform_weights_for_mega_moe makes them",
        kind=NotAvailable,
    )
    require(
        not norm and norm_weight is None,
        "there is no norm after the experts",
        got="post_expert_norm",
        kind=NotAvailable,
    )


def _check_global_num_tokens(num: int | None, buffer: Any) -> None:
    """It chooses a tile upstream and nothing here; a wrong one is refused all the same."""
    most = num_ranks(getattr(buffer, "group", None)) * getattr(buffer, "num_max_tokens_per_rank", 0)
    require(
        num is None or 0 <= num <= most,
        f"global_num_tokens must lie between 0 and {most}",
        got=num,
        kind=RangeError,
    )


def _check_weights(call: _Call, recipe: str) -> None:
    """Require weights of the call's kind, a recipe that is theirs, and shared ones in pairs."""
    wanted = {"w4a8": (1, 1, 32), "w4a4": (1, 1, 32), "nvfp4": (1, 1, 16), "w8a8": (128,) * 3}
    require(
        call.recipe is None or tuple(call.recipe) == wanted.get(recipe),
        f"recipe must be {wanted.get(recipe)}",
        got=call.recipe,
        kind=RangeError,
    )
    own = read_source(call.l1, call.l2).recipe
    require(
        own == recipe or (own, recipe) == ("w4a8", "w4a4"),
        f"weights must be those of {recipe}",
        got=own,
        fix="the buffer's mma_type must fit the weights",
        kind=DTypeError,
    )
    alphas = call.alphas or Alphas()
    require(
        recipe == "nvfp4" or not (alphas.tensors() or call.use_x_scales),
        "use_x_scales, l1_alphas, l2_alphas and l2_act_scales belong to NVFP4",
        got=recipe,
        kind=RangeError,
    )
    num = call.buffer.num_shared_experts
    given = [w is not None for w in (call.shared_l1_weights, call.shared_l2_weights)]
    require(
        given == [num > 0] * 2,
        f"shared weights must be given in both parts for the buffer's {num} shared experts, or not",
        got=f"{sum(given)} of 2",
        kind=ShapeError,
    )


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
    names = [name for name, mma in MMA.items() if mma.recipe in legal]
    is_view = legal == ("w8a8",) and buffer.mma_type == "fp8xfp4"  # FP32 bits in its x_sf
    require(
        buffer.recipe in legal or is_view,
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

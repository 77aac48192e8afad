"""The calls: tokens out of a SymmBuffer, through transformed weights, into `y`."""

from __future__ import annotations

from torch import Tensor

from megamoe.compat.deep_gemm.buffer import (
    NVFP4SymmBuffer,
    SymmBuffer,
    get_block_m_for_mega_moe,
    get_block_m_for_nvfp4_mega_moe,
    get_symm_buffer_for_mega_moe,
    get_symm_buffer_for_sm90_mega_moe,
)
from megamoe.compat.deep_gemm.dispatch import mega_moe_pre_dispatch, mega_moe_pre_dispatch_sm90
from megamoe.compat.deep_gemm.kinds import call_arguments
from megamoe.compat.deep_gemm.prepared import (
    Alphas,
    Packed,
    interleave,
    interleave_packed,
    permute_scales,
    transform_scales_for_mega_moe,
    transform_weights_for_mega_moe,
    transform_weights_for_mega_moe_sm90,
)
from megamoe.compat.deep_gemm.run import Call, check_global_num_tokens, refuse, run
from megamoe.errors import RangeError, require

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
    refuse(weight_layout, post_expert_norm, post_expert_norm_weight)
    args = call_arguments(
        (shared_l1_weights, shared_l2_weights, cumulative_local_expert_recv_stats, recipe,
         activation, activation_clamp), fast_math,
    )  # fmt: skip
    check_global_num_tokens(global_num_tokens, sym_buffer)
    run(
        Call(
            y, l1_weights, l2_weights, sym_buffer, **args, alpha=activation_alpha,
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
    refuse(weight_layout, post_expert_norm, post_expert_norm_weight)
    args = call_arguments(
        (shared_l1_weights, shared_l2_weights, cumulative_local_expert_recv_stats, activation,
         activation_clamp), fast_math,
    )  # fmt: skip
    check_global_num_tokens(global_num_tokens, sym_buffer)
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
    run(
        Call(
            y, l1_weights, l2_weights, sym_buffer, **args | {"recipe": (1, 1, 16)},
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
    refuse(weight_layout, post_expert_norm, gamma)
    args = call_arguments(
        (shared_l1_weights, shared_l2_weights, cumulative_local_expert_recv_stats, activation,
         activation_clamp), fast_math,
    )  # fmt: skip
    check_global_num_tokens(global_num_tokens, sym_buffer)
    run(
        Call(
            y, l1_weights, l2_weights, sym_buffer, **args, alpha=activation_alpha,
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
    args = call_arguments(
        (cumulative_local_expert_recv_stats, recipe, activation, activation_clamp), fast_math
    )
    run(Call(y, l1_weights, l2_weights, sym_buffer, **args), ("w8a8",))

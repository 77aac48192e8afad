"""One call of any of the entry points: checks, the engine's layer, statistics."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megamoe.compat.deep_gemm.buffer import SymmBuffer, num_ranks
from megamoe.compat.deep_gemm.kinds import MMA, activation_of
from megamoe.compat.deep_gemm.machine import reserved_sms
from megamoe.compat.deep_gemm.prepared import Alphas, prepare, read_source
from megamoe.compat.deep_gemm.shared import shared_rows
from megamoe.errors import (
    CapacityError,
    DeviceError,
    DTypeError,
    NotAvailable,
    RangeError,
    ShapeError,
    require,
)
from megamoe.problem import Options


@dataclass(frozen=True, slots=True)
class Call:
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


def run(call: Call, legal: tuple[str, ...]) -> None:
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
    require(
        buffer.activation == "swiglu" or activation_of(buffer.activation) == options.activation,
        f"a call must name the activation of its buffer, {buffer.activation}",
        got=f"{call.activation}, in our words {options.activation}",
        fix="give both the same, or none to the buffer",
        kind=RangeError,
    )
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
    buffer.check_scales(num_tokens, recipe)
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


def refuse(weight_layout: str, norm: bool, norm_weight: Tensor | None) -> None:
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


def check_global_num_tokens(num: int | None, buffer: Any) -> None:
    """It chooses a tile upstream and nothing here; a wrong one is refused all the same."""
    most = num_ranks(getattr(buffer, "group", None)) * getattr(buffer, "num_max_tokens_per_rank", 0)
    require(
        num is None or 0 <= num <= most,
        f"global_num_tokens must lie between 0 and {most}",
        got=num,
        kind=RangeError,
    )


def _check_weights(call: Call, recipe: str) -> None:
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
    is_shared = [w is not None for w in (call.shared_l1_weights, call.shared_l2_weights)]
    require(
        is_shared == [num > 0] * 2,
        f"shared weights must be given in both parts for the buffer's {num} shared experts, or not",
        got=f"{sum(is_shared)} of 2",
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

"""Which of vLLM's layers we take, and what they are in our words. Imports nothing of vLLM.

Read of a `RoutedExperts` layer: activation, top_k, local_num_experts, global_num_experts,
hidden_size, expert_map, apply_router_weight_on_input, swiglu_limit, swiglu_alpha, swiglu_beta,
expert_map_manager, and the parameters that its method's row of METHODS names; of its `moe_config`:
in_dtype, device, has_bias, is_lora_enabled, intermediate_size_per_partition, activation_situ_beta,
activation_situ_linear_beta and moe_parallel_config (enable_eplb, use_all2all_kernels,
all2all_backend, pcp_size).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megamoe.engine import backends
from megamoe.engine.fingerprint import counted
from megamoe.engine.layer import MoE
from megamoe.engine.weights import ExpertWeights
from megamoe.errors import DTypeError, NotAvailable, RangeError, one_of, require
from megamoe.formats.spec import RECIPES, recipe_named
from megamoe.integrations.stacked import Stacked, drop, experts_of, local_ids
from megamoe.integrations.vllm.exchange import Over
from megamoe.planner.numerics import not_on
from megamoe.planner.plan import MODES
from megamoe.planner.tables.hopper import ACTIVATIONS
from megamoe.problem import MAX_TOP_K, WIDTH_MULTIPLE

# vLLM's methods by the names of their classes, and what they load.
METHODS = {
    "UnquantizedFusedMoEMethod": Stacked("bf16"),
    "Fp8MoEMethod": Stacked("w8a8", scales="weight_scale_inv"),
    "CompressedTensorsW8A8Fp8MoEMethod": Stacked("w8a8", scales="weight_scale"),
    "Mxfp4MoEMethod": Stacked("w4a16", scales="weight_scale"),
    "GptOssMxfp4MoEMethod": Stacked("w4a16", scales="weight_scale"),
    "CompressedTensorsW4A4Mxfp4MoEMethod": Stacked("w4a16", "weight_packed", "weight_scale"),
    "ModelOptNvFp4FusedMoE": Stacked(
        "nvfp4", "weight", "weight_scale", "weight_scale_2", "input_scale"
    ),
    "CompressedTensorsW4A4Nvfp4MoEMethod": Stacked(
        "nvfp4", "weight_packed", "weight_scale", "weight_global_scale", "input_global_scale",
        "divide",
    ),
}  # fmt: skip
A16 = {"nvfp4": "nvfp4a16"}  # where the method says that tokens stay BF16
# vLLM gathers tokens and scatters sums itself under these; others hand rows to vLLM's own kernels.
GATHERING = ("allgather_reducescatter", "naive")
PASSTHROUGH = "passthrough"  # vLLM moves nothing
SITU = (4.0, 25.0)
GPT_OSS = (1.702, 1.0)
BLOCK = [128, 128]
KEYS = ("backend", "mxfp4", "exchange", "mode")  # of the settings
EXCHANGES = ("vllm", "megamoe")


@dataclass(frozen=True, slots=True)
class Settings:
    """The "megamoe" of vLLM's `additional_config`.

    backend   "auto", "portable", "reference", "hopper": as for `mm.moe`; None: "auto", but only
              layers that Hopper's kernels compute are taken
    mxfp4     recipe of MXFP4 experts
    exchange  who moves tokens between expert-parallel ranks: "vllm" or "megamoe"
    mode      of calls that we exchange ourselves, as for `mm.MoE`
    """

    backend: str | None = None
    mxfp4: str = "w4a16"
    exchange: str = "vllm"
    mode: str = "auto"


def settings_of(additional_config: Any) -> Settings | None:
    """Out of vLLM's `additional_config`; None: `{"megamoe": false}`, the plugin is off."""
    options = additional_config.get("megamoe") if isinstance(additional_config, Mapping) else None
    if options is False:
        return None
    if options is None or options is True:
        return Settings()
    require(
        isinstance(options, Mapping) and set(options) <= set(KEYS),
        f'additional_config["megamoe"] must be false or have {", ".join(KEYS)} alone',
        got=repr(options),
        kind=RangeError,
    )
    settings = Settings(**options)
    if settings.backend is not None:
        one_of(settings.backend, backends.NAMES, "backend")
    one_of(settings.mxfp4, _of_format("mxfp4"), "mxfp4")
    one_of(settings.exchange, EXCHANGES, "exchange")
    one_of(settings.mode, MODES, "mode")
    return settings


@dataclass(frozen=True, slots=True)
class Gate:
    """An activation of vLLM in our words."""

    activation: str
    clamp: float | None = None
    gate_up: str = "split"


def gate_of(layer: Any) -> Gate | None:
    """What stands between the linears of a layer; None if it is none of ours."""
    name = getattr(layer.activation, "value", layer.activation)
    limit = layer.swiglu_limit
    clamp = float(limit) if limit else None  # vLLM clamps where the limit is above 0
    shape = layer.swiglu_alpha, layer.swiglu_beta
    is_oss = shape == GPT_OSS
    is_plain = shape in ((None, None), (1.0, 0.0))
    if limit == 0 and not (name == "silu" or (name == "swigluoai_uninterleave" and is_plain)):
        return None  # ours would clamp at gpt-oss's 7
    if name == "silu" and is_plain:
        return Gate("swiglu", clamp)
    if name == "swigluoai" and (is_oss or shape == (None, None)):
        return Gate("gpt_oss", clamp, "interleaved")
    if name == "swigluoai_uninterleave" and (is_oss or is_plain):
        return Gate("gpt_oss" if is_oss else "swiglu", clamp)
    if clamp is not None or not is_plain:
        return None
    config = layer.moe_config
    situ = config.activation_situ_beta, config.activation_situ_linear_beta
    if name == "situ" and situ == SITU:
        return Gate("situ")
    ours = {"gelu": "geglu", "gelu_tanh": "geglu_tanh"}.get(str(name))
    return None if ours is None else Gate(ours)


def recipe_of(method: Any, how: Stacked, settings: Settings) -> str:
    """The recipe of a layer: that of its bytes, or the one that was asked for."""
    if getattr(method, "use_a16", False):
        return A16.get(how.recipe, how.recipe)
    return settings.mxfp4 if recipe_named(how.recipe).weights.name == "mxfp4" else how.recipe


def why_not(layer: Any, method: Any, settings: Settings, *, exchanges: bool = False) -> str:
    """Why a layer stays vLLM's own; "" if we take it. `method` is the one that vLLM picked.

    exchanges  whether tokens go between ranks by our own communication
    """
    name = type(method).__name__
    if name not in METHODS:
        return f"experts of {name}"
    config, how, gate = layer.moe_config, METHODS[name], gate_of(layer)
    if gate is None:
        limits = layer.swiglu_limit, layer.swiglu_alpha, layer.swiglu_beta
        return f"activation {getattr(layer.activation, 'value', layer.activation)} {limits}"
    recipe = recipe_of(method, how, settings)
    return (
        _why_not_stored(method, how)
        or _why_not_sizes(layer, layer.global_num_experts if exchanges else layer.local_num_experts)
        or _why_not_parallel(layer, (*GATHERING, PASSTHROUGH) if exchanges else GATHERING)
        or _why_not_here(torch.device(config.device), recipe, gate.activation, settings)
    )


def _why_not_stored(method: Any, how: Stacked) -> str:
    """Of one kind of checkpoint: what our formats do not hold."""
    if how.recipe == "w8a8":
        block = getattr(method, "weight_block_size", None)
        if block is None or list(block) != BLOCK:
            return f"FP8 scales of {'whole rows or matrices' if block is None else block}"
        if getattr(method, "weight_scale_refine", None) is not None:
            return "FP8 blocks that tensor parallelism cuts"
    if how.recipe == "nvfp4" and getattr(method, "per_token_activation", False):
        return "an NVFP4 factor for each token"
    return ""


def _why_not_sizes(layer: Any, num_experts: int) -> str:
    config = layer.moe_config
    if config.in_dtype != torch.bfloat16:
        return f"a model in {config.in_dtype}: we compute in bfloat16"
    widths = layer.hidden_size, config.intermediate_size_per_partition
    if any(width % WIDTH_MULTIPLE for width in widths):
        return f"widths {widths}, no multiples of {WIDTH_MULTIPLE}"
    if not 1 <= layer.top_k <= min(MAX_TOP_K, num_experts):
        return f"top_k {layer.top_k} with {num_experts} experts in a call"
    if layer.apply_router_weight_on_input:
        return "routing weights that multiply the tokens"
    if getattr(layer.expert_map_manager, "num_fused_shared_experts", 0):
        return "shared experts among the routed ones"
    return "LoRA" if config.is_lora_enabled else ""


def _why_not_parallel(layer: Any, all2all: tuple[str, ...]) -> str:
    ranks = layer.moe_config.moe_parallel_config
    if ranks.enable_eplb:
        return "EPLB, which moves experts while we hold them packed"
    if getattr(ranks, "pcp_size", 1) > 1:
        return "prefill context parallelism"
    if ranks.use_all2all_kernels and ranks.all2all_backend not in all2all:
        return f"all2all_backend {ranks.all2all_backend}: use {GATHERING[0]}"
    return ""


def _why_not_here(device: torch.device, recipe: str, activation: str, settings: Settings) -> str:
    """Without a backend that was asked for, only what Hopper's kernels compute is worth taking."""
    if settings.backend is not None:
        return ""
    reason = backends.reasons_on(device)["hopper"]
    reason = reason or not_on("hopper", recipe)
    if not reason and activation not in ACTIVATIONS:
        reason = f"no kernel for activation {activation}"
    ask = '{"megamoe": {"backend": "auto"}}'
    return f"Hopper's kernels: {reason}; additional_config {ask} takes it anyway" if reason else ""


def make_layer(layer: Any, method: Any, settings: Settings, over: Over | None = None) -> MoE:
    """Our layer over the experts that vLLM loaded; it holds them alone from now on.

    over  the ranks between which we communicate: all of them make the layer
    """
    how, gate = METHODS[type(method).__name__], gate_of(layer)
    assert gate is not None
    weights = _experts(layer, method, settings, over)
    num_experts, options = layer.local_num_experts, {}
    if over is not None:
        num_experts, options = over.num_experts, {**over.options(), "mode": settings.mode}
    moe = MoE(
        weights, num_experts, layer.top_k, activation=gate.activation, clamp=gate.clamp,
        weight_at="combine", backend=settings.backend or "auto", **options,
    )  # fmt: skip
    if over is not None:
        over.check(moe)
    drop(layer, how)
    return moe


def reload(layer: Any, method: Any, settings: Settings, moe: MoE, over: Over | None = None) -> None:
    """Experts that vLLM loaded once more, in the memory of those that run: graphs stay valid."""
    how = METHODS[type(method).__name__]
    values = getattr(layer, f"w13_{how.values}")
    require(
        values.numel() > 0,
        "experts must be loaded in the checkpoint's format before they are processed again",
        got="none",
        fix="reload_weights with is_checkpoint_format=True",
        kind=NotAvailable,
    )
    new, held = _experts(layer, method, settings, over), moe.weights
    b13, b2 = (None if b is None else b.flatten(1) for b in (new.b13, new.b2))
    moe.refresh(new.w13, new.w2, b13=b13, b2=b2)
    for name in ("x_global", "acts_global"):
        mine, source = getattr(held, name), getattr(new, name)
        if mine is not None:
            with torch.no_grad(), torch.inference_mode(False):
                counted(mine).copy_(source)
    drop(layer, how)


def _experts(layer: Any, method: Any, settings: Settings, over: Over | None) -> ExpertWeights:
    """What vLLM loaded."""
    how, gate = METHODS[type(method).__name__], gate_of(layer)
    assert gate is not None
    recipe = recipe_of(method, how, settings)
    weights = experts_of(layer, how, recipe=recipe, gate_up=gate.gate_up)
    return weights if over is None else over.with_common_scale(weights)


def apply(
    layer: Any,
    moe: MoE,
    x: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    over: Over | None = None,
) -> Tensor:
    """One call: nothing is read back, so vLLM may capture it; staged ones over a group may not.

    Slots whose weight is NaN or Inf are left out: vLLM pads batches with rows of old memory, and
    routes them too. A token of a request that is NaN stays so in the model's residual.
    """
    require(x.dtype == torch.bfloat16, "tokens must be bfloat16", got=x.dtype, kind=DTypeError)
    weights = topk_weights.float().contiguous()
    ids = topk_ids.where(weights - weights == 0, -1)  # of NaN and Inf it is NaN; three launches
    if over is not None:
        return over.apply(moe, x, weights, ids)
    ids = local_ids(ids, layer.expert_map)
    y: Tensor = moe(x.contiguous(), ids, weights)
    return y


def _of_format(name: str) -> tuple[str, ...]:
    return tuple(recipe.name for recipe in RECIPES.values() if recipe.weights.name == name)

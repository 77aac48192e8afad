"""SGLang: experts through `mm.MoE`, as a MoE runner of its own (docs/sglang.md).

    pip install /path/to/megamoe                          # beside SGLang
    python -m sglang.launch_server ... --moe-runner-backend megamoe_layer

`register` is the entry point `megamoe` of the group `sglang.srt.plugins`: SGLang calls it in every
process, and `SGLANG_PLUGINS` can leave it out. Without the flag nothing changes; with it a layer
that we cannot run is refused by name, since the flag asked for us. ("megamoe" is another backend of
SGLang: DeepGEMM's, which `megamoe.compat.deep_gemm` serves.)

Three methods of SGLang's quantisation classes are hooked: which runner they make, what is done once
weights are there, and the call. Read of a layer: its w13_* and w2_* parameters, and
should_fuse_routed_scaling_factor_in_topk; of a runner's config: activation, is_gated, top_k,
num_local_experts, num_fused_shared_experts, gemm1_alpha, gemm1_beta, gemm1_clamp_limit,
swiglu_limit, gate_up_interleaved, apply_router_weight_on_input, no_combine, routed_scaling_factor
and params_dtype.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor

from megamoe.engine.backends import arch_of
from megamoe.engine.layer import MoE
from megamoe.errors import NotAvailable, require
from megamoe.formats.spec import recipe_on
from megamoe.integrations.stacked import Stacked, drop, experts_of

NAME = "megamoe_layer"
AT = "sglang.srt.layers.quantization"
# SGLang's classes, and what they load. DeepSeek-V4's FP4 experts come through Fp8MoEMethod.
METHODS = {
    "unquant.UnquantizedFusedMoEMethod": Stacked("bf16"),
    "fp8.Fp8MoEMethod": Stacked("w8a8", scales="weight_scale_inv"),
    "mxfp4.Mxfp4MoEMethod": Stacked("w4a16", scales="weight_scale", bias="weight_bias"),
}
FP4_EXPERTS = Stacked("w4a8", scales="weight_scale_inv")
GPT_OSS = 1.702
BLOCK = [128, 128]


class Gate(NamedTuple):
    """What stands between the linears, in our words."""

    activation: str
    clamp: float | None
    gate_up: str


class Experts(NamedTuple):
    """What SGLang hands to a runner as its quantisation data."""

    layer: MoE
    factor: float  # of the routing weights


def register() -> None:
    """Offer `--moe-runner-backend megamoe_layer`; SGLang calls it."""
    from sglang.srt.arg_groups.choices import (  # type: ignore[import-not-found]
        add_moe_runner_backend_choices,
    )
    from sglang.srt.layers.moe.moe_runner import (  # type: ignore[import-not-found]
        register_moe_runner_core,
    )
    from sglang.srt.plugins.hook_registry import (  # type: ignore[import-not-found]
        HookRegistry,
        HookType,
    )

    register_moe_runner_core(NAME, _core())
    add_moe_runner_backend_choices([NAME])
    for method, how in METHODS.items():
        for name, hook in (
            ("create_moe_runner", create_moe_runner),
            ("process_weights_after_loading", process_weights_after_loading),
            ("apply", apply),
        ):
            HookRegistry.register(f"{AT}.{method}.{name}", _around(hook, how), HookType.AROUND)


def _around(hook: Callable[..., Any], how: Stacked) -> Callable[..., Any]:
    """A hook that steps aside unless SGLang was asked for our runner."""

    def around(original: Callable[..., Any], *args: Any, **options: Any) -> Any:
        if not _is_asked_for():
            return original(*args, **options)
        return hook(how, *args, **options)

    return around


def _is_asked_for() -> bool:
    from sglang.srt.layers.moe.utils import (  # type: ignore[import-not-found]
        get_moe_runner_backend,
    )

    return bool(get_moe_runner_backend().value == NAME)


def _core() -> type:
    """The runner: tokens and ids as they were dispatched, sums as they are to be combined."""
    from sglang.srt.layers.moe.moe_runner.base import (  # type: ignore[import-not-found]
        DispatchMoeRunnerCore,
    )

    class MegaMoERunnerCore(DispatchMoeRunnerCore):  # type: ignore[misc]
        @property
        def runner_backend(self) -> Any:
            return _backend()

        def run_from_dispatch(
            self, dispatch_output: Any, quant_info: Experts, runner_config: Any, hooks: Any = None
        ) -> Any:
            from sglang.srt.layers.moe.token_dispatcher import (  # type: ignore[import-not-found]
                StandardCombineInput,
            )

            return StandardCombineInput(hidden_states=run(dispatch_output, quant_info))

    return MegaMoERunnerCore


def _backend() -> Any:
    from sglang.srt.layers.moe.utils import resolve_moe_runner_backend

    return resolve_moe_runner_backend(NAME)


# -- the three hooks -------------------------------------------------------------------------------


def create_moe_runner(how: Stacked, method: Any, layer: Any, moe_runner_config: Any) -> None:
    """In place of SGLang's: our runner, once we know that we can."""
    from sglang.srt.layers.moe.moe_runner import MoeRunner

    reason = why_not(method, how, moe_runner_config)
    require(
        not reason,
        f"--moe-runner-backend {NAME} must be able to run every MoE layer of the model",
        got=reason,
        fix="leave the flag out: SGLang picks a runner of its own",
        kind=NotAvailable,
    )
    method.moe_runner_config = moe_runner_config
    method.runner = MoeRunner(_backend(), moe_runner_config)


def process_weights_after_loading(how: Stacked, method: Any, layer: Any) -> None:
    """In place of SGLang's, which would rearrange the weights for its own kernels."""
    if getattr(method, "megamoe", None) is not None:
        refuse_load()
    object.__setattr__(method, "megamoe", make_layer(method, layer, how, method.moe_runner_config))


def apply(how: Stacked, method: Any, layer: Any, dispatch_output: Any) -> Any:
    """In place of SGLang's: the call."""
    factor = method.moe_runner_config.routed_scaling_factor
    if factor is None or getattr(layer, "should_fuse_routed_scaling_factor_in_topk", False):
        factor = 1.0
    return method.runner.run(dispatch_output, Experts(method.megamoe, float(factor)))


# -- without SGLang --------------------------------------------------------------------------------


def refuse_load(*_: Any, **__: Any) -> NoReturn:
    """In place of a parameter's loader: SGLang writes new weights where the old ones lay."""
    raise NotAvailable(
        "the experts of a running server cannot be replaced; got weights loaded a second time; "
        f"start SGLang without --moe-runner-backend {NAME} to reload weights"
    )


def gate_of(config: Any) -> Gate | None:
    """What a runner's config says of the gate; None if it is none of ours."""
    if config.activation != "silu" or not config.is_gated:
        return None
    alpha, beta, limit = config.gemm1_alpha, config.gemm1_beta, config.gemm1_clamp_limit
    if alpha is None and beta is None:
        # Without alpha, gemm1_clamp_limit is of silu(gate) (Step-3.5); swiglu_limit of the gate.
        return None if limit else Gate("swiglu", config.swiglu_limit or None, "split")
    if alpha == GPT_OSS and beta in (None, 1.0) and not config.swiglu_limit and limit != 0:
        return Gate("gpt_oss", limit, "interleaved" if config.gate_up_interleaved else "split")
    return None


def stacked_of(method: Any, how: Stacked) -> Stacked:
    """Where a class loads more than one format: the one of this method."""
    return FP4_EXPERTS if getattr(method, "is_fp4_expert", False) else how


def why_not(method: Any, how: Stacked, config: Any) -> str:
    """Why a layer cannot run here; "" if it can."""
    how = stacked_of(method, how)
    if how.recipe == "w8a8":
        block = getattr(method, "weight_block_size", None)
        if block is None or list(block) != BLOCK or getattr(method, "use_mxfp8", False):
            return f"FP8 scales per {block}"
    if gate_of(config) is None:
        options = (config.gemm1_alpha, config.gemm1_beta, config.gemm1_clamp_limit)
        return f"activation {config.activation} with alpha, beta and limit {options}"
    if config.apply_router_weight_on_input or config.no_combine:
        return "routing weights on tokens, or rows that are not summed"
    if config.num_fused_shared_experts:
        return "shared experts among the routed ones: use --disable-shared-experts-fusion"
    if config.params_dtype not in (None, torch.bfloat16, torch.float8_e4m3fn, torch.uint8):
        return f"a model in {config.params_dtype}: we compute in bfloat16"
    return ""


def make_layer(method: Any, layer: Any, how: Stacked, config: Any) -> MoE:
    """Our layer over the experts that SGLang loaded; it holds them alone from now on."""
    how, gate = stacked_of(method, how), gate_of(config)
    assert gate is not None
    values = getattr(layer, f"w13_{how.values}", None)
    recipe = how.recipe
    if isinstance(values, Tensor):
        recipe = recipe_on(recipe, arch_of(values.device))
    weights = experts_of(layer, how, recipe=recipe, gate_up=gate.gate_up)
    moe = MoE(
        weights, config.num_local_experts, config.top_k, activation=gate.activation,
        clamp=gate.clamp, weight_at="combine",
    )  # fmt: skip
    drop(layer, how)
    for name in how.names:
        parameter = getattr(layer, name, None)
        if parameter is not None:  # of SGLang's own parameters weight_loader is a property
            own = "_weight_loader" if hasattr(parameter, "_weight_loader") else "weight_loader"
            setattr(parameter, own, refuse_load)
    return moe


def run(dispatch_output: Any, experts: Experts) -> Tensor:
    """One call. SGLang has mapped ids to this rank's experts, -1 where they are another's."""
    routed = dispatch_output.topk_output
    weights = routed.topk_weights.float()
    if experts.factor != 1.0:
        weights = weights * experts.factor
    x = dispatch_output.hidden_states.contiguous()
    y: Tensor = experts.layer(x, routed.topk_ids.contiguous(), weights.contiguous())
    return y

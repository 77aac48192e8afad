"""What config.json says about the experts: gate, widths, order of rows, BF16 tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megamoe.engine.shards import read_json
from megamoe.errors import FileError, NotAvailable, ShapeError, require

ACTIVATIONS = {
    "silu": "swiglu", "swish": "swiglu", "swiglu": "swiglu", "swigluoai": "gpt_oss",
    "situ": "situ", "gelu": "geglu", "gelu_pytorch_tanh": "geglu_tanh",
}  # fmt: skip
OTHER_ACTS = ("expert_hidden_act", "moe_hidden_act", "mlp_hidden_act")  # said of experts alone
SITU = {"activation_situ_beta": 4.0, "activation_situ_linear_beta": 25.0}  # what is built
GATES = ((None, 0), (1.702, 0), (1.702, 1))  # swiglu_alpha and swiglu_beta: ours, gpt-oss's
SOFTCAPS = ("mlp_gate_softcap", "mlp_up_softcap")
GPT_OSS = ("gpt_oss",)  # model types with gpt-oss's gate, interleaved rows, transposed floats
# Model types whose one tensor of gate and up has all rows of gate first; other types are refused.
SPLIT = (
    "afmoe", "axk1", "axk2", "bailing_hybrid", "cohere2_moe", "deepseek_v2", "deepseek_v3",
    "deepseek_v32", "deepseek_v4", "diffusion_gemma", "diffusion_gemma_text", "dots1",
    "ernie4_5_moe", "exaone_moe", "flex_olmo", "gemma4", "gemma4_text", "glm4_moe", "glm4_moe_lite",
    "glm4v_moe", "glm4v_moe_text", "glm_moe_dsa", "hunyuan_v1_moe",
    "hy_v3", "jamba", "kimi_linear", "laguna", "lfm2_moe", "llama4", "llama4_text",
    "longcat_flash", "mellum", "mimo_v2_flash", "minimax", "minimax_m2", "mistral4",
    "mistral_large4", "mistral_large4_text", "mixtral", "olmoe", "phimoe", "qwen2_moe",
    "qwen3_5_moe", "qwen3_5_moe_text", "qwen3_moe", "qwen3_next", "qwen3_omni_moe",
    "qwen3_omni_moe_text", "qwen3_vl_moe", "qwen3_vl_moe_text", "qwen4_exp", "qwen4_exp_text",
    "solar_open",
)  # fmt: skip
# The width of an expert; intermediate_size is that of dense layers, but in the models below.
WIDTHS = ("moe_intermediate_size", "expert_ffn_hidden_size", "moe_ffn_hidden_size")
EXPERTS_ARE_INTERMEDIATE = (
    "gpt_oss", "llama4", "llama4_text", "minimax", "minimax_m2", "mixtral", "olmoe", "phimoe",
)  # fmt: skip
PADDED_TO = (32, 64, 128, 256)  # stored widths may be rounded up to a multiple of these
# Where compressed-tensors rotates: in the weights as they are stored, and in attention.
FUSED_ROTATIONS = {"weight_input", "weight_output", "q_attn", "k_cache"}
LLAMA4 = ("llama4", "llama4_text")  # routing weights multiply tokens


def is_gpt_oss(config: dict[str, Any]) -> bool:
    """Whether rows are interleaved and floats transposed, as gpt-oss stores them."""
    return config.get("model_type") in GPT_OSS


def gate_up_of(config: dict[str, Any], prefix: str, is_fused: bool) -> str:
    """The order of gate's and up's rows, "split" or "interleaved"."""
    model, (activation, _) = config.get("model_type"), activation_of(config)
    is_split = model in SPLIT and activation != "gpt_oss"
    require(
        not is_fused or is_gpt_oss(config) or is_split,
        "one tensor of gate and up must have a known order of rows",
        got=f"{prefix}* of model_type {model!r}, {activation}",
        fix="de-interleave it yourself and use ExpertWeights.from_quantized",
        kind=NotAvailable,
    )
    return "interleaved" if is_fused and is_gpt_oss(config) else "split"


def weights_multiply(config: dict[str, Any]) -> str:
    """What routing weights multiply: "outputs" of the experts, or "tokens" (Llama 4)."""
    return "tokens" if config.get("model_type") in LLAMA4 else "outputs"


def check_widths(config: dict[str, Any], prefix: str, hidden: int, intermediate: int) -> None:
    """Refuse widths other than config.json's: a part of the experts, or another model's."""
    wide = next((config[key] for key in WIDTHS if isinstance(config.get(key), int)), None)
    if wide is None and config.get("model_type") in EXPERTS_ARE_INTERMEDIATE:
        wide = config.get("intermediate_size")
    says = config.get("moe_latent_size") or config.get("hidden_size"), wide
    padded = ({-(-size // to) * to for to in (1, *PADDED_TO)} if isinstance(size, int) and size
              else None for size in says)  # fmt: skip
    require(
        all(ok is None or size in ok
            for size, ok in zip((hidden, intermediate), padded, strict=True)),
        f"{prefix}* must have the hidden and intermediate width of config.json, {says}, or those "
        f"rounded up to a multiple of {' or '.join(map(str, PADDED_TO))}",
        got=(hidden, intermediate),
        fix="these may be tensor-parallel shards, or another model's config.json",
        kind=ShapeError,
    )  # fmt: skip


def refuse_rotations(config: dict[str, Any]) -> None:
    """Refuse quantised experts whose tokens or activations must be rotated first."""
    quant = config.get("quantization_config") or {}
    names = ["rotation_config"] if quant.get("rotation_config") else []
    if _rotates_activations(quant.get("transform_config")):
        names.append("transform_config")
    algorithms = quant.get("algo_config") or []
    for one in algorithms if isinstance(algorithms, list) else [algorithms]:
        if isinstance(one, dict) and (one.get("online_r1_rotation") or one.get("r4")):
            names.append(f"algo_config {one.get('name')}")
    require(
        not names, "experts must need no rotation of tokens or activations",
        got=f"quantization_config with {', '.join(names)}",
        fix="quantise without online rotations", kind=NotAvailable,
    )  # fmt: skip


def _rotates_activations(transforms: Any) -> bool:
    """Whether compressed-tensors' rotations are more than those that weights hold already."""
    groups = transforms.get("config_groups") if isinstance(transforms, dict) else None
    if not transforms or not isinstance(groups, dict):
        return bool(transforms)
    places = [{one.get("location") for one in scheme.get("apply") or []}
              for scheme in groups.values()]  # fmt: skip
    return not all(each and each <= FUSED_ROTATIONS for each in places)


def refuse_layer_clamps(config: dict[str, Any], layer: int) -> None:
    """Refuse a clamp that this layer has by `swiglu_limits`: models differ in where it applies."""
    limits = config.get("swiglu_limits")
    if isinstance(limits, (list, tuple)):
        require(
            layer < len(limits), "swiglu_limits must have every layer",
            got=f"{len(limits)} for layer {layer}", kind=FileError,
        )  # fmt: skip
        limits = limits[layer]
    require(
        not limits, "a layer must not have a clamp of its own",
        got=f"swiglu_limits {limits} in layer {layer}", fix="this gate is not built",
        kind=NotAvailable,
    )  # fmt: skip


def activation_of(config: dict[str, Any]) -> tuple[str, float | None]:
    """The activation in our words, and its clamp, None where config.json gives none."""
    name = config.get("hidden_act", config.get("hidden_activation"))
    others = {key: said for key in OTHER_ACTS if (said := config.get(key)) not in (None, name)
              and ACTIVATIONS.get(str(said)) != ACTIVATIONS.get(str(name), name)}  # fmt: skip
    require(
        name in ACTIVATIONS and not others,
        f"config.json must name one of the activations {', '.join(ACTIVATIONS)}",
        got=f"hidden_act {name!r}" + (f" and {others}" if others else ""),
        kind=NotAvailable,
    )
    alpha = config.get("swiglu_alpha")
    is_oss = is_gpt_oss(config) or alpha is not None
    activation = "gpt_oss" if is_oss else ACTIVATIONS[str(name)]
    values = {key: config.get(key) for key in (*SITU, "swiglu_alpha", "swiglu_beta", *SOFTCAPS)}
    require(
        (activation != "situ" or all(values[key] == value for key, value in SITU.items()))
        and (alpha, config.get("swiglu_beta") or 0) in GATES
        and not any(values[key] for key in SOFTCAPS),
        f"SiTU must have {SITU}, swiglu_alpha be 1.702, swiglu_beta 1, and gates have no softcap",
        got=values,
        kind=NotAvailable,
    )
    limit = config.get("swiglu_limit")
    clamp = float(limit) if limit is not None and limit > 0 else None  # 0 is no clamp
    require(
        activation != "gpt_oss" or clamp is not None or (alpha is None and limit is None),
        "swiglu_alpha must come with a positive swiglu_limit: without one gpt-oss's is 7",
        got=f"swiglu_alpha {alpha} and swiglu_limit {limit}",
        fix='give activation="gpt_oss" and the clamp of the model yourself, float("inf") for none',
        kind=NotAvailable,
    )
    return activation, clamp


def has_bf16_inputs(config: dict[str, Any], folder: Path) -> bool:
    """Whether an NVFP4 checkpoint of modelopt or compressed-tensors quantises weights alone."""
    quant = config.get("quantization_config") or {}
    beside = folder / "hf_quant_config.json"  # modelopt's own
    more = read_json(beside).get("quantization") or {} if beside.is_file() else {}
    if "W4A16_NVFP4" in (quant.get("quant_algo"), more.get("quant_algo")):
        return True
    groups = (quant.get("config_groups") or {}).values()
    four = [g for g in groups if (g.get("weights") or {}).get("num_bits") == 4]
    return bool(four) and all(g.get("input_activations") is None for g in four)

"""What config.json says about the experts: their gate, and whether tokens stay BF16."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megamoe.engine.shards import read_json
from megamoe.errors import NotAvailable, require

ACTIVATIONS = {
    "silu": "swiglu", "swish": "swiglu", "swiglu": "swiglu", "swigluoai": "gpt_oss",
    "situ": "situ", "gelu": "geglu", "gelu_pytorch_tanh": "geglu_tanh",
}  # fmt: skip
SITU = {"activation_situ_beta": 4.0, "activation_situ_linear_beta": 25.0}  # what is built
GPT_OSS_ALPHA = 1.702
SOFTCAPS = ("mlp_gate_softcap", "mlp_up_softcap")
GPT_OSS = ("gpt_oss",)  # model types with gpt-oss's gate, interleaved rows, transposed floats


def is_gpt_oss(config: dict[str, Any]) -> bool:
    """Whether rows are interleaved and floats transposed, as gpt-oss stores them."""
    return config.get("model_type") in GPT_OSS


def activation_of(config: dict[str, Any]) -> tuple[str, float | None]:
    """The activation in our words, and its clamp, None where config.json gives none."""
    name = config.get("hidden_act", config.get("hidden_activation"))
    require(
        name in ACTIVATIONS,
        f"config.json must name one of the activations {', '.join(ACTIVATIONS)}",
        got=f"hidden_act {name!r}",
        kind=NotAvailable,
    )
    alpha = config.get("swiglu_alpha")
    is_oss = is_gpt_oss(config) or alpha is not None
    activation = "gpt_oss" if is_oss else ACTIVATIONS[str(name)]
    given = {key: config.get(key) for key in (*SITU, "swiglu_alpha", *SOFTCAPS)}
    require(
        (activation != "situ" or all(given[key] == value for key, value in SITU.items()))
        and alpha in (None, GPT_OSS_ALPHA)
        and not any(given[key] for key in SOFTCAPS),
        f"SiTU must have {SITU}, swiglu_alpha be {GPT_OSS_ALPHA}, and gates have no softcap",
        got=given,
        kind=NotAvailable,
    )
    clamp = config.get("swiglu_limit")
    return activation, None if clamp is None else float(clamp)


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

"""Tiny models with random weights, of the four families that the integration is held to."""

import torch

try:
    import transformers as tf

    VERSION = tuple(int(part) for part in tf.__version__.split(".")[:2])
except ImportError:
    VERSION = (0, 0)

COMMON = {"vocab_size": 128, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
          "max_position_embeddings": 128}  # fmt: skip
GQA = COMMON | {"num_key_value_heads": 2, "head_dim": 16}
MLA = COMMON | {"num_key_value_heads": 4, "q_lora_rank": 32, "kv_lora_rank": 16,
                "qk_rope_head_dim": 16, "qk_nope_head_dim": 16, "v_head_dim": 16}  # fmt: skip
ROPE = {"rope_type": "default", "rope_theta": 10000.0}
CONFIGS = {
    "qwen3": lambda: tf.Qwen3MoeConfig(
        **GQA, intermediate_size=96, moe_intermediate_size=32, num_experts=8,
        num_experts_per_tok=2, norm_topk_prob=True,
    ),
    "mixtral": lambda: tf.MixtralConfig(
        **GQA, intermediate_size=96, num_local_experts=4, num_experts_per_tok=2
    ),
    "gpt_oss": lambda: tf.GptOssConfig(
        **GQA, intermediate_size=64, num_local_experts=4, num_experts_per_tok=2,
        layer_types=["sliding_attention", "full_attention"], rope_parameters=ROPE,
    ),
    "deepseek_v3": lambda: tf.DeepseekV3Config(
        **MLA, intermediate_size=96, moe_intermediate_size=32, n_routed_experts=8,
        num_experts_per_tok=2, n_group=2, topk_group=1, n_shared_experts=1,
        first_k_dense_replace=1,
    ),
}  # fmt: skip


def model(family, dtype=torch.float32, device="cpu", experts_implementation="eager"):
    torch.manual_seed(0)
    made = tf.AutoModelForCausalLM.from_config(
        CONFIGS[family](), dtype=dtype, experts_implementation=experts_implementation
    )
    for parameter in made.parameters():  # biases too, which start at zero
        if parameter.ndim < 3 and bool((parameter == 0).all()):
            parameter.data.normal_(0.0, 0.02)
    return made.eval().to(device)


def prompt(device="cpu"):
    rng = torch.Generator().manual_seed(1)
    return torch.randint(1, 128, (2, 17), generator=rng).to(device)


def logits(made, implementation, ids):
    made.config._experts_implementation = implementation  # any 5.x takes it there
    with torch.no_grad():
        return made(ids, attention_mask=torch.ones_like(ids)).logits.double().cpu()


def experts(made):
    """The experts modules of a model, first layer first."""
    return [m for m in made.modules() if hasattr(m, "gate_up_proj") and m.gate_up_proj.ndim == 3]

"""A Hugging Face model, its experts run by transformers and by us: logits, tokens a second.

    python 08_transformers.py [--family gpt_oss] [--hidden 2048] [--layers 8] [--tokens 64]

The weights are random. docs/transformers.md has the rest.
"""

import argparse
import sys
import time

import torch

try:
    import transformers
except ImportError:
    sys.exit("needs transformers 5.7 or newer: pip install 'megamoe[transformers]'")

from megamoe.integrations.transformers import register

parser = argparse.ArgumentParser()
parser.add_argument("--family", choices=("qwen3", "gpt_oss"), default="qwen3")
for name, default in (("hidden", 64), ("layers", 2), ("experts", 8), ("batch", 2), ("tokens", 8)):
    parser.add_argument(f"--{name}", type=int, default=default)
args = parser.parse_args()
device = "cuda" if torch.cuda.is_available() else "cpu"
heads = max(args.hidden // 64, 2)
sizes = {
    "vocab_size": 1024, "hidden_size": args.hidden, "num_hidden_layers": args.layers,
    "num_attention_heads": heads, "num_key_value_heads": heads, "head_dim": 32,
    "intermediate_size": args.hidden, "num_experts_per_tok": 2,
}  # fmt: skip
if args.family == "qwen3":
    config = transformers.Qwen3MoeConfig(
        **sizes, moe_intermediate_size=args.hidden, num_experts=args.experts
    )
else:
    config = transformers.GptOssConfig(**sizes, num_local_experts=args.experts)

register()  # and, say, register("megamoe-w4a16", recipe="w4a16") for 4-bit experts
torch.manual_seed(0)
model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
model = model.eval().to(device)
prompt = torch.randint(1, 1024, (args.batch, 16), device=device)


def generate(count):
    said = model.generate(
        prompt, attention_mask=torch.ones_like(prompt), min_new_tokens=count,
        max_new_tokens=count, do_sample=False, pad_token_id=0,
    )  # fmt: skip
    return said[:, prompt.shape[1] :].cpu()


def logits():
    with torch.no_grad():
        return model(prompt).logits.float()


model.set_experts_implementation("eager")
eager = logits()
for name in ("eager", "grouped_mm", "megamoe"):
    model.set_experts_implementation(name)
    apart = (logits() - eager).norm(dim=-1) / eager.norm(dim=-1)
    generate(2)
    start = time.perf_counter()
    said = generate(args.tokens)
    rate = said.numel() / (time.perf_counter() - start)
    print(f"{name:12}{rate:10.1f} tokens/s   logits {float(apart.median()):.1e} from eager's")

"""A Hugging Face model, its experts run by transformers and by us: logits, tokens a second.

    python 08_transformers.py [--family gpt_oss] [--hidden 2048] [--layers 8] [--tokens 64]
    python 08_transformers.py --stored fp8     # or fp4: experts as quantised checkpoints have them

The weights are random. docs/transformers.md has the rest.
"""

import argparse
import sys
import time

import torch

try:
    import transformers
except ImportError:
    sys.exit("needs transformers 5.7 or newer: pip install 'transformers>=5.7'")

import megamoe as mm
from megamoe.integrations.transformers import give_back, register, use

parser = argparse.ArgumentParser()
parser.add_argument("--family", choices=("qwen3", "gpt_oss"), default="qwen3")
for name, default in (("hidden", 64), ("layers", 2), ("experts", 8), ("batch", 2), ("tokens", 8)):
    parser.add_argument(f"--{name}", type=int, default=default)
parser.add_argument("--stored", choices=("bf16", "fp8", "fp4"), default="bf16")
args = parser.parse_args()
if args.stored != "bf16":
    args.hidden = max(args.hidden, 128)  # a block of FP8's scales
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
with torch.device(device):  # billions of random numbers
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
prompt = torch.randint(1, 1024, (args.batch, 16), device=device)


def quantised(recipe):
    """The model's experts in a recipe's format: BF16 modules with those values, and FP8Experts."""
    from transformers.integrations.finegrained_fp8 import replace_with_fp8_linear

    held = {}
    for name, module in model.named_modules():
        if name.endswith(".experts"):
            weights = mm.ExpertWeights.quantize(module.gate_up_proj, module.down_proj, recipe)
            w13, w2 = weights.dequantize()
            module.gate_up_proj.data, module.down_proj.data = w13.bfloat16(), w2.bfloat16()
            held[name] = module, weights
    plain = [name for name, m in model.named_modules() if isinstance(m, torch.nn.Linear)]
    fmt = {"expert_dtype": args.stored, "scale_fmt": "float" if args.stored == "fp8" else "ue8m0"}
    replace_with_fp8_linear(
        model, plain, transformers.FineGrainedFP8Config(**fmt), pre_quantized=True
    )
    for name, (module, weights) in held.items():
        made = model.get_submodule(name).to_empty(device=device)
        for linear, w in (("gate_up_proj", weights.w13), ("down_proj", weights.w2)):
            for suffix, t in (("", w.data), ("_scale_inv", w.scale)):
                into = getattr(made, linear + suffix)
                if into.numel() != t.numel():
                    sys.exit(
                        f"transformers {transformers.__version__} makes no {args.stored} experts"
                    )
                into.data.copy_(t.reshape(into.shape).view(into.dtype))
        model.set_submodule(name, module)
        held[name] = made
    return held


def generate(count):
    said = model.generate(
        prompt, attention_mask=torch.ones_like(prompt), min_new_tokens=count,
        max_new_tokens=count, do_sample=False, pad_token_id=0,
    )  # fmt: skip
    return said[:, prompt.shape[1] :].cpu()


def logits():
    with torch.no_grad():
        return model(prompt).logits.float()


def report(name, what=""):
    apart = (logits() - eager).norm(dim=-1) / eager.norm(dim=-1)
    generate(2)
    start = time.perf_counter()
    said = generate(args.tokens)
    rate = said.numel() / (time.perf_counter() - start)
    far = float(apart.median())
    print(f"{what + name:20}{rate:10.1f} tokens/s   logits {far:.1e} from eager's")


recipe = {"bf16": "bf16", "fp8": "w8a8", "fp4": "w4a8"}[args.stored]
modules = {} if args.stored == "bf16" else quantised(recipe)
model.set_experts_implementation("eager")
eager = logits()
for name in ("eager", "grouped_mm"):
    model.set_experts_implementation(name)
    report(name)
for name, module in modules.items():
    model.set_submodule(name, module.to(device))
if modules:
    model.set_experts_implementation("grouped_mm")
    try:  # transformers' own, whose kernels come from a hub
        report("grouped_mm", f"{args.stored} ")
    except (ImportError, OSError, RuntimeError) as error:
        print(f"{args.stored} grouped_mm  not available here: {type(error).__name__}")
for name, graphs in (("megamoe", False), ("megamoe graphs", True)):
    use(model, take=True, cuda_graphs=graphs)  # one copy of the experts, ours
    report(name, f"{args.stored} " if modules else "")
    give_back(model)
    if device == "cpu":
        break  # nothing to replay

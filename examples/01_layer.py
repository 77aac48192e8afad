"""A layer in four lines: quantise experts, route tokens, call; then the same as a module.

Runs on a GPU where there is one.
"""

import torch

import megamoe as mm

EXPERTS, HIDDEN, INTERMEDIATE, TOP_K = 16, 512, 256, 4
torch.manual_seed(0)
torch.set_default_device("cuda" if torch.cuda.is_available() else "cpu")
w13 = torch.randn(EXPERTS, 2 * INTERMEDIATE, HIDDEN).bfloat16() / HIDDEN**0.5
w2 = torch.randn(EXPERTS, HIDDEN, INTERMEDIATE).bfloat16() / INTERMEDIATE**0.5
x = torch.randn(8, HIDDEN).bfloat16()
logits = torch.randn(8, EXPERTS)

topk_idx, topk_weights = mm.route(logits, mm.Router(EXPERTS, TOP_K, "sigmoid", scale=2.5))
bf16 = mm.ExpertWeights.quantize(w13, w2, "bf16")
plain = mm.moe(x, topk_idx, topk_weights, bf16, clamp=10.0).float()
print(f"{'recipe':12}{'bytes':>10}  error against BF16")
for recipe in ("w8a8", "w4a16", "w4a8", "w4a8_block", "w4a4", "nvfp4"):
    weights = mm.ExpertWeights.quantize(w13, w2, recipe)
    y = mm.moe(x, topk_idx, topk_weights, weights, clamp=10.0)
    error = (y.float() - plain).norm() / plain.norm()
    print(f"{recipe:12}{weights.nbytes:>10,}  {error:.3f}")

layer = mm.MoE(weights, EXPERTS, TOP_K, clamp=10.0, max_tokens_per_rank=64)
assert torch.equal(layer(x, topk_idx, topk_weights), y)
print(layer)
print("tokens received per expert:", layer.stats.tolist())

"""A caller of DeepGEMM's MegaMoE: one import changes, the rest is as it was. Any GPU, or none."""

import torch

import megamoe.compat.deep_gemm as deep_gemm  # was: import deep_gemm

EXPERTS, HIDDEN, INTERMEDIATE, TOP_K, MAX_TOKENS, TOKENS = 8, 512, 256, 2, 64, 10
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)
torch.set_default_device(DEVICE)


def cast_weights_to_fp4(w):
    groups, n, k = w.shape
    pairs = [deep_gemm.utils.per_token_cast_to_fp4(m, use_ue8m0=True, gran_k=32) for m in w]
    data, scale = (torch.stack(each) for each in zip(*pairs, strict=True))
    return data, deep_gemm.transform_sf_into_required_layout(scale, n, k, (1, 32), groups)


# Once: a buffer for the group's ranks (None: this process alone), and weights in its layout.
buffer = deep_gemm.get_symm_buffer_for_mega_moe(
    None, EXPERTS, MAX_TOKENS, TOP_K, HIDDEN, INTERMEDIATE
)
l1 = torch.randn(EXPERTS, 2 * INTERMEDIATE, HIDDEN, dtype=torch.bfloat16)  # gate rows, then up rows
l2 = torch.randn(EXPERTS, HIDDEN, INTERMEDIATE, dtype=torch.bfloat16)
l1, l2 = deep_gemm.transform_weights_for_mega_moe(cast_weights_to_fp4(l1), cast_weights_to_fp4(l2))

# Every call: fill the buffer's first rows, then one call writes y and adds to the statistics.
x = torch.randn(TOKENS, HIDDEN, dtype=torch.bfloat16)
topk_weights, topk_idx = torch.randn(TOKENS, EXPERTS).softmax(-1).topk(TOP_K)
topk_idx[3, 1] = -1  # a masked slot
deep_gemm.mega_moe_pre_dispatch(
    x, topk_idx, topk_weights, buffer.x, buffer.x_sf, buffer.topk_idx, buffer.topk_weights, TOKENS
)
y = torch.empty(TOKENS, HIDDEN, dtype=torch.bfloat16)
stats = torch.zeros(EXPERTS, dtype=torch.int32)
deep_gemm.fp8_fp4_mega_moe(
    y, l1, l2, buffer, cumulative_local_expert_recv_stats=stats, activation_clamp=10.0
)
assert int(stats.sum()) == TOKENS * TOP_K - 1 and bool(y.isfinite().all())
print(f"{tuple(y.shape)} on {y.device}; tokens received per expert: {stats.tolist()}")
buffer.destroy()

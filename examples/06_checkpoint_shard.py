"""One MoE layer out of safetensors shards, on a GPU where there is one; names as DeepSeek-V3's.

    python 06_checkpoint_shard.py [LAYER SHARD [SHARD...]]

Without shards a small one is written first. Tensors are read one by one, straight to the device.
"""

import sys
import tempfile
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file

import megamoe as mm

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
EXPERTS, HIDDEN, INTERMEDIATE = 16, 512, 256  # of the small one
ROUTERS = {  # by the number of experts
    16: mm.Router(16, 4, "sigmoid", scale=2.5),
    256: mm.Router(256, 8, "sigmoid", num_groups=8, num_kept_groups=4, scale=2.5),
}


def load_layer(paths, layer):
    """Router, routed and shared experts of one layer; FP8 blocks stay the bytes they are."""
    prefix = f"model.layers.{layer}.mlp."
    shards = [safe_open(path, framework="pt", device=DEVICE) for path in paths]
    where = {name: shard for shard in shards for name in shard.keys()}  # noqa: SIM118

    def get(name):
        return where[prefix + name].get_tensor(prefix + name)

    def rows(names):
        """(values, scales) of gate and up, or of down, as [1, rows, columns]."""
        values = torch.cat([get(f"{name}.weight") for name in names])
        return values[None], torch.cat([get(f"{name}.weight_scale_inv") for name in names])[None]

    def expert(name):
        w13, w2 = rows([f"{name}.gate_proj", f"{name}.up_proj"]), rows([f"{name}.down_proj"])
        return mm.ExpertWeights.from_quantized(*w13, *w2, recipe="w8a8")

    gate, bias = get("gate.weight").float(), get("gate.e_score_correction_bias").float()
    routed = mm.ExpertWeights.cat([expert(f"experts.{e}") for e in range(len(bias))])
    return gate, bias, routed, expert("shared_experts")


def write_shard(path):
    """Random experts under the checkpoint's names, as layer 3."""
    tensors = {
        "gate.weight": torch.randn(EXPERTS, HIDDEN) / HIDDEN**0.5,
        "gate.e_score_correction_bias": torch.randn(EXPERTS) * 0.01,
    }
    wide, tall = (INTERMEDIATE, HIDDEN), (HIDDEN, INTERMEDIATE)
    for name in [*(f"experts.{e}" for e in range(EXPERTS)), "shared_experts"]:
        for matrix, shape in (("gate_proj", wide), ("up_proj", wide), ("down_proj", tall)):
            q = mm.quantize(torch.randn(shape) / shape[1] ** 0.5, "fp8_128x128")
            tensors[f"{name}.{matrix}.weight"] = q.data
            tensors[f"{name}.{matrix}.weight_scale_inv"] = q.scale
    save_file({f"model.layers.3.mlp.{name}": t for name, t in tensors.items()}, path)


torch.manual_seed(0)
with tempfile.TemporaryDirectory() as folder:
    layer, paths = 3, [Path(folder) / "shard.safetensors"]
    if len(sys.argv) > 2:
        layer, paths = int(sys.argv[1]), sys.argv[2:]
    else:
        write_shard(paths[0])
    gate, bias, routed, shared = load_layer(paths, layer)

router = ROUTERS[routed.num_experts]
moe = mm.MoE(routed, routed.num_experts, router.top_k, shared=shared)
x = torch.randn(8, routed.hidden, device=DEVICE).bfloat16()
y = moe(x, *mm.route(x.float() @ gate.T, router, bias))
size = float(y.float().norm() / x.float().norm())
print(f"layer {layer} on {DEVICE}: {moe.extra_repr()}")
print(f"{len(x)} tokens through it, |y| / |x| = {size:.2f}")

"""A checkpoint's tensors as they are: gpt-oss blocks, DeepSeek-V3 FP8 blocks; saved and loaded.

Runs on a GPU where there is one.
"""

import tempfile
from pathlib import Path

import torch

import megamoe as mm

EXPERTS, HIDDEN, INTERMEDIATE = 4, 256, 192
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)
torch.set_default_device(DEVICE)
gate_up = torch.randn(EXPERTS, 2 * INTERMEDIATE, HIDDEN).bfloat16()  # gate, up, gate, up, ...
down = torch.randn(EXPERTS, HIDDEN, INTERMEDIATE).bfloat16()

# gpt-oss: blocks of 16 bytes, rows of gate and up interleaved, biases.
q13, q2 = mm.quantize(gate_up, "mxfp4"), mm.quantize(down, "mxfp4")
gpt_oss = mm.ExpertWeights.from_quantized(
    q13.data.unflatten(2, (-1, 16)), q13.scale, q2.data.unflatten(2, (-1, 16)), q2.scale,
    recipe="w4a16", gate_up="interleaved",
    b13=torch.zeros(EXPERTS, 2 * INTERMEDIATE), b2=torch.zeros(EXPERTS, HIDDEN),
)  # fmt: skip

# DeepSeek-V3: float8_e4m3fn with weight_scale_inv per 128x128, gate and up apart.
gate, up = (mm.quantize(gate_up[:, i::2], "fp8_128x128") for i in (0, 1))
q2 = mm.quantize(down, "fp8_128x128")
deepseek = mm.ExpertWeights.from_quantized(
    torch.cat([gate.data, up.data], 1), torch.cat([gate.scale, up.scale], 1), q2.data, q2.scale,
    recipe="w8a8",
)  # fmt: skip

with tempfile.TemporaryDirectory() as folder:
    path = Path(folder) / "experts.safetensors"
    deepseek.save(path)
    again = mm.ExpertWeights.load(path, device=DEVICE)
    print(f"{path.stat().st_size:,} bytes on disk, {again.nbytes:,} in memory")

x = torch.randn(3, HIDDEN).bfloat16()
topk_idx, topk_weights = torch.tensor([[0, 3], [1, -1], [2, 2]]), torch.full((3, 2), 0.5)
assert torch.equal(
    mm.moe(x, topk_idx, topk_weights, deepseek), mm.moe(x, topk_idx, topk_weights, again)
)
y = mm.moe(x, topk_idx, topk_weights, gpt_oss, activation="gpt_oss")
print("gpt-oss experts, one slot masked, one expert twice:", tuple(y.shape), y.dtype)

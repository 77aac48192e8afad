"""Expert parallel: one process per rank, over gloo on CPUs and NCCL on GPUs.

torchrun --nproc-per-node 2 examples/05_expert_parallel.py     (alone it starts itself like that)
"""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

if "RANK" not in os.environ:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    sys.exit(subprocess.call([*torchrun, __file__]))

import torch
import torch.distributed as dist

import megamoe as mm
from megamoe.routing.samplers import sample_routing

EXPERTS, HIDDEN, INTERMEDIATE, TOP_K = 16, 256, 128, 4

has_gpu = torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"])
device = torch.device(f"cuda:{os.environ['LOCAL_RANK']}" if has_gpu else "cpu")
if has_gpu:
    torch.cuda.set_device(device)
dist.init_process_group("cpu:gloo,cuda:nccl" if has_gpu else "gloo")
rank, num_ranks = dist.get_rank(), dist.get_world_size()


def say(text: str) -> None:
    if rank == 0:
        print(text, flush=True)


torch.manual_seed(0)  # the same experts everywhere, so that we can check; a rank needs only its own
weights = mm.ExpertWeights.quantize(
    torch.randn(EXPERTS, 2 * INTERMEDIATE, HIDDEN, device=device) / HIDDEN**0.5,
    torch.randn(EXPERTS, HIDDEN, INTERMEDIATE, device=device) / INTERMEDIATE**0.5,
    "w4a8_block",
)
layer = mm.MoE(
    weights.for_rank(rank, num_ranks), EXPERTS, TOP_K, group=dist.group.WORLD,
    max_tokens_per_rank=64, timeout_s=60,
)  # fmt: skip
mm.warmup(layer, [8, 64])

# Ranks may have any number of tokens, also none. Routing is skewed: a few experts are hot.
num_tokens = (24 + 40 * rank) % 65
x = torch.randn(num_tokens, HIDDEN, device=device).bfloat16()
idx, gates = sample_routing(num_tokens, EXPERTS, TOP_K, skew="zipf", seed=7 + rank)
idx, gates = idx.to(device), gates.to(device)
y = layer(x, idx, gates)
alone = mm.moe(x, idx, gates, weights, backend=layer.backend)
assert torch.equal(y, alone)
say(f"{num_ranks} ranks on {device.type}, backend {layer.backend}: the bits of one rank")

# What one rank may not do, every rank refuses; the next call works.
try:
    layer(x.repeat(9, 1), idx.repeat(9, 1), gates.repeat(9, 1))
except mm.MegaMoEError as error:
    say(f"refused on every rank: {error}")

# Place the experts anew by what was recorded: hot ones twice. The bits stay.
seen = layer.statistics()
placement = mm.propose(seen.logical, num_ranks, EXPERTS // num_ranks + 2)
say(
    f"busiest rank over the mean: {seen.placement.imbalance(seen.logical):.2f} as it was, "
    f"{placement.imbalance(seen.logical):.2f} with {placement.num_physical - EXPERTS} copies"
)
again = mm.MoE(
    weights.take(placement.slots[rank]), EXPERTS, TOP_K, group=dist.group.WORLD,
    placement=placement, max_tokens_per_rank=64, timeout_s=60,
)  # fmt: skip
assert torch.equal(again(x, idx, gates), alone)
with tempfile.TemporaryDirectory() as folder:  # what `megamoe balance` reads
    layer.save_stats(Path(folder) / "stats.json")
say("placed anew: the same bits")
dist.destroy_process_group()

"""Eight ranks as processes of this machine, `MoE(group=...)` on each, bit for bit as one rank."""

import torch

import megamoe as mm
from megamoe.bench.ranks import run_ranks
from megamoe.problem import Options
from megamoe.routing.samplers import sample_routing

RANKS, EXPERTS, HIDDEN, INTERMEDIATE, TOP_K = 8, 32, 128, 64, 4
torch.manual_seed(0)
weights = mm.ExpertWeights.quantize(
    torch.randn(EXPERTS, 2 * INTERMEDIATE, HIDDEN),
    torch.randn(EXPERTS, HIDDEN, INTERMEDIATE),
    "w4a8",
)
counts = [5, 0, 9, 1, 0, 3, 12, 2]  # tokens differ from rank to rank; none is fine
x = [torch.randn(n, HIDDEN).bfloat16() for n in counts]
routing = [sample_routing(n, EXPERTS, TOP_K, skew="zipf", seed=r) for r, n in enumerate(counts)]
idx, weight = map(list, zip(*routing, strict=True))

tokens = list(zip(x, idx, weight, strict=True))
outputs, received = run_ranks(tokens, weights, None, Options(), lambda done, of: None)
for rank, y in enumerate(outputs):
    assert torch.equal(y, mm.moe(x[rank], idx[rank], weight[rank], weights, backend="reference"))
    rows = int(received.chunk(RANKS)[rank].sum())
    print(f"rank {rank}: {counts[rank]:2} tokens in and out, {rows:3} rows received")

"""Small layers, and a CPU that the hopper backend takes for its own: the oracle computes there."""

import torch

import megamoe as mm
from megamoe import reference
from megamoe.routing.permute import expert_counts
from megamoe.routing.samplers import sample_routing

E, I, H, K = 8, 64, 96, 2


def weights(recipe="w4a8", seed=0, experts=E):
    rng = torch.Generator().manual_seed(seed)
    w13 = torch.randn(experts, 2 * I, H, generator=rng).bfloat16()
    w2 = torch.randn(experts, H, I, generator=rng).bfloat16()
    return mm.ExpertWeights.quantize(w13, w2, recipe)


def tokens(count=10, seed=0, **options):
    x = torch.randn(count, H, generator=torch.Generator().manual_seed(seed)).bfloat16()
    return x, *sample_routing(count, E, K, seed=seed, **options)


class Launches:
    """Stands for the GPU: each call of a mode is kept, and computed by the oracle."""

    def __init__(self):
        self.log, self.calls, self.report, self.before = [], [], None, lambda call: None

    def fused(self, tokens, pool, acts, w13, w2, tile, how, options, kept, **rest):
        self.log.append("fused")
        self.calls.append({"tokens": tokens, "pool": pool, "acts": acts, "kept": kept, **rest})
        self.before(self.calls[-1])
        ranks = rest["ranks"]
        per_rank = len(tokens.x) // ranks
        valid = [per_rank] * ranks if tokens.num_valid is None else tokens.num_valid.tolist()
        there = torch.cat([torch.arange(per_rank) < count for count in valid])
        idx = tokens.idx.masked_fill(~there[:, None], -1)
        bad = (idx >= E) | (idx < -1)
        for rank, some in enumerate(bad.flatten().chunk(ranks)):
            if some.any():
                tokens.error[rank] = int(some.nonzero()[0])
        idx = idx.masked_fill(bad, -1)
        y = reference.moe(tokens.x, idx, tokens.weights, self.weights, options, None)
        tokens.y.copy_(y)
        if tokens.stats is not None:
            tokens.stats.add_(expert_counts(idx, E))
        if self.report is not None:
            kept.report.copy_(torch.tensor(self.report, dtype=torch.int32))

    def staged(self, x, idx, gates, weights, options, shared, error, stats, num_valid, *, pdl):
        self.log.append("staged+" if pdl else "staged")
        return reference.moe(x, idx, gates, weights, options, shared)


def make(gpu, **options):
    return mm.MoE(gpu.weights, E, K, backend="hopper", **{"mode": "fused", **options})


def wanted(inputs, gpu):
    return mm.moe(*inputs, gpu.weights, backend="reference")

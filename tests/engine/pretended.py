"""Small layers, and a CPU that the hopper backend takes for its own: the oracle computes there."""

import ctypes

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


def at(t, offset):
    """The tensor that lies `offset` bytes from `t`, as a kernel sees it."""
    if offset == 0:
        return t
    assert t.is_contiguous()
    raw = (ctypes.c_char * t.nbytes).from_address(t.data_ptr() + offset)
    return torch.frombuffer(raw, dtype=t.dtype).view(t.shape)


class Launches:
    """Stands for the GPU: each call of a mode is kept, and computed by the oracle."""

    def __init__(self):
        self.log, self.calls, self.report, self.before = [], [], None, lambda call: None
        self.shared = None  # experts of the layer

    def fused(self, tokens, pool, acts, experts, step, how, options, kept, **rest):
        self.log.append("fused")
        kept_of = {"tokens": tokens, "pool": pool, "acts": acts, "kept": kept, "step": step}
        kept_of |= {"num_experts": experts.num, "num_shared": experts.num_shared}
        self.calls.append({**kept_of, **rest})
        self.before(self.calls[-1])
        world = rest["world"]
        away = [0] if world.peers is None else (world.peers - world.peers[world.first]).tolist()
        num = len(tokens.x)
        received = torch.zeros(E, dtype=torch.int64)
        for rank, offset in enumerate(away):
            x, idx, gates = (at(t, offset) for t in (tokens.x, tokens.idx, tokens.weights))
            count = num if tokens.num_valid is None else int(at(tokens.num_valid, offset))
            idx = idx.masked_fill((torch.arange(num) >= count)[:, None], -1)
            bad = (idx >= E) | (idx < -1)
            idx = idx.masked_fill(bad, -1)
            received += expert_counts(idx, E)
            local = rank - world.first
            if 0 <= local < world.local:
                if bad.any():
                    tokens.error[local] = int(bad.flatten().nonzero()[0])
                shared = self.shared if experts.num_shared else None
                y = reference.moe(x, idx, gates, self.weights, options, shared)
                tokens.y[local * num : (local + 1) * num].copy_(y)
        if tokens.stats is not None:
            per_rank = E // world.num
            tokens.stats.add_(received[world.first * per_rank :][: world.local * per_rank])
        if self.report is not None:
            kept.report.copy_(torch.tensor(self.report, dtype=torch.int32))

    def staged(self, backend, call, plan):
        self.log.append("staged" if plan.overlaps else "staged alone")
        return reference.moe(*call[:6])


def make(gpu, **options):
    return mm.MoE(gpu.weights, E, K, backend="hopper", **{"mode": "fused", **options})


def wanted(inputs, gpu):
    return mm.moe(*inputs, gpu.weights, backend="reference")

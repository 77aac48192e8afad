"""What each of two processes runs: staged expert parallelism on the emulated Hopper kernels."""

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

import megamoe as mm
from megamoe.engine import backends
from megamoe.planner.tables import portable as tables
from megamoe.routing.samplers import sample_routing
from tests import emulator
from tests.emulator import blackwell

H, I, E, K = 96, 64, 4, 2
COUNTS = (5, 3)


def experts(recipe, num=E, seed=0):
    rng = torch.Generator().manual_seed(seed)
    w13 = (torch.randn(num, 2 * I, H, generator=rng) / H**0.5).bfloat16()
    w2 = (torch.randn(num, H, I, generator=rng) / I**0.5).bfloat16()
    return mm.ExpertWeights.quantize(w13, w2, recipe)


def pretend(patch, backend="hopper"):
    """A CPU that a backend of Gluon kernels takes for its own, with two SMs."""
    there = tuple(
        replace(b, why_not=lambda device: "") if b.name == backend else b for b in backends.BACKENDS
    )
    patch.setattr(backends, "BACKENDS", there)
    patch.setattr(tables, "PACKED", {})  # words are packed in PTX
    if backend == "blackwell":
        return blackwell.install_chain(patch, 2)
    return emulator.install(patch, 2)


def staged_is_fused_is_one_rank(rank, recipe, options):
    """This rank's bits, over the group and alone, staged and fused; its kernels were Hopper's."""
    w, shared = experts(recipe), None
    options = dict(options)
    if options.pop("has_shared", False):
        shared = experts(recipe, 1, seed=1)
    x = torch.randn(sum(COUNTS), H, generator=torch.Generator().manual_seed(1)).bfloat16()
    idx, gates = sample_routing(sum(COUNTS), E, K, masked_ratio=0.2, seed=2)
    first = sum(COUNTS[:rank])
    mine = [t[first : first + COUNTS[rank]] for t in (x, idx, gates)]
    with pytest.MonkeyPatch.context() as patch:
        kernels = pretend(patch)
        layer = mm.MoE(
            w.for_rank(rank, 2), E, K, group=dist.group.WORLD, backend="hopper", mode="staged",
            shared=shared, timeout_s=60.0, **options,
        )  # fmt: skip
        assert layer.plan(3).backend == "hopper" and layer.mode == "staged"
        y = layer(*mine)
        layer.check()
        launches = sum(kernels[name].launches for name in ("gemm_swap_ab_kernel", "gemm_kernel"))
        assert launches >= 2
        one = {"backend": "hopper", "shared": shared, **options}
        alone = mm.moe(*mine, w, mode="staged", **one)
        same = torch.equal(y, alone)
        if shared is None:
            same &= torch.equal(y, mm.moe(*mine, w, mode="fused", **one))
    return bool(same)

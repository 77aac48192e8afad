"""Thousands of fused launches on a Hopper GPU, one after the other: races show as wrong bits."""

import random

import pytest
import torch

import megamoe as mm
from megamoe.engine.status import DeviceStatus
from megamoe.planner.hopper import as_fused, tile_of
from megamoe.planner.tables.hopper import Shape
from megamoe.routing.samplers import sample_routing
from tests import pretending
from tests.engine.test_fused_gpu import BASE, CUDA, base, tiles_of
from tests.engine.test_hopper_gpu import IS_OTHER, E

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(IS_OTHER, reason="needs an sm_90 GPU; this is another"),
]


def real_layer(num_experts, hidden, intermediate):
    """(what makes normal tensors, weights of a real shape)."""
    rng = torch.Generator(CUDA).manual_seed(0)

    def normal(*shape):
        return torch.randn(*shape, generator=rng, device=CUDA, dtype=torch.bfloat16)

    w13 = normal(num_experts, 2 * intermediate, hidden) * hidden**-0.5
    w2 = normal(num_experts, hidden, intermediate) * intermediate**-0.5
    return normal, mm.ExpertWeights.quantize(w13, w2, BASE)


def count_wrong(num, batches, weights, options=None, stats=None, tile=None):
    """Launches, of `num` by turns over (inputs, wanted), that have other bits than wanted.

    tile  None: the table's
    """
    status, wrong = DeviceStatus(CUDA), torch.zeros((), dtype=torch.int64, device=CUDA)
    for step in range(num):
        inputs, wanted = batches[step * 5 % len(batches)]
        y = pretending.fuse(inputs, weights, options, status, tile, stats=stats)
        wrong += (y.view(torch.int16) != wanted.view(torch.int16)).any()
        if step % 500 == 0:
            torch.cuda.synchronize()
    status.check(batches[0][0][1].shape[1])
    return int(wrong)


def test_20000_launches_show_no_mismatch():
    """Tiles of 8 tokens: experts take several passes, and counters are used again at once."""
    crowd = base()
    cases = [(4, 0), (10, 1), (30, 2), (50, 7), (64, 5), (64, None), (50, None), (33, None)]
    batches = [
        crowd.pick(num, seed, None if kind is None else [kind])
        for seed in range(2)
        for num, kind in cases
    ]
    stats = torch.zeros(E, dtype=torch.int64, device=CUDA)
    tile = as_fused(tiles_of(BASE)[0])
    assert count_wrong(20_000, batches, crowd.weights, crowd.options, stats, tile) == 0


def test_4000_launches_at_real_shapes_show_no_mismatch():
    """One of eight ranks of DeepSeek-V3, 64 tokens and 8: the tiles of decode, all SMs busy."""
    num_experts, hidden, num = 32, 7168, 256
    normal, weights = real_layer(num_experts, hidden, 2048)
    idx, gates = (t.to(CUDA) for t in sample_routing(num, num_experts, 8, seed=3))
    crowd = normal(num, hidden), idx, gates
    wanted = mm.moe(*crowd, weights, backend="hopper", mode="staged")
    rng = random.Random(0)
    picks = [
        torch.tensor(rng.sample(range(num), size), device=CUDA) for size in (64, 8, 64, 61, 8, 3)
    ]
    batches = [([t[at] for t in crowd], wanted[at]) for at in picks]
    assert count_wrong(4_000, batches, weights) == 0


def test_8000_launches_whose_weights_come_from_the_cache_show_no_mismatch():
    """Six passes over each expert, one K block a stage: a stage is written as soon as it is free.

    Stages that warps gave back each for itself, without a fence, were wrong in 91 of 20 500.
    """
    num_experts, hidden, num = 8, 4096, 64
    normal, weights = real_layer(num_experts, hidden, 2048)
    x, batches = normal(num, hidden), []
    for seed in range(6):
        routing = (t.to(CUDA) for t in sample_routing(num, num_experts, 6, seed=seed))
        inputs = x, *routing
        batches.append((inputs, mm.moe(*inputs, weights, backend="hopper", mode="staged")))
    tile = as_fused(tile_of(BASE, Shape(8, 2, 1)))
    assert count_wrong(8_000, batches, weights, tile=tile) == 0

"""What the processes of `test_fused_group_gpu` do. Importing it starts no CUDA."""

import os
import random
import time

import torch
import torch.distributed as dist

import megamoe as mm
from megamoe.errors import MegaMoETimeout
from megamoe.routing.samplers import sample_routing

MOST = 16  # tokens of a rank
CROWD = 200
BOUND_S = 5.0


def build(rank, folder, recipe, most=MOST, mode="fused", **options):
    """(a fused layer of this rank, a crowd of tokens with their routing, its expected result)."""
    os.environ["CUDA_MPS_PIPE_DIRECTORY"] = folder  # before CUDA starts in this process
    from tests.engine.test_hopper_gpu import E, H, K, experts

    device, weights = torch.device("cuda"), experts(recipe)
    gen = torch.Generator().manual_seed(5)
    x = torch.randn(CROWD, H, generator=gen).bfloat16().to(device)
    idx, gates = (t.to(device) for t in sample_routing(CROWD, E, K, seed=5, masked_ratio=0.1))
    wanted = mm.moe(x, idx, gates, weights, backend="hopper", mode="staged")
    num = dist.get_world_size()
    layer = mm.MoE(
        weights.for_rank(rank, num), E, K, group=dist.group.WORLD, mode=mode,
        max_tokens_per_rank=most, **options,
    )  # fmt: skip
    assert layer.mode == "fused" and layer.backend == "hopper", layer.why
    return layer, (x, idx, gates), wanted


def calls(rank, folder, recipe, num, most, mode):
    layer, crowd, wanted = build(rank, folder, recipe, most, mode, timeout_s=60.0)
    rng = random.Random(100 + rank)
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    for step in range(num):
        count = rng.choice((0, 1, rng.randrange(most + 1), most))
        at = torch.tensor(rng.sample(range(CROWD), count), dtype=torch.int64, device="cuda")
        y = layer(*(t[at] for t in crowd))
        wrong += (y.view(torch.int16) != wanted[at].view(torch.int16)).any()
        if step % 50 == 0:
            layer.check()
    layer.check()
    return int(wrong), layer.stats.tolist(), layer.sent.tolist()


def chooses(rank, folder):
    """What `auto` comes to where a call would be several launches, and one call of it."""
    layer, crowd, wanted = build(rank, folder, "w4a8_block", mode="auto", timeout_s=60.0)
    from tests.engine.test_hopper_gpu import E, K

    many = mm.MoE(
        layer.weights, E, K, group=dist.group.WORLD, max_tokens_per_rank=CROWD, timeout_s=60.0
    )
    y = many(*(t[:MOST] for t in crowd))
    error = (y.float() - wanted[:MOST].float()).norm() / wanted[:MOST].float().norm()
    return many.mode, many.backend, many.why, float(error)


def leaves(rank, folder):
    layer, crowd, wanted = build(rank, folder, "w4a8_block", timeout_s=BOUND_S)
    inputs = [t[:MOST] for t in crowd]
    assert torch.equal(layer(*inputs), wanted[:MOST])
    layer.check()
    dist.barrier()
    if rank == 1:
        return "gone"
    start = time.monotonic()
    layer(*inputs)
    try:
        layer.check()
    except MegaMoETimeout as error:
        again = ""
        try:
            layer(*inputs)
        except MegaMoETimeout as second:
            again = str(second)
        return str(error), again, time.monotonic() - start
    return "nothing was raised"

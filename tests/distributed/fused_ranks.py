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
    assert layer.mode != "staged" and layer.backend == "hopper", layer.why
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


def all_sizes(rank, folder, recipe, num, has_graphs):
    """Calls of one layer whose bounds follow a row that all ranks know; tokens differ."""
    layer, crowd, wanted = build(
        rank, folder, recipe, CROWD, "auto", timeout_s=60.0, cuda_graphs=has_graphs
    )
    edge = layer._fused_group.fused.num_tokens
    bounds = (1, 4, edge, edge + 1, 64, CROWD)
    mm.warmup(layer, bounds)
    both, own = random.Random(7), random.Random(100 + rank)
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    for step in range(num):
        bound = both.choice(bounds)
        count = own.choice((0, 1, own.randrange(bound + 1), bound))
        at = torch.tensor(own.sample(range(CROWD), count), dtype=torch.int64, device="cuda")
        inputs = [t[at] for t in crowd]
        torch.cuda.set_sync_debug_mode("error")
        try:
            y = layer(*inputs, max_tokens=bound)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        wrong += (y.view(torch.int16) != wanted[at].view(torch.int16)).any()
        if step % 50 == 0:
            layer.check()
    layer.check()
    return layer.mode, layer.why, int(wrong), layer.stats.tolist(), layer.sent.tolist()


def other_bounds(rank, folder):
    """What each rank raises where ranks pass different bounds."""
    layer, crowd, _ = build(rank, folder, "w8a8", CROWD, "auto", timeout_s=BOUND_S)
    layer(*(t[:1] for t in crowd), max_tokens=(100, CROWD)[rank % 2])
    try:
        layer.check()
    except mm.MegaMoEError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was raised"


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

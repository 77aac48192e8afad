"""What the processes of `test_fused_group_gpu` do. Importing it starts no CUDA."""

import os
import random
import time

import pytest
import torch
import torch.distributed as dist

import megamoe as mm
from megamoe.engine import chain
from megamoe.errors import MegaMoETimeout
from megamoe.routing.samplers import sample_routing
from tests.distributed.ranks import die

MOST = 16  # tokens of a rank
CROWD = 200
BOUND_S = 5.0


def build(rank, folder, recipe, most=MOST, mode="fused", crowd=CROWD, **options):
    """(a fused layer of this rank, a crowd of tokens with their routing, its expected result)."""
    os.environ["CUDA_MPS_PIPE_DIRECTORY"] = folder  # before CUDA starts in this process
    from tests.engine.test_hopper_gpu import E, H, K, experts

    device, weights = torch.device("cuda"), experts(recipe)
    gen = torch.Generator().manual_seed(5)
    x = torch.randn(crowd, H, generator=gen).bfloat16().to(device)
    idx, gates = (t.to(device) for t in sample_routing(crowd, E, K, seed=5, masked_ratio=0.1))
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


def up_to_2048(rank, folder, recipe, num, most=2048):
    """Calls whose bounds all ranks draw alike, as many small ones as large ones."""
    layer, crowd, wanted = build(rank, folder, recipe, most, "auto", 2 * most, timeout_s=60.0)
    both, own = random.Random(11), random.Random(100 + rank)
    bounds = [min(int(most ** both.random()) + 1, most) for _ in range(num)]
    mm.warmup(layer, bounds)
    wrong = torch.zeros((), dtype=torch.int64, device=wanted.device)
    for step, bound in enumerate(bounds):
        count = own.choice((0, 1, own.randrange(bound + 1), bound))
        at = torch.tensor(own.sample(range(2 * most), count), dtype=torch.int64).to(wanted.device)
        y = layer(*(t[at] for t in crowd), max_tokens=bound)
        wrong += (y.view(torch.int16) != wanted[at].view(torch.int16)).any()
        if step % 50 == 0:
            layer.check()
    layer.check()
    return int(wrong), layer.stats.tolist(), layer.sent.tolist()


def two_layers(rank, folder, num, sleeps=20_000_000):
    """Two layers on two streams, each rank late by times of its own: they keep the host's order."""
    layers, crowds = [], []
    for most in (CROWD, CROWD // 2):  # their memories differ
        layer, crowd, wanted = build(rank, folder, "w4a8_block", most, "auto", timeout_s=60.0)
        mm.warmup(layer, (4, most))
        layers.append((layer, most))
        crowds.append((crowd, wanted))
    both, own = random.Random(13), random.Random(100 + rank)
    streams = [torch.cuda.Stream() for _ in layers]
    wrong = [torch.zeros((), dtype=torch.int64, device="cuda") for _ in layers]
    torch.cuda.synchronize()
    for step in range(num):
        which = both.randrange(2)
        (layer, most), (crowd, wanted) = layers[which], crowds[which]
        bound = both.choice((4, most))
        count = own.choice((0, 1, own.randrange(bound + 1), bound))
        with torch.cuda.stream(streams[which]):
            torch.cuda._sleep(own.randrange(sleeps))
            at = torch.tensor(own.sample(range(CROWD), count), dtype=torch.int64, device="cuda")
            y = layer(*(t[at] for t in crowd), max_tokens=bound)
            wrong[which] += (y.view(torch.int16) != wanted[at].view(torch.int16)).any()
        if step % 50 == 0:
            layer.check()
    torch.cuda.synchronize()  # `check` and `int` wait for this stream alone
    for layer, _ in layers:
        layer.check()
    return [int(one) for one in wrong]


def other_bounds(rank, folder):
    """What each rank raises where ranks pass different bounds."""
    layer, crowd, _ = build(rank, folder, "w8a8", CROWD, "auto", timeout_s=BOUND_S)
    layer(*(t[:1] for t in crowd), max_tokens=(100, CROWD)[rank % 2])
    try:
        layer.check()
    except mm.MegaMoEError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was raised"


def leaves(rank, folder, mode="fused", how="leaves"):
    """Rank 1 makes one call, and no second one: it ends, is killed, or is killed inside it.

    how  "never comes": it makes none
    """
    layer, crowd, wanted = build(rank, folder, "w4a8_block", mode=mode, timeout_s=BOUND_S)
    inputs = [t[:MOST] for t in crowd]
    mm.warmup(layer, [MOST])
    if how != "never comes":
        assert torch.equal(layer(*inputs), wanted[:MOST])
        layer.check()
    dist.barrier()
    if rank == 1:
        _end(layer, inputs, how)
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


def _end(layer, inputs, how):
    if how == "killed in a call":

        def die_later(*given, **options):
            torch.cuda.synchronize()  # tokens are pushed: a launch that is queued may not have run
            die()

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(chain, "_l2", die_later)
            layer(*inputs)
    elif how == "killed":
        die()

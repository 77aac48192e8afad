"""The chain on a Hopper GPU: ranks side by side on one GPU, bit for bit one rank, in every tile.

As in `test_fused_gpu`, expected bits are a choice out of one staged call over a crowd.
"""

import random

import pytest
import torch

import megamoe as mm
from megamoe.engine.launch_options import LaunchOptions
from megamoe.engine.local import LocalRanks
from megamoe.engine.local_chain import LocalChain
from megamoe.planner.overrides import checked
from megamoe.problem import Options
from megamoe.routing.permute import expert_counts
from tests.engine.test_fused_gpu import HOW, Crowd, K, base, same_bits
from tests.engine.test_hopper_gpu import IS_OTHER, E

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(IS_OTHER, reason="needs an sm_90 GPU; this is another"),
]

CUDA = torch.device("cuda")
CALLS = 12
ROWS = 180

# recipe, overrides: every kind of tile that the plan can pick
TILES = {
    "swap_ab": ("w4a8_block", {"block_m": 64}),
    "decoded-per-tile": ("w4a8_block", {}),
    "decoded-per-wave": ("w4a8_block", {"decode_ahead": 16}),
    "w8a8-swap_ab": ("w8a8", {"block_m": 64}),
    "dynamic": ("w8a8", {"schedule": "dynamic"}),
    "static": ("w8a8", {"schedule": "static"}),
    "strided": ("w8a8", {"schedule": "strided"}),
    "bf16": ("bf16", {}),
    "w4a16": ("w4a16", {}),
    "w4a8": ("w4a8", {}),
    "w4a4": ("w4a4", {}),
    "nvfp4": ("nvfp4", {}),
}


def chains(crowd, num_ranks, given):
    overrides = checked({"backend": "hopper", "mode": "chain", **given})
    return LocalChain(
        crowd.weights, num_ranks, crowd.options, LaunchOptions(20.0, False), overrides
    )


def split_of(rng, total, ranks):
    """Tokens of each rank, some of them none."""
    cuts = sorted(rng.randint(0, total) for _ in range(ranks - 1))
    return [b - a for a, b in zip([0, *cuts], [*cuts, total], strict=True)]


@pytest.mark.parametrize("num_ranks", [1, 2, 4, 8])
@pytest.mark.parametrize("tile", TILES)
def test_ranks_side_by_side_have_the_bits_of_one_rank(tile, num_ranks):
    recipe, given = TILES[tile]
    crowd, rng = Crowd(recipe), random.Random(num_ranks)
    most = ROWS * E // K // num_ranks  # so many rows an expert if one rank has all tokens
    ranks = chains(crowd, num_ranks, given)
    stats = torch.zeros(E, dtype=torch.int64, device=CUDA)
    total = torch.zeros_like(stats)
    for call in range(CALLS):
        num = rng.choice((1, 7, most // 2, most))
        inputs, wanted = crowd.pick(num, call)
        counts = split_of(rng, num, num_ranks)
        got = ranks(*(t.split(counts) for t in inputs), stats)
        ranks.check(K)
        assert [len(y) for y in got] == counts
        assert same_bits(torch.cat(got), wanted), (call, counts)
        total += expert_counts(inputs[1].long(), E)
    assert torch.equal(stats, total)


@pytest.mark.parametrize("num_ranks", [2, 4, 8])
def test_ranks_of_which_some_have_quantised_tokens_have_the_bits_of_one(num_ranks):
    """And some have none, in either form."""
    crowd, rng = Crowd("w8a8"), random.Random(num_ranks)
    ranks = chains(crowd, num_ranks, {})
    stats = torch.zeros(E, dtype=torch.int64, device=CUDA)
    for call in range(CALLS):
        inputs, wanted = crowd.pick(300, call)
        counts = split_of(rng, 300, num_ranks)
        x, *routing = (t.split(counts) for t in inputs)
        mixed = [mm.quantize(t, "fp8_1x128") if rng.random() < 0.5 else t for t in x]
        got = ranks(mixed, *routing, stats)
        ranks.check(K)
        assert same_bits(torch.cat(got), wanted), (call, counts)


@pytest.mark.parametrize("recipe", ["w4a8_block", "w8a8"])
def test_a_pool_of_few_rows_takes_them_in_passes(recipe):
    crowd = Crowd(recipe)
    ranks = chains(crowd, 2, {"pool_rows": 512})
    stats = torch.zeros(E, dtype=torch.int64, device=CUDA)
    for call in range(CALLS):
        inputs, wanted = crowd.pick(900, call)
        got = ranks(*(t.split((500, 400)) for t in inputs), stats)
        ranks.check(K)
        assert same_bits(torch.cat(got), wanted), call


@pytest.mark.parametrize("num_ranks", [2, 8])
@pytest.mark.parametrize("tile", ["swap_ab", "decoded-per-tile", "decoded-per-wave", "dynamic"])
def test_fp8_rows_have_the_bits_of_one_rank(tile, num_ranks):
    """Codes from L2's epilogue, scales after it, in a pool of two windows."""
    recipe, given = TILES[tile]
    crowd, rng = Crowd(recipe, combine="fp8"), random.Random(num_ranks)
    ranks = chains(crowd, num_ranks, {"pool_rows": 1024, **given})
    stats = torch.zeros(E, dtype=torch.int64, device=CUDA)
    for call in range(CALLS):
        num = rng.choice((1, 300, 900))
        inputs, wanted = crowd.pick(num, call)
        counts = split_of(rng, num, num_ranks)
        got = ranks(*(t.split(counts) for t in inputs), stats)
        ranks.check(K)
        assert same_bits(torch.cat(got), wanted), (call, counts)


@pytest.mark.parametrize("num_ranks", [2, 8])
@pytest.mark.parametrize(("mode", "recipe", "num", "combine"), [
    ("chain", "w4a8_block", 320, "bf16"), ("chain", "w8a8", 320, "fp8"),
    ("fused", "w4a8_block", 64, "bf16"),
])  # fmt: skip
def test_a_graph_of_all_ranks_replays_with_other_routing(mode, recipe, num, combine, num_ranks):
    """1 000 replays; tokens that a call has not are masked, on some ranks all of them."""
    crowd = Crowd(recipe, combine=combine)
    ranks = LocalRanks(crowd.weights, num_ranks, crowd.options, mode=mode, timeout_s=20)
    each = num // num_ranks
    held, _ = crowd.pick(num, 0)
    parts = [list(t.split(each)) for t in held]
    ranks(*parts)
    ranks.check()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        ys = ranks(*parts)
    batches = []
    for seed in range(8):
        (x, idx, gates), wanted = crowd.pick(num, seed)
        rng = random.Random(seed)
        for rank in range(num_ranks):
            used = rng.choice((0, 1, each))
            idx[rank * each + used : (rank + 1) * each] = -1
            wanted[rank * each + used : (rank + 1) * each] = 0
        batches.append(((x, idx, gates), wanted))
    torch.cuda.synchronize()
    wrong = torch.zeros((), dtype=torch.int64, device=CUDA)
    for step in range(1000):
        inputs, wanted = batches[step * 3 % 8]
        torch.cuda.set_sync_debug_mode("error")
        try:
            for buffer, new in zip(held, inputs, strict=True):
                buffer.copy_(new)
            graph.replay()
            wrong += (torch.cat(ys).view(torch.int16) != wanted.view(torch.int16)).any()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        if step % 50 == 0:
            torch.cuda.synchronize()
    assert int(wrong) == 0
    ranks.check()


@pytest.mark.parametrize("combine", ["bf16", "fp8"])
def test_links_that_are_paced_change_no_bits(combine):
    crowd = base()
    inputs, wanted = crowd.pick(300, 5)
    options = Options(combine=combine)
    got = []
    for links in (None, 20.0):
        ranks = LocalRanks(crowd.weights, 4, options, mode="chain", links_gbs=links, timeout_s=20)
        parts = ranks(*(t.split((100, 0, 150, 50)) for t in inputs))
        ranks.check()
        got.append(torch.cat(parts))
    assert same_bits(*got)
    if combine == "bf16":
        assert same_bits(got[0], wanted)


def test_every_recipe_has_a_tile_here():
    assert {recipe for recipe, _ in TILES.values()} == {n.split()[0] for n in HOW}

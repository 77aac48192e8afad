"""The portable backend over a process group: its own bits of one rank, on a GPU bit for bit."""

import torch
import torch.distributed as dist

import megamoe as mm
from megamoe import reference
from megamoe.engine.warm import run_all
from megamoe.problem import RECIPES
from tests.distributed.ranks import launch
from tests.kernels.support import DEVICE, INTERPRETED, MARKS, error, experts, tokens, tolerance

pytestmark = MARKS
E, I, H, K = 4, 64, 128, 2
# The interpreter is slow: three recipes stand for the ways that operands are held.
SOME = ("bf16", "w4a8_block", "nvfp4") if INTERPRETED else RECIPES
CALLS = [(recipe, {}) for recipe in SOME] + [
    ("w4a8", {"combine": "fp8", "weight_at": "combine"}),
    ("w8a8", {"combine": "fp8", "activation": "gpt_oss", "clamp": 3.0}),
]


def over_two_ranks(rank):
    """Relative errors against the reference, and whether one rank gives the same bits."""
    num_ranks = dist.get_world_size()
    found = []
    for recipe, options in CALLS:
        weights = experts(recipe, E, I, H, bias=options.get("activation") == "gpt_oss")
        shared = experts("bf16", 1, I, H, seed=7) if options else None
        mine = tokens((5, 3)[rank], E, K, H, seed=rank, masked_ratio=0.2)
        layer = mm.MoE(
            weights.for_rank(rank, num_ranks), E, K, group=dist.group.WORLD, backend="portable",
            shared=shared, timeout_s=120.0, **options,
        )  # fmt: skip
        if recipe == "bf16":
            run_all(layer, [3])
            assert not layer.stats.any()
        y = layer(*mine)
        assert int(sum(map(sum, layer.statistics().received))) > 0
        alone = mm.moe(*mine, weights, backend="portable", shared=shared, **options)
        one = mm.MoE(weights, E, K, shared=shared, **options)
        wanted = reference.moe(*mine, weights, one.options, shared)
        none = mine[0][:0], mine[1][:0], mine[2][:0]
        assert layer(*(none if rank == 0 else mine)).shape[0] == (0 if rank == 0 else 3)
        bound = tolerance(recipe, options.get("combine", "bf16"))
        found.append((recipe, error(y, wanted), error(y, alone), torch.equal(y, alone), bound))
    return found


def test_two_ranks_are_as_one():
    for end in launch(2, over_two_ranks, limit_s=400.0):
        assert end.error == "" and end.exitcode == 0, end.error
        for recipe, off, apart, is_equal, bound in end.result:
            assert off < bound and apart < bound, (recipe, off, apart, bound)
            assert is_equal or DEVICE == "cpu", recipe

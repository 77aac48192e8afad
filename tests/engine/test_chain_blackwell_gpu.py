"""The chain on a Blackwell GPU: ranks side by side, bit for bit one rank. Not yet run."""

import pytest
import torch

import megamoe as mm
from megamoe.engine.local import LocalRanks
from megamoe.planner.numerics import BLACKWELL_RECIPES
from tests.kernels.test_blackwell_emulated import tokens, weights_of

IS_OTHER = not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 10
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(IS_OTHER, reason="needs an sm_100 GPU; this is another"),
]

E, HIDDEN, INTERMEDIATE = 8, 1024, 512
GIVEN = {"dealt": {}, "drawn": {"schedule": "dynamic"}}


@pytest.mark.parametrize("num_ranks", [1, 2, 4, 8])
@pytest.mark.parametrize("given", GIVEN)
@pytest.mark.parametrize("recipe", BLACKWELL_RECIPES)
def test_calls_of_ranks_have_the_bits_of_one(recipe, given, num_ranks):
    """From no token of a rank to several tiles of an expert, call after call."""
    w = weights_of(recipe, E, HIDDEN, INTERMEDIATE).to("cuda")
    ranks = LocalRanks(
        w, num_ranks, mode="chain", backend="blackwell", timeout_s=20.0, overrides=GIVEN[given]
    )
    for seed, most in enumerate((1, 8, 64, 512)):
        counts = [(most * (rank + 1) // num_ranks) for rank in range(num_ranks)]
        counts[seed % num_ranks] = most if num_ranks == 1 else 0
        inputs = [t.to("cuda") for t in tokens(sum(counts), E, HIDDEN, seed, masked_ratio=0.1)]
        y = torch.cat(ranks(*(list(t.split(counts)) for t in inputs)))
        ranks.check()
        wanted = mm.moe(*inputs, w, backend="blackwell", mode="staged")
        assert torch.equal(y.view(torch.int16), wanted.view(torch.int16))

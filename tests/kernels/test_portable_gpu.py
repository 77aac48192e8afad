"""What only a GPU can show: graphs, real widths, speed of the helpers."""

import pytest
import torch

import megamoe as mm
from megamoe.problem import RECIPES
from tests.kernels.support import INTERPRETED, error, experts, tokens, tolerance

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(INTERPRETED, reason="the interpreter captures no graphs"),
]


@pytest.mark.parametrize("recipe", RECIPES)
def test_real_widths_agree_with_the_reference(recipe):
    w = experts(recipe, 8, 1536, 4096)
    x, idx, weight = tokens(200, 8, 4, 4096, skew="dirichlet")
    got = mm.moe(x, idx, weight, w, backend="portable", clamp=10.0)
    assert error(got, mm.moe(x, idx, weight, w, backend="reference", clamp=10.0)) <= tolerance(
        recipe
    )


@pytest.mark.parametrize("recipe", RECIPES)
def test_batches_of_1_7_64_and_1000_give_a_token_the_same_bits(recipe):
    w = experts(recipe, 8, 512, 1024)
    x, idx, weight = tokens(1000, 8, 4, 1024)
    whole = mm.moe(x, idx, weight, w, backend="portable")
    assert torch.equal(mm.moe(x, idx, weight, w, backend="portable"), whole)
    for size in (1, 7, 64):
        for first in (0, 500, 1000 - size):
            part = slice(first, first + size)
            alone = mm.moe(x[part], idx[part], weight[part], w, backend="portable")
            assert torch.equal(alone, whole[part])


@pytest.mark.parametrize("recipe", ["w8a8", "w4a16", "nvfp4"])
def test_a_graph_replays_with_changing_token_counts(recipe):
    top = 96
    layer = mm.MoE(experts(recipe, 16, 256, 512), 16, 4, backend="portable")
    x, idx, weight = tokens(top, 16, 4, 512)
    layer(x, idx, weight)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = layer(x, idx, weight)
    for seed in range(350):
        count = int(torch.randint(1, top + 1, (1,), generator=torch.Generator().manual_seed(seed)))
        fresh = tokens(count, 16, 4, 512, seed=seed, masked_ratio=0.1)
        x.fill_(float("nan"))
        idx.fill_(-1)
        weight.fill_(float("nan"))
        for held, new in zip((x, idx, weight), fresh, strict=True):
            held[:count] = new
        graph.replay()
        if seed % 10 == 0:
            wanted = mm.moe(*fresh, layer.weights, backend="portable")
            assert torch.equal(y[:count], wanted)
            assert (y[count:] == 0).all()
    layer.check()

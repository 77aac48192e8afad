"""A model that holds the layer compiles as one graph, and gives the same bits."""

import pytest
import torch

import megamoe as mm
from megamoe.routing.samplers import sample_routing

E, I, H, K = 8, 64, 96, 2
WHERE = [  # device, torch.compile's backend
    pytest.param("cpu", "aot_eager", id="cpu"),
    pytest.param("cpu", "inductor", id="cpu-inductor", marks=pytest.mark.every),
    pytest.param("cuda", "inductor", id="cuda", marks=pytest.mark.gpu),
]


class Block(torch.nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.layer, self.scale = layer, torch.nn.Parameter(torch.ones(H))

    def forward(self, x, idx, weight):
        return x + self.layer(x * self.scale.bfloat16(), idx, weight * 2)


def layer(recipe, device):
    rng = torch.Generator().manual_seed(0)
    w13 = torch.randn(E, 2 * I, H, generator=rng).bfloat16()
    w2 = torch.randn(E, H, I, generator=rng).bfloat16()
    weights = mm.ExpertWeights.quantize(w13, w2, recipe)
    shared = mm.ExpertWeights.quantize(w13[:1], w2[:1], "bf16")
    return mm.MoE(weights, E, K, clamp=2.0, shared=shared).to(device)


@pytest.mark.parametrize(("device", "backend"), WHERE)
@pytest.mark.parametrize("recipe", ["w4a8", "nvfp4"])
def test_a_model_with_the_layer_compiles_whole(recipe, device, backend):
    torch.compiler.reset()
    model = Block(layer(recipe, device)).eval().to(device)
    compiled = torch.compile(model, fullgraph=True, backend=backend)
    with torch.no_grad():
        for seed in range(2):
            x = (
                torch.randn(6, H, generator=torch.Generator().manual_seed(seed))
                .bfloat16()
                .to(device)
            )
            idx, weight = (t.to(device) for t in sample_routing(6, E, K, seed=seed))
            assert torch.equal(compiled(x, idx, weight), model(x, idx, weight))
    assert int(model.layer.stats.sum()) == 4 * 6 * K  # compiled calls are counted too


def test_bad_input_is_refused_inside_a_compiled_model_too():
    torch.compiler.reset()
    model = torch.compile(Block(layer("w4a8", "cpu")).eval(), fullgraph=True, backend="aot_eager")
    x = torch.zeros(3, H, dtype=torch.bfloat16)
    idx, weight = sample_routing(3, E, K)
    idx[1, 1] = E
    with torch.no_grad(), pytest.raises(mm.MegaMoEError, match="token 1, slot 1"):
        model(x, idx, weight)

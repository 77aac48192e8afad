"""Shared experts on a Hopper GPU: in the launches of the others, the bits of their own pass."""

import pytest
import torch

import megamoe as mm
from megamoe.engine import images
from megamoe.engine.status import DeviceStatus
from tests import pretending
from tests.engine.test_fused_gpu import BASE, HOW, Crowd, same_bits
from tests.engine.test_hopper_gpu import IS_OTHER, E, K, assert_agrees, plain, tokens

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(IS_OTHER, reason="needs an sm_90 GPU; this is another"),
]


@pytest.mark.parametrize(("recipe", "num"), [(BASE, 1), ("w4a8", 2)])
def test_shared_experts_are_tiles_of_the_same_launch(recipe, num):
    crowd, o = Crowd(recipe), HOW[recipe][0]
    shared = crowd.weights[1 : 1 + num]
    staged, one, graphs = (
        mm.MoE(
            crowd.weights, E, K, shared=shared, backend="hopper", mode=mode, clamp=o.clamp,
            cuda_graphs=has_graphs,
        )
        for mode, has_graphs in (("staged", False), ("fused", False), ("auto", True))
    )  # fmt: skip
    for seed in range(6):
        inputs, alone = crowd.pick((5, 14)[seed % 2], seed)  # one kernel; the second in two passes
        assert graphs.plan(len(inputs[0])).mode == "fused"
        wanted = staged(*inputs)
        assert same_bits(one(*inputs), wanted) and same_bits(graphs(*inputs), wanted)
        assert not same_bits(wanted, alone)
    for layer in (staged, one, graphs):
        layer.check()
        assert torch.equal(layer.stats, staged.stats)


@pytest.mark.parametrize("num", [40, 700, 5000])
def test_shared_experts_in_the_same_launches_have_the_bits_of_a_pass_of_their_own(num, monkeypatch):
    w, shared, status = (
        plain("w4a8_block"),
        plain("w4a8_block")[3:5],
        DeviceStatus(torch.device("cuda")),
    )
    inputs = tokens(num, masked_ratio=0.1, skew="zipf")

    def staged():
        stats = torch.zeros(E, dtype=torch.int64, device="cuda")
        return pretending.staged(inputs, w, None, shared, status=status, stats=stats), stats

    assert not images.why_apart(w, shared)
    (y, stats), _ = staged(), status.check(K)
    assert_agrees(y[:50], [t[:50] for t in inputs], w, shared=shared)
    monkeypatch.setattr(images, "why_apart", lambda *both: "asked for")
    wanted, counts = staged()
    assert torch.equal(y, wanted) and torch.equal(stats, counts)

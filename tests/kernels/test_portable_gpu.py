"""What only a GPU can show: graphs, real widths, speed of the helpers."""

import pytest
import torch

import megamoe as mm
from megamoe.engine import status
from megamoe.engine.call import Call
from megamoe.engine.planning import Traits, plan_for
from megamoe.engine.portable import PORTABLE
from megamoe.problem import RECIPES, Options
from tests.kernels.support import INTERPRETED, error, experts, tokens, tolerance

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(INTERPRETED, reason="the interpreter captures no graphs"),
]


def run(inputs, w, device_status, count=None, *, overlaps=False):
    """One call of the portable backend, with padding after `count`."""
    x, idx, _ = inputs
    given = ("backend", "portable"), ("overlap_launches", overlaps)
    plan = plan_for(w, Options(), Traits(), num_tokens=len(x), top_k=idx.shape[1], overrides=given)
    return PORTABLE.run(Call(*inputs, w, Options(), None, device_status, None, count), plan)


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


@pytest.mark.parametrize("recipe", ["w8a8", "w4a16", "w4a8_block", "nvfp4"])
def test_a_thousand_replays_of_a_graph_have_the_bits_of_eager_calls(recipe):
    """Tokens, routing and their number change under the graph; what lies behind them is garbage."""
    most, num_experts, top_k, hidden, batches = 96, 16, 4, 512, 20
    w = experts(recipe, num_experts, 256, hidden)
    counts = torch.randint(1, most + 1, (batches,), generator=torch.Generator().manual_seed(0))
    counts[:2] = torch.tensor([most, 1])
    x = torch.full((batches, most, hidden), float("nan"), dtype=torch.bfloat16, device="cuda")
    idx = torch.full((batches, most, top_k), 12345, dtype=torch.int64, device="cuda")
    weight = torch.full((batches, most, top_k), float("inf"), device="cuda")
    wanted = torch.zeros_like(x)
    for batch, count in enumerate(counts.tolist()):
        skew = ("uniform", "zipf", "hot_expert")[batch % 3]
        new = tokens(count, num_experts, top_k, hidden, seed=batch, skew=skew, masked_ratio=0.1)
        x[batch, :count], idx[batch, :count], weight[batch, :count] = new
        wanted[batch, :count] = mm.moe(*new, w, backend="portable")
    device_status = status.DeviceStatus(torch.device("cuda"))
    count = torch.full((1,), most, dtype=torch.int32, device="cuda")
    held = x[0].clone(), idx[0].clone(), weight[0].clone()

    def call():
        return run(held, w, device_status, count)

    call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = call()
    on_device = counts.int().cuda()
    wrong = torch.zeros(1000, dtype=torch.bool, device="cuda")
    for replay in range(1000):
        batch = replay * 7 % batches
        for there, new in zip((*held, count), (x, idx, weight, on_device), strict=True):
            there.copy_(new[batch])
        y.fill_(float("nan"))
        graph.replay()
        wrong[replay] = (y.view(torch.int16) != wanted[batch].view(torch.int16)).any()
    assert not wrong.any(), f"replays {wrong.nonzero().flatten().tolist()[:20]} differ"
    device_status.check(top_k)


@pytest.mark.parametrize("recipe", ["w8a8", "w4a16"])
def test_dependent_launches_change_no_bit(recipe):
    """Each launch is placed while the one before it ends: a wait left out would show here."""
    w = experts(recipe, 16, 256, 512)
    inputs = tokens(96, 16, 4, 512)
    device_status = status.DeviceStatus(torch.device("cuda"))
    wanted = run(inputs, w, device_status)

    def call():
        return run(inputs, w, device_status, overlaps=True)

    assert torch.equal(call(), wanted)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outs = [call() for _ in range(3)]
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    for _ in range(300):
        for y in outs:
            y.fill_(float("nan"))
        graph.replay()
        for y in outs:
            wrong += (y != wanted).any()
    assert int(wrong) == 0

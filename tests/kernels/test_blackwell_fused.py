"""Blackwell's fused launch as it stands, on a CPU: the bits of the staged launches.

All roles of all CTAs run under the proof's scheduler: copies and products complete late, in the
order that PTX promises and no other. A seed gives other interleavings, with a slow role in most.
"""

import pytest
import torch

from megamoe.engine import backends, fused, symm_buffer
from megamoe.engine.local import LocalRanks
from megamoe.engine.planning import Ranks, plan_for, traits_of
from megamoe.engine.status import DeviceStatus
from megamoe.errors import MegaMoEError, MegaMoETimeout
from megamoe.kernels.gluon.mega import sync
from megamoe.kernels.gluon.mega.arguments import World
from megamoe.planner.blackwell import num_rows, shipped
from megamoe.planner.blackwell_fused import as_fused
from megamoe.planner.numerics import BLACKWELL_RECIPES
from megamoe.planner.overrides import checked
from megamoe.problem import Options
from megamoe.routing.permute import expert_counts
from tests.emulator import blackwell
from tests.kernels.blackwell import tile_name
from tests.kernels.support import INTERPRETED
from tests.kernels.test_blackwell_emulated import K, assert_agrees, loads, tokens, weights_of

pytestmark = pytest.mark.skipif(INTERPRETED, reason="Triton's interpreter knows no Gluon")

CPU = torch.device("cpu")
NATIVE = ("w4a8", "w4a4", "nvfp4")


def fused_tiles(recipe):
    """Shipped tiles that a fused launch takes."""
    return [tile for tile in shipped(recipe) if as_fused(recipe, tile)[0] is not None]


TILED = [
    pytest.param(recipe, tile, id=f"{recipe}-{tile_name(tile)}")
    for recipe in BLACKWELL_RECIPES
    for tile in fused_tiles(recipe)
]


@pytest.fixture
def both(monkeypatch):
    """The fused kernel under a scheduler; staged launches run too."""

    def install(num_sms=3):
        blackwell.install(monkeypatch, num_sms)
        monkeypatch.setattr(backends, "resolve", lambda *wanted: None)
        return blackwell.install_fused(monkeypatch, num_sms)

    return install


@pytest.mark.parametrize(("recipe", "tile"), TILED)
def test_every_tile_takes_experts_with_no_one_almost_a_tile_a_tile_and_more_rows(
    recipe, tile, both
):
    kernel, m = both(), tile.block_m
    w, inputs = weights_of(recipe, 5), loads(0, 1, m - 1, m, m + 1)
    kernel.seed = m
    y = blackwell.fused_layer(inputs, w, block_m=m)
    assert len(kernel.launches) == 1
    assert_agrees(y, inputs, w)
    assert torch.equal(y, blackwell.layer(inputs, w, block_m=m))


@pytest.mark.parametrize("recipe", BLACKWELL_RECIPES)
def test_masks_repeats_biases_counts_and_the_other_activation(recipe, both):
    kernel = both()
    w, options = weights_of(recipe, has_bias=True), Options("gpt_oss", 7.0, "combine", "fp8")
    x, idx, gates = tokens(17, masked_ratio=0.3, skew="zipf")
    idx[3], idx[5] = idx[3, 0], -1  # an expert twice, a token without any
    x[13:], idx[14:] = float("nan"), 77  # padding, whatever it holds
    inputs, count = (x, idx, gates), torch.tensor([13], dtype=torch.int32)
    stats = torch.zeros(4, dtype=torch.int64)
    kernel.seed = 5
    y = blackwell.fused_layer(inputs, w, options, stats, count=count)[:13]
    real = x[:13], idx[:13], gates[:13]
    assert torch.equal(y, blackwell.layer(real, w, options)) and not y[5].any()
    assert torch.equal(stats, expert_counts(idx[:13], 4))


@pytest.mark.parametrize("recipe", ["w4a8", "nvfp4"])
def test_no_interleaving_and_no_slow_role_changes_a_bit(recipe, both):
    """Ring of stages and sums go round: two stages, several tiles a CTA."""
    kernel = both(2)
    w, inputs = weights_of(recipe, 3), loads(9, 17, 3)
    found = []
    for seed in range(5):  # three policies of a slow role among them
        kernel.seed = seed
        found.append(blackwell.fused_layer(inputs, w, block_m=8, num_stages=2))
    assert all(torch.equal(found[0], y) for y in found)
    assert_agrees(found[0], inputs, w)


@pytest.mark.parametrize(
    ("recipe", "widths"),
    [("w4a8", (480, 352)), ("nvfp4", (256, 736)), ("w4a8", (2880, 288)),
     pytest.param("nvfp4", (2880, 288), marks=pytest.mark.every),
     pytest.param("w8a8", (2880, 288), marks=pytest.mark.every)],
)  # fmt: skip
def test_widths_that_are_no_blocks_and_gpt_oss_own(recipe, widths, both):
    both()
    w, inputs = weights_of(recipe, 3, *widths), tokens(12, 3, widths[0])
    options = Options(clamp=1.0, weight_at="combine")
    y = blackwell.fused_layer(inputs, w, options)
    assert torch.equal(y, blackwell.layer(inputs, w, options))


def test_counters_serve_call_after_call_and_a_bad_slot_is_masked(both):
    both()
    w, status = weights_of("w4a4"), DeviceStatus(CPU)
    for seed in range(3):
        inputs = tokens(3 + seed, seed=seed, skew="zipf")
        y = blackwell.fused_layer(inputs, w, status=status)
        assert not status.counters.any()
        assert torch.equal(y, blackwell.layer(inputs, w))
    x, idx, gates = tokens(5)
    idx[2, 1] = 4
    with pytest.raises(MegaMoEError, match="token 2, slot 1"):
        blackwell.fused_layer((x, idx, gates), w, status=status)


# -- the pool as a ring ----------------------------------------------------------------------------

LEFT = pytest.mark.every


@pytest.mark.parametrize(
    ("recipe", "part"),
    [("w4a4", 4), ("nvfp4", 2), ("w4a8_block", 4), pytest.param("w4a8", 4, marks=LEFT),
     pytest.param("nvfp4", 4, marks=LEFT), pytest.param("w4a8_block", 2, marks=LEFT)],
)  # fmt: skip
def test_a_ring_of_some_of_the_rows_has_the_bits_of_all(recipe, part, both):
    kernel = both()
    w, inputs, status = weights_of(recipe, 6), tokens(40, 6, skew="zipf"), DeviceStatus(CPU)
    kernel.seed = part
    rows = num_rows(80, 6, 8) // part
    y = blackwell.fused_layer(inputs, w, status=status, block_m=8, pool_rows=rows)
    assert kernel.launches[0][1]["RING"] and not status.counters.any()
    assert torch.equal(y, blackwell.layer(inputs, w, block_m=8))


# -- several ranks ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("recipe", "counts"),
    [("w4a8", (2, 0, 1, 3)), ("w4a4", (0, 6)), ("nvfp4", (5, 2)), ("w8a8", (3, 1)),
     ("bf16", (3, 1)), ("w4a16", (3, 1)), ("w4a8_block", (1, 3)),
     pytest.param("nvfp4", (2, 0, 1, 3), marks=LEFT),
     pytest.param("w8a8", (2, 0, 1, 3), marks=LEFT)],
)  # fmt: skip
def test_ranks_of_one_launch_have_the_bits_of_one_rank(recipe, counts, both):
    kernel = both(4)
    w, inputs = weights_of(recipe), tokens(sum(counts), masked_ratio=0.2)
    ranks = LocalRanks(w, len(counts), timeout_s=30.0, backend="blackwell", debug_poison=True)
    ranks._top_k = K
    ranks._make_buffers(max(counts))
    kernel.kernel.hold = [buffer.tokens for buffer in ranks._buffers]
    wanted = blackwell.layer(inputs, w)
    for seed in (1, 2):
        kernel.seed = seed
        got = ranks(*(t.split(counts) for t in inputs))
        ranks.check()
        assert torch.equal(torch.cat(got), wanted)
    assert torch.equal(ranks.stats, 2 * expert_counts(inputs[1], 4))


@pytest.mark.parametrize("recipe", [pytest.param(r, marks=() if r == "nvfp4" else LEFT)
                                    for r in (*NATIVE, "w4a8_block")])  # fmt: skip
def test_launches_of_their_own_have_the_bits_of_one_rank(recipe, both):
    """Two ranks as processes would launch, three calls: uneven tokens, none, as many as fit."""
    both(1)
    w, most = weights_of(recipe), 5
    parts = [w[:2], w[2:]]
    plan = plan_for(
        parts[0], Options(), traits_of("blackwell", parts[0], None), num_tokens=most, top_k=K,
        overrides=checked({"backend": "blackwell", "mode": "fused"}),
        ranks=Ranks(2, 4, max_tokens=most),
    )  # fmt: skip
    memory = [torch.zeros(plan.exchange.num_bytes, dtype=torch.uint8) for _ in range(2)]
    buffers = [symm_buffer.symm_buffer_in(m, plan.exchange) for m in memory]
    status = [DeviceStatus(CPU) for _ in range(2)]
    blackwell._MADE["mega"].kernel.hold = memory
    got = {}

    def host(rank, part):
        there = torch.tensor([m.data_ptr() - memory[rank].data_ptr() for m in memory])
        buffer = buffers[rank]
        buffer.put(*part)
        world = World(2, 1, rank, there, buffer.signals, buffer.inbox)
        y = fused.over(
            buffer, most, parts[rank], Options(), world, torch.zeros(2, dtype=torch.int64),
            step=plan.mega, status=status[rank], timeout_s=30.0, is_poisoned=True,
        )  # fmt: skip
        got[rank] = y[: len(part[0])]

    for call, counts in enumerate([(5, 3), (0, 4), (5, 5)]):
        inputs = tokens(sum(counts), seed=call, masked_ratio=0.2)
        each = list(zip(*(t.split(counts) for t in inputs), strict=True))
        blackwell.run_hosts(call, *(lambda r=r, p=p: host(r, p) for r, p in enumerate(each)))
        for rank in range(2):
            status[rank].check(K)
            assert not buffers[rank].counters.any() and int(buffers[rank].signals[31]) == call + 1
        assert torch.equal(torch.cat([got[0], got[1]]), blackwell.layer(inputs, w))


# -- faults ----------------------------------------------------------------------------------------


def call_whose_pool_never_fills(kernel, word="POOL"):
    """A poisoned counter; after a report orders mean nothing. -> inputs, weights and status."""
    w, inputs, status = weights_of("w4a8"), tokens(5), DeviceStatus(CPU)
    status.counters[getattr(sync, word).value] = -1000
    kernel.is_strict = False
    try:
        blackwell.fused_layer(inputs, w, status=status, is_poisoned=True)
    finally:
        kernel.is_strict = True
    return inputs, w, status


@pytest.mark.parametrize(("word", "what"), [("POOL", "the pool of tokens"), ("DONE", "the end of")])
def test_a_wait_that_nobody_ends_is_reported_and_a_reset_helps(word, what, both):
    """Without the pool destinations are garbage: L2 stores no rows there."""
    kernel = both()
    inputs, w, status = call_whose_pool_never_fills(kernel, word)
    with pytest.raises(MegaMoETimeout, match=what):
        status.check(K)
    status.reset()
    y = blackwell.fused_layer(inputs, w, status=status)
    assert torch.equal(y, blackwell.layer(inputs, w))


@pytest.mark.parametrize(
    ("recipe", "num", "match"),
    [("w8a8", 100, "takes up to 16 tokens a tile"), ("w4a8", 300, "up to 64 tokens a tile"),
     ("w4a4", 3000, "4096 slots at most")],
)  # fmt: skip
def test_what_no_fused_launch_takes_is_refused_by_name(recipe, num, match, both):
    both()
    with pytest.raises(MegaMoEError, match=match):
        blackwell.fused_layer(tokens(num), weights_of(recipe))

"""The chain over ranks on Blackwell, emulated: the bits of one staged rank, and what crosses.

Ranks are threads that launch into each other's memory; GEMMs run under the proof's scheduler, so
that copies and products complete late. On the hardware nothing has run.
"""

import pytest
import torch

import megamoe as mm
from megamoe.engine import backends, chain
from megamoe.engine.local import LocalRanks
from megamoe.engine.status import GAVE_UP, NONE
from megamoe.errors import MegaMoETimeout, NotAvailable
from megamoe.planner.numerics import BLACKWELL_RECIPES
from megamoe.problem import Options
from megamoe.routing.permute import expert_counts
from tests.distributed.chain_ranks import ChainRanks, Counted, let_reach
from tests.emulator import blackwell
from tests.kernels.support import INTERPRETED
from tests.kernels.test_blackwell_emulated import tokens, weights_of

pytestmark = pytest.mark.skipif(INTERPRETED, reason="Triton's interpreter knows no Gluon")

E, K = 4, 2


@pytest.fixture(autouse=True)
def kernels(monkeypatch):
    return blackwell.install_chain(monkeypatch)


def ranks_of(kernels, w, num, most, options=None, **rest):
    return ChainRanks(kernels, w, num, most, K, options, backend="blackwell", **rest)


def assert_like_one_rank(ranks, inputs, counts, w, options=None, shared=None):
    """Bits, and what each expert received."""
    before = torch.cat(ranks.stats)
    got = torch.cat(ranks(ranks.split(inputs, counts)))
    assert [int(f.bad_slot) for f in ranks.status] == [NONE] * len(counts)
    assert not any(f.report.any() for f in ranks.status)
    wanted = blackwell.layer(inputs, w, options, shared, mode="staged")
    assert torch.equal(got.view(torch.int16), wanted.view(torch.int16))
    assert torch.equal(torch.cat(ranks.stats) - before, expert_counts(inputs[1], w.num_experts))


@pytest.mark.parametrize("recipe", BLACKWELL_RECIPES)
def test_two_ranks_have_the_bits_of_one(recipe, kernels):
    """Masks, an expert twice, biases; widths that are no blocks."""
    w = weights_of(recipe, has_bias=True)
    x, idx, gates = tokens(11, masked_ratio=0.2)
    idx[3] = idx[3, 0]
    assert_like_one_rank(ranks_of(kernels, w, 2, 8), (x, idx, gates), (8, 3), w)


# recipe, options, overrides, tokens of all ranks: each kind of tile, stores of 128 tokens too
CASES = {
    "w4a8-wide": ("w4a8", {"weight_at": "combine"}, {"block_m": 128}),
    "w4a8-narrow-fp8-rows": ("w4a8", {"combine": "fp8"}, {"block_m": 8}),
    "w4a8_block-drawn": ("w4a8_block", {"combine": "fp8"}, {"schedule": "dynamic"}),
    "w8a8-wide-drawn": ("w8a8", {}, {"block_m": 64, "schedule": "dynamic"}),
    "nvfp4-wide": ("nvfp4", {"activation": "gpt_oss"}, {"block_m": 64}),
    "w4a4-deep": ("w4a4", {}, {"block_m": 32, "block_k": 512}),
    "w4a16-drawn": ("w4a16", {"clamp": 1.0}, {"schedule": "dynamic"}),
    "bf16-wide": ("bf16", {}, {"block_m": 128}),
}
FEW = ("w4a8-wide", "nvfp4-wide", "w8a8-wide-drawn", "w4a16-drawn")


@pytest.mark.parametrize(
    "case", [pytest.param(c, marks=() if c in FEW else pytest.mark.every) for c in CASES]
)
def test_every_kind_of_tile_has_the_bits_of_one_rank(case, kernels):
    """Some experts have a tile and more; each seed delays other roles."""
    recipe, options, given = CASES[case]
    options, w = Options(**options), weights_of(recipe)
    kernels["gemm_tmem_kernel"].seed = len(case)
    inputs = tokens(80, skew="zipf", masked_ratio=0.1)
    ranks = ranks_of(kernels, w, 2, 60, options, **given)
    tile = ranks.plan(0, 60).tile
    assert all(getattr(tile, name) == value for name, value in given.items())
    assert_like_one_rank(ranks, inputs, (60, 20), w, options)


@pytest.mark.parametrize("recipe", ["w4a8", pytest.param("nvfp4", marks=pytest.mark.every)])
def test_call_after_call_of_four_ranks_some_of_them_idle(recipe, kernels):
    """Zero tokens on some ranks, all of them on one, all slots on one expert and on one rank."""
    w = weights_of(recipe, 8)
    ranks = ranks_of(kernels, w, 4, 6)
    for step, counts in enumerate([(5, 0, 1, 3), (0, 0, 0, 6), (2, 2, 6, 0), (0, 0, 0, 0)]):
        x, idx, gates = tokens(sum(counts), 8, seed=step, masked_ratio=0.1)
        if step == 1:
            idx[:] = 5
        if step == 2:
            idx = idx % 2 + 2  # rank 1
        if sum(counts):
            assert_like_one_rank(ranks, (x, idx, gates), counts, w)
        else:
            assert all(len(y) == 0 for y in ranks(ranks.split((x, idx, gates), counts)))
        assert [int(b.state[0]) for b in ranks.buffers] == [step + 1] * 4


@pytest.mark.parametrize("recipe", ["w4a4", "w8a8"])
def test_one_rank_alone_is_a_chain_too(recipe, kernels):
    w, inputs = weights_of(recipe), tokens(9, skew="zipf")
    assert_like_one_rank(ranks_of(kernels, w, 1, 9), inputs, (9,), w)


@pytest.mark.parametrize("recipe", ["w4a8", pytest.param("w8a8", marks=pytest.mark.every)])
def test_a_pool_of_few_rows_takes_them_in_passes_of_whole_tiles(recipe, kernels):
    """Experts lie across windows of the pool; some windows are empty."""
    w, inputs, options = weights_of(recipe), tokens(60, skew="zipf"), Options(combine="fp8")
    ranks = ranks_of(kernels, w, 2, 40, options, pool_rows=75, block_m=32)
    plan = ranks.plan(0, 40)
    rows = [one["rows"].config for one in plan.passes[1:]]
    assert len(rows) == 4 and all(one.first_row % 32 == 0 == one.pool_rows % 32 for one in rows)
    assert_like_one_rank(ranks, inputs, (40, 20), w, options)


def test_quantised_tokens_and_shared_experts(kernels):
    for recipe, name in (("w4a8", "mxfp8"), ("w4a4", "mxfp4"), ("w8a8", "fp8_1x128")):
        w, shared = weights_of(recipe), weights_of(recipe, 1)
        x, idx, gates = tokens(7, masked_ratio=0.2)
        options = Options(combine="fp8")
        ranks = ranks_of(kernels, w, 2, 4, options, shared=shared)
        wanted = blackwell.layer((x, idx, gates), w, options, shared, mode="staged")
        parts = ranks.split((x, idx, gates), (4, 3))
        assert torch.equal(torch.cat(ranks(parts)), wanted)
        ready = [(mm.quantize(part[0], name), *part[1:]) for part in parts]
        assert torch.equal(torch.cat(ranks(ready)), wanted)


def test_quantised_tokens_of_nvfp4_have_factors_of_their_own(kernels):
    w, (x, idx, gates) = weights_of("nvfp4"), tokens(7)
    factors = torch.tensor([0.5, 1.0, 2.0, 0.25, 1.5, 3.0, 0.75])
    ready = mm.quantize(x, "nvfp4", global_scale=factors)
    wanted = blackwell.layer((ready, idx, gates), w, mode="staged")
    ranks, parts = ranks_of(kernels, w, 2, 4), []
    for first, end in ((0, 4), (4, 7)):
        one = mm.quantize(x[first:end], "nvfp4", global_scale=factors[first:end])
        parts.append((one, idx[first:end], gates[first:end]))
    assert torch.equal(torch.cat(ranks(parts)), wanted)


def test_a_bad_slot_is_masked_and_named_by_the_rank_that_has_it(kernels):
    w, (x, idx, gates) = weights_of("w4a8"), tokens(6)
    idx[4, 1] = E
    ranks = ranks_of(kernels, w, 2, 3)
    got = torch.cat(ranks(ranks.split((x, idx, gates), (3, 3))))
    idx[4, 1] = -1
    assert torch.equal(got, blackwell.layer((x, idx, gates), w, mode="staged"))
    ranks.status[0].check(K)
    with pytest.raises(mm.MegaMoEError, match="token 1, slot 1"):
        ranks.status[1].check(K)


# -- what crosses --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("recipe", "record"), [("w4a8", 2048 + 64), ("nvfp4", 1024 + 128 + 4), ("bf16", 4096)]
)
def test_what_crosses_between_ranks_is_what_must(recipe, record, kernels, monkeypatch):
    """A record for each slot, 8 bytes of list, a row home; no peer's routing is ever read."""
    w = weights_of(recipe, hidden=2048, intermediate=128)
    inputs = tokens(24, hidden=2048)
    ranks = ranks_of(kernels, w, 2, 12)
    counted = Counted(ranks, monkeypatch)
    ranks(ranks.split(inputs, (12, 12)))
    home = torch.arange(24) // 12
    slots = int((inputs[1] // 2 != home[:, None]).sum())
    pulled = slots * (record + 8)
    # Rows home are stored by the GEMM, whose memory is the scheduler's: they are not counted here.
    assert slots > 10 and pulled < counted.num_bytes <= 1.07 * pulled
    assert counted.read == {"tokens"}
    assert counted.written == {"begun", "done", "counts_in", "list_in", "weight_in"}


# -- a rank that does not come, or gives up ------------------------------------------------------


def test_a_rank_that_never_comes_ends_the_call_by_name(kernels):
    w, inputs = weights_of("w4a8"), tokens(6)
    ranks = ranks_of(kernels, w, 2, 3, timeout_s=0.3)
    parts = ranks.split(inputs, (3, 3))
    rows = ranks.buffers[0].rows.clone()
    ranks.launch(1, parts[1])
    with pytest.raises(MegaMoETimeout, match="rank 1 waited too long for rank 0 to push"):
        ranks.status[1].check(K)
    assert torch.equal(ranks.buffers[0].rows, rows)


def test_a_rank_whose_own_gemms_gave_up_says_so_to_its_peers(kernels, monkeypatch):
    """Its rows are worthless: nobody may take them for right."""
    w, inputs = weights_of("w4a8"), tokens(6)
    ranks = ranks_of(kernels, w, 2, 3)
    compute = chain._compute

    def given_up(here, *rest):
        compute(here, *rest)
        if here.me.rank == 1:
            here.call.status.bad_slot[:] = GAVE_UP

    monkeypatch.setattr(chain, "_compute", given_up)
    ranks(ranks.split(inputs, (3, 3)))
    for status in ranks.status:
        with pytest.raises(MegaMoETimeout, match="rank 1 gave up and said so"):
            status.check(K)


@pytest.mark.parametrize(("given", "match"), [
    ({"cta_pair": True, "block_m": 16}, "computed by one CTA"),
    ({"schedule": "sorted"}, "order in which their rows are pulled"),
])  # fmt: skip
def test_tiles_that_cannot_follow_are_refused_by_name(given, match, kernels):
    with pytest.raises(NotAvailable, match=match):
        ranks_of(kernels, weights_of("w4a8"), 2, 8, **given)


# -- ranks of one process ------------------------------------------------------------------------


@pytest.mark.parametrize("links_gbs", [None, 100.0])
def test_local_ranks_run_chains_side_by_side(links_gbs, kernels, monkeypatch):
    monkeypatch.setattr(backends, "resolve", lambda *wanted: None)
    kernels = blackwell.install_chain(monkeypatch, num_sms=8)
    w = weights_of("w4a8")
    ranks = LocalRanks(w, 2, timeout_s=30.0, mode="chain", links_gbs=links_gbs, backend="blackwell")
    ranks._chain._make(8, K)
    let_reach(kernels, [m.buffer.tokens for m in ranks._chain._members])
    for step, counts in enumerate([(8, 3), (0, 5)]):
        inputs = tokens(sum(counts), seed=step, masked_ratio=0.2)
        got = ranks(*(t.split(counts) for t in inputs))
        ranks.check()
        assert torch.equal(torch.cat(got), blackwell.layer(inputs, w, mode="staged"))
    assert int(ranks.stats.sum()) > 0

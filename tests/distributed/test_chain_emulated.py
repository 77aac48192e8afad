"""The chain over ranks as its kernels stand, emulated: the bits of one rank, and what crosses.

Ranks are threads that launch into each other's memory. On several GPUs it has not run.
"""

import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import megamoe as mm
from megamoe.engine import backends, chain, local
from megamoe.engine import status as device_status
from megamoe.engine.local import LocalRanks
from megamoe.engine.status import GAVE_UP, NONE
from megamoe.errors import MegaMoETimeout, NotAvailable, RankError
from megamoe.kernels.gluon import exchange
from megamoe.planner import chain as planned
from megamoe.problem import Options
from megamoe.routing.permute import expert_counts
from tests import emulator, pretending
from tests.distributed.chain_ranks import ChainRanks, Counted, let_reach
from tests.emulator import running
from tests.kernels.support import INTERPRETED
from tests.kernels.test_emulated import tokens, weights_of

pytestmark = pytest.mark.skipif(INTERPRETED, reason="Triton's interpreter knows no Gluon")

E, K = 4, 2


@pytest.fixture(autouse=True)
def kernels(monkeypatch):
    return emulator.install(monkeypatch, num_sms=4)


# recipe, options, overrides, biases: every kind of tile that the plan can pick
CASES = {
    "swap_ab": ("w4a8_block", {}, {}, True),
    "swap_ab-fp8-rows": ("w4a8_block", {"combine": "fp8", "weight_at": "combine"}, {}, True),
    "dynamic": ("w8a8", {"weight_at": "combine"}, {"schedule": "dynamic"}, True),
    "static": ("w8a8", {}, {"schedule": "static"}, False),
    "strided": ("w8a8", {"combine": "fp8"}, {"schedule": "strided"}, False),
    "narrow-fp8-rows": ("w8a8", {"combine": "fp8"}, {"block_m": 16}, False),
    "decoded-per-tile": ("w4a8_block", {}, {"kernel": "gemm", "schedule": "strided"}, False),
    "decoded-per-wave": ("w4a8_block", {"combine": "fp8"}, {"decode_ahead": 4}, True),
    "bf16": ("bf16", {"activation": "gpt_oss"}, {}, True),
    "w4a8": ("w4a8", {"combine": "fp8"}, {}, False),
    "nvfp4": ("nvfp4", {}, {}, True),
}


def assert_like_one_rank(ranks, inputs, counts, w, options=None, **rest):
    """Bits, and what each expert received."""
    before = torch.cat(ranks.stats)
    got = torch.cat(ranks(ranks.split(inputs, counts)))
    assert [int(f.bad_slot) for f in ranks.status] == [NONE] * len(counts)
    assert not any(f.report.any() for f in ranks.status)
    assert torch.equal(got, pretending.staged(inputs, w, options, **rest))
    assert torch.equal(torch.cat(ranks.stats) - before, expert_counts(inputs[1], w.num_experts))


@pytest.mark.parametrize("case", CASES)
def test_two_ranks_have_the_bits_of_one(case, kernels):
    recipe, options, given, has_bias = CASES[case]
    w = weights_of(recipe, has_bias=has_bias)
    x, idx, gates = tokens(11, masked_ratio=0.2)
    idx[3] = idx[3, 0]  # the same expert twice
    options = Options(**options)
    ranks = ChainRanks(kernels, w, 2, 8, K, options, **given)
    assert_like_one_rank(ranks, (x, idx, gates), (8, 3), w, options)


@pytest.mark.parametrize("recipe", ["bf16", "nvfp4"])
def test_rows_wider_than_the_registers_of_a_pull_come_in_parts(recipe, kernels, monkeypatch):
    monkeypatch.setattr(planned, "PULL_COLS", 256)
    w = weights_of(recipe, hidden=1024)
    ranks = ChainRanks(kernels, w, 2, 8, K)
    assert planned.words_of(ranks.plan(0, 1).call, "hopper").data == 2 * 256
    assert_like_one_rank(ranks, tokens(11, hidden=1024, masked_ratio=0.2), (8, 3), w)


@pytest.mark.parametrize(
    "case", ["swap_ab", "dynamic", pytest.param("decoded-per-wave", marks=pytest.mark.every)]
)
def test_two_ranks_that_are_split_have_the_bits_of_one(case, monkeypatch):
    """Pull and L1 beside L2, in one window and in a ring of two halves."""
    kernels = emulator.install(monkeypatch, num_sms=20)
    recipe, options, given, has_bias = CASES[case]
    w, options = weights_of(recipe, has_bias=has_bias), Options(**options)
    inputs = tokens(30, masked_ratio=0.2, skew="zipf")
    for rows in (None, 64):
        ranks = ChainRanks(kernels, w, 2, 20, K, options, mode="split", pool_rows=rows, **given)
        plan = ranks.plan(0, 20)
        assert len(plan.passes) == (2 if rows is None else 4)
        sides = [one.partition for one in plan.passes[-1].launches]
        last = ["l2"] * (2 if options.combine == "fp8" else 1)  # scales too
        assert sides == ["" if rows is None else "l1", "l1", "l1", *last]
        assert_like_one_rank(ranks, inputs, (20, 10), w, options)


@pytest.mark.parametrize(("recipe", "rows"), [("w8a8", "fp8"), ("w4a8_block", "bf16")])
def test_call_after_call_of_four_ranks_some_of_them_idle(recipe, rows, kernels):
    """Zero tokens on some ranks, all of them on one, all slots on one expert and on one rank."""
    w, options = weights_of(recipe, 8), Options(combine=rows)
    ranks = ChainRanks(kernels, w, 4, 6, K, options)
    for step, counts in enumerate([(5, 0, 1, 3), (0, 0, 0, 6), (2, 2, 6, 0), (0, 0, 0, 0)]):
        x, idx, gates = tokens(sum(counts), 8, seed=step, masked_ratio=0.1)
        if step == 1:
            idx[:] = 5
        if step == 2:
            idx = idx % 2 + 2  # rank 1
        if sum(counts):
            assert_like_one_rank(ranks, (x, idx, gates), counts, w, options)
        else:
            assert all(len(y) == 0 for y in ranks(ranks.split((x, idx, gates), counts)))
        assert [int(b.state[0]) for b in ranks.buffers] == [step + 1] * 4


def test_one_rank_alone_is_a_chain_too(kernels):
    w = weights_of("w8a8")
    inputs = tokens(9, skew="zipf")
    assert_like_one_rank(ChainRanks(kernels, w, 1, 9, K), inputs, (9,), w)


@pytest.mark.parametrize(
    ("given", "rows"), [({}, "fp8"), ({"schedule": "dynamic"}, "bf16")], ids=["swap_ab", "dynamic"]
)
def test_a_pool_of_few_rows_takes_them_in_passes(given, rows, kernels):
    """Experts lie across windows of the pool; some windows are empty."""
    w, inputs, options = weights_of("w8a8"), tokens(60, skew="zipf"), Options(combine=rows)
    ranks = ChainRanks(kernels, w, 2, 40, K, options, pool_rows=48, **given)
    assert len(ranks.plan(0, 40).passes) == 5
    assert_like_one_rank(ranks, inputs, (40, 20), w, options)


def test_quantised_tokens_and_shared_experts(kernels):
    w, shared = weights_of("w8a8"), weights_of("w8a8", 1)
    x, idx, gates = tokens(7, masked_ratio=0.2)
    options = Options(combine="fp8")
    ranks = ChainRanks(kernels, w, 2, 4, K, options, shared=shared)
    wanted = pretending.staged((x, idx, gates), w, options, shared)
    assert torch.equal(torch.cat(ranks(ranks.split((x, idx, gates), (4, 3)))), wanted)
    ready = [(mm.quantize(part[0], "fp8_1x128"), *part[1:]) for part in
             ranks.split((x, idx, gates), (4, 3))]  # fmt: skip
    ready_alone = mm.quantize(x, "fp8_1x128"), idx, gates
    wanted = pretending.staged(ready_alone, w, options, shared)
    assert torch.equal(torch.cat(ranks(ready)), wanted)


@pytest.mark.parametrize("counts", [(4, 3), (0, 7), (7, 0)])
def test_ranks_with_bf16_and_with_quantised_tokens_in_one_call_have_the_bits_of_one(
    counts, kernels
):
    """Owners read records in the recipe's format, whoever quantised them."""
    w, inputs = weights_of("w8a8"), tokens(7, masked_ratio=0.2)
    ranks = ChainRanks(kernels, w, 2, 7, K)
    plain, (x, *routing) = ranks.split(inputs, counts)
    ready = mm.quantize(x, "fp8_1x128"), *routing
    assert [ranks.plan(r, n, r == 1).call.is_quantized for r, n in enumerate(counts)] == [
        False, True,
    ]  # fmt: skip
    got = torch.cat(ranks([plain, ready]))
    assert torch.equal(got, pretending.staged(inputs, w))
    all_ready = mm.quantize(inputs[0], "fp8_1x128"), *inputs[1:]
    assert torch.equal(got, pretending.staged(all_ready, w))
    assert not any(f.report.any() for f in ranks.status)


def test_a_bad_slot_is_masked_and_named_by_the_rank_that_has_it(kernels):
    w, (x, idx, gates) = weights_of("w8a8"), tokens(6)
    idx[4, 1] = E
    ranks = ChainRanks(kernels, w, 2, 3, K)
    got = torch.cat(ranks(ranks.split((x, idx, gates), (3, 3))))
    idx[4, 1] = -1
    assert torch.equal(got, pretending.staged((x, idx, gates), w))
    ranks.status[0].check(K)
    with pytest.raises(mm.MegaMoEError, match="token 1, slot 1"):
        ranks.status[1].check(K)


# -- what crosses --------------------------------------------------------------------------------


@pytest.mark.parametrize(("rows", "row_bytes"), [("bf16", 4096), ("fp8", 2048 + 16)])
def test_what_crosses_between_ranks_is_what_must(rows, row_bytes, kernels, monkeypatch):
    """A record for each slot, 8 bytes of list, a row home; no peer's routing is ever read."""
    w = weights_of("w8a8", hidden=2048, intermediate=256)
    inputs = tokens(24, hidden=2048)
    ranks = ChainRanks(kernels, w, 2, 12, K, Options(combine=rows))
    counted = Counted(ranks, monkeypatch)
    ranks(ranks.split(inputs, (12, 12)))
    home = torch.arange(24) // 12
    slots = int((inputs[1] // 2 != home[:, None]).sum())
    need = slots * (2048 + 4 * 16 + 8 + row_bytes)
    assert slots > 10 and need < counted.num_bytes <= 1.05 * need
    assert counted.read == {"tokens"}
    assert counted.written == {"begun", "done", "counts_in", "list_in", "weight_in", "rows"}


# -- a rank that does not come -------------------------------------------------------------------


def test_a_rank_that_never_comes_ends_the_call_by_name_and_reaches_who_comes_later(kernels):
    w, inputs = weights_of("w8a8"), tokens(6)
    ranks = ChainRanks(kernels, w, 2, 3, K, timeout_s=0.3)
    parts = ranks.split(inputs, (3, 3))
    rows = ranks.buffers[0].rows.clone()
    ranks.launch(1, parts[1])
    with pytest.raises(MegaMoETimeout, match="rank 1 waited too long for rank 0 to push"):
        ranks.status[1].check(K)
    assert torch.equal(ranks.buffers[0].rows, rows)  # nothing was written to the other's rows
    ranks.timeout_s = 3600.0  # it need not wait: the report is here already
    ranks.launch(0, parts[0])
    with pytest.raises(MegaMoETimeout, match="rank 1 gave up and said so"):
        ranks.status[0].check(K)


def test_calls_follow_the_bound_that_all_ranks_pass_and_name_who_passes_another(kernels):
    """Planned for more or fewer tokens in the same memory; other bounds end in an error by name."""
    w = weights_of("w8a8")
    ranks = ChainRanks(kernels, w, 2, 40, K, timeout_s=3600.0)
    for bound, counts in ((3, (2, 3)), (40, (40, 0)), (9, (0, 9))):
        ranks.bounds = [bound] * 2
        inputs = tokens(sum(counts), seed=bound, masked_ratio=0.1)
        assert_like_one_rank(ranks, inputs, counts, w)
    rows = [b.rows.clone() for b in ranks.buffers]
    ranks.bounds = [3, 40]
    ranks(ranks.split(tokens(6), (3, 3)))
    assert all(torch.equal(b.rows, before) for b, before in zip(ranks.buffers, rows, strict=True))
    for status in ranks.status:
        with pytest.raises(RankError, match="all ranks must pass the same max_tokens"):
            status.check(K)
    values = {3: 40, 40: 3}
    (rank, own), *_ = [
        (r, b) for r, b in enumerate(ranks.bounds) if ranks.status[r].report[3] == 19
    ]
    assert ranks.status[rank].report[4:7].tolist() == [1 - rank, own, values[own]]


def test_a_rank_that_comes_after_others_saw_unlike_bounds_is_told_so_too(kernels):
    """They stopped it before it pushed anything; what they say last must not hide why."""
    ranks = ChainRanks(kernels, weights_of("w8a8", 8), 4, 40, K, timeout_s=3600.0)
    ranks.bounds = [3, 3, 3, 40]
    parts = ranks.split(tokens(8, 8), (2, 2, 2, 2))
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(ranks.launch, (0, 3), (parts[0], parts[3])))
    for late in (2, 1):
        ranks.launch(late, parts[late])
    for status in ranks.status:
        with pytest.raises(RankError, match="all ranks must pass the same max_tokens"):
            status.check(K)


def test_a_peer_that_gives_up_meanwhile_splits_no_launch(kernels, monkeypatch):
    """Lists are complete, then a peer's word comes: rows, tiles and items are still all made."""
    w, inputs = weights_of("w8a8"), tokens(5)
    ranks = ChainRanks(kernels, w, 1, 5, K)
    rows = chain._rows

    def with_a_word_of_a_peer(here, *rest):
        here.me.buffer.state[exchange.STOP.value] = 1
        rows(here, *rest)

    monkeypatch.setattr(chain, "_rows", with_a_word_of_a_peer)
    (y,) = ranks([inputs])
    assert torch.equal(y, pretending.staged(inputs, w))
    with pytest.raises(MegaMoETimeout, match="rank 0 gave up and said so"):
        ranks.status[0].check(K)


def test_a_rank_whose_own_gemms_gave_up_says_so_to_its_peers(kernels, monkeypatch):
    """Its rows are worthless: nobody may take them for right."""
    w, inputs = weights_of("w8a8"), tokens(6)
    ranks = ChainRanks(kernels, w, 2, 3, K)
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


# -- ranks of one process ------------------------------------------------------------------------


@pytest.mark.parametrize(
    "links", [{}, {"links_gbs": 100.0}, {"links_gbs": 100.0, "latency_us": 5e4}],
    ids=["free", "paced", "late"],
)  # fmt: skip
def test_local_ranks_run_chains_side_by_side(links, kernels, monkeypatch):
    monkeypatch.setattr(backends, "resolve", lambda *wanted: None)
    monkeypatch.setattr(local, "MAX_LATENCY_US", 1e5)  # threads here are slow
    kernels = emulator.install(monkeypatch, num_sms=8)
    w = weights_of("w8a8")
    ranks = LocalRanks(w, 2, timeout_s=30.0, mode="chain", **links)
    waits = []
    pulls = running._MODULES["megamoe.kernels.gluon.pull"]
    wait_until, now_ns = pulls["wait_until"], pulls["now_ns"]

    def noted(time_ns):
        waits.append(int(time_ns) - int(now_ns()))
        wait_until(time_ns)

    monkeypatch.setitem(pulls, "wait_until", noted)
    ranks._chain._make(8, K)
    let_reach(kernels, [m.buffer.tokens for m in ranks._chain._members])
    for step, counts in enumerate([(8, 3), (0, 5)]):
        inputs = tokens(sum(counts), seed=step, masked_ratio=0.2)
        got = ranks(*(t.split(counts) for t in inputs))
        ranks.check()
        assert torch.equal(torch.cat(got), pretending.staged(inputs, w))
    assert int(ranks.stats.sum()) > 0
    assert bool(waits) == bool(links) and (max(waits, default=0) > 10**7) == (len(links) == 2)


def test_a_graph_of_local_chains_keeps_the_memory_that_it_was_captured_with(monkeypatch):
    monkeypatch.setattr(backends, "resolve", lambda *wanted: None)
    emulator.install(monkeypatch, num_sms=8)
    busy = [False]
    monkeypatch.setattr(device_status, "is_capturing", lambda device: busy[0])
    w = weights_of("w8a8")
    there = LocalRanks(w, 2, timeout_s=30.0, mode="chain")._chain
    monkeypatch.setattr(chain, "phases", lambda me, call, *_: iter([call.x]))

    def call(num, is_captured=False):
        busy[0] = is_captured
        there(*(t.split((num, 0)) for t in tokens(num)), torch.zeros(E, dtype=torch.int64))
        busy[0] = False
        return weakref.ref(there._members[0].buffer.tokens)

    first = call(4)
    call(4, is_captured=True)
    assert call(8)() is not first() and first() is not None
    with pytest.raises(NotAvailable, match="must find its memory"):
        call(9, is_captured=True)
    there.reset()
    assert first() is None

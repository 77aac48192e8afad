"""LocalRanks around its launch, which is the oracle's here."""

import weakref

import pytest
import torch

import megamoe as mm
from megamoe.engine import status
from megamoe.engine.local import LocalRanks
from megamoe.errors import CapacityError, NotAvailable, RangeError
from megamoe.routing.permute import expert_counts
from tests.engine.pretended import E, at, tokens, wanted


@pytest.mark.parametrize("counts", [(5,), (3, 8), (0, 4, 0, 1), (2, 0, 1, 3, 3, 0, 0, 1), (0, 0)])
def test_local_ranks_are_one_rank_over_all_tokens(gpu, counts):
    ranks = LocalRanks(gpu.weights, len(counts), timeout_s=3)
    inputs = tokens(sum(counts), masked_ratio=0.2)
    got = ranks(*(t.split(counts) for t in inputs))
    assert [len(y) for y in got] == list(counts)
    assert torch.equal(torch.cat(got), wanted(inputs, gpu))
    assert torch.equal(ranks.stats, expert_counts(inputs[1], E))
    for call in gpu.calls:
        num, local, first, peers, *_ = call["world"]
        assert num == local == len(peers) == len(counts) and first == peers[0] == 0
        assert call["num_experts"] == E // len(counts) and call["timeout_s"] == 3
        assert [int(at(call["tokens"].num_valid, p)) for p in peers.tolist()] == list(counts)


def test_what_a_graph_was_captured_with_stays_until_a_reset(gpu, monkeypatch):
    """A larger call, or another top_k, takes other memory; in a capture it is refused."""
    ranks, busy = LocalRanks(gpu.weights, 2), [False]
    monkeypatch.setattr(status, "is_capturing", lambda device: busy[0])

    def call(num, is_captured=False):
        busy[0] = is_captured
        ranks(*(t.split((num, 0)) for t in tokens(num)))
        busy[0] = False
        gpu.calls.clear()
        return weakref.ref(ranks._buffers[0].rows), weakref.ref(ranks._peers)

    eager = call(2)
    captured = call(4)
    assert not any(one() is not None for one in eager)
    call(4, is_captured=True)
    assert call(8)[0]() is not captured[0]() and all(one() is not None for one in captured)
    with pytest.raises(NotAvailable, match="make a call of that size, and this top_k, before"):
        call(9, is_captured=True)
    assert call(9)[0]() is not None and all(one() is not None for one in captured)
    ranks.reset()
    assert not any(one() is not None for one in captured)


def test_a_chain_that_finds_no_memory_is_not_taken_to_have_it(gpu, monkeypatch):
    chain = LocalRanks(gpu.weights, 2, mode="chain")._chain
    chain._make(4, 2)
    zeros = torch.zeros
    monkeypatch.setattr(torch, "zeros", lambda *how, **_: (_ for _ in ()).throw(MemoryError))
    with pytest.raises(MemoryError):
        chain._make(40, 2)
    monkeypatch.setattr(torch, "zeros", zeros)
    before = chain._members
    chain._make(4, 2)
    assert chain._members is before
    chain._make(40, 2)
    assert chain._members is not before


def test_local_ranks_say_whose_slot_is_bad_and_refuse_what_does_not_fit(gpu):
    ranks = LocalRanks(gpu.weights, 2)
    x, idx, weight = (list(t.split((3, 5))) for t in tokens(8))
    idx[1][4, 0] = E + 1
    ranks(x, idx, weight)
    with pytest.raises(RangeError, match="token 4, slot 0 of rank 1"):
        ranks.check()
    ranks.check()
    for bad in ((x[:1], idx, weight), (x, [idx[0].int(), idx[1]], weight)):
        with pytest.raises(mm.MegaMoEError):
            ranks(*bad)
    with pytest.raises(CapacityError, match="rows an expert need the tile"):
        ranks(*(t.split((1200, 1200)) for t in tokens(2400)))
    with pytest.raises(mm.MegaMoEError, match="quantised ones"):
        ranks([mm.quantize(t, "mxfp8") for t in x], idx, weight)
    for bad, kind, text in (
        ({"mode": "staged"}, NotAvailable, "staged ranks are processes"),
        ({"mode": "split"}, NotAvailable, "mode split parts the SMs of a whole GPU"),
        ({"mode": "auto"}, RangeError, "mode must be one of fused, chain"),
        ({"links_gbs": 50.0}, NotAvailable, "between ranks of a chain; got links_gbs=50.0"),
        ({"latency_us": 2.0}, NotAvailable, "between ranks of a chain"),
        ({"links_gbs": 0.0, "mode": "chain"}, RangeError, "links must have a bandwidth"),
        ({"latency_us": -1.0, "mode": "chain"}, RangeError, "a latency of 0 to 1000 us"),
    ):
        with pytest.raises(kind, match=text):
            LocalRanks(gpu.weights, 2, **bad)
    for num in (0, 3, 9):
        with pytest.raises(mm.MegaMoEError):
            LocalRanks(gpu.weights, num)

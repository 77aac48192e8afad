"""However blocks are dealt: each once, every SM forwards, and nothing deadlocks."""

from __future__ import annotations

import pytest
from hypothesis import given

from megamoe.errors import RangeError
from megamoe.studies.deep_gemm.blocks import blocks
from megamoe.studies.deep_gemm.capacity import Part
from megamoe.studies.deep_gemm.deal import DEALS, deal, largest_first, static, ticket

from .support import CASES, SETTINGS, run


def order_of(case, how):
    found = largest_first(case.waves) if how == "largest_first" else case.waves
    return list(blocks(case.grid, found, lag=case.lag))


def cost(block):
    return 1.0 + block.expert % 3 + (block.phase == "l1")


@pytest.mark.parametrize("how", DEALS)
@SETTINGS
@given(CASES)
def test_every_block_is_dealt_once_and_every_sm_walks_forwards(how, case):
    order = order_of(case, how)
    hands = deal(order, case.num_sms, how, cost)
    assert len(hands) == case.num_sms
    assert sorted(b for hand in hands for b in hand) == sorted(order)
    place = {block: i for i, block in enumerate(order)}
    for hand in hands:
        places = [place[block] for block in hand]
        assert places == sorted(places)


@pytest.mark.parametrize("how", DEALS)
@SETTINGS
@given(CASES)
def test_no_deal_deadlocks_with_or_without_a_ring(how, case):
    assert run(deal(order_of(case, how), case.num_sms, how, cost), case)


def test_the_model_sees_a_deadlock():
    # the same blocks backwards: L2 first waits for ever
    from megamoe.studies.deep_gemm.blocks import Grid

    from .support import Case

    case = Case(Grid(4, 1, 1), [4], 1, None, None, 1)
    order = list(blocks(case.grid, case.waves))
    assert run([order], case)
    assert not run([order[::-1]], case)


@SETTINGS
@given(CASES)
def test_equal_costs_make_tickets_block_cyclic(case):
    order = order_of(case, "static")
    assert ticket(order, case.num_sms) == static(order, case.num_sms)


def test_a_free_sm_takes_the_next_ticket():
    costs = {0: 5.0, 1: 1.0, 2: 1.0, 3: 1.0}
    order = list(blocks_of(4))
    hands = ticket(order, 2, lambda b: costs[b.expert])
    assert [[b.expert for b in hand] for hand in hands] == [[0], [1, 2, 3]]


def blocks_of(num):
    from megamoe.studies.deep_gemm.blocks import Block

    return [Block(0, "l1", e, 0, 0) for e in range(num)]


def test_largest_first_sorts_within_a_wave_only():
    waves = ((Part(0, 0, 1), Part(1, 0, 3), Part(2, 0, 1)), (Part(3, 0, 9),))
    assert largest_first(waves) == (
        (Part(1, 0, 3), Part(0, 0, 1), Part(2, 0, 1)),
        (Part(3, 0, 9),),
    )


def test_largest_first_shortens_the_tail():
    # one expert of 8 blocks behind six of 1, each block cost 1 along one SM: the classic case
    blocks_in = blocks_of(7)
    slow = {6: 8.0}
    hands = ticket(blocks_in, 2, lambda b: slow.get(b.expert, 1.0))
    late = max(sum(slow.get(b.expert, 1.0) for b in hand) for hand in hands)
    sorted_in = sorted(blocks_in, key=lambda b: -slow.get(b.expert, 1.0))
    hands = ticket(sorted_in, 2, lambda b: slow.get(b.expert, 1.0))
    early = max(sum(slow.get(b.expert, 1.0) for b in hand) for hand in hands)
    assert (late, early) == (11.0, 8.0)


def test_an_unknown_deal_is_refused():
    with pytest.raises(RangeError, match="static, ticket, largest_first; got 'random'"):
        deal([], 1, "random")

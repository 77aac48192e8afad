"""Dealing: which SM computes which block. Every way keeps each SM walking the order forwards."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Sequence

from megamoe.errors import one_of
from megamoe.studies.deep_gemm.blocks import Block
from megamoe.studies.deep_gemm.capacity import Wave

DEALS = {
    "static": "block-cyclic: block i goes to SM i mod num_sms; no atomics",
    "ticket": "each SM draws the next block when it is free; evens out SM speeds",
    "largest_first": "tickets, with the largest experts of each wave first: a shorter tail",
}

Hands = tuple[tuple[Block, ...], ...]  # the blocks of each SM in the order it runs them


def one_each(block: Block) -> float:
    """The cost of a block when nothing better is known: all alike."""
    return 1.0


def static(order: Iterable[Block], num_sms: int) -> Hands:
    """Block-cyclic: what `Walk` finds for each SM."""
    listed = tuple(order)
    return tuple(listed[sm::num_sms] for sm in range(num_sms))


def ticket(
    order: Iterable[Block], num_sms: int, cost: Callable[[Block], float] = one_each
) -> Hands:
    """Each SM claims the next block as soon as it is free; the lower SM wins a tie.

    Waits between blocks are left out here: `simulate` knows them. With equal costs it is `static`.
    """
    hands: list[list[Block]] = [[] for _ in range(num_sms)]
    free = [(0.0, sm) for sm in range(num_sms)]
    for block in order:
        now, sm = heapq.heappop(free)
        hands[sm].append(block)
        heapq.heappush(free, (now + cost(block), sm))
    return tuple(map(tuple, hands))


def largest_first(waves: Sequence[Wave]) -> tuple[Wave, ...]:
    """The same waves with the largest parts first, ties in expert order.

    Only the order of claims changes: pool places stay those of the expert order (A037), and a
    wave keeps its experts, so ring and dependencies are as safe as before.
    """
    return tuple(tuple(sorted(wave, key=lambda p: (-p.num_m, p.expert))) for wave in waves)


def deal(
    order: Iterable[Block], num_sms: int, how: str, cost: Callable[[Block], float] = one_each
) -> Hands:
    """Deal an order to the SMs. For "largest_first" pass blocks of `largest_first(waves)`."""
    one_of(how, tuple(DEALS), "deal")
    return static(order, num_sms) if how == "static" else ticket(order, num_sms, cost)

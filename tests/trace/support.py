"""Stamps as a fused launch would leave them, made on the CPU: no GPU takes part."""

import heapq
from random import Random

from megamoe.layout import stamps as of
from megamoe.problem import Problem
from megamoe.simulator.sample import sample_counts
from megamoe.trace.stamps import Recording, events_of

NEAR_WRAP = 2**32 - 40_000  # ns: the clock's low word wraps 40 us into the launch


def buffer(num_ctas, events):
    """The stamp buffer, int32 as the GPU leaves it: [CTAs][4][128][4]."""
    found = [
        [[[0] * 4 for _ in range(of.EVENTS)] for _ in range(of.ROLES)] for _ in range(num_ctas)
    ]
    used = {}
    for cta, role, kind, ticket, begin, end in events:
        n = used[cta, role] = used.get((cta, role), -1) + 1
        found[cta][role][n] = [kind, ticket, signed(begin), signed(end)]
    return found


def signed(ns):
    """The low 32 bits as an int32."""
    return (ns + 2**31) % 2**32 - 2**31


def launch(
    problem=None, *, num_ctas=132, block_m=8, num_n_tiles=(16, 16), begin_ns=NEAR_WRAP, seed=0,
    name="made up", **more,
):  # fmt: skip
    """A recording shaped like a measured decode launch: tickets, rings, waits, a tail."""
    problem = problem or Problem(8, 4096, 2048, 32, 6, 1, "w4a8_block")
    counts = sample_counts(problem, seed=seed)
    facts = dict(
        name=name, problem=problem, counts=counts, block_m=block_m, block_n=256, block_k=128,
        num_n_tiles=num_n_tiles, num_ctas=num_ctas, **more,
    )  # fmt: skip
    blank = Recording(**facts, events=())
    events, rng = [], Random(seed)
    per_rank = num_ctas // problem.num_ranks
    for rank in range(problem.num_ranks):
        events += _rank(rank * per_rank, per_rank, len(blank.tiles(rank)), num_n_tiles, rng)
    ends = [end for _, _, kind, _, _, end in events if kind in (of.L1, of.L2)]
    done = max(ends) if ends else 13.0
    for cta in range(num_ctas):
        free = max(
            (e[5] for e in events if e[0] == cta and e[1] == of.MATH and e[2] != of.FILL),
            default=13.0,
        )
        events.append((cta, of.MATH, of.END, 0, free + 0.1, done + 3.4))
        events.append((cta, of.MATH, of.COMBINE, 0, done + 3.5, done + (5.0 if cta < 32 else 3.6)))
    inside = [
        (cta, role, kind, ticket, begin_ns + round(1e3 * a), begin_ns + round(1e3 * b))
        for cta, role, kind, ticket, a, b in events
    ]
    return Recording(**facts, events=events_of(buffer(num_ctas, inside)))


def _rank(first_cta, num_ctas, num_tiles, num_n_tiles, rng):
    """Events of one rank in us; a CTA's loader runs ahead of its math by the ring."""
    events, ready, ctas = [], 12.2, range(first_cta, first_cta + num_ctas)
    for cta in ctas:
        end = 12.0 if cta - first_cta < 32 else 4.8
        events.append((cta, of.PUBLISH, of.ROUTE, 0, rng.uniform(0.0, 0.2), 3.3))
        events.append((cta, of.MATH, of.FILL, 0, 3.4, end))
        events.append((cta, of.LOAD_TOKENS, of.WAIT, -1, 3.6, ready + rng.uniform(0, 0.2)))
    num_first = num_tiles * num_n_tiles[0]
    done = [ready] * num_tiles
    free = [
        (5.2 + rng.uniform(0, 0.1), 12.8, cta) for cta in range(first_cta, first_cta + num_ctas)
    ]
    heapq.heapify(free)
    for ticket in range(num_first + num_tiles * num_n_tiles[1]):
        load, math, cta = heapq.heappop(free)
        is_first = ticket < num_first
        kind = of.L1 if is_first else of.L2
        time = rng.uniform(13, 19) if is_first else rng.uniform(6, 8)
        begin = max(math + 0.3, load + (7.0 if is_first else 4.0))
        if is_first:
            tile = ticket // num_n_tiles[0]
        else:
            tile = (ticket - num_first) // num_n_tiles[1]
            seen = max(load + 0.4, done[tile] + 1.0)
            events.append((cta, of.LOAD_TOKENS, of.WAIT, ticket, load - 0.3, seen))
            begin = max(begin, seen + 0.8)
        loaded, end = load + time, max(begin + 0.4 * time, load + time + 5.0)
        events.append((cta, of.LOAD_WEIGHTS, kind, ticket, load, loaded))
        events.append((cta, of.MATH, kind, ticket, begin, end))
        if is_first:
            done[tile] = max(done[tile], end)
        heapq.heappush(free, (loaded + rng.uniform(0.7, 1.2), end, cta))
    return events

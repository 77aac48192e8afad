"""Three ways to meet: roles of an SM, SMs of a rank, ranks."""

from __future__ import annotations

from megamoe.studies.deep_gemm.protocol.launch import Launch
from megamoe.studies.deep_gemm.protocol.ops import (
    TOP_BIT,
    U32,
    WAITS,
    Op,
    Steps,
    add,
    arrive,
    load,
    set_bits,
    store,
    wait,
)

DISPATCH, EPILOGUE = 0, 1  # grid sync words of pull_tokens and of math: never mixed (A038)
BEFORE_PULL, BEFORE_COMBINE, AFTER_CLEAN = 1, 2, 3  # tags of the barriers between ranks (A040)

# Meetings of an SM's roles, and how many arrive.
ALL_READ, MAY_CLEAN = 0, 1
MEETINGS = {ALL_READ: 4, MAY_CLEAN: 1}


def grid_sync(k: Launch, sm: int, index: int) -> Steps:
    """All SMs of the rank meet (A038).

    SM 0 adds what the others leave to the top bit, so the last arrival, whoever it is, flips it.
    Nothing is ever reset: the next meeting flips it back.
    """
    cell = k.at("grid_sync", index)
    release = "grid_sync_without_release" not in k.bugs
    old = yield add(cell, TOP_BIT - (k.num_sms - 1) if sm == 0 else 1, release=release)
    yield wait(cell, ~old & TOP_BIT, "grid sync", index, mask=TOP_BIT)


def rank_barrier(k: Launch, sm: int, tag: int, index: int, *, before: bool, after: bool) -> Steps:
    """All ranks meet (A039): SM 0 signals every peer and waits; grid syncs make it all SMs.

    Bit 0 of the counter picks one of two signal words, bit 1 the sign: a word counts up to the
    number of ranks, and two barriers later down to zero. A rank that is one barrier ahead touches
    the other word, so nobody misses the value it waits for.
    """
    if before:
        yield from grid_sync(k, sm, index)
    if sm == 0:
        counter = k.at("barrier_counter")
        status = yield load(counter)
        phase = 0 if "barrier_phase_reused" in k.bugs else status & 1
        down = 0 if "barrier_sign_kept" in k.bugs else status >> 1 & 1
        for peer in range(k.num_ranks):
            signal = k.words.at("barrier_signal", peer, phase)
            yield add(signal, U32 if down else 1)
        yield add(counter, 1)
        target = 0 if down else k.num_ranks
        yield wait(k.at("barrier_signal", phase), target, "rank barrier", tag)
    if after:
        yield from grid_sync(k, sm, index)


def arrive_at(k: Launch, sm: int, meeting: int) -> Op:
    """Say to the SM's other roles that this one came; does not wait."""
    return arrive(k.at("sm_sync", sm * len(MEETINGS) + meeting))


def met(k: Launch, sm: int, meeting: int) -> Op:
    """Wait until all roles of the SM that take part came."""
    cell = k.at("sm_sync", sm * len(MEETINGS) + meeting)
    return wait(cell, 1, "SM sync", meeting)


def give_up(k: Launch, sm: int, op: Op, seen: int) -> Steps:
    """A wait ran past its bound: leave a record, raise the abort flag of every rank, end (A087).

    Only the first one writes the record. Nobody traps: each role sees its rank's flag in the wait
    that it is in, or in the next one, and ends.
    """
    _, _, _, expected, what, tag, _, _ = op
    first = yield add(k.at("timeout_record"), 1)
    if first == 0:
        record = (k.rank, sm, WAITS.index(what), tag, expected, seen, 0)
        for i, value in enumerate(record, 1):
            yield store(k.at("timeout_record", i), value)
    for peer in range(k.num_ranks):
        yield set_bits(k.words.at("abort_flag", peer), 1)

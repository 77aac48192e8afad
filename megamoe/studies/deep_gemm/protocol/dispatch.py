"""pull_tokens: count, report, publish, pull the rows of the own experts, clean up (A056-A064)."""

from __future__ import annotations

from collections.abc import Sequence

from megamoe.studies.deep_gemm.peeling import Source
from megamoe.studies.deep_gemm.protocol.launch import Launch, peel
from megamoe.studies.deep_gemm.protocol.ops import U32, U64, Finds, Steps, add, load, store, wait
from megamoe.studies.deep_gemm.protocol.sync import (
    AFTER_CLEAN,
    ALL_READ,
    BEFORE_PULL,
    DISPATCH,
    MAY_CLEAN,
    arrive_at,
    grid_sync,
    met,
    rank_barrier,
)

ONE_SM = 1 << 32  # in the high half of a count: this SM has reported


def pull_tokens(k: Launch, sm: int) -> Steps:
    """Role: everything between the tokens of all ranks and the own pool; then cleaning."""
    picks = yield from count(k, sm)
    tickets = yield from report(k, sm, picks)
    late = "counts_before_sources" in k.bugs
    if not late:
        yield from send_sources(k, picks, tickets)
    yield from publish(k, sm)
    if late:
        yield from send_sources(k, picks, tickets)
    early = "pull_not_awaited" in k.bugs
    if early:
        yield arrive_at(k, sm, ALL_READ)
    rows = yield from pull(k, sm)
    if not early:
        yield arrive_at(k, sm, ALL_READ)
    if "clean_before_barrier_2" not in k.bugs:
        yield met(k, sm, MAY_CLEAN)
    yield from clean(k, sm, rows)
    if "no_barrier_3" not in k.bugs:
        swept = "no_grid_sync_after_clean" not in k.bugs
        yield from rank_barrier(k, sm, AFTER_CLEAN, DISPATCH, before=swept, after=False)


def count(k: Launch, sm: int) -> Finds:
    """The slots of this SM's tokens that have an expert: token * top_k + slot, and the expert."""
    picks = []
    for token in range(sm, k.num_tokens, k.num_sms):
        for slot in range(k.top_k):
            at = token * k.top_k + slot
            expert = yield load(k.at("input_topk_idx", at))
            if "masked_slot_counted" in k.bugs and expert < 0:
                expert = k.shape.num_experts - 1
            if expert >= 0:
                picks += [at, expert]
    return picks


def report(k: Launch, sm: int, picks: Sequence[int]) -> Finds:
    """One atomic per expert adds this SM's rows; its old value is the SM's first place (A041)."""
    counts = [0] * k.shape.num_experts
    seen = set()
    for at, expert in zip(picks[::2], picks[1::2], strict=True):
        pair = (at // k.top_k, expert)
        if "duplicate_counted_once" in k.bugs and pair in seen:
            continue
        seen.add(pair)
        counts[expert] += 1
    tickets = []
    for expert, rows in enumerate(counts):
        old = yield add(k.at("expert_send_count", expert), ONE_SM + rows, U64, release=False)
        tickets.append((old & U32) + ("ticket_off_by_one" in k.bugs and sm > 0))
    return tickets


def send_sources(k: Launch, picks: Sequence[int], tickets: Sequence[int]) -> Steps:
    """Tell each expert's owner which tokens come: one index per row, in its workspace (A046)."""
    places = list(tickets)
    for at, expert in zip(picks[::2], picks[1::2], strict=True):
        owner, local = divmod(expert, k.num_local)
        row = (local * k.num_ranks + k.rank) * k.shape.max_tokens * k.top_k + places[expert]
        places[expert] += 1
        yield store(k.words.at("src_token_topk_idx", owner, row), at)


def publish(k: Launch, sm: int) -> Steps:
    """When all SMs have reported, SM 0 sends every owner the counts; then barrier 1 (A059)."""
    if "no_grid_sync_before_publish" not in k.bugs:
        yield from grid_sync(k, sm, DISPATCH)
    if sm == 0:
        for expert in range(k.shape.num_experts):
            owner, local = divmod(expert, k.num_local)
            status = yield load(k.at("expert_send_count", expert))
            place = k.rank * k.num_local + local
            yield store(k.words.at("expert_recv_count", owner, place), status & U32)
            yield add(k.words.at("expert_recv_count_sum", owner, local), status, U64)
    yield from rank_barrier(k, sm, BEFORE_PULL, DISPATCH, before=False, after=True)


def pull(k: Launch, sm: int) -> Finds:
    """Fetch every num_sms-th row of the pool from its rank, experts in order (A060, A063)."""
    orders: list[tuple[Source, ...]] = []
    for expert in range(k.num_local):
        counts = []
        for rank in range(k.num_ranks):
            counts.append((yield load(k.at("expert_recv_count", rank * k.num_local + expert))))
        if "peel_all_ranks" in k.bugs:
            total = sum(counts)
            orders.append(tuple(Source(i % k.num_ranks, i // k.num_ranks) for i in range(total)))
        else:
            orders.append(peel(tuple(counts)))
    rows = [len(order) for order in orders]
    offsets = k.pool_offsets(rows)
    at = sm
    for expert, order in enumerate(orders):
        while at < len(order):
            yield from pull_row(k, expert, offsets[expert], at, order[at])
            at += k.num_sms
        at -= len(order)
    return rows


def pull_row(k: Launch, expert: int, first_block: int, row: int, source: Source) -> Steps:
    """One row: wait for its place in the ring, copy, note where it came from, count it in."""
    m, lane = divmod(row, k.grid.block_m)
    block = first_block + m
    before = block - k.words.ring_blocks  # the last owner of the ring slot
    if before >= 0 and "ring_reused_early" not in k.bugs:
        done = k.grid.num_l2_n - ("ring_freed_one_early" in k.bugs)
        yield wait(k.at("l2_done_count", before), done, "ring slot", before)
    listed = (expert * k.num_ranks + source.rank) * k.shape.max_tokens * k.top_k + source.place
    at = yield load(k.at("src_token_topk_idx", listed))
    token, slot = divmod(at, k.top_k)
    value = yield load(k.words.at("input_token", source.rank, token))
    weight = yield load(k.words.at("input_topk_weights", source.rank, at))
    wide = k.ring_slot(block) * k.grid.block_m + lane
    yield store(k.at("l1_token", wide), value)
    yield store(k.at("l1_topk_weights", wide), weight)
    metadata = (source.rank, token, slot)
    home = (block * k.grid.block_m + lane) * len(metadata)
    late = "metadata_after_arrival" in k.bugs
    if late:
        yield add(k.at("l1_arrival_count", block), 1)
    for i, field in enumerate(metadata):
        yield store(k.at("token_src_metadata", home + i), field)
    if not late:
        release = "arrival_without_release" not in k.bugs
        yield add(k.at("l1_arrival_count", block), 1, release=release)


def clean(k: Launch, sm: int, rows: Sequence[int]) -> Steps:
    """Zero what this call used, while math combines; add to the statistics (A064, A007).

    SM 0 zeroes the send counts; experts are shared out, each with the pool blocks it had. Nobody
    reads these words any more: every role of every SM had read its counts before barrier 2.
    """
    if sm == 0:
        for expert in range(k.shape.num_experts):
            yield store(k.at("expert_send_count", expert), 0)
    offsets = k.pool_offsets(rows)
    per_block = k.words.mask_words
    for expert in range(sm, k.num_local, k.num_sms):
        for rank in range(k.num_ranks):
            yield store(k.at("expert_recv_count", rank * k.num_local + expert), 0)
        yield store(k.at("expert_recv_count_sum", expert), 0)
        for block in range(offsets[expert], offsets[expert + 1]):
            yield store(k.at("l1_arrival_count", block), 0)
            for word in range(block * per_block, (block + 1) * per_block):
                yield store(k.at("l2_arrival_mask", word), 0)
            if "clean_skips_done_count" not in k.bugs:
                yield store(k.at("l2_done_count", block), 0)
        if "stats_overwritten" in k.bugs:
            yield store(k.at("recv_stats", expert), rows[expert])
        else:
            yield add(k.at("recv_stats", expert), rows[expert], release=False)

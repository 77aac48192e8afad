"""load_tokens, load_weights and math: the roles that walk the blocks of an SM (A034, A065-A078)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from megamoe.studies.deep_gemm.blocks import L1, Block, arrival_masks, valid_m
from megamoe.studies.deep_gemm.protocol.launch import Launch
from megamoe.studies.deep_gemm.protocol.ops import (
    HIGH,
    U32,
    U64,
    Finds,
    Op,
    Steps,
    add,
    arrive,
    load,
    set_bits,
    store,
    wait,
)
from megamoe.studies.deep_gemm.protocol.sync import (
    ALL_READ,
    BEFORE_COMBINE,
    EPILOGUE,
    MAY_CLEAN,
    arrive_at,
    met,
    rank_barrier,
)


def read_counts(k: Launch) -> Finds:
    """Rows of each local expert, once all SMs of all ranks have been counted in (A035)."""
    rows = []
    for expert in range(k.num_local):
        cell = k.at("expert_recv_count_sum", expert)
        reports = k.num_sms * (1 if "counts_of_one_rank" in k.bugs else k.num_ranks)
        found = yield wait(cell, reports << 32, "counts", expert, mask=HIGH)
        rows.append(found & U32)
    return rows


class Stages:
    """One role's place in the SM's ring of stages: which stage, and its phase (A067)."""

    def __init__(self, k: Launch, sm: int) -> None:
        self.k, self.first, self.i, self.phase = k, sm * k.shape.num_stages, 0, 0

    def cell(self, name: str) -> int:
        return self.k.at(name, self.first + self.i)

    def empty(self) -> Op:
        """A producer waits for the phase before its own: the ring starts empty."""
        return wait(self.cell("stage_empty"), self.phase, "stage empty", self.i, mask=1)

    def full(self) -> Op:
        polls = "abort_not_polled" not in self.k.bugs
        return wait(
            self.cell("stage_full"), self.phase ^ 1, "stage full", self.i, mask=1, polls=polls
        )

    def step(self) -> None:
        self.i += 1
        if self.i == self.k.shape.num_stages:
            self.i, self.phase = 0, self.phase ^ 1


def load_tokens(k: Launch, sm: int) -> Steps:
    """Role: bring the rows of each block into a stage, as soon as they are there."""
    if "loaders_not_awaited" in k.bugs:
        yield arrive_at(k, sm, ALL_READ)
    rows = yield from read_counts(k)
    offsets = k.pool_offsets(rows)
    stages = Stages(k, sm)
    for block in k.blocks(sm, rows):
        pool = offsets[block.expert] + block.m
        if block.phase == L1:
            operand = yield from _rows(
                k, pool, valid_m(rows[block.expert], block.m, k.grid.block_m)
            )
        else:
            operand = yield from _acts(k, pool)
        if "stage_not_awaited" not in k.bugs:
            yield stages.empty()
        yield store(stages.cell("stage_tokens"), operand)
        yield arrive(stages.cell("stage_full"))
        stages.step()
    if "loaders_not_awaited" not in k.bugs:
        yield arrive_at(k, sm, ALL_READ)


def _rows(k: Launch, pool: int, valid: int) -> Any:
    expected = k.grid.block_m if "arrival_of_whole_block" in k.bugs else valid
    if "no_l1_wait" not in k.bugs:
        yield wait(k.at("l1_arrival_count", pool), expected, "row arrival", pool)
    first = k.ring_slot(pool) * k.grid.block_m
    found = []
    for row in range(first, first + valid):
        found.append((yield load(k.at("l1_token", row))))
    return found


def _acts(k: Launch, pool: int) -> Any:
    num_n = k.grid.num_l1_n
    for word, mask in enumerate(arrival_masks(num_n)):
        expected = mask
        if "mask_one_bit_short" in k.bugs:
            expected = mask >> 1
        if "mask_single_shift" in k.bugs:
            expected = (1 << num_n % 64) - 1  # what a 64-bit shift by 64 gives
        bits = U64 if expected == mask else expected
        yield wait(
            k.at("l2_arrival_mask", pool * k.words.mask_words + word),
            expected,
            "mask",
            pool,
            mask=bits,
            acquire="mask_without_acquire" not in k.bugs,
        )
    first = k.ring_slot(pool) * num_n
    found = []
    for n in range(first, first + num_n):
        found.append((yield load(k.at("l2_token", n))))
    return found


def load_weights(k: Launch, sm: int) -> Steps:
    """Role: bring the weights of each block into a stage. Never waits for tokens (A065)."""
    if "loaders_not_awaited" in k.bugs:
        yield arrive_at(k, sm, ALL_READ)
    rows = yield from read_counts(k)
    stages = Stages(k, sm)
    for block in k.blocks(sm, rows):
        yield stages.empty()
        yield store(stages.cell("stage_weights"), k.payload.tile(k.call, k.rank, block))
        yield arrive(stages.cell("stage_full"))
        stages.step()
    if "loaders_not_awaited" not in k.bugs:
        yield arrive_at(k, sm, ALL_READ)


def math(k: Launch, sm: int) -> Steps:
    """Role: both products and their epilogues, then the combine of this SM's tokens."""
    rows = yield from read_counts(k)
    offsets = k.pool_offsets(rows)
    stages = Stages(k, sm)
    for block in k.blocks(sm, rows):
        yield stages.full()
        operand = yield load(stages.cell("stage_tokens"))
        tile = yield load(stages.cell("stage_weights"))
        yield arrive(stages.cell("stage_empty"))
        stages.step()
        pool = offsets[block.expert] + block.m
        if block.phase == L1:
            yield from store_l1(k, block, pool, operand, tile)
        else:
            valid = valid_m(rows[block.expert], block.m, k.grid.block_m)
            yield from store_l2(k, block, pool, valid, operand, tile)
    yield arrive_at(k, sm, ALL_READ)
    yield met(k, sm, ALL_READ)
    if "combine_before_barrier_2" not in k.bugs:
        yield from rank_barrier(k, sm, BEFORE_COMBINE, EPILOGUE, before=True, after=True)
    yield arrive_at(k, sm, MAY_CLEAN)
    yield from combine(k, sm)


def store_l1(k: Launch, block: Block, pool: int, rows: Sequence[Any], tile: Any) -> Steps:
    """Activation, requantisation, the tile into the L2 pool, then its bit (A073-A075)."""
    slot = k.ring_slot(pool)
    weights = []
    for lane in range(len(rows)):
        weights.append((yield load(k.at("l1_topk_weights", slot * k.grid.block_m + lane))))
    acts = k.payload.l1(k.call, k.rank, block, rows, weights, tile)
    word, bit = divmod(block.n + ("mask_wrong_bit" in k.bugs), 64)
    cell = k.at("l2_arrival_mask", pool * k.words.mask_words + word)
    early = "mask_before_store" in k.bugs
    if early:
        yield set_bits(cell, 1 << bit)
    yield store(k.at("l2_token", slot * k.grid.num_l1_n + block.n), acts)
    if not early:
        yield set_bits(cell, 1 << bit, release="mask_without_release" not in k.bugs)


def store_l2(
    k: Launch, block: Block, pool: int, valid: int, acts: Sequence[Any], tile: Any
) -> Steps:
    """Each row's piece into its slot on the rank it came from, then the block counts (A076)."""
    pieces = k.payload.l2(k.call, k.rank, block, acts, tile)
    for lane in range(valid):
        home = (pool * k.grid.block_m + lane) * 3
        rank = yield load(k.at("token_src_metadata", home))
        token = yield load(k.at("token_src_metadata", home + 1))
        slot = yield load(k.at("token_src_metadata", home + 2))
        row = combine_row(k, token, 0 if "wrong_combine_slot" in k.bugs else slot)
        yield store(
            k.words.at("combine_token", rank, row * k.grid.num_l2_n + block.n), pieces[lane]
        )
    yield add(k.at("l2_done_count", pool), 1)


def combine_row(k: Launch, token: int, slot: int) -> int:
    """The combine buffer is slot-major (A053)."""
    return slot * k.shape.max_tokens + token


def combine(k: Launch, sm: int) -> Steps:
    """Add the rows of this SM's tokens, slots in ascending order (A018, A078)."""
    num_n = k.grid.num_l2_n
    for token in range(sm, k.num_tokens, k.num_sms):
        rows = []
        for slot in range(k.top_k):
            expert = yield load(k.at("input_topk_idx", token * k.top_k + slot))
            if expert >= 0:
                first = combine_row(k, token, slot) * num_n
                pieces = []
                for n in range(first, first + num_n):
                    pieces.append((yield load(k.at("combine_token", n))))
                rows.append((slot, pieces))
        k.payload.combine(k.call, k.rank, token, rows)

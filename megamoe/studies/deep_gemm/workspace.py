"""The workspace of a rank: the protocol's words, then ten segments of data. Same on every rank.

Control words are zero before the first call; those marked `is_cleaned` are zero again after every
call, because the call cleans what it used (A064). Data needs no cleaning.
"""

from __future__ import annotations

from megamoe.errors import one_of
from megamoe.formats.spec import BF16, FP8_COMBINE, recipe_named
from megamoe.layout.regions import Segment, Workspace, ceil_div, chain
from megamoe.layout.rows import row_bytes, scale_words
from megamoe.problem import Problem
from megamoe.studies.deep_gemm.capacity import Capacity

NUM_GRID_SYNCS = 4  # A038: 0 dispatch, 1 epilogue, two spare
NUM_SIGNALS = 2  # A039: the barrier's phase picks one
METADATA_FIELDS = ("rank", "token", "slot")  # A047: where a pool row came from
# What a wait that ran past its bound leaves behind before it raises the abort flag (A087).
TIMEOUT_FIELDS = ("is_set", "rank", "sm", "wait", "tag", "expected", "seen", "waited_ns")


def mask_words(num_l1_blocks: int) -> int:
    """64-bit words of the arrival mask of one pool block: one bit per L1 block of its row (A045).

    The published kernel has one word and so at most 64 blocks (A009: intermediate <= 4096); here
    a second word lifts that limit, for narrow weight tiles too.
    """
    return max(1, ceil_div(num_l1_blocks, 64))


def control_segments(problem: Problem, capacity: Capacity, min_block_n: int) -> tuple[Segment, ...]:
    """The words that SMs and ranks agree through (A038-A047), and ours: tickets, ring, abort."""
    ranks, experts, local = problem.num_ranks, problem.num_experts, problem.num_local_experts
    blocks, slots = capacity.pool_blocks, capacity.max_tokens * problem.top_k
    words = mask_words(ceil_div(2 * problem.intermediate, min_block_n))
    num_metadata, num_timeout = len(METADATA_FIELDS), len(TIMEOUT_FIELDS)
    # fmt: off
    rows = (
        ("grid_sync", "u32", (NUM_GRID_SYNCS,), False, "arrivals; the top bit flips when all SMs came"),
        ("barrier_counter", "u32", (1,), False, "low two bits are the phase and the sign"),
        ("barrier_signal", "i32", (NUM_SIGNALS,), False, "peers add +1 or -1"),
        ("abort_flag", "u32", (1,), False, "polled in every wait; once set, every role drains"),
        ("timeout_record", "u64", (num_timeout,), False, "the first wait that ran past its bound"),
        ("ticket", "u32", (2,), True, "next block of L1 and of L2, when dealt dynamically"),
        ("expert_send_count", "u64", (experts,), True, "high half SMs that reported, low half rows"),
        ("expert_recv_count", "u64", (ranks, local), True, "rows from each source rank"),
        ("expert_recv_count_sum", "u64", (local,), True, "high half SMs x ranks, low half rows"),
        ("l1_arrival_count", "u32", (blocks,), True, "rows pulled; ready at valid_m"),
        ("l2_arrival_mask", "u64", (blocks, words), True, "one bit per finished L1 block"),
        ("l2_done_count", "u32", (blocks,), True, "finished L2 blocks; at all of them the ring slot is free"),
        ("src_token_topk_idx", "u32", (local, ranks, slots), False, "token * top_k + slot, written by the sender"),
        ("token_src_metadata", "u32", (capacity.pool_rows, num_metadata), False, "rank, token, slot of a pool row"),
    )
    # fmt: on
    return tuple(
        Segment(name, dtype, shape, "control", about, is_cleaned)
        for name, dtype, shape, is_cleaned, about in rows
    )


def data_segments(problem: Problem, capacity: Capacity, combine: str) -> tuple[Segment, ...]:
    """The ten data segments (A050-A053) in the recipe's widths, and the scales of an FP8 combine.

    Inputs keep scales beside their token (K-major); the pools keep them word by word (M-major:
    [words, rows]), as the loaders read them. A format without scales has empty scale segments.
    """
    one_of(combine, ("bf16", "fp8"), "combine")
    acts = recipe_named(problem.recipe).acts
    out = BF16 if combine == "bf16" else FP8_COMBINE
    tokens, top_k, hidden = capacity.max_tokens, problem.top_k, problem.hidden
    inter, ring, scales = problem.intermediate, capacity.ring_rows, capacity.scale_rows
    # fmt: off
    rows = (
        ("input_token", "u8", (tokens, row_bytes(hidden, acts)), "x as the recipe stores it"),
        ("input_scale", "u32", (tokens, scale_words(hidden, acts)), "its scales, K-major"),
        ("input_topk_idx", "i64", (tokens, top_k), "expert of each slot, -1 is masked"),
        ("input_topk_weights", "f32", (tokens, top_k), "weight of each slot"),
        ("l1_token", "u8", (ring, row_bytes(hidden, acts)), "rows pulled from their ranks"),
        ("l1_scale", "u32", (scale_words(hidden, acts), scales), "their scales, M-major"),
        ("l1_topk_weights", "f32", (ring,), "their weights"),
        ("l2_token", "u8", (ring, row_bytes(inter, acts)), "the activation's output"),
        ("l2_scale", "u32", (scale_words(inter, acts), scales), "its scales, M-major"),
        ("combine_token", "u8", (top_k, tokens, row_bytes(hidden, out)), "written by peers, slot-major"),
        ("combine_scale", "u8", (top_k, tokens, ceil_div(hidden, out.block[1]) if combine == "fp8" else 0), "one E8M0 per 128 columns"),
    )
    # fmt: on
    return tuple(Segment(name, dtype, shape, "data", about) for name, dtype, shape, about in rows)


def workspace(
    problem: Problem, capacity: Capacity, *, combine: str = "bf16", min_block_n: int = 64
) -> Workspace:
    """Every region of one rank's allocation.

    It depends on the layer (ranks, experts, widths, recipe, `capacity`), never on a batch, so it
    is laid out once. `min_block_n` is the narrowest weight tile a plan may choose.
    """
    control = control_segments(problem, capacity, min_block_n)
    return chain((*control, *data_segments(problem, capacity, combine)))


def ring_bytes(problem: Problem, ring_rows: int, scale_rows: int) -> int:
    """Bytes of the segments that grow with the ring: both pools, their scales, the weights."""
    acts = recipe_named(problem.recipe).acts
    values = row_bytes(problem.hidden, acts) + row_bytes(problem.intermediate, acts)
    words = scale_words(problem.hidden, acts) + scale_words(problem.intermediate, acts)
    return (values + 4) * ring_rows + 4 * words * scale_rows

"""Launches for tests of single kernels, made by the planner's own functions."""

from megamoe.layout.regions import ceil_div
from megamoe.planner import hopper, portable
from megamoe.planner.launches import Launch, Pass
from megamoe.routing.spec import max_tiles


def sort_steps(num_slots, num_experts, block_m):
    """Portable: count, scan and place."""
    launches = portable.sort(num_slots, num_experts, block_m) if num_slots else ()
    return Pass("routed", num_slots, num_experts, tuple(launches))


def gemm_step(tile, num_slots, num_experts, width, *, is_ordered=False, kernel="l1"):
    """Portable: one linear."""
    cols = ceil_div(width, 128) * 128 if is_ordered else width
    tiles = max(max_tiles(num_slots, num_experts, tile.block_m), 1)
    return Launch(kernel, kernel, (tiles * ceil_div(cols, tile.block_n),), tile, "test")


def rows_step(num_rows, width, acts):
    """Rows quantised into `acts`."""
    return portable.quantize_rows("quantize", num_rows, width, acts.name)


def combine_step(num_tokens, hidden):
    return portable.combine(num_tokens, hidden)


def hopper_steps(x, idx, tile, num_experts, *, num_shared=0, num_sms=132, intermediate=64):
    """Hopper: permute and both GEMMs of these tokens."""
    sizes = hopper.Sizes(
        len(x), idx.shape[1] + num_shared, num_experts, num_shared, x.shape[1], intermediate
    )
    return hopper.staged_pass(sizes, tile, num_sms, "test", "routed")

"""Launches for tests of single kernels, made by the planner's own functions."""

import torch

from megamoe.engine.planning import hardware_of
from megamoe.kernels.portable import dispatch, graph_io, grouped, launch
from megamoe.kernels.portable.acts import CODES
from megamoe.layout.regions import ceil_div
from megamoe.planner import copies, hopper, portable
from megamoe.planner.launches import Launch, Pass
from megamoe.planner.numerics import numerics
from megamoe.routing.spec import max_tiles


def arithmetic(recipe, arch="sm_90a"):
    """Portable: the arithmetic of plans for an architecture."""
    return launch.arithmetic_of(recipe, numerics("portable", recipe, arch=arch))


def sort_steps(num_slots, num_experts, block_m):
    """Portable: count, scan and place."""
    launches = portable.sort(num_slots, num_experts, block_m) if num_slots else ()
    return Pass("routed", num_slots, num_experts, tuple(launches))


def gemm_step(tile, num_slots, num_experts, width, *, is_ordered=False, kernel="l1"):
    """Portable: one linear."""
    cols = ceil_div(width, 128) * 128 if is_ordered else width
    tiles = max(max_tiles(num_slots, num_experts, tile.block_m), 1)
    return Launch(kernel, kernel, (tiles * ceil_div(cols, tile.block_n),), tile, "test")


def rows_step(num_rows, width, acts, *, is_bf16=True):
    """Rows quantised into `acts`."""
    return portable.quantize_rows("quantize", num_rows, width, acts.name, is_bf16=is_bf16)


def quantize(x, name, *, g=None):
    """`formats.quantize` as one launch."""
    step = rows_step(*x.shape, CODES[name], is_bf16=x.dtype == torch.bfloat16)
    return dispatch.quantize(x, name, g=g, step=step)


def combine_step(num_tokens, hidden):
    return portable.combine(num_tokens, hidden)


def decode_step(x, how):
    """Rows that come quantised, where the GEMM takes BF16 in its own order."""
    return copies.decode(*x.shape) if how.is_ordered else None


def read_args(args):
    graph_io.read_args(args, copies.around(1, 1, 1).read_args)


def copy_inputs(now, into):
    steps = copies.around(*into.x.shape, into.topk_idx.shape[1])
    graph_io.copy_inputs(now, into, steps.copy_inputs)


def copy_output(now, y):
    graph_io.copy_output(now, y, copies.around(*y.shape, 1).copy_output)


def grouped_gemm(x, w, counts, *, schedule="static", sort_by_m=False, tile=None):
    """Portable's grouped GEMM alone, in any tile that its kernel takes."""
    recipe, (rows, width), (groups, n, _) = grouped.check_operands(x, w, counts), x.shape, w.shape
    how = arithmetic(recipe, hardware_of(w.device).arch)
    tile = tile or portable.pick(recipe, rows / groups, is_native=how.is_native)[1]
    sms = hardware_of(w.device).num_sms if schedule == "dynamic" else None
    maps = copies.prepare(
        rows, width, groups, tile.block_m, decodes=how.is_ordered, is_sorted=sort_by_m
    )
    steps = maps, portable.grouped(tile, rows, groups, n, sms)
    return grouped.grouped_gemm(x, w, counts, how, steps=steps, is_dynamic=schedule == "dynamic")


def hopper_steps(x, idx, tile, num_experts, *, num_shared=0, num_sms=132, intermediate=64):
    """Hopper: permute and both GEMMs of these tokens."""
    sizes = hopper.Sizes(
        len(x), idx.shape[1] + num_shared, num_experts, num_shared, x.shape[1], intermediate
    )
    return hopper.staged_pass(sizes, tile, num_sms, "test", "routed")

"""Launches of Blackwell's GEMM under the scheduler, and the bugs that are planted in it."""

import functools
from dataclasses import replace

import torch

import megamoe as mm
from megamoe.engine import blackwell
from megamoe.engine.call import Call
from megamoe.engine.planning import plan_for, traits_of
from megamoe.engine.status import DeviceStatus
from megamoe.formats.spec import recipe_named
from megamoe.kernels.blackwell import decode, epilogue, gemm, grouped
from megamoe.kernels.blackwell.weights import place
from megamoe.kernels.gluon import compat
from megamoe.planner.grouped import GroupedSpec, plan_grouped
from megamoe.planner.launches import GemmTmem
from megamoe.planner.overrides import checked
from megamoe.problem import Options
from tests.emulator import mutate, policies
from tests.emulator.exploring import is_found
from tests.pretending import pretend_b200, with_tmem_tile
from tests.proof import targets

MODULES = (gemm, epilogue, decode)


def case_of(recipe, tile, counts=(9, 3), num_sms=2, hidden=384, intermediate=256, has_bias=False):
    """L1 and L2 of a staged call whose ring and sums go round, experts with so many rows each."""
    kept = []
    w = targets.weights_of(recipe, len(counts), hidden, intermediate, has_bias)
    slots = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))
    x, _, gates = targets.tokens_of(len(slots), len(counts), hidden, 1)
    inputs, options = (x, slots.view(-1, 1), gates), Options()
    with targets.installed(num_sms, {"tmem": targets.Recorder("tmem", kept)}) as patch:
        pretend_b200(patch, num_sms)
        patch.setattr(compat, "HAS_PAIRS", True)  # the emulator needs no Triton that compiles them
        plan = plan_for(
            w, options, traits_of("blackwell", w, None), num_tokens=len(x), top_k=1,
            overrides=checked({
                "backend": "blackwell", "block_m": tile.block_m, "cta_pair": tile.num_ctas == 2,
            }),
        )  # fmt: skip
        call = Call(*inputs, w, options, None, DeviceStatus(targets.CPU))
        blackwell.run(call, with_tmem_tile(plan, tile))
    return targets.Case("tmem", kept, is_early=True)


def grouped_case(recipe, variant, tile, counts=(17, 3), num_sms=2, n=256, k=384):
    """A grouped GEMM alone: rows that are gathered, or sums of rows."""
    kept, num = [], sum(counts)
    if variant == "gather":
        w = place(targets.weights_of(recipe, len(counts), k, n).w13)
    else:
        w = place(targets.weights_of(recipe, len(counts), n, k).w2)
    rng = torch.Generator().manual_seed(0)
    x = mm.quantize(torch.randn(num, k, generator=rng).bfloat16(), recipe_named(recipe).acts.name)
    order = torch.randperm(num, generator=rng).int()
    spec = GroupedSpec(recipe, num, len(counts), w.num_outputs, k, variant)
    plan = plan_grouped(spec, "b200", backend="blackwell", block_m=tile.block_m)
    steps = plan.launches[0], replace(plan.gemm, grid=(num_sms,), config=tile)
    given = torch.tensor(counts, dtype=torch.int32)
    with targets.installed(num_sms, {"tmem": targets.Recorder("tmem", kept)}):
        if variant == "gather":
            grouped.gated(x, w, given, steps, recipe, Options(), grouped.Rows(order))
        else:
            weights, out = torch.rand(num, 1, generator=rng), torch.zeros(num, w.num_outputs)
            grouped.linear(
                x, w, given, out, steps, recipe, grouped.Rows(None, order, num, 1, weights)
            )
    return targets.Case("tmem", kept, is_early=True)


CASES = {
    "scaled": lambda: case_of("w4a8", GemmTmem(8, 128, 2, 2, 8)),
    "promoted": lambda: case_of("w8a8", GemmTmem(16, 128, 2, 2, 16), (17, 3)),
    "promoted-fp4": lambda: case_of("w4a8_block", GemmTmem(8, 128, 2, 2, 8)),
    "decoded": lambda: case_of(
        "w4a16", GemmTmem(16, 128, 4, 2, 16, schedule="dynamic"), (17, 3), hidden=640
    ),
    "drawn": lambda: case_of("w4a8", GemmTmem(8, 128, 2, 2, 8, schedule="dynamic"), (17, 3)),
    "gathered": lambda: grouped_case(
        "w4a8", "gather", GemmTmem(32, 128, 2, 2, 32, schedule="dynamic"), (40, 3)
    ),
    "summed": lambda: grouped_case("w4a8", "finalize", GemmTmem(16, 128, 2, 2, 16, num_halves=1)),
    "pair": lambda: case_of(
        "w4a8", GemmTmem(16, 128, 2, 2, 16, num_ctas=2), (17, 3), num_sms=4, intermediate=384
    ),
    "chunks": lambda: case_of("nvfp4", GemmTmem(16, 128, 2, 1, 8), (17, 3), has_bias=True),
}


@functools.cache
def case(name):
    made = CASES[name]()
    made.name = name
    made.learn()
    return made


@functools.cache
def reached(name):
    """(module, function) that a case runs."""
    one = case(name)
    with mutate.reached(()) as seen:
        one.run(policies.Calm())
    return frozenset(seen)


# Bugs of arithmetic and of place, by hand: (module, function, part of its source, instead of it).
BY_HAND = (
    (gemm, "multiply_tile", "use_acc = True", "use_acc = False"),
    (gemm, "multiply_tile", "use_acc = False", "use_acc = True"),
    (gemm, "issue_mma", "turn = first_stage(1)", "turn = first_stage(0)"),
    (gemm, "issue_mma", "stage = first_stage(0)", "stage = first_stage(1)"),
    (gemm, "store", "turn = first_stage(0)", "turn = first_stage(1)"),
    (gemm, "_scale_columns", "stage.idx * (gemm.HALVES + 1) + WHICH", "WHICH"),
    (gemm, "_scale_columns", "stage.idx * (gemm.HALVES + 1) + WHICH",
     "stage.idx * (gemm.HALVES + 1)"),
    (gemm, "scale_block", "(0, 3, 2, 1, 4)", "(0, 2, 3, 1, 4)"),
    (gemm, "weight_block", "(tile.expert * 2 + HALF)", "(tile.expert + HALF)"),
    (gemm, "weight_block", "tile.n_tile_idx * gemm.HALVES + HALF", "tile.n_tile_idx + HALF"),
    (gemm, "load_weight_step", "HALVES * (gemm.w.block_type.nbytes", "(gemm.w.block_type.nbytes"),
    (gemm, "load_weight_step", "k * WIDTH]", "0 * WIDTH]"),
    (gemm, "load_token_tile", "TIMES * gemm.x.block_type.nbytes", "gemm.x.block_type.nbytes"),
    (gemm, "load_token_tile", "[source, k * WIDTH]", "[row, k * WIDTH]"),
    (gemm, "_gather_tokens", "stage.idx * PARTS + part", "stage.idx * PARTS"),
    (gemm, "_gather_tokens", "row + part * NUM", "row"),
    (gemm, "draw_item", "post = advance(post, POSTS)", "post = post"),
    (gemm, "next_posted", "post = advance(post, POSTS)", "post = post"),
    (gemm, "draw_item", "next_item(gemm, end)", "item + gl.num_programs(0) * 2"),
    (gemm, "load_token_tile", "row // gemm.TOKENS", "0 * row"),
    (gemm, "load_token_tile", "k * gemm.pool_rows + row", "row"),
    (gemm, "_multiply_scaled", "gemm.sums.index(turn.idx * HALVES + half)",
     "gemm.sums.index(turn.idx * HALVES)"),
    (gemm, "_multiply_plain", "gemm.decoded.index(ready.idx * HALVES + half)",
     "gemm.decoded.index(half)"),
    (gemm, "allocate_tmem", "[SUMS * HALVES, LANES", "[SUMS * HALVES * 16, LANES"),
    (gemm, "gemm_tmem_kernel", "full = ring_barriers(STAGES, 2", "full = ring_barriers(STAGES, 1"),
    (gemm, "_add_stages", "scale * low_factor", "scale * high_factor"),
    (gemm, "_block_factor", "block * gemm.factor_cols + k", "block * gemm.factor_cols"),
    (gemm, "finish_tile", "start + gemm.CHUNK == gemm.TOKENS", "start == 0"),
    (epilogue, "_store_scales", "tile.n_tile_idx * NUM + part_of", "part_of"),
    (epilogue, "_store_scales", "tile.row_begin // gemm.TOKENS", "tile.row_begin // 16"),
    (epilogue, "_store_scales", "row * num_groups", "row"),
    (epilogue, "_store_rows", "times(turned.to(gl.float32), gl.expand_dims(weight, 1))",
     "turned.to(gl.float32)"),
    (epilogue, "_store_rows", "used = row < tile.row_end", "used = row >= 0"),
    (epilogue, "_store_rows", "col < width", "col >= 0"),
    (epilogue, "_group_scales", "254 - gl.minimum(stored, 254)", "253 - gl.minimum(stored, 253)"),
    (epilogue, "_activated", "gemm.factor + tile.expert * 2 + 1", "gemm.factor + tile.expert"),
    (epilogue, "_biased", "matrix * gemm.num_bias + output", "output"),
    (epilogue, "finish_linear", "gemm.HALVES + HALF", "gemm.HALVES"),
    # Of pairs of CTAs.
    (gemm, "gemm_tmem_kernel", "full = ring_barriers(STAGES, 2, PAIR, True)",
     "full = ring_barriers(STAGES, 2, PAIR)"),
    (gemm, "gemm_tmem_kernel", "taken = ring_barriers(SUMS, 1, PAIR, True)",
     "taken = ring_barriers(SUMS, 1, PAIR)"),
    (gemm, "gemm_tmem_kernel", "taken = ring_barriers(SUMS, 1, PAIR, True)",
     "taken = ring_barriers(SUMS, 2, PAIR, True)"),
    (gemm, "gemm_tmem_kernel", "empty = ring_barriers(STAGES, READERS, PAIR)",
     "empty = ring_barriers(STAGES, READERS, PAIR, True)"),
    (gemm, "gemm_tmem_kernel", "summed = ring_barriers(SUMS, 1, PAIR)",
     "summed = ring_barriers(SUMS, 1, PAIR, True)"),
    (gemm, "load_weight_step", "SCALE_BYTES) // gemm.CTAS", "SCALE_BYTES)"),
    (gemm, "load_token_tile", "gemm.x.block_type.nbytes // gemm.CTAS",
     "gemm.x.block_type.nbytes"),
    (gemm, "weight_block", "tile.n_tile_idx * gemm.CTAS", "tile.n_tile_idx"),
    (gemm, "weight_block", "(tile.n_tile_idx * gemm.HALVES + HALF) * gemm.CTAS",
     "tile.n_tile_idx * gemm.HALVES * gemm.CTAS + HALF"),
    (gemm, "_tile_at", "BLOCK_ROWS * gemm.CTAS", "BLOCK_ROWS"),
    (epilogue, "_store_scales", "NUM: gl.constexpr = 128 * gemm.CTAS", "NUM: gl.constexpr = 128"),
    (epilogue, "_store_scales", "mask = mask & gl.expand_dims(group < num_groups, 1)",
     "mask = mask"),
    (epilogue, "finish_gated", "OUTPUTS: gl.constexpr = 128 * gemm.CTAS",
     "OUTPUTS: gl.constexpr = 128"),
    (epilogue, "finish_linear", "(128 * gemm.CTAS)", "128"),
    (decode, "_decode_part", "byte >> 4 & 15", "byte & 15"),
)  # fmt: skip

# {mutant: why no run can tell it from the kernel}
EXCUSED = {
    "blackwell.gemm.decode_tile: mbarrier.arrive(gemm.empty.index(stage.idx), count=1) before "
    "fence_async_shared()":
        "decoded_full follows the fence, and issue_mma's commit, which empty needs too, brings it",
    "blackwell.gemm.decode_tile: mbarrier.arrive(gemm.decoded_full.index(room.idx), count=1) "
    "before mbarrier.arrive(gemm.empty.index(stage.idx), count=1)":
        "two arrivals after the same fence",
    "blackwell.gemm.gemm_tmem_kernel: no allow_next_launch()": "speed alone",
    "blackwell.gemm.store: no wait_for_launch()":
        "its first sums come from tokens that load_tokens loaded, which has waited",
}  # fmt: skip


@functools.cache
def planted_bugs():
    targets.kernels()
    found = mutate.mutants(MODULES, ())
    for module, function, old, new in BY_HAND:
        mutant = mutate.edited(module, function, old, new)
        found[mutant.name] = mutant
    return found


def hunt(mutant, seeds=6):
    """(case, seed, error) of who finds a planted bug first, or None."""
    names = [name for name in CASES if (mutant.module, mutant.function) in reached(name)]
    with mutate.planted(mutant):
        for seed in range(seeds):
            for name in names:
                found, error = is_found(case(name), (seed,))
                if found is not None:
                    return name, found, error
    return None

"""Launches of Blackwell's GEMM under the scheduler, and the bugs that are planted in it."""

import functools
from dataclasses import replace

import torch

import megamoe as mm
from megamoe.engine import backends
from megamoe.engine.blackwell import BLACKWELL
from megamoe.engine.call import Call
from megamoe.engine.local import LocalRanks
from megamoe.engine.planning import Ranks, plan_for, traits_of
from megamoe.engine.status import DeviceStatus
from megamoe.formats.spec import recipe_named
from megamoe.kernels.blackwell import decode, epilogue, gemm, grouped, memory
from megamoe.kernels.blackwell.mega import kernel, smem
from megamoe.kernels.blackwell.weights import place
from megamoe.kernels.gluon import compat, pull, tile_scheduler
from megamoe.kernels.gluon.mega import dispatch, inbox, push, quantise
from megamoe.planner.grouped import GroupedSpec, plan_grouped
from megamoe.planner.launches import GemmTmem
from megamoe.planner.overrides import checked
from megamoe.problem import Options
from tests.emulator import mutate, policies
from tests.emulator.exploring import is_found
from tests.pretending import pretend_b200, with_tmem_tile
from tests.proof import blackwell_chains, targets

MODULES = (gemm, memory, epilogue, decode)


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
        BLACKWELL.run(call, with_tmem_tile(plan, tile))
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
    "chain": lambda: blackwell_chains.part_case("w4a8", GemmTmem(8, 128, 2, 2, 8)),
    "chain-nvfp4": lambda: blackwell_chains.part_case("nvfp4", GemmTmem(16, 128, 2, 1, 8), (17, 3)),
    "chain-drawn": lambda: blackwell_chains.part_case(
        "w8a8", GemmTmem(16, 128, 2, 2, 16, schedule="dynamic"), (17, 3)
    ),
}
# Whole calls of ranks, and waits that run out: of a chain too, and not asked for every planted bug.
CALLS = {
    "chain-whole": lambda: blackwell_chains.whole_case("w4a4", GemmTmem(8, 256, 2, 2, 8)),
    "chain-late": lambda: blackwell_chains.late_case("w4a8", GemmTmem(8, 128, 2, 2, 8)),
}


def fused_case(recipe, tokens=5, experts=2, num_sms=2, pool_rows=None, has_bias=False, stages=2,
               **given):  # fmt: skip
    """A fused call of one rank whose ring goes round."""
    kept = []
    w = targets.weights_of(recipe, experts, 256, 256, has_bias)
    inputs, options = targets.tokens_of(tokens, experts, 256), Options()
    with targets.installed(num_sms, {"mega-tmem": targets.Recorder("mega-tmem", kept)}) as patch:
        pretend_b200(patch, num_sms)
        found = fused_plan(w, tokens, pool_rows=pool_rows, num_stages=stages, **given)
        status, stats = DeviceStatus(targets.CPU), torch.zeros(experts, dtype=torch.int64)
        call = Call(*inputs, w, options, None, status, stats, None, 30.0, True)
        BLACKWELL.run(call, found)
    return targets.Case("fused", kept)


def fused_plan(w, tokens, ranks=None, **given):
    return plan_for(
        w, Options(), traits_of("blackwell", w, None), num_tokens=tokens, top_k=2,
        overrides=checked({"backend": "blackwell", "mode": "fused", **given}),
        ranks=ranks or Ranks(),
    )  # fmt: skip


def local_case(recipe, counts=(2, 1), ctas=2, experts=4):
    """Ranks of one fused launch."""
    kept = []
    w = targets.weights_of(recipe, experts, 256, 256)
    inputs = targets.tokens_of(sum(counts), experts, 256)
    num = len(counts)
    with targets.installed(num * ctas, {"mega-tmem": targets.Recorder("mega-tmem", kept)}) as patch:
        pretend_b200(patch, num * ctas)
        patch.setattr(backends, "resolve", lambda *wanted: None)
        there = LocalRanks(w, num, timeout_s=30.0, debug_poison=True, backend="blackwell")
        there._top_k = 2
        there._make_buffers(max(counts))
        there(*(t.split(counts) for t in inputs))
    most = max(counts)
    used = [rank * most + i for rank, count in enumerate(counts) for i in range(count)]
    return targets.Case("fused-ranks", kept, [b.tokens for b in there._buffers], used=used)


# Of the fused launch, for what it has beside the GEMM and the shared parts.
FUSED = {
    "fused": lambda: fused_case("w4a8"),
    "fused-promoted": lambda: fused_case("w8a8", 18, has_bias=True, block_m=16),
    "fused-nvfp4": lambda: fused_case("nvfp4"),
    "fused-decoded": lambda: fused_case("w4a16", 3),
    "fused-ring": lambda: fused_case("w4a4", 16, 3, pool_rows=32, block_m=8),
    "fused-ranks": lambda: local_case("w4a8"),
    "fused-ranks-nvfp4": lambda: local_case("nvfp4", (0, 2), 1),
}


@functools.cache
def case(name):
    made = (CASES | CALLS | FUSED)[name]()
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
    (gemm, "issue_mma", "accum = first_stage(1)", "accum = first_stage(0)"),
    (gemm, "issue_mma", "stage = first_stage(0)", "stage = first_stage(1)"),
    (gemm, "store", "accum = first_stage(0)", "accum = first_stage(1)"),
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
    (gemm, "take_item", "post = advance(post, POSTS)", "post = post"),
    (gemm, "next_posted", "post = advance(post, POSTS)", "post = post"),
    (gemm, "take_item", "next_item(gemm, end)", "item + gl.num_programs(0) * 2"),
    (gemm, "load_token_tile", "row // gemm.TOKENS", "0 * row"),
    (gemm, "load_token_tile", "k * gemm.pool_rows + row", "row"),
    (gemm, "_multiply_scaled", "gemm.sums.index(accum.idx * HALVES + half)",
     "gemm.sums.index(accum.idx * HALVES)"),
    (gemm, "_multiply_plain", "gemm.decoded.index(ready.idx * HALVES + half)",
     "gemm.decoded.index(half)"),
    (memory, "allocate_tmem", "[SUMS * HALVES, LANES", "[SUMS * HALVES * 16, LANES"),
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
    # Of chains.
    (gemm, "store", "publish_count(tile_word(gemm.publishes, tile.row_begin), 1)",
     "publish_count(gemm.publishes, 1)"),
    (gemm, "gemm_tmem_kernel", "IS_FAR=IS_FAR", "IS_FAR=False"),
    (gemm, "gemm_tmem_kernel", "l1_n_tiles=l1_n_tiles if FOLLOWS else steps", "l1_n_tiles=1"),
    (gemm, "gemm_tmem_kernel", "(GATED or SOURCE != 'pool') and (not FOLLOWS)",
     "GATED or SOURCE != 'pool'"),
    (pull, "_scale_at", "row % BLOCK", "row"),
    (pull, "_scale_at", "row // BLOCK", "0 * row"),
    (pull, "_scale_at", "word * WORDS", "word"),
    (tile_scheduler, "wait_for_tile", "want = gemm.l1_n_tiles", "want = gemm.l1_n_tiles - 1"),
    (tile_scheduler, "wait_for_tile", "want = tile.row_end - tile.row_begin", "want = 1"),
)  # fmt: skip

# {mutant: why no run can tell it from the kernel}
EXCUSED = {
    "blackwell.gemm.decode_tile: "
    "mbarrier.arrive(gemm.decoded_full.index(decoded_stage.idx), count=1) "
    "before mbarrier.arrive(gemm.empty.index(stage.idx), count=1)":
        "two arrivals after the same fence",
    "blackwell.gemm._add_stages: no mbarrier.wait(gemm.full.index(stage.idx), stage.phase)":
        "sums of the stage were waited for, and bring what issue_mma knew of it",
    "blackwell.gemm.gemm_tmem_kernel: no allow_next_launch()": "speed alone",
    "blackwell.gemm.store: no wait_for_launch()":
        "its first sums come from tokens that load_tokens loaded, which has waited",
    "blackwell.gemm.store: no wait_for_tile(gemm, tile, gemm.error)":
        "the same of each tile: it waits since PTX does not say that a commit brings it",
    "blackwell.gemm.gemm_tmem_kernel: \"GATED or SOURCE != 'pool'\" for "
    "\"(GATED or SOURCE != 'pool') and (not FOLLOWS)\"": "speed alone: L1 after the whole pull",
}  # fmt: skip


# Bugs in what only the fused launch runs: its kernel, and placed scales in shared parts.
FUSED_BY_HAND = (
    (kernel, "issue_mma", "accum = Stage(idx=other.idx, phase=other.phase)", "accum = mine"),
    (kernel, "issue_mma", "_accum_of(1, 1)", "_accum_of(1, 0)"),
    (kernel, "issue_mma", "_accum_of(0, 1)", "_accum_of(1, 1)"),
    (kernel, "_steps_of", "kind == L1, l1.steps, l2.steps", "kind == L1, l1.steps, l1.steps + 1"),
    (kernel, "math", "num_done & 1 == WG", "num_done & 1 != WG"),
    (kernel, "math", "accum = _accum_of(WG, 0)", "accum = _accum_of(WG, 1)"),
    (kernel, "math", "stage = _skip(stage, _steps_of(kind, l1, l2), l1.STAGES)", "pass"),
    (kernel, "_skip", "stage.phase ^ at // NUM_STAGES & 1", "stage.phase"),
    (kernel, "_finish", "finish_tile(l2, known,", "finish_tile(l1, known,"),
    (kernel, "_count", "L1_DONE + item.tile_idx", "L1_DONE"),
    (kernel, "_count", "wave_of(cta, item.tile_idx)", "0 * wave_of(cta, item.tile_idx)"),
    (kernel, "load_tokens", "L1_DONE + item.tile_idx", "L1_DONE"),
    (kernel, "load_tokens", "wait_for_wave(cta, item.tile_idx)", "pass"),
    (kernel, "mega_tmem_kernel", "ALIGN=TOKENS", "ALIGN=4"),
    (kernel, "mega_tmem_kernel", "GROUPS + 3", "GROUPS + 2"),
    (smem, "gemm_of", "ACCUM_STEP=GROUPS", "ACCUM_STEP=1"),
    (smem, "gemm_of", "IS_FAR=args.RANKS > 1", "IS_FAR=False"),
    (smem, "allocate_shared", "FORMAT.PROMOTED or FORMAT.DECODED", "FORMAT.DECODED"),
    (dispatch, "_store_placed", "to // args.TOKENS", "to // 32"),
    (dispatch, "_store_placed", "to % args.TOKENS", "0 * to"),
    (dispatch, "_store_placed", "part * (PART_COLS // G)", "PART_COLS // G"),
    (dispatch, "_fill_parts", "part * (PART_COLS // 2)", "part * PART_COLS + 2"),
    (quantise, "_placed_part", "low | high << 4", "high | low << 4"),
    (quantise, "_placed_part", "gl.where(bits >= INF_BITS, 127, e4m3_code(scale).to(gl.int32))",
     "e4m3_code(scale).to(gl.int32) + 1"),
    (inbox, "read_scale_bytes", "row * scale_stride(args)", "row"),
    (inbox, "scale_stride", "args.width // args.ACTS.GROUP + 15", "15"),
    (push, "_push_scale_bytes", "row * scale_stride(args)", "0"),
    (gemm, "_advance_by", "idx - NUM_STAGES", "0"),
)  # fmt: skip
FUSED_MODULES = (kernel, smem)
# {mutant: why no run can tell it from the kernel}
FUSED_EXCUSED = {
    "blackwell.mega.kernel.load_weights: no mbarrier.wait(cta.own_filled, 0)": "speed alone",
    "blackwell.mega.kernel.load_weights: no mbarrier.wait(cta.pool_filled, 0)": "speed alone",
    "blackwell.mega.kernel.math: no mbarrier.wait(cta.pool_filled, 0)":
        "load_tokens has waited, and products bring that; here for the report alone",
    "blackwell.mega.kernel.math: no wait_for_wave(cta, item.tile_idx)":
        "load_tokens has waited, and products bring that; here for the report alone",
    "blackwell.mega.kernel.math: no mbarrier.wait(cta.all_done, 0)": "in builds with stamps alone",
    "blackwell.mega.kernel.math: other phase of mbarrier.wait(cta.all_done, 0)":
        "in builds with stamps alone",
    "blackwell.mega.kernel.mega_tmem_kernel: no gl.thread_barrier()":
        "entering warp_specialize is such a barrier",
}  # fmt: skip


@functools.cache
def fused_bugs():
    """Planted in the fused kernel, and by hand in what it shares."""
    targets.kernels()
    found = mutate.mutants(FUSED_MODULES, ())
    for module, function, old, new in FUSED_BY_HAND:
        mutant = mutate.edited(module, function, old, new)
        found[mutant.name] = mutant
    return found


@functools.cache
def planted_bugs():
    targets.kernels()
    found = mutate.mutants(MODULES, ())
    for module, function, old, new in BY_HAND:
        mutant = mutate.edited(module, function, old, new)
        found[mutant.name] = mutant
    return found


def hunt(mutant, base=0, seeds=6, cases=CASES):
    """(case, seed, error) of who finds a planted bug first, or None."""
    names = [name for name in cases if (mutant.module, mutant.function) in reached(name)]
    with mutate.planted(mutant):
        for seed in range(base, base + seeds):
            for name in names:
                found, error = is_found(case(name), (seed,))
                if found is not None:
                    return name, found, error
    return None

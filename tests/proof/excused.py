"""Planted bugs that change nothing, each with the reason."""

_FENCED = "a fence of the async proxy stands elsewhere on the same way, and PTX asks for one"
_BARRED = "the compiler puts a barrier of the role's threads before every arrival (`compiled`)"
_PORTABLE = "the portable backend alone launches it, and its kernels are Triton's"
_PACE = "speed alone: it holds back who would otherwise only be early"
# {mutant: why no run can tell it from the kernel}. Where one of several suffices, `TOGETHER` drops
# all of them.
EXCUSED = {
    "gemm.epilogue.publish_operands: no gl.thread_barrier()": _BARRED,
    "gemm.epilogue.publish_operands: mbarrier.arrive(gemm.epilogue.full, count=1) before "
    "gl.thread_barrier()": _BARRED,
    "gemm.epilogue.post_tile: no gl.thread_barrier()": _BARRED,
    "mega.dispatch.read_routing: no gl.thread_barrier()": _BARRED,
    "mega.dispatch.read_routing: mbarrier.arrive(cta.routed, count=1) before "
    "gl.thread_barrier()": _BARRED,
    "mega.kernel._arrive_stored: no gl.thread_barrier()": _BARRED,
    "mega.kernel._arrive_stored: mbarrier.arrive(cta.tile_stored.index(num_stored & 1), count=1) "
    "before gl.thread_barrier()": _BARRED,
    "gemm.plain._compute: no gl.thread_barrier()": _BARRED,
    "gemm.decode_per_wave.decode_jobs: no gl.thread_barrier()": _BARRED,
    "gemm.decode_per_wave.decode_jobs: mbarrier.arrive(d.stored.index(slot.idx), count=1) before "
    "gl.thread_barrier()": _BARRED,
    "mega.kernel.mega_kernel: no gl.thread_barrier()": "entering warp_specialize is such a barrier",
    "mega.sync.publish_count: no fence_stores()": _FENCED,
    "mega.kernel.publish: no fence_stores()": _FENCED,
    "mega.kernel._arrive_stored: no fence_stores()": _FENCED,
    "gemm.plain._compute: no fence_stores()": _FENCED,
    "gluon.tile_scheduler.publish_l1_tile: no fence_stores()": _FENCED,
    "gluon.tile_scheduler.publish_l1_tile: gl.atomic_add(counter, 1, sem='release', scope='gpu') "
    "before fence_stores()": _FENCED,
    "gluon.pipeline.wait_text(gpu, eq): has no proxy fence": _FENCED,
    "gemm.swap_ab.finish: no fence_stores()": _FENCED,
    "gemm.swap_ab.finish: no gl.thread_barrier()": _BARRED,
    "gluon.pull.pull_kernel: no fence_stores()": _FENCED,
    "gluon.pull.pull_kernel: no allow_next_launch()": _PACE,
    "gluon.exchange.exchange_kernel: no allow_next_launch()": _PACE,
    "gluon.exchange.finish_kernel: no allow_next_launch()": _PACE,
    "gemm.fp8_rows.scales_kernel: no allow_next_launch()": _PACE,
    "common.compat.after_previous: no gdc_launch_dependents()": _PACE,
    "gluon.exchange._await_peer: ge is eq in bounded_wait(word, call, stop, p.bound_ns, 'sys', "
    "'ge')": "a peer begins its next call only once this rank has ended this one",
    "mega.sync._see_ranks: ge is eq in bounded_wait(words, call + 0 * number, args.report, "
    "bound_ns, _scope(args), 'ge')":
        "no peer is a call ahead; one that gave up is then seen when the bound has come",
    "gluon.tile_scheduler.wait_for_tile: ge is eq in bounded_wait(word, want, timeout, bound_ns, "
    "'gpu', 'ge')": "a tile's count ends at what is wanted",
    "gluon.tile_scheduler.no_items: no tl.store(at + ITEM_READ, place * 0, mask=place < num_ctas)":
        "no CTA has a tile, so nobody decodes and nobody waits",
    "portable.sort._count_kernel: no after_previous()": _PORTABLE,
    "portable.sort._place_kernel: no after_previous()": _PORTABLE,
    "portable.sort._place_kernel: no tl.store(num_tiles, live)": _PORTABLE,
    "portable.dispatch._dispatch_kernel: no check_routing(topk_idx, topk_weights, idx_out, "
    "weights_out, num_valid, error, row, inside, num_experts, HAS_COUNT, TOP_K, SLOTS)": _PORTABLE,
    "gluon.pipeline.wait_text(sys, ge): has no proxy fence":
        "no copy by TMA reads what another GPU stored",
    "gemm.swap_ab.load_weight_step: no _throttle(gemm, stage)": _PACE,
    "gemm.swap_ab._throttle: no mbarrier.wait(gemm.full.index(at), gl.where(wraps, stage.phase, "
    "stage.phase ^ 1))": _PACE,
    "gemm.swap_ab.gemm_swap_ab_kernel: no allow_next_launch()": _PACE,
    "gemm.plain.gemm_kernel: no allow_next_launch()": _PACE,
    "mega.dispatch.fill_pool: mbarrier.arrive(cta.own_filled, count=1) before "
    "_fill_parts(cta, begin, end, 0, 2, cta.counters + POOL)": _PACE,
    "mega.kernel.load_weights: no mbarrier.wait(cta.own_filled, 0)": _PACE,
    "mega.kernel.load_weights: no mbarrier.wait(cta.pool_filled, 0)": _PACE,
    "mega.kernel.math: no mbarrier.wait(l1.full.index(stage.idx), stage.phase)":
        "the product waits for it again",
    "mega.kernel.math: no mbarrier.wait(cta.all_done, 0)": "in builds with stamps alone",
    "mega.kernel.math: other phase of mbarrier.wait(cta.all_done, 0)":
        "in builds with stamps alone",
    "gemm.swap_ab.load_epilogue_operands: no wait_for_launch()":
        "it reads what is older than L1, and L1 lets L2 begin once that is complete",
    "gemm.swap_ab.math: no wait_for_launch()":
        "its first stage comes from load_tokens, which has waited",
    "gemm.plain.math: no wait_for_launch()":
        "its first stage comes from load_tokens, which has waited",
    "mega.scheduler._push: no mbarrier.wait(cta.item_empty.index(slot), i >> 1 & 1 ^ 1)":
        "_wait_until_popped has waited for the item after the one that is replaced",
    "mega.scheduler.schedule_tiles: no _wait_until_popped(cta, i)":
        "_push waits too; tickets are taken earlier, which costs time",
    "mega.scheduler._wait_until_popped: no mbarrier.wait(cta.item_empty.index(i & 1), i >> 1 & 1)":
        "_push waits too; tickets are taken earlier, which costs time",
    "mega.kernel._arrive_stored: no mbarrier.wait(cta.tile_counted.index(num_stored & 1), "
    "num_stored >> 1 & 1 ^ 1)":
        "operands of the next tile come once publish has counted this one: math is one tile ahead "
        "at most, and there are two slots",
    "gemm.plain._compute: no wait_for_operands(gemm, num_done)":
        "the warp that brings operands has them before it brings the last stage",
    "gemm.decode_per_tile.decode: mbarrier.arrive(gemm.image_empty.index(used), count=1) before "
    "mbarrier.arrive(gemm.full.index(stage.idx), count=1)": "two arrivals after the same fence",
    "gemm.decode_per_wave.decode_jobs: mbarrier.arrive(d.free.index(slot.idx), count=1) before "
    "mbarrier.arrive(d.stored.index(slot.idx), count=1)":
        "free needs publish_jobs as well, which waits for stored",
    "gemm.decode_per_wave.publish_rest: release is relaxed in gl.atomic_add("
    "_chunk_counter(gemm, chunk), 1, sem='release', scope='gpu')":
        "of chunks that the CTA has not read: it has nothing to publish",
    "gemm.decode_per_wave.publish_jobs: mbarrier.arrive(d.free.index(slot.idx), count=1) before "
    "gl.atomic_xchg(counter, value, sem='release', scope='gpu')": "the slot has been read",
}  # fmt: skip

# Mutants that only together take something away.
TOGETHER = {
    "no proxy fence between a fused launch's stores and copies": (
        "mega.sync.publish_count: no fence_stores()", "mega.kernel.publish: no fence_stores()",
        "mega.kernel._arrive_stored: no fence_stores()",
        "gluon.pipeline.wait_text(gpu, eq): has no proxy fence",
    ),
    "no proxy fence between L1's stores and L2's copies": (
        "gemm.plain._compute: no fence_stores()",
        "gluon.tile_scheduler.publish_l1_tile: no fence_stores()",
        "gluon.pipeline.wait_text(gpu, ge): has no proxy fence",
    ),
    "no proxy fence between the stores of a pull and L1's copies": (
        "gluon.pull.pull_kernel: no fence_stores()",
        "gluon.pipeline.wait_text(gpu, ge): has no proxy fence",
    ),
    "work items replaced unread": (
        "mega.scheduler._push: no mbarrier.wait(cta.item_empty.index(slot), i >> 1 & 1 ^ 1)",
        "mega.scheduler.schedule_tiles: no _wait_until_popped(cta, i)",
    ),
}  # fmt: skip
# The race that once shipped: a stage that is written again while it is read.
SHIPPED_ONCE = "gemm.swap_ab._release_stage: no fence_async_shared()"

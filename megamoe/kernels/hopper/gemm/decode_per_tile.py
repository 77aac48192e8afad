"""FP4 of `straight`, decoded for every tile: images into a ring, E4M3 rows into the stage."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from megamoe.kernels.hopper.gemm.straight_epilogue import MMA, SLABS
from megamoe.kernels.hopper.gemm.tile_scheduler import end_item, tile_at
from megamoe.kernels.hopper.pipeline import advance
from megamoe.kernels.hopper.weights.decode import PAIR_WORDS, e4m3_of_words, read_words


@gluon.jit
def load_image(p, expert, across, k, idx, phase):
    """The FP4 image of one K block of a tile."""
    ready = p.image_full.index(idx)
    mbarrier.wait(p.image_empty.index(idx), phase)
    mbarrier.expect(ready, SLABS * (4096 + 4 * PAIR_WORDS))
    slab = across * SLABS
    tma.async_copy_global_to_shared(p.w, [expert, slab, k * 4, 0], ready, p.image.index(idx))
    tma.async_copy_global_to_shared(
        p.w_scale, [expert, slab, k * PAIR_WORDS], ready, p.image_scale.index(idx)
    )
    return advance(idx, phase, p.IMAGES)


@gluon.jit
def load_images(p):
    """FP4 images of all tiles; the last one twice, since `decode` reads an image ahead."""
    idx = 0
    phase = 1
    stop = end_item(p)
    for item in range(gl.program_id(0), stop, gl.num_programs(0)):
        expert, row, end, across = tile_at(p, item)
        for k in range(p.steps):
            idx, phase = load_image(p, expert, across, k, idx, phase)
        if item + gl.num_programs(0) >= stop:
            idx, phase = load_image(p, expert, across, 0, idx, phase)


@gluon.jit
def _slab(p, at, slab: gl.constexpr):
    """FP4 of a slab of image `at`, and its scales."""
    NUM: gl.constexpr = p.IMAGES * SLABS
    return read_words(p.image, p.image_scale, at * SLABS + slab, NUM)


@gluon.jit
def decode(p):
    """One warpgroup: FP4 images to E4M3 rows of the stage.

    It is the slowest role, and bound by latency: two slabs are always read while others are
    decoded, of the next image too, so that neither reads nor waits stand alone.
    """
    DOT: gl.constexpr = gl.DotOperandLayout(0, MMA, 4)
    idx = 0
    phase = 1
    at = 0
    at_phase = 0
    stop = end_item(p)
    if gl.program_id(0) < stop:
        mbarrier.wait(p.image_full.index(at), at_phase)
        w0, s0 = _slab(p, at, 0)
        w1, s1 = _slab(p, at, 1)
        for item in range(gl.program_id(0), stop, gl.num_programs(0)):
            for k in range(p.steps):
                mbarrier.wait(p.empty.index(idx), phase)
                stage = p.w_bufs.index(idx)
                w2, s2 = _slab(p, at, 2)
                stage.slice(0, 64, 0).store(e4m3_of_words(w0, s0, DOT))
                w3, s3 = _slab(p, at, 3)
                stage.slice(64, 64, 0).store(e4m3_of_words(w1, s1, DOT))
                used = at
                at, at_phase = advance(at, at_phase, p.IMAGES)
                mbarrier.wait(p.image_full.index(at), at_phase)
                w0, s0 = _slab(p, at, 0)
                stage.slice(128, 64, 0).store(e4m3_of_words(w2, s2, DOT))
                w1, s1 = _slab(p, at, 1)
                stage.slice(192, 64, 0).store(e4m3_of_words(w3, s3, DOT))
                fence_async_shared()
                mbarrier.arrive(p.full.index(idx), count=1)
                mbarrier.arrive(p.image_empty.index(used), count=1)
                idx, phase = advance(idx, phase, p.STAGES)

"""FP4 weights of the plain GEMM, decoded for every tile: images to a ring, E4M3 to the stage."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from megamoe.kernels.gluon.compat import tma
from megamoe.kernels.gluon.pipeline import advance, first_stage
from megamoe.kernels.gluon.tile_scheduler import PLAIN_SLABS, end_item, tile_at
from megamoe.kernels.hopper.weights.decode import (
    E4M3_OPERAND,
    PAIR_WORDS,
    e4m3_of_words,
    read_words,
)


@gluon.jit
def _load_image(gemm, tile, k, image):
    """The FP4 image of K block k of a tile; -> the next slot of the images' ring."""
    full = gemm.image_full.index(image.idx)
    mbarrier.wait(gemm.image_empty.index(image.idx), image.phase)
    mbarrier.expect(full, PLAIN_SLABS * (4096 + 4 * PAIR_WORDS))
    slab = tile.n_tile_idx * PLAIN_SLABS
    tma.async_copy_global_to_shared(
        gemm.w, [tile.expert, slab, k * 4, 0], full, gemm.image.index(image.idx)
    )
    tma.async_copy_global_to_shared(
        gemm.w_scale, [tile.expert, slab, k * PAIR_WORDS], full, gemm.image_scale.index(image.idx)
    )
    return advance(image, gemm.IMAGES)


@gluon.jit
def load_images(gemm):
    """One warp: the images of all tiles; the last one twice, as `decode` reads an image ahead."""
    image = first_stage(1)
    end = end_item(gemm)
    for item in range(gl.program_id(0), end, gl.num_programs(0)):
        tile = tile_at(gemm, item)
        for k in range(gemm.steps):
            image = _load_image(gemm, tile, k, image)
        if item + gl.num_programs(0) >= end:
            image = _load_image(gemm, tile, 0, image)


@gluon.jit
def _read_slab(gemm, idx, slab: gl.constexpr):
    """FP4 words of a slab of image `idx`, and its scales."""
    NUM: gl.constexpr = gemm.IMAGES * PLAIN_SLABS
    return read_words(gemm.image, gemm.image_scale, idx * PLAIN_SLABS + slab, NUM)


@gluon.jit
def decode(gemm):
    """One warpgroup: FP4 images to the E4M3 weights [256, 128] of a stage.

    It is the slowest role, and bound by latency: two slabs are always being read while two others
    are decoded, of the next image too, so that neither reads nor waits stand alone.
    """
    stage = first_stage(1)
    image = first_stage(0)
    end = end_item(gemm)
    if gl.program_id(0) < end:
        mbarrier.wait(gemm.image_full.index(image.idx), image.phase)
        w0, s0 = _read_slab(gemm, image.idx, 0)
        w1, s1 = _read_slab(gemm, image.idx, 1)
        for item in range(gl.program_id(0), end, gl.num_programs(0)):
            for k in range(gemm.steps):
                mbarrier.wait(gemm.empty.index(stage.idx), stage.phase)
                to = gemm.w_bufs.index(stage.idx)
                w2, s2 = _read_slab(gemm, image.idx, 2)
                to.slice(0, 64, 0).store(e4m3_of_words(w0, s0, E4M3_OPERAND))
                w3, s3 = _read_slab(gemm, image.idx, 3)
                to.slice(64, 64, 0).store(e4m3_of_words(w1, s1, E4M3_OPERAND))
                used = image.idx
                image = advance(image, gemm.IMAGES)
                mbarrier.wait(gemm.image_full.index(image.idx), image.phase)
                w0, s0 = _read_slab(gemm, image.idx, 0)
                to.slice(128, 64, 0).store(e4m3_of_words(w2, s2, E4M3_OPERAND))
                w1, s1 = _read_slab(gemm, image.idx, 1)
                to.slice(192, 64, 0).store(e4m3_of_words(w3, s3, E4M3_OPERAND))
                fence_async_shared()
                mbarrier.arrive(gemm.full.index(stage.idx), count=1)
                mbarrier.arrive(gemm.image_empty.index(used), count=1)
                stage = advance(stage, gemm.STAGES)

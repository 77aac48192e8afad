"""FP4 weights of the plain GEMM, decoded once per wave of tiles into rings in the L2 cache.

A wave is one tile of each CTA (`tile_scheduler`). Tiles of a wave that share an expert's 256 weight
rows form a run, and a run has a ring of DEPTH K blocks, E4M3 [256, 128], in global memory, which
its tiles load by TMA. The blocks are cut into jobs of 64 rows x CHUNK blocks, spread over the
decoding warpgroups of all CTAs, K first. CTAs wait for each other, so all must be resident: a
loader waits for the jobs of its next chunk, a decoder until every CTA has read the blocks that lie
DEPTH before its own. So a job waits for reads of earlier blocks, and a read for the jobs of its
block: nothing waits for a later one. A wait is given up after `tile_scheduler.BOUND_NS`, two
seconds, not after the layer's `timeout_s`.

A job, int32 [JOB_WORDS] in shared memory: its first row in the rings (-1: the end), the work item
whose counter publishes it, and the value that the counter gets.
"""

from triton.experimental import gluon
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from megamoe.kernels.gluon.compat import gl, tma
from megamoe.kernels.gluon.pipeline import (
    advance,
    fast_div,
    first_stage,
    record,
)
from megamoe.kernels.gluon.tile_scheduler import (
    ITEM_EXPERT,
    ITEM_READ,
    ITEM_SLAB,
    ITEM_STORED,
    ITEM_WORDS,
    ctas_of_wave,
    end_item,
    num_waves,
    place_of,
    wait_until_reached,
)
from megamoe.kernels.hopper.weights.decode import (
    E4M3_OPERAND,
    PAIR_WORDS,
    e4m3_of_words,
    read_words,
)

# 64 rows x 128 of K: eight threads have a row, so that a store of a warp is whole lines.
_STORED_ROWS = gl.constexpr(gl.BlockedLayout([1, 16], [4, 8], [4, 1], [1, 0]))
JOB_WORDS = gl.constexpr(3)
JOB_ROW = gl.constexpr(0)
JOB_ITEM = gl.constexpr(1)
JOB_VALUE = gl.constexpr(2)


@record
class DecodePerWave:
    """Source and destination of decoding: FP4 tensors, the E4M3 ring, and the job queue in shared
    memory.

    barrier  n     arrivals  arrived by                  awaited by
    ready    JOBS  2         load_jobs and its TMA       decode_jobs
    stored   JOBS  1         decode_jobs                 publish_jobs
    free     JOBS  2         decode_jobs, publish_jobs   load_jobs
    """

    words: tma.tensor_descriptor  # int32 [slab, K / 32, 256]
    scale: tma.tensor_descriptor  # int32 [slab, K / 4]
    ring: gl.tensor  # E4M3 [run of the wave, DEPTH, 256 rows, 128]
    error: gl.tensor  # the layer's word: -1 where a wait was given up
    word_bufs: gl.shared_memory_descriptor  # int32 [JOBS, 1, 4 * CHUNK, 256]
    scale_bufs: gl.shared_memory_descriptor  # int32 [JOBS, 1, CHUNK * PAIR_WORDS]
    jobs: gl.shared_memory_descriptor  # int32 [JOBS * JOB_WORDS, 1]
    ready: gl.shared_memory_descriptor  # a job's words are there, and its place in the ring is free
    stored: gl.shared_memory_descriptor
    free: gl.shared_memory_descriptor
    DEPTH: gl.constexpr  # K blocks of the ring of a run; 0: weights are not decoded here
    CHUNK: gl.constexpr  # K blocks of a job
    JOBS: gl.constexpr  # jobs in flight in a CTA


@gluon.jit
def _wait(gemm, counter, value):
    wait_until_reached(gemm, counter, value, gemm.items + ITEM_READ)


@gluon.jit
def load_decoded(gemm):
    """One warp: E4M3 rows from the ring of this CTA's run into the stages, chunk by chunk."""
    CHUNK: gl.constexpr = gemm.decoded.CHUNK
    FOUR: gl.constexpr = gl.DistributedLinearLayout([], [[1], [2], [0], [0], [0]], [], [], [4])
    stage = first_stage(1)
    block = 0  # of K, over all tiles
    for item in range(gl.program_id(0), end_item(gemm), gl.num_programs(0)):
        wave = item - gl.program_id(0)
        count = ctas_of_wave(gemm, wave)
        run, runs, _ = place_of(gemm, item)
        for chunk in range(gemm.steps // CHUNK):
            job = (chunk * runs + run) * 4 + gl.arange(0, 4, FOUR)
            counter = gemm.items + (wave + job % count) * ITEM_WORDS + ITEM_STORED
            _wait(gemm, counter, job // count + 1)
            for i in gl.static_range(CHUNK):
                row = (run * gemm.decoded.DEPTH + block % gemm.decoded.DEPTH) * 256
                full = gemm.full.index(stage.idx)
                mbarrier.wait(gemm.empty.index(stage.idx), stage.phase)
                mbarrier.expect(full, 256 * 128)
                tma.async_copy_global_to_shared(
                    gemm.w, [row, 0], full, gemm.w_bufs.index(stage.idx)
                )
                stage = advance(stage, gemm.STAGES)
                block += 1


@gluon.jit
def _chunk_counter(gemm, chunk):
    """Where CTAs are counted that have read chunk number `chunk` of all their tiles."""
    return gemm.items + (chunk + 1) * ITEM_WORDS + ITEM_READ


@gluon.jit
def publish_read(gemm, blocks):
    """One warp: this CTA has read `blocks` K blocks of all its tiles; counted chunk by chunk."""
    if (blocks > 0) & (blocks % gemm.decoded.CHUNK == 0):
        counter = _chunk_counter(gemm, blocks // gemm.decoded.CHUNK - 1)
        gl.atomic_add(counter, 1, sem="release", scope="gpu")


@gluon.jit
def publish_rest(gemm, blocks, stage):
    """Publishes the blocks still in the ring; a CTA without a tile in the last wave also publishes
    every chunk that the others will read."""
    CHUNK: gl.constexpr = gemm.decoded.CHUNK
    for i in gl.static_range(gemm.STAGES):
        mbarrier.wait(gemm.empty.index(stage.idx), stage.phase)
        stage = advance(stage, gemm.STAGES)
        publish_read(gemm, blocks)
        blocks += 1
    for chunk in range((blocks - 1) // CHUNK, num_waves(gemm) * (gemm.steps // CHUNK)):
        gl.atomic_add(_chunk_counter(gemm, chunk), 1, sem="release", scope="gpu")


@gluon.jit
def _wait_until_read(gemm, chunk):
    """Wait until all CTAs have read their chunk number `chunk`."""
    if chunk >= 0:
        _wait(gemm, _chunk_counter(gemm, chunk), gl.num_programs(0))


@gluon.jit
def _slab(gemm, wave, job, runs):
    """The slab that a job decodes."""
    item = wave + (job >> 2) % runs
    return gl.load(gemm.items + item * ITEM_WORDS + ITEM_SLAB) + (job & 3)


@gluon.jit
def _post_job(gemm, slot, row, item, value):
    """load_jobs: what a job is, to `decode_jobs` and `publish_jobs`."""
    zero = gl.zeros([1], gl.int32, gl.BlockedLayout([1], [32], [gl.num_warps()], [0]))
    gemm.decoded.jobs.index(slot * JOB_WORDS + JOB_ROW).store(zero + row)
    gemm.decoded.jobs.index(slot * JOB_WORDS + JOB_ITEM).store(zero + item)
    gemm.decoded.jobs.index(slot * JOB_WORDS + JOB_VALUE).store(zero + value)


@gluon.jit
def _job_word(gemm, slot, WORD: gl.constexpr):
    LAYOUT: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    return gl.max(gemm.decoded.jobs.index(slot * JOB_WORDS + WORD).load(LAYOUT), 0)


@gluon.jit
def load_jobs(gemm):
    """One warp: loads FP4 words for this CTA's jobs, in each wave in which it has a tile.

    It also waits until the job's place in the ring has been read, so that `decode_jobs` waits for
    one thing only.
    """
    d = gemm.decoded
    RING: gl.constexpr = d.DEPTH // d.CHUNK
    chunks = gemm.steps // d.CHUNK
    before = 0  # chunks of earlier waves
    slot = first_stage(1)
    for wave in range(0, num_waves(gemm) * gl.num_programs(0), gl.num_programs(0)):
        if gl.load(gemm.items + (wave + gl.program_id(0)) * ITEM_WORDS + ITEM_EXPERT) >= 0:
            count = ctas_of_wave(gemm, wave)
            _, runs, place = place_of(gemm, wave + gl.program_id(0))
            for job in range(place, runs * 4 * chunks, count):
                chunk = fast_div(job >> 2, runs)
                slab = _slab(gemm, wave, job, runs)
                number = fast_div(job, count)  # of this CTA's jobs in the wave
                ring = ((job >> 2) - chunk * runs) * RING + (before + chunk) % RING
                row = ring * (d.CHUNK * 256) + (job & 3) * 64
                ready = d.ready.index(slot.idx)
                mbarrier.wait(d.free.index(slot.idx), slot.phase)
                _post_job(gemm, slot.idx, row, wave + job - number * count, number + 1)
                mbarrier.expect(ready, d.CHUNK * (4096 + 4 * PAIR_WORDS))
                tma.async_copy_global_to_shared(
                    d.words, [slab, chunk * (d.CHUNK * 4), 0], ready, d.word_bufs.index(slot.idx)
                )
                tma.async_copy_global_to_shared(
                    d.scale, [slab, chunk * (d.CHUNK * PAIR_WORDS)], ready,
                    d.scale_bufs.index(slot.idx),
                )  # fmt: skip
                _wait_until_read(gemm, before + chunk - RING)
                mbarrier.arrive(ready, count=1)
                slot = advance(slot, d.JOBS)
        before += chunks
    mbarrier.wait(d.free.index(slot.idx), slot.phase)
    _post_job(gemm, slot.idx, -1, 0, 0)
    mbarrier.arrive(d.ready.index(slot.idx), count=2)


@gluon.jit
def decode_jobs(gemm):
    """One warpgroup: the jobs, from their words to rows of the ring."""
    d = gemm.decoded
    row = gl.expand_dims(gl.arange(0, 64, gl.SliceLayout(1, _STORED_ROWS)), 1)
    col = gl.expand_dims(gl.arange(0, 128, gl.SliceLayout(0, _STORED_ROWS)), 0)
    slot = first_stage(0)
    mbarrier.wait(d.ready.index(slot.idx), slot.phase)
    first_row = _job_word(gemm, slot.idx, JOB_ROW)
    while first_row >= 0:
        for i in gl.static_range(d.CHUNK):
            at = slot.idx * d.CHUNK + i
            w, s = read_words(d.word_bufs, d.scale_bufs, at, d.JOBS * d.CHUNK)
            e4m3 = gl.convert_layout(e4m3_of_words(w, s, E4M3_OPERAND), _STORED_ROWS)
            to = d.ring + (first_row + i * 256).to(gl.int64) * 128
            gl.store(to + (row * 128 + col), e4m3)
        fence_async_shared()
        gl.thread_barrier()
        mbarrier.arrive(d.stored.index(slot.idx), count=1)
        mbarrier.arrive(d.free.index(slot.idx), count=1)
        slot = advance(slot, d.JOBS)
        mbarrier.wait(d.ready.index(slot.idx), slot.phase)
        first_row = _job_word(gemm, slot.idx, JOB_ROW)
    mbarrier.arrive(d.stored.index(slot.idx), count=1)


@gluon.jit
def publish_jobs(gemm):
    """One warp: publish the rows of finished jobs; the decoder does not wait for that."""
    d = gemm.decoded
    slot = first_stage(0)
    mbarrier.wait(d.stored.index(slot.idx), slot.phase)
    first_row = _job_word(gemm, slot.idx, JOB_ROW)
    while first_row >= 0:
        item = _job_word(gemm, slot.idx, JOB_ITEM)
        value = _job_word(gemm, slot.idx, JOB_VALUE)
        counter = gemm.items + item * ITEM_WORDS + ITEM_STORED
        gl.atomic_xchg(counter, value, sem="release", scope="gpu")
        mbarrier.arrive(d.free.index(slot.idx), count=1)
        slot = advance(slot, d.JOBS)
        mbarrier.wait(d.stored.index(slot.idx), slot.phase)
        first_row = _job_word(gemm, slot.idx, JOB_ROW)

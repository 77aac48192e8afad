"""FP4 weights of `straight`, decoded once per wave of tiles into rings in memory that L2 holds.

A wave is one tile of each CTA (`deal`). Tiles of a wave that share an expert's 256 weight rows form
a run, and a run has a ring of DEPTH K blocks, E4M3 [256, 128], which its tiles load by TMA. The
blocks are cut into jobs of 64 rows x CHUNK blocks, dealt over the decoding warpgroups of all CTAs,
K first. CTAs wait for each other, so all must be resident: a loader waits for the jobs of its next
chunk, a decoder until every CTA has read the blocks that lie DEPTH before its own. So a job waits
for reads of earlier blocks, and a read for the jobs of its block: nothing waits for a later one.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from megamoe.kernels.hopper.gemm.straight_epilogue import MMA
from megamoe.kernels.hopper.gemm.tile_scheduler import end_item, num_waves, place_of, tiles_of_wave
from megamoe.kernels.hopper.pipeline import advance, quotient, record
from megamoe.kernels.hopper.weights.decode import PAIR_WORDS, e4m3_of_words, read_words

# Until the word at $1 is $2 or more, for two seconds at most; then the word at $3 is set, so that
# all waits end, and the layer's error word at $4 is -1. The fence is for TMA, which reads what
# others wrote with plain stores.
AWAIT = gl.constexpr("""{
.reg .pred p;
.reg .b32 v, e;
.reg .b64 began, now;
ld.acquire.gpu.global.b32 v, [$1];
setp.ge.s32 p, v, $2;
@p bra DONE;
mov.u64 began, %globaltimer;
AGAIN:
nanosleep.u32 32;
ld.acquire.gpu.global.b32 v, [$1];
setp.ge.s32 p, v, $2;
@p bra DONE;
ld.relaxed.gpu.global.b32 e, [$3];
setp.ne.s32 p, e, 0;
@p bra DONE;
mov.u64 now, %globaltimer;
sub.u64 now, now, began;
setp.lt.u64 p, now, 2000000000;
@p bra AGAIN;
st.relaxed.gpu.global.b32 [$3], 1;
red.relaxed.gpu.global.min.s32 [$4], -1;
DONE:
bar.warp.sync 0xffffffff;
fence.proxy.async.global;
mov.b32 $0, 0;
}""")
# 64 rows x 128 of K: eight threads have a row, so that a store of a warp is whole lines.
_ROWS = gl.constexpr(gl.BlockedLayout([1, 16], [4, 8], [4, 1], [1, 0]))
LETTER = gl.constexpr(3)  # words: first row in the ring, item whose counter tells, its value


@record
class Ahead:
    """Where FP4 comes from and E4M3 goes to, the ring's size, and the jobs' own ring."""

    words: tma.tensor_descriptor  # int32 [slab, K / 32, 256]
    scale: tma.tensor_descriptor  # int32 [slab, K / 4]
    ring: gl.tensor  # E4M3 [run of the wave, DEPTH, 256 rows, 128]
    error: gl.tensor  # the layer's word: -1 where a wait was given up
    word_bufs: gl.shared_memory_descriptor
    scale_bufs: gl.shared_memory_descriptor
    letters: gl.shared_memory_descriptor
    ready: gl.shared_memory_descriptor  # a job's words are there, and its place in the ring is free
    stored: gl.shared_memory_descriptor
    free: gl.shared_memory_descriptor  # `decode_ahead` and `tell_jobs` are done with it
    DEPTH: gl.constexpr
    CHUNK: gl.constexpr
    JOBS: gl.constexpr


@gluon.jit
def await_word(p, at, value, given_up):
    """Until words at `at` have reached `value`; all threads of a role call it."""
    given = [at.to(gl.int64), value, given_up.to(gl.int64), p.ahead.error.to(gl.int64)]
    gl.inline_asm_elementwise(AWAIT, "=r,l,r,l,l", given, dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def _await(p, at, value):
    await_word(p, at, value, p.items + 7)


@gluon.jit
def load_decoded(p):
    """One warp: E4M3 rows from the ring of this CTA's run into the stages, chunk by chunk."""
    CHUNK: gl.constexpr = p.ahead.CHUNK
    FOUR: gl.constexpr = gl.DistributedLinearLayout([], [[1], [2], [0], [0], [0]], [], [], [4])
    idx = 0
    phase = 1
    block = 0  # of K, over all tiles
    for item in range(gl.program_id(0), end_item(p), gl.num_programs(0)):
        wave = item - gl.program_id(0)
        count = tiles_of_wave(p, wave)
        run, runs, _ = place_of(p, item)
        for chunk in range(p.steps // CHUNK):
            job = (chunk * runs + run) * 4 + gl.arange(0, 4, FOUR)
            _await(p, p.items + (wave + job % count) * 8 + 6, job // count + 1)
            for i in gl.static_range(CHUNK):
                row = (run * p.ahead.DEPTH + block % p.ahead.DEPTH) * 256
                ready = p.full.index(idx)
                mbarrier.wait(p.empty.index(idx), phase)
                mbarrier.expect(ready, 256 * 128)
                tma.async_copy_global_to_shared(p.w, [row, 0], ready, p.w_bufs.index(idx))
                idx, phase = advance(idx, phase, p.STAGES)
                block += 1


@gluon.jit
def _tell_chunk(p, chunk):
    gl.atomic_add(p.items + (chunk + 1) * 8 + 7, 1, sem="release", scope="gpu")


@gluon.jit
def tell_read(p, blocks):
    """One warp: this CTA has read so many K blocks of all its tiles; told chunk by chunk."""
    if (blocks > 0) & (blocks % p.ahead.CHUNK == 0):
        _tell_chunk(p, blocks // p.ahead.CHUNK - 1)


@gluon.jit
def tell_rest(p, blocks, idx, phase):
    """The last stages too; and, without a tile in the last wave, all that others will read."""
    CHUNK: gl.constexpr = p.ahead.CHUNK
    for i in gl.static_range(p.STAGES):
        mbarrier.wait(p.empty.index(idx), phase)
        idx, phase = advance(idx, phase, p.STAGES)
        tell_read(p, blocks)
        blocks += 1
    for chunk in range((blocks - 1) // CHUNK, num_waves(p) * (p.steps // CHUNK)):
        _tell_chunk(p, chunk)


@gluon.jit
def _await_read(p, chunk):
    """Until all CTAs have read their `chunk`-th chunk."""
    if chunk >= 0:
        _await(p, p.items + (chunk + 1) * 8 + 7, gl.num_programs(0))


@gluon.jit
def _slab(p, wave, job, runs):
    """The slab that a job decodes."""
    return gl.load(p.items + (wave + (job >> 2) % runs) * 8 + 5) + (job & 3)


@gluon.jit
def _write(p, slot, at, item, value):
    """The letter of a job."""
    zero = gl.zeros([1], gl.int32, gl.BlockedLayout([1], [32], [gl.num_warps()], [0]))
    p.ahead.letters.index(slot * LETTER).store(zero + at)
    p.ahead.letters.index(slot * LETTER + 1).store(zero + item)
    p.ahead.letters.index(slot * LETTER + 2).store(zero + value)


@gluon.jit
def _word(p, slot, i: gl.constexpr):
    LAYOUT: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    return gl.max(p.ahead.letters.index(slot * LETTER + i).load(LAYOUT), 0)


@gluon.jit
def load_jobs(p):
    """One warp: the words of this CTA's share of the jobs of each wave that it has a tile of.

    It also waits for whoever still reads the job's place in the ring, so that `decode_ahead` waits
    for one thing only.
    """
    a = p.ahead
    RING: gl.constexpr = a.DEPTH // a.CHUNK
    chunks = p.steps // a.CHUNK
    before = 0  # chunks of the waves before
    slot = 0
    phase = 1
    for wave in range(0, num_waves(p) * gl.num_programs(0), gl.num_programs(0)):
        if gl.load(p.items + (wave + gl.program_id(0)) * 8) >= 0:
            count = tiles_of_wave(p, wave)
            _, runs, place = place_of(p, wave + gl.program_id(0))
            for job in range(place, runs * 4 * chunks, count):
                chunk = quotient(job >> 2, runs)
                slab = _slab(p, wave, job, runs)
                turn = quotient(job, count)
                ring = ((job >> 2) - chunk * runs) * RING + (before + chunk) % RING
                to = ring * (a.CHUNK * 256) + (job & 3) * 64
                ready = a.ready.index(slot)
                mbarrier.wait(a.free.index(slot), phase)
                _write(p, slot, to, wave + job - turn * count, turn + 1)
                mbarrier.expect(ready, a.CHUNK * (4096 + 4 * PAIR_WORDS))
                tma.async_copy_global_to_shared(
                    a.words, [slab, chunk * (a.CHUNK * 4), 0], ready, a.word_bufs.index(slot)
                )
                tma.async_copy_global_to_shared(
                    a.scale, [slab, chunk * (a.CHUNK * PAIR_WORDS)], ready, a.scale_bufs.index(slot)
                )
                _await_read(p, before + chunk - RING)
                mbarrier.arrive(ready, count=1)
                slot, phase = advance(slot, phase, a.JOBS)
        before += chunks
    mbarrier.wait(a.free.index(slot), phase)
    _write(p, slot, -1, 0, 0)
    mbarrier.arrive(a.ready.index(slot), count=2)


@gluon.jit
def decode_ahead(p):
    """One warpgroup: the jobs, from their words to rows of the ring."""
    a = p.ahead
    DOT: gl.constexpr = gl.DotOperandLayout(0, MMA, 4)
    row = gl.expand_dims(gl.arange(0, 64, gl.SliceLayout(1, _ROWS)), 1)
    col = gl.expand_dims(gl.arange(0, 128, gl.SliceLayout(0, _ROWS)), 0)
    slot = 0
    phase = 0
    mbarrier.wait(a.ready.index(slot), phase)
    at = _word(p, slot, 0)
    while at >= 0:
        for i in gl.static_range(a.CHUNK):
            w, s = read_words(a.word_bufs, a.scale_bufs, slot * a.CHUNK + i, a.JOBS * a.CHUNK)
            e4m3 = gl.convert_layout(e4m3_of_words(w, s, DOT), _ROWS)
            to = a.ring + (at + i * 256).to(gl.int64) * 128
            gl.store(to + (row * 128 + col), e4m3)
        fence_async_shared()
        gl.thread_barrier()
        mbarrier.arrive(a.stored.index(slot), count=1)
        mbarrier.arrive(a.free.index(slot), count=1)
        slot, phase = advance(slot, phase, a.JOBS)
        mbarrier.wait(a.ready.index(slot), phase)
        at = _word(p, slot, 0)
    mbarrier.arrive(a.stored.index(slot), count=1)


@gluon.jit
def tell_jobs(p):
    """One warp: publish the rows of finished jobs; the decoder does not wait for that."""
    a = p.ahead
    slot = 0
    phase = 0
    mbarrier.wait(a.stored.index(slot), phase)
    at = _word(p, slot, 0)
    while at >= 0:
        item = _word(p, slot, 1)
        value = _word(p, slot, 2)
        gl.atomic_xchg(p.items + item * 8 + 6, value, sem="release", scope="gpu")
        mbarrier.arrive(a.free.index(slot), count=1)
        slot, phase = advance(slot, phase, a.JOBS)
        mbarrier.wait(a.stored.index(slot), phase)
        at = _word(p, slot, 0)

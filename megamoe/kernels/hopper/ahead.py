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
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from megamoe.kernels.hopper.deal import end_item, num_waves, place_of, tiles_of_wave
from megamoe.kernels.hopper.decode import TO_E4M3, WORDS
from megamoe.kernels.hopper.ring import advance, quotient, record

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
# The WORDS of a slab, turned so that a thread has a row's whole step; and then 64 rows of E4M3, 32
# words each, so that eight threads have a row.
_TURNED = gl.constexpr(
    gl.DistributedLinearLayout(
        [[0, 0, 0, 1, 0], [0, 0, 0, 2, 0], [1, 0, 0, 0, 0]],
        [[0, 0, 0, 0, 1], [0, 0, 0, 0, 2], [0, 0, 1, 0, 0], [0, 0, 2, 0, 0], [0, 0, 4, 0, 0]],
        [[0, 1, 0, 0, 0], [0, 2, 0, 0, 0]], [], [2, 4, 8, 4, 4],
    )
)  # fmt: skip
_ROWS = gl.constexpr(
    gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [1, 0], [8, 0]], [[0, 8], [0, 16], [0, 4], [2, 0], [4, 0]],
        [[16, 0], [32, 0]], [], [64, 32],
    )
)  # fmt: skip


@record
class Ahead:
    """Where FP4 comes from and E4M3 goes to, and the ring's size in K blocks."""

    words: gl.tensor  # int32 [expert, slab, K block, 1024]
    scale: gl.tensor  # int32 [expert, slab, K block, 64]
    ring: gl.tensor  # int32 [run of the wave, DEPTH, 256 rows, 32]
    error: gl.tensor  # the layer's word: -1 where a wait was given up
    DEPTH: gl.constexpr
    CHUNK: gl.constexpr


@gluon.jit
def _await(p, at, value):
    """Until words at `at` have reached `value`; all threads of a role call it."""
    given_up = (p.items + 7).to(gl.int64)
    gl.inline_asm_elementwise(
        AWAIT, "=r,l,r,l,l", [at.to(gl.int64), value, given_up, p.ahead.error.to(gl.int64)],
        dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


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
def _tell_done(p, item, jobs):
    """Publish the rows that all threads have stored: so many jobs of the item's place are done."""
    gl.thread_barrier()
    gl.atomic_xchg(p.items + item * 8 + 6, jobs, sem="release", scope="gpu")


@gluon.jit
def _load_slab(p, at):
    """The words of a slab's K block, and of each row the four scales as one word."""
    FLAT: gl.constexpr = gl.BlockedLayout([4], [32], [4], [0])
    SCALES: gl.constexpr = gl.DistributedLinearLayout(
        [[32]], [[0], [0], [1], [2], [4]], [[8], [16]], [], [64]
    )
    at = at.to(gl.int64)
    words = gl.load(p.ahead.words + at * 1024 + gl.arange(0, 1024, FLAT))
    return words, gl.load(p.ahead.scale + at * 64 + gl.arange(0, 64, SCALES))


@gluon.jit
def _store_slab(p, words, scale, at):
    """The slab as 64 rows of E4M3, `at` rows into the ring."""
    w = gl.convert_layout(words.reshape([2, 4, 8, 4, 4]), WORDS, assert_trivial=True)
    w = gl.convert_layout(w, _TURNED)
    THREADS: gl.constexpr = gl.SliceLayout(4, _TURNED)  # [upper rows, warp, g, t]
    ROWS: gl.constexpr = gl.SliceLayout(3, THREADS)
    s = gl.convert_layout(scale.reshape([2, 4, 8]), ROWS, assert_trivial=True)
    ONE: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, THREADS)))
    t = gl.expand_dims(gl.expand_dims(gl.expand_dims(gl.arange(0, 4, ONE), 0), 1), 2)
    s = gl.expand_dims(gl.expand_dims(s, 3) >> (8 * t) & 0xFF, 4)
    low, high = gl.inline_asm_elementwise(
        TO_E4M3, "=r,=r,r,r", [w, s], dtype=(gl.int32, gl.int32), is_pure=True, pack=1
    )
    e4m3 = gl.join(low, high).permute((1, 0, 2, 4, 5, 3)).reshape([64, 32])
    row = gl.expand_dims(gl.arange(0, 64, gl.SliceLayout(1, _ROWS)), 1)
    col = gl.expand_dims(gl.arange(0, 32, gl.SliceLayout(0, _ROWS)), 0)
    to = p.ahead.ring + at.to(gl.int64) * 32 + row * 32 + col
    gl.store(to, gl.convert_layout(e4m3, _ROWS))


@gluon.jit
def _fetch(p, at):
    """A slab's K blocks from `at` into L2, for whoever decodes them."""
    ONE: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    at = at.to(gl.int64)
    thread = gl.arange(0, 128, ONE)
    words = (p.ahead.words + at * 1024).to(gl.int64) + thread % (p.ahead.CHUNK * 32) * 128
    scale = (p.ahead.scale + at * 64).to(gl.int64) + thread % (p.ahead.CHUNK * 2) * 128
    gl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; prefetch.global.L2 [$2]; mov.b32 $0, 0;", "=r,l,l",
        [words, scale], dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def _slab(p, wave, job, runs):
    """The slab that a job decodes."""
    return gl.load(p.items + (wave + (job >> 2) % runs) * 8 + 5) + (job & 3)


@gluon.jit
def decode_ahead(p):
    """One warpgroup: this CTA's share of the jobs of each wave that it has a tile of."""
    a = p.ahead
    RING: gl.constexpr = a.DEPTH // a.CHUNK
    chunks = p.steps // a.CHUNK
    before = 0  # chunks of the waves before
    for wave in range(0, num_waves(p) * gl.num_programs(0), gl.num_programs(0)):
        if gl.load(p.items + (wave + gl.program_id(0)) * 8) >= 0:
            count = tiles_of_wave(p, wave)
            _, runs, place = place_of(p, wave + gl.program_id(0))
            slab = _slab(p, wave, place, runs)
            chunk = gl.minimum(quotient(place >> 2, runs), chunks - 1)
            w0, s0 = _load_slab(p, slab * p.steps + chunk * a.CHUNK)
            for job in range(place, runs * 4 * chunks, count):
                chunk = quotient(job >> 2, runs)
                at = slab * p.steps + chunk * a.CHUNK
                w1, s1 = _load_slab(p, at + 1)
                _fetch(p, slab * p.steps + gl.minimum(chunk + 2, chunks - 1) * a.CHUNK)
                ring = ((job >> 2) - chunk * runs) * RING + (before + chunk) % RING
                to = ring * (a.CHUNK * 256) + (job & 3) * 64
                _await_read(p, before + chunk - RING)
                for i in gl.static_range(a.CHUNK // 2 - 1):
                    _store_slab(p, w0, s0, to)
                    w0, s0 = _load_slab(p, at + 2)
                    _store_slab(p, w1, s1, to + 256)
                    w1, s1 = _load_slab(p, at + 3)
                    at += 2
                    to += 512
                _store_slab(p, w0, s0, to)
                slab = _slab(p, wave, job + count, runs)
                _store_slab(p, w1, s1, to + 256)
                chunk = gl.minimum(quotient(job + count >> 2, runs), chunks - 1)
                w0, s0 = _load_slab(p, slab * p.steps + chunk * a.CHUNK)
                turn = quotient(job, count)
                _tell_done(p, wave + job - turn * count, turn + 1)
        before += chunks

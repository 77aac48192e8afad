"""Synchronisation between CTAs and between launches of several ranks: counters, signals, waits.

A wait that does not see what it expects within its bound writes who, what, expected and seen to the
report, which every wait polls, and goes on: roles keep completing stages of the ring, so no other
wait is left pending and the launch ends. Its result is then worthless, and the host raises.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from megamoe.kernels.gluon.pipeline import bounded_wait, fence_stores

# Words of a rank's counters, each hot one in a cache line of its own.
POOL = gl.constexpr(0)  # parts of tokens that are in the pool
TICKET = gl.constexpr(32)  # tickets taken, beyond the two that every CTA has
DONE = gl.constexpr(64)  # CTAs, of any rank, that have no tile left
EXIT = gl.constexpr(96)  # CTAs that no longer need the counters; * 1024: tickets they had
FILLED = gl.constexpr(128)  # of each pool wave: parts of tokens that are in the pool
L2_DONE = gl.constexpr(160)  # of each pool wave: finished L2 tiles
L1_DONE = gl.constexpr(192)  # and on, of each tile of tokens: finished L1 tiles

# Words of a rank's signals: by rank, the number of the call that it has begun; then
CALL = gl.constexpr(31)  # the number of this rank's last call

# What a report names.
WAIT_POOL = gl.constexpr(1)
WAIT_L1 = gl.constexpr(2)
WAIT_DONE = gl.constexpr(3)
WAIT_TICKETS = gl.constexpr(4)
WAIT_RANK = gl.constexpr(5)
WAIT_WAVE = gl.constexpr(6)

# Unless $2 == $3: the words at $1 become 1, $4 to $7, $3 and $2, if they are not taken. Every
# thread by itself: warps of a role may see different values, so none may wait for another.
REPORT = gl.constexpr("""{
.reg .pred p;
.reg .b32 taken;
setp.eq.s32 p, $2, $3;
@p bra done;
atom.relaxed.gpu.global.cas.b32 taken, [$1], 0, 1;
setp.ne.s32 p, taken, 0;
@p bra done;
st.relaxed.gpu.global.b32 [$1+4], $4;
st.relaxed.gpu.global.b32 [$1+8], $5;
st.relaxed.gpu.global.b32 [$1+12], $6;
st.relaxed.gpu.global.b32 [$1+16], $7;
st.relaxed.gpu.global.b32 [$1+20], $3;
st.relaxed.gpu.global.b32 [$1+24], $2;
done:
mov.b32 $0, 0;
}""")


@gluon.constexpr_function
def _log2_bytes(dtype):
    return (dtype.element_ty.primitive_bitwidth // 8).bit_length() - 1


@gluon.jit
def on_rank(args, pointer, rank):
    """The same address in a rank's memory."""
    if args.RANKS > 1:
        pointer += gl.load(args.peers + rank) >> _log2_bytes(pointer.dtype)
    return pointer


@gluon.jit
def wait_for(cta, counter, want, WHAT: gl.constexpr, where):
    """Wait until `counter` is `want`; report it otherwise."""
    _wait(cta.args, cta.rank, counter, want, WHAT, where, "gpu")


@gluon.jit
def _wait(args, rank, counter, want, WHAT: gl.constexpr, where, SCOPE: gl.constexpr):
    seen = bounded_wait(counter, want, args.report, args.bound_ns, SCOPE, "eq")
    expect_equal(args, rank, seen, want, WHAT, where)


@gluon.jit
def expect_equal(args, rank, seen, want, WHAT: gl.constexpr, where):
    """Report it where what was seen is not what was wanted."""
    gl.inline_asm_elementwise(
        REPORT, "=r,l,r,r,r,r,r,r",
        [args.report.to(gl.int64), seen, want, rank, gl.program_id(0), gl.to_tensor(WHAT), where],
        dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def read_report(args):
    """The report's first word: not zero once a wait of the launch was given up.

    Read after a wait, it shows whether that one was.
    """
    return gl.atomic_add(args.report, 0, sem="relaxed", scope="gpu")


@gluon.jit
def wait_for_ranks(args, rank, cta_idx):
    """Signal to other launches' ranks that this one's tokens are there, and wait for theirs."""
    if args.RANKS > args.LOCAL:
        call = gl.load(args.signals + CALL) + 1
        if cta_idx == 0:
            for other in gl.static_range(args.RANKS):
                signal = on_rank(args, args.signals, other) + rank
                gl.atomic_xchg(signal, call, sem="release", scope="sys")
        for other in gl.static_range(args.RANKS):
            number = gl.to_tensor(other)
            _wait(args, rank, args.signals + other, call, WAIT_RANK, number, "sys")


@gluon.jit
def signal_done(cta):
    """Signal to all ranks that this CTA has no tile left.

    Not to other launches after a report: the rows are worthless.
    """
    args = cta.args
    SCOPE: gl.constexpr = "sys" if args.RANKS > args.LOCAL else "gpu"
    signals = cta.rank != args.absent_rank
    if args.RANKS > args.LOCAL:
        signals = signals & (read_report(args) == 0)
    if signals:
        for other in gl.static_range(args.RANKS):
            done = on_rank(args, args.counters, other) + DONE
            gl.atomic_add(done, 1, sem="release", scope=SCOPE)


@gluon.jit
def wait_for_done(cta):
    """Wait until no CTA of any rank has a tile left."""
    args = cta.args
    want = args.RANKS * cta.num_ctas
    SCOPE: gl.constexpr = "sys" if args.RANKS > args.LOCAL else "gpu"
    _wait(args, cta.rank, cta.counters + DONE, want, WAIT_DONE, cta.rank, SCOPE)


@gluon.jit
def publish_count(counter, amount):
    """One warpgroup: add to a counter after all that it stored."""
    fence_stores()
    gl.thread_barrier()
    gl.atomic_add(counter, amount, sem="release", scope="gpu")

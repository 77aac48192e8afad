"""How CTAs meet, and launches of several ranks: counters, signals, waits that end, a mailbox.

A wait that does not see what it expects within its bound writes who, what, expected and seen to
the report, which every wait polls, and goes on: roles keep completing stages of the ring, so
nothing is left waiting and the launch ends. Its result is then worth nothing, and the host raises.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

# Words of a rank's counters, each hot one in a line of its own.
POOL = gl.constexpr(0)  # parts of tokens that are in the pool
TICKET = gl.constexpr(32)  # tiles that were dealt
DONE = gl.constexpr(64)  # CTAs, of any rank, that have no tile left
EXIT = gl.constexpr(96)  # CTAs that need the counters no more
FILLED = gl.constexpr(128)  # of each wave of a ring: parts of tokens that are in the pool
SECONDS = gl.constexpr(160)  # its finished L2 tiles
READY = gl.constexpr(192)  # and on: finished L1 tiles of each tile of tokens

# Words of a rank's signals: by rank, the number of the call that it has begun; then
CALL = gl.constexpr(31)  # the number of this rank's last call

# What a report names.
WAIT_POOL = gl.constexpr(1)
WAIT_READY = gl.constexpr(2)
WAIT_DONE = gl.constexpr(3)
WAIT_TICKETS = gl.constexpr(4)
WAIT_RANK = gl.constexpr(5)
WAIT_WAVE = gl.constexpr(6)

MAIL = gl.constexpr(7)  # words of a letter: kind, ticket, tile, row tile, expert, first, end row

# Until [$1] == $2, or a report, or $4 nanoseconds. Acquires, also for copies by TMA after it.
_WAIT_TEXT = """{
.reg .pred p;
.reg .b32 n, r;
.reg .b64 begin, now;
mov.u64 begin, %globaltimer;
mov.u32 n, 0;
again:
ld.acquire.gpu.global.u32 $0, [$1];
setp.eq.s32 p, $0, $2;
@p bra done;
add.u32 n, n, 1;
and.b32 r, n, 15;
setp.ne.u32 p, r, 0;
@p bra again;
ld.relaxed.gpu.global.u32 r, [$3];
setp.ne.u32 p, r, 0;
@p bra done;
mov.u64 now, %globaltimer;
sub.u64 now, now, begin;
setp.lt.u64 p, now, $4;
@p bra again;
done:
bar.warp.sync 0xffffffff;
fence.proxy.async.global;
}"""
_WAIT = gl.constexpr(_WAIT_TEXT)
_WAIT_SYSTEM = gl.constexpr(_WAIT_TEXT.replace("acquire.gpu", "acquire.sys"))

# Unless $2 == $3: the words at $1 become 1, $4 to $7, $3 and $2, if they are not taken. By each
# thread for itself: warps of a role may see different numbers, so none may wait for another.
_REPORT = gl.constexpr("""{
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
def of_rank(c, pointer, rank):
    """The same place in a rank's memory."""
    if c.RANKS > 1:
        pointer += gl.load(c.peers + rank) >> _log2_bytes(pointer.dtype)
    return pointer


@gluon.jit
def wait_for(m, counter, want, WHAT: gl.constexpr, where):
    """Until `counter` is `want`; otherwise it is reported."""
    _wait(m.call, m.rank, counter, want, WHAT, where, _WAIT)


@gluon.jit
def _wait(c, rank, counter, want, WHAT: gl.constexpr, where, ASM: gl.constexpr):
    address = counter.to(gl.int64)
    report = c.report.to(gl.int64)
    seen = gl.inline_asm_elementwise(
        ASM, "=&r,l,r,l,l", [address, want, report, c.bound_ns], dtype=gl.int32,
        is_pure=False, pack=1,
    )  # fmt: skip
    expect(c, rank, seen, want, WHAT, where)


@gluon.jit
def expect(c, rank, seen, want, WHAT: gl.constexpr, where):
    """Report it where what was seen is not what was wanted."""
    gl.inline_asm_elementwise(
        _REPORT, "=r,l,r,r,r,r,r,r",
        [c.report.to(gl.int64), seen, want, rank, gl.program_id(0), gl.to_tensor(WHAT), where],
        dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def greet(c, rank, cta):
    """Ranks of other launches: say that this one's tokens are there, wait for theirs."""
    if c.RANKS > c.LOCAL:
        call = gl.load(c.signals + CALL) + 1
        if cta == 0:
            for other in gl.static_range(c.RANKS):
                signal = of_rank(c, c.signals, other) + rank
                gl.atomic_xchg(signal, call, sem="release", scope="sys")
        for other in gl.static_range(c.RANKS):
            number = gl.to_tensor(other)
            _wait(c, rank, c.signals + other, call, WAIT_RANK, number, _WAIT_SYSTEM)


@gluon.jit
def tell_done(m):
    """Tell all ranks that this CTA has no tile left.

    Other launches learn nothing after a report: the rows are worth nothing.
    """
    c = m.call
    SCOPE: gl.constexpr = "sys" if c.RANKS > c.LOCAL else "gpu"
    speaks = m.rank != c.absent
    if c.RANKS > c.LOCAL:
        speaks = speaks & (gl.atomic_add(c.report, 0, sem="relaxed", scope="gpu") == 0)
    if speaks:
        for other in gl.static_range(c.RANKS):
            done = of_rank(c, c.counters, other) + DONE
            gl.atomic_add(done, 1, sem="release", scope=SCOPE)


@gluon.jit
def wait_for_done(m):
    """Until no CTA of any rank has a tile left."""
    c = m.call
    want = c.RANKS * m.num_ctas
    ASM: gl.constexpr = _WAIT_SYSTEM if c.RANKS > c.LOCAL else _WAIT
    _wait(c, m.rank, m.counters + DONE, want, WAIT_DONE, m.rank, ASM)


@gluon.jit
def publish_stores():
    """Every storing thread, before the count: what it stored may be read by TMA."""
    gl.inline_asm_elementwise(
        "fence.proxy.async.global; mov.b32 $0, 0;", "=r", [], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def add_to(counter, amount):
    """Count after all that this warpgroup stored."""
    publish_stores()
    gl.thread_barrier()
    gl.atomic_add(counter, amount, sem="release", scope="gpu")


@gluon.jit
def send(m, i, kind, ticket, tile, across, expert, first, end):
    """deal: letter i to the other roles of its CTA."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    slot = i & 1
    mbarrier.wait(m.mail_read.index(slot), ((i >> 1) & 1) ^ 1)
    zero = gl.zeros([1], gl.int32, LAYOUT)
    m.mail.index(slot * MAIL).store(zero + kind)
    m.mail.index(slot * MAIL + 1).store(zero + ticket)
    m.mail.index(slot * MAIL + 2).store(zero + tile)
    m.mail.index(slot * MAIL + 3).store(zero + across)
    m.mail.index(slot * MAIL + 4).store(zero + expert)
    m.mail.index(slot * MAIL + 5).store(zero + first)
    m.mail.index(slot * MAIL + 6).store(zero + end)
    mbarrier.arrive(m.mail_sent.index(slot), count=1)


@gluon.jit
def wait_until_read(m, i):
    """deal: until all roles have letter i, so that its tile has begun."""
    mbarrier.wait(m.mail_read.index(i & 1), (i >> 1) & 1)


@gluon.jit
def receive(m, i):
    """Letter i: (kind, ticket, tile, row tile, expert, first row, end row); kind -1 is the last.

    A fill has a wave instead of a tile, and its number there instead of a row tile.
    """
    LAYOUT: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    slot = i & 1
    mbarrier.wait(m.mail_sent.index(slot), (i >> 1) & 1)
    kind = gl.max(m.mail.index(slot * MAIL).load(LAYOUT), 0)
    ticket = gl.max(m.mail.index(slot * MAIL + 1).load(LAYOUT), 0)
    tile = gl.max(m.mail.index(slot * MAIL + 2).load(LAYOUT), 0)
    across = gl.max(m.mail.index(slot * MAIL + 3).load(LAYOUT), 0)
    expert = gl.max(m.mail.index(slot * MAIL + 4).load(LAYOUT), 0)
    first = gl.max(m.mail.index(slot * MAIL + 5).load(LAYOUT), 0)
    end = gl.max(m.mail.index(slot * MAIL + 6).load(LAYOUT), 0)
    mbarrier.arrive(m.mail_read.index(slot), count=1)
    return kind, ticket, tile, across, expert, first, end

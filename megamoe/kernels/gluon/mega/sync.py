"""Synchronisation between CTAs and between launches of several ranks: counters, signals, waits.

A wait that times out writes its CTA, what it waited for, what it expected and what it saw to the
report, which every wait polls, and goes on: roles keep completing stages of the ring, so no other
wait is left pending and the launch ends. Its result is then worthless, and the host raises.
"""

from triton.experimental import gluon

from megamoe.kernels.gluon.compat import gl
from megamoe.kernels.gluon.pipeline import bounded_wait, fence_stores

# Words of a rank's counters, each hot one in a cache line of its own.
POOL = gl.constexpr(0)  # parts of tokens that are in the pool
TICKET = gl.constexpr(32)  # tickets taken, beyond the two that every CTA has
DONE = gl.constexpr(64)  # CTAs that have no tile left
EXIT = gl.constexpr(96)  # CTAs that no longer need the counters; * EXIT_TICKET: their tickets
PUSHED = gl.constexpr(112)  # several ranks: CTAs that have pushed their tokens; before EXIT counts
FILLED = gl.constexpr(128)  # of each pool wave: parts of tokens that are in the pool
L2_DONE = gl.constexpr(160)  # of each pool wave: finished L2 tiles
L1_DONE = gl.constexpr(192)  # and on, of each tile of tokens: finished L1 tiles
EXIT_TICKET = gl.constexpr(1024)  # what a ticket adds to EXIT; a CTA adds 1

# Words of a rank's signals. Calls are numbered; nothing is counted or cleared here, so a number is
# stored, not added, and a wait is for this one or any later one.
BEGUN = gl.constexpr(0)  # by rank, the last call whose tokens it has pushed here
ENDED = gl.constexpr(8)  # by rank, the last call in which it has no tile left
LAST_CALL = gl.constexpr(31)  # the number of this rank's last call
TIMED_OUT = gl.constexpr(2**31 - 1)  # stored in place of a call number: the rank timed out

# What a report names.
WAIT_POOL = gl.constexpr(1)
WAIT_L1 = gl.constexpr(2)
WAIT_DONE = gl.constexpr(3)
WAIT_TICKETS = gl.constexpr(4)
WAIT_RANK = gl.constexpr(5)
WAIT_WAVE = gl.constexpr(6)
WAIT_PEER = gl.constexpr(7)
WAIT_END = gl.constexpr(8)
LAUNCH_MISMATCH = gl.constexpr(9)  # no wait: a rank planned its launch for other bounds

# Bytes of a report's words from its first one, which is 1 once they are written.
_RANK, _CTA, _WHAT, _WHERE, _WANT, _VALUE = range(4, 28, 4)
# Unless $2 == $3, and unless there is one: the report at $1 becomes rank $4, CTA $5, what $6,
# where $7, expected $3, seen $2. Every thread by itself: warps of a role may see different values,
# so none may wait for another.
REPORT = gl.constexpr(f"""{{
.reg .pred p;
.reg .b32 taken;
setp.eq.s32 p, $2, $3;
@p bra done;
atom.relaxed.gpu.global.cas.b32 taken, [$1], 0, 1;
setp.ne.s32 p, taken, 0;
@p bra done;
st.relaxed.gpu.global.b32 [$1+{_RANK}], $4;
st.relaxed.gpu.global.b32 [$1+{_CTA}], $5;
st.relaxed.gpu.global.b32 [$1+{_WHAT}], $6;
st.relaxed.gpu.global.b32 [$1+{_WHERE}], $7;
st.relaxed.gpu.global.b32 [$1+{_WANT}], $3;
st.relaxed.gpu.global.b32 [$1+{_VALUE}], $2;
done:
mov.b32 $0, 0;
}}""")


@gluon.constexpr_function
def log2_bytes(dtype):
    return (dtype.element_ty.primitive_bitwidth // 8).bit_length() - 1


@gluon.jit
def on_rank(args, pointer, rank):
    """The same address in another rank's buffer; alignment is kept because buffers are multiples of
    128 bytes apart."""
    if args.RANKS > 1:
        LOG2: gl.constexpr = log2_bytes(pointer.dtype)
        pointer += gl.multiple_of(gl.load(args.peers + rank) >> LOG2, 128 >> LOG2)
    return pointer


@gluon.jit
def own(args, pointer, rank):
    """The same address in the memory of a rank of this launch."""
    if args.LOCAL > 1:
        pointer = on_rank(args, pointer, rank)
    return pointer


@gluon.jit
def num_own_tokens(args, rank):
    """Tokens of a rank of this launch; the rest of its buffer is padding."""
    num_tokens = args.tokens_per_rank
    if args.HAS_COUNT:
        num_tokens = gl.minimum(gl.load(own(args, args.num_valid, rank)), num_tokens)
    return num_tokens


@gluon.jit
def wait_for(cta, counter, want, WHAT: gl.constexpr, where):
    """Wait until `counter` is `want`; report it otherwise."""
    args = cta.args
    value = bounded_wait(counter, want, args.report, args.bound_ns, "gpu", "eq")
    expect_equal(args, cta.rank, value, want, WHAT, where)


@gluon.jit
def expect_equal(args, rank, value, want, WHAT: gl.constexpr, where):
    """Write the report if `value` differs from `want`."""
    report_difference(args, rank, value, want, gl.to_tensor(WHAT), where)


@gluon.jit
def report_difference(args, rank, value, want, what, where):
    """The same of what is known on the device alone; anything with a `report` will do for args."""
    gl.inline_asm_elementwise(
        REPORT, "=r,l,r,r,r,r,r,r",
        [args.report.to(gl.int64), value, want, rank, gl.program_id(0), what, where],
        dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def read_report(args):
    """The report's first word: not zero once a wait of the launch was given up.

    Read after a wait, it shows whether that one was.
    """
    return gl.atomic_add(args.report, 0, sem="relaxed", scope="gpu")


# -- between ranks -------------------------------------------------------------------------------


@gluon.constexpr_function
def signal_text(scope):
    """PTX: the words at $1 become $2 where $3 is not 0, after all stores that happen before in this
    thread.

    One fence for all of a warp's words, then plain stores: PCIe has no atomics.
    """
    return f"""{{
.reg .pred p;
setp.ne.s32 p, $3, 0;
fence.acq_rel.{scope};
@p st.relaxed.{scope}.global.b32 [$1], $2;
mov.b32 $0, 0;
}}"""


@gluon.constexpr_function
def _scope(args):
    """Of words that ranks share."""
    return "sys" if args.RANKS > args.LOCAL else "gpu"


@gluon.jit
def _lanes():
    """[32]: a word for every thread of a warp; every warp has all of them."""
    return gl.arange(0, 32, gl.BlockedLayout([1], [32], [gl.num_warps()], [0]))


@gluon.jit
def _call(args, rank):
    """The number of this call."""
    return gl.load(own(args, args.signals, rank) + LAST_CALL) + 1


@gluon.jit
def _see_ranks(args, rank, WORD: gl.constexpr, call, bound_ns):
    """[32] signal words, one per rank, once all have reached this call; lanes beyond RANKS repeat
    the last rank."""
    number = gl.minimum(_lanes(), args.RANKS - 1)
    words = own(args, args.signals, rank) + WORD + number
    return bounded_wait(words, call + 0 * number, args.report, bound_ns, _scope(args), "ge")


@gluon.jit
def _signal_ranks(args, rank, WORD: gl.constexpr, value, to):
    """This rank's word in the signals of all ranks, where `to` [32] is not 0."""
    number = gl.minimum(_lanes(), args.RANKS - 1)
    words = on_rank(args, args.signals + (WORD + rank), number)
    TEXT: gl.constexpr = signal_text(_scope(args))
    to = gl.where(_lanes() < args.RANKS, to, 0)
    gl.inline_asm_elementwise(
        TEXT, "=r,l,r,r", [words.to(gl.int64), value + 0 * number, to], dtype=gl.int32,
        is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def _expect_ranks(args, rank, value, call, WHAT: gl.constexpr):
    """Report the ranks that do not say this call; -> whether all do."""
    number = gl.minimum(_lanes(), args.RANKS - 1)
    timed_out = value == TIMED_OUT
    what = gl.where(timed_out, WAIT_PEER, WHAT)
    value = gl.where(timed_out, value, gl.minimum(value, call))
    report_difference(args, rank, value, call + 0 * number, what, number)
    return gl.min((value == call).to(gl.int32), 0) != 0


@gluon.jit
def wait_for_ranks(args, rank, num_ctas):
    """After this CTA's pushes: the rank's last CTA signals them to all ranks; wait for theirs.

    -> whether this CTA saw all ranks; if not, what lies in the inbox is no call's.
    """
    call = _call(args, rank)
    gl.thread_barrier()
    pushed = own(args, args.counters, rank) + PUSHED
    num = gl.atomic_add(pushed, 1, sem="acq_rel", scope="gpu")
    if num == num_ctas - 1:
        _signal_ranks(args, rank, BEGUN, call, 1 + 0 * _lanes())
    value = _see_ranks(args, rank, BEGUN, call, args.bound_ns)
    return _expect_ranks(args, rank, value, call, WAIT_RANK)


@gluon.jit
def signal_done(cta):
    """Signal that this CTA has no tile left; the rank's last one signals it to all ranks.

    After a report the rows are worthless, and peers need not wait for them: a signal says so. Only
    those that have begun this call: nothing is known of the others' memory.
    """
    args = cta.args
    if args.RANKS == 1:
        if cta.rank != args.absent_rank:
            gl.atomic_add(args.counters + DONE, 1, sem="release", scope="gpu")
    else:
        num = gl.atomic_add(cta.counters + DONE, 1, sem="acq_rel", scope="gpu")
        if (num == cta.num_ctas - 1) & (cta.rank != args.absent_rank):
            call = _call(args, cta.rank)
            begun = _see_ranks(args, cta.rank, BEGUN, call, 0 * args.bound_ns)
            value = gl.where(read_report(args) == 0, call, TIMED_OUT)
            _signal_ranks(args, cta.rank, ENDED, value, (begun >= call).to(gl.int32))


@gluon.jit
def wait_for_done(cta):
    """Wait until no CTA of any rank has a tile left."""
    args = cta.args
    if args.RANKS == 1:
        want = args.RANKS * cta.num_ctas
        wait_for(cta, cta.counters + DONE, want, WAIT_DONE, cta.rank)
    else:
        call = _call(args, cta.rank)
        value = _see_ranks(args, cta.rank, ENDED, call, args.bound_ns)
        _expect_ranks(args, cta.rank, value, call, WAIT_END)


@gluon.jit
def publish_count(counter, amount):
    """One warpgroup: add to a counter after all that it stored."""
    fence_stores()
    gl.thread_barrier()
    gl.atomic_add(counter, amount, sem="release", scope="gpu")

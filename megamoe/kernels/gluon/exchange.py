"""The pushed exchange between ranks: which tokens go to which rank, without a peer being read.

A source quantises its tokens once, into records that owners of experts read (`quantize_tokens`),
and sorts its own slots (`permute.place`). `exchange_kernel`, one CTA for each peer, then writes

  counts_in[source]   slots of each of the owner's experts
  list_in[source]     token * slots + slot of each of them, by expert, in order; weight_in beside it

into the owner's memory, 16 bytes a thread, and signals once: a store that releases at system scope.
The same CTA waits for that peer's signal. `finish_kernel` does the same at the end of a call, when
this rank's rows have been written to their tokens' ranks. Waits are bounded; one that times out
writes the layer's report, and signals every peer in `state[STOP]`, which all waits between ranks
read; so does a rank whose own GEMMs gave up, whose rows are worthless. No word is added to by a
peer.

Words that ranks wait for; numbers of calls only grow, so a wait is for this one or a later one

  word           becomes     stored by                               awaited by
  begun[source]  the call's  the source's exchange_kernel, last      exchange_kernel here
  done[owner]    the call's  the owner's finish_kernel, after rows   finish_kernel here
  state[STOP]    1 + a rank  a rank whose wait timed out              every wait, beside its own
  state[MISSED]  1           exchange_kernel here                    no wait; read by `pull`
  state[CALL]    + 1         `_rows_kernel` here                     no wait; read by launches

A call begins once every rank has ended the one before it (`finish_kernel`), so no region of the
exchange is written while it may still be read. Calls are numbered on the GPU: `state[CALL]`.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.experimental import gluon

from megamoe.kernels.common.columns import token_column
from megamoe.kernels.common.compat import after_previous, overlap
from megamoe.kernels.common.numbers import Kind
from megamoe.kernels.gluon.compat import gl
from megamoe.kernels.gluon.dispatch import quantised, ready_codes, token_codes
from megamoe.kernels.gluon.mega.sync import log2_bytes, report_difference
from megamoe.kernels.gluon.pipeline import (
    allow_next_launch,
    bounded_wait,
    now_ns,
    record,
    wait_for_launch,
    wait_until,
)
from megamoe.layout.pushed import LIST_ALIGN, MAX_SOURCES, TokenWords
from megamoe.planner.launches import Launch

# Words of `state`.
CALL = gl.constexpr(0)  # number of the last call that this rank has planned
STOP = gl.constexpr(1)  # 1 + the rank that gave up; 0: none. Peers write it, at any time
SAW_MISMATCH = gl.constexpr(64)  # is added there where some rank saw calls with different bounds
MISSED = gl.constexpr(2)  # 1: this rank did not see every peer's lists; its own, for `pull`
# Words of `begun`: by rank, the call that it pushed, and the tokens that it planned it for.
LIMIT = gl.constexpr(MAX_SOURCES // 2)

# What a report names, after those of fused launches.
WAIT_BEGUN = gl.constexpr(16)
WAIT_ROWS = gl.constexpr(17)
WAIT_STOPPED = gl.constexpr(18)
CALL_MISMATCH = gl.constexpr(19)  # no wait: a rank planned its call for another bound
PEER_MISMATCH = gl.constexpr(20)  # a peer saw different bounds and stopped the call

ALIGN = gl.constexpr(LIST_ALIGN)
_STEP = gl.constexpr(1024)  # words of a copy: 16 bytes of each thread

# One thread: the word at $1 becomes $2, after all that the CTA stored. It is cumulative: stores of
# other threads came before a barrier of the CTA, those of earlier launches before this one.
SIGNAL = gl.constexpr("""{
.reg .pred p;
.reg .b32 t;
mov.u32 t, %tid.x;
setp.ne.u32 p, t, 0;
@p bra done;
st.release.sys.global.b32 [$1], $2;
done:
mov.b32 $0, 0;
}""")

# Unless $2 >= $3: the word at $1 becomes $4.
STORE_IF_MISSED = gl.constexpr("""{
.reg .pred p;
setp.ge.s32 p, $2, $3;
@p bra done;
st.relaxed.sys.global.b32 [$1], $4;
done:
mov.b32 $0, 0;
}""")


@triton.jit
def _quantize_kernel(
    x, x_scale, x_stride, g, g_stride, data, words, hidden, width, data_pitch, pitch, scales_at,
    factor_at,
    ACTS: tl.constexpr, READY: tl.constexpr, HAS_G: tl.constexpr, BY_GROUP: tl.constexpr,
    COLS: tl.constexpr,
):  # fmt: skip
    """Program (token, block of columns): the token's record, in the pool's format.

    data and words are the same memory, as the pool's elements and as FP32. Bits are those of
    `dispatch._pool_kernel`. Scales that are placed in the pool are bytes here, group after group.
    """
    after_previous()
    token = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    if ACTS.STORED_AS == "placed":
        _quantize_bytes(
            x + token * x_stride, x_scale + token * tl.cdiv(hidden, ACTS.GROUP),
            g + token * g_stride, data + token * data_pitch, part * COLS, hidden, width,
            4 * scales_at, ACTS, READY, HAS_G, COLS,
        )  # fmt: skip
    else:
        col = part * COLS + tl.arange(0, COLS)
        block = part * (COLS // 128) + tl.arange(0, COLS // 128)
        place_of = part * COLS + token_column(tl.arange(0, COLS)) if BY_GROUP else col
        source = tl.load(x + token * x_stride + place_of, mask=place_of < hidden, other=0)
        to_scale = words + token * pitch + scales_at + block
        if READY or ACTS.STORED_AS == "plain":
            values = source
            if READY and ACTS.STORED_AS != "values" and ACTS.STORED_AS != "plain":
                blocks = tl.cdiv(hidden, 128)
                scales = tl.load(x_scale + token * blocks + block, mask=block < blocks, other=1.0)
                tl.store(to_scale, scales, mask=block < width // 128)
        else:
            by = tl.load(g + token * g_stride) if HAS_G else 1.0
            values, stored = quantised(source, by, ACTS, COLS)
            if ACTS.STORED_AS != "values":
                tl.store(to_scale, tl.reshape(stored, (COLS // 128,)), mask=block < width // 128)
        tl.store(data + token * data_pitch + col, values, mask=col < width)
    if HAS_G and part == 0:
        tl.store(words + token * pitch + factor_at, tl.load(g + token * g_stride))


@triton.jit
def _quantize_bytes(
    x_row, scale_row, g_at, record, first_col, hidden, width, scales_at, ACTS: tl.constexpr,
    READY: tl.constexpr, HAS_G: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """COLS columns of a token: codes, and a byte of scale a group, to its record in bytes."""
    PACK: tl.constexpr = 8 // ACTS.BITS
    if READY:
        codes, stored = ready_codes(x_row, scale_row, first_col, hidden, ACTS, COLS)
    else:
        by = tl.load(g_at) if HAS_G else 1.0
        codes, stored = token_codes(x_row, by, first_col, hidden, ACTS, COLS)
    byte = first_col // PACK + tl.arange(0, COLS // PACK)
    tl.store(record + byte, codes, mask=byte < width // PACK)
    group = first_col // ACTS.GROUP + tl.arange(0, COLS // ACTS.GROUP)
    to_scale = record + scales_at + group
    tl.store(to_scale, stored.to(tl.uint8), mask=group < width // ACTS.GROUP)


def quantize_tokens(
    x: Tensor,
    acts: Kind,
    tokens: Tensor,
    words: TokenWords,
    raw: Tensor,
    step: Launch,
    *,
    x_scale: Tensor | None = None,
    g: Tensor | None = None,
    is_ready: bool = False,
    by_group: bool = False,
    hidden: int = 0,
    pdl: bool = False,
) -> None:
    """x [T, H] into the records `tokens`, FP32 [T, pitch]; `raw` is the same memory by element.

    hidden  where x has two values a byte
    """
    per_word = 4 // raw.element_size()
    is_placed = acts.STORED_AS.value == "placed"
    pack = 8 // acts.BITS.value if is_placed else 1
    if x_scale is not None and is_placed:
        x_scale = x_scale.view(torch.uint8)
    _quantize_kernel[step.grid](
        x=x if x.element_size() > 1 else x.view(raw.dtype),
        x_scale=x if x_scale is None else x_scale, x_stride=x.stride(0), g=x if g is None else g,
        g_stride=0 if g is None or g.ndim == 0 else 1, data=raw, words=tokens,
        hidden=hidden or x.shape[1], width=words.data * per_word * pack,
        data_pitch=words.pitch * per_word, pitch=words.pitch,
        scales_at=words.data, factor_at=words.data + words.scales,
        ACTS=acts, READY=is_ready, HAS_G=g is not None, BY_GROUP=by_group,
        **step.config.constants(), **overlap(pdl),
    )  # fmt: skip


# -- signals -------------------------------------------------------------------------------------


@record
class Peers:
    """This rank among its peers."""

    peers: gl.tensor  # int64 [R]: bytes from a place here to the same place there
    rank: gl.tensor
    state: gl.tensor
    report: gl.tensor
    bound_ns: gl.tensor
    RANKS: gl.constexpr


@gluon.jit
def at_peer(peers, pointer, peer):
    """The same place in a peer's memory; mappings and regions lie at multiples of 128 bytes."""
    LOG2: gl.constexpr = log2_bytes(pointer.dtype)
    return pointer + gl.multiple_of(gl.load(peers + peer) >> LOG2, 128 >> LOG2)


@gluon.jit
def _signal(pointer, call):
    """All threads of a CTA: what it stored is there, and the word at `pointer` becomes `call`."""
    gl.thread_barrier()
    gl.inline_asm_elementwise(
        SIGNAL, "=r,l,r", [pointer.to(gl.int64), call], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def _await_peer(p, word, call, peer, WHAT: gl.constexpr):
    """Wait until a peer's signal here is `call` or later; report it and signal all peers if not.

    -> the value that was read.
    """
    stop = p.state + STOP
    value = bounded_wait(word, call, stop, p.bound_ns, "sys", "ge")
    stopped_by = gl.load(stop, volatile=True)
    # The wait can never succeed once a peer gave up: forward that peer's reason.
    saw_mismatch = stopped_by > SAW_MISMATCH
    why = gl.where(saw_mismatch, PEER_MISMATCH, WAIT_STOPPED)
    what = gl.where(stopped_by > 0, why, WHAT)
    where = gl.where(stopped_by > 0, (stopped_by - 1) % SAW_MISMATCH, peer)
    report_difference(p, p.rank, gl.minimum(value, call), call, what, where)
    # Name the first rank that gave up, not the one that forwards it.
    _signal_timeout(p, value, call, gl.where(stopped_by > 0, stopped_by, p.rank + 1))
    return value


@gluon.jit
def _expect_limit(p, limits, limit, peer, has_pushed):
    """Report a peer that planned this call for another bound, and signal it; -> 1: it did not.

    Lists, rows and tiles are as large as the bound asks for: with more they would be cut.
    """
    theirs = gl.load(limits + peer, volatile=True)
    theirs = gl.where(has_pushed, theirs, limit)
    report_difference(p, p.rank, theirs, limit, gl.to_tensor(CALL_MISMATCH), peer)
    is_same = (theirs == limit).to(gl.int32)
    _signal_timeout(p, is_same, gl.to_tensor(1), p.rank + 1 + SAW_MISMATCH)
    return is_same


@gluon.jit
def _signal_timeout(p, last, want, value):
    """Unless `last` >= `want`: signal all ranks, with `value`, that this one gave up."""
    for other in range(p.RANKS):
        _store_if_missed(at_peer(p.peers, p.state + STOP, other), last, want, value)


@gluon.jit
def _store_if_missed(pointer, last, want, value):
    gl.inline_asm_elementwise(
        STORE_IF_MISSED, "=r,l,r,r,r", [pointer.to(gl.int64), last, want, value], dtype=gl.int32,
        is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def _copy(source, into, begin, num_eights):
    """num_eights * ALIGN words from `source[begin]` on to `into[0]` on, 16 bytes a thread."""
    WIDE: gl.constexpr = gl.BlockedLayout([4], [32], [gl.num_warps()], [0])
    at = gl.arange(0, _STEP, WIDE)
    num = num_eights * ALIGN
    for start in range(0, num, _STEP):
        mask = start + at < num
        gl.store(into + start + at, gl.load(source + begin + start + at, mask=mask), mask=mask)


@gluon.jit(do_not_specialize=["rank", "bound_ns", "limit"])
def exchange_kernel(
    counts, slots, slot_weights, counts_in, list_in, weight_in, begun, state, peers, report, rank,
    bound_ns, local_experts, pitch, capacity, limit,
    RANKS: gl.constexpr, EXPERTS: gl.constexpr, LOCAL: gl.constexpr,
):  # fmt: skip
    """CTA: one peer's share of the sorted slots into its memory, a signal, and the peer's signal.

    counts        int32 [experts of all ranks]: this rank's slots of each
    slots         int32: its slots by expert; each expert's begin at a multiple of ALIGN
    limit         tokens of a rank that this call is planned for, on all ranks alike
    EXPERTS       experts of all ranks to a power of two; LOCAL: those of one to one of at least 16
    """
    wait_for_launch()
    p = Peers(peers=peers, rank=rank, state=state, report=report, bound_ns=bound_ns, RANKS=RANKS)
    WIDE: gl.constexpr = gl.BlockedLayout([4], [32], [gl.num_warps()], [0])
    peer = (rank + gl.program_id(0)) % RANKS
    call = gl.load(state + CALL) + 1
    first = peer * local_experts
    expert = gl.arange(0, EXPERTS, WIDE)
    count = gl.load(counts + expert, mask=expert < local_experts * RANKS, other=0)
    eights = (count + ALIGN - 1) // ALIGN
    begin = gl.sum(gl.where(expert < first, eights, 0), 0) * ALIGN
    mine = (expert >= first) & (expert < first + local_experts)
    num_eights = gl.sum(gl.where(mine, eights, 0), 0)
    if gl.load(state + STOP, volatile=True) == 0:
        local = gl.arange(0, LOCAL, WIDE)
        own = gl.load(counts + first + local, mask=local < local_experts, other=0)
        to = at_peer(peers, counts_in, peer) + rank * pitch + local
        gl.store(to, own, mask=local < pitch)
        _copy(slots, at_peer(peers, list_in, peer) + rank * capacity, begin, num_eights)
        _copy(slot_weights, at_peer(peers, weight_in, peer) + rank * capacity, begin, num_eights)
        gl.store(at_peer(peers, begun, peer) + LIMIT + rank, limit)
        _signal(at_peer(peers, begun, peer) + rank, call)
    value = _await_peer(p, begun + peer, call, peer, WAIT_BEGUN)
    is_same = _expect_limit(p, begun + LIMIT, limit, peer, value >= call)
    _store_if_missed(state + MISSED, gl.where(is_same == 1, value, call - 1), call, gl.to_tensor(1))
    allow_next_launch()


@gluon.jit
def _rows_for_others(counts_in, rank, pitch, RANKS: gl.constexpr, LOCAL: gl.constexpr):
    """Rows that this rank computes for other ranks."""
    local = gl.arange(0, LOCAL, gl.BlockedLayout([1], [32], [gl.num_warps()], [0]))
    num = gl.to_tensor(0)
    for source in range(RANKS):
        count = gl.load(counts_in + source * pitch + local, mask=local < pitch, other=0)
        num += gl.where(source == rank, 0, gl.sum(count, 0))
    return num


@gluon.jit(do_not_specialize=["rank", "bound_ns", "ns_per_row"])
def finish_kernel(
    done, error, state, peers, report, rank, bound_ns, counts_in, pitch, l2_begun, ns_per_row,
    RANKS: gl.constexpr, LOCAL: gl.constexpr,
):  # fmt: skip
    """CTA: signal one peer that this rank's rows for it are written, and wait for its rows.

    After a report no peer is signalled: the rows are worthless. A negative `error` says that a wait
    of this rank's GEMMs was given up; then all peers get that signal instead.

    l2_begun  None, or int64 [1]: rows do not count as written before a link of 1 / ns_per_row rows
              that was free when L2 began (0: when this launch did) could have brought them
    """
    wait_for_launch()
    if l2_begun is not None:
        begin = gl.load(l2_begun)
        begin = gl.where(begin > 0, begin, now_ns())
        num = _rows_for_others(counts_in, rank, pitch, RANKS, LOCAL)
        wait_until(begin + num.to(gl.int64) * ns_per_row)
    p = Peers(peers=peers, rank=rank, state=state, report=report, bound_ns=bound_ns, RANKS=RANKS)
    peer = (rank + gl.program_id(0)) % RANKS
    call = gl.load(state + CALL)
    reported = gl.load(error)
    _signal_timeout(p, reported, gl.to_tensor(0), rank + 1)
    if (reported >= 0) & (gl.load(state + STOP, volatile=True) == 0):
        _signal(at_peer(peers, done, peer) + rank, call)
    _await_peer(p, done + peer, call, peer, WAIT_ROWS)
    allow_next_launch()

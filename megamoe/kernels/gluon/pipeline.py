"""What all Gluon kernels share: records, the stage ring, barriers, bounded waits, fences."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier
from triton.language.core import _aggregate

from megamoe.planner.launches import WARPGROUPS

GROUPS = gl.constexpr(WARPGROUPS)  # math warpgroups of a CTA
FLAT_SHARED = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))


# -- records -------------------------------------------------------------------------------------


@gluon.constexpr_function
def _set_fields(self, **values):
    """Every annotated field by its name, in their order; compile-time ones are wrapped again."""
    assert values.keys() == self.FIELDS.keys(), (
        f"{type(self).__name__}: missing {sorted(self.FIELDS.keys() - values.keys())}, "
        f"unknown {sorted(values.keys() - self.FIELDS.keys())}"
    )
    for name, kind in self.FIELDS.items():
        value = values[name]
        setattr(self, name, gl.constexpr(value) if kind is gl.constexpr else value)


def record(cls):
    """A struct of a kernel: annotated fields, each given by keyword."""
    cls.__init__ = _set_fields
    aggregate = _aggregate(cls)
    aggregate.FIELDS = dict(cls.__annotations__)
    return aggregate


@record
class Tile:
    """What a CTA computes at a time: up to TOKENS rows of one expert under one n tile."""

    expert: gl.tensor  # -1: there is no tile any more
    n_tile_idx: gl.tensor
    row_begin: gl.tensor  # in the pool
    row_end: gl.tensor


# -- the stage ring ------------------------------------------------------------------------------


@record
class Stage:
    """Where a role stands in a ring of stages: the slot, and the phase of its barriers."""

    idx: gl.tensor
    phase: gl.tensor


@gluon.jit
def first_stage(PHASE: gl.constexpr):
    """Slot 0. PHASE: 0 for a role that waits until it is full, 1 until it is empty."""
    return Stage(idx=gl.to_tensor(0), phase=gl.to_tensor(PHASE))


@gluon.jit
def advance(stage, NUM_STAGES: gl.constexpr):
    """The next slot of the ring and its phase."""
    idx = stage.idx + 1
    wraps = idx == NUM_STAGES
    return Stage(idx=gl.where(wraps, 0, idx), phase=gl.where(wraps, stage.phase ^ 1, stage.phase))


@gluon.jit
def barriers(NUM: gl.constexpr, COUNT: gl.constexpr, LOOP: gl.constexpr = False):
    """NUM mbarriers of COUNT arrivals each.

    Allocate only those that are used: the compiler lays scratch over one that is initialised and
    never waited for, and what is then read from that scratch is sometimes wrong (docs/fused.md).
    """
    bars = gl.allocate_shared_memory(gl.int64, [NUM, 1], mbarrier.MBarrierLayout())
    if LOOP:  # less code, for which a cold launch waits; the compiler would unroll range(NUM)
        for i in range(gl.minimum(gl.program_id(0) + NUM, NUM)):
            mbarrier.init(bars.index(i), count=COUNT)
    else:
        for i in gl.static_range(NUM):
            mbarrier.init(bars.index(i), count=COUNT)
    return bars


@gluon.constexpr_function
def scale_width(tokens):
    """FP32 scales that one copy by TMA brings: its destination is a multiple of 128 bytes."""
    return max(tokens, 32)


# -- arithmetic ----------------------------------------------------------------------------------


@gluon.jit
def fast_div(a, b):
    """a // b of integers from 0 to 2**21, in a few instructions."""
    reciprocal = gl.inline_asm_elementwise(
        "rcp.approx.ftz.f32 $0, $1;", "=f,f", [b + 0.0], dtype=gl.float32, is_pure=True, pack=1
    )
    return ((a + 0.5) * reciprocal).to(gl.int32)


@gluon.jit
def pin(x):
    """A volatile no-op: the compiler may not move the sum below the next wgmma (it then spills)."""
    return gl.inline_asm_elementwise("", "=f,0", [x], dtype=gl.float32, is_pure=False, pack=1)


# -- order of launches, stores and waits ---------------------------------------------------------


@gluon.jit
def wait_for_launch():
    """Wait until earlier launches are complete; no wait without programmatic launch."""
    gl.inline_asm_elementwise(
        "griddepcontrol.wait; mov.b32 $0, 0;", "=r", [], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def allow_next_launch():
    """Let the next launch take the SMs that fall free."""
    gl.inline_asm_elementwise(
        "griddepcontrol.launch_dependents; mov.b32 $0, 0;", "=r", [], dtype=gl.int32,
        is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def now_ns():
    """Nanoseconds of a clock that all SMs share; it may tick coarsely."""
    return gl.inline_asm_elementwise(
        "mov.u64 $0, %globaltimer;", "=l", [], dtype=gl.int64, is_pure=False, pack=1
    )


@gluon.jit
def stamp_begin(begun):
    """CTA 0: when it began, to int64 [1]."""
    if gl.program_id(0) == 0:
        gl.store(begun, now_ns())


@gluon.jit
def wait_until(time_ns):
    """Wait until `now_ns` has reached a time."""
    while now_ns() < time_ns:
        pass


@gluon.jit
def fence_stores():
    """In every thread that stored, before its stores are published: TMA may then read them."""
    gl.inline_asm_elementwise(
        "fence.proxy.async.global; mov.b32 $0, 0;", "=r", [], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.constexpr_function
def wait_text(scope, compare):
    """PTX of a bounded wait. scope: "gpu" or "sys". compare: "eq", or "ge" for reached.

    Polls the word at $1 until it compares with $2, the word at $3 is not zero, or $4 nanoseconds
    have passed; $0 is the last value. Acquires, also for copies by TMA that follow. A short wait
    looks at the report and the clock at every 16th poll; one until a count is reached may be long,
    and pauses between polls instead.
    """
    poll = """add.u32 n, n, 1;
and.b32 r, n, 15;
setp.ne.u32 p, r, 0;
@p bra again;"""
    pause = "nanosleep.u32 32;"
    return f"""{{
.reg .pred p;
.reg .b32 n, r;
.reg .b64 begin, now;
mov.u64 begin, %globaltimer;
mov.u32 n, 0;
again:
ld.acquire.{scope}.global.u32 $0, [$1];
setp.{compare}.s32 p, $0, $2;
@p bra done;
{pause if compare == "ge" else poll}
ld.relaxed.{scope}.global.u32 r, [$3];
setp.ne.u32 p, r, 0;
@p bra done;
mov.u64 now, %globaltimer;
sub.u64 now, now, begin;
setp.lt.u64 p, now, $4;
@p bra again;
done:
bar.warp.sync 0xffffffff;
fence.proxy.async.global;
}}"""


@gluon.jit
def bounded_wait(counter, want, report, bound_ns, SCOPE: gl.constexpr, COMPARE: gl.constexpr):
    """Wait until the words at `counter` compare with `want`; -> the values that were read.

    All threads of a role call it. The wait ends early when the word at `report` is not zero, and
    after `bound_ns`: the caller compares the values and writes its report.
    """
    TEXT: gl.constexpr = wait_text(SCOPE, COMPARE)
    return gl.inline_asm_elementwise(
        TEXT, "=&r,l,r,l,l", [counter.to(gl.int64), want, report.to(gl.int64), bound_ns],
        dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip

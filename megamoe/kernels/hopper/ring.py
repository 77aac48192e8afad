"""What every Hopper kernel shares: records, the stage ring's walk, launch order, fences."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier
from triton.language.core import _aggregate

from megamoe.planner.launches import WARPGROUPS

GROUPS = gl.constexpr(WARPGROUPS)  # math warpgroups of a CTA


@gluon.constexpr_function
def _fill(self, *values):
    """Fields in the order of their annotations; compile-time ones are wrapped again."""
    for name, value in zip(self.FIELDS, values, strict=True):
        is_constant = self.FIELDS[name] is gl.constexpr
        setattr(self, name, gl.constexpr(value) if is_constant else value)


def record(cls):
    """A compile-time struct: annotated fields, filled by position."""
    cls.__init__ = _fill
    made = _aggregate(cls)
    made.FIELDS = dict(cls.__annotations__)
    return made


@gluon.jit
def barriers(NUM: gl.constexpr, COUNT: gl.constexpr, LOOP: gl.constexpr = False):
    """NUM mbarriers of COUNT arrivals.

    Make only those that are used: the compiler lays scratch over one that is made and never waited
    for, and what is then read from that scratch is wrong now and then (docs/fused.md).
    """
    made = gl.allocate_shared_memory(gl.int64, [NUM, 1], mbarrier.MBarrierLayout())
    if LOOP:  # less code, for which a cold launch waits; the compiler would unroll range(NUM)
        for i in range(gl.minimum(gl.program_id(0) + NUM, NUM)):
            mbarrier.init(made.index(i), count=COUNT)
    else:
        for i in gl.static_range(NUM):
            mbarrier.init(made.index(i), count=COUNT)
    return made


@gluon.jit
def advance(idx, phase, STAGES: gl.constexpr):
    """The next stage of the ring and its phase."""
    idx += 1
    wraps = idx == STAGES
    return gl.where(wraps, 0, idx), gl.where(wraps, phase ^ 1, phase)


@gluon.jit
def tiles_across(p, ROWS: gl.constexpr):
    """Row tiles of one token tile; L1's rows are twice its outputs."""
    outputs: gl.constexpr = ROWS // 2 if p.GATED else ROWS
    return (p.num_outputs + outputs - 1) // outputs


@gluon.jit
def place(p, item, ROWS: gl.constexpr):
    """(token tile, row tile) of a work item: SPAN token tiles share each tile of weights."""
    across = tiles_across(p, ROWS)
    first = item // (p.SPAN * across) * p.SPAN
    size = gl.minimum(gl.load(p.num_tiles) - first, p.SPAN)
    inside = item % (p.SPAN * across)
    return first + inside % size, inside // size


@gluon.jit
def num_items(p, ROWS: gl.constexpr):
    """Work items of the launch; a CTA takes every num_programs-th."""
    return gl.load(p.num_tiles) * tiles_across(p, ROWS)


@gluon.jit
def quotient(a, b):
    """a // b of numbers from 0 to 2**21, in a few instructions."""
    by = gl.inline_asm_elementwise(
        "rcp.approx.ftz.f32 $0, $1;", "=f,f", [b + 0.0], dtype=gl.float32, is_pure=True, pack=1
    )
    return ((a + 0.5) * by).to(gl.int32)


@gluon.jit
def wait_for_launch():
    """Until the launches before this one are complete; at once without programmatic launch."""
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
def pin(x):
    """A volatile no-op: the compiler may not move the sum below the next wgmma (it then spills)."""
    return gl.inline_asm_elementwise("", "=f,0", [x], dtype=gl.float32, is_pure=False, pack=1)

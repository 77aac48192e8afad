"""Events of a fused launch for a trace: when each role did what.

A role keeps up to EVENTS events of (kind, ticket, begin, end), in nanoseconds of the GPU's timer.
Without TRACE nothing of this is compiled.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

EVENTS = gl.constexpr(128)
ROLES = gl.constexpr(4)
MATH = gl.constexpr(0)  # the first warpgroup
LOAD_WEIGHTS = gl.constexpr(1)
LOAD_TOKENS = gl.constexpr(2)
PUBLISH = gl.constexpr(3)

ROUTE = gl.constexpr(1)
FILL = gl.constexpr(2)
L1 = gl.constexpr(3)
L2 = gl.constexpr(4)
END = gl.constexpr(5)  # the wait for all CTAs
COMBINE = gl.constexpr(6)
WAIT = gl.constexpr(7)


@gluon.jit
def now(args):
    """Nanoseconds, the low 32 bits; 0 without TRACE."""
    time = 0
    if args.TRACE:
        time = gl.inline_asm_elementwise(
            "mov.u32 $0, %globaltimer_lo;", "=r", [], dtype=gl.int32, is_pure=False, pack=1
        )
    return time


@gluon.jit
def stamp(args, ROLE: gl.constexpr, n, kind, ticket, begin):
    """Store one event that ends now; -> the number of the next."""
    if args.TRACE:
        at = (gl.program_id(0) * ROLES + ROLE) * EVENTS + gl.minimum(n, EVENTS - 1)
        event = args.trace + at * 4
        gl.store(event, gl.to_tensor(kind))
        gl.store(event + 1, gl.to_tensor(ticket))
        gl.store(event + 2, begin)
        gl.store(event + 3, now(args))
        n += 1
    return n

"""Events of a fused launch for a trace: when each role did what.

A role keeps up to EVENTS events of (kind, ticket, begin, end), in nanoseconds of the GPU's timer.
Without TRACE nothing of this is compiled.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from megamoe.layout import stamps

EVENTS = gl.constexpr(stamps.EVENTS)
ROLES = gl.constexpr(stamps.ROLES)
MATH = gl.constexpr(stamps.MATH)  # the first warpgroup
LOAD_WEIGHTS = gl.constexpr(stamps.LOAD_WEIGHTS)
LOAD_TOKENS = gl.constexpr(stamps.LOAD_TOKENS)
PUBLISH = gl.constexpr(stamps.PUBLISH)

ROUTE = gl.constexpr(stamps.ROUTE)
FILL = gl.constexpr(stamps.FILL)
L1 = gl.constexpr(stamps.L1)
L2 = gl.constexpr(stamps.L2)
END = gl.constexpr(stamps.END)
COMBINE = gl.constexpr(stamps.COMBINE)
WAIT = gl.constexpr(stamps.WAIT)


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

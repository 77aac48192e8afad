"""When each role of a fused launch did what: stamps in memory, in a build that has them.

A role keeps up to EVENTS events of (kind, ticket, begin, end), in nanoseconds of the GPU's timer.
Without TRACE nothing of this is compiled.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

EVENTS = gl.constexpr(128)
ROLES = gl.constexpr(4)
MATH = gl.constexpr(0)  # the first warpgroup of a team
LOAD_WEIGHTS = gl.constexpr(1)
LOAD_TOKENS = gl.constexpr(2)
PUBLISH = gl.constexpr(3)

ROUTE = gl.constexpr(1)
FILL = gl.constexpr(2)
FIRST = gl.constexpr(3)  # L1
SECOND = gl.constexpr(4)  # L2
MEET = gl.constexpr(5)
COMBINE = gl.constexpr(6)
WAIT = gl.constexpr(7)

NAMES = {1: "route", 2: "fill", 3: "l1", 4: "l2", 5: "meet", 6: "combine", 7: "wait"}


@gluon.jit
def now(c):
    """Nanoseconds, the low 32 bits; 0 without TRACE."""
    time = 0
    if c.TRACE:
        time = gl.inline_asm_elementwise(
            "mov.u32 $0, %globaltimer_lo;", "=r", [], dtype=gl.int32, is_pure=False, pack=1
        )
    return time


@gluon.jit
def stamp(c, ROLE: gl.constexpr, n, kind, ticket, begin):
    """Keep one event that ends now; -> the number of the next."""
    if c.TRACE:
        at = (gl.program_id(0) * ROLES + ROLE) * EVENTS + gl.minimum(n, EVENTS - 1)
        event = c.trace + at * 4
        gl.store(event, gl.to_tensor(kind))
        gl.store(event + 1, gl.to_tensor(ticket))
        gl.store(event + 2, begin)
        gl.store(event + 3, now(c))
        n += 1
    return n

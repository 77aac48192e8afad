"""Weights pass through the L2 cache as a stream: a cache hint for copies by TMA.

Gluon cannot express the hint. `stream_copy` writes the policy's register into a comment before the
copy, and a stage of the compiler (`hinted`) moves it from there into the copy's own instructions.
Where the compiler has no such stages the comment is all there is, and copies are as without it.
"""

import re

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from megamoe.kernels.gluon.compat import tma
from megamoe.kernels.gluon.compiler_hooks import change

L2_WARM_BYTES = gl.constexpr(110 << 20)  # of a launch: twice the size of the L2 cache of H200
MARK = gl.constexpr("mov.b32 $0, 0; // copies from here: L2 policy $1")
UNMARK = gl.constexpr("mov.b32 $0, 0; // copies from here: no L2 policy")
EVICT_FIRST = gl.constexpr("createpolicy.fractional.L2::evict_first.b64 $0, 1.0;")
UNCHANGED = gl.constexpr("createpolicy.fractional.L2::evict_unchanged.b64 $0, 1.0;")

_MARKED = re.compile(r"// copies from here: (?:L2 policy (%rd\d+)|no L2 policy)$")
_BLOCK = re.compile(r"\$L__BB")  # a label that is branched to
_COPY = re.compile(r"(cp\.async\.bulk\.tensor\.\S*::bytes) ([^;]*);")


@gluon.jit
def _policy(ASM: gl.constexpr):
    return gl.inline_asm_elementwise(ASM, "=l", [], dtype=gl.int64, is_pure=True, pack=1)


@gluon.jit
def stream_policy(is_warming):
    """Cache policy of a copy: normal during a launch's first steps, evict-first afterwards.

    Dirty lines that other kernels left in the L2 cache are then evicted together. With evict-first
    they go one at a time, and DRAM keeps switching between reads and writes.
    """
    return gl.where(is_warming, _policy(UNCHANGED), _policy(EVICT_FIRST))


@gluon.jit
def stream_copy(desc, coord, ready, buffer, policy, IS_STREAM: gl.constexpr):
    """A copy by TMA, under the policy where it is a stream's."""
    if IS_STREAM:
        gl.inline_asm_elementwise(MARK, "=r,l", [policy], dtype=gl.int32, is_pure=False, pack=1)
    tma.async_copy_global_to_shared(desc, coord, ready, buffer)
    if IS_STREAM:
        gl.inline_asm_elementwise(UNMARK, "=r", [], dtype=gl.int32, is_pure=False, pack=1)


def hinted(ptx: str) -> str:
    """PTX whose marked copies have their hint; a wide copy is several."""
    lines, policy = ptx.split("\n"), None
    for i, line in enumerate(lines):
        mark = _MARKED.search(line)
        if mark or _BLOCK.match(line):
            policy = mark and mark[1]
        elif policy:
            lines[i] = _COPY.sub(rf"\1.L2::cache_hint \2, {policy};", line)
    return "\n".join(lines)


change("ptx", hinted, "megamoe.stream 1")

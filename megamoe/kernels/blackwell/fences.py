"""Order between a role's use of tensor memory and its barriers, which PTX asks for by name.

Neither an mbarrier nor a barrier of threads orders tcgen05 instructions that come before it or
after it, unless a fence stands between (PTX, tcgen05.fence). Gluon puts none (3.6 to 3.9). A commit
is one.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def fence_before_arrival():
    """In every thread that loaded or stored, before the role arrives for the next one."""
    gl.inline_asm_elementwise(
        "tcgen05.fence::before_thread_sync; mov.b32 $0, 0;", "=r", [], dtype=gl.int32,
        is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def fence_after_wait():
    """After waits for others, before the role's own loads, stores, copies and products."""
    gl.inline_asm_elementwise(
        "tcgen05.fence::after_thread_sync; mov.b32 $0, 0;", "=r", [], dtype=gl.int32,
        is_pure=False, pack=1,
    )  # fmt: skip

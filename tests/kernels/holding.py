"""A kernel that holds SMs: whoever needs their shared memory waits until it ends."""

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

_SPIN = gl.constexpr("""{
.reg .pred p;
.reg .b64 begin, now;
mov.u64 begin, %globaltimer;
again:
mov.u64 now, %globaltimer;
sub.u64 now, now, begin;
setp.lt.u64 p, now, $1;
@p bra again;
mov.u32 $0, 1;
}""")


@gluon.jit(do_not_specialize=["num_ns"])
def hold_kernel(out, num_ns):
    LAYOUT: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    smem = gl.allocate_shared_memory(gl.int32, [256, 128], flat)  # 128 KiB
    done = gl.inline_asm_elementwise(
        _SPIN, "=r,l", [num_ns.to(gl.int64)], dtype=gl.int32, is_pure=False, pack=1
    )
    smem.index(gl.program_id(0)).store(gl.zeros([128], gl.int32, LAYOUT) + done)
    gl.store(out + gl.arange(0, 128, LAYOUT), smem.index(gl.program_id(0)).load(LAYOUT))


def hold(num_sms: int, seconds: float) -> None:
    """Keep `num_sms` SMs busy on the current stream; returns at once."""
    out = torch.empty(128, dtype=torch.int32, device="cuda")
    hold_kernel[(num_sms,)](out, int(seconds * 1e9), num_warps=4)

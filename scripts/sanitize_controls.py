"""Two kernels by which a tool is judged: a hand-shake like the fused queue's, and none.

A warp stores words of shared memory which other warps read, through a ring of two slots. With
mbarriers one thread arrives for all, after the barrier of its warp that the compiler puts; without
them the same accesses race. A tool that says the same of both cannot judge what the kernels do.
"""

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from megamoe.kernels.gluon.pipeline import FLAT_SHARED, barriers

NUM_ITEMS = 16


@gluon.jit
def _post(words, full, empty, num_items, IS_ORDERED: gl.constexpr):
    LAYOUT: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    for i in range(num_items):
        slot = i & 1
        if IS_ORDERED:
            mbarrier.wait(empty.index(slot), ((i >> 1) & 1) ^ 1)
        words.index(slot).store(gl.zeros([1], gl.int32, LAYOUT) + i)
        if IS_ORDERED:
            mbarrier.arrive(full.index(slot), count=1)


@gluon.jit
def _read(words, full, empty, num_items, out, IS_ORDERED: gl.constexpr):
    LAYOUT: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    total = num_items * 0
    for i in range(num_items):
        slot = i & 1
        if IS_ORDERED:
            mbarrier.wait(full.index(slot), (i >> 1) & 1)
        total += gl.max(words.index(slot).load(LAYOUT), 0)
        if IS_ORDERED:
            mbarrier.arrive(empty.index(slot), count=1)
    gl.store(out, total)


@gluon.jit
def control_kernel(out, num_items, IS_ORDERED: gl.constexpr):
    words = gl.allocate_shared_memory(gl.int32, [2, 1], FLAT_SHARED)
    full, empty = barriers(2, 1), barriers(2, 1)
    gl.thread_barrier()
    gl.warp_specialize(
        [
            (_read, (words, full, empty, num_items, out, IS_ORDERED)),
            (_post, (words, full, empty, num_items, IS_ORDERED)),
        ],
        [1], [24],
    )  # fmt: skip


def control(device: torch.device, *, is_ordered: bool) -> None:
    """One launch; with the hand-shake its sum is right."""
    out = torch.zeros(1, dtype=torch.int32, device=device)
    control_kernel[(2,)](out, NUM_ITEMS, IS_ORDERED=is_ordered, num_warps=4)
    assert not is_ordered or out.item() == sum(range(NUM_ITEMS))

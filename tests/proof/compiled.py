"""What the memory model takes for granted of the compiler, seen in PTX."""

import re

_BARRIER = re.compile(r"(@%p\d+ )?bar\.(warp\.)?sync")
_TOUCHES = re.compile(r"\b(ld|st|atom|red|cp|stmatrix|ldmatrix|wgmma)\.")
SIZES = ("reqntid", "maxnreg")
_ASM = re.compile(r"\.(relaxed|acquire)\.|\.param|wgmma\.fence")  # of waits and reports; parameters


def assert_arrivals_follow_barriers(ptx, least=5):
    """Between a role's last access to memory and its arrival stands a barrier of its threads.

    One thread arrives for all. The kernels ask for the barrier before atomics alone; before
    arrivals the compiler puts one.
    """
    lines, num = [line.strip() for line in ptx.split("\n")], 0
    for i, line in enumerate(lines):
        if "mbarrier.arrive.shared" in line:
            num += 1
            for before in reversed(lines[:i]):
                if _BARRIER.match(before):
                    break
                assert not _TOUCHES.search(before) or _ASM.search(before), (before, line)
    assert num >= least


def assert_tensor_memory_is_fenced(ptx):
    """Between a wait and tcgen05 instructions, and between those and an arrival, stands a fence."""
    has_waited = has_used = False
    for line in map(str.strip, ptx.split("\n")):
        if "mbarrier.try_wait" in line or "barrier.sync 1" in line:
            has_waited = True
        if "tcgen05.fence::after_thread_sync" in line:
            has_waited = False
        if "tcgen05.fence::before_thread_sync" in line:
            has_used = False
        if re.search(r"tcgen05\.(mma|cp|ld|st)\.", line):
            assert not has_waited, line
        if "tcgen05.wait::" in line:
            has_used = True
        if "mbarrier.arrive.shared" in line or "barrier.sync 1" in line:
            assert not has_used, line


def assert_is_alone_on_an_sm(ptx):
    """Its registers leave no room for a second CTA, which would wait for tensor memory.

    A CTA of a fused launch that waited so would be waited for by the one that has it.
    """
    threads, registers = (int(re.search(rf"\.{name} (\d+)", ptx)[1]) for name in SIZES)
    assert 2 * threads * registers > 65536, (threads, registers)

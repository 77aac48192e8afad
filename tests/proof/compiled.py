"""What the memory model takes for granted of the compiler, seen in PTX."""

import inspect
import itertools
import re
from collections import Counter

from megamoe.kernels.hopper.gemm.decode_per_wave import _post_job
from megamoe.kernels.hopper.gemm.epilogue import post_tile

_BARRIER = re.compile(r"(@%p\d+ )?bar\.(warp\.)?sync")
_ARRIVAL = re.compile(r"mbarrier\.arrive\.(expect_tx\.)?shared")
_TOUCHES = re.compile(r"\b(ld|st|atom|red|cp|stmatrix|ldmatrix|wgmma)\.")
_LABEL = re.compile(r"\$L__BB\w+:")  # $L__tmp7: is the debugger's, and nobody jumps there
_JUMP = re.compile(r"\bbra(?:\.uni)?\s+(\$L__BB\w+)")
SIZES = ("reqntid", "maxnreg")
_ASM = re.compile(r"\.(relaxed|acquire)\.|\.param|wgmma\.fence")  # of waits and reports; parameters
# Where `warp_specialize` says what each worker warp runs, a byte a warp.
_WORKERS = re.compile(
    r"st\.shared(?:\.v\d)?\.b(?P<bits>\d+)\s+\[\w+\+(?P<at>\d+)\], \{?(?P<words>[\d, -]+)\}?;"
)
_NEAR = 12  # lines from those stores to their barrier: what roles are passed lies between


def _constants(lines):
    """Bytes that the lines store as constants: the first of them, and those that follow it."""
    stored, end = b"", None
    for found in filter(None, map(_WORKERS.match, lines)):
        size, at = int(found["bits"]), int(found["at"])
        if end not in (None, at):
            break
        words = [int(word) % (1 << size) for word in found["words"].split(",")]
        stored += b"".join(word.to_bytes(size // 8, "little") for word in words)
        end = at + size // 8 * len(words)
    return stored


def _before(lines, i):
    """The lines of a barrier's own statement, which begins at the last `.loc` or label."""
    first = next(
        (n for n in range(i - 1, -1, -1) if re.match(r"\.loc|\$L__BB|barrier", lines[n])), 0
    )
    return lines[max(first, i - _NEAR) : i]


def _workers(lines):
    """{label: number of warps} of the roles that worker warps begin, none without roles.

    Before a barrier of the CTA stands which target each worker warp jumps to: its role, at the
    end the last one, which returns, and in clusters one in which all wait for the other CTA.
    """
    jump = next((i for i, line in enumerate(lines) if ".branchtargets" in line), None)
    if jump is None:
        return {}
    barriers = [i for i, line in enumerate(lines) if line.startswith("barrier.sync")]
    stored = [_constants(_before(lines, i)) for i in barriers]
    roles = min(filter(None, stored), key=lambda one: (-len(set(one)), sum(one)), default=b"")
    assert roles, "what worker warps run is told in a way that is not known here"
    return {lines[jump + 1 + role].rstrip(",;"): num for role, num in Counter(roles).items()}


def _next_blocks(body, n, blocks):
    """Where block `n` may go on: where it jumps, and the block after it."""
    code = [line for line in body if line and not line.startswith(("//", ".", "$L__tmp"))]
    found = [blocks[to] for line in code for to in _JUMP.findall(line)]
    if n + 1 < len(blocks) and not re.match(r"bra|ret|exit|trap", code[-1]):
        found.append(n + 1)
    return found


def warps_of(lines):
    """For each line, how many warps the roles have that come there: a set.

    Follows jumps, as the compiler may put a role's blocks anywhere.
    """
    starts = [0, *(i for i, line in enumerate(lines) if _LABEL.match(line)), len(lines)]
    blocks = {lines[start].partition(":")[0]: n for n, start in enumerate(starts[:-1])}
    bodies = [lines[a:b] for a, b in itertools.pairwise(starts)]
    workers, found = _workers(lines), [set() for _ in bodies]
    threads = int(re.search(r"\.reqntid (\d+)", "\n".join(lines))[1])
    first = lines[0].partition(":")[0]
    for label, num in {**workers, first: threads // 32 - sum(workers.values())}.items():
        ahead, seen = [blocks[label]], set()
        while ahead:
            n = ahead.pop()
            if n in seen or any("brx.idx" in line for line in bodies[n]):
                continue  # there a worker warp is given its next role
            seen.add(n)
            found[n].add(num)
            ahead += _next_blocks(bodies[n], n, blocks)
    return [found[n] for n, body in enumerate(bodies) for _ in body]


def _barrier_of(num_warps):
    """What PTX a barrier of so many warps is."""
    if num_warps == 1:
        return re.compile(r"(@%p\d+ )?bar\.warp\.sync")
    return re.compile(rf"(@%p\d+ )?bar\.sync\s+\d+, {32 * num_warps};")


def assert_arrivals_follow_barriers(ptx, least=5):
    """Between a role's last access to memory and its arrival stands a barrier of its threads.

    One thread arrives for all. The kernels ask for the barrier before atomics alone; before
    arrivals the compiler puts one. It is of all the role's warps, and in the arrival's own block
    of instructions: every way to the arrival has it.
    """
    lines, num = [line.strip() for line in ptx.split("\n")], 0
    warps, by_each = warps_of(lines), _stored_by_each_lane(lines)
    for i, line in enumerate(lines):
        if _ARRIVAL.search(line):
            num += 1
            assert len(warps[i]) == 1, (line, warps[i])
            (num_warps,) = warps[i]
            barrier = _barrier_of(num_warps)
            for at in range(i - 1, -1, -1):
                before = lines[at]
                if at in by_each and num_warps == 1:
                    continue
                if _BARRIER.match(before):
                    assert barrier.match(before), (before, line, f"a role of {num_warps} warps")
                    break
                assert not _LABEL.match(before), (before, line)
                assert not _TOUCHES.search(before) or _ASM.search(before), (before, line)
    assert num >= least
    _assert_posted_tiles_precede_barriers(lines)


def _stored_by_each_lane(lines):
    """Lines that store the words of a decoding job, for which no barrier stands before `expect`.

    All lanes store the same words to the same places, without a predicate: so does the one that
    arrives, whose own stores come before its arrival.
    """
    text, first = inspect.getsourcelines(_post_job.fn)
    own = {f"decode_per_wave.py:{n}" for n in range(first, first + len(text))}
    found, where = set(), ""
    for i, line in enumerate(lines):
        if line.startswith(".loc"):
            where = ":".join(line.partition("// ")[2].split(":")[:2])
        elif line.startswith("st.shared.b32") and where in own:
            found.add(i)
    return found


def _assert_posted_tiles_precede_barriers(lines):
    """After the last word of a posted tile stands a barrier of the warp that stored it.

    Another thread of it may arrive at the stage by which math knows that the tile is there.
    """
    text, first = inspect.getsourcelines(post_tile.fn)
    own = {f"epilogue.py:{n}" for n in range(first, first + len(text))}
    where, is_open = "", ""
    for line in lines:
        if line.startswith(".loc"):
            where = ":".join(line.partition("// ")[2].split(":")[:2])
        elif line.startswith("st.shared") and where in own:
            is_open = line
        elif _BARRIER.match(line):
            is_open = ""
        elif is_open:
            ends = _LABEL.match(line) or _ARRIVAL.search(line) or _TOUCHES.search(line)
            assert not ends and " bra" not in line, (is_open, line)
    assert not is_open, is_open


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

"""What `compiled` demands of PTX is there, and PTX without it is refused."""

import re

import pytest

from megamoe.planner.hopper import GemmSwapAb
from tests.kernels import test_fused_compile, test_hopper_compile
from tests.kernels.support import INTERPRETED
from tests.proof.compiled import assert_arrivals_follow_barriers

pytestmark = pytest.mark.skipif(INTERPRETED, reason="the interpreter makes no PTX")

BARRIER = re.compile(r"\s*(@%p\d+ )?bar\.(warp\.)?sync")


def gemm(monkeypatch):
    """A swap-AB GEMM: two roles of four warps, and one-warp roles."""
    case = next(c for c in test_hopper_compile.ALL if c[0] == "w8a8" and type(c[2]) is GemmSwapAb)
    return test_hopper_compile.compiled(monkeypatch, *case)


def fused(monkeypatch):
    case = next(c for c in test_fused_compile.cases() if c[0] == "w8a8")
    return test_fused_compile.compiled(monkeypatch, *case)


def without_barriers(lines, at):
    """The barriers of the block of line `at` that stand before it are gone."""
    first = next(i for i in range(at, -1, -1) if lines[i].startswith("$L__BB") or i == 0)
    return [line for i, line in enumerate(lines) if not first < i < at or not BARRIER.match(line)]


def without_the_barrier_after_posting(lines):
    """The one after the last word of a tile that `post_tile` stores."""
    last = max(i for i, line in enumerate(lines) if line.strip().startswith("st.shared.b32")
               and any("epilogue.py" in said for said in lines[i - 3 : i]))  # fmt: skip
    barrier = next(i for i in range(last, len(lines)) if BARRIER.match(lines[i]))
    return lines[:barrier] + lines[barrier + 1 :]


def with_barriers(lines, old, new):
    return [line.replace(old, new) for line in lines]


@pytest.mark.parametrize("kernel", [gemm, pytest.param(fused, marks=pytest.mark.every)])
def test_ptx_without_a_barrier_or_with_a_narrower_one_is_refused(kernel, monkeypatch):
    ptx = kernel(monkeypatch).asm["ptx"]
    assert_arrivals_follow_barriers(ptx)
    lines = ptx.split("\n")
    arrivals = [i for i, line in enumerate(lines) if "mbarrier.arrive" in line]
    assert any("expect_tx" in lines[i] for i in arrivals)
    edits = {f"no barrier before line {i}": without_barriers(lines, i) for i in arrivals}
    first, second = (f"bar.sync \t{n}, 128" for n in (0, 2))
    edits |= {
        "no barrier after a posted tile": without_the_barrier_after_posting(lines),
        "warp barriers in the first role": with_barriers(lines, first, "bar.warp.sync -1"),
        "warp barriers in the second role": with_barriers(lines, second, "bar.warp.sync -1"),
        "half of the second role": with_barriers(lines, second, "bar.sync \t2, 64"),
    }  # fmt: skip
    for name, edited in edits.items():
        assert edited != lines, name
        with pytest.raises(AssertionError):
            assert_arrivals_follow_barriers("\n".join(edited))
            print(name, "was not noticed")

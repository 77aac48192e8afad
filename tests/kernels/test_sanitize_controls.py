"""The kernels by which sanitizers are judged: one has a hand-shake, the other the same without."""

import pytest
import torch

from scripts.sanitize_controls import control_kernel
from tests.kernels.compiling import compile_kernel
from tests.kernels.support import INTERPRETED

pytestmark = pytest.mark.skipif(INTERPRETED, reason="the interpreter makes no PTX")


@pytest.mark.parametrize("is_ordered", [True, False])
def test_only_the_control_without_a_hand_shake_has_none(is_ordered):
    out = torch.empty(1, dtype=torch.int32, device="meta")
    ptx = compile_kernel(control_kernel, (out, 16), 90, IS_ORDERED=is_ordered, num_warps=4)
    ptx = ptx.asm["ptx"]
    assert ptx.count("mbarrier.arrive") == (2 if is_ordered else 0)
    assert ptx.count("mbarrier.try_wait") == (2 if is_ordered else 0)
    assert "st.shared.b32" in ptx and "ld.shared.b32" in ptx

"""Inputs of a fused call over ranks: one launch that does what four copies did."""

import pytest
import torch

from megamoe.engine.symm_buffer import symm_buffer_in
from megamoe.kernels.portable.put import _put_kernel, put
from megamoe.layout.exchange import InboxSizes, exchange
from megamoe.planner import copies
from tests.kernels.compiling import Stand, compile_kernel
from tests.kernels.support import DEVICE, INTERPRETED, MARKS


def buffer(capacity, hidden, top_k, passes):
    where = exchange(
        capacity, hidden, top_k, 64, passes, InboxSizes(2, capacity // passes, 256, 16, 8, 32)
    )
    memory = torch.zeros(where.num_bytes, dtype=torch.uint8)
    return memory, symm_buffer_in(memory, where), where


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("passes", [1, 3])
@pytest.mark.parametrize(("hidden", "top_k"), [(96, 3), (2880, 4), (1024, 1)])
@pytest.mark.parametrize("_", [pytest.param(None, marks=MARKS)])
def test_it_leaves_what_copies_leave(_, hidden, top_k, passes, dtype):
    """The whole buffer, after calls of more, fewer and no tokens; rows of x at any stride."""
    rng = torch.Generator().manual_seed(0)
    copied, by_copies, where = buffer(12, hidden, top_k, passes)
    memory = torch.zeros_like(copied).to(DEVICE)
    into = symm_buffer_in(memory, where)
    for num in (12, 5, 1, 0, 7):
        x = torch.randn(num, hidden + 3, generator=rng).bfloat16()[:, 3:]
        idx = torch.randint(-1, 8, (num, top_k), generator=rng).to(dtype)
        gates = torch.randn(num, top_k, generator=rng)
        by_copies.put(x, idx, gates)
        wide = torch.zeros(num, hidden + 3, dtype=torch.bfloat16, device=DEVICE)[:, 3:]
        wide.copy_(x)
        places = into.tokens, into.topk_idx, into.topk_weights
        step = copies.put(num, hidden, top_k, passes)
        put(wide, idx.to(DEVICE), gates.to(DEVICE), places, into.num_valid, step=step)
        assert torch.equal(memory.cpu(), copied)


@pytest.mark.skipif(INTERPRETED, reason="the interpreter compiles nothing")
@pytest.mark.parametrize("arch", [90, 100])
def test_rows_are_copied_16_bytes_a_thread(arch):
    half, real = Stand(torch.bfloat16), Stand(torch.float32)
    ids = Stand(torch.int32), Stand(torch.int64)
    args = half, ids[0], real, half, ids[1], real, ids[0], 5, 64, 1, 4096, 4096, 6, 8, 1, 1024
    text = compile_kernel(_put_kernel, args, arch, num_warps=4).asm["ptx"]
    assert "ld.global.v4.b32" in text and "st.global.v4.b32" in text

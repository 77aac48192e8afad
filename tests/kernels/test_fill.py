"""Inputs of a call into a graph's buffers: in one launch, from any address."""

import pytest
import torch

from megamoe.kernels.portable.fill import Inputs, _fill_kernel, fill
from tests.kernels.compiling import Stand, compile_kernel
from tests.kernels.support import DEVICE, INTERPRETED, MARKS


def there(held):
    return [t.cpu().clone() for t in held]


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize(("hidden", "top_k"), [(96, 3), (2880, 4), (1024, 1)])
@pytest.mark.parametrize("_", [pytest.param(None, marks=MARKS)])
def test_rows_are_copied_and_counted_and_the_rest_stays(_, hidden, top_k, dtype):
    rng = torch.Generator().manual_seed(0)
    held = Inputs.empty(16, hidden, top_k, torch.device(DEVICE))
    assert (held.topk_idx == -1).all() and held.count.item() == 0
    for num in (16, 5, 1, 7):
        wide = torch.randn(num, hidden + 3, generator=rng).bfloat16()
        idx = torch.randint(-1, 8, (num, top_k), generator=rng).to(dtype)
        gates = torch.randn(num, top_k, generator=rng)
        before = there(held)
        fill(wide.to(DEVICE)[:, 3:], idx.to(DEVICE), gates.to(DEVICE), held)
        x, ids, weights, count = there(held)
        assert torch.equal(x[:num], wide[:, 3:]) and torch.equal(x[num:], before[0][num:])
        assert torch.equal(ids[:num].to(dtype), idx) and torch.equal(ids[num:], before[1][num:])
        assert torch.equal(weights[:num], gates) and count.item() == num


@pytest.mark.parametrize("_", [pytest.param(None, marks=MARKS)])
def test_an_id_that_32_bits_do_not_hold_names_no_expert(_):
    held = Inputs.empty(2, 96, 3, torch.device(DEVICE))
    idx = torch.tensor([[2**32 + 1, -(2**32), 5]], device=DEVICE)
    fill(torch.zeros(1, 96, device=DEVICE).bfloat16(), idx, torch.zeros(1, 3, device=DEVICE), held)
    assert held.topk_idx[0].tolist() == [-2, -2, 5]


@pytest.mark.skipif(INTERPRETED, reason="the interpreter compiles nothing")
@pytest.mark.parametrize("arch", [80, 90, 100])
def test_it_compiles_for_any_address(arch):
    half, word, real = (Stand(d) for d in (torch.bfloat16, torch.int32, torch.float32))
    ids = Stand(torch.int64)
    args = (half, 4096, ids, real, half, word, real, word, 8, 4096, 8, 8, 1024)
    kernel = compile_kernel(_fill_kernel, args, arch, num_warps=4)
    assert "ld.global.v" not in kernel.asm["ptx"]  # an odd address is as good as any

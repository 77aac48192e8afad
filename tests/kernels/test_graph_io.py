"""Arguments of a replay, the inputs of its call and its output: from and to any address."""

import mmap
import platform

import pytest
import torch

from megamoe.kernels.portable.graph_io import (
    WORDS,
    Inputs,
    ReplayArgs,
    _copy_inputs_kernel,
    _copy_output_kernel,
    _read_args_kernel,
)
from tests.kernels.compiling import Stand, compile_kernel
from tests.kernels.steps import copy_inputs, copy_output, read_args
from tests.kernels.support import DEVICE, INTERPRETED, MARKS, in_interpreter

DEV = torch.device(DEVICE)


def there(inputs):
    return [t.cpu().clone() for t in inputs]


def arguments(x, idx, weights, y=None):
    to = 0 if y is None else y.data_ptr()
    addresses = [t.data_ptr() for t in (x, idx, weights)]
    return [*addresses, to, x.stride(0), len(x), idx.dtype == torch.int64, 0]


def now(*call):
    return torch.tensor(arguments(*call), device=DEVICE)


@in_interpreter()
@pytest.mark.skipif(
    (platform.system(), platform.machine()) != ("Linux", "x86_64"),
    reason="memory of the host below 2 GiB, by a flag of x86-64 Linux",
)
def test_a_mailbox_may_lie_at_an_address_of_31_bits():
    low = mmap.mmap(-1, 4096, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x40)  # MAP_32BIT
    slots = torch.frombuffer(low, dtype=torch.int64)[: 2 * WORDS].view(2, WORDS)
    assert slots.data_ptr() < 2**31
    slots[0] = torch.arange(WORDS) + 5
    args = ReplayArgs.empty(2, DEV)._replace(slots=slots)
    read_args(args)
    assert torch.equal(args.now, slots[0]) and args.next_slot.item() == 1


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize(("hidden", "top_k"), [(96, 3), (2880, 4), (1024, 1)])
@pytest.mark.parametrize("_", [pytest.param(None, marks=MARKS)])
def test_rows_are_copied_and_counted_and_the_rest_stays(_, hidden, top_k, dtype):
    """Rows from an odd address, with an odd stride; ids and weights after a first element."""
    rng = torch.Generator().manual_seed(0)
    inputs = Inputs.empty(16, hidden, top_k, DEV)
    assert (inputs.topk_idx == -1).all() and inputs.count.item() == 0
    for num in (16, 5, 1, 7):
        wide = torch.randn(num, hidden + 3, generator=rng).bfloat16()
        idx = torch.randint(-1, 8, (num, top_k), generator=rng).to(dtype)
        gates = torch.randn(num, top_k, generator=rng)
        before = there(inputs)
        shifted = [
            torch.cat([t.new_zeros(1), t.flatten()]).to(DEVICE)[1:].view(num, top_k)
            for t in (idx, gates)
        ]
        x = wide.to(DEVICE)[:, 3:]
        copy_inputs(now(x, *shifted), inputs)
        x, ids, weights, count = there(inputs)
        assert torch.equal(x[:num], wide[:, 3:]) and torch.equal(x[num:], before[0][num:])
        assert torch.equal(ids[:num].to(dtype), idx) and torch.equal(ids[num:], before[1][num:])
        assert torch.equal(weights[:num], gates) and count.item() == num
        assert torch.equal(weights[num:], before[2][num:])


@pytest.mark.parametrize("_", [pytest.param(None, marks=MARKS)])
def test_an_id_that_32_bits_do_not_hold_names_no_expert(_):
    inputs = Inputs.empty(2, 96, 3, DEV)
    idx = torch.tensor([[2**32 + 1, -(2**32), 5]], device=DEVICE)
    x, weights = torch.zeros(1, 96, device=DEVICE).bfloat16(), torch.zeros(1, 3, device=DEVICE)
    copy_inputs(now(x, idx, weights), inputs)
    assert inputs.topk_idx[0].tolist() == [-2, -2, 5]
    idx = torch.tensor([[-7, -1, 2**31 - 1]], device=DEVICE).int()
    copy_inputs(now(x, idx, weights), inputs)
    assert inputs.topk_idx[0].tolist() == [-2, -1, 2**31 - 1]


@pytest.mark.parametrize("_", [pytest.param(None, marks=MARKS)])
def test_no_token_touches_nothing_but_the_count(_):
    inputs, y = Inputs.empty(4, 96, 3, DEV), torch.ones(4, 96, device=DEVICE).bfloat16()
    inputs.count.fill_(3)
    nothing = torch.zeros(WORDS, dtype=torch.int64, device=DEVICE)
    before = there(inputs)
    copy_inputs(nothing, inputs)
    copy_output(nothing, y)
    assert all(map(torch.equal, there(inputs)[:3], before[:3])) and inputs.count.item() == 0


@pytest.mark.parametrize("_", [pytest.param(None, marks=MARKS)])
def test_more_tokens_than_the_graph_holds_end_at_its_capacity(_):
    """Never sent; if it were, nobody else's memory would be written."""
    x = torch.ones(5, 96, device=DEVICE).bfloat16()
    idx, weights = torch.zeros(5, 3, device=DEVICE).long(), torch.zeros(5, 3, device=DEVICE)
    padded = torch.zeros(5, 96, device=DEVICE).bfloat16()
    inputs = Inputs.empty(4, 96, 3, DEV)._replace(x=padded[:4])
    copy_inputs(now(x, idx, weights), inputs)
    assert inputs.count.item() == 4 and (padded[:4] == 1).all() and not padded[4].any()


@pytest.mark.parametrize("hidden", [96, 2880])
@pytest.mark.parametrize("_", [pytest.param(None, marks=MARKS)])
def test_the_output_goes_where_the_call_wants_it(_, hidden):
    rng = torch.Generator().manual_seed(0)
    y = torch.randn(8, hidden, generator=rng).bfloat16().to(DEVICE)
    idx, weights = torch.zeros(8, 3, device=DEVICE).long(), torch.zeros(8, 3, device=DEVICE)
    for num in (8, 3, 1):
        to = torch.zeros(num + 1, hidden, device=DEVICE).bfloat16()
        copy_output(now(y[:num], idx[:num], weights[:num], to), y)
        assert torch.equal(to[:num], y[:num]) and not to[num].any()


@pytest.mark.parametrize("_", [pytest.param(None, marks=MARKS)])
def test_notes_are_taken_in_turn_and_round_the_ring(_):
    args = ReplayArgs.empty(4, DEV)
    assert args.slots.is_pinned() == (not INTERPRETED)
    for step in range(11):
        args.slots[step % 4] = torch.arange(WORDS) + (step << 40)
        read_args(args)
        assert args.now.tolist() == [(step << 40) + word for word in range(WORDS)]
        assert args.next_slot.item() == (step + 1) % 4


@pytest.mark.parametrize("_", [pytest.param(None, marks=MARKS)])
def test_calls_beyond_the_ring_each_have_their_own_inputs_and_output(_):
    """What a graph does around the layer's launches, for a layer that doubles its tokens."""
    rng = torch.Generator().manual_seed(0)
    args, inputs = ReplayArgs.empty(4, DEV), Inputs.empty(8, 96, 3, DEV)
    own = torch.zeros(8, 96, device=DEVICE).bfloat16()
    for step in range(10):
        num = 1 + step * 5 % 8
        x = torch.randn(num, 96 + step, generator=rng).bfloat16().to(DEVICE)[:, step:]
        idx = torch.randint(-1, 8, (num, 3), generator=rng).to(DEVICE)
        idx, weights = idx.int() if step % 2 else idx, torch.randn(num, 3, generator=rng)
        weights = weights.to(DEVICE)
        y = None if step % 3 == 2 else torch.zeros(num, 96, device=DEVICE).bfloat16()
        args.slots[step % 4] = torch.tensor(arguments(x, idx, weights, y))
        read_args(args)
        copy_inputs(args.now, inputs)
        torch.add(inputs.x, inputs.x, out=own)
        copy_output(args.now, own)
        assert torch.equal(own[:num] if y is None else y, 2 * x)
        assert torch.equal(inputs.topk_idx[:num], idx.int()) and inputs.count.item() == num
        assert torch.equal(inputs.topk_weights[:num], weights)


@pytest.mark.skipif(INTERPRETED, reason="the interpreter compiles nothing")
@pytest.mark.parametrize("arch", [80, 90, 100])
def test_they_compile_for_any_address(arch):
    half, word, real = (Stand(d) for d in (torch.bfloat16, torch.int32, torch.float32))
    long = Stand(torch.int64)
    for slots in (2**20, 2**46):  # an address is as long as it may be, whatever its value
        taken = compile_kernel(
            _read_args_kernel, (slots, long, long, 256, WORDS), arch, num_warps=1
        )
        assert "ld.volatile.global" in taken.asm["ptx"]
        assert ".param .u64 _read_args_kernel_param_0" in taken.asm["ptx"]
    args = (long, half, word, real, word, 4096, 8, 8, 1024)
    filled = compile_kernel(_copy_inputs_kernel, args, arch, num_warps=4)
    loads = [line for line in filled.asm["ptx"].splitlines() if "ld.global" in line]
    assert not any(".v" in line for line in loads)  # an odd address is as good as any
    given = compile_kernel(_copy_output_kernel, (long, half, 4096, 1024), arch, num_warps=4)
    assert "st.global.v4" in given.asm["ptx"]  # its own allocations are not

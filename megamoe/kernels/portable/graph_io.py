"""Around a captured call: what it is about, its inputs into the graph's buffers, its output out.

A graph takes no arguments. It begins with `read_args`, which reads a slot of host memory, and
addresses are cast to pointers here: one graph serves inputs wherever they lie.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from megamoe.planner.launches import Launch

WORDS = 8  # of a slot: those below, and one that is free

# Addresses of the inputs and of the result (0: it stays where it is), elements from row to row of
# x, tokens, and whether ids are int64.
X, IDX, WEIGHTS, Y, X_STRIDE, NUM_TOKENS, IS_LONG = map(tl.constexpr, range(7))


class ReplayArgs(NamedTuple):
    """Slots that the host writes and the GPU reads one after the other."""

    slots: Tensor  # int64 [S, WORDS]: host memory that the GPU reads at the same address
    next_slot: Tensor  # int64 [1]: the slot that is read next
    now: Tensor  # int64 [WORDS]: the one that was read last

    @classmethod
    def empty(cls, num_slots: int, device: torch.device) -> ReplayArgs:
        """Slots of no token and no result."""
        slots = torch.zeros(
            num_slots, WORDS, dtype=torch.int64, device="cpu", pin_memory=device.type == "cuda"
        )
        next_slot, now = (torch.zeros(n, dtype=torch.int64, device=device) for n in (1, WORDS))
        return cls(slots, next_slot, now)


class Inputs(NamedTuple):
    """Where a captured call finds its tokens; rows from `count` on are padding."""

    x: Tensor  # bf16 [B, H]
    topk_idx: Tensor  # int32 [B, k]
    topk_weights: Tensor  # float32 [B, k]
    count: Tensor  # int32 [1]

    @classmethod
    def empty(cls, num_tokens: int, hidden: int, top_k: int, device: torch.device) -> Inputs:
        """Room for `num_tokens` tokens, none of which is there."""
        return cls(
            torch.zeros(num_tokens, hidden, dtype=torch.bfloat16, device=device),
            torch.full((num_tokens, top_k), -1, dtype=torch.int32, device=device),
            torch.zeros(num_tokens, top_k, dtype=torch.float32, device=device),
            torch.zeros(1, dtype=torch.int32, device=device),
        )


@triton.jit(do_not_specialize=["slots"])
def _read_args_kernel(slots: tl.int64, next_slot, now, SLOTS: tl.constexpr, WORDS: tl.constexpr):
    at = tl.load(next_slot)
    word = tl.arange(0, WORDS)
    # volatile: the host wrote since the last look, which may still lie in a cache
    where = slots.to(tl.int64).to(tl.pointer_type(tl.int64))  # the interpreter may hold 32 bits
    words = tl.load(where + at * WORDS + word, volatile=True)
    tl.store(now + word, words)
    tl.debug_barrier()  # all threads have read which slot is next
    tl.store(next_slot, (at + 1) % SLOTS)


@triton.jit(do_not_specialize=["hidden"])
def _copy_inputs_kernel(
    now, x_out, idx_out, weights_out, count, hidden,
    TOP_K: tl.constexpr, SLOTS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    num_tokens = tl.minimum(tl.load(now + NUM_TOKENS), tl.num_programs(0))
    if (token == 0) & (part == 0):
        tl.store(count, num_tokens.to(tl.int32))
    if token < num_tokens:
        col = part * COLS + tl.arange(0, COLS)
        inside = col < hidden
        x = tl.load(now + X).to(tl.pointer_type(tl.bfloat16))
        row = tl.load(x + token * tl.load(now + X_STRIDE) + col, mask=inside)
        tl.store(x_out + token * hidden + col, row, mask=inside)
        if part == 0:
            slot = tl.arange(0, SLOTS)
            at = token * TOP_K + slot
            used = slot < TOP_K
            idx = tl.load(now + IDX)
            if tl.load(now + IS_LONG) != 0:
                ids = tl.load(idx.to(tl.pointer_type(tl.int64)) + at, mask=used, other=-1)
            else:
                short = tl.load(idx.to(tl.pointer_type(tl.int32)) + at, mask=used, other=-1)
                ids = short.to(tl.int64)
            # an id that 32 bits do not hold is a fault, which is reported later
            expert = tl.where((ids < -1) | (ids > 2147483647), -2, ids)
            tl.store(idx_out + at, expert.to(tl.int32), mask=used)
            weights = tl.load(now + WEIGHTS).to(tl.pointer_type(tl.float32))
            tl.store(weights_out + at, tl.load(weights + at, mask=used), mask=used)


@triton.jit
def _copy_output_kernel(now, y, hidden, COLS: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    out = tl.load(now + Y)
    if (token < tl.load(now + NUM_TOKENS)) & (out != 0):
        col = tl.program_id(1) * COLS + tl.arange(0, COLS)
        inside = col < hidden
        at = token * hidden + col
        to = tl.multiple_of(out.to(tl.pointer_type(tl.bfloat16)), 16)  # torch's own allocation
        tl.store(to + at, tl.load(y + at, mask=inside), mask=inside)


def read_args(args: ReplayArgs, step: Launch) -> None:
    """Copy the next slot to `now`; the one after it is then the next."""
    address, num = args.slots.data_ptr(), len(args.slots)
    _read_args_kernel[step.grid](
        slots=address, next_slot=args.next_slot, now=args.now, SLOTS=num, WORDS=WORDS,
        **step.config.constants(),
    )  # fmt: skip


def copy_inputs(now: Tensor, into: Inputs, step: Launch) -> None:
    """Copy T tokens, int32 or int64 ids and weights to the first T rows, and T to the count."""
    _copy_inputs_kernel[step.grid](
        now=now, x_out=into.x, idx_out=into.topk_idx, weights_out=into.topk_weights,
        count=into.count, hidden=into.x.shape[1], TOP_K=into.topk_idx.shape[1],
        **step.config.constants(),
    )  # fmt: skip


def copy_output(now: Tensor, y: Tensor, step: Launch) -> None:
    """Copy the first T rows of the graph's output to where the call wants them, if it does."""
    _copy_output_kernel[step.grid](now=now, y=y, hidden=y.shape[1], **step.config.constants())

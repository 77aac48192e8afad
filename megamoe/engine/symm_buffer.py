"""A rank's symmetric buffer as tensors, for fused launches over several ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from megamoe.layout.regions import Workspace
from megamoe.planner.launches import Launch

if TYPE_CHECKING:
    from megamoe.kernels.gluon.mega.arguments import Inbox

DTYPES = {
    "u8": torch.uint8, "i32": torch.int32, "i64": torch.int64, "f32": torch.float32,
    "bf16": torch.bfloat16,
}  # fmt: skip


class SymmBuffer(NamedTuple):
    """The regions of `layout.exchange`."""

    signals: Tensor
    counters: Tensor
    num_valid: Tensor
    topk_idx: Tensor
    topk_weights: Tensor
    tokens: Tensor
    rows: Tensor
    inbox_tokens: Tensor
    inbox_scale: Tensor
    inbox_slots: Tensor
    inbox_weights: Tensor
    inbox_counts: Tensor

    @property
    def inbox(self) -> Inbox:
        """What peers push."""
        from megamoe.kernels.gluon.mega.arguments import Inbox

        return Inbox(*self[-len(Inbox._fields) :])

    def put(
        self, x: Tensor, topk_idx: Tensor, topk_weights: Tensor, step: Launch | None = None
    ) -> None:
        """The tokens of a call, on the current stream: one launch on a GPU.

        The call's launches take equally many each.

        step  the plan's launch of so many tokens (`Plan.put`); a CPU, which only copies, needs none
        """
        num = len(x)
        if x.device.type != "cpu":
            from megamoe.kernels.portable.put import put

            into = self.tokens, self.topk_idx, self.topk_weights
            assert step is not None
            put(x, topk_idx, topk_weights, into, self.num_valid, step=step)
            return
        self.tokens[:num].copy_(x)
        self.topk_idx[:num].copy_(topk_idx)
        self.topk_weights[:num].copy_(topk_weights)
        passes = len(self.num_valid)
        if passes == 1:
            self.num_valid.fill_(num)
            return
        each = len(self.tokens) // passes
        first = torch.arange(0, passes * each, each, dtype=torch.int32, device=x.device)
        self.num_valid.copy_((num - first).clamp_(0, each))


def symm_buffer_in(memory: Tensor, of: Workspace) -> SymmBuffer:
    """uint8 memory as a symmetric buffer."""
    return SymmBuffer(*regions_in(memory, of, SymmBuffer._fields))


def regions_in(memory: Tensor, of: Workspace, names: Sequence[str]) -> list[Tensor]:
    """Regions of uint8 memory by name, in their shapes and types."""
    regions = [of[name] for name in names]
    return [memory[r.offset : r.end].view(DTYPES[r.dtype]).view(r.shape) for r in regions]

"""What a backend is: experts as it reads them, a call from end to end, and the rows of a pass.

`reference`, `portable`, `hopper` and `blackwell` have an object each with these functions. Staged
calls (`staged.py`), expert parallelism (`parallel.py`), fused calls and the chain use nothing else,
but for what Gluon's two have in common (`gluon.py`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from megamoe.engine.call import Call
from megamoe.engine.weights import ExpertWeights
from megamoe.layout.regions import ceil_div
from megamoe.planner.launches import Pass
from megamoe.planner.plan import Plan

if TYPE_CHECKING:
    from megamoe.kernels.portable.routing import Routing


class Prepared(NamedTuple):
    """The experts of one launch as Gluon's kernels read them."""

    w13: Any
    w2: Any
    arithmetic: Any  # how they are multiplied


class SlotRows(NamedTuple):
    """Rows on their way to combine: bf16 [T, slots, H], or FP8 codes and their E8M0 scales.

    scale  uint8 [T, slots, blocks of 128 columns]; None: the rows are BF16
    """

    data: Tensor
    scale: Tensor | None = None

    @classmethod
    def empty(
        cls, num_tokens: int, num_slots: int, hidden: int, device: torch.device, *, is_fp8: bool
    ) -> SlotRows:
        """Memory for them."""
        shape = num_tokens, num_slots
        if not is_fp8:
            return cls(torch.empty(*shape, hidden, dtype=torch.bfloat16, device=device))
        codes, scale = (
            torch.empty(*shape, width, dtype=torch.uint8, device=device)
            for width in (hidden, ceil_div(hidden, 128))
        )
        return cls(codes, scale)


class Backend(ABC):
    """One way to compute the layer.

    has_fp8_rows  L2 writes the rows of combine="fp8" as FP8; else a launch of their own makes them
    """

    name: str
    has_fp8_rows = False

    @abstractmethod
    def prepare(self, weights: ExpertWeights) -> Any:
        """The experts as its kernels read them, made at the first call and kept with them."""

    @abstractmethod
    def run(self, call: Call, plan: Plan) -> Tensor:
        """The launches of a plan: bf16 [T, H] -> bf16 [T, H]."""

    @abstractmethod
    def rows(
        self,
        call: Call,
        plan: Plan,
        steps: Pass,
        out: SlotRows,
        first_slot: int = 0,
        routing: Routing | None = None,
    ) -> None:
        """Dispatch, L1 and L2 of one pass of the plan: its rows to the slots from `first_slot` on.

        Shared experts that the call has are in the pass, in the slots after the routed ones.

        routing  of the call, to be checked and copied; None: every id and weight is good
        """


def backend_named(name: str) -> Backend:
    """The object of a backend; its kernels are imported now."""
    if name == "hopper":
        from megamoe.engine.hopper import HOPPER

        return HOPPER
    if name == "blackwell":
        from megamoe.engine.blackwell import BLACKWELL

        return BLACKWELL
    if name == "portable":
        from megamoe.engine.portable import PORTABLE

        return PORTABLE
    from megamoe.engine.reference import REFERENCE

    return REFERENCE

"""GroupMode: calls of a layer over a group in one mode that needs no host between ranks.

The host never waits. A rank that refuses its own input takes part without tokens, so that no rank
waits for it, and raises afterwards.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from megamoe.distributed.rendezvous import RESTART, Rendezvous
from megamoe.engine.group_memory import GroupMemory
from megamoe.engine.status import DeviceStatus, is_capturing
from megamoe.errors import MegaMoETimeout, NotAvailable, RankError, require
from megamoe.formats.quantized import Quantized
from megamoe.layout.regions import Workspace
from megamoe.planner.buckets import bucket_of
from megamoe.planner.plan import Plan

if TYPE_CHECKING:
    from megamoe.engine.layer import MoE

Inputs = tuple[Tensor | Quantized, Tensor, Tensor]


class GroupMode(ABC):
    """This rank's shared memory of a mode, and where its peers' lies. Make it on all ranks.

    num_tokens  of a rank in the largest call
    plan        of that call
    """

    mode: str
    num_tokens: int
    plan: Plan

    def _share(
        self, layer: MoE, rendezvous: Rendezvous, where: Workspace, memory: GroupMemory | None
    ) -> Tensor:
        """Map the memory of all ranks; int64 [R], bytes from a place here to the same place there.

        memory  that of layers that are alike; None: its own
        """
        device = layer.weights.device
        self.memory = memory or GroupMemory(layer._status)
        self._shared = self.memory.share(self.mode, rendezvous, where.num_bytes, device)
        return torch.tensor(self._shared.offsets, dtype=torch.int64, device=device)

    def bucket(self, bound: int) -> int:
        """The bound that a call is planned for."""
        return bucket_of(bound, self.num_tokens)

    @property
    @abstractmethod
    def why_eager(self) -> str:
        """Why no graph of the layer holds a call; "" where one does."""

    @property
    def has_graphs(self) -> bool:
        """Whether a call can be replayed."""
        return not self.why_eager

    @property
    def num_bytes(self) -> int:
        """Symmetric memory of this rank."""
        return self._shared.own.numel()

    def __deepcopy__(self, memo: Any) -> GroupMode:
        return self  # a copied layer has the same peers

    def __call__(
        self,
        layer: MoE,
        x: Tensor | Quantized,
        topk_idx: Tensor,
        topk_weights: Tensor,
        stats: Tensor,
        check: Callable[[], None],
        bound: int | None = None,
    ) -> Tensor:
        """One call on this rank; all ranks make it. bf16 [T, H].

        bound  tokens of a rank that it is planned for, the same on all; None: the layer's
        """
        order_after_last(layer.weights.device)  # before the shared memory is written to
        inputs = x, topk_idx, topk_weights

        def accept() -> None:
            check()
            self._accept(inputs)

        refusal = refusal_of(layer._status, accept)
        y = self._make(layer, None if refusal else inputs, bound, stats)
        layer._status.copy_to_host_async(layer.top_k)
        if refusal is not None:
            raise refusal
        return y

    @abstractmethod
    def _accept(self, inputs: Inputs) -> None:
        """Take checked inputs, or refuse them."""

    @abstractmethod
    def _make(self, layer: MoE, inputs: Inputs | None, bound: int | None, stats: Tensor) -> Tensor:
        """The launches of a call on accepted inputs; None: without tokens."""

    def _check_range(self, layer: MoE) -> None:
        """Refuse weights whose plan would not be that of the other ranks."""
        from megamoe.engine import images

        is_alike = self.plan.backend != "hopper" or (
            images.fits_e4m3(layer.weights) == self.plan.call.fits_e4m3
        )
        require(
            is_alike,
            f"weights of mode {self.mode} over a group must keep the range that it was built for",
            got="scales that changed what E4M3 can hold",
            fix="build the layer anew on all ranks",
            kind=NotAvailable,
        )


REMEDY = f"{RESTART} (ranks that pass different max_tokens may wait for each other so)"
_LAST: dict[torch.device, torch.cuda.Stream] = {}  # of the last such call over a group


def refusal_of(status: DeviceStatus, check: Callable[[], object]) -> Exception | None:
    """What `check` raises, for afterwards; a rank that stands at another call raises at once."""
    status.remedy = REMEDY  # no rank knows how far its peers came
    try:
        status.raise_if_seen()
        check()
    except (MegaMoETimeout, RankError):
        raise
    except Exception as error:
        return error
    return None


def order_after_last(device: torch.device) -> None:
    """Let the current stream wait for the last call over a group on this device, fused or a chain.

    A fused launch may not take the SMs on which the rows of a chain's peers are to be computed.
    """
    if device.type != "cuda" or is_capturing(device):
        return  # inside a capture: the owner of the graph must order its replays
    now, last = torch.cuda.current_stream(device), _LAST.get(device)
    if last is not None and now != last:
        now.wait_stream(last)
    _LAST[device] = now

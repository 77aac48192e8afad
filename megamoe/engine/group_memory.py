"""GroupMemory: the symmetric memory of calls over a group, which layers that are alike share.

A model has a layer of experts in every block, and no two of them are called at the same time: calls
over a group follow each other on a device (`group_mode.order_after_last`). So layers whose memory
has the same regions use the same memory, and a model needs it once, not once a layer.

The number of a call lies in the memory, so calls of all its layers are numbered together. What a
call that was given up left behind would be read by the next one, whatever its layer: the layers
have one status, and after a timeout none of them can be called.
"""

from __future__ import annotations

from typing import TYPE_CHECKING
from weakref import WeakValueDictionary

import torch

from megamoe.distributed import symmetric
from megamoe.distributed.rendezvous import Rendezvous
from megamoe.distributed.symmetric import Shared
from megamoe.engine.status import DeviceStatus
from megamoe.layout.regions import Workspace

if TYPE_CHECKING:
    from collections.abc import Hashable

# What layers must have alike -> the memory, as long as one of them lives.
_MEMORIES: WeakValueDictionary[Hashable, GroupMemory] = WeakValueDictionary()


class GroupMemory:
    """One rank's symmetric memory by mode, and what the layers over it have in common.

    serial  the same on all ranks that made it together
    lost    what ended a call between two of its launches
    """

    def __init__(self, status: DeviceStatus, serial: int = 0) -> None:
        self.status, self.serial = status, serial
        self.lost: BaseException | None = None
        self._shared: dict[str, Shared] = {}

    def share(
        self, mode: str, rendezvous: Rendezvous, num_bytes: int, device: torch.device
    ) -> Shared:
        """The memory of a mode; the first layer allocates and maps it, on all ranks."""
        if mode not in self._shared:
            self._shared[mode] = symmetric.share(rendezvous, num_bytes, device)
        return self._shared[mode]

    @property
    def is_usable(self) -> bool:
        """Whether every call so far has ended. Waits for the GPU."""
        return self.lost is None and not int(self.status.report[0])


def memory_for(
    rendezvous: Rendezvous, where: dict[str, Workspace], top_k: int, own: DeviceStatus
) -> GroupMemory:
    """The memory of earlier layers with the same regions, if all ranks still have it, or new one.

    where  regions by mode
    own    the layer's status, which new memory takes
    """
    device = own.storage.device
    key = rendezvous.members, device, top_k, tuple(sorted(where.items()))
    memory = _MEMORIES.get(key)
    latest = max((one.serial for one in _MEMORIES.values()), default=0)

    def card() -> list[int]:
        return [memory.serial if memory is not None and memory.is_usable else 0, latest]

    cards = rendezvous.gather("look for memory to share", card)
    if memory is not None and cards[0][0] and all(one[0] == cards[0][0] for one in cards):
        return memory
    memory = GroupMemory(own, 1 + max(one[1] for one in cards))
    _MEMORIES[key] = memory
    return memory

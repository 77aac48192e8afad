"""Link: private connections between the ranks of a group, where every wait is bounded and named.

Messages go from rank to rank (gloo), not through a collective: so a wait knows which rank it waits
for, has a bound of its own, and ends at once when that rank's process ends. The first rank that
sees a fault writes it down in the group's store and cuts its connections; the others see the cut,
read what was written and raise the same error. A link that failed once stays failed: it says so on
every call, until a new layer makes a new one.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any
from weakref import WeakValueDictionary

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d

from megamoe.distributed.rendezvous import (
    RESTART,
    Rendezvous,
    error_from_json,
    error_to_json,
    wait_for,
)
from megamoe.errors import MegaMoEError, MegaMoETimeout, RankError

TAG, CUT_TAG = 0x6D6F, 0x6D70
GRACE_S = 0.5  # a connection closed: the rank that closed it may be about to write down why


class Link:
    """Connections of this rank to all others. Make it through `link_of`."""

    def __init__(self, rendezvous: Rendezvous, number: int) -> None:
        self.rank, self.num_ranks, self.number = rendezvous.rank, rendezvous.num_ranks, number
        self._store, self._base = rendezvous.store, rendezvous.base
        self._fault: dict[str, Any] | None = None
        self.fault_key = f"link/{number}/fault"
        # Made directly: `new_group` names a group by how many this process has, and that differs.
        try:
            self._peers: Any = dist.ProcessGroupGloo(
                distributed_c10d.PrefixStore(f"link/{number}", rendezvous.store),
                rendezvous.rank,
                rendezvous.num_ranks,
                timedelta(seconds=rendezvous.timeout_s),
            )
        except Exception as error:
            raise RankError(
                f"the ranks must reach each other; got {_short(error)}; {RESTART}"
            ) from error

    @property
    def is_alive(self) -> bool:
        """Whether nothing failed and torch.distributed was not started anew since."""
        return self._fault is None and self._base is distributed_c10d._get_default_store()

    def swap(
        self, sends: Sequence[Tensor], recvs: Sequence[Tensor], what: str, timeout_s: float
    ) -> None:
        """sends[r] to rank r while recvs[r] fills from it. CPU tensors; empty ones stay here."""
        self.raise_if_failed()
        deadline = time.monotonic() + timeout_s
        recvs[self.rank].copy_(sends[self.rank])
        coming: list[tuple[int, Any]] = []
        going: list[tuple[int, Any]] = []
        for step in range(1, self.num_ranks):  # everyone starts with its neighbour
            peer = (self.rank + step) % self.num_ranks
            try:
                if recvs[peer].numel():
                    coming.append((peer, self._peers.recv([recvs[peer]], peer, TAG)))
                if sends[peer].numel():
                    going.append((peer, self._peers.send([sends[peer]], peer, TAG)))
            except Exception as error:
                raise self._failed(peer, what, 1, timeout_s, is_late=False) from error
        for done, (peer, work) in enumerate([*coming, *going]):
            left = max(deadline - time.monotonic(), 0.001)
            try:
                work.wait(timedelta(seconds=left))
            except Exception as error:
                is_late = time.monotonic() >= deadline - 0.01
                num_arrived = 1 + min(done, len(coming))
                raise self._failed(peer, what, num_arrived, timeout_s, is_late=is_late) from error

    def raise_if_failed(self) -> None:
        """Say again what ended this link."""
        if self._fault is not None:
            raise error_from_json(self._fault)

    def fail(self, error: BaseException, what: str) -> None:
        """This rank cannot go on: report it to the others, and let none of them wait."""
        if self._fault is None:
            report = error_to_json(error)
            if len(report["args"]) == 1:
                report["args"] = [f"rank {self.rank} failed in {what}: {report['args'][0]}"]
            self._write(report)
            self._cut()

    def _failed(
        self, peer: int, what: str, num_arrived: int, timeout_s: float, *, is_late: bool
    ) -> MegaMoEError:
        """The error to raise: that of the rank that saw the fault first."""
        error: MegaMoEError
        if is_late:
            bound = f"rank {peer} in {what} (the bound is {timeout_s:g} s)"
            error = MegaMoETimeout(self.rank, bound, self.num_ranks, num_arrived, RESTART)
        else:
            with suppress(Exception):
                wait_for(self._store, [self.fault_key], GRACE_S)
            error = RankError(
                f"every rank must stay until the call ends; got rank {peer} gone, as rank "
                f"{self.rank} saw in {what}; {RESTART}"
            )
        self._write(error_to_json(error))
        self._cut()
        assert self._fault is not None
        return error_from_json(self._fault)

    def _write(self, mine: dict[str, Any]) -> None:
        """Keep what was written first, by this rank or another."""
        self._fault = mine
        with suppress(Exception):  # the store may have gone with the rank that held it
            self._fault = json.loads(self._store.compare_set(self.fault_key, "", json.dumps(mine)))

    def _cut(self) -> None:
        """Close every connection: gloo does that to a receive which runs past its time."""
        peer = (self.rank + 1) % self.num_ranks
        with suppress(Exception):
            self._peers.recv(
                [torch.empty(1, dtype=torch.float32, device="cpu")], peer, CUT_TAG
            ).wait(timedelta(milliseconds=1))


# Layers of the same ranks share a link, and it goes with the last of them.
_LINKS: WeakValueDictionary[tuple[int, ...], Link] = WeakValueDictionary()
_NUMBERS: dict[tuple[int, ...], int] = {}


def link_card(rendezvous: Rendezvous) -> dict[str, int]:
    """What `link_of` must know of a rank: its link, 0 if none works, and how many there were."""
    link, number = _LINKS.get(rendezvous.members), _NUMBERS.get(rendezvous.members, 0)
    if link is None or not link.is_alive:
        return {"link": 0, "made": number}
    rendezvous.fault_key = link.fault_key
    return {"link": link.number, "made": number}


def link_of(rendezvous: Rendezvous, cards: Sequence[dict[str, int]]) -> Link | None:
    """The link of these ranks: the one they all have, or a new one; None for a rank alone."""
    if rendezvous.num_ranks == 1:
        return None
    link = _LINKS.get(rendezvous.members)
    if link is None or {card["link"] for card in cards} != {link.number}:
        number = max(card["made"] for card in cards) + 1
        _NUMBERS[rendezvous.members] = number
        link = _LINKS[rendezvous.members] = Link(rendezvous, number)
    rendezvous.fault_key = link.fault_key
    return link


def _short(error: BaseException) -> str:
    text = str(error).splitlines()
    return f"{type(error).__name__}: {text[0][:200] if text else 'no text'}"

"""Ranks gather cards: each leaves one in the group's store and reads all others', within a bound.

For what happens once: building a layer, warming it up, gathering statistics. A rank that fails
before it can say its word leaves the error instead, and every rank raises it; a rank that does not
come is named by all that waited. No connection is opened for it, so nothing is left to tear down.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from megamoe import errors
from megamoe.errors import (
    DTypeError,
    MegaMoEError,
    MegaMoETimeout,
    NotAvailable,
    RangeError,
    RankError,
    require,
)

RESTART = "restart the ranks"
LONGEST_PAUSE_S = 0.05
_TIMES: dict[tuple[tuple[int, ...], str], int] = {}  # gathers so far, by members and step


class Rendezvous:
    """The members of a process group, as this rank sees them."""

    def __init__(self, group: Any, timeout_s: float) -> None:
        check_group(group)
        require(
            timeout_s > 0,
            "timeout_s must be positive",
            got=timeout_s,
            kind=RangeError,
        )
        self.group, self.timeout_s = group, timeout_s
        self.members = tuple(dist.get_process_group_ranks(group))
        self.rank, self.num_ranks = dist.get_rank(group), len(self.members)
        name = hashlib.sha256(repr(self.members).encode()).hexdigest()[:16]
        self.base = distributed_c10d._get_default_store()
        self.store = distributed_c10d.PrefixStore(f"megamoe/{name}", self.base)
        self.fault_key = ""  # of the link, once there is one: no rank waits for one that failed

    def gather(
        self, step: str, make: Callable[[], Any], timeout_s: float | None = None
    ) -> list[Any]:
        """Every rank's `make()`, as JSON keeps it, by rank; any rank's failure is everyone's."""
        prefix, before = self._next(step)
        own: Exception | None = None
        try:
            card = {"card": make()}
        except Exception as error:
            own, card = error, {"error": error_to_json(error)}
        cards = self._exchange(prefix, step, card, timeout_s or self.timeout_s)
        with suppress(Exception):  # all have come here, so no rank reads the last cards
            self.store.delete_key(f"{before}/{self.rank}")
        for rank, other in enumerate(cards):
            if "error" in other:
                raise error_from_json(other["error"], f"rank {rank}, step {step}") from own
        return [other["card"] for other in cards]

    def follow(
        self, step: str, make: Callable[[], Any], timeout_s: float | None = None
    ) -> list[Any]:
        """As `gather`, but rank 0 leads: the others start when it is done."""
        if self.num_ranks == 1:
            return [make()]
        leads = self.rank == 0
        lead = self.gather(f"{step}, rank 0 leading", make if leads else lambda: None, timeout_s)
        rest = self.gather(f"{step}, the others", (lambda: None) if leads else make, timeout_s)
        return [lead[0], *rest[1:]]

    def _next(self, step: str) -> tuple[str, str]:
        """Keys of this gather and of the one before it. They are counted for good, never reused:
        a store outlives a group that is destroyed and made again."""
        times = _TIMES[self.members, step] = _TIMES.get((self.members, step), 0) + 1
        return f"{step}/{times}", f"{step}/{times - 1}"

    def _exchange(
        self, prefix: str, step: str, card: dict[str, Any], timeout_s: float
    ) -> list[dict[str, Any]]:
        keys = [f"{prefix}/{rank}" for rank in range(self.num_ranks)]
        start = time.monotonic()
        try:
            self.store.set(keys[self.rank], json.dumps(card))
            is_complete = wait_for(self.store, keys, timeout_s, unless=self.fault_key)
            cards = [json.loads(self.store.get(key)) for key in keys] if is_complete else []
            gave_up = self.store.check([f"{prefix}/gave_up"])
        except Exception as error:
            raise RankError(
                f"the group's store must be reachable (step {step}); got {error}; {RESTART}"
            ) from error
        if gave_up:
            raise error_from_json(json.loads(self.store.get(f"{prefix}/gave_up")))
        if not is_complete:
            raise self._late(prefix, step, keys, time.monotonic() - start, timeout_s)
        return cards

    def _late(
        self, prefix: str, step: str, keys: Sequence[str], waited_s: float, timeout_s: float
    ) -> MegaMoEError:
        """The rank that did not come, or why; later ranks learn that no rank waits any more."""
        if self.fault_key and self.store.check([self.fault_key]):
            return error_from_json(json.loads(self.store.get(self.fault_key)))
        missing = [r for r, key in enumerate(keys) if not self.store.check([key])]
        what = f"{named(missing)} in step {step} ({waited_s:.1f} s, the bound is {timeout_s:g} s)"
        late = MegaMoETimeout(
            self.rank, what, self.num_ranks, self.num_ranks - len(missing), RESTART
        )
        with suppress(Exception):
            self.store.set(f"{prefix}/gave_up", json.dumps(error_to_json(late)))
        return late


def wait_for(store: Any, keys: Sequence[str], timeout_s: float, unless: str = "") -> bool:
    """Whether all keys came in time; ends early if `unless` comes.

    Asks again and again: the store's own wait cannot be cut short and writes to stderr when late.
    """
    deadline, pause = time.monotonic() + timeout_s, 0.0005
    while not store.check(list(keys)):
        if time.monotonic() > deadline or (unless and store.check([unless])):
            return bool(store.check(list(keys)))
        time.sleep(pause)
        pause = min(2 * pause, LONGEST_PAUSE_S)
    return True


def check_group(group: Any) -> None:
    """Require a process group that this rank belongs to."""
    require(
        dist.is_available() and dist.is_gloo_available(),
        "torch must have torch.distributed with gloo",
        got=f"torch {torch.__version__} without",
        kind=NotAvailable,
    )
    require(
        isinstance(group, dist.ProcessGroup),
        "group must be a torch.distributed process group that this rank belongs to",
        got=type(group).__name__,
        fix="pass torch.distributed.group.WORLD or what new_group returned",
        kind=DTypeError,
    )


def named(ranks: Sequence[int]) -> str:
    """ "rank 3", or "ranks 1, 3"."""
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"


def error_to_json(error: BaseException) -> dict[str, Any]:
    """An error as JSON keeps it; what is not ours becomes a MegaMoEError that names its type."""
    if isinstance(error, MegaMoETimeout):
        return {
            "kind": "MegaMoETimeout",
            "args": [error.rank, error.barrier, error.expected, error.seen, RESTART],
        }
    if isinstance(error, MegaMoEError):
        return {"kind": type(error).__name__, "args": [str(error)]}
    return {"kind": "MegaMoEError", "args": [f"got {type(error).__name__}: {error}"]}


def error_from_json(report: dict[str, Any], by: str = "") -> MegaMoEError:
    """The error that a rank reported, to be raised here; `by` says whose it is."""
    kind = getattr(errors, report["kind"], MegaMoEError)
    args = report["args"]
    if by and len(args) == 1:
        args = [f"{by}: {args[0]}"]
    error = kind(*args)
    assert isinstance(error, MegaMoEError)
    return error

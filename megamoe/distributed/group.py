"""GroupWorld: one rank per process over a torch.distributed group, staged with an all-to-all.

One call: every rank says how many tokens and rows it sends to whom (or why it refuses the call);
tokens go out once per rank that needs them, quantised by their own rank; owners compute their
experts' rows; rows come home to their (token, slot) and are added there in slot order. Bits are
those of one rank. CPU tensors, and CUDA tensors where the group has no NCCL, travel over the link;
CUDA tensors otherwise through NCCL's all-to-all, with counts, refusals and faults over the link.

A layer in fused mode is built through this world too (cards, checks, statistics), but its calls do
not `run` here: `engine.fused_group` has them, over symmetric memory.
"""

from __future__ import annotations

import json
import struct
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from megamoe.balance.placement import Placement
from megamoe.distributed.link import link_card, link_of
from megamoe.distributed.placement import Places
from megamoe.distributed.rendezvous import (
    RESTART,
    Rendezvous,
    error_from_json,
    error_to_json,
    named,
)
from megamoe.distributed.wire import Wire
from megamoe.errors import CapacityError, MegaMoETimeout, NotAvailable, RankError, require
from megamoe.formats.quantized import Quantized

TRANSPORTS = ("link", "collective")


class Compute(Protocol):
    """What a rank computes; the world moves rows and knows no arithmetic."""

    @property
    def tokens_wire(self) -> Wire: ...
    @property
    def rows_wire(self) -> Wire: ...

    def check(self, topk_idx: Tensor, topk_weights: Tensor) -> None:
        """Refuse bad ids and weights, naming the first; called when the world saw one."""

    def tokens(self, x: Tensor | Quantized) -> Quantized:
        """Tokens [T, H] in the recipe's activation format."""

    def rows(self, x: Quantized, expert: Tensor, weight: Tensor) -> Quantized:
        """[M, H], local experts int64 [M], float32 [M] -> the experts' rows [M, H]."""

    def combine(
        self, rows: Quantized, slots: Tensor, x: Tensor | Quantized, idx: Tensor, weights: Tensor
    ) -> Tensor:
        """Rows [M, H] of flat slots (token * top_k + slot) -> bf16 [T, H]."""


class GroupWorld:
    """The ranks of a process group, as one layer uses them. Build it on all of them."""

    def __init__(
        self,
        rendezvous: Rendezvous,
        make: Callable[[], tuple[Placement, dict[str, Any]]],
        *,
        max_tokens: int | None = None,
        transport: str | None = None,
    ) -> None:
        """`make` checks what this rank brings and describes it; all ranks must describe alike.

        max_tokens  a call with more on any rank is refused on every rank
        transport   None: NCCL's all-to-all for CUDA tensors where the group has it, else the link
        """
        placements: list[Placement] = []

        def card() -> dict[str, Any]:
            placement, what = make()
            placements.append(placement)
            what["max_tokens_per_rank"] = max_tokens
            return {"what": what, **link_card(rendezvous)}

        cards = rendezvous.gather("build the layer", card)
        check_alike([card["what"] for card in cards])
        self.link = link_of(rendezvous, cards)
        self.rendezvous, self.group = rendezvous, rendezvous.group
        self.rank, self.num_ranks = rendezvous.rank, rendezvous.num_ranks
        self.timeout_s = rendezvous.timeout_s
        self.placement, self.max_tokens = placements[0], max_tokens
        self._transport = transport
        self._places: dict[torch.device, Places] = {}
        self.number = _next_number(rendezvous.members)
        self.calls, self._where = 0, ""

    def __deepcopy__(self, memo: Any) -> GroupWorld:
        return self  # a copied layer has the same peers

    def run(
        self,
        compute: Compute,
        x: Tensor | Quantized,
        topk_idx: Tensor,
        topk_weights: Tensor,
        check: Callable[[], None] = lambda: None,
    ) -> Tensor:
        """One call on this rank; all ranks make it. bf16 [T, H].

        `check` looks at the input. If it raises, on any rank, the call ends on all ranks with that
        error before a row is sent, and the next call may be made.
        """
        self.calls += 1
        if self.link is not None:
            self.link.raise_if_failed()
        sent: _Sent | None = None
        refusal: BaseException | None = None
        try:
            check()
            sent = self._prepare(compute, x, topk_idx, topk_weights)
        except Exception as error:
            refusal = error
        with self._reported("step counts"):
            heads = self._heads(sent, refusal)
        self._judge(heads, refusal)
        assert sent is not None
        with self._reported("step tokens"):
            tokens = self._swap(sent.tokens, sent.num_tokens, [h.tokens for h in heads])
            slots = self._swap(sent.slots, sent.num_slots, [h.slots for h in heads])
        with self._reported("step experts"):
            rows = self._owned(compute, tokens, slots, heads)
        with self._reported("step rows home"):
            returned = self._swap(rows, [h.slots for h in heads], sent.num_slots)
        with self._reported("step combine"):
            unpacked = compute.rows_wire.unpack(returned)
            return compute.combine(unpacked, sent.flat, x, topk_idx, topk_weights)

    @contextmanager
    def _reported(self, step: str) -> Iterator[None]:
        """If this rank fails here, no peer shall wait for what will not come."""
        self._where = f"call {self.calls} of layer {self.number}, {step}"
        try:
            yield
        except BaseException as error:
            if self.link is not None:
                self.link.fail(error, self._where)
            raise

    # -- one call --------------------------------------------------------------------------------

    def _prepare(
        self, compute: Compute, x: Tensor | Quantized, topk_idx: Tensor, topk_weights: Tensor
    ) -> _Sent:
        """Tokens packed by destination, and which of their slots they are for."""
        device = topk_idx.device
        if device not in self._places:
            self._places[device] = Places(self.placement, device)
        places = self._places[device]
        num_tokens, top_k = topk_idx.shape
        per_rank = self.placement.slots_per_rank
        physical = places.physical(topk_idx, self.rank)
        owner = (physical // per_rank).where(physical >= 0, self.num_ranks)  # [T, k]
        ranks = torch.arange(self.num_ranks, device=device)
        goes = owner[:, :, None] == ranks  # [T, k, R]
        needed = goes.any(1)
        is_bad = (topk_idx != -1) & ((physical < 0) | ~topk_weights.isfinite())
        counts = torch.cat([needed.sum(0), goes.sum((0, 1)), is_bad.sum()[None]])
        host = self._to_host(counts)
        if host[-1]:
            compute.check(topk_idx, topk_weights)
        num_to, num_slots = host[: self.num_ranks], host[self.num_ranks : -1]
        # Stable sorts by rank, cut at known lengths: no further wait for the GPU.
        by_rank = ranks[:, None].where(needed.T, self.num_ranks).reshape(-1)
        token = by_rank.sort(stable=True).indices[: sum(num_to)] % max(num_tokens, 1)
        flat = owner.reshape(-1).sort(stable=True).indices[: sum(num_slots)]
        to = owner.reshape(-1)[flat]
        place = (needed.cumsum(0) - 1)[flat // max(top_k, 1), to]
        local = physical.reshape(-1)[flat] % per_rank
        weight = topk_weights.reshape(-1)[flat].contiguous().view(torch.int32)
        words = compute.tokens_wire.pack(compute.tokens(x))[token]
        slots = torch.stack([place.int(), local.int(), weight], 1)
        return _Sent(num_tokens, words, slots, flat, num_to, num_slots)

    def _owned(
        self, compute: Compute, tokens: Tensor, slots: Tensor, heads: Sequence[Head]
    ) -> Tensor:
        """The rows of this rank's experts, packed, in the order in which their slots came."""
        first = [0]
        for head in heads[:-1]:
            first.append(first[-1] + head.tokens)
        offsets = torch.tensor(first, device=slots.device)
        num = torch.tensor([head.slots for head in heads], device=slots.device)
        start = torch.repeat_interleave(offsets, num, output_size=sum(head.slots for head in heads))
        at = slots[:, 0].long() + start
        weight = slots[:, 2].contiguous().view(torch.float32)
        x = compute.tokens_wire.unpack(tokens[at])
        return compute.rows_wire.pack(compute.rows(x, slots[:, 1].long(), weight))

    def _heads(self, sent: _Sent | None, refusal: BaseException | None) -> list[Head]:
        """What every rank says before anything moves."""
        num = 0 if sent is None else sent.num_here
        text = "" if refusal is None else json.dumps(error_to_json(refusal))
        none = [0] * self.num_ranks
        to, slots = (none, none) if sent is None else (sent.num_tokens, sent.num_slots)
        transport = TRANSPORTS.index(
            self._transport_of(sent.tokens.device if sent else torch.device("cpu"))
        )
        own = [
            Head(self.number, transport, num, to[r], slots[r], text).pack()
            for r in range(self.num_ranks)
        ]
        into = [torch.empty_like(t) for t in own]
        if self.link is None:
            into = own
        else:
            self.link.swap(own, into, self._where, self.timeout_s)
        return [Head.unpack(t) for t in into]

    def _judge(self, heads: Sequence[Head], refusal: BaseException | None) -> None:
        """Raise the same on every rank if any rank refuses, or brings too much, or is elsewhere."""
        for rank, head in enumerate(heads):
            if head.refusal:
                raise error_from_json(json.loads(head.refusal), f"rank {rank}") from refusal
        layers = [head.layer for head in heads]
        require(
            len(set(layers)) == 1,
            "all ranks must call their layers in the same order",
            got=f"layers {layers} in call {self.calls}, by rank",
            kind=RankError,
        )
        require(
            len({head.transport for head in heads}) == 1,
            "all ranks must keep the layer on the same kind of device",
            got=[TRANSPORTS[head.transport] for head in heads],
            kind=RankError,
        )
        for rank, head in enumerate(heads):
            require(
                self.max_tokens is None or head.num_tokens <= self.max_tokens,
                f"a call may hold at most max_tokens_per_rank = {self.max_tokens} tokens",
                got=f"{head.num_tokens} on rank {rank}",
                fix="split the batch or build the layer for more",
                kind=CapacityError,
            )

    # -- moving ----------------------------------------------------------------------------------

    def _transport_of(self, device: torch.device) -> str:
        if self._transport is not None:
            return self._transport
        if device.type == "cuda" and "cuda:nccl" in dist.get_backend_config(self.group):
            return "collective"
        return "link"

    def _swap(self, out: Tensor, num_out: list[int], num_in: list[int]) -> Tensor:
        """Rows of `out` to their ranks, by runs; the rows that came, by runs."""
        if self.link is None:
            return out
        if self._transport_of(out.device) == "collective":
            into = out.new_empty(sum(num_in), *out.shape[1:])
            dist.all_to_all_single(into, out, num_in, num_out, group=self.group)
            return into
        out, device = out.cpu().contiguous(), out.device
        into = out.new_empty(sum(num_in), *out.shape[1:])
        sends, recvs = torch.split(out, num_out), torch.split(into, num_in)
        self.link.swap(sends, recvs, self._where, self.timeout_s)
        return into.to(device)

    def _to_host(self, t: Tensor) -> list[int]:
        """A few integers from the device, waiting no longer than the bound."""
        if t.device.type != "cuda":
            return [int(v) for v in t.tolist()]
        require(
            not torch.cuda.is_current_stream_capturing(),
            "staged expert parallelism reads counts on the host and cannot be captured",
            got="a call under CUDA graph capture",
            kind=NotAvailable,
        )
        host = torch.empty(t.shape, dtype=t.dtype, device="cpu", pin_memory=True)
        host.copy_(t, non_blocking=True)
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(t.device))
        deadline = time.monotonic() + self.timeout_s
        while not event.query():
            if time.monotonic() > deadline:  # an all-to-all with a dead rank blocks the stream
                what = f"its own GPU in call {self.calls} (the bound is {self.timeout_s:g} s)"
                raise MegaMoETimeout(self.rank, what, 1, 0, RESTART)
            time.sleep(0)
        return [int(v) for v in host.tolist()]


class _Sent(NamedTuple):
    """What one rank sends in a call, in the order of the ranks it goes to."""

    num_here: int  # tokens of this rank
    tokens: Tensor  # int32 [n, words]
    slots: Tensor  # int32 [m, 3]: place in the run of tokens, local expert, weight
    flat: Tensor  # int64 [m]: token * top_k + slot
    num_tokens: list[int]  # to each rank
    num_slots: list[int]


@dataclass(frozen=True, slots=True)
class Head:
    """What a rank says to another before anything moves."""

    layer: int
    transport: int  # index in TRANSPORTS
    num_tokens: int  # on that rank
    tokens: int  # that it sends
    slots: int
    refusal: str  # JSON of an error, or ""

    _NUMBERS = struct.Struct("<6q")
    _TEXT = 976  # bytes for the refusal

    def pack(self) -> Tensor:
        """uint8, always as long."""
        text = self.refusal.encode()
        if len(text) > self._TEXT:  # cut the words, keep the JSON
            error = json.loads(self.refusal)
            error["args"] = [str(error["args"][0])[: self._TEXT // 8]]
            text = json.dumps(error).encode()
        numbers = self._NUMBERS.pack(
            self.layer, self.transport, self.num_tokens, self.tokens, self.slots, len(text)
        )
        return torch.frombuffer(bytearray(numbers + text.ljust(self._TEXT)), dtype=torch.uint8)

    @classmethod
    def unpack(cls, t: Tensor) -> Head:
        """The inverse of `pack`."""
        raw = t.numpy().tobytes()
        layer, transport, num_tokens, tokens, slots, length = cls._NUMBERS.unpack_from(raw)
        first = cls._NUMBERS.size
        return cls(
            layer, transport, num_tokens, tokens, slots, raw[first : first + length].decode()
        )


_NUMBERS: dict[tuple[int, ...], int] = {}  # layers so far, by members


def _next_number(members: tuple[int, ...]) -> int:
    _NUMBERS[members] = _NUMBERS.get(members, 0) + 1
    return _NUMBERS[members]


def check_alike(cards: Sequence[dict[str, Any]]) -> None:
    """Require that all ranks describe the same layer; the error names the first difference."""
    for name in {key: None for card in cards for key in card}:
        by_value: dict[str, list[int]] = {}
        for rank, card in enumerate(cards):
            by_value.setdefault(json.dumps(card.get(name)), []).append(rank)
        got = " and ".join(f"{value} on {named(ranks)}" for value, ranks in by_value.items())
        require(
            len(by_value) == 1,
            f"all ranks must build the same layer; {name} differs",
            got=got,
            kind=RankError,
        )

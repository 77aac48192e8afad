"""World: R ranks on one machine, each with a host that launches one call after the other.

Ranks are coupled by their workspaces alone: one may be in its next call while another still ends
the last.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from random import Random

from megamoe.errors import ShapeError, require
from megamoe.studies.deep_gemm.protocol import compute, dispatch
from megamoe.studies.deep_gemm.protocol.launch import NO_BUGS, Launch, Payload, Routing
from megamoe.studies.deep_gemm.protocol.machine import Actor, Machine
from megamoe.studies.deep_gemm.protocol.ops import WAIT, Steps, Violation, call, wait
from megamoe.studies.deep_gemm.protocol.sync import MEETINGS, give_up
from megamoe.studies.deep_gemm.protocol.words import Shape, words

ROLES: dict[str, Callable[[Launch, int], Steps]] = {
    "pull_tokens": dispatch.pull_tokens,
    "load_tokens": compute.load_tokens,
    "load_weights": compute.load_weights,
    "math": compute.math,
}
NUM_LOADERS = 2  # arrivals that fill a stage

Absent = tuple[int, int, str]  # rank, SM, role; SM -1 is the host, and so the whole rank


class World:
    """The ranks' memory and roles. `queue` calls, then let `machine.run` take steps."""

    def __init__(
        self,
        shape: Shape,
        payload: Payload,
        *,
        rng: Random,
        drain: float = 1.0,
        bugs: frozenset[str] = NO_BUGS,
    ) -> None:
        self.shape, self.payload, self.bugs = shape, payload, bugs
        self.words = words(shape)
        self.machine = Machine(self.words, rng=rng, drain=drain)
        self.machine.on_end = self._ended
        self.launches: dict[Actor, Launch] = {}
        self.num_calls = 0

    def queue(self, calls: Sequence[Sequence[Routing]], absent: Absent | None = None) -> None:
        """Let every host run these calls, [calls][ranks] routings; `absent` never takes a step."""
        first, self.num_calls = self.num_calls, self.num_calls + len(calls)
        for ranks in calls:
            self._check(ranks)
        for rank in range(self.shape.num_ranks):
            if absent is None or (absent[0], absent[1]) != (rank, -1):
                todo = [(first + i, ranks[rank]) for i, ranks in enumerate(calls)]
                self.machine.start(rank, -1, "host", self._host(rank, todo, absent))

    def time_out(self, actor: Actor) -> None:
        """The wait of an actor ran past its bound."""
        assert actor.op[0] == WAIT
        seen = self.machine.cells[actor.op[1]] & actor.op[2]
        k = self.launches[actor]
        self.machine.replace(actor, give_up(k, actor.sm, actor.op, seen))

    def waiters(self) -> list[Actor]:
        """Roles, not hosts, that wait for something that is not there yet."""
        return [a for a in self.machine.live if a.is_parked and a.sm >= 0]

    @property
    def aborted(self) -> bool:
        """Whether any rank's abort flag is set."""
        return any(self.machine.cells[cell] for cell in self.machine.abort_cells)

    def reset(self) -> None:
        """What the hosts do together after an abort, when no kernel runs: zero the words."""
        for rank in range(self.shape.num_ranks):
            for name in (*self.words.control, "recv_stats"):
                for cell in self.words.cells_of(name, rank):
                    self.machine.write(cell, 0)

    def read(self, name: str, rank: int) -> list[int]:
        """All words of one array of a rank."""
        return [self.machine.cells[cell] for cell in self.words.cells_of(name, rank)]

    def _check(self, ranks: Sequence[Routing]) -> None:
        require(
            len(ranks) == self.shape.num_ranks,
            f"a call needs the routing of {self.shape.num_ranks} ranks",
            got=len(ranks),
            kind=ShapeError,
        )
        most = max(map(len, ranks))
        require(
            most <= self.shape.max_tokens,
            f"a rank has at most {self.shape.max_tokens} tokens",
            got=most,
            kind=ShapeError,
        )

    def _host(self, rank: int, todo: list[tuple[int, Routing]], absent: Absent | None) -> Steps:
        running = self.words.at("running", rank)
        for number, routing in todo:
            yield call(partial(self._launch, rank, number, routing, absent))
            yield wait(running, 0, "kernel end", number, polls=False)
            if self.machine.cells[self.machine.abort_cells[rank]]:
                return

    def _launch(self, rank: int, number: int, routing: Routing, absent: Absent | None) -> None:
        """Copy the inputs, make shared memory fresh, start every role of every SM."""
        shape, write = self.shape, self.machine.write
        at = self.words.at
        k = Launch(self.words, self.payload, rank, number, len(routing), self.bugs)
        for token, experts in enumerate(routing):
            write(at("input_token", rank, token), self.payload.token(number, rank, token))
            for slot, expert in enumerate(experts):
                i = token * shape.top_k + slot
                write(at("input_topk_idx", rank, i), expert)
                if expert >= 0:
                    weight = self.payload.weight(number, rank, token, slot)
                    write(at("input_topk_weights", rank, i), weight)
        self._fresh_shared_memory(rank)
        write(at("running", rank), shape.num_sms * len(ROLES))
        for sm in range(shape.num_sms):
            for role, steps in ROLES.items():
                actor = self.machine.start(rank, sm, role, steps(k, sm))
                self.launches[actor] = k
                if absent == (rank, sm, role):
                    self.machine.runnable.remove(actor)

    def _fresh_shared_memory(self, rank: int) -> None:
        stages, cells = self.shape.num_sms * self.shape.num_stages, self.machine.cells
        barriers = [("stage_full", i, NUM_LOADERS) for i in range(stages)]
        barriers += [("stage_empty", i, 1) for i in range(stages)]
        for sm in range(self.shape.num_sms):
            barriers += [("sm_sync", sm * len(MEETINGS) + m, n) for m, n in MEETINGS.items()]
        for name, i, count in barriers:
            cell = self.words.at(name, rank, i)
            cells[cell], cells[cell + 1] = 0, (count, count)

    def _ended(self, actor: Actor) -> None:
        k = self.launches.get(actor)
        if k is None:
            return  # a host
        cell = k.at("running")
        left = self.machine.cells[cell] - 1
        if left == 0:
            self._kernel_end(k)
        self.machine.write(cell, left)

    def _kernel_end(self, k: Launch) -> None:
        """All stores are visible; what only this rank writes must be clean again."""
        for actor in [a for a, launch in self.launches.items() if launch is k]:
            self.machine.flush(actor)
            del self.launches[actor]
        if not self.machine.cells[self.machine.abort_cells[k.rank]]:
            self.check_clean(k.rank, own=True)

    def check_clean(self, rank: int, *, own: bool = False) -> None:
        """Every cleaned word is zero; `own` leaves out those a peer's next call may have begun."""
        for name in self.words.cleaned:
            if own and name.startswith("expert_recv"):
                continue
            for i, value in enumerate(self.read(name, rank)):
                if value:
                    raise Violation(f"not clean: {name}[{i}] of rank {rank} is {value:#x}")

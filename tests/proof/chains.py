"""Launches of the chain that are scheduled: parts of it, whole calls of ranks, calls that fail."""

import ctypes
import functools
from dataclasses import replace

import torch

import megamoe as mm
from megamoe.engine import chain
from megamoe.engine.call import Call
from megamoe.engine.planning import Ranks
from megamoe.engine.status import DeviceStatus
from megamoe.errors import MegaMoEError
from megamoe.planner import chain as planned
from megamoe.planner.launches import Gemm
from megamoe.problem import Options
from tests.emulator.memory_model import Violation
from tests.emulator.running import Emulated
from tests.emulator.scheduler import Scheduler
from tests.kernels.support import error, tolerance
from tests.pretending import plan_of
from tests.proof import targets
from tests.proof.targets import CHAIN, CPU, WIDE, Case, Live, Recorder, installed, kernels

PARTS = ("pull", "swap_ab", "plain")  # what the launches between an exchange and its end are


class Members:
    """Ranks of a chain: their experts, plans and memory."""

    def __init__(self, w, ranks, most, top_k, tile, *, options=None, shared=None, pool_rows=None):
        self.num, self.most, self.top_k, self.tile = ranks, most, top_k, tile
        self.options, self.shared, self.pool_rows = options or Options(), shared, pool_rows
        self.total, self.all = w.num_experts, w
        each = w.num_experts // ranks
        self.weights = [w[r * each : (r + 1) * each] for r in range(ranks)]

    @staticmethod
    def installed(num_sms, given):
        """Their machine, on which the engine launches `given` kernels."""
        return installed(num_sms, given)

    def plan(self, inputs, rank):
        """With the tile of a proof in both linears, of few stages; launches overlap."""
        given = {"overlap_launches": True}
        if self.pool_rows is not None:
            given |= {"pool_rows": self.pool_rows}
        if isinstance(self.tile, Gemm):
            given |= {"kernel": "gemm", "schedule": self.tile.schedule}
            if self.tile.decode_ahead:
                given |= {"decode_ahead": self.tile.decode_ahead}
        of_ranks = Ranks(self.num, self.total, max_tokens=self.most)
        found = plan_of(
            inputs, self.weights[rank], self.options, self.shared, mode="chain", ranks=of_ranks,
            **given,
        )  # fmt: skip
        assert found.overlaps
        source, *owner = found.passes
        passes = [source, *(self._with_few_stages(one) for one in owner)]
        return replace(found, passes=tuple(passes))

    def _with_few_stages(self, one):
        def few(step):
            if step.name not in ("l1", "l2"):
                return step
            return replace(step, config=targets.few_stages(step.config, self.tile.num_stages))

        return replace(one, launches=tuple(few(step) for step in one.launches))

    backend = "hopper"

    def make(self, call):
        """(memory of each rank, its member)."""
        where = planned.memory(call, self.backend)
        memory = [torch.zeros(where.num_bytes, dtype=torch.uint8) for _ in range(self.num)]
        made = []
        for rank, own in enumerate(memory):
            peers = torch.tensor([m.data_ptr() - own.data_ptr() for m in memory])
            made.append(chain.Member(chain.buffer_in(own, where), peers, rank, self.num))
        return memory, made

    def call(self, inputs, rank, status, stats=None):
        """One call of a rank."""
        return Call(
            *inputs, self.weights[rank], self.options, self.shared, status, stats, None, 30.0
        )

    def assert_right(self, y, inputs):
        """Against the reference: what runs are compared with is right."""
        wanted = mm.moe(
            *inputs, self.all, shared=self.shared, backend="reference",
            weight_at=self.options.weight_at, combine=self.options.combine,
        )  # fmt: skip
        assert error(y, wanted) <= tolerance(self.all.recipe)


@functools.cache
def part_case(recipe, tile, counts=(5, 3), num_sms=2, hidden=256, intermediate=256):
    """Pull, L1 and L2 of one rank's chain, each of which follows the one before tile by tile."""
    kept = []
    w = targets.weights_of(recipe, len(counts), hidden, intermediate)
    slots = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))
    slots = slots[torch.randperm(len(slots), generator=torch.Generator().manual_seed(0))]
    x, _, gates = targets.tokens_of(len(slots), len(counts), hidden, 1)
    inputs = x, slots.view(-1, 1), gates
    ranks = Members(w, 1, len(slots), 1, tile)
    free = {name: Emulated(targets.GLUON[name]) for name in ("exchange", "finish")}
    both = {name: Recorder(name, kept) for name in PARTS}
    with installed(num_sms, {**both, **free}):
        memory, (me,) = ranks.make(ranks.plan(inputs, 0).call)
        for kernel in free.values():
            kernel.hold = memory
        chain.run(me, ranks.call(inputs, 0, DeviceStatus(CPU)), ranks.plan(inputs, 0))
    assert len(kept) == 3 and kept[0][0] == "pull"
    return Case("chain", kept, memory, is_early=True)


# -- whole calls of several ranks --------------------------------------------------------------


def inputs_of(calls, experts, hidden, top_k=2, masked=0.2):
    """(tokens of all ranks, those of each) of every call."""
    found = []
    for seed, counts in enumerate(calls):
        one = targets.tokens_of(sum(counts), experts, hidden, top_k, seed=seed, masked_ratio=masked)
        parts = zip(*(map(torch.clone, t.split(counts)) for t in one), strict=True)
        found.append((one, list(parts)))
    return found


def message(status, top_k=2):
    """What a rank raises, or ""."""
    try:
        status.check(top_k)
    except MegaMoEError as found:
        return str(found)
    return ""


class Recorded(Live):
    """Calls of ranks, launched again and again from what the engine launched with.

    Every call has the buffers of the first one, as a graph's replays have, and as an allocator
    gives to calls that follow each other; inputs and results are its own. Launches overlap inside
    a call; calls do where `is_early`, and do not between replays of a graph.
    """

    def __init__(self, name, ranks, calls, hidden, num_sms=2, *, is_early=True, is_ready=False,
                 bad_slots=()):  # fmt: skip
        super().__init__(name, None, num_sms, kernels=CHAIN)
        self.ranks, self.is_early, self.bad_slots = ranks, is_early, bad_slots
        experts = ranks.total
        self.inputs = inputs_of(calls, experts, hidden, ranks.top_k)
        for (_, idx, _), parts in self.inputs:
            for rank in bad_slots:
                parts[rank][1][-1, -1] = experts  # token 0 or 1
                idx[sum(len(p[1]) for p in parts[: rank + 1]) - 1, -1] = -1
        first = [self._ready(part, is_ready) for part in self.inputs[0][1]]
        self.kept, self.results = [[] for _ in first], []
        self.status = [DeviceStatus(CPU) for _ in first]
        self.stats = [torch.zeros(w.num_experts, dtype=torch.int64) for w in ranks.weights]
        with ranks.installed(num_sms, {}):
            self.memory, members = ranks.make(ranks.plan(first[0], 0).call)
        for rank, me in enumerate(members):
            with ranks.installed(num_sms, {n: Recorder(n, self.kept[rank]) for n in CHAIN}):
                call = ranks.call(first[rank], rank, self.status[rank], self.stats[rank])
                self.results.append(chain.run(me, call, ranks.plan(first[rank], rank)))
        kept = [given for rank in self.kept for _, _, given in rank]
        storages = targets.storages(v for given in kept for v in given.values())
        known = {s.data_ptr(): s for s in storages if s.nbytes()}
        self.before = [(s, ctypes.string_at(at, s.nbytes())) for at, s in known.items()]
        self.first, self.is_ready, self.wanted = first, is_ready, None

    @staticmethod
    def _ready(part, is_ready):
        return (mm.quantize(part[0], "fp8_1x128"), *part[1:]) if is_ready else part

    @staticmethod
    def _tensors(part):
        """The tensors of a rank's inputs."""
        x, *routing = part
        return [*((x,) if isinstance(x, torch.Tensor) else (x.data, x.scale)), *routing]

    def _again(self, given, others):
        """Arguments with other inputs and results in place of the first call's."""

        def other(value):
            if not isinstance(value, torch.Tensor):
                return value
            found = others.get(value.untyped_storage().data_ptr())
            if found is None:
                return value
            made = torch.empty(0, dtype=value.dtype).set_(found.untyped_storage())
            return made.as_strided(value.shape, value.stride(), value.storage_offset())

        return {key: other(value) for key, value in given.items()}

    def _reset(self):
        for storage, data in self.before:
            ctypes.memmove(storage.data_ptr(), data, storage.nbytes())
        for rank in self.status:
            rank.reset()

    def run(self, policy, log=None):
        self._reset()
        known, results = kernels(), [[] for _ in self.kept]
        for name in CHAIN:
            known[name].hold = self.memory

        def host(rank):
            for number, (_, parts) in enumerate(self.inputs):
                part = self._ready(parts[rank], self.is_ready)
                mine, y = self._tensors(self.first[rank]), self.results[rank]
                pairs = [*zip(mine, self._tensors(part), strict=True), (y, torch.empty_like(y))]
                others = {a.untyped_storage().data_ptr(): b.contiguous().clone() for a, b in pairs}
                results[rank].append(others[y.untyped_storage().data_ptr()])
                for place, (name, grid, given) in enumerate(self.kept[rank]):
                    early = bool(number or place) and (self.is_early or place > 0)
                    known[name][grid](**{**self._again(given, others), "launch_pdl": early})

        scheduler = Scheduler(policy, agents=1600)
        scheduler.log = log
        scheduler.run(*(functools.partial(host, rank) for rank in range(len(self.kept))))
        for rank, found in enumerate(self.status):
            assert ("otherwise at token" in message(found)) == (rank in self.bad_slots)
        self._hold([torch.cat(each) for each in zip(*results, strict=True)])
        return scheduler

    def _hold(self, got):
        if self.wanted is None:
            for y, (inputs, _) in zip(got, self.inputs, strict=True):
                self.ranks.assert_right(y, inputs)
            self.wanted = got
        for y, wanted in zip(got, self.wanted, strict=True):
            if not torch.equal(y, wanted):
                raise Violation("another result")


def whole_case(recipe="w8a8", num=2, counts=((2, 1), (2, 1)), experts=2, hidden=256,
               intermediate=128, tile=WIDE, top_k=2, num_shared=0, options=None, pool_rows=None,
               is_early=True, is_ready=False, has_bad_slot=False):  # fmt: skip
    """Calls of all launches of a chain over ranks, in the same buffers."""
    w = targets.weights_of(recipe, experts, hidden, intermediate)
    shared = targets.weights_of(recipe, num_shared, hidden, intermediate) if num_shared else None
    ranks = Members(
        w, num, max(map(max, counts)), top_k, tile, options=options, shared=shared,
        pool_rows=pool_rows,
    )  # fmt: skip
    return Recorded(
        "chain", ranks, counts, hidden, is_early=is_early, is_ready=is_ready,
        bad_slots=(0,) if has_bad_slot else (),
    )  # fmt: skip


def apart_case(recipe="w8a8", num=2, calls=((2, 1), (1, 2)), experts=2, hidden=256,
               intermediate=128):  # fmt: skip
    """Calls of other sizes, one after another, each with buffers of its own."""
    w = targets.weights_of(recipe, experts, hidden, intermediate)
    given = inputs_of(calls, experts, hidden)
    there = Members(w, num, max(map(max, calls)), 2, WIDE)
    with installed(2, {}):
        plans = [[there.plan(parts[r], r) for r in range(num)] for _, parts in given]
    wanted = []

    def make():
        memory, members = there.make(plans[0][0].call)
        status = [DeviceStatus(CPU) for _ in range(num)]
        results = [[] for _ in range(num)]
        for name in CHAIN:
            kernels()[name].hold = memory

        def host(rank):
            for (_, parts), planned_call in zip(given, plans, strict=True):
                call = there.call(parts[rank], rank, status[rank])
                results[rank].append(chain.run(members[rank], call, planned_call[rank]))

        def check():
            for rank in range(num):
                status[rank].check(2)
            got = [torch.cat(each) for each in zip(*results, strict=True)]
            if not wanted:
                for y, (inputs, _) in zip(got, given, strict=True):
                    there.assert_right(y, inputs)
                wanted.extend(got)
            for a, b in zip(got, wanted, strict=True):
                if not torch.equal(a, b):
                    raise Violation("another result")

        return [functools.partial(host, rank) for rank in range(num)], check

    return Live("chain-apart", make, 2, kernels=CHAIN)

"""Chains of Blackwell's GEMM under the scheduler: pull, L1 and L2 that overlap; calls of ranks."""

import contextlib
from dataclasses import replace

import torch

from megamoe.engine import chain
from megamoe.engine.planning import Ranks, plan_for, traits_of
from megamoe.engine.status import DeviceStatus
from megamoe.planner.overrides import checked
from tests.emulator.running import Emulated
from tests.pretending import pretend_b200
from tests.proof import targets
from tests.proof.chains import Members, Recorded


class TmemMembers(Members):
    """Ranks of a chain on Blackwell, with the tile of a proof in both linears."""

    backend = "blackwell"

    @staticmethod
    @contextlib.contextmanager
    def installed(num_sms, given):
        """Its machine."""
        with targets.installed(num_sms, given) as patch:
            pretend_b200(patch, num_sms)
            yield patch

    def plan(self, inputs, rank):
        w = self.weights[rank]
        given = {"block_m": self.tile.block_m, "schedule": self.tile.schedule}
        if self.pool_rows is not None:
            given |= {"pool_rows": self.pool_rows}
        found = plan_for(
            w, self.options, traits_of("blackwell", w, self.shared), num_tokens=len(inputs[0]),
            top_k=self.top_k, ranks=Ranks(self.num, self.total, max_tokens=self.most),
            overrides=checked({"backend": "blackwell", "mode": "chain", **given}),
            is_quantized=not isinstance(inputs[0], torch.Tensor),
        )  # fmt: skip
        assert found.overlaps
        source, *owner = found.passes
        passes = [source, *(self._with_few_stages(one) for one in owner)]
        return replace(found, passes=tuple(passes))

    def _with_few_stages(self, one):
        launches = tuple(
            replace(step, config=self.tile) if step.name in ("l1", "l2") else step
            for step in one.launches
        )
        return replace(one, launches=launches)


def part_case(recipe, tile, counts=(9, 3), num_sms=2, hidden=384, intermediate=256):
    """Pull, L1 and L2 of one rank's chain, each of which follows the one before tile by tile."""
    kept = []
    w = targets.weights_of(recipe, len(counts), hidden, intermediate)
    slots = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))
    slots = slots[torch.randperm(len(slots), generator=torch.Generator().manual_seed(0))]
    x, _, gates = targets.tokens_of(len(slots), len(counts), hidden, 1)
    inputs = x, slots.view(-1, 1), gates
    ranks = TmemMembers(w, 1, len(slots), 1, tile)
    free = {name: Emulated(targets.GLUON[name]) for name in ("exchange", "finish")}
    both = {name: targets.Recorder(name, kept) for name in ("pull", "tmem")}
    with ranks.installed(num_sms, {**both, **free}):
        memory, (me,) = ranks.make(ranks.plan(inputs, 0).call)
        for kernel in free.values():
            kernel.hold = memory
        call = ranks.call(inputs, 0, DeviceStatus(targets.CPU))
        chain.run(me, call, ranks.plan(inputs, 0))
    assert [name for name, *_ in kept] == ["pull", "tmem", "tmem"]
    return targets.Case("chain", kept, memory, is_early=True)


def whole_case(
    recipe, tile, num=2, calls=((2, 1), (2, 1)), experts=2, hidden=256, intermediate=128
):
    """Calls of all launches of a chain over ranks, in the same buffers."""
    w = targets.weights_of(recipe, experts, hidden, intermediate)
    ranks = TmemMembers(w, num, max(map(max, calls)), 2, tile)
    return Recorded("chain", ranks, calls, hidden)


def late_case(recipe, tile):
    """GEMMs that wait in vain for the tokens of a tile, or for L1's tiles."""
    case = part_case(recipe, tile)
    return targets.Late("chain-late", case, lambda given: int(given["error"]) < 0, hurry=0.0005)

"""What each of two processes runs: a layer over a group in mode chain, on emulated kernels.

Symmetric memory is files that every process maps at addresses of its own.
"""

import mmap
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import megamoe as mm
from megamoe.balance.placement import Placement
from megamoe.distributed import symmetric
from megamoe.errors import MegaMoETimeout
from megamoe.routing.samplers import sample_routing
from tests.distributed.chain_ranks import REMOTE
from tests.distributed.hopper_ranks import E, H, K, experts, pretend

MOST = 6


class Mapped:
    """Memory of all ranks as files."""

    def __init__(self, folder, kernels):
        self.folder, self.kernels, self.kept = Path(folder), kernels, []

    def share(self, meeting, num_bytes, device):
        mine = self.folder / f"{meeting.rank}"
        mine.write_bytes(bytes(num_bytes))
        meeting.meet("write files", lambda: None)
        parts = []
        for rank in range(meeting.num_ranks):
            file = (self.folder / f"{rank}").open("r+b")
            self.kept.append(mmap.mmap(file.fileno(), num_bytes))
            parts.append(torch.frombuffer(self.kept[-1], dtype=torch.uint8))
        for name in REMOTE:
            self.kernels[name].hold = parts
        own = parts[meeting.rank]
        offsets = tuple(p.data_ptr() - own.data_ptr() for p in parts)
        return symmetric.Shared(own, offsets, 1, None)


def _layer(rank, patch, folder, recipe, **options):
    kernels = pretend(patch)
    patch.setattr(symmetric, "share", Mapped(folder, kernels).share)
    w = experts(recipe)
    placement = options.get("placement")
    mine = w.for_rank(rank, 2) if placement is None else w.take(placement.slots[rank])
    return w, mm.MoE(
        mine, E, K, group=dist.group.WORLD, backend="hopper", max_tokens_per_rank=MOST,
        **{"timeout_s": 60.0, "mode": "chain", **options},
    )  # fmt: skip


def tokens(counts, seed):
    num = sum(counts)
    x = torch.randn(num, H, generator=torch.Generator().manual_seed(seed)).bfloat16()
    return x, *sample_routing(num, E, K, masked_ratio=0.2, seed=seed)


def calls_have_the_bits_of_one_rank(rank, folder, recipe, has_replicas):
    """Calls of several sizes, one refused by this rank alone, in the layer as users build it."""
    options = {}
    if has_replicas:
        options["placement"] = Placement(E, ((0, 1, 3), (1, 2, 3)))
    with pytest.MonkeyPatch.context() as patch:
        w, layer = _layer(rank, patch, folder, recipe, **options)
        assert layer.mode == "chain" and "no host between ranks" in layer.why
        layer._fused_group.chain.compile(layer)  # as `mm.warmup` does: alone, then together
        layer._fused_group.chain.warm(layer)
        assert not layer.stats.any()
        same = True
        for step, counts in enumerate([(5, 3), (0, 6), (2, 0)]):
            inputs = tokens(counts, step)
            first = sum(counts[:rank])
            mine = [t[first : first + counts[rank]] for t in inputs]
            if step == 1 and rank == 0:  # takes part without tokens, then raises
                with pytest.raises(mm.MegaMoEError, match="max_tokens_per_rank = 6 tokens; got 7"):
                    layer(*tokens((7,), 9))
                y = inputs[0][:0]
            else:
                y = layer(*mine)
            layer.check()
            same &= torch.equal(y, mm.moe(*mine, w, backend="hopper", mode="staged"))
        assert int(layer.stats.sum()) > 0 and len(layer.sent) == E
    return bool(same)


def who_does_not_come_is_named(rank, folder):
    """Rank 1 makes no call; rank 0 says so within its bound."""
    with pytest.MonkeyPatch.context() as patch:
        _, layer = _layer(rank, patch, folder, "w8a8", timeout_s=2.0)
        if rank == 0:
            layer(*tokens((3,), 0))
            with pytest.raises(MegaMoETimeout, match="rank 0 waited too long for rank 1 to push"):
                layer.check()
            with pytest.raises(MegaMoETimeout):
                layer(*tokens((3,), 0))
    return True

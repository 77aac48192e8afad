"""What each of two processes runs: a layer over a group without a host, on emulated kernels.

Symmetric memory is files that every process maps at addresses of its own.
"""

import copy
import mmap
import time
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import megamoe as mm
from megamoe.balance.placement import Placement
from megamoe.distributed import symmetric
from megamoe.engine import chain, group_graphs
from megamoe.engine import layer as layer_module
from megamoe.errors import CapacityError, MegaMoETimeout
from megamoe.kernels.gluon import exchange
from megamoe.routing.permute import expert_counts
from megamoe.routing.samplers import sample_routing
from tests.distributed.chain_ranks import REMOTE
from tests.distributed.hopper_ranks import E, H, K, experts, pretend
from tests.distributed.ranks import die
from tests.emulator import running
from tests.engine import pretended_cuda

MOST = 6
BOUND_S = 2.0  # of calls in which a rank is missing


class Mapped:
    """Memory of all ranks as files."""

    def __init__(self, folder, kernels):
        self.folder, self.kernels, self.kept = Path(folder), kernels, []
        self.num_shared = 0

    def share(self, rendezvous, num_bytes, device):
        self.num_shared += 1
        mine = self.folder / f"{self.num_shared}-{rendezvous.rank}"
        mine.write_bytes(bytes(num_bytes))
        rendezvous.gather("write files", lambda: None)
        parts = []
        for rank in range(rendezvous.num_ranks):
            file = (self.folder / f"{self.num_shared}-{rank}").open("r+b")
            self.kept.append(mmap.mmap(file.fileno(), num_bytes))
            parts.append(torch.frombuffer(self.kept[-1], dtype=torch.uint8))
        for name in {*REMOTE, "mega_kernel", "gemm_tmem_kernel"} & self.kernels.keys():
            self.kernels[name].hold = [*self.kernels[name].hold, *parts]
        own = parts[rendezvous.rank]
        offsets = tuple(p.data_ptr() - own.data_ptr() for p in parts)
        return symmetric.Shared(own, offsets, 1, None)


def _layer(rank, patch, folder, recipe, backend="hopper", **options):
    kernels = pretend(patch, backend)
    patch.setattr(symmetric, "share", Mapped(folder, kernels).share)
    w = experts(recipe)
    placement = options.get("placement")
    mine = w.for_rank(rank, 2) if placement is None else w.take(placement.slots[rank])
    return w, mm.MoE(
        mine, E, K, group=dist.group.WORLD, backend=backend,
        **{"timeout_s": 60.0, "mode": "chain", "max_tokens_per_rank": MOST, **options},
    )  # fmt: skip


def _again(layer, mine, **options):
    """Another layer over the same group."""
    given = {"timeout_s": layer._launch.timeout_s, "max_tokens_per_rank": MOST, **options}
    return mm.MoE(mine, E, K, group=dist.group.WORLD, backend="hopper", **given)


def tokens(counts, seed):
    num = sum(counts)
    x = torch.randn(num, H, generator=torch.Generator().manual_seed(seed)).bfloat16()
    return x, *sample_routing(num, E, K, masked_ratio=0.2, seed=seed)


def calls_have_the_bits_of_one_rank(rank, folder, recipe, has_replicas, backend="hopper"):
    """Calls of several sizes, one refused by this rank alone, in the layer as users build it."""
    options = {}
    if has_replicas:
        options["placement"] = Placement(E, ((0, 1, 3), (1, 2, 3)))
    with pytest.MonkeyPatch.context() as patch:
        w, layer = _layer(rank, patch, folder, recipe, backend, **options)
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
            same &= torch.equal(y, mm.moe(*mine, w, backend=backend, mode="staged"))
        assert int(layer.stats.sum()) > 0 and len(layer.sent) == E
    return bool(same)


def one_layer_serves_all_sizes(rank, folder, recipe):
    """Fused and chained calls in turn, by the bound that both ranks pass: the bits of one rank."""
    with pytest.MonkeyPatch.context() as patch:
        w, layer = _layer(rank, patch, folder, recipe, mode="auto", max_tokens_per_rank=40)
        calls = layer._fused_group
        assert layer.mode == "auto" and "fused up to 22 tokens of a rank" in layer.why
        assert "; chain above: no host" in layer.why and "mode=auto" in repr(layer)
        assert calls.num_bytes == sum(
            b.num_bytes for b in layer.plan(1).buffers if b.kind == "symmetric"
        )
        kernels = calls.fused, calls.chain
        made, same = [], True
        for one in kernels:
            patch.setattr(one, "_launch", noted(made, one))
        sizes = [
            ((2, 3), 3),
            ((30, 7), 30),
            ((0, 1), 1),
            ((5, 20), 20),
            ((3, 3), None),
            ((1, 0), 4),
        ]
        for step, (counts, bound) in enumerate(sizes):
            inputs = tokens(counts, step)
            mine = [t[sum(counts[:rank]) :][: counts[rank]] for t in inputs]
            y = layer(*mine, max_tokens=bound)
            layer.check()
            same &= torch.equal(y, mm.moe(*mine, w, backend="hopper", mode="staged"))
        assert made == ["fused 4", "chain 32", "fused 1", "fused 22", "chain 40", "fused 4"]
        x, idx, gates = tokens((4,), 9)
        ready = mm.quantize(x, "fp8_1x128") if recipe == "w8a8" else x
        y = layer(ready, idx, gates, max_tokens=4)  # quantised tokens: both ranks pass such
        same &= torch.equal(y, mm.moe(ready, idx, gates, w, backend="hopper", mode="staged"))
        assert made[-1] == ("chain 4" if recipe == "w8a8" else "fused 4")
        small = _again(layer, w.for_rank(rank, 2), max_tokens_per_rank=8)
        assert small.mode == "fused" and small._fused_group.num_bytes < calls.num_bytes
        assert small.why.endswith("; chain for quantised tokens: no host between ranks")
        same &= torch.equal(small(ready, idx, gates, max_tokens=4), y)
        small.check()
        for bad in (41, -1):
            with pytest.raises(CapacityError, match="max_tokens must lie between 0 and"):
                layer(x, idx, gates, max_tokens=bad)
        if rank == 0:  # takes part without tokens
            with pytest.raises(CapacityError, match="at most max_tokens = 3 tokens; got 4"):
                layer(x, idx, gates, max_tokens=3)
        else:
            y = layer(x[:2], idx[:2], gates[:2], max_tokens=3)
            layer.check()
            same &= torch.equal(
                y, mm.moe(x[:2], idx[:2], gates[:2], w, backend="hopper", mode="staged")
            )
    return bool(same)


def noted(made, calls):
    """`calls._launch`, which says what was launched for which bound."""
    real = calls._launch

    def launch(layer, *given, **options):
        made.append(f"{calls.mode} {next(one for one in given if isinstance(one, int))}")
        return real(layer, *given, **options)

    return launch


def graphs_have_the_bits_of_one_rank(rank, folder, recipe):
    """Graphs of both modes: what a replay launches is emulated; a capture launches nothing."""
    with pytest.MonkeyPatch.context() as patch:
        choose = layer_module.choose
        cuda = pretended_cuda.install(patch)
        patch.setattr(layer_module, "choose", choose)
        rehearsed = _captured(patch, cuda)
        limits = {"mode": "auto", "max_tokens_per_rank": 40, "cuda_graphs": True}
        w, layer = _layer(rank, patch, folder, recipe, **limits)
        asked, received, same = *torch.zeros(2, E, dtype=torch.int64), True
        sizes = [
            ((2, 3), 3),
            ((30, 7), 30),
            ((0, 4), 4),
            ((25, 0), None),
            ((4, 1), 4),
            ((9, 31), 31),
        ]
        for step, (counts, bound) in enumerate(sizes):
            inputs = tokens(counts, step)
            mine = [t[sum(counts[:rank]) :][: counts[rank]] for t in inputs]
            y = layer(*mine, max_tokens=bound)
            layer.check()
            same &= torch.equal(y, mm.moe(*mine, w, backend="hopper", mode="staged"))
            asked += expert_counts(mine[1], E)
            received += expert_counts(inputs[1], E)
            same &= torch.equal(layer.sent, asked)
            same &= torch.equal(layer.stats, received.chunk(2)[rank])
        buckets = [(one.calls.mode, one.bound) for one in layer._graphs._captured]
        assert buckets == [("fused", 4), ("chain", 32), ("chain", 40)] == rehearsed
        x, idx, gates = tokens((4,), 9)
        if rank == 0:  # a fault of its own: it takes part without tokens, then says so
            with pytest.raises(CapacityError, match="at most max_tokens = 3 tokens; got 4"):
                layer(x, idx, gates, max_tokens=3)
        else:
            y = layer(x[:2], idx[:2], gates[:2], max_tokens=3, copy=False)
            same &= torch.equal(
                y, mm.moe(x[:2], idx[:2], gates[:2], w, backend="hopper", mode="staged")
            )
        layer.check()
        cuda.busy = True  # inside somebody's capture the launches themselves are captured
        layer(x[:1], idx[:1], gates[:1], max_tokens=3)
        assert len(layer._graphs._captured) == 3
    return bool(same)


def _captured(patch, cuda):
    """Let a capture keep launches for its replay; -> what was rehearsed before."""
    real, rehearsed, inside = group_graphs.GroupParts.launch, [], []

    @contextmanager
    def compiled_only():
        inside.append(True)
        yield
        inside.pop()

    def launch(parts, bucket, inputs):
        y = torch.full((bucket.bound, H), float("nan"), dtype=torch.bfloat16)
        if inside:
            rehearsed.append((bucket.calls.mode, bucket.bound))
            return y

        def call():
            y.copy_(real(parts, bucket, inputs))

        cuda.do(call)
        return y

    patch.setattr(group_graphs, "compiled_only", compiled_only)
    patch.setattr(group_graphs.GroupParts, "launch", launch)
    return rehearsed


def ranks_that_pass_other_bounds_get_an_error(rank, folder, bounds):
    """Of one mode: the error names what each passed. Of two: who made which mode.

    A bound of 0: two quantised tokens of a call for two.
    """
    with pytest.MonkeyPatch.context() as patch:
        limits = {"mode": "auto", "max_tokens_per_rank": 40, "timeout_s": 2.0}
        _, layer = _layer(rank, patch, folder, "w8a8", **limits)
        x, idx, gates = tokens((2,), rank)
        x = x if bounds[rank] else mm.quantize(x, "fp8_1x128")
        layer(x, idx, gates, max_tokens=bounds[rank] or 2)
        with pytest.raises(mm.MegaMoEError) as raised:
            layer.check()
        with pytest.raises(type(raised.value)):  # and from then on
            layer(*tokens((2,), rank), max_tokens=1)
    return f"{type(raised.value).__name__}: {raised.value}"


def layers_that_are_alike_share_memory(rank, folder):
    """Calls of two layers in turn, through one memory; none once a call of either was given up."""
    limits = {"mode": "auto", "max_tokens_per_rank": 40, "timeout_s": 60.0}
    with pytest.MonkeyPatch.context() as patch:
        w, one = _layer(rank, patch, folder, "w8a8", **limits)
        shared = symmetric.share.__self__

        def another(**given):
            other = w.take([3, 0, 2, 1])
            layer = mm.MoE(
                other.for_rank(rank, 2), E, K, group=dist.group.WORLD, backend="hopper",
                **limits | given,
            )  # fmt: skip
            return other, layer

        v, two = another()
        assert shared.num_shared == 2  # of fused calls and of the chain, each once
        wider = another(max_tokens_per_rank=48)[1]
        assert shared.num_shared == 4 and wider._status is not two._status
        same = True
        calls = [(one, w, 3), (two, v, 3), (two, v, 30), (one, w, 30), (two, v, 2), (one, w, 2)]
        for step, (layer, experts_of, bound) in enumerate(calls):
            mine = tokens((2,), 2 * step + rank)
            y = layer(*mine, max_tokens=bound)
            same &= torch.equal(y, mm.moe(*mine, experts_of, backend="hopper", mode="staged"))
        two.check()
        assert copy.deepcopy(one)._status is one._status is two._status
        if rank == 0:  # as after a wait that ran out: neither layer may be called from then on
            one._status.report.copy_(torch.tensor([1, 0, 0, 5, 1, 7, 6, 0]))
            with pytest.raises(MegaMoETimeout, match="rank 1 to begin the call"):
                one.check()
            with pytest.raises(MegaMoETimeout):
                two(*tokens((2,), 0), max_tokens=30)
        anew = another()[1]  # what one rank cannot use, none does
        assert shared.num_shared == 6 and anew._status is not two._status
        mine = tokens((2,), 20 + rank)
        y = anew(*mine, max_tokens=3)
        anew.check()
        same &= torch.equal(y, mm.moe(*mine, v, backend="hopper", mode="staged"))
    return bool(same)


def who_dies_is_named(rank, folder, mode, where):
    """Rank 1 is killed in its second call, or before it: what rank 0 says, and after how long."""
    with pytest.MonkeyPatch.context() as patch:
        _, layer = _layer(rank, patch, folder, "w8a8", mode=mode, timeout_s=BOUND_S)
        layer(*tokens((2,), rank))
        layer.check()
        if rank == 1:
            _die_at(patch, where)
        begin = time.monotonic()
        layer(*tokens((3,), rank))
        with pytest.raises(MegaMoETimeout) as raised:
            layer.check()
        seconds = time.monotonic() - begin
        with pytest.raises(MegaMoETimeout):
            layer(*tokens((3,), rank))
    return str(raised.value), seconds


def _die_at(patch, where):
    """Kill this process at once, or at a place of its next call."""
    if where == "between calls":
        die()

    def end(*given, **options):
        die()

    if where == "in a launch":  # with no tile left: its rows are stored, and nobody is told
        for module in running._MODULES.values():
            if "signal_done" in module:
                module["signal_done"] = end
    elif where == "before L2":
        patch.setattr(chain, "_l2", end)
    else:
        finish = type("Finish", (), {"__getitem__": lambda self, grid: end})()
        patch.setattr(exchange, "finish_kernel", finish)


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

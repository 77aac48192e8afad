"""Fused calls over a group around their launch, which is the oracle's here."""

from types import SimpleNamespace

import pytest
import torch

import megamoe as mm
from megamoe.distributed import symmetric
from megamoe.distributed.rendezvous import RESTART
from megamoe.engine import fused_group, group_mode, parallel, symm_buffer
from megamoe.engine.fused_group import FusedGroup
from megamoe.engine.group_calls import GroupCalls
from megamoe.engine.planning import Ranks
from megamoe.errors import (
    CapacityError,
    DTypeError,
    MegaMoETimeout,
    NotAvailable,
    RangeError,
    RankError,
    ShapeError,
)
from megamoe.hardware import H200
from megamoe.layout.exchange import InboxSizes, exchange
from megamoe.planner.buckets import UpTo, group_modes, quantized_mode
from megamoe.planner.call import CallSpec
from megamoe.planner.hopper import exchange_of
from megamoe.planner.plan import plan_call
from megamoe.problem import Problem
from tests.engine.pretended import E, H, K, make, tokens, wanted

MOST = 6  # tokens of a rank


class Peers:
    """All ranks' symmetric buffers in this process; `share` gives one rank its view of them."""

    def __init__(self, num_ranks):
        self.memory = []
        self.num_ranks, self.ranks_here = num_ranks, num_ranks

    def share(self, rendezvous, num_bytes, device):
        while len(self.memory) < self.num_ranks:
            self.memory.append(torch.zeros(num_bytes, dtype=torch.uint8))
        own = self.memory[rendezvous.rank]
        assert len(own) == num_bytes
        offsets = tuple(m.data_ptr() - own.data_ptr() for m in self.memory)
        return symmetric.Shared(own, offsets, self.ranks_here, None)


@pytest.fixture
def peers(monkeypatch):
    found = Peers(2)
    monkeypatch.setattr(symmetric, "share", found.share)
    return found


def join(gpu, peers, rank, most=MOST):
    """A layer of rank `rank`, as it stands after `parallel.join`."""
    per_rank = E // peers.num_ranks
    one = make(gpu, max_tokens_per_rank=most, timeout_s=7)
    one.experts._weights = gpu.weights[rank * per_rank : (rank + 1) * per_rank]
    one.stats = one.stats[:per_rank].clone()
    one._ranks = Ranks(peers.num_ranks, E, max_tokens=most)
    rendezvous = SimpleNamespace(
        rank=rank, num_ranks=peers.num_ranks, gather=lambda step, make: [make()] * peers.num_ranks
    )
    one._fused_group = alone(FusedGroup(one, rendezvous, most))
    return one


def alone(fused, quantized=None):
    """The calls of a layer whose only mode without a host between ranks is the fused one."""
    sizes = (UpTo(fused.num_tokens, "fused", "asked for"),)
    return GroupCalls(fused, None, fused.num_tokens, sizes, quantized)


def call(one, x, idx, gates):
    def check():
        one._check_once(None, x, idx, gates, None)

    return one._fused_group.fused(one, x, idx, gates, one.stats, check)


@pytest.mark.parametrize("counts", [(6, 6), (3, 5), (0, 4), (1, 0), (0, 0)])
def test_every_rank_gets_its_tokens_and_counts_its_experts(gpu, peers, counts):
    layers = [join(gpu, peers, rank) for rank in range(2)]
    inputs = tokens(sum(counts), masked_ratio=0.2)
    parts = list(zip(*(t.split(counts) for t in inputs), strict=True))
    for one, part in zip(layers, parts, strict=True):  # on GPUs both do this at once
        one._fused_group.fused.buffer.put(*part)
    got = [call(one, *part) for one, part in zip(layers, parts, strict=True)]
    assert torch.equal(torch.cat(got), wanted(inputs, gpu))
    for rank, (one, launched) in enumerate(zip(layers, gpu.calls, strict=True)):
        world = launched["world"]
        assert (world.num, world.local, world.first, world.peers[rank]) == (2, 1, rank, 0)
        assert (
            launched["kept"].counters.data_ptr()
            == one._fused_group.fused.buffer.counters.data_ptr()
        )
        assert launched["timeout_s"] == 7 and launched["num_experts"] == E // 2
        assert launched["step"].grid == (66,)  # both ranks have half of the SMs
        assert launched["step"] == one.plan(3).mega  # what is planned is what runs
        assert launched["pool"].dest.dtype == torch.int64


@pytest.mark.parametrize("counts", [(100, 100), (70, 3), (0, 99)])
def test_more_tokens_than_a_launch_takes_run_in_several(gpu, peers, counts):
    layers = [join(gpu, peers, rank, most=100) for rank in range(2)]
    num = layers[0]._fused_group.fused.num_passes
    where = exchange_of(layers[0]._fused_group.fused.plan.call)
    assert num > 1 and layers[0]._fused_group.fused.num_bytes == where.num_bytes
    assert layers[0]._fused_group.fused.why_eager == f"in {num} launches a call"
    assert where["tokens"].shape == (num * -(-100 // num), H)
    assert where["inbox_slots"].shape == (2, -(-100 // num), K)  # of one launch
    inputs = tokens(sum(counts), masked_ratio=0.2)
    parts = list(zip(*(t.split(counts) for t in inputs), strict=True))
    for one, part in zip(layers, parts, strict=True):
        one._fused_group.fused.buffer.put(*part)
    got = [call(one, *part) for one, part in zip(layers, parts, strict=True)]
    assert torch.equal(torch.cat(got), wanted(inputs, gpu)) and len(gpu.calls) == 2 * num
    each = [launched["tokens"].num_valid[0].item() for launched in gpu.calls[:num]]
    size = -(-100 // num)
    assert sum(each) == counts[0] and max(each) <= size
    assert [c["tokens"].first for c in gpu.calls[:num]] == [i * size for i in range(num)]


def test_who_refuses_its_input_takes_part_without_tokens(gpu, peers):
    one = join(gpu, peers, 0)
    x, idx, gates = tokens(4)
    for bad, kind, text in (
        ((x.float(), idx, gates), DTypeError, "bfloat16"),
        ((x, idx[:, :1], gates[:, :1]), ShapeError, "topk_idx must be"),
        ((mm.quantize(x, "mxfp8"), idx, gates), DTypeError, "quantised ones"),
        (tokens(MOST + 1), CapacityError, "max_tokens_per_rank = 6 tokens; got 7"),
    ):
        launched = len(gpu.calls)
        with pytest.raises(kind, match=text):
            call(one, *bad)
        assert len(gpu.calls) == launched + 1 and int(one._fused_group.fused.buffer.num_valid) == 0
    assert call(one, x, idx, gates).shape == x.shape


def test_a_timeout_cannot_be_reset(gpu, peers):
    one = join(gpu, peers, 0)
    gpu.report = [1, 0, 3, 5, 1, 9, 8, 0]
    call(one, *tokens(4))
    for _ in range(2):
        with pytest.raises(MegaMoETimeout, match=f"rank 1 to begin the call.*{RESTART}"):
            call(one, *tokens(4))
    with pytest.raises(NotAvailable, match="cannot be reset"):
        one.reset()


def test_a_bad_expert_is_raised_by_the_next_call_which_takes_part_without_tokens(gpu, peers):
    one = join(gpu, peers, 0)
    x, idx, gates = tokens(4)
    idx[2, 1] = E
    call(one, x, idx, gates)
    with pytest.raises(RangeError, match="token 2, slot 1"):
        call(one, *tokens(4))
    assert len(gpu.calls) == 2 and int(one._fused_group.fused.buffer.num_valid) == 0
    call(one, *tokens(4))
    counts = torch.zeros(E, dtype=torch.int64)
    parallel.add_counts(counts, idx)  # names no expert: counted nowhere
    assert int(counts.sum()) == 7


def test_warming_up_compiles_then_meets_then_makes_a_call_without_tokens(gpu, peers):
    """No launch waits for a peer's compiler, however long that takes."""
    one = join(gpu, peers, 0)
    steps = []

    def follow(step, make, timeout_s):
        make()
        steps.append([call["is_compiled_only"] for call in gpu.calls])

    one._world = SimpleNamespace(rank=1, rendezvous=SimpleNamespace(follow=follow, gather=follow))
    mm.warmup(one, [MOST])
    assert steps == [[True], [True, False]]
    launched = gpu.calls[1]
    assert int(launched["tokens"].num_valid) == 0 and launched["timeout_s"] == 60
    assert not one.stats.any()


class Streams:
    """Stands for the streams of a GPU: who waits for whom."""

    def __init__(self, monkeypatch):
        self.now, self.log = None, []
        monkeypatch.setattr(group_mode, "_LAST", {})
        monkeypatch.setattr(group_mode, "is_capturing", lambda device: False)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device: self.now)
        self.a, self.b = (self._stream(name) for name in "ab")

    def _stream(self, name):
        def wait(other):
            self.log.append(f"{name} waits for {other.name}")

        return SimpleNamespace(name=name, wait_stream=wait)


def test_launches_of_all_layers_of_a_device_follow_each_other_whatever_their_streams(monkeypatch):
    streams, device = Streams(monkeypatch), torch.device("cuda", 1)
    for stream in (streams.a, streams.b, streams.b, streams.a):
        streams.now = stream
        group_mode.order_after_last(device)
    group_mode.order_after_last(torch.device("cuda", 0))  # another GPU
    assert streams.log == ["b waits for a", "a waits for b"]


def test_every_call_takes_its_place_in_the_order_before_the_buffer_is_written_to(
    gpu, peers, monkeypatch
):
    one, ordered = join(gpu, peers, 0), []
    for module in (fused_group, group_mode):
        monkeypatch.setattr(module, "order_after_last", ordered.append)
    monkeypatch.setattr(
        symm_buffer.SymmBuffer, "put", lambda buffer, *inputs: ordered.append("written")
    )
    call(one, *tokens(4))
    one._fused_group.fused.warm(one)
    device = one.weights.device
    assert ordered == [device, "written", device]


def test_quantised_tokens_are_refused_where_fused_was_asked_for(gpu, peers):
    one = join(gpu, peers, 0)
    one._world = SimpleNamespace()
    x, idx, gates = tokens(4)
    with pytest.raises(DTypeError, match="x must be"):  # in the mode of its peers, without tokens
        one._call_over_group(None, idx, gates, one.stats, one.stats)
    assert len(gpu.calls) == 1
    with pytest.raises(DTypeError, match="quantised ones"):
        one._call_over_group(mm.quantize(x, "mxfp8"), idx, gates, one.stats, one.stats)
    assert len(gpu.calls) == 2 and "quantised" not in one._fused_group.why


def test_quantised_tokens_are_staged_and_say_so_where_nothing_can_chain(gpu, peers):
    """As on Blackwell, where `auto` comes to fused alone."""
    one = join(gpu, peers, 0)
    why = "a fused launch takes BF16 tokens; these come quantised"
    one._fused_group = alone(one._fused_group.fused, UpTo(MOST, "staged", why))
    assert one._fused_group.why.endswith(f"; staged for quantised tokens: {why}")
    x, idx, gates = tokens(4)
    staged = []

    def run(compute, x, *rest):
        staged.append(compute.plan(len(idx), True).mode)
        return torch.zeros(x.shape)

    one._world = SimpleNamespace(run=run)
    one._call_over_group(mm.quantize(x, "mxfp8"), idx, gates, one.stats, one.stats)
    assert staged == ["staged"] and not gpu.calls
    one._call_over_group(x, idx, gates, one.stats, one.stats)
    assert len(gpu.calls) == 1


@pytest.mark.parametrize(("recipe", "has_ready"), [("w8a8", True), ("w4a16", False)])
def test_a_layer_for_small_calls_has_a_chain_for_quantised_tokens(recipe, has_ready):
    """Within one fused launch the chain's memory is about as small as the launch's own."""
    flash = CallSpec(Problem(1, 4096, 2048, 256, 6, num_ranks=8, recipe=recipe), max_tokens=64)
    assert [one.mode for one in group_modes(flash, {})] == ["fused"]
    ready = quantized_mode(flash, {})
    assert (ready and ready[:2]) == ((64, "chain") if has_ready else None)
    bytes_of = {b.about.split(":")[0]: b.num_bytes for b in plan_call(flash, H200, ()).buffers
                if b.kind == "symmetric"}  # fmt: skip
    assert bytes_of.keys() == {"fused", *(["chain"] if has_ready else [])}
    assert bytes_of.get("chain", 0) < 1.5 * bytes_of["fused"]


def test_launches_of_different_sizes_are_refused(gpu, peers, monkeypatch):
    cards = iter([[{"CTAs of a launch": 66}, {"CTAs of a launch": 60}]])
    rendezvous = SimpleNamespace(rank=0, num_ranks=2, gather=lambda step, make: next(cards))
    one = make(gpu, max_tokens_per_rank=MOST)
    one._ranks = Ranks(2, 2 * E, max_tokens=MOST)
    with pytest.raises(RankError, match="CTAs of a launch differs"):
        FusedGroup(one, rendezvous, MOST)


def test_what_fused_over_a_group_cannot_hold_is_refused(gpu):
    alike = {"num": 2, "num_experts": E, "max_tokens": MOST}
    for ranks, change, kind, text in (
        ({"is_placed": True}, {}, NotAvailable, "contiguous"),
        ({"num": 16, "num_experts": 16}, {}, NotAvailable, "8 ranks at most"),
        ({"max_tokens": None}, {}, CapacityError, "need max_tokens_per_rank"),
        ({}, {"_backend": "portable"}, NotAvailable, "backend portable has mode"),
        ({}, {"_chosen": (("pool_rows", 16),)}, CapacityError, "32 waves at most"),
    ):
        layer = make(gpu, max_tokens_per_rank=MOST)
        layer._ranks = Ranks(**{**alike, **ranks})
        for name, value in change.items():
            setattr(layer, name, value)
        with pytest.raises(kind, match=text):
            layer._plan_in("fused")
    layer = make(gpu, max_tokens_per_rank=MOST)
    layer._ranks = Ranks(**alike)
    found = fused_group.describe(layer._plan_in("fused"))
    assert found == {"fits_e4m3": True, "launches": 1}


def test_ranks_on_other_hosts_are_named():
    with pytest.raises(NotAvailable, match="ranks 1, 3 on another host than rank 0"):
        symmetric.check_reach([["a", "x", 0, "1"], ["b", "y", 1, "1"], ["a", "z", 2, "1"],
                               ["c", "w", 3, ""]])  # fmt: skip


def test_hosts_of_one_name_are_told_apart(monkeypatch, tmp_path):
    """As containers of several hosts have it; a kernel that does not say counts as the same."""
    card = SimpleNamespace(uuid="x")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: card)
    monkeypatch.setattr(symmetric, "_devices", lambda: range(0))
    cards = []
    for boot in ("1\n", "2\n", "1\n", None):
        monkeypatch.setattr(symmetric, "BOOT_ID", str(tmp_path / str(boot).strip()))
        if boot is not None:
            (tmp_path / boot.strip()).write_text(boot)
        cards.append(symmetric._card(torch.device("cuda", 0)))
    with pytest.raises(NotAvailable, match="rank 1 on another host"):
        symmetric.check_reach(cards)
    with pytest.raises(NotAvailable, match="rank 2 on another host"):
        symmetric.check_reach([cards[3], *cards[:2]])
    symmetric.check_reach([cards[0], *cards[2:]])


def test_a_buffer_holds_what_its_layout_says():
    inbox = InboxSizes(2, 5, 256, 16, 4, 32)
    where = exchange(5, 64, 3, 4096, 1, inbox)
    memory = torch.zeros(where.num_bytes, dtype=torch.uint8)
    buffer = symm_buffer.symm_buffer_in(memory, where)
    x, idx, gates = torch.ones(2, 64).bfloat16(), torch.full((2, 3), 9), torch.full((2, 3), 0.5)
    buffer.put(x, idx.int(), gates)
    assert (
        int(buffer.num_valid) == 2
        and buffer.tokens.shape == (5, 64)
        and buffer.rows.shape == (15, 64)
    )
    assert (buffer.topk_idx[:2] == 9).all() and not buffer.topk_idx[2:].any()
    starts = [t.data_ptr() - memory.data_ptr() for t in buffer]
    assert starts == sorted(starts) and all(start % 128 == 0 for start in starts)
    assert starts[-1] + buffer.inbox_counts.nbytes <= where.num_bytes
    assert [tuple(t.shape) for t in buffer.inbox] == [
        (2, 5, 256), (2, 5, 4), (2, 5, 4), (2, 5, 4), (2, 36),
    ]  # fmt: skip

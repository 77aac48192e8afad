"""Chained calls over a group around their launches, which are the test's here."""

import threading
from types import SimpleNamespace

import pytest
import torch
from triton.runtime.jit import JITFunction

import megamoe as mm
from megamoe.balance.placement import Placement
from megamoe.engine import chain, chain_group, group_calls, group_mode, images, packing, status
from megamoe.engine.chain_group import ChainGroup
from megamoe.engine.compile_only import compiled_only
from megamoe.engine.group_calls import GroupCalls
from megamoe.engine.planning import Ranks
from megamoe.errors import NotAvailable, RankError
from megamoe.kernels.gluon.mega import sync
from megamoe.planner.buckets import UpTo
from tests.engine.pretended import E, make, tokens, weights
from tests.engine.test_fused_group import MOST, peers  # noqa: F401  a fixture


def joined(gpu, mode):
    """Rank 0 of two."""
    layer = make(gpu, max_tokens_per_rank=MOST, timeout_s=7)
    layer.experts._weights = gpu.weights[: E // 2]
    layer.stats = layer.stats[: E // 2].clone()
    layer._ranks = Ranks(2, E, max_tokens=MOST)
    layer._wanted = ("hopper", mode)
    rendezvous = SimpleNamespace(rank=0, num_ranks=2)
    chained = ChainGroup(layer, rendezvous, Placement.contiguous(E, 2))
    sizes = (UpTo(MOST, mode, "asked for"),)
    layer._fused_group = GroupCalls(None, chained, MOST, sizes)
    return layer


MODE, BOUND = "all ranks must make a call in the same mode", "all ranks must pass the same"
# A report of rank 0 (what, expected): each rank has made 3 fused calls and 5 chains with it, and
# rank 1, ahead, has begun a chain and a fused call that rank 0 has not.
REPORTS = {
    "a rank that makes a chain": ((5, 4), MODE),
    "a rank that makes a fused call": ((16, 6), MODE),
    "a rank that gave up so": ((18, 6), MODE),
    "bounds of a fused call": ((9, 40), BOUND),
    "bounds of a chain": ((19, 40), BOUND),
    "bounds that a peer saw": ((20, 6), BOUND),
    "tokens in the pool": ((1, 512), "the pool of tokens"),
    "tiles of L1": ((2, 16), "L1 of tile 1"),
    "a peer that gave up": ((7, 3), "rank 1, which gave the call up"),
    "rows of a chain": ((17, 5), "rows that rank 1 computes"),
}


@pytest.mark.parametrize("case", REPORTS)
def test_another_mode_is_named_where_a_rank_did_not_begin_the_call_alone(case):
    (what, expected), says = REPORTS[case]
    signals, begun, state = (torch.zeros(n, dtype=torch.int32) for n in (32, 16, 4))
    signals[sync.BEGUN.value :][:2] = torch.tensor([3, 3 if what < status.CHAIN else 4])
    signals[sync.LAST_CALL.value] = 3
    begun[:2], state[0] = torch.tensor([5, 6 if what < status.CHAIN else 5]), 5
    fused = SimpleNamespace(buffer=SimpleNamespace(signals=signals))
    other = group_calls._OtherMode(fused, SimpleNamespace(begun_calls=(begun, state), num_ranks=2))
    report = [1, 0, 0, what, 1, expected, 0, 0]
    error = other(report) or status._given_up(report, "")
    assert says in str(error)


def test_a_layer_that_is_split_wants_a_gpu_for_each_rank(gpu, peers):  # noqa: F811
    with pytest.raises(NotAvailable, match=r"a GPU for each rank.*; got 2 ranks on one"):
        joined(gpu, "split")
    peers.ranks_here = 1
    layer = joined(gpu, "split")
    assert layer._fused_group.mode == "split"
    plan = layer._plan_in("split")
    assert [plan[name] for name in ("mode", "l1_sms", "l2_sms")] == ["split", 88, 44]
    assert [one.partition for one in plan.launches[-5:-2]] == ["l1", "l1", "l2"]


def test_calls_that_no_graph_holds_are_named_where_graphs_were_asked_for(gpu, peers, monkeypatch):  # noqa: F811
    said = []
    monkeypatch.setattr(group_calls, "log_once", said.append)
    peers.ranks_here = 1
    chained = joined(gpu, "split")._fused_group.chain
    sizes = (UpTo(MOST, "split", "asked for"),)
    for wants_graphs in (False, True):
        calls = GroupCalls(None, chained, MOST, sizes, has_graphs=wants_graphs)
        eager = "; mode split runs eagerly, on streams of the GPU's parts"
        assert calls.why == "no host between ranks" + wants_graphs * eager
        layer = SimpleNamespace(_wants_graphs=wants_graphs)
        for found, why in ((calls, calls.why), (None, "another host")):
            monkeypatch.setattr(group_calls, "_join", lambda *_, r=(found, why): r)
            _, why = group_calls.join(layer, None)
            assert ("staged calls run eagerly" in why) == (wants_graphs and found is None)
    assert [line.split(": ")[1][:12] for line in said] == ["mode split r", "staged calls"]


@pytest.fixture
def one(gpu, peers, monkeypatch):  # noqa: F811
    """Rank 0 of two; `made` has the calls that it launched."""
    layer = joined(gpu, "chain")
    layer.made = []

    def run(me, call, plan):
        layer.made.append(call)
        return torch.zeros(call.num_tokens, call.weights.hidden)

    monkeypatch.setattr(chain, "run", run)
    return layer


def call(one, x, idx, gates):
    def check():
        one._check_once(None, x, idx, gates, None)

    return one._fused_group.chain(one, x, idx, gates, one.stats, check)


def test_every_call_takes_its_place_in_the_order_of_fused_ones(one, monkeypatch):
    """A fused launch that waits for its peers holds the SMs that a chain of its peers needs."""
    ordered = []
    for module in (chain_group, group_mode):
        monkeypatch.setattr(module, "order_after_last", ordered.append)
    call(one, *tokens(4))
    one._fused_group.chain.warm(one)
    assert ordered == [one.weights.device] * 2


@pytest.mark.parametrize("error", [torch.OutOfMemoryError, KeyboardInterrupt])
def test_a_rank_that_made_half_a_call_makes_no_other(one, error, monkeypatch):
    """Peers have what it pushed under the number that its next call would have again."""

    def ended(me, call, plan):
        raise error("no room for a pool")

    with monkeypatch.context() as patch:
        patch.setattr(chain, "run", ended)
        with pytest.raises(error):
            call(one, *tokens(4))
    with pytest.raises(
        RankError, match=rf"{error.__name__}: no room for a pool; restart the ranks"
    ):
        call(one, *tokens(2))
    assert not one.made


def test_warming_up_compiles_then_meets_then_makes_a_call_of_all_launches(one, monkeypatch):
    steps = []
    group = one._fused_group.chain
    monkeypatch.setattr(group, "compile", lambda layer, bound: steps.append(f"compile {bound}"))

    def follow(step, make, timeout_s):
        make()
        steps.append(step)

    one._world = SimpleNamespace(
        rank=1, rendezvous=SimpleNamespace(follow=follow, gather=follow, rank=1)
    )
    mm.warmup(one, [MOST])
    assert steps == ["compile 6", "compile the launches", "warm up"]
    (warm,) = one.made
    assert warm.num_tokens == 1 and (warm.topk_idx == -1).all() and warm.timeout_s == 60
    assert not one.stats.any()


def test_launches_of_this_thread_alone_are_compiled_and_not_made(monkeypatch):
    seen = []
    monkeypatch.setattr(JITFunction, "run", lambda kernel, **options: seen.append(options))
    kernel = JITFunction.__new__(JITFunction)
    with compiled_only():
        JITFunction.run(kernel, grid=(1,), warmup=False)
        other = threading.Thread(target=lambda: JITFunction.run(kernel, grid=(2,), warmup=False))
        other.start()
        other.join()
    JITFunction.run(kernel, grid=(3,), warmup=False)
    assert [(s["grid"], s["warmup"]) for s in seen] == [((1,), True), ((2,), False), ((3,), False)]


def test_weights_are_packed_where_a_call_is_compiled_alone(monkeypatch):
    """A capture over ranks is rehearsed so; experts that were written to are packed anew in it."""
    seen = []
    monkeypatch.setattr(JITFunction, "run", lambda kernel, *_, **options: seen.append(options))
    agrees = packing.agrees.__wrapped__
    monkeypatch.setattr(packing, "is_gpu", lambda device: True)
    monkeypatch.setattr(packing, "agrees", lambda *_: True)
    with compiled_only():
        images.hold(weights("nvfp4"))
        agrees("nv_image", True, torch.device("cpu"))
    assert [one["warmup"] for one in seen] == [False] * 3  # two matrices, and the look


def test_threads_that_compile_alone_at_once_leave_launches_as_they_were():
    real, inside, left = JITFunction.run, threading.Event(), threading.Event()

    def other():
        with compiled_only():
            inside.set()
            left.wait(10)

    thread = threading.Thread(target=other)
    with compiled_only():
        thread.start()
        assert inside.wait(10)
    assert JITFunction.run is not real  # the other thread is still inside
    left.set()
    thread.join()
    assert JITFunction.run is real

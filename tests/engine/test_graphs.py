"""Graphs per token bucket, with a pretended CUDA: what is captured, kept and dropped."""

import copy
import gc
import pickle
import types
import weakref

import pytest
import torch

import megamoe as mm
from megamoe.engine import graphs, layer, replay_queue
from megamoe.engine.graph_pool import MAX_TOKENS
from megamoe.engine.replay_queue import HALF, SLOTS
from megamoe.errors import CapacityError, DTypeError, NotAvailable, RangeError
from megamoe.planner.buckets import bucket_of
from megamoe.routing.permute import expert_counts

pytest.importorskip("triton")
from megamoe.kernels.portable import graph_io
from tests.engine.pretended import E, H, K, tokens, weights
from tests.engine.pretended_cuda import Graph


def make(**options):
    return mm.MoE(weights(), E, K, cuda_graphs=True, **options)


def wanted(inputs, of):
    return mm.moe(*inputs, of.weights, backend="reference")


def captures(cuda):
    return [line for line in cuda.log if line.startswith("capture")]


def test_buckets_are_powers_of_two_then_multiples_of_256():
    buckets = [bucket_of(num, MAX_TOKENS) for num in range(1, MAX_TOKENS + 1)]
    assert sorted(set(buckets)) == [1, 2, 4, 8, 16, 32, 64, 128, *range(256, 2049, 256)]
    assert all(num <= bucket < 2 * num for num, bucket in enumerate(buckets, 1))
    assert bucket_of(5, max_tokens=6) == 6 and bucket_of(600, max_tokens=600) == 600


def test_replays_have_the_results_of_eager_calls(cuda):
    one = make()
    for seed, count in enumerate((1, 3, 8, 9, 8, 3, 64, 7)):
        inputs = tokens(count, seed, masked_ratio=0.2)
        assert torch.equal(one(*inputs), wanted(inputs, one))
    assert len(captures(cuda)) == 5 and "eager" not in cuda.log


def test_ids_may_be_int32_and_rows_strided(cuda):
    one = make()
    x, idx, weight = tokens(3)
    wide = torch.zeros(3, 2 * H, dtype=torch.bfloat16)
    wide[:, :H] = x
    for _ in range(2):  # met first, then known
        for ids, rows in ((idx, x), (idx.int(), x), (idx, wide[:, :H]), (idx.int(), wide[:, :H])):
            assert torch.equal(one(rows, ids, weight), wanted((x, idx, weight), one))
    assert len(one._graphs._by_signature) == 4 and len(captures(cuda)) == 1


def test_a_bucket_is_warmed_on_no_token_and_all_share_a_pool(cuda):
    one = make()
    one(*tokens(3))
    assert cuda.log == [
        "side waits for main", "on side", "launch 4", "main waits for side",
        "capture on side in pool 4",
    ]  # fmt: skip
    assert int(one.stats.sum()) == 3 * K
    one(*tokens(30))
    assert captures(cuda) == ["capture on side in pool 4"] * 2


def test_a_result_is_the_callers_own_unless_asked(cuda):
    one = make()
    first, second = tokens(5, 1), tokens(6, 2)
    kept = one(*first)
    one(*second)
    assert torch.equal(kept, wanted(first, one))
    kept = one(*first, copy=False)
    assert torch.equal(kept, wanted(first, one)) and one(*first, copy=False) is kept
    one(*second)
    assert torch.equal(kept, wanted(second, one)[:5])


def test_a_result_needs_no_grad_whatever_the_mode(cuda):
    one = make()
    for grad in (True, False, True):
        with torch.set_grad_enabled(grad):
            y = one(*tokens(3))
        assert not y.requires_grad and y.is_contiguous() and not y.is_inference()
    assert len(one._graphs._by_signature) == 2


def test_stats_are_added_once_a_call(cuda):
    one = make()
    total = torch.zeros(E, dtype=torch.int64)
    for seed, count in enumerate((9, 9, 2)):
        inputs = tokens(count, seed, masked_ratio=0.3)
        one(*inputs)
        total += expert_counts(inputs[1], E)
        assert torch.equal(one.stats, total)


def test_faults_are_raised_by_the_next_call_once(cuda):
    one = make()
    x, idx, weight = tokens(5)
    idx[3, 1] = E
    one(x, idx, weight)
    with pytest.raises(RangeError, match="token 3, slot 1"):
        one(*tokens(5))
    assert torch.equal(one(*tokens(5)), wanted(tokens(5), one))
    one(x, idx, weight)
    with pytest.raises(RangeError, match="token 3, slot 1"):
        one.check()


def test_the_door_is_the_same(cuda):
    one = make(max_tokens_per_rank=10)
    x, idx, weight = tokens(5)
    for bad in (
        (x.float(), idx, weight),
        (x, idx[:4], weight),
        (x, idx, weight.double()),
        (x[:, :32], idx, weight),
        (x.clone().requires_grad_(), idx, weight),
    ):
        with pytest.raises(mm.MegaMoEError):
            one(*bad)
    with pytest.raises(CapacityError):
        one(*tokens(11))
    one(*tokens(9))
    assert cuda.log.count("launch 10") == 1  # no bucket is larger than the layer's limit


def test_the_checks_are_the_same_for_signatures_that_were_seen(cuda):
    one = make()
    x, idx, weight = tokens(5)
    one(x, idx, weight)
    with torch.no_grad():
        one(x.clone().requires_grad_(), idx, weight)
    for bad in (
        (x.half(), idx, weight),
        (x, idx.short(), weight),
        (x, idx.t().contiguous().t(), weight),
        (x, idx, weight.t().contiguous().t()),
        (x, idx, weight[:4]),
        (x.t().contiguous().t(), idx, weight),
        (x.to("meta"), idx, weight),
        (x, idx.to("meta"), weight),
        (x, idx, weight.to("meta")),
        (x.clone().requires_grad_(), idx, weight),
        (x, idx, weight.clone().requires_grad_()),
        (x.tolist(), idx, weight),
        (x, idx, weight.numpy()),
    ):
        with pytest.raises(mm.MegaMoEError):
            one(*bad)
    assert len(one._graphs._by_signature) == 2


def test_only_so_many_looks_are_remembered(cuda, monkeypatch):
    monkeypatch.setattr(graphs, "MAX_SIGNATURES", 2)
    one = make()
    for _ in range(2):
        for count in (1, 2, 3, 4):
            assert torch.equal(one(*tokens(count)), wanted(tokens(count), one))
    assert len(one._graphs._by_signature) == 2


def test_some_calls_are_eager(cuda, monkeypatch):
    one = make()
    monkeypatch.setattr(one._graphs, "most", 16)
    x, idx, weight = tokens(4)
    for inputs in (tokens(17), (mm.quantize(x, "mxfp8"), idx, weight), tokens(0)):
        assert torch.equal(one(*inputs), wanted(inputs, one))
    cuda.busy = True  # inside somebody else's capture
    assert torch.equal(one(x, idx, weight), wanted((x, idx, weight), one))
    assert cuda.log == ["eager"] * 4
    cuda.busy = False
    one(x, idx, weight)
    cuda.busy = True  # a call that was met is no different
    assert torch.equal(one(x, idx, weight), wanted((x, idx, weight), one))
    assert cuda.log[-1] == "eager"


def test_another_stream_waits_for_the_last(cuda):
    one = make()
    one(*tokens(4))
    before = len(cuda.log)
    one(*tokens(4))
    assert len(cuda.log) == before
    cuda.now = "other"
    one(*tokens(4))
    assert cuda.log[before:] == ["other waits for main"]
    one(*tokens(4))
    cuda.now = "third"
    one(*tokens(9))  # its capture, too, comes after the calls before
    assert cuda.log[before + 1] == "third waits for other"
    assert cuda.log[before + 2] == "side waits for third"


# -- notes ----------------------------------------------------------------------------------------


def test_a_slot_is_written_again_once_the_gpu_has_taken_it(cuda):
    """The GPU is late: it replays what was sent when the host waits for it."""
    one = make()
    batches = [tokens(1 + seed % 9, seed) for seed in range(24)]
    for inputs in batches:
        one(*inputs)
    cuda.queue = []
    sent, given, longest = [], [], 0
    for step in range(3 * SLOTS):
        inputs = batches[step * 5 % len(batches)]
        copies = [t.clone() for t in inputs]
        sent.append(copies)  # alive until the GPU has read them
        given.append((one(*copies), inputs))
        longest = max(longest, sum(isinstance(q, Graph) for q in cuda.queue))
    assert HALF < longest <= SLOTS and cuda.log.count("wait") >= 4
    cuda.catch_up()
    want = {id(inputs): wanted(inputs, one) for inputs in batches}
    assert all(torch.equal(y, want[id(inputs)]) for y, inputs in given)


def test_events_stand_in_each_half_on_the_stream_of_the_call(cuda):
    one = make()
    inputs = tokens(2)
    for step in range(2 * SLOTS + 1):
        cuda.now = "main" if step < SLOTS else "other"
        one(*inputs)
    marks = [line for line in cuda.log if line.startswith(("record", "wait"))]
    main, other = "record on main", "record on other"
    assert marks == [main, main, "wait", other, "wait", other, "wait"]


def test_an_interrupted_replay_starts_all_anew(cuda):
    """Nobody knows whether the GPU took that note: replay_queue and graphs go together."""
    one = make()
    inputs = tokens(4)
    one(*inputs)
    box = one._graphs._gpu.replay_queue
    one._graphs._captured[4].graph.fails = True
    with pytest.raises(KeyboardInterrupt):
        one(*inputs)
    assert one._graphs._gpu is None and cuda.log[-1] == "synchronize"
    for seed in range(3):
        assert torch.equal(one(*tokens(4, seed)), wanted(tokens(4, seed), one))
    assert one._graphs._gpu.replay_queue is not box


def test_a_capture_that_fails_leaves_the_others_in_turn(cuda, monkeypatch):
    one = make()
    one(*tokens(4))
    with monkeypatch.context() as patch:
        patch.setattr(graph_io, "copy_output", lambda now, y, step: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            one(*tokens(9))
        cuda.capturing = None
    assert list(one._graphs._captured) == [4]
    for count in (4, 9, 4):
        assert torch.equal(one(*tokens(count)), wanted(tokens(count), one))


def test_mail_outlives_its_layer_until_the_gpu_is_done(cuda):
    one, other = make(), make()
    one(*tokens(4))
    other(*tokens(4))
    args = one._graphs._gpu.replay_queue.args
    cpu = torch.device("cpu")
    replay_queue._LEFT.clear()
    del one
    gc.collect()
    assert any(left is args for left in replay_queue._LEFT[cpu])
    other._graphs.drop()
    assert not any(left is args for left in replay_queue._LEFT.get(cpu, []))


@pytest.mark.parametrize("change", ["assigned", "moved", "stats", "loaded", "options"])
def test_graphs_go_when_what_they_hold_changes(cuda, change):
    one, other = make(), mm.MoE(weights(seed=1), E, K, backend="reference")
    inputs = tokens(4)
    one(*inputs)
    if change == "moved":
        one.double()
    elif change == "stats":
        one.stats = torch.zeros_like(one.stats)
    elif change == "options":
        one._options = copy.copy(one.options)
    else:
        one.load_state_dict(copy.deepcopy(other.state_dict()), assign=change == "assigned")
    assert torch.equal(one(*inputs), wanted(inputs, one))
    assert len(captures(cuda)) == 2 and "synchronize" in cuda.log
    one(*inputs)
    assert len(captures(cuda)) == 2
    assert int(one.stats.sum()) == (2 if change == "stats" else 3) * 4 * K


def test_a_graph_reads_experts_where_they_lie_as_they_are_then(cuda):
    one, inputs = make(), tokens(4)
    before = one(*inputs)
    one.weights.w2.data[0].zero_()
    after = one(*inputs)
    assert torch.equal(after, wanted(inputs, one)) and not torch.equal(after, before)
    assert len(captures(cuda)) == 1


def test_two_layers_keep_to_themselves(cuda):
    one, other = make(), mm.MoE(weights(seed=1), E, K, cuda_graphs=True, shared=weights(seed=2)[:1])
    for seed in range(2):
        inputs = tokens(4, seed)
        assert torch.equal(one(*inputs), wanted(inputs, one))
        want = mm.moe(*inputs, other.weights, shared=other.shared.weights, backend="reference")
        assert torch.equal(other(*inputs), want)
    assert len(set(captures(cuda))) == 2


def test_layers_of_one_pool_share_memory_and_follow_each_other(cuda):
    pool = mm.GraphPool(max_tokens=16)
    made = [mm.MoE(weights(seed=seed), E, K, cuda_graphs=pool) for seed in range(3)]
    for step, one in enumerate(made * 2):
        cuda.now = f"stream {step}"
        inputs = tokens(4, step)
        assert torch.equal(one(*inputs), wanted(inputs, one))
        follows = [f"stream {step} waits for stream {step - 1}"] if step else []
        assert [line for line in cuda.log if line.startswith(f"stream {step} waits for s")][:1] == (
            follows or ["stream 0 waits for side"]
        )
    assert len(captures(cuda)) == 3 and len(set(captures(cuda))) == 1
    assert len({one._graphs._gpu.replay_queue for one in made}) == 3
    made[0](*tokens(17))
    assert cuda.log[-1] == "eager"


def test_a_pool_that_every_graph_left_is_not_taken_again(cuda):
    """torch refuses the handle of such a pool."""
    pool = mm.GraphPool()
    one, other = (mm.MoE(weights(), E, K, cuda_graphs=pool) for _ in range(2))
    one(*tokens(4))
    other(*tokens(4))
    one._graphs.drop()
    gc.collect()
    one(*tokens(4))  # the other's graph is there yet
    assert len(set(captures(cuda))) == 1
    one._graphs.drop()
    other._graphs.drop()
    gc.collect()
    one(*tokens(4))
    assert len(set(captures(cuda))) == 2


def test_a_failed_capture_does_not_spoil_the_pool(cuda):
    """torch takes its memory to be recorded to for ever, and may leave its stream current."""
    pool = mm.GraphPool()
    one, other = (mm.MoE(weights(), E, K, cuda_graphs=pool) for _ in range(2))
    inputs = tokens(4)
    one(*inputs)
    cuda.spoils_capture = True
    with pytest.raises(RuntimeError, match="invalidated"):
        other(*inputs)
    assert cuda.log[-1] == "back on main"
    cuda.spoils_capture = False
    for layer_ in (other, one):
        assert torch.equal(layer_(*inputs), wanted(inputs, layer_))
    one(*tokens(9))
    first, failed, second, third = captures(cuda)
    assert first == failed != second == third


def test_graphs_that_are_garbage_hold_a_pool_until_the_next_is_captured(cuda, monkeypatch):
    one = mm.MoE(weights(), E, K, cuda_graphs=mm.GraphPool())
    lane = one._graphs.pool._lane(one.weights.device)
    gc.disable()
    garbage = graph_in_a_cycle(lane)
    real = torch.cuda.graph

    def collecting(*args, **options):
        gc.collect()
        assert garbage() is not None
        return real(*args, **options)

    monkeypatch.setattr(torch.cuda, "graph", collecting)
    try:
        one(*tokens(4))
    finally:
        gc.enable()
    gc.collect()
    assert garbage() is None


def graph_in_a_cycle(lane):
    """A weak reference to a captured graph that only the collector frees."""
    graph = torch.cuda.CUDAGraph()
    graph.itself = graph
    with lane.capture(graph):
        pass
    return weakref.ref(graph)


def test_one_layers_failed_replay_leaves_the_others(cuda):
    pool = mm.GraphPool()
    one, other = (mm.MoE(weights(), E, K, cuda_graphs=pool) for _ in range(2))
    inputs = tokens(4)
    for layer_ in (one, other):
        layer_(*inputs)
    one._graphs._captured[4].graph.fails = True
    with pytest.raises(KeyboardInterrupt):
        one(*inputs)
    for layer_ in (other, one):
        assert torch.equal(layer_(*inputs), wanted(inputs, layer_))
    assert len(captures(cuda)) == 3


def test_a_copy_of_layers_shares_a_pool_of_its_own(cuda):
    pool = mm.GraphPool(8)
    made = torch.nn.ModuleList(mm.MoE(weights(), E, K, cuda_graphs=pool) for _ in range(2))
    pools = {one._graphs.pool for one in copy.deepcopy(made)}
    assert len(pools) == 1 and pool not in pools and pools.pop().max_tokens == 8


def test_pools_of_no_size_are_refused():
    for bad in (0, 4096):
        with pytest.raises(RangeError, match="max_tokens must be 1 to 2048"):
            mm.GraphPool(bad)
    with pytest.raises(DTypeError, match="max_tokens must be an integer"):
        mm.GraphPool(max_tokens="128")
    with pytest.raises(DTypeError, match="a bool or a GraphPool"):
        mm.MoE(weights(), E, K, cuda_graphs=128)


def test_copies_capture_their_own(cuda):
    one = make()
    inputs = tokens(4)
    one(*inputs)
    for other in (copy.deepcopy(one), pickle.loads(pickle.dumps(one))):
        assert torch.equal(other(*inputs), wanted(inputs, one))
        assert other._graphs is not one._graphs and other._graphs.most == one._graphs.most
    assert len(captures(cuda)) == 3


def test_buffers_made_in_inference_mode_serve_outside_it(cuda):
    one = make()
    with torch.inference_mode():
        one(*tokens(4))
    assert not one._graphs._captured[4].inputs.x.is_inference()
    assert torch.equal(one(*tokens(4)), wanted(tokens(4), one))


def test_without_a_gpu_and_over_a_group():
    one = mm.MoE(weights(), E, K, cuda_graphs=True)
    assert one._graphs is None and "CUDA graphs" in repr(one)
    assert torch.equal(one(*tokens()), wanted(tokens(), one))
    with pytest.raises(NotAvailable, match="staged calls over a group wait for the GPU"):
        layer.MoE._build(
            types.SimpleNamespace(
                top_k=K, num_experts=E, max_tokens_per_rank=None, _has_group=True,
                _wants_graphs=True, _wanted=("auto", "staged"),
            ),
            weights(), None, None, 1,
        )  # fmt: skip

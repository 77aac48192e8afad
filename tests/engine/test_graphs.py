"""Graphs per token bucket, with a CUDA of this file's own: what is captured, kept and dropped."""

import copy
import pickle
import types
from contextlib import contextmanager

import pytest
import torch

import megamoe as mm
from megamoe import reference
from megamoe.engine import graphs, layer
from megamoe.engine.functional import run
from megamoe.engine.graphs import MOST_TOKENS, bucket_of
from megamoe.errors import CapacityError, NotAvailable, RangeError
from megamoe.routing.permute import expert_counts

pytest.importorskip("triton")
from megamoe.kernels.portable import fill as filling
from tests.engine.pretended import E, H, K, tokens, weights


class Cuda:
    """Stands for the GPU: a captured call is kept, and made when its graph is replayed."""

    def __init__(self):
        self.log, self.capturing, self.busy, self.now = [], None, False, "main"

    def stream(self, name):
        def wait(other):
            self.log.append(f"{name} waits for {other.name}")

        return types.SimpleNamespace(name=name, wait_stream=wait)

    def current_stream(self, device):
        self.streams = getattr(self, "streams", {})
        return self.streams.setdefault(self.now, self.stream(self.now))

    @contextmanager
    def on_stream(self, stream):
        self.log.append(f"on {stream.name}")
        yield

    @contextmanager
    def capture(self, graph, pool, stream, capture_error_mode):
        self.log.append(f"capture on {stream.name} in {pool}")
        self.capturing = graph
        yield
        self.capturing = None

    def launch(self, backend, x, idx, weights, experts, options, shared, found, stats, num, manner):
        """`functional.launch` with the oracle's arithmetic, now or at the replay."""
        y = torch.full_like(x, float("nan"))

        def call():
            bad = (idx < -1) | (idx >= E) | ((idx >= 0) & ~weights.isfinite())
            bad &= torch.arange(len(x))[:, None] < num
            if bad.any():
                found.word.fill_(int(bad.flatten().nonzero()[0]))
            legal = idx.masked_fill(bad | (torch.arange(len(x))[:, None] >= num), -1)
            y.copy_(reference.moe(x, legal, weights, experts, options, shared))
            stats.add_(expert_counts(legal, E))
            found.follow(K)

        if self.capturing is None:
            self.log.append(f"launch {len(x)}")
            call()
        else:
            self.capturing.calls.append(call)
        return y


class Graph:
    def __init__(self):
        self.calls = []

    def replay(self):
        for call in self.calls:
            call()


def fill(x, idx, weights, into):
    count = len(x)
    into.x[:count], into.topk_idx[:count], into.topk_weights[:count] = x, idx, weights
    into.count.fill_(count)


@pytest.fixture
def cuda(monkeypatch):
    fake = Cuda()
    there = {
        "Stream": lambda device: fake.stream("side"),
        "current_stream": fake.current_stream,
        "stream": fake.on_stream,
        "graph": fake.capture,
        "CUDAGraph": Graph,
        "graph_pool_handle": lambda: f"pool {len(fake.log)}",
        "is_current_stream_capturing": lambda: fake.busy,
        "synchronize": lambda device: fake.log.append("synchronize"),
    }
    for name, one in there.items():
        monkeypatch.setattr(torch.cuda, name, one)
    monkeypatch.setattr(graphs, "launch", fake.launch)
    monkeypatch.setattr(filling, "fill", fill)
    monkeypatch.setattr(layer, "choose", lambda *wanted: "portable")

    def eager(backend, *call, manner):
        fake.log.append("eager")
        return run("reference", *call)

    monkeypatch.setattr(layer, "run", eager)
    return fake


def make(**options):
    return mm.MoE(weights(), E, K, cuda_graphs=True, **options)


def wanted(inputs, of):
    return mm.moe(*inputs, of.weights, backend="reference")


def captures(cuda):
    return [line for line in cuda.log if line.startswith("capture")]


def test_buckets_are_powers_of_two_then_multiples_of_256():
    buckets = [bucket_of(num) for num in range(1, MOST_TOKENS + 1)]
    assert sorted(set(buckets)) == [1, 2, 4, 8, 16, 32, 64, 128, *range(256, 2049, 256)]
    assert all(num <= bucket < 2 * num for num, bucket in enumerate(buckets, 1))
    assert bucket_of(5, most=6) == 6 and bucket_of(600, most=600) == 600


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
    assert torch.equal(one(wide[:, :H], idx.int(), weight), wanted((x, idx, weight), one))


def test_a_bucket_is_warmed_on_no_token_and_all_share_a_pool(cuda):
    one = make()
    one(*tokens(3))
    assert cuda.log == [
        "side waits for main", "on side", "launch 4", "main waits for side",
        "capture on side in pool 0",
    ]  # fmt: skip
    assert int(one.stats.sum()) == 3 * K
    one(*tokens(30))
    assert captures(cuda) == ["capture on side in pool 0"] * 2


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


def test_stats_are_added_once_a_call(cuda):
    one = make()
    total = torch.zeros(E, dtype=torch.int64)
    for seed, count in enumerate((9, 9, 2)):
        inputs = tokens(count, seed, masked_ratio=0.3)
        one(*inputs)
        total += expert_counts(inputs[1], E)
        assert torch.equal(one.stats, total)


def test_faults_are_told_on_the_next_call_once(cuda):
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


def test_some_calls_are_eager(cuda, monkeypatch):
    one = make()
    monkeypatch.setattr(one._graphs, "most", 16)
    x, idx, weight = tokens(4)
    for inputs in (tokens(17), (mm.quantize(x, "mxfp8"), idx, weight), tokens(0)):
        assert torch.equal(one(*inputs), wanted(inputs, one))
    cuda.busy = True  # inside somebody else's capture
    assert torch.equal(one(x, idx, weight), wanted((x, idx, weight), one))
    assert cuda.log == ["eager"] * 4


def test_another_stream_waits_for_the_last(cuda):
    one = make()
    one(*tokens(4))
    before = len(cuda.log)
    one(*tokens(4))
    assert len(cuda.log) == before
    cuda.now = "other"
    one(*tokens(4))
    assert cuda.log[before:] == ["other waits for main"]


@pytest.mark.parametrize("change", ["written", "assigned", "moved", "stats", "loaded"])
def test_graphs_go_when_what_they_hold_changes(cuda, change):
    one, other = make(), mm.MoE(weights(seed=1), E, K, backend="reference")
    inputs = tokens(4)
    one(*inputs)
    if change == "written":
        one.weights.w2.data[0].zero_()
    elif change == "moved":
        one.double()
    elif change == "stats":
        one.stats = torch.zeros_like(one.stats)
    else:
        one.load_state_dict(copy.deepcopy(other.state_dict()), assign=change == "assigned")
    assert torch.equal(one(*inputs), wanted(inputs, one))
    assert len(captures(cuda)) == 2 and "synchronize" in cuda.log
    one(*inputs)
    assert len(captures(cuda)) == 2
    assert int(one.stats.sum()) == (2 if change == "stats" else 3) * 4 * K


def test_two_layers_keep_to_themselves(cuda):
    one, other = make(), mm.MoE(weights(seed=1), E, K, cuda_graphs=True, shared=weights(seed=2)[:1])
    for seed in range(2):
        inputs = tokens(4, seed)
        assert torch.equal(one(*inputs), wanted(inputs, one))
        want = mm.moe(*inputs, other.weights, shared=other.shared.weights, backend="reference")
        assert torch.equal(other(*inputs), want)
    assert len(set(captures(cuda))) == 2


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
    assert not one._graphs._held[4].inputs.x.is_inference()
    assert torch.equal(one(*tokens(4)), wanted(tokens(4), one))


def test_without_a_gpu_and_over_a_group():
    one = mm.MoE(weights(), E, K, cuda_graphs=True)
    assert one._graphs is None and "CUDA graphs" in repr(one)
    assert torch.equal(one(*tokens()), wanted(tokens(), one))
    with pytest.raises(NotAvailable, match="keeps no graphs of its own"):
        layer.MoE._build(
            types.SimpleNamespace(
                top_k=K, num_experts=E, max_tokens_per_rank=None, _has_group=True,
                _wants_graphs=True,
            ),
            weights(), None, None, 1,
        )  # fmt: skip

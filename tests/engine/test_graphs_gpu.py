"""Graphs per token bucket on a GPU: the bits of eager calls, whatever changes between replays."""

import gc
import threading

import pytest
import torch

import megamoe as mm
from megamoe.engine import backends
from megamoe.engine.replay_queue import SLOTS
from megamoe.routing.permute import expert_counts
from megamoe.routing.samplers import sample_routing

pytestmark = pytest.mark.gpu

E, I, H, K = 8, 320, 512, 2
COUNTS = (1, 3, 8, 9, 64, 200)


def weights(recipe="w8a8", seed=0):
    rng = torch.Generator("cuda").manual_seed(seed)
    w13 = torch.randn(E, 2 * I, H, generator=rng, device="cuda") / H**0.5
    w2 = torch.randn(E, H, I, generator=rng, device="cuda") / I**0.5
    return mm.ExpertWeights.quantize(w13.bfloat16(), w2.bfloat16(), recipe)


def tokens(count, seed=0, **routing):
    rng = torch.Generator("cuda").manual_seed(seed)
    x = torch.randn(count, H, generator=rng, device="cuda").bfloat16()
    return x, *(t.cuda() for t in sample_routing(count, E, K, seed=seed, **routing))


def pair(backend="auto", recipe="w8a8", seed=0, **options):
    """A layer that replays, and one of the same experts that does not."""
    why = "" if backend == "auto" else next(
        b.why_not(torch.device("cuda")) for b in backends.BACKENDS if b.name == backend
    )  # fmt: skip
    if why:
        pytest.skip(why)
    w = weights(recipe, seed)
    options = {"mode": "staged", **options}  # fused: test_fused_gpu.py, where kernels are few
    return tuple(
        mm.MoE(w, E, K, backend=backend, cuda_graphs=on, **options) for on in (True, False)
    )


@pytest.mark.parametrize("recipe", ["w4a8_block", "w8a8", "w4a16", "nvfp4"])
@pytest.mark.parametrize("backend", ["hopper", "portable"])
def test_replays_have_the_bits_of_eager_calls(backend, recipe):
    one, eager = pair(backend, recipe)
    for seed in range(3):
        for num, count in enumerate(COUNTS):
            skew = ("uniform", "zipf", "hot_expert")[(seed + num) % 3]
            inputs = tokens(count, seed, skew=skew, masked_ratio=0.1)
            assert torch.equal(one(*inputs), eager(*inputs)), (seed, count)
    assert torch.equal(one.stats, eager.stats)
    assert sorted(one._graphs._captured) == [1, 4, 8, 16, 64, 256]
    one.check()


def test_thousands_of_replays_with_changing_buckets_and_routing():
    one, eager = pair()
    batches = [tokens(count, seed) for seed in range(4) for count in COUNTS]
    wanted = [eager(*inputs) for inputs in batches]
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    for step in range(4000):
        at = step * 7 % len(batches)
        y = one(*batches[at], copy=step % 2 == 0)
        wrong += (y.view(torch.int16) != wanted[at].view(torch.int16)).any()
        if step % 64 == 0:
            torch.cuda.synchronize()
    assert int(wrong) == 0


def test_inputs_may_go_as_soon_as_a_call_returns():
    """Nothing waits for the GPU: every call has inputs of its own, in other places and types."""
    one, eager = pair()
    batches = [tokens(count, seed) for seed in range(4) for count in COUNTS]
    wanted = [eager(*inputs) for inputs in batches]
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    for step in range(2000):
        at = step * 7 % len(batches)
        x, idx, weight = batches[at]
        pad = step % 5
        wide = torch.full((len(x), H + pad), float("nan"), dtype=torch.bfloat16, device="cuda")
        wide[:, pad:] = x
        ids = idx.int() if step % 3 else idx.clone()
        gates = weight.clone()
        y = one(wide[:, pad:], ids, gates, copy=step % 4 != 3)
        del ids, gates
        wide.fill_(float("nan"))  # behind the call, on its stream
        del wide
        wrong += (y.view(torch.int16) != wanted[at].view(torch.int16)).any()
    assert int(wrong) == 0
    assert torch.equal(
        one.stats, sum(expert_counts(batches[s * 7 % 24][1], E) for s in range(2000))
    )
    one.check()


def test_more_calls_than_slots_may_be_under_way():
    one, eager = pair()
    batches = [tokens(count, seed) for seed in range(2) for count in COUNTS[:5]]
    wanted = [eager(*inputs) for inputs in batches]
    for inputs in batches:
        one(*inputs)
    torch.cuda.synchronize()
    torch.cuda._sleep(1_000_000_000)  # the GPU is late, so that the host must wait for slots
    got = [(step % 10, one(*batches[step % 10])) for step in range(3 * SLOTS + 5)]
    assert all(torch.equal(y, wanted[at]) for at, y in got)


def test_threads_take_turns():
    one, eager = pair()
    batches = [tokens(8, seed) for seed in range(4)]
    wanted = [eager(*inputs) for inputs in batches]
    one(*batches[0])
    torch.cuda.synchronize()
    wrong = []

    def work(at):
        with torch.no_grad(), torch.cuda.stream(torch.cuda.Stream()):
            ys = [one(*batches[at]) for _ in range(300)]
            wrong.extend(at for y in ys if not torch.equal(y, wanted[at]))

    with torch.no_grad():
        one(*batches[0])  # seen once without gradients: a thread captures nothing
    threads = [threading.Thread(target=work, args=(at,)) for at in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_a_layer_may_go_while_its_calls_are_under_way():
    one, eager = pair()
    batches = [tokens(count, seed) for seed, count in enumerate(COUNTS)]
    wanted = [eager(*inputs) for inputs in batches]
    for inputs in batches:
        one(*inputs)
    torch.cuda.synchronize()
    torch.cuda._sleep(300_000_000)
    got = [one(*inputs) for inputs in batches]
    del one
    gc.collect()
    junk = [torch.full((256, 8), -1, dtype=torch.int64).pin_memory() for _ in range(8)]
    assert all(torch.equal(y, want) for y, want in zip(got, wanted, strict=True)), junk


@pytest.mark.parametrize("options", [{"weight_at": "combine"}, {"combine": "fp8"}], ids=str)
def test_options_and_shared_experts(options):
    shared = weights("bf16", 5)[:2]
    one, eager = pair(shared=shared, **options)
    for count in COUNTS:
        inputs = tokens(count, count)
        assert torch.equal(one(*inputs), eager(*inputs))


def test_two_layers_in_turns():
    (one, first), (other, second) = pair(seed=0), pair(seed=1, recipe="w4a16")
    for seed, count in enumerate((8, 3, 8, 64, 5)):
        inputs = tokens(count, seed)
        y, z = one(*inputs, copy=False), other(*inputs, copy=False)
        assert torch.equal(y, first(*inputs)) and torch.equal(z, second(*inputs))


def test_moves_and_writes_are_followed():
    one, eager = pair(mode="auto")  # a CPU has no other
    inputs = tokens(9)
    wanted = eager(*inputs)
    assert torch.equal(one(*inputs), wanted)
    one.cpu()
    assert one.backend == "reference"
    one.cuda()
    assert torch.equal(one(*inputs), wanted)
    one.load_state_dict(mm.MoE(weights(seed=3), E, K).state_dict())
    assert torch.equal(one(*inputs), mm.moe(*inputs, weights(seed=3), mode="staged"))


def test_bad_slots_are_masked_and_reported():
    one, eager = pair()
    x, idx, weight = tokens(13)
    bad, masked = idx.clone(), idx.clone()
    bad[5, 1], masked[5, 1] = E + 3, -1
    assert torch.equal(one(x, bad, weight), eager(x, masked, weight))
    with pytest.raises(mm.MegaMoEError, match="token 5, slot 1"):
        one.check()
    assert torch.equal(one(x, idx, weight), eager(x, idx, weight))
    one.check()


def test_calls_on_several_streams_follow_each_other():
    one, eager = pair()
    batches = [tokens(8, seed) for seed in range(6)]
    wanted = [eager(*inputs) for inputs in batches]
    streams = [torch.cuda.Stream() for _ in range(3)]
    for stream in streams:
        stream.wait_stream(torch.cuda.current_stream())
    got = []
    for step in range(2 * SLOTS):
        with torch.cuda.stream(streams[step % 3]):
            got.append(one(*batches[step % 6]))
    torch.cuda.synchronize()
    assert all(torch.equal(y, wanted[step % 6]) for step, y in enumerate(got))


def test_a_call_inside_a_capture_is_part_of_it():
    one, eager = pair()
    x, idx, weight = tokens(8)
    one(x, idx, weight)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = one(x, idx, weight)
    for seed in range(2):
        new = tokens(8, seed)
        for held, t in zip((x, idx, weight), new, strict=True):
            held.copy_(t)
        graph.replay()
        assert torch.equal(y, eager(*new))


def test_warming_up_captures():
    one, eager = pair()
    mm.warmup(one, [1, 9, 5000])
    assert sorted(one._graphs._captured) == [1, 16] and not one.stats.any()
    assert torch.equal(one(*tokens(9)), eager(*tokens(9)))


def test_layers_of_one_pool_have_the_bits_of_eager_calls_and_share_memory():
    def held(shared):
        torch.cuda.synchronize()
        before = torch.cuda.memory_reserved()
        pool = mm.GraphPool(64) if shared else True
        made = [mm.MoE(w, E, K, mode="staged", cuda_graphs=pool) for w in experts]
        streams = [torch.cuda.Stream() for _ in range(2)]
        for step in range(40):
            one, eager = made[step % 6], plain[step % 6]
            inputs = tokens(COUNTS[step % 5], step)
            want = eager(*inputs)
            torch.cuda.synchronize()
            with torch.cuda.stream(streams[step % 2]):
                got = one(*inputs)
            torch.cuda.synchronize()
            assert torch.equal(got, want), step
        taken = torch.cuda.memory_reserved() - before
        del made
        gc.collect()
        torch.cuda.empty_cache()
        return taken

    experts = [weights(seed=seed) for seed in range(6)]
    plain = [mm.MoE(w, E, K, mode="staged") for w in experts]
    held(shared=True)  # kernels are compiled, caches warm
    apart, together = held(shared=False), held(shared=True)
    assert together < apart


def test_replays_of_several_layers_in_a_row_keep_their_bits():
    """As in a model: nothing waits between one layer's replay and the next."""
    pool = mm.GraphPool(64)
    experts = [weights(seed=seed) for seed in range(4)]
    made, plain = (
        [mm.MoE(w, E, K, mode="staged", cuda_graphs=graphs) for w in experts]
        for graphs in (pool, False)
    )
    for seed in range(20):
        x, idx, gates = tokens(COUNTS[seed % 5], seed)
        y, want = x, x
        for one, eager in zip(made, plain, strict=True):
            y, want = one(y, idx, gates), eager(want, idx, gates)
        assert torch.equal(y, want), seed

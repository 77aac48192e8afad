"""Fused mode on a Hopper GPU: the bits of staged mode, and faults that end in an error.

Kernels take seconds to compile, so tests share them: a kernel is a tile, a size of the routing and
a set of options. Expected bits come from one staged call over a crowd of tokens: bits depend on no
neighbour, so every fused call is a choice out of the crowd.
"""

import contextlib
import functools
import random
from dataclasses import replace

import pytest
import torch

import megamoe as mm
from megamoe.engine.local import LocalRanks
from megamoe.engine.planning import hardware_of
from megamoe.engine.status import BARRIERS, DeviceStatus
from megamoe.errors import CapacityError, MegaMoETimeout
from megamoe.formats.spec import recipe_named
from megamoe.kernels.gluon.mega import arguments, sync
from megamoe.planner.fused import ring
from megamoe.planner.hopper import as_fused, num_rows
from megamoe.problem import Options
from megamoe.routing.permute import expert_counts
from megamoe.routing.samplers import sample_routing
from tests import pretending
from tests.engine.test_hopper_gpu import IS_OTHER, WIDE, E, H, I, K, experts
from tests.kernels.hopper import shipped_fused, tile_name
from tests.proof.waits import WAITS

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(IS_OTHER, reason="needs an sm_90 GPU; this is another"),
]

CUDA = torch.device("cuda")
BASE = "w4a8_block"


def tiles_of(recipe):
    return shipped_fused(recipe.split()[0], fits=recipe != WIDE)


EACH = 40  # tokens of a kind in the crowd
KINDS = ("uniform", "zipf", "hot_expert", "dirichlet", "holes", "same", "masked", "alone")

# fmt: off
# recipe: (options, whether experts have biases, whether rows behind a count are padding, ids)
HOW = {
    BASE:    (Options(), False, False, torch.int64),
    "w8a8":  (Options(weight_at="combine"), True, True, torch.int32),
    "bf16":  (Options("gpt_oss"), True, False, torch.int32),
    "w4a16": (Options("gpt_oss", weight_at="combine"), True, True, torch.int64),
    "w4a8":  (Options(clamp=0.5), False, False, torch.int32),
    "nvfp4": (Options(), True, False, torch.int64),
    "w4a4":  (Options(weight_at="combine"), False, False, torch.int64),
    WIDE:    (Options(), False, False, torch.int64),
}
# (recipe, which of its tiles, tokens from, to): each row is one fused kernel.
KERNELS = [
    (BASE, 0, 1, 64), (BASE, 1, 65, 256), (BASE, 2, 257, 300),
    ("w8a8", 0, 1, 64), ("w8a8", 2, 257, 300), ("bf16", 0, 1, 64), ("w4a16", 2, 65, 256),
    ("w4a8", 1, 1, 64), ("nvfp4", 2, 65, 256), ("w4a4", 0, 65, 256), (WIDE, 1, 1, 64),
]
# fmt: on
SHAPES = [(H, I, E), (2880, 2880, E), (H, I, 5)]
CASES = 6  # of a kernel and a shape


def same_bits(a, b):
    return torch.equal(a.view(torch.int16), b.view(torch.int16))


def weights_of(recipe, shape=SHAPES[0]):
    hidden, intermediate, num = shape
    make = experts if hidden == H else experts.__wrapped__  # the large ones are not kept
    w = make(recipe, intermediate, hidden)
    if recipe == "nvfp4":
        some = torch.linspace(0.01, 0.02, E, device=CUDA)
        w = replace(w, acts_global=some, x_global=torch.tensor(0.37, device=CUDA))
    w = w if HOW[recipe][1] else replace(w, b13=None, b2=None)
    return w if num == E else w[:num]


class Crowd:
    """Tokens of every kind, and what staged mode gives each."""

    def __init__(self, recipe, shape=SHAPES[0], combine="bf16"):
        hidden, _, num = shape
        self.num, self.hidden = num, hidden
        self.weights = weights_of(recipe, shape)
        self.options = replace(HOW[recipe][0], combine=combine)
        rng = torch.Generator(CUDA).manual_seed(1)
        self.x = torch.randn(EACH * len(KINDS), hidden, generator=rng, device=CUDA).bfloat16()
        if recipe == WIDE:
            self.x[:, :128] *= 2.0**13
        parts = [self._kind(kind, seed) for seed, kind in enumerate(KINDS)]
        self.idx, self.gates = (torch.cat(each).to(CUDA) for each in zip(*parts, strict=True))
        status = DeviceStatus(CUDA)
        inputs = self.x, self.idx, self.gates
        self.y = pretending.staged(
            inputs, self.weights, self.options, tile=tiles_of(recipe)[0], status=status
        )
        status.check(K)
        self.idx = self.idx.to(HOW[recipe][3])

    def _kind(self, kind, seed):
        skew = kind if kind in ("zipf", "hot_expert", "dirichlet", "masked") else "uniform"
        idx, gates = sample_routing(EACH, self.num, K, skew=skew, seed=seed)
        if kind == "holes":
            idx[torch.rand(idx.shape, generator=torch.Generator().manual_seed(seed)) < 0.3] = -1
        elif kind == "same":
            idx[:, 1] = idx[:, 0]
        elif kind == "alone":
            idx[:] = 1
        return idx, gates

    def pick(self, num, seed=0, kinds=None):
        """(x, ids, weights), expected: `num` tokens, each perhaps several times."""
        rng = random.Random(seed)
        if kinds is None:
            kinds = rng.sample(range(len(KINDS)), rng.randint(1, len(KINDS)))
        at = torch.tensor(
            [rng.choice(kinds) * EACH + rng.randrange(EACH) for _ in range(num)], device=CUDA
        )
        return (self.x[at], self.idx[at], self.gates[at]), self.y[at]


@functools.cache
def base():
    return Crowd(BASE)


def layer(**options):
    crowd = base()
    made = {"backend": "hopper", "mode": "fused", **options}
    return mm.MoE(crowd.weights, E, K, **made)


@pytest.mark.parametrize(
    ("recipe", "tile", "fewest", "most"),
    [pytest.param(*row, id=f"{row[0]}-{tile_name(tiles_of(row[0])[row[1]])}") for row in KERNELS],
)
def test_fused_calls_have_the_bits_of_staged_ones(recipe, tile, fewest, most):
    is_counted = HOW[recipe][2]
    rng, status = random.Random(tile), DeviceStatus(CUDA)
    for shape in SHAPES:
        crowd = Crowd(recipe, shape)
        for seed in range(CASES):
            num = (fewest, most, rng.randint(fewest, most))[min(seed, 2)]
            (x, idx, gates), wanted = crowd.pick(num, rng.random())
            there, count = num, None
            if is_counted:
                there = rng.randint(0, num)
                count = torch.tensor([there], dtype=torch.int32, device=CUDA)
                x[there:], idx[there:], gates[there:] = float("nan"), E + 7, float("inf")
                wanted[there:] = 0
            stats = torch.ones(crowd.num, dtype=torch.int64, device=CUDA)
            y = pretending.fuse(
                (x, idx, gates), crowd.weights, crowd.options, status, tiles_of(recipe)[tile],
                stats=stats, num_valid=count,
            )  # fmt: skip
            status.check(K)
            assert same_bits(y, wanted), (shape, seed, num)
            assert torch.equal(stats - 1, expert_counts(idx[:there].long(), crowd.num))


@pytest.mark.parametrize("num_ranks", [2, 8])
def test_what_came_lies_in_the_buffer_of_each_rank_bit_for_bit(num_ranks):
    """One launch puts it there, NaN and all; what an earlier call left after it stays."""
    crowd, rng = base(), random.Random(num_ranks)
    ranks = LocalRanks(crowd.weights, num_ranks, crowd.options, timeout_s=20)
    for call in range(12):
        (x, idx, gates), _ = crowd.pick(8 * num_ranks, call)
        x[::5], idx[::5] = float("nan"), -1
        counts = [rng.choice((0, 1, 8)) for _ in range(num_ranks)]
        parts = [list(t[: sum(counts)].split(counts)) for t in (x, idx, gates)]
        if not any(counts):
            continue
        ranks(*parts)
        ranks.check()
        for buffer, num, *came in zip(ranks._buffers, counts, *parts, strict=True):
            assert int(buffer.num_valid) == num
            there = buffer.tokens[:num], buffer.topk_idx[:num], buffer.topk_weights[:num]
            assert same_bits(there[0], came[0]) and torch.equal(there[1], came[1].long())
            assert torch.equal(there[2], came[2])


@pytest.mark.parametrize("mode", ["fused", "auto"])
def test_a_layer_in_either_mode_with_poison_reserved_sms_and_bad_slots(mode):
    for options in ({"debug_poison": True}, {"reserve_sms": 100}):
        one = layer(mode=mode, **options)
        for seed in range(4):
            inputs, wanted = base().pick(seed * 5 + 1, seed)
            assert one.plan(len(inputs[0])).mode == "fused"
            assert same_bits(one(*inputs), wanted)
        one.check()
    (x, idx, gates), wanted = base().pick(16, 3)
    idx[5, 1], gates[7, 0] = E + 3, float("nan")
    idx[7, 0] = 2
    others = [t for t in range(16) if t not in (5, 7)]
    assert same_bits(one(x, idx, gates)[others], wanted[others])
    with pytest.raises(mm.MegaMoEError, match="token 5, slot 1"):
        one.check()
    with pytest.raises(CapacityError, match="SMs at least"):
        layer(reserve_sms=10_000)


def test_calls_beyond_fused_are_staged_by_auto_refused_by_fused_and_streams_take_turns():
    one, auto = layer(), layer(mode="auto")
    (x, *routing), wanted = base().pick(16, 1)
    ready = mm.quantize(x, recipe_named(BASE).acts.name)
    assert same_bits(auto(ready, *routing), wanted)
    with pytest.raises(mm.MegaMoEError, match="these come quantised"):
        one(ready, *routing)
    batches = [base().pick(16, seed) for seed in range(12)]
    streams = [torch.cuda.Stream() for _ in range(3)]
    got = []
    for stream in streams:
        stream.wait_stream(torch.cuda.current_stream())
    for step, (inputs, _) in enumerate(batches):
        with torch.cuda.stream(streams[step % 3]):
            got.append(one(*inputs))
            got.append(mm.moe(*inputs, base().weights, backend="hopper", mode="fused"))
    torch.cuda.synchronize()
    for step, y in enumerate(got):
        assert same_bits(y, batches[step // 2][1]), step
    one.check()


@pytest.mark.parametrize("part", [2, 4])
def test_a_ring_of_some_of_the_rows_has_the_bits_of_all(part):
    status, tile, most = DeviceStatus(CUDA), as_fused(tiles_of(BASE)[0]), num_rows(64 * K, E)
    assert ring(most, most // part, tile.block_m)[1] > 0
    for seed in range(40):
        inputs, wanted = base().pick(64, seed)
        crowd = base()
        y = pretending.fuse(
            inputs, crowd.weights, crowd.options, status, tile, pool_rows=most // part
        )
        status.check(K)
        assert same_bits(y, wanted), seed


RANKS = [
    (30,), (16, 3), (0, 16), (16, 0, 5, 1), (0, 0, 16, 0), (8, 0, 3, 1, 0, 8, 2, 5),
]  # fmt: skip


@pytest.mark.parametrize("num_ranks", [1, 2, 4, 8])
def test_ranks_of_one_launch_have_the_bits_of_one_rank(num_ranks):
    ranks = LocalRanks(base().weights, num_ranks)
    total = torch.zeros(E, dtype=torch.int64, device=CUDA)
    for counts in (c for c in RANKS if len(c) == num_ranks):
        for seed in range(5):
            inputs, wanted = base().pick(sum(counts), seed)
            got = ranks(*(t.split(counts) for t in inputs))
            ranks.check()
            assert [len(y) for y in got] == list(counts)
            assert same_bits(torch.cat(got), wanted), (counts, seed)
            total += expert_counts(inputs[1], E)
    assert torch.equal(ranks.stats, total)


def test_a_rank_that_never_arrives_is_reported_and_forgotten_by_reset(monkeypatch):
    ranks = LocalRanks(base().weights, 2, timeout_s=2.5)
    inputs, wanted = base().pick(19, 2)
    parts = [t.split((16, 3)) for t in inputs]
    with monkeypatch.context() as patch:
        patch.setattr(arguments, "World", functools.partial(arguments.World, absent=1))
        ranks(*parts)
    with pytest.raises(MegaMoETimeout, match="for rank 1 to end the call"):
        ranks.check()
    ranks.reset()
    assert same_bits(torch.cat(ranks(*parts)), wanted)
    ranks.check()


# -- graphs, compiled models ---------------------------------------------------------------------


def test_1000_replays_with_changing_routing_and_token_counts():
    one = layer(cuda_graphs=True)
    batches = [base().pick(num, num) for num in range(5, 17)]
    counts = [expert_counts(inputs[1], E) for inputs, _ in batches]
    wrong = torch.zeros((), dtype=torch.int64, device=CUDA)
    total = torch.zeros(E, dtype=torch.int64, device=CUDA)
    for step in range(1000):
        at = step * 7 % len(batches)
        inputs, wanted = batches[at]
        y = one(*inputs, copy=step % 2 == 0)
        wrong += (y.view(torch.int16) != wanted.view(torch.int16)).any()
        total += counts[at]
        if step % 100 == 0:
            torch.cuda.synchronize()
    assert int(wrong) == 0 and sorted(one._graphs._captured) == [8, 16]
    assert torch.equal(one.stats, total)
    one.check()


def test_a_capture_of_somebody_else_holds_the_fused_launch():
    one = layer()
    held, _ = base().pick(16, 0)
    one(*held)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = one(*held)
    for seed in range(3):
        inputs, wanted = base().pick(16, seed)
        for buffer, new in zip(held, inputs, strict=True):
            buffer.copy_(new)
        graph.replay()
        assert same_bits(y, wanted)
    one.check()


def test_a_compiled_layer_has_the_bits_of_eager_calls():
    torch.compiler.reset()
    one = layer()
    compiled = torch.compile(one, fullgraph=True)
    with torch.no_grad():
        for seed in range(3):
            inputs, wanted = base().pick(16, seed)
            assert same_bits(compiled(*inputs), wanted)
    one.check()
    assert int(one.stats.sum()) > 0 and not one._status.counters.any()


# -- faults --------------------------------------------------------------------------------------

SOON = 0.5  # seconds


def test_a_layer_is_refused_after_a_timeout_until_reset():
    one = layer(timeout_s=SOON)
    inputs, wanted = base().pick(16, 1)
    status = one._status
    pretending.fuse(
        inputs, one.weights, one.options, status, stats=one.stats, timeout_s=SOON, absent=0
    )
    status.copy_to_host_async(K)
    torch.cuda.synchronize()
    for call in (lambda: one(*inputs), one.check, lambda: one(*inputs)):
        with pytest.raises(MegaMoETimeout, match=r"the end of all ranks.*layer.reset\(\)") as seen:
            call()
        assert seen.value.rank == 0 and seen.value.expected > seen.value.seen == 0
    one.reset()
    for _ in range(3):
        assert same_bits(one(*inputs), wanted)
    one.check()


@pytest.mark.parametrize("value", [-1_000_003, 1_000_003])
@pytest.mark.parametrize("word", WAITS)
def test_a_poisoned_counter_is_reported_by_who_waits_for_it(word, value):
    """As in every interleaving on a CPU (`tests/proof/test_faults.py`). EXIT's goes unnoticed in
    its own call, whose result is right; what that leaves uncleaned, the next call meets. TICKET is
    read by who has done its static tickets alone: by some of few CTAs."""
    few = hardware_of(CUDA).num_sms - 8 if word == "TICKET" else 0
    one = layer(timeout_s=SOON, reserve_sms=few)
    inputs, wanted = base().pick(16, 4, [0])
    assert same_bits(one(*inputs), wanted)
    one._status.counters[getattr(sync, word).value] = value
    if word == "EXIT":
        assert same_bits(one(*inputs), wanted)
        one.check()
        with contextlib.suppress(MegaMoETimeout):
            one(*inputs)
            one.check()
    else:
        one(*inputs)
        with pytest.raises(MegaMoETimeout) as reported:
            one.check()
        names = [BARRIERS[wait].partition("{")[0] for wait in WAITS[word]]
        assert any(name in reported.value.barrier for name in names)
    one.reset()
    for _ in range(3):
        assert same_bits(one(*inputs), wanted)
    one.check()


def test_sms_held_by_another_stream_only_delay():
    from tests.kernels.holding import hold

    one = layer()
    inputs, wanted = base().pick(16, 6)
    assert same_bits(one(*inputs), wanted)
    hold(1, 0.0)  # compiled
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        hold(64, 2.0)
    got = [one(*inputs) for _ in range(3)]
    torch.cuda.synchronize()
    assert all(same_bits(y, wanted) for y in got)
    one.check()

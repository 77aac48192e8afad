"""The Hopper kernels as they stand, on a CPU: what they compute, and how their roles synchronise.

`emulator` runs every role of every CTA as a thread. What only a GPU shows (layouts, fences, races,
spills, time) is left to the tests marked `gpu` and to the compiler.
"""

import functools
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import megamoe as mm
from megamoe.engine import backends, fused, planning, symm_buffer
from megamoe.engine.local import LocalRanks
from megamoe.engine.status import NONE, DeviceStatus
from megamoe.errors import MegaMoETimeout, RankError
from megamoe.kernels.gluon.mega import arguments, inbox, quantise, sync
from megamoe.kernels.hopper.mega import launch as mega_launch
from megamoe.planner import hopper as planner_hopper
from megamoe.planner.fused import ring
from megamoe.planner.hopper import as_fused, num_rows
from megamoe.planner.launches import Gemm
from megamoe.planner.numerics import HOPPER_RECIPES as RECIPES
from megamoe.planner.tables import hopper as tables
from megamoe.problem import Options
from megamoe.routing.permute import expert_counts
from megamoe.routing.samplers import sample_routing
from tests import emulator, pretending
from tests.emulator import language, running
from tests.emulator.values import Value
from tests.kernels.hopper import shipped, shipped_fused, tile_name
from tests.kernels.support import INTERPRETED, error, tolerance
from tests.pretending import plan_of

pytestmark = pytest.mark.skipif(INTERPRETED, reason="Triton's interpreter knows no Gluon")

CPU = torch.device("cpu")
E, H, I, K = 4, 320, 160, 2  # widths that are no multiples of 128
LATER = 3.0  # seconds after which a wait that nobody ends is given up


@pytest.fixture(autouse=True)
def kernels(monkeypatch):
    return emulator.install(monkeypatch)


@pytest.mark.parametrize("exponent", [0, 100, -60, -110, -126, -133])
def test_tokens_are_divided_by_their_scale_as_by_a_division(exponent):
    """All mantissas of a BF16 value and of its group's amax, subnormal ones too."""
    amax = torch.arange(128, 256) * 2.0**exponent
    parts = torch.tensor([2.0**-shift for shift in range(21)])
    x = (torch.arange(128, 256)[:, None] * parts).flatten() * 2.0**exponent
    step = amax / torch.tensor(448.0)
    x = x.bfloat16().float().expand(len(amax), -1)
    got = running.translated(quantise._exact_ratio)(Value(x), Value(step)).t
    inside = x <= amax[:, None]
    assert inside.sum() > 300_000
    assert torch.equal(got[inside], (x / step[:, None])[inside])


def weights_of(recipe, num=E, has_bias=False, hidden=H, intermediate=I):
    rng = torch.Generator().manual_seed(0)

    def normal(*shape):
        return torch.randn(shape, generator=rng)

    w13 = (normal(num, 2 * intermediate, hidden) / hidden**0.5).bfloat16()
    w2 = (normal(num, hidden, intermediate) / intermediate**0.5).bfloat16()
    bias = {"b13": normal(num, 2 * intermediate) / 4, "b2": normal(num, hidden) / 4}
    return mm.ExpertWeights.quantize(w13, w2, recipe, **(bias if has_bias else {}))


def tokens(num, num_experts=E, seed=0, hidden=H, **routing):
    x = torch.randn(num, hidden, generator=torch.Generator().manual_seed(seed)).bfloat16()
    return x, *sample_routing(num, num_experts, K, seed=seed, **routing)


def fuse(inputs, w, options=None, status=None, tile=None, **rest):
    """One fused call, checked for faults; and the tokens that each expert got."""
    status = status or DeviceStatus(CPU)
    stats = torch.zeros(w.num_experts, dtype=torch.int64)
    y = pretending.fuse(inputs, w, options, status, tile, stats=stats, **rest)
    status.check(K)
    return y, stats


def stage(inputs, w, tile=None, options=None):
    status = DeviceStatus(CPU)
    y = pretending.staged(inputs, w, options, tile=tile, status=status)
    assert int(status.bad_slot) == NONE
    return y


def assert_agrees(y, inputs, w, **options):
    wanted = mm.moe(*inputs, w, backend="reference", **options)
    assert y.shape == wanted.shape and error(y, wanted) <= tolerance(w.recipe)


def loads(*counts):
    """Routing that gives each expert so many rows, in any order; what is left is masked."""
    slots = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))
    slots = torch.cat((slots, slots.new_full((len(slots) % K,), -1)))
    slots = slots[torch.randperm(len(slots), generator=torch.Generator().manual_seed(0))]
    x, _, gates = tokens(len(slots) // K)
    return x, slots.view(-1, K), gates


# -- staged --------------------------------------------------------------------------------------

TILED = [
    pytest.param(recipe, tile, id=f"{recipe}-{tile_name(tile)}")
    for recipe in RECIPES
    for tile in shipped(recipe)
]


@pytest.mark.parametrize(("recipe", "tile"), TILED)
def test_every_tile_takes_experts_with_no_one_almost_a_tile_and_more_rows(recipe, tile):
    inputs = loads(0, 1, tile.block_m + 1, tile.block_m // 2)
    w = weights_of(recipe)
    assert_agrees(stage(inputs, w, tile), inputs, w)


@pytest.mark.parametrize("schedule", ["static", "dynamic"])
def test_no_expert_has_a_row_though_a_quotient_is_then_anything(schedule):
    w, (x, idx, gates) = weights_of("w8a8"), tokens(6)
    y = stage((x, torch.full_like(idx, -1), gates), w, Gemm(3, schedule=schedule))
    assert not y.any()


@pytest.mark.parametrize("recipe", ["w4a8_block", "w8a8"])
def test_all_tiles_have_the_same_bits(recipe):
    w, inputs = weights_of(recipe, 3, True, 512, 256), tokens(72, 3, hidden=512, skew="zipf")
    first, *others = [stage(inputs, w, tile) for tile in shipped(recipe)[2:]]
    assert len(others) > 2 and all(torch.equal(first, other) for other in others)
    assert_agrees(first, inputs, w)


def test_quantised_tokens_have_the_bits_of_those_that_are_quantised_here():
    w, inputs = weights_of("w8a8"), tokens(9)
    ready = mm.quantize(inputs[0], "fp8_1x128"), *inputs[1:]
    assert torch.equal(stage(ready, w), stage(inputs, w))


@pytest.mark.parametrize("recipe", ["w4a8_block", "w8a8", "nvfp4"])
def test_rows_are_the_same_however_they_are_found(recipe, monkeypatch):
    """By every program, by a launch before, or counted by two more; every access is in bounds."""
    w, inputs = weights_of(recipe), tokens(50, masked_ratio=0.2, skew="zipf")
    results = []
    for small, middle in ((1024, 4096), (32, 4096), (32, 64)):
        monkeypatch.setattr(tables, "SMALL_SLOTS", small)
        monkeypatch.setattr(tables, "MIDDLE_SLOTS", middle)
        results += [stage(inputs, w, tile) for tile in (shipped(recipe)[1], shipped(recipe)[-1])]
    assert all(torch.equal(results[0], y) for y in results)


# -- fused ---------------------------------------------------------------------------------------

# recipe: (options, whether experts have biases, ids)
HOW = {
    "w4a8_block": ({}, False, torch.int64),
    "w8a8": ({"weight_at": "combine"}, True, torch.int32),
    "bf16": ({"activation": "gpt_oss"}, True, torch.int32),
    "w4a16": ({"activation": "gpt_oss", "weight_at": "combine"}, True, torch.int64),
    "w4a8": ({"clamp": 0.5}, False, torch.int32),
    "nvfp4": ({}, True, torch.int64),
    "w4a4": ({"weight_at": "combine"}, False, torch.int64),
}


@pytest.mark.parametrize("recipe", HOW)
def test_a_fused_call_is_the_layer_and_has_the_bits_of_staged(recipe, kernels):
    options, has_bias, ids = HOW[recipe]
    w = weights_of(recipe, has_bias=has_bias)
    x, idx, gates = tokens(11, masked_ratio=0.2)
    idx[3] = idx[3, 0]  # the same expert twice
    inputs = x, idx.to(ids), gates
    y, stats = fuse(inputs, w, Options(**options))
    assert kernels["mega_kernel"].launches == 1 and kernels["gemm_swap_ab_kernel"].launches == 0
    assert_agrees(y, inputs, w, **options)
    assert torch.equal(stats, expert_counts(idx, E))
    assert torch.equal(y, stage(inputs, w, options=Options(**options)))


@pytest.mark.parametrize("hidden", [H, 1152])
def test_fp8_rows_are_combined_as_in_staged(hidden):
    w = weights_of("w8a8", hidden=hidden)
    x, idx, gates = tokens(6, hidden=hidden, masked_ratio=0.2)
    x[2] = 0.0
    options = Options(combine="fp8")
    y, _ = fuse((x, idx, gates), w, options)
    assert torch.equal(y, stage((x, idx, gates), w, options=options))
    assert error(y, mm.moe(x, idx, gates, w, backend="reference", combine="fp8")) <= tolerance(
        "w8a8", "fp8"
    )
    assert not torch.equal(y, fuse((x, idx, gates), w)[0])


@pytest.mark.parametrize("tile", shipped_fused("w4a8_block"), ids=tile_name)
def test_a_fused_tile_takes_experts_in_several_passes(tile):
    w, inputs = weights_of("w4a8_block"), loads(0, tile.block_m + 3, 2 * tile.block_m, 1)
    y, _ = fuse(inputs, w, tile=as_fused(tile))
    assert_agrees(y, inputs, w)


def test_rows_behind_the_count_are_padding_whatever_they_hold():
    w, (x, idx, gates) = weights_of("w4a8_block"), tokens(9)
    x[4:], idx[5:], gates[6:] = float("nan"), 77, float("inf")
    status = DeviceStatus(CPU)
    y, stats = fuse(
        (x, idx, gates), w, status=status, num_valid=torch.tensor([4], dtype=torch.int32)
    )
    assert torch.equal(y[:4], fuse((x[:4], idx[:4], gates[:4]), w)[0]) and int(stats.sum()) == 8


def test_counters_serve_call_after_call_and_a_bad_slot_is_masked():
    w, status = weights_of("w4a8_block"), DeviceStatus(CPU)
    for seed in range(3):
        inputs = tokens(3 + seed, seed=seed, skew="zipf")
        y, _ = fuse(inputs, w, status=status)
        assert not status.counters.any()
        assert_agrees(y, inputs, w)
    x, idx, gates = tokens(5)
    idx[2, 1] = E
    with pytest.raises(mm.MegaMoEError, match="token 2, slot 1"):
        fuse((x, idx, gates), w, status=status)


@pytest.mark.parametrize("counts", [(5,), (0, 6), (2, 0, 1, 3)])
def test_ranks_of_one_launch_have_the_bits_of_one_rank(counts, monkeypatch):
    monkeypatch.setattr(backends, "resolve", lambda *wanted: None)
    kernels = emulator.install(monkeypatch, num_sms=4)
    w, inputs = weights_of("w4a8_block"), tokens(sum(counts), masked_ratio=0.2)
    ranks = LocalRanks(w, len(counts), timeout_s=30.0)
    ranks._top_k = K
    ranks._make_buffers(max(counts))
    kernels["mega_kernel"].hold = [buffer.tokens for buffer in ranks._buffers]
    for _ in range(2):
        got = ranks(*(t.split(counts) for t in inputs))
        ranks.check()
        assert torch.equal(torch.cat(got), fuse(inputs, w)[0])
    assert torch.equal(ranks.stats, 2 * expert_counts(inputs[1], E))


def test_an_absent_rank_of_one_launch_is_reported_and_forgotten_by_reset(monkeypatch):
    """As in `tests/engine/test_fused_gpu.py`: the patch must reach the launch."""
    monkeypatch.setattr(backends, "resolve", lambda *wanted: None)
    kernels = emulator.install(monkeypatch, num_sms=2)
    w, inputs = weights_of("w4a8_block"), tokens(6)
    parts, ranks = [t.split((4, 2)) for t in inputs], LocalRanks(w, 2, timeout_s=1.0)
    make = ranks._make_buffers

    def reached_by_address(num_tokens):
        make(num_tokens)
        kernels["mega_kernel"].hold = [buffer.tokens for buffer in ranks._buffers]

    monkeypatch.setattr(ranks, "_make_buffers", reached_by_address)
    with monkeypatch.context() as patch:
        patch.setattr(arguments, "World", functools.partial(arguments.World, absent=1))
        ranks(*parts)
    with pytest.raises(MegaMoETimeout, match="for rank 1 to end the call"):
        ranks.check()
    ranks.reset()
    assert torch.equal(torch.cat(ranks(*parts)), fuse(inputs, w)[0])
    ranks.check()


@pytest.mark.parametrize(("num_sms", "part"), [
    (1, 2), pytest.param(3, 4, marks=pytest.mark.every),
])  # fmt: skip
def test_a_ring_of_some_of_the_rows_has_the_bits_of_all(num_sms, part, monkeypatch):
    emulator.install(monkeypatch, num_sms)
    w, inputs, status = weights_of("w4a8_block", 6), tokens(40, 6, skew="zipf"), DeviceStatus(CPU)
    tile, rows = as_fused(shipped_fused("w4a8_block")[0]), num_rows(80, 6) // part
    wanted, stats = fuse(inputs, w, tile=tile)
    assert ring(num_rows(80, 6), rows, 8)[1] > 0
    y, again = fuse(inputs, w, tile=tile, status=status, pool_rows=rows)
    assert torch.equal(y, wanted) and torch.equal(again, stats) and not status.counters.any()


def replaced_passes(call, passes):
    """The exchange of such a call, in so many launches."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(planner_hopper, "passes_of", lambda call: (passes, call.max_tokens))
        return planner_hopper.exchange_of(call)


class Processes:
    """Ranks as launches of their own, at the same time."""

    def __init__(self, kernels, w, num_ranks, most, timeout_s=30.0, passes=1):
        ranks = planning.Ranks(num_ranks, w.num_experts, max_tokens=most)
        some = tokens(most, w.num_experts)
        part = w[: w.num_experts // num_ranks]
        plan = plan_of(some, part, mode="fused", reserve_sms=2, ranks=ranks)
        assert plan.num_passes == 1
        self.step = plan.mega
        where = replaced_passes(plan.call, passes)
        self.memory = [torch.zeros(where.num_bytes, dtype=torch.uint8) for _ in range(num_ranks)]
        self.buffers = [symm_buffer.symm_buffer_in(m, where) for m in self.memory]
        self.status = [DeviceStatus(CPU) for _ in range(num_ranks)]
        self.num, self.most, self.timeout_s = num_ranks, most, timeout_s
        kernels["mega_kernel"].hold = self.memory
        per_rank = w.num_experts // num_ranks
        self.weights = [w[r * per_rank : (r + 1) * per_rank] for r in range(num_ranks)]
        self.bounds = [most] * num_ranks  # that each rank plans a call for

    def launch(self, rank, part, number=0):
        w, buffer, status = self.weights[rank], self.buffers[rank], self.status[rank]
        buffer.put(*part)
        peers = torch.tensor([m.data_ptr() - self.memory[rank].data_ptr() for m in self.memory])
        world = mega_launch.World(self.num, 1, rank, peers, buffer.signals, buffer.inbox)
        stats = torch.zeros(w.num_experts, dtype=torch.int64)
        y = fused.over(
            buffer, self.bounds[rank], w, Options(), world, stats, step=self.step, status=status,
            timeout_s=self.timeout_s, number=number,
        )  # fmt: skip
        left = len(part[0]) - number * self.most
        return y[: max(left, 0)], stats

    def call(self, parts, number=0):
        with ThreadPoolExecutor(self.num) as pool:
            return list(pool.map(self.launch, range(self.num), parts, [number] * self.num))


def test_launches_of_their_own_have_the_bits_of_one_rank(kernels):
    w = weights_of("w4a8_block")
    ranks = Processes(kernels, w, 2, 5)
    for step, counts in enumerate([(5, 3), (0, 4), (2, 0), (5, 5)]):
        inputs = tokens(sum(counts), seed=step, masked_ratio=0.2)
        got = ranks.call(list(zip(*(t.split(counts) for t in inputs), strict=True)))
        for status, buffer in zip(ranks.status, ranks.buffers, strict=True):
            status.check(K)
            assert not buffer.counters.any() and int(buffer.signals[31]) == step + 1
        assert torch.equal(torch.cat([y for y, _ in got]), fuse(inputs, w)[0])
        assert torch.equal(torch.cat([stats for _, stats in got]), expert_counts(inputs[1], E))


def test_a_call_in_two_launches_has_the_bits_of_one_and_names_a_bad_slot(kernels):
    w, (x, idx, gates) = weights_of("w4a8_block"), tokens(7, masked_ratio=0.2)
    idx[3, 1] = E  # the last token of rank 0: of the second launch
    ranks = Processes(kernels, w, 2, 3, passes=2)
    parts = list(zip(*(t.split((4, 3)) for t in (x, idx, gates)), strict=True))
    got = [ranks.call(parts, number) for number in range(2)]
    idx[3, 1] = -1
    y = torch.cat([got[number][rank][0] for rank in range(2) for number in range(2)])
    assert torch.equal(y, fuse((x, idx, gates), w)[0])
    assert ranks.status[0].bad_slot.item() == 3 * K + 1 and ranks.status[1].bad_slot.item() == NONE


def test_calls_follow_the_bound_that_all_ranks_pass_and_name_who_passes_another(kernels):
    w = weights_of("w4a8_block")
    ranks = Processes(kernels, w, 2, 5)
    for bound, counts in ((2, (2, 1)), (5, (0, 5)), (3, (3, 2))):
        ranks.bounds = [bound] * 2
        inputs = tokens(sum(counts), seed=bound, masked_ratio=0.2)
        got = ranks.call(list(zip(*(t.split(counts) for t in inputs), strict=True)))
        for status in ranks.status:
            status.check(K)
        assert torch.equal(torch.cat([y for y, _ in got]), fuse(inputs, w)[0])
    ranks = Processes(kernels, w, 2, 5, timeout_s=3600.0)
    ranks.bounds = [2, 5]
    ranks.call(list(zip(*(t.split((2, 2)) for t in tokens(4)), strict=True)))
    assert not any(buffer.rows.any() for buffer in ranks.buffers)
    for rank, own in enumerate(ranks.bounds):
        text = f"same max_tokens.*got {own} on rank {rank}, {ranks.bounds[1 - rank]} on rank"
        with pytest.raises(RankError, match=text):
            ranks.status[rank].check(K)


def test_a_launch_whose_peer_does_not_come_reports_it_and_signals_no_rank_that_it_is_done(kernels):
    w, inputs = weights_of("w4a8_block"), tokens(3)
    ranks = Processes(kernels, w, 2, 5, timeout_s=LATER)
    ranks.launch(1, inputs)
    with pytest.raises(MegaMoETimeout, match="rank 1 waited too long for rank 0 to begin the call"):
        ranks.status[1].check(K)
    assert not ranks.buffers[0].counters.any() and ranks.buffers[0].signals.tolist()[:2] == [0, 1]
    assert not ranks.buffers[0].rows.any() and not ranks.buffers[0].signals[2:].any()


def test_a_peer_that_gave_up_is_named_at_once_and_a_later_number_is_no_fault(kernels):
    w, inputs = weights_of("w4a8_block"), tokens(3)
    for begun, ended, is_late in ((1, sync.TIMED_OUT.value, True), (7, 7, False)):
        ranks = Processes(kernels, w, 2, 5, timeout_s=30.0)  # nobody waits so long
        signals = ranks.buffers[1].signals
        signals[sync.BEGUN.value], signals[sync.ENDED.value] = begun, ended
        ranks.buffers[1].inbox_counts[0, -4 + inbox.LIMIT_WORD.value] = 5
        ranks.launch(1, inputs)
        if is_late:
            with pytest.raises(MegaMoETimeout, match="rank 0, which gave the call up"):
                ranks.status[1].check(K)
        else:
            ranks.status[1].check(K)
        assert ranks.buffers[0].signals.tolist()[:16] == [0, 1] + [0] * 7 + [1] + [0] * 6


def test_owners_and_sources_touch_only_the_tokens_that_there_are(kernels):
    """Padding, NaN here, is neither read nor pushed; a source says how many tokens it has."""
    w, (x, idx, gates) = weights_of("w4a8_block"), tokens(3)
    ranks = Processes(kernels, w, 2, 5)
    for buffer in ranks.buffers:
        buffer.tokens.fill_(float("nan"))
        buffer.inbox_tokens.fill_(0xFF)
    parts = [(x, idx, gates), (x[:0], idx[:0], gates[:0])]
    got = ranks.call(parts)
    assert torch.equal(got[0][0], fuse((x, idx, gates), w)[0])
    for buffer in ranks.buffers:
        assert buffer.inbox_counts[:, 32].tolist() == [3, 0]
        untouched = buffer.inbox_tokens[0, 3:], buffer.inbox_tokens[1]
        assert all(bool((t == 0xFF).all()) for t in untouched)


# -- faults --------------------------------------------------------------------------------------


def test_a_rank_that_never_arrives_ends_in_a_timeout_and_reset_helps():
    w, inputs, status = weights_of("w4a8_block"), tokens(5), DeviceStatus(CPU)
    with pytest.raises(MegaMoETimeout, match="the end of all ranks"):
        fuse(inputs, w, status=status, timeout_s=LATER, absent=0)
    status.reset()
    assert_agrees(fuse(inputs, w, status=status)[0], inputs, w)


# -- the emulator itself -------------------------------------------------------------------------


def test_the_emulator_sees_what_it_must(kernels, monkeypatch):
    """Rows that no allocation holds, a wait that nobody ends, bytes that do not add up."""
    w, inputs, status = weights_of("w8a8"), tokens(5), DeviceStatus(CPU)
    with pytest.raises(IndexError, match="no allocation holds 8 bytes"):
        short = torch.zeros(E - 1, dtype=torch.int64)
        pretending.fuse(inputs, w, status=status, stats=short)
    monkeypatch.setattr(running, "WAIT_S", LATER)
    arrive, expect = language.arrive, language.expect
    for name, planted, seen in (
        ("arrive", lambda barrier, count=1: None, running.Stuck),
        ("arrive", lambda barrier, count=1: arrive(barrier, 2), AssertionError),
        ("expect", lambda barrier, size: expect(barrier, size + 16), running.Stuck),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(running.REPLACED[language.hopper.mbarrier], name, planted)
            with pytest.raises(seen):
                fuse(inputs, w)

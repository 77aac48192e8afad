"""The protocol under many interleavings: every rule holds, and an abort drains."""

from random import Random

import pytest

from megamoe.errors import RangeError
from megamoe.studies.deep_gemm.explore import CASES, POLICIES, explore, explore_many
from megamoe.studies.deep_gemm.explore.case import FAULTS, random_case
from megamoe.studies.deep_gemm.explore.run import DRAINS
from megamoe.studies.deep_gemm.explore.symbolic import Symbolic
from megamoe.studies.deep_gemm.protocol.ops import WAITS
from megamoe.studies.deep_gemm.protocol.words import words
from megamoe.studies.deep_gemm.protocol.world import World

RUNS = 300  # interleavings of two ranks with four SMs each, two calls


def test_two_ranks_of_four_sms_keep_every_rule():
    case = CASES["two ranks"]
    assert (case.shape.num_ranks, case.shape.num_sms, len(case.calls)) == (2, 4, 2)
    report = explore_many(case, RUNS)
    assert report.ok, report.found
    assert report.num_runs == RUNS


@pytest.mark.parametrize("name", [name for name in CASES if name != "two ranks"])
def test_every_case_keeps_every_rule(name):
    report = explore_many(CASES[name], 3 * len(POLICIES))
    assert report.ok, report.found


def test_random_layers_keep_every_rule():
    names = tuple(POLICIES)
    for seed in range(60):
        some = [names[(seed + i) % len(names)] for i in range(3)]
        report = explore_many(random_case(seed), 3, first_seed=seed, policies=some)
        assert report.ok, report.found


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("stores", DRAINS)
def test_a_run_can_be_repeated_from_its_seed(policy, stores):
    case = CASES["planted timeout"]
    assert explore(case, 7, policy, stores=stores) == explore(case, 7, policy, stores=stores)
    bug = {"mutations": ["mask_wrong_bit"], "stores": stores}
    first = explore(CASES["two ranks"], 7, policy, **bug)
    assert not first.ok and first == explore(CASES["two ranks"], 7, policy, **bug)


def test_policies_and_seeds_give_different_runs():
    steps = {explore(CASES["two ranks"], seed, p).num_steps for seed in (0, 1) for p in POLICIES}
    assert len(steps) > len(POLICIES)


def test_a_deadlock_says_who_waits_for_what():
    found = explore(CASES["two ranks"], mutations=["mask_wrong_bit"])
    assert found.violation == "deadlock"
    masks = [w for w in found.waiting if w.what == "mask"]
    assert masks and all(w.role == "load_tokens" and w.expected == 0b11 for w in masks)
    assert any(w.seen == 0b110 for w in masks)
    assert any(w.what == "stage full" and w.role == "math" for w in found.waiting)
    assert "l2_arrival_mask[" in str(found) and "expected 0x3, seen 0x6" in str(found)


def test_the_words_lie_where_the_workspace_puts_them():
    found = words(CASES["66 blocks in a mask"].shape)
    assert found.mask_words == 2
    for region in found.layout.section("control"):
        last = tuple(n - 1 for n in region.shape)
        size = region.num_bytes // region.item_bytes
        assert 4 * found.at(region.name, 0) == region.offset
        assert 4 * found.at(region.name, 0, size - 1) == region.at(*last)
        assert found.name(found.at(region.name, 1, size - 1)) == f"rank 1 {region.name}[{size - 1}]"
    cells = [cell for name in found.arrays for cell in found.cells_of(name, 0)]
    assert len(cells) == len(set(cells)) and max(cells) < found.num_cells


def run_to_the_end(case, calls):
    world = World(case.shape, Symbolic(case), rng=Random(0))
    world.queue(calls)
    world.machine.run(POLICIES["uniform"](Random(1), case.shape))
    assert not world.machine.live
    return world


def test_barriers_and_syncs_carry_their_phase_from_call_to_call():
    case = CASES["five calls"]
    for num in range(1, 6):
        world = run_to_the_end(case, case.calls[:num])
        for rank in range(2):
            assert world.read("barrier_counter", rank) == [3 * num]
            # per word: up to the number of ranks, two barriers later down to zero
            done = [(3 * num + 1) // 2, 3 * num // 2]
            assert world.read("barrier_signal", rank) == [2 * (uses % 2) for uses in done]
            # dispatch meets three times a call, the epilogue twice; SM counts never remain
            flips = [3 * num % 2, 2 * num % 2, 0, 0]
            assert world.read("grid_sync", rank) == [0x80000000 * flip for flip in flips]


def test_counts_travel_in_packed_halves():
    case = CASES["same expert twice"]  # all slots go to expert 0: 3 and 2 tokens, top-2
    world = World(case.shape, Symbolic(case), rng=Random(0))
    world.queue(case.calls[:1])
    choose = POLICIES["uniform"](Random(1), case.shape)
    seen = {"expert_send_count": set(), "expert_recv_count": set(), "expert_recv_count_sum": set()}
    while world.machine.live:
        world.machine.run(choose, world.machine.time + 1)
        for name, values in seen.items():
            values.add(world.read(name, 0)[0])
    assert max(seen["expert_send_count"]) == 4 << 32 | 6  # four SMs, six rows
    assert max(seen["expert_recv_count"]) == 6
    assert max(seen["expert_recv_count_sum"]) == 8 << 32 | 10  # both ranks, all rows
    assert all(min(values) == 0 for values in seen.values())


@pytest.mark.parametrize("fault", FAULTS)
def test_an_abort_drains_every_role_and_a_reset_heals(fault):
    case = next(case for case in CASES.values() if case.fault == fault)
    report = explore_many(case, 50, first_seed=1000)
    assert report.ok, report.found


def test_a_timeout_leaves_its_record_and_raises_the_flag_everywhere():
    case = CASES["two ranks"]
    world = World(case.shape, Symbolic(case), rng=Random(0))
    world.queue(case.calls[:1], absent=(1, 2, "pull_tokens"))
    choose = POLICIES["uniform"](Random(1), case.shape)
    world.machine.run(choose)
    late = next(a for a in world.waiters() if (a.rank, a.sm, a.role) == (0, 0, "pull_tokens"))
    assert not world.aborted
    world.time_out(late)
    world.machine.run(choose)
    assert [world.read("abort_flag", rank) for rank in range(2)] == [[1], [1]]
    is_set, rank, sm, what, tag, expected, seen, _ = world.read("timeout_record", 0)
    assert (is_set, rank, sm, WAITS[what], tag) == (1, 0, 0, "rank barrier", 1)
    assert (expected, seen) == (2, 1)  # one of two ranks came
    assert not world.waiters()


@pytest.mark.parametrize(
    "bad", [{"policy": "fair"}, {"mutations": ["none"]}, {"stores": "never"}], ids=str
)
def test_unknown_names_are_refused(bad):
    with pytest.raises(RangeError, match="must be one of"):
        explore(CASES["one rank"], **bad)

"""The memory model and the scheduler themselves, by small programs whose outcome PTX fixes."""

import functools
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from tests.emulator import arrays, device, policies, scheduler
from tests.emulator.arrays import Pointer, Value
from tests.emulator.exploring import Found, explore
from tests.emulator.memory_model import Violation
from tests.emulator.scheduler import Scheduler

WAIT = """ld.{sem}.{scope}.global.u32 $0, [$1]; setp.eq.s32 p, $0, $2; again: {fence}"""


class Program:
    """Roles as Python functions, on GPUs, over some words of memory and some shared memory."""

    name = "program"

    def __init__(self, *roles, gpus=None, ctas=None):
        self.roles, self.gpus = roles, gpus or [0] * len(roles)
        self.ctas = ctas or [f"CTA {i}" for i in range(len(roles))]

    def run(self, policy, log=None):
        self.memory = torch.zeros(64, dtype=torch.int32)
        it = Scheduler(policy)
        it.log = log
        it.memory.hold(*device._bytes_of(self.memory), "words")
        self.scheduler = it

        def host():
            _, me = device._now()
            launch = SimpleNamespace(grid=(1,), before=None)
            self.shared()
            for i, act in enumerate(self.roles):
                it.add(
                    functools.partial(act, self), f"role {i}", kind=f"role {i}", cta=self.ctas[i],
                    launch=launch, gpu=self.gpus[i], num_warps=4, parent=me.clocks,
                )  # fmt: skip

        it.run(host)
        return it

    def shared(self):
        self.full, self.empty = (
            device.Barrier(n, self.scheduler.agents) for n in ("full", "empty")
        )
        for barrier in (self.full, self.empty):
            device.init(barrier, 1)
        self.stage = device.allocate_shared_memory(arrays.I32, [1, 32], None)

    def at(self, i):
        return Pointer(self.memory.data_ptr() + 4 * i, arrays.I32)

    def block(self):
        tensor = SimpleNamespace(
            base=self.memory, shape=[32], strides=[1], block_shape=[32], layout=None
        )
        return device.Descriptor(tensor)


def wait_for(program, i, value, sem="acquire", scope="gpu", fence="fence.proxy.async.global;"):
    text = WAIT.format(sem=sem, scope=scope, fence=fence)
    address = Value(program.at(i).address)
    device.inline_asm_elementwise(
        text, "", [address, Value(value), Value(program.at(63).address), Value(1)], None, False, 1
    )


def fails(program, seeds=24):
    """The message of the violation that some interleaving shows, or ''."""
    for seed in range(seeds):
        try:
            program.run(policies.policy_of(seed))
        except Violation as error:
            return str(error)
    return ""


def publish(program, sem="release", scope="gpu", has_barrier=True):
    lanes = np.arange(32)
    device.store(program.at(0) + Value(lanes), Value(lanes.astype(np.int32)))
    if has_barrier:
        device.thread_barrier()
    device._atomic(lambda old, value: old + value)(program.at(40), 1, sem=sem, scope=scope)


def read(program, **how):
    wait_for(program, 40, 1, **how)
    assert int(device.load(program.at(5))) == 5


@pytest.mark.parametrize(
    ("sender", "reader", "gpus", "seen"),
    [
        ({}, {}, (0, 0), ""),
        ({"sem": "relaxed"}, {}, (0, 0), "not ordered after role 0"),
        ({}, {"sem": "relaxed"}, (0, 0), "not ordered after role 0"),
        ({"has_barrier": False}, {}, (0, 0), "not ordered after role 0"),
        ({"scope": "cta"}, {}, (0, 0), "not all at a scope"),
        ({"scope": "sys"}, {"scope": "sys"}, (0, 1), ""),
        ({"scope": "sys"}, {}, (0, 1), "not all at a scope"),
        ({}, {"scope": "sys"}, (0, 1), "not all at a scope"),
    ],
)
def test_a_store_is_seen_after_a_release_and_an_acquire_of_sufficient_scope(
    sender, reader, gpus, seen
):
    program = Program(
        functools.partial(publish, **sender), functools.partial(read, **reader), gpus=gpus
    )
    found = fails(program)
    assert seen in found if seen else not found


def copy_after(program, fence):
    wait_for(program, 40, 1, fence=fence)
    device.expect(program.full, 128)
    device.tma_copy(program.block(), [0], program.full, program.stage.index(0))
    device.wait(program.full, 0)
    program.got = program.stage.index(0).load().a


@pytest.mark.parametrize(("by_reader", "by_writer"), [(1, 0), (0, 1), (0, 0)])
def test_a_copy_sees_stores_that_a_proxy_fence_follows(by_reader, by_writer):
    def write(program):
        device.store(program.at(0) + Value(np.arange(32)), Value(np.arange(32, dtype=np.int32)))
        if by_writer:
            device.inline_asm_elementwise("fence.proxy.async.global; mov", "", [], None, False, 1)
        device.thread_barrier()
        device._atomic(lambda old, value: old + value)(program.at(40), 1)

    fence = "fence.proxy.async.global;" if by_reader else ""
    program = Program(write, functools.partial(copy_after, fence=fence))
    for seed in range(8):
        program.run(policies.policy_of(seed))
        assert np.array_equal(program.got, np.arange(32)) == bool(by_reader or by_writer)


@pytest.mark.parametrize("is_fenced", [True, False])
def test_a_stage_is_written_again_only_after_a_fence(is_fenced):
    """The race that once shipped, in eight lines."""

    def load(program):
        for phase in (1, 0):
            device.wait(program.empty, phase)
            device.expect(program.full, 128)
            device.tma_copy(program.block(), [0], program.full, program.stage.index(0))

    def use(program):
        for phase in (0, 1):
            device.wait(program.full, phase)
            program.stage.index(0).load()
            if is_fenced:
                device.fence_async_shared()
            device.arrive(program.empty)

    found = fails(Program(load, use, ctas=["CTA 0"] * 2))
    assert (found == "") if is_fenced else "has a copy write" in found


def test_a_copy_is_not_there_before_its_barrier():
    def load(program):
        device.expect(program.full, 128)
        device.tma_copy(program.block(), [0], program.full, program.stage.index(0))
        program.stage.index(0).load()

    assert "not ordered after copies" in fails(Program(load))


def test_cp_async_is_there_after_its_group():
    def load(program, waits, commits=True):
        device.cp_async(program.stage.index(0), program.at(0) + Value(np.arange(32)))
        if commits:
            device.commit_group()
        if waits:
            device.wait_group(0)
        program.stage.index(0).load()

    assert fails(Program(functools.partial(load, waits=True))) == ""
    assert "cp.async" in fails(Program(functools.partial(load, waits=False)))
    assert "cp.async" in fails(Program(functools.partial(load, waits=True, commits=False)))


def test_a_product_is_poison_until_it_is_waited_for():
    def multiply(program):
        a = Value(np.ones((4, 4), dtype=np.float32))
        sums = device.warpgroup_mma(a, a, a, use_acc=False, is_async=True)
        program.early = sums.a
        program.late = device.warpgroup_mma_wait(0, deps=[sums]).a

    program = Program(multiply)
    program.run(policies.policy_of(0))
    assert np.isnan(program.early).all() and (program.late == 4).all()


def test_masked_elements_are_poison_and_shared_memory_begins_as_poison():
    def look(program):
        mask = Value(np.arange(4) < 2)
        program.got = device.load(program.at(0) + Value(np.arange(4)), mask=mask).a
        program.shared_value = program.stage.index(0).load().a

    program = Program(look)
    program.run(policies.Calm())
    assert program.got.tolist() == [0, 0, -1, -1] and (program.shared_value == -1).all()


def test_waits_that_nobody_ends_and_arrivals_too_many_are_named():
    assert "role 0 waits for phase 0 of full" in fails(Program(lambda p: device.wait(p.full, 0)))
    twice = Program(lambda p: device.arrive(p.full, 2))
    assert "more arrivals at full" in fails(twice)


def test_a_bounded_wait_ends_when_nothing_else_can_happen():
    program = Program(lambda p: wait_for(p, 40, 7))
    program.run(policies.Calm())
    assert program.scheduler.steps > 0


def test_a_failure_tells_the_shortest_story_and_draws_it(tmp_path, monkeypatch):
    """Two stores without order: seen in any run, so no change of an undisturbed one is needed."""
    monkeypatch.setenv("MEGAMOE_PROOF_TRACES", str(tmp_path))
    with pytest.raises(Found, match="an undisturbed run shows it"):
        explore(Program(functools.partial(publish, sem="relaxed"), read), range(4))

    def first(program):
        device.store(program.at(0), 1)
        device._atomic(lambda old, value: old + value)(program.at(40), 1)

    def hasty(program):
        old = device._atomic(lambda old, value: old + value)(program.at(40), 0, sem="relaxed")
        if not old:
            raise Violation("it came first")

    with pytest.raises(Found, match=r"role 0 runs only when nobody else can|1 changes") as found:
        explore(Program(first, hasty), range(24))
    assert "it came first" in str(found.value) and f"seed {found.value.seed}" in str(found.value)
    picture = tmp_path / f"program-{found.value.seed}.html"
    assert f"a picture: {picture}" in str(found.value)
    assert "it came first" in picture.read_text() and "<td" in picture.read_text()


@pytest.mark.skipif(scheduler.greenlet is None, reason="threads are all there is")
def test_threads_give_the_same_runs_as_greenlets(monkeypatch):
    program, logs = Program(publish, read), []
    for _ in range(2):
        log = []
        program.run(policies.policy_of(5), log)
        logs.append(log)
        monkeypatch.setattr(scheduler, "greenlet", None)
    assert logs[0] == logs[1] and logs[0]

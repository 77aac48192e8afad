"""Split as its kernels stand, emulated: L1 and L2 are two launches that run at the same time.

Each side is a thread; on a GPU they are streams of two parts of the SMs.
"""

import threading
import time

import pytest
import torch

import megamoe as mm
from megamoe.engine.call import Call
from megamoe.engine.hopper import HOPPER
from megamoe.engine.status import GAVE_UP, NONE, DeviceStatus
from megamoe.errors import MegaMoETimeout
from megamoe.kernels.gluon import pipeline, tile_scheduler
from megamoe.kernels.hopper import launch
from megamoe.problem import Options
from megamoe.routing.permute import expert_counts
from tests import emulator, pretending
from tests.emulator import assembly, running
from tests.emulator.running import HERE
from tests.emulator.values import Value
from tests.kernels.support import INTERPRETED
from tests.kernels.test_emulated import CPU, tokens, weights_of

pytestmark = pytest.mark.skipif(INTERPRETED, reason="Triton's interpreter knows no Gluon")

E, K = 4, 2


@pytest.fixture(autouse=True)
def kernels(monkeypatch):
    return emulator.install(monkeypatch, num_sms=19)


# recipe, options, overrides, biases: every kind of tile that the plan can pick
CASES = {
    "swap_ab": ("w4a8_block", {}, {}, True),
    "dynamic": ("w8a8", {"weight_at": "combine"}, {"schedule": "dynamic"}, True),
    "static": ("w8a8", {}, {"schedule": "static"}, False),
    "strided": ("w8a8", {"combine": "fp8"}, {"schedule": "strided"}, False),
    "decoded-per-tile": ("w4a8_block", {}, {"kernel": "gemm", "schedule": "strided"}, False),
    "decoded-per-wave": ("w4a8_block", {}, {"decode_ahead": 4}, False),
    "bf16": ("bf16", {"activation": "gpt_oss"}, {}, True),
    "w4a8": ("w4a8", {}, {}, False),
    "nvfp4": ("nvfp4", {}, {}, True),
}


def split(inputs, w, options=None, shared=None, stats=None, count=None, status=None, **given):
    """One call in mode split, checked for faults."""
    options, status = options or Options(), status or DeviceStatus(CPU)
    plan = pretending.plan_of(inputs, w, options, shared, mode="split", **given)
    y = HOPPER.run(Call(*inputs, w, options, shared, status, stats, count), plan)
    assert int(status.bad_slot) == NONE
    return y, plan


@pytest.mark.parametrize("case", CASES)
def test_split_has_the_bits_of_staged(case):
    recipe, options, given, has_bias = CASES[case]
    w, options = weights_of(recipe, has_bias=has_bias), Options(**options)
    inputs = tokens(21, masked_ratio=0.2, skew="zipf")
    idx = inputs[1]
    idx[3] = idx[3, 0]  # the same expert twice
    stats = torch.zeros(E, dtype=torch.int64)
    y, plan = split(inputs, w, options, stats=stats, **given)
    assert [plan.launch(name).grid for name in ("l1", "l2")] == [(8,), (11,)]
    assert torch.equal(y, pretending.staged(inputs, w, options))
    assert torch.equal(stats, expert_counts(idx, E))


RING = {"swap_ab": {}, "dynamic": {"schedule": "dynamic"}, "static": {"schedule": "static"}}


@pytest.mark.parametrize("case", RING)
def test_a_pool_of_few_rows_is_a_ring_of_two_halves(case):
    """Experts lie across windows, and the last windows are empty."""
    w, inputs = weights_of("w8a8"), tokens(40, masked_ratio=0.1, skew="zipf")
    y, plan = split(inputs, w, pool_rows=64, **RING[case])
    assert plan["windows"] == 4 and sum(b.name == "activations" for b in plan.buffers) == 1
    assert torch.equal(y, pretending.staged(inputs, w))


@pytest.mark.parametrize("apart", [False, True], ids=["joined", "apart"])
def test_shared_experts_padding_and_quantised_tokens(apart):
    w, shared = weights_of("w4a8_block"), weights_of("w8a8" if apart else "w4a8_block", 1)
    x, idx, gates = tokens(9, masked_ratio=0.2)
    options, count = Options(combine="fp8"), torch.tensor([7], dtype=torch.int32)
    y, _ = split((x, idx, gates), w, options, shared, count=count)
    wanted = pretending.staged((x, idx, gates), w, options, shared, count=count)
    assert torch.equal(y, wanted)
    ready = mm.quantize(x, "fp8_1x128"), idx, gates
    y, _ = split(ready, w, options, shared, pool_rows=32)
    assert torch.equal(y, pretending.staged(ready, w, options, shared))


def test_no_slot_at_all_and_a_bad_one():
    w, (x, idx, gates) = weights_of("w8a8"), tokens(5)
    y, _ = split((x, torch.full_like(idx, -1), gates), w, schedule="static")
    assert not y.any()
    idx[4, 1], status = E, DeviceStatus(CPU)
    plan = pretending.plan_of((x, idx, gates), w, mode="split")
    y = HOPPER.run(Call(x, idx, gates, w, Options(), None, status), plan)
    with pytest.raises(mm.MegaMoEError, match="token 4, slot 1"):
        status.check(K)
    idx[4, 1] = -1
    assert torch.equal(y, pretending.staged((x, idx, gates), w))


# -- side by side ----------------------------------------------------------------------------------


@pytest.fixture
def waiting(monkeypatch):
    """Set when a wait for tiles does not find them at once."""
    found, true_wait = threading.Event(), assembly.ASSEMBLY[pipeline.wait_text("gpu", "ge")]

    def wait(address, want, report, bound_ns):
        words = HERE.launch.memory.load(address.t.reshape(-1), torch.int32)
        if bool((words < want.t).any()):
            found.set()
        return true_wait(address, want, report, bound_ns)

    monkeypatch.setitem(assembly.ASSEMBLY, pipeline.wait_text("gpu", "ge"), wait)
    return found


@pytest.mark.parametrize("given", [{}, {"schedule": "dynamic"}], ids=["swap_ab", "dynamic"])
def test_l2_begins_before_l1_has_ended(given, waiting, monkeypatch):
    """L1 is launched only once L2 waits for one of its tiles."""
    w, inputs, true_l1 = weights_of("w8a8"), tokens(9), launch.gated

    def late(*args, **rest):
        assert waiting.wait(10.0), "L2 waits for no tile"
        true_l1(*args, **rest)

    wanted = pretending.staged(inputs, w)
    monkeypatch.setattr(launch, "gated", late)
    assert torch.equal(split(inputs, w, **given)[0], wanted)


def test_without_l1_the_wait_ends_by_its_bound_and_the_layer_says_so(monkeypatch):
    def give_up(seen, value, given_up, error):
        if bool((seen.t < value.t).any()):
            for at, word in ((given_up, 1), (error, GAVE_UP)):
                assembly._store_word(at, torch.tensor(word))
        return Value(0)

    monkeypatch.setitem(assembly.ASSEMBLY, tile_scheduler.GIVE_UP.value, give_up)
    monkeypatch.setattr(launch, "gated", lambda *args, **rest: None)
    w, inputs, status = weights_of("w8a8"), tokens(6), DeviceStatus(CPU)
    begin = time.monotonic()
    plan = pretending.plan_of(inputs, w, mode="split")
    HOPPER.run(Call(*inputs, w, Options(), None, status, timeout_s=0.5), plan)
    assert 0.5 < time.monotonic() - begin < running.WAIT_S / 2  # an unbounded wait ends at WAIT_S
    with pytest.raises(MegaMoETimeout, match="tiles or weights of other CTAs"):
        status.check(K)

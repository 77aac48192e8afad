"""A layer, called in any order: modes, token counts, masks, bad slots, timeouts, resets, weights.

hypothesis picks the calls, the scheduler when what happens in them; every result is held to the
reference. MEGAMOE_CALLS is the number of runs (20).
"""

import os

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

import megamoe as mm
from megamoe.errors import MegaMoETimeout, RangeError
from megamoe.kernels.gluon.mega import sync
from megamoe.routing.permute import expert_counts
from tests.emulator import policies
from tests.emulator.scheduler import Scheduler
from tests.kernels.support import INTERPRETED, error, tolerance
from tests.proof import targets

pytestmark = pytest.mark.skipif(INTERPRETED, reason="Triton's interpreter knows no Gluon")

EXPERTS, TOP_K, HIDDEN, INTERMEDIATE = 3, 2, 192, 128
SEEDS = st.integers(0, 2**20)


class Calls(RuleBasedStateMachine):
    """One layer, and what it must have counted."""

    @initialize(
        recipe=st.sampled_from(["w8a8", "w4a8_block", "bf16"]),
        mode=st.sampled_from(["fused", "fused", "staged", "auto"]),
        weight_at=st.sampled_from(["l1", "combine"]),
        poison=st.booleans(),
        sms=st.integers(1, 3),
        seed=SEEDS,
    )
    def build(self, recipe, mode, weight_at, poison, sms, seed):
        self.recipe, self.sms, self.options = recipe, sms, {"weight_at": weight_at}
        self.weights = self._weights(0)
        self.is_fused = mode == "fused"
        self.is_broken, self.counts = False, torch.zeros(EXPERTS, dtype=torch.int64)
        with targets.installed(sms, targets.kernels()):
            self.layer = mm.MoE(
                self.weights, EXPERTS, TOP_K, mode=mode, backend="hopper", timeout_s=30.0,
                debug_poison=poison, overlap_launches=False, **self.options,
            )  # fmt: skip

    def _weights(self, seed):
        rng = torch.Generator().manual_seed(seed)
        w13 = torch.randn(EXPERTS, 2 * INTERMEDIATE, HIDDEN, generator=rng) / HIDDEN**0.5
        w2 = torch.randn(EXPERTS, HIDDEN, INTERMEDIATE, generator=rng) / INTERMEDIATE**0.5
        return mm.ExpertWeights.quantize(w13.bfloat16(), w2.bfloat16(), self.recipe)

    def _run(self, inputs, seed):
        """One call of the layer under the policy of a seed."""
        found = []
        with targets.installed(self.sms, targets.kernels()):
            it = Scheduler(policies.policy_of(seed))
            it.memory.is_strict = not self.is_broken
            it.run(lambda: found.append(self.layer(*inputs)))
        return found[0]

    def _hold(self, y, inputs):
        wanted = mm.moe(*inputs, self.weights, backend="reference", **self.options)
        assert y.shape == wanted.shape and error(y, wanted) <= tolerance(self.recipe)
        self.counts += expert_counts(inputs[1], EXPERTS)
        assert torch.equal(self.layer.stats, self.counts)

    @precondition(lambda self: not self.is_broken)
    @rule(num=st.integers(0, 6), masked=st.sampled_from([0.0, 0.3, 1.0]), seed=SEEDS)
    def call(self, num, masked, seed):
        inputs = targets.tokens_of(num, EXPERTS, HIDDEN, TOP_K, seed=seed, masked_ratio=masked)
        self._hold(self._run(inputs, seed), inputs)
        self.layer.check()

    @precondition(lambda self: not self.is_broken)
    @rule(token=st.integers(0, 3), slot=st.integers(0, 1), seed=SEEDS, is_weight=st.booleans())
    def call_with_a_bad_slot(self, token, slot, seed, is_weight):
        x, idx, gates = targets.tokens_of(4, EXPERTS, HIDDEN, TOP_K, seed=seed)
        given = idx.clone(), gates.clone()
        if is_weight:
            given[1][token, slot] = float("nan")
        else:
            given[0][token, slot] = EXPERTS
        y = self._run((x, *given), seed)
        idx[token, slot] = -1
        self._hold(y, (x, idx, gates))
        with pytest.raises(RangeError, match=f"token {token}, slot {slot}"):
            self.layer.check()

    @precondition(lambda self: self.is_fused and not self.is_broken)
    @rule(seed=SEEDS)
    def call_that_times_out(self, seed):
        self.is_broken = True  # orders mean nothing from here on
        self.layer._status.counters.view(-1)[sync.DONE.value] = -5
        self._run(targets.tokens_of(3, EXPERTS, HIDDEN, TOP_K, seed=seed), seed)
        for _ in range(2):
            with pytest.raises(MegaMoETimeout, match="the end of all ranks"):
                self.layer.check()

    @precondition(lambda self: self.is_broken)
    @rule()
    def reset(self):
        self.layer.reset()
        self.counts = self.layer.stats.clone()
        self.is_broken = False

    @precondition(lambda self: not self.is_broken)
    @rule(seed=st.integers(1, 3))
    def refresh_weights(self, seed):
        """As a trainer does: new values in the layer's own buffers."""
        self.weights = self._weights(seed)
        other = mm.MoE(self.weights, EXPERTS, TOP_K, backend="reference", **self.options)
        with targets.installed(self.sms, targets.kernels()):
            self.layer.load_state_dict(other.state_dict(), assign=True)


Calls.TestCase.settings = settings(
    max_examples=int(os.environ.get("MEGAMOE_CALLS", "20")),
    stateful_step_count=8,
    deadline=None,
    derandomize="MEGAMOE_CALLS" not in os.environ,
    suppress_health_check=list(HealthCheck),
)
TestCalls = Calls.TestCase

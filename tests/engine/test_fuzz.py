"""Random programs of calls: layers, modes, graphs, bad slots, timeouts, resets, new weights.

A program is drawn from a seed. Every result is held, bit for bit, to one staged call of the same
tokens and weights, which itself is held to the reference. On a CPU the reference computes all modes
(what is held there is the host's part); on a Hopper GPU the kernels run. `scripts/fuzz.py` runs
50 000 calls there and records how many were held; docs/proof.md has the result.
"""

import random
from collections import Counter

import pytest
import torch

import megamoe as mm
from megamoe.engine.local import LocalRanks
from megamoe.errors import MegaMoETimeout, RangeError
from megamoe.kernels.gluon.mega import sync
from megamoe.routing.samplers import sample_routing
from tests.engine.test_hopper_gpu import IS_OTHER
from tests.kernels.support import error, tolerance

E, I, H, K = 8, 320, 512, 2
COUNTS = 0, 1, 5, 16, 40, 64, 150, 300
RECIPES = "w4a8_block", "w8a8", "w4a16", "bf16", "nvfp4"
LAYERS = {  # name: how it is built
    "auto": {},
    "graphs": {"cuda_graphs": True},
    "staged": {"mode": "staged"},
    "in passes": {"pool_rows": 256},
    "fused": {"mode": "fused"},
    "poisoned": {"mode": "fused", "debug_poison": True},
    "split": {"mode": "split"},
}
ACTIONS = {  # name: how often, of some ten thousand
    "call": 6200, "replay": 2300, "function": 400, "ranks": 600, "bad slot": 150, "refresh": 150,
    "capture": 60, "check": 100, "reset": 30, "time out": 3,
}  # fmt: skip
MAX_GRAPHS = 3  # of a layer


class Bank:
    """Inputs, and what each gives under either version of the weights."""

    def __init__(self, recipe, device, backend):
        self.recipe, self.device, self.backend = recipe, device, backend
        self.rng = torch.Generator(device).manual_seed(0)
        self.floats = [(self._some(E, 2 * I, H), self._some(E, H, I)) for _ in range(2)]
        self.batches = [self._tokens(num, seed) for num in COUNTS for seed in range(3)]
        self.wanted = []
        for version in range(2):
            layer = self.layer(version, mode="staged")
            self.wanted.append([layer(*inputs) for inputs in self.batches])
            weights = self.weights(version)
            for inputs, y in zip(self.batches, self.wanted[-1], strict=True):
                exact = mm.moe(*inputs, weights, backend="reference")
                assert error(y, exact) <= tolerance(recipe)

    def _some(self, *shape):
        drawn = torch.randn(*shape, generator=self.rng, device=self.device)
        return (drawn / shape[-1] ** 0.5).bfloat16()

    def _tokens(self, num, seed):
        x = torch.randn(num, H, generator=self.rng, device=self.device).bfloat16()
        skew = ("uniform", "hot_expert", "zipf")[seed]
        masked = (0.0, 0.3, 0.0)[seed]
        idx, gates = sample_routing(num, E, K, skew=skew, masked_ratio=masked, seed=seed)
        return x, idx.to(self.device), gates.to(self.device)

    def weights(self, version):
        """Of their own: what a layer does to its experts touches no other."""
        return mm.ExpertWeights.quantize(*self.floats[version], self.recipe)

    def layer(self, version, **how):
        return mm.MoE(self.weights(version), E, K, backend=self.backend, timeout_s=30.0, **how)


class Tracked:
    """A layer, the version of its weights, and graphs that were captured of it."""

    def __init__(self, bank, name):
        self.bank, self.name, self.version = bank, name, 0
        self.layer, self.graphs = bank.layer(0, **LAYERS[name]), []

    def takes(self, inputs):
        return LAYERS[self.name].get("mode") != "fused" or len(inputs[0]) <= 64


class Program:
    """A run of one seed. Comparisons stay on the device until the end."""

    def __init__(self, seed, num, device, backend, banks):
        self.rng, self.num, self.on_gpu = random.Random(seed), num, device.type == "cuda"
        self.banks, self.device, self.backend = banks, device, backend
        self.layers = [Tracked(bank, name) for bank in banks for name in LAYERS]
        self.weights = {b.recipe: [b.weights(v) for v in range(2)] for b in banks}
        self.side_by_side = {}
        self.is_wrong = torch.zeros(num, dtype=torch.bool, device=device)
        self.did, self.ran = [], Counter()

    def run(self):
        names, often = list(ACTIONS), list(ACTIONS.values())
        for step in range(self.num):
            self.step = step
            name = self.rng.choices(names, often)[0]
            self.did.append(name)
            getattr(self, name.replace(" ", "_"))()
            if step % 200 == 0 and self.on_gpu:
                torch.cuda.synchronize()
        for one in (*(one.layer for one in self.layers), *self.side_by_side.values()):
            one.check()
        wrong = self.is_wrong.nonzero().flatten().tolist()
        assert not wrong, [(step, self.did[step]) for step in wrong[:20]]

    def hold(self, y, wanted, kind):
        self.did[-1], self.ran[kind.split(",")[0]] = kind, self.ran[kind.split(",")[0]] + 1
        self.is_wrong[self.step] = (y.view(torch.int16) != wanted.view(torch.int16)).any()

    def pick(self, one):
        """(where, inputs) that the layer takes."""
        while True:
            at = self.rng.randrange(len(one.bank.batches))
            if one.takes(one.bank.batches[at]):
                return at, one.bank.batches[at]

    # -- actions

    def call(self):
        one = self.rng.choice(self.layers)
        at, inputs = self.pick(one)
        kind = f"{one.name}, {one.bank.recipe}, {len(inputs[0])} tokens"
        self.hold(one.layer(*inputs), one.bank.wanted[one.version][at], kind)

    def capture(self):
        """A graph of the user's own."""
        one = self.rng.choice(self.layers)
        if not self.on_gpu or len(one.graphs) == MAX_GRAPHS or one.name == "graphs":
            return
        at, inputs = self.pick(one)
        if len(inputs[0]) == 0:
            return
        inputs = [t.clone() for t in inputs]
        one.layer(*inputs)  # compiles
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = one.layer(*inputs)
        one.graphs.append((graph, inputs, y, at // 3))

    def replay(self):
        captured = [(one, graph) for one in self.layers for graph in one.graphs]
        if not captured:
            return
        one, (graph, inputs, y, size) = self.rng.choice(captured)
        at = 3 * size + self.rng.randrange(3)
        for into, new in zip(inputs, one.bank.batches[at], strict=True):
            into.copy_(new)
        graph.replay()
        self.hold(y, one.bank.wanted[one.version][at], f"replay, {one.name}, {one.bank.recipe}")

    def function(self):
        bank, version = self.rng.choice(self.banks), self.rng.randrange(2)
        at = self.rng.randrange(len(bank.batches))
        how = {"backend": self.backend, "mode": self.rng.choice(("auto", "staged"))}
        y = mm.moe(*bank.batches[at], self.weights[bank.recipe][version], **how)
        self.hold(y, bank.wanted[version][at], f"mm.moe, {bank.recipe}, {how['mode']}")

    def ranks(self):
        """Ranks side by side, in one launch or as chains."""
        if not self.on_gpu:
            return
        bank, num = self.rng.choice(self.banks), self.rng.choice((2, 4, 8))
        mode = self.rng.choice(("fused", "chain"))
        key = bank.recipe, mode, num
        if key not in self.side_by_side:
            given = LocalRanks(bank.weights(0), num, mode=mode, timeout_s=30.0)
            self.side_by_side[key] = given
        at = self.rng.randrange(3, len(bank.batches))
        inputs = bank.batches[at]
        total = len(inputs[0])
        cuts = sorted(self.rng.randint(0, total) for _ in range(num - 1))
        counts = [b - a for a, b in zip([0, *cuts], [*cuts, total], strict=True)]
        if mode == "fused" and max(counts) * num > 64:  # planned for the fullest rank
            return
        got = torch.cat(self.side_by_side[key](*(t.split(counts) for t in inputs)))
        self.hold(got, bank.wanted[0][at], f"{mode} over {num}, {bank.recipe}")

    def bad_slot(self):
        one = self.rng.choice(self.layers)
        at, (x, idx, gates) = self.pick(one)
        if len(x) < 5:
            return
        one.layer.check()
        token, slot = self.rng.randrange(len(x)), self.rng.randrange(K)
        idx, gates = idx.clone(), gates.clone()
        if self.rng.random() < 0.5:
            idx[token, slot] = E + 3
        else:
            idx[token, slot], gates[token, slot] = 1, float("nan")
        wanted = one.bank.wanted[one.version][at]
        if self.on_gpu:
            y = one.layer(x, idx, gates)
            others = [t for t in range(len(x)) if t != token]
            self.hold(y[others], wanted[others], f"bad slot, {one.name}, {one.bank.recipe}")
            with pytest.raises(RangeError, match=f"token {token}, slot {slot}"):
                one.layer.check()
        else:
            with pytest.raises(RangeError, match=f"token {token}, slot {slot}"):
                one.layer(x, idx, gates)
                one.layer.check()

    def refresh(self):
        """All experts, or half of them and then the others; from floats or from the format."""
        one = self.rng.choice(self.layers)
        one.version ^= 1
        given = one.bank.floats[one.version]
        if self.rng.random() < 0.5:
            new = one.bank.weights(one.version)
            given = new.w13, new.w2
        if self.rng.random() < 0.5:
            one.layer.refresh(*given)
            return
        parts = [(0, 3), (3, E)]
        for begin, end in self.rng.sample(parts, 2):
            some = (t[begin:end] for t in given)
            one.layer.refresh(*some, experts=list(range(begin, end)))

    def check(self):
        self.rng.choice(self.layers).layer.check()

    def reset(self):
        self.rng.choice(self.layers).layer.reset()

    def time_out(self):
        """A counter that somebody else left wrong: reported by name, and forgotten by reset."""
        if not self.on_gpu:
            return
        bank = self.banks[0]
        layer = mm.MoE(bank.weights(0), E, K, backend=self.backend, mode="fused", timeout_s=5.0)
        layer(*bank.batches[4])
        layer.check()
        layer._status.counters.view(-1)[sync.DONE.value] = -5
        layer(*bank.batches[4])
        with pytest.raises(MegaMoETimeout):
            layer.check()
        layer.reset()
        self.hold(layer(*bank.batches[4]), bank.wanted[0][4], "after a timeout")


# -- on a CPU, and on a Hopper GPU


def run(seed, num, device, backend, recipes):
    banks = [Bank(recipe, torch.device(device), backend) for recipe in recipes]
    program = Program(seed, num, torch.device(device), backend, banks)
    try:
        program.run()
    except BaseException as error:
        error.add_note(f"seed {seed}, step {program.step}: {program.did[-5:]}")
        raise
    print(f"seed {seed}: {num} steps, {dict(program.ran)}")
    return program


def of(seed):
    """Recipes of a seed's layers."""
    return list(dict.fromkeys([RECIPES[seed % len(RECIPES)], "w4a8_block"]))


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.every)])
def test_random_programs_on_a_cpu_have_the_bits_of_single_calls(seed):
    program = run(seed, 150, "cpu", "reference", [("w4a8_block", "w8a8")[seed]])
    assert {"auto", "fused", "split", "mm.moe"} <= set(program.ran)


@pytest.mark.gpu
@pytest.mark.skipif(IS_OTHER, reason="needs an sm_90 GPU; this is another")
@pytest.mark.parametrize("seed", range(10))
def test_5000_random_calls_on_a_gpu_have_the_bits_of_single_calls(seed):
    program = run(seed, 5_800, "cuda", "hopper", of(seed))
    assert sum(program.ran.values()) >= 5_000

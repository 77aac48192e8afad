"""Ranks and modes change no bit: random calls over all recipes, emulated, and on a Hopper GPU.

`python -m tests.distributed.test_bits NUM SEED` runs NUM cases on the emulator, each on 1, 2, 4 and
8 ranks in every mode that takes it, and prints what it ran. Modes over ranks that are processes
(staged) are in `test_group`.
"""

import sys
import time
from collections import Counter

import pytest
import torch

from megamoe.engine import backends
from megamoe.engine.local import LocalRanks
from megamoe.engine.status import DeviceStatus
from megamoe.errors import CapacityError, NotAvailable
from megamoe.planner.hopper import num_rows
from megamoe.planner.tables import split as tables
from tests import emulator, pretending
from tests.distributed import bits
from tests.distributed.bits import RANKS
from tests.distributed.chain_ranks import ChainRanks
from tests.emulator import blackwell
from tests.kernels.support import INTERPRETED

NOT_INTERPRETED = pytest.mark.skipif(INTERPRETED, reason="Triton's interpreter knows no Gluon")
REFUSED = (NotAvailable, CapacityError)  # by the plan: the case is no case of that mode
FEW, FEW_TMEM, ALL_TMEM = 12, 7, 84
GPU_CASES = 300


def passes(case, num_ranks, w):
    """A pool of about a third of the rows that a rank may receive."""
    if not case.in_passes:
        return {}
    most = max(case.counts(num_ranks))
    rows = num_rows(max(most, 1) * num_ranks * case.top_k, w.num_experts // num_ranks)
    return {"pool_rows": max(rows // 3, 8) // 8 * 8}


def assert_same(got, wanted, case, mode, num_ranks):
    """Bit for bit; a failure names the case, which its seed gives again."""
    same = torch.equal(got.view(torch.int16), wanted.view(torch.int16))
    assert same, f"{mode} over {num_ranks} ranks: {case}"


# -- emulated ----------------------------------------------------------------------------------


class Emulation:
    """One process's ranks on the emulator."""

    def __init__(self, monkeypatch):
        self.patch = monkeypatch
        monkeypatch.setattr(backends, "resolve", lambda *wanted: None)
        self.kernels = emulator.install(monkeypatch, num_sms=2)

    def wanted(self, case):
        """One staged call of one rank."""
        pretending.pretend_h200(self.patch, 2)
        x, idx, gates = case.inputs()
        return pretending.staged(
            (case.ready(x), idx, gates), case.weights(), bits.options_of(case), case.shared()
        )

    def run(self, case, mode, num_ranks):
        """The call on its ranks, or None where the plan refuses it."""
        w = case.weights(case.placement(num_ranks))
        parts = case.parts(num_ranks, case.inputs())
        try:
            return getattr(self, mode)(case, w, parts)
        except REFUSED:
            return None

    def split(self, case, w, parts):
        """On parts of one SM and two."""
        self.patch.setattr(tables, "SMS_UNIT", 1)
        return self.chain(case, w, parts, "split", 3)

    def chain(self, case, w, parts, mode="chain", num_sms=2):
        num = len(parts)
        pretending.pretend_h200(self.patch, num_sms)
        ranks = ChainRanks(
            self.kernels, w, num, max(case.counts(num)) or 1, case.top_k, bits.options_of(case),
            shared=case.shared(), mode=mode, **case.tile, **passes(case, num, w),
        )  # fmt: skip
        y = torch.cat(ranks(parts))
        for status in ranks.status:
            status.check(case.top_k)
        return y

    def fused(self, case, w, parts):
        num = len(parts)
        pretending.pretend_h200(self.patch, max(num, 2))
        if case.is_shared:
            return pretending.fuse(parts[0], w, bits.options_of(case), shared=case.shared())
        ranks = LocalRanks(w, num, bits.options_of(case), timeout_s=30.0)
        ranks._top_k = case.top_k
        ranks._make_buffers(max(case.counts(num)) or 1)
        self.kernels["mega_kernel"].hold = [buffer.tokens for buffer in ranks._buffers]
        y = torch.cat(ranks(*map(list, zip(*parts, strict=True))))
        ranks.check()
        return y


class TmemEmulation:
    """One process's ranks of a chain on Blackwell, on the emulator."""

    def __init__(self, monkeypatch):
        monkeypatch.setattr(backends, "resolve", lambda *wanted: None)
        self.kernels = blackwell.install_chain(monkeypatch, 2)

    def wanted(self, case):
        """One staged call of one rank."""
        x, idx, gates = case.inputs()
        inputs = case.ready(x), idx, gates
        options = bits.options_of(case)
        return blackwell.layer(inputs, case.weights(), options, case.shared(), mode="staged")

    def run(self, case, mode, num):
        """The call on its ranks; tiles are the plan's."""
        w = case.weights(case.placement(num))
        rows = {name: max(value, 128) for name, value in passes(case, num, w).items()}
        ranks = ChainRanks(
            self.kernels, w, num, max(case.counts(num)) or 1, case.top_k, bits.options_of(case),
            shared=case.shared(), backend="blackwell", **rows,
        )  # fmt: skip
        y = torch.cat(ranks(case.parts(num, case.inputs())))
        for status in ranks.status:
            status.check(case.top_k)
        return y


def configurations(case):
    """Mode and ranks, all that take the case."""
    return [(mode, num) for num in RANKS for mode in case.modes(num)]


def on_gpu(case):
    """Without split, which ranks of one process do not run."""
    return [(mode, num) for mode, num in configurations(case) if mode != "split"]


def assert_bits_of_one_rank(it, case, chosen, counts):
    """The case in some modes on some ranks, against one rank; `counts` counts what was run."""
    wanted = it.wanted(case)
    for mode, num in chosen:
        got = it.run(case, mode, num)
        if got is not None:
            assert_same(got, wanted, case, mode, num)
        counts[f"{mode} over {num} ranks" if got is not None else "refused by the plan"] += 1


@NOT_INTERPRETED
@pytest.mark.parametrize("case", bits.cases(FEW), ids=lambda case: f"seed-{case.seed}")
def test_a_call_over_ranks_has_the_bits_of_one_rank(case, monkeypatch):
    """On one number of ranks in one mode, in turn; `every` and the script run all of them."""
    it, known = Emulation(monkeypatch), configurations(case)
    assert_bits_of_one_rank(it, case, [known[case.seed * 3 % len(known)]], Counter())


@NOT_INTERPRETED
@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, marks=() if case.seed < FEW_TMEM else pytest.mark.every)
        for case in bits.cases(ALL_TMEM)
    ],
    ids=lambda case: f"seed-{case.seed}",
)
def test_a_chain_on_blackwell_has_the_bits_of_one_rank(case, monkeypatch):
    """Each case on one number of ranks, in turn; all recipes."""
    num = RANKS[case.seed % len(RANKS)]
    assert_bits_of_one_rank(TmemEmulation(monkeypatch), case, [("chain", num)], Counter())


@NOT_INTERPRETED
@pytest.mark.every
@pytest.mark.parametrize("first", range(FEW, GPU_CASES, 16))
def test_calls_over_all_ranks_in_all_modes_have_the_bits_of_one_rank(first, monkeypatch):
    it = Emulation(monkeypatch)
    for case in bits.cases(min(16, GPU_CASES - first), first):
        assert_bits_of_one_rank(it, case, configurations(case), Counter())


@NOT_INTERPRETED
@pytest.mark.parametrize(("mode", "pool_rows"), [("split", 8), ("chain", 4)])
def test_a_pool_of_less_than_a_row_of_each_window_is_refused_by_name(mode, pool_rows, monkeypatch):
    """Of few rows: so few that the number of windows alone would not refuse it."""
    it = Emulation(monkeypatch)
    monkeypatch.setattr(tables, "SMS_UNIT", 1)
    pretending.pretend_h200(monkeypatch, 3)
    w = bits.cases(1)[0].weights()[:2]
    with pytest.raises(CapacityError, match=f"pool_rows {pool_rows}"):
        ChainRanks(it.kernels, w, 2, 2, 1, mode=mode, pool_rows=pool_rows)


# -- on a GPU ----------------------------------------------------------------------------------


class OnGpu:
    """Ranks side by side on one GPU. A case's weights and ranks live as long as the case."""

    device = torch.device("cuda")

    def inputs(self, case):
        """Of all ranks."""
        return tuple(t.to(self.device) for t in case.inputs())

    def wanted(self, case):
        """One staged call of one rank."""
        x, idx, gates = self.inputs(case)
        status = DeviceStatus(self.device)
        inputs = case.ready(x), idx, gates
        w = case.weights(device=self.device)
        y = pretending.staged(inputs, w, bits.options_of(case), status=status)
        status.check(case.top_k)
        return y

    def run(self, case, mode, num_ranks):
        """The call on its ranks, or None where the plan refuses it."""
        w = case.weights(case.placement(num_ranks), self.device)
        parts = case.parts(num_ranks, self.inputs(case))
        how = {"pool_rows": None, "overrides": {}}
        if mode == "chain":
            how = {"overrides": case.tile, **passes(case, num_ranks, w)}
        try:
            ranks = LocalRanks(
                w, num_ranks, bits.options_of(case), timeout_s=20.0, mode=mode, **how
            )  # fmt: skip
            y = torch.cat(ranks(*map(list, zip(*parts, strict=True))))
        except REFUSED:
            return None
        ranks.check()
        return y


@pytest.mark.gpu
@pytest.mark.parametrize("first", range(0, GPU_CASES, 20))
def test_calls_over_all_ranks_in_all_modes_have_the_bits_of_one_rank_on_the_gpu(first):
    """In blocks, so that several processes compile what they need."""
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs an sm_90 GPU; this is another")
    ran = Counter()
    for case in bits.cases(20, first, on_gpu=True):
        assert_bits_of_one_rank(OnGpu(), case, on_gpu(case), ran)
    print(f"cases {first} to {first + 19}: {dict(ran)}")
    assert all(any(f"{mode} over" in key for key in ran) for mode in ("chain", "fused"))


def main(num=GPU_CASES, seed=0):
    """Cases on the emulator, in all modes over all ranks."""
    counts, begin = Counter(), time.process_time()
    with pytest.MonkeyPatch.context() as patch:
        it = Emulation(patch)
        for case in bits.cases(num, seed):
            assert_bits_of_one_rank(it, case, configurations(case), counts)
            print(case, flush=True)
    print(f"{num} cases, {dict(counts)}, {time.process_time() - begin:.0f} s of a core")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))

"""`megamoe certify` of the Blackwell backend on a CPU: its very kernels in the emulator.

What a certificate needs on a B200, but for compiling; replays of graphs are eager calls here.
"""

from dataclasses import dataclass, replace

import pytest
import torch

from megamoe.certify import blackwell_probe as probe
from megamoe.certify import checks, gpu_checks, run
from megamoe.certify.target import SMALL, Target
from megamoe.engine import backends, status
from megamoe.engine.local import LocalRanks
from megamoe.engine.local_chain import LocalChain
from megamoe.kernels.blackwell import epilogue, gemm
from megamoe.kernels.blackwell.mega import kernel
from megamoe.kernels.gluon.mega import dispatch
from megamoe.planner.numerics import BLACKWELL_RECIPES
from tests.distributed.chain_ranks import let_reach
from tests.emulator import blackwell, mutate
from tests.kernels.support import INTERPRETED

pytestmark = pytest.mark.skipif(INTERPRETED, reason="Triton's interpreter knows no Gluon")
TINY = replace(
    SMALL, hidden=256, num_experts=8, long_k=256, layers=(3,), gemms=(4, 100), num_soak=2
)
PROBED = blackwell.Step(probe.product_kernel)


@dataclass(frozen=True)
class Emulated(Target):
    """Takes the CPU for a GPU: bit for bit where a GPU must be."""

    @property
    def is_gpu(self):
        return True

    @property
    def label(self):
        return "emulated"


def _given_up(real, fused):
    """The check of waits: after a report a launch reads what nobody ordered, and says nothing."""

    def check(*given):
        fused.is_strict = False
        try:
            return real(*given)
        finally:
            fused.is_strict = True

    return check


@pytest.fixture
def there(monkeypatch):
    """Every launch of the backend is emulated, and the checks run in this process."""
    rows = tuple(replace(b, why_not=lambda device: "") for b in backends.BACKENDS)
    monkeypatch.setattr(backends, "BACKENDS", rows)
    monkeypatch.setattr(status, "_BY_STREAM", {})
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    blackwell.install_grouped(monkeypatch, num_sms=4)
    fused = blackwell.install_fused(monkeypatch, num_sms=4)
    chained = blackwell.install_chain(monkeypatch)
    monkeypatch.setattr(probe, "product_kernel", PROBED)
    monkeypatch.setattr(gpu_checks, "COUNTS", (1, 9))
    monkeypatch.setattr(gpu_checks, "_waits", _given_up(gpu_checks._waits, fused))
    monkeypatch.setattr(checks, "SOAK_TOKENS", (8, 3))
    monkeypatch.setattr(run, "_apart", lambda target, names: run._here(target))
    monkeypatch.setattr(run, "compile_ahead", lambda *_: None)
    make = LocalRanks._make_buffers

    def reached_by_address(ranks, num_tokens):
        make(ranks, num_tokens)
        fused.kernel.hold = [buffer.tokens for buffer in ranks._buffers]

    monkeypatch.setattr(LocalRanks, "_make_buffers", reached_by_address)
    make_chain = LocalChain._make

    def chain_reached_by_address(ranks, *sizes):
        make_chain(ranks, *sizes)
        let_reach(chained, [member.buffer.tokens for member in ranks._members])

    monkeypatch.setattr(LocalChain, "_make", chain_reached_by_address)


def certified(*recipes):
    return run.certify(Emulated("blackwell", torch.device("cpu"), recipes, own_sizes=TINY))


@pytest.mark.parametrize("recipe", [
    pytest.param(one, marks=() if one in ("w4a8", "w4a8_block", "nvfp4") else pytest.mark.every)
    for one in BLACKWELL_RECIPES
])  # fmt: skip
def test_the_blackwell_kernels_pass_in_the_emulator(there, recipe):
    report = certified(recipe)
    assert report.ok, report.failed
    assert {one.stage for one in report.findings} >= set(checks.STAGES) - {"ranks", "waits"}
    proof = report.certificate()
    assert proof.label == "emulated" and proof.recipes == (recipe,)
    names = [one.name for one in report.findings]
    if recipe == "w4a8_block":
        assert {"an absent rank", f"{recipe}, 4 ranks"} <= set(names)
        waited = next(one for one in report.findings if one.stage == "waits")
        assert "waited too long for the end of all ranks" in waited.detail


# (recipe, stage that refuses it, module, function, part of its source, instead of it)
WRONG = (
    ("w4a8", "hardware", probe, "_placed", "(0, 3, 2, 1, 4)", "(0, 2, 3, 1, 4)"),
    ("w4a8", "hardware", probe, "product_kernel", "k * (BLOCK_K // 2)", "0"),
    ("w4a8", "hardware", probe, "product_kernel", "mbarrier.wait(done, phase)", "pass"),
    ("w4a8", "products", gemm, "scale_block", "(0, 3, 2, 1, 4)", "(0, 2, 3, 1, 4)"),
    ("w4a8", "products", gemm, "multiply_tile", "use_acc = True", "use_acc = False"),
    ("bf16", "products", gemm, "weight_block", "(tile.expert * 2 + HALF)", "(tile.expert + HALF)"),
    ("w8a8", "gemms", gemm, "_add_stages", "scale * low_factor", "scale * high_factor"),
    ("nvfp4", "gemms", epilogue, "_activated", "gemm.factor + tile.expert * 2 + 1",
     "gemm.factor + tile.expert"),
    ("w4a4", "products", epilogue, "_store_scales", "tile.row_begin // gemm.TOKENS",
     "tile.row_begin // 16"),
    ("w4a8", "layers", kernel, "_steps_of", "kind == L1, l1.steps, l2.steps",
     "kind == L1, l2.steps, l2.steps"),
    ("w4a8", "layers", dispatch, "_store_placed", "to % args.TOKENS", "0 * to"),
)  # fmt: skip


@pytest.mark.parametrize("wrong", WRONG, ids=lambda w: f"{w[0]}-{w[1]}-{w[3]}")
def test_a_wrong_blackwell_kernel_is_refused_a_certificate(there, wrong):
    recipe, stage, *edit = wrong
    with mutate.planted(mutate.edited(*edit)):
        report = certified(recipe)
    assert not report.ok and report.certificate() is None
    assert report.failed[0].stage == stage, report.failed

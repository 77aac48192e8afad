"""The Blackwell GEMM by pairs of CTAs, on a CPU: the bits of one CTA, whatever the order of events."""

import pytest
import torch

from megamoe.errors import MegaMoEError
from megamoe.kernels.gluon import compat
from megamoe.problem import Options
from tests.emulator import blackwell
from tests.kernels.support import INTERPRETED
from tests.kernels.test_blackwell_emulated import tokens, weights_of

pytestmark = pytest.mark.skipif(INTERPRETED, reason="Triton's interpreter knows no Gluon")


@pytest.fixture
def run(monkeypatch):
    """A call of the backend, on four SMs and so two pairs: run(inputs, w, ..., seed=) -> y."""
    gemm = blackwell.install(monkeypatch, num_sms=4)
    monkeypatch.setattr(compat, "HAS_PAIRS", True)

    def call(*args, seed=None, **rest):
        gemm.seed = seed
        return blackwell.layer(*args, **rest)

    call.gemm = gemm
    return call


@pytest.mark.parametrize("recipe", ["w4a8", "w4a4", "nvfp4"])
def test_a_pair_has_the_bits_of_one_cta(recipe, run):
    w = weights_of(recipe, has_bias=True)
    inputs = tokens(24)
    one = run(inputs, w, Options("gpt_oss"), block_m=16)
    two = run(inputs, w, Options("gpt_oss"), block_m=16, cta_pair=True, seed=0)
    launches = [given for _, given in run.gemm.launches]
    assert [given.get("num_ctas", 1) for given in launches] == [1, 1, 2, 2]
    assert torch.equal(one, two)

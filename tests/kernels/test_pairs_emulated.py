"""The Blackwell GEMM by pairs of CTAs, on a CPU: the bits of one CTA, in any order of events."""

import pytest
import torch

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
    """With biases and the other activation; the last pair of L2 has rows for one CTA alone."""
    w, inputs = weights_of(recipe, has_bias=True), tokens(24)
    one = run(inputs, w, Options("gpt_oss"), block_m=16)
    two = run(inputs, w, Options("gpt_oss"), block_m=16, cta_pair=True, seed=0)
    launches = [given for _, given in run.gemm.launches]
    assert [given.get("num_ctas", 1) for given in launches] == [1, 1, 2, 2]
    assert torch.equal(one, two)


@pytest.mark.parametrize(
    ("recipe", "hidden", "intermediate", "block_m"),
    [
        ("w4a8", 256, 96, 32),  # L1: one block, the second CTA has nothing
        ("w4a8", 640, 384, 64),  # three blocks of outputs
        pytest.param("w4a8", 512, 512, 128, marks=pytest.mark.every),
        pytest.param("nvfp4", 736, 352, 32, marks=pytest.mark.every),
        pytest.param("w4a4", 480, 736, 64, marks=pytest.mark.every),
    ],
)
def test_widths_that_are_no_pairs_of_blocks(recipe, hidden, intermediate, block_m, run):
    """Several orders of events each: the memory model sees every access of both CTAs."""
    w = weights_of(recipe, 2, hidden, intermediate)
    inputs = tokens(block_m + 3, 2, hidden)
    one = run(inputs, w, block_m=block_m)
    for seed in range(3):
        assert torch.equal(one, run(inputs, w, block_m=block_m, cta_pair=True, seed=seed))

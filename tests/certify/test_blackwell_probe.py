"""The probe of Blackwell's instructions compiles to them; its cases are what they say."""

import re

import pytest
import torch

from megamoe.certify import blackwell_probe as probe
from megamoe.certify.checks import all_checks
from megamoe.certify.target import Target
from tests.kernels.compiling import Stand, compile_kernel, resources
from tests.kernels.support import INTERPRETED

MMA = {
    "w4a8": "kind::mxf8f6f4.block_scale.scale_vec::1X",
    "w4a4": "kind::mxf4.block_scale.scale_vec::2X",
    "nvfp4": "kind::mxf4nvf4.block_scale.scale_vec::4X",
}


class Standing(Stand):
    """Stands for a tensor of a case."""

    def __init__(self, t):
        super().__init__(t.dtype, tuple(t.shape))
        self.strides = t.stride()

    def stride(self):
        return self.strides


@pytest.mark.skipif(INTERPRETED, reason="Triton's interpreter knows no Gluon")
@pytest.mark.parametrize(("name", "n"), [("w4a8", 8), ("w4a4", 16), ("nvfp4", 128)])
def test_the_probe_compiles_for_sm_100a_to_copies_and_products_of_its_format(name, n):
    kind = probe.KINDS[name]
    stands = probe.Case(*(Standing(t) for t in probe.case(kind, n, 512)))
    args = (*probe.descriptors(kind, n, stands), Stand(torch.float32), 2)
    kernel = compile_kernel(
        probe.product_kernel, args, 100, X=kind.x, VEC=kind.vec, N=n, BLOCK_K=kind.block_k,
        X_PACK=8 // kind.x_bits, MULTIPLY=True, num_warps=4,
    )  # fmt: skip
    ptx = kernel.asm["ptx"]
    assert set(re.findall(r"kind::\w+\.block_scale\.scale_vec::\dX", ptx)) == {MMA[name]}
    assert "tcgen05.cp.cta_group::1.warpx4.32x128b" in ptx and resources(kernel)["stack"] == 0


@pytest.mark.parametrize("name", probe.KINDS)
def test_adversarial_terms_cancel_and_random_ones_do_not(name):
    kind = probe.KINDS[name]
    hard = probe.case(kind, 8, 512, is_adversarial=True)
    assert not hard.y.any() and bool((hard.size > 0).all())
    some = probe.case(kind, 8, 512)
    assert some.y.abs().max() > 0 and some.ws.numel() == 128 * 512 // kind.vec


def test_hardware_comes_before_products_on_blackwell_alone(monkeypatch):
    from megamoe.planner import plan

    monkeypatch.setitem(plan.BACKEND_MODES, "blackwell", ("staged",))
    stages = [c.stage for c in all_checks(Target("blackwell", torch.device("cuda"), ("w4a8",)))]
    assert stages.index("hardware") < stages.index("products")
    names = [c.name for c in all_checks(Target("blackwell", torch.device("cuda"), ("w4a8",)))]
    assert "w4a8, grouped alone" in names
    others = {c.stage for c in all_checks(Target("hopper", torch.device("cuda"), ("w4a8",)))}
    assert "hardware" not in others and {"graphs", "soak"} <= others

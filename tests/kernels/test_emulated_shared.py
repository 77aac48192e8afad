"""Shared experts on the emulated Hopper kernels: experts like the others, in the same launches."""

import pytest
import torch

import megamoe as mm
from megamoe.engine import images
from megamoe.engine.status import DeviceStatus
from megamoe.planner.fused import ring
from megamoe.planner.hopper import as_fused, num_rows
from megamoe.planner.tables import hopper as tables
from megamoe.problem import Options
from megamoe.routing.permute import expert_counts
from tests import emulator, pretending
from tests.kernels.hopper import shipped_fused
from tests.kernels.support import INTERPRETED
from tests.kernels.test_emulated import CPU, E, K, assert_agrees, fuse, tokens, weights_of

pytestmark = pytest.mark.skipif(INTERPRETED, reason="Triton's interpreter knows no Gluon")


@pytest.fixture(autouse=True)
def kernels(monkeypatch):
    return emulator.install(monkeypatch)


@pytest.mark.parametrize(
    ("recipe", "options", "num"),
    [
        ("w4a8_block", {}, 1),
        ("w4a8_block", {"weight_at": "combine", "combine": "fp8"}, 2),
        ("w4a8", {"clamp": 0.5}, 2),
        ("w4a16", {"weight_at": "combine"}, 1),
    ],
)
def test_shared_experts_are_tiles_of_the_same_launch(recipe, options, num, kernels):
    both = weights_of(recipe, E + num)
    w, shared, status = both[:E], both[E:], DeviceStatus(CPU)
    x, idx, gates = tokens(21, masked_ratio=0.3)  # shared experts have several passes
    idx[4], idx[5, 0] = -1, idx[5, 1]
    inputs = x, idx, gates
    y, stats = fuse(inputs, w, Options(**options), status, shared=shared)
    assert kernels["mega_kernel"].launches == 1 and kernels["gemm_swap_ab_kernel"].launches == 0
    staged = pretending.staged(inputs, w, Options(**options), shared)
    assert torch.equal(y, staged) and torch.equal(stats, expert_counts(idx, E))
    if "combine" not in options:
        assert_agrees(y, inputs, w, shared=shared, **options)
    idx[7, 1] = E  # which names no routed expert
    with pytest.raises(mm.MegaMoEError, match="token 7, slot 1"):
        fuse(inputs, w, Options(**options), status, shared=shared)


@pytest.mark.parametrize("num", [40, pytest.param(132, marks=pytest.mark.every)])
def test_staged_shared_experts_have_the_bits_of_a_pass_of_their_own(num, monkeypatch, kernels):
    """However rows are found, with padding after a count, and for tokens that come quantised."""
    monkeypatch.setattr(tables, "SMALL_SLOTS", 256)
    both = weights_of("w4a8_block", E + 2)
    w, shared = both[:E], both[E:]
    inputs = tokens(num, masked_ratio=0.2, skew="zipf")
    inputs[1][2, 0] = E + 1  # a shared expert's number, but no routed one's
    ready = mm.quantize(inputs[0], "fp8_1x128"), *inputs[1:]
    count = torch.tensor([num - 3], dtype=torch.int32)

    def staged(some, middle):
        monkeypatch.setattr(tables, "MIDDLE_SLOTS", middle)
        seen, stats = DeviceStatus(CPU), torch.zeros(E, dtype=torch.int64)
        y = pretending.staged(some, w, None, shared, status=seen, stats=stats, count=count)
        assert int(seen.bad_slot) == 2 * K
        return y[: num - 3], stats

    results = [staged(some, middle) for some in (inputs, ready) for middle in (4096, 64)]
    launches = kernels["gemm_swap_ab_kernel"].launches + kernels["gemm_kernel"].launches
    monkeypatch.setattr(images, "why_apart", lambda *both: "asked for")
    wanted, stats = staged(inputs, 4096)
    more = kernels["gemm_swap_ab_kernel"].launches + kernels["gemm_kernel"].launches
    assert (launches, more) == (8, 12)
    assert all(torch.equal(y, wanted) and torch.equal(s, stats) for y, s in results)


def test_a_ring_of_half_of_the_rows_has_the_bits_of_all(monkeypatch):
    emulator.install(monkeypatch, 3)
    both = weights_of("w4a8_block", E + 1)
    w, shared, inputs = both[:E], both[E:], tokens(32, skew="zipf")
    tile = as_fused(shipped_fused("w4a8_block")[0])
    wanted, stats = fuse(inputs, w, tile=tile, shared=shared)
    most = num_rows(32 * (K + 1), E + 1)
    assert ring(most, most // 2, tile.block_m)[1] > 0
    y, again = fuse(inputs, w, tile=tile, shared=shared, pool_rows=most // 2)
    assert torch.equal(y, wanted) and torch.equal(again, stats)


def test_more_slots_than_combine_has_bits_for_run_staged():
    both = weights_of("w4a8_block", 33)
    x = torch.zeros(1, both.hidden).bfloat16()
    idx = torch.arange(32)[None]
    for top_k, mode in ((31, "fused"), (32, "staged")):
        inputs = x, idx[:, :top_k], torch.ones(1, top_k)
        assert pretending.plan_of(inputs, both[:32], shared=both[32:]).mode == mode

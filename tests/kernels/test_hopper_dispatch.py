"""Routing and dispatch of the Hopper backend: every slot at its row, in the pool's format."""

from dataclasses import replace

import pytest
import torch

import megamoe as mm
from megamoe.engine.status import NONE
from megamoe.formats.quantize import dequantize
from megamoe.kernels.gluon.dispatch import Tokens, route
from megamoe.kernels.hopper import launch
from megamoe.kernels.portable.dispatch import Routing
from megamoe.planner.hopper import max_tiles, num_rows
from megamoe.planner.launches import GemmSwapAb
from megamoe.planner.tables import hopper as tables
from tests.kernels.steps import hopper_steps
from tests.kernels.support import DEVICE, MARKS

pytestmark = MARKS

# Tokens, slots each, experts; two chunks, three.
SIZES = {"small": (21, 3, 5), "middle": (53, 3, 5), "large": (87, 3, 5)}
FORMATS = {  # recipe, whether its weights fit E4M3: how tokens are held
    "codes": ("w8a8", True),
    "by_group": ("w4a8_block", True),
    "scaled": ("w4a8_block", False),
    "plain": ("w4a16", True),
    "mxfp8": ("w4a8", True),
    "mxfp4": ("w4a4", True),
    "nvfp4": ("nvfp4", True),
}


@pytest.fixture(autouse=True)
def _large_begins_early(monkeypatch):
    """The interpreter is slow: the paths for more slots are taken from 65 and 161 on."""
    monkeypatch.setattr(tables, "SMALL_SLOTS", 64)
    monkeypatch.setattr(tables, "MIDDLE_SLOTS", 160)
    monkeypatch.setattr(tables, "COUNT_CHUNK", 64)


class Routed:
    """One call of `route` over poisoned memory, and the rows that it should have filled."""

    def __init__(
        self, x, idx, weight, num_experts, *, name="plain", block=8, num_valid=None, first_slot=0,
        num_dest=0, **rest,
    ):  # fmt: skip
        recipe, fits = FORMATS[name]
        self.how = launch.arithmetic(recipe, fits_e4m3=fits)
        slots = idx.numel()
        device = torch.device(DEVICE)
        self.pool = launch.pool(self.how, slots, x.shape[1], num_experts, block, device)
        for t in self.pool:
            t.view(torch.uint8).fill_(0xFF)
        self.error = torch.full((1,), NONE, dtype=torch.int32)
        self.stats = torch.full((num_experts,), 7)
        self.idx, self.weight = torch.full_like(idx, 77, dtype=torch.int32), weight * 0 + 77
        self.error, self.stats, self.idx, self.weight, x, idx, weight = (
            t.to(device) for t in (self.error, self.stats, self.idx, self.weight, x, idx, weight)
        )
        count = None if num_valid is None else torch.tensor([num_valid], dtype=torch.int32)
        given = Routing(
            idx, weight, self.idx, self.weight, self.error,
            None if count is None else count.to(device),
        )  # fmt: skip
        tile = GemmSwapAb(block, 2, 1, 2)
        steps = hopper_steps(x, idx, tile, num_experts)
        route(
            Tokens(x, **rest), given, self.how.acts, self.pool, steps, stats=self.stats,
            first_slot=first_slot, num_dest=num_dest, by_group=self.how.to_e4m3,
        )  # fmt: skip
        self.block, self.num_experts, top_k = block, num_experts, idx.shape[1]
        self.legal = self.idx.flatten().cpu()
        self.slot = self.legal.argsort(stable=True)[int((self.legal < 0).sum()) :]
        self.token = self.slot // top_k
        self.dest = self.token * (num_dest or top_k) + first_slot + self.slot % top_k
        self.count = torch.bincount(self.legal[self.slot], minlength=num_experts)
        self.first = torch.cumsum((self.count + 7) // 8 * 8, 0) - (self.count + 7) // 8 * 8
        ranks = [torch.arange(int(n)) for n in self.count]
        self.row = torch.cat([f + r for f, r in zip(self.first, ranks, strict=True)])

    def check_maps(self):
        """Rows, tiles and statistics of the slots that `idx` says are legal."""
        pool, rows = self.pool, self.row.to(DEVICE)
        assert torch.equal(pool.dest[rows].cpu().long(), self.dest)
        assert torch.equal(pool.weight[rows], self.weight.flatten()[self.slot.to(DEVICE)])
        tiles = [
            [expert, first + at, first + min(at + self.block, count)]
            for expert, (first, count) in enumerate(
                zip(self.first.tolist(), self.count.tolist(), strict=True)
            )
            for at in range(0, count, self.block)
        ]
        assert int(pool.num_tiles[0]) == len(tiles) <= len(pool.tiles)
        assert pool.tiles[: len(tiles), :3].tolist() == tiles
        assert torch.equal(self.stats.cpu(), self.count + 7)

    def rows(self):
        """The pool's rows in the order of `token`, and their scales by token."""
        at = self.row.to(DEVICE)
        data = self.pool.data.view(torch.uint8)[at].view(self.pool.data.dtype).cpu()
        if self.how.to_e4m3:  # columns as they were: `device.columns`
            raw = data.view(torch.uint8).unflatten(1, (-1, 8, 4, 4)).transpose(2, 3)
            data = raw.flatten(1).view(data.dtype)
        return data, (self.pool.scale[:, at].T.cpu() if self.how.is_promoted else None)


def inputs(size, hidden=64, seed=0, masked=0.2):
    num, top_k, experts = SIZES[size]
    rng = torch.Generator().manual_seed(seed)
    x = torch.randn(num, hidden, generator=rng).bfloat16()
    idx = torch.randint(experts, (num, top_k), generator=rng)  # the same expert twice, at times
    idx[torch.rand(num, top_k, generator=rng) < masked] = -1
    return x, idx, torch.rand(num, top_k, generator=rng), experts


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("size", SIZES)
def test_bad_slots_are_masked_and_the_first_is_reported(size, dtype):
    x, idx, weight, experts = inputs(size)
    idx[0] = -1
    weight[0] = float("nan")  # not read
    idx[4, 1], idx[5, 0], idx[7, 2] = experts, -2, experts + 1000
    idx[8, :2], weight[8, :2] = 1, torch.tensor([float("nan"), float("inf")])
    if dtype == torch.int64:
        idx[9, 0], idx[9, 1] = 2**32 + 1, -(2**32)  # 1 and 0 in 32 bits
    bad = (idx < -1) | (idx >= experts) | ((idx >= 0) & ~weight.isfinite())
    got = Routed(x, idx.to(dtype), weight, experts)
    assert torch.equal(got.idx.cpu().long(), idx.masked_fill(bad, -1))
    live = (idx >= 0) & ~bad
    assert torch.equal(got.weight.cpu(), weight.masked_fill(~live, 0.0))
    assert int(got.error) == 4 * idx.shape[1] + 1
    got.check_maps()


@pytest.mark.parametrize("size", SIZES)
def test_rows_behind_the_valid_ones_are_padding(size):
    x, idx, weight, experts = inputs(size)
    wanted = idx.clone()
    wanted[13:] = -1
    x[13:], idx[13:], weight[13:] = float("nan"), 12345, float("inf")
    got = Routed(x, idx, weight, experts, num_valid=13)
    assert torch.equal(got.idx.cpu().long(), wanted) and int(got.error) == NONE
    got.check_maps()


@pytest.mark.parametrize("block", [8, 64, 256])
@pytest.mark.parametrize("size", SIZES)
def test_tiles_cover_each_expert(size, block):
    x, idx, weight, experts = inputs(size)
    Routed(x, idx, weight, experts, block=block).check_maps()


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("expert", [-1, 0, 4])
def test_one_expert_takes_all_or_none_takes_any(size, expert):
    x, idx, weight, experts = inputs(size)
    got = Routed(x, torch.full_like(idx, expert), weight, experts, block=16)
    got.check_maps()
    live = idx.numel() if expert >= 0 else 0
    assert int(got.count.sum()) == live and int(got.pool.num_tiles[0]) == -(-live // 16)


@pytest.mark.parametrize("size", SIZES)
def test_slots_may_be_some_of_those_that_combine_adds(size):
    x, idx, weight, experts = inputs(size)
    Routed(x, idx, weight, experts, first_slot=6, num_dest=9).check_maps()


def held(q, name):
    """What the pool keeps of quantised tokens: values, and scales by token where it has any."""
    if name in ("codes", "by_group", "plain"):
        return q.data, q.scale
    if name == "scaled":
        return q.data.to(torch.bfloat16), q.scale
    if q.global_scale is not None:
        q = replace(q, global_scale=torch.ones_like(q.global_scale))
    return dequantize(q).bfloat16(), None


def assert_rows(got, data, scale, hidden):
    """The pool's rows are these tokens, zero beyond their width; scales there are 1."""
    rows, scales = got.rows()
    kind = torch.uint8 if rows.dtype == torch.float8_e4m3fn else torch.int16
    wanted = data.view(kind)[got.token]
    assert torch.equal(rows.view(kind)[:, :hidden], wanted)
    assert rows.shape[1] % 256 == 0 and not rows.view(kind)[:, hidden:].any()
    if scale is not None:
        blocks = scale.shape[1]
        wanted = scale[got.token].nan_to_num(-1.0)
        assert torch.equal(scales[:, :blocks].nan_to_num(-1.0), wanted)
        assert (scales[:, blocks:] == 1).all()


FORMAT_OF = {"codes": "fp8_1x128", "by_group": "fp8_1x128", "scaled": "fp8_1x128", "plain": "bf16"}
X_GLOBAL = 0.37


def quantised(x, name):
    extra = {"global_scale": X_GLOBAL} if name == "nvfp4" else {}
    return mm.quantize(x, FORMAT_OF.get(name, name), **extra)


@pytest.mark.parametrize(("size", "hidden"), [("small", 288), ("small", 1184), ("large", 160)])
@pytest.mark.parametrize("name", FORMATS)
def test_tokens_are_quantised_into_their_rows(name, size, hidden):
    x, idx, weight, experts = inputs(size, hidden)
    x[1], x[2] = 0.0, x[2] * 2.0**-60
    if name in ("codes", "by_group", "scaled", "plain"):
        x[3, hidden - 1] = float("nan")
    g = torch.tensor(X_GLOBAL) if name == "nvfp4" else None
    got = Routed(x, idx, weight, experts, name=name, g=None if g is None else g.to(DEVICE))
    assert_rows(got, *held(quantised(x, name), name), hidden)
    if g is not None:
        assert (got.pool.factor[got.row.to(DEVICE)].cpu() == g).all()
    got.check_maps()


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", FORMATS)
def test_ready_tokens_are_copied_into_their_rows(name, size):
    """Rows may lie apart; NVFP4 tokens may have a global scale each."""
    hidden = 288
    x, idx, weight, experts = inputs(size, hidden)
    data, scale = held(quantised(x, name), name)
    apart = torch.cat((data, data), 1)[:, :hidden]
    rest = {"scale": None if scale is None else scale.to(DEVICE)}
    if name == "nvfp4":
        rest["g"] = torch.linspace(1, 2, len(x)).to(DEVICE)
    got = Routed(apart, idx, weight, experts, name=name, is_ready=True, **rest)
    assert_rows(got, data, scale, hidden)
    if name == "nvfp4":
        assert torch.equal(got.pool.factor[got.row.to(DEVICE)], rest["g"][got.token.to(DEVICE)])
    got.check_maps()


@pytest.mark.parametrize("num_experts", [1, 3, 8])
def test_any_routing_fits_the_pool(num_experts):
    for slots in range(1, 60):
        for used in range(1, min(slots, num_experts) + 1):
            for counts in ([slots - used + 1] + [1] * (used - 1), _even(slots, used)):
                assert sum(-(-c // 8) * 8 for c in counts) <= num_rows(slots, num_experts)
                for block in (8, 16):
                    assert sum(-(-c // block) for c in counts) <= max_tiles(
                        slots, num_experts, block
                    )


def _even(slots, used):
    return [slots // used + (i < slots % used) for i in range(used)]

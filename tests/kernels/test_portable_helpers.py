"""Quantising, dispatch and sorting kernels: the bytes of `formats`, the maps of `routing`."""

import pytest
import torch
import triton.language as tl

import megamoe as mm
from megamoe.engine.status import NONE
from megamoe.kernels.portable import grid
from megamoe.kernels.portable.acts import CODES, PLAIN
from megamoe.kernels.portable.combine import combine
from megamoe.kernels.portable.dispatch import Routing, dispatch
from megamoe.kernels.portable.sort import Order, sort_slots
from megamoe.planner import portable
from megamoe.routing.permute import permute
from tests.kernels.steps import combine_step, quantize, rows_step, sort_steps
from tests.kernels.support import DEVICE, INTERPRETED, MARKS, in_interpreter

pytestmark = MARKS

FORMATS = ("mxfp8", "mxfp4", "nvfp4", "fp8_1x128", "fp8_combine")


def bits(t):
    return t.contiguous().view(torch.int32 if t.dtype == torch.float32 else torch.uint8).cpu()


def assert_same(a, b):
    assert torch.equal(bits(a.data), bits(b.data))
    canonical = [
        q.scale.nan_to_num(7.0) if q.scale.dtype == torch.float32 else q.scale for q in (a, b)
    ]
    assert torch.equal(bits(canonical[0]), bits(canonical[1]))


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(1, 32), (5, 96), (7, 2880), (3, 512)], ids=str)
def test_quantised_bytes_are_those_of_formats(name, dtype, shape):
    rng = torch.Generator().manual_seed(shape[0])
    x = torch.randn(*shape, generator=rng)
    x *= torch.exp2(torch.randint(-130, 100, (shape[0], 1), generator=rng).float())
    x = x.to(dtype)
    if shape[0] > 4:
        x[0, 3], x[1, 40], x[2, :32], x[3, ::7] = float("nan"), float("-inf"), 0.0, -0.0
    assert_same(quantize(x.to(DEVICE), name), mm.quantize(x, name))


@pytest.mark.parametrize("name", FORMATS)
def test_every_bf16_value_gets_the_bytes_of_formats(name):
    codes = torch.arange(-(2**15), 2**15, 32 if INTERPRETED else 1, dtype=torch.int32)
    values = codes.to(torch.int16).view(torch.bfloat16)
    x = torch.zeros(len(values), 128, dtype=torch.bfloat16)
    x[:, 5] = values
    x[:, 9] = 1.5
    x = x.view(-1, 1024)  # eight blocks a row
    assert_same(quantize(x.to(DEVICE), name), mm.quantize(x, name))


@pytest.mark.parametrize("name", ["mxfp4", "nvfp4"])
def test_rows_that_are_no_whole_words_get_the_same_bytes(name):
    """BF16 rows are packed two at a time where they can be; odd strides and offsets cannot."""
    wide = torch.randn(5, 2 * 96 + 1, generator=torch.Generator().manual_seed(0)).bfloat16()
    for x in (wide[:, :96], wide[:, 1:97], wide[2:4, 97:]):
        there = wide.to(DEVICE).as_strided(x.shape, x.stride(), x.storage_offset())
        assert_same(quantize(there, name), mm.quantize(x.contiguous(), name))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("g", [1e-30, 1e-12, 0.37, 1.0, 1e12, 1e30])
def test_nvfp4_under_a_global_scale(g, dtype):
    rng = torch.Generator().manual_seed(0)
    num = 120 if INTERPRETED else 600
    x = torch.randn(num, 64, generator=rng)
    x *= torch.exp2(torch.randint(-40, 40, (num, 1), generator=rng).float()) * g
    x = x.to(dtype)
    wanted = mm.quantize(x, "nvfp4", global_scale=g)
    assert_same(quantize(x.to(DEVICE), "nvfp4", g=torch.tensor(g, device=DEVICE)), wanted)


def test_nvfp4_quotients_next_to_ties():
    """A divisor of all ones puts quotients of powers of two half an ulp above one."""
    ones = 2 - 2**-23
    values = torch.tensor([12, 0.5, 1, 1.5, 2.5, 3.5, 5, 7, 10, 0.25, 3, 0, -0.5, -1.5, -5, -10])
    values = torch.stack([values, values.clamp(-1, 1)])[:, None]
    x = (values * torch.exp2(torch.arange(-6, 7.0))[:, None]).bfloat16().view(-1, 16)
    for g in (ones, ones / 4, ones * 2**8 / 3):  # steps of 12 are all ones; the last makes 6 g so
        wanted = mm.quantize(x, "nvfp4", global_scale=g)
        assert_same(quantize(x.to(DEVICE), "nvfp4", g=torch.tensor(g, device=DEVICE)), wanted)


@pytest.mark.parametrize(
    ("num", "experts", "top_k", "tile"),
    [(1, 4, 1, 16), (10, 8, 3, 16), (100, 32, 6, 16), (300, 33, 8, 64), (7, 300, 2, 64)],
)
def test_sorting_gives_the_maps_of_routing(num, experts, top_k, tile):
    rng = torch.Generator().manual_seed(num)
    idx = torch.randint(-1, experts, (num, top_k), generator=rng)
    wanted = permute(idx, experts, tile)
    order = Order.empty(num * top_k, experts, tile, torch.device(DEVICE))
    for t in order[:-1]:
        t.fill_(-77)
    stats = torch.full((experts,), 5, dtype=torch.int64, device=DEVICE)
    steps = sort_steps(num * top_k, experts, tile)
    sort_slots(idx.int().to(DEVICE), order, steps, stats)
    assert torch.equal(order.counts.cpu(), wanted.counts)
    assert torch.equal(stats.cpu() - 5, wanted.counts.long())
    for name in ("tile_idx_to_group_idx", "tile_idx_to_mn_limit", "num_non_exiting_tiles"):
        assert torch.equal(getattr(order, name).cpu(), getattr(wanted, name)), name
    used = wanted.permuted_idx_to_expanded_idx >= 0
    got = order.permuted_idx_to_expanded_idx.cpu()
    assert torch.equal(got[used], wanted.permuted_idx_to_expanded_idx[used])


@pytest.mark.parametrize("id_dtype", [torch.int32, torch.int64])
def test_dispatch_masks_what_is_not_legal_and_keeps_the_first(id_dtype):
    idx = torch.tensor([[0, 3], [-1, 2], [7, 1], [1, -9], [2, 0], [3, 3]], dtype=id_dtype)
    weight = torch.ones(6, 2)
    weight[4, 1] = float("nan")
    weight[1, 0] = float("inf")  # masked: never read
    idx, weight = idx.to(DEVICE), weight.to(DEVICE)
    out, out_w = torch.empty(6, 2, dtype=torch.int32, device=DEVICE), torch.empty_like(weight)
    bad_slot = torch.full((1,), NONE, dtype=torch.int32, device=DEVICE)
    count = torch.tensor([5], dtype=torch.int32, device=DEVICE)
    routing = Routing(idx, weight, out, out_w, bad_slot, count)
    step = rows_step(6, 1, PLAIN)
    dispatch(None, None, None, PLAIN, routing=routing, num_experts=4, step=step)
    assert out.tolist() == [[0, 3], [-1, 2], [-1, 1], [1, -1], [2, -1], [-1, -1]]
    assert bad_slot.item() == 2 * 2 + 0
    assert out_w.isfinite().all()


def dispatched(x, name, idx, weight, num_valid):
    """Bytes, scales, ids, weights and the first error of one launch; 32 experts."""
    data = torch.full((x.shape[0], x.shape[1] // 2), 77, dtype=torch.uint8, device=DEVICE)
    scale = torch.full_like(data[:, :: CODES[name].GROUP.value // 2], 77)
    out, out_w = torch.full_like(idx, 77, dtype=torch.int32), torch.full_like(weight, 77.0)
    bad_slot = torch.full((1,), NONE, dtype=torch.int32, device=DEVICE)
    routing = Routing(idx, weight, out, out_w, bad_slot, num_valid)
    g = torch.full((), 0.37, device=DEVICE) if name == "nvfp4" else None
    step = rows_step(*x.shape, CODES[name], is_bf16=x.dtype == torch.bfloat16)
    dispatch(x, data, scale, CODES[name], g=g, routing=routing, num_experts=32, step=step)
    return data, scale, out, out_w, bad_slot


@pytest.mark.parametrize("name", ["mxfp4", "nvfp4"])
@pytest.mark.parametrize("id_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize(
    ("shape", "top_k", "num_valid"),
    [((1, 32), 1, None), ((5, 96), 3, 4), ((7, 2880), 6, 5), ((4, 2048), 8, None), ((3, 64), 2, 0)],
    ids=str,
)
def test_packing_together_with_the_routing(name, id_dtype, shape, top_k, num_valid):
    """The bytes of `formats`, and the routing of the general kernel, which FP32 tokens take."""
    rng = torch.Generator().manual_seed(shape[0])
    x = torch.randn(*shape, generator=rng).bfloat16()
    idx = torch.randint(-1, 32, (shape[0], top_k), generator=rng).to(id_dtype)
    weight = torch.rand(shape[0], top_k, generator=rng)
    if shape[0] > 4:
        x[1, 3], idx[2, 1], idx[3, 0], idx[4, 2], weight[3, 2] = float("nan"), 32, -2, 7, torch.inf
        idx[3, 2], weight[1, 1], idx[1, 1] = 1, float("nan"), -1  # the latter is masked: never read
    x, idx, weight = x.to(DEVICE), idx.to(DEVICE), weight.to(DEVICE)
    count = None if num_valid is None else torch.tensor([num_valid], device=DEVICE).int()
    got = dispatched(x, name, idx, weight, count)
    for a, b in zip(got, dispatched(x.float(), name, idx, weight, count), strict=True):
        assert torch.equal(bits(a), bits(b))
    wanted = mm.quantize(x.cpu(), name, **({"global_scale": 0.37} if name == "nvfp4" else {}))
    assert torch.equal(got[0].cpu(), bits(wanted.data))
    assert torch.equal(got[1].cpu(), bits(wanted.scale))
    assert got[4].item() == (2 * top_k + 1 if shape[0] > 4 else NONE)
    if num_valid is not None:
        assert (got[2][num_valid:] == -1).all() and (got[3][num_valid:] == 0).all()


@in_interpreter("compiled kernels keep the limit they were made with")
@pytest.mark.parametrize("name", [*FORMATS, "combine"])
def test_more_rows_than_one_axis_of_a_grid_holds(name, monkeypatch):
    monkeypatch.setattr(grid, "MAX_BLOCKS", tl.constexpr(3))
    monkeypatch.setattr(portable, "GRID_AXIS", 3)
    x = torch.randn(23, 96, generator=torch.Generator().manual_seed(0)).bfloat16()
    if name == "combine":
        rows, idx, weight = x[:22].view(11, 2, 96), torch.zeros(11, 2), torch.ones(11, 2)
        y = torch.full((11, 96), 7.0, dtype=torch.bfloat16)
        combine(rows, None, idx.int(), weight, y, step=combine_step(11, 96), weighted=False)
        assert torch.equal(y, rows.float().sum(1).bfloat16())
    else:
        assert_same(quantize(x, name), mm.quantize(x, name))

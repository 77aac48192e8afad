"""The grouped GEMM alone, and rows that come quantised: against `formats` and float64."""

import pytest
import torch

import megamoe as mm
from megamoe.engine import grouped as engine
from megamoe.formats.quantize import dequantize, weight_global_scale
from megamoe.formats.spec import recipe_named
from megamoe.kernels.portable.decode_tokens import TOKEN_FORMATS, decode_tokens
from megamoe.kernels.portable.k_order import position
from megamoe.planner.launches import PortableGemm as Tile
from megamoe.problem import RECIPES
from tests.kernels.steps import arithmetic, decode_step, grouped_gemm
from tests.kernels.support import DEVICE, INTERPRETED, MARKS, error, tolerance

pytestmark = MARKS

N, K = (96, 192) if INTERPRETED else (480, 736)
COUNTS = {
    "ragged": [3, 17, 1, 33, 5],
    "empty": [0, 9, 0, 0, 20, 0],
    "one takes all": [0, 0, 40],
    "one group": [19],
    "no rows": [0, 0],
    "wide tiles": [70, 3, 90],
}
VARIANTS = [
    {"schedule": schedule, "sort_by_m": sort_by_m}
    for schedule in ("static", "dynamic")
    for sort_by_m in (False, True)
]


def operands(recipe, counts, *, seed=0):
    row, rng = recipe_named(recipe), torch.Generator().manual_seed(seed)
    x = torch.randn(sum(counts), K, generator=rng).bfloat16()
    w = (torch.randn(len(counts), N, K, generator=rng) / K**0.5).bfloat16()
    of_x, of_w = {}, {}
    if row.weights.has_global:
        of_w = {"global_scale": weight_global_scale(w)}
    if row.acts.has_global:
        of_x = {"global_scale": 0.37}
    q = mm.quantize(x, row.acts.name, **of_x).to(DEVICE)
    return (
        q,
        mm.quantize(w, row.weights.name, **of_w).to(DEVICE),
        torch.tensor(counts, dtype=torch.int32, device=DEVICE),
    )


def exact(x, w, counts):
    parts = dequantize(x, torch.float64).split(counts.tolist())
    matrices = dequantize(w, torch.float64)
    return torch.cat([part @ matrices[g].T for g, part in enumerate(parts)]).bfloat16()


@pytest.mark.parametrize("counts", COUNTS.values(), ids=COUNTS)
@pytest.mark.parametrize("recipe", RECIPES)
def test_every_schedule_gives_the_product_and_the_same_bits(recipe, counts):
    x, w, on_device = operands(recipe, counts)
    variants = VARIANTS if recipe == "nvfp4" else VARIANTS[::3]
    outs = [grouped_gemm(x, w, on_device, **variant) for variant in variants]
    wanted = exact(x, w, on_device)
    assert outs[0].shape == wanted.shape and outs[0].dtype == torch.bfloat16
    assert error(outs[0], wanted) <= tolerance("bf16")
    assert all(torch.equal(outs[0], other) for other in outs[1:])


def test_tiles_change_no_bit():
    x, w, counts = operands("nvfp4", [7, 40, 0, 11])
    outs = [
        grouped_gemm(x, w, counts, tile=tile, schedule="dynamic")
        for tile in (Tile(16, 64, 128, 4, 2), Tile(32, 128, 256, 4, 2, 4), Tile(64, 128, 128, 4, 2))
    ]
    assert torch.equal(outs[0], outs[1]) and torch.equal(outs[0], outs[2])


def test_the_engines_grouped_gemm_is_this_one():
    x, w, counts = operands("w4a8", [7, 40, 0, 11])
    wanted = grouped_gemm(x, w, counts)
    for given in ({}, {"schedule": "dynamic", "sort_by_m": True, "block_m": 32}):
        assert torch.equal(engine.grouped_gemm(x, w, counts, backend="portable", **given), wanted)


def test_one_global_scale_serves_all_groups():
    x, w, counts = operands("nvfp4", [7, 4])
    one = mm.quantize(dequantize(w), "nvfp4", global_scale=0.01)
    assert error(grouped_gemm(x, one, counts), exact(x, one, counts)) <= tolerance("bf16")


@pytest.mark.parametrize("counts", [[5, -3, 40, 7], [60, 60, 60], [10, 60], [0, 0]], ids=str)
@pytest.mark.parametrize("sort_by_m", [False, True])
def test_counts_that_do_not_add_up_stay_in_bounds(counts, sort_by_m):
    """They are never read back, so they may be wrong; the sanitizer runs this too."""
    x, w, _ = operands("bf16", [20, 10, 3, 2][: len(counts)])
    given = torch.tensor(counts, dtype=torch.int32, device=DEVICE)
    y = grouped_gemm(x, w, given, sort_by_m=sort_by_m)
    if not sort_by_m:
        first = counts[0]
        wanted = (x.data[:first].double() @ w.data[0].double().T).bfloat16()
        assert error(y[:first], wanted) <= tolerance("bf16")


@pytest.mark.parametrize("name", TOKEN_FORMATS)
def test_rows_that_come_quantised_keep_their_values(name):
    rng = torch.Generator().manual_seed(0)
    x = torch.randn(70, 160, generator=rng)
    x *= torch.exp2(torch.randint(-100, 100, (70, 1), generator=rng).float())
    x[3, 5], x[4] = float("nan"), 0.0
    recipes = {"bf16": "w4a16", "mxfp4": "w4a4", "mxfp8": "w4a8", "fp8_1x128": "w4a8_block"}
    q = mm.quantize(x, name).to(DEVICE)
    how = arithmetic(recipes.get(name, name))
    held = decode_tokens(q, how, decode_step(q, how))
    wanted = dequantize(q) if held.scale is None else q.data.to(torch.float32)
    assert held.data.dtype == torch.bfloat16 and (held.data == 0).sum() >= 70 * 96
    got = held.data[:, position(torch.arange(160, device=DEVICE))].float()
    assert torch.equal(got.nan_to_num(7.0), wanted.bfloat16().float().nan_to_num(7.0))


def test_operands_that_do_not_fit_are_refused():
    x, w, counts = operands("nvfp4", [3, 4])
    other = operands("w4a8", [3, 4])
    with pytest.raises(mm.MegaMoEError, match="one recipe"):
        grouped_gemm(other[0], w, counts)
    with pytest.raises(mm.MegaMoEError, match="must be int32"):
        grouped_gemm(x, w, counts.long())
    with pytest.raises(mm.MegaMoEError, match=r"counts must be \[2\]"):
        grouped_gemm(x, w, counts[:1])
    with pytest.raises(mm.MegaMoEError, match="schedule must be one of"):
        engine.grouped_gemm(x, w, counts, backend="portable", schedule="random")

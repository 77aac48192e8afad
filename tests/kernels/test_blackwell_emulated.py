"""The Blackwell kernels as they stand, on a CPU, against the reference: every recipe and tile.

The GEMM runs under the proof's scheduler (`emulator/tensor_memory.py`): copies and products
complete late, in the order that PTX promises and no other.
"""

import pytest
import torch

import megamoe as mm
from megamoe.errors import MegaMoEError
from megamoe.planner.blackwell import shipped
from megamoe.planner.numerics import BLACKWELL_RECIPES
from megamoe.planner.tables import hopper as permute_tables
from megamoe.problem import Options
from megamoe.routing.samplers import sample_routing
from tests.emulator import blackwell
from tests.kernels.blackwell import tile_name
from tests.kernels.support import INTERPRETED, error, tolerance

pytestmark = pytest.mark.skipif(INTERPRETED, reason="Triton's interpreter knows no Gluon")

K = 2
# Sums of these are exact in FP32 at the sizes here, so that any order has the reference's bits.
EXACT = ("w4a8", "w4a4", "nvfp4")
SEEDS = (None, 1, 4)


def tiled():
    """Every tile under every seed; in a plain run each tile under one of them, in turn."""
    tiles = [(recipe, tile) for recipe in BLACKWELL_RECIPES for tile in shipped(recipe)]
    for number, (recipe, tile) in enumerate(tiles):
        for seed in SEEDS:
            marks = () if seed == SEEDS[number % 3] else (pytest.mark.every,)
            yield pytest.param(
                recipe, tile, seed, id=f"{recipe}-{tile_name(tile)}-{seed}", marks=marks
            )


@pytest.fixture
def run(monkeypatch):
    """A call of the backend: run(inputs, w, ..., seed=) -> y."""

    gemm = blackwell.install(monkeypatch)

    def call(*args, seed=None, **rest):
        gemm.seed = seed
        return blackwell.layer(*args, **rest)

    return call


def weights_of(recipe, num=4, hidden=320, intermediate=160, has_bias=False):
    rng = torch.Generator().manual_seed(0)

    def normal(*shape):
        return torch.randn(shape, generator=rng)

    w13 = (normal(num, 2 * intermediate, hidden) / hidden**0.5).bfloat16()
    w2 = (normal(num, hidden, intermediate) / intermediate**0.5).bfloat16()
    bias = {"b13": normal(num, 2 * intermediate) / 4, "b2": normal(num, hidden) / 4}
    return mm.ExpertWeights.quantize(w13, w2, recipe, **(bias if has_bias else {}))


def tokens(num, experts=4, hidden=320, seed=0, **routing):
    x = torch.randn(num, hidden, generator=torch.Generator().manual_seed(seed)).bfloat16()
    return x, *sample_routing(num, experts, K, seed=seed, **routing)


def loads(*counts):
    """Routing that gives each expert so many rows, in any order; what is left is masked."""
    slots = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))
    slots = torch.cat((slots, slots.new_full((len(slots) % K,), -1)))
    slots = slots[torch.randperm(len(slots), generator=torch.Generator().manual_seed(0))]
    x, _, gates = tokens(len(slots) // K)
    return x, slots.view(-1, K), gates


def assert_agrees(y, inputs, w, options=None, **rest):
    options = options or Options()
    wanted = mm.moe(
        *inputs, w, backend="reference", activation=options.activation, clamp=options.clamp,
        weight_at=options.weight_at, combine=options.combine, **rest,
    )  # fmt: skip
    assert y.shape == wanted.shape
    assert error(y, wanted) <= tolerance(w.recipe, options.combine)
    if w.recipe in EXACT:
        assert torch.equal(y, wanted)


@pytest.mark.parametrize(("recipe", "tile", "seed"), list(tiled()))
def test_every_tile_takes_experts_with_no_one_almost_a_tile_a_tile_and_more_rows(
    recipe, tile, seed, run
):
    """And several tiles and a rest; with 1 and 4 roles are preempted, copies and products late."""
    m = tile.block_m
    inputs = loads(0, 1, m - 1, m, m + 1, 3 * m + 5)
    w = weights_of(recipe, 6)
    assert_agrees(run(inputs, w, block_m=m, seed=seed), inputs, w)


@pytest.mark.parametrize("recipe", BLACKWELL_RECIPES)
def test_all_tiles_and_all_depths_have_the_same_bits(recipe, run):
    """And of seeds: each gives other interleavings (a slow role in most)."""
    w, inputs = weights_of(recipe, 3), tokens(20, 3, skew="zipf")
    found = [
        run(inputs, w, block_m=tile.block_m, num_stages=2, seed=seed)
        for seed, tile in enumerate(shipped(recipe)[:4])
    ]
    if recipe in ("w4a4", "nvfp4", "bf16"):  # a stage may have other depths
        found.append(run(inputs, w, block_m=16, block_k=128, seed=7))
    assert all(torch.equal(found[0], other) for other in found[1:])


@pytest.mark.parametrize(
    "block_m", [16, 64, *(pytest.param(m, marks=pytest.mark.every) for m in (32, 128))]
)
def test_packed_fp4_has_the_same_bits_at_every_depth_of_a_stage(block_m, run):
    """D015: 128, 256 and 512 of K, in each band of load; widths that are whole stages of none."""
    w, inputs = weights_of("w4a4", 2, 1120, 288), tokens(30, 2, 1120)
    found = [run(inputs, w, block_m=block_m, block_k=k, seed=k) for k in (128, 256, 512)]
    assert_agrees(found[0], inputs, w)
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])


@pytest.mark.parametrize("recipe", ["w4a8", "w4a16", "w4a8_block"])
def test_tiles_that_are_drawn_have_the_bits_of_those_that_are_dealt(recipe, run, monkeypatch):
    """And sorted ones, listed by either launch; each seed delays other roles."""
    w, inputs = weights_of(recipe), tokens(40, skew="zipf", masked_ratio=0.2)
    found = [run(inputs, w, block_m=16)]
    for seed, (schedule, small) in enumerate((("dynamic", 1024), ("sorted", 1024), ("sorted", 64))):
        if recipe == "w4a8" or seed > 1:
            monkeypatch.setattr(permute_tables, "SMALL_SLOTS", small)
            found.append(run(inputs, w, block_m=16, schedule=schedule, seed=seed))
    assert_agrees(found[0], inputs, w)
    assert all(torch.equal(found[0], other) for other in found[1:])


@pytest.mark.parametrize("recipe", BLACKWELL_RECIPES)
def test_masks_repeats_biases_and_the_other_activation(recipe, run):
    w, options = weights_of(recipe, has_bias=True), Options("gpt_oss", 7.0)
    x, idx, gates = tokens(17, masked_ratio=0.3, skew="zipf")
    idx[3], idx[5] = idx[3, 0], -1  # an expert twice, a token without any
    inputs = x, idx, gates
    stats = torch.zeros(4, dtype=torch.int64)
    y = run(inputs, w, options, stats=stats, seed=1)
    assert_agrees(y, inputs, w, options)
    assert stats.tolist() == [int((idx == e).sum()) for e in range(4)] and not y[5].any()


@pytest.mark.parametrize("recipe", ["w4a8", "w8a8", "nvfp4", "w4a16"])
@pytest.mark.parametrize(("hidden", "intermediate"), [(480, 352), (256, 736)])
def test_widths_that_are_no_blocks(recipe, hidden, intermediate, run):
    """As 2880 is: a last block of 128 rows and columns, and a last stage, that are short."""
    w, inputs = weights_of(recipe, 3, hidden, intermediate), tokens(12, 3, hidden)
    options = Options(clamp=1.0, weight_at="combine")
    assert_agrees(run(inputs, w, options, seed=2), inputs, w, options)


# hidden, intermediate: gpt-oss's, and of the widest known models one width beside a short other.
WIDE = ((2880, 288), (7168, 96), (96, 7168))


@pytest.mark.parametrize(
    ("recipe", "widths"),
    [
        pytest.param(r, wide, marks=() if wide == WIDE[0] or r in ("w4a8", "w8a8") else
                     (pytest.mark.every,), id=f"{r}-{wide[0]}x{wide[1]}")
        for r in BLACKWELL_RECIPES for wide in WIDE
    ],
)  # fmt: skip
def test_the_widths_of_known_models(recipe, widths, run):
    """So many steps that every ring goes round often."""
    w, inputs = weights_of(recipe, 3, *widths), tokens(9, 3, widths[0])
    assert_agrees(run(inputs, w, seed=3), inputs, w)


@pytest.mark.parametrize("recipe", ["w4a8", "w4a4", "nvfp4", "w8a8"])
def test_quantised_tokens_have_the_bits_of_those_that_are_quantised_here(recipe, run):
    w, inputs = weights_of(recipe), tokens(9)
    name = {"w4a8": "mxfp8", "w4a4": "mxfp4", "nvfp4": "nvfp4", "w8a8": "fp8_1x128"}[recipe]
    given = {"global_scale": 1.0} if recipe == "nvfp4" else {}
    ready = mm.quantize(inputs[0], name, **given), *inputs[1:]
    assert torch.equal(run(ready, w), run(inputs, w))


def test_rows_are_the_same_however_they_are_found(run, monkeypatch):
    w, inputs = weights_of("w4a4"), tokens(90, masked_ratio=0.2, skew="zipf")
    found = []
    for small, middle in ((1024, 4096), (64, 4096), (64, 128)):
        monkeypatch.setattr(permute_tables, "SMALL_SLOTS", small)
        monkeypatch.setattr(permute_tables, "MIDDLE_SLOTS", middle)
        found.append(run(inputs, w))
    assert_agrees(found[0], inputs, w)
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])


def test_shared_experts_and_rows_in_fp8(run):
    w, shared = weights_of("w4a8"), weights_of("bf16", 1)
    inputs, options = tokens(11), Options(combine="fp8")
    assert_agrees(run(inputs, w, options, shared), inputs, w, options, shared=shared)


@pytest.mark.parametrize("recipe", ["w4a8", "nvfp4", "w8a8"])
def test_a_token_that_is_not_finite_spoils_itself_only(recipe, run):
    w, inputs = weights_of(recipe), tokens(9)
    spoiled = inputs[0].clone()
    spoiled[4, 7] = float("inf")
    y, plain = run((spoiled, *inputs[1:]), w), run(inputs, w)
    others = [t for t in range(9) if t != 4]
    assert y[4].isnan().all() and torch.equal(y[others], plain[others])


def test_other_activations_are_refused_by_name(run):
    with pytest.raises(MegaMoEError, match="blackwell backend computes swiglu and gpt_oss"):
        run(tokens(3), weights_of("w4a8"), Options("geglu"))


def test_a_scale_that_bf16_cannot_hold_is_refused_where_it_matters(run):
    w = weights_of("w4a16")
    w.w13.scale.view(torch.uint8)[0, 0, 0, 0] = 0
    w.w13.data[0, 0, 0, :16] = 0x77
    with pytest.raises(MegaMoEError, match=r"2\*\*-126 or more where w4a16 decodes"):
        run(tokens(3), w)

"""Blackwell's grouped GEMMs alone, emulated: the four variants, schedules, shapes A to D with fewer
outputs under their own tiles.

Wanted values are those of `formats` in float64, rounded where the contract rounds.
"""

import pytest
import torch

import megamoe as mm
from megamoe.bench.cells import UNEVEN_GEMMS
from megamoe.certify import grouped_checks
from megamoe.certify.checks import Failed
from megamoe.certify.target import Target
from megamoe.engine import planning
from megamoe.engine.grouped import grouped_finalize, grouped_gemm, grouped_swiglu
from megamoe.errors import DTypeError, MegaMoEError, NotAvailable, RangeError, ShapeError
from megamoe.formats.quantize import dequantize, weight_global_scale
from megamoe.formats.spec import recipe_named
from megamoe.planner.grouped import GroupedSpec, plan_grouped
from megamoe.planner.numerics import BLACKWELL_RECIPES
from megamoe.studies.deep_gemm.tcgen05 import grouped_tile, largest_first
from tests.emulator import blackwell
from tests.kernels.support import INTERPRETED, error, tolerance

pytestmark = pytest.mark.skipif(INTERPRETED, reason="Triton's interpreter knows no Gluon")

# Sums of these are exact in FP32 here, so that any order has the bits of float64.
EXACT = ("w4a8", "w4a4", "nvfp4")
COUNTS = [15, 0, 17, 1, 16]


@pytest.fixture
def gemm(monkeypatch):
    return blackwell.install_grouped(monkeypatch)


def quantized(recipe, x, w):
    row = recipe_named(recipe)
    of_x = {"global_scale": 0.37} if row.acts.has_global else {}
    of_w = {"global_scale": weight_global_scale(w)} if row.weights.has_global else {}
    return mm.quantize(x, row.acts.name, **of_x), mm.quantize(w, row.weights.name, **of_w)


def operands(recipe, counts, n=160, k=352, num_rows=None, lead=()):
    rng = torch.Generator().manual_seed(0)
    x = torch.randn(sum(counts) if num_rows is None else num_rows, k, generator=rng).bfloat16()
    w = (torch.randn(len(counts), *lead, n, k, generator=rng) / k**0.5).bfloat16()
    return *quantized(recipe, x, w), torch.tensor(counts, dtype=torch.int32)


def product(x, w, counts):
    """FP64 [M, n]."""
    parts = x.split(counts.tolist())
    return torch.cat([part @ matrix.T for part, matrix in zip(parts, w, strict=True)])


def agrees(recipe, got, wanted):
    assert got.shape == wanted.shape
    assert error(got, wanted) <= tolerance("bf16")
    return recipe not in EXACT or torch.equal(got, wanted.to(got.dtype))


def gated(x, w, counts):
    """FP32 activations of gate and up, each rounded to BF16 before."""
    gate = product(x, w[:, 0], counts).bfloat16().float()
    up = product(x, w[:, 1], counts).bfloat16().float()
    return torch.nn.functional.silu(gate) * up


@pytest.mark.parametrize("recipe", BLACKWELL_RECIPES)
def test_the_product_has_the_same_bits_in_every_schedule_order_and_width(recipe, gemm):
    x, w, counts = operands(recipe, COUNTS)
    wanted = product(dequantize(x, torch.float64), dequantize(w, torch.float64), counts).bfloat16()
    gemm.seed, outs = 3, []
    for given in (
        {"schedule": "static"},
        {"schedule": "dynamic"},
        {"schedule": "dynamic", "sort_by_m": True, "block_n": 128},
    ):
        outs.append(grouped_gemm(x, w, counts, backend="blackwell", block_m=16, **given))
        assert agrees(recipe, outs[-1], wanted)
    assert all(torch.equal(outs[0], other) for other in outs[1:])


@pytest.mark.parametrize("recipe", ["w4a4", "nvfp4", "w8a8", "bf16"])
def test_the_widest_tiles_narrow_or_not_have_the_same_bits(recipe, gemm):
    """127, 128 and 129 rows under the plan's own tile, at a width that is no whole stages."""
    x, w, counts = operands(recipe, [127, 0, 128, 129], n=288, k=2880)
    gemm.seed = 5
    outs = [grouped_gemm(x, w, counts, backend="blackwell", block_n=n) for n in (128, 256)]
    outs.append(grouped_gemm(x, w, counts, backend="blackwell", sort_by_m=True))
    wanted = product(dequantize(x, torch.float64), dequantize(w, torch.float64), counts).bfloat16()
    assert error(outs[0], wanted) <= tolerance("bf16")  # so wide, NVFP4's sums are not exact
    assert torch.equal(outs[0], outs[1]) and torch.equal(outs[0], outs[2])


def test_no_rows_are_no_launches(gemm):
    x, w, counts = operands("w4a8", [0, 0], lead=(2,))
    assert grouped_swiglu(x, w, counts, backend="blackwell").shape == (0, 160)
    x, w, counts = operands("w4a8", [0, 0])
    assert grouped_gemm(x, w, counts, backend="blackwell").shape == (0, 160)
    for deterministic in (True, False):
        y = grouped_finalize(
            x, w, counts, counts[:0], torch.ones(3, 2), backend="blackwell",
            deterministic=deterministic,
        )  # fmt: skip
        assert y.shape == (3, 160) and not y.any()
    assert not gemm.launches


@pytest.mark.parametrize("recipe", BLACKWELL_RECIPES)
def test_swiglu_quantises_rows_as_formats_do_gathered_or_not(recipe, gemm):
    """Gathered rows may repeat; their scales come with them."""
    fmt = recipe_named(recipe).acts
    given = {"acts_global": torch.tensor(0.01)} if fmt.has_global else {}
    gemm.seed = 1
    rows = torch.tensor([5, 0, 11, 5, 2, 8, 8, 1, 3, 10], dtype=torch.int32)
    x, w, counts = operands(recipe, [4, 0, 5, 1], num_rows=12, lead=(2,))
    exact, wide = dequantize(x, torch.float64), dequantize(w, torch.float64)
    wanted = gated(exact[rows.long()], wide, counts)
    lies = [mm.Quantized(
        x.data[rows.long()], None if x.scale is None else x.scale[rows.long()], x.format,
        (10, x.shape[1]), x.global_scale,
    ), {}]  # fmt: skip
    every = [lies] if recipe == "w4a16" else [lies, (x, {"rows": rows})]
    found = []
    for tokens, more in every:
        got = grouped_swiglu(tokens, w, counts, backend="blackwell", clamp=None, **more, **given)
        found.append(got)
        assert got.format == fmt.name and got.shape == wanted.shape
        ready = mm.quantize(wanted.bfloat16() if fmt.name == "bf16" else wanted, fmt.name,
                            **({"global_scale": 0.01} if fmt.has_global else {}))  # fmt: skip
        assert error(dequantize(got), dequantize(ready)) <= tolerance(recipe)
    for name, t in found[0].tensors().items():
        bits = (one.view(-1).view(torch.uint8) for one in (t, found[-1].tensors()[name]))
        assert torch.equal(*bits)


def test_rows_and_slots_that_are_not_there_touch_nothing(gemm):
    """They are never read back; the emulator holds every access."""
    x, w, counts = operands("w4a8", [2, 3], num_rows=4, lead=(2,))
    rows = torch.tensor([1, -7, 3, 4, 9000], dtype=torch.int32)
    acts = dequantize(grouped_swiglu(x, w, counts, rows=rows, backend="blackwell"))
    assert acts[[0, 2]].any(1).all() and not acts[[1, 3, 4]].any()
    x, w, counts = operands("w4a8", [2, 3])
    slots = torch.tensor([1, -1, 2, 6, 1 << 30], dtype=torch.int32)
    for deterministic in (True, False):
        y = grouped_finalize(
            x, w, counts, slots, torch.ones(3, 2), backend="blackwell", deterministic=deterministic
        )
        assert y[:2].any(1).all() and not y[2].any() and y.isfinite().all()


@pytest.mark.parametrize("recipe", ["w4a8", "w8a8"])
def test_scales_may_lie_by_columns(recipe, gemm):
    x, w, counts = operands(recipe, [3, 4])
    turned = mm.Quantized(x.data, x.scale.mT.contiguous().mT, x.format, x.shape)
    both = [grouped_gemm(one, w, counts, backend="blackwell") for one in (x, turned)]
    assert torch.equal(*both)


def test_rows_that_copies_cannot_read_are_refused(gemm):
    x, w, counts = operands("bf16", [3, 4])
    for data in (x.data.mT.contiguous().mT, torch.zeros(7 * 352 + 1).bfloat16()[1:].view(7, 352)):
        odd = mm.Quantized(data, None, "bf16", x.shape)
        with pytest.raises(ShapeError, match="multiples of 16 bytes"):
            grouped_gemm(odd, w, counts, backend="blackwell")
    x, w, counts = operands("bf16", [3, 4], num_rows=0, lead=(2,))
    with pytest.raises(ShapeError, match="rows that are gathered"):
        grouped_swiglu(x, w, counts, rows=torch.zeros(7, dtype=torch.int32), backend="blackwell")


def test_a_gather_has_a_line_of_each_row_at_every_load():
    for recipe in set(BLACKWELL_RECIPES) - {"w4a16"}:
        for rows in (8, 96, 128, 512, 640, 2048):
            spec = GroupedSpec(recipe, rows, 8, 256, 512, "gather")
            tile = plan_grouped(spec, "b200", backend="blackwell").gemm.config
            bits = recipe_named(recipe).acts.element.bits
            assert tile.block_k * bits // 8 == 128 and tile.num_stages >= 3


def test_a_scale_that_bf16_cannot_hold_is_refused(gemm):
    x, w, counts = operands("w4a16", [3, 4])
    w.scale.view(torch.uint8)[0, 0, 0], w.data[0, 0, :16] = 0, 0x77
    with pytest.raises(NotAvailable, match=r"2\*\*-126 or more where w4a16 decodes"):
        grouped_gemm(x, w, counts, backend="blackwell")


@pytest.mark.parametrize("recipe", ["w4a8", "nvfp4", "w8a8"])
def test_finalize_adds_the_weighted_rows_of_each_token(recipe, gemm):
    """In the order of slots, or by atomics in any; slots without a row add nothing."""
    x, w, counts = operands(recipe, [6, 2, 9], k=160)
    top_k, rng = 2, torch.Generator().manual_seed(2)
    slots = torch.randperm(10 * top_k, generator=rng)[:17].to(torch.int32)
    weights = torch.rand(10, top_k, generator=rng)
    rows = product(dequantize(x, torch.float64), dequantize(w, torch.float64), counts).bfloat16()
    placed = torch.zeros(10 * top_k, rows.shape[1])
    placed[slots.long()] = rows.float()
    both = placed.view(10, top_k, -1) * weights[..., None]
    wanted = (both[:, 0] + both[:, 1]).bfloat16()
    for seed, given in enumerate(({}, {"deterministic": False, "schedule": "dynamic"})):
        gemm.seed = seed
        y = grouped_finalize(x, w, counts, slots, weights, backend="blackwell", **given)
        assert agrees(recipe, y, wanted)


def test_the_variants_make_a_layer(gemm):
    """Gather and SwiGLU, then finalize: what `mm.moe` computes."""
    rng = torch.Generator().manual_seed(0)
    w13, w2 = torch.randn(3, 256, 96, generator=rng) / 10, torch.randn(3, 96, 128, generator=rng)
    w = mm.ExpertWeights.quantize(w13.bfloat16(), (w2 / 11).bfloat16(), "w4a8")
    x = torch.randn(7, 96, generator=rng).bfloat16()
    idx = torch.stack([torch.randperm(3, generator=rng)[:2] for _ in range(7)]).int()
    gates = torch.rand(7, 2, generator=rng)
    order = idx.flatten().sort(stable=True).indices.int()
    counts = torch.bincount(idx.flatten(), minlength=3).int()
    acts = grouped_swiglu(
        mm.quantize(x, "mxfp8"), w.w13, counts, rows=order // 2, backend="blackwell"
    )
    y = grouped_finalize(acts, w.w2, counts, order, gates, backend="blackwell")
    wanted = mm.moe(x, idx, gates, w, backend="reference", weight_at="combine")
    assert torch.equal(y, wanted)


@pytest.mark.parametrize("recipe", [
    pytest.param(r, marks=() if r == "nvfp4" else pytest.mark.every) for r in BLACKWELL_RECIPES
])  # fmt: skip
def test_a_certificate_covers_them(recipe, gemm, monkeypatch):
    """`auto` takes them with a recipe's certificate: its checks run them, see what is wrong."""
    target = Target("blackwell", torch.device("cpu"), (recipe,))
    (check,) = grouped_checks.all_checks(target)
    assert check.run().startswith("22 rows in 3 groups")

    def late(*given, deterministic, **rest):
        return grouped_finalize(*given, deterministic=deterministic, **rest) * (2 - deterministic)

    monkeypatch.setattr(grouped_checks, "grouped_finalize", late)
    with pytest.raises(Failed, match="sums of slots"):
        check.run()


def test_what_is_launched_is_what_the_plan_says(gemm):
    x, w, counts = operands("w4a8", COUNTS)
    spec = GroupedSpec("w4a8", len(x), len(counts), w.shape[1], w.shape[2])
    machine = planning.hardware_of(counts.device)
    for given in ({}, {"schedule": "static", "block_n": 128}, {"schedule": "dynamic"}):
        grouped_gemm(x, w, counts, backend="blackwell", **given)
        step = plan_grouped(spec, machine, backend="blackwell", **given).gemm
        grid, constants = gemm.launches[-1]
        assert grid == step.grid and constants.items() >= step.config.constants().items()
        wanted = {"DYNAMIC": given.get("schedule") != "static", "SOURCE": "rows", "STORE": "rows"}
        assert constants.items() >= wanted.items()  # 60 tiles at most for 3 SMs: drawn


@pytest.mark.parametrize("counts", [[5, -3, 40, 7], [60, 60], [0, 0]], ids=str)
def test_counts_that_do_not_add_up_stay_in_bounds(counts, gemm):
    """They are never read back, so they may be wrong; the emulator holds every access."""
    x, w, _ = operands("bf16", [20, 10, 3, 2][: len(counts)])
    given = torch.tensor(counts, dtype=torch.int32)
    for sort_by_m in (False, True):
        y = grouped_gemm(x, w, given, backend="blackwell", sort_by_m=sort_by_m)
        first = min(counts[0], len(x))
        wanted = (x.data[:first].double() @ w.data[0].double().T).bfloat16()
        assert first == 0 or error(y[:first], wanted) <= tolerance("bf16")


def test_sorted_tiles_are_those_of_large_groups_first(gemm):
    """The list that the GEMM reads, and the order that the documents have (C010)."""
    x, w, counts = operands("w4a4", COUNTS)
    grouped_gemm(x, w, counts, backend="blackwell", sort_by_m=True, block_m=8)
    tiles = gemm.launches[-1][1]["tiles"][:, 0].tolist()
    wanted = [g for g in largest_first(tuple(COUNTS)) for _ in range(-(-COUNTS[g] // 8))]
    assert tiles[: len(wanted)] == wanted == [2, 2, 2, 4, 4, 0, 0, 3]


def test_shapes_a_to_d_take_the_tiles_of_the_document():
    """C009 to C011: 6 stages of 128 x 128 or 4 of 128 x 256, by width; 256 of K."""
    for shape in UNEVEN_GEMMS.values():
        spec = GroupedSpec("nvfp4", sum(shape.rows), shape.num_groups, shape.n, shape.k)
        plan, wanted = plan_grouped(spec, "b200", backend="blackwell"), grouped_tile(shape.n)
        tile = plan.gemm.config
        assert (tile.block_m, tile.block_n, tile.block_k) == wanted
        assert tile.num_stages == wanted.num_stages == {128: 6, 256: 4}[tile.block_n]
        assert plan["tmem_columns"] <= 512 and tile.num_sums == {128: 2, 256: 1}[tile.block_n]
        is_many = shape.name != "C"  # 144 tiles for 148 SMs
        assert plan["schedule"] == ("dynamic" if is_many else "static")
        assert "weight rows" in str(plan) and plan.gemm.why


@pytest.mark.parametrize("name", [pytest.param("A", marks=pytest.mark.every), "B", "C", "D"])
def test_shapes_a_to_d_are_computed(name, gemm):
    """Their own K, rows and tiles (6 stages of 128 x 128, 4 of 128 x 256); of n three tiles."""
    shape = UNEVEN_GEMMS[name]
    spec = GroupedSpec("nvfp4", sum(shape.rows), shape.num_groups, shape.n, shape.k)
    tile = plan_grouped(spec, "b200", backend="blackwell").gemm.config
    x, w, counts = operands("nvfp4", list(shape.rows), n=2 * tile.block_n + 32, k=shape.k)
    gemm.seed = 1
    y = grouped_gemm(x, w, counts, backend="blackwell", schedule="dynamic", block_n=tile.block_n)
    constants = gemm.launches[-1][1]
    wanted = tile.constants() | {"DYNAMIC": True}
    assert constants.items() >= wanted.items()
    exact = product(dequantize(x, torch.float64), dequantize(w, torch.float64), counts)
    assert error(y, exact) <= tolerance("bf16")


@pytest.mark.parametrize(
    ("spec", "given", "kind", "match"),
    [
        (("w4a8", "gemm"), {"block_n": 64}, RangeError, "block_n must be 128 or 256"),
        (("w4a8", "swiglu"), {"block_n": 128}, NotAvailable, "is given by block_k, block_m"),
        (("w4a16", "gather"), {}, NotAvailable, "a gather brings 128 bytes of each row"),
        (("w4a4", "gather"), {"block_k": 128}, NotAvailable, "got 64 with block_k 128"),
        (("nvfp4a16", "gemm"), {}, NotAvailable, "no kernel for recipe nvfp4a16"),
        (("w4a8", "gemm"), {"schedule": "random"}, MegaMoEError, "schedule must be one of"),
        (("w4a8", "other"), {}, MegaMoEError, "variant must be one of"),
    ],
)
def test_what_no_kernel_does_is_refused_by_name(spec, given, kind, match):
    recipe, variant = spec
    with pytest.raises(kind, match=match):
        plan_grouped(
            GroupedSpec(recipe, 100, 4, 256, 256, variant), "b200", backend="blackwell", **given
        )


def test_auto_takes_it_only_where_the_machine_has_proven_it():
    spec = GroupedSpec("w4a8", 100, 4, 256, 256)
    assert plan_grouped(spec, "b200").backend == "portable"
    assert plan_grouped(spec, "b200", is_certified=True).backend == "blackwell"
    with pytest.raises(NotAvailable, match="has no variant finalize alone"):
        plan_grouped(GroupedSpec("w4a8", 100, 4, 256, 256, "finalize"), "b200")
    with pytest.raises(NotAvailable, match="needs sm_100a, this is sm_90a"):
        plan_grouped(spec, "h200", backend="blackwell")


def test_operands_that_do_not_fit_are_refused(gemm):
    x, w, counts = operands("nvfp4", [3, 4])
    with pytest.raises(ShapeError, match=r"w \[G, 2, n, k\]"):
        grouped_swiglu(x, w, counts, backend="blackwell")
    with pytest.raises(DTypeError, match=r"slots must be int32 \[7\]"):
        grouped_finalize(x, w, counts, counts, torch.ones(7, 1), backend="blackwell")
    x, w, counts = operands("nvfp4", [3, 4], lead=(2,))
    with pytest.raises(ShapeError, match="need acts_global"):
        grouped_swiglu(x, w, counts, backend="blackwell")

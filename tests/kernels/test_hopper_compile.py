"""Every launch of the Hopper backend, in every tile that it ships, compiles whole for sm_90a."""

import re
from dataclasses import replace

import pytest
import torch

from megamoe.engine import recording
from megamoe.formats.quantized import (
    DATA_DTYPE,
    SCALE_DTYPE,
    Quantized,
    data_shape,
    scale_shape,
)
from megamoe.formats.spec import Scale, recipe_named
from megamoe.hardware import H200
from megamoe.kernels.gluon import dispatch, permute
from megamoe.kernels.hopper import launch
from megamoe.kernels.hopper.weights.pack import pack
from megamoe.kernels.portable.routing import Routing
from megamoe.planner import smem
from megamoe.planner.hopper import gemm_launch
from megamoe.planner.launches import Gemm
from megamoe.planner.numerics import HOPPER_RECIPES as RECIPES
from megamoe.planner.numerics import numerics
from megamoe.planner.tables import hopper as tables
from megamoe.problem import Options
from tests.kernels.compiling import compile_kernel, resources
from tests.kernels.hopper import shipped, tile_name
from tests.kernels.steps import hopper_steps
from tests.kernels.support import INTERPRETED
from tests.proof.compiled import assert_arrivals_follow_barriers

pytestmark = pytest.mark.skipif(INTERPRETED, reason="the interpreter compiles nothing")

META = torch.device("meta")  # sizes without memory: enough for a launcher
E, I, H = 2, 1024, 2048
SHARED_LIMIT = 232448  # bytes that a CTA of sm_90 may have
AHEAD = Gemm(3, 3, 24, math_regs=216, decode_regs=56, load_regs=24, decode_ahead=16)
OFFERED = {  # by recipe: tiles that are not in the table, to be timed beside those that are
    "w4a8_block": (AHEAD, Gemm(3, 3, 24, 216, 56, 24, schedule="static")),
    "w8a8": (Gemm(4, schedule="static"), Gemm(4, schedule="dynamic")),
}


def widest(recipe, *, fits=True):
    """The widest tile of each number of slabs and schedule: it keeps the most in registers."""
    layouts = {
        (getattr(tile, "slabs", 0), getattr(tile, "schedule", ""), is_ahead(tile)): tile
        for tile in shipped(recipe, fits=fits)
    }
    return list(layouts.values())


def is_ahead(tile):
    return getattr(tile, "decode_ahead", 0) > 0


def is_in_waves(tile):
    return isinstance(tile, Gemm) and tile.has_items


def planned_bytes(recipe, fits, tile):
    """The planner's sum of shared memory."""
    if isinstance(tile, Gemm):
        return smem.gemm(recipe, tile).num_bytes
    return smem.gemm_swap_ab(recipe, numerics("hopper", recipe, fits_e4m3=fits), tile).num_bytes


def cases():
    """(recipe, whether weights fit E4M3, tile, linear, activation where there are biases too).

    L2 of w4a8 and w4a4 is that of w4a16.
    """
    for recipe in RECIPES:
        for tile in shipped(recipe):
            yield recipe, True, tile, "l1", ""
            if recipe not in ("w4a8", "w4a4"):
                yield recipe, True, tile, "l2", ""
    for tile in shipped("w4a8_block", fits=False):
        for linear in ("l1", "l2"):
            yield "w4a8_block", False, tile, linear, ""
    for recipe, fits in (("w4a16", True), ("w4a8_block", True), ("w4a8_block", False)):
        for tile in widest(recipe, fits=fits):
            for linear in ("l1", "l2"):
                yield recipe, fits, tile, linear, "gpt_oss"
    for recipe, tiles in OFFERED.items():
        for tile in tiles:
            for linear in ("l1", "l2"):
                for activation in ("", "gpt_oss"):
                    yield recipe, True, tile, linear, activation


def name(case):
    recipe, fits, tile, linear, activation = case
    parts = (recipe, "" if fits else "wide", tile_name(tile), linear, activation)
    return "-".join(filter(None, parts))


def param(case):
    """As a parameter. Registers grow with the tile: of those that a recipe ships, the narrowest and
    the widest of each layout are compiled always; the others, and tiles that are only offered, are
    left to --every."""
    recipe, fits, tile, linear, activation = case
    tiles = shipped(recipe, fits=fits)
    edges = widest(recipe, fits=fits)
    is_edge = tile in edges or (tile == tiles[0] and linear == "l1")
    is_repeated = activation and (linear == "l2" or tile != edges[-1])  # the epilogue is one
    is_left = tile not in tiles or not is_edge or is_repeated
    return pytest.param(case, id=name(case), marks=(pytest.mark.every,) if is_left else ())


def matrix(recipe, *shape):
    fmt = recipe_named(recipe).weights
    data = torch.empty(data_shape(shape, fmt), dtype=DATA_DTYPE[fmt.element.name], device=META)
    if fmt.scale is Scale.NONE:
        return Quantized(data, None, fmt.name, shape)
    scale = torch.empty(scale_shape(shape, fmt), dtype=SCALE_DTYPE[fmt.scale], device=META)
    g = torch.empty(E, device=META) if fmt.has_global else None
    return Quantized(data, scale, fmt.name, shape, g)


class Compiler:
    """Stands for a kernel: compiles it for what a launcher passes.

    all_made  gets every compiled kernel, in the order of launches
    """

    def __init__(self, kernel, all_made=None):
        self.kernel, self.made = kernel, None
        self.all_made = [] if all_made is None else all_made

    def __getitem__(self, grid):
        return self

    def __call__(self, *args, **constants):
        self.made = compile_kernel(self.kernel, args, 90, **constants)
        self.all_made.append(self.made)


def assert_streamed(ptx, is_stream):
    """Copies of weights, of three dimensions and more, have a hint for L2; others have none."""
    copies = re.findall(r"cp\.async\.bulk\.tensor\.(\d)d(\S*)", ptx)
    assert any(rank >= "3" for rank, _ in copies)
    for rank, how in copies:
        assert how.endswith("L2::cache_hint") == (is_stream and rank >= "3")


def compiled(monkeypatch, recipe, fits, tile, linear, activation, *, hidden=H, intermediate=I,
             is_placed=True):  # fmt: skip
    """What `launch` would run."""
    kernel = gemm_launch("l1", tile, hidden, 132, "test").kernel
    compiler = Compiler(getattr(launch, kernel))
    monkeypatch.setattr(launch, kernel, compiler)
    H, I = hidden, intermediate
    l1, l2 = (gemm_launch(n, tile, k, 132, "test") for n, k in (("l1", H), ("l2", I)))
    how = launch.arithmetic(recipe, fits_e4m3=fits)
    x = launch.pool(how, 512, H, E, tile.block_m, META)
    acts = launch.pool(how, 512, I, E, tile.block_m, META, x)
    options = Options(activation or "swiglu")
    some = torch.empty(E, 2, I, device=META)
    rest = {
        "bias": some if activation else None,
        "acts_factor": some if recipe == "nvfp4" else None,
        "use_pdl": True,
        "items": torch.empty(132, 8, dtype=torch.int32, device=META) if is_in_waves(tile) else None,
    }
    if linear == "l1":
        w = pack(matrix(recipe, E, 2, I, H), to_e4m3=how.to_e4m3, is_placed=is_placed)
        launch.gated(x, w, acts, l1, how, options, **rest)
    else:
        w = pack(matrix(recipe, E, H, I), to_e4m3=how.to_e4m3, is_placed=is_placed)
        rows = torch.empty(512, H, dtype=torch.bfloat16, device=META)
        launch.linear(acts, w, rows, l2, how, options, **rest)
    return compiler.made


ALL = list(dict.fromkeys(cases()))
MULTIPLY_BF16 = [case for case in ALL if case[0] in ("w4a16", "w4a8", "w4a4") or not case[1]]


def multiplies_bf16(case):
    """As a parameter: the widest of each layout always; w4a4's loads are those of w4a8."""
    recipe, fits, tile, *_ = case
    is_left = recipe == "w4a4" or tile not in widest(recipe, fits=fits)
    marks = (pytest.mark.every,) if is_left else param(case).marks
    return pytest.param(case, id=name(case), marks=marks)


@pytest.mark.parametrize("case", list(map(multiplies_bf16, MULTIPLY_BF16)))
def test_scales_above_2_spill_as_little(case, monkeypatch):
    assert resources(compiled(monkeypatch, *case, is_placed=False))["stack"] == 0


@pytest.mark.parametrize("case", list(map(param, ALL)))
def test_a_shipped_launch_has_its_instructions_and_no_spill(case, monkeypatch):
    recipe, fits, tile, *_ = case
    kernel = compiled(monkeypatch, *case)
    ptx = kernel.asm["ptx"]
    is_fp8 = launch.arithmetic(recipe, fits_e4m3=fits).is_fp8
    element, depth = ("e4m3", 32) if is_fp8 else ("bf16", 16)
    found = set(re.findall(r"wgmma\.mma_async\S*\.(m64n\S+)", ptx))
    num = tile.block_m  # of the plain GEMM: 128 weight rows
    assert found == {f"m64n{num}k{depth}.f32.{element}.{element}"}
    assert "setmaxnreg" in ptx
    assert_streamed(ptx, getattr(tile, "evict_first", False))
    assert_arrivals_follow_barriers(ptx)
    used = resources(kernel)
    assert used["shared"] <= planned_bytes(recipe, fits, tile) <= SHARED_LIMIT
    assert used["stack"] == 0


@pytest.mark.parametrize("linear", ["l1", "l2"])
@pytest.mark.parametrize("depth", [8, 64])
def test_decoding_ahead_waits_for_a_bounded_time_and_needs_all_ctas(linear, depth, monkeypatch):
    """Widths of an odd number of 256: K blocks are decoded by two."""
    tile = replace(AHEAD, decode_ahead=depth)
    kernel = compiled(
        monkeypatch, "w4a8_block", True, tile, linear, "", hidden=2304, intermediate=1280
    )
    ptx = kernel.asm["ptx"]
    assert kernel.metadata.launch_cooperative_grid
    assert ptx.count("ld.acquire.gpu.global") == ptx.count("st.relaxed.gpu.global") > 0
    assert ptx.count("fence.proxy.async.global") == ptx.count("st.relaxed.gpu.global")
    assert "atom.global.gpu.release" in ptx
    assert resources(kernel)["stack"] == 0


ROUTED = [
    *((tile, slots, experts, 0) for tile in (None, Gemm(4, schedule="dynamic"), AHEAD)
      for slots in (512, 4096, 65536) for experts in (8, 48, 256)),
    *((tile, slots, experts, 1) for tile in (None, AHEAD) for slots in (448, 4096, 65536)
      for experts in (33, 257)),
]  # fmt: skip


def routed(monkeypatch, tile, slots, experts, shared):
    """What `dispatch` would run, in the order of launches; scans are the portable backend's."""
    made = []
    for module, name in (
        (permute, "_count_kernel"), (permute, "_place_kernel"), (dispatch, "_pool_kernel"),
    ):  # fmt: skip
        monkeypatch.setattr(module, name, Compiler(getattr(module, name), made))
    monkeypatch.setattr(permute, "scan_counts", lambda *args, **options: None)
    how = launch.arithmetic("w4a8_block")
    pool = launch.pool(how, slots, H, experts, 128, META)
    weights = [pack(matrix("w4a8_block", E, *sizes), to_e4m3=True) for sizes in ((2, I, H), (H, I))]
    idx = torch.empty(slots // 8, 8 - shared, dtype=torch.int64, device=META)
    gates, error = (
        torch.empty(idx.shape, device=META),
        torch.empty(1, dtype=torch.int32, device=META),
    )
    x = torch.empty(len(idx), H, dtype=torch.bfloat16, device=META)
    plain = Gemm(3, 3, 8, 216, 56, 24)
    steps = hopper_steps(x, idx, tile or plain, experts, num_shared=shared, intermediate=I)
    dispatch.route(
        dispatch.Tokens(x), Routing(idx, gates, idx.int(), gates, error, None), how.acts, pool,
        steps,
        work=launch.work_items(pool, weights, steps["l1"]), by_group=True, pdl=True,
        num_shared=shared,
    )  # fmt: skip
    return made


@pytest.mark.parametrize(
    ("tile", "slots", "experts", "shared"),
    [
        pytest.param(*case, marks=(pytest.mark.every,) if case[2] in (48, 33) else ())
        for case in ROUTED
    ],
    ids=str,
)
def test_routing_compiles_without_a_spill(tile, slots, experts, shared, monkeypatch):
    made = routed(monkeypatch, tile, slots, experts, shared)
    is_small = slots <= tables.SMALL_SLOTS and tile is None
    assert len(made) == 1 + (not is_small) + (slots > tables.MIDDLE_SLOTS)
    for kernel in made:
        assert resources(kernel)["stack"] == 0


GEMMS = ("gemm_kernel", "gemm_swap_ab_kernel", "mega_kernel")


@pytest.mark.parametrize(("num_experts", "top_k"), [(256, 6), (384, 6), (32, 4)])
def test_what_stands_around_the_gemms_compiles_for_models(num_experts, top_k):
    """With the layer's statistics, and as many experts as models have, whichever block is wider."""
    machine = H200.label, H200.num_sms, H200.arch, H200.hbm_bytes
    layer = recording.LayerSpec("w4a8_block", 4096, 2048, num_experts, top_k, machine)
    made = recording.cubins_of(layer, [8, 64, 256, 4096])
    around = [one for one in made if one.kernel not in GEMMS]
    assert {"_pool_kernel", "_place_kernel", "_count_kernel"} <= {one.kernel for one in around}
    for one in around:
        assert one.compile().asm["cubin"]

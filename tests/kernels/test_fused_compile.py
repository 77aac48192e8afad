"""The fused launch compiles for sm_90a in every tile that it takes, and fits an SM."""

import re
from dataclasses import replace

import pytest
import torch

from megamoe.kernels.hopper import launch
from megamoe.kernels.hopper.mega import launch as mega_launch
from megamoe.kernels.hopper.weights.pack import pack
from megamoe.planner import smem
from megamoe.planner.fused import routing_bytes, slot_size, weights_ahead
from megamoe.planner.hopper import as_fused, fused_stages, pick
from megamoe.planner.launches import Launch, Mega, next_power_of_2
from megamoe.planner.numerics import HOPPER_RECIPES as RECIPES
from megamoe.planner.numerics import numerics
from megamoe.planner.tables.hopper import COUNTERS
from megamoe.problem import Options
from tests.kernels.compiling import FUNCTION, addresses, code_bytes, resources, sass
from tests.kernels.hopper import shipped, shipped_fused, tile_name
from tests.kernels.support import INTERPRETED
from tests.kernels.test_hopper_compile import META, SHARED_LIMIT, Compiler, assert_streamed, matrix
from tests.proof.compiled import assert_arrivals_follow_barriers

pytestmark = pytest.mark.skipif(INTERPRETED, reason="the interpreter compiles nothing")

E, I, H, K = 2, 1024, 2048, 6
CODE = 128 << 10  # bytes of instructions beyond which a launch waits for them (docs/fused.md)

DECODE = {"slots": 384, "experts": 32}
TABLE = {**DECODE, "table": True}  # scales above 2
BUSY = {"slots": 384, "experts": 32, "bias": True, "count": True, "options": Options("gpt_oss")}
RANKS = {"slots": 384, "experts": 4, "ranks": 8, "count": True}
APART = {"slots": 384, "experts": 4, "ranks": 8, "local": 1, "count": True, "ids": torch.int64}
MANY = {**RANKS, "experts": 48, "bias": True}  # of nvfp4: a stage fewer than beside 32 experts
RING = {
    "slots": 384, "experts": 32, "wave_rows": 64, "options": Options(combine="fp8"),
}  # fmt: skip
SHARED = {"slots": 448, "experts": 33, "shared": 1}
SHARED_RING = {**SHARED, "wave_rows": 64}
TRACED = {**DECODE, "trace": True}
LATE = {"slots": 128, "experts": 8, "ids": torch.int64, "options": Options(weight_at="combine")}
MIDDLE = {"slots": 1024, "experts": 48}
# As many slots as the tile takes: the routing has the most shared memory.
LARGEST = {"slots": 4096, "experts": 256}


def cases():
    """(recipe, whether weights fit E4M3, tile, what else): every tile once, then the widest."""
    for recipe, fits in (*((recipe, True) for recipe in RECIPES), ("w4a8_block", False)):
        for tile in shipped_fused(recipe, fits=fits):
            yield recipe, fits, tile, DECODE
            if recipe in ("w4a16", "w4a8", "w4a4") or not fits:
                yield recipe, fits, tile, TABLE
    for recipe, more in (
        ("w4a16", BUSY), ("w4a8_block", RANKS), ("w4a8_block", APART), ("w4a8_block", LATE),
        ("w4a8_block", SHARED), ("w4a8_block", SHARED_RING), ("w4a8_block", TRACED),
        ("w8a8", LARGEST), ("w8a8", RANKS), ("w4a8_block", RING), ("w4a8_block", MIDDLE),
    ):  # fmt: skip
        yield recipe, True, shipped_fused(recipe)[-1], more
    many = shipped_fused("nvfp4")
    yield "nvfp4", True, many[1], MANY
    middle = pick("nvfp4", 2048 / 256)[0]
    yield "nvfp4", True, middle, {"slots": 2048, "experts": 256}


def name(case):
    recipe, fits, tile, more = case
    what = {
        id(BUSY): "busy", id(RANKS): "ranks", id(APART): "apart", id(LATE): "late", id(DECODE): "",
        id(RING): "ring", id(SHARED): "shared", id(TABLE): "table",
        id(MANY): "many", id(SHARED_RING): "shared-ring", id(TRACED): "traced",
    }  # fmt: skip
    size = f"{more['slots']}slots" if id(more) not in what else what[id(more)]
    wide = "" if fits else "wide"
    return "-".join(filter(None, (recipe, wide, tile_name(tile), f"x{tile.k_blocks}", size)))


def param(case):
    """As a parameter. Registers grow with the tile: narrower ones than a recipe's widest are left
    to --every, but for the narrowest of FP8 and FP4. With scales above 2 w4a8 and w4a4 load as
    w4a16 does; ids of 64 bits are those of APART too, and sizes of a routing grow to LARGEST."""
    recipe, fits, tile, more = case
    tiles = shipped_fused(recipe, fits=fits)
    is_widest = tile == tiles[-1] and not (recipe in ("w4a8", "w4a4") and more is TABLE)
    is_narrowest = tile == tiles[0] and recipe in ("w8a8", "w4a8_block") and more is DECODE
    is_own = more not in (DECODE, TABLE)
    is_left = more in (LATE, MIDDLE) or not (is_widest or is_narrowest or is_own)
    marks = (pytest.mark.every,) if is_left else ()
    return pytest.param(case, id=name(case), marks=marks)


def planned(recipe, fits, tile, more):
    """(the tile as the plan has it, the plan's sum of shared memory)."""
    slots, experts, ranks = more["slots"], more["experts"], more.get("ranks", 1)
    how, tile = numerics("hopper", recipe, fits_e4m3=fits), as_fused(tile)
    routing = routing_bytes(slots, experts, ranks)
    beside = smem.Beside(routing, next_power_of_2(experts, 32), ranks, "bias" in more)
    tile = replace(tile, num_stages=fused_stages(recipe, how, tile, beside))
    return tile, smem.fused(recipe, how, tile, beside)


def compiled(monkeypatch, recipe, fits, tile, more):
    """What `mega_launch` would run."""
    compiler = Compiler(mega_launch.mega_kernel)
    monkeypatch.setattr(mega_launch, "mega_kernel", compiler)
    slots, experts, ranks = more["slots"], more["experts"], more.get("ranks", 1)
    local = more.get("local", ranks)
    tile = planned(recipe, fits, tile, more)[0]
    config = Mega(
        tile, slot_size(slots) if ranks == 1 else 0, next_power_of_2(experts, 32),
        next_power_of_2(K + more.get("shared", 0)), weights_ahead(tile), slots,
        more.get("wave_rows", 0),
    )  # fmt: skip
    step = Launch("mega", "mega_kernel", (132,), config, "test")
    how = launch.arithmetic(recipe, fits_e4m3=fits)
    pool = launch.pool(how, slots, H, experts, tile.block_m, META, ranks=local, is_far=ranks > 1)
    acts = launch.pool(how, slots, I, experts, tile.block_m, META, pool, local)

    def new(*shape, dtype=torch.float32):
        return torch.empty(*shape, dtype=dtype, device=META)

    shared = more.get("shared", 0)
    num = slots // (K + shared) // ranks
    idx = new(num, K, dtype=more.get("ids", torch.int32))
    count = new(1, dtype=torch.int32) if "count" in more else None
    g = new(()) if recipe == "nvfp4" else None
    x, rows, y = (new(n, H, dtype=torch.bfloat16) for n in (num, num * (K + shared), num * local))
    words, stats = new(local, dtype=torch.int32), new((experts - shared) * local, dtype=torch.int64)
    tokens = mega_launch.Tokens(x, idx, new(num, K), count, g, rows, y, words, stats)
    w13, w2 = (
        pack(matrix(recipe, E, *shape), to_e4m3=how.to_e4m3, is_placed="table" not in more)
        for shape in ((2, I, H), (H, I))
    )
    kept = mega_launch.State(
        *(new(*shape, dtype=torch.int32) for shape in ((COUNTERS,), (132, 4096), (8,)))
    )
    world = mega_launch.World()
    if ranks > 1:
        peers, signals = new(ranks, dtype=torch.int64), new(32, dtype=torch.int32)
        inbox = mega_launch.Inbox(
            new(ranks, num, H, dtype=torch.uint8 if how.is_fp8 else torch.bfloat16),
            new(ranks, num, H // 128), new(ranks, num, 8, dtype=torch.int32), new(ranks, num, 8),
            new(ranks, config.max_experts + 4, dtype=torch.int32),
        )  # fmt: skip
        world = mega_launch.World(ranks, local, 0, peers, signals, inbox)
    biases = (new(E, 2, I), new(E, H)) if "bias" in more else (None, None)
    mega_launch.fused(
        tokens, pool, acts, mega_launch.Experts(w13, w2, experts, shared, *biases, g), step, how,
        more.get("options", Options()), kept, world=world,
        trace=new(132, 4, 128, 4, dtype=torch.int32) if "trace" in more else None,
    )  # fmt: skip
    return compiler.made


@pytest.mark.parametrize("case", list(map(param, cases())))
def test_a_fused_launch_fits_an_sm_and_keeps_its_sums_in_registers(case, monkeypatch):
    recipe, fits, tile, more = case
    kernel = compiled(monkeypatch, *case)
    is_fp8 = launch.arithmetic(recipe, fits_e4m3=fits).is_fp8
    element, depth = ("e4m3", 32) if is_fp8 else ("bf16", 16)
    ptx = kernel.asm["ptx"]
    found = set(re.findall(r"wgmma\.mma_async\S*\.(m64n\S+)", ptx))
    assert found == {f"m64n{tile.block_m}k{depth}.f32.{element}.{element}"}
    assert "setmaxnreg" in ptx and "trap" not in ptx
    assert_streamed(ptx, True)
    assert_arrivals_follow_barriers(ptx)
    assert list(addresses(kernel)) == [(FUNCTION, 0)]  # the launch fetches its own code
    used = resources(kernel)
    sums = planned(*case)[1]
    assert used["shared"] <= sums.num_bytes <= sums.limit == SHARED_LIMIT
    assert used["stack"] == 0
    if more["slots"] <= 1024 and "wave_rows" not in more:  # decode
        assert code_bytes(kernel) <= CODE


@pytest.mark.parametrize("more", [RANKS, APART], ids=["ranks", "apart"])
def test_ranks_exchange_by_wide_stores_one_fence_a_site_and_no_atomics(more, monkeypatch):
    """Compiled: tokens, scales, slots, counts and rows travel in 16 bytes a thread."""
    kernel = compiled(monkeypatch, "w4a8_block", True, shipped_fused("w4a8_block")[-1], more)
    ptx, code = kernel.asm["ptx"], sass(kernel)
    assert not re.search(r"(ld|st)\.global\.\w*b16", ptx)
    assert len(re.findall(r"st\.global\.v4\.b32", ptx)) >= 5  # tokens, scales, slots, counts
    is_apart = more is APART
    assert len(re.findall(r"MEMBAR\S*\.SYS", code)) == (2 if is_apart else 0)  # begun and ended
    assert len(re.findall(r"fence\.acq_rel\.sys", ptx)) == (2 if is_apart else 0)
    assert not re.search(r"(atom|red)\S*\.sys(?!\.shared)", ptx)  # PCIe has no atomics between GPUs


def test_a_large_routing_costs_a_stage():
    tile = shipped("w8a8")[0]
    sizes = ((384, 32), (1024, 256), (2048, 256))
    stages = [
        planned("w8a8", True, tile, {"slots": slots, "experts": experts})[0].num_stages
        for slots, experts in sizes
    ]
    assert stages == [tile.num_stages, tile.num_stages, tile.num_stages - 1]
    assert as_fused(replace(tile, slabs=1)) is None


def test_as_many_stages_as_fit_beside_the_routing_of_many_experts():
    """What a stage more would take is more than an SM has: compiled, 233,220 and 233,092 bytes."""
    for recipe, block_m, experts in (("nvfp4", 16, 48), ("w8a8", 32, 128)):
        (tile,) = (one for one in shipped_fused(recipe) if one.block_m == block_m)
        less, sums = planned(recipe, True, tile, {**RANKS, "experts": experts})
        assert less.num_stages == tile.num_stages - 1
        assert sums.num_bytes + sums.stage_bytes > SHARED_LIMIT

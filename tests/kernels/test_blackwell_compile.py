"""Blackwell's launches compiled for sm_100a and sm_103a without a GPU: what is in them.

A few configurations stand for all; `python -m tests.kernels.test_blackwell_compile` compiles every
shipped one (58 of them in 50 s) and prints a line for each. `scripts/newer_triton.sh` compiles
them, and pairs of CTAs, with a newer Triton.
"""

import re
import sys
from dataclasses import replace

import pytest
from triton.experimental.gluon import language as gl

from megamoe.errors import NotAvailable
from megamoe.hardware import SMEM_PER_CTA
from megamoe.kernels.blackwell.formats import FORMATS, SCALED_MMAS, check_tile, operand_layout
from megamoe.kernels.common.numbers import Kind
from megamoe.kernels.gluon import compat
from megamoe.kernels.gluon.compat import HAS_PAIRS, VERSION
from megamoe.planner.blackwell import (
    narrowed,
    overridden,
    shared_memory,
    shipped,
    tile_of,
    tmem_columns,
)
from megamoe.planner.grouped import VARIANTS
from megamoe.planner.launches import GemmTmem, next_power_of_2
from megamoe.planner.numerics import BLACKWELL_RECIPES
from megamoe.planner.tables.blackwell import PAIRED, TMEM_COLUMNS, Shape
from megamoe.problem import Options
from tests.kernels.blackwell import compiled, compiled_grouped, launched, tile_name
from tests.kernels.compiling import resources
from tests.kernels.descriptors import decoded, faults
from tests.kernels.support import INTERPRETED
from tests.proof.compiled import (
    assert_arrivals_follow_barriers,
    assert_is_alone_on_an_sm,
    assert_tensor_memory_is_fenced,
)

pytestmark = pytest.mark.skipif(INTERPRETED, reason="Triton's interpreter knows no Gluon")


def pick_with(recipe, **given):
    """The tile of an override."""
    return overridden(recipe, shipped(recipe)[0], given)[0]


ALL = [
    (r, tile, gated) for r in BLACKWELL_RECIPES for tile in shipped(r) for gated in (True, False)
]
# The widest tile of each recipe has most registers and scratch, the narrowest most stages.
SOME = [(r, shipped(r)[-1], True) for r in BLACKWELL_RECIPES]
SOME += [("w4a8", shipped("w4a8")[0], False), ("w4a8_block", shipped("w4a8_block")[0], True)]
PAIRS = [
    (recipe, tile_of(recipe, Shape(m, k, 1 if m == 128 else 2), 2), gated)
    for recipe, k in zip(PAIRED, (128, 256, 256), strict=True)
    for m in (64, 16, 128)
    for gated in (True, False)
]
PLAIN = {"bf16": "f16", "w4a16": "f16", "w8a8": "f8f6f4"}


# Later PTX names the values under a scale, earlier how many scales four lanes of K have.
BLOCK = {"scale_vec::1X": "block32", "scale_vec::2X": "block32", "scale_vec::4X": "block16"}


def mma_of(recipe):
    """The MMA of a recipe as PTX names it."""
    kind = FORMATS[recipe]
    if not kind.SCALED.value:
        return PLAIN[recipe]
    name = SCALED_MMAS[kind.W.value, kind.X.value, kind.VEC.value]
    if VERSION >= (3, 8):
        name, vector = name.rsplit(".", 1)
        name += f".{BLOCK[vector]}"
    return name


def assert_is_as_planned(recipe, tile, kernel):
    """Instructions, descriptors, tensor memory and shared memory; nothing spills."""
    ptx, kind, ctas = kernel.asm["ptx"], FORMATS[recipe], tile.num_ctas
    found = re.findall(r"tcgen05\.mma\.cta_group::(\d)\.kind::(\S+)", ptx)
    assert set(found) == {(str(ctas), mma_of(recipe))}
    assert (f"tcgen05.cp.cta_group::{ctas}.warpx4.32x128b" in ptx) == kind.SCALED.value
    assert "cp.async.bulk.tensor.2d" in ptx and "tcgen05.commit" in ptx
    assert_arrivals_follow_barriers(ptx, least=1)
    assert_tensor_memory_is_fenced(ptx)
    assert_is_alone_on_an_sm(ptx)
    rows = decoded(ptx)
    depth = {"e2m1": 64, "e4m3": 32, "bf16": 16}[kind.X.value]
    # The first stage may be peeled.
    num = tile.num_halves * (tile.block_k // depth)
    # Packed FP4 may take 96 of K at a time on sm_103a.
    is_deep = bool(
        len(rows) % num and ".target sm_103a" in ptx and kind.X.value == "e2m1"
        and VERSION >= (3, 9)
    )  # fmt: skip
    if is_deep:
        num = tile.num_halves * -(-tile.block_k // 96)
    assert rows and len(rows) % num == 0
    assert not [fault for row in rows for fault in faults(row, is_deep=is_deep)]
    assert {(row["m"], row["n"]) for row in rows} == {(128 * ctas, tile.block_m)}
    assert {(row["a_type"], row["b_type"]) for row in rows} == {(kind.W.value, kind.X.value)}
    columns = tmem_columns(recipe, tile)
    assert columns <= TMEM_COLUMNS and kernel.metadata.tmem_size == next_power_of_2(columns, 32)
    assert kernel.metadata.shared <= shared_memory(recipe, tile).num_bytes <= SMEM_PER_CTA
    if ".target sm_100a" in ptx:
        assert resources(kernel)["stack"] == 0


def assert_is_of_pairs(recipe, tile, kernel):
    """What Triton 3.8 and newer make of a launch by pairs of CTAs, instruction by instruction."""
    assert_is_as_planned(recipe, tile, kernel)
    ptx = kernel.asm["ptx"]
    assert ptx.count("tcgen05.commit.cta_group::2") == 2 == ptx.count("multicast::cluster.b64")
    tokens = re.findall(r"cp\.async\.bulk\.tensor\.5d\.cta_group::2\S*\.multicast::cluster", ptx)
    assert len(tokens) == 1  # the scales of tokens, to both
    counts = re.findall(r"mbarrier\.init\S* \[[^\]]*\], (\d+);", ptx)
    stages, sums = tile.num_stages, tile.num_sums
    # full: two loaders of both CTAs; empty, summed: a commit; taken: both epilogues
    assert counts == ["4"] * stages + ["1"] * (stages + sums) + ["2"] * sums
    kind, words = FORMATS[recipe], tile.block_k // FORMATS[recipe].VEC.value // 4
    weights = 2 * (128 * tile.block_k * kind.W_BITS.value // 8 + 512 * words)
    halves = tile.block_m * tile.block_k * kind.X_BITS.value // 16 + 512 * words
    expected = re.findall(
        r"mbarrier\.arrive\.expect_tx\.shared::cluster\.b64 _, \[[^\]]*\], (\d+)", ptx
    )
    assert sorted(map(int, expected)) == sorted((weights, halves))
    # CTAs meet once mbarriers are initialised, and before one of them gives its memory back.
    begin = ptx.rindex("mbarrier.init")
    assert "barrier.cluster.wait" in ptx[begin : ptx.index("mbarrier.try_wait", begin)]
    for end in re.finditer(r"tcgen05\.dealloc\.cta_group::2", ptx):
        assert "barrier.cluster.wait" in ptx[end.start() - 600 : end.start()]


@pytest.mark.parametrize(
    ("recipe", "tile", "gated"),
    [
        pytest.param(
            *case, id=f"{case[0]}-{tile_name(case[1])}-{case[2]}",
            marks=() if case in SOME else (pytest.mark.every,),
        )
        for case in ALL
    ],
)  # fmt: skip
def test_every_descriptor_of_a_shipped_launch_is_legal_it_fits_and_does_not_spill(
    recipe, tile, gated
):
    assert_is_as_planned(recipe, tile, compiled(recipe, tile, gated))


@pytest.mark.parametrize(
    ("recipe", "tile"),
    [
        ("w4a8", replace(shipped("w4a8")[2], schedule="dynamic")),
        ("w4a16", replace(shipped("w4a16")[-1], schedule="sorted")),
        ("w4a4", pick_with("w4a4", block_m=128, block_k=512)),
        pytest.param("w4a4", pick_with("w4a4", block_m=16, block_k=512), marks=pytest.mark.every),
    ],
    ids=lambda v: v if isinstance(v, str) else f"{tile_name(v)}-{v.schedule}",
)
def test_tiles_that_are_drawn_and_deep_stages_are_as_planned(recipe, tile):
    assert_is_as_planned(recipe, tile, compiled(recipe, tile, True))


# The widest tile of each is the hardest: registers of a gather, of promoted sums.
GROUPED = [
    pytest.param(recipe, variant, rows, marks=() if (recipe, variant, rows) in {
        ("nvfp4", "gemm", 512), ("nvfp4", "gather", 512), ("w8a8", "gather", 512),
        ("w8a8", "finalize", 512), ("w4a16", "swiglu", 512),
    } else (pytest.mark.every,))
    for recipe in BLACKWELL_RECIPES
    for variant in VARIANTS
    for rows in (512, 16)
    if (recipe, variant) != ("w4a16", "gather")
]  # fmt: skip


@pytest.mark.parametrize(("recipe", "variant", "rows"), GROUPED)
def test_grouped_gemms_alone_are_as_planned(recipe, variant, rows):
    plan, (place, gemm) = compiled_grouped(recipe, variant, rows)
    assert resources(place)["stack"] == 0
    assert_is_as_planned(recipe, plan.gemm.config, gemm)
    assert ("tile::gather4" in gemm.asm["ptx"]) == (variant == "gather")
    assert ("relaxed.add.v4.f32" in gemm.asm["ptx"]) == (variant == "finalize")


def test_the_list_of_large_groups_first_compiles():
    _, (place, _) = compiled_grouped("nvfp4", sort_by_m=True, schedule="dynamic", n=6144)
    assert resources(place)["stack"] == 0


def test_biases_and_the_other_activation_do_not_spill():
    tile = shipped("w4a16")[-1]
    options = Options("gpt_oss", 7.0)
    kernel = compiled("w4a16", tile, True, options=options, has_bias=True)
    assert resources(kernel)["stack"] == 0


@pytest.mark.skipif(not HAS_PAIRS, reason="pairs of CTAs need Triton 3.8; scripts/newer_triton.sh")
@pytest.mark.parametrize(("recipe", "tile", "gated"), PAIRS[:3])
def test_pairs_of_ctas_have_their_instructions_counts_and_bytes(recipe, tile, gated):
    kernel = compiled(recipe, tile, gated)
    assert_is_of_pairs(recipe, tile, kernel)
    assert resources(kernel)["stack"] == 0


# One of each kind of MMA, of the tokens' operand and of the epilogue; the other linear elsewhere.
B300 = [("w4a8", 1, True), ("nvfp4", 1, True), ("w4a4", -1, False), ("w8a8", 0, True),
        ("w4a8_block", -1, False), ("bf16", 0, False), ("w4a16", 0, True)]  # fmt: skip


@pytest.mark.parametrize(("recipe", "which", "gated"), B300)
def test_sm_103a_has_the_same_instructions_and_spills_as_little(recipe, which, gated):
    tile = shipped(recipe)[which]
    kernel = compiled(recipe, tile, gated, arch=103)
    assert ".target sm_103a" in kernel.asm["ptx"]
    assert_is_as_planned(recipe, tile, kernel)
    assert resources(kernel)["stack"] == 0


def test_every_shipped_tile_fits_by_its_sums():
    for recipe, wide, _ in ALL:
        for tile in (wide, narrowed(recipe, wide)):
            assert shared_memory(recipe, tile).num_bytes <= SMEM_PER_CTA
            assert tmem_columns(recipe, tile) <= TMEM_COLUMNS and tile.num_stages >= 3
        assert tile.num_stages >= wide.num_stages  # half of the weights, never fewer stages


# -- what the compiler takes in silence ---------------------------------------------------------


def test_the_decoder_sees_an_mma_that_the_hardware_does_not_have():
    """M = 64 with block scales, as Gluon compiles it: bits 24 to 28 of the descriptor."""
    ptx = compiled("w4a8", shipped("w4a8")[0], True).asm["ptx"]
    (word,) = {int(w) for w in re.findall(r"mov\.b32\s+%r\d+,\s*(\d{8,});", ptx)
               if int(w) >> 24 & 31 == 8 and int(w) >> 29 == 0} & _descriptors(ptx)  # fmt: skip
    other = ptx.replace(f" {word};", f" {word - (4 << 24)};")
    assert ["M=64"] in [faults(row) for row in decoded(other)]


def _descriptors(ptx):
    constants = dict(re.findall(r"mov\.b32\s+(%r\d+),\s*(-?\d+);", ptx))
    names = re.findall(r"tcgen05\.mma\.\S+\s+\[[^\]]+\],\s*%rd\d+,\s*%rd\d+,\s*(%r\d+)", ptx)
    return {int(constants[name]) for name in names}


TILE = GemmTmem(16, 128, 4, 2, 16)


@pytest.mark.parametrize(
    ("recipe", "tile", "changes", "match"),
    [
        ("w4a8", GemmTmem(16, 128, 4, 2, 16, block_rows=64), {}, "M = 128 in one CTA; got M = 64"),
        (
            "w8a8",
            replace(TILE, num_ctas=2),
            {},
            "scales of both operands and 16 tokens .* got w8a8",
        ),
        (
            "w4a8",
            GemmTmem(8, 128, 4, 2, 8, num_ctas=2),
            {},
            "16 tokens a tile; got w4a8, block_m 8",
        ),
        ("w4a8", TILE, {"VEC": 16}, "scales of so many values; got e2m1 x e4m3, 16 values"),
        ("w4a8", TILE, {"padded": False}, "padded to a byte a value, .* got e2m1 x e4m3"),
        ("w4a4", TILE, {"padded": True}, "FP4 beside FP4 packed; got e2m1 x e2m1"),
        ("w4a8", GemmTmem(24, 128, 4, 2, 8), {}, "one of 8, 16, 32, 64, 128; got block_m 24"),
        ("w8a8", GemmTmem(8, 128, 4, 2, 8), {}, "one of 16, 32, 64; got block_m 8"),
        ("w8a8", GemmTmem(16, 256, 4, 2, 16), {}, "128 columns of an activation scale; got .* 256"),
        ("w4a8", GemmTmem(16, 64, 4, 2, 16), {}, "multiple of 128 columns: four scales a word"),
        ("w4a8", replace(TILE, num_halves=1), {"is_gated": True}, "128 of up; got 1 x 128 rows"),
        ("w4a4", TILE, {"gathers": True}, "128 bytes a stage: .* got 64 bytes with block_k 128"),
    ],
)
def test_the_launcher_refuses_by_name_what_the_compiler_takes(
    recipe, tile, changes, match, monkeypatch
):
    monkeypatch.setattr(compat, "HAS_PAIRS", True)
    kind = FORMATS[recipe]
    changes = dict(changes)
    padded = changes.pop("padded", None)
    how = {n: changes.pop(n) for n in ("is_gated", "gathers") if n in changes}
    layout = operand_layout(kind, 128, tile.block_k, kind.W_BITS.value)
    if padded is not None:
        layout = gl.NVMMASharedLayout.get_default_for([128, 128], gl.uint8, fp4_padded=padded)
    kind = Kind(recipe, **{**kind._members, **changes})
    with pytest.raises(NotAvailable, match=match):
        check_tile(kind, tile, layout, **how)


def test_pairs_are_refused_by_name_below_triton_3_8(monkeypatch):
    monkeypatch.setattr(compat, "HAS_PAIRS", False)
    monkeypatch.setattr(compat, "VERSION", (3, 6))
    with pytest.raises(NotAvailable, match=r"needs Triton 3\.8 or newer; got Triton 3\.6"):
        check_tile(FORMATS["w4a8"], replace(TILE, num_ctas=2))


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"block_rows": 64}, "M = 128 in one CTA; got M = 64"),
        ({"num_halves": 1}, "of a gated linear .* got 1 x 128 rows"),
        ({"block_m": 24, "chunk": 24}, "got block_m 24"),
    ],
)
def test_every_launch_goes_through_the_refusals(changes, match):
    with pytest.raises(NotAvailable, match=match):
        launched("w4a8", replace(TILE, **changes), True)


def test_a_wider_shape_than_tensor_memory_has_no_stages():
    assert tile_of("w4a8", Shape(128, 128, 2)).num_stages == 0  # sums alone are 512 columns


def main():
    for recipe, tile, gated in ALL:
        kernel = compiled(recipe, tile, gated)
        assert_is_as_planned(recipe, tile, kernel)
        used = resources(kernel)
        linear, columns = "L1" if gated else "L2", kernel.metadata.tmem_size
        print(f"{recipe} {linear} {tile}: {used}, {columns} columns", flush=True)


if __name__ == "__main__":
    sys.exit(main())

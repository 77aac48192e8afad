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
from megamoe.kernels.blackwell.formats import FORMATS, check_tile, operand_layout
from megamoe.kernels.common.numbers import Kind
from megamoe.kernels.gluon import compat
from megamoe.kernels.gluon.compat import HAS_PAIRS
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
from tests.kernels.instructions import Asked, wrong_instructions
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


def assert_is_as_planned(recipe, tile, kernel, *, gathers=False):
    """Instructions, descriptors, tensor memory and shared memory; nothing spills."""
    ptx = kernel.asm["ptx"]
    assert wrong_instructions(ptx, Asked.of_tile(recipe, tile, gathers=gathers)) == []
    assert_arrivals_follow_barriers(ptx, least=1)
    assert_tensor_memory_is_fenced(ptx)
    assert_is_alone_on_an_sm(ptx)
    columns = tmem_columns(recipe, tile)
    assert columns <= TMEM_COLUMNS and kernel.metadata.tmem_size == next_power_of_2(columns, 32)
    assert kernel.metadata.shared <= shared_memory(recipe, tile).num_bytes <= SMEM_PER_CTA
    if ".target sm_100a" in ptx:
        assert resources(kernel)["stack"] == 0


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
    assert_is_as_planned(recipe, plan.gemm.config, gemm, gathers=variant == "gather")
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
    assert_is_as_planned(recipe, tile, kernel)
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

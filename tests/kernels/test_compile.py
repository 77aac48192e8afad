"""Every portable kernel, in every tile the planner picks, compiles for Hopper and Blackwell."""

import re

import pytest
import torch
import triton
import triton.language as tl

from megamoe.kernels.common import compat
from megamoe.kernels.portable import gemm
from megamoe.kernels.portable.acts import CODES, PLAIN
from megamoe.kernels.portable.decode_tokens import TOKEN_FORMATS
from megamoe.kernels.portable.dispatch import _dispatch_kernel
from megamoe.kernels.portable.grouped import _prepare_kernel
from megamoe.kernels.portable.pack import _pack_kernel
from megamoe.planner.portable import pick as tiles
from megamoe.planner.tables.copies import DECODE_VALUES, PREPARE_CHUNK
from megamoe.problem import OWN_CLAMP, RECIPES
from tests.kernels.compiling import Stand, advice, compile_kernel, main_loop, resources
from tests.kernels.steps import arithmetic
from tests.kernels.support import INTERPRETED

pytestmark = pytest.mark.skipif(INTERPRETED, reason="the interpreter compiles nothing")

F32, BF16, U8, I32, F8 = (
    torch.float32, torch.bfloat16, torch.uint8, torch.int32, torch.float8_e4m3fn,
)  # fmt: skip
WORDS = (Stand(I32), Stand(I32))
DATA = {"bf16": BF16, "fp8_128x128": F8, "mxfp4": I32, "nvfp4": I32}
DEPTH = {"mxfp4": 8, "nvfp4": 8, "mxfp4_codes": 2, "nvfp4_codes": 2}  # codes of one element
SCALE = {"bf16": Stand(BF16), "fp8_128x128": Stand(F32), "mxfp4": WORDS, "nvfp4": WORDS}
FP4 = [r for r in RECIPES if r.startswith(("w4", "nvfp4"))]
STACK_LIMIT = 448  # bytes a thread: wide tiles spill a little, docs/measurements/portable.md
MMA = {90: r"wgmma\.mma_async", 100: r"tcgen05\.mma"}


def compiled(
    recipe, phase, tile, arch, *, alone=False, has_mx=False, bytewise=False, activation="swiglu"
):
    how = arithmetic(recipe, "sm_100a" if has_mx else "sm_90a")
    is_coded = how.acts.STORED_AS.value == "codes"
    x, out, some = Stand(how.data_dtype), Stand(U8 if is_coded else BF16), Stand(F32)
    weights = how.weights.name
    block = (tile.block_n, tile.block_k // DEPTH.get(weights, 1))
    w = Stand(DATA.get(weights, U8), (8192, 4096)).rows(block)
    x_scale = w_scale = (Stand(U8), 4096 // how.group) if how.is_native else some
    if not how.is_native:
        w_scale = (Stand(U8), Stand(I32)) if bytewise else SCALE[weights]
    maps = [Stand(I32)] * 4
    common = dict(  # noqa: C408  keywords read like the call
        TOKENS=how.tokens, WEIGHTS=how.weights, HAS_BIAS=True, WEIGHTED=True, TOP_K=6,
        HAS_GLOBAL=recipe.startswith("nvfp4"), TOKEN_GLOBAL=recipe == "nvfp4",
        BLOCK_M=tile.block_m, BLOCK_N=tile.block_n, BLOCK_K=tile.block_k,
        GROUP_M=tile.group_m, num_warps=tile.num_warps, num_stages=tile.num_stages,
    )  # fmt: skip
    head = (x, x_scale, w, w_scale, some, some, some, some)
    if phase == "l1":
        return compile_kernel(
            gemm._gated_kernel,
            (*head, out, Stand(how.scale_dtype), some, *maps, 4096, 2048, 10.0), arch,
            ACTS=how.acts, ACTIVATION=activation, FAST_MATH=False, GATHER=True, **common,
        )  # fmt: skip
    return compile_kernel(
        gemm._linear_kernel, (*head, Stand(BF16), some, *maps, Stand(I32), 2048, 4096, 0, 6), arch,
        ACTS=PLAIN, STORE="slots", WEIGHT_BIAS=True, GATHER=alone, DYNAMIC=alone, **common,
    )  # fmt: skip


GROUPED = [
    pytest.param(recipe, rows, arch, marks=() if is_quick else pytest.mark.every)
    for recipe in RECIPES for rows in (1, 1000) for arch in (90, 100)
    for is_quick in [arch == 90 or (rows == 1000 and recipe in ("w8a8", "w4a8", "nvfp4"))]
]  # fmt: skip


@pytest.mark.parametrize(("recipe", "rows", "arch"), GROUPED)
def test_grouped_gemms_compile_to_tensor_core_code(recipe, rows, arch):
    for phase, tile in zip(("l1", "l2"), tiles(recipe, rows), strict=False):
        kernel = compiled(recipe, phase, tile, arch)
        assert re.search(MMA[arch], kernel.asm["ptx"]), phase
        used = resources(kernel)
        assert used["shared"] <= 232448 and used["stack"] <= STACK_LIMIT


@pytest.mark.parametrize("arch", [90, pytest.param(100, marks=pytest.mark.every)])
@pytest.mark.parametrize("activation", [name for name in OWN_CLAMP if name != "swiglu"])
@pytest.mark.parametrize("recipe", ["bf16", pytest.param("w4a8", marks=pytest.mark.every)])
def test_every_activation_compiles(recipe, activation, arch):
    tile = tiles(recipe, 100)[0]
    kernel = compiled(recipe, "l1", tile, arch, activation=activation)
    assert re.search(MMA[arch], kernel.asm["ptx"])
    assert resources(kernel)["stack"] <= 2 * STACK_LIMIT  # tanh spills more, after the loop


@pytest.mark.parametrize("rows", [1, pytest.param(100, marks=pytest.mark.every), 1000])
@pytest.mark.parametrize("recipe", RECIPES)
def test_no_mma_waits_for_the_one_before_on_hopper(recipe, rows):
    for phase, tile in zip(("l1", "l2"), tiles(recipe, rows), strict=False):
        assert not advice(compiled(recipe, phase, tile, 90)), phase


@pytest.mark.parametrize("rows", [1, pytest.param(100, marks=pytest.mark.every), 1000])
@pytest.mark.parametrize("recipe", FP4)
def test_fp4_weights_are_decoded_where_they_lie_on_hopper(recipe, rows):
    """From shared memory once, 16 bytes at a time, to registers of the MMA; nothing spills."""
    for phase, tile in zip(("l1", "l2"), tiles(recipe, rows), strict=False):
        kernel = compiled(recipe, phase, tile, 90)
        loop = main_loop(kernel)
        reads = [line.split()[0] for line in loop if line.startswith("LDS")]
        assert {"LDS.128", "LDS"} >= set(reads), phase  # weights, and words of four scales
        values = tile.block_n * tile.block_k * (2 if phase == "l1" else 1) // (32 * tile.num_warps)
        assert reads.count("LDS.128") == values // 32, phase
        assert not any(re.match("STS|LDL|STL|SHFL", line) for line in loop), phase
        if recipe != "w4a8_block":  # its tokens' scales come from global memory
            assert not any(line.startswith("LDG.") for line in loop), phase
            assert len(loop) <= 5.5 * values, phase
        assert resources(kernel)["stack"] <= 32, phase  # around the loop, with a bias


@pytest.mark.parametrize("recipe", ["w4a16", "nvfp4"])
def test_rows_of_an_odd_number_of_scales_compile(recipe):
    for phase, tile in zip(("l1", "l2"), tiles(recipe, 1000), strict=False):
        kernel = compiled(recipe, phase, tile, 90, bytewise=True)
        assert "wgmma.mma_async" in kernel.asm["ptx"] and resources(kernel)["stack"] == 0


NATIVE = {
    "w4a8": "kind::mxf8f6f4.block_scale",
    "w4a4": "kind::mxf4.block_scale",
    "nvfp4": "kind::mxf4nvf4.block_scale",
}


@pytest.mark.parametrize("rows", [pytest.param(1, marks=pytest.mark.every), 1000])
@pytest.mark.parametrize("recipe", NATIVE)
def test_blackwell_multiplies_codes_and_scales(recipe, rows):
    for phase, tile in zip(("l1", "l2"), tiles(recipe, rows, is_native=True), strict=False):
        kernel = compiled(recipe, phase, tile, 100, has_mx=True)
        found = set(re.findall(r"tcgen05\.mma[\w.:]*", kernel.asm["ptx"]))
        assert found and all(NATIVE[recipe] in name for name in found), phase
        assert resources(kernel)["stack"] <= STACK_LIMIT, phase


@pytest.mark.parametrize("arch", [90, 100])
@pytest.mark.parametrize("rows", [1, 1000])
def test_the_dynamic_grouped_gemm_compiles_to_tensor_core_code(rows, arch):
    kernel = compiled("nvfp4", "l2", tiles("nvfp4", rows)[1], arch, alone=True)
    assert re.search(MMA[arch], kernel.asm["ptx"]) and "atom" in kernel.asm["ptx"]
    assert resources(kernel)["stack"] <= STACK_LIMIT


def preparation(name):
    """(kernel, arguments, constants) that prepare tokens of a format for the dynamic GEMM."""
    ints, some = Stand(I32), Stand(U8)
    data = Stand(BF16) if name == "bf16" else some
    return (
        _prepare_kernel,
        (ints, Stand(F32), Stand(F32), ints, ints, ints, ints, ints, data, some, Stand(BF16),
         1024, 8, 24, 4096, 4096),
        {"FORMAT": None if name is None else TOKEN_FORMATS[name], "VALUES": DECODE_VALUES,
         "HAS_GLOBAL": name == "nvfp4", "SORTED": True, "TILE_M": 64, "GROUPS": 8,
         "CHUNK": PREPARE_CHUNK},
    )  # fmt: skip


def packer(name):
    """(kernel, arguments, constants) that quantise to an FP4 format, in words."""
    some, ints = Stand(F32), Stand(I32)
    return (
        _pack_kernel,
        (ints, 2048, some, Stand(torch.int64), Stand(U8), Stand(torch.int64), some, ints, some,
         ints, ints, 512, 128, 256),
        {"ACTS": CODES[name], "HAS_ROUTING": True, "HAS_COUNT": True, "HAS_G": name == "nvfp4",
         "TOP_K": 6, "SLOTS": 8, "ROWS": 2, "BLOCKS": 32, "IS_DEEP": False, "num_warps": 2},
    )  # fmt: skip


def dispatcher(name):
    """(kernel, arguments, constants) that quantise to a format and check the routing."""
    some, ints = Stand(F32), Stand(I32)
    return (
        _dispatch_kernel,
        (Stand(BF16), 4096, some, Stand(U8), Stand(U8), Stand(torch.int64), some, ints, some, ints,
         ints, 512, 4096, 256),
        {"ACTS": CODES[name], "HAS_TOKENS": True, "HAS_ROUTING": True, "HAS_COUNT": True,
         "HAS_G": True, "TOP_K": 6, "SLOTS": 8, "ROWS": 4, "COLS": 512, "IS_DEEP": True},
    )  # fmt: skip


def quantisers():
    """(name, kernel, arguments, constants) of all of these."""
    for name in (*TOKEN_FORMATS, None):
        yield (f"prepare-{name}", *preparation(name))
    for name in CODES:
        yield (f"dispatch-{name}", *dispatcher(name))
        if name in ("mxfp4", "nvfp4"):
            yield (f"pack-{name}", *packer(name))


@pytest.mark.parametrize("name", [*TOKEN_FORMATS, None])
def test_its_preparation_compiles(name):
    kernel, args, constants = preparation(name)
    assert resources(compile_kernel(kernel, args, 90, **constants))["stack"] == 0


@pytest.mark.parametrize("arch", [90, 100])
@pytest.mark.parametrize("name", CODES)
def test_quantisers_compile(name, arch):
    if name in ("mxfp4", "nvfp4"):
        kernel, args, constants = packer(name)
        packed = compile_kernel(kernel, args, arch, **constants)
        assert resources(packed)["stack"] == 0 and "ld.global.v4" in packed.asm["ptx"]
    kernel, args, constants = dispatcher(name)
    assert resources(compile_kernel(kernel, args, arch, **constants))["stack"] == 0


@triton.jit
def _name_the_target(at):
    if compat.HAS_FP32_REDUX():
        tl.store(at, 12345)
    else:
        tl.store(at, 54321)


@pytest.mark.parametrize("arch", [90, 100])
def test_a_kernel_asks_about_the_gpu_that_it_is_compiled_for(arch):
    """Whatever was compiled before it: a compile leaves no driver behind."""
    before = triton.runtime.driver._active
    compile_kernel(_name_the_target, [Stand(I32)], 190 - arch)
    ptx = compile_kernel(_name_the_target, [Stand(I32)], arch).asm["ptx"]
    assert ("12345" in ptx, "54321" in ptx) == (arch == 100, arch == 90)
    assert triton.runtime.driver._active is before

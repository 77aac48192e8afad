"""Every portable kernel, in every tile the planner picks, compiles for Hopper and Blackwell."""

import re

import pytest
import torch

from megamoe.kernels.portable import gemm
from megamoe.kernels.portable.acts import CODES, PLAIN
from megamoe.kernels.portable.dispatch import _dispatch_kernel
from megamoe.kernels.portable.launch import arithmetic
from megamoe.problem import RECIPES
from megamoe.schedule.heuristics.portable import tiles
from tests.kernels.compiling import Stand, compile_kernel, resources
from tests.kernels.support import INTERPRETED

pytestmark = pytest.mark.skipif(INTERPRETED, reason="the interpreter compiles nothing")

F32, BF16, U8, I32, F8 = (
    torch.float32, torch.bfloat16, torch.uint8, torch.int32, torch.float8_e4m3fn,
)  # fmt: skip
DATA = {"bf16": BF16, "fp8_128x128": F8, "mxfp4": U8, "nvfp4": U8}
SCALE = {"bf16": BF16, "fp8_128x128": F32, "mxfp4": U8, "nvfp4": U8}
STACK_LIMIT = 400  # bytes a thread: wide tiles spill a little, docs/measurements/portable.md
MMA = {90: r"wgmma\.mma_async", 100: r"tcgen05\.mma"}


def compiled(recipe, phase, tile, arch):
    how = arithmetic(recipe)
    x, out, some = Stand(how.data_dtype), Stand(U8 if recipe == "w8a8" else BF16), Stand(F32)
    weights = how.weights.name
    depth = tile.block_k // 2 if DATA[weights] == U8 else tile.block_k
    w = Stand(DATA[weights], (8192, 4096)).rows((tile.block_n, depth))
    maps = [Stand(I32)] * 4
    common = dict(  # noqa: C408  keywords read like the call
        TOKENS=how.tokens, WEIGHTS=how.weights, HAS_BIAS=True, HAS_GLOBAL=recipe == "nvfp4",
        WEIGHTED=True, TOP_K=6, BLOCK_M=tile.block_m, BLOCK_N=tile.block_n, BLOCK_K=tile.block_k,
        GROUP_M=tile.group_m, num_warps=tile.num_warps, num_stages=tile.num_stages,
    )  # fmt: skip
    head = (x, some, w, Stand(SCALE[weights]), some, some, some, some)
    if phase == "l1":
        return compile_kernel(
            gemm._gated_kernel, (*head, out, some, some, *maps, 4096, 2048, 10.0), arch,
            ACTS=how.acts, ACTIVATION="swiglu", FAST_MATH=False, GATHER=True, **common,
        )  # fmt: skip
    return compile_kernel(
        gemm._linear_kernel, (*head, Stand(BF16), some, *maps, 2048, 4096, 0, 6), arch,
        ACTS=PLAIN, STORE="slots", WEIGHT_BIAS=True, **common,
    )  # fmt: skip


@pytest.mark.parametrize("arch", [90, 100])
@pytest.mark.parametrize("rows", [1, 1000])
@pytest.mark.parametrize("recipe", RECIPES)
def test_grouped_gemms_compile_to_tensor_core_code(recipe, rows, arch):
    for phase, tile in zip(("l1", "l2"), tiles(recipe, rows), strict=False):
        kernel = compiled(recipe, phase, tile, arch)
        assert re.search(MMA[arch], kernel.asm["ptx"]), phase
        used = resources(kernel)
        assert used["shared"] <= 232448 and used["stack"] <= STACK_LIMIT


@pytest.mark.parametrize("arch", [90, 100])
@pytest.mark.parametrize("name", CODES)
def test_quantisers_compile(name, arch):
    some, ints = Stand(F32), Stand(I32)
    kernel = compile_kernel(
        _dispatch_kernel,
        (Stand(BF16), 4096, some, Stand(U8), Stand(U8), Stand(torch.int64), some, ints, some, ints,
         ints, 512, 4096, 256), arch,
        ACTS=CODES[name], HAS_TOKENS=True, HAS_ROUTING=True, HAS_COUNT=True, HAS_G=True, TOP_K=6,
        SLOTS=8, ROWS=4, COLS=512,
    )  # fmt: skip
    assert resources(kernel)["stack"] == 0

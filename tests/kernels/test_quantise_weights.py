"""Weights that a kernel quantises have the bytes of `quantize_into`."""

import pytest
import torch

from megamoe.formats.quantize import quantize_into, weight_global_scale
from megamoe.formats.quantized import empty
from megamoe.formats.spec import format_named
from megamoe.kernels.common import copies
from megamoe.kernels.portable import quantise_weights
from tests.kernels.compiling import Stand, compile_kernel, resources
from tests.kernels.support import DEVICE, INTERPRETED, MARKS

FORMATS = ("mxfp4", "nvfp4", "fp8_128x128")


def bits(t):
    return t.cpu().view(torch.uint8)


@pytest.mark.parametrize("shape", [(1, 2, 160, 288), (1, 40, 64)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16])
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("_", [pytest.param(None, marks=MARKS)])
def test_bytes_are_those_of_torch(_, name, dtype, shape):
    fmt = format_named(name)
    x = torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    rows = x.flatten(0, -2)
    rows[3] = 0
    rows[4, :20] = -0.0
    rows[5] *= 2.0**-12
    rows[6, 7], rows[7, 33], rows[8, 40] = torch.nan, torch.inf, 300
    wanted = empty(shape, fmt, torch.device("cpu"))
    if wanted.global_scale is not None:
        wanted.global_scale.copy_(weight_global_scale(x))
    quantize_into(x, wanted)
    assert quantise_weights.can(fmt) and not quantise_weights.can(format_named("bf16"))
    found = quantise_weights.quantised(x.to(DEVICE), fmt)
    for key, t in wanted.tensors().items():
        a, b = bits(t), bits(getattr(found, key))
        if t.dtype == torch.float32:  # a NaN may have any sign and payload
            assert torch.equal(t.isnan(), getattr(found, key).cpu().isnan())
            a, b = bits(t.nan_to_num()), bits(getattr(found, key).cpu().nan_to_num())
        elif t.dtype == torch.float8_e4m3fn:
            a, b = a.where((a & 127) < 127, 127), b.where((b & 127) < 127, 127)
        assert torch.equal(a, b), key


@pytest.mark.skipif(INTERPRETED, reason="the interpreter compiles nothing")
@pytest.mark.parametrize("arch", [80, 90, 100])
def test_they_compile_without_a_stack(arch):
    bf16, u8, f32, i32 = map(Stand, (torch.bfloat16, torch.uint8, torch.float32, torch.int32))
    q = quantise_weights
    place = {"HALVES": 2, "INTERLEAVED": True, "LISTED": False}
    for name in ("mxfp4", "nvfp4"):
        made = compile_kernel(
            q._quantise_rows_kernel, (bf16, u8, u8, f32, i32, i32, i32, 0, 2048, 4096), arch,
            **place, ACTS=q.CODES[name], FACTORS=2 if name == "nvfp4" else 0, ROWS=q.ROWS,
            COLS=q.COLS, num_warps=q.WARPS,
        )  # fmt: skip
        assert resources(made)["stack"] == 0
    made = compile_kernel(
        q._quantise_blocks_kernel, (bf16, u8, f32, i32, i32, 0, 2048, 4096), arch, **place,
        BLOCK=q.BLOCK, num_warps=q.BLOCK_WARPS,
    )  # fmt: skip
    assert resources(made)["stack"] == 0
    both = tuple(q.Floats(bf16, i32, num) for num in (1 << 24, 1 << 23))
    made = compile_kernel(
        q._look_kernel, (both, i32, 32), arch, LARGEST=True, VALUES=q.VALUES
    )  # fmt: skip
    assert resources(made)["stack"] == 0
    words = tuple(copies.Words(i32, i32, num) for num in (1 << 22, 1 << 10))
    made = compile_kernel(
        copies._copy_experts_kernel, (words, i32, i32, 0), arch, NUM=2, LISTED=False,
        WORDS=copies.WORDS, num_warps=copies.WARPS,
    )  # fmt: skip
    assert resources(made)["stack"] == 0
    for name in ("ld.global.v4", "st.global.v4"):
        assert made.asm["ptx"].count(name) == 2 * copies.WORDS // copies.WARPS // 32 // 4

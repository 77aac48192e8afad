"""FP4 weights as they lie: the order of K that tokens are held in, and the decoding, bit by bit."""

import re

import pytest
import torch
import triton
import triton.language as tl

import megamoe as mm
from megamoe.formats.quantized import Quantized
from megamoe.kernels.common.compat import to_fp32
from megamoe.kernels.common.numbers import DECODE_ASM, e2m1_words, e4m3_twice, e8m0_twice
from megamoe.kernels.portable.acts import ORDERED
from megamoe.kernels.portable.dispatch import dispatch
from megamoe.kernels.portable.k_order import (
    position,
    position_of,
    stored_width,
    tile_in_order,
    tile_positions,
)
from tests.kernels.steps import arithmetic, grouped_gemm, rows_step
from tests.kernels.support import DEVICE, MARKS, error, tolerance
from tests.pretending import pretend_b200

E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
(on_device,) = MARKS


def test_a_lane_holds_its_columns_in_one_piece():
    """Lane t of step s multiplies positions 16 s + 2 t + (0, 1, 8, 9); all lie in 32 columns."""
    held = torch.empty(128, dtype=torch.int64)
    held[position(torch.arange(128))] = torch.arange(128)
    for lane in range(4):
        own = [16 * s + 2 * lane + i for s in range(8) for i in (0, 1, 8, 9)]
        assert sorted(held[own].tolist()) == list(range(32 * lane, 32 * lane + 32))
    assert position(1000) == 7 * 128 + position(104)
    assert [stored_width(w) for w in (32, 128, 160, 2880)] == [128, 128, 256, 2944]


@triton.jit
def _reorder_kernel(x, out, pos, first_col, ROWS: tl.constexpr, COLS: tl.constexpr):
    row, col = tl.arange(0, ROWS)[:, None], tl.arange(0, COLS)[None, :]
    tile = tile_in_order(tl.load(x + row * COLS + col))
    at = tile_positions(first_col, COLS)
    tl.store(out + row * 512 + at[None, :], tile)
    tl.store(pos + tl.arange(0, COLS), position_of(first_col + tl.arange(0, COLS)))


@on_device
@pytest.mark.parametrize(
    ("first_col", "cols"), [(0, 128), (256, 256), (64, 64), (384, 64), (96, 32)]
)
def test_tiles_are_reordered_as_columns_are(first_col, cols):
    x = torch.randn(4, cols, device=DEVICE)
    out, pos = torch.zeros(4, 512, device=DEVICE), torch.zeros(cols, dtype=torch.int32).to(DEVICE)
    _reorder_kernel[(1,)](x, out, pos, first_col, ROWS=4, COLS=cols)
    at = position(first_col + torch.arange(cols))
    assert torch.equal(pos.long().cpu(), at)
    wanted = torch.zeros(4, 512, device=DEVICE)
    wanted[:, at] = x
    assert torch.equal(out, wanted)


@on_device
@pytest.mark.parametrize("width", [32, 160, 1024, 2880])
def test_dispatch_holds_tokens_in_order_and_zeros_behind(width):
    x = torch.randn(5, width, generator=torch.Generator().manual_seed(0)).bfloat16().to(DEVICE)
    held = arithmetic("w4a16").allocate(5, width, torch.device(DEVICE)).data
    held.fill_(float("nan"))
    dispatch(x, held, None, ORDERED, step=rows_step(5, width, ORDERED))
    wanted = torch.zeros_like(held)
    wanted[:, position(torch.arange(width))] = x
    assert torch.equal(held, wanted)


def run_ptx(source, operands):
    """The registers after PTX of `and`, `shr`, `mul.lo`, `fma.rn.bf16x2` and `mov`, elementwise."""
    regs = {"x": None, "v": None, **operands}

    def value(name):
        return torch.tensor(int(name, 0)) if name[0].isdigit() else regs[name]

    def half(word, shift):
        return ((word >> shift & 0xFFFF) << 16).to(torch.int32).view(torch.float32).double()

    for op, rest in re.findall(r"(\S+) ([^;]*);", source.strip("{}")):
        *out, last = re.findall(r"[$\w]+", rest)
        if op == "mov.b32" and len(out) == 2:
            regs[out[0]], regs[out[1]] = value(last) & 0xFFFF, value(last) >> 16
        elif op == "fma.rn.bf16x2":
            assert regs[last] == 0x80008000  # minus zero: a plain product
            exact = [half(value(out[1]), i) * half(value(out[2]), i) for i in (0, 16)]
            low, high = (e.bfloat16().view(torch.int16).long() & 0xFFFF for e in exact)
            regs[out[0]] = low | (high << 16)
        elif op != ".reg":
            args = [value(name) for name in (*out[1:], last)]
            regs[out[0]] = {
                "mov.b32": lambda a: a,
                "and.b32": lambda a, b: a & b,
                "shr.u32": lambda a, b: a >> b,
                "mul.lo.u32": lambda a, b: a * b & 0xFFFFFFFF,
            }[op](*args)
    return [regs[f"${i}"] for i in range(8)]


def test_the_ptx_decodes_every_code_under_every_scale_exactly():
    rng = torch.Generator().manual_seed(0)
    scale = torch.arange(255)[:, None].expand(255, 64)
    codes = torch.randint(0, 16, (255, 64, 8), generator=rng)
    codes[:, :2] = torch.arange(16).view(2, 8)
    word = sum(codes[..., i] << (4 * i) for i in range(8))
    twice = torch.where(scale == 0, 0x00400040, scale * 0x00800080)
    got = torch.stack(run_ptx(DECODE_ASM.value, {"$8": word, "$9": twice}), -1)
    size = E2M1.double()[codes & 7] * torch.exp2(scale[..., None].double() - 127)
    wanted = torch.where(codes >= 8, -size, size)
    finite = wanted.abs() < 2.0**128
    values = got.to(torch.int16).view(torch.bfloat16).double()
    assert torch.equal(values[finite], wanted[finite]) and values[~finite].isinf().all()
    assert torch.equal(values.signbit(), codes >= 8)


@triton.jit
def _decode_kernel(words, scales, mx, nv, ROWS: tl.constexpr):
    row, word = tl.arange(0, ROWS)[:, None], tl.arange(0, 2)[None, :]
    packed = tl.load(words + row * 2 + word)
    code = tl.load(scales + row + word * 0).to(tl.int32)
    at = row * 16 + tl.arange(0, 16)[None, :]
    tl.store(mx + at, to_fp32(e2m1_words(packed, e8m0_twice(code))))
    tl.store(nv + at, e2m1_words(packed, e4m3_twice(tl.where(code % 128 == 127, 0, code))))


@on_device
def test_words_decode_exactly_under_scales_of_both_formats():
    words = torch.tensor([0x76543210, 0xFEDCBA98], dtype=torch.int64).to(torch.int32)
    words = words.expand(256, 2).contiguous().to(DEVICE)
    scales = torch.arange(256, dtype=torch.uint8)
    mx = torch.empty(256, 16, device=DEVICE)
    nv = torch.empty(256, 16, dtype=torch.bfloat16, device=DEVICE)
    _decode_kernel[(1,)](words, scales.to(DEVICE), mx, nv, ROWS=256)
    values = torch.cat((E2M1, -E2M1)).double()
    wanted = values * torch.exp2(scales.double() - 127)[:, None]
    wanted = torch.where(wanted.abs() < 2.0**128, wanted, wanted.sign() * torch.inf)
    assert torch.equal(mx.double().cpu()[:255], wanted[:255])
    of_scale = torch.where(scales % 128 == 127, 0, scales.int()).to(torch.uint8)
    wanted = values * of_scale.view(torch.float8_e4m3fn).double()[:, None]
    assert torch.equal(nv.double().cpu(), wanted)


@on_device
@pytest.mark.parametrize("code", [0, 1, 127, 253, 254])
def test_products_are_exact_under_the_least_and_largest_scales(code):
    """One-hot rows pick a column each; the last block of K is short."""
    k = 160
    codes = torch.randint(0, 4, (1, 32, k), generator=torch.Generator().manual_seed(1))
    data = (codes[..., ::2] | codes[..., 1::2] << 4).to(torch.uint8)
    scale = torch.full((1, 32, k // 32), code, dtype=torch.uint8)
    w = Quantized(data, scale, "mxfp4", (1, 32, k), None).to(DEVICE)
    factor = 2.0 ** (60 if code < 127 else -60)
    x = mm.quantize((torch.eye(k) * factor).bfloat16(), "bf16").to(DEVICE)
    y = grouped_gemm(x, w, torch.tensor([k], dtype=torch.int32, device=DEVICE))
    wanted = E2M1[codes[0]].double().T * 2.0 ** (code - 127) * factor
    assert torch.equal(y.double().cpu(), wanted)


@on_device
@pytest.mark.parametrize("recipe", ["w4a8", "w4a4", "nvfp4"])
@pytest.mark.skipif(DEVICE == "cuda", reason="the interpreter decodes what Blackwell multiplies")
def test_codes_on_both_sides_give_the_reference_layer(recipe, monkeypatch):
    from tests.kernels.support import experts, tokens

    w = experts(recipe, 5, 160, 192, bias=True)
    x, idx, weight = tokens(40, 5, 3, 192, masked_ratio=0.1)
    wanted = mm.moe(x, idx, weight, w, backend="reference")
    values = mm.moe(x, idx, weight, w, backend="portable")
    pretend_b200(monkeypatch)
    got = mm.moe(x, idx, weight, w, backend="portable")
    assert error(got, wanted) <= tolerance(recipe)
    assert error(got, values) <= tolerance(recipe)
    name = {"w4a8": "mxfp8", "w4a4": "mxfp4"}.get(recipe, recipe)
    assert torch.equal(mm.moe(mm.quantize(x, name), idx, weight, w, backend="portable"), got)

"""Register images, decoded on the CPU by the kernels' own PTX, are the weights bit for bit."""

import re

import numpy
import pytest
import torch
import triton

from megamoe.formats.quantize import dequantize
from megamoe.formats.quantized import Quantized
from megamoe.kernels.hopper.weights import decode, pack
from megamoe.layout.tiles import RegisterImage
from tests.formats.swizzle import swizzle

ASM = {  # by kind: the program, and what else it is given
    "e4m3_image": (triton.language.constexpr(decode._to_e4m3(1)), {}),
    "placed_image": (decode.PLACED_TO_BF16, {}),
    "mx_image": (decode.MX_TO_BF16, {"$9": decode.MX_BYTES, "$13": decode.LOW_BYTES}),
    "nv_image": (decode.NV_TO_BF16, {"$9": decode.NV_BYTES, "$13": decode.LOW_BYTES}),
}
SHAPES = {"l1": (2, 2, 352, 288), "l2": (3, 288, 352)}  # both widths need padding


def run_ptx(text, num_outputs, word, scale, more):
    """What a straight PTX program makes of uint32 arrays: operands $n and $n + 1, and more."""
    seen = {f"${num_outputs}": word, f"${num_outputs + 1}": scale}
    for name, value in more.items():
        seen[name] = numpy.full_like(word, value.value & 0xFFFFFFFF)

    def read(name):
        return seen[name] if name in seen else numpy.full_like(word, int(name, 0))

    def prmt(a, b, which):
        octets = [(side >> numpy.uint32(8 * i)) & 0xFF for side in (a, b) for i in range(4)]
        picks = [(which >> numpy.uint32(4 * i)) & 7 for i in range(4)]
        return sum(numpy.choose(p, octets) << numpy.uint32(8 * i) for i, p in enumerate(picks))

    def mul_bf16x2(a, b):
        x, y = (torch.from_numpy(t.view(numpy.int16).copy()).view(torch.bfloat16) for t in (a, b))
        return (x.float() * y.float()).bfloat16().view(torch.int16).numpy().view(numpy.uint32)

    known = {
        "mov.b32": lambda a: a,
        "and.b32": lambda a, b: a & b,
        "shl.b32": lambda a, b: a << b,
        "dp2a.lo.u32.u32": lambda a, b, c: (
            (a & 0xFFFF) * (b & 255) + (a >> 16) * (b >> 8 & 255) + c
        ),
        "mul.lo.u32": lambda a, b: a * b,
        "mad.lo.u32": lambda a, b, c: a * b + c,
        "shr.b32": lambda a, b: a >> b,
        "lop3.b32": lambda a, b, c, table: (
            a | (b & c) if int(table.flat[0]) == 0xF8 else (a & b) ^ c
        ),
        "prmt.b32": prmt,
        "mul.rn.bf16x2": mul_bf16x2,
    }
    for line in re.findall(r"[^{};]+;", text):
        op, _, rest = line.strip(" \n;").partition(" ")
        if op != ".reg":
            out, *names = rest.replace(" ", "").split(",")
            assert op != "lop3.b32" or names[-1] in ("0xF8", "0x6A")
            seen[out] = known[op](*map(read, names)).astype(numpy.uint32)
    return [torch.from_numpy(seen[f"${i}"].view(numpy.int32)) for i in range(num_outputs)]


def decoded(w):
    """Float64 [E, rows, columns] of an image as stored, rows and padding as they lie."""
    experts, slabs, steps, _ = w.data.shape
    lead = (experts, slabs, steps // 4)
    word = w.data.view(*lead, 2, 4, 8, 4, 4)  # upper, warp, g, t, step
    unit = numpy.uint16 if w.kind == "nv_image" else numpy.uint8
    scale = torch.from_numpy(w.scale.numpy().view(unit).astype(numpy.int32))
    is_fp8 = w.kind == "e4m3_image"  # whose threads have one group each, the others' steps
    if is_fp8:  # exponents of both rows of a thread in a byte
        scale = torch.stack((scale & 15, scale >> 4), -1).view(*lead, -1, 2).transpose(-1, -2)
    scale = scale.reshape(*lead, 2, 4, 8, *((4, 1) if is_fp8 else (1, 4))).expand_as(word)
    words = (t.contiguous().numpy().view(numpy.uint32) for t in (word, scale))
    program, more = ASM[w.kind]
    parts = torch.stack(run_ptx(program.value, 2 if is_fp8 else 4, *words, more), -1)
    if is_fp8:  # half, v
        values = parts.view(torch.float8_e4m3fn).double().unflatten(-1, (2, 4))
        order = (4, 3, 5, 6, 7, 8, 9)  # warp, upper, g, t, step, half, v
    else:  # half, v // 2, v % 2
        values = parts.view(torch.bfloat16).double().unflatten(-1, (2, 2, 2))
        order = (4, 3, 5, 7, 8, 9, 6, 10)  # warp, upper, g, step, half, v // 2, t, v % 2
    blocks = values.permute(0, 1, 2, *order).reshape(*lead, 64, 128)
    return blocks.transpose(2, 3).reshape(experts, slabs * 64, -1)


def unpacked(w):
    """FP32 [E, (2,) rows, columns] of an image, factors applied; all padding must be zero."""
    values = decoded(w)
    if w.factor_is == "row":
        values = values * w.factor.double()[..., None]
    if w.is_gated:
        values = values.unflatten(1, (-1, 2, 8)).transpose(1, 2).flatten(2, 3)
    if w.factor_is == "expert":
        values = values * w.factor.double()[..., None, None]
    inside = values[..., : w.num_outputs, : w.width]
    assert inside.count_nonzero() == values.count_nonzero() > 0
    return inside.float()


def assert_same(a, b):
    assert torch.equal(a.contiguous().view(torch.int32), b.contiguous().view(torch.int32))


def random_codes(shape, seed=0):
    rng = torch.Generator().manual_seed(seed)
    data = torch.randint(256, (*shape[:-1], shape[-1] // 2), generator=rng, dtype=torch.uint8)
    data[..., :5, :16] = 0x80  # groups of zeros, signs mixed
    return data, rng


def mx(shape, low, spread):
    """Random MXFP4; the scale codes of a row lie within `spread` of `low` plus the row's own."""
    data, rng = random_codes(shape)
    groups = (*shape[:-1], shape[-1] // 32)
    scale = torch.randint(spread + 1, groups, generator=rng)
    own = torch.randint(200 if spread < 100 else 1, (*shape[:-1], 1), generator=rng)
    return Quantized(data, (low + own + scale).to(torch.uint8), "mxfp4", shape)


@pytest.mark.parametrize("linear", SHAPES)
def test_e4m3_images_are_the_weights(linear):
    w = mx(SHAPES[linear], 20, 11)
    assert pack.fits_e4m3(w)
    packed = pack.pack(w, to_e4m3=True)
    assert packed.kind == "e4m3_image"
    assert_same(unpacked(packed), dequantize(w))


def test_a_row_of_nan_scales_is_no_e4m3_image():
    """It would be 2**128 there, and a result near it finite."""
    w = mx(SHAPES[next(iter(SHAPES))], 20, 11)
    w.data.view(-1)[0] |= 0x11
    w.scale.flatten(0, -2)[0] = 255
    assert not pack.fits_e4m3(w)


@pytest.mark.parametrize("linear", SHAPES)
def test_bf16_images_hold_every_scale(linear):
    w = mx(SHAPES[linear], 1, 253)
    assert pack.fits_bf16(w) and not pack.fits_e4m3(w)
    packed = pack.pack(w, to_e4m3=False)
    assert packed.kind == "mx_image"
    assert_same(unpacked(packed), dequantize(w))


@pytest.mark.parametrize("linear", SHAPES)
def test_placed_images_hold_scales_up_to_2(linear):
    w = mx(SHAPES[linear], 1, 127)  # codes 1 to 128
    assert pack.fits_bf16(w) and pack.can_be_placed(w)
    packed = pack.pack(w, to_e4m3=False, is_placed=True)
    assert packed.kind == "placed_image" and packed.factor is None
    assert_same(unpacked(packed), dequantize(w))


def test_every_code_and_scale_that_can_be_placed_is_exact():
    pairs = [(low | 15 - low << 4, code) for code in range(1, 129) for low in range(16)]
    w = row_of(*pairs, (0x08, 0), (0x80, 255))  # zeros, whatever their scale
    assert pack.can_be_placed(w)
    values = unpacked(pack.pack(w, to_e4m3=False, is_placed=True))
    assert_same(values[..., :-64], dequantize(w)[..., :-64])
    assert not values[..., -64:].any()


def test_scales_above_2_do_not_fit_where_a_group_counts():
    assert pack.can_be_placed(row_of((0x12, 128), (0x80, 254)))
    assert not pack.can_be_placed(row_of((0x12, 1), (0x10, 129)))
    nvfp4 = Quantized(
        torch.zeros(1, 1, 16, dtype=torch.uint8), torch.ones(1, 1, 2).to(torch.float8_e4m3fn),
        "nvfp4", (1, 1, 32), torch.ones(1),
    )  # fmt: skip
    assert not pack.can_be_placed(nvfp4)


@pytest.mark.parametrize(("linear", "lead"), [("l1", 1), ("l1", 2), ("l2", 1)])
def test_nvfp4_images_hold_every_scale(linear, lead):
    shape = SHAPES[linear]
    data, rng = random_codes(shape)
    scale = torch.randint(0x7F, (*shape[:-1], shape[-1] // 16), generator=rng, dtype=torch.uint8)
    g = torch.rand(shape[:lead], generator=rng) + 0.01
    w = Quantized(data, scale.view(torch.float8_e4m3fn), "nvfp4", shape, g)
    packed = pack.pack(w, to_e4m3=False)
    assert packed.kind == "nv_image" and packed.factor.shape == shape[: 2 if linear == "l1" else 1]
    assert_same(unpacked(packed), dequantize(w))


KINDS = {  # how each image is asked for: (to E4M3, placed)
    "e4m3_image": (True, False), "placed_image": (False, True), "mx_image": (False, False),
    "nv_image": (False, False),
}  # fmt: skip


def any_codes(kind, shape):
    """Every code, groups of zeros with any scale, and every scale that `kind` holds."""
    if kind == "nv_image":
        data, rng = random_codes(shape)
        groups = (*shape[:-1], shape[-1] // 16)
        scale = torch.randint(256, groups, generator=rng, dtype=torch.uint8)  # NaN, -0 too
        g = torch.rand(shape[: len(shape) - 2], generator=rng)
        return Quantized(data, scale.view(torch.float8_e4m3fn), "nvfp4", shape, g)
    low, spread = {"e4m3_image": (20, 11), "placed_image": (1, 127), "mx_image": (0, 255)}[kind]
    w = mx(shape, low, spread)
    zero = ~pack._nonzero_groups(w.data)
    assert 1 < zero.count_nonzero() < zero.numel()
    w.scale[zero] = torch.arange(int(zero.sum())).remainder(256).to(torch.uint8)
    w.data[0, ..., -1, :] = 0x80  # a row of nothing
    w.scale[0, ..., -1, :] = 3
    return w


@pytest.mark.parametrize("linear", SHAPES)
@pytest.mark.parametrize("kind", KINDS)
def test_what_was_packed_unpacks_to_the_same_bits(kind, linear):
    w = any_codes(kind, SHAPES[linear])
    to_e4m3, is_placed = KINDS[kind]
    image = pack.pack(w, to_e4m3=to_e4m3, is_placed=is_placed)
    assert image.kind == kind
    spares = [pack.spare_of(w[e : e + 1]) for e in range(len(w))]
    for e in range(len(w)):
        one = pack.unpack(image, spares, w.format, e)
        for name, t in w[e : e + 1].tensors().items():
            assert torch.equal(one.tensors()[name].view(torch.uint8), t.view(torch.uint8)), name


def test_scales_of_groups_of_zeros_take_no_bits_where_they_are_alike():
    w = row_of((0x00, 9), (0x88, 9), (0x12, 100), (0x80, 9))
    assert pack.spare_of(w) == pack.Spare(9)
    w.scale[0, 0, 1] = 4
    code, where, codes = pack.spare_of(w)
    assert (code, where.tolist(), codes.tolist()) == (9, [1], [4])


@pytest.mark.parametrize(("mma", "is_placed"), [("e4m3", False), ("bf16", False), ("bf16", True)])
def test_images_lie_as_the_layout_says(mma, is_placed):
    rows, cols = 128, 256
    image = RegisterImage(rows, cols, mma, is_placed=is_placed)
    codes, _ = random_codes((1, rows, cols))
    made = pack._image(codes[0], mma, is_placed).flatten().numpy().view(numpy.uint8)
    plain = numpy.unpackbits(codes.numpy().reshape(-1, 1), axis=1, bitorder="little").reshape(-1)
    stored = swizzle(torch.from_numpy(plain), image.bits.order())
    assert (numpy.packbits(stored.numpy(), bitorder="little") == made).all()


@pytest.mark.parametrize("group", [16, 32])
def test_scales_lie_as_the_layout_says(group):
    rows, cols = 128, 384
    image = RegisterImage(rows, cols, group=group)
    scale = torch.arange(rows * cols // group).remainder(251).to(torch.uint8)
    made = pack._scale_image(scale.view(1, rows, -1), 128 // group)
    assert torch.equal(made.view(torch.uint8).flatten(), swizzle(scale, image.scales.order()))


def test_exponents_lie_as_the_layout_says():
    rows, cols = 128, 384
    image = RegisterImage(rows, cols)
    shift = torch.arange(rows * cols // 32).remainder(13).to(torch.uint8)
    made = pack._pair_image(shift.view(1, rows, -1)).view(torch.uint8).flatten()
    halves = torch.stack((made & 15, made >> 4), -1).flatten()
    assert torch.equal(halves, swizzle(shift, image.exponents.order()))


def row_of(*groups):
    """MXFP4 [1, 1, 32 n] of (byte of all values, scale code) for each group."""
    data = torch.tensor([[[byte for byte, _ in groups for _ in range(16)]]], dtype=torch.uint8)
    scale = torch.tensor([[[code for _, code in groups]]], dtype=torch.uint8)
    return Quantized(data, scale, "mxfp4", (1, 1, 32 * len(groups)))


def test_a_row_fits_e4m3_if_its_exponents_span_11():
    assert pack.fits_e4m3(row_of((0x21, 100), (0x97, 111)))
    assert not pack.fits_e4m3(row_of((0x21, 100), (0x97, 112)))
    assert pack.fits_e4m3(row_of((0x21, 100), (0x97, 111), (0x80, 0), (0x00, 254)))
    assert pack.fits_e4m3(row_of((0x08, 0), (0x00, 254)))


@pytest.mark.parametrize("top", [0, 1, 11, 12, 127, 254])
def test_rebasing_is_exact_at_both_ends_of_the_range(top):
    pairs = [(byte, code) for byte in (0x10, 0x32, 0x54, 0x76, 0x98, 0xBA, 0xDC, 0xFE)
             for code in {top, max(top - 11, 0)}]  # fmt: skip
    w = row_of(*pairs)
    assert pack.fits_e4m3(w)
    assert_same(unpacked(pack.pack(w, to_e4m3=True)), dequantize(w))


def test_bf16_lacks_code_0_only_where_a_group_counts():
    assert pack.fits_bf16(row_of((0x88, 0), (0x00, 0), (0x12, 1)))
    assert not pack.fits_bf16(row_of((0x00, 5), (0x10, 0)))

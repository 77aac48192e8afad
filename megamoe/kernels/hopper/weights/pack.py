"""Weights as the Hopper kernels read them, made once from the canonical ones; nothing is rounded.

FP4 becomes register images (`decode`), slab after slab along K; rows of L1 are interleaved, 8 gate,
8 up, ...; both widths are padded with zeros to whole tiles. E4M3 and BF16 stay as they are: TMA
interleaves and pads them on the way.

Images are written expert by expert (`write`) and read back exactly (`unpack`). The one thing that
some of them do not have, scales of groups in which every value is zero, is stored apart (`Spare`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import product
from typing import NamedTuple

import torch
from torch import Tensor

from megamoe.formats.quantized import Quantized
from megamoe.formats.spec import Scale
from megamoe.layout.regions import align_up
from megamoe.layout.tiles import RegisterImage, word_bit
from megamoe.planner.tables.hopper import WIDTH

MIN_RELATIVE, MAX_RELATIVE = -5, 6  # exponents that E2M1 may be shifted by within E4M3
PLACED_BY, MAX_PLACED = 126, 128  # what is added to E8M0 codes of placed images; the largest code


@dataclass(frozen=True, slots=True, eq=False)
class Packed:
    """One linear of all experts.

    kind    row of `operands.WEIGHTS`
    data    int32 [E, slabs, K / 32, 256] (images) or the canonical tensor
    scale   int32 [E, slabs, bytes of a slab's scales / 4 * K blocks], or None
    factor  FP32: per row of an image [E, rows], per 128x128 block, per matrix (NVFP4), or None
    """

    kind: str
    data: Tensor
    scale: Tensor | None
    factor: Tensor | None
    factor_is: str  # "none", "row", "block", "expert"
    num_outputs: int
    width: int  # K before padding
    is_gated: bool

    @property
    def num_rows(self) -> int:
        """Weight rows that are multiplied: L1's outputs are L2's K, padded."""
        return 2 * align_up(self.num_outputs, WIDTH) if self.is_gated else self.num_outputs


class Facts(NamedTuple):
    """What decides which image a matrix of FP4 can be."""

    fits_e4m3: bool = True
    fits_bf16: bool = True
    can_be_placed: bool = True

    def __and__(self, other: Facts) -> Facts:
        return Facts(self[0] and other[0], self[1] and other[1], self[2] and other[2])


class Spare(NamedTuple):
    """Of one expert's matrix: scales of groups of zeros, which change no value.

    code    of most of them
    where   int64 [n]: the other groups, as they stand in the canonical scales
    codes   uint8 [n]: their scales
    """

    code: int = 127
    where: Tensor | None = None
    codes: Tensor | None = None


def kind_of(w: Quantized, *, to_e4m3: bool, is_placed: bool) -> str:
    """The row of `operands.WEIGHTS` that a matrix becomes."""
    if w.spec.element.bits != 4:
        return "bf16" if w.spec.scale is Scale.NONE else "fp8"
    if w.spec.scale is Scale.E4M3:
        return "nv_image"
    return "e4m3_image" if to_e4m3 else "placed_image" if is_placed else "mx_image"


def pack(w: Quantized, *, to_e4m3: bool, is_placed: bool = False) -> Packed:
    """`w` [E, 2, I, H] (L1) or [E, H, I] (L2). `to_e4m3` asks for images that decode to E4M3.

    is_placed  MXFP4's bits where BF16 has them, if they decode to BF16 (`can_be_placed`)
    """
    kind = kind_of(w, to_e4m3=to_e4m3, is_placed=is_placed)
    if kind in ("bf16", "fp8"):
        factor_is = "none" if kind == "bf16" else "block"
        return Packed(kind, w.data, None, w.scale, factor_is, *w.shape[-2:], len(w.shape) == 4)
    out = empty_image(kind, w.shape, w.device)
    for expert in range(len(w)):
        write(out, expert, w[expert : expert + 1])
    return out


def empty_image(
    kind: str, shape: tuple[int, ...], device: torch.device, data: Tensor | None = None
) -> Packed:
    """An image of experts [E, 2, I, H] or [E, H, I] to be written.

    data  of another kind of image, which is as large
    """
    is_gated, (outputs, width) = len(shape) == 4, shape[-2:]
    rows = align_up(outputs, WIDTH) * (2 if is_gated else 1)
    slabs, blocks = rows // 64, align_up(width, WIDTH) // 128
    words = {"e4m3_image": 32, "nv_image": 128}.get(kind, 64)  # scales of a slab in a K block
    factor_is = {"e4m3_image": "row", "nv_image": "expert"}.get(kind, "none")
    factor = None
    with torch.inference_mode(False):
        if data is None:
            data = torch.empty(shape[0], slabs, 4 * blocks, 256, dtype=torch.int32, device=device)
        scale = torch.empty(shape[0], slabs, words * blocks, dtype=torch.int32, device=device)
        if factor_is != "none":
            lead = (rows,) if factor_is == "row" else (2,) if is_gated else ()
            factor = torch.empty(shape[0], *lead, dtype=torch.float32, device=device)
    return Packed(kind, data, scale, factor, factor_is, outputs, width, is_gated)


def write(out: Packed, expert: int, w: Quantized) -> None:
    """One expert, `w` [1, ...], into an image."""
    codes, scale = _rows(w.data, out.is_gated), _rows(_bytes(w.scale), out.is_gated)
    codes = _padded(codes, align_up(out.width, WIDTH) // 2)
    groups = align_up(out.width, WIDTH) // w.spec.block[1]
    scale = _padded(scale, groups, 0 if out.kind == "nv_image" else 127)
    factor = None
    if out.kind == "e4m3_image":
        relative, factor = rebased(codes, scale)
        image = _pair_image((relative - MIN_RELATIVE).to(torch.uint8))
    else:
        if out.kind == "nv_image":
            factor = w.global_scale
            if out.is_gated and factor is not None and factor.ndim < 2:
                factor = factor.reshape(-1, 1).expand(1, 2)
        elif out.kind == "placed_image":
            scale = scale.masked_fill(~_nonzero_groups(codes), 1) + PLACED_BY
        image = _scale_image(scale, 8 if out.kind == "nv_image" else 4)
    assert out.scale is not None
    out.data[expert].copy_(_image(codes[0], *_order_of(out.kind)))
    out.scale[expert].copy_(image[0])
    if factor is not None and out.factor is not None:
        out.factor[expert].copy_(factor.reshape(1, *out.factor.shape[1:])[0])


def unpack(image: Packed, spares: list[Spare], format: str, expert: int) -> Quantized:
    """One expert of an image, [1, ...], as it was before: every bit of it."""
    assert image.scale is not None
    lead = (1, 2) if image.is_gated else (1,)
    shape = (*lead, image.num_outputs, image.width)
    codes = _codes(image.data[expert], *_order_of(image.kind))[None]
    per_block = 8 if image.kind == "nv_image" else 4
    blocks = align_up(image.width, WIDTH) // 128
    scale = image.scale[expert : expert + 1]
    if image.kind == "e4m3_image":
        assert image.factor is not None
        # 1.5 is in the middle between two powers of two
        power = torch.frexp(image.factor[expert] * 1.5).exponent - 1
        codes_of = _pair_codes(scale, blocks).int() + power[:, None] + (MIN_RELATIVE + 127)
        scale = codes_of.to(torch.uint8)
    else:
        scale = _scale_codes(scale, blocks, per_block)
        scale = scale - PLACED_BY if image.kind == "placed_image" else scale
    width = image.width // (128 // per_block)
    codes = _canonical_rows(codes, image)[..., : image.width // 2].reshape(*shape[:-1], -1)
    scale = _canonical_rows(scale, image)[..., :width].reshape(*shape[:-1], -1)
    codes, scale = codes.contiguous(), scale.contiguous()
    if image.kind == "nv_image":
        assert image.factor is not None
        g = image.factor[expert : expert + 1]
        return Quantized(codes, scale.view(torch.float8_e4m3fn), format, shape, g)
    if image.kind != "mx_image":
        spare = spares[expert]
        scale = scale.masked_fill(~_nonzero_groups(codes), spare.code)
        if spare.where is not None and spare.codes is not None:
            scale.view(-1)[spare.where.to(scale.device)] = spare.codes.to(scale.device)
    return Quantized(codes, scale, format, shape)


def spare_of(w: Quantized) -> Spare:
    """The scales of groups of zeros of one expert's MXFP4 matrix [1, ...]."""
    if w.device.type == "meta":
        return Spare()
    where = (~_nonzero_groups(w.data)).flatten().nonzero()[:, 0].cpu()
    if len(where) == 0:
        return Spare()
    codes = _bytes(w.scale).flatten()[where.to(w.device)].cpu()
    code = int(codes.mode().values)
    is_odd = codes != code
    return Spare(code, where[is_odd], codes[is_odd]) if bool(is_odd.any()) else Spare(code)


def facts_of(w: Quantized) -> Facts:
    """Which images hold every value of `w`; expert by expert, for little memory."""
    if w.spec.element.bits != 4 or w.spec.scale is not Scale.E8M0:
        return Facts(True, True, False)
    facts = Facts()
    for expert in range(len(w)):
        one = w[expert : expert + 1]
        facts &= Facts(fits_e4m3(one), fits_bf16(one), can_be_placed(one))
    return facts


def joined(first: Packed, second: Packed) -> Packed | None:
    """Both as one, where the images of `second` lie after those of `first` in one memory."""
    names = [n for n in ("data", "scale", "factor") if getattr(first, n) is not None]
    pairs = [(getattr(first, n), getattr(second, n)) for n in names]
    if first.kind != second.kind or not all(_follows(a, b) for a, b in pairs):
        return None
    both = [torch.as_strided(a, (len(a) + len(b), *a.shape[1:]), a.stride()) for a, b in pairs]
    return replace(first, **dict(zip(names, both, strict=True)))


def _follows(a: Tensor, b: Tensor) -> bool:
    return (
        a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()
        and a.storage_offset() + len(a) * a.stride(0) == b.storage_offset()
    )


def fits_e4m3(w: Quantized) -> bool:
    """Whether every MXFP4 value is an E4M3 value times one power of two per row, and none is lost.

    Otherwise the layer multiplies in BF16, which holds any of them.
    """
    zero = ~_nonzero_groups(w.data)
    scale = _bytes(w.scale)
    high = scale.masked_fill(zero, 0).amax(-1)
    low = scale.masked_fill(zero, 255).amin(-1)
    spread = high.int() - low.int()
    return bool(((spread <= MAX_RELATIVE - MIN_RELATIVE) & (high < 255)).all())  # 255 is NaN


def fits_bf16(w: Quantized) -> bool:
    """Whether no group that counts has E8M0 code 0, which is a subnormal."""
    return not bool(((_bytes(w.scale) == 0) & _nonzero_groups(w.data)).any())


def can_be_placed(w: Quantized) -> bool:
    """Whether no MXFP4 group that counts has a scale above 2: placed bits cannot hold it."""
    if w.spec.element.bits != 4 or w.spec.scale is not Scale.E8M0:
        return False
    return not bool(((_bytes(w.scale) > MAX_PLACED) & _nonzero_groups(w.data)).any())


def rebased(codes: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """E8M0 codes [.., rows, groups] as exponents relative to one power of two per row, FP32."""
    zero = ~_nonzero_groups(codes)
    top = scale.int().masked_fill(zero, -1).amax(-1, keepdim=True)  # -1: nothing in the row
    relative = (scale.int() - top + MAX_RELATIVE).masked_fill(zero, 0)
    base = torch.where(top < 0, 0, top - 127 - MAX_RELATIVE)
    return relative, torch.exp2(base.squeeze(-1).float())


def _nonzero_groups(codes: Tensor) -> Tensor:
    """Which groups of 32 hold a value other than zero; bytes [.., k / 2] -> bool [.., k / 32]."""
    return (codes.unflatten(-1, (-1, 16)) & 0x77).amax(-1) > 0


def _rows(t: Tensor, is_gated: bool) -> Tensor:
    """[E, rows, k] with L1's rows interleaved by 8 and padded to whole tiles."""
    if not is_gated:
        return _pad_rows(t, align_up(t.shape[1], WIDTH))
    half = _pad_rows(t.flatten(0, 1), align_up(t.shape[2], WIDTH)).unflatten(0, t.shape[:2])
    eights = half.unflatten(2, (-1, 8))  # E, 2, I / 8, 8, k
    return eights.transpose(1, 2).flatten(1, 3)


def _pad_rows(t: Tensor, rows: int) -> Tensor:
    return torch.nn.functional.pad(t, (0, 0, 0, rows - t.shape[1]))


def _padded(t: Tensor, cols: int, value: int = 0) -> Tensor:
    return torch.nn.functional.pad(t, (0, cols - t.shape[2]), value=value)


def _bytes(t: Tensor | None) -> Tensor:
    assert t is not None
    return t.view(torch.uint8)


def _order_of(kind: str) -> tuple[str, bool]:
    """The element that an image is decoded to, and whether its bits are placed."""
    return "e4m3" if kind == "e4m3_image" else "bf16", kind == "placed_image"


def _columns(mma: str, half: int, v: int, device: torch.device) -> Tensor:
    """Which byte of a K block's 64 has value v of a half, for each step and t of a word.

    The even column of a byte is value v = 0 or 2, the odd one the next: see `RegisterImage.column`.
    """
    image = RegisterImage(64, 128, mma)
    cols = [image.column(step, t, half, v) for step in range(4) for t in range(4)]
    assert all(col % 2 == v % 2 for col in cols)
    return torch.tensor([col // 2 for col in cols], device=device)


def _image(codes: Tensor, mma: str, is_placed: bool = False) -> Tensor:
    """Bytes [rows, k / 2] of one expert -> int32 [rows / 64, k / 32, 256]: see `decode`."""
    rows, half_k = codes.shape
    n = codes.view(rows // 64, 4, 2, 8, half_k // 64, 64)  # slab, warp, upper, g, K block, byte
    word = torch.zeros(*n.shape[:-1], 16, dtype=torch.int32, device=codes.device)  # step, t
    for half, v in product(range(2), range(4)):
        value = n.index_select(-1, _columns(mma, half, v, codes.device))
        value = value >> 4 if v % 2 else value & 15
        word |= (value & 7).int() << word_bit(half, v, 0, is_placed)
        word |= (value >> 3).int() << word_bit(half, v, 3, is_placed)
    # stored: slab, K block, upper, warp, g, t, step
    word = word.unflatten(-1, (4, 4)).permute(0, 4, 2, 1, 3, 6, 5)
    return word.reshape(rows // 64, half_k // 16, 256)


def _codes(image: Tensor, mma: str, is_placed: bool = False) -> Tensor:
    """The inverse of `_image`."""
    slabs, steps, _ = image.shape
    word = image.view(slabs, steps // 4, 2, 4, 8, 4, 4).permute(0, 3, 2, 4, 1, 6, 5).flatten(-2)
    codes = torch.empty(*word.shape[:-1], 64, dtype=torch.uint8, device=image.device)
    for half, v in product(range(2), (0, 2)):
        low, high = (
            (word >> word_bit(half, at, 0, is_placed) & 7)
            | (word >> word_bit(half, at, 3, is_placed) & 1) << 3
            for at in (v, v + 1)
        )
        at = _columns(mma, half, v, image.device)
        codes.index_copy_(-1, at, (low | high << 4).to(torch.uint8))
    return codes.view(64 * slabs, -1)


def _scale_image(scale: Tensor, per_block: int) -> Tensor:
    """Bytes [E, rows, groups] -> int32 [E, rows / 64, words]: stored slab, K block, upper, warp, g,
    group of the block."""
    experts, rows, groups = scale.shape
    s = scale.view(experts, rows // 64, 4, 2, 8, groups // per_block, per_block)
    s = s.permute(0, 1, 5, 3, 2, 4, 6).contiguous()
    return s.view(experts, rows // 64, -1).view(torch.int32)


def _pair_image(shift: Tensor) -> Tensor:
    """Numbers below 16 [E, rows, groups] -> int32 [E, rows / 64, words]: stored slab, K block,
    warp, g, group of the block; a byte has those of rows g and g + 8."""
    experts, rows, groups = shift.shape
    s = shift.view(experts, rows // 64, 4, 2, 8, groups // 4, 4).permute(0, 1, 5, 3, 2, 4, 6)
    both = s[:, :, :, 0] | s[:, :, :, 1] << 4
    return both.reshape(experts, rows // 64, -1).view(torch.int32)


def _scale_codes(image: Tensor, blocks: int, per_block: int) -> Tensor:
    """The inverse of `_scale_image`."""
    experts, slabs, _ = image.shape
    s = image.contiguous().view(torch.uint8).view(experts, slabs, blocks, 2, 4, 8, per_block)
    return s.permute(0, 1, 4, 3, 5, 2, 6).reshape(experts, 64 * slabs, blocks * per_block)


def _pair_codes(image: Tensor, blocks: int) -> Tensor:
    """The inverse of `_pair_image`."""
    experts, slabs, _ = image.shape
    both = image.contiguous().view(torch.uint8).view(experts, slabs, blocks, 4, 8, 4)
    s = torch.stack((both & 15, both >> 4), 3)  # upper
    return s.permute(0, 1, 4, 3, 5, 2, 6).reshape(experts, 64 * slabs, blocks * 4)


def _canonical_rows(t: Tensor, image: Packed) -> Tensor:
    """The inverse of `_rows`: [1, 2, I, k] or [1, H, k]."""
    if not image.is_gated:
        return t[:, : image.num_outputs]
    return t.unflatten(1, (-1, 2, 8)).transpose(1, 2).flatten(2, 3)[:, :, : image.num_outputs]

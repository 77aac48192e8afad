"""Weights as the Hopper kernels read them, made once from the canonical ones; nothing is rounded.

FP4 becomes register images (`decode`), slab after slab along K; rows of L1 are interleaved, 8 gate,
8 up, ...; both widths are padded with zeros to whole tiles. E4M3 and BF16 stay as they are: TMA
interleaves and pads them on the way.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import product

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
        """Weight rows that are multiplied: L1's outputs are as many as L2's K, padded."""
        return 2 * align_up(self.num_outputs, WIDTH) if self.is_gated else self.num_outputs


def pack(w: Quantized, *, to_e4m3: bool, is_placed: bool = False) -> Packed:
    """`w` [E, 2, I, H] (L1) or [E, H, I] (L2). `to_e4m3` asks for images that decode to E4M3.

    is_placed  MXFP4's bits where BF16 has them, if they decode to BF16 (`can_be_placed`)
    """
    is_gated = len(w.shape) == 4
    outputs, width = w.shape[-2:]
    if w.spec.scale is Scale.NONE:
        return Packed("bf16", w.data, None, None, "none", outputs, width, is_gated)
    if w.spec.element.bits == 8:
        return Packed("fp8", w.data, None, w.scale, "block", outputs, width, is_gated)
    codes, scale = _rows(w.data, is_gated), _rows(_bytes(w.scale), is_gated)
    codes = _padded(codes, align_up(width, WIDTH) // 2)
    groups = align_up(width, WIDTH) // w.spec.block[1]
    if w.spec.scale is Scale.E4M3:
        scale = _padded(scale, groups)
        factor = w.global_scale
        if is_gated and factor is not None and factor.ndim == 1:
            factor = factor[:, None].expand(-1, 2)
        assert factor is not None
        return Packed(
            "nv_image", _image(codes, "bf16"), _scale_image(scale, 8), factor.contiguous(),
            "expert", outputs, width, is_gated,
        )  # fmt: skip
    scale = _padded(scale, groups, 127)
    if not to_e4m3:
        kind = "mx_image"
        if is_placed:
            kind, scale = "placed_image", scale.masked_fill(~_nonzero_groups(codes), 1) + PLACED_BY
        return Packed(
            kind, _image(codes, "bf16", is_placed), _scale_image(scale, 4), None, "none",
            outputs, width, is_gated,
        )  # fmt: skip
    relative, base = rebased(codes, scale)
    shift = (relative - MIN_RELATIVE).to(torch.uint8)
    return Packed(
        "e4m3_image", _image(codes, "e4m3"), _pair_image(shift), base, "row",
        outputs, width, is_gated,
    )  # fmt: skip


def joined(first: Packed, second: Packed) -> Packed:
    """Images of more experts, after those of `first`."""
    assert first.scale is not None and second.scale is not None
    factor = None
    if first.factor is not None and second.factor is not None:
        factor = torch.cat((first.factor, second.factor))
    return replace(
        first,
        data=torch.cat((first.data, second.data)),
        scale=torch.cat((first.scale, second.scale)),
        factor=factor,
    )


def parted(both: Packed, num: int) -> tuple[Packed, Packed]:
    """The first `num` experts, and the others: parts of the same memory."""

    def part(of: slice) -> Packed:
        assert both.scale is not None
        factor = None if both.factor is None else both.factor[of]
        return replace(both, data=both.data[of], scale=both.scale[of], factor=factor)

    return part(slice(num)), part(slice(num, None))


def fits_e4m3(w: Quantized) -> bool:
    """Whether every MXFP4 value is an E4M3 value times one power of two per row, and none is lost.

    Otherwise the layer multiplies in BF16, which holds any of them.
    """
    zero = ~_nonzero_groups(w.data)
    scale = _bytes(w.scale)
    high = scale.masked_fill(zero, 0).amax(-1)
    low = scale.masked_fill(zero, 255).amin(-1)
    spread = high.int() - low.int()
    return bool((spread <= MAX_RELATIVE - MIN_RELATIVE).all())


def fits_bf16(w: Quantized) -> bool:
    """Whether no group that counts has E8M0 code 0, which is a subnormal."""
    return not bool(((_bytes(w.scale) == 0) & _nonzero_groups(w.data)).any())


def can_be_placed(w: Quantized) -> bool:
    """Whether no MXFP4 group that counts has a scale above 2: placed bits leave no room for it."""
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


def _order(mma: str) -> list[int]:
    """Which column of a K block of 128 is value (step, t, half, v): see `RegisterImage.column`."""
    image = RegisterImage(64, 128, mma)
    return [
        image.column(step, t, half, v)
        for step in range(4) for t in range(4) for half in range(2) for v in range(4)
    ]  # fmt: skip


def _image(codes: Tensor, mma: str, is_placed: bool = False) -> Tensor:
    """Bytes [E, rows, k / 2] -> int32 [E, rows / 64, k / 32, 256]: see `decode`.

    Expert by expert, so that little memory is needed beside the result.
    """
    experts, rows, half = codes.shape
    image = torch.empty(
        experts, rows // 64, half // 16, 256, dtype=torch.int32, device=codes.device
    )
    index = torch.tensor(_order(mma), device=codes.device)
    for one_codes, out in zip(codes, image, strict=True):
        nibbles = torch.stack((one_codes & 15, one_codes >> 4), -1).flatten(1)  # rows, k
        # slab, warp, upper, g, K block, column of 128
        n = nibbles.view(rows // 64, 4, 2, 8, half // 64, 128)
        n = n.index_select(-1, index).unflatten(-1, (4, 4, 2, 4)).int()  # step, t, half, v
        size, sign = n & 7, n >> 3
        word = torch.zeros(n.shape[:-2], dtype=torch.int32, device=n.device)
        for at in product(range(2), range(4)):
            word |= size[..., *at] << word_bit(*at, 0, is_placed)
            word |= sign[..., *at] << word_bit(*at, 3, is_placed)
        # stored: slab, K block, upper, warp, g, t, step
        out.copy_(word.permute(0, 4, 2, 1, 3, 6, 5).reshape(out.shape))
    return image


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

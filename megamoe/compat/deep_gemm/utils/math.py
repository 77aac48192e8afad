"""DeepGEMM's casts, with its habits rather than those of `megamoe.formats`:

- amax is floored at 1e-4 (here a zero group has scale 1);
- power-of-two scales have codes 1..254 (here 0..254), so no scale is subnormal;
- values are x * (1 / scale) in FP32 (here x / scale);
- E2M1 ties go toward zero (here to even), and what rounds to zero is +0 (here the sign is kept).

`mega_moe` takes what these make; both families dequantise by the same rule.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megamoe.errors import DTypeError, RangeError, ShapeError, require
from megamoe.formats.elements import e2m1_from_float, pack_e2m1, packed_e2m1_to_float
from megamoe.formats.quantize import FLOATS
from megamoe.formats.spec import E2M1, E4M3

AMAX_FLOOR = 1e-4
CODES_PER_WORD = 4  # UE8M0 bytes in an int32, the first in the low byte
_E2M1_MIDDLES = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)


def ceil_div(x: int, y: int) -> int:
    """x / y, rounded up."""
    return -(-x // y)


def align(x: int, y: int) -> int:
    """The next multiple of y."""
    return ceil_div(x, y) * y


def ceil_to_ue8m0(x: Tensor) -> Tensor:
    """The power of two at or above |x| in FP32, between 2**-126 and 2**127.

    >>> ceil_to_ue8m0(torch.tensor([0.3, -4.0, 0.0])).tolist() == [0.5, 4.0, 2.0**-126]
    True
    """
    bits = x.float().abs().view(torch.int32)
    code = (bits >> 23) + ((bits & 0x7FFFFF) != 0).int()
    return (code.clamp(1, 254) << 23).view(torch.float32)


def pack_ue8m0_to_int(x: Tensor) -> Tensor:
    """FP32 powers of two [..., k] -> int32 [..., k / 4], the first scale in the low byte."""
    require(x.dtype == torch.float32, "scales must be float32", got=x.dtype, kind=DTypeError)
    require(
        x.ndim >= 1 and x.shape[-1] % CODES_PER_WORD == 0,
        f"the last dimension must be a multiple of {CODES_PER_WORD}",
        got=tuple(x.shape),
        kind=ShapeError,
    )
    check_powers_of_two(x)
    return _pack(x)


def unpack_ue8m0_from_int(packed_sf: Tensor) -> Tensor:
    """int32 [..., k / 4] -> FP32 powers of two [..., k]; code 0 reads as 0."""
    require(
        packed_sf.dtype == torch.int32, "packed scales are int32", got=packed_sf.dtype,
        kind=DTypeError,
    )  # fmt: skip
    words = packed_sf.clone(memory_format=torch.contiguous_format)
    return (words.view(torch.uint8).int() << 23).view(torch.float32)


def check_powers_of_two(scale: Tensor) -> None:
    """Require positive powers of two: sign and mantissa bits of FP32 all zero."""
    require(
        bool(((scale.view(torch.int32) & -0x7F800001) == 0).all()),
        "scales must be positive powers of two",
        got="others",
        fix="cast with use_ue8m0=True",
        kind=RangeError,
    )


def per_token_cast_to_fp8(
    x: Tensor, use_ue8m0: bool, gran_k: int = 128, use_packed_ue8m0: bool = False
) -> tuple[Tensor, Tensor]:
    """E4M3 with one scale per token and `gran_k` columns.

    x        [m, n] float; a last group may be short
    returns  float8_e4m3fn [m, n], and float32 [m, ceil(n / gran_k)] or, packed, int32 of four each
    """
    _check_matrix(x)
    _check_packing(use_ue8m0, use_packed_ue8m0)
    scaled, scale = _scaled(x, (1, gran_k), E4M3.max, use_ue8m0)
    return scaled.to(torch.float8_e4m3fn), _packed(scale) if use_packed_ue8m0 else scale


def per_channel_cast_to_fp8(x: Tensor, use_ue8m0: bool, gran_k: int = 128) -> tuple[Tensor, Tensor]:
    """E4M3 with one scale per `gran_k` rows and column: [m, n] and float32 [m / gran_k, n]."""
    _check_matrix(x)
    require(
        x.shape[0] % gran_k == 0, f"x must have a multiple of {gran_k} rows", got=tuple(x.shape),
        kind=ShapeError,
    )  # fmt: skip
    scaled, scale = _scaled(x, (gran_k, 1), E4M3.max, use_ue8m0)
    return scaled.to(torch.float8_e4m3fn), scale


def per_custom_dims_cast_to_fp8(
    x: Tensor, dims: tuple[int, ...], use_ue8m0: bool
) -> tuple[Tensor, Tensor]:
    """E4M3 with one scale per index of `dims`; scales have those dimensions alone."""
    others = tuple(i for i in range(x.ndim) if i not in dims)
    amax = x.float().abs().amax(dim=others, keepdim=True).clamp(min=AMAX_FLOOR)
    scale = _scale_of(amax, E4M3.max, use_ue8m0)
    return (x * (1.0 / scale)).to(torch.float8_e4m3fn), scale.squeeze()


def cast_back_from_fp8(
    x_fp8: Tensor, sf: Tensor, gran_k: int = 128, use_packed_ue8m0: bool = False
) -> Tensor:
    """The FP32 values of what `per_token_cast_to_fp8` made."""
    scale = unpack_ue8m0_from_int(sf) if use_packed_ue8m0 else sf
    return x_fp8.float() * scale.repeat_interleave(gran_k, dim=1)[:, : x_fp8.shape[1]]


def per_block_cast_to_fp8(x: Tensor, use_ue8m0: bool, gran_k: int = 128) -> tuple[Tensor, Tensor]:
    """E4M3 with one scale per gran_k x gran_k block: [m, n] and float32, one entry a block."""
    _check_matrix(x)
    scaled, scale = _scaled(x, (gran_k, gran_k), E4M3.max, use_ue8m0)
    return scaled.to(torch.float8_e4m3fn), scale


def per_token_cast_to_fp4(
    x: Tensor, use_ue8m0: bool, gran_k: int = 128, use_packed_ue8m0: bool = False
) -> tuple[Tensor, Tensor]:
    """Packed E2M1 with one scale per token and `gran_k` columns.

    x        [m, n] float, n even
    returns  int8 [m, n / 2], the even column in the low half, and scales as for FP8; packed ones
             are filled up to four with 1
    """
    _check_matrix(x)
    _check_packing(use_ue8m0, use_packed_ue8m0)
    scaled, scale = _scaled(x, (1, gran_k), E2M1.max, use_ue8m0)
    packed = pack_e2m1(_e2m1_toward_zero(scaled)).view(torch.int8)
    return packed, _packed(scale) if use_packed_ue8m0 else scale


def per_token_cast_to_nvfp4(
    x: Tensor, gran_k: int = 16, use_packed_ue4m3: bool = False
) -> tuple[Tensor, Tensor]:
    """Packed E2M1 with one E4M3 scale, amax / 6, per token and `gran_k` columns.

    returns  int8 [m, n / 2], and float32 [m, n / gran_k] or, packed, int32 of four each
    Unlike `per_token_cast_to_fp4`, ties go to even, as in the release that has this cast.
    """
    _check_matrix(x)
    m, n = x.shape
    require(n % gran_k == 0, f"x must have a multiple of {gran_k} columns", got=n, kind=ShapeError)
    groups = x.float().view(m, -1, gran_k)
    amax = groups.abs().amax(dim=2)
    scale = cast_to_ue4m3(amax / torch.full_like(amax, E2M1.max))
    inverse = torch.where(scale > 0, 1.0 / scale, torch.zeros_like(scale))
    code = e2m1_from_float((groups * inverse[..., None]).view(m, n))
    code = torch.where(code == 8, torch.zeros_like(code), code)  # no negative zero
    packed = pack_e2m1(code).view(torch.int8)
    return packed, pack_ue4m3_to_int(scale) if use_packed_ue4m3 else scale


def cast_to_ue4m3(x: Tensor) -> Tensor:
    """x rounded to E4M3, in FP32."""
    return x.to(torch.float8_e4m3fn).float()


def pack_ue4m3_to_int(x: Tensor) -> Tensor:
    """E4M3 scales [..., k] -> int32 [..., k / 4], the first in the low byte."""
    require(
        x.shape[-1] % CODES_PER_WORD == 0,
        f"the last dimension must be a multiple of {CODES_PER_WORD}",
        got=tuple(x.shape),
        kind=ShapeError,
    )
    return x.to(torch.float8_e4m3fn).contiguous().view(torch.uint8).view(torch.int32)


def unpack_ue4m3_from_int(packed_sf: Tensor) -> Tensor:
    """int32 [..., k / 4] -> FP32 scales [..., k]."""
    return packed_sf.contiguous().view(torch.float8_e4m3fn).float()


def transform_ue4m3_sf_into_required_layout(sf: Tensor, mn: int) -> Tensor:
    """E4M3 scales [(g,) mn, k] -> int32 [(g,) mn, k / 4], rows contiguous."""
    require(
        sf.ndim in (2, 3) and sf.shape[-2] == mn and mn % 4 == 0,
        f"scales must be [(groups,) {mn}, columns], rows a multiple of 4",
        got=tuple(sf.shape),
        kind=ShapeError,
    )
    return pack_ue4m3_to_int(sf).mT.contiguous().mT


def transpose_packed_fp4(a: Tensor) -> Tensor:
    """int8 [m, n / 2] -> [n, m / 2]: the values transposed, packed along the other dimension."""
    _check_matrix(a, (torch.int8,))
    require(a.shape[0] % 2 == 0, "there must be an even number of rows", got=a.shape[0],
            kind=ShapeError)  # fmt: skip
    byte = a.view(torch.uint8)
    code = torch.stack((byte & 15, byte >> 4), dim=2).flatten(1)
    return pack_e2m1(code.T.contiguous()).view(torch.int8)


def cast_back_from_fp4(
    packed: Tensor, sf: Tensor, gran_k: int = 128, use_packed_ue8m0: bool = False
) -> Tensor:
    """The FP32 values of what `per_token_cast_to_fp4` made."""
    _check_matrix(packed, (torch.int8, torch.uint8))
    scale = unpack_ue8m0_from_int(sf) if use_packed_ue8m0 else sf
    values = packed_e2m1_to_float(packed.view(torch.uint8)) + 0.0  # no negative zeros
    return values * scale.repeat_interleave(gran_k, dim=1)[:, : values.shape[1]]


def _scaled(
    x: Tensor, block: tuple[int, int], limit: float, use_ue8m0: bool
) -> tuple[Tensor, Tensor]:
    """x times the reciprocal of its block's scale, in FP32, and the scales, one a block."""
    m, n = x.shape
    rows, cols = block
    padded = torch.nn.functional.pad(x.float(), (0, -n % cols, 0, -m % rows))
    blocks = padded.view(padded.shape[0] // rows, rows, padded.shape[1] // cols, cols)
    amax = blocks.abs().amax(dim=(1, 3)).clamp(min=AMAX_FLOOR)
    scale = _scale_of(amax, limit, use_ue8m0)
    scaled = blocks * (1.0 / scale)[:, None, :, None]
    return scaled.flatten(2).flatten(0, 1)[:m, :n].contiguous(), scale


def _scale_of(amax: Tensor, limit: float, use_ue8m0: bool) -> Tensor:
    # By a tensor: on CUDA torch turns division by a number into a multiplication.
    scale = amax / torch.full_like(amax, limit)
    return ceil_to_ue8m0(scale) if use_ue8m0 else scale


def _packed(scale: Tensor) -> Tensor:
    """Words of four codes, filled up with 1."""
    spare = -scale.shape[1] % CODES_PER_WORD
    return _pack(torch.nn.functional.pad(scale, (0, spare), value=1.0))


def _e2m1_toward_zero(x: Tensor) -> Tensor:
    """E2M1 codes (uint8 0..15): ties toward zero, saturating at 6, no negative zero."""
    size = x.abs()
    code = torch.zeros_like(x, dtype=torch.uint8)
    for middle in _E2M1_MIDDLES:
        code += size > middle
    return code | (((x < 0) & (code > 0)).to(torch.uint8) << 3)


def _pack(scale: Tensor) -> Tensor:
    return (scale.contiguous().view(torch.int32) >> 23).to(torch.uint8).view(torch.int32)


def _check_matrix(x: object, dtypes: tuple[torch.dtype, ...] = FLOATS) -> None:
    require(
        isinstance(x, Tensor) and x.dtype in dtypes,
        f"x must be a tensor of {' or '.join(map(str, dtypes))}",
        got=getattr(x, "dtype", type(x).__name__),
        kind=DTypeError,
    )
    assert isinstance(x, Tensor)
    require(x.ndim == 2, "x must be a matrix", got=tuple(x.shape), kind=ShapeError)


def _check_packing(use_ue8m0: bool, use_packed_ue8m0: bool) -> None:
    require(
        use_ue8m0 or not use_packed_ue8m0,
        "packed scales are powers of two",
        got="use_packed_ue8m0 without use_ue8m0",
        kind=RangeError,
    )

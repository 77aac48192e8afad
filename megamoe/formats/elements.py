"""Elements and scales bit by bit: E8M0, E4M3 and E2M1 to and from FP32; packing of 4-bit pairs.

Every function is elementwise, exact, and the same on CPU and CUDA.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from megamoe.errors import DTypeError, ShapeError, require
from megamoe.formats.spec import Element

E8M0_NAN = 255
E8M0_ONE = 127
E8M0_MAX = 254

# Between neighbours of the E2M1 grid 0 .5 1 1.5 2 3 4 6: a tie goes to the even code, so every
# other threshold belongs to the upper neighbour (D008, "bucketize").
_E2M1_ABOVE = (0.25, 1.25, 2.5, 5.0)  # the code rises where |x| > t
_E2M1_FROM = (0.75, 1.75, 3.5)  # the code rises where |x| >= t
_E2M1_GRID = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def e8m0_from_amax(amax: Tensor, element: Element) -> Tensor:
    """Scale code for a group: 2**ceil(log2(amax / element.max)) by exponent arithmetic.

    amax     FP32, >= 0
    returns  uint8 code clamped to 0..254; 127 (one) where amax is 0, 255 (NaN) if not finite
    """
    bits = amax.view(torch.int32)
    exponent, mantissa = bits >> 23, bits & 0x7FFFFF
    code = exponent - element.max_exponent + (mantissa > element.max_mantissa).int()
    code = code.clamp(0, E8M0_MAX)
    code = torch.where(amax == 0, E8M0_ONE, code)
    return torch.where(torch.isfinite(amax), code, E8M0_NAN).to(torch.uint8)


def e8m0_to_float(code: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """2**(code - 127), exactly: code 0 is the FP32 subnormal 2**-127, code 255 is NaN."""
    wide = code.int()
    bits = torch.where(wide == 0, 0x00400000, wide << 23)
    bits = torch.where(wide == E8M0_NAN, 0x7FC00000, bits)
    return bits.view(torch.float32).to(dtype)


def e4m3_from_float(x: Tensor) -> Tensor:
    """Nearest E4M3, ties to even, saturating at 448 (torch's cast overflows); NaN stays NaN."""
    return x.clamp(-448.0, 448.0).to(torch.float8_e4m3fn)


def e2m1_from_float(x: Tensor) -> Tensor:
    """Nearest E2M1 code (uint8 0..15), ties to even, saturating at 6; the sign of zero is kept.

    >>> e2m1_from_float(torch.tensor([0.25, 0.75, 2.5, 5.0, -9.0, -0.0])).tolist()
    [0, 2, 4, 6, 15, 8]
    """
    size = x.abs()
    code = torch.signbit(x).to(torch.uint8) << 3
    for threshold in _E2M1_ABOVE:
        code += size > threshold
    for threshold in _E2M1_FROM:
        code += size >= threshold
    return code


def pack_e2m1(code: Tensor) -> Tensor:
    """[..., k] codes -> [..., k / 2] bytes, the even column in the low half."""
    require(code.dtype == torch.uint8, "E2M1 codes must be uint8", got=code.dtype, kind=DTypeError)
    require(
        code.shape[-1] % 2 == 0,
        "the last dimension must be even to pack two values a byte",
        got=tuple(code.shape),
        kind=ShapeError,
    )
    return code[..., 0::2] | (code[..., 1::2] << 4)


def packed_e2m1_to_float(packed: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """[..., k / 2] bytes -> [..., k] values, both halves of a byte by one look-up."""
    return _e2m1_pairs(packed.device, dtype)[packed.int()].flatten(-2)


@functools.cache
def _e2m1_grid(device: torch.device, dtype: torch.dtype) -> Tensor:
    return torch.tensor(_E2M1_GRID + tuple(-v for v in _E2M1_GRID), dtype=dtype, device=device)


@functools.cache
def _e2m1_pairs(device: torch.device, dtype: torch.dtype) -> Tensor:
    grid = _e2m1_grid(device, dtype)
    byte = torch.arange(256, device=device)
    return torch.stack((grid[byte & 15], grid[byte >> 4]), dim=-1)

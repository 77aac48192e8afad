"""Inputs, bit views and the comparison of a quantiser with the oracle."""

from __future__ import annotations

import itertools
import math

import torch
from torch import Tensor

import megamoe as mm

from . import oracle

NAMES = tuple(oracle.RULES)
MX = ("mxfp8", "mxfp4")
FIXED_MAXIMA = (1.0, -3.0, 448.0, 2.0**100, 255 * 2.0**120)  # the last: all BF16
# Small, large, odd and even global scales; the ends are where g * scale or 6 * g leaves FP32.
GLOBAL_SCALES = (2.0**-149, 3e-44, 1e-38, 2.0**-126, 1e-3, 1 / 3, 0.7, 3.0, 2688.0, 1e30, 3e38)


def from_bits(patterns: list[int]) -> Tensor:
    """FP32 tensor with these unsigned bit patterns."""
    return torch.tensor(patterns, dtype=torch.int64).to(torch.int32).view(torch.float32)


def bits(t: Tensor) -> Tensor:
    """Unsigned bit patterns of a tensor as int64; every NaN of a wide type as the same pattern."""
    t = t.contiguous()
    if t.element_size() == 1:
        return t.view(torch.uint8).long()
    if t.dtype == torch.bfloat16:
        return t.view(torch.int16).long() & 0xFFFF
    if t.dtype == torch.float32:
        raw = t.view(torch.int32).long() & 0xFFFFFFFF
        return raw.masked_fill(t.isnan(), oracle.NAN32)
    return t.view(torch.int64).masked_fill(t.isnan(), -1)


def float_bits(value: float) -> int:
    """The bit pattern of a number rounded to FP32."""
    return bits(torch.tensor(value, dtype=torch.float32)).item()


def stored_codes(q: mm.Quantized) -> Tensor:
    """One element code per value: E2M1 pairs split, the even column from the low half."""
    raw = bits(q.data)
    if oracle.RULES[q.format].element is not oracle.E2M1:
        return raw
    return torch.stack((raw % 16, raw // 16), dim=-1).flatten(-2)


def finite_bf16() -> Tensor:
    """Every finite BF16 value as FP32: 65 280 of them, both zeros included."""
    patterns = torch.arange(1 << 16, dtype=torch.int64) << 16
    return from_bits(patterns[(patterns & 0x7F800000) != 0x7F800000].tolist())


def edge_amaxes() -> Tensor:
    """Every FP32 exponent with mantissas around 1, 1.5 and 1.75, and subnormals around them."""
    near = [m + d for m in (0, 0x400000, 0x600000) for d in (-1, 0, 1)]
    patterns = {(e << 23) + m for e in range(255) for m in near}
    patterns |= {(m << s) + d for m in (1, 3, 7) for s in range(20) for d in (-1, 0, 1)}
    return from_bits(sorted(p for p in patterns if 0 < p < oracle.INF32))


def around_the_grid(kind: oracle.Float) -> Tensor:
    """Values and midpoints of `kind` and their FP32 neighbours up to its largest, both signs."""
    grid = [oracle.decode(code, kind) for code in range(kind.top + 1)]
    points = grid + [(a + b) / 2 for a, b in itertools.pairwise(grid)]
    codes = [oracle.encode(point, oracle.FP32) + d for point in points for d in (-1, 0, 1)]
    last = oracle.encode(grid[-1], oracle.FP32)
    signs = (0, oracle.FP32.sign)
    return from_bits([code | sign for code in codes if 0 <= code <= last for sign in signs])


def alone(values: Tensor, name: str, width: int = 0) -> Tensor:
    """Each value in a block of its own, its column moving along, zeros beside it."""
    rows, cols = oracle.RULES[name].block
    width = width or min(cols, 32)
    x = torch.zeros(len(values), width)
    index = torch.arange(len(values))
    x[index, index % width] = values
    return x[:, None, :] if rows > 1 else x


def beside(values: Tensor, maximum: float, name: str) -> Tensor:
    """The values no larger than `maximum`, spread over blocks that all hold `maximum` once."""
    rows, cols = oracle.RULES[name].block
    values = values[values.abs() <= abs(maximum)]
    size = rows * cols
    values = torch.nn.functional.pad(values, (0, -len(values) % (size - 1)))
    values = values.reshape(-1, size - 1)
    x = torch.cat((torch.full((len(values), 1), maximum), values), dim=1)
    return x.reshape(-1, rows, cols) if rows > 1 else x


def assert_follows_the_rule(
    x: Tensor, name: str, g: Tensor | float | None = None, every: int = 1
) -> mm.Quantized:
    """Codes, scales and FP32 values of every `every`-th block are the oracle's, bit by bit."""
    q = mm.quantize(x, name, global_scale=g)
    assert_holds_the_rule(x, q, every)
    return q


def assert_holds_the_rule(x: Tensor, q: mm.Quantized, every: int = 1) -> None:
    """As above for a tensor that has been quantised already."""
    rows, cols = oracle.RULES[q.format].block
    height = x.shape[-2] if rows > 1 else math.prod(x.shape[:-1])
    x32 = x.to(torch.float32)
    values, codes, floats = (
        t.reshape(-1, height, x.shape[-1]).tolist()
        for t in (bits(x32), stored_codes(q), bits(mm.dequantize(q)))
    )
    scales = bits(q.scale).reshape(-1, -(-height // rows), q.scale.shape[-1]).tolist()
    factors = _factor_bits(q, height)
    places = itertools.product(range(len(values)), *map(range, (len(scales[0]), len(scales[0][0]))))
    for s, r, c in itertools.islice(places, 0, None, every):
        span = slice(r * rows, (r + 1) * rows), slice(c * cols, (c + 1) * cols)
        block, got_codes, got_floats = (_block(t[s], *span) for t in (values, codes, floats))
        g = factors[s][r * rows]
        want_codes, want_scale = oracle.quantise_block(block, q.format, g)
        where = f"{q.format}, block {(s, r, c)}, g={g:#x}"
        assert scales[s][r][c] == want_scale, (
            f"{where}: scale {scales[s][r][c]:#x}, rule {want_scale:#x}, "
            f"amax {max(v & 0x7FFFFFFF for v in block):#010x}"
        )
        _assert_same(got_codes, want_codes, block, f"{where}: element")
        float_of = {c: oracle.dequantise(c, want_scale, q.format, g) for c in set(want_codes)}
        want_floats = [float_of[code] for code in want_codes]
        _assert_same(got_floats, want_floats, block, f"{where}: FP32 value")


def assert_same_bits(got: Tensor, want: Tensor, x: Tensor, what: str) -> None:
    """Two tensors hold the same bits; `x`, of their size, is what they were made from."""
    assert got.shape == want.shape, f"{what}: got {got.shape}, want {want.shape}"
    got, want = bits(got), bits(want)
    if not torch.equal(got, want):
        first = (got != want).flatten().nonzero()[0]
        _assert_same(*(t.flatten()[first].tolist() for t in (got, want, bits(x))), what)


def _assert_same(got: list[int], want: list[int], values: list[int], what: str) -> None:
    if got != want:
        i = next(i for i, pair in enumerate(zip(got, want, strict=True)) if pair[0] != pair[1])
        raise AssertionError(
            f"{what} {i}: got {got[i]:#x}, want {want[i]:#x}, from {values[i]:#010x}"
        )


def _block(slab: list[list[int]], rows: slice, cols: slice) -> list[int]:
    return [v for row in slab[rows] for v in row[cols]]


def _factor_bits(q: mm.Quantized, height: int) -> list[list[int]]:
    """FP32 bits of the global scale of every row, 1 where the format has none."""
    g = torch.ones(()) if q.global_scale is None else q.global_scale
    g = g.reshape((*g.shape, *[1] * (len(q.shape) - 1 - g.ndim))).expand(q.shape[:-1])
    return bits(g).reshape(-1, height).tolist()

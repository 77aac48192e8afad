"""Orders in which weights and scales are stored for a kernel, as integer maps with inverses.

An `IndexMap` says where element i of the plain order is stored (`forward`) and which element is
stored at place j (`inverse`). `order` is the plain permutation of a dimension.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from megamoe.errors import RangeError, ShapeError, one_of, require

FP4_BITS = 4
SLAB_ROWS = 64  # rows of weights per warpgroup: the M of wgmma
BLOCK_K = 128  # columns per slab
_VALUES_PER_WORD = 8


@dataclass(frozen=True, slots=True)
class IndexMap:
    """A permutation of 0 .. size - 1, given by integer functions rather than by a table."""

    name: str
    size: int
    _forward: Callable[[int], int]
    _inverse: Callable[[int], int]

    def forward(self, index: int) -> int:
        """Where element `index` of the plain order is stored."""
        self._check(index)
        return self._forward(index)

    def inverse(self, place: int) -> int:
        """Which element of the plain order is stored at `place`."""
        self._check(place)
        return self._inverse(place)

    def order(self) -> list[int]:
        """stored[j] = plain[order[j]]: an `index_select` by it stores."""
        return [self._inverse(place) for place in range(self.size)]

    def _check(self, index: int) -> None:
        require(
            0 <= index < self.size,
            f"an index of {self.name} must lie in 0 .. {self.size - 1}",
            got=index,
            kind=RangeError,
        )


def gate_up(intermediate: int, group: int = 8, first: str = "gate") -> IndexMap:
    """Rows of L1: from all gate rows, then all up rows, to groups that alternate.

    group 8, gate first: A004 (the epilogue finds a gate beside its up). group 64, up first: E005.

    >>> gate_up(16, 8).order()[:16]
    [0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23]
    """
    require(
        group >= 1 and intermediate >= 1 and intermediate % group == 0,
        f"intermediate must be a multiple of the group of {group} rows",
        got=intermediate,
        fix="pad gate and up with zero rows, or use the group of 8",
        kind=ShapeError,
    )
    require(first in ("gate", "up"), "first must be gate or up", got=first, kind=RangeError)
    flip = int(first == "up")

    def forward(row: int) -> int:
        half, r = divmod(row, intermediate)
        return r // group * 2 * group + (half ^ flip) * group + r % group

    def inverse(place: int) -> int:
        pair, r = divmod(place, 2 * group)
        half, r = divmod(r, group)
        return (half ^ flip) * intermediate + pair * group + r

    return IndexMap(f"gate_up_{group}_{first}_first", 2 * intermediate, forward, inverse)


def utccp(num_rows: int) -> IndexMap:
    """Rows of packed scales: within each 128, row r goes to (r % 32) * 4 + r // 32 (A004, A054).

    >>> utccp(128).order()[:6]
    [0, 32, 64, 96, 1, 33]
    """
    require(
        num_rows >= 0 and num_rows % 128 == 0,
        "the number of scale rows must be a multiple of 128",
        got=num_rows,
        fix="pad each block of rows to 128",
        kind=ShapeError,
    )

    def forward(row: int) -> int:
        return row // 128 * 128 + row % 32 * 4 + row % 128 // 32

    def inverse(place: int) -> int:
        return place // 128 * 128 + place % 4 * 32 + place % 128 // 4

    return IndexMap("utccp_4x32", num_rows, forward, inverse)


def placed_scales(num_rows: int, num_groups: int) -> IndexMap:
    """Bytes of scales [num_rows, num_groups] as a block-scaled MMA's copies read them (A054).

    128 rows x 4 scales are 512 bytes, byte 16 (r % 32) + 4 (r // 32) + j for scale j of row r: what
    tcgen05.cp.32x128b.warpx4 spreads over 32 lanes. Blocks follow each other along K, then rows.

    >>> [placed_scales(128, 8).forward(i) for i in (0, 1, 4, 8, 32 * 8)]
    [0, 1, 512, 16, 4]
    """
    require(
        num_rows >= 0 and num_rows % 128 == 0 and num_groups % 4 == 0,
        "scales are placed in blocks of 128 rows and 4 groups",
        got=f"{num_rows} rows, {num_groups} groups",
        fix="pad with zeros",
        kind=ShapeError,
    )
    rows = utccp(num_rows)

    def forward(index: int) -> int:
        row, group = divmod(index, num_groups)
        tall, place = divmod(rows.forward(row), 128)
        return ((tall * (num_groups // 4) + group // 4) * 128 + place) * 4 + group % 4

    def inverse(at: int) -> int:
        rest, group = divmod(at, 4)
        block, place = divmod(rest, 128)
        tall, wide = divmod(block, num_groups // 4)
        return rows.inverse(tall * 128 + place) * num_groups + wide * 4 + group

    return IndexMap("placed_scales", num_rows * num_groups, forward, inverse)


@dataclass(frozen=True, slots=True)
class RegisterImage:
    """FP4 weights [num_rows, num_cols] in the order in which Hopper's threads consume them.

    A slab is 64 rows x 128 columns, one warpgroup's share of one K block; the slabs of 64 rows
    follow each other along K, so their stream is contiguous. A 32-bit word holds the eight values
    that one thread needs of one row for one product of depth 32: two halves, four values of each.
    Which columns they are depends on what wgmma multiplies (`column`). Magnitudes of half 0 lie in
    nibbles 0-3 and of half 1 in nibbles 4-7; the spare top bit of each nibble carries signs, so
    that one AND extracts the signs of a half. Placed, values 2i and 2i + 1 are in the lower and
    upper 16 bits, and a shift brings each pair's to where BF16 has them.

    plain word  = row * (num_cols / 8) + step * 4 + t            step of 32, over all K blocks
    stored word = [slab, K block, upper rows, warp, g, t, step in block]
    with row = (slab * 4 + warp) * 16 + upper * 8 + g.
    """

    num_rows: int
    num_cols: int
    mma: str = "e4m3"  # or "bf16": the element that the values are decoded to
    group: int = 32  # columns that share a scale
    is_placed: bool = False  # of "bf16"

    def __post_init__(self) -> None:
        require(
            self.num_rows > 0 and self.num_rows % SLAB_ROWS == 0,
            f"rows must be a multiple of {SLAB_ROWS}",
            got=self.num_rows,
            fix="pad with zero rows",
            kind=ShapeError,
        )
        require(
            self.num_cols > 0 and self.num_cols % BLOCK_K == 0,
            f"columns must be a multiple of {BLOCK_K}",
            got=self.num_cols,
            fix="pad with zero columns",
            kind=ShapeError,
        )
        one_of(self.mma, ("e4m3", "bf16"), "mma")
        require(
            self.group in (16, 32), "a group is 16 or 32 columns", got=self.group, kind=RangeError
        )

    @property
    def words(self) -> IndexMap:
        """Order of the 32-bit words; num_rows * num_cols / 8 of them."""
        size = self.num_rows * self.num_cols // _VALUES_PER_WORD

        def forward(word: int) -> int:
            row, rest = divmod(word, self.num_cols // _VALUES_PER_WORD)
            step, t = divmod(rest, 4)
            return (self._slab_row(row, step // 4) * 4 + t) * 4 + step % 4

        def inverse(place: int) -> int:
            rest, step = divmod(place, 4)
            rest, t = divmod(rest, 4)
            row, block = self._row_of(rest)
            return row * (self.num_cols // _VALUES_PER_WORD) + (block * 4 + step) * 4 + t

        return IndexMap("register_image_words", size, forward, inverse)

    @property
    def scales(self) -> IndexMap:
        """Order of the scale bytes, one per row and group: [.., g, group in block]."""
        size = self.num_rows * self.num_cols // self.group
        per_block = BLOCK_K // self.group

        def forward(index: int) -> int:
            row, group = divmod(index, self.num_cols // self.group)
            return self._slab_row(row, group // per_block) * per_block + group % per_block

        def inverse(place: int) -> int:
            rest, group = divmod(place, per_block)
            row, block = self._row_of(rest)
            return row * (self.num_cols // self.group) + block * per_block + group

        return IndexMap("register_image_scales", size, forward, inverse)

    @property
    def exponents(self) -> IndexMap:
        """Order of the 4-bit exponents of "e4m3": as the scales, but row g + 8 after row g."""
        scales = self.scales
        block = SLAB_ROWS * BLOCK_K // self.group  # of a slab in a K block

        def forward(index: int) -> int:
            slab, place = divmod(scales.forward(index), block)
            upper, rest = divmod(place, block // 2)
            return slab * block + 2 * rest + upper

        def inverse(place: int) -> int:
            slab, at = divmod(place, block)
            rest, upper = divmod(at, 2)
            return scales.inverse(slab * block + upper * (block // 2) + rest)

        return IndexMap("register_image_exponents", scales.size, forward, inverse)

    @property
    def bits(self) -> IndexMap:
        """The whole image, bit by bit: plain bit = (row * num_cols + column) * 4 + bit of E2M1."""
        size = self.num_rows * self.num_cols * FP4_BITS
        words = self.words

        def forward(index: int) -> int:
            value, bit = divmod(index, FP4_BITS)
            row, col = divmod(value, self.num_cols)
            step, t, half, v = self.holder(col % BLOCK_K)
            word = row * (self.num_cols // 8) + (col // BLOCK_K * 4 + step) * 4 + t
            return words.forward(word) * 32 + word_bit(half, v, bit, self.is_placed)

        def inverse(place: int) -> int:
            stored, shift = divmod(place, 32)
            row, rest = divmod(words.inverse(stored), self.num_cols // 8)
            step, t = divmod(rest, 4)
            half, v, bit = word_value(shift, self.is_placed)
            col = step // 4 * BLOCK_K + self.column(step % 4, t, half, v)
            return (row * self.num_cols + col) * FP4_BITS + bit

        return IndexMap("register_image_bits", size, forward, inverse)

    def column(self, step: int, t: int, half: int, v: int) -> int:
        """Column, of 128, of value `v` of a half of the word of thread `t` of four for a product.

        BF16: as wgmma has them. E4M3: all of a thread's are of one group of 32 (`device.columns`).
        """
        if self.mma == "e4m3":
            return 32 * t + 8 * step + 4 * half + v
        return 32 * step + 16 * half + 8 * (v // 2) + 2 * t + v % 2

    def holder(self, col: int) -> tuple[int, int, int, int]:
        """(step, t, half, v) of a column: the inverse of `column`."""
        if self.mma == "e4m3":
            return col % 32 // 8, col // 32, col % 8 // 4, col % 4
        c = col % 16
        return col // 32, c % 8 // 2, col % 32 // 16, c // 8 * 2 + c % 2

    def _slab_row(self, row: int, block: int) -> int:
        # [slab, K block, upper, warp, g] of one row in one K block, as one number
        rest, g = divmod(row, 8)
        rest, upper = divmod(rest, 2)
        slab, warp = divmod(rest, 4)
        at = slab * (self.num_cols // BLOCK_K) + block
        return ((at * 2 + upper) * 4 + warp) * 8 + g

    def _row_of(self, slab_row: int) -> tuple[int, int]:
        rest, g = divmod(slab_row, 8)
        rest, warp = divmod(rest, 4)
        rest, upper = divmod(rest, 2)
        slab, block = divmod(rest, self.num_cols // BLOCK_K)
        return ((slab * 4 + warp) * 2 + upper) * 8 + g, block


_PLACED_SIZES, _PLACED_SIGNS = (6, 3, 0, 9), (15, 12, 13, 14)  # of each pair, in its 16 bits


def word_bit(half: int, v: int, bit: int, is_placed: bool = False) -> int:
    """Bit of a word that holds bit 0-2 (magnitude) or 3 (sign) of value `v` 0-3 of a half."""
    if is_placed:
        pair = 2 * half + v // 2
        return v % 2 * 16 + (_PLACED_SIGNS[pair] if bit == 3 else _PLACED_SIZES[pair] + bit)
    if bit == 3:
        return 8 * v + (3 if half else 7)
    return 16 * half + 4 * v + bit


def word_value(shift: int, is_placed: bool = False) -> tuple[int, int, int]:
    """(half, value 0-3, bit 0-3) that lies at bit `shift` of a word: the inverse of `word_bit`."""
    if is_placed:
        upper, at = divmod(shift, 16)
        is_sign = at in _PLACED_SIGNS
        pair = _PLACED_SIGNS.index(at) if is_sign else _PLACED_SIZES.index(at // 3 * 3)
        return pair // 2, pair % 2 * 2 + upper, 3 if is_sign else at % 3
    nibble, bit = divmod(shift, 4)
    if bit == 3:
        return int(nibble % 2 == 0), nibble // 2, 3
    return nibble // 4, nibble % 4, bit

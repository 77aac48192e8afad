"""Stored orders are permutations, and their inverses take them back, over the whole domain."""

from __future__ import annotations

import pytest

from megamoe.errors import RangeError, ShapeError
from megamoe.layout.tiles import RegisterImage, gate_up, utccp, word_bit, word_value

IMAGES = [
    RegisterImage(64, 128),
    RegisterImage(256, 384, "bf16"),
    RegisterImage(192, 256, "bf16", group=16),
    RegisterImage(64, 256, "bf16", is_placed=True),
]
MAPS = [
    *(gate_up(i, g, first) for i in (64, 192, 2880) for g in (8, 64) for first in ("gate", "up")),
    *(utccp(n) for n in (0, 128, 384)),
    *(index for image in IMAGES for index in (image.words, image.scales, image.bits)),
    RegisterImage(128, 256).exponents,
]


@pytest.mark.parametrize("index", MAPS, ids=lambda m: f"{m.name}-{m.size}")
def test_inverse_takes_every_index_back(index):
    order = index.order()
    assert sorted(order) == list(range(index.size))
    for place, plain in enumerate(order):
        assert index._forward(plain) == place


@pytest.mark.parametrize("index", [gate_up(64), utccp(128)], ids=lambda m: m.name)
def test_an_index_outside_is_refused(index):
    for bad in (-1, index.size):
        with pytest.raises(RangeError, match=rf"must lie in 0 .. 127; got {bad}"):
            index.forward(bad)
        with pytest.raises(RangeError):
            index.inverse(bad)


def test_interleave_by_8_puts_gate_before_up():
    order = gate_up(16, 8).order()
    assert order == [*range(8), *range(16, 24), *range(8, 16), *range(24, 32)]


def test_interleave_by_64_puts_up_first():
    order = gate_up(128, 64, "up").order()
    assert order[:64] == list(range(128, 192))
    assert order[64:128] == list(range(64))


def test_scale_rows_follow_the_published_formula():
    for row in range(256):
        assert utccp(256).forward(row) == (row & ~127) + (row & 31) * 4 + ((row >> 5) & 3)


def test_scale_rows_are_the_transpose_of_4_by_32():
    assert utccp(128).order() == [j + 32 * i for j in range(32) for i in range(4)]


COLUMNS = {  # of 128, of the word of thread t for product `step`
    "e4m3": lambda step, t: [32 * t + 8 * step + c for c in range(8)],
    "bf16": lambda step, t: [32 * step + 2 * t + c for c in (0, 1, 8, 9, 16, 17, 24, 25)],
}


@pytest.mark.parametrize("mma", COLUMNS)
def test_a_word_holds_one_row_and_the_columns_of_one_thread(mma):
    image = RegisterImage(64, 128, mma)
    for stored in range(image.words.size):
        values = {divmod(image.bits.inverse(stored * 32 + bit), 4) for bit in range(32)}
        rows = {value // 128 for value, _ in values}
        cols = sorted({value % 128 for value, _ in values})
        step, t = divmod(image.words.inverse(stored) % 16, 4)
        assert len(rows) == 1 and cols == COLUMNS[mma](step, t)
        assert cols[0] // 32 == cols[-1] // 32  # one scale


def test_one_and_extracts_the_signs_of_a_half():
    signs = {0: 0, 1: 0}
    for v in range(4):
        signs[0] |= 1 << word_bit(0, v, 3)
        signs[1] |= 1 << word_bit(1, v, 3)
    assert signs == {0: 0x80808080, 1: 0x08080808}
    magnitudes = sum(1 << word_bit(h, v, b) for h in (0, 1) for v in range(4) for b in range(3))
    assert magnitudes == 0x77777777


@pytest.mark.parametrize("is_placed", [False, True])
def test_word_bits_and_values_are_inverse(is_placed):
    places = set()
    for half in (0, 1):
        for v in range(4):
            for bit in range(4):
                place = word_bit(half, v, bit, is_placed)
                assert word_value(place, is_placed) == (half, v, bit)
                places.add(place)
    assert places == set(range(32))


def test_a_shift_brings_a_placed_pair_to_where_bf16_has_it():
    for pair, (size, sign) in enumerate([(0, 0), (3, 3), (6, 2), (-3, 1)]):  # to the left
        for upper in (0, 1):
            half, v = pair // 2, pair % 2 * 2 + upper
            bits = [word_bit(half, v, bit, True) + size for bit in range(3)]
            assert bits == [16 * upper + at for at in (6, 7, 8)]  # of mantissa and exponent
            assert word_bit(half, v, 3, True) + sign == 16 * upper + 15


def test_a_thread_finds_its_16_bytes_in_a_row():
    # four words (the K steps of a block) of one row and thread lie together: one 128-bit load
    words = RegisterImage(64, 256).words
    for row in range(64):
        for t in range(4):
            places = [words.forward(row * 32 + step * 4 + t) for step in range(4)]
            assert places == [places[0] + i for i in range(4)] and places[0] % 4 == 0


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: gate_up(96, 64), "multiple of the group of 64 rows; got 96"),
        (lambda: utccp(100), "multiple of 128; got 100"),
        (lambda: RegisterImage(96, 128), "rows must be a multiple of 64; got 96"),
        (lambda: RegisterImage(64, 96), "multiple of 128; got 96"),
    ],
)
def test_a_shape_that_does_not_tile_is_refused(call, says):
    with pytest.raises(ShapeError, match=says):
        call()


@pytest.mark.parametrize("bad", [{"mma": "fp4"}, {"group": 64}], ids=str)
def test_an_image_is_for_an_element_and_a_group_that_exist(bad):
    with pytest.raises(RangeError):
        RegisterImage(64, 128, **bad)


def test_the_slabs_of_64_rows_follow_each_other_along_k():
    words = RegisterImage(128, 256).words
    per_slab = 64 * 128 // 8
    for word in range(words.size):
        row, col = word // 32, word % 32 // 4 * 32
        assert words.forward(word) // per_slab == row // 64 * 2 + col // 128


def test_only_gate_or_up_may_come_first():
    with pytest.raises(RangeError, match="gate or up; got down"):
        gate_up(64, 8, "down")

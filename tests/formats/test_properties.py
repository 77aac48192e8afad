"""Properties over arbitrary bit patterns: the rule holds, and blocks behave as it implies."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import megamoe as mm

from . import oracle
from .support import NAMES, assert_follows_the_rule, bits, from_bits, stored_codes

ANY_BITS = st.integers(0, 2**32 - 1)
FINITE_BITS = st.builds(lambda s, m: s << 31 | m, st.integers(0, 1), st.integers(0, 0x7F7FFFFF))
FACTORS = st.integers(1, 0x7F7FFFFF)  # FP32 bits of every positive finite number
SETTINGS = settings(deadline=None, derandomize=True, max_examples=150, database=None)
NAME = st.sampled_from(NAMES)


def near(amax: int, drops: list[int]) -> list[int]:
    """Magnitude codes up to 20 binades below `amax`, so that few of them round to zero."""
    return [max(amax - drop, 0) for drop in drops]


def factor_for(name: str, g: int) -> float | None:
    return from_bits([g]).item() if name == "nvfp4" else None


@SETTINGS
@given(NAME, FACTORS, st.lists(ANY_BITS, min_size=32, max_size=32))
def test_any_bit_patterns_follow_the_rule(name, g, values):
    assert_follows_the_rule(from_bits(values)[None], name, factor_for(name, g))


@SETTINGS
@given(
    NAME,
    FACTORS,
    st.integers(0, 0x7F7FFFFF),
    st.lists(st.integers(0, 20 << 23), min_size=32, max_size=32),
)
def test_any_values_near_their_maximum_follow_the_rule(name, g, amax, drops):
    assert_follows_the_rule(from_bits(near(amax, drops))[None], name, factor_for(name, g))


@SETTINGS
@given(
    st.integers(1 << 23, 0x7F7FFFFF),
    st.integers(-6 << 23, 12 << 23),
    st.lists(st.integers(0, 8 << 23), min_size=32, max_size=32),
)
def test_nvfp4_follows_the_rule_where_the_scale_is_in_reach(amax, offset, drops):
    """g from far too small to far too large for the block's maximum."""
    g = min(max(amax - offset, 1), 0x7F7FFFFF)
    assert_follows_the_rule(from_bits(near(amax, drops))[None], "nvfp4", from_bits([g]).item())


@SETTINGS
@given(NAME, st.lists(FINITE_BITS, min_size=32, max_size=32))
def test_negation_flips_only_the_sign_of_live_blocks(name, values):
    x = from_bits(values)[None]
    q, negated = mm.quantize(x, name), mm.quantize(-x, name)
    assert torch.equal(bits(q.scale), bits(negated.scale))
    rule = oracle.RULES[name]
    live = (bits(q.scale) != 0) | (rule.scale == "e8m0")  # E8M0 code 0 is a power of two
    live = live.repeat_interleave(rule.block[1], dim=-1)[:, :32]
    want = torch.where(live, stored_codes(q) ^ rule.element.sign, 0)
    assert torch.equal(stored_codes(negated), want)


@SETTINGS
@given(NAME, st.lists(ANY_BITS, min_size=16, max_size=16), st.permutations(range(16)))
def test_order_within_a_block_does_not_matter(name, values, order):
    values = values + [0] * 16
    x = from_bits(values)[None]
    shuffled = x.clone()
    shuffled[0, :16] = x[0, order]
    q, moved = mm.quantize(x, name), mm.quantize(shuffled, name)
    assert torch.equal(bits(q.scale), bits(moved.scale))
    assert torch.equal(stored_codes(q)[0, order], stored_codes(moved)[0, :16])

"""Every finite BF16 value through every quantiser: codes, scales and FP32 values, bit by bit."""

from __future__ import annotations

import pytest
import torch

import megamoe as mm

from . import oracle
from .support import (
    FIXED_MAXIMA,
    GLOBAL_SCALES,
    NAMES,
    alone,
    assert_follows_the_rule,
    assert_same_bits,
    beside,
    bits,
    finite_bf16,
)

ROW_FORMATS = [name for name in NAMES if oracle.RULES[name].block[0] == 1]


def test_there_are_65280_finite_bf16_values():
    values = finite_bf16()
    assert len(values) == len(set(bits(values).tolist())) == 65280
    assert values.isfinite().all()
    assert torch.equal(values, values.bfloat16().float())


@pytest.mark.parametrize("name", ROW_FORMATS)
def test_every_bf16_value_alone_in_its_block_matches_the_rule(name):
    assert_follows_the_rule(alone(finite_bf16(), name), name)


@pytest.mark.parametrize("part", range(4))
def test_every_bf16_value_alone_in_a_square_block_matches_the_rule(part):
    """Each block is padded to 128 x 128 inside: four parts, side by side."""
    assert_follows_the_rule(alone(finite_bf16()[part::4], "fp8_128x128"), "fp8_128x128")


def test_bf16_values_alone_in_a_whole_row_of_128_match_the_rule():
    assert_follows_the_rule(alone(finite_bf16()[::5], "fp8_1x128", 128), "fp8_1x128")


@pytest.mark.parametrize("maximum", FIXED_MAXIMA)
@pytest.mark.parametrize("name", NAMES)
def test_every_bf16_value_beside_a_fixed_maximum_matches_the_rule(name, maximum):
    x = beside(finite_bf16(), maximum, name)
    q = assert_follows_the_rule(x, name)
    assert len(set(bits(q.scale).flatten().tolist())) == 1


@pytest.mark.parametrize("g", GLOBAL_SCALES)
def test_bf16_values_alone_in_a_block_match_the_rule_under_a_global_scale(g):
    assert_follows_the_rule(alone(finite_bf16()[::11], "nvfp4"), "nvfp4", g)


@pytest.mark.parametrize("g", GLOBAL_SCALES)
def test_bf16_values_beside_a_maximum_match_the_rule_under_a_global_scale(g):
    assert_follows_the_rule(beside(finite_bf16()[::11], 448.0, "nvfp4"), "nvfp4", g)


def test_every_bf16_value_is_stored_as_it_is_in_bf16():
    x = finite_bf16().reshape(-1, 32)
    q = mm.quantize(x, "bf16")
    assert torch.equal(bits(q.data), bits(x) >> 16)
    assert_same_bits(mm.dequantize(q), x, x, "bf16 value")

"""Experts per wave: the published divisor rule with its examples, and the search for the tail."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megamoe.studies.deep_gemm.waves import (
    WAVE_RULES,
    experts_per_wave,
    fewest_experts,
    fullest_tail,
    round_up_to_divisor,
)

from .support import SETTINGS


@pytest.mark.parametrize(("asked", "expected"), [(5, 8), (3, 4), (9, 16), (1, 1), (16, 16)])
def test_round_ups_for_16_experts(asked, expected):
    assert round_up_to_divisor(asked, 16) == expected


def test_the_worked_example_has_8_experts_per_wave_and_4_waves():
    # A025: 1024 tokens, top-8, 32 local experts, intermediate 2048, tiles of 128, 148 SMs
    load = 1024 * 8 / 32
    args = {"block_m": 128, "num_l1_n": 2 * 2048 // 128, "num_sms": 148, "num_experts": 32}
    assert fewest_experts(load, **args) == 5
    value, why = experts_per_wave(load, rule="divisor", **args)
    assert value == 8 and 32 // value == 4
    assert "64 L1 blocks per expert: 5 fill 148 SMs 2 times" in why
    assert round(8 * 64 / 148, 1) == 3.5  # SMs oversubscribed


def test_less_than_a_row_per_expert_is_one_wave():
    args = {"block_m": 16, "num_l1_n": 32, "num_sms": 148, "num_experts": 48}
    for rule in WAVE_RULES:
        assert experts_per_wave(0.9, rule=rule, **args)[0] == 48


@SETTINGS
@given(st.integers(1, 64), st.integers(1, 64))
def test_a_divisor_is_the_least_that_holds(value, total):
    found = round_up_to_divisor(min(value, total), total)
    assert total % found == 0 and found >= min(value, total)
    assert all(total % d for d in range(min(value, total), found))


@SETTINGS
@given(st.integers(1, 64), st.integers(1, 64))
def test_the_tail_search_takes_the_fullest_last_wave(least, total):
    least = min(least, total)
    found = fullest_tail(least, total)

    def tail(n):
        return (total % n or n) / n

    assert least <= found <= 2 * least
    for n in range(least, min(2 * least, total) + 1):
        assert tail(found) > tail(n) or (tail(found) == tail(n) and found <= n)


def test_the_tail_search_need_not_divide():
    assert fullest_tail(5, 33) == 7 and 33 % 7 != 0  # 7 7 7 7 5 beats 5 x 6 + 3 and 11 x 3
    assert fullest_tail(5, 32) == 8


def test_one_expert_that_fills_the_machine_keeps_the_smallest_wave():
    args = {"block_m": 128, "num_l1_n": 48, "num_sms": 148, "num_experts": 48}
    assert experts_per_wave(1024, rule="tail", **args)[0] == 1
    value, why = experts_per_wave(512, rule="tail", **args)
    assert value == 2 and "smallest wave" in why


@SETTINGS
@given(
    st.floats(0, 3000),
    st.sampled_from([8, 64, 192]),
    st.integers(1, 96),
    st.integers(1, 160),
    st.integers(1, 96),
    st.sampled_from(list(WAVE_RULES)),
)
def test_any_load_gives_a_legal_wave(load, block_m, num_l1_n, num_sms, experts, rule):
    value, why = experts_per_wave(
        load, block_m=block_m, num_l1_n=num_l1_n, num_sms=num_sms, num_experts=experts, rule=rule
    )
    assert 1 <= value <= experts and why
    if rule == "divisor":
        assert experts % value == 0

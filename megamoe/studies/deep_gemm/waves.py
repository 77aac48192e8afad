"""How many experts share a wave: enough that their L1 blocks fill the machine.

Small waves let L2, and the rows on their way home, start early; waves that are too small leave
SMs without work. Both rules aim at IMBALANCE blocks per SM, because uneven routing gives some
experts less than the mean.
"""

from __future__ import annotations

from math import ceil

from megamoe.layout.regions import ceil_div

IMBALANCE = 2  # A024
WAVE_RULES = {
    "divisor": "equal waves: rounded up to a divisor of the local experts",
    "tail": "the fullest last wave between the least number and twice that",
}


def fewest_experts(
    rows_per_expert: float, *, block_m: int, num_l1_n: int, num_sms: int, num_experts: int
) -> int:
    """The least number of experts whose L1 blocks fill the SMs IMBALANCE times (A024).

    With less than one row per expert most experts are empty: all of them form one wave.
    """
    if rows_per_expert < 1:
        return num_experts
    per_expert = ceil_div(ceil(rows_per_expert), block_m) * num_l1_n
    return min(ceil_div(IMBALANCE * num_sms, per_expert), num_experts)


def round_up_to_divisor(value: int, total: int) -> int:
    """The least divisor of `total` that is not below `value`.

    >>> [round_up_to_divisor(value, 16) for value in (5, 3, 9)]
    [8, 4, 16]
    """
    return next((d for d in range(max(value, 1), total) if total % d == 0), total)


def fullest_tail(least: int, total: int) -> int:
    """The number in least .. 2 * least whose last wave is fullest; the smaller wins a tie.

    >>> fullest_tail(5, 33), fullest_tail(5, 32)
    (7, 8)
    """
    candidates = range(least, min(2 * least, total) + 1)
    return max(candidates, key=lambda n: (((total - 1) % n + 1) / n, -n))


def experts_per_wave(
    rows_per_expert: float,
    *,
    block_m: int,
    num_l1_n: int,
    num_sms: int,
    num_experts: int,
    rule: str = "divisor",
) -> tuple[int, str]:
    """(experts per wave, why), by one of WAVE_RULES."""
    least = fewest_experts(
        rows_per_expert,
        block_m=block_m,
        num_l1_n=num_l1_n,
        num_sms=num_sms,
        num_experts=num_experts,
    )
    if rows_per_expert < 1:
        return num_experts, "less than one row per expert: all experts in one wave"
    per_expert = ceil_div(ceil(rows_per_expert), block_m) * num_l1_n
    asked = f"{per_expert} L1 blocks per expert: {least} fill {num_sms} SMs {IMBALANCE} times"
    if least >= num_experts:
        return num_experts, f"{asked}; that is every expert"
    if rule == "divisor":
        return round_up_to_divisor(least, num_experts), f"{asked}; {WAVE_RULES[rule]}"
    if per_expert >= num_sms:
        return least, f"{asked}; one expert fills the SMs, so the smallest wave"
    return fullest_tail(least, num_experts), f"{asked}; {WAVE_RULES[rule]}"

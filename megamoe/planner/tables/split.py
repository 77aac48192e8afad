"""Split's tables: how SMs are parted, and what splitting measured beside staged launches.

Measured on one H200 (132 SMs), torch 2.11+cu130, triton 3.6.0, 2026-11-18: bb0a046 with L1 and L2 side
by side (benchmarks/h200/split-first.txt), which is an earlier form of these launches.
"""

from __future__ import annotations

SMS_UNIT = 8  # SMs of a partition on Hopper come in multiples of this
L1_WORK, L2_WORK = 2, 1  # products of a row: gate and up, down
CHUNK = 512  # slots of a program of `window`

WHY_PARTED = (
    "L1 has two thirds of the products: of 80, 88 and 96 of 132 SMs, 88 was fastest in 14 of 15 cells "
    "on one H200, 2% from it in the other; 80 took up to 9% longer, 96 up to 21%"
)

# recipe -> (least, most) of split's time over that of staged launches, with 88 + 44 SMs.
MEASURED = {"w8a8": (1.03, 1.11), "w4a8_block": (1.10, 1.31)}


def why_not_auto(recipe: str) -> str:
    """Why `auto` does not take split on one rank."""
    one = recipe if recipe in MEASURED else "w8a8"
    least, most = MEASURED[one]
    said = "" if one == recipe else f"; {recipe} was not measured"
    return (
        f"only if asked for: {one} took {least:.2f} to {most:.2f} of staged launches on one H200 (at "
        f"bb0a046, an earlier form), no cell was faster{said}"
    )

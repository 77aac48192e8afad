"""Small values of the reference system's plan: tiles, warp roles, and stages out of a budget."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from megamoe.errors import CapacityError, require
from megamoe.planner.choice import Term

MIN_STAGES, MAX_STAGES = 2, 32  # A026: below two nothing overlaps
WARPS_PER_GROUP = 4  # registers are given per warpgroup


class Picked(NamedTuple):
    """What a table row answers: a value and the reason."""

    value: int
    why: str


@dataclass(frozen=True, slots=True)
class Tiles:
    """The tile shape: rows of tokens, rows of weights, depth; and what the tensor cores see."""

    block_m: int
    block_n: int
    block_k: int
    mma: str  # "bf16", "fp8" or "fp4"


@dataclass(frozen=True, slots=True)
class Role:
    """Warps of one CTA that do one thing."""

    name: str
    num_warps: int
    registers: int  # per thread
    why: str


def num_registers(roles: tuple[Role, ...]) -> int:
    """Registers of one CTA: small roles share warpgroups, and a group counts at its largest."""
    total, waiting, largest = 0, 0, 0
    for role in roles:
        if role.num_warps % WARPS_PER_GROUP == 0:
            total += role.num_warps * 32 * role.registers
            continue
        waiting, largest = waiting + role.num_warps, max(largest, role.registers)
    groups = -(-waiting // WARPS_PER_GROUP)
    return total + groups * WARPS_PER_GROUP * 32 * largest


def num_stages(fixed: tuple[Term, ...], stage: tuple[Term, ...], limit: int) -> Picked:
    """As many stages as the budget holds, at most MAX_STAGES; less than two is refused."""
    fixed_bytes, stage_bytes = sum(t.num_bytes for t in fixed), sum(t.num_bytes for t in stage)
    fit = max(0, limit - fixed_bytes) // stage_bytes
    require(
        fit >= MIN_STAGES,
        f"two stages must fit in {limit} bytes of shared memory",
        got=f"{fixed_bytes} fixed bytes and {stage_bytes} a stage",
        fix="take a smaller block_m, block_n or block_k",
        kind=CapacityError,
    )
    why = f"({limit:,} - {fixed_bytes:,} fixed) / {stage_bytes:,} a stage"
    return Picked(min(fit, MAX_STAGES), why)

"""The roofline floor of one call on one rank: no schedule beats it (A083).

Three resources, each a named sum of what must pass through it; the floor is the slowest. Rows and
touched experts are those of even random routing.
"""

from __future__ import annotations

from dataclasses import dataclass

from megamoe.formats.spec import BF16, FP8_COMBINE, recipe_named
from megamoe.hardware import Hardware
from megamoe.layout.rows import stored_bytes
from megamoe.planner.load import rows_per_rank, touched_experts
from megamoe.problem import Problem


@dataclass(frozen=True, slots=True)
class Floor:
    """Bytes and flops of one rank, and the time each resource needs at what it reaches."""

    flops: int
    hbm: tuple[tuple[str, int], ...]  # named bytes
    nvlink: tuple[tuple[str, int], ...]  # named bytes, inbound
    tensor_us: float
    hbm_us: float
    nvlink_us: float

    @property
    def hbm_bytes(self) -> int:
        """All that passes through HBM."""
        return sum(num_bytes for _, num_bytes in self.hbm)

    @property
    def nvlink_bytes(self) -> int:
        """All that comes in over NVLink."""
        return sum(num_bytes for _, num_bytes in self.nvlink)

    @property
    def time_us(self) -> float:
        """The floor."""
        return max(self.tensor_us, self.hbm_us, self.nvlink_us)

    @property
    def bound(self) -> str:
        """The resource that sets it."""
        times = {"hbm": self.hbm_us, "tensor": self.tensor_us, "nvlink": self.nvlink_us}
        return max(times, key=lambda name: times[name])

    def __str__(self) -> str:
        rows = [f"  {'tensor':<10}{self.tensor_us:>11,.1f} us  {self.flops / 1e9:,.1f} GFLOP"]
        for name, time_us, terms in (
            ("hbm", self.hbm_us, self.hbm),
            ("nvlink", self.nvlink_us, self.nvlink),
        ):
            parts = " + ".join(f"{n} {b / 1e6:,.1f}" for n, b in terms) or "nothing"
            rows.append(f"  {name:<10}{time_us:>11,.1f} us  MB: {parts}")
        rows.append(f"  {'floor':<10}{self.time_us:>11,.1f} us  set by {self.bound}")
        return "\n".join(rows)


def weight_bytes(problem: Problem) -> int:
    """Bytes of one expert's weights and scales, both linears."""
    bits = recipe_named(problem.recipe).weights.bits_per_value
    return int(3 * problem.hidden * problem.intermediate * bits / 8)


def hbm_terms(problem: Problem, combine: str = "bf16") -> tuple[tuple[str, int], ...]:
    """Weights of touched experts, rows into L1, the activation out and in, and results (A083)."""
    acts = recipe_named(problem.recipe).acts
    out = BF16 if combine == "bf16" else FP8_COMBINE
    rows = rows_per_rank(problem)
    return (
        ("weights", round(touched_experts(problem) * weight_bytes(problem))),
        ("rows in", rows * stored_bytes(problem.hidden, acts)),
        ("activation", rows * 2 * stored_bytes(problem.intermediate, acts)),
        ("rows out", rows * stored_bytes(problem.hidden, out)),
    )


def nvlink_terms(problem: Problem, combine: str = "bf16") -> tuple[tuple[str, int], ...]:
    """Inbound bytes of a rank: rows pulled, and results of its own tokens, from the other ranks.

    Per row 1 byte out and 2 bytes back per column for FP8 rows and BF16 results: the 3h of A082.
    """
    acts = recipe_named(problem.recipe).acts
    out = BF16 if combine == "bf16" else FP8_COMBINE
    remote = rows_per_rank(problem) * (problem.num_ranks - 1) // problem.num_ranks
    if remote == 0:
        return ()
    return (
        ("dispatch", remote * stored_bytes(problem.hidden, acts)),
        ("combine", remote * stored_bytes(problem.hidden, out)),
    )


def overlap_limit(problem: Problem) -> float:
    """FLOP per byte of link below which communication hides behind compute: C/B <= 2d (A082)."""
    return 6 * problem.hidden * problem.intermediate / (3 * problem.hidden)


def floor(problem: Problem, hardware: Hardware, mma: str, combine: str = "bf16") -> Floor:
    """The floor at the speeds that were reached, not those on paper."""
    hbm, nvlink = hbm_terms(problem, combine), nvlink_terms(problem, combine)
    hbm_bytes, nvlink_bytes = sum(b for _, b in hbm), sum(b for _, b in nvlink)
    return Floor(
        flops=problem.flops,
        hbm=hbm,
        nvlink=nvlink,
        tensor_us=problem.flops / (hardware.tensor(mma).reached.value * 1e6),
        hbm_us=hbm_bytes / (hardware.hbm_gbs.reached.value * 1e3),
        nvlink_us=nvlink_bytes / (hardware.nvlink_gbs.reached.value * 1e3),
    )

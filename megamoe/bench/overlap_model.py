"""What the simulator says of the cells of `megamoe bench overlap`, beside what was measured.

The same plan, the same routing and the same three calls: compute over links that are as fast as
memory, links without the GEMMs, and both.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from megamoe.bench.cells import Cell, cells_named
from megamoe.bench.overlap import SEED, Overlap
from megamoe.errors import RangeError, require
from megamoe.hardware import Hardware
from megamoe.planner import chain
from megamoe.planner.call import CallSpec
from megamoe.planner.plan import Plan, plan_call
from megamoe.problem import Problem
from megamoe.routing.samplers import sample_routing
from megamoe.simulator.sample import Counts
from megamoe.simulator.schedule import Schedule
from megamoe.simulator.simulate import simulate

NAMES = ("compute", "links", "both")


class Times(NamedTuple):
    """Of a cell in us."""

    compute: float
    links: float
    both: float


def wire_us(row: Overlap) -> float:
    """What a rank's bytes take at the links' pace: records in, then rows home, of even routing.

    `links_us` has more: the launches before and after, and a pull that may copy at less.
    """
    call = call_of(row)
    p = call.problem
    num_far = p.num_tokens * p.top_k * (p.num_ranks - 1) / p.num_ranks
    num_bytes = 4 * chain.words_of(call, "hopper").pitch + chain.row_bytes(call, "hopper")
    return num_far * num_bytes / (1e3 * row.links_gbs) + row.latency_us


def call_of(row: Overlap) -> CallSpec:
    """The call of each rank of a measured cell."""
    cell = _cell(row)
    shape, num = cell.shape, row.num_ranks
    problem = Problem(
        cell.num_tokens, shape.hidden, shape.intermediate, shape.num_experts * num, shape.top_k,
        num, row.recipe,
    )  # fmt: skip
    return CallSpec(problem, local_ranks=num, max_tokens=cell.num_tokens)


def plan_of(row: Overlap, hardware: str) -> Plan:
    """What `LocalRanks` launches on each rank of a measured cell."""
    overrides = (("backend", "hopper"), ("mode", "chain"))
    plan = plan_call(call_of(row), Hardware.named(hardware), overrides)
    tile = str(plan.passes[-1]["l1"].config)
    require(
        row.tile in ("", tile),
        f"a simulated cell has the tile that was measured, {row.tile}",
        got=tile,
        fix="measure anew: the planner's tables have changed",
        kind=RangeError,
    )
    return plan


def counts_of(row: Overlap) -> Counts:
    """[source][expert]: the rows of a measured cell."""
    cell = _cell(row)
    num, experts = row.num_ranks, cell.shape.num_experts * row.num_ranks
    idx, _ = sample_routing(cell.num_tokens * num, experts, cell.shape.top_k, seed=SEED)
    parts = (part.flatten().bincount(minlength=experts) for part in idx.split(cell.num_tokens))
    return tuple(tuple(part.tolist()) for part in parts)


def simulated(row: Overlap, hardware: str = "h200") -> Times:
    """The three times of a measured cell as the simulator has them."""
    how, counts = Schedule.of_plan(plan_of(row, hardware)), counts_of(row)
    both = how.over_links(row.links_gbs)
    calls = (
        how.over_links(how.hardware.hbm_gbs.reached.value), replace(both, links_alone=True), both,
    )  # fmt: skip
    return Times(*(simulate(one, counts).time_us for one in calls))


def measured(row: Overlap) -> Times:
    """The same of the record."""
    return Times(row.compute_us, row.links_us, row.both_us)


def _cell(row: Overlap) -> Cell:
    return cells_named([row.cell])[0]

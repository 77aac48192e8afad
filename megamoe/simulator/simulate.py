"""Simulate one call of a plan: a discrete-event model that gives a Timeline and a Prediction.

Every block of every rank is an event; rows travel by row block. What the model leaves out stands in
docs/simulator.md. Deterministic: the same plan, counts and constants give the same timeline.
"""

from __future__ import annotations

from collections.abc import Sequence

from megamoe.errors import RangeError, require
from megamoe.simulator.constants import DEFAULT, Constants
from megamoe.simulator.costs import Costs, costs
from megamoe.simulator.events import Machine
from megamoe.studies.deep_gemm.plan import Plan
from megamoe.simulator.prediction import Prediction, Usage
from megamoe.simulator.ranks import rank_of
from megamoe.simulator.sample import Counts, checked, sample_counts
from megamoe.simulator.staged import Stages, run_staged
from megamoe.simulator.timeline import Span, Timeline
from megamoe.simulator.traffic import floor_of


def simulate(
    plan: Plan,
    counts: Sequence[Sequence[int]] | None = None,
    *,
    skew: str = "uniform",
    seed: int = 0,
    constants: Constants = DEFAULT,
    is_grouped: bool = False,
) -> Prediction:
    """Predict one call of `plan`.

    counts      rows that rank r sends to expert e, counts[r][e], measured or made up; without
                them they are sampled with `skew` and `seed` (`sample.SKEWS`)
    is_grouped  staged mode only: the pipeline of a library of grouped GEMMs, with permute and
                activation as launches of their own
    """
    require(
        plan.mode == "staged" or not is_grouped,
        "grouped launches need mode staged",
        got=plan.mode,
        fix="plan(..., mode='staged')",
        kind=RangeError,
    )
    rows = sample_counts(plan.problem, skew, seed) if counts is None else counts
    given = checked(plan.problem, rows)
    work = costs(plan, constants, is_grouped=is_grouped)
    if plan.mode == "staged":
        stages = run_staged(plan, given, work, constants, is_grouped=is_grouped)
    else:
        stages = _run_fused(plan, given, work, constants)
    return _prediction(plan, given, stages)


def _run_fused(plan: Plan, counts: Counts, work: Costs, constants: Constants) -> Stages:
    """One launch, or split's two side by side: launch, route, blocks, barrier, combine."""
    num_ranks = plan.problem.num_ranks
    is_alone = num_ranks == 1
    start = plan.hardware.launch_us.value + constants.start_us
    routed = start + constants.route_us + (0.0 if is_alone else constants.barrier_us)
    ring = plan.ring_blocks if plan.capacity.is_ring else None
    ranks = [rank_of(plan, counts, rank) for rank in range(num_ranks)]
    machine = Machine(dict(enumerate(ranks)), work, constants, ring_blocks=ring)
    for rank in ranks:  # weights are loaded from the start: they need no routing
        rank.loads_us = [start] * plan.num_sms
    machine.run(routed, pulls_us=routed)
    stages = Stages(plan.num_sms, num_ranks, machine.spans)
    stages.everywhere("launch", 0.0, start, "launch")
    stages.everywhere("route", start, routed, "dispatch")
    computed = max((rank.end_us for rank in ranks), default=0.0)
    computed = max(computed, routed)
    home = max(computed, machine.results_us)
    met = home + (constants.sync_us if is_alone else constants.barrier_us)
    for rank in ranks:
        stages.on_rank(rank.idx, "wait", max(rank.end_us, routed), computed, "ranks")
    stages.everywhere("wait", computed, home, "results")
    stages.everywhere("wait", home, met, "barrier")
    if plan.mode == "split":
        stages.everywhere("launch", met, met + constants.gap_us, "launch")
        met += constants.gap_us
    end = stages.combine(plan, counts, work, met)
    stages.steps += [
        ("launch", start),
        ("route", routed - start),
        ("blocks", computed - routed),
        ("results home", home - computed),
        ("barrier", met - home),
        ("combine", end - met),
    ]
    stages.count(ranks)
    return stages


def _prediction(plan: Plan, counts: Counts, stages: Stages) -> Prediction:
    problem, hw = plan.problem, plan.hardware
    name = (
        f"{problem.num_tokens} tokens a rank, {problem.num_ranks} ranks, {problem.recipe}, "
        f"{plan.mode} on {hw.label}"
    )
    spans: tuple[Span, ...] = tuple(sorted(stages.spans, key=lambda s: (s.rank, s.sm, s.start_us)))
    timeline = Timeline(name, problem.num_ranks, plan.num_sms, spans)
    summary = timeline.summary()
    total, ranks = summary.total_us, problem.num_ranks
    flops = 6 * sum(map(sum, counts)) * problem.hidden * problem.intermediate / ranks
    usage = Usage(
        tensor=flops / (hw.tensor(plan.tiles.mma).reached.value * 1e6) / total,
        hbm=stages.hbm_bytes / ranks / (hw.hbm_gbs.reached.value * 1e3) / total,
        nvlink=stages.in_bytes / ranks / (hw.nvlink_gbs.reached.value * 1e3) / total,
    )
    floor = floor_of(plan, counts)
    return Prediction(plan, counts, timeline, summary, floor, usage, tuple(stages.steps))

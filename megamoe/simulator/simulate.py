"""Simulate one call: a discrete-event model that gives a Timeline and a Prediction.

Every block of every rank is an event; rows travel by tile of tokens. What the model leaves out
stands in docs/simulator.md. Deterministic: the same schedule, counts and constants give the same
timeline.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from megamoe.errors import CapacityError, DTypeError, require
from megamoe.planner.plan import Plan
from megamoe.simulator.chain import parts, run_chain
from megamoe.simulator.constants import Constants, constants_for
from megamoe.simulator.costs import costs
from megamoe.simulator.events import Machine
from megamoe.simulator.prediction import Prediction, Usage
from megamoe.simulator.ranks import num_blocks, rank_of, shared_counts, with_shared
from megamoe.simulator.sample import Counts, checked, sample_counts
from megamoe.simulator.schedule import Schedule
from megamoe.simulator.staged import Report, Stages, run_staged
from megamoe.simulator.timeline import Span, Timeline
from megamoe.simulator.traffic import floor_of

MAX_BLOCKS = 2_000_000  # of one call: some 40 s on one core, and 1 GB of spans

Progress = Callable[[int, int], None]  # blocks that were played, of how many


def simulate(
    plan: Plan | Schedule,
    counts: Sequence[Sequence[int]] | None = None,
    *,
    skew: str = "uniform",
    seed: int = 0,
    constants: Constants | None = None,
    progress: Progress | None = None,
) -> Prediction:
    """Predict one call: the launches of a plan, or a schedule of its own.

    plan      of `mm.plan`, or of `layer.plan`
    counts    rows that rank r sends to expert e, counts[r][e], measured or made up; without them
              they are sampled with `skew` and `seed`
    skew      how routing is sampled: "even", "uniform", "zipf", "dirichlet", "hot_expert",
              "hot_rank" or "masked"
    constants  of the model; None: those of the hardware
    progress  called with the blocks that were played and their number
    """
    require(
        isinstance(plan, Plan | Schedule),
        "a simulation is of a Plan or a Schedule",
        got=type(plan).__name__,
        fix='make a plan first: mm.plan(problem, "h200")',
        kind=DTypeError,
    )
    how = plan if isinstance(plan, Schedule) else Schedule.of_plan(plan)
    constants = constants_for(how.hardware) if constants is None else constants
    if counts is None:
        if skew != "masked":  # before sampling, which takes its time too
            _check_size(how, _least_blocks(how))
        counts = sample_counts(how.problem, skew, seed)
    received = checked(how.problem, counts)
    report = _reporter(_check_size(how, _num_blocks(how, received)), progress)
    if how.mode == "chain" or how.pull_sms:
        stages = run_chain(how, received, constants, report)
    elif how.mode == "staged" or how.steps:
        stages = run_staged(how, received, constants, report)
    else:
        stages = _run_fused(how, received, constants, report)
    return _prediction(how, received, stages)


def _least_blocks(how: Schedule) -> int:
    """Blocks of a call of which every tile is full."""
    p, experts = how.problem, how.experts
    rows = p.num_ranks * p.num_tokens * p.top_k
    return rows // experts.block_m * (experts.l1.num_n + experts.l2.num_n)


def _num_blocks(how: Schedule, counts: Counts) -> int:
    total = num_blocks(how.experts, with_shared(how, counts))
    return total + (0 if how.shared is None else num_blocks(how.shared, shared_counts(how)))


def _check_size(how: Schedule, total: int) -> int:
    """The number of blocks, if they can be played."""
    require(
        total <= MAX_BLOCKS,
        f"a simulated call has at most {MAX_BLOCKS:,} blocks",
        got=f"{total:,}: {how.name}",
        fix="simulate fewer tokens or ranks",
        kind=CapacityError,
    )
    return total


def _reporter(total: int, progress: Progress | None) -> Report:
    if progress is None:
        return None
    done = 0

    def report(num: int) -> None:
        nonlocal done
        done += num
        progress(done, total)

    progress(0, max(total, 1))
    return report


def _run_fused(how: Schedule, counts: Counts, constants: Constants, progress: Report) -> Stages:
    """The fused launches of a call one after the other, or split's two side by side."""
    stages = Stages(how.num_sms, how.problem.num_ranks, [])
    now = 0.0
    for number, part in enumerate(parts(counts, how.num_passes)):
        if number:
            stages.everywhere("launch", now, now + constants.gap_us, "launch")
            stages.steps.append(("gaps", constants.gap_us))
            now += constants.gap_us
        now = _launch(how, with_shared(how, part), constants, stages, now, number == 0, progress)
    return stages


def _launch(
    how: Schedule,
    counts: Counts,
    constants: Constants,
    stages: Stages,
    from_us: float,
    is_first: bool,
    progress: Report,
) -> float:
    """Launch, route, blocks, barrier, combine; when all of it is over."""
    is_alone = how.problem.num_ranks == 1
    start = from_us
    if is_first:
        start += how.hardware.launch_us.value + constants.start_us
    routed = start + constants.route_us + (0.0 if is_alone else constants.barrier_us)
    work = costs(how, constants)
    ranks = [rank_of(how, how.experts, counts, rank) for rank in range(how.problem.num_ranks)]
    machine = Machine(
        dict(enumerate(ranks)),
        work,
        constants,
        pools_at_once=how.pools_at_once,
        progress=progress,
    )
    for rank in ranks:  # weights are loaded from the start: they need no routing
        rank.loads_us = [start] * how.num_sms
    machine.run(routed, pulls_us=routed)
    stages.spans += machine.spans
    stages.everywhere("launch", from_us, start, "launch")
    stages.everywhere("route", start, routed, "dispatch")
    computed = max((rank.end_us for rank in ranks), default=0.0)
    computed = max(computed, routed)
    home = max(computed, machine.results_us)
    met = home + (constants.sync_us if is_alone else constants.barrier_us)
    for rank in ranks:
        stages.on_rank(rank.idx, "wait", max(rank.end_us, routed), computed, "ranks")
    stages.everywhere("wait", computed, home, "results")
    stages.everywhere("wait", home, met, "barrier")
    if how.mode == "split":
        stages.everywhere("launch", met, met + constants.gap_us, "launch")
        met += constants.gap_us
    end = stages.combine(how, counts, work, met)
    stages.steps += [
        ("launch", start - from_us),
        ("route", routed - start),
        ("blocks", computed - routed),
        ("results home", home - computed),
        ("barrier", met - home),
        ("combine", end - met),
    ]
    stages.count(ranks)
    return end


def _prediction(how: Schedule, counts: Counts, stages: Stages) -> Prediction:
    p, hw = how.problem, how.hardware
    spans: tuple[Span, ...] = tuple(sorted(stages.spans, key=lambda s: (s.rank, s.sm, s.start_us)))
    timeline = Timeline(how.name, p.num_ranks, how.num_sms, spans, study=how.label, note=how.note)
    summary = timeline.summary()
    total, ranks = summary.total_us, p.num_ranks
    flops = 6 * sum(map(sum, counts)) * p.hidden * p.intermediate / ranks
    usage = Usage(
        tensor=flops / (hw.tensor(how.experts.mma).reached.value * 1e6) / total,
        hbm=stages.hbm_bytes / ranks / (hw.hbm_gbs.reached.value * 1e3) / total,
        nvlink=stages.in_bytes / ranks / (hw.nvlink_gbs.reached.value * 1e3) / total,
    )
    floor = floor_of(how, counts)
    return Prediction(how, counts, timeline, summary, floor, usage, tuple(stages.steps))

"""The chain: rows come under L1 and leave under L2, on SMs that launches hand to each other."""

from __future__ import annotations

from megamoe.simulator.blocks import L1, L2
from megamoe.simulator.constants import Constants
from megamoe.simulator.costs import Costs
from megamoe.simulator.events import Machine, Rank
from megamoe.simulator.ranks import rank_of
from megamoe.simulator.sample import Counts
from megamoe.simulator.schedule import Schedule
from megamoe.simulator.staged import Report, StagedCall, Stages


def run_chain(
    how: Schedule, counts: Counts, constants: Constants, progress: Report = None
) -> Stages:
    """All launches of one call; ranks meet in the exchange and before combine."""
    stages = Stages(how.num_sms, how.problem.num_ranks, [])
    start = how.hardware.launch_us.value + constants.start_us
    stages.everywhere("launch", 0.0, start, "launch")
    stages.steps.append(("launch", start))
    call = StagedCall.of(how, counts, constants, stages, progress)
    now, passes = [start] * how.problem.num_ranks, iter(parts(counts, how.num_passes))
    is_launched = True  # the call's launch is the first one's
    for step in how.steps:
        if not is_launched:
            now = call.gap(now)
        is_launched = False
        if step.kind == "exchange":
            now = _synchronised(now, stages, constants, "exchange")
        elif step.kind == "chain":
            now = _overlapped(how, next(passes), call.work, constants, stages, max(now), progress)
        elif step.kind == "finish":
            now = _synchronised(now, stages, constants, "rows home")
        elif step.kind == "combine":
            end = stages.combine(how, call.counts, call.work, max(now))
            stages.steps.append(("combine", end - max(now)))
        elif step.kind == "gemm":  # shared experts, on their own rank
            now = call.gemm(now, step)
        else:
            now = call.move(now, step)
    return stages


def parts(counts: Counts, num: int) -> list[Counts]:
    """Counts of each of `num` launches that share the rows evenly."""
    return [
        tuple(tuple(c * (i + 1) // num - c * i // num for c in row) for row in counts)
        for i in range(num)
    ]


def _synchronised(now: list[float], stages: Stages, constants: Constants, name: str) -> list[float]:
    """Every rank has every other's signal."""
    met = max(now) + constants.barrier_us
    for rank, since in enumerate(now):
        stages.on_rank(rank, "wait", since, max(now), "ranks")
    stages.everywhere("wait", max(now), met, "barrier")
    stages.steps.append((name, met - max(now)))
    return [met] * len(now)


def _overlapped(
    how: Schedule,
    counts: Counts,
    work: Costs,
    constants: Constants,
    stages: Stages,
    start: float,
    progress: Report,
) -> list[float]:
    """Pull, L1 and L2 of one pass on all ranks; when each has computed and all rows are home."""
    if how.links_alone:
        return _uncomputed(how, counts, work, constants, stages, start)
    first = None if how.l2_follows else L1
    ranks = [
        rank_of(how, how.experts, counts, r, only=first, pulls=True) for r in range(len(counts))
    ]
    for rank in ranks:
        rank.loads_us = [start] * how.num_sms
    end, home = _play(how, ranks, work, constants, stages, start, start, progress)
    if first is not None:
        begin = end + constants.gap_us
        later = [_l2_of(how, counts, rank, begin) for rank in ranks]
        end, home = _play(how, later, work, constants, stages, begin, None, progress)
    stages.steps += [("blocks", end - start), ("results home", max(home - end, 0.0))]
    stages.everywhere("wait", end, max(home, end), "results")
    return [max(home, end)] * len(ranks)


def _uncomputed(
    how: Schedule, counts: Counts, work: Costs, constants: Constants, stages: Stages, start: float
) -> list[float]:
    """Rows come, and as many as would be computed for others go home: what links take alone."""
    ranks = [rank_of(how, how.experts, counts, r, pulls=True) for r in range(len(counts))]
    for rank in ranks:
        rank.queues = ((),) * len(rank.queues)
    _play(how, ranks, work, constants, stages, start, start, None)
    pulled = [max(rank.pooled_us, start) for rank in ranks]
    far = [sum(tile.rows - tile.by_rank[rank.idx] for tile in rank.pool) for rank in ranks]
    home = [at + num * work.rows.results * work.link for at, num in zip(pulled, far, strict=True)]
    stages.steps += [("pull", max(pulled) - start), ("results home", max(home) - max(pulled))]
    stages.everywhere("wait", start, max(pulled), "rows")
    stages.everywhere("wait", max(pulled), max(home), "results")
    return home


def _l2_of(how: Schedule, counts: Counts, l1: Rank, begin: float) -> Rank:
    """The rank as L2 finds it: all of L1 is done, and the links are where L1 left them."""
    rank = rank_of(how, how.experts, counts, l1.idx, only=L2)
    num = len(rank.pool)
    rank.arrived_us, rank.l1_left, rank.l1_done_us = [begin] * num, [0] * num, [begin] * num
    rank.pulls, rank.loads_us = (), [begin] * how.num_sms
    rank.in_us, rank.out_us, rank.hbm_us = l1.in_us, l1.out_us, l1.hbm_us
    return rank


def _pull_us(how: Schedule, constants: Constants) -> tuple[float, float]:
    """Of the SMs that pull together: us of a group of rows, and of a byte."""
    each = 1.0 / how.pull_sms
    return each * constants.pull_group_us, each / (constants.pull_gbs * 1e3)


def _play(
    how: Schedule,
    ranks: list[Rank],
    work: Costs,
    constants: Constants,
    stages: Stages,
    start: float,
    pulls_us: float | None,
    progress: Report,
) -> tuple[float, float]:
    """(when the last block ends, when the last row is home)."""
    is_pulling = pulls_us is not None
    machine = Machine(
        {rank.idx: rank for rank in ranks},
        work,
        constants,
        progress=progress,
        late_sms=how.pull_sms if is_pulling else 0,
        late_end=how.l1_sms,
        pull_us=_pull_us(how, constants) if is_pulling else (0.0, 0.0),
    )
    machine.run(start, pulls_us=pulls_us)
    stages.spans += machine.spans
    stages.count(ranks)
    return max(max(rank.end_us, start) for rank in ranks), machine.results_us

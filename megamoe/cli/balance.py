"""`megamoe balance`: a placement of experts out of recorded statistics, and what it would gain."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from megamoe.balance.placement import Placement, propose
from megamoe.balance.statistics import Statistics
from megamoe.cli import problems as of
from megamoe.cli.shared import Json, reason_table, writable_folder
from megamoe.hardware import Hardware
from megamoe.planner.call import CallSpec
from megamoe.planner.plan import plan
from megamoe.problem import Problem
from megamoe.simulator.prediction import Prediction
from megamoe.simulator.simulate import simulate

out = Console()

File = Annotated[str, typer.Argument(help="Statistics, as layer.save_stats(path) writes them.")]
Ranks = Annotated[int | None, typer.Option(help="Ranks; default: as recorded.")]
Slots = Annotated[
    int | None, typer.Option("--slots-per-rank", help="Experts a rank holds; default: as recorded.")
]
Tokens = Annotated[int, typer.Option(help="Tokens per rank of the simulated call.")]
Mode = Annotated[str, typer.Option(help="auto, fused, chain or staged.")]
Out = Annotated[str | None, typer.Option("--out", help="Write the placement to this file.")]


def add_to(app: typer.Typer) -> None:
    """Register the command."""
    app.command("balance")(command)


def command(
    stats: File,
    ranks: Ranks = None,
    slots_per_rank: Slots = None,
    tokens: Tokens = 512,
    hardware: of.Machine = "h200",
    mode: Mode = "auto",
    out_file: Out = None,
    as_json: Json = False,
) -> None:
    """Propose which experts lie on which rank, hot ones more than once, and predict the gain."""
    statistics = Statistics.load(stats)
    if out_file is not None:
        writable_folder(Path(out_file).parent, "the folder of --out")
    old = statistics.placement
    num_ranks = old.num_ranks if ranks is None else ranks
    before = old if num_ranks == old.num_ranks else Placement.contiguous(old.num_experts, num_ranks)
    slots = before.slots_per_rank if slots_per_rank is None else slots_per_rank
    after = propose(statistics.logical, num_ranks, slots, before)
    machine = Hardware.named(hardware)
    both = [_predict(statistics, p, machine, tokens, mode) for p in (before, after)]
    if out_file is not None:
        after.save(out_file)
    if as_json:
        print(json.dumps(_as_dict(statistics, (before, after), both), indent=2))
        return
    _print(statistics, (before, after), both, machine)
    if out_file is not None:
        out.print(f"wrote {out_file}", highlight=False, soft_wrap=True)


def _predict(
    statistics: Statistics, placement: Placement, machine: Hardware, tokens: int, mode: str
) -> Prediction:
    """One average call as a layer with that placement launches it."""
    problem = Problem(
        tokens, statistics.hidden, statistics.intermediate, placement.num_physical,
        statistics.top_k, placement.num_ranks, statistics.recipe,
    )  # fmt: skip
    sent = statistics.per_call(placement.num_ranks, tokens)
    call = CallSpec(problem, is_placed=not placement.is_contiguous, max_tokens=tokens)
    return simulate(plan(call, machine, mode=mode), placement.spread(sent))


def _as_dict(
    statistics: Statistics, placements: tuple[Placement, Placement], both: list[Prediction]
) -> dict[str, Any]:
    rows = {
        name: {
            "slots_per_rank": p.slots_per_rank,
            "slots": p.slots,
            "replicas": [len(ids) for ids in p.replicas()],
            "rank_rows": p.rank_loads(statistics.logical),
            "imbalance": p.imbalance(statistics.logical),
            "predicted_us": predicted.time_us,
            "source": "simulated",
            "note": predicted.note,
            "floor_us": predicted.floor.time_us,
            "backend": predicted.schedule.backend,
            "mode": predicted.schedule.mode,
        }
        for name, p, predicted in zip(("before", "after"), placements, both, strict=True)
    }
    return {
        "num_ranks": placements[0].num_ranks,
        "num_experts": placements[0].num_experts,
        "logical": statistics.logical,
        "gain": both[0].time_us / both[1].time_us,
        **rows,
    }


def _print(
    statistics: Statistics,
    placements: tuple[Placement, Placement],
    both: list[Prediction],
    machine: Hardware,
) -> None:
    before, after = placements
    tokens = both[0].schedule.problem.num_tokens
    title = (
        f"{of.counted(after.num_experts, 'expert')} over {of.counted(after.num_ranks, 'rank')}, "
        f"{of.counted(tokens, 'token')} a rank on {machine.label}"
    )
    each = [
        (
            str(q.slots_per_rank),
            str(q.num_physical - q.num_experts),
            f"{q.imbalance(statistics.logical):.3f}",
            predicted.schedule.mode,
            f"{predicted.time_us:,.1f} us",
            f"{predicted.floor.time_us:,.1f} us",
        )
        for q, predicted in zip(placements, both, strict=True)
    ]
    names = (
        ("slots per rank", "experts that a rank holds; memory grows with it"),
        ("replicas", "copies beyond the first, over all ranks"),
        ("imbalance", "rows of the busiest rank over the mean; 1 is even"),
        ("mode", "what a layer with that placement launches"),
        ("predicted", "one average call, simulated"),
        ("floor", "what the busiest rank cannot go below"),
    )
    rows = [
        (name, one, two, meaning) for (name, meaning), one, two in zip(names, *each, strict=True)
    ]
    if both[0].note:
        out.print(both[0].note, highlight=False, soft_wrap=True)
    reason_table(out, title, ("", "before", "after", "what it means"), rows, right=(1, 2))
    if after == before:
        out.print("the placement in use is as even as any that was found; nothing to change")
        return
    gain = both[0].time_us / both[1].time_us
    out.print(f"predicted gain: [bold]{gain:.2f}x[/]", highlight=False)
    hot = sorted(range(after.num_experts), key=lambda e: (-statistics.logical[e], e))[:5]
    counts = [len(ids) for ids in after.replicas()]
    names = ", ".join(f"{e} ({statistics.logical[e]:,} rows, on {counts[e]})" for e in hot)
    out.print(f"hottest experts, and on how many ranks: {names}", highlight=False)

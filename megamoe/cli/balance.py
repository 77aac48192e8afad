"""`megamoe balance`: a placement of experts out of recorded statistics, and what it would gain."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from megamoe.cli import problems as of
from megamoe.hardware import Hardware
from megamoe.problem import Problem
from megamoe.balance.placement import Placement, propose
from megamoe.studies.deep_gemm.plan import plan
from megamoe.simulator.prediction import Prediction
from megamoe.simulator.simulate import simulate
from megamoe.balance.statistics import Statistics

out = Console()

File = Annotated[str, typer.Argument(help="Statistics, as layer.save_stats(path) writes them.")]
Ranks = Annotated[int | None, typer.Option(help="Ranks; default: as recorded.")]
Slots = Annotated[
    int | None, typer.Option("--slots-per-rank", help="Experts a rank holds; default: as recorded.")
]
Tokens = Annotated[int, typer.Option(help="Tokens per rank of the simulated call.")]
Mode = Annotated[str, typer.Option(help="auto, fused, split or staged.")]
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
    as_json: of.Json = False,
) -> None:
    """Propose which experts stand on which rank, hot ones more than once, and predict the gain."""
    found = Statistics.load(stats)
    old = found.placement
    num_ranks = old.num_ranks if ranks is None else ranks
    before = old if num_ranks == old.num_ranks else Placement.contiguous(old.num_experts, num_ranks)
    slots = before.slots_per_rank if slots_per_rank is None else slots_per_rank
    after = propose(found.logical, num_ranks, slots, before)
    machine = Hardware.named(hardware)
    both = [_predict(found, p, machine, tokens, mode) for p in (before, after)]
    if out_file is not None:
        after.save(out_file)
    if as_json:
        print(json.dumps(_as_dict(found, (before, after), both), indent=2))
        return
    _print(found, (before, after), both, machine)
    if out_file is not None:
        out.print(f"wrote {out_file}", highlight=False, soft_wrap=True)


def _predict(
    found: Statistics, placement: Placement, machine: Hardware, tokens: int, mode: str
) -> Prediction:
    """One average call, simulated with the placement's physical experts."""
    problem = Problem(
        tokens, found.hidden, found.intermediate, placement.num_physical, found.top_k,
        placement.num_ranks, found.recipe,
    )  # fmt: skip
    sent = found.per_call(placement.num_ranks, tokens)
    return simulate(plan(problem, machine, mode=mode), placement.spread(sent))


def _as_dict(
    found: Statistics, placements: tuple[Placement, Placement], both: list[Prediction]
) -> dict[str, Any]:
    rows = {
        name: {
            "slots_per_rank": p.slots_per_rank,
            "slots": p.slots,
            "replicas": [len(ids) for ids in p.replicas()],
            "rank_rows": p.rank_loads(found.logical),
            "imbalance": p.imbalance(found.logical),
            "predicted_us": predicted.time_us,
            "floor_us": predicted.floor.time_us,
        }
        for name, p, predicted in zip(("before", "after"), placements, both, strict=True)
    }
    return {
        "num_ranks": placements[0].num_ranks,
        "num_experts": placements[0].num_experts,
        "logical": found.logical,
        "mode": both[0].plan.mode,
        "gain": both[0].time_us / both[1].time_us,
        **rows,
    }


def _print(
    found: Statistics,
    placements: tuple[Placement, Placement],
    both: list[Prediction],
    machine: Hardware,
) -> None:
    before, after = placements
    p = both[0].plan
    title = (
        f"{after.num_experts} experts over {after.num_ranks} rank(s), {p.problem.num_tokens} "
        f"tokens a rank, {p.mode} on {machine.label}"
    )
    table = Table("", "before", "after", "what it means", title=title, title_justify="left")
    each = [
        (
            str(q.slots_per_rank),
            str(q.num_physical - q.num_experts),
            f"{q.imbalance(found.logical):.3f}",
            f"{predicted.time_us:,.1f} us",
            f"{predicted.floor.time_us:,.1f} us",
        )
        for q, predicted in zip(placements, both, strict=True)
    ]
    names = (
        ("slots per rank", "experts that a rank holds; memory grows with it"),
        ("replicas", "copies beyond the first, over all ranks"),
        ("imbalance", "rows of the busiest rank over the mean; 1 is even"),
        ("predicted", "one average call, simulated"),
        ("floor", "what the busiest rank cannot go below"),
    )
    for (name, meaning), one, two in zip(names, *each, strict=True):
        table.add_row(name, one, two, meaning)
    out.print(table)
    if after == before:
        out.print("the placement in use is as even as any that was found; nothing to change")
        return
    gain = both[0].time_us / both[1].time_us
    out.print(f"predicted gain: [bold]{gain:.2f}x[/]", highlight=False)
    hot = sorted(range(after.num_experts), key=lambda e: (-found.logical[e], e))[:5]
    counts = [len(ids) for ids in after.replicas()]
    told = ", ".join(f"{e} ({found.logical[e]:,} rows, on {counts[e]})" for e in hot)
    out.print(f"hottest experts, and on how many ranks: {told}", highlight=False)

"""Prediction -> the words and figures that stand above its pictures."""

from __future__ import annotations

from megamoe.planner.floor import overlap_limit
from megamoe.simulator.prediction import Prediction
from megamoe.trace.html import Fact, page
from megamoe.trace.kinds import KINDS, SM_KINDS, kind_of

_RESOURCES = {"hbm": "memory", "tensor": "the tensor cores", "nvlink": "the links"}


def facts(prediction: Prediction) -> tuple[Fact, ...]:
    """The figures at the head of a page."""
    s, u, floor = prediction.summary, prediction.usage, prediction.floor
    ratio = (
        f"{prediction.time_us / floor.time_us:.2f} times the floor" if floor.time_us else "no rows"
    )
    return (
        (f"{prediction.time_us:,.0f} us", "predicted time", ratio),
        (f"{floor.time_us:,.0f} us", "floor", f"set by {_RESOURCES[floor.bound]}"),
        (
            f"{prediction.exposed_share:.1%}",
            "exposed communication",
            f"{s.exposed_us:,.1f} us that nothing hides",
        ),
        (
            f"{u.tensor * 100:.0f} / {u.hbm * 100:.0f} / {u.nvlink * 100:.0f} %",
            "tensor / memory / links",
            "of what each can do",
        ),
        (f"{s.tail_us:,.0f} us", "tail", "last blocks, few SMs"),
        (f"{s.imbalance:.2f}", "imbalance", "busiest over mean rank"),
    )


def note(prediction: Prediction) -> str:
    """One sentence: where the SMs' time goes, and whether the links keep up."""
    sums = dict.fromkeys(SM_KINDS, 0.0)
    for span in prediction.timeline.spans:
        kind = kind_of(span)
        if kind in sums:
            sums[kind] += span.time_us
    whole = prediction.time_us * prediction.timeline.num_ranks * prediction.timeline.num_sms
    shares = sorted(((us / whole, kind) for kind, us in sums.items()), reverse=True)
    parts = ", ".join(f"{share:.0%} {KINDS[kind].name}" for share, kind in shares if share >= 0.01)
    text = f"Where the SMs' time goes: {parts}."
    how = prediction.schedule
    if how.problem.num_ranks > 1:
        hw, limit = how.hardware, overlap_limit(how.problem)
        ratio = hw.tensor(how.experts.mma).reached.value / hw.nvlink_gbs.reached.value * 1e3
        fits = "below" if ratio <= limit else "above"
        text += (
            f" The machine does {ratio:,.0f} FLOP per byte of its links, {fits} the "
            f"{limit:,.0f} up to which a large batch can hide its traffic."
        )
    return text


def prediction_page(prediction: Prediction, title: str) -> str:
    """The page of one simulated call."""
    return page(prediction.timeline, title=title, facts=facts(prediction), note=note(prediction))

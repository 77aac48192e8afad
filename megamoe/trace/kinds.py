"""What a span is called and coloured as, for every picture: one table.

The colours are those of Okabe and Ito, which differ for colour-blind readers too.
"""

from __future__ import annotations

from typing import NamedTuple

from megamoe.simulator.timeline import Span


class Kind(NamedTuple):
    """One kind of span."""

    name: str
    colour: str
    letter: str  # in the text chart
    about: str


# fmt: off
KINDS: dict[str, Kind] = {
    "l1":       Kind("L1",                   "#0072B2", "1", "first matrix product: gate and up, then the activation"),
    "l2":       Kind("L2",                   "#E69F00", "2", "second matrix product: back to the width of a token"),
    "exposed":  Kind("waiting for network",  "#CC79A7", "!", "rows or results that are not there yet: exposed communication"),
    "depend":   Kind("waiting for L1",       "#B9BDC4", ".", "an L2 block needs every L1 block of its rows"),
    "weights":  Kind("waiting for weights",  "#882255", "w", "the first weights of a block are not there yet"),
    "idle":     Kind("waiting for others",   "#D9DCE1", ".", "barriers, tokens on their way into the pool, and ranks that have more work"),
    "combine":  Kind("combine",              "#009E73", "c", "each token adds up the rows that its experts sent back"),
    "stage":    Kind("moving rows",          "#F0E442", "s", "rows are moved and nothing else: permute, activation, tokens into the pool"),
    "launch":   Kind("launch and routing",   "#6B7280", "-", "the launch itself, and agreeing on who sends what to whom"),
    "pull":     Kind("rows in",              "#56B4E9", "<", "tokens on their way to the rank that owns their expert"),
    "scatter":  Kind("results out",          "#D55E00", ">", "finished rows on their way home"),
    "load_l1":  Kind("L1 weights in",        "#7FB8DA", "a", "an SM issues the copies of a block's weights, beside its math"),
    "load_l2":  Kind("L2 weights in",        "#F2CF80", "b", "the same for L2"),
}
# fmt: on
LANE_KINDS = ("pull", "scatter")
LOAD_KINDS = ("load_l1", "load_l2")  # beside the others on the same SM
SM_KINDS = tuple(name for name in KINDS if name not in (*LANE_KINDS, *LOAD_KINDS))
_OF_WAIT = {"rows": "exposed", "results": "exposed", "l1": "depend", "weights": "weights"}


def kind_of(span: Span) -> str:
    """The key of KINDS for a span."""
    if span.role == "math":
        return span.phase if span.phase in ("l1", "l2") else "l1"
    if span.role == "load":
        return "load_l2" if span.phase == "l2" else "load_l1"
    if span.role == "wait":
        return _OF_WAIT.get(span.phase, "idle")
    return "launch" if span.role == "route" else span.role

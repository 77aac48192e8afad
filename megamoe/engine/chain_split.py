"""Split over ranks: pull and L1 on one part of the SMs, L2 and its rows home on the other.

The launches are the chain's, each on its side. L1 waits for the pull before it on its own side, L2
for tiles of L1, and windows take turns in two halves of a ring as on one rank (`split`).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from megamoe.engine import partition
from megamoe.engine.chain import _l1, _l2, _pull, _Ranked, _rows, _window, tile_in
from megamoe.planner import chain as planned
from megamoe.planner.launches import Pass
from megamoe.planner.plan import Plan
from megamoe.planner.split import WINDOWS


def compute(here: _Ranked, passes: Sequence[Pass], plan: Plan) -> None:
    """All windows of this rank's rows; over when both parts are."""
    halves = [_window(here, passes[0])]
    if len(passes) > 1:
        halves.append(_window(here, passes[0], halves[0]))
    _rows(here, passes[0], halves[0])
    follows = planned.following(tile_in(passes[0]), is_split=True)
    device, l1_sms = here.call.weights.device, plan["l1_sms"]
    assert isinstance(l1_sms, int)
    sides = partition.fork(device, l1_sms, plan.hardware.num_sms)
    left: list[Any] = []  # marks of L2
    try:
        for number, steps in enumerate(passes):
            window = halves[number % len(halves)]
            if number:
                if number >= WINDOWS:
                    sides.wait(0, left[number - WINDOWS])
                sides.run(0, partial(_rows, here, steps, window))
                sides.wait(1, sides.mark(0))
            sides.run(0, partial(_pull, here, steps["pull"], window))
            sides.run(0, partial(_l1, here, steps, window, follows))
            sides.run(1, partial(_l2, here, steps, window, follows))
            left.append(sides.mark(1))
    finally:
        sides.join()  # also where a launch failed: those before it still read what is let go

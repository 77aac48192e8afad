"""Windows of the rows of a call: memory that they take in turn, and both parts of the SMs.

A window has a pool and activations for its own; two of them are a ring. In mode split L1 runs on
one part of the SMs, L2 on the other. A window's L1 is placed after L2 of the window before the
last, whose half of the ring it takes: that wait is between launches. So each launch waits only for
those that the host issued before it, also where calls of several layers or threads share the two
streams.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

from torch import Tensor

from megamoe.engine import partition
from megamoe.engine.gluon import Gluon, tile_in
from megamoe.engine.interface import Prepared
from megamoe.engine.weights import ExpertWeights
from megamoe.kernels.gluon.pool import ROW_ALIGN, Pool
from megamoe.kernels.gluon.pull import Pulled
from megamoe.kernels.gluon.tile_scheduler import WorkItems
from megamoe.planner.launches import Pass
from megamoe.planner.split import WINDOWS


class Window(NamedTuple):
    """Memory of one window.

    pool     its tokens are those of both halves of a ring, in turn
    work     items of L1 and of L2, each of its own grid; empty where the tile has none
    l1_done  int32 [R / 8]
    pulled   of ranks: where rows come from, and their counters
    """

    pool: Pool
    acts: Pool
    work: tuple[WorkItems, ...]
    l1_done: Tensor
    pulled: Pulled | None = None

    def items(self, linear: int) -> dict[str, Any]:
        """The items of L1 (0) or L2 (1) as its launcher takes them."""
        return {"items": self.work[linear].items} if self.work else {}


def ring(
    backend: Gluon, packed: Prepared, weights: ExpertWeights, steps: Pass, num: int,
    *, slots: int, rows: int, is_far: bool = False,
) -> list[Window]:  # fmt: skip
    """Memory for `num` windows that follow each other: of one, or of two that take turns.

    slots   that a window's tiles are of, at most
    rows    of a window
    is_far  the chain: rows come from ranks, and go to them
    """
    sizes = steps.num_experts, tile_in(steps).block_m, weights.device
    both: list[Window] = []
    for _ in range(min(num, WINDOWS)):
        width = 1 if both else weights.hidden  # its tokens are the first's
        new = partial(backend.launch.pool, packed.arithmetic, slots, rows=rows)
        pool = new(width, *sizes, is_far=is_far)
        if both:
            pool = pool._replace(data=both[0].pool.data, scale=both[0].pool.scale)
        counters = pool.num_tiles.new_empty(2 if is_far else 1, rows // ROW_ALIGN.value)
        pulled = Pulled(pool.dest.new_empty(rows), *counters) if is_far else None
        acts = new(weights.intermediate, *sizes, pool, is_far=is_far)
        work = (
            backend.work_items(pool, (w,), steps[name])
            for name, w in (("l1", packed.w13), ("l2", packed.w2))
        )
        both.append(Window(pool, acts, tuple(filter(None, work)), counters[-1], pulled))
    return both


def side_by_side(
    passes: Sequence[Pass],
    windows: Sequence[Window],
    sides: partition.Sides,
    *,
    fill: Callable[[Pass, Window], None],
    l1: Callable[[Pass, Window], None],
    l2: Callable[[Pass, Window], None],
) -> None:
    """Every window: its rows and L1 on one side, its L2 on the other.

    Returns once both sides have been joined into the call's stream.

    fill  rows and tiles of a window; of the first the caller has made them
    """
    marks: list[Any] = []  # of L2
    try:
        for number, steps in enumerate(passes):
            window = windows[number % len(windows)]
            if number:
                if number >= WINDOWS:
                    sides.wait(0, marks[number - WINDOWS])
                sides.run(0, partial(fill, steps, window))
                sides.wait(1, sides.mark(0))
            sides.run(0, partial(l1, steps, window))
            sides.run(1, partial(l2, steps, window))
            marks.append(sides.mark(1))
    finally:
        sides.join()  # after a failure too: earlier launches still read what is freed here

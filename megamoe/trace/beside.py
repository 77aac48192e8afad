"""A measured launch beside the simulated one: the same problem, routing and tiles on one clock."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from megamoe.hardware import Hardware
from megamoe.planner import hopper
from megamoe.planner.launches import K_BLOCK, SLAB, WARPGROUPS, GemmSwapAb
from megamoe.planner.numerics import numerics
from megamoe.planner.tables.hopper import Shape
from megamoe.simulator.prediction import Prediction
from megamoe.simulator.schedule import fused_schedule
from megamoe.simulator.simulate import simulate
from megamoe.simulator.timeline import Span, Timeline
from megamoe.trace.html import Fact, page
from megamoe.trace.measured import Figures, figures, timeline
from megamoe.trace.stamps import Recording

MAX_OVERHEAD = 0.10  # what stamping may cost


class Row(NamedTuple):
    """One figure of both launches; None where one of them does not have it."""

    name: str
    measured: float | None
    simulated: float | None
    unit: str  # "us" or "%"
    about: str

    def text(self, value: float | None) -> str:
        """A value of this row as it is printed."""
        if value is None:
            return "-"
        return f"{100 * value:,.1f} %" if self.unit == "%" else f"{value:,.1f} us"

    @property
    def difference(self) -> str:
        """Simulated less measured, in us and relative to it."""
        if self.measured is None or self.simulated is None:
            return "-"
        by = self.simulated - self.measured
        share = f" ({by / self.measured:+.0%})" if self.measured else ""
        return f"{by:+,.1f} us{share}"


class Pair(NamedTuple):
    """Both launches; the simulated timeline begins where stamps can: on the GPU."""

    recording: Recording
    prediction: Prediction
    measured: Timeline
    simulated: Timeline

    @staticmethod
    def of(recording: Recording, hardware: str = "h200") -> Pair:
        """The recording, and the simulator's answer to the same call."""
        predicted = _simulated(recording, Hardware.named(hardware))
        launch_us = predicted.schedule.hardware.launch_us.value
        return Pair(
            recording, predicted, timeline(recording), _later(predicted.timeline, launch_us)
        )

    @property
    def rows(self) -> tuple[Row, ...]:
        """Every figure, measured and simulated."""
        ours, theirs = figures(self.measured), figures(self.simulated)
        recording = self.recording

        def both(name: str, about: str, of: Callable[[Figures], float | None]) -> Row:
            return Row(name, of(ours), of(theirs), "us", about)

        rows = [
            Row("call", recording.plain_us, self.prediction.time_us, "us",
                "the call without stamps, as the host's events time it"),
            both("on the GPU", "first to last stamp", lambda f: f.total),
            Row("pool ready", ours.pool, None, "us", "the last SM sees all tokens in the pool"),
            both("first block", "an L1 block begins", lambda f: f.start),
            both("L1 beside L2", "some SMs in L1 while others are in L2", lambda f: f.overlap),
            both("tail", "first SM without blocks to the last", lambda f: f.tail),
            both("barrier", "last block until all SMs know of it", lambda f: f.barrier),
            both("combine", "first SM that adds up to the last", lambda f: f.combine),
        ]  # fmt: skip
        loads = ours.loads
        if loads is not None:
            rows += [
                Row("first load", loads.first_us, None, "us", "of weights"),
                Row("last load", loads.last_us, None, "us", "the last copy is issued"),
                Row("loads, any SM", loads.any_share, None, "%",
                    "of first to last load: some SM issues copies of weights"),
                Row("loads, an SM", loads.sm_share, None, "%",
                    "of an SM's own first to last load: it does; copies land later still"),
            ]  # fmt: skip
        if recording.overhead is not None:
            rows.append(Row("stamping", recording.overhead, None, "%",
                            f"of the call; the bar is {MAX_OVERHEAD:.0%}"))  # fmt: skip
        return tuple(rows)

    def text(self) -> str:
        """The figures as plain text."""
        lines = [self.measured.name, f"{'':14}{'measured':>12}{'simulated':>12}  difference"]
        for r in self.rows:
            cells = f"{r.text(r.measured):>12}{r.text(r.simulated):>12}"
            lines.append(f"{r.name:14}{cells}  {r.difference:18}{r.about}")
        return "\n".join([*lines, *(f"NOT WHOLE: {fault}" for fault in self.recording.faults())])

    def as_dict(self) -> dict[str, Any]:
        """The figures as plain values."""
        recording = self.recording
        return {
            "name": recording.name,
            "recipe": recording.problem.recipe,
            "num_ctas": recording.num_ctas,
            "num_events": len(recording.events),
            "plain_us": recording.plain_us,
            "traced_us": recording.traced_us,
            "overhead": recording.overhead,
            "faults": list(recording.faults()),
            "figures": [row._asdict() for row in self.rows],
            "provenance": recording.provenance,
        }

    def page(self) -> str:
        """Both timelines on one page, on one clock."""
        title = f"{self.recording.name}: one fused launch, measured and simulated"
        cut = self.prediction.schedule.hardware.launch_us.value
        note = (
            f"Both clocks begin when the launch is on the GPU; the simulator's first {cut:.1f} us, "
            f"the launch itself, are left out. {self.recording.provenance}"
        )
        return page(
            self.measured, self.simulated, title=title, facts=self._facts(), note=note, story=_STORY
        )

    def _facts(self) -> tuple[Fact, ...]:
        rows = {row.name: row for row in self.rows}

        def fact(name: str, label: str, about: str = "") -> Fact | None:
            row = rows.get(name)
            if row is None or row.measured is None:
                return None
            text = about or f"simulated {row.text(row.simulated)}"
            return row.text(row.measured), label, text

        wanted = (
            fact("call", "the call"),
            fact("on the GPU", "first to last stamp"),
            fact("loads, an SM", "issuing weight copies", "of first to last load, mean of SMs"),
            fact("first block", "until the first block"),
            fact("L1 beside L2", "L1 beside L2"),
            fact("tail", "tail"),
            fact("stamping", "cost of stamping", f"of the call; the bar is {MAX_OVERHEAD:.0%}"),
        )
        return tuple(one for one in wanted if one is not None)


_STORY = (
    (
        "Two pictures, one clock",
        "The upper chart is a launch as it ran: every role of every CTA stamped the GPU's clock. "
        "The lower one is what the simulator expected of the same tokens, experts and tiles. "
        "Where they differ, either the model or the kernel has something to learn. Under the "
        "measured SMs stands how many of them issue copies of weights: in decode that stream is "
        "the work, and a dent in it is lost time.",
    ),
)


def _simulated(recording: Recording, hw: Hardware) -> Prediction:
    """The recording's own launch: its tile on its CTAs, all of L1, then all of L2."""
    p, tile = recording.problem, recording.tile or _tile_of_sizes(recording)
    how = numerics("hopper", p.recipe)
    return simulate(fused_schedule(p, hw, how, tile, recording.ctas_per_rank), recording.counts)


def _tile_of_sizes(recording: Recording) -> GemmSwapAb:
    """The tile of a file that has its sizes alone."""
    slabs = recording.block_n // (SLAB * WARPGROUPS)
    shape = Shape(recording.block_m, slabs, recording.block_k // K_BLOCK)
    tile = hopper.tile_of(recording.problem.recipe, shape)
    assert isinstance(tile, GemmSwapAb)
    return replace(tile, num_stages=recording.num_stages) if recording.num_stages else tile


def _later(line: Timeline, from_us: float) -> Timeline:
    """The timeline from a moment on, which becomes its zero."""
    spans = tuple(
        s._replace(start_us=max(s.start_us - from_us, 0.0), end_us=s.end_us - from_us)
        for s in line.spans
        if s.end_us > from_us
    )
    return replace(line, spans=spans)


def timelines_json(lines: Sequence[Timeline]) -> str:
    """Timelines as plain values: spans are rows in the order of the fields."""
    drawn = [
        {
            "name": line.name,
            "source": line.source,
            **({"note": line.note} if line.note else {}),
            "num_ranks": line.num_ranks,
            "num_sms": line.num_sms,
            "fields": Span._fields,
            "spans": [_rounded(span) for span in line.spans],
        }
        for line in lines
    ]
    return json.dumps(drawn, separators=(",", ":")) + "\n"


def _rounded(span: Sequence[Any]) -> list[Any]:
    return [round(value, 3) if isinstance(value, float) else value for value in span]

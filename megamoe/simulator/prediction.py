"""Prediction: what a simulated call costs, and how close that is to the floor."""

from __future__ import annotations

from dataclasses import dataclass

from megamoe.planner.floor import Floor
from megamoe.simulator.sample import Counts
from megamoe.simulator.schedule import Schedule
from megamoe.simulator.timeline import Summary, Timeline


@dataclass(frozen=True, slots=True)
class Usage:
    """Work done over what the resource could have done in the same time, mean over ranks."""

    tensor: float
    hbm: float
    nvlink: float  # inbound


@dataclass(frozen=True, slots=True, repr=False)
class Prediction:
    """One simulated call."""

    schedule: Schedule
    counts: Counts
    timeline: Timeline
    summary: Summary
    floor: Floor  # of the rank that the counts load most
    usage: Usage
    steps: tuple[tuple[str, float], ...]  # parts of the call one after the other, us

    @property
    def time_us(self) -> float:
        """The predicted time of the call."""
        return self.summary.total_us

    @property
    def exposed_us(self) -> float:
        """Communication that nothing hides, mean over SMs."""
        return self.summary.exposed_us

    @property
    def exposed_share(self) -> float:
        """The same as a share of the call."""
        return self.exposed_us / self.time_us

    @property
    def note(self) -> str:
        """What must be said beside the time; "" where the model was held against own launches."""
        return self.schedule.note

    def step(self, name: str) -> float:
        """Time of one part of the call; 0 if it has none of that name."""
        return sum(us for step, us in self.steps if step == name)

    def __repr__(self) -> str:
        label = f", {self.schedule.label}" if self.schedule.study else ""
        return f"Prediction({self.schedule.name}: {self.time_us:,.1f} us, simulated{label})"

    def __str__(self) -> str:
        s, u = self.summary, self.usage
        names = ("tensor cores", "HBM", "NVLink in")
        use = ", ".join(
            f"{n} {v:.0%}" for n, v in zip(names, (u.tensor, u.hbm, u.nvlink), strict=True)
        )
        how = self.schedule
        rows = [text for text in (how.label, self.note) if text]
        rows += [
            f"predicted  {self.time_us:>11,.1f} us  simulated: {how.mode} on {how.hardware.label}",
            f"floor      {self.floor.time_us:>11,.1f} us  set by {self.floor.bound}; "
            f"the call takes {self.time_us / self.floor.time_us:.2f} times that"
            if self.floor.time_us
            else "floor              0.0 us  no rows",
            f"exposed    {s.exposed_us:>11,.1f} us  of communication ({self.exposed_share:.1%})",
            f"tail       {s.tail_us:>11,.1f} us  SMs without work before the last block ends",
            f"imbalance  {s.imbalance:>11.2f}     busiest rank over the mean",
            f"used       {use}",
            "steps      " + ", ".join(f"{name} {us:,.1f}" for name, us in self.steps) + " us",
        ]
        return "\n".join(rows)

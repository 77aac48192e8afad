"""Small values that a plan is made of: choices with reasons, and the shared-memory sum."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

Value = int | str | bool | None


@dataclass(frozen=True, slots=True)
class Choice:
    """One decision of a plan, in the words that `print(plan)` shows."""

    name: str
    value: Value
    why: str


class Term(NamedTuple):
    """One summand of the shared-memory budget."""

    name: str
    num_bytes: int
    why: str


@dataclass(frozen=True, slots=True)
class SharedMemory:
    """The budget of one CTA as a named sum: fixed + num_stages * stage <= limit (A026)."""

    fixed: tuple[Term, ...]
    stage: tuple[Term, ...]
    num_stages: int
    limit: int

    @property
    def fixed_bytes(self) -> int:
        """What does not grow with the stages."""
        return sum(term.num_bytes for term in self.fixed)

    @property
    def stage_bytes(self) -> int:
        """What one stage costs."""
        return sum(term.num_bytes for term in self.stage)

    @property
    def num_bytes(self) -> int:
        """The whole sum."""
        return self.fixed_bytes + self.num_stages * self.stage_bytes

    def __str__(self) -> str:
        rows = [f"  {t.name:<20}{t.num_bytes:>9,}  {t.why}" for t in self.fixed]
        rows += [
            f"  {t.name:<20}{t.num_bytes:>9,}  x {self.num_stages} stages; {t.why}"
            for t in self.stage
        ]
        return "\n".join([*rows, f"  {'total':<20}{self.num_bytes:>9,}  of {self.limit:,}"])
